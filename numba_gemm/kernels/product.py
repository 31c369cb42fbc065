"""Description of a matrix multiplication as kernels see it: layouts of the operands, batch, epilogue; no addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any, Final, NamedTuple

from ..device.units import FLOAT32_BYTES, VECTOR_BYTES, ceil_div

LAYOUTS = ("NN", "NT", "TN", "TT")  # of A and B: N is stored by rows, T by columns
FLOAT32: Final = "float32"
BFLOAT16: Final = "bfloat16"
ITEM_BYTES = {FLOAT32: FLOAT32_BYTES, "float16": 2, BFLOAT16: 2}  # by the dtypes that A and B may have
DTYPES = tuple(ITEM_BYTES)


class Layout(NamedTuple):
    """Extents and strides of a matrix, the alignment of its address, and its dtype.

    Attributes
    ----------
    rows, cols : int
        Extents in elements.
    row_stride, col_stride : int
        Bytes from an element to the next row's and to the next column's; may be negative or 0.
    offset : int
        Address of element (0, 0) modulo 16.
    dtype : str
        One of `DTYPES`. Stages take float32, and one an A of bfloat16, see `Product.narrow_a`; operands of others are
        converted first.
    """

    rows: int
    cols: int
    row_stride: int
    col_stride: int
    offset: int = 0
    dtype: str = FLOAT32

    @property
    def aligned_rows(self) -> bool:
        """True if 16-byte copies reach every element, with fewer bytes at a row's end: contiguous, aligned rows."""
        return (
            (self.col_stride == ITEM_BYTES[self.dtype] or self.cols == 0)
            and self.offset == 0
            and self.row_stride % VECTOR_BYTES == 0  # also of one row or none: copies outside have addresses too
        )

    @property
    def aligned(self) -> bool:
        """True if 128-bit accesses reach every element: contiguous, aligned rows, columns a multiple of 4."""
        return self.cols % 4 == 0 and self.aligned_rows

    @property
    def transposed(self) -> Layout:
        """Layout of the same memory with rows and columns swapped."""
        return Layout(self.cols, self.rows, self.col_stride, self.row_stride, self.offset, self.dtype)

    @property
    def by_columns(self) -> bool:
        """True if elements of a column are closer to each other than those of a row."""
        return self.rows > 1 and (self.cols == 1 or 0 < abs(self.row_stride) < abs(self.col_stride))

    @property
    def converted(self) -> Layout:
        """Layout of a dense, aligned float32 copy in the same order, whose rows (or columns) are whole vectors apart.

        It is the layout itself if that is of float32; without elements, there is nothing to copy, and strides stay.
        """
        if self.dtype == FLOAT32:
            return self
        if self.rows == 0 or self.cols == 0:
            return self._replace(dtype=FLOAT32)
        if self.by_columns:
            return self.transposed.converted.transposed
        pitch = ceil_div(FLOAT32_BYTES * self.cols, VECTOR_BYTES) * VECTOR_BYTES
        return Layout(self.rows, self.cols, pitch, FLOAT32_BYTES)

    @property
    def words(self) -> tuple[int, int, int, int]:
        """Extents and strides, in the order in which a kernel takes them behind the address."""
        return self.rows, self.cols, self.row_stride, self.col_stride

    @property
    def span(self) -> tuple[int, int]:
        """First byte of any element and the one after the last, relative to element (0, 0); there are elements."""
        rows, cols, row_stride, col_stride, _, dtype = self
        ends = (rows - 1) * row_stride + (cols - 1) * col_stride
        if row_stride >= 0 <= col_stride:
            return 0, ends + ITEM_BYTES[dtype]
        low = min((rows - 1) * row_stride, 0) + min((cols - 1) * col_stride, 0)
        return low, ends - low + ITEM_BYTES[dtype]

    def part(self, first_row: int, first_col: int, rows: int, cols: int) -> tuple[int, Layout]:
        """Return the byte offset and the layout of a submatrix."""
        step = first_row * self.row_stride + first_col * self.col_stride
        offset = (self.offset + step) % VECTOR_BYTES
        return step, Layout(rows, cols, self.row_stride, self.col_stride, offset, self.dtype)


def check_dtypes(dtype: Any) -> tuple[str, str]:
    """Return the dtypes of A and B by name, given one or both, also as NumPy's; raise ValueError for others."""
    several = not isinstance(dtype, str) and isinstance(dtype, Iterable)
    found = tuple(map(_dtype_name, dtype)) if several else (_dtype_name(dtype),) * 2
    if len(found) != 2 or not set(found) <= set(DTYPES):
        raise ValueError(f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}, or two for A and B; pass such")
    return found


def _dtype_name(dtype: Any) -> str:
    """Return the name of a dtype, given as a str, or as a dtype or type of NumPy; of anything else, its text."""
    return dtype if isinstance(dtype, str) else str(getattr(dtype, "name", getattr(dtype, "__name__", dtype)))


