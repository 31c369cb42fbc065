"""Choice of stage, configuration and partition for a product on a device: the policy behind ``stage="auto"``.

The candidate that `cost_model` expects to end first wins; on tensor cores, the one of `tensor_heuristics`.
"""

from __future__ import annotations

from functools import lru_cache
from math import inf

from ..device.access import SECTOR
from ..device.units import FLOAT32_BYTES, ceil_div
from ..kernels.conversion import conversion_bytes
from ..kernels.ladder.stage import IN_FLOAT64, LadderStage, sums_of
from ..kernels.product import BFLOAT16, ITEM_BYTES, Product
from ..kernels.stage import IEEE, Stage
from ..kernels.tensor_core import TENSOR_STAGES
from ..kernels.tensor_core.stage import LONG_SUM, TensorStage
from ..kernels.tensor_core.tma_stage import LAYOUTS as TMA_LAYOUTS
from ..kernels.tensor_core.tma_stage import TmaLayout, TmaStage, tma_operands
from ..models.gpu_names import dotted
from ..runtime.device import DeviceProperties
from . import cost_model, tensor_heuristics
from .cost_model import LAUNCH, MOST_LANES, memory_clocks
from .ladder_heuristics import (
    FEW_COLUMNS,
    SHORT_TERMS,
    THIN_ELEMENTS,
    best_of_ladder,
    common_divisor,
    ranked_ladder,
)
from .precision import tensor_stage
from .problem import Choice, Problem
from .stage_names import check_stage_precision, resolve
from .tensor_heuristics import FUSED_ACCESS, FUSED_VECTORS

TF32_TMA, ROWS, FUSED, PERSISTENT = (
    TENSOR_STAGES[name] for name in ("tf32_tma", "rows_in_registers", "fused_decomposition", "persistent")
)
WARPGROUPS = (9, 0)  # the compute capability whose tensor-core kernels are those of warpgroups
BF16X6 = "bf16x6"  # the precision in which `ROWS` and `FUSED` were timed, and in which float32 sums are compensated
# Precisions whose bounds are larger than that of `BF16X6`, which may be computed in their place; and those with one
# product of parts, whose bounds are also larger than that of `IEEE`.
LESS_ACCURATE, ONE_PRODUCT = ("tf32", "bf16", "tf32x3", "bf16x3", "fp16x3"), ("tf32", "bf16")
# Most columns of `ROWS`, as is and as the transpose, which does not read parts of a prepared B; the same for sums of
# fewer than `LONG_SUM` terms.
ROWS_COLUMNS, ROWS_SHORT_COLUMNS = (768, 128), (2048, 128)
BFLOAT16_BYTES = ITEM_BYTES[BFLOAT16]
TENSOR_TILE = 32  # divides all extents of tiles on tensor cores
FEW_TILES_ELEMENTS = 128 * 64  # of C per multiprocessor, up to which its tiles may be divided
NARROW = 64  # rows and columns up to which tiles may be narrower than those that extents are rounded up to
BYTES_COUNT = 4  # multiply-adds, in the time of the bytes, from which on these make no difference to a choice
# Terms up to which float32 multiply-adds are considered for a C that is not thin; the same in `ONE_PRODUCT`.
SHORT_SUM, SHORT_SUM_OF_ONE = 128, 32


