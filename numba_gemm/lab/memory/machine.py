"""Access of experiments to the machine: launches, streams, timing, and the ceilings of the memory.

In the simulator, kernels run under the package's scheduler, one thread after the other, and times mean nothing.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
from cuda.bindings import driver
from numba import cuda

from numba_gemm.lab.bench.model import choose_ceilings
from numba_gemm.lab.harness.experiment import Experiment
from numba_gemm.models.prediction import Ceilings
from numba_gemm.runtime.device import DeviceProperties, current_device, device_properties
from numba_gemm.runtime.driver import call, device_scope
from numba_gemm.runtime.timing import Call, time_interleaved
from numba_gemm.simulator import scheduler
from numba_gemm.simulator.switch import SIMULATOR as SIMULATOR

ROUNDS = 15
Extent = int | tuple[int, ...]


def enqueue(kernel: Any, grid: Extent, block: Extent, *args: Any) -> Call:
    """Return a call that enqueues a kernel on the stream with a given handle; in the simulator, it runs the kernel."""
    if SIMULATOR:
        seen = [np.asarray(arg) if hasattr(arg, "__cuda_ndarray__") else arg for arg in args]
        return lambda stream: scheduler.run(kernel, grid, block, seen)

    def launch(stream: int) -> None:
        with warnings.catch_warnings():
            # Small grids waste the GPU, but some experiments need them.
            warnings.filterwarnings("ignore", message="Grid size")
            kernel[grid, block, cuda.external_stream(stream)](*args)

    return launch


def in_context() -> AbstractContextManager[None]:
    """Make the current device's context current for calls of the driver; no effect in the simulator."""
    return nullcontext() if SIMULATOR else device_scope(current_device())


@contextmanager
def streams(count: int = 1, blocking: bool = False) -> Iterator[list[int]]:
    """Yield handles of new streams, which wait for the default one if `blocking`; in the simulator, of that stream."""
    if SIMULATOR:
        yield [0] * count
        return
    kind = driver.CUstream_flags.CU_STREAM_DEFAULT if blocking else driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    with in_context(), ExitStack() as scopes:
        made = [int(call(driver.cuStreamCreate, kind)) for _ in range(count)]
        for stream in made:
            scopes.callback(call, driver.cuStreamDestroy, stream)
        yield made


def timed(calls: Mapping[Any, Call], *, rounds: int = ROUNDS) -> dict[Any, float]:
    """Median microseconds of calls, timed in turn by `numba_gemm.runtime.timing.time_interleaved`."""
    named = {repr(name): enqueued for name, enqueued in calls.items()}
    with streams() as (stream,):
        samples = time_interleaved(named, stream=stream, rounds=rounds).values()
    return {name: found.median for name, found in zip(calls, samples)}


def verify(out: Any, expected: Any, what: Any = "") -> None:
    """Raise AssertionError unless a device array holds the expected elements, in this order."""
    found = out.copy_to_host()
    np.testing.assert_array_equal(found, np.reshape(expected, found.shape), str(what))


def checked(call: Call, out: Any, expected: Any, what: Any) -> Call:
    """Return a call, after checking that it stores the expected elements in `out`, and leaves those that are NaN."""
    out.copy_to_device(np.full(out.nbytes, 0xFF, np.uint8).view(out.dtype).reshape(out.shape))
    call(0)
    verify(out, expected, what)
    return call


def checked_us(calls: Mapping[Any, Call], out: Any, expected: Any, rounds: int) -> dict[Any, float]:
    """Median microseconds of kernels that each store the expected elements in `out`, which is checked first."""
    return timed({name: checked(call, out, expected, name) for name, call in calls.items()}, rounds=rounds)


def properties() -> DeviceProperties:
    """Properties of the current device; in the simulator, those of an H200."""
    return device_properties(current_device())


def ceilings() -> tuple[Ceilings, str]:
    """Ceilings of the current device in byte/s and FLOP/s, and a description of their source."""
    return choose_ceilings(None, properties())


def facts(_frame: Any) -> dict[str, str]:
    """Return the source of the ceilings that predictions use, to be recorded with a result."""
    return {"ceilings": ceilings()[1]}


def attribute(name: str) -> int:
    """Return an attribute of the current device, named as in the driver without ``CU_DEVICE_ATTRIBUTE_``."""
    named = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(call(driver.cuDeviceGetAttribute, named, call(driver.cuDeviceGet, current_device())))


def nvml_gpu() -> tuple[Any, Any]:
    """Return the NVML of cuda.bindings and its handle of the current device; an exception if either is missing."""
    from cuda.bindings import nvml

    nvml.init_v2()
    return nvml, nvml.device_get_handle_by_uuid(cuda.get_current_device().uuid)


def kernel(types: str, name: str = "") -> Callable[[Any], Any]:
    """Return the decorator of a kernel whose parameters have these types, such as "float32[::1], int64"."""

    def compiled(function: Any) -> Any:
        made = cuda.jit(function)
        made.described = name or function.__name__, types
        return made

    return compiled


def experiment(
    run: Any, section: str, claims: Any, plot: Any, small: Any, kernels: Iterable[Any] = (), **others: Any
) -> Experiment:
    """Describe an experiment of the laboratory, named after the function that runs it; see `Experiment`.

    The kernels are those of `kernel`.
    """
    typed = {name: (kernel, types) for kernel in kernels for name, types in (kernel.described,)}
    described = {"section": section, "claims": claims, "plot": plot, "small": small, "kernels": typed}
    return Experiment(run, facts=facts, **described, **others)


gpu_experiment = partial(
    experiment, unavailable="the simulator has neither streams, nor caches, nor memory apart from the host's"
)
"""Same as `experiment`, for what the simulator cannot run."""
