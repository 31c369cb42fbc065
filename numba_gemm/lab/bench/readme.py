"""``python -m numba_gemm.lab.bench.readme`` writes the blocks generated from committed results; ``--check`` compares.

These are the tables of the README, and in each stage's docstring the paragraph that begins with ``Measured: ``.

In the README a generated block is enclosed by ``<!-- results:begin NAME -->`` and ``<!-- results:end NAME -->``. NAME
is one of

headline
    the public function and cuBLAS at a few sizes;
ladder
    one line per stage at 4096 x 4096 x 4096;
targets
    the measurements of `numba_gemm.lab.bench.targets`, compared with the targets;
precisions, precision_targets
    the measurements of ``bench.py --precisions`` and `numba_gemm.lab.bench.accuracy`, from the folder `precisions` of
    the results, per shape and compared with the targets;
tensor_ladder, special_values
    the measurements of `numba_gemm.lab.bench.tensor_ladder`, from the same folder.

The paragraph of a stage gives its speed at that shape and, if the files of `numba_gemm.lab.bench.counters` are beside
the results, the GPU's counters. That of `thin`, a stage for a C with few columns, gives measurements of
`numba_gemm.lab.bench.targets`. The paragraph precedes ``Limits: ``, which is written by hand.

Neither numba nor a GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.bench.command import command, write_files
from numba_gemm.lab.bench.counters import COUNTERS, KEY, TOTAL, WAVEFRONTS
from numba_gemm.lab.bench.environment import caption, device_name
from numba_gemm.lab.bench.results import AUTO, CUBLAS, FAILURES, GIVEN_BF16, NOT_STAGES, OK, fastest, load, records
from numba_gemm.lab.bench.tables import MISSING, Table, number, significant

ROOT = Path(__file__).resolve().parents[3]
README = ROOT / "README.md"
LADDER_FOLDER = ROOT / "numba_gemm" / "kernels" / "ladder"
TENSOR_FOLDER = ROOT / "numba_gemm" / "kernels" / "tensor_core"
RESULTS_FOLDER = ROOT / "results" / "h200" / "latest"

BLOCK = re.compile(
    r"(?P<begin><!-- results:begin (?P<name>\w+) -->\n)(?P<body>.*?)(?P<end><!-- results:end (?P=name) -->)", re.DOTALL
)

# Files of stages, and the parts of their module docstrings; the lines of a paragraph after its first are indented.
IS_STAGE = re.compile(r"^STAGE = ", re.MULTILINE)
DOCSTRING = re.compile(r'\A"""(?P<text>.*?)"""', re.DOTALL)
MEASURED = re.compile(r"^Measured: .*\n(?:[ \t]+\S.*\n)*", re.MULTILINE)
LIMITS = re.compile(r"^Limits: ", re.MULTILINE)
DOCSTRING_WIDTH = 118

HEADLINE_SHAPES = (
    Shape(1024, 1024, 1024),
    Shape(2048, 2048, 1024),
    Shape(4096, 4096, 4096),
    Shape(8192, 8192, 8192),
    Shape(16384, 16384, 1024),
)
LADDER_SHAPE = Shape(4096, 4096, 4096)
PRECISION_SHAPES = (
    Shape(1024, 1024, 1024),
    Shape(2048, 2048, 1024),
    Shape(4096, 4096, 1024),
    Shape(4096, 4096, 4096),
    Shape(8192, 8192, 8192),
)
ASIDE = "thin"  # the stage that is not meant for the ladder's shape

# File names and columns of `numba_gemm.lab.bench.targets`, which needs Numba; this module does not.
TARGETS, TARGETS_SUMMARY, TARGETS_HOW = "targets.csv", "targets_summary.csv", "targets.json"
# Of `bench.py --precisions`, `numba_gemm.lab.bench.accuracy` and `numba_gemm.lab.bench.tensor_ladder`.
PRECISIONS_FOLDER, ACCURACY_CSV = "precisions", "accuracy.csv"
TENSOR_LADDER_CSV, SPECIAL_CSV, DECOMPOSE = "tensor_ladder.csv", "special_values.csv", "decompose"
DIRECT, DIRECT_PRECISION = "tf32_tma", "tf32"  # the stage whose operands are not decomposed
STREAMED, STREAMED_HOW, ON_DEVICE = "streamed.csv", "streamed.json", "on the device"  # of numba_gemm.lab.bench.streamed
VECTOR_GROUP, COPY = "vector", "device copy"
STATISTICS = {"geomean": "geometric mean", "min": "least", "max": "most"}


class ReadmeError(Exception):
    """A generated block lacks its data; the message names it."""


Rows = dict[str, dict[str, Any]]


def at(frame: pd.DataFrame, shape: Shape) -> Rows:
    """Return the FP32 rows of a shape with a warm cache, by stage in ladder order; empty without a stage of it."""
    wanted = {"precision": "ieee", "layout": "nn", "cache": "hot", "m": shape.m, "n": shape.n, "k": shape.k}
    rows = {row["stage"]: row for row in records(frame) if all(row[name] == value for name, value in wanted.items())}
    return rows if ladder_stages(rows) else {}


def ladder_stages(rows: Rows) -> list[str]:
    """Return the stages of the ladder among some rows."""
    return [stage for stage in rows if stage not in (*NOT_STAGES, ASIDE)]


def tflops(rows: Rows, stage: str) -> float:
    """TFLOP/s of a stage; NaN if it was not timed."""
    return float(rows[stage]["gflops"]) / 1000 if stage in rows else math.nan


def spelled(shape: Shape) -> str:
    """Format a shape for prose."""
    return " x ".join(str(extent) for extent in shape)


def headline(frame: pd.DataFrame, environment: Mapping[str, Any], results: Path) -> str:
    """Table of the public function and cuBLAS at a few sizes, with the chosen stage and configuration."""
    timed = fastest(frame)
    lines = []
    for shape in HEADLINE_SHAPES:
        rows = at(timed, shape)
        if AUTO not in rows:
            continue
        own = rows[AUTO]
        lines.append(
            [
                spelled(shape),
                number(tflops(rows, CUBLAS)),
                number(tflops(rows, AUTO)),
                number(own["ratio_to_cublas"], 3),
                f"`{own['config']}`",
                significant(own["error_in_bounds"], 2),
            ]
        )
    if not lines:
        raise ReadmeError(f"the results hold none of the headline's shapes: {', '.join(map(str, HEADLINE_SHAPES))}")
    headers = ["M x N x K", "cuBLAS SGEMM", "`tiled_sgemm`", "ratio", "its choice", "error / bound"]
    table = Table("", headers, lines, left=["M x N x K", "its choice"]).markdown()
    return f"TFLOP/s, FP32 arithmetic throughout (TF32 off):\n\n{table}\n\n{source(environment)}"


def ladder(frame: pd.DataFrame, environment: Mapping[str, Any], results: Path) -> str:
    """Table with one line per stage and its gain over the previous one."""
    rows = at(fastest(frame), LADDER_SHAPE)
    if not rows:
        raise ReadmeError(f"the results hold no stage at {LADDER_SHAPE}")
    names = {AUTO: "`tiled_sgemm`, its own choice", CUBLAS: "cuBLAS SGEMM"}
    lines, before = [], math.nan
    for stage in [*ladder_stages(rows), *(name for name in names if name in rows)]:
        row, speed = rows[stage], tflops(rows, stage)
        lines.append(
            [
                names.get(stage, f"`{stage}`"),
                number(speed),
                number(row["percent_of_peak"], 1, " %"),
                number(row["ratio_to_cublas"], 3),
                MISSING if stage in names else number(speed / before, 2, "x"),
                significant(row["error_in_bounds"], 2),
            ]
        )
        before = speed
    headers = ["stage", "TFLOP/s", "of FP32 peak", "/ cuBLAS", "gain", "error / bound"]
    table = Table("", headers, lines, left=["stage"]).markdown()
    return f"At {spelled(LADDER_SHAPE)}:\n\n{table}\n\n{source(environment)}"


OTHER_ARRAYS = re.compile("(cupy|numba) arrays")  # whose rows README sums up


def source(environment: Mapping[str, Any]) -> str:
    """Return the line about the source of a table."""
    return f"Measured on {caption(environment)}."


def targets(frame: pd.DataFrame, environment: Mapping[str, Any], results: Path) -> str:
    """Table of the public function's targets and measurements."""
    judged, how = read_targets(results, TARGETS_SUMMARY)
    others = [row for row in judged if OTHER_ARRAYS.search(row["what"])]
    lines = []
    for row in judged:
        if row in others:
            continue
        least = not math.isnan(row["at_least"])
        bound, sign = (row["at_least"], "≥") if least else (row["at_most"], "≤")
        reached = significant(row["value"]) if row["met"] else f"**{significant(row['value'])}**, missed"
        lines.append(
            [
                str(row["what"]),
                f"{row['cases'] - row['failed']} of {row['cases']}" if row["failed"] else str(row["cases"]),
                STATISTICS[row["statistic"]],
                f"{sign} {bound:.3g}",
                reached,
                f"`{row['worst']}`" if row["cases"] > 1 and isinstance(row["worst"], str) else "",
            ]
        )
    headers = ["target", "cases", "statistic", "required", "reached", "worst case"]
    table = Table("", headers, lines, left=["target", "statistic", "worst case"]).markdown()
    met = sum(bool(row["met"]) for row in others)
    further = (
        f"Of the same host times for CuPy and Numba arrays, {met} of {len(others)} are met (`{TARGETS_SUMMARY}`).\n\n"
    )
    return f"{table}\n\n{further if others else ''}{source(how)}"


