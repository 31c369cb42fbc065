"""Tables and sentences of the precisions and of the tensor-core stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.bench.readme import published
from numba_gemm.lab.bench.readme.published import LADDER_SHAPE, PRECISIONS_FOLDER, ReadmeError, source, spelled
from numba_gemm.lab.bench.results import AUTO, CUBLAS, GIVEN_BF16, dictionaries, fastest, geomean, records
from numba_gemm.lab.bench.tables import Table, figure, number, significant, table, text
from numba_gemm.lab.harness.environment import device_name

PRECISION_SHAPES = (
    *(Shape(1024, 1024, 1024), Shape(2048, 2048, 1024), Shape(4096, 4096, 1024)),
    *(Shape(4096, 4096, 4096), Shape(8192, 8192, 8192)),
)
SUMMARISED = ("bf16x6", "fp16x3", "tf32")  # the precisions that most users choose from
SLOWER = 0.98  # a smaller share of the speed in another run is reported


def precisions(frame: pd.DataFrame, environment: Mapping[str, Any], results: Path) -> str:
    """Table of speed and error of every precision and of cuBLAS at a few sizes."""
    found, how = published.read_results(results / PRECISIONS_FOLDER)
    rows = {(row["shape"], row["stage"], row["precision"]): row for row in records(fastest(published.compared(found)))}
    shown = [
        ("cuBLAS SGEMM", CUBLAS, "ieee"),
        *((f"`{name}`", AUTO, name) for name in dict.fromkeys(found.loc[found["stage"] == AUTO, "precision"])),
    ]
    shapes = [shape for shape in PRECISION_SHAPES if (str(shape), CUBLAS, "ieee") in rows]
    if not shapes:
        raise ReadmeError(f"{results / PRECISIONS_FOLDER} holds none of {', '.join(map(str, PRECISION_SHAPES))}")
    lines = []
    for label, stage, precision in shown:
        chosen = [rows[str(shape), stage, precision] for shape in shapes]
        speeds = [f"{row['gflops'] / 1000:.3g} ({row['ratio_to_cublas']:.2f})" for row in chosen]
        errors = chosen[-1]
        lines.append([label, *speeds, significant(errors["error_median"], 2), significant(errors["error_max"], 2)])
    headers = ["precision", *map(spelled, shapes), "median error", "largest"]
    made = Table("", headers, lines, left=["precision"]).markdown()
    said = (
        f"TFLOP/s, {published.how_timed(found, how)}; in parentheses, multiples of cuBLAS SGEMM in the same run. "
        f"Decomposition and every other pass are included. Errors over |A| @ |B|, at {spelled(shapes[-1])}:"
    )
    return "\n\n".join(filter(None, [said, made, power_line(frame, found), source(how)]))


def precision_summary(frame: pd.DataFrame, environment: Mapping[str, Any], results: Path) -> str:
    """Sentences about the precisions' speeds at one size, the effect of the power cap, and the cost of NaN."""
    found, how = published.read_results(results / PRECISIONS_FOLDER)
    timed = published.warm_rows(fastest(published.compared(found)), LADDER_SHAPE)
    if missing := [name for name in SUMMARISED if (AUTO, name) not in timed]:
        raise ReadmeError(f"{results / PRECISIONS_FOLDER} holds no {', '.join(missing)} at {LADDER_SHAPE}")
    speeds = [
        f"`{name}` {row['gflops'] / 1000:.3g} ({row['ratio_to_cublas']:.2f})"
        for name, row in ((name, timed[AUTO, name]) for name in SUMMARISED)
    ]
    said = (
        f"TFLOP/s and multiples of cuBLAS SGEMM at {spelled(LADDER_SHAPE)} on an {device_name(how)}, "
        f"{published.how_timed(found, how)}: {', '.join(speeds)}."
    )
    return " ".join(filter(None, [said, power_line(frame, found), special_line(results)]))


