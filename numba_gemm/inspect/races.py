"""Races for shared memory: pairs of accesses by different threads, at least one a write, that no barrier orders.

Barriers of a block order all of its threads. Barriers of a warp order the threads of the warp if all of its lanes take
part: accesses are ordered by how many such barriers their lane has passed. An asynchronous copy writes from its start
until it has landed or, if nothing waits for it, until its block ends. Atomics do not race with one another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..device import watch
from ..simulator.threads import WARP_SIZE
from .recording import ATOMIC, COLUMNS, SHARED, Recorder, TracedArray

__all__ = ["Race", "races", "units_of", "unneeded_barriers"]


@dataclass(frozen=True)
class Race:
    """Two accesses to one element of shared memory that no barrier orders, at least one of them a write.

    Attributes
    ----------
    array : str
        Name of the array.
    element : tuple of int
        Index of the element.
    first, second : str
        The two accesses and their places: ``write at kernel:17``.
    first_line, second_line : tuple of (str, int)
        File and line of each access.
    threads : tuple of (int, int)
        Two threads that race, by their positions in the block.
    block : tuple of int
        The block.
    interval : int
        Number of barriers of the block that both threads have passed.
    count : int
        Number of elements for which the same two lines race, in all blocks and intervals.
    """

    array: str
    element: tuple[int, ...]
    first: str
    second: str
    first_line: tuple[str, int]
    second_line: tuple[str, int]
    threads: tuple[int, int]
    block: tuple[int, ...]
    interval: int
    count: int

    def __str__(self) -> str:
        element = ", ".join(map(str, self.element))
        return (
            f"{self.array}[{element}] in block {self.block}, after {self.interval} barriers: {self.first} by thread "
            f"{self.threads[0]}, {self.second} by thread {self.threads[1]}; {self.count} such elements"
        )


# Columns of events: accesses to one unit of shared memory within one interval, from one site, by threads of one warp.
BLOCK, ARRAY, UNIT, INTERVAL, SITE, WRITE, IS_ATOMIC, WARP, SYNCS, SYNCS_END, THREAD = range(11)
GROUP = INTERVAL + 1  # number of leading columns that must be equal for two accesses to race
FOREVER = 1 << 40


def units_of(table: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
    """Return each array's granularity in bytes: its smallest access, so that neighbours in a word do not collide."""
    units = np.full(count, FOREVER, np.int64)
    np.minimum.at(units, table[:, COLUMNS.index("array")], table[:, COLUMNS.index("size")])
    return units


def _events(
    recorder: Recorder, table: np.ndarray[Any, Any], units: np.ndarray[Any, Any], left_out: int
) -> np.ndarray[Any, Any]:
    shared = np.array([array.space == SHARED for array in recorder.arrays], bool)
    rows = np.flatnonzero(shared[table[:, COLUMNS.index("array")]])
    own = {name: table[rows, i] for i, name in enumerate(COLUMNS)}
    own["interval"] -= own["interval"] > left_out
    ends, syncs_end = own["interval"].copy(), own["syncs"].copy()
    last = {block: int(own["interval"][own["block"] == block].max()) for block in np.unique(own["block"])}
    for i in np.flatnonzero(own["kind"] == watch.COPY_WRITE):
        landing = recorder.landings.get(int(rows[i]))
        if landing is None:
            ends[i], syncs_end[i] = last[own["block"][i]], FOREVER
        else:
            ends[i], syncs_end[i] = landing[0] - (landing[0] > left_out), landing[1]
    unit = units[own["array"]]
    first, count = own["offset"] // unit, -(-own["size"] // unit)
    writes = np.isin(own["kind"], (watch.WRITE, watch.COPY_WRITE, ATOMIC))
    parts = [np.empty((0, 11), np.int64)]
    for piece in range(int(count.max(initial=0))):
        for later in range(int((ends - own["interval"])[count > piece].max(initial=0)) + 1):
            chosen = (count > piece) & (own["interval"] + later <= ends)
            columns = [
                own["block"],
                own["array"],
                first + piece,
                own["interval"] + later,
                own["site"],
                writes,
                own["kind"] == ATOMIC,
                own["thread"] // WARP_SIZE,
                own["syncs"],
                syncs_end,
                own["thread"],
            ]
            parts.append(np.stack([column[chosen] for column in columns], axis=1).astype(np.int64))
    return np.unique(np.concatenate(parts), axis=0)


