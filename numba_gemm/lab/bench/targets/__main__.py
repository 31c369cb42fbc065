"""``python -m numba_gemm.lab.bench.targets`` compares the public function's performance with its targets.

It needs a GPU and PyTorch, through which it calls cuBLAS (TF32 off). It writes three files into ``--out``:

targets.csv
    one row per comparison. ``ratio`` is the speed of `tiled_sgemm` divided by that of the baseline, both as work per
    microsecond, so larger is better; rows without ``target`` are informative;
targets_summary.csv
    one row per target: the statistic of the rows, its value, and its limits;
targets.json
    the environment of the measurement.

Entries of `numba_gemm.autotune`'s cache on this machine are used, as in any call; NUMBA_GEMM_CACHE_DIR=off disables it.

Every result is checked before it is timed, for unwritten elements and against float64 at rows spread over all of C. A
wrong result or an exception fails the target. All contenders of a case are timed together, on the same memory.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from numba_gemm.lab.bench.results import OK
from numba_gemm.lab.bench.targets.groups import GROUPS, cases_of
from numba_gemm.lab.bench.targets.measure import measure
from numba_gemm.lab.bench.targets.rig import SEED_BITS, Rig
from numba_gemm.lab.bench.targets.sizes import FULL, TINY, Sizes
from numba_gemm.lab.bench.targets.verdicts import frame_of, summary
from numba_gemm.lab.harness import environment
from numba_gemm.lab.harness.command import (
    add_result_options,
    at_least_one,
    command,
    csv_text,
    json_text,
    make_folder,
    write_files,
)
from numba_gemm.lab.harness.environment import GRAPHS
from numba_gemm.simulator.probe import driver_error
from numba_gemm.simulator.switch import SIMULATOR

ROWS, SUMMARY, HOW = "targets.csv", "targets_summary.csv", "targets.json"
ALL_MET, NOT_MET, UNUSABLE = 0, 1, 2


def seed_option(text: str) -> int:
    """Parse the value of ``--seed``."""
    value = int(text)
    if not 0 <= value < 1 << SEED_BITS:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to {(1 << SEED_BITS) - 1}")
    return value


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m numba_gemm.lab.bench.targets",
        allow_abbrev=False,
        description="Measure the public function against its targets; needs a GPU and PyTorch.",
        epilog="Exit status: 0 when every target is met, 1 when not, 2 when nothing can be measured.",
    )
    add_result_options(made)
    made.add_argument("--only", nargs="+", choices=GROUPS, metavar="GROUP", help=f"of {', '.join(GROUPS)}")
    made.add_argument("--seed", type=seed_option, help="of shapes and operands (default: a new one, which is printed)")
    made.add_argument("--shapes", type=at_least_one, default=200, metavar="N", help="random shapes (default: 200)")
    made.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    return made


def command_line(groups: Sequence[str], shapes: int, seed: int) -> str:
    """Return the command that repeats a run."""
    only = "" if tuple(groups) == GROUPS else f" --only {' '.join(groups)}"
    return f"python -m numba_gemm.lab.bench.targets{only} --seed {seed} --shapes {shapes}"


def measured(rig: Rig, groups: Sequence[str], sizes: Sizes, shapes: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of every group as soon as they are measured, and print each case."""
    with rig.library.stream() as stream:
        rig.stream = stream
        for group in groups:
            start, rows = time.perf_counter(), []
            for case in cases_of(group, sizes, shapes, rig.seed):
                found = measure(rig, case)
                rows += found
                with contextlib.suppress(Exception):  # if the GPU has failed, the rows say so
                    rig.library.release()  # else memory from the checks is missing for the next case
                print(progress_line(found), flush=True)
            print(f"{group}: {time.perf_counter() - start:.1f} s", flush=True)
            yield rows


def progress_line(rows: Sequence[Mapping[str, Any]]) -> str:
    """Describe the result of a case in one line."""
    first = rows[0]
    said = [f"{row['ratio']:.3f} of {row['baseline']}" for row in rows if not math.isnan(row["ratio"])]
    notes = dict.fromkeys(f"{row['status']}: {row['note']}" for row in rows if row["status"] != OK)
    parts = [f"{first['us']:.5g} us", *said, *notes]
    return f"{first['group']} {first['case']}: {', '.join(parts)}"


def save(frame: pd.DataFrame, judged: pd.DataFrame, how: Mapping[str, Any], folder: Path) -> None:
    """Write the three files."""
    write_files(folder, {ROWS: csv_text(frame), SUMMARY: csv_text(judged), HOW: json_text(how)})


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = parser().parse_args(arguments)
    if SIMULATOR and not options.tiny:
        print("error: the simulator tells no speed: unset NUMBA_ENABLE_CUDASIM where there is a GPU", file=sys.stderr)
        return UNUSABLE
    if not SIMULATOR and (lacking := driver_error()) is not None:
        print(f"error: {lacking} The targets are measured on a GPU.", file=sys.stderr)
        return UNUSABLE
    seed = secrets.randbits(SEED_BITS) if options.seed is None else options.seed
    sizes = TINY if options.tiny else FULL
    groups = [group for group in GROUPS if not options.only or group in options.only]
    make_folder(options.out)
    try:
        rig = Rig(seed, sizes.elements)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return UNUSABLE
    how = environment.describe(
        simulated=SIMULATOR,
        seed=seed,
        cache="hot, but for the group vector",
        command=command_line(groups, options.shapes, seed),
        timing=None if SIMULATOR else GRAPHS,
        stated_commit=options.commit,
    )
    print(f"{environment.device_name(how)}, seed {seed}, commit {how['commit']}", flush=True)
    rows: list[dict[str, Any]] = []
    done: list[str] = []
    judged = summary(frame_of(rows), done, sizes.large)
    for group, found in zip(groups, measured(rig, groups, sizes, options.shapes)):
        rows += found
        done.append(group)
        frame = frame_of(rows)
        judged = summary(frame, done, sizes.large)
        environment.conclude(how, frame["sm_clock_mhz"], frame["throttle"])
        save(frame, judged, how, options.out)  # after every group, so that an interrupted run keeps its results
    print(judged.to_string(index=False, float_format=lambda value: f"{value:.5g}", na_rep="-"))
    print(f"results in {options.out}")
    return ALL_MET if bool(judged["met"].all()) else NOT_MET


if __name__ == "__main__":
    sys.exit(main())
