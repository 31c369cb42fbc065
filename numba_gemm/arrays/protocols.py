"""Objects that are recognised by a protocol, ``__cuda_array_interface__`` or ``__dlpack__``, not by their library."""

# ruff: noqa: D102 -- ArrayKind documents the methods

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np

from ..kernels.product import ITEM_BYTES
from ..runtime.matrix import at_address
from . import streams
from .libraries import NumbaArrays, pointer_device
from .operand import ArrayKind, Operand, name_of, row_major
from .streams import DEFAULT, Stream, bound_first


class Foreign(ArrayKind):
    """Memory that is known only through an exchange protocol. Results are Numba device arrays."""

    cast = "a float32 copy of {0}"

    @property
    def family(self) -> str:
        return NumbaArrays.name

    def streams(self, operands: list[Operand], device: int) -> list[Stream]:
        return bound_first(operand.stream for operand in operands if operand.stream is not None) or [DEFAULT]

    def empty(self, shape: tuple[int, ...], device: int, stream: Stream) -> Operand:
        return NumbaArrays().empty(shape, device, stream)

    def copy(self, source: Operand, target: Operand, device: int, stream: Stream) -> None:
        NumbaArrays().copy(source, target, device, stream)

    def keep(self, operands: list[Operand], device: int, stream: Stream, followed: list[Stream]) -> None:
        # The owner may reuse the memory as soon as it is released, in the order of a stream that is not known here.
        streams.hold(stream, device, [operand.array for operand in operands])


class CudaArrayInterface(Foreign):
    """Objects with ``__cuda_array_interface__``, versions 0 to 3."""

    name = "object with __cuda_array_interface__"

    def owns(self, array: Any) -> bool:
        # The interface has no BF16; DLPack has.
        if str(getattr(array, "dtype", "")) == "bfloat16" and Dlpack().owns(array):
            return False
        return hasattr(array, "__cuda_array_interface__")

    def describe(self, name: str, array: Any, stream: Stream | None) -> Operand:
        interface = array.__cuda_array_interface__
        if interface.get("mask") is not None:
            raise TypeError(f"{name} has a mask; expected an array without one; pass a copy with the mask filled in")
        dtype, shape = np.dtype(interface["typestr"]), tuple(interface["shape"])
        strides = interface.get("strides") or row_major(shape, dtype.itemsize)
        pointer, readonly = interface["data"]
        pointer = int(pointer or 0)
        device = pointer_device(name, pointer) if pointer and 0 not in shape else None
        producer = None if interface.get("stream") is None else Stream(int(interface["stream"]))
        return Operand(
            name, self, array, name_of(dtype), shape, tuple(strides), pointer, device, producer, bool(readonly)
        )


class _DlpackDevice(ctypes.Structure):
    """DLPack's ``DLDevice``."""

    _fields_ = [("kind", ctypes.c_int32), ("index", ctypes.c_int32)]


class _DlpackTensor(ctypes.Structure):
    """DLPack's ``DLTensor``."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DlpackDevice),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DlpackVersioned(ctypes.Structure):
    """DLPack's ``DLManagedTensorVersioned``, of major version 1."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DlpackTensor),
    ]


class Dlpack(Foreign):
    """Objects with ``__dlpack__`` and ``__dlpack_device__`` in CUDA device or managed memory.

    The capsule is read but not consumed: it is kept for as long as its memory is in use. Then its own destructor calls
    the deleter, as the protocol specifies for a capsule that has not been consumed.
    """

    name = "DLPack object"
    DEVICES = (2, 13)  # kDLCUDA, kDLCUDAManaged
    HOST = (1, 3)  # kDLCPU, kDLCUDAHost: NumPy reads both
    READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
    CODES = ("int", "uint", "float", "opaque", "bfloat", "complex", "bool")

    def owns(self, array: Any) -> bool:
        return hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")

    def describe(self, name: str, array: Any, stream: Stream | None) -> Operand:
        place = int(array.__dlpack_device__()[0])
        if place not in self.DEVICES:
            raise TypeError(
                f"{name} is a DLPack object on a device of DLPack type {place}; expected host memory (types 1 and 3) "
                "or CUDA memory (2 and 13); copy it to one of these"
            )
        queue = DEFAULT if stream is None else stream
        return self._described(name, array, queue.handle or 1, queue)  # DLPack forbids 0; 1 is the legacy default

    def describe_host(self, name: str, array: Any, kind: ArrayKind) -> Operand:
        """Describe an array in host memory of a dtype that NumPy lacks, for the kind of NumPy's arrays."""
        found = self._described(name, array, None, DEFAULT)
        if ITEM_BYTES.get(found.dtype) is None:
            return found  # refused by its dtype
        memory = at_address(found.array, found.pointer, found.shape, found.strides, found.readonly, found.dtype)
        return replace(found, kind=kind, array=memory, device=None, stream=None)

    def _described(self, name: str, array: Any, handle: int | None, queue: Stream) -> Operand:
        capsule = self._capsule(array, handle)
        tensor, readonly = self._tensor(capsule)
        itemsize = tensor.bits * tensor.lanes // 8
        shape = tuple(tensor.shape[: tensor.ndim])
        if tensor.strides:
            strides = tuple(step * itemsize for step in tensor.strides[: tensor.ndim])
        else:
            strides = row_major(shape, itemsize)
        code = self.CODES[tensor.code] if tensor.code < len(self.CODES) else f"code{tensor.code}_"
        dtype = f"{code}{tensor.bits}" + (f"x{tensor.lanes}" if tensor.lanes != 1 else "")
        pointer = (tensor.data or 0) + tensor.byte_offset
        return Operand(name, self, capsule, dtype, shape, strides, pointer, tensor.device.index, queue, readonly)

    @staticmethod
    def _capsule(array: Any, stream: int | None) -> Any:
        try:
            return array.__dlpack__(stream=stream, max_version=(1, 0))
        except TypeError:  # from before DLPack 1.0
            return array.__dlpack__(stream=stream)

    @classmethod
    def _tensor(cls, capsule: Any) -> tuple[_DlpackTensor, bool]:
        get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
        get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        is_valid = ctypes.pythonapi.PyCapsule_IsValid
        is_valid.argtypes = (ctypes.py_object, ctypes.c_char_p)
        if is_valid(capsule, b"dltensor_versioned"):
            managed = _DlpackVersioned.from_address(get_pointer(capsule, b"dltensor_versioned"))
            if managed.major != 1:
                raise TypeError(f"a DLPack object of version {managed.major}.{managed.minor}; expected version 0 or 1")
            return managed.tensor, bool(managed.flags & cls.READ_ONLY)
        return _DlpackTensor.from_address(get_pointer(capsule, b"dltensor")), False
