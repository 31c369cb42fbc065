"""Compilation of many kernels, with lines about those that are done."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from ..kernels.step import Kernel
from ..runtime import kernel_cache

__all__ = ["fetch_with_progress"]


def fetch_with_progress(
    tasks: Sequence[tuple[Kernel, tuple[int, int]]], jobs: int | None, progress: bool | None
) -> list[kernel_cache.Fetched]:
    """Return what `kernel_cache.fetch_all` returns; print what is done, see `precompile`."""
    shown = _Progress(len(tasks), progress)
    try:
        return kernel_cache.fetch_all(tasks, jobs, lambda i, one: shown.show(tasks[i][0].name, one))
    finally:
        shown.end()


class _Progress:
    """Lines about kernels as they are compiled, on the standard error stream."""

    def __init__(self, count: int, wanted: bool | None) -> None:
        self._count, self._done, self._begin = count, 0, time.perf_counter()
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._wanted = sys.stderr is not None and (self._terminal if wanted is None else wanted)

    def show(self, name: str, one: kernel_cache.Fetched) -> None:
        """Count a kernel."""
        self._done += 1
        if not self._wanted:
            return
        count, seconds = f"{self._done} of {self._count} kernels", time.perf_counter() - self._begin
        if self._terminal:
            print(f"\r{count}, {seconds:.0f} s ", end="", file=sys.stderr, flush=True)
        else:
            print(f"{count}: {name}, {one.seconds:.1f} s, {one.origin}", file=sys.stderr, flush=True)

    def end(self) -> None:
        """End the line on a terminal."""
        if self._wanted and self._terminal and self._done:
            print(file=sys.stderr)
