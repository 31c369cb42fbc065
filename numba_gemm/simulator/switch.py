"""The switch between hardware and simulator, and the decorators that depend on it.

Numba reads NUMBA_ENABLE_CUDASIM at its first import and cannot switch afterwards. Importing this module imports Numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda
from numba.core import config

SIMULATOR: bool = bool(config.ENABLE_CUDASIM)


def hardware_only(**jit_options: Any) -> dict[str, Any]:
    """Return `jit_options` on hardware and nothing in the simulator, which rejects unknown options.

    Debug information is off regardless of NUMBA_CUDA_DEBUGINFO, because kernels are optimised, which excludes it.

    Intended for `@cuda.jit(**hardware_only(launch_bounds=256))`.
    """
    return {} if SIMULATOR else {"debug": False, **jit_options}


def device_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make `fn` callable from kernels, always inlined, so that arguments and results stay in registers.

    In the simulator this returns `fn` itself: the scheduler installs the simulated `cuda` in `fn`'s module during a
    launch, so a wrapper would only slow down every call.
    """
    if SIMULATOR:
        return fn
    return cuda.jit(device=True, forceinline=True, debug=False)(fn)