def power_line(frame: pd.DataFrame, found: pd.DataFrame) -> str:
    """Sentences that compare cuBLAS SGEMM beside tensor-core kernels with the run of the FP32 stages.

    Empty if cuBLAS SGEMM is as fast there as here, or was not measured in both, or each contender was measured alone.
    """
    if published.is_alone(found):
        return ""
    alone, beside = (published.tflops(published.rows_at(fastest(run), LADDER_SHAPE), CUBLAS) for run in (frame, found))
    if not beside < SLOWER * alone:
        return ""
    return (
        f"Tensor-core kernels run into the power cap, which also slows down contenders that take turns with them: at "
        f"{spelled(LADDER_SHAPE)} cuBLAS SGEMM reached {beside:.1f} TFLOP/s in this run, and {alone:.1f} in that of "
        f"the FP32 stages. Ratios to the latter speed are {beside / alone:.2f} of those given here."
    )


def precision_targets(frame: pd.DataFrame, environment: Mapping[str, Any], results: Path) -> str:
    """Table of the precisions' targets and measurements."""
    found, how = published.read_results(results / PRECISIONS_FOLDER)
    timed = [row for row in records(fastest(published.compared(found))) if row["stage"] == AUTO]
    lines = []

    def line(what: str, required: float, values: Mapping[str, float]) -> None:
        if not values:
            raise ReadmeError(f"{results / PRECISIONS_FOLDER} holds no shapes for: {what}")
        mean, worst = geomean(values.values()), min(values, key=lambda shape: values[shape])
        said = published.reached(mean, mean >= required)
        lines.append([what, str(len(values)), f"≥ {required:g}", said, f"`{worst}`: {values[worst]:.3g}"])

    def ratios(precision: str, column: str, takes: Callable[[dict[str, Any]], bool]) -> dict[str, float]:
        return {row["shape"]: row[column] for row in timed if row["precision"] == precision and takes(row)}

    def cube(row: dict[str, Any]) -> bool:
        return bool(row["m"] == row["n"] == row["k"])

    def large(row: dict[str, Any]) -> bool:
        return row["m"] >= 2048 and (cube(row) or row["k"] == 1024)

    def small(row: dict[str, Any]) -> bool:
        return 512 <= row["m"] <= 1536 and row["m"] == row["n"] and row["k"] == 1024

    for name, required in (("bf16x6", 2.3), ("fp16x3", 3.6)):
        line(f"`{name}` against cuBLAS SGEMM, from 2048 on", required, ratios(name, "ratio_to_cublas", large))
    for name in ("bf16x6", "fp16x3"):
        line(f"`{name}`, M = N from 512 to 1536, K = 1024", 1.3, ratios(name, "ratio_to_cublas", small))
    for name in ("tf32", "bf16"):
        chosen = ratios(name, "ratio_to_same_precision", lambda row: cube(row) and row["m"] >= 4096)
        line(f"`{name}` against cuBLAS {name.upper()}, cubes from 4096 on", 0.95, chosen)
    headers = ["target", "shapes", "required", "geometric mean", "least"]
    made = Table("", headers, lines, left=["target", "least"]).markdown()
    said = [accuracy_line(results), given_line(records(fastest(published.compared(found))))]
    return "\n\n".join([made, *filter(None, said), source(how)])


def given_line(rows: Sequence[Mapping[str, Any]]) -> str:
    """Sentence about cuBLAS on operands that are already BF16; empty if that was not measured."""
    wanted = [row for row in rows if row["m"] == row["n"] == row["k"] >= 4096 and row["precision"] == "bf16"]
    ours = {row["shape"]: row["median_us"] for row in wanted if row["stage"] == AUTO}
    given = {row["shape"]: row["median_us"] for row in wanted if row["stage"] == GIVEN_BF16}
    ratios = [given[shape] / ours[shape] for shape in given if shape in ours]
    if not ratios:
        return ""
    return (
        "cuBLAS BF16 is given the same FP32 operands and result; its time includes PyTorch's conversions. With "
        f"operands and result in BF16, cuBLAS takes {geomean(ratios):.2f} of the time of `bf16` on those cubes "
        "(geometric mean)."
    )


