"""Deterministic scheduler of simulated threads, for kernels written for Numba's CUDA simulator.

Numba's own simulator starts one operating-system thread per simulated thread and lets them race. Here exactly one
thread runs at a time, from one barrier to the next, in the order of thread indices or in a permutation drawn from a
seed. A run is therefore repeatable to the bit, and a missing barrier gives a wrong result under some seed instead of
once in a thousand runs. Behaviour that hardware leaves undefined becomes visible:

- Shared and local memory start as NaN (as an index far out of range, if they hold integers).
- A barrier that only part of a block reaches, because the others have exited or wait at another barrier, is an error
  that says which threads wait where.
- An exception in a thread ends the launch, and its message names the thread that raised it.

Limitation: a thread runs without interruption from barrier to barrier, so a hazard is found only if some order of whole
intervals turns it into a wrong result. `numba_gemm.inspect.trace` and, on a GPU, racecheck look at every pair of
accesses.

Each simulated thread that has to wait uses an operating-system thread; a kernel without barriers uses one in total.
One launch runs at a time per process, and others wait for it.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import math
import operator
import os
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, FrameType, FunctionType
from typing import Any

import numpy as np

from . import patches
from .switch import SIMULATOR

WARP_SIZE = 32
MAX_BLOCK_THREADS = 1024
_DYNAMIC_ALIGNMENT = 128

# A quiet NaN if read as float16, bfloat16 (either half), float32 or float64; far beyond any array's end as an int32.
_POISON = 0x7FFFFFFF

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


class _Abort(SystemExit):
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
    state : dict
        Data that device functions keep per thread, such as pending copies; initially empty.
    """

    __slots__ = (
        "block_index",
        "exited",
        "frame",
        "lane",
        "linear_index",
        "mask",
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
        self.exited = False
        self.worker: _Worker | None = None  # None until it starts
        # Where it waits: the chain of calls that led to the barrier, and the frame that called the barrier.
        self.site: tuple[Any, ...] | None = None
        self.frame: FrameType | None = None
        self.mask: int | None = None  # lanes to wait for, None at a barrier of the block
        self.vote = False

    def __repr__(self) -> str:
        return f"thread {self.thread_index} of block {self.block_index}"


# ------------------------------------------------------------------------------------------------------- memory


def _poisoned(shape: Any, dtype: Any, alignment: int | None) -> np.ndarray[Any, Any]:
    """Return a new array full of NaN whose memory is aligned to 16 bytes, or to more on request."""
    dtype = patches.as_dtype(dtype)
    shape = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    if alignment is None:
        alignment = 16
    elif alignment <= 0 or alignment & (alignment - 1):
        raise ValueError(f"alignment must be a power of two, got {alignment}")
    alignment = max(alignment, 16)
    size = math.prod(shape) * dtype.itemsize
    raw = np.full((size + alignment) // 4 + 1, _POISON, np.uint32).view(np.uint8)
    start = -raw.__array_interface__["data"][0] % alignment
    return raw[start : start + size].view(dtype).reshape(shape)


_positions: dict[CodeType, list[Any]] = {}


def position_of(frame: FrameType) -> Any:
    """Return the source expression that a frame is executing.

    The offset of the instruction would not identify it: once the interpreter has specialised an instruction, `f_lasti`
    may lie in the caches behind it, and the compiler duplicates short code that follows a condition.
    """
    positions = _positions.get(frame.f_code)
    if positions is None:
        found = enumerate(frame.f_code.co_positions())
        positions = _positions[frame.f_code] = [offset if None in place else place for offset, place in found]
    return positions[frame.f_lasti // 2]


def call_chain(frame: FrameType | None) -> tuple[Any, ...]:
    """Identify a call by its own expression and those of all its callers, up to the kernel.

    On hardware, a device function called from two places is two pieces of code, because it is inlined.
    """
    chain: list[Any] = []
    while frame is not None and frame.f_code is not _RUN_CODE:
        chain += [frame.f_code, position_of(frame)]
        frame = frame.f_back
    return tuple(chain)


class _Shared:
    """`cuda.shared`: an array belongs to a block, and to the function and the place in it that create the array."""

    def __init__(self, dynamic_bytes: int, see: Callable[..., Any] | None) -> None:
        self._dynamic_bytes = dynamic_bytes
        self._see = see
        self._alone: dict[CodeType, bool] = {}
        self.begin_block()

    def begin_block(self) -> None:
        self._arrays: dict[tuple[Any, ...], np.ndarray[Any, Any]] = {}
        self._dynamic: np.ndarray[Any, Any] | None = None

    def _made(self, place: Any, *how: Any) -> np.ndarray[Any, Any]:
        array = _poisoned(*how)
        return array if self._see is None else self._see(array, place)

    def _place(self, frame: FrameType) -> Any:
        """Return a key for the hardware array: each function has its own, however often it is called.

        If several functions share one code object, as a factory creates them, nothing tells which one runs. These
        functions are told apart by their callers.
        """
        code = frame.f_code
        if code not in self._alone:
            functions = [one for one in gc.get_referrers(code) if isinstance(one, FunctionType)]
            self._alone[code] = len(functions) == 1
        return (code, position_of(frame)) if self._alone[code] else call_chain(frame)

    def array(self, shape: Any, dtype: Any, alignment: int | None = None) -> np.ndarray[Any, Any]:
        if isinstance(shape, (int, np.integer)) and shape == 0:
            if alignment is not None and alignment > _DYNAMIC_ALIGNMENT:
                raise ValueError(f"dynamic shared memory is aligned to {_DYNAMIC_ALIGNMENT} bytes, not {alignment}")
            dtype = patches.as_dtype(dtype)
            if self._dynamic is None:
                self._dynamic = self._made(None, self._dynamic_bytes, np.uint8, _DYNAMIC_ALIGNMENT)
            whole = self._dynamic_bytes // dtype.itemsize * dtype.itemsize
            return self._dynamic[:whole].view(dtype)
        place = self._place(sys._getframe(1))
        array = self._arrays.get(place)
        if array is None:
            array = self._arrays[place] = self._made(place, shape, dtype, alignment)
        return array


class _Local:
    """`cuda.local`: a new array at every call."""

    def array(self, shape: Any, dtype: Any, alignment: int | None = None) -> np.ndarray[Any, Any]:
        return _poisoned(shape, dtype, alignment)


# --------------------------------------------------------------------------------------- what kernels see as `cuda`


class _Cuda(patches.SimulatedModule):
    """`numba.cuda` as a kernel sees it. Attributes that depend on the thread are set at every thread switch."""

    # These hide properties of the base class that query the operating-system thread.
    threadIdx: Any = None
    blockIdx: Any = None
    laneid: Any = None
    shared: Any = None
    local: Any = None

    def __init__(self, launch: _Launch, grid: Index, block: Index, dynamic_bytes: int, observer: Any) -> None:
        super().__init__(grid, block, dynamic_bytes)
        self._launch = launch
        self.shared = _Shared(dynamic_bytes, getattr(observer, "shared", None))
        self.local = _Local()

    def syncthreads(self) -> None:
        self._launch.wait(sys._getframe(1))

    def syncthreads_count(self, predicate: Any) -> int:
        return self._launch.wait(sys._getframe(1), vote=bool(predicate))

    def syncthreads_and(self, predicate: Any) -> int:
        return int(self._launch.wait(sys._getframe(1), vote=bool(predicate)) == len(self._launch.threads))

    def syncthreads_or(self, predicate: Any) -> int:
        return int(self._launch.wait(sys._getframe(1), vote=bool(predicate)) > 0)

    def syncwarp(self, mask: int = 0xFFFFFFFF) -> None:
        self._launch.wait(sys._getframe(1), mask=int(mask))


# ------------------------------------------------------------------------------------------------------ scheduling


class _Worker(threading.Thread):
    """An operating-system thread that runs simulated threads. It sleeps on `wake` until its turn."""

    def __init__(self, launch: _Launch) -> None:
        super().__init__(name="numba_gemm-simulated", daemon=True)
        self.wake = threading.Lock()
        self.wake.acquire()
        self.thread: SimulatedThread | None = None  # what to run next; None means the end
        self._launch = launch

    def run(self) -> None:
        try:
            # NumPy's setting for overflow and invalid operations is per operating-system thread.
            with np.errstate(all="ignore"):
                while True:
                    self.wake.acquire()
                    if self.thread is None:
                        return
                    self._launch.work(self, self.thread)
        except _Abort:
            return


class _Launch:
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
        self.cuda = _Cuda(self, grid, block, dynamic_bytes, observer)
        self.replacement = patches.SimulatedCuda()
        self.on_barrier = getattr(observer, "barrier", None)
        self.on_start = getattr(observer, "thread_start", None)
        self.on_end = getattr(observer, "thread_end", None)
        self.on_resume = getattr(observer, "thread_resume", None)
        self.threads: list[SimulatedThread] = []
        self.current: SimulatedThread | None = None
        self.tally = 0
        self._barriers = 0
        self._order: list[SimulatedThread] = []
        self._queue: list[SimulatedThread] = []  # to run before barriers are checked; the next is last
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._aborting = False
        self._failure: tuple[SimulatedThread | None, BaseException] | None = None
        # Guards the state that `stop` must see consistently when it interrupts a launch: running and idle workers,
        # and `_aborting`.
        self._mutex = threading.Lock()
        self._caller = threading.Lock()
        self._caller.acquire()
        self._request: Callable[[], Any] | None = None  # to be run on the caller's thread
        self._asking: _Worker | None = None
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
        self._begin_interval()
        self._switch(self._queue.pop())
        while True:
            self._caller.acquire()
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
            raise _locate(error, thread)

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
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker.ident), ctypes.py_object(_Abort))

    def join(self) -> None:
        """Wait until all workers have ended, up to 5 s for a worker in a long call, such as `time.sleep`."""
        for worker in self._workers:
            if worker.is_alive():
                worker.join(timeout=5)

    # ---- on the workers

    def work(self, worker: _Worker, thread: SimulatedThread) -> None:
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
            except _Abort:
                raise
            except BaseException as error:
                self._failure = (thread, error)
                self.current = None
                self._caller.release()
                raise _Abort from None
            following.worker = worker
            self._activate(following)
            thread = following

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
        if self._aborting or thread is None or thread.worker is None:
            raise _Abort
        thread.site, thread.frame, thread.mask, thread.vote = call_chain(frame), frame, mask, vote
        following = self._next()
        if following is not thread:
            assert following is not None  # this thread is alive
            self._switch(following)
            thread.worker.wake.acquire()
            if self._aborting:
                raise _Abort
        thread.site = thread.frame = None
        thread.syncs += mask is not None
        return self.tally

    def _switch(self, thread: SimulatedThread, *, idle: _Worker | None = None) -> None:
        """Let `thread` run. The caller must sleep next; a caller that becomes idle passes itself as `idle`."""
        with self._mutex:
            if self._aborting:
                raise _Abort
            worker = thread.worker
            if worker is None:
                if self._idle:
                    worker = self._idle.pop()
                else:
                    worker = _Worker(self)
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
            waiting.setdefault(_place(thread.frame), []).append(thread.thread_index)
        exited = [thread.thread_index for thread in self.threads if thread.exited]
        return DivergentBarrier(alive[0].block_index, waiting, exited)

    def ask_caller(self, request: Callable[..., Any], *args: Any) -> None:
        """Run `request(*args)` on the thread that called `run`, while all simulated threads wait."""
        with self._mutex:
            if self._aborting:
                raise _Abort
            thread = self.current
            assert thread is not None
            self._asking, self.current = thread.worker, None
            self._request = lambda: request(*args)
        self._caller.release()
        self._reply.acquire()
        with self._mutex:
            if self._aborting:
                raise _Abort
            self._asking, self.current = None, thread


# Frames below this one in a call chain belong to the scheduler.
_RUN_CODE = _Launch.run_thread.__code__


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those of its callers, up to the kernel."""
    while frame is not None and frame.f_code is not _RUN_CODE:
        yield frame
        frame = frame.f_back


def _place(frame: FrameType | None) -> str:
    """Return the lines of the calls that lead from the kernel to the barrier, then the line of the barrier."""
    lines = [
        f"{caller.f_code.co_filename}:{caller.f_lineno}"
        for caller in callers(frame)
        if not caller.f_globals.get("__name__", "").startswith("numba.")  # skip Numba's wrapper of device functions
    ]
    return " > ".join(reversed(lines))


def _locate(error: BaseException, thread: SimulatedThread) -> BaseException:
    """Return `error` with the thread in its message, of the same type if that type accepts a message."""
    message = f"{thread!r}: {error}" if str(error) else repr(thread)
    try:
        located = type(error)(message)
        if repr(thread) not in str(located):
            raise TypeError
    except Exception:
        located = RuntimeError(f"{thread!r}: {type(error).__name__}: {error}")
    return located.with_traceback(error.__traceback__)


# ------------------------------------------------------------------------------------------------------- launching

_one_launch = threading.Lock()
_active: _Launch | None = None
_active_caller: int | None = None


def current_thread() -> SimulatedThread:
    """Return the running simulated thread; for device functions.

    Raises
    ------
    RuntimeError
        If no launch of this scheduler is running.
    """
    if _active is None or _active.current is None:
        raise RuntimeError("no simulated thread is running: simulated kernels are launched by scheduler.run")
    return _active.current


def pause(value: Any) -> None:
    """Hand a value that is not None to the consumer of `pauses`, and wait until it requests the next one.

    For code that an observer runs on the operating-system thread of the running simulated thread.
    """
    if _active is None:
        raise RuntimeError("no simulated kernel is running")
    _active.ask_caller(lambda: value)


def _extent(what: str, value: int | Sequence[int], fill: int, least: int) -> Index:
    given = tuple(value) if isinstance(value, Iterable) else (value,)
    if not 1 <= len(given) <= 3 or any(int(v) != v or v < least for v in given):
        raise ValueError(f"{what} must be one to three integers of at least {least}, got {value!r}")
    x, y, z = (*map(int, given), fill, fill)[:3]
    return x, y, z


def run(
    kernel: Any,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence[Any],
    *,
    dynamic_shared: int = 0,
    seed: int | None = None,
    blocks: Iterable[Sequence[int]] | None = None,
    observer: Any = None,
) -> None:
    """Run a kernel on simulated threads, one at a time, each to its next barrier.

    Parameters
    ----------
    kernel : made by `cuda.jit` under the simulator, or a plain function
        In the kernel and its callees, every variable that holds `numba.cuda` holds the simulated `cuda`.
    grid, block : int or sequence of one to three int
        Number of blocks, and of threads per block, in the order x, y, z.
    args : sequence
        Passed unchanged to every thread: arrays are not copied, and kernels write into them.
    dynamic_shared : int
        Bytes of dynamic shared memory per block.
    seed : int, optional
        Between any two barriers, threads run in another order, drawn from the seed, the block and the interval.
        Without a seed, they run in the order of their indices. A correct kernel gives the same result for all seeds.
    blocks : iterable of (x, y, z), optional
        Run only these blocks, in this order; by default all, x fastest.
    observer : object, optional
        May have any of these methods:

        - `barrier(block_index, number)`: called on the caller's thread when all threads of a block have reached their
          barrier `number` (0, 1, ...).
        - `thread_start(thread)` and `thread_end(thread)`: called with a `SimulatedThread` on the operating-system
          thread that runs it. Changes of `thread_start` to `sys.settrace` last as long as the kernel.
        - `thread_resume(thread)`: called on any operating-system thread when `thread` is the next to run.
        - `shared(array, place)`: called with each new array of shared memory, on the operating-system thread that
          runs the kernel; returns the array that the kernel receives. The place is the same in all blocks, and None for
          dynamic memory, which is passed as bytes.

    Raises
    ------
    DivergentBarrier
        If only part of a block's threads reach a barrier.
    RuntimeError
        If called outside the simulator, from a kernel or from an observer.
    ValueError
        For a grid or block that no GPU accepts.
    Exception
        The exception that a thread raised, with the index of the thread in the message.
    """
    options: dict[str, Any] = {"dynamic_shared": dynamic_shared, "seed": seed, "blocks": blocks, "observer": observer}
    # In a loop instead, Ctrl-C would leave the launch open for as long as the traceback is kept.
    deque(pauses(kernel, grid, block, args, **options), maxlen=0)


def pauses(
    kernel: Any,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence[Any],
    *,
    dynamic_shared: int = 0,
    seed: int | None = None,
    blocks: Iterable[Sequence[int]] | None = None,
    observer: Any = None,
) -> Iterator[Any]:
    """Run a kernel as `run` does, pausing at every `pause` and every `barrier` of the observer that returns something.

    Yields the values that they hand over. Meanwhile all simulated threads wait, and all modules have the original
    `cuda`. Closing the iterator ends the launch. Parameters and exceptions are those of `run`; nothing runs until the
    first value is requested.
    """
    if not SIMULATOR:
        raise RuntimeError("the scheduler needs Numba's simulator: set NUMBA_ENABLE_CUDASIM=1 before importing numba")
    function = patches.python_function(kernel)
    grid, block = _extent("grid", grid, 1, 1), _extent("block", block, 1, 1)
    if math.prod(block) > MAX_BLOCK_THREADS:
        raise ValueError(f"a block has at most {MAX_BLOCK_THREADS} threads, got {block}")
    if blocks is None:
        indices = [(x, y, z) for z, y, x in itertools.product(*(range(extent) for extent in reversed(grid)))]
    else:
        indices = [_extent("block index", index, 0, 0) for index in blocks]
        for index in indices:
            if any(position >= extent for position, extent in zip(index, grid, strict=True)):
                raise ValueError(f"block {index} is outside the grid {grid}")

    return _pauses(function, indices, grid, block, args, dynamic_shared, seed, observer)


def _pauses(function: Callable[..., Any], indices: Iterable[Index], *launch_args: Any) -> Iterator[Any]:
    global _active, _active_caller
    if isinstance(threading.current_thread(), _Worker) or _active_caller == threading.get_ident():
        raise RuntimeError(
            "a simulated kernel is running already, on this very thread; one that is stepped through runs until its "
            "iterator ends or is closed"
        )
    with _one_launch:
        launch = _Launch(function, *launch_args)
        handed = itertools.chain.from_iterable(map(launch.run_block, indices))
        try:
            while True:
                _active, _active_caller = launch, threading.get_ident()
                launch.replacement.install(function, launch.cuda)
                value = next(handed, None)
                launch.replacement.restore()
                if value is None:
                    return
                yield value
        finally:
            # Must be first: a second Ctrl-C may interrupt the clean-up at any call; assignments are not interrupted.
            _active = _active_caller = None
            interrupt: KeyboardInterrupt | None = None
            stopped = False
            while not stopped:
                try:
                    launch.stop()
                    stopped = True
                except KeyboardInterrupt as again:
                    interrupt = again
            if interrupt is not None:
                raise interrupt
            launch.join()


def _after_fork() -> None:
    """Discard the launch of another thread, which does not exist in a forked child."""
    global _one_launch, _active, _active_caller
    if _active is not None:
        _active.replacement.restore()
    _one_launch, _active, _active_caller = threading.Lock(), None, None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
