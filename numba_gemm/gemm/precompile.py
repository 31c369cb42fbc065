"""Compilation of kernels into the cache on disk ahead of the first product, with or without a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..kernels.ladder.stage import LadderStage, TileConfig, Variant
from ..kernels.product import Product, dense
from ..kernels.stage import Gpu, Stage
from ..kernels.step import Kernel
from ..kernels.tensor_core import tf32_tma
from ..kernels.tensor_core.stage import LONG_SUM
from ..kernels.tensor_core.tma_stage import TmaStage
from ..runtime import device as devices
from ..runtime import kernel_cache
from ..simulator.switch import SIMULATOR
from . import heuristics
from .cost_model import rated
from .precision import FP32_AUTO, IEEE, check_precision, tensor_stage
from .tensor_heuristics import configs_for

__all__ = ["Precompiled", "precompile"]

SMALL_TILE = 64 * 64  # elements of a tile with which products of few rows are computed


class Precompiled(NamedTuple):
    """One kernel that `precompile` compiled or found.

    Attributes
    ----------
    stage, config : str
        Names of the stage and its configuration; the configuration is empty for kernels that prepare operands.
    variant : str
        "aligned" for operands that allow 128-bit accesses, or "any". For a scheduled stage, how tiles of A
        and of B are loaded, and whether C is aligned (`numba_gemm.kernels.ladder.stage.Variant`). On tensor cores, the
        precision.
    cc : tuple of int
        Compute capability, (major, minor).
    seconds : float
        Time that it took.
    from_cache : bool
        True if it was in the cache already.
    """

    stage: str
    config: str
    variant: str
    cc: tuple[int, int]
    seconds: float
    from_cache: bool


def precompile(
    stages: str | Iterable[str] = "auto",
    cc: tuple[int, int] | Iterable[tuple[int, int]] | None = None,
    precision: str | Iterable[str] = IEEE,
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
    precision : str or iterable of str
        Precisions, as `tiled_sgemm` takes them. Stages that do not compute in one of them are left out for it.

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
    precisions = [precision] if isinstance(precision, str) else list(precision)
    for one in precisions:
        check_precision(one)
    ccs = [devices.device_properties(device).cc for device in range(_device_count())] if cc is None else _pairs(cc)
    wanted = {  # a dict for a set that keeps its order
        (stage, config, variant, kernel, target): None
        for target in ccs
        for name in names
        for one in precisions
        for stage, config, variant, kernel in _kernels(name, one, target)
    }
    report = []
    for stage, config, variant, kernel, target in wanted:
        begin = time.perf_counter()
        _, from_cache = kernel_cache.fetch(kernel, target)
        report.append(Precompiled(stage, config, variant, target, time.perf_counter() - begin, from_cache))
    return report


def _device_count() -> int:
    devices.current_device()  # raises GpuUnavailable with the reason
    return devices.device_count()


def _pairs(cc: tuple[int, int] | Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found = list(cc)
    pairs = [tuple(found)] if found and isinstance(found[0], int) else found
    if not all(isinstance(pair, tuple) and [type(part) for part in pair] == [int, int] for pair in pairs):
        raise TypeError(f"cc is {cc!r}; expected (major, minor), or several of them; pass (9, 0) for an H200")
    return pairs  # type: ignore[return-value]


Named = tuple[str, str, str, Kernel]  # stage, configuration, variant


def _kernels(name: str, precision: str, cc: tuple[int, int]) -> Iterator[Named]:
    """Yield the kernels of a stage, or of all that may be chosen, in a precision."""
    stage = None if name == "auto" else heuristics.resolve(name, cc)
    for one in (IEEE, "bf16x6") if precision == FP32_AUTO else (precision,):
        if one == IEEE:
            yield from _ladder_kernels(stage, cc)
        elif stage is None:
            found: list[Stage | None] = [tf32_tma.STAGE, tensor_stage(cc)]
            for other in found:
                if other is not None and other.runs_on(cc) and one in other.precisions:
                    yield from _tensor_kernels(other, one, cc)
        elif one in stage.precisions:
            yield from _tensor_kernels(stage, one, cc)


def _ladder_kernels(stage: Stage | None, cc: tuple[int, int]) -> Iterator[Named]:
    found: Iterable[tuple[LadderStage, TileConfig]] = rated(cc)
    if isinstance(stage, LadderStage) and not stage.takes_partition:
        found = [(stage, stage.configs[0])]
    for one, config in found:
        if stage in (None, one):
            for kernel in _variants(one, config):
                variant = kernel.variant
                word = variant.name if isinstance(variant, Variant) else "aligned" if variant else "any"
                yield one.name, config.name, word, kernel


def _variants(stage: LadderStage, config: TileConfig) -> Iterator[Kernel]:
    """Yield the kernels that a stage is compiled for."""
    if not stage.takes_partition:
        yield from (stage.kernel_of(config, aligned) for aligned in (True, False))
        return
    even, odd, small = 64, 65, config.BM * config.BN <= SMALL_TILE  # extents of whole vectors, and not
    cols = {1} if config.BN == 1 else {even, odd, 1} if small else {even, odd}
    given = [(a, b, even, even, max(cols - {odd})) for a in "NT" for b in "NT"]
    given += [("N", "N", even, k, n) for k in (even, odd) for n in sorted(cols)]
    products = [_dense(*one) for one in given]
    if small:
        # For few rows the transpose is computed: by `thin` if B lies by columns, as it needs it.
        layout = "T" if config.lanes_k > 1 else "N"
        few = [("N", layout, rows, k, n) for rows in (1, 16) for k in (even, odd) for n in (even, odd)]
        products += [_dense(*one).transposed for one in few]
    yield from {stage.kernel(config, product): None for product in products}


def _dense(a: str, b: str, m: int, k: int, n: int) -> Product:
    return Product(dense(a, m, k), dense(b, k, n), dense("N", m, n))


def _tensor_kernels(stage: Stage, precision: str, cc: tuple[int, int]) -> Iterator[Named]:
    """Yield the kernels of all steps of single products, for short sums and long ones."""
    gpu = Gpu(cc, 1)
    for k in (LONG_SUM // 2, 2 * LONG_SUM):
        for config in configs_for(stage, precision, k):
            layouts = tf32_tma.LAYOUTS if isinstance(stage, TmaStage) else ["NN"]
            for layout in layouts:
                product = _dense(layout[0], layout[1], 256, k, 256)
                for step in stage.launches(config, product, precision, None, gpu).steps:
                    is_product = step.kernel.config is not None
                    name = stage.name if is_product else step.kernel.name
                    yield name, config.name if is_product else "", precision, step.kernel
