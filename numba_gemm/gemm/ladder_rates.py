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
    ("stream_k", 128, 256, 16): Rate(1, alone=3090, resident=1, floats=1.07, first=6540),
    ("stream_k", 256, 128, 16): Rate(0.988, alone=3170, resident=1, floats=1.03, first=6500),
    ("stream_k", 128, 128, 16): Rate(0.838, alone=1810, resident=2, floats=1.05, first=6280),
    ("stream_k", 64, 128, 16): Rate(0.781, alone=1090, resident=3, floats=1.06, first=3690),
    ("stream_k", 64, 128, 8): Rate(0.734, alone=614, resident=3, floats=1.07, first=3160),
    ("stream_k", 64, 64, 16, 64): Rate(0.765, alone=1240, resident=4, floats=1.07, first=3500),
    ("stream_k", 64, 64, 16): Rate(0.671, alone=878, resident=4, floats=1.12, first=2500),
    ("stream_k", 32, 64, 16): Rate(0.599, alone=989, resident=8, floats=1.09, first=2460),
    ("stream_k", 64, 32, 16): Rate(0.568, alone=1050, resident=8, floats=1.06, first=2560),
    ("stream_k", 32, 32, 16): Rate(0.418, alone=615, resident=8, floats=1.01, first=1820),
    ("stream_k", 256, 16, 16): Rate(0.503, alone=814, resident=3, floats=1.18, along=False, first=2460),
    # For sums of one k-tile.
    ("short_sums", 64, 32, 32): Rate(0.401, alone=1000, resident=8, floats=1.15, first=2040),
    ("short_sums", 32, 64, 16): Rate(0.495, alone=466, resident=8, floats=1.1, first=1360),
    ("short_sums", 32, 128, 8): Rate(0.527, alone=237, resident=4, first=1210),
    ("short_sums", 32, 32, 32): Rate(0.43, alone=596, resident=8, floats=1.25, first=1830),
    # For a C of few columns.
    ("thin", 1, 1, 512): Rate(0.0232, alone=174, resident=2, along=True, first=1810),
    ("thin", 4, 1, 256): Rate(0.0452, alone=178, resident=3, floats=1.15, along=True, first=1720),
    ("thin", 16, 1, 256): Rate(0.0338, alone=220, resident=2, floats=0, first=1700),
    ("thin", 64, 1, 64): Rate(0.0492, alone=260, resident=1, floats=1.08, along=False, first=1670),
    ("thin", 4, 4, 512): Rate(0.105, alone=670, resident=1, first=1740),
    ("thin", 32, 4, 128): Rate(0.132, alone=327, resident=2, along=True, first=1780),
    ("thin", 128, 4, 32): Rate(0.183, alone=476, resident=2, floats=1.14, along=False, first=1810),
    ("thin", 8, 8, 256): Rate(0.6, alone=1170, resident=1, first=1860),
    ("thin", 64, 8, 64): Rate(0.25, alone=365, resident=2, floats=1.07, along=True, first=2070),
    ("thin", 64, 16, 64): Rate(0.4, alone=1120, resident=1, floats=1.18, along=True, first=3030),
    ("thin", 32, 16, 64): Rate(0.306, alone=467, resident=3, floats=1.03, along=False, first=2390),
    ("thin", 32, 32, 32): Rate(0.416, alone=588, resident=3, floats=1.06, first=2600),
}
COMPENSATED = {("thin", 128, 4, 32): Rate(0.207, alone=728, resident=1, floats=2.27, along=False, first=2710)}


def rate_of(stage: Stage, config: TileConfig) -> Rate | None:
    """Return the measured rate of a configuration, if it has one."""
    tile = stage.name, config.BM, config.BN, config.BK
    return RATES.get((*tile, config.threads), RATES.get(tile))
