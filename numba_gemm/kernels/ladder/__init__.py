"""The ladder: one optimisation per stage, from the definition of the product to asynchronously fed warp tiles."""

from ..code import Code
from ..stage import IEEE
from .partitions import partition_layout
from .stage import LadderStage
from .tile_config import DEFAULT_ORDER, TileConfig


def _large(BM, BN, BK, TM, TN, WM, WN, order=DEFAULT_ORDER, min_blocks=0):
    """Return tiles of the stages from warp_tiled on: two slots in dynamic shared memory, A padded."""
    return TileConfig(BM, BN, BK, TM, TN, WM, WN, 2, pad=4, dynamic=True, min_blocks=min_blocks, order=order)


def _large_tiles(order=DEFAULT_ORDER):
    """Return the configurations of these stages, in an order of products."""
    return (
        _large(128, 256, 16, 8, 16, 64, 64, order),
        _large(128, 128, 16, 8, 16, 64, 64, order, min_blocks=2),
        _large(64, 128, 16, 8, 8, 32, 64, order),
        _large(64, 64, 16, 8, 4, 32, 32, order),
    )


def _moving(BM, BN, BK, TM, TN, WM, WN, min_blocks=0, slices=1):
    """Return tiles of stream_k: two slots in dynamic shared memory, A and B padded."""
    memory = {"slots": 2, "pad": 4, "pad_b": 4, "dynamic": True}
    return TileConfig(BM, BN, BK, TM, TN, WM, WN, **memory, min_blocks=min_blocks, order="snake", lanes_k=slices)


def _one_tile(BM, BN, BK, TM, min_blocks=0):
    """Return tiles of `short_sums`: a thread has one column, and shared memory one tile of A and B."""
    return TileConfig(BM, BN, BK, TM, 1, pad=4, pad_b=4, dynamic=True, min_blocks=min_blocks)


