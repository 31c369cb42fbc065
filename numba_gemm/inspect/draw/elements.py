"""Elements of an array that a request accesses, or that the sectors which it moves hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...models import requests as rules
from ..recording import TracedArray
from ..tracing import Trace


def first_request(
    trace: Trace,
    array: str,
    ops: Sequence[str],
    block: tuple[int, ...] | None = None,
    warp: int | None = None,
    lane: int | None = None,
) -> int | None:
    """Return the first row of `Trace.requests` for an array, of a block, a warp and a lane if given, else None."""
    table = trace.requests
    chosen = (table["array"] == array) & table["op"].isin(ops)
    if block is not None:
        chosen &= table["block"] == block
    if warp is not None:
        chosen &= table["warp"] == warp
    for request in np.flatnonzero(chosen).tolist():
        if lane is None or any(number == lane for number, _ in trace.lanes(request)):
            return int(request)
    return None


def of_request(trace: Trace, request: int) -> np.ndarray[Any, Any]:
    """Return the indices of the elements that the lanes of a request access, one row each."""
    size = int(trace.requests["bits"].iloc[request]) // 8
    return _elements(trace, request, [(address, size) for _, address in trace.lanes(request)])


def of_sectors(trace: Trace, request: int) -> np.ndarray[Any, Any]:
    """Return the indices of the elements that lie in the sectors of a request to global memory, one row each."""
    sectors = {address // rules.SECTOR_BYTES for _, address in trace.lanes(request)}
    return _elements(trace, request, [(sector * rules.SECTOR_BYTES, rules.SECTOR_BYTES) for sector in sorted(sectors)])


def _elements(trace: Trace, request: int, runs: Sequence[tuple[int, int]]) -> np.ndarray[Any, Any]:
    """Return the indices of the elements in runs of bytes, each an address within the allocation and a length."""
    array = trace.array(trace.requests["array"].iloc[request])
    starts = [np.arange(address, address + size, array.itemsize) - array.begin for address, size in runs]
    return within(array, np.unique(np.concatenate(starts)))


def within(array: TracedArray, offsets: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the indices of the elements at these byte offsets, without offsets at which the array has no element."""
    found = array.indices(offsets)
    inside = ((found >= 0) & (found < np.array(array.shape))).all(axis=1)
    exact = found @ np.array(array.strides, np.int64) == offsets
    return found[inside & exact]


def boxes(indices: np.ndarray[Any, Any], stacked: bool = False) -> list[tuple[int, int, int, int]]:
    """Return neighbouring elements of a row as boxes: first and last row, first and last column.

    If `stacked`, boxes of the same columns in consecutive rows are one.
    """
    found: list[tuple[int, int, int, int]] = []
    for row, col in sorted(map(tuple, indices.tolist())):
        if found and found[-1][0] == row and found[-1][3] == col - 1:
            found[-1] = (row, row, found[-1][2], col)
        else:
            found.append((row, row, col, col))
    if not stacked:
        return found
    joined: list[tuple[int, int, int, int]] = []
    for top, bottom, left, right in sorted(found, key=lambda box: (box[2:], box[0])):
        if joined and joined[-1][1:] == (top - 1, left, right):
            joined[-1] = (joined[-1][0], bottom, left, right)
        else:
            joined.append((top, bottom, left, right))
    return joined
