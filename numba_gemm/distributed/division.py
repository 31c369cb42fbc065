"""Division of a product's matrices among a grid of ranks: the part of each matrix that each rank holds or computes.

A mesh of one dimension becomes a grid of one column if C is computed by rows or sums are added, and of one row if C is
computed by columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, TypeAlias

from ..streaming.blocking import Part
from .placements import COLS, ROWS, Algorithm, Placements, chunks, words

__all__ = ["Coordinate", "Cut", "Division", "Shapes", "divide", "shards"]

Coordinate: TypeAlias = tuple[int, int]  # row and column of the grid
Shape: TypeAlias = tuple[int, int]
Shapes: TypeAlias = Mapping[tuple[int, ...], Shape]  # of local shards, by coordinate on the mesh


class Cut(NamedTuple):
    """Parts of an axis, one per position along a dimension of the grid; one part for all ranks if that is None."""

    parts: tuple[Part, ...]
    dim: int | None = None

    def at(self, coordinate: Coordinate) -> Part:
        """Return the part of a rank."""
        return self.parts[0 if self.dim is None else coordinate[self.dim]]


@dataclass(frozen=True)
class Division:
    """Parts of A (rows, inner), of B (inner, columns) and of C (rows, columns) that each rank holds.

    Attributes
    ----------
    grid : tuple of int
        Rows and columns of the grid of ranks.
    algorithm : Algorithm
        Division of the work.
    a_rows, a_inner, b_inner, b_cols : Cut
        Parts of the operands.
    rows, cols : Cut
        Parts of C that are computed; with `Algorithm.reduces`, those that sums are added for.
    """

    grid: tuple[int, int]
    algorithm: Algorithm
    a_rows: Cut
    a_inner: Cut
    b_inner: Cut
    b_cols: Cut
    rows: Cut
    cols: Cut

    @property
    def shape(self) -> tuple[int, int, int]:
        """Extents M, N and K."""
        m, n, k = self.a_rows.parts[-1].end, self.b_cols.parts[-1].end, self.a_inner.parts[-1].end
        return m, n, k

    @property
    def coordinates(self) -> list[Coordinate]:
        """Coordinates of all ranks."""
        return [(i, j) for i in range(self.grid[0]) for j in range(self.grid[1])]

    def computes(self, coordinate: Coordinate) -> tuple[Part, Part]:
        """Rows and columns of C that a rank computes."""
        return self.rows.at(coordinate), self.cols.at(coordinate)

    def inner(self, coordinate: Coordinate) -> Part:
        """Range of k over which a rank computes sums, if those of all ranks are added."""
        cut = self.a_inner if self.a_inner.dim is not None else self.b_inner
        return cut.at(coordinate)

    def holds(self, coordinate: Coordinate) -> tuple[Part, Part]:
        """Rows and columns of C that a rank has in the end."""
        if self.algorithm.spreads:
            m, n, _ = self.shape
            return Part(0, m), Part(0, n)
        return self.computes(coordinate)


def shards(whole: Shape, placements: Placements, mesh: tuple[int, ...]) -> Shapes:
    """Return the shapes of all local shards of a matrix that is divided as DTensor does it."""

    def share(axis: int, at: tuple[int, ...]) -> int:
        own = (ROWS, COLS)[axis]
        if own not in placements:
            return whole[axis]
        dim = placements.index(own)
        return chunks(whole[axis], mesh[dim])[at[dim]].extent

    return {at: (share(0, at), share(1, at)) for at in product(*map(range, mesh))}


def divide(
    found: Algorithm,
    mesh: tuple[int, ...],
    a: Placements,
    b: Placements,
    a_shapes: Shapes,
    b_shapes: Shapes,
    out_shapes: Shapes | None = None,
) -> Division:
    """Return the division of a product, given the shapes of all local shards.

    Raises
    ------
    ValueError
        If they do not fit.
    """
    by_cols = len(mesh) == 1 and found.computed == (COLS,) and not found.reduces
    dims = (0, 1) if len(mesh) == 2 else (1,) if by_cols else (0,)  # dimensions of the grid, by those of the mesh
    grid = (mesh[0], mesh[1]) if len(mesh) == 2 else (1, mesh[0]) if by_cols else (mesh[0], 1)
    a_rows, a_inner = (_cut("a", axis, a, a_shapes, mesh, dims) for axis in (0, 1))
    b_inner, b_cols = (_cut("b", axis, b, b_shapes, mesh, dims) for axis in (0, 1))
    m, k, n = a_rows.parts[-1].end, a_inner.parts[-1].end, b_cols.parts[-1].end
    if k != b_inner.parts[-1].end:
        raise ValueError(
            f"a has shape {(m, k)} and b {(b_inner.parts[-1].end, n)}, as a whole; expected (M, K) and (K, N); pass "
            "operands with equal K"
        )
    if found.reduces and None not in (a_inner.dim, b_inner.dim) and a_inner != b_inner:
        raise ValueError(
            f"a has {[part.extent for part in a_inner.parts]} columns on the ranks and b "
            f"{[part.extent for part in b_inner.parts]} rows; expected the same numbers; pass shards that fit"
        )
    given: tuple[Cut | None, Cut | None] = (None, None)
    if out_shapes is not None:
        given = _cut("out", 0, found.out, out_shapes, mesh, dims), _cut("out", 1, found.out, out_shapes, mesh, dims)
    rows = _of_result(0, a_rows, found, mesh, dims, given[0])
    cols = _of_result(1, b_cols, found, mesh, dims, given[1])
    if out_shapes is not None:
        expected = (Cut((Part(0, m),)), Cut((Part(0, n),))) if found.spreads else (rows, cols)
        if given != expected:
            raise ValueError(
                f"out has shards of shapes {sorted(set(out_shapes.values()))}; expected shards of rows "
                f"{[part.extent for part in expected[0].parts]} and columns "
                f"{[part.extent for part in expected[1].parts]}, placed {words(found.out)}; pass an out of these shapes"
            )
    return Division(grid, found, a_rows, a_inner, b_inner, b_cols, rows, cols)


def _of_result(
    axis: int, like: Cut, found: Algorithm, mesh: tuple[int, ...], dims: tuple[int, ...], given: Cut | None
) -> Cut:
    """Return the parts of an axis of C: those of the operand if it is divided alike, else those of `out`, or equal."""
    own = (ROWS, COLS)[axis]
    if own not in found.computed:
        return Cut((Part(0, like.parts[-1].end),))
    where = found.computed.index(own)
    if mesh[where] == 1:
        return Cut((Part(0, like.parts[-1].end),))
    if like.dim == dims[where]:
        return like
    if given is not None and given.dim is not None and given.parts[-1].end == like.parts[-1].end:
        return given
    return Cut(chunks(like.parts[-1].end, mesh[where]), dims[where])


def _cut(
    name: str, axis: int, placements: Placements, shapes: Shapes, mesh: tuple[int, ...], dims: tuple[int, ...]
) -> Cut:
    """Return the parts of an axis of a matrix, from the shapes of its shards.

    Raises
    ------
    ValueError
        If shards that share an axis have different extents there.
    """
    own = (ROWS, COLS)[axis]
    where = placements.index(own) if own in placements else None
    extents: dict[int, int] = {}
    for coordinate, shape in sorted(shapes.items()):
        position = 0 if where is None else coordinate[where]
        if extents.setdefault(position, shape[axis]) != shape[axis]:
            raise ValueError(
                f"{name} has a shard of shape {shape} at {coordinate} of the mesh; expected {extents[position]} "
                f"{'columns' if axis else 'rows'}, as other ranks have there, for the placement {words(placements)}; "
                "pass shards that fit, or another placement"
            )
    parts, begin = [], 0
    for position in range(1 if where is None else mesh[where]):
        parts.append(Part(begin, begin + extents[position]))
        begin = parts[-1].end
    return Cut(tuple(parts), None if where is None or mesh[where] == 1 else dims[where])
