"""Choice of stage, configuration and partition for a product on a device: the policy behind ``stage="auto"``.

The candidate that `cost_model` expects to end first wins; on tensor cores, the one of `tensor_heuristics`.
"""

from __future__ import annotations

from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

from ..device.units import FLOAT32_BYTES, ceil_div
from ..kernels.ladder.stage import LadderStage
from ..kernels.product import Product
from ..kernels.stage import IEEE, Gpu, Partition, Stage
from ..kernels.step import Kernel
from ..kernels.tensor_core import TENSOR_STAGES
from ..kernels.tensor_core.fused_stage import FusedStage
from ..kernels.tensor_core.stage import LONG_SUM, TensorStage
from ..kernels.tensor_core.tma_stage import TmaStage, tma_operands
from ..models.gpu_names import dotted
from ..runtime.device import DeviceProperties
from . import cost_model, tensor_heuristics
from .cost_model import FEW_COLUMNS, LAUNCH, MOST_LANES, Costs, Way, common_divisors, costs_of, memory_clocks
from .precision import tensor_stage
from .stage_names import check_stage_precision, resolve

TF32_TMA, ROWS, FUSED = (TENSOR_STAGES[name] for name in ("tf32_tma", "rows_in_registers", "fused_decomposition"))
TIMED = "bf16x6", (9, 0)  # where `ROWS` and `FUSED` were timed
ROWS_COLUMNS = 768, 128  # most columns of `ROWS`, as is and as the transpose, which does not read parts of a prepared B
TENSOR_TILE = 32  # divides all extents of tiles on tensor cores
FEW_TILES_ELEMENTS = 128 * 64  # of C per multiprocessor, up to which its tiles may be divided
DECOMPOSING = 2.0  # factor by which decomposed operands must be expected to be faster than those of tensor maps


class Problem(NamedTuple):
    """Properties of a product on which the choice of a kernel depends.

    Attributes
    ----------
    m, n, k : int
        Extents in elements.
    matrices : int
        Products of a batch.
    aligned : bool
        True if all operands allow 128-bit accesses by rows.
    vectors : bool
        True if A and B allow them along whichever axis is contiguous; a vector needs none.
    a_along, b_along : bool
        True if k is the contiguous axis of A, and of B.
    a_rows, b_rows : bool
        True if 16-byte copies can read rows of A, and of the transpose of B (`Layout.aligned_rows`).
    by_columns : bool
        True if C is stored by columns.
    epilogue : bool
        True if the product has an epilogue.
    precision : str
        Precision, not "fp32_auto".
    tma : str
        Layouts of A and B, "NN", "NT" or "TT", if tensor maps can describe them; else empty. Precisions other than
        "tf32" leave it empty.
    cc, sm_count, clock_hz, memory_bandwidth
        Properties of the device, see `runtime.device.DeviceProperties`.
    """

    m: int
    n: int
    k: int
    matrices: int = 1
    aligned: bool = True
    vectors: bool = True
    a_along: bool = True
    b_along: bool = False
    a_rows: bool = True
    b_rows: bool = False
    by_columns: bool = False
    epilogue: bool = False
    precision: str = IEEE
    tma: str = ""
    cc: tuple[int, int] = (9, 0)
    sm_count: int = 132
    clock_hz: float = 1.98e9
    memory_bandwidth: float = 4.8e12

    @property
    def swapped(self) -> Problem:
        """Problem of the transposed product."""
        return self._replace(
            m=self.n,
            n=self.m,
            a_along=self.b_along,
            b_along=self.a_along,
            a_rows=self.b_rows,
            b_rows=self.a_rows,
            by_columns=not self.by_columns,
        )


class Choice(NamedTuple):
    """A kernel, and how a product is launched with it.

    Attributes
    ----------
    stage, config
        The kernel.
    partition : Partition or None
        Division of the work among blocks, for a scheduled stage; None for the default.
    swapped : bool
        True to compute the transpose, ``C.T = B.T @ A.T``.
    clocks : float
        Expected duration in clocks, 0 if nothing was compared.
    reason : str
        Reason for the choice.
    precision : str
        Precision.
    """

    stage: Stage
    config: Any
    partition: Partition | None = None
    swapped: bool = False
    clocks: float = 0.0
    reason: str = ""
    precision: str = IEEE

    @property
    def selected(self) -> tuple[Stage, Any, str, Partition | None, bool]:
        """Stage, configuration, precision, partition and swapped, as `runtime.launch.launch_product` takes them."""
        return self.stage, self.config, self.precision, self.partition, self.swapped

    def oriented(self, product: Product) -> Product:
        """Return the product, or its transpose if that is what is computed."""
        return product.transposed if self.swapped else product

    def kernels(self, product: Product, gpu: Gpu) -> list[Kernel]:
        """Return the kernels that a product needs, in the order of their launches."""
        stage, config, precision, partition, _ = self.selected
        if partition is None and stage.takes_partition:
            partition = Partition(1, 0)
        return [step.kernel for step in stage.launches(config, self.oriented(product), precision, partition, gpu).steps]


