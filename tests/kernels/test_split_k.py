"""Sums divided among blocks (split-K): shares, addition of partial sums, launches, and products on a GPU."""

from __future__ import annotations

import math
import struct
from itertools import pairwise

import numpy as np
import pytest
from support.covering import covering
from support.simulated_parts import float32_sums, marks_of, words_of_scales
from support.tensor_core_cases import passed, tensor_matrix

import numba_gemm
from numba_gemm.gemm import heuristics, tensor_heuristics
from numba_gemm.gemm import precision as precisions
from numba_gemm.gemm.explain import explain_shape
from numba_gemm.gemm.heuristics import Problem
from numba_gemm.kernels.product import ONE, Batch, Product, dense
from numba_gemm.kernels.stage import Gpu, Partition
from numba_gemm.kernels.step import MatrixAt, Moving, Slot
from numba_gemm.kernels.tensor_core import TENSOR_PRECISIONS, TENSOR_STAGES
from numba_gemm.kernels.tensor_core.stage import (
    ROW_BYTES,
    THREADS,
    AddPartialsVariant,
    add_partials_kernel,
    precision_for,
    threads_per_sum,
)
from numba_gemm.lab.bench import accuracy
from numba_gemm.models.accuracy import tensor_bound
from numba_gemm.simulator.switch import SIMULATOR

PERSISTENT, ROWS = TENSOR_STAGES["persistent"], TENSOR_STAGES["rows_in_registers"]
SMALL = PERSISTENT.configs[3]
GPU, SHARES = Gpu((9, 0), 132), Partition(4, 0)
UNIT = 2.0**-24
SLOT_BITS = 6
FULL_RANGE = ("tf32x3", "bf16x3", "bf16x6", "bf16x9")

simulated = pytest.mark.skipif(not SIMULATOR, reason="runs on the simulator")


def tile(name):
    return next(config for config in PERSISTENT.configs if config.name.startswith(name))


def dense_product(m, n, k, batch=ONE, epilogue=None, vectors=()):
    return Product(dense("N", m, k), dense("N", k, n), dense("N", m, n), batch, epilogue, vectors)


# ------------------------------------------------------------------------------------------------------------- shares


