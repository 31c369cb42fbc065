"""Decomposition of two operands into narrow parts, in the order in which the stages' copies fetch them (see `stage`).

An operand is treated as (mn, k): A as it is, B transposed. An operand that is not contiguous along k is transposed on
the way. Beyond the operand's edges the parts are zero. Each element is read once and each of its parts is written once:
4 bytes in, 8 out for two parts of TF32, 6 for three of BF16, 4 for two of F16. For a scaled precision, another kernel
(`build_row_maxima`) first reads all elements to find the largest of each row, which determines its scale (`scales`).
With several parts, each row of a slot gets a mark if an element is not ordinary (`special_values`).

An infinity, or an element that rounds to one, leaves a remainder of NaN or infinity. Parts have the exponent range of
their narrow format, so the last ones lose bits, or vanish, for small elements: below 2^-109 for BF16, or 2^-114 for
TF32. For F16, these are elements below 2^-28 of the largest in their row: its second parts are multiplied by a factor
(`TensorPrecision.second_factor`).
"""

from __future__ import annotations

from numba import cuda, float32, int64, uint32

from ...device.address import address_of, col_step, global_load4_or_zero, shared_address, shared_load4, shared_store4
from ...device.grid_order import let_next_start, wait_for_last
from ...device.matrix import shifted
from ...device.narrow import bf16, f16, pair, pair_f16, power, short_bf16, tf32
from ...device.vector import store4
from ...simulator.switch import device_function, hardware_only
from .config import (
    CHUNK_BYTES,
    CHUNKS,
    DECOMPOSED_ROWS,
    ORDINARY,
    ROW_BYTES,
    ROW_WORDS,
    SPAN,
    THREADS,
    words_per_row,
)
from .precision import TensorPrecision
from .scales import reciprocal, scale_logarithm

AT_ONCE = 16  # elements that a thread loads at a time


