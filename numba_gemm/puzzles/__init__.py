"""Puzzles in which the reader writes the kernels of the ladder, checked on the simulator."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checker import Verdict, check
    from .record import Puzzle, puzzle

__all__ = ["PUZZLES", "Puzzle", "Verdict", "check", "puzzle"]

# From easy to hard, in the order of the ladder's stages.
PUZZLES = (
    "element",
    "product",
    "coalesced",
    "strided_sum",
    "transpose",
    "barriers",
    "shared_tile",
    "edges",
    "thread_column",
    "thread_tile",
    "vector_copy",
    "bank_conflicts",
    "two_buffers",
    "warp_tile",
    "async_copies",
    "epilogue",
)

_HOMES = {"Puzzle": ".record", "Verdict": ".checker", "check": ".checker", "puzzle": ".record"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)
