"""Which measurements changed since an older run, beyond what either run varied by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from numba_gemm.lab.bench.results import FAILURES, GRAPHS, KEY, fastest

SMALLEST_CHANGE = 0.01  # of the median; below it, a change matters to nobody

SLOWER, FASTER, SAME, BROKEN, LOST = "slower", "faster", "same", "broken", "missing"
REGRESSIONS = (SLOWER, BROKEN)


def compare(new: pd.DataFrame, old: pd.DataFrame) -> pd.DataFrame:
    """One row for every stage and shape of the new run that the old one timed, or that the new one failed.

    ``verdict`` is ``slower`` or ``faster`` when the p10 to p90 intervals of the two runs are disjoint and their medians
    differ by more than one percent; and, where both runs have a ratio to cuBLAS, if that moved the same way by more
    than one percent, since clocks that differ between the runs move everything. It is ``broken`` when what was timed
    before is wrong or raises now, ``missing`` when the new run covers the shape but has no row, else ``same``.
    ``change`` is the new median over the old one, less one. Where a run measured several configurations of a stage, its
    fastest counts.
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
    # In time as well: what takes longer has the smaller ratio. NaN where a run has none.
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
    """Whether launches count in both runs or in neither, by their environments; older ones say nothing, for graphs."""
    return (new.get("timing") or GRAPHS) == (old.get("timing") or GRAPHS)


def regressions(compared: pd.DataFrame) -> pd.DataFrame:
    """The rows of a comparison that should fail a run."""
    return compared[compared["verdict"].isin(REGRESSIONS)]
