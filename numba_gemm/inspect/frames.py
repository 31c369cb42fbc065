"""Record of every step of some threads of a launch, with their arrays and memory requests, as plain data for a player.

The data is made to be small: a frame has what changed since the previous frame of its thread, and texts, functions,
arrays and requests that many frames refer to are stored once.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType
from typing import Any

import numpy as np

from ..device import watch
from ..device.units import ceil_div
from ..models.requests import SECTOR_BYTES
from ..runtime.launch import Simulated
from ..simulator import patches, scheduler
from . import recording, tracing
from .following import Follower, Index, Step
from .frame_requests import FrameRequests
from .snapshots import SMALL, Array, arrays_in, local_values, show

MOST_ELEMENTS = 4096  # largest array that is recorded
KINDS = ("line", "barrier", "end")


@dataclass
class _Shown:
    """An array that a thread uses: its description, and its contents in the thread's last frame."""

    number: int
    contents: Array


@dataclass
class _Thread:
    """Frames of one thread, as far as they fit."""

    frames: list[dict[str, Any]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # number of accesses of all threads at the start of each frame
    size: int = 0
    total: int = 0


class _Recorded(Follower):
    """Follower that keeps the steps instead of handing them over."""

    def __init__(self, recorder: Frames, made: Simulated, block: Index, thread: Index, into: Any) -> None:
        super().__init__(made, block, thread, into)
        self._frames, self._kept = recorder, _Thread()
        self._calls_seen: list[tuple[FrameType, int]] = []
        self._count = 0
        self._shown: dict[tuple[Any, ...], _Shown] = {}
        self._visible: list[int] = []
        recorder.threads[thread] = self._kept

    def take_line(self, step: Step) -> None:
        self._keep(step)

    def take_end(self, step: Step) -> None:
        self._keep(step)

    def barrier(self, block_index: Index, number: int) -> Step:
        step = super().barrier(block_index, number)
        self._keep(step)
        return step

    def _keep(self, step: Step) -> None:
        kept = self._kept
        kept.total += 1
        if kept.size > self._frames.limit:
            return
        frame = self._frame(step)
        kept.size += len(json.dumps(frame, separators=(",", ":")))
        if kept.size > self._frames.limit and kept.frames:
            return
        kept.frames.append(frame)
        kept.starts.append(self._frames.accesses)

    def _frame(self, step: Step) -> dict[str, Any]:
        frame = self._stack[-1].frame
        seen = self._calls_seen
        del seen[step.depth + 1 :]
        if len(seen) <= step.depth or seen[step.depth][0] is not frame:
            del seen[step.depth :]
            seen.append((frame, self._count))
            self._count += 1
        made: dict[str, Any] = {
            "k": KINDS.index(step.kind),
            "f": self._frames.function(frame),
            "l": step.line,
            "d": step.depth,
            "c": seen[-1][1],
            "i": step.interval,
        }
        if step.barrier is not None:
            made["b"] = step.barrier
        if step.changed:
            made["v"] = {name: show(step.locals[name]) for name in step.changed}
        changes = self._changes()
        if changes:
            made["t"] = changes
        visible = [shown.number for shown in self._now]
        if visible != self._visible:
            made["s"] = self._visible = visible
        return made

    def _changes(self) -> dict[int, Any]:
        """Return the new contents of the arrays in use: all elements, or positions and values of those that changed."""
        found: dict[int, Any] = {}
        self._now = []
        for name, array in self._arrays().items():
            contents = np.array(array.view(np.ndarray), order="C").reshape(-1)
            key = (name, array.shape, array.dtype.str)
            shown = self._shown.get(key)
            if shown is None:
                shown = self._shown[key] = _Shown(self._frames.array(name, array, self._is_shared(array)), contents)
                found[shown.number] = self._frames.numbers(shown.number, contents)
            else:
                bits = f"V{contents.itemsize}"
                places = np.flatnonzero(contents.view(bits) != shown.contents.view(bits))
                if len(places):
                    values = self._frames.numbers(shown.number, contents[places])
                    whole = 2 * len(places) > len(contents)
                    found[shown.number] = (
                        self._frames.numbers(shown.number, contents) if whole else {"p": places.tolist(), "v": values}
                    )
                shown.contents = contents
            self._now.append(shown)
        return found

    def _arrays(self) -> dict[str, Array]:
        """Return the shared and local arrays of the active calls by name, each part of memory once."""
        found: dict[str, Array] = {}
        for call in self._stack:  # the kernel's own names come first and take precedence
            values = local_values(call.frame).items()
            own = {name: array for given, value in values for name, array in arrays_in(given, value)}
            for name, array in own.items():
                if not 0 < array.size <= MOST_ELEMENTS or any(np.may_share_memory(array, one) for one in self._global):
                    continue
                if array.ndim < 2 and array.size <= SMALL and not self._is_shared(array):
                    continue  # its elements are listed among the locals
                views = [one for one in own.values() if one.ndim > array.ndim and np.may_share_memory(array, one)]
                known = any(np.may_share_memory(array, one) for one in found.values())
                if not views and not known and name not in found:
                    found[name] = array
        return found


class Frames:
    """Observer of a launch that records the steps of some threads, and the accesses of all.

    Attributes
    ----------
    limit : int
        Bytes of the frames of each thread, above which the remaining ones are left out.
    threads : dict of Index to frames
        Frames by thread, in the order of `threads`.
    """

    def __init__(self, made: Simulated, block: Index, threads: Sequence[Index], into: Any, limit: int) -> None:
        function = inspect.unwrap(patches.python_function(made.kernel))
        self.kernel = function.__name__
        self.limit = limit // len(threads)
        self.threads: dict[Index, _Thread] = {}
        self._made, self._block = made, block
        self._recorder = recording.Recorder(function.__code__.co_filename)
        names = list(inspect.signature(function).parameters)
        watched = (tracing.watched(self._recorder, *pair) for pair in zip(names, made.arguments, strict=False))
        self.arguments = tuple(watched)
        self._followers = {thread: _Recorded(self, made, block, thread, into) for thread in threads}
        self._functions: dict[CodeType, int] = {}
        self._sources: list[dict[str, Any]] = []
        self._arrays: list[dict[str, Any]] = []
        self._array_of: dict[tuple[Any, ...], int] = {}
        self._memory: dict[Any, int] = {}  # address of each shared allocation, by the recorder's number

    @property
    def accesses(self) -> int:
        """Number of accesses so far."""
        return len(self._recorder.rows)

    # ---- observer of the scheduler

    def thread_start(self, thread: scheduler.SimulatedThread) -> None:
        """Start tracing a thread."""
        self._recorder.thread_start(thread)
        if thread.thread_index in self._followers:
            counting = sys.gettrace()
            self._followers[thread.thread_index].thread_start(thread)
            sys.settrace(_both(counting, sys.gettrace()))

    def thread_end(self, thread: scheduler.SimulatedThread) -> None:
        """Stop tracing a thread."""
        self._recorder.thread_end(thread)

    def shared(self, array: Array, place: Any) -> Any:
        """Register an array in shared memory; return the array that the kernel gets."""
        watched = self._recorder.shared(array, place)
        self._memory[watched.name] = watch.address(watched)
        for follower in self._followers.values():
            follower.shared(watched, place)
        return watched

    def barrier(self, block_index: Index, number: int) -> None:
        """Record that all threads have reached a barrier."""
        for follower in self._followers.values():
            follower.barrier(block_index, number)
        self._recorder.barrier(block_index, number)

    # ---- what frames refer to

    def function(self, frame: FrameType) -> int:
        """Return the number of a function, and keep its source."""
        code = frame.f_code
        if code not in self._functions:
            self._functions[code] = len(self._sources)
            try:
                lines, first = inspect.getsourcelines(code)
            except OSError:
                lines, first = [], code.co_firstlineno
            outer = {name: frame.f_locals.get(name) for name in code.co_freevars}
            constants = {name: str(value) for name, value in outer.items() if isinstance(value, int | float)}
            self._sources.append(
                {
                    "name": code.co_name,
                    "file": code.co_filename.replace("\\", "/").rpartition("/")[2],
                    "first": first,
                    "lines": textwrap.dedent("".join(lines)).splitlines(),
                    "constants": constants,
                }
            )
        return self._functions[code]

    def array(self, name: str, array: Array, shared: bool) -> int:
        """Return the number of an array, and keep its description."""
        *outer, columns = array.shape
        made: dict[str, Any] = {
            "name": name,
            "shape": list(array.shape),
            "rows": math.prod(outer),
            "cols": columns,
            "shared": shared,
            "low": math.inf,
            "high": -math.inf,
        }
        if not outer and columns > 32:
            made |= {"rows": ceil_div(columns, 32), "cols": 32}
        if shared and array.flags.c_contiguous:
            number = getattr(array, "name", None)
            if number is not None and number in self._memory:
                made |= {
                    "of": self._recorder.arrays[number].name,
                    "at": watch.address(array) - self._memory[number],
                    "item": array.itemsize,
                }
        key = (name, array.shape, array.dtype.str, made.get("at"))
        if key not in self._array_of:
            self._array_of[key] = len(self._arrays)
            self._arrays.append(made)
        return self._array_of[key]

    def numbers(self, array: int, values: Array) -> list[Any]:
        """Return values with four significant digits: null for NaN, texts for infinities; extend the array's range."""
        known = values[np.isfinite(values)]
        if len(known):
            described = self._arrays[array]
            described["low"] = min(described["low"], float(known.min()))
            described["high"] = max(described["high"], float(known.max()))
        return [_short(value) for value in values.tolist()]

    # ---- the record

    def data(self) -> dict[str, Any]:
        """Return the record, after the launch, as data that JSON can represent."""
        trace = tracing.Trace(self.kernel, self._made.grid, self._made.block, self._recorder)
        requests = FrameRequests(trace)
        threads = []
        for index, kept in self.threads.items():
            linear = int(np.ravel_multi_index(index[::-1], _three(self._made.block)[::-1]))
            complete = kept.total == len(kept.frames)
            frames = requests.added(kept.frames, kept.starts, complete, linear, self.limit)
            threads.append({"thread": list(index), "linear": linear, "total": kept.total, "frames": frames})
        for array in self._arrays:
            if array["low"] > array["high"]:
                array["low"] = array["high"] = 0
        return {
            "kernel": self.kernel,
            "grid": list(_three(self._made.grid)),
            "block": list(_three(self._made.block)),
            "index": list(self._block),
            "sector": SECTOR_BYTES,
            "functions": self._sources,
            "arrays": self._arrays,
            "requests": requests.rows,
            "patterns": requests.patterns,
            "threads": threads,
        }


def _three(extents: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*map(int, extents), 1, 1)[:3]
    return x, y, z


def _short(value: Any) -> Any:
    if isinstance(value, bool | int):
        return int(value)
    if math.isnan(value):
        return None
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    short = float(f"{value:.4g}")
    return int(short) if short.is_integer() and abs(short) < 1e6 else short


def _both(one: Any, other: Any) -> Any:
    """Return a trace function that calls two trace functions, and follows a call with those that they return."""

    def called(frame: FrameType, event: str, argument: Any) -> Any:
        first, second = one(frame, event, argument), other(frame, event, argument)
        if first is None or second is None:
            return first or second
        return _both(first, second)

    return called


def record(
    made: Simulated, block: Index, threads: Sequence[Index], *, into: Any, seed: int | None, limit: int
) -> dict[str, Any]:
    """Run a block; return the record of some of its threads (`Frames.data`)."""
    frames = Frames(made, block, threads, into, limit)
    replace(made, arguments=frames.arguments).run(seed=seed, blocks=[block], observer=frames)
    return frames.data()
