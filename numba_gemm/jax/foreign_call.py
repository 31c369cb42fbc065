"""Functions that XLA calls: XLA's foreign function interface (FFI), by ctypes.

The structures are those of ``xla/ffi/api/c_api.h`` (https://github.com/openxla/xla), which jaxlib ships; NVIDIA Warp
registers its kernels with JAX in the same way (https://github.com/NVIDIA/warp). XLA passes one structure per call, the
call frame: the operands, the results, the attributes, and functions of XLA that need a context.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from ctypes import c_char_p, c_int, c_int64, c_size_t, c_void_p
from typing import Any, ClassVar, NamedTuple

import jax

__all__ = ["Buffer", "Call", "register"]

API_VERSION = (0, 1)  # of the interface from which on these structures are as they are here
METADATA = 1  # type of the extension by which XLA asks for the version
EXECUTE = 3  # stage
FLOAT32 = 11  # data type
INVALID_ARGUMENT, INTERNAL = 3, 13  # codes of errors

_Array = ctypes.POINTER(c_void_p)


class _Header(ctypes.Structure):
    """The members with which every structure begins."""

    _fields_: ClassVar[Any] = (("struct_size", c_size_t), ("extension", c_void_p))


class _Extension(ctypes.Structure):
    _fields_: ClassVar[Any] = (("struct_size", c_size_t), ("kind", c_int), ("next", c_void_p))


class _Version(_Header):
    _fields_ = (("major", c_int), ("minor", c_int))


class _Metadata(ctypes.Structure):
    """Properties of a handler, up to the version; the traits behind it stay 0, as XLA sets them."""

    _fields_ = (("struct_size", c_size_t), ("version", _Version))


class _MetadataExtension(_Extension):
    _fields_ = (("metadata", ctypes.POINTER(_Metadata)),)


class _Span(ctypes.Structure):
    """A string without a terminator."""

    _fields_ = (("address", c_void_p), ("size", c_size_t))

    def __str__(self) -> str:
        return ctypes.string_at(self.address, self.size).decode()


class _Buffer(_Header):
    _fields_ = (("dtype", c_int), ("address", c_void_p), ("rank", c_int64), ("extents", ctypes.POINTER(c_int64)))


class _Buffers(_Header):
    """Operands or results."""

    _fields_ = (("size", c_int64), ("kinds", ctypes.POINTER(c_int)), ("items", _Array))


class _Attributes(_Header):
    _fields_ = (("size", c_int64), ("kinds", ctypes.POINTER(c_int)), ("names", _Array), ("items", _Array))


class _ErrorArguments(_Header):
    _fields_ = (("message", c_char_p), ("code", c_int))


class _DestroyArguments(_Header):
    _fields_ = (("error", c_void_p),)


class _StreamArguments(_Header):
    _fields_ = (("context", c_void_p), ("stream", c_void_p))


class _Api(_Header):
    """XLA's functions, up to the last one that is called here."""

    _fields_ = (
        ("version", _Version),
        ("internal", c_void_p),
        ("create_error", ctypes.CFUNCTYPE(c_void_p, ctypes.POINTER(_ErrorArguments))),
        ("get_message", c_void_p),
        ("destroy_error", ctypes.CFUNCTYPE(None, ctypes.POINTER(_DestroyArguments))),
        ("register", c_void_p),
        ("get_stream", ctypes.CFUNCTYPE(c_void_p, ctypes.POINTER(_StreamArguments))),
    )


class _CallFrame(_Header):
    _fields_ = (
        ("api", ctypes.POINTER(_Api)),
        ("context", c_void_p),
        ("stage", c_int),
        ("operands", _Buffers),
        ("results", _Buffers),
        ("attributes", _Attributes),
    )


_Handler = ctypes.CFUNCTYPE(c_void_p, ctypes.POINTER(_CallFrame))  # returns an error of XLA, or nothing


class Buffer(NamedTuple):
    """A float32 array in row order, in memory of XLA."""

    address: int
    shape: tuple[int, ...]


class Call(NamedTuple):
    """A call by XLA.

    Attributes
    ----------
    operands, results : list of Buffer
        Arrays to read and to write.
    attributes : list of str
        Attributes, in the order of their names.
    stream : callable
        Returns the handle of the CUDA stream to run on; raises an exception on other platforms.
    """

    operands: list[Buffer]
    results: list[Buffer]
    attributes: list[Any]
    stream: Callable[[], int]


_kept: list[Any] = []  # XLA calls handlers for as long as the process lives


def register(name: str, platform: str, execute: Callable[[Call], None]) -> None:
    """Register a function as the target of `jax.ffi.ffi_call` and `jax.ffi.ffi_lowering` on a platform.

    Parameters
    ----------
    name : str
        Name of the target.
    platform : str
        XLA's name of the platform: "cpu", or "CUDA".
    execute : callable
        Function of a `Call`, whose operands and results are float32 and whose attributes are strings. The message of
        an exception becomes that of XLA's error.
    """

    @_Handler
    def handle(pointer: Any) -> int | None:
        frame = pointer.contents
        try:
            # XLA asks for the version before the first call. It is told of no trait: command buffers (CUDA graphs)
            # are left to kernels that launch the same operations whenever they are called.
            for extension in _extensions(frame):
                if extension.kind == METADATA:
                    version = _MetadataExtension.from_address(ctypes.addressof(extension)).metadata.contents.version
                    version.major, version.minor = API_VERSION
                    return None
            if frame.stage == EXECUTE:
                execute(_read(frame))
        except BaseException as error:  # ctypes would print it, and XLA go on as if there were a result
            return _error(frame, error)
        return None

    _kept.append(handle)
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handle), platform=platform)


def _extensions(frame: Any) -> Iterator[Any]:
    address = frame.extension
    while address:
        extension = _Extension.from_address(address)
        yield extension
        address = extension.next


def _read(frame: Any) -> Call:
    attributes = frame.attributes
    names = [str(_Span.from_address(attributes.items[i])) for i in range(attributes.size)]
    return Call(_buffers(frame.operands), _buffers(frame.results), names, lambda: _stream(frame))


def _buffers(buffers: Any) -> list[Buffer]:
    found = []
    for i in range(buffers.size):
        buffer = _Buffer.from_address(buffers.items[i])
        if buffer.dtype != FLOAT32:
            raise TypeError(f"an array has XLA's data type {buffer.dtype}; expected {FLOAT32}, float32")
        found.append(Buffer(buffer.address or 0, tuple(buffer.extents[: buffer.rank])))
    return found


def _stream(frame: Any) -> int:
    asked = _StreamArguments(ctypes.sizeof(_StreamArguments), None, frame.context, None)
    if error := frame.api.contents.get_stream(asked):
        frame.api.contents.destroy_error(_DestroyArguments(ctypes.sizeof(_DestroyArguments), None, error))
        raise RuntimeError("XLA has no CUDA stream for the call; expected one; register the function for CUDA only")
    return asked.stream or 0


def _error(frame: Any, error: BaseException) -> int:
    code = INVALID_ARGUMENT if isinstance(error, TypeError | ValueError) else INTERNAL
    message = str(error) or type(error).__name__
    created = _ErrorArguments(ctypes.sizeof(_ErrorArguments), None, message.encode(), code)
    return frame.api.contents.create_error(created)
