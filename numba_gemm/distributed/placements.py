"""Placements of matrices on a mesh of ranks, and the algorithms that multiply matrices of given placements.

A placement names for one dimension of the mesh how a matrix is divided along it, as PyTorch's DTensor does. A mesh has
one or two dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from ..device.units import ceil_div
from ..streaming.blocking import Part

__all__ = ["COLS", "ROWS", "WHOLE", "Algorithm", "Placement", "Placements", "algorithm", "chunks", "moved", "placement"]

Placement: TypeAlias = Literal["Shard(0)", "Shard(1)", "Replicate", "other"]
Placements: TypeAlias = tuple[Placement, ...]  # one per dimension of the mesh
Travel: TypeAlias = Literal["m", "n", "k"]
ROWS: Placement = "Shard(0)"
COLS: Placement = "Shard(1)"
WHOLE: Placement = "Replicate"
OTHER: Placement = "other"
STATIONARY: tuple[Placements, ...] = ((ROWS,), (COLS,), (ROWS, COLS))


def placement(given: Any) -> Placement:
    """Return a placement, given its name or PyTorch's object; "other" for one of which no algorithm knows."""
    name = given if isinstance(given, str) else type(given).__name__
    if name == "Replicate()":  # as PyTorch writes it
        return WHOLE
    if name in (ROWS, COLS, WHOLE):
        return name
    if name == "Shard" and not isinstance(given, str) and given.dim in (0, 1, -2, -1):
        return ROWS if given.dim in (0, -2) else COLS
    return OTHER


def chunks(extent: int, count: int) -> tuple[Part, ...]:
    """Divide an extent as DTensor does: equal parts, rounded up; the last ones are smaller or empty."""
    each = ceil_div(extent, count)
    return tuple(Part(min(i * each, extent), min((i + 1) * each, extent)) for i in range(count))


class Problem(NamedTuple):
    """Placements of the operands and of the result that is asked for, None for any."""

    a: Placements
    b: Placements
    out: Placements | None


@dataclass(frozen=True)
class Algorithm:
    """Division of a product among ranks.

    Attributes
    ----------
    out : tuple of str
        Placement of the result.
    computed : tuple of str
        Placement in which it is computed; if `out` is "Replicate", blocks are broadcast after that.
    a_travels, b_travels : str or None
        Axis along which panels of A and of B are cut that travel from their owners to other ranks; None for an operand
        that stays.
    reduces : bool
        True if every rank computes the sums over its own part of k, which are then added.
    """

    out: Placements
    computed: Placements
    a_travels: Travel | None = None
    b_travels: Travel | None = None
    reduces: bool = False

    @property
    def spreads(self) -> bool:
        """True if blocks of the result are broadcast to the ranks that did not compute them."""
        return self.out != self.computed


def algorithm(a: Placements, b: Placements, out: Placements | None = None) -> Algorithm | None:
    """Return how to multiply operands of these placements; None if one of the three has to be moved first.

    The result is placed where no sums have to be sent, if that is possible.
    """
    if len(a) == 2:
        return _on_two_dimensions(a, b, out)
    (x,), (y,) = a, b
    if OTHER in (x, y):
        return None
    if out == (WHOLE,) or (out is None and x == y == WHOLE):
        if x == y == WHOLE:
            return Algorithm((WHOLE,), (WHOLE,))
        found = algorithm(a, b)
        return found and Algorithm((WHOLE,), found.computed, found.a_travels, found.b_travels, found.reduces)
    by_rows: Travel | None = {ROWS: "k", COLS: "n"}.get(y)  # type: ignore[assignment]
    by_cols: Travel | None = {ROWS: "m", COLS: "k"}.get(x)  # type: ignore[assignment]
    if out is None:
        out = (ROWS,) if x == ROWS or y == ROWS else (COLS,)
    if out == (ROWS,) and x in (ROWS, WHOLE):
        return Algorithm(out, out, b_travels=by_rows)
    if out == (COLS,) and y in (COLS, WHOLE):
        return Algorithm(out, out, a_travels=by_cols)
    if x in (COLS, WHOLE) and y in (ROWS, WHOLE) and out in STATIONARY:
        return Algorithm(out, out, reduces=True)
    return None


def _on_two_dimensions(a: Placements, b: Placements, out: Placements | None) -> Algorithm | None:
    """Return SUMMA: A's panels travel along rows of the mesh, and B's along its columns."""
    wanted: Placements = (ROWS, COLS)
    fits = out in (None, wanted) and all(x in (ROWS, WHOLE) and y in (COLS, WHOLE) for x, y in (a, b))
    if not fits:
        return None
    return Algorithm(wanted, wanted, "k" if a[1] == COLS else None, "k" if b[0] == ROWS else None)


def moved(a: Placements, b: Placements, out: Placements | None) -> Problem:
    """Return the placements to which DTensors are moved if there is no algorithm for theirs.

    The result is moved from there to the placement that is asked for.
    """
    if len(a) == 2:
        return Problem((ROWS, COLS), (ROWS, COLS), (ROWS, COLS))
    if out == (COLS,):
        return Problem(_or(a, WHOLE), (COLS,), (COLS,))
    return Problem((ROWS,), _or(b, WHOLE), (WHOLE,) if out == (WHOLE,) else (ROWS,))


def _or(given: Placements, instead: Placement) -> Placements:
    return tuple(instead if one == OTHER else one for one in given)


def words(placements: Sequence[str]) -> str:
    """Return placements as text, such as "(Shard(0), Shard(1))"."""
    return f"({', '.join(placements)})" if len(placements) > 1 else placements[0]
