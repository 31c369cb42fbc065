"""What describes a rung of the ladder: its tiles, its kernel, and what it needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

FLOAT32_BYTES = 4
WARP = 32
GROUP = 8  # rows of tiles that are walked together
MAX_LINE = 1 << 31  # k-tiles that are counted in 32 bits
DEFAULT_ORDER = "columns"  # the fastest that was measured for thread tiles of 8x16


class Named(Protocol):
    """A configuration, of whatever kind."""

    @property
    def name(self) -> str:
        """Its extents in one word."""


def require(config: Named, constraints: Mapping[str, bool]) -> None:
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
    pad, pad_b
        unused floats at the end of a row of the shared A tile, and of the shared B tile where that is transposed on its
        way.
    dynamic
        whether the tiles lie in dynamic shared memory, which may exceed 48 KB.
    min_blocks
        blocks an SM that the compiler must leave registers for; 0 leaves it free.
    order
        of a k-step's products, one of `numba_gemm.device.outer_product.ORDERS`, in stages that are `Stage.ordered`.
    lanes_k
        threads that share a thread tile, each with other terms of its sums.
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
    order: str = DEFAULT_ORDER
    pad_b: int = 0
    lanes_k: int = 1

    def __post_init__(self) -> None:
        require(
            self,
            {
                "every extent positive": min(self.BM, self.BN, self.BK, self.TM, self.TN, self.slots, self.lanes_k) > 0,
                "pads not negative": min(self.pad, self.pad_b) >= 0,
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
        """Threads a block: one for each thread tile of the block tile, or `lanes_k`."""
        return (self.BM // self.TM) * (self.BN // self.TN) * self.lanes_k

    @property
    def name(self) -> str:
        """The extents in one word: tiles of block, thread and warp, lanes, slots, an order other than the default."""
        word = f"{self.BM}x{self.BN}x{self.BK}-{self.TM}x{self.TN}"
        if self.WM:
            word += f"-w{self.WM}x{self.WN}"
        if self.lanes_k > 1:
            word += f"-k{self.lanes_k}"
        if self.slots > 1:
            word += f"-s{self.slots}"
        return word if self.order == DEFAULT_ORDER else f"{word}-{self.order}"

    @property
    def dynamic_shared(self) -> int:
        """Bytes of dynamic shared memory that a launch must ask for."""
        if not self.dynamic:
            return 0
        return FLOAT32_BYTES * self.slots * self.BK * (self.BM + self.pad + self.BN + self.pad_b)

    @property
    def launch_bounds(self) -> tuple[int, ...]:
        """What the compiler is told of a launch: threads a block and, if set, blocks an SM."""
        return (self.threads, self.min_blocks) if self.min_blocks else (self.threads,)

    def replace(self, **changes: Any) -> TileConfig:
        """A copy with some extents changed."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Form:
    """What a kernel that is built for its operands is built for.

    a, b
        modes of the operands' tile loaders, of `numba_gemm.device.tile_loader.MODES`; B's is that of its transpose.
    c_aligned
        whether C has unit column stride, 16-byte aligned rows and a multiple of four columns.
    epilogue
        device function ``(value, row, col, *vectors)`` of an element of C on its way out, or None.
    vectors
        how many vectors the epilogue takes.
    """

    a: str
    b: str
    c_aligned: bool
    epilogue: Callable[..., Any] | None = None
    vectors: int = 0

    @property
    def name(self) -> str:
        """Modes and alignment in one word."""
        word = f"{self.a}_{self.b}_{'aligned' if self.c_aligned else 'any'}"
        return word if self.epilogue is None else f"{word}_{getattr(self.epilogue, '__name__', 'epilogue')}"


@dataclass(frozen=True)
class Batch:
    """Matrices of up to three batch dimensions.

    extents
        how many along each.
    a, b, c
        bytes from one matrix to the next along each; 0 where the operand is broadcast.
    """

    extents: tuple[int, int, int] = (1, 1, 1)
    a: tuple[int, int, int] = (0, 0, 0)
    b: tuple[int, int, int] = (0, 0, 0)
    c: tuple[int, int, int] = (0, 0, 0)


ONE = Batch()


@dataclass(frozen=True)
class Share:
    """How many blocks share out a product, and how many tiles of C, the last ones, each belong to one of them."""

    blocks: int
    whole: int


@dataclass(frozen=True)
class Schedule:
    """What a `Share` comes to.

    Attributes
    ----------
    grid : tuple of int
        Blocks along x, y and z.
    workspace_bytes : int
        Device memory that the blocks use between them; its contents are undefined at first.
    counters : int
        32-bit words behind it, which are 0 when the launch begins and which it leaves at 0.
    words : tuple of int
        What else the kernel is told: the fields of `numba_gemm.device.work.FIELDS` from the third on.
    """

    grid: tuple[int, int, int]
    workspace_bytes: int
    counters: int
    words: tuple[int, ...]


@dataclass(frozen=True)
class Stage:
    """A rung: one kernel factory, the configurations it is built in, and what it needs.

    ``build(config, aligned)`` returns a ``cuda.jit`` kernel with the parameters ``(alpha, a, b, beta, c)``: float32
    scalars and 2-D float32 arrays of any byte strides, of shapes (m, k), (k, n), (m, n). ``aligned`` promises that
    every operand has unit column stride, 16-byte aligned rows and a multiple of four columns; it is False unless
    ``vectorized``. Stages that are ``ordered`` make a k-step's products in the configuration's order; the others have
    one order only.

    A stage with a ``schedule`` is more than a rung: ``build(config, form)`` takes a `Form` in place of ``aligned``, the
    kernel takes a `numba_gemm.device.work.Work` behind C, and the epilogue's vectors, if any, as a tuple behind that;
    ``schedule(config, m, n, k, batch, share)`` is the `Schedule` of a launch.
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
    ordered: bool = False
    schedule: Callable[..., Schedule] | None = None

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


def share_out(config: TileConfig, m: int, n: int, k: int, batch: Batch, share: Share) -> Schedule:
    """The schedule of stages whose kernels take a `numba_gemm.device.work.Work`.

    Raises
    ------
    ValueError
        if there are not as many tiles as `share` says, or too many k-tiles to divide them.
    """
    rows, cols = -(-m // config.BM), -(-n // config.BN)
    matrices = prod(batch.extents)
    tiles, k_tiles = rows * cols * matrices, max(1, -(-k // config.BK))
    divided = (tiles - share.whole) * k_tiles
    if not 0 <= share.whole <= tiles or divided >= MAX_LINE:
        raise ValueError(f"{share} does not divide {tiles} tiles of {k_tiles} k-tiles")
    base, extra = divmod(divided, share.blocks)
    steps = (step for steps in (batch.a, batch.b, batch.c) for step in steps)
    words = (share.whole, base, extra, k_tiles, rows, cols, GROUP, matrices, *reversed(batch.extents[1:]), *steps)
    undivided = divided == 0 or (base % k_tiles == 0 and extra == 0)  # no tile is in several pieces
    return Schedule(
        grid=(share.blocks, 1, 1),
        workspace_bytes=0 if undivided else 2 * share.blocks * config.BM * config.BN * FLOAT32_BYTES,
        counters=0 if undivided else tiles - share.whole,
        words=words,
    )
