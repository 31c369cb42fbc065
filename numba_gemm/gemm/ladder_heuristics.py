"""Candidates of float32 multiply-adds for a product, and the one that `cost_model` expects to end first.

In precisions of tensor cores, these are kernels with compensated sums, or with sums in float64.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd, inf

from ..kernels.ladder import STAGES as LADDER
from ..kernels.ladder.stage import FEW_TERMS, IN_FLOAT64, LadderStage, compensates
from ..kernels.ladder.tile_config import TileConfig
from ..kernels.stage import IEEE, Partition, Stage
from . import cost_model, small_heuristics
from .cost_model import DIRECT, LAUNCH, MEMORY_OVERLAP, Costs, Way, memory_clocks
from .ladder_rates import rate_of
from .problem import Choice, Problem
from .small_heuristics import SMALL, SmallCosts

__all__ = ["best_of_ladder", "common_divisor", "considered_of", "ranked_ladder", "rated"]

FEW_COLUMNS = 32  # up to which configurations for a C of few columns are considered
# Tiles along a row of C up to which those for a C of few columns are considered, and columns up to which `thin` is;
# elements of C up to which its tiles of several columns are considered for any number of columns.
TILES_ALONG, THIN_COLUMNS, THIN_ELEMENTS = 8, 64, 1 << 18
# If C has few rows or columns, tiles of `stream_k` are considered of which it fills this part of the rows and columns.
FILLED = 1 / 8
SHORT_TERMS = 32  # of a sum, up to which `short_sums` is considered
# In float32, `DIRECT` is considered for a C of few elements, whose sums are short, without batch or epilogue.
DIRECT_ELEMENTS, DIRECT_TERMS = 1 << 17, 24
# Elements of A and B, if both allow vectors, below which slices of `stream_k` are considered. For operands that come
# from memory, slices take longer: a multiprocessor has fewer blocks, and fewer bytes on their way.
SLICED_ELEMENTS = 1 << 22
TIE = 2.0**-10  # weight of clocks that memory hides
AnyCosts = Costs | SmallCosts
Candidate = tuple[float, int, AnyCosts, bool, int, float, float, float]  # see `_ladder_candidates`


@lru_cache(maxsize=16)
def rated(cc: tuple[int, int]) -> tuple[tuple[LadderStage, TileConfig], ...]:
    """Return the configurations that have a rate, of the stages that serve a compute capability best.

    A stage that takes any layout with a schedule serves nearly every shape better than the stages before it; where it
    runs, they are left out, but for `DIRECT`.
    """
    able = [stage for stage in LADDER.values() if stage.runs_on(cc)]
    scheduled = [stage for stage in able if stage.takes_variants]
    stages = [*scheduled, LADDER[DIRECT]] if scheduled else able
    return tuple((stage, config) for stage in stages for config in stage.configs if rate_of(stage, config) is not None)


@lru_cache(maxsize=16)
def common_divisor(cc: tuple[int, int]) -> int:
    """Return the largest number that divides all extents of C's tiles, but for a C of few columns."""
    configs = [one for stage, one in rated(cc) if stage.name != DIRECT and not is_narrow(stage, one)]
    return gcd(*(config.BM for config in configs), *(config.BN for config in configs))


def is_narrow(stage: Stage, config: TileConfig) -> bool:
    """Return True if a configuration is worth considering for a C of few columns or few elements only."""
    few = config.BN <= FEW_COLUMNS // 2 or config.BN == FEW_COLUMNS < config.BM
    return stage.name == "thin" or (few and config.TN > 1)


