#!/usr/bin/env python3
"""Run every stage under compute-sanitizer, on a GPU: ``python tests/sanitize.py [--out sanitize.csv]``.

memcheck watches every access to global and shared memory, racecheck every pair of accesses to a shared address that no
barrier orders. One child process a tool runs every stage in every configuration over small ragged shapes, each operand
in an allocation of its own, and compares each product with float64. Exits with 1 if any tool reports anything or any
product is wrong, and with 2 if it cannot run.
"""

from __future__ import annotations

import argparse
import csv
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path

REPORT = re.compile(
    r"^========= (?!\w+ SUMMARY)(?P<text>(?:Error|Warning|Invalid|Program hit|Race|Barrier|Uninitialized|Out-of).*)",
    re.IGNORECASE,
)
SUMMARY = re.compile(r"^========= (?:ERROR|RACECHECK) SUMMARY: (?P<count>\d+)")
BEGIN, END = "@begin", "@end"
FOUND = 86  # compute-sanitizer's exit status when it has reported something


@dataclass
class Row:
    """What one tool says of one case."""

    tool: str
    stage: str
    config: str
    variant: str
    m: int
    n: int
    k: int
    reports: int
    in_bounds: float
    first_report: str

    @property
    def clean(self) -> bool:
        """Whether nothing was reported and the product is right; a NaN is not."""
        return self.reports == 0 and self.in_bounds <= 1.0


def shapes(config) -> Iterator[tuple[bool, int, int, int]]:
    """(aligned, m, n, k): two block tiles a side and three along k, the last of each cut short."""
    m, n, k = config.BM, config.BN, max(config.BK, 8)
    yield True, m + 12, n + 20, 2 * k + 4
    yield False, m + 13, n + 19, 2 * k + 3
    yield False, 1, 3, 1


def child() -> None:
    """Run every case, and print where each begins and ends among the tool's reports; runs under compute-sanitizer."""
    import numpy as np
    from numba import cuda

    from numba_gemm.ladder import STAGES
    from numba_gemm.launch import Matrix, device_properties, launch, synchronize
    from numba_gemm.models.accuracy import compare, reference

    def matrix(array) -> Matrix:
        address = array.__cuda_array_interface__["data"][0]
        return Matrix(address, *array.shape, *array.strides, device=0, owner=array)

    rng = np.random.default_rng(0)
    alpha, beta = 1.5, -0.5
    for stage in STAGES.values():
        if device_properties(0).cc < stage.min_cc:
            continue
        for config in stage.configs:
            for aligned, m, n, k in shapes(config):
                a, b, c = (rng.standard_normal(shape, dtype=np.float32) for shape in ((m, k), (k, n), (m, n)))
                on_device = [cuda.to_device(array) for array in (a, b, c)]
                operands = [matrix(array) for array in on_device]
                if aligned and not all(operand.aligned for operand in operands):
                    raise RuntimeError(f"{stage.name} {config.name}: the operands of {m}x{n}x{k} are not aligned")
                variant = "aligned" if aligned else "unaligned"
                print(BEGIN, stage.name, config.name, variant, m, n, k, flush=True)
                launch(stage, config, alpha, operands[0], operands[1], beta, operands[2])
                synchronize()
                result = on_device[2].copy_to_host()
                verdict = compare(result, *reference(alpha, a, b, beta, c), k)
                print(END, verdict.in_bounds, flush=True)


def parse(tool: str, output: str) -> tuple[list[Row], int]:
    """Rows of a child's output, and the reports that fell outside of every case."""
    rows: list[Row] = []
    open_row: Row | None = None
    stray = 0
    for line in output.splitlines():
        if line.startswith(BEGIN):
            stage, config, variant, *shape = line.split()[1:]
            open_row = Row(tool, stage, config, variant, *map(int, shape), 0, float("nan"), "")
            rows.append(open_row)
        elif line.startswith(END) and open_row is not None:
            open_row.in_bounds = float(line.split()[1])
            open_row = None
        elif report := REPORT.match(line):
            if open_row is None:
                stray += 1
            else:
                open_row.reports += 1
                open_row.first_report = open_row.first_report or report["text"]
    return rows, stray


def check(tool: str, sanitizer: str, log: Path | None) -> tuple[list[Row], bool]:
    """Run one tool over every case; the rows, and whether tool and rows agree that all is clean."""
    command = [sanitizer, "--tool", tool, f"--error-exitcode={FOUND}", "--print-limit=1000"]
    if tool == "memcheck":
        # Padding between allocations, lest past the end of one be inside of the next. Errors of the driver's functions
        # raise in Python if they matter, and the libraries above it provoke some that do not.
        command += ["--padding=4096", "--report-api-errors=no"]
    command += [sys.executable, str(Path(__file__).resolve()), "--child"]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if log is not None:
        log.with_suffix(f".{tool}.log").write_text(done.stdout, encoding="utf-8")
    rows, stray = parse(tool, done.stdout)
    summary = [int(match["count"]) for match in map(SUMMARY.match, done.stdout.splitlines()) if match]
    clean = done.returncode == 0 and stray == 0 and summary == [0] and bool(rows) and all(row.clean for row in rows)
    if not clean:
        print(done.stdout[-8000:])
        print(f"{tool}: exit status {done.returncode}, {stray} reports outside of every case, summary {summary}")
    return rows, clean


def main() -> int:
    """Run the command; returns its exit status."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--tools", nargs="+", default=["memcheck", "racecheck"], help="default: memcheck racecheck")
    arguments.add_argument(
        "--out", type=Path, help="write the table to this CSV file, and the tools' own words beside it"
    )
    arguments.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.child:
        child()
        return 0

    from numba_gemm.device.probe import driver_error
    from numba_gemm.inspect.sass import find_tool

    if (reason := driver_error()) is not None:
        print(f"error: this needs a GPU, and {reason}", file=sys.stderr)
        return 2
    sanitizer = find_tool("compute-sanitizer")
    if sanitizer is None:
        print("error: compute-sanitizer was not found; it comes with the CUDA toolkit", file=sys.stderr)
        return 2

    rows: list[Row] = []
    clean = True
    for tool in options.tools:
        found, tool_clean = check(tool, sanitizer, options.out)
        rows += found
        clean &= tool_clean
    print(
        f"{'tool':10} {'stage':18} {'configuration':28} {'variant':10} {'m x n x k':16} {'reports':>7} {'in bounds':>9}"
    )
    for row in rows:
        shape = f"{row.m}x{row.n}x{row.k}"
        print(
            f"{row.tool:10} {row.stage:18} {row.config:28} {row.variant:10} {shape:16} {row.reports:7} "
            f"{row.in_bounds:9.3f}  {row.first_report}"
        )
    if options.out is not None:
        with options.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([field.name for field in fields(Row)])
            writer.writerows(astuple(row) for row in rows)
    print(f"{len(rows)} cases, {sum(not row.clean for row in rows)} not clean: {'clean' if clean else 'NOT CLEAN'}")
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
