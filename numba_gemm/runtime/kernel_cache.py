"""The one store of compiled kernels: they are looked up, compiled and kept here.

A kernel is looked up among the user's own files (`kernel_files`), then in bundles, which somebody else compiled
(`bundle`). Otherwise it is compiled, several kernels in parallel (`compilation`), and kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ..kernels.step import Kernel
from ..models.gpu_names import dotted
from . import ahead, bundle, kernel_files
from .compilation import LOG, Task, compile_all, log_compiled
from .compiler import Cubin
from .kernel_key import key, portable_key

__all__ = ["Fetched", "compile_ahead", "fetch", "fetch_all"]


class Fetched(NamedTuple):
    """A kernel from the store.

    Attributes
    ----------
    cubin : Cubin
        The compiled kernel.
    origin : str
        "cache", "bundle", or "compiler".
    seconds : float
        Time that it took.
    """

    cubin: Cubin
    origin: str
    seconds: float


def fetch(kernel: Kernel, cc: tuple[int, int]) -> Fetched:
    """Return a compiled kernel; compile and keep it if it is neither in the cache nor in a bundle.

    Safe from several threads and processes, which at worst compile the same kernel. Kernels of other packages' stages
    are compiled each time, and so are kernels with an epilogue that finds more than `fingerprint` can describe.
    """
    (found,) = fetch_all([(kernel, cc)])
    return found


def fetch_all(
    tasks: Sequence[tuple[Kernel, tuple[int, int]]],
    jobs: int | None = None,
    done: Callable[[int, Fetched], None] | None = None,
    before_compiling: Callable[[], object] | None = None,
) -> list[Fetched]:
    """Return several kernels; those that must be compiled are compiled in parallel.

    Parameters
    ----------
    tasks : sequence of (Kernel, (int, int))
        Kernels and compute capabilities.
    jobs : int, optional
        Processes that compile, this one included. By default `compilation.default_jobs`.
    done : callable, optional
        Called with the number of each task and its result, as soon as there is one.
    before_compiling : callable, optional
        Called if something must be compiled, before it is.
    """
    place = kernel_files.place()
    names = [key(*task) for task in tasks]
    found: dict[int, Fetched] = {}

    def take(i: int, cubin: Cubin, origin: str, seconds: float) -> None:
        found[i] = Fetched(cubin, origin, seconds)
        kernel, cc = tasks[i]
        if origin == "compiler":
            log_compiled(tasks[i], seconds)
        else:
            LOG.debug("kernel %s for compute capability %s: found in the %s", kernel.name, dotted(cc), origin)
        if done is not None:
            done(i, found[i])

    for i, (kernel, cc) in enumerate(tasks):
        name = names[i]
        begin = time.perf_counter()
        ahead.wait_for(name)
        if name is not None and place is not None and (cubin := kernel_files.look_up(place, name)) is not None:
            take(i, cubin, "cache", time.perf_counter() - begin)
        elif (cubin := bundle.look_up(portable_key(kernel, cc))) is not None:
            take(i, cubin, "bundle", time.perf_counter() - begin)
    missing = [i for i in range(len(tasks)) if i not in found]

    def compiled(number: int, cubin: Cubin, seconds: float) -> None:
        i = missing[number]
        kernel_files.keep(place, names[i], cubin, tasks[i][0].name, seconds)
        take(i, cubin, "compiler", seconds)

    if missing:
        if before_compiling is not None:
            before_compiling()
        compile_all([tasks[i] for i in missing], compiled, jobs)
    return [found[i] for i in range(len(tasks))]


def compile_ahead(needed: Sequence[Kernel], others: Sequence[Kernel], cc: tuple[int, int]) -> None:
    """Start to compile those of some kernels that are neither in the cache nor in a bundle, see `ahead`."""
    place = kernel_files.place()
    if place is None:
        return

    def missing(kernels: Sequence[Kernel]) -> Iterator[tuple[str, Task]]:
        for kernel in kernels:
            name = key(kernel, cc)
            if name and not kernel_files.look_up(place, name) and not bundle.look_up(portable_key(kernel, cc)):
                yield name, (kernel, cc)

    ahead.compile_ahead(list(missing(needed)), list(missing(others)))
