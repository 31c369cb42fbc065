"""One run of a kernel for a case of a puzzle: its trace and output, or the error that ended it."""

from __future__ import annotations

import _thread
import ast
import contextlib
import linecache
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Any, cast

import numpy as np

from ..inspect.tracing import Trace, trace
from ..simulator import patches, scheduler
from ..terminal import one_line
from .finding import Finding, place
from .record import Case, Puzzle

__all__ = ["Run", "case_text", "run"]

LOCATED = re.compile(r"thread (\(.*?\)) of block (\(.*?\))(?:: )?(.*)", re.DOTALL)  # by the scheduler


@dataclass
class Run:
    """A kernel that has run for a case.

    Attributes
    ----------
    puzzle, case, kernel
        The run's subject.
    trace : Trace
        All accesses.
    output, expected : array
        The output and the correct one.
    """

    puzzle: Puzzle
    case: Case
    kernel: Any
    trace: Trace
    output: np.ndarray[Any, Any]
    expected: np.ndarray[Any, Any]

    @cached_property
    def accesses(self) -> list[dict[str, Any]]:
        """The rows of `Trace.accesses`."""
        return cast("list[dict[str, Any]]", self.trace.accesses.to_dict("records"))

    @cached_property
    def requests(self) -> list[dict[str, Any]]:
        """The rows of `Trace.requests`."""
        return cast("list[dict[str, Any]]", self.trace.requests.to_dict("records"))

    def thread(self, position: int) -> tuple[int, int, int]:
        """Return the index of a thread in its block."""
        x, y, _ = (*self.trace.block, 1, 1)[:3]
        return position % x, position // x % y, position // (x * y)


def case_text(case: Case) -> str:
    """Return the extents and scalars of a case: ``M=8, N=8, K=16``."""
    return ", ".join(f"{name}={value:g}" for name, value in case.items())


def run(puzzle: Puzzle, case: Case, kernel: Any, seconds: float) -> Run | Finding:
    """Run a kernel for a case; return a finding if it raises, or takes more than `seconds` of processor time."""
    arguments = puzzle.arguments(case)
    # The host computes with copies: a wrong kernel may write to its inputs.
    expected = puzzle.expected(**{name: np.copy(value) for name, value in arguments.items()})
    function = patches.python_function(kernel)
    grid, block = puzzle.extents(puzzle.grid, case), puzzle.extents(puzzle.block, case)
    watch = _Watch(function.__code__.co_filename, seconds)
    try:
        with watch.limit():
            traced = trace(kernel, grid, block, *arguments.values())
    except KeyboardInterrupt:
        if watch.found is None:
            raise
        return watch.found
    except scheduler.DivergentBarrier as error:
        return _divergence(error)
    except (Exception, SystemExit) as error:
        return _failure(error, function.__code__.co_filename, case)
    return Run(puzzle, case, kernel, traced, arguments[puzzle.output], np.asarray(expected, np.float32))


@dataclass
class _Watch:
    """A limit of processor time, after which the main thread is interrupted."""

    file: str
    seconds: float
    found: Finding | None = None
    _done: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def limit(self) -> Iterator[None]:
        """Limit the time of what runs within; without effect outside the main thread, which alone is interrupted."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        watcher = threading.Thread(target=self._watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            self._done.set()
            watcher.join()

    def _watch(self) -> None:
        end = time.process_time() + self.seconds
        while not self._done.wait(0.1):
            if time.process_time() > end:
                self.found = self._endless()
                _thread.interrupt_main()
                return

    def _endless(self) -> Finding:
        """Return a finding with the line that the running thread is at."""
        line, who = 0, ""
        with contextlib.suppress(RuntimeError):
            thread = scheduler.current_thread()
            who = f" in thread {thread.thread_index} of block {thread.block_index}"
            frame = sys._current_frames().get(thread.worker.ident or 0) if thread.worker else None
            while frame is not None:
                if frame.f_code.co_filename == self.file:
                    line = frame.f_lineno
                frame = frame.f_back
        text = f"the kernel still runs after {self.seconds:g} s{who}: does this loop ever end?"
        return Finding("error", text, self.file, line)


def _divergence(error: scheduler.DivergentBarrier) -> Finding:
    """Return a finding that names the barriers, and threads that are missing at the first one."""
    groups = [(*_line_of(at), threads) for at, threads in error.waiting.items()]
    file, line, threads = groups[0]
    others = [f"thread {group[0]} waits at {place(name, number)}" for name, number, group in groups[1:]]
    if error.exited:
        others.append(f"thread {error.exited[0]} has returned")
    missing = ", and ".join(others) or "others wait elsewhere"
    text = (
        f"not all threads of block {error.block_index} reach this barrier: {len(threads)} wait here, such as thread "
        f"{threads[0]}; {missing}"
    )
    return Finding("error", text, file, line)


def _line_of(at: str) -> tuple[str, int]:
    """Return the file and line of the kernel in the place of a barrier."""
    file, _, line = at.split(" > ")[0].rpartition(":")
    return file, int(line)


def _failure(error: BaseException, file: str, case: Case) -> Finding:
    """Return a finding with the line of the kernel that raised, and the thread."""
    text, who = str(error), ""
    located = LOCATED.match(text)
    if located:
        who, text = f"thread {located[1]} of block {located[2]}", located[3]
    last: TracebackType | None = None
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == file:
            last = step
        step = step.tb_next
    if last is None:
        return Finding("error", f"{type(error).__name__}: {one_line(text) or 'no message'} ({case_text(case)})")
    access = _access(last) if isinstance(error, IndexError) else ""
    what = f"out of bounds: {who} accesses {access}" if access else f"{type(error).__name__} in {who}: {one_line(text)}"
    return Finding("error", f"{what} ({case_text(case)})", file, last.tb_lineno)


def _access(step: TracebackType) -> str:
    """Return an access out of bounds with its indices, or an empty text if they are unknown."""
    code, frame = step.tb_frame.f_code, step.tb_frame
    line, last_line, begin, end = list(code.co_positions())[step.tb_lasti // 2]
    if line is None or line != last_line:
        return ""
    source = linecache.getline(code.co_filename, line).encode()[begin:end].decode()
    with contextlib.suppress(Exception):
        node = ast.parse(source.strip(), mode="eval").body
        if not isinstance(node, ast.Subscript) or any(isinstance(part, ast.Call) for part in ast.walk(node)):
            return ""
        scope = {**frame.f_globals, **frame.f_locals}
        array = eval(ast.unparse(node.value), scope)
        found = eval(ast.unparse(node.slice), scope)
        indices = found if isinstance(found, tuple) else (found,)
        if len(indices) != array.ndim or not all(isinstance(i, (int, np.integer)) for i in indices):
            return ""
        index = ", ".join(map(str, indices))
        shape = " x ".join(map(str, array.shape))
        return f"{ast.unparse(node.value)}[{index}], and {ast.unparse(node.value)} has {shape} elements"
    return ""
