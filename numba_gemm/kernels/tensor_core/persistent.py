"""persistent: blocks that compute several tiles, and sums that keep their last bits.

Bottleneck before: each block sets up barriers, waits for its first slots, and stores its tile while its tensor cores
    idle. In sums of one sign, the truncation that remains adds up.
Idea: as many blocks as the GPU has multiprocessors, each of which computes one tile after another. Tiles are visited in
    groups of rows, so that those computed at the same time share operands in the L2 cache; blocks keep in step, so that
    they do (`pacing`). The next tile's slots are fetched while the current tile is stored. What the addition of a
    slot's sum rounds off is added to the next sum (`accumulate`); while one warpgroup adds sums, another multiplies
    (`pipeline.alternation`). Where rows of tiles are even in number, two blocks with tiles of the same columns form a
    cluster, and each copies half of B's tile for both. A result of NaN or infinity may be an artefact of the parts, so
    it is determined from the original operands (`special_values`). If there are few tiles, or the last ones do not fill
    the GPU, several blocks share the sums of each: this kernel computes partial sums, and a second one adds them
    (`split_k`).
Traffic: as before, mostly from the L2 cache, whose requests blocks in clusters reduce by a quarter to a third.
Registers and shared memory: two sums of a warpgroup's tile, or three (`accumulate`), in registers that the producer
    warpgroup does not need, 240 per thread; as many slots as fit.
Measured: 141.7 TFLOP/s of bf16x6 at 4096x4096x4096 on an NVIDIA H200, 2.82 of cuBLAS SGEMM, in turns and 1.03 times
    fresh_sums, decomposition not counted; 168 registers per thread; of positive operands the median error over |A| @
    |B| is 3.1e-08.
Limits: the power limit, under which clocks fall. At 8192 cubed, two thirds of the energy are of the matrix
    instructions, with their reads of shared memory; copies take 10 % (`numba-gemm lab energy`). For each slot, a thread
    executes 192 additions, three times those of fresh_sums, beside 24 matrix instructions.
"""

from numba import cuda, float32, int32, int64, uint32

from ...device import cluster, mbarrier, registers
from ...device.grid_order import let_next_start, wait_for_last
from ...device.units import WARP
from ...simulator.switch import device_function, hardware_only
from ..stage import require
from .accumulate import tile_sums
from .epilogue import of_batch, place, sums_store
from .pacing import pace
from .pipeline import alternation, barriers_to_tell, first_slot, last_arrivals, ring, slot_copies
from .split_k import share
from .stage import BARRIER_BYTES, GROUP_ROWS, LEFT, WARPGROUP


