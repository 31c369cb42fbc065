"""NumPy arrays: copied to the device and back or, in the simulator, used where they are."""

# ruff: noqa: D102 -- what the methods are for is said once, in ArrayKind

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from cuda.bindings import driver
from numba import cuda

from ..driver import call, device_scope
from ..launch import Matrix
from . import streams
from .libraries import NumbaArrays
from .operand import ITEM, ArrayKind, Operand, Product, name_of
from .streams import DEFAULT, THREAD_DEFAULT, Stream


class HostArrays(ArrayKind):
    """NumPy arrays, copied to buffers on the current device and back. The product is done when the call returns."""

    name = "NumPy array"

    def owns(self, array: Any) -> bool:
        return isinstance(array, np.ndarray)

    def describe(self, name: str, array: Any, stream: Stream | None) -> Operand:
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(f"{name} is a NumPy masked array; expected one without a mask; pass {name}.filled(value)")
        dtype, (pointer, readonly) = name_of(array.dtype), array.__array_interface__["data"]
        return Operand(name, self, array, dtype, array.shape, array.strides, pointer, readonly=readonly)

    @contextmanager
    def product(
        self, a: Operand, b: Operand, out: Operand | None, *, reads_out: bool, device: int, stream: Stream | None
    ) -> Iterator[Product]:
        """As for device arrays, by way of copies."""
        streams.release_finished()
        queue = THREAD_DEFAULT if stream is None else stream
        result = np.empty((a.shape[0], b.shape[1]), np.float32) if out is None else out.array
        with device_scope(device), ExitStack() as buffers:
            a_matrix = buffers.enter_context(_on_device(a.array, a.shape, device, queue, copy=True))
            b_matrix = buffers.enter_context(_on_device(b.array, b.shape, device, queue, copy=True))
            c_matrix = buffers.enter_context(_on_device(result, result.shape, device, queue, copy=reads_out))
            yield Product(a_matrix, b_matrix, c_matrix, queue, result)
            _download(c_matrix, result, queue)


class SimulatedHostArrays(HostArrays):
    """NumPy arrays in the simulator, whose kernels reach them where they are."""

    @contextmanager
    def product(
        self, a: Operand, b: Operand, out: Operand | None, *, reads_out: bool, device: int, stream: Stream | None
    ) -> Iterator[Product]:
        """The arrays themselves."""
        c = self.empty(a.shape[0], b.shape[1], device, DEFAULT) if out is None else out
        yield Product(_simulated(a), _simulated(b), _simulated(c), DEFAULT, c.array)

    def empty(self, rows: int, cols: int, device: int, stream: Stream) -> Operand:
        return self.describe("out", np.empty((rows, cols), np.float32), stream)


class SimulatedNumbaArrays(SimulatedHostArrays):
    """Numba device arrays in the simulator: host memory behind another face."""

    name = NumbaArrays.name
    cast = NumbaArrays.cast

    def owns(self, array: Any) -> bool:
        return bool(getattr(type(array), "__cuda_ndarray__", False))

    def describe(self, name: str, array: Any, stream: Stream | None) -> Operand:
        return replace(super().describe(name, np.asarray(array), stream), array=array)

    def empty(self, rows: int, cols: int, device: int, stream: Stream) -> Operand:
        return self.describe("out", cuda.device_array((rows, cols), np.float32), stream)


def _simulated(operand: Operand) -> Matrix:
    """A matrix whose owner is the NumPy view that the simulated kernel indexes."""
    view = np.asarray(operand.array)[: operand.shape[0], : operand.shape[1]]
    return replace(operand, array=view).matrix(0)


@contextmanager
def _on_device(
    array: np.ndarray, shape: tuple[int, ...], device: int, stream: Stream, *, copy: bool
) -> Iterator[Matrix]:
    """A device buffer for `shape` elements of a host array, laid out as the array is if that is dense, else by rows."""
    rows, cols = shape
    size = ITEM * rows * cols
    by_columns = array.flags.f_contiguous and not array.flags.c_contiguous
    strides = (ITEM, ITEM * rows) if by_columns else (ITEM * cols, ITEM)
    if not size:
        yield Matrix(0, rows, cols, *strides, device, None)
        return
    pointer = int(call(driver.cuMemAlloc, size))
    try:
        if copy:
            dense = np.asarray(array, order="F" if by_columns else "C")  # the array itself if it is dense
            call(driver.cuMemcpyHtoDAsync, pointer, dense.ctypes.data, size, stream.handle)
        yield Matrix(pointer, rows, cols, *strides, device, None)
    finally:
        call(driver.cuMemFree, pointer)  # waits for work that still uses it


def _download(matrix: Matrix, array: np.ndarray, stream: Stream) -> None:
    """Copy a device buffer to the host array that it was made for, and wait for it."""
    dense = array if array.flags.c_contiguous or array.flags.f_contiguous else np.empty(array.shape, np.float32)
    if dense.size:
        call(driver.cuMemcpyDtoHAsync, dense.ctypes.data, matrix.pointer, dense.nbytes, stream.handle)
    call(driver.cuStreamSynchronize, stream.handle)
    if dense is not array:
        array[...] = dense
