"""Description of a matrix multiplication as kernels see it: layouts of the operands, batch, epilogue; no addresses."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

from ..device.units import FLOAT32_BYTES

VECTOR_BYTES = 16  # of a 128-bit access
LAYOUTS = ("NN", "NT", "TN", "TT")  # of A and B: N is stored by rows, T by columns


class Layout(NamedTuple):
    """Extents and strides of a float32 matrix, and the alignment of its address.

    Attributes
    ----------
    rows, cols : int
        Extents in elements.
    row_stride, col_stride : int
        Bytes from an element to the next row's and to the next column's; may be negative or 0.
    offset : int
        Address of element (0, 0) modulo 16.
    """

    rows: int
    cols: int
    row_stride: int
    col_stride: int
    offset: int = 0

    @property
    def aligned(self) -> bool:
        """True if 128-bit accesses reach every element: unit column stride, aligned rows, columns a multiple of 4."""
        return (
            (self.col_stride == FLOAT32_BYTES or self.cols == 0)
            and self.offset == 0
            and self.row_stride % VECTOR_BYTES == 0  # also of one row or none: copies outside have addresses too
            and self.cols % 4 == 0
        )

    @property
    def transposed(self) -> Layout:
        """The same memory with rows and columns swapped."""
        return Layout(self.cols, self.rows, self.col_stride, self.row_stride, self.offset)

    @property
    def words(self) -> tuple[int, int, int, int]:
        """Extents and strides, in the order in which a kernel takes them behind the address."""
        return self.rows, self.cols, self.row_stride, self.col_stride

    @property
    def span(self) -> tuple[int, int]:
        """First byte of any element and the one after the last, relative to element (0, 0); there are elements."""
        down, across = (self.rows - 1) * self.row_stride, (self.cols - 1) * self.col_stride
        return min(down, 0) + min(across, 0), max(down, 0) + max(across, 0) + FLOAT32_BYTES

    def part(self, first_row: int, first_col: int, rows: int, cols: int) -> tuple[int, Layout]:
        """Return the byte offset and the layout of a submatrix."""
        step = first_row * self.row_stride + first_col * self.col_stride
        return step, Layout(rows, cols, self.row_stride, self.col_stride, (self.offset + step) % VECTOR_BYTES)


def dense(order: str, rows: int, cols: int) -> Layout:
    """Return the layout of an aligned dense matrix that is stored by rows, "N", or by columns, "T"."""
    strides = (FLOAT32_BYTES * cols, FLOAT32_BYTES) if order == "N" else (FLOAT32_BYTES, FLOAT32_BYTES * rows)
    return Layout(rows, cols, *strides)


class Batch(NamedTuple):
    """Matrices along up to three batch dimensions.

    Attributes
    ----------
    extents : tuple of int
        Number of matrices along each dimension.
    a, b, c : tuple of int
        Bytes from one matrix to the next along each; 0 where the operand is broadcast.
    """

    extents: tuple[int, int, int] = (1, 1, 1)
    a: tuple[int, int, int] = (0, 0, 0)
    b: tuple[int, int, int] = (0, 0, 0)
    c: tuple[int, int, int] = (0, 0, 0)

    @property
    def matrices(self) -> int:
        """Number of matrices in all."""
        return prod(self.extents)


ONE = Batch()


class Product(NamedTuple):
    """``C = epilogue(alpha * A @ B + beta * C)`` for operands of given layouts.

    Attributes
    ----------
    a, b, c : Layout
        Layouts of A (m, k), B (k, n) and C (m, n); of a batch, those of the first matrices.
    batch : Batch
        Number of matrices, and the steps between them.
    epilogue : callable or None
        Device function ``(value, row, col, *vectors)`` applied to each element of C.
    vectors : tuple of (int, int)
        Elements of each of the epilogue's vectors, and bytes from one element to the next.
    """

    a: Layout
    b: Layout
    c: Layout
    batch: Batch = ONE
    epilogue: Callable[..., Any] | None = None
    vectors: tuple[tuple[int, int], ...] = ()

    @property
    def m(self) -> int:
        """Rows of C."""
        return self.c.rows

    @property
    def n(self) -> int:
        """Columns of C."""
        return self.c.cols

    @property
    def k(self) -> int:
        """Terms of each sum."""
        return self.a.cols

    @property
    def transposed(self) -> Product:
        """The same product as ``C.T = B.T @ A.T``, for products without an epilogue."""
        batch = Batch(self.batch.extents, self.batch.b, self.batch.a, self.batch.c)
        return self._replace(a=self.b.transposed, b=self.a.transposed, c=self.c.transposed, batch=batch)
