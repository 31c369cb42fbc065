"""Pictures of what `trace` recorded: who accesses which element, which banks a request needs, how often data is read.

Each function returns a matplotlib Figure, which a notebook shows and ``savefig`` writes. Threads and counts have the
colours of cividis, made for readers of any colour vision; warps are outlined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..device.scheduler import WARP_SIZE
from ..models import requests as rules
from .tracing import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["bank_map", "reuse_map", "thread_map"]

COLOURS, NOTHING = "cividis", "0.85"
FLAT_WIDTH = rules.BANKS  # elements in a row of the picture of an array of one dimension
MOST_LABELS = 1024  # cells that are labelled


def _figure(rows: int, cols: int) -> tuple[Figure, Axes]:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError("pictures need matplotlib: pip install 'numba-gemm[plot]'") from None
    cell = min(0.34, 16 / max(cols, 1), 12 / max(rows, 1))
    made = Figure(figsize=(max(cols * cell, 4) + 1.6, max(rows * cell, 1.5) + 1.2), layout="constrained")
    return made, made.add_subplot()


def _plane(trace: Trace, array: str, indices: np.ndarray[Any, Any], width: int | None) -> tuple[Any, tuple[int, int]]:
    """Rows and columns of a picture for elements, and its extents."""
    shape = trace.array(array).shape
    if len(shape) == 2 and width is None:
        return (indices[:, 0], indices[:, 1]), (shape[0], shape[1])
    width = width or FLAT_WIDTH
    flat = np.ravel_multi_index(tuple(indices.T), shape)
    return (flat // width, flat % width), (-(-int(np.prod(shape)) // width), width)


def _cropped(values: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], int, int]:
    """The part that holds all cells that are not NaN, and where it begins."""
    rows, cols = (np.flatnonzero(~np.isnan(values).all(axis=axis)) for axis in (1, 0))
    part = values[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1]
    return part, int(rows[0]), int(cols[0])


def _grid(values: np.ndarray[Any, Any], title: str, label: str) -> tuple[Figure, Axes, tuple[int, int]]:
    part, top, left = _cropped(values)
    figure, axes = _figure(*part.shape)
    axes.set_facecolor(NOTHING)
    image = axes.imshow(part, cmap=COLOURS, aspect="equal", interpolation="nearest")
    figure.colorbar(image, ax=axes, label=label, fraction=0.04)
    if part.size <= MOST_LABELS:
        middle = np.nanmin(part) + (np.nanmax(part) - np.nanmin(part)) / 2
        for (row, col), value in np.ndenumerate(part):
            if not np.isnan(value):
                colour = "black" if value > middle else "white"
                axes.text(col, row, f"{value:.0f}", ha="center", va="center", fontsize=6, color=colour)
    for axis, start, extent in ((axes.yaxis, top, part.shape[0]), (axes.xaxis, left, part.shape[1])):
        step = max(1, extent // 8)
        axis.set_ticks(range(0, extent, step), labels=[str(start + i) for i in range(0, extent, step)])
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("column")
    axes.set_ylabel("row")
    return figure, axes, (top, left)


def thread_map(trace: Trace, array: str, op: str = "load", width: int | None = None) -> Figure:
    """Draw the thread, by its position in the block, that accesses each element first; warps are outlined.

    Parameters
    ----------
    trace : Trace
        Of one block, or the picture mixes several.
    array : str
        The array's name.
    op : str
        "load", "store", "copy" or "atomic".
    width : int, optional
        Elements in a row of the picture; by default the array's own rows, or 32 if it has one dimension.

    Raises
    ------
    ValueError
        if the array was not accessed so.
    """
    indices, threads = trace.touched(array, op)
    (rows, cols), shape = _plane(trace, array, indices, width)
    values = np.full(shape, np.nan)
    values[rows[::-1], cols[::-1]] = threads[::-1]  # the first one last
    figure, axes, (top, left) = _grid(values, f"{trace.kernel}: threads that {op} {array}", "thread")
    part = values[top:, left:]
    warps = np.where(np.isnan(part), -1, np.nan_to_num(part) // WARP_SIZE)
    for row, col in np.argwhere(warps[:, 1:] != warps[:, :-1]):
        axes.plot([col + 0.5, col + 0.5], [row - 0.5, row + 0.5], color="red", linewidth=1.2)
    for row, col in np.argwhere(warps[1:] != warps[:-1]):
        axes.plot([col - 0.5, col + 0.5], [row + 0.5, row + 0.5], color="red", linewidth=1.2)
    extent = _cropped(values)[0].shape
    axes.set_xlim(-0.5, extent[1] - 0.5)
    axes.set_ylim(extent[0] - 0.5, -0.5)
    return figure


def reuse_map(trace: Trace, array: str, op: str = "load", width: int | None = None) -> Figure:
    """Draw how often each element is accessed; parameters and errors are those of `thread_map`."""
    indices, _ = trace.touched(array, op)
    (rows, cols), shape = _plane(trace, array, indices, width)
    counts = np.zeros(shape)
    np.add.at(counts, (rows, cols), 1)
    values = np.where(counts > 0, counts, np.nan)
    return _grid(values, f"{trace.kernel}: accesses ({op}) to each element of {array}", "accesses")[0]


def bank_map(trace: Trace, request: int) -> Figure:
    """Draw the wavefronts of a request to shared memory: in each bank, the lanes that its word goes to.

    Parameters
    ----------
    trace : Trace
        What was recorded.
    request : int
        A row of `Trace.requests`.

    Raises
    ------
    ValueError
        if there is none such, or it is one to global memory.
    """
    lanes, row = trace.lanes(request), trace.requests.iloc[request]
    if row["space"] != "shared":
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
    figure, axes = _figure(len(fronts), rules.BANKS)
    cells = np.full((len(fronts), rules.BANKS), np.nan)
    for front, served in enumerate(fronts):
        for bank, reached in served.items():
            cells[front, bank] = len(reached)
            text = str(reached[0]) if len(reached) == 1 else f"{reached[0]}..\n{len(reached)}x"
            axes.text(bank, front, text, ha="center", va="center", fontsize=6, color="white")
    axes.imshow(np.where(np.isnan(cells), 1.0, 0.25), cmap="gray", vmin=0, vmax=1.15, aspect="equal")
    axes.set_xticks(range(0, rules.BANKS, 4))
    axes.set_yticks(range(len(fronts)))
    axes.set_xlabel("bank")
    axes.set_ylabel("wavefront")
    what = f"{row['op']} of {row['array']}, line {row['line']}, {row['bits']} bits a lane"
    axes.set_title(f"{trace.kernel}: {what}: {len(fronts)} wavefronts; lanes served", fontsize=10)
    return figure
