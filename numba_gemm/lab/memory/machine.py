"""What experiments need of the machine: launches, streams, a clock, and what the memory should reach.

In the simulator kernels run under the package's scheduler, one thread after the other, and times mean nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from cuda.bindings import driver
from numba import cuda

from numba_gemm.lab.bench.model import choose_ceilings
from numba_gemm.models.traffic import Ceilings
from numba_gemm.runtime.device import DeviceProperties, current_device, device_properties
from numba_gemm.runtime.driver import call, device_scope
from numba_gemm.runtime.timing import Call, Samples, time_interleaved
from numba_gemm.simulator import scheduler
from numba_gemm.simulator.switch import SIMULATOR

__all__ = ["SIMULATOR", "attribute", "ceilings", "enqueue", "in_context", "properties", "streams", "timed"]

ROUNDS = 15
Extent = int | tuple[int, ...]


def enqueue(kernel: Any, grid: Extent, block: Extent, *args: Any) -> Call:
    """A call that enqueues a kernel on the stream whose handle it is given; in the simulator, that runs it."""
    if SIMULATOR:
        seen = [np.asarray(arg) if hasattr(arg, "__cuda_ndarray__") else arg for arg in args]
        return lambda stream: scheduler.run(kernel, grid, block, seen)

    def launch(stream: int) -> None:
        with warnings.catch_warnings():
            # That a small grid wastes the GPU, which some are meant to.
            warnings.filterwarnings("ignore", message="Grid size")
            kernel[grid, block, cuda.external_stream(stream)](*args)

    return launch


@contextmanager
def in_context() -> Iterator[None]:
    """Make the current device's context current, for calls of the driver; nothing in the simulator."""
    with ExitStack() as scopes:
        if not SIMULATOR:
            scopes.enter_context(device_scope(current_device()))
        yield


@contextmanager
def streams(count: int = 1) -> Iterator[list[int]]:
    """Handles of new streams that do not wait for the default one; in the simulator, of the default one."""
    if SIMULATOR:
        yield [0] * count
        return
    with in_context():
        made = [int(call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING)) for _ in range(count)]
        try:
            yield made
        finally:
            for stream in made:
                call(driver.cuStreamDestroy, stream)


def timed(calls: Mapping[Any, Call], *, rounds: int = ROUNDS) -> dict[Any, Samples]:
    """Time calls in turn, as `numba_gemm.runtime.timing.time_interleaved` does; by what they are named by."""
    with streams() as (stream,):
        found = time_interleaved(
            {repr(name): enqueued for name, enqueued in calls.items()}, stream=stream, rounds=rounds
        )
    return {name: found[repr(name)] for name in calls}


def properties() -> DeviceProperties:
    """Of the current device; in the simulator, of an H200."""
    return device_properties(current_device())


def ceilings() -> tuple[Ceilings, str]:
    """What the current device's memory reaches, in byte/s and FLOP/s, and in words how that is known."""
    return choose_ceilings(None, properties())


def attribute(name: str) -> int:
    """An attribute of the current device, by the driver's name without ``CU_DEVICE_ATTRIBUTE_``."""
    device = call(driver.cuDeviceGet, current_device())
    return int(
        call(driver.cuDeviceGetAttribute, getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), device)
    )
