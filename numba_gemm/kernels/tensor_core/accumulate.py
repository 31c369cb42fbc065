"""Accumulation of a warpgroup's tile of C over its slots, in four ways that differ in accuracy.

Tensor cores truncate what does not fit into a float of their running sum, so a long sum drifts toward zero. The
products of the first parts, the leading ones, make up almost the whole sum. The products of the other parts, the minor
ones (`rests`), are smaller by a factor of 2^7 or more. Hence:

- `running`, for precisions with one product: the whole sum stays in the tensor cores. Rounding to the narrow format
  loses more than the truncation.
- `folded`: the tensor cores sum the leading products of each slot from zero. That sum is added to the total outside,
  with rounding. The sum of the minor products stays in the tensor cores for eight slots.
- `compensated`: the tensor cores sum all products of a slot, the smallest first. That sum is added to the total
  outside, and two more operations find what the addition rounds off (Dekker, 1971, doi:10.1007/BF01397083). The sum of
  the next slot begins with it, so the error does not grow with k.
- `stepwise`: as `compensated`, but for one instruction's terms, sixteen, and the minor products are summed apart: so
  the sum of the leading ones has few bits, and fewer are truncated. What additions round off goes to the sum of the
  minor products, which stays in the tensor cores to the end. This takes longer, and serves short sums.

All but `running` end by adding what is left to the total, and a correction for the average truncation in the slots, as
measured. The correction is less than half a unit in the last place, so a sum that is exactly a float does not change.
"""

from __future__ import annotations

from functools import lru_cache

from numba import cuda, float32, uint32

from ...device import wgmma
from ...simulator.switch import device_function
from .pipeline import alternates, alternation, give_back_to_all, ring, slot_products, step_products
from .precision import TensorPrecision
from .stage import GROUP_ROWS, ROW_BYTES, WarpgroupConfig

STEPS = 4  # per slot, each with the terms of one instruction
FOLD = 8  # slots for which a sum of minor products stays in the tensor cores
CUT_OFF = 0.875 * 2.0**-25  # relative truncation; must be below 2^-25, or exact sums would change


@device_function
def finished(total, rest):
    """Return ``total + rest``, corrected for what was truncated."""
    whole = total + rest
    kept = whole - rest
    left = (total - kept) + (rest - (whole - kept))  # rounding error of that addition
    return whole + (left + float32(CUT_OFF) * whole)


@lru_cache(maxsize=64)
def steps(columns: int, factor: float = 1.0):
    """Make the device functions that process a thread's sums, for a number of columns per warpgroup.

    They are ``clear(sums)``; ``add(total, sums)``; ``add_exactly(total, sums)``, which leaves in `sums` what it rounded
    off; ``add_rests(total, rests)``; and ``finish(total, rests)``. The last two divide the rests by a `factor`, a power
    of two.
    """
    COLUMN_GROUPS, UNIT = columns // 8, 1 / factor

    @device_function
    def clear(sums):
        for j in range(COLUMN_GROUPS):
            for q in range(4):
                sums[j, q] = float32(0)

    @device_function
    def add(total, sums):
        for j in range(COLUMN_GROUPS):
            for q in range(4):
                total[j, q] += sums[j, q]

    @device_function
    def add_exactly(total, sums):
        """Add the sums to the total, and set them to what was rounded off."""
        for j in range(COLUMN_GROUPS):
            for q in range(4):
                larger = total[j, q] + sums[j, q]
                sums[j, q] -= larger - total[j, q]
                total[j, q] = larger

    @device_function
    def add_rests(total, rests):
        for j in range(COLUMN_GROUPS):
            for q in range(4):
                total[j, q] += float32(UNIT) * rests[j, q]

    @device_function
    def finish(total, rests):
        for j in range(COLUMN_GROUPS):
            for q in range(4):
                total[j, q] = finished(total[j, q], float32(UNIT) * rests[j, q])

    return clear, add, add_exactly, add_rests, finish


@lru_cache(maxsize=64)
def slot_tiles(SLOT: int):
    """Make a device function ``(start, i, group)`` that returns descriptors of a group's A and of B in slot i."""

    @device_function
    def tiles(start, i, group):
        at = uint32(start + i * SLOT)
        return wgmma.descriptor(uint32(at + group * uint32(GROUP_ROWS * ROW_BYTES))), wgmma.descriptor(at)

    return tiles


@lru_cache(maxsize=64)
def running_sums(config: WarpgroupConfig, precision: TensorPrecision):
    """Make the device function of `tile_sums` that leaves the sums of all products in the tensor cores."""
    wait = wgmma.waiting(config.BN)
    clear, *_ = steps(config.BN)
    await_slot, following = ring(config.slots(precision))
    tiles = slot_tiles(config.slot_bytes(precision))
    products = slot_products(config, precision, precision.products, fresh=False)

    @device_function
    def running(total, start, full, emptied, i, parity, k_slots, group):
        clear(total)
        s, last = uint32(0), uint32(0)
        while s < k_slots:
            await_slot(full, i, parity)
            a_tile, b_tile = tiles(start, i, group)
            products(total, a_tile, b_tile, s > uint32(0))
            wait(total, 1)
            if s > uint32(0):
                give_back_to_all(emptied, last)
            last = i
            s = uint32(s + 1)
            i, parity = following(i, parity)
        wait(total, 0)
        give_back_to_all(emptied, last)
        return i, parity

    return running


