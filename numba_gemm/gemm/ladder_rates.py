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
    ("stream_k", 128, 256, 16): Rate(1, alone=3310, resident=1, floats=1.07, first=5810),
    ("stream_k", 256, 128, 16): Rate(1, alone=3120, resident=1, floats=1.03, first=7150),
    ("stream_k", 128, 128, 16): Rate(0.838, alone=1840, resident=2, floats=1.04, first=7180),
    ("stream_k", 64, 128, 16): Rate(0.781, alone=916, resident=3, floats=1.07, first=3460),
    ("stream_k", 64, 128, 8): Rate(0.745, alone=550, resident=3, floats=1.07, first=2750),
    ("stream_k", 64, 64, 16, 64): Rate(0.765, alone=1200, resident=4, floats=1.08, first=3350),
    ("stream_k", 64, 64, 16): Rate(0.671, alone=763, resident=4, floats=1.08, first=3310),
    ("stream_k", 32, 64, 16): Rate(0.59, alone=942, resident=8, floats=1.08, first=2340),
    ("stream_k", 64, 32, 16): Rate(0.568, alone=1040, resident=8, first=2480),
    ("stream_k", 32, 32, 16): Rate(0.431, alone=519, resident=8, floats=1.03, first=1900),
    ("stream_k", 256, 16, 16): Rate(0.553, alone=1040, resident=3, along=False, first=2460),
    # For sums of one k-tile.
    ("short_sums", 32, 64, 16): Rate(0.495, alone=585, resident=8, floats=1.26, first=1340),
    ("short_sums", 32, 128, 8): Rate(0.923, alone=599, resident=4, first=1180),
    ("short_sums", 32, 32, 32): Rate(0.424, alone=355, resident=8, floats=1.4, first=1760),
    # For a C of few columns.
    ("thin", 1, 1, 512): Rate(0.021, alone=110, resident=4, floats=1.05, along=True, first=1830),
    ("thin", 4, 1, 256): Rate(0.0346, alone=91, resident=6, floats=1.42, along=True, first=1700),
    ("thin", 16, 1, 256): Rate(0.041, alone=143, resident=2, floats=0, first=1630),
    ("thin", 64, 1, 64): Rate(0.0401, alone=167, resident=3, along=False, first=1410),
    ("thin", 4, 4, 512): Rate(0.0767, alone=356, resident=1, first=1940),
    ("thin", 32, 4, 128): Rate(0.187, alone=415, resident=2, floats=1.24, along=True, first=2050),
    ("thin", 128, 4, 32): Rate(0.189, alone=292, resident=2, floats=1.13, along=False, first=1970),
    ("thin", 8, 8, 256): Rate(0.167, alone=662, resident=2, floats=1.36, first=1970),
    ("thin", 64, 8, 64): Rate(0.287, alone=196, resident=2, floats=1.08, along=True, first=2420),
    ("thin", 64, 16, 64): Rate(0.467, alone=989, resident=1, floats=1.16, along=True, first=3300),
    ("thin", 32, 16, 64): Rate(0.352, alone=537, resident=3, along=False, first=2430),
    ("thin", 16, 4, 128): Rate(0.117, alone=305, resident=4, first=1590),
    ("thin", 16, 16, 128): Rate(0.254, alone=312, resident=3, floats=1.06, first=2480),
    ("thin", 16, 32, 64): Rate(0.345, alone=580, resident=4, floats=1.02, first=2270),
    ("thin", 32, 32, 32): Rate(0.416, alone=534, resident=3, floats=1.02, first=2820),
    ("thin", 32, 32, 64): Rate(0.42, alone=824, resident=3, floats=1.05, first=2990),
}
COMPENSATED = {("thin", 128, 4, 32): Rate(0.207, alone=728, resident=1, floats=2.27, along=False, first=2710)}


def rate_of(stage: Stage, config: TileConfig) -> Rate | None:
    """Return the measured rate of a configuration, if it has one."""
    tile = stage.name, config.BM, config.BN, config.BK
    return RATES.get((*tile, config.threads), RATES.get(tile))
