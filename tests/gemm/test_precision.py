"""Precisions: which ones a GPU computes in, what "fp32_auto" stands for, and their pairs with stages."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path

import numpy as np
import pytest

import numba_gemm
from numba_gemm.arrays import ArrayKind, Operand, row_major
from numba_gemm.gemm import explain as explanations
from numba_gemm.gemm import heuristics, tensor_heuristics
from numba_gemm.gemm import plan as plans
from numba_gemm.gemm import precision as precisions
from numba_gemm.gemm import precompile as precompiling
from numba_gemm.gemm import request as requests
from numba_gemm.gemm.explain import explain_shape
from numba_gemm.gemm.fp32_auto import auto_reason, product_for, resolved
from numba_gemm.gemm.precision import ALIASES, KNOWN, canonical, check_precision
from numba_gemm.kernels.product import LAYOUTS, Batch, Layout, Product, dense
from numba_gemm.kernels.tensor_core import TENSOR_PRECISIONS, TENSOR_STAGES
from numba_gemm.lab.bench.experiment import precision_names
from numba_gemm.runtime.device import SIMULATED_DEVICE
from numba_gemm.simulator.switch import SIMULATOR

PAGE = Path(__file__).parents[2] / "docs" / "precision.md"

simulated = pytest.mark.skipif(not SIMULATOR, reason="runs on the simulator")


def test_an_unknown_precision_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'double'; expected one of ieee, .*bf16x6.*aliases .*BF16_BF16_F32_X6"):
        canonical("double")
    with pytest.raises(TypeError, match="expected a str"):
        canonical(32)


def test_aliases_and_names_in_any_case_stand_for_precisions():
    for name in KNOWN:
        assert canonical(name) == canonical(name.upper()) == name
    for alias, name in ALIASES.items():
        assert name in KNOWN
        assert canonical(alias) == canonical(alias.upper()) == canonical(alias.lower()) == name
    assert canonical("bfx9") == resolved("BFX9", by_rows(4, 4, 4), gpu_of((9, 0))) == "bf16x9"


@pytest.mark.parametrize("name", ["high", "medium", "HIGH", "default"])
def test_a_name_that_permits_several_precisions_is_refused_with_those_to_choose_from(name):
    with pytest.raises(ValueError, match=r"permits several; expected the name of one; pass '.*tf32'") as error:
        canonical(name)
    assert all(one in KNOWN for one in str(error.value).rpartition("pass ")[2].replace("'", "").split(" or "))


def test_the_documented_aliases_are_those_of_the_code():
    rows = re.findall(r"^\| `(\S+)` \| `(\S+)` \|", PAGE.read_text("utf-8"), re.MULTILINE)
    assert dict(rows) == ALIASES


@simulated
def test_functions_take_aliases():
    a = np.ones((4, 5), np.float32)
    options = {"precision": "BF16_BF16_F32", "stage": "one_warp"}
    for _ in range(2):  # in full, and cached
        assert (numba_gemm.tiled_sgemm(a, a.T, **options) == 5).all()
    assert numba_gemm.explain(a, a.T, **options).precision == "bf16"
    assert explain_shape(4, 4, 5, **options).precision == "bf16"
    assert numba_gemm.plan(4, 4, 5, **options).precision == "bf16"
    assert numba_gemm.explain(a, a.T, precision="FP32_AUTO").reason.startswith("fp32_auto stands for ieee")
    assert (numba_gemm.streamed_sgemm(a, a.T, precision="F32_F32_F32") == 5).all()
    assert numba_gemm.autotune(a, a.T, precision="highest", candidates=1).candidates
    with pytest.raises(ValueError, match="precision is 'bf16x6' and stage is 'naive'"):
        numba_gemm.tiled_sgemm(a, a.T, precision="BF16_BF16_F32_X6", stage="naive")


def test_bench_takes_aliases():
    assert precision_names(["bfx9", "tf32"]) == ["bf16x9", "tf32"]


@pytest.mark.parametrize("precision", TENSOR_PRECISIONS)
def test_a_precision_that_a_gpu_cannot_run_names_those_it_can(precision):
    with pytest.raises(ValueError, match=r"(?s)expected one of ieee;"):
        check_precision(precision, (7, 5))


def gpu_of(cc):
    return dataclasses.replace(SIMULATED_DEVICE, cc=cc)


def test_fp32_auto_is_float32_on_other_gpus_and_on_the_simulator():
    large = by_rows(4096, 4096, 4096)
    assert resolved("fp32_auto", large, gpu_of((8, 0))) == "ieee"
    assert resolved("tf32", large, gpu_of((9, 0))) == "tf32"
    assert resolved("fp32_auto", large, gpu_of((9, 0))) == ("ieee" if SIMULATOR else "bf16x6")
    check_precision("fp32_auto", (8, 0))


@pytest.fixture
def tensor_cores(monkeypatch):
    monkeypatch.setattr(precisions, "SIMULATOR", False)


@pytest.mark.usefixtures("tensor_cores")
def test_smallest_k_of_fp32_auto():
    chosen = {k: resolved("fp32_auto", by_rows(4096, 4096, k), gpu_of((9, 0))) for k in (127, 128, 1023, 1024)}
    assert chosen == {127: "ieee", 128: "bf16x6", 1023: "bf16x6", 1024: "bf16x6"}


def doubled(value, row, col):
    return value + value


def by_rows(m, n, k):
    return Product(dense("N", m, k), dense("N", k, n), dense("N", m, n))


def unaligned(product):
    a, b = (x._replace(offset=4) for x in (product.a, product.b))
    return product._replace(a=a, b=b)


def by_columns(product):
    """Return a product of operands whose rows in memory, those of the transposes, are not aligned."""
    (m, k), n = product.a[:2], product.n
    a, b = Layout(m, k, 4, 4 * (m // 2 * 2 + 1)), Layout(k, n, 4, 4 * (k // 2 * 2 + 1))
    return product._replace(a=a, b=b)


def batched(product):
    m, n, k = product.m, product.n, product.k
    return product._replace(batch=Batch((1, 1, 3), (0, 0, 4 * m * k), (0, 0, 4 * k * n), (0, 0, 4 * m * n)))


AUTO_PRODUCTS = [
    change(by_rows(*extents))
    for extents, change in itertools.product(
        itertools.product((1, 40, 256, 1000, 4096), (8, 384, 3000), (256, 1023, 1024, 65536)),
        (lambda x: x, unaligned, by_columns, batched, lambda x: x._replace(epilogue=doubled)),
    )
]


@pytest.mark.usefixtures("tensor_cores")
def test_fp32_auto_is_the_one_that_is_expected_to_be_faster():
    found, gpu = set(), gpu_of((9, 0))
    for product in AUTO_PRODUCTS:
        precision, words = auto_reason(product, gpu)
        exact, emulated = (
            heuristics.choose(heuristics.problem(product, gpu, one)).clocks for one in ("ieee", "bf16x6")
        )
        assert precision == ("bf16x6" if emulated < exact else "ieee"), product
        told = re.search(r"(?:it|bf16x6) is expected to take (\S+) us instead of (\S+) us", words)
        assert told is not None, words
        assert [float(us) for us in told.groups()] == pytest.approx(
            [emulated / 1980, exact / 1980], rel=1e-4, abs=0.051
        )
        found.add(precision)
    assert found == {"ieee", "bf16x6"}


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("change", [unaligned, by_columns, batched, lambda x: x._replace(epilogue=doubled)])
def test_properties_of_the_operands_by_which_fp32_auto_decides(change):
    """The operands' extents alone do not tell which is faster."""
    products = [
        by_rows(*one) for one in itertools.product((16, 40, 64, 128, 512), (64, 384, 768, 3000), (256, 512, 3072))
    ]
    gpu = gpu_of((9, 0))
    assert any(resolved("fp32_auto", change(one), gpu) != resolved("fp32_auto", one, gpu) for one in products)


