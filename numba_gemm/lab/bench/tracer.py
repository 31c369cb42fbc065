"""Counts of the tracer compared with a GPU's counters.

Requests and wavefronts of shared memory are counted per instruction (section SourceCounters), those of copies per lane,
since many copies execute with no active lane. The shape has whole k-tiles for every stage, because Nsight Compute's
count per instruction differs from the hardware's for copies in which some lanes write zeros (docs/tracing.md).
"""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from numba_gemm.kernels.ladder import STAGES
from numba_gemm.lab.bench import counters
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.harness.command import UsageError
from numba_gemm.lab.harness.experiment import Experiment

SHAPE = Shape(128, 256, 128)
TOLERANCE = 0.02
COUNTED = Path("results") / "h200" / "latest" / "tracer_counted.csv"

OPS, COPIES = {"load": "ld", "store": "st"}, "shared copies"

# Operands that stages read from shared memory element by element and the compiler reads four at a time: see the SASS.
JOINED = {"shared_tile": ("a_tile",), "thread_tile_1d": ("a_tile",), "thread_tile_2d": ("b_tile",)}
# Stages for which one block represents all: their blocks differ only in addresses if tiles divide the shape evenly.
ONE_BLOCK = ("naive", "coalesced", "shared_tile", "thread_tile_1d", "thread_tile_2d")

REQUESTS, SECTORS = (
    {f"global {name}s": f"l1tex__t_{what}_pipe_lsu_mem_global_op_{op}.sum" for name, op in OPS.items()}
    for what in ("requests", "sectors")
)
INSTRUCTIONS = {"shared loads": "LDS", "shared stores": "STS", COPIES: "LDGSTS"}
KEY = ["stage", "config", "m", "n", "k", "accesses", "quantity"]


def _row(stage: Any, accesses: str, quantity: str, value: float) -> dict[str, Any]:
    return counters.key(stage, SHAPE) | {"accesses": accesses, "quantity": quantity, "value": int(value)}


def tracer_counted() -> pd.DataFrame:
    """Count all stages with Nsight Compute: one row per stage, kind of access and quantity."""
    stages, metrics = counters.chosen_stages(), ",".join([*REQUESTS.values(), *SECTORS.values()])
    raw, how = counters.profile((*counters.COMMON, "--page", "raw", "--metrics", metrics), stages, SHAPE)
    page = counters.table(counters.own_lines(raw)).iloc[1:]
    rows = []
    for stage, found in counters.matched(list(zip(page["Kernel Name"], page.to_dict("records"))), stages):
        for quantity, names in (("requests", REQUESTS), ("sectors", SECTORS)):
            for accesses, metric in names.items():
                rows.append(_row(stage, accesses, quantity, float(found[metric].replace(",", ""))))
    source = counters.read_source_page(counters.profile(counters.SOURCE_PAGE, stages, SHAPE)[0])
    for stage, lines in counters.matched(source, stages):
        columns = {"Predicated-On Thread Instructions Executed": "lanes", "Instructions Executed": "requests"}
        columns |= {"L1 Wavefronts Shared": "wavefronts"}
        found = lines.reindex(columns=list(columns), fill_value="").apply(counters.numbers).rename(columns=columns)
        found["name"] = [counters.opcode(line)[0] for line in lines["Source"]]
        for accesses, name in INSTRUCTIONS.items():
            own = found[(found["lanes"] > 0) & (found["name"] == name)]
            quantities = ("lanes" if accesses == COPIES else "requests", "wavefronts")
            rows += [_row(stage, accesses, quantity, own[quantity].sum()) for quantity in quantities if len(own)]
    frame = pd.DataFrame(rows)
    frame.attrs["ncu"] = how
    return frame


def traced(name: str) -> list[dict[str, Any]]:
    """Return the tracer's counts of a stage."""
    from numba_gemm.inspect import trace

    stage = STAGES[name]
    shape = counters.shape_of(stage, SHAPE)
    rng = np.random.default_rng(counters.SEED)
    a, b = (rng.standard_normal(extents, np.float32) for extents in ((shape.m, shape.k), (shape.k, shape.n)))
    c = np.empty((shape.m, shape.n), np.float32)
    blocks = [(0, 0, 0)] if name in ONE_BLOCK else None
    found = trace(stage, None, None, 1.0, a, b, 0.0, c, blocks=blocks)
    times = int(np.prod(found.grid)) // len(found.blocks)
    requests = found.requests
    rows = []
    for accesses, space, ops in (
        ("global loads", "global", ("load", "copy")),
        ("global stores", "global", ("store",)),
        ("shared loads", "shared", ("load",)),
        ("shared stores", "shared", ("store",)),
        (COPIES, "shared", ("copy",)),
    ):
        own = requests[(requests["space"] == space) & requests["op"].isin(ops)]
        if own.empty:
            continue
        price = "sectors" if space == "global" else "wavefronts"
        count, cost = len(own), int(own[price].sum())
        if accesses == "shared loads" and name in JOINED:
            apart = own[~own["array"].isin(JOINED[name])]
            count, cost = found.joined(JOINED[name])
            count, cost = count + len(apart), cost + int(apart["wavefronts"].sum())
        values = {"lanes": int(own["lanes"].sum())} if accesses == COPIES else {"requests": count}
        values[price] = cost
        rows += [_row(stage, accesses, quantity, value * times) for quantity, value in values.items()]
    return rows


def compare(traces: pd.DataFrame, counts: pd.DataFrame) -> pd.DataFrame:
    """Return both numbers and their ratio; a quantity that is missing on one side counts as 0 there."""
    both = counts.merge(traces, on=KEY, how="outer", suffixes=("_counted", "_traced"), sort=False).fillna(0)
    both = both.rename(columns={"value_counted": "counted", "value_traced": "traced"})
    both[["counted", "traced"]] = both[["counted", "traced"]].astype("int64")
    both = both[(both["counted"] > 0) | (both["traced"] > 0)]
    # Stages as they were counted, then the others.
    kinds = [*counts["stage"], *STAGES, *REQUESTS, *INSTRUCTIONS, "requests", "lanes", "sectors", "wavefronts"]
    order = {name: place for place, name in enumerate(dict.fromkeys(kinds))}
    both = both.sort_values(KEY[:1] + KEY[-2:], key=lambda names: names.map(order), kind="stable", ignore_index=True)
    both["ratio"] = both["traced"] / both["counted"]
    both["within"] = (both["ratio"] - 1).abs() <= TOLERANCE
    return both


def tracer(counted: Path = COUNTED) -> pd.DataFrame:
    """Trace all stages, and compare the counts with those of a GPU.

    Parameters
    ----------
    counted: File of the experiment `tracer_counted`.
    """
    if not counted.is_file():
        raise UsageError(f"there is no {counted}: run numba-gemm lab tracer_counted on a GPU first")
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        rows = [row for found in pool.map(traced, STAGES) for row in found]
    return compare(pd.DataFrame(rows), pd.read_csv(counted))


def claims(frame: pd.DataFrame) -> dict[str, bool]:
    """Check that no pair of counts differs by more than the tolerance."""
    return {f"the tracer's {len(frame)} counts are the GPU's, to {TOLERANCE:.0%}": bool(frame["within"].all())}


COUNTING = Experiment(
    lesson="Hardware counters of every stage at the shape that the tracer can trace.",
    run=tracer_counted,
    needs=("gpu", "ncu"),
    unavailable=counters.EXPERIMENT.unavailable,
    seed=counters.SEED,
    cache="cold",
)
EXPERIMENT = Experiment(tracer, claims=claims, needs=("simulator",), seed=counters.SEED)
