"""Committed results as rows, and the error for those that are missing or may not be published."""

import functools
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from numba_gemm.kernels.ladder import ASIDE
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.bench.results import FAILURES, NOT_STAGES, dictionaries, load, records
from numba_gemm.lab.bench.steady import MOST_WINDOWS, UNSETTLED, WINDOW_S
from numba_gemm.lab.bench.tables import Column, significant
from numba_gemm.lab.bench.tensor_ladder import DECOMPOSE
from numba_gemm.lab.harness.environment import GRAPHS, caption, conclude

LADDER_SHAPE = Shape(4096, 4096, 4096)
STEADY = "each contender alone at its steady state"
PRECISIONS_FOLDER = "precisions"  # results of `bench.py --precisions`, `accuracy`, `tensor_ladder`, `special_values`
STATISTICS = {"geomean": "geometric mean", "min": "least", "median": "median"}


class ReadmeError(Exception):
    """A generated block lacks its data; the message names it."""


Rows = dict[str, dict[str, Any]]
Measured = tuple[list[dict[str, Any]], dict[str, Any]]


class Published:
    """Committed results in a folder; it raises `ReadmeError` if they are missing or may not be published."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.precisions_folder = folder, folder / PRECISIONS_FOLDER
        self.frame, self.environment = read_results(folder)

    @functools.cached_property
    def precisions(self) -> tuple[pd.DataFrame, dict[str, Any]]:
        """Results of the precisions, and their environment."""
        return read_results(self.precisions_folder)

    def measured(self, experiment: str, file: str = "", folder: str = "") -> Measured:
        """Return the rows of an experiment's table, or of another file that it writes, and their environment."""
        place = self.folder / folder
        path = existing(place / (file or f"{experiment}.csv"), experiment)
        how = json.loads(existing(place / f"{experiment}.json", experiment).read_text(encoding="utf-8"))
        if how.get("simulator") or not how.get("gpu"):
            raise ReadmeError(f"{path} was not measured on a GPU")
        return dictionaries(pd.read_csv(path, keep_default_na=False, na_values=[""])), how

    def tensor_ladder(self) -> tuple[Rows, dict[str, Any]]:
        """Return the rows of `numba_gemm.lab.bench.tensor_ladder`, by stage in ladder order, and their environment."""
        rows, how = self.measured("tensor_ladder", folder=PRECISIONS_FOLDER)
        return {str(row["stage"]): row for row in rows}, how


def rows_at(frame: pd.DataFrame, shape: Shape) -> Rows:
    """Return the FP32 rows of a shape with a warm cache, by stage."""
    return {stage: row for (stage, precision), row in warm_rows(frame, shape).items() if precision == "ieee"}


def warm_rows(frame: pd.DataFrame, shape: Shape) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows of a shape with a warm cache, by stage and precision."""
    wanted = {"layout": "nn", "cache": "hot", **shape._asdict()}
    rows = (row for row in records(frame) if all(row[name] == value for name, value in wanted.items()))
    return {(row["stage"], row["precision"]): row for row in rows}


def ladder_stages(rows: Rows) -> list[str]:
    """Return the stages of a ladder among some rows."""
    return [stage for stage in rows if stage not in (*NOT_STAGES, *ASIDE, DECOMPOSE)]


def tflops(rows: Rows, stage: str) -> float:
    """TFLOP/s of a stage; NaN if it was not timed."""
    return float(rows[stage]["gflops"]) / 1000 if stage in rows else math.nan


def code(name: str, header: str = "") -> Column:
    """Return a left-aligned column of names in code."""
    return Column(header or name, lambda row: f"`{row[name]}`", left=True)


def spelled(shape: Shape) -> str:
    """Format a shape for prose."""
    return " x ".join(str(extent) for extent in shape)


def reached(value: float, met: bool) -> str:
    """Format the value that a target requires."""
    return significant(value) if met else f"**{significant(value)}**, missed"


def missed(claims: Mapping[str, bool]) -> str:
    """List of the claims that do not hold."""
    wrong = [f"- {claim}" for claim, holds in claims.items() if not holds]
    return "\n".join(["Missed:", "", *wrong]) if wrong else "No target is missed."


def in_turns(environment: Mapping[str, Any]) -> str:
    """Describe how contenders were timed beside each other."""
    replayed = environment.get("timing") == GRAPHS
    return f"{'CUDA-graph replays' if replayed else 'calls'} measured in turns with other contenders"


def source(environment: Mapping[str, Any]) -> str:
    """Return the line about the source of a table."""
    return f"Measured on {caption(environment)}."


def steady_source(environment: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the lines about the source of a table of steady speeds: clocks are those of its contenders."""
    throttle, clocks, unsettled = list[str](), list[float](), 0
    for row in rows:
        reasons = str(row["steady_throttle"]).split("; ")
        unsettled += UNSETTLED in reasons
        clocks.append(row["steady_clock_mhz"])
        throttle += [reason for reason in reasons if reason != UNSETTLED]
    how = dict(environment)
    conclude(how, clocks, throttle)
    said = f"{unsettled} of the {len(clocks)} speeds had not settled within {MOST_WINDOWS * WINDOW_S:g} seconds."
    return "\n\n".join([*([said] if unsettled else []), source(how)])


def existing(path: Path, experiment: str) -> Path:
    """Return the path of an experiment's file; raise `ReadmeError` if it does not exist."""
    if not path.is_file():
        raise ReadmeError(f"there is no {path}: run numba-gemm lab {experiment} --out {path.parent}")
    return path


def read_results(results: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Load results and their environment; raise `ReadmeError` unless they are complete, correct and of a GPU."""
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
