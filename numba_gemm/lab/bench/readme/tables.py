"""Tables of FP32 results: the public function, the ladder, its targets, and operands in host memory."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.bench.readme.published import (
    LADDER_SHAPE,
    ON_DEVICE,
    STATISTICS,
    STREAMED,
    STREAMED_HOW,
    TARGETS_SUMMARY,
    ReadmeError,
    at,
    compared,
    how_timed,
    in_turns,
    ladder_stages,
    read_targets,
    rows_at,
    source,
    spelled,
    tflops,
)
from numba_gemm.lab.bench.results import AUTO, CUBLAS, fastest
from numba_gemm.lab.bench.tables import MISSING, Table, number, significant

HEADLINE_SHAPES = (
    Shape(1024, 1024, 1024),
    Shape(2048, 2048, 1024),
    Shape(4096, 4096, 4096),
    Shape(8192, 8192, 8192),
    Shape(16384, 16384, 1024),
)


def headline(frame: pd.DataFrame, environment: Mapping[str, Any], results: Path) -> str:
    """Table of the public function and cuBLAS at a few sizes, with the chosen stage and configuration."""
    timed = fastest(compared(frame))
    lines = []
    for shape in HEADLINE_SHAPES:
        rows = rows_at(timed, shape)
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
    how = how_timed(frame, environment)
    return f"TFLOP/s in FP32 arithmetic (TF32 off), {how}:\n\n{table}\n\n{source(environment)}"


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
    return f"At {spelled(LADDER_SHAPE)}, {in_turns(environment)}:\n\n{table}\n\n{source(environment)}"


OTHER_ARRAYS = re.compile("(cupy|numba) arrays")  # whose rows are summed up in a sentence


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
