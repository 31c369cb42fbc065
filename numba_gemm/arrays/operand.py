"""What all libraries' arrays have in common: where a matrix lies, and how a product gets and keeps its operands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..launch import Matrix
from . import streams
from .streams import Stream

ITEM = 4  # bytes of a float32


@dataclass(slots=True)
class Operand:
    """An array as it was passed, described.

    Attributes
    ----------
    name : str
        The parameter it was passed as.
    kind : ArrayKind
        Whose array it is.
    array : object
        The array itself; for memory without an array of its own, what keeps it alive.
    dtype : str
        In the library's own words.
    shape, strides : tuple of int
        Extents in elements and strides in bytes.
    pointer : int
        Address of element (0, 0).
    device : int or None
        None for memory that no device owns, such as an empty array's.
    stream : Stream or None
        Stream whose work makes the array's contents, where the array says so.
    readonly : bool
        Whether its library forbids writing it.
    """

    name: str
    kind: ArrayKind
    array: Any
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    pointer: int
    device: int | None = None
    stream: Stream | None = None
    readonly: bool = False

    def resized(self, rows: int, cols: int) -> Operand:
        """Its first rows and columns."""
        return replace(self, shape=(rows, cols))

    def matrix(self, device: int) -> Matrix:
        """The same, as the launcher wants it."""
        (rows, cols), (row_stride, col_stride) = self.shape, self.strides
        return Matrix(self.pointer, rows, cols, row_stride, col_stride, device, self.array)

    def overlaps(self, other: Operand) -> bool:
        """Whether the two share an element, or part of one: exact, however their rows and columns interleave."""
        if 0 in self.shape or 0 in other.shape:
            return False
        (low, high), (other_low, other_high) = self._extent(), other._extent()
        if high <= other_low or other_high <= low:
            return False
        return bool(np.shares_memory(np.asarray(_Addresses(self)), np.asarray(_Addresses(other))))

    def _extent(self) -> tuple[int, int]:
        """First byte, and the one after the last."""
        down, across = (self.shape[0] - 1) * self.strides[0], (self.shape[1] - 1) * self.strides[1]
        first = self.pointer + min(down, 0) + min(across, 0)
        return first, first + abs(down) + abs(across) + ITEM

    def overlaps_itself(self) -> bool:
        """Whether two elements share memory."""
        (rows, cols), (row_step, col_step) = self.shape, map(abs, self.strides)
        if 0 in self.shape:
            return False
        if (rows > 1 and row_step < ITEM) or (cols > 1 and col_step < ITEM):
            return True
        # Row after row, or column after column, as in nearly every array.
        if 1 in self.shape or row_step >= (cols - 1) * col_step + ITEM or col_step >= (rows - 1) * row_step + ITEM:
            return False
        # Elements i rows and j columns apart, whichever way, can come as near as i * row_step - j * col_step bytes.
        down = np.arange(1, rows, dtype=np.int64) * row_step
        before = np.minimum(down // col_step, cols - 1)
        after = np.minimum(before + 1, cols - 1)
        return bool((np.abs(down - np.stack([before, after]) * col_step) < ITEM).any())


class _Addresses:
    """Gives NumPy an array of an operand's addresses, to compare them: the elements must not be read."""

    def __init__(self, operand: Operand) -> None:
        self.__array_interface__ = {
            "data": (operand.pointer, False),
            "shape": operand.shape,
            "strides": operand.strides,
            "typestr": "<f4",
            "version": 3,
        }


@dataclass(slots=True)
class Product:
    """Where a product's operands are and where its result goes."""

    a: Matrix
    b: Matrix
    c: Matrix
    stream: Stream
    result: Any


class ArrayKind:
    """A library's arrays. The methods here are those of arrays in device memory."""

    name = ""
    cast = "{0}.astype(numpy.float32)"  # how to get float32 out of an array named {0}

    def owns(self, array: Any) -> bool:
        """Whether an object is one of this library's arrays."""
        raise NotImplementedError

    @property
    def family(self) -> str:
        """What its results are; arrays of one family may be operands of one product."""
        return self.name

    def describe(self, name: str, array: Any, stream: Stream | None) -> Operand:
        """Say where an array lies. `stream` is the caller's, if any, which DLPack producers want to be told."""
        raise NotImplementedError

    def streams(self, operands: list[Operand], device: int) -> list[Stream]:
        """Streams whose work the product must follow; the first is the one to run on unless the caller names one."""
        raise NotImplementedError

    def empty(self, rows: int, cols: int, device: int, stream: Stream) -> Operand:
        """Allocate a result that work on a stream will fill."""
        raise NotImplementedError

    def keep(self, operands: list[Operand], device: int, stream: Stream, followed: list[Stream]) -> None:
        """See to it that memory the stream still uses is not reused before it is done."""
        # On its own stream a library reuses memory in stream order. On any other it does not know about our work, and
        # where the operands are on several, some are on another than ours.
        if not all(map(stream.same, followed)) or any(operand.kind is not self for operand in operands):
            streams.hold(stream, device, [operand.array for operand in operands])

    def written(self, out: Operand) -> None:
        """Tell the library, if it wants to know, that the caller's `out` has been written."""

    @contextmanager
    def product(
        self, a: Operand, b: Operand, out: Operand | None, *, reads_out: bool, device: int, stream: Stream | None
    ) -> Iterator[Product]:
        """Bring a product's operands to where kernels reach them and, on leaving, its result to where it is wanted."""
        streams.release_finished()
        given = [a, b] if out is None else [a, b, out]
        followed = self.streams(given, device)
        queue = followed[0] if stream is None else stream
        c = self.empty(a.shape[0], b.shape[1], device, queue) if out is None else out
        # After the allocation, whose memory may have served earlier work of the library's stream.
        for producer in followed:
            streams.wait_for(queue, producer, device)
        yield Product(a.matrix(device), b.matrix(device), c.matrix(device), queue, c.array)
        self.keep([a, b, c], device, queue, followed)
        if out is not None:
            out.kind.written(out)


def name_of(dtype: np.dtype) -> str:
    """A NumPy dtype in words."""
    # NumPy takes microseconds to spell a dtype out, and compares it in a tenth of one.
    return "float32" if dtype == np.float32 else str(dtype)


def row_major(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Strides in bytes of a dense array in row order."""
    strides = [itemsize] * len(shape)
    for axis in reversed(range(len(shape) - 1)):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)
