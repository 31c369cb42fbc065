"""Candidates of `small_matrices` for a batch of small matrices, and the clocks that each is expected to take.

The constants are fitted to 1,400 candidates for 300 random batches of up to 200 rows, columns and terms on an H200
(132 SMs at 1.98 GHz, graph replays; docs/experiments.md). Constants of compensated and float64 sums are fitted to 163
candidates for 71 batches, and those of lanes to 294 for 108.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..device.units import WARP
from ..kernels.ladder import STAGES
from ..kernels.ladder.partitions import MAX_LINE
from ..kernels.ladder.stage import LadderStage, sums_of
from ..kernels.ladder.tile_config import TileConfig
from .cost_model import LAUNCH, Way
from .problem import Problem

__all__ = ["SMALL", "SmallCosts", "candidates"]

SMALL = STAGES["small_matrices"]
# Elements of C of each matrix, and terms of a sum, up to which tiles of one thread are considered; the same for tiles
# that lanes share. If k is the contiguous axis of B, threads read different lines: tiles of one thread are then
# considered for a B of few elements alone.
MOST_ELEMENTS, MOST_TERMS = 1 << 13, 128
MOST_ELEMENTS_OF_LANES, MOST_TERMS_OF_LANES = 1 << 10, 1 << 11
MOST_ALONG = 1 << 10
LINE = 32  # floats of a line of the L1 cache
# Clocks that an SM is busy: with a warp's start; with each line that it reads; with each multiply-add of its lanes, and
# the instructions that go with that; with each line that it writes.
START, READ, MULTIPLY, WRITE = 57, 0.2234, 1.475, 1.262
# Clocks that a thread waits: for its first operands, for four terms, for each of the last terms, for a load, a store.
FIRST, FOUR, ONE, LOAD, STORE = 725, 242, 157, 6.2, 95
# Clocks that compensated sums add for four terms: that the SM is busy, for each sum, and that a thread waits. Those of
# float64 sums, for each element that is converted, and for each term.
COMPENSATE, COMPENSATED_FOUR = 1.6, 36
CONVERT, WIDE_TERM = 1.5, 7
# Clocks that the SM is busy, and that a thread waits, for each exchange of a sum among lanes.
EXCHANGE, EXCHANGED = 1.1, 42
# If the blocks of an SM read more than these bytes in all, the L1 cache does not keep lines until all their floats are
# read. Clocks that the SM is busy with reading a line again, for each multiple of these bytes, at most three.
KEPT_BYTES, AGAIN, MOST_AGAIN = 3.01e5, 0.585, 3
RESIDENT = 4  # blocks of an SM
# Orders of two norms: in the first, an SM's work overlaps with its threads' waits, and in the second, both overlap with
# the time of the bytes.
OVERLAP, MEMORY_OVERLAP = 1.252, 2.356
NUMBERS = 1 << 16  # number of its first candidate: of candidates that take the same time, other stages' come first


@dataclass(frozen=True)
class SmallCosts:
    """Expected clocks of one configuration for one product, in the form of `cost_model.Costs`."""

    config: TileConfig
    blocks: int
    clocks: float
    stage: LadderStage = SMALL
    direct: bool = False
    divides: bool = True
    in_groups: bool = True  # nothing is to be added to its clocks

    def ways(self, tiles: int, *_: float) -> list[Way]:
        """Return the only way to divide the product: as many blocks as it takes."""
        return [(self.clocks, -self.blocks, (self.blocks, tiles))]


def candidates(
    wanted: Problem, memory: float, *, everything: bool
) -> list[tuple[float, int, SmallCosts, bool, int, float, float, float]]:
    """Return the candidates for a product, as `ladder_heuristics` lists them.

    Parameters
    ----------
    wanted, memory
        The product, and the clocks that its bytes take.
    everything : bool
        True if it is considered for any product.
    """
    elements = wanted.m * wanted.n
    by_threads = everything or (elements <= MOST_ELEMENTS and wanted.k <= MOST_TERMS)
    by_lanes = everything or (elements <= MOST_ELEMENTS_OF_LANES and wanted.k <= MOST_TERMS_OF_LANES)
    if not (by_threads or by_lanes):
        return []
    found = []
    for swapped in (False,) if wanted.epilogue else (False, True):
        turned = wanted.swapped if swapped else wanted
        few_lines = everything or not turned.b_along or turned.n * turned.k <= MOST_ALONG
        by_rows = not turned.by_columns and (turned.c_vectors or (swapped and wanted.c_sectors))
        vectors = turned.b_vectors and by_rows and turned.n % 4 == 0
        for i, config in enumerate(SMALL.configs):
            if not (by_lanes if config.lanes_k > 1 else by_threads and few_lines):
                continue
            tiles = -(-turned.m // config.BM) * -(-turned.n // config.BN) * wanted.matrices
            if tiles > MAX_LINE or (config.TN > 1 and not vectors):  # larger tiles only help with vectors
                continue
            costs = SmallCosts(config, -(-tiles // config.tiles), clocks_of(config, turned, memory))
            found.append((costs.clocks, NUMBERS + 2 * i + swapped, costs, swapped, tiles, 0.0, 0.0, 0.0))
    return found


def clocks_of(config: TileConfig, wanted: Problem, memory: float) -> float:
    """Return the clocks that a product is expected to take in a configuration, given those that its bytes take."""
    compensated, in_float64 = sums_of(wanted.precision, wanted.k)
    m, n, k, matrices, TM, TN = wanted.m, wanted.n, wanted.k, wanted.matrices, config.TM, config.TN
    down, across, lanes = -(-m // TM), -(-n // TN), config.lanes_k
    blocks = -(-down * across * matrices // config.tiles)
    of_warp = WARP // lanes  # thread tiles
    rows, cols = min(down, -(-of_warp // across)), min(across, of_warp)
    in_warp = max(1.0, of_warp / (down * across))  # matrices
    a_fours, b_fours = wanted.a_along and wanted.a_vectors, wanted.b_along and wanted.b_vectors  # vectors of four terms
    if lanes > 1:
        a_fours = b_fours = a_fours and b_fours
    run = max(1.0, (4 if a_fours else 1) * lanes / LINE)  # lines that lanes read along k

    def lines(of_matrix: float, elements: int) -> float:
        """Return the lines that an instruction of a warp touches, given those of a matrix and all its elements."""
        return max(1.0, min(in_warp * of_matrix, in_warp * elements / LINE))

    def lines_of(tiles: int, extent: int, whole: int, along: bool) -> float:
        """Return the lines of a matrix that a load touches, of so many thread tiles' rows or columns."""
        if along:
            return run * min(tiles, max(1.0, tiles * extent * k / LINE))
        one = max(1.0, tiles * extent / LINE)
        return one if lanes == 1 else min(lanes * one, max(1.0, lanes * whole / LINE))

    of_a, of_b = lines_of(rows, TM, m, wanted.a_along), lines_of(cols, TN, n, wanted.b_along)
    of_c = min(rows * cols, max(1.0, cols * TN * m / LINE))
    if not wanted.by_columns:
        of_c = min(rows * cols, max(rows * min(1.0, TM * n / LINE), cols * TN / LINE, 1.0))
    a_lines, b_lines, c_lines = lines(of_a, m * k), lines(of_b, n * k), lines(of_c, m * n)
    fours, ones = divmod(k, 4) if lanes == 1 else (-(-k // (4 * lanes)), 0)  # terms of a thread, in fours and others
    terms = 4 * fours + ones
    a_loads = fours * TM * (1 if a_fours else 4) + ones * TM
    b_loads = fours * (4 if TN > 1 and not wanted.b_along else TN * (1 if b_fours else 4)) + ones * TN
    stores = TM * TN if wanted.epilogue else TM  # without an epilogue, rows of a tile are written at once
    reads = a_loads * a_lines + b_loads * b_lines
    # Lines along k have floats for the next terms, too: these may be evicted before they are read.
    along = a_loads * a_lines * wanted.a_along + b_loads * b_lines * wanted.b_along
    kept = min(RESIDENT * max(1.0, config.tiles / (down * across)), matrices / wanted.sm_count)
    again = min(max(4 * kept * (m * k + k * n) / KEPT_BYTES - 1.0, 0.0), MOST_AGAIN)
    warps = max(blocks / wanted.sm_count, 1.0) * config.threads / WARP  # of an SM
    busy = START + READ * reads + MULTIPLY * TM * TN * terms + WRITE * stores * c_lines + AGAIN * along * again
    waiting = FIRST + FOUR * fours + ONE * ones + LOAD * (a_loads + b_loads) + STORE * stores
    if lanes > 1:
        steps = TM * TN * (lanes.bit_length() - 1)
        busy += EXCHANGE * steps
        waiting += EXCHANGED * steps
    if compensated:
        busy += COMPENSATE * TM * TN * fours
        waiting += COMPENSATED_FOUR * fours
    elif in_float64:
        busy += CONVERT * (TM + TN) * terms
        waiting += WIDE_TERM * terms
    busy *= warps
    both = (busy**OVERLAP + waiting**OVERLAP) ** (1 / OVERLAP)
    return LAUNCH + (both**MEMORY_OVERLAP + memory**MEMORY_OVERLAP) ** (1 / MEMORY_OVERLAP)
