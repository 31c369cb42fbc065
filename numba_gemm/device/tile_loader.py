"""Loading of an operand's tiles into shared memory by a block's threads, for each layout of the operand.

The operand is treated as (mn, k): A as it is, B transposed, so that one loader serves both. In shared memory, the tile
is stored k by k, `pitch` floats apart, as fragments are read. The way of access depends on what is contiguous in global
memory and how much of it one instruction may read:

========== ==================================== =================================================================
access     needs                                how a tile is loaded
========== ==================================== =================================================================
`along4`   k contiguous, 16-byte aligned        128-bit loads of 4 k into registers, then 4 stores, transposing
`across4`  mn contiguous, 16-byte aligned       16-byte asynchronous copies
`along1`   k contiguous                         4-byte asynchronous copies, 8 k of 4 rows per warp, transposing
`across1`  mn contiguous                        4-byte asynchronous copies, 32 consecutive floats per warp
`any`      nothing                              as `along1`, with a stride along k
========== ==================================== =================================================================

Each thread keeps addresses and advances them from tile to tile, so the loop computes only the steps from one copy to
the next. Edges also cost little. Along k, only the first tile of a product is partial (`begin`, which fills with
zeros); the others are whole (`fetch`). Rows beyond the operand are replaced by its last row, or not copied: they
contribute only to rows of C that do not exist.

Vectors suit rows that end within one, too, if the rows themselves are aligned (`tails`). A product's first tile then
takes the last one to four k of the sum behind its own; floats of partial vectors are copied one by one. All other tiles
are whole and aligned: none reaches the end of a row along k, and what follows a row along mn is the space before the
next one, whatever it contains.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from numba import int64, uint32

from ..simulator.switch import device_function
from .access import ACCESSES, LINE, SECTOR, covers, vectors_per_row
from .address import (
    address_of,
    col_step,
    copy4_if,
    copy4_or_zero,
    copy16_if,
    copy16_or_zero,
    copy16_or_zero_cached,
    copy16_within,
    global_load1_or_zero,
    global_load4_if,
    global_load4_or_zero,
    global_load4_over_zeros,
    row_step,
    shared_store1,
)
from .kept import pinned
from .units import WARP, ceil_div


@dataclass(frozen=True)
class TileLoader:
    """Device functions that load the tiles of one operand, and the registers that they keep between calls.

    Attributes
    ----------
    addresses, staged : int
        Lengths of the local arrays of addresses (int64) and of values in flight (float32).
    parts : int
        Number of parts in which a tile is fetched, so that many small copies need not be started at once.
    origin : ``(tid) -> int``
        Bytes from the start of a tile in shared memory to the destination of the thread's first copy.
    place : ``(x, first, k0, tid, addresses)``
        Compute the addresses for the tile whose first row is `first` and whose first k is `k0`.
    valid : ``(x, first, tid) -> uint32``
        Number of the thread's copies per k, or per sector of k, that lie inside, for accesses that need this limit; for
        `across4`, four times that number, or with tails, the number of their floats.
    begin : ``(tiles, to, x, addresses, valid, width, gap, tid, staged)``
        Start loading a partial tile: only its first `width` k exist. Its last one to four are `gap` k further on, 0 for
        all but the first of several tiles of a sum with tails.
    fetch : ``(tiles, to, x, addresses, valid, more, staged, part)``
        Start loading part `part`, a constant, of a whole tile; nothing is read unless `more`.
    settle : ``(tiles, to, staged)``
        Store the values in flight from registers to shared memory.
    """

    addresses: int
    staged: int
    parts: int
    origin: Any
    place: Any
    valid: Any
    begin: Any
    fetch: Any
    settle: Any

    @property
    def functions(self) -> tuple[Any, ...]:
        """The device functions, in the order above; a kernel's closure needs a separate name for each."""
        return self.origin, self.place, self.valid, self.begin, self.fetch, self.settle


