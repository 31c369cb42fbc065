"""Picture of the memory hierarchy of a GPU: capacity, bandwidth and latency of each level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from .canvas import FONT, WIDTH, new_figure
from .palette import ACCENT, GRID, OUTLINE, UNUSED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Memory(NamedTuple):
    """A level of `memory_hierarchy`.

    Attributes
    ----------
    name, size, scope : str
        Name, capacity (empty if it depends on the machine), and what can access it, as text.
    tb_s : float
        Bandwidth of all threads together, in TB/s.
    cycles : float or None
        Latency of one read in clock cycles, if known.
    per_multiprocessor : bool
        True if each multiprocessor has its own.
    """

    name: str
    size: str
    scope: str
    tb_s: float
    cycles: float | None = None
    per_multiprocessor: bool = False


def memory_hierarchy(levels: Sequence[Memory], multiprocessors: int, title: str) -> Figure:
    """Draw the levels of a memory hierarchy from the nearest to the farthest, with their bandwidths.

    Parameters
    ----------
    levels : sequence of Memory
        Levels, the nearest first; those that each multiprocessor has come before all others.
    multiprocessors : int
        Number of multiprocessors.
    title : str
        Title, such as the origin of the numbers.

    Returns
    -------
    matplotlib.figure.Figure
        A figure with one row per level: a box that is wider the farther the level is, and a bar for its bandwidth on a
        logarithmic axis. A frame encloses the levels of a multiprocessor.

    Raises
    ------
    ValueError
        if there are no levels, if a bandwidth is not positive, or if a level of a multiprocessor follows one of the
        whole GPU.
    """
    own = sum(level.per_multiprocessor for level in levels)
    if not levels or not all(level.tb_s > 0 for level in levels):
        raise ValueError(f"{len(levels)} levels: expected one or more, with positive bandwidths")
    if not all(level.per_multiprocessor for level in levels[:own]):
        raise ValueError(f"expected the {own} levels of a multiprocessor before those of the whole GPU")
    figure = new_figure(WIDTH, 0.8 + 0.82 * len(levels))
    boxes, bars = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    _draw_boxes(boxes, levels, own, multiprocessors)
    _draw_bars(bars, levels)
    boxes.set_ylim(len(levels) - 0.45, -0.85)
    figure.suptitle(title, fontsize=FONT + 1)
    told = ", ".join(f"{level.name} {level.tb_s:.3g} TB/s" for level in levels)
    figure.set_label(f"Memory hierarchy from the nearest to the farthest level: {told}. {title}")
    return figure


def _draw_boxes(axes: Axes, levels: Sequence[Memory], own: int, multiprocessors: int) -> None:
    from matplotlib.patches import Rectangle

    widths = [0.62 + 0.38 * place / max(len(levels) - 1, 1) for place in range(len(levels))]
    for place, (level, width) in enumerate(zip(levels, widths, strict=True)):
        look = ACCENT if level.per_multiprocessor else UNUSED
        axes.add_patch(Rectangle((-width / 2, place - 0.3), width, 0.6, facecolor=look, edgecolor=OUTLINE))
        name = f"{level.name}: {level.size}" if level.size else level.name
        axes.text(0, place - 0.13, name, ha="center", va="center", fontsize=FONT, weight="bold")
        axes.text(0, place + 0.14, level.scope, ha="center", va="center", fontsize=FONT - 1)
        if place:
            arrow = {"arrowstyle": "<->", "color": OUTLINE}
            axes.annotate("", xy=(0, place - 0.3), xytext=(0, place - 0.7), arrowprops=arrow)
    if own:
        side = widths[own - 1] / 2 + 0.02
        corner, extent = (-side, -0.75), (2 * side, own + 0.14)
        axes.add_patch(Rectangle(corner, *extent, fill=False, edgecolor=OUTLINE, linestyle="--"))
        axes.text(
            0, -0.53, f"in each of {multiprocessors} multiprocessors", ha="center", va="center", fontsize=FONT - 1
        )
    axes.set_xlim(-0.51, 0.51)
    axes.set_axis_off()


def _draw_bars(axes: Axes, levels: Sequence[Memory]) -> None:
    least, most = min(level.tb_s for level in levels), max(level.tb_s for level in levels)
    colours = [ACCENT if level.per_multiprocessor else UNUSED for level in levels]
    axes.barh(range(len(levels)), [level.tb_s for level in levels], 0.5, color=colours, edgecolor=OUTLINE)
    for place, level in enumerate(levels):
        waits = "" if level.cycles is None else f"\n{level.cycles:.0f} cycles"
        axes.text(level.tb_s * 1.3, place, f"{level.tb_s:.3g} TB/s{waits}", va="center", fontsize=FONT - 1)
    axes.set_xscale("log")
    axes.set_xlim(least / 3, most * 60)  # room for the text beside the longest bar
    axes.set_yticks([])
    axes.set_xlabel("bandwidth in TB/s; latency of one read", fontsize=FONT)
    axes.tick_params(labelsize=FONT - 1)
    axes.grid(axis="x", color=GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
