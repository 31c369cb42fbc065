"""Array libraries on a GPU: arrays, streams, allocators, devices and threads.

Many of these tests let a stream wait for a word in the host's memory. They then do something on the host that would go
wrong if the product did not wait for that stream, or ran on another one. Each asserts that the stream was still
occupied at that time, since otherwise the test would prove nothing, and lets it go on.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import subprocess
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cuda.bindings import driver
from numba import cuda
from support.operands import NAN, check, filled

from numba_gemm import explain, plan, stages, tiled_sgemm
from numba_gemm.arrays import Copies, streams
from numba_gemm.arrays.streams import cupy_stream
from numba_gemm.gemm import fast_path
from numba_gemm.gemm import product as products
from numba_gemm.models.accuracy import compare, reference
from numba_gemm.runtime import device as devices
from numba_gemm.runtime.driver import call, device_scope
from numba_gemm.runtime.workspace import Workspaces

pytestmark = pytest.mark.gpu

HOLD_SECONDS = 10.0  # after which a stream is let go even if a test waits for it by mistake


# ------------------------------------------------------------------------------------------------ holding streams up


IDLE: list[int] = []  # streams that no test uses
HELD: dict[int, Callable[[], None]] = {}  # streams that wait: handle, and function that lets one go on


@pytest.fixture
def hold_up():
    """Occupy a stream, given as its handle, until `busy` has been asked about it."""
    words = cuda.mapped_array(16, np.int32)
    words[:] = 0
    address = int(call(driver.cuMemHostGetDevicePointer, words.ctypes.data, 0))
    timers: list[threading.Timer] = []

    def occupy(handle: int) -> None:
        place = len(timers)
        call(driver.cuStreamWaitValue32, handle, address + 4 * place, 1, 0)  # until the word is at least 1
        HELD[handle] = functools.partial(words.__setitem__, place, 1)
        timers.append(threading.Timer(HOLD_SECONDS, HELD[handle]))
        timers[-1].daemon = True
        timers[-1].start()

    yield occupy
    for timer in timers:
        timer.cancel()
    words[:] = 1
    HELD.clear()
    cuda.synchronize()
    assert streams.release_finished() == 0, "something is still held for a stream that is done"


def busy(handle: int) -> bool:
    """Return whether a stream is occupied, and let it go on if it is held up."""
    (status,) = driver.cuStreamQuery(handle)
    HELD.pop(handle, lambda: None)()
    return status == driver.CUresult.CUDA_ERROR_NOT_READY


@contextlib.contextmanager
def new_stream():
    """Return the handle of a stream that does not synchronise with the default stream.

    It is never destroyed, since PyTorch's allocator queries the streams that a tensor was used on when it is freed.
    Other tests use it again: the GPU's queues are few, and streams of one queue wait for each other.
    """
    cuda.current_context()  # a test may be the first of its process
    handle = IDLE.pop() if IDLE else int(call(driver.cuStreamCreate, int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))
    try:
        yield handle
    finally:
        call(driver.cuStreamSynchronize, handle)
        IDLE.append(handle)


# --------------------------------------------------------------------------------------------------------- libraries


def imported(name: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings that other libraries raise when they are imported
        return pytest.importorskip(name)


class Cupy:
    """The functions of CuPy that the tests need."""

    def __init__(self):
        self.module = imported("cupy")
        self.array = self.module.ndarray

    def put(self, x, device=0):
        with self.module.cuda.Device(device):
            return self.module.array(x, order="C")

    def get(self, x):
        cuda.synchronize()
        return self.module.asnumpy(x)

    def full(self, shape, value):
        return self.module.full(shape, value, self.module.float32)

    def repeat_rows(self, row, count):
        return self.module.broadcast_to(row, (count, row.shape[1]))

    @contextlib.contextmanager
    def current(self, handle):
        with cupy_stream(self.module, handle):
            yield

    def copy_into(self, target, source):
        target[...] = source

    def device_of(self, x):
        return x.device.id

    def current_device(self):
        return self.module.cuda.runtime.getDevice()


class Torch:
    def __init__(self):
        self.module = imported("torch")
        if not self.module.cuda.is_available():
            pytest.skip("this PyTorch has no CUDA")
        self.array = self.module.Tensor

    def put(self, x, device=0):
        return self.module.from_numpy(np.array(x, order="C")).to(f"cuda:{device}")

    def get(self, x):
        self.module.cuda.synchronize()
        return x.cpu().numpy()

    def full(self, shape, value):
        return self.module.full(shape, float(value), dtype=self.module.float32, device="cuda")

    def repeat_rows(self, row, count):
        return row.expand(count, -1)

    @contextlib.contextmanager
    def current(self, handle):
        with self.module.cuda.stream(self.module.cuda.ExternalStream(handle)):
            yield

    def copy_into(self, target, source):
        target.copy_(source)

    def device_of(self, x):
        return x.device.index

    def current_device(self):
        return self.module.cuda.current_device()


LIBRARIES = {"cupy": Cupy, "torch": Torch}


@pytest.fixture(params=LIBRARIES)
def library(request):
    return LIBRARIES[request.param]()


class Interface:
    """Only ``__cuda_array_interface__``; keeps `owner` alive."""

    def __init__(self, owner, stream=None):
        described = owner.__cuda_array_interface__
        self.owner = owner
        self.__cuda_array_interface__ = described | {"stream": stream, "version": 3}


class Dlpack:
    """Only DLPack."""

    def __init__(self, owner):
        self.owner = owner

    def __dlpack_device__(self):
        return self.owner.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.owner.__dlpack__(**options)


# Views of a library's array with the elements of x.
LAYOUTS = {
    "rows": lambda library, x: library.put(x),
    "columns": lambda library, x: library.put(x.T).T,
    "every other row": lambda library, x: library.put(np.repeat(x, 2, axis=0))[::2],
    "every third column": lambda library, x: library.put(np.repeat(x, 3, axis=1))[:, ::3],
    "off by one": lambda library, x: library.put(np.pad(x, ((1, 1), (1, 2)), constant_values=NAN))[1:-1, 1:-2],
}


@pytest.mark.parametrize("shape", [(64, 96, 32), (65, 97, 33)])
@pytest.mark.parametrize("b_layout", LAYOUTS)
@pytest.mark.parametrize("a_layout", LAYOUTS)
def test_layouts(library, a_layout, b_layout, shape):
    m, n, k = shape
    a, b, c = filled(m, k), filled(k, n), filled(m, n, seed=1)
    left, right = LAYOUTS[a_layout](library, a), LAYOUTS[b_layout](library, b)
    result = tiled_sgemm(left, right)
    assert isinstance(result, library.array)
    check(library.get(result), a, b)
    out = LAYOUTS[a_layout](library, c)
    assert tiled_sgemm(left, right, out, alpha=-2, beta=0.5) is out
    check(library.get(out), a, b, alpha=-2, beta=0.5, c=c)


@pytest.mark.parametrize("precision", ["ieee", "bf16x6", "fp16x3", "tf32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_float16_operands_are_converted(library, layout, precision):
    """The product has the bits of that of float32 copies, which are dense and in the same order."""
    a, b = (x.astype(np.float16) for x in (filled(132, 260), filled(260, 196)))
    copies = LAYOUTS["columns" if layout == "columns" else "rows"]
    wide_a, wide_b = (x.astype(np.float32) for x in (a, b))
    left, right = (LAYOUTS[layout](library, x) for x in (a, b))
    stage = "persistent" if precision == "fp16x3" else explain(left, right, precision=precision).stage
    how = {"precision": precision, "stage": stage}
    result = tiled_sgemm(left, right, **how)
    assert isinstance(result, library.array)
    expected = tiled_sgemm(copies(library, wide_a), copies(library, wide_b), **how)
    np.testing.assert_array_equal(library.get(result), library.get(expected))
    check(library.get(tiled_sgemm(left, copies(library, wide_b))), wide_a, wide_b)


@pytest.mark.parametrize("wrap", [lambda x: x, Dlpack], ids=["own", "dlpack"])
@pytest.mark.parametrize("precision", ["ieee", "bf16x9"])
def test_bfloat16_tensors_are_converted(wrap, precision, checked):
    torch = Torch()
    for turn in range(2):
        a = torch.put(filled(2 * 96, 260, turn).reshape(2, 96, 260)).bfloat16()
        b = torch.put(filled(260, 64, turn)).bfloat16()
        result = tiled_sgemm(wrap(a), wrap(b), precision=precision)
        wide = torch.get(tiled_sgemm(a.float(), b.float(), precision=precision))
        np.testing.assert_array_equal(result.copy_to_host() if wrap is Dlpack else torch.get(result), wide)
    assert len(checked) == (3 if wrap is Dlpack else 2)


def test_captured_product_of_halves():
    torch = Torch()
    a, b = filled(96, 516), filled(516, 64)
    left, right = (torch.put(x).half() for x in (a, b))
    multiply, out = plan(96, 64, 516, dtype="float16", stage="stream_k"), torch.full((96, 64), NAN)
    multiply(left, right, out)
    expected = torch.get(out).copy()
    graph = torch.module.cuda.CUDAGraph()
    with torch.module.cuda.graph(graph):
        multiply(left, right, out)
    out.fill_(NAN)
    graph.replay()
    np.testing.assert_array_equal(torch.get(out), expected)
    check(expected, left.float().cpu().numpy(), right.float().cpu().numpy())


def test_repeated_and_reversed_operands(library):
    a, b = filled(1, 40), filled(40, 50)
    check(library.get(tiled_sgemm(library.repeat_rows(library.put(a), 30), library.put(b))), np.repeat(a, 30, 0), b)
    if isinstance(library, Cupy):
        check(library.get(tiled_sgemm(library.put(a)[:, ::-1], library.put(b)[::-1, ::-1])), a[:, ::-1], b[::-1, ::-1])


def test_empty_operands(library):
    for m, n, k in [(0, 3, 4), (3, 0, 4), (3, 4, 0)]:
        result = tiled_sgemm(library.put(filled(m, k)), library.put(filled(k, n)))
        assert isinstance(result, library.array)
        got = library.get(result)
        assert got.shape == (m, n)
        assert not got.any()


@pytest.mark.parametrize("wrap", [Interface, Dlpack])
def test_protocols_give_numba_arrays(library, wrap):
    a, b, c = filled(33, 17), filled(17, 20), filled(33, 20, seed=1)
    left, right, target = library.put(a), library.put(b), library.put(c)
    library.get(left)
    result = tiled_sgemm(wrap(left), wrap(right))
    assert isinstance(result, type(cuda.device_array((1, 1), np.float32)))
    check(result.copy_to_host(), a, b)
    out = wrap(target)
    assert tiled_sgemm(wrap(left), wrap(right), out, beta=1) is out
    check(library.get(target), a, b, beta=1, c=c)
    # What one product returned can be the out of another.
    assert tiled_sgemm(wrap(left), wrap(right), result, beta=1) is result
    check(result.copy_to_host(), a, 2 * b)
    check(tiled_sgemm(cuda.to_device(a), wrap(right)).copy_to_host(), a, b)


def test_results_of_unknown_libraries_are_their_own():
    torch = Torch()

    class Own(Dlpack):
        def __array_namespace__(self):
            return types.SimpleNamespace(from_dlpack=lambda x: Own(torch.module.from_dlpack(x)))

    a, b = filled(33, 65), filled(65, 17)
    with new_stream() as handle, torch.current(handle):
        for _ in range(3):
            result = tiled_sgemm(Own(torch.put(a)), Own(torch.put(b)))
            assert type(result) is Own
            check(torch.get(result.owner), a, b)
            del result


def test_numba_and_host_memory_of_every_sort():
    a, b = filled(20, 30), filled(30, 25)
    pinned, mapped = cuda.pinned_array(a.shape, np.float32), cuda.mapped_array(b.shape, np.float32)
    pinned[...], mapped[...] = a, b
    check(tiled_sgemm(pinned, b), a, b)
    check(tiled_sgemm(cuda.to_device(a), mapped).copy_to_host(), a, b)
    check(tiled_sgemm(a[:, :10], mapped[:10]), a[:, :10], b[:10])  # a slice of a mapped array is NumPy's


def test_host_address_is_no_device_memory():
    a = filled(4, 4)

    class Wrong:
        __cuda_array_interface__ = a.__array_interface__ | {"stream": None}

    with pytest.raises(ValueError, match=r"a points to address 0x\w+, which is not CUDA memory .* pass an array"):
        tiled_sgemm(Wrong(), cuda.to_device(a))


# ---------------------------------------------------------------------------------------------------------- refusals


def test_mixed_libraries_are_refused(library):
    a = library.put(filled(4, 4))
    with pytest.raises(TypeError, match="expected both of one kind; convert one of them"):
        tiled_sgemm(a, filled(4, 4))
    with pytest.raises(TypeError, match="out is of kind NumPy array"):
        tiled_sgemm(a, a, filled(4, 4))


def test_out_that_overlaps_is_refused(library):
    whole = library.put(filled(8, 12))
    with pytest.raises(ValueError, match="out shares memory with a"):
        tiled_sgemm(whole[:, :4], whole[:4, 4:8], whole[:, 3:7])
    tiled_sgemm(whole[:, :4], whole[:4, 4:8], whole[:, 8:])  # beside each other in the same rows


def fake(x):
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode().from_tensor(x)


def functional(x):
    return sys.modules["torch"]._to_functional_tensor(x)


def freed(x):
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def nested(x):
    return sys.modules["torch"].nested.nested_tensor([x, x])


def quantized(x):
    torch = sys.modules["torch"]
    return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("change", "error", "remedy"),
    [
        (lambda x: x.requires_grad_(), ValueError, r"torch\.no_grad\(\) .* a\.detach\(\)"),
        (lambda x: x.requires_grad_().T, ValueError, r"torch\.no_grad\(\) .* a\.detach\(\)"),
        (lambda x: x.cpu(), TypeError, r"a\.cuda\(\) .* a\.detach\(\)\.numpy\(\)"),
        (lambda x: x.to("meta"), TypeError, "a is a meta tensor, which has no data"),
        (fake, TypeError, "a is a fake tensor, which has no data"),
        (functional, TypeError, "a is a PyTorch tensor without memory of its own, of type Tensor"),
        (freed, TypeError, "a is a PyTorch tensor without memory of its own, of type Tensor"),
        (nested, TypeError, r"to_padded_tensor\(a, 0\.0\)"),
        (quantized, TypeError, r"a\.dequantize\(\)"),
        (lambda x: x.double(), TypeError, r"a\.to\(torch\.float32\)"),
        (lambda x: x.to_sparse(), TypeError, r"a\.to_dense\(\)"),
        (lambda x: (1j * x).conj().imag, ValueError, r"a\.resolve_neg\(\)"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # PyTorch calls some of these kinds of tensor experimental
def test_tensors_that_are_refused(change, error, remedy):
    x = Torch().put(filled(4, 4))
    with pytest.raises(error, match=remedy):
        tiled_sgemm(change(x), x)


def test_detached_parameter_is_taken():
    torch = Torch()
    x = filled(4, 4)
    parameter = torch.module.nn.Parameter(torch.put(x))
    check(torch.get(tiled_sgemm(parameter.detach(), parameter.detach())), x, x)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_weights_are_taken_without_grad_mode(checked, mode):
    torch = Torch()
    x, weight = filled(20, 40), filled(24, 40)
    layer = torch.module.nn.Linear(40, 24, bias=False, device="cuda")
    with torch.module.no_grad():
        layer.weight.copy_(torch.put(weight))
    left, out = torch.put(x), torch.full((20, 24), NAN)
    view = layer.weight.T  # which requires grad, wherever it is used
    assert view.requires_grad
    for given in (None, out):
        before = len(checked)
        for _ in range(2):
            with getattr(torch.module, mode)():
                result = tiled_sgemm(left, layer.weight.T, given)
                check(torch.get(tiled_sgemm(left, view, given)), x, weight.T)
            check(torch.get(result), x, weight.T)
        assert len(checked) == before + (given is None), "with out they differ in strides alone"
        with pytest.raises(ValueError, match=r"b is .* requires grad, and grad mode is enabled"):
            tiled_sgemm(left, view, given)
    with pytest.raises(ValueError, match=r"out is .* requires grad, and grad mode is enabled"):
        tiled_sgemm(left, view.detach(), out.requires_grad_())
    with getattr(torch.module, mode)():
        assert tiled_sgemm(left, view, out) is out
    with torch.module.inference_mode():
        inference = torch.full((20, 24), NAN)
    for _ in range(2):
        check(torch.get(tiled_sgemm(left, view.detach(), inference)), x, weight.T)
    c = torch.put(x @ weight.T)
    check(torch.get(tiled_sgemm(left, view.detach(), inference, beta=1.0, c=c)), x, weight.T, beta=1.0, c=x @ weight.T)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.filterwarnings("ignore")  # torch.func's internals warn
def test_transformed_tensors_are_refused(cached):
    torch = Torch()
    x = torch.put(filled(12, 12))
    if cached:
        for _ in range(2):
            tiled_sgemm(x, x)

    def product(y):
        return tiled_sgemm(y, x).sum()

    func = torch.module.func
    for transformed in (
        lambda: func.vmap(product)(x.expand(2, 12, 12)),
        lambda: func.grad(product)(x),
        lambda: func.jvp(product, (x,), (x,)),
        lambda: func.functionalize(product)(x),
    ):
        with pytest.raises(TypeError, match="a is a PyTorch tensor without memory of its own"):
            transformed()
    forward_ad = torch.module.autograd.forward_ad
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        with pytest.raises(ValueError, match="a is a PyTorch tensor with a forward-mode tangent"):
            tiled_sgemm(dual, x)
        check(torch.get(tiled_sgemm(dual.detach(), x)), torch.get(x), torch.get(x))


def test_backward_sees_that_a_saved_tensor_was_written():
    torch = Torch()
    x = torch.put(filled(4, 4))
    weight = torch.put(filled(4, 4)).requires_grad_()
    loss = (weight * x).sum()  # saves x
    tiled_sgemm(torch.put(filled(4, 4)), torch.put(filled(4, 4)), x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.module.inference_mode():
        tiled_sgemm(x, x, torch.full((4, 4), 0))  # has no version to raise


# ----------------------------------------------------------------------------------------------------------- streams

M, N, K = 256, 192, 128


@pytest.fixture
def operands(library):
    """Return two operands full of NaN, and their later contents, on the device; compile all that the tests use."""
    a, b = filled(M, K), filled(K, N)
    late_a, late_b, left, right = library.put(a), library.put(b), library.full((M, K), NAN), library.full((K, N), NAN)
    library.copy_into(left, late_a)
    check(library.get(tiled_sgemm(left, late_b)), a, b)
    library.copy_into(left, library.full((M, K), NAN))
    library.get(left)
    return a, b, left, right, late_a, late_b


def test_runs_on_the_librarys_current_stream(library, operands, hold_up):
    a, b, left, right, late_a, late_b = operands
    with new_stream() as handle, library.current(handle):
        hold_up(handle)
        library.copy_into(left, late_a)
        library.copy_into(right, late_b)
        result = tiled_sgemm(left, right)
        assert busy(handle)
        call(driver.cuStreamSynchronize, handle)  # and no other
        check(library.get(result), a, b)


@pytest.mark.parametrize("as_stream", ["handle", "cuda_stream", "cupy", "torch", "numba"])
def test_runs_on_the_stream_given(library, operands, hold_up, as_stream):
    a, b, left, right, late_a, late_b = operands
    out = library.full((M, N), 7)
    library.copy_into(left, late_a)
    library.copy_into(right, late_b)
    library.get(left)

    class Protocol:
        def __init__(self, handle):
            self.handle_ = handle

        def __cuda_stream__(self):
            return (0, self.handle_)

    wrap = {
        "handle": int,
        "cuda_stream": Protocol,
        "cupy": lambda handle: cupy_stream(Cupy().module, handle),
        "torch": lambda handle: Torch().module.cuda.ExternalStream(handle),
        "numba": cuda.external_stream,
    }[as_stream]
    with new_stream() as handle:
        hold_up(handle)
        tiled_sgemm(left, right, out, stream=wrap(handle))
        with new_stream() as other, library.current(other):
            early = library.full((M, N), 0)
            library.copy_into(early, out)
            call(driver.cuStreamSynchronize, other)
            assert busy(handle)
        call(driver.cuStreamSynchronize, handle)
        assert (library.get(early) == 7).all(), "the product did not wait for the work before it on its stream"
        check(library.get(out), a, b)


def test_given_stream_waits_for_the_librarys(library, operands, hold_up):
    a, b, left, right, late_a, late_b = operands
    with new_stream() as current, new_stream() as given:
        with library.current(current):
            hold_up(current)
            library.copy_into(left, late_a)
            library.copy_into(right, late_b)
            result = tiled_sgemm(left, right, stream=given)
            assert busy(current)
        call(driver.cuStreamSynchronize, given)
        assert not busy(current)
        check(library.get(result), a, b)


def test_default_stream_is_waited_for(library, operands, hold_up):
    """The given stream does not synchronise with the default stream by itself."""
    a, b, left, right, late_a, late_b = operands
    hold_up(0)
    library.copy_into(left, late_a)
    library.copy_into(right, late_b)
    with new_stream() as given:
        result = tiled_sgemm(left, right, stream=given)
        assert busy(0)
        call(driver.cuStreamSynchronize, given)
        check(library.get(result), a, b)


@pytest.mark.parametrize("wrap", [Interface, Dlpack])
@pytest.mark.parametrize("given_another", [False, True])
def test_protocols_bring_their_stream(library, operands, hold_up, wrap, given_another):
    a, b, left, right, late_a, late_b = operands
    with new_stream() as producer, new_stream() as another, library.current(producer):
        hold_up(producer)
        library.copy_into(left, late_a)
        library.copy_into(right, late_b)
        wrapped = (
            [Interface(left, producer), Interface(right, producer)]
            if wrap is Interface
            else [Dlpack(left), Dlpack(right)]
        )
        result = tiled_sgemm(*wrapped, stream=another if given_another else None)
        assert busy(producer)
        check(result.copy_to_host(), a, b)


def test_numba_arrays_bring_their_stream(hold_up):
    a, b = filled(M, K), filled(K, N)
    late_a, late_b = cuda.to_device(a), cuda.to_device(b)
    tiled_sgemm(late_a, late_b).copy_to_host()
    with new_stream() as handle:
        stream = cuda.external_stream(handle)
        left, right = (cuda.device_array(x.shape, np.float32, stream=stream) for x in (a, b))
        hold_up(handle)
        left.copy_to_device(late_a)
        right.copy_to_device(late_b)
        result = tiled_sgemm(left, right)
        assert busy(handle)
        assert int(result.stream) == handle
        check(result.copy_to_host(), a, b)
        with new_stream() as another:
            hold_up(handle)
            left.copy_to_device(late_a)
            on_another = tiled_sgemm(left, late_b, stream=another)
            assert busy(handle)
            check(on_another.copy_to_host(), a, b)


def test_numba_result_keeps_its_stream_alive():
    a, b = filled(M, K), filled(K, N)
    result = tiled_sgemm(cuda.to_device(a), cuda.to_device(b), stream=cuda.stream())
    gc.collect()
    check(result.copy_to_host(), a, b)


def test_result_is_not_waited_for(library, operands, hold_up):
    """The call returns while its stream is still busy with earlier work."""
    _, _, left, right, *_ = operands
    with new_stream() as handle, library.current(handle):
        hold_up(handle)
        tiled_sgemm(left, right)
        assert busy(handle)


# ---------------------------------------------------------------------------------------------------- allocator reuse


@pytest.mark.parametrize("wrap", [lambda x: x, Interface, Dlpack], ids=["own", "interface", "dlpack"])
def test_memory_let_go_is_not_reused_before_the_product_is_done(library, hold_up, wrap):
    """The operands are freed as soon as the call returns, and their library allocates the same memory again."""
    a, b = filled(M, K), filled(K, N)
    left, right, out = library.put(a), library.put(b), library.full((M, N), NAN)
    tiled_sgemm(wrap(left), wrap(right), wrap(out))
    library.full((M, K), NAN)
    library.full((K, N), NAN)
    library.get(left)
    streams.release_finished()
    with new_stream() as handle:
        hold_up(handle)
        tiled_sgemm(wrap(left), wrap(right), wrap(out), stream=handle)
        del left, right
        gc.collect()
        overwriting = [library.full(shape, NAN) for shape in [(M, K), (K, N)] * 4]
        call(driver.cuStreamSynchronize, 0)
        assert busy(handle)
        call(driver.cuStreamSynchronize, handle)
        check(library.get(out), a, b)
        assert len(overwriting) == 8


def test_result_let_go_is_not_reused_before_the_product_is_done(library, hold_up):
    left, right = library.put(filled(M, K)), library.put(filled(K, N))
    tiled_sgemm(left, right)
    library.full((M, N), 3)
    library.get(left)
    with new_stream() as handle:
        hold_up(handle)
        tiled_sgemm(left, right, stream=handle)  # its result dies here
        gc.collect()
        others = [library.full((M, N), 3) for _ in range(8)]
        call(driver.cuStreamSynchronize, 0)
        assert busy(handle)
        call(driver.cuStreamSynchronize, handle)
        assert all((library.get(other) == 3).all() for other in others), "the product wrote memory that was another's"


def test_arrays_of_another_stream_are_held_until_the_product_is_done(hold_up):
    """A pooling allocator may reuse the memory of `right` as soon as the work on its own stream has ended."""
    a, b = filled(M, K), filled(K, N)
    early_a, early_b = cuda.to_device(a), cuda.to_device(b)
    tiled_sgemm(early_a, early_b).copy_to_host()
    with new_stream() as handle, new_stream() as other:
        left, right = (
            cuda.device_array(x.shape, np.float32, stream=cuda.external_stream(one))
            for x, one in ((a, handle), (b, other))
        )
        left.copy_to_device(early_a)
        right.copy_to_device(early_b)
        hold_up(handle)
        result = tiled_sgemm(left, right)
        alive = weakref.ref(right)
        del right
        gc.collect()
        assert busy(handle)
        assert alive() is not None
        call(driver.cuStreamSynchronize, handle)
        check(result.copy_to_host(), a, b)
        tiled_sgemm(a[:1], b)  # any product lets go of what is done
        gc.collect()
        assert alive() is None


# ------------------------------------------------------------------------------------------------------------- graphs


@pytest.mark.parametrize("called_before", [True, False])
@pytest.mark.parametrize("kind", ["function", "plan"])
def test_capture_into_a_graph(kind, called_before):
    torch = Torch()
    m = M + 4 * called_before + 8 * (kind == "plan")  # a call of its own: none before has been like it
    a, b = filled(m, K), filled(K, N)
    left, right, out = torch.full((m, K), 0), torch.put(b), torch.full((m, N), NAN)
    product = plan(m, N, K, like=left) if kind == "plan" else tiled_sgemm
    if called_before:
        product(left, right, out)
    tiled_sgemm(torch.put(a), right)  # compiles
    torch.get(out)
    graph = torch.module.cuda.CUDAGraph()
    with torch.module.cuda.graph(graph):
        product(left, right, out)
        result = product(left, right)
    torch.copy_into(left, torch.put(a))
    graph.replay()
    check(torch.get(out), a, b)
    check(torch.get(result), a, b)


# --------------------------------------------------------------------------------------- plans, and the fast path


@pytest.fixture
def checked(monkeypatch):
    """Calls that were checked in full; no call was cached before."""
    products.forget()
    calls, check_in_full = [], products.checked_product

    def count(*arguments, **options):
        calls.append(arguments)
        return check_in_full(*arguments, **options)

    monkeypatch.setattr(products, "checked_product", count)
    return calls


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("kind", ["function", "plan"])
def test_second_call_takes_the_fast_path(library, checked, kind, given):
    m, n, k = 68 + 4 * given, 76, 52
    product = plan(m, n, k) if kind == "plan" else tiled_sgemm
    with new_stream() as first, new_stream() as second:
        for turn, handle in enumerate([0, 0, first, second, 0]):
            a, b, c = filled(m, k, turn), filled(k, n, turn), filled(m, n, turn)
            with library.current(handle) if handle else contextlib.nullcontext():
                left, right, out = library.put(a), library.put(b), library.put(c) if given else None
                beta = 0.5 if given else 0.0
                result = product(left, right, out, alpha=turn + 1, beta=beta)
                check(library.get(result), a, b, alpha=turn + 1, beta=beta, c=c)
            assert (result is out) == given
            assert isinstance(result, library.array)
            assert len(checked) == 1


@pytest.mark.parametrize("bound", [False, True])
def test_second_call_of_numba_arrays_takes_the_fast_path(checked, bound):
    m = 44 + 4 * bound
    a, b, c = filled(m, 28), filled(28, 36), filled(m, 36)
    stream = cuda.stream() if bound else 0
    for _ in range(3):
        left, right, out = (cuda.to_device(x, stream=stream) for x in (a, b, c))
        tiled_sgemm(left, right, out, beta=-1)
        check(out.copy_to_host(), a, b, beta=-1, c=c)
    assert len(checked) == 1
    for _ in range(3):
        check(tiled_sgemm(left, right).copy_to_host(), a, b)
    assert len(checked) == 1


def test_fast_path_runs_on_the_librarys_current_stream(library, operands, hold_up, checked):
    a, b, left, right, late_a, late_b = operands
    out = library.full((M, N), NAN)
    tiled_sgemm(left, right, out)
    library.get(out)
    with new_stream() as handle, library.current(handle):
        hold_up(handle)
        library.copy_into(left, late_a)
        library.copy_into(right, late_b)
        tiled_sgemm(left, right, out)
        assert busy(handle)
        call(driver.cuStreamSynchronize, handle)
        check(library.get(out), a, b)
    assert len(checked) <= 1


@pytest.mark.filterwarnings("ignore")  # PyTorch calls some of these kinds of tensor experimental
@pytest.mark.parametrize("kind", ["function", "plan"])
def test_fast_path_refuses_what_the_full_check_refuses(kind):
    torch = Torch()
    product = plan(20, 20, 20) if kind == "plan" else tiled_sgemm
    x, y, out = (torch.put(filled(20, 20, seed)) for seed in range(3))
    for _ in range(3):
        product(x, y, out)
    without_memory = y.clone()
    without_memory.untyped_storage().resize_(0)
    for arguments, remedy in [
        ((x.clone().requires_grad_(), y, out), r"a\.detach\(\)"),
        ((x, y, out.clone().requires_grad_()), r"out\.detach\(\)"),
        ((x, (1j * y).conj().imag, out), r"b\.resolve_neg\(\)"),
        ((x, torch.module._neg_view(y), out), r"b\.resolve_neg\(\)"),
        ((x, y.double(), out), r"b\.to\(torch\.float32\)"),
        ((x, y.cpu(), out), r"b\.cuda\(\)"),
        ((x, without_memory, out), "without memory"),
        ((x, y, x), "out shares memory with a"),
        ((x, y, y), "out shares memory with b"),
        ((x, y[:, :19], out), "shape"),
    ]:
        with pytest.raises((ValueError, TypeError), match=remedy):
            product(*arguments)
    a, b = torch.get(x), torch.get(y)
    for left, right, results in [(x, x, (a, a)), (x, y.T, (a, b.T)), (x, y, (a, b))]:
        check(torch.get(product(left, right, out)), *results)


def test_repeated_calls_of_a_plan_read_no_keys(library, monkeypatch):
    made = plan(28, 20, 36)
    left, right, out = library.put(filled(28, 36)), library.put(filled(36, 20)), library.full((28, 20), NAN)
    for _ in range(2):
        made(left, right, out)
    monkeypatch.setattr(fast_path, "try_fast", None)
    other = filled(28, 36, seed=1)
    check(library.get(made(library.put(other), right, out)), other, filled(36, 20))


def test_fast_path_raises_the_version():
    torch = Torch()
    x, y, out = (torch.put(filled(24, 24, seed)) for seed in range(3))
    versions = []
    for _ in range(3):
        tiled_sgemm(x, y, out)
        versions.append(out._version)
    assert versions == sorted(set(versions))


def test_plan_takes_all_layouts_and_libraries(library):
    m, n, k = 64, 96, 32
    made = plan(m, n, k)
    a, b, c = filled(m, k), filled(k, n), filled(m, n, seed=1)
    for a_layout in LAYOUTS.values():
        for b_layout in LAYOUTS.values():
            left, right, out = a_layout(library, a), b_layout(library, b), b_layout(library, c)
            for _ in range(2):
                check(library.get(made(left, right)), a, b)
            assert made(left, right, out, 2, 0.5) is out
            check(library.get(out), a, b, alpha=2, beta=0.5, c=c)
    check(made(a, b), a, b)
    check(made(cuda.to_device(a), cuda.to_device(b)).copy_to_host(), a, b)


def test_plan_in_host_threads():
    torch, m, n, k = Torch(), 72, 80, 56
    made = plan(m, n, k)

    def work(index: int) -> list[str]:
        wrong = []
        with torch.module.cuda.stream(torch.module.cuda.Stream()):
            for turn in range(50):
                a, b = filled(m, k, seed=turn), filled(k, n, seed=index)
                result = made(torch.put(a), torch.put(b))
                torch.module.cuda.current_stream().synchronize()
                expected, scale = reference(1.0, a, b)
                comparison = compare(result.cpu().numpy(), expected, scale, k)
                if not comparison.ok:
                    wrong.append(f"thread {index}, turn {turn}: {comparison}")
        return wrong

    with ThreadPoolExecutor(6) as pool:
        wrong = [message for messages in pool.map(work, range(6)) for message in messages]
    assert not wrong, "\n".join(wrong)


def workspaces() -> Workspaces:
    return devices.get_device(0).workspaces


def counters_at(pointer: int, count: int) -> list[int]:
    values = np.full(count, 7, np.int32)
    call(driver.cuMemcpyDtoH, values.ctypes.data, pointer, values.nbytes)
    return values.tolist()


def test_workspaces_of_streams_and_captures():
    torch = Torch()
    cuda.current_context()
    workspaces = devices.get_device(0).workspaces
    with device_scope(0), new_stream() as first, new_stream() as second:
        of_default, of_first = workspaces.reserve(0, 5000, 9), workspaces.reserve(first, 5000, 9)
        assert workspaces.reserve(0, 5000, 9) == of_default
        assert workspaces.reserve(1, 5000, 9) == of_default
        assert workspaces.reserve(first, 4000, 9) == of_first
        assert len({of_default, of_first, workspaces.reserve(second, 5000, 9)}) == 3
        assert of_first[0] % 256 == 0
        for _, counters in (of_default, of_first):
            assert counters_at(counters, 9) == [0] * 9
        x = torch.full((8, 8), 1)
        graph, captured = torch.module.cuda.CUDAGraph(), []
        with torch.module.cuda.graph(graph):
            current = torch.module.cuda.current_stream().cuda_stream
            captured += [workspaces.reserve(current, 5000, 9) for _ in range(2)]
            x += 1
        graph.replay()
        torch.get(x)
        assert captured[0] == captured[1]
        assert captured[0] not in (of_default, of_first, workspaces.reserve(current, 5000, 9))
        assert counters_at(captured[0][1], 9) == [0] * 9


def test_thread_default_streams_have_workspaces_of_their_own():
    def reserve(_: int) -> tuple[int, int]:
        with device_scope(0):
            together.wait()
            return workspaces.reserve(2, 1000, 3)

    workspaces, together = devices.get_device(0).workspaces, threading.Barrier(3)
    with ThreadPoolExecutor(3) as pool:
        assert len(set(pool.map(reserve, range(3)))) == 3


# ----------------------------------------------------------------------------- batches, epilogues, what is told of them


class Numba:
    """Numba device arrays, which know of no current stream: the callers below name one where it matters."""

    def put(self, x):
        return cuda.to_device(np.ascontiguousarray(x))

    def get(self, x):
        cuda.synchronize()
        return x.copy_to_host()

    def full(self, shape, value):
        return self.put(np.full(shape, value, np.float32))

    def current(self, handle):
        return contextlib.nullcontext()


@pytest.fixture(params=[*LIBRARIES, "numba"])
def everyone(request):
    return (LIBRARIES | {"numba": Numba})[request.param]()


def several(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).uniform(-1, 1, shape).astype(np.float32)


def check_batch(got, a, b, **scalars):
    c = scalars.pop("c", None)
    x, y = (np.broadcast_to(one, (*got.shape[:-2], *one.shape[-2:])) for one in (a, b))
    for index in np.ndindex(got.shape[:-2]):
        check(got[index], x[index], y[index], **scalars, **({} if c is None else {"c": c[index]}))


@contextlib.contextmanager
def counting_launches(handle):
    """Capture the work of a stream into a graph, then run it; yields a list that receives the number of kernels."""
    counted = []
    call(driver.cuStreamBeginCapture, handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    try:
        yield counted
    finally:
        graph = call(driver.cuStreamEndCapture, handle)
    _, _, count = driver.cuGraphGetNodes(graph)
    _, nodes, _ = driver.cuGraphGetNodes(graph, count)
    types = [call(driver.cuGraphNodeGetType, node) for node in nodes]
    assert set(types) <= {driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL}
    counted.append(len(types))
    if count:
        executable = call(driver.cuGraphInstantiate, graph, 0)
        call(driver.cuGraphLaunch, executable, handle)
        call(driver.cuStreamSynchronize, handle)
        call(driver.cuGraphExecDestroy, executable)
    call(driver.cuGraphDestroy, graph)


# Shapes of A and B. Large enough for several tiles, and for partial sums that meet.
BATCHES = {
    "both": ((6, 65, 130), (6, 130, 70)),
    "shared B": ((6, 64, 128), (128, 96)),
    "shared A": ((100, 60), (5, 60, 72)),
    "broadcast": ((3, 1, 64, 64), (4, 64, 64)),
    "three kinds": ((2, 1, 3, 33, 40), (4, 1, 40, 36)),
    "long sums": ((2, 48, 5000), (2, 5000, 40)),
    "many": ((1000, 16, 20), (1000, 20, 24)),
    "vectors": ((7, 1, 300), (7, 300, 200)),
}


@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("case", BATCHES)
def test_a_batch_is_one_launch(everyone, case, beta):
    a, b = (several(*shape) for shape in BATCHES[case])
    c = several(*(a @ b).shape, seed=1)
    left, right, out = everyone.put(a), everyone.put(b), everyone.put(c)
    check_batch(everyone.get(tiled_sgemm(left, right)), a, b)
    with new_stream() as handle, everyone.current(handle):
        tiled_sgemm(left, right, everyone.put(c), beta=beta, stream=handle)  # compiled, and remembered
        call(driver.cuStreamSynchronize, handle)
        cuda.synchronize()
        with counting_launches(handle) as counted:
            tiled_sgemm(left, right, out, beta=beta, stream=handle)
        told = explain(left, right, out, beta=beta)
    assert counted == [1]
    assert told.launches == 1
    assert told.copies == Copies()
    check_batch(everyone.get(out), a, b, beta=beta, c=c)


def test_views_of_batches(library):
    """Strides of every sort, without copies."""
    whole, other = several(4, 6, 40, 48), several(6, 48, 44)
    left, right = library.put(whole), library.put(other)
    out = library.full((6, 4, 40, 44), NAN)
    for a, b, x, y, z in [
        (whole[::2, 1:], other[1:], left[::2, 1:], right[1:], out[1:, ::2].swapaxes(0, 1)),
        (whole.swapaxes(0, 1), other[:, None], left.swapaxes(0, 1), right[:, None], out),
        (whole[1, :, :24].swapaxes(1, 2), whole[2, :, :24], left[1, :, :24].swapaxes(1, 2), left[2, :, :24], None),
        (whole[..., 4:44], other[:, 3:43, 1:], left[..., 4:44], right[:, 3:43, 1:], None),
    ]:
        result = tiled_sgemm(x, y, z)
        assert result is z or z is None
        got = library.get(result)
        check_batch(got, a, b)
    for result in (tiled_sgemm(left[:0], right), tiled_sgemm(left[..., :0], right[:, :0])):
        assert not library.get(result).any()


class Spaced:
    """Batch in device memory whose matrices are `pitch` floats apart, with NaN between them."""

    def __init__(self, x, pitch):
        memory = np.full(len(x) * pitch, NAN)
        self._shape, self._strides = x.shape, (4 * pitch, 4 * x.shape[2], 4)
        self._view(memory)[...] = x
        self.owner = cuda.to_device(memory)
        described = self.owner.__cuda_array_interface__ | {"stream": None, "version": 3}
        self.__cuda_array_interface__ = described | {"shape": self._shape, "strides": self._strides}

    def _view(self, memory):
        return np.lib.stride_tricks.as_strided(memory, self._shape, self._strides)

    def get(self):
        """Return the matrices, and the number of floats of the whole memory that are not NaN."""
        cuda.synchronize()
        memory = self.owner.copy_to_host()
        return self._view(memory).copy(), np.count_nonzero(~np.isnan(memory))


@pytest.mark.parametrize("stage", ["stream_k", "auto"])
@pytest.mark.parametrize("which", ["a", "b", "out", "all"])
def test_only_the_first_matrix_of_a_batch_is_aligned(which, stage):
    """Later matrices are 260 bytes apart, so 16-byte accesses would be misaligned."""
    values = {"a": several(3, 8, 8), "b": several(3, 8, 8, seed=1), "out": several(3, 8, 8, seed=2)}
    placed = {name: Spaced(x, 65 if which in (name, "all") else 64) for name, x in values.items()}
    tiled_sgemm(*placed.values(), beta=0.5, stage=stage)
    got, written = placed["out"].get()
    check_batch(got, values["a"], values["b"], beta=0.5, c=values["out"])
    assert written == got.size, "floats between the matrices were written"


def test_batch_that_overlaps_its_out_is_refused(library):
    for _ in range(2):  # also as a call that is remembered
        x = library.put(several(5, 32, 32))
        tiled_sgemm(x[:2], x[4], x[2:4])
        with pytest.raises(ValueError, match="out shares memory with a"):
            tiled_sgemm(x[:2], x[4], x[1:3])
        with pytest.raises(ValueError, match="out shares memory with b"):
            tiled_sgemm(x[:2], x[4], x[3:])


def biased_relu(value, row, col, bias):
    return max(value + bias[col], np.float32(0))


@cuda.jit(device=True)
def half(value):
    return value * np.float32(0.5)


@cuda.jit(device=True, fastmath=True)
def affine(value, row, col, rows, cols):
    return half(value) * rows[row] - cols[col]


def leaky(slope):
    return lambda value, row, col: value if value > 0 else value * slope


# An epilogue, the extents of C along which it takes vectors, and the same function in NumPy.
EPILOGUES = {
    "bias and ReLU": (biased_relu, "n", lambda x, bias: np.maximum(x + bias, 0)),
    "device function": (affine, "mn", lambda x, rows, cols: x / 2 * rows[:, None] - cols),
    "closure": (leaky(0.25), "", lambda x: np.where(x > 0, x, x / 4)),
    "another closure": (leaky(np.float32(0.5)), "", lambda x: np.where(x > 0, x, x / 2)),
    "position": (lambda value, row, col: row * 1000 + col, "", None),
}


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [
        ((64, 128), (128, 96)),
        ((65, 33), (33, 47)),
        ((40, 6000), (6000, 36)),
        ((3, 2, 50, 64), (2, 64, 70)),
        ((1, 400), (400, 300)),
        ((300, 400), (400, 1)),
    ],
)
@pytest.mark.parametrize("case", EPILOGUES)
def test_epilogues(everyone, case, a_shape, b_shape):
    epilogue, extents, expected = EPILOGUES[case]
    a, b = several(*a_shape), several(*b_shape)
    c = several(*(a @ b).shape, seed=1)
    m, n = c.shape[-2:]
    vectors = [several({"m": m, "n": n}[extent], seed=2) for extent in extents]
    left, right, out, given = everyone.put(a), everyone.put(b), everyone.put(c), [everyone.put(v) for v in vectors]
    with new_stream() as handle, everyone.current(handle):
        options = {"alpha": -2.0, "beta": 0.5, "stream": handle, "epilogue": epilogue, "epilogue_args": given}
        tiled_sgemm(left, right, everyone.put(c), **options)  # compiles
        call(driver.cuStreamSynchronize, handle)
        cuda.synchronize()
        with counting_launches(handle) as counted:
            tiled_sgemm(left, right, out, **options)
    assert counted == [1]
    x = -2 * (a.astype(np.float64) @ b) + 0.5 * c
    wanted = 1000 * np.arange(m)[:, None] + np.arange(n) + 0 * x if expected is None else expected(x, *vectors)
    np.testing.assert_allclose(everyone.get(out), wanted, rtol=1e-5, atol=1e-5 * a_shape[-1] ** 0.5)


def test_epilogue_vectors_are_read_where_they_are(library):
    a, b, table = several(64, 64), several(64, 64), several(64, 8)
    left, right, vectors = library.put(a), library.put(b), library.put(table)
    got = library.get(tiled_sgemm(left, right, epilogue=biased_relu, epilogue_args=[vectors[:, 3]]))
    np.testing.assert_allclose(got, np.maximum(a @ b + table[:, 3], 0), rtol=1e-5, atol=1e-4)
    library.copy_into(vectors, library.put(-table))
    got = library.get(tiled_sgemm(left, right, epilogue=biased_relu, epilogue_args=[vectors[:, 3]]))
    np.testing.assert_allclose(got, np.maximum(a @ b - table[:, 3], 0), rtol=1e-5, atol=1e-4)
    out = library.full((64, 64), 0)
    with pytest.raises(ValueError, match=r"out shares memory with epilogue_args\[0\]"):
        tiled_sgemm(left, right, out, epilogue=biased_relu, epilogue_args=[out[0]])


SLOPE = 2.0


def test_epilogue_finds_what_is_there_at_the_call(library, monkeypatch):
    a, b = several(32, 40), several(40, 48)
    left, right = library.put(a), library.put(b)
    for slope in (2.0, 3.0, 2.0):
        monkeypatch.setitem(globals(), "SLOPE", slope)
        got = library.get(tiled_sgemm(left, right, epilogue=lambda value, row, col: value * SLOPE))
        np.testing.assert_allclose(got, a @ b * slope, rtol=1e-5, atol=1e-4)


def test_epilogue_that_does_not_compile_leaves_out_alone(library):
    a, out = library.put(filled(32, 32)), library.full((32, 32), 7)
    for epilogue, words in [
        (lambda value, row, col: value.nothing, "Unknown attribute 'nothing'"),
        (lambda value, row, col: "text", "returns a value of type"),
    ]:
        with pytest.raises(TypeError, match=words):
            tiled_sgemm(a, a, out, epilogue=epilogue)
    assert (library.get(out) == 7).all()


def test_explain_launches_nothing(everyone):
    a, b, bias = everyone.put(several(4, 64, 72)), everyone.put(several(72, 80)), everyone.put(several(80))
    options = {"epilogue": biased_relu, "epilogue_args": [bias]}
    explain(a, b, **options)  # compiles
    with new_stream() as handle, everyone.current(handle):
        cuda.synchronize()
        with counting_launches(handle) as counted:
            told = explain(a, b, **options)
    assert counted == [0]
    assert (told.launches, told.copies) == (1, Copies())
    x, y = several(4, 64, 72), several(72, 80)
    assert explain(x, y).copies == Copies(to_device=4 * (x.size + y.size), to_host=4 * 4 * 64 * 80)


# -------------------------------------------------------------------------------------------------- other processes

FIRST_CALL = """
import time
begin = time.perf_counter()
import numpy as np
from numba import cuda
from numba_gemm import tiled_sgemm
unable = {unable}
if unable:
    from numba_gemm.runtime import compilation, compiler
    compilation.compile_cubin = compiler.result_type = None
