"""Record of a stage of either ladder, and the launches that compute a product with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ..device.access import covers
from ..device.units import MAX_GRID_X, MAX_GRID_Y, VECTOR_BYTES
from ..typing import PrecisionName, StageName
from .conversion import with_conversion
from .product import FLOAT32, Product
from .step import Kernel, Launches

IEEE: Final = "ieee"  # float32 multiply-adds
MAX_K = 1 << 30  # terms of a sum that a kernel counts


def require(config: Any, constraints: Mapping[str, bool]) -> None:
    """Raise one ValueError that names every constraint a configuration breaks."""
    broken = [name for name, holds in constraints.items() if not holds]
    if broken:
        raise ValueError(f"configuration {config.name} breaks: {'; '.join(broken)}")


def vector_copies(config: Any) -> dict[str, bool]:
    """Return the constraints of a stage whose threads copy as many vectors of four each, by rows of the tiles."""
    along_k, across = (covers("along4", *of, config.threads) for of in ((config.BM, config.BK), (config.BK, config.BN)))
    return {
        "copies cover A's tile: threads % (BK/4) == 0 and BM % (threads/(BK/4)) == 0": along_k,
        "copies cover B's tile: threads % (BN/4) == 0 and BK % (threads/(BN/4)) == 0": across,
    }


def check_grid(grid: tuple[int, ...]) -> None:
    """Raise ValueError if a launch has more blocks than a GPU allows."""
    if grid[0] > MAX_GRID_X or grid[1] > MAX_GRID_Y:
        raise ValueError(
            f"the product takes a grid of {grid[0]} by {grid[1]} blocks; expected at most {MAX_GRID_X} by "
            f"{MAX_GRID_Y}; divide it into products of fewer rows, columns or matrices"
        )


class Partition(NamedTuple):
    """Division of a product among blocks.

    Attributes
    ----------
    blocks : int
        Blocks of the launch. On tensor cores: tiles of a matrix that are not whole, times blocks that share each.
    whole : int
        Tiles of C that one block each computes; the k-tiles of the others are divided equally among all blocks. On
        tensor cores: all tiles of the first rows, or of the first columns, which an earlier launch computes.
    """

    blocks: int
    whole: int


class Gpu(NamedTuple):
    """Properties of a device on which launches depend.

    Attributes
    ----------
    cc : tuple of int
        Compute capability.
    sm_count : int
        Multiprocessors.
    shared : int
        Bytes of shared memory of a multiprocessor; 0 if launches cannot say how much of it they need.
    """

    cc: tuple[int, int]
    sm_count: int
    shared: int = 0


class Piece(NamedTuple):
    """A part of a product that is launched by itself.

    Attributes
    ----------
    a, b, c : int
        Bytes from the operands' first elements to the part's.
    first : bool
        True if it is the first part of its sums: it takes beta, and the others add to it.
    product : Product
        The part.
    """

    a: int
    b: int
    c: int
    first: bool
    product: Product


def cut(product: Product, rows: int, cols: int) -> Iterator[Piece]:
    """Divide a product into parts with limited rows and columns of C, and at most `MAX_K` terms of each sum."""
    m, n, k = product.m, product.n, product.k
    if m <= rows and n <= cols and k <= MAX_K:
        yield Piece(0, 0, 0, True, product)
        return
    for k_begin in range(0, max(k, 1), MAX_K):  # sums without terms have one part, which takes beta
        k_size = min(MAX_K, k - k_begin)
        for row in range(0, m, rows):
            for col in range(0, n, cols):
                m_size, n_size = min(rows, m - row), min(cols, n - col)
                a_step, a = product.a.part(row, k_begin, m_size, k_size)
                b_step, b = product.b.part(k_begin, col, k_size, n_size)
                c_step, c = product.c.part(row, col, m_size, n_size)
                part = product._replace(a=a, b=b, c=c)
                yield Piece(a_step, b_step, c_step, k_begin == 0, part)


def parts_of_batch(product: Product, count: int) -> Iterator[Piece]:
    """Divide a product into parts of at most `count` matrices of the batch's last dimension, the only one."""
    batch = product.batch
    for begin in range(0, batch.extents[-1], count):
        steps = begin * batch.a[-1], begin * batch.b[-1], begin * batch.c[-1]
        a, b, c = (
            x._replace(offset=(x.offset + step) % VECTOR_BYTES)
            for x, step in zip((product.a, product.b, product.c), steps, strict=True)
        )
        extents = (1, 1, min(count, batch.extents[-1] - begin))
        yield Piece(*steps, True, product._replace(a=a, b=b, c=c, batch=batch._replace(extents=extents)))


@dataclass(frozen=True, eq=False)
class Stage:
    """One step of a ladder: a kernel factory, its configurations, and how a product is launched with it.

    Attributes
    ----------
    name, summary : str
        Name, and the idea in a few words.
    build : callable
        ``build(config, variant)`` returns a ``cuda.jit`` kernel.
    configs : tuple
        Tile configurations; the first is the default.
    test_config : config or None
        A configuration small enough for the simulator; None for stages that cannot run there.
    min_cc : tuple of int
        Lowest compute capability that it runs on.
    only_cc : tuple of int or None
        The one compute capability that it runs on, if there is only one.
    precisions : tuple of str
        Precisions that it computes in.
    batch_dimensions : int
        Dimensions of a batch that one launch takes.
    takes_epilogue : bool
        True if it applies an epilogue.
    takes_partition : bool
        True if its launches divide the work by a `Partition`.
    """

    name: StageName
    summary: str
    build: Callable[[Any, Any], Any]
    configs: tuple[Any, ...]
    test_config: Any = None
    min_cc: tuple[int, int] = (7, 5)
    only_cc: tuple[int, int] | None = None
    precisions: tuple[PrecisionName, ...] = (IEEE,)

    @property
    def batch_dimensions(self) -> int:
        """Dimensions of a batch that one launch takes."""
        return 0

    @property
    def takes_epilogue(self) -> bool:
        """True if it applies an epilogue."""
        return False

    @property
    def takes_partition(self) -> bool:
        """True if its launches divide the work by a `Partition`."""
        return False

    def runs_on(self, cc: tuple[int, int]) -> bool:
        """Return True if a GPU of a compute capability has the instructions that it needs."""
        return cc >= self.min_cc if self.only_cc is None else cc == self.only_cc

    def kernel(self, config: Any, product: Product, precision: str = IEEE) -> Kernel:
        """Return the kernel that multiplies operands of these layouts."""
        raise NotImplementedError

    def launches(
        self, config: Any, product: Product, precision: str, partition: Partition | None, gpu: Gpu
    ) -> Launches:
        """Return the launches of a product that is one piece of `pieces`; the first converts operands if needed."""
        taken = product if product.a.dtype == product.b.dtype == FLOAT32 else self.taken(config, product)
        made = self.own_launches(config, taken, precision, partition, gpu)
        return made if taken is product else with_conversion(made, product, taken)

    def taken(self, config: Any, product: Product) -> Product:
        """Return the product of the operands that its launches take: with float32 copies of others."""
        return product.converted

    def own_launches(
        self, config: Any, product: Product, precision: str, partition: Partition | None, gpu: Gpu
    ) -> Launches:
        """Return the stage's own launches, for operands that `taken` returns."""
        raise NotImplementedError

    def pieces(self, config: Any, product: Product, precision: str, gpu: Gpu) -> Iterator[Piece]:
        """Divide a product into parts that one sequence of launches can compute."""
        yield Piece(0, 0, 0, True, product)
