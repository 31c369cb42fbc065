"""Pictures of one request of a warp: banks of shared memory, sectors of global memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...models import requests as rules
from ..recording import GLOBAL
from ..tracing import Trace
from .canvas import FONT, SMALLEST_FONT, font_size, ink_at, new_cells, plural, set_labels
from .palette import GRID, OUTLINE, UNUSED, ramp

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    figure, axes, cell = new_cells(len(fronts), rules.BANKS, tall=1.6)
    cells = np.full((len(fronts), rules.BANKS), np.nan)
    for front, served in enumerate(fronts):
        for bank, reached in served.items():
            cells[front, bank] = len(reached)
    image = axes.imshow(cells, cmap=ramp(row["array"]), vmin=0, vmax=np.nanmax(cells), aspect=1.6)
    for front, served in enumerate(fronts):
        for bank, reached in served.items():
            text = str(reached[0]) if len(reached) == 1 else f"{reached[0]}\n×{len(reached)}"
            ink = ink_at(image, len(reached))
            size_of_text = font_size(cell, max(map(len, text.split("\n")))) or SMALLEST_FONT
            axes.text(bank, front, text, ha="center", va="center", fontsize=size_of_text, color=ink)
    axes.set_xticks(np.arange(rules.BANKS + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(fronts) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color=GRID, linewidth=0.6)
    axes.hlines(np.arange(1, len(fronts)) - 0.5, -0.5, rules.BANKS - 0.5, color=OUTLINE, linewidth=1.2)
    axes.set_xticks(range(0, rules.BANKS, 4))
    axes.set_yticks(range(len(fronts)))
    axes.tick_params(which="minor", length=0)
    count = plural(len(fronts), "wavefront")
    if row["op"] == "copy" and row["wavefronts"] != len(fronts):
        count += f" of shared memory's banks, {row['wavefronts']} of the whole copy"
    many = any(len(reached) > 1 for served in fronts for reached in served.values())
    note = "; n, ×m: m lanes get one word, n is the first" if many else ""
    set_labels(axes, f"{_what(trace, row)}\n{count}", f"bank; in it the lane that is served{note}", "wavefront")
    return figure


def _what(trace: Trace, row: Any) -> str:
    """Describe a request, for a title."""
    what = f"{row['op']} of {row['array']} by warp {row['warp']}"
    return f"{trace.kernel}, line {row['line']}: {what}, {row['bits']} bits per lane"


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
    unit = min(rules.WORD_BYTES, size)
    used: dict[int, list[int]] = {}  # lanes by address
    for lane, address in lanes:
        used.setdefault(address, []).append(lane)
    lines = {line: number for number, line in enumerate(sorted({address // rules.LINE_BYTES for address in used}))}
    cells = np.full((len(lines), rules.LINE_BYTES // unit), np.nan)
    for address, own in used.items():
        at = address % rules.LINE_BYTES // unit
        cells[lines[address // rules.LINE_BYTES], at : at + size // unit] = len(own)
    moved = sorted({address // rules.SECTOR_BYTES for address in used})
    words = rules.LINE_BYTES // rules.WORD_BYTES
    many = any(len(own) > 1 for own in used.values())
    tall = 1.6 if many else 1.3 if len(lines) <= 8 else 0.9
    figure, axes, cell = new_cells(len(lines), words, tall)
    wide = rules.SECTOR_BYTES // rules.WORD_BYTES  # words per sector
    for sector in moved:
        line, within = divmod(sector * rules.SECTOR_BYTES, rules.LINE_BYTES)
        place = (within / rules.WORD_BYTES - 0.5, lines[line] - 0.5)
        axes.add_patch(Rectangle(place, wide, 1, facecolor="white", edgecolor=UNUSED, hatch="////", linewidth=0))
        axes.add_patch(Rectangle(place, wide, 1, fill=False, edgecolor=OUTLINE, linewidth=1.6, zorder=4))
    extent = (-0.5, words - 0.5, len(lines) - 0.5, -0.5)
    most = np.nanmax(cells)
    image = axes.imshow(cells, cmap=ramp(row["array"]), vmin=0, vmax=most, extent=extent, aspect=tall, zorder=2)
    for address, own in used.items():
        left, width = address % rules.LINE_BYTES / rules.WORD_BYTES - 0.5, size / rules.WORD_BYTES
        line = lines[address // rules.LINE_BYTES]
        axes.add_patch(Rectangle((left, line - 0.5), width, 1, fill=False, edgecolor="white", linewidth=1, zorder=3))
        text = str(own[0]) if len(own) == 1 else f"{own[0]}\n×{len(own)}"
        points = font_size(cell * min(width, 2), max(map(len, text.split("\n"))))
        if width >= 1:
            look: dict[str, Any] = {
                "color": ink_at(image, len(own)),
                "fontsize": min(points or SMALLEST_FONT, FONT - 1),
            }
            axes.text(left + width / 2, line, text, ha="center", va="center", zorder=5, **look)
    axes.vlines(np.arange(wide, words, wide) - 0.5, -0.5, len(lines) - 0.5, color=GRID, linewidth=1, zorder=0)
    axes.set_xticks(range(0, words, 4))
    labelled = list(lines.items())[:: max(1, len(lines) // 16)]
    axes.set_yticks([number for _, number in labelled], labels=[str(line * rules.LINE_BYTES) for line, _ in labelled])
    bytes_used, bytes_moved = int((~np.isnan(cells)).sum()) * unit, len(moved) * rules.SECTOR_BYTES
    taken, ideal = int(row["sectors"]), int(row["ideal"])
    found = f"{plural(taken, 'sector')}, {ideal} would do: efficiency {100 * ideal / taken:.3g} %"
    if taken != len(moved):
        found += f"; {len(moved)} different, a copy takes one again for each sector that it goes to"
    title = f"{_what(trace, row)}\n{found}\n{bytes_used} of {bytes_moved} bytes used"
    note = "; n, ×m: m lanes use it, n is the first" if many else ""
    set_labels(
        axes, title, f"word of 32 bits; in it the lane that uses it{note}; hatched: moved, not used", "byte of the line"
    )
    axes.set_xlim(-0.5, words - 0.5)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    return figure