@pytest.mark.usefixtures("tensor_cores")
def test_fp32_auto_knows_that_bfloat16_rows_need_no_conversion():
    wide = by_rows(1024, 48, 1024)
    narrow = wide._replace(a=dense("N", 1024, 1024, "bfloat16"))
    half = wide._replace(a=dense("N", 1024, 1024, "float16"))
    (first, _), (second, words), (third, _) = (auto_reason(one, gpu_of((9, 0))) for one in (wide, narrow, half))
    assert (first, second, third) == ("ieee", "bf16x6", "ieee")
    gpu = gpu_of((9, 0))
    exact = heuristics.best(heuristics.problem(narrow, gpu)).clocks / gpu.clock_hz
    exact += tensor_heuristics.copy_seconds(1024 * 1024 * (2 + 4), gpu.memory_bandwidth)
    assert words.endswith(f"instead of {exact * 1e6:.1f} us")


def operand(*shape, dtype="float32", strides=None, pointer=0):
    size = 4 if dtype == "float32" else 2
    return Operand("a", ArrayKind(), None, dtype, shape, strides or row_major(shape, size), pointer)


@pytest.mark.parametrize(
    ("a", "b", "epilogue", "expected"),
    [
        ((3, 5), (5, 7), None, (3, 7, 5, 1)),
        ((5,), (5, 7), None, (1, 7, 5, 1)),
        ((3, 5), (5,), None, (3, 1, 5, 1)),
        ((5,), (5,), None, (1, 1, 5, 1)),
        ((2, 3, 5), (2, 5, 7), None, (3, 7, 5, 2)),
        ((2, 1, 3, 5), (4, 5, 7), None, (3, 7, 5, 8)),
        ((2, 4, 3, 5), (5, 7), None, (24, 7, 5, 1)),
        ((2, 4, 3, 5), (5, 7), doubled, (3, 7, 5, 8)),
    ],
)
def test_extents_of_the_product_by_which_fp32_auto_decides(a, b, epilogue, expected):
    product = product_for(operand(*a), operand(*b), epilogue)
    assert (product.m, product.n, product.k, product.batch.matrices) == expected
    assert product.epilogue is epilogue


