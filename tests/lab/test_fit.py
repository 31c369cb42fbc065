"""The fit of the cost model: what it reads, and that it finds parameters again."""

import json
import sys

import numpy as np
import pytest

from numba_gemm.gemm import cost_model, ladder_heuristics
from numba_gemm.gemm.problem import Problem
from numba_gemm.lab.bench import choices, fit

GPU = {"name": "NVIDIA H200", "compute_capability": "9.0", "multiprocessors": 132, "max_clock_mhz": 1980.0}
GPU |= {"bandwidth_gb_s": 4814.304, "l2_bytes": 62914560}
SHAPES = [(64, 64, 4096), (300, 200, 5000), (128, 4096, 2048), (17, 900, 900), (1000, 1000, 1000), (1, 4096, 4096)]
SHAPES += [(2048, 2048, 64)]


@pytest.fixture(autouse=True)
def parameters_as_they_are():
    before = [one.read() for one in fit.PARAMETERS]
    yield
    for parameter, value in zip(fit.PARAMETERS, before):
        parameter.write(value)


def simulated(*changes):
    """Return products whose times are those that the model expects with other values of parameters."""
    wanted = [Problem(*shape, sm_count=132, memory_bandwidth=4.8e12) for shape in SHAPES]
    before = [(parameter, parameter.read()) for parameter, _ in changes]
    for parameter, value in changes:
        parameter.write(value)
    found = [fit.Measured(one, fit.expected(one)) for one in wanted]
    for parameter, value in before:
        parameter.write(value)
    return found


def test_the_model_has_all_parameters():
    assert all(one.read() > 0 or one.name == "floats" for one in fit.PARAMETERS)
    assert len({*fit.PARAMETERS}) == len(fit.PARAMETERS)


def test_a_step_that_helps_nothing_is_undone():
    parameter, products = fit.Parameter("MEET"), simulated()
    before, losses = parameter.read(), [fit.loss(one) for one in products]
    assert losses == [0.0] * len(SHAPES)
    assert fit.slower(products) == [1.0] * len(SHAPES)
    fit.improve(parameter, 0.1, products, losses)
    assert parameter.read() == before
    assert losses == [0.0] * len(SHAPES)


@pytest.mark.parametrize("factor", [2.0, 0.5])
@pytest.mark.parametrize(
    "parameter",
    [fit.Parameter("MEET"), *(fit.Parameter(name, ("stream_k", 64, 64, 16, 128, 2)) for name in ("first", "alone"))],
)
def test_a_parameter_is_found_again(monkeypatch, parameter, factor):
    monkeypatch.setattr(fit, "PARAMETERS", [parameter])
    start = parameter.read()
    products = simulated((parameter, factor * start))
    before = [fit.loss(one) for one in products]
    assert max(before) > 1e-4
    fit.fit(products, 60)
    assert parameter.read() == pytest.approx(factor * start, rel=0.05)
    assert sum(map(fit.loss, products)) < 0.01 * sum(before)


def test_efficiencies_are_at_most_one():
    assert not fit.Parameter("efficiency", ("stream_k", 128, 256, 16)).allows(1.01)
    assert fit.Parameter("first", ("stream_k", 128, 256, 16)).allows(1.01)
    assert not fit.Parameter("floats", ("thin", 16, 1, 256)).allows(0.0), "a configuration without a rate for floats"


@pytest.mark.parametrize("parameter", [fit.Parameter("LAUNCH"), fit.Parameter("first", ("coalesced", 2, 128, 1))])
def test_changes_are_seen_by_the_choice(parameter):
    wanted = Problem(20, 20, 4)
    before = ladder_heuristics.best_of_ladder(wanted)
    assert before.stage.name == "coalesced"
    parameter.write(parameter.read() / 2)
    assert ladder_heuristics.LAUNCH == cost_model.LAUNCH
    assert ladder_heuristics.best_of_ladder(wanted).clocks < 0.9 * before.clocks


def test_loss_of_a_choice():
    """The choice is expected to take 10 us and takes 12, another 11 and 8."""
    (wanted, us), *_ = simulated()
    first, second = sorted(us, key=us.__getitem__)[:2]
    told = {first: 10.0, second: 11.0, ("naive", "", None, False): 1.0}
    measured = fit.Measured(wanted, {first: 12.0, second: 8.0, ("of another version", "", None, False): 6.0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "expected", lambda _: told)
        weights = np.array([8 / 12, 1.0])
        errors = np.log([10 / 12, 11 / 8]) ** 2
        assert fit.loss(measured) == pytest.approx(np.log(12 / 8) + weights @ errors / weights.sum())
        assert fit.slower([measured]) == [12 / 6], "the fastest candidate counts, whoever knows it"


@pytest.mark.simulator
def test_the_command_reads_results_and_prints_parameters(tmp_path, monkeypatch, capsys):
    """On times of the simulator, which mean nothing."""
    frame = choices.EXPERIMENT.frame(**choices.EXPERIMENT.small | {"shapes": 8, "seed": 20261127})
    frame.to_csv(tmp_path / "choices.csv", index=False)
    (tmp_path / "choices.json").write_text(json.dumps({"gpu": GPU}))
    products = fit.read(tmp_path / "choices.csv")
    assert len(products) == 8
    assert sum(len(one.us) for one in products) == len(frame)
    for one in products:
        assert (one.wanted.sm_count, one.wanted.clock_hz, one.wanted.memory_bandwidth) == (132, 1.98e9, 4814.304e9)
        assert {*one.us} & {*fit.expected(one.wanted)}
    held_out = sum(fit.is_held_out(one.wanted) for one in products)
    assert 0 < held_out < 8
    monkeypatch.setattr(sys, "argv", ["fit", str(tmp_path / "choices.csv"), "--seconds", "1"])
    fit.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"before: {8 - held_out} products, ")
    assert f"held out: {held_out} products" in lines[0]
    assert any(line.startswith("MEET = ") for line in lines)
    assert any(line.startswith("('stream_k', 128, 256, 16): efficiency=") for line in lines)


@pytest.mark.simulator
def test_results_that_cannot_be_fitted_to(tmp_path, monkeypatch, capsys):
    frame = choices.EXPERIMENT.frame(**choices.EXPERIMENT.small | {"shapes": 2})
    frame.loc[0, "us"] = np.nan
    frame[frame["blocks"].isna()].drop(columns=["blocks", "whole"]).to_csv(tmp_path / "direct.csv", index=False)
    (tmp_path / "direct.json").write_text(json.dumps({"gpu": GPU}))
    (measured, *_) = fit.read(tmp_path / "direct.csv")
    assert all(partition is None for _, _, partition, _ in measured.us)
    assert not any(np.isnan(us) for us in measured.us.values())
    frame.assign(precision="bf16x6").to_csv(tmp_path / "direct.csv", index=False)
    monkeypatch.setattr(sys, "argv", ["fit", str(tmp_path / "direct.csv")])
    with pytest.raises(SystemExit, match="2"):
        fit.main()
    assert "too few products in ieee" in capsys.readouterr().err
