"""Adaptors of array libraries, without a GPU: their reading of arrays, and their calls of the driver."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import types
import weakref
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from cuda.bindings import driver
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cuda
from support.operands import LAYOUTS, REPEATING, Exported, check, filled, frozen

from numba_gemm import arrays, tiled_sgemm
from numba_gemm.arrays import KINDS, ArrayKind, Operand, describe, host, libraries, protocols, streams, torch_tensors
from numba_gemm.arrays import operand as operand_module
from numba_gemm.gemm import batches
from numba_gemm.gemm import launch_choice as launching
from numba_gemm.gemm import request as requests
from numba_gemm.kernels.product import Batch
from numba_gemm.runtime import device as devices
from numba_gemm.runtime import driver as driver_module
from numba_gemm.runtime.matrix import Matrix

A, B = filled(3, 4), filled(4, 5)


def operand(pointer=4096, shape=(2, 2), strides=(8, 4), device=0, name="a") -> Operand:
    return Operand(name, KINDS[0], None, "float32", shape, strides, pointer, device)


def product(kind, a, b, out=None, *, reads_out=False, stream=None, vectors=()):
    shape = (a.shape[0], b.shape[1])
    return kind.product(a, b, out, shape=shape, vectors=list(vectors), reads_out=reads_out, device=0, stream=stream)


def test_operands_on_several_devices():
    with pytest.raises(ValueError, match="a on device 0, b on device 1; expected one; copy them"):
        requests._common_device([operand(), operand(device=1, name="b")])
    assert requests._common_device([operand(device=None), operand(device=3)]) == 3


def test_stream_of_another_device(monkeypatch):
    monkeypatch.setattr(devices, "current_device", lambda: 0)
    monkeypatch.setattr(devices, "device_count", lambda: 2)
    monkeypatch.setattr(streams, "device_of", lambda stream: 1)
    monkeypatch.setattr(launching, "launch_product", lambda *_: pytest.fail("launched"))
    with pytest.raises(ValueError, match=r"stream belongs to device 1 and the operands lie on device 0; .* pass a"):
        tiled_sgemm(A, B, stream=99)
    monkeypatch.undo()
    monkeypatch.setattr(devices, "device_count", lambda: 2)
    for device in (None, 0):  # None: a default stream, which every device has
        monkeypatch.setattr(streams, "device_of", lambda stream, found=device: found)
        assert requests.checked(A, B, None, 1.0, 0.0, 99, "auto", None, ()).stream == streams.Stream(99)


@pytest.mark.parametrize(("pointer", "strides"), [(4098, (8, 4)), (4096, (10, 4)), (4096, (8, -2))])
def test_unaligned_device_memory(pointer, strides):
    with pytest.raises(ValueError, match=r"a has elements off the 4-byte boundaries .* pass a contiguous copy of a"):
        requests.check_elements(operand(pointer, strides=strides))


# ------------------------------------------------------------------------------------------------------- overlaps


@st.composite
def placed(draw) -> Operand:
    dimensions = draw(st.integers(2, 4))
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=dimensions, max_size=dimensions)))
    strides = tuple(draw(st.lists(st.integers(-40, 40), min_size=dimensions, max_size=dimensions)))
    return operand(4096 + draw(st.integers(0, 60)), shape, strides)


def touched(x: Operand) -> list[int]:
    """Return the addresses of all bytes of all elements."""
    starts = [x.pointer + sum(i * step for i, step in zip(index, x.strides)) for index in np.ndindex(x.shape)]
    return [start + byte for start in starts for byte in range(4)]


@settings(max_examples=1000)
@given(placed(), placed())
def test_overlap_is_exact(x, y):
    assert x.overlaps(y) == bool(set(touched(x)) & set(touched(y)))
    assert x.overlaps_itself() == (len(set(touched(x))) < len(touched(x)))


# -------------------------------------------------------------------------------------------------------- batches


def laid_out(draw, shape) -> np.ndarray:
    """Return small integers in an array with any strides."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.sampled_from([1, 1, 1, 2, -1])) for _ in shape]
    larger = np.zeros([shape[axis] * abs(steps[axis]) for axis in order], np.float32)
    array = larger.transpose(np.argsort(order))[tuple(slice(None, None, step) for step in steps)]
    array[...] = np.random.default_rng(len(shape)).integers(-4, 5, shape)
    return array


@settings(max_examples=300)
@given(st.data(), st.integers(0, 3), st.booleans(), st.sampled_from([2, 4, 13, 1 << 31]))
def test_pieces_of_a_batch_are_the_batch(data, at_once, fold, most):
    batch = data.draw(st.lists(st.integers(1, 3), max_size=5), "batch")
    m, n, k = (data.draw(st.integers(1, 3), extent) for extent in "mnk")

    def operand(rows, cols):
        kept = batch[len(batch) - data.draw(st.integers(0, len(batch))) :]
        return laid_out(data.draw, (*(extent if data.draw(st.booleans()) else 1 for extent in kept), rows, cols))

    a, b = operand(m, k), operand(k, n)
    expected = a @ b
    c = laid_out(data.draw, expected.shape)
    kind = host.HostArrays()
    places = [kind.describe(name, array, None) for name, array in {"a": a, "b": b, "c": c}.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "MAX_TILES", most)
        patch.setattr(batches, "ROWS", 1)  # so that a tile may be one element
        pieces = list(batches.products(*places, 0, at_once=at_once, fold=fold))
    for x, y, z, some in pieces:
        assert at_once or some == Batch()
        matrices = np.prod(some.extents)
        assert z.rows * z.cols * matrices < most or matrices == 1
        for index in np.ndindex(some.extents):
            one, other, result = (
                as_numpy(replace(matrix, pointer=matrix.pointer + int(np.dot(index, steps))))
                for matrix, steps in ((x, some.a), (y, some.b), (z, some.c))
            )
            result[...] = one @ other
    np.testing.assert_array_equal(c, expected)


