"""Asynchronous copies of an operand's chunks to shared memory, in the order in which they are stored.

The operand is treated as (mn, k): A as it is, B transposed, so that one loader serves both. A chunk has `extent` rows
and `bk` k. Stored by rows, its rows stay rows, `pitch` floats apart. Stored by columns, each k is a row of `extent`
floats, and `padding` floats follow every four k. Rows and k beyond the operand become zeros. The accesses are those of
`tile_loader`; the ones that end in 4 copy 16 bytes at a time, the others four.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from numba import int32, uint32

from ..simulator.switch import device_function
from .address import (
    col_step,
    copy4_or_zero,
    copy16_of,
    copy16_of_cached,
    copy16_or_zero,
    copy16_or_zero_cached,
    row_step,
)
from .units import ceil_div


class ChunkLoader(NamedTuple):
    """Device functions that copy the chunks of one operand, and the layout of a chunk.

    Attributes
    ----------
    across : bool
        True if the operand is stored by columns.
    four_k : int
        Floats from four k to the next, if it is stored by columns.
    size : int
        Bytes of a chunk.
    place : ``(tid) -> (row, k)``
        Row and k, within a chunk, of a thread's first copy.
    position : ``(row, k) -> uint32``
        Bytes from the start of a chunk to an element.
    fetch : ``(tiles, tid, to, x, address, row, k, rows, rest)``
        Start copying a chunk. (row, k) is the thread's place, and `address` its address.
    """

    across: bool
    four_k: int
    size: int
    place: Any
    position: Any
    fetch: Any


@lru_cache(maxsize=64)
def chunk_loader(
    access: str,
    extent: int,
    bk: int,
    threads: int,
    pitch: int,
    padding: int,
    any_extent: bool = False,
    cached: bool = False,
) -> ChunkLoader:
    """Return the loader of chunks by `threads` threads; extents are powers of two.

    With `any_extent`, the last vector of a row may be partial; else rows consist of whole vectors. If `cached`, vectors
    come through the L1 cache.
    """
    copy16, copy16_sized = (copy16_or_zero_cached, copy16_of_cached) if cached else (copy16_or_zero, copy16_of)
    ACROSS = access.startswith("across")
    WIDTH = 4 if access.endswith("4") else 1  # floats per copy
    INNER, OUTER = (extent // WIDTH, bk) if ACROSS else (bk // WIDTH, extent)  # copies along both axes of the chunk
    COPIES = ceil_div(INNER * OUTER, threads)  # per thread
    EVEN = INNER * OUTER % threads == 0
    RUN = max(1, INNER // threads)  # copies per thread along the inner axis
    PASS = threads * WIDTH  # floats from one of them to the next
    NEXT = max(1, threads // INNER)  # places between a thread's copies along the outer axis
    FOUR_K = 4 * extent + padding

    @device_function
    def place(tid):
        along, beside = int32(tid % INNER * WIDTH), int32(tid // INNER)
        return (along, beside) if ACROSS else (beside, along)

    @device_function
    def position(row, k):
        if ACROSS:
            return uint32(4 * (uint32(k) // 4 * FOUR_K + uint32(k) % 4 * extent + uint32(row)))
        return uint32(4 * (uint32(row) * pitch + uint32(k)))

    @device_function
    def further(first, i):
        """Bytes from the start of a chunk to the i-th place along the outer axis, `first` being those to the first."""
        if not ACROSS:
            return uint32(first + 4 * pitch * NEXT * i)
        # a thread's first k is below `NEXT`, which divides 4 or is a multiple of 4: i alone tells the padding
        k = uint32(NEXT * i)
        return uint32(first + uint32(4 * extent) * k + uint32(4 * padding) * uint32(k // uint32(4)))

    @device_function
    def start(tiles, to, x, address, floats, in_full):
        """Start a copy of so many floats of a row, up to `WIDTH`, and zeros; `in_full` if these are all or none."""
        if WIDTH == 1:
            copy4_or_zero(tiles, to, x, address, floats > int32(0))
        elif in_full:
            copy16(tiles, to, x, address, floats > int32(0))
        else:
            copy16_sized(tiles, to, x, address, int32(4 * min(max(floats, int32(0)), int32(4))))

    @device_function
    def copies(tiles, tid, to, x, address, row, k, rows, rest, in_full):
        first = position(row, k)
        at, step, inner_step = address, NEXT * row_step(x), col_step(x)
        inner, outer, inner_end, outer_end = k, row, rest, rows
        if ACROSS:
            step, inner_step = NEXT * col_step(x), row_step(x)
            inner, outer, inner_end, outer_end = row, k, rows, rest
        left = int32(inner_end - inner)  # floats to the end of the row
        for i in range(COPIES // RUN):
            place = further(first, i)
            if RUN > 1:
                for j in range(RUN):
                    floats = int32(left - j * PASS) if int32(outer + i * NEXT) < outer_end else int32(0)
                    start(tiles, uint32(to + place + 4 * PASS * j), x, at + j * PASS * inner_step, floats, in_full)
            elif EVEN or tid + i * threads < uint32(INNER * OUTER):
                floats = left if int32(outer + i * NEXT) < outer_end else int32(0)
                start(tiles, uint32(to + place), x, at, floats, in_full)
            at += step

    @device_function
    def fetch(tiles, tid, to, x, address, row, k, rows, rest):
        """Start copying a chunk of which `rows` rows and `rest` k exist, and zeros in place of the others."""
        if not any_extent or WIDTH == 1 or (rows if ACROSS else rest) >= int32(INNER * WIDTH):
            copies(tiles, tid, to, x, address, row, k, rows, rest, True)
        else:  # copies of different sizes take several more instructions each
            copies(tiles, tid, to, x, address, row, k, rows, rest, False)

    return ChunkLoader(ACROSS, FOUR_K, 4 * (FOUR_K * bk // 4 if ACROSS else pitch * extent), place, position, fetch)
