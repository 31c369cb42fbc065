"""Tiles that extend beyond a matrix are filled with zeros, which are copied and multiplied like other elements."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pandas as pd

from numba_gemm.device.units import ceil_div
from numba_gemm.gemm.precision import IEEE
from numba_gemm.kernels.ladder import STAGES
from numba_gemm.kernels.ladder.tile_config import TileConfig
from numba_gemm.lab.bench.buffers import DeviceBuffers, Reference, call_on_nan, choose_library
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.harness.pictures import bars, panels
from numba_gemm.lab.memory import machine
from numba_gemm.models.roofline import gemm_flops
from numba_gemm.runtime.launch import launch

STAGE = STAGES["shared_tile"]
CONFIGS = {config.BM: config for config in STAGE.configs}  # by the sides of their tiles


def products(extent: int) -> Iterator[tuple[int, Callable[[int], None]]]:
    """Yield each tile with the call that enqueues a product of square matrices, after checking it."""
    buffers = DeviceBuffers.random(choose_library(machine.SIMULATOR), Shape(extent, extent, extent), 0)
    a, b, c = buffers.matrices
    reference = Reference(buffers.library, buffers.a, buffers.b)
    for tile, config in sorted(CONFIGS.items()):

        def call(stream: int, config: TileConfig = config) -> None:
            launch(STAGE, config, 1.0, a, b, 0.0, c, stream=stream)

        call_on_nan(buffers.library, buffers.c, call, 0)
        found, *_ = reference.judge(buffers.c, IEEE)
        assert found.ok, f"tiles of {tile}, extent {extent}: {found}"
        yield tile, call


def partial_tiles(
    extents: Sequence[int] = (1024, 2048, 4096), rounds: int = machine.ROUNDS
) -> Iterator[dict[str, Any]]:
    """Multiply square matrices by the stage `shared_tile` with each tile, of each extent and of one less.

    One row per tile and extent: ``whole`` if the extent is a multiple of the tile, ``zeros_percent`` of the
    multiply-adds that have a factor outside of A or B, ``us``, and ``tflop_s`` of the product itself.

    Parameters
    ----------
    extents: M, N and K, multiples of 32.
    """
    for extent in extents:
        calls = {(tile, size): call for size in (extent, extent - 1) for tile, call in products(size)}
        us = machine.timed(calls, rounds=rounds)
        yield from (row_of(tile, size, us[tile, size], us[tile, extent]) for tile, size in calls)


def row_of(tile: int, size: int, us: float, whole_us: float) -> dict[str, Any]:
    computed = ceil_div(size, tile) * tile
    row = {"tile": tile, "extent": size, "whole": size % tile == 0, "zeros_percent": 100 * (1 - (size / computed) ** 3)}
    flops = gemm_flops(size, size, size)
    row |= {"us": us, "tflop_s": flops / us / 1e6}
    return row | {"predicted_us": whole_us, "predicted_tflop_s": flops / whole_us / 1e6}


def claims(frame: pd.DataFrame) -> dict[str, Any]:
    off = frame["us"] / frame["predicted_us"]
    partial, large = ~frame["whole"], frame["extent"] > 4000
    us = frame[frame["whole"]].pivot(index="extent", columns="tile", values="us")
    return {
        "with one row and column less, a product takes no more than a quarter longer": off[partial] < 1.25,
        "a large one takes no more than a tenth longer": off[partial & large] < 1.1,
        "and none takes less than nine tenths of the time": off[partial] > 0.9,
        "tiles of 32 x 32 are faster than tiles of 16 x 16": us[32] < us[16],
    }


PLOT = panels(bars("tflop_s", ["extent", "tile"], label="{} cubed, tiles of {}"))
SMALL = {"extents": (32,), "rounds": 1}
EXPERIMENT = machine.experiment(partial_tiles, "9.2.3.2", claims, PLOT, SMALL, allowed={"extents": max(CONFIGS)})
