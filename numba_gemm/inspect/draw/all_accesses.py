"""Pictures of the accesses of a thread, a warp or a block to all arrays, in space and in time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...device.units import WARP, ceil_div
from ..recording import GLOBAL, SHARED, TracedArray
from ..tracing import Trace
from .canvas import FONT, WIDTH, font_size, ink_at, ink_on, new_figure, plural, set_labels
from .elements import boxes, first_request, of_sectors
from .palette import GRID, OUTLINE, colour, ramp

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STORES = ("store", "atomic")

MOST_CELLS = 128  # along an axis of a matrix's panel; if there are more elements, they share cells
SHADED = (1, 4, 16, 64)  # counts in the legend
MOST_SHADED = SHADED[-1]  # the darkest shade stands for this count and higher ones
MOST_OUTLINED = 32  # rows up to which sectors in different rows have outlines of their own
LIGHTEST = 0.5  # where the shades begin, so that a single access differs from none
MOST_COUNTED = 24  # most intervals for which numbers are written into the cells


def _chosen(
    trace: Trace, thread: int | None, warp: int | None, block: Sequence[int] | None
) -> tuple[tuple[int, ...], str]:
    """Return the index of the chosen block, and a description of the thread, warp or block."""
    if not trace.blocks:
        raise ValueError(f"no block of {trace.kernel} was traced")
    index = trace.blocks[0] if block is None else tuple((*np.atleast_1d(block).tolist(), 0, 0)[:3])
    if index not in trace.blocks:
        raise ValueError(f"block is {block}; those that were traced are {', '.join(map(str, trace.blocks))}")
    if thread is not None and warp is not None:
        raise ValueError(f"thread is {thread} and warp is {warp}; give one of them")
    threads = math.prod(trace.block)
    for name, value, count in (("thread", thread, threads), ("warp", warp, ceil_div(threads, WARP))):
        if value is not None and not hasattr(value, "__index__"):
            raise TypeError(f"{name} is {value!r}; expected its position in the block; pass one from 0 to {count - 1}")
        if value is not None and not 0 <= value < count:
            raise ValueError(f"{name} is {value}; a block of {trace.kernel} has {name}s 0 to {count - 1}")
    where = f"block {index}"
    if thread is not None:
        return index, f"thread {thread} of {where}"
    return index, where if warp is None else f"warp {warp} of {where}"


def _shared_tile(trace: Trace, letter: str) -> TracedArray:
    tiles = [array for array in trace.arrays if array.space == SHARED and array.name.lower().startswith(letter)]
    if not tiles or len(tiles[0].shape) != 2:
        names = ", ".join(array.name for array in trace.arrays if array.space == SHARED) or "none"
        raise ValueError(
            f"{trace.kernel} has no tile of two dimensions that begins with {letter!r} in shared memory ({names})"
        )
    return tiles[0]


def _operand(trace: Trace, letter: str) -> TracedArray:
    for array in trace.arrays:
        if array.space == GLOBAL and array.name.lower() == letter:
            if len(array.shape) != 2:
                raise ValueError(f"{array.name} of {trace.kernel} has shape {array.shape}; expected two dimensions")
            return array
    names = ", ".join(array.name for array in trace.arrays if array.space == GLOBAL) or "none"
    raise ValueError(
        f"{trace.kernel} has no array {letter!r} among those in global memory ({names}); a product's picture needs a "
        "kernel with parameters a, b and c"
    )


def _counted(accesses: Any, array: TracedArray, ops: Sequence[str]) -> np.ndarray[Any, Any]:
    """Count the accesses to each element of a matrix in chosen rows of `Trace.accesses`."""
    counts = np.zeros(array.shape, np.int64)
    own = accesses[(accesses["array"] == array.name) & accesses["op"].isin(ops)]
    if len(own):
        first = np.array(own["element"].tolist(), np.int64) @ np.array(array.strides, np.int64)
        each = np.maximum(own["bytes"].to_numpy(np.int64) // array.itemsize, 1)  # elements of a vector
        within = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
        found = array.indices(np.repeat(first, each) + within * array.itemsize)
        np.add.at(counts, (found[:, 0], found[:, 1]), 1)
    return counts


def _scale() -> Any:
    """Return the norm of all counts: the same shade is the same count in every picture."""
    from matplotlib.colors import LogNorm

    return LogNorm(LIGHTEST, MOST_SHADED, clip=True)


def _legend(axes: Axes, sectors: bool) -> None:
    """Draw the shades of counts, and the hatching of sectors."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    axes.set_axis_off()
    axes.set(xlim=(0, len(SHADED)), ylim=(0, 4.4))
    scale, greys = _scale(), LinearSegmentedColormap.from_list("counts", ["0.97", "0.15"])
    axes.text(0, 3.7, "number of accesses", va="center", fontsize=FONT)
    for place, count in enumerate(SHADED):
        shade = greys(scale(count))
        axes.add_patch(Rectangle((place, 2.2), 1, 1, facecolor=shade, edgecolor=GRID))
        text = f"{count}×" if count < MOST_SHADED else f"≥{count}"
        axes.text(place + 0.5, 2.7, text, ha="center", va="center", fontsize=FONT - 1.5, color=ink_on(shade))
    if sectors:
        axes.add_patch(Rectangle((0, 0.6), 1, 1, facecolor="white", edgecolor=OUTLINE, hatch="/////"))
        axes.text(1.25, 1.1, "sectors moved by\none request of a warp", va="center", fontsize=FONT - 0.5)


