"""Closed forms: the error bound, the comparison that uses it in every verdict, and the roofline."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.operands import filled

from numba_gemm.models import roofline
from numba_gemm.models.accuracy import UNIT_ROUNDOFF, compare, ieee_bound, reference, underflow_bound

NAN, INF = np.nan, np.inf


@pytest.mark.parametrize("k", [0, 1, 2, 7, 64, 1024, 65_536, 2**30])
def test_bound_lies_between_one_rounding_and_all_of_them(k):
    assert UNIT_ROUNDOFF < ieee_bound(k) <= ieee_bound(2 * k + 1)
    if k < 2**20:  # beyond, the deterministic bound does not exist
        assert ieee_bound(k) <= 1.1 * (k + 2) * UNIT_ROUNDOFF


@pytest.mark.parametrize("k", [2, 16, 500, 4096, 16_000])
def test_a_lost_term_breaks_the_bound(k):
    """One of K similar terms is missing: an error of 1/K of the scale."""
    a, b = np.ones((1, k), np.float32), np.ones((k, 1), np.float32)
    expected, scale = reference(1.0, a, b)
    assert compare(expected.astype(np.float32), expected, scale, k).ok
    assert not compare((expected - 1).astype(np.float32), expected, scale, k).ok


@pytest.mark.parametrize("k", [1, 33, 1000, 20_000])
def test_a_float32_sum_keeps_the_bound(k):
    a, b = filled(3, k), filled(k, 4, seed=1)
    acc = np.zeros((3, 4), np.float32)
    for p in range(k):
        acc += a[:, p : p + 1] * b[p : p + 1]
    assert compare(acc, *reference(1.0, a, b), k).ok


def test_reference_reads_only_what_the_product_reads():
    a, b, c = np.full((2, 3), NAN), np.full((3, 2), NAN), np.full((2, 2), NAN)
    assert np.array_equal(reference(0.0, a, b, 2.0, np.ones((2, 2)))[0], np.full((2, 2), 2.0))
    assert np.array_equal(reference(1.0, np.ones((2, 3)), np.ones((3, 2)), 0.0, c)[0], np.full((2, 2), 3.0))
    assert np.array_equal(reference(1.0, a[:, :0], b[:0], 0.0, c)[0], np.zeros((2, 2)))
    expected, scale = reference(-2.0, np.ones((2, 3)), -np.ones((3, 2)), -1.0, np.ones((2, 2)))
    assert np.array_equal(expected, np.full((2, 2), 5.0))
    assert np.array_equal(scale, np.full((2, 2), 7.0))


@pytest.mark.parametrize(
    ("got", "expected", "ok"),
    [
        (1.0, 1.0, True),
        (1.0 + 2**-20, 1.0, False),
        (NAN, 1.0, False),
        (INF, 1.0, False),
        (1.0, NAN, False),
        (NAN, NAN, True),
        (INF, INF, True),
        (-INF, INF, False),
        (NAN, INF, False),
        (INF, 1e39, True),
        (3.4e38, 1e39, False),
        (0.0, 0.0, True),
        (1e-30, 0.0, False),
    ],
)
def test_comparison_of_one_element(got, expected, ok):
    scale = np.zeros((1, 1)) if expected == 0 else np.ones((1, 1))
    comparison = compare(np.full((1, 1), got, np.float32), np.full((1, 1), expected), scale, 1)
    assert comparison.ok is ok
    assert str(comparison).startswith("correct: ") is ok


@pytest.mark.parametrize("alpha", [1.0, -7.0, 0.3, 1e-30, -1e38])
@pytest.mark.parametrize("k", [0, 1, 5, 40])
def test_underflow_keeps_the_bound(alpha, k):
    """Products near and below the smallest subnormal, which alpha may scale up again."""
    a, b, c = (1e-22 * filled(m, n, seed) for seed, (m, n) in enumerate([(40, k), (k, 40), (40, 40)]))
    acc = np.zeros((40, 40), np.float32)
    for p in range(k):
        acc += a[:, p : p + 1] * b[p : p + 1]
    got = np.float32(alpha) * acc + np.float32(1e-23) * c
    comparison = compare(got, *reference(alpha, a, b, 1e-23, c), k, alpha=alpha)
    assert comparison.ok, comparison
    lost = np.full((1, 1), 4 * underflow_bound(k, alpha), np.float32)
    assert not compare(lost, np.zeros((1, 1)), np.zeros((1, 1)), k, alpha=alpha).ok
    assert compare(lost[:, :0], lost[:, :0], lost[:, :0], k, alpha=alpha).ok


def test_underflow_without_terms():
    assert underflow_bound(0, np.inf) == underflow_bound(0) == 2.0**-148


def test_comparison_names_the_worst_element():
    expected, scale = np.zeros((3, 4)), np.ones((3, 4))
    got = np.zeros((3, 4), np.float32)
    got[1, 2], got[2, 0] = 0.5, 0.25
    comparison = compare(got, expected, scale, 10)
    assert (comparison.row, comparison.col, comparison.got, comparison.expected) == (1, 2, 0.5, 0.0)
    assert comparison.in_bounds == pytest.approx(0.5 / ieee_bound(10), rel=1e-6)
    assert compare(got[:0], expected[:0], scale[:0], 10).ok
    with pytest.raises(ValueError, match="shapes differ"):
        compare(got, expected[:, :3], scale, 10)


def test_what_a_product_does_and_moves():
    assert roofline.gemm_flops(2, 3, 5) == 60
    assert roofline.gemm_bytes(2, 3, 5) == 4 * (10 + 15 + 6)
    assert roofline.gemm_bytes(2, 3, 5, beta=1.0) == 4 * (10 + 15 + 12)
    assert roofline.arithmetic_intensity(2, 3, 5) == 60 / 124
    assert roofline.arithmetic_intensity(0, 0, 0) == 0.0


def test_peak_of_an_h200():
    assert roofline.fp32_peak(132, 1.98e9, (9, 0)) == pytest.approx(66.9e12, rel=1e-3)
    assert roofline.fp32_peak(40, 1.59e9, (7, 5)) == pytest.approx(8.14e12, rel=1e-3)
    with pytest.raises(ValueError, match=r"compute capability 6\.1.*9\.0"):
        roofline.fp32_peak(20, 1e9, (6, 1))


def test_roofline_turns_where_both_bounds_meet():
    assert roofline.roofline(1.0, 60e12, 4e12) == 4e12
    assert roofline.roofline(15.0, 60e12, 4e12) == 60e12
    assert roofline.roofline(math.inf, 60e12, 4e12) == 60e12