def accuracy_line(results: Path) -> str:
    """Sentence that compares the errors of the full-range precision with those of cuBLAS."""
    frame = published.read_precisions(results, "accuracy")
    errors = frame.pivot_table(index=["distribution", "k"], columns="precision", values=["median", "max"])
    from_256 = errors[errors.index.get_level_values("k") >= 256]
    ours, theirs = (from_256.xs(name, axis=1, level="precision") for name in ("bf16x6", "cublas"))
    better = [bool(row.all()) for row in ours.to_numpy() <= theirs.to_numpy()]
    share = (ours / theirs)["median"]
    return (
        f"Errors of `bf16x6` over |A| @ |B|, from K = 256 to {frame['k'].max():,}, M = N = {frame['m'].max()}, "
        f"{frame['distribution'].nunique()} distributions: median and maximum are no larger than cuBLAS SGEMM's in "
        f"{sum(better)} of {len(better)} cases; the median is {share.min():.2g} to {share.max():.2g} of it."
    )


def tensor_ladder(frame: pd.DataFrame, environment: Mapping[str, Any], results: Path) -> str:
    """Table with one line per tensor core stage: speed, gain and errors."""
    rows = published.tensor_rows(results)
    stages = published.ladder_stages(rows)
    lines, before = [], math.nan
    for name in [*stages, CUBLAS]:
        row, own = rows[name], name == CUBLAS
        gain = math.nan if own else float(row["tflops"]) / before
        lines.append(row | {"stage": "cuBLAS SGEMM" if own else f"`{name}`", "gain": gain})
        before = float(row["tflops"])
    made = table(
        "",
        lines,
        *(text("stage"), figure("TFLOP/s", "tflops", number), figure("/ cuBLAS", "ratio_to_cublas", number, 2)),
        *(figure("gain", "gain", number, 2, "x"), figure("median error", "error_median", significant, 2)),
        figure("largest", "error_max", significant, 2),
    )
    some, decomposition = rows[stages[0]], rows[published.DECOMPOSE]["median_us"]
    shape = spelled(Shape(some["m"], some["n"], some["k"]))
    whole = rows[stages[-1]]["median_us"] + decomposition
    return (
        f"`{some['precision']}` at {shape}, the product alone: decomposition takes {number(decomposition, 0)} us more, "
        f"{number(100 * decomposition / whole, 0)} % of `{stages[-1]}`'s time. Errors over |A| @ |B|, of positive "
        f"operands:\n\n{made.markdown()}\n\n"
        "Measured right after the precisions' table: `numba-gemm lab tensor_ladder`."
    )


def special_values(frame: pd.DataFrame, environment: Mapping[str, Any], results: Path) -> str:
    """Sentences about the cost of NaN and infinities."""
    rows = read_special(results)
    some = next(row for row in rows if row["rows"])
    shape, precision = spelled(Shape(some["m"], some["n"], some["k"])), f"`{some['precision']}`"

    def times(value: str) -> str:
        found = [row for row in rows if row["value"] == value]
        return ", ".join(
            f"{number(row['times_as_long'], 2)} with {row['rows']} row{'s' if row['rows'] > 1 else ''}" for row in found
        )

    ieee = next(row["times_as_long"] for row in rows if row["precision"] == "ieee")
    return (
        f"Slowdown of {precision} at {shape} when rows of A contain NaN, one element per row, in the middle of K: "
        f"{times('nan')}. When they contain an infinity: {times('inf')}. `ieee`, which has no slow path, takes "
        f"{number(ieee, 2)} times as long as {precision} without special values."
    )


def special_line(results: Path) -> str:
    """Sentence about the largest slowdowns by NaN and infinities."""
    rows = read_special(results)
    nan, inf = (
        max((row for row in rows if row["value"] == value), key=lambda row: float(row["times_as_long"]))
        for value in ("nan", "inf")
    )
    return (
        f"`{nan['precision']}` takes up to {number(nan['times_as_long'], 0)} times as long when rows of A contain NaN, "
        f"and up to {number(inf['times_as_long'], 0)} times as long when they contain an infinity."
    )


def read_special(results: Path) -> list[dict[str, Any]]:
    """Return the times with NaN and infinities in A."""
    return dictionaries(published.read_precisions(results, "special_values", keep_default_na=False))
