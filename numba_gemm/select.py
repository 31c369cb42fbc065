"""Which stage, in which configuration, for a shape on a device: the policy behind ``stage="auto"``.

The model. A multiprocessor (SM) takes the blocks of C that fall to it in rounds of as many as it can hold. In a round
a k-tile costs what its multiply-adds cost at the configuration's measured efficiency, but no less than it costs a
block that has the SM to itself and cannot hide its waits; and each round begins with a trip to memory. The candidate
that ends first wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .ladder import STAGES
from .ladder.stage import Stage, TileConfig
from .models.roofline import FP32_LANES_PER_SM

# Clocks from a round's start to its first multiply-add: a launch's or a block's own start and a trip to device memory.
START = 2000
# What a 128-bit stage keeps of its speed when operands are too ragged for 128-bit copies.
UNALIGNED = 0.87


@dataclass(frozen=True)
class Rate:
    """How fast a configuration is.

    Attributes
    ----------
    efficiency : float
        Fraction of FP32 peak when every SM is full.
    alone : int
        Clocks a k-tile of a block that has an SM to itself.
    resident : int
        Blocks that an SM holds at once.
    """

    efficiency: float
    alone: int
    resident: int


# By stage and block tile; configurations that win nowhere are left out. Measured on an H200 (132 SMs at 1.98 GHz,
# graph replays): `alone` at M = N = 128, 192, 256 with K = 1024, `efficiency` at 1536 to 8192 with K = 1024 and at
# 8192 cubed. `resident` follows from registers, threads and shared memory.
RATES: dict[tuple[str, int, int, int], Rate] = {
    ("shared_tile", 16, 16, 16): Rate(0.12, alone=700, resident=8),
    ("shared_tile", 32, 32, 32): Rate(0.136, alone=2250, resident=2),
    ("register_prefetch", 128, 128, 8): Rate(0.64, alone=1680, resident=2),
    ("warp_tiled", 64, 64, 16): Rate(0.53, alone=1320, resident=4),
    ("warp_tiled", 128, 128, 16): Rate(0.69, alone=3470, resident=2),
    ("warp_tiled", 128, 256, 16): Rate(0.72, alone=5630, resident=1),
    ("async_copy", 64, 64, 16): Rate(0.59, alone=1225, resident=5),
    ("async_copy", 64, 128, 16): Rate(0.66, alone=1920, resident=3),
    ("async_copy", 128, 128, 16): Rate(0.685, alone=3460, resident=2),
    ("async_copy", 128, 256, 16): Rate(0.76, alone=5380, resident=1),
}


def resolve(name: str, cc: tuple[int, int]) -> Stage:
    """Return the stage of a name.

    Raises
    ------
    ValueError
        if there is none of that name, or a GPU of compute capability `cc` cannot run it.
    """
    if name not in STAGES:
        raise ValueError(f"stage is {name!r}; expected 'auto' or one of {', '.join(STAGES)}; pass one of these names")
    stage = STAGES[name]
    if cc < stage.min_cc:
        able = ", ".join(other.name for other in STAGES.values() if cc >= other.min_cc)
        raise ValueError(
            f"stage is {name!r}, which needs compute capability {_dotted(stage.min_cc)}; this GPU has {_dotted(cc)}; "
            f"pass 'auto' or one of {able}"
        )
    return stage


def _dotted(cc: tuple[int, int]) -> str:
    return f"{cc[0]}.{cc[1]}"


def predicted_clocks(
    rate: Rate, config: TileConfig, m: int, n: int, k: int, *, lanes: int = 128, sm_count: int = 132
) -> float:
    """Clocks that an (m, k) by (k, n) product takes, by the model above, on SMs of `lanes` multiply-adds a clock."""
    k_tiles = max(1, -(-k // config.BK))
    blocks = -(-m // config.BM) * -(-n // config.BN)
    rounds, rest = divmod(-(-blocks // sm_count), rate.resident)  # on the SM with the most blocks
    full_tile = config.BM * config.BN * config.BK / (lanes * rate.efficiency)

    def round_clocks(resident: int) -> float:
        return START + k_tiles * max(rate.alone, resident * full_tile) if resident else 0.0

    return rounds * round_clocks(rate.resident) + round_clocks(rest)


@lru_cache(maxsize=4096)
def choose(m: int, n: int, k: int, aligned: bool, cc: tuple[int, int], sm_count: int = 132) -> tuple[Stage, TileConfig]:
    """Return the stage and configuration expected to be fastest for C = A @ B of shapes (m, k) and (k, n).

    Parameters
    ----------
    m, n, k : int
        Extents in elements.
    aligned : bool
        Whether all operands allow 128-bit accesses.
    cc : tuple of int
        Compute capability; a stage that needs a higher one is no candidate.
    sm_count : int
        Multiprocessors of the device.
    """
    lanes = FP32_LANES_PER_SM.get(cc, 128)
    best: tuple[float, Stage, TileConfig] | None = None
    for stage in STAGES.values():
        for config in stage.configs if cc >= stage.min_cc else ():
            rate = RATES.get((stage.name, config.BM, config.BN, config.BK))
            if rate is None:
                continue
            clocks = predicted_clocks(rate, config, m, n, k, lanes=lanes, sm_count=sm_count)
            if stage.vectorized and not aligned:
                clocks /= UNALIGNED
            if best is None or clocks < best[0]:
                best = (clocks, stage, config)
    if best is None:
        raise RuntimeError(f"no stage in select.RATES runs on compute capability {_dotted(cc)}")
    return best[1:]
