"""Division of a scheduled stage's tiles among blocks, and what its launches need for it.

Configurations are `numba_gemm.kernels.ladder.stage.TileConfig`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...device.units import FLOAT32_BYTES, MAX_GRID_Y, ceil_div
from ..product import Batch, Product
from ..stage import Partition

__all__ = [
    "ADDED_AT_ONCE",
    "EXTENT_BITS",
    "GROUP",
    "MANY_ELEMENTS",
    "MAX_LINE",
    "MOST_THREADS",
    "READS_APART",
    "PartitionLayout",
    "adds_apart",
    "adds_early",
    "default_partition",
    "most_left_out",
    "packed_extents",
    "partition_layout",
    "parts_at_once",
]

EXTENT_BITS = 10
MOST_THREADS, ADDED_AT_ONCE = 256, 8  # of the kernel that adds parts: threads, and parts that each reads at a time
MANY_ELEMENTS = 1 << 17  # from which on each of its threads has four elements instead of one
GROUP = 8  # rows of tiles that are walked together
MAX_LINE = 1 << 31  # k-tiles that are counted in 32 bits
MOST_LEAVING_OUT = 64  # sums per thread, with which k-steps beyond k are left out
READS_APART = 3  # of parts of a tile, one after the other, beyond which another kernel adds them


class PartitionLayout(NamedTuple):
    """Launch geometry and workspace of a `Partition`.

    Attributes
    ----------
    grid : tuple of int
        Blocks along x, y and z.
    workspace_bytes : int
        Device memory that the blocks share; its contents are undefined at first.
    counters : int
        32-bit words behind it, which are 0 when the launch begins and when it ends.
    words : tuple of int
        Further arguments: the fields of `numba_gemm.device.partition.FIELDS` from the third on.
    """

    grid: tuple[int, int, int]
    workspace_bytes: int
    counters: int
    words: tuple[int, ...]


def adds_apart(config: Any, partition: Partition, tiles: int) -> bool:
    """Return True if `stream_k` leaves the parts of a product's shared tiles to another kernel."""
    shared = tiles - partition.whole
    fits = config.threads // config.lanes_k <= MOST_THREADS and shared <= MAX_GRID_Y
    fits = fits and max(config.BM, config.BN) < 1 << EXTENT_BITS
    return fits and partition.blocks > READS_APART * parts_at_once(config) * shared > 0


def adds_early(config: Any) -> bool:
    """Return True if `stream_k` lets the kernel that adds parts start while it runs, from compute capability 9.0 on.

    It may not beside the largest thread tiles, whose blocks fill a multiprocessor: measured, that takes longer.
    """
    return bool(config.TM * config.TN < 128)


def most_left_out(config: Any, before: int) -> int:
    """Return the most pairs of k-steps beyond k that a slice of `stream_k` leaves out, if `before` precede its loop.

    The loop keeps one pair, and the last pair of a slice follows it. The largest thread tiles leave out none: they
    have no register to spare, and are for long sums.
    """
    pairs = config.BK // (2 * config.lanes_k)
    return max(0, pairs - 2 - before) if config.TM * config.TN <= MOST_LEAVING_OUT else 0


def packed_extents(config: Any) -> int:
    """Return the extents of a configuration's tiles in one word, for the kernel that adds parts."""
    extents = config.BM, config.BN, config.TM, config.TN, config.WM, config.WN
    return sum(extent << (EXTENT_BITS * i) for i, extent in enumerate(extents))


def parts_at_once(config: Any) -> int:
    """Return the number of parts of a tile that `stream_k` reads at once, limited by registers."""
    return max(1, 64 // (config.TM * config.TN))


def default_partition(config: Any, product: Product, blocks: int) -> Partition:
    """Divide a product equally among blocks; of many tiles, only those of the last two rounds are divided."""
    tiles = ceil_div(product.m, config.BM) * ceil_div(product.n, config.BN) * product.batch.matrices
    k_tiles = max(1, ceil_div(product.k, config.BK))
    if tiles % blocks == 0 or tiles * k_tiles >= MAX_LINE:
        return Partition(min(tiles, blocks), tiles)
    if tiles > blocks:
        return Partition(blocks, (tiles // blocks - 1) * blocks)
    return Partition(min(blocks, tiles * k_tiles), 0)


def partition_layout(config: Any, m: int, n: int, k: int, batch: Batch, partition: Partition) -> PartitionLayout:
    """Return the layout of stages whose kernels take a `numba_gemm.device.partition.PartitionArguments`.

    Raises
    ------
    ValueError
        if there are fewer tiles than `partition` says, too many k-tiles to divide them, or too many tiles for blocks
        of several.
    """
    rows, cols, matrices = -(-m // config.BM), -(-n // config.BN), batch.matrices  # as in `own_launches`
    tiles, k_tiles = rows * cols * matrices, -(-k // config.BK) or 1
    if config.tiles > 1 and tiles > MAX_LINE:
        raise ValueError(
            f"C has {tiles} tiles of {config.BM}x{config.BN}; expected {MAX_LINE} at most; compute parts of it, or "
            "pass another stage"
        )
    divided = (tiles - partition.whole) * k_tiles
    if not 0 <= partition.whole <= tiles or divided >= MAX_LINE:
        raise ValueError(f"{partition} does not divide {tiles} tiles of {k_tiles} k-tiles")
    base, extra = divmod(divided, partition.blocks)
    _, second, third = batch.extents
    sizes = (partition.whole, base, extra, k_tiles, rows, cols, GROUP, matrices, third, second)
    workspace_bytes = counters = 0
    if base % k_tiles or extra:  # else no tile is in several pieces
        if config.in_lanes:  # `thin`: places for a part of a sum, and for a sum of parts, of each block
            counters = 2 * partition.blocks * max(config.BM * config.BN, config.threads)
        else:
            workspace_bytes = 2 * partition.blocks * config.BM * config.BN * FLOAT32_BYTES
            counters = max(tiles - partition.whole, partition.blocks)
    words = (*sizes, *batch.a, *batch.b, *batch.c, 0)
    return PartitionLayout((partition.blocks, 1, 1), workspace_bytes, counters, words)
