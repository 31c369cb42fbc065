"""Scales of the rows of A and columns of B, for parts in F16.

A row is multiplied by a power of two, its scale, such that its largest element is between 2^14 and 2^15; no scale is
above 2^120. Sums are divided by the scales of their row and column. To this end, the reciprocal of a scale is kept as
two powers of two, of about half its logarithm each, in one word of two BF16. A sum is multiplied by the product of the
first powers of row and column, then by that of the second ones. Both products are floats, and the sum overflows, or
loses bits below the range of floats, only if the result does.
"""

from __future__ import annotations

import numpy as np
from numba import int32

from ...device.mma import bf16_floats
from ...device.narrow import exponent, pair, power
from ...simulator.switch import device_function

TOP = 14  # logarithm of the magnitude to which the largest element of a row is scaled
FARTHEST = 120  # limit of a scale's logarithm, so that the products of halves are floats


@device_function
def scale_logarithm(largest):
    """Binary logarithm of the scale of a row whose largest magnitude is `largest`."""
    scale = int32(TOP - exponent(largest))
    return int32(max(int32(-FARTHEST), min(int32(FARTHEST), scale)))


@device_function
def reciprocal(logarithm):
    """Reciprocal of a scale, as a word."""
    half = int32(logarithm // 2)
    return pair(power(int32(-half)), power(int32(half - logarithm)))


@device_function
def unscaled(total, row_word, col_word):
    """Divide a sum by the scales of its row and column, whose reciprocals are given."""
    row, col = bf16_floats(row_word.view(np.uint32)), bf16_floats(col_word.view(np.uint32))
    return total * (row[0] * col[0]) * (row[1] * col[1])
