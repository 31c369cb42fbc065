"""Concurrent queues of a device, marks in them, and device memory, on which a streamed product runs.

On the hardware, a queue is a stream and a mark is an event. In the simulator, a queue is a thread that does its work in
order, at its own pace. Work that should wait for a mark but does not finds unfinished data.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from cuda.bindings import driver

from ..device.units import FLOAT32_BYTES, ceil_div
from ..runtime import pinned_memory
from ..runtime import workspace as workspaces
from ..runtime.driver import call, device_scope, failure, primary_context, relaxed_capture
from ..runtime.workspace import Workspace
from ..simulator.switch import SIMULATOR
from .blocking import Part

__all__ = ["Device", "Mark", "Queue", "open_device"]

MAX_PITCH = (1 << 31) - 1  # most bytes between rows that a copy of a matrix takes


class Mark(Protocol):
    """Place in a queue."""

    def wait(self) -> None:
        """Block the calling thread until the queue has reached the mark, or its device has failed."""


class Queue(Protocol):
    """Work of a device, in order. `stream` is a handle for kernels."""

    stream: int

    def record(self, again: Mark | None = None) -> Mark:
        """Mark the place behind all work so far; reuse `again`, if given, a mark that nobody waits for any more."""

    def follow(self, mark: Mark) -> None:
        """Make the queue wait for a mark of another queue."""

    def to_device(self, target: Any, source: np.ndarray) -> None:
        """Copy a matrix with contiguous rows from page-locked memory to a matrix on the device."""

    def to_host(self, target: np.ndarray, source: Any) -> None:
        """Copy a matrix on the device to a matrix with contiguous rows in page-locked memory."""

    def run(self, work: Callable[[int], None]) -> None:
        """Call `work`, which enqueues kernels on the stream that it is given."""


class Device(Protocol):
    """Device with its memory and queues; everything is freed at the end of `open_device`."""

    ordinal: int

    def queue(self) -> Queue:
        """Return a new queue."""

    def allocate(self, size: int) -> Any:
        """Allocate all device memory that the product takes, uninitialised; `size` is in bytes."""

    def matrix(self, memory: Any, offset: int, rows: int, cols: int) -> Any:
        """Return a dense float32 matrix within device memory, in the form that copies take."""

    def part(self, matrix: Any, down: Part, across: Part) -> Any:
        """Return some rows and columns of a matrix."""

    def place(self, matrix: Any, turned: bool) -> tuple[int, Any]:
        """Address of a matrix, and the array that the simulator reads, transposed if `turned`."""

    def address(self, memory: Any) -> int:
        """Address of the first byte of device memory."""

    def clear(self, workspace: Workspace) -> None:
        """Set a workspace's counters to 0."""

    def pinned(self, elements: int) -> np.ndarray:
        """Allocate page-locked host memory."""

    def is_direct(self, first: int, last: int) -> bool:
        """Return True if copies access the host memory between two addresses directly."""

    def scope(self) -> Any:
        """Return the context in which a thread uses the device."""

    def enter(self) -> None:
        """Enter this context in a thread of our own, until it ends."""


@contextmanager
def open_device(ordinal: int) -> Iterator[Device]:
    """Provide a device for one streamed product; at the end, wait for its queues and free all memory."""
    made: Any = SimulatedDevice(ordinal) if SIMULATOR else CudaDevice(ordinal)
    try:
        yield made
    except BaseException:
        with suppress(RuntimeError):  # once a device has failed, all else fails too, with no new information
            made.close()
        raise
    made.close()


# ---------------------------------------------------------------------------------------------------------- hardware


class Placed(NamedTuple):
    """Matrix on the device with contiguous rows, `pitch` bytes apart."""

    pointer: int
    rows: int
    cols: int
    pitch: int


