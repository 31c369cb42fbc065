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
    ("coalesced", 2, 128, 1): Rate(0.101, alone=62, resident=8, first=1160),
    ("register_prefetch", 64, 64, 16): Rate(0.53, alone=1030, resident=4),
    ("register_prefetch", 128, 128, 16): Rate(0.69, alone=2210, resident=2),
    ("register_prefetch", 128, 256, 16): Rate(0.72, alone=680, resident=1),
    ("shared_tile", 16, 16, 16): Rate(0.12, alone=670, resident=8, along=False),
    ("shared_tile", 32, 32, 32): Rate(0.136, alone=1500, resident=2),
    ("stream_k", 128, 256, 16): Rate(1, alone=3290, resident=1, floats=1.07, first=6110),
    ("stream_k", 256, 128, 16): Rate(0.972, alone=3310, resident=1, floats=1.03, first=6360),
    ("stream_k", 128, 128, 16): Rate(0.834, alone=2000, resident=2, floats=1.01, first=5940),
    ("stream_k", 64, 128, 16): Rate(0.782, alone=1100, resident=3, floats=1.07, first=3710),
    ("stream_k", 64, 128, 8): Rate(0.712, alone=604, resident=3, floats=1.04, first=3330),
    ("stream_k", 64, 64, 16, 64): Rate(0.772, alone=1290, resident=4, floats=1.08, first=3750),
    ("stream_k", 64, 64, 16): Rate(0.66, alone=750, resident=4, floats=1.09, first=2800),
    ("stream_k", 32, 64, 16): Rate(0.579, alone=1040, resident=8, floats=1.05, first=2690),
    ("stream_k", 64, 32, 16): Rate(0.549, alone=961, resident=8, first=2910),
    ("stream_k", 32, 32, 16): Rate(0.413, alone=595, resident=8, first=2090),
    ("stream_k", 256, 16, 16): Rate(0.48, alone=1020, resident=3, floats=1.02, along=False, first=2660),
    # For a C of few columns.
    ("thin", 1, 1, 512): Rate(0.0226, alone=156, resident=2, floats=1.03, along=True, first=1970),
    ("thin", 4, 1, 256): Rate(0.0468, alone=213, resident=3, floats=1.12, along=True, first=1860),
    ("thin", 16, 1, 256): Rate(0.031, alone=221, resident=2, floats=0, first=1800),
    ("thin", 64, 1, 64): Rate(0.0483, alone=263, resident=1, floats=1.07, along=False, first=1780),
    ("thin", 4, 4, 512): Rate(0.102, alone=846, resident=1, first=1770),
    ("thin", 32, 4, 128): Rate(0.119, alone=350, resident=2, along=True, first=1810),
    ("thin", 128, 4, 32): Rate(0.202, alone=513, resident=2, floats=1.18, along=False, first=2260),
    ("thin", 8, 8, 256): Rate(0.6, alone=1200, resident=1, first=1990),
    ("thin", 64, 8, 64): Rate(0.257, alone=402, resident=2, floats=1.1, along=True, first=2360),
    ("thin", 64, 16, 64): Rate(0.387, alone=1200, resident=1, floats=1.2, along=True, first=3180),
    ("thin", 32, 16, 64): Rate(0.301, alone=541, resident=3, floats=1.05, along=False, first=2620),
    ("thin", 32, 32, 32): Rate(0.407, alone=591, resident=3, floats=1.06, first=2860),
}
COMPENSATED = {("thin", 128, 4, 32): Rate(0.207, alone=728, resident=1, floats=2.27, along=False, first=2710)}


def rate_of(stage: Stage, config: TileConfig) -> Rate | None:
    """Return the measured rate of a configuration, if it has one."""
    tile = stage.name, config.BM, config.BN, config.BK
    return RATES.get((*tile, config.threads), RATES.get(tile))
