"""Split-K: sums divided among blocks, and the kernel that adds their partial sums.

The slots of k are divided among S blocks, as equally as possible. Each block writes its partial sums to a matrix of
its own in the scratch memory. These matrices lie below each other, so the multiplying kernel takes them for one C of S
times as many rows. A second kernel adds the S partial sums of each element, then does what the end of a tile does
otherwise: it removes the scales, recomputes what is not finite, and writes C with alpha, beta and the epilogue.

If only the tiles of the last rows of C are divided, or those of the last columns, the multiplying kernel is launched
twice: for the other tiles, which it writes to C, and for these, as for a product of their own. In batches, all tiles
are divided or none.

A thread adds every `groups`-th partial sum of an element, in order of k, and the first thread adds the sums of the
others, in order. So the same product gives the same bits. Each addition's rounding error is found exactly (Knuth, "The
Art of Computer Programming", volume 2, section 4.2.2), and all errors are added at the end: beside one rounding per
partial sum, only the last addition rounds.
"""

from __future__ import annotations

from math import isnan

from numba import cuda, float32, int64, uint32, uint64

from ...device.grid_order import wait_for_last
from ...device.matrix import shifted
from ...device.store import element_store
from ...simulator.switch import device_function, hardware_only
from .config import THREADS
from .epilogue import HUGE
from .scales import unscaled
from .special_values import infinite_terms, special_sums

AT_ONCE = 4  # partial sums that a thread loads at a time


@device_function
def share(row, rows, own_rows, k_slots):
    """Return the tile row of C that a tile row of the partial sums belongs to, its first slot, and its end.

    There are `rows` tile rows of partial sums, `own_rows` of them for each share, and at least as many slots as shares.
    A sum that is not divided is one share.
    """
    if rows == own_rows:
        return row, uint32(0), k_slots
    i, shares = uint32(row // own_rows), uint32(rows // own_rows)
    each = uint32(k_slots // shares)
    more = uint32(k_slots - uint32(each * shares))  # shares with one more slot
    first = uint32(uint32(i * each) + min(i, more))
    end = uint32(first + each)
    if i < more:
        end = uint32(end + 1)
    return uint32(row - uint32(i * own_rows)), first, end


@device_function
def add_exactly(total, rest, value):
    """Return ``total + value``, and `rest` plus what that addition rounded off."""
    whole = total + value
    kept = whole - value
    return whole, rest + ((total - kept) + (value - (whole - kept)))


def build(config, variant):
    """Make the kernel ``(alpha, a, b, beta, c, x, y, partials, words, vectors)``.

    `a` and `b` are the decomposed operands, for their scales and marks, and `x` and `y` the original ones. `words` are
    the bytes from one matrix of a batch to the next of a, b, c, x, y and the partial sums; the number of shares; that
    of threads per element, a power of two; the binary logarithm of the terms per slot if sums that are not finite are
    looked for, else 0; 1 if rows and columns have scales, 2 if A is not decomposed, and `a` stands for no marks; and
    the first row and the first column of C whose sums are divided, of which there are partial sums. Along x, the grid
    has one block per ``THREADS // groups`` elements from there on, in row-major order; along y, the matrices of a
    batch.
    """
    store1, special_terms = element_store(variant.epilogue), infinite_terms(1, 1, ahead=4, narrow=variant.narrow_a)
    special_sum = special_sums(variant.narrow_a)

    @device_function
    def run(alpha, a, b, beta, c, x, y, partials, words, vectors):
        wait_for_last()  # all partial sums have been written
        i = int64(cuda.blockIdx.y)
        a, b, c = shifted(a, i * words[0]), shifted(b, i * words[1]), shifted(c, i * words[2])
        x, y, partials = shifted(x, i * words[3]), shifted(y, i * words[4]), shifted(partials, i * words[5])
        totals = cuda.shared.array(THREADS, float32)
        rests = cuda.shared.array(THREADS, float32)
        tid, shares, groups = uint32(cuda.threadIdx.x), uint32(words[6]), uint32(words[7])
        slot_bits, scaled = words[8], words[9] == 1
        width = uint32(THREADS // groups)  # elements per block
        group, rows = uint32(tid // width), int64(uint32(uint32(partials.shape[0]) // shares))
        element = uint32(uint32(uint32(cuda.blockIdx.x) * width) + uint32(tid % width))
        cols = c.shape[1] - words[11]
        down = int64(uint32(element // uint32(cols)))
        across = int64(element) - down * cols
        row, col = down + words[10], across + words[11]
        inside = row < c.shape[0]

        of_row, of_col = float32(0), float32(0)
        if scaled and inside:  # loaded before the partial sums, so that nothing waits for them
            of_row, of_col = a[a.shape[0] - 1, row], b[b.shape[0] - 1, col]
        total, rest = float32(0), float32(0)
        values = cuda.local.array(AT_ONCE, float32)
        s = group
        while s < shares:
            for j in range(AT_ONCE):
                at = uint32(s + j * groups)
                values[j] = float32(0)
                if inside and at < shares:
                    values[j] = partials[int64(at) * rows + down, across]
            for j in range(AT_ONCE):
                total, rest = add_exactly(total, rest, values[j])
            s = uint32(s + AT_ONCE * groups)
        if groups > uint32(1):
            totals[tid] = total
            rests[tid] = rest
            cuda.syncthreads()  # all threads have written their sums before the first of an element reads them
        if group == uint32(0) and inside:
            j = uint32(1)
            while j < groups:
                total, rest = add_exactly(total, rest, totals[j * width + tid])
                rest += rests[j * width + tid]
                j = uint32(j + 1)
            if not isnan(rest):  # it is NaN where a total is not finite
                total += rest
            if scaled:
                total = unscaled(total, of_row, of_col)
            if slot_bits > 0 and not abs(total) < float32(HUGE):
                found = special_terms(uint64(1), a, b, x, y, row, col, slot_bits, words[9] != 2)
                total = special_sum(uint64(1), found, x, y, row, col)
            store1(c, row, col, alpha, total, beta, vectors)

    bounds = hardware_only(launch_bounds=(THREADS, 4))  # few registers: threads wait for memory

    @cuda.jit(**bounds)
    def add_partials(alpha, a, b, beta, c, x, y, partials, words):
        run(alpha, a, b, beta, c, x, y, partials, words, ())

    @cuda.jit(**bounds)
    def add_partials_with(alpha, a, b, beta, c, x, y, partials, words, vectors):
        run(alpha, a, b, beta, c, x, y, partials, words, vectors)

    return add_partials_with if variant.vectors else add_partials
