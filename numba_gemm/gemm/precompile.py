"""Kernels compiled ahead of the first product, into the cache on disk; with or without a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

from ..kernels.ladder.stage import FLOAT32_BYTES, Form, Stage, TileConfig
from ..runtime import kernel_cache, launch
from ..runtime.launch import Matrix
from ..simulator.switch import SIMULATOR
from . import heuristics

__all__ = ["Precompiled", "precompile"]

SMALL_TILE = 64 * 64  # elements of a tile with which products of few rows are computed


class Precompiled(NamedTuple):
    """What `precompile` did about one kernel.

    Attributes
    ----------
    stage, config : str
        Names of the stage and its configuration.
    variant : str
        "aligned" for operands that 128-bit accesses reach, or "any"; of a stage that has a schedule, how the tiles of A
        and of B are loaded, and whether C is aligned, see `numba_gemm.kernels.ladder.stage.Form`.
    cc : tuple of int
        Compute capability, (major, minor).
    seconds : float
        How long it took.
    from_cache : bool
        Whether it was there already.
    """

    stage: str
    config: str
    variant: str
    cc: tuple[int, int]
    seconds: float
    from_cache: bool


def precompile(
    stages: str | Iterable[str] = "auto", cc: tuple[int, int] | Iterable[tuple[int, int]] | None = None
) -> list[Precompiled]:
    """Compile kernels into the cache on disk, so that a process's first product need not wait for the compiler.

    Parameters
    ----------
    stages : str or iterable of str
        Names of stages as `tiled_sgemm` takes them: a stage's first configuration, or all that may be chosen if it has
        a schedule; "auto" for all that may be chosen by shape. Stages with a schedule are compiled for A and B that lie
        by rows or by columns in any combination, aligned; for those that lie by rows, not aligned; and for a C of few
        rows or one column. Other layouts, and epilogues, are compiled at the first product.
    cc : tuple of int or iterable of them, optional
        Compute capabilities, (9, 0) for one; then no GPU is needed. By default those of the GPUs that are present.

    Returns
    -------
    list of Precompiled
        A kernel each: stage, config, variant, cc, seconds, from_cache.

    Raises
    ------
    ValueError
        For an unknown stage, or one that a compute capability is too low for.
    GpuUnavailable
        Without `cc` and without a GPU.
    RuntimeError
        Under Numba's simulator; without the compiler's libraries; if NUMBA_GEMM_CACHE_DIR switches the cache off.
    """
    if kernel_cache.directory() is None:
        raise RuntimeError(
            "NUMBA_GEMM_CACHE_DIR switches the kernel cache off; expected a directory to keep kernels in; unset it, or "
            "name one"
        )
    if SIMULATOR:
        raise RuntimeError("kernels cannot be compiled under Numba's simulator: unset NUMBA_ENABLE_CUDASIM")
    names = [stages] if isinstance(stages, str) else list(stages)
    ccs = [launch.device_properties(device).cc for device in range(_device_count())] if cc is None else _pairs(cc)
    wanted = {  # a dict for a set that keeps its order
        (stage, config, form, target): None
        for target in ccs
        for name in names
        for stage, config in _kernels(name, target)
        for form in _forms(stage, config)
    }
    report = []
    for kernel in wanted:
        begin = time.perf_counter()
        _, from_cache = kernel_cache.fetch(partial(launch.compile_stage, *kernel), *kernel)
        stage, config, form, target = kernel
        variant = form.name if isinstance(form, Form) else "aligned" if form else "any"
        report.append(Precompiled(stage.name, config.name, variant, target, time.perf_counter() - begin, from_cache))
    return report


def _device_count() -> int:
    launch.current_device()  # raises GpuUnavailable with the reason
    return launch.device_count()


def _pairs(cc: tuple[int, int] | Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found = list(cc)
    pairs = [tuple(found)] if found and isinstance(found[0], int) else found
    if not all(isinstance(pair, tuple) and [type(part) for part in pair] == [int, int] for pair in pairs):
        raise TypeError(f"cc is {cc!r}; expected (major, minor), or several of them; pass (9, 0) for an H200")
    return pairs  # type: ignore[return-value]


def _kernels(name: str, cc: tuple[int, int]) -> Iterator[tuple[Stage, TileConfig]]:
    stage = None if name == "auto" else heuristics.resolve(name, cc)
    if stage is not None and stage.schedule is None:
        yield stage, stage.configs[0]
        return
    for found, config in heuristics.candidates(cc):
        if stage in (None, found):
            yield found, config


def _forms(stage: Stage, config: TileConfig) -> Iterator[bool | Form]:
    """What a stage is compiled for."""
    if stage.schedule is None:
        yield from (True, False)
        return
    even, odd, small = 64, 65, config.BM * config.BN <= SMALL_TILE  # extents of whole vectors, and not
    cols = {1} if config.BN == 1 else {even, odd, 1} if small else {even, odd}
    given = [(a, b, even, even, max(cols - {odd})) for a in "NT" for b in "NT"]
    given += [("N", "N", even, k, n) for k in (even, odd) for n in sorted(cols)]
    operands = [_operands(*one) for one in given]
    if small:
        # Of few rows the transpose is computed: by `thin` if B lies by columns, as it wants it.
        layout = "T" if config.lanes_k > 1 else "N"
        few = [("N", layout, rows, k, n) for rows in (1, 16) for k in (even, odd) for n in (even, odd)]
        operands += [launch.exchanged(*_operands(*one), launch.PLAIN)[:3] for one in few]
    yield from {launch.form_of(config, *one, launch.PLAIN): None for one in operands}


def _operands(a: str, b: str, m: int, k: int, n: int) -> tuple[Matrix, Matrix, Matrix]:
    return _dense(a, m, k), _dense(b, k, n), _dense("N", m, n)


def _dense(layout: str, rows: int, cols: int) -> Matrix:
    """A matrix that lies by rows, "N", or by columns, "T"."""
    strides = (FLOAT32_BYTES * cols, FLOAT32_BYTES) if layout == "N" else (FLOAT32_BYTES, FLOAT32_BYTES * rows)
    return Matrix(0, rows, cols, *strides, 0, None)
