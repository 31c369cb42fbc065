"""Blocks of pages: tables and sentences about the public function, the ladders, targets and precisions."""

import math
import re
from collections.abc import Callable, Mapping
from statistics import geometric_mean
from typing import Any

import pandas as pd

from blocks import published
from blocks.published import Published, ReadmeError, code, missed, source, spelled, tflops
from numba_gemm.gemm.fp32_auto import AUTO_K
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.bench.results import AUTO, CUBLAS, GIVEN_BF16, alone, fastest, records
from numba_gemm.lab.bench.tables import MISSING, Column, Table, figure, number, significant, table, text
from numba_gemm.lab.bench.targets.experiment import EXPERIMENT as TARGETS
from numba_gemm.lab.bench.targets.verdicts import PRECISION_TARGETS, is_large_cube, precision_verdicts
from numba_gemm.lab.bench.tensor_ladder import DECOMPOSE, LINES, SPECIAL_VALUES
from numba_gemm.lab.harness.environment import device_name

HEADLINE_SHAPES = (
    *(Shape(1024, 1024, 1024), Shape(2048, 2048, 1024), Shape(4096, 4096, 4096)),
    *(Shape(8192, 8192, 8192), Shape(16384, 16384, 1024)),
)
SPECIAL = {"nan": "NaN", "inf": "infinity"}
ERROR = figure("error / bound", "error_in_bounds", significant, 2)
OTHER_ARRAYS = re.compile("(cupy|numba) arrays")  # whose rows are summed up in a sentence


def headline(found: Published) -> str:
    """Table of the public function and cuBLAS at a few sizes, with the chosen stage and configuration."""
    timed, rows, contenders = fastest(alone(found.frame)), [], []
    for shape in HEADLINE_SHAPES:
        here = published.rows_at(timed, shape)
        if AUTO in here:
            contenders += [here[AUTO], here[CUBLAS]]
            rows.append(here[AUTO] | {"shape": spelled(shape), "cublas": tflops(here, CUBLAS)})
    if not rows:
        raise ReadmeError(f"the results hold none of the headline's shapes: {', '.join(map(str, HEADLINE_SHAPES))}")
    made = table(
        "",
        rows,
        *(text("shape", "M x N x K"), figure("cuBLAS SGEMM", "cublas", number)),
        Column("`tiled_sgemm`", lambda row: number(row["gflops"] / 1000)),
        *(figure("ratio", "ratio_to_cublas", number, 3), code("config", "its choice"), ERROR),
    )
    said = f"TFLOP/s in FP32 arithmetic (TF32 off), {published.STEADY}"
    return f"{said}:\n\n{made.markdown()}\n\n{published.steady_source(found.environment, contenders)}"


def ladder(found: Published) -> str:
    """Table with one line per stage and its gain over the previous one."""
    rows = published.rows_at(fastest(found.frame), published.LADDER_SHAPE)
    if not published.ladder_stages(rows):
        raise ReadmeError(f"the results hold no stage at {published.LADDER_SHAPE}")
    names, before = {AUTO: "`tiled_sgemm`, its own choice", CUBLAS: "cuBLAS SGEMM"}, math.nan
    lines = []
    for stage in [*published.ladder_stages(rows), *(name for name in names if name in rows)]:
        speed = tflops(rows, stage)
        gain = math.nan if stage in names else speed / before
        lines.append(rows[stage] | {"name": names.get(stage, f"`{stage}`"), "tflops": speed, "gain": gain})
        before = speed
    made = table(
        "",
        lines,
        *(text("name", "stage"), figure("TFLOP/s", "tflops", number)),
        *(figure("of FP32 peak", "percent_of_peak", number, 1, " %"), figure("/ cuBLAS", "ratio_to_cublas", number, 3)),
        *(figure("gain", "gain", number, 2, "x"), ERROR),
    )
    how = found.environment
    return f"At {spelled(published.LADDER_SHAPE)}, {published.in_turns(how)}:\n\n{made.markdown()}\n\n{source(how)}"


