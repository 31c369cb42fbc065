"""A model of the speed of tensor-core kernels: rates of block tiles, and rounds in which they are computed.

A new shape waits for `seconds_of`, so quotients are rounded up in place, as in `cost_model`.
"""

from __future__ import annotations

from functools import lru_cache
from operator import itemgetter
from typing import Any

from ..device.units import FLOAT32_BYTES
from ..kernels.ladder.stage import LadderStage, compensates
from ..kernels.product import BFLOAT16, FLOAT32, ITEM_BYTES
from ..kernels.stage import Partition, Stage
from ..kernels.tensor_core import TENSOR_PRECISIONS, TensorPrecision
from ..kernels.tensor_core.stage import LONG_SUM, ROW_WORDS, TensorStage, precision_for
from ..kernels.tensor_core.tma_stage import LAYOUTS, TmaStage, even_rows

__all__ = [
    "SPEEDS",
    "configs_for",
    "expected_seconds",
    "fused_seconds",
    "seconds_of",
    "tile_rates",
]

FIRST = itemgetter(0)

# TFLOP/s of an H200 that has tiles of one size for all its multiprocessors, for precisions with one product of parts,
# with several, with a compensated sum of several, and with one that is stepwise, of six products or nine. Whole tiles
# are ranked by these.
RATES: dict[str, dict[tuple[int, int], float]] = {
    "one": {(128, 256): 690.0, (128, 128): 550.0, (64, 128): 380.0, (64, 64): 250.0},
    "several": {(128, 128): 230.0, (64, 128): 168.0, (64, 64): 115.0},
    "compensated": {(128, 128): 121.0, (64, 128): 91.0, (64, 96): 83.0, (64, 64): 77.0},
    "stepwise": {(128, 128): 98.0, (64, 128): 74.0},
    "stepwise of nine": {(128, 128): 84.0, (64, 128): 56.0},
}
# Tiles that precisions other than bf16x6 do without, since each kernel takes time to compile. Smaller ones with
# stepwise sums are left out, too: `fused_decomposition` computes most small products with short sums.
LEFT_OUT = {(64, 96)}
# The same rates if no multiprocessor has more than a few tiles: operands are then read few times, and power limits
# less. Those of "several" are fitted to candidates of up to `FEW_ROUNDS` rounds on an H200, and those of sums that are
# compensated to 1,399 candidates for 233 products. Those of "one" were measured on an H100, and hold for one round.
FEW_TILES_RATES: dict[str, dict[tuple[int, int], float]] = {
    "one": {(128, 256): 700.0, (128, 128): 650.0, (64, 128): 660.0, (64, 64): 480.0},
    "several": {(128, 128): 265.0, (64, 128): 200.0, (64, 64): 157.0},
    "compensated": {(128, 128): 138.0, (64, 128): 113.0, (64, 96): 105.0, (64, 64): 97.0},
    "stepwise": {(128, 128): 101.0, (64, 128): 81.0},
    "stepwise of nine": {(128, 128): 88.0, (64, 128): 62.0},
}
# Numbers of products of parts that these rates are for. Compensation takes as long as so many more; precisions with
# scales have so much of the rates, and TF32 has half of them.
PRODUCTS = {"one": 1, "several": 3, "compensated": 6, "stepwise": 6, "stepwise of nine": 9}
COMPENSATION, SCALED = 2.0, 0.87
# The same of tiles of `rows_in_registers`, however many. Those of compensated sums are fitted to products of bf16x6 on
# an H200, so that the faster of this stage and `persistent` is chosen; the others have not been timed.
ROWS_RATES: dict[str, dict[tuple[int, int], float]] = {
    "several": {(128, 64): 200.0, (64, 64): 140.0},
    "compensated": {(128, 64): 103.0, (64, 64): 81.0},
}
# The same of an A of BF16, which is not decomposed.
NARROW_ROWS_RATES: dict[str, dict[tuple[int, int], float]] = {
    "several": {(128, 128): 300.0, (192, 64): 260.0, (128, 64): 240.0, (64, 64): 170.0},
    "compensated": {(128, 128): 190.0, (192, 64): 165.0, (128, 64): 150.0, (64, 64): 115.0},
}
# Factor by which tiles of `rows_in_registers` take longer with stepwise sums. Fitted, like the rates of compensated
# sums, to products of bf16x6 on an H200. Other times of stepwise sums, and `FUSED_ACCESS`, are fitted to 1,151
# candidates for 73 products of 167 to 1,000 terms on an H100.
ROWS_STEPWISE = 1.32
# Factors by which tiles of `rows_in_registers` take longer if A is copied float by float, by rows of the tile. Fitted
# to 33 products in bf16x6 on an H200.
ROWS_FLOATS = {64: 1.2, 128: 1.35}
# TFLOP/s by the extents of a block tile, for operands that tensor maps describe.
TMA_RATES = {(128, 256): 415.0, (128, 192): 420.0, (128, 128): 345.0, (64, 128): 275.0, (64, 64): 165.0}
# Factor by which these tiles take longer if C has up to so many rows or columns: the mean of 26 candidates for 16
# products on an H200. Factors from 1.15 to 1.5 lead to the same choices for these.
TMA_THIN, TMA_THIN_EXTENT = 1.2, 32
# Most requests to the L2 cache per second, as copies by tensor maps make them; and requests for a row of a box, by
# whether rows begin at sectors. Measured on an H200, at 8192x8192x4096 (docs/experiments.md).
TMA_REQUESTS, TMA_ROW = 135e9, {True: 1.0, False: 2.7}
# TFLOP/s of an H200 at 16384 cubed, decomposition included; of short sums at 4096x4096x768.
SPEEDS = {
    "bf16x6_stepwise": 76.0,
    "bf16x9_stepwise": 68.0,
    "tf32x3": 107.0,
    "bf16x3": 217.0,
    "bf16x6": 108.0,
    "bf16x9": 80.0,
    "fp16x3": 212.0,
    "tf32": 351.0,
    "bf16": 669.0,
}
H200_MULTIPROCESSORS = 132
# Seconds that a tile takes beside its sums; and in precisions with one product of decomposed parts.
TILE_END, TILE_END_ONE = 1.5e-6, 0.5e-6
# The same for each element, in addition, with stepwise sums: of `persistent`, and of `rows_in_registers`; and seconds
# that `persistent` takes before its first tile, whose first products nothing hides.
STEPWISE_END, ROWS_STEPWISE_END = 0.1e-9, 0.25e-9
STEPWISE_START = 1.0e-6
SCALED_ADDING = 0.8e-6  # seconds that the launch that adds partial sums takes longer if it removes scales
SCALED_END = 0.08e-9  # seconds for each element of a tile from which scales are removed
MEMORY_EFFICIENCY = 0.8  # of device memory's theoretical bandwidth, that the decomposition reaches
LAUNCH = 2e-6  # seconds that each launch before the last one adds
# Divided sums: numbers of blocks per tile that are considered if all blocks run at once; seconds of the launch that
# adds partial sums; byte/s of partial sums, written and read, which stay in the L2 cache; and the factor by which a
# division must be expected to be faster.
SPLITS = (2, 3, 4, 6, 8, 11, 16, 22, 33, 44, 66, 132)
ADDING, STEPWISE_ADDING, PARTIALS_RATE, CLEAR_MARGIN = 1.3e-6, 2.3e-6, 1.7e12, 1.03
# In a round, each multiprocessor computes a tile, or a share of a tile's sums. Up to so many rounds, `FEW_TILES_RATES`
# hold, and sums are divided if whole tiles fill no more than this fraction of their rounds.
FEW_ROUNDS, FULL = 8, 0.9
# Numbers of blocks per tile that are considered if blocks do not run at once; byte/s of their partial sums; and seconds
# from the end of whole tiles until blocks that share the others begin.
FEW_SPLITS, PARTIALS_RATE_LATER, FOLLOWING = (2, 3, 4, 5, 6, 8), 1.6e12, 2.8e-6
# Seconds that partial sums are added later if `persistent` leaves that launch no multiprocessor to begin on.
ADDING_LATE = 1.5e-6
# Tiles whose sums may be divided: those whose times were measured; and terms from which on they may be.
SPLIT_TILES, SPLIT_TERMS = ((64, 64), (128, 64), (192, 64), (64, 128), (128, 128)), 192
# Seconds that the first configuration of `fused_decomposition` takes in bf16x6: for the product, for each tile of a
# multiprocessor, for each term of a sum, and for each term of each tile. Fitted to 180 random products on an H100, and
# again to 47 on an H200 (docs/experiments.md). Terms take longer if the operands allow no vectors, by how many have a
# contiguous axis.
FUSED_PRODUCT, FUSED_TILE, FUSED_TERM, FUSED_TILE_TERM = 1.3e-6, 0.7e-6, 2.9e-9, 11e-9
FUSED_VECTORS, FUSED_ACCESS = 0.73, (1.55, 1.16, 0.8)
# Seconds that a warpgroup's kernel takes longer for each element of a tile whose rows in C do not begin at sectors,
# or that reaches beyond C; and the same with stepwise sums, whose other warpgroup multiplies meanwhile. Fitted to 457
# candidates for 35 products on an H200, with 64-bit stores where these were possible; with the present stores, other
# values choose no better.
WRITE_ONE, STEPWISE_WRITE_ONE = 0.17e-9, 0.085e-9
# Bytes of C that these kernels write per second at most, by whether its rows begin at sectors. Read from 40 candidates
# for sums of up to 140 terms on an H200.
WRITING = {True: 3.2e12, False: 2.1e12}