def _each_thread(TM, TN, threads, lanes=1):
    """Return tiles of `small_matrices`: each thread has one, or lanes share one, with four terms each at a time."""
    return TileConfig(TM, TN, 4 * lanes, TM, TN, lanes_k=lanes, tiles=threads // lanes)


def _lanes(BM, BN, TM, TN, lanes, steps=1, slots=3, min_blocks=0):
    """Return tiles of `thin`: `lanes` threads along k per thread tile, with `steps` times four k of each chunk."""
    pads = {"pad": int(BM > 1), "pad_b": int(BN > 1)}  # room between k, if they are copied by columns
    return TileConfig(
        BM, BN, 4 * lanes * steps, TM, TN, slots=slots, **pads, dynamic=True, min_blocks=min_blocks, lanes_k=lanes
    )


RECORDS = (
    LadderStage(
        name="naive",
        summary="one thread per element of C, consecutive threads down a column: uncoalesced on purpose",
        build=Code("ladder.naive"),
        configs=(TileConfig(BM=32, BN=32, BK=1),),
        test_config=TileConfig(BM=8, BN=4, BK=1),
        block=lambda config: (config.BM, config.BN),
        rows_along_x=True,
    ),
    LadderStage(
        name="coalesced",
        summary="consecutive threads along a row: a warp reads and writes whole sectors",
        build=Code("ladder.coalesced"),
        configs=(TileConfig(BM=2, BN=128, BK=1),),
        test_config=TileConfig(BM=4, BN=8, BK=1),
        block=lambda config: (config.BN, config.BM),
    ),
    LadderStage(
        name="shared_tile",
        summary="square tiles of A and B in shared memory, one element of C per thread",
        build=Code("ladder.shared_tile"),
        configs=(TileConfig(BM=32, BN=32, BK=32), TileConfig(BM=16, BN=16, BK=16)),
        test_config=TileConfig(BM=8, BN=8, BK=8),
        block=lambda config: (config.BN, config.BM),
    ),
    LadderStage(
        name="thread_tile_1d",
        summary="a column of TM results per thread, in registers",
        build=Code("ladder.thread_tile_1d"),
        configs=(TileConfig(BM=64, BN=64, BK=8, TM=8),),
        test_config=TileConfig(BM=16, BN=16, BK=4, TM=4),
    ),
    LadderStage(
        name="thread_tile_2d",
        summary="TM x TN results per thread: an outer product of register fragments per k-step",
        build=Code("ladder.thread_tile_2d"),
        configs=(TileConfig(BM=128, BN=128, BK=8, TM=8, TN=8),),
        test_config=TileConfig(BM=16, BN=16, BK=4, TM=4, TN=2),
    ),
    LadderStage(
        name="vectorized",
        summary="128-bit global and shared accesses",
        build=Code("ladder.vectorized"),
        configs=(TileConfig(BM=128, BN=128, BK=8, TM=8, TN=8),),
        test_config=TileConfig(BM=32, BN=16, BK=8, TM=4, TN=4),
        vectorized=True,
        whole_tiles=True,
    ),
    LadderStage(
        name="conflict_free",
        summary="A transposed and swizzled, thread tiles in quadrants: no bank conflicts",
        build=Code("ladder.conflict_free"),
        configs=(TileConfig(BM=128, BN=128, BK=8, TM=8, TN=8),),
        test_config=TileConfig(BM=64, BN=32, BK=8, TM=8, TN=8),
        vectorized=True,
        whole_tiles=True,
    ),
    LadderStage(
        name="double_buffered",
        summary="two shared buffers: global loads staged through registers while computing, one barrier per tile",
        build=Code("ladder.double_buffered"),
        configs=(TileConfig(BM=128, BN=128, BK=8, TM=8, TN=8, slots=2),),
        test_config=TileConfig(BM=64, BN=32, BK=8, TM=8, TN=8, slots=2),
        vectorized=True,
        whole_tiles=True,
    ),
    LadderStage(
        name="warp_tiled",
        summary="block, warp and thread tiles, larger and nearly square, in dynamic shared memory",
        build=Code("ladder.warp_tiled"),
        configs=_large_tiles(),
        test_config=_large(32, 32, 8, 8, 4, 32, 32),
        vectorized=True,
        whole_tiles=True,
    ),
    LadderStage(
        name="register_prefetch",
        summary="the next k-step's fragments load while this one computes",
        build=Code("ladder.register_prefetch"),
        configs=_large_tiles(),
        test_config=_large(32, 32, 8, 8, 4, 32, 32),
        vectorized=True,
        whole_tiles=True,
    ),
    LadderStage(
        name="moving_addresses",
        summary="addresses that move instead of indices",
        build=Code("ladder.moving_addresses"),
        configs=_large_tiles(),
        test_config=_large(32, 32, 8, 8, 4, 32, 32),
        vectorized=True,
        whole_tiles=True,
    ),
    LadderStage(
        name="async_copy",
        summary="cp.async: B's tiles go past the registers",
        build=Code("ladder.async_copy"),
        configs=_large_tiles(),
        test_config=_large(32, 32, 8, 8, 4, 32, 32),
        vectorized=True,
        ordered=True,
        min_cc=(8, 0),
        whole_tiles=True,
    ),
    LadderStage(
        name="snake_order",
        summary="async_copy with products in snake order: fewer conflicts of register banks",
        build=Code("ladder.snake_order"),
        configs=_large_tiles("snake"),
        test_config=_large(32, 32, 8, 8, 4, 32, 32, "snake"),
        vectorized=True,
        ordered=True,
        min_cc=(8, 0),
        whole_tiles=True,
    ),
    LadderStage(
        name="basic_stream_k",
        summary="equal parts of the k-tiles for all blocks",
        build=Code("ladder.basic_stream_k"),
        configs=_large_tiles("snake"),
        test_config=_large(32, 32, 8, 8, 4, 32, 32, "snake"),
        schedule=partition_layout,
        plain=True,
        vectorized=True,
        ordered=True,
        min_cc=(8, 0),
        whole_tiles=True,
    ),
    LadderStage(
        name="stream_k",
        summary="equal parts of the k-tiles for all blocks, any layout, batches, epilogues",
        build=Code("ladder.stream_k"),
        configs=(
            _moving(128, 256, 16, 8, 16, 64, 64),
            _moving(256, 128, 16, 8, 16, 64, 64),
            _moving(128, 128, 16, 8, 16, 64, 64, min_blocks=2),
            _moving(64, 128, 16, 8, 8, 32, 64, min_blocks=3),
            _moving(64, 128, 8, 8, 8, 32, 64, min_blocks=3),
            _moving(64, 64, 16, 8, 4, 32, 32, min_blocks=4),
            _moving(64, 64, 16, 8, 8, 32, 64, min_blocks=4),
            _moving(32, 64, 16, 8, 4, 32, 32, min_blocks=8),
            _moving(64, 32, 16, 8, 4, 32, 32, min_blocks=8),
            _moving(32, 32, 16, 4, 4, 16, 32, min_blocks=8),
            _moving(256, 16, 16, 8, 4, 64, 16, min_blocks=3),
            _moving(64, 64, 16, 8, 8, 32, 64, min_blocks=3, slices=2),
            _moving(32, 64, 16, 8, 4, 32, 32, min_blocks=4, slices=2),
            _moving(32, 64, 32, 8, 4, 32, 32, min_blocks=2, slices=4),
        ),
        test_config=_moving(32, 32, 8, 8, 4, 32, 32),
        schedule=partition_layout,
        adds_apart=True,
        precisions=(IEEE, "bf16x6"),
        vectorized=True,
        ordered=True,
        min_cc=(8, 0),
    ),
    LadderStage(
        name="short_sums",
        summary="up to 32 terms per sum: one k-tile, loaded at once, and C in whole sectors",
        build=Code("ladder.short_sums"),
        configs=(
            _one_tile(32, 32, 32, 8, min_blocks=8),
            _one_tile(32, 64, 16, 16, min_blocks=8),
            _one_tile(32, 128, 8, 16, min_blocks=4),
        ),
        test_config=_one_tile(32, 32, 8, 16),
        schedule=partition_layout,
        undivided=True,
        min_cc=(8, 0),
    ),
    LadderStage(
        name="small_matrices",
        summary="batches of small matrices: each thread reads and multiplies its own rows and columns of one of them",
        build=Code("ladder.small_matrices"),
        configs=(
            _each_thread(2, 4, 256),
            _each_thread(4, 1, 256),
            _each_thread(1, 1, 256),
            _each_thread(4, 1, 256, lanes=8),
            _each_thread(1, 1, 256, lanes=32),
        ),
        test_config=_each_thread(2, 4, 64),
        schedule=partition_layout,
        undivided=True,
        precisions=(IEEE, "bf16x6", "bf16x9"),
        min_cc=(8, 0),
    ),
    LadderStage(
        name="thin",
        summary="lanes along k, for a C of few rows or columns",
        build=Code("ladder.thin"),
        configs=(
            # for an A whose contiguous axis is k; the first for any A, the second and third for one of few rows
            _lanes(16, 1, 4, 1, 64, slots=4, min_blocks=2),
            _lanes(1, 1, 1, 1, 128, slots=4, min_blocks=8),
            _lanes(4, 1, 4, 1, 64, slots=6, min_blocks=6),
            _lanes(32, 4, 4, 4, 32, slots=4, min_blocks=2),
            _lanes(64, 8, 8, 8, 16, slots=4, min_blocks=2),
            _lanes(64, 16, 8, 8, 16, slots=4, min_blocks=1),
            # for any other A
            _lanes(64, 1, 4, 1, 16, slots=4, min_blocks=3),
            _lanes(128, 4, 8, 4, 8, slots=4, min_blocks=3),
            _lanes(32, 16, 8, 8, 16, slots=4, min_blocks=3),
            # for a C of few rows and columns
            _lanes(4, 4, 4, 4, 128, slots=4, min_blocks=2),
            _lanes(8, 8, 8, 8, 64, slots=4, min_blocks=3),
            _lanes(16, 4, 4, 4, 32, slots=4, min_blocks=4),
            _lanes(16, 16, 8, 8, 32, slots=4, min_blocks=3),
            _lanes(16, 32, 4, 8, 8, steps=2, slots=4, min_blocks=4),
            _lanes(32, 32, 8, 8, 8, slots=4, min_blocks=3),
        ),
        test_config=_lanes(16, 4, 4, 4, 8),
        schedule=partition_layout,
        precisions=(IEEE, "bf16x6"),
        vectorized=True,
        min_cc=(8, 0),
    ),
)
STAGES: dict[str, LadderStage] = {stage.name: stage for stage in RECORDS}
ASIDE = ("short_sums", "small_matrices", "thin")  # for other shapes than the ladder's, so no steps of it

__all__ = ["ASIDE", "STAGES", "LadderStage", "TileConfig"]
