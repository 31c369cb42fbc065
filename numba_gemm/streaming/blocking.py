"""Division of a product whose matrices are not on the device: blocks of C, panels along k, strips of rows.

A block of C stays on the device while its panels of A and B pass by, two at a time: one is multiplied while the next
arrives. A block's bytes grow with its area, as do the multiply-adds that each of its panels serves; the bytes copied
for it grow with its edges. So blocks are as large as memory allows, and about square.

The first panels of a block are thin, since nothing can be multiplied before the first one arrives. The others are as
deep as memory allows, up to a depth where the traffic of the sums is negligible compared with their arithmetic. The
last panel is multiplied strip by strip, from top to bottom, so that one strip is copied to the host while the next is
computed. So is the first panel of the next block, which can then begin with the strips that have left the device. For
that, a strip has the same place in all blocks: rows of C are as far apart as in the widest block.

For several devices, C is first divided into one part per device, so that the parts together copy least, and then each
part into blocks. All blocks have the same extents, whichever device computes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import ceil
from typing import NamedTuple

from ..device.units import FLOAT32_BYTES, ceil_div
from ..runtime.workspace import ALIGNMENT

__all__ = ["Blocking", "Part", "Piece", "Shape", "choose", "divided", "smallest"]

GRANULARITY = 2 << 20  # the driver rounds allocations up to a multiple of this
SLOTS = 2  # panels of A, and of B, on the device at once
DEEPEST, THINNEST = 8192, 64  # elements along k of a panel
THIN_START = 512  # elements along k of the first panel, if there are many
EDGE = 128  # extents of blocks and strips are multiples of this, except the last ones
SMALLEST_EDGE = 128
STRIP_BYTES = 256 << 20  # a copy of a few milliseconds over PCI Express 5.0
STRIPS = 4  # least number per block, if it has enough rows
WHOLE_ROWS = 32768  # most rows of a product that is not computed by strips; an interrupt waits for its end


class Part(NamedTuple):
    """A range of rows, of columns, or of k."""

    begin: int
    end: int

    @property
    def extent(self) -> int:
        """Number of elements."""
        return self.end - self.begin

    @property
    def slice(self) -> slice:
        """The range as a slice."""
        return slice(self.begin, self.end)


class Shape(NamedTuple):
    """Properties of a product that its kernel depends on.

    Attributes
    ----------
    rows, cols, inner : int
        Extents of C, and the number of terms per sum.
    block_rows : int
        Rows of the panel of A that contains the product's rows.
    pitch : int
        Elements from one row of C to the next.
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
        Index of the block of C, and of the panel among those of the block.
    rows, cols, inner : Part
        Ranges of rows and columns of C, and of k.
    strips : range
        Numbers of the block's strips that form the rows.
    first, last : bool
        True if the product begins the sums, and if it completes them.
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
    """Divide an extent into ranges of `most`; the last one takes the rest."""
    return [Part(begin, min(begin + most, extent)) for begin in range(0, extent, most)]


def _rounded(value: int, unit: int) -> int:
    return ceil_div(value, unit) * unit


def _even(extent: int, most: int, unit: int = EDGE) -> int:
    """Extent of the fewest ranges of about equal extents: at most `most`, and whole units except for the last."""
    if extent <= most:
        return extent
    return min(_rounded(ceil(extent / ceil(extent / most)), unit), most)


