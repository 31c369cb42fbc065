"""One element of a product, as the definition has it: a row of A times a column of B."""

from __future__ import annotations

from numba import float32

from ..simulator.switch import device_function

TERMS = 8


@device_function
def dot(a, b, row, col):
    """Sum of ``a[row, p] * b[p, col]`` over p.

    Eight terms a turn: counting p and moving two 64-bit addresses costs more instructions than a term does, and the
    compiler unrolls a loop of unknown length by four only.
    """
    k = a.shape[1]
    acc = float32(0)
    p = 0
    while p + TERMS <= k:
        for q in range(TERMS):
            acc += a[row, p + q] * b[p + q, col]
        p += TERMS
    while p < k:
        acc += a[row, p] * b[p, col]
        p += 1
    return acc