def problem(product: Product, gpu: DeviceProperties, precision: str = IEEE) -> Problem:
    """Return the properties of a product on which the choice of a kernel depends."""
    converted = product.converted
    a, b, c, batch = converted.a, converted.b, product.c, converted.batch
    a_whole, b_whole, c_whole = (all(step % 16 == 0 for step in steps) for steps in (batch.a, batch.b, batch.c))
    whole = a_whole and b_whole and c_whole
    a_aligned, b_aligned, c_vectors = a.aligned, b.aligned, c.aligned_rows and c_whole
    of_a = a_aligned or a.rows == 1 or a.transposed.aligned
    of_b = b_aligned or b.cols == 1 or b.transposed.aligned
    narrow = precision in ROWS.precisions and converted is not product
    mapped = converted is product and precision in TF32_TMA.precisions and TF32_TMA.runs_on(gpu.cc)
    tma = tma_operands(product) if mapped else None
    by_columns = c.row_stride == FLOAT32_BYTES and c.col_stride != FLOAT32_BYTES
    pitch = c.col_stride if by_columns else c.row_stride
    return Problem(
        c.rows,
        c.cols,
        a.cols,
        batch.matrices,
        aligned=a_aligned and b_aligned and whole and c_vectors and c.cols % 4 == 0,
        vectors=whole and of_a and of_b,
        a_along=a.col_stride == FLOAT32_BYTES,
        b_along=b.row_stride == FLOAT32_BYTES and b.col_stride != FLOAT32_BYTES,
        a_vectors=a_whole and (a_aligned or a.aligned_rows or a.transposed.aligned_rows),
        b_vectors=b_whole and (b_aligned or b.aligned_rows or b.transposed.aligned_rows),
        a_contiguous=FLOAT32_BYTES in (a.row_stride, a.col_stride),
        b_contiguous=FLOAT32_BYTES in (b.row_stride, b.col_stride),
        c_sectors=(pitch | c.offset | batch.c[0] | batch.c[1] | batch.c[2]) % (SECTOR * FLOAT32_BYTES) == 0,
        c_vectors=c_vectors,
        a_narrow=narrow and product.narrow_a,
        b_narrow=narrow and product.transposed.narrow_a,
        by_columns=by_columns,
        epilogue=product.epilogue is not None,
        prepared=precision in LESS_ACCURATE and any(product.prepared),
        precision=precision,
        tma="" if tma is None else tma.layout,
        u_sectors=tma is None or tma.u_sectors,
        v_sectors=tma is None or tma.v_sectors,
        a_dtype=product.a.dtype,
        b_dtype=product.b.dtype,
        cc=gpu.cc,
        sm_count=gpu.sm_count,
        clock_hz=gpu.clock_hz,
        memory_bandwidth=gpu.memory_bandwidth,
    )


def conversion_seconds(product: Product, choice: Choice, gpu: DeviceProperties) -> float:
    """Return the expected seconds of converting operands for a choice's kernel; 0 if its clocks contain them."""
    own = choice.oriented(product)
    size = 0 if choice.measured else conversion_bytes(own, choice.stage.taken(choice.config, own))
    return tensor_heuristics.copy_seconds(size, gpu.memory_bandwidth)


def ranked(wanted: Problem, only: Stage | None = None) -> list[Choice]:
    """Return all candidates, or one stage's, the one that is expected to be fastest first."""
    if wanted.precision == IEEE or isinstance(only, LadderStage):
        return ranked_ladder(wanted, only)
    wanted = _rounded_up(wanted)
    return (_ranked_rows(wanted) if only is ROWS else []) or _ranked_tensor(wanted, only)


def _ranked_rows(
    wanted: Problem, most: int | None = None, columns: tuple[float, float] = (inf, inf), in_precision: str = ""
) -> list[Choice]:
    """Return candidates of `ROWS` that read a contiguous axis, as is and as the transpose; see `_ranked_tensor`.

    They have up to `columns`, unless the operand that is not decomposed is of BF16.
    """
    as_is = wanted.a_narrow or (wanted.a_contiguous and wanted.n <= columns[0])
    found = _ranked_tensor(wanted, ROWS, most, in_precision) if as_is else []
    turns = wanted.b_narrow or (wanted.b_contiguous and wanted.m <= columns[1])
    turns = turns and not wanted.epilogue  # which is given rows and columns of C
    turned = _ranked_tensor(wanted.swapped, ROWS, most, in_precision) if turns else []
    return _sooner_first(found, [one._replace(swapped=True) for one in turned], wanted) if turned else found


