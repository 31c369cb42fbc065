"""Report of a run: tables on the terminal and in ``report.md``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from numba_gemm.gemm.precision import IEEE
from numba_gemm.lab.bench.compare import FASTER, REGRESSIONS, SAME, SLOWER
from numba_gemm.lab.bench.results import (
    AUTO,
    CUBLAS,
    ERROR,
    FAILURES,
    OK,
    UNSUPPORTED,
    WRONG,
    fastest,
    names_in,
    of_float32,
    records,
)
from numba_gemm.lab.bench.tables import MISSING, Table, number, significant
from numba_gemm.lab.harness.environment import caption

SIMULATOR_NOTICE = (
    "No GPU was used: Numba's simulator ran every thread in Python. The products were verified; "
    "the times in results.csv mean nothing."
)

# Best percentage of FP32 peak in the table of 15 sizes that preceded this ladder, for its versions of these stages and
# for cuBLAS.
EARLIER = {"vectorized": 54.5, "conflict_free": 68.6, "double_buffered": 75.7, "cublas": 83.9}
EARLIER_NOTE = (
    "Earlier: percent of peak on another card, in CUDA C, from mean times, for M = N from 128 to 16384, "
    "K = 1024. Those kernels have no edges, no strides, no alpha and no beta; the earlier conflict_free and "
    "double_buffered still conflict where they store A transposed; the earlier cublas is another release. Compare how "
    "the two climbs go, not their speeds."
)

MOST_TIMES = 60  # lines of the table of times on a terminal; beyond, those of the public function and cuBLAS alone

MODEL_NOTE = (
    "Model: how long each resource is busy at least with what a stage computes and moves, at its ceiling; predicted is "
    "the longest. shared is shared memory and the L1 cache, which have one data path; it and FP32 are those of the "
    "multiprocessor with most blocks. Latencies, and all instructions but multiply-adds, come on top."
)


# Verdict on a configuration, the worst first.
VERDICTS = {WRONG: "wrong", ERROR: "error", OK: "correct", UNSUPPORTED: "unsupported"}


def verdict_table(frame: pd.DataFrame) -> Table:
    """Verdicts, one line per stage and one column per shape, and the worst error; for runs without times."""
    rows = records(frame)
    shapes = names_in(rows, "shape")
    lines = []
    for stage, precision in dict.fromkeys((row["stage"], row["precision"]) for row in rows):
        mine = [row for row in rows if (row["stage"], row["precision"]) == (stage, precision)]
        found = {shape: {row["status"] for row in mine if row["shape"] == shape} for shape in shapes}
        verdicts = [next((VERDICTS[one] for one in VERDICTS if one in found[shape]), MISSING) for shape in shapes]
        errors = [row["error_in_bounds"] for row in mine if not math.isnan(row["error_in_bounds"])]
        name = stage if precision == IEEE else f"{stage} {precision}"
        lines.append([name, *verdicts, significant(max(errors, default=math.nan), 2)])
    return Table("Verdicts (worst error in units of the bound)", ["stage", *shapes, "error"], lines, left=["stage"])


def speed_table(frame: pd.DataFrame) -> Table:
    """GFLOP/s, one line per shape and one column per stage."""
    return pivot(frame, "gflops", "GFLOP/s", speed)


def ratio_table(frame: pd.DataFrame) -> Table:
    """Speed relative to cuBLAS, one line per shape and one column per stage."""
    return pivot(frame, "ratio_to_cublas", "Speed in multiples of cuBLAS", lambda value: number(value, 3))


def pivot(frame: pd.DataFrame, column: str, title: str, show: Callable[[float], str]) -> Table:
    """Table of one column of the results, with shapes as rows and stages as columns."""
    rows = records(frame)
    stages = names_in(rows, "stage")
    values = {(row["shape"], row["stage"]): row[column] for row in records(fastest(frame))}
    lines = [
        [shape, *(show(values.get((shape, stage), math.nan)) for stage in stages)] for shape in names_in(rows, "shape")
    ]
    return Table(title, ["M x N x K", *stages], lines, left=["M x N x K"])


def times_table(frame: pd.DataFrame) -> Table:
    """Shortest, mean and longest time of each stage and shape, with its speed."""
    lines = [
        [
            row["shape"],
            row["stage"],
            row["precision"],
            *(significant(row[column], 4) for column in ("min_us", "mean_us", "max_us")),
            speed(row["gflops"]),
            number(row["percent_of_peak"], 1, " %"),
        ]
        for row in records(fastest(frame))
    ]
    headers = ["M x N x K", "stage", "precision", "min us", "mean us", "max us", "GFLOP/s", "of peak"]
    return Table("Times per call, replayed in turns", headers, lines, left=["M x N x K", "stage", "precision"])


def steady_table(frame: pd.DataFrame) -> Table:
    """Speed of each contender alone at its steady state, of plain calls, and of replays in turns with the others."""
    lines = [
        [
            row["shape"],
            row["stage"],
            row["precision"],
            speed(row["steady_gflops"]),
            number(row["steady_ratio_to_cublas"], 3),
            number(row["steady_clock_mhz"], 0),
            number(row["steady_watts"], 0),
            significant(row["call_us"], 4),
            number(row["call_ratio_to_cublas"], 3),
            significant(row["host_us"], 3),
            number(row["ratio_to_cublas"], 3),
        ]
        for row in records(fastest(frame))
        if not math.isnan(row["steady_us"])
    ]
    headers = [
        *("M x N x K", "stage", "precision", "GFLOP/s alone", "ratio", "MHz", "W"),
        *("plain call us", "ratio of calls", "host us", "ratio in turns"),
    ]
    title = "Each contender alone at its steady state (ratios to cuBLAS SGEMM)"
    return Table(title, headers, lines, left=["M x N x K", "stage", "precision"])


def summary_table(frame: pd.DataFrame) -> Table:
    """Best speed of each stage, with the earlier figures."""
    rows, timed = records(frame), records(fastest(frame))
    lines = []
    for stage in names_in(rows, "stage"):
        errors = [row["error_in_bounds"] for row in rows if row["stage"] == stage]
        error = significant(max((e for e in errors if not math.isnan(e)), default=math.nan), 2)
        compared = [error, number(EARLIER.get(stage, math.nan), 1, " %")]
        mine = [row for row in timed if row["stage"] == stage]
        if not mine:
            status = ", ".join(sorted({row["status"] for row in rows if row["stage"] == stage}))
            lines.append([stage, status, MISSING, MISSING, MISSING, *compared])
            continue
        top = max(mine, key=lambda row: row["gflops"])
        lines.append(
            [
                stage,
                top["shape"],
                speed(top["gflops"]),
                number(top["percent_of_peak"], 1, " %"),
                number(top["ratio_to_cublas"], 3),
                *compared,
            ]
        )
    headers = ["stage", "best size", "GFLOP/s", "of peak", "ratio", "error", "earlier"]
    return Table(
        "Stage summary (ratio to cuBLAS, worst error in units of the bound)",
        headers,
        lines,
        left=["stage", "best size"],
    )


def precision_table(frame: pd.DataFrame) -> Table:
    """Speed and error of every precision, one line per shape and precision; FP32 for comparison."""
    chosen = frame[(frame["precision"] != "ieee") | frame["stage"].isin((AUTO, CUBLAS))]
    lines = [
        [
            row["shape"],
            row["precision"],
            row["stage"],
            speed(row["gflops"]),
            number(row["ratio_to_cublas"], 3),
            number(row["ratio_to_same_precision"], 3),
            significant(row["error_median"], 2),
            significant(row["error_max"], 2),
        ]
        for row in records(fastest(chosen))
    ]
    headers = ["M x N x K", "precision", "by", "GFLOP/s", "ratio", "to its own", "median error", "largest"]
    title = "Precisions (ratios to cuBLAS FP32, and to cuBLAS in the same precision; errors over abs(A) @ abs(B))"
    return Table(title, headers, lines, left=["M x N x K", "precision", "by"])


def speed(gflops: float) -> str:
    """Format GFLOP/s as an integer, or with three digits for small values."""
    return number(gflops, 0) if gflops >= 100 else significant(gflops)


def problem_lines(frame: pd.DataFrame) -> list[str]:
    """Return one line per row that is wrong or raised."""
    return [
        f"{label(row)} at {row['shape']}: {row['status'].upper()}, not timed. {row['note']}"
        for row in records(frame)
        if row["status"] in FAILURES
    ]


def label(row: Mapping[str, Any]) -> str:
    """Name of a row: stage and configuration."""
    return f"{row['stage']} {row['config']}".strip()


def changes_table(compared: pd.DataFrame, simulated: bool = False) -> Table:
    """Table of the rows of a comparison whose verdict is not ``same``; in the simulator, without those of times."""
    if simulated:
        changed = [row for row in records(compared) if row["verdict"] not in (SAME, SLOWER, FASTER)]
        return Table(
            f"{len(changed)} of {len(compared)} verdicts changed",
            ["stage", "M x N x K", "verdict"],
            [[row["stage"], row["shape"], row["verdict"]] for row in changed],
            left=["stage", "M x N x K", "verdict"],
        )
    lines = [
        [
            row["stage"],
            row["shape"],
            speed(row["gflops_old"]),
            speed(row["gflops_new"]),
            MISSING if math.isnan(row["change"]) else f"{100 * row['change']:+.1f} %",
            row["verdict"],
        ]
        for row in records(compared)
        if row["verdict"] != SAME
    ]
    title = f"{len(lines)} of {len(compared)} measurements changed"
    headers = ["stage", "M x N x K", "GFLOP/s before", "GFLOP/s now", "time", "verdict"]
    return Table(title, headers, lines, left=["stage", "M x N x K", "verdict"])


def markdown(
    frame: pd.DataFrame,
    environment: Mapping[str, Any],
    compared: pd.DataFrame | None = None,
    model: Table | None = None,
) -> str:
    """Return the whole report as markdown."""
    simulated = bool(environment.get("simulator"))
    parts = ["# Results", caption(environment) + f", seed {environment.get('seed')}."]
    if simulated:
        parts.append(SIMULATOR_NOTICE)
    if problems := problem_lines(frame):
        parts += ["## Wrong or failed", "\n".join(f"- {problem}" for problem in problems)]
    plain = of_float32(frame)
    tables = [verdict_table(frame)] if simulated else [speed_table(plain)]
    if plain["ratio_to_cublas"].notna().any() and not simulated:
        tables.append(ratio_table(plain))
    tables += more_tables(frame, simulated, compared, model)
    for table in tables:
        parts += [f"## {table.title}", table.markdown()]
    return "\n\n".join([*parts, *notes(simulated, model)]) + "\n"


def show(
    console: Console,
    frame: pd.DataFrame,
    environment: Mapping[str, Any],
    compared: pd.DataFrame | None = None,
    model: Table | None = None,
) -> None:
    """Print the report on a terminal."""
    simulated = bool(environment.get("simulator"))
    for part in folded(verdict_table(frame) if simulated else speed_table(of_float32(frame)), console.width):
        console.print(draw(part, bad=(VERDICTS[WRONG], VERDICTS[ERROR])))
    for table in more_tables(frame, simulated, compared, model, MOST_TIMES):
        console.print(draw(table, bad=REGRESSIONS, good=(FASTER,)))
    for note in notes(simulated, model):
        console.print(note, style="dim")
    for problem in problem_lines(frame):
        console.print(problem, style="bold red")
    console.print(caption(environment), style="dim")


def more_tables(
    frame: pd.DataFrame,
    simulated: bool,
    compared: pd.DataFrame | None,
    model: Table | None,
    most_times: int | None = None,
) -> list[Table]:
    """Return the tables after the first one: precisions, steady state, changes, model, summary, times.

    If there are more than `most_times` times, those of the public function and cuBLAS alone.
    """
    plain, tables = of_float32(frame), []
    if len(plain) < len(frame) and not simulated:
        tables.append(precision_table(frame))
    if frame["steady_us"].notna().any():
        tables.append(steady_table(frame))
    if compared is not None:
        tables.append(changes_table(compared, simulated))
    if model is not None:
        tables.append(model)
    if simulated:
        return tables
    few = most_times is None or len(frame) <= most_times
    timed = frame if few else frame[frame["stage"].isin((AUTO, CUBLAS))]
    return [*tables, summary_table(plain), times_table(timed)]


def notes(simulated: bool, model: Table | None) -> list[str]:
    """Return the notes below the tables."""
    return ([] if simulated else [EARLIER_NOTE]) + ([] if model is None else [MODEL_NOTE])


def folded(table: Table, width: int) -> Iterator[Table]:
    """Split a wide table into several that fit a terminal, each with the first column."""
    headers = [max(broken(header).split("\n"), key=len) for header in table.headers]
    widths = [max(map(len, column)) + 3 for column in zip(headers, *table.rows, strict=True)]
    start = 1
    while start < len(widths):
        stop, used = start, widths[0]
        while stop < len(widths) and (stop == start or used + widths[stop] <= width):
            used += widths[stop]
            stop += 1
        rows = [[row[0], *row[start:stop]] for row in table.rows]
        yield Table(table.title, [table.headers[0], *table.headers[start:stop]], rows, table.left)
        start = stop


def draw(table: Table, bad: Sequence[str] = (), good: Sequence[str] = ()) -> RichTable:
    """Convert a table for a terminal; rows with a word of ``bad``, or that end in one of ``good``, are coloured."""
    drawn = RichTable(title=table.title, box=box.SIMPLE_HEAD, title_justify="left")
    for header in table.headers:
        drawn.add_column(broken(header), justify="left" if header in table.left else "right", no_wrap=True)
    for row in table.rows:
        drawn.add_row(*row, style="bold red" if set(row) & set(bad) else "green" if row[-1] in good else "")
    return drawn


def broken(header: str) -> str:
    """Break a long stage name into two lines."""
    return header.replace("_", "_\n", 1)
