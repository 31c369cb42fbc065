"""Let the threads of a warp read neighbouring elements.

The kernel below is correct and slow. A GPU runs the threads of a block in warps of 32, with `threadIdx.x` counting
fastest: threads (0, 0) to (15, 0) and (0, 1) to (15, 1) of this block, as (x, y), are its first warp. Memory moves in
sectors of 32 bytes, which are 8 neighbouring floats of a row. If the 32 threads of a warp read elements of 16 different
rows, 16 sectors move; if they read neighbours in a row, few do.

Change the kernel so that fewer sectors move. M and N are multiples of 16.
"""

from numba import cuda, float32

from ..record import Puzzle


@cuda.jit
def coalesced(a, b, c):
    # begin
    #: row = cuda.blockIdx.y * cuda.blockDim.y + cuda.threadIdx.x
    #: col = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.y
    row = cuda.blockIdx.y * cuda.blockDim.y + cuda.threadIdx.y
    col = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    # end
    acc = float32(0)
    for p in range(a.shape[1]):
        acc += a[row, p] * b[p, col]
    c[row, col] = acc


PUZZLE = Puzzle(
    idea="coalesced accesses",
    shapes={"a": "M, K", "b": "K, N", "c": "M, N"},
    grid="N/16, M/16",
    block="16, 16",
    cases=({"M": 16, "N": 32, "K": 8}, {"M": 32, "N": 32, "K": 8}),
    limits={"global_floats": "2*M*N*K", "sectors": "M*N*(K + 1)/8"},
    expected=lambda a, b, c: a @ b,
    hints=(
        "Threads (0, 0) and (1, 0) are neighbours in a warp. Which elements of B do they read, and how far apart are "
        "these in memory? The rows of a matrix lie one after the other.",
        "Neighbouring threads should differ in the column: let threadIdx.x choose the column and threadIdx.y the row.",
    ),
)