def _sooner_first(found: list[Choice], others: list[Choice], wanted: Problem) -> list[Choice]:
    """Return two rankings, one behind the other, the one whose best candidate is expected to be faster first."""
    if not found:
        return others
    if wanted.a_narrow or wanted.b_narrow:
        sooner = _compared(others[0], wanted) < _compared(found[0], wanted)
    else:
        sooner = others[0].clocks < found[0].clocks
    return others + found if sooner else found + others


def _compared(choice: Choice, wanted: Problem) -> float:
    """Return the clocks of a choice, less those of the conversion that other candidates need and it does not."""
    narrow, rows = (wanted.b_narrow, wanted.n) if choice.swapped else (wanted.a_narrow, wanted.m)
    if choice.stage is not ROWS or not narrow:
        return choice.clocks
    size = wanted.matrices * rows * wanted.k * (BFLOAT16_BYTES + FLOAT32_BYTES)
    return choice.clocks - tensor_heuristics.copy_seconds(size, wanted.memory_bandwidth) * wanted.clock_hz


def _ranked_tensor(
    wanted: Problem, only: Stage | None, most: int | None = None, in_precision: str = ""
) -> list[Choice]:
    """Return the `most` fastest candidates, by default all, in the precision that is wanted or another.

    Products in `LESS_ACCURATE` precisions have some in more accurate ones, too, unless operands are prepared.
    """
    stage = only or (TF32_TMA if wanted.tma else tensor_stage(wanted.cc))
    if stage is None:
        return []
    m, n = -(-wanted.m // TENSOR_TILE) * TENSOR_TILE, -(-wanted.n // TENSOR_TILE) * TENSOR_TILE
    k, matrices, precision, tma = wanted.k, wanted.matrices, in_precision or wanted.precision, wanted.tma
    sm_count, clock_hz, bandwidth = wanted.sm_count, wanted.clock_hz, wanted.memory_bandwidth
    by_maps = TMA_LAYOUTS[tma] if isinstance(stage, TmaStage) else None
    before, of_a, of_b = 0.0, 0 if stage is ROWS else matrices, matrices
    if by_maps is not None:  # V may be decomposed
        of_a, of_b = (matrices, 0) if by_maps.swapped else (0, matrices)
    if by_maps is None or by_maps.decomposed:
        before = tensor_heuristics.decomposition_seconds(precision, m, n, k, of_a, of_b, bandwidth)
    at_sectors = wanted.c_sectors and not wanted.by_columns and not wanted.epilogue
    written = (wanted.m, wanted.n, at_sectors) if wanted.cc == WARPGROUPS else None
    # Sums of operands that tensor maps describe are not divided, and rows that begin within a sector are copied slowly.
    few_tiles = k >= LONG_SUM and m * n * matrices <= sm_count * FEW_TILES_ELEMENTS
    slowly = not (wanted.u_sectors and wanted.v_sectors)
    decomposing = only is None and tma and (few_tiles or slowly or TMA_LAYOUTS[tma].decomposed)
    found = [
        Choice(stage, config, partition, False, LAUNCH + (before + seconds) * clock_hz, "", precision)
        for seconds, config, partition in tensor_heuristics.seconds_of(
            stage,
            precision,
            m,
            n,
            k,
            matrices,
            sm_count,
            tma,
            bandwidth,
            None if decomposing else most,
            wanted.a_narrow and stage is ROWS,
            written,
            stage is ROWS and not wanted.a_vectors and not wanted.a_narrow,
            (wanted.u_sectors, wanted.v_sectors),
        )
    ]
    if only is not None or wanted.cc != WARPGROUPS:
        return found[:most]
    if decomposing:
        found += _ranked_tensor(wanted, PERSISTENT)
        found.sort(key=lambda one: one.clocks)
    if precision == BF16X6 or (precision in LESS_ACCURATE and not wanted.prepared):
        found = _with_more_accurate(found, wanted, most)
    elif precision == IN_FLOAT64 and (others := ranked_ladder(wanted)):
        found = _sooner_first(found, others, wanted)
    return found[:most]


def _with_more_accurate(found: list[Choice], wanted: Problem, most: int | None) -> list[Choice]:
    """Return a ranking with candidates of `BF16X6` that decompose one operand or none, and float32 multiply-adds."""
    k = wanted.k
    if k > SHORT_SUM:
        others = _ranked_rows(wanted, most, ROWS_SHORT_COLUMNS if k < LONG_SUM else ROWS_COLUMNS, BF16X6)
        found = _sooner_first(found, others, wanted) if others else found
    # `FUSED` does not divide sums of `LONG_SUM` terms or more. With sums of one k-tile, it took at least 1.2 times as
    # long as float32 multiply-adds.
    if FUSED.configs[0].BK < k < LONG_SUM:
        m, n = (-(-extent // TENSOR_TILE) * TENSOR_TILE for extent in (wanted.m, wanted.n))
        access = FUSED_VECTORS if wanted.vectors else FUSED_ACCESS[wanted.a_contiguous + wanted.b_contiguous]
        tile, sm_count = FUSED.configs[0], wanted.sm_count
        seconds = tensor_heuristics.fused_seconds(tile, m, n, k, wanted.matrices, sm_count, access)
        fused = Choice(FUSED, tile, None, False, LAUNCH + seconds * wanted.clock_hz, "", BF16X6)
        found = _sooner_first(found, [fused], wanted)
    one_product = wanted.precision in ONE_PRODUCT
    if min(wanted.m, wanted.n) <= FEW_COLUMNS or k <= (SHORT_SUM_OF_ONE if one_product else SHORT_SUM):
        limit = _compared(found[0], wanted)
        if wanted.precision != BF16X6:
            wanted = wanted._replace(precision=IEEE if one_product else BF16X6)
        if most == 1:
            best_found = best_of_ladder(wanted, limit)
            others = [] if best_found is None else [best_found]
        else:
            others = ranked_ladder(wanted)
        found = others + found if others and others[0].clocks < limit else found + others
    return found


def best(wanted: Problem) -> Choice:
    """Return the choice that is expected to be fastest, without a reason: the same as `choose`, sooner."""
    return _best(_rounded_up(wanted))


def _rounded_up(wanted: Problem) -> Problem:
    """Return a problem of as many tiles, for which the choice is the same: M and N are rounded up if they can be."""
    m, n, k, sm_count = wanted.m, wanted.n, wanted.k, wanted.sm_count
    if wanted.precision != IEEE:
        if wanted.cc == WARPGROUPS:  # whose time depends on tiles that reach beyond C
            return wanted
        return Problem(-(-m // TENSOR_TILE) * TENSOR_TILE, -(-n // TENSOR_TILE) * TENSOR_TILE, *wanted[2:])
    if m <= NARROW or n <= NARROW or k <= SHORT_TERMS or wanted.matrices * m * n <= THIN_ELEMENTS:
        return wanted
    tile = common_divisor(wanted.cc)
    rows, cols = ceil_div(m, tile) * tile, ceil_div(n, tile) * tile
    elements = wanted.matrices * (rows * k + k * cols + rows * cols)
    in_bytes = memory_clocks(elements, wanted.memory_bandwidth, wanted.clock_hz)
    if wanted.by_columns:
        in_bytes = max(in_bytes, cost_model.columns_clocks(wanted.matrices * rows * cols, rows, sm_count))
    if BYTES_COUNT * in_bytes > wanted.matrices * m * n * k / (MOST_LANES * sm_count):
        return wanted
    return Problem(rows, cols, *wanted[2:])


@lru_cache(maxsize=4096)
def _best(wanted: Problem) -> Choice:
    found = [best_of_ladder(wanted)] if wanted.precision == IEEE else _ranked_tensor(wanted, None, 1)
    return choose(wanted) if not found or found[0] is None else found[0]


@lru_cache(maxsize=4096)
def choose(wanted: Problem) -> Choice:
    """Return the choice that is expected to be fastest, and the reason."""
    found = ranked(wanted)
    if not found:
        raise RuntimeError(f"no stage in ladder_rates.RATES runs on compute capability {dotted(wanted.cc)}")
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
            "strides that are multiples of 16 bytes, and contiguous rows or columns, of A or B, and in a batch no more "
            "than 1 GiB of parts of the other one; pass 'auto'"
        )
    if wanted.tma and not isinstance(stage, TmaStage):
        wanted = wanted._replace(tma="")  # it decomposes the operands
    compared = stage.takes_partition or isinstance(stage, TensorStage | TmaStage)
    found = ranked(wanted, stage) if compared else []
    if not found:
        return Choice(stage, stage.configs[0], reason=f"stage {name} was asked for", precision=wanted.precision)
    return found[0]._replace(reason=f"stage {name} was asked for; {_reason(found[0], wanted, len(found))}")


def _decomposed(choice: Choice, placed: TmaLayout | None) -> str:
    """Return in words which operands are decomposed; `placed` is the layout that tensor maps describe, if they do."""
    if choice.stage is FUSED or (placed is not None and not placed.decomposed):
        return "operands as they are"
    if choice.stage is not ROWS and placed is None:
        return "operands decomposed first"
    of_a = choice.swapped if placed is None else placed.swapped
    return f"{'A' if of_a else 'B'} decomposed first"


def _reason(choice: Choice, wanted: Problem, count: int) -> str:
    turned = wanted.swapped if choice.swapped else wanted
    placed = TMA_LAYOUTS[wanted.tma] if isinstance(choice.stage, TmaStage) else None
    rows, cols = (turned.n, turned.m) if placed and placed.swapped else (turned.m, turned.n)
    tiles = ceil_div(rows, choice.config.BM) * ceil_div(cols, choice.config.BN) * wanted.matrices
    text = f"{tiles} tiles of {choice.config.BM}x{choice.config.BN} on {wanted.sm_count} SMs"
    by_tensor_cores = not isinstance(choice.stage, LadderStage)
    if choice.partition is not None and by_tensor_cores:
        rest = tiles - choice.partition.whole
        text += f", the last {rest} divided" if choice.partition.whole else ", each divided"
        text += f" among {choice.partition.blocks * wanted.matrices // rest} blocks along K"
    elif choice.partition is not None:
        k_tiles = ceil_div(turned.k, choice.config.BK) or 1
        if choice.config.tiles > 1:
            text += f", {choice.config.tiles} per block ({choice.partition.blocks})"
        elif choice.partition.whole == tiles:
            text += f", one block each ({choice.partition.blocks})"
        else:
            each = (tiles - choice.partition.whole) * k_tiles / choice.partition.blocks
            text += (
                f", the last {tiles - choice.partition.whole} divided among {choice.partition.blocks} blocks, "
                f"{each:.1f} of {k_tiles} k-tiles each"
            )
    text += ", computed as the transpose" if choice.swapped else ""
    if by_tensor_cores:
        text += f", {_decomposed(choice, placed)}"
    elif wanted.precision != IEEE:
        compensated, in_float64 = sums_of(choice.precision, wanted.k)
        text += f", {'float64' if in_float64 else 'float32'} multiply-adds"
        text += " with compensated sums" if compensated else ""
    if choice.precision != wanted.precision:
        text += f", in {choice.precision}, whose bound is no larger than that of {wanted.precision}"
    candidates = "the only candidate" if count == 1 else f"the least of {count} candidates"
    return f"{text}; expected to take {choice.clocks / wanted.clock_hz * 1e6:.1f} us, {candidates}"
