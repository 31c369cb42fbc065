"""Targets, and their verdicts on the measured rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from numba_gemm.lab.bench.results import OK
from numba_gemm.lab.bench.targets.host_calls import (
    HOST_LIMITS,
    HOST_WAYS,
    NEW_KINDS,
    NEW_SHAPE_LIMIT_US,
    PLAN_LIMIT,
    PLAN_WAYS,
    host_name,
    new_name,
    plan_name,
)
from numba_gemm.lab.bench.targets.measure import COLUMNS


def geomean(values: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {"geomean": geomean, "min": min, "max": max}


@dataclass(frozen=True)
class Line:
    """A target.

    Attributes
    ----------
    what : str
        Its name.
    groups : tuple of str
        Groups of its rows; it is judged if all of them were measured.
    statistic : str
        One of `STATISTICS`.
    at_least, at_most : float
        Limits of the statistic; NaN for none.
    column : str
        Column that the statistic is computed from.
    rows : callable
        Filter for the rows of the groups.
    """

    what: str
    groups: tuple[str, ...]
    statistic: str
    at_least: float = math.nan
    at_most: float = math.nan
    column: str = "ratio"
    rows: Callable[[Mapping[Any, Any]], bool] = lambda row: True


def lines(large: int) -> list[Line]:
    """Return all targets; `large` as in `Sizes`."""
    made = [
        Line("seed shapes, cuBLAS's time over ours", ("seed",), "geomean", 1.0),
        Line(f"seed shapes from {large} on", ("seed",), "min", 1.0, rows=lambda row: row["m"] >= large),
        Line(f"seed shapes below {large}", ("seed",), "min", 0.9, rows=lambda row: row["m"] < large),
        Line("cubes, cuBLAS's time over ours", ("cubes",), "min", 1.0),
        Line(f"seed shapes from {large} on, and cubes", ("seed", "cubes"), "geomean", 1.03, rows=is_large(large)),
        Line("random shapes, cuBLAS's time over ours", ("random",), "geomean", 0.95),
        Line("random shapes, cuBLAS's time over ours", ("random",), "min", 0.75),
        Line("odd shapes, speed over their aligned neighbours'", ("odd",), "min", 0.95),
        Line("layouts TN, NT and TT, NN's time over theirs", ("layouts",), "min", 0.9),
        Line("matrix times vector, cold: share of a copy's bandwidth", ("vector",), "min", 0.85),
        Line("batched, cuBLAS's time over ours", ("batched",), "min", 0.95),
        Line("bias and ReLU, the plain product's time over theirs", ("epilogue",), "min", 0.98),
    ]
    for way in HOST_WAYS:
        least, name = 1 / HOST_LIMITS[way[1]], host_name(*way)
        what = f"host, {name}: torch.matmul's time over ours"
        made.append(Line(what, ("host",), "min", least, rows=is_case(name)))
    for way in PLAN_WAYS:
        name = plan_name(*way)
        made.append(
            Line(f"host, {name}: the call's time over the plan's", ("host",), "min", 1 / PLAN_LIMIT, rows=is_case(name))
        )
    for kind in NEW_KINDS:
        name, limit = new_name(kind), NEW_SHAPE_LIMIT_US
        what = f"host, {name} whose kernel is loaded: microseconds per call"
        made.append(Line(what, ("host",), "max", at_most=limit, column="us", rows=is_case(name)))
    return made


def is_large(large: int) -> Callable[[Mapping[Any, Any]], bool]:
    """Return a filter for rows with at least this M."""
    return lambda row: bool(row["m"] >= large)


def is_case(name: str) -> Callable[[Mapping[Any, Any]], bool]:
    """Return a filter for the rows of one case."""
    return lambda row: bool(row["case"] == name)


def frame_of(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return a DataFrame with all columns, in order."""
    return pd.DataFrame(list(rows), columns=list(COLUMNS))


def summary(frame: pd.DataFrame, groups: Iterable[str], large: int) -> pd.DataFrame:
    """Return one row per target of the measured groups; a target is missed if a row failed or there is no row."""
    measured, aimed = set(groups), frame[frame["target"].notna()].to_dict("records")
    judged = []
    for line in lines(large):
        if not measured.issuperset(line.groups):
            continue
        rows = [row for row in aimed if row["group"] in line.groups and line.rows(row)]
        there = [row for row in rows if row["status"] == OK and not math.isnan(row[line.column])]
        values = [float(row[line.column]) for row in there]
        value = STATISTICS[line.statistic](values) if values else math.nan
        low, high = (-math.inf if math.isnan(line.at_least) else line.at_least), line.at_most
        complete = bool(rows) and len(there) == len(rows)
        worst = (max if line.column == "us" else min)(there, key=lambda row: row[line.column], default=None)
        judged.append(
            {
                "what": line.what,
                "statistic": line.statistic,
                "value": value,
                "at_least": line.at_least,
                "at_most": line.at_most,
                "met": complete and low <= value <= (math.inf if math.isnan(high) else high),
                "cases": len(rows),
                "failed": len(rows) - len(there),
                "worst": worst["case"] if worst else "",
            }
        )
    columns = ["what", "statistic", "value", "at_least", "at_most", "met", "cases", "failed", "worst"]
    return pd.DataFrame(judged, columns=columns)
