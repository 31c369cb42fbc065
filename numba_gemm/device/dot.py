"""One element of a matrix product by its definition: a row of A times a column of B."""

from __future__ import annotations

from numba import float32

from ..simulator.switch import device_function

TERMS = 8


@device_function
def dot(a, b, row, col):
    """Sum of ``a[row, p] * b[p, col]`` over p.

    Each iteration adds eight terms: incrementing p and two 64-bit addresses costs more instructions than a term does,
    and the compiler unrolls a loop of unknown length only by four.
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