class CudaMark:
    """CUDA event."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def wait(self) -> None:
        call(driver.cuEventSynchronize, self.event)


class CudaQueue:
    """CUDA stream."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self.stream = int(call(driver.cuStreamCreate, int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))

    def record(self, again: Any = None) -> CudaMark:
        mark: CudaMark = self._device.mark() if again is None else again
        call(driver.cuEventRecord, mark.event, self.stream)
        return mark

    def follow(self, mark: Any) -> None:
        call(driver.cuStreamWaitEvent, self.stream, mark.event, 0)

    def to_device(self, target: Placed, source: np.ndarray) -> None:
        self._copy(source, target, up=True)

    def to_host(self, target: np.ndarray, source: Placed) -> None:
        self._copy(target, source, up=False)

    def _copy(self, host: np.ndarray, place: Placed, *, up: bool) -> None:
        assert host.shape == (place.rows, place.cols)
        rows, width, address, device = place.rows, FLOAT32_BYTES * place.cols, int(host.ctypes.data), place.pointer
        pitch = width if rows == 1 else host.strides[0]
        if rows == 1 or pitch == place.pitch == width:
            self._copy_bytes(address, device, rows * width, up=up)
            return
        if max(pitch, place.pitch) > MAX_PITCH:
            for row in range(rows):
                self._copy_bytes(address + row * pitch, device + row * place.pitch, width, up=up)
            return
        both = driver.CUDA_MEMCPY2D()
        both.WidthInBytes, both.Height = width, rows
        on_host, on_device = driver.CUmemorytype.CU_MEMORYTYPE_HOST, driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        if up:
            both.srcMemoryType, both.srcHost, both.srcPitch = on_host, address, pitch
            both.dstMemoryType, both.dstDevice, both.dstPitch = on_device, device, place.pitch
        else:
            both.srcMemoryType, both.srcDevice, both.srcPitch = on_device, device, place.pitch
            both.dstMemoryType, both.dstHost, both.dstPitch = on_host, address, pitch
        call(driver.cuMemcpy2DAsync, both, self.stream)

    def _copy_bytes(self, host: int, device: int, size: int, *, up: bool) -> None:
        if up:
            call(driver.cuMemcpyHtoDAsync, device, host, size, self.stream)
        else:
            call(driver.cuMemcpyDtoHAsync, host, device, size, self.stream)

    def run(self, work: Callable[[int], None]) -> None:
        work(self.stream)


class CudaDevice:
    """GPU."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self._queues: list[CudaQueue] = []
        self._events: list[Any] = []
        self._memory = 0
        self._host = ExitStack()
        self._lock = threading.Lock()

    @contextmanager
    def scope(self) -> Iterator[None]:
        with device_scope(self.ordinal), relaxed_capture():
            yield

    def enter(self) -> None:
        call(driver.cuCtxSetCurrent, primary_context(self.ordinal))
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        call(driver.cuThreadExchangeStreamCaptureMode, mode)

    def queue(self) -> CudaQueue:
        with self.scope():
            self._queues.append(CudaQueue(self))
        return self._queues[-1]

    def mark(self) -> CudaMark:
        flags = driver.CUevent_flags
        event = call(driver.cuEventCreate, int(flags.CU_EVENT_DISABLE_TIMING) | int(flags.CU_EVENT_BLOCKING_SYNC))
        with self._lock:
            self._events.append(event)
        return CudaMark(event)

    def allocate(self, size: int) -> int:
        with self.scope():
            status, pointer = driver.cuMemAlloc(max(size, 1))
            if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                raise MemoryError(
                    f"device {self.ordinal} has no {size:,} bytes left; free some of its memory, or lower memory_limit"
                )
            if status != driver.CUresult.CUDA_SUCCESS:
                raise failure("cuMemAlloc", status)
            self._memory = int(pointer)
        return self._memory

    def matrix(self, memory: int, offset: int, rows: int, cols: int) -> Placed:
        return Placed(memory + offset, rows, cols, FLOAT32_BYTES * cols)

    def part(self, matrix: Placed, down: Part, across: Part) -> Placed:
        pointer = matrix.pointer + down.begin * matrix.pitch + FLOAT32_BYTES * across.begin
        return Placed(pointer, down.extent, across.extent, matrix.pitch)

    def place(self, matrix: Placed, turned: bool) -> tuple[int, Any]:
        return matrix.pointer, None

    def address(self, memory: int) -> int:
        return memory

    def clear(self, workspace: Workspace) -> None:
        with self.scope():
            workspaces.clear(workspace.words[1], workspace.counters)

    def pinned(self, elements: int) -> np.ndarray:
        with self.scope(), self._lock:  # one thread at a time
            return self._host.enter_context(pinned_memory.pinned(elements))

    def is_direct(self, first: int, last: int) -> bool:
        with self.scope():
            return pinned_memory.is_page_locked(first, last)

    def close(self) -> None:
        """Wait for all work and free everything; if a step fails, free the rest and raise the first failure."""
        with self.scope():
            steps: list[Callable[[], object]] = []
            steps += [partial(call, driver.cuStreamSynchronize, made.stream) for made in self._queues]
            steps += [partial(call, driver.cuStreamDestroy, made.stream) for made in self._queues]
            steps += [partial(call, driver.cuEventDestroy, event) for event in self._events]
            steps += [self._host.close]
            if self._memory:
                steps.append(partial(call, driver.cuMemFree, self._memory))
            failures = []
            for step in steps:
                try:
                    step()
                except RuntimeError as error:
                    failures.append(error)
        if failures:
            raise failures[0]


# --------------------------------------------------------------------------------------------------------- simulator


class SimulatedMark:
    """Event of a queue's thread."""

    def __init__(self, queue_of_it: SimulatedQueue) -> None:
        self._queue, self.event = queue_of_it, threading.Event()

    def wait(self) -> None:
        """Wait, unless the queue has failed."""
        while not self.event.wait(0.01):
            self._queue.check()
        self._queue.check()


