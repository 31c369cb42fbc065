"""Sums with NaN or infinities among their operands, from the original elements.

The parts of a special element, NaN or an infinity, or of one that rounds to infinity, spoil all sums that it is part
of: an infinity leaves a remainder of NaN. What such a sum is in float32 depends on few of its terms, however. Elements
of at most `ORDINARY` have products, and sums of products, far below infinity. So if all other elements of a row and a
column are that small, the result follows from the infinite terms: NaN if one is NaN or two have opposite signs,
otherwise their infinity.

The decomposition marks the slots of each row of A, and column of B, in which an element is not ordinary. A thread
searches the marked slots of its rows and columns for these elements, once for all of its sums. Several lanes of a warp
have sums of the same row, or column. So each lane searches one of the warp's rows, then every 32nd of its columns, and
tells the others what it finds. Rows of an A that is not decomposed have no marks: they are searched whole, by each
thread alone, since such kernels have no registers left. Sums that do not follow from infinite terms are recomputed term
by term: those that overflow, and those for which a finite element above `ORDINARY` is found before it is known that
they are NaN.
"""

from __future__ import annotations

from functools import lru_cache
from math import inf, isnan, nan

from numba import cuda, float32, int32, int64, uint32, uint64

from ...device.address import col_step, transposed
from ...device.half import reader
from ...device.units import WARP
from ...simulator.switch import device_function
from ..product import BFLOAT16
from .config import MARKED_WORDS, ORDINARY, ROW_WORDS

AHEAD = 16  # terms of a recomputed sum, marks, or elements that are loaded at a time
AHEAD_IN_WARP = 32  # marks, or elements, that a lane loads at a time if lanes of a warp search for each other


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
    """Make the same as `lanes_of_warp` for threads that search alone: one line at a time, and nothing is exchanged."""

    @device_function
    def to_search(first, begin, count, paired):
        return place_of(first, begin, paired)

    @device_function
    def found_in(value, first, i, last, paired):
        return (value,)

    @device_function
    def any_of_all(condition):
        return condition

    return (1, 1), 1, to_search, found_in, any_of_all


