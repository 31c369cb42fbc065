"""Shapes to measure, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from numba_gemm.terminal import UsageError


class Shape(NamedTuple):
    """Extents of a matrix multiplication: A is (m, k), B is (k, n), C is (m, n)."""

    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Parse ``M,N,K``; raise ValueError unless these are three positive integers."""
        try:
            m, n, k = (int(part) for part in text.split(","))
        except ValueError:
            raise ValueError(f"{text!r} is not M,N,K: give three integers, as in 4096,4096,1024") from None
        if min(m, n, k) < 1:
            raise ValueError(f"{text!r}: every extent must be at least 1")
        return cls(m, n, k)


SEED_EXTENTS = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
DEFAULT_SHAPE = Shape(4096, 4096, 4096)  # of experiments with one shape

# Named sets for a GPU. `odd` holds shapes that do not fit tiles: primes, one more or less than a tile, single rows.
ON_GPU: dict[str, tuple[Shape, ...]] = {
    "seed": tuple(Shape(extent, extent, 1024) for extent in SEED_EXTENTS),
    "square": tuple(Shape(extent, extent, extent) for extent in (1024, 2048, 3072, 4096, 6144, 8192)),
    "odd": (
        *(Shape(127, 129, 131), Shape(1000, 1000, 1000), Shape(1, 4096, 4096), Shape(4096, 1, 4096)),
        *(Shape(4096, 4096, 1), Shape(2047, 2049, 1025), Shape(4093, 4099, 1021), Shape(8191, 513, 2053)),
    ),
    "quick": (Shape(512, 512, 1024), Shape(1001, 999, 517), Shape(2048, 2048, 2048)),
}

# The same names for the simulator, where 4096 x 4096 x 4096 would take days.
SIMULATED: dict[str, tuple[Shape, ...]] = {
    "seed": (Shape(8, 8, 16), Shape(16, 16, 16), Shape(24, 24, 16)),
    "square": (Shape(8, 8, 8), Shape(16, 16, 16), Shape(24, 24, 24)),
    "odd": (Shape(33, 17, 9), Shape(1, 21, 13), Shape(19, 1, 11)),
    "quick": (Shape(16, 16, 16), Shape(33, 17, 9), Shape(65, 72, 20)),
}

SIMULATED_TERMS = 1 << 21  # multiply-adds; several minutes per stage


def chosen_shapes(names: Sequence[str], shapes: Sequence[Shape], simulated: bool) -> tuple[Shape, ...]:
    """Return the shapes of the named sets and others, in order and without duplicates; defaults if there are none."""
    sets = SIMULATED if simulated else ON_GPU
    if not names and not shapes:
        names = ("quick",) if simulated else ("seed", "square")
    return tuple(dict.fromkeys([*(shape for name in names for shape in sets[name]), *shapes]))


def check_simulated(shapes: tuple[Shape, ...]) -> None:
    """Raise `UsageError`, which names them, for shapes that would take the simulator hours."""
    large = [str(shape) for shape in shapes if shape.m * shape.n * shape.k > SIMULATED_TERMS]
    if large:
        raise UsageError(
            f"too large for the simulator: {', '.join(large)}. Here M*N*K may be at most {SIMULATED_TERMS:,}; "
            "larger products need an NVIDIA GPU"
        )
