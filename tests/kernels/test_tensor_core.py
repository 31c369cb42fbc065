"""The tensor-core ladder: decomposition in the simulator, compiled kernels, launches, and products on a GPU."""

from __future__ import annotations

import itertools
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.covering import covering
from support.offline import offline
from support.recorded_launches import record_launches
from support.simulated_parts import (
    LAYOUTS,
    Warp,
    aligned_empty,
    reciprocals_in,
    recomposed,
    simulated_decomposition,
    words_of_scales,
)
from support.tensor_core_cases import (
    ALL_PRECISIONS,
    COMPILED,
    GPU,
    bound,
    compiled_rows,
    compiled_ways,
    first_uses_of_c,
    kernels_of,
    multiply,
    precisions_of,
    public_name,
)

import numba_gemm
from numba_gemm.gemm import product as gemm_product
from numba_gemm.gemm import tensor_heuristics
from numba_gemm.gemm.fast_path import CallCache
from numba_gemm.gemm.request import checked
from numba_gemm.kernels.product import ONE, Batch, Product, dense
from numba_gemm.kernels.stage import IEEE, MAX_K
from numba_gemm.kernels.step import Slot
from numba_gemm.kernels.tensor_core import (
    SHORT_SUMS,
    TENSOR_PRECISIONS,
    TENSOR_STAGES,
    DirectStage,
    FusedStage,
    TensorStage,
    TensorVariant,
    TmaStage,
    WarpgroupConfig,
    accumulate,
    decompose,
    scales,
)
from numba_gemm.kernels.tensor_core import stage as tensor_stage
from numba_gemm.kernels.tensor_core.config import (
    LEFT,
    REGISTERS,
    ROW_WORDS,
    SHARED_BYTES,
    WARPGROUP,
    parts_shape,
    words_per_row,
)
from numba_gemm.kernels.tensor_core.decomposition import decomposition_of
from numba_gemm.kernels.tensor_core.precision import TensorPrecision
from numba_gemm.kernels.tensor_core.stage import precision_for
from numba_gemm.lab.bench import accuracy
from numba_gemm.models.accuracy import TENSOR_BOUNDS, ieee_bound, tensor_bound
from numba_gemm.runtime import kernel_key
from numba_gemm.runtime.launch import launch
from numba_gemm.runtime.matrix import Matrix, Vector
from numba_gemm.runtime.workspace import Workspace
from numba_gemm.simulator.switch import SIMULATOR

PERSISTENT = TENSOR_STAGES["persistent"]

FLOATS = st.floats(width=32, allow_nan=False)
# 2^-11 and 2^-8 of the element are left after one part; each further part leaves as much of the rest.
UNITS = {"tf32": 2.0**-11, "bf16": 2.0**-8, "f16": 2.0**-11}
CONFIGS = [
    (name, index)
    for name, stage in TENSOR_STAGES.items()
    if not isinstance(stage, DirectStage | FusedStage)  # have no slots of parts
    for index in range(len(stage.configs))
]
TEACHING = [name for name, stage in TENSOR_STAGES.items() if isinstance(stage, TensorStage) and not stage.complete]


simulated = pytest.mark.skipif(not SIMULATOR, reason="runs on the simulator")


# ------------------------------------------------------------------------------------------------------- rounding


def narrow_of(kind):
    from numba_gemm.device import narrow

    return {"tf32": narrow.tf32, "bf16": narrow.bf16, "short": narrow.short_bf16, "f16": narrow.f16}[kind]


@simulated
@pytest.mark.parametrize(("kind", "bits"), [("tf32", 13), ("bf16", 16), ("short", 17)])
@given(value=FLOATS)
def test_rounding_is_to_the_nearest(kind, bits, value):
    rounded = narrow_of(kind)(np.float32(value))
    assert int(rounded.view(np.uint32)) & (1 << bits) - 1 == 0
    if np.isinf(value):
        assert rounded == value
        return
    word = int(np.float32(value).view(np.uint32)) >> bits << bits
    neighbours = [np.uint32(word).view(np.float32), np.uint32(word + (1 << bits)).view(np.float32)]
    # The number above the largest is infinity, which stands for the next power of two here.
    sizes = [float(x) if np.isfinite(x) else math.copysign(2.0**128, x) for x in (*neighbours, rounded)]
    below, above, found = (abs(size - float(value)) for size in sizes)
    assert found == min(below, above)


@simulated
@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("tf32", 1 + 2.0**-11, 1 + 2.0**-10),  # halves away from zero
        ("tf32", 1 + 3 * 2.0**-11, 1 + 2 * 2.0**-10),
        ("tf32", -1 - 2.0**-11, -1 - 2.0**-10),
        ("bf16", 1 + 2.0**-8, 1.0),  # halves to even
        ("bf16", 1 + 3 * 2.0**-8, 1 + 4 * 2.0**-8),
        ("tf32", np.inf, np.inf),
        ("bf16", -np.inf, -np.inf),
        ("tf32", np.finfo(np.float32).max, np.inf),
        ("bf16", np.finfo(np.float32).max, np.inf),
        ("tf32", 2.0**-149, 0.0),
        ("bf16", -0.0, -0.0),
        ("short", 1 + 2.0**-7, 1 + 2.0**-6),  # halves away from zero
        ("short", -1 - 2.0**-7, -1 - 2.0**-6),
        ("short", np.inf, np.inf),
        ("short", np.finfo(np.float32).max, np.inf),
        ("f16", 1 + 2.0**-11, 1.0),  # halves to even
        ("f16", 65519.0, 65504.0),
        ("f16", -65520.0, -np.inf),
        ("f16", 2.0**-24, 2.0**-24),
        ("f16", 2.0**-26, 0.0),
    ],
)
def test_rounding_of_what_is_special(kind, value, expected):
    found = narrow_of(kind)(np.float32(value))
    assert found == np.float32(expected)
    assert np.signbit(found) == np.signbit(np.float32(expected))


@simulated
@pytest.mark.parametrize("kind", ["tf32", "bf16", "short", "f16"])
def test_rounding_of_nan(kind):
    assert np.isnan(narrow_of(kind)(np.float32(np.nan)))
    assert np.isnan(narrow_of(kind)(np.uint32(0x7F800001).view(np.float32)))  # whose fraction would round away


@simulated
def test_exponents_and_powers():
    from numba_gemm.device.narrow import exponent, power

    for logarithm in (-126, -1, 0, 30, 127):
        value = power(np.int32(logarithm))
        assert value == np.float32(2.0) ** np.float32(logarithm)
        assert exponent(value) == exponent(np.nextafter(value, np.float32(np.inf))) == logarithm
    assert exponent(np.float32(2.0**-140)) == exponent(np.float32(0)) == -127
    assert exponent(np.float32(np.inf)) == 128


# ------------------------------------------------------------------------------------------------- decomposition


@simulated
@pytest.mark.parametrize(
    ("precision", "layout"),
    covering(TENSOR_PRECISIONS.values(), LAYOUTS),
    ids=lambda value: getattr(value, "name", value),
)
def test_parts_sum_up_to_the_operands(precision, layout):
    generator = np.random.default_rng(5)
    k = precision.slot_k + 7
    operands = []
    for mn in (37, 5):
        x = generator.standard_normal((mn, k)).astype(np.float32)
        # Second parts of F16 lose bits of elements that are much smaller than the largest of their row.
        spread = 30 if precision.kind != "f16" else 11
        x *= np.float32(2.0) ** generator.integers(-spread, spread, (mn, k)).astype(np.float32)
        if precision.scaled:
            x *= np.float32(2.0) ** generator.integers(-30, 30, (mn, 1)).astype(np.float32)
        operands.append(LAYOUTS[layout](x).astype(np.float32, copy=False))
    for x, parts in zip(operands, simulated_decomposition(precision, *operands), strict=True):
        found = recomposed(precision, parts, *x.shape)
        rest = np.abs(x.astype(np.float64) - found.sum(axis=0))
        unit = UNITS[precision.kind]
        # F16 ends at 2^-24: half of that is what scaled elements may lose, and their remainders with their factor.
        least = 2.0**-25 * reciprocals_in(parts[-1, : len(x), None]) if precision.scaled else 0.0
        lost = least / precision.second_factor
        assert (rest <= unit**precision.parts * (2 if precision.short else 1) * np.abs(x) + lost).all()
        for p, (part, next_part) in enumerate(pairwise(found)):
            assert (np.abs(next_part) <= unit * (2 if precision.short and p == 0 else 1) * np.abs(part) + least).all()


