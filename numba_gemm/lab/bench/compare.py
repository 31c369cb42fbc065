"""Comparison of a run with an older one, beyond the spread of either."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from numba_gemm.lab.bench.results import FAILURES, KEY, fastest
from numba_gemm.lab.harness.environment import GRAPHS

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
    # As a ratio of times: the slower run has the smaller ratio to cuBLAS. NaN if a run has no ratio.
    against_cublas = joined["ratio_to_cublas_old"] / joined["ratio_to_cublas_new"] - 1
    alone = against_cublas.isna()
    slower = (joined["p10_us_new"] > joined["p90_us_old"]) & (joined["change"] > SMALLEST_CHANGE)
    slower &= alone | (against_cublas > SMALLEST_CHANGE)
    faster = (joined["p90_us_new"] < joined["p10_us_old"]) & (joined["change"] < -SMALLEST_CHANGE)
    faster &= alone | (against_cublas < -SMALLEST_CHANGE)
    absent = joined["median_us_new"].isna()
    joined["verdict"] = SAME
    joined.loc[absent, "verdict"] = LOST
    joined.loc[slower, "verdict"] = SLOWER
    joined.loc[faster, "verdict"] = FASTER
    joined.loc[absent & failed, "verdict"] = BROKEN
    columns = [*key, "median_us_old", "median_us_new", "gflops_old", "gflops_new", "change", "verdict"]
    return joined.loc[covered, columns].reset_index(drop=True)


def _rows_in(frame: pd.DataFrame, other: pd.DataFrame, columns: list[str]) -> Any:
    """Return which rows of a table have the values of some columns in common with a row of another."""
    found, others = (pd.MultiIndex.from_frame(one[columns]) for one in (frame, other))
    return found.isin(others)


def timed_alike(new: Mapping[str, Any], old: Mapping[str, Any]) -> bool:
    """True if both runs, or neither, count launch overhead; older environments that do not say so used graphs."""
    return (new.get("timing") or GRAPHS) == (old.get("timing") or GRAPHS)


def regressions(compared: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a comparison that should fail a run."""
    return compared[compared["verdict"].isin(REGRESSIONS)]
