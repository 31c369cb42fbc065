"""Every experiment of the memory laboratory: results, claims, picture, kernels, and recorded run."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from support import SUPPORT
from support.compile_stages import compiler_environment

from numba_gemm.lab.memory import __main__ as cli
from numba_gemm.lab.memory import experiment as lab
from numba_gemm.lab.memory import machine

RECORDED = Path(__file__).parents[2] / "results" / "h200" / "memory_lab"
CCS = ((8, 0), (9, 0))

every_experiment = pytest.mark.parametrize("name", lab.NAMES)


def blank(figure) -> bool:
    from matplotlib.image import imread

    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=50)
    file.seek(0)
    return len(np.unique(imread(file).reshape(-1, 4), axis=0)) < 16


def drawn(experiment, frame):
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=cli.FIGURE, layout="constrained")
    experiment.plot(frame, figure)
    return figure


@every_experiment
def test_is_described(name):
    experiment = lab.load(name)
    assert experiment.name == name == experiment.run.__name__
    assert experiment.section[0].isdigit()
    assert experiment.lesson.endswith(".")
    assert "Returns" in (experiment.run.__doc__ or "")


@pytest.mark.simulator
@every_experiment
def test_runs_in_the_simulator_or_says_why_not(name, tmp_path, capsys):
    experiment = lab.load(name)
    status = cli.main([name, "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert status == 0
    if experiment.unavailable:
        assert experiment.unavailable in said
        assert not list(tmp_path.iterdir())
        return
    frame = pd.read_csv(tmp_path / f"{name}.csv")
    assert len(frame)
    assert any(column.startswith(lab.PREDICTED) for column in frame)
    assert json.loads((tmp_path / f"{name}.json").read_text())["simulator"] is True
    assert (tmp_path / f"{name}.png").stat().st_size > 5000


@pytest.mark.gpu
@every_experiment
def test_runs_on_a_gpu(name):
    experiment = lab.load(name)
    try:
        frame = experiment.run(**experiment.small)
    except lab.Unavailable as reason:
        pytest.skip(str(reason))
    assert any(column.startswith(lab.PREDICTED) for column in frame)


@every_experiment
def test_was_recorded_and_bears_out_its_claims(name):
    """The claims of the docstring hold for the committed run."""
    experiment = lab.load(name)
    frame = pd.read_csv(RECORDED / f"{name}.csv")
    described = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    assert "H200" in described["gpu"]["name"]
    assert described["commit"]
    claims = experiment.claims(frame)
    assert claims
    assert not [sentence for sentence, holds in claims.items() if not holds]
    assert not blank(drawn(experiment, frame))
    assert (RECORDED / f"{name}.png").is_file()


@pytest.fixture(scope="module")
def compiled():
    """Compile every kernel in a child process, which does not use the simulator."""
    child = [sys.executable, str(SUPPORT / "compile_lab.py")]
    done = subprocess.run(child, env=compiler_environment(), capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@every_experiment
def test_kernels_compile_without_a_gpu(name, compiled):
    kernels = lab.load(name).kernels
    found = [line for line in compiled if line["experiment"] == name]
    assert {(line["kernel"], tuple(line["cc"])) for line in found} == {(kernel, cc) for kernel in kernels for cc in CCS}
    assert not [line for line in found if "error" in line]


def test_the_page_is_what_was_recorded(monkeypatch, tmp_path, capsys):
    from numba_gemm.lab.memory import report

    monkeypatch.chdir(RECORDED.parents[2])
    assert report.main(["--check"]) == 0, "run python -m numba_gemm.lab.memory.report"
    monkeypatch.setattr(report, "PAGE", tmp_path / "page.md")
    assert report.main(["--check"]) == 1
    assert report.main([]) == 0
    assert report.main(["--check"]) == 0
    assert report.main(["--chek"]) == 2


def test_every_module_is_listed():
    here = Path(lab.__file__).parent
    others = {"__init__", "__main__", "drawing", "experiment", "machine", "movement", "report"}
    assert {path.stem for path in here.glob("*.py")} - others == set(lab.NAMES)


def test_list_names_all(capsys):
    assert cli.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(lab.NAMES)


def test_an_unknown_name(capsys):
    assert cli.main(["offset_copy"]) == cli.UNUSABLE
    assert "expected one of: transfers, overlap" in capsys.readouterr().err


def test_a_failure_leaves_the_others_to_run(monkeypatch, tmp_path, capsys):
    def fails(**parameters):
        raise AssertionError("a copy is wrong")

    broken = lab.Experiment("broken", "9", fails, lambda frame, figure: None, lambda frame: {"holds": True})
    monkeypatch.setattr(cli, "load", lambda name: broken if name == "broken" else lab.load(name))
    assert cli.main(["broken", "misaligned_copy", "--out", str(tmp_path)]) == 1
    assert "a copy is wrong" in capsys.readouterr().err
    assert (tmp_path / "misaligned_copy.csv").is_file()


@pytest.mark.simulator
def test_attributes_have_no_simulator():
    with pytest.raises(RuntimeError):
        machine.attribute("ASYNC_ENGINE_COUNT")
