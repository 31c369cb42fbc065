"""Give every warp a square tile.

A block of 128 threads, 4 warps, computes 32 x 32 elements of C. In `thread_tile` the first warp had 16 rows and all 32
columns. Let each warp compute a square of 16 x 16 elements instead. A square needs fewer elements of A and B for as
many of C: 16 rows and 16 columns here. Warp 0 is at the upper left, warp 1 at the upper right, warp 2 at the lower
left, warp 3 at the lower right.

Within its warp tile, a lane (a thread of a warp) computes 4 rows and 2 columns: 8 lanes side by side, 4 rows of lanes.
Lanes 0 to 7 are the upper ones. Only the place of a thread's elements is missing. M and N are multiples of 32, K of 4.
"""

from numba import cuda, float32

from ..record import Puzzle

BM, BN, BK = 32, 32, 4  # the block's tile of C is BM x BN; a step along K is BK
BK_PAD = BK + 1  # columns of A's tile, the last one unused, against bank conflicts
WM, WN = 16, 16  # the warp's tile
TM, TN = 4, 2  # the thread's tile


@cuda.jit
def warp_tile(a, b, c):
    a_tile = cuda.shared.array((BM, BK_PAD), float32)
    b_tile = cuda.shared.array((BK, BN), float32)
    t = cuda.threadIdx.x
    block_row = cuda.blockIdx.y * BM
    block_col = cuda.blockIdx.x * BN
    # begin
    #: row = ...  # your code: of this thread's first element within the block's tile
    #: col = ...  # your code
    warp, lane = t // 32, t % 32
    row = warp // 2 * WM + lane // 8 * TM
    col = warp % 2 * WN + lane % 8 * TN
    # end
    acc = cuda.local.array((TM, TN), float32)
    for i in range(TM):
        for j in range(TN):
            acc[i, j] = float32(0)
    for k0 in range(0, a.shape[1], BK):
        a_tile[t // BK, t % BK] = a[block_row + t // BK, k0 + t % BK]
        b_tile[t // BN, t % BN] = b[k0 + t // BN, block_col + t % BN]
        cuda.syncthreads()
        for p in range(BK):
            for j in range(TN):
                b_value = b_tile[p, col + j]
                for i in range(TM):
                    acc[i, j] += a_tile[row + i, p] * b_value
        cuda.syncthreads()
    for i in range(TM):
        for j in range(TN):
            c[block_row + row + i, block_col + col + j] = acc[i, j]


def owner(row, col):
    """Return the thread of a block that computes an element of the block's tile."""
    row, col = row % BM, col % BN
    warp = row // WM * 2 + col // WN
    return 32 * warp + row % WM // TM * 8 + col % WN // TN


PUZZLE = Puzzle(
    idea="tiles of warps",
    shapes={"a": "M, K", "b": "K, N", "c": "M, N"},
    grid="N/32, M/32",
    block="128",
    cases=({"M": 32, "N": 32, "K": 4}, {"M": 64, "N": 96, "K": 4}),
    limits={"global_floats": "M*N*K/16", "barriers": "2*K/BK"},
    expected=lambda a, b, c: a @ b,
    owner=owner,
    hints=(
        "Begin with the number of the warp, t // 32, and of the lane, t % 32.",
        "The warp's tile begins at row warp // 2 * WM and column warp % 2 * WN of the block's tile.",
        "Within it the lane's tile begins at row lane // 8 * TM and column lane % 8 * TN. Add the two.",
    ),
)
