"""How a product is divided when its matrices do not lie on the device: blocks of C, panels along k, strips of rows.

A block of C stays on the device while the panels of A and B that belong to it pass by, two at a time: one is multiplied
while the next arrives. A block's bytes grow with its area, and so do the multiply-adds that each of its panels serves;
what is copied for it grows with its edges. So blocks are as large as memory allows, and about square.

The first panels of a block are thin, since nothing can be multiplied before the first one is there; the others are as
deep as memory allows, up to a point where the sums' own traffic is nothing beside their arithmetic. The last panel is
multiplied strip by strip, from top to bottom, so that one strip is copied to the host while the next is computed, and
the first panel of the next block likewise, so that it may begin with the strips that are gone. For that a strip has the
same place in all blocks: rows of C are as far apart as in the widest one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import ceil
from typing import NamedTuple

from ..models.roofline import FLOAT32_BYTES as ITEM
from ..runtime.workspace import ALIGNMENT

__all__ = ["Blocking", "Part", "Piece", "Shape", "choose", "divided", "smallest"]

GRANULARITY = 2 << 20  # what the driver rounds an allocation up to
SLOTS = 2  # panels of A, and of B, that are on the device at once
DEEPEST, THINNEST = 8192, 64  # elements along k of a panel
THIN_START = 512  # of the first one, if there are many
EDGE = 128  # what extents of blocks and strips are multiples of, but for the last ones
SMALLEST_EDGE = 128
STRIP_BYTES = 256 << 20  # about 5 ms of a copy by PCI Express 5.0
STRIPS = 4  # of a block at least, if it has so many rows
WHOLE_ROWS = 32768  # of a product that is not done by strips: interrupts wait for the end of one


class Part(NamedTuple):
    """A range of rows, of columns, or of k."""

    begin: int
    end: int

    @property
    def extent(self) -> int:
        """How many there are."""
        return self.end - self.begin

    @property
    def slice(self) -> slice:
        """For an array."""
        return slice(self.begin, self.end)


class Shape(NamedTuple):
    """What the kernel of a product depends on.

    Attributes
    ----------
    rows, cols, inner : int
        Extents of C, and of the sums.
    block_rows : int
        Rows of the panel of A that the product's are a part of.
    pitch : int
        Elements from a row of C to the next.
    """

    rows: int
    cols: int
    inner: int
    block_rows: int
    pitch: int


Needs = Callable[[set[Shape]], int]


@dataclass(frozen=True)
class Piece:
    """One product: rows and columns of C, and the k that it adds to them.

    Attributes
    ----------
    block, panel : int
        Which of the blocks of C, and which of the panels of each.
    rows, cols, inner : Part
        Of C, and of k.
    strips : range
        Which of the block's strips the rows are.
    first, last : bool
        Whether it begins the sums, and whether it completes them.
    """

    block: int
    panel: int
    rows: Part
    cols: Part
    inner: Part
    strips: range
    first: bool
    last: bool


def divided(extent: int, most: int) -> list[Part]:
    """An extent in ranges of `most`, the last one of what is left."""
    return [Part(begin, min(begin + most, extent)) for begin in range(0, extent, most)]


def _rounded(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _even(extent: int, most: int, unit: int = EDGE) -> int:
    """The extent of as few ranges as can be, of about equal extents: whole units, and at most `most`, but the last."""
    if extent <= most:
        return extent
    return min(_rounded(ceil(extent / ceil(extent / most)), unit), most)


def depths(k: int, deepest: int) -> tuple[int, ...]:
    """Panels along k: thin ones that double, then equal ones of at most `deepest`."""
    found: list[int] = []
    next_one, left = THIN_START, k
    while next_one < deepest and left > 2 * deepest:
        found.append(next_one)
        left -= next_one
        next_one *= 2
    if left:
        each = _even(left, deepest, THINNEST)
        found += [each] * (left // each) + [left % each] * (left % each > 0)
    return tuple(found)


@dataclass(frozen=True)
class Blocking:
    """A division of C (m, n) = A (m, k) @ B (k, n).

    Attributes
    ----------
    m, n, k : int
        Extents in elements.
    rows, cols : int
        Of a block of C; those at the lower and right edges may be smaller.
    depths : tuple of int
        Elements along k of each panel, in the order in which they are added.
    strip : int
        Rows of C that are copied to the host together.
    workspace : int
        Bytes that the largest product needs beside.
    """

    m: int
    n: int
    k: int
    rows: int
    cols: int
    depths: tuple[int, ...]
    strip: int
    workspace: int = 0

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks of C downwards and across."""
        return -(-self.m // self.rows), -(-self.n // self.cols)

    @property
    def count(self) -> int:
        """Blocks of C, which are computed row by row."""
        return self.grid[0] * self.grid[1]

    def block(self, number: int) -> tuple[Part, Part]:
        """Rows and columns of a block of C."""
        down, across = divmod(number, self.grid[1])
        top, left = down * self.rows, across * self.cols
        return Part(top, min(top + self.rows, self.m)), Part(left, min(left + self.cols, self.n))

    @cached_property
    def panels(self) -> list[Part]:
        """Ranges of k."""
        return [Part(end - depth, end) for end, depth in zip(accumulate(self.depths), self.depths)]

    def strips(self, block: int) -> list[Part]:
        """Rows of C of each strip of a block."""
        rows = self.block(block)[0]
        return [Part(rows.begin + part.begin, rows.begin + part.end) for part in divided(rows.extent, self.strip)]

    def pieces(self, block: int, panel: int) -> Iterator[Piece]:
        """The products of a panel."""
        first, last = panel == 0, panel == len(self.depths) - 1
        strips, (_, cols) = self.strips(block), self.block(block)
        together = 1 if first or last else max(1, WHOLE_ROWS // self.strip)
        for some in divided(len(strips), together):
            rows = Part(strips[some.begin].begin, strips[some.end - 1].end)
            numbers = range(some.begin, some.end)
            yield Piece(block, panel, rows, cols, self.panels[panel], numbers, first, last)

    def all_pieces(self) -> Iterator[Piece]:
        """Every product, in the order in which they are computed: what `streamed_sgemm` launches."""
        for block in range(self.count):
            for panel in range(len(self.depths)):
                yield from self.pieces(block, panel)

    @property
    def slots(self) -> int:
        """Panels of A, and of B, that are on the device at once."""
        return min(SLOTS, self.count * len(self.depths))

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """Bytes of a block of C, of a panel of A, of one of B, and of the workspace, each rounded up."""
        deepest = max(self.depths)
        sizes = (ITEM * self.rows * self.cols, ITEM * self.rows * deepest, ITEM * self.cols * deepest, self.workspace)
        return tuple(_rounded(size, ALIGNMENT) for size in sizes)  # type: ignore[return-value]

    @property
    def device_bytes(self) -> int:
        """Device memory that the product takes, in whole pages of the driver's."""
        block, a, b, workspace = self.parts
        return _rounded(block + self.slots * (a + b) + workspace, GRANULARITY)

    @property
    def bytes_to_device(self) -> int:
        """What is copied to the device, C apart."""
        down, across = self.grid
        return ITEM * self.k * (self.m * across + self.n * down)

    def shape(self, piece: Piece) -> Shape:
        """Of one product."""
        rows = self.block(piece.block)[0].extent
        return Shape(piece.rows.extent, piece.cols.extent, piece.inner.extent, rows, self.cols)

    def shapes(self) -> set[Shape]:
        """Of all products."""
        down, across = self.grid
        corners = {
            row * across + col for row in (0, down - 1) for col in (0, across - 1)
        }  # the others are as the first
        between = {depth: panel for panel, depth in enumerate(self.depths[1:-1], 1)}  # one for all of equal depth
        panels = {0, len(self.depths) - 1, *between.values()}
        return {self.shape(piece) for block in corners for panel in panels for piece in self.pieces(block, panel)}


def made(m: int, n: int, k: int, rows: int, cols: int, deepest: int) -> Blocking:
    """The division into blocks of about so many rows and columns, and panels of at most so many elements along k."""
    rows, cols = _even(m, rows), _even(n, cols)
    strip = min(_rounded(max(1, STRIP_BYTES // (ITEM * cols)), EDGE), _rounded(-(-rows // STRIPS), EDGE))
    return Blocking(m, n, k, rows, cols, depths(k, min(k, deepest)), min(strip, rows))


def _candidates(m: int, n: int, k: int) -> Iterator[Blocking]:
    """Divisions, from the one that copies least on; what is equal but for the depth of panels, from the deepest on."""
    edge, before = max(m, n, SMALLEST_EDGE), None
    while True:
        deepest = DEEPEST
        least = min(512, max(THINNEST, min(m, n, edge) // 8))
        while deepest >= least:
            found = made(m, n, k, edge, edge, deepest)
            if found != before:
                yield found
            before, deepest = found, deepest // 2
        if edge <= SMALLEST_EDGE:
            return
        edge = max(SMALLEST_EDGE, int(edge / 2**0.25) // EDGE * EDGE)


def _with_workspace(found: Blocking, needs: Needs) -> Blocking:
    return replace(found, workspace=needs(found.shapes()))


def choose(m: int, n: int, k: int, limit: int, needs: Needs) -> Blocking | None:
    """The division that copies least among those that take at most so many bytes; None if none does.

    Parameters
    ----------
    m, n, k : int
        Extents, from 1 on.
    limit : int
        Bytes of device memory.
    needs : callable
        Bytes of workspace that serves all products that `Blocking.shapes` names.
    """
    for found in _candidates(m, n, k):
        if found.device_bytes <= limit:
            complete = _with_workspace(found, needs)
            if complete.device_bytes <= limit:
                return complete
    return None


def smallest(m: int, n: int, k: int, needs: Needs) -> int:
    """Bytes of the division that takes least."""
    last = deque(_candidates(m, n, k), maxlen=8)
    return min(_with_workspace(found, needs).device_bytes for found in last)
