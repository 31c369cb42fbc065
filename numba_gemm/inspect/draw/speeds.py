"""Charts of measured speeds: the ladder and the roofline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...models.roofline import arithmetic_intensity, roofline
from .canvas import FONT, WIDTH, ink_on, new_figure, set_labels
from .palette import ACCENT, CHOICE, CUBLAS, OTHER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Entries of results other than stages, and their styles.
BASELINES: dict[str, dict[str, Any]] = {
    "cublas": {"color": CUBLAS, "linestyle": "--", "marker": "x"},
    "auto": {"color": CHOICE, "linestyle": "-", "marker": "*"},
    "cpu": {"color": OTHER, "linestyle": ":", "marker": "."},
    # Stages for other shapes than the ladder's.
    "short_sums": {"color": ACCENT, "linestyle": ":", "marker": "8"},
    "small_matrices": {"color": ACCENT, "linestyle": "--", "marker": "d"},
    "thin": {"color": ACCENT, "linestyle": "-.", "marker": "h"},
}
MARKERS = "ov^<>sDpPX*"
CHOICE_LABEL = "tiled_sgemm's choice"
SIMULATED = "CUDA simulator: these timings mean nothing"
LADDER_SHAPE = (4096, 4096, 4096)  # of the ladder's table in the documentation


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
    from ...kernels.ladder import STAGES

    ladder = [name for name in STAGES if name not in BASELINES and (whole or name in stages)]
    return ladder + [name for name in dict.fromkeys(stages) if name not in STAGES and name not in BASELINES]


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
    """Return the shape of the ladder's table if all stages have it, else the most common one, cubes first."""
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
    figure = new_figure(WIDTH, 0.3 * len(shown) + 1.7)
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
        ink = ink_on(to_rgb(looks[name]["color"])) if inside else "black"
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
    set_labels(axes, title, "TFLOP/s; × is the gain over the stage above", "")
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
    figure = new_figure(WIDTH, 6.2)
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
    set_labels(axes, "Roofline" + (f", {named}" if named else ""), across, "GFLOP/s")
    axes.grid(True, which="major", alpha=0.25)
    figure.legend(loc="outside lower center", ncols=4, fontsize=FONT - 1, frameon=False)
    return figure