@lru_cache(maxsize=256)
def tile_loader(
    access: str,
    extent: int,
    bk: int,
    threads: int,
    pitch: int,
    parts: int = 1,
    zeros_first: bool = False,
    cached: bool = False,
    tails: bool = False,
) -> TileLoader:
    """Return the loader of tiles of `extent` rows and `bk` k by `threads` threads; ``covers`` must hold.

    A tile is fetched in at most `parts` parts, or in one part if vector accesses load it. With `zeros_first`, values in
    flight take no registers before a product's first tile. If `cached`, vectors of a partial tile come through the L1
    cache, as single floats do. With `tails`, vector accesses take rows that end within a vector.
    """
    if access not in ACCESSES:
        raise ValueError(f"access is {access!r}; expected one of {', '.join(ACCESSES)}")
    if not covers(access, extent, bk, threads):
        raise ValueError(f"{threads} threads cannot load a tile of {extent} x {bk} with access {access}")
    if access == "along4":
        return _along4(
            extent, bk, threads, pitch, global_load4_over_zeros if zeros_first else global_load4_or_zero, tails
        )
    if access == "across4":
        return _across4(extent, bk, threads, pitch, copy16_or_zero_cached if cached else copy16_or_zero, tails)
    if access == "across1":
        return _across1(extent, bk, threads, pitch, parts)
    return _along1(extent, bk, threads, pitch, parts, unit=access == "along1")


@device_function
def _nothing_valid(x, first, tid):
    return uint32(0)


@device_function
def _nothing_to_settle(tiles, to, staged):
    pass