@simulated
@pytest.mark.parametrize("precision", ["bf16x6", "fp16x3"])
def test_a_batch_is_decomposed_matrix_by_matrix_and_what_it_shares_once(precision):
    from numba_gemm.simulator import scheduler

    generator, precision = np.random.default_rng(3), TENSOR_PRECISIONS[precision]
    # There are three different y, too: if all share the first one's parts, others must not be decomposed into them.
    x, ys = (generator.standard_normal(extents).astype(np.float32) for extents in ((3, 5, 70), (3, 6, 70)))
    x[1, 1, 4] = np.inf
    y, y_step = ys[0], ys.strides[0]
    expected = [simulated_decomposition(precision, one, y) for one in x]
    (x_rows, x_words), (y_rows, y_words) = (part.shape for part in expected[0])
    x_parts, y_parts = aligned_empty(3 * x_rows, x_words), aligned_empty(y_rows, y_words)
    x_step, own, first = x.strides[0], 4 * x_rows * x_words, (slice(x_rows), slice(None))
    blocks = x_rows // precision.parts + y_rows // precision.parts
    operands = [x[0], x_parts[first], y, y_parts, (x_step, own, y_step, 0)]
    if precision.scaled:
        x_large, y_large = aligned_empty(3, 32), aligned_empty(1, 32)
        large = (x[0], x_large[:1], y, y_large, (x_step, 4 * 32, y_step, 0))
        scheduler.run(decompose.build_row_maxima(batched=True), (2, 3), decompose.THREADS, large)
        operands = [x[0], x_parts[first], x_large[:1], y, y_parts, y_large, (x_step, own, 4 * 32, y_step, 0, 0)]
    scheduler.run(decompose.build(precision, batched=True), (blocks, 3), decompose.THREADS, tuple(operands))
    for i, (of_x, of_y) in enumerate(expected):
        rows = precision.parts * (x_rows // precision.parts)
        found = x_parts[i * x_rows : (i + 1) * x_rows]
        np.testing.assert_array_equal(found[:rows].view(np.uint32), of_x[:rows].view(np.uint32))
        np.testing.assert_array_equal(found[rows:, :5], of_x[rows:, :5])
        np.testing.assert_array_equal(y_parts[:rows].view(np.uint32), of_y[:rows].view(np.uint32))
    marks = x_parts[::x_rows, 32 * ROW_WORDS :]  # of first slots
    np.testing.assert_array_equal(marks[:, :5], [[0, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]])


@simulated
@pytest.mark.parametrize("turned", [False, True])
def test_scales_bring_the_largest_of_a_row_to_one_size(turned):
    precision, k = TENSOR_PRECISIONS["fp16x3"], decompose.SPAN + 9
    generator = np.random.default_rng(7)
    x = generator.uniform(-1, 1, (6, k)).astype(np.float32)
    x *= np.float32([[2.0**-140], [2.0**-60], [1.0], [2.0**60], [2.0**127], [0.0]])
    x[2, 3], x[3, k - 1] = np.inf, np.nan
    x = np.asfortranarray(x) if turned else x
    parts, _ = simulated_decomposition(precision, x, x[:1])
    found = reciprocals_in(parts[-1, :6])
    sizes = np.abs(np.where(np.isfinite(x), x, 0)).max(axis=1)
    assert (np.abs(np.log2(found)) <= scales.FARTHEST).all()
    for row in (1, 3, 4):
        assert 2.0**14 <= float(sizes[row]) / found[row] < 2.0**15


@simulated
@given(
    st.floats(1, 2, exclude_max=True, width=32),
    st.integers(-60, 52),
    st.integers(scales.TOP - 127, scales.FARTHEST),
    st.integers(scales.TOP - 127, scales.FARTHEST),
)
def test_scales_are_removed_with_one_rounding(fraction, magnitude, row, col):
    """Whatever the scales: sums of products of F16 parts are at least 2^-48, and 2^-60 once the factor is removed."""
    total = np.float32(fraction * 2.0**magnitude)
    words = [scales.reciprocal(np.int32(logarithm)) for logarithm in (row, col)]
    np.testing.assert_array_equal(words, words_of_scales(np.float32([row, col])))
    with np.errstate(all="ignore"):
        expected = np.float32(float(total) * 2.0 ** -(row + col))
        assert scales.unscaled(total, *words) == expected


# ------------------------------------------------------------------------------------------------------------- sums


@simulated
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40))
def test_nothing_is_lost_between_a_total_and_its_rests(values):
    """Sums of integers in float32: what the total rounds off goes to the rests, so both together stay exact."""
    _, add, add_exactly, *_ = accumulate.steps(8)
    total, rests = np.zeros((1, 4), np.float32), np.zeros((1, 4), np.float32)
    exact = 0.0
    for value in sorted(np.round(values), key=abs):
        term = np.full((1, 4), value, np.float32)
        exact += float(term[0, 0])
        add_exactly(total, term)
        add(rests, term)
    assert float(total[0, 0]) + float(rests[0, 0]) == pytest.approx(exact, abs=2.0**-20)


@simulated
@given(st.integers(-(2**23), 2**23), st.integers(-(2**16), 2**16))
def test_a_sum_that_is_a_float_stays_as_it_is(total, rest):
    *_, finish = accumulate.steps(8)
    sum_of_both = np.full((1, 4), total, np.float32)
    finish(sum_of_both, np.full((1, 4), rest, np.float32))
    assert (sum_of_both == np.float32(total + rest)).all()


@simulated
@pytest.mark.parametrize("factor", [1.0, 2.0**12])
def test_rests_are_divided_by_the_factor_of_their_parts(factor):
    *_, add_rests, finish = accumulate.steps(8, factor)
    for step in (add_rests, finish):
        total = np.full((1, 4), 2.0**23 - 7, np.float32)
        step(total, np.full((1, 4), 3 * factor, np.float32))
        assert (total == 2.0**23 - 4).all()


@simulated
def test_what_is_cut_off_is_given_back_on_average():
    *_, finish = accumulate.steps(8)
    generator = np.random.default_rng(1)
    total, rests = generator.uniform(1, 2, (4000, 4)).astype(np.float32), generator.uniform(0, 1e-3, (4000, 4))
    rests = rests.astype(np.float32)
    exact = total.astype(np.float64) + rests
    for row in range(4000):
        finish(total[row : row + 1], rests[row : row + 1])
    assert np.mean(total / exact - 1) == pytest.approx(accumulate.CUT_OFF, rel=0.2)


# ----------------------------------------------------------------------------------------------- what follows a sum


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (8, 3), (9, 40), (20, 7)])
@simulated
def test_every_tile_has_its_turn(rows, cols):
    from numba_gemm.kernels.tensor_core.epilogue import place

    places = {tuple(map(int, place(np.uint32(t), np.uint32(rows), np.uint32(cols)))) for t in range(rows * cols)}
    assert places == {(row, col) for row in range(rows) for col in range(cols)}


@simulated
@pytest.mark.parametrize("k", [0, 1, 15, 16, 17, 40])
@pytest.mark.parametrize("nan", [None, 0, 15, 39])
def test_an_element_is_computed_again_term_by_term(k, nan):
    from numba_gemm.kernels.tensor_core.special_values import recomputation

    generator = np.random.default_rng(k)
    x, y = (generator.integers(-9, 9, extents).astype(np.float32) for extents in ((3, k), (k, 4)))
    if nan is not None and nan < k:
        x[1, nan] = np.nan
    found = np.array([[recomputation()(x, y, row, col) for col in range(4)] for row in range(3)])
    np.testing.assert_array_equal(found, x @ y)


@simulated
def test_what_has_come_to_nan_is_not_computed_on():
    from numba_gemm.kernels.tensor_core.special_values import AHEAD, recomputation

    class Read(np.ndarray):
        def __getitem__(self, place):
            reads.append(place)
            return super().__getitem__(place)

    reads = []
    x = np.ones((1, 100), np.float32).view(Read)
    x[0, 20] = np.nan
    assert np.isnan(recomputation()(x, np.ones((100, 1), np.float32), 0, 0))
    assert len(reads) == 2 * AHEAD


