"""Matrices and vectors in memory: an address, a layout, and the object that keeps the memory alive."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..kernels.product import VECTOR_BYTES, Layout
from ..simulator.switch import SIMULATOR


@dataclass(frozen=True, slots=True)
class Matrix:
    """A float32 matrix in memory.

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
        Object that keeps the memory alive; in the simulator, the 2-D NumPy array itself.
    """

    pointer: int
    rows: int
    cols: int
    row_stride: int
    col_stride: int
    device: int
    owner: Any

    @property
    def layout(self) -> Layout:
        """Extents, strides and alignment."""
        return Layout(self.rows, self.cols, self.row_stride, self.col_stride, self.pointer % VECTOR_BYTES)

    @property
    def transposed(self) -> Matrix:
        """The same memory with rows and columns swapped."""
        owner = self.owner.T if SIMULATOR and self.owner is not None else self.owner
        return Matrix(self.pointer, self.cols, self.rows, self.col_stride, self.row_stride, self.device, owner)

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
        self, owner: Any, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], readonly: bool
    ) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "data": (pointer, readonly),
            "shape": shape,
            "strides": strides,
            "typestr": "<f4",
            "version": 3,
        }


def at_address(
    owner: Any, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], readonly: bool = False
) -> np.ndarray:
    """Return a float32 array at an address of host memory."""
    return np.asarray(_Memory(owner, pointer, shape, strides, readonly))
