"""Launches that decompose operands: layouts of the parts, kernels, and steps.

The parts of a product's operands lie in the scratch memory of its launches. Those of a prepared operand
(`Product.prepared`) have been made before and are passed to the launches like a vector of the epilogue. Their layout
suits the tiles of every configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from ...device.units import FLOAT32_BYTES, OVERLAPPING, ceil_div
from ..code import Code
from ..product import Layout, Product
from ..stage import Gpu
from ..step import AT_A, Kernel, Launches, MatrixAt, Moving, Slot, Step, Words
from .config import DECOMPOSED_ROWS, PREPARED_TILES, SPAN, SPANS, THREADS, TensorConfig, parts_shape, words_per_row
from .precision import TENSOR_PRECISIONS, TensorPrecision

DECOMPOSE_SIGNATURE, ROW_MAXIMA_SIGNATURE = (
    Code("tensor_core.signatures", f"{name}_signature") for name in ("decompose", "row_maxima")
)
SCRATCH_ALIGNMENT = 256
BLOCK = (THREADS, 1, 1)


class Decomposition(NamedTuple):
    """Decomposed operands of a product, and the grids of the kernels that make them.

    Attributes
    ----------
    precision : TensorPrecision
        Precision.
    arguments : tuple of MatrixAt
        Layouts of A's parts and B's, and of the row maxima of both if the precision is scaled; with the place of each:
        in the scratch memory or, for parts of a prepared operand, memory of their own.
    steps : tuple of int
        Bytes from one matrix of a batch to the next for each of them; 0 for what all matrices share.
    matrices : int
        Matrices of the batch.
    bytes : int
        Size of the scratch memory.
    decompose_blocks, maxima_blocks : int
        Blocks of the kernel that decomposes operands, and of the one that finds the row maxima.
    """

    precision: TensorPrecision
    arguments: tuple[MatrixAt, ...]
    steps: tuple[int, ...]
    matrices: int
    bytes: int
    decompose_blocks: int
    maxima_blocks: int


def dense_words(rows: int, words: int) -> Layout:
    """Return the layout of a dense matrix of 32-bit words."""
    return Layout(rows, words, FLOAT32_BYTES * words, FLOAT32_BYTES)


def spans_of(k: int) -> int:
    """Return the number of spans of k in which row maxima are found."""
    return min(SPANS, ceil_div(k, SPAN)) or 1


def prepared_parts(precision: TensorPrecision, mn: int, k: int) -> Layout:
    """Return the layout of the parts of a prepared (mn, k) operand, which suits block tiles of all extents."""
    rows, words = zip(*(parts_shape(precision, mn, k, tile) for tile in PREPARED_TILES))
    return dense_words(rows[0], max(words))


def decomposition_of(
    precision: TensorPrecision, product: Product, config: TensorConfig, of_b_alone: bool = False
) -> Decomposition:
    """Lay out the decomposed operands of a product; of the batch, only the last dimension counts.

    If they are `of_b_alone`, what is laid out for B takes the places of A, too, with steps of 0.
    """
    k, batch, prepared = product.k, product.batch, product.prepared
    matrices, varies = batch.extents[-1], (batch.a[-1], batch.b[-1])
    layouts = [
        prepared_parts(precision, mn, k) if ready else dense_words(*parts_shape(precision, mn, k, tile))
        for mn, tile, ready in zip((product.m, product.n), (config.BM, config.BN), prepared)
    ]
    spans, words = 0, words_per_row(precision)
    if precision.scaled:
        spans = spans_of(k)
        layouts += [dense_words(spans, one.cols // words) for one in layouts]
    arguments, steps, end, vector, row_blocks = [], [], 0, Slot.VECTORS + len(product.vectors), 0
    for i, layout in enumerate(layouts):
        if of_b_alone and not i & 1:
            vector += i < 2 and prepared[0]  # parts of A are there, and are not read
            continue
        if prepared[i & 1]:
            arguments.append(MatrixAt(Moving(vector if i < 2 else Slot.SCRATCH), layout))
            steps.append(0)
            vector += i < 2
            continue
        arguments.append(MatrixAt(Moving(Slot.SCRATCH, end), layout))
        size = ceil_div(layout.rows * layout.row_stride, SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
        step = size if varies[i & 1] else 0
        steps.append(step)
        end += step * matrices or size
        if i < 2:
            row_blocks += layout.cols // words // DECOMPOSED_ROWS
    if of_b_alone:
        arguments, steps = arguments[:1] * 2 + arguments[1:] * 2, [one for step in steps for one in (0, step)]
    blocks = layouts[0].rows // precision.parts * row_blocks
    return Decomposition(precision, tuple(arguments), tuple(steps), matrices, end, blocks, spans * row_blocks)


def preparation(precision: TensorPrecision, x: Layout, gpu: Gpu) -> Launches:
    """Return the launches that decompose an operand, (mn, k) at A's place, into parts at the first vector's."""
    parts, maxima, scaled = prepared_parts(precision, *x.words[:2]), spans_of(x.cols), precision.scaled
    padded = parts.cols // words_per_row(precision)
    row_blocks, largest = padded // DECOMPOSED_ROWS, dense_words(maxima, padded)
    made = Decomposition(
        precision,
        (MatrixAt(Moving(Slot.VECTORS), parts),) * 2 + (MatrixAt(Moving(Slot.SCRATCH), largest),) * 2,
        (0, 0, 0, 0),
        1,
        largest.rows * largest.row_stride if scaled else 0,
        parts.rows // precision.parts * row_blocks,
        maxima * row_blocks,
    )
    operand = MatrixAt(AT_A, x)
    return Launches(decomposing_steps(made, (operand, operand), (0, 0), (True, False), False, gpu, True), made.bytes)


def decomposing_steps(
    made: Decomposition,
    operands: tuple[MatrixAt, MatrixAt],
    steps: tuple[int, int],
    wanted: tuple[bool, bool],
    batched: bool,
    gpu: Gpu,
    overlaps: bool,
) -> tuple[Step, ...]:
    """Return the launches that decompose one operand, or both; if the precision is scaled, row maxima come before.

    Parameters
    ----------
    made : Decomposition
        Parts.
    operands : tuple of MatrixAt
        A, and the transpose of B.
    steps : tuple of int
        Bytes from one matrix of a batch to the next, in A and in B.
    wanted : tuple of bool
        Operands to decompose, of A and B.
    batched : bool
        True if the grid's y axis counts matrices of a batch.
    gpu : Gpu
        Device.
    overlaps : bool
        True if the second launch may start before the first has ended.
    """
    if not (wanted[0] or wanted[1]):
        return ()
    # The kernels take two operands. Alone, one takes both places: the grid has no blocks for the second.
    i, j = 0 if wanted[0] else 1, 1 if wanted[1] else 0
    x, y, x_step, y_step = operands[i], operands[j], steps[i], steps[j]
    places, own, matrices = made.arguments, made.steps, made.matrices
    decompose, row_maxima = preparing_kernels(made.precision, batched)
    grid = (made.decompose_blocks, matrices, 1)
    if not made.precision.scaled:
        words = Words((x_step, own[i], y_step, own[j]))
        return (Step(decompose, grid, BLOCK, (x, places[i], y, places[j], words)),)
    p, q = i + 2, j + 2  # row maxima
    words = Words((x_step, own[p], y_step, own[q]))
    first = Step(row_maxima, (made.maxima_blocks, matrices, 1), BLOCK, (x, places[p], y, places[q], words))
    words = Words((x_step, own[i], own[p], y_step, own[j], own[q]))
    arguments = (x, places[i], places[p], y, places[j], places[q], words)
    return first, Step(decompose, grid, BLOCK, arguments, overlaps and gpu.cc >= OVERLAPPING)


# ------------------------------------------------------------------------------------------------------------- kernels


@dataclass(frozen=True)
class DecomposeVariant:
    """Specialisation of the kernels that decompose operands and find row maxima.

    Attributes
    ----------
    precision : TensorPrecision or None
        Precision; None for row maxima, which are the same for all.
    batched : bool
        True if the grid's y axis counts matrices of a batch.
    """

    precision: TensorPrecision | None
    batched: bool


def build_decompose(config: None, variant: DecomposeVariant) -> Any:
    """Build the kernel that decomposes operands."""
    assert variant.precision is not None
    from .decompose import build

    return build(variant.precision, variant.batched)


def build_row_maxima(config: None, variant: DecomposeVariant) -> Any:
    """Build the kernel that finds the largest magnitudes of rows of A and columns of B."""
    from .decompose import build_row_maxima as build

    return build(variant.batched)


@lru_cache(maxsize=256)
def preparing_kernels(precision: TensorPrecision, batched: bool) -> tuple[Kernel, Kernel]:
    """Return the kernel that decomposes operands, and the one that finds row maxima.

    Precisions whose parts are the same share both.
    """
    same = (one for one in TENSOR_PRECISIONS.values() if one.decomposition == precision.decomposition)
    if (shared := next(same)) != precision:
        return preparing_kernels(shared, batched)
    variant = DecomposeVariant(precision, batched)
    name, threads = f"decompose_{precision.name}", THREADS
    first = Kernel(name, build_decompose, DECOMPOSE_SIGNATURE, None, variant, 0, threads)
    return first, _row_maxima(batched)


@lru_cache(maxsize=2)
def _row_maxima(batched: bool) -> Kernel:
    variant = DecomposeVariant(None, batched)
    return Kernel("row_maxima", build_row_maxima, ROW_MAXIMA_SIGNATURE, None, variant, 0, THREADS)
