"""The last step of every stage: ``alpha * acc + beta * C``, without reading C when beta is zero."""

from __future__ import annotations

from numba import float32

from .matrix import read4_if, write4_if
from .switch import device_function
from .vector import load4, store4


@device_function
def blend(alpha, acc, beta, c, row, col):
    """``alpha * acc + beta * c[row, col]``; C may hold anything, NaN included, when beta is 0."""
    if beta == float32(0):
        return alpha * acc
    return alpha * acc + beta * c[row, col]


@device_function
def store_blend1(c, row, col, alpha, acc, beta):
    """Write one element of C if it lies inside."""
    if row < c.shape[0] and col < c.shape[1]:
        c[row, col] = blend(alpha, acc, beta, c, row, col)


@device_function
def store_blend4(c, row, col, alpha, acc, beta):
    """Write four neighbours of a row of C in one 128-bit access if they lie inside; the extents are whole vectors.

    ``acc`` is a tuple of the four sums.
    """
    if row < c.shape[0] and col < c.shape[1]:
        if beta == float32(0):
            store4(c, row, col, (alpha * acc[0], alpha * acc[1], alpha * acc[2], alpha * acc[3]))
        else:
            old = load4(c, row, col)
            store4(
                c,
                row,
                col,
                (
                    alpha * acc[0] + beta * old[0],
                    alpha * acc[1] + beta * old[1],
                    alpha * acc[2] + beta * old[2],
                    alpha * acc[3] + beta * old[3],
                ),
            )


@device_function
def store_blend4_any(c, row, col, alpha, acc, beta):
    """`store_blend4` by 32-bit accesses under a mask: any strides, any extents."""
    inside = row < c.shape[0]
    old = read4_if(inside and beta != float32(0), c, row, col)
    write4_if(
        inside,
        c,
        row,
        col,
        (
            alpha * acc[0] + beta * old[0],
            alpha * acc[1] + beta * old[1],
            alpha * acc[2] + beta * old[2],
            alpha * acc[3] + beta * old[3],
        ),
    )


def row_store(columns, apart, aligned):
    """A device function that writes row i of a thread tile of 4, 8 or 16 columns to C, four neighbours at a time.

    Groups of four lie ``apart`` columns from one another. The groups are written out rather than looped over: within
    a loop over the rows, a loop over groups keeps the compiler from unrolling both, and accumulators that are indexed
    at run time live in local memory.
    """
    if columns not in (4, 8, 16):
        raise ValueError(f"thread tiles of 4, 8 or 16 columns can be stored, got {columns}")
    store = store_blend4 if aligned else store_blend4_any

    @device_function
    def store_row(c, row, col, alpha, acc, i, beta):
        store(c, row, col, alpha, (acc[i, 0], acc[i, 1], acc[i, 2], acc[i, 3]), beta)
        if columns >= 8:
            store(c, row, col + apart, alpha, (acc[i, 4], acc[i, 5], acc[i, 6], acc[i, 7]), beta)
        if columns == 16:
            store(c, row, col + 2 * apart, alpha, (acc[i, 8], acc[i, 9], acc[i, 10], acc[i, 11]), beta)
            store(c, row, col + 3 * apart, alpha, (acc[i, 12], acc[i, 13], acc[i, 14], acc[i, 15]), beta)

    return store_row