def depths(k: int, deepest: int) -> tuple[int, ...]:
    """Depths of the panels along k: thin ones that double, then equal ones of at most `deepest`."""
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
    """Division of C (m, n) = A (m, k) @ B (k, n).

    Attributes
    ----------
    m, n, k : int
        Extents in elements.
    rows, cols : int
        Extents of a block of C; blocks at the lower and right edges may be smaller.
    depths : tuple of int
        Elements along k of each panel, in the order in which they are added.
    strip : int
        Rows of C that are copied to the host together.
    workspace : int
        Bytes of workspace that the largest product needs.
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
        """Number of blocks of C, down and across."""
        return ceil_div(self.m, self.rows), ceil_div(self.n, self.cols)

    @property
    def count(self) -> int:
        """Number of blocks of C, which are computed row by row."""
        return self.grid[0] * self.grid[1]

    def block(self, number: int) -> tuple[Part, Part]:
        """Rows and columns of a block of C."""
        down, across = divmod(number, self.grid[1])
        top, left = down * self.rows, across * self.cols
        return Part(top, min(top + self.rows, self.m)), Part(left, min(left + self.cols, self.n))

    @cached_property
    def panels(self) -> list[Part]:
        """Range of k of each panel."""
        return [Part(end - depth, end) for end, depth in zip(accumulate(self.depths), self.depths)]

    def strips(self, block: int) -> list[Part]:
        """Rows of C of each strip of a block."""
        rows = self.block(block)[0]
        return [Part(rows.begin + part.begin, rows.begin + part.end) for part in divided(rows.extent, self.strip)]

    def pieces(self, block: int, panel: int) -> Iterator[Piece]:
        """Yield the products of a panel."""
        first, last = panel == 0, panel == len(self.depths) - 1
        strips, (_, cols) = self.strips(block), self.block(block)
        together = 1 if first or last else max(1, WHOLE_ROWS // self.strip)
        for some in divided(len(strips), together):
            rows = Part(strips[some.begin].begin, strips[some.end - 1].end)
            numbers = range(some.begin, some.end)
            yield Piece(block, panel, rows, cols, self.panels[panel], numbers, first, last)

    def all_pieces(self) -> Iterator[Piece]:
        """Yield all products that `streamed_sgemm` launches, in the order of computation."""
        for block in range(self.count):
            for panel in range(len(self.depths)):
                yield from self.pieces(block, panel)

    @property
    def slots(self) -> int:
        """Number of panels of A, and of B, on the device at once."""
        return min(SLOTS, self.count * len(self.depths))

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """Bytes of a block of C, of a panel of A, of one of B, and of the workspace, each rounded up."""
        deepest = max(self.depths)
        sizes = (
            FLOAT32_BYTES * self.rows * self.cols,
            FLOAT32_BYTES * self.rows * deepest,
            FLOAT32_BYTES * self.cols * deepest,
            self.workspace,
        )
        return tuple(_rounded(size, ALIGNMENT) for size in sizes)  # type: ignore[return-value]

    @property
    def device_bytes(self) -> int:
        """Memory that the product takes of each device, in whole pages of the driver."""
        block, a, b, workspace = self.parts
        return _rounded(block + self.slots * (a + b) + workspace, GRANULARITY)

    def shape(self, piece: Piece) -> Shape:
        """Shape of one product."""
        rows = self.block(piece.block)[0].extent
        return Shape(piece.rows.extent, piece.cols.extent, piece.inner.extent, rows, self.cols)

    def shapes(self) -> set[Shape]:
        """Shapes of all products."""
        down, across = self.grid
        corners = {
            row * across + col for row in (0, down - 1) for col in (0, across - 1)
        }  # the others are like the first
        between = {depth: panel for panel, depth in enumerate(self.depths[1:-1], 1)}  # one panel per depth
        panels = {0, len(self.depths) - 1, *between.values()}
        return {self.shape(piece) for block in corners for panel in panels for piece in self.pieces(block, panel)}


def _part_per_device(m: int, n: int, devices: int) -> tuple[int, int]:
    """Rows and columns of each device's part of C: parts together copy least, and have whole rows if all copy alike."""
    ways = [(down, devices // down) for down in range(devices, 0, -1) if devices % down == 0]
    down, across = min(ways, key=lambda way: m * way[1] + n * way[0])
    return min(m, _rounded(ceil_div(m, down), EDGE)), min(n, _rounded(ceil_div(n, across), EDGE))


def made(m: int, n: int, k: int, rows: int, cols: int, deepest: int) -> Blocking:
    """Return the division into blocks of about `rows` x `cols`, and panels of at most `deepest` elements along k."""
    rows, cols = _even(m, rows), _even(n, cols)
    strip = min(_rounded(max(1, STRIP_BYTES // (FLOAT32_BYTES * cols)), EDGE), _rounded(ceil_div(rows, STRIPS), EDGE))
    return Blocking(m, n, k, rows, cols, depths(k, min(k, deepest)), min(strip, rows))


def _candidates(m: int, n: int, k: int, devices: int = 1) -> Iterator[Blocking]:
    """Yield divisions, those that copy least first; those that differ only in panel depth, the deepest first."""
    rows, cols = _part_per_device(m, n, devices)
    edge, before = max(rows, cols, SMALLEST_EDGE), None
    while True:
        deepest = DEEPEST
        least = min(512, max(THINNEST, min(m, n, edge) // 8))
        while deepest >= least:
            found = made(m, n, k, _even(rows, edge), _even(cols, edge), deepest)
            if found != before:
                yield found
            before, deepest = found, deepest // 2
        if edge <= SMALLEST_EDGE:
            return
        edge = max(SMALLEST_EDGE, int(edge / 2**0.25) // EDGE * EDGE)


def _with_workspace(found: Blocking, needs: Needs) -> Blocking:
    return replace(found, workspace=needs(found.shapes()))


def choose(m: int, n: int, k: int, limit: int, needs: Needs, devices: int = 1) -> Blocking | None:
    """Return the division that copies least within a memory limit, or None if no division fits.

    Parameters
    ----------
    m, n, k : int
        Extents, at least 1.
    limit : int
        Bytes of memory of each device.
    needs : callable
        Returns the bytes of a workspace that serves all products of `Blocking.shapes`.
    devices : int
        Number of devices that share the blocks.
    """
    for found in _candidates(m, n, k, devices):
        if found.device_bytes <= limit:
            complete = _with_workspace(found, needs)
            if complete.device_bytes <= limit:
                return complete
    return None


def smallest(m: int, n: int, k: int, needs: Needs, devices: int = 1) -> int:
    """Bytes of device memory of the division that takes least."""
    last = deque(_candidates(m, n, k, devices), maxlen=8)
    return min(_with_workspace(found, needs).device_bytes for found in last)
