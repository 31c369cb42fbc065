"""The harness of all experiments: options, machine checks, files, interruption, claims and exit statuses."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from numba_gemm.lab import __main__ as cli
from numba_gemm.lab import registry
from numba_gemm.lab.bench import streamed
from numba_gemm.lab.harness import experiment as lab
from numba_gemm.lab.harness import pictures, runner

RESULTS = Path(__file__).parents[2] / "results"
LATEST = RESULTS / "h200" / "latest"

every_experiment = pytest.mark.parametrize("name", registry.EXPERIMENTS)


def measured(sizes: Sequence[int] = (1, 2), share: float = 0.5, cold: bool = False, seed: int | None = None):
    """Measure.

    Parameters
    ----------
    sizes: Sizes, as many
        as there are.
    share, cold: Other parameters.

    Returns
    -------
    DataFrame
        One row per size.
    """
    yield from ({"size": size, "us": size * share, "seed": seed} for size in sizes)


def plot(frame, figure):
    figure.subplots().plot(frame["size"], frame["us"])


def interrupted():
    yield pd.DataFrame({"us": [1.0]})
    raise KeyboardInterrupt


def failing():
    yield pd.DataFrame({"us": [1.0]})
    raise AssertionError("a product is wrong")


def unavailable():
    raise lab.Unavailable("it has one device")


EXPERIMENTS = {
    "measured": lab.Experiment(measured, plot=plot, small={"share": 0.25}, facts=lambda frame: {"x": 1}),
    "claiming": lab.Experiment(
        measured,
        "claiming",
        claims=lambda frame: {"sizes are small": bool((frame["size"] < 3).all())},
        summary=lambda frame: frame[["us"]],
        summary_file="summary.csv",
        needs=("simulator",),
    ),
    "particular": lab.Experiment(
        measured,
        "particular",
        claims=lambda frame: {"size 2 takes 1": frame.set_index("size")["us"].loc[2] == 1.0},
        needs=("simulator",),
    ),
    "interrupted": lab.Experiment(interrupted, lesson="Interrupted."),
    "failing": lab.Experiment(failing),
    "unavailable": lab.Experiment(unavailable),
}


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run experiments of this module by the command line, in the simulator wherever the tests run."""
    monkeypatch.setattr(registry, "EXPERIMENTS", EXPERIMENTS)
    monkeypatch.setattr(registry, "load", lambda name: EXPERIMENTS[name])
    monkeypatch.setattr(runner, "SIMULATOR", True)
    names = EXPERIMENTS.keys()

    def main(*arguments: str) -> int:
        count = sum(word in names for word in arguments)
        return cli.main([*arguments[:count], f"--out={tmp_path}", *arguments[count:]])

    return main


def test_parameters_are_those_of_the_function():
    found = EXPERIMENTS["measured"].parameters
    assert {name: parameter.help for name, parameter in found.items()} == {
        "sizes": "Sizes, as many as there are.",
        "share": "Other parameters.",
        "cold": "Other parameters.",
        "seed": "Seed of the operands.",
    }
    assert found["sizes"].parse("3,4") == (3, 4)
    assert found["seed"].parse("5") == 5


def test_a_value_may_contain_a_comma_and_a_space():
    parse = registry.load("bank_conflicts").parameters["patterns"].parse
    assert parse("broadcast,multicast, pairs") == ("broadcast", "multicast, pairs")


def test_options_reach_the_function_and_the_record(run, tmp_path):
    assert run("measured", "--sizes", "3,4", "--cold", "--seed=7") == 0
    frame = pd.read_csv(tmp_path / "measured.csv")
    assert list(frame["size"]) == [3, 4]
    assert list(frame["us"]) == [0.75, 1.0]  # by the default of the simulator
    described = json.loads((tmp_path / "measured.json").read_text(encoding="utf-8"))
    assert described["command"] == "numba-gemm lab measured --share 0.25 --sizes 3,4 --cold --seed 7"
    assert (described["seed"], described["x"], described["simulator"]) == (7, 1, True)
    assert {path.name for path in tmp_path.iterdir()} == set(EXPERIMENTS["measured"].files)


def test_a_seed_is_drawn_and_recorded(run, tmp_path):
    assert run("measured", "--no-plot") == 0
    described = json.loads((tmp_path / "measured.json").read_text(encoding="utf-8"))
    assert (pd.read_csv(tmp_path / "measured.csv")["seed"] == described["seed"]).all()
    assert described["command"].endswith(f"--seed {described['seed']}")
    assert not (tmp_path / "measured.png").exists()


