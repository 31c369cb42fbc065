"""Tables of FP32 results: the public function, the ladder, its targets, and operands in host memory."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.bench.readme import published
from numba_gemm.lab.bench.readme.published import LADDER_SHAPE, ReadmeError, in_turns, source, spelled, tflops
from numba_gemm.lab.bench.results import AUTO, CUBLAS, fastest
from numba_gemm.lab.bench.tables import MISSING, Column, code, figure, number, significant, table, text

HEADLINE_SHAPES = (
    *(Shape(1024, 1024, 1024), Shape(2048, 2048, 1024), Shape(4096, 4096, 4096)),
    *(Shape(8192, 8192, 8192), Shape(16384, 16384, 1024)),
)
ERROR = figure("error / bound", "error_in_bounds", significant, 2)
LARGE = 1024  # from here on, `cuda_c` shows a size
OTHER_ARRAYS = re.compile("(cupy|numba) arrays")  # whose rows are summed up in a sentence


def headline(frame: pd.DataFrame, environment: Mapping[str, Any], results: Path) -> str:
    """Table of the public function and cuBLAS at a few sizes, with the chosen stage and configuration."""
    timed, rows = fastest(published.compared(frame)), []
    for shape in HEADLINE_SHAPES:
        found = published.rows_at(timed, shape)
        if AUTO in found:
            rows.append(found[AUTO] | {"shape": spelled(shape), "cublas": tflops(found, CUBLAS)})
    if not rows:
        raise ReadmeError(f"the results hold none of the headline's shapes: {', '.join(map(str, HEADLINE_SHAPES))}")
    made = table(
        "",
        rows,
        *(text("shape", "M x N x K"), figure("cuBLAS SGEMM", "cublas", number)),
        Column("`tiled_sgemm`", lambda row: number(row["gflops"] / 1000)),
        *(figure("ratio", "ratio_to_cublas", number, 3), code("config", "its choice"), ERROR),
    )
    how = published.how_timed(frame, environment)
    return f"TFLOP/s in FP32 arithmetic (TF32 off), {how}:\n\n{made.markdown()}\n\n{source(environment)}"


def ladder(frame: pd.DataFrame, environment: Mapping[str, Any], results: Path) -> str:
    """Table with one line per stage and its gain over the previous one."""
    rows = published.at(fastest(frame), LADDER_SHAPE)
    if not rows:
        raise ReadmeError(f"the results hold no stage at {LADDER_SHAPE}")
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
    return f"At {spelled(LADDER_SHAPE)}, {in_turns(environment)}:\n\n{made.markdown()}\n\n{source(environment)}"


def cuda_c(frame: pd.DataFrame, environment: Mapping[str, Any], results: Path) -> str:
    """Table of the stages that also exist as kernels in CUDA C, and of those kernels."""
    found, how = published.read_measured(results, "cuda_c")
    pairs = (("v1", "vectorized"), ("v2", "conflict_free"), ("v3", "double_buffered"))

    def beside(kernel: str, stage: str) -> Column:
        def cell(row: Mapping[str, Any]) -> str:
            return f"{number(row[stage])} / {number(row[kernel])} = {number(row[stage] / row[kernel], 3)}"

        return Column(f"`{stage}` / CUDA C", cell)

    rows = (row for row in found if row["n"] >= LARGE)
    made = table("", rows, text("n", "M = N"), *(beside(*pair) for pair in pairs))
    return f"TFLOP/s at K = {found[0]['k']}, {how['method']}:\n\n{made.markdown()}\n\n{source(how)}"


def targets(frame: pd.DataFrame, environment: Mapping[str, Any], results: Path) -> str:
    """Table of the public function's targets and measurements."""
    judged, how = published.read_measured(results, "targets", published.TARGETS_SUMMARY)
    others = [row for row in judged if OTHER_ARRAYS.search(row["what"])]

    def cases(row: Mapping[str, Any]) -> str:
        return f"{row['cases'] - row['failed']} of {row['cases']}" if row["failed"] else str(row["cases"])

    def required(row: Mapping[str, Any]) -> str:
        return f"≤ {row['at_most']:.3g}" if math.isnan(row["at_least"]) else f"≥ {row['at_least']:.3g}"

    def worst(row: Mapping[str, Any]) -> str:
        return f"`{row['worst']}`" if row["cases"] > 1 and isinstance(row["worst"], str) else ""

    made = table(
        "",
        (row for row in judged if row not in others),
        *(text("what", "target"), Column("cases", cases)),
        Column("statistic", lambda row: published.STATISTICS[row["statistic"]], left=True),
        *(Column("required", required), Column("reached", lambda row: published.reached(row["value"], row["met"]))),
        Column("worst case", worst, left=True),
    )
    met = sum(bool(row["met"]) for row in others)
    further = f"Of the same host times for CuPy and Numba arrays, {met} of {len(others)} are met"
    parts = [made.markdown(), *([f"{further} (`{published.TARGETS_SUMMARY}`)."] if others else []), source(how)]
    return "\n\n".join(parts)


def streamed(frame: pd.DataFrame, environment: Mapping[str, Any], results: Path) -> str:
    """Table of the speed of streamed calls relative to calls with operands in device memory."""
    found, how = published.read_measured(results, "streamed")

    def shown(form: str, scale: float = 1.0) -> Callable[[float], str]:
        return lambda value: MISSING if math.isnan(value) else form.format(value / scale)

    made = table(
        "",
        found,
        *(code("precision"), text("operands")),
        figure("limit", "memory_limit", shown("{:g} GB", 1e9)),
        figure("taken", "peak_bytes", shown("{:.2f} GB", 1e9)),
        *(figure("seconds", "seconds", shown("{:.2f}")), figure("predicted", "predicted_s", shown("{:.2f}"))),
        Column("bound by", lambda row: row["bound_by"] if isinstance(row["bound_by"], str) else MISSING, left=True),
        *(figure("TFLOP/s", "tflops", shown("{:.1f}")), figure("of in-memory", "of_in_memory", shown("{:.2f}"))),
    )
    size = int(found[0]["size"])
    return f"At {spelled(Shape(size, size, size))}:\n\n{made.markdown()}\n\n{source(how)}"
