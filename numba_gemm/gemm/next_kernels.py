"""Kernels that a program may need soon after a product: those of its gradients, and of other extents.

They are compiled ahead, in worker processes, while the product's own kernel is compiled (`runtime.ahead`).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product as pairs

from ..device.access import SECTOR
from ..device.units import FLOAT32_BYTES, ceil_div
from ..kernels.product import ONE, Layout, Product, dense
from ..kernels.stage import Stage
from ..kernels.step import Kernel
from ..runtime import kernel_cache
from ..runtime.device import Device
from . import autotune_cache, heuristics

__all__ = ["compile_ahead", "gradients", "other_extents"]

EXTENTS = (512, 1024, 2048, 4096, 8192)  # of M and of N, for which other kernels are chosen
ALIGNMENT = 4  # elements of a 128-bit access
SECTOR_BYTES = SECTOR * FLOAT32_BYTES


def gradients(product: Product) -> tuple[Product, Product]:
    """Return the products that are the gradients of A and of B, as PyTorch's autograd computes them.

    That of B is computed as its transpose if B is stored by columns, as the transpose of a linear layer's weight is.
    """
    a, b, c = product.a, product.b, product.c
    of_a = Product(c, b.transposed, dense("N", a.rows, a.cols))
    if b.row_stride < b.col_stride:
        return of_a, Product(c.transposed, a, dense("N", b.cols, b.rows))
    return of_a, Product(a.transposed, c, dense("N", b.rows, b.cols))


def other_extents(product: Product) -> list[Product]:
    """Return products whose operands have the same order and alignment, and common extents M and N."""

    def resized(layout: Layout, rows: int, cols: int) -> Layout:
        down, across = layout.row_stride, layout.col_stride
        if 0 < across <= down:
            down += _missing(cols * across - down)
        elif 0 < down < across:
            across += _missing(rows * down - across)
        return layout._replace(rows=rows, cols=cols, row_stride=down, col_stride=across)

    found = []
    for rows, cols in pairs(EXTENTS, EXTENTS):
        m, n, k = rows + product.m % ALIGNMENT, cols + product.n % ALIGNMENT, product.k
        a, b, c = resized(product.a, m, k), resized(product.b, k, n), resized(product.c, m, n)
        found.append(Product(a, b, c))
    return found


def _missing(bytes_between: int) -> int:
    """Return the bytes by which lines must be further apart, in whole sectors, so that they do not overlap."""
    return max(ceil_div(bytes_between, SECTOR_BYTES), 0) * SECTOR_BYTES


def compile_ahead(
    device: Device, stage: Stage, product: Product, precision: str, kernels: Sequence[Kernel] = ()
) -> None:
    """Start to compile kernels that may be needed after a product, but for its own `kernels`.

    These are the kernels of its gradients, if PyTorch has been imported; and, by workers that have nothing else to do,
    those of other extents, the most frequent ones first. Nothing is done if another stage is chosen for such products,
    nor for a product without terms, whose gradients are empty.
    """
    if product.batch != ONE or product.epilogue is not None or product.k == 0:
        return
    gpu, product = device.properties, product.converted

    def chosen_for(products: Iterable[Product]) -> list[Kernel]:
        found = Counter[Kernel]()
        for one in products:
            choice = autotune_cache.choose(device.ordinal, heuristics.problem(one, gpu, precision))
            if choice.stage is stage:
                found.update(kernel for kernel in choice.kernels(one, gpu.gpu) if kernel not in kernels)
        return [kernel for kernel, _ in found.most_common()]

    needed = chosen_for(gradients(product)) if "torch" in sys.modules else []
    others = [kernel for kernel in chosen_for(other_extents(product)) if kernel not in needed]
    kernel_cache.compile_ahead(needed, others, gpu.cc)
