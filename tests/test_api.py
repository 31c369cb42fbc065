"""The public function: arguments, results, errors, and memory that it must not read or write."""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
import tomllib
import types
from collections import namedtuple
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cuda
from support.operands import LAYOUTS, NAN, REPEATING, Exported, check, filled, frozen, spaced

import numba_gemm
from numba_gemm import explain, stages, tiled_sgemm
from numba_gemm.gemm import heuristics
from numba_gemm.gemm import launch_choice as launching
from numba_gemm.gemm.heuristics import Choice
from numba_gemm.kernels.ladder import STAGES
from numba_gemm.kernels.stage import Partition
from numba_gemm.kernels.tensor_core import TENSOR_STAGES
from numba_gemm.runtime import device as devices
from numba_gemm.runtime import epilogue as epilogues
from numba_gemm.runtime.fingerprint import fingerprint

ROOT = Path(__file__).parents[1]


def relu(value, row, col):
    return max(value, np.float32(0))


def shifted(value, row, col, bias):
    return value + bias[col]


def positive(value, row, col):
    assert value > 0
    return value


# ----------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("b_layout", [*LAYOUTS, *REPEATING])
@pytest.mark.parametrize("a_layout", [*LAYOUTS, *REPEATING])
def test_operand_layouts(a_layout, b_layout):
    table = LAYOUTS | REPEATING
    a, b = table[a_layout](filled(5, 7)), table[b_layout](filled(7, 6, seed=1))
    check(tiled_sgemm(a, b, stage="coalesced"), a, b)


@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_result_layouts(layout, beta):
    a, b, c = filled(6, 3), filled(3, 5), filled(6, 5, seed=1)
    out = LAYOUTS[layout](c.copy())
    base = out if out.base is None else out.base
    before = base.copy()
    assert tiled_sgemm(a, b, out, beta=beta, stage="naive") is out
    check(out, a, b, beta=beta, c=c)
    out[...] = c
    assert base.tobytes() == before.tobytes(), "bytes around the result changed"


@pytest.mark.parametrize("stage", ["naive", "coalesced", "shared_tile", "auto"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 3, 4), (17, 16, 15), (33, 2, 18), (1, 40, 1)])
def test_stages_by_name(stage, shape):
    m, n, k = shape
    a, b = filled(m, k), filled(k, n)
    check(tiled_sgemm(a, b, stage=stage), a, b)


def at_odd_address(x):
    buffer = np.zeros(x.nbytes + 1, np.uint8)[1:]
    view = np.ndarray(x.shape, np.float32, buffer, strides=x.strides)
    view[...] = x
    return view


@pytest.mark.parametrize("stage", ["auto", "stream_k", "thin", "naive"])
@pytest.mark.parametrize(
    "lay_out",
    [LAYOUTS["packed records"], at_odd_address, lambda x: at_odd_address(np.asfortranarray(x))],
    ids=["packed records", "odd addresses", "odd addresses, by columns"],
)
def test_numpy_elements_that_are_not_aligned(stage, lay_out):
    a, b, c = filled(20, 40), filled(40, 3), filled(20, 3, seed=1)
    x, y, out = map(lay_out, (a, b, c))
    assert not any(one.flags.aligned for one in (x, y, out))
    told, dense = explain(x, y, out, stage=stage), explain(np.array(x), np.array(y), np.array(out), stage=stage)
    assert (told.config, told.a_access, told.b_access) == (dense.config, dense.a_access, dense.b_access)
    assert tiled_sgemm(x, y, out, beta=0.5, stage=stage) is out
    check(out, a, b, beta=0.5, c=c)
    check(tiled_sgemm(x[0], y, alpha=0.5, stage=stage)[None], a[:1], b, alpha=0.5)
    np.testing.assert_array_equal(tiled_sgemm(x, y, alpha=0, stage=stage), np.zeros((20, 3)))


def strided(draw, rows, cols):
    return spaced(filled(rows, cols), draw(st.sampled_from([-2, -1, 1, 3])), draw(st.sampled_from([-3, -1, 1, 2])))


@settings(max_examples=60)
@given(st.data())
def test_any_shape_and_strides(data):
    m, n, k = (data.draw(st.integers(0, 6), label) for label in "mnk")
    a, b, c = (strided(data.draw, *shape) for shape in ((m, k), (k, n), (m, n)))
    alpha, beta = (data.draw(st.sampled_from([0.0, 1.0, -0.5]), label) for label in ("alpha", "beta"))
    before = c.copy()
    tiled_sgemm(a, b, c, alpha=alpha, beta=beta, stage=data.draw(st.sampled_from(["naive", "coalesced"])))
    check(c, a, b, alpha=alpha, beta=beta, c=before)


# ----------------------------------------------------------------------------------------------------- vectors

VECTORS = {  # shapes of a and of b
    "row": ((7,), (7, 6)),
    "column": ((5, 7), (7,)),
    "inner": ((7,), (7,)),
    "row, batch": ((7,), (2, 3, 7, 6)),
    "column, batch": ((2, 5, 7), (7,)),
    "no terms": ((0,), (0, 6)),
    "no terms, inner": ((0,), (0,)),
    "no columns": ((7,), (7, 0)),
}


def of_shape(shape, seed=0):
    return filled(int(np.prod(shape[:-1])), shape[-1], seed).reshape(shape)


@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("stage", ["auto", "coalesced"])
@pytest.mark.parametrize("shapes", VECTORS.values(), ids=VECTORS)
def test_vectors_are_multiplied_as_by_matmul(shapes, stage, beta):
    a, b = map(of_shape, shapes)
    expected = a.astype(float) @ b
    result = tiled_sgemm(a, b, stage=stage)
    assert (type(result), result.shape) == (np.ndarray, expected.shape)
    np.testing.assert_allclose(result, expected, atol=1e-5)
    for spacing in (1, 2):
        before = np.float32(np.random.default_rng(1).uniform(-1, 1, (*expected.shape, spacing)))
        out = before.copy()[..., 0]
        assert tiled_sgemm(a[..., ::-1], np.flip(b, max(b.ndim - 2, 0)), out, alpha=2, beta=beta, stage=stage) is out
        np.testing.assert_allclose(out, 2 * expected + beta * before[..., 0], atol=1e-5)


def test_batch_of_vectors_by_columns():
    a, b, out = of_shape((2, 5, 7)), of_shape((7,), 1), np.full((5, 2), NAN).T
    assert tiled_sgemm(a, b, out, stage="coalesced") is out
    np.testing.assert_allclose(out, a @ b, atol=1e-5)


@pytest.mark.parametrize("shapes", VECTORS.values(), ids=VECTORS)
def test_vectors_of_numba(shapes):
    a, b = map(of_shape, shapes)
    result = tiled_sgemm(cuda.to_device(a), cuda.to_device(b), stage="coalesced")
    assert type(result) is type(cuda.to_device(a))
    assert tuple(result.shape) == (a @ b).shape
    np.testing.assert_allclose(result.copy_to_host(), a @ b, atol=1e-5)


def test_epilogue_of_vectors_counts_as_that_of_matrices():
    a, b, bias = of_shape((7,)), of_shape((7, 6)), of_shape((6,), 1)
    result = tiled_sgemm(a, b, epilogue=shifted, epilogue_args=(bias,))
    np.testing.assert_allclose(result, a @ b + bias, atol=1e-5)
    result = tiled_sgemm(b.T, a, epilogue=lambda value, row, col: value + 10 * row + col)
    np.testing.assert_allclose(result, b.T @ a + 10 * np.arange(6), atol=1e-5)


# ------------------------------------------------------------------------------------------------ alpha and beta


