"""Measured rates of the FP32 configurations, from which `cost_model` computes times; that module describes the fit."""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.ladder.tile_config import TileConfig
from ..kernels.stage import Stage

__all__ = ["RATES", "Rate", "rate_of"]

TILE = 1830  # clocks of a tile of C's first trip to memory


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
    replaced : bool
        True if slices of the same tile are faster where they are considered.
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
    replaced: bool = False


# By stage and block tile, by threads where two configurations have the same one, and by slices; those that win nowhere
# are left out. `resident` follows from registers, threads and shared memory; `thin` has 1 where one block per SM keeps
# the memory busy.
RATES: dict[tuple[str | int, ...], Rate] = {
    ("coalesced", 2, 128, 1): Rate(0.289, alone=89, resident=8, first=756),
    ("register_prefetch", 64, 64, 16): Rate(0.53, alone=1030, resident=4),
    ("register_prefetch", 128, 128, 16): Rate(0.69, alone=2210, resident=2),
    ("register_prefetch", 128, 256, 16): Rate(0.72, alone=680, resident=1),
    ("shared_tile", 16, 16, 16): Rate(0.12, alone=670, resident=8, along=False),
    ("shared_tile", 32, 32, 32): Rate(0.136, alone=1500, resident=2),
    ("stream_k", 128, 256, 16): Rate(1, alone=3090, resident=1, floats=1.07, first=6420),
    ("stream_k", 256, 128, 16): Rate(0.988, alone=3170, resident=1, floats=1.03, first=6380),
    ("stream_k", 128, 128, 16): Rate(0.838, alone=1810, resident=2, floats=1.04, first=6050),
    ("stream_k", 64, 128, 16): Rate(0.781, alone=950, resident=3, floats=1.07, first=3190),
    ("stream_k", 64, 128, 8): Rate(0.756, alone=550, resident=3, floats=1.07, first=2810),
    ("stream_k", 64, 64, 16, 64): Rate(0.743, alone=1040, resident=4, floats=1.07, first=3300, replaced=True),
    ("stream_k", 64, 64, 16): Rate(0.661, alone=719, resident=4, floats=1.11, first=2500),
    ("stream_k", 32, 64, 16): Rate(0.59, alone=875, resident=8, floats=1.07, first=2080, replaced=True),
    ("stream_k", 64, 32, 16): Rate(0.568, alone=1160, resident=8, first=1970),
    ("stream_k", 32, 32, 16): Rate(0.415, alone=472, resident=8, floats=1.02, first=1700),
    ("stream_k", 256, 16, 16): Rate(0.463, alone=877, resident=3, along=False, first=2520),
    ("stream_k", 64, 64, 16, 128, 2): Rate(0.726, alone=561, resident=3, floats=0, first=3210),
    ("stream_k", 32, 64, 16, 128, 2): Rate(0.585, alone=288, resident=4, floats=0, first=3140),
    ("stream_k", 32, 64, 32, 256, 4): Rate(0.55, alone=456, resident=2, floats=0, first=3160),
    # For sums of one k-tile.
    ("short_sums", 32, 64, 16): Rate(0.707, alone=712, resident=8, floats=1.41, first=1240),
    ("short_sums", 32, 128, 8): Rate(1, alone=710, resident=4, first=1080),
    ("short_sums", 32, 32, 32): Rate(0.466, alone=588, resident=8, floats=1.23, first=1640),
    # For a C of few columns or few elements.
    ("thin", 1, 1, 512): Rate(0.083, alone=220, resident=3, floats=1.96, along=True, first=1920),
    ("thin", 4, 1, 256): Rate(0.082, alone=238, resident=6, floats=2.21, along=True, first=1580),
    ("thin", 16, 1, 256): Rate(0.06, alone=150, resident=2, floats=0, first=1780),
    ("thin", 64, 1, 64): Rate(0.0432, alone=17, resident=3, floats=1.04, along=False, first=1450),
    ("thin", 4, 4, 512): Rate(0.103, alone=329, resident=2, floats=1.14, first=1560),
    ("thin", 32, 4, 128): Rate(0.163, alone=345, resident=2, floats=1.15, along=True, first=1730),
    ("thin", 128, 4, 32): Rate(0.187, alone=12, resident=3, floats=1.15, along=False, first=1650),
    ("thin", 8, 8, 256): Rate(0.213, alone=578, resident=3, floats=1.46, first=1780),
    ("thin", 64, 8, 64): Rate(0.287, alone=45, resident=2, floats=1.11, along=True, first=2100),
    ("thin", 64, 16, 64): Rate(0.62, alone=1100, resident=1, floats=1.12, along=True, first=2740),
    ("thin", 32, 16, 64): Rate(0.398, alone=499, resident=3, floats=1.06, along=False, first=2400),
    ("thin", 16, 4, 128): Rate(0.153, alone=163, resident=4, floats=1.15, first=1440),
    ("thin", 16, 16, 128): Rate(0.283, alone=50, resident=3, floats=1.11, first=2160),
    ("thin", 16, 32, 64): Rate(0.357, alone=507, resident=4, floats=1.1, first=2100),
    ("thin", 32, 32, 32): Rate(0.46, alone=451, resident=3, floats=1.06, first=2930),
}


def rate_of(stage: Stage, config: TileConfig) -> Rate | None:
    """Return the measured rate of a configuration, if it has one."""
    tile = stage.name, config.BM, config.BN, config.BK
    if config.lanes_k > 1 and not config.in_lanes:
        return RATES.get((*tile, config.threads, config.lanes_k))
    return RATES.get((*tile, config.threads), RATES.get(tile))
