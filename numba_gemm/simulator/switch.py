"""The switch between hardware and simulator, and the decorators that depend on it.

Numba reads NUMBA_ENABLE_CUDASIM at its first import and cannot switch afterwards. Importing this module decides which
one it is, as Numba will: without Numba, unless that was imported, or there is a file of its settings. The decorators
import it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .probe import simulator_requested

SETTINGS_FILE = ".numba_config.yaml"  # of Numba, in the working directory


def _simulator() -> bool:
    if "numba" in sys.modules or Path(SETTINGS_FILE).exists():
        from numba.core import config

        return bool(config.ENABLE_CUDASIM)
    return simulator_requested()


SIMULATOR: bool = _simulator()


def _cuda() -> Any:
    """Import ``numba.cuda``; raise RuntimeError if it is not what was decided."""
    from numba import cuda
    from numba.core import config

    if bool(config.ENABLE_CUDASIM) != SIMULATOR:
        asked, used = ("the simulator", "a GPU") if SIMULATOR else ("a GPU", "the simulator")
        raise RuntimeError(
            f"numba_gemm was loaded to use {asked}, and Numba was imported later to use {used}; expected the same "
            "NUMBA_ENABLE_CUDASIM; set it before the first import of either"
        )
    return cuda


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
    cuda = _cuda()
    if SIMULATOR:
        return fn
    return cuda.jit(device=True, forceinline=True, debug=False)(fn)
