"""The tensor cores' products: splitting on the simulator, the kernels as compiled, and products on a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import SUPPORT
from support.compile_stages import compiler_environment

import numba_gemm
from numba_gemm.gemm import product as gemm_product
from numba_gemm.gemm import split_products
from numba_gemm.gemm.request import checked
from numba_gemm.kernels.ladder.stage import Batch
from numba_gemm.kernels.tensor_core import MODES, TENSOR_STAGES, TensorForm, WarpgroupConfig, accumulate, split
from numba_gemm.kernels.tensor_core.mode import Mode
from numba_gemm.kernels.tensor_core.stage import LEFT, REGISTERS, ROW_WORDS, SHARED_BYTES, WARPGROUP, split_shape
from numba_gemm.lab.bench import accuracy
from numba_gemm.models.accuracy import MODE_BOUNDS, mode_bound
from numba_gemm.runtime.launch import PLAIN, Extra, Matrix, Vector
from numba_gemm.runtime.workspace import Loan, Workspace
from numba_gemm.simulator.switch import SIMULATOR

FLOATS = st.floats(width=32, allow_nan=False)
# 2^-11 and 2^-8 of the element are left after one part; each further part leaves as much of the rest.
UNITS = {"tf32": 2.0**-11, "bf16": 2.0**-8, "f16": 2.0**-11}
PAIRS = [(stage, index) for stage in TENSOR_STAGES for index in range(len(TENSOR_STAGES[stage].configs))]


simulated = pytest.mark.skipif(not SIMULATOR, reason="runs on the simulator")


# ------------------------------------------------------------------------------------------------------- rounding


def narrow_of(kind):
    from numba_gemm.device import narrow

    return {"tf32": narrow.tf32, "bf16": narrow.bf16, "short": narrow.short_bf16, "f16": narrow.f16}[kind]


@simulated
@pytest.mark.parametrize(("kind", "bits"), [("tf32", 13), ("bf16", 16), ("short", 17)])
@settings(deadline=None)
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


# ------------------------------------------------------------------------------------------------------ splitting


def unsplit(mode: Mode, parts: np.ndarray, mn: int, k: int) -> np.ndarray:
    """The parts as float64, (parts, mn, k), from where `stage` says that they lie."""
    slots = parts.shape[0] // mode.parts
    chunks = parts[: mode.parts * slots].view(np.uint32).reshape(mode.parts, slots, -1, 8, 4)
    rows = np.arange(chunks.shape[2])
    order = np.arange(8)[None, :] ^ (rows % 8)[:, None]
    straight = np.take_along_axis(chunks, order[None, None, :, :, None], axis=3).reshape(
        mode.parts, slots, -1, ROW_WORDS
    )
    if mode.kind == "tf32":
        values = straight.view(np.float32)
    elif mode.kind == "f16":
        values = straight.view(np.float16)
    else:
        halves = np.stack([straight << 16, straight & np.uint32(0xFFFF0000)], axis=-1)
        values = np.ascontiguousarray(halves).view(np.float32).reshape(*straight.shape[:3], -1)
    whole = values.transpose(0, 2, 1, 3).reshape(mode.parts, chunks.shape[2], -1).astype(np.float64)
    beyond = whole.copy()
    beyond[:, :mn, :k] = 0
    assert not beyond.any(), "beyond the operand's edges the parts are zero"
    if mode.scaled:
        whole[:, :mn] *= 2.0 ** -parts[-1, :mn].astype(np.float64)[None, :, None]
    return whole[:, :mn, :k]


def aligned_empty(rows: int, cols: int) -> np.ndarray:
    """NaNs at a multiple of 16 bytes."""
    flat = np.full(rows * cols + 4, np.nan, np.float32)
    return flat[-flat.ctypes.data % 16 // 4 :][: rows * cols].reshape(rows, cols)


def simulated_split(mode: Mode, x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """Parts of both, as (mn, k), for tiles of 32 rows."""
    from numba_gemm.simulator import scheduler

    k = x.shape[1]
    parts = [aligned_empty(*split_shape(mode, mn, k, 32)) for mn in (x.shape[0], y.shape[0])]
    blocks = sum(part.shape[0] // mode.parts * (part.shape[1] // (32 * ROW_WORDS)) for part in parts)
    operands = (x, parts[0], y, parts[1])
    if mode.scaled:
        spans = max(1, -(-k // split.SPAN))
        large = [aligned_empty(spans, part.shape[1] // ROW_WORDS) for part in parts]
        each = sum(one.shape[0] * (one.shape[1] // 32) for one in large)
        scheduler.run(split.build_extremes(), (each, 1), split.THREADS, (x, large[0], y, large[1], (0,) * 4))
        operands = (x, parts[0], large[0], y, parts[1], large[1])
    scheduler.run(split.build(mode), (blocks, 1), split.THREADS, (*operands, (0,) * len(operands)))
    return parts


LAYOUTS = {
    "rows": lambda x: x,
    "columns": np.asfortranarray,
    "reversed": lambda x: x[::-1, ::-1],
    "aligned": lambda x: np.ascontiguousarray(np.pad(x, ((0, 0), (0, -x.shape[1] % 4))))[:, : x.shape[1]],
}


@simulated
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES.values(), ids=lambda mode: mode.name)
def test_parts_sum_up_to_the_operands(mode, layout):
    generator = np.random.default_rng(5)
    k = mode.slot_k + 7
    operands = []
    for mn in (37, 5):
        x = generator.standard_normal((mn, k)).astype(np.float32)
        # Of F16 the second parts lose bits in elements that are much smaller than the largest of their row.
        spread = 30 if mode.kind != "f16" else 5
        x *= np.float32(2.0) ** generator.integers(-spread, spread, (mn, k)).astype(np.float32)
        if mode.scaled:
            x *= np.float32(2.0) ** generator.integers(-30, 30, (mn, 1)).astype(np.float32)
        operands.append(LAYOUTS[layout](x).astype(np.float32, copy=False))
    for x, parts in zip(operands, simulated_split(mode, *operands), strict=True):
        found = unsplit(mode, parts, *x.shape)
        rest = np.abs(x.astype(np.float64) - found.sum(axis=0))
        unit = UNITS[mode.kind]
        # F16 ends at 2^-24: half of that is what scaled elements may lose.
        least = 2.0 ** (-25 - parts[-1, : len(x), None].astype(np.float64)) if mode.scaled else 0.0
        assert (rest <= unit**mode.parts * (2 if mode.short else 1) * np.abs(x) + least).all()
        for p, (part, next_part) in enumerate(pairwise(found)):
            assert (np.abs(next_part) <= unit * (2 if mode.short and p == 0 else 1) * np.abs(part) + least).all()


@simulated
@pytest.mark.parametrize("mode", ["bf16x6", "fp16x3"])
def test_a_batch_is_split_matrix_by_matrix_and_what_it_shares_once(mode):
    from numba_gemm.simulator import scheduler

    generator, mode = np.random.default_rng(3), MODES[mode]
    # Of y there are three, too, which differ: if all share the first one's parts, others must not be split into them.
    x, ys = (generator.standard_normal(extents).astype(np.float32) for extents in ((3, 5, 70), (3, 6, 70)))
    y, y_step = ys[0], ys.strides[0]
    expected = [simulated_split(mode, one, y) for one in x]
    (x_rows, x_words), (y_rows, y_words) = (part.shape for part in expected[0])
    x_parts, y_parts = aligned_empty(3 * x_rows, x_words), aligned_empty(y_rows, y_words)
    x_step, own, first = x.strides[0], 4 * x_rows * x_words, (slice(x_rows), slice(None))
    blocks = (x_rows // mode.parts * (x_words // (32 * ROW_WORDS))) + (
        y_rows // mode.parts * (y_words // (32 * ROW_WORDS))
    )
    operands = [x[0], x_parts[first], y, y_parts, (x_step, own, y_step, 0)]
    if mode.scaled:
        x_large, y_large = aligned_empty(3, 32), aligned_empty(1, 32)
        large = (x[0], x_large[:1], y, y_large, (x_step, 4 * 32, y_step, 0))
        scheduler.run(split.build_extremes(batched=True), (2, 3), split.THREADS, large)
        operands = [x[0], x_parts[first], x_large[:1], y, y_parts, y_large, (x_step, own, 4 * 32, y_step, 0, 0)]
    scheduler.run(split.build(mode, batched=True), (blocks, 3), split.THREADS, tuple(operands))
    for i, (of_x, of_y) in enumerate(expected):
        rows = mode.parts * (x_rows // mode.parts)
        found = x_parts[i * x_rows : (i + 1) * x_rows]
        np.testing.assert_array_equal(found[:rows].view(np.uint32), of_x[:rows].view(np.uint32))
        np.testing.assert_array_equal(found[rows:, :5], of_x[rows:, :5])
        np.testing.assert_array_equal(y_parts[:rows].view(np.uint32), of_y[:rows].view(np.uint32))


@simulated
@pytest.mark.parametrize("turned", [False, True])
def test_scales_bring_the_largest_of_a_row_to_one_size(turned):
    mode, k = MODES["fp16x3"], split.SPAN + 9
    generator = np.random.default_rng(7)
    x = generator.uniform(-1, 1, (6, k)).astype(np.float32)
    x *= np.float32([[2.0**-140], [2.0**-60], [1.0], [2.0**60], [2.0**127], [0.0]])
    x[2, 3], x[3, k - 1] = np.inf, np.nan
    x = np.asfortranarray(x) if turned else x
    parts, _ = simulated_split(mode, x, x[:1])
    scales = parts[-1, :6]
    sizes = np.abs(np.where(np.isfinite(x), x, 0)).max(axis=1)
    assert (np.abs(scales) <= split.FARTHEST).all()
    for row in (1, 3, 4):
        assert 2.0**14 <= float(sizes[row]) * 2.0 ** float(scales[row]) < 2.0**15


# ------------------------------------------------------------------------------------------------------------- sums


@simulated
@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40))
def test_nothing_is_lost_between_a_total_and_its_rests(values):
    """Sums of integers in float32: what the total rounds off goes to the rests, so both together stay exact."""
    _, add, add_exactly, _ = accumulate.steps(8)
    total, rests = np.zeros((1, 4), np.float32), np.zeros((1, 4), np.float32)
    exact = 0.0
    for value in sorted(np.round(values), key=abs):
        term = np.full((1, 4), value, np.float32)
        exact += float(term[0, 0])
        add_exactly(total, term)
        add(rests, term)
    assert float(total[0, 0]) + float(rests[0, 0]) == pytest.approx(exact, abs=2.0**-20)


@simulated
@settings(deadline=None)
@given(st.integers(-(2**23), 2**23), st.integers(-(2**16), 2**16))
def test_a_sum_that_is_a_float_stays_as_it_is(total, rest):
    _, _, _, finish = accumulate.steps(8)
    sum_of_both = np.full((1, 4), total, np.float32)
    finish(sum_of_both, np.full((1, 4), rest, np.float32))
    assert (sum_of_both == np.float32(total + rest)).all()


@simulated
def test_what_is_cut_off_is_given_back_on_average():
    _, _, _, finish = accumulate.steps(8)
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


class Warp:
    """A warp's sums of a C of (m, n), 16 * deep rows and 8 * across columns, and what it writes."""

    def __init__(self, mode, m, n, k, *, deep=2, across=4):
        generator = np.random.default_rng([m, n, k])
        self.mode, self.m, self.n, self.deep, self.across = MODES[mode], m, n, deep, across
        self.x = generator.standard_normal((m, k)).astype(np.float32)
        self.y = generator.standard_normal((k, n)).astype(np.float32)
        self.old = generator.standard_normal((m, n)).astype(np.float32)
        self.sums = generator.standard_normal((16 * deep, 8 * across)).astype(np.float32)
        self.scales = generator.integers(-40, 40, (2, 64)).astype(np.float32)

    def store(self, layout, alpha, beta, epilogue=None, vectors=()):
        """C after all lanes have stored; it lies among NaNs, which stay."""
        from numba import cuda, float32, int64

        from numba_gemm.kernels.tensor_core.epilogue import sums_store
        from numba_gemm.simulator import scheduler

        write = sums_store(TensorForm(self.mode, epilogue, len(vectors)), self.across, self.deep)
        across, shape = self.across, (self.deep * self.across, 4)

        @cuda.jit
        def kernel(alpha, sums, beta, c, a, b, x, y, vectors):
            lane = cuda.threadIdx.x
            total = cuda.local.array(shape, float32)
            for j in range(shape[0]):
                for q in range(4):
                    row, col = j // across * 16 + q // 2 * 8 + lane // 4, j % across * 8 + lane % 4 * 2 + q % 2
                    total[j, q] = sums[row, col]
            write(c, int64(lane // 4), int64(lane % 4 * 2), alpha, total, beta, a, b, x, y, vectors)

        m, n = self.m, self.n
        if layout == "turned":
            around = np.full((n + 2, m + 3), np.nan, np.float32)
            c = around[1:-1, 1:-2].T
        else:  # in pairs: an even start, and an even distance of rows
            around = np.full((m + 2, (n + 5) // 2 * 2), np.nan, np.float32)
            c = around[1:-1, 2 : n + 2]
        if beta:
            c[...] = self.old
        a, b = (np.vstack([np.zeros((2, 64), np.float32), scales[None]]) for scales in self.scales)
        operands = (np.float32(alpha), self.sums, np.float32(beta), c, a, b, self.x, self.y, vectors)
        with np.errstate(all="ignore"):
            scheduler.run(kernel, (1, 1), 32, operands)
        found = c.copy()
        c[...] = np.nan
        assert np.isnan(around).all(), "nothing beside C is written"
        return found


@simulated
@pytest.mark.parametrize("k", [0, 1, 15, 16, 17, 40])
@pytest.mark.parametrize("nan", [None, 0, 15, 39])
def test_an_element_is_computed_again_term_by_term(k, nan):
    from numba_gemm.kernels.tensor_core.epilogue import term_by_term

    generator = np.random.default_rng(k)
    x, y = (generator.integers(-9, 9, extents).astype(np.float32) for extents in ((3, k), (k, 4)))
    if nan is not None and nan < k:
        x[1, nan] = np.nan
    found = np.array([[term_by_term(x, y, row, col) for col in range(4)] for row in range(3)])
    np.testing.assert_array_equal(found, x @ y)


@simulated
def test_what_has_come_to_nan_is_not_computed_on():
    from numba_gemm.kernels.tensor_core import epilogue

    class Read(np.ndarray):
        def __getitem__(self, place):
            reads.append(place)
            return super().__getitem__(place)

    reads = []
    x = np.ones((1, 100), np.float32).view(Read)
    x[0, 20] = np.nan
    assert np.isnan(epilogue.term_by_term(x, np.ones((100, 1), np.float32), 0, 0))
    assert len(reads) == 2 * epilogue.AHEAD


@simulated
@pytest.mark.parametrize("layout", ["pairs", "turned"])
@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize(("m", "n"), [(32, 32), (40, 48), (31, 32), (32, 31), (1, 1), (17, 9)])
@pytest.mark.parametrize("mode", ["bf16", "bf16x6"])
def test_sums_are_stored(mode, m, n, beta, layout):
    warp = Warp(mode, m, n, 5)
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
    scales = warp.scales[0, : 16 * deep, None] + warp.scales[1, None, : 8 * across]
    np.testing.assert_array_equal(found, warp.sums * np.float32(2) ** -scales)


@simulated
def test_an_epilogue_is_the_last_step():
    def epilogue(value, row, col, bias):
        return value * 2 + bias[col] - row

    warp, bias = Warp("bf16x6", 20, 30, 3), np.arange(30, dtype=np.float32)
    found = warp.store("pairs", 1.0, 0.0, epilogue, (bias,))
    rows = np.arange(20, dtype=np.float32)[:, None]
    np.testing.assert_array_equal(found, warp.sums[:20, :30] * 2 + bias - rows)


# -------------------------------------------------------------------------------------------- modes, configurations


@pytest.mark.parametrize("mode", MODES.values(), ids=lambda mode: mode.name)
def test_products_come_smallest_first(mode):
    sizes = [-(a + b) for a, b in mode.products]
    assert sizes == sorted(sizes)
    assert mode.products[-1] == (0, 0)
    expected = {"tf32": 1, "tf32x3": 3, "bf16": 1, "bf16x6": 6, "bf16x9": 9, "fp16x3": 3}
    assert len(mode.products) == expected[mode.name]


def test_products_of_unknown_parts_are_refused():
    with pytest.raises(ValueError, match="different ones of 1 parts"):
        Mode("odd", "tf32", 1, ((0, 0), (1, 0)))
    for products in ((), ((0, 0), (0, 0)), ((0, -1),)):
        with pytest.raises(ValueError, match="different ones"):
            Mode("odd", "tf32", 1, products)
    with pytest.raises(ValueError, match="expected one of tf32, bf16, f16"):
        Mode("half", "e4m3", 1, ((0, 0),))
    with pytest.raises(ValueError, match="do not end"):
        Mode("turned", "bf16", 2, ((0, 0), (0, 1)))


@pytest.mark.parametrize("mode", MODES.values(), ids=lambda mode: mode.name)
@pytest.mark.parametrize("stage", TENSOR_STAGES.values(), ids=lambda stage: stage.name)
def test_slots_fit_into_shared_memory(stage, mode):
    from support.tensor_core_cases import runs

    for index, config in enumerate(stage.configs):
        if not runs(stage.name, index, mode.name):
            continue
        assert 1 <= config.slots(mode) <= config.max_slots
        assert config.dynamic_shared(mode) <= SHARED_BYTES
        assert config.slots(mode) > 1 or getattr(config, "producers", 1) == 0, (
            "a producer needs a slot to fill while one is read"
        )


@pytest.mark.parametrize(("stage", "index"), PAIRS)
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
        TENSOR_STAGES[name].build(config, TensorForm(MODES["tf32"]))


def test_a_slot_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="no room"):
        WarpgroupConfig(256, 256, consumers=4).slots(Mode("four", "bf16", 4, ((0, 0),)))


@pytest.mark.parametrize("name", [name for name, stage in TENSOR_STAGES.items() if not stage.complete])
def test_a_stage_without_scales_refuses_a_scaled_mode(name):
    stage = TENSOR_STAGES[name]
    with pytest.raises(ValueError, match="no scales"):
        stage.build(stage.configs[0], TensorForm(MODES["fp16x3"]))
    with pytest.raises(ValueError, match="no epilogue"):
        stage.build(stage.configs[0], TensorForm(MODES["tf32"], epilogue=abs))


def test_tiles_too_wide_for_three_sums_are_refused():
    stage = TENSOR_STAGES["persistent"]
    with pytest.raises(ValueError, match="BN <= 128"):
        stage.build(stage.configs[-1], TensorForm(MODES["bf16x6"]))


@pytest.mark.parametrize("mode", MODES.values(), ids=lambda mode: mode.name)
def test_split_operands_are_padded(mode):
    assert split_shape(mode, 1, 0, 64) == (mode.parts + mode.scaled, ROW_WORDS * 64)
    assert split_shape(mode, 97, mode.slot_k + 1, 96) == (2 * mode.parts + mode.scaled, 2 * ROW_WORDS * 96)


# ------------------------------------------------------------------------------------------------------ divisions


@pytest.mark.parametrize("mode", MODES.values(), ids=lambda mode: mode.name)
@settings(deadline=None)
@given(m=st.integers(1, 20000), n=st.integers(1, 20000), k=st.integers(1, 20000))
def test_a_division_covers_the_product(mode, m, n, k):
    division = split_products.divide(mode, m, n, k, 132)
    (a_rows, a_words), (b_rows, b_words) = division.parts[:2]
    config = division.config
    assert a_rows == b_rows == mode.parts * -(-k // mode.slot_k) + mode.scaled
    for words, extent, tile in ((a_words, m, config.BM), (b_words, n, config.BN)):
        assert words % (ROW_WORDS * tile) == 0
        assert words >= ROW_WORDS * extent > words - ROW_WORDS * tile
    ends = [offset + 4 * rows * cols for offset, (rows, cols) in zip(division.offsets, division.parts, strict=True)]
    assert all(end <= begin for end, begin in zip(ends, division.offsets[1:], strict=False))
    assert ends[-1] <= division.workspace_bytes
    assert 0 < division.blocks <= 132


def test_small_products_get_small_tiles():
    def area(extent):
        config = split_products.choose(MODES["bf16x6"], extent, extent, 1024, 132)
        return config.BM * config.BN

    areas = [area(extent) for extent in (256, 512, 1024, 4096)]
    assert areas == sorted(areas)
    assert areas[0] < areas[-1]


# -------------------------------------------------------------------------------------------- launches, without a GPU


def place(pointer, rows, cols, row_stride, col_stride, device=0):
    return Matrix(pointer, rows, cols, row_stride, col_stride, device, None)


@pytest.fixture
def launched(monkeypatch):
    """Record launch objects and their calls instead of compiling."""
    made = []

    class Recorded:
        def __init__(self, division, a, b, c, extra):
            self.division, self.extra, self.calls = division, extra, []
            made.append(self)

        def __call__(self, *arguments):
            self.calls.append(arguments)

    monkeypatch.setattr(split_products, "SIMULATOR", False)
    monkeypatch.setattr(split_products, "_Launch", Recorded)
    monkeypatch.setattr(split_products, "_kept_launches", {})
    properties = split_products.device_properties(0)
    monkeypatch.setattr(split_products, "device_properties", lambda device: properties)
    return made


VECTOR = Vector(4096, 8, 4, None)
EXTRA = Extra(Batch((1, 1, 2), (0, 0, 4096), (0, 0, 4096), (0, 0, 4096)), abs, (VECTOR,))
CONFIGS = split_products.configs_of(MODES["bf16x6"])
SPLIT_KEYS = {
    "mode": {"mode": MODES["bf16x9"]},
    "configuration": {"config": CONFIGS[1]},
    "device": {"device": 1},
    "A's strides": {"a": (1 << 20, 8, 12, 64, 4)},
    "B's strides": {"b": (1 << 21, 12, 8, 4, 48)},
    "C's strides": {"c": (1 << 22, 8, 8, 4, 32)},
    "rows": {"a": (1 << 20, 4, 12, 48, 4), "c": (1 << 22, 4, 8, 32, 4)},
    "k": {"a": (1 << 20, 8, 8, 48, 4), "b": (1 << 21, 8, 8, 32, 4)},
    "matrices": {"extra": dataclasses.replace(EXTRA, batch=dataclasses.replace(EXTRA.batch, extents=(1, 1, 3)))},
    "A's step": {"extra": dataclasses.replace(EXTRA, batch=dataclasses.replace(EXTRA.batch, a=(0, 0, 0)))},
    "B's step": {"extra": dataclasses.replace(EXTRA, batch=dataclasses.replace(EXTRA.batch, b=(0, 0, 0)))},
    "C's step": {"extra": dataclasses.replace(EXTRA, batch=dataclasses.replace(EXTRA.batch, c=(0, 0, 8192)))},
    "epilogue": {"extra": dataclasses.replace(EXTRA, epilogue=max)},
    "vectors": {"extra": dataclasses.replace(EXTRA, vectors=(VECTOR, VECTOR))},
    "a vector's stride": {"extra": dataclasses.replace(EXTRA, vectors=(dataclasses.replace(VECTOR, stride=8),))},
    "a vector's size": {"extra": dataclasses.replace(EXTRA, vectors=(dataclasses.replace(VECTOR, size=9),))},
}


def multiply_split(mode=MODES["bf16x6"], device=0, config=CONFIGS[0], extra=EXTRA, workspace=None, **places):
    found = {"a": (1 << 20, 8, 12, 48, 4), "b": (1 << 21, 12, 8, 32, 4), "c": (1 << 22, 8, 8, 32, 4)} | places
    a, b, c = (place(*found[name], device) for name in "abc")
    split_products.launch(mode, 1.0, a, b, 0.0, c, extra=extra, config=config, workspace=workspace)


@pytest.mark.parametrize("case", SPLIT_KEYS)
def test_launch_key_has_every_property(launched, case):
    multiply_split()
    multiply_split(a=(1 << 23, 8, 12, 48, 4))  # another address
    assert [len(one.calls) for one in launched] == [2]
    multiply_split(**SPLIT_KEYS[case])
    multiply_split()
    assert [len(one.calls) for one in launched] == [3, 1]


def test_config_at_a_reused_address(launched):
    """Each configuration is freed before the next one is created."""
    for config in CONFIGS * 3:
        multiply_split(config=dataclasses.replace(config))
        (called,) = (one for one in launched if one.calls)
        assert called.division.config == config
        called.calls.clear()


def test_a_batch_is_launched_in_pieces(launched, monkeypatch):
    """One launch takes as many matrices as fit in the memory limit of the parts."""
    batch = Batch((1, 1, 7), (0, 0, 4096), (0, 0, 0), (0, 0, 512))
    each = split_products.divide(MODES["bf16x6"], 8, 8, 12, 132, CONFIGS[0], batch=batch)
    assert each.steps[0] > 0
    assert each.steps[1] == 0, "B's parts are there once"
    assert each.workspace_bytes >= 7 * each.steps[0] + 4 * np.prod(each.parts[1])
    monkeypatch.setattr(split_products, "MOST_PARTS_BYTES", 3 * each.steps[0])
    multiply_split(extra=Extra(batch))
    calls = [(one.division.matrices, arguments[1:5]) for one in launched for arguments in one.calls]
    a, b, c = 1 << 20, 1 << 21, 1 << 22
    expected = [(3, (a, b, 0.0, c)), (3, (a + 3 * 4096, b, 0.0, c + 3 * 512)), (1, (a + 6 * 4096, b, 0.0, c + 6 * 512))]
    assert calls == expected
    monkeypatch.setattr(split_products, "MOST_PARTS_BYTES", 1)
    assert split_products._at_once(MODES["bf16x6"], place(a, 8, 12, 48, 4), place(b, 12, 8, 32, 4), batch, None, 0) == 1
    monkeypatch.setattr(split_products, "MOST_PARTS_BYTES", 1 << 60)
    monkeypatch.setattr(split_products, "MAX_MATRICES", 5)
    assert split_products._at_once(MODES["bf16x6"], place(a, 8, 12, 48, 4), place(b, 12, 8, 32, 4), batch, None, 0) == 5


def test_workspace_of_a_precision(launched):
    needed = split_products.divide(MODES["bf16x6"], 8, 8, 12, 132, CONFIGS[0]).workspace_bytes
    multiply_split(extra=PLAIN, workspace=Workspace(1 << 24, needed, 0))
    assert launched[-1].calls[-1][6] == 1 << 24
    with pytest.raises(ValueError, match=rf"workspace holds {needed - 1} bytes; expected {needed}; pass an array"):
        multiply_split(extra=PLAIN, workspace=Workspace(1 << 24, needed - 1, 0))
    assert [len(one.calls) for one in launched] == [1]


def test_extents_of_a_precision(launched):
    multiply_split(extra=PLAIN, a=(1 << 20, 0, 12, 48, 4), c=(1 << 22, 0, 8, 32, 4))
    multiply_split(extra=PLAIN, b=(1 << 21, 12, 0, 32, 4), c=(1 << 22, 8, 0, 32, 4))
    assert not launched
    long = split_products.MAX_K + 1
    with pytest.raises(ValueError, match=f"K is {long}, beyond the {long - 1} that this precision takes"):
        multiply_split(extra=PLAIN, a=(1 << 20, 8, long, 0, 0), b=(1 << 21, long, 8, 0, 0))
    a, b = np.broadcast_to(np.float32(1), (2, long)), np.broadcast_to(np.float32(1), (long, 2))
    with pytest.raises(ValueError, match=rf"K is {long} and precision is 'bf16x6', which takes up to {long - 1}"):
        checked(a, b, None, 1.0, 0.0, None, "auto", None, (), None, "bf16x6")
    assert checked(a, b, None, 1.0, 0.0, None, "auto", None, ()).k == long


@simulated
def test_workspace_of_a_precision_is_not_used_for_empty_sums(launched, monkeypatch):
    """It is sized for the parts; the float32 kernel may need more."""
    given = []
    monkeypatch.setattr(gemm_product.launch, "launch", lambda *_, workspace, **__: given.append(workspace))
    a, workspace = np.ones((4, 5), np.float32), Workspace(1 << 24, 256, 0)
    options = {"stage": "auto", "seen": {}, "workspace": workspace}
    gemm_product.checked_product(a, a.T, None, 0.0, 0.0, None, **options, precision="bf16x6")
    gemm_product.checked_product(a, a.T, None, 1.0, 0.0, None, **options)
    assert given == [None, workspace]
    assert not launched


@simulated
def test_plan_calls_use_its_precision(launched, monkeypatch):
    monkeypatch.setattr(split_products, "prepare", lambda *_: None)
    a = np.ones((4, 5), np.float32)
    made = numba_gemm.plan(4, 4, 5, precision="bf16x9")
    made(a, a.T)
    made(a, a.T)
    assert made.precision == "bf16x9"
    assert [(one.division.mode.name, len(one.calls)) for one in launched] == [("bf16x9", 2)]


def test_memory_is_given_back_after_an_error(monkeypatch):
    made, loans = object.__new__(split_products._Launch), []

    def fails(*arguments):
        raise RuntimeError("launch failed")

    made.device, made.division = 0, split_products.divide(MODES["bf16x6"], 8, 8, 12, 132)
    monkeypatch.setattr(made, "_enqueue", fails, raising=False)
    monkeypatch.setattr(split_products, "device_scope", contextlib.nullcontext)
    loan = Loan(1 << 20, 256, (0, 0, 0))
    monkeypatch.setattr(split_products.workspaces, "borrow", lambda *_: loan)
    monkeypatch.setattr(split_products.workspaces, "give_back", loans.append)
    with pytest.raises(RuntimeError, match="launch failed"):
        made(1.0, 0, 0, 0.0, 0, 0, None, [])
    assert loans == [loan]


def epilogue_of(bias):
    return lambda value, row, col: value + bias


def untold(value, row, col):
    return value * UNTOLD[0]


UNTOLD = [1.0]


def test_cached_kernel_names_are_distinct(monkeypatch):
    """Everything that affects the code is in the name; an epilogue without a fingerprint has no name."""
    names = []
    monkeypatch.setattr(split_products.kernel_cache, "kept", lambda name, make: names.append(name))
    mode, config = MODES["bf16x6"], CONFIGS[0]
    forms = [
        TensorForm(mode),
        TensorForm(mode, batched=True),
        TensorForm(MODES["bf16x9"]),
        TensorForm(mode, epilogue_of(1.0)),
        TensorForm(mode, epilogue_of(2.0)),
        TensorForm(mode, epilogue_of(1.0), 1),
        TensorForm(mode, epilogue_of(1.0), 2),
        TensorForm(mode, epilogue_of(1.0), batched=True),
    ]
    for form in forms:
        split_products.product_cubin(config, form, (9, 0))
    split_products.product_cubin(CONFIGS[1], forms[0], (9, 0))
    split_products.product_cubin(config, forms[0], (9, 0), TENSOR_STAGES["wide_tiles"])
    split_products.product_cubin(config, forms[0], (8, 0))
    for cc in ((8, 0), (9, 0)):
        for batched in (False, True):
            split_products.split_cubin(mode, cc, batched)
            split_products.split_cubin(MODES["fp16x3"], cc, batched)
            split_products.extremes_cubin(cc, batched)
    assert len(names) == len(set(names)) == len(forms) + 3 + 12
    split_products.product_cubin(config, TensorForm(mode, epilogue_of(1.0)), (9, 0))
    assert names[-1] in names[:-1]
    split_products.product_cubin(config, TensorForm(mode, untold), (9, 0))
    assert names[-1] is None


# ------------------------------------------------------------------------------------------------------ precisions


def test_an_unknown_precision_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="bf16x6"):
        split_products.check_precision("double")
    with pytest.raises(TypeError, match="expected a str"):
        split_products.check_precision(32)


@pytest.mark.parametrize("mode", MODES)
def test_a_precision_that_a_gpu_cannot_run_names_those_it_can(mode):
    with pytest.raises(ValueError, match=r"(?s)expected one of ieee;"):
        split_products.check_precision(mode, (7, 5))


def test_fp32_auto_is_float32_where_nothing_better_is_stated():
    large = (4096, 4096, 4096)
    assert split_products.resolved("fp32_auto", *large, (8, 0)) == "ieee"
    assert split_products.resolved("tf32", *large, (9, 0)) == "tf32"
    expected = "ieee" if SIMULATOR else "bf16x6"
    assert split_products.resolved("fp32_auto", *large, (9, 0)) == expected
    for m, n, k in ((4096, 4096, 255), (1 << 20, 64, 4096), (384, 384, 4096), (512, 512, 256), (1024, 1024, 511)):
        assert split_products.resolved("fp32_auto", m, n, k, (9, 0)) == "ieee"
    assert split_products.resolved("fp32_auto", 1024, 1024, 512, (9, 0)) == expected
    split_products.check_precision("fp32_auto", (8, 0))


def test_smallest_k_of_fp32_auto(monkeypatch):
    monkeypatch.setattr(split_products, "SIMULATOR", False)
    chosen = {k: split_products.resolved("fp32_auto", 4096, 4096, k, (9, 0)) for k in (255, 256, 1023, 1024)}
    assert chosen == {255: "ieee", 256: "bf16x6", 1023: "bf16x6", 1024: "bf16x6"}
    assert split_products.resolved("fp32_auto", 4096, 4096, 256, (8, 0)) == "ieee"


def test_short_sums_are_summed_afresh_step_by_step():
    short, long = (split_products.divide(MODES["bf16x6"], 512, 512, k, 132).mode for k in (1023, 1024))
    assert (short.stepwise, long.stepwise) == (True, False)
    assert short.products == long.products
    assert split_products.divide(MODES["bf16x9"], 512, 512, 256, 132).mode == MODES["bf16x9"]
    assert (
        split_products.made_as(MODES["bf16x6"], 1024) == MODES["bf16x6"] != split_products.made_as(MODES["bf16x6"], 1)
    )
    times = [split_products.expected_seconds(MODES["bf16x6"], 4096, 4096, k, 132) for k in (1023, 1024)]
    assert times[0] > 1.5 * times[1]
    with pytest.raises(ValueError, match="stepwise sums are compensated"):
        dataclasses.replace(MODES["fp16x3"], stepwise=True)


@simulated
def test_the_simulator_runs_float32_alone():
    a = np.ones((4, 5), np.float32)
    with pytest.raises(ValueError, match="simulator"):
        numba_gemm.tiled_sgemm(a, a.T, precision="bf16x6")
    with pytest.raises(ValueError, match="simulator"):
        numba_gemm.plan(4, 4, 5, precision="bf16x6")
    for precision in ("ieee", "fp32_auto"):
        assert (numba_gemm.tiled_sgemm(a, a.T, precision=precision) == 5).all()
    assert numba_gemm.plan(4, 4, 5, precision="fp32_auto").precision == "ieee"


def test_a_stage_has_float32s_precision():
    a = np.ones((4, 5), np.float32)
    with pytest.raises(ValueError, match="leave out the other"):
        numba_gemm.tiled_sgemm(a, a.T, precision="bf16x6", stage="naive")
    with pytest.raises(ValueError, match="leave out the other"):
        numba_gemm.plan(4, 4, 5, precision="bf16x6", stage="naive")


@simulated
def test_the_simulator_says_that_it_has_no_matrix_instructions():
    stage = TENSOR_STAGES["one_warpgroup"]
    with pytest.raises(NotImplementedError, match="no matrix instructions"):
        stage.build(stage.configs[0], TensorForm(MODES["tf32"]))


# ------------------------------------------------------------------------------------------------------- compiled


@pytest.mark.parametrize("part", [*TENSOR_STAGES, "others"])
def test_compiled_kernels_are_what_they_claim(part):
    command = [sys.executable, str(SUPPORT / "tensor_core_cases.py"), part]
    done = subprocess.run(command, env=compiler_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    from support.tensor_core_cases import ALL_MODES, DIRECT, runs

    expected = sum(runs(stage, index, mode) for stage, index in PAIRS if stage == part for mode in ALL_MODES)
    assert len(rows) == (2 + 3 + len(ALL_MODES) + len(DIRECT) if part == "others" else expected)
    for row in rows:
        name, opcodes = f"{row['name']}, {row.get('mode')}", row["opcodes"]
        assert row["local"] == 0, name
        assert row["spills"] == 0, name
        assert "Compiling entry" in row["log"], f"{name}: ptxas says nothing"
        assert "C75" not in row["log"], f"{name}: ptxas puts products one after the other: {row['log']}"
        if row["stage"] in ("batched", "epilogue"):
            continue
        if row["stage"] == "warp_mma":
            mode, turns = ALL_MODES[row["mode"]], opcodes["LDSM"] // (4 * ALL_MODES[row["mode"]].parts)
            assert turns > 0, name
            assert opcodes["LDSM"] == turns * 4 * mode.parts, name
            assert opcodes["HMMA"] == turns * 8 * len(mode.products), name
            assert opcodes["LDGSTS"] > 0, name
            continue
        if row["stage"] in ("split", "extremes"):
            assert "HGMMA" not in opcodes, name
            continue
        if row["stage"] == "direct":  # two slots a turn
            across = row["mode"] != "NT"
            assert opcodes["HGMMA"] == 2 * 4, name
            assert opcodes["LDS"] == 2 * (8 if across else 16), name
            assert opcodes["UTMALDG"] == 1 + (int(row["BM"]) // 32 if across else 1), name
            assert opcodes.get("USETMAXREG", 0) == (2 if row["claim"] else 0), name
            continue
        mode = ALL_MODES[row["mode"]]
        # All steps of a slot are written out, but of leading products that are summed step by step: those are a loop.
        assert opcodes["HGMMA"] == 4 * len(mode.products) - (3 if mode.stepwise else 0), name
        bulk = row["stage"] != "one_warpgroup"
        assert opcodes.get("UBLKCP", 0) == (2 * mode.parts if bulk else 0), name
        assert opcodes.get("SYNCS", 0) >= (3 if bulk else 0), name
        assert opcodes.get("STS", 0) in ((0,) if bulk else (12, 12 * mode.parts)), name  # each part's, or in a loop
        assert opcodes.get("USETMAXREG", 0) == (2 if row["claim"] else 0), name


# ------------------------------------------------------------------------------------------------------- on a GPU

FULL_RANGE = ("tf32x3", "bf16x6", "bf16x9")
SHAPES = [(1, 1, 1), (64, 128, 32), (100, 70, 90), (129, 257, 65), (300, 200, 1030)]


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", [*MODES, "bf16x6_stepwise"])
@pytest.mark.parametrize(("stage", "index"), PAIRS)
def test_product(stage, index, mode, shape):
    from numba import cuda
    from support.tensor_core_cases import bound, product, runs

    if not runs(stage, index, mode):
        pytest.skip("not for this mode")
    m, n, k = shape
    generator = np.random.default_rng(m)
    for turned in (False, True):
        a, b = (generator.standard_normal(extents).astype(np.float32) for extents in ((m, k), (k, n)))
        if turned:
            a, b = np.asfortranarray(a), np.asfortranarray(b)
        guarded = np.full((m + 2, n + 2), np.nan, np.float32)
        whole = cuda.to_device(guarded)
        c = whole[1 : m + 1, 1 : n + 1]
        product(cuda.to_device(a), cuda.to_device(b), c, mode, stage, index=index)
        found = whole.copy_to_host()
        exact, size = a.astype(np.float64) @ b, np.abs(a.astype(np.float64)) @ np.abs(b)
        assert (np.abs(found[1 : m + 1, 1 : n + 1] - exact) <= bound(stage, mode, k) * size).all()
        found[1 : m + 1, 1 : n + 1] = np.nan
        assert np.isnan(found).all(), "nothing beside C is written"


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00000, 0xFF801000])
def test_a_nan_stays_one(mode, bits):
    import torch

    from numba_gemm import tiled_sgemm

    a, b = torch.ones(3, 5, device="cuda"), torch.ones(5, 4, device="cuda")
    a[1, 2] = torch.tensor(np.uint32(bits).view(np.int32)).view(torch.float32).to("cuda")
    c = tiled_sgemm(a, b, precision=mode)
    assert (torch.isnan(c).cpu().numpy() == [[False], [True], [False]]).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("stage", TENSOR_STAGES)
def test_alpha_and_beta(stage):
    from numba import cuda
    from support.tensor_core_cases import product

    generator = np.random.default_rng(3)
    a, b, c = (generator.standard_normal(extents).astype(np.float32) for extents in ((70, 40), (40, 50), (70, 50)))
    on_device = cuda.to_device(c)
    product(cuda.to_device(a), cuda.to_device(b), on_device, "tf32x3", stage, alpha=0.5, beta=-2.0)
    np.testing.assert_allclose(on_device.copy_to_host(), 0.5 * (a @ b) - 2 * c, rtol=1e-5, atol=1e-5)


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
@pytest.mark.parametrize("mode", ["bf16x6", "bf16x9"])
def test_no_less_accurate_than_cublas(mode, distribution, k, extent):
    """Median and maximum of the error over ``|A| @ |B|``, against cuBLAS's float32 on the same operands."""
    import torch

    from numba_gemm import tiled_sgemm

    torch.backends.cuda.matmul.allow_tf32 = False
    a, b = accuracy.operands(distribution, extent, extent, k, seed=k)
    x, y = on_gpu(a, b)
    theirs = quotients(torch.matmul(x, y).cpu().numpy(), a, b)
    ours = quotients(tiled_sgemm(x, y, precision=mode).cpu().numpy(), a, b)
    assert np.median(ours) <= np.median(theirs)
    assert ours.max() <= theirs.max()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("k", [1, 2, 3, 17, 64, 100, 255, 65536])
@pytest.mark.parametrize("distribution", accuracy.DISTRIBUTIONS)
@pytest.mark.parametrize("mode", FULL_RANGE)
def test_the_stated_bound_holds(mode, distribution, k):
    from numba_gemm import tiled_sgemm

    a, b = accuracy.operands(distribution, 128, 96, k, seed=k)
    found = tiled_sgemm(*on_gpu(a, b), precision=mode).cpu().numpy()
    assert quotients(found, a, b).max() <= mode_bound(mode, k)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("distribution", accuracy.DISTRIBUTIONS)
def test_fp16x3_holds_its_bound_of_rows_and_columns(distribution):
    from numba_gemm import tiled_sgemm

    a, b = accuracy.operands(distribution, 128, 96, 1000, seed=1)
    found = tiled_sgemm(*on_gpu(a, b), precision="fp16x3").cpu().numpy().astype(np.float64)
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    size = np.abs(wide_a).max(axis=1)[:, None] * np.abs(wide_b).max(axis=0)[None, :] * 1000
    assert (np.abs(found - wide_a @ wide_b) <= MODE_BOUNDS["fp16x3"] * size).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("mode", FULL_RANGE)
def test_what_is_not_finite_comes_out_as_in_numpy(mode, beta):
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
    found = tiled_sgemm(*on_gpu(a, b), out, beta=beta, precision=mode).cpu().numpy()
    with np.errstate(all="ignore"):
        expected = a @ b + np.float32(beta) * c
        size = np.abs(a.astype(np.float64)) @ np.abs(b) + np.abs(c)
    special = ~np.isfinite(expected)
    assert special.any()
    np.testing.assert_array_equal(found[special], expected[special])
    assert (np.abs(found[~special] - expected[~special]) <= 2.0**-18 * size[~special]).all()


def lost_to_underflow(mode, rows):
    """What the parts of A's rows, or B's columns, lose of each element at most: half of where the narrow kind ends."""
    size = np.abs(rows.astype(np.float64))
    if mode == "fp16x3":
        largest = size.max(axis=1, keepdims=True)
        scale = np.clip(14 - np.floor(np.log2(largest)), -120, 120)
        return np.where(size * 2.0**scale > 2.0**-2, 0, 2.0 ** (-25 - scale))
    end, from_ = (2.0**-137, 2.0**-114) if mode.startswith("tf32") else (2.0**-134, 2.0**-109)
    return np.where(size < from_, end, 0)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("a_size", "b_size"),
    [(-130, 100), (-149, 100), (-112, 20), (-66, -70), (-70, -75), (0, -126), (0, -135), (0, -145), (-20, -110)],
)
@pytest.mark.parametrize("k", [1, 64, 512])
@pytest.mark.parametrize("mode", MODES)
def test_subnormal_operands_and_sums(mode, k, a_size, b_size):
    from numba_gemm import tiled_sgemm

    generator = np.random.default_rng(k)
    a, b = (
        (generator.uniform(1, 2, shape) * generator.choice([-1, 1], shape) * 2.0**size).astype(np.float32)
        for shape, size in (((70, k), a_size), ((k, 50), b_size))
    )
    found = tiled_sgemm(*on_gpu(a, b), precision=mode).cpu().numpy()
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    size = np.abs(wide_a) @ np.abs(wide_b)
    lost = lost_to_underflow(mode, a) @ np.abs(wide_b) + np.abs(wide_a) @ lost_to_underflow(mode, b.T).T
    cut_off = 2.0**-149 * (k + len(MODES[mode].products))  # of sums near there
    assert (np.abs(found - wide_a @ wide_b) <= mode_bound(mode, k) * size + lost + cut_off).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("mode", FULL_RANGE)
def test_small_integers_and_permutations_are_exact(mode):
    from numba_gemm import tiled_sgemm

    generator = np.random.default_rng(4)
    a, b = generator.integers(-200, 200, (300, 400)), generator.integers(-1000, 1000, (400, 250))
    found = tiled_sgemm(*on_gpu(a.astype(np.float32), b.astype(np.float32)), precision=mode).cpu().numpy()
    np.testing.assert_array_equal(found, a @ b)
    if mode != "tf32x3":  # whose two parts have fewer bits than a float
        rows = generator.permutation(500)
        x = generator.standard_normal((500, 130)).astype(np.float32)
        permuted = tiled_sgemm(*on_gpu(np.eye(500, dtype=np.float32)[rows], x), precision=mode).cpu().numpy()
        np.testing.assert_array_equal(permuted, x[rows])


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("mode", MODES)
def test_operands_may_change_between_calls(mode):
    import torch

    from numba_gemm import tiled_sgemm

    a, b = torch.randn(300, 200, device="cuda"), torch.randn(200, 400, device="cuda")
    first = tiled_sgemm(a, b, precision=mode)
    a.neg_()
    assert torch.equal(tiled_sgemm(a, b, precision=mode), -first)
    b.mul_(2)
    assert torch.equal(tiled_sgemm(a, b, precision=mode), -2 * first)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("mode", ["tf32", "bf16x6", "fp16x3"])
def test_products_follow_each_other_on_a_stream_and_in_a_graph(mode):
    """One workspace, many products in a row of other extents: each must wait for the one before."""
    import torch

    from numba_gemm import tiled_sgemm

    extents = [(64, 64, 2000), (1000, 900, 70), (300, 2000, 500), (2048, 2048, 64), (17, 33, 65)]
    operands = [(torch.randn(m, k, device="cuda"), torch.randn(k, n, device="cuda")) for m, n, k in extents]
    outs = [torch.empty(m, n, device="cuda") for m, n, _ in extents]
    expected = [tiled_sgemm(a, b, precision=mode).clone() for a, b in operands]
    torch.cuda.synchronize()

    def all_of_them():
        for (a, b), out in zip(operands, outs, strict=True):
            tiled_sgemm(a, b, out, precision=mode)

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
@pytest.mark.parametrize("mode", MODES)
def test_batches_epilogues_and_strides(mode):
    import torch

    from numba_gemm import tiled_sgemm

    def bias_relu(value, row, column, bias):
        return max(value + bias[column], 0.0)

    a, b = torch.randn(3, 70, 80, device="cuda"), torch.randn(80, 90, device="cuda")
    bias = torch.randn(90, device="cuda")
    expected = torch.relu(a.double() @ b.double() + bias)
    size = a.double().abs() @ b.double().abs() + bias.abs()
    found = tiled_sgemm(a, b, precision=mode, epilogue=bias_relu, epilogue_args=(bias,))
    assert ((found - expected).abs() <= (MODE_BOUNDS[mode] + 2.0**-22) * size).all()
    turned = tiled_sgemm(a.flip(0)[0][:, ::2].contiguous().flip(1), b[::2].flip(0), precision=mode)
    exact = a[2][:, ::2].double().flip(1) @ b[::2].double().flip(0)
    assert ((turned - exact).abs() <= MODE_BOUNDS[mode] * (a[2][:, ::2].double().abs() @ b[::2].double().abs())).all()
    out = torch.full((90, 70), float("nan"), device="cuda")
    tiled_sgemm(a[0], b, out.T, precision=mode)
    assert (
        (out.T - a[0].double() @ b.double()).abs() <= MODE_BOUNDS[mode] * (a[0].double().abs() @ b.double().abs())
    ).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("k", [64, 70])
@pytest.mark.parametrize(
    ("a_batch", "b_batch"), [((7,), (7,)), ((7,), ()), ((), (7,)), ((2, 1), (1, 3)), ((2, 3), (2, 3)), ((200,), (200,))]
)
@pytest.mark.parametrize("mode", MODES)
def test_a_batch_has_the_bits_of_its_matrices(mode, a_batch, b_batch, k, monkeypatch):
    """In two launches, or three, for each dimension that is not the last; some at a time if parts would be large."""
    import torch

    from numba_gemm import tiled_sgemm
    from numba_gemm.runtime.driver import Frame

    a, b = torch.randn(*a_batch, 40, k, device="cuda"), torch.randn(*b_batch, k, 36, device="cuda")
    x, y = torch.broadcast_tensors(a[..., 0, 0], b[..., 0, 0])[0].shape, MODES[mode]
    wide_a, wide_b = a.expand(*x, 40, k), b.expand(*x, k, 36)
    expected = torch.empty(*x, 40, 36, device="cuda")
    for place in np.ndindex(*x):
        tiled_sgemm(wide_a[place], wide_b[place], expected[place], precision=mode)
    launches = []
    monkeypatch.setattr(
        Frame, "launch", lambda self, *values, plain=Frame.launch: (launches.append(1), plain(self, *values))
    )
    assert torch.equal(tiled_sgemm(a, b, precision=mode, epilogue=same), expected)
    outer = 2 if len(x) == 2 and a_batch == (2, 1) else 1
    each = 3 if y.scaled else 2
    assert len(launches) == outer * (1 if mode == "tf32" and k == 64 else each)
    launches.clear()
    monkeypatch.setattr(split_products, "MOST_PARTS_BYTES", 40 * k * y.parts * 4 * 3)
    assert torch.equal(tiled_sgemm(a, b, precision=mode, epilogue=same), expected)
    assert max(x) <= 3 or (mode == "tf32" and k == 64) or len(launches) > outer * each


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

    plan = numba_gemm.plan(200, 300, 400, precision="bf16x6")
    assert plan.precision == "bf16x6"
    assert plan.workspace_bytes > 3 * 2 * (200 + 300) * 400
    a, b = torch.randn(200, 400, device="cuda"), torch.randn(400, 300, device="cuda")
    expected = numba_gemm.tiled_sgemm(a, b, precision="bf16x6")
    assert torch.equal(plan(a, b), expected)
    memory = torch.empty(plan.workspace_bytes // 4, device="cuda")
    own = numba_gemm.plan(200, 300, 400, precision="bf16x6", workspace=memory)
    assert torch.equal(own(a, b), expected)
    c = torch.ones(200, 300, device="cuda")
    own(a, b, c, alpha=0.0, beta=3.0)
    assert (c == 3).all()
    with pytest.raises(ValueError, match="workspace"):
        numba_gemm.plan(200, 300, 400, precision="bf16x6", workspace=memory[:1000])
