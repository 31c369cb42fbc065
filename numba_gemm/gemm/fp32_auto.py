"""Meaning of "fp32_auto": the precision expected to be fastest of those that are no worse than float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..arrays import ArrayKind, Operand, row_major
from ..device.units import FLOAT32_BYTES
from ..kernels.product import FLOAT32, Product
from ..kernels.stage import IEEE
from ..runtime.device import DeviceProperties
from ..runtime.launch import product_of
from . import batches, heuristics
from .precision import FP32_AUTO, STAGES, canonical, tensor_stage

__all__ = ["AUTO_PRECISION", "auto_reason", "described", "product_for", "resolved"]

# The precision whose error and range are no worse than those of float32 sums, from this K on.
AUTO_PRECISION, AUTO_K = "bf16x6", 128


def described(operand: Operand) -> Operand:
    """Return an operand as kernels will access it, without its array, which is neither read nor kept."""
    return replace(operand.kind.placed(operand), kind=ArrayKind(), array=None)


def product_for(a: Operand, b: Operand, epilogue: Callable[..., Any] | None = None) -> Product:
    """Return the product of two operands with a new C; of a batch that takes several launches, the first one's."""
    x, y = (described(one) for one in (a, b))
    x, y = x if len(x.shape) > 1 else x.as_rows(), y if len(y.shape) > 1 else y.as_columns()
    batch = batches.broadcast(x.shape[:-2], y.shape[:-2])
    assert batch is not None, "the shapes were checked"
    shape = (*batch, x.shape[-2], y.shape[-1])
    z = Operand("out", ArrayKind(), None, FLOAT32, shape, row_major(shape, FLOAT32_BYTES), 0)
    launches = batches.products(x, y, z, 0, at_once=batches.AT_ONCE, fold=epilogue is None)
    return product_of(*next(launches), epilogue)


def resolved(precision: str, product: Product, gpu: DeviceProperties) -> str:
    """Return the precision that a name stands for in a product."""
    precision = canonical(precision)
    return auto_reason(product, gpu)[0] if precision == FP32_AUTO else precision


def auto_reason(product: Product, gpu: DeviceProperties) -> tuple[str, str]:
    """Return what `FP32_AUTO` stands for in a product, and why, in words."""
    if tensor_stage(gpu.cc) is not STAGES[0]:
        return IEEE, "only compute capability 9.0 has a faster precision of this accuracy"
    if product.k < AUTO_K:
        return IEEE, f"the error of {AUTO_PRECISION} is no larger than that of float32 sums only from K = {AUTO_K} on"
    exact, emulated = (_seconds(product, one, gpu) for one in (IEEE, AUTO_PRECISION))
    times = f"is expected to take {emulated * 1e6:.1f} us instead of {exact * 1e6:.1f} us"
    if exact <= emulated:
        return IEEE, f"{AUTO_PRECISION} {times}"
    return AUTO_PRECISION, f"its error and range are no worse than those of {IEEE}, and it {times}"


def _seconds(product: Product, precision: str, gpu: DeviceProperties) -> float:
    """Return the expected seconds of a product, with the conversion of operands that its kernel does not take."""
    choice = heuristics.best(heuristics.problem(product, gpu, precision))
    return choice.clocks / gpu.clock_hz + heuristics.conversion_seconds(product, choice, gpu)
