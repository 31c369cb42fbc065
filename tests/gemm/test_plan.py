"""Plans, launches that are kept, and the short way of calls that are like one before."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import sys
import threading
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import pytest
from cuda.bindings import driver
from numba import cuda
from support.operands import LAYOUTS, NAN, REPEATING, check, filled, frozen

import numba_gemm
from numba_gemm import arrays, plan, tiled_sgemm
from numba_gemm.arrays import host, libraries, short_way
from numba_gemm.device.partition import FIELDS
from numba_gemm.gemm import plan as plans
from numba_gemm.gemm import product as products
from numba_gemm.gemm import request as requests
from numba_gemm.gemm.heuristics import Choice
from numba_gemm.kernels.ladder import STAGES
from numba_gemm.kernels.ladder.stage import Batch, Form, Share
from numba_gemm.runtime import compiler, launch, workspace
from numba_gemm.runtime import driver as driver_module
from numba_gemm.runtime.compiler import Cubin
from numba_gemm.runtime.launch import Extra, Launch, Matrix, Schedule, Vector
from numba_gemm.simulator.switch import SIMULATOR

# -------------------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("stage", ["naive", "shared_tile", "auto"])
def test_plan_computes(stage, layout):
    a, b, c = filled(7, 9), filled(9, 5), filled(7, 5, seed=1)
    made = plan(7, 5, 9, stage=stage, layout=layout)
    check(made(a, b), a, b)
    out = c.copy()
    assert made(a, b, out, 2, -0.5) is out
    check(out, a, b, alpha=2, beta=-0.5, c=c)


@pytest.mark.parametrize(
    ("layout", "along"), [("NN", (True, False)), ("NT", (True, True)), ("TN", (False, False)), ("TT", (False, True))]
)
def test_plan_chooses_for_its_layout(layout, along, monkeypatch):
    asked, choose = [], plans.autotune_cache.choose
    monkeypatch.setattr(
        plans.autotune_cache, "choose", lambda device, wanted: asked.append(wanted) or choose(device, wanted)
    )
    plan(4, 8, 12, layout=layout)
    (wanted,) = asked
    assert (wanted.a_along, wanted.b_along) == along


@pytest.mark.parametrize("layout", [*LAYOUTS, *REPEATING])
def test_plan_takes_any_strides(layout):
    lay_out = (LAYOUTS | REPEATING)[layout]
    a, b = lay_out(filled(8, 4)), lay_out(filled(4, 8, seed=1))
    check(plan(8, 8, 4, stage="coalesced")(a, b), a, b)


def test_plan_of_numba_arrays():
    a, b, c = filled(4, 6), filled(6, 8), filled(4, 8, seed=1)
    out = cuda.to_device(c)
    made = plan(4, 8, 6, like=out, stage="naive")
    assert made(cuda.to_device(a), cuda.to_device(b), out, beta=1.0) is out
    check(out.copy_to_host(), a, b, beta=1.0, c=c)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 2), (3, 0, 2), (3, 2, 0), (0, 0, 0)])
def test_plan_of_nothing(m, n, k):
    result = plan(m, n, k)(filled(m, k), filled(k, n))
    assert result.shape == (m, n)
    assert not result.any()


def test_plan_tells_what_it_chose():
    made = plan(100, 200, 64, stage="register_prefetch")
    config = STAGES["register_prefetch"].configs[0]
    assert (made.m, made.n, made.k, made.device, made.stage, made.config) == (100, 200, 64, 0, made.stage, config)
    assert made.grid == (-(-200 // config.BN), -(-100 // config.BM), 1)
    assert made.block == (config.threads, 1, 1)
    assert made.workspace_bytes == 0
    for words in ("m=100", "n=200", "k=64", "register_prefetch", config.name, "layout=NN"):
        assert words in repr(made)
    assert plan(100, 200, 64).stage in STAGES
    assert isinstance(made, numba_gemm.Plan)


SQUARE = filled(4, 4)

# How a plan is made; the error; words of it.
WRONG_PLANS = {
    "m text": (("4", 4, 4), {}, TypeError, ["m is a str", "expected an int", "int(m)"]),
    "n negative": ((4, -1, 4), {}, ValueError, ["n is -1", "expected 0 or more", "pass"]),
    "k fraction": ((4, 4, 4.5), {}, TypeError, ["k is a float", "expected an int"]),
    "m huge": ((2**70, 1, 1), {}, ValueError, ["a has shape (1180591620717411303424, 1)", "addressed", "smaller"]),
    "C huge": ((2**40, 2**40, 0), {}, ValueError, ["out has shape", "more than", "addressed", "smaller"]),
    "layout": ((4, 4, 4), {"layout": "NC"}, ValueError, ["layout is 'NC'", "expected one of NN", "pass"]),
    "stage": ((4, 4, 4), {"stage": "best"}, ValueError, ["stage is 'best'", "'auto' or one of naive", "pass"]),
    "stage number": ((4, 4, 4), {"stage": 1}, TypeError, ["stage is a int", "expected a str", "pass"]),
    "like": ((4, 4, 4), {"like": [1.0]}, TypeError, ["like is a list", "expected", "numpy.asarray"]),
    "device": ((4, 4, 4), {"device": 99}, ValueError, ["device is 99", "expected an ordinal below", "pass"]),
    "workspace shape": ((4, 4, 4), {"workspace": SQUARE}, ValueError, ["shape (4, 4)", "one dimension", "pass"]),
    "workspace dtype": ((4, 4, 4), {"workspace": np.zeros(9)}, ValueError, ["dtype float64", "float32", "pass"]),
}


@pytest.mark.parametrize("case", WRONG_PLANS)
def test_wrong_plans(case):
    extents, options, error, words = WRONG_PLANS[case]
    with pytest.raises(error) as caught:
        plan(*extents, **options)
    assert all(word in str(caught.value) for word in words)


# What a plan for (3, 5, 4) is called with; the error; words of it.
A, B, C = filled(3, 4), filled(4, 5), filled(3, 5)
WRONG_CALLS = {
    "shapes": ((B.T, A.T), {}, ValueError, ["shape (5, 4)", "plan is for shapes (3, 4) and (4, 5)", "another plan"]),
    "rows of A": ((A[:2], B), {}, ValueError, ["shape (2, 4)", "plan is for shapes (3, 4) and (4, 5)", "another plan"]),
    "columns of B": ((A, B[:, :3]), {}, ValueError, ["b has shape (4, 3)", "plan is for shapes (3, 4) and (4, 5)"]),
    "K": ((A, A), {}, ValueError, ["a has shape (3, 4) and b has shape (3, 4)", "expected shapes"]),
    "dtype": ((A.astype(float), B), {}, TypeError, ["a has dtype float64", "expected float32"]),
    "kinds": ((A, cuda.to_device(B)), {}, TypeError, ["expected both of one kind"]),
    "out": ((A, B, C.T), {}, ValueError, ["out has shape (5, 3)", "expected (3, 5)"]),
    "out read-only": ((A, B, frozen(C.copy())), {}, ValueError, ["out is read-only"]),
    "beta alone": ((A, B), {"beta": 1.0}, ValueError, ["out is None"]),
    "alpha": ((A, B), {"alpha": "1"}, TypeError, ["alpha is '1'"]),
    "stream": ((A, B), {"stream": "s"}, TypeError, ["stream is 's'"]),
}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_wrong_calls(case, monkeypatch):
    arguments, options, error, words = WRONG_CALLS[case]
    made = plan(3, 5, 4, stage="naive")
    monkeypatch.setattr(launch, "launch", lambda *_, **__: pytest.fail("launched in spite of the error"))
    with pytest.raises(error) as caught:
        made(*arguments, **options)
    assert all(word in str(caught.value) for word in words)


def test_plan_of_another_device(monkeypatch):
    made, properties = plan(3, 5, 4, stage="naive"), launch.device_properties()
    monkeypatch.setattr(requests, "_common_device", lambda operands, home: 1)
    monkeypatch.setattr(launch, "device_properties", lambda device=0: properties)  # there may be no other
    with pytest.raises(ValueError, match=r"operands lie on device 1 .* for device 0; expected one device; .* another"):
        made(A, B)


@pytest.mark.simulator  # there may be no second GPU
def test_plan_of_a_device_that_is_not_current(monkeypatch):
    """A plan computes NumPy arrays on its own device, given by `device` or `like`."""
    properties = launch.device_properties()
    monkeypatch.setattr(launch, "device_properties", lambda device=0: properties)
    monkeypatch.setattr(launch, "device_count", lambda: 2)
    monkeypatch.setattr(launch, "current_device", lambda: 0)
    used, launched = [], launch.launch

    def run(stage, config, alpha, a, b, beta, c, **options):
        used.append((a.device, b.device, c.device))
        launched(stage, config, alpha, a, b, beta, c, **options)

    monkeypatch.setattr(launch, "launch", run)
    made = plan(3, 5, 4, device=1, stage="naive")
    check(made(A, B), A, B)
    assert (made.device, used) == (1, [(1, 1, 1)])
    described = arrays.describe("like", A, None)
    described.device = 1
    monkeypatch.setattr(arrays, "describe", lambda *_: described)
    assert plan(3, 5, 4, like=A, stage="naive").device == 1
    assert plan(3, 5, 4, like=A, device=1, stage="naive").device == 1
    with pytest.raises(ValueError, match="like lies on device 1 and device is 0; expected one device; pass"):
        plan(3, 5, 4, like=A, device=0, stage="naive")


# ---------------------------------------------------------------------------------------------------------- schedules


NAIVE = STAGES["naive"]
CONFIG = STAGES["stream_k"].configs[1]  # which the loaders of all layouts cover
WORDS = list(range(2, len(FIELDS)))


def scheduled(stage, make):
    """A copy of a stage that has a schedule."""
    copy = type(stage)(**{name: getattr(stage, name) for name in stage.__dataclass_fields__})
    object.__setattr__(copy, "schedule", make)
    return copy


@pytest.mark.simulator
def test_simulated_kernel_gets_its_work():
    seen = []

    def kernel(alpha, a, b, beta, c, work):
        memory, counters, *words = work
        seen.append((memory.size, memory.dtype, bool(np.isnan(memory).all()), counters.tolist(), words))
        c[0, 0] = a[0, 0] * b[0, 0]

    def schedule(config, m, n, k, batch, share):
        assert (m, n, k, batch, share) == (1, 1, 1, Batch(), Share(1, 0))
        return Schedule((1, 1, 1), 256, 3, tuple(WORDS))

    stage = scheduled(STAGES["naive"], schedule)
    object.__setattr__(stage, "build", lambda config, form: kernel)
    object.__setattr__(stage, "block", lambda config: (1, 1))
    c = np.zeros((1, 1), np.float32)
    a, b, z = (
        Matrix(x.ctypes.data, 1, 1, 4, 4, 0, x) for x in (np.full((1, 1), 2, np.float32), np.ones((1, 1), "f4"), c)
    )
    launch.launch(stage, CONFIG, 1.0, a, b, 0.0, z, share=Share(1, 0))
    assert c[0, 0] == 2
    assert seen == [(64, np.float32, True, [0, 0, 0], WORDS)]


# -------------------------------------------------------------------------------- launches, without a driver to do them


class HostGpu:
    """Stands in for a driver whose kernels multiply matrices in host memory."""

    def __init__(self):
        self.current = CONTEXT
        self.capturing: dict[int, int] = {}
        self.launches: list[types.SimpleNamespace] = []
        self.allocations: list[np.ndarray] = []
        self.pushed: list[int] = []
        self.status = self.vectors = 0
        self.pause = threading.Event().wait

    def raw(self, name):
        return getattr(self, name)

    def cuCtxGetCurrent(self, place):
        ctypes.c_void_p.from_address(place.value).value = self.current
        return 0

    def cuStreamGetId(self, stream, identity):
        identity._obj.value = 1000 + (stream.value or 0)
        return 0

    def cuStreamIsCapturing(self, stream, status):
        assert stream.value, "asked about the default stream"
        status._obj.value = stream.value in self.capturing
        return 0

    def cuLaunchKernelEx(self, config, kernel, parameters, extra):
        if self.status:
            return self.status
        layout = driver_module._LaunchConfig.from_address(config.value)
        pointers = (ctypes.c_void_p * 60).from_address(parameters.value)

        def number(i):
            return ctypes.c_float.from_address(pointers[i]).value

        def words(first, count):
            return [ctypes.c_int64.from_address(pointers[i]).value for i in range(first, first + count)]

        did = types.SimpleNamespace(
            alpha=number(0), a=words(1, 5), b=words(6, 5), beta=number(11), c=words(12, 5), stream=layout.stream or 0
        )
        did.grid, did.block, did.shared = tuple(layout.grid), tuple(layout.block), layout.shared
        did.kernel, did.extra = kernel.value, extra.value
        steps = [(0, 0, 0)] * 3
        extents = (1, 1, 1)
        if kernel.value == SCHEDULED:
            did.work = types.SimpleNamespace(**dict(zip(FIELDS, words(17, len(FIELDS)), strict=True)))
            each = did.work.inner * did.work.middle
            extents = (did.work.matrices // each if each else 1, did.work.middle, did.work.inner)
            steps = [[getattr(did.work, f"{x}_{axis}") for axis in ("outer", "middle", "inner")] for x in "abc"]
            first = 17 + len(FIELDS)
            did.vectors = [words(first + 7 * i, 7) for i in range(self.vectors)]
        self.pause(0.0005)  # others run
        self.launches.append(did)
        for index in np.ndindex(extents):
            x, y, z = (
                view(one[0] + int(np.dot(index, step)), *one[1:])
                for one, step in zip((did.a, did.b, did.c), steps, strict=True)
            )
            z[...] = did.alpha * (x @ y) + (did.beta * z if did.beta else 0)
        assert (number(0), words(1, 5), words(12, 5)) == (did.alpha, did.a, did.c), "another thread used this frame"
        return 0

    @contextmanager
    def scope(self, device):
        before, self.current = self.current, CONTEXT
        self.pushed.append(device)
        yield
        self.current = before

    def call(self, function, *arguments):
        return getattr(self, function.__name__)(*arguments)

    def cuMemAlloc(self, size):
        self.allocations.append(np.full(-(-size // 4) + 64, 77, np.int32))
        return -(-self.allocations[-1].ctypes.data // 256) * 256

    def cuMemsetD32Async(self, pointer, value, count, stream):
        assert stream == 9
        np.frombuffer((ctypes.c_int32 * count).from_address(pointer), np.int32)[:] = value

    def cuStreamCreate(self, flags):
        return 9

    def cuStreamSynchronize(self, stream):
        assert stream == 9

    def cuStreamDestroy(self, stream):
        assert stream == 9

    def cuThreadExchangeStreamCaptureMode(self, mode):
        return mode


CONTEXT, KERNEL, SCHEDULED = 4321, 77, 78


def view(pointer, rows, cols, row_stride, col_stride):
    interface = {
        "data": (pointer, False),
        "shape": (rows, cols),
        "strides": (row_stride, col_stride),
        "typestr": "<f4",
        "version": 3,
    }
    return np.asarray(types.SimpleNamespace(__array_interface__=interface))


def matrix(x, device=0):
    return Matrix(x.ctypes.data, *x.shape, *x.strides, device, x)


@pytest.fixture
def gpu(monkeypatch):
    gpu, properties = HostGpu(), launch.device_properties(0)
    monkeypatch.setattr(driver_module, "raw", gpu.raw)
    monkeypatch.setattr(driver_module, "primary_context", lambda device: CONTEXT)
    monkeypatch.setattr(driver_module, "call", gpu.call)
    monkeypatch.setattr(workspace, "raw", gpu.raw)
    monkeypatch.setattr(workspace, "call", gpu.call)
    monkeypatch.setattr(workspace, "_workspaces", {})
    monkeypatch.setattr(
        driver,
        "cuStreamGetCaptureInfo",
        lambda stream: (driver.CUresult.CUDA_SUCCESS, None, gpu.capturing[stream], None, None, None, 0),
    )
    monkeypatch.setattr(launch, "SIMULATOR", False)
    monkeypatch.setattr(launch, "_bound", {})
    monkeypatch.setattr(launch, "device_scope", gpu.scope)
    monkeypatch.setattr(plans, "device_scope", gpu.scope)
    monkeypatch.setattr(launch, "device_properties", lambda device=0: properties)
    monkeypatch.setattr(launch, "device_count", lambda: 1)
    monkeypatch.setattr(launch, "current_device", lambda: 0)

    def prepare(stage, config, form, device=0):
        return launch.CompiledKernel(SCHEDULED if stage.schedule is not None else KERNEL + 10 * (not form))

    monkeypatch.setattr(launch, "prepare", prepare)
    return gpu


def bind(a, b, c, **options):
    return launch.bind(NAIVE, CONFIG, *map(matrix, (a, b, c)), **options)


def addresses(a, b, c):
    return a.ctypes.data, b.ctypes.data, c.ctypes.data


@pytest.mark.parametrize("layout", sorted(LAYOUTS.keys() - {"packed records"}))  # which lie off float32's boundaries
def test_launch_tells_the_driver_everything(gpu, layout):
    lay_out = LAYOUTS[layout]
    a, b, c = lay_out(filled(6, 3)), lay_out(filled(3, 5)), lay_out(filled(6, 5, seed=1))
    before, bound = c.copy(), bind(a, b, c)
    bound(2.0, a.ctypes.data, b.ctypes.data, 0.5, c.ctypes.data, 40)
    check(c, a, b, alpha=2.0, beta=0.5, c=before)
    (did,) = gpu.launches
    assert did.grid == (*NAIVE.grid(CONFIG, 6, 5), 1)
    assert did.block == (*NAIVE.block(CONFIG), 1)
    assert (did.shared, did.stream, did.extra) == (CONFIG.dynamic_shared, 40, None)
    other_a, other_c = lay_out(filled(6, 3, seed=3)), lay_out(filled(6, 5, seed=4))
    bound(1.0, other_a.ctypes.data, b.ctypes.data, 0.0, other_c.ctypes.data, 0)
    check(other_c, other_a, b)
    assert gpu.launches[-1].stream == 0


@pytest.mark.parametrize("layout", [*LAYOUTS, *REPEATING])
def test_parts_of_a_matrix_have_numpys_addresses(layout):
    x = (LAYOUTS | REPEATING)[layout](filled(6, 8))
    whole = matrix(x)
    parts = {
        "rows": (whole.take_rows(2, 5), x[2:5]),
        "columns": (whole.take_cols(3, 7), x[:, 3:7]),
        "both": (whole.take_cols(1, 8).take_rows(1, 6).take_rows(2, 4), x[3:5, 1:]),
        "transposed": (whole.transposed, x.T),
        "rows of the transpose": (whole.transposed.take_rows(3, 7), x.T[3:7]),
        "transpose of rows and columns": (whole.take_rows(2, 5).take_cols(3, 7).transposed, x[2:5, 3:7].T),
    }
    for name, (part, expected) in parts.items():
        assert part.packed == matrix(expected).packed, name
        if SIMULATOR:
            assert matrix(part.owner).packed == part.packed, name


def test_launches_are_kept_by_layout(gpu):
    a, b, c = filled(8, 4), filled(4, 8), filled(8, 8)
    assert bind(a, b, c) is bind(a.copy(), b.copy(), c.copy()) is not bind(a, b, c.T)
    assert bind(a[:4], b, c[:4]) is not bind(a, b, c)
    wide = filled(8, 12)
    offs = [wide[:, i : i + 4] for i in range(5)]
    assert bind(offs[0], b, c) is bind(offs[4], b, c) is not bind(offs[1], b, c), "an address off by four bytes"
    launch.launch(NAIVE, CONFIG, 1.0, matrix(a), matrix(b), 0.0, matrix(c))
    assert len(gpu.launches) == 1
    check(c, a, b)


def test_each_operand_s_boundary_counts(gpu):
    wide = aligned_empty((9, 12))
    wide[...] = filled(9, 12)
    stage, config = STAGES["stream_k"], CONFIG
    forms = set()
    for i, j, k in np.ndindex(2, 2, 2):
        a, b, c = matrix(wide[:8, i : i + 8]), matrix(wide[:8, j : j + 8]), matrix(wide[:8, k : k + 8])
        forms.add(id(launch.bind(stage, config, a, b, c)))
    assert len(forms) == 8


def vector(size=8, stride=4):
    return Vector(4096, size, stride, None)


STREAM_K = STAGES["stream_k"]
LYING = {"a": (4096, 8, 12, 48, 4), "b": (8192, 12, 8, 32, 4), "c": (16384, 8, 8, 32, 4)}
BATCH = Batch((1, 1, 2), (0, 0, 384), (0, 0, 384), (0, 0, 256))
# One row per property of the operands or options that needs a launch of its own.
LAUNCH_KEYS = {
    "stage": {"stage": scheduled(STREAM_K, STREAM_K.schedule)},
    "configuration": {"config": STREAM_K.configs[2]},
    "device": {"device": 1},
    "rows": {"a": (4096, 4, 12, 48, 4), "c": (16384, 4, 8, 32, 4)},
    "columns": {"b": (8192, 12, 4, 32, 4), "c": (16384, 8, 4, 32, 4)},
    "k": {"a": (4096, 8, 8, 48, 4), "b": (8192, 8, 8, 32, 4)},
    "A's row stride": {"a": (4096, 8, 12, 64, 4)},
    "A's column stride": {"a": (4096, 8, 12, 48, 8)},
    "B's row stride": {"b": (8192, 12, 8, 64, 4)},
    "B's column stride": {"b": (8192, 12, 8, 32, 8)},
    "C's row stride": {"c": (16384, 8, 8, 64, 4)},
    "C's column stride": {"c": (16384, 8, 8, 32, 8)},
    "A's boundary": {"a": (4100, 8, 12, 48, 4)},
    "B's boundary": {"b": (8196, 12, 8, 32, 4)},
    "C's boundary": {"c": (16388, 8, 8, 32, 4)},
    "workspace": {"workspace": workspace.Workspace(1 << 20, 1 << 20, 100)},
    "share": {"share": Share(2, 0)},
    "extents of the batch": {"extra": replace(BASE := Extra(BATCH, abs, (vector(),)), batch=Batch((1, 2, 1)))},
    "A's step": {"extra": replace(BASE, batch=replace(BATCH, a=(0, 0, 768)))},
    "B's step": {"extra": replace(BASE, batch=replace(BATCH, b=(0, 0, 0)))},
    "C's step": {"extra": replace(BASE, batch=replace(BATCH, c=(0, 0, 512)))},
    "epilogue": {"extra": replace(BASE, epilogue=max)},
    "no epilogue": {"extra": Extra(BATCH)},
    "vectors": {"extra": replace(BASE, vectors=(vector(), vector()))},
    "a vector's size": {"extra": replace(BASE, vectors=(vector(size=12),))},
    "a vector's stride": {"extra": replace(BASE, vectors=(vector(stride=8),))},
}


@pytest.mark.parametrize("case", LAUNCH_KEYS)
def test_launch_key_has_every_property(gpu, case):
    def bound(stage=STREAM_K, config=CONFIG, device=0, workspace=None, share=None, extra=BASE, **lying):
        a, b, c = (Matrix(*(LYING | lying)[name], device, None) for name in "abc")
        return launch.bind(stage, config, a, b, c, workspace, share, extra)

    first = bound()
    assert bound() is first
    assert bound(**LAUNCH_KEYS[case]) is not first
    assert bound() is first


def test_caches_keyed_by_identity_keep_the_object_alive(gpu):
    """Otherwise a new object may have the id of a freed one, and find its entry."""
    a, b, c = filled(4, 4), filled(4, 4), filled(4, 4)
    for slots in range(2, 40):
        launch.launch(NAIVE, CONFIG.replace(slots=slots), 1.0, matrix(a), matrix(b), 0.0, matrix(c))
        assert gpu.launches[-1].shared == CONFIG.replace(slots=slots).dynamic_shared
    once = launch._Once(lambda config: config.slots)
    for _ in range(3):
        for slots in range(2, 40):
            assert once(CONFIG.replace(slots=slots)) == slots


def test_kernel_is_built_once_by_concurrent_threads():
    made, begun = [], threading.Event()

    def make(key):
        made.append(key)
        begun.wait(0.2)  # others ask meanwhile
        return object()

    once = launch._Once(make)
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(lambda _: once("kernel"), range(4)))) == 1
    assert made == ["kernel"]


def test_empty_results_are_not_launched(gpu):
    for rows, cols in ((0, 8), (8, 0)):
        a, b, c = matrix(filled(rows, 4)), matrix(filled(4, cols)), matrix(filled(rows, cols))
        launch.launch(NAIVE, CONFIG, 1.0, a, b, 0.0, c)
    assert not gpu.launches


def test_default_share_is_that_of_the_whole_batch(gpu):
    a, b, c = (Matrix(*LYING[name], 0, None) for name in "abc")
    extra = Extra(Batch((5, 7, 9)))
    share = launch.natural_share(CONFIG, 8, 8, 12, 5 * 7 * 9, launch.device_properties().sm_count)
    assert launch.share_of(STREAM_K, CONFIG, a, b, c, extra) == share != launch.share_of(STREAM_K, CONFIG, a, b, c)


def test_largest_k_with_an_epilogue(gpu, monkeypatch):
    monkeypatch.setattr(launch, "MAX_K", 12)
    a, b, c = (Matrix(*LYING[name], 0, None) for name in "abc")
    assert launch.takes_one_launch(STREAM_K, CONFIG, 8, 8, 12)
    assert not launch.takes_one_launch(STREAM_K, CONFIG, 8, 8, 13)
    monkeypatch.setattr(launch, "MAX_K", 11)
    monkeypatch.setattr(launch, "bind", lambda *_: pytest.fail("launched in spite of the error"))
    with pytest.raises(ValueError, match="K is 12, beyond the 11 that a product with an epilogue may have"):
        launch.launch(STREAM_K, CONFIG, 1.0, a, b, 0.0, c, extra=BASE)


@pytest.mark.parametrize("name", "ab")
def test_apart_includes_all_matrices_of_a_batch(gpu, name):
    """Two matrices, 4096 bytes apart; C is shared."""
    steps = {x: (0, 0, 4096 if x == name else 0) for x in "abc"}
    a, b, c = (Matrix(0, 4, 4, 16, 4, 0, None) for _ in "abc")
    bound = Launch(STREAM_K, CONFIG, a, b, c, share=Share(2, 2), extra=Extra(Batch((1, 1, 2), **steps)))
    far = 1 << 30
    for distance, apart in ((-4096 - 64, True), (-4096 - 63, False), (-4096, False), (63, False), (64, True)):
        places = {"a": far, "b": far, "c": 1 << 20} | {name: (1 << 20) + distance}
        assert bound.apart(*places.values()) == apart


def test_batches_and_vectors_are_told_to_the_driver(gpu):
    a, b, c = filled(4, 8), filled(8, 4), filled(4, 8)
    vectors = filled(2, 12)
    places = [Vector(row.ctypes.data, row.size, row.strides[0], row) for row in (vectors[0, ::2], vectors[1, ::-2])]
    gpu.vectors = 2
    batch = Batch((1, 1, 2), (0, 0, 64), (0, 0, 0), (0, 0, 64))
    x, y = matrix(a.reshape(2, 4, 4)[0]), matrix(b[:4])
    z = matrix(c.reshape(2, 4, 4)[0])
    run = (STAGES["stream_k"], CONFIG)
    for order in (1, -1):
        extra = Extra(batch, abs, tuple(places[::order]))
        launch.launch(*run, 1.0, x, y, 0.0, z, extra=extra)
        did = gpu.launches[-1]
        assert did.vectors == [list(place.words) for place in places[::order]]
        np.testing.assert_allclose(c.reshape(2, 4, 4), a.reshape(2, 4, 4) @ b[:4], rtol=1e-5, atol=1e-6)
    moved = Vector(places[0].pointer + 4, places[0].size, places[0].stride, None)
    assert (
        len({id(launch.bind(*run, x, y, z, extra=Extra(batch, abs, (v, places[1])))) for v in (places[0], moved)}) == 1
    )
    # C reaches as far as its last matrix does.
    bound = launch.bind(*run, x, y, z, extra=Extra(batch))
    far = c.ctypes.data + 4096
    assert bound.apart(c.ctypes.data - 128, far, c.ctypes.data)
    assert not bound.apart(c.ctypes.data - 124, far, c.ctypes.data)
    assert bound.apart(c.ctypes.data + 128, far, c.ctypes.data)
    assert not bound.apart(c.ctypes.data + 124, far, c.ctypes.data)
    assert bound.apart(far, c.ctypes.data - 64, c.ctypes.data)


def test_what_bind_keeps_does_not_hold_vectors(gpu):
    a, b, c = filled(4, 4), filled(4, 4), filled(4, 4)
    vector = np.ones(4, np.float32)
    alive = weakref.ref(vector)
    extra = Extra(vectors=(Vector(vector.ctypes.data, 4, 4, vector),), epilogue=abs)
    gpu.vectors = 1
    launch.launch(STAGES["stream_k"], CONFIG, 1.0, matrix(a), matrix(b), 0.0, matrix(c), extra=extra)
    del vector, extra
    gc.collect()
    assert alive() is None


def test_launch_in_a_thread_without_context(gpu):
    a, b, c = filled(3, 3), filled(3, 3), filled(3, 3)
    gpu.current = None
    bind(a, b, c)(1.0, *addresses(a, b, c)[:2], 0.0, c.ctypes.data, 0)
    assert (gpu.pushed, gpu.current, len(gpu.launches)) == ([0], None, 1)
    check(c, a, b)


def test_launch_that_fails_tells_why(gpu, monkeypatch):
    a, b, c = filled(3, 3), filled(3, 3), filled(3, 3)
    gpu.status = int(driver.CUresult.CUDA_ERROR_INVALID_VALUE)
    monkeypatch.setattr(driver, "cuGetErrorString", lambda status: (0, b"bad words"))
    with pytest.raises(RuntimeError, match=r"cuLaunchKernelEx failed: bad words \(CUDA_ERROR_INVALID_VALUE\)"):
        bind(a, b, c)(1.0, *addresses(a, b, c)[:2], 0.0, c.ctypes.data, 0)


def test_threads_share_a_launch(gpu):
    a, b, c = filled(4, 4), filled(4, 4), filled(4, 4)
    bound, together = bind(a, b, c), threading.Barrier(4)

    def work(seed):
        together.wait()
        for turn in range(10):
            x, y, z = filled(4, 4, seed), filled(4, 4, turn), np.full((4, 4), NAN)
            bound(float(seed + 1), *addresses(x, y, z)[:2], 0.0, z.ctypes.data, 40 + seed)
            check(z, x, y, alpha=float(seed + 1))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(gpu.launches) == 40


def test_apart_is_by_bytes(gpu):
    memory = np.zeros(400, np.float32)

    def piece(offset, rows, cols, row_step, col_step=1):
        return np.lib.stride_tricks.as_strided(memory[offset:], (rows, cols), (4 * row_step, 4 * col_step))

    far = piece(300, 4, 4, 4)
    for a, c, apart in [
        (piece(0, 4, 4, 4), piece(16, 4, 4, 4), True),
        (piece(0, 4, 4, 4), piece(15, 4, 4, 4), False),
        (piece(16, 4, 4, 4), piece(0, 4, 4, 4), True),
        (piece(0, 4, 4, 8), piece(4, 4, 4, 8), False),  # beside each other: for the long way to see
        (piece(12, 4, 4, -4), piece(16, 4, 4, 4), True),
        (piece(12, 4, 4, -4), piece(0, 4, 4, 4), False),
        (piece(31, 4, 4, -4, -1), piece(0, 4, 4, 4), True),
        (piece(30, 4, 4, -4, -1), piece(0, 4, 4, 4), False),
    ]:
        for left, right in ((a, far), (far, a)):
            bound = Launch(NAIVE, CONFIG, matrix(left), matrix(right), matrix(c))
            assert bound.apart(*addresses(left, right, c)) == apart


def test_arguments_that_move():
    arguments = compiler.KernelArguments([1.5, (1, 2, 3), 2.5, (4,)], moving=(0, 4, 2))
    pointers = (ctypes.c_void_p * len(arguments)).from_address(arguments.address)

    def read():
        floats = [ctypes.c_float.from_address(pointers[i]).value for i in (0, 4)]
        return floats + [ctypes.c_int64.from_address(pointers[i]).value for i in (1, 2, 3, 5)]

    assert read() == [1.5, 2.5, 1, 2, 3, 4]
    arguments.move(-1.0, -2.0, 2**47)
    assert read() == [-1.0, -2.0, 1, 2**47, 3, 4]


# --------------------------------------------------------------------------------------------------------- workspaces


def schedule_of(size, counters):
    def schedule(config, m, n, k, batch, share):
        return Schedule((2, 3, 4), size, counters, (share.blocks, *[0] * 6, 1, 1, 1, *[0] * 9))

    return schedule


def test_scheduled_launch_gets_a_workspace(gpu):
    stage = scheduled(NAIVE, schedule_of(1000, 5))
    a, b, c = filled(4, 4), filled(4, 4), filled(4, 4)
    launch.launch(stage, CONFIG, 1.0, matrix(a), matrix(b), 0.0, matrix(c), stream=40)
    (did,) = gpu.launches
    memory, counters = did.work.partials, did.work.counters
    assert did.grid == (2, 3, 4)
    assert (memory % 256, counters - memory, did.work.whole) == (0, 1024, 1)
    assert list((ctypes.c_int32 * 5).from_address(counters)) == [0] * 5
    launch.launch(stage, CONFIG, 1.0, matrix(a), matrix(b), 0.0, matrix(c), stream=50)
    launch.launch(stage, CONFIG, 1.0, matrix(a), matrix(b), 0.0, matrix(c), stream=40)
    assert gpu.launches[1].work.partials != gpu.launches[2].work.partials == memory
    given = workspace.Workspace(a.ctypes.data, 1000, 5)
    launch.launch(stage, CONFIG, 1.0, matrix(a), matrix(b), 0.0, matrix(c), stream=40, workspace=given)
    assert (gpu.launches[-1].work.partials, gpu.launches[-1].work.counters) == given.words
    small = workspace.Workspace(a.ctypes.data, 999, 5)
    with pytest.raises(ValueError, match=r"holds 999 bytes and 5 counters; expected 1000 and 5; pass an array of 1044"):
        launch.launch(stage, CONFIG, 1.0, matrix(a), matrix(b), 0.0, matrix(c), workspace=small)


def test_workspaces_grow_and_captures_have_their_own(gpu):
    first = workspace.reserve(0, 40, 1000, 4)
    assert workspace.reserve(0, 40, 900, 3) == first
    gpu.capturing = {40: 7}
    captured = workspace.reserve(0, 40, 1000, 4)
    assert captured != first
    gpu.capturing = {40: 8, 50: 8}
    others = {workspace.reserve(0, 40, 1000, 4), workspace.reserve(0, 50, 1000, 4)}
    assert len(others | {first, captured}) == 4, "branches of a graph run beside each other"
    gpu.capturing = {}
    assert workspace.reserve(0, 40, 1000, 4) == first
    grown = workspace.reserve(0, 40, 1001, 4)
    assert grown != first
    assert workspace.reserve(0, 40, 2000, 4) == grown, "grew by less than double"
    assert workspace.reserve(0, 40, 10, 5) != grown
    assert workspace.reserve(0, 40, 2000, 8) == workspace.reserve(0, 40, 10, 5)
    assert workspace.reserve(0, 40, 9000, 1) == workspace.reserve(0, 40, 10, 8), "counters were lost"
    assert workspace.reserve(0, 0, 10, 5) != workspace.reserve(1, 0, 10, 5)


def test_thread_default_streams_of_one_capture_have_their_own_workspaces(gpu):
    """Handle 2 is another stream in every thread; an event may bring both into one capture."""
    gpu.capturing = {2: 7}
    first = workspace.reserve(0, 2, 1000, 4)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(workspace.reserve, 0, 2, 1000, 4).result() != first
    assert workspace.reserve(0, 2, 1000, 4) == first


def test_plan_keeps_a_given_workspace(gpu, monkeypatch):
    choice = Choice(scheduled(NAIVE, schedule_of(512, 4)), CONFIG)
    monkeypatch.setattr(plans.heuristics, "choose", lambda problem: choice)
    memory = np.full(400, 7, np.float32)
    memory = memory[-(memory.ctypes.data // 4) % 64 :][:256]  # no room for counters behind whole multiples of 256 bytes
    assert plan(4, 4, 4).workspace_bytes == 528
    for wrong, words in (
        (memory[:131], r"has 524 bytes; expected at least 528; pass an array of 132 elements"),
        (memory[1:], r"starts at address 0x\w+; expected alignment to 256 bytes; pass a newly allocated"),
        (frozen(memory[:]), "workspace is read-only; expected memory that can be written; pass another"),
        (memory[:264:2], r"strides \(8,\); expected contiguous"),
    ):
        with pytest.raises(ValueError, match=words):
            plan(4, 4, 4, workspace=wrong)
    monkeypatch.setattr(arrays, "KINDS", (host.HostArrays(),))
    described = host.HostArrays().describe("workspace", memory, None)
    described.device = 0
    monkeypatch.setattr(arrays, "describe", lambda *_: described)
    monkeypatch.setattr(host.HostArrays, "streams", lambda *_: [arrays.Stream(9)])
    made = plans.Plan(4, 4, 4, 0, "auto", "NN", memory)
    assert made._workspace.words[0] == memory.ctypes.data
    counters = (made._workspace.words[1] - memory.ctypes.data) // 4
    assert memory[counters : counters + 4].tolist() == [0.0] * 4
    assert (memory[:counters] == 7).all()
    assert counters + 4 <= memory.size
    described.device = 1
    with pytest.raises(ValueError, match="workspace lies on device 1 and the plan is for device 0; expected one"):
        plans.Plan(4, 4, 4, 0, "auto", "NN", memory)


# ------------------------------------------------------------------------------------------------------- the short way


class Tensor:
    """As much of a PyTorch tensor as is looked at, in host memory."""

    def __init__(self, x, device=0):
        self.x, self.index = x, device
        self.device = types.SimpleNamespace(type="cuda", index=device)
        self.dtype, self.layout, self.is_cuda, self.requires_grad, self.neg = "float32", "strided", True, False, False
        self.version, self.tangent = 0, None
        self.address = self.x.ctypes.data  # or the exception that PyTorch raises

    is_nested = is_quantized = False
    shape = property(lambda self: self.x.shape)

    def stride(self):
        return tuple(step // 4 for step in self.x.strides)

    def data_ptr(self):
        if isinstance(self.address, Exception):
            raise self.address
        return self.address

    def get_device(self):
        return self.index

    def element_size(self):
        return 4

    def is_neg(self):
        return self.neg

    def is_inference(self):
        return False

    def new_empty(self, shape):
        return Tensor(aligned_empty(shape), self.index)


def aligned_empty(shape):
    size = int(np.prod(shape))
    memory = np.full(size + 4, NAN)
    skip = -(memory.ctypes.data // 4) % 4
    return memory[skip : skip + size].reshape(shape)


def tensor(x, **options):
    copy = aligned_empty(x.shape)
    copy[...] = x
    return Tensor(copy, **options)


@pytest.fixture
def torch(gpu, monkeypatch):
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
        strided="strided",
        current=current,
        _C=types.SimpleNamespace(_cuda_getCurrentRawStream=lambda device: current.cuda_stream),
        cuda=types.SimpleNamespace(current_stream=lambda device: current),
        autograd=types.SimpleNamespace(
            graph=types.SimpleNamespace(increment_version=increment_version),
            forward_ad=types.SimpleNamespace(_current_level=-1, unpack_dual=unpack_dual),
        ),
        empty=lambda shape, **_: Tensor(aligned_empty(shape)),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(arrays, "KINDS", (libraries.TorchTensors(),))
    monkeypatch.setattr(short_way, "GLANCES", {})
    monkeypatch.setattr(products, "seen", {})
    return torch


@pytest.fixture
def checked(monkeypatch):
    """The calls that were checked in full."""
    calls, check_in_full = [], products.checked_product

    def count(*arguments, **options):
        calls.append(arguments)
        return check_in_full(*arguments, **options)

    monkeypatch.setattr(products, "checked_product", count)
    return calls


@pytest.fixture(params=["function", "plan"])
def product(request, torch):
    return plan(4, 8, 12) if request.param == "plan" else tiled_sgemm


def operands(seed=0):
    return filled(4, 12, seed), filled(12, 8, seed), filled(4, 8, seed + 1)


@pytest.mark.parametrize("given", [True, False])
def test_second_call_takes_the_short_way(torch, gpu, checked, product, given):
    for turn in range(4):
        a, b, c = operands(turn)
        out = tensor(c) if given else None
        alpha, beta = (1.0, 0.0) if turn < 2 else (-turn, 0.5 if given else 0)
        torch.current.cuda_stream = 40 + 10 * (turn % 2)
        result = product(tensor(a), tensor(b), out, alpha=alpha, beta=beta)
        assert (result is out) == given
        check(result.x, a, b, alpha=alpha, beta=beta, c=c)
        assert gpu.launches[-1].stream == torch.current.cuda_stream
        assert result.version == given
        assert len(checked) == 1
    product(tensor(a), tensor(b), None if given else tensor(c))
    assert len(checked) == 2, "with out or without is not the same call"


def test_repeated_call_releases_finished_holds(torch, product, monkeypatch):
    released = []
    monkeypatch.setattr(short_way, "release_finished", lambda: released.append(True))
    a, b, _ = operands()
    for calls in range(3):
        product(tensor(a), tensor(b))
        assert len(released) == calls


def test_transposes_take_the_short_way_too(torch, gpu, checked, monkeypatch):
    choice = Choice(STAGES["stream_k"], CONFIG, swapped=True)
    monkeypatch.setattr(plans.heuristics, "choose", lambda problem: choice)
    for turn in range(3):
        a, b, c = operands(turn)
        out = tensor(c)
        check(tiled_sgemm(tensor(a), tensor(b), out, beta=1.0).x, a, b, beta=1.0, c=c)
        assert gpu.launches[-1].c[1:] == [8, 4, 4, 32]
    assert len(checked) == 1
    one = tensor(a)
    with pytest.raises(ValueError, match="shares memory with a"):
        tiled_sgemm(one, tensor(b), Tensor(one.x.ravel()[16:].reshape(4, 8)))


@pytest.mark.parametrize("given", [True, False])
def test_batches_take_the_short_way(torch, gpu, checked, given):
    for turn in range(3):
        a, b, c = (
            np.stack([filled(*shape, seed) for seed in (turn, turn + 1)]) for shape in ((4, 12), (12, 8), (4, 8))
        )
        result = tiled_sgemm(tensor(a), tensor(b), tensor(c) if given else None)
        assert result.shape == (2, 4, 8)
        for got, one, other in zip(result.x, a, b, strict=True):
            check(got, one, other)
    assert (len(gpu.launches), len(checked)) == (3, 1)
    assert gpu.launches[-1].work.matrices == 2
    with pytest.raises(ValueError, match=r"a has shape \(2, 4, 12\) .* this plan is for shapes \(4, 12\)"):
        plan(4, 8, 12)(tensor(a), tensor(b))


def test_repeated_call_of_a_transposed_batch(torch, gpu, checked, monkeypatch):
    """Matrices of A are 256 bytes apart, those of B 2048 bytes."""
    choice = Choice(STAGES["stream_k"], CONFIG, swapped=True)
    monkeypatch.setattr(plans.heuristics, "choose", lambda problem: choice)
    for turn in range(2):
        a, b = (np.stack([filled(*shape, turn + i) for i in range(3)]) for shape in ((1, 64), (8, 64)))
        across = tensor(b)
        across.x = across.x.transpose(0, 2, 1)
        result = tiled_sgemm(tensor(a), across, tensor(np.zeros((3, 1, 8), np.float32)))
        for got, one, other in zip(result.x, a, b, strict=True):
            check(got, one, other.T)
        did = gpu.launches[-1]
        assert (did.a[1:3], did.work.a_inner, did.work.b_inner, did.work.c_inner) == ([8, 64], 2048, 256, 32)
    assert len(checked) == 1


def test_batch_of_several_launches_is_not_remembered(torch, gpu, checked):
    for turn in range(2):
        a, b = (np.stack([filled(*shape, turn + i) for i in range(3)]) for shape in ((4, 12), (12, 8)))
        result = tiled_sgemm(tensor(a), tensor(b), stage="naive")
        for got, one, other in zip(result.x, a, b, strict=True):
            check(got, one, other)
    assert (len(gpu.launches), len(checked)) == (6, 2)


def test_product_of_several_slabs_is_not_remembered(torch, gpu, checked, monkeypatch):
    monkeypatch.setattr(launch, "MAX_GRID_Y", 1)
    a, b = filled(70, 12), filled(12, 70)
    for _ in range(2):
        check(tiled_sgemm(tensor(a), tensor(b), stage="naive").x, a, b)
    assert len(checked) == 2
    assert len(gpu.launches) > 2


@pytest.mark.parametrize("given", [True, False])
def test_products_without_terms_are_not_remembered(torch, checked, product, given):
    """The launch of such a product reads neither A nor B."""
    a, b, c = operands()
    for alpha in (0.0, 1.0, 1.0):
        result = product(tensor(a), tensor(b), tensor(c) if given else None, alpha=alpha)
        check(result.x, a, b, alpha=alpha)
    assert len(checked) == 2


def test_beta_without_out_is_refused_in_a_repeated_call(torch, gpu, checked, product):
    a, b, _ = operands()
    product(tensor(a), tensor(b))
    with pytest.raises(ValueError, match=r"beta is 0\.5 and out is None"):
        product(tensor(a), tensor(b), beta=0.5)
    assert (len(gpu.launches), len(checked)) == (1, 2)


def test_plans_and_tiled_sgemm_remember_calls_separately(torch, checked):
    a, b, c = operands()
    made = plan(8, 4, 12)
    for multiply in (tiled_sgemm, plan(4, 8, 12)):
        multiply(tensor(a), tensor(b), tensor(c))
        with pytest.raises(ValueError, match=r"this plan is for shapes \(8, 12\) and \(12, 4\)"):
            made(tensor(a), tensor(b), tensor(c))
    assert len(checked) == 4


def test_repeated_call_keeps_share_and_workspace(torch, gpu, checked, monkeypatch):
    choice = Choice(scheduled(NAIVE, schedule_of(512, 4)), CONFIG, Share(3, 1))
    monkeypatch.setattr(plans.heuristics, "choose", lambda problem: choice)
    memory = np.full(400, 7, np.float32)
    memory = Tensor(memory[-(memory.ctypes.data // 4) % 64 :])
    torch.current.cuda_stream = 9  # the only one on which the stand-in sets memory
    given, alive = plan(4, 8, 12, workspace=memory), weakref.ref(memory)
    place = memory.data_ptr()
    del memory
    gc.collect()
    assert alive() is not None, "nothing keeps the workspace"
    a, b, _ = operands()
    for multiply in (given, plan(4, 8, 12), tiled_sgemm):
        for _ in range(2):
            check(multiply(tensor(a), tensor(b)).x, a, b)
            did = gpu.launches[-1]
            assert did.work.whole == 3, "blocks of the share"
            assert (did.work.partials == place) == (multiply is given)
            assert did.work.counters > did.work.partials > 0
        assert len(checked) == 1
        checked.clear()


def test_epilogues_take_the_long_way(torch, gpu, checked):
    a, b, _ = operands()
    gpu.vectors = 1
    vectors = [tensor(filled(1, 8, seed)[0]) for seed in range(2)]

    def shift(value, row, col, bias):
        return value + bias[col]

    for turn in range(2):
        tiled_sgemm(tensor(a), tensor(b), epilogue=shift, epilogue_args=[vectors[turn]])
        assert gpu.launches[-1].vectors[0][4] == vectors[turn].data_ptr()
    assert len(checked) == 2
    assert len({did.kernel for did in gpu.launches}) == 1
    gpu.vectors = 0
    tiled_sgemm(tensor(a), tensor(b), epilogue=lambda value, row, col: value)
    for _ in range(2):
        tiled_sgemm(tensor(a), tensor(b))
    assert len(checked) == 4, "a call without an epilogue is none of these, and remembered"
    elsewhere = tensor(filled(1, 8)[0], device=1)
    with pytest.raises(ValueError, match=r"several devices: .*epilogue_args\[0\] on device 1; expected one"):
        tiled_sgemm(tensor(a), tensor(b), epilogue=shift, epilogue_args=[elsewhere])


CHANGES = {
    "rows by columns": lambda a, b, out: ((Tensor(np.asfortranarray(a.x)), b, out), {}, None),
    "off by one": lambda a, b, out: ((Tensor(aligned_empty((1, 49))[0, 1:].reshape(4, 12)), b, out), {}, None),
    "part of more": lambda a, b, out: ((Tensor(aligned_empty((4, 16))[:, :12]), b, out), {}, None),
    "alpha zero": lambda a, b, out: ((a, b, out), {"alpha": 0.0}, None),
    "alpha rounds to zero": lambda a, b, out: ((a, b, out), {"alpha": 1e-60}, None),
    "alpha infinite": lambda a, b, out: ((a, b, out), {"alpha": float("inf")}, None),
    "alpha beyond float32": lambda a, b, out: ((a, b, out), {"alpha": 1e300}, None),
    "alpha below float32's normal range": lambda a, b, out: ((a, b, out), {"alpha": 1e-39}, None),
    "beta beyond float32": lambda a, b, out: ((a, b, out), {"beta": 1e300}, None),
    "beta is NaN": lambda a, b, out: ((a, b, out), {"beta": float("nan")}, None),
    "epilogue": lambda a, b, out: ((a, b, out), {"epilogue": "relu"}, TypeError),
    "vectors": lambda a, b, out: ((a, b, out), {"epilogue_args": a.x}, TypeError),
    "precision": lambda a, b, out: ((a, b, out), {"precision": "bf16x6"}, (ValueError, TypeError)),
    "alpha text": lambda a, b, out: ((a, b, out), {"alpha": "1"}, TypeError),
    "beta text": lambda a, b, out: ((a, b, out), {"beta": "1"}, TypeError),
    "stream text": lambda a, b, out: ((a, b, out), {"stream": "s"}, TypeError),
    "requires grad": lambda a, b, out: ((changed(a, requires_grad=True), b, out), {}, ValueError),
    "out requires grad": lambda a, b, out: ((a, b, changed(out, requires_grad=True)), {}, ValueError),
    "a without storage": lambda a, b, out: ((changed(a, address=RuntimeError()), b, out), {}, TypeError),
    "b without memory": lambda a, b, out: ((a, changed(b, address=0), out), {}, TypeError),
    "out without memory": lambda a, b, out: ((a, b, changed(out, address=0)), {}, TypeError),
    "negative": lambda a, b, out: ((a, changed(b, neg=True), out), {}, ValueError),
    "dtype": lambda a, b, out: ((a, changed(b, dtype="float16"), out), {}, TypeError),
    "layout": lambda a, b, out: ((changed(a, layout="sparse"), b, out), {}, TypeError),
    "CPU": lambda a, b, out: (
        (changed(a, is_cuda=False, device=types.SimpleNamespace(type="cpu")), b, out),
        {},
        TypeError,
    ),
    "other device": lambda a, b, out: ((a, tensor(b.x, device=1), out), {}, ValueError),
    "out on another device": lambda a, b, out: ((a, b, tensor(out.x, device=1)), {}, ValueError),
    "out is a list": lambda a, b, out: ((a, b, [out]), {}, TypeError),
    "b is NumPy's": lambda a, b, out: ((a, b.x, out), {}, TypeError),
    "out overlaps a": lambda a, b, out: ((a, b, Tensor(a.x.ravel()[16:].reshape(4, 8))), {}, ValueError),
    "out overlaps b": lambda a, b, out: ((a, b, Tensor(b.x.ravel()[:32].reshape(4, 8))), {}, ValueError),
    "out shape": lambda a, b, out: ((a, b, tensor(out.x.T)), {}, ValueError),
    "other stream": lambda a, b, out: ((a, b, out), {"stream": 50}, None),
}


def changed(x, **attributes):
    for name, value in attributes.items():
        setattr(x, name, value)
    return x


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_out_of_the_ordinary_takes_the_long_way(torch, gpu, checked, product, monkeypatch, change):
    monkeypatch.setattr(arrays.streams, "wait_for", lambda *_: None)
    monkeypatch.setattr(libraries.TorchTensors, "keep", lambda *_: None)
    a, b, c = operands()
    product(tensor(a), tensor(b), tensor(c))
    arguments, options, error = CHANGES[change](tensor(a), tensor(b), tensor(c))
    if error is None:
        product(*arguments, **options)
        assert len(checked) == 2
    else:
        launched = len(gpu.launches)
        with pytest.raises(error):
            product(*arguments, **options)
        assert len(gpu.launches) == launched


@pytest.mark.parametrize("name", ["a", "b", "out"])
def test_cached_calls_look_at_grad_mode(torch, gpu, checked, product, name):
    given = dict(zip(("a", "b", "out"), map(tensor, operands())))
    given[name].requires_grad = True
    for mode, full in ((False, 1), (False, 1), (True, 2), (False, 2), (True, 3)):
        torch.grad_mode, launched = mode, len(gpu.launches)
        if mode:
            with pytest.raises(ValueError, match=rf"{name} is .* requires grad, and grad mode is enabled"):
                product(**given)
        else:
            product(**given)
        assert len(gpu.launches) == launched + (not mode)
        assert len(checked) == full


@pytest.mark.parametrize("name", ["a", "b", "out"])
def test_cached_calls_look_at_tangents(torch, gpu, checked, product, name):
    given = dict(zip(("a", "b", "out"), map(tensor, operands())))
    given[name].tangent = "a tensor"  # of a level that has been left
    product(**given)
    product(**given)
    assert len(checked) == 1
    torch.autograd.forward_ad._current_level = 0
    with pytest.raises(ValueError, match=rf"{name} is .* forward-mode tangent"):
        product(**given)


@pytest.mark.parametrize("stream", [40, types.SimpleNamespace(cuda_stream=40)])
def test_current_stream_by_name_is_the_current_stream(torch, gpu, checked, product, stream):
    a, b, c = operands()
    for _ in range(2):
        product(tensor(a), tensor(b), tensor(c), stream=stream)
    assert len(checked) == 1
    assert gpu.launches[-1].stream == 40


def test_stage_counts(torch, checked):
    a, b, _ = operands()
    for stage in ("naive", "coalesced", "naive", "coalesced"):
        check(tiled_sgemm(tensor(a), tensor(b), stage=stage).x, a, b)
    assert len(checked) == 2
    with pytest.raises(TypeError, match="stage is a list"):
        tiled_sgemm(tensor(a), tensor(b), stage=["naive"])


@pytest.mark.parametrize(
    "new",
    [Tensor(aligned_empty((4, 9))[:, 1:]), changed(Tensor(aligned_empty((4, 8))), address=0)],
    ids=["off its boundary", "of a fake tensor"],
)
def test_new_memory_out_of_the_ordinary_takes_the_long_way(torch, checked, monkeypatch, new):
    a, b, _ = operands()
    tiled_sgemm(tensor(a), tensor(b))
    monkeypatch.setattr(Tensor, "new_empty", lambda self, shape: new)
    check(tiled_sgemm(tensor(a), tensor(b)).x, a, b)
    assert len(checked) == 2


def test_unaligned_new_result_is_not_remembered(torch, checked, monkeypatch):
    """Its kernel stores single floats; aligned results have a faster kernel."""
    a, b, _ = operands()
    monkeypatch.setattr(torch, "empty", lambda shape, **_: Tensor(aligned_empty((1, 36))[:, 1:33].reshape(4, 8)))
    tiled_sgemm(tensor(a), tensor(b))
    tiled_sgemm(tensor(a), tensor(b))
    assert len(checked) == 2


def test_number_of_remembered_calls_is_bounded(torch, monkeypatch):
    monkeypatch.setattr(short_way, "MAX_SEEN", 3)
    monkeypatch.setattr(launch, "MAX_BOUND", 3)
    for m in range(1, 9):
        a, b = filled(m, 4), filled(4, 4)
        for _ in range(2):
            check(tiled_sgemm(tensor(a), tensor(b)).x, a, b)
    assert len(products.seen) <= 3
    assert len(launch._bound) <= 3


def test_number_of_kept_epilogues_is_bounded(monkeypatch):
    """Kernels without an epilogue stay, and so do the epilogues made last."""
    made = []
    once = launch._Once(lambda *key: made.append(key) or key)
    monkeypatch.setattr(launch, "MAX_EPILOGUES", 3)
    plain = (NAIVE, CONFIG, True, 0), (NAIVE, CONFIG, Form("any", "any", False), 0)
    forms = [(NAIVE, CONFIG, Form("any", "any", False, epilogue), 0) for epilogue in (abs, min, max, sum, pow)]
    for key in (*plain, *forms):
        assert once(*key) == once(*key) == key
    assert made == [*plain, *forms]
    assert list(once._values) == [*plain, *forms[2:]]
    assert len(once._known) <= 3
    assert not once._locks
    for key in (*plain, *forms[2:]):
        once(*key)
    assert len(made) == 7
    assert once(*forms[0]) == forms[0]
    assert len(made) == 8


def test_no_kernel_is_loaded_twice(monkeypatch):
    """Nothing unloads it, so one that was forgotten must not be loaded again."""
    loaded = []

    def call(function, *arguments):
        if function is driver.cuLibraryLoadData:
            loaded.append(arguments[0])
        return len(loaded)

    monkeypatch.setattr(driver_module, "call", call)
    monkeypatch.setattr(driver_module, "device_scope", lambda device: nullcontext())
    monkeypatch.setattr(driver_module, "_loaded", {})
    one = Cubin("k", b"code", "", "", 0, 0, 0, 0, 0, (9, 0))
    others = (
        (dataclasses.replace(one, code=b"other"), 0),
        (dataclasses.replace(one, name="other"), 0),
        (one, 1),
        (one, 0, 100 << 10),
    )
    handles = [driver_module.load_kernel(*arguments) for arguments in ((one, 0), *others, *others, (one, 0))]
    assert handles == [1, 2, 3, 4, 5, 2, 3, 4, 5, 1]
    assert len(loaded) == 5


class CupyArray:
    """As much of a CuPy array as is looked at."""

    def __init__(self, x, dtype=None):
        place, device = x if isinstance(x, np.ndarray) else aligned_empty(x), 0
        self.x, self.shape, self.strides, self.dtype = place, place.shape, place.strides, np.dtype(np.float32)
        self.data = types.SimpleNamespace(ptr=place.ctypes.data, device_id=device)
        self.device = types.SimpleNamespace(id=device)


class NumbaArray:
    """As much of a Numba device array as is looked at."""

    __cuda_ndarray__ = True

    def __init__(self, x, stream=0):
        self.x, self.shape, self.strides, self.dtype, self.stream = x, x.shape, x.strides, x.dtype, stream
        self.gpu_data = types.SimpleNamespace(device_ctypes_pointer=ctypes.c_size_t(x.ctypes.data))
        self.device_ctypes_pointer = self.gpu_data.device_ctypes_pointer


@pytest.fixture
def others(gpu, monkeypatch):
    current = types.SimpleNamespace(ptr=40)
    module = types.SimpleNamespace(
        ndarray=CupyArray,
        float32=np.float32,
        cuda=types.SimpleNamespace(
            get_current_stream=lambda device: current, runtime=types.SimpleNamespace(getDevice=lambda: 0)
        ),
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(libraries, "device_count", lambda: 1)
    monkeypatch.setattr(libraries, "pointer_device", lambda name, pointer: 0)
    monkeypatch.setattr(arrays, "KINDS", (libraries.NumbaArrays(), libraries.CupyArrays()))
    monkeypatch.setattr(short_way, "GLANCES", {})
    monkeypatch.setattr(arrays.streams, "wait_for", lambda *_: None)


@pytest.mark.usefixtures("others")
@pytest.mark.parametrize("make", [CupyArray, NumbaArray])
def test_short_way_of_other_libraries(gpu, checked, make):
    multiply = plan(4, 8, 12, stage="naive")
    for turn in range(3):
        a, b, c = operands(turn)
        out = make(c.copy())
        assert multiply(make(a), make(b), out, beta=turn) is out
        check(out.x, a, b, beta=turn, c=c)
        assert gpu.launches[-1].stream == (40 if make is CupyArray else 0)
    assert len(checked) <= 2, "the addresses of NumPy's arrays differ in their boundaries"


@pytest.mark.usefixtures("others")
def test_short_way_of_a_cupy_result(checked):
    multiply = plan(4, 8, 12, stage="naive")
    a, b, c = (CupyArray(aligned_empty(x.shape)) for x in operands())
    a.x[...], b.x[...], c.x[...] = operands()
    multiply(a, b, c)
    glance = short_way.GLANCES[CupyArray]
    made, place = glance.empty(a, (4, 8), 0)
    assert (made.shape, made.x.ctypes.data) == ((4, 8), place)
    assert glance.empty(a, (4, 8), 0) is not None


@pytest.mark.usefixtures("others")
def test_numba_arrays_on_two_streams_take_the_long_way(gpu, checked, monkeypatch):
    monkeypatch.setattr(arrays.streams, "hold", lambda *_: None)
    one, other = types.SimpleNamespace(cuda_stream=50), types.SimpleNamespace(cuda_stream=60)
    multiply = plan(4, 8, 12, stage="naive")
    a, b, c = (aligned_empty(x.shape) for x in operands())
    for bound, ways in [
        ((one,) * 3, 1),
        ((one,) * 3, 1),
        ((one, other, one), 2),
        ((0, one, one), 3),
        ((one, one, other), 4),
        ((other,) * 3, 4),
    ]:
        multiply(*(NumbaArray(x, stream) for x, stream in zip((a, b, c), bound, strict=True)))
        assert len(checked) == ways
    assert [did.stream for did in gpu.launches] == [50, 50, 50, 50, 50, 60]


def on_boundary(x, offset=0):
    """Copy x, by rows, to `offset` floats after a 16-byte boundary."""
    memory = aligned_empty((1, x.size + offset))[0, offset:].reshape(x.shape)
    memory[...] = x
    return memory


LIBRARIES = {"Numba": NumbaArray, "CuPy": CupyArray, "PyTorch": Tensor}
# Changes of one array: functions of a constructor and the elements.
ARRAY_CHANGES = {
    "by columns": lambda make, x: make(on_boundary(x.T).T),
    "boundary": lambda make, x: make(on_boundary(x, 1)),
    "fewer rows": lambda make, x: make(on_boundary(x)[:-1]),
    "fewer columns": lambda make, x: make(on_boundary(x)[:, :-1]),
    "dtype": lambda make, x: changed(make(on_boundary(x)), dtype=np.dtype(np.int32)),
    "type": lambda make, x: on_boundary(x),
    "device": lambda make, x: on_device_one(make(on_boundary(x))),
}
REFUSED = {"fewer rows", "fewer columns", "dtype", "type", "device"}


def on_device_one(x):
    if isinstance(x, NumbaArray):
        ON_DEVICE_ONE.add(x.x.ctypes.data)
        return x
    if isinstance(x, Tensor):
        return changed(x, index=1, device=types.SimpleNamespace(type="cuda", index=1))
    x.data.device_id, x.device.id = 1, 1
    return x


ON_DEVICE_ONE = set()


@pytest.mark.parametrize("which", ["a", "b", "out", "all"])
@pytest.mark.parametrize("change", ARRAY_CHANGES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_call_with_a_changed_array_is_checked_in_full(torch, others, gpu, checked, monkeypatch, library, change, which):
    make = LIBRARIES[library]
    kinds = {"Numba": libraries.NumbaArrays, "CuPy": libraries.CupyArrays, "PyTorch": libraries.TorchTensors}
    monkeypatch.setattr(arrays, "KINDS", tuple(kind() for kind in kinds.values()))
    monkeypatch.setattr(libraries, "device_count", lambda: 2)
    monkeypatch.setattr(launch, "device_count", lambda: 2)
    monkeypatch.setattr(libraries, "pointer_device", lambda name, pointer: int(pointer in ON_DEVICE_ONE))
    ON_DEVICE_ONE.clear()
    values = dict(zip(("a", "b", "out"), operands(), strict=True))
    kept = []  # so that no address comes back

    def call(changed_ones=()):
        given = {
            name: ARRAY_CHANGES[change](make, x) if name in changed_ones else make(on_boundary(x))
            for name, x in values.items()
        }
        kept.append(given)
        tiled_sgemm(*given.values(), stage="naive")
        check(given["out"].x, given["a"].x, given["b"].x)

    call()
    call()
    assert (len(checked), len(gpu.launches)) == (1, 2)
    ones = tuple(values) if which == "all" else (which,)
    possible = change not in REFUSED or (change == "device" and which == "all")
    if possible:
        call(ones)
        assert [bound.device for bound in launch._bound.values()][-1] == (change == "device")
    else:
        with pytest.raises((TypeError, ValueError)):
            call(ones)
    assert (len(checked), len(gpu.launches)) == (2, 2 + possible)
    call()
    assert len(checked) == 2
    tiled_sgemm(*(make(on_boundary(x)) for x in values.values()), stage="coalesced")
    assert len(checked) == 3, "the stage counts as well"


@pytest.mark.usefixtures("others")
def test_cupy_result_is_not_allocated_on_another_device(monkeypatch):
    a = CupyArray(aligned_empty((4, 12)))
    glance = libraries.CupyArrays().glance(a)
    assert glance.empty(a, (4, 8), 0) is not None
    assert glance.empty(a, (4, 8), 1) is None
