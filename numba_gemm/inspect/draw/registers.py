"""Picture of the registers of a thread tile, their banks, and the multiply-adds that wait for a bank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..register_tile import RegisterTile
from .canvas import FONT, WIDTH, new_figure
from .palette import ACCENT, CHOICE, OTHER, OUTLINE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BANK_COLOURS = ("0.88", "#F0E442", ACCENT, OTHER)
MARGIN = 0.35  # between C and the registers of A and of B, in cells


def register_banks(
    tiles: Mapping[str, tuple[RegisterTile, Sequence[Sequence[bool]]]], banks: int, title: str = ""
) -> Figure:
    """Draw the registers of thread tiles, coloured by bank, and outline the FFMAs that wait.

    Parameters
    ----------
    tiles : mapping from str to tuple of RegisterTile and sequence of sequence of bool
        Allocations by title, each with the FFMAs that wait, by row and column of C; see
        `numba_gemm.inspect.register_tile`.
    banks : int
        Number of banks, up to four; a register's bank is the remainder of its number.
    title : str
        Title of the figure.

    Returns
    -------
    matplotlib.figure.Figure
        A figure with one panel per allocation: the registers of A to the left of those of C, those of B above.

    Raises
    ------
    ValueError
        for another number of banks, or if there are no tiles.
    """
    from matplotlib.patches import Patch

    if not tiles or not 1 <= banks <= len(BANK_COLOURS):
        raise ValueError(f"{len(tiles)} tiles and {banks} banks: expected tiles, and 1 to {len(BANK_COLOURS)} banks")
    figure = new_figure(WIDTH, 4.3)
    panels = figure.subplots(1, len(tiles), squeeze=False)[0]
    for axes, (name, (tile, waits)) in zip(panels, tiles.items(), strict=True):
        _draw_tile(axes, tile, waits, banks)
        waiting, total = sum(map(sum, waits)), len(tile.a) * len(tile.b)
        axes.set_title(f"{name}: {waiting} of {total} FFMA wait", fontsize=FONT)
    look: dict[str, Any] = {"edgecolor": OUTLINE, "linewidth": 0.6}
    handles = [Patch(facecolor=BANK_COLOURS[bank], label=f"bank {bank}", **look) for bank in range(banks)]
    handles.append(Patch(facecolor="white", edgecolor=CHOICE, linewidth=3, label="waits"))
    figure.legend(handles=handles, loc="outside lower center", ncols=banks + 1, fontsize=FONT - 1)
    if title:
        figure.suptitle(title, fontsize=FONT + 1)
    return figure


def _draw_tile(axes: Axes, tile: RegisterTile, waits: Sequence[Sequence[bool]], banks: int) -> None:
    from matplotlib.patches import Rectangle

    near = -1 - MARGIN
    cells: list[tuple[float, float, int, bool]] = [(near, row, number, False) for row, number in enumerate(tile.a)]
    cells += [(col, near, number, False) for col, number in enumerate(tile.b)]
    cells += [(col, row, tile.c[row][col], waits[row][col]) for row in range(len(tile.a)) for col in range(len(tile.b))]
    for x, y, number, waiting in cells:
        look = BANK_COLOURS[number % banks]
        axes.add_patch(Rectangle((x, y), 1, 1, facecolor=look, edgecolor="white", linewidth=2))
        if waiting:
            side = 0.86
            corner = (x + (1 - side) / 2, y + (1 - side) / 2)
            axes.add_patch(Rectangle(corner, side, side, fill=False, edgecolor=CHOICE, linewidth=3))
        axes.text(x + 0.5, y + 0.5, f"R{number}", ha="center", va="center", fontsize=FONT)
    for place, name in (((near + 0.5, near + 0.6), "A"), ((len(tile.b) / 2, near - 0.25), "B")):
        axes.text(*place, name, ha="center", va="center", fontsize=FONT, weight="bold")
    axes.set_xlim(near - 0.1, len(tile.b) + 0.1)
    axes.set_ylim(len(tile.a) + 0.1, near - 0.6)
    axes.set_aspect("equal")
    axes.set_axis_off()
