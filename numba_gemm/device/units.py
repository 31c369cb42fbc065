"""Sizes that kernels and host code share, and division that rounds up. Imports neither Numba nor CUDA."""

from __future__ import annotations

WARP = 32  # threads
FLOAT32_BYTES = 4


def ceil_div(x: int, y: int) -> int:
    """Return x / y, rounded up to an integer."""
    return -(-x // y)
