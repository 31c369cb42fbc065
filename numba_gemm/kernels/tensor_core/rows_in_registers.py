"""rows_in_registers: a large A is read once, as it is; only B is decomposed in memory.

Bottleneck before: a separate launch decomposes A. In bf16x6 it reads four bytes and writes six per element, and the
    product reads these six. If B has few columns, this takes longer than all matrix instructions.
Idea: the producer warpgroup copies floats of A to shared memory by `cp.async`, beside the parts of B. The matrix
    instruction takes its rows of A from registers, so a thread that multiplies reads the floats of its own rows there
    and decomposes them. While the products of a slot are under way, it decomposes the rows of the next. The order of
    the products and all sums are those of `persistent`, and so are the bits of the result. Where "auto" computes the
    transpose, products of parts change places, so last bits may differ.
Traffic: a tile's rows of A are read once, four bytes per element, and all parts of B, which stay in the L2 cache.
Registers and shared memory: two or three sums of a warpgroup's tile; the parts of a slot's rows, 16 words each per
    thread, and those of the next slot; as many slots as fit. Floats of A are permuted in shared memory, so that loads
    use all banks (see `row_parts`).
    Rows of BF16 are copied and multiplied as they are: they are their own first part, and the other parts are zero, so
    bf16x6 needs three products instead of six.
Limits: blocks with different columns of the same rows decompose the same elements, so a B of many columns is better
    multiplied by `persistent`. Rows of A, or columns if it is stored by columns, that do not start at multiples of 16
    bytes are copied float by float: neighbouring threads copy neighbours, but in four times as many copies.
"""

from functools import cache, lru_cache

from numba import cuda, float32, int64, uint32

from ...device import bulk_copy, mbarrier, registers, wgmma
from ...device.address import address_of
from ...device.grid_order import let_next_start, wait_for_last
from ...device.units import WARP
from ...simulator.switch import device_function, hardware_only
from ..stage import require
from .accumulate import FOLD, STEPS, steps
from .config import NARROW, ROW_BYTES, ROW_WORDS, NarrowRowsConfig, WarpgroupConfig
from .epilogue import of_batch, place, sums_store
from .pipeline import STEP, UNIT, first_slot, in_turn, ring
from .precision import TensorPrecision
from .row_parts import FLOATS, TERMS, WORDS, decompositions, first_floats, pitch_of, row_copies
from .split_k import share
from .stage import BARRIER_BYTES, LEFT, WARPGROUP


@lru_cache(maxsize=64)
def row_products(columns: int, pairs: tuple[tuple[int, int], ...]):
    """Make device functions that start products of a slot, `pairs` of parts, as a separate group.

    The first three are ``(sums, words, b)``: the first adds all products, the second computes the leading ones afresh,
    and the third adds the others. `b` is the descriptor of the first part of B. Then follows a tuple of functions
    ``(sums, rests, words, b)``, for each step: leading products afresh, and others added to the rests.
    """
    PART = ROW_BYTES * columns // UNIT  # of B

    @cache
    def product(part, step, fresh=False):
        return wgmma.multiply_rows(columns, part * WORDS + 4 * step, "bf16", fresh)

    def of_slot(a, part, fresh=False):
        first, second, third, fourth = (product(a, step, fresh and step == 0) for step in range(STEPS))

        @device_function
        def products(sums, words, b):
            first(sums, words, b + part * PART, True)
            second(sums, words, b + (part * PART + STEP), True)
            third(sums, words, b + (part * PART + 2 * STEP), True)
            fourth(sums, words, b + (part * PART + 3 * STEP), True)

        return products

    def group(start):
        @device_function
        def products(sums, words, b):
            wgmma.fence()
            start(sums, words, b)
            wgmma.commit()

        return products

    def of_step(a, part, step):
        multiply = product(a, step)

        @device_function
        def products(rests, words, b):
            multiply(rests, words, b + (part * PART + step * STEP), True)

        return products

    def one_step(step):
        multiply, others = product(0, step, True), in_turn(*(of_step(*pair, step) for pair in pairs[:-1]))

        @device_function
        def products(sums, rests, words, b):
            wgmma.fence()
            others(rests, words, b)
            multiply(sums, words, b + step * STEP, False)
            wgmma.commit()

        return products

    minor = in_turn(*(of_slot(*pair) for pair in pairs[:-1]))
    everything = group(in_turn(minor, of_slot(*pairs[-1])))
    return everything, group(of_slot(*pairs[-1], True)), group(minor), tuple(one_step(step) for step in range(STEPS))