x, bias, slope = cuda.to_device(np.ones((256, 256), np.float32)), cuda.to_device(np.ones(256, np.float32)), 0.5
options = {options}
got = tiled_sgemm(x, x, **options).copy_to_host()
print(time.perf_counter() - begin, got[0, 0])
"""
WITH_EPILOGUE = (
    "{'epilogue': lambda value, row, col, bias: value * slope + bias[col], 'epilogue_args': [bias]}",
    129.0,
)


def in_another_process(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("options", "expected"), [("{}", 256.0), WITH_EPILOGUE], ids=["plain", "epilogue"])
def test_second_process_finds_the_kernel(tmp_path, monkeypatch, options, expected):
    """It cannot compile, and returns its first product soon, including the import."""
    monkeypatch.setenv("NUMBA_GEMM_CACHE_DIR", str(tmp_path))
    runs = [
        in_another_process(FIRST_CALL.format(unable=unable, options=options)) for unable in (False, True, True, True)
    ]
    assert len(list(tmp_path.glob("*.kernel"))) == 1
    assert [float(run.split()[1]) for run in runs] == [expected] * 4
    # Less than a second on an idle machine, which is measured elsewhere; here, a dozen of other tests may run at once.
    assert min(float(run.split()[0]) for run in runs[1:]) < 3.0


def test_precompiled_kernels_are_found(tmp_path, monkeypatch):
    """Kernels for this GPU, without naming its compute capability."""
    monkeypatch.setenv("NUMBA_GEMM_CACHE_DIR", str(tmp_path))
    report = in_another_process("import numba_gemm\nfor row in numba_gemm.precompile('coalesced'): print(*row)")
    assert [line.split()[-1] for line in report.splitlines()] == ["compiler", "compiler"]
    run = in_another_process(FIRST_CALL.format(unable=True, options="{'stage': 'coalesced'}"))
    assert float(run.split()[1]) == 256
    assert len(list(tmp_path.glob("*.kernel"))) == 2, "something else was compiled"


# -------------------------------------------------------------------------------------------------------- guard bands


@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 2), (64, 128, 32), (127, 129, 17), (130, 260, 40), (257, 131, 1)])
@pytest.mark.parametrize("stage", [stage.name for stage in stages() if "ieee" in stage.precisions])
def test_nothing_outside_c_is_written(stage, shape, beta):
    if not next(one for one in stages() if one.name == stage).runs_on(devices.device_properties().cc):
        pytest.skip("this GPU cannot run the stage")
    m, n, k = shape
    a, b, c = filled(m, k), filled(k, n), filled(m, n, seed=1)
    rows, cols = 40, 36  # multiples of four: C's rows stay aligned where n allows
    around = filled(m + 2 * rows, n + 2 * cols, seed=2)
    around[rows : rows + m, cols : cols + n] = c if beta else NAN
    buffer = cuda.to_device(around)
    out = buffer[rows : rows + m, cols : cols + n]
    tiled_sgemm(cuda.to_device(a), cuda.to_device(b), out, beta=beta, stage=stage)
    after = buffer.copy_to_host()
    check(after[rows : rows + m, cols : cols + n], a, b, beta=beta, c=c)
    after[rows : rows + m, cols : cols + n] = around[rows : rows + m, cols : cols + n]
    assert after.tobytes() == around.tobytes()


# ---------------------------------------------------------------------------------------------------- host threads


@pytest.mark.parametrize("kind", ["numpy", "numba", "cupy", "torch"])
def test_host_threads(kind):
    """Concurrent threads, each with its own operands; their first calls compete to compile."""
    count, rounds = 6, 12
    together = threading.Barrier(count)
    library = LIBRARIES[kind]() if kind in LIBRARIES else None

    def work(index: int) -> list[str]:
        m, n, k = 70 + index, 90 - index, 50 + 3 * index
        wrong = []
        together.wait()
        for turn in range(rounds):
            a, b = filled(m, k, seed=turn), filled(k, n, seed=index)
            if kind == "numpy":
                got = tiled_sgemm(a, b)
            elif library is None:
                with new_thread_stream() as stream:
                    got = tiled_sgemm(cuda.to_device(a), cuda.to_device(b), stream=stream).copy_to_host()
            else:
                got = library.get(tiled_sgemm(library.put(a), library.put(b)))
            expected, scale = reference(1.0, a, b)
            comparison = compare(got, expected, scale, k)
            if not comparison.ok:
                wrong.append(f"thread {index}, turn {turn}: {comparison}")
        return wrong

    with ThreadPoolExecutor(count) as pool:
        wrong = [message for messages in pool.map(work, range(count)) for message in messages]
    assert not wrong, "\n".join(wrong)


@contextlib.contextmanager
def new_thread_stream():
    cuda.current_context()  # a thread's first, if it has none yet
    with new_stream() as handle:
        yield handle


@pytest.mark.parametrize("kind", ["numpy", "numba"])
def test_current_context_is_as_it_was(kind):
    """Check this thread, which has a context, and a thread that never had one."""
    a, b = filled(30, 20), filled(20, 10)
    operands = (a, b) if kind == "numpy" else (cuda.to_device(a), cuda.to_device(b))

    def contexts() -> tuple[int, int]:
        before = int(call(driver.cuCtxGetCurrent))
        result = tiled_sgemm(*operands)
        after = int(call(driver.cuCtxGetCurrent))
        call(driver.cuCtxPushCurrent, call(driver.cuDevicePrimaryCtxRetain, call(driver.cuDeviceGet, 0)))
        check(result if kind == "numpy" else result.copy_to_host(), a, b)
        call(driver.cuCtxPopCurrent)
        return before, after

    with ThreadPoolExecutor(1) as pool:
        before, after = pool.submit(contexts).result()
    assert (before, after) == (0, 0)
    for _ in range(2):
        before, after = contexts()
        assert before == after
    with ThreadPoolExecutor(1) as pool:  # a call that is known by now
        assert pool.submit(contexts).result() == (0, 0)


# ----------------------------------------------------------------------------------------------------- several devices

two_devices = pytest.mark.skipif("devices.device_count() < 2", reason="needs two GPUs")


@two_devices
def test_runs_where_the_operands_are(library):
    a, b = filled(65, 33), filled(33, 40)
    current = library.current_device()
    result = tiled_sgemm(library.put(a, device=1), library.put(b, device=1))
    assert library.device_of(result) == 1
    assert library.current_device() == current
    call(driver.cuCtxPushCurrent, call(driver.cuDevicePrimaryCtxRetain, call(driver.cuDeviceGet, 1)))
    call(driver.cuCtxSynchronize)
    call(driver.cuCtxPopCurrent)
    check(library.get(result), a, b)


@two_devices
def test_plan_for_a_device(library):
    a, b = filled(65, 33), filled(33, 40)
    left, right = library.put(a, device=1), library.put(b, device=1)
    made, current = plan(65, 40, 33, like=left), library.current_device()
    assert made.device == plan(65, 40, 33, device=1).device == 1
    for _ in range(3):
        result = made(left, right)
        assert library.device_of(result) == 1
        assert library.current_device() == current
        with device_scope(1):
            call(driver.cuCtxSynchronize)
        check(library.get(result), a, b)
    with pytest.raises(ValueError, match="operands lie on device 0 and this plan is for device 1"):
        made(library.put(a), library.put(b))


@two_devices
def test_operands_on_two_devices_are_refused(library):
    with pytest.raises(ValueError, match="a on device 0, b on device 1; expected one; copy them"):
        tiled_sgemm(library.put(filled(4, 4), device=0), library.put(filled(4, 4), device=1))


@two_devices
def test_stream_of_another_device_is_refused(library):
    a = library.put(filled(4, 4), device=1)
    with (
        new_stream() as handle,
        pytest.raises(ValueError, match=r"stream belongs to device 0 .* device 1; expected one"),
    ):
        tiled_sgemm(a, a, stream=handle)


# --------------------------------------------------------------------------------------------------------- large arrays


@pytest.mark.alone
@pytest.mark.usefixtures("memory_returned")
@pytest.mark.parametrize("stage", ["naive", "shared_tile", "auto"])
def test_more_elements_than_an_int32_counts(library, stage):
    """A has more than 2**31 elements, so the last of them lie beyond any 32-bit index."""
    rows, k, n, tail = 2**25 + 5, 68, 8, 300
    if free_bytes() < 16 << 30:
        pytest.skip("needs 16 GiB of free device memory")
    a, b = filled(tail, k), filled(k, n)
    left = library.full((rows, k), 0)
    assert rows * k > 2**31
    library.copy_into(left[-tail:], library.put(a))
    result = tiled_sgemm(left, library.put(b), stage=stage)
    check(library.get(result[-tail:]), a, b)
    assert not bool((result[:-tail] != 0).any())
    transposed = tiled_sgemm(library.put(b).T, left.T, stage=stage)
    check(library.get(transposed[:, -tail:]), b.T, a.T)


def free_bytes() -> int:
    return cuda.current_context().get_memory_info().free
