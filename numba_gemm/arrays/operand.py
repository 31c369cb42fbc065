"""What all libraries' arrays have in common: where a matrix lies, and how a product gets and keeps its operands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..runtime.matrix import Matrix, Vector, at_address
from . import streams
from .probe import Probe
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
        Address of the first element, whose indices are 0.
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
        """The first rows and columns of each of its matrices."""
        return replace(self, shape=(*self.shape[:-2], rows, cols))

    def matrix(self, device: int, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Matrix:
        """A matrix within it, as the launcher wants it."""
        (rows, cols), (row_stride, col_stride) = shape, strides
        owner = self.kind.view(self, pointer, shape, strides)
        return Matrix(pointer, rows, cols, row_stride, col_stride, device, owner)

    def vector(self) -> Vector:
        """The same, of one dimension, as the launcher wants it."""
        owner = self.kind.view(self, self.pointer, self.shape, self.strides)
        return Vector(self.pointer, self.shape[0], self.strides[0], owner)

    def overlaps(self, other: Operand) -> bool:
        """Whether the two share an element, or part of one: exact, however they interleave."""
        if 0 in self.shape or 0 in other.shape:
            return False
        (low, high), (other_low, other_high) = self.extent(), other.extent()
        if high <= other_low or other_high <= low:
            return False
        return bool(np.shares_memory(addresses(self), addresses(other)))

    def extent(self) -> tuple[int, int]:
        """Return the addresses of the first byte and of the one after the last."""
        low = high = self.pointer
        for extent, step in zip(self.shape, self.strides):
            if step < 0:
                low += (extent - 1) * step
            else:
                high += (extent - 1) * step
        return low, high + ITEM

    def overlaps_itself(self) -> bool:
        """Whether two elements share memory."""
        if 0 in self.shape:
            return False
        axes = sorted([(abs(step), extent) for step, extent in zip(self.strides, self.shape) if extent > 1])
        if axes and axes[0][0] < ITEM:
            return True
        # Each axis reaches over all before it, as in nearly every array.
        reach, nested = ITEM, True
        for step, extent in axes:
            nested = nested and step >= reach
            reach += (extent - 1) * step
        if nested:
            return False
        if len(axes) > 2:
            return self._overlaps_itself_anyhow()
        (col_step, cols), (row_step, rows) = axes
        # Elements i rows and j columns apart, whichever way, can come as near as i * row_step - j * col_step bytes.
        down = np.arange(1, rows, dtype=np.int64) * row_step
        before = np.minimum(down // col_step, cols - 1)
        after = np.minimum(before + 1, cols - 1)
        return bool((np.abs(down - np.stack([before, after]) * col_step) < ITEM).any())

    def _overlaps_itself_anyhow(self) -> bool:
        """`overlaps_itself` for any number of axes."""
        # Two elements differ first along some axis: say that the one before is at 0 there.
        part = addresses(self)
        for axis in range(part.ndim):
            before = (slice(None),) * axis
            first, others = part[*before, :1], part[*before, 1:]
            if others.size and np.shares_memory(first, others):
                return True
            part = first
        return False


def addresses(operand: Operand) -> np.ndarray:
    """An array of an operand's addresses, to compare them: where they are not the host's, no element may be read."""
    return at_address(operand.array, operand.pointer, operand.shape, operand.strides)


@dataclass(frozen=True, slots=True)
class Copies:
    """Bytes that a product copies to the device, back from it, and from place to place in host memory."""

    to_device: int = 0
    to_host: int = 0
    on_host: int = 0


@dataclass(slots=True)
class Product:
    """Where kernels find a product's operands, where its result goes, and where an epilogue's vectors are."""

    a: Operand
    b: Operand
    c: Operand
    vectors: list[Operand]
    stream: Stream
    result: Any


class ArrayKind:
    """A library's arrays. The methods here are those of arrays in device memory."""

    name = ""
    cast = "{0}.astype(numpy.float32)"  # how to get float32 out of an array named {0}

    def owns(self, array: Any) -> bool:
        """Whether an object is one of this library's arrays."""
        raise NotImplementedError

    def owns_type(self, own: type) -> bool:
        """Whether all objects of a type, of which one is this library's array, are arrays of this library."""
        return False

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

    def empty(self, shape: tuple[int, ...], device: int, stream: Stream) -> Operand:
        """Allocate a result that work on a stream will fill."""
        raise NotImplementedError

    def view(self, operand: Operand, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """What the launcher keeps of an operand for a part of it; in the simulator, that part's array."""
        return operand.array

    def placed(self, operand: Operand) -> Operand:
        """How an operand will lie where kernels find it."""
        return operand

    def copies(self, given: list[Operand], result: Operand, *, reads_out: bool) -> Copies:
        """What a product of these operands, and vectors, will copy."""
        return Copies()

    def keep(self, operands: list[Operand], device: int, stream: Stream, followed: list[Stream]) -> None:
        """See to it that memory the stream still uses is not reused before it is done."""
        # On its own stream a library reuses memory in stream order. On any other it does not know about our work, and
        # where the operands are on several, some are on another than ours.
        if not all(map(stream.same, followed)) or any(operand.kind is not self for operand in operands):
            streams.hold(stream, device, [operand.array for operand in operands])

    def probe(self, array: Any) -> Probe | None:
        """Return the probe for arrays of exactly this type; None if every call checks them in full."""
        return None

    def written(self, out: Operand) -> None:
        """Tell the library, if it wants to know, that the caller's `out` has been written."""

    @contextmanager
    def product(
        self,
        a: Operand,
        b: Operand,
        out: Operand | None,
        *,
        shape: tuple[int, ...],
        vectors: list[Operand],
        reads_out: bool,
        device: int,
        stream: Stream | None,
    ) -> Iterator[Product]:
        """Bring a product's operands to where kernels reach them and, on leaving, its result to where it is wanted.

        `shape` is that of the result.
        """
        streams.release_finished()
        given = [a, b, *vectors] if out is None else [a, b, out, *vectors]
        followed = self.streams(given, device)
        queue = followed[0] if stream is None else stream
        c = self.empty(shape, device, queue) if out is None else out
        # After the allocation, whose memory may have served earlier work of the library's stream.
        for producer in followed:
            streams.wait_for(queue, producer, device)
        yield Product(a, b, c, vectors, queue, c.array)
        self.keep([a, b, c, *vectors], device, queue, followed)
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
