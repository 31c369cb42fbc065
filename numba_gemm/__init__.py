"""Matrix products for NVIDIA GPUs as Numba-CUDA kernels, from the naive one to those that match cuBLAS."""

# Importing this package imports neither Numba nor CUDA: the public names load at their first use, so that a program may
# still choose Numba's simulator (NUMBA_ENABLE_CUDASIM=1) after ``import numba_gemm``.

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import stages, tiled_sgemm
    from .gemm.autotune import Autotuned, autotune, clear_autotuned
    from .gemm.explain import explain
    from .gemm.explanation import Explanation
    from .gemm.occupancy import Occupancy, occupancy
    from .gemm.plan import Plan, plan
    from .gemm.precompile import precompile
    from .gemm.prepare import PreparedOperand, prepare
    from .kernels.ladder.cpu import cpu_sgemm
    from .kernels.launchable import Launchable, launchable
    from .runtime.driver import GpuUnavailable
    from .runtime.kernel_files import clear_cache
    from .streaming import streamed_sgemm

__version__ = "0.2.0"
__all__ = [
    "Autotuned",
    "Explanation",
    "GpuUnavailable",
    "Launchable",
    "Occupancy",
    "Plan",
    "PreparedOperand",
    "__version__",
    "autotune",
    "clear_autotuned",
    "clear_cache",
    "cpu_sgemm",
    "explain",
    "launchable",
    "occupancy",
    "plan",
    "precompile",
    "prepare",
    "stages",
    "streamed_sgemm",
    "tiled_sgemm",
]

_HOMES = {
    "Autotuned": ".gemm.autotune",
    "Explanation": ".gemm.explanation",
    "GpuUnavailable": ".runtime.driver",
    "Launchable": ".kernels.launchable",
    "Occupancy": ".gemm.occupancy",
    "Plan": ".gemm.plan",
    "PreparedOperand": ".gemm.prepare",
    "autotune": ".gemm.autotune",
    "clear_autotuned": ".gemm.autotune",
    "clear_cache": ".runtime.kernel_files",
    "cpu_sgemm": ".kernels.ladder.cpu",
    "explain": ".gemm.explain",
    "launchable": ".kernels.launchable",
    "occupancy": ".gemm.occupancy",
    "plan": ".gemm.plan",
    "precompile": ".gemm.precompile",
    "prepare": ".gemm.prepare",
    "stages": ".api",
    "streamed_sgemm": ".streaming",
    "tiled_sgemm": ".api",
}

logging.getLogger(__name__).addHandler(logging.NullHandler())

if not TYPE_CHECKING:  # else type checkers would accept every name

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOMES[name], __name__), name)
        globals()[name] = value  # the next use finds it without coming here
        return value


def __dir__() -> list[str]:
    return list(__all__)
