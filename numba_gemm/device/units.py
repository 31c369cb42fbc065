"""Sizes that kernels and host code share, and division that rounds up. Imports neither Numba nor CUDA."""

from __future__ import annotations

KIB, MIB = 1 << 10, 1 << 20
WARP = 32  # threads
FLOAT32_BYTES = 4
VECTOR_BYTES = 16  # of a 128-bit access
REGISTERS = 1 << 16  # of a multiprocessor, and of a block at the most
MAX_GRID_X, MAX_GRID_Y = (1 << 31) - 1, 65535  # blocks of a launch
STATIC_SHARED_BYTES = 48 << 10  # of shared memory per block, unless an attribute of the kernel allows more
RESERVED_SHARED = 1 << 10  # bytes of shared memory that the system takes for each block, from 8.0 on
# Compute capability from which on a kernel can let the next one start before it has ended (`device.grid_order`).
OVERLAPPING = (9, 0)
# Tiles that a warpgroup's matrix instruction reads from shared memory: bytes per row, along k, whose 16-byte chunks are
# permuted by XOR with the row modulo eight; rows form groups of eight.
ROW_BYTES = 128
GROUP_BYTES = 8 * ROW_BYTES


def ceil_div(x: int, y: int) -> int:
    """Return x / y, rounded up to an integer."""
    return -(-x // y)
