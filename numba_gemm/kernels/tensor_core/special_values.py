"""Sums with NaN or infinities among their operands, from the original elements.

The parts of a special element, NaN or an infinity, or of one that rounds to infinity, spoil all sums that it is part
of: an infinity has a rest of NaN. What such a sum is in float32 depends on few of its terms, however. Elements of at
most `ORDINARY` have products, and sums of products, far below infinity. So if all other elements of a row and a column
are that small, the result follows from the infinite terms: NaN if one is NaN or two have opposite signs, otherwise
their infinity.

The decomposition marks the slots of each row of A, and column of B, in which an element is not ordinary. A thread
searches the marked slots of its rows and columns for these elements, once for all of its sums; the lanes of a warp that
have sums of the same row, or column, do so together. Rows of an A that is not decomposed have no marks: they are
searched whole, by each thread alone, since such kernels have no registers left. Sums that do not follow from infinite
terms are recomputed term by term: those that overflow, and those for which a finite element above `ORDINARY` is found
before it is known that they are NaN.
"""

from __future__ import annotations

from functools import lru_cache
from math import inf, isnan, nan

from numba import cuda, float32, int64, uint32, uint64

from ...device.address import col_step, transposed
from ...device.half import reader
from ...device.units import WARP
from ...simulator.switch import device_function
from ..product import BFLOAT16
from .config import MARKED_WORDS, ORDINARY, ROW_WORDS

AHEAD = 16  # terms of a recomputed sum, marks, or elements that are loaded at a time
AHEAD_TOGETHER = 8  # marks, or elements, that each of several lanes loads at a time
ROW_LANES, COL_LANES = 4, 8  # that have sums of the same row, next to each other; of the same column, four apart


@lru_cache(maxsize=2)
def elements(narrow: bool):
    """Make a device function ``(x, row, col)`` that reads an element; if `narrow`, of x with rows of BF16, too."""
    bf16, _ = reader(BFLOAT16)

    @device_function
    def either(x, row, col):
        return bf16(x, row, col) if col_step(x) == 2 else x[row, col]

    @device_function
    def element(x, row, col):
        return x[row, col]

    return either if narrow else element


@lru_cache(maxsize=2)
def recomputation(narrow: bool = False):
    """Make a device function ``(x, y, row, col)``; if `narrow`, x has rows of BF16."""
    element = elements(narrow)

    @device_function
    def term_by_term(x, y, row, col):
        """Compute an element of ``x @ y`` by float32 multiply-adds; stop early if it becomes NaN."""
        acc, k = float32(0), int64(0)
        while k + AHEAD <= x.shape[1] and not isnan(acc):
            for i in range(AHEAD):
                acc += element(x, row, k + i) * y[k + i, col]
            k += AHEAD
        while k < x.shape[1] and not isnan(acc):
            acc += element(x, row, k) * y[k, col]
            k += 1
        return acc

    return term_by_term


@lru_cache(maxsize=1)
def alone():
    """Make the device functions of `lanes_of_warp` for threads each of which searches alone."""

    @device_function
    def share(paired):
        return int64(0), int64(1)

    @device_function
    def least(value, paired):
        return value

    @device_function
    def any_of_all(condition):
        return condition

    return share, least, any_of_all


