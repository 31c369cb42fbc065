"""Every experiment of the memory laboratory: results, claims, picture, kernels, and recorded run."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from support import compile_lab
from support.covering import others_exhaustive
from support.offline import offline

import generate
from numba_gemm.lab import __main__ as cli
from numba_gemm.lab.harness.experiment import Unavailable
from numba_gemm.lab.memory import machine
from numba_gemm.lab.registry import MEMORY, load

RECORDED = Path(__file__).parents[2] / "results" / "h200" / "memory_lab"
CCS = ((8, 0), (9, 0))

LONG = {"barriers", "narrow_product", "partial_tiles", "product_with_transpose"}  # on the simulator
every_experiment = pytest.mark.parametrize("name", MEMORY)


def blank(figure) -> bool:
    from matplotlib.image import imread

    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=50)
    file.seek(0)
    return len(np.unique(imread(file).reshape(-1, 4), axis=0)) < 16


def drawn(experiment, frame):
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=experiment.figure, layout="constrained")
    experiment.plot(frame, figure)
    return figure


@every_experiment
def test_is_described(name):
    experiment = load(name)
    assert experiment.name == name == experiment.run.__name__
    assert experiment.section[0].isdigit()
    assert experiment.lesson.endswith(".")
    assert "one row per" in (experiment.run.__doc__ or "").lower()
    assert all(parameter.help for parameter in experiment.parameters.values())


@pytest.mark.simulator
@pytest.mark.parametrize("name", others_exhaustive(MEMORY, set(MEMORY) - LONG))
def test_runs_in_the_simulator_or_says_why_not(name, tmp_path, capsys):
    experiment = load(name)
    status = cli.main([name, "--out", str(tmp_path)])
    if experiment.unavailable:
        assert status == cli.UNUSABLE
        assert experiment.unavailable in capsys.readouterr().err
        assert not list(tmp_path.iterdir())
        return
    assert status == 0
    frame = pd.read_csv(tmp_path / f"{name}.csv")
    assert len(frame)
    assert any(column.startswith("predicted") for column in frame)
    assert json.loads((tmp_path / f"{name}.json").read_text())["simulator"] is True
    assert (tmp_path / f"{name}.png").stat().st_size > 5000


@pytest.mark.gpu
@every_experiment
def test_runs_on_a_gpu(name):
    experiment = load(name)
    try:
        frame = experiment.frame(**experiment.small)
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert any(column.startswith("predicted") for column in frame)


# Claims that the committed run refutes, which docs/memory_lab.md marks.
REFUTED: dict[str, list[str]] = {}


@every_experiment
def test_was_recorded_and_bears_out_its_claims(name):
    """All other claims hold for the committed run."""
    experiment = load(name)
    if not (RECORDED / f"{name}.csv").is_file():
        pytest.skip("no run is recorded")
    frame = pd.read_csv(RECORDED / f"{name}.csv")
    described = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    assert "H200" in described["gpu"]["name"]
    assert described["commit"]
    claims = experiment.claims(frame)
    assert claims
    assert [sentence for sentence, holds in claims.items() if not holds] == REFUTED.get(name, [])
    assert not blank(drawn(experiment, frame))
    assert (RECORDED / f"{name}.png").is_file()


@pytest.mark.parametrize("cc", CCS)
@pytest.mark.parametrize("name", [*MEMORY, "ceilings"])
def test_kernels_compile_without_a_gpu(name, cc):
    found = offline(compile_lab.compiled, name, cc)
    assert found.keys() == load(name).kernels.keys()
    if name == "async_copies":
        assert {kernel: made["copies"] for kernel, made in found.items() if made["copies"]} == {
            f"asynchronous_{width}": [width] for width in (4, 8, 16)
        }


def test_the_page_is_what_was_recorded(tmp_path, capsys):
    page = tmp_path / "page.md"
    text = (RECORDED.parents[2] / "docs" / "memory_lab.md").read_text(encoding="utf-8")
    assert [match["name"] for match in generate.BLOCK.finditer(text)] == ["memory_lab", *MEMORY]
    arguments = [f"--pages={page}"]
    claim = text.replace("\n- so is ", "\n- it is said that so is ")
    cell = text.replace("| simple | 164 |", "| simple | 165 |")
    for spoilt in (claim, cell, text.replace("claims hold", "claims held")):
        assert spoilt != text
        page.write_text(spoilt, encoding="utf-8")
        assert generate.main([*arguments, "--check"]) == 1
        assert "page.md; run python docs/generate.py" in capsys.readouterr().err
        assert generate.main(arguments) == 0
        assert page.read_text(encoding="utf-8") == text, "run python docs/generate.py"


def test_every_module_is_listed():
    here = Path(machine.__file__).parent
    others = {"__init__", "machine", "movement"}
    assert {path.stem for path in here.glob("*.py")} - others == set(MEMORY)


@pytest.mark.simulator
def test_attributes_have_no_simulator():
    with pytest.raises(RuntimeError):
        machine.attribute("ASYNC_ENGINE_COUNT")