def targets(found: Published) -> str:
    """Table of the public function's targets and measurements."""
    judged, how = found.measured("targets", TARGETS.summary_file)
    rounds = {row["case"]: row["rounds"] for row in found.measured("targets")[0]}
    others = [row for row in judged if OTHER_ARRAYS.search(row["what"])]

    def cases(row: Mapping[str, Any]) -> str:
        return f"{row['cases'] - row['failed']} of {row['cases']}" if row["failed"] else str(row["cases"])

    def required(row: Mapping[str, Any]) -> str:
        return f"≤ {row['at_most']:.3g}" if math.isnan(row["at_least"]) else f"≥ {row['at_least']:.3g}"

    def statistic(row: Mapping[str, Any]) -> str:
        calls = rounds.get(row["worst"], 0) if math.isnan(row["at_least"]) else 0  # limits in microseconds
        return f"median of {calls:g}" if calls else published.STATISTICS[row["statistic"]]

    def worst(row: Mapping[str, Any]) -> str:
        return f"`{row['worst']}`" if row["cases"] > 1 and isinstance(row["worst"], str) else ""

    made = table(
        "",
        (row for row in judged if row not in others),
        *(text("what", "target"), Column("cases", cases)),
        Column("statistic", statistic, left=True),
        *(Column("required", required), Column("reached", lambda row: published.reached(row["value"], row["met"]))),
        Column("worst case", worst, left=True),
    )
    met = sum(bool(row["met"]) for row in others)
    further = f"Of the same host times for CuPy and Numba arrays, {met} of {len(others)} are met"
    parts = [made.markdown(), *([f"{further} (`{TARGETS.summary_file}`)."] if others else []), source(how)]
    return "\n\n".join(parts)


def streamed(found: Published) -> str:
    """Table of the speed of streamed calls relative to calls with operands in device memory."""
    rows, how = found.measured("streamed")

    def shown(form: str, scale: float = 1.0) -> Callable[[float], str]:
        return lambda value: MISSING if math.isnan(value) else form.format(value / scale)

    made = table(
        "",
        rows,
        *(code("precision"), text("operands")),
        figure("limit", "memory_limit", shown("{:g} GB", 1e9)),
        figure("taken", "peak_bytes", shown("{:.2f} GB", 1e9)),
        *(figure("seconds", "seconds", shown("{:.2f}")), figure("predicted", "predicted_s", shown("{:.2f}"))),
        Column("bound by", lambda row: row["bound_by"] if isinstance(row["bound_by"], str) else MISSING, left=True),
        *(figure("TFLOP/s", "tflops", shown("{:.1f}")), figure("of in-memory", "of_in_memory", shown("{:.2f}"))),
    )
    size = int(rows[0]["size"])
    return f"At {spelled(Shape(size, size, size))}:\n\n{made.markdown()}\n\n{source(how)}"


PRECISION_SHAPES = (
    *(Shape(1024, 1024, 1024), Shape(2048, 2048, 1024), Shape(4096, 4096, 1024)),
    *(Shape(4096, 4096, 4096), Shape(8192, 8192, 8192)),
)
SUMMARISED = ("bf16x6", "fp16x3", "tf32")  # the precisions that most users choose from


def precisions(found: Published) -> str:
    """Table of speed and error of every precision and of cuBLAS at a few sizes."""
    frame, how = found.precisions
    rows = {(row["shape"], row["stage"], row["precision"]): row for row in records(fastest(alone(frame)))}
    shown = [
        ("cuBLAS SGEMM", CUBLAS, "ieee"),
        *((f"`{name}`", AUTO, name) for name in dict.fromkeys(frame.loc[frame["stage"] == AUTO, "precision"])),
    ]
    shapes = [shape for shape in PRECISION_SHAPES if (str(shape), CUBLAS, "ieee") in rows]
    if not shapes:
        raise ReadmeError(f"{found.precisions_folder} holds none of {', '.join(map(str, PRECISION_SHAPES))}")
    lines, contenders = [], []
    for label, stage, precision in shown:
        chosen = [rows[str(shape), stage, precision] for shape in shapes]
        contenders += chosen
        speeds = [f"{row['gflops'] / 1000:.3g} ({row['ratio_to_cublas']:.2f})" for row in chosen]
        errors = chosen[-1]
        lines.append([label, *speeds, significant(errors["error_median"], 2), significant(errors["error_max"], 2)])
    headers = ["precision", *map(spelled, shapes), "median error", "largest"]
    made = Table("", headers, lines, left=["precision"]).markdown()
    said = (
        f"TFLOP/s, {published.STEADY}; in parentheses, multiples of cuBLAS SGEMM in the same run. "
        f"Decomposition and every other pass are included. Errors over |A| @ |B|, at {spelled(shapes[-1])}:"
    )
    power = "Tensor-core kernels run into the power cap, so the first calls after a pause are faster than that."
    return "\n\n".join(
        filter(None, [said, made, power, unfinished(frame, how), published.steady_source(how, contenders)])
    )


