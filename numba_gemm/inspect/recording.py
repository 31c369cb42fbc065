"""Recording of accesses, as an observer of the scheduler and as the recorder of watched arrays.

Rows are plain numbers (`COLUMNS`); the arrays and sites that they refer to are kept in lists. `tracing` turns the rows
into tables.
"""

from __future__ import annotations

import linecache
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

from ..device import watch
from ..simulator import kernel_view, launch, scheduler
from ..simulator.call_chains import call_chain, callers, position_of
from .loops import Turns

__all__ = ["ATOMIC", "COLUMNS", "GLOBAL", "SHARED", "Recorder", "Site", "TracedArray"]

GLOBAL, SHARED = "global", "shared"
ATOMIC = watch.COPY_WRITE + 1  # a kind of access, in addition to those of `watch`
COLUMNS = ("block", "thread", "site", "path", "interval", "syncs", "array", "offset", "size", "kind")

KINDS, SIZES = "biuf", (1, 2, 4, 8)  # of elements that one instruction can load
SHARED_NAME = re.compile(r"(\w+)\s*=\s*([\w.]*shared\s*\.\s*array)")

# Frames of these files lie between an access and the kernel's code.
FRAMES = str(Path(__file__).with_name("frames.py"))
HIDDEN = (watch.__file__, __file__, FRAMES, kernel_view.__file__, launch.__file__, scheduler.__file__)


@dataclass(frozen=True)
class TracedArray:
    """An array that is an argument of the kernel, or that the kernel allocates in shared memory.

    Attributes
    ----------
    name : str
        Name of the kernel's parameter, or of the first variable that the array was assigned to.
    space : str
        "global" or "shared".
    shape : tuple of int
        Number of elements along each axis.
    strides : tuple of int
        Strides in bytes.
    itemsize : int
        Bytes per element; in dynamic shared memory, per element of the first view.
    begin : int
        Bytes from the start of the allocation to the first element.
    dtype : dtype
        Type of the elements; in dynamic shared memory, of the first view.
    """

    name: str
    space: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    begin: int
    dtype: np.dtype[Any]

    def indices(self, offsets: np.ndarray) -> np.ndarray:
        """Return the indices of the elements at these byte offsets from the first one, one row per element."""
        found = np.zeros((len(offsets), len(self.shape)), np.int64)
        rest = offsets.astype(np.int64)
        for axis in sorted(range(len(self.shape)), key=lambda axis: -abs(self.strides[axis])):
            step, extent = self.strides[axis], self.shape[axis]
            if step < 0:  # count from the lowest address
                rest = rest - (extent - 1) * step
        for axis in sorted(range(len(self.shape)), key=lambda axis: -abs(self.strides[axis])):
            step, extent = self.strides[axis], self.shape[axis]
            if step == 0 or extent == 1:
                continue
            steps = rest // abs(step)
            rest = rest - steps * abs(step)
            found[:, axis] = steps if step > 0 else extent - 1 - steps
        return found


@dataclass(frozen=True)
class Site:
    """An instruction, identified by the chain of calls that leads to it.

    Attributes
    ----------
    places : tuple of (str, int, str)
        File, line and function of each call, starting at the kernel.
    file, line : str, int
        File and line of the innermost call in the kernel's file.
    """

    places: tuple[tuple[str, int, str], ...]
    file: str
    line: int

    @property
    def text(self) -> str:
        """Chain of calls, starting at the kernel."""
        return " > ".join(f"{function}:{line}" for _, line, function in self.places)


def check_elements(name: str, array: np.ndarray[Any, Any]) -> None:
    """Raise TypeError unless a single instruction can load an element."""
    if array.dtype.kind not in KINDS or array.itemsize not in SIZES:
        raise TypeError(
            f"{name} holds {array.dtype}; a trace is of numbers of 1, 2, 4 or 8 bytes, each loaded by one instruction: "
            "pass an array of those, or a view of one field"
        )