F32 = np.float32

# Shapes or arrays of A and B; extents of the batch of the one launch, and of its matrices.
COLLAPSES = {
    "stack": ((6, 2, 3), (6, 3, 4), (1, 1, 6), (2, 4)),
    "stacks of stacks": ((2, 3, 2, 3), (2, 3, 3, 4), (1, 1, 6), (2, 4)),
    "extents of one": ((2, 1, 3, 1, 2, 3), (2, 1, 3, 1, 3, 4), (1, 1, 6), (2, 4)),
    "outer and inner": ((2, 1, 2, 3), (1, 5, 3, 4), (1, 2, 5), (2, 4)),
    "shared B": ((6, 2, 3), (3, 4), (1, 1, 1), (12, 4)),
    "shared B, in turn": ((2, 3, 2, 3), (2, 1, 3, 4), (1, 1, 2), (6, 4)),
    "rows": ((6, 1, 3), (3, 4), (1, 1, 1), (6, 4)),
    "columns": ((2, 3), (6, 3, 1), (1, 1, 1), (2, 6)),
    "shared A": ((2, 3), (6, 3, 4), (1, 1, 6), (2, 4)),
    "three": ((2, 1, 2, 1, 2, 3), (2, 5, 1, 2, 3, 4), (4, 5, 2), (2, 4)),
}


@pytest.mark.parametrize("case", COLLAPSES)
def test_batches_collapse(case):
    a_shape, b_shape, extents, (m, n) = COLLAPSES[case]
    kind = host.HostArrays()
    a, b = np.zeros(a_shape, F32), np.zeros(b_shape, F32)
    if case == "three":
        a = np.broadcast_to(a, (2, 5, 2, 2, 2, 3))
        extents = (5, 2, 2)
    c = np.zeros((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a_shape[-2], b_shape[-1]), F32)
    places = [kind.describe("x", array, None) for array in (a, b, c)]
    pieces = list(batches.products(*places, 0, at_once=3, fold=True))
    assert len(pieces) == (2 if case == "three" else 1), "what is beyond three dimensions takes a launch each"
    for x, y, z, batch in pieces:
        assert batch.extents == extents
        assert (z.rows, z.cols) == (x.rows, y.cols) == (m, n)


def beside(count, rows, cols):
    """Return matrices that lie side by side."""
    return np.zeros((rows, count, cols), F32).transpose(1, 0, 2)


def gaps(count, rows, cols):
    """Return matrices with an unused row after each."""
    return np.zeros((count, rows + 1, cols), F32)[:, :rows]


def zeros(*shape):
    return np.zeros(shape, F32)


# A, B and C; batch extents of the launch, and the extents of its matrices.
APART = {
    "rows behind each other": (zeros(3, 2, 5), zeros(5, 4), zeros(3, 2, 4), (1, 1, 1), (6, 4)),
    "rows of A with gaps": (gaps(3, 2, 5), zeros(5, 4), zeros(3, 2, 4), (1, 1, 3), (2, 4)),
    "rows of C with gaps": (zeros(3, 2, 5), zeros(5, 4), gaps(3, 2, 4), (1, 1, 3), (2, 4)),
    "columns of C": (zeros(3, 2, 5), zeros(5, 4), beside(3, 2, 4), (1, 1, 3), (2, 4)),
    "B of each": (zeros(3, 2, 5), zeros(3, 5, 4), zeros(3, 2, 4), (1, 1, 3), (2, 4)),
    "columns side by side": (zeros(2, 5), beside(3, 5, 4), beside(3, 2, 4), (1, 1, 1), (2, 12)),
    "columns of B apart": (zeros(2, 5), zeros(3, 5, 4), beside(3, 2, 4), (1, 1, 3), (2, 4)),
    "columns of C apart": (zeros(2, 5), beside(3, 5, 4), zeros(3, 2, 4), (1, 1, 3), (2, 4)),
    "A of each": (zeros(3, 2, 5), beside(3, 5, 4), beside(3, 2, 4), (1, 1, 3), (2, 4)),
    "two dimensions as one": (zeros(2, 3, 2, 5), zeros(2, 3, 5, 4), zeros(2, 3, 2, 4), (1, 1, 6), (2, 4)),
    "gaps of A": (zeros(2, 4, 2, 5)[:, :3], zeros(2, 3, 5, 4), zeros(2, 3, 2, 4), (1, 2, 3), (2, 4)),
    "gaps of B": (zeros(2, 3, 2, 5), zeros(2, 4, 5, 4)[:, :3], zeros(2, 3, 2, 4), (1, 2, 3), (2, 4)),
    "gaps of C": (zeros(2, 3, 2, 5), zeros(2, 3, 5, 4), zeros(2, 4, 2, 4)[:, :3], (1, 2, 3), (2, 4)),
    "a row each": (gaps(3, 1, 5), zeros(5, 4), gaps(3, 1, 4), (1, 1, 1), (3, 4)),
    "a column each": (zeros(2, 5), zeros(3, 5, 2)[:, :, :1], zeros(3, 2, 4)[:, :, :1], (1, 1, 1), (2, 3)),
}


