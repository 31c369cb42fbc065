"""Tile configurations and variants of the tensor cores' stages, and the memory layout of decomposed operands.

A decomposed operand is a matrix of 32-bit words. It has one row per part and slot of k, ordered by parts first. Each
row holds 32 words, 128 bytes, per row of A (or column of B). A slot in shared memory has the same layout, so one bulk
copy brings any number of rows of a slot. Within 128 bytes the eight 16-byte chunks are permuted by XOR with the row
modulo eight, as the matrix instruction reads them (the "128-byte swizzle"). In a scaled precision one more row follows:
a word for the scale of each row of A, or column of B (`scales`).

With several parts, these words are followed by one more per row of A (or column of B). Behind first parts it is a mark:
above 0.0 if an element of the slot may not be ordinary (`special_values`), otherwise 0.0. The others are not written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ...device.units import GROUP_BYTES, REGISTERS, ROW_BYTES, WARP, ceil_div
from ..stage import require
from .precision import TensorPrecision

WARPGROUP = 128  # threads
ROW_WORDS = ROW_BYTES // 4
MARKED_WORDS = ROW_WORDS + 1  # per row of A, with the mark
ORDINARY = 2.0**48  # magnitude of elements whose products, up to 2^30 of them, sum up to no infinity
GROUP_ROWS = 64  # of A, that a warpgroup multiplies at a time
SHARED_BYTES = 227 << 10  # that a block may have, on 9.0
SMALLEST_SHARED_BYTES = 99 << 10  # on 8.6, 8.9 and 12.0
ALIGNMENT = GROUP_BYTES  # of a tile in shared memory
BARRIER_BYTES = 8
MAX_SLOTS = 8
LEFT = 24  # registers that a thread of a warpgroup that fetches needs, if the others claim what it can do without
WARP_EXTENT = 32  # rows, and columns, that a warp multiplies where warps do
DECOMPOSED_ROWS = 32  # of an operand, that a block decomposes at a time, for one slot
CHUNK_BYTES = 16
CHUNKS = ROW_BYTES // CHUNK_BYTES  # per row of a slot
THREADS = DECOMPOSED_ROWS * CHUNKS  # of a block that decomposes
SPAN = 512  # terms of k in which one block finds the largest elements, or a multiple of it: there are at most SPANS
SPANS = 256
PREPARED_TILES = (64, 96, 128, 192, 256)  # extents of block tiles that parts of prepared operands suit


@dataclass(frozen=True)
class Tiles:
    """Extents of a block tile, in elements."""

    BM: int
    BN: int

    def slot_bytes(self, precision: TensorPrecision) -> int:
        """Bytes of a slot: all parts of a tile of A, then of B."""
        return ROW_BYTES * precision.parts * (self.BM + self.BN)


@dataclass(frozen=True)
class WarpgroupConfig(Tiles):
    """Tile extents in elements, and warpgroups.

    BM, BN
        block tile.
    consumers
        warpgroups that multiply, each 64 rows of the block tile.
    producers
        warpgroups that fetch.
    max_slots
        buffers of the tiles, at most; as many as shared memory holds.
    claim
        registers that a thread of a warpgroup that multiplies claims from the others; 0 leaves them as they are.
    """

    consumers: int = 1
    producers: int = 0
    max_slots: int = MAX_SLOTS
    claim: int = 0

    def __hash__(self) -> int:  # of few fields, see `TileConfig`
        return hash((self.BM, self.BN, self.consumers))

    def __post_init__(self) -> None:
        positive = min(self.BM, self.BN, self.consumers) > 0 and self.producers >= 0
        require(self, {"extents and consumers positive": positive})
        require(
            self,
            {
                "BM == 64 * consumers": GROUP_ROWS * self.consumers == self.BM,
                "BN % 8 == 0, BN <= 256": self.BN <= 256 and self.BN % 8 == 0,
                "BM % 32 == 0, BN % 32 == 0": self.BM % DECOMPOSED_ROWS == 0 and self.BN % DECOMPOSED_ROWS == 0,
                "slots": 0 < self.max_slots <= MAX_SLOTS,
                "threads <= 1024": self.threads <= 1024,
            },
        )
        if self.claim:
            # Registers per thread when a block starts: if there were more at the end, it would hang without an error.
            start = REGISTERS // self.threads // 8 * 8
            held = WARPGROUP * (self.consumers * self.claim + self.producers * LEFT)
            require(
                self,
                {
                    "claim % 8 == 0, claim <= 256": self.claim % 8 == 0 and self.claim <= 256,
                    "claim >= start >= what is left": self.claim >= start >= LEFT,
                    "registers of all warpgroups": held <= start * self.threads and self.producers > 0,
                },
            )

    @property
    def threads(self) -> int:
        """Threads per block."""
        return WARPGROUP * (self.consumers + self.producers)

    @property
    def name(self) -> str:
        """The extents in one word."""
        return f"{self.BM}x{self.BN}-c{self.consumers}p{self.producers}"

    def slots(self, precision: TensorPrecision) -> int:
        """Slots that shared memory holds."""
        room = SHARED_BYTES - ALIGNMENT - 2 * MAX_SLOTS * BARRIER_BYTES
        found = min(self.max_slots, room // self.slot_bytes(precision))
        if found == 0:
            raise ValueError(f"configuration {self.name} has no room for a slot of {precision.name}")
        return found

    def dynamic_shared(self, precision: TensorPrecision) -> int:
        """Bytes of dynamic shared memory that a launch must ask for."""
        slots = self.slots(precision)
        return ALIGNMENT + slots * (self.slot_bytes(precision) + 2 * BARRIER_BYTES)


NARROW = "along8"  # access to rows of BF16


class RowsConfig(WarpgroupConfig):
    """Configuration of a stage that copies rows of A as they are: twice 128 bytes per row and slot of 64 terms."""

    def slot_bytes(self, precision: TensorPrecision) -> int:
        """Bytes of a slot: floats of a tile of A, then all parts of a tile of B."""
        return ROW_BYTES * (2 * self.BM + precision.parts * self.BN)


class NarrowRowsConfig(RowsConfig):
    """Configuration of such a stage for an A of BF16: 128 bytes per row and slot of 64 terms."""

    @property
    def name(self) -> str:
        """The extents in one word, and the format of A."""
        return f"{super().name}-bf16"

    def slot_bytes(self, precision: TensorPrecision) -> int:
        """Bytes of a slot: a tile of A, then all parts of a tile of B."""
        return ROW_BYTES * (self.BM + precision.parts * self.BN)


@dataclass(frozen=True)
class WarpConfig(Tiles):
    """Tile extents in elements of a stage whose warps multiply 32 x 32 each.

    BM, BN
        block tile.
    max_slots
        buffers of the tiles, at most; as many as 99 KB of shared memory hold, which all GPUs have on which it runs.
    """

    max_slots: int = 3
    claim: ClassVar[int] = 0  # of registers: each thread keeps what it starts with

    def __post_init__(self) -> None:
        whole = self.BM % WARP_EXTENT == 0 and self.BN % WARP_EXTENT == 0
        require(
            self,
            {
                "BM % 32 == 0, BN % 32 == 0": min(self.BM, self.BN) > 0 and whole,
                "slots": 2 <= self.max_slots <= MAX_SLOTS,
                "threads <= 1024": self.threads <= 1024,
            },
        )

    @property
    def threads(self) -> int:
        """Threads per block."""
        return self.BM // WARP_EXTENT * (self.BN // WARP_EXTENT) * WARP

    @property
    def name(self) -> str:
        """The extents in one word."""
        return f"{self.BM}x{self.BN}-w{WARP_EXTENT}x{WARP_EXTENT}"

    def slots(self, precision: TensorPrecision) -> int:
        """Slots that shared memory holds."""
        found = min(self.max_slots, (SMALLEST_SHARED_BYTES - ALIGNMENT) // self.slot_bytes(precision))
        if found < 2:
            raise ValueError(f"configuration {self.name} has no room for two slots of {precision.name}")
        return found

    def dynamic_shared(self, precision: TensorPrecision) -> int:
        """Bytes of dynamic shared memory that a launch must ask for."""
        return ALIGNMENT + self.slots(precision) * self.slot_bytes(precision)


TensorConfig = WarpgroupConfig | WarpConfig


class TensorVariant(NamedTuple):
    """Specialisation of a kernel.

    Attributes
    ----------
    precision : TensorPrecision
        Precision.
    epilogue : callable or None
        Device function ``(value, row, col, *vectors)`` applied to each element of C.
    vectors : int
        Number of vectors that the epilogue takes.
    batched : bool
        True if the grid's y axis counts matrices of a batch.
    rows : str
        Access to rows of A that are not decomposed, "along4", "across4", "across1", "any", or "along8" for BF16;
        empty if they are.
    """

    precision: TensorPrecision
    epilogue: Callable[..., Any] | None = None
    vectors: int = 0
    batched: bool = False
    rows: str = ""


def words_per_row(precision: TensorPrecision) -> int:
    """Return the words per row of a decomposed operand that belong to one row of A, or column of B."""
    return MARKED_WORDS if precision.parts > 1 else ROW_WORDS


def parts_shape(precision: TensorPrecision, mn: int, k: int, tile: int) -> tuple[int, int]:
    """Return rows, and words per row, of a decomposed (mn, k) operand for block tiles of `tile` rows."""
    slots = ceil_div(k, precision.slot_k) or 1
    return precision.parts * slots + precision.scaled, words_per_row(precision) * ceil_div(mn, tile) * tile
