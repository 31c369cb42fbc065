"""Stages of the FP32 ladder: tile configurations, variants of a kernel, and launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple

from ...device.access import ACCESSES, covers
from ...device.units import FLOAT32_BYTES, MAX_GRID_Y, OVERLAPPING, RESERVED_SHARED, VECTOR_BYTES, ceil_div
from ..code import Code
from ..product import Layout, Product, access_of, may_have_tails
from ..stage import IEEE, Gpu, Partition, Piece, Stage, cut
from ..step import (
    ALPHA,
    AT_A,
    AT_B,
    AT_C,
    BETA,
    Argument,
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
from .partitions import MANY_ELEMENTS, MAX_LINE, MOST_THREADS, PartitionLayout, adds_apart, packed_extents
from .tile_config import TileConfig

AT_SCRATCH = (Moving(Slot.SCRATCH), Moving(Slot.COUNTERS))
SUMS_STAGED = 32  # per thread; from here on, an unaligned C is stored faster through shared memory
MOST_PARTIAL = 64  # sums per thread, up to which an aligned C whose rows end within a vector is stored from registers
BUILD_ADD_PARTS = Code("ladder.add_parts")
SIGNATURE, PLAIN_SIGNATURE = (Code("ladder.signatures", name) for name in ("signature", "plain_signature"))

ANY, ALIGNED, WHOLE = range(3)  # guarantees to a kernel of a stage without a schedule
FITS = ("any", "aligned", "whole")


class Variant(NamedTuple):
    """Specialisation of a scheduled stage's kernel to its operands.

    Attributes
    ----------
    a, b : str
        Access to the operands' tiles, one of `numba_gemm.device.tile_loader.ACCESSES`; that of B is to its transpose.
    c_aligned : bool
        True if C has unit column stride and 16-byte aligned rows.
    epilogue : callable or None
        Device function ``(value, row, col, *vectors)`` applied to each element of C.
    vectors : int
        Number of vectors that the epilogue takes.
    compensated : bool
        True for sums whose error does not grow with K, see `numba_gemm.device.compensated`.
    c_partial : bool
        True if C is aligned, and rows may end within a vector.
    tails : bool
        True if rows of A or of B may end within a vector of `a` or `b`.
    in_float64 : bool
        True for sums in float64, in `small_matrices`.
    """

    a: str
    b: str
    c_aligned: bool
    epilogue: Callable[..., Any] | None = None
    vectors: int = 0
    compensated: bool = False
    c_partial: bool = False
    tails: bool = False
    in_float64: bool = False

    @property
    def name(self) -> str:
        """Accesses and alignment in one word."""
        c = ("partial" if self.c_partial else "aligned") if self.c_aligned else "any"
        word = f"{self.a}_{self.b}{'_tails' if self.tails else ''}_{c}{'_compensated' if self.compensated else ''}"
        word += "_float64" if self.in_float64 else ""
        return word if self.epilogue is None else f"{word}_{getattr(self.epilogue, '__name__', 'epilogue')}"


FEW_TERMS = 8  # of a sum, for which plain multiply-adds keep the bound, see `numba_gemm.device.compensated`
IN_FLOAT64 = "bf16x9"  # precision in which `small_matrices` adds in float64


def sums_of(precision: str, k: int) -> tuple[bool, bool]:
    """Return whether sums of k terms are compensated in a precision, and whether they are float64."""
    in_float64 = precision == IN_FLOAT64
    return precision != IEEE and k > FEW_TERMS and not in_float64, in_float64


def compensates(config: TileConfig) -> bool:
    """Return True if a configuration has compensated sums: registers for them and, in `stream_k`, no narrow tiles."""
    sums = config.TM * config.TN
    if config.tiles > 1:
        return True
    if config.in_lanes:
        return sums <= (64 if config.BM > config.BN else 32)
    return config.lanes_k == 1 and sums <= 32 <= config.BN


def stores_directly(config: TileConfig) -> bool:
    """Return True if a configuration of `stream_k` stores the floats of an unaligned C from its registers."""
    return not config.in_lanes and config.TN > 1 and config.TM * config.TN < SUMS_STAGED


def copies_floats(config: TileConfig) -> bool:
    """Return True if a configuration of `stream_k` copies A and B float by float where k is contiguous in both.

    Vectors would pass through registers; beside small thread tiles, more than four per thread take longer.
    """
    return config.TM * config.TN <= SUMS_STAGED and 16 * config.threads < (config.BM + config.BN) * config.BK


def variant_of(config: TileConfig, product: Product, precision: str) -> Variant:
    """Return the fastest variant that these operands allow."""
    batch, x, y, in_lanes = product.batch, product.a, product.b.transposed, config.in_lanes
    if config.tiles > 1:
        return _direct_variant_of(config, product, precision)
    of_a, of_b = covering(config, config.BM), covering(config, config.BN)
    if in_lanes and config.BM == 1:  # a row of a large A
        of_a = ("along4", *of_a)
    given = (of_a, x, reduce(or_, batch.a)), (of_b, y, reduce(or_, batch.b))
    (a, b), tails = (access_of(*one, in_lanes) for one in given), False
    if not (in_lanes or a[-1] == b[-1] == "4") and may_have_tails(x) and may_have_tails(y):
        partial_a, partial_b = (access_of(*one, True) for one in given)
        tails = partial_a[-1] == partial_b[-1] == "4"
        a, b = (partial_a, partial_b) if tails else (a, b)
    small = config.BM * config.BN <= 64 * 128
    if small and not in_lanes and b[-1] == "1":  # then A by floats, too, and the other way round: fewer kernels
        a = a.replace("4", "1")
    if small and a[-1] == "1":
        b = b.replace("4", "1")
    floats, whole, in_vectors = small and a[-1] == "1", product.c.cols % 4 == 0, config.TN > 1 and not in_lanes
    if in_vectors and a == b == "along4" and copies_floats(config):
        a, b, tails = "along1", "along1", False
    aligned = in_vectors and whole and not floats  # `short_sums` and `thin` store C by floats
    partial = stores_directly(config) if floats else in_vectors and not whole and config.TM * config.TN <= MOST_PARTIAL
    partial = partial and product.epilogue is None
    if not product.c.aligned_rows or (batch.c[0] | batch.c[1] | batch.c[2]) % VECTOR_BYTES:
        aligned = partial = False
    compensated = precision != IEEE and product.k > FEW_TERMS
    return Variant(a, b, aligned or partial, product.epilogue, len(product.vectors), compensated, partial, tails)


def _direct_variant_of(config: TileConfig, product: Product, precision: str) -> Variant:
    """Return the fastest variant of `small_matrices`.

    Its threads read A by vectors along k, and B by vectors along k or, if its columns are a multiple of four, across k;
    or else by floats, like the terms beyond the last vector. Lanes that share a tile read vectors along k of both
    operands, or floats of both.
    """
    batch, x, y, c = product.batch, product.a, product.b.transposed, product.c
    a, b = access_of(("along4",), x, reduce(or_, batch.a), True), access_of(("along4",), y, reduce(or_, batch.b), True)
    if config.lanes_k > 1 and a != b:
        a = b = "any"
    four = config.TN == 4 and config.lanes_k == 1  # columns per thread
    if four and b == "any":
        b = access_of(("across4",), y, reduce(or_, batch.b))
    aligned = four and c.cols % 4 == 0 and c.aligned_rows and reduce(or_, batch.c) % VECTOR_BYTES == 0
    compensated, in_float64 = sums_of(precision, product.k)
    vectors = aligned and product.epilogue is None
    return Variant(a, b, vectors, product.epilogue, len(product.vectors), compensated, in_float64=in_float64)


@lru_cache(maxsize=256)
def covering(config: TileConfig, extent: int) -> tuple[str, ...]:
    """Return the accesses of a tile loader that cover a tile with `extent` rows."""
    if config.in_lanes:  # `thin` copies any tile; vectors of a single row would hardly help, and need more kernels
        return ACCESSES if extent % 4 == 0 else ("along1", "any")
    return tuple(access for access in ACCESSES if covers(access, extent, config.BK, config.threads))


@dataclass(frozen=True, eq=False)
class LadderStage(Stage):
    """A stage of the FP32 ladder.

    ``build(config, fit)`` returns a ``cuda.jit`` kernel with the parameters ``(alpha, a, b, beta, c)``: float32 scalars
    and 2-D float32 arrays of any byte strides, of shapes (m, k), (k, n), (m, n). ``fit`` says what it may rely on:
    `ANY` nothing; `ALIGNED` that every operand has unit column stride, 16-byte aligned rows and a multiple of four
    columns; `WHOLE`, in stages that have ``whole_tiles``, that the extents are also multiples of the block tile's.
    ``block(config)`` is the shape of a block. Stages that are ``ordered`` form a k-step's products in the
    configuration's order; the others have a fixed order.

    A stage with a ``schedule`` divides its work by a `Partition` and takes any layout, batches and an epilogue:
    ``build(config, variant)`` takes a `Variant` in place of ``fit``. The kernel takes a
    `numba_gemm.device.partition.PartitionArguments` behind C, and the epilogue's vectors as a tuple behind that.
    ``schedule(config, m, n, k, batch, partition)`` returns the `PartitionLayout` of a launch. A scheduled stage
    that is ``plain`` takes ``fit`` all the same, and neither batches nor an epilogue. One that ``adds_apart`` leaves
    the parts of tiles that many blocks share to another kernel. In one that is ``undivided``, one block computes each
    tile, whatever the partition.
    """

    block: Callable[[TileConfig], tuple[int, int]] = lambda config: (config.threads, 1)
    vectorized: bool = False
    rows_along_x: bool = False
    ordered: bool = False
    whole_tiles: bool = False
    schedule: Callable[..., PartitionLayout] | None = None
    plain: bool = False
    adds_apart: bool = False
    undivided: bool = False

    def __post_init__(self) -> None:
        if self.test_config.threads > 64:
            raise ValueError(f"{self.name}: test_config {self.test_config.name} has more than 64 threads")

    @property
    def takes_variants(self) -> bool:
        """True if its kernels are made for a `Variant`; the others are made for a ``fit``."""
        return self.schedule is not None and not self.plain

    @property
    def batch_dimensions(self) -> int:
        """Dimensions of a batch that one launch takes."""
        return 3 if self.takes_variants else 0

    @property
    def takes_epilogue(self) -> bool:
        """True if it applies an epilogue."""
        return self.takes_variants

    @property
    def takes_partition(self) -> bool:
        """True if its launches divide the work by a `Partition`."""
        return self.schedule is not None

    def grid(self, config: TileConfig, m: int, n: int) -> tuple[int, int]:
        """Blocks along x and y that cover an (m, n) C: columns along x, unless ``rows_along_x``."""
        rows, cols = ceil_div(m, config.BM), ceil_div(n, config.BN)
        return (rows, cols) if self.rows_along_x else (cols, rows)

    @property
    def fits(self) -> tuple[int, ...]:
        """Guarantees that its kernels are made for if they take no `Variant`, the strongest first."""
        return (WHOLE, ALIGNED, ANY) if self.whole_tiles else (ALIGNED, ANY)

    def variant(self, config: TileConfig, product: Product, precision: str = IEEE) -> int | Variant:
        """Return the specialisation of its kernel to these operands, or to their float32 copies."""
        a, b, c, *_ = product = product.converted
        if self.takes_variants:
            return variant_of(config, product, precision)
        if not (a.aligned and b.aligned and c.aligned):
            return ANY
        whole = product.m % config.BM == product.n % config.BN == product.k % config.BK == 0 < product.k
        return WHOLE if whole and self.whole_tiles else ALIGNED

    def kernel_of(self, config: TileConfig, variant: int | Variant) -> Kernel:
        """Return its kernel in a configuration and a variant."""
        return self._kernel_of(config, variant if isinstance(variant, Variant) else int(variant))  # not True for 1

    @lru_cache(maxsize=4096)  # noqa: B019 -- stages last as long as the process
    def _kernel_of(self, config: TileConfig, variant: int | Variant) -> Kernel:
        word = variant.name if isinstance(variant, Variant) else FITS[variant]
        suffix = "" if variant == ALIGNED else f"_{word}"
        name, threads = f"{self.name}_{config.name}{suffix}", config.threads
        types = PLAIN_SIGNATURE if self.plain else SIGNATURE
        return Kernel(name, self.build, types, config, variant, config.dynamic_shared, threads)

    def kernel(self, config: TileConfig, product: Product, precision: str = IEEE) -> Kernel:
        """Return the kernel that multiplies operands of these layouts."""
        return self.kernel_of(config, self.variant(config, product, precision))

    def usual_kernel(self, config: TileConfig, aligned: bool = True, precision: str = IEEE) -> Kernel:
        """Return the kernel for operands stored by rows: of any strides, or with the strongest guarantees."""
        if not self.takes_variants:
            return self.kernel_of(config, self.fits[0] if aligned else ANY)
        strides = (VECTOR_BYTES, FLOAT32_BYTES) if aligned else (3 * FLOAT32_BYTES, 2 * FLOAT32_BYTES)
        layout = Layout(16, 16, *strides)
        return self.kernel(config, Product(layout, layout, layout), precision)

    def own_launches(
        self, config: TileConfig, product: Product, precision: str, partition: Partition | None, gpu: Gpu
    ) -> Launches:
        """Return the launch of a product; `partition` divides the work of a scheduled stage."""
        a, b, c = MatrixAt(AT_A, product.a), MatrixAt(AT_B, product.b), MatrixAt(AT_C, product.c)
        kernel, block = self.kernel(config, product, precision), (*self.block(config), 1)
        if self.schedule is None:
            grid = (*self.grid(config, product.m, product.n), 1)
            return Launches((Step(kernel, grid, block, (ALPHA, a, b, BETA, c)),))
        assert partition is not None, "a scheduled stage divides its work by a partition"
        compensated = isinstance(kernel.variant, Variant) and kernel.variant.compensated
        # Rounded up in place, without calls, since each new shape waits for this.
        tiles = -(-product.m // config.BM) * -(-product.n // config.BN) * product.batch.matrices
        if self.undivided:
            partition = Partition(-(-tiles // config.tiles), tiles)
        elif compensated and not config.in_lanes and partition.whole != tiles:  # parts of such sums cannot be added
            partition = Partition(tiles, tiles)
        made = self.schedule(config, product.m, product.n, product.k, product.batch, partition)
        place: tuple[Word, ...] = AT_SCRATCH if made.workspace_bytes or made.counters else (0, 0)
        vectors = [Vector(i, *vector) for i, vector in enumerate(product.vectors)]
        work = Words((*place, *made.words))
        arguments: tuple[Argument, ...] = (ALPHA, a, b, BETA, c, work, *vectors)
        floats = 2 if compensated else 1  # per part of a sum
        size, counters = floats * made.workspace_bytes, floats * made.counters
        if made.counters and self.adds_apart and adds_apart(config, partition, tiles):
            shared = tiles - partition.whole
            work = Words((AT_SCRATCH[0], 0, *made.words[:-1], packed_extents(config)))
            arguments = (*arguments[:5], work, *vectors)
            elements = 4 if shared * config.BM * config.BN >= MANY_ELEMENTS else 1  # per thread
            adding = adding_kernel(elements, product.epilogue, len(vectors))
            grid = (config.TM * config.TN // elements, shared, 1)
            adds = Step(adding, grid, (config.threads // config.lanes_k, 1, 1), arguments, gpu.cc >= OVERLAPPING)
            return Launches((Step(kernel, made.grid, block, arguments), adds), size, behind=1)
        carve_out = -1
        if config.in_lanes:  # `thin` copies some operands through the L1 cache, which its blocks leave room for
            room = -(-made.grid[0] // gpu.sm_count) * (kernel.dynamic_shared + RESERVED_SHARED)
            carve_out = -(-100 * room // gpu.shared) if room <= gpu.shared else -1
        return Launches((Step(kernel, made.grid, block, arguments, False, carve_out),), size, counters)

    def pieces(self, config: TileConfig, product: Product, precision: str, gpu: Gpu) -> Iterator[Piece]:
        """Divide a product into parts that one launch can compute: a grid has up to 65,535 blocks along y.

        A scheduled stage needs no y axis, so its parts have all of C; but where blocks have several tiles, these are
        counted in 31 bits. An epilogue counts rows and columns of C, which then cannot be divided.
        """
        rows, cols = max(product.m, 1), max(product.n, 1)
        if config.tiles > 1 and product.epilogue is None:
            most = max(MAX_LINE // product.batch.matrices, 1)  # tiles of a matrix
            across = min(ceil_div(cols, config.BN), most)
            if ceil_div(rows, config.BM) * across > most or across * config.BN < cols:
                rows, cols = max(most // across, 1) * config.BM, across * config.BN
        if self.schedule is None and self.rows_along_x:
            cols = MAX_GRID_Y * config.BN
        elif self.schedule is None:
            rows = MAX_GRID_Y * config.BM
        return cut(product, rows, cols)


@lru_cache(maxsize=256)
def adding_kernel(elements: int, epilogue: Callable[..., Any] | None, vectors: int) -> Kernel:
    """Return the kernel that adds the parts of shared tiles, by threads of so many elements."""
    variant = Variant("along1", "along1", False, epilogue, vectors)
    return Kernel(f"add_parts_{elements}", BUILD_ADD_PARTS, SIGNATURE, elements, variant, 0, MOST_THREADS)
