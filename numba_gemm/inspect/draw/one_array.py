"""Pictures of one array's elements: who accesses each, and how often."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ...device.units import WARP, ceil_div
from ...models import requests as rules
from ..recording import SHARED
from ..tracing import Trace
from .canvas import FONT, font_size, ink_at, new_cells, outline_groups, set_labels
from .elements import first_request, of_request
from .palette import CHOICE, OUTLINE, ramp, shades

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

FLAT_WIDTH = rules.BANKS  # elements per row in the picture of a one-dimensional array


def _plane(trace: Trace, array: str, indices: np.ndarray[Any, Any], width: int | None) -> tuple[Any, tuple[int, int]]:
    """Return the rows and columns of elements in a picture, and the picture's extents."""
    shape = trace.array(array).shape
    if len(shape) == 2 and width is None:
        return (indices[:, 0], indices[:, 1]), (shape[0], shape[1])
    width = width or FLAT_WIDTH
    flat = np.ravel_multi_index(tuple(indices.T), shape)
    return (flat // width, flat % width), (ceil_div(int(np.prod(shape)), width), width)


def _cropped(values: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], int, int]:
    """Return the smallest part that holds all cells that are not NaN, and its first row and column."""
    rows, cols = (np.flatnonzero(~np.isnan(values).all(axis=axis)) for axis in (1, 0))
    part = values[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1]
    return part, int(rows[0]), int(cols[0])


