"""Plans: products of fixed extents, decided beforehand."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda
from support.array_libraries import Tensor, on_boundary, tensor
from support.host_gpu import CONFIG, NAIVE, schedule_of, scheduled
from support.operands import LAYOUTS, REPEATING, check, filled, frozen

import numba_gemm
from numba_gemm import arrays, plan
from numba_gemm.arrays import host
from numba_gemm.gemm import heuristics
from numba_gemm.gemm import plan as plans
from numba_gemm.gemm import product as products
from numba_gemm.gemm import request as requests
from numba_gemm.gemm.heuristics import Choice
from numba_gemm.kernels.ladder import STAGES
from numba_gemm.runtime import device as devices
from numba_gemm.runtime import workspace as workspaces


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("stage", ["naive", "shared_tile", "auto"])
def test_plan_computes(stage, layout):
    a, b, c = filled(7, 9), filled(9, 5), filled(7, 5, seed=1)
    made = plan(7, 5, 9, stage=stage, layout=layout)
    check(made(a, b), a, b)
    out = c.copy()
    assert made(a, b, out, 2, -0.5) is out
    check(out, a, b, alpha=2, beta=-0.5, c=c)


def test_c_is_kept():
    """Also where calls without it take the fast path."""
    a, b, c, row = filled(7, 9), filled(9, 5), filled(7, 5, seed=1), filled(1, 5, seed=2)[0]
    made, before, out = plan(7, 5, 9), c.copy(), filled(7, 5, seed=3)
    for _ in range(3):
        check(made(a, b, beta=2.0, c=c), a, b, beta=2.0, c=before)
        check(made(a, b, beta=-1.0, c=row), a, b, beta=-1.0, c=np.broadcast_to(row, (7, 5)))
        assert made(a, b, out, beta=0.5, c=c) is out
        check(out, a, b, beta=0.5, c=before)
        made(a, b, out)
        check(out, a, b)
    np.testing.assert_array_equal(c, before)
    with pytest.raises(ValueError, match=r"c has shape \(7, 4\); expected \(7, 5\)"):
        made(a, b, beta=1.0, c=c[:, :4])


@pytest.mark.parametrize(
    ("layout", "along"), [("NN", (True, False)), ("NT", (True, True)), ("TN", (False, False)), ("TT", (False, True))]
)
def test_plan_chooses_for_its_layout(layout, along, monkeypatch):
    asked, choose = [], requests.autotune_cache.choose
    monkeypatch.setattr(
        requests.autotune_cache, "choose", lambda device, wanted: asked.append(wanted) or choose(device, wanted)
    )
    plan(4, 8, 12, layout=layout)
    (wanted,) = asked
    assert (wanted.a_along, wanted.b_along) == along


@pytest.mark.parametrize("layout", [*LAYOUTS, *REPEATING])
def test_plan_takes_any_strides(layout):
    lay_out = (LAYOUTS | REPEATING)[layout]
    a, b = lay_out(filled(8, 4)), lay_out(filled(4, 8, seed=1))
    check(plan(8, 8, 4, stage="coalesced")(a, b), a, b)


@pytest.mark.parametrize(
    ("batch", "extents"), [(3, (3,)), (np.int64(3), (3,)), ((2, 3), (2, 3)), ([1], (1,)), (0, (0,))]
)
def test_plan_of_a_batch(batch, extents):
    made = plan(3, 5, 4, batch=batch, stage="naive")
    assert made.batch == extents
    assert f"batch={extents}" in repr(made)
    a = np.stack([filled(3, 4, seed) for seed in range(6)])[: np.prod(extents)].reshape(*extents, 3, 4)
    b = filled(4, 5)
    result = made(a, b)
    assert result.shape == (*extents, 3, 5)
    for index in np.ndindex(extents):
        check(result[index], a[index], b)
    for wrong in (a[..., :2, :], np.stack([a, a]), filled(3, 4)):
        with pytest.raises(ValueError, match=r"this plan is for shapes .* and a batch of|expected shapes"):
            made(wrong, b)


def test_plan_with_an_epilogue():
    made = plan(4, 4, 4, epilogue=lambda value, row, col, bias: value + bias[col])
    a, b, bias = filled(4, 4), filled(4, 4), filled(1, 4)[0]
    check(made(a, b, epilogue_args=(bias,)) - bias, a, b)
    for wrong in ((), (bias, bias)):
        with pytest.raises(TypeError, match="pass as many epilogue_args as it takes"):
            made(a, b, epilogue_args=wrong)
    with pytest.raises(TypeError, match="epilogue_args is of type ndarray; expected a tuple or list"):
        made(a, b, epilogue_args=bias)


@pytest.mark.parametrize("given", [(0,), 1.5, np.ones(3, np.float32)], ids=["vectors", "number", "array"])
def test_plan_without_an_epilogue_takes_no_vectors(given):
    error = ValueError if type(given) is tuple else TypeError
    with pytest.raises(error, match="epilogue_args"):
        plan(3, 5, 4, stage="naive")(A, B, epilogue_args=given)


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

# Arguments of a plan; the error; words of it.
WRONG_PLANS = {
    "m text": (("4", 4, 4), {}, TypeError, ["m is '4', of type str", "expected an int", "pass one"]),
    "n negative": ((4, -1, 4), {}, ValueError, ["n is -1", "expected 0 or more", "pass"]),
    "k fraction": ((4, 4, 4.5), {}, TypeError, ["k is 4.5, of type float", "expected an int"]),
    "m huge": ((2**70, 1, 1), {}, ValueError, ["a has shape (1180591620717411303424, 1)", "addressed", "smaller"]),
    "C huge": ((2**40, 2**40, 0), {}, ValueError, ["out has shape", "more than", "addressed", "smaller"]),
    "layout": ((4, 4, 4), {"layout": "NC"}, ValueError, ["layout is 'NC'", "expected one of NN", "pass"]),
    "stage": ((4, 4, 4), {"stage": "best"}, ValueError, ["stage is 'best'", "'auto' or one of naive", "pass"]),
    "stage number": ((4, 4, 4), {"stage": 1}, TypeError, ["stage is of type int", "expected a str", "pass"]),
    "like": ((4, 4, 4), {"like": [1.0]}, TypeError, ["like is of type list", "expected", "numpy.asarray"]),
    "device": ((4, 4, 4), {"device": 99}, ValueError, ["device is 99", "expected 0 to", "pass"]),
    "batch negative": ((4, 4, 4), {"batch": (2, -1)}, ValueError, ["batch is -1", "expected 0 or more"]),
    "too many blocks": ((2**40, 3, 5), {}, ValueError, ["a grid of", "expected at most 2147483647", "divide it"]),
    "batch text": ((4, 4, 4), {"batch": ("2",)}, TypeError, ["batch is '2', of type str", "expected an int"]),
    "dtype": ((4, 4, 4), {"dtype": np.float64}, ValueError, ["dtype is <class 'numpy.float64'>", "expected one of"]),
    "dtype of an object": ((4, 4, 4), {"dtype": 2}, ValueError, ["dtype is 2; expected one of float32, float16"]),
    "precision": ((4, 4, 4), {"precision": "best"}, ValueError, ["precision is 'best'", "expected one of ieee"]),
    "precision of a stage": (
        (4, 4, 4),
        {"precision": "bf16x6", "stage": "naive"},
        ValueError,
        ["precision is 'bf16x6' and stage is 'naive'", "computes in ieee", "change one"],
    ),
    "epilogue of a stage": (
        (4, 4, 4),
        {"epilogue": lambda value, row, col: value, "stage": "naive"},
        ValueError,
        ["stage is 'naive', which takes no epilogue", "expected 'auto' or one of"],
    ),
    "epilogue": ((4, 4, 4), {"epilogue": abs}, TypeError, ["epilogue is <built-in function abs>"]),
    "epilogue text": ((4, 4, 4), {"epilogue": "relu"}, TypeError, ["epilogue is 'relu'", "expected a Python function"]),
    "workspace shape": ((4, 4, 4), {"workspace": SQUARE}, ValueError, ["shape (4, 4)", "one dimension", "pass"]),
    "workspace dtype": ((4, 4, 4), {"workspace": np.zeros(9)}, ValueError, ["dtype float64", "float32", "pass"]),
}


@pytest.mark.parametrize("case", WRONG_PLANS)
def test_wrong_plans(case):
    extents, options, error, words = WRONG_PLANS[case]
    with pytest.raises(error) as caught:
        plan(*extents, **options)
    assert all(word in str(caught.value) for word in words)


# Arguments of a call of a plan for (3, 5, 4); the error; words of it.
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
    monkeypatch.setattr(products, "launch_choice", lambda *_, **__: pytest.fail("launched in spite of the error"))
    with pytest.raises(error) as caught:
        made(*arguments, **options)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    "options", [{"stage": "stream_k", "precision": "bf16x6"}, {"epilogue": lambda value, row, col: value}]
)
def test_plan_of_sums_that_are_too_long(monkeypatch, options):
    monkeypatch.setattr("numba_gemm.gemm.request.MAX_K", 16)
    plan(8, 8, 16, **options)
    with pytest.raises(ValueError, match=r"K is 17 and .*, which takes up to 16"):
        plan(8, 8, 17, **options)


def test_plan_of_another_device(monkeypatch):
    made, properties = plan(3, 5, 4, stage="naive"), devices.device_properties()
    monkeypatch.setattr(requests, "_common_device", lambda operands, home: 1)
    monkeypatch.setattr(devices, "device_properties", lambda device=0: properties)  # there may be no other
    with pytest.raises(ValueError, match=r"operands lie on device 1 .* for device 0; expected one device; .* another"):
        made(A, B)


@pytest.mark.simulator  # there may be no second GPU
def test_plan_of_a_device_that_is_not_current(monkeypatch):
    """A plan computes NumPy arrays on its own device, given by `device` or `like`."""
    monkeypatch.setattr(devices, "device_count", lambda: 2)
    used, launched = [], products.launch_choice

    def run(product, choice, alpha, a, b, beta, c, *others):
        used.append((a.device, b.device, c.device))
        return launched(product, choice, alpha, a, b, beta, c, *others)

    monkeypatch.setattr(products, "launch_choice", run)
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


def test_a_workspace_of_0_bytes():
    """NumPy gives an empty array strides of 0."""
    assert plan(4, 4, 4, stage="naive", workspace=np.empty(0, np.float32)).workspace_bytes == 0


def test_plan_keeps_a_given_workspace(gpu, monkeypatch):
    choice = Choice(scheduled(NAIVE, schedule_of(512, 4)), CONFIG)
    monkeypatch.setattr(heuristics, "best", lambda problem: choice)
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
    with pytest.raises(TypeError, match="workspace is a NumPy array; expected device memory; pass a device array of"):
        plan(4, 4, 4, workspace=memory)
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


@pytest.mark.parametrize(("m", "n", "k"), [(64, 128, 96), (4232, 12, 548)], ids=["square", "thin"])
def test_workspace_of_a_plan_by_tensor_maps_holds_decomposed_operands(torch, gpu, m, n, k):
    """Other operands than the plan's cannot all be described by tensor maps; kernels of thin ones need counters."""
    gpu.computes = False
    memory = tensor(np.zeros((1, plan(m, n, k, precision="tf32").workspace_bytes // 4 + 64), np.float32)[0])
    memory = Tensor(memory.x[-(memory.x.ctypes.data // 4) % 64 :])
    made = plan(m, n, k, precision="tf32", workspace=memory)
    assert made.stage == "tf32_tma"
    a, b, skewed = tensor(filled(m, k)), tensor(filled(k, n)), on_boundary(filled(m, k), 1)
    made(a, b)
    made(Tensor(skewed), b)
    maps, decomposition, multiplication = gpu.launches
    assert (decomposition.a_parts[0], multiplication.a[0]) == (memory.data_ptr(), memory.data_ptr())
    last = multiplication.b[0] + multiplication.b[1] * multiplication.b[3]
    assert last <= memory.data_ptr() + made.workspace_bytes
    assert maps.kernel.startswith("tf32_tma")


def test_a_plan_that_decomposes_the_smaller_operand_never_decomposes_the_larger_alone(torch, gpu):
    """The workspace may be too small: the part of one operand has an even number of slots, those of two need not."""
    gpu.computes = False
    m, n, k = 4096, 64, 65
    options = {"stage": "tf32_tma", "layout": "TN", "precision": "tf32"}
    memory = tensor(np.zeros((1, plan(m, n, k, **options).workspace_bytes // 4 + 64), np.float32)[0])
    made = plan(m, n, k, workspace=Tensor(memory.x[-(memory.x.ctypes.data // 4) % 64 :]), **options)
    of_a, b = filled(k, m), tensor(filled(k, n))
    for a, stage in ((on_boundary(of_a).T, "tf32"), (on_boundary(of_a, 1).T, "persistent")):
        with gpu.recording() as launched:
            made(Tensor(a), b)
        assert [did.kernel.partition("_")[0] for did in launched] == ["decompose", stage]


def test_a_folded_batch_of_operands_that_the_plan_cannot_read_fits_its_workspace(torch, gpu, monkeypatch):
    """The choice for such a product would take more memory."""
    gpu.computes = False
    monkeypatch.setattr(workspaces, "clear", lambda *_: None)
    options = {"batch": 64, "layout": "TN", "precision": "tf32"}
    memory = tensor(np.zeros((1, plan(512, 72, 68, **options).workspace_bytes // 4 + 64), np.float32)[0])
    made = plan(512, 72, 68, workspace=Tensor(memory.x[-(memory.x.ctypes.data // 4) % 64 :]), **options)
    assert made.stage == "tf32_tma"
    with gpu.recording() as launched:
        made(Tensor(on_boundary(filled(64 * 512, 69)).reshape(64, 512, 69)[:, :, :68]), Tensor(filled(72, 68).T))
    assert [did.kernel.partition("_")[0] for did in launched] == ["decompose", "persistent"]


@pytest.mark.parametrize(("precision", "k"), [("bf16x6", 129), ("tf32", 160)])
def test_large_batch_needs_the_workspace_of_one_piece(gpu, precision, k):
    """Operands are decomposed in pieces of a limited size, one after another in the same memory."""
    piece = plan(64, 128, k, precision=precision, batch=65_535)
    assert piece.stage == ("rows_in_registers" if precision == "bf16x6" else "tf32_tma")
    assert plan(64, 128, k, precision=precision, batch=200_000).workspace_bytes == piece.workspace_bytes > 0


@pytest.mark.parametrize("precision", ["ieee", "bf16x6", "fp16x3", "tf32", "bf16"])
def test_plan_loads_the_kernels_of_its_calls(torch, gpu, precision):
    """Nothing is compiled at the first call with the operands that it was made for."""
    gpu.computes = False
    made = plan(64, 128, 96, precision=precision)
    loaded = len(gpu.kernels)
    assert loaded
    made(tensor(filled(64, 96)), tensor(filled(96, 128)), tensor(filled(64, 128)))
    assert len(gpu.kernels) == loaded
    assert (gpu.launches[-1].grid, gpu.launches[-1].block) == (made.grid, made.block)
    assert made.precision == precision


def test_sums_of_a_folded_batch_are_divided(torch, gpu):
    """One B for all matrices of A: a product of more rows than the plan's, in the same configuration."""
    gpu.computes = False
    made = plan(64, 64, 8192, batch=4, precision="bf16x6")
    made(tensor(filled(4 * 64, 8192).reshape(4, 64, 8192)), tensor(filled(8192, 64)))
    names = [launch.kernel for launch in gpu.launches]
    decompose, multiplies, adds = names
    assert (decompose, adds.startswith("add_partials")) == ("decompose_bf16x6", True)
    assert multiplies.startswith(f"{made.stage}_bf16x6_{made.config.name}")


@pytest.mark.parametrize("stage", ["auto", "stream_k", "thin"])
@pytest.mark.parametrize(("m", "n", "k", "batch"), [(64, 64, 64, 300), (1, 48, 64, 300), (1, 16, 1000, 7)])
def test_a_folded_batch_needs_no_more_memory_than_the_plan_has(torch, gpu, monkeypatch, stage, m, n, k, batch):
    """Its product has more rows than the plan's: tiles that blocks may share, or not worth transposing."""
    monkeypatch.setattr(workspaces, "clear", lambda *_: None)
    size = -(-plan(m, n, k, batch=batch, stage=stage).workspace_bytes // 4)
    memory = np.zeros(size + 64, np.float32)
    memory = memory[-(memory.ctypes.data // 4) % 64 :][:size]
    made = plan(m, n, k, batch=batch, stage=stage, workspace=Tensor(memory))
    a, b = filled(batch * m, k), filled(k, n)
    check(made(tensor(a.reshape(batch, m, k)), tensor(b)).x.reshape(-1, n), a, b)