def unfinished(frame: pd.DataFrame, how: Mapping[str, Any]) -> str:
    """Sentence about the shapes that a run's command names and its results lack; empty if there are none."""
    wanted = {text.replace(",", "x") for text in re.findall(r"--shape[ =](\S+)", how["command"])}
    if not (missing := wanted - {row["shape"] for row in records(frame)}):
        return ""
    return f"The run was ended by its time limit after {len(wanted) - len(missing)} of {len(wanted)} shapes."


def precision_summary(found: Published) -> str:
    """Sentences about the precisions' speeds at one size, and the cost of NaN."""
    frame, how = found.precisions
    timed = published.warm_rows(fastest(alone(frame)), published.LADDER_SHAPE)
    if missing := [name for name in SUMMARISED if (AUTO, name) not in timed]:
        raise ReadmeError(f"{found.precisions_folder} holds no {', '.join(missing)} at {published.LADDER_SHAPE}")
    speeds = [
        f"`{name}` {row['gflops'] / 1000:.3g} ({row['ratio_to_cublas']:.2f})"
        for name, row in ((name, timed[AUTO, name]) for name in SUMMARISED)
    ]
    said = (
        f"TFLOP/s and multiples of cuBLAS SGEMM at {spelled(published.LADDER_SHAPE)} on an {device_name(how)}, "
        f"{published.STEADY}: {', '.join(speeds)}."
    )
    return f"{said} {special_line(found)}"


def precision_targets(found: Published) -> str:
    """Table of the precisions' targets and measurements."""
    frame, how = found.precisions
    judged = precision_verdicts(frame)
    if len(judged) < len(PRECISION_TARGETS):
        raise ReadmeError(f"{found.precisions_folder} holds too few shapes for its targets")
    lines = [
        [
            *(row["what"], str(row["cases"]), f"≥ {row['at_least']:g}"),
            *(published.reached(row["value"], row["met"]), f"`{row['worst']}`: {row['least']:.3g}"),
        ]
        for row in judged
    ]
    headers = ["target", "shapes", "required", "geometric mean", "least"]
    made = Table("", headers, lines, left=["target", "least"]).markdown()
    timed = fastest(alone(frame))
    said = filter(None, [accuracy_line(found), given_line(timed)])
    return "\n\n".join([made, *said, published.steady_source(how, records(timed))])


def given_line(timed: pd.DataFrame) -> str:
    """Sentence about cuBLAS on operands that are already BF16; empty if that was not measured."""
    rows = pd.DataFrame([row for row in records(timed) if row["precision"] == "bf16" and is_large_cube(row)])
    cubes = rows.pivot(index="m", columns="stage", values="median_us")
    ratios = cubes[GIVEN_BF16] / cubes[AUTO] if {GIVEN_BF16, AUTO} <= {*cubes.columns} else pd.Series()
    if ratios.dropna().empty:
        return ""
    share = geometric_mean(ratios.dropna())
    return (
        "cuBLAS BF16 is given the same FP32 operands and result; its time includes PyTorch's conversions. With "
        f"operands and result in BF16, cuBLAS takes {share:.2f} of the time of `bf16` on those cubes (geometric mean)."
    )