@device_function
def place_in_block(x, block, row_blocks):
    """Position of a thread: index of its block along k, row in x, row in the block, chunk of the row."""
    tid = uint32(cuda.threadIdx.x)
    along = col_step(x) == 4  # adjacent threads read adjacent memory
    r = uint32(tid // CHUNKS) if along else uint32(tid % DECOMPOSED_ROWS)
    chunk = uint32(tid % CHUNKS) if along else uint32(tid // DECOMPOSED_ROWS)
    row = int64(uint32(block % row_blocks)) * DECOMPOSED_ROWS + int64(r)
    return uint32(block // row_blocks), row, r, chunk


def places(batched: bool):
    """Make device functions ``(matrix, step)`` and ``(step,)``; `step` is in bytes, between matrices of a batch.

    The first returns this block's matrix, by the block's index along y. The second returns whether this block has
    nothing to do, because all products share one matrix and the first product's blocks process it. Without a batch,
    neither computes anything.
    """

    @device_function
    def this_one(matrix, step):
        return shifted(matrix, int64(cuda.blockIdx.y) * step) if batched else matrix

    @device_function
    def done_already(step):
        return batched and cuda.blockIdx.y > 0 and step == 0

    return this_one, done_already


def build(precision: TensorPrecision, batched: bool = False):
    """Make the kernel ``(x, x_parts, y, y_parts, steps)``.

    For a scaled precision it is ``(x, x_parts, x_large, y, y_parts, y_large, steps)``, with the results of
    `build_row_maxima`. Along x, the grid has one block per 32 rows of the padded operands and slot of k. If `batched`,
    the matrices are along y, and `steps` are the bytes from one to the next: 0 for an operand that all matrices share,
    and for its parts.
    """
    this_one, done_already = places(batched)
    PARTS, PER_WORD, SLOT_K, SCALED = precision.parts, precision.per_word, precision.slot_k, precision.scaled
    PART_WORDS = DECOMPOSED_ROWS * ROW_WORDS
    narrow = {"tf32": tf32, "bf16": bf16, "f16": f16}[precision.kind]
    first = short_bf16 if precision.short else narrow
    join = pair_f16 if precision.kind == "f16" else pair
    EACH = 4 * PER_WORD  # elements per chunk
    SECOND = precision.second_factor
    WORDS, MARKED = words_per_row(precision), PARTS > 1
    MARKS = PARTS * PART_WORDS  # in the shared tile, behind the parts
    TILE_WORDS = MARKS + (DECOMPOSED_ROWS * CHUNKS if MARKED else 0)

    @device_function
    def row_blocks_of(parts):
        return uint32(uint32(parts.shape[1] // DECOMPOSED_ROWS) // uint32(WORDS))

    @device_function
    def blocks(parts):
        return uint32(uint32(parts.shape[0] // PARTS) * row_blocks_of(parts))

    @device_function
    def of_all_chunks(tile, largest, r, chunk):
        """Return the largest of the values that the threads of a row have found."""
        tile[chunk * DECOMPOSED_ROWS + r] = largest
        cuda.syncthreads()  # all threads have written before any reads another's value
        for i in range(CHUNKS):
            largest = max(largest, tile[i * DECOMPOSED_ROWS + r])
        cuda.syncthreads()  # all threads have read before the parts are written there
        return largest

    @device_function
    def decompose_block(x, parts, large, block, tile):
        tid = uint32(cuda.threadIdx.x)
        slots, row_blocks = uint32(parts.shape[0] // PARTS), row_blocks_of(parts)
        slot, row, r, chunk = place_in_block(x, block, row_blocks)
        k = int64(slot) * SLOT_K + int64(chunk) * EACH
        inside = row < x.shape[0]
        values = cuda.local.array(EACH, float32)
        start = address_of(x, row, k)
        if col_step(x) == 4 and start % 16 == 0 and (not inside or k + EACH <= x.shape[1]):
            for i in range(0, EACH, 4):
                four = global_load4_or_zero(x, start + 4 * i, inside)
                values[i], values[i + 1], values[i + 2], values[i + 3] = four[0], four[1], four[2], four[3]
        else:
            for i in range(EACH):
                values[i] = float32(0)
                if inside and k + i < x.shape[1]:
                    values[i] = x[row, k + i]
        if MARKED:
            size = float32(0)
            for i in range(EACH):
                size += abs(values[i])
            tile[MARKS + chunk * DECOMPOSED_ROWS + r] = float32(0) if size <= float32(ORDINARY) else float32(1)
        if SCALED:
            largest, span = float32(0), int64(chunk)
            while inside and span < large.shape[0]:
                largest = max(largest, large[span, row])
                span += CHUNKS
            largest = of_all_chunks(tile, largest, r, chunk)
            scale = scale_logarithm(largest)
            factor = power(scale)
            for i in range(EACH):
                values[i] *= factor
            if slot == uint32(0) and chunk == uint32(0):
                parts[int64(slots) * PARTS, row] = reciprocal(scale)
        at = uint32(shared_address(tile) + ROW_BYTES * r + CHUNK_BYTES * (chunk ^ (r % CHUNKS)))
        words = cuda.local.array(4, float32)
        for p in range(PARTS):
            for w in range(4):
                if PER_WORD == 1:
                    piece = first(values[w]) if p == 0 else narrow(values[w])
                    values[w] -= piece
                    words[w] = piece
                else:
                    low = first(values[2 * w]) if p == 0 else narrow(values[2 * w])
                    high = first(values[2 * w + 1]) if p == 0 else narrow(values[2 * w + 1])
                    values[2 * w] -= low
                    values[2 * w + 1] -= high
                    if SCALED and p == 0:
                        values[2 * w] *= float32(SECOND)
                        values[2 * w + 1] *= float32(SECOND)
                    words[w] = join(low, high)
            shared_store4(tile, uint32(at + 4 * PART_WORDS * p), (words[0], words[1], words[2], words[3]))
        cuda.syncthreads()  # all threads have stored their parts before any reads another's
        col = int64(uint32(block % row_blocks)) * PART_WORDS + int64(tid) * 4
        for p in range(PARTS):
            four = shared_load4(tile, uint32(shared_address(tile) + 4 * PART_WORDS * p + CHUNK_BYTES * tid))
            store4(parts, int64(p * slots + slot), col, four)
        if MARKED and tid < uint32(DECOMPOSED_ROWS):
            marks = float32(0)
            for i in range(CHUNKS):
                marks += tile[MARKS + i * DECOMPOSED_ROWS + tid]
            line = int64(uint32(block % row_blocks)) * DECOMPOSED_ROWS + int64(tid)
            parts[int64(slot), int64(row_blocks) * PART_WORDS + line] = marks

    @device_function
    def decompose_one(x, parts, large, block, tile, x_step, parts_step, large_step):
        if done_already(parts_step):
            return
        decompose_block(this_one(x, x_step), this_one(parts, parts_step), this_one(large, large_step), block, tile)

    @cuda.jit(**hardware_only(launch_bounds=THREADS))
    def decompose(x, x_parts, y, y_parts, steps):
        let_next_start()
        tile = cuda.shared.array(TILE_WORDS, float32, alignment=16)
        block, x_blocks = uint32(cuda.blockIdx.x), blocks(x_parts)
        if block < x_blocks:
            decompose_one(x, x_parts, x_parts, block, tile, steps[0], steps[1], steps[1])
        else:
            decompose_one(y, y_parts, y_parts, uint32(block - x_blocks), tile, steps[2], steps[3], steps[3])

    @cuda.jit(**hardware_only(launch_bounds=THREADS))
    def decompose_scaled(x, x_parts, x_large, y, y_parts, y_large, steps):
        let_next_start()
        wait_for_last()  # the largest elements have been found
        tile = cuda.shared.array(TILE_WORDS, float32, alignment=16)
        block, x_blocks = uint32(cuda.blockIdx.x), blocks(x_parts)
        if block < x_blocks:
            decompose_one(x, x_parts, x_large, block, tile, steps[0], steps[1], steps[2])
        else:
            decompose_one(y, y_parts, y_large, uint32(block - x_blocks), tile, steps[3], steps[4], steps[5])

    return decompose_scaled if SCALED else decompose


def build_row_maxima(batched: bool = False):
    """Make the kernel ``(x, x_large, y, y_large, steps)``, which finds the largest magnitude per row and span of k.

    Spans are equal multiples of 512 terms. ``x_large`` has one row per span, with one float per row of x, padded to a
    multiple of 32. Along x, the grid has one block per 32 of these floats; the rest is as in `build`. NaN is ignored.
    """
    this_one, done_already = places(batched)

    @device_function
    def row_maxima_block(x, large, block, found):
        tid, row_blocks = uint32(cuda.threadIdx.x), uint32(large.shape[1] // DECOMPOSED_ROWS)
        span, row, r, chunk = place_in_block(x, block, row_blocks)
        pieces, spans = uint32((x.shape[1] + SPAN - 1) // SPAN), uint32(large.shape[0])
        each = int64(uint32(pieces + spans - 1) // spans) * SPAN
        k, largest = int64(span) * each, float32(0)
        end = min(k + each, x.shape[1])
        if row < x.shape[0]:
            vectors = col_step(x) == 4 and address_of(x, row, k) % 16 == 0
            while k + SPAN <= end:
                if vectors:
                    start = address_of(x, row, k + int64(chunk) * 4)
                    for i in range(SPAN // CHUNKS // 4):
                        four = global_load4_or_zero(x, start + 16 * CHUNKS * i, True)
                        largest = max(largest, max(max(abs(four[0]), abs(four[1])), max(abs(four[2]), abs(four[3]))))
                else:
                    for i in range(0, SPAN, CHUNKS * AT_ONCE):
                        for j in range(AT_ONCE):
                            largest = max(largest, abs(x[row, k + (i + CHUNKS * j) + int64(chunk)]))
                k += SPAN
            k += int64(chunk)
            while k < end:
                largest = max(largest, abs(x[row, k]))
                k += CHUNKS
        found[chunk, r] = largest
        cuda.syncthreads()  # all threads have written before any reads another's value
        if tid < uint32(DECOMPOSED_ROWS):
            largest = float32(0)
            for i in range(CHUNKS):
                largest = max(largest, found[i, tid])
            large[int64(span), int64(uint32(block % row_blocks)) * DECOMPOSED_ROWS + int64(tid)] = largest

    @device_function
    def row_maxima_one(x, large, block, found, x_step, large_step):
        if done_already(large_step):
            return
        row_maxima_block(this_one(x, x_step), this_one(large, large_step), block, found)

    @cuda.jit(**hardware_only(launch_bounds=THREADS))
    def row_maxima(x, x_large, y, y_large, steps):
        let_next_start()
        found = cuda.shared.array((CHUNKS, DECOMPOSED_ROWS), float32)
        block, x_blocks = uint32(cuda.blockIdx.x), uint32(x_large.shape[0] * (x_large.shape[1] // DECOMPOSED_ROWS))
        if block < x_blocks:
            row_maxima_one(x, x_large, block, found, steps[0], steps[1])
        else:
            row_maxima_one(y, y_large, uint32(block - x_blocks), found, steps[2], steps[3])

    return row_maxima
