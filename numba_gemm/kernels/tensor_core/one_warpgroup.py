"""one_warpgroup: a warpgroup multiplies on tensor cores, from shared memory.

Bottleneck before: FP32 multiply-adds: 128 per clock and multiprocessor, however fast their operands arrive.
Idea: decompose each element into narrow parts (`precision`) and multiply the parts on tensor cores. A warpgroup's four
    warps together multiply 64 rows at a time, from a slot of tiles in shared memory. All threads copy the tiles there.
Traffic: a block reads 128 bytes per part, row and slot of k: 4 bytes per element and part for TF32, 2 for BF16.
Registers and shared memory: BN / 2 sums per thread; one slot.
Measured: 79.6 TFLOP/s of bf16x6 at 4096x4096x4096 on an NVIDIA H200, 1.59 of cuBLAS SGEMM, in turns, decomposition
    not counted; 136 registers per thread; of positive operands the median error over |A| @ |B| is 1.5e-05.
Limits: all threads fetch, then all multiply.
"""

from numba import cuda, float32, int64, uint32

from ...device import wgmma
from ...device.address import shared_store4
from ...device.vector import load4
from ...simulator.switch import device_function, hardware_only
from ..stage import require
from .pipeline import first_slot, group_store, slot_products
from .stage import ROW_BYTES, ROW_WORDS, WARPGROUP


def build(config, variant):
    precision = variant.precision
    BM, BN, PARTS = config.BM, config.BN, precision.parts
    require(
        config,
        {
            "one warpgroup": config.consumers == 1 and config.producers == 0,
            "no scales": not precision.scaled,
            "no epilogue": variant.epilogue is None,
        },
    )
    COLUMN_GROUPS = BN // 8
    A_BYTES, B_BYTES = ROW_BYTES * BM, ROW_BYTES * BN  # per part of a tile
    wait = wgmma.waiting(BN)
    products = slot_products(config, precision, precision.products, fresh=False)
    store = group_store(BN)

    def copies(count):
        """Make a device function for a thread's share of copying `count` bytes of a part's row, from `col` on."""
        TURNS = count // (16 * WARPGROUP)

        @device_function
        def copy(memory, to, x, row, col):
            tid = uint32(cuda.threadIdx.x)
            for i in range(TURNS):
                four = load4(x, row, col + 4 * (i * WARPGROUP + int64(tid)))
                shared_store4(memory, uint32(to + uint32(16) * uint32(i * WARPGROUP + tid)), four)

        return copy

    copy_a, copy_b = copies(A_BYTES), copies(B_BYTES)

    @cuda.jit(**hardware_only(launch_bounds=(config.threads, 1)))
    def one_warpgroup(alpha, a, b, beta, c):
        memory = cuda.shared.array(0, float32, alignment=128)
        start = first_slot(memory)
        k_slots = uint32(a.shape[0] // PARTS)
        block_row, block_col = int64(cuda.blockIdx.y) * BM, int64(cuda.blockIdx.x) * BN
        acc = cuda.local.array((COLUMN_GROUPS, 4), float32)
        for j in range(COLUMN_GROUPS):
            for q in range(4):
                acc[j, q] = float32(0)
        tile = wgmma.descriptor(start)
        s = uint32(0)
        while s < k_slots:
            for p in range(PARTS):
                row = int64(p * k_slots + s)
                copy_a(memory, uint32(start + p * A_BYTES), a, row, block_row * ROW_WORDS)
                copy_b(memory, uint32(start + (PARTS * A_BYTES + p * B_BYTES)), b, row, block_col * ROW_WORDS)
            wgmma.show_stores()
            cuda.syncthreads()  # all threads have stored their share before products read it
            products(acc, tile, tile, s > uint32(0))
            wait(acc, 0)
            cuda.syncthreads()  # all products are complete before the next slot is stored
            s = uint32(s + 1)

        store(c, block_row, block_col, alpha, acc, beta)

    return one_warpgroup
