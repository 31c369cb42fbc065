"""Speed and errors of the tensor core stages beside cuBLAS SGEMM, and the cost of NaN and infinity.

In the experiment `tensor_ladder`, all stages multiply the same decomposed operands, in one precision; the decomposition
has a row of its own. Errors are those of positive operands, for which truncation by the tensor cores is largest.
`special_values` times the public function in that precision if some elements of the operands are NaN or infinite. Both
need a GPU of compute capability 9.0, and PyTorch for cuBLAS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from numba_gemm.gemm.precision import IEEE
from numba_gemm.kernels.step import Step
from numba_gemm.kernels.tensor_core import TENSOR_STAGES, TensorStage, WarpgroupConfig
from numba_gemm.lab.bench.accuracy import quotients
from numba_gemm.lab.harness.experiment import Experiment
from numba_gemm.models.roofline import FLOAT32_BYTES, gemm_flops
from numba_gemm.runtime.device import current_device, get_device
from numba_gemm.runtime.launch import product_of
from numba_gemm.runtime.matrix import Matrix
from numba_gemm.runtime.timing import time_interleaved
from numba_gemm.runtime.workspace import Workspace

__all__ = ["DECOMPOSE", "SPECIAL_VALUES", "TENSOR_LADDER", "ladder_stages", "special_values", "tensor_ladder"]

PRECISION = "bf16x6"
SHAPE = (4096, 4096, 4096)
DECOMPOSE, CUBLAS = "decompose", "cublas"  # rows other than stages
SEED, ROUNDS = 1, 9


def ladder_stages() -> list[TensorStage]:
    """Return the stages of the ladder that multiply decomposed operands by warpgroups, in climbing order."""
    return [
        stage
        for stage in TENSOR_STAGES.values()
        if isinstance(stage, TensorStage) and isinstance(stage.configs[0], WarpgroupConfig)
    ]


def as_matrix(tensor: Any, device: int) -> Matrix:
    """Return a PyTorch tensor in the launcher's form."""
    (rows, cols), (down, across) = tensor.shape, tensor.stride()
    return Matrix(tensor.data_ptr(), rows, cols, FLOAT32_BYTES * down, FLOAT32_BYTES * across, device, tensor)


