"""Is there a GPU? Asked of the driver itself, without importing Numba.

Numba chooses between hardware and its simulator once, at its first import. Whoever wants to make that choice by what
the machine offers (the benchmark, the tests) has to know before then.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys

_SUCCESS = 0


def _driver_library() -> ctypes.CDLL | None:
    # The versioned name is the one that a driver installs; the unversioned one comes with a toolkit's stubs, which
    # load and then fail. WSL keeps its driver outside the loader's path.
    names = ("nvcuda.dll",) if sys.platform == "win32" else ("libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1")
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _explain(driver: ctypes.CDLL, status: int) -> str:
    text = ctypes.c_char_p()
    if driver.cuGetErrorString(ctypes.c_int(status), ctypes.byref(text)) == _SUCCESS and text.value:
        return f"{text.value.decode(errors='replace')} (CUresult {status})"
    return f"CUresult {status}"


@functools.cache
def _probe() -> tuple[str | None, int]:
    driver = _driver_library()
    if driver is None:
        return "no NVIDIA driver was found (libcuda does not load).", 0
    status = driver.cuInit(ctypes.c_uint(0))
    if status != _SUCCESS:
        return f"the NVIDIA driver does not start: {_explain(driver, status)}.", 0
    count = ctypes.c_int(0)
    status = driver.cuDeviceGetCount(ctypes.byref(count))
    if status != _SUCCESS:
        return f"the NVIDIA driver does not count its GPUs: {_explain(driver, status)}.", 0
    if count.value == 0:
        return "the NVIDIA driver reports no GPU (CUDA_VISIBLE_DEVICES may hide them).", 0
    return None, count.value


def driver_error() -> str | None:
    """Say why no GPU can be used: one sentence, or None when one can.

    The driver is asked once a process; it does not recover from a failed start within one.
    """
    return _probe()[0]


def gpu_count() -> int:
    """Return how many GPUs this process may use, 0 without a driver."""
    return _probe()[1]


def simulator_requested() -> bool:
    """Return whether the environment asks for Numba's simulator, by Numba's own reading of NUMBA_ENABLE_CUDASIM.

    Numba takes an integer: `1` is yes, `0` is no, and a word is no (with a warning of its own when it is imported).
    """
    try:
        return int(os.environ.get("NUMBA_ENABLE_CUDASIM", "0")) != 0
    except ValueError:
        return False


def simulator_environment() -> dict[str, str]:
    """Return the environment of a child process that shall use Numba's simulator, whatever this one uses."""
    return {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}


def gpu_environment() -> dict[str, str]:
    """Return the environment of a child process that shall use a GPU, whatever this one uses."""
    return {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}


def choose(simulator: bool) -> None:
    """Have this process and its children use Numba's simulator, or a GPU; only before Numba is imported."""
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1" if simulator else "0"
