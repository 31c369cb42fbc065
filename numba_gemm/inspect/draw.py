"""Plots of recorded traces and of measured speeds; docs/tracing.md shows how to call them.

Each function returns a matplotlib Figure, about 700 pixels wide. ``savefig`` writes it to a file; a notebook shows it
after ``%matplotlib inline``.

All figures use the same colours. A is blue, B orange and C green, and so are their shared tiles: the first letter of an
array's name decides (`colour`). Counts are a ramp from near white to that colour (`ramp`), and threads of a warp are
shades around it (`shades`). Warps, and units that move together, are outlined in black. In plots of speed, cuBLAS is
black and dashed, the public function's choice is vermillion, and the stages follow viridis. The colours are those of
Okabe and Ito, which colour-blind readers can tell apart (https://jfly.uni-koeln.de/color/).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..device.units import WARP, ceil_div
from ..models import requests as rules
from ..models.roofline import arithmetic_intensity, roofline
from .recording import GLOBAL, SHARED, TracedArray
from .tracing import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

__all__ = [
    "BASELINES",
    "CHOICE",
    "COLOURS",
    "CUBLAS",
    "OTHER",
    "OUTLINE",
    "Event",
    "Piece",
    "bank_map",
    "colour",
    "ladder_chart",
    "ramp",
    "reuse_map",
    "roofline_chart",
    "schedule",
    "sector_map",
    "sequence",
    "shades",
    "stage_styles",
    "thread_map",
    "timeline",
    "who_reads_what",
]

COLOURS = {"a": "#0072B2", "b": "#E69F00", "c": "#009E73"}  # of the matrices, and of arrays that hold parts of them
OTHER = "#CC79A7"  # of other arrays
CUBLAS, CHOICE, ACCENT = "black", "#D55E00", "#56B4E9"
OUTLINE = "black"  # of warps, and of sectors that move
GRID, UNUSED = "0.85", "0.75"

# Entries of results other than stages, and their styles.
BASELINES: dict[str, dict[str, Any]] = {
    "cublas": {"color": CUBLAS, "linestyle": "--", "marker": "x"},
    "auto": {"color": CHOICE, "linestyle": "-", "marker": "*"},
    "cpu": {"color": OTHER, "linestyle": ":", "marker": "."},
    "thin": {"color": ACCENT, "linestyle": "-.", "marker": "h"},  # a stage for other shapes than the ladder's
}
MARKERS = "ov^<>sDpPX*"
CHOICE_LABEL = "tiled_sgemm's choice"
SIMULATED = "CUDA simulator: these timings mean nothing"
LADDER_SHAPE = (4096, 4096, 4096)  # README's

WIDTH, DPI = 7.2, 100  # of a figure, in inches (about what fits in a notebook) and dots per inch
FONT, SMALLEST_FONT = 9, 6.5
FLAT_WIDTH = rules.BANKS  # elements per row in the picture of a one-dimensional array
STORES = ("store", "atomic")
LINE_BYTES, WORD_BYTES = 128, 4  # of a cache line (four sectors), and of a word
MOST_CELLS = 128  # along an axis of a matrix's panel; if there are more elements, they share cells
MOST_COUNTED = 24  # most intervals for which numbers are written into the cells


# ---- colours and styles


def colour(name: str) -> str:
    """Return an array's colour: that of the matrix whose letter its name begins with, else `OTHER`."""
    return COLOURS.get(name[:1].lower(), OTHER)


def _mixed(name: str, share: float, other: str = "white") -> tuple[float, ...]:
    """Mix an array's colour, at the given share, with another colour."""
    from matplotlib.colors import to_rgb

    return tuple(share * x + (1 - share) * y for x, y in zip(to_rgb(colour(name)), to_rgb(other), strict=True))