@pytest.mark.parametrize(("sizes", "status", "said"), [("1,2", 0, "holds:"), ("1,3", 1, "DOES NOT HOLD:")])
def test_claims_decide_the_status(run, tmp_path, capsys, sizes, status, said):
    assert run("claiming", f"--sizes={sizes}") == status
    assert f"{said} sizes are small" in capsys.readouterr().out
    assert (tmp_path / "summary.csv").read_text().splitlines()[0] == "us"


def test_claims_about_rows_that_other_parameters_leave_out_are_not_checked(run, capsys):
    assert run("particular") == 0
    assert "holds: size 2 takes 1" in capsys.readouterr().out
    assert run("particular", "--sizes=3") == 0
    assert "claims are not checked" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("holds", "expected"),
    [
        (True, {"it is so": True}),
        (np.bool_(False), {"it is so": False}),
        (pd.Series([True, True]), {"it is so": True}),
        (pd.Series([True, False]), {"it is so": False}),
        (pd.Series([], dtype=bool), {}),
        ((size > 1 for size in (2, 1)), {"it is so": False}),
        ((size > 1 for size in (2, 3)), {"it is so": True}),
        (iter(()), {}),
    ],
)
def test_claims_are_decided(holds, expected):
    found = lab.Experiment(measured, "whole", claims=lambda frame: {"it is so": holds}).claims(pd.DataFrame())
    assert found == expected
    assert all(type(value) is bool for value in found.values())


def test_a_frame_is_the_last_of_those_that_are_yielded():
    assert list(EXPERIMENTS["measured"].frame(sizes=(3, 5))["size"]) == [3, 5]
    whole = lab.Experiment(lambda size=1: pd.DataFrame({"size": [size]}), "whole", lesson="Whole.")
    assert list(whole.frame(size=4)["size"]) == [4]


def test_a_parameter_may_be_described_in_one_line():
    assert lab._descriptions("""Measure.

Parameters
----------
sizes: Sizes, as many
    as there are.
m, n: Extents.
share: Share: a fraction.
""") == {"sizes": "Sizes, as many as there are.", "m": "Extents.", "n": "Extents.", "share": "Share: a fraction."}


@pytest.mark.parametrize(
    ("name", "status", "said"), [("interrupted", 130, "interrupted\n"), ("failing", 1, "a product is wrong\n")]
)
def test_what_was_measured_is_kept(run, tmp_path, capsys, name, status, said):
    assert run(name) == status
    assert capsys.readouterr().err.endswith(said)
    assert len(pd.read_csv(tmp_path / f"{name}.csv")) == 1
    assert (tmp_path / f"{name}.json").is_file()


def test_a_failure_leaves_the_others_to_run(run, tmp_path):
    assert run("failing", "unavailable", "measured", "--no-plot") == 1
    assert (tmp_path / "measured.csv").is_file()


