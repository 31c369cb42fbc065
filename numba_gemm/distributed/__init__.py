"""Matrix multiplication of matrices that are divided among several GPUs, on `torch.distributed`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..arrays.extras import from_extra

if TYPE_CHECKING:
    from .copying import release_memory
    from .explanation import Explanation, explain
    from .sgemm import distributed_sgemm

__all__ = ["Explanation", "distributed_sgemm", "explain", "release_memory"]

_HOMES = {
    "Explanation": ".explanation",
    "distributed_sgemm": ".sgemm",
    "explain": ".explanation",
    "release_memory": ".copying",
}

if not TYPE_CHECKING:  # `explain` needs no PyTorch; its module has another name, which would hide it

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with from_extra("torch", "torch"):
            value = getattr(importlib.import_module(_HOMES[name], __name__), name)
        globals()[name] = value
        return value
