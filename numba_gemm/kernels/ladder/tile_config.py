"""Tile configurations of the FP32 ladder."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ...device.units import FLOAT32_BYTES, WARP
from ..stage import require

DEFAULT_ORDER = "columns"  # the fastest that was measured for thread tiles of 8x16


@dataclass(frozen=True)
class TileConfig:
    """Tile extents of a stage, in elements, and quantities derived from them.

    BM, BN, BK
        block tile: a block computes BM x BN elements of C, BK terms of each sum at a time.
    TM, TN
        thread tile: a thread computes TM x TN of those elements.
    WM, WN
        warp tile: a warp computes WM x WN of them; 0 in stages that give warps no tile of their own.
    slots
        buffers of each shared tile.
    pad, pad_b
        unused floats at the end of a row of the shared A tile, and of the shared B tile where that is transposed.
    dynamic
        true if the tiles are in dynamic shared memory, which may exceed 48 KB.
    min_blocks
        blocks per SM that the compiler must leave registers for; 0 leaves it free.
    order
        order of a k-step's products, one of `device.outer_product.ORDERS`, in stages that are ``ordered``.
    lanes_k
        threads of a warp or, if warps have tiles, of different warps, that share a thread tile: each has other terms.
    tiles
        block tiles that a block computes, also of different matrices of a batch.
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
    tiles: int = 1

    def __hash__(self) -> int:  # of few fields: a new product is looked up by its configuration several times
        return hash((self.BM, self.BN, self.BK, self.TM))

    def __post_init__(self) -> None:
        extents = self.BM, self.BN, self.BK, self.TM, self.TN, self.slots, self.lanes_k, self.tiles
        require(
            self,
            {
                "every extent positive": min(extents) > 0,
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
        """Threads per block: `lanes_k` per thread tile of its block tiles."""
        return (self.BM // self.TM) * (self.BN // self.TN) * self.lanes_k * self.tiles

    @property
    def in_lanes(self) -> bool:
        """True if lanes of a warp share the thread tiles of a block tile, as in `thin`."""
        return self.lanes_k > 1 and not self.WM and self.tiles == 1

    @property
    def name(self) -> str:
        """The extents in one word: tiles of block, thread and warp, lanes, slots, an order other than the default."""
        word = f"{self.BM}x{self.BN}x{self.BK}-{self.TM}x{self.TN}"
        if self.WM:
            word += f"-w{self.WM}x{self.WN}"
        word += f"-k{self.lanes_k}" * (self.lanes_k > 1) + f"-s{self.slots}" * (self.slots > 1)
        word += f"-t{self.tiles}" * (self.tiles > 1)
        return word if self.order == DEFAULT_ORDER else f"{word}-{self.order}"

    @property
    def dynamic_shared(self) -> int:
        """Bytes of dynamic shared memory that a launch must ask for."""
        if not self.dynamic:
            return 0
        return FLOAT32_BYTES * self.slots * self.BK * (self.BM + self.pad + self.BN + self.pad_b)

    @property
    def launch_bounds(self) -> tuple[int, ...]:
        """Launch bounds for the compiler: threads per block and, if set, blocks per SM."""
        return (self.threads, self.min_blocks) if self.min_blocks else (self.threads,)

    def replace(self, **changes: Any) -> TileConfig:
        """Return a copy with some extents changed."""
        return dataclasses.replace(self, **changes)
