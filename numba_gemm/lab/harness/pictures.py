"""Pictures with matplotlib, without a display; and their panels, described by columns.

Measurements are solid, their predictions dashed, in the same colour. The predictions of ``gb_s`` are the columns
``predicted_gb_s`` and ``predicted_by_..._gb_s``. `rows` is a condition of ``DataFrame.query``.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from numba_gemm.device.units import ceil_div

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from numba_gemm.lab.harness.experiment import Experiment

Panel = Callable[["pd.DataFrame", "Axes"], None]

# Palette of Okabe and Ito, distinguishable with any colour vision, and two more.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "black", "0.6", "#8B4513")
MARKERS = "os^Dv<>*"  # not as many as colours, so that each pair comes late again
DASHES = ("--", ":")  # of predictions; a column has at most two
UNITS = {
    "us": "µs",
    "ms": "ms",
    "cycles": "cycles",
    "kib": "KiB",
    "mib": "MiB",
    "gb_s": "GB/s",
    "tb_s": "TB/s",
    "tflop_s": "TFLOP/s",
}
EVERY = "index >= 0"  # condition of all rows
DPI = 120
MANY_LABELS = 6  # of a legend in large letters


def pyplot() -> Any:
    """Import matplotlib.pyplot for drawing to files; a ModuleNotFoundError gives the command that installs it."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "plots need matplotlib: pip install matplotlib, or draw none (numba-gemm lab --no-plot)", name="matplotlib"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def png(figure: Any, **options: Any) -> bytes:
    """Render a figure as PNG; ``options`` are those of ``savefig``."""
    file = io.BytesIO()
    figure.savefig(file, format="png", **options)
    return file.getvalue()


def drawn(experiment: Experiment, frame: pd.DataFrame, device: str) -> bytes:
    """Render the plot of an experiment as PNG, titled with the name of the device."""
    assert experiment.plot is not None
    plt = pyplot()
    figure = plt.figure(figsize=experiment.figure, layout="constrained")
    try:
        experiment.plot(frame, figure)
        section = f" ({experiment.section})" if experiment.section else ""
        figure.suptitle(f"{experiment.name}{section}: {device}")
        return png(figure, dpi=DPI)
    finally:
        plt.close(figure)


def panels(*parts: Panel, columns: int = 0, sharey: bool = False) -> Callable[[pd.DataFrame, Figure], None]:
    """Return the plot of some panels, by default in one row; with `sharey`, at the same scale."""

    def plot(frame: pd.DataFrame, figure: Figure) -> None:
        across = columns or len(parts)
        axes = figure.subplots(ceil_div(len(parts), across), across, squeeze=False, sharey=sharey)
        for part, place in itertools.zip_longest(parts, axes.flat):
            part(frame, place) if part else place.axis("off")
            if said := place.get_legend_handles_labels()[0]:
                place.legend(fontsize="xx-small" if len(said) > MANY_LABELS else "x-small")
        if sharey:  # of all panels, not of the first one
            axes[0, 0].autoscale(axis="y")
            axes[0, 0].set_ylim(bottom=0)

    return plot


def predictions(frame: pd.DataFrame, column: str) -> dict[str, str]:
    """Return the columns that predict a column, and their labels."""
    found = [name for name in map(str, frame) if re.fullmatch(rf"predicted_(by_\w+_)?{column}", name)]
    return {name: name.removesuffix(f"_{column}").replace("_", " ") for name in found}


def named(label: str, values: Any) -> str:
    """Format the values that tell a curve or a bar from others, by default those that are not missing."""
    parts = values if isinstance(values, tuple) else (values,)
    there = [str(part) for part in parts if part not in ("", None) and part == part]
    return label.format(*parts) if label else ", ".join(there)


def titled(column: str) -> str:
    """Return the title of an axis: the unit of a column, its name, or both."""
    words = column.split("_")
    unit = next((tail for count in (2, 1) if (tail := "_".join(words[-count:])) in UNITS), None)
    name = column.removesuffix(unit or "").replace("_", " ").strip()
    return name if unit is None else f"{name} in {UNITS[unit]}" if name else UNITS[unit]


def curves(
    x: str,
    y: str,
    by: str | list[str] = "",
    rows: str = EVERY,
    label: str = "",
    log: str = "",
    lines: Mapping[str, str] | None = None,
    dashed: Mapping[str, str] | None = None,
    **labels: Any,
) -> Panel:
    """Return a panel with a curve of a column, and its predictions, for each group of rows.

    `by` are the columns that tell curves apart, and `label` formats their values; the axes of `log`, such as "xy", are
    logarithmic; `lines` has columns whose values are marked by dotted lines, by axis; `dashed` has columns that are
    drawn instead of predictions, and their labels; `labels` are properties of the axes, as of ``Axes.set``.
    """

    def draw(frame: pd.DataFrame, axes: Axes) -> None:
        shown = frame.query(rows)
        for index, (values, at) in enumerate(shown.groupby(by, sort=False) if by else [("measured", shown)]):
            at, colour, marker = at.sort_values(x), COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
            axes.plot(at[x], at[y], color=colour, marker=marker, markersize=4, label=named(label, values))
            for (column, said), dashes in zip((dashed or predictions(frame, y)).items(), DASHES):
                axes.plot(at[x], at[column], color=colour, linestyle=dashes, label=None if index else said)
        for axis, column in (lines or {}).items():
            draw_line, said = axes.axvline if axis == "x" else axes.axhline, titled(column)
            for i, value in enumerate(shown[column].dropna().unique()):
                draw_line(value, color="0.5", linestyle=":", label=None if i else said)
        if "x" in log:
            axes.set_xscale("log", base=2)
        if "y" in log:
            axes.set_yscale("log")
        axes.set(**{"xlabel": titled(x), "ylabel": titled(y)} | ({} if "y" in log else {"ylim": (0, None)}) | labels)

    return draw


def bars(y: str, by: list[str], rows: str = EVERY, label: str = "", said: str = "measured", **labels: Any) -> Panel:
    """Return a panel with a bar of a column for each row, the first at the top, and a mark at each prediction.

    The parameters are those of `curves`; `said` is the bars' label.
    """

    def draw(frame: pd.DataFrame, axes: Axes) -> None:
        shown = frame.query(rows)
        names = [named(label, tuple(values)) for values in shown[by].itertuples(index=False)]
        places = range(len(names))
        axes.bar_label(axes.barh(places, shown[y], height=0.6, color=COLOURS[0], label=said), fmt=" {:.4g}")
        for colour, (column, name) in zip(COLOURS[1:], predictions(frame, y).items()):
            axes.plot(shown[column], places, linestyle="", marker="|", markersize=16, color=colour, label=name)
        axes.set_yticks(places, names, fontsize="small")
        axes.invert_yaxis()
        axes.set(**{"xlabel": titled(y), "xmargin": 0.15} | labels)

    return draw


def text(columns: list[str], rows: str = EVERY, **labels: Any) -> Panel:
    """Return a panel with columns as text."""

    def draw(frame: pd.DataFrame, axes: Axes) -> None:
        said = frame.query(rows)[columns].to_string(index=False, na_rep="")
        axes.axis("off")
        axes.text(0, 1, said, va="top", family="monospace", fontsize="x-small", transform=axes.transAxes)
        axes.set(**labels)

    return draw
