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

import itertools
import math
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from . import patches
from .launch import Launch
from .switch import SIMULATOR
from .threads import DivergentBarrier, Index, SimulatedThread

__all__ = [
    "DivergentBarrier",
    "SimulatedThread",
    "current_thread",
    "exchange",
    "pause",
    "pauses",
    "run",
    "thread_state",
]

# Limits of every GPU since compute capability 3.0, and the most dynamic shared memory that any has (9.0 and 10.0).
MAX_BLOCK_THREADS = 1024
MAX_BLOCK, MAX_GRID = (1024, 1024, 64), ((1 << 31) - 1, 65535, 65535)
MAX_DYNAMIC_SHARED = 227 << 10

_one_launch = threading.Lock()
_active: Launch | None = None
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


def thread_state() -> dict[Any, Any]:
    """Return the data that device functions keep for the running thread, here or on Numba's own simulator."""
    if _active is None:
        thread = threading.current_thread()
        if isinstance(thread, patches.NumbaThread):
            state: dict[Any, Any] = vars(thread).setdefault("numba_gemm_state", {})
            return state
    return current_thread().state


def exchange(value: Any, combine: Callable[[list[Any]], Any] = list) -> Any:
    """Return the values that the lanes of the running thread's warp pass to the same call, in the order of the lanes.

    For twins of instructions that a warp executes together. With `combine`, return its result for these values; one
    call computes that for all lanes, which must not change it. As on hardware, all 32 lanes must take part, and memory
    accesses before and after the instruction are not ordered by it.

    Raises
    ------
    RuntimeError
        If lanes are missing: they have exited, wait elsewhere, or the block has no whole warps.
    """
    current_thread()
    assert _active is not None
    return _active.exchange(sys._getframe(1), value, combine)


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
          dynamic memory, which is passed with the elements of its first view.

    Raises
    ------
    DivergentBarrier
        If only part of a block's threads reach a barrier.
    RuntimeError
        If called outside the simulator, from a kernel or from an observer.
    ValueError
        For a grid, block or size of dynamic shared memory that no GPU accepts; and for more than 48 KB of shared arrays
        with extents of their own.
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
    for what, extent, most in (("block", block, MAX_BLOCK), ("grid", grid, MAX_GRID)):
        if any(given > limit for given, limit in zip(extent, most, strict=True)):
            raise ValueError(f"a {what} is at most {most} in x, y, z, got {extent}")
    if not 0 <= dynamic_shared <= MAX_DYNAMIC_SHARED:
        raise ValueError(f"dynamic_shared is {dynamic_shared}; expected 0 to {MAX_DYNAMIC_SHARED} bytes")
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
    here = threading.get_ident()
    if _active_caller == here or ((active := _active) is not None and active.runs_on(here)):
        raise RuntimeError(
            "a simulated kernel is running already, on this very thread; one that is stepped through runs until its "
            "iterator ends or is closed"
        )
    with _one_launch:
        launch = Launch(function, *launch_args)
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
