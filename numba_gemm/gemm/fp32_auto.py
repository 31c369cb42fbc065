"""Meaning of "fp32_auto": the precision expected to be fastest of those that are no worse than float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from ..kernels.stage import IEEE
from ..runtime.device import DeviceProperties
from . import heuristics
from .batches import broadcast
from .heuristics import Problem
from .precision import FP32_AUTO, STAGES, canonical, tensor_stage

__all__ = ["AUTO_PRECISION", "Extents", "auto_reason", "extents_of", "resolved"]

# The precision whose error and range are no worse than those of float32 sums, from this K on.
AUTO_PRECISION, AUTO_K = "bf16x6", 256


class Extents(NamedTuple):
    """Extents of a product in elements, the number of matrices of a batch, and whether there is an epilogue."""

    m: int
    n: int
    k: int
    matrices: int = 1
    epilogue: bool = False


def extents_of(a: tuple[int, ...], b: tuple[int, ...], epilogue: Callable[..., Any] | None = None) -> Extents:
    """Return the extents of a product of operands of these shapes.

    If all matrices of A are multiplied by one B, they count as one matrix of more rows, as they are computed without an
    epilogue.
    """
    m, n, matrices = a[-2] if len(a) > 1 else 1, b[-1] if len(b) > 1 else 1, prod(broadcast(a[:-2], b[:-2]) or ())
    if epilogue is None and len(b) <= 2:
        return Extents(m * matrices, n, a[-1])
    return Extents(m, n, a[-1], matrices, epilogue is not None)


def resolved(precision: str, extents: Extents, gpu: DeviceProperties) -> str:
    """Return the precision that a name stands for in a product of these extents."""
    precision = canonical(precision)
    return auto_reason(extents, gpu)[0] if precision == FP32_AUTO else precision


def auto_reason(extents: Extents, gpu: DeviceProperties) -> tuple[str, str]:
    """Return what `FP32_AUTO` stands for in a product of these extents, and why, in words.

    The times that are compared are those of dense operands, A by rows.
    """
    if tensor_stage(gpu.cc) is not STAGES[0]:
        return IEEE, "only compute capability 9.0 has a faster precision of this accuracy"
    if extents.k < AUTO_K:
        return IEEE, f"the error of {AUTO_PRECISION} is no larger than that of float32 sums only from K = {AUTO_K} on"
    if 0 in extents[:4]:
        return IEEE, "there is nothing to multiply"
    exact, emulated = _clocks(extents, gpu)
    times = f"is expected to take {emulated / gpu.clock_hz * 1e6:.1f} us instead of {exact / gpu.clock_hz * 1e6:.1f} us"
    if exact <= emulated:
        return IEEE, f"{AUTO_PRECISION} {times}"
    return AUTO_PRECISION, f"its error and range are no worse than those of {IEEE}, and it {times}"


@lru_cache(maxsize=4096)
def _clocks(extents: Extents, gpu: DeviceProperties) -> tuple[float, float]:
    """Return the clocks that a product is expected to take in float32, and in `AUTO_PRECISION`."""
    m, n, k, matrices, epilogue = extents
    wanted = Problem(
        m,
        n,
        k,
        matrices,
        vectors=(k % 4 == 0 or m == 1) and (n % 4 == 0 or n == 1),
        a_vectors=k % 4 == 0,
        b_vectors=k % 4 == n % 4 == 0,  # stored by rows or by columns
        epilogue=epilogue,
        cc=gpu.cc,
        sm_count=gpu.sm_count,
        clock_hz=gpu.clock_hz,
        memory_bandwidth=gpu.memory_bandwidth,
    )
    exact, emulated = (heuristics.best(wanted._replace(precision=one)).clocks for one in (IEEE, AUTO_PRECISION))
    return exact, emulated
