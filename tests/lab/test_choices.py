"""Candidates of random products: which are timed, and what their times say of the choice."""

import dataclasses

import numpy as np
import pandas as pd
import pytest

from numba_gemm.gemm import heuristics
from numba_gemm.gemm import precision as precisions
from numba_gemm.gemm.precompile import model_of
from numba_gemm.lab.bench import choices

H100 = dataclasses.replace(model_of((9, 0)), memory_bandwidth=3.35e12)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("stored", ["N", "T"])
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (5, 8), (64, 33), (300, 500)])
def test_operands_have_the_layout_that_is_asked_for(rows, cols, stored, aligned):
    found = choices.host_matrix(rows, cols, stored, aligned)
    assert found.shape == (rows, cols)
    x = found if stored == "N" else found.T
    assert x.strides[1] == 4
    assert x.strides[0] >= 4 * x.shape[1]
    assert (x.ctypes.data % 16, x.strides[0] % 16 == 0) == ((0, True) if aligned else (4, False))


@pytest.mark.parametrize("precision", ["ieee", "bf16x6", "tf32", "fp32_auto"])
@pytest.mark.parametrize("shape", [(1, 4096, 4096), (4096, 4096, 1024), (100, 200, 3000), (4096, 4096, 64)])
def test_the_choice_is_the_first_candidate(monkeypatch, precision, shape):
    monkeypatch.setattr(precisions, "SIMULATOR", False)
    request, product = choices.request_of(*shape, "NT", True, precision)
    found = choices.candidates_of(product, precision, H100, 9, 1.6)
    assert found[0] == heuristics.best(heuristics.problem(product, H100, request.precision))
    assert found[0].precision == request.precision
    assert 2 <= len(found) == len({*found}) <= 9
    assert all(one.clocks <= 1.6 * found[0].clocks for one in found)


def test_fp32_auto_is_compared_with_the_other_precision(monkeypatch):
    """Also where the choice is the same: sums of 64 terms keep float32's error in float32 alone."""
    monkeypatch.setattr(precisions, "SIMULATOR", False)
    for k, expected in ((64, {"ieee"}), (300, {"ieee", "bf16x6"})):
        _, product = choices.request_of(1000, 1000, k, "NN", True, "fp32_auto")
        assert {one.precision for one in choices.candidates_of(product, "fp32_auto", H100, 100, 9.0)} == expected


def frame_of(*products):
    """Build a result: per product, precision and microseconds of the candidates, the choice first; expected is 10."""
    rows = [
        {"m": i, "n": 2, "k": 3, "layout": "NT", "aligned": i % 2 == 0, "precision": precision}
        | {"chosen": j == 0, "expected_us": 10.0, "us": us}
        for i, (precision, times) in enumerate(products)
        for j, us in enumerate(times)
    ]
    return pd.DataFrame(rows)


def test_choices_are_compared_with_the_fastest():
    told = choices.summary(frame_of(("ieee", [12.0, 10.0]), ("ieee", [10.0, 20.0]), ("bf16x6", [10.0, 8.0, 9.0])))
    assert told["precision"].tolist() == ["ieee", "bf16x6"]
    assert told["products"].tolist() == [2, 1]
    assert told["candidates"].tolist() == [4, 3]
    assert told["slower_mean"].tolist() == pytest.approx([1.1, 1.25])
    assert told["slower_worst"].tolist() == pytest.approx([1.2, 1.25])
    assert told["worst_case"].tolist() == ["0x2x3 NT", "2x2x3 NT"]
    logs = np.log([12 / 10, 1.0, 1.0, 2.0])
    assert told["expected_error"][0] == pytest.approx(np.sqrt(np.mean(logs**2)))


@pytest.mark.parametrize(
    ("times", "held"), [(([1.14, 1.0], [1.0] * 2, [1.0] * 5, [1.0], [1.0]), [True, True]), (([1.2, 1.0],), [False] * 2)]
)
def test_claims_about_choices(times, held):
    assert [*choices.claims(frame_of(*(("ieee", one) for one in times))).values()] == held


@pytest.mark.simulator
def test_candidates_are_timed():
    frame = choices.EXPERIMENT.frame(**choices.EXPERIMENT.small)
    assert (frame.groupby(choices.PRODUCT)["chosen"].sum() == 1).all()
    assert frame.groupby(choices.PRODUCT).ngroups == 3
    assert (frame["us"] > 0).all()
    assert len(frame) > 3
