"""Streams of any library: their handles, the order between two of them, and memory that their work still uses.

A stream's handle is the driver's own, an integer: 1 is the legacy default stream, 2 the calling thread's default
stream, and 0 one of these (see `zero_is_per_thread`). In the simulator, only `Stream` has a meaning.
"""

from __future__ import annotations

import numbers
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver

from ..runtime import device as devices
from ..runtime.driver import call, device_scope, relaxed_capture, zero_is_per_thread


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream's handle, and the object, if any, that would destroy the stream when it is released."""

    handle: int
    owner: Any = None

    @classmethod
    def of(cls, stream: Any) -> Stream:
        """Read a handle, an object with ``__cuda_stream__``, or a stream of Numba, CuPy or PyTorch.

        Raises
        ------
        TypeError
            for anything else.
        """
        is_handle = isinstance(stream, numbers.Integral | driver.CUstream) and not isinstance(stream, bool)
        if is_handle and int(stream) >= 0:
            return cls(int(stream))
        if hasattr(stream, "__cuda_stream__"):
            pair = stream.__cuda_stream__
            return cls(int((pair() if callable(pair) else pair)[1]), stream)
        for attribute in ("cuda_stream", "ptr", "handle"):  # PyTorch, CuPy, Numba
            if hasattr(stream, attribute):
                value = getattr(stream, attribute)
                return cls(int(getattr(value, "value", value) or 0), stream)
        if type(stream).__module__.startswith("numba.cuda.simulator"):
            return cls(0, stream)  # the simulator's streams have no handle, and need none
        raise TypeError(
            f"stream is {stream!r}, of type {type(stream).__qualname__}; expected a stream of Numba, CuPy or PyTorch, "
            "an object with __cuda_stream__, or a handle (an int, not negative); pass None for the current stream"
        )

    @property
    def is_default(self) -> bool:
        """True if the handle is one that libraries have for their default stream: 0 or 1."""
        return self.handle in (0, 1)

    @property
    def named(self) -> Stream:
        """The same stream; of the handle 0, the default stream that it means, by that stream's own handle."""
        if self.handle:
            return self
        return THREAD_DEFAULT if zero_is_per_thread() else LEGACY_DEFAULT

    @property
    def is_legacy(self) -> bool:
        """True if it is the legacy default stream, under either of its handles."""
        return self.named.handle == LEGACY_DEFAULT.handle

    def same(self, other: Stream) -> bool:
        """Return True if both are the same stream."""
        return self.named.handle == other.named.handle


DEFAULT = Stream(0)
LEGACY_DEFAULT = Stream(1)
THREAD_DEFAULT = Stream(2)


def bound_first(found: Iterable[Stream]) -> list[Stream]:
    """Return streams in their order, but libraries' default streams last."""
    return sorted(found, key=lambda stream: stream.is_default)


def device_of(stream: Stream) -> int | None:
    """Return the device of a stream; None for the default streams, which every device has."""
    if stream.handle <= THREAD_DEFAULT.handle:
        return None
    call(driver.cuCtxPushCurrent, call(driver.cuStreamGetCtx, stream.handle))
    try:
        return int(call(driver.cuCtxGetDevice))
    finally:
        call(driver.cuCtxPopCurrent)


def check_device(stream: Stream | None, device: int) -> None:
    """Raise ValueError for a stream of another device than that of the operands."""
    if stream is not None and devices.device_count() > 1 and device_of(stream) not in (None, device):
        raise ValueError(
            f"stream belongs to device {device_of(stream)} and the operands lie on device {device}; expected "
            "one device; pass a stream of the operands' device"
        )


def is_capturing(stream: Stream) -> bool:
    """Return True if work on the stream is being recorded into a graph instead of executed."""
    if stream.is_legacy:
        return False  # it cannot be captured, and the query may invalidate a capture elsewhere
    status = call(driver.cuStreamIsCapturing, stream.handle)
    return bool(status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)


def _follows_default(stream: Stream) -> bool:
    if stream.named.handle == THREAD_DEFAULT.handle:
        return True
    return not int(call(driver.cuStreamGetFlags, stream.handle)) & int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)


def wait_for(stream: Stream, producer: Stream, device: int) -> None:
    """Make later work on a stream wait for the work already enqueued on another, without blocking the host.

    Nothing is enqueued if the order holds anyway: if both are the same stream, or if one is the legacy default stream
    and the other synchronises with it. A stream that is being captured does not wait for one that is not, since a graph
    cannot contain such a dependency; the code that replays the graph has to order them.
    """
    if stream.same(producer):
        return
    with device_scope(device):
        if is_capturing(stream) and not is_capturing(producer):
            return
        if (producer.is_legacy and _follows_default(stream)) or (stream.is_legacy and _follows_default(producer)):
            return
        event = call(driver.cuEventCreate, int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        try:
            call(driver.cuEventRecord, event, producer.handle)
            call(driver.cuStreamWaitEvent, stream.handle, event, 0)
        finally:
            call(driver.cuEventDestroy, event)  # the driver keeps it until the wait has ended


held: deque[tuple[int, Any, list[Any]]] = deque()  # device, event, and what is kept until it


def hold(stream: Stream, device: int, objects: Iterable[Any]) -> None:
    """Keep objects alive until a stream has finished the work enqueued so far.

    The first product, or call of `hold` or `release_finished`, after that releases them. A driver callback would do so
    sooner, but must not free device memory, and must not wait for the interpreter's lock while the holder of that lock
    waits for the stream. Nothing is held while the stream is captured: the graph may be replayed for as long as it
    exists, so its owner has to keep its operands alive.
    """
    release_finished()
    with device_scope(device):
        if is_capturing(stream):
            return
        event = call(driver.cuEventCreate, int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        call(driver.cuEventRecord, event, stream.handle)
    held.append((device, event, list(objects)))


def release_finished() -> int:
    """Release the objects that `hold` keeps for work that has finished; return how many holds remain."""
    if not held:
        return 0
    with relaxed_capture():  # the query of an event would otherwise invalidate a capture
        for _ in range(len(held)):
            try:
                # One at a time, without a lock: a deleter may call this function again, and so may other threads.
                device, event, objects = held.popleft()
            except IndexError:
                break
            with device_scope(device):
                (status,) = driver.cuEventQuery(event)
                if status == driver.CUresult.CUDA_ERROR_NOT_READY:
                    held.append((device, event, objects))
                else:
                    call(driver.cuEventDestroy, event)
            del objects
    return len(held)


def cupy_stream(cupy: Any, handle: int, device: int = -1) -> Any:
    """Return CuPy's view of a stream that it did not create; CuPy 14 deprecates the class that older releases use."""
    if adopt := getattr(cupy.cuda.Stream, "from_external", None):
        return adopt(_Handle(handle))
    return cupy.cuda.ExternalStream(handle, device)


class _Handle:
    """A stream's handle with the CUDA stream protocol."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)
