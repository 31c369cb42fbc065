"""Inspection of kernels: the compiler's output, memory accesses, and single-stepping of a thread."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .debugging import debug
    from .stepping import step
    from .tracing import Trace, trace

__all__ = ["Trace", "debug", "step", "trace"]

_HOMES = {"Trace": ".tracing", "debug": ".debugging", "step": ".stepping", "trace": ".tracing"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)
