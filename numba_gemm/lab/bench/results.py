"""Results: one row per measurement in a CSV file, with the environment in a JSON file beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

# Values of the column `stage` other than stages: the public function's own choice, and the baselines.
AUTO, CUBLAS, CPU = NOT_STAGES = ("auto", "cublas", "cpu")

GIVEN_BF16 = "cublas_given_bf16"  # cuBLAS on operands that are already BF16, with a BF16 result

RESULTS, ENVIRONMENT = "results.csv", "environment.json"

EXTENTS = ("m", "n", "k")
TEXT_KEYS = ("stage", "precision", "layout", "cache")
KEY = ("stage", "precision", "m", "n", "k", "layout", "cache")
MEASURES = (
    *("min_us", "median_us", "mean_us", "max_us", "p10_us", "p90_us"),
    *("gflops", "percent_of_peak", "ratio_to_cublas", "error_in_bounds", "host_us", "compile_s"),
)
TEXT_EXTRAS = ("status", "via", "config", "throttle", "note", "steady_throttle")
# Columns that begin with "steady" are of a contender alone at its steady state, those with "call" of plain calls.
ALONE = ("steady_us", "steady_gflops", "steady_ratio_to_cublas", "steady_clock_mhz", "steady_watts")
CALLS = ("call_us", "call_ratio_to_cublas")
NUMBER_EXTRAS = ("sm_clock_mhz", "rounds", "error_median", "error_max", "ratio_to_same_precision", *ALONE, *CALLS)
COLUMNS = (*KEY, *MEASURES, *TEXT_EXTRAS, *NUMBER_EXTRAS)

# Values of `status`. Only rows with OK hold timings.
OK, WRONG, ERROR, UNSUPPORTED = "ok", "wrong", "error", "unsupported"
FAILURES = (WRONG, ERROR)


def frame_of(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """DataFrame of rows with all columns, in order; missing numbers are NaN, missing texts empty."""
    blank: dict[str, Any] = dict.fromkeys(MEASURES + NUMBER_EXTRAS, math.nan) | dict.fromkeys(TEXT_EXTRAS, "")
    return pd.DataFrame([blank | dict(row) for row in rows], columns=list(COLUMNS))


def load(path: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Read a results folder, or a results CSV with the environment beside it if there is one.

    Raise FileNotFoundError if there is no such file, and ValueError, which names the file, if one is malformed.
    """
    csv = path / RESULTS if path.is_dir() else path
    if not csv.is_file():
        raise FileNotFoundError(f"no results at {path}: expected a folder with {RESULTS}, or such a file")
    try:
        frame = pd.read_csv(csv, dtype=dict.fromkeys((*TEXT_KEYS, *TEXT_EXTRAS), str))
        missing = [column for column in (*KEY, *MEASURES) if column not in frame.columns]
        if missing:
            raise ValueError(f"it has no column {', '.join(missing)}")
        frame = frame.astype(dict.fromkeys(EXTENTS, "int64") | dict.fromkeys(MEASURES, "float64"))
    except (OSError, ValueError, OverflowError) as error:  # errors of pandas are ValueErrors
        raise ValueError(f"{csv} is no results file: {' '.join(str(error).split())}") from error
    for column in TEXT_EXTRAS:
        frame[column] = frame[column].fillna("") if column in frame.columns else ""
    for column in {*NUMBER_EXTRAS}.difference(frame.columns):  # of results that are older than these
        frame[column] = math.nan
    beside = csv.with_name(ENVIRONMENT)
    return frame, _environment(beside) if beside.is_file() else {}


def _environment(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or not isinstance((found.get("gpu") or {"name": ""})["name"], str):
            raise TypeError("expected an object whose gpu is null or has a name")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} describes no environment: {type(error).__name__}: {error}") from error
    return found


def fastest(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the timed rows with the fastest configuration of each stage and shape."""
    timed = frame[frame["median_us"].notna()]
    best = timed.groupby(list(KEY), sort=False)["median_us"].idxmin()
    return timed.loc[best].sort_index().reset_index(drop=True)


def alone(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that were measured alone, with these times, speeds and ratios in place of those in turns."""
    found = frame[frame["steady_us"].notna()].copy()
    found["median_us"], found["gflops"] = found["steady_us"], found["steady_gflops"]
    found["ratio_to_cublas"] = found["steady_ratio_to_cublas"]
    keys = ["precision", *EXTENTS, "layout", "cache"]
    baselines = found[found["stage"] == CUBLAS].drop_duplicates(keys).set_index(keys)["steady_us"]
    theirs = baselines.reindex(pd.MultiIndex.from_frame(found[keys])).to_numpy()
    found["ratio_to_same_precision"] = theirs / found["steady_us"]
    return found


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows as dictionaries, with the name MxNxK of the shape as ``shape``."""
    return [row | {"shape": f"{row['m']}x{row['n']}x{row['k']}"} for row in dictionaries(frame)]


def dictionaries(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of any table as dictionaries."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def geomean(values: Iterable[float]) -> float:
    """Return the geometric mean."""
    logarithms = list(map(math.log, values))
    return math.exp(math.fsum(logarithms) / len(logarithms))


def names_in(rows: Iterable[Mapping[str, Any]], column: str) -> list[str]:
    """Return the distinct values of a column in order of appearance; for stages, that of the ladder."""
    return list(dict.fromkeys(row[column] for row in rows))


def of_float32(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with float32 arithmetic."""
    return frame[frame["precision"] == "ieee"]
