"""Compilation of kernels: one in this process, several in parallel processes.

A worker process runs this module. It is sent kernels of this package, and sends back machine code; it uses no GPU.
Where no worker can be started, or one fails, everything is compiled in the calling process.
"""

from __future__ import annotations

import logging
import os
import pickle
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..kernels.step import Kernel
from ..models.gpu_names import dotted
from ..simulator.probe import gpu_environment
from ..simulator.switch import SETTINGS_FILE
from . import epilogue as epilogues
from .collector import without_collections
from .compiler import Cubin, compile_cubin
from .sources import SOURCES

__all__ = [
    "LOG",
    "Task",
    "Worker",
    "can_be_sent",
    "compile_all",
    "compile_kernel",
    "default_jobs",
    "log_compiled",
    "start_worker",
]

LOG = logging.getLogger("numba_gemm.kernels")

Task = tuple[Kernel, tuple[int, int]]  # a kernel, and the compute capability to compile it for
MAX_JOBS = 16  # by default
JOB_BYTES = 1 << 30  # of memory that should be available for each process beside the first, more than it takes
# Settings of Numba's that change code: the variable of the environment that sets each, and its value by default.
SETTINGS = {
    "OPT": ("NUMBA_OPT", 3),
    "BOUNDSCHECK": ("NUMBA_BOUNDSCHECK", 0),
    "CUDA_DEBUGINFO_DEFAULT": ("NUMBA_CUDA_DEBUGINFO", 0),
    "CUDA_ENABLE_NRT": ("NUMBA_CUDA_ENABLE_NRT", 0),
    "DEBUG_ARRAY_OPT": ("NUMBA_DEBUG_ARRAY_OPT", 0),
}


def log_compiled(task: Task, seconds: float, where: str = "") -> None:
    """Log that a kernel was compiled."""
    kernel, cc = task
    LOG.info("kernel %s for compute capability %s: compiled%s in %.2f s", kernel.name, dotted(cc), where, seconds)


def settings() -> dict[str, Any]:
    """Return those of Numba's settings that change code, and are not what they are by default.

    Numba is imported only if one may be another: by a variable of the environment, or in Numba's file of settings.
    """
    named = any(variable in os.environ for variable, _ in SETTINGS.values()) or Path(SETTINGS_FILE).exists()
    if "numba" not in sys.modules and not named:
        return {}
    # What is not set is None, False or 0, by what of Numba was imported.
    return {name: value for name, value in _values().items() if (value or 0) != SETTINGS[name][1]}


def _values() -> dict[str, Any]:
    """Return the current values of Numba's settings that change code."""
    from numba.core import config

    return {name: getattr(config, name, None) for name in SETTINGS}


def compile_kernel(kernel: Kernel, cc: tuple[int, int], *, keep_ptx: bool = True) -> Cubin:
    """Compile a kernel for a compute capability; needs no GPU. `keep_ptx` is that of `compiler.compile_cubin`.

    Raises
    ------
    TypeError
        for an epilogue that does not compile, or returns no real number.
    """
    with without_collections():
        if kernel.epilogue is not None:
            epilogues.check_result(kernel.epilogue, kernel.vectors, cc)
            built = kernel.build(kernel.config, kernel.variant)
        else:
            built = _built(kernel, tuple(settings().items()))
        signature, whole = kernel.signature(kernel.variant), kernel.whole_program
        return compile_cubin(built, signature, cc, name=kernel.name, whole_program=whole, keep_ptx=keep_ptx)


@lru_cache(maxsize=1)
def _built(kernel: Kernel, made_with: tuple[tuple[str, Any], ...]) -> Any:
    """Return a kernel's function: for the next compute capability its device functions are typed and lowered.

    With other settings, it is another function.
    """
    return kernel.build(kernel.config, kernel.variant)


