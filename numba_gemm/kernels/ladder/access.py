"""Choice of the access by which a tile loader reads an operand of a given layout."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from ...device.access import ACCESSES, covers
from ...device.units import FLOAT32_BYTES, VECTOR_BYTES
from ..product import Layout

if TYPE_CHECKING:
    from .stage import TileConfig


def access_of(able: tuple[str, ...], x: Layout, steps: int) -> str:
    """Return the best access, of those `able`, to (mn, k) matrices; `steps`, in bytes, lead to others of a batch."""
    vectors = x.offset == 0 and steps % VECTOR_BYTES == 0
    along, across = x.col_stride == FLOAT32_BYTES, x.row_stride == FLOAT32_BYTES
    if along and vectors and x.row_stride % VECTOR_BYTES == 0 and x.cols % 4 == 0 and "along4" in able:
        return "along4"
    if across and vectors and x.col_stride % VECTOR_BYTES == 0 and x.rows % 4 == 0 and "across4" in able:
        return "across4"
    return "along1" if along and "along1" in able else "across1" if across and "across1" in able else "any"


@lru_cache(maxsize=256)
def covering(config: TileConfig, extent: int) -> tuple[str, ...]:
    """Return the accesses of a tile loader that cover a tile with `extent` rows."""
    if config.lanes_k > 1:  # `thin` copies any tile; vectors of a single row would hardly help, and need more kernels
        return ACCESSES if extent % 4 == 0 else ("along1", "any")
    return tuple(access for access in ACCESSES if covers(access, extent, config.BK, config.threads))
