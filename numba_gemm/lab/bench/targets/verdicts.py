"""Targets: which rows, which statistic of them and what is required of it; and the verdicts on measured rows."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import Any

import pandas as pd

from numba_gemm.gemm.precision import IEEE
from numba_gemm.lab.bench.results import AUTO, OK, alone, records
from numba_gemm.lab.bench.targets.case import Case
from numba_gemm.simulator.switch import SIMULATOR

LIBRARIES = ("torch", "cupy", "numba")
THE_CALL = "the call"  # baseline of plans: the same product by the public function
BATCH, EPILOGUE, MATHS = "batch of 8", "epilogue", "epilogue that names numpy.float32 and math.erf"
# Host time per call, at most, in units of torch.matmul(out=).
HOST_LIMITS = {IEEE: 1.0, BATCH: 1.1, EPILOGUE: 1.4, MATHS: 1.4}
if not SIMULATOR:
    HOST_LIMITS |= {"tf32": 1.1, "bf16x6": 1.5, "tf32x3": 1.5, "fp16x3": 1.8}
PLAN_LIMIT = 0.9  # time of a plan's call, at most, in units of the corresponding call
NEW_SHAPE_LIMIT_US = 150.0
NEW_KINDS = (IEEE,) if SIMULATOR else (IEEE, "tf32", "bf16x6", "fp16x3")
# Library and kind of each case of calls and of each case of a plan's calls, and the kind of new shapes, by their names.
HOST_WAYS = {f"{library} arrays, {kind}": (library, kind) for library in LIBRARIES for kind in HOST_LIMITS}
PLAN_WAYS = {f"plan, {library} arrays, {kind}": (library, kind) for library in LIBRARIES for kind in NEW_KINDS}
NEW_SHAPES = {f"new shape, {kind}": kind for kind in NEW_KINDS}


Row = Mapping[Any, Any]


@dataclass(frozen=True)
class Target:
    """A target; it is judged if all of its groups were measured."""

    what: str
    groups: tuple[str, ...]
    statistic: str  # one of `numba_gemm.lab.bench.targets.verdicts.STATISTICS`
    at_least: float = math.nan  # limits of the statistic; NaN for none
    at_most: float = math.nan
    rows: Callable[[Row], bool] = lambda row: True  # filter for the rows of the groups
    case: str = ""  # the only case that counts; empty for all
    column: str = "ratio"  # that the statistic is computed from

    def takes(self, row: Row) -> bool:
        """Return True if a row counts."""
        return row["group"] in self.groups and self.case in ("", row["case"]) and self.rows(row)


def targets(large: int) -> list[Target]:
    """Return all targets; `large` as in `Sizes`."""

    def is_large(row: Row) -> bool:
        return bool(row["m"] >= large)

    def host(what: str, name: str, least: float) -> Target:
        return Target(f"host, {name}: {what}", ("host",), "min", least, case=name)

    def new(name: str) -> Target:
        # The row's time is the median of the calls, which `rounds` counts.
        what = f"host, {name} whose kernel is loaded: microseconds per call"
        return Target(what, ("host",), "median", at_most=NEW_SHAPE_LIMIT_US, case=name, column="us")

    return [
        Target("seed shapes, cuBLAS's time over ours", ("seed",), "geomean", 1.0),
        Target(f"seed shapes from {large} on", ("seed",), "min", 1.0, rows=is_large),
        Target(f"seed shapes below {large}", ("seed",), "min", 0.9, rows=lambda row: not is_large(row)),
        Target("cubes, cuBLAS's time over ours", ("cubes",), "min", 1.0),
        Target(f"seed shapes from {large} on, and cubes", ("seed", "cubes"), "geomean", 1.03, rows=is_large),
        Target("random shapes, cuBLAS's time over ours", ("random",), "geomean", 0.95),
        Target("random shapes, cuBLAS's time over ours", ("random",), "min", 0.75),
        Target("odd shapes, speed over their aligned neighbours'", ("odd",), "min", 0.95),
        Target("layouts TN, NT and TT, NN's time over theirs", ("layouts",), "min", 0.9),
        Target("matrix times vector, cold: share of a copy's bandwidth", ("vector",), "min", 0.85),
        Target("batched, cuBLAS's time over ours", ("batched",), "min", 0.95),
        Target("bias and ReLU, the plain product's time over theirs", ("epilogue",), "min", 0.98),
        *(host("torch.matmul's time over ours", name, 1 / HOST_LIMITS[kind]) for name, (_, kind) in HOST_WAYS.items()),
        *(host("the call's time over the plan's", name, 1 / PLAN_LIMIT) for name in PLAN_WAYS),
        *map(new, NEW_SHAPES),
    ]


def least_ratio(case: Case, large: int) -> float:
    """Return what is required of a case alone: the limit of the minimum that it is part of, or 0."""
    row = {"group": case.group, "m": case.shape.m, "case": case.name}
    return max((one.at_least for one in targets(large) if one.statistic == "min" and one.takes(row)), default=0.0)


STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {"geomean": geometric_mean, "min": min, "median": median}
COLUMNS = ("what", "statistic", "value", "at_least", "at_most", "met", "cases", "failed", "worst")


def verdict(target: Target, rows: Sequence[Row]) -> dict[str, Any]:
    """Judge a target, which is missed if a row failed or there is none; return `COLUMNS` and the least value."""
    there = [row for row in rows if row["status"] == OK and not math.isnan(row[target.column])]
    values = [float(row[target.column]) for row in there]
    value = STATISTICS[target.statistic](values) if values else math.nan
    worst = (max if target.column == "us" else min)(there, key=lambda row: row[target.column], default=None)
    met = 0 < len(rows) == len(there) and not (value < target.at_least or value > target.at_most)  # NaN limits nothing
    limits = (target.what, target.statistic, value, target.at_least, target.at_most, met)
    made = dict(zip(COLUMNS, (*limits, len(rows), len(rows) - len(there), worst["case"] if worst else ""), strict=True))
    return made | {"least": min(values, default=math.nan)}


def summary(frame: pd.DataFrame, groups: Iterable[str], large: int) -> pd.DataFrame:
    """Return one row per target of the measured groups."""
    measured, aimed = set(groups), frame[frame["target"].notna()].to_dict("records")
    judged = [one for one in targets(large) if measured.issuperset(one.groups)]
    found = [verdict(target, [row for row in aimed if target.takes(row)]) for target in judged]
    return pd.DataFrame(found, columns=list(COLUMNS))


def is_large_cube(row: Row) -> bool:
    """Return True for the shapes at which narrow precisions are compared with cuBLAS in the same precision."""
    return bool(row["m"] == row["n"] == row["k"] >= 4096)


def _from_2048(row: Row) -> bool:
    return bool(row["m"] >= 2048 and (row["m"] == row["n"] == row["k"] or row["k"] == 1024))


def _small(row: Row) -> bool:
    return bool(512 <= row["m"] == row["n"] <= 1536 and row["k"] == 1024)


def _mean(what: str, least: float, rows: Callable[[Row], bool], column: str = "ratio_to_cublas") -> Target:
    return Target(what, ("precisions",), "geomean", least, rows=rows, column=column)


PRECISION_TARGETS = {
    _mean("`bf16x6` against cuBLAS SGEMM, from 2048 on", 2.3, _from_2048): "bf16x6",
    _mean("`fp16x3` against cuBLAS SGEMM, from 2048 on", 3.6, _from_2048): "fp16x3",
    _mean("`bf16x6`, M = N from 512 to 1536, K = 1024", 1.3, _small): "bf16x6",
    _mean("`fp16x3`, M = N from 512 to 1536, K = 1024", 1.3, _small): "fp16x3",
    _mean("`tf32` against cuBLAS TF32, cubes from 4096 on", 0.95, is_large_cube, "ratio_to_same_precision"): "tf32",
    _mean("`bf16` against cuBLAS BF16, cubes from 4096 on", 0.95, is_large_cube, "ratio_to_same_precision"): "bf16",
}
"""Targets of ``bench --precisions all``, of the public function alone at its steady state, and their precisions."""
FEWEST_SHAPES = 3  # that a target of a precision needs to be judged


def precision_verdicts(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Judge the targets of precisions for which a result of ``bench`` has enough shapes."""
    ours = [row | {"case": row["shape"]} for row in records(alone(frame)) if row["stage"] == AUTO]
    found = []
    for target, precision in PRECISION_TARGETS.items():
        own = [row for row in ours if row["precision"] == precision and target.rows(row)]
        rows = [row for row in own if not math.isnan(row[target.column])]
        if len(rows) >= FEWEST_SHAPES:
            found.append(verdict(target, rows))
    return found
