"""Compute a column of four elements per thread.

In `shared_tile` every multiply-add reads two floats from shared memory. A thread that computes four elements of one
column of C reads an element of B once, into a variable, and uses it four times. The sums are in `acc`, a local array,
which lives in registers. It holds no zeros at first.

A block of 64 threads computes a tile of 16 x 16 elements of C, in steps of 4 along K. The copies are written for you.
M and N are multiples of 16, K of 4.
"""

from numba import cuda, float32

from ..record import Puzzle

BM, BN, BK = 16, 16, 4  # the block's tile of C is BM x BN; a step along K is BK
TM = 4  # rows of C per thread


@cuda.jit
def thread_column(a, b, c):
    a_tile = cuda.shared.array((BM, BK), float32)
    b_tile = cuda.shared.array((BK, BN), float32)
    t = cuda.threadIdx.x
    block_row = cuda.blockIdx.y * BM
    block_col = cuda.blockIdx.x * BN
    row = t // BN * TM  # of this thread's first element within the block's tile: rows row to row + TM - 1
    col = t % BN
    acc = cuda.local.array(TM, float32)
    # begin: zeros into acc
    for i in range(TM):
        acc[i] = float32(0)
    # end
    for k0 in range(0, a.shape[1], BK):
        a_tile[t // BK, t % BK] = a[block_row + t // BK, k0 + t % BK]
        b_tile[t // BN, t % BN] = b[k0 + t // BN, block_col + t % BN]
        cuda.syncthreads()
        # begin: products into acc, for each p
        for p in range(BK):
            b_value = b_tile[p, col]
            for i in range(TM):
                acc[i] += a_tile[row + i, p] * b_value
        # end
        cuda.syncthreads()
    # begin: write acc to C
    for i in range(TM):
        c[block_row + row + i, block_col + col] = acc[i]
    # end


PUZZLE = Puzzle(
    idea="a column of C per thread",
    shapes={"a": "M, K", "b": "K, N", "c": "M, N"},
    grid="N/16, M/16",
    block="64",
    cases=({"M": 16, "N": 16, "K": 8}, {"M": 32, "N": 48, "K": 4}),
    limits={"global_floats": "M*N*K/8", "shared_floats": "M*N*K*(1 + 1/TM)", "barriers": "2*K/BK"},
    expected=lambda a, b, c: a @ b,
    hints=(
        "Three parts: zeros into acc; for each p of the tile, products into all elements of acc; acc to C.",
        "For each p read `b_value = b_tile[p, col]` first. Then element i needs a_tile[row + i, p].",
        "The element of C that belongs to acc[i] is c[block_row + row + i, block_col + col].",
    ),
)
