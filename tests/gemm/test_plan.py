"""Plans: products of fixed extents, decided beforehand."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda
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
    monkeypatch.setattr(products, "launch_choice", lambda *_, **__: pytest.fail("launched in spite of the error"))
    with pytest.raises(error) as caught:
        made(*arguments, **options)
    assert all(word in str(caught.value) for word in words)


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
