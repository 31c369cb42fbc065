"""Hardware or simulator: the one switch, and the few decorators that depend on it.

Numba reads NUMBA_ENABLE_CUDASIM at its first import and cannot change its mind afterwards; importing this module is
such an import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda
from numba.core import config

SIMULATOR: bool = bool(config.ENABLE_CUDASIM)


def hardware_only(**jit_options: Any) -> dict[str, Any]:
    """Return `jit_options` on hardware and nothing in the simulator, which refuses options that it does not know.

    Without debug information, whatever NUMBA_CUDA_DEBUGINFO says: kernels are optimised, which excludes it.

    For `@cuda.jit(**hardware_only(launch_bounds=256))`.
    """
    return {} if SIMULATOR else {"debug": False, **jit_options}


def device_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make `fn` callable from kernels, always inlined: arguments and results stay in registers.

    In the simulator this is `fn` itself: the scheduler gives `fn`'s module the simulated `cuda` for the time of a
    launch, so a wrapper would only cost time at every call.
    """
    if SIMULATOR:
        return fn
    return cuda.jit(device=True, forceinline=True, debug=False)(fn)