@simulated
@pytest.mark.parametrize("layout", ["pairs", "turned"])
@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize(("m", "n"), [(32, 32), (40, 48), (31, 32), (32, 31), (1, 1), (17, 9)])
@pytest.mark.parametrize("precision", ["bf16", "bf16x6"])
def test_sums_are_stored(precision, m, n, beta, layout):
    warp = Warp(precision, m, n, 5)
    rows, cols = min(m, 32), min(n, 32)
    found = warp.store(layout, 1.5, beta)
    expected = warp.old.copy() if beta else np.full((m, n), np.nan, np.float32)  # beyond the warp's tile it stays
    expected[:rows, :cols] = np.float32(1.5) * warp.sums[:rows, :cols]
    if beta:
        expected[:rows, :cols] += np.float32(beta) * warp.old[:rows, :cols]
    np.testing.assert_array_equal(found, expected)


@simulated
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 2.0**126, -np.finfo(np.float32).max])
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_what_is_not_finite_or_near_it_is_computed_again(beta, value):
    warp = Warp("bf16x6", 32, 32, 7)
    places = (0, 0), (5, 17), (31, 31)
    for place in places:
        warp.sums[place] = value
    found = warp.store("pairs", 2.0, beta)
    with np.errstate(over="ignore"):
        expected = np.float32(2) * warp.sums + np.float32(beta) * warp.old
    for row, col in places:
        again = np.float32(0)
        for k in range(7):
            again = np.float32(again + warp.x[row, k] * warp.y[k, col])
        expected[row, col] = np.float32(2) * again + np.float32(beta) * warp.old[row, col]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@simulated
def test_what_is_below_stays_as_it_is():
    warp = Warp("bf16x6", 32, 32, 3)
    warp.sums[4, 4] = np.nextafter(np.float32(2.0**126), np.float32(0))
    assert warp.store("pairs", 1.0, 0.0)[4, 4] == warp.sums[4, 4]


@simulated
@pytest.mark.parametrize(("deep", "across"), [(1, 4), (2, 4)])
def test_scales_are_taken_out(deep, across):
    warp = Warp("fp16x3", 16 * deep, 8 * across, 3, deep=deep, across=across)
    found = warp.store("pairs", 1.0, 0.0)
    logarithms = warp.scales[0, : 16 * deep, None] + warp.scales[1, None, : 8 * across]
    np.testing.assert_array_equal(found, warp.sums * np.float32(2) ** -logarithms)


@simulated
@pytest.mark.parametrize("precision", ["bf16", "bf16x6", "fp16x3"])
def test_partial_sums_are_stored_as_they_are(precision):
    warp = Warp(precision, 32, 32, 3)
    warp.sums[3:6, 7] = np.inf, np.nan, -np.finfo(np.float32).max
    np.testing.assert_array_equal(warp.store("pairs", 1.0, 0.0, partial=True), warp.sums)


@simulated
def test_an_epilogue_is_the_last_step():
    def epilogue(value, row, col, bias):
        return value * 2 + bias[col] - row

    warp, bias = Warp("bf16x6", 20, 30, 3), np.arange(30, dtype=np.float32)
    found = warp.store("pairs", 1.0, 0.0, epilogue, (bias,))
    rows = np.arange(20, dtype=np.float32)[:, None]
    np.testing.assert_array_equal(found, warp.sums[:20, :30] * 2 + bias - rows)


# --------------------------------------------------------------------------------------- precisions, configurations


@pytest.mark.parametrize("precision", TENSOR_PRECISIONS.values(), ids=lambda precision: precision.name)
def test_products_come_smallest_first(precision):
    sizes = [-(a + b) for a, b in precision.products]
    assert sizes == sorted(sizes)
    assert precision.products[-1] == (0, 0)
    expected = {"tf32": 1, "tf32x3": 3, "bf16": 1, "bf16x3": 3, "bf16x6": 6, "bf16x9": 9, "fp16x3": 3}
    assert len(precision.products) == expected[precision.name]


@pytest.mark.simulator
def test_what_bf16x3_leaves_out():
    """The products of parts that are not computed are at most 2^-15 of the product, and hardly less for some."""

    narrow = narrow_of("bf16")

    def rounded(x):
        bits = x.view(np.uint32)
        return (bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).astype(np.uint32).view(np.float32)

    def parts(x):
        first = rounded(x)
        second = rounded(x - first)
        assert [first[0], second[0]] == [narrow(x[0]), narrow(np.float32(x[0] - first[0]))]
        return [part.astype(np.float64) for part in (first, second, x - first - second)]

    # The bits behind the first part's: second parts near the largest, of which 0x7F40 also leaves the largest rest.
    tails = np.array([0x7F40, 0x7FFF, 0x8000, 0x8001, 0x7F80, 0x7F7F, 0x8080, 0x7EFF, 0x1234, 0], np.uint32)
    x = (np.uint32(0x3F800000) + (np.arange(128, dtype=np.uint32)[:, None] << 16) + tails).ravel().view(np.float32)
    first, second, rest = parts(x)
    left_out = np.abs(
        np.multiply.outer(second, second) + np.multiply.outer(rest, x) + np.multiply.outer(first + second, rest)
    )
    share = (left_out / np.multiply.outer(x.astype(np.float64), x)).max()
    assert 2.0**-15.1 < share <= TENSOR_BOUNDS["bf16x3"] + 2.0**-33
    assert {(0, 0), (0, 1), (1, 0)} == set(TENSOR_PRECISIONS["bf16x3"].products)


def test_products_of_unknown_parts_are_refused():
    with pytest.raises(ValueError, match="different ones of 1 parts"):
        TensorPrecision("odd", "tf32", 1, ((0, 0), (1, 0)))
    for products in ((), ((0, 0), (0, 0)), ((0, -1),)):
        with pytest.raises(ValueError, match="different ones"):
            TensorPrecision("odd", "tf32", 1, products)
    with pytest.raises(ValueError, match="expected one of tf32, bf16, f16"):
        TensorPrecision("half", "e4m3", 1, ((0, 0),))
    with pytest.raises(ValueError, match="do not end"):
        TensorPrecision("turned", "bf16", 2, ((0, 0), (0, 1)))
    for products, compensated in ((((1, 1), (0, 0)), False), (((0, 1), (0, 0)), True)):
        with pytest.raises(ValueError, match="one second part each"):
            TensorPrecision("scaled", "f16", 2, products, compensated=compensated)


@pytest.mark.parametrize(("stage", "index"), CONFIGS)
def test_slots_fit_into_shared_memory(stage, index):
    config = TENSOR_STAGES[stage].configs[index]
    for precision in (ALL_PRECISIONS[name] for name in precisions_of(stage, index)):
        assert 1 <= config.slots(precision) <= config.max_slots
        assert config.dynamic_shared(precision) <= SHARED_BYTES
        assert config.slots(precision) > 1 or getattr(config, "producers", 1) == 0, (
            "a producer needs a slot to fill while one is read"
        )


@pytest.mark.parametrize(("stage", "index"), CONFIGS)
def test_claims_leave_enough_registers(stage, index):
    config = TENSOR_STAGES[stage].configs[index]
    if config.claim:
        started = REGISTERS // config.threads // 8 * 8 * config.threads
        assert WARPGROUP * (config.consumers * config.claim + config.producers * LEFT) <= started


@pytest.mark.parametrize(
    ("extents", "broken"),
    [
        ({"BM": 128, "BN": 128, "consumers": 1}, "64 \\* consumers"),
        ({"BM": 64, "BN": 12}, "BN % 8"),
        ({"BM": 64, "BN": 104}, "BN % 32"),
        ({"BM": 128, "BN": 128, "consumers": 2, "producers": 1, "claim": 248}, "registers of all warpgroups"),
        ({"BM": 128, "BN": 128, "consumers": 2, "claim": 240}, "claim >= start"),
        ({"BM": 128, "BN": 128, "consumers": 2, "producers": 1, "claim": 236}, "claim % 8"),
        ({"BM": 64, "BN": 128, "max_slots": 0}, "slots"),
        ({"BM": 64, "BN": 0}, "positive"),
        ({"BM": 64, "BN": 128, "producers": -1}, "positive"),
    ],
)
def test_a_configuration_names_what_it_breaks(extents, broken):
    with pytest.raises(ValueError, match=broken):
        WarpgroupConfig(**extents)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("one_warpgroup", WarpgroupConfig(128, 128, consumers=2)),
        ("one_warpgroup", WarpgroupConfig(64, 128, producers=1)),
        ("producer_consumer", WarpgroupConfig(64, 128)),
        ("producer_consumer", WarpgroupConfig(64, 128, producers=2)),
        ("persistent", WarpgroupConfig(64, 128)),
    ],
)
def test_a_stage_refuses_warpgroups_that_it_has_no_part_for(name, config):
    with pytest.raises(ValueError, match=r"one warpgroup|one producer"):
        TENSOR_STAGES[name].build(config, TensorVariant(TENSOR_PRECISIONS["tf32"]))