def _along4(extent, bk, threads, pitch, load, tails):
    VECTORS = bk // 4  # vectors per row
    ROWS = threads // VECTORS  # rows that the block loads at a time
    LOADS = extent // ROWS
    # Of longer rows, a warp loads four vectors each, since its transposing stores then meet in fewer banks. Two vectors
    # of each of 16 rows would meet in none, but loads of more lines take longer than that gains.
    WIDE = vectors_per_row(bk, threads)
    GROUPS = VECTORS // WIDE  # of vectors per row

    @device_function
    def row_of(tid):
        """Row of a thread's first vector, within the tile."""
        return tid // WARP // GROUPS * (WARP // WIDE) + tid % WARP // WIDE if GROUPS > 1 else tid // VECTORS

    @device_function
    def k_of(tid):
        """First k of its vectors."""
        return 4 * (tid // WARP % GROUPS * WIDE + tid % WIDE) if GROUPS > 1 else 4 * (tid % VECTORS)

    @device_function
    def origin(tid):
        return 4 * (k_of(tid) * pitch + row_of(tid))

    @device_function
    def place(x, first, k0, tid, addresses):
        for i in range(LOADS):
            row = min(int64(first + row_of(tid) + i * ROWS), x.shape[0] - 1)
            addresses[i] = address_of(x, row, k0 + k_of(tid))

    @device_function
    def begin(tiles, to, x, addresses, valid, width, gap, tid, staged):
        rest = width - int64(k_of(tid))  # k from the thread's vectors on
        for i in range(LOADS):
            source, inside = addresses[i], rest > int64(0)
            if tails:
                inside = rest >= int64(4)
                source += gap * col_step(x) if rest <= int64(4) else int64(0)
            values = load(x, source, inside)
            staged[4 * i], staged[4 * i + 1], staged[4 * i + 2], staged[4 * i + 3] = values
            for q in range(3 if tails else 0):  # added to zeros: all loads are under way before the first is awaited
                staged[4 * i + q] += global_load1_or_zero(x, source + 4 * q, not inside and int64(q) < rest)

    @device_function
    def fetch(tiles, to, x, addresses, valid, more, staged, part):
        for i in range(LOADS):
            values = global_load4_if(x, addresses[i], more)
            staged[4 * i], staged[4 * i + 1], staged[4 * i + 2], staged[4 * i + 3] = values

    @device_function
    def settle(tiles, to, staged):
        for i in range(LOADS):
            for q in range(4):
                shared_store1(tiles, uint32(to + 4 * (q * pitch + i * ROWS)), staged[4 * i + q])

    return TileLoader(LOADS, 4 * LOADS, 1, origin, place, _nothing_valid, begin, fetch, settle)


def _across4(extent, bk, threads, pitch, copy, tails):
    PER_K = threads // bk  # threads that share a k
    STEP = 4 * PER_K  # floats from one copy of a thread to its next copy
    COPIES = extent // STEP
    copy_whole = copy16_within if tails else copy16_if

    @device_function
    def origin(tid):
        return 4 * (tid // PER_K * pitch + tid % PER_K * 4)

    @device_function
    def place(x, first, k0, tid, addresses):
        addresses[0] = address_of(x, first + tid % PER_K * 4, k0 + tid // PER_K)

    @device_function
    def valid(x, first, tid):
        rest = x.shape[0] - int64(first + tid % PER_K * 4)
        copies = min(max(rest + (STEP - 1), int64(0)) // STEP, int64(COPIES))
        return uint32(max(min(rest - (copies - 1) * (STEP - 4), 4 * copies), int64(0)) if tails else 4 * copies)

    @device_function
    def begin(tiles, to, x, addresses, valid, width, gap, tid, staged):
        here = int64(tid // PER_K) < width
        source = addresses[0]
        if tails and int64(tid // PER_K) >= (width - 1) // 4 * 4:
            source += gap * col_step(x)
        for j in range(COPIES):
            inside = here and uint32(4 * j + 3) < valid
            # not a partial vector: the order of two copies of a group to the same place is undefined
            if not tails or inside or not here or valid <= uint32(4 * j):
                copy(tiles, uint32(to + 4 * j * STEP), x, source + 4 * j * STEP, inside)
        if tails:
            behind = uint32(4 * STEP * uint32(valid // uint32(4)))
            for q in range(3):
                inside = here and uint32(q) < valid % uint32(4)
                copy4_if(tiles, uint32(to + behind + 4 * q), x, source + int64(behind) + 4 * q, inside)

    @device_function
    def fetch(tiles, to, x, addresses, valid, more, staged, part):
        for j in range(COPIES):
            inside = more and uint32(4 * j) < valid
            copy_whole(tiles, uint32(to + 4 * j * STEP), x, addresses[0] + 4 * j * STEP, inside)

    return TileLoader(1, 1, 1, origin, place, valid, begin, fetch, _nothing_to_settle)


def _across1(extent, bk, threads, pitch, parts):
    AT_ONCE = threads // LINE  # k that the block copies at a time
    ROUNDS = bk // AT_ONCE
    COPIES = extent // LINE  # copies per thread of one k
    AT_A_TIME = ceil_div(ROUNDS * COPIES, parts)

    @device_function
    def origin(tid):
        return 4 * (tid // LINE * pitch + tid % LINE)

    @device_function
    def place(x, first, k0, tid, addresses):
        for r in range(ROUNDS):
            addresses[r] = address_of(x, first + tid % LINE, k0 + tid // LINE + r * AT_ONCE)

    @device_function
    def valid(x, first, tid):
        rest = x.shape[0] - int64(first + tid % LINE)
        return uint32(min(max(rest + (LINE - 1), int64(0)) // LINE, int64(COPIES)))

    @device_function
    def begin(tiles, to, x, addresses, valid, width, gap, tid, staged):
        for r in range(ROUNDS):
            here = int64(tid // LINE + r * AT_ONCE) < width
            for j in range(COPIES):
                inside = here and uint32(j) < valid
                place = uint32(to + 4 * (r * AT_ONCE * pitch + j * LINE))
                copy4_or_zero(tiles, place, x, addresses[r] + 4 * j * LINE, inside)

    @device_function
    def fetch(tiles, to, x, addresses, valid, more, staged, part):
        for q in range(AT_A_TIME):
            i = part * AT_A_TIME + q
            if i < ROUNDS * COPIES:
                r, j = i // COPIES, i % COPIES
                inside = more and uint32(j) < valid
                place = uint32(to + 4 * (r * AT_ONCE * pitch + j * LINE))
                copy4_if(tiles, place, x, addresses[r] + 4 * j * LINE, inside)

    return TileLoader(
        ROUNDS, 1, ceil_div(ROUNDS * COPIES, AT_A_TIME), origin, place, valid, begin, fetch, _nothing_to_settle
    )


def _along1(extent, bk, threads, pitch, parts, unit):
    ROWS = min(threads // SECTOR, extent)  # rows that the block copies at a time
    COPIES = extent // ROWS
    AT_A_TIME = ceil_div(COPIES, parts)

    @device_function
    def between(x):
        """Bytes from one copy of a thread to its next copy in the same row."""
        return int64(4 * SECTOR) if unit else SECTOR * col_step(x)

    @device_function
    def origin(tid):
        return 4 * (tid % SECTOR * pitch + tid // SECTOR)

    @device_function
    def place(x, first, k0, tid, addresses):
        addresses[0] = address_of(x, first + tid // SECTOR, k0 + tid % SECTOR)

    @device_function
    def valid(x, first, tid):
        rest = x.shape[0] - int64(first + tid // SECTOR)
        copies = min(max(rest + (ROWS - 1), int64(0)) // ROWS, int64(COPIES))
        return uint32(copies) if tid // SECTOR < uint32(ROWS) else uint32(0)

    @device_function
    def begin(tiles, to, x, addresses, valid, width, gap, tid, staged):
        for i in range(COPIES):
            for r in range(bk // SECTOR):
                inside = int64(tid % SECTOR + r * SECTOR) < width and uint32(i) < valid
                place = uint32(to + 4 * (r * SECTOR * pitch + i * ROWS))
                if tid // SECTOR < uint32(ROWS):
                    copy4_or_zero(tiles, place, x, addresses[0] + i * ROWS * row_step(x) + r * between(x), inside)

    @device_function
    def fetch(tiles, to, x, addresses, valid, more, staged, part):
        first = uint32(part * AT_A_TIME)
        source = addresses[0] + int64(first) * (ROWS * row_step(x))
        for q in range(AT_A_TIME):
            inside = more and uint32(first + q) < valid
            for r in range(bk // SECTOR):
                place = uint32(to + 4 * ROWS * first + 4 * (r * SECTOR * pitch + q * ROWS))
                copy4_if(tiles, place, x, source + r * between(x), inside)
            source += ROWS * row_step(x)

    return TileLoader(1, 1, ceil_div(COPIES, AT_A_TIME), origin, place, valid, begin, fetch, _nothing_to_settle)


def fetch_of(a_loader, b_loader):
    """Make a device function that starts loading a part of both tiles, given the arguments of their `fetch`."""
    fetch_a, fetch_b, A_PARTS, B_PARTS = a_loader.fetch, b_loader.fetch, a_loader.parts, b_loader.parts

    @device_function
    def fetch(to_a, to_b, part):
        """Start loading a part of both tiles; `part` is a constant."""
        if part < B_PARTS:
            fetch_b(*to_b, part)
        if part < A_PARTS:
            fetch_a(*to_a, part)

    return fetch


@lru_cache(maxsize=64)
def pairs_beyond(BK, most, several=1, slices=1):
    """Make a device function that returns the pairs of k-steps, up to `most`, without any of a k-tile's `width` terms.

    The k-tile's last k-step is not among them. Their number is a multiple of `several`. If slices take pairs in turns,
    the function returns how many pairs each slice leaves out, which do not include the slice's last k-step.
    """

    @device_function
    def beyond(width):
        pairs = uint32((max(BK - width, int64(2 * slices - 1)) - (2 * slices - 1)) // (2 * slices))
        return pinned(min(pairs, uint32(most)))

    @device_function
    def rounded_down(width):
        return uint32(beyond(width) // uint32(several) * uint32(several))

    @device_function
    def none(width):
        return uint32(0)

    return none if most <= 0 else beyond if several == 1 else rounded_down