@lru_cache(maxsize=64)
def tile_sums(config: WarpgroupConfig, precision: TensorPrecision, access: str):
    """Make a device function ``(total, memory, start, full, empty, i, parity, k_slots, first)``.

    It does what that of `accumulate` does, but each lane arrives at `empty`, since each loads floats of the slot.
    `first` is the byte offset, in a slot, of a thread's first float.
    """
    BN, PARTS, SLOT, B_START = config.BN, precision.parts, config.slot_bytes(precision), pitch_of(access) * config.BM
    # An element of BF16 is its first part, and its other parts are zero.
    pairs = tuple(pair for pair in precision.products if access != NARROW or pair[0] == 0)
    COLUMN_GROUPS, ALL_WORDS = BN // 8, (1 if access == NARROW else PARTS) * WORDS
    STEPWISE, COMPENSATED = precision.stepwise, precision.compensated
    ONE = COMPENSATED and not STEPWISE  # one sum for all products: `rests` is `sums`
    # Rows of BF16 are soon loaded, while another warpgroup's products are under way.
    AHEAD = access != NARROW or config.consumers == 1
    wait, wait_for_rows = wgmma.waiting(BN), wgmma.waiting_for_rows(BN, ALL_WORDS)
    decompose = decompositions(PARTS, precision.short, access, config.BM)
    everything, lead, rest, (step0, step1, step2, step3) = row_products(BN, pairs)
    clear, add, add_exactly, _, finish = steps(BN)
    await_slot, following = ring(config.slots(precision))

    @device_function
    def add_step(total, sums, rests):
        add_exactly(total, sums)
        add(rests, sums)

    @device_function
    def turn(total, sums, rests, words, next_words, floats, memory, start, full, empty, i, parity, s, k_slots, first):
        """Add the products of slot s, and decompose the rows of the next slot, meanwhile if AHEAD."""
        b = wgmma.descriptor(uint32(start + i * SLOT + B_START))
        if STEPWISE:
            step0(sums, rests, words, b)
        elif COMPENSATED:
            everything(sums, words, b)
        else:
            if s % uint32(FOLD) == uint32(0):
                add(total, rests)
                clear(rests)
            lead(sums, words, b)
            rest(rests, words, b)
            wait(sums, 1)
            add(total, sums)
        next_i, next_parity = following(i, parity)
        if AHEAD and uint32(s + 1) < k_slots:
            await_slot(full, next_i, next_parity)
            decompose(next_words, floats, memory, uint32(start + next_i * SLOT + first))
        wait_for_rows(rests, words, 0)
        if STEPWISE:
            wait(sums, 0)
            add_step(total, sums, rests)
            step1(sums, rests, words, b)
            wait_for_rows(rests, words, 0)
            wait(sums, 0)
            add_step(total, sums, rests)
            step2(sums, rests, words, b)
            wait_for_rows(rests, words, 0)
            wait(sums, 0)
            add_step(total, sums, rests)
            step3(sums, rests, words, b)
            wait_for_rows(rests, words, 0)
            wait(sums, 0)
        mbarrier.arrive(uint32(empty + i * BARRIER_BYTES))  # this lane's loads and products have read the slot
        if STEPWISE:
            add_step(total, sums, rests)
        elif COMPENSATED:
            add_exactly(total, sums)
        if not AHEAD and uint32(s + 1) < k_slots:
            await_slot(full, next_i, next_parity)
            decompose(next_words, floats, memory, uint32(start + next_i * SLOT + first))
        return next_i, next_parity

    @device_function
    def sum_tile(total, memory, start, full, empty, i, parity, k_slots, first):
        sums = cuda.local.array((COLUMN_GROUPS, 4), float32)
        rests = sums if ONE else cuda.local.array((COLUMN_GROUPS, 4), float32)
        even = cuda.local.array(ALL_WORDS, uint32)
        odd = cuda.local.array(ALL_WORDS, uint32) if AHEAD else even
        floats = cuda.local.array(FLOATS, float32)
        clear(total)
        clear(rests)
        await_slot(full, i, parity)
        decompose(even, floats, memory, uint32(start + i * SLOT + first))
        s = uint32(0)
        while s < k_slots:
            i, parity = turn(
                total, sums, rests, even, odd, floats, memory, start, full, empty, i, parity, s, k_slots, first
            )
            s = uint32(s + 1)
            if AHEAD and s < k_slots:
                i, parity = turn(
                    total, sums, rests, odd, even, floats, memory, start, full, empty, i, parity, s, k_slots, first
                )
                s = uint32(s + 1)
        finish(total, rests)
        return i, parity

    return sum_tile


