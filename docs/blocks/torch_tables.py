"""Blocks of the page on PyTorch: a transformer's step, its training, and what a call costs the host."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from blocks.published import Published, code, source
from numba_gemm.lab.bench.results import dictionaries
from numba_gemm.lab.bench.tables import Column, figure, number, significant, table, text
from numba_gemm.lab.bench.torch_calls import DIRECT
from numba_gemm.lab.bench.transformer import SHOWN_LOSSES, TORCH, last_losses


def torch_step(found: Published) -> str:
    """Table of the ways to make a training step of a transformer block."""
    rows, how = found.measured("transformer_step")
    made = table(
        "",
        rows,
        *(text("way", "products by"), figure("ms per step", "ms", number)),
        Column("/ torch, float32", lambda row: number(row["speed_over_torch"], 2)),
        figure("products computed here, of 12", "products", number, 0),
        figure("error of the output", "output_error", significant, 2),
        figure("of a gradient, at most", "gradient_error", significant, 2),
        figure("first step, s", "first_s", number),
    )
    size = rows[0]
    return (
        f"Forward and backward pass of one block, width {size['width']}, {size['sequence']} tokens; "
        f"errors relative to float64, in the Frobenius norm:\n\n{made.markdown()}\n\n{source(how)}"
    )


def training(found: Published) -> str:
    """Table of the losses at the end of a training."""
    rows, how = found.measured("training")
    frame = pd.DataFrame(rows)
    first = frame[frame["step"] == 0].set_index("way")["loss"]
    losses = frame.pivot_table(index="step", columns="way", values="loss")
    apart = losses.sub(losses[TORCH], axis="index").abs().max()
    made = table(
        "",
        dictionaries(last_losses(frame)),
        *(text("way", "products by"), Column("first loss", lambda row: significant(first[row["way"]], 4))),
        figure(f"mean of the last {SHOWN_LOSSES}", "loss", significant, 4),
        figure("/ torch, float32", "over_torch", number, 3),
        Column("largest difference of a step's loss", lambda row: significant(apart[row["way"]], 1)),
    )
    return f"Cross-entropy of {frame['step'].max() + 1} steps:\n\n{made.markdown()}\n\n{source(how)}"


def torch_calls(found: Published) -> str:
    """Table of the host time of calls of a small product."""
    rows, how = found.measured("torch_calls")
    us = {row["way"]: row["host_us"] for row in rows}

    def inside(row: Mapping[str, Any]) -> str:
        return number(us.get(f"{row['way']}, no_grad", math.nan))

    shown = [row for row in rows if not row["way"].endswith("no_grad")]
    made = table(
        "",
        shown,
        *(code("way", "call"), figure("us", "host_us", number), Column("us inside `no_grad`", inside)),
        Column("beyond a direct call", lambda row: number(row["host_us"] - us[DIRECT])),
    )
    extent = rows[0]["extent"]
    return f"Host time of a call, {extent} x {extent} x {extent}:\n\n{made.markdown()}\n\n{source(how)}"
