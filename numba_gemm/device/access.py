"""Accesses by which `tile_loader` loads tiles of an operand, and which of them suit a tile. Without Numba."""

from __future__ import annotations

ACCESSES = ("along4", "across4", "along1", "across1", "any")
SECTOR = 8  # floats along k that neighbouring threads copy of a row: 32 bytes
LINE = 32  # floats that a warp copies of one k


def covers(access: str, extent: int, bk: int, threads: int) -> bool:
    """Return whether the threads' copies cover a tile exactly."""
    if access == "along4":
        return bk % 4 == 0 and threads % (bk // 4) == 0 and extent % (threads // (bk // 4)) == 0
    if access == "across4":
        return threads % bk == 0 and extent % (4 * (threads // bk)) == 0
    if access == "across1":
        return threads % LINE == 0 and extent % LINE == 0 and bk % (threads // LINE) == 0
    rows = threads // SECTOR
    return bk % SECTOR == 0 and threads % SECTOR == 0 and (extent % rows == 0 or rows % extent == 0)


def vectors_per_row(bk: int, threads: int) -> int:
    """Return the number of vectors along k that a warp loads of each row of a tile: all, or four of 8, 12 and so on.

    It is four only if the warps of a block can divide the rows evenly.
    """
    vectors = bk // 4
    return 4 if vectors > 4 and vectors % 4 == 0 and threads % (8 * vectors) == 0 else vectors
