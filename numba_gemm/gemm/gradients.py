"""Kernels of the gradients of a product, which PyTorch's backward pass asks for soon after it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..kernels.product import ONE, Product, dense
from ..kernels.stage import Stage
from ..kernels.step import Kernel
from ..runtime import kernel_cache
from ..runtime.device import Device
from . import heuristics
from .request import chosen

__all__ = ["compile_ahead", "gradients"]


def gradients(product: Product) -> tuple[Product, Product]:
    """Return the products that are the gradients of A and of B, as PyTorch's autograd computes them.

    That of B is computed as its transpose if B is stored by columns, as the transpose of a linear layer's weight is.
    """
    a, b, c = product.a, product.b, product.c
    of_a = Product(c, b.transposed, dense("N", a.rows, a.cols))
    if b.row_stride < b.col_stride:
        return of_a, Product(c.transposed, a, dense("N", b.cols, b.rows))
    return of_a, Product(a.transposed, c, dense("N", b.rows, b.cols))


def compile_ahead(
    device: Device, stage: Stage, product: Product, precision: str, kernels: Sequence[Kernel] = ()
) -> None:
    """Start to compile the kernels of a product's gradients, but for the product's own; see `runtime.ahead`.

    Nothing is done unless PyTorch has been imported and the stage is the one that is chosen for such products, nor for
    a product without terms, whose gradients are empty.
    """
    if "torch" not in sys.modules or product.batch != ONE or product.epilogue is not None or product.k == 0:
        return
    gpu, needed = device.properties, []
    for one in gradients(product):
        choice = chosen("auto", device.ordinal, heuristics.problem(one, gpu, precision))
        if choice.stage is stage:
            needed += choice.kernels(one, gpu.gpu)
    kernel_cache.compile_ahead([(kernel, gpu.cc) for kernel in dict.fromkeys(needed) if kernel not in kernels])
