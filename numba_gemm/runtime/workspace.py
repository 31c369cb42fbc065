"""Device memory that kernels share partial sums in: one workspace a stream, and one a stream of a graph.

Launches of one stream follow each other, so they may use the same memory. A graph may be replayed at any time, beside
the stream that it was captured from, so what is captured uses memory that nothing else does. (Several executable graphs
made of one captured graph share it: they must not run at once.) A workspace grows, by doubling at the least, and is
never freed: launches that are still pending may use the smaller ones, which together are no larger than the last. So
memory grows with the streams that were ever used, the default streams of threads that multiply NumPy arrays included: a
program that makes many is better off with few that it keeps.

Behind the workspace lie counters, 32-bit words that are 0 before the first launch and that every kernel leaves at 0.

What takes several launches borrows a `Loan` instead: memory that no other call gets until all of its launches are
enqueued, from whichever threads they come. After that the stream's order keeps them apart, and the next may have it.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass

from cuda.bindings import driver

from .driver import call, failure, raw, relaxed_capture, zero_is_per_thread

ALIGNMENT = 256
COUNTER_BYTES = 4
LEGACY = (-1, 0)
PER_THREAD = (0, 2)  # handles that mean another stream in every thread


def total_bytes(size: int, counters: int) -> int:
    """Bytes of a workspace with its counters."""
    return _rounded(size) + COUNTER_BYTES * counters


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Workspace:
    """Memory of `size` bytes, and behind it so many counters."""

    pointer: int
    size: int
    counters: int

    @property
    def words(self) -> tuple[int, int]:
        """Addresses of the workspace and of its counters."""
        return self.pointer, self.pointer + _rounded(self.size)

    def holds(self, size: int, counters: int) -> bool:
        """Whether it is large enough."""
        return self.size >= size and self.counters >= counters


@dataclass(frozen=True)
class Loan:
    """Memory of `size` bytes that belongs to one call, until it is given back."""

    pointer: int
    size: int
    key: tuple[int, int, int]


_lock = threading.Lock()
_free: dict[tuple[int, int, int], list[Loan]] = {}
_workspaces: dict[tuple[int, int, int], Workspace] = {}


def reserve(device: int, stream: int, size: int, counters: int) -> tuple[int, int]:
    """Addresses of a workspace and of its counters, for launches on a stream of the current device.

    A workspace belongs to (device, stream, capture), where a stream counts by the driver's identity of it: handles come
    back after a stream's end, and one handle means another default stream in every thread.
    """
    key = (device, *_identity(stream))
    found = _workspaces.get(key)
    if found is None or not found.holds(size, counters):
        with _lock:
            found = _workspaces.get(key)
            if found is None or not found.holds(size, counters):
                found = _workspaces[key] = _allocate(size, counters, found)
    return found.words


def borrow(device: int, stream: int, size: int) -> Loan:
    """Memory of at least so many bytes, for launches on a stream of the current device; `give_back` it after them.

    It comes of what the stream has kept, else it is allocated. What is too small is freed first, when the stream has
    done with it; what a graph uses is kept for ever.

    Raises
    ------
    MemoryError
        if the device has not so much left.
    """
    identity, capture = _identity(stream)
    kept = _free.setdefault((device, identity, capture), [])
    small: list[Loan] = []
    while kept:
        try:
            loan = kept.pop()  # in one step: another thread, or a finaliser, may come here too
        except IndexError:
            break
        if loan.size >= size:
            kept += small
            return loan
        small.append(loan)
    with relaxed_capture():
        if small and not capture:
            call(driver.cuStreamSynchronize, stream)
            for loan in small:
                call(driver.cuMemFree, loan.pointer)
        status, pointer = driver.cuMemAlloc(max(size, 1))
    if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise MemoryError(f"the device has no {size:,} bytes left for the parts of the operands; free some memory")
    if status != driver.CUresult.CUDA_SUCCESS:
        raise failure("cuMemAlloc", status)
    return Loan(int(pointer), size, (device, identity, capture))


def give_back(loan: Loan) -> None:
    """Let the next call on the stream have it: all launches that use it are enqueued."""
    _free.setdefault(loan.key, []).append(loan)


def _identity(stream: int) -> tuple[int, int]:
    """What tells a stream from all others of the process, and the capture that is under way on it, 0 if none is."""
    if stream == 1 or (stream == 0 and not zero_is_per_thread()):
        return LEGACY  # cannot be captured, and asking may break a capture elsewhere
    handle, identity, status = ctypes.c_void_p(stream), ctypes.c_ulonglong(), ctypes.c_int()
    if code := raw("cuStreamIsCapturing")(handle, ctypes.byref(status)):
        raise failure("cuStreamIsCapturing", code)
    if not status.value:
        if code := raw("cuStreamGetId")(handle, ctypes.byref(identity)):
            raise failure("cuStreamGetId", code)
        return identity.value, 0
    # To ask for a capturing stream's identity would end the capture. Its handle will do: it lasts as long.
    code, _, capture, *_ = driver.cuStreamGetCaptureInfo(stream)
    if code != driver.CUresult.CUDA_SUCCESS:
        raise failure("cuStreamGetCaptureInfo", code)
    return stream if stream not in PER_THREAD else -threading.get_ident(), int(capture)


def _allocate(size: int, counters: int, before: Workspace | None) -> Workspace:
    if before is not None:
        # Twice as large, so that the sum of those before stays below it.
        size = max(size, 2 * before.size if size > before.size else before.size)
        counters = max(counters, 2 * before.counters if counters > before.counters else before.counters)
    with relaxed_capture():
        made = Workspace(int(call(driver.cuMemAlloc, max(total_bytes(size, counters), 1))), size, counters)
        clear(made.words[1], counters)
    return made


def clear(pointer: int, counters: int, stream: int | None = None) -> None:
    """Set counters to 0, in the order of a stream if given, and wait for that."""
    if not counters:
        return
    if stream is not None:
        call(driver.cuMemsetD32Async, pointer, 0, counters, stream)
        call(driver.cuStreamSynchronize, stream)
        return
    # A stream of its own, which no other waits for and which is not being captured.
    own = call(driver.cuStreamCreate, int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    try:
        clear(pointer, counters, int(own))
    finally:
        call(driver.cuStreamDestroy, own)