class Considered:
    """A configuration on one device, and the products that it is considered for.

    Attributes
    ----------
    costs : Costs
        Its times.
    most_columns, most_terms, most_elements : float
        Columns of C, terms of a sum, and elements of C up to which it is considered.
    few_elements : int
        Elements of C up to which it is considered for more than `most_columns`, too.
    along : bool or None
        Contiguous axis of A that it is considered for, as in `Rate`.
    least_rows, least_columns : float
        Rows and columns from which on it is considered for a C of few of either.
    sliced : bool or None
        True if it has slices, False if slices replace it for vectors and plain sums; None if it is considered anyway.
    """

    __slots__ = (
        "along",
        "costs",
        "few_elements",
        "least_columns",
        "least_rows",
        "most_columns",
        "most_elements",
        "most_terms",
        "sliced",
    )

    def __init__(self, costs: Costs, vectors: bool, compensated: bool) -> None:
        stage, config = costs.stage, costs.config
        self.sliced = True if config.lanes_k > 1 and not config.in_lanes else None
        if costs.rate.replaced and vectors and not compensated:
            self.sliced = False
        # Tiles of several columns serve both axes well; of kernels with compensated sums, there are to be few.
        several = costs.in_groups and config.BN > 1 and not compensated
        self.costs, self.along = costs, None if several else costs.rate.along
        self.few_elements = THIN_ELEMENTS if several else 0
        self.most_terms, self.most_elements = config.BK if stage.undivided else inf, inf
        if costs.direct:
            self.most_terms, self.most_elements = DIRECT_TERMS, DIRECT_ELEMENTS
        self.most_columns = inf
        if is_narrow(stage, config):
            self.most_columns = TILES_ALONG * config.BN
            if costs.in_groups or config.BN < FEW_COLUMNS:
                self.most_columns = min(self.most_columns, THIN_COLUMNS if costs.in_groups else FEW_COLUMNS)
        filled = 0.0 if costs.in_groups or stage.undivided or not costs.divides or compensated else FILLED
        self.least_rows, self.least_columns = filled * config.BM, filled * config.BN


@lru_cache(maxsize=256)
def considered_of(
    only: LadderStage | None,
    cc: tuple[int, int],
    sm_count: int,
    vectors: bool,
    partial_vectors: bool,
    stores_vectors: bool,
    compensated: bool = False,
    a_along: bool = True,
    b_along: bool = False,
) -> tuple[Considered, ...]:
    """Return all candidates on a device, or one stage's, for a layout of A and B."""
    found = rated(cc) if only is None else [(only, config) for config in only.configs]
    rates = (
        (stage, config, rate_of(stage, config), partial_vectors if config.in_lanes else vectors)
        for stage, config in found
    )
    rest = stores_vectors, compensated, a_along, b_along
    costs = (
        (Costs(stage, config, rate, cc, sm_count, in_vectors, *rest), in_vectors)
        for stage, config, rate, in_vectors in rates
        if rate is not None
        and (in_vectors or rate.floats)
        and (not compensated or (compensates(config) and not stage.undivided))
    )
    return tuple(Considered(one, in_vectors, compensated) for one, in_vectors in costs)


def _ladder_candidates(wanted: Problem, only: Stage | None) -> list[Candidate]:
    """Return the candidates of a product.

    Parameters
    ----------
    wanted, only
        The product, and the stage if it is named.

    Returns
    -------
    list of tuple
        Clocks that no division can go below; the candidate's number; costs; swapped; tiles, and k-tiles of each; clocks
        that its bytes take; and that each block's first chunk takes.
    """
    m, n, k, matrices = wanted.m, wanted.n, wanted.k, wanted.matrices
    memory = memory_clocks(matrices * (m * k + k * n + m * n), wanted.memory_bandwidth, wanted.clock_hz)
    found = list[Candidate]()
    if (only is SMALL if only is not None else matrices > 1) and SMALL.runs_on(wanted.cc):
        found += small_heuristics.candidates(wanted, memory, everything=only is not None)
    if wanted.precision == IN_FLOAT64:  # in which no other stage adds
        return found
    compensated = wanted.precision != IEEE and k > FEW_TERMS
    stage = only if isinstance(only, LadderStage) else None
    stores_vectors = wanted.c_vectors or wanted.epilogue  # with an epilogue, C goes through shared memory
    both_ways = not wanted.epilogue and (min(m, n) <= FEW_COLUMNS or wanted.by_columns)
    by_columns = memory
    if both_ways or wanted.by_columns:
        row = m if wanted.by_columns else n
        by_columns = max(memory, cost_model.columns_clocks(matrices * m * n, row, wanted.sm_count))
    as_is, transposed = (by_columns, memory) if wanted.by_columns else (memory, by_columns)
    elements, sliced = matrices * m * n, matrices * (m * k + k * n) < SLICED_ELEMENTS
    directly = elements if matrices == 1 and not wanted.epilogue and wanted.precision == IEEE else inf
    vectors = wanted.a_vectors and wanted.b_vectors, wanted.partial_vectors, stores_vectors
    common = stage, wanted.cc, wanted.sm_count, *vectors, compensated
    turns = [(False, m, n, wanted.a_along, wanted.b_along, as_is)]
    if both_ways:
        turns.append((True, n, m, wanted.b_along, wanted.a_along, transposed))
    for swapped, rows, cols, a_along, b_along, in_bytes in turns:
        for i, one in enumerate(considered_of(*common, a_along, b_along)):
            if one.sliced is not None and one.sliced != sliced:
                continue
            if only is None:
                if k > one.most_terms or directly > one.most_elements:
                    continue
                if elements > one.few_elements and (cols > one.most_columns or one.along not in (None, a_along)):
                    continue
                if both_ways and (rows < one.least_rows or cols < one.least_columns):
                    continue
            costs = one.costs
            if swapped and not (costs.direct or costs.divides):
                continue
            bound = memory * costs.bytes_factor if costs.in_groups else in_bytes
            least, tiles, k_tiles, bound, arrival = costs.least(
                rows, cols, k, matrices, bound, swapped is not wanted.by_columns
            )
            found.append((least, 2 * i + swapped, costs, swapped, tiles, k_tiles, bound, arrival))
    return found


