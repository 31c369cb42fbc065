"""Speed and errors of the tensor core stages beside cuBLAS SGEMM, and the cost of NaN and infinity.

In the experiment `tensor_ladder`, the stages multiply the same decomposed operands, in one precision; the decomposition
has a row of its own. Only `one_warp` rounds the operands itself, to a precision of its own. Errors are of positive
operands, for which truncation by the tensor cores is largest. The faster one of cuBLAS through PyTorch and CuPy counts.
`special_values` times the public function if some elements of the operands are NaN or infinite. Both need a GPU of
compute capability 9.0, and PyTorch for cuBLAS.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from numba_gemm.arrays import describe
from numba_gemm.gemm.precision import IEEE
from numba_gemm.kernels.step import Step
from numba_gemm.kernels.tensor_core import TENSOR_STAGES, DirectStage, TensorStage, WarpgroupConfig
from numba_gemm.lab.bench.buffers import NORMAL, POSITIVE, DeviceBuffers, Reference, call_on_nan, on_device
from numba_gemm.lab.bench.cases import DEFAULT_SHAPE, Shape
from numba_gemm.lab.bench.contenders import cublas
from numba_gemm.lab.bench.results import CUBLAS
from numba_gemm.lab.harness.experiment import Experiment
from numba_gemm.models.accuracy import bound
from numba_gemm.models.roofline import FLOAT32_BYTES, gemm_flops
from numba_gemm.runtime.device import get_device
from numba_gemm.runtime.launch import product_of
from numba_gemm.runtime.timing import Call, time_interleaved
from numba_gemm.runtime.workspace import Workspace, clear, total_bytes

PRECISION = "bf16x6"
DECOMPOSE = "decompose"  # a row that is no stage
SEED, ROUNDS = 1, 9
SLOWEST = 2.0  # limit of the time of a product with a NaN or an infinity in each row or column, over that without
LINES = {"A": "rows of A", "B": "columns of B"}


def ladder_stages() -> list[DirectStage | TensorStage]:
    """Return `one_warp` and the stages that multiply decomposed operands by warpgroups, in climbing order."""
    return [
        stage
        for stage in TENSOR_STAGES.values()
        if isinstance(stage, DirectStage)
        or (isinstance(stage, TensorStage) and isinstance(stage.configs[0], WarpgroupConfig) and not stage.reads_rows)
    ]


class PreparedStage:
    """A stage's multiplication, and the decomposition of its operands, if any, in memory of its own."""

    def __init__(self, stage: DirectStage | TensorStage, precision: str, buffers: DeviceBuffers) -> None:
        (a, b, c), library = buffers.matrices, buffers.library
        self._device, config = get_device(c.device), stage.configs[0]
        launches = stage.launches(config, product_of(a, b, c), precision, None, self._device.properties.gpu)
        needs = launches.scratch_bytes, launches.counters
        self._memory = library.empty(1, max(1, total_bytes(*needs) // FLOAT32_BYTES))
        self._workspace = Workspace(describe("workspace", self._memory, None).pointer, *needs)
        clear(self._workspace.words[1], launches.counters)
        self._launches, self._places = launches, (a.pointer, b.pointer, c.pointer)
        *decompose, self._multiply = launches.steps
        self.registers = self._device.load(self._multiply.kernel).registers
        self.decompose: Call = self._call(*decompose) if decompose else lambda stream: None
        self.multiply = self._call(self._multiply)

    def _call(self, *steps: Step) -> Call:
        alone = tuple(step._replace(overlaps=False) for step in steps)
        bound, (a, b, c) = self._device.loaded(self._launches._replace(steps=alone), self._workspace), self._places
        return lambda stream: bound.enqueue(1.0, a, b, 0.0, c, stream)

    def multiply_with(self, build: Callable[[Any, Any], Any]) -> Call:
        """Return the call of another kernel on the same operands; `build` makes it."""
        return self._call(self._multiply._replace(kernel=replace(self._multiply.kernel, build=build)))


def tensor_ladder(shape: Shape = DEFAULT_SHAPE, precision: str = PRECISION, rounds: int = ROUNDS) -> pd.DataFrame:
    """Time the decomposition, every stage and cuBLAS in alternation; errors are over ``|A| @ |B|``."""
    with on_device() as (library, stream):
        buffers = DeviceBuffers.random(library, shape, SEED, distribution=POSITIVE)
        reference = Reference(library, buffers.a, buffers.b)
        stages: dict[str, DirectStage | TensorStage] = {stage.name: stage for stage in ladder_stages()}
        precisions = {
            name: precision if precision in stage.precisions else stage.precisions[0] for name, stage in stages.items()
        }
        found = {name: PreparedStage(stage, precisions[name], buffers) for name, stage in stages.items()}
        theirs = {contender.label: contender for contender in cublas()}
        calls: dict[str, Call] = {name: contender.bind(buffers).call for name, contender in theirs.items()}
        calls |= {DECOMPOSE: next(found[name].decompose for name, own in precisions.items() if own == precision)}
        calls |= {name: stage.multiply for name, stage in found.items()}
        rows: dict[str, dict[str, Any]] = {}
        for name, call in calls.items():
            own = IEEE if name in theirs else precisions.get(name, precision)
            rows[name] = {"stage": name, "precision": own, **shape._asdict()}
            if name in theirs:
                rows[name] |= {"stage": CUBLAS, "via": theirs[name].via}
            if name in found:
                config = TENSOR_STAGES[name].configs[0]
                rows[name] |= {"config": config.name, "registers": found[name].registers}
                found[name].decompose(stream)
            call_on_nan(library, buffers.c, call, stream)
            if name != DECOMPOSE:
                _, rows[name]["error_median"], rows[name]["error_max"] = reference.judge(buffers.c, own)
        correct = {name: call for name, call in calls.items() if name == DECOMPOSE or is_correct(rows[name])}
        samples = time_interleaved(correct, stream=stream, rounds=rounds)
    cublas_us = {name: samples[name].median if name in samples else math.inf for name in theirs}
    fastest = min(cublas_us, key=lambda name: cublas_us[name])
    for name, sample in samples.items():
        rows[name] |= {"median_us": sample.median, "ratio_to_cublas": cublas_us[fastest] / sample.median}
        if name != DECOMPOSE:
            rows[name]["tflops"] = gemm_flops(*shape) / sample.median * 1e-6
    columns = ["stage", "precision", *Shape._fields, "error_median", "error_max", "via", "config", "registers"]
    kept = [row for name, row in rows.items() if name not in theirs or name == fastest]
    return pd.DataFrame(kept, columns=[*columns, "median_us", "ratio_to_cublas", "tflops"])


def is_correct(row: Mapping[Any, Any]) -> bool:
    """Check a result; of positive operands, those of the first stages are within the bound of FP32 alone."""
    return bool(row["error_max"] <= max(bound(IEEE, row["k"]), bound(row["precision"], row["k"])))


def special_values(
    shape: Shape = DEFAULT_SHAPE, precisions: Sequence[str] = (PRECISION, "fp16x3"), rounds: int = ROUNDS
) -> pd.DataFrame:
    """Time products in which rows of A, or columns of B, have a NaN or an infinity each, in the middle of K.

    It raises RuntimeError if other elements of C are NaN or infinite than those of these rows and columns.

    Parameters
    ----------
    shape: Extents of the product.
    precisions: Precisions.
    rounds: Turns that the products take.
    """
    import torch

    from numba_gemm.api import tiled_sgemm

    m, n, k = shape
    ordinary = torch.randn(m, k, device="cuda"), torch.randn(k, n, device="cuda")
    c = torch.empty(m, n, device="cuda")

    def call_with(a: Any, b: Any, precision: Any) -> Call:
        return lambda stream: tiled_sgemm(a, b, c, precision=precision, stream=stream)

    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, Call] = {}
    cases = [
        (operand, value, count)
        for operand, extent in (("A", m), ("B", n))
        for value in ("nan", "inf")
        for count in sorted({1, min(16, extent), max(1, extent // 16), extent})
    ]
    for own in precisions:
        for operand, value, count in [("", "none", 0), *cases]:
            a, b = ordinary
            if operand == "A":
                a = a.clone()
                a[: m // count * count : m // count, k // 2] = float(value)
            elif operand == "B":
                b = b.clone()
                b[k // 2, : n // count * count : n // count] = float(value)
            name = f"{own} {operand} {value} {count}"
            calls[name] = call_with(a, b, own)
            calls[name](0)
            torch.cuda.synchronize()
            found = int((torch.isnan(c) if value == "nan" else torch.isinf(c)).sum())
            wanted, others = count * (n if operand == "A" else m), int((~torch.isfinite(c)).sum()) - found
            if found != wanted or others:
                raise RuntimeError(
                    f"{found} elements of C are {value}, {others} otherwise not finite; expected {wanted}"
                )
            rows[name] = {"m": m, "n": n, "k": k, "precision": own, "operand": operand, "value": value, "lines": count}
    samples = time_interleaved(calls, stream=torch.cuda.Stream().cuda_stream, rounds=rounds)
    for name, sample in samples.items():
        finite = samples[f"{rows[name]['precision']}  none 0"].median
        rows[name] |= {"median_us": sample.median, "times_as_long": sample.median / finite}
    return pd.DataFrame(rows.values())


def special_claims(frame: pd.DataFrame) -> dict[str, bool]:
    """Compare the times with those of ordinary operands."""
    return {
        f"NaN and infinities in {what} take at most {SLOWEST:g} times as long": bool(
            (frame.loc[frame["operand"] == operand, "times_as_long"] <= SLOWEST).all()
        )
        for operand, what in LINES.items()
    }


def claims(frame: pd.DataFrame) -> dict[str, bool]:
    """Check all results."""
    rows = frame[frame["stage"] != DECOMPOSE].to_dict("records")
    return {"every product is correct": all(map(is_correct, rows))}


TENSOR_LADDER = Experiment(
    lesson="Speed and errors of the tensor core stages beside cuBLAS SGEMM.",
    run=tensor_ladder,
    claims=claims,
    needs=("gpu", "hopper", "torch"),
    unavailable="the simulator has no times, and no cuBLAS to compare with",
    operands=POSITIVE,
    seed=SEED,
)
SPECIAL_VALUES = replace(
    TENSOR_LADDER,
    name="special_values",
    lesson="Slowdown of tensor core precisions when rows of A, or columns of B, contain NaN or Inf.",
    run=special_values,
    operands=NORMAL,
    claims=special_claims,
)
