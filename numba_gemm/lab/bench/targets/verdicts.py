"""Verdicts of the targets on the measured rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from numba_gemm.lab.bench.results import OK
from numba_gemm.lab.bench.targets.measure import COLUMNS
from numba_gemm.lab.bench.targets.table import targets


def geomean(values: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {"geomean": geomean, "min": min, "max": max}


def frame_of(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return a DataFrame with all columns, in order."""
    return pd.DataFrame(list(rows), columns=list(COLUMNS))


def summary(frame: pd.DataFrame, groups: Iterable[str], large: int) -> pd.DataFrame:
    """Return one row per target of the measured groups; a target is missed if a row failed or there is no row."""
    measured, aimed = set(groups), frame[frame["target"].notna()].to_dict("records")
    judged = []
    for target in targets(large):
        if not measured.issuperset(target.groups):
            continue
        rows = [row for row in aimed if row["group"] in target.groups and target.rows(row)]
        there = [row for row in rows if row["status"] == OK and not math.isnan(row[target.column])]
        values = [float(row[target.column]) for row in there]
        value = STATISTICS[target.statistic](values) if values else math.nan
        low, high = (-math.inf if math.isnan(target.at_least) else target.at_least), target.at_most
        complete = bool(rows) and len(there) == len(rows)
        worst = (max if target.column == "us" else min)(there, key=lambda row: row[target.column], default=None)
        met = complete and low <= value <= (math.inf if math.isnan(high) else high)
        limits = (target.what, target.statistic, value, target.at_least, target.at_most, met)
        judged.append((*limits, len(rows), len(rows) - len(there), worst["case"] if worst else ""))
    columns = ["what", "statistic", "value", "at_least", "at_most", "met", "cases", "failed", "worst"]
    return pd.DataFrame(judged, columns=columns)