def test_a_slot_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="no room"):
        WarpgroupConfig(256, 256, consumers=4).slots(TensorPrecision("four", "bf16", 4, ((0, 0),)))


@pytest.mark.parametrize("name", TEACHING)
def test_a_stage_without_scales_refuses_a_scaled_precision(name):
    stage = TENSOR_STAGES[name]
    with pytest.raises(ValueError, match="no scales"):
        stage.build(stage.configs[0], TensorVariant(TENSOR_PRECISIONS["fp16x3"]))
    assert "fp16x3" not in stage.precisions
    assert not stage.takes_epilogue
    with pytest.raises(ValueError, match="no epilogue"):
        stage.build(stage.configs[0], TensorVariant(TENSOR_PRECISIONS["tf32"], epilogue=abs))


def test_tiles_too_wide_for_three_sums_are_refused():
    stage = PERSISTENT
    with pytest.raises(ValueError, match="BN <= 128"):
        stage.build(stage.configs[-1], TensorVariant(TENSOR_PRECISIONS["bf16x6"]))


@pytest.mark.parametrize("precision", TENSOR_PRECISIONS.values(), ids=lambda precision: precision.name)
def test_decomposed_operands_are_padded(precision):
    words = words_per_row(precision)
    assert words == ROW_WORDS + (precision.parts > 1)
    assert parts_shape(precision, 1, 0, 64) == (precision.parts + precision.scaled, words * 64)
    assert parts_shape(precision, 97, precision.slot_k + 1, 96) == (
        2 * precision.parts + precision.scaled,
        2 * words * 96,
    )


# -------------------------------------------------------------------------------------------------- decompositions


def dense_product(m, n, k, batch=ONE):
    return Product(dense("N", m, k), dense("N", k, n), dense("N", m, n), batch)


