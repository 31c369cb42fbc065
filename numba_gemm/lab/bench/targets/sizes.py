"""Shapes of the comparisons: in full, and small enough for the simulator."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from numba_gemm.lab.bench.cases import ON_GPU, Shape

LAYOUTS = ("NN", "TN", "NT", "TT")  # one letter each for A and B; T is the transpose of a row-major matrix
CUBES = tuple(Shape(extent, extent, extent) for extent in (2048, 3072, 4096, 6144, 8192, 12288, 16384))


class Sizes(NamedTuple):
    """Shapes of every group; by default those that have targets."""

    seed: tuple[Shape, ...] = ON_GPU["seed"]
    cubes: tuple[Shape, ...] = CUBES
    large: int = 2048  # M from which a seed shape has the higher target
    low: int = 64  # least and largest extent of random shapes
    high: int = 8192
    odd: tuple[tuple[Shape, Shape, tuple[str, ...]], ...] = (  # not of tiles; aligned neighbours; layouts of both
        (Shape(4093, 4099, 1021), Shape(4096, 4096, 1024), ("NN",)),
        (Shape(2047, 2049, 1023), Shape(2048, 2048, 1024), LAYOUTS),
        (Shape(3001, 3007, 2011), Shape(3000, 3008, 2012), LAYOUTS),
        (Shape(8191, 8193, 1025), Shape(8192, 8192, 1024), LAYOUTS),
        (Shape(5003, 1999, 3001), Shape(5004, 2000, 3000), LAYOUTS),
    )
    layouts: Shape = Shape(4096, 4096, 4096)
    epilogue: Shape = Shape(4096, 4096, 4096)
    host: Shape = Shape(64, 64, 64)
    vector: int = 16384  # extent of the square matrix
    thin: tuple[int, ...] = (1, 4, 16)  # small extents of the other operand
    batch: int = 64  # number of entries
    batched: Shape = Shape(512, 512, 512)  # of each entry
    elements: int = 1 << 28  # of the largest operand


FULL = Sizes()
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