def _timed(
    costs: AnyCosts,
    tiles: int,
    k_tiles: float,
    memory: float,
    arrival: float,
    aligned: bool,
    limit: float | None = None,
) -> list[Way]:
    """Return expected clocks, blocks negated, and division, for each way to divide the product.

    With a `limit`, choices that take more clocks may be missing.
    """
    least = LAUNCH + memory
    slower = 1.0 if aligned or costs.direct or costs.divides else 0.93
    limits = () if limit is None else (limit, least)
    ways = costs.ways(tiles, k_tiles, memory, arrival, *limits)
    if costs.in_groups or costs.direct:
        # Where the bytes decide, those that would be sooner without them come first.
        return [
            ((clocks if clocks > least else least) + TIE * clocks, blocks, division)
            for clocks, blocks, division in ways
        ]
    of_bytes, order = memory**MEMORY_OVERLAP, 1 / MEMORY_OVERLAP
    return [
        ((LAUNCH + ((clocks - LAUNCH) ** MEMORY_OVERLAP + of_bytes) ** order) / slower, blocks, division)
        for clocks, blocks, division in ways
    ]


def _choice(costs: AnyCosts, division: tuple[int, int] | None, swapped: bool, clocks: float, precision: str) -> Choice:
    partition = None if division is None else Partition(*division)
    return Choice(costs.stage, costs.config, partition, swapped, clocks, "", precision)


def ranked_ladder(wanted: Problem, only: Stage | None = None) -> list[Choice]:
    """Return all candidates, or one stage's, the one that is expected to be fastest first."""
    found = [
        (clocks, blocks, i, _choice(costs, division, swapped, clocks, wanted.precision))
        for _, i, costs, swapped, tiles, k_tiles, bound, arrival in _ladder_candidates(wanted, only)
        for clocks, blocks, division in _timed(costs, tiles, k_tiles, bound, arrival, wanted.aligned)
    ]
    return [choice for *_, choice in sorted(found, key=lambda one: one[:3])]


def best_of_ladder(wanted: Problem, limit: float = inf) -> Choice | None:
    """Return the first of `ranked_ladder`, without timing those that cannot be it; None if all take over `limit`."""
    best: tuple[float, int, int] = limit, 1, 0  # clocks, blocks negated, and number of the candidate, as in the ranking
    found: tuple[AnyCosts, tuple[int, int] | None, bool] | None = None
    for least, i, costs, swapped, tiles, k_tiles, bound, arrival in sorted(_ladder_candidates(wanted, None)):
        if least > best[0]:
            break
        for clocks, blocks, division in _timed(costs, tiles, k_tiles, bound, arrival, wanted.aligned, best[0]):
            if clocks <= best[0] and (clocks, blocks, i) < best:
                best, found = (clocks, blocks, i), (costs, division, swapped)
    return None if found is None else _choice(*found, best[0], wanted.precision)
