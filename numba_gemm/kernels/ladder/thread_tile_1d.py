"""thread_tile_1d: each thread computes a column of TM elements of C in registers.

Bottleneck before: two floats from shared memory per multiply-add; the bandwidth of shared memory, not arithmetic, sets
    the pace.
Idea: a thread owns TM rows of one column. An element of B, once read into a register, serves TM multiply-adds.
    There are TM times fewer threads than elements of C, so a thread's place in the copies differs from its place in C.
Traffic: BK*(BM + BN) floats per tile from global memory; BM*BN*BK*(1 + 1/TM) reads per tile from shared memory instead
    of 2*BM*BN*BK.
Registers and shared memory: TM accumulators; BK*(BM + BN) floats (4 KB at 64x64x8).
Measured: 15.8 TFLOP/s at 4096x4096x4096 on an NVIDIA H200, 0.31 of cuBLAS SGEMM and 1.85 times shared_tile; 48
    registers per thread, 27.7 % of the FMA pipe, 0.0 % excess shared wavefronts.
Limits: still shared memory, though not alone: one float of A per multiply-add. The compiler reads four along K at once,
    in two wavefronts, so a multiply-add of a warp takes 0.625 wavefronts. There are two barriers per 64 multiply-adds
    of a thread.
"""

from numba import cuda, float32, uint32

from ...device.store import store_axpby1
from ...device.vector import fetch1
from .tile_config import require


def build(config, aligned):
    BM, BN, BK, TM = config.BM, config.BN, config.BK, config.TM
    THREADS = config.threads
    require(
        config,
        {
            "TN == 1": config.TN == 1,
            "one element of A a thread: BM*BK == threads": BM * BK == THREADS,
            "one element of B a thread: BK*BN == threads": BK * BN == THREADS,
        },
    )

    @cuda.jit
    def thread_tile_1d(alpha, a, b, beta, c):
        a_tile = cuda.shared.array((BM, BK), float32, alignment=16)
        b_tile = cuda.shared.array((BK, BN), float32, alignment=16)
        k = a.shape[1]
        tid = uint32(cuda.threadIdx.x)
        block_row = cuda.blockIdx.y * BM
        block_col = cuda.blockIdx.x * BN
        a_row, a_col = tid // BK, tid % BK
        b_row, b_col = tid // BN, tid % BN
        row = tid // BN * TM  # this thread's first element within the block tile
        col = tid % BN

        acc = cuda.local.array(TM, float32)
        for i in range(TM):
            acc[i] = float32(0)

        k0 = 0
        while k0 < k:
            a_tile[a_row, a_col] = fetch1(a, block_row + a_row, k0 + a_col)
            b_tile[b_row, b_col] = fetch1(b, k0 + b_row, block_col + b_col)
            cuda.syncthreads()  # all threads have written the tiles before any reads them
            p = 0
            while p < BK:
                b_value = b_tile[p, col]
                for i in range(TM):
                    acc[i] += a_tile[row + i, p] * b_value
                p += 1
            cuda.syncthreads()  # all threads have read the tiles before any overwrites them
            k0 += BK

        for i in range(TM):
            store_axpby1(c, block_row + row + i, block_col + col, alpha, acc[i], beta)

    return thread_tile_1d