class PreparedStage:
    """A stage's multiplication, and the decomposition of its operands, in memory of its own."""

    def __init__(self, torch: Any, stage: TensorStage, precision: str, a: Matrix, b: Matrix, c: Matrix) -> None:
        device, config = get_device(c.device), stage.configs[0]
        launches = stage.launches(config, product_of(a, b, c), precision, None, device.properties.gpu)
        self._memory = torch.empty(launches.scratch_bytes // FLOAT32_BYTES, device="cuda")
        workspace = Workspace(self._memory.data_ptr(), launches.scratch_bytes, 0)
        *decompose, multiply = launches.steps
        self.registers = device.load(multiply.kernel).registers

        def call(*steps: Step) -> Callable[[int], None]:
            alone = tuple(step._replace(overlaps=False) for step in steps)
            bound = device.loaded(launches._replace(steps=alone), workspace)
            return lambda stream: bound.enqueue(1.0, a.pointer, b.pointer, 0.0, c.pointer, stream)

        self.decompose, self.multiply = call(*decompose), call(multiply)


def tensor_ladder(
    shape: tuple[int, int, int] = SHAPE, precision: str = PRECISION, rounds: int = ROUNDS
) -> pd.DataFrame:
    """Time the decomposition, every stage and cuBLAS in alternation.

    Parameters
    ----------
    shape : tuple of int
        M, N and K.
    precision : str
        Precision of the tensor cores.
    rounds : int
        Samples of each measurement.

    Returns
    -------
    DataFrame
        One row each: ``stage``, ``precision``, ``m``, ``n``, ``k``, ``error_median`` and ``error_max`` over
        ``|A| @ |B|``, ``config``, ``registers``, ``median_us``, ``ratio_to_cublas`` and ``tflops``.
    """
    import torch

    m, n, k = shape
    device, stream = current_device(), torch.cuda.Stream()
    generator = np.random.default_rng([SEED, m, n, k])
    a, b = (
        torch.from_numpy(generator.uniform(0, 1, extents).astype(np.float32)).cuda() for extents in ((m, k), (k, n))
    )
    c = torch.empty(m, n, device="cuda")
    torch.backends.cuda.matmul.allow_tf32 = False

    def cublas(_stream: int) -> None:
        with torch.cuda.stream(stream):
            torch.matmul(a, b, out=c)

    matrices = [as_matrix(tensor, device) for tensor in (a, b, c)]
    found = {stage.name: PreparedStage(torch, stage, precision, *matrices) for stage in ladder_stages()}
    calls: dict[str, Callable[[int], None]] = {CUBLAS: cublas, DECOMPOSE: next(iter(found.values())).decompose}
    calls |= {name: stage.multiply for name, stage in found.items()}
    rows: dict[str, dict[str, Any]] = {}
    for name, call in calls.items():
        c.fill_(float("nan"))
        torch.cuda.synchronize()
        if name in found:
            found[name].decompose(stream.cuda_stream)
        call(stream.cuda_stream)
        torch.cuda.synchronize()
        own = IEEE if name == CUBLAS else precision
        rows[name] = {"stage": name, "precision": own, "m": m, "n": n, "k": k}
        if name != DECOMPOSE:
            rows[name]["error_median"], rows[name]["error_max"] = quotients(torch, c, a, b)
        if name in found:
            config = TENSOR_STAGES[name].configs[0]
            rows[name] |= {"config": config.name, "registers": found[name].registers}
    samples = time_interleaved(calls, stream=stream.cuda_stream, rounds=rounds)
    for name, sample in samples.items():
        rows[name] |= {"median_us": sample.median, "ratio_to_cublas": samples[CUBLAS].median / sample.median}
        if name != DECOMPOSE:
            rows[name]["tflops"] = gemm_flops(m, n, k) / sample.median * 1e-6
    return pd.DataFrame(rows.values())


def special_values(
    shape: tuple[int, int, int] = SHAPE, precision: str = PRECISION, rounds: int = ROUNDS
) -> pd.DataFrame:
    """Time products in which rows of A have a NaN or an infinity; these rows of C are computed again.

    Parameters
    ----------
    shape : tuple of int
        M, N and K.
    precision : str
        Precision of the tensor cores.
    rounds : int
        Samples of each measurement.

    Returns
    -------
    DataFrame
        One row per value and number of rows: ``m``, ``n``, ``k``, ``precision``, ``value``, ``rows``, ``median_us``,
        and ``times_as_long`` as with finite operands.

    Raises
    ------
    RuntimeError
        if C has other elements that are NaN or infinite.
    """
    import torch

    from numba_gemm.api import tiled_sgemm

    m, n, k = shape
    b, c = torch.randn(k, n, device="cuda"), torch.empty(m, n, device="cuda")

    def call_with(a: Any, precision: str) -> Callable[[int], None]:
        def call(stream: int) -> None:
            tiled_sgemm(a, b, c, precision=precision, stream=stream)

        return call

    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, Callable[[int], None]] = {}
    none, some = [(IEEE, "none", 0), (precision, "none", 0)], (1, 16, m // 16, m)
    for own, value, count in [*none, *((precision, value, count) for value in ("nan", "inf") for count in some)]:
        a = torch.randn(m, k, device="cuda")
        if count:
            a[:: m // count, k // 2] = float(value)
        name = f"{own} {value} {count}"
        calls[name] = call_with(a, own)
        calls[name](0)
        torch.cuda.synchronize()
        found = int((torch.isinf(c) if value == "inf" else torch.isnan(c)).sum())
        if found != count * n:
            raise RuntimeError(f"{found} elements of C are {value}; expected {count} rows of {n}")
        rows[name] = {"m": m, "n": n, "k": k, "precision": own, "value": value, "rows": count}
    samples = time_interleaved(calls, stream=torch.cuda.Stream().cuda_stream, rounds=rounds)
    finite = samples[f"{precision} none 0"].median
    for name, sample in samples.items():
        rows[name] |= {"median_us": sample.median, "times_as_long": sample.median / finite}
    return pd.DataFrame(rows.values())


TENSOR_LADDER = Experiment(
    name="tensor_ladder",
    lesson="Speed and errors of the tensor core stages beside cuBLAS SGEMM.",
    run=tensor_ladder,
    needs=("gpu", "hopper", "torch"),
    unavailable="the simulator has no times, and no cuBLAS to compare with",
    seed=SEED,
    digits=5,
)
SPECIAL_VALUES = replace(
    TENSOR_LADDER,
    name="special_values",
    lesson="Slowdown of a tensor core precision when rows of A contain NaN or Inf.",
    run=special_values,
)
