"""Epilogue of a tile: remove the scales, replace what is not finite, and write C.

Parts of finite elements and their products may be infinite, where the sum of float32 products is finite. Results of NaN
or infinity are therefore determined from the original operands (`special_values`). So are results close to infinity,
since truncated sums may fail to reach it.
"""

from __future__ import annotations

from functools import lru_cache

from numba import cuda, float32, int64, uint32, uint64

from ...device.address import address_of, global_load2
from ...device.matrix import shifted
from ...device.store import element_store
from ...simulator.switch import SIMULATOR, device_function
from ..ladder.partitions import GROUP
from .config import NARROW
from .scales import unscaled
from .special_values import AHEAD, AHEAD_IN_WARP, alone, infinite_terms, lanes_of_warp, special_sums
from .stage import TensorVariant
from .warp_store import warp_store

HUGE = 2.0**126  # four times this is infinite


@device_function
def place(tile, rows, cols):
    """Row and column, in tiles, of a tile index in rows x cols tiles: down eight rows, then to the next column."""
    group = uint32(tile // uint32(GROUP * cols))
    height = min(uint32(GROUP), uint32(rows - group * GROUP))
    within = uint32(tile % uint32(GROUP * cols))
    return uint32(group * GROUP + within % height), uint32(within // height)


@lru_cache(maxsize=64)
def of_batch(variant: TensorVariant):
    """Make a device function ``(a, b, c, x, y, steps)`` that returns the operands of this block's matrix of a batch."""

    @device_function
    def member(a, b, c, x, y, steps):
        i = int64(cuda.blockIdx.y)
        return (
            shifted(a, i * steps[0]),
            shifted(b, i * steps[1]),
            shifted(c, i * steps[2]),
            shifted(x, i * steps[3]),
            shifted(y, i * steps[4]),
        )

    @device_function
    def alone(a, b, c, x, y, steps):
        return a, b, c, x, y

    return member if variant.batched else alone


def for_each_sum(groups: int, visit):
    """Make a device function ``(c, row, col, alpha, sums, beta, vectors)`` that visits every sum of a thread.

    ``visit(found, c, row, col, j, q, alpha, sums[j, q], beta, vectors)`` returns `found`, a 64-bit mask that starts at
    zero, with or without another bit set; the device function returns all bits. A loop covers only two groups: the
    compiler unrolls a loop of few iterations, however long an epilogue is.
    """

    @device_function
    def visit_none(c, row, col, alpha, sums, beta, vectors):
        return uint64(0)

    @lru_cache(maxsize=2)
    def visit_groups(count):
        @device_function
        def visit_at(group, c, row, col, alpha, sums, beta, vectors):
            found = uint64(0)
            for j in range(group, group + count):
                for q in range(4):
                    found = visit(found, c, row, col, j, q, alpha, sums[j, q], beta, vectors)
            return found

        return visit_at

    def visits(first):
        if first >= groups:
            return visit_none
        visit_next, following = visit_groups(min(2, groups - first)), visits(first + 2)

        @device_function
        def visit_rest(c, row, col, alpha, sums, beta, vectors):
            found = visit_next(first, c, row, col, alpha, sums, beta, vectors)
            return found | following(c, row, col, alpha, sums, beta, vectors)

        return visit_rest

    return visits(0)


@lru_cache(maxsize=64)
def sums_store(variant: TensorVariant, across: int, deep: int = 1):
    """Make a device function that writes a warp's sums to C.

    Its parameters are ``(c, row, col, alpha, total, beta, a, b, x, y, vectors, partial)``.

    A warp has `deep` times 16 rows and `across` times 8 columns. In each group of 16 rows and 8 columns, lane l holds
    row l // 4 and the row eight below, and column l % 4 * 2 and the next; `row` and `col` are the lane's first ones.
    `total` is a local array of shape (deep * across, 4), in row-major order of the groups; it may be overwritten. `a`
    and `b` are the parts, `x` and `y` the original operands. If `partial`, scales stay and nothing is recomputed: C is
    aligned and consists of whole tiles, alpha is 1, and beta 0.
    """
    PARTS, SCALED, PLAIN = variant.precision.parts, variant.precision.scaled, variant.epilogue is None
    ACROSS, DEEP, GROUPS = across, deep, across * deep
    COLS, SLOT_BITS = 2 * ACROSS, variant.precision.slot_bits
    store1, READS_ROWS = element_store(variant.epilogue), bool(variant.rows)
    TOGETHER = not (READS_ROWS or SIMULATOR)  # the simulator has no instructions by which lanes vote
    team = lanes_of_warp if TOGETHER else alone
    *_, any_of_all = team()

    @device_function
    def down(row, j, q):
        return row + q // 2 * 8 if DEEP == 1 else row + j // ACROSS * 16 + q // 2 * 8

    @device_function
    def right(col, j, q):
        return col + 8 * j + q % 2 if DEEP == 1 else col + j % ACROSS * 8 + q % 2

    @device_function
    def unscale(total, a, b, row, col):
        """Divide by the scales of the rows and columns."""
        last_row, last_col = a.shape[0] - 1, b.shape[0] - 1
        for j in range(GROUPS):
            cols = global_load2(b, address_of(b, last_col, right(col, j, 0)))  # two columns that are neighbours
            for q in range(4):
                total[j, q] = unscaled(total[j, q], a[last_row, down(row, j, q)], cols[q % 2])

    # Only kernels of depth 1, which run on 9.0, exchange sums: before 9.0, the compiler makes each exchange a call.
    EXCHANGE = TOGETHER and DEEP == 1
    store_plain = warp_store(8, (1, 2, 4), ACROSS, DEEP, EXCHANGE, EXCHANGE and PARTS == 1)

    @device_function
    def is_inside(c, row, col):
        """Return whether C has all elements of a warp, whose first row and column are multiples of 16 and of 8."""
        return row // 16 * 16 + 16 * DEEP <= c.shape[0] and col // 8 * 8 + 8 * ACROSS <= c.shape[1]

    @device_function
    def some_huge(total):
        none = float32(0)
        for j in range(GROUPS):
            for q in range(4):
                none += float32(0) * (float32(4) * total[j, q])  # NaN if the sum, or four times the sum, is infinite
        return any_of_all(none != float32(0))

    @device_function
    def write_one(again, c, row, col, j, q, alpha, value, beta, vectors):
        if PARTS == 1 or abs(value) < float32(HUGE):
            store1(c, down(row, j, q), right(col, j, q), alpha, value, beta, vectors)
        else:
            again |= uint64(1) << uint64((j // ACROSS * 2 + q // 2) * COLS + j % ACROSS * 2 + q % 2)
        return again

    write_all = for_each_sum(GROUPS, write_one)
    narrow, ahead = variant.rows == NARROW, AHEAD_IN_WARP if TOGETHER else AHEAD
    special_terms = infinite_terms(2 * DEEP, COLS, ahead, team, narrow) if PARTS > 1 else None
    special_sum = special_sums(narrow)

    @device_function
    def write(c, row, col, alpha, total, beta, a, b, x, y, vectors):
        again = write_all(c, row, col, alpha, total, beta, vectors)
        if PARTS > 1 and any_of_all(again != uint64(0)):
            found = special_terms(again, a, b, x, y, row, col, int64(SLOT_BITS), not READS_ROWS)
            i = uint32(0)
            while i < uint32(2 * DEEP * COLS):  # must stay a loop: it holds the epilogue
                bit = uint64(1) << uint64(i)
                if again & bit:
                    c_row, c_col = row + int64(i // COLS * 8), col + int64(i % COLS // 2 * 8 + i % 2)
                    if c_row < c.shape[0] and c_col < c.shape[1]:
                        value = special_sum(bit, found, x, y, c_row, c_col)
                        store1(c, c_row, c_col, alpha, value, beta, vectors)
                i = uint32(i + 1)

    @device_function
    def finish(c, row, col, alpha, total, beta, a, b, x, y, vectors, partial):
        if SCALED and not partial:
            unscale(total, a, b, row, col)
        # Unless each lane searches alone, a warp votes, so its lanes take the same way.
        if PLAIN and (PARTS == 1 or partial or not some_huge(total)):
            store_plain(c, row, col, alpha, total, beta, is_inside(c, row, col))
        else:
            write(c, row, col, alpha, total, beta, a, b, x, y, vectors)

    @device_function
    def finish_apart(c, row, col, alpha, total, beta, a, b, x, y, vectors, partial):
        # With an epilogue, even short loops may stay rolled. Arrays that are indexed at run time are in local memory,
        # and the accumulators must not be: hence the copy.
        apart = cuda.local.array((GROUPS, 4), float32)
        for j in range(GROUPS):
            for q in range(4):
                apart[j, q] = total[j, q]
        finish(c, row, col, alpha, apart, beta, a, b, x, y, vectors, partial)

    return finish if PLAIN else finish_apart
