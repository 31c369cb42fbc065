"""Drawing to files with matplotlib, without a display."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from numba_gemm.lab.harness.experiment import Experiment

DPI = 120


def pyplot() -> Any:
    """Import matplotlib.pyplot for drawing to files; a ModuleNotFoundError gives the command that installs it."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ModuleNotFoundError("plots need matplotlib: pip install matplotlib") from None
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
