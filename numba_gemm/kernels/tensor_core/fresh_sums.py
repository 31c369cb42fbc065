"""fresh_sums: sums leave the tensor cores after each slot.

Bottleneck before: accuracy, not speed. Tensor cores truncate, toward zero, what does not fit into a float of their
    running sum. A long sum therefore drifts, by a relative error that grows with k.
Idea: let the tensor cores sum only one slot of k, starting from zero, and add the result to the total in FP32, which
    rounds to nearest (Ootomo and Yokota, 2022, doi:10.1177/10943420221090256). While one warpgroup adds, the products
    of the other keep the tensor cores busy.
Traffic: as before.
Registers and shared memory: the sums of the slot and the total, BN / 2 registers each; as many slots as fit.
Measured: 137.9 TFLOP/s of bf16x6 at 4096x4096x4096 on an NVIDIA H200, 2.75 of cuBLAS SGEMM, in turns and 0.98 times
    wide_tiles, decomposition not counted; 138 registers per thread; of positive operands the median error over |A| @
    |B| is 8.3e-08.
Limits: each block sets up barriers, waits for its first slots, and stores its tile while its tensor cores idle.
    Instructions show why this stage is no faster than wide_tiles: for each slot, a thread executes 64 additions more,
    beside the same 24 matrix instructions. Its gain is accuracy.
"""

from numba import cuda, float32, int64, uint32

from ...device import mbarrier, wgmma
from ...simulator.switch import hardware_only
from ..stage import require
from .pipeline import first_slot, group_store, slot_copies, slot_products
from .stage import BARRIER_BYTES, GROUP_ROWS, ROW_BYTES, WARPGROUP


def build(config, variant):
    precision = variant.precision
    BM, BN, PARTS = config.BM, config.BN, precision.parts
    require(
        config,
        {
            "one producer": config.producers == 1,
            "no scales": not precision.scaled,
            "no epilogue": variant.epilogue is None,
        },
    )
    SLOTS, CONSUMERS = config.slots(precision), config.consumers
    SLOT = config.slot_bytes(precision)
    COLUMN_GROUPS = BN // 8
    fetch, wait = slot_copies(config, precision), wgmma.waiting(BN)
    products = slot_products(config, precision, precision.products, fresh=True)
    store = group_store(BN)

    @cuda.jit(**hardware_only(launch_bounds=(config.threads, 1)))
    def fresh_sums(alpha, a, b, beta, c):
        memory = cuda.shared.array(0, float32, alignment=128)
        start = first_slot(memory)
        full = uint32(start + SLOTS * SLOT)
        empty = uint32(full + SLOTS * BARRIER_BYTES)
        tid = uint32(cuda.threadIdx.x)
        k_slots = uint32(a.shape[0] // PARTS)
        block_row, block_col = int64(cuda.blockIdx.y) * BM, int64(cuda.blockIdx.x) * BN
        if tid == uint32(0):
            for i in range(SLOTS):
                mbarrier.initialise(uint32(full + i * BARRIER_BYTES), uint32(1))
                mbarrier.initialise(uint32(empty + i * BARRIER_BYTES), uint32(WARPGROUP * CONSUMERS))
            mbarrier.initialised()
        cuda.syncthreads()  # the barriers are set up before any thread waits on them

        s, i = uint32(0), uint32(0)
        if tid < uint32(WARPGROUP):
            parity = uint32(1)  # of the phase before the first, so that all slots count as empty
            while tid == uint32(0) and s < k_slots:
                at, filled = uint32(start + i * SLOT), uint32(full + i * BARRIER_BYTES)
                while not mbarrier.ended(uint32(empty + i * BARRIER_BYTES), parity):
                    pass
                fetch(at, a, b, s, k_slots, block_row, block_col, filled)
                s = uint32(s + 1)
                i = uint32(i + 1)
                if i == uint32(SLOTS):
                    i = uint32(0)
                    parity = uint32(parity ^ 1)
        else:
            group = uint32(tid // WARPGROUP - 1)
            acc = cuda.local.array((COLUMN_GROUPS, 4), float32)
            total = cuda.local.array((COLUMN_GROUPS, 4), float32)
            for j in range(COLUMN_GROUPS):
                for q in range(4):
                    acc[j, q] = float32(0)
                    total[j, q] = float32(0)
            parity = uint32(0)
            while s < k_slots:
                at = uint32(start + i * SLOT)
                while not mbarrier.ended(uint32(full + i * BARRIER_BYTES), parity):
                    pass
                a_tile = wgmma.descriptor(uint32(at + group * uint32(GROUP_ROWS * ROW_BYTES)))
                b_tile = wgmma.descriptor(at)
                products(acc, a_tile, b_tile, False)
                wait(acc, 0)
                mbarrier.arrive(uint32(empty + i * BARRIER_BYTES))  # this thread's products have read the slot
                for j in range(COLUMN_GROUPS):
                    for q in range(4):
                        total[j, q] += acc[j, q]
                s = uint32(s + 1)
                i = uint32(i + 1)
                if i == uint32(SLOTS):
                    i = uint32(0)
                    parity = uint32(parity ^ 1)

            store(c, block_row + int64(group * GROUP_ROWS), block_col, alpha, total, beta)

    return fresh_sums
