"""Use two buffers, and one barrier per tile.

`shared_tile` has two barriers per tile, and while a block copies, nobody multiplies. With two buffers the block copies
the next tiles to one buffer while it multiplies those in the other one. Then one barrier per tile is enough: it says
that the next tiles are written, and that nobody reads the previous ones any more.

`a_tile[buffer, ty, tx]` is an element of buffer 0 or 1. The first tiles are copied for you. M, N and K are multiples
of 8.
"""

from numba import cuda, float32

from ..record import Puzzle

T = 8  # extent of a tile, and of a block


@cuda.jit
def two_buffers(a, b, c):
    a_tile = cuda.shared.array((2, T, T), float32)
    b_tile = cuda.shared.array((2, T, T), float32)
    k = a.shape[1]
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    row = cuda.blockIdx.y * T + ty
    col = cuda.blockIdx.x * T + tx
    acc = float32(0)
    buffer = 0  # the one that is multiplied next
    a_tile[0, ty, tx] = a[row, tx]
    b_tile[0, ty, tx] = b[ty, col]
    for k0 in range(0, k, T):
        # begin
        cuda.syncthreads()
        if k0 + T < k:
            a_tile[1 - buffer, ty, tx] = a[row, k0 + T + tx]
            b_tile[1 - buffer, ty, tx] = b[k0 + T + ty, col]
        for p in range(T):
            acc += a_tile[buffer, ty, p] * b_tile[buffer, p, tx]
        buffer = 1 - buffer
        # end
    c[row, col] = acc


PUZZLE = Puzzle(
    idea="two buffers, one barrier per tile",
    shapes={"a": "M, K", "b": "K, N", "c": "M, N"},
    grid="N/8, M/8",
    block="8, 8",
    cases=({"M": 8, "N": 8, "K": 32}, {"M": 16, "N": 24, "K": 16}),
    limits={"global_floats": "2*M*N*K/T", "barriers": "K/T"},
    expected=lambda a, b, c: a @ b,
    hints=(
        "Per step: barrier; copy the next tiles, if there are any, to buffer 1 - buffer; multiply the tiles in "
        "`buffer`; swap.",
        "The barrier comes first. What was copied in the step before is then written, and the buffer that is copied to "
        "next was read in the step before.",
        "The next tiles begin at k0 + T, and exist if k0 + T < k. The swap is `buffer = 1 - buffer`.",
    ),
)