def accuracy_line(found: Published) -> str:
    """Sentence that compares the errors of the full-range precision with those of cuBLAS."""
    frame = pd.DataFrame(found.measured("accuracy", folder=published.PRECISIONS_FOLDER)[0])
    errors = frame.pivot_table(index=["distribution", "k"], columns="precision", values=["median", "max"])
    compared = errors[errors.index.get_level_values("k") >= AUTO_K]
    ours, theirs = (compared.xs(name, axis=1, level="precision") for name in ("bf16x6", "cublas"))
    better = [bool(row.all()) for row in ours.to_numpy() <= theirs.to_numpy()]
    share = (ours / theirs)["median"]
    return (
        f"Errors of `bf16x6` over |A| @ |B|, from K = {AUTO_K} to {frame['k'].max():,}, M = N = {frame['m'].max()}, "
        f"{frame['distribution'].nunique()} distributions: median and maximum are no larger than cuBLAS SGEMM's in "
        f"{sum(better)} of {len(better)} cases; the median is {share.min():.2g} to {share.max():.2g} of it."
    )


def tensor_ladder(found: Published) -> str:
    """Table with one line per tensor core stage: speed, gain in the same precision, and errors."""
    rows, how = found.tensor_ladder()
    stages = published.ladder_stages(rows)
    some, lines, before = rows[stages[-1]], [], math.nan
    for name in [*stages, CUBLAS]:
        row, own = rows[name], name == CUBLAS
        other = "" if own or row["precision"] == some["precision"] else f" in `{row['precision']}`"
        gain = math.nan if own else float(row["tflops"]) / before
        lines.append(row | {"stage": "cuBLAS SGEMM" if own else f"`{name}`{other}", "gain": gain})
        before = math.nan if other else float(row["tflops"])
    made = table(
        "",
        lines,
        *(text("stage"), figure("TFLOP/s", "tflops", number), figure("/ cuBLAS", "ratio_to_cublas", number, 2)),
        *(figure("gain", "gain", number, 2, "x"), figure("median error", "error_median", significant, 2)),
        figure("largest", "error_max", significant, 2),
    )
    decomposition = rows[DECOMPOSE]["median_us"]
    shape = spelled(Shape(some["m"], some["n"], some["k"]))
    whole = rows[stages[-1]]["median_us"] + decomposition
    return (
        f"`{some['precision']}` at {shape}, the product alone, in turns: decomposition takes "
        f"{number(decomposition, 0)} us more, {number(100 * decomposition / whole, 0)} % of both together. "
        f"Errors over |A| @ |B|, of positive operands:\n\n{made.markdown()}\n\n"
        f"{source(how)}"
    )


def special_values(found: Published) -> str:
    """Table of the cost of NaN and infinities, by precision and where they are."""
    rows, how = found.measured("special_values", folder=published.PRECISIONS_FOLDER)
    some = [row for row in rows if row["lines"]]
    frame = pd.DataFrame(some)
    counts = sorted({row["lines"] for row in some})
    times: dict[tuple[str, str], list[str]] = {}
    for row in some:
        where = f"`{row['precision']}`", f"{SPECIAL[row['value']]} in {LINES[row['operand']]}"
        times.setdefault(where, []).append(number(row["times_as_long"], 2))
    lines = [[*where, *found] for where, found in times.items()]
    headers = ["precision", "one element in each of", *(f"{count:,}" for count in counts)]
    shape = spelled(Shape(*(rows[0][name] for name in Shape._fields)))
    made = Table("", headers, lines, left=headers[:2]).markdown()
    return "\n\n".join(
        [
            f"Time relative to the same product without them, at {shape}:",
            made,
            missed(SPECIAL_VALUES.claims(frame)),
            source(how),
        ]
    )


def special_line(found: Published) -> str:
    """Sentence about the largest slowdowns by NaN and infinities."""
    rows, _ = found.measured("special_values", folder=published.PRECISIONS_FOLDER)
    own = [row for row in rows if row["precision"] == SUMMARISED[0]]
    slowest = {name: max(row["times_as_long"] for row in own if row["operand"] == name) for name in LINES}
    return (
        f"`{SUMMARISED[0]}` takes up to {number(slowest['A'], 2)} times as long when rows of A contain NaN or an "
        f"infinity, and up to {number(slowest['B'], 2)} times when columns of B do."
    )