@pytest.mark.parametrize("case", APART)
def test_batch_is_folded_only_if_all_operands_allow_it(case):
    a, b, c, extents, (m, n) = APART[case]
    rng = np.random.default_rng(0)
    for x in (a, b):
        x[...] = rng.integers(-4, 5, x.shape)
    kind = host.HostArrays()
    places = [kind.describe("x", array, None) for array in (a, b, c)]
    ((x, y, z, batch),) = batches.products(*places, 0, at_once=3, fold=True)
    assert batch.extents == extents
    assert (z.rows, z.cols) == (x.rows, y.cols) == (m, n)
    for index in np.ndindex(batch.extents):
        one, other, result = (
            as_numpy(replace(matrix, pointer=matrix.pointer + int(np.dot(index, steps))))
            for matrix, steps in ((x, batch.a), (y, batch.b), (z, batch.c))
        )
        result[...] = one @ other
    np.testing.assert_array_equal(c, a @ b)


# ------------------------------------------------------------------------- protocols, without a GPU to speak them to


class Interfaced:
    def __init__(self, **interface):
        self.__cuda_array_interface__ = {
            "shape": (2, 3),
            "typestr": "<f4",
            "data": (4096, False),
            "version": 3,
        } | interface


@pytest.fixture
def on_device_seven(monkeypatch):
    monkeypatch.setattr(protocols, "pointer_device", lambda name, pointer: 7)


@pytest.mark.parametrize(
    ("interface", "expected"),
    [
        ({}, {"strides": (12, 4), "pointer": 4096, "device": 7, "stream": None, "readonly": False}),
        ({"strides": None, "stream": None}, {"strides": (12, 4), "stream": None}),
        ({"strides": (-4, 32)}, {"strides": (-4, 32)}),
        ({"stream": 1}, {"stream": streams.Stream(1)}),
        ({"data": (8192, True)}, {"pointer": 8192, "readonly": True}),
        ({"typestr": "<f8"}, {"dtype": "float64", "strides": (24, 8)}),
        ({"typestr": ">f4"}, {"dtype": ">f4"}),
        ({"shape": (0, 3), "data": (0, False)}, {"device": None, "shape": (0, 3)}),
        ({"shape": (5,)}, {"shape": (5,), "strides": (4,)}),
    ],
)
@pytest.mark.usefixtures("on_device_seven")
def test_cuda_array_interface(interface, expected):
    described = protocols.CudaArrayInterface().describe("a", Interfaced(**interface), None)
    assert {name: getattr(described, name) for name in expected} == expected


@pytest.mark.usefixtures("on_device_seven")
def test_masked_interface_is_refused():
    with pytest.raises(TypeError, match=r"a has a mask; expected .* without one; pass"):
        protocols.CudaArrayInterface().describe("a", Interfaced(mask=Interfaced()), None)


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("view", [np.asarray, np.transpose, lambda x: x[::-1, 1::2]])
def test_dlpack_capsules(versioned, view):
    array = view(filled(4, 6))
    exported = Exported(array, (2, 0), versioned)
    described = protocols.Dlpack().describe("a", exported, None)
    assert (described.shape, described.strides) == (array.shape, array.strides)
    assert described.pointer == array.ctypes.data
    assert described.dtype == "float32"
    assert not described.readonly
    assert exported.streams == [1], "the legacy default stream is 1 in DLPack"
    protocols.Dlpack().describe("a", exported, streams.Stream(77))
    assert exported.streams == [1, 77]


def test_dlpack_read_only_and_dtypes():
    describe_dlpack = protocols.Dlpack().describe
    assert describe_dlpack("a", Exported(frozen(filled(2, 2)), (2, 0)), None).readonly
    assert describe_dlpack("a", Exported(np.zeros((2, 2), np.int16), (2, 0)), None).dtype == "int16"
    assert describe_dlpack("a", Exported(np.zeros((2, 2), complex), (13, 0)), None).dtype == "complex128"


def test_dlpack_memory_lives_as_long_as_the_operand():
    array = filled(2, 2)
    alive = weakref.ref(array)
    described = protocols.Dlpack().describe("a", Exported(array, (2, 0)), None)
    del array
    gc.collect()
    assert alive() is not None
    del described
    gc.collect()
    assert alive() is None


@pytest.mark.simulator
@pytest.mark.parametrize("array", [Interfaced(), Exported(A, (2, 0))])
def test_device_memory_is_out_of_the_simulators_reach(array):
    with pytest.raises(
        TypeError,
        match=r"b is an array in device memory, .* expected a NumPy or Numba array; pass a NumPy copy",
    ):
        tiled_sgemm(A, array)


def test_dtype_that_numpy_lacks():
    class Bfloat16:
        dtype = "bfloat16"

        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **_):
            raise BufferError("Unsupported dtype in DLTensor.")

    with pytest.raises(TypeError, match=r"b is of type .*Bfloat16 and dtype bfloat16, .*; convert b to float32"):
        tiled_sgemm(A, Bfloat16())