def access_of(able: tuple[str, ...], x: Layout, steps: int, any_extent: bool = False) -> str:
    """Return the best access, of those `able`, to (mn, k) matrices; `steps`, in bytes, lead to others of a batch.

    With `any_extent`, the last vector of a row may be partial.
    """
    vectors = x.offset == 0 and steps % VECTOR_BYTES == 0
    along, across = x.col_stride == FLOAT32_BYTES, x.row_stride == FLOAT32_BYTES
    whole_rows, whole_columns = any_extent or x.cols % 4 == 0, any_extent or x.rows % 4 == 0
    if along and vectors and x.row_stride % VECTOR_BYTES == 0 and whole_rows and "along4" in able:
        return "along4"
    if across and vectors and x.col_stride % VECTOR_BYTES == 0 and whole_columns and "across4" in able:
        return "across4"
    return "along1" if along and "along1" in able else "across1" if across and "across1" in able else "any"


def may_have_tails(x: Layout) -> bool:
    """Return True if vectors may copy an (mn, k) matrix whose rows or columns end within one, see `tile_loader`.

    What follows a column's last float must lie before the next column.
    """
    return x.row_stride != FLOAT32_BYTES or x.rows % 4 == 0 or x.col_stride >= x.rows * FLOAT32_BYTES


def dense(order: str, rows: int, cols: int, dtype: str = FLOAT32) -> Layout:
    """Return the layout of an aligned dense matrix that is stored by rows, "N", or by columns, "T"."""
    size = ITEM_BYTES[dtype]
    strides = (size * cols, size) if order == "N" else (size, size * rows)
    return Layout(rows, cols, *strides, dtype=dtype)


Triple = tuple[int, int, int]


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


def copied_extents(extents: Triple, steps: Triple) -> Triple:
    """Return the number of different matrices of an operand along each batch dimension."""
    first, second, third = (extent if step else 1 for extent, step in zip(extents, steps))
    return first, second, third


def _copied_steps(extents: Triple, steps: Triple, copy: Layout) -> Triple:
    """Return the bytes from one float32 copy to the next along each dimension, if they are dense."""
    _, second, third = copied_extents(extents, steps)
    each = copy_bytes(copy)
    of_first, of_second, of_third = (
        own if step else 0 for own, step in zip((second * third * each, third * each, each), steps)
    )
    return of_first, of_second, of_third


def copy_bytes(copy: Layout) -> int:
    """Return the size of a dense float32 copy, whose rows or columns are whole vectors."""
    return copy.cols * copy.col_stride if copy.by_columns else copy.rows * copy.row_stride


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
    prepared : tuple of bool
        True for A, and for B, if it has been decomposed before; all products of a batch share such an operand.
    """

    a: Layout
    b: Layout
    c: Layout
    batch: Batch = ONE
    epilogue: Callable[..., Any] | None = None
    vectors: tuple[tuple[int, int], ...] = ()
    prepared: tuple[bool, bool] = (False, False)

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
        """Product ``C.T = B.T @ A.T``, for products without an epilogue.

        Parts of prepared operands are passed in the order of A and B. If both are prepared, the transpose takes those
        that come first, of its B.
        """
        batch = Batch(self.batch.extents, self.batch.b, self.batch.a, self.batch.c)
        a, b, c = self.b.transposed, self.a.transposed, self.c.transposed
        prepared = (False, True) if all(self.prepared) else self.prepared[::-1]
        return self._replace(a=a, b=b, c=c, batch=batch, prepared=prepared)

    @property
    def converted(self) -> Product:
        """Product of the float32 copies of operands that have other dtypes."""
        if self.a.dtype == self.b.dtype == FLOAT32:
            return self
        return self.without_narrow()

    @property
    def narrow_a(self) -> bool:
        """True if A is of bfloat16, and 16-byte copies along its rows reach every element."""
        whole = all(step % VECTOR_BYTES == 0 for step in self.batch.a)
        return self.a.dtype == BFLOAT16 and self.a.aligned_rows and whole

    def without_narrow(self, a: bool = True) -> Product:
        """Return the product of float32 copies of B, and of A if `a`, where they have other dtypes."""
        a = a and self.a.dtype != FLOAT32
        if not a and self.b.dtype == FLOAT32:
            return self
        layouts, batch = (self.a.converted if a else self.a, self.b.converted), self.batch
        if batch != ONE:
            if a:
                batch = batch._replace(a=_copied_steps(batch.extents, batch.a, layouts[0]))
            if self.b.dtype != FLOAT32:
                batch = batch._replace(b=_copied_steps(batch.extents, batch.b, layouts[1]))
        return self._replace(a=layouts[0], b=layouts[1], batch=batch)
