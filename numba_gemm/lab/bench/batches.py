"""Batches of products beside cuBLAS SGEMM: square matrices that move 100 MB at most, and random ones.

Operands are contiguous, as PyTorch allocates them, or transposed matrices of such. Times are those of
`random_products`: medians of CUDA-graph replays of one contender while nothing else runs, and of plain calls. Results
are verified against float64 before they are timed. cuBLAS is called by ``torch.matmul(out=)``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from statistics import geometric_mean
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd

from numba_gemm import tiled_sgemm
from numba_gemm.arrays import ArrayKind, Operand, row_major
from numba_gemm.device.units import FLOAT32_BYTES
from numba_gemm.gemm import heuristics
from numba_gemm.gemm.fp32_auto import product_for
from numba_gemm.gemm.precision import IEEE
from numba_gemm.kernels.product import FLOAT32, LAYOUTS
from numba_gemm.lab.bench.buffers import TorchLibrary, on_stream
from numba_gemm.lab.bench.random_cases import fetch_kernels
from numba_gemm.lab.bench.random_products import LEAST, alone, experiment
from numba_gemm.lab.bench.results import CUBLAS
from numba_gemm.models import accuracy
from numba_gemm.models.roofline import gemm_flops
from numba_gemm.runtime import ahead
from numba_gemm.runtime.device import current_device, device_properties

SQUARES: Final = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
SQUARE_BYTES, MOST_MATRICES = 1e8, 1 << 16  # that the squares move, and their number
MOST_BYTES, MOST_FLOPS = 4e8, 5e10  # of random batches
TINY: Final = 1e-30  # scale of an element whose factors are zeros, as one in 16 million random numbers is
MEAN: Final = 1.05  # of cuBLAS's speed, in the geometric mean


class Batch(NamedTuple):
    """Extents of the products of a batch, and which of A and B are stored transposed."""

    matrices: int
    m: int
    n: int
    k: int
    layout: str

    @property
    def bytes(self) -> int:
        """Bytes of A, B and C."""
        return FLOAT32_BYTES * self.matrices * (self.m * self.k + self.k * self.n + self.m * self.n)


def squares() -> list[Batch]:
    """Return batches of square matrices, as many as move `SQUARE_BYTES`."""
    counts = [min(int(SQUARE_BYTES / (3 * FLOAT32_BYTES * n * n)), MOST_MATRICES) for n in SQUARES]
    return [Batch(count, n, n, n, "NN") for count, n in zip(counts, SQUARES, strict=True)]


def random_batches(count: int, high: int, seed: int) -> list[Batch]:
    """Return batches with log-uniform extents from 1 to `high`, of 2 to 20,000 matrices, in all layouts."""
    rng, found = np.random.default_rng(seed), list[Batch]()
    while len(found) < count:
        matrices = int(np.exp(rng.uniform(math.log(2), math.log(20_001))))
        m, n, k = np.exp(rng.uniform(0.0, math.log(high + 1), 3)).astype(int).tolist()
        one = Batch(matrices, m, n, k, LAYOUTS[rng.integers(4)])
        if one.bytes <= MOST_BYTES and matrices * gemm_flops(m, n, k) <= MOST_FLOPS:
            found.append(one)
    return found


def operand(name: str, matrices: int, rows: int, cols: int, stored: str) -> Operand:
    """Return an operand without memory, as `stack` lays one out."""
    down, across = (rows, cols) if stored == "N" else (cols, rows)
    whole, *steps = row_major((matrices, down, across), FLOAT32_BYTES)
    strides = (whole, *(steps if stored == "N" else reversed(steps)))
    return Operand(name, ArrayKind(), None, FLOAT32, (matrices, rows, cols), strides, 0)


def stack(torch: Any, generator: Any, matrices: int, rows: int, cols: int, stored: str) -> Any:
    """Draw a batch of matrices, or with "T" transposes of row-major ones."""
    down, across = (rows, cols) if stored == "N" else (cols, rows)
    values = torch.randn(matrices, down, across, device="cuda", generator=generator)
    return values if stored == "N" else values.mT


def batches(shapes: int = 150, high: int = 512, seed: int = 25) -> Iterator[dict[str, Any]]:
    """Time float32 and cuBLAS SGEMM for batches; one row per batch, the squares first.

    Parameters
    ----------
    shapes: Number of random batches.
    high: Largest extent of these.
    seed: Seed of their extents, and of operands.
    """
    import torch

    generator = torch.Generator(device="cuda").manual_seed(seed)
    cases = [*squares(), *random_batches(shapes, high, seed)]
    gpu, chosen = device_properties(current_device()), []
    for one in cases:
        count, m, n, k, layout = one
        product = product_for(operand("a", count, m, k, layout[0]), operand("b", count, k, n, layout[1]))
        chosen.append((heuristics.best(heuristics.problem(product, gpu)), product))
    fetch_kernels(chosen, gpu)
    with TorchLibrary(torch).stream() as stream:
        for i, (one, (choice, _)) in enumerate(zip(cases, chosen)):
            count, m, n, k, layout = one
            a, b = (stack(torch, generator, count, *x) for x in ((m, k, layout[0]), (k, n, layout[1])))
            c = torch.empty(count, m, n, device="cuda")
            row = {**one._asdict(), "drawn": i >= len(SQUARES), "stage": choice.stage.name}
            calls: dict[str, Callable[[], Any]] = {
                CUBLAS: functools.partial(torch.matmul, a, b, out=c),
                IEEE: functools.partial(tiled_sgemm, a, b, out=c),
            }
            expected, scale = a.double() @ b.double(), abs(a).double() @ abs(b).double()
            for name, call in calls.items():
                c.fill_(math.nan)
                on_stream(call)(stream)
                error = float((abs(c - expected) / scale.clamp(min=TINY)).nan_to_num(math.inf).max())
                if error > accuracy.bound(IEEE, k):
                    raise RuntimeError(f"{name} at {one}: an error of {error:.3g} times the sum of products")
                row[f"{name}_error"] = error
            del expected, scale
            ahead.wait_until_idle()
            for name, call in calls.items():
                row[f"{name}_us"], row[f"{name}_call_us"] = alone(stream, call)
            yield row | {"ieee_ratio": row[f"{CUBLAS}_us"] / row[f"{IEEE}_us"]}


def claims(frame: pd.DataFrame) -> dict[str, Any]:
    """Compare float32 with cuBLAS SGEMM."""
    drawn, least = frame[frame["drawn"]]["ieee_ratio"], LEAST["ieee_ratio"]
    return {
        f"float32 has at least {least} of cuBLAS's speed at every random batch": drawn >= least,
        f"float32 has {MEAN} of cuBLAS's speed in the geometric mean": geometric_mean(drawn) >= MEAN,
        "float32 is at least as fast as cuBLAS for all square matrices": frame[~frame["drawn"]]["ieee_ratio"] >= 1.0,
    }


EXPERIMENT = experiment(
    lesson="Batches of square and random matrices beside cuBLAS SGEMM, each contender alone.",
    run=batches,
    claims=claims,
)
