"""Hardware counters of every stage, read with Nsight Compute.

``ncu`` runs a child process (`launch_each`), which launches each stage once, `thin` with only as many columns as its
tile has. A wavefront is a cycle of shared memory.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from numba_gemm.lab.bench import ncu_pages
from numba_gemm.lab.bench.cases import Shape, parse_shape
from numba_gemm.lab.bench.ncu_pages import METRICS, TOTAL, CountersError
from numba_gemm.lab.harness.experiment import Experiment, attrs

if TYPE_CHECKING:
    from numba_gemm.kernels.ladder.stage import LadderStage

COUNTERS, WAVEFRONTS = "counters.csv", "shared_wavefronts.csv"
CHILD = "numba_gemm.lab.bench.launch_each"
DEFAULT_SHAPE = Shape(4096, 4096, 4096)
TIMEOUT_S = 1800

SHOWN = (
    *("stage", "time_us", "registers", "fma_pipe_percent", "issue_slots_percent", "shared_pipe_percent"),
    "sectors_per_request",
)
SEED = 1  # of the operands, on which counters do not depend
BOUNDED_STAGE, MOST_EXCESS_PERCENT = "conflict_free", 1.0

# ncu's options for each page. The clocks stay as they are, as in every other measurement here.
COMMON = ("--clock-control", "none", "--csv")
SOURCE_PAGE = (*COMMON, "--section", "SourceCounters", "--page", "source", "--print-source", "sass")
RAW_PAGE = (*COMMON, "--page", "raw", "--metrics", ",".join(METRICS.values()))


def kernel_filter(stages: Iterable[LadderStage]) -> str:
    """Return the value of ncu's ``-k`` that selects the kernels of these stages, and none of an array library."""
    return f"regex:^({'|'.join(stage.name for stage in stages)})_[0-9]"


def profile(page: Sequence[str], stages: Sequence[LadderStage], shape: Shape) -> tuple[str, dict[str, Any]]:
    """Return ncu's output for a page about stages, and its version and command; raise `CountersError` if it fails."""
    from numba_gemm.inspect.sass import find_tool

    ncu, options = find_tool("ncu") or "ncu", [*page, "-k", kernel_filter(stages)]
    child = ["-m", CHILD, ",".join(stage.name for stage in stages), ",".join(map(str, shape))]
    line = [ncu, *options, sys.executable, *child]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CountersError(f"ncu did not run to its end: {error}") from error
    complaints = [line for line in done.stdout.splitlines() if line.startswith("==ERROR==")]
    if done.returncode != 0 or complaints:
        said = "\n".join((*complaints, *done.stderr.splitlines()[-10:])) or done.stdout[-2000:]
        raise CountersError(f"ncu failed with exit status {done.returncode}:\n{said}")
    version = re.search(r"Version\s+(\S+)", subprocess.run([ncu, "--version"], capture_output=True, text=True).stdout)
    command = shlex.join(["ncu", *options, "python", *child])
    return done.stdout, {"version": version and version[1], "commands": [command]}


def chosen_stages(names: Sequence[str] = ()) -> list[LadderStage]:
    """Return the stages of these names, by default all, that the current GPU can run; print the others."""
    from numba_gemm.kernels.ladder import STAGES
    from numba_gemm.runtime.device import current_device, device_properties

    if unknown := [name for name in names if name not in STAGES]:
        raise CountersError(f"unknown stage {', '.join(unknown)}; known are {', '.join(STAGES)}")
    stages = [STAGES[name] for name in dict.fromkeys(names or STAGES)]
    cc = device_properties(current_device()).cc
    for stage in stages:
        if cc < stage.min_cc:
            print(f"{stage.name} needs compute capability {stage.min_cc[0]}.{stage.min_cc[1]}: left out")
    kept = [stage for stage in stages if cc >= stage.min_cc]
    if not kept:
        raise CountersError("this GPU can run none of the stages")
    return kept


def measured(
    page: Sequence[str], read: Callable[..., pd.DataFrame], shape: Shape, names: Sequence[str]
) -> pd.DataFrame:
    """Return a page of ncu's report about stages as a table, with ncu's version and command in ``attrs``.

    Output that cannot be parsed is kept in a temporary file.
    """
    stages = chosen_stages(names)
    text, how = profile(page, stages, shape)
    try:
        frame = read(text, stages, shape)
    except (CountersError, ValueError) as error:  # errors of pandas are ValueErrors
        with tempfile.NamedTemporaryFile("w", suffix=".ncu.txt", delete=False, encoding="utf-8") as file:
            file.write(text)
        raise CountersError(f"{error}; ncu's output is in {file.name}") from error
    frame.attrs["ncu"] = how
    return frame


def counters(shape: Shape = DEFAULT_SHAPE, stages: Sequence[str] = ()) -> pd.DataFrame:
    """Count what each stage's default configuration does: columns of `ncu_pages.METRICS`.

    Parameters
    ----------
    shape: M, N and K.
    stages: Stages to profile; all by default.
    """
    return measured(RAW_PAGE, ncu_pages.counters, shape, stages)


def shared_wavefronts(shape: Shape = DEFAULT_SHAPE, stages: Sequence[str] = ()) -> pd.DataFrame:
    """Count wavefronts of shared memory, one row per stage and kind of access, and one with ``op`` "total".

    Parameters
    ----------
    shape: M, N and K.
    stages: Stages to profile; all by default.
    """
    return measured(SOURCE_PAGE, ncu_pages.shared_wavefronts, shape, stages)


def claims(wavefronts: pd.DataFrame) -> dict[str, bool]:
    """Check that `conflict_free` has no bank conflicts, if it was measured."""
    totals = wavefronts[(wavefronts["op"] == TOTAL) & (wavefronts["stage"] == BOUNDED_STAGE)]
    sentence = f"{BOUNDED_STAGE} has at most {MOST_EXCESS_PERCENT:g} % excess shared wavefronts"
    # False for NaN.
    return {sentence: bool((totals["excess_percent"] <= MOST_EXCESS_PERCENT).all())} if len(totals) else {}


EXPERIMENT = Experiment(
    name="counters",
    lesson="Hardware counters of every stage: time, pipes, instructions, occupancy, traffic.",
    run=counters,
    needs=("gpu", "ncu"),
    unavailable="the simulator has no hardware counters: unset NUMBA_ENABLE_CUDASIM, on a GPU",
    parse={"shape": parse_shape},
    summary=lambda frame: frame[list(SHOWN)],
    facts=attrs,
    seed=SEED,
    cache="cold",
)
SHARED_WAVEFRONTS = replace(
    EXPERIMENT,
    name="shared_wavefronts",
    lesson="Wavefronts of shared memory of every stage, measured and as the access width requires.",
    run=shared_wavefronts,
    claims=claims,
    summary=lambda frame: frame[frame["op"] == TOTAL],
)