def _hatch(axes: Axes, trace: Trace, request: int) -> None:
    """Hatch the sectors that a request moves."""
    from matplotlib.patches import Rectangle

    rows = trace.array(trace.requests["array"].iloc[request]).shape[0]
    look: dict[str, Any] = {"fill": False, "edgecolor": OUTLINE, "hatch": "//////", "linewidth": 0.7, "zorder": 4}
    for top, bottom, left, right in boxes(of_sectors(trace, request), stacked=rows > MOST_OUTLINED):
        axes.add_patch(Rectangle((left - 0.5, top - 0.5), right - left + 1, bottom - top + 1, **look))


def _panel(axes: Axes, name: str, counts: np.ndarray[Any, Any], verb: str, step: int) -> None:
    """Draw a matrix with its counts, and a grid line every `step` elements."""
    rows, cols = counts.shape
    title = f"{name.upper()}, {rows} × {cols}"
    axes.set_facecolor("white")
    axes.set_xlim(-0.5, cols - 0.5)
    axes.set_ylim(rows - 0.5, -0.5)
    if counts.any():
        shown = counts
        for side in (0, 1):  # the maximum within each cell, so that nothing vanishes
            share = ceil_div(shown.shape[side], MOST_CELLS)
            shown = np.maximum.reduceat(shown, np.arange(0, shown.shape[side], share), axis=side)
        # Cells of several elements may extend beyond the last element; the axis limits cut them off.
        down, across = ceil_div(rows, MOST_CELLS) * shown.shape[0], ceil_div(cols, MOST_CELLS) * shown.shape[1]
        values = np.where(shown > 0, shown, np.nan)
        most, least = int(counts.max()), int(counts[counts > 0].min())
        axes.imshow(
            values,
            cmap=ramp(name),
            norm=_scale(),
            aspect="auto",
            interpolation="nearest",
            extent=(-0.5, across - 0.5, down - 0.5, -0.5),
        )
        axes.set_xlim(-0.5, cols - 0.5)
        axes.set_ylim(rows - 0.5, -0.5)
        often = f"{most}×" if least == most else f"{least} to {most}×"
        title += f": {plural(int((counts > 0).sum()), 'element')}\n{verb} {often} each"
    else:
        axes.text(0.5, 0.5, f"nothing {verb}", ha="center", va="center", fontsize=FONT, transform=axes.transAxes)
    for axis, extent in ((axes.xaxis, cols), (axes.yaxis, rows)):
        axis.set_ticks(np.arange(0, extent, step) - 0.5, minor=True)
        labelled = max(1, 2 ** math.floor(math.log2(max(extent, 4) / 4)))
        axis.set_ticks(range(0, extent, labelled))
    axes.grid(which="minor", color=GRID, linewidth=0.5)
    axes.tick_params(which="minor", length=0)
    axes.tick_params(labelsize=FONT - 1)
    for spine in axes.spines.values():
        spine.set(color=colour(name), linewidth=2)
    axes.set_title(title, fontsize=FONT)


