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
    ("coalesced", 2, 128, 1): Rate(0.101, alone=76, resident=8, first=900),
    ("register_prefetch", 64, 64, 16): Rate(0.53, alone=1030, resident=4),
    ("register_prefetch", 128, 128, 16): Rate(0.69, alone=2210, resident=2),
    ("register_prefetch", 128, 256, 16): Rate(0.72, alone=680, resident=1),
    ("shared_tile", 16, 16, 16): Rate(0.12, alone=670, resident=8, along=False),
    ("shared_tile", 32, 32, 32): Rate(0.136, alone=1500, resident=2),
    ("stream_k", 128, 256, 16): Rate(1, alone=3310, resident=1, floats=1.07, first=6540),
    ("stream_k", 256, 128, 16): Rate(1, alone=3170, resident=1, floats=1.03, first=7700),
    ("stream_k", 128, 128, 16): Rate(0.838, alone=1810, resident=2, floats=1.04, first=7500),
    ("stream_k", 64, 128, 16): Rate(0.781, alone=969, resident=3, floats=1.07, first=3460),
    ("stream_k", 64, 128, 8): Rate(0.734, alone=534, resident=3, floats=1.07, first=2750),
    ("stream_k", 64, 64, 16, 64): Rate(0.765, alone=1240, resident=4, floats=1.07, first=3500),
    ("stream_k", 64, 64, 16): Rate(0.671, alone=763, resident=4, floats=1.08, first=2880),
    ("stream_k", 32, 64, 16): Rate(0.59, alone=987, resident=8, floats=1.08, first=2300),
    ("stream_k", 64, 32, 16): Rate(0.568, alone=949, resident=8, first=2480),
    ("stream_k", 32, 32, 16): Rate(0.431, alone=519, resident=8, floats=1.03, first=1900),
    ("stream_k", 256, 16, 16): Rate(0.453, alone=824, resident=3, along=False, first=2390),
    # For sums of one k-tile.
    ("short_sums", 32, 64, 16): Rate(0.437, alone=494, resident=8, floats=1.22, first=1340),
    ("short_sums", 32, 128, 8): Rate(0.648, alone=401, resident=4, first=1230),
    ("short_sums", 32, 32, 32): Rate(0.43, alone=514, resident=8, floats=1.34, first=1760),
    # For a C of few columns.
    ("thin", 1, 1, 512): Rate(0.0214, alone=115, resident=4, floats=1.06, along=True, first=1830),
    ("thin", 4, 1, 256): Rate(0.0357, alone=119, resident=6, floats=1.44, along=True, first=1700),
    ("thin", 16, 1, 256): Rate(0.0416, alone=176, resident=2, floats=0, first=1630),
    ("thin", 64, 1, 64): Rate(0.0431, alone=235, resident=3, floats=1.03, along=False, first=1450),
    ("thin", 4, 4, 512): Rate(0.087, alone=500, resident=1, first=1690),
    ("thin", 32, 4, 128): Rate(0.162, alone=337, resident=2, floats=1.09, along=True, first=2050),
    ("thin", 128, 4, 32): Rate(0.17, alone=370, resident=2, floats=1.05, along=False, first=1910),
    ("thin", 8, 8, 256): Rate(0.163, alone=730, resident=2, floats=1.27, first=1970),
    ("thin", 64, 8, 64): Rate(0.287, alone=257, resident=2, floats=1.07, along=True, first=2420),
    ("thin", 64, 16, 64): Rate(0.453, alone=989, resident=1, floats=1.13, along=True, first=3260),
    ("thin", 32, 16, 64): Rate(0.352, alone=537, resident=3, floats=1.03, along=False, first=2430),
    ("thin", 16, 4, 128): Rate(0.117, alone=320, resident=4, first=1590),
    ("thin", 16, 16, 128): Rate(0.254, alone=385, resident=3, floats=1.08, first=2400),
    ("thin", 16, 32, 64): Rate(0.345, alone=580, resident=4, floats=1.05, first=2270),
    ("thin", 32, 32, 32): Rate(0.416, alone=534, resident=3, floats=1.01, first=2820),
    ("thin", 32, 32, 64): Rate(0.42, alone=824, resident=3, floats=1.11, first=2990),
}
COMPENSATED = {("thin", 128, 4, 32): Rate(0.207, alone=728, resident=1, floats=2.27, along=False, first=2710)}


def rate_of(stage: Stage, config: TileConfig) -> Rate | None:
    """Return the measured rate of a configuration, if it has one."""
    tile = stage.name, config.BM, config.BN, config.BK
    return RATES.get((*tile, config.threads), RATES.get(tile))
