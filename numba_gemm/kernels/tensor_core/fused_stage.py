"""Launches of a tensor-core stage whose kernel reads A and B and decomposes them itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from ...device.units import MAX_GRID_Y, ceil_div
from ...typing import PrecisionName
from ..code import Code
from ..ladder.stage import access_of
from ..ladder.tile_config import TileConfig
from ..product import Product
from ..stage import Gpu, Partition, Piece, Stage, parts_of_batch
from ..step import ALPHA, AT_A, AT_B, AT_C, BETA, Kernel, Launches, MatrixAt, Step, Vector, Words
from .precision import TENSOR_PRECISIONS, TensorPrecision
from .stage import precision_for

SIGNATURE = Code("tensor_core.signatures", "fused_signature")
# Accesses to an operand's tiles, see `numba_gemm.device.access`: in vectors, and by floats.
VECTORS, FLOATS, ANY = ("along4", "across4"), ("across1",), "any"


class FusedVariant(NamedTuple):
    """Specialisation of a kernel.

    Attributes
    ----------
    precision : TensorPrecision
        Precision.
    a, b : str
        Access to the operands' tiles, in vectors or by floats for both; that of B is to its transpose.
    epilogue : callable or None
        Device function ``(value, row, col, *vectors)`` applied to each element of C.
    vectors : int
        Number of vectors that the epilogue takes.
    batched : bool
        True if the grid's y axis counts matrices of a batch.
    """

    precision: TensorPrecision
    a: str
    b: str
    epilogue: Callable[..., Any] | None = None
    vectors: int = 0
    batched: bool = False


@dataclass(frozen=True, eq=False)
class FusedStage(Stage):
    """A stage of the tensor-core ladder whose kernel decomposes operands.

    ``build(config, variant)`` takes a `FusedVariant` and returns a kernel with the parameters ``(alpha, a, b, beta, c,
    steps, vectors)``: float32 matrices of any strides; bytes from a matrix of a batch to the next of A, B and C; and
    the epilogue's vectors, a tuple. The grid has the block tiles along x and the matrices along y.
    """

    min_cc: tuple[int, int] = (8, 0)
    precisions: tuple[PrecisionName, ...] = tuple(name for name, one in TENSOR_PRECISIONS.items() if not one.scaled)

    @property
    def batch_dimensions(self) -> int:
        """Dimensions of a batch that one launch takes."""
        return 1

    @property
    def takes_epilogue(self) -> bool:
        """True if it applies an epilogue."""
        return True

    @lru_cache(maxsize=4096)  # noqa: B019 -- stages last as long as the process
    def kernel_of(self, config: TileConfig, variant: FusedVariant) -> Kernel:
        """Return its kernel in a configuration and a variant."""
        name = f"{self.name}_{variant.precision.name}_{config.name}_{variant.a}_{variant.b}"
        return Kernel(name, self.build, SIGNATURE, config, variant, config.dynamic_shared, config.threads)

    def accesses(self, product: Product) -> tuple[str, str]:
        """Return the accesses to tiles of A and of B: of both in vectors, or of neither.

        Both by columns, which is rare, is read without vectors: this keeps kernels few.
        """
        _, _, a_step = product.batch.a
        _, _, b_step = product.batch.b
        of_a, of_b = (product.a, a_step), (product.b.transposed, b_step)
        found = access_of(VECTORS, *of_a), access_of(VECTORS, *of_b)
        if ANY in found or found == VECTORS[::-1]:
            return access_of(FLOATS, *of_a), access_of(FLOATS, *of_b)
        return found

    def kernel(self, config: TileConfig, product: Product, precision: str = "") -> Kernel:
        """Return the kernel that multiplies operands of these layouts."""
        accesses, batched = self.accesses(product.converted), product.batch.extents[-1] > 1
        own = precision_for(precision, product.k), *accesses, product.epilogue, len(product.vectors), batched
        return self.kernel_of(config, FusedVariant(*own))

    def own_launches(
        self, config: TileConfig, product: Product, precision: str, partition: Partition | None, gpu: Gpu
    ) -> Launches:
        """Return the launch of a product."""
        batch = product.batch
        assert batch.extents[:-1] == (1, 1), "one launch takes one dimension"
        a, b, c = MatrixAt(AT_A, product.a), MatrixAt(AT_B, product.b), MatrixAt(AT_C, product.c)
        steps = Words((batch.a[-1], batch.b[-1], batch.c[-1]))
        vectors = [Vector(i, *vector) for i, vector in enumerate(product.vectors)]
        tiles = ceil_div(product.m, config.BM) * ceil_div(product.n, config.BN)
        kernel, block = self.kernel(config, product, precision), (config.threads, 1, 1)
        step = Step(kernel, (tiles, batch.extents[-1], 1), block, (ALPHA, a, b, BETA, c, steps, *vectors))
        return Launches((step,))

    def pieces(self, config: TileConfig, product: Product, precision: str, gpu: Gpu) -> Iterator[Piece]:
        """Divide a product into parts that one launch can compute: a grid has up to 65,535 matrices along y."""
        return parts_of_batch(product, MAX_GRID_Y)
