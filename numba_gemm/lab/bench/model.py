"""Predicted and measured times, side by side: the table of ``bench.py --model``."""

from pathlib import Path
from typing import Any

import pandas as pd

from numba_gemm.kernels.ladder import STAGES
from numba_gemm.lab.bench import ceilings as measuring
from numba_gemm.lab.bench.buffers import operand_bytes
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.bench.results import fastest, of_float32, records
from numba_gemm.lab.bench.tables import SHAPE, STAGE, Table, figure, number, significant, table, text
from numba_gemm.models.accesses import WAYS
from numba_gemm.models.prediction import Ceilings, Prediction, predict
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


def predicted(row: dict[str, Any], ceilings: Ceilings, l2_bytes: int, sm_count: int) -> Prediction | None:
    """Predict the time of a row of results; None if the model does not cover its stage and configuration.

    Operands that fit into the L2 cache stay there from call to call, unless the row is of a cold cache.
    """
    stage = STAGES.get(row["stage"])
    named = {config.name: config for config in (*stage.configs, stage.test_config)} if stage else {}
    if stage is None or row["stage"] not in WAYS or row["config"] not in named:
        return None
    shape = Shape(int(row["m"]), int(row["n"]), int(row["k"]))
    in_l2 = row["cache"] != "cold" and operand_bytes(shape) <= l2_bytes
    return predict(stage, named[row["config"]], *shape, ceilings, in_l2=in_l2, sm_count=sm_count)


def model_table(
    frame: pd.DataFrame, ceilings: Ceilings, source: str, device: DeviceProperties, simulated: bool
) -> Table:
    """Table of predicted and measured microseconds, one line per stage and shape; the baselines have no prediction.

    `ceilings` and `source` are from `choose_ceilings`. In the simulator, nothing is measured.
    """
    lines = []
    for row in records(fastest(of_float32(frame))):
        if (made := predicted(row, ceilings, device.l2_bytes, device.sm_count)) is not None:
            busy = {name: 1e6 * getattr(made, name) for name in ("fp32", "dram", "l2", "shared", "seconds")}
            lines.append(row | busy | {"bound_by": made.binding, "ratio": row["median_us"] / busy["seconds"]})
    resources = {"FP32": "fp32", "DRAM": "dram", "L2": "l2", "shared": "shared"}
    measured = [figure("measured", "median_us", microseconds), figure("ratio", "ratio", significant)]
    return table(
        f"Model: microseconds by {source}" + ("" if simulated else "; ratio is measured over predicted"),
        lines,
        *(STAGE, SHAPE, *(figure(header, name, microseconds) for header, name in resources.items())),
        *(text("bound_by", "bound by"), figure("predicted", "seconds", microseconds)),
        *([] if simulated else measured),
    )


def microseconds(value: float) -> str:
    """Format microseconds with one decimal, or with three digits below 100."""
    return number(value) if value >= 100 else significant(value)
