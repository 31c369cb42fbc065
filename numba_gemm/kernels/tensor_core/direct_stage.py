"""Launches of a tensor-core stage whose kernel reads A and B directly, without a decomposition pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ...device.units import MAX_GRID_Y, ceil_div
from ...typing import PrecisionName
from ..code import Code
from ..product import Product
from ..stage import Gpu, Partition, Piece, Stage, cut
from ..step import ALPHA, AT_A, AT_B, AT_C, BETA, Kernel, Launches, MatrixAt, Step
from .config import TensorVariant
from .precision import TENSOR_PRECISIONS

SIGNATURE = Code("tensor_core.signatures", "direct_signature")


@dataclass(frozen=True, eq=False)
class DirectStage(Stage):
    """A stage of the tensor-core ladder that rounds operands as it loads them.

    ``build(config, variant)`` takes a `TensorVariant` and returns a kernel with the parameters ``(alpha, a, b, beta,
    c)``, float32 matrices of any strides. The grid has one block per block tile, columns along x and rows along y.
    """

    min_cc: tuple[int, int] = (8, 0)
    precisions: tuple[PrecisionName, ...] = ("bf16",)

    @lru_cache(maxsize=64)  # noqa: B019 -- stages last as long as the process
    def kernel_of(self, config: Any, precision: str) -> Kernel:
        """Return its kernel in a configuration and a precision."""
        name, variant = f"{self.name}_{precision}_{config.name}", TensorVariant(TENSOR_PRECISIONS[precision])
        return Kernel(name, self.build, SIGNATURE, config, variant, 0, config.threads)

    def kernel(self, config: Any, product: Product, precision: str = "bf16") -> Kernel:
        """Return its kernel, the same for operands of all layouts."""
        return self.kernel_of(config, precision)

    def own_launches(
        self, config: Any, product: Product, precision: str, partition: Partition | None, gpu: Gpu
    ) -> Launches:
        """Return the launch of a product."""
        a, b, c = MatrixAt(AT_A, product.a), MatrixAt(AT_B, product.b), MatrixAt(AT_C, product.c)
        grid = (ceil_div(product.n, config.BN), ceil_div(product.m, config.BM), 1)
        kernel = self.kernel_of(config, precision)
        return Launches((Step(kernel, grid, (config.threads, 1, 1), (ALPHA, a, b, BETA, c)),))

    def pieces(self, config: Any, product: Product, precision: str, gpu: Gpu) -> Iterator[Piece]:
        """Divide a product into parts that one launch can compute: a grid has up to 65,535 blocks along y."""
        yield from cut(product, MAX_GRID_Y * config.BM, max(product.n, 1))