@lru_cache(maxsize=64)
def tile_rates(precision: TensorPrecision) -> dict[tuple[int, int], float]:
    """Return throughputs in TFLOP/s by the extents of a block tile."""
    return _of_precision(RATES[_kind(precision)], precision)


def few_tiles_rates(precision: TensorPrecision) -> dict[tuple[int, int], float]:
    """Return throughputs in TFLOP/s by the extents of a block tile, with few tiles for each multiprocessor."""
    return _of_precision(FEW_TILES_RATES[_kind(precision)], precision)


def _of_precision(rates: dict[tuple[int, int], float], precision: TensorPrecision) -> dict[tuple[int, int], float]:
    """Return rates of a kind of precisions for one of them, with as many products of parts."""
    kind, other = _kind(precision), COMPENSATION if precision.compensated else 0.0
    factor = (PRODUCTS[kind] + other) / (len(precision.products) + other)
    factor *= (0.5 if precision.kind == "tf32" else 1.0) * (SCALED if precision.scaled else 1.0)
    return {extents: rate * factor for extents, rate in rates.items()}


def _kind(precision: TensorPrecision) -> str:
    """Return the key of a precision's rates."""
    if precision.compensated:
        if precision.stepwise:
            return "stepwise" if len(precision.products) == PRODUCTS["stepwise"] else "stepwise of nine"
        return "compensated"
    return "one" if len(precision.products) == 1 else "several"