@pytest.mark.parametrize("precision", TENSOR_PRECISIONS)
@given(m=st.integers(1, 20000), n=st.integers(1, 20000), k=st.integers(1, 20000))
def test_a_decomposition_covers_the_product(precision, m, n, k):
    stage, product = PERSISTENT, dense_product(m, n, k)
    _, config, _ = tensor_heuristics.seconds_of(stage, precision, m, n, k, 1, 132, "")[0]
    tensor_precision = precision_for(precision, k)
    made = decomposition_of(tensor_precision, product, config)
    places, parts = zip(*made.arguments)
    a, b = parts[:2]
    assert a.rows == b.rows == tensor_precision.parts * -(-k // tensor_precision.slot_k) + tensor_precision.scaled
    for words, extent, tile in ((a.cols, m, config.BM), (b.cols, n, config.BN)):
        each = words_per_row(tensor_precision)
        assert words % (each * tile) == 0
        assert words >= each * extent > words - each * tile
    assert {place.slot for place in places} == {Slot.SCRATCH}
    ends = [at.offset + 4 * part.rows * part.cols for at, part in zip(places, parts, strict=True)]
    assert all(end <= at.offset for end, at in zip(ends, places[1:], strict=False))
    assert ends[-1] <= made.bytes
    launches = stage.launches(config, product, precision, None, GPU)
    assert launches.scratch_bytes == made.bytes
    assert 0 < launches.steps[-1].grid[0] <= 132


def decomposed_as(precision):
    """Return the name of the first precision with the same parts, which the kernel that makes them has."""
    return "bf16x6" if precision == "bf16x9" else precision


@pytest.mark.parametrize("precision", TENSOR_PRECISIONS)
def test_steps_of_a_product(precision):
    """Row maxima if the precision is scaled, decomposition, multiplication; each may start before the one before has
    ended if it waits for it."""
    product = dense_product(200, 300, 100)
    launches = PERSISTENT.launches(PERSISTENT.configs[0], product, precision, None, GPU)
    names = [step.kernel.name for step in launches.steps]
    own = precision_for(precision, 100).name
    assert names == ["row_maxima"] * TENSOR_PRECISIONS[precision].scaled + [
        f"decompose_{decomposed_as(precision)}",
        f"persistent_{own}_128x128-c2p1",
    ]
    assert [step.overlaps for step in launches.steps] == [False] + [True] * (len(names) - 1)
    assert launches.steps[-1].grid == (2 * 3, 1, 1)


@pytest.mark.parametrize("name", TEACHING)
def test_steps_of_a_teaching_stage(name):
    stage = TENSOR_STAGES[name]
    config = stage.configs[0]
    for precision in stage.precisions:
        launches = stage.launches(config, dense_product(200, 300, 100), precision, None, GPU)
        assert [step.kernel.name for step in launches.steps] == [
            f"decompose_{decomposed_as(precision)}",
            f"{name}_{precision}_{config.name}",
        ]
        assert not any(step.overlaps for step in launches.steps)
        assert launches.steps[-1].grid == (-(-300 // config.BN), -(-200 // config.BM), 1)
        assert launches.steps[-1].kernel.variant == TensorVariant(TENSOR_PRECISIONS[precision]), (
            "short sums have no other record"
        )


# -------------------------------------------------------------------------------------------- launches, without a GPU


@pytest.fixture
def launched(monkeypatch):
    """Launches that are recorded with their calls, instead of compiled and enqueued."""
    return record_launches(monkeypatch)


VECTOR = Vector(4096, 8, 4, None)
BATCH = Batch((1, 1, 2), (0, 0, 4096), (0, 0, 4096), (0, 0, 4096))
TILES = tensor_heuristics.configs_for(PERSISTENT, "bf16x6", 12)
OPERANDS = {"a": (1 << 20, 8, 12, 48, 4), "b": (1 << 21, 12, 8, 32, 4), "c": (1 << 22, 8, 8, 32, 4)}
PLAIN = {"batch": ONE, "epilogue": None, "vectors": ()}


def enqueue(stage=PERSISTENT, config=TILES[0], device=0, **changes):
    options = {"precision": "bf16x6", "batch": BATCH, "epilogue": abs, "vectors": (VECTOR,)} | changes
    a, b, c = (Matrix(*options.pop(name, OPERANDS[name]), device, None) for name in "abc")
    launch(stage, config, 1.0, a, b, 0.0, c, **options)


def test_a_batch_is_launched_in_pieces(launched, monkeypatch):
    """One sequence of launches takes as many matrices as fit in the memory limit of the parts."""
    batch = Batch((1, 1, 7), (0, 0, 4096), (0, 0, 0), (0, 0, 512))
    product = dense_product(8, 8, 12, batch)
    each = decomposition_of(precision_for("bf16x6", 12), product, TILES[0])
    assert each.steps[0] > 0
    assert each.steps[1] == 0, "B's parts are there once"
    _, b_parts = each.arguments[1]
    assert each.bytes >= 7 * each.steps[0] + 4 * b_parts.rows * b_parts.cols

    def pieces():
        found = PERSISTENT.pieces(TILES[0], product, "bf16x6", GPU)
        return [piece.product.batch.matrices for piece in found]

    assert pieces() == [7]
    monkeypatch.setattr(tensor_stage, "MAX_PARTS_BYTES", 3 * each.steps[0])
    enqueue(**PLAIN | {"batch": batch})
    calls = [(one.launches.steps[-1].grid[1], arguments[1:5]) for one in launched for arguments in one.calls]
    a, b, c = 1 << 20, 1 << 21, 1 << 22
    expected = [(3, (a, b, 0.0, c)), (3, (a + 3 * 4096, b, 0.0, c + 3 * 512)), (1, (a + 6 * 4096, b, 0.0, c + 6 * 512))]
    assert calls == expected
    monkeypatch.setattr(tensor_stage, "MAX_PARTS_BYTES", 1)
    assert pieces() == [1] * 7
    monkeypatch.setattr(tensor_stage, "MAX_PARTS_BYTES", 1 << 60)
    monkeypatch.setattr(tensor_stage, "MAX_GRID_Y", 5)
    assert pieces() == [5, 2]


def test_a_teaching_stage_is_launched_in_pieces(launched, monkeypatch):
    """Its grid's y axis has one block per row of tiles."""
    stage = TENSOR_STAGES["one_warpgroup"]
    monkeypatch.setattr("numba_gemm.kernels.tensor_core.stage.MAX_GRID_Y", 2)
    (config,) = stage.configs
    a, b, c = (1 << 20, 300, 12, 48, 4), (1 << 21, 12, 8, 32, 4), (1 << 22, 300, 8, 32, 4)
    enqueue(stage, config, a=a, b=b, c=c, **PLAIN)
    calls = [(one.launches.steps[-1].grid[:2], arguments[1:5]) for one in launched for arguments in one.calls]
    rows = 2 * config.BM
    assert calls == [
        ((1, 2), (a[0], b[0], 0.0, c[0])),
        ((1, 2), (a[0] + 48 * rows, b[0], 0.0, c[0] + 32 * rows)),
        ((1, 1), (a[0] + 2 * 48 * rows, b[0], 0.0, c[0] + 2 * 32 * rows)),
    ]


def test_extents_of_a_precision(launched):
    enqueue(**PLAIN, a=(1 << 20, 0, 12, 48, 4), c=(1 << 22, 0, 8, 32, 4))
    enqueue(**PLAIN, b=(1 << 21, 12, 0, 32, 4), c=(1 << 22, 8, 0, 32, 4))
    assert not launched
    long = MAX_K + 1
    with pytest.raises(ValueError, match=f"K is {long}, beyond the {MAX_K} that this precision takes"):
        enqueue(**PLAIN, a=(1 << 20, 8, long, 0, 0), b=(1 << 21, long, 8, 0, 0))
    assert not launched


def test_longest_sum_of_a_precision(monkeypatch):
    monkeypatch.setattr("numba_gemm.gemm.precision.SIMULATOR", False)
    monkeypatch.setattr("numba_gemm.gemm.precision.tensor_stage", lambda cc: PERSISTENT)
    long = MAX_K + 1
    a, b = np.broadcast_to(np.float32(1), (2, long)), np.broadcast_to(np.float32(1), (long, 2))
    with pytest.raises(ValueError, match=rf"K is {long} and precision is 'bf16x6', which takes up to {MAX_K}"):
        checked(a, b, None, 1.0, 0.0, None, "auto", None, (), None, "bf16x6")
    assert checked(a, b, None, 1.0, 0.0, None, "auto", None, ()).k == long


@pytest.fixture
def able(monkeypatch):
    """Let the public functions take precisions in the simulator."""
    monkeypatch.setattr("numba_gemm.gemm.precision.SIMULATOR", False)


@simulated
@pytest.mark.usefixtures("able")
def test_workspace_of_a_precision_is_not_used_for_empty_sums(monkeypatch):
    """It is sized for the parts; the float32 kernel may need more."""
    given = []

    def record(product, choice, *operands):
        given.append((choice.precision, operands[-1]))
        return []

    monkeypatch.setattr(gemm_product, "launch_choice", record)
    a, workspace = np.ones((4, 5), np.float32), Workspace(1 << 24, 256, 0)
    options = {"stage": "auto", "cache": CallCache(), "tag": None, "workspace": workspace}
    for alpha, precision in ((0.0, "bf16x6"), (1.0, "bf16x6"), (0.0, IEEE), (1.0, IEEE)):
        gemm_product.checked_product(a, a.T, None, alpha, 0.0, None, **options, precision=precision)
    assert given == [(IEEE, None), ("bf16x6", workspace), (IEEE, workspace), (IEEE, workspace)]


@simulated
@pytest.mark.usefixtures("able")
def test_plan_calls_use_its_precision(launched):
    a = np.ones((40, 1100), np.float32)
    made = numba_gemm.plan(40, 40, 1100, precision="bf16x9")
    made(a, a.T)
    made(a, a.T)
    assert (made.stage, made.precision) == ("persistent", "bf16x9")
    assert [(one.kernel.variant.precision.name, len(one.calls)) for one in launched] == [("bf16x9", 2)]


@simulated
@pytest.mark.usefixtures("able")
@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        (stage.name, name)
        for stage in TENSOR_STAGES.values()
        if not isinstance(stage, TmaStage)
        for name in stage.precisions
    ],
)
def test_public_function_launches_every_stage_in_every_precision(launched, stage, precision):
    a, b = np.ones((2, 7, 5), np.float32), np.ones((2, 9, 5), np.float32).swapaxes(1, 2)
    numba_gemm.tiled_sgemm(a, b, stage=stage, precision=precision)
    each = 1 if TENSOR_STAGES[stage].batch_dimensions else 2  # of a batch of two
    assert sum(len(one.calls) for one in launched) == each
    kernel = launched[0].kernel
    assert kernel.build is TENSOR_STAGES[stage].build
    assert public_name(kernel.variant.precision.name) == precision


def epilogue_of(bias):
    return lambda value, row, col: value + bias


def untold(value, row, col):
    return value * UNTOLD[0]


UNTOLD = [1.0]


def test_cached_kernel_names_are_distinct():
    """Everything that affects the code is in the name; an epilogue without a fingerprint has no name."""
    stage, precision, config = PERSISTENT, TENSOR_PRECISIONS["bf16x6"], TILES[0]
    variants = [
        TensorVariant(precision),
        TensorVariant(precision, batched=True),
        TensorVariant(SHORT_SUMS["bf16x6"]),
        TensorVariant(TENSOR_PRECISIONS["bf16x9"]),
        TensorVariant(precision, epilogue_of(1.0)),
        TensorVariant(precision, epilogue_of(2.0)),
        TensorVariant(precision, epilogue_of(1.0), 1),
        TensorVariant(precision, epilogue_of(1.0), 2),
        TensorVariant(precision, epilogue_of(1.0), batched=True),
    ]
    kernels = [stage.kernel_of(config, variant) for variant in variants]
    kernels.append(stage.kernel_of(TILES[1], variants[0]))
    kernels.append(TENSOR_STAGES["wide_tiles"].kernel_of(config, variants[0]))
    for name, batched in itertools.product(("bf16x6", "fp16x3"), (False, True)):
        kernels += kernels_of(name, batched, GPU)[:-1]
        assert kernels_of(name, batched, GPU._replace(cc=(8, 0)))[:-1] == kernels_of(name, batched, GPU)[:-1]
    assert len(kernels) == len(variants) + 2 + 2 * (1 + 2)
    names = [kernel_key.key(kernel, (9, 0)) for kernel in kernels] + [kernel_key.key(kernels[0], (8, 0))]
    assert None not in names
    assert len(set(names)) == len(names)
    again = stage.kernel_of(config, TensorVariant(precision, epilogue_of(1.0)))
    assert kernel_key.key(again, (9, 0)) == names[4]
    assert kernel_key.key(stage.kernel_of(config, TensorVariant(precision, untold)), (9, 0)) is None


@simulated
def test_the_simulator_says_that_it_has_no_matrix_instructions():
    stage = TENSOR_STAGES["one_warpgroup"]
    with pytest.raises(NotImplementedError, match="no matrix instructions"):
        stage.build(stage.configs[0], TensorVariant(TENSOR_PRECISIONS["tf32"]))


# ------------------------------------------------------------------------------------------------------- compiled


def repeats(stage, index, how):
    """Return True for what is in the exhaustive set: further configurations, and precisions.

    Every run compiles one precision of a stage, three of `persistent`, and both ways of `tf32_tma`.
    """
    usual = {"persistent": ("bf16x6", "fp16x3", "tf32"), "tf32_tma": compiled_ways(stage, index)}
    return index > 0 or how not in usual.get(stage, COMPILED[-1:])


PARTS = ["others"] + [
    pytest.param(f"{stage}:{index}:{how}", marks=[pytest.mark.exhaustive] * repeats(stage, index, how))
    for stage, index in CONFIGS
    if stage != "rows_in_registers"  # see its own file
    for how in compiled_ways(stage, index)
]


@pytest.mark.parametrize(
    ("part", "in_pairs"),
    [("persistent:3:bf16", 32), ("tf32_tma:4:along", 32), ("tf32_tma:4:across", 64)],  # the last one by columns, too
)
def test_elements_of_c_are_rounded_alike_in_pairs_and_alone(part, in_pairs):
    """Each is multiplied with beta first, so bits do not depend on the alignment of C."""
    assert offline(first_uses_of_c, part) == {"": ["mul.f32"] * 32, ".v2": ["mul.f32"] * in_pairs}


@pytest.mark.parametrize("part", PARTS)
def test_compiled_kernels_are_what_they_claim(part):
    rows = offline(compiled_rows, part)
    assert len(rows) == (12 if part == "others" else 1)
    for row in rows:
        name, opcodes = f"{row['name']}, {row.get('precision', row.get('way'))}", row["opcodes"]
        assert row["local"] == 0, name
        assert row["spills"] == 0, name
        assert "Compiling entry" in row["log"], f"{name}: ptxas says nothing"
        assert row["taken"] == row.get("passed", row["taken"]), f"{name}: a launch passes other parameters"
        assert "C75" not in row["log"], f"{name}: ptxas puts products one after the other: {row['log']}"
        if row["stage"] in ("batched", "epilogue"):
            continue
        if row["stage"] == "warp_mma":
            precision, turns = (
                ALL_PRECISIONS[row["precision"]],
                opcodes["LDSM"] // (4 * ALL_PRECISIONS[row["precision"]].parts),
            )
            assert turns > 0, name
            assert opcodes["LDSM"] == turns * 4 * precision.parts, name
            assert opcodes["HMMA"] == turns * 8 * len(precision.products), name
            assert opcodes["LDGSTS"] > 0, name
            continue
        if row["stage"] in ("decompose", "row maxima", "add partials"):
            assert "HGMMA" not in opcodes, name
            continue
        if row["stage"] in ("persistent", "tf32_tma"):
            assert not {"MEMBAR", "ERRBAR"} & set(opcodes), f"{name}: arrivals in the other block wait for memory"
        if row["stage"] == "tf32_tma":  # two slots a turn
            across, alone = row["way"].startswith("across"), not row["way"].endswith("pairs")
            of_u = int(row["BM"]) // 32 if across else 1
            assert opcodes["HGMMA"] == 2 * 4, name
            assert opcodes["LDS"] == 2 * (8 if across else 16), name
            # A block alone has one loop for a V that a map describes, and one for a V that is decomposed.
            assert opcodes["UTMALDG"] == of_u + 1 + (of_u if alone else 0), name
            assert opcodes.get("UBLKCP", 0) == int(alone), name
            assert opcodes.get("USETMAXREG", 0) == (2 if row["claim"] else 0), name
            continue
        precision = ALL_PRECISIONS[row["precision"]]
        # All steps of a slot are written out, and in compensated sums three slots: an odd one, and two of a turn.
        copies = 3 if row["stage"] == "persistent" and precision.compensated and not precision.stepwise else 1
        assert opcodes["HGMMA"] == copies * 4 * len(precision.products), name
        bulk = row["stage"] != "one_warpgroup"
        assert opcodes.get("UBLKCP", 0) == (2 * precision.parts if bulk else 0), name
        assert opcodes.get("SYNCS", 0) >= (3 if bulk else 0), name
        assert opcodes.get("STS", 0) in ((0,) if bulk else (12, 12 * precision.parts)), (
            name
        )  # each part's, or in a loop
        assert opcodes.get("USETMAXREG", 0) == (2 if row["claim"] else 0), name
        if row["stage"] == "persistent":
            # Words are moved to registers of the warp for the first descriptors; the others are computed there.
            assert opcodes["R2UR"] <= opcodes["HGMMA"] + 24, name
            alternate = row["consumers"] == 2 and precision.parts > 1
            turns = 4 if precision.stepwise else copies  # two barriers each, for either warpgroup
            assert opcodes["BAR"] == 1 + (2 + 4 * turns if alternate else 0), (name, opcodes["BAR"])


# ------------------------------------------------------------------------------------------------------- on a GPU

FULL_RANGE = ("tf32x3", "bf16x3", "bf16x6", "bf16x9")
STAGES_OF_A_PRECISION = ("auto", "persistent")  # the first may compute in a more accurate one
SHAPES = [(1, 1, 1), (64, 128, 32), (100, 70, 90), (129, 257, 65), (300, 200, 1030)]


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("stage", "index", "precision"),
    [
        (stage, index, precision)
        for stage, index in CONFIGS
        if stage != "tf32_tma"  # see test_tf32_tma.py
        for precision in dict.fromkeys(map(public_name, precisions_of(stage, index)))
    ],
)
def test_product(stage, index, precision, shape):
    """Every configuration, on dense operands stored by rows and by columns, with a C inside a larger array."""
    from numba import cuda

    m, n, k = shape
    generator = np.random.default_rng(m)
    for by_columns in (False, True):
        a, b = (generator.standard_normal(extents).astype(np.float32) for extents in ((m, k), (k, n)))
        if by_columns:
            a, b = np.asfortranarray(a), np.asfortranarray(b)
        guarded = np.full((m + 2, n + 2), np.nan, np.float32)
        whole = cuda.to_device(guarded)
        c = whole[1 : m + 1, 1 : n + 1]
        multiply(TENSOR_STAGES[stage], TENSOR_STAGES[stage].configs[index], *map(cuda.to_device, (a, b)), c, precision)
        found = whole.copy_to_host()
        exact, size = a.astype(np.float64) @ b, np.abs(a.astype(np.float64)) @ np.abs(b)
        error = np.abs(found[1 : m + 1, 1 : n + 1] - exact) / (bound(stage, precision, k) * size)
        row, col = np.unravel_index(np.argmax(error), error.shape)
        assert error.max() <= 1, f"C[{row}, {col}] has an error of {error[row, col]:.3g} bounds"
        found[1 : m + 1, 1 : n + 1] = np.nan
        assert np.isnan(found).all(), "nothing beside C is written"


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("k", [75, 1031])
@pytest.mark.parametrize(
    ("stage", "precision"), [(stage.name, name) for stage in TENSOR_STAGES.values() for name in stage.precisions]
)
def test_every_stage_in_every_precision_through_the_public_function(stage, precision, k):
    """Odd extents, B transposed, alpha and beta, a batch of two; rows at multiples of 16 bytes, for tensor maps."""
    import torch

    torch.manual_seed(k)
    m, n, alpha, beta = 133, 197, 1.5, -0.5
    a = torch.randn(2, m, k + -k % 4, device="cuda")[:, :, :k]
    b = torch.randn(2, n, k + -k % 4, device="cuda")[:, :, :k].transpose(1, 2)
    before = torch.randn(2, m, n, device="cuda")
    exact = alpha * (a.double() @ b.double()) + beta * before.double()
    size = abs(alpha) * (a.double().abs() @ b.double().abs()) + abs(beta) * before.double().abs()
    allowed = (bound(stage, precision, k) + 2.0**-22) * size  # alpha and beta round, too
    guarded = torch.full((2, m + 2, n + 3), float("nan"), device="cuda")
    c = guarded[:, 1:-1, 1:-2]
    results = []
    for _ in range(2):  # the second call is a cached one
        c.copy_(before)
        returned = numba_gemm.tiled_sgemm(a, b, c, alpha=alpha, beta=beta, stage=stage, precision=precision)
        assert returned is c
        results.append(c.clone())
    assert torch.equal(*results)
    error = ((results[0].double() - exact).abs() / allowed).cpu().numpy()
    place = np.unravel_index(np.argmax(error), error.shape)
    assert error.max() <= 1, f"C{[*map(int, place)]} has an error of {error[place]:.3g} bounds"
    c.fill_(float("nan"))
    assert torch.isnan(guarded).all(), "nothing beside C is written"


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("stage", STAGES_OF_A_PRECISION)
@pytest.mark.parametrize("precision", TENSOR_PRECISIONS)
@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00000, 0xFF801000])
def test_a_nan_stays_one(precision, stage, bits):
    import torch

    from numba_gemm import tiled_sgemm

    a, b = torch.ones(3, 5, device="cuda"), torch.ones(5, 4, device="cuda")
    a[1, 2] = torch.tensor(np.uint32(bits).view(np.int32)).view(torch.float32).to("cuda")
    c = tiled_sgemm(a, b, precision=precision, stage=stage)
    assert (torch.isnan(c).cpu().numpy() == [[False], [True], [False]]).all()