def read_targets(
    results: Path, file: str, described: str | None = None, module: str = "targets"
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the rows of a file of results and their environment."""
    found = []
    for path in (results / file, results / (described or TARGETS_HOW)):
        if not path.is_file():
            raise ReadmeError(f"there is no {path}: run python -m numba_gemm.lab.bench.{module} --out {results}")
        found.append(path)
    how = json.loads(found[1].read_text(encoding="utf-8"))
    if how.get("simulator") or not how.get("gpu"):
        raise ReadmeError(f"{found[0]} was not measured on a GPU")
    return [{str(name): value for name, value in row.items()} for row in pd.read_csv(found[0]).to_dict("records")], how


def precisions(frame: pd.DataFrame, environment: Mapping[str, Any], results: Path) -> str:
    """Table of speed and error of every precision and of cuBLAS at a few sizes."""
    found, how = read_results(results / PRECISIONS_FOLDER)
    rows = {(row["shape"], row["stage"], row["precision"]): row for row in records(fastest(found))}
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
    table = Table("", headers, lines, left=["precision"]).markdown()
    return (
        "TFLOP/s, and in multiples of cuBLAS SGEMM; decomposition and every other pass included. Errors over |A| @ |B|,"
        f" at {spelled(shapes[-1])}:\n\n{table}\n\n{source(how)}"
    )


def streamed(frame: pd.DataFrame, environment: Mapping[str, Any], results: Path) -> str:
    """Table of the speed of streamed calls relative to calls with operands in device memory."""
    found, how = read_targets(results, STREAMED, STREAMED_HOW, "streamed")
    lines = []
    for row in found:
        on_device = row["operands"] == ON_DEVICE
        lines.append(
            [
                f"`{row['precision']}`",
                str(row["operands"]),
                MISSING if math.isnan(row["memory_limit"]) else f"{row['memory_limit'] / 1e9:g} GB",
                MISSING if on_device else f"{row['peak_bytes'] / 1e9:.2f} GB",
                f"{row['seconds']:.2f}",
                MISSING if on_device else f"{row['predicted_s']:.2f}",
                MISSING if on_device else str(row["bound_by"]),
                f"{row['tflops']:.1f}",
                f"{row['of_in_memory']:.2f}",
            ]
        )
    headers = ["precision", "operands", "limit", "taken", "seconds", "predicted", "bound by", "TFLOP/s", "of in-memory"]
    size = int(found[0]["size"])
    table = Table("", headers, lines, left=["precision", "operands", "bound by"]).markdown()
    return f"At {spelled(Shape(size, size, size))}:\n\n{table}\n\n{source(how)}"


def precision_targets(frame: pd.DataFrame, environment: Mapping[str, Any], results: Path) -> str:
    """Table of the precisions' targets and measurements."""
    found, how = read_results(results / PRECISIONS_FOLDER)
    timed = [row for row in records(fastest(found)) if row["stage"] == AUTO]
    lines = []

    def line(what: str, required: float, values: Mapping[str, float]) -> None:
        if not values:
            raise ReadmeError(f"{results / PRECISIONS_FOLDER} holds no shapes for: {what}")
        reached = math.exp(sum(map(math.log, values.values())) / len(values))
        worst = min(values, key=lambda shape: values[shape])
        said = significant(reached) if reached >= required else f"**{significant(reached)}**, missed"
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
    table = Table("", headers, lines, left=["target", "least"]).markdown()
    said = [accuracy_line(results / PRECISIONS_FOLDER / ACCURACY_CSV), given_line(records(fastest(found)))]
    return "\n\n".join([table, *filter(None, said), source(how)])


def given_line(rows: Sequence[Mapping[str, Any]]) -> str:
    """Sentence about cuBLAS on operands that are already BF16; empty if that was not measured."""
    wanted = [row for row in rows if row["m"] == row["n"] == row["k"] >= 4096 and row["precision"] == "bf16"]
    ours = {row["shape"]: row["median_us"] for row in wanted if row["stage"] == AUTO}
    given = {row["shape"]: row["median_us"] for row in wanted if row["stage"] == GIVEN_BF16}
    ratios = [given[shape] / ours[shape] for shape in given if shape in ours]
    if not ratios:
        return ""
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return (
        "cuBLAS BF16 has the same FP32 operands and result: PyTorch rounds and widens them, in the same time. Given "
        f"operands that are BF16 beforehand, and leaving its result so, it takes {mean:.2f} of the time that `bf16` "
        "takes on those cubes (geometric mean)."
    )


def accuracy_line(path: Path) -> str:
    """Sentence that compares the errors of the full-range precision with those of cuBLAS."""
    if not path.is_file():
        raise ReadmeError(f"there is no {path}: run python -m numba_gemm.lab.bench.accuracy --out {path.parent}")
    frame = pd.read_csv(path)
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
    rows = tensor_rows(results)
    stages = [name for name in rows if name not in NOT_STAGES and name != DECOMPOSE]
    lines, before = [], math.nan
    for name in [*stages, CUBLAS]:
        row, speed = rows[name], float(rows[name]["tflops"])
        lines.append(
            [
                "cuBLAS SGEMM" if name == CUBLAS else f"`{name}`",
                number(speed),
                number(row["ratio_to_cublas"], 2),
                MISSING if name == CUBLAS else number(speed / before, 2, "x"),
                significant(row["error_median"], 2),
                significant(row["error_max"], 2),
            ]
        )
        before = speed
    headers = ["stage", "TFLOP/s", "/ cuBLAS", "gain", "median error", "largest"]
    table = Table("", headers, lines, left=["stage"]).markdown()
    some, decomposition = rows[stages[0]], rows[DECOMPOSE]["median_us"]
    shape = spelled(Shape(some["m"], some["n"], some["k"]))
    whole = rows[stages[-1]]["median_us"] + decomposition
    return (
        f"`{some['precision']}` at {shape}, the product alone: decomposition takes {number(decomposition, 0)} us more, "
        f"{number(100 * decomposition / whole, 0)} % of `{stages[-1]}`'s time. Errors over |A| @ |B|, of positive "
        f"operands:\n\n{table}\n\n"
        "Measured right after the tables above: `python -m numba_gemm.lab.bench.tensor_ladder`."
    )


def special_values(frame: pd.DataFrame, environment: Mapping[str, Any], results: Path) -> str:
    """Sentence about the cost of NaN and infinity."""
    path = results / PRECISIONS_FOLDER / SPECIAL_CSV
    if not path.is_file():
        raise ReadmeError(f"there is no {path}: run python -m numba_gemm.lab.bench.tensor_ladder --out {path.parent}")
    rows = pd.read_csv(path, keep_default_na=False).to_dict("records")
    some = next(row for row in rows if row["rows"])
    shape = spelled(Shape(some["m"], some["n"], some["k"]))

    def times(value: str) -> str:
        found = [row for row in rows if row["value"] == value and row["precision"] == some["precision"]]
        return ", ".join(f"{number(row['times_as_long'], 2)} with {row['rows']}" for row in found)

    ieee = next(row["times_as_long"] for row in rows if row["precision"] == "ieee")
    return (
        f"Times as long as without, of `{some['precision']}` at {shape}, by how many rows of A have an element that is "
        f"NaN, in the middle of K: {times('nan')}; that is infinite: {times('inf')}. `ieee` takes {number(ieee, 2)} "
        f"times as long without."
    )


def tensor_rows(results: Path) -> Rows:
    """Return the rows of `numba_gemm.lab.bench.tensor_ladder`, by stage in ladder order."""
    path = results / PRECISIONS_FOLDER / TENSOR_LADDER_CSV
    if not path.is_file():
        raise ReadmeError(f"there is no {path}: run python -m numba_gemm.lab.bench.tensor_ladder --out {path.parent}")
    found = pd.read_csv(path).to_dict("records")
    return {str(row["stage"]): {str(name): value for name, value in row.items()} for row in found}


def tensor_measured(name: str, rows: Rows, results: Path) -> str:
    """Return the paragraph of a tensor core stage."""
    found, how = read_results(results / PRECISIONS_FOLDER)
    gpu = device_name(how).removeprefix("NVIDIA ")
    if name == DIRECT:
        timed = [row for row in records(fastest(found)) if (row["stage"], row["precision"]) == (AUTO, DIRECT_PRECISION)]
        shapes = {str(row["shape"]): row for row in timed}
        if (row := shapes.get(str(LADDER_SHAPE))) is None:
            raise ReadmeError(f"the results hold no {DIRECT_PRECISION} at {LADDER_SHAPE}")
        return filled(
            f"Measured: {number(row['gflops'] / 1000)} TFLOP/s of {DIRECT_PRECISION} at {LADDER_SHAPE} on an NVIDIA "
            f"{gpu}, {number(row['ratio_to_same_precision'], 2)} of cuBLAS TF32."
        )
    row, stages = rows[name], [stage for stage in rows if stage not in NOT_STAGES and stage != DECOMPOSE]
    shape = Shape(row["m"], row["n"], row["k"])
    text = (
        f"Measured: {number(row['tflops'])} TFLOP/s of {row['precision']} at {shape} on an NVIDIA {gpu}, "
        f"{number(row['ratio_to_cublas'], 2)} of cuBLAS SGEMM"
    )
    if (before := stages.index(name) - 1) >= 0:
        text += f" and {number(row['tflops'] / rows[stages[before]]['tflops'], 2)} times {stages[before]}"
    return filled(
        f"{text}, decomposition not counted; {row['registers']:.0f} registers per thread; of positive operands the "
        f"median error over |A| @ |B| is {significant(row['error_median'], 2)}."
    )


def generate_tensor_docstrings(folder: Path, results: Path) -> dict[Path, str]:
    """Return the source of every measured tensor core stage with its paragraph generated again."""
    if not (results / PRECISIONS_FOLDER / TENSOR_LADDER_CSV).is_file():
        return {}  # README's table reports that it is missing
    rows = tensor_rows(results)
    paths = [path for path in sorted(folder.glob("*.py")) if path.stem in rows or path.stem == DIRECT]
    return {
        path: with_paragraph(path.read_text(encoding="utf-8"), tensor_measured(path.stem, rows, results))
        for path in paths
        if path.stem != DECOMPOSE
    }


Generator = Callable[[pd.DataFrame, Mapping[str, Any], Path], str]
GENERATORS: dict[str, Generator] = {
    "headline": headline,
    "ladder": ladder,
    "targets": targets,
    "precisions": precisions,
    "precision_targets": precision_targets,
    "tensor_ladder": tensor_ladder,
    "special_values": special_values,
    "streamed": streamed,
}


def counted(results: Path, file: str, row: Mapping[str, Any], **wanted: Any) -> dict[str, Any]:
    """Return the row of counters that belongs to a row of results; empty if there is none.

    It must be of the same configuration, since another one has other registers and bank conflicts.
    """
    path = results / file
    if not path.is_file():
        return {}
    wanted |= {name: row[name] for name in KEY}
    frame = pd.read_csv(path, dtype={"stage": str, "config": str})
    if missing := [name for name in wanted if name not in frame.columns]:
        raise ReadmeError(f"{path} has no column {', '.join(missing)}")
    for found in frame.to_dict("records"):
        if all(found[name] == value for name, value in wanted.items()):
            return {str(name): value for name, value in found.items()}
    return {}


def clauses(results: Path, row: Mapping[str, Any]) -> Iterator[str]:
    """Yield a clause per counter of a stage."""
    counters = counted(results, COUNTERS, row)
    shared = counted(results, WAVEFRONTS, row, op=TOTAL)
    for value, digits, words in (
        (counters.get("registers", math.nan), 0, "registers per thread"),
        (counters.get("fma_pipe_percent", math.nan), 1, "% of the FMA pipe"),
        (shared.get("excess_percent", math.nan), 1, "% excess shared wavefronts"),
    ):
        if not math.isnan(value):
            yield f"{number(value, digits)} {words}"


def measured(rows: Rows, stage: str, environment: Mapping[str, Any], results: Path) -> str:
    """Return the paragraph of a stage: its speed relative to the previous stage and to cuBLAS, and its counters."""
    if stage == ASIDE:
        return filled(measured_aside(results))
    row, speed = rows[stage], tflops(rows, stage)
    ladder = ladder_stages(rows)
    gpu = device_name(environment).removeprefix("NVIDIA ")
    text = f"Measured: {number(speed, 1 if speed >= 10 else 2)} TFLOP/s at {LADDER_SHAPE} on an NVIDIA {gpu}"
    ratio, before = float(row["ratio_to_cublas"]), ladder.index(stage) - 1
    comparisons = [] if math.isnan(ratio) else [f"{number(ratio, 2)} of cuBLAS SGEMM"]
    if before >= 0:
        comparisons.append(f"{number(speed / tflops(rows, ladder[before]), 2)} times {ladder[before]}")
    if comparisons:
        text += f", {' and '.join(comparisons)}"
    if found := ", ".join(clauses(results, row)):
        text += f"; {found}"
    return filled(f"{text}.")


def measured_aside(results: Path) -> str:
    """Return the paragraph of the stage for a C with few columns, from the targets in which B has few columns."""
    rows, how = read_targets(results, TARGETS)
    ours = [row for row in rows if row["group"] == VECTOR_GROUP and row["m"] > row["n"] and row["status"] == OK]
    if not ours:
        raise ReadmeError(f"{results / TARGETS} holds no product of the group {VECTOR_GROUP}")
    ratios = [[row for row in ours if row["baseline"] == baseline] for baseline in (COPY, CUBLAS)]
    shares, over_cublas = (listed([number(float(row["ratio"]), 2) for row in found]) for found in ratios)
    columns = listed([str(row["n"]) for row in ratios[0]])
    gpu = device_name(how).removeprefix("NVIDIA ")
    return (
        f"Measured: {ours[0]['m']}x{ours[0]['k']} times {columns} columns on an NVIDIA {gpu}, by tiled_sgemm, A not in "
        f"the cache: {shares} of a copy's bandwidth, {over_cublas} of cuBLAS SGEMM."
    )


def listed(words: Sequence[str]) -> str:
    """Join words with commas and a final "and"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def filled(paragraph: str) -> str:
    """Wrap the lines of a docstring's paragraph."""
    return textwrap.fill(
        paragraph, DOCSTRING_WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def with_paragraph(source: str, paragraph: str) -> str:
    """Return a module's source with the paragraph in its docstring: before ``Limits: ``, else at the end."""
    docstring = DOCSTRING.match(source)
    if docstring is None:
        raise ReadmeError('a stage begins with a docstring in """')
    text = MEASURED.sub("", docstring["text"].rstrip() + "\n").rstrip()
    text += "\n" if "\n" in text else "\n\n"  # a blank line after a one-line summary
    limits = LIMITS.search(text)
    at = limits.start() if limits else len(text)
    return f'"""{text[:at]}{paragraph}\n{text[at:]}"""{source[docstring.end() :]}'


def stage_files(folder: Path) -> list[Path]:
    """Return the files in a folder that define a stage."""
    if not folder.is_dir():
        raise ReadmeError(f"there is no {folder}")
    return [path for path in sorted(folder.glob("*.py")) if IS_STAGE.search(path.read_text(encoding="utf-8"))]


def generate_docstrings(
    folder: Path, frame: pd.DataFrame, environment: Mapping[str, Any], results: Path
) -> dict[Path, str]:
    """Return the source of every stage with its paragraph generated again.

    Raises
    ------
    ReadmeError
        if a stage was not measured or has no docstring.
    """
    rows = at(fastest(frame), LADDER_SHAPE)
    paths = stage_files(folder)
    if unmeasured := [path.stem for path in paths if path.stem not in rows and path.stem != ASIDE]:
        raise ReadmeError(f"the results hold no {', '.join(unmeasured)} at {LADDER_SHAPE}: measure every stage there")
    made = {}
    for path in paths:
        try:
            made[path] = with_paragraph(
                path.read_text(encoding="utf-8"), measured(rows, path.stem, environment, results)
            )
        except ReadmeError as error:
            raise ReadmeError(f"{path.name}: {error}") from error
    return made


def read_results(results: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Load results that may be published, and their environment.

    Raises
    ------
    ReadmeError
        if the results are missing, contain failures, or were not measured on a GPU.
    """
    try:
        frame, environment = load(results)
    except (FileNotFoundError, ValueError) as error:
        raise ReadmeError(str(error)) from error
    if not environment:
        raise ReadmeError(f"{results} has no environment.json: the tables must say where they come from")
    if environment.get("simulator") or not environment.get("gpu"):
        raise ReadmeError(f"{results} was not measured on a GPU")
    if frame["status"].isin(FAILURES).any():
        raise ReadmeError(f"{results} holds rows that are wrong or failed; README shows verified results only")
    return frame, environment


def generate(text: str, frame: pd.DataFrame, environment: Mapping[str, Any], results: Path) -> str:
    """Return the text of the README with every block generated again.

    Raises
    ------
    ReadmeError
        if the results are incomplete, or if the text has no block or one with an unknown name.
    """
    names = [match["name"] for match in BLOCK.finditer(text)]
    if not names:
        raise ReadmeError("README has no block between <!-- results:begin NAME --> and <!-- results:end NAME -->")
    if unknown := sorted(set(names) - set(GENERATORS)):
        raise ReadmeError(f"unknown block {', '.join(unknown)}: known are {', '.join(GENERATORS)}")

    def replaced(match: re.Match[str]) -> str:
        return f"{match['begin']}{GENERATORS[match['name']](frame, environment, results)}\n{match['end']}"

    return BLOCK.sub(replaced, text)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if all generated text is up to date, or was brought up to date."""
    parser = argparse.ArgumentParser(
        prog="python -m numba_gemm.lab.bench.readme", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file would change")
    parser.add_argument("--readme", type=Path, default=README, help="the file whose tables to write")
    parser.add_argument(
        "--ladder", type=Path, default=LADDER_FOLDER, help="folder with the stages whose docstrings to write"
    )
    parser.add_argument("--tensor-core", type=Path, default=TENSOR_FOLDER, help="the same, of the tensor cores' stages")
    parser.add_argument(
        "--results", type=Path, default=RESULTS_FOLDER, help="folder with results.csv and environment.json"
    )
    options = parser.parse_args(arguments)
    try:
        if not options.readme.is_file():
            raise ReadmeError(f"there is no {options.readme}")
        frame, environment = read_results(options.results)
        made = {
            options.readme: generate(options.readme.read_text(encoding="utf-8"), frame, environment, options.results)
        }
        made |= generate_docstrings(options.ladder, frame, environment, options.results)
        made |= generate_tensor_docstrings(options.tensor_core, options.results)
    except ReadmeError as error:
        print(f"cannot make README's tables and the stages' docstrings: {error}", file=sys.stderr)
        return 1
    changed = {path: text for path, text in made.items() if path.read_text(encoding="utf-8") != text}
    if changed and options.check:
        names = ", ".join(path.name for path in changed)
        print(f"out of date with {options.results}: {names}; run {parser.prog}", file=sys.stderr)
        return 1
    for path, text in changed.items():
        write_files(path.parent, {path.name: text})
        print(f"wrote {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