@simulated
@pytest.mark.parametrize("own_rows", [1, 3])
@pytest.mark.parametrize(
    ("slots", "shares"),
    [(1, 1), (12, 1), (2, 2), (3, 2), (7, 7), (1024, 132), (1563, 132), (131, 130), ((1 << 30) // 32, 132)],
)
def test_every_slot_is_in_one_share(slots, shares, own_rows):
    from numba_gemm.kernels.tensor_core.split_k import share

    rows = np.uint32(shares * own_rows)
    found = [share(np.uint32(row), rows, np.uint32(own_rows), np.uint32(slots)) for row in range(shares * own_rows)]
    assert [int(row) for row, _, _ in found] == list(range(own_rows)) * shares
    bounds = [(int(first), int(end)) for _, first, end in found[::own_rows]]
    assert all((int(first), int(end)) == bounds[i // own_rows] for i, (_, first, end) in enumerate(found))
    assert bounds[0][0] == 0
    assert bounds[-1][1] == slots
    assert all(end == begin for (_, end), (begin, _) in pairwise(bounds))
    sizes = {end - begin for begin, end in bounds}
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


def test_a_product_of_whole_tiles_is_not_divided():
    for partition in (Partition(15, 15), Partition(150, 15), Partition(15, 20)):
        made = PERSISTENT.launches(SMALL, dense_product(300, 190, 5000), "bf16x6", partition, GPU)
        assert made.multiplication is made.steps[-1]
        assert made.multiplication.grid == (15, 1, 1)


@pytest.mark.parametrize(("shares", "threads"), [(2, 1), (4, 1), (5, 2), (8, 2), (16, 4), (17, 8), (132, 8)])
def test_threads_that_add_an_element(shares, threads):
    assert threads_per_sum(shares) == threads


# ------------------------------------------------------------------------------------- addition of partial sums


def decomposed(x, scales):
    """Decomposed rows with nothing but their marks and scales."""
    marks = marks_of(x, SLOT_BITS)
    last = np.full((1, marks.shape[1]), np.nan, np.float32)
    last[0, : scales.size] = words_of_scales(scales)
    return np.vstack([marks, last])


class Added:
    """Partial sums of a batch of (m, n) matrices, padded to whole tiles, and what the kernel makes of them."""

    def __init__(self, m, n, shares, *, matrices=1, k=5, scaled=False, recomputes=True, seed=1):
        generator = np.random.default_rng([m, n, shares, seed])
        self.m, self.n, self.shares, self.matrices, self.k = m, n, shares, matrices, k
        self.rows, self.cols = -(-m // 64) * 64, -(-n // 32) * 32
        partials = generator.standard_normal((matrices, shares, self.rows, self.cols))
        self.partials = partials.astype(np.float32)
        self.partials[:, :, m:], self.partials[:, :, :, n:] = np.nan, np.nan  # of padding, which may hold anything
        self.x = generator.standard_normal((matrices, m, k)).astype(np.float32)
        self.y = generator.standard_normal((matrices, k, n)).astype(np.float32)
        self.old = generator.standard_normal((matrices, m, n)).astype(np.float32)
        self.scales = [generator.integers(-40, 40, (matrices, size)).astype(np.float32) for size in (m, n)]
        self.scaled, self.recomputes = scaled, recomputes

    def sums(self, of=np.positive):
        """Sums in float64, (matrices, m, n), of the partial sums or a function of them."""
        exact = of(self.partials[:, :, : self.m, : self.n].astype(np.float64)).sum(axis=1)
        if self.scaled:
            exact *= 2.0 ** -(self.scales[0][:, :, None] + self.scales[1][:, None]).astype(np.float64)
        return exact

    def run(self, alpha=1.0, beta=0.0, *, by_columns=False, epilogue=None, vectors=(), seed=None, first=(0, 0)):
        """C; it lies among NaNs, which stay, and holds NaN before if beta is 0.

        The partial sums are those of rows and columns from `first` on; other elements stay.
        """
        from numba_gemm.simulator import scheduler

        kernel = add_partials_kernel(AddPartialsVariant(epilogue, len(vectors)))
        shape = (self.matrices, self.n + 3, self.m + 2) if by_columns else (self.matrices, self.m + 2, self.n + 3)
        around = np.full(shape, np.nan, np.float32)
        inner = around[:, 1:-2, 1:-1].swapaxes(1, 2) if by_columns else around[:, 1:-1, 1:-2]
        if beta:
            inner[...] = self.old
        row, col = first
        partials = np.full_like(self.partials, np.nan)
        partials[:, :, : self.m - row, : self.n - col] = self.partials[:, :, row : self.m, col : self.n]
        flat = partials.reshape(self.matrices, -1, self.cols)
        a, b = (
            np.stack([decomposed(*one) for one in zip(*of_all)])
            for of_all in ((self.x, self.scales[0]), (self.y.swapaxes(1, 2), self.scales[1]))
        )
        groups = threads_per_sum(self.shares)
        steps = [one.strides[0] for one in (a, b, inner, self.x, self.y, flat)]
        words = (*steps, self.shares, groups, SLOT_BITS * self.recomputes, int(self.scaled), *first)
        operands = (np.float32(alpha), a[0], b[0], np.float32(beta), inner[0], self.x[0], self.y[0], flat[0], words)
        grid = (-(-(self.m - row) * (self.n - col) // (THREADS // groups)), self.matrices)
        with np.errstate(all="ignore"):
            built = kernel.build(kernel.config, kernel.variant)
            scheduler.run(built, grid, THREADS, (*operands, vectors) if vectors else operands, seed=seed)
        found = inner.copy()
        inner[...] = np.nan
        assert np.isnan(around).all(), "nothing beside C is written"
        return found


@simulated
@pytest.mark.parametrize(
    ("extents", "scaled"),
    covering(
        [(1, 1, 2, 1), (3, 5, 79, 1), (20, 14, 3, 1), (5, 33, 17, 1), (2, 130, 7, 1), (5, 6, 11, 3), (7, 3, 132, 2)],
        [False, True],
    ),
    ids=str,
)
def test_partial_sums_are_added(extents, scaled):
    """With no more error than one rounding, and one each of alpha and beta."""
    m, n, shares, matrices = extents
    case = Added(m, n, shares, matrices=matrices, scaled=scaled)
    exact = case.sums()
    slack = shares * 2.0**-47 * case.sums(np.abs)  # what single additions round off is summed with rounding, too
    assert (np.abs(case.run() - exact) <= UNIT * np.abs(exact) + slack).all()
    for by_columns, seed in ((True, None), (False, 7)):
        np.testing.assert_array_equal(case.run(by_columns=by_columns, seed=seed), case.run())
    found = case.run(1.5, -0.5)
    expected = 1.5 * exact - 0.5 * case.old
    assert (np.abs(found - expected) <= 3 * UNIT * (np.abs(1.5 * exact) + np.abs(0.5 * case.old)) + 2 * slack).all()


@simulated
@pytest.mark.parametrize(
    ("shares", "large", "small", "negative"),
    [(3, 0, 1, 2), (17, 0, 8, 16), (132, 0, 66, 131), (17, 1, 9, 0), (132, 3, 11, 19)],
)
def test_additions_lose_nothing(shares, large, small, negative):
    """Large partial sums cancel each other, of one thread or of two; the one small sum is left."""
    case = Added(1, 2, shares)
    case.partials[0, :, 0, :2] = 0
    case.partials[0, large, 0, :2], case.partials[0, negative, 0, :2] = 2.0**30, -(2.0**30)
    case.partials[0, small, 0, :2] = 1.0, 1 + 2.0**-23
    np.testing.assert_array_equal(case.run()[0, 0], np.float32([1.0, 1 + 2.0**-23]))


@simulated
def test_every_partial_sum_counts_once():
    for shares in (2, 4, 5, 9, 33):
        case = Added(1, shares, shares)
        case.partials[0, :, 0, :shares] = np.eye(shares)
        np.testing.assert_array_equal(case.run()[0, 0], np.ones(shares))


SPECIAL = [np.inf, -np.inf, np.nan, 2.0**126, -np.finfo(np.float32).max]


@simulated
@pytest.mark.parametrize("value", SPECIAL)
@pytest.mark.parametrize("at", [0, 4, 19])
def test_sums_that_are_not_finite_or_near_it_are_recomputed(value, at):
    case = Added(3, 4, 20, k=40)
    case.partials[0, :, 1, 2] = 0
    case.partials[0, at, 1, 2] = value
    found = case.run(beta=0.5, alpha=2.0)
    expected = 2.0 * (case.x[0, 1].astype(np.float64) @ case.y[0, :, 2]) + 0.5 * case.old[0, 1, 2]
    assert found[0, 1, 2] == pytest.approx(expected, rel=1e-5)
    case.x[0, 1, 3] = np.nan
    assert np.isnan(case.run()[0, 1, 2])
    assert np.isnan(case.run()).sum() == 1


@simulated
@pytest.mark.parametrize(("by_columns", "matrices"), [(False, 1), (True, 2)])
def test_special_values_come_out_of_partial_sums_as_in_float32(by_columns, matrices):
    case = Added(6, 9, 20, k=200, matrices=matrices)
    for x, y in zip(case.x, case.y):
        x[0, 3], x[1, 130], x[2, 199], x[3, 64], x[3, 65] = np.nan, np.inf, -np.inf, np.inf, -np.inf
        y[130, 0], y[199, 1], y[64, 2], y[5, 4], y[198, 4], y[150, 5] = 0, 2.0**-140, -1, np.inf, np.inf, -np.inf
        x[4, 70], y[70], y[70, 8] = np.finfo(np.float32).max, 0, 4  # overflows in one column
        x[5] = x[0, ::-1]
    case.x[-1, 1, 2] = -np.inf
    expected = np.stack([*map(float32_sums, case.x, case.y)])
    finite = np.isfinite(expected)
    case.partials[:, 7, : case.m, : case.n][~finite] = np.nan
    exact = case.sums()
    found = case.run(-0.5, by_columns=by_columns)
    np.testing.assert_array_equal(found[~finite], np.float32(-0.5) * expected[~finite])
    np.testing.assert_allclose(found[finite], -0.5 * exact[finite], rtol=1e-5)


@simulated
@pytest.mark.parametrize("others", [1.0, 0.0])
@pytest.mark.parametrize("value", SPECIAL)
def test_sums_that_are_not_finite_stay_in_precisions_of_one_part(value, others):
    case = Added(2, 3, 20, recomputes=False)
    case.partials[0, :, 1, 2] = others
    case.partials[0, 6, 1, 2] = value
    with np.errstate(all="ignore"):
        expected = np.float32(19 * others + np.float64(np.float32(value)))
    np.testing.assert_array_equal(case.run()[0, 1, 2], expected)
    case.partials[0, 7, 1, 2] = -np.inf
    with np.errstate(all="ignore"):
        expected = np.float32(18 * others + np.float64(np.float32(value)) - np.inf)
    np.testing.assert_array_equal(case.run()[0, 1, 2], expected)


@simulated
def test_an_epilogue_is_applied_to_the_whole_sum():
    def shifted_relu(value, row, col, bias):
        return max(value + bias[col], 0.0) + row

    case, bias = Added(3, 40, 18), np.linspace(-4, 4, 40, dtype=np.float32)
    expected = np.maximum(case.sums()[0] + bias, 0) + np.arange(3)[:, None]
    np.testing.assert_allclose(case.run(epilogue=shifted_relu, vectors=(bias,))[0], expected, rtol=1e-6, atol=1e-6)


@simulated
@pytest.mark.parametrize("shares", [3, 20])
@pytest.mark.parametrize("first", [(2, 0), (0, 3), (4, 0)], ids=str)
def test_partial_sums_of_the_last_rows_or_columns(first, shares):
    """With scales, special values and an epilogue, whose indices are those of all of C."""
    row, col = first
    case = Added(5, 9, shares, scaled=True, k=70)
    case.x[0, 4, 66] = np.inf
    with np.errstate(all="ignore"):
        special = float32_sums(case.x[0], case.y[0])[4]
    case.partials[0, 1, 4, : case.n] = np.nan
    exact, bias = case.sums()[0], np.linspace(-4, 4, case.n, dtype=np.float32)
    exact[4] = special

    def with_indices(value, row, col, bias):
        return value + bias[col] + row

    found = case.run(1.5, -0.5, epilogue=with_indices, vectors=(bias,), first=first)
    expected = case.old[0].astype(np.float64)
    indices = np.arange(case.m)[:, None]
    expected[row:, col:] = (1.5 * exact - 0.5 * case.old[0] + bias + indices)[row:, col:]
    np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------- launches


@pytest.mark.parametrize("precision", TENSOR_PRECISIONS)
def test_steps_of_a_split_product(precision):
    """The multiplication writes partial sums behind the operands' parts; another launch adds them."""
    product = dense_product(100, 70, 5000, Batch((1, 1, 3), (0, 0, 4 << 20), (0, 0, 0), (0, 0, 1 << 16)))
    whole = PERSISTENT.launches(SMALL, product, precision, None, GPU)
    made = PERSISTENT.launches(SMALL, product, precision, Partition(4 * 9, 0), GPU)
    *before, multiplies, adds = made.steps
    assert made.multiplication is multiplies
    assert whole.multiplication is whole.steps[-1]
    assert before == list(whole.steps[:-1])
    assert multiplies.kernel is whole.multiplication.kernel
    assert passed(multiplies) == passed(whole.multiplication)
    assert multiplies.grid == (36, 3, 1)
    size = 4 * 9 * 128 * 128
    assert made.scratch_bytes == whole.scratch_bytes + 3 * size
    place, (_, *extents) = multiplies.arguments[4].place, multiplies.arguments[4].words
    assert (place.slot, place.offset) == (Slot.SCRATCH, whole.scratch_bytes)
    assert extents == [9 * 128, 128, 4 * 128, 4]
    (alpha, *parts, beta), (_, *whole_parts, _) = multiplies.arguments[:4], whole.multiplication.arguments[:4]
    assert parts == whole_parts
    assert [struct.pack("<q", word)[:4] for one in (alpha, beta) for word in one.words] == [
        struct.pack("<f", 1.0),
        struct.pack("<f", 0.0),
    ]
    assert multiplies.arguments[7].words[2] == size
    assert adds.arguments[7] == multiplies.arguments[4]
    assert adds.arguments[4] == whole.steps[-1].arguments[4]
    own = TENSOR_PRECISIONS[precision]
    assert adds.arguments[8].words[-7:] == (size, 9, 4, own.slot_bits * (own.parts > 1), own.scaled, 0, 0)
    assert adds.grid == (math.ceil(100 * 70 / 64), 3, 1)
    assert [step.overlaps for step in made.steps][1:] == [True] * (len(made.steps) - 1)


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("precision", ["bf16x6", "fp16x3"])
def test_whole_tiles_come_before_divided_ones(precision, transposed):
    """5 x 3 tiles, or 3 x 5, of which 6 are whole; the rest of C, A and the parts are those of the other 9."""
    m, n, k, shares = 300, 190, 5000, 4
    if transposed:
        m, n = n, m
    product = dense_product(m, n, k)
    whole = PERSISTENT.launches(SMALL, product, precision, None, GPU)
    made = PERSISTENT.launches(SMALL, product, precision, Partition(9 * shares, 6), GPU)
    *before, multiplies, divided, adds = made.steps
    assert before == list(whole.steps[:-1])
    assert [step.overlaps for step in made.steps][1:] == [True] * (len(made.steps) - 1)
    assert made.multiplication is divided
    assert multiplies.kernel is divided.kernel is whole.multiplication.kernel
    assert [step.grid for step in (multiplies, divided)] == [(6, 1, 1), (36, 1, 1)]
    # the first 128 rows, or columns, are computed as in a product of whole tiles
    alpha, a, b, beta, c, x, y, words = whole.multiplication.arguments
    first = c.layout._replace(**{"cols" if transposed else "rows": 128})
    words = words._replace(words=(*words.words[:-1], 6))  # tiles, as blocks that keep in step count them
    first_x = x if transposed else x._replace(layout=x.layout._replace(rows=128))  # as many rows as C has
    assert multiplies.arguments == (alpha, a, b, beta, c._replace(layout=first), first_x, y, words)
    # behind them are the rest of one operand, and its parts
    rest_x, rest_y = divided.arguments[5:7]
    assert rest_x == (x if transposed else x._replace(place=Moving(Slot.A, 4 * k * 128), layout=dense("N", m - 128, k)))
    assert rest_y == (MatrixAt(Moving(Slot.B, 4 * 128), y.layout._replace(cols=n - 128)) if transposed else y)
    for i, mine in ((1, not transposed), (2, transposed)):
        parts, (at, layout) = divided.arguments[i], whole.multiplication.arguments[i]
        assert parts == MatrixAt(Moving(at.slot, at.offset + mine * 128 * ROW_BYTES), layout)
    size = shares * (3 * 64) ** 2
    partials = divided.arguments[4]
    assert partials == adds.arguments[7]
    assert partials.layout[:2] == (shares * 3 * 64, 3 * 64)
    assert partials.place == Moving(Slot.SCRATCH, whole.scratch_bytes)
    assert made.scratch_bytes == whole.scratch_bytes + 4 * size
    # sums are added to the rest of C, whose place in all of C the kernel is told
    assert adds.arguments[:7] == (alpha, a, b, beta, c, x, y)
    assert adds.arguments[8].words[6] == shares
    assert adds.arguments[8].words[-2:] == ((0, 128) if transposed else (128, 0))
    assert adds.grid == (math.ceil((m * (n - 128) if transposed else (m - 128) * n) / THREADS), 1, 1)


def test_whole_tiles_keep_in_step():
    product = dense_product(64 * 30, 64 * 20, 2048)
    made = PERSISTENT.launches(SMALL, product, "bf16x6", Partition(9 * 40, 560), GPU)
    *_, multiplies, divided, _ = made.steps
    assert (made.counters, made.paced) == (1, True)
    assert multiplies.arguments[7].words[-2:] == (Moving(Slot.COUNTERS), 5 * 132)
    assert divided.arguments[7].words[-2:] == (0, 0)


def test_tiles_that_are_no_whole_rows_or_columns_are_refused():
    with pytest.raises(ValueError, match=r"7 of 5 x 3 tiles .* expected a multiple of either extent"):
        PERSISTENT.launches(SMALL, dense_product(300, 190, 5000), "bf16x6", Partition(16, 7), GPU)


def test_a_grid_has_no_more_blocks_than_multiprocessors():
    made = PERSISTENT.launches(SMALL, dense_product(512, 512, 1 << 16), "bf16x6", Partition(64 * 5, 0), GPU)
    assert made.multiplication.grid == (132, 1, 1)


@pytest.mark.parametrize(
    ("blocks", "k", "shares"), [(1, 1000, 1), (5, 1000, 5), (16, 1000, 16), (17, 1000, 16), (132, 64, 1), (3, 1, 1)]
)
def test_a_sum_has_no_more_shares_than_slots(blocks, k, shares):
    product = dense_product(40, 50, k)
    assert PERSISTENT.shares(SMALL, product, "bf16x6", Partition(blocks, 0)) == shares
    steps = PERSISTENT.launches(SMALL, product, "bf16x6", Partition(blocks, 0), GPU).steps
    assert len(steps) == (2 if shares == 1 else 3)


def test_a_stage_that_does_not_split_ignores_a_partition():
    stage = TENSOR_STAGES["warp_mma"]
    product = dense_product(40, 50, 1000)
    made = [stage.launches(stage.configs[0], product, "bf16x6", one, GPU) for one in (None, Partition(8, 0))]
    assert made[0] == made[1]


def test_kernels_are_shared_by_precisions_epilogues_and_whole_sums():
    product = dense_product(40, 50, 5000)
    with_epilogue = dense_product(40, 50, 5000, epilogue=abs)

    def kernels(precision, one, partition=SHARES):
        return [step.kernel for step in PERSISTENT.launches(SMALL, one, precision, partition, GPU).steps]

    multiplies, adds = kernels("bf16x6", product)[-2:]
    assert kernels("bf16x6", product, None)[-1] is multiplies
    assert kernels("bf16x6", with_epilogue)[-2] is multiplies
    assert kernels("bf16x6", with_epilogue, None)[-1] is not multiplies
    assert kernels("bf16x6", with_epilogue)[-1] is not adds
    assert {kernels(precision, product)[-1] for precision in TENSOR_PRECISIONS} == {adds}
    some_whole = dense_product(300, 190, 5000, epilogue=abs, vectors=((1, 4),))
    *_, whole, divided, last = PERSISTENT.launches(SMALL, some_whole, "bf16x6", Partition(9 * 4, 6), GPU).steps
    assert [step.kernel.variant.epilogue for step in (whole, divided, last)] == [abs, None, abs]
    assert [len(step.arguments) for step in (whole, divided, last)] == [9, 8, 10]
    assert divided.kernel is multiplies
    decompositions = {precision: kernels(precision, product)[-3] for precision in TENSOR_PRECISIONS}
    assert decompositions["bf16x6"] is decompositions["bf16x9"] is kernels("bf16x6", dense_product(40, 50, 70), None)[0]
    assert len({*decompositions.values()}) == len(TENSOR_PRECISIONS) - 1


# ------------------------------------------------------------------------------------------------------------ choices


@pytest.mark.parametrize("precision", ["bf16x6", "fp16x3", "bf16"])
@pytest.mark.parametrize(
    ("extents", "divided"),
    [
        ((64, 64, 65536), True),
        ((31, 33, 100003), True),
        ((1, 1, 5000), True),
        ((512, 512, 16384), True),
        ((64, 64, 2047), True),
        ((64, 64, 191), False),
        ((1, 1, 1), False),
        ((4096, 4096, 64), False),
        ((1024, 1024, 1024), False),
        ((8192, 8192, 65536), False),
        ((2048, 2048, 2048), False),
    ],
)
def test_sums_are_divided_if_few_tiles_have_long_ones(precision, extents, divided):
    choice = heuristics.named("persistent", Problem(*extents, precision=precision))
    assert (choice.partition is not None) == divided
    assert ("divided among" in choice.reason) == divided


# On an H200, the first took 17.7 us divided among 128 blocks and 24.3 by tensor maps; the second, 63 and 47.
@pytest.mark.parametrize(
    ("extents", "layouts", "divided"), [((116, 986, 2995), "TT", True), ((1845, 5, 8825), "NN", False)]
)
def test_operands_in_tf32_are_decomposed_if_that_is_sooner(monkeypatch, extents, layouts, divided):
    monkeypatch.setattr(precisions, "SIMULATOR", False)
    choice = heuristics.choose(Problem(*extents, precision="tf32", tma=layouts))
    assert (choice.stage.name == "persistent") == divided


# On an H200, these took 67 us instead of 76, 85 instead of 99, 316 instead of 373, 200 instead of 239 with divided sums
# for all tiles, and 2044 instead of 2210.
@pytest.mark.parametrize(
    ("extents", "precision", "whole"),
    [
        ((1536, 1536, 1536), "fp16x3", 132),
        ((2304, 1024, 2048), "fp16x3", 128),
        ((2500, 2500, 2500), "tf32x3", 380),
        ((1600, 1600, 5000), "fp16x3", 130),
        ((290, 13610, 16758), "bf16x6", 525),
    ],
)
def test_whole_tiles_in_full_rounds_leave_a_rest_that_is_divided(monkeypatch, extents, precision, whole):
    monkeypatch.setattr(precisions, "SIMULATOR", False)
    wanted = Problem(*extents, precision=precision)
    choice = heuristics.choose(wanted)
    config, (blocks, found) = choice.config, choice.partition
    rows, cols = -(-extents[0] // config.BM), -(-extents[1] // config.BN)
    rest = rows * cols - whole
    assert found == whole
    assert whole % rows == 0 or whole % cols == 0
    assert blocks % rest == 0
    assert 2 <= blocks // rest <= 132 // rest
    assert f"{rows * cols} tiles of {config.BM}x{config.BN}" in choice.reason
    assert f"the last {rest} divided among {blocks // rest} blocks along K" in choice.reason
    assert heuristics.best(wanted)._replace(reason=choice.reason) == choice
    told = explain_shape(*extents, precision=precision)
    assert (told.whole_tiles, told.split, told.blocks) == (whole, blocks // rest, blocks)
    # an epilogue is applied by both launches that write C; in a batch, all tiles are divided or none
    assert any(one.partition == choice.partition for one in heuristics.ranked(wanted._replace(epilogue=True)))
    batch = heuristics.ranked(wanted._replace(matrices=2), choice.stage)
    assert all(one.partition is None or not one.partition.whole for one in batch)


def test_whole_tiles_before_divided_ones_may_write_single_floats():
    """8006x355x2061 with an unaligned C takes 153 us in fp16x3 with both, and 148 us with whole tiles alone (H200)."""
    found = [
        {
            way[1:]: way[0]
            for way in tensor_heuristics.seconds_of(PERSISTENT, "fp16x3", *3 * [1536], 1, 132, "", written=one)
        }
        for one in ((1536, 1536, True), (1536, 1536, False))
    ]
    longer = found[1][PERSISTENT.configs[0], Partition(72, 132)] - found[0][PERSISTENT.configs[0], Partition(72, 132)]
    assert longer == pytest.approx(tensor_heuristics.WRITE_ONE * 128 * 128)
    longer = found[1][PERSISTENT.configs[0], None] - found[0][PERSISTENT.configs[0], None]
    assert longer == pytest.approx(2 * tensor_heuristics.WRITE_ONE * 128 * 128)


@pytest.mark.parametrize("precision", ["bf16x6", "fp16x3", "tf32x3"])
def test_shares_of_tiles_take_some_rounds_if_sums_are_long(precision):
    """1100x1100x8000 has 81 tiles of 128x128, for 132 multiprocessors; 243 thirds of tiles take two rounds."""
    ways = tensor_heuristics.seconds_of(PERSISTENT, precision, 1100, 1100, 8000, 1, 132, "")
    assert Partition(243, 0) in [partition for _, _, partition in ways]
    assert ways[0][2] is not None


def test_rows_of_bf16_have_whole_tiles_or_divided_ones():
    """With few shares per tile, both together were slower."""
    for extents in ((4096, 768, 3072), (4096, 768, 7168), (20000, 64, 12000)):
        found = tensor_heuristics.seconds_of(ROWS, "bf16x6", *extents, 1, 132, "", narrow_a=True)
        assert all(partition is None or (partition.blocks <= 132 and not partition.whole) for _, _, partition in found)


def test_one_product_of_parts_is_divided_among_blocks_of_one_round_alone():
    for extents in ((1536, 1536, 1536), (1100, 1100, 8000), (3000, 900, 6000)):
        ways = tensor_heuristics.seconds_of(PERSISTENT, "bf16", *extents, 1, 132, "")
        assert all(partition is None or partition.blocks <= 132 for _, _, partition in ways)
        assert all(partition is None or not partition.whole for _, _, partition in ways)


# On an H200, 74x1x828 takes 5.9 us in bf16, and 6.1 us divided among eight blocks; 376x10x460 takes 9.1 us in bf16x3,
# and 7.0 us divided among 48.
@pytest.mark.parametrize(
    ("precision", "divided"), [("bf16x6", True), ("fp16x3", True), ("bf16x3", True), ("bf16", False)]
)
def test_a_thousand_terms_are_divided_in_precisions_with_several_products(precision, divided):
    choice = heuristics.named("persistent", Problem(64, 64, 1023, precision=precision))
    assert (choice.partition is not None) == divided


def test_a_division_is_faster_by_a_clear_margin():
    for extents in ((512, 512, 1024), (256, 256, 1025), (64, 64, 4000), (768, 768, 2048), (1000, 40, 3000)):
        ways = tensor_heuristics.seconds_of(PERSISTENT, "bf16x6", *extents, 1, 132, "")
        whole = min(seconds for seconds, _, partition in ways if partition is None)
        divided = min(seconds for seconds, _, partition in ways if partition is not None)
        assert (ways[0][2] is not None) == (divided * tensor_heuristics.CLEAR_MARGIN < whole)
        assert ways[0][0] == (divided if ways[0][2] else whole)


@pytest.mark.parametrize("precision", TENSOR_PRECISIONS)
@pytest.mark.parametrize(("k", "divided"), [(191, False), (192, True)])
def test_terms_from_which_on_sums_are_divided(k, divided, precision):
    ways = tensor_heuristics.seconds_of(PERSISTENT, precision, 256, 256, k, 1, 132, "")
    assert any(partition is not None for *_, partition in ways) == divided


@pytest.mark.parametrize("matrices", [1, 3, 50, 200])
def test_blocks_of_a_divided_batch_fit_on_the_gpu_at_once(matrices):
    for seconds, config, partition in tensor_heuristics.seconds_of(
        PERSISTENT, "bf16x6", 100, 200, 1 << 16, matrices, 132, ""
    ):
        tiles = -(-100 // config.BM) * -(-200 // config.BN)
        assert seconds > 0
        assert partition is None or partition.blocks * matrices <= 132
        assert partition is None or partition.blocks % tiles == 0


@pytest.mark.parametrize(
    ("extents", "divided"),
    [((68, 100, 65536), True), ((100, 200, 8192), True), ((64, 60, 512), False), ((512, 508, 1024), False)],
)
def test_operands_of_tensor_maps_are_decomposed_if_that_divides_long_sums(monkeypatch, extents, divided):
    monkeypatch.setattr(precisions, "SIMULATOR", False)
    wanted = Problem(*extents, precision="tf32", tma="NN")
    choice = heuristics.choose(wanted)
    assert (choice.stage.name, choice.partition is not None) == (
        ("persistent", True) if divided else ("tf32_tma", False)
    )
    assert heuristics.best(wanted)._replace(reason=choice.reason) == choice
    maps = heuristics.named("tf32_tma", wanted)
    assert (choice.clocks < maps.clocks) == divided
    assert ("operands decomposed first" in choice.reason) == divided
    assert heuristics.ranked(wanted)[0].selected == choice.selected


def test_stages_that_do_not_split_are_not_divided():
    for name in ("warp_mma", "fresh_sums"):
        assert heuristics.named(name, Problem(64, 64, 65536, precision="bf16x6")).partition is None
    choice = heuristics.named("tf32_tma", Problem(64, 64, 65536, precision="tf32", tma="NN"))
    assert choice.partition is None


# -------------------------------------------------------------------------------------------------------- on a GPU

SHAPES = [(1, 1, 5000), (31, 33, 3001), (64, 64, 65536), (31, 33, 100003), (128, 128, 1024), (200, 130, 4097)]


def exact_and_size(a, b):
    return a.double() @ b.double(), a.double().abs() @ b.double().abs()


def worst(found, exact, allowed):
    """Return the largest error in units of what is allowed, and its place."""
    error = ((found.double() - exact).abs() / allowed).cpu().numpy()
    place = np.unravel_index(np.argmax(error), error.shape)
    return float(error[place]), place


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("precision", TENSOR_PRECISIONS)
def test_a_split_product(precision, shape, layout):
    """In all layouts, from odd addresses, into a C within a larger array that holds NaN before."""
    import torch

    torch.manual_seed(shape[2])
    m, n, k = shape
    a = torch.randn(m, k + 1, device="cuda")[:, 1:] if layout[0] == "N" else torch.randn(k, m, device="cuda").T
    b = torch.randn(k, n + 1, device="cuda")[:, 1:] if layout[1] == "N" else torch.randn(n, k, device="cuda").T
    exact, size = exact_and_size(a, b)
    guarded = torch.full((m + 2, n + 3), float("nan"), device="cuda")
    c = guarded[1:-1, 1:-2]
    results = []
    for _ in range(3):  # in full, and as cached calls
        c.fill_(float("nan"))
        numba_gemm.tiled_sgemm(a, b, c, precision=precision, stage="persistent")
        results.append(c.clone())
    error, place = worst(results[0], exact, (tensor_bound(precision, k) + 2 * UNIT) * size)
    assert error <= 1, f"C{[*map(int, place)]} has an error of {error:.3g} bounds"
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    c.fill_(float("nan"))
    assert torch.isnan(guarded).all(), "nothing beside C is written"


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("shares", [2, 3, 16, 79, 132, 1000])
@pytest.mark.parametrize("index", range(len(PERSISTENT.configs)))
@pytest.mark.parametrize("precision", ["bf16x6", "fp16x3", "bf16", "tf32x3"])
def test_every_configuration_with_every_number_of_shares(precision, index, shares):
    """Also more shares than multiprocessors, and more than slots."""
    import torch
    from support.tensor_core_cases import precisions_of

    from numba_gemm.runtime.device import synchronize
    from numba_gemm.runtime.launch import launch

    if precision not in precisions_of("persistent", index):
        pytest.skip("no such kernel")
    config, (m, n, k) = PERSISTENT.configs[index], (70, 100, 5003)
    a, b = torch.randn(m, k, device="cuda"), torch.randn(k, n, device="cuda")
    c = torch.full((m, n), float("nan"), device="cuda")
    torch.cuda.synchronize()
    x, y, z = map(tensor_matrix, (a, b, c))
    tiles = -(-m // config.BM) * -(-n // config.BN)
    launch(PERSISTENT, config, 1.0, x, y, 0.0, z, precision=precision, partition=Partition(shares * tiles, 0))
    synchronize()
    error, place = worst(c, *(lambda exact, size: (exact, tensor_bound(precision, k) * size))(*exact_and_size(a, b)))
    assert error <= 1, f"C{[*map(int, place)]} has an error of {error:.3g} bounds"


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("name", "index", "precision", "by_columns", "layout", "shares"),
    covering(
        ["persistent", "rows_in_registers"],
        range(2),
        ["bf16x6", "fp16x3", "bf16", "tf32x3"],
        [False, True],
        ["NN", "NT", "TN", "TT"],
        [2, 5, 40],
    ),
)
def test_whole_tiles_and_divided_ones(name, index, precision, by_columns, layout, shares):
    """With alpha and beta, and elements of all kinds on both sides of the boundary, into a C within an array."""
    import torch

    from numba_gemm.runtime.launch import launch

    stage = TENSOR_STAGES[name]
    precision = "bf16x6" if name == "rows_in_registers" else precision
    config, (m, n, k) = stage.configs[index], (700, 520, 3001)
    a = torch.randn(m, k, device="cuda") if layout[0] == "N" else torch.randn(k, m, device="cuda").T
    b = torch.randn(k, n, device="cuda") if layout[1] == "N" else torch.randn(n, k, device="cuda").T
    a[3, 7], a[690, 1], b[9, 20], b[5, 500], a[600, 2990] = math.inf, math.nan, -math.inf, math.inf, -math.inf
    before = torch.randn(m, n, device="cuda")
    guarded = torch.full((m + 2, n + 3), float("nan"), device="cuda")
    c = guarded[1:-1, 1:-2]
    rows, cols = -(-m // config.BM), -(-n // config.BN)
    whole = rows * 2 if by_columns else cols * 3
    partition, found = Partition((rows * cols - whole) * shares, whole), []
    for _ in range(2):
        c.copy_(before)
        torch.cuda.synchronize()
        x, y, z = map(tensor_matrix, (a, b, c))
        launch(stage, config, 1.5, x, y, -0.5, z, precision=precision, partition=partition)
        torch.cuda.synchronize()
        found.append(c.clone())
    exact = 1.5 * (a.double() @ b.double()) - 0.5 * before.double()
    special = ~exact.isfinite()
    assert special.sum() > m + n
    torch.testing.assert_close(found[0][special].double(), exact[special], rtol=0, atol=0, equal_nan=True)
    size = 1.5 * (a.double().abs() @ b.double().abs()) + 0.5 * before.double().abs()
    error = (found[0].double() - exact).abs() / ((tensor_bound(precision, k) + 4 * UNIT) * size)
    assert float(error[~special].max()) <= 1
    assert torch.equal(found[0].nan_to_num(7.0), found[1].nan_to_num(7.0))
    c.fill_(float("nan"))
    assert torch.isnan(guarded).all(), "nothing beside C is written"


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("extents", "precision", "narrow"),
    [
        ((1536, 1536, 1536), "fp16x3", False),
        ((1600, 1600, 5000), "tf32x3", False),
        ((20000, 64, 3000), "bf16x6", False),
        ((64, 20000, 3000), "bf16x6", False),
        ((200, 18944, 4096), "fp16x3", False),
        ((1100, 1100, 8000), "bf16x6", False),
        ((20000, 64, 3000), "bf16x6", True),
    ],
)
def test_divided_rests_in_all_ways_of_calling(extents, precision, narrow):
    """A first call and others, on another stream, by plans, in graphs, and with prepared operands: the same bits."""
    import torch

    (m, n, k), options = extents, {"precision": precision}
    a, b = torch.randn(m, k, device="cuda"), torch.randn(k, n, device="cuda")
    a = a.bfloat16() if narrow else a
    told = numba_gemm.explain(a, b, **options)
    assert (told.split > 1) != narrow
    assert (told.whole_tiles > 0) == (m != 1100)
    expected = numba_gemm.tiled_sgemm(a, b, **options)
    exact, size = exact_and_size(a, b)
    assert worst(expected, exact, (tensor_bound(precision, k) + UNIT) * size)[0] <= 1
    out, stream = torch.empty_like(expected), torch.cuda.Stream()
    planned = numba_gemm.plan(m, n, k, dtype=("bfloat16", "float32") if narrow else "float32", **options)
    weights = numba_gemm.prepare(b, precision)
    left = a if narrow else numba_gemm.prepare(a, precision, side="a")

    def in_graph():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            numba_gemm.tiled_sgemm(a, b, out, **options)
        graph.replay()

    def on_stream():
        with torch.cuda.stream(stream):
            numba_gemm.tiled_sgemm(a, b, out, **options)

    ways = {
        "again": lambda: numba_gemm.tiled_sgemm(a, b, out, **options),
        "moved": lambda: numba_gemm.tiled_sgemm(a.clone(), b.clone(), out, **options),
        "stream": on_stream,
        "graph": in_graph,
        "plan": lambda: planned(a, b, out),
        "B is prepared": lambda: numba_gemm.tiled_sgemm(a, weights, out, **options),
        "A is prepared": lambda: numba_gemm.tiled_sgemm(left, b, out, **options),
        "both are prepared": lambda: numba_gemm.tiled_sgemm(left, weights, out, **options),
    }
    for name, way in ways.items():
        for _ in range(3):
            torch.cuda.synchronize()
            out.fill_(float("nan"))
            torch.cuda.synchronize()
            way()
            torch.cuda.synchronize()
            assert torch.equal(out, expected), name


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("beta", [0.0, -0.5])
@pytest.mark.parametrize(
    ("extents", "precision"),
    [
        ((1536, 1536, 1536), "fp16x3"),
        ((1600, 1600, 5000), "tf32x3"),
        ((20000, 64, 3000), "bf16x6"),
        ((200, 18944, 4096), "fp16x3"),
    ],
)
def test_an_epilogue_of_divided_rests(extents, precision, beta):
    """It is given rows and columns of all of C, also in repeated calls, plans and graphs."""
    import torch

    def with_indices(value, row, col, by_row, by_col):
        return value + by_row[row] * by_col[col]

    m, n, k = extents
    a, b, before = (torch.randn(*shape, device="cuda") for shape in ((m, k), (k, n), (m, n)))
    a[m - 1, 3], b[5, n - 1], b[k - 1, 0] = math.inf, math.nan, math.inf
    vectors = torch.randn(m, device="cuda"), torch.randn(n, device="cuda")
    out, own = before.clone(), {"alpha": 1.5, "beta": beta, "epilogue_args": vectors}
    options = {"precision": precision, "epilogue": with_indices}
    told = numba_gemm.explain(a, b, **options, epilogue_args=vectors)
    assert (told.whole_tiles > 0, told.split > 1) == (True, True)
    planned = numba_gemm.plan(m, n, k, **options)

    def in_graph():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            numba_gemm.tiled_sgemm(a, b, out, **own, **options)
        graph.replay()

    found = []
    for way in (
        lambda: numba_gemm.tiled_sgemm(a, b, out, **own, **options),
        lambda: numba_gemm.tiled_sgemm(a, b, out, **own, **options),
        lambda: numba_gemm.tiled_sgemm(a.clone(), b, out, **own, **options),
        in_graph,
        lambda: planned(a, b, out, **own),
    ):
        out.copy_(before)
        torch.cuda.synchronize()
        way()
        torch.cuda.synchronize()
        found.append(out.clone())
    assert all(torch.equal(one.nan_to_num(7.0), found[0].nan_to_num(7.0)) for one in found)
    exact, size = exact_and_size(a, b)
    added = vectors[0].double()[:, None] * vectors[1].double()
    expected = 1.5 * exact + beta * before.double() + added
    special = ~expected.isfinite()
    assert special.sum() >= m + n
    torch.testing.assert_close(found[0][special].double(), expected[special], rtol=0, atol=0, equal_nan=True)
    size = 1.5 * size + abs(beta) * before.double().abs() + added.abs()
    error = (found[0].double() - expected).abs() / ((tensor_bound(precision, k) + 4 * UNIT) * size)
    assert float(error[~special].max()) <= 1


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("precision", TENSOR_PRECISIONS)
def test_alpha_beta_batches_and_epilogues_of_split_products(precision):
    import torch

    def bias_relu(value, row, column, bias):
        return max(value + bias[column], 0.0)

    m, n, k = 70, 90, 9001
    a, b = torch.randn(2, m, k, device="cuda"), torch.randn(k, n, device="cuda")
    before, bias = torch.randn(2, m, n, device="cuda"), torch.randn(n, device="cuda")
    exact, size = exact_and_size(a, b)
    unit = tensor_bound(precision, k) + 4 * UNIT
    c = before.clone()
    options = {"precision": precision, "stage": "persistent"}
    numba_gemm.tiled_sgemm(a, b, c, alpha=1.5, beta=-0.5, **options)
    error, _ = worst(c, 1.5 * exact - 0.5 * before.double(), unit * (1.5 * size + 0.5 * before.double().abs()))
    assert error <= 1
    found = numba_gemm.tiled_sgemm(a, b, epilogue=bias_relu, epilogue_args=(bias,), **options)
    error, _ = worst(found, torch.relu(exact + bias), unit * (size + bias.abs()))
    assert error <= 1
    halves = numba_gemm.tiled_sgemm(a[0].half(), b.bfloat16(), **options)
    exact, size = exact_and_size(a[0].half(), b.bfloat16())
    assert worst(halves, exact, unit * size)[0] <= 1
    planned = numba_gemm.plan(m, n, k, precision=precision, stage="persistent")
    memory = torch.full((planned.workspace_bytes // 4,), float("nan"), device="cuda")
    own = numba_gemm.plan(m, n, k, precision=precision, stage="persistent", workspace=memory)
    assert torch.equal(planned(a[0], b), own(a[0], b))
    assert torch.equal(planned(a[0], b), numba_gemm.tiled_sgemm(a[0], b, **options))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("precision", ["bf16x6", "fp16x3", "bf16"])
def test_split_products_follow_each_other_on_a_stream_and_in_a_graph(precision):
    import torch

    how = {"precision": precision, "stage": "auto" if precision == "bf16x6" else "persistent"}

    extents = [(64, 64, 20000), (1000, 900, 70), (40, 300, 9000), (17, 33, 4001)]
    operands = [(torch.randn(m, k, device="cuda"), torch.randn(k, n, device="cuda")) for m, n, k in extents]
    outs = [torch.empty(m, n, device="cuda") for m, n, _ in extents]
    expected = [numba_gemm.tiled_sgemm(a, b, **how).clone() for a, b in operands]

    def all_of_them():
        for (a, b), out in zip(operands, outs, strict=True):
            numba_gemm.tiled_sgemm(a, b, out, **how)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_of_them()
    for run in [all_of_them] * 5 + [graph.replay] * 5:
        for out in outs:
            out.fill_(float("nan"))
        run()
        torch.cuda.synchronize()
        assert all(torch.equal(out, right) for out, right in zip(outs, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("precision", [*FULL_RANGE, "fp16x3"])
def test_special_values_in_split_products(precision, beta):
    import torch

    generator = np.random.default_rng(2)
    a, b = (generator.standard_normal(extents).astype(np.float32) for extents in ((70, 6000), (6000, 50)))
    a[3, 7], a[50, 1], b[9, 20], a[20, 5990] = np.inf, np.nan, -np.inf, -np.inf
    b[7, :30] = 0  # an infinity times zero
    c = generator.standard_normal((70, 50)).astype(np.float32)
    out = torch.from_numpy(c).cuda()
    options = {"beta": beta, "precision": precision, "stage": "persistent"}
    found = numba_gemm.tiled_sgemm(torch.from_numpy(a).cuda(), torch.from_numpy(b).cuda(), out, **options).cpu().numpy()
    with np.errstate(all="ignore"):
        expected = a.astype(np.float64) @ b.astype(np.float64) + beta * c
        size = np.abs(a.astype(np.float64)) @ np.abs(b) + np.abs(c)
    special = ~np.isfinite(expected)
    assert special.any()
    np.testing.assert_array_equal(found[special], expected[special].astype(np.float32))
    allowed = 2.0**-18 + tensor_bound(precision, 6000)
    assert (np.abs(found[~special] - expected[~special]) <= allowed * size[~special]).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("shape", [(64, 64, 65536), (128, 96, 8192)])
@pytest.mark.parametrize("distribution", accuracy.DISTRIBUTIONS)
def test_split_sums_are_no_less_accurate_than_cublas(distribution, shape):
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    a, b = accuracy.operands(distribution, *shape, seed=3)
    x, y = torch.from_numpy(a).cuda(), torch.from_numpy(b).cuda()
    exact, size = exact_and_size(x, y)
    size = torch.where(size == 0, 1.0, size)
    ours, theirs = (
        (found.double() - exact).abs() / size
        for found in (numba_gemm.tiled_sgemm(x, y, precision="bf16x6"), torch.matmul(x, y))
    )
    assert ours.median() <= theirs.median()
    assert ours.max() <= theirs.max()
    assert ours.max() <= tensor_bound("bf16x6", shape[2])


def test_precision_of_the_whole_sum_decides_on_short_ones():
    """A long sum's shares may be shorter than a short sum, and are computed as the long sum."""
    made = PERSISTENT.launches(SMALL, dense_product(40, 50, 2048), "bf16x6", Partition(32, 0), GPU)
    assert made.multiplication.kernel.variant.precision is precision_for("bf16x6", 2048)
    assert not made.multiplication.kernel.variant.precision.stepwise
