"""Compilation ahead of need, in worker processes, while this process goes on.

Such kernels are put into the kernel cache. A product that needs one of them waits until it is there if a worker is
compiling it, and compiles it itself otherwise.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from . import kernel_files
from .compilation import Task, Worker, can_be_sent, default_jobs, log_compiled, start_worker

__all__ = ["compile_ahead", "wait_for", "wait_until_idle"]

CORES_PER_WORKER = 4  # the others are left to the program
MAX_WORKERS = 4
IDLE_SECONDS = 20.0  # after which a worker without work ends

Named = tuple[str, Task]  # the name of a kernel's file, and the kernel


class _Queue:
    """Kernels that wait to be compiled, and the threads that serve them, each with a worker process."""

    def __init__(self) -> None:
        self.pending: dict[str, threading.Event] = {}  # by the names of kernels; set when one is kept, or has failed
        self._tasks: deque[Named] = deque()
        self._changed = threading.Condition()
        self._workers: set[Worker] = set()
        self._threads = 0

    def add(self, needed: Sequence[Named], others: Sequence[Named], most: int) -> None:
        """Add kernels that are not pending, and start threads for them: `most` of them in all.

        Those that are needed come before all that wait. Of the others, only those are added that a worker has time for.
        """
        with self._changed:
            new = [one for one in needed if one[0] not in self.pending]
            idle = most - len(self.pending) - len(new)
            extra = [one for one in others if one[0] not in self.pending][: max(idle, 0)]
            self.pending |= {name: threading.Event() for name, _ in new + extra}
            self._tasks.extendleft(reversed(new))
            self._tasks.extend(extra)
            for _ in range(min(len(self._tasks), most - self._threads)):
                threading.Thread(target=self._serve, name="numba_gemm-compile-ahead", daemon=True).start()
                self._threads += 1
            self._changed.notify_all()

    def _take(self) -> Named | None:
        """Return a task; None if there has been none for some time, and the thread is to end."""
        with self._changed:
            if self._changed.wait_for(lambda: self._tasks, IDLE_SECONDS):
                return self._tasks.popleft()
            self._threads -= 1
            return None

    def wait_for(self, name: str) -> None:
        """Wait until a kernel has been compiled, or has failed to; take it back if no worker has begun with it."""
        with self._changed:
            done = self.pending.get(name)
            if done is None:
                return
            for one in self._tasks:
                if one[0] == name:
                    self._tasks.remove(one)
                    self.pending.pop(name).set()
                    return
        done.wait()

    def wait_until_idle(self) -> None:
        """Wait until there are no kernels to compile."""
        for done in list(self.pending.values()):
            done.wait()

    def _serve(self) -> None:
        worker = start_worker()
        if worker is not None:
            self._workers.add(worker)
        ready = False
        with suppress(Exception):
            ready = worker is not None and worker.wait_until_ready()
        while (taken := self._take()) is not None:
            name, task = taken
            # An error, such as a warning that is raised, is left to the product that needs the kernel.
            with suppress(Exception):
                if worker is not None and ready:
                    self._compile(worker, name, task)
            self.pending.pop(name).set()
        if worker is not None:
            self._workers.discard(worker)
            worker.stop()

    @staticmethod
    def _compile(worker: Worker, name: str, task: Task) -> None:
        begin = time.perf_counter()
        cubin = worker.compile(*task)
        if cubin is not None:
            seconds = time.perf_counter() - begin
            kernel_files.keep(kernel_files.place(), name, cubin, task[0].name, seconds)
            log_compiled(task, seconds, " ahead of need")

    def stop(self) -> None:
        """End all workers, at the end of the process."""
        for worker in list(self._workers):
            worker.stop()


_queue = _Queue()


def _forget() -> None:
    """Forget the parent's threads, in a process that was forked."""
    global _queue
    _queue = _Queue()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
atexit.register(lambda: _queue.stop())


def compile_ahead(needed: Sequence[Named], others: Sequence[Named]) -> None:
    """Start to compile kernels. Nothing is done where there are few cores, or NUMBA_GEMM_JOBS allows few processes.

    Parameters
    ----------
    needed : sequence of (str, Task)
        Names of the kernels' files in the cache, where they are not yet, and the kernels.
    others : sequence of (str, Task)
        The same for kernels that are compiled only by workers that have nothing else to do, the most likely ones first.
    """
    most = min(default_jobs() // CORES_PER_WORKER, MAX_WORKERS)
    if most:
        needed, others = ([one for one in named if can_be_sent(one[1][0])] for named in (needed, others))
        _queue.add(needed, others, most)


def wait_for(name: str | None) -> None:
    """Wait until a kernel is in the cache, or has failed to compile, if a worker compiles it."""
    if name is not None:
        _queue.wait_for(name)


def wait_until_idle() -> None:
    """Wait until nothing is compiled ahead, for example to measure host times: other processes slow down the host."""
    _queue.wait_until_idle()