@pytest.mark.simulator
def test_cupy_is_out_of_the_simulators_reach(monkeypatch):
    class FakeCupyArray:
        __qualname__ = "ndarray"

    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(ndarray=FakeCupyArray))
    with pytest.raises(TypeError, match=r"a is an array in device memory, of type ndarray, .*; pass a NumPy copy"):
        tiled_sgemm(FakeCupyArray(), B)


class FakeTensor:
    """The attributes of a PyTorch tensor that are read before its memory.

    `address` is an exception if PyTorch raises one; `tangent` is what `unpack_dual` returns.
    """

    is_nested = is_quantized = requires_grad = neg = inference = False
    layout, dtype, shape, address, tangent = "strided", "float32", (3, 4), 4096, None

    def __init__(self, device="cuda", **attributes):
        self.device = types.SimpleNamespace(type=device, index=0)
        vars(self).update(attributes)

    @property
    def is_cuda(self):
        return self.device.type == "cuda"

    def get_device(self):
        return self.device.index

    def is_neg(self):
        return self.neg

    def is_inference(self):
        return self.inference

    def stride(self):
        return (4, 1)

    def element_size(self):
        return 4

    def data_ptr(self):
        if isinstance(self.address, Exception):
            raise self.address
        if self.layout != "strided":  # as PyTorch, of every layout that has no storage
            raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")
        return self.address


class AbstractTensor(FakeTensor):
    """A tensor made under PyTorch's FakeTensorMode."""

    address = AssertionError("the address of a tensor without data was read")


@pytest.fixture
def fake_torch(monkeypatch):
    def unpack_dual(x):
        assert not torch.below_autograd, "PyTorch reads no tangent there"
        return types.SimpleNamespace(tangent=x.tangent)

    torch = types.SimpleNamespace(
        Tensor=FakeTensor,
        strided="strided",
        float32="float32",
        is_grad_enabled=lambda: torch.grad_mode,
        grad_mode=True,
        below_autograd=False,
        autograd=types.SimpleNamespace(forward_ad=types.SimpleNamespace(unpack_dual=unpack_dual)),
        _C=types.SimpleNamespace(
            DispatchKey=types.SimpleNamespace(AutogradFunctionality="autograd"),
            _dispatch_tls_is_dispatch_key_excluded=lambda key: torch.below_autograd,
        ),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    fake_tensor = types.SimpleNamespace(FakeTensor=AbstractTensor)
    monkeypatch.setitem(sys.modules, "torch._subclasses.fake_tensor", fake_tensor)
    monkeypatch.setattr(arrays, "KINDS", (host.HostArrays(), torch_tensors.TorchTensors()))  # as on a GPU
    return torch


@pytest.mark.simulator
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_tensors_are_out_of_the_simulators_reach(monkeypatch, device):
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(Tensor=FakeTensor))
    with pytest.raises(TypeError) as caught:
        tiled_sgemm(A, FakeTensor(device))
    for words in ("b is a PyTorch tensor on device", device, "simulator; expected a NumPy", "b.detach().cpu().numpy()"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("tensor", "error", "words"),
    [
        (
            {"device": "cpu"},
            TypeError,
            ["on the CPU", "expected one on a CUDA device", "a.cuda()", "a.detach().numpy()"],
        ),
        ({"requires_grad": True}, ValueError, ["requires grad", "grad mode", "torch.no_grad()", "a.detach()"]),
        ({"tangent": "a tensor"}, ValueError, ["forward-mode tangent", "no derivative", "a.detach()"]),
        ({"neg": True}, ValueError, ["negation", "expected", "a.resolve_neg()"]),
        ({"layout": "sparse_coo"}, TypeError, ["layout sparse_coo", "expected layout torch.strided", "a.to_dense()"]),
        ({"device": "xpu"}, TypeError, ["device", "expected", "a.cuda()"]),
        (
            {"device": "meta", "address": KeyError()},
            TypeError,
            ["a is a meta tensor, which has no data", "a real tensor"],
        ),
        ({"is_nested": True}, TypeError, ["a is a nested tensor", "expected", "to_padded_tensor(a, 0.0)"]),
        ({"is_quantized": True}, TypeError, ["a is a quantized tensor", "expected dtype", "a.dequantize()"]),
        (
            {"address": 0},
            TypeError,
            ["without memory of its own, of type FakeTensor", "expected a plain tensor", "pass"],
        ),
        ({"address": RuntimeError()}, TypeError, ["without memory of its own", "expected a plain tensor", "pass"]),
    ],
)
@pytest.mark.usefixtures("fake_torch")
def test_tensors_that_are_refused(tensor, error, words):
    with pytest.raises(error) as caught:
        tiled_sgemm(FakeTensor(**tensor), B)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("kind", [torch_tensors.TorchTensors(), arrays.TensorsOutOfReach()])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.usefixtures("fake_torch")
def test_fake_tensors_are_refused_by_name(kind, device):
    with pytest.raises(TypeError, match=r"out is a fake tensor, which has no data; expected .*; pass a real tensor"):
        kind.describe("out", AbstractTensor(device), None)


def test_tensors_that_require_grad_are_accepted_without_grad_mode(fake_torch):
    fake_torch.grad_mode = False
    assert describe("a", FakeTensor(requires_grad=True), None).pointer == 4096


def test_tangents_are_not_read_below_autograd(fake_torch):
    """As in a dispatch mode inside `torch.func.jvp`: PyTorch has computed them from the operator that was replaced."""
    fake_torch.autograd.forward_ad._current_level, fake_torch.below_autograd = 0, True
    assert describe("a", FakeTensor(), None).pointer == 4096