def problem(product: Product, gpu: DeviceProperties, precision: str = IEEE) -> Problem:
    """Return the properties of a product on which the choice of a kernel depends."""
    converted = product.converted
    a, b, c, batch = converted.a, converted.b, product.c, converted.batch
    a_whole, b_whole, c_whole = (all(step % 16 == 0 for step in steps) for steps in (batch.a, batch.b, batch.c))
    whole = a_whole and b_whole and c_whole
    of_a = a.aligned or a.transposed.aligned or a.rows == 1
    of_b = b.aligned or b.transposed.aligned or b.cols == 1
    mapped = converted is product and precision in TF32_TMA.precisions and TF32_TMA.runs_on(gpu.cc)
    tma = tma_operands(product) if mapped else None
    return Problem(
        c.rows,
        c.cols,
        a.cols,
        batch.matrices,
        aligned=a.aligned and b.aligned and c.aligned and whole,
        vectors=whole and of_a and of_b,
        a_along=a.col_stride == FLOAT32_BYTES,
        b_along=b.row_stride == FLOAT32_BYTES and b.col_stride != FLOAT32_BYTES,
        a_rows=a_whole and a.aligned_rows,
        b_rows=b_whole and b.transposed.aligned_rows,
        by_columns=c.row_stride == FLOAT32_BYTES and c.col_stride != FLOAT32_BYTES,
        epilogue=product.epilogue is not None,
        precision=precision,
        tma="" if tma is None else tma.layout,
        cc=gpu.cc,
        sm_count=gpu.sm_count,
        clock_hz=gpu.clock_hz,
        memory_bandwidth=gpu.memory_bandwidth,
    )


def ranked(wanted: Problem, only: Stage | None = None) -> list[Choice]:
    """Return all candidates, or one stage's, the one that is expected to be fastest first."""
    if wanted.precision == IEEE:
        return _ranked_ladder(wanted, only)
    wanted = _rounded_up(wanted)
    return (_ranked_rows(wanted) if only is ROWS else []) or _ranked_tensor(wanted, only)


def _ranked_rows(wanted: Problem, most: int | None = None, columns: tuple[float, float] = (inf, inf)) -> list[Choice]:
    """Return candidates of `ROWS` that copy 16 bytes at a time, as is and as the transpose, with up to `columns`."""
    found = _ranked_tensor(wanted, ROWS, most) if wanted.a_rows and wanted.n <= columns[0] else []
    turns = wanted.b_rows and wanted.m <= columns[1] and not wanted.epilogue  # which counts rows and columns of C
    turned = _ranked_tensor(wanted.swapped, ROWS, most) if turns else []
    return _sooner_first(found, [one._replace(swapped=True) for one in turned])


def _sooner_first(found: list[Choice], others: list[Choice]) -> list[Choice]:
    """Return two rankings, one behind the other: first the one whose best candidate is expected to be faster."""
    return others + found if others and (not found or others[0].clocks < found[0].clocks) else found + others


def _ranked_tensor(wanted: Problem, only: Stage | None, most: int | None = None) -> list[Choice]:
    """Return the `most` fastest candidates, by default all; extents are rounded up."""
    stage = only or (TF32_TMA if wanted.tma else tensor_stage(wanted.cc))
    if stage is None:
        return []
    m, n, k, matrices, precision, tma = wanted.m, wanted.n, wanted.k, wanted.matrices, wanted.precision, wanted.tma
    sm_count, clock_hz, bandwidth = wanted.sm_count, wanted.clock_hz, wanted.memory_bandwidth
    before, of_a = 0.0, 0 if stage is ROWS else matrices
    if not isinstance(stage, TmaStage):
        before = tensor_heuristics.decomposition_seconds(precision, m, n, k, of_a, matrices, bandwidth)
    dividing = only is None and tma and k >= LONG_SUM and m * n * matrices <= sm_count * FEW_TILES_ELEMENTS
    found = [
        Choice(stage, config, partition, False, LAUNCH + (before + seconds) * clock_hz, "", precision)
        for seconds, config, partition in tensor_heuristics.seconds_of(
            stage, precision, m, n, k, matrices, sm_count, tma, bandwidth, None if dividing else most
        )
    ]
    others = []
    if only is None and (precision, wanted.cc) == TIMED and k < LONG_SUM:  # `FUSED` does not divide longer sums
        seconds = tensor_heuristics.fused_seconds(FUSED.configs[0], m, n, k, matrices, sm_count)
        others = [Choice(FUSED, FUSED.configs[0], None, False, LAUNCH + seconds * clock_hz, "", precision)]
    elif only is None and (precision, wanted.cc) == TIMED:
        others = _ranked_rows(wanted, most, ROWS_COLUMNS)
    found = _sooner_first(found, others)
    if dividing:
        # Sums of operands that tensor maps describe are not divided: if few tiles have long ones, decomposing pays.
        others = [one for one in _ranked_tensor(wanted._replace(tma=""), None) if one.partition is not None]
        found = sorted(found + others, key=lambda one: one.clocks * (1.0 if one.partition is None else DECOMPOSING))
    return found[:most]


