"""Schedule of a distributed product: what each rank sends, receives and multiplies, in order, as data.

Every rank derives the same panels from agreed facts. It multiplies panels that it holds itself first, while others
arrive in one of two slots. Where panels are broadcast, all ranks take part in the same order. Where their owners copy
them to the other ranks' slots, each rank begins with another owner's, so that all of them send at any time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

from ..device.units import ceil_div
from ..streaming.blocking import Part, divided
from .division import Coordinate, Cut, Division

__all__ = [
    "SLOTS",
    "Add",
    "Chunk",
    "Fetch",
    "Give",
    "Keep",
    "Multiply",
    "Operand",
    "Panel",
    "Piece",
    "Reduce",
    "Spread",
    "Step",
    "Take",
    "along",
    "chunk_steps",
    "chunks_of",
    "copied_chunk_steps",
    "copied_steps",
    "given_elements",
    "held",
    "panels_of",
    "spread_steps",
    "steps",
    "travelling",
]

SLOTS = 2  # panels of an operand, or chunks of C, in flight
Operand: TypeAlias = Literal["a", "b"]


class Piece(NamedTuple):
    """Range of a panel that one rank of a row or column of the grid sends to the others."""

    root: int
    part: Part


class Panel(NamedTuple):
    """Range of an axis that is multiplied at once, and the pieces of A and B that travel for it.

    Attributes
    ----------
    axis : str
        Axis that is cut: "m", "n" or "k".
    part : Part
        Range.
    a, b : tuple of Piece
        Pieces in order; empty for an operand that every rank has.
    """

    axis: Literal["m", "n", "k"]
    part: Part
    a: tuple[Piece, ...]
    b: tuple[Piece, ...]


class Fetch(NamedTuple):
    """Take part in the broadcasts of an operand's panel, or have it copied by its owners, to a slot."""

    operand: Operand
    panel: int
    slot: int


class Multiply(NamedTuple):
    """Multiply a panel; an operand is read from its slot, or where it is if that is None.

    `first` is True if the product begins its sums.
    """

    panel: int
    a_slot: int | None
    b_slot: int | None
    first: bool


class Chunk(NamedTuple):
    """Rows and columns of C for which sums are added on one rank, `root`."""

    root: int
    rows: Part
    cols: Part


class Reduce(NamedTuple):
    """Multiply own parts of A and B for a chunk of C, and add the sums of all ranks on its root."""

    chunk: Chunk
    slot: int


class Spread(NamedTuple):
    """Broadcast a block of C from the rank that has it."""

    root: int
    rows: Part
    cols: Part


class Give(NamedTuple):
    """Multiply own parts of A and B for a chunk of C of another rank, which copies it from `begin` on."""

    chunk: Chunk
    begin: int


class Keep(NamedTuple):
    """Multiply own parts of A and B for this rank's own chunk of C, in place."""

    chunk: Chunk


class Take(NamedTuple):
    """Copy another rank's sums for this rank's chunk of C to a slot."""

    chunk: Chunk
    rank: int
    begin: int
    slot: int


class Add(NamedTuple):
    """Add what is in a slot to this rank's chunk of C."""

    chunk: Chunk
    slot: int


Step: TypeAlias = Fetch | Multiply | Reduce | Spread | Give | Keep | Take | Add


def _pieces(cut: Cut | None, part: Part) -> tuple[Piece, ...]:
    if cut is None:
        return ()
    found = ((root, Part(max(own.begin, part.begin), min(own.end, part.end))) for root, own in enumerate(cut.parts))
    return tuple(Piece(root, own) for root, own in found if own.extent > 0)


def travelling(division: Division) -> tuple[Cut | None, Cut | None]:
    """Return the parts along which A and B are cut in panels; None for an operand that stays."""
    found = division.algorithm
    a = {"k": division.a_inner, "m": division.a_rows, None: None}[found.a_travels]
    b = {"k": division.b_inner, "n": division.b_cols, None: None}[found.b_travels]
    return a if a and a.dim is not None else None, b if b and b.dim is not None else None


def panels_of(division: Division, least: int = 1, deepest: int | None = None, most: int | None = None) -> list[Panel]:
    """Cut a product into panels at the borders between ranks.

    Parameters
    ----------
    division : Division
        Division of the product, without `Algorithm.reduces`.
    least : int
        Elements along the axis, up to which neighbouring ranges are joined.
    deepest : int, optional
        Elements from which a range of one rank is cut into equal ones.
    most : int, optional
        Largest number of panels.
    """
    a, b = travelling(division)
    axis = division.algorithm.a_travels or division.algorithm.b_travels or "k"
    extent = dict(zip("mnk", division.shape))[axis]
    borders = sorted({0, extent, *(part.end for cut in (a, b) if cut is not None for part in cut.parts)})
    ranges = [
        part
        for begin, end in pairwise(borders)
        for part in (_even(Part(begin, end), deepest) if deepest else [Part(begin, end)])
    ]
    joined: list[Part] = []
    for part in ranges:
        if joined and joined[-1].extent < max(least, ceil_div(extent, most) if most else 0):
            joined[-1] = Part(joined[-1].begin, part.end)
        else:
            joined.append(part)
    if len(joined) > 1 and joined[-1].extent < least:
        joined[-2:] = [Part(joined[-2].begin, joined[-1].end)]
    return [Panel(axis, part, _pieces(a, part), _pieces(b, part)) for part in joined or [Part(0, extent)]]


def _even(part: Part, most: int) -> list[Part]:
    count = ceil_div(part.extent, most)
    return [
        Part(part.begin + own.begin, part.begin + own.end) for own in divided(part.extent, ceil_div(part.extent, count))
    ]


