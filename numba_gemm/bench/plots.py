"""Two pictures of a run: speed against size, and the roofline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from numba_gemm.bench.results import AUTO, CPU, CUBLAS, fastest, names_in, of_float32, records
from numba_gemm.models.roofline import arithmetic_intensity, roofline

SPEED_PNG, ROOFLINE_PNG = "gflops_vs_size.png", "roofline.png"

# The rungs climb through viridis, whose order survives colour blindness and grey printing; markers tell neighbours
# apart. Baselines take colours of Okabe and Ito's palette that are not in it.
MARKERS = "ov^<>sDpPX*"
BASELINE_STYLES: dict[str, dict[str, Any]] = {
    CUBLAS: {"color": "black", "linestyle": "--", "marker": "x"},
    AUTO: {"color": "#D55E00", "linestyle": "-", "marker": "*"},
    CPU: {"color": "#CC79A7", "linestyle": ":", "marker": "."},
}


def pyplot() -> Any:
    """matplotlib.pyplot, drawing to files only.

    Raises
    ------
    ModuleNotFoundError
        when matplotlib is not installed; it says how to install it.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ModuleNotFoundError("--plot needs matplotlib: pip install 'numba-gemm[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def styles(stages: list[str]) -> dict[str, dict[str, Any]]:
    """Colour, line and marker of every stage."""
    from matplotlib import colormaps

    rungs = [stage for stage in stages if stage not in BASELINE_STYLES]
    ramp = colormaps["viridis"]
    climbing = {
        stage: {
            "color": ramp(0.95 * index / max(1, len(rungs) - 1)),
            "linestyle": "-",
            "marker": MARKERS[index % len(MARKERS)],
        }
        for index, stage in enumerate(rungs)
    }
    return climbing | BASELINE_STYLES


def families(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The rows that share an axis: cubes, M = N at each K with two sizes or more; all shapes where there is neither."""
    square = frame[frame["m"] == frame["n"]]
    found = [("M = N = K", square[square["m"] == square["k"]])]
    found += [(f"M = N, K = {k}", rows) for k, rows in square.groupby("k")]
    found = [(title, rows) for title, rows in found if rows["m"].nunique() > 1]
    return found or [("every shape, by the cube root of M*N*K", frame)]


def speed_against_size(frame: pd.DataFrame, environment: Mapping[str, Any], path: Path) -> None:
    """GFLOP/s of every stage against M, a panel a family of shapes."""
    plt = pyplot()
    best = fastest(frame)
    panels = families(best)
    stages = names_in(records(best), "stage")
    looks = styles(stages)
    figure, axes = plt.subplots(1, len(panels), figsize=(7.5 * len(panels), 6), squeeze=False, sharey=True)
    for axis, (title, rows) in zip(axes[0], panels, strict=True):
        by_cube = title.startswith("every")
        size = (rows["m"] * rows["n"] * rows["k"]) ** (1 / 3) if by_cube else rows["m"]
        for stage in stages:
            chosen = rows["stage"] == stage
            # A span from p10 to p90 at each point: most are thinner than the line.
            ordered = rows[chosen].assign(size=size[chosen]).sort_values("size")
            spread = ordered["gflops"] * ordered["median_us"]
            axis.plot(ordered["size"], ordered["gflops"], label=stage, markersize=5, linewidth=1.4, **looks[stage])
            axis.fill_between(
                ordered["size"],
                spread / ordered["p90_us"],
                spread / ordered["p10_us"],
                color=looks[stage]["color"],
                alpha=0.2,
                linewidth=0,
            )
        peak = gpu_number(environment, "fp32_peak_gflops")
        if peak:
            axis.axhline(peak, color="grey", linewidth=1)
            axis.annotate("FP32 peak", (0.01, peak), xycoords=("axes fraction", "data"), va="bottom", color="grey")
        # Linear upwards: the rungs worth telling apart are within a factor of two of each other.
        axis.set_ylim(bottom=0)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.set_title(title)
        axis.set_xlabel("size" if by_cube else "M")
        axis.grid(True, which="both", alpha=0.2)
    axes[0][0].set_ylabel("GFLOP/s")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    finish(plt, figure, environment, path)


def roofline_chart(frame: pd.DataFrame, environment: Mapping[str, Any], path: Path) -> None:
    """GFLOP/s of every stage against arithmetic intensity, under the two roofs; the CPU stands under others."""
    plt = pyplot()
    best = fastest(frame[frame["stage"] != CPU])
    stages = names_in(records(best), "stage")
    intensity = pd.Series(
        [arithmetic_intensity(row["m"], row["n"], row["k"]) for row in records(best)], index=best.index, dtype=float
    )
    figure, axis = plt.subplots(figsize=(9, 6))
    looks = styles(stages)
    for stage in stages:
        chosen = best["stage"] == stage
        look = {**looks[stage], "linestyle": "none"}
        axis.plot(intensity[chosen], best.loc[chosen, "gflops"], label=stage, markersize=6, alpha=0.85, **look)
    peak, bandwidth = gpu_number(environment, "fp32_peak_gflops"), gpu_number(environment, "bandwidth_gb_s")
    if peak and bandwidth:
        low, high = min(intensity.min() / 2, peak / bandwidth / 4), intensity.max() * 2
        corners = [low, peak / bandwidth, max(high, 2 * peak / bandwidth)]
        axis.plot(corners, [roofline(x, peak, bandwidth) for x in corners], color="grey", linewidth=1)
        axis.annotate(f"{peak:,.0f} GFLOP/s", (corners[-1], peak), ha="right", va="bottom", color="grey")
        axis.annotate(f"{bandwidth:,.0f} GB/s", (low, low * bandwidth), ha="left", va="top", color="grey")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_yscale("log")
    axis.set_xlabel("arithmetic intensity: FLOP a byte of A, B and C, each moved once")
    axis.set_ylabel("GFLOP/s")
    axis.set_title("Roofline")
    axis.grid(True, which="both", alpha=0.2)
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize="small")
    finish(plt, figure, environment, path)


def gpu_number(environment: Mapping[str, Any], name: str) -> float:
    """A number of the GPU's description, or 0 where there is no GPU."""
    return float((environment.get("gpu") or {}).get(name) or 0)


def finish(plt: Any, figure: Any, environment: Mapping[str, Any], path: Path) -> None:
    """Name the device, save, close."""
    gpu = environment.get("gpu") or {"name": "CUDA simulator: these timings mean nothing"}
    figure.suptitle(gpu["name"])
    figure.tight_layout()
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


def draw(frame: pd.DataFrame, environment: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write both pictures; nothing when nothing was timed, the CPU apart."""
    frame = of_float32(frame)
    if fastest(frame[frame["stage"] != CPU]).empty:
        return []
    speed_against_size(frame, environment, folder / SPEED_PNG)
    roofline_chart(frame, environment, folder / ROOFLINE_PNG)
    return [folder / SPEED_PNG, folder / ROOFLINE_PNG]
