"""Code of a user, for a type checker only: `tests/test_typing.py` runs mypy on it.

A line whose last comment is ``# error: CODE`` must be refused with this error code; all other lines must be accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_type

import jax
import numpy as np
import torch
from numpy.typing import NDArray

import numba_gemm
import numba_gemm.jax as of_jax
import numba_gemm.torch as of_torch
from numba_gemm import (
    GpuUnavailable,
    autotune,
    explain,
    occupancy,
    plan,
    precompile,
    prepare,
    stages,
    streamed_sgemm,
    tiled_sgemm,
)
from numba_gemm.streaming import blocking_of, expected_time
from numba_gemm.typing import Array, PrecisionName, StageChoice


class DeviceArray:
    """An array of a library that is known by its protocols: their signatures are those of PyTorch."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {}

    def __dlpack__(self, *, stream: Any = -1, max_version: tuple[int, int] | None = None) -> Any:
        return None

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


class Parameter(DeviceArray):
    """A subclass, as torch.nn.Parameter is."""


class OnlyDlpack:
    def __dlpack__(self, stream: int | None = None) -> object:
        return None

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


class Gpu:
    id = 0


a: NDArray[np.float32] = np.ones((4, 4), np.float32)
b = np.ones((4, 4), np.float32)
mapped = np.memmap("c.bin", np.float32, "r", shape=(4, 4))
x, w, d = DeviceArray(), Parameter(), OnlyDlpack()
name: str = "bf16x6"
chosen: PrecisionName = "bf16x6"

# ---------------------------------------------------------------------------------------- arrays, results and scalars
assert_type(tiled_sgemm(a, a), NDArray[np.float32])
assert_type(tiled_sgemm(x, x), DeviceArray)
assert_type(tiled_sgemm(x, w), DeviceArray)
assert_type(tiled_sgemm(d, d), OnlyDlpack)
assert_type(tiled_sgemm(a, prepare(b, "bf16x6")), NDArray[np.float32])
assert_type(tiled_sgemm(prepare(x, "bf16x6", side="a"), prepare(x, "bf16x6")), DeviceArray)
prepare(b, "bf16x6", side="c")  # error: arg-type
prepare("abc", "bf16x6")  # error: type-var
tiled_sgemm(a, b, alpha=2, beta=np.float32(0.5), out=a).sum()
tiled_sgemm(a.T, mapped[:, ::-1])
tiled_sgemm(a, b, epilogue=lambda value, row, column, bias: value + bias[column], epilogue_args=(a[0],))
tiled_sgemm("abc", 3)  # error: arg-type
tiled_sgemm(3.0, 3.0)  # error: arg-type
tiled_sgemm([[1.0]], [[1.0]])  # error: arg-type
tiled_sgemm(a, b, out=[0.0])  # error: arg-type
tiled_sgemm(a, b, alpha="2")  # error: arg-type
tiled_sgemm(a, b, alpha=1j)  # error: arg-type
tiled_sgemm(a, b, transpose=True)  # error: call-arg
tiled_sgemm(a)  # error: call-arg
tiled_sgemm(a, b, epilogue="relu")  # error: arg-type
tiled_sgemm(x, x).nothing()  # error: attr-defined


def normed(left: Array, right: Array) -> Array:
    return tiled_sgemm(left, right)


# ------------------------------------------------------------------------------------ names of stages and precisions
tiled_sgemm(a, b, stage="stream_k", precision="ieee")
tiled_sgemm(a, b, stage="auto", precision="fp32_auto")
tiled_sgemm(a, b, precision=chosen)
tiled_sgemm(a, b, stage="fast")  # error: arg-type
tiled_sgemm(a, b, precision="bf16x7")  # error: arg-type
tiled_sgemm(a, b, precision=name)  # error: arg-type
for stage in stages():
    for precision in stage.precisions:
        tiled_sgemm(a, b, stage=stage.name, precision=precision)
        occupancy(stage, precision=precision)
wanted: StageChoice = "fp32"  # error: assignment
assert_type(numba_gemm.launchable("vectorized", 64, 64, 64).shared, int)
numba_gemm.launchable("persistent", 64, 64, 64)  # error: arg-type
numba_gemm.cpu_sgemm(a, b).sum()
numba_gemm.cpu_sgemm(x, x)  # error: arg-type

