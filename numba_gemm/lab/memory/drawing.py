"""Style of the laboratory's plots: measurements solid, predictions dashed, in the same colour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["COLOURS", "MEASURED", "PREDICTED", "bars", "curve"]

# Palette of Okabe and Ito, distinguishable with any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "black")
MARKERS = "os^Dv<>"
MEASURED: dict[str, Any] = {"linestyle": "-", "linewidth": 1.6, "markersize": 4}
PREDICTED: dict[str, Any] = {"linestyle": "--", "linewidth": 1.2}


def curve(axes: Axes, x: Any, measured: Any, predicted: Any | None, label: str, index: int) -> None:
    """Plot a measured curve and the predicted one in the index-th colour."""
    colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
    axes.plot(x, measured, label=label, color=colour, marker=marker, **MEASURED)
    if predicted is not None:
        axes.plot(x, predicted, label=f"{label}, predicted", color=colour, **PREDICTED)


def bars(axes: Axes, names: Sequence[str], measured: Any, predicted: Any | None) -> None:
    """Plot horizontal bars of measurements, the first at the top, with a mark at each prediction."""
    places = list(range(len(names)))
    axes.barh(places, measured, height=0.6, color=COLOURS[0], label="measured")
    if predicted is not None:
        axes.plot(predicted, places, linestyle="none", marker="|", markersize=16, color=COLOURS[1], label="predicted")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.legend()
