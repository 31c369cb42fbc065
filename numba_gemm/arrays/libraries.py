"""Device arrays of Numba, CuPy and PyTorch. The latter two are never imported: who has their arrays has done so."""

# ruff: noqa: D102 -- what the methods are for is said once, in ArrayKind

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from cuda.bindings import driver
from numba import cuda

from ..driver import device_scope, start
from .operand import ArrayKind, Operand, name_of
from .streams import DEFAULT, Stream


class NumbaArrays(ArrayKind):
    """Numba device arrays: they work on the stream that they are bound to, else on the default stream."""

    name = "Numba device array"
    cast = "cuda.to_device({0}.copy_to_host().astype(numpy.float32))"

    def owns(self, array: Any) -> bool:
        # A slice of a mapped or managed array keeps the class but not the device pointer: NumPy's it is.
        return bool(getattr(type(array), "__cuda_ndarray__", False)) and hasattr(array, "gpu_data")

    def describe(self, name: str, array: Any, stream: Stream | None) -> Operand:
        pointer = int(array.device_ctypes_pointer.value or 0)
        bound = Stream.of(array.stream)
        # Numba notes the device that was current when the array was made, which need not be the memory's own.
        device = pointer_device(name, pointer) if pointer else None
        return Operand(name, self, array, name_of(array.dtype), array.shape, array.strides, pointer, device, bound)

    def streams(self, operands: list[Operand], device: int) -> list[Stream]:
        bound = [operand.stream or DEFAULT for operand in operands]
        return sorted(bound, key=lambda stream: stream.is_default)  # stable: the first one that is bound leads

    def empty(self, rows: int, cols: int, device: int, stream: Stream) -> Operand:
        # Bound to its stream, so that reading it back, or handing it on, waits for the product.
        bound: Any = 0
        if not stream.is_default:
            bound = cuda.external_stream(stream.handle)
            bound.owner = stream.owner  # the stream must outlive the binding
        with cuda.gpus[device]:
            return self.describe("out", cuda.device_array((rows, cols), np.float32, stream=bound), stream)


def cupy_stream(cupy: Any, handle: int, device: int = -1) -> Any:
    """CuPy's view of a stream that it did not make; CuPy 14 deprecates the class that older ones have for it."""
    if adopt := getattr(cupy.cuda.Stream, "from_external", None):
        return adopt(_Handle(handle))
    return cupy.cuda.ExternalStream(handle, device)


class _Handle:
    """A stream's handle behind the CUDA stream protocol."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


class CupyArrays(ArrayKind):
    """CuPy arrays, on the stream that is current in CuPy."""

    name = "CuPy array"
    cast = "{0}.astype(cupy.float32)"

    def owns(self, array: Any) -> bool:
        return isinstance(array, _imported("cupy", "ndarray"))

    def describe(self, name: str, array: Any, stream: Stream | None) -> Operand:
        device = int(array.device.id)
        dtype, pointer = name_of(array.dtype), int(array.data.ptr)
        return Operand(name, self, array, dtype, array.shape, array.strides, pointer, device)

    def streams(self, operands: list[Operand], device: int) -> list[Stream]:
        return [Stream.of(sys.modules["cupy"].cuda.get_current_stream(device))]

    def empty(self, rows: int, cols: int, device: int, stream: Stream) -> Operand:
        cupy: Any = sys.modules["cupy"]
        # CuPy's pool reuses memory in the order of the stream that it was allocated under.
        with cupy.cuda.Device(device), cupy_stream(cupy, stream.handle, device):
            return self.describe("out", cupy.empty((rows, cols), cupy.float32), stream)


class TorchTensors(ArrayKind):
    """PyTorch CUDA tensors, on the stream that is current in PyTorch."""

    name = "PyTorch tensor"
    cast = "{0}.to(torch.float32)"

    def owns(self, array: Any) -> bool:
        return isinstance(array, _imported("torch", "Tensor"))

    def describe(self, name: str, array: Any, stream: Stream | None) -> Operand:
        torch: Any = sys.modules["torch"]
        kind, layout = array.device.type, array.layout
        if kind == "cpu":
            raise TypeError(
                f"{name} is a PyTorch tensor on the CPU; expected one on a CUDA device; pass {name}.cuda() to compute "
                f"there, or {name}.numpy() to have it copied there and a NumPy array returned"
            )
        if kind != "cuda" or layout != torch.strided:
            raise TypeError(
                f"{name} is a PyTorch tensor of layout {layout} on device {array.device}; expected layout "
                f"torch.strided on a CUDA device; pass {name}.{'to_dense()' if kind == 'cuda' else 'cuda()'}"
            )
        if array.requires_grad:
            raise ValueError(
                f"{name} is a PyTorch tensor that requires grad; expected one that does not, since no gradient is "
                f"recorded here; pass {name}.detach()"
            )
        if array.is_neg():
            raise ValueError(
                f"{name} is a PyTorch tensor whose negation is still to be done (is_neg() is True); expected one whose "
                f"memory holds its values; pass {name}.resolve_neg()"
            )
        strides = tuple(step * array.element_size() for step in array.stride())
        shape, device = tuple(array.shape), int(array.device.index)
        dtype = "float32" if array.dtype is torch.float32 else str(array.dtype)
        return Operand(name, self, array, dtype, shape, strides, int(array.data_ptr()), device)

    def streams(self, operands: list[Operand], device: int) -> list[Stream]:
        return [Stream.of(sys.modules["torch"].cuda.current_stream(device))]

    def empty(self, rows: int, cols: int, device: int, stream: Stream) -> Operand:
        torch: Any = sys.modules["torch"]
        result = torch.empty((rows, cols), dtype=torch.float32, device=f"cuda:{device}")
        return self.describe("out", result, stream)

    def keep(self, operands: list[Operand], device: int, stream: Stream, followed: list[Stream]) -> None:
        # PyTorch's allocator can be told, and then waits for that stream before it gives the memory to another.
        if not all(map(stream.same, followed)):
            torch: Any = sys.modules["torch"]
            if stream.is_default:
                user = torch.cuda.default_stream(device)
            else:
                user = torch.cuda.ExternalStream(stream.handle, device=device)
            for operand in operands:
                operand.array.record_stream(user)

    def written(self, out: Operand) -> None:
        # By its version autograd sees whether a tensor that it saved for backward has been written since. Old releases
        # of PyTorch offer no way to raise it; a tensor made in inference mode has none.
        torch: Any = sys.modules["torch"]
        increment = getattr(torch.autograd.graph, "increment_version", None)
        if increment is not None and not out.array.is_inference():
            increment(out.array)


def _imported(module: str, name: str) -> Any:
    """A class of a module that the caller has imported, or an empty tuple, of which nothing is an instance."""
    return getattr(sys.modules.get(module), name, ())


def pointer_device(name: str, pointer: int) -> int:
    """The device that an address belongs to."""
    start()
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    status, device = driver.cuPointerGetAttribute(attribute, pointer)
    if status == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:  # a thread's first call
        with device_scope(0):
            status, device = driver.cuPointerGetAttribute(attribute, pointer)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise ValueError(
            f"{name} points to address {pointer:#x}, which is not CUDA memory of this process ({status.name}); "
            "expected device memory that is still allocated; pass an array that owns its memory"
        )
    return int(device)