Candidate = tuple[float, int, Costs, bool, int, int, float]  # see `_ladder_candidates`


def _ladder_candidates(wanted: Problem, only: Stage | None, memory: float) -> list[Candidate]:
    """Return the candidates of a float32 product.

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
    in_vectors = wanted.aligned and not wanted.epilogue
    both_ways = not wanted.epilogue and (min(m, n) <= FEW_COLUMNS or wanted.by_columns)
    found, a_along, b_along = [], wanted.a_along, wanted.b_along
    by_columns = max(memory, cost_model.columns_clocks(matrices * m * n, wanted.sm_count))
    as_is, transposed = (by_columns, memory) if wanted.by_columns else (memory, by_columns)
    for i, costs in enumerate(costs_of(stage, wanted.cc, wanted.sm_count, wanted.vectors, in_vectors)):
        if only is not None or not costs.narrow or (n <= costs.most_columns and costs.suits(m, n, k, a_along)):
            bound = memory if costs.in_groups else as_is
            least, tiles, k_tiles = costs.least(m, n, k, matrices, bound)
            found.append((least, 2 * i, costs, False, tiles, k_tiles, bound))
        if both_ways and costs.stage.takes_partition and (only is not None or costs.suits(n, m, k, b_along)):
            bound = memory if costs.in_groups else transposed
            least, tiles, k_tiles = costs.least(n, m, k, matrices, bound)
            found.append((least, 2 * i + 1, costs, True, tiles, k_tiles, bound))
    return found


def _memory(wanted: Problem) -> float:
    """Return the clocks that a product's operands take to be read or written once."""
    m, n, k = wanted.m, wanted.n, wanted.k
    return memory_clocks(wanted.matrices * (m * k + k * n + m * n), wanted.memory_bandwidth, wanted.clock_hz)


def _timed(
    costs: Costs, tiles: int, k_tiles: int, memory: float, aligned: bool, limit: float | None = None
) -> list[Way]:
    """Return expected clocks, blocks negated, and division, for each way to divide the product.

    With a `limit`, choices that take more clocks may be missing.
    """
    least = LAUNCH + memory
    slower = 1.0 if aligned or costs.stage.takes_partition else 0.93
    ways = costs.ways(tiles, k_tiles, memory) if limit is None else costs.ways(tiles, k_tiles, memory, limit, least)
    return [((clocks if clocks > least else least) / slower, blocks, division) for clocks, blocks, division in ways]


def _choice(costs: Costs, division: tuple[int, int] | None, swapped: bool, clocks: float) -> Choice:
    return Choice(costs.stage, costs.config, None if division is None else Partition(*division), swapped, clocks)


def _ranked_ladder(wanted: Problem, only: Stage | None) -> list[Choice]:
    memory = _memory(wanted)
    found = [
        (clocks, blocks, _choice(costs, division, swapped, clocks))
        for _, _, costs, swapped, tiles, k_tiles, bound in _ladder_candidates(wanted, only, memory)
        for clocks, blocks, division in _timed(costs, tiles, k_tiles, bound, wanted.aligned)
    ]
    # If several wait for memory alone, more blocks have more bytes under way.
    return [choice for *_, choice in sorted(found, key=lambda one: one[:2])]


def _best_ladder(wanted: Problem) -> Choice | None:
    """Return the first of `_ranked_ladder`, without timing candidates that cannot be it."""
    best: tuple[float, int, int] = inf, 0, 0  # clocks, blocks negated, and number of the candidate, as in the ranking
    found: tuple[Costs, tuple[int, int] | None, bool] | None = None
    memory = _memory(wanted)
    for least, i, costs, swapped, tiles, k_tiles, bound in sorted(_ladder_candidates(wanted, None, memory)):
        if least > best[0]:
            break
        for clocks, blocks, division in _timed(costs, tiles, k_tiles, bound, wanted.aligned, best[0]):
            if clocks <= best[0] and (clocks, blocks, i) < best:
                best, found = (clocks, blocks, i), (costs, division, swapped)
    return None if found is None else _choice(*found, best[0])


def best(wanted: Problem) -> Choice:
    """Return the choice that is expected to be fastest, without a reason: the same as `choose`, sooner."""
    return _best(_rounded_up(wanted))


