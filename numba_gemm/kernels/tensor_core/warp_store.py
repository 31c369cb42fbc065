"""Stores of C by a warp, after a matrix instruction.

The lanes of a warp then have pairs of adjacent elements of eight rows. If each lane stored its pairs, a store would
touch one sector of memory (32 bytes) of each row; if it could store only single floats, the next store would touch the
same sectors again. Lanes therefore exchange their sums: three times, until a store writes 32 adjacent elements of one
row; or, if rows of C begin at sectors, at most once, after which a store writes two whole sectors of each row.
"""

from __future__ import annotations

from functools import lru_cache

from numba import cuda, float32, int32, int64, uint32

from ...device.access import SECTOR
from ...device.address import (
    address_of,
    col_step,
    global_load1,
    global_load2,
    global_store,
    global_store1_if,
    row_step,
)
from ...device.units import FLOAT32_BYTES
from ...simulator.switch import device_function

SECTOR_BYTES = SECTOR * FLOAT32_BYTES
ENOUGH = 1 << 16  # more rows or columns than a tile has


@device_function
def elements_from(extent, at):
    """Return the number of elements from the index `at` on, at most `ENOUGH`; negative if it is beyond the end."""
    return int32(min(extent - at, int64(ENOUGH)))


@device_function
def exchanged(first, second, upper, distance):
    """Exchange one of two values with the lane at a distance.

    The lower of the two lanes gets both first values, the `upper` one both second values; the lower lane's come first.
    """
    other = cuda.shfl_xor_sync(uint32(0xFFFFFFFF), cuda.selp(upper, first, second), distance)
    return cuda.selp(upper, other, first), cuda.selp(upper, second, other)


@device_function
def pairs_exchanged(x, upper, distance):
    """Exchange one value of each pair with the lane at a distance; return those of the lower lane first."""
    a, b = exchanged(x[0], x[1], upper, distance)
    c, d = exchanged(x[2], x[3], upper, distance)
    e, f = exchanged(x[4], x[5], upper, distance)
    g, h = exchanged(x[6], x[7], upper, distance)
    return a, c, e, g, b, d, f, h


@device_function
def turned(x, quad):
    """Exchange eight elements of a row for one element of each of eight rows; `quad` is the lane's number over 4."""
    x = pairs_exchanged(x, quad & 1 != 0, 4)
    x = pairs_exchanged(x, quad & 2 != 0, 8)
    return pairs_exchanged(x, quad & 4 != 0, 16)


@device_function
def add_pair(c, at, alpha, sums, beta, j, first, second):
    """Multiply two sums of group j by alpha, and add beta times the elements of C at an address."""
    old = global_load2(c, at)
    # Rounded as the compiler does in `store_axpby1`, so that bits do not depend on the alignment of C.
    sums[j, first] = cuda.fma(alpha, sums[j, first], beta * old[0])
    sums[j, second] = cuda.fma(alpha, sums[j, second], beta * old[1])