def on_gpu(*matrices):
    import torch

    return [torch.from_numpy(np.ascontiguousarray(matrix)).cuda() for matrix in matrices]


def quotients(found, a, b):
    """Errors over ``|A| @ |B|``; where that is 0, so must be the error."""
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    exact, size = wide_a @ wide_b, np.abs(wide_a) @ np.abs(wide_b)
    error = np.abs(found.astype(np.float64) - exact)
    assert (error[size == 0] == 0).all()
    return error / np.where(size == 0, 1, size)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("extent", [256, 1024])
@pytest.mark.parametrize("k", [256, 384, 512, 1000, 1024, 4096])
@pytest.mark.parametrize("distribution", accuracy.DISTRIBUTIONS)
@pytest.mark.parametrize("precision", ["bf16x6", "bf16x9"])
def test_no_less_accurate_than_cublas(precision, distribution, k, extent):
    """Median and maximum of the error over ``|A| @ |B|``, against cuBLAS's float32 on the same operands."""
    import torch

    from numba_gemm import tiled_sgemm

    torch.backends.cuda.matmul.allow_tf32 = False
    a, b = accuracy.operands(distribution, extent, extent, k, seed=k)
    x, y = on_gpu(a, b)
    theirs = quotients(torch.matmul(x, y).cpu().numpy(), a, b)
    ours = quotients(tiled_sgemm(x, y, precision=precision).cpu().numpy(), a, b)
    assert np.median(ours) <= np.median(theirs)
    assert ours.max() <= theirs.max()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("k", [1, 2, 3, 17, 64, 100, 255, 65536])
