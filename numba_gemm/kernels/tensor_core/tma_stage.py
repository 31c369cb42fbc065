"""Launches of a stage of whose operands at least one is copied in place by a tensor map."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from ...device.access import SECTOR
from ...device.units import FLOAT32_BYTES, MAX_GRID_Y, ceil_div
from ..code import Code
from ..product import Layout, Product
from ..stage import Gpu, Partition, Stage
from ..step import ALPHA, AT_C, BETA, Argument, Kernel, Launches, MapOf, MatrixAt, Moving, Slot, Step, Vector, Words
from .config import ROW_WORDS, TensorVariant, WarpgroupConfig
from .decomposition import Decomposition, decomposing_steps, decomposition_of
from .precision import TensorPrecision
from .stage import MAX_PARTS_BYTES, blocks_per_cluster, words_of_turns

SIGNATURE = Code("tensor_core.signatures", "tma_signature")
FIRST_MAP, SECOND_MAP = Words((Moving(Slot.FIRST_MAP),)), Words((Moving(Slot.SECOND_MAP),))

UNIT = 16  # bytes; addresses and strides of a tensor map are multiples
STRIDE_END = 1 << 40
PANEL = ROW_WORDS  # rows per panel of `tf32_tma`: their floats of one k are 128 bytes
EXTENT_END = 1 << 30  # coordinates, up to two tiles beyond the edge, are 32-bit integers
WIDEST = 256  # columns of a tile
PAIRED_ROWS = 16  # of tiles, from which on an odd number is made even so that blocks share copies


class TmaOperands(NamedTuple):
    """Operands of ``U @ V.T``, which is C or its transpose, as tensor maps describe them.

    Attributes
    ----------
    layout : str
        Layouts of A and B, one of `LAYOUTS`.
    u, v : Layout
        Layouts that the tensor maps describe, each with contiguous rows; of a V that is decomposed, any.
    u_slot, v_slot : Slot
        Operands that they are.
    rows, cols : int
        Extents of ``U @ V.T``.
    u_step, v_step : int
        Bytes to the next matrix of a batch; 0 if all share it.
    u_sectors, v_sectors : bool
        True if rows that the tensor maps describe begin at sectors of memory, as far as strides tell; parts of V do.
    """

    layout: str
    u: Layout
    v: Layout
    u_slot: Slot
    v_slot: Slot
    rows: int
    cols: int
    u_step: int
    v_step: int
    u_sectors: bool
    v_sectors: bool

    @property
    def placed(self) -> TmaLayout:
        """Mapping of C to ``U @ V.T``."""
        return LAYOUTS[self.layout]


def describable(layout: Layout, step: int = 0) -> bool:
    """Return True if a tensor map can describe a matrix with contiguous rows, and others `step` bytes further on."""
    return (
        step % UNIT == 0
        and 0 <= step < STRIDE_END
        and layout.col_stride == FLOAT32_BYTES
        and min(layout.rows, layout.cols) > 0
        and layout.offset == 0
        and (layout.rows == 1 or _regular(layout))
    )


def _regular(layout: Layout) -> bool:
    """Return True if the row stride is one that a map allows, and rows do not overlap."""
    return layout.row_stride % UNIT == 0 and FLOAT32_BYTES * layout.cols <= layout.row_stride < STRIDE_END


@lru_cache(maxsize=1024)
def tma_operands(product: Product) -> TmaOperands | None:
    """Return the operands of a product as tensor maps describe them; None if both must be decomposed instead.

    If maps describe both, and one of them is contiguous along k, none is decomposed. If they describe one, the other is
    decomposed, and if they describe two that are contiguous across k, the smaller one, unless its parts for a whole
    batch are too large. Of the batch, only the last dimension counts.
    """
    m, n, k, batch = product.m, product.n, product.k, product.batch
    if product.converted is not product or max(m, n, k) >= EXTENT_END or batch.extents[-1] > MAX_GRID_Y:
        return None
    a_step, b_step = batch.a[-1], batch.b[-1]
    of_a = _order(product.a, a_step, "NT")
    of_b = _order(product.b, b_step, "TN" if of_a == "T" else "NT")
    letters = of_a + of_b
    if letters not in LAYOUTS:
        if not letters:
            return None
        if of_a and of_b:  # the larger one, with all matrices of the batch, is read as it is
            larger_a = m * (batch.extents[-1] if a_step else 1) >= n * (batch.extents[-1] if b_step else 1)
            of_a, of_b = (of_a, "") if larger_a else ("", of_b)
        letters = (of_a or "*") + (of_b or "*")
    placed = LAYOUTS[letters]
    if placed.swapped:
        u = product.b if of_b == "N" else product.b.transposed
        u_slot, v_slot, v, u_step, v_step = Slot.B, Slot.A, product.a, b_step, a_step
    else:
        u = product.a if of_a == "N" else product.a.transposed
        u_slot, v_slot, v, u_step, v_step = Slot.A, Slot.B, product.b.transposed, a_step, b_step
    u_sectors, v_sectors = (
        (one.row_stride | step) % (SECTOR * FLOAT32_BYTES) == 0 for one, step in ((u, u_step), (v, v_step))
    )
    rows, cols = (n, m) if placed.swapped else (m, n)
    if placed.decomposed:
        elements = ceil_div(cols, WIDEST) * WIDEST * _terms_of_part(k)
        if v_step and batch.extents[-1] * elements * FLOAT32_BYTES > MAX_PARTS_BYTES:
            return None  # both are, some matrices at a time, which a launch with maps may not leave half done
        v_sectors = True
    return TmaOperands(letters, u, v, u_slot, v_slot, rows, cols, u_step, v_step, u_sectors, v_sectors)


def described_as(found: TmaOperands | None, planned: TmaOperands | None) -> bool:
    """Return True if operands are described, and none of them is decomposed but the one that is planned to be."""
    if found is None or not found.placed.decomposed:
        return found is not None
    return planned is not None and planned.placed.decomposed and found.v_slot == planned.v_slot


def _terms_of_part(k: int) -> int:
    """Return the terms of the part of a V that is decomposed, which has an even number of slots."""
    return 2 * ROW_WORDS * (ceil_div(k, 2 * ROW_WORDS) or 1)


def _order(x: Layout, step: int, orders: str) -> str:
    """Return the first of two orders, "N" and "T", in which a tensor map can describe an operand; empty without any."""
    for order in orders:
        if describable(x if order == "N" else x.transposed, step):
            return order
    return ""


class TmaVariant(NamedTuple):
    """Specialisation of a kernel.

    Attributes
    ----------
    tensor_variant : TensorVariant
        Precision and epilogue.
    along : bool
        U is contiguous along k; otherwise along its rows.
    swapped : bool
        Rows and columns, as the epilogue is passed them, are those of the product's transpose; False without one.
    pairs : bool
        Blocks may form clusters of two.
    """

    tensor_variant: TensorVariant
    along: bool
    swapped: bool = False
    pairs: bool = False

    @property
    def epilogue(self) -> Callable[..., Any] | None:
        """Epilogue that is compiled into it."""
        return self.tensor_variant.epilogue

    @property
    def vectors(self) -> int:
        """Vectors that the epilogue takes."""
        return self.tensor_variant.vectors


@dataclass(frozen=True)
class TmaLayout:
    """Mapping of C to a product ``U @ V.T``, whose V is contiguous along k.

    Attributes
    ----------
    along : bool
        U is contiguous along k; otherwise along its rows.
    swapped : bool
        The product is the transpose of C; otherwise C itself.
    decomposed : bool
        V is decomposed first; otherwise a tensor map describes it, too.
    """

    along: bool
    swapped: bool
    decomposed: bool = False


# Keyed by the orders of A and B: "N" row-major, "T" column-major, "*" any, of the one that is decomposed.
LAYOUTS = {
    "NN": TmaLayout(False, True),
    "NT": TmaLayout(True, False),
    "TT": TmaLayout(False, False),
    "N*": TmaLayout(True, False, True),
    "T*": TmaLayout(False, False, True),
    "*N": TmaLayout(False, True, True),
    "*T": TmaLayout(True, True, True),
}


def boxes(config: WarpgroupConfig, layout: str, blocks: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return rows and columns of the boxes that copies of `tf32_tma` fetch, of U as stored, and of V.

    In a cluster, `blocks` share the copies of V.
    """
    along = LAYOUTS[layout].along
    return (config.BM, ROW_WORDS) if along else (ROW_WORDS, PANEL), (config.BN // blocks, ROW_WORDS)


def even_rows(rows: int) -> int:
    """Return a number of rows of tiles, made even if there are many; 0 if it is odd and there are few."""
    return 0 if rows % 2 and rows < PAIRED_ROWS else rows + rows % 2


def rows_in_pairs(config: WarpgroupConfig, operands: TmaOperands) -> int:
    """Return the rows of tiles that pairs of blocks compute, one of which may be beyond C; 0 without pairs.

    Blocks share copies of V if its rows do not begin at sectors, since these take more requests.
    """
    return 0 if operands.v_sectors else even_rows(ceil_div(operands.rows, config.BM))


@dataclass(frozen=True, eq=False)
class TmaStage(Stage):
    """A stage of whose operands at least one is copied by a tensor map.

    ``build(config, variant)`` takes a `TmaVariant`; ``boxes(config, layout, blocks)`` returns rows and columns of
    the boxes that copies bring, of U and of V, in clusters of so many blocks.
    """

    tensor_precision: TensorPrecision | None = None
    boxes: Callable[[WarpgroupConfig, str, int], tuple[tuple[int, int], tuple[int, int]]] | None = None

    @property
    def batch_dimensions(self) -> int:
        """Dimensions of a batch that one launch takes."""
        return 1

    @property
    def takes_epilogue(self) -> bool:
        """True if it applies an epilogue."""
        return True

    @lru_cache(maxsize=4096)  # noqa: B019 -- stages last as long as the process
    def kernel_of(self, config: WarpgroupConfig, variant: TmaVariant) -> Kernel:
        """Return its kernel in a configuration and a variant."""
        assert self.tensor_precision is not None
        name = f"{self.name}_{config.name}_{'along' if variant.along else 'across'}{'_pairs' if variant.pairs else ''}"
        shared = config.dynamic_shared(self.tensor_precision)
        return Kernel(name, self.build, SIGNATURE, config, variant, shared, config.threads, config.claim > 0)

    def kernel(self, config: WarpgroupConfig, product: Product, precision: str = "") -> Kernel:
        """Return the kernel that multiplies operands of these layouts."""
        found = self._operands(product)
        return self._kernel(config, product, found.placed, rows_in_pairs(config, found) > 0)

    def _kernel(self, config: WarpgroupConfig, product: Product, placed: TmaLayout, pairs: bool) -> Kernel:
        assert self.tensor_precision is not None
        tensor_variant = TensorVariant(self.tensor_precision, product.epilogue, len(product.vectors))
        swapped = placed.swapped and product.epilogue is not None
        return self.kernel_of(config, TmaVariant(tensor_variant, placed.along, swapped, pairs))

    def _operands(self, product: Product) -> TmaOperands:
        found = tma_operands(product)
        assert found is not None, "it was chosen for operands that tensor maps can describe"
        return found

    def own_launches(
        self, config: WarpgroupConfig, product: Product, precision: str, partition: Partition | None, gpu: Gpu
    ) -> Launches:
        """Return the launch of a product, behind the one that decomposes V if it is decomposed."""
        assert product.batch.extents[:-1] == (1, 1), "one launch takes one dimension"
        assert self.boxes is not None
        found, matrices = self._operands(product), product.batch.extents[-1]
        placed, cols, paired = found.placed, ceil_div(found.cols, config.BN), rows_in_pairs(config, found)
        kernel = self._kernel(config, product, placed, paired > 0)
        cluster = blocks_per_cluster(paired, min(paired * cols, gpu.sm_count)) if paired else 1
        tiles = cols * (paired if cluster > 1 else ceil_div(found.rows, config.BM))
        u_box, v_box = self.boxes(config, found.layout, cluster)
        turns = words_of_turns(tiles, matrices, gpu)
        vectors = [Vector(i, *vector) for i, vector in enumerate(product.vectors)]
        maps: tuple[MapOf, ...] = (
            MapOf(found.u_slot, found.u, u_box, matrices, found.u_step),
            MapOf(found.v_slot, found.v, v_box, matrices, found.v_step),
        )
        v = part = MatrixAt(Moving(found.v_slot), found.v)  # which is not read as a part unless it is one
        before, second, part_step, scratch_bytes = tuple[Step, ...](), SECOND_MAP, 0, 0
        if placed.decomposed:
            made = self._decomposition(config, product, found)
            before = decomposing_steps(made, (v, v), (0, found.v_step), (False, True), matrices > 1, gpu, True)
            maps, second, scratch_bytes = maps[:1], Words((0,)), made.bytes
            part, part_step = made.arguments[1], made.steps[1]
        arguments: tuple[Argument, ...] = (
            ALPHA,
            FIRST_MAP,
            second,
            part,
            BETA,
            MatrixAt(AT_C, product.c.transposed if placed.swapped else product.c),
            Words((product.k,)),
            Words((int(found.u_step > 0), int(found.v_step > 0), part_step, product.batch.c[-1], *turns)),
            *vectors,
        )
        grid = min(tiles, gpu.sm_count), matrices, 1
        step = Step(kernel, grid, (config.threads, 1, 1), arguments, placed.decomposed, cluster=cluster)
        paced = turns[0] != 0
        return Launches((*before, step), scratch_bytes, int(paced), maps, paced=paced)

    def _decomposition(self, config: WarpgroupConfig, product: Product, found: TmaOperands) -> Decomposition:
        """Lay out the part of V, of an even number of slots, as the kernel computes them."""
        assert self.tensor_precision is not None
        own = product if found.v_slot is Slot.B else product.transposed
        own = own._replace(a=own.a._replace(cols=_terms_of_part(product.k)))
        return decomposition_of(self.tensor_precision, own, config, of_b_alone=True)
