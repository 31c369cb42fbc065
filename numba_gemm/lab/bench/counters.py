"""``python -m numba_gemm.lab.bench.counters`` reads a GPU's hardware counters for every stage, with Nsight Compute.

It writes three files into ``--out``:

shared_wavefronts.csv
    wavefronts (cycles of shared memory) per kind of access, measured and as the access width requires;
counters.csv
    one row per stage: time, pipes, instructions, occupancy, traffic;
counters.json
    the environment of the measurement.

A child process runs this module again and launches each stage once, `thin` with only as many columns as its tile has.
``ncu`` runs the child twice, once per page of its report. The exit status is 1 if `conflict_free` wastes more
wavefronts than allowed, and 2 if nothing can be measured.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from numba_gemm.lab.bench.cases import Shape, parse_shape
from numba_gemm.lab.bench.ncu_pages import METRICS, TOTAL, CountersError, counters, shape_of, shared_wavefronts
from numba_gemm.lab.harness import environment
from numba_gemm.lab.harness.command import command, csv_text, json_text, make_folder, write_files
from numba_gemm.simulator.probe import driver_error, simulator_requested

if TYPE_CHECKING:
    from numba_gemm.kernels.ladder.stage import LadderStage

COUNTERS, WAVEFRONTS, HOW = "counters.csv", "shared_wavefronts.csv", "counters.json"

RIGHT, WRONG, UNUSABLE = 0, 1, 2
DEFAULT_SHAPE = Shape(4096, 4096, 4096)
DEFAULT_OUT = Path("results") / "local"
SEED = 1  # counters do not depend on the values of the operands
TIMEOUT_S = 1800

BOUNDED_STAGE, MOST_EXCESS_PERCENT = "conflict_free", 1.0

# ncu's options for each page. The clocks stay as they are, as in every other measurement here.
COMMON = ("--clock-control", "none", "--csv")
SOURCE_PAGE = (*COMMON, "--section", "SourceCounters", "--page", "source", "--print-source", "sass")
RAW_PAGE = (*COMMON, "--page", "raw", "--metrics", ",".join(METRICS.values()))


def kernel_filter(stages: Iterable[LadderStage]) -> str:
    """Return the value of ncu's ``-k`` that selects the kernels of these stages, and none of an array library."""
    return f"regex:^({'|'.join(stage.name for stage in stages)})_[0-9]"


def verdict(wavefronts: pd.DataFrame) -> tuple[bool, str] | None:
    """Check that `conflict_free` has no bank conflicts; return the result and a line about it, or None without it."""
    totals = wavefronts[(wavefronts["op"] == TOTAL) & (wavefronts["stage"] == BOUNDED_STAGE)]
    if totals.empty:
        return None
    excess = float(totals["excess_percent"].iloc[0])
    kept = excess <= MOST_EXCESS_PERCENT  # False for NaN
    word = "OK" if kept else "TOO MANY"
    bound = f"at most {MOST_EXCESS_PERCENT:g} % allowed"
    return kept, f"{BOUNDED_STAGE}: {excess:.2f} % excess shared wavefronts, {bound}: {word}"


