"""Pipeline of warpgroups: fetching slots of decomposed operands, multiplying them, and storing the sums."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from numba import cuda, int64, uint32

from ...device import bulk_copy, cluster, mbarrier, named_barrier, wgmma
from ...device.address import address_of, shared_address
from ...device.store import store_axpby1
from ...device.units import WARP
from ...simulator.switch import device_function
from .precision import TensorPrecision
from .stage import ALIGNMENT, BARRIER_BYTES, ROW_BYTES, ROW_WORDS, WARPGROUP, WarpgroupConfig

UNIT = 16  # bytes per unit of a descriptor
STEP = wgmma.STEP_BYTES // UNIT


@device_function
def first_slot(memory):
    """Address of the first slot: the start of shared memory, rounded up to the alignment of tiles."""
    return uint32(uint32(shared_address(memory) + (ALIGNMENT - 1)) & uint32(0xFFFFFFFF - (ALIGNMENT - 1)))


@device_function
def own_share(count):
    """Return the part of `count` that this block copies for a cluster of one block or two: its first, and its size.

    The third value is the mask of the cluster's blocks.
    """
    second = uint32(cluster.size() - uint32(1))  # 1 if there is a second block
    size = uint32(count >> second)
    return uint32(size * uint32(cuda.blockIdx.x & second)), size, uint32(uint32(2) * second + uint32(1))


@device_function
def shared_load(to, source, count, barrier):
    """As `bulk_copy.bulk_load`, by all blocks of a cluster: each copies its share for all of them."""
    first, size, blocks = own_share(count)
    bulk_copy.bulk_load_in(uint32(to + first), source + int64(first), size, barrier, blocks)


@lru_cache(maxsize=64)
def slot_copies(config: WarpgroupConfig, precision: TensorPrecision, shared: bool = False):
    """Make a device function ``(at, a, b, s, k_slots, block_row, block_col, full)``, which one thread calls.

    It starts copying slot s of `k_slots`, of the block's rows of decomposed A and B, to the address `at` in shared
    memory: first the parts of A, then those of B. It announces the number of bytes to the mbarrier `full`. If
    `shared`, the blocks of a cluster have the same columns, and each copies a part of B's tile for all of them.
    """
    PARTS, SLOT = precision.parts, config.slot_bytes(precision)
    A_BYTES, B_BYTES = ROW_BYTES * config.BM, ROW_BYTES * config.BN  # per part of a tile
    B_START = PARTS * A_BYTES
    load_b = shared_load if shared else bulk_copy.bulk_load

    @device_function
    def fetch(at, a, b, s, k_slots, block_row, block_col, full):
        mbarrier.expect(full, uint32(SLOT))
        for p in range(PARTS):
            row = int64(p * k_slots + s)
            a_to, b_to = uint32(at + p * A_BYTES), uint32(at + B_START + p * B_BYTES)
            bulk_copy.bulk_load(a_to, address_of(a, row, block_row * ROW_WORDS), uint32(A_BYTES), full)
            load_b(b_to, address_of(b, row, block_col * ROW_WORDS), uint32(B_BYTES), full)

    return fetch


@lru_cache(maxsize=64)
def ring(slots: int):
    """Make the device functions of a ring of slots, which a warpgroup reads one after another.

    ``await_slot(full, i, parity)`` waits until slot i is full, which ends the phase of this parity of its mbarrier.
    ``following(i, parity)`` returns both values for the next slot.
    """

    @device_function
    def await_slot(full, i, parity):
        while not mbarrier.ended(uint32(full + i * BARRIER_BYTES), parity):
            pass

    @device_function
    def following(i, parity):
        last = i == uint32(slots - 1)
        return uint32(0) if last else uint32(i + 1), uint32(parity ^ 1) if last else parity

    return await_slot, following


@device_function
def give_back(empty, i):
    """Arrive at a slot's other mbarrier for this warp, whose products must be complete: they have read the slot.

    One lane's arrival orders no loads of the others.
    """
    if cuda.threadIdx.x % WARP == 0:
        mbarrier.arrive(uint32(empty + i * BARRIER_BYTES))


@device_function
def barriers_to_tell(empty):
    """Return the address, in the cluster, of the barriers `empty` at which this lane arrives for its warp; 0 if none.

    Each block of the cluster copies to the slots of all, so a lane tells each.
    """
    lane = uint32(cuda.threadIdx.x % WARP)
    return mbarrier.in_block(empty, lane) if lane < cluster.size() else uint32(0)


@device_function
def give_back_to_all(emptied, i):
    """As `give_back`, in all blocks of the cluster; `emptied` is the result of `barriers_to_tell`.

    An arrival at another block's barrier orders no memory accesses. None has to be: of what another block copies, only
    matrix instructions read, which are complete.
    """
    if emptied != uint32(0):
        mbarrier.arrive_at(uint32(emptied + i * BARRIER_BYTES))


@lru_cache(maxsize=64)
def last_arrivals(slots: int):
    """Make a device function ``(empty, i, parity)`` that waits until all slots of a `ring`, from slot i on, are free.

    Until then, other blocks of the cluster arrive at this block's barriers, so it must not end.
    """
    await_slot, following = ring(slots)

    @device_function
    def await_all(empty, i, parity):
        for _ in range(slots):
            await_slot(empty, i, parity)
            i, parity = following(i, parity)

    return await_all


@lru_cache(maxsize=64)
def alternation(config: WarpgroupConfig, precision: TensorPrecision):
    """Make the device functions by which two warpgroups multiply alternately, each with the warpgroup's number.

    A warp that starts products waits until the tensor cores have nearly completed them. If both warpgroups started
    theirs at the same time, both would also add their sums at the same time, while the tensor cores idle. If they
    alternate, one adds while the other multiplies.

    A warpgroup calls ``take(group)`` before the products of a slot, or of a step if it adds the sums of each,
    ``hand_over(group)`` after them, ``begin(group)`` before the first slot of all and ``end(group)`` after the last.
    Both must multiply as many slots. The functions do nothing unless `alternates`.
    """
    BOTH = 2 * WARPGROUP  # threads

    @device_function
    def nothing(group):
        pass

    if not alternates(config, precision):
        return nothing, nothing, nothing, nothing

    # Barrier 1 is that of warpgroup 0, and barrier 2 that of warpgroup 1: constants, which take no registers.
    @device_function
    def take(group):
        if group == uint32(0):
            named_barrier.arrive_and_wait(uint32(1), uint32(BOTH))
        else:
            named_barrier.arrive_and_wait(uint32(2), uint32(BOTH))

    @device_function
    def hand_over(group):
        if group == uint32(0):
            named_barrier.arrive(uint32(2), uint32(BOTH))
        else:
            named_barrier.arrive(uint32(1), uint32(BOTH))

    @device_function
    def begin(group):
        if group == uint32(1):
            hand_over(group)

    @device_function
    def end(group):
        if group == uint32(0):  # what the other warpgroup has handed over last
            take(group)

    return begin, take, hand_over, end


def alternates(config: WarpgroupConfig, precision: TensorPrecision) -> bool:
    """Return True if two warpgroups add sums outside of the tensor cores."""
    return config.consumers == 2 and precision.parts > 1


@lru_cache(maxsize=64)
def group_store(columns: int):
    """Make a device function ``(c, row, col, alpha, sums, beta)`` that stores ``alpha * sums + beta * C``.

    A warpgroup's tile has 64 rows from `row` on and `columns` columns from `col` on. `sums` are in the register layout
    of `wgmma`.
    """
    COLUMN_GROUPS = columns // 8

    @device_function
    def store(c, row, col, alpha, sums, beta):
        tid = uint32(cuda.threadIdx.x)
        lane, warp = tid % WARP, tid // WARP % (WARPGROUP // WARP)
        first_row, first_col = row + int64(warp * 16 + lane // 4), col + int64(lane % 4 * 2)
        for j in range(COLUMN_GROUPS):
            for q in range(4):
                store_axpby1(c, first_row + q // 2 * 8, first_col + 8 * j + q % 2, alpha, sums[j, q], beta)

    return store


def in_turn(*products: Any) -> Any:
    """Make a device function ``(sums, a, b)`` that starts products, which are such functions, one after the other.

    They are unrolled by recursion: in a loop, the compiler would wait for each.
    """

    @device_function
    def nothing(sums, a, b):
        pass

    if not products:
        return nothing
    first, others = products[0], in_turn(*products[1:])

    @device_function
    def start(sums, a, b):
        first(sums, a, b)
        others(sums, a, b)

    return start


def part_places(config: WarpgroupConfig, precision: TensorPrecision, a: int, b: int) -> tuple[int, int]:
    """Return how far part `a` of A and part `b` of B are from the descriptors of `slot_products`, in their unit."""
    a_bytes, b_bytes = ROW_BYTES * config.BM, ROW_BYTES * config.BN  # per part of a tile
    return a * a_bytes // UNIT, (precision.parts * a_bytes + b * b_bytes) // UNIT


@lru_cache(maxsize=64)
def slot_products(
    config: WarpgroupConfig, precision: TensorPrecision, chosen: tuple[tuple[int, int], ...], fresh: bool
):
    """Make a device function ``(acc, a_tile, b_tile, keep)`` that starts products of a slot as a separate group.

    It computes ``acc = A @ B + (acc if keep else 0)`` over the `chosen` products of the precision; if `fresh`, it never
    keeps. `a_tile` is the descriptor of the first part of this warpgroup's rows of A, and `b_tile` that of the slot's
    start. In a slot, the parts of A's tile precede those of B's.
    """
    multiply = wgmma.multiply(precision.kind, config.BN)
    begin = wgmma.multiply(precision.kind, config.BN, fresh)
    A_FIRST, B_FIRST = part_places(config, precision, *chosen[0])

    # Each instruction is emitted once: with all accumulators as operands, it is long.
    @device_function
    def add_product(acc, a, b):
        multiply(acc, a, b, True)

    @device_function
    def add_steps(acc, a, b):
        add_product(acc, a + STEP, b + STEP)
        add_product(acc, a + 2 * STEP, b + 2 * STEP)
        add_product(acc, a + 3 * STEP, b + 3 * STEP)

    def product(a, b):
        A_PART, B_PART = part_places(config, precision, a, b)

        @device_function
        def add(acc, a_tile, b_tile):
            add_product(acc, a_tile + A_PART, b_tile + B_PART)
            add_steps(acc, a_tile + A_PART, b_tile + B_PART)

        return add

    others = in_turn(*(product(*parts) for parts in chosen[1:]))

    @device_function
    def slot(acc, a_tile, b_tile, keep):
        wgmma.fence()
        # The smallest products of all steps come first: while the sum is small, the least is truncated.
        begin(acc, a_tile + A_FIRST, b_tile + B_FIRST, keep)
        add_steps(acc, a_tile + A_FIRST, b_tile + B_FIRST)
        others(acc, a_tile, b_tile)
        wgmma.commit()

    return slot


@lru_cache(maxsize=64)
def step_products(config: WarpgroupConfig, precision: TensorPrecision):
    """Make a device function ``(sums, rests, a_tile, b_tile, step)`` that starts all products of one step, as a group.

    It adds the minor products to `rests`, and sets `sums` to the leading one. The other parameters are those of
    `slot_products`.
    """
    multiply = wgmma.multiply(precision.kind, config.BN)
    lead = wgmma.multiply(precision.kind, config.BN, True)
    A_LEAD, B_LEAD = part_places(config, precision, *precision.products[-1])

    def product(a, b):
        A_PART, B_PART = part_places(config, precision, a, b)

        @device_function
        def add(acc, a_step, b_step):
            multiply(acc, a_step + A_PART, b_step + B_PART, True)

        return add

    minor = in_turn(*(product(*parts) for parts in precision.products[:-1]))

    @device_function
    def products(sums, rests, a_tile, b_tile, step):
        a, b = a_tile + step * STEP, b_tile + step * STEP
        wgmma.fence()
        minor(rests, a, b)
        lead(sums, a + A_LEAD, b + B_LEAD, False)
        wgmma.commit()

    return products
