"""Single-stepping of one thread of a kernel, in the simulator.

`step` yields each line that one thread is about to run, with the thread's locals at that moment, and each barrier of
its block, with the shared arrays as all threads have left them. It runs the kernel itself, not a model of it: the other
threads of the block run as usual between the barriers.

A launch that is stepped through is the only one in its process until its iterator has ended or has been closed. Further
launches from the same thread are refused; launches from other threads wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from ..kernels.ladder import TileConfig
from ..simulator import scheduler
from .following import Follower, Index, Step
from .player import Player, play
from .target import prepare

__all__ = ["Index", "Step", "Stepping", "checked_index", "step"]

LIMIT = 1_000_000  # bytes of a player's record


class Stepping(Iterator[Step]):
    """Lazy iterator over the steps of one thread; use it in a ``for`` loop or in a ``with`` statement.

    The launch begins with the first step. It ends with the last step, with `close`, at the end of the ``with``
    statement, or when the iterator is garbage-collected.
    """

    def __init__(self, pauses: Any, follower: Follower, player: Callable[[Any, int], Player]) -> None:
        # The launch's threads refer to the follower, not to this object, which is thus freed with its last user.
        self._pauses, self._follower = pauses, follower
        self._play: Callable[[Any, int], Player] | None = player  # until the launch begins
        self._close = weakref.finalize(self, _end, pauses, follower)  # also at interpreter exit

    def player(self, threads: Sequence[int | Sequence[int]] | None = None, limit: int = LIMIT) -> Player:
        """Run the block, and return a player that shows its steps in a browser.

        The player shows each line of the source, the thread's locals, the tiles in shared memory, and the addresses
        that the lanes of its warp access. This takes the place of the iteration, and writes to the kernel's arrays as
        the iteration does.

        Parameters
        ----------
        threads : sequence of (int or sequence of int), optional
            Threads to choose from in the player. By default, the thread of `step`.
        limit : int
            Approximate size of the record in bytes. Steps beyond it are left out, and the player says how many.

        Returns
        -------
        Player
            An object that a notebook shows as the value of a cell; ``save("player.html")`` writes the page.

        Raises
        ------
        RuntimeError
            if the iteration has begun or has been closed.
        TypeError, ValueError
            if there are no threads, for threads outside of the block, or for arrays of elements that no single
            instruction loads.

        Examples
        --------
        >>> step(kernel, 1, 32, x, y).player(threads=[0, 5]).save("player.html")  # doctest: +SKIP
        """
        if self._play is None:
            raise RuntimeError("the iteration has begun: call player() on what step() returns, before its first step")
        make = self._play
        self.close()
        return make(threads, limit)

    def __next__(self) -> Step:
        self._play = None
        try:
            found: Step = next(self._pauses)
        except StopIteration:
            end, self._follower.end = self._follower.end, None
            self.close()
            if end is None:
                raise
            return end
        except BaseException:
            self.close()
            raise
        return found

    def close(self) -> None:
        """End the launch and the iteration; memory that the kernel has written keeps its values."""
        self._close()
        self._play = None
        self._follower.end = None  # closing may have created it

    def __enter__(self) -> Stepping:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _end(pauses: Any, follower: Follower) -> None:
    pauses.close()
    follower.forget()


def checked_index(what: str, given: int | Sequence[int], where: str, extents: Sequence[int]) -> Index:
    """Return the index of a block or thread as x, y and z; raise TypeError or ValueError if there is no such one."""
    values: tuple[Any, ...] = tuple(given) if isinstance(given, Iterable) else (given,)
    if not 1 <= len(values) <= 3 or not all(isinstance(value, (int, np.integer)) for value in values):
        raise TypeError(f"{what} is {given!r}; expected one to three integers, in the order x, y, z")
    x, y, z = (*map(int, values), 0, 0)[:3]
    limits = (*map(int, extents), 1, 1)[:3]
    if not all(0 <= position < extent for position, extent in zip((x, y, z), limits, strict=True)):
        raise ValueError(f"{what} {(x, y, z)} is outside of the {where}, whose extents are {limits}")
    return x, y, z


def step(
    stage_or_kernel: Any,
    grid: int | Sequence[int] | None,
    block: int | Sequence[int] | None,
    *args: Any,
    block_index: int | Sequence[int] = (0, 0, 0),
    thread: int | Sequence[int] = (0, 0, 0),
    config: TileConfig | str | None = None,
    dynamic_shared: int | None = None,
    seed: int | None = None,
    into: Any = None,
) -> Stepping:
    """Step through one thread of a kernel in the simulator.

    Parameters
    ----------
    stage_or_kernel : str, Stage or kernel
        The name of a stage, a `Stage`, a kernel made by ``cuda.jit`` in the simulator, or a Python function.
    grid, block : int or sequence of one to three int, or None
        Number of blocks, and of threads per block, in the order x, y, z. None takes the stage's own.
    *args
        The kernel's arguments, with NumPy arrays in place of global memory; the kernel writes to them. For a stage:
        alpha, a, b, beta, c.
    block_index, thread : int or sequence of one to three int
        The block, and the thread within it, to step through. No other block runs.
    config : TileConfig or str, optional
        For a stage only: a configuration or its name; ``"test"`` is the small configuration used by its tests. By
        default, the stage's first.
    dynamic_shared : int, optional
        Bytes of dynamic shared memory per block. By default, the stage's own, and none for other kernels.
    seed : int, optional
        Seed of a random order of the block's threads between any two barriers. By default, threads run in the order of
        their indices.
    into : function, module or name of a module, or several, optional
        Functions to step into when the thread calls them. By default, those in the kernel's own file and in the ladder,
        but not those of `numba_gemm.device`. An empty list follows the kernel only.

    Returns
    -------
    Stepping
        An iterator over `Step`. It raises the exception of any thread of the block, with the thread's index.

    Raises
    ------
    NotImplementedError
        for a tensor core stage whose instructions the simulator lacks: any but `one_warp` and `fused_decomposition`.
    RuntimeError
        outside the simulator.
    TypeError, ValueError
        if `stage_or_kernel` is neither a stage nor a kernel, or does not take the arguments; or for a thread or block
        outside the launch.
    """
    made = prepare(stage_or_kernel, grid, block, args, config=config, dynamic_shared=dynamic_shared)
    chosen_block = checked_index("block_index", block_index, "grid", made.grid)
    chosen = checked_index("thread", thread, "block", made.block)
    follower = Follower(made, chosen_block, chosen, into)
    pauses = scheduler.pauses(
        made.kernel,
        made.grid,
        made.block,
        made.arguments,
        dynamic_shared=made.dynamic_shared,
        seed=seed,
        blocks=[chosen_block],
        observer=follower,
    )

    def play_threads(threads: Sequence[int | Sequence[int]] | None, limit: int) -> Player:
        given = [chosen] if threads is None else [checked_index("thread", one, "block", made.block) for one in threads]
        if not given:
            raise ValueError("no threads are given; expected one or more")
        return play(made, chosen_block, list(dict.fromkeys(given)), into=into, seed=seed, limit=limit)

    return Stepping(pauses, follower, play_threads)