@lru_cache(maxsize=16)
def warp_store(down: int, below: tuple[int, int, int], across: int, deep: int, together: bool, fours: bool):
    """Make a device function ``(c, row, col, alpha, sums, beta, inside)`` that writes a warp's part of C.

    It writes ``alpha * sums + beta * C``, as far as C has such elements, and may overwrite the sums. A warp has `deep`
    times 16 rows and `across` groups of eight columns, a multiple of four. In each group of 16 rows, a lane has two
    adjacent sums of a row, and two of the row `down` below it. `below` tells how many rows further down the lanes 4, 8
    and 16 further on are: three powers of two, whose bits are 0 in the first lane's row. `row` and `col` are the lane's
    first ones. `inside` means that C has all elements.

    If `together`, all lanes of a warp call the function, and exchange sums if rows of C are contiguous. Where rows
    begin at sectors, they store pairs as they are or, if `fours`, exchange once and store four elements each; `fours`
    takes a vote, with which the compiler schedules some main loops less well. If columns of C are contiguous instead,
    nothing is exchanged.
    """
    ROWS = tuple(sum(rows for bit, rows in enumerate(below) if quad >> bit & 1) for quad in range(8))

    def for_groups(count, visit):
        """Make a device function that visits all groups of eight columns, `count` at a time.

        ``visit(c, at, alpha, sums, j, rows, cols, given)`` has the address of a lane's first sum in group j, and the
        numbers of rows and columns from there on; `given` is beta if C is added, or the lane's role in an exchange.
        There are two loops, since the compiler unrolls only short ones.
        """
        GROUPS = deep * across
        HALF = GROUPS // (2 * count) * count

        @device_function
        def visit_at(c, start, alpha, sums, j, rows, cols, given):
            lower, right = j // across * 16, j % across * 8
            at = start + lower * row_step(c) + right * col_step(c)
            visit(c, at, alpha, sums, j, int32(rows - lower), int32(cols - right), given)

        @device_function
        def visit_all(c, start, alpha, sums, rows, cols, given):
            for j in range(0, HALF, count):
                visit_at(c, start, alpha, sums, j, rows, cols, given)
            for j in range(HALF, GROUPS, count):
                visit_at(c, start, alpha, sums, j, rows, cols, given)

        return visit_all

    @device_function
    def add_pairs(c, at, alpha, sums, j, rows, cols, beta):
        add_pair(c, at, alpha, sums, beta, j, 0, 1)
        add_pair(c, at + down * row_step(c), alpha, sums, beta, j, 2, 3)

    @device_function
    def add_floats(c, at, alpha, sums, j, rows, cols, beta):
        for q in range(4):
            lower, right = q // 2 * down, q % 2
            to = at + lower * row_step(c) + right * col_step(c)
            # In place of an element that C does not have, any other one.
            old = global_load1(c, to if rows > lower and cols > right else address_of(c, int64(0), int64(0)))
            sums[j, q] = cuda.fma(alpha, sums[j, q], beta * old[0])

    @device_function
    def store_pairs(c, at, alpha, sums, j, rows, cols, given):
        global_store(c, at, (alpha * sums[j, 0], alpha * sums[j, 1]))
        global_store(c, at + down * row_step(c), (alpha * sums[j, 2], alpha * sums[j, 3]))

    @device_function
    def store_floats(c, at, alpha, sums, j, rows, cols, given):
        for q in range(4):
            lower, right = q // 2 * down, q % 2
            to = at + lower * row_step(c) + right * col_step(c)
            global_store1_if(c, to, alpha * sums[j, q], rows > lower and cols > right)

    @device_function
    def store_fours(c, at, alpha, sums, j, rows, cols, odd):
        """Write two groups: an even lane four elements of the first one, an odd lane of the second one."""
        to = at + (24 if odd else 0)
        for q in range(0, 4, 2):
            first, third = exchanged(sums[j, q], sums[j + 1, q], odd, 1)
            second, fourth = exchanged(sums[j, q + 1], sums[j + 1, q + 1], odd, 1)
            values = (alpha * first, alpha * second, alpha * third, alpha * fourth)
            global_store(c, to + q // 2 * down * row_step(c), values)

    @device_function
    def store_column(c, to, alpha, x, rows, inside):
        """Write one element of each of eight rows."""
        step = row_step(c)
        global_store1_if(c, to, alpha * x[0], rows > 0 and inside)
        global_store1_if(c, to + ROWS[1] * step, alpha * x[1], rows > ROWS[1] and inside)
        global_store1_if(c, to + ROWS[2] * step, alpha * x[2], rows > ROWS[2] and inside)
        global_store1_if(c, to + ROWS[3] * step, alpha * x[3], rows > ROWS[3] and inside)
        global_store1_if(c, to + ROWS[4] * step, alpha * x[4], rows > ROWS[4] and inside)
        global_store1_if(c, to + ROWS[5] * step, alpha * x[5], rows > ROWS[5] and inside)
        global_store1_if(c, to + ROWS[6] * step, alpha * x[6], rows > ROWS[6] and inside)
        global_store1_if(c, to + ROWS[7] * step, alpha * x[7], rows > ROWS[7] and inside)

    @device_function
    def of_a_row(sums, j, q):
        return (
            *(sums[j, q], sums[j, q + 1], sums[j + 1, q], sums[j + 1, q + 1]),
            *(sums[j + 2, q], sums[j + 2, q + 1], sums[j + 3, q], sums[j + 3, q + 1]),
        )

    @device_function
    def store_32(c, at, alpha, sums, j, rows, cols, quad):
        """Write four groups: the lanes 32 adjacent elements at a time."""
        store_column(c, at, alpha, turned(of_a_row(sums, j, 0), quad), rows, cols > 0)
        lower = at + down * row_step(c)
        store_column(c, lower, alpha, turned(of_a_row(sums, j, 2), quad), int32(rows - down), cols > 0)

    add_all_pairs, add_all_floats = for_groups(1, add_pairs), for_groups(1, add_floats)
    store_all_pairs, store_all_floats = for_groups(1, store_pairs), for_groups(1, store_floats)
    store_all_fours, store_all_rows = for_groups(2, store_fours), for_groups(4, store_32)

    def rows_at(size):
        """Make a device function ``(c, row, col)`` that tells whether C allows accesses of `size` bytes by rows.

        They begin in column `col`. The size is a constant of the device function: a parameter would be a variable.
        """

        @device_function
        def at(c, row, col):
            return col_step(c) == 4 and (address_of(c, row, col) | row_step(c)) % size == 0

        return at

    in_pairs, at_vectors = rows_at(8), rows_at(SECTOR_BYTES if together else 8)

    @device_function
    def write_aligned(c, row, col, alpha, sums):
        if fours:
            store_all_fours(c, address_of(c, row, col), alpha, sums, 0, 0, col // 2 % 2 != 0)
        else:
            store_all_pairs(c, address_of(c, row, col), alpha, sums, 0, 0, 0)

    @device_function
    def write_exchanged(c, row, col, alpha, sums):
        # From row and column, which are at hand: what depends on the thread alone would be kept in a register.
        first, second, third = row // below[0] % 2, row // below[1] % 2, row // below[2] % 2
        own_row = row - (first * below[0] + second * below[1] + third * below[2])
        own_col = col + first + 8 * (second + 2 * third)
        rows, cols = elements_from(c.shape[0], own_row), elements_from(c.shape[1], own_col)
        quad = int32(first + 2 * second + 4 * third)
        store_all_rows(c, address_of(c, own_row, own_col), alpha, sums, rows, cols, quad)

    @device_function
    def write_floats(c, row, col, alpha, sums):
        rows, cols = elements_from(c.shape[0], row), elements_from(c.shape[1], col)
        store_all_floats(c, address_of(c, row, col), alpha, sums, rows, cols, 0)

    @device_function
    def write(c, row, col, alpha, sums, inside):
        # Exchanges are slow unless the compiler knows that lanes run in step; `all_sync` and `syncwarp` tell it.
        aligned = inside and at_vectors(c, row, col // 8 * 8)
        if fours:
            aligned = cuda.all_sync(uint32(0xFFFFFFFF), aligned)
        if aligned:
            write_aligned(c, row, col, alpha, sums)
        elif together and col_step(c) == 4:
            if not fours:
                cuda.syncwarp()
            write_exchanged(c, row, col, alpha, sums)
        else:
            write_floats(c, row, col, alpha, sums)

    @device_function
    def store(c, row, col, alpha, sums, beta, inside):
        if beta != float32(0):  # all of C is read before any of it is written, so that the reads overlap
            start, rows, cols = address_of(c, row, col), elements_from(c.shape[0], row), elements_from(c.shape[1], col)
            if inside and in_pairs(c, row, col):
                add_all_pairs(c, start, alpha, sums, rows, cols, beta)
            else:
                add_all_floats(c, start, alpha, sums, rows, cols, beta)
            alpha = float32(1)
        write(c, row, col, alpha, sums, inside)

    return store