@pytest.mark.usefixtures("fake_torch")
def test_tensors_that_are_accepted():
    assert describe("a", FakeTensor(shape=(0, 4), address=0), None).pointer == 0
    described = describe("a", FakeTensor(), None)
    assert isinstance(described.kind, torch_tensors.TorchTensors)
    assert (described.shape, described.strides, described.pointer, described.device) == ((3, 4), (16, 4), 4096, 0)


# -------------------------------------------------------------------------------------------------------- streams


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (np.uint64(9), 9),
        (types.SimpleNamespace(cuda_stream=5), 5),
        (types.SimpleNamespace(ptr=6), 6),
        (types.SimpleNamespace(handle=ctypes.c_void_p(7)), 7),
        (types.SimpleNamespace(handle=ctypes.c_void_p(None)), 0),
        (types.SimpleNamespace(__cuda_stream__=lambda: (0, 8)), 8),
        (types.SimpleNamespace(__cuda_stream__=(0, 8), ptr=3), 8),
    ],
)
def test_stream_handles(stream, handle):
    read = streams.Stream.of(stream)
    assert read.handle == handle
    assert isinstance(stream, int | np.integer) or read.owner is stream, "nothing keeps the stream alive"


def test_same_stream():
    one = streams.Stream
    assert one(0).same(one(1))
    assert one(5).same(one(5, object()))
    assert not one(2).same(one(0))
    assert not one(5).same(one(6))


def test_zero_may_be_the_threads_stream(monkeypatch):
    """As it is with CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM=1."""
    monkeypatch.setattr(streams, "zero_is_per_thread", lambda: True)
    one = streams.Stream
    assert one(0).same(one(2))
    assert not one(0).same(one(1))


# --------------------------------------------------------------------------------- the driver, with a stand-in for it


