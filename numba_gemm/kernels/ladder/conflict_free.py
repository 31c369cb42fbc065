"""conflict_free: shared tiles laid out so that the lanes of a warp never conflict in a bank.

Bottleneck before: adjacent threads read vectors of B that are TN floats apart. Threads four apart then access the same
    banks, and each read takes twice the wavefronts it needs.
Idea: three changes of layout, none of arithmetic. First, A is transposed on its way to shared memory, so that a
    fragment of either operand is four adjacent floats of a row, read once per k-step. Second, a thread's TM x TN tile
    is divided into quadrants of 4x4, BM/2 and BN/2 apart, so that adjacent threads read adjacent vectors. Third, the
    transposing stores XOR the column with 16 for every other group of four k; otherwise the two halves of a warp would
    access the same 16 banks. Again, all k-steps of a tile are straight-line code. docs/experiments.md compares it with
    the same kernel in CUDA C.
Traffic: the same bytes from shared memory, each access in the fewest wavefronts that its width allows.
Registers and shared memory: TM*TN accumulators, TM + TN fragments; BK*(BM + BN) floats (8 KB at 128x128x8).
Measured: 43.5 TFLOP/s at 4096x4096x4096 on an NVIDIA H200, 0.85 of cuBLAS SGEMM and 1.18 times vectorized; 123
    registers per thread, 66.9 % of the FMA pipe, 0.0 % excess shared wavefronts.
Limits: latency: a block waits for global memory at the start of every tile, and at two barriers per tile.
"""

from numba import cuda, float32, uint32

from ...device.store import row_store
from ...device.vector import fetch4, fetch4_any, load4, store4, store4_down
from ..stage import vector_copies
from .stage import ANY
from .tile_config import require

HALF_WARP = 16  # lanes that store k = 0..3 in one transposing store; the others store k = 4..7


def build(config, fit):
    BM, BN, BK, TM, TN = config.BM, config.BN, config.BK, config.TM, config.TN
    THREADS = config.threads
    A_VECTORS, B_VECTORS = max(BK // 4, 1), max(BN // 4, 1)  # per row of the tiles that are copied
    A_ROWS = THREADS // A_VECTORS  # rows of A that the block copies at a time
    B_ROWS = THREADS // B_VECTORS  # rows of B
    require(
        config,
        {
            "quadrants of 4x4: TM == TN == 8": TM == TN == 8,
            "BK == 8: two groups of four k": BK == 8,
            "quadrants keep the swizzle: BM % 64 == 0": BM % 64 == 0,
            **vector_copies(config),
        },
    )
    fetch = (fetch4_any, fetch4, load4)[fit]  # ANY, ALIGNED, WHOLE
    store_row = row_store(TN, BN // 2, fit != ANY)

    @cuda.jit
    def conflict_free(alpha, a, b, beta, c):
        a_tile = cuda.shared.array((BK, BM), float32, alignment=16)
        b_tile = cuda.shared.array((BK, BN), float32, alignment=16)
        k = a.shape[1]
        tid = uint32(cuda.threadIdx.x)
        block_row = cuda.blockIdx.y * BM
        block_col = cuda.blockIdx.x * BN
        a_row, a_col = tid // A_VECTORS, tid % A_VECTORS * 4
        # XORed into A's column for k = 4..7, so that the halves of a warp store to different banks
        a_swizzle = a_col // 4 * HALF_WARP
        b_row, b_col = tid // B_VECTORS, tid % B_VECTORS * 4
        row = tid // (BN // TN) * 4  # this thread's first quadrant within the block tile
        col = tid % (BN // TN) * 4

        a_place = cuda.local.array(BK, uint32)  # A's columns where this thread's fragments begin
        for p in range(BK):
            a_place[p] = row ^ (p // 4 * HALF_WARP)
        a_frag = cuda.local.array(TM, float32)
        b_frag = cuda.local.array(TN, float32)
        acc = cuda.local.array((TM, TN), float32)
        for i in range(TM):
            for j in range(TN):
                acc[i, j] = float32(0)

        k0 = 0
        while k0 < k:
            for i in range(0, BM, A_ROWS):
                values = fetch(a, block_row + a_row + i, k0 + a_col)
                store4_down(a_tile, a_col, (a_row + i) ^ a_swizzle, values)
            for i in range(0, BK, B_ROWS):
                store4(b_tile, b_row + i, b_col, fetch(b, k0 + b_row + i, block_col + b_col))
            cuda.syncthreads()  # all threads have written the tiles before any reads them
            for p in range(BK):  # unrolled, since a_place is indexed by it
                a_frag[0], a_frag[1], a_frag[2], a_frag[3] = load4(a_tile, p, a_place[p])
                a_frag[4], a_frag[5], a_frag[6], a_frag[7] = load4(a_tile, p, a_place[p] + BM // 2)
                b_frag[0], b_frag[1], b_frag[2], b_frag[3] = load4(b_tile, p, col)
                b_frag[4], b_frag[5], b_frag[6], b_frag[7] = load4(b_tile, p, col + BN // 2)
                for i in range(TM):
                    for j in range(TN):
                        acc[i, j] += a_frag[i] * b_frag[j]
            cuda.syncthreads()  # all threads have read the tiles before any overwrites them
            k0 += BK

        for i in range(TM):
            c_row = block_row + row + i // 4 * (BM // 2) + i % 4
            store_row(c, c_row, block_col + col, alpha, acc, i, beta)

    return conflict_free
