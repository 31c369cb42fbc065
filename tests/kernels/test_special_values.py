"""Sums with NaN and infinities among their operands, in the precisions of tensor cores with several parts."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.covering import covering
from support.simulated_parts import (
    LAYOUTS,
    Warp,
    float32_sums,
    marks_of,
    reciprocals_in,
    recomposed,
    simulated_decomposition,
)

from numba_gemm.device.units import WARP
from numba_gemm.kernels.tensor_core import TENSOR_PRECISIONS
from numba_gemm.kernels.tensor_core.config import MARKED_WORDS, ORDINARY, ROW_WORDS
from numba_gemm.simulator.switch import SIMULATOR

pytestmark = pytest.mark.skipif(not SIMULATOR, reason="runs on the simulator")

PRECISIONS = {name: one for name, one in TENSOR_PRECISIONS.items() if one.parts > 1}
NAN, INF, LARGEST = np.nan, np.inf, float(np.finfo(np.float32).max)
ABOVE = float(np.nextafter(np.float32(ORDINARY), np.float32(INF)))
K = 150  # three slots of 64 terms or five of 32, the last one partly filled


# --------------------------------------------------------------------------------------------------------------- marks


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=lambda precision: precision.name)
def test_slots_with_elements_that_are_not_ordinary_are_marked(precision, layout):
    generator = np.random.default_rng(1)
    x, y = (generator.standard_normal((mn, K)).astype(np.float32) for mn in (40, 3))
    marked = [NAN, INF, -INF, ABOVE, -ABOVE, LARGEST]
    ordinary = [0.0, -0.0, ORDINARY, -ORDINARY, 2.0**-149, 2.0**-130]
    for row, value in enumerate([*marked, *ordinary]):
        x[row, 13 * row % K] = value
    x[39, K - 1], x[38, 0], x[38, 70], y[2, 64] = NAN, INF, INF, NAN
    operands = [LAYOUTS[layout](one) for one in (x, y)]
    for parts, one, count in zip(simulated_decomposition(precision, *operands), operands, (len(marked) + 3, 1)):
        mn, slots = one.shape[0], parts.shape[0] // precision.parts
        marks = parts[:slots, ROW_WORDS * (parts.shape[1] // MARKED_WORDS) :]
        np.testing.assert_array_equal(marks[:, :mn] > 0, marks_of(one, precision.slot_bits)[:, ROW_WORDS * mn :])
        assert (marks != 0).sum() == count


def test_ordinary_elements_cannot_overflow():
    from numba_gemm.kernels.stage import MAX_K

    assert ORDINARY**2 * MAX_K <= 2.0**126


# ----------------------------------------------------------------------------------------------------- infinite terms


def sums_of(x, y, rows, cols, slot_bits, row=0, col=0, wanted=None):
    """Yield the position in C and the value of each of a thread's sums, of `rows` rows and `cols` columns."""
    from numba_gemm.kernels.tensor_core.special_values import infinite_terms, special_sums

    a, b = marks_of(x, slot_bits), marks_of(y.T, slot_bits)
    every = (1 << rows * cols) - 1 if wanted is None else wanted
    places = [[(row + 8 * i, col + j // 2 * 8 + j % 2) for j in range(cols)] for i in range(rows)]
    with np.errstate(all="ignore"):
        found = infinite_terms(rows, cols)(np.uint64(every), a, b, x, y, row, col, slot_bits, True)
        for i in range(rows):
            for j in range(cols):
                at, bit = places[i][j], np.uint64(1 << i * cols + j)
                if every & int(bit) and at[0] < x.shape[0] and at[1] < y.shape[1]:
                    yield at, special_sums()(bit, found, x, y, *at)


SPECIAL = [NAN, INF, -INF, LARGEST, -LARGEST, ABOVE, ORDINARY, 1e30, 2.0**-130, 0.0, -0.0]
GEOMETRIES = [(2, 2), (2, 8), (4, 8), (1, 1)]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), geometry=st.sampled_from(GEOMETRIES), slot_bits=st.sampled_from([5, 6]))
def test_sums_have_the_class_of_float32_sums(data, geometry, slot_bits):
    """Whatever is special in a few places, small integers elsewhere make all finite sums exact."""
    m, n = (data.draw(st.sampled_from([1, 2, 9, 20])) for _ in range(2))
    k = data.draw(st.integers(1, K))
    generator = np.random.default_rng(data.draw(st.integers(0, 99)))
    x, y = (generator.integers(-2, 3, extents).astype(np.float32) for extents in ((m, k), (k, n)))
    places = st.tuples(st.integers(0, 19), st.integers(0, K - 1), st.sampled_from(SPECIAL), st.booleans())
    for line, at, value, of_x in data.draw(st.lists(places, max_size=12)):
        if of_x:
            x[line % m, at % k] = value
        else:
            y[at % k, line % n] = value
    expected = float32_sums(x, y)
    row, col = data.draw(st.integers(0, min(m - 1, 7))), data.draw(st.integers(0, n - 1)) // 2 * 2
    for at, found in sums_of(x, y, *geometry, slot_bits, row, col):
        np.testing.assert_equal(found, expected[at], err_msg=f"element {at}")


class Lanes:
    """Stands in for `cuda`: lanes of a warp, one thread each, that all exchange values at the same points."""

    def __init__(self) -> None:
        self.threadIdx = threading.local()
        self.values = [0] * WARP
        self.barrier = threading.Barrier(WARP, timeout=20)

    def exchange(self, kind, mask, value):
        """Return what all lanes pass; they must call the same function."""
        assert mask == 0xFFFFFFFF
        self.barrier.wait()  # all have read before any writes its next value
        self.values[self.threadIdx.x % WARP] = kind, value
        self.barrier.wait()  # all have written before any reads
        kinds, values = zip(*self.values)
        assert set(kinds) == {kind}
        return values

    def shfl_sync(self, mask, value, lane):
        assert 0 <= lane < WARP
        return self.exchange("shfl_sync", mask, value)[lane]

    def any_sync(self, mask, condition):
        return any(self.exchange("any_sync", mask, condition))

    def run(self, of_lane):
        def run(lane):
            self.threadIdx.x = WARP + lane  # in the second warp of a block
            return of_lane(lane)

        with ThreadPoolExecutor(WARP) as pool:
            return [*pool.map(run, range(WARP))]


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize(("rows", "cols", "slot_bits"), [(2, 6, 5), (2, 16, 6), (4, 12, 6)])
def test_lanes_search_for_each_other(rows, cols, slot_bits, marked, monkeypatch):
    """Also lanes whose sums are not wanted, or do not exist, take part."""
    from numba_gemm.kernels.tensor_core import special_values
    from numba_gemm.kernels.tensor_core.special_values import infinite_terms, special_sums

    generator, k, top, left = np.random.default_rng(6), 700, 16, 8  # the first row and column of the warp
    m, n = top + 8 * rows - 3, left + 4 * cols - 2
    x, y = (generator.integers(-2, 3, extents).astype(np.float32) for extents in ((m, k), (k, n)))
    for one in (x[top:], y.T[left:]):
        for value in (NAN, INF, -INF, INF, -INF, LARGEST, INF):
            one[generator.integers(0, len(one), 2), generator.integers(0, k, 2)] = value
    a, b = marks_of(x, slot_bits) if marked else None, marks_of(y.T, slot_bits)
    wanted = [int(each) for each in generator.integers(0, 1 << rows * cols, WARP) * (generator.random(WARP) < 0.8)]
    lanes = Lanes()
    monkeypatch.setattr(special_values, "cuda", lanes)
    ahead, team = special_values.AHEAD_IN_WARP, special_values.lanes_of_warp
    terms, expected = infinite_terms(rows, cols, ahead, team), float32_sums(x, y)

    def of_lane(lane):
        at = top + lane // 4, left + lane % 4 * 2
        with np.errstate(all="ignore"):
            return terms(np.uint64(wanted[lane]), a, b, x, y, *at, slot_bits, marked)

    found, special = lanes.run(of_lane), 0
    for lane, (i, j) in itertools.product(range(WARP), itertools.product(range(rows), range(cols))):
        at, bit = (top + lane // 4 + 8 * i, left + lane % 4 * 2 + j // 2 * 8 + j % 2), 1 << cols * i + j
        if wanted[lane] & bit and at[0] < m and at[1] < n:
            with np.errstate(all="ignore"):
                value = special_sums()(np.uint64(bit), found[lane], x, y, *at)
            np.testing.assert_equal(value, expected[at], err_msg=f"element {at}")
            special += not np.isfinite(expected[at])
    assert special > 50


def test_sums_of_nothing_are_zero():
    x, y = np.zeros((3, 0), np.float32), np.zeros((0, 3), np.float32)
    assert [found for _, found in sums_of(x, y, 1, 2, 6)] == [0, 0]


class Counted(np.ndarray):
    """Counts elements that are read."""

    reads = 0

    def __getitem__(self, place):
        value = super().__getitem__(place)
        Counted.reads += not isinstance(value, np.ndarray)
        return value


@pytest.mark.parametrize("of_x", [True, False])
@pytest.mark.parametrize(
    ("values", "most"),
    [
        ([INF], 64 + 2 * 64),
        ([-INF] * 3, 3 * (64 + 2 * 64)),
        ([NAN], 64 + 2 * 64),
        ([NAN] * 200, 64 + 2 * 64),
        ([INF, -INF] * 100, 2 * (64 + 2 * 64)),
    ],
)
def test_few_elements_are_read_where_something_is_special(of_x, values, most):
    """In each row of A, or column of B: a slot, and one column of A or row of B for each special element in it."""
    k = 3_000
    x, y = np.ones((16, k), np.float32), np.ones((k, 128), np.float32)
    places = 100 + 9 * np.arange(len(values))
    if of_x:
        x[:, places] = values
    else:
        y[places] = np.float32(values)[:, None]
    expected = float32_sums(x, y)
    lines = 2 if of_x else 32
    Counted.reads = 0
    with np.errstate(all="ignore"):
        for at, found in sums_of(x.view(Counted), y.view(Counted), 2, 32, 6):
            np.testing.assert_equal(found, expected[at])
    overlap = 2  # a search that goes on reads the elements around the last one found again
    assert 0 < Counted.reads <= overlap * lines * most


def test_a_search_ends_where_sums_must_be_recomputed():
    from numba_gemm.kernels.tensor_core.special_values import AHEAD, infinite_terms

    x, y = np.full((16, 1000), 1e20, np.float32), np.full((1000, 128), 1e20, np.float32)
    every = np.uint64((1 << 64) - 1)
    Counted.reads = 0
    with np.errstate(all="ignore"):
        operands = x.view(Counted), y.view(Counted)
        *_, large = infinite_terms(2, 32)(every, marks_of(x, 6), marks_of(y.T, 6), *operands, 0, 0, 6, True)
    assert large == every
    assert 0 < Counted.reads <= 2 * (AHEAD + 1)  # one element of each row; no column is searched


def test_sums_that_are_not_wanted_cost_nothing():
    x, y = np.ones((16, 1000), np.float32), np.ones((1000, 16), np.float32)
    x[8], y[:, 9] = NAN, INF
    Counted.reads = 0
    assert [*sums_of(x.view(Counted), y.view(Counted), 2, 4, 6, wanted=0)] == []
    assert Counted.reads == 0
    ((at, found),) = sums_of(x.view(Counted), y.view(Counted), 2, 4, 6, wanted=1 << 4)
    assert at == (8, 0)
    assert np.isnan(found)
    assert Counted.reads < 100


# ------------------------------------------------------------------------------------------------------ sums of a warp

SIGNS = [1.0, -1.0, 2.0**-130, -(2.0**-149), 0.0, -0.0, 1e30, LARGEST]
# Terms of one row of A: an element, and the elements of B that it is multiplied by, one per column.
TERMS = {
    "nothing": [],
    "NaN": [(NAN, SIGNS)],
    "infinity": [(INF, SIGNS)],
    "negative infinity": [(-INF, SIGNS)],
    "infinities of either sign": [(INF, [1, 1, -1, -1, 0, 1, 2, 0.5]), (INF, [1, -1, 1, -1, 1, 0, 3, 0.5])],
    "infinity and NaN": [(INF, [1] * 8), (NAN, [1] * 8)],
    "many infinities": [(INF, [1, -1, 1, 1, 1, 1, 1, 1])] * 9,
    "overflow": [(LARGEST, [0.5, -0.5, 4, -4, 0, 1, -1, 2])],
    "overflow before infinity": [(LARGEST, [0.5, 4, -4, -4, 0, 0, 0, 1]), (INF, [1, 1, 1, -1, 1, -1, 0, 1])],
    "infinity before overflow": [(-INF, [1, 1, 1, -1, 1, -1, 0, 1]), (LARGEST, [0.5, 4, -4, -4, 0, 0, 0, 1])],
    "rounds to infinity": [(LARGEST, [2.0**-20, -(2.0**-20), 0, 0.75, 0, 0, 0, 1])],
    "product that overflows": [(1e30, [1e30, -1e30, 1, 1e-30, 1e8, -1e8, 1e9, -1e9])],
    "tiny": [(2.0**-130, [*SIGNS[:7], 1])],
    "tiny beside infinity": [(2.0**-130, [1] * 8), (INF, [1, -1, 0, 2.0**-130, 1, 1, 1, 1])],
    "wide": [(2.0**-40, [1] * 8), (2.0**40, [1] * 8), (2.0**-90, [1] * 8)],
    "wide with infinity": [(2.0**40, [1] * 8), (INF, [1, -1, 0, 2.0**-40, 2.0**40, 1, 1, 1]), (2.0**-90, [1] * 8)],
}


def rows_with_terms():
    """A of a row for each entry of `TERMS`, and B of eight columns; the terms of a row are zero in the others."""
    generator = np.random.default_rng(2)
    x, y = (generator.standard_normal(extents).astype(np.float32) for extents in ((len(TERMS), K), (K, 8)))
    places = iter(generator.permutation(K))
    for row, terms in enumerate(TERMS.values()):
        for (value, others), k in zip(terms, sorted(next(places) for _ in terms), strict=True):
            x[:, k] = 0
            x[row, k], y[k] = value, others
    return x, y


def columns_with_terms():
    x, y = rows_with_terms()
    return np.ascontiguousarray(y.T), np.ascontiguousarray(x.T)


def both():
    """Special elements at random, in few rows and columns."""
    generator = np.random.default_rng(3)
    x, y = (generator.standard_normal(extents).astype(np.float32) for extents in ((13, K), (K, 14)))
    for one in (x, y.T):
        for value in (NAN, INF, -INF, INF, 0.0, LARGEST):
            one[generator.integers(0, 13), generator.integers(K)] = value
    x[:, 33], y[33, 5], x[12] = 0, INF, 0
    return x, y


def sums_of_parts(precision, x_parts, y_parts, x, y):
    """Sums of the products of parts, as tensor cores make them: with scales, and NaN from the rest of an infinity."""
    of_x, of_y = recomposed(precision, x_parts, *x.shape), recomposed(precision, y_parts, *y.T.shape)
    total = sum(of_x[i] @ of_y[j].T for i, j in precision.products)
    if precision.scaled:
        total /= reciprocals_in(x_parts[-1, : x.shape[0], None]) * reciprocals_in(y_parts[-1, None, : y.shape[1]])
    return total.astype(np.float32)


@pytest.mark.parametrize(
    ("precision", "case"),
    covering(
        PRECISIONS.values(),
        [(rows_with_terms, "rows"), (rows_with_terms, "columns"), (columns_with_terms, "columns"), (both, "reversed")],
    ),
    ids=lambda one: "-".join((one[0].__name__, one[1])) if isinstance(one, tuple) else one.name,
)
def test_special_values_come_out_as_in_float32(precision, case):
    """From the decomposition to C: NaN and infinities are those of float32 sums, and nothing else is."""
    operands, layout = case
    x, y = (LAYOUTS[layout](one) for one in operands())
    m, n = x.shape[0], y.shape[1]
    warp = Warp(precision.name, m, n, K, deep=1, across=-(-n // 8))
    warp.x, warp.y = x, y
    with np.errstate(all="ignore"):
        warp.parts = simulated_decomposition(precision, x, y.T)
        warp.sums[...] = NAN  # beyond C: it is searched for, and not stored
        warp.sums[:m, :n] = sums_of_parts(precision, *warp.parts, x, y)
    alpha, beta = (1.0, 0.0) if layout == "rows" else (-0.5, 0.5)
    found = warp.store("pairs", alpha, beta)
    expected = float32_sums(x, y)
    finite = np.isfinite(expected)
    special = ~(np.isfinite(x).all(axis=1)[:, None] & np.isfinite(y).all(axis=0))
    same = ~finite & special if precision.scaled else ~finite  # small factors of products that overflow may vanish
    np.testing.assert_array_equal(found[same], np.float32(alpha) * expected[same])
    rows, cols = (np.where(np.isfinite(one), np.abs(one), 0).astype(np.float64) for one in (x, y))
    size = rows.max(axis=1)[:, None] * cols.max(axis=0) * K if precision.scaled else rows @ cols
    exact = alpha * expected[finite].astype(np.float64) + beta * warp.old[finite]
    assert 0 < finite.sum() < finite.size
    assert (np.abs(found[finite] - exact) <= 2.0**-13 * (size + np.abs(warp.old))[finite]).all()
