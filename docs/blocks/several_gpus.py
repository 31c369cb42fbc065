"""Blocks of the page on several GPUs: products of divided matrices, and products of host memory on two GPUs."""

import math
from collections.abc import Mapping
from typing import Any

from blocks.published import Published, code, source
from numba_gemm.lab.bench.tables import Column, figure, number, significant, table, text

FOLDER = "../../h100x2"  # relative to the results of one GPU
NONE = "–"


def distributed(found: Published) -> str:
    """Table of the speeds of distributed products per GPU, and of what they are compared with."""
    rows, how = found.measured("distributed", folder=FOLDER)

    def speed(title: str, column: str) -> Column:
        return figure(title, column, lambda value: NONE if math.isnan(value) else number(value))

    def ratio(over: str, under: str) -> Any:
        def shown(row: Mapping[str, Any]) -> str:
            value = row[over] / row[under]
            return NONE if math.isnan(value) else number(value, 3)

        return shown

    made = table(
        "",
        rows,
        *(text("placements", "placements"), Column("N", lambda row: str(int(row["n"]))), code("precision")),
        *(
            speed("alone", "alone_tflops"),
            speed("by copies", "tflops"),
            Column("ratio", ratio("tflops", "alone_tflops")),
        ),
        *(speed("by NCCL", "broadcast_tflops"), speed("`torch.mm` alone", "addmm_alone_tflops")),
        *(
            speed("its panels by copies", "addmm_tflops"),
            Column("ratio", ratio("addmm_tflops", "addmm_alone_tflops")),
        ),
        speed("`A @ B` of DTensors", "dtensor_tflops"),
        figure("error", "error", lambda value: NONE if math.isnan(value) else significant(value, 2)),
    )
    return f"{made.markdown()}\n\n{source(how)}"


def streamed_devices(found: Published) -> str:
    """Table of the speed of products of host memory on one GPU and on two."""
    rows, how = found.measured("streamed", folder=FOLDER)
    made = table(
        "",
        [row for row in rows if not math.isnan(row["devices"])],
        *(code("precision"), figure("GPUs", "devices", lambda value: str(int(value)))),
        *(
            figure("seconds", "seconds", lambda value: number(value, 2)),
            figure("speedup", "speedup", lambda value: number(value, 3)),
        ),
        figure("predicted seconds", "predicted_s", lambda value: number(value, 2)),
        figure("rate of copies, of one GPU's alone", "link_share", lambda value: number(value, 2)),
    )
    shape = f"{int(rows[0]['rows'])} x {int(rows[0]['size'])} x {int(rows[0]['size'])}"
    return f"{shape}, page-locked memory:\n\n{made.markdown()}\n\n{source(how)}"
