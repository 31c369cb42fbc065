"""Conversion of FP16 and BF16 operands to float32, as a launch before those of a product.

Both formats are subsets of float32, so a product of such operands is the product of their float32 copies, in every
precision. The copies are in the scratch memory of the launches, behind the stage's own. They are dense and
in the operand's own order, so reads and writes are coalesced: 2 bytes in and 4 bytes out per element.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..device.units import FLOAT32_BYTES, MAX_GRID_X, ceil_div
from .code import Code
from .product import ITEM_BYTES, Layout, Product, Triple, copied_extents, copy_bytes
from .step import Argument, Kernel, Launches, MatrixAt, Moving, Slot, Step, Words

__all__ = ["BUILD", "ConversionVariant", "conversion_bytes", "with_conversion"]

THREADS = 256
AT_ONCE = 8  # elements per thread
ALIGNMENT = 256  # bytes
BUILD, SIGNATURE = Code("convert"), Code("convert", "signature")


@dataclass(frozen=True)
class ConversionVariant:
    """Specialisation of the kernel that converts operands: the dtypes of the first and of the second."""

    first: str
    second: str


@lru_cache(maxsize=8)
def conversion_kernel(first: str, second: str) -> Kernel:
    """Return the kernel that converts operands of these dtypes."""
    variant = ConversionVariant(first, second)
    return Kernel(f"convert_{first}_{second}", BUILD, SIGNATURE, None, variant, 0, THREADS)


def conversion_bytes(product: Product, copied: Product) -> int:
    """Return the bytes that the conversion of a product's operands to those of another reads and writes."""
    count = 0
    for x, copy, steps in ((product.a, copied.a, product.batch.a), (product.b, copied.b, product.batch.b)):
        if x.dtype != copy.dtype:
            first, second, third = copied_extents(product.batch.extents, steps)
            count += first * second * third * x.rows * x.cols * (ITEM_BYTES[x.dtype] + FLOAT32_BYTES)
    return count


@dataclass(frozen=True)
class _Copy:
    """An operand and its float32 copy, both with rows that are contiguous, or nearly so.

    Attributes
    ----------
    slot : Slot
        The operand.
    source, target : Layout
        Layouts of a matrix and of its copy.
    extents, steps : tuple of int
        Different matrices along each batch dimension, and bytes from one to the next in the operand.
    offset : int
        Bytes from the start of the scratch memory to the copy.
    """

    slot: Slot
    source: Layout
    target: Layout
    extents: Triple
    steps: Triple
    offset: int

    @property
    def matrices(self) -> int:
        """Number of matrices."""
        first, second, third = self.extents
        return first * second * third

    @property
    def size(self) -> int:
        """Bytes of all copies."""
        return self.matrices * copy_bytes(self.target)

    @property
    def chunks(self) -> int:
        """Groups of `AT_ONCE` elements of a row, in all matrices."""
        return self.matrices * self.target.rows * ceil_div(self.target.cols, AT_ONCE)

    @property
    def matrix_arguments(self) -> tuple[Argument, Argument]:
        """Arguments of the kernel: the first matrix and its copy, whose columns are padded to whole vectors."""
        whole = self.target._replace(cols=self.target.row_stride // FLOAT32_BYTES)
        return MatrixAt(Moving(self.slot), self.source), MatrixAt(Moving(Slot.SCRATCH, self.offset), whole)

    @property
    def words(self) -> tuple[int, ...]:
        """Words of the kernel: two extents, three steps, bytes of a copy, and chunks."""
        _, second, third = self.extents
        return second, third, *self.steps, copy_bytes(self.target), self.chunks


def with_conversion(launches: Launches, product: Product, copied: Product) -> Launches:
    """Return launches of a product with copied operands behind one that makes the copies which they read."""
    copies, end = list[_Copy](), launches.scratch_bytes
    places: dict[int, int] = {}
    operands = (
        (Slot.A, product.a, copied.a, product.batch.a),
        (Slot.B, product.b, copied.b, product.batch.b),
    )
    for slot, source, target, steps in operands:
        if source.dtype == target.dtype:
            continue
        if not (source.rows and source.cols):
            continue
        if target.by_columns:
            source, target = source.transposed, target.transposed
        places[slot] = ceil_div(end, ALIGNMENT) * ALIGNMENT
        copy = _Copy(slot, source, target, copied_extents(product.batch.extents, steps), steps, places[slot])
        copies.append(copy)
        end = copy.offset + copy.size
    if not copies:
        return launches

    def from_copy(argument: Argument) -> Argument:
        if isinstance(argument, MatrixAt) and (at := places.get(argument.place.slot)) is not None:
            return argument._replace(place=Moving(Slot.SCRATCH, at + argument.place.offset))
        return argument

    own = [step._replace(arguments=tuple(map(from_copy, step.arguments))) for step in launches.steps]
    return launches._replace(steps=(_step(copies), *own), scratch_bytes=end)


def _step(copies: list[_Copy]) -> Step:
    """Return the launch that makes one copy or two."""
    first, last = copies[0], copies[-1]
    blocks = [min(ceil_div(one.chunks, THREADS), MAX_GRID_X // 2) for one in copies]
    words = Words((*first.words, *last.words, blocks[0]))
    kernel = conversion_kernel(first.source.dtype, last.source.dtype)
    arguments = (*first.matrix_arguments, *last.matrix_arguments, words)
    return Step(kernel, (sum(blocks), 1, 1), (THREADS, 1, 1), arguments)
