"""A model of the speed of tensor-core kernels: rates of block tiles, and rounds in which they are computed."""

from __future__ import annotations

from functools import lru_cache
from operator import itemgetter
from typing import Any

from ..device.units import FLOAT32_BYTES, ceil_div
from ..kernels.stage import Partition, Stage
from ..kernels.tensor_core import TENSOR_PRECISIONS, TensorPrecision
from ..kernels.tensor_core.stage import LONG_SUM, TensorStage, precision_for
from ..kernels.tensor_core.tma_stage import TmaStage

__all__ = ["SPEEDS", "configs_for", "expected_seconds", "seconds_of", "tile_rates"]

# TFLOP/s of an H200 that has tiles of one size for all its multiprocessors, for precisions with one product of parts,
# with several, and with a compensated sum of several. Only ratios matter. Tiles of 64x96 pay for their kernels, each
# compiled for a precision, where sums are compensated.
RATES: dict[str, dict[tuple[int, int], float]] = {
    "one": {(128, 256): 600.0, (128, 128): 480.0, (64, 128): 330.0, (64, 64): 220.0},
    "several": {(128, 128): 230.0, (64, 128): 168.0, (64, 64): 115.0},
    "compensated": {(128, 128): 116.0, (64, 128): 89.0, (64, 96): 80.0, (64, 64): 73.0},
}
# The same for operands that tensor maps describe.
TMA_RATES = {(128, 256): 415.0, (128, 192): 420.0, (128, 128): 345.0, (64, 128): 275.0, (64, 64): 165.0}
# TFLOP/s of an H200 at 16384 cubed, decomposition included; of short sums at 4096x4096x768.
SPEEDS = {
    "bf16x6_stepwise": 61.0,
    "tf32x3": 107.0,
    "bf16x3": 217.0,
    "bf16x6": 108.0,
    "bf16x9": 80.0,
    "fp16x3": 212.0,
    "tf32": 351.0,
    "bf16": 669.0,
}
H200_MULTIPROCESSORS = 132
TILE_END = 1.5e-6  # seconds that a tile takes beside its sums
MEMORY_EFFICIENCY = 0.8  # of device memory's theoretical bandwidth, that the decomposition reaches
LAUNCH = 2e-6  # seconds that each launch before the last one adds
# Split sums, of `LONG_SUM` terms and more: ways to divide each tile; seconds from the last partial sum to the first
# element of C; byte/s of partial sums, written and read, which stay in the L2 cache; and the factor by which the model
# must expect a division to be faster.
SPLITS = (2, 3, 4, 6, 8, 11, 16, 22, 33, 44, 66, 132)
ADDING, PARTIALS_RATE, CLEAR_MARGIN = 2e-6, 4e12, 1.2
SPLIT_COLUMNS = 64  # divides those of tiles whose sums may be split; others would need more kernels for little


def tile_rates(precision: TensorPrecision) -> dict[tuple[int, int], float]:
    """Return throughputs in TFLOP/s by the extents of a block tile."""
    return RATES["one" if len(precision.products) == 1 else "compensated" if precision.compensated else "several"]


def configs_for(stage: Stage, precision: str, k: int) -> list[Any]:
    """Return the configurations of a tensor-core stage that compute in a precision."""
    if not isinstance(stage, TensorStage):
        return list(stage.configs)
    if not stage.complete:
        return list(stage.configs[:1])
    rates = tile_rates(precision_for(precision, k))
    return [config for config in stage.configs if (config.BM, config.BN) in rates]


def seconds_of(
    stage: Stage, precision: str, m: int, n: int, k: int, matrices: int, sm_count: int, tma: str
) -> list[tuple[float, Any, Partition | None]]:
    """Return expected seconds of the multiplication, configuration and partition, the best first.

    It is assumed that all blocks compute one tile after the other at the same pace. A division of sums among blocks
    counts as better only if it is expected to be faster by `CLEAR_MARGIN`.
    """
    rows, cols = (n, m) if tma == "NN" and isinstance(stage, TmaStage) else (m, n)
    slot_k, rated = _rated(stage, precision, k < LONG_SUM)
    flops_by_area = 2.0 * max(k, slot_k) * sm_count
    slots, splits = -(-k // slot_k), isinstance(stage, TensorStage) and stage.splits and k >= LONG_SUM
    found: list[tuple[float, float, Any, Partition | None]] = []
    for config, BM, BN, rate in rated:
        tiles = ceil_div(rows, BM) * ceil_div(cols, BN)
        rounds = ceil_div(matrices * tiles, sm_count)
        summing = BM * BN * flops_by_area / (rate * 1e12)
        seconds = rounds * (TILE_END + summing)
        found.append((seconds, seconds, config, None))
        most = min(slots, sm_count // (matrices * tiles)) if splits and BN % SPLIT_COLUMNS == 0 else 1
        for shares in (*(count for count in SPLITS if count < most), most) if most > 1 else ():
            partials = 2 * FLOAT32_BYTES * BM * BN * matrices * tiles * shares
            seconds = TILE_END + summing * ceil_div(slots, shares) * slot_k / k + LAUNCH + ADDING
            seconds += partials / PARTIALS_RATE
            found.append((seconds * CLEAR_MARGIN, seconds, config, Partition(tiles * shares, 0)))
    slower = SPEEDS[precision] / SPEEDS[precision_for(precision, k).name]
    return [(seconds * slower, *one) for _, seconds, *one in sorted(found, key=itemgetter(0))]


@lru_cache(maxsize=64)
def _rated(stage: Stage, precision: str, short: bool) -> tuple[int, list[tuple[Any, int, int, float]]]:
    """Return the least terms that a sum is computed with; and the configurations, their extents and throughputs."""
    k = 1 if short else LONG_SUM
    if isinstance(stage, TensorStage):
        slot_k, rates = precision_for(precision, k).slot_k, tile_rates(precision_for(precision, k))
    else:
        slot_k, rates = 1, TMA_RATES
    slowest = min(rates.values())
    configs = configs_for(stage, precision, k)
    return slot_k, [(one, one.BM, one.BN, rates.get((one.BM, one.BN), slowest)) for one in configs]


def decomposition_seconds(
    precision: str, m: int, n: int, k: int, a_matrices: int, b_matrices: int, bandwidth: float
) -> float:
    """Return the expected seconds of decomposing both operands."""
    tensor_precision = TENSOR_PRECISIONS[precision]
    written = tensor_precision.parts / tensor_precision.per_word  # words per element
    words = (a_matrices * m + b_matrices * n) * k * (1 + tensor_precision.scaled + written)
    return copy_seconds(4 * words, bandwidth) + LAUNCH * tensor_precision.scaled


def copy_seconds(size: float, bandwidth: float) -> float:
    """Return the expected seconds of a launch that reads and writes this number of bytes; 0 for 0."""
    return size and (size / (MEMORY_EFFICIENCY * bandwidth) if bandwidth else 0.0) + LAUNCH


def expected_seconds(precision: str, m: int, n: int, k: int, sm_count: int) -> float:
    """Return about how long a large product takes: at the speed of `SPEEDS`, by the number of multiprocessors."""
    speed = SPEEDS[precision_for(precision, k).name] * 1e12 * sm_count / H200_MULTIPROCESSORS
    return 2.0 * m * n * k / speed
