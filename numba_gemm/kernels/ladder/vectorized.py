"""vectorized: 128-bit accesses to global and shared memory.

Bottleneck before: every copy and every read of A moves 4 bytes per instruction.
Idea: one instruction moves four adjacent elements of a row. A thread copies vectors of four and reads its fragments
    four at a time: those of B along a row, those of A along K, so that one pass over A's rows serves four k-steps. All
    k-steps of a tile are unrolled into straight-line code. With the k-steps in a loop and a check of the edges at every
    copy, it was slower than the same kernel in CUDA C (docs/experiments.md).
Traffic: the same bytes; global memory and A's fragments take a quarter of the instructions. Operands with odd extents,
    odd strides or unaligned rows are copied by 32-bit accesses instead (``fit`` is ANY); the shared tiles are read as
    vectors either way. Copies of whole tiles (WHOLE) need no check of the edges, which a block would wait for in every
    tile.
Registers and shared memory: TM*TN accumulators, 4*TM floats of A and TN of B; BK*(BM + BN) floats (8 KB at 128x128x8).
Measured: 36.8 TFLOP/s at 4096x4096x4096 on an NVIDIA H200, 0.71 of cuBLAS SGEMM and 1.49 times thread_tile_2d; 128
    registers per thread, 56.3 % of the FMA pipe, 61.5 % excess shared wavefronts.
Limits: bank conflicts: adjacent threads read vectors of B that are TN floats apart, which doubles the wavefronts.
"""

from numba import cuda, float32, uint32

from ...device.store import row_store
from ...device.vector import fetch4, fetch4_any, load4, store4
from ...simulator.switch import hardware_only
from ..stage import vector_copies
from .stage import ANY
from .tile_config import require


def registers(cc):
    """Return the limit of registers per thread for a compute capability: two blocks of 256 threads fit into an SM.

    The package's compiler calls it; Numba itself takes a number.
    """
    return 122 if cc >= (12, 0) else 128  # ptxas for 12.0 spills with a limit of 123 or 128, not with 122


def build(config, fit):
    BM, BN, BK, TM, TN = config.BM, config.BN, config.BK, config.TM, config.TN
    THREADS = config.threads
    A_VECTORS, B_VECTORS = max(BK // 4, 1), max(BN // 4, 1)  # per row of the tiles that are copied
    A_ROWS = THREADS // A_VECTORS  # rows of the A tile that the block copies at a time
    B_ROWS = THREADS // B_VECTORS  # the same for B
    require(
        config,
        {
            "BK % 4 == 0": BK % 4 == 0,
            "TN is 4, 8 or 16": TN in (4, 8, 16),
            **vector_copies(config),
        },
    )
    fetch = (fetch4_any, fetch4, load4)[fit]  # ANY, ALIGNED, WHOLE
    store_row = row_store(TN, 4, fit != ANY)

    @cuda.jit(**hardware_only(max_registers=registers))
    def vectorized(alpha, a, b, beta, c):
        a_tile = cuda.shared.array((BM, BK), float32, alignment=16)
        b_tile = cuda.shared.array((BK, BN), float32, alignment=16)
        k = a.shape[1]
        tid = uint32(cuda.threadIdx.x)
        block_row = cuda.blockIdx.y * BM
        block_col = cuda.blockIdx.x * BN
        a_row, a_col = tid // A_VECTORS, tid % A_VECTORS * 4
        b_row, b_col = tid // B_VECTORS, tid % B_VECTORS * 4
        row = tid // (BN // TN) * TM  # this thread's first element within the block tile
        col = tid % (BN // TN) * TN

        a_frag = cuda.local.array((TM, BK), float32)
        b_frag = cuda.local.array(TN, float32)
        acc = cuda.local.array((TM, TN), float32)
        for i in range(TM):
            for j in range(TN):
                acc[i, j] = float32(0)

        k0 = 0
        while k0 < k:
            for i in range(0, BM, A_ROWS):
                store4(a_tile, a_row + i, a_col, fetch(a, block_row + a_row + i, k0 + a_col))
            for i in range(0, BK, B_ROWS):
                store4(b_tile, b_row + i, b_col, fetch(b, k0 + b_row + i, block_col + b_col))
            cuda.syncthreads()  # all threads have written the tiles before any reads them
            for p in range(0, BK, 4):  # unrolled, since a_frag is indexed by it
                for i in range(TM):
                    values = load4(a_tile, row + i, p)
                    a_frag[i, p], a_frag[i, p + 1], a_frag[i, p + 2], a_frag[i, p + 3] = values
                for q in range(p, p + 4):
                    for j in range(0, TN, 4):
                        b_frag[j], b_frag[j + 1], b_frag[j + 2], b_frag[j + 3] = load4(b_tile, q, col + j)
                    for i in range(TM):
                        for j in range(TN):
                            acc[i, j] += a_frag[i, q] * b_frag[j]
            cuda.syncthreads()  # all threads have read the tiles before any overwrites them
            k0 += BK

        for i in range(TM):
            store_row(c, block_row + row + i, block_col + col, alpha, acc, i, beta)

    return vectorized
