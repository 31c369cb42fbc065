"""Results handed to a library by DLPack, which then owns them."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

from ..device.units import FLOAT32_BYTES
from . import streams
from .operand import Operand, Product
from .streams import DEFAULT, Stream

__all__ = ["Exported", "maker_of", "returned"]

CUDA, FLOAT, NO_ORDER = 2, 2, -1  # DLPack's kDLCUDA, kDLFloat, and the stream of a consumer that orders work itself
NAME = b"dltensor"  # of a capsule that has not been consumed; kept for as long as there may be one


class _Managed(ctypes.Structure):
    """DLPack's ``DLManagedTensor``, whose fields are flat."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
        ("index", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_exported: dict[int, tuple[Any, ...]] = {}  # what consumers use, by the addresses of their structures


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete(address: int) -> None:
    _exported.pop(address, None)


def _function(name: str, result: Any, *arguments: Any) -> Any:
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


_new = _function("PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_is_valid = _function("PyCapsule_IsValid", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
_pointer = _function("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _destroy(capsule: int) -> None:
    """Release the result of a capsule that nobody has consumed."""
    if _is_valid(capsule, NAME):
        _exported.pop(_pointer(capsule, NAME), None)


class Exported:
    """A float32 result as a producer of DLPack capsules.

    Parameters
    ----------
    result : Operand
        The result; consumers keep its array alive.
    device : int
        Ordinal of its device.
    stream : Stream
        Stream that writes it; the consumer's is made to wait for it.
    kind : int
        DLPack's type of the device.
    """

    def __init__(self, result: Operand, device: int, stream: Stream, kind: int = CUDA) -> None:
        self._result, self._place, self._stream = result, (kind, device), stream

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._place

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> Any:
        if copy or dl_device not in (None, self._place):
            raise BufferError(f"the result lies on DLPack device {self._place} and is not copied; ask for it there")
        kind, index = self._place
        if kind == CUDA and stream != NO_ORDER:
            streams.wait_for(DEFAULT if stream is None else Stream.of(stream), self._stream, index)
        result = self._result
        count = len(result.shape)
        shape = (ctypes.c_int64 * count)(*result.shape)
        strides = (ctypes.c_int64 * count)(*(step // FLOAT32_BYTES for step in result.strides))
        places = (ctypes.addressof(shape), ctypes.addressof(strides)) if count else (None, None)
        deleter = ctypes.cast(_delete, ctypes.c_void_p)
        made = _Managed(result.pointer, kind, index, count, FLOAT, 8 * FLOAT32_BYTES, 1, *places, 0, None, deleter)
        address = ctypes.addressof(made)
        _exported[address] = (made, shape, strides, result.array)
        return _new(address, NAME, ctypes.cast(_destroy, ctypes.c_void_p))


def maker_of(array: Any) -> Callable[[Any], Any] | None:
    """Return ``from_dlpack`` of an array's library: its array namespace, or else its type's package; None without."""
    if hasattr(array, "__array_namespace__"):
        library = array.__array_namespace__()
    else:
        library = sys.modules.get(type(array).__module__.partition(".")[0])
    return getattr(library, "from_dlpack", None)


def returned(a: Operand, placed: Product, device: int) -> Any:
    """Return a new result as an array of the library of `a`."""
    if a.maker is None:
        return placed.result
    if hasattr(placed.result, "__dlpack__"):
        return a.maker(placed.result)
    return a.maker(Exported(placed.c, device, placed.stream))
