"""NumPy arrays: copied to the device and back or, in the simulator, used in place."""

# ruff: noqa: D102 -- ArrayKind documents the methods

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from cuda.bindings import driver

from ..runtime.driver import call, device_scope
from . import streams
from .libraries import NumbaArrays
from .operand import ArrayKind, Copies, Operand, Product, at_address, name_of, row_major
from .streams import DEFAULT, THREAD_DEFAULT, Stream


class HostArrays(ArrayKind):
    """NumPy arrays, copied to buffers on the current device and back; the call returns when the product is complete."""

    name = "NumPy array"

    def owns(self, array: Any) -> bool:
        return isinstance(array, np.ndarray)

    def describe(self, name: str, array: Any, stream: Stream | None) -> Operand:
        if isinstance(array, np.ma.MaskedArray):
            advice = "out.data" if name == "out" else f"{name}.filled(value)"  # the result in a copy would be lost
            raise TypeError(f"{name} is a NumPy masked array; expected one without a mask; pass {advice}")
        dtype, (pointer, readonly) = name_of(array.dtype), array.__array_interface__["data"]
        return Operand(name, self, array, dtype, array.shape, array.strides, pointer, readonly=readonly)

    def placed(self, operand: Operand) -> Operand:
        """Return a dense layout without an address: column-major if each matrix is, else row-major."""
        shape = operand.shape
        if _by_columns(np.asarray(operand.array)):
            *batch, cols_stride, row_stride = row_major((*shape[:-2], shape[-1], shape[-2]), operand.itemsize)
            strides = (*batch, row_stride, cols_stride)
        else:
            strides = row_major(shape, operand.itemsize)
        return replace(operand, strides=strides, pointer=0)

    def copies(self, given: list[Operand], result: Operand, *, reads_out: bool) -> Copies:
        def size(x: Operand) -> int:
            return x.itemsize * prod(x.shape)

        there = [*given, result] if reads_out else given
        on_host = sum(size(x) for x in (*there, result) if x.array is not None and not _is_dense(x.array))
        return Copies(sum(map(size, there)), size(result), on_host)

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
        """Do as for device arrays, with copies to and from the device."""
        streams.release_finished()
        queue = THREAD_DEFAULT if stream is None else stream
        c = self.describe("out", np.empty(shape, np.float32), None) if out is None else out
        if addend is not None:
            self.copy(addend, c, device, queue)
        with device_scope(device), ExitStack() as buffers:
            x, y, *others = (buffers.enter_context(self._on_device(one, queue)) for one in (a, b, *vectors))
            z = buffers.enter_context(self._on_device(c, queue, copy=reads_out))
            yield Product(x, y, z, others, queue, c.array)
            _download(z, c.array, queue)

    def copy(self, source: Operand, target: Operand, device: int, stream: Stream) -> None:
        np.copyto(np.asarray(target.array), np.asarray(source.array))

    @contextmanager
    def _on_device(self, operand: Operand, stream: Stream, *, copy: bool = True) -> Iterator[Operand]:
        """Allocate a buffer on the current device for a host array until the context ends."""
        placed, size = self.placed(operand), operand.itemsize * prod(operand.shape)
        if not size:
            yield placed
            return
        pointer = int(call(driver.cuMemAlloc, size))
        try:
            if copy:
                array = operand.array.swapaxes(-1, -2) if _by_columns(operand.array) else operand.array
                dense = np.ascontiguousarray(array)  # the array itself if it is dense
                call(driver.cuMemcpyHtoDAsync, pointer, dense.ctypes.data, size, stream.handle)
            yield replace(placed, pointer=pointer)
        finally:
            call(driver.cuMemFree, pointer)  # waits for the work that still uses it


class SimulatedHostArrays(HostArrays):
    """NumPy arrays in the simulator, used in place; those whose elements are not aligned are copied."""

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
        """Yield the arrays themselves, or aligned copies."""
        c = self.empty(shape, device, DEFAULT) if out is None else out
        if addend is not None:
            self.copy(addend, c, device, DEFAULT)
        x, y, z, *others = (self._aligned(one) for one in (a, b, c, *vectors))
        yield Product(x, y, z, others, DEFAULT, c.array)
        if z is not c:
            self.copy(z, c, device, DEFAULT)

    def _aligned(self, operand: Operand) -> Operand:
        """Return an operand, or its dense copy if its elements are not aligned."""
        if operand.is_aligned or 0 in operand.shape:
            return operand
        array = np.asarray(operand.array)
        dense = array.swapaxes(-1, -2).copy().swapaxes(-1, -2) if _by_columns(array) else array.copy()
        return replace(self.placed(operand), array=dense, pointer=dense.ctypes.data)

    def view(self, operand: Operand, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        return at_address(operand.array, pointer, shape, strides, operand.readonly, operand.dtype)

    def empty(self, shape: tuple[int, ...], device: int, stream: Stream) -> Operand:
        return self.describe("out", np.empty(shape, np.float32), stream)

    def placed(self, operand: Operand) -> Operand:
        return operand if operand.is_aligned else super().placed(operand)

    def copies(self, given: list[Operand], result: Operand, *, reads_out: bool) -> Copies:
        return Copies()


class SimulatedNumbaArrays(SimulatedHostArrays):
    """Numba device arrays in the simulator, which are host memory."""

    name = NumbaArrays.name
    cast = NumbaArrays.cast

    def owns(self, array: Any) -> bool:
        return bool(getattr(type(array), "__cuda_ndarray__", False))

    def describe(self, name: str, array: Any, stream: Stream | None) -> Operand:
        return replace(super().describe(name, np.asarray(array), stream), array=array)

    def empty(self, shape: tuple[int, ...], device: int, stream: Stream) -> Operand:
        from numba import cuda

        return self.describe("out", cuda.device_array(shape, np.float32), stream)


def _by_columns(array: np.ndarray) -> bool:
    return array.ndim > 1 and not array.flags.c_contiguous and array.swapaxes(-1, -2).flags.c_contiguous


def _is_dense(array: np.ndarray) -> bool:
    return bool(array.flags.c_contiguous) or _by_columns(array)


def _download(place: Operand, array: np.ndarray, stream: Stream) -> None:
    """Copy a device buffer to its host array, and wait for the copy."""
    dense = array if _is_dense(array) else np.empty(array.shape, np.float32)
    if dense.size:
        call(driver.cuMemcpyDtoHAsync, dense.ctypes.data, place.pointer, dense.nbytes, stream.handle)
    call(driver.cuStreamSynchronize, stream.handle)
    if dense is not array:
        array[...] = dense
