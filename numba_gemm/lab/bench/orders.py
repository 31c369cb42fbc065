"""Effect of FMA order within a k-step, and of loads on the read-only path.

Each stage with `LadderStage.ordered` is compiled in every order. If it loads A and B through registers, it is also
compiled with these loads on the read-only path.

Every variant is verified and then timed together with the others, and with cuBLAS if it is available. Without a GPU, or
with ``--static``, the variants are only compiled and analysed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from numba_gemm.inspect import ffma, report, sass
from numba_gemm.kernels.ladder import STAGES
from numba_gemm.kernels.ladder.stage import LadderStage, TileConfig
from numba_gemm.lab.bench.buffers import DeviceBuffers, choose_library, launcher
from numba_gemm.lab.bench.cases import Shape, parse_shape
from numba_gemm.lab.bench.contenders import Bound, Contender, cublas
from numba_gemm.lab.bench.results import CUBLAS, FAILURES
from numba_gemm.lab.bench.run import NONE, Plan, run
from numba_gemm.lab.harness.command import UsageError
from numba_gemm.lab.harness.environment import GRAPHS
from numba_gemm.lab.harness.experiment import Experiment
from numba_gemm.runtime.compiler import Cubin, assemble
from numba_gemm.runtime.device import current_device, device_properties
from numba_gemm.runtime.driver import device_scope
from numba_gemm.simulator.probe import driver_error

DEFAULT_SHAPE = Shape(4096, 4096, 4096)
DEFAULT_CC = (9, 0)
SEED, ROUNDS = 1, 15
ORDINARY, READ_ONLY = "ordinary", "read-only"

SHOWN = (
    *("stage", "config", "order", "loads_by", "registers", "in_place", "reuse_flags", "collisions"),
    *("clocks_4", "clocks_ports", "pipe_percent", "tflops", "of_default", "of_cublas"),
)


@dataclass(frozen=True)
class Variant:
    """A configuration of a stage with one order of its FMAs and one way of loading A and B."""

    stage: LadderStage
    own: TileConfig
    config: TileConfig
    loads_by: str
    cubin: Cubin


def read_only(ptx: str) -> str:
    """Return PTX with ``ld.global.nc`` for the loads of A and B, which end with the last loop.

    Later loads read C, which is written, so the read-only path must not read it. The loads stay where NVVM put them,
    so that only the path differs; ptxas may move them afterwards.
    """
    lines = ptx.split("\n")
    labels = {line.partition(":")[0].strip(): number for number, line in enumerate(lines) if line.startswith("$L")}
    branches = ((number, re.search(r"\bbra(?:\.uni)?\s+(\$L\w+)", line)) for number, line in enumerate(lines))
    end = max((number for number, branch in branches if branch and labels[branch[1]] <= number), default=0)
    changed = (line.replace("ld.global.", "ld.global.nc.") for line in lines[:end])
    return "\n".join([*changed, *lines[end:]])


def on_read_only_path(cubin: Cubin) -> Cubin:
    """Assemble a kernel again from its `read_only` PTX."""
    return assemble(read_only(cubin.ptx), cubin.cc, cubin.name)


def variants(stage: LadderStage, config: TileConfig, cc: tuple[int, int]) -> Iterator[Variant]:
    """Compile every variant of a configuration, starting with the unchanged one."""
    for ordered in ffma.orders(stage, config):
        yield Variant(stage, config, ordered, ORDINARY, report.compiled(stage, ordered, cc).cubin)
    own = report.compiled(stage, config, cc).cubin
    if read_only(own.ptx) != own.ptx:  # equal if A and B bypass the registers
        yield Variant(stage, config, config, READ_ONLY, on_read_only_path(own))


def static_row(variant: Variant) -> dict[str, Any]:
    """Analyse a variant's SASS, if nvdisasm is available to print it."""
    kernel = variant.stage.usual_kernel(variant.config)
    made = report.Compiled(variant.stage, variant.config, True, variant.cubin, kernel, variant.stage.precisions[0])
    about: dict[str, Any] = {"stage": variant.stage.name, "config": variant.own.name, "order": variant.config.order}
    about |= {"loads_by": variant.loads_by, "registers": made.registers, "spills": made.spills}
    try:
        return about | asdict(ffma.ffma_stats(made.instructions, variant.config))
    except sass.ToolMissing:
        return about