def ramp(name: str) -> Colormap:
    """Return the colour map for counts of an array, from near white to its colour."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list(f"counts of {name}", [_mixed(name, 0.12), _mixed(name, 1.0)])


def shades(name: str, count: int = WARP) -> np.ndarray[Any, Any]:
    """Return the colours of `count` lanes that access an array, one row each, from light to dark around its colour."""
    from matplotlib.colors import LinearSegmentedColormap

    ends = [_mixed(name, 0.15), _mixed(name, 1.0), _mixed(name, 0.45, "black")]
    made = LinearSegmentedColormap.from_list(f"lanes of {name}", ends)
    return np.asarray(made(np.linspace(0, 1, count)))


def stage_styles(stages: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return colour, line and marker of stages and baselines, the same in every chart.

    Stages follow viridis in ladder order, which remains visible to colour-blind readers and in greyscale; markers tell
    neighbours apart.
    """
    from matplotlib import colormaps

    found = list(stages)
    ladder = _climbing(found, whole=True)
    viridis = colormaps["viridis"]
    looks: dict[str, dict[str, Any]] = {
        stage: {
            "color": viridis(0.95 * index / max(1, len(ladder) - 1)),
            "linestyle": "-",
            "marker": MARKERS[index % len(MARKERS)],
        }
        for index, stage in enumerate(ladder)
    }
    return {stage: dict((BASELINES | looks)[stage]) for stage in found}


def _climbing(stages: Sequence[str], whole: bool = False) -> list[str]:
    """Return the given stages, or all, in ladder order; stages outside the ladder come last."""
    from ..kernels.ladder import STAGES

    ladder = [name for name in STAGES if name not in BASELINES and (whole or name in stages)]
    return ladder + [name for name in dict.fromkeys(stages) if name not in STAGES and name not in BASELINES]


# ---- canvases


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError("pictures need matplotlib: pip install 'numba-gemm[plot]'") from None
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure(figsize=(width, height), dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))


def _cells(rows: int, cols: int, tall: float = 1.0) -> tuple[Figure, Axes, float]:
    """Return a figure for rows and columns of cells, its axes, and a cell's width in points; `tall` is height/width."""
    cell = min(0.42, (WIDTH - 1.5) / max(cols, 1), 8 / max(rows * tall, 1))
    made = _figure(min(WIDTH, max(cols * cell + 1.5, 6.0)), rows * cell * tall + 1.5)
    return made, made.add_subplot(), 72 * cell


def _font(cell: float, letters: int) -> float:
    """Return the font size at which this many letters fit into a cell, or 0 if it would be too small to read."""
    size = min(FONT, 0.9 * cell / (0.62 * max(letters, 1)), 0.8 * cell)
    return size if size >= SMALLEST_FONT else 0


def _ink(image: Any, value: float) -> str:
    """Return black or white, whichever is easier to read where an image has this value."""
    return _ink_on(image.to_rgba(value))


def _ink_on(background: Sequence[float]) -> str:
    red, green, blue = background[:3]
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "es" if noun.endswith("s") else "s")


def _dressed(axes: Axes, title: str, across: str, down: str) -> None:
    axes.set_title(title, fontsize=FONT + 1)
    axes.set_xlabel(across, fontsize=FONT)
    axes.set_ylabel(down, fontsize=FONT)
    axes.tick_params(labelsize=FONT - 1)


def _outlined(axes: Axes, groups: np.ndarray[Any, Any], width: float = 1.6) -> None:
    """Draw black lines between neighbouring cells of different groups."""
    from matplotlib.collections import LineCollection

    sides = [
        [(col + 0.5, row - 0.5), (col + 0.5, row + 0.5)] for row, col in np.argwhere(groups[:, 1:] != groups[:, :-1])
    ]
    sides += [[(col - 0.5, row + 0.5), (col + 0.5, row + 0.5)] for row, col in np.argwhere(groups[1:] != groups[:-1])]
    axes.add_collection(LineCollection(sides, colors=OUTLINE, linewidths=width, capstyle="projecting"), autolim=False)


