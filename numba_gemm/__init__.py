"""Matrix products for NVIDIA GPUs as Numba-CUDA kernels, from the naive one to those that match cuBLAS.

Importing this package imports neither Numba nor CUDA: the public names load at their first use, so that a program may
still choose Numba's simulator (NUMBA_ENABLE_CUDASIM=1) after ``import numba_gemm``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import stages, tiled_sgemm
    from .explanation import Explanation, explain
    from .kernels.ladder.cpu import cpu_sgemm
    from .plans import Plan, plan
    from .precompilation import precompile
    from .residency import Occupancy, occupancy
    from .runtime.driver import GpuUnavailable
    from .runtime.kernel_cache import clear_cache
    from .streaming import streamed_sgemm
    from .tuning import Autotuned, autotune, clear_autotuned

__version__ = "0.1.0"
__all__ = [
    "Autotuned",
    "Explanation",
    "GpuUnavailable",
    "Occupancy",
    "Plan",
    "__version__",
    "autotune",
    "clear_autotuned",
    "clear_cache",
    "cpu_sgemm",
    "explain",
    "occupancy",
    "plan",
    "precompile",
    "stages",
    "streamed_sgemm",
    "tiled_sgemm",
]

_HOMES = {
    "Autotuned": ".tuning",
    "Explanation": ".explanation",
    "GpuUnavailable": ".runtime.driver",
    "Occupancy": ".residency",
    "Plan": ".plans",
    "autotune": ".tuning",
    "clear_autotuned": ".tuning",
    "clear_cache": ".runtime.kernel_cache",
    "cpu_sgemm": ".kernels.ladder.cpu",
    "explain": ".explanation",
    "occupancy": ".residency",
    "plan": ".plans",  # not .plan: a module of the function's name would take its place here
    "precompile": ".precompilation",
    "stages": ".api",
    "streamed_sgemm": ".streaming",
    "tiled_sgemm": ".api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name], __name__), name)
    globals()[name] = value  # the next use finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