def measured(found: Sequence[Variant], shape: Shape, rounds: int) -> pd.DataFrame:
    """Check and time variants and cuBLAS: one row each, with ``status``, ``error_in_bounds``, ``us`` and ``tflops``."""
    if shape.n % 4 or shape.k % 4:
        raise UsageError(f"the kernels measured here take aligned operands: N and K multiples of 4, not {shape}")

    def contender(variant: Variant) -> Contender:
        def bind(buffers: DeviceBuffers) -> Bound:
            (a, b, c), stage, config = buffers.matrices, variant.stage, variant.config
            grid, block = (*stage.grid(config, c.rows, c.cols), 1), (*stage.block(config), 1)
            words = (1.0, *a.words, *b.words, 0.0, *c.words)
            return Bound(launcher(variant.cubin, c.device, grid, block, words, config.dynamic_shared))

        return Contender(variant.stage.name, bind, via=variant.loads_by, config=variant.config.name)

    library, contenders = choose_library(simulated=False), (*map(contender, found), *cublas())
    plan = Plan([shape], contenders, library, SEED, simulated=False, rounds=rounds, steady=NONE)
    with device_scope(current_device()):
        (timed,) = run(plan)
    rows = [static_row(variant) | {"registers": variant.cubin.registers} for variant in found]
    rows += [{"stage": CUBLAS, "config": via} for via in timed["via"][len(found) :]]
    kept = timed[["status", "error_in_bounds", "median_us", "p10_us", "p90_us", "note"]]
    kept = kept.rename(columns={"median_us": "us"}).assign(tflops=timed["gflops"] / 1000)
    return pd.DataFrame(rows).join(kept)


def compared(frame: pd.DataFrame) -> pd.DataFrame:
    """Add speeds relative to the unchanged configuration, which comes first, and to the faster cuBLAS (or NaN)."""
    own = frame.groupby(["stage", "config"])["tflops"].transform(lambda group: group.iloc[0])
    fastest = frame.loc[frame["stage"] == CUBLAS, "tflops"].max()
    return frame.assign(of_default=frame["tflops"] / own, of_cublas=frame["tflops"] / fastest)


def chosen(names: Sequence[str]) -> list[LadderStage]:
    """Return the stages of these names that have `LadderStage.ordered`; without names, all."""
    known = {stage.name: stage for stage in STAGES.values() if stage.ordered}
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"{', '.join(unknown)}: no stage that takes an order; those are {', '.join(known)}")
    return [known[name] for name in names or known]


def orders(
    shape: Shape = DEFAULT_SHAPE,
    stages: Sequence[str] = (),
    all_configs: bool = False,
    rounds: int = ROUNDS,
    static: bool = False,
) -> pd.DataFrame:
    """Compile, analyse, check and time variants of stages, one row each.

    Parameters
    ----------
    shape : Shape
        M, N and K.
    stages : sequence of str
        Stages that take an order; all by default.
    all_configs : bool
        Measure every configuration, not only the default ones.
    rounds : int
        Samples of each measurement.
    static : bool
        Only compile, for compute capability 9.0, as where there is no GPU.
    """
    static = static or driver_error() is not None
    cc = DEFAULT_CC if static else device_properties(current_device()).cc
    found = [
        variant
        for stage in chosen(stages)
        if stage.min_cc <= cc
        for config in (stage.configs if all_configs else stage.configs[:1])
        for variant in variants(stage, config, cc)
    ]
    if static:
        return compared(pd.DataFrame([static_row(variant) for variant in found]).assign(tflops=math.nan))
    return compared(measured(found, shape, rounds))


def claims(frame: pd.DataFrame) -> dict[str, bool]:
    """Check the results of all variants, unless they were only compiled."""
    return {"every product is correct": not frame["status"].isin(FAILURES).any()} if "status" in frame else {}


EXPERIMENT = Experiment(
    name="orders",
    run=orders,
    claims=claims,
    needs=(),
    unavailable="the simulator compiles nothing: unset NUMBA_ENABLE_CUDASIM",
    parse={"shape": parse_shape},
    summary=lambda frame: frame.reindex(columns=list(SHOWN)),
    seed=SEED,
    cache="hot",
    timing=GRAPHS,
)