@pytest.mark.parametrize("beta", [0, 1, -2.5, np.float16(0.5), 1e-50])
@pytest.mark.parametrize(
    "alpha", [1, 0, -0.75, True, np.True_, np.float64(3), np.int8(2), Fraction(1, 4), np.array(1.5)]
)
def test_scalars(alpha, beta):
    a, b, c = filled(4, 5), filled(5, 3), filled(4, 3, seed=2)
    out = c.copy()
    tiled_sgemm(a, b, out, alpha=alpha, beta=beta, stage="coalesced")
    check(out, a, b, alpha=float(alpha), beta=float(beta), c=c)


def test_scalars_round_to_float32():
    a, b = np.ones((1, 1), np.float32), np.ones((1, 1), np.float32)
    assert tiled_sgemm(a, b, alpha=0.1, stage="naive")[0, 0] == np.float32(0.1)
    assert tiled_sgemm(a, b, alpha=1e300, stage="naive")[0, 0] == np.inf
    # Rounded to 0, it counts as 0: NaNs in a are not read.
    assert tiled_sgemm(a * NAN, b, alpha=1e-300, stage="naive")[0, 0] == 0


ADDENDS = {"matrix": (5, 6), "bias": (6,), "column": (5, 1), "number": (), "batch": (2, 5, 6)}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("library", [np.array, cuda.to_device], ids=["NumPy", "Numba"])
@pytest.mark.parametrize("shape", ADDENDS.values(), ids=ADDENDS)
def test_c_is_added_and_kept(shape, library, given):
    a, b = of_shape((2, 5, 7)), of_shape((7, 6), 1)
    c = np.float32(np.random.default_rng(2).uniform(-1, 1, shape))
    addend, out = library(c), library(np.full((2, 5, 6), NAN)) if given else None
    result = tiled_sgemm(library(a), library(b), out, alpha=2, beta=-0.5, c=addend)
    assert out is None or result is out
    assert type(result) is type(library(a))
    np.testing.assert_allclose(np.asarray(result), 2 * (a @ b) - 0.5 * c, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(addend), c)


def test_c_with_vectors_without_terms_and_with_an_epilogue():
    a, b, c = of_shape((7,)), of_shape((7, 6)), of_shape((6,), 2)
    np.testing.assert_allclose(tiled_sgemm(a, b, beta=1, c=c), a @ b + c, atol=1e-5)
    np.testing.assert_allclose(tiled_sgemm(a, b, alpha=0, beta=3, c=c), 3 * c, atol=1e-5)
    np.testing.assert_allclose(tiled_sgemm(a, b, beta=1, c=c, epilogue=relu), np.maximum(a @ b + c, 0), atol=1e-5)
    square = of_shape((6, 6))
    np.testing.assert_allclose(tiled_sgemm(square, square, beta=1, c=square), square @ square + square, atol=1e-5)


def test_c_that_is_out_is_updated_in_place():
    a, b, c = of_shape((5, 7)), of_shape((7, 6), 1), of_shape((5, 6), 2)
    out = c.copy()
    assert tiled_sgemm(a, b, out, beta=2, c=out[:]) is out
    check(out, a, b, beta=2, c=c)


def test_beta_zero_does_not_read_c():
    a, b = filled(5, 4), filled(4, 6)
    out = np.full((5, 6), NAN)
    check(tiled_sgemm(a, b, out, beta=0.0, stage="shared_tile"), a, b)


@pytest.mark.parametrize("beta", [0.0, 2.0])
def test_alpha_zero_does_not_read_a_and_b(beta):
    a, b, c = np.full((4, 3), NAN), np.full((3, 5), np.float32(np.inf)), filled(4, 5)
    out = c.copy()
    tiled_sgemm(a, b, out, alpha=0.0, beta=beta, stage="coalesced")
    np.testing.assert_array_equal(out, np.float32(beta) * c)


@pytest.mark.parametrize("alpha", [1.0, np.inf, np.nan])
def test_no_terms_leave_beta_c(alpha):
    c = filled(4, 5)
    out = c.copy()
    tiled_sgemm(filled(4, 0), filled(0, 5), out, alpha=alpha, beta=-0.5, stage="naive")
    np.testing.assert_array_equal(out, np.float32(-0.5) * c)
    assert not tiled_sgemm(filled(4, 0), filled(0, 5), alpha=alpha, stage="auto").any()


@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 2), (3, 0, 2), (0, 0, 0), (0, 3, 0)])
def test_empty_results(m, n, k):
    result = tiled_sgemm(filled(m, k), filled(k, n))
    assert result.shape == (m, n)
    assert result.dtype == np.float32
    out = np.empty((m, n), np.float32)
    assert tiled_sgemm(filled(m, k), filled(k, n), out, alpha=2, beta=3) is out


def test_specials_spread_as_in_numpy():
    a, b = filled(6, 5), filled(5, 7)
    a[1, 2], a[3, 0], b[4, 4] = np.nan, np.inf, -np.inf
    b[0, 5] = 0  # inf * 0
    check(tiled_sgemm(a, b, stage="shared_tile"), a, b)
    check(tiled_sgemm(a, b, alpha=np.nan, stage="naive"), a, b, alpha=np.nan)
    check(tiled_sgemm(a, b, alpha=-np.inf, stage="naive"), a, b, alpha=-np.inf)


# -------------------------------------------------------------------------------------------------------- batches


def several(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).uniform(-1, 1, shape).astype(np.float32)