def _rounded_up(wanted: Problem) -> Problem:
    """Return a problem of as many tiles, for which the choice is the same: extents are rounded up if they can be."""
    m, n, k, sm_count = wanted.m, wanted.n, wanted.k, wanted.sm_count
    if wanted.precision != IEEE:
        return Problem(ceil_div(m, TENSOR_TILE) * TENSOR_TILE, ceil_div(n, TENSOR_TILE) * TENSOR_TILE, *wanted[2:])
    if m <= FEW_COLUMNS or n <= FEW_COLUMNS:
        return wanted
    tile, k_tile = common_divisors(wanted.cc)
    rows, cols, terms = ceil_div(m, tile) * tile, ceil_div(n, tile) * tile, ceil_div(k, k_tile) * k_tile
    elements = wanted.matrices * (rows * terms + terms * cols + rows * cols)
    in_bytes = memory_clocks(elements, wanted.memory_bandwidth, wanted.clock_hz)
    if wanted.by_columns:
        in_bytes = max(in_bytes, cost_model.columns_clocks(wanted.matrices * rows * cols, sm_count))
    if in_bytes > wanted.matrices * m * n * k / (MOST_LANES * sm_count):
        return wanted  # the bytes may decide
    return Problem(rows, cols, terms, *wanted[3:])


@lru_cache(maxsize=4096)
def _best(wanted: Problem) -> Choice:
    found = [_best_ladder(wanted)] if wanted.precision == IEEE else _ranked_tensor(wanted, None, 1)
    return choose(wanted) if not found or found[0] is None else found[0]


@lru_cache(maxsize=4096)
def choose(wanted: Problem) -> Choice:
    """Return the choice that is expected to be fastest, and the reason."""
    found = ranked(wanted)
    if not found:
        raise RuntimeError(f"no stage in cost_model.RATES runs on compute capability {dotted(wanted.cc)}")
    return found[0]._replace(reason=_reason(found[0], wanted, len(found)))


@lru_cache(maxsize=4096)
def named(name: str, wanted: Problem) -> Choice:
    """Return how a stage of the caller's choice is run: in its first configuration, unless the model knows several.

    Raises
    ------
    ValueError
        As `resolve`; for a stage that does not compute in the precision, or not with such operands.
    """
    stage = resolve(name, wanted.cc)
    check_stage_precision(stage, wanted.precision)
    if isinstance(stage, TmaStage) and not wanted.tma:
        raise ValueError(
            f"stage is {name!r}, and tensor maps cannot describe these operands; expected float32, addresses and "
            "strides that are multiples of 16 bytes, contiguous rows or columns, and A or B contiguous along K; pass "
            "'auto'"
        )
    if wanted.tma and not isinstance(stage, TmaStage):
        wanted = wanted._replace(tma="")  # it decomposes the operands
    compared = stage.takes_partition or isinstance(stage, TensorStage | TmaStage)
    found = ranked(wanted, stage) if compared else []
    if not found:
        return Choice(stage, stage.configs[0], reason=f"stage {name} was asked for", precision=wanted.precision)
    return found[0]._replace(reason=f"stage {name} was asked for; {_reason(found[0], wanted, len(found))}")


def _reason(choice: Choice, wanted: Problem, count: int) -> str:
    turned, by_maps = wanted.swapped if choice.swapped else wanted, isinstance(choice.stage, TmaStage)
    rows, cols = (turned.n, turned.m) if by_maps and wanted.tma == "NN" else (turned.m, turned.n)
    tiles = ceil_div(rows, choice.config.BM) * ceil_div(cols, choice.config.BN) * wanted.matrices
    text = f"{tiles} tiles of {choice.config.BM}x{choice.config.BN} on {wanted.sm_count} SMs"
    if choice.partition is not None and wanted.precision != IEEE:
        text += f", each divided among {choice.partition.blocks * wanted.matrices // tiles} blocks along K"
    elif choice.partition is not None:
        k_tiles = ceil_div(turned.k, choice.config.BK) or 1
        if choice.partition.whole == tiles:
            text += f", one block each ({choice.partition.blocks})"
        else:
            each = (tiles - choice.partition.whole) * k_tiles / choice.partition.blocks
            text += (
                f", the last {tiles - choice.partition.whole} divided among {choice.partition.blocks} blocks, "
                f"{each:.1f} of {k_tiles} k-tiles each"
            )
    text += ", computed as the transpose" if choice.swapped else ""
    if wanted.precision != IEEE:
        own = isinstance(choice.stage, TmaStage | FusedStage)
        decomposed = ("A" if choice.swapped else "B") if choice.stage is ROWS else "operands"
        text += ", operands as they are" if own else f", {decomposed} decomposed first"
    candidates = "the only candidate" if count == 1 else f"the least of {count} candidates"
    return f"{text}; expected to take {choice.clocks / wanted.clock_hz * 1e6:.1f} us, {candidates}"
