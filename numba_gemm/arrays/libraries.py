"""Device arrays of Numba and CuPy. CuPy is not imported here; a caller with such arrays has imported it."""

# ruff: noqa: D102 -- ArrayKind documents the methods

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from cuda.bindings import driver

from ..runtime.device import device_count
from ..runtime.driver import device_scope, start
from .operand import ArrayKind, Operand, imported, name_of
from .probe import Alike, Probe, Reading, typed
from .streams import DEFAULT, Stream, bound_first, cupy_stream

FLOAT32 = np.dtype(np.float32)  # one object, in native byte order, shared by all arrays of that type

NAMES = {FLOAT32: "float32", np.dtype(np.float16): "float16"}  # of dtypes that an operand on the fast path may have


class NumbaArrays(ArrayKind):
    """Numba device arrays, on the stream that they are bound to, else on the default stream."""

    name = "Numba device array"
    cast = "cuda.to_device({0}.copy_to_host().astype(numpy.float32))"

    def owns(self, array: Any) -> bool:
        # A slice of a mapped or managed array keeps the class but not the device pointer; it counts as NumPy's.
        return bool(getattr(type(array), "__cuda_ndarray__", False)) and hasattr(array, "gpu_data")

    def describe(self, name: str, array: Any, stream: Stream | None) -> Operand:
        pointer = int(array.device_ctypes_pointer.value or 0)
        bound = Stream.of(array.stream)
        # Numba records the device that was current when the array was created, which need not own the memory.
        device = pointer_device(name, pointer) if pointer else None
        return Operand(name, self, array, name_of(array.dtype), array.shape, array.strides, pointer, device, bound)

    def streams(self, operands: list[Operand], device: int) -> list[Stream]:
        return bound_first(operand.stream or DEFAULT for operand in operands)

    def empty(self, shape: tuple[int, ...], device: int, stream: Stream) -> Operand:
        # Bound to its stream, so that copying it to the host, or passing it on, waits for the product.
        from numba import cuda

        bound: Any = 0
        if not stream.is_default:
            bound = cuda.external_stream(stream.handle)
            bound.owner = stream.owner  # the stream must outlive the binding
        with cuda.gpus[device]:
            return self.describe("out", cuda.device_array(shape, np.float32, stream=bound), stream)

    def copy(self, source: Operand, target: Operand, device: int, stream: Stream) -> None:
        from numba import cuda

        found = source.broadcast(target.shape)
        assert found is not None, "the shapes were checked"
        places, pairs = [found.pointer, target.pointer], []
        for extent, *steps in zip(target.shape, found.strides, target.strides):
            if steps[1] < 0:  # Numba assigns only to elements behind the first one's address
                places = [place + (extent - 1) * step for place, step in zip(places, steps)]
                steps = [-step for step in steps]
            pairs.append(steps)
        with cuda.gpus[device]:
            queue: Any = cuda.default_stream() if stream.handle == 0 else cuda.external_stream(stream.handle)
            read, written = (
                cuda.from_cuda_array_interface(
                    {"shape": target.shape, "strides": strides, "typestr": "<f4", "data": (place, False), "version": 2}
                )
                for place, strides in zip(places, zip(*pairs) if pairs else ((), ()))
            )
            written.setitem((), read, queue)  # all elements; arrays of Numba take no Ellipsis

    def probe(self, array: Any) -> Probe | None:
        own = type(array)
        if issubclass(own, np.ndarray):  # mapped and managed memory, whose slices are NumPy's
            return None

        # A view of memory that Numba did not allocate makes its `device_ctypes_pointer` anew at each access.
        foreign = imported("numba.cuda", "MemoryPointer")

        def place(x: Any) -> int:
            memory = x.gpu_data
            if type(memory) is foreign:
                return int(memory.device_pointer)
            return memory.device_ctypes_pointer.value or 0

        def read(tag: Any, a: Any, b: Any, out: Any) -> Reading | None:
            if type(b) is not own:
                return None
            if a.dtype is not FLOAT32 or b.dtype is not FLOAT32:
                tag = typed(NAMES, tag, a.dtype, b.dtype)
                if tag is None:
                    return None
            p, q = place(a), place(b)
            if out is None:
                r, result = 0, None
            elif type(out) is own and out.dtype is FLOAT32:
                r, result = place(out), (out.shape, out.strides)
            else:
                return None
            device = 0
            if several:
                if not p:  # an empty array, whose device is not known by its address
                    return None
                device = pointer_device("a", p)
                if any(pointer_device(*one) != device for one in (("b", q), ("out", r)) if one[1]):
                    return None
            return (
                (
                    tag,
                    own,
                    device,
                    (p & 15) << 8 | (q & 15) << 4 | r & 15,
                    a.shape,
                    a.strides,
                    b.shape,
                    b.strides,
                    result,
                ),
                p,
                q,
                r,
            )

        def vector(x: Any, a: Any) -> tuple[int, int, int, int] | None:
            if type(x) is not own or x.dtype is not FLOAT32 or len(x.shape) != 1 or x.stream is not a.stream:
                return None
            p = place(x)
            if several and not p:
                return None
            return p, x.shape[0], x.strides[0], pointer_device("epilogue_args", p) if several else 0

        def stream(a: Any, b: Any, out: Any, device: int) -> int | None:
            bound = a.stream
            if bound is not b.stream or (out is not None and out.stream is not bound):
                return None
            return bound if type(bound) is int else Stream.of(bound).handle

        def empty(a: Any, shape: tuple[int, ...], device: int) -> tuple[Any, int] | None:
            from numba import cuda

            with cuda.gpus[device]:
                made = cuda.device_array(shape, np.float32, stream=a.stream)
            return made, place(made)

        def alike(key: Any, a: Any, b: Any, out: Any) -> Alike:
            offsets, extents = key[3], (*key[4:8], *key[8])
            aligned = not offsets

            def places(a: Any, b: Any, out: Any) -> tuple[int, int, int, int] | None:
                if not (
                    type(a) is type(b) is type(out) is own
                    and a.dtype is FLOAT32
                    and b.dtype is FLOAT32
                    and out.dtype is FLOAT32
                ):
                    return None
                x, y, z, queue = a.gpu_data, b.gpu_data, out.gpu_data, a.stream
                if type(x) is type(y) is type(z) is foreign:
                    p, q, r = int(x.device_pointer), int(y.device_pointer), int(z.device_pointer)
                else:
                    p, q, r = place(a), place(b), place(out)
                if (
                    (not (p | q | r) & 15 if aligned else (p & 15) << 8 | (q & 15) << 4 | r & 15 == offsets)
                    and b.stream is queue
                    and out.stream is queue
                    and (a.shape, a.strides, b.shape, b.strides, out.shape, out.strides) == extents
                ):
                    return p, q, r, queue if type(queue) is int else Stream.of(queue).handle
                return None

            return places

        several = device_count() > 1
        return Probe(read, vector, stream, empty, alike=None if several else alike)


