"""Choice of stage, configuration and partition for a product on a device: the policy behind ``stage="auto"``.

The candidate that `cost_model` expects to end first wins; on tensor cores, the one of `tensor_heuristics`.
"""

from __future__ import annotations

from functools import lru_cache

from ..device.units import FLOAT32_BYTES, ceil_div
from ..kernels import STAGES
from ..kernels.ladder.stage import FEW_TERMS, LadderStage
from ..kernels.product import ONE, Product
from ..kernels.stage import IEEE, Stage
from ..kernels.tensor_core import TENSOR_STAGES
from ..kernels.tensor_core.fused_stage import FusedStage
from ..kernels.tensor_core.stage import LONG_SUM, TensorStage
from ..kernels.tensor_core.tma_stage import TmaStage, tma_operands
from ..models.gpu_names import dotted
from ..runtime.device import DeviceProperties
from . import cost_model, tensor_heuristics
from .cost_model import FEW_COLUMNS, LAUNCH, MOST_LANES, common_divisors, memory_clocks
from .ladder_heuristics import best_of_ladder, ranked_ladder
from .precision import tensor_stage
from .problem import Choice, Problem

TF32_TMA, ROWS, FUSED = (TENSOR_STAGES[name] for name in ("tf32_tma", "rows_in_registers", "fused_decomposition"))
TIMED, ROWS_COLUMNS = ("bf16x6", (9, 0)), 768  # where `ROWS` and `FUSED` were timed; the most columns of `ROWS`
TENSOR_TILE = 32  # divides all extents of tiles on tensor cores
FEW_TILES_ELEMENTS = 128 * 64  # of C per multiprocessor, up to which its tiles may be divided
SHORT_SUM = 128  # terms, up to which float32 multiply-adds are considered for any C where `TIMED`
DECOMPOSING = 2.0  # factor by which decomposed operands must be expected to be faster than those of tensor maps
ANY_GPU = (99, 0)  # a compute capability that no stage finds too low


def problem(product: Product, gpu: DeviceProperties, precision: str = IEEE) -> Problem:
    """Return the properties of a product on which the choice of a kernel depends."""
    converted = product.converted
    a, b, c, batch = converted.a, converted.b, product.c, converted.batch
    whole = batch is ONE or all(step % 16 == 0 for steps in (batch.a, batch.b, batch.c) for step in steps)
    a_rows, b_rows = a.aligned, b.aligned
    of_a, of_b = a_rows or a.transposed.aligned or a.rows == 1, b_rows or b.transposed.aligned or b.cols == 1
    mapped = converted is product and precision in TF32_TMA.precisions and TF32_TMA.runs_on(gpu.cc)
    tma = tma_operands(product) if mapped else None
    return Problem(
        c.rows,
        c.cols,
        a.cols,
        batch.matrices,
        aligned=a_rows and b_rows and c.aligned and whole,
        vectors=whole and of_a and of_b,
        a_along=a.col_stride == FLOAT32_BYTES,
        b_along=b.row_stride == FLOAT32_BYTES and b.col_stride != FLOAT32_BYTES,
        by_columns=c.row_stride == FLOAT32_BYTES and c.col_stride != FLOAT32_BYTES,
        epilogue=product.epilogue is not None,
        precision=precision,
        tma="" if tma is None else tma.layout,
        cc=gpu.cc,
        sm_count=gpu.sm_count,
        clock_hz=gpu.clock_hz,
        memory_bandwidth=gpu.memory_bandwidth,
    )


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
    if cc != ANY_GPU and not stage.runs_on(cc):
        able = ", ".join(other.name for other in STAGES.values() if other.runs_on(cc))
        wanted = stage.min_cc if stage.only_cc is None else stage.only_cc
        advice = f"pass 'auto' or one of {able}" if able else "no stage runs on it; use a GPU of 7.5 or higher"
        raise ValueError(
            f"stage is {name!r}, which needs compute capability {dotted(wanted)}; this GPU has {dotted(cc)}; {advice}"
        )
    return stage


def ranked(wanted: Problem, only: Stage | None = None) -> list[Choice]:
    """Return all candidates, or one stage's, the one that is expected to be fastest first."""
    if wanted.precision == IEEE or isinstance(only, LadderStage):
        return ranked_ladder(wanted, only)
    return _ranked_tensor(_rounded_up(wanted), only)


