"""Simulated threads, the operating-system threads that run them, and the error of a divergent barrier."""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

from . import patches

WARP_SIZE = 32

Index = tuple[int, int, int]


class DivergentBarrier(RuntimeError):
    """Only part of a block's threads reached a barrier.

    Attributes
    ----------
    block_index : tuple of int
        (x, y, z) of the block.
    waiting : dict from str to list of tuple of int
        Maps the place of each barrier at which threads wait to the (x, y, z) of these threads. A place is `file:line`
        of the kernel, followed by ` > file:line` for each device function that leads to the barrier.
    exited : list of tuple of int
        The threads that have returned from the kernel.
    """

    def __init__(self, block_index: Index, waiting: dict[str, list[Index]], exited: list[Index]) -> None:
        super().__init__(block_index, waiting, exited)  # the arguments used for pickling
        self.block_index, self.waiting, self.exited = block_index, waiting, exited

    def __str__(self) -> str:
        groups = [f"{_list_threads(threads)} at {place}" for place, threads in self.waiting.items()]
        text = f"divergent barrier in block {self.block_index}: waiting are " + "; ".join(groups)
        if self.exited:
            text += f"; exited have {_list_threads(self.exited)}"
        return text


def _list_threads(threads: list[Index], most: int = 4) -> str:
    shown = ", ".join(map(str, threads[:most]))
    more = f" and {len(threads) - most} more" if len(threads) > most else ""
    return f"{'thread' if len(threads) == 1 else 'threads'} {shown}{more}"


class Abort(SystemExit):
    """Exception that unwinds a simulated thread whose launch has ended.

    A SystemExit ends an operating-system thread silently.
    """


class SimulatedThread:
    """A thread of the running block.

    Attributes
    ----------
    block_index, thread_index : tuple of int
        (x, y, z).
    linear_index, lane, warp : int
        Position in the block with x fastest, position in its warp, and number of its warp.
    syncs : int
        Number of barriers of its warp that it has passed.
    exchanges, passed : int, tuple
        Number of exchanges with its warp that it has reached; number, place and value of the last one.
    state : dict
        Data that device functions keep per thread, such as pending copies; initially empty.
    """

    __slots__ = (
        "block_index",
        "exchanges",
        "exited",
        "frame",
        "lane",
        "linear_index",
        "mask",
        "passed",
        "position",
        "site",
        "state",
        "syncs",
        "thread_index",
        "vote",
        "warp",
        "worker",
    )

    def __init__(self, block_index: Index, thread_index: Index, linear_index: int) -> None:
        self.block_index, self.thread_index, self.linear_index = block_index, thread_index, linear_index
        self.warp, self.lane = divmod(linear_index, WARP_SIZE)
        self.position = patches.Dim3(*thread_index)  # what the kernel sees
        self.state: dict[Any, Any] = {}
        self.syncs = 0
        self.exchanges = 0
        self.passed: tuple[int, Any, Any] | None = None
        self.exited = False
        self.worker: Worker | None = None  # None until it starts
        # Where it waits: the chain of calls that led to the barrier, and the frame that called the barrier.
        self.site: tuple[Any, ...] | None = None
        self.frame: FrameType | None = None
        self.mask: int | None = None  # lanes to wait for, None at a barrier of the block
        self.vote = False

    def __repr__(self) -> str:
        return f"thread {self.thread_index} of block {self.block_index}"


class Worker:
    """An operating-system thread that runs simulated threads. It sleeps on `wake` until its turn.

    It is no `threading.Thread`: most workers run part of one simulated thread, for which its start would take longer.
    """

    def __init__(self, work: Callable[[Worker, SimulatedThread], None]) -> None:
        self.wake, self._ended = _thread.allocate_lock(), _thread.allocate_lock()
        self.wake.acquire()
        self._ended.acquire()
        self.thread: SimulatedThread | None = None  # what to run next; None means the end
        self.ident: int | None = None
        self._work = work

    def start(self) -> None:
        """Start the operating-system thread."""
        self.ident = _thread.start_new_thread(self._run, ())

    def join(self, timeout: float) -> None:
        """Wait until it has ended, up to `timeout` seconds."""
        if self.ident is not None and self._ended.acquire(timeout=timeout):
            self._ended.release()

    def _run(self) -> None:
        """Run simulated threads until the launch ends."""
        # As `threading.Thread` does, for tools such as debuggers and coverage.
        if (trace := threading.gettrace()) is not None:
            sys.settrace(trace)
        if (profile := threading.getprofile()) is not None:
            sys.setprofile(profile)
        try:
            # NumPy's setting for overflow and invalid operations is per operating-system thread.
            with np.errstate(all="ignore"):
                while True:
                    self.wake.acquire()
                    if self.thread is None:
                        return
                    self._work(self, self.thread)
        except Abort:
            return
        finally:
            self._ended.release()
