"""Debugging of one thread of a kernel, in the simulator.

`debug` runs a launch in which ``breakpoint()`` stops in one thread only. It runs the kernel itself, not a model of it.
"""

from __future__ import annotations

import bdb
import sys
import threading
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any

from ..kernels.ladder import TileConfig
from ..simulator import patches, scheduler
from .stepping import Index, checked_index
from .target import prepare

# From this version on, pdb stops where it is called; earlier versions stop at the next line.
_STOPS_AT_ONCE = sys.version_info >= (3, 13)


class _Stopper:
    """Observer of a launch in which only one thread stops."""

    def __init__(self, file: str, block: Index, thread: Index, line: int | None) -> None:
        self._file, self._chosen, self._line = file, (block, thread), line
        self.previous = sys.breakpointhook
        self.reached = False

    def _is_chosen(self, thread: scheduler.SimulatedThread) -> bool:
        return (thread.block_index, thread.thread_index) == self._chosen

    def thread_start(self, thread: scheduler.SimulatedThread) -> None:
        if self._line is not None and self._is_chosen(thread):
            sys.settrace(self._call)

    def thread_resume(self, thread: scheduler.SimulatedThread) -> None:
        # The chosen thread gets the hook itself, not a function that calls it, because debuggers show their caller.
        sys.breakpointhook = self.previous if self._is_chosen(thread) else self._pass_by

    def _pass_by(self, *args: Any, **kwargs: Any) -> Any:
        try:
            worker = scheduler.current_thread().worker
            simulated = worker is not None and worker.ident == threading.get_ident()
        except RuntimeError:  # no simulated thread is running
            simulated = False
        return None if simulated else self.previous(*args, **kwargs)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        lines = (line for _, _, line in frame.f_code.co_lines())
        return self._at if frame.f_code.co_filename == self._file and self._line in lines else None

    def _at(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event != "line" or frame.f_lineno != self._line:
            return self._at
        self.reached = True
        sys.settrace(None)
        sys.breakpointhook()
        installed = frame.f_trace  # by a debugger, which sets it in all callers of its caller
        if installed is not None and installed != self._at and not _STOPS_AT_ONCE:
            installed(frame, "line", None)  # the debugger has not been told of this line and would miss it
        return None  # keep the installed trace function


def debug(
    stage_or_kernel: Any,
    grid: int | Sequence[int] | None,
    block: int | Sequence[int] | None,
    *args: Any,
    block_index: int | Sequence[int] = (0, 0, 0),
    thread: int | Sequence[int] = (0, 0, 0),
    config: TileConfig | str | None = None,
    dynamic_shared: int | None = None,
    seed: int | None = None,
    line: int | None = None,
) -> None:
    """Run a launch in the simulator in which ``breakpoint()`` in the kernel stops in one thread only.

    ``breakpoint()`` calls ``sys.breakpointhook`` as usual, which starts pdb unless PYTHONBREAKPOINT or a framework says
    otherwise. The debugger runs on the operating-system thread of the simulated thread. Stepping follows that thread
    only, across barriers, and no further than the kernel's end. Quitting the debugger ends the launch silently.

    All blocks run. Parameters that are not listed are those of `step`.

    Parameters
    ----------
    line : int, optional
        Also stop the first time that the thread is about to run this line of the kernel's file, so that the kernel need
        not be edited.

    Raises
    ------
    NotImplementedError, RuntimeError, TypeError, ValueError
        as `step` does.

    Warns
    -----
    RuntimeWarning
        if the thread has not reached `line`.
    """
    made = prepare(stage_or_kernel, grid, block, args, config=config, dynamic_shared=dynamic_shared)
    chosen_block = checked_index("block_index", block_index, "grid", made.grid)
    chosen = checked_index("thread", thread, "block", made.block)
    file = patches.python_function(made.kernel).__code__.co_filename
    stopper = _Stopper(file, chosen_block, chosen, line)
    try:
        made.run(seed=seed, observer=stopper)
    except bdb.BdbQuit:
        return
    finally:
        sys.breakpointhook = stopper.previous
    if line is not None and not stopper.reached:
        warnings.warn(
            f"thread {chosen} of block {chosen_block} has not come to line {line} of {file}",
            RuntimeWarning,
            stacklevel=2,
        )
