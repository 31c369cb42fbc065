"""Which stage, in which configuration, for a shape on a device: the policy behind ``stage="auto"``.

The model. A multiprocessor (SM) takes the blocks of C that fall to it in rounds of as many as it can hold. A round
costs what its multiply-adds cost at the stage's measured efficiency, but no less than the latency of its k-tiles, which
few blocks cannot hide; and before the first k-tile there is nothing to compute. The candidate that ends first wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .ladder import STAGES
from .ladder.stage import Stage, TileConfig
from .models.roofline import FP32_LANES_PER_SM

# Clocks from asking for a k-tile to computing with it: one trip to device memory, shared memory, a barrier or two.
TILE_LATENCY = 1000
# What a 128-bit stage keeps of its speed when operands are too ragged for 128-bit copies.
UNALIGNED = 0.8


@dataclass(frozen=True)
class Rate:
    """How fast a configuration is.

    Attributes
    ----------
    efficiency : float
        Fraction of FP32 peak when every SM is full.
    resident : int
        Blocks that an SM holds at once.
    overlap : float
        Part of a k-tile's latency that computing the tile before hides.
    """

    efficiency: float
    resident: int
    overlap: float = 0.0


# By stage and block tile. Only configurations that win somewhere are candidates. The efficiencies are those of
# prototypes of the same tiles on an H200 at 4096 cubed; `resident` follows from registers and threads.
RATES: dict[tuple[str, int, int, int], Rate] = {
    ("shared_tile", 16, 16, 16): Rate(0.12, resident=8),
    ("shared_tile", 32, 32, 32): Rate(0.12, resident=2),
    ("double_buffered", 128, 128, 8): Rate(0.58, resident=2, overlap=0.5),
    ("register_prefetch", 128, 128, 8): Rate(0.58, resident=2, overlap=0.5),
    ("warp_tiled", 64, 64, 16): Rate(0.45, resident=4, overlap=0.5),
    ("warp_tiled", 128, 128, 8): Rate(0.58, resident=2, overlap=0.5),
    ("warp_tiled", 128, 128, 16): Rate(0.70, resident=2, overlap=0.5),
    ("warp_tiled", 128, 256, 16): Rate(0.72, resident=1, overlap=0.5),
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
    block_clocks = config.BM * config.BN * config.BK * k_tiles / (lanes * rate.efficiency)
    latency = TILE_LATENCY * (1 + (k_tiles - 1) * (1 - rate.overlap))
    full_round = max(rate.resident * block_clocks, latency)
    return (
        TILE_LATENCY * (rounds + (rest > 0)) + rounds * full_round + (max(rest * block_clocks, latency) if rest else 0)
    )


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