# ---- one array


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
    """Draw cells with colours from 0 to `high`; return figure, axes, image, and whether values are written in cells."""
    part, top, left = _cropped(values)
    figure, axes, cell = _cells(*part.shape)
    axes.set_facecolor("white")
    narrow = cell * min(part.shape) < 36 and cell < 6  # square cells would be too small to see
    aspect: Any = "auto" if narrow else "equal"
    image = axes.imshow(part, cmap=colours, vmin=0, vmax=high, aspect=aspect, interpolation="nearest")
    size = _font(cell, len(f"{np.nanmax(part):.0f}"))
    if size:
        for (row, col), value in np.ndenumerate(part):
            if not np.isnan(value):
                ink = _ink(image, value)
                axes.text(col, row, f"{value:.0f}", ha="center", va="center", fontsize=size, color=ink)
    for axis, start, extent in ((axes.yaxis, top, part.shape[0]), (axes.xaxis, left, part.shape[1])):
        step = max(1, extent // 8)
        axis.set_ticks(range(0, extent, step), labels=[str(start + i) for i in range(0, extent, step)])
    _dressed(axes, "", "column", "row")
    figure.suptitle(title, fontsize=FONT + 1)  # not the axes, which may be narrower than the title
    return figure, axes, image, bool(size)


def thread_map(trace: Trace, array: str, op: str = "load", width: int | None = None) -> Figure:
    """Draw which thread, by its position in the block, accesses each element first; warps are outlined.

    Shades tell the lanes of a warp apart. If the thread numbers do not fit into the cells, the warp numbers are
    written instead.

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
    lanes = min(WARP, math.prod(trace.block))
    of_lanes = shades(array, lanes)
    last = int(threads.max())
    by_thread = ListedColormap(of_lanes[np.arange(last + 1) % WARP])
    title = f"{trace.kernel}: threads that {op} {array}; warps outlined"
    figure, axes, image, written = _grid(values, by_thread, last, title)
    image.set_norm(BoundaryNorm(np.arange(last + 2) - 0.5, last + 1))
    part, _, _ = _cropped(values)
    warps = np.where(np.isnan(part), -1, np.nan_to_num(part) // WARP)
    _outlined(axes, warps)
    if not written and last >= WARP:
        for warp in np.unique(warps[warps >= 0]):
            own = np.argwhere(warps == warp)
            row, col = own[np.argmin(((own - own.mean(axis=0)) ** 2).sum(axis=1))]
            box = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
            axes.text(col, row, f"{warp:.0f}", ha="center", va="center", fontsize=FONT - 1, bbox=box)
        figure.suptitle(f"{title} and numbered", fontsize=FONT + 1)
    _lane_bar(figure, axes, of_lanes)
    return figure


def _lane_bar(figure: Figure, axes: Axes, of_lanes: np.ndarray[Any, Any]) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    count = len(of_lanes)
    scale = ScalarMappable(BoundaryNorm(np.arange(count + 1) - 0.5, count), ListedColormap(of_lanes))
    bar = figure.colorbar(scale, ax=axes, fraction=0.04, ticks=range(0, count, max(1, count // 4)))
    bar.ax.set_ylabel("lane: the thread's number in its warp", fontsize=FONT)
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


# ---- one request


def bank_map(trace: Trace, request: int) -> Figure:
    """Draw the wavefronts of a request to shared memory: for each bank, the lanes that its word goes to.

    Parameters
    ----------
    trace : Trace
        The trace to draw.
    request : int
        A row of `Trace.requests`.

    Returns
    -------
    matplotlib.figure.Figure
        A figure whose image holds the number of lanes that each bank serves, one row per wavefront.

    Raises
    ------
    ValueError
        if there is no such request, or it is one to global memory.
    """
    lanes, row = trace.lanes(request), trace.requests.iloc[request]
    if row["space"] == GLOBAL:
        raise ValueError(f"request {request} is a {row['op']} of {row['array']}, in global memory, which has no banks")
    size = int(row["bits"]) // 8
    fronts: list[dict[int, list[int]]] = []  # the lanes that each bank's word goes to
    write = row["op"] != "load"
    for group, words in zip(rules.passes(lanes, size, write), rules.bank_map(lanes, size, write), strict=True):
        for front in range(max(map(len, words.values()))):
            chosen = {bank: sorted(own)[front] for bank, own in words.items() if front < len(own)}
            fronts.append(
                {
                    bank: [lane for lane, at in group if at // 4 <= word < (at + max(size, 4)) // 4]
                    for bank, word in chosen.items()
                }
            )
    figure, axes, cell = _cells(len(fronts), rules.BANKS, tall=1.6)
    cells = np.full((len(fronts), rules.BANKS), np.nan)
    for front, served in enumerate(fronts):
        for bank, reached in served.items():
            cells[front, bank] = len(reached)
    image = axes.imshow(cells, cmap=ramp(row["array"]), vmin=0, vmax=np.nanmax(cells), aspect=1.6)
    for front, served in enumerate(fronts):
        for bank, reached in served.items():
            text = str(reached[0]) if len(reached) == 1 else f"{reached[0]}\n×{len(reached)}"
            ink = _ink(image, len(reached))
            size_of_text = _font(cell, max(map(len, text.split("\n")))) or SMALLEST_FONT
            axes.text(bank, front, text, ha="center", va="center", fontsize=size_of_text, color=ink)
    axes.set_xticks(np.arange(rules.BANKS + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(fronts) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color=GRID, linewidth=0.6)
    axes.hlines(np.arange(1, len(fronts)) - 0.5, -0.5, rules.BANKS - 0.5, color=OUTLINE, linewidth=1.2)
    axes.set_xticks(range(0, rules.BANKS, 4))
    axes.set_yticks(range(len(fronts)))
    axes.tick_params(which="minor", length=0)
    count = _plural(len(fronts), "wavefront")
    if row["op"] == "copy" and row["wavefronts"] != len(fronts):
        count += f" of shared memory's banks, {row['wavefronts']} of the whole copy"
    many = any(len(reached) > 1 for served in fronts for reached in served.values())
    note = "; n, ×m: m lanes get one word, n is the first" if many else ""
    _dressed(axes, f"{_what(trace, row)}\n{count}", f"bank; in it the lane that is served{note}", "wavefront")
    return figure


def _what(trace: Trace, row: Any) -> str:
    """Describe a request, for a title."""
    what = f"{row['op']} of {row['array']} by warp {row['warp']}"
    return f"{trace.kernel}, line {row['line']}: {what}, {row['bits']} bits a lane"


def sector_map(trace: Trace, request: int) -> Figure:
    """Draw the sectors of 32 bytes that a request to global memory moves, and the words in them that lanes use.

    Each row is a line of 128 bytes. Sectors that move are outlined; words that move but are not used are hatched.

    Parameters
    ----------
    trace : Trace
        The trace to draw.
    request : int
        A row of `Trace.requests`.

    Returns
    -------
    matplotlib.figure.Figure
        A figure whose image holds the number of lanes that use each word, NaN for none.

    Raises
    ------
    ValueError
        if there is no such request, or it is one to shared memory.
    """
    from matplotlib.patches import Rectangle

    lanes, row = trace.lanes(request), trace.requests.iloc[request]
    if row["space"] != GLOBAL:
        raise ValueError(
            f"request {request} is a {row['op']} of {row['array']}, in shared memory, which has no sectors"
        )
    size = int(row["bits"]) // 8
    unit = min(WORD_BYTES, size)
    used: dict[int, list[int]] = {}  # lanes by address
    for lane, address in lanes:
        used.setdefault(address, []).append(lane)
    lines = {line: number for number, line in enumerate(sorted({address // LINE_BYTES for address in used}))}
    cells = np.full((len(lines), LINE_BYTES // unit), np.nan)
    for address, own in used.items():
        at = address % LINE_BYTES // unit
        cells[lines[address // LINE_BYTES], at : at + size // unit] = len(own)
    moved = sorted({address // rules.SECTOR_BYTES for address in used})
    words = LINE_BYTES // WORD_BYTES
    many = any(len(own) > 1 for own in used.values())
    tall = 1.6 if many else 1.3 if len(lines) <= 8 else 0.9
    figure, axes, cell = _cells(len(lines), words, tall)
    wide = rules.SECTOR_BYTES // WORD_BYTES  # words per sector
    for sector in moved:
        line, within = divmod(sector * rules.SECTOR_BYTES, LINE_BYTES)
        place = (within / WORD_BYTES - 0.5, lines[line] - 0.5)
        axes.add_patch(Rectangle(place, wide, 1, facecolor="white", edgecolor=UNUSED, hatch="////", linewidth=0))
        axes.add_patch(Rectangle(place, wide, 1, fill=False, edgecolor=OUTLINE, linewidth=1.6, zorder=4))
    extent = (-0.5, words - 0.5, len(lines) - 0.5, -0.5)
    most = np.nanmax(cells)
    image = axes.imshow(cells, cmap=ramp(row["array"]), vmin=0, vmax=most, extent=extent, aspect=tall, zorder=2)
    for address, own in used.items():
        left, width = address % LINE_BYTES / WORD_BYTES - 0.5, size / WORD_BYTES
        line = lines[address // LINE_BYTES]
        axes.add_patch(Rectangle((left, line - 0.5), width, 1, fill=False, edgecolor="white", linewidth=1, zorder=3))
        text = str(own[0]) if len(own) == 1 else f"{own[0]}\n×{len(own)}"
        points = _font(cell * min(width, 2), max(map(len, text.split("\n"))))
        if width >= 1:
            look: dict[str, Any] = {
                "color": _ink(image, len(own)),
                "fontsize": min(points or SMALLEST_FONT, FONT - 1),
            }
            axes.text(left + width / 2, line, text, ha="center", va="center", zorder=5, **look)
    axes.vlines(np.arange(wide, words, wide) - 0.5, -0.5, len(lines) - 0.5, color=GRID, linewidth=1, zorder=0)
    axes.set_xticks(range(0, words, 4))
    labelled = list(lines.items())[:: max(1, len(lines) // 16)]
    axes.set_yticks([number for _, number in labelled], labels=[str(line * LINE_BYTES) for line, _ in labelled])
    bytes_used, bytes_moved = int((~np.isnan(cells)).sum()) * unit, len(moved) * rules.SECTOR_BYTES
    taken, ideal = int(row["sectors"]), int(row["ideal"])
    found = f"{_plural(taken, 'sector')}, {ideal} would do: efficiency {100 * ideal / taken:.3g} %"
    if taken != len(moved):
        found += f"; {len(moved)} different, a copy takes one again for each sector that it goes to"
    title = f"{_what(trace, row)}\n{found}\n{bytes_used} of {bytes_moved} bytes used"
    note = "; n, ×m: m lanes use it, n is the first" if many else ""
    _dressed(
        axes, title, f"word of 32 bits; in it the lane that uses it{note}; hatched: moved in vain", "byte of the line"
    )
    axes.set_xlim(-0.5, words - 0.5)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    return figure


# ---- one thread, warp or block


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
            vmin=0,
            vmax=most,
            aspect="auto",
            interpolation="nearest",
            extent=(-0.5, across - 0.5, down - 0.5, -0.5),
        )
        axes.set_xlim(-0.5, cols - 0.5)
        axes.set_ylim(rows - 0.5, -0.5)
        often = f"{most}×" if least == most else f"{least} to {most}×"
        title += f": {_plural(int((counts > 0).sum()), 'element')}\n{verb} {often} each"
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
    are accessed more often. If a matrix has more than 128 rows or columns, neighbours share a cell, which shows their
    maximum.

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
    figure = _figure(WIDTH, height)
    of_tiles = " of shared tiles" if shared else ""
    figure.suptitle(f"{trace.kernel}: what {who} reads{of_tiles} and writes", fontsize=FONT + 2)
    ratios: dict[str, Any] = {"width_ratios": [deep, 1], "height_ratios": [min(max(k / n, 0.3), 1.2), tall]}
    panels = figure.subplots(2, 2, gridspec_kw=ratios)
    panels[0, 0].set_axis_off()
    said = "C = A B" + "\n\nthe darker,\nthe more often"
    panels[0, 0].text(0.5, 0.5, said, ha="center", va="center", fontsize=FONT, transform=panels[0, 0].transAxes)
    shown = ((panels[0, 1], b, ("load", "copy")), (panels[1, 0], a, ("load", "copy")), (panels[1, 1], c, STORES))
    step = next((step for step in (1, 8, 64) if max(m, n, k) // step <= 64), 512)
    for axes, array, ops in shown:
        _panel(axes, array.name, _counted(accesses, array, ops), "stored" if array is c else "loaded", step)
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
    figure = _figure(WIDTH, 0.34 * len(rows) + 1.4)
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
        size = _font(min(wide, 24), len(str(most))) if last < MOST_COUNTED else 0
        for interval in np.flatnonzero(counts[number]).tolist() if size else ():
            count = int(counts[number, interval])
            ink = _ink(image, count)
            axes.text(interval, number, str(count), ha="center", va="center", fontsize=size, color=ink)
    axes.hlines(np.arange(1, len(rows)) - 0.5, -0.5, last + 0.5, color=GRID, linewidth=0.6)
    axes.vlines(np.arange(1, last + 1) - 0.5, -0.5, len(rows) - 0.5, color=OUTLINE, linewidth=1)
    axes.set_xlim(-0.5, last + 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(0, last + 1, max(1, (last + 1) // 12)))
    axes.set_yticks(range(len(rows)), labels=[f"{op} {array} ({space})" for op, array, space in rows])
    title = f"{trace.kernel}: {unit} of {who}"
    _dressed(axes, title, "barriers passed: a column lies between two cuda.syncthreads()", "")
    return figure


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
    figure = _figure(WIDTH, 0.5 + 1.9 * len(events))
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
    """A block's share of a tile of C in `schedule`: its length in k-tiles, and whether it is the whole tile."""

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
    figure = _figure(WIDTH, 1.4 + 2.6 * min(1, max(blocks / 40, 0.4)))
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


# ---- speeds


def _timed(results: Any) -> Any:
    """Return the fastest float32 row of each stage and shape that was timed, from a DataFrame of results."""
    missing = [name for name in ("stage", "precision", "m", "n", "k", "gflops") if name not in results.columns]
    if missing:
        raise ValueError(f"the results have no column {', '.join(missing)}; expected those of results.csv")
    rows = results[(results["precision"] == "ieee") & results["gflops"].notna()]
    for column, usual in (("layout", "nn"), ("cache", "hot")):
        if column in rows.columns and len(rows):
            there = rows[column].tolist()
            rows = rows[rows[column] == (usual if usual in there else there[0])]
    best = rows.groupby(["stage", "m", "n", "k"], sort=False)["gflops"].idxmax()
    return rows.loc[best].sort_index()


def _digits(speed: float) -> str:
    """Format a speed with three significant digits."""
    return f"{speed:#.3g}".rstrip(".")


def _gpu(environment: Mapping[str, Any] | None, name: str | None) -> str:
    """Return the name of the measured GPU for a title."""
    if name is not None:
        return name
    if environment is None:
        return ""
    found = (environment.get("gpu") or {}).get("name")
    return str(found) if found else SIMULATED if environment.get("simulator") else ""


def _gpu_number(environment: Mapping[str, Any] | None, name: str) -> float:
    """Return a number from the GPU's description, or 0 if it is missing."""
    return float(((environment or {}).get("gpu") or {}).get(name) or 0)


def _ladder_shape(rows: Any, ladder: Sequence[str]) -> tuple[int, int, int]:
    """Return README's shape if all stages have it, else the largest shape that most stages have, cubes first."""
    rows = rows[rows["stage"].isin(ladder)]
    shapes: dict[tuple[int, int, int], int] = {}
    for m, n, k in zip(rows["m"], rows["n"], rows["k"], strict=True):
        shapes[int(m), int(n), int(k)] = shapes.get((int(m), int(n), int(k)), 0) + 1
    if shapes.get(LADDER_SHAPE) == len(ladder):
        return LADDER_SHAPE
    return max(shapes, key=lambda shape: (shapes[shape], len(set(shape)) == 1, math.prod(shape)))


def ladder_chart(
    results: Any,
    environment: Mapping[str, Any] | None = None,
    *,
    size: int | tuple[int, int, int] | None = None,
    gpu: str | None = None,
) -> Figure:
    """Draw the ladder at one size: TFLOP/s and share of the FP32 peak per stage, and the gain over the stage above.

    Parameters
    ----------
    results : pandas.DataFrame
        Contents of results.csv, as `numba_gemm.lab.bench.results.load` reads it, with any of its stages.
    environment : mapping, optional
        Contents of the environment.json beside it: the GPU's name and peak. By default,
        ``results.attrs["environment"]``. Without it, the peak is the one that the results' column percent_of_peak is
        relative to.
    size : int or (m, n, k), optional
        M = N = K, or the three extents. By default, 4096 if all stages were measured there, else the largest size that
        most stages have.
    gpu : str, optional
        Name of the GPU in the title.

    Returns
    -------
    matplotlib.figure.Figure
        A figure whose bars are the stages from top to bottom, then the public function's choice; the dashed line is
        cuBLAS.

    Raises
    ------
    ValueError
        if no stage was timed at that size, or a column is missing.
    """
    environment = environment or results.attrs.get("environment")
    from matplotlib.colors import to_rgb

    rows = _timed(results)
    ladder = _climbing(rows["stage"].tolist())
    if not ladder:
        raise ValueError("no stage of the ladder was timed in these results")
    chosen = _ladder_shape(rows, ladder) if size is None else (size,) * 3 if isinstance(size, int) else tuple(size)
    m, n, k = chosen
    rows = rows[(rows["m"] == m) & (rows["n"] == n) & (rows["k"] == k)].set_index("stage")
    speeds = {str(stage): float(speed) / 1000 for stage, speed in rows["gflops"].items()}
    ladder = [stage for stage in ladder if stage in speeds]
    if not ladder:
        raise ValueError(f"no stage of the ladder was timed at {m} x {n} x {k}")
    shown = [*ladder, *(["auto"] if "auto" in speeds else [])]
    looks = stage_styles(shown)
    figure = _figure(WIDTH, 0.3 * len(shown) + 1.7)
    axes = figure.add_subplot()
    axes.barh(range(len(shown)), [speeds[name] for name in shown], color=[looks[name]["color"] for name in shown])
    peak = _gpu_number(environment, "fp32_peak_gflops") / 1000
    if not peak and "percent_of_peak" in rows.columns:
        share = {str(stage): float(part) for stage, part in rows["percent_of_peak"].items()}[ladder[-1]]
        peak = 100 * speeds[ladder[-1]] / share if share > 0 else 0
    right = 1.05 * max(speeds.get("cublas", 0), *(speeds[name] for name in shown))
    for place, name in enumerate(shown):
        text = f"{_digits(speeds[name]):>4}"
        if 0 < place < len(ladder):
            text += f"   ×{speeds[name] / speeds[shown[place - 1]]:.2f}"
        inside = speeds[name] > 0.2 * right  # long enough for the text, which then does not cross cuBLAS's line
        ink = _ink_on(to_rgb(looks[name]["color"])) if inside else "black"
        at = (0.0 if inside else speeds[name], float(place))
        axes.annotate(text, at, (4, 0), textcoords="offset points", va="center", fontsize=FONT - 1, color=ink)
    if "cublas" in speeds:
        axes.axvline(speeds["cublas"], color=CUBLAS, linestyle="--", linewidth=1.4)
        text, at = f"cuBLAS {_digits(speeds['cublas'])}", (speeds["cublas"], -0.85)
        left = speeds["cublas"] > right / 2
        look: dict[str, Any] = {"ha": "right" if left else "left", "va": "center", "fontsize": FONT}
        axes.annotate(text, at, (-4 if left else 4, 0), textcoords="offset points", **look)
    axes.set_yticks(range(len(shown)), labels=[CHOICE_LABEL if name == "auto" else name for name in shown])
    axes.set_ylim(len(shown) - 0.4, -1.25 if "cublas" in speeds else -0.6)
    axes.set_xlim(0, right)
    if peak:
        to_share, of_share = (lambda x: 100 * x / peak), (lambda x: x * peak / 100)
        shares = axes.secondary_xaxis("top", functions=(to_share, of_share))
        shares.set_xlabel("% of the FP32 peak", fontsize=FONT)
        shares.tick_params(labelsize=FONT - 1)
    named = _gpu(environment, gpu)
    title = f"The climb at {m} × {n} × {k}" + (f", {named}" if named else "")
    _dressed(axes, title, "TFLOP/s; × is the gain over the stage above", "")
    axes.spines["right"].set_visible(False)
    return figure


def roofline_chart(results: Any, environment: Mapping[str, Any] | None = None, *, gpu: str | None = None) -> Figure:
    """Draw GFLOP/s of every stage against arithmetic intensity, under the roofs of the GPU.

    The intensity is that of the matrix multiplication: FLOP per byte of A, B and C, each moved once
    (`numba_gemm.models.roofline`). The CPU has other roofs and is left out.

    Parameters
    ----------
    results : pandas.DataFrame
        Contents of results.csv, as `numba_gemm.lab.bench.results.load` reads it.
    environment : mapping, optional
        Contents of the environment.json beside it: the GPU's name, peak and bandwidth. By default,
        ``results.attrs["environment"]``. Without peak and bandwidth, no roofs are drawn.
    gpu : str, optional
        Name of the GPU in the title.

    Returns
    -------
    matplotlib.figure.Figure
        A figure with one series of markers, without a connecting line, per stage, labelled with its name.

    Raises
    ------
    ValueError
        if nothing was timed, or a column is missing.
    """
    environment = environment or results.attrs.get("environment")
    rows = _timed(results)
    rows = rows[rows["stage"] != "cpu"]
    if rows.empty:
        raise ValueError("nothing was timed on the GPU in these results")
    stages = list(dict.fromkeys(rows["stage"]))
    ladder = _climbing(stages)
    stages = [*ladder, *(stage for stage in stages if stage not in ladder)]
    looks = stage_styles(stages)
    rows = rows.assign(intensity=[arithmetic_intensity(*shape) for shape in zip(rows["m"], rows["n"], rows["k"])])
    figure = _figure(WIDTH, 6.2)
    axes = figure.add_subplot()
    for stage in stages:
        own = rows[rows["stage"] == stage]
        look = {**looks[stage], "linestyle": "none"}
        label = {"auto": CHOICE_LABEL, "cublas": "cuBLAS"}.get(stage, stage)
        axes.plot(own["intensity"], own["gflops"], label=label, markersize=5, alpha=0.85, **look)
    peak, bandwidth = _gpu_number(environment, "fp32_peak_gflops"), _gpu_number(environment, "bandwidth_gb_s")
    if peak and bandwidth:
        ridge = peak / bandwidth
        low, high = min(rows["intensity"].min() / 2, ridge / 4), max(2 * rows["intensity"].max(), 2 * ridge)
        axes.plot([low, ridge, high], [roofline(x, peak, bandwidth) for x in (low, ridge, high)], color="0.35")
        over: dict[str, Any] = {"textcoords": "offset points", "color": "0.35", "fontsize": FONT}
        axes.annotate(f"FP32 peak: {peak / 1000:.1f} TFLOP/s", (high, peak), (0, 3), ha="right", va="bottom", **over)
        text = f"memory: {bandwidth:,.0f} GB/s"
        axes.annotate(text, (low, low * bandwidth), (6, -2), ha="left", va="top", **over)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yscale("log")
    named = _gpu(environment, gpu)
    across = "arithmetic intensity: FLOP per byte of A, B and C, each moved once"
    _dressed(axes, "Roofline" + (f", {named}" if named else ""), across, "GFLOP/s")
    axes.grid(True, which="major", alpha=0.25)
    figure.legend(loc="outside lower center", ncols=4, fontsize=FONT - 1, frameon=False)
    return figure
