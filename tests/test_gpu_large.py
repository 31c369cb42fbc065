"""Operands of more than 2**31 elements: every address is computed in 64 bits."""

from __future__ import annotations

import pytest
from support.ladder_cases import STAGES_AND_DEFAULTS

from numba_gemm.models.accuracy import compare, reference
from numba_gemm.runtime.device import synchronize
from numba_gemm.runtime.launch import launch
from numba_gemm.runtime.matrix import Matrix

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.usefixtures("memory_returned")]

SMALL = 4
LARGE_ROWS = 65_540
PROBE = 40  # rows, or columns, at either end that are compared


def matrix(x):
    return Matrix(x.data.ptr, *x.shape, *x.strides, 0, x)


@pytest.mark.parametrize("large_cols", [32_769, 32_772], ids=["any", "aligned"])
@pytest.mark.parametrize("large", ["a", "b", "c"])
def test_more_than_2_to_the_31_elements(large, large_cols):
    cupy = pytest.importorskip("cupy")
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 12 << 30:
        pytest.skip("needs 12 GiB of GPU memory")
    shapes = {
        "a": (LARGE_ROWS, SMALL, large_cols),
        "b": (SMALL, large_cols, LARGE_ROWS),
        "c": (LARGE_ROWS, large_cols, SMALL),
    }
    m, n, k = shapes[large]
    random = cupy.random.default_rng(0)
    a = random.random((m, k), cupy.float32)
    b = random.random((k, n), cupy.float32)
    c = cupy.empty((m, n), cupy.float32)
    assert max(a.size, b.size, c.size) > 2**31
    corners = [
        (slice(0, PROBE), slice(0, PROBE)),
        (slice(m - PROBE if m > PROBE else 0, m), slice(max(n - PROBE, 0), n)),
    ]
    for stage, config in STAGES_AND_DEFAULTS:
        c.fill(cupy.nan)
        cupy.cuda.Device().synchronize()
        launch(stage, config, 1.0, matrix(a), matrix(b), 0.0, matrix(c))
        synchronize()
        assert all(matrix(x).layout.aligned for x in (a, b, c)) == (large_cols % 4 == 0 and k % 4 == 0)
        assert not bool(cupy.isnan(c).any()), f"{stage.name} left elements unwritten"
        for rows, cols in corners:
            a_part, b_part = a[rows].get(), b[:, cols].get()
            expected, scale = reference(1.0, a_part, b_part)
            comparison = compare(c[rows, cols].get(), expected, scale, k)
            assert comparison.ok, f"{stage.name} {config.name} [{rows}, {cols}]: {comparison}"