def build(config, variant, copies=slot_copies, sums=tile_sums):
    """Make the kernel; an experiment passes other `copies` and `sums`, to find what each costs."""
    precision, BM, BN, PARTS = variant.precision, config.BM, config.BN, variant.precision.parts
    require(
        config,
        {
            "one producer": config.producers == 1,
            "BN <= 128, or one product": BN <= 128 or PARTS == 1,
            "two slots or more": config.slots(precision) >= 2,  # one is awaited before the other is given back
        },
    )
    SLOTS, CONSUMERS, SLOT = config.slots(precision), config.consumers, config.slot_bytes(precision)
    COLUMN_GROUPS, CLAIM = BN // 8, config.claim
    fetch, sum_tile = copies(config, precision, shared=True), sums(config, precision)
    store, keep_in_step = sums_store(variant, COLUMN_GROUPS), pace(SLOTS)
    (_, following), await_all = ring(SLOTS), last_arrivals(SLOTS)
    begin_alternation, _, _, end_alternation = alternation(config, precision)

    @device_function
    def run(alpha, a, b, beta, c, x, y, steps, vectors):
        a, b, c, x, y = member(a, b, c, x, y, steps)
        memory = cuda.shared.array(0, float32, alignment=128)
        start = first_slot(memory)
        full = uint32(start + SLOTS * SLOT)
        empty = uint32(full + SLOTS * BARRIER_BYTES)
        tid = uint32(cuda.threadIdx.x)
        k_slots = uint32(a.shape[0] // PARTS)
        rows, cols = uint32((c.shape[0] + (BM - 1)) // BM), uint32((c.shape[1] + (BN - 1)) // BN)
        own_rows = uint32((x.shape[0] + (BM - 1)) // BM)
        split = rows > own_rows  # C is several matrices of partial sums
        counter = steps[5]  # 0 if blocks do not keep in step
        if tid == uint32(0):
            for i in range(SLOTS):
                mbarrier.initialise(uint32(full + i * BARRIER_BYTES), uint32(1))
                readers = WARPGROUP // WARP * CONSUMERS * cluster.size() + (1 if counter else 0)
                mbarrier.initialise(uint32(empty + i * BARRIER_BYTES), uint32(readers))
            mbarrier.initialised()
        cluster.await_barriers()  # set up before any thread waits on them, or copies for them
        wait_for_last()  # the operands have been decomposed
        if split:
            let_next_start()

        i, tile = uint32(0), uint32(cuda.blockIdx.x)
        if tid >= uint32(WARPGROUP * CONSUMERS):
            if CLAIM > 0:
                registers.release(LEFT)
            warp = cuda.shfl_sync(0xFFFFFFFF, int32(tid // WARP), 0)  # so the compiler knows that a warp has one role
            if warp == WARPGROUP // WARP * CONSUMERS + 1:
                if counter and tid % WARP == 0:
                    keep_in_step(counter, uint32(steps[6]), uint32(rows * cols), k_slots, full, empty)
            else:
                parity = uint32(1)  # of the phase before the first, so that all slots count as empty
                while tid == uint32(WARPGROUP * CONSUMERS) and tile < uint32(rows * cols):
                    tile_row, tile_col = place(tile, rows, cols)
                    tile_row, s, end = share(tile_row, rows, own_rows, k_slots)
                    while s < end:
                        at, filled = uint32(start + i * SLOT), uint32(full + i * BARRIER_BYTES)
                        while not mbarrier.ended(uint32(empty + i * BARRIER_BYTES), parity):
                            pass
                        fetch(at, a, b, s, k_slots, int64(tile_row) * BM, int64(tile_col) * BN, filled)
                        s = uint32(s + 1)
                        i, parity = following(i, parity)
                    tile = uint32(tile + cuda.gridDim.x)
                if tid == uint32(WARPGROUP * CONSUMERS):
                    await_all(empty, i, parity)
        else:
            if CLAIM > 0:
                registers.claim(CLAIM)
            group, lane, warp = uint32(tid // WARPGROUP), uint32(tid % WARP), uint32(tid // WARP % 4)
            total, emptied = cuda.local.array((COLUMN_GROUPS, 4), float32), barriers_to_tell(empty)
            parity = uint32(0)
            begin_alternation(group)
            while tile < uint32(rows * cols):
                tile_row, tile_col = place(tile, rows, cols)
                _, first, end = share(tile_row, rows, own_rows, k_slots)
                i, parity = sum_tile(total, start, full, emptied, i, parity, uint32(end - first), group)
                row = int64(tile_row) * BM + int64(group * GROUP_ROWS + warp * 16 + lane // 4)
                col = int64(tile_col) * BN + int64(lane % 4 * 2)
                store(c, row, col, alpha, total, beta, a, b, x, y, vectors, split)
                tile = uint32(tile + cuda.gridDim.x)
            end_alternation(group)

    member = of_batch(variant)
    bounds = hardware_only(launch_bounds=(config.threads, 1))

    @cuda.jit(**bounds)
    def persistent(alpha, a, b, beta, c, x, y, steps):
        run(alpha, a, b, beta, c, x, y, steps, ())

    @cuda.jit(**bounds)
    def persistent_with(alpha, a, b, beta, c, x, y, steps, vectors):
        run(alpha, a, b, beta, c, x, y, steps, vectors)

    return persistent_with if variant.vectors else persistent
