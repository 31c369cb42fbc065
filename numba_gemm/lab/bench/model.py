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
from numba_gemm.lab.bench.tables import Table, number, significant
from numba_gemm.models.prediction import Ceilings, predict
from numba_gemm.runtime.device import DeviceProperties

__all__ = ["DEFAULT", "choose_ceilings", "keeps", "model_table", "stage_of"]

DEFAULT = Path("results") / "h200" / "latest" / measuring.FILE
PREDICTED = ("stage", "M x N x K", "FP32", "DRAM", "L2", "shared", "bound by", "predicted")
MEASURED = ("measured", "ratio")


def choose_ceilings(path: Path | None, properties: DeviceProperties) -> tuple[Ceilings, str]:
    """Return the ceilings to predict from, and a description of their source.

    The ceilings are those of `path` if one is given; else those of `DEFAULT` if they were measured on a GPU of this
    name; else the theoretical ones of this device.

    Raises
    ------
    FileNotFoundError, ValueError
        as `numba_gemm.lab.bench.ceilings.load` and `ceilings_of` do.
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

    In the simulator, nothing is measured.

    Parameters
    ----------
    frame : DataFrame
        Results.
    ceilings, source
        From `choose_ceilings`.
    device : DeviceProperties
        The device of the measurement.
    simulated : bool
        True if the products ran on the simulator.
    """
    lines = []
    for row in records(fastest(of_float32(frame))):
        found = stage_of(row)
        if found is None:
            continue
        shape = Shape(int(row["m"]), int(row["n"]), int(row["k"]))
        in_l2 = keeps(device.l2_bytes, shape, row["cache"] == "cold")
        made = predict(*found, *shape, ceilings, in_l2=in_l2, sm_count=device.sm_count)
        busy = (made.fp32, made.dram, made.l2, made.shared)
        lines.append(
            [
                row["stage"],
                row["shape"],
                *(microseconds(1e6 * seconds) for seconds in busy),
                made.binding,
                microseconds(1e6 * made.seconds),
                *(() if simulated else measured_cells(row["median_us"], made.seconds)),
            ]
        )
    headers = PREDICTED if simulated else PREDICTED + MEASURED
    title = f"Model: microseconds by {source}" + ("" if simulated else "; ratio is measured over predicted")
    return Table(title, headers, lines, left=["stage", "M x N x K", "bound by"])


def measured_cells(microseconds_taken: float, seconds_predicted: float) -> tuple[str, str]:
    """Return the measured time, and its ratio to the predicted one."""
    return microseconds(microseconds_taken), significant(microseconds_taken * 1e-6 / seconds_predicted)


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
