"""What describes a rung of the ladder: its tiles, its kernel, and what it needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

FLOAT32_BYTES = 4
WARP = 32


def require(config: TileConfig, constraints: Mapping[str, bool]) -> None:
    """Raise one ValueError that names every constraint a configuration breaks."""
    broken = [name for name, holds in constraints.items() if not holds]
    if broken:
        raise ValueError(f"configuration {config.name} breaks: {'; '.join(broken)}")


@dataclass(frozen=True)
class TileConfig:
    """Tile extents of a stage, in elements, and what follows from them.

    BM, BN, BK
        block tile: a block computes BM x BN elements of C, BK terms of each sum at a time.
    TM, TN
        thread tile: a thread computes TM x TN of those elements.
    WM, WN
        warp tile: a warp computes WM x WN of them; 0 in stages that give warps no tile of their own.
    slots
        buffers of each shared tile.
    pad
        unused floats at the end of a row of the shared A tile.
    dynamic
        whether the tiles lie in dynamic shared memory, which may exceed 48 KB.
    min_blocks
        blocks an SM that the compiler must leave registers for; 0 leaves it free.
    """

    BM: int
    BN: int
    BK: int
    TM: int = 1
    TN: int = 1
    WM: int = 0
    WN: int = 0
    slots: int = 1
    pad: int = 0
    dynamic: bool = False
    min_blocks: int = 0

    def __post_init__(self) -> None:
        require(
            self,
            {
                "every extent positive": min(self.BM, self.BN, self.BK, self.TM, self.TN, self.slots) > 0,
                "pad not negative": self.pad >= 0,
                "BM % TM == 0": self.BM % self.TM == 0,
                "BN % TN == 0": self.BN % self.TN == 0,
                "threads <= 1024": self.threads <= 1024,
            },
        )
        if self.WM or self.WN:
            require(
                self,
                {
                    "BM % WM == 0": self.WM > 0 and self.BM % self.WM == 0,
                    "BN % WN == 0": self.WN > 0 and self.BN % self.WN == 0,
                    "WM % TM == 0": self.WM % self.TM == 0,
                    "WN % TN == 0": self.WN % self.TN == 0,
                    "a warp tile is 32 thread tiles": self.WM * self.WN == WARP * self.TM * self.TN,
                },
            )

    @property
    def threads(self) -> int:
        """Threads a block: one for each thread tile of the block tile."""
        return (self.BM // self.TM) * (self.BN // self.TN)

    @property
    def name(self) -> str:
        """The extents in one word: block tile, thread tile, warp tile, slots."""
        word = f"{self.BM}x{self.BN}x{self.BK}-{self.TM}x{self.TN}"
        if self.WM:
            word += f"-w{self.WM}x{self.WN}"
        return word if self.slots == 1 else f"{word}-s{self.slots}"

    @property
    def dynamic_shared(self) -> int:
        """Bytes of dynamic shared memory that a launch must ask for."""
        if not self.dynamic:
            return 0
        return FLOAT32_BYTES * self.slots * self.BK * (self.BM + self.pad + self.BN)

    @property
    def launch_bounds(self) -> tuple[int, ...]:
        """What the compiler is told of a launch: threads a block and, if set, blocks an SM."""
        return (self.threads, self.min_blocks) if self.min_blocks else (self.threads,)

    def replace(self, **changes: Any) -> TileConfig:
        """A copy with some extents changed."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Stage:
    """A rung: one kernel factory, the configurations it is built in, and what it needs.

    ``build(config, aligned)`` returns a ``cuda.jit`` kernel with the parameters ``(alpha, a, b, beta, c)``: float32
    scalars and 2-D float32 arrays of any byte strides, of shapes (m, k), (k, n), (m, n). ``aligned`` promises that
    every operand has unit column stride, 16-byte aligned rows and a multiple of four columns; it is False unless
    ``vectorized``.
    """

    name: str
    summary: str
    build: Callable[[TileConfig, bool], Any]
    configs: tuple[TileConfig, ...]
    test_config: TileConfig
    block: Callable[[TileConfig], tuple[int, int]]
    vectorized: bool = False
    rows_along_x: bool = False
    min_cc: tuple[int, int] = (7, 5)

    def __post_init__(self) -> None:
        if self.test_config.threads > 64:
            raise ValueError(f"{self.name}: test_config {self.test_config.name} has more than 64 threads")

    def grid(self, config: TileConfig, m: int, n: int) -> tuple[int, int]:
        """Blocks along x and y that cover an (m, n) C: columns along x, unless ``rows_along_x``."""
        rows, cols = -(-m // config.BM), -(-n // config.BN)
        return (rows, cols) if self.rows_along_x else (cols, rows)


def flat_block(config: TileConfig) -> tuple[int, int]:
    """A one-dimensional block of a configuration's threads."""
    return (config.threads, 1)
