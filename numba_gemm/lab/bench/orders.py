"""Effect of FMA order within a k-step.

Each stage with `LadderStage.ordered` is compiled and analysed in every order, as ``numba-gemm inspect STAGE --ffma``
does without a GPU. Every variant is verified and then timed together with the others, and with cuBLAS if it is
available.
"""

from collections.abc import Sequence

import pandas as pd

from numba_gemm.inspect import ffma
from numba_gemm.kernels.ladder import STAGES
from numba_gemm.kernels.ladder.stage import LadderStage
from numba_gemm.kernels.ladder.tile_config import TileConfig
from numba_gemm.lab.bench.buffers import choose_library
from numba_gemm.lab.bench.cases import DEFAULT_SHAPE, Shape
from numba_gemm.lab.bench.contenders import cublas, stage_contender
from numba_gemm.lab.bench.results import CUBLAS, FAILURES
from numba_gemm.lab.bench.run import NONE, Plan, run
from numba_gemm.lab.harness.command import UsageError
from numba_gemm.lab.harness.environment import GRAPHS
from numba_gemm.lab.harness.experiment import Experiment
from numba_gemm.runtime.device import current_device, device_properties
from numba_gemm.runtime.driver import device_scope

SEED, ROUNDS = 1, 15
ORDERED = tuple(stage.name for stage in STAGES.values() if stage.ordered)

SHOWN = (
    *("stage", "config", "order", "registers", "in_place", "reuse_flags", "collisions"),
    *("clocks_4", "clocks_ports", "pipe_percent", "tflops", "of_default", "of_cublas"),
)

Variant = tuple[LadderStage, TileConfig]  # with one order of its FMAs


def measured(found: Sequence[Variant], shape: Shape, rounds: int, cc: tuple[int, int]) -> pd.DataFrame:
    """Check and time variants and cuBLAS: one row each, with ``status``, ``error_in_bounds``, ``us`` and ``tflops``."""
    if shape.n % 4 or shape.k % 4:
        raise UsageError(f"the kernels analysed here take aligned operands: N and K multiples of 4, not {shape}")
    contenders = (*(stage_contender(*variant) for variant in found), *cublas())
    library = choose_library(simulated=False)
    plan = Plan([shape], contenders, library, SEED, simulated=False, rounds=rounds, steady=NONE, cc=cc)
    with device_scope(current_device()):
        (timed,) = run(plan)
    kept = timed[["status", "error_in_bounds", "median_us", "p10_us", "p90_us", "note"]]
    return kept.rename(columns={"median_us": "us"}).assign(tflops=timed["gflops"] / 1000)


def compared(frame: pd.DataFrame) -> pd.DataFrame:
    """Add speeds relative to the unchanged configuration, which comes first, and to the faster cuBLAS (or NaN)."""
    own = frame.groupby(["stage", "config"])["tflops"].transform(lambda group: group.iloc[0])
    fastest = frame.loc[frame["stage"] == CUBLAS, "tflops"].max()
    return frame.assign(of_default=frame["tflops"] / own, of_cublas=frame["tflops"] / fastest)


def orders(shape: Shape = DEFAULT_SHAPE, stages: Sequence[str] = ORDERED, rounds: int = ROUNDS) -> pd.DataFrame:
    """Compile, analyse, check and time variants of stages, one row each.

    Parameters
    ----------
    stages: Stages, of those that take an order.
    """
    cc = device_properties(current_device()).cc
    found = [
        (stage, ordered)
        for stage in map(STAGES.__getitem__, stages)
        if stage.min_cc <= cc
        for ordered in ffma.orders(stage, stage.configs[0])
    ]
    rows = []
    for stage, ordered in found:
        rows.append(ffma.row(stage, stage.configs[0], ordered, cc))
        print(f"{len(rows)} of {len(found)} compiled: {stage.name}, {rows[-1]['config']}", flush=True)
    timed = measured(found, shape, rounds, cc)
    baseline = {"stage": CUBLAS}
    return compared(pd.DataFrame([*rows, *[baseline] * (len(timed) - len(rows))]).join(timed))


def claims(frame: pd.DataFrame) -> dict[str, bool]:
    """Check the results of all variants."""
    return {"every product is correct": not frame["status"].isin(FAILURES).any()}


EXPERIMENT = Experiment(
    run=orders,
    claims=claims,
    unavailable="the simulator compiles nothing: unset NUMBA_ENABLE_CUDASIM",
    allowed={"stages": ORDERED},
    summary=lambda frame: frame.reindex(columns=list(SHOWN)),
    seed=SEED,
    cache="hot",
    timing=GRAPHS,
)