def build(config, variant):
    """Make the kernel ``(alpha, a, b, beta, c, x, y, steps, vectors)``; it does not read `a`."""
    precision, BM, BN, PARTS = variant.precision, config.BM, config.BN, variant.precision.parts
    require(
        config,
        {
            "one producer": config.producers == 1,
            "two slots or more": config.slots(precision) >= 2,  # a slot is given back once the next one is there
            "several parts of BF16": precision.kind == "bf16" and PARTS > 1,
            "BN <= 128": BN <= 128,
            "a configuration for BF16": isinstance(config, NarrowRowsConfig) == (variant.rows == NARROW),
        },
    )
    SLOTS, CONSUMERS, SLOT = config.slots(precision), config.consumers, config.slot_bytes(precision)
    COLUMN_GROUPS, CLAIM = BN // 8, config.claim
    B_START, B_BYTES = pitch_of(variant.rows) * BM, ROW_BYTES * BN
    fetch_rows, sum_tile = row_copies(variant.rows, BM), tile_sums(config, precision, variant.rows)
    first_float = first_floats(variant.rows, BM)
    store, (_, following) = sums_store(variant, COLUMN_GROUPS), ring(SLOTS)

    @device_function
    def fetch_b(at, b, s, k_slots, block_col, full):
        mbarrier.expect(full, uint32(PARTS * B_BYTES))
        for p in range(PARTS):
            source = address_of(b, int64(p * k_slots + s), block_col * ROW_WORDS)
            bulk_copy.bulk_load(uint32(at + (B_START + p * B_BYTES)), source, uint32(B_BYTES), full)

    @device_function
    def run(alpha, a, b, beta, c, x, y, steps, vectors):
        a, b, c, x, y = member(a, b, c, x, y, steps)
        memory = cuda.shared.array(0, float32, alignment=128)
        start = first_slot(memory)
        full = uint32(start + SLOTS * SLOT)
        empty = uint32(full + SLOTS * BARRIER_BYTES)
        tid = uint32(cuda.threadIdx.x)
        k_slots = uint32(b.shape[0] // PARTS)
        rows, cols = uint32((c.shape[0] + (BM - 1)) // BM), uint32((c.shape[1] + (BN - 1)) // BN)
        own_rows = uint32((x.shape[0] + (BM - 1)) // BM)
        split = rows > own_rows  # C is several matrices of partial sums
        if tid == uint32(0):
            for i in range(SLOTS):
                mbarrier.initialise(uint32(full + i * BARRIER_BYTES), uint32(WARPGROUP + 1))
                mbarrier.initialise(uint32(empty + i * BARRIER_BYTES), uint32(WARPGROUP * CONSUMERS))
            mbarrier.initialised()
        cuda.syncthreads()  # the barriers are set up before any thread waits on them
        if split:
            let_next_start()

        i, tile = uint32(0), uint32(cuda.blockIdx.x)
        if tid >= uint32(WARPGROUP * CONSUMERS):
            if CLAIM > 0:
                registers.release(LEFT)
            parity = uint32(1)  # of the phase before the first, so that all slots count as empty
            own = uint32(tid - uint32(WARPGROUP * CONSUMERS))
            while tile < uint32(rows * cols):
                tile_row, tile_col = place(tile, rows, cols)
                tile_row, s, end = share(tile_row, rows, own_rows, k_slots)
                while s < end:
                    at, filled = uint32(start + i * SLOT), uint32(full + i * BARRIER_BYTES)
                    while not mbarrier.ended(uint32(empty + i * BARRIER_BYTES), parity):
                        pass
                    fetch_rows(memory, own, at, x, int64(tile_row) * BM, int64(s) * TERMS)
                    mbarrier.arrive_after_copies(filled)
                    if own == uint32(0):
                        wait_for_last()  # B has been decomposed
                        fetch_b(at, b, s, k_slots, int64(tile_col) * BN, filled)
                    s = uint32(s + 1)
                    i, parity = following(i, parity)
                tile = uint32(tile + cuda.gridDim.x)
        else:
            if CLAIM > 0:
                registers.claim(CLAIM)
            wait_for_last()  # the marks of B, which the end of a tile may read, have been written
            group, lane, warp = uint32(tid // WARPGROUP), uint32(tid % WARP), uint32(tid // WARP % 4)
            own_row, first = first_float(group, warp, lane)
            total = cuda.local.array((COLUMN_GROUPS, 4), float32)
            parity = uint32(0)
            while tile < uint32(rows * cols):
                tile_row, tile_col = place(tile, rows, cols)
                _, begin, end = share(tile_row, rows, own_rows, k_slots)
                k_slots_own = uint32(end - begin)
                i, parity = sum_tile(total, memory, start, full, empty, i, parity, k_slots_own, first)
                row = int64(tile_row) * BM + int64(own_row)
                col = int64(tile_col) * BN + int64(lane % 4 * 2)
                store(c, row, col, alpha, total, beta, a, b, x, y, vectors, split)
                tile = uint32(tile + cuda.gridDim.x)

    member = of_batch(variant)
    bounds = hardware_only(launch_bounds=(config.threads, 1))

    @cuda.jit(**bounds)
    def rows_in_registers(alpha, a, b, beta, c, x, y, steps):
        run(alpha, a, b, beta, c, x, y, steps, ())

    @cuda.jit(**bounds)
    def rows_in_registers_with(alpha, a, b, beta, c, x, y, steps, vectors):
        run(alpha, a, b, beta, c, x, y, steps, vectors)

    return rows_in_registers_with if variant.vectors else rows_in_registers
