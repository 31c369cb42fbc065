"""Pictures of planned work, without a trace: the events of a thread, and the tiles of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .canvas import FONT, WIDTH, new_figure
from .palette import ACCENT, OTHER, OUTLINE, ramp

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Event(NamedTuple):
    """An event of a thread, in a picture of `sequence`.

    Attributes
    ----------
    kind : str
        Row of the event; "barrier" is a line across all rows.
    work : int
        Length, in instructions.
    text : str
        Text that is written into the box.
    needs : int or None
        Position in the sequence of an earlier event whose result this event needs.
    """

    kind: str
    work: int
    text: str = ""
    needs: int | None = None


def sequence(events: Mapping[str, Sequence[Event]], colours: Mapping[str, str]) -> Figure:
    """Draw the events of a thread one after another, with arrows for the dependences between them.

    Parameters
    ----------
    events : mapping from str to sequence of Event
        Sequences by title; each has its own axes, one below the other.
    colours : mapping from str to str
        Colour of each kind of event, in the order of the rows.

    Returns
    -------
    matplotlib.figure.Figure
        A figure with a box per event except barriers, and an arrow to the start of each event from the end of the event
        that it needs.

    Raises
    ------
    ValueError
        for a kind without a colour, or an event that needs one that is not before it.
    """
    if unknown := {event.kind for each in events.values() for event in each} - {*colours, "barrier"}:
        raise ValueError(f"events are of kinds {', '.join(sorted(unknown))}; colours has {', '.join(colours)}")
    kinds = list(colours)
    figure = new_figure(WIDTH, 0.5 + 1.9 * len(events))
    panels = figure.subplots(len(events), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, each) in zip(panels, events.items(), strict=True):
        at = 0
        ends: list[int] = []
        for place, event in enumerate(each):
            if event.needs is not None and not 0 <= event.needs < place:
                raise ValueError(f"event {place} of {title} needs event {event.needs}, which is not before it")
            if event.kind == "barrier":
                axes.axvline(at + event.work / 2, color=OUTLINE, linewidth=2)
            else:
                row = kinds.index(event.kind)
                axes.broken_barh([(at, event.work)], (row - 0.35, 0.7), facecolor=colours[event.kind])
                axes.text(at + event.work / 2, row, event.text, ha="center", va="center", fontsize=FONT - 1)
                if event.needs is not None:
                    tail = (ends[event.needs], kinds.index(each[event.needs].kind))
                    axes.annotate("", xy=(at, row), xytext=tail, arrowprops={"arrowstyle": "->", "color": "0.25"})
            at += event.work
            ends.append(at)
        axes.set_yticks(range(len(kinds)), labels=kinds)
        axes.set_ylim(len(kinds) - 0.4, -0.6)
        axes.tick_params(labelsize=FONT)
        axes.set_title(title, fontsize=FONT + 1)
    panels[-1].set_xlabel("instructions of the thread that access memory or multiply", fontsize=FONT)
    return figure


class Piece(NamedTuple):
    """A block's share of a tile of C in `schedule`: its length in k-tiles, and True if it is the whole tile."""

    block: int
    tile: int
    length: int
    whole: bool


def schedule(pieces: Iterable[Piece | tuple[int, int, int, bool]], blocks: int, title: str) -> Figure:
    """Draw the tiles of C that each block works on over time, if each k-tile takes one unit of time.

    Parameters
    ----------
    pieces : iterable of Piece
        Pieces, in the order in which each block takes them.
    blocks : int
        Number of blocks; each is a row.
    title : str
        Title, to which the length and the share of the time in use are added.

    Returns
    -------
    matplotlib.figure.Figure
        A figure with one bar per piece: whole tiles in two alternating shades of green, parts of tiles in two other
        alternating colours.

    Raises
    ------
    ValueError
        if a piece belongs to a block that does not exist, or if there are no pieces.
    """
    taken = [Piece(*piece) for piece in pieces]
    if not taken or not all(0 <= piece.block < blocks for piece in taken):
        raise ValueError(f"{len(taken)} pieces of blocks 0 to {blocks - 1}: expected one or more, of these blocks")
    few = blocks < 20  # enough room for words
    figure = new_figure(WIDTH, 1.4 + 2.6 * min(1, max(blocks / 40, 0.4)))
    axes = figure.add_subplot()
    until, made = [0] * blocks, [0] * blocks
    for block, tile, length, whole in taken:
        look = ramp("c")(0.45 + 0.4 * (made[block] % 2)) if whole else (OTHER, ACCENT)[tile % 2]
        edge: dict[str, Any] = {"edgecolor": OUTLINE, "linewidth": 0.6} if few else {"linewidth": 0}
        axes.barh(block, length, left=until[block], height=1, color=look, **edge)
        if few:
            axes.text(until[block] + length / 2, block, f"tile {tile}", ha="center", va="center", fontsize=FONT - 1)
        until[block], made[block] = until[block] + length, made[block] + 1
    used = sum(until) / (blocks * max(until))
    axes.set_title(f"{title}: {max(until):,} k-tiles long, {used:.1%} of the time used", fontsize=FONT + 1)
    axes.set_xlim(0, max(until) * 1.01)
    axes.set_ylim(blocks - 0.5, -0.5)
    axes.set_xlabel("time, in k-tiles", fontsize=FONT)
    axes.set_ylabel("multiprocessor", fontsize=FONT)
    if few:
        axes.set_xticks(range(max(until) + 1))
        axes.set_yticks(range(blocks))
        return figure
    axes.bar(0, 0, color=ramp("c")(0.85), label="whole tile")
    if not all(piece.whole for piece in taken):
        axes.bar(0, 0, color=OTHER, label="part of a tile")
        axes.bar(0, 0, color=ACCENT, label="part of the next")
    figure.legend(loc="outside lower right", ncols=3, fontsize=FONT - 1)
    return figure
