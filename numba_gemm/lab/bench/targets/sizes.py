"""Shapes of the comparisons: in full, and small enough for the simulator."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from numba_gemm.lab.bench.cases import SEED_EXTENTS, Shape


@dataclass(frozen=True)
class Sizes:
    """Shapes of every group."""

    seed: tuple[Shape, ...]
    cubes: tuple[Shape, ...]
    large: int  # M from which a seed shape has the higher target
    low: int  # least and largest extent of random shapes
    high: int
    odd: tuple[tuple[Shape, Shape, tuple[str, ...]], ...]  # not of tiles; aligned neighbours; layouts of both
    layouts: Shape
    epilogue: Shape
    host: Shape
    vector: int  # extent of the square matrix
    thin: tuple[int, ...]  # small extents of the other operand
    batch: int  # number of entries
    batched: Shape  # of each entry
    elements: int  # of the largest operand


LAYOUTS = ("NN", "TN", "NT", "TT")  # one letter each for A and B; T is the transpose of a row-major matrix
FULL = Sizes(
    seed=tuple(Shape(extent, extent, 1024) for extent in SEED_EXTENTS),
    cubes=tuple(Shape(extent, extent, extent) for extent in (2048, 3072, 4096, 6144, 8192, 12288, 16384)),
    large=2048,
    low=64,
    high=8192,
    odd=(
        (Shape(4093, 4099, 1021), Shape(4096, 4096, 1024), ("NN",)),
        (Shape(2047, 2049, 1023), Shape(2048, 2048, 1024), LAYOUTS),
        (Shape(3001, 3007, 2011), Shape(3000, 3008, 2012), LAYOUTS),
        (Shape(8191, 8193, 1025), Shape(8192, 8192, 1024), LAYOUTS),
        (Shape(5003, 1999, 3001), Shape(5004, 2000, 3000), LAYOUTS),
    ),
    layouts=Shape(4096, 4096, 4096),
    epilogue=Shape(4096, 4096, 4096),
    host=Shape(64, 64, 64),
    vector=16384,
    thin=(1, 4, 16),
    batch=64,
    batched=Shape(512, 512, 512),
    elements=1 << 28,
)
# Sizes small enough to try the program in the simulator.
TINY = Sizes(
    seed=(Shape(8, 8, 16), Shape(16, 16, 16)),
    cubes=(Shape(16, 16, 16),),
    large=16,
    low=4,
    high=12,
    odd=((Shape(7, 9, 5), Shape(8, 8, 4), LAYOUTS),),
    layouts=Shape(16, 16, 16),
    epilogue=Shape(12, 12, 12),
    host=Shape(8, 8, 8),
    vector=16,
    thin=(1, 4),
    batch=2,
    batched=Shape(8, 8, 8),
    elements=1 << 10,
)


def random_shapes(count: int, seed: int, low: int, high: int) -> list[Shape]:
    """Return shapes with log-uniform integer extents from `low` to `high`; a longer list starts with a shorter one."""
    logarithms = np.random.default_rng(seed).uniform(math.log(low), math.log(high + 1), (count, 3))
    extents = np.clip(np.exp(logarithms).astype(int), low, high)
    return [Shape(*row) for row in extents.tolist()]