@lru_cache(maxsize=1)
def lanes_of_warp():
    """Make what `infinite_terms` uses for lanes of a warp that search lines, which are rows or columns, for each other.

    It returns ``(rows, columns), lines, to_search, found_in, any_of_all``. A warp searches 32 lines at a time, one per
    lane; `rows`, or `columns`, of them are a thread's own. ``to_search(first, begin, count, paired)`` returns the line
    that this lane searches when the turn begins with the `begin`-th of each thread's `count` lines.
    ``found_in(value, first, i, last, paired)`` returns the values in the lanes that search `lines` of this thread's
    lines, from the i-th on and up to the last. ``any_of_all(condition)`` returns whether it is true in any lane. All
    lanes must call the latter two. A warp is 32 consecutive threads along x, and its first row and column are multiples
    of 8.
    """

    @device_function
    def lane():
        return int64(uint32(cuda.threadIdx.x) % uint32(WARP))

    @device_function
    def to_search(first, begin, count, paired):
        start = first // 8 * 8
        return min(place_of(start, begin, paired) + lane(), start + (count * 8 >> paired) - 1)

    @device_function
    def value_in(value, first, i, paired):
        return cuda.shfl_sync(uint32(0xFFFFFFFF), value, int32(place_of(first % 8, i, paired) % WARP))

    @device_function
    def found_in(value, first, i, last, paired):
        return (
            value_in(value, first, i, paired),
            value_in(value, first, min(i + 1, last), paired),
            value_in(value, first, min(i + 2, last), paired),
            value_in(value, first, min(i + 3, last), paired),
        )

    @device_function
    def any_of_all(condition):
        return cuda.any_sync(uint32(0xFFFFFFFF), condition)

    return (WARP // 8, WARP // 4), 4, to_search, found_in, any_of_all


def search(ahead: int, element):
    """Make a device function ``(parts, x, line, k, slot_bits, marked)`` that finds elements ``x[line, k]``.

    It returns the first k, not below the one given, of an element that is not ordinary, and the element; or the end of
    k, and zero. If `marked`, it skips slots without a mark. `ahead` is the number of marks, or elements, that are
    loaded at a time, a power of two of at most a slot's terms. `element` reads an element of x.
    """

    @device_function
    def next_marked(parts, line, slot, slots):
        col = parts.shape[1] // MARKED_WORDS * ROW_WORDS + line
        found = slots
        while slot < slots and found == slots:
            for i in range(ahead):
                at = min(slot + (ahead - 1 - i), slots - 1)
                if parts[at, col] != float32(0):
                    found = at
            slot += ahead
        return found

    @device_function
    def next_special(parts, x, line, k, slot_bits, marked):
        end, value = x.shape[1], float32(0)
        found = end
        while k < end and found == end:
            slot = k >> slot_bits
            if marked and k == slot << slot_bits:
                k = next_marked(parts, line, slot, ((end - 1) >> slot_bits) + 1) << slot_bits
            start = k & -ahead
            for i in range(ahead):
                at = min(start + (ahead - 1 - i), end - 1)
                one = element(x, line, at)  # even if it is not wanted: loads under conditions wait for each other
                if not abs(one) <= float32(ORDINARY) and at >= k:
                    found, value = at, one
            k = start + ahead
        return found, value

    return next_special


@device_function
def place_of(first, i, paired):
    """Return the i-th row or column of a thread's sums; columns come in pairs."""
    return first + (i >> paired) * 8 + (i & paired)


@lru_cache(maxsize=64)
def infinite_terms(rows: int, cols: int, ahead: int = AHEAD, team=alone, narrow: bool = False):
    """Make a device function ``(sums, a, b, x, y, row, col, slot_bits, a_marked)``: infinite terms of a thread's sums.

    The sums are those of `rows` rows, eight apart from `row` on, and of `cols` columns: `col` and the next, and so on
    every eight columns. `sums` has bit ``i * cols + j`` for the sum of the i-th row and j-th column, if it is wanted.
    `a` and `b` are the decomposed operands, `x` and `y` the original ones; a slot has ``2**slot_bits`` terms. Unless
    `a_marked`, `a` is not read. The function returns three masks: of sums with a term of plus infinity, of sums with
    one of minus infinity, and of sums with an element that is finite and not ordinary. A term that is NaN counts as
    both infinities. A search ends when every wanted sum is settled: it is NaN, or is to be recomputed because of a
    finite element that is not ordinary. Lanes of a warp end together. With `lanes_of_warp` as `team`, all lanes of the
    warp must call the function, with the rows and columns that they have of a tensor core's accumulator. If `narrow`, x
    has rows of BF16.
    """
    most, LINES, to_search, found_in, any_of_all = team()
    ROWS, COLS = min(most[0], rows), min(most[1], cols)  # own lines per turn; LINES of them per exchange
    ONE_ROW, ONE_COL = (1 << cols) - 1, sum(1 << i * cols for i in range(rows))
    FIRST_ROWS, FIRST_COLS = (1 << ROWS * cols) - 1, ((1 << COLS) - 1) * ONE_COL
    OTHERS = min(8 // LINES, max(rows, cols))  # columns, or rows, of the other operand whose terms are loaded at a time
    next_special, element = search(ahead, elements(narrow)), elements(narrow)

    @device_function
    def term_of(value, other, place, k, end):
        return value * element(other, place, min(k, end - 1))

    @device_function
    def one_term(values, other, place, places, end):
        return (term_of(values[0], other, place, places[0], end),)

    # Written out, so that all loads are on their way: the compiler unrolls loops of few instructions only.
    @device_function
    def four_terms(values, other, place, places, end):
        return (
            term_of(values[0], other, place, places[0], end),
            term_of(values[1], other, place, places[1], end),
            term_of(values[2], other, place, places[2], end),
            term_of(values[3], other, place, places[3], end),
        )

    terms_of = one_term if LINES == 1 else four_terms

    @device_function
    def terms(sums, a, b, x, y, row, col, slot_bits, a_marked):
        positive, negative, large = uint64(0), uint64(0), uint64(0)
        end = x.shape[1]
        # For rows, then for columns. Written out for both, this would take more registers than there are.
        parts, own, other, first, other_first = a, x, transposed(y), row, col
        mask, step, count, other_step, other_count = uint64(ONE_ROW), int64(cols), int64(rows), int64(1), int64(cols)
        at_once, group, paired = int64(ROWS), uint64(FIRST_ROWS), int64(0)
        while paired < 2 and end > 0:
            begin = int64(0)
            while begin < count:
                line, k = min(to_search(first, begin, count, paired), own.shape[0] - 1), int64(-1)
                wanted = sums & (group << uint64(begin * step)) & ~(positive & negative | large)
                while any_of_all(wanted != uint64(0)):
                    k, special = next_special(parts, own, line, min(k + 1, end), slot_bits, a_marked or paired == 1)
                    i, last, wanted = begin, min(begin + at_once, count) - 1, uint64(0)
                    while i <= last:
                        places = found_in(k, first, i, last, paired)
                        values = found_in(special, first, i, last, paired)
                        infinite = uint64(0)  # sums with an infinite term, or NaN
                        for n in range(LINES):
                            mine = sums & (mask << uint64(min(i + n, last) * step))
                            if places[n] < end and mine & ~(positive & negative | large):
                                wanted |= mine
                                if abs(values[n]) < float32(inf):
                                    large |= mine
                                else:
                                    infinite |= mine
                        j = int64(0)
                        while infinite and j < other_count:
                            for following in range(OTHERS):
                                at = min(j + following, other_count - 1)
                                place = min(place_of(other_first, at, 1 - paired), other.shape[0] - 1)
                                products = terms_of(values, other, place, places, end)
                                for n in range(LINES):
                                    bit = uint64(1) << uint64(min(i + n, last) * step + at * other_step)
                                    if not products[n] < float32(0):
                                        positive |= infinite & bit
                                    if not products[n] > float32(0):
                                        negative |= infinite & bit
                            j += OTHERS
                        i += LINES
                    wanted &= ~(positive & negative | large)
                begin += at_once
            parts, own, other, first, other_first = b, transposed(y), x, col, row
            mask, step, count, other_step, other_count = uint64(ONE_COL), other_step, other_count, step, count
            at_once, group = int64(COLS), uint64(FIRST_COLS)
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