class SimulatedQueue:
    """Thread that does the enqueued work in order."""

    stream = 0
    delay_s = 0.0  # before each piece of work; tests draw it at random

    def __init__(self) -> None:
        self._work: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name="queue", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while (work := self._work.get()) is not None:
            if self._error is None:
                try:
                    time.sleep(self.delay_s)
                    work()
                except BaseException as error:
                    self._error = error

    def check(self) -> None:
        """Raise the exception that the work raised, if any."""
        if self._error is not None:
            raise self._error

    def record(self, again: Any = None) -> SimulatedMark:
        assert again is None or again.event.is_set(), "a mark is used again while somebody may wait for it"
        self.check()
        mark = SimulatedMark(self)
        self._work.put(mark.event.set)
        return mark

    def follow(self, mark: Any) -> None:
        self._work.put(mark.wait)

    def to_device(self, target: Any, source: np.ndarray) -> None:
        self._work.put(partial(np.copyto, target, source))

    def to_host(self, target: np.ndarray, source: Any) -> None:
        self._work.put(partial(np.copyto, target, source))

    def run(self, work: Callable[[int], None]) -> None:
        self._work.put(partial(work, self.stream))

    def close(self) -> None:
        """End the thread after the enqueued work."""
        self._work.put(None)
        self._thread.join()


class SimulatedDevice:
    """Host memory that is used through queues."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self._queues: list[SimulatedQueue] = []

    def scope(self) -> Any:
        return ExitStack()

    def enter(self) -> None:
        """Do nothing."""

    def queue(self) -> SimulatedQueue:
        self._queues.append(SimulatedQueue())
        return self._queues[-1]

    def allocate(self, size: int) -> np.ndarray:
        return np.full(ceil_div(size, FLOAT32_BYTES), np.nan, np.float32)

    def matrix(self, memory: np.ndarray, offset: int, rows: int, cols: int) -> np.ndarray:
        return memory[offset // FLOAT32_BYTES :][: rows * cols].reshape(rows, cols)

    def part(self, matrix: np.ndarray, down: Part, across: Part) -> np.ndarray:
        return matrix[down.slice, across.slice]

    def place(self, matrix: np.ndarray, turned: bool) -> tuple[int, Any]:
        return int(matrix.ctypes.data), matrix.T if turned else matrix

    def address(self, memory: np.ndarray) -> int:
        return int(memory.ctypes.data)

    def clear(self, workspace: Workspace) -> None:
        """Do nothing: kernels in the simulator are given memory of their own."""

    def pinned(self, elements: int) -> np.ndarray:
        return np.full(elements, np.nan, np.float32)

    def is_direct(self, first: int, last: int) -> bool:
        return False

    def close(self) -> None:
        """End all queues."""
        for made in self._queues:
            made.close()
