"""The announcement of a run: the number of tests, and their time where it is known."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import session
from support.covering import covering, others_exhaustive

ARGS, TESTPATHS = pytest.Config.ArgsSource.ARGS, pytest.Config.ArgsSource.TESTPATHS


@pytest.mark.simulator
@pytest.mark.parametrize(
    ("source", "options", "line"),
    [
        (TESTPATHS, {}, "9 tests: about 14 min on idle cores (processes: 1)"),
        (TESTPATHS, {"tx": ["popen"] * 2}, "9 tests: about 7 min on idle cores (processes: 2)"),
        (TESTPATHS, {"tx": ["popen"] * 64}, "9 tests: about 1 min on idle cores (processes: 64)"),
        (TESTPATHS, {"keyword": "naive"}, "9 tests"),
        (TESTPATHS, {"markexpr": "gpu"}, "9 tests"),
        (ARGS, {}, "9 tests"),
    ],
)
def test_announcement(monkeypatch, source, options, line):
    monkeypatch.setattr(session, "CORE_MINUTES", {"not exhaustive": 14})
    options = {"markexpr": "not exhaustive", "keyword": ""} | options
    config = SimpleNamespace(args_source=source, getoption=lambda name, default=None: options.get(name, default))
    assert session.announcement(config, 9) == line


def test_time_of_the_plain_command_is_known():
    settings = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    selected = [option for option in settings["tool"]["pytest"]["ini_options"]["addopts"] if option.startswith("-m=")]
    assert selected == ["-m=not exhaustive"]
    assert set(session.CORE_MINUTES) == {"not exhaustive", "exhaustive"}


@pytest.mark.simulator
def test_every_run_has_each_value_of_a_table_that_is_covered():
    cases = covering("abc", [1, 2], [True])
    assert [case.values for case in cases] == [(a, b, True) for a in "abc" for b in (1, 2)]
    usual = [case.values for case in cases if not case.marks]
    assert usual == [("a", 1, True), ("b", 2, True), ("c", 1, True)]
    assert {mark.name for case in cases for mark in case.marks} == {"exhaustive"}


def test_values_that_are_not_usual_are_in_the_exhaustive_set():
    cases = others_exhaustive("abc", "b")
    assert [case.values for case in cases] == [("a",), ("b",), ("c",)]
    assert [[mark.name for mark in case.marks] for case in cases] == [["exhaustive"], [], ["exhaustive"]]