class CupyArrays(ArrayKind):
    """CuPy arrays, on the stream that is current in CuPy."""

    name = "CuPy array"
    cast = "{0}.astype(cupy.float32)"

    def owns(self, array: Any) -> bool:
        return isinstance(array, imported("cupy", "ndarray"))

    def owns_type(self, own: type) -> bool:
        return True

    def describe(self, name: str, array: Any, stream: Stream | None) -> Operand:
        device = int(array.device.id)
        dtype, pointer = name_of(array.dtype), int(array.data.ptr)
        return Operand(name, self, array, dtype, array.shape, array.strides, pointer, device)

    def streams(self, operands: list[Operand], device: int) -> list[Stream]:
        return [Stream.of(sys.modules["cupy"].cuda.get_current_stream(device))]

    def empty(self, shape: tuple[int, ...], device: int, stream: Stream) -> Operand:
        cupy: Any = sys.modules["cupy"]
        # CuPy's pool reuses memory in the order of the stream that was current at the allocation.
        with cupy.cuda.Device(device), cupy_stream(cupy, stream.handle, device):
            return self.describe("out", cupy.empty(shape, cupy.float32), stream)

    def copy(self, source: Operand, target: Operand, device: int, stream: Stream) -> None:
        cupy: Any = sys.modules["cupy"]
        with cupy.cuda.Device(device), cupy_stream(cupy, stream.handle, device):
            target.array[...] = source.array

    def probe(self, array: Any) -> Probe | None:
        cupy: Any = sys.modules["cupy"]
        own, current_stream, current_device = cupy.ndarray, cupy.cuda.get_current_stream, cupy.cuda.runtime.getDevice
        if type(array) is not own or not hasattr(array.data, "device_id"):
            return None

        def read(tag: Any, a: Any, b: Any, out: Any) -> Reading | None:
            if type(b) is not own:
                return None
            if a.dtype is not FLOAT32 or b.dtype is not FLOAT32:
                tag = typed(NAMES, tag, a.dtype, b.dtype)
                if tag is None:
                    return None
            x, y = a.data, b.data
            p, q, device = x.ptr, y.ptr, x.device_id
            if out is None:
                r, result = 0, None
            elif type(out) is own and out.dtype is FLOAT32:
                z = out.data
                r, result = z.ptr, (out.shape, out.strides)
                if z.device_id != device:
                    return None
            else:
                return None
            if y.device_id != device:
                return None
            return (
                (
                    tag,
                    own,
                    device,
                    (p & 15) << 8 | (q & 15) << 4 | r & 15,
                    a.shape,
                    a.strides,
                    b.shape,
                    b.strides,
                    result,
                ),
                p,
                q,
                r,
            )

        def vector(x: Any, a: Any) -> tuple[int, int, int, int] | None:
            if type(x) is not own or x.dtype is not FLOAT32 or x.ndim != 1:
                return None
            return x.data.ptr, x.shape[0], x.strides[0], x.data.device_id

        def stream(a: Any, b: Any, out: Any, device: int) -> int | None:
            return current_stream(device).ptr

        def empty(a: Any, shape: tuple[int, ...], device: int) -> tuple[Any, int] | None:
            if current_device() != device:
                return None
            made = own(shape, FLOAT32)
            return made, made.data.ptr

        def alike(key: Any, a: Any, b: Any, out: Any) -> Alike:
            device, offsets, extents = key[2], key[3], (*key[4:8], *key[8])
            aligned = not offsets

            def places(a: Any, b: Any, out: Any) -> tuple[int, int, int, int] | None:
                if not (
                    type(a) is type(b) is type(out) is own
                    and a.dtype is FLOAT32
                    and b.dtype is FLOAT32
                    and out.dtype is FLOAT32
                ):
                    return None
                x, y, z = a.data, b.data, out.data
                p, q, r = x.ptr, y.ptr, z.ptr
                if (
                    (not (p | q | r) & 15 if aligned else (p & 15) << 8 | (q & 15) << 4 | r & 15 == offsets)
                    and x.device_id == y.device_id == z.device_id == device
                    and (a.shape, a.strides, b.shape, b.strides, out.shape, out.strides) == extents
                ):
                    return p, q, r, current_stream(device).ptr
                return None

            return places

        return Probe(read, vector, stream, empty, alike=alike)


def pointer_device(name: str, pointer: int) -> int:
    """Return the device that an address belongs to."""
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
