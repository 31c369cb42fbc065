"""Operands of a matrix multiplication, and the interface that every array library implements."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..device.units import FLOAT32_BYTES
from ..kernels.product import FLOAT32, ITEM_BYTES
from ..runtime.matrix import Matrix, Vector, at_address
from . import streams
from .probe import Probe
from .streams import Stream


@dataclass(slots=True)
class Operand:
    """Description of an array as it was passed.

    Attributes
    ----------
    name : str
        Name of the parameter.
    kind : ArrayKind
        Library that it belongs to.
    array : object
        The array itself; for memory without an array of its own, the object that keeps it alive.
    dtype : str
        Data type, in the library's own spelling.
    shape, strides : tuple of int
        Extents in elements and strides in bytes.
    pointer : int
        Address of the first element, whose indices are 0.
    device : int or None
        Device that owns the memory; None if there is none, as for an empty array.
    stream : Stream or None
        Stream whose work produces the contents, if the array names one.
    readonly : bool
        True if its library forbids writing to it.
    maker : callable or None
        Function that makes an array of its library of an object with ``__dlpack__``, for results; None if results are
        arrays of `kind`.
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
    maker: Callable[[Any], Any] | None = None

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEM_BYTES.get(self.dtype, FLOAT32_BYTES)

    @property
    def is_aligned(self) -> bool:
        """True if all elements are at multiples of their size."""
        return not any(value % self.itemsize for value in (self.pointer, *self.strides))

    def emptied(self, axis: int) -> Operand:
        """Return the same array with an extent of 0 along an axis."""
        return replace(self, shape=(*self.shape[:axis], 0, *self.shape[axis + 1 :]))

    def broadcast(self, shape: tuple[int, ...]) -> Operand | None:
        """Return the same array with another shape, by NumPy's rules of broadcasting; None if it does not fit."""
        missing = len(shape) - len(self.shape)
        if missing < 0 or any(own not in (1, extent) for own, extent in zip(self.shape, shape[missing:])):
            return None
        own = [0 if extent == 1 else step for extent, step in zip(self.shape, self.strides)]
        return replace(self, shape=shape, strides=(*[0] * missing, *own))

    def as_rows(self) -> Operand:
        """Return the same elements with an axis of extent 1 before the last: vectors become matrices of one row."""
        extent, step = self.shape[-1], self.strides[-1]
        return replace(self, shape=(*self.shape[:-1], 1, extent), strides=(*self.strides[:-1], extent * step, step))

    def as_columns(self) -> Operand:
        """Return the same elements with an axis of extent 1 after the last: vectors become matrices of one column."""
        return replace(self, shape=(*self.shape, 1), strides=(*self.strides, self.itemsize))

    def matrix(self, device: int, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Matrix:
        """Return one of its matrices in the launcher's form."""
        (rows, cols), (row_stride, col_stride) = shape, strides
        owner = self.kind.view(self, pointer, shape, strides)
        return Matrix(pointer, rows, cols, row_stride, col_stride, device, owner, self.dtype)

    def vector(self) -> Vector:
        """Return a one-dimensional operand in the launcher's form."""
        owner = self.kind.view(self, self.pointer, self.shape, self.strides)
        return Vector(self.pointer, self.shape[0], self.strides[0], owner)

    def is_same(self, other: Operand) -> bool:
        """Return True if both have the same elements at the same addresses."""
        return (self.pointer, self.shape, self.strides) == (other.pointer, other.shape, other.strides)

    def overlaps(self, other: Operand) -> bool:
        """Return True if the two share at least one byte of an element; exact for interleaved arrays, too."""
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
        return low, high + self.itemsize

    def overlaps_itself(self) -> bool:
        """Return True if two of its elements share memory."""
        if 0 in self.shape:
            return False
        axes = sorted([(abs(step), extent) for step, extent in zip(self.strides, self.shape) if extent > 1])
        if axes and axes[0][0] < FLOAT32_BYTES:
            return True
        # In nearly every array, each axis steps over everything that the axes before it span.
        reach, nested = FLOAT32_BYTES, True
        for step, extent in axes:
            nested = nested and step >= reach
            reach += (extent - 1) * step
        if nested:
            return False
        if len(axes) > 2:
            return self._overlaps_itself_anyhow()
        (col_step, cols), (row_step, rows) = axes
        # Elements that are i rows and j columns apart can be as close as i * row_step - j * col_step bytes.
        down = np.arange(1, rows, dtype=np.int64) * row_step
        before = np.minimum(down // col_step, cols - 1)
        after = np.minimum(before + 1, cols - 1)
        return bool((np.abs(down - np.stack([before, after]) * col_step) < FLOAT32_BYTES).any())

    def _overlaps_itself_anyhow(self) -> bool:
        """Compute `overlaps_itself` for any number of axes."""
        # Two elements first differ along some axis; without loss of generality, the earlier one is at 0 there.
        part = addresses(self)
        for axis in range(part.ndim):
            before = (slice(None),) * axis
            first, others = part[*before, :1], part[*before, 1:]
            if others.size and np.shares_memory(first, others):
                return True
            part = first
        return False


def addresses(operand: Operand) -> np.ndarray:
    """Return an array at an operand's addresses, to compare them; elements in device memory must not be read."""
    dtype = FLOAT32 if operand.itemsize == FLOAT32_BYTES else operand.dtype
    return at_address(operand.array, operand.pointer, operand.shape, operand.strides, dtype=dtype)


@dataclass(frozen=True, slots=True)
class Copies:
    """Bytes that a product copies to the device, back to the host, and within host memory."""

    to_device: int = 0
    to_host: int = 0
    on_host: int = 0


@dataclass(slots=True)
class Product:
    """Operands, result and epilogue vectors of a product, as kernels access them."""

    a: Operand
    b: Operand
    c: Operand
    vectors: list[Operand]
    stream: Stream
    result: Any


class ArrayKind:
    """Arrays of one library, which is used only if the caller has imported it.

    The methods defined here are those for arrays in device memory, which is never copied: kernels accept any strides.
    """

    name = ""
    cast = "{0}.astype(numpy.float32)"  # expression that converts an array named {0} to float32

    def owns(self, array: Any) -> bool:
        """Return True if an object is one of this library's arrays."""
        raise NotImplementedError

    def owns_type(self, own: type) -> bool:
        """Return True if all objects of the type of one of this library's arrays are such arrays."""
        return False

    @property
    def family(self) -> str:
        """Name of the type of its results; arrays of one family may be operands of one product."""
        return self.name

    def describe(self, name: str, array: Any, stream: Stream | None) -> Operand:
        """Describe an array. `stream` is the caller's, if any, which is passed to DLPack producers."""
        raise NotImplementedError

    def streams(self, operands: list[Operand], device: int) -> list[Stream]:
        """Return the streams whose work the product must follow; by default, it runs on the first of them."""
        raise NotImplementedError

    def empty(self, shape: tuple[int, ...], device: int, stream: Stream) -> Operand:
        """Allocate a result that work on a stream will write."""
        raise NotImplementedError

    def view(self, operand: Operand, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """Return the object that keeps a part of an operand alive; in the simulator, that part's array."""
        return operand.array

    def placed(self, operand: Operand) -> Operand:
        """Return the operand with the layout in which kernels will access it."""
        return operand

    def copies(self, given: list[Operand], result: Operand, *, reads_out: bool) -> Copies:
        """Return what a product of these operands and vectors will copy."""
        return Copies()

    def keep(self, operands: list[Operand], device: int, stream: Stream, followed: list[Stream]) -> None:
        """Prevent reuse of memory until the stream has finished with it."""
        # A library reuses memory in the order of its own stream. It does not know about work on another stream; if the
        # operands' streams differ, at least one of them is not the product's.
        if not all(map(stream.same, followed)) or any(operand.kind is not self for operand in operands):
            streams.hold(stream, device, [operand.array for operand in operands])

    def copy(self, source: Operand, target: Operand, device: int, stream: Stream) -> None:
        """Copy an array into one of the same family in the order of a stream, broadcast as in NumPy."""
        raise NotImplementedError

    def probe(self, array: Any) -> Probe | None:
        """Return the probe for arrays of exactly this type; None if every call checks them in full."""
        return None

    def written(self, out: Operand) -> None:
        """Notify the library that the caller's `out` has been written."""

    def version(self, array: Any) -> Hashable:
        """Return what changes whenever the library knows that an array's contents have; a constant if it never does."""
        return None

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
        addend: Operand | None = None,
    ) -> Iterator[Product]:
        """Copy a product's operands to the device if needed and, on leaving, its result back.

        `shape` is that of the result. `addend` is an array to copy into the result beforehand.
        """
        streams.release_finished()
        read = [a, b, *vectors] if addend is None else [a, b, *vectors, addend]
        given = read if out is None else [a, b, out, *read[2:]]
        followed = self.streams(given, device)
        queue = followed[0] if stream is None else stream
        c = self.empty(shape, device, queue) if out is None else out
        # After the allocation, whose memory may have been used by earlier work on the library's stream.
        for producer in followed:
            streams.wait_for(queue, producer, device)
        if addend is not None:
            self.copy(addend, c, device, queue)
        yield Product(a, b, c, vectors, queue, c.array)
        self.keep([a, b, c, *read[2:]], device, queue, followed)
        if out is not None:
            out.kind.written(out)


def name_of(dtype: np.dtype) -> str:
    """Return the name of a NumPy dtype."""
    # NumPy formats a dtype far more slowly than it compares it.
    return "float32" if dtype == np.float32 else str(dtype)


def row_major(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the strides in bytes of a dense row-major array."""
    strides = [itemsize] * len(shape)
    for axis in reversed(range(len(shape) - 1)):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def imported(module: str, name: str) -> Any:
    """Return a class of a module that the caller has imported, else an empty tuple, for `isinstance`."""
    return getattr(sys.modules.get(module), name, ())
