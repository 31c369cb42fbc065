"""Device memory for the launches of products: workspaces, one per stream, and memory leased to one call.

Launches on one stream follow each other, so they may use the same memory. A graph may be replayed at any time, beside
the stream from which it was captured, so captured launches use memory of their own. (Several executable graphs made
from one captured graph share it, and so do nodes of another graph that contain it; they must not run at the same time.)
It is freed at the first allocation for a later capture, once the graph and all that was made from it are gone.

A workspace is for products of one launch. It grows, at least to twice its size, and is not freed before: pending
launches may use the smaller ones, whose total size is at most that of the last. So memory grows with the number of
streams that were ever used, including the default streams of threads. Behind a workspace are counters, 32-bit words
that are 0 before the first launch and that every kernel leaves at 0.

A product of several launches leases memory: no other call gets it until all of these launches are enqueued, whichever
thread they come from. Afterwards the order of the stream separates them, and the next call may have it.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from functools import cached_property

from cuda.bindings import driver

from ..device.units import ceil_div
from .driver import call, failure, raw, relaxed_capture, zero_is_per_thread
from .graph_end import GraphEnd

ALIGNMENT = 256
COUNTER_BYTES = 4
LEGACY = (-1, 0)
PER_THREAD = (0, 2)  # handles that mean another stream in every thread


def total_bytes(size: int, counters: int) -> int:
    """Return the bytes of a workspace with its counters."""
    return _rounded(size) + COUNTER_BYTES * counters


def _rounded(size: int) -> int:
    return ceil_div(size, ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Workspace:
    """Memory of `size` bytes, followed by `counters` counters."""

    pointer: int
    size: int
    counters: int

    @cached_property
    def words(self) -> tuple[int, int]:
        """Addresses of the workspace and of its counters."""
        return self.pointer, self.pointer + _rounded(self.size)

    def holds(self, size: int, counters: int) -> bool:
        """Return True if it is large enough for these sizes."""
        return self.size >= size and self.counters >= counters


@dataclass(frozen=True)
class Lease:
    """Memory of `size` bytes that belongs to one call until it is released."""

    pointer: int
    size: int
    key: tuple[int, int]


class Workspaces:
    """Workspaces and leased memory of one device, whose context is current in every call; safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finaliser may come here while its thread holds the lock
        # Both by a stream's identity and its capture: handles come back after a stream's end, and one handle means
        # another default stream in every thread.
        self._workspaces: dict[tuple[int, int], Workspace] = {}
        self._free: dict[tuple[int, int], list[Lease]] = {}
        # Memory of captures, and the ends of their graphs.
        self._captured: dict[tuple[int, int], tuple[GraphEnd, list[int]]] = {}

    def reserve(self, stream: int, size: int, counters: int) -> tuple[int, int]:
        """Return the addresses of the stream's workspace and of its counters, which it enlarges if necessary."""
        key = identity(stream)
        found = self._workspaces.get(key)
        if found is None or found.size < size or found.counters < counters:
            with self._lock:
                found = self._workspaces.get(key)
                if found is None or not found.holds(size, counters):
                    found = self._workspaces[key] = _allocate(size, counters, found)
                    if key[1]:
                        self._note(key, stream, found.pointer)
        return found.words

    def lease(self, stream: int, size: int) -> Lease:
        """Return memory of at least `size` bytes for launches on a stream; `release` it when they are enqueued.

        Memory released on this stream is reused, else memory is allocated. What is too small is freed first, once the
        stream has finished with it, and half as much again is allocated if there is room, so that sizes that grow from
        call to call rarely wait; memory that a graph uses is kept.

        Raises
        ------
        MemoryError
            if the device has not enough memory left.
        """
        key = identity(stream)
        try:
            lease = self._free[key].pop()  # atomic: another thread, or a finaliser, may come here too
        except (KeyError, IndexError):
            return self._new_lease(key, stream, size, [])
        if lease.size >= size:
            return lease
        return self._new_lease(key, stream, size, [lease])

    def _new_lease(self, key: tuple[int, int], stream: int, size: int, small: list[Lease]) -> Lease:
        """Return a lease for which none of the first that was found, in `small`, is large enough."""
        kept = self._free.setdefault(key, [])
        while kept:
            try:
                lease = kept.pop()
            except IndexError:
                break
            if lease.size >= size:
                kept += small
                return lease
            small.append(lease)
        grown = size
        with relaxed_capture():
            if small and not key[1]:
                call(driver.cuStreamSynchronize, stream)
                for lease in small:
                    call(driver.cuMemFree, lease.pointer)
                grown = max(size, *(lease.size * 3 // 2 for lease in small))
            status, pointer = driver.cuMemAlloc(max(grown, 1))
            if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY and grown > size:
                grown = size
                status, pointer = driver.cuMemAlloc(size)
        if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise MemoryError(f"the device has no {size:,} bytes left for the parts of the operands; free some memory")
        if status != driver.CUresult.CUDA_SUCCESS:
            raise failure("cuMemAlloc", status)
        if key[1]:
            with self._lock:
                self._note(key, stream, int(pointer))
        return Lease(int(pointer), grown, key)

    def _note(self, key: tuple[int, int], stream: int, pointer: int) -> None:
        """Note memory that belongs to a graph, and free that of graphs that are gone."""
        for gone in [other for other, (end, _) in list(self._captured.items()) if end.has_come()]:
            self._workspaces.pop(gone, None)
            self._free.pop(gone, None)
            with relaxed_capture():
                for each in self._captured.pop(gone)[1]:
                    call(driver.cuMemFree, each)
        if key not in self._captured:
            self._captured.setdefault(key, (GraphEnd(stream), []))
        self._captured[key][1].append(pointer)

    def release(self, lease: Lease) -> None:
        """Let the next call on the stream have the memory: all launches that use it are enqueued."""
        self._free.get(lease.key, []).append(lease)  # `_new_lease` made the list, unless the graph is gone


def identity(stream: int) -> tuple[int, int]:
    """Return an identity of a stream that is unique in the process, and of its current capture, 0 if there is none."""
    if stream == 1 or (stream == 0 and not zero_is_per_thread()):
        return LEGACY  # cannot be captured, and asking may break a capture elsewhere
    handle, identity, status = ctypes.c_void_p(stream), ctypes.c_ulonglong(), ctypes.c_int()
    if code := raw("cuStreamIsCapturing")(handle, ctypes.byref(status)):
        raise failure("cuStreamIsCapturing", code)
    if not status.value:
        if code := raw("cuStreamGetId")(handle, ctypes.byref(identity)):
            raise failure("cuStreamGetId", code)
        return identity.value, 0
    # Asking for a capturing stream's identity would end the capture. Its handle is unique as long as that lasts.
    code, _, capture, *_ = driver.cuStreamGetCaptureInfo(stream)
    if code != driver.CUresult.CUDA_SUCCESS:
        raise failure("cuStreamGetCaptureInfo", code)
    return stream if stream not in PER_THREAD else -threading.get_ident(), int(capture)


def _allocate(size: int, counters: int, before: Workspace | None) -> Workspace:
    if before is not None:
        # Twice as large, so that the sum of the earlier ones stays below it.
        size = max(size, 2 * before.size if size > before.size else before.size)
        counters = max(counters, 2 * before.counters if counters > before.counters else before.counters)
    with relaxed_capture():
        made = Workspace(int(call(driver.cuMemAlloc, max(total_bytes(size, counters), 1))), size, counters)
        clear(made.words[1], counters)
    return made


def clear(pointer: int, counters: int, stream: int | None = None) -> None:
    """Set counters to 0, in the order of a stream if given, and wait until it is done."""
    if not counters:
        return
    if stream is not None:
        call(driver.cuMemsetD32Async, pointer, 0, counters, stream)
        call(driver.cuStreamSynchronize, stream)
        return
    # A stream of its own, which no other stream waits for and which is not being captured.
    own = call(driver.cuStreamCreate, int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    try:
        clear(pointer, counters, int(own))
    finally:
        call(driver.cuStreamDestroy, own)