def check_batch(got, a, b, **scalars):
    assert got.shape == (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    x, y = (np.broadcast_to(one, (*got.shape[:-2], *one.shape[-2:])) for one in (a, b))
    c = scalars.pop("c", None)
    for index in np.ndindex(got.shape[:-2]):
        check(got[index], x[index], y[index], **scalars, **({} if c is None else {"c": c[index]}))


# A and B, and how many launches their product is.
BATCHES = {
    "none": (several(5, 7), several(7, 6), 1),
    "both": (several(3, 5, 7), several(3, 7, 6), 1),
    "A alone": (several(3, 5, 7), several(7, 6), 1),
    "B alone": (several(5, 7), several(3, 7, 6), 1),
    "broadcast": (several(2, 1, 5, 7), several(3, 7, 6), 1),
    "extents of one": (several(1, 2, 1, 5, 7), several(2, 1, 7, 6), 1),
    "stride zero": (np.broadcast_to(several(5, 7), (3, 5, 7)), several(3, 7, 6), 1),
    "all strides zero": (np.broadcast_to(several(5, 7), (2, 3, 5, 7)), np.broadcast_to(several(7, 6), (3, 7, 6)), 1),
    "backwards": (several(3, 5, 7)[::-1, :, ::-1], several(3, 7, 6)[::-1, ::-1, ::2], 1),
    "every other": (several(6, 5, 7)[1::2], several(6, 7, 6)[::-2], 1),
    "transposed": (several(3, 7, 5).transpose(0, 2, 1), several(7, 3, 6).transpose(1, 0, 2), 1),
    "three kinds": (several(2, 1, 2, 3, 4), several(1, 3, 2, 4, 5), 1),
    "four kinds": (several(2, 1, 2, 1, 3, 4), several(2, 1, 2, 4, 5), 2),
    "five kinds": (several(2, 1, 2, 1, 2, 3), several(3, 1, 2, 1, 2, 3, 4), 6),
    "rows": (several(4, 1, 7), several(7, 6), 1),
    "columns": (several(5, 7), several(4, 7, 1), 1),
    "sums": (several(4, 1, 7), several(4, 7, 1), 1),
}


@pytest.fixture
def launches(monkeypatch):
    """Return the stage, the extents of C and the batch of each launch."""
    found, launched = [], launching.launch_product

    def count(product, selected, alpha, a, b, beta, c, *others):
        found.append((selected[0].name, (c.rows, c.cols), product.batch.extents))
        return launched(product, selected, alpha, a, b, beta, c, *others)

    monkeypatch.setattr(launching, "launch_product", count)
    return found


@pytest.mark.parametrize("stage", ["stream_k", "naive"])
@pytest.mark.parametrize("case", BATCHES)
def test_batches(case, stage, launches):
    a, b, count = BATCHES[case]
    check_batch(tiled_sgemm(a, b, stage=stage), a, b)
    assert stage == "naive" or len(launches) == count


def test_auto_takes_a_batch_in_one_launch(launches):
    a, b = several(3, 1, 9, 10), several(4, 10, 11)
    check_batch(tiled_sgemm(a, b), a, b)
    (((_, extents, batch)),) = launches
    assert extents in ((9, 11), (11, 9))
    assert batch == (1, 3, 4)


@pytest.mark.parametrize(("name", "columns"), [("stream_k", 6), ("stream_k", 9), ("vectorized", 6)])
def test_memory_beyond_k_is_not_read(name, columns):
    """Rows of A and columns of B start on 16-byte boundaries and are followed by NaN."""
    pitch = -(-columns // 4) * 4 + 4
    buffers = [np.full(9 * pitch + 4, NAN) for _ in "ab"]
    a, b = (one[-one.ctypes.data % 16 // 4 :][: 9 * pitch].reshape(9, pitch)[1:8, :columns] for one in buffers)
    a[...], b[...] = filled(7, columns), filled(7, columns, seed=1)
    check(tiled_sgemm(a, b.T, stage=name), a, b.T)
    check(tiled_sgemm(b, a.T, stage=name), b, a.T)
    check(tiled_sgemm(a, np.ascontiguousarray(b.T), stage=name), a, b.T)


@pytest.mark.parametrize("layout", ["A by rows", "A by columns"])
def test_transposed_batch(layout, monkeypatch):
    """A, B and C have different batch strides."""
    stage = STAGES["stream_k"]
    choice = Choice(stage, stage.test_config, Partition(3, 3), swapped=True)
    monkeypatch.setattr(heuristics, "best", lambda problem: choice)
    a, b = several(3, 1, 64), several(3, 8, 64).transpose(0, 2, 1)
    if layout == "A by columns":
        a = np.ascontiguousarray(several(3, 2, 64).transpose(0, 2, 1)).transpose(0, 2, 1)[:, :1]
    check_batch(tiled_sgemm(a, b), a, b)
    out, c = several(3, 2, 8, seed=1)[:, :1], several(3, 2, 8, seed=1)[:, :1]
    check_batch(tiled_sgemm(a, b, out, beta=0.5), a, b, beta=0.5, c=c)


def test_more_than_three_dimensions_take_a_launch_each(launches):
    a, b = several(2, 1, 2, 1, 2, 3), several(1, 2, 1, 2, 3, 4)
    check_batch(tiled_sgemm(a, b, stage="stream_k"), a, b)
    assert launches == [("stream_k", (2, 4), (2, 2, 2))] * 2


@pytest.mark.parametrize(("epilogue", "extents", "batch"), [(None, (12, 6), (1, 1, 1)), (relu, (4, 6), (1, 1, 3))])
def test_matrices_that_share_b_count_as_one(launches, epilogue, extents, batch):
    """They do not if an epilogue uses the row numbers of each."""
    tiled_sgemm(several(3, 4, 5), several(5, 6), stage="stream_k", epilogue=epilogue)
    assert launches == [("stream_k", extents, batch)]


# Places for C of a batch of (2, 3) matrices: an array, and the view of it to write.
OUTS = {
    "dense": (lambda: np.full((2, 3, 4, 6), NAN), lambda x: x),
    "by columns": (lambda: np.full((2, 3, 6, 4), NAN), lambda x: x.swapaxes(2, 3)),
    "batch innermost": (lambda: np.full((4, 6, 3, 2), NAN), lambda x: x.transpose(3, 2, 0, 1)),
    "batch between": (lambda: np.full((4, 2, 3, 6), NAN), lambda x: x.transpose(1, 2, 0, 3)),
    "every other matrix": (lambda: np.full((2, 6, 4, 6), NAN), lambda x: x[:, ::2]),
    "backwards": (lambda: np.full((2, 3, 4, 6), NAN), lambda x: x[::-1, ::-1, ::-1]),
    "inside": (lambda: np.full((3, 4, 6, 8), NAN), lambda x: x[1:, 1:, 1:-1, 1:-1]),
}


@pytest.mark.parametrize("beta", [0.0, -0.5])
@pytest.mark.parametrize("stage", ["stream_k", "naive"])
@pytest.mark.parametrize("place", OUTS)
def test_batches_into_out(place, stage, beta, launches):
    a, b, c = several(2, 1, 4, 5), several(3, 5, 6), several(2, 3, 4, 6, seed=1)
    make, view = OUTS[place]
    buffer = make()
    out = view(buffer)
    if beta:
        out[...] = c
    assert tiled_sgemm(a, b, out, alpha=2.0, beta=beta, stage=stage) is out
    check_batch(out, a, b, alpha=2.0, beta=beta, c=c)
    assert stage == "naive" or len(launches) == 1
    out[...] = NAN
    assert np.isnan(buffer).all(), "something around C was written"


def test_interleaved_operands_of_a_batch():
    """Matrices of A, B and C whose elements alternate in memory."""
    shared = np.full((4, 4, 3, 2), NAN)
    a, b, out = (shared[..., which, :].transpose(2, 0, 1) for which in range(3))
    a[...], b[...] = several(2, 4, 4), several(2, 4, 4, seed=1)
    check_batch(tiled_sgemm(a, b, out, stage="stream_k"), a.copy(), b.copy())


@pytest.mark.parametrize("shapes", [((0, 3, 4), (4, 5)), ((2, 3, 4), (0, 1, 4, 5)), ((3, 0, 4), (4, 5))])
def test_empty_batches(shapes, monkeypatch):
    monkeypatch.setattr(launching, "launch_product", lambda *_: pytest.fail("launched"))
    a, b = (several(*shape) for shape in shapes)
    assert tiled_sgemm(a, b).shape == (a @ b).shape
    assert tiled_sgemm(a, b, epilogue=relu).shape == (a @ b).shape


@pytest.mark.parametrize("stage", ["stream_k", "naive"])
@pytest.mark.parametrize(("alpha", "k"), [(1.0, 0), (0.0, 4)])
def test_batches_without_terms(stage, alpha, k):
    c = several(2, 3, 5)
    out = c.copy()
    a, b = np.full((2, 3, k), NAN), np.full((k, 5), NAN)
    tiled_sgemm(a, b, out, alpha=alpha, beta=-0.5, stage=stage)
    np.testing.assert_array_equal(out, np.float32(-0.5) * c)
    np.testing.assert_array_equal(tiled_sgemm(a, b, alpha=alpha, stage=stage), 0 * c)


@pytest.mark.parametrize("given", [True, False])
def test_batches_of_more_than_32_dimensions(given):
    a, b = several(2, 3, 4, 5), several(3, 5, 6)
    shape = (2, *[1] * 58, 3, 4, 6)
    out = np.full(shape, NAN) if given else None
    got = tiled_sgemm(a.reshape(2, *[1] * 58, 3, 4, 5), b.reshape(*[1] * 40, 3, 5, 6), out)
    assert got.shape == shape
    check_batch(got.reshape(2, 3, 4, 6), a, b)


def test_batches_of_numba_arrays():
    a, b = several(2, 3, 4), several(4, 5)
    result = tiled_sgemm(cuda.to_device(a), cuda.to_device(b), stage="stream_k")
    check_batch(result.copy_to_host(), a, b)


# ------------------------------------------------------------------------------------------------------- epilogues


def scaled_by(factor):
    return lambda value, row, col: value * factor


def biased_relu(value, row, col, bias):
    return max(value + bias[col], np.float32(0))


def weighted(value, row, col, weights):
    return value * weights[row]


def placed_in(value, row, col, rows, cols):
    return value * rows[row] - cols[col]


def position(value, row, col):
    return 1000 * row + col


SCALE = np.float32(2)
Factors = namedtuple("Factors", "first")  # which the compiler supports, unlike lists


def scaled_by_global(value, row, col):
    return value * SCALE


@functools.wraps(relu)
def wrapping(value, row, col, bias):
    return max(value, np.float32(0)) + bias[col]


# An epilogue, the extents of C along which it takes vectors, and the same function in NumPy.
EPILOGUES = {
    "none": (relu, "", lambda x: np.maximum(x, 0)),
    "columns": (biased_relu, "n", lambda x, bias: np.maximum(x + bias, 0)),
    "rows": (weighted, "m", lambda x, weights: x * weights[:, None]),
    "both": (placed_in, "mn", lambda x, rows, cols: x * rows[:, None] - cols),
    "defaults": (lambda value, row, col, slope=0.5: value * slope, "", lambda x: x * np.float32(0.5)),
    "vectors and defaults": (
        *(lambda value, row, col, bias, slope=0.5: (value + bias[col]) * slope, "n"),
        lambda x, bias: (x + bias) * np.float32(0.5),
    ),
    "any vectors": (lambda value, *rest: value * rest[2][rest[0]], "m", lambda x, weights: x * weights[:, None]),
    "global": (scaled_by_global, "", lambda x: x * SCALE),
    "wrapping": (wrapping, "n", lambda x, bias: np.maximum(x, 0) + bias),
}
VECTORS = {
    "dense": lambda size: several(size),
    "backwards": lambda size: several(2 * size)[::-2],
    "one element": lambda size: np.broadcast_to(several(1), size),
    "longer": lambda size: several(size + 3),
}


EPILOGUE_LAYOUTS = ("rows", "columns", "every third column")
# Each epilogue with each kind of vectors, if it takes any, and with each layout of C.
EPILOGUE_CASES = [
    (case, vectors, EPILOGUE_LAYOUTS[(i + j) % 3])
    for i, (case, (_, extents, _)) in enumerate(EPILOGUES.items())
    for j, vectors in enumerate([*VECTORS] if extents else ["dense"] * 3)
]


@pytest.mark.parametrize(("case", "vectors", "layout"), EPILOGUE_CASES)
def test_epilogues(case, vectors, layout):
    epilogue, extents, expected = EPILOGUES[case]
    m, n = 8, 12
    a, b, c = filled(m, 9), filled(9, n), filled(m, n, seed=1)
    given = [VECTORS[vectors]({"m": m, "n": n}[extent]) for extent in extents]
    used = [vector[: {"m": m, "n": n}[extent]] for vector, extent in zip(given, extents)]
    for beta in (0.0, 0.5):
        out = LAYOUTS[layout](c.copy() if beta else np.full_like(c, NAN))
        options = {"alpha": -2.0, "beta": beta, "stage": "stream_k", "epilogue": epilogue, "epilogue_args": given}
        assert tiled_sgemm(a, b, out, **options) is out
        plain = -2 * (a.astype(np.float64) @ b) + beta * c
        np.testing.assert_allclose(out, expected(plain, *used), rtol=1e-5, atol=1e-5)


def test_longest_sum_with_an_epilogue(monkeypatch):
    """Longer ones are refused before c is copied into out, and by `explain`, but not if alpha is 0."""
    monkeypatch.setattr("numba_gemm.gemm.request.MAX_K", 16)
    out, c = of_shape((2, 3)), of_shape((2, 3), 2)
    before, (a, b) = out.copy(), (of_shape((2, 17)), of_shape((17, 3)))
    with pytest.raises(ValueError, match="K is 17 and an epilogue is given, which takes up to 16"):
        tiled_sgemm(a, b, out, beta=1, c=c, epilogue=relu)
    np.testing.assert_array_equal(out, before)
    with pytest.raises(ValueError, match="K is 17 and an epilogue is given"):
        explain(a, b, epilogue=relu)
    np.testing.assert_array_equal(tiled_sgemm(a, b, alpha=0, beta=1, c=c, epilogue=relu), np.maximum(c, 0))
    assert tiled_sgemm(a[:, :16], b[:16], epilogue=relu).shape == (2, 3)


@pytest.mark.parametrize("make", [lambda f: f, cuda.jit(device=True)], ids=["Python function", "device function"])
def test_epilogue_in_place_of_relu(make):
    a, b = filled(5, 7), filled(7, 6)
    plain = tiled_sgemm(a, b, stage="stream_k")
    assert (plain < 0).any()
    np.testing.assert_array_equal(tiled_sgemm(a, b, stage="stream_k", epilogue=make(relu)), np.maximum(plain, 0))


@pytest.mark.parametrize("stage", ["stream_k", "auto"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1), (33, 35)])
def test_epilogue_is_told_rows_and_columns(stage, shape):
    """Row and column are those of C, also if its transpose is computed."""
    m, n = shape
    got = tiled_sgemm(filled(m, 5), filled(5, n), stage=stage, epilogue=position)
    np.testing.assert_array_equal(got, 1000 * np.arange(m)[:, None] + np.arange(n))


@pytest.mark.simulator  # compiled code cannot record calls
@pytest.mark.parametrize("stage", ["stream_k", "auto"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1), (33, 35)])
def test_epilogue_is_told_of_no_element_outside(stage, shape):
    """Its vectors need not have an element for a position outside of C."""
    m, n = shape
    told = set()

    def note(value, row, col):
        told.add((int(row), int(col)))
        return value

    tiled_sgemm(filled(m, 5), filled(5, n), stage=stage, epilogue=note)
    assert told == set(np.ndindex(shape))


@pytest.mark.parametrize("case", BATCHES)
def test_epilogue_of_a_batch_counts_rows_of_a_matrix(case, launches):
    a, b, count = BATCHES[case]
    vectors = several(a.shape[-2]), several(b.shape[-1], seed=1)
    got = tiled_sgemm(a, b, stage="stream_k", epilogue=placed_in, epilogue_args=vectors)
    np.testing.assert_allclose(got, (a @ b) * vectors[0][:, None] - vectors[1], rtol=1e-5, atol=1e-5)
    assert len(launches) == count


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("beta", [0.0, 2.0])
def test_epilogue_without_terms(alpha, beta):
    bias, c, k = several(6), filled(5, 6), 0 if alpha else 3
    out = c.copy() if beta else np.full_like(c, NAN)
    a, b = np.full((5, k), NAN), np.full((k, 6), NAN)
    options = {"stage": "stream_k", "epilogue": shifted, "epilogue_args": [bias]}
    tiled_sgemm(a, b, out, alpha=alpha, beta=beta, **options)
    np.testing.assert_array_equal(out, np.float32(beta) * c + bias)


def test_epilogue_may_read_what_the_product_reads():
    a, b = filled(5, 5), filled(5, 5)
    got = tiled_sgemm(a, b, stage="stream_k", epilogue=placed_in, epilogue_args=(a[:, 1], b[2]))
    np.testing.assert_allclose(got, (a @ b) * a[:, 1:2] - b[2], rtol=1e-5, atol=1e-6)


@pytest.mark.simulator  # compiled code is not protected
@pytest.mark.parametrize("mapped", [False, True], ids=["frozen", "mapped"])
def test_epilogue_cannot_write_a_read_only_vector(mapped, tmp_path):
    def writes(value, row, col, vector):
        vector[col] = 7
        return value

    vector = several(6)
    if mapped:
        vector.tofile(tmp_path / "vector")
        given = np.memmap(tmp_path / "vector", np.float32, mode="r")
    else:
        given = frozen(vector.copy())
    with pytest.raises(ValueError, match=r"thread .* read-only"):
        tiled_sgemm(filled(5, 4), filled(4, 6), stage="stream_k", epilogue=writes, epilogue_args=[given])
    np.testing.assert_array_equal(given, vector)


@pytest.mark.simulator  # contents that are compiled in stay as they were at the first call
def test_simulated_epilogue_finds_other_objects_as_they_are_at_the_call():
    factors, (a, b) = [2.0], (filled(5, 4), filled(4, 6))

    def scaled(value, row, col):
        return value * factors[0]

    for factor in (2.0, 5.0):
        factors[0] = factor
        got = tiled_sgemm(a, b, stage="stream_k", epilogue=scaled)
        np.testing.assert_allclose(got, factor * (a @ b), rtol=1e-5, atol=1e-6)


def test_epilogue_finds_globals_and_closures_as_they_are_at_the_call(monkeypatch):
    def of_a_record(value, row, col):
        return value * factors.first

    def of_a_lazy_module(value, row, col):
        return value * lazy.first

    lazy = types.ModuleType("lazy")
    lazy.first, lazy.__getattr__ = np.float32(2), functools.partial(getattr, types)
    assert fingerprint(of_a_lazy_module) is None, "its content cannot be told, and it is compiled all the same"
    product = functools.partial(tiled_sgemm, A, B, stage="stream_k")
    plain = product()
    for number in (2.0, 3.0, 2.0):
        monkeypatch.setitem(globals(), "SCALE", np.float32(number))
        factors = Factors(np.float32(number))
        for epilogue in (scaled_by_global, scaled_by(number), of_a_record):
            np.testing.assert_array_equal(product(epilogue=epilogue), plain * np.float32(number))
    np.testing.assert_array_equal(product(epilogue=of_a_lazy_module), plain * np.float32(2))


def test_epilogues_of_the_same_expression_are_one(monkeypatch):
    built = []
    monkeypatch.setattr(launching, "launch_product", lambda product, *_: built.append(product.epilogue) or [])
    for factor in (2.0, 2.0, 3.0):
        tiled_sgemm(A, B, epilogue=scaled_by(factor))
    assert built[0] is built[1] is not built[2]


def test_later_change_of_an_equal_epilogue_has_no_effect(monkeypatch):
    """Two equal functions share one compiled epilogue, also after one of them changes."""

    def scaled_from(cell):
        return lambda value, row, col: value * cell

    first, second = scaled_from(np.float32(2)), scaled_from(np.float32(2))
    plain = tiled_sgemm(A, B, stage="stream_k")
    np.testing.assert_array_equal(tiled_sgemm(A, B, stage="stream_k", epilogue=first), plain * np.float32(2))
    first.__closure__[0].cell_contents = np.float32(3)
    np.testing.assert_array_equal(tiled_sgemm(A, B, stage="stream_k", epilogue=second), plain * np.float32(2))
    np.testing.assert_array_equal(tiled_sgemm(A, B, stage="stream_k", epilogue=first), plain * np.float32(3))


@pytest.mark.simulator  # which calls epilogues on the host
def test_number_of_cached_epilogues_is_bounded(monkeypatch):
    monkeypatch.setattr(epilogues, "MAX_MADE", 3)
    monkeypatch.setattr(epilogues, "_made", {})
    for factor in range(9):
        assert epilogues.prepared(scaled_by(factor), 0)(2.0, 0, 0) == 2.0 * factor
    assert len(epilogues._made) <= 3


def test_epilogue_is_chosen_for(monkeypatch):
    seen = []
    monkeypatch.setattr(launching, "launch_product", lambda product, selected, *_: seen.append(selected[0]) or [])
    tiled_sgemm(A, B, epilogue=relu)
    assert seen[0].takes_epilogue


# --------------------------------------------------------------------------------------------------- array kinds


def test_numpy_gives_numpy():
    result = tiled_sgemm(filled(3, 4), filled(4, 5), stage="naive")
    assert type(result) is np.ndarray
    assert result.flags.c_contiguous
    assert result.flags.writeable


def test_numba_gives_numba():
    a, b, c = filled(3, 4), filled(4, 5), filled(3, 5)
    result = tiled_sgemm(cuda.to_device(a), cuda.to_device(b), stage="naive")
    assert type(result) is type(cuda.to_device(a))
    check(result.copy_to_host(), a, b)
    out = cuda.to_device(c)
    assert tiled_sgemm(cuda.to_device(a), cuda.to_device(b), out, beta=1, stage="coalesced") is out
    check(out.copy_to_host(), a, b, beta=1, c=c)


def test_numba_views():
    a, b, c = filled(6, 8), filled(4, 5), np.full((3, 10), NAN)
    out = cuda.to_device(c)
    tiled_sgemm(cuda.to_device(a)[::2, 1:5], cuda.to_device(b), out[:, ::2], stage="coalesced")
    after = out.copy_to_host()
    check(after[:, ::2], a[::2, 1:5], b)
    assert np.isnan(after[:, 1::2]).all()


@pytest.mark.parametrize("m", [0, 3])
def test_empty_numba_arrays(m):
    a, b = (cuda.device_array(shape, np.float32) for shape in ((m, 0), (0, 4)))
    result = tiled_sgemm(a, b, stage="naive")
    assert tuple(result.shape) == (m, 4)
    assert not result.copy_to_host().any()


def test_dlpack_on_the_host_counts_as_numpy():
    a, b = filled(3, 4), filled(4, 5)
    result = tiled_sgemm(Exported(a), b.T.copy().T, stage="naive")
    assert type(result) is np.ndarray
    check(result, a, b)
    kept = filled(3, 5)
    before = kept.copy()
    out = Exported(kept)
    assert tiled_sgemm(a, Exported(b), out, beta=2.0, stage="naive") is out
    check(kept, a, b, beta=2.0, c=before)


def test_numpy_subclasses_are_numpy():
    a, b = filled(3, 4), filled(4, 5)
    with pytest.warns(PendingDeprecationWarning):
        matrix = np.matrix(a)
    check(tiled_sgemm(matrix, b, stage="naive"), a, b)


@pytest.mark.parametrize("stream", [None, 0, np.int64(2)])
def test_streams_of_a_numpy_product(stream):
    a, b = filled(3, 4), filled(4, 5)
    check(tiled_sgemm(a, b, stage="naive", stream=stream), a, b)
    check(tiled_sgemm(a, b, stage="naive", stream=cuda.stream()), a, b)


def test_results_are_repeatable():
    a, b = filled(20, 33), filled(33, 19)
    first = tiled_sgemm(a, b, stage="shared_tile")
    assert tiled_sgemm(a, b, stage="shared_tile").tobytes() == first.tobytes()


# --------------------------------------------------------------------------------------------------------- errors


A, B, C = filled(3, 4), filled(4, 5), filled(3, 5)
jitted_positive = cuda.jit(device=True)(positive)
helpers = types.ModuleType("helpers")
helpers.positive = positive
SHARED, BATCH = filled(3, 12), several(4, 4, 4)


class Unhashable:
    __hash__ = None

    def __call__(self, value, row, col):
        return value


# The argument; the error; words for what was passed, what was expected, and what to do.
ERRORS = {
    "a list": (([[1.0]], B), {}, TypeError, "a is of type list", "expected a float32 array", "numpy.asarray(a"),
    "None": ((A, None), {}, TypeError, "b is of type NoneType", "expected", "convert"),
    "a scalar": ((A, np.float32(1)), {}, TypeError, "b is of type float32", "expected", "convert"),
    "vector": ((A[:, 0], B), {}, ValueError, "(3,) and b has shape (4, 5): 3 elements of a", "(K,)", "pass"),
    "vectors": ((A[0], B[:3, 0]), {}, ValueError, "4 elements of a against 3 elements of b", "expected", "pass"),
    "no dimensions": ((A, np.array(1, np.float32)), {}, ValueError, "b has 0 dimensions", "expected 2", "alpha"),
    "matrix for a vector": ((A[0], B, C[:1]), {}, ValueError, "out has shape (1, 5)", "expected (5,)", "pass"),
    "vector for a number": ((A[0], B[:, 0], C[0, :1]), {}, ValueError, "out has shape (1,)", "expected ()", "pass"),
    "batches": (
        (np.stack([A] * 2), np.stack([B] * 3)),
        *({}, ValueError, "batch dimensions (2,) and (3,)", "expected equal ones, or 1", "pass arrays"),
    ),
    "batches of many dimensions": (
        (np.ones((1,) * 39 + (2, 3, 4), np.float32), np.stack([B] * 3)),
        *({}, ValueError, "1, 2) and (3,)", "expected equal ones, or 1", "pass arrays"),
    ),
    "batch too large": (
        (np.broadcast_to(A, (2**29, 3, 4)), np.broadcast_to(B, (2**31, 1, 4, 5))),
        *({}, ValueError, "out has shape (2147483648, 536870912, 3, 5)", "expected a size", "smaller extents"),
    ),
    "batch of out": ((A, np.stack([B] * 2), C), {}, ValueError, "out has shape (3, 5)", "expected (2, 3, 5)", "pass"),
    "out broadcast": (
        (A, np.stack([B] * 2), np.lib.stride_tricks.as_strided(C.copy(), (2, 3, 5), (0, 20, 4))),
        *({}, ValueError, "strides (0, 20, 4)", "expected distinct", "allocate"),
    ),
    "epilogue text": (
        (A, B),
        {"epilogue": "relu"},
        TypeError,
        "epilogue is 'relu', of type str",
        "(value, row, column",
        "pass",
    ),
    "epilogue built in": (
        (A, B),
        {"epilogue": max},
        TypeError,
        "of type builtin_function",
        "expected a Python function",
        "pass",
    ),
    "epilogue object": (
        (A, B),
        {"epilogue": Unhashable()},
        *(TypeError, "of type Unhashable", "expected a Python function", "pass"),
    ),
    "epilogue partial": (
        (A, B),
        {"epilogue": functools.partial(relu)},
        *(TypeError, "of type partial", "expected a Python function", "pass"),
    ),
    "epilogue of two": (
        (A, B),
        {"epilogue": lambda value, row: value},
        *(TypeError, "<lambda>(value, row) cannot be called", "expected", "pass as many"),
    ),
    "epilogue with a keyword": (
        (A, B),
        {"epilogue": lambda value, row, col, *, slope=0.5: value * slope},
        *(TypeError, "col, *, slope=0.5) takes slope by name", "expected a Python function", "by position"),
    ),
    "epilogue with keywords": (
        (A, B),
        {"epilogue": cuda.jit(device=True)(lambda value, row, col, *, slope, **others: value)},
        *(TypeError, "takes slope, others by name", "expected a Python function", "by position"),
    ),
    "epilogue that asserts": (
        (A, B),
        {"epilogue": positive},
        *(TypeError, "positive has a raise or assert statement in positive", "expected none", "return a NaN"),
    ),
    "epilogue that calls one of a module": (
        (A, B),
        {"epilogue": lambda value, row, col: helpers.positive(value, row, col)},
        *(TypeError, "<lambda> has a raise or assert statement in positive", "expected none", "return a NaN"),
    ),
    "epilogue that calls one": (
        (A, B),
        {"epilogue": lambda value, row, col: jitted_positive(value, row, col)},
        *(TypeError, "<lambda> has a raise or assert statement in ", "expected none", "return a NaN"),
    ),
    "masked out": (
        (A, B, np.ma.zeros((3, 5), np.float32)),
        {},
        *(TypeError, "out is a NumPy masked array", "expected one without a mask", "pass out.data"),
    ),
    "too few vectors": (
        (A, B),
        {"epilogue": shifted, "epilogue_args": ()},
        *(TypeError, "0 epilogue_args", "missing a required argument: 'bias'", "pass as many"),
    ),
    "too many vectors": (
        (A, B),
        {"epilogue": relu, "epilogue_args": (B[0],)},
        *(TypeError, "1 epilogue_args", "too many positional", "pass as many"),
    ),
    "vector without a tuple": (
        (A, B),
        {"epilogue": shifted, "epilogue_args": B[0]},
        *(TypeError, "epilogue_args is of type ndarray", "expected a tuple or list", "pass (vector,)"),
    ),
    "vectors of an iterator": (
        (A, B),
        {"epilogue_args": iter([B[0]])},
        *(TypeError, "epilogue_args is of type list_iterator", "expected a tuple or list", "pass (vector,)"),
    ),
    "vector of one number": (
        (A, B),
        {"epilogue": shifted, "epilogue_args": (1.0,)},
        *(
            TypeError,
            "epilogue_args[0] is of type float",
            "expected a float32 array",
            "to one dimension, for instance with numpy.asarray(epilogue_args[0], dtype=numpy.float32).reshape(-1)",
        ),
    ),
    "out in a batch of a": (
        (BATCH[::2], filled(4, 4), BATCH[1:3]),
        *({}, ValueError, "shares memory with a", "apart", "copy of a"),
    ),
    "vectors alone": ((A, B), {"epilogue_args": (A[0],)}, ValueError, "epilogue is None", "expected none", "pass an"),
    "vector of two": (
        (A, B),
        {"epilogue": shifted, "epilogue_args": (A,)},
        *(ValueError, "epilogue_args[0] has 2 dimensions", "expected 1", "reshape(-1)"),
    ),
    "vector of float64": (
        (A, B),
        {"epilogue": shifted, "epilogue_args": (np.ones(5),)},
        *(TypeError, "epilogue_args[0] has dtype float64", "expected float32", "astype("),
    ),
    "vector elsewhere": (
        (A, B),
        {"epilogue": shifted, "epilogue_args": (cuda.to_device(B[0]),)},
        *(TypeError, "epilogue_args[0] is of kind Numba", "expected one kind", "convert"),
    ),
    "vector in out": (
        (A, B, SHARED[:, :5]),
        {"epilogue": shifted, "epilogue_args": (SHARED[0, 4:9],)},
        *(ValueError, "out shares memory with epilogue_args[0]", "apart", "copy of epilogue_args[0]"),
    ),
    "stage without epilogues": (
        (A, B),
        {"epilogue": relu, "stage": "naive"},
        *(ValueError, "stage is 'naive', which takes no epilogue", "one of stream_k", "pass"),
    ),
    "0-d": ((A, B, np.array(1, np.float32)), {}, ValueError, "out has shape ()", "expected (3, 5)", "no out"),
    "float64": ((A.astype(float), B), {}, TypeError, "a has dtype float64", "expected float32", "a.astype("),
    "integers": ((A, B.astype(int)), {}, TypeError, "b has dtype int64", "expected float32", "b.astype("),
    "byte order": ((A.astype(">f4"), B), {}, TypeError, "dtype >f4", "expected float32", "a.astype("),
    "out float16": (
        (A, B, C.astype(np.float16)),
        {},
        TypeError,
        "out has dtype float16",
        "float32",
        "allocate another array",
    ),
    "masked": ((np.ma.masked_array(A), B), {}, TypeError, "a is a NumPy masked array", "expected", ".filled("),
    "K": ((A, A), {}, ValueError, "a has shape (3, 4) and b has shape (3, 4)", "expected shapes (M, K)", "transpose"),
    "mixed": (
        (A, cuda.to_device(B)),
        {},
        TypeError,
        "a is of kind NumPy array and b of kind Numba",
        "one kind",
        "convert",
    ),
    "out kind": ((A, B, cuda.to_device(C)), {}, TypeError, "out is of kind Numba", "same kind", "pass such an array"),
    "out list": ((A, B, [[0.0]]), {}, TypeError, "out is of type list", "expected", "pass such an array, or no out"),
    "out tuple": ((A, B, (C,)), {}, TypeError, "out is of type tuple", "expected", "pass out[0]"),
    "out shape": ((A, B, C.T), {}, ValueError, "out has shape (5, 3)", "expected (3, 5)", "array of that shape"),
    "out read-only": ((A, B, frozen(C.copy())), {}, ValueError, "out is read-only", "can be written", "allocate"),
    "out is a": (
        (SHARED[:, :4], filled(4, 4), SHARED[:, :4]),
        {},
        ValueError,
        "shares memory with a",
        "apart",
        "copy of a",
    ),
    "out in b": ((filled(2, 3), SHARED[:, :6], SHARED[1:, 5:11]), {}, ValueError, "with b", "apart", "copy of b"),
    "out row repeated": (
        (A, B, np.lib.stride_tricks.as_strided(C.copy(), (3, 5), (0, 4))),
        *({}, ValueError, "strides (0, 4)", "expected distinct", "allocate"),
    ),
    "out windows": (
        (A, B, np.lib.stride_tricks.as_strided(C.copy(), (3, 5), (8, 4))),
        *({}, ValueError, "strides (8, 4)", "expected distinct", "allocate"),
    ),
    "beta alone": ((A, B), {"beta": 0.5}, ValueError, "beta is 0.5 and out is None", "expected an array C", "beta=0"),
    "complex alpha": ((A, B), {"alpha": 1j}, TypeError, "alpha is 1j, of type complex", "real number", "such as 1.0"),
    "beta text": ((A, B, C), {"beta": "1"}, TypeError, "beta is '1', of type str", "real number", "such as"),
    "alpha array": ((A, B), {"alpha": np.ones(1)}, TypeError, "of type ndarray and", "real number", "alpha.item()"),
    "alpha None": ((A, B), {"alpha": None}, TypeError, "alpha is None", "real number", "such as 1.0"),
    "alpha timedelta": ((A, B), {"alpha": np.timedelta64(3)}, TypeError, "of type timedelta64", "real number", "pass"),
    "beta timedelta": ((A, B, C), {"beta": np.array(np.timedelta64(3))}, TypeError, "beta is", "real number", "pass"),
    "alpha huge": ((A, B), {"alpha": 10**400}, ValueError, "alpha is beyond the range", "expected", "pass a float"),
    "stage": (
        (A, B),
        {"stage": "fastest"},
        ValueError,
        "stage is 'fastest'",
        "'auto' or one of naive, coalesced",
        "pass",
    ),
    "stage record": (
        (A, B),
        {"stage": stages()[0]},
        TypeError,
        "stage is of type LadderStage",
        "expected a str",
        "name of a stage",
    ),
    "c of another shape": ((A, B), {"c": A, "beta": 1}, ValueError, "c has shape (3, 4)", "expected (3, 5)", "reshape"),
    "c larger": ((A, B), {"c": C[None], "beta": 1}, ValueError, "c has shape (1, 3, 5)", "expected (3, 5)", "reshape"),
    "c float64": ((A, B), {"c": C.astype(float)}, TypeError, "c has dtype float64", "expected float32", "c.astype("),
    "c of Numba": ((A, B), {"c": cuda.to_device(C)}, TypeError, "c is of kind Numba", "expected one", "convert c"),
    "c overlaps out": ((A, B, C), {"c": C[:1], "beta": 1}, ValueError, "out shares memory with c", "same", "out=c"),
    "stream text": ((A, B), {"stream": "s"}, TypeError, "stream is 's', of type str", "expected a stream", "pass None"),
    "stream negative": ((A, B), {"stream": -1}, TypeError, "stream is -1", "not negative", "pass None"),
    "stream bool": ((A, B), {"stream": True}, TypeError, "stream is True", "expected a stream", "pass None"),
    "DLPack elsewhere": ((Exported(A, (8, 0)), B), {}, TypeError, "", "expected", ""),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case, monkeypatch):
    arguments, options, error, passed, expected, remedy = ERRORS[case]
    monkeypatch.setattr(launching, "launch_product", lambda *_: pytest.fail("launched in spite of the error"))
    with pytest.raises(error) as caught:
        tiled_sgemm(*arguments, **options)
    for words in (passed, expected, remedy):
        assert words in str(caught.value)


def test_every_stage_is_named_for_an_unknown_one():
    with pytest.raises(ValueError) as caught:
        tiled_sgemm(A, B, stage="nope")
    assert all(stage.name in str(caught.value) for stage in stages())


def test_stage_that_the_gpu_cannot_run(monkeypatch):
    old = devices.DeviceProperties("old", (7, 5), 40, 1.5e9, 4 << 20, 64 << 10, 3e11)
    monkeypatch.setattr(devices, "device_properties", lambda device=0: old)
    monkeypatch.setattr(launching, "launch_product", lambda *_: pytest.fail("launched"))
    with pytest.raises(
        ValueError, match=r"'async_copy'.* needs compute capability 8\.0; this GPU has 7\.5; pass 'auto'"
    ):
        tiled_sgemm(A, B, stage="async_copy")


def test_epilogue_needs_a_gpu_that_can(monkeypatch):
    old = devices.DeviceProperties("old", (7, 5), 40, 1.5e9, 4 << 20, 64 << 10, 3e11)
    monkeypatch.setattr(devices, "device_properties", lambda device=0: old)
    with pytest.raises(ValueError, match=r"epilogue is given, and this GPU has .* 7\.5; expected .* stream_k.*; apply"):
        tiled_sgemm(A, B, epilogue=relu)


@pytest.mark.simulator
@pytest.mark.parametrize("result", [None, 1j, "1", (1.0,)])
def test_epilogue_that_returns_no_number(result):
    with pytest.raises(TypeError, match=r"epilogue <lambda> returned .*; expected a Python function.*; return a float"):
        tiled_sgemm(A, B, stage="stream_k", epilogue=lambda value, row, col: result)


# Epilogues that do not compile, or whose result is not a number, and their error messages.
UNCOMPILABLE = {
    "lambda value, row, col: undefined(value)": "'undefined' is not defined",
    "lambda value, row, col: value.undefined": "Unknown attribute 'undefined' of type float32",
    "lambda value, row, col: helper(value)": "'helper': Cannot determine Numba type of <class 'function'>",
    "lambda value, row, col: table[0]": "List(float64",
    "lambda value, row, col: [value]": "NRT required",
    "opening": "construct is not supported",
    "lambda value, row, col: 'text'": "returns a value of type",
    "lambda value, row, col: None": "returns a value of type none",
    "lambda value, row, col: value * 1j": "returns a value of type complex128",
    "lambda value, row, col: (value, value)": "returns a value of type UniTuple(float32 x 2)",
    "cuda.jit(device=True)(lambda value, row, col: value.undefined)": "Unknown attribute 'undefined'",
}


def test_epilogues_that_do_not_compile():
    """The error is readable if there is a compiler."""
    code = f"""
from numba import cuda
from numba_gemm.runtime import epilogue as epilogues
table = [1.0]
def helper(value):
    return value
def opening(value, row, col):
    with open("file") as file:
        return value
for text in {list(UNCOMPILABLE)}:
    try:
        epilogues.check_result(epilogues.prepared(eval(text), 0), 0, (9, 0))
    except Exception as error:
        print(type(error).__name__, *str(error).splitlines())
def vectors(value, row, col, x, y):
    return value * x[row] + y[col]
epilogues.check_result(epilogues.prepared(vectors, 2), 2, (8, 0))
fast, plain = (epilogues.prepared(cuda.jit(device=True, fastmath=fast)(vectors), 2) for fast in (True, False))
assert [bool(one.targetoptions.get("fastmath")) for one in (fast, plain)] == [True, False]
epilogues.check_result(epilogues.prepared(lambda value, row, col: value > row, 0), 0, (9, 0))
"""
    done = fresh_python(code)
    assert done.returncode == 0, done.stderr
    for said, expected in zip(done.stdout.splitlines(), UNCOMPILABLE.values(), strict=True):
        assert said.startswith("TypeError epilogue ")
        assert "expected a Python function" in said
        assert expected in said
        assert len(said) < 1500
        assert "\x1b" not in said


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            "\x1b[1m\x1b[1mUntyped global name 'f':\x1b[0m \x1b[1m\x1b[31mCannot type f\x1b[0m\n\x1b[0m\x1b[1m\n"
            "\x1b[0m\x1b[1mDuring: Pass one\x1b[0m\n\x1b[0m\x1b[1mDuring: resolving callee type: f\x1b[0m",
            "Untyped global name 'f': Cannot type f",
        ),
        ("", "ValueError"),
    ],
    ids=["colours", "nothing"],
)
def test_what_the_compiler_said_is_readable(said, expected, monkeypatch):
    """With colours if colorama is installed."""

    def compiled(*_):
        raise ValueError(said)

    monkeypatch.setattr(epilogues.compiler, "result_type", compiled)
    with pytest.raises(TypeError, match=f"; the compiler said:\n{expected}$"):
        epilogues.check_result(relu, 0, (9, 0))