def test_layouts_of_the_product_by_which_fp32_auto_decides():
    a, b = operand(3, 5, strides=(4, 12), pointer=20), operand(5, 7, dtype="float16", pointer=32)
    product = product_for(a, b)
    assert product.a == Layout(3, 5, 4, 12, offset=4)
    assert product.b == Layout(5, 7, 14, 2, dtype="float16")
    assert product.c == dense("N", 3, 7)


@simulated
@pytest.mark.parametrize(
    ("layout", "epilogue"),
    [(layout, one) for layout in LAYOUTS for one in (None, doubled)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_plans_calls_and_explanations_decide_by_the_same_product(monkeypatch, layout, epilogue):
    asked = []

    def resolving(precision, product, gpu):
        asked.append(heuristics.problem(product, gpu))
        return "ieee"

    for module in (plans, requests, explanations, precompiling):
        monkeypatch.setattr(module, "resolved", resolving)
    m, n, k = 12, 8, 20
    a, b = (
        np.ones(shape, np.float32, order="C" if order == "N" else "F") for order, shape in zip(layout, ((m, k), (k, n)))
    )
    numba_gemm.plan(m, n, k, layout=layout, precision="fp32_auto", epilogue=epilogue)
    numba_gemm.tiled_sgemm(a, b, precision="fp32_auto", epilogue=epilogue)
    numba_gemm.explain(a, b, precision="fp32_auto", epilogue=epilogue)
    if epilogue is None:
        explain_shape(m, n, k, layout=layout, precision="fp32_auto")
        list(
            precompiling._chosen(
                "auto", "fp32_auto", (9, 0), precompiling._products([(m, n, k)], [layout], ("float32",) * 2)
            )
        )
    assert len(asked) == 5 if epilogue is None else 3
    assert len(set(asked)) == 1
    assert (asked[0].a_along, asked[0].b_along) == (layout[0] == "N", layout[1] == "T")
    assert asked[0].epilogue == (epilogue is not None)


@simulated
def test_the_simulator_runs_float32_and_two_stages_of_tensor_cores():
    a = np.ones((4, 5), np.float32)
    for product in (numba_gemm.tiled_sgemm, numba_gemm.plan(4, 4, 5, precision="bf16", stage="one_warp")):
        options = {} if isinstance(product, numba_gemm.Plan) else {"precision": "bf16", "stage": "one_warp"}
        assert (product(a, a.T, **options) == 5).all()
    told = numba_gemm.explain(a, a.T, precision="bf16", stage="one_warp")
    assert (told.stage, told.launches, told.a_access) == ("one_warp", 1, "any")
    assert "decomposed" not in str(told)
    assert "16 terms of the sums at a time" in str(told)
    with pytest.raises(ValueError, match="expected one of ieee; pass one of these, or stage 'one_warp' for bf16 or "):
        numba_gemm.tiled_sgemm(a, a.T, precision="bf16")
    with pytest.raises(ValueError, match=r"or 'fused_decomposition' for tf32, tf32x3, bf16, bf16x3, bf16x6, bf16x9$"):
        numba_gemm.tiled_sgemm(a, a.T, precision="bf16")
    with pytest.raises(ValueError, match="or 'stream_k' for bf16x6 or 'thin' for bf16x6 or"):
        numba_gemm.tiled_sgemm(a, a.T, precision="bf16x6")
    for stage in ("fused_decomposition", "stream_k", "thin"):
        assert (numba_gemm.tiled_sgemm(a, a.T, precision="bf16x6", stage=stage) == 5).all()
    for precision, stages in {name: ["auto"] for name in TENSOR_PRECISIONS}.items():
        stages += [stage.name for stage in TENSOR_STAGES.values() if precision in stage.precisions]
        for stage in set(stages).difference({"one_warp", "fused_decomposition"}):
            with pytest.raises(ValueError, match="this is the simulator, which has no matrix instructions"):
                numba_gemm.tiled_sgemm(a, a.T, precision=precision, stage=stage)
            with pytest.raises(ValueError, match="this is the simulator, which has no matrix instructions"):
                numba_gemm.plan(4, 4, 5, precision=precision, stage=stage)
    for precision in ("ieee", "fp32_auto"):
        assert (numba_gemm.tiled_sgemm(a, a.T, precision=precision) == 5).all()
    assert numba_gemm.plan(4, 4, 5, precision="fp32_auto").precision == "ieee"


AGREE = "expected a stage and a precision that agree; change one of them"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"stage": "stream_k", "precision": "bf16x3"},
            f"precision is 'bf16x3' and stage is 'stream_k', which computes in ieee, bf16x6; {AGREE}",
        ),
        (
            {"stage": "naive", "precision": "tf32"},
            f"precision is 'tf32' and stage is 'naive', which computes in ieee; {AGREE}",
        ),
        (
            {"stage": "persistent"},
            f"precision is 'ieee' and stage is 'persistent', which computes in {', '.join(TENSOR_PRECISIONS)}; {AGREE}",
        ),
        (
            {"stage": "persistent", "precision": "fp32_auto"},
            "precision is 'fp32_auto' and stage is 'persistent'; expected stage 'auto', which leaves a choice; name "
            f"the precision, one of {', '.join(TENSOR_PRECISIONS)}, or leave out the stage",
        ),
        (
            {"stage": "naive", "precision": "fp32_auto"},
            "precision is 'fp32_auto' and stage is 'naive'; expected stage 'auto', which leaves a choice; name the "
            "precision, one of ieee, or leave out the stage",
        ),
        (
            {"stage": "tf32_tma", "precision": "bf16x6"},
            f"precision is 'bf16x6' and stage is 'tf32_tma', which computes in tf32; {AGREE}",
        ),
        (
            {"stage": "wide_tiles", "precision": "fp16x3"},
            "precision is 'fp16x3' and stage is 'wide_tiles', which computes in tf32, tf32x3, bf16, bf16x3, bf16x6, "
            f"bf16x9; {AGREE}",
        ),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("call", ["tiled_sgemm", "explain", "plan"])
def test_a_stage_and_a_precision_must_agree(call, options, words):
    a = np.ones((4, 5), np.float32)
    arguments = (4, 4, 5) if call == "plan" else (a, a.T)
    with pytest.raises(ValueError) as error:
        getattr(numba_gemm, call)(*arguments, **options)
    assert str(error.value) == words
