"""Compensated summation: float32 sums whose error does not grow with the number of terms.

The terms of a sum are added in chunks, each by a few multiply-adds. A chunk starts at what the previous addition to the
total rounded off (Kahan, 1965, doi:10.1145/363707.363723). In units of u = 2^-24 times the sum of the terms'
magnitudes, to first order in u:

- a chunk of c terms rounds c times, and errs by at most c;
- ``total + chunk`` is rounded, but ``chunk - (larger - total)`` is what was rounded off, exactly, if the total is no
  smaller than the chunk (Dekker, 1971, doi:10.1007/BF01397083). Otherwise, ``larger - total`` is rounded too, which
  errs by at most 1 unit of the chunk's terms.

So the pair of total and remainder errs by at most c + 1 units for any number of terms. Terms of second order add at
most 2 n u units if a thread adds n terms: an eighth of a unit for a million, one for 2^23.

The kernels' bound, to first order, is 8 units, 2^-21, for each element of ``A @ B``. `stream_k` has chunks of up to six
terms, and adds the total and the remainder at the end: 6 + 1 + 1 units. `small_matrices` does the same with chunks of
four terms: 4 + 1 + 1 units; or lanes add both in float64, which errs no more. `thin` has such chunks, and each lane
adds total and remainder. Sums of lanes, and of blocks, are added in float64 and kept in two floats, so only the element
itself is rounded once more: 4 + 1 + 1 + 1 units. Up to 8 terms need no compensation: plain sums err by at most one unit
per term (Jeannerod and Rump, 2013, doi:10.1137/120894488).
"""

from __future__ import annotations

from functools import lru_cache
from math import inf

from numba import float32, int64

from ..simulator.switch import device_function


@lru_cache(maxsize=64)
def compensated_sums(rows: int, columns: int, checked: bool = True):
    """Return device functions for a thread tile: its chunks ``acc`` and its ``total``.

    - ``clear(total)`` begins sums;
    - ``add_exactly(total, acc)`` adds the chunks, and leaves in ``acc`` what it rounded off, where the next chunk
      starts. After infinity or NaN, that is zero if `checked`: the difference of two infinities would make NaN of an
      infinite sum. If not, such sums must be computed again, by `plain_sums`;
    - ``finish(total, acc)`` sets ``acc`` to the sums.
    """

    @device_function
    def clear(total):
        for i in range(rows):
            for j in range(columns):
                total[i, j] = float32(0)

    @device_function
    def add_exactly(total, acc):
        for i in range(rows):
            for j in range(columns):
                larger = total[i, j] + acc[i, j]
                rest = acc[i, j] - (larger - total[i, j])
                acc[i, j] = rest if not checked or abs(larger) < float32(inf) else float32(0)
                total[i, j] = larger

    @device_function
    def finish(total, acc):
        for i in range(rows):
            for j in range(columns):
                acc[i, j] += total[i, j]

    return clear, add_exactly, finish


@lru_cache(maxsize=64)
def plain_sums(rows: int, columns: int, lanes_m: int, lanes_n: int):
    """Return a device function ``(total, acc, x, y, row, col, a_frag, b_frag)`` for sums that were not checked.

    It computes those in ``acc`` that are infinite or NaN again, as plain sums of the terms ``x[i, k] * y[j, k]``. Sums
    of rows beyond x or y stay what they are: these are not stored.
    """

    @device_function
    def place(i, lanes):
        return int64(i // 4 * (4 * lanes) + i % 4)

    @device_function
    def special(total, acc, x, y, row, col, a_frag, b_frag):
        found = False
        for i in range(rows):
            for j in range(columns):
                found |= not abs(acc[i, j]) < float32(inf)
        if found:
            found = False
            for i in range(rows):
                for j in range(columns):
                    total[i, j] = float32(0)
                    inside = row + place(i, lanes_m) < x.shape[0] and col + place(j, lanes_n) < y.shape[0]
                    found |= inside and not abs(acc[i, j]) < float32(inf)
        k = int64(0) if found else x.shape[1]
        while k < x.shape[1]:
            for i in range(rows):
                at = row + place(i, lanes_m)
                a_frag[i] = x[at, k] if at < x.shape[0] else float32(0)
            for j in range(columns):
                at = col + place(j, lanes_n)
                b_frag[j] = y[at, k] if at < y.shape[0] else float32(0)
            for i in range(rows):
                for j in range(columns):
                    total[i, j] += a_frag[i] * b_frag[j]
            k += 1
        if found:
            for i in range(rows):
                for j in range(columns):
                    if not abs(acc[i, j]) < float32(inf):
                        acc[i, j] = total[i, j]

    return special