def may_divide(stage: Stage, config: Any) -> bool:
    """Return True if sums of at least `SPLIT_TERMS` terms may be divided among blocks in this configuration."""
    return isinstance(stage, TensorStage) and stage.splits and (config.BM, config.BN) in SPLIT_TILES


def configs_for(stage: Stage, precision: str, k: int, narrow_a: bool = False) -> list[Any]:
    """Return the configurations of a stage that compute in a precision of tensor cores; for A of BF16 if `narrow_a`."""
    if isinstance(stage, LadderStage):
        return [config for config in stage.configs if compensates(config)]
    if not isinstance(stage, TensorStage):
        return list(stage.configs)
    if not stage.complete:
        return list(stage.configs[:1])
    if stage.reads_rows and narrow_a:  # with stepwise sums, wider tiles leave no registers
        stepwise = precision_for(precision, k).stepwise
        return [config for config in stage.narrow_configs if config.BN <= 64 or not stepwise]
    if stage.reads_rows:
        return list(stage.configs)
    own = precision_for(precision, k)
    extents = set(tile_rates(own)).difference(() if own.name == "bf16x6" else LEFT_OUT)
    return [config for config in stage.configs if (config.BM, config.BN) in extents] or list(stage.configs)


def seconds_of(
    stage: Stage,
    precision: str,
    m: int,
    n: int,
    k: int,
    matrices: int,
    sm_count: int,
    tma: str,
    bandwidth: float = 0.0,
    most: int | None = None,
    narrow_a: bool = False,
    written: tuple[int, int, bool] | None = None,
    floats: bool = False,
    sectors: tuple[bool, bool] = (True, True),
) -> list[tuple[float, Any, Partition | None]]:
    """Return expected seconds of the multiplication, configuration and partition, the best first; the `most` best.

    It is assumed that all blocks compute one tile after the other at the same pace. A division of sums among blocks
    counts as better only if it is expected to be faster by `CLEAR_MARGIN`. With the `bandwidth` of device memory in
    byte/s, the seconds include the zeros that are written to fill the tiles of decomposed operands. If `narrow_a`, the
    stage reads an A of BF16 as it is. With `written`, the rows and columns of C and whether its rows begin at
    sectors, they include what a warpgroup's kernel takes longer for elements that it writes one by one: all, or those
    of tiles that reach beyond C. If `floats`, `rows_in_registers` copies A float by float. `sectors` tell whether rows
    of the two operands that tensor maps describe begin at sectors.
    """
    by_maps = LAYOUTS[tma] if isinstance(stage, TmaStage) else None
    transposed = by_maps is not None and by_maps.swapped
    rows, cols = (n, m) if transposed else (m, n)
    c_rows, c_cols, at_sectors = written or (0, 0, False)
    if transposed:
        c_rows, c_cols = c_cols, c_rows
    own, decomposed, slot_k, rated = _rated(stage, precision, k < LONG_SUM, narrow_a)
    slots, adding = -(-k // slot_k) or 1, STEPWISE_ADDING if own.stepwise else ADDING
    adding += SCALED_ADDING * own.scaled
    flops_by_area = 2.0 * slots * slot_k * sm_count
    whole_rows = isinstance(stage, TensorStage) and stage.reads_rows
    least = (
        copy_seconds(matrices * m * k * ITEM_BYTES[BFLOAT16 if narrow_a else FLOAT32], bandwidth) if whole_rows else 0.0
    )
    thin = TMA_THIN if by_maps and not by_maps.decomposed and min(m, n) <= TMA_THIN_EXTENT else 1.0
    zeros = 0.0  # seconds for each row that is filled up
    if bandwidth and (decomposed or (by_maps and by_maps.decomposed)):
        zeros = matrices * k * FLOAT32_BYTES * own.parts / own.per_word / (MEMORY_EFFICIENCY * bandwidth)
    starting = STEPWISE_START if own.stepwise and not whole_rows else 0.0
    several = decomposed and len(own.products) > 1 and (whole_rows or not own.stepwise)
    few_rounds = FEW_ROUNDS if several else 1
    most_rounds = few_rounds if matrices == 1 and not narrow_a else 1  # others were slower, or have not been timed
    row_boxes = -(-k // ROW_WORDS) / TMA_REQUESTS if by_maps else 0.0
    u_row, v_row = (row_boxes * TMA_ROW[one] for one in sectors)  # least seconds of copies of a tile's row
    paired = by_maps and not sectors[1]
    moving = 0.0  # least seconds of memory traffic
    if bandwidth and written is not None:
        rate, elements = MEMORY_EFFICIENCY * bandwidth, matrices * c_rows * c_cols
        moving = FLOAT32_BYTES * elements / min(WRITING[at_sectors], rate)
        if by_maps:
            moving = max(moving, FLOAT32_BYTES * (elements + matrices * (m + n) * k) / rate)
    whole, divided = [], []
    for config, BM, BN, area, flops_per_s, slower, few_slower, end, one_by_one, divisible in rated:
        down, across = -(-rows // BM), -(-cols // BN)
        tiles = matrices * down * across
        rounds, filled = -(-tiles // sm_count), across * BN - cols
        filling = zeros * (filled if whole_rows or by_maps else filled + down * BM - rows)
        flops = area * flops_by_area
        summing, few_summing = flops / 1e12 * slower, flops / 1e12 * few_slower
        other = filling + rounds * end + starting
        if written is not None:
            some = tiles - matrices * ((c_rows // BM) * (c_cols // BN) if at_sectors else 0)
            if some:  # partial sums, of divided ones, begin at sectors
                other += one_by_one * -(-some // sm_count)
        copying = ROWS_FLOATS[BM] if floats else thin
        shared = 2 if paired and even_rows(down) else 1  # two blocks share copies of V
        requests = tiles * (BM * u_row + BN * v_row / shared)
        least_here = moving + filling + rounds * end
        expected = copying * (other + max(requests, rounds * (few_summing if rounds <= few_rounds else summing)))
        ranked = copying * (other + max(requests, rounds * flops / flops_per_s))
        whole.append((max(ranked, least_here), max(expected, least_here), config, None))
        if not divisible or k < SPLIT_TERMS or rounds > most_rounds or tiles > FULL * rounds * sm_count:
            continue
        before, others = 0, filling + adding
        if rounds > 1:  # all tiles of a few rows, or columns, in rounds that are full, stay whole
            full = (rounds - 1) * sm_count
            before = max(full // across * across, full // down * down)
            others += FOLLOWING + -(-before // sm_count) * (end + few_summing)
            if written is not None and not at_sectors:
                others += one_by_one * -(-before // sm_count)
        rest = tiles - before
        if 2 * rest <= sm_count:
            # Behind whole tiles, fewer blocks than a third of those that fit were never the fastest.
            limit, least_shares = min(slots, sm_count // rest), sm_count // rest // 3 if before else 2
            counts = [*[count for count in SPLITS if least_shares <= count < limit], limit]
        else:
            limit, enough = min(slots, most_rounds * sm_count // rest), FULL * -(-rest // sm_count)
            counts = [one for one in FEW_SPLITS if one <= limit and -(-rest * one // sm_count) <= enough * one]
        partials = 2 * FLOAT32_BYTES * area * rest
        for shares in counts:
            rounds = -(-rest * shares // sm_count)
            seconds = others + rounds * (TILE_END + few_summing * -(-slots // shares) / slots)
            seconds += partials * shares / (PARTIALS_RATE if rounds == 1 and not before else PARTIALS_RATE_LATER)
            seconds *= copying
            if rest * shares >= sm_count and not whole_rows:
                seconds += ADDING_LATE
            divided.append((seconds * CLEAR_MARGIN, seconds, config, Partition(rest * shares // matrices, before)))
    # Whole tiles are ranked by `tile_rates`, and compared with divided ones by their expected times.
    ranked, expected, _, _ = min(whole, key=FIRST)
    found = [(one * expected / ranked, seconds, config, None) for one, seconds, config, _ in whole] + divided
    best = [min(found, key=FIRST)] if most == 1 else sorted(found, key=FIRST)[:most]
    return [(max(seconds, least), *one) for _, seconds, *one in best]


Rated = tuple[Any, int, int, int, float, float, float, float, float, bool]  # see `_rated`


@lru_cache(maxsize=64)
def _rated(stage: Stage, precision: str, short: bool, narrow_a: bool) -> tuple[TensorPrecision, bool, int, list[Rated]]:
    """Return the record of a precision; True if operands are decomposed; least terms that a sum is computed with; and
    the configurations, with what is known of each.

    These are its extents, and the area of a tile; FLOP/s by which it is ranked; expected seconds per 10^12 FLOP with
    tiles for all multiprocessors many times over, and with few for each; seconds that a tile takes beside its sums, and
    longer if its elements are written one by one; and whether its sums may be divided.
    """
    k = 1 if short else LONG_SUM
    own = precision_for(precision, k)
    slower, slot_k, rates, few = 1.0, 1, TMA_RATES, TMA_RATES
    decomposed, reads_rows = isinstance(stage, TensorStage), False
    if isinstance(stage, TensorStage):
        reads_rows = stage.reads_rows
        slot_k, rates = own.slot_k, tile_rates(own)
        if reads_rows:
            rates = (NARROW_ROWS_RATES if narrow_a else ROWS_RATES)["compensated" if own.compensated else "several"]
            slower = ROWS_STEPWISE if own.stepwise else 1.0
        few = few_tiles_rates(own) if stage.splits and not reads_rows else rates
    slowest, configs = min(rates.values()), configs_for(stage, precision, k, narrow_a)
    found = []
    for config in configs:
        extents = config.BM, config.BN
        rate = rates.get(extents, slowest)
        times = slower / rate, slower / few.get(extents, rate)
        area = config.BM * config.BN
        end = TILE_END_ONE if decomposed and len(own.products) == 1 else TILE_END
        if own.stepwise:
            end += (ROWS_STEPWISE_END if reads_rows else STEPWISE_END) * area
        if own.scaled:
            end += SCALED_END * area
        one_by_one = (STEPWISE_WRITE_ONE if own.stepwise else WRITE_ONE) * area
        found.append((config, *extents, area, rate * 1e12, *times, end, one_by_one, may_divide(stage, config)))
    return own, decomposed, slot_k, found


def fused_seconds(config: Any, m: int, n: int, k: int, matrices: int, sm_count: int, slower: float = 1.0) -> float:
    """Return the expected seconds of `fused_decomposition` in its first configuration, in bf16x6.

    `slower` is the factor by which its accesses make the terms take longer.
    """
    tiles = -(-matrices * -(-m // config.BM) * -(-n // config.BN) // sm_count)
    terms = -(-k // config.BK) * config.BK
    return FUSED_PRODUCT + FUSED_TILE * tiles + (FUSED_TERM + FUSED_TILE_TERM * tiles) * terms * slower


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
