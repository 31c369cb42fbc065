"""The fit of the cost model: what it reads, and that it finds parameters again."""

import json
import sys

import pytest

from numba_gemm.gemm import cost_model, ladder_heuristics
from numba_gemm.gemm.problem import Problem
from numba_gemm.lab.bench import choices, fit

GPU = {"name": "NVIDIA H200", "compute_capability": "9.0", "multiprocessors": 132, "max_clock_mhz": 1980.0}
GPU |= {"bandwidth_gb_s": 4814.304, "l2_bytes": 62914560}
SHAPES = [(64, 64, 4096), (300, 200, 5000), (128, 4096, 2048), (17, 900, 900), (1000, 1000, 1000), (1, 4096, 4096)]


@pytest.fixture(autouse=True)
def parameters_as_they_are():
    before = [one.read() for one in fit.PARAMETERS]
    yield
    for parameter, value in zip(fit.PARAMETERS, before):
        parameter.write(value)


def simulated(**changed):
    """Return products whose times are those that the model expects with other parameters."""
    wanted = [Problem(*shape, sm_count=132, memory_bandwidth=4.8e12) for shape in SHAPES]
    before = {name: getattr(cost_model, name) for name in changed}
    for name, value in changed.items():
        fit.Parameter(name).write(value)
    found = [fit.Measured(one, fit.expected(one)) for one in wanted]
    for name, value in before.items():
        fit.Parameter(name).write(value)
    return found


def test_the_model_has_all_parameters():
    assert all(one.read() > 0 or one.name == "floats" for one in fit.PARAMETERS)
    assert len({*fit.PARAMETERS}) == len(fit.PARAMETERS)


def test_times_as_expected_leave_nothing_to_fit():
    products = simulated()
    assert fit.slower(products) == [1.0] * len(SHAPES)
    before = [one.read() for one in fit.PARAMETERS]
    fit.improve(fit.Parameter("MEET"), 0.1, products, [fit.loss(one) for one in products])
    assert [one.read() for one in fit.PARAMETERS] == before


def test_a_constant_is_found_again(monkeypatch):
    monkeypatch.setattr(fit, "PARAMETERS", [fit.Parameter("MEET")])
    start, products = cost_model.MEET, simulated(MEET=2 * cost_model.MEET)
    before = [fit.loss(one) for one in products]
    assert max(before) > 0.001
    fit.fit(products, 60)
    assert 1.9 * start < cost_model.MEET < 2.1 * start
    assert sum(map(fit.loss, products)) < 0.01 * sum(before)


def test_changes_are_seen_everywhere():
    wanted = Problem(64, 64, 64)
    before = ladder_heuristics.best_of_ladder(wanted)
    fit.Parameter("LAUNCH").write(2 * cost_model.LAUNCH)
    assert ladder_heuristics.LAUNCH == cost_model.LAUNCH
    assert ladder_heuristics.best_of_ladder(wanted).clocks > 1.2 * before.clocks


@pytest.mark.simulator
def test_the_command_reads_results_and_prints_parameters(tmp_path, monkeypatch, capsys):
    """On times of the simulator, which mean nothing."""
    frame = choices.EXPERIMENT.frame(**choices.EXPERIMENT.small | {"shapes": 5})
    frame.to_csv(tmp_path / "choices.csv", index=False)
    (tmp_path / "choices.json").write_text(json.dumps({"gpu": GPU}))
    products = fit.read(tmp_path / "choices.csv")
    assert len(products) == 5
    assert sum(len(one.us) for one in products) == len(frame)
    for one in products:
        assert (one.wanted.sm_count, one.wanted.clock_hz, one.wanted.memory_bandwidth) == (132, 1.98e9, 4814.304e9)
        assert {*one.us} & {*fit.expected(one.wanted)}
    monkeypatch.setattr(sys, "argv", ["fit", str(tmp_path / "choices.csv"), "--seconds", "1"])
    fit.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("before: 3 products, ")
    assert "held out: 2 products" in lines[0]
    assert any(line.startswith("MEET = ") for line in lines)
    assert any(line.startswith("('stream_k', 128, 256, 16): efficiency=") for line in lines)
