"""Outer product of a thread's fragments, in a selectable order.

All orders compute the same TM*TN products and add each to its own accumulator once, so their results are bitwise equal.
They differ in which operand stays the same from one multiply-add to the next, and so in what the compiler can keep out
of the register file. `numba_gemm.inspect.ffma` reads this from SASS; ``numba-gemm lab orders`` measures
it. The compiler starts from this order but chooses its own.

The functions are plain Python over indexable fragments, so the simulator uses them unchanged.
"""

from __future__ import annotations

from functools import lru_cache

from ..simulator.switch import device_function

ORDERS = ("columns", "rows", "snake", "4x4", "4x4-columns")
"""What `outer_product` takes, the default of ``TileConfig.order`` first."""


@lru_cache(maxsize=64)
def outer_product(TM, TN, order):
    """Return a device function ``multiply(a_frag, b_frag, acc)`` that adds the products of one k-step to ``acc``.

    Parameters
    ----------
    TM, TN : int
        Floats in the fragments of A and B; ``acc`` is TM x TN.
    order : str
        ``columns``: outer loop over j, inner loop over i; b_frag[j] stays the same. ``rows``: outer loop over i, inner
        loop over j; a_frag[i] stays the same. ``snake``: as ``rows``, with every other row backwards, so that b_frag[j]
        stays the same at the turn. ``4x4``: blocks of four rows and four columns, row by row, also within a block.
        ``4x4-columns``: the same blocks, column by column, also within a block.

    Raises
    ------
    ValueError
        For an unknown order, or for extents that the order does not divide.
    """
    if order not in ORDERS:
        raise ValueError(f"unknown order {order!r} of the outer product; the orders are {', '.join(ORDERS)}")
    if order == "snake" and TM % 2:
        raise ValueError(f"order snake takes rows in pairs: TM % 2 == 0, got {TM}")
    if order.startswith("4x4") and (TM % 4 or TN % 4):
        raise ValueError(f"order {order} takes blocks of 4x4: TM % 4 == TN % 4 == 0, got {TM}x{TN}")

    def columns(a_frag, b_frag, acc):
        for j in range(TN):
            for i in range(TM):
                acc[i, j] += a_frag[i] * b_frag[j]

    def rows(a_frag, b_frag, acc):
        for i in range(TM):
            for j in range(TN):
                acc[i, j] += a_frag[i] * b_frag[j]

    def snake(a_frag, b_frag, acc):
        for i in range(0, TM, 2):
            for j in range(TN):
                acc[i, j] += a_frag[i] * b_frag[j]
            for j in range(TN):
                acc[i + 1, TN - 1 - j] += a_frag[i + 1] * b_frag[TN - 1 - j]

    def blocks(a_frag, b_frag, acc):
        for i in range(0, TM, 4):
            for j in range(0, TN, 4):
                for y in range(4):
                    for x in range(4):
                        acc[i + y, j + x] += a_frag[i + y] * b_frag[j + x]

    def blocks_by_columns(a_frag, b_frag, acc):
        for j in range(0, TN, 4):
            for i in range(0, TM, 4):
                for x in range(4):
                    for y in range(4):
                        acc[i + y, j + x] += a_frag[i + y] * b_frag[j + x]

    made = {"columns": columns, "rows": rows, "snake": snake, "4x4": blocks, "4x4-columns": blocks_by_columns}
    return device_function(made[order])
