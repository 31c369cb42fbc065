"""Stages of the tensor-core ladder: launches that decompose operands and multiply the parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ...device.units import FLOAT32_BYTES, MAX_GRID_X, MAX_GRID_Y, VECTOR_BYTES, ceil_div
from ...typing import PrecisionName
from ..code import Code
from ..product import Layout, Product
from ..stage import Gpu, Partition, Piece, Stage, cut, parts_of_batch
from ..step import (
    ALPHA,
    ALPHA_ONE,
    AT_A,
    AT_B,
    AT_C,
    BETA,
    BETA_ZERO,
    Kernel,
    Launches,
    MatrixAt,
    Moving,
    Slot,
    Step,
    Vector,
    Word,
    Words,
)
from .config import (
    ALIGNMENT,
    BARRIER_BYTES,
    DECOMPOSED_ROWS,
    GROUP_ROWS,
    LEFT,
    NARROW,
    ROW_BYTES,
    ROW_WORDS,
    THREADS,
    WARP_EXTENT,
    WARPGROUP,
    NarrowRowsConfig,
    TensorConfig,
    TensorVariant,
    WarpConfig,
    WarpgroupConfig,
)
from .decomposition import decomposing_steps, decomposition_of
from .precision import SHORT_SUMS, TENSOR_PRECISIONS, TensorPrecision

__all__ = [
    "ALIGNMENT",
    "BARRIER_BYTES",
    "DECOMPOSED_ROWS",
    "GROUP_ROWS",
    "LEFT",
    "ROW_BYTES",
    "ROW_WORDS",
    "WARPGROUP",
    "WARP_EXTENT",
    "TensorConfig",
    "TensorStage",
    "TensorVariant",
    "WarpConfig",
    "WarpgroupConfig",
    "precision_for",
]

TEACHING_SIGNATURE, COMPLETE_SIGNATURE, ADD_PARTIALS_SIGNATURE = (
    Code("tensor_core.signatures", f"{name}_signature") for name in ("teaching", "complete", "add_partials")
)
BUILD_ADD_PARTIALS = Code("tensor_core.split_k")
LONG_SUM = 1024  # terms from which on a precision's own products are accurate enough, without `SHORT_SUMS`
PARTIALS_PER_THREAD = 4  # that a thread adds, if there are few
MAX_PARTS_BYTES = 1 << 30  # of the parts of a batch's matrices that are decomposed at a time, unless one needs more


def precision_for(name: str, k: int) -> TensorPrecision:
    """Return the record of a precision for sums of `k` terms."""
    precision = TENSOR_PRECISIONS[name]
    return SHORT_SUMS.get(name, precision) if k < LONG_SUM else precision


# ------------------------------------------------------------------------------------------------------------- kernels


@dataclass(frozen=True)
class AddPartialsVariant:
    """Specialisation of the kernel that adds the partial sums of a split product.

    Attributes
    ----------
    epilogue : callable or None
        Device function ``(value, row, col, *vectors)`` applied to each element of C.
    vectors : int
        Number of vectors that the epilogue takes.
    narrow_a : bool
        True if A is of BF16.
    """

    epilogue: Callable[..., Any] | None = None
    vectors: int = 0
    narrow_a: bool = False


@lru_cache(maxsize=256)
def add_partials_kernel(variant: AddPartialsVariant) -> Kernel:
    """Return the kernel that adds the partial sums of a split product."""
    return Kernel("add_partials", BUILD_ADD_PARTIALS, ADD_PARTIALS_SIGNATURE, None, variant, 0, THREADS)


def threads_per_sum(splits: int) -> int:
    """Return the number of threads that add the partial sums of one element."""
    return next(count for count in (1, 2, 4, 8) if count == 8 or splits <= PARTIALS_PER_THREAD * count)


def first_divided(whole: int, rows: int, cols: int) -> tuple[int, int]:
    """Return the first tile row and the first tile column whose sums are divided; one of them is 0.

    Of `rows` times `cols` tiles, `whole` ones are not divided: all tiles of the first rows, or of the first columns.
    """
    if whole % cols == 0:
        return whole // cols, 0
    if whole % rows:
        raise ValueError(f"{whole} of {rows} x {cols} tiles are to be whole; expected a multiple of either extent")
    return 0, whole // rows


def behind(matrix: MatrixAt, row: int, col: int) -> MatrixAt:
    """Return the submatrix that begins at an element."""
    slot, layout = matrix.place.slot, matrix.layout
    step, part = layout.part(row, col, layout.rows - row, layout.cols - col)
    return MatrixAt(Moving(slot, matrix.place.offset + step), part)


def later(parts: MatrixAt, rows: int) -> MatrixAt:
    """Return the parts of an operand of which some rows, of A or of the transpose of B, are left out."""
    slot, offset = parts.place
    return parts._replace(place=Moving(slot, offset + ROW_BYTES * rows))


def blocks_per_cluster(rows: int, blocks: int) -> int:
    """Return the number of blocks that form a cluster, of a grid of `blocks` for `rows` rows of tiles.

    Blocks are neighbours in the order of `epilogue.place`, which goes down first: two have tiles of the same columns,
    of one share if sums are divided, unless the number of rows is odd.
    """
    return 2 if rows % 2 == 0 and blocks % 2 == 0 else 1


def words_of_turns(tiles: int, matrices: int, gpu: Gpu) -> tuple[Word, int]:
    """Return the address of the counter by which blocks keep in step, and the tiles rounded up to a multiple of them.

    The address is 0 unless blocks compute several tiles of one matrix.
    """
    blocks = min(tiles, gpu.sm_count)
    counter = Moving(Slot.COUNTERS) if matrices == 1 and tiles > blocks else 0
    return counter, ceil_div(tiles, max(blocks, 1)) * blocks


# --------------------------------------------------------------------------------------------------------------- stage


@dataclass(frozen=True, eq=False)
class TensorStage(Stage):
    """A stage of the tensor-core ladder.

    ``build(config, variant)`` returns a kernel that multiplies decomposed operands. Its parameters are ``(alpha, a, b,
    beta, c)`` or, if the stage is ``complete``, ``(alpha, a, b, beta, c, x, y, steps, vectors)``: the operands before
    they were decomposed; `COMPLETE_WORDS` words, bytes from a matrix of a batch to the next of a, b, c, x and y, then
    those of `words_of_turns`; and the epilogue's vectors, if any. A complete stage's grid has any number of blocks
    along x, and the matrices of a batch along y. The grid of any other has one block per block tile, columns along x
    and rows along y. One that ``waits`` may start before the operands are decomposed, and waits for them. One that
    ``splits`` takes a `Partition` whose blocks, along x, are several per tile of C: they share its sums (`split_k`).
    One that ``reads_rows`` reads A before it is decomposed; in place of decomposed A, it is passed that of B once more.
    Its ``narrow_configs`` are for an A of BF16 that it reads as it is (`Product.narrow_a`). Blocks of one that is
    ``in_step`` keep together (`pacing`), and those of one with ``clusters`` share copies, two each, where they can.
    """

    min_cc: tuple[int, int] = (9, 0)
    only_cc: tuple[int, int] | None = (9, 0)
    precisions: tuple[PrecisionName, ...] = tuple(name for name, one in TENSOR_PRECISIONS.items() if not one.scaled)
    complete: bool = False
    waits: bool = False
    splits: bool = False
    reads_rows: bool = False
    in_step: bool = False
    clusters: bool = False
    narrow_configs: tuple[NarrowRowsConfig, ...] = ()

    @property
    def batch_dimensions(self) -> int:
        """Dimensions of a batch that one launch takes."""
        return int(self.complete)

    @property
    def takes_epilogue(self) -> bool:
        """True if it applies an epilogue."""
        return self.complete

    def precision_for(self, name: str, k: int) -> TensorPrecision:
        """Return the record of a precision in which it computes sums of `k` terms."""
        return precision_for(name, k) if self.complete else TENSOR_PRECISIONS[name]

    @lru_cache(maxsize=4096)  # noqa: B019 -- stages last as long as the process
    def kernel_of(self, config: TensorConfig, variant: TensorVariant) -> Kernel:
        """Return its kernel in a configuration and a variant."""
        rows = f"_{variant.rows}" if variant.rows else ""
        return Kernel(
            f"{self.name}_{variant.precision.name}_{config.name}{rows}",
            self.build,
            COMPLETE_SIGNATURE if self.complete else TEACHING_SIGNATURE,
            config,
            variant,
            config.dynamic_shared(variant.precision),
            config.threads,
            whole_program=config.claim > 0,
        )

    def kernel(self, config: TensorConfig, product: Product, precision: str = "") -> Kernel:
        """Return the kernel that multiplies the decomposed operands."""
        own = self.precision_for(precision, product.k), product.epilogue, len(product.vectors)
        rows = self.rows_access(config, product) if self.reads_rows else ""
        return self.kernel_of(config, TensorVariant(*own, product.batch.extents[-1] > 1, rows))

    def taken(self, config: TensorConfig, product: Product) -> Product:
        """Return the product of the operands that its launches take, with float32 copies of others."""
        return product.without_narrow(a=False) if isinstance(config, NarrowRowsConfig) else product.converted

    def rows_access(self, config: TensorConfig, product: Product) -> str:
        """Return the access to rows of A, for a stage that reads them."""
        if isinstance(config, NarrowRowsConfig):
            if not product.narrow_a:
                raise ValueError(
                    f"configuration {config.name} reads rows of BF16 that are contiguous and begin at multiples of 16 "
                    f"bytes; A is {product.a}; pass such, or another configuration"
                )
            return NARROW
        converted = product.converted
        a, step = converted.a, converted.batch.a[-1]
        if step % VECTOR_BYTES == 0 and (a.aligned_rows or a.transposed.aligned_rows):
            return "along4" if a.aligned_rows else "across4"
        return "across1" if a.row_stride == FLOAT32_BYTES and a.col_stride != FLOAT32_BYTES else "any"

    def shares(self, config: TensorConfig, product: Product, precision: str, partition: Partition | None) -> int:
        """Return the number of blocks among which a partition divides each sum that is not whole."""
        if partition is None or not self.splits:
            return 1
        rest = ceil_div(product.m, config.BM) * ceil_div(product.n, config.BN) - partition.whole
        if rest <= 0:
            return 1
        k = product.k
        slots = max(1, ceil_div(k, self.precision_for(precision, k).slot_k))
        return max(1, min(partition.blocks // rest, slots))

    def own_launches(
        self, config: TensorConfig, product: Product, precision: str, partition: Partition | None, gpu: Gpu
    ) -> Launches:
        """Return the launches that decompose the operands, unless they are prepared, and multiply.

        If the precision is scaled, row maxima are found before; if sums are divided, partial sums are added at the end.
        """
        assert product.batch.extents[:-1] == (1, 1), "one launch takes one dimension"
        kernel = self.kernel(config, product, precision)
        tensor_precision, batched = kernel.variant.precision, kernel.variant.batched
        made = decomposition_of(tensor_precision, product, config, self.reads_rows)
        x, y, z = MatrixAt(AT_A, product.a), MatrixAt(AT_B, product.b), MatrixAt(AT_C, product.c)
        across = MatrixAt(AT_B, product.b.transposed)
        batch, own, places = product.batch, made.steps, made.arguments
        a_step, b_step, c_step = batch.a[-1], batch.b[-1], batch.c[-1]
        a_ready, b_ready = product.prepared
        wanted = not (a_ready or self.reads_rows), not b_ready
        before = decomposing_steps(made, (x, across), (a_step, b_step), wanted, batched, gpu, self.waits)
        overlaps = self.waits and bool(before)
        arguments: tuple[Any, ...] = (ALPHA, *places[:2], BETA, z)
        rows, cols = ceil_div(product.m, config.BM), ceil_div(product.n, config.BN)
        block = (config.threads, 1, 1)
        if not self.complete:
            return Launches((*before, Step(kernel, (cols, rows, 1), block, arguments, overlaps)), made.bytes)
        vectors = tuple([Vector(i, *vector) for i, vector in enumerate(product.vectors)])
        # Blocks of warpgroups fill a multiprocessor and stay; of others there is one per tile.
        most = gpu.sm_count if isinstance(config, WarpgroupConfig) else MAX_GRID_X

        def launched(kernel: Kernel, rows: int, tiles: int, arguments: tuple[Any, ...], overlaps: bool) -> Step:
            blocks = min(tiles, most)
            cluster = blocks_per_cluster(rows, blocks) if self.clusters else 1
            return Step(kernel, (blocks, made.matrices, 1), block, arguments, overlaps, cluster=cluster)

        shares = self.shares(config, product, precision, partition)
        turns: tuple[Word, int] = (0, 0)
        whole = rows * cols if partition is None or shares == 1 else partition.whole
        if self.in_step and whole:
            turns = words_of_turns(whole, made.matrices, gpu)
        paced, words = turns[0] != 0, Words((own[0], own[1], c_step, a_step, b_step, *turns))
        if shares == 1:
            arguments += (x, y, words, *vectors)
            multiplies = launched(kernel, rows, whole, arguments, overlaps)
            return Launches((*before, multiplies), made.bytes, int(paced), paced=paced)
        row = col = 0
        of_a, of_b = places[:2]
        rest, rest_x, rest_y = z, x, y
        if whole:  # tiles of the first rows or columns
            assert made.matrices == 1
            row, col = first_divided(whole, rows, cols)
            row, col = row * config.BM, col * config.BN
            # Kernels compare the rows of A and of C, so A ends with them, too.
            first_c = z._replace(layout=product.c.part(0, 0, row or product.m, col or product.n)[1])
            first_x = x._replace(layout=product.a.part(0, 0, row or product.m, product.k)[1])
            arguments = (ALPHA, of_a, of_b, BETA, first_c, first_x, y, words, *vectors)
            before += (launched(kernel, row // config.BM or rows, whole, arguments, overlaps),)
            of_b = later(of_b, col)
            of_a = of_b if self.reads_rows else later(of_a, row)
            rest, rest_x, rest_y = behind(z, row, col), behind(x, row, 0), behind(y, 0, col)
            rows, cols = ceil_div(rest.layout.rows, config.BM), ceil_div(rest.layout.cols, config.BN)
        pitch = FLOAT32_BYTES * cols * config.BN
        sums = Layout(shares * rows * config.BM, cols * config.BN, pitch, FLOAT32_BYTES)
        partials, step = MatrixAt(Moving(Slot.SCRATCH, made.bytes), sums), sums.rows * pitch
        kernel = self.kernel_of(config, kernel.variant._replace(epilogue=None, vectors=0))
        words = Words((own[0], own[1], step, a_step, b_step, 0, 0))
        arguments = (ALPHA_ONE, of_a, of_b, BETA_ZERO, partials, rest_x, rest_y, words)
        multiplies = launched(kernel, rows, shares * rows * cols, arguments, self.waits and bool(before))
        narrow_a = isinstance(config, NarrowRowsConfig)
        groups, variant = threads_per_sum(shares), AddPartialsVariant(product.epilogue, len(vectors), narrow_a)
        slot_bits = tensor_precision.slot_bits if tensor_precision.parts > 1 else 0
        counts = shares, groups, slot_bits, 2 if self.reads_rows else int(tensor_precision.scaled)
        words = Words((own[0], own[1], c_step, a_step, b_step, step, *counts, row, col))
        arguments = (ALPHA, *places[:2], BETA, z, x, y, partials, words, *vectors)
        grid = (ceil_div(rest.layout.rows * rest.layout.cols, THREADS // groups), made.matrices, 1)
        adds = Step(add_partials_kernel(variant), grid, (THREADS, 1, 1), arguments, self.waits)
        scratch = made.bytes + step * made.matrices
        return Launches((*before, multiplies, adds), scratch, int(paced), behind=1, paced=paced)

    def pieces(self, config: TensorConfig, product: Product, precision: str, gpu: Gpu) -> Iterator[Piece]:
        """Divide a product into parts that one sequence of launches can compute.

        A grid has up to 65,535 blocks along y, of rows of tiles or of matrices; and parts of a batch's matrices take up
        to `MAX_PARTS_BYTES` at a time.
        """
        if not self.complete:
            yield from cut(product, MAX_GRID_Y * config.BM, max(product.n, 1))
            return
        batch = product.batch
        if batch.extents[-1] == 1:
            yield Piece(0, 0, 0, True, product)
            return
        count = min(batch.extents[-1], MAX_GRID_Y)
        some = product._replace(batch=batch._replace(extents=(1, 1, count)))
        each = sum(decomposition_of(self.precision_for(precision, product.k), some, config, self.reads_rows).steps)
        count = max(1, min(count, MAX_PARTS_BYTES // max(each, 1)))
        yield from parts_of_batch(product, count)
