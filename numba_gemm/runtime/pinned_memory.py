"""Page-locked host memory, which copies to and from a device access without the host's help.

A copy of any other host memory goes through page-locked memory of the driver's, at the speed at which the host copies
there, and keeps the host waiting.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from cuda.bindings import driver

from .driver import call

__all__ = ["is_page_locked", "pinned", "registered"]


@contextmanager
def pinned(elements: int, dtype: Any = np.float32, *, write_combined: bool = False) -> Iterator[np.ndarray]:
    """Allocate an uninitialised page-locked array of one dimension, which all devices may use; free it at the end.

    Needs a current context. `write_combined` memory is not cached: fast for the host to write in order, very slow for
    it to read.
    """
    size = max(elements * np.dtype(dtype).itemsize, 1)
    flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
    address = int(call(driver.cuMemHostAlloc, size, flags | (driver.CU_MEMHOSTALLOC_WRITECOMBINED * write_combined)))
    try:
        yield np.frombuffer((ctypes.c_char * size).from_address(address), np.uint8).view(dtype)[:elements]
    finally:
        call(driver.cuMemFreeHost, address)


@contextmanager
def registered(array: np.ndarray) -> Iterator[None]:
    """Page-lock the memory of an existing contiguous array while the context lasts.

    Raises
    ------
    ValueError
        if it is not contiguous.
    """
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise ValueError("expected a contiguous array; pass a copy")
    flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
    call(driver.cuMemHostRegister, array.ctypes.data, array.nbytes, flags)
    try:
        yield
    finally:
        call(driver.cuMemHostUnregister, array.ctypes.data)


def is_page_locked(first: int, last: int) -> bool:
    """Return True if two addresses of host memory are in one page-locked allocation; needs a context, of any device."""
    start = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
    kind = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    found = []
    for address in (first, last):
        # The driver returns CUDA_ERROR_INVALID_VALUE for memory that CUDA does not know.
        status, value = driver.cuPointerGetAttribute(kind, address)
        if int(status) or int(value) != int(driver.CUmemorytype.CU_MEMORYTYPE_HOST):
            return False
        status, begin = driver.cuPointerGetAttribute(start, address)
        if int(status):
            return False
        found.append(int(begin))
    return found[0] == found[1]