def _race_of(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> tuple[int, int] | None:
    """Return two threads of two sets of events that race, or None; a row is an event and its first and last thread."""
    if one[IS_ATOMIC] and other[IS_ATOMIC]:
        return None
    if one[WARP] == other[WARP] and (one[SYNCS_END] < other[SYNCS] or other[SYNCS_END] < one[SYNCS]):
        return None
    for a in (int(one[THREAD]), int(one[THREAD + 1])):
        for b in (int(other[THREAD]), int(other[THREAD + 1])):
            if a != b:
                return a, b
    return None


def unneeded_barriers(recorder: Recorder, table: np.ndarray[Any, Any]) -> Iterator[int]:
    """Yield the numbers of the first block's barriers each of which, left out alone, would leave no race."""
    own = table[table[:, COLUMNS.index("block")] == 0]  # the first rows
    for number in range(sum(block == 0 for block, _ in recorder.barriers)):
        if next(races(recorder, own, number), None) is None:
            yield number


def races(recorder: Recorder, table: np.ndarray[Any, Any], left_out: int = FOREVER) -> Iterator[Race]:
    """Yield each pair of sites that race, with an example.

    `table` has the recorder's rows. The barrier of each block whose number is `left_out` counts as none.
    """
    if not len(table):
        return
    units = units_of(table, len(recorder.arrays))
    events = _events(recorder, table, units, left_out)
    if not len(events):
        return
    # Among threads with the same event, the first and the last suffice to find two different threads.
    starts = np.flatnonzero(np.r_[True, (events[1:, :THREAD] != events[:-1, :THREAD]).any(axis=1)])
    ends = np.r_[starts[1:], len(events)] - 1
    events = np.column_stack([events[starts], events[ends, THREAD]])
    bounds = np.flatnonzero(np.r_[True, (events[1:, :GROUP] != events[:-1, :GROUP]).any(axis=1), True])
    starts = bounds[:-1]
    several = np.maximum.reduceat(events[:, THREAD + 1], starts) > np.minimum.reduceat(events[:, THREAD], starts)
    written = np.maximum.reduceat(events[:, WRITE], starts) > 0
    plain = np.minimum.reduceat(events[:, IS_ATOMIC], starts) == 0
    found: dict[tuple[int, ...], list[Any]] = {}
    for i in np.flatnonzero(several & written & plain):
        group = events[bounds[i] : bounds[i + 1]]
        seen = set()
        for write in group[group[:, WRITE] > 0]:
            for other in group:
                sites = sorted([(int(write[SITE]), int(write[WRITE])), (int(other[SITE]), int(other[WRITE]))])
                key = (int(write[ARRAY]), *sites[0], *sites[1])
                if key in seen or (threads := _race_of(write, other)) is None:
                    continue
                seen.add(key)
                found.setdefault(key, [write, other, threads, 0])[3] += 1
    for (number, *_), (write, other, threads, count) in sorted(found.items(), key=lambda item: item[0]):
        offset = int(write[UNIT]) * int(units[number])
        yield _described(recorder, recorder.arrays[number], write, other, threads, offset, count)


def _described(
    recorder: Recorder, array: TracedArray, write: Any, other: Any, threads: tuple[int, int], offset: int, count: int
) -> Race:
    def does(event: Any) -> tuple[str, tuple[str, int]]:
        site = recorder.sites[int(event[SITE])]
        what = "atomic" if event[IS_ATOMIC] else "write" if event[WRITE] else "read"
        return f"{what} at {site.text}", (site.file, site.line)

    (first, first_line), (second, second_line) = does(write), does(other)
    element = tuple(array.indices(np.array([offset]))[0].tolist())
    block = recorder.blocks[int(write[BLOCK])]
    interval = int(write[INTERVAL])
    return Race(array.name, element, first, second, first_line, second_line, threads, block, interval, count)
