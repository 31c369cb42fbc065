"""Hardware or simulator, decided before Numba is imported; and the markers that depend on it."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from numba_gemm.simulator.probe import gpu_count, simulator_requested

if "numba" in sys.modules:
    raise RuntimeError("Numba was imported before the tests could choose between hardware and simulator")
if gpu_count() == 0:
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
ON_GPU = not simulator_requested()

# A shell starts a background job with SIGINT ignored, and child processes inherit that. Tests of interrupts send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A simulated launch has one running thread at a time, and on one core they take turns much faster than across cores.
if not ON_GPU and hasattr(os, "sched_setaffinity") and "PYTEST_XDIST_WORKER" in os.environ:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % len(cores)]})

# The tests' own kernel cache, not the user's: made by the first process, inherited by its workers and children.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["NUMBA_GEMM_CACHE_DIR"] = tempfile.mkdtemp(prefix="numba_gemm-")
    atexit.register(shutil.rmtree, os.environ["NUMBA_GEMM_CACHE_DIR"], ignore_errors=True)
elif sys.dont_write_bytecode:  # child processes would compile the package at every start
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = os.path.join(os.environ["NUMBA_GEMM_CACHE_DIR"], "bytecode")
# Several processes run tests: each starts few to compile, and none to compile ahead.
os.environ.setdefault("NUMBA_GEMM_JOBS", "3")
# Queues of the GPU: streams of one queue wait for each other. There are about 512 for all processes; beyond that, a new
# context fails with CUDA_ERROR_OUT_OF_MEMORY. A worker's own are made here; the processes that its tests start get few.
workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(max(1, min(32, 256 // workers)))
if ON_GPU and "PYTEST_XDIST_WORKER" in os.environ:
    cuda = ctypes.CDLL("libcuda.so.1")
    if cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0):
        raise RuntimeError("cannot create a CUDA context on device 0")
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "2"
TURN = Path(os.environ["NUMBA_GEMM_CACHE_DIR"]) / "turn.lock"

# Imported once the lines above have run.
pytest_plugins = (
    "support.session",
    "support.host_gpu",
    "support.array_libraries",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    # Workers share the one GPU and its memory; four keep it busy. Otherwise, as many as there are cores.
    return min(4, os.cpu_count() or 1) if ON_GPU else None


@pytest.fixture(scope="session")
def on_gpu() -> bool:
    return ON_GPU


def pytest_report_header() -> str:
    return "running on " + (
        "the GPU" if ON_GPU else "Numba's CUDA simulator: no GPU was found, or the simulator was asked for"
    )


@pytest.hookimpl(trylast=True)  # after a plugin or an option has shuffled the tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not ON_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if ON_GPU and item.get_closest_marker("simulator"):
            item.add_marker(pytest.mark.skip(reason="checks the simulator"))
    items.sort(key=lambda item: item.get_closest_marker("alone") is not None)  # others need not wait for these


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run tests that measure the whole GPU while no other worker runs one."""
    if not ON_GPU:
        return (yield)
    with TURN.open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        return (yield)


@pytest.fixture
def hopper():
    """Skip a test unless the GPU has compute capability 9.0, the only one with these instructions."""
    from numba_gemm.runtime import device

    if device.device_properties(device.current_device()).cc != (9, 0):
        pytest.skip("needs compute capability 9.0")


@pytest.fixture
def memory_returned() -> Iterator[None]:
    """After the test, return unused memory of array libraries to the GPU, for the other processes of the tests."""
    yield
    if cupy := sys.modules.get("cupy"):
        cupy.get_default_memory_pool().free_all_blocks()
    if torch := sys.modules.get("torch"):
        torch.cuda.empty_cache()
