"""Types of the public functions' parameters, for annotations in code that calls them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, SupportsFloat, SupportsIndex, TypeAlias, TypeVar

__all__ = [
    "Array",
    "ComputeCapability",
    "DType",
    "DeviceLike",
    "LadderStageName",
    "Layout",
    "PrecisionName",
    "Scalar",
    "StageChoice",
    "StageName",
    "TensorStageName",
]


class HasArrayInterface(Protocol):
    """A NumPy array, or a memory map."""

    @property
    def __array_interface__(self) -> Mapping[str, Any]:
        """Address, shape, strides and dtype."""


class HasCudaArrayInterface(Protocol):
    """An array in device memory: CuPy's, Numba's, PyTorch's, and others."""

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]:
        """Address, shape, strides, dtype and stream."""


class HasDlpack(Protocol):
    """An array that can be exchanged by DLPack."""

    def __dlpack__(self, *, stream: Any = ...) -> Any:
        """Return a capsule."""

    def __dlpack_device__(self) -> tuple[Any, Any]:
        """Return kind and number of the device."""


Array: TypeAlias = HasArrayInterface | HasCudaArrayInterface | HasDlpack
"""Array that `tiled_sgemm` and others accept. Type checkers do not see its dtype; a call checks it."""

ArrayT = TypeVar("ArrayT", bound=Array)

Scalar: TypeAlias = SupportsFloat
"""Real number, `alpha` or `beta`."""

LadderStageName: TypeAlias = Literal[
    "naive",
    "coalesced",
    "shared_tile",
    "thread_tile_1d",
    "thread_tile_2d",
    "vectorized",
    "conflict_free",
    "double_buffered",
    "warp_tiled",
    "register_prefetch",
    "moving_addresses",
    "async_copy",
    "snake_order",
    "basic_stream_k",
    "stream_k",
    "short_sums",
    "small_matrices",
    "thin",
]
"""Name of a stage of the FP32 ladder."""

TensorStageName: TypeAlias = Literal[
    "one_warp",
    "one_warpgroup",
    "bulk_copies",
    "producer_consumer",
    "wide_tiles",
    "fresh_sums",
    "persistent",
    "tf32_tma",
    "rows_in_registers",
    "warp_mma",
    "fused_decomposition",
]
"""Name of a stage on tensor cores."""

StageName: TypeAlias = Literal[LadderStageName, TensorStageName]
"""Name of a stage of either ladder."""

StageChoice: TypeAlias = Literal[StageName, "auto"]
"""Name of a stage, or "auto", as `tiled_sgemm` takes it."""

PrecisionName: TypeAlias = Literal[
    "ieee",
    "tf32",
    "tf32x3",
    "bf16",
    "bf16x3",
    "bf16x6",
    "bf16x9",
    "fp16x3",
    "fp32_auto",
    "fp32",
    "float32",
    "highest",
    "bfx9",
    "F32_F32_F32",
    "TF32_TF32_F32",
    "TF32_TF32_F32_X3",
    "BF16_BF16_F32",
    "BF16_BF16_F32_X3",
    "BF16_BF16_F32_X6",
    "BF16_BF16_F32_X9",
]
"""Name of a precision as `tiled_sgemm` takes it: this package's, or another library's name of the same."""

DType: TypeAlias = Literal["float32", "float16", "bfloat16"]
"""Data type of A or B."""

Layout: TypeAlias = Literal["NN", "NT", "TN", "TT"]
"""Layouts of A and B: "N" by rows, "T" by columns."""

ComputeCapability: TypeAlias = tuple[int, int] | float | str
"""Compute capability: (9, 0), 9.0, 90, "9.0" or "sm_90"."""


class HasIndex(Protocol):
    """A device of PyTorch."""

    @property
    def index(self) -> int | None:
        """Ordinal."""


class HasId(Protocol):
    """A device of CuPy or Numba."""

    @property
    def id(self) -> int:
        """Ordinal."""


class HasDeviceId(Protocol):
    """A device of cuda.core."""

    @property
    def device_id(self) -> int:
        """Ordinal."""


DeviceLike: TypeAlias = SupportsIndex | str | HasIndex | HasId | HasDeviceId
"""GPU: 0, "cuda:0" or a device object; "cuda" is the current one."""
