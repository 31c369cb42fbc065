"""Hardware counters of every stage, read with Nsight Compute.

``ncu`` runs a child process (`launch_each`), which launches each stage once, `thin` with only as many columns as its
tile has. A wavefront is a cycle of shared memory.
"""

import csv
import io
import math
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from numba_gemm.kernels.ladder import STAGES
from numba_gemm.kernels.ladder.stage import LadderStage
from numba_gemm.lab.bench.buffers import DeviceBuffers, choose_library
from numba_gemm.lab.bench.cases import DEFAULT_SHAPE, Shape
from numba_gemm.lab.harness.experiment import Experiment, Unavailable
from numba_gemm.runtime.device import current_device, device_properties, synchronize
from numba_gemm.runtime.launch import launch

TOTAL = "total"  # value of the column `op` in the row with a stage's total

SHARED_OPS = ("LDS", "STS", "LDGSTS", "LDSM", "STSM", "ATOMS")  # instructions that access shared memory

NARROW_STAGE = "thin"

# Columns of counters.csv and their metrics. `ncu` chooses the units of times and bytes itself.
METRICS = {
    "time_us": "gpu__time_duration.sum",
    "registers": "launch__registers_per_thread",
    "fma_pipe_percent": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "issue_slots_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "instructions": "smsp__inst_executed.sum",
    "warps_active_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "l2_bytes": "lts__t_bytes.sum",
    "l1_hit_percent": "l1tex__t_sector_hit_rate.pct",
    "global_load_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "global_load_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "shared_load_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared_store_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "shared_pipe_percent": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
}
# Factors from ncu's units to the units of the columns, microseconds and bytes.
UNITS = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6}
UNITS |= {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}

KEY = ("stage", "config", "m", "n", "k")


class CountersError(Unavailable):
    """The counters cannot be read; the message gives the reason."""


def kernel_name(stage: LadderStage) -> str:
    """Return the name of the kernel of a stage's default configuration, without the suffix of its variant."""
    return re.sub(r"[^A-Za-z0-9_$]", "_", f"{stage.name}_{stage.configs[0].name}")


def shape_of(stage: LadderStage, shape: Shape) -> Shape:
    """Return the shape that a stage multiplies; for `thin`, N is limited to the columns of its tile."""
    return shape._replace(n=min(shape.n, stage.configs[0].BN)) if stage.name == NARROW_STAGE else shape


def matched(found: Sequence[tuple[str, Any]], stages: Sequence[LadderStage]) -> list[tuple[LadderStage, Any]]:
    """Pair each stage with the value found for its kernel; the kernels are in the order of the stages, one of each."""
    names, expected = [kernel for kernel, _ in found], list(map(kernel_name, stages))
    if len(names) != len(expected) or not all(map(str.startswith, names, expected)):
        raise CountersError(
            f"expected one launch of each of {', '.join(expected)}, but ncu profiled {', '.join(names) or 'nothing'}. "
            "A shape that takes several launches per product cannot be profiled"
        )
    return [(stage, value) for stage, (_, value) in zip(stages, found)]


def own_lines(text: str) -> list[str]:
    """Return the CSV lines of ncu's output, without its messages."""
    return [line for line in text.splitlines() if line.startswith('"')]


def table(lines: Iterable[str]) -> pd.DataFrame:
    """Parse lines of CSV into a DataFrame of strings."""
    return pd.read_csv(io.StringIO("\n".join(lines)), dtype=str, keep_default_na=False, index_col=False)


def numbers(texts: pd.Series) -> pd.Series:
    """Parse numbers with thousands separators; NaN for missing values."""
    return pd.to_numeric(texts.str.replace(",", ""), errors="coerce")


def key(stage: LadderStage, shape: Shape) -> dict[str, Any]:
    """Return the columns that identify a row."""
    return dict(zip(KEY, (stage.name, stage.configs[0].name, *shape_of(stage, shape))))


def read_source_page(text: str) -> list[tuple[str, pd.DataFrame]]:
    """Parse ncu's source page into the kernels and their tables of instructions."""
    kernels: list[tuple[str, list[str]]] = []
    for line in own_lines(text):
        if line.startswith('"Kernel Name"'):
            kernels.append((next(csv.reader([line]))[1], []))
        elif kernels:
            kernels[-1][1].append(line)
    return [(name, table(lines)) for name, lines in kernels if lines]


def opcode(source: str) -> tuple[str, int]:
    """Operation of an instruction and bits per thread: ``("LDS", 128)`` for ``@P0 LDS.U.128 R4, [R2]``."""
    words = source.split()
    name, *modifiers = next((word for word in words if not word.startswith("@")), "").split(".")
    widths = [re.fullmatch(r"[SU]?(8|16|32|64|128)", modifier) for modifier in modifiers]
    return name, next((int(width[1]) for width in widths if width), 32)


