"""Blocks of the page on several GPUs: products of divided matrices, and products of host memory on several GPUs."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from blocks.published import Published, code, missed, source
from numba_gemm.lab.bench.distributed import EXPERIMENT as DISTRIBUTED
from numba_gemm.lab.bench.tables import Column, figure, number, significant, table, text

H100S, H200S, FOUR_H200S = "../../h100x2", "../../h200x2", "../../h200x4"  # relative to the results of one GPU


def distributed_h100(found: Published) -> str:
    """Table of the speeds of distributed products on H100s."""
    return compared(*found.measured("distributed", folder=H100S))


def distributed_four(found: Published) -> str:
    """Tables of the speeds of distributed products on four H200s, and of what belongs to them."""
    return beside_predictions(*found.measured("distributed", folder=FOUR_H200S))


def distributed_65536(found: Published) -> str:
    """Tables of the speeds of the largest distributed products on four H200s, and of what belongs to them."""
    return beside_predictions(*found.measured("distributed_65536", folder=FOUR_H200S))


def distributed_weak(found: Published) -> str:
    """Table of distributed products on two H200s and on four that take a GPU as many operations as 16384 cubed."""
    runs = [found.measured(f"distributed_{n}", folder=FOUR_H200S) for n in (20736, 26112)]
    made = table(
        "",
        [row for rows, _ in runs for row in rows],
        figure("GPUs", "gpus", lambda value: str(int(value))),
        Column("N", lambda row: str(int(row["n"]))),
        code("precision"),
        figure("alone", "alone_tflops", number),
        figure("by copies", "tflops", number),
        figure("ratio to alone", "ratio", lambda value: number(value, 3)),
        figure("predicted", "predicted_tflops", number),
        text("alone_mhz", "MHz alone"),
        text("mhz", "MHz"),
    )
    return "\n\n".join([made.markdown(), *(source(how) for _, how in runs)])


def distributed(found: Published) -> str:
    """Tables of the speeds of distributed products on H200s, and of what belongs to them."""
    return beside_predictions(*found.measured("distributed", folder=H200S))


def beside_predictions(rows: Sequence[Mapping[str, Any]], how: Mapping[str, Any]) -> str:
    """Tables of the speeds of distributed products, and of what is predicted, with clocks and power."""
    heads = ("mhz", "MHz"), ("watts", "W")
    beside = table(
        "",
        [row for row in rows if isinstance(row["mhz"], str)],
        text("placements", "placements"),
        Column("N", lambda row: str(int(row["n"]))),
        code("precision"),
        figure("by copies", "tflops", number),
        figure("predicted", "predicted_tflops", number),
        *(
            text(f"{begin}{name}", f"{head}{of}")
            for name, head in heads
            for begin, of in (("alone_", " alone"), ("", ""))
        ),
    )
    explained = "Rates that the model predicts from the speed alone, and the clock and power of each GPU:"
    return "\n\n".join([compared(rows, how), explained, beside.markdown()])


def compared(rows: Sequence[Mapping[str, Any]], how: Mapping[str, Any]) -> str:
    """Table of the speeds of distributed products per GPU and of what they are compared with, and what is missed."""

    def ratio(over: str, under: str) -> Callable[[Mapping[str, Any]], str]:
        return lambda row: number(row[over] / row[under], 3)

    made = table(
        "",
        rows,
        text("placements", "placements"),
        Column("N", lambda row: str(int(row["n"]))),
        code("precision"),
        figure("alone", "alone_tflops", number),
        figure("by copies", "tflops", number),
        Column("ratio to alone", ratio("tflops", "alone_tflops")),
        figure("by NCCL", "broadcast_tflops", number),
        figure("`torch.mm` alone", "addmm_alone_tflops", number),
        figure("`torch.addmm` by copies", "addmm_tflops", number),
        Column("ratio to `torch.mm`", ratio("addmm_tflops", "addmm_alone_tflops")),
        figure("`A @ B` of DTensors", "dtensor_tflops", number),
        figure("error", "error", significant, 2),
    )
    claims = missed(DISTRIBUTED.claims(pd.DataFrame(rows)))
    return "\n\n".join([made.markdown(), claims, source(how)])


def streamed_devices(found: Published) -> str:
    """Table of the speed of products of host memory on one H100 and on two."""
    return on_several(*found.measured("streamed", folder=H100S))


def streamed_four(found: Published) -> str:
    """Table of the speed of products of host memory on one H200, on two and on four."""
    return on_several(*found.measured("streamed", folder=FOUR_H200S))


def on_several(rows: Sequence[Mapping[str, Any]], how: Mapping[str, Any]) -> str:
    """Table of the speed of products of host memory by the number of GPUs."""
    made = table(
        "",
        [row for row in rows if not math.isnan(row["devices"])],
        *(code("precision"), figure("GPUs", "devices", lambda value: str(int(value)))),
        *(
            figure("seconds", "seconds", lambda value: number(value, 2)),
            figure("speedup", "speedup", lambda value: number(value, 3)),
        ),
        figure("predicted seconds", "predicted_s", lambda value: number(value, 2)),
        figure("rate of copies, relative to one GPU alone", "link_share", lambda value: number(value, 2)),
    )
    size = int(rows[0]["size"])
    shape = f"{int(rows[0].get('rows', size))} x {size} x {size}"
    return f"{shape}, page-locked memory:\n\n{made.markdown()}\n\n{source(how)}"