class HostDriver:
    """Stand-in for the driver that copies within host memory, and records all other calls."""

    def __init__(self, blocking=(), capturing=()):
        self.asked: list[tuple] = []
        self.allocations: dict[int, np.ndarray] = {}
        self.blocking, self.capturing = blocking, capturing
        self.finished: set[int] = set()

    def __call__(self, function, *arguments):
        """Stand-in for `numba_gemm.runtime.driver.call`."""
        return getattr(self, function.__name__)(*arguments)

    @contextlib.contextmanager
    def scope(self, device):
        yield

    def cuInit(self, flags):
        """Do nothing: this driver needs no start."""

    def cuMemAlloc(self, size):
        memory = np.full(size // 4, np.nan, np.float32)
        self.allocations[memory.ctypes.data] = memory
        return memory.ctypes.data

    def cuMemFree(self, pointer):
        del self.allocations[pointer]

    def cuMemcpyHtoDAsync(self, target, source, size, stream):
        self.asked.append(("upload", stream))
        assert size == self.allocations[target].nbytes
        ctypes.memmove(target, source, size)

    def cuMemcpyDtoHAsync(self, target, source, size, stream):
        self.asked.append(("download", stream))
        assert size == self.allocations[source].nbytes
        ctypes.memmove(target, source, size)

    def cuStreamSynchronize(self, stream):
        self.asked.append(("synchronize", stream))

    def cuStreamIsCapturing(self, stream):
        status = driver.CUstreamCaptureStatus
        active, none = status.CU_STREAM_CAPTURE_STATUS_ACTIVE, status.CU_STREAM_CAPTURE_STATUS_NONE
        return active if stream in self.capturing else none

    def cuStreamGetFlags(self, stream):
        return 0 if stream in self.blocking else 1

    def cuEventCreate(self, flags):
        return 1000 + sum(one[0] == "record" for one in self.asked)

    def cuEventRecord(self, event, stream):
        self.asked.append(("record", stream))

    def cuStreamWaitEvent(self, stream, event, flags):
        self.asked.append(("wait", stream))

    def cuEventDestroy(self, event):
        self.asked.append(("destroy", event))

    def cuThreadExchangeStreamCaptureMode(self, mode):
        return mode

    def query(self, event):
        results = driver.CUresult
        return (results.CUDA_SUCCESS if event in self.finished else results.CUDA_ERROR_NOT_READY,)


@pytest.fixture
def host_driver(monkeypatch):
    stand_in = HostDriver()
    monkeypatch.setattr(driver_module, "call", stand_in)
    for module in (host, streams):
        monkeypatch.setattr(module, "call", stand_in)
        monkeypatch.setattr(module, "device_scope", stand_in.scope)
    monkeypatch.setattr(driver, "cuEventQuery", stand_in.query)
    return stand_in


def as_numpy(place: Operand | Matrix) -> np.ndarray:
    if isinstance(place, Matrix):
        place = operand(place.pointer, (place.rows, place.cols), (place.row_stride, place.col_stride))
    return operand_module.addresses(place)


@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("layout", [*LAYOUTS, *REPEATING])
def test_host_arrays_travel_to_the_device_and_back(host_driver, layout, beta):
    lay_out = (LAYOUTS | REPEATING)[layout]
    a, b, c = lay_out(filled(5, 3)), lay_out(filled(3, 4)), filled(5, 4, seed=1)
    out = LAYOUTS.get(layout, np.array)(c.copy())
    kind = host.HostArrays()
    left, right, target = (kind.describe(name, array, None) for name, array in {"a": a, "b": b, "out": out}.items())
    vector = filled(4, 2)[::-1, 1]
    with product(kind, left, right, target, reads_out=beta != 0, vectors=[kind.describe("v", vector, None)]) as done:
        x, y, z, v = map(as_numpy, (done.a, done.b, done.c, *done.vectors))
        assert np.isnan(z).all() or beta
        assert np.array_equal(v, vector)
        z[...] = x @ y + (beta * z if beta else 0)
        assert done.result is out
    check(out, a, b, beta=beta, c=c)
    assert not host_driver.allocations, "device memory was left behind"
    assert host_driver.asked[-2:] == [("download", 2), ("synchronize", 2)]
    assert ("upload", 2) in host_driver.asked


def test_host_arrays_free_device_memory_after_an_error(host_driver):
    kind = host.HostArrays()
    left, right = (kind.describe("a", filled(3, 3), None) for _ in "ab")

    def launch_and_fail():
        with product(kind, left, right, stream=streams.Stream(9)) as done:
            assert len(host_driver.allocations) == 3
            assert done.stream.handle == 9
            raise KeyError("launch")

    with pytest.raises(KeyError, match="launch"):
        launch_and_fail()
    assert not host_driver.allocations


def test_operands_that_are_not_read_do_not_travel(host_driver):
    kind = host.HostArrays()
    left, right = (
        kind.describe("a", filled(3, 4), None).emptied(1),
        kind.describe("b", filled(4, 2), None).emptied(0),
    )
    with product(kind, left, right) as done:
        assert (done.a.shape, done.b.shape) == ((3, 0), (0, 2))
        as_numpy(done.c)[...] = 0
    assert [what for what, _ in host_driver.asked] == ["download", "synchronize"]


# Handles 5 and 6 follow the default stream; 15 and 16 do not; 7 and 17 are being captured.
@pytest.mark.parametrize(
    ("stream", "producer", "waits"),
    [
        (15, 16, True),
        (5, 6, True),
        (5, 16, True),
        (15, 15, False),
        (0, 1, False),
        (5, 0, False),
        (0, 5, False),
        (2, 0, False),
        (15, 0, True),
        (0, 15, True),
        (15, 2, True),
        (17, 16, False),
        (7, 0, False),
        (16, 17, True),
    ],
)
def test_streams_wait_where_nothing_else_orders_them(host_driver, stream, producer, waits):
    host_driver.blocking, host_driver.capturing = (5, 6, 7), (7, 17)
    streams.wait_for(streams.Stream(stream), streams.Stream(producer), 0)
    expected = [("record", producer), ("wait", stream), ("destroy", 1000)] if waits else []
    assert host_driver.asked == expected


@pytest.mark.parametrize(
    ("stream", "producer", "waits"),
    [(5, 0, True), (0, 5, True), (5, 1, False), (0, 1, False), (1, 0, False), (0, 2, False), (15, 0, True)],
)
def test_streams_wait_for_the_threads_stream(host_driver, monkeypatch, stream, producer, waits):
    """If 0 means the thread's stream, only the legacy default stream orders it with others."""
    monkeypatch.setattr(streams, "zero_is_per_thread", lambda: True)
    host_driver.blocking = (5,)
    streams.wait_for(streams.Stream(stream), streams.Stream(producer), 0)
    assert [what for what, _ in host_driver.asked] == ["record", "wait", "destroy"] * waits


def test_the_threads_stream_may_be_captured(host_driver, monkeypatch):
    host_driver.capturing = (0,)
    assert not streams.is_capturing(streams.Stream(0))
    monkeypatch.setattr(streams, "zero_is_per_thread", lambda: True)
    assert streams.is_capturing(streams.Stream(0))


def test_objects_are_held_until_their_stream_is_done(host_driver):
    class Thing:
        pass

    def hold(handle: int) -> weakref.ref:
        thing = Thing()
        streams.hold(streams.Stream(handle), 0, [thing])
        return weakref.ref(thing)

    first, second, captured = hold(15), hold(16), None
    host_driver.capturing = (17,)
    captured = hold(17)
    assert captured() is None, "held for a graph, which has no end"
    assert streams.release_finished() == 2
    assert first() is not None
    assert second() is not None
    host_driver.finished = {1001}
    assert streams.release_finished() == 1
    assert first() is not None
    assert second() is None
    host_driver.finished = {1000}
    hold(15)
    assert first() is None
    host_driver.finished = {1000, 1001, 1002}
    assert streams.release_finished() == 0


def test_every_product_lets_go_of_what_is_done(host_driver, monkeypatch):
    """Calls that hold nothing themselves release them, too."""
    monkeypatch.setattr(streams, "wait_for", lambda *_: None)
    monkeypatch.setattr(streams, "held", deque())  # so that a failure does not affect other tests
    of_numpy, of_a_library = host.HostArrays(), DeviceArrays([], 5)
    operands = {
        of_numpy: [of_numpy.describe("a", filled(2, 2), None), of_numpy.describe("b", filled(2, 2), None)],
        of_a_library: [of_a_library.describe("a", "a", None), of_a_library.describe("b", "b", None)],
    }
    for kind, (a, b) in operands.items():
        streams.hold(streams.Stream(15), 0, [object()])
        (event,) = (event for _, event, _ in streams.held)
        host_driver.finished = {event}
        with product(kind, a, b):
            assert not streams.held


@pytest.mark.parametrize(
    ("stream", "followed", "told"),
    [(0, [0], False), (1, [0], False), (15, [0], True), (15, [15], False), (15, [15, 0], True)],
)
def test_tensors_are_recorded_on_another_stream(fake_torch, stream, followed, told):
    recorded = []
    fake_torch.cuda = types.SimpleNamespace(
        ExternalStream=lambda handle, device: (handle, device), default_stream=lambda device: (0, device)
    )
    tensor = FakeTensor()
    tensor.record_stream = recorded.append
    kind = torch_tensors.TorchTensors()
    kind.keep([kind.describe("a", tensor, None)], 3, streams.Stream(stream), [streams.Stream(one) for one in followed])
    assert recorded == ([(15, 3)] if told else [])


@pytest.mark.parametrize(
    ("old", "inference", "given", "raised"),
    [(False, False, True, 1), (False, False, False, 0), (False, True, True, 0), (True, False, True, 0)],
    ids=["out", "no out", "out made in inference mode", "old PyTorch"],
)
def test_version_of_a_tensor_that_was_given_is_raised(fake_torch, monkeypatch, old, inference, given, raised):
    """Otherwise autograd would take a saved tensor for unchanged."""
    seen = []
    graph = types.SimpleNamespace() if old else types.SimpleNamespace(increment_version=seen.append)
    fake_torch.autograd.graph = graph
    fake_torch.empty = lambda shape, **_: FakeTensor()
    fake_torch.cuda = types.SimpleNamespace(current_stream=lambda device: types.SimpleNamespace(cuda_stream=0))
    kind, out = torch_tensors.TorchTensors(), FakeTensor(inference=inference)
    a, b = kind.describe("a", FakeTensor(), None), kind.describe("b", FakeTensor(), None)
    target = kind.describe("out", out, None) if given else None
    with product(kind, a, b, target):
        assert not seen
    assert seen == [out] * raised


@pytest.mark.parametrize("kind", [libraries.NumbaArrays(), protocols.CudaArrayInterface(), protocols.Dlpack()])
@pytest.mark.parametrize(
    ("bound", "order"),
    [([0, 7, 5], [7, 5, 0]), ([1, 7, 0], [7, 1, 0]), ([None, 0, 7], [7, 0]), ([None, 0], [0]), ([None, None], [0])],
)
def test_products_run_on_the_first_bound_stream(kind, bound, order):
    operands = [operand() for _ in bound]
    for described, handle in zip(operands, bound, strict=True):
        described.stream = None if handle is None else streams.Stream(handle)
    found = kind.streams(operands, 0)
    assert list(dict.fromkeys(stream.handle for stream in found)) == order


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_public_function_through_copies(host_driver, monkeypatch, beta):
    """As on a GPU: C is copied to the device only if it is read."""

    def launched(product, selected, alpha, a, b, beta, c, *_):
        x, y, z = map(as_numpy, (a, b, c))
        assert np.isnan(z).all() == (beta == 0)
        z[...] = alpha * (x @ y) + (beta * z if beta else 0)
        return []

    monkeypatch.setattr(arrays, "KINDS", (host.HostArrays(),))
    monkeypatch.setattr(launching, "launch_product", launched)
    a, b, c = filled(5, 3), filled(3, 4), filled(5, 4, seed=1)
    out = c.copy()
    assert tiled_sgemm(a, b, out, alpha=2, beta=beta) is out
    check(out, a, b, alpha=2, beta=beta, c=c)
    kept, out = c.copy(), np.full((5, 4), np.nan, np.float32)
    assert tiled_sgemm(a, b, out, alpha=2, beta=beta, c=kept) is out
    check(out, a, b, alpha=2, beta=beta, c=c)
    assert np.array_equal(kept, c)


@pytest.mark.parametrize("shapes", [((3,), (3, 4)), ((5, 3), (3,)), ((2, 5, 3), (3,)), ((3,), (3,))], ids=str)
@pytest.mark.parametrize("given", [True, False])
def test_vectors_through_copies(host_driver, monkeypatch, shapes, given):
    def launched(product, selected, alpha, a, b, beta, c, *_):
        steps = product.batch.a[-1], product.batch.b[-1], product.batch.c[-1]
        for i in range(product.batch.matrices):
            x, y, z = (as_numpy(replace(one, pointer=one.pointer + i * step)) for one, step in zip((a, b, c), steps))
            z[...] = x @ y
        return []

    monkeypatch.setattr(arrays, "KINDS", (host.HostArrays(),))
    monkeypatch.setattr(launching, "launch_product", launched)
    a, b = (np.float32(np.random.default_rng(0).uniform(-1, 1, shape)) for shape in shapes)
    expected = a @ b
    out = np.zeros(expected.shape[::-1], np.float32).T if given else None
    result = tiled_sgemm(a, b, out)
    assert result.shape == expected.shape
    np.testing.assert_allclose(result, expected, atol=1e-5)


@pytest.mark.simulator
@pytest.mark.parametrize("shape", [(5, 4), (4,), (5, 1), ()], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_c_is_copied_by_numba_to_addresses_behind_the_first(monkeypatch, layout, shape):
    class Assigned:
        def __init__(self, interface):
            self.array = operand_module.at_address(None, interface["data"][0], interface["shape"], interface["strides"])

        def setitem(self, key, value, stream):
            assert min(self.array.strides) > 0
            assert key == ()  # Numba's arrays on a GPU take no Ellipsis
            self.array[key] = value.array

    monkeypatch.setattr(cuda, "from_cuda_array_interface", Assigned, raising=False)
    source = np.float32(np.random.default_rng(0).uniform(-1, 1, shape))[..., ::-1] if shape else np.float32([3])[0:1]
    target = LAYOUTS[layout](np.zeros((5, 4), np.float32))
    places = [operand(x.ctypes.data, x.shape, x.strides) for x in (source, target)]
    protocols.Dlpack().copy(*places, 0, streams.DEFAULT)
    assert np.array_equal(target, np.broadcast_to(source, (5, 4)))


class DeviceArrays(ArrayKind):
    """A library that records its calls, in order."""

    def __init__(self, log, *following):
        self.log, self.following = log, [streams.Stream(handle) for handle in following]

    def describe(self, name, array, stream):
        return Operand(name, self, array, "float32", (2, 2), (8, 4), 4096, 0)

    def streams(self, operands, device):
        return self.following

    def empty(self, shape, device, stream):
        self.log.append(("empty", stream.handle))
        return self.describe("out", "result", stream)


WAITS = {stream: [("wait", stream, 5), ("wait", stream, 6)] for stream in (5, 6, 9)}


@pytest.mark.parametrize(
    ("following", "given", "out", "log"),
    [
        ((5, 5), None, None, [("empty", 5), ("wait", 5, 5), ("wait", 5, 5), ("product", 5)]),
        ((0, 1), None, None, [("empty", 0), ("wait", 0, 0), ("wait", 0, 1), ("product", 0)]),
        # Memory of one stream may be reused as soon as that stream is done, whichever of the two runs the product.
        ((5, 6), None, None, [("empty", 5), *WAITS[5], ("product", 5), ("hold", 5, ["a", "b", "result"])]),
        ((5, 6), 6, "out", [*WAITS[6], ("product", 6), ("hold", 6, ["a", "b", "out"])]),
        ((5, 6), 9, "out", [*WAITS[9], ("product", 9), ("hold", 9, ["a", "b", "out"])]),
        ((5, 6), 9, None, [("empty", 9), *WAITS[9], ("product", 9), ("hold", 9, ["a", "b", "result"])]),
    ],
)
def test_device_products_are_ordered_and_kept(monkeypatch, following, given, out, log):
    asked = []
    monkeypatch.setattr(
        streams, "wait_for", lambda stream, producer, device: asked.append(("wait", stream.handle, producer.handle))
    )
    monkeypatch.setattr(streams, "hold", lambda stream, device, objects: asked.append(("hold", stream.handle, objects)))
    kind = DeviceArrays(asked, *following)
    a, b = kind.describe("a", "a", None), kind.describe("b", "b", None)
    target = None if out is None else kind.describe("out", out, None)
    stream = None if given is None else streams.Stream(given)
    with product(kind, a, b, target, stream=stream) as done:
        asked.append(("product", done.stream.handle))
        assert done.result == out or (out is None and done.result == "result")
    assert asked == log


def test_protocols_mix_with_numba_and_are_kept(monkeypatch):
    held = []
    monkeypatch.setattr(streams, "hold", lambda stream, device, objects: held.append(objects))
    numba, interface, dlpack = libraries.NumbaArrays(), protocols.CudaArrayInterface(), protocols.Dlpack()
    assert numba.family == interface.family == dlpack.family != libraries.CupyArrays().family
    own, other = operand(), operand()
    own.kind, own.array, other.kind, other.array = numba, "own", dlpack, "other"
    numba.keep([own, own, own], 0, streams.DEFAULT, [streams.DEFAULT, streams.Stream(1)])
    assert not held
    numba.keep([own, other, own], 0, streams.DEFAULT, [streams.DEFAULT])
    dlpack.keep([other, own], 0, streams.DEFAULT, [streams.DEFAULT])
    assert held == [["own", "other", "own"], ["other", "own"]]


def test_dlpack_by_the_letter():
    """A capsule as other producers create it: without strides, and with an offset before the elements."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    shape = (ctypes.c_int64 * 2)(3, 5)
    place = protocols._DlpackDevice(kind=2, index=4)
    tensor = protocols._DlpackTensor(
        data=4096, device=place, ndim=2, code=2, bits=32, lanes=1, shape=shape, strides=None, byte_offset=256
    )
    capsule = new(ctypes.addressof(tensor), b"dltensor", None)

    class Producer:
        def __dlpack_device__(self):
            return (2, 4)

        def __dlpack__(self, *, stream):
            return capsule

    described = protocols.Dlpack().describe("a", Producer(), None)
    assert (described.pointer, described.shape, described.strides) == (4352, (3, 5), (20, 4))
    assert (described.device, described.dtype) == (4, "float32")
    tensor.bits, tensor.code, tensor.lanes = 16, 4, 2
    assert protocols.Dlpack().describe("a", Producer(), None).dtype == "bfloat16x2"


def test_dlpack_of_another_major_version_is_refused():
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    managed = protocols._DlpackVersioned(major=2, minor=0)
    with pytest.raises(TypeError, match=r"version 2\.0; expected version 0 or 1"):
        protocols.Dlpack._tensor(new(ctypes.addressof(managed), b"dltensor_versioned", None))