def held(panel: Panel, operand: Operand, coordinate: Coordinate) -> bool:
    """Return True if a rank has all of a panel's operand without receiving any."""
    pieces = panel.a if operand == "a" else panel.b
    return all(piece.root == along(operand, coordinate) for piece in pieces)


def along(operand: Operand, coordinate: Coordinate) -> int:
    """Return a rank's position among those that share panels: A's along a row of the grid, B's along a column."""
    return coordinate[1 if operand == "a" else 0]


def steps(panels: Sequence[Panel], coordinate: Coordinate) -> Iterator[Step]:
    """Yield a rank's steps if panels are broadcast, in the order in which its host issues them.

    A slot is filled again only after the product that reads it; the executor makes the second stream wait for that.
    """
    order = sorted(range(len(panels)), key=lambda i: not _is_held(panels[i], coordinate))
    slots: dict[tuple[str, int], int] = {}
    reader: dict[tuple[str, int], int] = {}  # panel that is read from a slot
    counts = {"a": 0, "b": 0}
    done: set[int] = set()

    def products(last: int | None) -> Iterator[Multiply]:
        """Yield the products up to that of a panel, or all."""
        while order and last not in done:
            panel = order.pop(0)
            yield Multiply(
                panel, slots.get(("a", panel)), slots.get(("b", panel)), panels[panel].axis != "k" or not done
            )
            done.add(panel)

    for index, panel in enumerate(panels):
        for operand, pieces in (("a", panel.a), ("b", panel.b)):
            if not pieces:
                continue
            slot = counts[operand] % SLOTS
            counts[operand] += 1
            if (before := reader.pop((operand, slot), None)) is not None:
                yield from products(before)
            if not held(panel, operand, coordinate):  # type: ignore[arg-type]
                slots[operand, index] = slot
                reader[operand, slot] = index
            yield Fetch(operand, index, slot)  # type: ignore[arg-type]
    yield from products(None)


def copied_steps(panels: Sequence[Panel], coordinate: Coordinate, grid: Coordinate) -> Iterator[Step]:
    """Yield a rank's steps if others copy panels to its slots: in an order of its own, one panel per slot and turn.

    Parameters
    ----------
    panels : sequence of Panel
        Panels of the product.
    coordinate, grid : tuple of int
        Place of the rank, and extents of the grid.
    """
    operands: tuple[Operand, ...] = ("a", "b")
    begun, turn = False, 0
    for index in _apart(panels, coordinate, grid):
        panel, slot = panels[index], turn % SLOTS
        slots = {operand: slot for operand in operands if not held(panel, operand, coordinate)}
        for operand in slots:
            yield Fetch(operand, index, slot)
        yield Multiply(index, slots.get("a"), slots.get("b"), panel.axis != "k" or not begun)
        begun, turn = True, turn + bool(slots)


def _apart(panels: Sequence[Panel], coordinate: Coordinate, grid: Coordinate) -> list[int]:
    """Return an order of panels in which the ranks of a row or column receive from different ranks at a time.

    Along one dimension, panels that the rank holds come first.
    """
    (row, col), (rows, cols) = coordinate, grid
    first = (row * cols + col * rows) * len(panels) // (rows * cols) % max(len(panels), 1)
    turned = [*range(first, len(panels)), *range(first)]
    own = {i for i in turned if _is_held(panels[i], coordinate)} if 1 in grid else set()
    return sorted(turned, key=lambda i: i not in own)


def _is_held(panel: Panel, coordinate: Coordinate) -> bool:
    return held(panel, "a", coordinate) and held(panel, "b", coordinate)


def chunks_of(division: Division, most_rows: int) -> list[Chunk]:
    """Cut C into chunks of at most `most_rows` rows whose sums are added, in order of their roots."""
    found = []
    for coordinate in division.coordinates:
        rows, cols = division.computes(coordinate)
        if rows.extent and cols.extent:
            found += [Chunk(coordinate[0], part, cols) for part in _even(rows, most_rows)]
    return found


def chunk_steps(chunks: Sequence[Chunk], division: Division) -> Iterator[Step]:
    """Yield the steps of all ranks for chunks whose sums are added."""
    for index, chunk in enumerate(chunks):
        yield Reduce(chunk, index % SLOTS)
        if division.algorithm.spreads:
            yield Spread(*chunk)


def copied_chunk_steps(chunks: Sequence[Chunk], coordinate: Coordinate, ranks: int) -> Iterator[Step]:
    """Yield a rank's steps for chunks, at most one per rank, whose sums each root copies from the others and adds."""
    own = coordinate[0]
    mine = [one for one in chunks if one.root == own]
    for chunk in chunks:
        if chunk.root != own:
            yield Give(chunk, given_elements(chunks, own, chunk.root))
    for chunk in mine:
        yield Keep(chunk)
        for i in range(1, ranks):
            other = (own + i) % ranks
            yield Take(chunk, other, given_elements(chunks, other, own), (i - 1) % SLOTS)
            yield Add(chunk, (i - 1) % SLOTS)


def given_elements(chunks: Sequence[Chunk], rank: int, before: int | None = None) -> int:
    """Elements of the chunks that a rank computes for others, or for those before one of them."""
    return sum(
        one.rows.extent * one.cols.extent
        for one in chunks
        if one.root != rank and (before is None or one.root < before)
    )


def spread_steps(division: Division) -> Iterator[Step]:
    """Yield the broadcasts of C's blocks, if every rank is to have all of them."""
    if division.algorithm.spreads and not division.algorithm.reduces:
        for coordinate in division.coordinates:
            yield Spread(max(coordinate), *division.computes(coordinate))
