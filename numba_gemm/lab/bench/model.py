"""Predicted and measured times, side by side: the table of ``bench.py --model``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from numba_gemm.kernels.ladder import STAGES
from numba_gemm.kernels.ladder.stage import LadderStage, TileConfig
from numba_gemm.lab.bench import ceilings as measuring
from numba_gemm.lab.bench.buffers import operand_bytes
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.bench.results import fastest, of_float32, records
from numba_gemm.lab.bench.tables import SHAPE, STAGE, Table, figure, number, significant, table, text
from numba_gemm.models.prediction import Ceilings, predict
from numba_gemm.runtime.device import DeviceProperties

DEFAULT = Path("results") / "h200" / "latest" / measuring.FILE


def choose_ceilings(path: Path | None, properties: DeviceProperties) -> tuple[Ceilings, str]:
    """Return the ceilings to predict from, and a description of their source.

    The ceilings are those of `path` if one is given; else those of `DEFAULT` if they were measured on a GPU of this
    name; else the theoretical ones of this device. Errors are those of `ceilings.load` and `ceilings.ceilings_of`.
    """
    if path is not None:
        found, name = measuring.load(path)
        other = "" if name == properties.name else f", which is not this device, {properties.name}"
        return found, f"ceilings measured on {name}{other}"
    if DEFAULT.is_file():
        found, name = measuring.load(DEFAULT)
        if name == properties.name:
            return found, f"ceilings measured on {name}"
    of = "an H200" if properties.name == "simulator" else properties.name
    return measuring.ceilings_of(properties), f"theoretical ceilings of {of}"


def keeps(l2_bytes: int, shape: Shape, cold: bool) -> bool:
    """True if the operands of a call are still in the L2 cache from the previous call."""
    return not cold and operand_bytes(shape) <= l2_bytes


def model_table(
    frame: pd.DataFrame, ceilings: Ceilings, source: str, device: DeviceProperties, simulated: bool
) -> Table:
    """Table of predicted and measured microseconds, one line per stage and shape; the baselines have no prediction.

    `ceilings` and `source` are from `choose_ceilings`. In the simulator, nothing is measured.
    """
    lines = []
    for row in records(fastest(of_float32(frame))):
        if (found := stage_of(row)) is None:
            continue
        shape = Shape(int(row["m"]), int(row["n"]), int(row["k"]))
        in_l2 = keeps(device.l2_bytes, shape, row["cache"] == "cold")
        made = predict(*found, *shape, ceilings, in_l2=in_l2, sm_count=device.sm_count)
        busy = {name: 1e6 * getattr(made, name) for name in ("fp32", "dram", "l2", "shared")}
        predicted = {"bound_by": made.binding, "predicted_us": 1e6 * made.seconds}
        lines.append(row | busy | predicted | {"ratio": row["median_us"] * 1e-6 / made.seconds})
    measured = [figure("measured", "median_us", microseconds), figure("ratio", "ratio", significant)]
    return table(
        f"Model: microseconds by {source}" + ("" if simulated else "; ratio is measured over predicted"),
        lines,
        *(STAGE, SHAPE, figure("FP32", "fp32", microseconds), figure("DRAM", "dram", microseconds)),
        *(figure("L2", "l2", microseconds), figure("shared", "shared", microseconds)),
        *(text("bound_by", "bound by"), figure("predicted", "predicted_us", microseconds)),
        *([] if simulated else measured),
    )


def microseconds(value: float) -> str:
    """Format microseconds with one decimal, or with three digits below 100."""
    return number(value) if value >= 100 else significant(value)


def stage_of(row: dict[str, Any]) -> tuple[LadderStage, TileConfig] | None:
    """Return the stage and configuration of a result; None if it is not a stage of the ladder."""
    stage = STAGES.get(row["stage"])
    if stage is None:
        return None
    named = {config.name: config for config in (*stage.configs, stage.test_config)}
    return (stage, named[row["config"]]) if row["config"] in named else None