def _ranked_tensor(wanted: Problem, only: Stage | None, most: int | None = None) -> list[Choice]:
    """Return the `most` fastest candidates, by default all."""
    stage = only or (TF32_TMA if wanted.tma else tensor_stage(wanted.cc))
    if stage is None:
        return []
    m, n = -(-wanted.m // TENSOR_TILE) * TENSOR_TILE, -(-wanted.n // TENSOR_TILE) * TENSOR_TILE
    k, matrices, precision, tma = wanted.k, wanted.matrices, wanted.precision, wanted.tma
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
    elif only is None and (precision, wanted.cc) == TIMED and wanted.a_along and wanted.vectors and n <= ROWS_COLUMNS:
        others = _ranked_tensor(wanted, ROWS, most) if k % 4 == 0 else []
    found = others + found if others and others[0].clocks < found[0].clocks else found + others
    if dividing:
        # Sums of operands that tensor maps describe are not divided: if few tiles have long ones, decomposing pays.
        others = [one for one in _ranked_tensor(wanted._replace(tma=""), None) if one.partition is not None]
        found = sorted(found + others, key=lambda one: one.clocks * (1.0 if one.partition is None else DECOMPOSING))
    few = wanted.m <= FEW_COLUMNS or wanted.n <= FEW_COLUMNS or k <= SHORT_SUM
    if only is None and few and (precision, wanted.cc) == TIMED:  # float32 multiply-adds are candidates, too
        found = [_by_floats(one, wanted) for one in found[:most]]
        if most == 1:
            best_found = best_of_ladder(wanted, found[0].clocks)
            others = [] if best_found is None else [best_found]
        else:
            others = ranked_ladder(wanted)
        found = others + found if others and others[0].clocks < found[0].clocks else found + others
    return found[:most]


def _by_floats(choice: Choice, wanted: Problem) -> Choice:
    """Return a choice with the time that accesses by floats add, which decide against float32 multiply-adds."""
    if choice.partition is not None:  # partial sums are written in pairs
        return choice
    m, n, k, matrices = wanted.m, wanted.n, wanted.k, wanted.matrices
    in_pairs = wanted.aligned or (wanted.vectors and n % 2 == 0 and not wanted.by_columns)
    in_vectors = wanted.vectors and (wanted.a_along or not wanted.b_along)
    seconds = tensor_heuristics.by_floats_seconds(
        choice.stage, choice.config, m, n, k, matrices, wanted.sm_count, in_pairs and not wanted.epilogue, in_vectors
    )
    return choice._replace(clocks=choice.clocks + seconds * wanted.clock_hz)


def best(wanted: Problem) -> Choice:
    """Return the choice that is expected to be fastest, without a reason: the same as `choose`, sooner."""
    return _best(_rounded_up(wanted))


def _rounded_up(wanted: Problem) -> Problem:
    """Return a problem of as many tiles, for which the choice is the same: extents are rounded up if they can be."""
    m, n, k, sm_count = wanted.m, wanted.n, wanted.k, wanted.sm_count
    if wanted.precision != IEEE:
        if (wanted.precision, wanted.cc) == TIMED and (m <= FEW_COLUMNS or n <= FEW_COLUMNS or wanted.k <= SHORT_SUM):
            return wanted
        return Problem(-(-m // TENSOR_TILE) * TENSOR_TILE, -(-n // TENSOR_TILE) * TENSOR_TILE, *wanted[2:])
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
    found = [best_of_ladder(wanted)] if wanted.precision == IEEE else _ranked_tensor(wanted, None, 1)
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


def check_stage_precision(stage: Stage, precision: str) -> None:
    """Raise ValueError unless a stage computes in a precision."""
    if precision not in stage.precisions:
        raise ValueError(
            f"precision is {precision!r} and stage is {stage.name!r}, which computes in "
            f"{', '.join(stage.precisions)}; expected a stage and a precision that agree; change one of them"
        )


def _reason(choice: Choice, wanted: Problem, count: int) -> str:
    turned, by_maps = wanted.swapped if choice.swapped else wanted, isinstance(choice.stage, TmaStage)
    rows, cols = (turned.n, turned.m) if by_maps and wanted.tma == "NN" else (turned.m, turned.n)
    tiles = ceil_div(rows, choice.config.BM) * ceil_div(cols, choice.config.BN) * wanted.matrices
    text = f"{tiles} tiles of {choice.config.BM}x{choice.config.BN} on {wanted.sm_count} SMs"
    by_tensor_cores = not isinstance(choice.stage, LadderStage)
    if choice.partition is not None and by_tensor_cores:
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
    if by_tensor_cores:
        own = isinstance(choice.stage, TmaStage | FusedStage)
        text += ", operands as they are" if own else f", {'B' if choice.stage is ROWS else 'operands'} decomposed first"
    elif wanted.precision != IEEE:
        text += f", float32 multiply-adds{' with compensated sums' if wanted.k > FEW_TERMS else ''}"
    candidates = "the only candidate" if count == 1 else f"the least of {count} candidates"
    return f"{text}; expected to take {choice.clocks / wanted.clock_hz * 1e6:.1f} us, {candidates}"
