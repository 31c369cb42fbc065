"""Copies of matrices in host memory, piece by piece: directly if page-locked, else through a ring of such buffers.

Host threads copy between ordinary memory and the buffers. An array may have any layout. On the device it is dense: by
rows if the array's rows are contiguous or nothing is, else by columns.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..device.units import FLOAT32_BYTES
from .blocking import Part, divided
from .queues import Device, Mark, Queue

__all__ = ["Flag", "HostMatrix", "Ring", "Stopped", "copying_threads", "mapped_files", "reserve_file"]

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class HostMatrix:
    """2-D float32 array in host memory.

    Attributes
    ----------
    lying : ndarray
        The array, or its transpose if it is stored by columns: the second axis is contiguous, if any is.
    by_columns : bool
        True if its columns are contiguous and its rows are not; the device then stores it by columns.
    direct : bool
        True if copies access it directly, without a buffer.
    """

    def __init__(self, array: np.ndarray, device: Device) -> None:
        self.by_columns = self.lies_by_columns(array)
        self.lying = array.T if self.by_columns else array
        rows, cols = self.lying.shape
        down, across = self.lying.strides
        dense = (across == FLOAT32_BYTES or cols == 1) and (down >= FLOAT32_BYTES * cols or rows == 1)
        self.direct = bool(dense and array.size and device.is_direct(*self._ends()))

    @staticmethod
    def lies_by_columns(array: np.ndarray) -> bool:
        """Return True if the columns of an array are contiguous and its rows are not."""
        (rows, cols), (down, across) = array.shape, array.strides
        return down == FLOAT32_BYTES and rows > 1 and across != FLOAT32_BYTES and cols > 1

    def _ends(self) -> tuple[int, int]:
        """Return the addresses of the first and the last byte."""
        first = int(self.lying.ctypes.data)
        far = sum((extent - 1) * step for extent, step in zip(self.lying.shape, self.lying.strides))
        return first, first + far + FLOAT32_BYTES - 1

    def part(self, rows: Part, cols: Part) -> np.ndarray:
        """Return some rows and columns, transposed if the array is stored by columns."""
        across, down = (rows, cols) if self.by_columns else (cols, rows)
        return self.lying[down.slice, across.slice]

    def place(self, device: Device, memory: Any, offset: int, rows: int, cols: int) -> Any:
        """Return the matrix on the device for a part of `rows` rows and `cols` columns."""
        return device.matrix(memory, offset, *((cols, rows) if self.by_columns else (rows, cols)))

    def strides(self, rows: int, cols: int) -> tuple[int, int]:
        """Return the bytes between rows, and between columns, of such a part on the device."""
        return (FLOAT32_BYTES, FLOAT32_BYTES * rows) if self.by_columns else (FLOAT32_BYTES * cols, FLOAT32_BYTES)


class Stopped(Exception):
    """Another thread has failed, or the caller was interrupted."""


class Flag:
    """Flag that any thread sets once; it has no lock, since an interrupted thread might leave it locked."""

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        """Return True if the flag is set."""
        return self._is_set

    def set(self) -> None:
        """Set the flag."""
        self._is_set = True


@contextmanager
def copying_threads(device: Device, count: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """Provide threads that may use a device; at the end, jobs that have not begun are dropped."""
    pool = ThreadPoolExecutor(count, name, initializer=device.enter)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


class Buffer:
    """Page-locked buffer of a ring, with the job that has it and the mark behind the copy that uses it."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory
        self.user: Future[Any] | None = None
        self.mark: Mark | None = None

    def matrix(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return a dense matrix in the buffer."""
        return self.memory[: shape[0] * shape[1]].reshape(shape)


class Ring:
    """Page-locked buffers, used in turn for copies in one direction, and the threads that fill or empty them.

    A buffer's next job waits for its previous one, which was given to the threads earlier, so no job waits forever.

    Parameters
    ----------
    device : Device
        Device whose memory is copied to or from.
    pool : ThreadPoolExecutor
        Threads that fill or empty the buffers.
    count, elements : int
        Number of buffers, and elements of each.
    stop : Flag
        Ends copies, which then raise `Stopped`.
    """

    def __init__(self, device: Device, pool: ThreadPoolExecutor, count: int, elements: int, stop: Flag) -> None:
        self._device, self._pool, self._count, self._elements, self._stop = device, pool, count, elements, stop
        self._buffers: list[Buffer] = []
        self._next = 0

    def _pieces(self, array: np.ndarray) -> Iterator[tuple[Part, Part]]:
        """Yield rows and columns of parts that fit into a buffer."""
        rows, cols = array.shape
        for across in divided(cols, self._elements):
            for down in divided(rows, max(1, self._elements // across.extent)):
                if self._stop.is_set():
                    raise Stopped
                yield down, across

    def _take(self) -> Buffer:
        """Return the next buffer, allocated when it is first needed."""
        number, self._next = self._next, (self._next + 1) % self._count
        if number == len(self._buffers):
            self._buffers.append(Buffer(self._device.pinned(self._elements)))
        return self._buffers[number]

    def to_device(self, queue: Queue, target: Any, source: np.ndarray) -> None:
        """Copy a matrix from ordinary memory to the device; return when all of it is enqueued."""
        jobs = []
        for down, across in self._pieces(source):
            part, place = source[down.slice, across.slice], self._device.part(target, down, across)
            buffer = self._take()
            buffer.user = self._pool.submit(self._fill, buffer.user, buffer, queue, place, part)
            jobs.append(buffer.user)
        for job in jobs:
            if not job.result():
                raise Stopped

    def _fill(self, before: Future[Any] | None, buffer: Buffer, queue: Queue, target: Any, source: np.ndarray) -> bool:
        """Copy to a buffer and on; return False after a stop: an exception would stay in the job and keep its frame."""
        if (before is not None and not before.result()) or self._stop.is_set():
            return False
        if buffer.mark is not None:
            buffer.mark.wait()
        matrix = buffer.matrix(source.shape)
        np.copyto(matrix, source)
        queue.to_device(target, matrix)
        buffer.mark = queue.record(buffer.mark)
        return True

    def to_host(self, queue: Queue, target: np.ndarray, source: Any) -> list[Future[Any]]:
        """Copy a matrix on the device to ordinary memory; return when all copies off the device are enqueued.

        The target is complete when the returned futures are done.
        """
        jobs = []
        for down, across in self._pieces(target):
            part, place = target[down.slice, across.slice], self._device.part(source, down, across)
            buffer = self._take()
            if buffer.user is not None:
                buffer.user.result()  # when it ends, the buffer is empty
            matrix = buffer.matrix(part.shape)
            queue.to_host(matrix, place)
            buffer.mark = queue.record(buffer.mark)
            buffer.user = self._pool.submit(self._empty, buffer.mark, part, matrix)
            jobs.append(buffer.user)
        return jobs

    @staticmethod
    def _empty(mark: Mark, target: np.ndarray, matrix: np.ndarray) -> None:
        mark.wait()
        np.copyto(target, matrix)


def mapped_files(array: np.ndarray) -> list[tuple[Path, int, int]]:
    """Return the parts of files that writing to an array changes: path, first byte, and number of bytes.

    The parts are read from Linux's list of the process's mappings, so it does not matter what mapped the file:
    `numpy.memmap`, `mmap.mmap`, or shared memory. The list is empty for an array in memory, and on other systems. A
    file that no longer has a name has a path that does not exist.
    """
    if not array.size:
        return []
    reach = [(extent - 1) * step for extent, step in zip(array.shape, array.strides)]
    low = int(array.ctypes.data) + sum(min(step, 0) for step in reach)
    high = low + sum(map(abs, reach)) + array.itemsize
    try:
        lines = Path("/proc/self/maps").read_bytes().split(b"\n")
    except OSError:
        return []
    found = []
    for line in lines:
        fields = line.split(None, 5)  # addresses, permissions, offset in the file, device, inode, path
        if len(fields) < 6 or not fields[1].startswith(b"rw") or not fields[1].endswith(b"s"):
            continue
        begin, end = (int(address, 16) for address in fields[0].split(b"-"))
        first, last = max(low, begin), min(high, end)
        if first < last:
            path = Path(os.fsdecode(fields[5].replace(rb"\012", b"\n")))
            found.append((path, int(fields[2], 16) + first - begin, last - first))
    return found


def _is_locked(path: Path) -> bool:
    """Return True if this process has a lock on a file (`fcntl.lockf`), which it loses when it closes the file."""
    try:
        lines = Path("/proc/locks").read_bytes().splitlines()
    except OSError:
        return False
    process, file = b"%d" % os.getpid(), b":%d" % path.stat().st_ino
    for line in lines:
        fields = line.split()  # number, kind, mode, access, process, device and inode, begin, end
        if b"POSIX" in fields[:2] and fields[-4:-3] == [process] and fields[-3].endswith(file):
            return True
    return False


def reserve_file(array: np.ndarray) -> None:
    """Reserve disk space for the mapped files that back an array, before anything is computed.

    Writing to a page of a mapped file for which the disk has no space ends the process (SIGBUS). Where the system
    cannot reserve space, the file no longer has a name, or this process has locked it, nothing is done.

    Raises
    ------
    OSError
        If the disk has too little space left.
    """
    if not hasattr(os, "posix_fallocate"):
        return
    for path, begin, size in mapped_files(array):
        try:
            if not path.is_file() or _is_locked(path):  # deleted, a device, or locked
                continue
            with path.open("r+b") as file:
                if os.fstat(file.fileno()).st_size < begin + size:
                    continue  # another file, mounted over it
                os.posix_fallocate(file.fileno(), begin, size)
        except OSError as error:
            if error.errno not in NO_ROOM:
                continue
            raise OSError(
                error.errno,
                f"the disk has no room for {size:,} bytes of out ({error.strerror}); nothing was computed, a and b are "
                "as they were; free some space, or put out elsewhere",
                str(path),
            ) from error
