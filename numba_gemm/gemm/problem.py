"""Properties of a product on which the choice of a kernel depends, and the choice."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..kernels.product import FLOAT32, Product
from ..kernels.stage import IEEE, Gpu, Partition, Stage
from ..kernels.step import Kernel, Launches

__all__ = ["Choice", "Problem"]


class Problem(NamedTuple):
    """Properties of a product on which the choice of a kernel depends.

    Attributes
    ----------
    m, n, k : int
        Extents in elements.
    matrices : int
        Products of a batch.
    aligned : bool
        True if all operands allow 128-bit accesses by rows.
    vectors : bool
        True if A and B allow them along whichever axis is contiguous; a vector needs none.
    a_along, b_along : bool
        True if k is the contiguous axis of A, and of B.
    a_vectors, b_vectors : bool
        True if 16-byte copies can read A, and B, along their contiguous axis, whatever its extent.
    a_contiguous, b_contiguous : bool
        True if A, and B, have a contiguous axis.
    c_sectors : bool
        True if rows of C, or its columns if it is stored by columns, begin at sectors of memory (32 bytes), as far as
        addresses modulo 16 bytes tell.
    c_vectors : bool
        True if C allows 128-bit accesses by rows, partial ones at a row's end.
    a_narrow, b_narrow : bool
        True if `rows_in_registers` computes in the precision, and reads A, and B of the transpose, of BF16 as it is.
    by_columns : bool
        True if C is stored by columns.
    epilogue : bool
        True if the product has an epilogue.
    prepared : bool
        True if an operand is prepared for a precision in place of which a more accurate one may be faster.
    precision : str
        Precision, not "fp32_auto".
    tma : str
        Layouts of A and B, one of `tma_stage.LAYOUTS`, if tensor maps can describe one of them; else empty. Precisions
        other than "tf32" leave it empty.
    u_sectors, v_sectors : bool
        True if rows that these tensor maps describe, of `TmaOperands.u` and `v`, begin at sectors of memory, as far as
        addresses modulo 16 bytes tell.
    a_dtype, b_dtype : str
        Data types of A and B. The model does without them: other attributes are those of operands as kernels read them.
    cc, sm_count, clock_hz, memory_bandwidth
        Properties of the device, see `runtime.device.DeviceProperties`.
    """

    m: int
    n: int
    k: int
    matrices: int = 1
    aligned: bool = True
    vectors: bool = True
    a_along: bool = True
    b_along: bool = False
    a_vectors: bool = True
    b_vectors: bool = True
    a_contiguous: bool = True
    b_contiguous: bool = True
    c_sectors: bool = True
    c_vectors: bool = True
    a_narrow: bool = False
    b_narrow: bool = False
    by_columns: bool = False
    epilogue: bool = False
    prepared: bool = False
    precision: str = IEEE
    tma: str = ""
    u_sectors: bool = True
    v_sectors: bool = True
    a_dtype: str = FLOAT32
    b_dtype: str = FLOAT32
    cc: tuple[int, int] = (9, 0)
    sm_count: int = 132
    clock_hz: float = 1.98e9
    memory_bandwidth: float = 4.8e12

    @property
    def partial_vectors(self) -> bool:
        """True if A and B allow 128-bit accesses along whichever axis is contiguous, partial ones at a row's end."""
        return self.vectors or ((self.a_vectors or self.m == 1) and (self.b_vectors or self.n == 1))

    @property
    def swapped(self) -> Problem:
        """Problem of the transposed product."""
        return self._replace(
            m=self.n,
            n=self.m,
            a_along=self.b_along,
            b_along=self.a_along,
            a_vectors=self.b_vectors,
            b_vectors=self.a_vectors,
            a_contiguous=self.b_contiguous,
            b_contiguous=self.a_contiguous,
            a_narrow=self.b_narrow,
            b_narrow=self.a_narrow,
            a_dtype=self.b_dtype,
            b_dtype=self.a_dtype,
            by_columns=not self.by_columns,
        )


class Choice(NamedTuple):
    """A kernel, and how a product is launched with it.

    Attributes
    ----------
    stage, config
        The kernel.
    partition : Partition or None
        Division of the work among blocks, for a scheduled stage; None for the default.
    swapped : bool
        True to compute the transpose, ``C.T = B.T @ A.T``.
    clocks : float
        Expected duration in clocks, 0 if nothing was compared.
    reason : str
        Reason for the choice.
    precision : str
        Precision.
    measured : bool
        True if `clocks` were measured, with the conversion of operands; else these leave that out.
    """

    stage: Stage
    config: Any
    partition: Partition | None = None
    swapped: bool = False
    clocks: float = 0.0
    reason: str = ""
    precision: str = IEEE
    measured: bool = False

    @property
    def selected(self) -> tuple[Stage, Any, str, Partition | None, bool]:
        """Stage, configuration, precision, partition and swapped, as `runtime.launch.launch_product` takes them."""
        return self.stage, self.config, self.precision, self.partition, self.swapped

    def oriented(self, product: Product) -> Product:
        """Return the product, or its transpose if that is what is computed."""
        return product.transposed if self.swapped else product

    def launches(self, product: Product, gpu: Gpu) -> Launches:
        """Return the launches for the first piece of a product; no other piece is larger."""
        piece = next(self.stage.pieces(self.config, self.oriented(product), self.precision, gpu))
        return self.stage.launches(self.config, piece.product, self.precision, self.partition, gpu)

    def kernels(self, product: Product, gpu: Gpu) -> list[Kernel]:
        """Return the kernels that a product needs, in the order of their launches."""
        stage, config, precision, partition, _ = self.selected
        if partition is None and stage.takes_partition:
            partition = Partition(1, 0)
        return [step.kernel for step in stage.launches(config, self.oriented(product), precision, partition, gpu).steps]