def _grid(values: np.ndarray[Any, Any], colours: Colormap, high: float, title: str) -> tuple[Figure, Axes, Any, bool]:
    """Draw cells with colours from 0 to `high`; return figure, axes, image, and True if values are written in cells."""
    part, top, left = _cropped(values)
    figure, axes, cell = new_cells(*part.shape)
    axes.set_facecolor("white")
    narrow = cell * min(part.shape) < 36 and cell < 6  # square cells would be too small to see
    aspect: Any = "auto" if narrow else "equal"
    image = axes.imshow(part, cmap=colours, vmin=0, vmax=high, aspect=aspect, interpolation="nearest")
    size = font_size(cell, len(f"{np.nanmax(part):.0f}"))
    if size:
        for (row, col), value in np.ndenumerate(part):
            if not np.isnan(value):
                ink = ink_at(image, value)
                axes.text(col, row, f"{value:.0f}", ha="center", va="center", fontsize=size, color=ink)
    for axis, start, extent in ((axes.yaxis, top, part.shape[0]), (axes.xaxis, left, part.shape[1])):
        step = max(1, extent // 8)
        axis.set_ticks(range(0, extent, step), labels=[str(start + i) for i in range(0, extent, step)])
    set_labels(axes, "", "column", "row")
    figure.suptitle(title, fontsize=FONT + 1)  # not the axes, which may be narrower than the title
    return figure, axes, image, bool(size)


def thread_map(trace: Trace, array: str, op: str = "load", width: int | None = None) -> Figure:
    """Draw which thread, by its position in the block, accesses each element first; warps are outlined.

    Shades tell the lanes of a warp apart. If the thread numbers do not fit into the cells, the warp numbers are
    written instead. In a shared array, the elements of the first request are outlined in red, which shows a swizzle,
    and dashed lines separate rows that are first accessed between different barriers, such as two buffers of a tile.

    Parameters
    ----------
    trace : Trace
        Trace of one block; the picture of several blocks mixes them.
    array : str
        The array's name.
    op : str
        "load", "store", "copy" or "atomic".
    width : int, optional
        Elements per row of the picture. By default, the array's own rows if it has two dimensions, else 32.

    Returns
    -------
    matplotlib.figure.Figure
        A figure whose image holds the thread numbers.

    Raises
    ------
    ValueError
        if the array was not accessed by this operation.
    """
    from matplotlib.colors import BoundaryNorm, ListedColormap

    indices, threads = trace.touched(array, op)
    (rows, cols), shape = _plane(trace, array, indices, width)
    values = np.full(shape, np.nan)
    values[rows[::-1], cols[::-1]] = threads[::-1]  # in reverse, so that the first access wins
    intervals = np.full(shape, -1)
    intervals[rows[::-1], cols[::-1]] = _intervals(trace, array, op)[::-1]
    lanes = min(WARP, math.prod(trace.block))
    of_lanes = shades(array, lanes)
    last = int(threads.max())
    by_thread = ListedColormap(of_lanes[np.arange(last + 1) % WARP])
    title = f"{trace.kernel}: threads that {op} {array}; warps outlined"
    figure, axes, image, written = _grid(values, by_thread, last, title)
    image.set_norm(BoundaryNorm(np.arange(last + 2) - 0.5, last + 1))
    part, top, left = _cropped(values)
    warps = np.where(np.isnan(part), -1, np.nan_to_num(part) // WARP)
    outline_groups(axes, warps)
    if not written and last >= WARP:
        for warp in np.unique(warps[warps >= 0]):
            own = np.argwhere(warps == warp)
            row, col = own[np.argmin(((own - own.mean(axis=0)) ** 2).sum(axis=1))]
            box = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
            axes.text(col, row, f"{warp:.0f}", ha="center", va="center", fontsize=FONT - 1, bbox=box)
        title += " and numbered"
    if trace.array(array).space == SHARED:
        title += _outline_request(trace, array, op, axes, (top, left), part.shape, width)
        title += _split_intervals(axes, intervals[top : top + part.shape[0], left : left + part.shape[1]])
    figure.suptitle(title, fontsize=FONT + 1)
    _lane_bar(figure, axes, of_lanes)
    return figure


def _intervals(trace: Trace, array: str, op: str) -> np.ndarray[Any, Any]:
    """Return the number of barriers passed before each access that `Trace.touched` lists."""
    accesses = trace.accesses
    own = accesses[(accesses["array"] == array) & (accesses["op"] == op)]
    each = np.maximum(own["bytes"].to_numpy(np.int64) // trace.array(array).itemsize, 1)
    return np.repeat(own["interval"].to_numpy(np.int64), each)


def _outline_request(
    trace: Trace,
    array: str,
    op: str,
    axes: Axes,
    corner: tuple[int, int],
    extents: tuple[int, ...],
    width: int | None,
) -> str:
    """Outline the elements of the first request in a part that begins at `corner`; return what to say of it."""
    request = first_request(trace, array, [op])
    assert request is not None
    (rows, cols), _ = _plane(trace, array, of_request(trace, request), width)
    chosen = np.zeros(np.add(extents, 2), bool)  # with a margin, for lines at the edges
    chosen[rows - corner[0] + 1, cols - corner[1] + 1] = True
    outline_groups(axes, chosen, 2.2, CHOICE, (-1, -1))
    return "\nred: the first request of a warp"


def _split_intervals(axes: Axes, intervals: np.ndarray[Any, Any]) -> str:
    """Draw lines between elements that are first accessed between different barriers; return what to say of them."""
    split = (intervals[1:] != intervals[:-1]) & (intervals[1:] >= 0) & (intervals[:-1] >= 0)
    between = np.flatnonzero(split.any(axis=1))
    if not len(between):
        return ""
    for row in between.tolist():
        axes.axhline(row + 0.5, color=OUTLINE, linewidth=2.6, linestyle=(0, (3, 1.2)))
    return "; dashed: a barrier separates the first accesses"


def _lane_bar(figure: Figure, axes: Axes, of_lanes: np.ndarray[Any, Any]) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    count = len(of_lanes)
    scale = ScalarMappable(BoundaryNorm(np.arange(count + 1) - 0.5, count), ListedColormap(of_lanes))
    bar = figure.colorbar(scale, ax=axes, fraction=0.04, ticks=range(0, count, max(1, count // 4)))
    bar.ax.set_ylabel("lane of the warp", fontsize=FONT)
    bar.ax.tick_params(labelsize=FONT - 1)
    bar.ax.minorticks_off()


def reuse_map(trace: Trace, array: str, op: str = "load", width: int | None = None) -> Figure:
    """Draw the number of accesses to each element; parameters and errors are those of `thread_map`."""
    from matplotlib.ticker import MaxNLocator

    indices, _ = trace.touched(array, op)
    (rows, cols), shape = _plane(trace, array, indices, width)
    counts = np.zeros(shape)
    np.add.at(counts, (rows, cols), 1)
    values = np.where(counts > 0, counts, np.nan)
    most = counts.max()
    title = f"{trace.kernel}: how often threads {op} each element of {array}"
    figure, axes, image, _ = _grid(values, ramp(array), most, title)
    bar = figure.colorbar(image, ax=axes, fraction=0.04, ticks=MaxNLocator(5, integer=True))
    bar.ax.set_ylabel("accesses", fontsize=FONT)
    bar.ax.tick_params(labelsize=FONT - 1)
    return figure
