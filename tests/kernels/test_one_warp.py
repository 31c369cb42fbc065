"""The stage `one_warp`: the table of the FP32 ladder in BF16, on a GPU or on the simulator's tensor cores."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from support.ladder_cases import LAYOUTS, Case, cases, run
from support.operands import filled

from numba_gemm.device import narrow
from numba_gemm.kernels.tensor_core import TENSOR_STAGES, one_warp
from numba_gemm.models.accuracy import bound
from numba_gemm.runtime import launch
from numba_gemm.runtime.device import get_device
from numba_gemm.runtime.matrix import Matrix
from numba_gemm.simulator import scheduler, tensor_core
from numba_gemm.simulator.switch import SIMULATOR

STAGE = TENSOR_STAGES["one_warp"]
(CONFIG,) = STAGE.configs
PRECISION = "bf16"

simulated = pytest.mark.skipif(not SIMULATOR, reason="runs on the simulator")


@pytest.fixture(autouse=True)
def _able():
    if not SIMULATOR and not STAGE.runs_on(cc := get_device(0).properties.cc):
        pytest.skip(f"compute capability {cc} has no such instruction")


def product(a, b, c, alpha=1.0, beta=0.0):
    matrices = [Matrix(x.ctypes.data, *x.shape, *x.strides, 0, x) for x in (a, b, c)]
    launch.launch(STAGE, CONFIG, alpha, matrices[0], matrices[1], beta, matrices[2], precision=PRECISION)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_table(layout):
    for case in cases(CONFIG):
        if case.layout == layout:
            outcome = run(STAGE, CONFIG, case, precision=PRECISION)
            assert outcome.ok, f"{case}: {outcome}"


def test_the_transpose():
    outcome = run(STAGE, CONFIG, Case((19, 21, 33), "rows", 0.5, -2.0), swapped=True, precision=PRECISION)
    assert outcome.ok, str(outcome)


@simulated
def test_any_thread_order_gives_the_same_bits(monkeypatch):
    results = set()
    for seed in (None, 1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(launch.scheduler, "run", functools.partial(scheduler.run, seed=seed))
            results.add(run(STAGE, CONFIG, Case((17, 9, 35), "rows", 1.0, 1.0), precision=PRECISION).result.tobytes())
    assert len(results) == 1


@simulated
def test_sums_are_those_of_the_model():
    """To the bit, and of positive operands too small, since each instruction truncates."""
    m, n, k = 16, 8, 256
    a, b = np.abs(filled(m, k, 1)), np.abs(filled(k, n, 2))
    c = np.full((m, n), np.nan, np.float32)
    product(a, b, c)
    x, y = (np.vectorize(narrow.bf16, otypes=[np.float32])(operand).astype(np.float64) for operand in (a, b))
    expected = np.zeros((m, n))
    for i in range(0, k, 16):
        expected = tensor_core.add_products(expected, x[:, None, i : i + 16] * y.T[None, :, i : i + 16])
    assert np.array_equal(c, expected)
    exact = x @ y
    assert (c <= exact).all()
    rounded = np.abs((x.astype(np.float32) @ y.astype(np.float32)) - exact).mean()
    assert (exact - c).mean() > 2 * rounded
    wide = a.astype(np.float64) @ b
    assert (np.abs(c - wide) <= bound(PRECISION, k) * wide).all()


@simulated
@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan])
def test_special_values_stay_in_their_row(special):
    """Zeros beyond the edge of K meet zeros alone, so they make no NaN of an infinity."""
    a, b, c = filled(5, 3, 1), np.abs(filled(3, 4, 2)) + 1, np.zeros((5, 4), np.float32)
    a[2, 1] = special
    product(a, b, c)
    assert np.isnan(c[2]).all() if np.isnan(special) else (c[2] == special).all()
    assert np.isfinite(np.delete(c, 2, axis=0)).all()


def test_other_tiles_are_refused():
    for changed in ({"BM": 32}, {"BN": 16}, {"BK": 8}, {"TM": 4, "TN": 1}):
        config = type(CONFIG)(**{"BM": 16, "BN": 8, "BK": 16, "TM": 2, "TN": 2} | changed)
        with pytest.raises(ValueError, match=r"the instruction's extents|2x2 sums per lane"):
            one_warp.build(config, STAGE.kernel_of(CONFIG, PRECISION).variant)