@lru_cache(maxsize=1)
def lanes_of_warp():
    """Make three device functions for lanes of a warp that search a row together or, if `paired`, a column.

    ``share(paired)`` returns the number of the lane among these, and how many they are. All of them must call
    ``least(value, paired)``, which returns the least of their values. All lanes of the warp must call
    ``any_of_all(condition)``, which returns whether it is true in any.
    """

    @device_function
    def share(paired):
        lane = int64(uint32(cuda.threadIdx.x) % uint32(WARP))
        return (lane // ROW_LANES, int64(COL_LANES)) if paired else (lane % ROW_LANES, int64(ROW_LANES))

    @device_function
    def least(value, paired):
        lane = uint32(uint32(cuda.threadIdx.x) % uint32(WARP))
        mask = uint32(uint32(0x11111111) << uint32(lane % uint32(ROW_LANES)))
        if not paired:
            mask = uint32(uint32(0xF) << uint32(lane // uint32(ROW_LANES) * uint32(ROW_LANES)))
        distance, end = (ROW_LANES, WARP) if paired else (1, ROW_LANES)
        while distance < end:
            value = min(value, cuda.shfl_xor_sync(mask, value, distance))
            distance *= 2
        return value

    @device_function
    def any_of_all(condition):
        return cuda.any_sync(uint32(0xFFFFFFFF), condition)

    return share, least, any_of_all


def search(ahead: int, share, least, element):
    """Make a device function ``(parts, x, line, k, slot_bits, marked, paired)`` that finds elements ``x[line, k]``.

    It returns the first k, from this one on, of an element that is not ordinary, or the end of k. If `marked`, it skips
    slots without a mark. `ahead` is the number of marks, or elements, that a lane loads at a time. Lanes that search
    together, as `share` and `least` say, call it with the same arguments. `element` reads one of x.
    """

    @device_function
    def next_marked(parts, line, slot, slots, paired):
        col = parts.shape[1] // MARKED_WORDS * ROW_WORDS + line
        own, lanes = share(paired)
        found = slots
        while slot < slots and found == slots:
            for i in range(ahead):
                at = min(slot + own * ahead + (ahead - 1 - i), slots - 1)
                if parts[at, col] != float32(0):
                    found = at
            found = least(found, paired)
            slot += lanes * ahead
        return found

    @device_function
    def next_special(parts, x, line, k, slot_bits, marked, paired):
        end = x.shape[1]
        own, lanes = share(paired)
        window = min(lanes * ahead, int64(1) << slot_bits)  # a slot at most: the next one may have no mark
        found = end
        while k < end and found == end:
            slot = k >> slot_bits
            if marked and k == slot << slot_bits:
                k = next_marked(parts, line, slot, ((end - 1) >> slot_bits) + 1, paired) << slot_bits
            start = k & -window
            first = start + min(own * ahead, window - ahead)
            for i in range(ahead):
                at = min(first + (ahead - 1 - i), end - 1)
                if at >= k and not abs(element(x, line, at)) <= float32(ORDINARY):
                    found = at
            found = least(found, paired)
            k = start + window
        return found

    return next_special


@device_function
def place_of(first, i, paired, extent):
    """Return the i-th row or column of a thread's sums; columns come in pairs. Beyond the edge it is the last one."""
    return min(first + (i >> paired) * 8 + (i & paired), extent - 1)


@lru_cache(maxsize=64)
def infinite_terms(rows: int, cols: int, ahead: int = AHEAD, team=alone, narrow: bool = False):
    """Make a device function ``(sums, a, b, x, y, row, col, slot_bits, a_marked)``: infinite terms of a thread's sums.

    The sums are those of `rows` rows, eight apart from `row` on, and of `cols` columns: `col` and the next, and so on
    every eight columns. `sums` has bit ``i * cols + j`` for the sum of the i-th row and j-th column, if it is wanted.
    `a` and `b` are the decomposed operands, `x` and `y` the original ones; a slot has ``2**slot_bits`` terms. Unless
    `a_marked`, `a` is not read. The function returns three masks: of sums with a term of plus infinity, of sums with
    one of minus infinity, and of sums with an element that is finite and not ordinary. A term that is NaN counts as
    both infinities. A search ends when each wanted sum of its row or column is NaN or has such an element: it is found
    out, or must be recomputed. With `lanes_of_warp` as `team`, all lanes of the warp must call the function. If
    `narrow`, x has rows of BF16.
    """
    ONE_ROW, ONE_COL, TOGETHER = (1 << cols) - 1, sum(1 << i * cols for i in range(rows)), min(8, max(rows, cols))
    share, least, _ = team()
    element = elements(narrow)
    next_special = search(ahead, share, least, element)

    @device_function
    def add_terms(positive, negative, value, other, k, first, paired, count, bit, step):
        """Take in the terms of an infinity, or NaN, with the elements of the other operand that it is multiplied by."""
        j = int64(0)
        while j < count:
            for i in range(TOGETHER):
                at = min(j + i, count - 1)
                term = value * element(other, place_of(first, at, paired, other.shape[0]), k)
                own = uint64(1) << uint64(bit + at * step)
                if not term < float32(0):
                    positive |= own
                if not term > float32(0):
                    negative |= own
            j += TOGETHER
        return positive, negative

    @device_function
    def terms(sums, a, b, x, y, row, col, slot_bits, a_marked):
        positive, negative, large = uint64(0), uint64(0), uint64(0)
        end = x.shape[1]
        # For rows, then for columns. Written out for both, this would take more registers than there are.
        parts, own, other, first, other_first = a, x, transposed(y), row, col
        mask, step, count, other_step, other_count = uint64(ONE_ROW), int64(cols), int64(rows), int64(1), int64(cols)
        paired = int64(0)
        while paired < 2:
            line = int64(0)
            while line < count:
                wanted = sums & (mask << uint64(line * step))
                place, k = place_of(first, line, paired, own.shape[0]), int64(-1)
                while k + 1 < end and least(int64((positive & negative | large) & wanted == wanted), paired) == 0:
                    k = next_special(parts, own, place, k + 1, slot_bits, a_marked or paired == 1, paired)
                    value = element(own, place, min(k, end - 1))
                    if k < end and abs(value) < float32(inf):
                        large |= wanted
                    elif k < end:
                        positive, negative = add_terms(
                            positive,
                            negative,
                            value,
                            other,
                            k,
                            other_first,
                            1 - paired,
                            other_count,
                            line * step,
                            other_step,
                        )
                line += 1
            parts, own, other, first, other_first = b, transposed(y), x, col, row
            mask, step, count, other_step, other_count = uint64(ONE_COL), other_step, other_count, step, count
            paired += 1
        return positive, negative, large

    return terms


@lru_cache(maxsize=2)
def special_sums(narrow: bool = False):
    """Make a device function ``(bit, found, x, y, row, col)``; if `narrow`, x has rows of BF16."""
    term_by_term = recomputation(narrow)

    @device_function
    def special_sum(bit, found, x, y, row, col):
        """Return a sum that is not finite, or may not be, from what `infinite_terms` has found."""
        positive, negative, large = found
        if positive & negative & bit:
            return float32(nan)
        if large & bit or not (positive | negative) & bit:
            return term_by_term(x, y, row, col)
        return float32(inf) if positive & bit else float32(-inf)

    return special_sum