def default_jobs() -> int:
    """Return the number of processes that compile at the same time.

    It is NUMBA_GEMM_JOBS, or the number of cores that this process may use, fewer if there is little memory.

    Raises
    ------
    ValueError
        if NUMBA_GEMM_JOBS is not a positive integer.
    """
    named = os.environ.get("NUMBA_GEMM_JOBS")
    if not named:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(cores, MAX_JOBS, 1 + _available_bytes() // JOB_BYTES)
    if not named.isdecimal() or int(named) < 1:
        raise ValueError(f"NUMBA_GEMM_JOBS is {named!r}; expected a number of processes from 1 on; set one")
    return int(named)


def _available_bytes() -> int:
    """Return the memory that new processes can have without swapping; much if that is not known."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return MAX_JOBS * JOB_BYTES


def compile_all(tasks: Sequence[Task], done: Callable[[int, Cubin, float], None], jobs: int | None = None) -> None:
    """Compile kernels, and call `done` with the number of a task, its result and seconds as soon as there is one.

    Parameters
    ----------
    tasks : sequence of Task
        Kernels. Those that take longest had better come first: this process begins with them, while workers start.
    done : callable
        Called by one thread at a time, in any order.
    jobs : int, optional
        Processes, this one included. By default `default_jobs`.

    Raises
    ------
    Exception
        that of the first kernel that does not compile.
    """
    own = deque(i for i, (kernel, _) in enumerate(tasks) if not can_be_sent(kernel))
    waiting = deque(sorted(set(range(len(tasks))).difference(own)))
    left, failures, changed = len(tasks), list[BaseException](), threading.Condition()

    def finished(i: int, cubin: Cubin, begin: float) -> None:
        nonlocal left
        seconds = time.perf_counter() - begin
        with changed:
            done(i, cubin, seconds)
            left -= 1
            changed.notify()

    def serve(worker: Worker) -> None:
        try:
            while worker.wait_until_ready():
                try:
                    i = waiting.pop()
                except IndexError:
                    return
                begin = time.perf_counter()
                cubin = worker.compile(*tasks[i])
                if cubin is not None:
                    finished(i, cubin, begin)
                    continue
                with changed:
                    own.append(i)
                    changed.notify()
        except BaseException as error:
            with changed:
                failures.append(error)
                changed.notify()

    count = min(default_jobs() if jobs is None else jobs, len(tasks)) - 1
    with ExitStack() as stack:
        for _ in range(count if waiting else 0):
            worker = start_worker()
            if worker is None:
                break
            stack.callback(worker.stop)
            threading.Thread(target=serve, args=(worker,), daemon=True).start()
        while True:
            while not failures and (i := _pop_left(own, waiting)) is not None:
                begin = time.perf_counter()
                finished(i, compile_kernel(*tasks[i], keep_ptx=False), begin)
            with changed:
                changed.wait_for(lambda: own or failures or not left)
                if failures:
                    raise failures[0]
                if not left:
                    return


def _pop_left(*queues: deque[int]) -> int | None:
    """Take the first of the first queue that has any, as one operation; None if all are empty."""
    for queue in queues:
        with suppress(IndexError):
            return queue.popleft()
    return None


# ----------------------------------------------------------------------------------------------------- worker processes


def can_be_sent(kernel: Kernel) -> bool:
    """Return True if a worker can compile a kernel: if it is one of this package, and has no epilogue."""
    own = __name__.partition(".")[0]
    if kernel.epilogue is not None or kernel.build.__module__.partition(".")[0] != own:
        return False
    try:
        pickle.dumps(kernel)
    except (pickle.PicklingError, AttributeError, TypeError):  # a function without a name of its own
        return False
    return True


class Worker:
    """A process that compiles one kernel after the other."""

    def __init__(self) -> None:
        places = [str(Path(place or ".").absolute()) for place in sys.path]
        environment = gpu_environment() | {"PYTHONPATH": os.pathsep.join(places)}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __spec__.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # an interrupt at the terminal is for this process, which then stops the worker
        )
        self._ready = False

    def wait_until_ready(self) -> bool:
        """Return True once the process has started, and False if it cannot compile the same sources."""
        if not self._ready:
            self._ready = self._answer() == SOURCES
        return self._ready

    def compile(self, kernel: Kernel, cc: tuple[int, int]) -> Cubin | None:
        """Return a compiled kernel; None if it could not be compiled."""
        assert self._process.stdin is not None
        try:
            pickle.dump((_values(), kernel, cc), self._process.stdin)
            self._process.stdin.flush()
        except OSError:
            self._ready = False
            return None
        answer = self._answer()
        if not isinstance(answer, Cubin):
            self._ready = answer is not None
            return None
        return answer

    def _answer(self) -> Any:
        """Return what the process sends next; None if it has ended."""
        assert self._process.stdout is not None
        try:
            return pickle.load(self._process.stdout)
        except Exception:  # of a pipe that has ended, or is closed by `stop`; or of text that came before the answers
            return None

    def stop(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
        self._process.wait()


def start_worker() -> Worker | None:
    """Start a worker; None if this process does not run in a Python that can be started again."""
    if getattr(sys, "frozen", False) or not Path(sys.executable or "").name.startswith("python"):
        return None
    try:
        return Worker()
    except OSError:
        return None


def _serve() -> None:
    """Compile what arrives on standard input, until it ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever is printed is no answer

    def answer(what: Any) -> None:
        pickle.dump(what, answers)
        answers.flush()

    threading.Thread(target=_end_with_parent, daemon=True).start()

    answer(SOURCES)  # the first kernel is sent while Numba is imported
    with without_collections():
        from numba import cuda  # noqa: F401
        from numba.core import config

    while True:
        try:
            values, kernel, cc = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        vars(config).update(values)
        try:
            answer(compile_kernel(kernel, cc, keep_ptx=False))
        except Exception:  # the other process meets the same one, with a traceback
            answer(b"failed")


def _end_with_parent() -> None:
    """End this process, whatever it does, when standard input is closed: the process that started it may be killed."""
    closed = select.poll()
    closed.register(0, 0)  # errors and the end of the other side are reported, input is not
    closed.poll()
    os._exit(1)


if __name__ == "__main__":
    _serve()
