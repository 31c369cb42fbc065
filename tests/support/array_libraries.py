"""Stand-ins for the arrays of PyTorch, CuPy and Numba, in host memory, for calls on `support.host_gpu`."""

from __future__ import annotations

import ctypes
import sys
import types

import numpy as np
import pytest

from numba_gemm import arrays, plan, tiled_sgemm
from numba_gemm.arrays import libraries, probe, torch_tensors
from numba_gemm.gemm import fast_path
from numba_gemm.gemm import product as products
from numba_gemm.runtime import epilogue as epilogues
from support.operands import NAN, filled


def aligned_empty(shape):
    size = int(np.prod(shape))
    memory = np.full(size + 4, NAN)
    skip = -(memory.ctypes.data // 4) % 4
    return memory[skip : skip + size].reshape(shape)


def on_boundary(x, offset=0):
    """Copy x, by rows, to `offset` floats after a 16-byte boundary."""
    memory = aligned_empty((1, x.size + offset))[0, offset:].reshape(x.shape)
    memory[...] = x
    return memory


def changed(x, **attributes):
    for name, value in attributes.items():
        setattr(x, name, value)
    return x


class Tensor:
    """The attributes of a PyTorch tensor that are looked at."""

    def __init__(self, x, device=0):
        self.x, self.index = x, device
        self.device = types.SimpleNamespace(type="cuda", index=device)
        self.dtype = "float32" if x.dtype == np.float32 else f"torch.{x.dtype}"
        self.layout, self.is_cuda, self.requires_grad, self.neg = "strided", True, False, False
        self.version, self.tangent = 0, None
        self.address = self.x.ctypes.data  # or the exception that PyTorch raises

    is_nested = is_quantized = False
    _version = property(lambda self: self.version)
    shape = property(lambda self: self.x.shape)

    def stride(self):
        return tuple(step // self.element_size() for step in self.x.strides)

    def dim(self):
        return self.x.ndim

    def data_ptr(self):
        if isinstance(self.address, Exception):
            raise self.address
        if self.layout != "strided":  # as PyTorch, of every layout that has no storage
            raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")
        return self.address

    def get_device(self):
        return self.index

    def element_size(self):
        return self.x.itemsize

    def is_neg(self):
        return self.neg

    def is_inference(self):
        return False

    def new_empty(self, shape, dtype="float32"):
        return Tensor(aligned_empty(shape), self.index)


def tensor(x, **options):
    """Return a tensor by rows that starts at a 16-byte boundary."""
    return Tensor(on_boundary(x), **options)


def half_tensor(x):
    """Return a tensor of FP16 by rows that starts at a 16-byte boundary."""
    memory = np.zeros(x.size + 8, np.float16)
    skip = -(memory.ctypes.data // 2) % 8
    place = memory[skip : skip + x.size].reshape(x.shape)
    place[...] = x
    return Tensor(place)


class CupyArray:
    """The attributes of a CuPy array that are looked at."""

    def __init__(self, x, dtype=None):
        place, device = x if isinstance(x, np.ndarray) else aligned_empty(x), 0
        self.x, self.shape, self.strides, self.dtype = place, place.shape, place.strides, np.dtype(np.float32)
        self.data = types.SimpleNamespace(ptr=place.ctypes.data, device_id=device)
        self.device, self.ndim = types.SimpleNamespace(id=device), place.ndim


class NumbaArray:
    """The attributes of a Numba device array that are looked at."""

    __cuda_ndarray__ = True

    def __init__(self, x, stream=0):
        self.x, self.shape, self.strides, self.dtype, self.stream = x, x.shape, x.strides, x.dtype, stream
        self.gpu_data = types.SimpleNamespace(device_ctypes_pointer=ctypes.c_size_t(x.ctypes.data))
        self.device_ctypes_pointer = self.gpu_data.device_ctypes_pointer


class MemoryPointer:
    """Memory that Numba has not allocated; `device_pointer` is all that is read of it."""

    def __init__(self, pointer):
        self.device_pointer = pointer


class NumbaView(NumbaArray):
    """A Numba array in memory of another library, as `numba.cuda.as_cuda_array` makes it."""

    def __init__(self, x, stream=0):
        super().__init__(x, stream)
        self.gpu_data = MemoryPointer(x.ctypes.data)


@pytest.fixture
def no_calls(gpu, monkeypatch):
    """Caches of calls, probes and epilogues, all empty."""
    probes = {}
    monkeypatch.setattr(probe, "PROBES", probes)
    monkeypatch.setattr(fast_path, "PROBES", probes)
    monkeypatch.setattr(products, "calls", fast_path.CallCache(any_extents=True))
    monkeypatch.setattr(epilogues, "_guards", {})


@pytest.fixture
def torch(no_calls, monkeypatch):
    current = types.SimpleNamespace(cuda_stream=40)

    def increment_version(x):
        x.version += 1

    def unpack_dual(x):
        return types.SimpleNamespace(tangent=x.tangent if torch.autograd.forward_ad._current_level >= 0 else None)

    torch = types.SimpleNamespace(
        Tensor=Tensor,
        is_grad_enabled=lambda: torch.grad_mode,
        grad_mode=True,
        float32="float32",
        float16="torch.float16",
        strided="strided",
        current=current,
        _C=types.SimpleNamespace(
            _cuda_getCurrentRawStream=lambda device: current.cuda_stream,
            DispatchKey=types.SimpleNamespace(AutogradFunctionality="autograd"),
            _dispatch_tls_is_dispatch_key_excluded=lambda key: False,
        ),
        cuda=types.SimpleNamespace(current_stream=lambda device: current),
        autograd=types.SimpleNamespace(
            graph=types.SimpleNamespace(increment_version=increment_version),
            forward_ad=types.SimpleNamespace(_current_level=-1, unpack_dual=unpack_dual),
        ),
        empty=lambda shape, **_: Tensor(aligned_empty(shape)),
    )

    class TensorGuards:
        """Checks of compiled PyTorch code on its inputs."""

        def __init__(self, *tensors, dynamic_dims_sizes, dynamic_dims_strides):
            assert dynamic_dims_sizes is dynamic_dims_strides is None
            self.wanted = self.looks(tensors)

        @staticmethod
        def looks(tensors):
            return [
                (x.dtype, x.layout, x.is_cuda, x.index, x.neg, x.requires_grad and torch.grad_mode, x.shape, x.stride())
                for x in tensors
                if type(x) is Tensor and not isinstance(x.address, Exception)
            ]

        def check(self, *tensors):
            return len(set(map(id, tensors))) == len(tensors) and self.looks(tensors) == self.wanted

    monkeypatch.setitem(sys.modules, "torch._C._dynamo.guards", types.SimpleNamespace(TensorGuards=TensorGuards))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(arrays, "KINDS", (torch_tensors.TorchTensors(),))
    return torch


@pytest.fixture
def others(no_calls, monkeypatch):
    """Numba and CuPy."""
    current = types.SimpleNamespace(ptr=40)
    module = types.SimpleNamespace(
        ndarray=CupyArray,
        float32=np.float32,
        cuda=types.SimpleNamespace(
            get_current_stream=lambda device: current, runtime=types.SimpleNamespace(getDevice=lambda: 0)
        ),
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(sys.modules["numba.cuda"], "MemoryPointer", MemoryPointer, raising=False)
    monkeypatch.setattr(libraries, "pointer_device", lambda name, pointer: 0)
    monkeypatch.setattr(arrays, "KINDS", (libraries.NumbaArrays(), libraries.CupyArrays()))
    monkeypatch.setattr(arrays.streams, "wait_for", lambda *_: None)


@pytest.fixture
def checked(monkeypatch):
    """The calls that were checked in full."""
    calls, check_in_full = [], products.checked_product

    def count(*arguments, **options):
        calls.append(arguments)
        return check_in_full(*arguments, **options)

    monkeypatch.setattr(products, "checked_product", count)
    return calls


@pytest.fixture(params=["function", "plan", "plan without guards"])
def product(request, torch, monkeypatch):
    if request.param == "plan without guards":  # of an old release of PyTorch
        monkeypatch.delitem(sys.modules, "torch._C._dynamo.guards")
    return tiled_sgemm if request.param == "function" else plan(4, 8, 12)


def operands(seed=0):
    return filled(4, 12, seed), filled(12, 8, seed), filled(4, 8, seed + 1)
