"""Reads of shared memory that nothing has been written to, or that an asynchronous copy is still writing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..device import watch
from ..device.units import ceil_div
from .races import units_of
from .recording import COLUMNS, SHARED, Recorder

__all__ = ["UnwrittenRead", "unwritten_reads"]


@dataclass(frozen=True)
class UnwrittenRead:
    """A read of an element of shared memory that holds no value yet.

    Attributes
    ----------
    array : str
        Name of the array.
    element : tuple of int
        Index of the element.
    file, line : str, int
        Place of the read in the kernel's file.
    block : tuple of int
        The block.
    thread : int
        The reading thread, by its position in the block.
    in_flight : bool
        True if an asynchronous copy to the element has been started and has not landed.
    """

    array: str
    element: tuple[int, ...]
    file: str
    line: int
    block: tuple[int, ...]
    thread: int
    in_flight: bool


def unwritten_reads(recorder: Recorder, table: np.ndarray[Any, Any]) -> Iterator[UnwrittenRead]:
    """Yield such reads, one example for each place in the source; `table` has the recorder's rows."""
    units = units_of(table, len(recorder.arrays)).tolist()
    shared = [array.space == SHARED for array in recorder.arrays]
    position = {name: COLUMNS.index(name) for name in ("block", "thread", "site", "array", "offset", "size", "kind")}
    writer: dict[tuple[int, int], int] = {}  # the last write of each unit of shared memory, by its row
    seen: set[int] = set()
    block = -1
    for row, values in enumerate(table.tolist()):
        number, site, kind = (values[position[name]] for name in ("array", "site", "kind"))
        if not shared[number]:
            continue
        if values[position["block"]] != block:
            block = values[position["block"]]
            writer = {}
        unit, offset = units[number], values[position["offset"]]
        places = [(number, offset // unit + i) for i in range(ceil_div(values[position["size"]], unit))]
        if kind != watch.READ:
            writer |= dict.fromkeys(places, row)
            continue
        lacking = next((place for place in places if not _holds(recorder, table, writer.get(place), row)), None)
        if lacking is None or site in seen:
            continue
        seen.add(site)
        element = recorder.arrays[number].indices(np.array([lacking[1] * unit]))[0]
        where = recorder.sites[site]
        yield UnwrittenRead(
            recorder.arrays[number].name,
            tuple(element.tolist()),
            where.file,
            where.line,
            recorder.blocks[block],
            values[position["thread"]],
            lacking in writer,
        )


def _holds(recorder: Recorder, table: np.ndarray[Any, Any], write: int | None, row: int) -> bool:
    """Return True if a unit whose last write is the row `write` holds a value when `row` reads it."""
    if write is None:
        return False
    if table[write, COLUMNS.index("kind")] != watch.COPY_WRITE:
        return True
    return write in recorder.landings and recorder.landings[write][2] <= row
