"""Candidates of float32 multiply-adds for a product, and the one that `cost_model` expects to end first.

In precisions of tensor cores, these are kernels with compensated sums.
"""

from __future__ import annotations

from math import inf

from ..kernels.ladder.stage import FEW_TERMS, LadderStage
from ..kernels.stage import IEEE, Partition, Stage
from . import cost_model
from .cost_model import (
    FEW_COLUMNS,
    LAUNCH,
    MEMORY_OVERLAP,
    Costs,
    Way,
    costs_of,
    memory_clocks,
)
from .problem import Choice, Problem

__all__ = ["best_of_ladder", "ranked_ladder"]

TIE = 2.0**-10  # weight of clocks that memory hides
Candidate = tuple[float, int, Costs, bool, int, float, float]  # see `_ladder_candidates`


def _ladder_candidates(wanted: Problem, only: Stage | None, memory: float) -> list[Candidate]:
    """Return the candidates of a product.

    Parameters
    ----------
    wanted, only
        The product, and the stage if it is named.
    memory : float
        Clocks that the operands' bytes take.

    Returns
    -------
    list of tuple
        Clocks that no division can go below; the candidate's number; costs; swapped; tiles, and k-tiles of each; clocks
        that its bytes take.
    """
    m, n, k, matrices = wanted.m, wanted.n, wanted.k, wanted.matrices
    stage = only if isinstance(only, LadderStage) else None
    stores_vectors = wanted.c_vectors or wanted.epilogue  # with an epilogue, C goes through shared memory
    both_ways = not wanted.epilogue and (min(m, n) <= FEW_COLUMNS or wanted.by_columns)
    found, a_along, b_along = [], wanted.a_along, wanted.b_along
    by_columns = memory
    if both_ways or wanted.by_columns:
        by_columns = max(memory, cost_model.columns_clocks(matrices * m * n, wanted.sm_count))
    as_is, transposed = (by_columns, memory) if wanted.by_columns else (memory, by_columns)
    compensated = wanted.precision != IEEE and k > FEW_TERMS
    vectors = wanted.vectors, wanted.partial_vectors, stores_vectors
    elements = matrices * m * n
    directly = elements if matrices == 1 and not wanted.epilogue and wanted.precision == IEEE else inf
    common = stage, wanted.cc, wanted.sm_count, *vectors, compensated
    own = costs_of(*common, a_along, b_along)
    for i, (costs, turned) in enumerate(zip(own, costs_of(*common, b_along, a_along) if both_ways else own)):
        if only is None and (k > costs.most_terms or directly > costs.most_elements):
            continue
        few = only is not None or elements <= costs.few_elements
        if few or (n <= costs.most_columns and costs.along in (None, a_along)):
            bound = memory * costs.bytes_factor if costs.in_groups else as_is
            least, tiles, k_tiles, bound = costs.least(m, n, k, matrices, bound)
            found.append((least, 2 * i, costs, False, tiles, k_tiles, bound))
        turns = both_ways and (costs.direct or costs.divides)
        if turns and (few or (m <= costs.most_columns and costs.along in (None, b_along))):
            bound = memory * turned.bytes_factor if costs.in_groups else transposed
            least, tiles, k_tiles, bound = turned.least(n, m, k, matrices, bound)
            found.append((least, 2 * i + 1, turned, True, tiles, k_tiles, bound))
    return found


def _memory(wanted: Problem) -> float:
    """Return the clocks that a product's operands take to be read or written once."""
    m, n, k = wanted.m, wanted.n, wanted.k
    return memory_clocks(wanted.matrices * (m * k + k * n + m * n), wanted.memory_bandwidth, wanted.clock_hz)


def _timed(
    costs: Costs, tiles: int, k_tiles: float, memory: float, aligned: bool, limit: float | None = None
) -> list[Way]:
    """Return expected clocks, blocks negated, and division, for each way to divide the product.

    With a `limit`, choices that take more clocks may be missing.
    """
    least = LAUNCH + memory
    slower = 1.0 if aligned or costs.direct or costs.divides else 0.93
    ways = costs.ways(tiles, k_tiles, memory) if limit is None else costs.ways(tiles, k_tiles, memory, limit, least)
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


def _choice(costs: Costs, division: tuple[int, int] | None, swapped: bool, clocks: float, precision: str) -> Choice:
    partition = None if division is None else Partition(*division)
    return Choice(costs.stage, costs.config, partition, swapped, clocks, "", precision)


def ranked_ladder(wanted: Problem, only: Stage | None = None) -> list[Choice]:
    """Return all candidates, or one stage's, the one that is expected to be fastest first."""
    memory = _memory(wanted)
    found = [
        (clocks, blocks, _choice(costs, division, swapped, clocks, wanted.precision))
        for _, _, costs, swapped, tiles, k_tiles, bound in _ladder_candidates(wanted, only, memory)
        for clocks, blocks, division in _timed(costs, tiles, k_tiles, bound, wanted.aligned)
    ]
    return [choice for *_, choice in sorted(found, key=lambda one: one[:2])]


def best_of_ladder(wanted: Problem, limit: float = inf) -> Choice | None:
    """Return the first of `ranked_ladder`, without timing those that cannot be it; None if all take over `limit`."""
    best: tuple[float, int, int] = limit, 0, 0  # clocks, blocks negated, and number of the candidate, as in the ranking
    found: tuple[Costs, tuple[int, int] | None, bool] | None = None
    memory = _memory(wanted)
    for least, i, costs, swapped, tiles, k_tiles, bound in sorted(_ladder_candidates(wanted, None, memory)):
        if least > best[0]:
            break
        for clocks, blocks, division in _timed(costs, tiles, k_tiles, bound, wanted.aligned, best[0]):
            if clocks <= best[0] and (clocks, blocks, i) < best:
                best, found = (clocks, blocks, i), (costs, division, swapped)
    return None if found is None else _choice(*found, best[0], wanted.precision)
