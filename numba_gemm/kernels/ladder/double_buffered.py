"""double_buffered: the next tile is loaded while the current one is multiplied.

Bottleneck before: a block waits for global memory at the start of every tile, and at two barriers per tile.
Idea: two buffers for each shared tile. The loads of the next tile are issued into registers before the multiply-adds of
    the current tile. Afterwards they are stored to the buffer that no thread reads, and one barrier ends the tile. A
    prologue fills the first buffer; the last tile is multiplied after the loop. A k-step's products are formed column
    by column, for which the compiler finds registers with fewer register-bank conflicts. docs/experiments.md compares
    it with the same kernel in CUDA C.
Traffic: the same.
Registers and shared memory: TM*TN accumulators, TM + TN fragments, and BK*(BM + BN)/threads staged floats; 2*BK*(BM +
    BN) floats (16 KB at 128x128x8).
Measured: 48.5 TFLOP/s at 4096x4096x4096 on an NVIDIA H200, 0.94 of cuBLAS SGEMM and 1.12 times conflict_free; 128
    registers per thread, 74.7 % of the FMA pipe, 0.0 % excess shared wavefronts.
Limits: 128 registers per thread, which leave the compiler few to read fragments ahead of their multiply-adds; and one
    instruction in nine is not a multiply-add.
"""

from numba import cuda, float32, uint32

from ...device.store import row_store
from ...device.vector import fetch4, fetch4_any, load4, store4, store4_down
from ...simulator.switch import device_function, hardware_only
from ..stage import vector_copies
from .stage import ANY
from .tile_config import require

REGISTERS = 128  # per thread, for two blocks of 256 threads per SM
HALF_WARP = 16  # lanes that store k = 0..3 in one transposing store; the others store k = 4..7


def build(config, fit):
    BM, BN, BK, TM, TN = config.BM, config.BN, config.BK, config.TM, config.TN
    THREADS = config.threads
    A_VECTORS, B_VECTORS = max(BK // 4, 1), max(BN // 4, 1)  # per row of the tiles that are copied
    A_ROWS = THREADS // A_VECTORS  # rows of A that the block copies at a time
    B_ROWS = THREADS // B_VECTORS  # rows of B
    A_SHAPE, B_SHAPE = (2 * BK, BM), (2 * BK, BN)  # the two buffers of a tile are stacked
    A_LOADS, B_LOADS = BM // max(A_ROWS, 1), BK // max(B_ROWS, 1)  # vectors that each thread stages
    require(
        config,
        {
            "quadrants of 4x4: TM == TN == 8": TM == TN == 8,
            "BK == 8: two groups of four k": BK == 8,
            "quadrants keep the swizzle: BM % 64 == 0": BM % 64 == 0,
            **vector_copies(config),
            "two buffers: slots == 2": config.slots == 2,
        },
    )
    fetch = (fetch4_any, fetch4, load4)[fit]  # ANY, ALIGNED, WHOLE
    store_row = row_store(TN, BN // 2, fit != ANY)

    @device_function
    def multiply_tile(a_tile, b_tile, buffer, a_place, col, acc):
        """Add the products of the tiles in the rows from `buffer` on."""
        a_frag = cuda.local.array(TM, float32)
        b_frag = cuda.local.array(TN, float32)
        for p in range(BK):  # unrolled, since a_place is indexed by it
            a_frag[0], a_frag[1], a_frag[2], a_frag[3] = load4(a_tile, buffer + p, a_place[p])
            a_frag[4], a_frag[5], a_frag[6], a_frag[7] = load4(a_tile, buffer + p, a_place[p] + BM // 2)
            b_frag[0], b_frag[1], b_frag[2], b_frag[3] = load4(b_tile, buffer + p, col)
            b_frag[4], b_frag[5], b_frag[6], b_frag[7] = load4(b_tile, buffer + p, col + BN // 2)
            for j in range(TN):
                for i in range(TM):
                    acc[i, j] += a_frag[i] * b_frag[j]

    @cuda.jit(**hardware_only(max_registers=None if fit == ANY else REGISTERS))
    def double_buffered(alpha, a, b, beta, c):
        a_tile = cuda.shared.array(A_SHAPE, float32, alignment=16)
        b_tile = cuda.shared.array(B_SHAPE, float32, alignment=16)
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

        a_next = cuda.local.array((A_LOADS, 4), float32)
        b_next = cuda.local.array((B_LOADS, 4), float32)
        a_place = cuda.local.array(BK, uint32)  # A's columns where this thread's fragments begin
        for p in range(BK):
            a_place[p] = row ^ (p // 4 * HALF_WARP)
        acc = cuda.local.array((TM, TN), float32)
        for i in range(TM):
            for j in range(TN):
                acc[i, j] = float32(0)

        for i in range(A_LOADS):
            values = fetch(a, block_row + a_row + i * A_ROWS, a_col)
            store4_down(a_tile, a_col, (a_row + i * A_ROWS) ^ a_swizzle, values)
        for i in range(B_LOADS):
            store4(b_tile, b_row + i * B_ROWS, b_col, fetch(b, b_row + i * B_ROWS, block_col + b_col))
        buffer = uint32(0)  # first row of the tiles that are read
        cuda.syncthreads()  # all threads have written the first tiles before any reads them

        k0 = BK
        while k0 < k:
            for i in range(A_LOADS):
                values = fetch(a, block_row + a_row + i * A_ROWS, k0 + a_col)
                a_next[i, 0], a_next[i, 1], a_next[i, 2], a_next[i, 3] = values
            for i in range(B_LOADS):
                values = fetch(b, k0 + b_row + i * B_ROWS, block_col + b_col)
                b_next[i, 0], b_next[i, 1], b_next[i, 2], b_next[i, 3] = values
            multiply_tile(a_tile, b_tile, buffer, a_place, col, acc)
            buffer = uint32(buffer ^ BK)
            for i in range(A_LOADS):
                values = (a_next[i, 0], a_next[i, 1], a_next[i, 2], a_next[i, 3])
                store4_down(a_tile, buffer + a_col, (a_row + i * A_ROWS) ^ a_swizzle, values)
            for i in range(B_LOADS):
                values = (b_next[i, 0], b_next[i, 1], b_next[i, 2], b_next[i, 3])
                store4(b_tile, buffer + b_row + i * B_ROWS, b_col, values)
            # all threads have written the next tiles before any reads them, and have read this tile before the next
            # iteration overwrites it
            cuda.syncthreads()
            k0 += BK
        multiply_tile(a_tile, b_tile, buffer, a_place, col, acc)

        for i in range(TM):
            c_row = block_row + row + i // 4 * (BM // 2) + i % 4
            store_row(c, c_row, block_col + col, alpha, acc, i, beta)

    return double_buffered
