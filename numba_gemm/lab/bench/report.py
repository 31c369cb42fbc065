"""Report of a run: tables on the terminal and in ``report.md``."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from numba_gemm.gemm.precision import IEEE
from numba_gemm.lab.bench import results
from numba_gemm.lab.bench.results import FASTER, SAME, SLOWER
from numba_gemm.lab.bench.tables import (
    MISSING,
    SHAPE,
    STAGE,
    Row,
    Table,
    figure,
    number,
    significant,
    speed,
    table,
    text,
)
from numba_gemm.lab.harness.environment import caption

SIMULATOR_NOTICE = (
    "No GPU was used: Numba's simulator ran every thread in Python. The products were verified; "
    "the times in results.csv mean nothing."
)

MODEL_NOTE = (
    "Model: how long each resource is busy at least with what a stage computes and moves, at its ceiling; predicted is "
    "the longest. shared is shared memory and the L1 cache, which have one data path; it and FP32 are those of the "
    "multiprocessor with most blocks. Latencies, and all instructions but multiply-adds, come on top."
)

MOST_LINES = 60  # of a table on a terminal, if it has more stages than these:
MOST_ASKED = (results.AUTO, results.CUBLAS)

# Verdict on a configuration, the worst first.
VERDICTS = {results.WRONG: "wrong", results.ERROR: "error", results.OK: "correct", results.UNSUPPORTED: "unsupported"}

PRECISION = text("precision")
RATIO, PEAK = figure("ratio", "ratio_to_cublas", number, 3), figure("of peak", "percent_of_peak", number, 1, " %")
SPEED = figure("GFLOP/s", "gflops", speed)


def worst_error(rows: Sequence[Row]) -> str:
    """Format the worst error of some rows."""
    errors = (row["error_in_bounds"] for row in rows if not math.isnan(row["error_in_bounds"]))
    return significant(max(errors, default=math.nan), 2)


def verdict_table(frame: pd.DataFrame) -> Table:
    """Verdicts, one line per stage and one column per shape, and the worst error; for runs without times."""
    rows = results.records(frame)
    shapes = results.names_in(rows, "shape")
    lines = []
    for stage, precision in dict.fromkeys((row["stage"], row["precision"]) for row in rows):
        mine = [row for row in rows if (row["stage"], row["precision"]) == (stage, precision)]
        found = {shape: {row["status"] for row in mine if row["shape"] == shape} for shape in shapes}
        verdicts = [next((VERDICTS[one] for one in VERDICTS if one in found[shape]), MISSING) for shape in shapes]
        lines.append([stage if precision == IEEE else f"{stage} {precision}", *verdicts, worst_error(mine)])
    return Table("Verdicts (worst error in units of the bound)", ["stage", *shapes, "error"], lines, left=["stage"])


def pivot(frame: pd.DataFrame, column: str, title: str, show: Callable[[float], str]) -> Table:
    """Table of one column of the results, with shapes as rows and stages as columns."""
    rows = results.records(frame)
    stages = results.names_in(rows, "stage")
    values = {(row["shape"], row["stage"]): row[column] for row in results.records(results.fastest(frame))}
    shapes = results.names_in(rows, "shape")
    lines = [[shape, *(show(values.get((shape, stage), math.nan)) for stage in stages)] for shape in shapes]
    return Table(title, ["M x N x K", *stages], lines, left=["M x N x K"])


def times_table(frame: pd.DataFrame) -> Table:
    """Shortest, mean and longest time of each stage, precision and shape, with its speed and errors."""
    return table(
        "Times per call, replayed in turns (ratios to cuBLAS FP32, and to its own precision; errors over |A| @ |B|)",
        results.records(results.fastest(frame)),
        *(SHAPE, STAGE, PRECISION),
        *(figure(f"{name} us", f"{name}_us", significant, 4) for name in ("min", "mean", "max")),
        *(SPEED, PEAK, RATIO, figure("to its own", "ratio_to_same_precision", number, 3)),
        *(figure("median error", "error_median", significant, 2), figure("largest", "error_max", significant, 2)),
    )


def steady_table(frame: pd.DataFrame) -> Table:
    """Speed of each contender alone at its steady state, of plain calls, and of replays in turns with the others."""
    return table(
        "Each contender alone at its steady state (ratios to cuBLAS SGEMM)",
        (row for row in results.records(results.fastest(frame)) if not math.isnan(row["steady_us"])),
        *(SHAPE, STAGE, PRECISION),
        figure("GFLOP/s alone", "steady_gflops", speed),
        figure("ratio", "steady_ratio_to_cublas", number, 3),
        figure("MHz", "steady_clock_mhz", number, 0),
        figure("W", "steady_watts", number, 0),
        figure("plain call us", "call_us", significant, 4),
        figure("ratio of calls", "call_ratio_to_cublas", number, 3),
        figure("host us", "host_us", significant, 3),
        replace(RATIO, header="ratio in turns"),
    )


def summary_table(frame: pd.DataFrame) -> Table:
    """Best speed of each stage."""
    rows, timed = results.records(frame), results.records(results.fastest(frame))
    lines = []
    for stage in results.names_in(rows, "stage"):
        every, mine = ([row for row in of if row["stage"] == stage] for of in (rows, timed))
        cells = [", ".join(sorted({row["status"] for row in every})), MISSING, MISSING, MISSING]
        if mine:
            top = max(mine, key=lambda row: row["gflops"])
            cells = [column.cell(top) for column in (SHAPE, SPEED, PEAK, RATIO)]
        lines.append([stage, *cells, worst_error(every)])
    headers = ["stage", "best size", "GFLOP/s", "of peak", "ratio", "error"]
    title = "Stage summary (in turns; ratio to cuBLAS, worst error in units of the bound)"
    return Table(title, headers, lines, left=["stage", "best size"])


def problem_lines(frame: pd.DataFrame) -> list[str]:
    """Return one line per row that is wrong or raised."""
    said = "{name} at {shape}: {status}, not timed. {note}"
    return [
        said.format(**row | {"name": f"{row['stage']} {row['config']}".strip(), "status": row["status"].upper()})
        for row in results.records(frame)
        if row["status"] in results.FAILURES
    ]


def changes_table(compared: pd.DataFrame, simulated: bool = False) -> Table:
    """Table of the rows of a comparison whose verdict is not ``same``; in the simulator, without those of times."""
    unchanged, what = ((SAME, SLOWER, FASTER), "verdicts") if simulated else ((SAME,), "measurements")
    changed = [row for row in results.records(compared) if row["verdict"] not in unchanged]
    times = [
        figure("GFLOP/s before", "gflops_old", speed),
        figure("GFLOP/s now", "gflops_new", speed),
        figure("time", "change", lambda change: MISSING if math.isnan(change) else f"{100 * change:+.1f} %"),
    ]
    title = f"{len(changed)} of {len(compared)} {what} changed"
    return table(title, changed, *(STAGE, SHAPE, *([] if simulated else times), text("verdict")))


def shortened(shown: Table) -> Table:
    """Return a table as it is shown on a terminal."""
    if len(shown.rows) <= MOST_LINES or STAGE.header not in shown.headers:
        return shown
    at = shown.headers.index(STAGE.header)
    lines = [line for line in shown.rows if line[at] in MOST_ASKED]
    return replace(shown, title=f"{shown.title}; other stages are in report.md", rows=lines)


def text_of(
    frame: pd.DataFrame,
    environment: Mapping[str, Any],
    compared: pd.DataFrame | None = None,
    model: Table | None = None,
    width: int = 0,
) -> str:
    """Return the report as markdown, or with a width for a terminal, where long tables are shortened."""
    simulated = bool(environment.get("simulator"))
    parts = [] if width else ["# Results", SIMULATOR_NOTICE if simulated else ""]
    for shown in tables(frame, simulated, compared, model):
        if width:
            short = shortened(shown)
            parts.append(f"{short.title}\n{short.plain(width)}")
        else:
            parts += [f"## {shown.title}", shown.markdown()]
    parts += [MODEL_NOTE if model else "", "\n".join(f"- {problem}" for problem in problem_lines(frame))]
    return "\n\n".join(filter(None, [*parts, f"{caption(environment)}, seed {environment.get('seed')}."])) + "\n"


def tables(frame: pd.DataFrame, simulated: bool, compared: pd.DataFrame | None, model: Table | None) -> Iterator[Table]:
    """Yield the tables of a report, in order."""
    plain = results.of_float32(frame)
    if simulated:
        yield verdict_table(frame)
    else:
        yield pivot(plain, "gflops", "GFLOP/s, in turns", speed)
        if plain["ratio_to_cublas"].notna().any():
            yield pivot(
                plain, "ratio_to_cublas", "Speed in multiples of cuBLAS, in turns", lambda value: number(value, 3)
            )
    if frame["steady_us"].notna().any():
        yield steady_table(frame)
    if compared is not None:
        yield changes_table(compared, simulated)
    if model is not None:
        yield model
    if not simulated:
        yield summary_table(plain)
        yield times_table(frame)