@pytest.mark.parametrize("distribution", accuracy.DISTRIBUTIONS)
@pytest.mark.parametrize("precision", FULL_RANGE)
def test_the_stated_bound_holds(precision, distribution, k):
    from numba_gemm import tiled_sgemm

    a, b = accuracy.operands(distribution, 128, 96, k, seed=k)
    for stage in STAGES_OF_A_PRECISION:
        found = tiled_sgemm(*on_gpu(a, b), precision=precision, stage=stage).cpu().numpy()
        assert quotients(found, a, b).max() <= tensor_bound(precision, k)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("distribution", accuracy.DISTRIBUTIONS)
def test_fp16x3_holds_its_bound_of_rows_and_columns(distribution):
    from numba_gemm import tiled_sgemm

    a, b = accuracy.operands(distribution, 128, 96, 1000, seed=1)
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    size = np.abs(wide_a).max(axis=1)[:, None] * np.abs(wide_b).max(axis=0)[None, :] * 1000
    for stage in STAGES_OF_A_PRECISION:
        found = tiled_sgemm(*on_gpu(a, b), precision="fp16x3", stage=stage).cpu().numpy().astype(np.float64)
        assert (np.abs(found - wide_a @ wide_b) <= TENSOR_BOUNDS["fp16x3"] * size).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("k", [1, 2, 3, 17, 64, 100, 255, 4096, 65536])
@pytest.mark.parametrize("signs", [(1.0,), (-1.0, 1.0)])
def test_fp16x3_holds_its_bound_of_elements_whose_magnitudes_differ_by_less_than_28_powers_of_two(signs, k):
    from numba_gemm import tiled_sgemm

    generator = np.random.default_rng(k)
    a, b = (
        (2.0 ** generator.uniform(-14, 13.9, shape) * generator.choice(signs, shape)).astype(np.float32)
        for shape in ((128, k), (k, 96))
    )
    for stage in STAGES_OF_A_PRECISION:
        found = tiled_sgemm(*on_gpu(a, b), precision="fp16x3", stage=stage).cpu().numpy()
        assert quotients(found, a, b).max() <= tensor_bound("fp16x3", k)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("stage", STAGES_OF_A_PRECISION)
@pytest.mark.parametrize("precision", FULL_RANGE)
def test_what_is_not_finite_comes_out_as_in_numpy(precision, stage, beta):
    from numba_gemm import tiled_sgemm

    generator = np.random.default_rng(2)
    a, b = (generator.standard_normal(extents).astype(np.float32) for extents in ((200, 300), (300, 150)))
    largest = np.finfo(np.float32).max
    a[3, 7], a[50, 1], b[9, 20], a[120, 3] = np.inf, np.nan, -np.inf, -np.inf
    b[3, :70] = 0  # an infinity times zero
    a[:, 5], b[5] = 0, 0
    a[100, 5], b[5, 1] = largest, 0.75  # rounds to infinity in the narrow kinds
    a[:, 6], b[6] = 0, 0
    a[101, 6], b[6, 2] = 0.5, -largest
    a[160, 0], b[0, 100] = 1e30, 1e30  # a product beyond the range
    c = generator.standard_normal((200, 150)).astype(np.float32)
    (out,) = on_gpu(c)
    found = tiled_sgemm(*on_gpu(a, b), out, beta=beta, precision=precision, stage=stage).cpu().numpy()
    with np.errstate(all="ignore"):
        expected = a @ b + np.float32(beta) * c
        size = np.abs(a.astype(np.float64)) @ np.abs(b) + np.abs(c)
    special = ~np.isfinite(expected)
    assert special.any()
    np.testing.assert_array_equal(found[special], expected[special])
    allowed = 2.0**-18 + TENSOR_BOUNDS[precision]
    assert (np.abs(found[~special] - expected[~special]) <= allowed * size[~special]).all()


def lost_to_underflow(precision, rows):
    """Return the most that parts lose of each element: half of the smallest magnitude of the narrow kind."""
    size = np.abs(rows.astype(np.float64))
    if precision == "fp16x3":
        largest = size.max(axis=1, keepdims=True)
        scale = np.clip(14 - np.floor(np.log2(largest)), -120, 120)
        return np.where(size * 2.0**scale > 2.0**-14, 0, 2.0 ** (-37 - scale))
    end, from_ = (2.0**-137, 2.0**-114) if precision.startswith("tf32") else (2.0**-134, 2.0**-109)
    return np.where(size < from_, end, 0)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("a_size", "b_size"),
    [(-130, 100), (-149, 100), (-112, 20), (-66, -70), (-70, -75), (0, -126), (0, -135), (0, -145), (-20, -110)],
)
@pytest.mark.parametrize("k", [1, 64, 512])
@pytest.mark.parametrize("precision", TENSOR_PRECISIONS)
def test_subnormal_operands_and_sums(precision, k, a_size, b_size):
    from numba_gemm import explain, tiled_sgemm

    generator = np.random.default_rng(k)
    a, b = (
        (generator.uniform(1, 2, shape) * generator.choice([-1, 1], shape) * 2.0**size).astype(np.float32)
        for shape, size in (((70, k), a_size), ((k, 50), b_size))
    )
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    size = np.abs(wide_a) @ np.abs(wide_b)
    x, y = on_gpu(a, b)
    for stage in STAGES_OF_A_PRECISION:
        computed = explain(x, y, precision=precision, stage=stage).precision
        lost, products, limit = 0.0, 1, ieee_bound(k)
        if computed != "ieee":
            lost = lost_to_underflow(computed, a) @ np.abs(wide_b) + np.abs(wide_a) @ lost_to_underflow(computed, b.T).T
            products, limit = len(TENSOR_PRECISIONS[computed].products), tensor_bound(computed, k)
        cut_off = 2.0**-149 * (k + products)  # of sums near there
        found = tiled_sgemm(x, y, precision=precision, stage=stage).cpu().numpy()
        assert (np.abs(found - wide_a @ wide_b) <= limit * size + lost + cut_off).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("stage", STAGES_OF_A_PRECISION)
