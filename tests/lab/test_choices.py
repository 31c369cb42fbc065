"""Candidates of random products: which are timed, and what their times say of the choice."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from numba_gemm.gemm import candidate_bench, fp32_auto, heuristics
from numba_gemm.gemm import precision as precisions
from numba_gemm.gemm.precompile import model_of
from numba_gemm.kernels.product import dense
from numba_gemm.lab.bench import choices, random_cases, random_products
from numba_gemm.runtime.device import device_properties

H100 = dataclasses.replace(model_of((9, 0)), memory_bandwidth=3.35e12)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("stored", ["N", "T"])
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (5, 8), (64, 33), (300, 500)])
def test_operands_are_laid_out_as_those_of_random_products(rows, cols, stored, aligned):
    found = random_cases.operand("a", rows, cols, stored, aligned)
    generator = SimpleNamespace(randn=lambda count, **_: torch_like(count))
    matrix = random_products.matrix(generator, None, aligned, rows, cols, stored)
    assert (found.shape, found.strides) == (matrix.shape, matrix.strides)
    assert found.pointer == matrix.offset


def torch_like(count):
    """Return a vector with the methods of PyTorch's that `random_products.matrix` calls, and an offset in bytes."""
    memory = np.empty(count, np.float32).view(Tensor)
    memory.start = memory.ctypes.data
    return memory


class Tensor(np.ndarray):
    start = 0

    def __array_finalize__(self, other):
        self.start = getattr(other, "start", 0)

    def view(self, *extents):
        return self.reshape(extents) if isinstance(extents[0], int) else super().view(*extents)

    @property
    def offset(self):
        return self.ctypes.data - self.start


@pytest.mark.parametrize("precision", ["ieee", "bf16x6", "tf32", "fp32_auto"])
@pytest.mark.parametrize("shape", [(1, 4096, 4096), (4096, 4096, 1024), (100, 200, 3000), (4096, 4096, 64)])
def test_the_choice_is_the_first_candidate(monkeypatch, precision, shape):
    monkeypatch.setattr(precisions, "SIMULATOR", False)
    request, product = random_cases.product_of(*shape, "NT", True, precision, H100)
    found = choices.candidates_of(product, request.precision, precision, H100, 9, 1.6)
    assert found[0] == heuristics.best(heuristics.problem(product, H100, request.precision))
    assert found[0].precision == ("ieee" if (precision, shape[0]) == ("tf32", 1) else request.precision)
    assert 2 <= len(found) == len({*found}) <= 9
    assert all(one.clocks <= 1.6 * found[0].clocks for one in found)


@pytest.mark.parametrize(
    ("shape", "layout", "aligned"), [((16423, 15993, 335), "TN", True), ((293, 16022, 1012), "NT", False)]
)
def test_fp32_auto_stands_for_what_a_call_computes_in(monkeypatch, shape, layout, aligned):
    """A call decides as for a new C, also where the other precision is expected to write this C sooner."""
    monkeypatch.setattr(precisions, "SIMULATOR", False)
    request, product = random_cases.product_of(*shape, layout, aligned, "fp32_auto", H100)
    new = product._replace(c=dense("N", *shape[:2]))
    assert request.precision == fp32_auto.resolved("fp32_auto", new, H100)
    found = choices.candidates_of(product, request.precision, "fp32_auto", H100, 100, 9.0)
    assert {found[0].precision} == {request.precision}
    assert {one.precision for one in found} == {"ieee", "bf16x6"}


def test_short_sums_keep_the_error_of_float32_in_float32_alone(monkeypatch):
    monkeypatch.setattr(precisions, "SIMULATOR", False)
    request, product = random_cases.product_of(1000, 1000, 64, "NN", True, "fp32_auto", H100)
    found = choices.candidates_of(product, request.precision, "fp32_auto", H100, 100, 9.0)
    assert {one.precision for one in found} == {"ieee"}


@pytest.fixture
def case():
    """A small product and three candidates."""
    gpu = device_properties(0)
    request, product = random_cases.product_of(5, 6, 7, "NN", True, "ieee", gpu)
    found = choices.candidates_of(product, "ieee", "ieee", gpu, 3, 100.0)
    assert len(found) == 3
    return request, product, found


@pytest.fixture
def wrong(monkeypatch):
    """A list: candidates in it write a wrong element."""
    launch, found = candidate_bench.launch_choice, []

    def launched(product, choice, alpha, a, b, beta, c, *others):
        launch(product, choice, alpha, a, b, beta, c, *others)
        if choice in found:
            c.owner[0, 0] += 1

    monkeypatch.setattr(candidate_bench, "launch_choice", launched)
    return found


@pytest.mark.simulator
def test_a_choice_that_no_other_candidate_confirms_is_an_error(case, wrong):
    *_, found = case
    wrong.append(found[0])
    with (
        pytest.warns(RuntimeWarning, match="differs from the first"),
        pytest.raises(RuntimeError, match="and all other candidates have different results"),
    ):
        choices.timed(*case, 1)


@pytest.mark.simulator
def test_a_candidate_that_is_wrong_is_left_out(case, wrong):
    *_, found = case
    wrong.append(found[1])
    with pytest.warns(RuntimeWarning, match="differs from the first"):
        assert [one for one, _ in choices.timed(*case, 1)] == [found[0], found[2]]


@pytest.mark.simulator
def test_a_choice_that_cannot_run_is_an_error(case, monkeypatch):
    *_, found = case
    prepare = candidate_bench.CandidateBench._prepare

    def fails(bench, choice):
        if choice is found[0]:
            raise RuntimeError("no registers")
        prepare(bench, choice)

    monkeypatch.setattr(candidate_bench.CandidateBench, "_prepare", fails)
    with (
        pytest.warns(RuntimeWarning, match="no registers"),
        pytest.raises(RuntimeError, match=r"the model's choice, .*, cannot run"),
    ):
        choices.timed(*case, 1)


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
    """Products with one candidate say nothing."""
    products = (("ieee", [12.0, 10.0]), ("ieee", [10.0, 20.0]), ("bf16x6", [10.0, 8.0, 9.0]), ("ieee", [7.0]))
    told = choices.summary(frame_of(*products))
    assert told["precision"].tolist() == ["ieee", "bf16x6"]
    assert told["products"].tolist() == [2, 1]
    assert told["candidates"].tolist() == [4, 3]
    assert told["slower_mean"].tolist() == pytest.approx([1.1, 1.25])
    assert told["slower_worst"].tolist() == pytest.approx([1.2, 1.25])
    assert told["worst_case"].tolist() == ["0x2x3 NT", "2x2x3 NT"]
    logs = np.log([12 / 10, 1.0, 1.0, 2.0])
    assert told["expected_error"][0] == pytest.approx(np.sqrt(np.mean(logs**2)))


RIGHT = ([1.14, 1.0], [1.0] * 2, [1.0] * 5, [1.0, 3.0], [1.0, 2.0])


@pytest.mark.parametrize(("times", "held"), [(RIGHT, [True, True]), (([1.2, 1.0],), [False, False])])
def test_claims_about_choices(times, held):
    assert [*choices.claims(frame_of(*(("ieee", one) for one in times))).values()] == held


@pytest.mark.simulator
def test_candidates_are_timed():
    frame = choices.EXPERIMENT.frame(**choices.EXPERIMENT.small)
    assert (frame.groupby(choices.PRODUCT)["chosen"].sum() == 1).all()
    assert frame.groupby(choices.PRODUCT).ngroups == 3
    assert (frame["us"] > 0).all()
    assert len(frame) > 3
