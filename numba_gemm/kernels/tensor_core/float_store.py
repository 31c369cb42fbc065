"""Stores of single floats, for a C whose rows are not aligned, or end within a tile.

After a matrix instruction, the lanes of a warp have pairs of adjacent elements of eight rows. A store of one of each
pair would touch two sectors of memory (32 bytes) in each row, and the store of the others the same ones again. Lanes
therefore exchange their sums, until a store writes 32 adjacent elements of one row.
"""

from __future__ import annotations

from functools import lru_cache

from numba import cuda, int32, int64, uint32

from ...device.address import address_of, col_step, global_store1_if, row_step
from ...simulator.switch import device_function

TOGETHER = 4  # groups of eight columns that are exchanged, and stored, together
ENOUGH = 1 << 16  # more rows or columns than a tile has


@device_function
def elements_from(extent, at):
    """Return the number of elements from the index `at` on, at most `ENOUGH`; negative if it is beyond the end."""
    return int32(min(extent - at, int64(ENOUGH)))


@device_function
def exchanged(first, second, upper, distance):
    """Exchange one of two values with the lane at a distance: the `upper` one of both lanes gets the second values."""
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


@lru_cache(maxsize=16)
def float_store(down: int, below: tuple[int, int, int], across: int, deep: int, together: bool):
    """Make a device function ``(c, row, col, alpha, sums)`` that writes a lane's sums, as far as C has such elements.

    A warp has `deep` times 16 rows and `across` groups of eight columns, a multiple of four. In each group of 16 rows,
    a lane has two adjacent sums of a row, and two of the row `down` below it; the rows of the lanes that are 4, 8 and
    16 further on are `below` it, by powers of two that no bit of the first lane's row has. `row` and `col` are the
    lane's first ones. If `together`, all lanes of a warp call the function, and exchange sums if rows of C are
    contiguous. In columns, eight lanes have adjacent elements anyway.
    """
    GROUPS, HALF = deep * across, deep * across // (2 * TOGETHER) * TOGETHER
    ROWS = tuple(sum(rows for bit, rows in enumerate(below) if quad >> bit & 1) for quad in range(8))

    @device_function
    def store_own(c, start, alpha, sums, j, rows, cols, quad):
        """Write the sums of four groups, as a lane has them."""
        for i in range(TOGETHER):
            for q in range(4):
                lower, right = q // 2 * down, i * 8 + q % 2
                to = start + lower * row_step(c) + right * col_step(c)
                global_store1_if(c, to, alpha * sums[j + i, q], rows > lower and cols > right)

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
    def store_exchanged(c, start, alpha, sums, j, rows, cols, quad):
        """Write the sums of four groups so that the lanes of a warp write 32 adjacent elements."""
        inside = cols > 0
        store_column(c, start, alpha, turned(of_a_row(sums, j, 0), quad), rows, inside)
        lower = start + down * row_step(c)
        store_column(c, lower, alpha, turned(of_a_row(sums, j, 2), quad), int32(rows - down), inside)

    def of_all_groups(store_four):
        """Make a device function that writes all sums; `row` and `col` are those that the lane writes first."""

        @device_function
        def store_at(c, start, alpha, sums, j, rows, cols, quad):
            lower, right = j // across * 16, j % across * 8
            to = start + lower * row_step(c) + right * col_step(c)
            store_four(c, to, alpha, sums, j, int32(rows - lower), int32(cols - right), quad)

        @device_function
        def store(c, row, col, alpha, sums, quad):
            start, rows, cols = address_of(c, row, col), elements_from(c.shape[0], row), elements_from(c.shape[1], col)
            for j in range(0, HALF, TOGETHER):  # the compiler unrolls only short loops
                store_at(c, start, alpha, sums, j, rows, cols, quad)
            for j in range(HALF, GROUPS, TOGETHER):
                store_at(c, start, alpha, sums, j, rows, cols, quad)

        return store

    store_each, store_rows = of_all_groups(store_own), of_all_groups(store_exchanged)

    @device_function
    def store_alone(c, row, col, alpha, sums):
        store_each(c, row, col, alpha, sums, 0)

    @device_function
    def store_together(c, row, col, alpha, sums):
        if col_step(c) == 4:
            cuda.syncwarp()  # exchanges between lanes that do not run in step are slow
            # From the row, which is at hand: what depends on the thread alone would be kept in a register all the time.
            first, second, third = row // below[0] % 2, row // below[1] % 2, row // below[2] % 2
            own_row = row - (first * below[0] + second * below[1] + third * below[2])
            quad = int32(first + 2 * second + 4 * third)
            store_rows(c, own_row, col + first + 8 * (second + 2 * third), alpha, sums, quad)
        else:
            store_alone(c, row, col, alpha, sums)

    return store_together if together else store_alone