@pytest.mark.parametrize("precision", FULL_RANGE)
def test_small_integers_and_permutations_are_exact(precision, stage):
    from numba_gemm import tiled_sgemm

    how = {"precision": precision, "stage": stage}
    generator = np.random.default_rng(4)
    a, b = generator.integers(-200, 200, (300, 400)), generator.integers(-1000, 1000, (400, 250))
    found = tiled_sgemm(*on_gpu(a.astype(np.float32), b.astype(np.float32)), **how).cpu().numpy()
    np.testing.assert_array_equal(found, a @ b)
    if precision not in ("tf32x3", "bf16x3"):  # whose two parts have fewer bits than a float
        rows = generator.permutation(500)
        x = generator.standard_normal((500, 130)).astype(np.float32)
        permuted = tiled_sgemm(*on_gpu(np.eye(500, dtype=np.float32)[rows], x), **how).cpu().numpy()
        np.testing.assert_array_equal(permuted, x[rows])


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("stage", STAGES_OF_A_PRECISION)
@pytest.mark.parametrize("precision", TENSOR_PRECISIONS)
def test_operands_may_change_between_calls(precision, stage):
    import torch

    from numba_gemm import tiled_sgemm

    a, b = torch.randn(300, 200, device="cuda"), torch.randn(200, 400, device="cuda")
    how = {"precision": precision, "stage": stage}
    first = tiled_sgemm(a, b, **how)
    a.neg_()
    assert torch.equal(tiled_sgemm(a, b, **how), -first)
    b.mul_(2)
    assert torch.equal(tiled_sgemm(a, b, **how), -2 * first)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("precision", "stage"), [("tf32", "auto"), ("bf16x6", "auto"), ("bf16x6", "persistent"), ("fp16x3", "persistent")]
)
def test_products_follow_each_other_on_a_stream_and_in_a_graph(precision, stage):
    """One workspace, many products in a row of other extents: each must wait for the one before."""
    import torch

    from numba_gemm import tiled_sgemm

    extents = [(64, 64, 2000), (1000, 900, 70), (300, 2000, 500), (2048, 2048, 64), (17, 33, 65)]
    operands = [(torch.randn(m, k, device="cuda"), torch.randn(k, n, device="cuda")) for m, n, k in extents]
    outs = [torch.empty(m, n, device="cuda") for m, n, _ in extents]
    expected = [tiled_sgemm(a, b, precision=precision, stage=stage).clone() for a, b in operands]
    torch.cuda.synchronize()

    def all_of_them():
        for (a, b), out in zip(operands, outs, strict=True):
            tiled_sgemm(a, b, out, precision=precision, stage=stage)

    for _ in range(5):
        for out in outs:
            out.fill_(float("nan"))
        all_of_them()
        assert all(torch.equal(out, right) for out, right in zip(outs, expected, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_of_them()
    for _ in range(5):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, right) for out, right in zip(outs, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("stage", STAGES_OF_A_PRECISION)
@pytest.mark.parametrize("precision", TENSOR_PRECISIONS)
def test_batches_epilogues_and_strides(precision, stage):
    import torch

    from numba_gemm import tiled_sgemm

    how = {"precision": precision, "stage": stage}

    def bias_relu(value, row, column, bias):
        return max(value + bias[column], 0.0)

    a, b = torch.randn(3, 70, 80, device="cuda"), torch.randn(80, 90, device="cuda")
    bias = torch.randn(90, device="cuda")
    expected = torch.relu(a.double() @ b.double() + bias)
    size = a.double().abs() @ b.double().abs() + bias.abs()
    found = tiled_sgemm(a, b, **how, epilogue=bias_relu, epilogue_args=(bias,))
    assert ((found - expected).abs() <= (TENSOR_BOUNDS[precision] + 2.0**-22) * size).all()
    turned = tiled_sgemm(a.flip(0)[0][:, ::2].contiguous().flip(1), b[::2].flip(0), **how)
    exact = a[2][:, ::2].double().flip(1) @ b[::2].double().flip(0)
    assert (
        (turned - exact).abs() <= TENSOR_BOUNDS[precision] * (a[2][:, ::2].double().abs() @ b[::2].double().abs())
    ).all()
    out = torch.full((90, 70), float("nan"), device="cuda")
    tiled_sgemm(a[0], b, out.T, **how)
    assert (
        (out.T - a[0].double() @ b.double()).abs()
        <= TENSOR_BOUNDS[precision] * (a[0].double().abs() @ b.double().abs())
    ).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("k", [64, 70])
@pytest.mark.parametrize(
    ("a_batch", "b_batch"), [((7,), (7,)), ((7,), ()), ((), (7,)), ((2, 1), (1, 3)), ((2, 3), (2, 3)), ((200,), (200,))]
)
@pytest.mark.parametrize("precision", TENSOR_PRECISIONS)
def test_a_batch_has_the_bits_of_its_matrices(precision, a_batch, b_batch, k, monkeypatch):
    """In two launches, or three, for each dimension that is not the last; some at a time if parts would be large."""
    import torch

    from numba_gemm import tiled_sgemm
    from numba_gemm.runtime import device, frame

    a, b = torch.randn(*a_batch, 40, k, device="cuda"), torch.randn(*b_batch, k, 36, device="cuda")
    x, y = torch.broadcast_tensors(a[..., 0, 0], b[..., 0, 0])[0].shape, TENSOR_PRECISIONS[precision]
    wide_a, wide_b = a.expand(*x, 40, k), b.expand(*x, k, 36)
    expected = torch.empty(*x, 40, 36, device="cuda")
    # Short sums of a batch and of a matrix may be computed by different stages.
    by_maps = precision == "tf32" and k == 64
    options = {"precision": precision, "stage": "tf32_tma" if by_maps else "persistent"}
    for place in np.ndindex(*x):
        tiled_sgemm(wide_a[place], wide_b[place], expected[place], **options)
    launches, functions = [], frame.raw

    def counting(*arguments):
        launches.append(arguments)
        return functions("cuLaunchKernelEx")(*arguments)

    monkeypatch.setattr(frame, "raw", lambda name: counting if name == "cuLaunchKernelEx" else functions(name))
    # Bound products of earlier calls have frames that do not count.
    monkeypatch.setattr(device.get_device(device.current_device()), "_bound", {})
    gemm_product.forget()
    assert torch.equal(tiled_sgemm(a, b, epilogue=same, **options), expected)
    outer = 2 if len(x) == 2 and a_batch == (2, 1) else 1
    each = 3 if y.scaled else 2
    assert len(launches) == outer * (1 if by_maps else each)
    launches.clear()
    monkeypatch.setattr(tensor_stage, "MAX_PARTS_BYTES", 40 * k * y.parts * 4 * 3)
    gemm_product.forget()  # a cached call keeps its launches
    assert torch.equal(tiled_sgemm(a, b, epilogue=same, **options), expected)
    assert max(x) <= 3 or by_maps or len(launches) > outer * each


def same(value, row, column):
    """An epilogue, so that matrices are not taken together as one."""
    return value


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("extents", "precision"), [((1024, 1024, 1024), "bf16x6"), ((100, 90, 80), "ieee")])
def test_fp32_auto_has_the_bits_of_what_it_stands_for(extents, precision):
    import torch

    from numba_gemm import tiled_sgemm

    m, n, k = extents
    a, b = torch.randn(m, k, device="cuda"), torch.randn(k, n, device="cuda")
    assert torch.equal(tiled_sgemm(a, b, precision="fp32_auto"), tiled_sgemm(a, b, precision=precision))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_a_plan_of_a_precision():
    import torch

    how = {"precision": "bf16x6", "stage": "persistent"}
    plan = numba_gemm.plan(200, 300, 400, **how)
    assert plan.precision == "bf16x6"
    assert plan.workspace_bytes > 3 * 2 * (200 + 300) * 400
    a, b = torch.randn(200, 400, device="cuda"), torch.randn(400, 300, device="cuda")
    expected = numba_gemm.tiled_sgemm(a, b, **how)
    assert torch.equal(plan(a, b), expected)
    memory = torch.empty(plan.workspace_bytes // 4, device="cuda")
    own = numba_gemm.plan(200, 300, 400, **how, workspace=memory)
    assert torch.equal(own(a, b), expected)
    c = torch.ones(200, 300, device="cuda")
    own(a, b, c, alpha=0.0, beta=3.0)
    assert (c == 3).all()
    with pytest.raises(ValueError, match="workspace"):
        numba_gemm.plan(200, 300, 400, **how, workspace=memory[:1000])
