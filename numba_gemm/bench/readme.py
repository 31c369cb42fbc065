"""``python -m numba_gemm.bench.readme`` writes README's tables from the committed results; ``--check`` only compares.

A generated block stands between ``<!-- results:begin NAME -->`` and ``<!-- results:end NAME -->``. NAME is one of

headline
    the best rung and the public function against cuBLAS, over a few sizes;
ladder
    a line a rung at 4096 x 4096 x 4096.

Neither numba nor a GPU is needed.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from numba_gemm.bench.cases import Shape
from numba_gemm.bench.environment import caption
from numba_gemm.bench.results import AUTO, CUBLAS, FAILURES, NOT_RUNGS, fastest, load, records
from numba_gemm.bench.tables import MISSING, Table, number, significant

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
RESULTS_FOLDER = ROOT / "results" / "h200" / "latest"

BLOCK = re.compile(
    r"(?P<begin><!-- results:begin (?P<name>\w+) -->\n)(?P<body>.*?)(?P<end><!-- results:end (?P=name) -->)", re.DOTALL
)

HEADLINE_SHAPES = (
    Shape(1024, 1024, 1024),
    Shape(2048, 2048, 1024),
    Shape(4096, 4096, 4096),
    Shape(8192, 8192, 8192),
    Shape(16384, 16384, 1024),
)
LADDER_SHAPE = Shape(4096, 4096, 4096)


class ReadmeError(Exception):
    """README cannot be generated; the text says what is missing."""


Rows = dict[str, dict[str, Any]]


def at(frame: pd.DataFrame, shape: Shape) -> Rows:
    """The FP32 rows of a shape with a warm cache, by stage, in climbing order; empty if no rung is among them."""
    wanted = {"precision": "ieee", "layout": "nn", "cache": "hot", "m": shape.m, "n": shape.n, "k": shape.k}
    rows = {row["stage"]: row for row in records(frame) if all(row[name] == value for name, value in wanted.items())}
    return rows if rungs(rows) else {}


def rungs(rows: Rows) -> list[str]:
    """The stages of the ladder among some rows."""
    return [stage for stage in rows if stage not in NOT_RUNGS]


def tflops(rows: Rows, stage: str) -> float:
    """TFLOP/s of a stage, NaN where it was not timed."""
    return float(rows[stage]["gflops"]) / 1000 if stage in rows else math.nan


def spelled(shape: Shape) -> str:
    """Extents as prose writes them."""
    return " x ".join(str(extent) for extent in shape)


def headline(frame: pd.DataFrame, environment: Mapping[str, Any]) -> str:
    """Best rung, public function and cuBLAS over a few sizes."""
    timed = fastest(frame)
    lines = []
    for shape in HEADLINE_SHAPES:
        rows = at(timed, shape)
        if not rows:
            continue
        best = min((rows[stage] for stage in rungs(rows)), key=lambda row: row["median_us"])
        lines.append(
            [
                spelled(shape),
                number(tflops(rows, CUBLAS)),
                number(tflops(rows, AUTO)),
                number(best["gflops"] / 1000),
                f"`{best['stage']}`",
                number(best["ratio_to_cublas"], 3),
                significant(best["error_in_bounds"], 2),
            ]
        )
    if not lines:
        raise ReadmeError(f"the results hold none of the headline's shapes: {', '.join(map(str, HEADLINE_SHAPES))}")
    headers = ["M x N x K", "cuBLAS SGEMM", "`tiled_sgemm`", "best rung", "which", "best / cuBLAS", "error / bound"]
    table = Table("", headers, lines, left=["M x N x K", "which"]).markdown()
    return f"TFLOP/s, FP32 arithmetic throughout (TF32 off):\n\n{table}\n\n{source(environment)}"


def ladder(frame: pd.DataFrame, environment: Mapping[str, Any]) -> str:
    """A line a rung, with what it gained over the rung before."""
    rows = at(fastest(frame), LADDER_SHAPE)
    if not rows:
        raise ReadmeError(f"the results hold no rung at {LADDER_SHAPE}")
    names = {AUTO: "`tiled_sgemm`, its own choice", CUBLAS: "cuBLAS SGEMM"}
    lines, before = [], math.nan
    for stage in [*rungs(rows), *(name for name in names if name in rows)]:
        row, speed = rows[stage], tflops(rows, stage)
        lines.append(
            [
                names.get(stage, f"`{stage}`"),
                number(speed),
                number(row["percent_of_peak"], 1, " %"),
                number(row["ratio_to_cublas"], 3),
                MISSING if stage in names else number(speed / before, 2, "x"),
                significant(row["error_in_bounds"], 2),
            ]
        )
        before = speed
    headers = ["rung", "TFLOP/s", "of FP32 peak", "/ cuBLAS", "gain", "error / bound"]
    table = Table("", headers, lines, left=["rung"]).markdown()
    return f"At {spelled(LADDER_SHAPE)}:\n\n{table}\n\n{source(environment)}"


def source(environment: Mapping[str, Any]) -> str:
    """Where a table comes from, for the line below it."""
    return f"Measured on {caption(environment)}."


GENERATORS: dict[str, Callable[[pd.DataFrame, Mapping[str, Any]], str]] = {"headline": headline, "ladder": ladder}


def generate(text: str, results: Path) -> str:
    """README's text with every block made anew.

    Raises
    ------
    ReadmeError
        when the results are missing or incomplete, or the text has no block, or one of an unknown name.
    """
    try:
        frame, environment = load(results)
    except (FileNotFoundError, ValueError) as error:
        raise ReadmeError(str(error)) from error
    if not environment:
        raise ReadmeError(f"{results} has no environment.json: the tables must say where they come from")
    if environment.get("simulator") or not environment.get("gpu"):
        raise ReadmeError(f"{results} was not measured on a GPU")
    if frame["status"].isin(FAILURES).any():
        raise ReadmeError(f"{results} holds rows that are wrong or failed; README shows verified results only")
    names = [match["name"] for match in BLOCK.finditer(text)]
    if not names:
        raise ReadmeError("README has no block between <!-- results:begin NAME --> and <!-- results:end NAME -->")
    if unknown := sorted(set(names) - set(GENERATORS)):
        raise ReadmeError(f"unknown block {', '.join(unknown)}: known are {', '.join(GENERATORS)}")

    def replaced(match: re.Match[str]) -> str:
        return f"{match['begin']}{GENERATORS[match['name']](frame, environment)}\n{match['end']}"

    return BLOCK.sub(replaced, text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 when README is, or now is, up to date."""
    parser = argparse.ArgumentParser(
        prog="python -m numba_gemm.bench.readme", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when README would change")
    parser.add_argument("--readme", type=Path, default=README, help="the file to write")
    parser.add_argument(
        "--results", type=Path, default=RESULTS_FOLDER, help="folder with results.csv and environment.json"
    )
    options = parser.parse_args(arguments)
    try:
        if not options.readme.is_file():
            raise ReadmeError(f"there is no {options.readme}")
        old = options.readme.read_text(encoding="utf-8")
        new = generate(old, options.results)
    except ReadmeError as error:
        print(f"cannot make README's tables: {error}", file=sys.stderr)
        return 1
    if new == old:
        return 0
    if options.check:
        print(f"{options.readme.name} differs from what {options.results} says: run {parser.prog}", file=sys.stderr)
        return 1
    options.readme.write_text(new, encoding="utf-8")
    print(f"wrote the tables of {options.readme.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
