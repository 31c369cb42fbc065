"""Compute a tile of 4 x 4 elements per thread, by outer products.

For each p a thread reads 4 elements of A and 4 of B into local arrays, the fragments, and multiplies each of the one by
each of the other: 16 multiply-adds for 8 floats. In NumPy: `acc += np.outer(a_frag, b_frag)`.

A block of 64 threads computes a tile of 32 x 32 elements of C, in steps of 4 along K. M and N are multiples of 32, K
of 4.
"""

from numba import cuda, float32

from ..record import Puzzle

BM, BN, BK = 32, 32, 4  # the block's tile of C is BM x BN; a step along K is BK
TM, TN = 4, 4  # rows and columns of C per thread
THREADS = 64


@cuda.jit
def thread_tile(a, b, c):
    a_tile = cuda.shared.array((BM, BK), float32)
    b_tile = cuda.shared.array((BK, BN), float32)
    t = cuda.threadIdx.x
    block_row = cuda.blockIdx.y * BM
    block_col = cuda.blockIdx.x * BN
    row = t // (BN // TN) * TM  # of this thread's first element within the block's tile
    col = t % (BN // TN) * TN
    a_frag = cuda.local.array(TM, float32)
    b_frag = cuda.local.array(TN, float32)
    acc = cuda.local.array((TM, TN), float32)
    for i in range(TM):
        for j in range(TN):
            acc[i, j] = float32(0)
    for k0 in range(0, a.shape[1], BK):
        for e in range(t, BM * BK, THREADS):  # two elements of each tile per thread
            a_tile[e // BK, e % BK] = a[block_row + e // BK, k0 + e % BK]
            b_tile[e // BN, e % BN] = b[k0 + e // BN, block_col + e % BN]
        cuda.syncthreads()
        for p in range(BK):
            # begin: fill the fragments, add their outer product to acc
            for i in range(TM):
                a_frag[i] = a_tile[row + i, p]
            for j in range(TN):
                b_frag[j] = b_tile[p, col + j]
            for i in range(TM):
                for j in range(TN):
                    acc[i, j] += a_frag[i] * b_frag[j]
            # end
        cuda.syncthreads()
    # begin: write acc to C
    for i in range(TM):
        for j in range(TN):
            c[block_row + row + i, block_col + col + j] = acc[i, j]
    # end


PUZZLE = Puzzle(
    idea="a tile of C per thread, in registers",
    shapes={"a": "M, K", "b": "K, N", "c": "M, N"},
    grid="N/32, M/32",
    block="64",
    cases=({"M": 32, "N": 32, "K": 8}, {"M": 64, "N": 96, "K": 4}),
    limits={"global_floats": "M*N*K/16", "shared_floats": "M*N*K*(1/TM + 1/TN)", "barriers": "2*K/BK"},
    expected=lambda a, b, c: a @ b,
    hints=(
        "Three loops for each p: fill a_frag, fill b_frag, and two nested loops that add their products to acc.",
        "a_frag[i] is a_tile[row + i, p], and b_frag[j] is b_tile[p, col + j].",
        "The nested loops do `acc[i, j] += a_frag[i] * b_frag[j]`. acc[i, j] belongs to row block_row + row + i and "
        "column block_col + col + j of C.",
    ),
)
