"""Batches beside cuBLAS: what is drawn, how operands are laid out, and what the claims say of it."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from numba_gemm.kernels.product import LAYOUTS
from numba_gemm.lab.bench import batches
from numba_gemm.models.roofline import gemm_flops


def test_squares_move_as_many_bytes():
    found = batches.squares()
    assert [one.m for one in found] == list(batches.SQUARES)
    for matrices, m, n, k, layout in found:
        assert (n, k, layout) == (m, m, "NN")
        assert matrices == batches.MOST_MATRICES or 0.95e8 < 12 * matrices * m * m <= 1e8


def test_random_batches_are_spread_over_extents_and_layouts():
    cases = batches.random_batches(2000, 512, 1)
    assert cases == batches.random_batches(2000, 512, 1) != batches.random_batches(2000, 512, 2)
    for one in cases:
        assert 2 <= one.matrices <= 20_000
        assert all(1 <= extent <= 512 for extent in one[1:4])
        assert one.bytes == 4 * one.matrices * (one.m * one.k + one.k * one.n + one.m * one.n) <= 4e8
        assert one.matrices * gemm_flops(*one[1:4]) <= 5e10
    extents = [extent for one in cases for extent in one[1:4]]
    assert 0.45 < sum(extent <= 22 for extent in extents) / len(extents) < 0.65  # the square root of 512
    assert {one.layout for one in cases} == set(LAYOUTS)


@pytest.mark.parametrize("stored", "NT")
def test_operands_are_described_as_they_are_drawn(stored):
    torch = SimpleNamespace(randn=lambda *shape, **_: np.empty(shape, np.float32))
    drawn, described = (make(3, 4, 5, stored) for make in (lambda *x: batches.stack(torch, None, *x), operand))
    assert (described.shape, described.strides) == (drawn.shape, drawn.strides)


def operand(*extents):
    return batches.operand("a", *extents)


@pytest.mark.parametrize(
    ("square", "drawn", "held"),
    [
        (1.0, [0.9, 1.3], [True, True, True]),
        (0.99, [0.89, 1.3], [False, True, False]),
        (2.0, [0.9, 1.1], [True, False, True]),
    ],
)
def test_claims(square, drawn, held):
    frame = pd.DataFrame({"drawn": [False, True, True], "ieee_ratio": [square, *drawn]})
    assert [bool(pd.Series(value).all()) for value in batches.claims(frame).values()] == held