def test_errors_leave_out_alone():
    out = C.copy()
    with pytest.raises(TypeError):
        tiled_sgemm(A, B.astype(float), out)
    assert out.tobytes() == C.tobytes()


# ------------------------------------------------------------------------------------------------------- overlaps


def test_interleaved_out_is_allowed():
    shared = np.full((4, 12), NAN)
    a, b, out = shared[:, ::3], shared[:, 1::3], shared[:, 2::3]
    a[...], b[...] = filled(4, 4), filled(4, 4, seed=1)
    tiled_sgemm(a, b, out, stage="naive")
    check(out, a, b)


# ------------------------------------------------------------------------------------------------------ the package


def fresh_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    inherited["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-c", code], env=inherited | environment, capture_output=True, text=True, check=False
    )


def test_without_gpu_or_simulator():
    code = """
import numpy as np
from numba_gemm import GpuUnavailable, tiled_sgemm
try:
    tiled_sgemm(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32))
except GpuUnavailable as error:
    print(error)
"""
    done = fresh_python(code, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert "NUMBA_ENABLE_CUDASIM=1" in done.stdout
    assert "driver" in done.stdout


# Calls of `f` on `x`, of shape (2, 3), and their error messages if nothing can be launched.
WRONG_ANYWHERE = {
    "f(x, x.T, stage='fastest')": "ValueError: stage is 'fastest'; expected 'auto' or one of naive, coalesced",
    "f(x, x.T, stage=1)": "TypeError: stage is of type int",
    "f(x, x.T, alpha='1')": "TypeError: alpha is '1'",
    "f(x, x.T, beta=2)": "ValueError: beta is 2 and out is None",
    "f(x, x.T, stream='s')": "TypeError: stream is 's'",
    "f(x, [[1.0]])": "TypeError: b is of type list",
    "f(x, x.T.astype(float))": "TypeError: b has dtype float64",
    "f(x[:, 0], x.T)": "ValueError: a has shape (2,) and b has shape (3, 2)",
    "f(x, x)": "ValueError: a has shape (2, 3) and b has shape (2, 3)",
    "f(x, x.T, x)": "ValueError: out has shape (2, 3); expected (2, 2)",
    "f(x[:, :2], x[:, 1:], x[:, :2])": "ValueError: out shares memory with a",
}


def test_wrong_arguments_are_told_before_a_missing_gpu():
    code = f"""
import numpy as np
from numba_gemm import tiled_sgemm as f
x = np.ones((2, 3), np.float32)
for call in {list(WRONG_ANYWHERE)}:
    try:
        eval(call)
    except Exception as error:
        print(type(error).__name__, error, sep=": ")
"""
    done = fresh_python(code, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    for said, expected in zip(done.stdout.splitlines(), WRONG_ANYWHERE.values(), strict=True):
        assert said.startswith(expected)


def test_import_is_lazy_and_complete():
    code = """
import sys, numba_gemm
assert set(numba_gemm.__all__) <= set(dir(numba_gemm))
heavy = {"numba", "cuda", "cupy", "torch", "pandas"}
print(sorted(heavy & set(sys.modules)))
[getattr(numba_gemm, name) for name in numba_gemm.__all__]
import numba_gemm.gemm.plan, numba_gemm.gemm.explain
assert callable(numba_gemm.plan) and callable(numba_gemm.explain)
print(sorted((heavy - {"numba", "cuda"}) & set(sys.modules)))
"""
    done = fresh_python(code, NUMBA_ENABLE_CUDASIM="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n[]\n"


@pytest.mark.parametrize(
    ("library", "statement"),
    [
        ("torch", "import numba_gemm.torch"),
        ("torch", "from numba_gemm.distributed import distributed_sgemm"),
        ("jax", "import numba_gemm.jax"),
    ],
)
def test_a_library_that_is_missing_is_named_with_its_extra(library, statement):
    code = f"""
import sys
sys.modules["{library}"] = None
try:
    {statement}
except ModuleNotFoundError as error:
    print(error, error.name, type(error.__cause__).__name__, sep="; ")
"""
    done = fresh_python(code, NUMBA_ENABLE_CUDASIM="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{library} is not installed; expected")
    assert done.stdout.endswith(f"run pip install 'numba-gemm[{library}]'; {library}; ModuleNotFoundError\n")


def test_unknown_attribute():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = numba_gemm.nothing


def test_version_is_the_projects():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert numba_gemm.__version__ == project["version"]


def test_stages_lists_both_ladders():
    names = [stage.name for stage in stages()]
    assert isinstance(stages(), tuple)
    assert names == [*STAGES, *TENSOR_STAGES]
    assert names[:3] == ["naive", "coalesced", "shared_tile"]
    assert len(set(names)) == len(names)
    assert stages()[0] is STAGES["naive"]
    assert repr(stages()).startswith(f"<{len(names)} stages: naive, coalesced, ")


def test_stages_print_as_a_table():
    headings, *rows = str(stages()).splitlines()
    assert [row.split()[0] for row in rows] == [stage.name for stage in stages()]
    columns = [headings.index(heading) for heading in ("stage", "ladder", "precisions", "GPUs", "idea")]
    assert columns == sorted(columns)
    for row, stage in zip(rows, stages(), strict=True):
        assert row == row.rstrip()
        assert all(row[at - 2 : at] == "  " and row[at] != " " for at in columns[1:]), row
        name, ladder, precisions, gpus, idea = (
            row[at:end].strip() for at, end in zip(columns, [*columns[1:], len(row)], strict=True)
        )
        assert (name, idea) == (stage.name, stage.summary)
        assert ladder == ("FP32" if name in STAGES else "tensor cores")
        assert tuple(precisions.split(", ")) == stage.precisions
        assert gpus.startswith(f"{stage.min_cc[0]}.{stage.min_cc[1]} ")
        assert gpus.endswith("only" if stage.only_cc else "and later")


def test_signature():
    parameters = inspect.signature(tiled_sgemm).parameters
    keyword_only = [name for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY]
    assert keyword_only == ["alpha", "beta", "c", "stage", "precision", "stream", "epilogue", "epilogue_args"]
    assert list(parameters) == ["a", "b", "out", *keyword_only]
