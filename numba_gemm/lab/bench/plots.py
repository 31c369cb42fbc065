"""Plots of a run: speed against size, the roofline, and the ladder."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from numba_gemm.inspect.draw import BASELINES, ladder_chart, roofline_chart
from numba_gemm.inspect.draw import stage_styles as styles
from numba_gemm.inspect.draw.speeds import SIMULATED
from numba_gemm.lab.bench.results import CPU, NOT_STAGES, fastest, names_in, of_float32, records
from numba_gemm.lab.harness.pictures import png, pyplot

SPEED_PNG, ROOFLINE_PNG, LADDER_PNG = "gflops_vs_size.png", "roofline.png", "ladder.png"
DPI = 130


def families(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Group rows by panel: cubes, and M = N for each K with at least two sizes; all shapes if there is neither."""
    square = frame[frame["m"] == frame["n"]]
    cubes = [("M = N = K", square[square["m"] == square["k"]])]
    found = [*cubes, *((f"M = N, K = {k}", rows) for k, rows in square.groupby("k"))]
    found = [(title, rows.assign(size=rows["m"])) for title, rows in found if rows["m"].nunique() > 1]
    return found or [("every shape", frame.assign(size=(frame["m"] * frame["n"] * frame["k"]) ** (1 / 3)))]


def speed_against_size(frame: pd.DataFrame, environment: Mapping[str, Any]) -> bytes:
    """Plot GFLOP/s of every stage against M, or the cube root of M*N*K, one panel per family of shapes."""
    plt = pyplot()
    best = fastest(frame)
    panels, looks = families(best), styles(names_in(records(best), "stage"))
    figure, axes = plt.subplots(len(panels), 1, figsize=(9, 5 * len(panels)), squeeze=False)
    for axis, (title, rows) in zip(axes.flat, panels, strict=True):
        for stage, look in looks.items():
            ordered = rows[rows["stage"] == stage].sort_values("size")
            axis.plot(ordered["size"], ordered["gflops"], label=stage, markersize=5, linewidth=1.4, **look)
        if peak := (environment.get("gpu") or {}).get("fp32_peak_gflops"):
            axis.axhline(peak, color="grey", linewidth=1)
            axis.annotate("FP32 peak", (0.01, peak), xycoords=("axes fraction", "data"), va="bottom", color="grey")
        # Linear in y: the stages of interest are within a factor of two of each other.
        xlabel = "M" if title.startswith("M") else "cube root of M*N*K"
        axis.set(ylim=(0, None), title=title, xlabel=xlabel, ylabel="GFLOP/s")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.grid(True, which="both", alpha=0.2)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="upper center", bbox_to_anchor=(0.5, 0), ncols=5)
    figure.suptitle((environment.get("gpu") or {"name": SIMULATED})["name"])
    figure.tight_layout()
    drawn = png(figure, dpi=DPI, bbox_inches="tight")
    plt.close(figure)
    return drawn


def pictures(frame: pd.DataFrame, environment: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the plots by file: none if only the CPU was timed, and no ladder if no stage of it was timed."""
    frame = of_float32(frame)
    timed = fastest(frame[frame["stage"] != CPU])
    if timed.empty:
        return {}
    found = {
        SPEED_PNG: speed_against_size(frame, environment),
        ROOFLINE_PNG: png(roofline_chart(frame, environment), dpi=DPI),
    }
    if not set(timed["stage"]) <= {*NOT_STAGES, *BASELINES}:
        found[LADDER_PNG] = png(ladder_chart(frame, environment), dpi=DPI)
    return found
