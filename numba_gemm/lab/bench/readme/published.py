"""Committed results as rows, and the error for those that are missing or may not be published."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.bench.results import AUTO, CUBLAS, FAILURES, NOT_STAGES, alone, load, records
from numba_gemm.lab.harness.environment import GRAPHS, caption

LADDER_SHAPE = Shape(4096, 4096, 4096)

ASIDE = "thin"  # the stage that is not meant for the ladder's shape

# File names and columns of `numba_gemm.lab.bench.targets`, which needs Numba; this module does not.
TARGETS, TARGETS_SUMMARY, TARGETS_HOW = "targets.csv", "targets_summary.csv", "targets.json"
# Of `bench.py --precisions`, `numba_gemm.lab.bench.accuracy` and `numba_gemm.lab.bench.tensor_ladder`.
PRECISIONS_FOLDER, ACCURACY_CSV = "precisions", "accuracy.csv"
TENSOR_LADDER_CSV, SPECIAL_CSV, DECOMPOSE = "tensor_ladder.csv", "special_values.csv", "decompose"

STREAMED, STREAMED_HOW, ON_DEVICE = "streamed.csv", "streamed.json", "on the device"  # of numba_gemm.lab.bench.streamed
VECTOR_GROUP, COPY = "vector", "device copy"
STATISTICS = {"geomean": "geometric mean", "min": "least", "max": "most"}


class ReadmeError(Exception):
    """A generated block lacks its data; the message names it."""


Rows = dict[str, dict[str, Any]]


def at(frame: pd.DataFrame, shape: Shape) -> Rows:
    """Return the FP32 rows of a shape with a warm cache, by stage in ladder order; empty without a stage of it."""
    rows = rows_at(frame, shape)
    return rows if ladder_stages(rows) else {}


def rows_at(frame: pd.DataFrame, shape: Shape) -> Rows:
    """Return the FP32 rows of a shape with a warm cache, by stage."""
    wanted = {"precision": "ieee", "layout": "nn", "cache": "hot", "m": shape.m, "n": shape.n, "k": shape.k}
    return {row["stage"]: row for row in records(frame) if all(row[name] == value for name, value in wanted.items())}


def ladder_stages(rows: Rows) -> list[str]:
    """Return the stages of the ladder among some rows."""
    return [stage for stage in rows if stage not in (*NOT_STAGES, ASIDE)]


def tflops(rows: Rows, stage: str) -> float:
    """TFLOP/s of a stage; NaN if it was not timed."""
    return float(rows[stage]["gflops"]) / 1000 if stage in rows else math.nan


def spelled(shape: Shape) -> str:
    """Format a shape for prose."""
    return " x ".join(str(extent) for extent in shape)


def in_turns(environment: Mapping[str, Any]) -> str:
    """Describe how contenders were timed beside each other."""
    replayed = environment.get("timing") == GRAPHS
    return f"{'CUDA-graph replays' if replayed else 'calls'} measured in turns with other contenders"


def how_timed(frame: pd.DataFrame, environment: Mapping[str, Any]) -> str:
    """Describe how the contenders of `compared` were timed."""
    return "each contender alone at its steady state" if is_alone(frame) else in_turns(environment)


def is_alone(frame: pd.DataFrame) -> bool:
    """Return True if the public function and cuBLAS were measured alone wherever they were timed."""
    public = frame[frame["stage"].isin((AUTO, CUBLAS)) & frame["median_us"].notna()]
    return bool(len(public)) and bool(public["steady_us"].notna().all())


def compared(frame: pd.DataFrame) -> pd.DataFrame:
    """Return results from which contenders are compared: those alone if there are such, else those in turns."""
    return alone(frame) if is_alone(frame) else frame


def source(environment: Mapping[str, Any]) -> str:
    """Return the line about the source of a table."""
    return f"Measured on {caption(environment)}."


def read_targets(
    results: Path, file: str, described: str | None = None, module: str = "targets"
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the rows of a file of results and their environment."""
    found = []
    for path in (results / file, results / (described or TARGETS_HOW)):
        if not path.is_file():
            raise ReadmeError(f"there is no {path}: run numba-gemm lab {module} --out {results}")
        found.append(path)
    how = json.loads(found[1].read_text(encoding="utf-8"))
    if how.get("simulator") or not how.get("gpu"):
        raise ReadmeError(f"{found[0]} was not measured on a GPU")
    return [{str(name): value for name, value in row.items()} for row in pd.read_csv(found[0]).to_dict("records")], how


def tensor_rows(results: Path) -> Rows:
    """Return the rows of `numba_gemm.lab.bench.tensor_ladder`, by stage in ladder order."""
    path = results / PRECISIONS_FOLDER / TENSOR_LADDER_CSV
    if not path.is_file():
        raise ReadmeError(f"there is no {path}: run numba-gemm lab tensor_ladder --out {path.parent}")
    found = pd.read_csv(path).to_dict("records")
    return {str(row["stage"]): {str(name): value for name, value in row.items()} for row in found}


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
        raise ReadmeError(f"{results} holds rows that are wrong or failed; only verified results are published")
    return frame, environment
