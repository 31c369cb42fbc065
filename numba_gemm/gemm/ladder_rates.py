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
    ("coalesced", 2, 128, 1): Rate(0.0988, alone=61, resident=8, first=1200),
    ("register_prefetch", 64, 64, 16): Rate(0.53, alone=1030, resident=4),
    ("register_prefetch", 128, 128, 16): Rate(0.69, alone=2210, resident=2),
    ("register_prefetch", 128, 256, 16): Rate(0.72, alone=680, resident=1),
    ("shared_tile", 16, 16, 16): Rate(0.12, alone=670, resident=8, along=False),
    ("shared_tile", 32, 32, 32): Rate(0.136, alone=1500, resident=2),
    ("stream_k", 128, 256, 16): Rate(1, alone=3280, resident=1, floats=1.07, first=5920),
    ("stream_k", 256, 128, 16): Rate(0.969, alone=3330, resident=1, floats=1.03, first=6290),
    ("stream_k", 128, 128, 16): Rate(0.842, alone=2310, resident=2, floats=1.01, first=5550),
    ("stream_k", 64, 128, 16): Rate(0.785, alone=1080, resident=3, floats=1.08, first=3620),
    ("stream_k", 64, 128, 8): Rate(0.7, alone=605, resident=3, floats=1.03, first=3260),
    ("stream_k", 64, 64, 16, 64): Rate(0.783, alone=1300, resident=4, floats=1.09, first=3730),
    ("stream_k", 64, 64, 16): Rate(0.655, alone=759, resident=4, floats=1.08, first=2780),
    ("stream_k", 32, 64, 16): Rate(0.58, alone=1040, resident=8, floats=1.05, first=2700),
    ("stream_k", 64, 32, 16): Rate(0.563, alone=993, resident=8, floats=1.02, first=2880),
    ("stream_k", 32, 32, 16): Rate(0.421, alone=622, resident=8, floats=1.01, first=2080),
    ("stream_k", 256, 16, 16): Rate(0.489, alone=1110, resident=3, floats=1.01, along=False, first=2630),
    # For a C of few columns.
    ("thin", 1, 1, 512): Rate(0.0227, alone=127, resident=2, floats=1.04, along=True, first=2060),
    ("thin", 4, 1, 256): Rate(0.0474, alone=229, resident=3, floats=1.12, along=True, first=1900),
    ("thin", 16, 1, 256): Rate(0.0295, alone=222, resident=2, floats=0, first=1890),
    ("thin", 64, 1, 64): Rate(0.0488, alone=263, resident=1, floats=1.05, along=False, first=1840),
    ("thin", 4, 4, 512): Rate(0.102, alone=821, resident=1, first=1850),
    ("thin", 32, 4, 128): Rate(0.117, alone=362, resident=2, along=True, first=1850),
    ("thin", 128, 4, 32): Rate(0.206, alone=563, resident=2, floats=1.19, along=False, first=2310),
    ("thin", 8, 8, 256): Rate(0.6, alone=1190, resident=1, first=2060),
    ("thin", 64, 8, 64): Rate(0.259, alone=412, resident=2, floats=1.07, along=True, first=2450),
    ("thin", 64, 16, 64): Rate(0.389, alone=1180, resident=1, floats=1.2, along=True, first=3320),
    ("thin", 32, 16, 64): Rate(0.306, alone=594, resident=3, floats=1.06, along=False, first=2680),
    ("thin", 32, 32, 32): Rate(0.404, alone=549, resident=3, floats=1.05, first=2950),
}
COMPENSATED = {("thin", 128, 4, 32): Rate(0.207, alone=728, resident=1, floats=2.27, along=False, first=2710)}


def rate_of(stage: Stage, config: TileConfig) -> Rate | None:
    """Return the measured rate of a configuration, if it has one."""
    tile = stage.name, config.BM, config.BN, config.BK
    return RATES.get((*tile, config.threads), RATES.get(tile))
