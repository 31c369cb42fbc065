"""Kernels of the FP32 ladder in the form in which Numba launches kernels: ``kernel[grid, block](...)``."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from ..device.units import ceil_div
from ..typing import LadderStageName
from .ladder import STAGES, TileConfig
from .ladder.partitions import default_partition
from .ladder.stage import ANY, Variant
from .product import Layout, Product, dense
from .scalars import index
from .stage import MAX_K, Partition, check_grid

ANY_STRIDES = (12, 8)  # bytes; no access of neighbours is possible


class Launchable(NamedTuple):
    """Kernel and launch configuration of a product, see `launchable`.

    Attributes
    ----------
    kernel : callable
        ``kernel[grid, block, 0, shared](alpha, a, b, beta, c)``.
    grid, block : tuple of int
        Blocks of the launch, and threads of a block.
    shared : int
        Bytes of dynamic shared memory.
    """

    kernel: Any
    grid: tuple[int, ...]
    block: tuple[int, int]
    shared: int


def launchable(
    stage: LadderStageName,
    m: int,
    n: int,
    k: int,
    *,
    config: TileConfig | None = None,
    contiguous: bool = True,
    blocks: int | None = None,
) -> Launchable:
    """Return the kernel of a stage of the FP32 ladder and its launch configuration, for launches by Numba itself.

    The kernel computes ``c = alpha * a @ b + beta * c`` for these extents only: it may rely on whole tiles, and nothing
    checks the arrays at a launch. Stages on tensor cores are not offered: another kernel decomposes their operands, or
    tensor maps describe them, or, in `one_warp`, warps multiply matrices, which Numba's own simulator cannot do.

    Parameters
    ----------
    stage : str
        Name of a stage of the FP32 ladder.
    m, n, k : int
        Extents: `a` is (m, k), `b` is (k, n), `c` is (m, n). All are positive.
    config : TileConfig, optional
        Tile configuration; by default, the stage's first one.
    contiguous : bool
        True for C-contiguous arrays that begin at a multiple of 16 bytes, as those that Numba allocates. If `n` and `k`
        are multiples of 4, stages from `vectorized` on then use 128-bit accesses. False for arrays of any strides.
    blocks : int, optional
        Number of blocks that share the tiles of C equally, in `basic_stream_k`, `stream_k` and `thin`. Tiles may then
        be divided along k; the kernel keeps a workspace for the partial sums, and two of its launches must not run at
        the same time. By default, one block computes each tile.

    Returns
    -------
    Launchable
        The kernel, its grid, its block, and its dynamic shared memory in bytes.

    Raises
    ------
    TypeError
        for arguments of other types.
    ValueError
        for unknown stages, extents or `blocks` that are not positive, a product that needs several launches, a
        configuration that the stage does not take, and `blocks` for a stage that does not share tiles.

    Examples
    --------
    >>> import numpy as np
    >>> from numba import cuda
    >>> from numba_gemm import launchable
    >>> a, b = (cuda.to_device(np.ones((256, 256), np.float32)) for _ in range(2))
    >>> c = cuda.device_array((256, 256), np.float32)
    >>> kernel, grid, block, shared = launchable("vectorized", 256, 256, 256)
    >>> kernel[grid, block, 0, shared](1.0, a, b, 0.0, c)
    """
    if not isinstance(stage, str):
        raise TypeError(f"stage is of type {type(stage).__qualname__}; expected a str; pass the name of a stage")
    if stage not in STAGES:
        raise ValueError(f"stage is {stage!r}; expected one of {', '.join(STAGES)}; pass one of these")
    m, n, k = index("m", m, 1), index("n", n, 1), index("k", k, 1)
    if k > MAX_K:
        raise ValueError(
            f"k is {k}, and one launch takes up to {MAX_K}; expected less; launch kernels for parts of k, all but the "
            "first with beta=1"
        )
    record = STAGES[stage]
    if config is None:
        config = record.configs[0]
    if not isinstance(config, TileConfig):
        raise TypeError(f"config is {config!r}; expected a TileConfig; pass one, or leave it out for the stage's first")
    a, b, c = (dense("N", *shape) if contiguous else Layout(*shape, *ANY_STRIDES) for shape in ((m, k), (k, n), (m, n)))
    product = Product(a, b, c)
    if blocks is not None and (record.schedule is None or record.undivided):
        raise ValueError(
            f"blocks is {blocks} and stage is {stage!r}, whose tiles decide the number of blocks; expected None; "
            "leave it out"
        )
    if prod(record.block(config)) != config.threads:
        raise ValueError(
            f"stage {stage!r} has one thread per element of a tile, and configuration {config.name} has "
            f"{config.threads} for {config.BM}x{config.BN}; expected TM = TN = 1; pass such a configuration"
        )
    grid: tuple[int, ...] = record.grid(config, m, n)
    division = None
    if record.schedule is not None:
        tiles = grid[0] * grid[1]
        partition = Partition(ceil_div(tiles, config.tiles), tiles)
        if blocks is not None:
            partition = default_partition(config, product, index("blocks", blocks, 1))
        division = record.schedule(config, m, n, k, product.batch, partition)
        grid = division.grid
    check_grid(grid)
    variant = record.variant(config, product)
    if isinstance(variant, Variant):
        aligned = variant.a == "along4", False, variant.c_aligned
    else:
        aligned = (variant != ANY,) * 3
    from . import array_kernel  # imports Numba

    kernel = array_kernel.build(record.build, config, variant, aligned, contiguous, division)
    return Launchable(kernel, grid, record.block(config), config.dynamic_shared)
