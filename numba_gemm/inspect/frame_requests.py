"""Memory requests of recorded frames: which line of a thread makes which requests of its warp."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import recording, tracing

__all__ = ["FrameRequests"]

MOST_REQUESTS = 4  # of one line; the others are only counted


class FrameRequests:
    """Requests of a trace that frames refer to, each once, with their lanes' addresses as patterns."""

    def __init__(self, trace: tracing.Trace) -> None:
        self._trace, self._table = trace, trace.requests
        self._of_access = trace.request_of
        self._threads = trace.accesses["thread"].to_numpy()
        self.rows: list[dict[str, Any]] = []
        self.patterns: list[Any] = []
        self._number: dict[int, int] = {}
        self._pattern: dict[tuple[Any, ...], int] = {}
        self._new = 0  # bytes added by the current frame

    def added(
        self, frames: Sequence[dict[str, Any]], starts: Sequence[int], complete: bool, thread: int, limit: int
    ) -> list[dict[str, Any]]:
        """Return the frames of a thread with the requests that each takes part in, as far as they fit."""
        own = np.flatnonzero(self._threads == thread)
        bounds = np.searchsorted(own, [*starts, len(self._threads) if complete else starts[-1]])
        found: list[dict[str, Any]] = []
        size = 0
        for frame, low, high in zip(frames, bounds[:-1], bounds[1:], strict=True):
            chosen = dict.fromkeys(self._of_access[own[low:high]].tolist())
            self._new = 0
            if chosen:
                frame["a"] = [self._numbered(request) for request in list(chosen)[:MOST_REQUESTS]]
            if len(chosen) > MOST_REQUESTS:
                frame["m"] = len(chosen) - MOST_REQUESTS
            size += len(json.dumps(frame, separators=(",", ":"))) + self._new
            if size > limit and found:
                break
            found.append(frame)
        return found

    def _numbered(self, request: int) -> int:
        if request not in self._number:
            row = self._table.iloc[request]
            lanes = self._trace.lanes(request)
            first = min(address for _, address in lanes) // 128 * 128
            pattern = (tuple(lane for lane, _ in lanes), tuple(address - first for _, address in lanes))
            if pattern not in self._pattern:
                self._pattern[pattern] = len(self.patterns)
                numbers, places = pattern
                self.patterns.append([0 if numbers == tuple(range(len(numbers))) else list(numbers), list(places)])
                self._new += len(str(self.patterns[-1]))
            self._number[request] = len(self.rows)
            made = {
                "op": row["op"],
                "of": row["array"],
                "w": int(row["warp"]),
                "g": int(row["space"] == recording.GLOBAL),
                "n": int(row["bits"]) // 8,
                "cost": int(row["sectors"] + row["wavefronts"]),
                "ideal": int(row["ideal"]),
                "p": self._pattern[pattern],
                "at": first,
            }
            self.rows.append(made)
            self._new += len(str(made))
        return self._number[request]