# ------------------------------------------------------------------------------------------- plans, choices and times
multiply = plan(4, 4, 4, batch=(2, 3), like=a, device="cuda:0", layout="NT", precision="bf16x9", workspace=x)
assert_type(multiply(a, a), NDArray[np.float32])
assert_type(multiply(x, x, x, 2.0, 0.5), DeviceArray)
assert_type(multiply(x, prepare(x, "bf16x9")), DeviceArray)
assert_type(plan(4, 4, 4, dtype=("bfloat16", "float32"))(a, a, c=a, beta=1), NDArray[np.float32])
plan(4, 4, 4, dtype="float64")  # error: arg-type
multiply("abc", 3)  # error: arg-type
plan(4.0, 4, 4)  # error: arg-type
plan(4, 4, 4, layout="NC")  # error: arg-type
plan(4, 4, 4, like=3)  # error: arg-type
plan(4, 4, 4, stage="fast")  # error: arg-type
assert_type(explain(a, b, precision="tf32").microseconds, float | None)
explain("abc", 3)  # error: arg-type
explain(a, b, stage="fast")  # error: arg-type
assert_type(autotune(a, b, seconds=1).best.microseconds, float)
autotune(a, b, precision="fp64")  # error: arg-type
precompile("auto", cc=(9, 0), shapes=[(64, 64, 64)], layouts=["NT", "NN"], precision=["ieee", "bf16x6"])
assert_type(precompile(["naive", "thin"], cc=[90, "8.0", (8, 6)])[0].origin, str)
precompile("fast")  # error: arg-type
precompile(precision=["fp64"])  # error: list-item
precompile(cc=None, shapes=[(64, 64)])  # error: list-item
assert_type(streamed_sgemm(a, mapped, beta=1).dtype, np.dtype[Any])
streamed_sgemm(x, x)  # error: arg-type
assert_type(streamed_sgemm(a, b, devices=[0, "cuda:1"]).dtype, np.dtype[Any])
assert_type(expected_time(a, b, devices=(0, 1)).devices, int)
streamed_sgemm(a, b, devices=2)  # error: arg-type
streamed_sgemm(a, b, precision="fp64")  # error: arg-type
assert_type(blocking_of(a, b, memory_limit=1 << 22, device=Gpu()).device_bytes, int)
expected_time(a, b, device=torch.device("cuda"))

# ---------------------------------------------------------------------------------------------------------- targets
for capability in ((9, 0), 9.0, 90, "9.0", "sm_90"):
    occupancy("naive", cc=capability)
assert_type(occupancy("naive", "32x32x1-1x1", device=0).blocks, int)
occupancy("naive", device=(9, 0))  # error: arg-type
occupancy("naive", cc=(9, 0, 0))  # error: arg-type
occupancy("fast")  # error: arg-type
plan(4, 4, 4, device=Gpu())
plan(4, 4, 4, device=1.0)  # error: arg-type
numba_gemm.clear_autotuned("cuda:1")

# ------------------------------------------------------------------------------------------ PyTorch, JAX, and the rest
t: torch.Tensor = torch.ones(4, 4)
of_torch.matmul(t, t, precision="bf16x6")
of_torch.linear(t, t, None, precision="tf32")
of_torch.external_matmul("tf32")
of_torch.unfuse_addmm(torch.fx.Graph())
with of_torch.override(precision="bf16x6"):
    t @ t
of_torch.matmul(t, t, precision="bf16x7")  # error: arg-type
of_torch.addmm(t, t, t, precision="fp64")  # error: arg-type
of_torch.linear(t, t, precision=name)  # error: arg-type
of_torch.override(precision="fp64")  # error: arg-type
of_torch.external_matmul("fp64")  # error: arg-type
j: jax.Array = of_jax.matmul(jax.numpy.ones((4, 4)), a, precision=jax.lax.Precision.HIGHEST)
of_jax.matmul(j, j, precision="BF16_BF16_F32_X6")
of_jax.matmul(j, j, transpose=True)  # error: call-arg
try:
    tiled_sgemm(a, b)
except GpuUnavailable as error:
    print(error)
numba_gemm.tiled_sgem(a, b)  # error: attr-defined
properties: Mapping[str, Any] = x.__cuda_array_interface__
