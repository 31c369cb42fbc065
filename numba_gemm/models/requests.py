"""Cost of a warp's memory request: sectors of global memory, wavefronts of shared memory.

A request is one instruction of one warp: up to 32 lanes that each access 1 to 16 contiguous bytes.

Global memory moves in sectors of 32 bytes, and a request transfers each sector once if any lane touches it (CUDA C++
Best Practices Guide, "Coalesced Access to Global Memory").

Shared memory has 32 banks. Bank b holds the 32-bit words with (address / 4) mod 32 = b, and delivers one word per
wavefront, to any number of lanes (CUDA C++ Programming Guide, "Shared Memory", compute capability 5.x). The guide does
not describe wider accesses; the following rules come from an H200's counters (docs/tracing.md). A request is served in
passes of half a warp for 64 bits and of a quarter of a warp for 128 bits. Each pass takes as many wavefronts as its
fullest bank has words. The passes of a load serve twice as many lanes if each active lane i of the warp has the address
of lane i ^ 1, where that lane is active, or if each has that of lane i ^ 2. The passes of a store never do.

Asynchronous copies (cp.async) go from the banks of the L1 cache to those of shared memory: one word per bank and
wavefront on either side, and no word to two lanes at once. Words that are zeroed take separate wavefronts. Copies of
16 bytes bypass L1: Nsight Compute counts them as stores, and each of their sectors once for each sector of shared
memory that it goes to.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from ..device.units import WARP, ceil_div

__all__ = [
    "BANKS",
    "SECTOR_BYTES",
    "bank_map",
    "copy_sectors",
    "copy_wavefronts",
    "fewest_sectors",
    "fewest_wavefronts",
    "passes",
    "sectors",
    "wavefronts",
]

SECTOR_BYTES, LINE_BYTES = 32, 128
BANKS, WORD_BYTES = 32, 4
BYPASS_BYTES = 16  # asynchronous copies of this size bypass the L1 cache
SIZES = (1, 2, 4, 8, 16)

Lanes = Iterable[tuple[int, int]]


def _checked(lanes: Lanes, size: int) -> list[tuple[int, int]]:
    found = list(lanes)
    if size not in SIZES:
        raise ValueError(f"size is {size}; a lane accesses 1, 2, 4, 8 or 16 bytes")
    numbers = [lane for lane, _ in found]
    if len(set(numbers)) != len(numbers) or any(not 0 <= lane < WARP for lane in numbers):
        raise ValueError(f"lanes are {numbers}; expected different numbers from 0 to 31")
    for lane, address in found:
        if address % size:
            raise ValueError(f"lane {lane} accesses {size} bytes at {address}, which is no multiple of {size}")
    return found


def sectors(lanes: Lanes, size: int) -> int:
    """Return the number of 32-byte sectors that a request to global memory touches.

    Parameters
    ----------
    lanes : iterable of (int, int)
        Lane number and byte address of each active lane.
    size : int
        Bytes that a lane accesses: 1, 2, 4, 8 or 16; its address must be a multiple of this.

    Raises
    ------
    ValueError
        For another size, a lane number out of range or given twice, or a misaligned address.
    """
    return len({address // SECTOR_BYTES for _, address in _checked(lanes, size)})


def fewest_sectors(lanes: Lanes, size: int) -> int:
    """Return the number of sectors that would hold the same bytes if they were contiguous."""
    different = len({address for _, address in _checked(lanes, size)})
    return ceil_div(different * size, SECTOR_BYTES)


def _most(words: Iterable[int]) -> int:
    """Return the number of words in the fullest bank; repeated words count each time."""
    return max(Counter(word // WORD_BYTES % BANKS for word in words).values(), default=0)


def copy_sectors(lanes: Lanes, size: int, targets: Mapping[int, int]) -> int:
    """Return the number of sectors of global memory that asynchronous copies take.

    Parameters
    ----------
    lanes, size
        As in `sectors`, for lanes that read global memory; 4, 8 or 16 bytes.
    targets : mapping from int to int
        The byte address in shared memory of each of these lanes.
    """
    if size < BYPASS_BYTES:
        return sectors(lanes, size)
    pieces = Counter(
        (address // SECTOR_BYTES, targets[lane] // SECTOR_BYTES, address) for lane, address in _checked(lanes, size)
    )
    most: dict[tuple[int, int], int] = defaultdict(int)
    for (sector, target, _), count in pieces.items():
        most[sector, target] = max(most[sector, target], count)
    return sum(most.values())


def copy_wavefronts(lanes: Lanes, size: int, sources: Mapping[int, int]) -> int:
    """Return the number of wavefronts of shared memory that asynchronous copies take.

    Parameters
    ----------
    lanes, size
        As in `sectors`, for lanes that write shared memory; 4, 8 or 16 bytes.
    sources : mapping from int to int
        The byte address in global memory of each lane that reads; the other lanes write zeros.
    """
    found = _checked(lanes, size)
    if size >= BYPASS_BYTES:
        return wavefronts(found, size, write=True)
    words = [(lane, offset, to + offset) for lane, to in found for offset in range(0, size, WORD_BYTES)]
    read = [sources[lane] + offset for lane, offset, _ in words if lane in sources]
    written = [to for lane, _, to in words if lane in sources]
    return max(_most(read), _most(written)) + _most(to for lane, _, to in words if lane not in sources)


def _joined(lanes: Sequence[tuple[int, int]]) -> bool:
    """Return True if the passes of a load serve twice as many lanes."""
    places = dict(lanes)
    return any(all(places.get(lane ^ step, place) == place for lane, place in lanes) for step in (1, 2))


def passes(lanes: Lanes, size: int, write: bool = False) -> list[list[tuple[int, int]]]:
    """Return the groups of lanes that are served together; parameters and errors are those of `wavefronts`."""
    lanes = _checked(lanes, size)
    width = min(WARP, WARP * WORD_BYTES // size)
    if width < WARP and not write and _joined(lanes):
        width *= 2
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for lane, address in lanes:
        found[lane // width].append((lane, address))
    return list(found.values())


def bank_map(lanes: Lanes, size: int, write: bool = False) -> list[dict[int, set[int]]]:
    """Return, for each group of lanes served together, the words that it needs from each bank.

    Parameters and errors are those of `wavefronts`.
    """
    maps = []
    for group in passes(lanes, size, write):
        words: dict[int, set[int]] = defaultdict(set)
        for _, address in group:
            for word in range(address // WORD_BYTES, (address + max(size, WORD_BYTES) - 1) // WORD_BYTES + 1):
                words[word % BANKS].add(word)
        maps.append(dict(words))
    return maps


def wavefronts(lanes: Lanes, size: int, write: bool = False) -> int:
    """Return the number of wavefronts that a request to shared memory takes.

    Parameters and errors are those of `sectors`. `write` is true for a store, or a copy to shared memory.
    """
    return sum(max(map(len, words.values())) for words in bank_map(lanes, size, write))


def fewest_wavefronts(lanes: Lanes, size: int, write: bool = False) -> int:
    """Return the number of wavefronts that the same lanes would take without a bank conflict."""
    return len(passes(lanes, size, write))