def test_a_missing_package_is_no_wrong_result(run, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("measured") == 2
    assert "plots need matplotlib: pip install matplotlib, or draw none" in capsys.readouterr().err


def test_an_experiment_that_cannot_run_is_left_out(run, capsys):
    assert run("unavailable", "measured", "--no-plot") == 0
    assert capsys.readouterr().err == "error: unavailable: it has one device\n"
    assert run("unavailable") == 2


def test_out_is_looked_at_before_anything_runs(run, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert run("interrupted", "measured", f"--out={tmp_path / 'file'}") == 2
    assert "results cannot be written there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "there is no experiment 'nothing'; expected one of: memory, bench, targets"),
        ([], "name one or more experiments"),
        (["strided_copy", "--strides=1,two"], "argument --strides: 'two' is not a whole number"),
        (["strided_copy", "--stride=1"], "unrecognized arguments: --stride=1"),
        (["strided_copy", "barriers", "--strides=1"], "unrecognized arguments: --strides=1"),
        (["narrow_product", "--m=5"], "argument --m: 5 is no multiple of 32"),
        (["product_with_transpose", "--m=0"], "argument --m: 0 is no multiple of 32"),
        (["coalescing", "--patterns=in order,diagonal"], "invalid choice: 'diagonal'; expected one of in order,"),
        (["bank_conflicts", "--strides=34"], "invalid choice: '34'"),
        (["misaligned_copy", "--blocks=256,0"], "argument --blocks: 0 is not at least 1"),
        (["misaligned_copy", "--offsets=-1"], "argument --offsets: -1 is not at least 0"),
        (["barriers", "--grid=-1"], "argument --grid: -1 is not at least 0"),
        (["barriers", "--steps=5"], "argument --steps: '5' has 1 values; expected 2"),
        (["coalescing", "--rounds=0"], "argument --rounds: 0 is not at least 1"),
        (["async_copies", "--kib=49"], "argument --kib: 49 is not from 0 to 48"),
        (["accuracy", "--seed=-1"], "-1 is not from 0 to 4294967295"),
        (["strided_copy", "--commit=x"], "'x' is no commit"),
    ],
)
@pytest.mark.simulator
def test_a_wrong_command_line(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        status = cli.main(arguments)
    except SystemExit as exit:  # argparse's own
        status = exit.code
    assert status == 2
    assert said in capsys.readouterr().err


@every_experiment
def test_help_describes_every_option(name, capsys):
    experiment = registry.load(name)
    assert experiment.name == name
    assert re.fullmatch(r"[A-Z].+", experiment.lesson)
    with pytest.raises(SystemExit, match="0"):
        cli.main([name, "--help"])
    said = capsys.readouterr().out
    for parameter, found in experiment.parameters.items():
        assert f"--{parameter.replace('_', '-')}" in said
        assert found.help, parameter


@every_experiment
def test_parameters_of_the_simulator_are_parameters(name):
    experiment = registry.load(name)
    assert experiment.small.keys() <= experiment.parameters.keys()
    assert set(experiment.needs) <= runner.CHECKS.keys()


@every_experiment
def test_without_a_gpu(name, monkeypatch, tmp_path, capsys):
    experiment = registry.load(name)
    if "gpu" not in experiment.needs:
        pytest.skip("it can do without")
    monkeypatch.setattr(runner, "SIMULATOR", False)
    monkeypatch.setattr(runner, "driver_error", lambda: "no driver.")
    assert cli.main([name, f"--out={tmp_path / 'new'}"]) == 2
    advice = "." if registry.load(name).unavailable else f"; {runner.ON_SIMULATOR}"
    assert capsys.readouterr().err == f"error: {name}: this needs a GPU, and no driver{advice}\n"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "path",
    [
        *("counters.csv", "orders.csv", "shared_wavefronts.csv", "streamed.csv", "targets.csv", "tracer.csv"),
        *(f"precisions/{name}.csv" for name in ("accuracy", "tensor_ladder")),
        "../../h100/special_values.csv",
    ],
)
def test_recorded_results_are_read(path):
    """Tables, claims and pictures are made of committed files; only limits of time may have been missed."""
    experiment, frame = registry.load(Path(path).stem), pd.read_csv(LATEST / path)
    if experiment.summary:
        assert len(experiment.summary(frame))
    if experiment.progress:
        assert frame[frame.columns[0]].iloc[-1] in experiment.progress(frame)
    missed = [sentence for sentence, holds in experiment.claims(frame).items() if not holds]
    assert not missed or experiment.name in ("targets", "special_values")
    if experiment.plot:
        assert len(pictures.drawn(experiment, frame, "H200")) > 5000


def test_streamed_rows_are_those_that_were_recorded():
    """The table made after each case has the recorded columns and order, and claims notice a wrong product."""
    recorded = pd.read_csv(LATEST / "streamed.csv")
    precisions = list(dict.fromkeys(recorded["precision"]))
    spans = {name: list(recorded["seconds"][recorded["precision"] == name][:1]) for name in precisions}
    others = recorded[recorded["operands"] != streamed.ON_DEVICE].drop(columns=["size", "tflops"])
    frame = streamed.table((32768, 32768), spans, others.to_dict("records"))
    pd.testing.assert_frame_equal(frame.reset_index(drop=True), recorded, rtol=1e-4, check_dtype=False)
    for column, value in (("largest_difference", np.nan), ("peak_bytes", 1e12)):
        frame.loc[frame.index[-1], column] = value
        assert list(streamed.claims(frame).values()).count(False) == (1 if column == "largest_difference" else 2)


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("streamed.csv")), ids=lambda path: path.parent.name)
def test_recorded_streamed_products_are_within_the_limit(path):
    assert all(streamed.claims(pd.read_csv(path)).values())


@pytest.mark.parametrize(("precision", "bits"), [("ieee", 16), ("bf16x6", 16), ("bf16x6", 13)])
def test_a_streamed_product_of_narrow_operands_is_refused(precision, bits):
    """A product of operands without some of their bits (BF16, TF32) is refused; a product in float32 is not."""
    k = 32768
    a, b = streamed.uniform(64, k, 0), streamed.uniform(64, k, 1).T
    exact = a.astype(np.float64) @ b.astype(np.float64)
    most = streamed.most_difference(precision, k)
    assert np.abs(a @ b - exact).max() < most
    half, kept = np.uint32(1 << (bits - 1)), np.uint32((1 << 32) - (1 << bits))
    narrow_a, narrow_b = (((of.view(np.uint32) + half) & kept).view(np.float32) for of in (a, b))
    assert np.abs(narrow_a @ narrow_b - exact).max() > 2 * most


def test_list_names_all(capsys):
    assert cli.main(["--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [*registry.EXPERIMENTS, *registry.GROUPS]
