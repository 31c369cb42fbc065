"""A launch of simulated threads: which of them runs, and which wait at which barrier."""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
import re
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import numpy as np

from . import patches
from .call_chains import call_chain, calls_kernels, place_of
from .kernel_view import KernelCuda
from .threads import WARP_SIZE, Abort, DivergentBarrier, Index, SimulatedThread, Worker

ALL_LANES = (1 << WARP_SIZE) - 1
WAIT_S = 0.2  # after which a wait begins anew: CPython misses a signal between its look for signals and a wait


class Launch:
    """A launch. Threads hand over to each other directly; the caller sleeps until a block is done."""

    def __init__(
        self,
        function: Callable[..., Any],
        grid: Index,
        block: Index,
        args: Sequence[Any],
        dynamic_bytes: int,
        seed: int | None,
        observer: Any,
    ) -> None:
        self.function, self.grid, self.block, self.args = function, grid, block, tuple(args)
        self.seed = seed
        self.cuda = KernelCuda(self, grid, block, dynamic_bytes, observer)
        self.replacement = patches.SimulatedCuda()
        self.on_barrier = getattr(observer, "barrier", None)
        self.on_start = getattr(observer, "thread_start", None)
        self.on_end = getattr(observer, "thread_end", None)
        self.on_resume = getattr(observer, "thread_resume", None)
        self.threads: list[SimulatedThread] = []
        self.current: SimulatedThread | None = None
        self.tally = 0
        # By warp, its last exchange: number, place and result.
        self._exchanged: dict[int, tuple[int, Any, Any]] = {}
        self._barriers = 0
        self._order: list[SimulatedThread] = []
        self._queue: list[SimulatedThread] = []  # to run before barriers are checked; the next is last
        self._workers: list[Worker] = []
        self._idle: list[Worker] = []
        self._aborting = False
        self._failure: tuple[SimulatedThread | None, BaseException] | None = None
        # Guards the state that `stop` must see consistently when it interrupts a launch: running and idle workers,
        # and `_aborting`.
        self._mutex = threading.Lock()
        self._caller = threading.Lock()
        self._caller.acquire()
        self._request: Callable[[], Any] | None = None  # to be run on the caller's thread
        self._asking: Worker | None = None
        self._reply = threading.Lock()
        self._reply.acquire()

    # ---- on the caller's thread

    def run_block(self, block_index: Index) -> Iterator[Any]:
        """Run a block; yield each result of a request that is not None, and continue when the next one is requested."""
        self.cuda.shared.begin_block()
        self.cuda.blockIdx = patches.Dim3(*block_index)
        extents = (range(extent) for extent in reversed(self.block))
        self.threads = [
            SimulatedThread(block_index, (x, y, z), i) for i, (z, y, x) in enumerate(itertools.product(*extents))
        ]
        self._barriers = 0
        self._exchanged = {}
        self._begin_interval()
        self._switch(self._queue.pop())
        while True:
            while not self._caller.acquire(timeout=WAIT_S):
                pass
            if self._request is None:
                break
            made = None
            try:
                made = self._request()
            except BaseException as raised:
                self._failure = (None, raised)
            self._request = None
            if self._failure is not None:
                break  # the requester still waits for the reply, which `stop` gives
            if made is not None:
                yield made
            self._reply.release()
        if self._failure is not None:
            thread, error = self._failure
            if thread is None or isinstance(error, DivergentBarrier):
                raise error
            raise _locate(error, thread, _advice(error, self.cuda))

    def stop(self) -> None:
        """Restore `numba.cuda` and tell all workers to end. May be repeated after an interrupt of the caller.

        Idle workers return, waiting workers unwind, and a worker that still runs is interrupted.
        """
        self.replacement.restore()
        with self._mutex:
            self._aborting = True
            running = self.current.worker if self.current is not None else None
            for worker in self._workers:
                worker.thread = None
                for lock in (worker.wake, self._reply) if worker is self._asking else (worker.wake,):
                    if lock.locked():
                        lock.release()
                if worker is running and worker.ident is not None:
                    # Only after an interrupt of the caller, such as Ctrl-C: the kernel may be in an endless loop.
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker.ident), ctypes.py_object(Abort))

    def join(self) -> None:
        """Wait until all workers have ended, up to 5 s for a worker in a long call, such as `time.sleep`."""
        for worker in self._workers:
            worker.join(timeout=5)

    def runs_on(self, ident: int) -> bool:
        """Return True if one of the workers is the operating-system thread `ident`."""
        return any(worker.ident == ident for worker in self._workers)

    # ---- on the workers

    def work(self, worker: Worker, thread: SimulatedThread) -> None:
        """Run `thread`, then threads that have not started yet, until the next thread is one that has started."""
        while True:
            try:
                self.run_thread(thread)
                thread.exited = True
                following = self._next()
                if following is None:
                    with self._mutex:
                        self._idle.append(worker)
                        self.current = None
                    self._caller.release()
                    return
                if following.worker is not None:
                    self._switch(following, idle=worker)
                    return
            except Abort:
                raise
            except BaseException as error:
                self._failure = (thread, error)
                self.current = None
                self._caller.release()
                raise Abort from None
            following.worker = worker
            self._activate(following)
            thread = following

    @calls_kernels
    def run_thread(self, thread: SimulatedThread) -> None:
        """Run the kernel for `thread`, from start to end."""
        if self.on_start is None:
            self.function(*self.args)
        else:
            restore = functools.partial(sys.settrace, sys.gettrace())
            self.on_start(thread)
            # C code calls both, so that a debugger started in the kernel does not follow it out of the kernel.
            deque(map(operator.call, (functools.partial(self.function, *self.args), restore)), maxlen=0)
        if self.on_end is not None:
            self.on_end(thread)

    def wait(self, frame: FrameType, *, mask: int | None = None, vote: bool = False) -> int:
        """Hold the current thread at the barrier called by `frame`; return how many threads of the block voted yes."""
        thread = self.current
        if thread is None:
            raise Abort
        self._hold(thread, call_chain(frame), frame, mask, vote)
        thread.syncs += mask is not None
        return self.tally

    def _hold(
        self, thread: SimulatedThread, site: tuple[Any, ...], frame: FrameType, mask: int | None, vote: bool = False
    ) -> None:
        """Hold the current thread until its barrier opens."""
        if self._aborting or thread.worker is None:
            raise Abort
        thread.site, thread.frame, thread.mask, thread.vote = site, frame, mask, vote
        following = self._next()
        if following is not thread:
            assert following is not None  # this thread is alive
            self._switch(following)
            thread.worker.wake.acquire()
            if self._aborting:
                raise Abort
        thread.site = thread.frame = None

    def exchange(self, frame: FrameType, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Return what `combine` makes of the values that the warp's 32 lanes pass to the call by `frame`.

        The first lane that continues combines them; no lane passes its next value before. The exchange orders no memory
        accesses, so it is no barrier to the detection of races.
        """
        thread = self.current
        if thread is None:
            raise Abort
        thread.exchanges += 1
        number, site = thread.exchanges, call_chain(frame)
        thread.passed = (number, site, value)
        self._hold(thread, site, frame, ALL_LANES)
        made = self._exchanged.get(thread.warp)
        if made is None or made[:2] != (number, site):
            first = thread.warp * WARP_SIZE
            found = [other.passed for other in self.threads[first : first + WARP_SIZE]]
            here = [one for one in found if one is not None and one[:2] == (number, site)]
            if len(here) < WARP_SIZE:
                raise RuntimeError(
                    f"{len(here)} lanes of warp {thread.warp} execute {place_of(frame)} together; the instruction "
                    f"needs all {WARP_SIZE} lanes of a warp"
                )
            made = self._exchanged[thread.warp] = (number, site, combine([one[2] for one in here]))
        return made[2]

    def _switch(self, thread: SimulatedThread, *, idle: Worker | None = None) -> None:
        """Let `thread` run. The caller must sleep next; a caller that becomes idle passes itself as `idle`."""
        with self._mutex:
            if self._aborting:
                raise Abort
            worker = thread.worker
            if worker is None:
                if self._idle:
                    worker = self._idle.pop()
                else:
                    worker = Worker(self.work)
                    self._workers.append(worker)  # before the start: an interrupt in between must not lose it
                    worker.start()
                worker.thread, thread.worker = thread, worker
            if idle is not None:
                self._idle.append(idle)
            self._activate(thread)
            worker.wake.release()

    def _activate(self, thread: SimulatedThread) -> None:
        self.current = thread
        self.cuda.threadIdx = thread.position
        self.cuda.laneid = thread.lane
        if self.on_resume is not None:
            self.on_resume(thread)

    # ---- which thread is next

    def _begin_interval(self) -> None:
        if self.seed is None:
            self._order = self.threads
        else:
            x, y, z = self.threads[0].block_index
            linear_block = x + self.grid[0] * (y + self.grid[1] * z)
            generator = np.random.default_rng((self.seed, linear_block, self._barriers))
            self._order = [self.threads[i] for i in generator.permutation(len(self.threads))]
        self._queue = self._order[::-1]

    def _next(self) -> SimulatedThread | None:
        """Return the thread to run next, or None if all have exited. Open barriers when no thread can run."""
        while not self._queue:
            alive = [thread for thread in self._order if not thread.exited]
            if not alive:
                return None
            self._open_barrier(alive)
        return self._queue.pop()

    def _open_barrier(self, alive: list[SimulatedThread]) -> None:
        if len(alive) == len(self.threads) and alive[0].mask is None and len({thread.site for thread in alive}) == 1:
            self.tally = sum(thread.vote for thread in alive)
            if self.on_barrier is not None:
                self.ask_caller(self.on_barrier, alive[0].block_index, self._barriers)
            self._barriers += 1
            self._begin_interval()
            return
        # Lanes that have exited are not waited for. Different calls of syncwarp match, as on hardware since Volta.
        living: dict[int, int] = defaultdict(int)
        arrived: dict[int, int] = defaultdict(int)
        for thread in alive:
            living[thread.warp] |= 1 << thread.lane
            arrived[thread.warp] |= (thread.mask is not None) << thread.lane
        opened = [
            thread
            for thread in alive
            if thread.mask is not None and not thread.mask & living[thread.warp] & ~arrived[thread.warp]
        ]
        if not opened:
            raise self._divergence(alive)
        self._queue = opened[::-1]

    def _divergence(self, alive: list[SimulatedThread]) -> DivergentBarrier:
        waiting: dict[str, list[Index]] = {}
        for thread in sorted(alive, key=lambda thread: thread.linear_index):
            waiting.setdefault(place_of(thread.frame), []).append(thread.thread_index)
        exited = [thread.thread_index for thread in self.threads if thread.exited]
        return DivergentBarrier(alive[0].block_index, waiting, exited)

    def ask_caller(self, request: Callable[..., Any], *args: Any) -> None:
        """Run `request(*args)` on the thread that called `run`, while all simulated threads wait."""
        with self._mutex:
            if self._aborting:
                raise Abort
            thread = self.current
            assert thread is not None
            self._asking, self.current = thread.worker, None
            self._request = lambda: request(*args)
        self._caller.release()
        self._reply.acquire()
        with self._mutex:
            if self._aborting:
                raise Abort
            self._asking, self.current = None, thread


def _advice(error: BaseException, cuda: KernelCuda) -> str:
    """Return what to append to the message of a thread's exception, if its cause can be guessed."""
    if not isinstance(error, IndexError):
        return ""
    found = re.match(r"index (\d+) is out of bounds", str(error))
    if found is not None and int(found[1]) >= 1 << 31:
        return (
            "; perhaps a difference of uint32 below zero, which has 32 bits in the simulator and 64 in Numba: convert "
            "to int32 first"
        )
    return "; dynamic shared memory has 0 bytes: pass dynamic_shared" if cuda.shared.lacks_dynamic else ""


def _locate(error: BaseException, thread: SimulatedThread, advice: str) -> BaseException:
    """Return `error` with thread and advice in its message, of the same type if that type accepts a message."""
    message = f"{thread!r}: {error}{advice}" if str(error) else repr(thread)
    try:
        located = type(error)(message)
        if repr(thread) not in str(located):
            raise TypeError
    except Exception:
        located = RuntimeError(f"{thread!r}: {type(error).__name__}: {error}{advice}")
    return located.with_traceback(error.__traceback__)
