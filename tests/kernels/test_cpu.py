"""The triple loop on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from support.operands import LAYOUTS, check, filled, frozen

from numba_gemm import cpu_sgemm


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (0.5, -2.0), (0.0, 3.0)])
@pytest.mark.parametrize("shape", [(1, 1, 1), (13, 7, 29), (4, 5, 0), (0, 3, 2), (3, 0, 2)])
def test_products(shape, alpha, beta, layout):
    m, n, k = shape
    a, b = LAYOUTS[layout](filled(m, k)), LAYOUTS[layout](filled(k, n, seed=1))
    c = filled(m, n, seed=2)
    out = np.full_like(c, np.nan) if beta == 0 else c.copy()
    assert cpu_sgemm(a, b, out, alpha=alpha, beta=beta) is out
    check(out, a, b, alpha=alpha, beta=beta, c=c)
    if beta == 0:
        check(cpu_sgemm(a, b, alpha=alpha), a, b, alpha=alpha)


def test_alpha_zero_reads_neither_operand():
    bad = np.full((3, 3), np.nan, np.float32)
    assert np.array_equal(cpu_sgemm(bad, bad, alpha=0.0), np.zeros((3, 3)))


def test_scalars_beyond_float32_round_silently():
    ones = np.ones((1, 1), np.float32)
    with np.errstate(all="raise"):
        assert cpu_sgemm(ones, ones, alpha=1e300)[0, 0] == np.inf
        assert cpu_sgemm(ones, ones, ones.copy(), alpha=1e-300, beta=-1e300)[0, 0] == -np.inf


X = filled(3, 3)


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "words"),
    [
        (([[1.0]], X), {}, TypeError, "a is of type list"),
        ((X, X.astype(np.float64)), {}, TypeError, "b is of shape .* and dtype float64"),
        ((X[0], X), {}, TypeError, "a is of shape .* and dtype float32; expected .* 2-D"),
        ((X, X, [1]), {}, TypeError, "out is of type list"),
        ((X, filled(4, 3)), {}, ValueError, "columns"),
        ((X, X, filled(3, 4)), {}, ValueError, "out is"),
        ((X, X, frozen(filled(3, 3))), {}, ValueError, "read-only"),
        ((X, X, X), {}, ValueError, "overlaps"),
        ((X, X), {"beta": 1.0}, ValueError, "no out"),
        ((X, X), {"alpha": None}, TypeError, "alpha is None, of type NoneType; expected a real number"),
        ((X, X), {"alpha": [2.0]}, TypeError, "expected a real number; pass a number"),
        ((X, X), {"alpha": 10**400}, ValueError, "alpha is beyond the range of a float"),
    ],
)
def test_errors(arguments, keywords, error, words):
    with pytest.raises(error, match=words):
        cpu_sgemm(*arguments, **keywords)