def profile(ncu: str, options: Sequence[str], child: Sequence[str]) -> str:
    """Return ncu's output for a child process.

    Raises
    ------
    CountersError
        if ncu fails, for example because counters are reserved for administrators; with ncu's own message.
    """
    try:
        done = subprocess.run(
            [ncu, *options, *child], capture_output=True, text=True, timeout=TIMEOUT_S, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CountersError(f"ncu did not run to its end: {error}") from error
    complaints = [line for line in done.stdout.splitlines() if line.startswith("==ERROR==")]
    if done.returncode != 0 or complaints:
        said = "\n".join((*complaints, *done.stderr.splitlines()[-10:])) or done.stdout[-2000:]
        raise CountersError(f"ncu failed with exit status {done.returncode}:\n{said}")
    return done.stdout


def launch_each(stages: Iterable[LadderStage], shape: Shape) -> None:
    """Launch every stage once; runs under ncu."""
    from numba_gemm.lab.bench.buffers import DeviceBuffers, choose_library
    from numba_gemm.runtime.device import synchronize
    from numba_gemm.runtime.launch import launch

    library = choose_library(simulated=False)
    made: dict[Shape, DeviceBuffers] = {}
    for stage in stages:
        own = shape_of(stage, shape)
        if own not in made:
            made[own] = DeviceBuffers.random(library, own, SEED)
        a, b, c = made[own].matrices
        launch(stage, stage.configs[0], 1.0, a, b, 0.0, c)
        synchronize()


def chosen_stages(text: str | None) -> list[LadderStage]:
    """Return the stages of ``--stages``, by default all."""
    from numba_gemm.kernels.ladder import STAGES

    if text is None:
        return list(STAGES.values())
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if unknown := [name for name in names if name not in STAGES]:
        raise CountersError(f"unknown stage {', '.join(unknown)}; known are {', '.join(STAGES)}")
    if not names:
        raise CountersError("--stages names no stage")
    return [STAGES[name] for name in names]


def supported(stages: Sequence[LadderStage]) -> list[LadderStage]:
    """Return the stages that the current GPU can run, and print the others."""
    from numba_gemm.runtime.device import current_device, device_properties

    cc = device_properties(current_device()).cc
    for stage in stages:
        if cc < stage.min_cc:
            print(f"{stage.name} needs compute capability {stage.min_cc[0]}.{stage.min_cc[1]}: left out")
    kept = [stage for stage in stages if cc >= stage.min_cc]
    if not kept:
        raise CountersError("this GPU can run none of the stages")
    return kept


def ncu_path() -> str:
    """Return the path of ncu.

    Raises
    ------
    CountersError
        if ncu or a GPU is missing, or if the simulator was requested.
    """
    if simulator_requested():
        raise CountersError("the simulator has no hardware counters: unset NUMBA_ENABLE_CUDASIM, on a GPU")
    if (reason := driver_error()) is not None:
        raise CountersError(f"this needs a GPU, and {reason}")
    from numba_gemm.inspect.sass import find_tool

    if (path := find_tool("ncu")) is None:
        raise CountersError(
            "ncu was not found: install Nsight Compute, which comes with the CUDA toolkit, and put it on PATH"
        )
    return path


def measure(stages: Sequence[LadderStage], shape: Shape, out: Path, ncu: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Profile the stages and write the three files; return the wavefronts and the counters.

    Raises
    ------
    CountersError
        if ncu fails, or if its output cannot be parsed; the output is then kept in ``out``.
    """
    module = ["-m", "numba_gemm.lab.bench.counters", "--child"]
    module += ["--stages", ",".join(stage.name for stage in stages), "--shape", ",".join(map(str, shape))]
    make_folder(out)
    frames, commands = [], []
    for name, page, read in ((WAVEFRONTS, SOURCE_PAGE, shared_wavefronts), (COUNTERS, RAW_PAGE, counters)):
        options = [*page, "-k", kernel_filter(stages)]
        text = profile(ncu, options, [sys.executable, *module])
        try:
            frame = read(text, stages, shape)
        except (CountersError, ValueError) as error:  # errors of pandas are ValueErrors
            kept = out / f"{Path(name).stem}.ncu.txt"
            write_files(out, {kept.name: text})
            raise CountersError(f"{error}\nncu's output is in {kept}") from error
        frames.append(frame)
        commands.append(shlex.join(["ncu", *options, "python", *module]))
    how = environment.describe(simulated=False, seed=SEED, cache="cold", command=command_line(stages, shape))
    how["ncu"] = {"version": ncu_version(ncu), "commands": commands}
    write_files(out, {WAVEFRONTS: csv_text(frames[0]), COUNTERS: csv_text(frames[1]), HOW: json_text(how)})
    return frames[0], frames[1]


def command_line(stages: Iterable[LadderStage], shape: Shape) -> str:
    """Return the command to record, without folders of this machine."""
    names = ",".join(stage.name for stage in stages)
    return f"python -m numba_gemm.lab.bench.counters --stages {names} --shape {','.join(map(str, shape))}"


def ncu_version(ncu: str) -> str | None:
    """Return the version that ncu reports."""
    try:
        done = subprocess.run([ncu, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = re.search(r"Version\s+(\S+)", done.stdout)
    return version[1] if version else None


def summary(wavefronts: pd.DataFrame, counted: pd.DataFrame) -> str:
    """Format one line per stage for the terminal."""
    totals = wavefronts[wavefronts["op"] == TOTAL].set_index("stage")["excess_percent"]
    columns = ["stage", "time_us", "registers", "fma_pipe_percent", "issue_slots_percent", "shared_pipe_percent"]
    shown = counted[[*columns, "sectors_per_request"]].assign(excess_percent=counted["stage"].map(totals))
    return shown.to_string(index=False, float_format=lambda value: f"{value:.1f}", na_rep="-")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; imports no numba."""
    made = argparse.ArgumentParser(
        prog="python -m numba_gemm.lab.bench.counters",
        description="Read hardware counters of every stage's default configuration with Nsight Compute.",
        epilog=f"Exit status: 0, or 1 when {BOUNDED_STAGE} has bank conflicts, or 2 when nothing can be measured.",
    )
    made.add_argument("--stages", metavar="A,B,...", help="stages to profile (default: all)")
    made.add_argument("--shape", type=shape_option, default=DEFAULT_SHAPE, metavar="M,N,K", help="4096,4096,4096")
    made.add_argument("--out", type=Path, default=DEFAULT_OUT, metavar="DIR", help=f"default: {DEFAULT_OUT}")
    made.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return made


def shape_option(text: str) -> Shape:
    """Parse the value of ``--shape``, raising argparse's error."""
    try:
        return parse_shape(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = parser().parse_args(arguments)
    try:
        if options.child:
            launch_each(chosen_stages(options.stages), options.shape)
            return RIGHT
        ncu = ncu_path()
        stages = supported(chosen_stages(options.stages))
        wavefronts, counted = measure(stages, options.shape, options.out, ncu)
    except CountersError as error:
        print(f"error: {error}", file=sys.stderr)
        return UNUSABLE
    print(summary(wavefronts, counted))
    print(f"results in {options.out}")
    if (judged := verdict(wavefronts)) is None:
        return RIGHT
    kept, line = judged
    print(line)
    return RIGHT if kept else WRONG


if __name__ == "__main__":
    sys.exit(main())
