"""Copies by the driver, and their buffers and streams. Not for the simulator."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import numpy as np
from cuda.bindings import driver
from numba import cuda

from numba_gemm.lab.memory import machine
from numba_gemm.runtime import pinned_memory
from numba_gemm.runtime.driver import call, failure
from numba_gemm.runtime.timing import Call


def address(place: Any) -> int:
    """Return the address of the first byte of a NumPy array or a device array; an address is returned unchanged."""
    if isinstance(place, int):
        return place
    if isinstance(place, np.ndarray):
        return int(place.ctypes.data)
    return int(place.__cuda_array_interface__["data"][0])


def copy(target: Any, source: Any, size: int, stream: int) -> None:
    """Enqueue a copy of `size` bytes; the driver infers the direction from the addresses."""
    call(driver.cuMemcpyAsync, address(target), address(source), size, stream)


def copying(target: Any, source: Any) -> Call:
    """Return a call that enqueues a copy of a whole array to another one of the same size, and keeps both alive."""
    to, from_, size = address(target), address(source), source.nbytes

    def enqueue(stream: int, _kept: Any = (target, source)) -> None:
        copy(to, from_, size, stream)

    return enqueue


def clear(target: Any, size: int, stream: int) -> None:
    """Enqueue setting all bits of device memory; as float32 they are NaN, unlike any result."""
    call(driver.cuMemsetD8Async, address(target), 0xFF, size, stream)


def finish(*streams: int) -> None:
    """Wait until streams have completed all enqueued work."""
    for stream in streams:
        call(driver.cuStreamSynchronize, stream)


def view(pointer: int, elements: int, dtype: Any = np.float32) -> Any:
    """View memory at a device pointer as a one-dimensional Numba device array."""
    described = {"shape": (elements,), "typestr": np.dtype(dtype).str, "data": (pointer, False), "version": 3}
    return cuda.as_cuda_array(type("Memory", (), {"__cuda_array_interface__": described})(), sync=False)


@contextmanager
def device_memory(size: int) -> Iterator[int]:
    """Allocate memory on the current device and yield its address; freed without waiting for the collector."""
    address = int(call(driver.cuMemAlloc, max(size, 1)))
    try:
        yield address
    finally:
        call(driver.cuMemFree, address)


@contextmanager
def device_array(elements: int, dtype: Any = np.float32) -> Iterator[Any]:
    """Yield an uninitialised one-dimensional Numba device array."""
    with device_memory(elements * np.dtype(dtype).itemsize) as pointer:
        yield view(pointer, elements, dtype)


class Scope(ExitStack):
    """Streams and memory in the current device's context, freed at the end of a ``with`` block."""

    def __enter__(self) -> Self:
        super().__enter__()
        self.enter_context(machine.in_context())
        return self

    def streams(self, count: int = 1, blocking: bool = False) -> list[int]:
        """Return handles of new streams, like `machine.streams`."""
        return self.enter_context(machine.streams(count, blocking))

    def pinned(self, count: int, elements: int, dtype: Any = np.float32) -> list[np.ndarray]:
        """Return page-locked arrays of the host."""
        return [self.enter_context(pinned_memory.pinned(elements, dtype)) for _ in range(count)]

    def on_device(self, count: int, elements: int, dtype: Any = np.float32) -> list[Any]:
        """Return uninitialised one-dimensional Numba device arrays."""
        return [self.enter_context(device_array(elements, dtype)) for _ in range(count)]


def mapped(host: np.ndarray) -> Any:
    """View a page-locked float32 array as a device array, by its device pointer."""
    return view(int(call(driver.cuMemHostGetDevicePointer, host.ctypes.data, 0)), host.size)


def in_sequence(calls: Iterable[Call]) -> Call:
    """Return a call that enqueues several in their order."""
    kept = list(calls)

    def enqueue(stream: int) -> None:
        for each in kept:
            each(stream)

    return enqueue


@contextmanager
def kernel_graph(enqueue: Call, launches: int, stream: int, attribute: Any = None, value: Any = None) -> Iterator[Any]:
    """Yield an executable graph of `launches` launches of a kernel; sets an attribute of each node if one is given."""
    call(driver.cuStreamBeginCapture, stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    try:
        for _ in range(launches):
            enqueue(stream)
    finally:
        graph = call(driver.cuStreamEndCapture, stream)  # a stream left in capture mode refuses everything else
    with ExitStack() as scopes:
        scopes.callback(call, driver.cuGraphDestroy, graph)
        status, nodes, count = driver.cuGraphGetNodes(graph, launches + 1)
        if int(status):
            raise failure("cuGraphGetNodes", status)
        if count != launches:
            raise RuntimeError(f"captured {launches} launches as {count} nodes; expected one node each")
        for node in nodes[:count] if attribute is not None else ():
            call(driver.cuGraphKernelNodeSetAttribute, node, attribute, value)
        executable = call(driver.cuGraphInstantiate, graph, 0)
        scopes.callback(call, driver.cuGraphExecDestroy, executable)
        yield executable