def read_wavefronts(text: str, stages: Sequence[LadderStage], shape: Shape) -> pd.DataFrame:
    """Wavefronts of shared memory from ncu's source page, per stage, operation and width, with one total per stage.

    ``ideal`` is the number that the access widths require, ``excessive`` the number beyond it. ``excess_percent`` is
    NaN for a stage that does not use shared memory.
    """
    rows: list[Mapping[Any, Any]] = []
    for stage, lines in matched(read_source_page(text), stages):
        taken, ideal = "L1 Wavefronts Shared", "L1 Wavefronts Shared Ideal"
        if taken not in lines.columns and not any(opcode(one)[0] in SHARED_OPS for one in lines.get("Source", ())):
            lines = lines.assign(**{taken: "0", ideal: "0"})  # ncu omits columns without values
        if missing := [column for column in ("Source", taken, ideal) if column not in lines.columns]:
            raise CountersError(f"ncu's source page has no column {', '.join(missing)}")
        found = pd.DataFrame(map(opcode, lines["Source"]), columns=["op", "bits"])
        found["wavefronts"] = numbers(lines[taken]).fillna(0).astype("int64")
        found["ideal"] = numbers(lines[ideal]).fillna(0).astype("int64")
        found = found[(found["wavefronts"] > 0) | (found["ideal"] > 0)]
        kinds = found.groupby(["op", "bits"], as_index=False).sum()
        rows += [key(stage, shape) | kind for kind in kinds.to_dict("records")]
        sums = {column: int(kinds[column].sum()) for column in ("wavefronts", "ideal")}
        rows.append(key(stage, shape) | {"op": TOTAL, "bits": None} | sums)
    frame = pd.DataFrame(rows).astype({"bits": "Int64"})
    frame["excessive"] = frame["wavefronts"] - frame["ideal"]
    frame["excess_percent"] = 100 * frame["excessive"] / frame["ideal"]  # 0 / 0 is NaN
    return frame


def read_counters(text: str, stages: Sequence[LadderStage], shape: Shape) -> pd.DataFrame:
    """Counters of ncu's raw page: one row per stage, the columns of `METRICS`; NaN for metrics that the GPU lacks."""
    if not (lines := own_lines(text)):
        raise CountersError("ncu's raw page is empty")
    page = table(lines)
    if "Kernel Name" not in page.columns:
        raise CountersError("ncu's raw page has no column Kernel Name")
    units, page = page.iloc[0], page.iloc[1:]  # the line below the header holds the units
    found = pd.DataFrame(index=page.index)
    for column, metric in METRICS.items():
        found[column] = math.nan
        if metric in page.columns:
            found[column] = numbers(page[metric])
            if column.endswith(("_us", "_bytes")):
                if units[metric] not in UNITS:
                    raise CountersError(f"ncu gives {metric} in {units[metric]!r}, a unit that is not known here")
                found[column] *= UNITS[units[metric]]
    values = list(zip(page["Kernel Name"], found.to_dict("records")))
    frame = pd.DataFrame([key(stage, shape) | row for stage, row in matched(values, stages)])
    for column in METRICS:
        if not column.endswith(("_us", "_percent")):
            frame[column] = frame[column].round().astype("Int64")
    per_request = frame["global_load_sectors"] / frame["global_load_requests"]
    frame.insert(list(frame.columns).index("global_load_sectors") + 1, "sectors_per_request", per_request)
    return frame


CHILD = "numba_gemm.lab.bench.counters"
COUNTERS, WAVEFRONTS = "counters.csv", "shared_wavefronts.csv"

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
    done = subprocess.run(line, capture_output=True, text=True, check=False, errors="replace")
    complaints = [line for line in done.stdout.splitlines() if line.startswith("==ERROR==")]
    if done.returncode != 0 or complaints:
        said = "\n".join((*complaints, *done.stderr.splitlines()[-10:])) or done.stdout[-2000:]
        raise CountersError(f"ncu failed with exit status {done.returncode}:\n{said}")
    version = re.search(r"Version\s+(\S+)", subprocess.run([ncu, "--version"], capture_output=True, text=True).stdout)
    command = shlex.join(["ncu", *options, "python", *child])
    return done.stdout, {"version": version and version[1], "commands": [command]}


def chosen_stages(names: Sequence[str] = ()) -> list[LadderStage]:
    """Return the stages of these names, by default all, that the current GPU can run; print the others."""
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
    """Count what each stage's default configuration does: columns of `METRICS`."""
    return measured(RAW_PAGE, read_counters, shape, stages)


def shared_wavefronts(shape: Shape = DEFAULT_SHAPE, stages: Sequence[str] = ()) -> pd.DataFrame:
    """Count wavefronts of shared memory, one row per stage and kind of access, and one with ``op`` "total"."""
    return measured(SOURCE_PAGE, read_wavefronts, shape, stages)


def claims(wavefronts: pd.DataFrame) -> dict[str, Any]:
    """Check that `conflict_free` has no bank conflicts, if it was measured."""
    totals = wavefronts[(wavefronts["op"] == TOTAL) & (wavefronts["stage"] == BOUNDED_STAGE)]
    sentence = f"{BOUNDED_STAGE} has at most {MOST_EXCESS_PERCENT:g} % excess shared wavefronts"
    return {sentence: totals["excess_percent"] <= MOST_EXCESS_PERCENT}  # not for NaN


def launch_each(stages: Iterable[LadderStage], shape: Shape) -> None:
    """Launch every stage once, in the process that ncu observes."""
    library = choose_library(simulated=False)
    made: dict[Shape, DeviceBuffers] = {}
    for stage in stages:
        own = shape_of(stage, shape)
        if own not in made:
            made[own] = DeviceBuffers.random(library, own, SEED)
        a, b, c = made[own].matrices
        launch(stage, stage.configs[0], 1.0, a, b, 0.0, c)
        synchronize()


EXPERIMENT = Experiment(
    lesson="Hardware counters of every stage: time, pipes, instructions, occupancy, traffic.",
    run=counters,
    needs=("gpu", "ncu"),
    unavailable="the simulator has no hardware counters: unset NUMBA_ENABLE_CUDASIM, on a GPU",
    summary=lambda frame: frame[list(SHOWN)],
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


if __name__ == "__main__":
    launch_each(chosen_stages(sys.argv[1].split(",")), Shape.parse(sys.argv[2]))
