"""Detection of GPUs through the driver itself, without importing Numba.

Numba chooses between hardware and its simulator once, at its first import. Code that bases this choice on the machine
(the benchmark, the tests) must therefore look for a GPU before that import.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys

_SUCCESS = 0


def _driver_library() -> ctypes.CDLL | None:
    # A driver installs the versioned name. The unversioned one belongs to a toolkit's stubs, which load and then fail.
    # WSL keeps its driver outside the loader's path.
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
    """Return one sentence that says why no GPU can be used, or None if one can.

    The driver is queried once per process; within a process it does not recover from a failed start.
    """
    return _probe()[0]


def gpu_count() -> int:
    """Return the number of GPUs that this process may use, 0 without a driver."""
    return _probe()[1]


def simulator_requested() -> bool:
    """Return True if the environment requests Numba's simulator, as Numba itself reads NUMBA_ENABLE_CUDASIM.

    Numba expects an integer: `1` is yes, `0` is no, and a word is no (Numba warns about it when it is imported).
    """
    try:
        return int(os.environ.get("NUMBA_ENABLE_CUDASIM", "0")) != 0
    except ValueError:
        return False


def simulator_environment() -> dict[str, str]:
    """Return the environment for a child process that uses Numba's simulator, whatever this process uses."""
    return {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}


def gpu_environment() -> dict[str, str]:
    """Return the environment for a child process that uses a GPU, whatever this process uses."""
    return {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}


def choose(simulator: bool) -> None:
    """Make this process and its children use Numba's simulator or a GPU; call only before Numba is imported."""
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1" if simulator else "0"
