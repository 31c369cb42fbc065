"""fused_decomposition: one launch, in which warps decompose what they have loaded.

Bottleneck before: two launches. The first writes the parts of both operands to memory, and the second reads them again.
    Small products take little longer than two launches; short sums, and a C of few rows or columns, take longer to
    decompose than to multiply.
Idea: tiles of A and B are copied to shared memory as they are, by `cp.async`. A lane reads four k of four rows of A,
    and of four columns of B, by 128-bit loads. It decomposes them in registers, which gives its fragments of all parts,
    and the warp multiplies them by `mma.sync`. Which row, column or k an element of a fragment stands for is a choice,
    and this choice suits the loads. The sums are kept as in `warp_mma`. In small tiles, several warps share each sum,
    each for different k. With several parts, the warps' totals are added exactly, then what they have left out. If a
    sum of a tile is NaN, or nearly infinite, the block computes the tile again by FP32 multiply-adds, and replaces
    only the sums that need it.
Traffic: a block reads its rows of A and columns of B once, four bytes per element, and writes C. Two warps read, and
    decompose, the same elements of a 64x64 tile.
Registers and shared memory: two or three sums of 32 registers each, the parts of 16 terms, and 32 floats to decompose;
    three slots of FP32 tiles, 54 KB.
Limits: a lane executes about four instructions to decompose for each matrix instruction, so large products are faster
    decomposed once. Sums are not divided among blocks.
"""

from functools import lru_cache

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from ...device.address import (
    address_of,
    col_step,
    shared_address,
    shared_load1,
    shared_load4,
    shared_store1,
    shared_store4,
    transposed,
)
from ...device.async_copy import commit_group, wait_group
from ...device.chunk_loader import chunk_loader
from ...device.matrix import shifted
from ...device.mma import bf16_floats, bf16_word
from ...device.narrow import pair, short_bf16_of_number, tf32
from ...device.store import element_store
from ...device.units import WARP
from ...simulator.switch import device_function, hardware_only
from ..stage import require
from .accumulate import FOLD, finished, steps
from .config import WARP_EXTENT
from .epilogue import HUGE, place
from .split_k import add_exactly as add_one_exactly
from .warp_products import COLUMN_BLOCKS, FRAGMENTS, GROUPS, ROW_BLOCKS, products_of

TERMS = 16  # of a k-step: four per lane of a row's four
STAGE_PITCH = WARP_EXTENT + 4  # floats from a row of a warp's staged sums to the next
STAGE = 4 * WARP_EXTENT * STAGE_PITCH  # bytes of a warp's staged sums


@lru_cache(maxsize=64)
def splitting(kind: str, left: int, short: bool, p: int = 0):
    """Make a device function ``(low, high, frag, at, word)`` that decomposes two floats, or for TF32 one, `low`.

    It sets word `word` of the fragments of each part, the first of which is ``frag[at]``. `left` parts are made, from
    part `p` on. It is unrolled by recursion.
    """
    PART = FRAGMENTS * p

    if kind == "tf32":

        @device_function
        def last(low, high, frag, at, word):
            frag[at + PART, word] = tf32(low).view(np.uint32)

    else:

        @device_function
        def last(low, high, frag, at, word):
            frag[at + PART, word] = bf16_word(low, high)

    if left == 1:
        return last
    following = splitting(kind, left - 1, False, p + 1)

    @device_function
    def split_tf32(low, high, frag, at, word):
        x = tf32(low)
        frag[at + PART, word] = x.view(np.uint32)
        following(low - x, high, frag, at, word)

    # Of a NaN, some part is NaN: at the latest the second one, a NaN minus anything.
    @device_function
    def split_short(low, high, frag, at, word):
        x, y = short_bf16_of_number(low), short_bf16_of_number(high)
        frag[at + PART, word] = pair(x, y).view(np.uint32)
        following(low - x, high - y, frag, at, word)

    @device_function
    def split(low, high, frag, at, word):
        both = bf16_word(low, high)
        frag[at + PART, word] = both
        x = bf16_floats(both)
        following(low - x[0], high - x[1], frag, at, word)

    return split_tf32 if kind == "tf32" else split_short if short else split