def who_reads_what(
    trace: Trace,
    thread: int | None = None,
    warp: int | None = None,
    block: Sequence[int] | None = None,
    shared: bool = False,
) -> Figure:
    """Draw the accesses of a thread, a warp or a block to global memory, with B above and A to the left of C.

    The picture shows loads of A and B, including asynchronous copies, and stores to C, including atomics. Darker cells
    are accessed more often; a shade stands for the same number in all pictures. The sectors of 32 bytes that the first
    request for each matrix moves are hatched. If a matrix has more than 128 rows or columns, neighbours share a cell,
    which shows their maximum.

    Parameters
    ----------
    trace : Trace
        Trace of a kernel whose parameters a, b and c are the matrices.
    thread, warp : int, optional
        One thread, by its position in the block, or one warp. By default, the whole block.
    block : sequence of int, optional
        Index of the block. By default, the first block that was traced.
    shared : bool
        Draw the tiles of A and B in shared memory instead, and the reads from them.

    Returns
    -------
    matplotlib.figure.Figure
        A figure whose first axes hold a short legend, followed by those of B, A and C. The image of each matrix holds
        the counts, NaN for none. A matrix without accesses has a note instead of an image.

    Raises
    ------
    ValueError
        if the thread, warp or block was not traced, or for a kernel without such matrices or tiles.
    TypeError
        for a thread or a warp that is not an int.
    """
    index, who = _chosen(trace, thread, warp, block)
    a, b = (_shared_tile(trace, letter) if shared else _operand(trace, letter) for letter in "ab")
    c = _operand(trace, "c")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"{a.name} is {a.shape} and {b.name} {b.shape}: not rows of A and columns of B as they lie")
    accesses = trace.accesses
    accesses = accesses[accesses["block"] == index]
    if thread is not None:
        accesses = accesses[accesses["thread"] == thread]
    if warp is not None:
        accesses = accesses[accesses["warp"] == warp]
    (m, k), n = a.shape, b.shape[1]
    deep, tall = min(max(k / n, 0.45), 1.6), min(max(m / n, 0.3), 1.6)
    side = (WIDTH - 1.2) / (1 + deep)  # of C
    height = min(side * (tall + min(max(k / n, 0.3), 1.2)), 7.5) + 1.6
    figure = new_figure(WIDTH, height)
    of_tiles = " of shared tiles" if shared else ""
    figure.suptitle(f"{trace.kernel}: what {who} reads{of_tiles} and writes", fontsize=FONT + 2)
    ratios: dict[str, Any] = {"width_ratios": [deep, 1], "height_ratios": [min(max(k / n, 0.3), 1.2), tall]}
    panels = figure.subplots(2, 2, gridspec_kw=ratios)
    _legend(panels[0, 0], sectors=not shared)
    shown = ((panels[0, 1], b, ("load", "copy")), (panels[1, 0], a, ("load", "copy")), (panels[1, 1], c, STORES))
    step = next((step for step in (1, 8, 64) if max(m, n, k) // step <= 64), 512)
    for axes, array, ops in shown:
        _panel(axes, array.name, _counted(accesses, array, ops), "stored" if array is c else "loaded", step)
        request = None
        if array.space == GLOBAL and not (shared and array is c):
            of_warp, lane = (warp, None) if thread is None else divmod(thread, WARP)
            request = first_request(trace, array.name, ops, index, of_warp, lane)
        if request is not None:
            _hatch(axes, trace, request)
            row = trace.requests.iloc[request]
            cost = f"a request: {plural(int(row['sectors']), 'sector')}, {row['ideal']} would do"
            axes.set_title(f"{axes.get_title()}\n{cost}", fontsize=FONT)
    panels[0, 1].set_ylabel("k", fontsize=FONT)
    panels[1, 0].set_xlabel("k", fontsize=FONT)
    panels[1, 0].set_ylabel("row of C", fontsize=FONT)
    panels[1, 1].set_xlabel("column of C", fontsize=FONT)
    return figure


def timeline(
    trace: Trace, thread: int | None = None, warp: int | None = None, block: Sequence[int] | None = None
) -> Figure:
    """Draw the number of memory accesses of a thread or a warp between barriers, by array and operation.

    Each column is a barrier interval of the block, from one ``cuda.syncthreads()`` to the next; barriers are the black
    lines. Rows are in the order in which they first occur; the darkest cell of a row has the highest count.

    Parameters
    ----------
    trace : Trace
        The trace to draw.
    thread, warp : int, optional
        One thread, by its position in the block, whose accesses are counted, or one warp, whose requests are counted.
        By default, thread 0.
    block : sequence of int, optional
        Index of the block. By default, the first block that was traced.

    Returns
    -------
    matplotlib.figure.Figure
        A figure with one image per row; they hold the counts, NaN for none.

    Raises
    ------
    ValueError
        if the thread, warp or block was not traced, or for one that accesses no memory.
    TypeError
        for a thread or a warp that is not an int.
    """
    if thread is None and warp is None:
        thread = 0
    index, who = _chosen(trace, thread, warp, block)
    accesses = trace.accesses
    last = int(accesses.loc[accesses["block"] == index, "interval"].max()) if len(accesses) else 0
    if warp is not None:
        requests = trace.requests
        first = requests.loc[(requests["block"] == index) & (requests["warp"] == warp), "first"].to_numpy()
        own, unit = accesses.iloc[np.sort(first)], "requests"
    else:
        own, unit = accesses[(accesses["block"] == index) & (accesses["thread"] == thread)], "accesses"
    if own.empty:
        raise ValueError(f"{who} of {trace.kernel} accesses no memory that is traced")
    rows = list(dict.fromkeys(zip(own["op"], own["array"], own["space"], strict=True)))
    counts = np.zeros((len(rows), last + 1), np.int64)
    numbers = {key: number for number, key in enumerate(rows)}
    for op, array, space, interval in zip(own["op"], own["array"], own["space"], own["interval"], strict=True):
        counts[numbers[op, array, space], interval] += 1
    figure = new_figure(WIDTH, 0.34 * len(rows) + 1.4)
    axes = figure.add_subplot()
    wide = 72 * (WIDTH - 2) / (last + 1)
    for number, (_, array, _) in enumerate(rows):
        most = counts[number].max()
        image = axes.imshow(
            np.where(counts[number] > 0, counts[number], np.nan)[None],
            cmap=ramp(array),
            vmin=0,
            vmax=most,
            aspect="auto",
            extent=(-0.5, last + 0.5, number + 0.5, number - 0.5),
            interpolation="nearest",
        )
        size = font_size(min(wide, 24), len(str(most))) if last < MOST_COUNTED else 0
        for interval in np.flatnonzero(counts[number]).tolist() if size else ():
            count = int(counts[number, interval])
            ink = ink_at(image, count)
            axes.text(interval, number, str(count), ha="center", va="center", fontsize=size, color=ink)
    axes.hlines(np.arange(1, len(rows)) - 0.5, -0.5, last + 0.5, color=GRID, linewidth=0.6)
    axes.vlines(np.arange(1, last + 1) - 0.5, -0.5, len(rows) - 0.5, color=OUTLINE, linewidth=1)
    axes.set_xlim(-0.5, last + 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(0, last + 1, max(1, (last + 1) // 12)))
    axes.set_yticks(range(len(rows)), labels=[f"{op} {array} ({space})" for op, array, space in rows])
    title = f"{trace.kernel}: {unit} of {who}"
    set_labels(axes, title, "barriers passed: a column lies between two cuda.syncthreads()", "")
    return figure