@lru_cache(maxsize=64)
def tile_sums(config: WarpgroupConfig, precision: TensorPrecision):
    """Make a device function ``(total, start, full, emptied, i, parity, k_slots, group)`` for a consumer warpgroup.

    It sets ``total`` to the products of warpgroup `group`'s rows of A with the block's columns of B, summed over all
    slots. The slots form a ring at `start`, with mbarriers at `full` and those of `barriers_to_tell`, `emptied`, at
    which every warp arrives when it has read a slot. The first slot has index `i` and is full once the phase of this
    `parity` has ended; the function returns both for the slot after the tile.
    """
    BN = config.BN
    COLUMN_GROUPS = BN // 8
    wait = wgmma.waiting(BN)
    leading, others = precision.products[-1:], precision.products[:-1]
    clear, add, add_exactly, add_rests, finish = steps(BN, precision.second_factor)
    await_slot, following = ring(config.slots(precision))
    tiles = slot_tiles(config.slot_bytes(precision))

    if not others:
        return running_sums(config, precision)

    ALTERNATES = alternates(config, precision)
    _, take, hand_over, _ = alternation(config, precision)
    lead = slot_products(config, precision, leading, fresh=True)
    rest = slot_products(config, precision, others, fresh=False)

    @device_function
    def folded(total, start, full, emptied, i, parity, k_slots, group):
        sums, rests = cuda.local.array((COLUMN_GROUPS, 4), float32), cuda.local.array((COLUMN_GROUPS, 4), float32)
        clear(total)
        clear(rests)
        s = uint32(0)
        while s < k_slots:
            new = s % uint32(FOLD) == uint32(0)
            if new:
                add_rests(total, rests)
            await_slot(full, i, parity)
            a_tile, b_tile = tiles(start, i, group)
            take(group)
            lead(sums, a_tile, b_tile, False)
            rest(rests, a_tile, b_tile, not new)
            hand_over(group)
            wait(sums, 0 if ALTERNATES else 1)
            if ALTERNATES:
                give_back_to_all(emptied, i)
            add(total, sums)
            wait(rests, 0)
            if not ALTERNATES:
                give_back_to_all(emptied, i)
            s = uint32(s + 1)
            i, parity = following(i, parity)
        finish(total, rests)
        return i, parity

    everything = slot_products(config, precision, precision.products, fresh=False)

    @device_function
    def add_slot(total, sums, start, full, emptied, i, parity, group):
        await_slot(full, i, parity)
        a_tile, b_tile = tiles(start, i, group)
        take(group)
        everything(sums, a_tile, b_tile, True)
        hand_over(group)
        wait(sums, 0)
        give_back_to_all(emptied, i)
        add_exactly(total, sums)
        return following(i, parity)

    @device_function
    def compensated(total, start, full, emptied, i, parity, k_slots, group):
        sums = cuda.local.array((COLUMN_GROUPS, 4), float32)
        clear(total)
        clear(sums)
        s = uint32(0)
        # Two slots per turn of the loop: an addition leaves the total in other registers, and a second one brings it
        # back, so nothing has to be moved at the end of a turn. An odd slot comes first.
        if k_slots % uint32(2) == uint32(1):
            i, parity = add_slot(total, sums, start, full, emptied, i, parity, group)
            s = uint32(1)
        while s < k_slots:
            i, parity = add_slot(total, sums, start, full, emptied, i, parity, group)
            i, parity = add_slot(total, sums, start, full, emptied, i, parity, group)
            s = uint32(s + 2)
        finish(total, sums)
        return i, parity

    products_of_step = step_products(config, precision)

    @device_function
    def multiply_step(sums, rests, a_tile, b_tile, group, step):
        take(group)
        products_of_step(sums, rests, a_tile, b_tile, step)
        hand_over(group)
        wait(rests, 0)
        wait(sums, 0)

    @device_function
    def add_sums(total, sums, rests):
        add_exactly(total, sums)
        add(rests, sums)

    @device_function
    def stepwise(total, start, full, emptied, i, parity, k_slots, group):
        sums, rests = cuda.local.array((COLUMN_GROUPS, 4), float32), cuda.local.array((COLUMN_GROUPS, 4), float32)
        clear(total)
        clear(rests)
        s = uint32(0)
        while s < k_slots:
            await_slot(full, i, parity)
            a_tile, b_tile = tiles(start, i, group)
            multiply_step(sums, rests, a_tile, b_tile, group, 0)
            add_sums(total, sums, rests)
            multiply_step(sums, rests, a_tile, b_tile, group, 1)
            add_sums(total, sums, rests)
            multiply_step(sums, rests, a_tile, b_tile, group, 2)
            add_sums(total, sums, rests)
            multiply_step(sums, rests, a_tile, b_tile, group, 3)
            give_back_to_all(emptied, i)
            add_sums(total, sums, rests)
            s = uint32(s + 1)
            i, parity = following(i, parity)
        finish(total, rests)
        return i, parity

    return stepwise if precision.stepwise else compensated if precision.compensated else folded
