"""Products of matrices that are divided among the GPUs of this host, compared with the same products on one GPU.

Every rank is a process (`distributed_child`). Each contender runs by itself, as plain calls, warmed up for as long as
it is measured, in three turns with the others, of which the median counts: a GPU that gets warmer slows all of them
alike. (DTensors follow at the end, to save memory.) A rate is that of the slowest rank. Beside our products: the same
calls with NCCL's broadcasts and reductions instead of copies from other GPUs' memory; torch.addmm in the same panels,
alone and on all GPUs; and PyTorch's own product of DTensors. Before it is timed, elements of each result are compared
with float64; a wrong one has no rate. ``error`` is the largest of our results. ``mhz`` and ``watts`` are the clock and
the power of each GPU in our products, and, as ``alone_mhz`` and ``alone_watts``, in those on one GPU.
``predicted_tflops`` is the model's prediction from the speed on one GPU.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from numba_gemm.lab.bench.buffers import NORMAL
from numba_gemm.lab.harness.environment import LAUNCHES
from numba_gemm.lab.harness.experiment import Experiment, last_row
from numba_gemm.models.accuracy import bound

CHILD = "numba_gemm.lab.bench.distributed_child"
ROWS, COLS = "Shard(0)", "Shard(1)"
BY_ROWS, BLOCKS = "A and B by rows", "blocks"  # blocks: of a mesh of two dimensions
PLACEMENTS = {
    BY_ROWS: (ROWS, ROWS, ROWS),
    "A and B by columns": (COLS, COLS, COLS),
    "A by rows, B by columns": (ROWS, COLS, ROWS),
    "A by columns, B by rows: sums": (COLS, ROWS, ROWS),
    BLOCKS: (BLOCKS, BLOCKS, BLOCKS),
}
"""Placements of A, B and C."""
SMALLEST_RATIO = {16384: 0.95, 32768: 0.97}  # to the same local products on one GPU, by N, of matrices by rows
AT_65536 = {(4, "ieee"): 0.96, (4, "bf16x6"): 0.94, (8, "ieee"): 0.94, (8, "bf16x6"): 0.90}  # by GPUs and precision
OTHER_RATIO = 0.9  # where sums are added, of blocks, and for other numbers
ERRORS = {"ieee": 2.0**-18, "bf16x6": 2.0**-20, "fp16x3": 2.0**-17}  # over |A| @ |B|


def distributed(
    gpus: int = 2,
    sizes: Sequence[int] = (16384, 32768),
    precisions: Sequence[str] = ("ieee", "bf16x6", "fp16x3"),
    by_rows: bool = False,
    large: Sequence[int] = (),
    seconds: float = 2.0,
) -> Iterator[dict[str, Any]]:
    """Yield a row per placement, size and precision.

    Parameters
    ----------
    gpus: Number of ranks, each of which has a GPU.
    sizes: M, N and K, multiples of `gpus`. Placements other than by rows are measured for the first one.
    by_rows: Measure no other placements.
    large: M, N and K of one more product, in the first precision, that need not fit on one GPU; none by default.
    seconds: Seconds that each contender is measured, and before that warmed up.
    """
    if odd := [n for n in sizes if n % gpus]:
        raise ValueError(f"sizes are {list(sizes)!r}; expected multiples of gpus, which is {gpus}: not {odd}")
    cases: list[list[Any]] = [[BY_ROWS, n, precision] for n in sizes for precision in precisions]
    others = [] if by_rows else list(PLACEMENTS)[1:]
    cases += [[name, sizes[0], precision] for name in others for precision in precisions[:2]]
    yield from _rows(gpus, cases, seconds)
    if large:  # by new processes, which keep no memory of other products
        yield from _rows(gpus, [[*large, precisions[0]]], seconds)


def _rows(gpus: int, cases: Sequence[Any], seconds: float) -> Iterator[dict[str, Any]]:
    """Run the ranks, and yield what the first one prints."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        meeting = str(Path(folder, "meeting"))
        logs = [Path(folder, f"rank{rank}") for rank in range(gpus)]
        ranks: list[subprocess.Popen[str]] = []
        for rank, log in enumerate(logs):
            command = [sys.executable, "-m", CHILD, json.dumps([cases, seconds, rank, gpus, meeting])]
            with log.open("w") as file:
                output = subprocess.PIPE if rank == 0 else file
                ranks.append(subprocess.Popen(command, env=variables, stdout=output, stderr=file, text=True))
        try:
            assert ranks[0].stdout is not None
            for line in ranks[0].stdout:
                if line.startswith("{"):
                    yield json.loads(line)
            for rank, (process, log) in enumerate(zip(ranks, logs)):
                if process.wait(timeout=120):
                    raise RuntimeError(f"rank {rank} failed:\n{log.read_text(encoding='utf-8')[-4000:]}")
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def largest_correct(precision: str, k: int) -> float:
    """Return the largest error of a correct result over ``|A| @ |B|``."""
    return ERRORS.get(precision, bound(precision, k))


def claims(frame: pd.DataFrame) -> dict[str, bool]:
    """Check speeds against one GPU and against PyTorch's, and errors."""
    found = {}
    for row in frame.to_dict("records"):
        name = "{placements}, {m} x {n} x {k}, {precision}".format_map(row)
        if (error := row.get("error", math.nan)) == error:
            found[f"{name}: the error is within its bound"] = error <= largest_correct(row["precision"], row["k"])
        if (ratio := row.get("ratio", math.nan)) != ratio:
            continue
        least = OTHER_RATIO
        if row["placements"] == BY_ROWS and row["n"] == 65536:
            least = AT_65536.get((row["gpus"], row["precision"]), OTHER_RATIO)
        elif row["placements"] == BY_ROWS:
            least = SMALLEST_RATIO.get(row["n"], OTHER_RATIO)
        found[f"{name}: at least {least} of the products alone"] = ratio >= least
        if row["precision"] == "ieee":
            theirs = row["addmm_tflops"] / row["addmm_alone_tflops"]
            found[f"{name}: at least torch.addmm's ratio, {theirs:.3f}"] = ratio >= theirs
    return found


EXPERIMENT = Experiment(
    run=distributed,
    claims=claims,
    needs=("gpu", "torch"),
    small={"sizes": (8,), "precisions": ("ieee",), "seconds": 0.001},
    operands=NORMAL,
    timing=LAUNCHES,
    progress=last_row,
)
