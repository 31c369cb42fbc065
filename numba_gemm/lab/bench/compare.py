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
    key = list(KEY)
    before, after = fastest(old), fastest(new)
    joined = before.merge(after, on=key, how="left", suffixes=("_old", "_new"))
    cases = key[1:]
    covered = joined.merge(new[cases].drop_duplicates(), on=cases, how="left", indicator=True)["_merge"] == "both"
    failed = joined.merge(
        new.loc[new["status"].isin(FAILURES), key].drop_duplicates(), on=key, how="left", indicator=True
    )
    measured = new["stage"].unique()

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
    joined.loc[absent & (failed["_merge"] == "both").to_numpy(), "verdict"] = BROKEN
    kept = covered.to_numpy() & joined["stage"].isin(measured).to_numpy()
    columns = [*key, "median_us_old", "median_us_new", "gflops_old", "gflops_new", "change", "verdict"]
    return joined.loc[kept, columns].reset_index(drop=True)


def timed_alike(new: Mapping[str, Any], old: Mapping[str, Any]) -> bool:
    """True if both runs, or neither, count launch overhead; older environments that do not say so used graphs."""
    return (new.get("timing") or GRAPHS) == (old.get("timing") or GRAPHS)


def regressions(compared: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a comparison that should fail a run."""
    return compared[compared["verdict"].isin(REGRESSIONS)]
