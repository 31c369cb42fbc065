"""Clocks that `small_matrices` is expected to take for a batch of small matrices, and its candidates.

The constants are fitted to 1,400 candidates for 300 random batches of up to 200 rows, columns and terms on an H200
(132 SMs at 1.98 GHz, graph replays; docs/experiments.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..device.units import WARP
from ..kernels.ladder import STAGES
from ..kernels.ladder.stage import LadderStage
from ..kernels.ladder.tile_config import TileConfig
from .cost_model import LAUNCH, Way
from .problem import Problem

__all__ = ["SMALL", "SmallCosts", "candidates"]

SMALL = STAGES["small_matrices"]
# Elements of C of each matrix, and terms of a sum, up to which it is considered.
MOST_ELEMENTS, MOST_TERMS = 1 << 13, 256
MOST_ALONG = (
    1 << 10
)  # the same, elements of B if k is its contiguous axis, since each lane then reads a line of its own
LINE = 32  # floats of a line of the L1 cache
# Clocks of an SM per warp, per line that a warp reads, per multiply-add of its lanes with what goes with it, and per
# line that it writes.
START, READ, MULTIPLY, WRITE = 58, 0.2585, 1.5, 1.234
# Clocks that a thread waits: for its first operands, for four terms, for each of the last terms, for a load, a store.
FIRST, FOUR, ONE, LOAD, STORE = 870, 273, 178, 12.3, 134
# Bytes that the blocks of an SM read, beyond which lines are read again, and clocks of an SM per line and multiple.
KEPT_BYTES, AGAIN, MOST_AGAIN = 3.07e5, 0.62, 3
RESIDENT = 4  # blocks of an SM
# An SM's work and its threads' waits, and both and the bytes, overlap as in norms of these orders.
OVERLAP, MEMORY_OVERLAP = 1.46, 2.76
NUMBERS = 1 << 16  # of its candidates, behind those of other stages


@dataclass(frozen=True)
class SmallCosts:
    """Expected clocks of one configuration for one product, in the form of `cost_model.Costs`."""

    config: TileConfig
    clocks: float
    stage: LadderStage = SMALL
    direct: bool = False
    divides: bool = True
    in_groups: bool = True  # nothing is to be added to its clocks

    def ways(self, tiles: int, *_: float) -> list[Way]:
        """Return the only way to divide the product: as many blocks as it takes."""
        return [(self.clocks, -tiles, (tiles, tiles))]


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
    if not everything and (wanted.m * wanted.n > MOST_ELEMENTS or wanted.k > MOST_TERMS):
        return []
    found = []
    for swapped in (False,) if wanted.epilogue else (False, True):
        turned = wanted.swapped if swapped else wanted
        if turned.b_along and turned.n * turned.k > MOST_ALONG and not everything:
            continue
        for i, config in enumerate(SMALL.configs):
            vectors = turned.b_vectors and turned.c_vectors and turned.n % 4 == 0
            if config.TN > 1 and (turned.by_columns or not vectors):  # larger tiles only help with vectors
                continue
            blocks, clocks = clocks_of(config, turned, memory)
            costs = SmallCosts(config, clocks)
            found.append((clocks, NUMBERS + 2 * i + swapped, costs, swapped, blocks, 0.0, 0.0, 0.0))
    return found


def clocks_of(config: TileConfig, wanted: Problem, memory: float) -> tuple[int, float]:
    """Return the blocks of a product, and the clocks that it is expected to take."""
    m, n, k, matrices, TM, TN = wanted.m, wanted.n, wanted.k, wanted.matrices, config.TM, config.TN
    down, across = -(-m // TM), -(-n // TN)
    blocks = -(-down * across * matrices // config.tiles)
    rows, cols = min(down, -(-WARP // across)), min(across, WARP)  # of thread tiles, in a warp
    of_warp = max(1.0, WARP / (down * across))  # matrices

    def lines(of_matrix: float, elements: int) -> float:
        """Return the lines that an instruction of a warp touches, given those of a matrix and all its elements."""
        return max(1.0, min(of_warp * of_matrix, of_warp * elements / LINE))

    of_a = min(rows, max(1.0, rows * TM * k / LINE)) if wanted.a_along else max(1.0, rows * TM / LINE)
    of_b = min(cols, max(1.0, cols * TN * k / LINE)) if wanted.b_along else max(1.0, cols * TN / LINE)
    of_c = min(rows * cols, max(1.0, cols * TN * m / LINE))
    if not wanted.by_columns:
        of_c = min(rows * cols, max(rows * min(1.0, TM * n / LINE), cols * TN / LINE, 1.0))
    a_lines, b_lines, c_lines = lines(of_a, m * k), lines(of_b, n * k), lines(of_c, m * n)
    fours, ones = divmod(k, 4)
    of_row = 1 if wanted.a_along and wanted.a_vectors else 4  # loads of four terms
    a_loads = fours * TM * of_row + ones * TM
    b_loads = fours * (4 if TN > 1 and not wanted.b_along else TN * (1 if wanted.b_along and wanted.b_vectors else 4))
    b_loads += ones * TN
    stores = TM
    reads = a_loads * a_lines + b_loads * b_lines
    # What neighbouring terms of a row share a line with may be gone before it is read.
    along = a_loads * a_lines * wanted.a_along + b_loads * b_lines * wanted.b_along
    kept = min(RESIDENT * max(1.0, config.tiles / (down * across)), matrices / wanted.sm_count)
    again = min(max(4 * kept * (m * k + k * n) / KEPT_BYTES - 1.0, 0.0), MOST_AGAIN)
    warps = blocks * config.threads / (WARP * wanted.sm_count)
    busy = warps * (START + READ * reads + MULTIPLY * TM * TN * k + WRITE * stores * c_lines + AGAIN * along * again)
    waiting = FIRST + FOUR * fours + ONE * ones + LOAD * (a_loads + b_loads) + STORE * stores
    both = (busy**OVERLAP + waiting**OVERLAP) ** (1 / OVERLAP)
    return blocks, LAUNCH + (both**MEMORY_OVERLAP + memory**MEMORY_OVERLAP) ** (1 / MEMORY_OVERLAP)
