"""Style of the laboratory's plots: measurements solid, predictions dashed, in the same colour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:  # for annotations; experiments run without matplotlib
    Axes = Figure = Any

__all__ = ["COLOURS", "Axes", "Figure", "bars", "curve", "curves", "log2_x"]

# Palette of Okabe and Ito, distinguishable with any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "black")
MARKERS = "os^Dv<>"
MEASURED: dict[str, Any] = {"linestyle": "-", "linewidth": 1.6, "markersize": 4}
PREDICTED: dict[str, Any] = {"linestyle": "--", "linewidth": 1.2}


def curve(
    axes: Axes, x: Any, measured: Any, predicted: Any | None, label: str, index: int, in_legend: bool = True
) -> None:
    """Plot a measured curve and the predicted one in the index-th colour, the latter perhaps without legend entry."""
    colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
    axes.plot(x, measured, label=label, color=colour, marker=marker, **MEASURED)
    if predicted is not None:
        axes.plot(x, predicted, label=f"{label}, predicted" if in_legend else None, color=colour, **PREDICTED)


def curves(
    axes: Axes,
    rows: pd.DataFrame,
    by: str | list[str],
    x: str,
    y: str,
    label: str = "{}",
    in_legend: bool = True,
    **labels: Any,
) -> None:
    """Plot a curve of column `y` and its prediction for each group of rows, in the order of their appearance.

    `labels` are properties of the axes, as of ``Axes.set``.
    """
    for index, (name, at) in enumerate(rows.groupby(by, sort=False)):
        named = label.format(", ".join(map(str, name)) if isinstance(name, tuple) else name)
        at = at.sort_values(x)
        curve(axes, at[x], at[y], at.get(f"predicted_{y}"), named, index, in_legend)
    axes.set(**labels)


def bars(axes: Axes, names: Sequence[str], measured: Any, predicted: Any | None, **labels: Any) -> None:
    """Plot horizontal bars of measurements, the first at the top, with a mark at each prediction."""
    places = list(range(len(names)))
    axes.barh(places, measured, height=0.6, color=COLOURS[0], label="measured")
    if predicted is not None:
        axes.plot(predicted, places, linestyle="none", marker="|", markersize=16, color=COLOURS[1], label="predicted")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set(**labels)
    axes.legend()


def log2_x(axes: Axes, ticks: Sequence[int]) -> None:
    """Scale the x axis by powers of two, with these ticks as plain numbers."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
