"""Matrices and vectors in memory: an address, a layout, and the object that keeps the memory alive."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..device.units import VECTOR_BYTES
from ..kernels.product import FLOAT32, Layout
from ..simulator.switch import SIMULATOR


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix in memory.

    Attributes
    ----------
    pointer : int
        Address of element (0, 0).
    rows, cols : int
        Extents in elements.
    row_stride, col_stride : int
        Bytes from an element to the next row's and to the next column's; may be negative or 0.
    device : int
        Ordinal of the device whose memory it is.
    owner : object
        Object that keeps the memory alive; in the simulator, the 2-D NumPy array itself, of uint16 for 16-bit dtypes.
    dtype : str
        One of `kernels.product.DTYPES`.
    """

    pointer: int
    rows: int
    cols: int
    row_stride: int
    col_stride: int
    device: int
    owner: Any
    dtype: str = FLOAT32

    @property
    def layout(self) -> Layout:
        """Extents, strides and alignment."""
        offset = self.pointer % VECTOR_BYTES
        return Layout(self.rows, self.cols, self.row_stride, self.col_stride, offset, self.dtype)

    @property
    def transposed(self) -> Matrix:
        """Matrix of the same memory with rows and columns swapped."""
        owner = self.owner.T if SIMULATOR and self.owner is not None else self.owner
        strides = self.col_stride, self.row_stride
        return Matrix(self.pointer, self.cols, self.rows, *strides, self.device, owner, self.dtype)

    @property
    def words(self) -> tuple[int, int, int, int, int]:
        """Address, extents and strides: the words that a kernel is passed."""
        return (self.pointer, self.rows, self.cols, self.row_stride, self.col_stride)


@dataclass(frozen=True)
class Vector:
    """A float32 vector in memory.

    Attributes
    ----------
    pointer : int
        Address of the first element.
    size, stride : int
        Elements, and bytes from one to the next, which may be negative or 0.
    owner : object
        Object that keeps the memory alive; in the simulator, the NumPy array itself.
    """

    pointer: int
    size: int
    stride: int
    owner: Any = field(compare=False)


class _Memory:
    """Array interface of memory at an address; keeps its owner alive."""

    def __init__(
        self, owner: Any, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], readonly: bool, dtype: str
    ) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "data": (pointer, readonly),
            "shape": shape,
            "strides": strides,
            "typestr": "<f4" if dtype == FLOAT32 else "<u2",
            "version": 3,
        }


def at_address(
    owner: Any,
    pointer: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    readonly: bool = False,
    dtype: str = FLOAT32,
) -> np.ndarray:
    """Return a float32 array at an address of host memory; for 16-bit dtypes, one of uint16."""
    return np.asarray(_Memory(owner, pointer, shape, strides, readonly, dtype))
