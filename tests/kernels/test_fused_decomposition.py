"""The stage `fused_decomposition`: the ladder's table, sums to the bit, special values, batches, compiled code."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from support.covering import covering
from support.ladder_cases import LAYOUTS, Case, cases, run
from support.offline import offline
from support.operands import filled
from support.tensor_core_cases import ALL_PRECISIONS, compiled_fused

import numba_gemm
from numba_gemm.device import narrow
from numba_gemm.device.access import ACCESSES
from numba_gemm.kernels.product import Batch, Product, dense
from numba_gemm.kernels.stage import Gpu
from numba_gemm.kernels.tensor_core import TENSOR_STAGES, fused_decomposition, fused_stage
from numba_gemm.kernels.tensor_core.accumulate import CUT_OFF, FOLD
from numba_gemm.kernels.tensor_core.fused_decomposition import build, tile_of
from numba_gemm.kernels.tensor_core.stage import LONG_SUM, precision_for
from numba_gemm.lab.bench import accuracy
from numba_gemm.models.accuracy import bound
from numba_gemm.runtime import launch
from numba_gemm.runtime.device import get_device
from numba_gemm.runtime.matrix import Matrix, Vector
from numba_gemm.simulator import scheduler, tensor_core
from numba_gemm.simulator.switch import SIMULATOR

STAGE = TENSOR_STAGES["fused_decomposition"]
CONFIG = STAGE.test_config
GPU = Gpu((9, 0), 132)
SEVERAL = [name for name in STAGE.precisions if ALL_PRECISIONS[name].parts > 1]

simulated = pytest.mark.skipif(not SIMULATOR, reason="runs on the simulator")


@pytest.fixture
def able():
    if not SIMULATOR and not STAGE.runs_on(cc := get_device(0).properties.cc):
        pytest.skip(f"compute capability {cc} has no such instructions")


def product(a, b, c, precision, alpha=1.0, beta=0.0, **options):
    matrices = [Matrix(x.ctypes.data, *x.shape, *x.strides, 0, x) for x in (a, b, c)]
    launch.launch(STAGE, CONFIG, alpha, matrices[0], matrices[1], beta, matrices[2], precision=precision, **options)


# ------------------------------------------------------------------------------------------------------------ products


@pytest.mark.usefixtures("able")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_table(layout):
    """Shapes of one tile and of several, in the precision that is simulated the fastest."""
    for case in cases(CONFIG):
        if case.layout == layout and np.prod(case.shape) <= 1 << 16:
            outcome = run(STAGE, CONFIG, case, precision="bf16")
            assert outcome.ok, f"{case}: {outcome}"


@pytest.mark.usefixtures("able")
@pytest.mark.parametrize("precision", STAGE.precisions)
def test_every_precision(precision):
    outcome = run(STAGE, CONFIG, Case((19, 35, 75), "one float off", 0.5, -2.0), precision=precision)
    assert outcome.ok, str(outcome)


@pytest.mark.usefixtures("able")
def test_the_transpose():
    outcome = run(STAGE, CONFIG, Case((19, 21, 33), "rows", 0.5, -2.0), swapped=True, precision="bf16x3")
    assert outcome.ok, str(outcome)


@simulated
def test_any_thread_order_gives_the_same_bits(monkeypatch):
    results = set()
    for seed in (None, 1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(launch.scheduler, "run", functools.partial(scheduler.run, seed=seed))
            outcome = run(STAGE, CONFIG, Case((17, 9, 100), "rows", 1.0, 1.0), precision="bf16")
            assert outcome.ok, str(outcome)
            results.add(outcome.result.tobytes())
    assert len(results) == 1


# ---------------------------------------------------------------------------------------------------------------- sums


def parts_of(precision, x):
    """Parts of an operand, by the functions with which other stages decompose it, in float64."""
    found = []
    for p in range(precision.parts):
        rounding = narrow.short_bf16 if precision.short and p == 0 else getattr(narrow, precision.kind)
        found.append(np.vectorize(rounding, otypes=[np.float32])(x))
        x = x - found[-1]
    return [part.astype(np.float64) for part in found]


@simulated
@pytest.mark.parametrize(
    ("config", "precision", "k"), [(STAGE.configs[-1], "bf16x3", 32), (CONFIG, "bf16x6", 16)], ids=["slot", "step"]
)
def test_terms_that_the_adder_drops(config, precision, k):
    """A one, and other terms just below 2^-25 of it, all of which are lost: the page of precisions says so."""
    a, b, c = np.zeros((1, k), np.float32), np.full((k, 1), 2.0**-12, np.float32), np.zeros((1, 1), np.float32)
    a[...], a[0, 0], b[0, 0] = 2.0**-13 * (1 - 2.0**-6), 1.0, 1.0
    matrices = [Matrix(x.ctypes.data, *x.shape, *x.strides, 0, x) for x in (a, b, c)]
    launch.launch(STAGE, config, 1.0, matrices[0], matrices[1], 0.0, matrices[2], precision=precision)
    lost = float((a.astype(float) @ b.astype(float) - c)[0, 0]) * 2.0**24
    assert 0.45 * (k - 1) < lost < 0.5 * k


def added_exactly(total, sums):
    larger = total + sums
    return larger, sums - (larger - total)


def expected_sums(config, precision, a, b):
    """Sums of one tile by the models of the adder and of `accumulate`, in float32 outside of the tensor cores."""
    (m, k), n, lanes = a.shape, b.shape[1], config.lanes_k
    left, right = parts_of(precision, a), parts_of(precision, b)

    def added(sums, chosen, terms):
        for x, y in chosen:
            for one in terms:
                products = left[x][:, None, one] * right[y].T[None, :, one]
                sums = tensor_core.add_products(sums, products).astype(np.float32)
        return sums

    found = []
    for warp in range(lanes):
        total, rests = np.zeros((2, m, n), np.float32)
        together = precision.compensated and not precision.stepwise  # `rests` are the sums of all products
        for s, slot in enumerate(range(0, k, config.BK)):
            sums = np.zeros((m, n), np.float32)
            for step in range(slot + 16 * warp, slot + config.BK, 16 * lanes):
                # Lane t of four has the terms 4 t to 4 t + 3 of a step; an instruction of TF32 has half of them.
                halves = [[4 * t + 2 * h + w for t in range(4) for w in range(2)] for h in range(2)]
                terms = [range(16)] if precision.per_word == 2 else halves
                terms = [[step + i for i in one if step + i < k] for one in terms]
                for one in terms:
                    rests = added(rests, precision.products[: None if together else -1], [one])
                    sums = added(sums, precision.products[-1:], [one])
                if precision.stepwise:
                    total, sums = added_exactly(total, sums)
                    rests, sums = rests + sums, np.zeros((m, n), np.float32)
            if together:
                total, rests = added_exactly(total, rests)
            elif not precision.compensated:
                total = total + sums
            if s % FOLD == FOLD - 1 and not together:
                total, rests = added_exactly(total, rests)
                rests = rests if precision.compensated else np.zeros((m, n), np.float32)
        found.append((total, rests))
    whole, left = found[0][0], np.zeros((m, n), np.float32)
    for total, _ in found[1:]:
        larger = whole + total
        kept = larger - total
        whole, left = larger, left + ((whole - kept) + (total - (larger - kept)))
    for _, rests in found:
        left = left + rests
    result = whole + left
    kept = result - left
    rest = (whole - kept) + (left - (result - kept))
    return result + (rest + np.float32(CUT_OFF) * result)


@simulated
@pytest.mark.parametrize(
    ("precision", "k"), [("bf16x6", 75), ("bf16x3", 270), ("tf32x3", 40), ("bf16x9", 70), ("bf16x6", LONG_SUM)]
)
def test_sums_are_those_of_the_model(precision, k):
    """To the bit: the parts are those of other stages, and so are the order of the products and the sums kept apart.

    The bits also show that ordinary operands take no second pass: FP32 multiply-adds would give others.
    """
    a, b, c = np.abs(filled(32, k, 1)), np.abs(filled(k, 32, 2)), np.full((32, 32), np.nan, np.float32)
    product(a, b, c, precision)
    np.testing.assert_array_equal(c, expected_sums(CONFIG, precision_for(precision, k), a, b))


@simulated
@pytest.mark.parametrize("distribution", accuracy.DISTRIBUTIONS)
@pytest.mark.parametrize(("index", "precision"), [*((0, name) for name in SEVERAL), (1, "bf16x6"), (1, "tf32x3")])
def test_sums_of_the_model_are_within_the_bounds(index, precision, distribution):
    config = STAGE.configs[index]
    for k in (1, 100, 1030):
        a, b = accuracy.operands(distribution, 8, 6, k, seed=k)
        exact, scale = a.astype(np.float64) @ b, np.abs(a.astype(np.float64)) @ np.abs(b)
        found = expected_sums(config, precision_for(precision, k), a, b)
        assert (np.abs(found - exact) <= bound(precision, k) * scale).all(), k


# ------------------------------------------------------------------------------------------------------ special values


SPECIAL = {
    "infinity": [((2, 3), np.inf)],
    "NaN": [((2, 3), np.nan)],
    "NaN that would round away": [((2, 3), np.uint32(0x7F800001).view(np.float32))],
    "NaN that would round to zero": [((2, 3), np.uint32(0xFFFFFFFF).view(np.float32))],
    "both infinities": [((2, 3), np.inf), ((2, 20), -np.inf)],
    "rounds to infinity": [((2, 3), np.finfo(np.float32).max)],
    "products beyond the range": [((2, 3), np.float32(2.0**100)), ((2, 20), np.float32(-(2.0**100)))],
    "sums beyond the range": [((2, 3), np.float32(3e38)), ((2, 20), np.float32(3e38))],
}


@simulated
def test_totals_beyond_the_range_that_rests_cancel():
    """Each warp's sum is far from infinity; the sum of the warps' totals, without their rests, is not."""
    k, terms = 112 * CONFIG.lanes_k, np.arange(14)
    high = np.where(terms % 2 == 0, np.float32(1 + 2.0**-7 - 2.0**-20), np.float32(1 - 2.0**-8)).astype(np.float32)
    left, right = high.astype(np.float64), high * np.where(terms % 2 == 0, 1.0, -1.0)
    left, right = np.append(left, [1, 0]), np.append(right, [-np.round(64 * (left * right).sum()) / 64, 0])
    a, b = (np.tile(one, k // 16).astype(np.float32) for one in (2.0**63 * left, 2.0**64 * right))
    c = np.full((1, 1), np.nan, np.float32)
    product(a[None], b[:, None], c, "bf16x6")
    exact, scale = a.astype(np.float64) @ b, np.abs(a.astype(np.float64)) @ np.abs(b)
    assert abs(exact) < 2.0**126
    assert abs(c[0, 0] - exact) <= k * 2.0**-24 * scale


@simulated
@pytest.mark.parametrize(("special", "precision"), covering(SPECIAL, SEVERAL[:3]))
def test_special_values_give_the_results_of_fp32(special, precision):
    """And change no bit of the other rows."""
    a, b = filled(9, 37, 1), filled(37, 30, 2)
    b[:, 1], b[3, :3] = 0, [1, 0, 2.0**40 if "products" in special else -1]
    b[20, :3] = [0.5, -1, -1 if "sums" in special else 1]
    usual, c = np.empty((2, 9, 30), np.float32)
    product(a, b, usual, precision)
    for place, value in SPECIAL[special]:
        a[place] = value
    product(a, b, c, precision)
    rows = [0, 1, *range(3, 9)]
    np.testing.assert_array_equal(c[rows].view(np.uint32), usual[rows].view(np.uint32))
    with np.errstate(all="ignore"):
        expected = np.zeros(30, np.float32)
        for i in range(37):
            expected += a[2, i] * b[i]
    assert not (np.abs(expected) < 2.0**126).all()
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(c[2][~finite], expected[~finite])
    if finite.any():
        scale = np.abs(a[2].astype(np.float64)) @ np.abs(b[:, finite])
        assert (np.abs(c[2][finite].astype(np.float64) - expected[finite]) <= 2.0**-14 * scale).all()


@simulated
@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_single_parts_behave_like_the_hardware(precision):
    a, b, c = filled(3, 5, 1), np.abs(filled(5, 2, 2)) + 1, np.zeros((3, 2), np.float32)
    a[0, 1], a[1, 2] = np.inf, np.nan
    product(a, b, c, precision)
    assert (c[0] == np.inf).all()
    assert np.isnan(c[1]).all()
    assert np.isfinite(c[2]).all()


# --------------------------------------------------------------------------------------------------- batches, epilogues


@simulated
@pytest.mark.parametrize(("gap", "accesses"), [(0, ("along4", "across4")), (1, ("any", "across1"))])
def test_a_batch(gap, accesses):
    """Matrices that are not whole vectors apart are copied by element; one operand is the same for all."""
    size = 5 * 8 + gap
    a = filled(3, size, 1)
    b, c = filled(8, 4, 2), np.full((3, 5, 4), np.nan, np.float32)
    first = np.lib.stride_tricks.as_strided(a, (5, 8), (32, 4))
    batch = Batch((1, 1, 3), (0, 0, 4 * size), (0, 0, 0), (0, 0, 80))
    matrices = [Matrix(x.ctypes.data, *x.shape, *x.strides, 0, x) for x in (first, b, c[0])]
    assert STAGE.accesses(launch.product_of(*matrices, batch)) == accesses
    launch.launch(STAGE, CONFIG, 1.0, matrices[0], matrices[1], 0.0, matrices[2], precision="tf32x3", batch=batch)
    for i in range(3):
        np.testing.assert_allclose(c[i], a[i, : 5 * 8].reshape(5, 8) @ b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("layouts", "extra", "accesses"),
    [
        ("NN", 0, ("along4", "across4")),
        ("TN", 0, ("across4", "across4")),
        ("TT", 0, ("across1", "any")),
        ("NN", 1, ("any", "across1")),
        ("TN", 1, ("across1", "across1")),
        ("NT", 1, ("any", "any")),
        ("TT", 1, ("across1", "any")),
    ],
)
def test_accesses(layouts, extra, accesses):
    """By floats, neighbours along whichever axis is contiguous are copied together."""
    a, b = dense(layouts[0], 32 + extra, 16 + extra), dense(layouts[1], 16 + extra, 24 + extra)
    assert STAGE.accesses(Product(a, b, dense("N", 32 + extra, 24 + extra))) == accesses


@simulated
def test_an_epilogue_sees_every_element_once():
    a, b, c = filled(33, 5, 1), filled(5, 34, 2), np.full((33, 34), 2.0, np.float32)
    rows, expected = filled(1, 34, 3)[0], np.float32(2) * (a @ b) + np.float32(0.5) * c
    vector = Vector(rows.ctypes.data, 34, 4, rows)
    product(
        a, b, c, "bf16x3", 2.0, 0.5, epilogue=lambda value, row, col, x: value + 100 * row + x[col], vectors=(vector,)
    )
    np.testing.assert_allclose(
        c, expected + 100 * np.arange(33, dtype=np.float32)[:, None] + rows, rtol=1e-4, atol=1e-3
    )


def test_more_matrices_than_a_grid_has_rows(monkeypatch):
    monkeypatch.setattr(fused_stage, "MAX_GRID_Y", 4)
    batch = Batch((1, 1, 10), (0, 0, 4100), (0, 0, 0), (0, 0, 16))
    whole = Product(dense("N", 32, 16), dense("N", 16, 24), dense("N", 32, 24), batch)
    found = [*STAGE.pieces(CONFIG, whole, "bf16x6", GPU)]
    assert [(one.a, one.b, one.c, one.product.batch.extents[-1]) for one in found] == [
        (0, 0, 0, 4),
        (4 * 4100, 0, 64, 4),
        (8 * 4100, 0, 128, 2),
    ]
    (step,) = STAGE.launches(CONFIG, found[1].product, "bf16x6", None, GPU).steps
    assert step.grid == (1, 4, 1)


# ----------------------------------------------------------------------------------------------------------- interface


@simulated
def test_public_functions():
    a, b = filled(5, 7, 1), filled(7, 6, 2)
    options = {"stage": "fused_decomposition", "precision": "bf16x3"}
    expected = a.astype(np.float64) @ b
    made = numba_gemm.plan(5, 6, 7, **options)
    for found in (numba_gemm.tiled_sgemm(a, b, **options), made(a, b)):
        assert (np.abs(found - expected) <= 2.0**-14 * (np.abs(a) @ np.abs(b))).all()
    told = numba_gemm.explain(a, b, **options)
    assert (told.stage, told.launches, told.workspace_bytes) == ("fused_decomposition", 1, 0)
    assert (told.a_access, told.b_access, told.tile) == ("any", "across1", (32, 32, 64))
    assert made.workspace_bytes == 0


def test_other_tiles_are_refused():
    kernel = STAGE.kernel(CONFIG, Product(dense("N", 4, 4), dense("N", 4, 4), dense("N", 4, 4)), "bf16x6")
    for changes, message in (
        ({"TM": 8, "TN": 4}, "4x8 sums per thread"),
        ({"BK": 16}, "BK is 16 terms per lane along k"),
        ({"slots": 1}, "two slots or more"),
        ({"pad": 0}, "pads hold"),
        ({"lanes_k": 1, "BK": 16, "pad": 8, "pad_b": 8, "BM": 64, "BN": 64, "slots": 2}, "slots hold the sums"),
    ):
        with pytest.raises(ValueError, match=message):
            build(CONFIG.replace(**changes), kernel.variant)


# ------------------------------------------------------------------------------------------------------- compiled code


@simulated
@pytest.mark.parametrize("access", ACCESSES)
@pytest.mark.parametrize("config", STAGE.configs, ids=lambda config: config.name)
def test_reads_of_fragments_have_no_bank_conflicts(monkeypatch, config, access):
    """A quarter of a warp reads 128 bytes at a time, from all 32 banks."""
    loader, read, *_ = tile_of(access, config.BM, config.BK, config.threads)
    places = []
    monkeypatch.setattr(fused_decomposition, "shared_load4", lambda _, at: places.append(int(at)) or (0.0,) * 4)
    for lane in range(32):
        read(None, loader.position(4 * (lane // 4), lane % 4 * 4), np.empty((4, 4)))
    for quarter in np.reshape(places, (4, 8, 4)):  # lanes of a quarter, and their reads
        for at_once in quarter.T:
            assert len(set(at_once // 16 % 8)) == 8


FUSED = [
    (0, "bf16x6", (9, 0)),
    pytest.param(0, "tf32x3", (8, 0), marks=pytest.mark.exhaustive),
    pytest.param(1, "bf16x6", (8, 0), marks=pytest.mark.exhaustive),
    pytest.param(1, "bf16x6", (12, 0), marks=pytest.mark.exhaustive),
    (1, "bf16", (9, 0)),
]


@pytest.mark.parametrize(("index", "precision", "cc"), FUSED)
def test_compiled_kernels(index, precision, cc):
    for row in offline(compiled_fused, index, precision, cc):
        assert (row["local"], row["spills"]) == (0, 0), row
        assert row["passed"] == row["taken"], row
        opcodes, own = row["opcodes"], ALL_PRECISIONS[precision]
        assert not {"LDL", "STL", "ST"} & opcodes.keys(), row
        assert row["vectors"] == ("LD" not in opcodes), row  # the epilogue's vector
        assert {bits for name, bits in row["widths"] if name == "LDGSTS"} == {128 if row["vectors"] else 32}, row
        assert opcodes["HMMA"] % (8 * len(own.products) * (1 if own.per_word == 2 else 2)) == 0, row
        assert (opcodes.get("FFMA", 0) >= 128) == (own.parts > 1), row  # of the second pass
