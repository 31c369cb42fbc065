"""Errors of each precision and of cuBLAS against K, on operand distributions that are hard to sum accurately.

It needs a GPU of compute capability 9.0, and PyTorch for cuBLAS.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from numba_gemm.api import tiled_sgemm
from numba_gemm.device.units import ceil_div
from numba_gemm.gemm.fp32_auto import AUTO_K, AUTO_PRECISION
from numba_gemm.gemm.heuristics import LESS_ACCURATE
from numba_gemm.gemm.precision import IEEE, runnable, tensor_stage
from numba_gemm.lab.bench.buffers import Reference, TorchLibrary
from numba_gemm.lab.bench.results import CUBLAS
from numba_gemm.lab.harness.experiment import Experiment, Unavailable
from numba_gemm.lab.harness.pictures import curves, panels
from numba_gemm.runtime.device import current_device, device_properties

Matrices = tuple[np.ndarray, np.ndarray]
Generator = np.random.Generator
Distribution = Callable[[Generator, int, int, int], Matrices]

KS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
EXTENT = 512  # M and N; for smaller ones cuBLAS splits the sums


def _alike(draw: Callable[[Generator, tuple[int, int]], np.ndarray]) -> Distribution:
    """Return the distribution that draws A, and then B, in the same way."""
    return lambda rng, m, n, k: (draw(rng, (m, k)), draw(rng, (k, n)))


def _ill_scaled(rng: Generator, m: int, n: int, k: int) -> Matrices:
    """Standard normal, with each row of A and column of B scaled by a factor between 10^-15 and 10^15."""
    a, b = DISTRIBUTIONS["normal"](rng, m, n, k)
    return a * 10.0 ** rng.uniform(-15, 15, (m, 1)), b * 10.0 ** rng.uniform(-15, 15, (1, n))


def _cancelling(rng: Generator, m: int, n: int, k: int) -> Matrices:
    """The second half of each sum cancels the first, except for a relative 2^-12."""
    half = ceil_div(k, 2)
    a, b = rng.uniform(0, 1, (m, half)), rng.uniform(0, 1, (half, n))
    small = 2.0**-12 * rng.standard_normal((half, n))
    return np.concatenate([a, -a], axis=1)[:, :k], np.concatenate([b, b + small])[:k]


DISTRIBUTIONS: dict[str, Distribution] = {
    "uniform": _alike(lambda rng, shape: rng.uniform(-1, 1, shape)),
    "normal": _alike(lambda rng, shape: rng.standard_normal(shape)),
    # Truncation errors have one sign and accumulate.
    "positive": _alike(lambda rng, shape: rng.uniform(0, 1, shape)),
    # Products span 60 orders of magnitude, with both signs.
    "log_uniform": _alike(lambda rng, shape: 10.0 ** rng.uniform(-15, 15, shape) * rng.choice([-1.0, 1.0], shape)),
    "ill_scaled": _ill_scaled,
    "cancelling": _cancelling,
    # Each part leaves a positive remainder; truncation errors are large, of one sign.
    "just_above_one": _alike(lambda rng, shape: 1 + 2.0**-10 + rng.uniform(0, 2.0**-12, shape)),
}


def operands(distribution: str, m: int, n: int, k: int, seed: int) -> Matrices:
    """Return float32 A of shape (m, k) and B of shape (k, n); equal arguments give equal matrices."""
    a, b = DISTRIBUTIONS[distribution](np.random.default_rng([seed, m, n, k]), m, n, k)
    return a.astype(np.float32), b.astype(np.float32)


def measured(ks: Sequence[int], extent: int, seed: int, precisions: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Yield one row per distribution, K and precision, of its own kernels; cuBLAS's FP32 is called ``cublas``."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    decomposes = tensor_stage(device_properties(current_device()).cc)
    for distribution in DISTRIBUTIONS:
        for k in ks:
            a, b = (torch.from_numpy(x).cuda() for x in operands(distribution, extent, extent, k, seed))
            reference = Reference(TorchLibrary(torch), a, b)
            for name in (CUBLAS, *precisions):
                stage = "auto" if decomposes is None or name not in LESS_ACCURATE else decomposes.name
                c = torch.matmul(a, b) if name == CUBLAS else tiled_sgemm(a, b, precision=name, stage=stage)
                _, median, worst = reference.judge(c, IEEE if name == CUBLAS else name)
                where = {"distribution": distribution, "m": extent, "n": extent, "k": k, "precision": name}
                yield where | {"median": median, "max": worst}


def accuracy(extent: int = EXTENT, seed: int = 1) -> Iterator[dict[str, Any]]:
    """Measure the errors of all precisions that the GPU can run: median and maximum over ``|A| @ |B|``."""
    precisions = runnable(device_properties(current_device()).cc)
    if set(precisions) <= {IEEE}:
        raise Unavailable("this needs a GPU of compute capability 9.0")
    yield from measured(KS, extent, seed, (IEEE, *(name for name in precisions if name != IEEE)))


def medians(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the median errors, one column per precision."""
    return frame.pivot_table(index=["distribution", "k"], columns="precision", values="median").reset_index()


def claims(frame: pd.DataFrame) -> dict[str, Any]:
    """Compare the errors of the full-range precision with cuBLAS's where it replaces float32."""
    errors = frame[frame["k"] >= AUTO_K].pivot(index=["distribution", "k"], columns="precision")
    said = f"from K = {AUTO_K} on, the {{}} error of {AUTO_PRECISION} is no larger than cuBLAS SGEMM's"
    compared = {name: errors[name][AUTO_PRECISION] <= errors[name][CUBLAS] for name in ("median", "max")}
    return {said.format(name): holds for name, holds in compared.items()}


LOOK: dict[str, Any] = {"log": "xy", "dashed": {"max": "largest"}, "ylabel": "median of error / (|A| @ |B|)"}
EXPERIMENT = Experiment(
    run=accuracy,
    claims=claims,
    plot=panels(
        *(
            curves("k", "median", "precision", f"distribution == {name!r}", **LOOK, title=name.replace("_", " "))
            for name in DISTRIBUTIONS
        ),
        columns=2,
    ),
    needs=("gpu", "torch"),
    unavailable="the simulator has no tensor cores, and no cuBLAS to compare with",
    summary=medians,
    figure=(9.0, 13.0),
)