class Recorder:
    """Observer of the scheduler and recorder of the accesses of watched arrays."""

    def __init__(self, kernel_file: str) -> None:
        self.rows: list[tuple[int, ...]] = []
        # By a copy's write, when it landed: barriers passed, of the block and of the warp, and the next row.
        self.landings: dict[int, tuple[int, int, int]] = {}
        self.pairs: list[tuple[int, int]] = []
        self.arrays: list[TracedArray] = []
        self.sites: list[Site] = []
        self.blocks: list[tuple[int, ...]] = []
        self.barriers: list[tuple[int, int]] = []  # block and line of each barrier of a block
        self.file = kernel_file
        self._turns = Turns()
        self._site_of: dict[tuple[Any, ...], int] = {}
        self._numbas_code: dict[CodeType, bool] = {}
        self._path_of: dict[tuple[int, ...], int] = {}
        self._begin: list[int] = []  # address of each array
        self._memory: list[tuple[int, int]] = []  # address range that each array may access: first byte, end
        self._block: tuple[int, ...] = ()
        self._first: scheduler.SimulatedThread | None = None  # of the running block
        self._interval = 0
        self._shared_of: dict[Any, int] = {}
        self._atomic: FrameType | None = None

    # ---- arrays

    def watched(self, array: np.ndarray[Any, Any], name: str) -> Any:
        """Return a watched view of an argument."""
        check_elements(name, array)
        owner: Any = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        low, high = np.lib.array_utils.byte_bounds(owner)
        begin = watch.address(array) - low
        return self._add(
            array,
            TracedArray(name, GLOBAL, array.shape, array.strides, array.itemsize, begin, array.dtype),
            (low, high),
        )

    def _add(self, array: np.ndarray[Any, Any], described: TracedArray, memory: tuple[int, int]) -> Any:
        self.arrays.append(described)
        self._begin.append(watch.address(array))
        self._memory.append(memory)
        return watch.watched(array, self, len(self.arrays) - 1)

    def shared(self, array: np.ndarray[Any, Any], place: Any) -> Any:
        """Register a new array in shared memory and return its watched view; called by the scheduler."""
        memory = np.lib.array_utils.byte_bounds(array)
        if place in self._shared_of:  # seen in another block
            number = self._shared_of[place]
            self._begin[number], self._memory[number] = watch.address(array), memory
            return watch.watched(array, self, number)
        self._shared_of[place] = len(self.arrays)
        name = self._shared_name()
        check_elements(name, array)
        described = TracedArray(name, SHARED, array.shape, array.strides, array.itemsize, 0, array.dtype)
        return self._add(array, described, memory)

    def _shared_name(self) -> str:
        """Return the variable that the array is assigned to, with a number if another array has that name."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename in HIDDEN:
            frame = frame.f_back
        assert frame is not None
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)
        position = position_of(frame)
        column = position[2] if isinstance(position, tuple) else None
        found = [
            match
            for match in SHARED_NAME.finditer(text)
            if column in (None, match.start(2)) and not text[: match.start(1)].rstrip().endswith(",")  # a, b = ...
        ]
        name = found[0][1] if found else f"shared_{frame.f_lineno}"
        taken = {array.name for array in self.arrays}
        unique, count = name, 1
        while unique in taken:
            count += 1
            unique = f"{name}_{count}"
        return unique

    # ---- threads

    def thread_start(self, thread: scheduler.SimulatedThread) -> None:
        """Start tracing a thread's loops; called by the scheduler when a thread starts."""
        if thread.block_index != self._block:
            self._block, self._interval, self._first = thread.block_index, 0, thread
            self.blocks.append(thread.block_index)
        stack: list[Any] = []
        thread.state["loops"] = stack
        sys.settrace(self._turns.tracer(stack))

    def thread_end(self, thread: scheduler.SimulatedThread) -> None:
        """Stop tracing; called by the scheduler when a thread has returned from the kernel."""
        sys.settrace(None)

    def barrier(self, block_index: tuple[int, ...], number: int) -> None:
        """Begin the next interval; called by the scheduler when all threads of a block have reached a barrier."""
        self._interval = number + 1
        if self._first is not None and self._first.frame is not None:  # all threads wait at the same place
            self.barriers.append((len(self.blocks) - 1, self._describe(self._first.frame).line))

    # ---- accesses

    def _new_site(self, key: tuple[Any, ...], frame: FrameType) -> int:
        site = self._site_of[key] = len(self.sites)
        self.sites.append(self._describe(frame))
        return site

    def _describe(self, frame: FrameType) -> Site:
        places = [
            (caller.f_code.co_filename, caller.f_lineno, caller.f_code.co_name)
            for caller in callers(frame)
            if caller.f_code.co_filename not in HIDDEN and not _numbas(caller)
        ]
        places.reverse()
        own = [place for place in places if place[0] == self.file] or places
        return Site(tuple(places), own[-1][0], own[-1][1])

    def access(self, array: Any, address: int, size: int, kind: int) -> int:
        """Record an access of `size` bytes by the running thread and return its row; called by watched arrays."""
        # Each call in here is one more event for the function that counts iterations: there are few.
        frame: FrameType | None = sys._getframe(2)
        assert frame is not None
        numbas = self._numbas_code.get(frame.f_code)
        if numbas is None:
            numbas = self._numbas_code[frame.f_code] = _numbas(frame)
        if numbas and "atomic" in frame.f_code.co_qualname.lower():
            # The reads and writes of an atomic count as one access, made by its caller.
            while _numbas(frame.f_back):
                frame = frame.f_back
                assert frame is not None
            if frame is self._atomic:
                return len(self.rows) - 1
            self._atomic, kind = frame, ATOMIC
            assert frame.f_back is not None
            frame = frame.f_back
        else:
            self._atomic = None
        thread = scheduler.current_thread()
        number = array.name
        low, high = self._memory[number]
        if not low <= address <= high - size:
            raise IndexError(
                f"{size} bytes of {self.arrays[number].name} that are not in its memory: of a copy, as ravel makes one?"
            )
        path = Turns.path(thread.state["loops"])
        key = call_chain(frame)
        site = self._site_of.get(key)
        self.rows.append(
            (
                len(self.blocks) - 1,
                thread.linear_index,
                self._new_site(key, frame) if site is None else site,
                self._path_of.setdefault(path, len(self._path_of)),
                self._interval,
                thread.syncs,
                number,
                address - self._begin[number],
                size,
                kind,
            )
        )
        return len(self.rows) - 1

    def paired(self, read: int, write: int) -> None:
        """Record that two accesses are one asynchronous copy; called by watched arrays."""
        self.pairs.append((read, write))

    def landed(self, access: int) -> None:
        """Record that an asynchronous copy has landed in shared memory; called by watched arrays."""
        self.landings[access] = (self._interval, scheduler.current_thread().syncs, len(self.rows))


def _numbas(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_globals.get("__name__", "").startswith("numba.")
