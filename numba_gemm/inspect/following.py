"""Steps of one thread of a simulated launch: their record (`Step`), and the observer that creates them (`Follower`)."""

from __future__ import annotations

import linecache
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import FrameType, MappingProxyType, ModuleType
from typing import Any

import numpy as np

from ..device import watch
from ..runtime.launch import Simulated
from ..simulator import kernel_view, launch, patches, scheduler
from .snapshots import WIDTH, Array, arrays_in, is_same, local_values, show, show_change, snapshot
from .target import arrays_of

__all__ = ["Follower", "Index", "Step"]

Index = tuple[int, int, int]

LADDER = "numba_gemm.kernels.ladder"
INDENT = "    "
NOT_FOLLOWED = {module.__name__ for module in (kernel_view, launch, scheduler, watch)}

# Python 3.11 runs these in frames of their own, later versions in the frame of the function.
_COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}


@dataclass(frozen=True, eq=False, repr=False)
class Step:
    """State of one thread at one moment.

    Attributes
    ----------
    kind : str
        "line", before the thread runs the line; "barrier", when all threads of the block have arrived, before any
        continues; or "end", when the block is done, with the thread's locals as it left them.
    file, line, source, function : str, int, str, str
        Position of the thread: file, line number, text of the line (empty if there is no source) and function name.
    depth : int
        0 in the kernel, 1 in a function that it calls, and so on; functions that are not followed do not count.
    locals : mapping of str to value
        Parameters and local variables of that function. Arrays among them are read-only copies, which later steps do
        not change. Arrays in global memory are read-only views instead, which show the memory at the time they are
        read.
    changed : tuple of str
        Names of the locals that are new or differ from the previous step of the same call. Arrays in global memory are
        not compared.
    thread, block : tuple of int
        (x, y, z).
    interval : int
        Number of barriers of the block that the thread has passed.
    barrier : int or None
        Number of the barrier within the block, from 0; None if the step is not a barrier.
    shared : mapping of str to array
        At a barrier, read-only copies of the shared arrays, by the names that the thread uses for them.
    """

    kind: str
    file: str
    line: int
    source: str
    function: str
    depth: int
    locals: Mapping[str, Any]
    changed: tuple[str, ...]
    thread: Index
    block: Index
    interval: int
    barrier: int | None = None
    shared: Mapping[str, Array] = field(default_factory=dict)
    _before: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the changes since the previous step of the same call, then the current position on its own line."""
        margin = INDENT * self.depth
        changes = ", ".join(show_change(name, self.locals[name], self._before.get(name)) for name in self.changed)
        what = self.source
        if self.kind == "barrier":
            arrays = ", ".join(f"{name} {show(array)}" for name, array in self.shared.items())
            what = f"-- barrier {self.barrier}, all threads of block {self.block} --"
            what += f" shared: {arrays}" if arrays else ""
        elif self.kind == "end":
            what = f"-- end of block {self.block} --"
        indent = margin + INDENT
        told = textwrap.wrap(changes, WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False)
        return "\n".join([*told, f"{os.path.basename(self.file)}:{self.line}  {margin}{what}"])

    __repr__ = __str__


class _Calls:
    """Set of the functions that are followed."""

    def __init__(self, kernel: Callable[..., Any], into: Any) -> None:
        self._file = kernel.__code__.co_filename if into is None else None
        self.kernel = kernel.__code__
        self._codes = {self.kernel}
        self._modules: list[str] = [LADDER] if into is None else []
        chosen = into if isinstance(into, Iterable) and not isinstance(into, str) else [into]
        for item in chosen if into is not None else ():
            if isinstance(item, (str, ModuleType)):
                self._modules.append(item if isinstance(item, str) else item.__name__)
            else:
                try:
                    self._codes.add(patches.python_function(item).__code__)
                except TypeError:
                    raise TypeError(
                        f"into is {item!r}; expected functions, modules or names of modules, one or several"
                    ) from None

    def __contains__(self, frame: FrameType) -> bool:
        code = frame.f_code
        if code in self._codes:
            return True
        if code.co_name in _COMPREHENSIONS:
            return False
        module = frame.f_globals.get("__name__", "")
        return code.co_filename == self._file or any(f"{module}.".startswith(f"{name}.") for name in self._modules)


@dataclass
class _Call:
    """An active call, and its locals at its last step."""

    frame: FrameType
    locals: Mapping[str, Any] = field(default_factory=dict)


class Follower:
    """Observer of a launch that creates the steps of one thread.

    `thread_start`, `shared` and the trace functions run on the operating-system thread of a simulated thread, `barrier`
    on the thread that asks for the next step; but never two at a time.
    """

    def __init__(self, made: Simulated, block: Index, thread: Index, into: Any) -> None:
        self._block, self._thread = block, thread
        self._global = [array.view(np.ndarray) for _, array in arrays_of(made.kernel, made.arguments)]
        self._shared: list[Array] = []
        self._calls = _Calls(patches.python_function(made.kernel), into)
        self._stack: list[_Call] = []
        self._interval = 0
        self.end: Step | None = None

    def thread_start(self, thread: scheduler.SimulatedThread) -> None:
        """Follow the thread that is meant; called by the scheduler when a thread starts."""
        if thread.thread_index == self._thread:
            sys.settrace(self._call)

    def shared(self, array: Array, place: Any) -> Array:
        """Register a new array in shared memory; called by the scheduler."""
        self._shared.append(array)
        return array

    def barrier(self, block_index: Index, number: int) -> Step:
        """Return the step of a barrier; called by the scheduler when all threads of the block have reached it."""
        shared: dict[str, Array] = {}
        for call in reversed(self._stack):  # the kernel's own names come last and take precedence
            for name, value in local_values(call.frame).items():
                shared |= {found: array for found, array in arrays_in(name, value) if self._is_shared(array)}
        copies = {name: snapshot(array, None, ()) for name, array in shared.items()}
        reached = self._step("barrier", barrier=number, shared=MappingProxyType(copies))
        self._interval = number + 1
        return reached

    def take_line(self, step: Step) -> None:
        """Hand over a step of kind "line"; the thread waits meanwhile."""
        scheduler.pause(step)

    def take_end(self, step: Step) -> None:
        """Keep the step of kind "end"."""
        self.end = step

    def forget(self) -> None:
        """Drop the references to the frames, which refer to this object in turn."""
        self._stack.clear()

    def _is_shared(self, array: Array) -> bool:
        return any(np.may_share_memory(array, memory) for memory in self._shared)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not (self._is_below_kernel(frame) if self._stack else frame.f_code is self._calls.kernel):
            return None
        self._stack.append(_Call(frame))
        return self._trace

    def _is_below_kernel(self, frame: FrameType) -> bool:
        """Return True if a frame is to be followed; never one that the simulator calls, which could wait for itself."""
        if frame not in self._calls:
            return False
        caller: FrameType | None = frame
        while caller is not None and caller is not self._stack[0].frame:
            if caller.f_globals.get("__name__") in NOT_FOLLOWED:
                return False
            caller = caller.f_back
        return True

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.take_line(self._step("line"))
        elif event == "return":
            if len(self._stack) == 1:
                self.take_end(self._step("end"))
            self._stack.pop()
        return self._trace

    def _step(self, kind: str, **more: Any) -> Step:
        call = self._stack[-1]
        frame, before = call.frame, call.locals
        values = {name: snapshot(value, before.get(name), self._global) for name, value in local_values(frame).items()}
        code = frame.f_code
        call.locals = MappingProxyType(values)
        return Step(
            kind=kind,
            file=code.co_filename,
            line=frame.f_lineno,
            source=linecache.getline(code.co_filename, frame.f_lineno, frame.f_globals).strip(),
            function=code.co_name,
            depth=len(self._stack) - 1,
            locals=call.locals,
            changed=tuple(name for name in values if name not in before or not is_same(values[name], before[name])),
            thread=self._thread,
            block=self._block,
            interval=self._interval,
            _before=before,
            **more,
        )
