"""Products of a warp's fragments: 32 rows of A by 32 columns of B, of all parts of a precision.

Fragments are local arrays of four words: two blocks of 16 rows of A, and two of 16 columns of B, for each part. A block
of 16 columns is two of `mma.multiply`. Sums are a local array of shape (8, 4), by blocks of 16 rows and eight columns.
"""

from __future__ import annotations

from ...device import mma
from ...simulator.switch import device_function
from .config import WARP_EXTENT
from .precision import TensorPrecision

ROW_BLOCKS, COLUMN_BLOCKS = WARP_EXTENT // 16, WARP_EXTENT // 8
GROUPS = ROW_BLOCKS * COLUMN_BLOCKS  # of four sums per lane
FRAGMENTS = WARP_EXTENT // 16  # per part of A, and of B


def products_of(precision: TensorPrecision, chosen: tuple[tuple[int, int], ...]):
    """Make a device function ``(sums, a_frag, b_frag)`` that adds the products of chosen parts of A and of B."""
    return _products(mma.multiply(precision.kind), chosen)


@device_function
def nothing(sums, a_frag, b_frag):
    """Add nothing; ends the recursion."""


def _products(multiply, chosen):
    """Unroll by recursion, since constants must select the fragments."""
    if not chosen:
        return nothing
    a, b = chosen[0]
    A_FIRST, B_FIRST = a * FRAGMENTS, b * FRAGMENTS
    following = _products(multiply, chosen[1:])

    @device_function
    def products(sums, a_frag, b_frag):
        for i in range(ROW_BLOCKS):
            for j in range(COLUMN_BLOCKS):
                g = i * COLUMN_BLOCKS + j
                c = (sums[g, 0], sums[g, 1], sums[g, 2], sums[g, 3])
                x = A_FIRST + i
                y, half = B_FIRST + j // 2, j % 2 * 2
                left = (a_frag[x, 0], a_frag[x, 1], a_frag[x, 2], a_frag[x, 3])
                c = multiply(c, left, (b_frag[y, half], b_frag[y, half + 1]))
                sums[g, 0], sums[g, 1], sums[g, 2], sums[g, 3] = c[0], c[1], c[2], c[3]
        following(sums, a_frag, b_frag)

    return products
