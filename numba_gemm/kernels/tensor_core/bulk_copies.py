"""bulk_copies: one thread requests a slot, and the hardware copies it.

Bottleneck before: fetching a slot takes 128 threads about a hundred instructions, and registers in transit.
Idea: the parts are stored in memory in the layout of a slot, so one instruction per part and operand copies a run of
    bytes. One thread issues it and announces the number of bytes to a barrier, where all threads wait for them.
Traffic: as before.
Registers and shared memory: as before, plus a barrier of eight bytes.
Measured: 113.9 TFLOP/s of bf16x6 at 4096x4096x4096 on an NVIDIA H200, 2.27 of cuBLAS SGEMM, in turns and 1.43 times
    one_warpgroup, decomposition not counted; 90 registers per thread; of positive operands the median error over |A|
    @ |B| is 1.5e-05.
Limits: nothing is copied while the tensor cores multiply, and nothing is multiplied while copies are in flight.
"""

from numba import cuda, float32, int64, uint32

from ...device import mbarrier, wgmma
from ...simulator.switch import hardware_only
from ..stage import require
from .pipeline import first_slot, group_store, slot_copies, slot_products


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
    SLOT = config.slot_bytes(precision)
    COLUMN_GROUPS = BN // 8
    fetch, wait = slot_copies(config, precision), wgmma.waiting(BN)
    products = slot_products(config, precision, precision.products, fresh=False)
    store = group_store(BN)

    @cuda.jit(**hardware_only(launch_bounds=(config.threads, 1)))
    def bulk_copies(alpha, a, b, beta, c):
        memory = cuda.shared.array(0, float32, alignment=128)
        start = first_slot(memory)
        full = uint32(start + SLOT)
        tid = uint32(cuda.threadIdx.x)
        k_slots = uint32(a.shape[0] // PARTS)
        block_row, block_col = int64(cuda.blockIdx.y) * BM, int64(cuda.blockIdx.x) * BN
        if tid == uint32(0):
            mbarrier.initialise(full, uint32(1))
            mbarrier.initialised()

        acc = cuda.local.array((COLUMN_GROUPS, 4), float32)
        for j in range(COLUMN_GROUPS):
            for q in range(4):
                acc[j, q] = float32(0)
        tile = wgmma.descriptor(start)
        s, parity = uint32(0), uint32(0)
        while s < k_slots:
            cuda.syncthreads()  # the barrier is set up, and the last slot's products are complete, before copies begin
            if tid == uint32(0):
                fetch(start, a, b, s, k_slots, block_row, block_col, full)
            while not mbarrier.ended(full, parity):
                pass
            products(acc, tile, tile, s > uint32(0))
            wait(acc, 0)
            s = uint32(s + 1)
            parity = uint32(parity ^ 1)

        store(c, block_row, block_col, alpha, acc, beta)

    return bulk_copies
