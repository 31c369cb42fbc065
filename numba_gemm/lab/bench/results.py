"""Results: rows in a CSV file, with the environment in a JSON file beside it; comparison of two runs."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
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
    frame = frame.reindex(columns=list(dict.fromkeys([*frame.columns, *COLUMNS])))  # older results lack some
    frame[list(TEXT_EXTRAS)] = frame[list(TEXT_EXTRAS)].astype(object).fillna("")
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


def fastest(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the timed rows with the fastest configuration of each stage and shape."""
    timed = frame[frame["median_us"].notna()]
    best = timed.groupby(list(KEY), sort=False)["median_us"].idxmin()
    return timed.loc[best].sort_index().reset_index(drop=True)


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows as dictionaries, with the name MxNxK of the shape as ``shape``."""
    return [row | {"shape": f"{row['m']}x{row['n']}x{row['k']}"} for row in dictionaries(frame)]


def dictionaries(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of any table as dictionaries."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def names_in(rows: Iterable[Mapping[str, Any]], column: str) -> list[str]:
    """Return the distinct values of a column in order of appearance; for stages, that of the ladder."""
    return list(dict.fromkeys(row[column] for row in rows))


def of_float32(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with float32 arithmetic."""
    return frame[frame["precision"] == "ieee"]


SMALLEST_CHANGE = 0.01  # relative change of the median; smaller ones are ignored

SLOWER, FASTER, SAME, BROKEN, LOST = "slower", "faster", "same", "broken", "missing"
REGRESSIONS = (SLOWER, BROKEN)


def compare(new: pd.DataFrame, old: pd.DataFrame) -> pd.DataFrame:
    """Return one row per stage and shape of the new run that was timed in the old run or failed in the new one.

    ``verdict`` is ``slower`` or ``faster`` if the p10 to p90 intervals of the two runs are disjoint and their medians
    differ by more than one percent. If both runs have a ratio to cuBLAS, the ratio must also have moved in the same
    direction by more than one percent, since a difference in clocks changes all times. It is ``broken`` if a stage that
    was timed before is now wrong or raises, ``missing`` if the new run covers the shape but has no row, else ``same``.
    ``change`` is the new median divided by the old one, minus one. If a run measured several configurations of a stage,
    the fastest counts.
    """
    key, cases = list(KEY), list(KEY[1:])
    joined = fastest(old).merge(fastest(new), on=key, how="left", suffixes=("_old", "_new"))
    covered = _rows_in(joined, new, cases) & joined["stage"].isin(new["stage"])
    failed = _rows_in(joined, new[new["status"].isin(FAILURES)], key)

    joined["change"] = joined["median_us_new"] / joined["median_us_old"] - 1
    # As a ratio of times: the slower run has the smaller ratio to cuBLAS. If a run has no ratio, the change decides.
    against_cublas = (joined["ratio_to_cublas_old"] / joined["ratio_to_cublas_new"] - 1).fillna(joined["change"])
    least, most = np.minimum(joined["change"], against_cublas), np.maximum(joined["change"], against_cublas)
    slower = (joined["p10_us_new"] > joined["p90_us_old"]) & (least > SMALLEST_CHANGE)
    faster = (joined["p90_us_new"] < joined["p10_us_old"]) & (most < -SMALLEST_CHANGE)
    absent = joined["median_us_new"].isna()
    joined["verdict"] = np.select([absent & failed, absent, slower, faster], [BROKEN, LOST, SLOWER, FASTER], SAME)
    columns = [*key, "median_us_old", "median_us_new", "gflops_old", "gflops_new", "change", "verdict"]
    return joined.loc[covered, columns].reset_index(drop=True)


def _rows_in(frame: pd.DataFrame, other: pd.DataFrame, columns: list[str]) -> Any:
    """Return which rows of a table have the values of some columns in common with a row of another."""
    found, others = (pd.MultiIndex.from_frame(one[columns]) for one in (frame, other))
    return found.isin(others)
