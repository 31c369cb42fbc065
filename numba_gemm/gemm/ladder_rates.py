"""Measured rates of the FP32 configurations, from which `cost_model` computes times; how they were fitted is there."""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.ladder.stage import TileConfig
from ..kernels.stage import Stage

__all__ = ["COMPENSATED", "RATES", "Rate", "rate_of"]

TILE = 1934  # clocks of a tile of C's first trip to memory


@dataclass(frozen=True)
class Rate:
    """Measured speed of a configuration.

    Attributes
    ----------
    efficiency : float
        Fraction of FP32 peak when every SM is full and nothing waits.
    alone : int
        Clocks per k-tile of a block that has an SM to itself, beside its multiply-adds.
    resident : int
        Blocks that an SM holds at once, or fewer if those are as fast.
    floats : float
        Factor by which the multiply-adds take longer beside copies of an A or B that allows no vectors; 0 if the
        configuration is not considered for these.
    along : bool or None
        True if a narrow configuration is for an A whose contiguous axis is k, False if for any other; None if for both.
    first : int
        Clocks of a tile beside its k-tiles and the bytes of C: mostly its first trip to memory.
    """

    efficiency: float
    alone: int
    resident: int
    floats: float = 1.0
    along: bool | None = None
    first: int = TILE


# By stage and block tile, and by threads where two configurations have the same one; those that win nowhere are left
# out. `resident` follows from registers, threads and shared memory; `thin` has 1 where one block per SM keeps the
# memory busy. COMPENSATED: of such sums, if they differ.
RATES: dict[tuple[str | int, ...], Rate] = {
    ("coalesced", 2, 128, 1): Rate(0.096, alone=60, resident=8, first=1270),
    ("register_prefetch", 64, 64, 16): Rate(0.53, alone=1030, resident=4),
    ("register_prefetch", 128, 128, 16): Rate(0.69, alone=2210, resident=2),
    ("register_prefetch", 128, 256, 16): Rate(0.72, alone=680, resident=1),
    ("shared_tile", 16, 16, 16): Rate(0.12, alone=670, resident=8, along=False),
    ("shared_tile", 32, 32, 32): Rate(0.136, alone=1500, resident=2),
    ("stream_k", 128, 256, 16): Rate(0.994, alone=3430, resident=1, floats=1.09, first=5770),
    ("stream_k", 256, 128, 16): Rate(0.957, alone=3435, resident=1, floats=1.03, first=6420),
    ("stream_k", 128, 128, 16): Rate(0.85, alone=2945, resident=2, first=5090),
    ("stream_k", 64, 128, 16): Rate(0.789, alone=1035, resident=3, floats=1.11, first=3340),
    ("stream_k", 64, 128, 8): Rate(0.68, alone=650, resident=3, first=2700),
    ("stream_k", 64, 64, 16, 64): Rate(0.787, alone=1300, resident=4, floats=1.2, first=3890),
    ("stream_k", 64, 64, 16): Rate(0.626, alone=780, resident=4, floats=1.09, first=2430),
    ("stream_k", 32, 64, 16): Rate(0.589, alone=1050, resident=8, floats=1.07, first=2710),
    ("stream_k", 64, 32, 16): Rate(0.566, alone=1070, resident=8, floats=1.07, first=2600),
    ("stream_k", 32, 32, 16): Rate(0.451, alone=676, resident=8, floats=1.02, first=1780),
    ("stream_k", 256, 16, 16): Rate(0.5, alone=1300, resident=3, along=False, first=2600),
    # For a C of few columns.
    ("thin", 1, 1, 512): Rate(0.0266, alone=95, resident=2, floats=1.03, along=True, first=2100),
    ("thin", 4, 1, 256): Rate(0.0476, alone=274, resident=3, floats=1.12, along=True, first=2240),
    ("thin", 16, 1, 256): Rate(0.024, alone=223, resident=2, floats=0, first=2590),
    ("thin", 64, 1, 64): Rate(0.0495, alone=262, resident=1, floats=1.03, along=False, first=1970),
    ("thin", 4, 4, 512): Rate(0.103, alone=771, resident=1, first=2440),
    ("thin", 32, 4, 128): Rate(0.103, alone=378, resident=2, floats=1.01, along=True, first=2550),
    ("thin", 128, 4, 32): Rate(0.207, alone=728, resident=2, floats=1.2, along=False, first=2710),
    ("thin", 8, 8, 256): Rate(0.6, alone=1010, resident=1, first=2940),
    ("thin", 64, 8, 64): Rate(0.275, alone=415, resident=2, floats=1.02, along=True, first=3080),
    ("thin", 64, 16, 64): Rate(0.408, alone=973, resident=1, floats=1.19, along=True, first=3790),
    ("thin", 32, 16, 64): Rate(0.333, alone=810, resident=3, floats=1.09, along=False, first=3210),
    ("thin", 32, 32, 32): Rate(0.407, alone=446, resident=3, floats=1.03, first=3130),
}
COMPENSATED = {("thin", 128, 4, 32): Rate(0.207, alone=728, resident=1, floats=2.27, along=False, first=2710)}


def rate_of(stage: Stage, config: TileConfig) -> Rate | None:
    """Return the measured rate of a configuration, if it has one."""
    tile = stage.name, config.BM, config.BN, config.BK
    return RATES.get((*tile, config.threads), RATES.get(tile))
