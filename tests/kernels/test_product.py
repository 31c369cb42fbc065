"""Layouts against NumPy's views: submatrices, transposes, spans and alignment."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.operands import layout_of

from numba_gemm.kernels.product import Batch, Layout, Product, check_dtypes, dense

BUFFER = np.zeros(4096, np.float32)
BUFFER = BUFFER[-BUFFER.ctypes.data % 16 // 4 :]  # from the first multiple of 16 bytes


@st.composite
def views(draw, smallest=1):
    """Draw a matrix with any steps between its rows and columns, which may overlap or run backwards."""
    rows, cols = draw(st.integers(smallest, 6)), draw(st.integers(1, 9))
    steps = [draw(st.sampled_from([0, 1, -1, 2, 3, 4, -4, 8, 9, 12, -12])) for _ in range(2)]
    start = 400 + draw(st.integers(0, 7))
    return np.lib.stride_tricks.as_strided(BUFFER[start:], (rows, cols), [4 * step for step in steps])


def addresses(x):
    """Return the addresses of all elements, as NumPy's views have them."""
    places = itertools.product(*map(range, x.shape))
    return [x[row : row + 1, col : col + 1].ctypes.data for row, col in places]


def test_dtypes_of_numpy_count_by_name():
    for dtype in ("float16", np.float16, np.dtype("float16"), ["float16", np.float16]):
        assert check_dtypes(dtype) == ("float16", "float16")
    assert check_dtypes((np.float32, "bfloat16")) == ("float32", "bfloat16")


@given(views(), st.data())
def test_part_is_a_slice(x, data):
    (first_row, end_row), (first_col, end_col) = (
        sorted(data.draw(st.lists(st.integers(0, extent), min_size=2, max_size=2, unique=True))) for extent in x.shape
    )
    part = x[first_row:end_row, first_col:end_col]
    found = layout_of(x).part(first_row, first_col, end_row - first_row, end_col - first_col)
    assert found == (part.ctypes.data - x.ctypes.data, layout_of(part))


def test_part_without_elements():
    assert dense("N", 8, 8).part(3, 5, 0, 2) == (116, Layout(0, 2, 32, 4, 4))
    assert dense("N", 8, 8).part(0, 0, 8, 0) == (0, Layout(8, 0, 32, 4, 0))


def test_part_of_a_part():
    layout = Layout(64, 32, -132, 4, 8)
    first, outer = layout.part(5, 3, 40, 20)
    second, inner = outer.part(7, 11, 9, 4)
    assert layout.part(12, 14, 9, 4) == (first + second, inner)


@given(views())
def test_transposed_is_numpy_s(x):
    assert layout_of(x).transposed == layout_of(x.T)
    assert layout_of(x).words == (*x.shape, *x.strides)


@given(views())
def test_span_reaches_from_the_first_byte_to_the_last(x):
    places = [address - x.ctypes.data for address in addresses(x)]
    assert layout_of(x).span == (min(places), max(places) + 4)


@settings(max_examples=500)
@given(views(smallest=2))
def test_aligned_if_every_vector_of_four_is(x):
    """Views have several rows; the stride of a single row counts as well (`test_ladder.py`)."""
    whole = x.shape[1] % 4 == 0 and x.strides[1] == 4
    vectors = [
        x[row : row + 1, col : col + 1].ctypes.data for row in range(x.shape[0]) for col in range(0, x.shape[1], 4)
    ]
    assert layout_of(x).aligned == (whole and all(address % 16 == 0 for address in vectors))


@pytest.mark.parametrize(
    ("layout", "aligned"),
    [
        (Layout(8, 8, 32, 4), True),
        (Layout(8, 8, 32, 4, 4), False),
        (Layout(8, 8, 36, 4), False),
        (Layout(8, 6, 32, 4), False),
        (Layout(8, 8, 4, 32), False),
        (Layout(8, 8, -32, 4), True),
        (Layout(8, 8, 32, -4), False),
        (Layout(8, 8, 0, 4), True),
        (Layout(8, 0, 32, 8), True),
        (Layout(8, 0, 36, 8), False),
        (Layout(8, 0, 32, 8, 8), False),
        (Layout(1, 8, 36, 4), False),
    ],
)
def test_aligned(layout, aligned):
    assert layout.aligned is aligned


@pytest.mark.parametrize(("order", "numpy_order"), [("N", "C"), ("T", "F")])
def test_dense(order, numpy_order):
    x = np.ndarray((12, 20), np.float32, BUFFER, order=numpy_order)
    assert dense(order, 12, 20) == layout_of(x)


def test_transposed_product_swaps_operands():
    a, b, c = (np.ndarray(shape, np.float32, BUFFER) for shape in ((3, 5), (5, 8), (3, 8)))
    product = Product(*map(layout_of, (a, b, c)), Batch((2, 3, 4), (1, 2, 3), (4, 5, 6), (7, 8, 9)))
    assert (product.m, product.n, product.k, product.batch.matrices) == (3, 8, 5, 24)
    turned = product.transposed
    assert turned[:3] == (layout_of(b.T), layout_of(a.T), layout_of(c.T))
    assert turned.batch == Batch((2, 3, 4), (4, 5, 6), (1, 2, 3), (7, 8, 9))
    assert turned.transposed == product
