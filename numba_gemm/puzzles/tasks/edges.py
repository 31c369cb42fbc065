"""Fill the edges of a tile with zeros.

The same product for every M, N and K. Where a tile reaches beyond a matrix, put zeros into it: they add nothing to a
sum, so the loop over the tile stays as it is. All threads of a block copy and wait at the barriers, those outside of C
too; only the last line is for threads inside. Complete the kernel, which is correct for multiples of 8 only.
"""

from numba import cuda, float32

from ..record import Puzzle

T = 8  # extent of a tile, and of a block


@cuda.jit
def edges(a, b, c):
    a_tile = cuda.shared.array((T, T), float32)
    b_tile = cuda.shared.array((T, T), float32)
    m, n = c.shape
    k = a.shape[1]
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    row = cuda.blockIdx.y * T + ty
    col = cuda.blockIdx.x * T + tx
    acc = float32(0)
    for k0 in range(0, k, T):
        # begin
        #: a_tile[ty, tx] = a[row, k0 + tx]
        #: b_tile[ty, tx] = b[k0 + ty, col]
        if row < m and k0 + tx < k:
            a_tile[ty, tx] = a[row, k0 + tx]
        else:
            a_tile[ty, tx] = float32(0)
        if k0 + ty < k and col < n:
            b_tile[ty, tx] = b[k0 + ty, col]
        else:
            b_tile[ty, tx] = float32(0)
        # end
        cuda.syncthreads()
        for p in range(T):
            acc += a_tile[ty, p] * b_tile[p, tx]
        cuda.syncthreads()
    # begin
    #: c[row, col] = acc
    if row < m and col < n:
        c[row, col] = acc
    # end


PUZZLE = Puzzle(
    idea="zeros beyond the edges",
    shapes={"a": "M, K", "b": "K, N", "c": "M, N"},
    grid="ceil(N/8), ceil(M/8)",
    block="8, 8",
    cases=({"M": 5, "N": 9, "K": 11}, {"M": 8, "N": 8, "K": 3}, {"M": 13, "N": 9, "K": 11}),
    limits={"global_floats": "K*(M*ceil(N/T) + N*ceil(M/T))", "barriers": "2*ceil(K/T)"},
    expected=lambda a, b, c: a @ b,
    hints=(
        "Three lines need a condition, and each another one: a[row, k0 + tx] exists if row < m and k0 + tx < k.",
        "A thread outside of C must not return early: others wait for it at the barrier. It copies what it can.",
        "Where the element does not exist, the tile gets `float32(0)`: an `else` for each of the two copies.",
    ),
)
