"""Empty figures of a common size, and their labels, text colours and outlines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .palette import OUTLINE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, DPI = 7.2, 100  # of a figure, in inches (about what fits in a notebook) and dots per inch
FONT, SMALLEST_FONT = 9, 6.5


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure; width and height in inches."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError("pictures need matplotlib: pip install matplotlib") from None
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure(figsize=(width, height), dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))


def new_cells(rows: int, cols: int, tall: float = 1.0) -> tuple[Figure, Axes, float]:
    """Return a figure for rows and columns of cells, its axes, and a cell's width in points; `tall` is height/width."""
    cell = min(0.42, (WIDTH - 1.5) / max(cols, 1), 8 / max(rows * tall, 1))
    made = new_figure(min(WIDTH, max(cols * cell + 1.5, 6.0)), rows * cell * tall + 1.5)
    return made, made.add_subplot(), 72 * cell


def font_size(cell: float, letters: int) -> float:
    """Return the font size at which this many letters fit into a cell, or 0 if it would be too small to read."""
    size = min(FONT, 0.9 * cell / (0.62 * max(letters, 1)), 0.8 * cell)
    return size if size >= SMALLEST_FONT else 0


def ink_at(image: Any, value: float) -> str:
    """Return black or white, whichever is easier to read where an image has this value."""
    return ink_on(image.to_rgba(value))


def ink_on(background: Sequence[float]) -> str:
    """Return black or white, whichever is easier to read on a background."""
    red, green, blue = background[:3]
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, in the plural unless the count is 1."""
    return f"{count:,} {noun}" + ("" if count == 1 else "es" if noun.endswith("s") else "s")


def set_labels(axes: Axes, title: str, across: str, down: str) -> None:
    """Set a title and the labels of both axes."""
    axes.set_title(title, fontsize=FONT + 1)
    axes.set_xlabel(across, fontsize=FONT)
    axes.set_ylabel(down, fontsize=FONT)
    axes.tick_params(labelsize=FONT - 1)


def alt_text(figure: Figure) -> str:
    """Return a figure's alternative text: its label if it has one, else its titles, labels of axes and named rows.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        Any figure.
    """
    if figure.get_label():
        return str(figure.get_label())
    parts = [figure.get_suptitle(), *(part.get_suptitle() for part in figure.subfigs)]
    for axes in figure.axes:
        parts += [axes.get_title(loc) for loc in ("left", "center", "right")]
        rows = [label.get_text() for label in axes.get_yticklabels()]
        named = ", ".join(row for row in rows if re.search("[A-Za-z]{2}", row) and "$" not in row)
        labels = (("horizontal axis", axes.get_xlabel()), ("vertical axis", axes.get_ylabel()), ("rows", named))
        parts += [f"{axis}: {label}" for axis, label in labels if label]
    said = ("; ".join(filter(None, part.splitlines())) for part in parts)
    return ". ".join(dict.fromkeys(part.rstrip(".") for part in said if part)) or "figure"


def outline_groups(
    axes: Axes,
    groups: np.ndarray[Any, Any],
    width: float = 1.6,
    colour: str = OUTLINE,
    corner: tuple[int, int] = (0, 0),
) -> None:
    """Draw lines between neighbouring cells of different groups; the first cell's row and column are `corner`."""
    from matplotlib.collections import LineCollection

    across = np.argwhere(groups[:, 1:] != groups[:, :-1]) + corner
    down = np.argwhere(groups[1:] != groups[:-1]) + corner
    sides = [[(col + 0.5, row - 0.5), (col + 0.5, row + 0.5)] for row, col in across]
    sides += [[(col - 0.5, row + 0.5), (col + 0.5, row + 0.5)] for row, col in down]
    axes.add_collection(LineCollection(sides, colors=colour, linewidths=width, capstyle="projecting"), autolim=False)
