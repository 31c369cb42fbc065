"""Matrix multiplication of matrices that are divided among several GPUs, on `torch.distributed`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .explanation import Explanation, explain
    from .sgemm import distributed_sgemm

__all__ = ["Explanation", "distributed_sgemm", "explain"]

_HOMES = {"Explanation": ".explanation", "distributed_sgemm": ".sgemm", "explain": ".explanation"}

if not TYPE_CHECKING:  # `explain` needs no PyTorch; its module has another name, which would hide it

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOMES[name], __name__), name)
        globals()[name] = value
        return value
