"""The CUDA driver, called through cuda.bindings: errors as exceptions, and which device is current.

Functions that every launch calls are called through ctypes, with arguments prepared in memory: cuda.bindings converts
and wraps each argument anew, which takes longer than the driver does.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cuda.bindings import driver

from ..device.units import STATIC_SHARED_BYTES
from ..simulator.probe import driver_error

if TYPE_CHECKING:
    from .compiler import Cubin


USE_SIMULATOR = (
    "Install the driver, or set NUMBA_ENABLE_CUDASIM=1 in the environment before Python starts, to run on Numba's CUDA "
    "simulator: without a GPU, and slowly"
)


class GpuUnavailable(RuntimeError):
    """There is no GPU to run on, and the simulator is not asked for."""

    def __init__(self, reason: str, advice: str = USE_SIMULATOR):
        super().__init__(reason, advice)

    def __str__(self) -> str:
        reason, advice = self.args
        return f"no GPU can be used: {reason} Expected an NVIDIA GPU and its driver. {advice}"


@contextmanager
def advising(advice: str) -> Iterator[None]:
    """Replace the advice of a `GpuUnavailable`, for what the simulator cannot do; also a decorator."""
    try:
        yield
    except GpuUnavailable as error:
        raise GpuUnavailable(error.args[0], advice) from None


def without_gpu(cc: object, **others: object) -> str:
    """Return the advice for a function that needs no GPU for a compute capability `cc`, but for other arguments."""
    wanted = [] if cc is not None else ["pass a compute capability, cc=(9, 0) for an H200"]
    if left_out := [name for name, value in others.items() if value is not None]:
        wanted.append(f"leave out {' and '.join(left_out)}")
    advice = " and ".join(wanted)
    return f"{advice[:1].upper()}{advice[1:]}; then no GPU is needed"


def call(function: Any, *arguments: Any) -> Any:
    """Call a function of the driver; return its one result, or None, or raise RuntimeError with the driver's words."""
    status, *results = function(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise failure(function.__name__, status)
    return results[0] if results else None


def failure(name: str, status: int) -> RuntimeError:
    """Return an error with the driver's description of a status."""
    result = driver.CUresult(status)
    _, text = driver.cuGetErrorString(result)
    return RuntimeError(f"{name} failed: {(text or b'?').decode()} ({result.name})")


_lock = threading.Lock()


@functools.cache
def start() -> None:
    """Start the driver; raise `GpuUnavailable` if that is impossible."""
    if (reason := driver_error()) is not None:
        raise GpuUnavailable(reason)
    call(driver.cuInit, 0)


@functools.cache
def _retained_context(device: int) -> Any:
    start()
    # Retained once and never released: the context lasts as long as the process.
    return call(driver.cuDevicePrimaryCtxRetain, call(driver.cuDeviceGet, device))


def primary_context(device: int) -> Any:
    """Return a device's primary context, which CUDA's runtime, Numba, CuPy and PyTorch share."""
    with _lock:
        return _retained_context(device)


@contextmanager
def device_scope(device: int) -> Iterator[None]:
    """Make a device's primary context current in this thread, and put back what was current before."""
    call(driver.cuCtxPushCurrent, primary_context(device))
    try:
        yield
    finally:
        call(driver.cuCtxPopCurrent)


def load_kernel(cubin: Cubin, device: int, dynamic_shared: int = 0) -> int:
    """Load a kernel on a device, for launches with this much dynamic shared memory in bytes; return its handle."""
    with device_scope(device):
        library = call(driver.cuLibraryLoadData, cubin.code, [], [], 0, [], [], 0)
        handle = call(driver.cuLibraryGetKernel, library, cubin.name.encode())
        if dynamic_shared > STATIC_SHARED_BYTES:
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call(driver.cuKernelSetAttribute, limit, dynamic_shared, handle, call(driver.cuDeviceGet, device))
    return int(handle)


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let this thread do what would otherwise break a capture that another thread, or itself, has begun."""
    mode = call(driver.cuThreadExchangeStreamCaptureMode, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        yield
    finally:
        call(driver.cuThreadExchangeStreamCaptureMode, mode)


# ------------------------------------------------------------------------------ calls with arguments kept in memory


@functools.cache
def zero_is_per_thread() -> bool:
    """Return True if the handle 0 means the calling thread's default stream, False if the legacy one.

    It reads the environment variable that cuda.bindings reads, so that both ways of calling mean the same stream.
    """
    return bool(int(os.environ.get("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM") or 0))


@functools.cache
def raw(name: str) -> Any:
    """Return a function of the driver that takes ctypes objects, unchecked, and returns the status as an int."""
    start()
    flags = driver.CUdriverProcAddress_flags
    if zero_is_per_thread():
        flag = flags.CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM
    else:
        flag = flags.CU_GET_PROC_ADDRESS_LEGACY_STREAM
    address = int(call(driver.cuGetProcAddress, name.encode(), 12000, int(flag)) or 0)
    if not address:
        raise RuntimeError(f"this driver has no {name}; expected a driver of CUDA 12 or later; install one")
    # Not PYFUNCTYPE: a launch waits where too many are pending, and others must be able to run meanwhile.
    return ctypes.CFUNCTYPE(ctypes.c_int)(address)


def pointer_argument(address: int) -> Any:
    """Return an argument for functions of `raw`, a pointer; ctypes would make one of a ``c_void_p`` at every call."""
    return ctypes.byref(ctypes.c_char.from_address(address))