@lru_cache(maxsize=64)
def tile_of(access: str, extent: int, bk: int, threads: int):
    """Return the loader of an operand's tiles, a device function that reads of them, and two steps in bytes.

    ``read(tiles, at, values)`` reads four rows and four k from an address on. The steps lead to the next four rows, and
    to the next four k. Lanes that read at a time, two groups of four rows and four of four k, use different banks.
    """
    loader = chunk_loader(access, extent, bk, threads, pitch=bk + 4, padding=8)
    K_STEP, ROW_STEP = 4 * extent, 4 * (bk + 4)

    @device_function
    def read_rows(tiles, at, values):
        for r in range(4):
            four = shared_load4(tiles, uint32(at + ROW_STEP * r))
            values[r, 0], values[r, 1], values[r, 2], values[r, 3] = four

    @device_function
    def read_columns(tiles, at, values):
        for q in range(4):
            four = shared_load4(tiles, uint32(at + K_STEP * q))
            values[0, q], values[1, q], values[2, q], values[3, q] = four

    if loader.across:
        return loader, read_columns, 16, 4 * loader.four_k
    return loader, read_rows, 4 * ROW_STEP, 16


def build(config, variant):
    precision, BM, BN, BK, LANES_K = variant.precision, config.BM, config.BN, config.BK, config.lanes_k
    THREADS, SLOTS, ACROSS = config.threads, config.slots, config.BN // WARP_EXTENT  # warps along a row
    PARTS, PAIRS, WORDS = precision.parts, precision.per_word == 2, precision.parts * FRAGMENTS
    INSTRUCTIONS = 1 if PAIRS else 2  # per k-step and product of parts
    STEPS = BK // (TERMS * LANES_K)  # k-steps per warp and slot
    LEADING, OTHERS = precision.products[-1:], precision.products[:-1]
    APART, COMPENSATED, STEPWISE = len(OTHERS) > 0, precision.compensated, precision.stepwise
    ONE = COMPENSATED and not STEPWISE  # one sum for all products: `rests` is `sums`
    CHECKED, BATCHED, PLAIN = PARTS > 1, variant.batched, variant.epilogue is None
    NEWEST = SLOTS - 2  # groups of copies that may be in flight when a slot is read
    LIMIT = HUGE / LANES_K  # of a warp's sum, so that all warps' sum is below `HUGE`
    ROWS = WARP_EXTENT // LANES_K  # of a warp tile, that each of its warps stores
    SECOND = THREADS // WARP * STAGE  # bytes from all warps' staged sums to others of theirs
    a_loader, read_a, _, a_four = tile_of(variant.a, BM, BK, THREADS)
    b_loader, read_b, b_beside, b_four = tile_of(variant.b, BN, BK, THREADS)
    place_a, position_a, fetch_a = a_loader.place, a_loader.position, a_loader.fetch
    place_b, position_b, fetch_b = b_loader.place, b_loader.position, b_loader.fetch
    B_START, SLOT = a_loader.size, a_loader.size + b_loader.size
    A_STEP, B_STEP = 4 * LANES_K * a_four, 4 * LANES_K * b_four  # bytes from a k-step of a warp to its next one
    require(
        config,
        {
            "4x8 sums per thread, 32x32 per warp": (config.TM, config.TN, config.WM, config.WN) == (4, 8, 32, 32),
            "extents and lanes are powers of two": all(x & (x - 1) == 0 for x in (BM, BN, BK, LANES_K)),
            "BK is 16 terms per lane along k, or a multiple": STEPS > 0,
            "lanes along k <= 8": LANES_K <= 8,
            "two slots or more": SLOTS >= 2,
            "dynamic shared memory": config.dynamic,
            "pads hold the slots' padding": config.dynamic_shared >= SLOTS * SLOT,
            "slots hold the sums, twice": config.dynamic_shared >= 2 * SECOND,
            "no scales": not precision.scaled,
        },
    )
    leading, others = products_of(precision, LEADING), products_of(precision, OTHERS)
    split = splitting(precision.kind, PARTS, precision.short)
    clear, add, add_exactly, *_ = steps(8 * GROUPS)
    store = element_store(variant.epilogue)

    @device_function
    def multiply_step(tiles, a_at, b_at, total, sums, rests):
        """Add the products of one k-step: to the total, or apart to the sums and rests."""
        a_values, b_values = cuda.local.array((4, 4), float32), cuda.local.array((4, 4), float32)
        a_frag, b_frag = cuda.local.array((WORDS, 4), uint32), cuda.local.array((WORDS, 4), uint32)
        read_a(tiles, a_at, a_values)
        read_b(tiles, b_at, b_values)
        for instruction in range(INSTRUCTIONS):
            for r in range(4):
                for w in range(2):
                    low = 2 * w if PAIRS else 2 * instruction + w
                    high = low + 1 if PAIRS else low
                    split(a_values[r, low], a_values[r, high], a_frag, r // 2, 2 * w + r % 2)
                    split(b_values[r, low], b_values[r, high], b_frag, r // 2, r % 2 * 2 + w)
            if APART:
                others(rests, a_frag, b_frag)
                leading(sums, a_frag, b_frag)
            else:
                leading(total, a_frag, b_frag)

    @device_function
    def multiply_slot(tiles, a_at, b_at, s, total, sums, rests):
        if APART and not ONE:
            clear(sums)
        for step in range(STEPS):
            multiply_step(tiles, uint32(a_at + step * A_STEP), uint32(b_at + step * B_STEP), total, sums, rests)
            if STEPWISE:
                add_exactly(total, sums)
                add(rests, sums)
                clear(sums)
        if ONE:
            add_exactly(total, sums)
        elif STEPWISE:
            if s % uint32(FOLD) == uint32(FOLD - 1):  # without this, the compiler takes 192 registers instead of 166
                add_exactly(total, rests)
        elif APART:
            add(total, sums)
            if s % uint32(FOLD) == uint32(FOLD - 1):
                add(total, rests)
                clear(rests)

    @device_function
    def multiply_slot_in_fp32(tiles, a_at, b_at, s, total, sums, rests):
        """Add the products of a slot by FP32 multiply-adds. `sums` and `rests` are not used."""
        values = cuda.local.array((4, 4), float32)
        left, right = cuda.local.array((4, 4), float32), cuda.local.array((4, 4), float32)
        step = uint32(0)
        while step < uint32(STEPS):
            four = uint32(0)
            while four < uint32(TERMS // 4):
                read_a(tiles, uint32(a_at + four * a_four), values)
                read_b(tiles, uint32(b_at + four * b_four), left)
                read_b(tiles, uint32(b_at + four * b_four + b_beside), right)
                for q in range(4):
                    for i in range(ROW_BLOCKS):
                        for j in range(COLUMN_BLOCKS):
                            g = i * COLUMN_BLOCKS + j
                            total[g, 0] += values[2 * i, q] * left[j, q]
                            total[g, 1] += values[2 * i, q] * right[j, q]
                            total[g, 2] += values[2 * i + 1, q] * left[j, q]
                            total[g, 3] += values[2 * i + 1, q] * right[j, q]
                four = uint32(four + 1)
            a_at, b_at = uint32(a_at + A_STEP), uint32(b_at + B_STEP)
            step = uint32(step + 1)

    def over_slots(multiply):
        """Make a device function that copies all slots of a tile and multiplies them, from addresses in the first."""

        @device_function
        def sum_tile(tiles, start, x, y, block_row, block_col, a_from, b_from, total, sums, rests):
            tid = uint32(cuda.threadIdx.x)
            row_a, k_a = place_a(tid)
            row_b, k_b = place_b(tid)
            rows = int32(min(x.shape[0] - block_row, int64(BM)))
            cols = int32(min(y.shape[0] - block_col, int64(BN)))
            rest = int32(x.shape[1])  # number of k left from the next slot to copy on
            a_address = address_of(x, block_row + int64(row_a), int64(k_a))
            b_address = address_of(y, block_col + int64(row_b), int64(k_b))
            slots = uint32((x.shape[1] + (BK - 1)) // BK)
            clear(total)
            slot = uint32(0)
            for _ in range(SLOTS - 1):
                if rest > int32(0):
                    fetch_a(tiles, tid, uint32(start + slot), x, a_address, row_a, k_a, rows, rest)
                    fetch_b(tiles, tid, uint32(start + slot + B_START), y, b_address, row_b, k_b, cols, rest)
                commit_group()
                a_address += BK * col_step(x)
                b_address += BK * col_step(y)
                rest = int32(rest - BK)
                slot = uint32(slot + SLOT)
            s, other = uint32(0), uint32(0)  # `other` is read; copies go to `slot`, which was read before
            while s < slots:
                wait_group(NEWEST)
                # the copies of all threads have landed before any reads this slot; and all have read the slot before it
                # before copies overwrite it
                cuda.syncthreads()
                if rest > int32(0):
                    fetch_a(tiles, tid, uint32(start + slot), x, a_address, row_a, k_a, rows, rest)
                    fetch_b(tiles, tid, uint32(start + slot + B_START), y, b_address, row_b, k_b, cols, rest)
                commit_group()
                a_address += BK * col_step(x)
                b_address += BK * col_step(y)
                rest = int32(rest - BK)
                multiply(tiles, uint32(a_from + other), uint32(b_from + other), s, total, sums, rests)
                slot = other
                other = uint32(0) if other == uint32((SLOTS - 1) * SLOT) else uint32(other + SLOT)
                s = uint32(s + 1)

        return sum_tile

    sum_tile, sum_tile_in_fp32 = over_slots(multiply_slot), over_slots(multiply_slot_in_fp32)

    @device_function
    def stage(tiles, to, sums):
        """Store a lane's sums, of four rows and eight columns, to shared memory."""
        for r in range(4):
            for e in range(2):
                g, q = r // 2 * COLUMN_BLOCKS, r % 2 * 2 + e
                four = (sums[g, q], sums[g + 1, q], sums[g + 2, q], sums[g + 3, q])
                shared_store4(tiles, uint32(to + 4 * (STAGE_PITCH * r + 4 * e)), four)

    @device_function
    def staged_sum(tiles, at):
        """Add the warps' sums of an element."""
        total = shared_load1(tiles, at)
        for i in range(1, LANES_K):
            total += shared_load1(tiles, uint32(at + STAGE * i))
        return total

    @device_function
    def staged_sum_and_rests(tiles, at):
        """Add the warps' sums of an element, then what these additions rounded off, and the minor products."""
        total, rest = shared_load1(tiles, at), float32(0)
        for i in range(1, LANES_K):
            total, rest = add_one_exactly(total, rest, shared_load1(tiles, uint32(at + STAGE * i)))
        for i in range(LANES_K):
            rest += shared_load1(tiles, uint32(at + SECOND + STAGE * i))
        return finished(total, rest)

    @device_function
    def run(alpha, a, b, beta, c, steps, vectors):
        if BATCHED:
            member = int64(cuda.blockIdx.y)
            a, b, c = shifted(a, member * steps[0]), shifted(b, member * steps[1]), shifted(c, member * steps[2])
        x, y = a, transposed(b)  # y is (n, k)
        tiles = cuda.shared.array(0, float32, alignment=16)
        start = shared_address(tiles)
        tid = uint32(cuda.threadIdx.x)
        lane, warp = uint32(tid % WARP), uint32(tid // WARP)
        own, part = uint32(warp // LANES_K), uint32(warp % LANES_K)  # warp tile, and number of the warp along k
        warp_row, warp_col = uint32(own // ACROSS * WARP_EXTENT), uint32(own % ACROSS * WARP_EXTENT)
        group, member4 = uint32(lane // 4), uint32(lane % 4)
        rows, cols = uint32((c.shape[0] + (BM - 1)) // BM), uint32((c.shape[1] + (BN - 1)) // BN)
        tile_row, tile_col = place(uint32(cuda.blockIdx.x), rows, cols)
        block_row, block_col = int64(tile_row) * BM, int64(tile_col) * BN

        total = cuda.local.array((GROUPS, 4), float32)
        sums = cuda.local.array((GROUPS, 4), float32)
        rests = sums if ONE else cuda.local.array((GROUPS, 4), float32)
        kept = cuda.local.array(ROWS, float32)
        a_row, first = uint32(warp_row + 4 * group), uint32(TERMS * part)
        k = uint32(first + 4 * member4)
        a_from = uint32(start + position_a(a_row, k))
        b_from = uint32(start + B_START + position_b(uint32(warp_col + 4 * group), k))
        clear(rests)
        sum_tile(tiles, start, x, y, block_row, block_col, a_from, b_from, total, sums, rests)
        huge = False
        if CHECKED:
            for j in range(GROUPS):
                for q in range(4):
                    huge |= not abs(total[j, q]) + abs(rests[j, q]) < float32(LIMIT)
        # all warps have read their last slot before it is overwritten, and know whether a sum is not finite
        again = cuda.syncthreads_or(int32(huge))
        to = uint32(start + STAGE * warp + 4 * (4 * group * STAGE_PITCH + 8 * member4))
        staged = uint32(start + own * (LANES_K * STAGE) + 4 * (part * ROWS * STAGE_PITCH + lane))  # sums that it stores
        stage(tiles, to, total)
        if APART:
            stage(tiles, uint32(to + SECOND), rests)
        cuda.syncthreads()  # all sums are staged before any thread reads those of others
        for i in range(ROWS):
            at = uint32(staged + 4 * STAGE_PITCH * i)
            kept[i] = staged_sum_and_rests(tiles, at) if APART else staged_sum(tiles, at)
        if CHECKED and again != 0:
            cuda.syncthreads()  # all sums have been read before copies overwrite them
            a_from = uint32(start + position_a(a_row, first))
            b_from = uint32(start + B_START + position_b(uint32(warp_col + 8 * member4), first))
            sum_tile_in_fp32(tiles, start, x, y, block_row, block_col, a_from, b_from, total, sums, rests)
            cuda.syncthreads()  # all warps have read their last slot before it is overwritten
            stage(tiles, to, total)
            cuda.syncthreads()  # all sums are staged before any thread reads those of others
            for i in range(ROWS):
                if not abs(kept[i]) < float32(HUGE):
                    kept[i] = staged_sum(tiles, uint32(staged + 4 * STAGE_PITCH * i))

        row, col = block_row + int64(warp_row + part * ROWS), block_col + int64(warp_col + lane)
        for i in range(ROWS):
            kept[i] *= alpha
        if beta != float32(0):  # all values first: the compiler would not move reads of C above writes of C
            for i in range(ROWS):
                if row + i < c.shape[0] and col < c.shape[1]:
                    kept[i] += beta * c[row + i, col]
        for i in range(ROWS):
            if PLAIN:
                store(c, row + i, col, float32(1), kept[i], float32(0), vectors)
            else:
                shared_store1(tiles, uint32(staged + 4 * STAGE_PITCH * i), kept[i])  # where no other thread reads
        if not PLAIN:  # one row after the other: several copies of an epilogue may be much code
            i = uint32(0)
            while i < uint32(ROWS):
                value = shared_load1(tiles, uint32(staged + 4 * STAGE_PITCH * i))
                store(c, row + int64(i), col, float32(1), value, float32(0), vectors)
                i = uint32(i + 1)

    @cuda.jit(**hardware_only(launch_bounds=config.launch_bounds))
    def fused_decomposition(alpha, a, b, beta, c, steps, vectors):
        run(alpha, a, b, beta, c, steps, vectors)

    return fused_decomposition
