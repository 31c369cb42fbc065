"""one_warpgroup: tensor cores multiply, from shared memory.

Bottleneck before: FP32 multiply-adds: 128 a clock and multiprocessor, whatever feeds them.
Idea: split each element into narrow parts (`mode`), whose products tensor cores sum, 64 rows at a time, for the four
    warps of a warpgroup together. One thread asks for a slot of tiles, all wait for it, multiply it, and begin anew.
Traffic: a block reads 128 bytes for each part, row and slot of k; 4 bytes an element and part of TF32, 2 of BF16.
Registers and shared memory: the slot's sums and those of all slots, BN / 2 registers each; one slot.
Limits: nothing is copied while the tensor cores work, and nothing multiplied while bytes are on their way.
"""

from numba import cuda, float32, int64, uint32

from ..device import mbarrier, wgmma
from ..device.address import shared_address
from ..device.switch import hardware_only
from ..ladder.stage import require
from .slot import group_store, slot_copies, slot_products
from .stage import ALIGNMENT, TensorStage, WarpgroupConfig


def build(config, form):
    mode = form.mode
    BM, BN, PARTS = config.BM, config.BN, mode.parts
    require(
        config,
        {
            "one warpgroup": config.consumers == 1 and config.producers == 0,
            "no scales": not mode.scaled,
            "no epilogue": form.epilogue is None,
        },
    )
    SLOT = config.slot_bytes(mode)
    COLUMN_GROUPS = BN // 8
    fetch, wait = slot_copies(config, mode), wgmma.waiting(BN)
    products = slot_products(config, mode, mode.products, fresh=True)
    store = group_store(BN)

    @cuda.jit(**hardware_only(launch_bounds=(config.threads, 1)))
    def one_warpgroup(alpha, a, b, beta, c):
        memory = cuda.shared.array(0, float32, alignment=128)
        start = uint32(uint32(shared_address(memory) + (ALIGNMENT - 1)) & uint32(0xFFFFFFFF - (ALIGNMENT - 1)))
        full = uint32(start + SLOT)
        tid = uint32(cuda.threadIdx.x)
        k_slots = uint32(a.shape[0] // PARTS)
        block_row, block_col = int64(cuda.blockIdx.y) * BM, int64(cuda.blockIdx.x) * BN
        if tid == uint32(0):
            mbarrier.initialise(full, uint32(1))
            mbarrier.initialised()

        acc = cuda.local.array((COLUMN_GROUPS, 4), float32)
        total = cuda.local.array((COLUMN_GROUPS, 4), float32)
        for j in range(COLUMN_GROUPS):
            for q in range(4):
                acc[j, q] = float32(0)
                total[j, q] = float32(0)
        tile = wgmma.descriptor(start)
        s, parity = uint32(0), uint32(0)
        while s < k_slots:
            cuda.syncthreads()  # the barrier is set up, and the last slot's products are done, before copies begin
            if tid == uint32(0):
                fetch(start, a, b, s, k_slots, block_row, block_col, full)
            while not mbarrier.ended(full, parity):
                pass
            products(acc, tile, tile, False)
            wait(acc, 0)
            for j in range(COLUMN_GROUPS):
                for q in range(4):
                    total[j, q] += acc[j, q]
            s = uint32(s + 1)
            parity = uint32(parity ^ 1)

        store(c, block_row, block_col, alpha, total, beta)

    return one_warpgroup


STAGE = TensorStage(
    name="one_warpgroup",
    summary="one warpgroup fetches and multiplies split operands in turn",
    build=build,
    configs=(WarpgroupConfig(64, 128, max_slots=1),),
)
