"""Matrices in host memory, piece by piece: straight from page-locked memory, or through a ring of such buffers.

Host threads copy between ordinary memory and the buffers. An array may lie in any way: what the device gets is dense,
by rows if the array's rows are contiguous or nothing is, else by columns.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from .blocking import Part, divided
from .queues import Device, Mark, Queue

__all__ = ["HostMatrix", "Ring", "reserve_file"]

ITEM = 4


class HostMatrix:
    """A 2-D float32 array in host memory.

    Attributes
    ----------
    array : ndarray
        As the caller knows it.
    by_columns : bool
        Whether its columns are contiguous and its rows are not; the device then has it by columns.
    direct : bool
        Whether copies reach it by themselves.
    """

    def __init__(self, array: np.ndarray, device: Device) -> None:
        self.array = array
        self.by_columns = self.lies_by_columns(array)
        # Of the array as it lies: its second axis is contiguous, if any is.
        self.lying = array.T if self.by_columns else array
        rows, cols = self.lying.shape
        dense = self.lying.strides[1] == ITEM and (self.lying.strides[0] >= ITEM * cols or rows == 1)
        self.direct = bool(dense and array.size and device.is_direct(*self._ends()))

    @staticmethod
    def lies_by_columns(array: np.ndarray) -> bool:
        """Whether the columns of an array are contiguous and its rows are not."""
        (rows, cols), (down, across) = array.shape, array.strides
        return down == ITEM and rows > 1 and across != ITEM and cols > 1

    def _ends(self) -> tuple[int, int]:
        """Addresses of the first byte and of the last."""
        first = int(self.lying.ctypes.data)
        far = sum((extent - 1) * step for extent, step in zip(self.lying.shape, self.lying.strides))
        return first, first + far + ITEM - 1

    def part(self, rows: Part, cols: Part) -> np.ndarray:
        """Some rows and columns, as they lie."""
        across, down = (rows, cols) if self.by_columns else (cols, rows)
        return self.lying[down.slice, across.slice]

    def place(self, device: Device, memory: Any, offset: int, rows: int, cols: int) -> Any:
        """Where a part of so many rows and columns goes on the device."""
        return device.matrix(memory, offset, *((cols, rows) if self.by_columns else (rows, cols)))

    def strides(self, rows: int, cols: int) -> tuple[int, int]:
        """Bytes between rows and between columns of such a part on the device."""
        return (ITEM, ITEM * rows) if self.by_columns else (ITEM * cols, ITEM)


class Ring:
    """Page-locked buffers in turn, for copies in one direction, and the threads that fill or empty them.

    A buffer's next user waits for the one before, which the threads were given earlier: so none waits for ever.
    """

    def __init__(self, device: Device, pool: ThreadPoolExecutor, count: int, elements: int) -> None:
        self._device, self._pool, self._count, self._elements = device, pool, count, elements
        self._buffers: list[np.ndarray] = []
        self._users: list[Future[Any] | None] = []
        self._next = 0

    def _pieces(self, array: np.ndarray) -> Iterator[tuple[Part, Part]]:
        """Rows and columns of parts that a buffer holds."""
        rows, cols = array.shape
        for across in divided(cols, self._elements):
            for down in divided(rows, max(1, self._elements // across.extent)):
                yield down, across

    def _take(self, shape: tuple[int, ...]) -> tuple[int, np.ndarray]:
        """The next buffer, made when it is first needed: its number, and a dense matrix in it."""
        number, self._next = self._next, (self._next + 1) % self._count
        if number == len(self._buffers):
            self._buffers.append(self._device.pinned(self._elements))
            self._users.append(None)
        return number, self._buffers[number][: shape[0] * shape[1]].reshape(shape)

    def to_device(self, queue: Queue, target: Any, source: np.ndarray) -> None:
        """Copy a matrix from ordinary memory to one on the device; returns when all of it is enqueued."""
        jobs = []
        for down, across in self._pieces(source):
            part, place = source[down.slice, across.slice], self._device.part(target, down, across)
            number, buffer = self._take(part.shape)
            job = self._pool.submit(self._fill, self._users[number], queue, place, buffer, part)
            self._users[number] = job
            jobs.append(job)
        for job in jobs:
            job.result()

    def _fill(
        self, before: Future[Mark] | None, queue: Queue, target: Any, buffer: np.ndarray, source: np.ndarray
    ) -> Mark:
        if before is not None:
            before.result().wait()
        np.copyto(buffer, source)
        with self._device.scope():
            queue.to_device(target, buffer)
            return queue.record()

    def to_host(self, queue: Queue, target: np.ndarray, source: Any) -> list[Future[Any]]:
        """Copy a matrix on the device to ordinary memory; returns when all copies off the device are enqueued.

        The target is complete when what is returned is done.
        """
        jobs = []
        for down, across in self._pieces(target):
            part, place = target[down.slice, across.slice], self._device.part(source, down, across)
            number, buffer = self._take(part.shape)
            if (before := self._users[number]) is not None:
                before.result()  # the buffer is empty
            queue.to_host(buffer, place)
            job = self._pool.submit(self._empty, queue.record(), part, buffer)
            self._users[number] = job
            jobs.append(job)
        return jobs

    @staticmethod
    def _empty(mark: Mark, target: np.ndarray, buffer: np.ndarray) -> None:
        mark.wait()
        np.copyto(target, buffer)


def reserve_file(array: np.ndarray) -> None:
    """See to it that the file behind a memory map has its space on the disk, before anything is computed.

    A page that is written to a file for which the disk has no space kills the process.

    Raises
    ------
    OSError
        if the disk has not so much left.
    """
    if not isinstance(array, np.memmap) or array.mode not in ("r+", "w+") or not hasattr(os, "posix_fallocate"):
        return
    name = array.filename
    if name is None or not array.size:
        return
    with open(name, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
                return  # a file system that cannot be asked
            raise OSError(
                error.errno,
                f"the disk has no room for the {size:,} bytes of out's file ({error.strerror}); nothing was computed, "
                "a and b are as they were; free some space, or put out elsewhere",
                str(name),
            ) from error
