"""The CUDA driver, called through cuda.bindings: errors as exceptions, and which device is current."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cuda.bindings import driver

from .device.probe import driver_error


class GpuUnavailable(RuntimeError):
    """There is no GPU to run on, and the simulator is not asked for."""

    def __init__(self, reason: str):
        super().__init__(
            f"no GPU can be used: {reason} Expected an NVIDIA GPU and its driver. Install the driver, or set "
            "NUMBA_ENABLE_CUDASIM=1 in the environment before Python starts, to run on Numba's CUDA simulator: without "
            "a GPU, and slowly"
        )


def call(function: Any, *arguments: Any) -> Any:
    """Call a function of the driver; return its one result, or None, or raise RuntimeError with the driver's words."""
    status, *results = function(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(status)
        raise RuntimeError(f"{function.__name__} failed: {(text or b'?').decode()} ({status.name})")
    return results[0] if results else None


_lock = threading.Lock()


@functools.cache
def start() -> None:
    """Start the driver; raise `GpuUnavailable` where that cannot be."""
    if (reason := driver_error()) is not None:
        raise GpuUnavailable(reason)
    call(driver.cuInit, 0)


@functools.cache
def _retained_context(device: int) -> Any:
    start()
    # Retained once and never released: the context lasts as long as the process.
    return call(driver.cuDevicePrimaryCtxRetain, call(driver.cuDeviceGet, device))


def primary_context(device: int) -> Any:
    """A device's primary context, the one that CUDA's runtime, Numba, CuPy and PyTorch share."""
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
