"""The table of mutations: its edits apply, its tests exist, and the script tells a survivor from a caught one."""

from __future__ import annotations

import dataclasses
import re

import mutate
import pytest

MUTATIONS = mutate.load()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.file)
def test_mutation_applies(mutation):
    text = (mutate.ROOT / mutation.file).read_text(encoding="utf-8")
    changed = mutation.applied(text)
    assert changed != text
    compile(changed, mutation.file, "exec")
    assert mutation.tests
    for test in mutation.tests:
        path, *_, function = test.partition("[")[0].split("::")
        source = (mutate.ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^ *def {function}\(", source, re.MULTILINE), f"{path} has no {function}"


def test_mutations_differ():
    assert len({(one.file, one.old, one.new) for one in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize("text", ["a", "b b"])
def test_text_that_does_not_occur_once_is_refused(text):
    with pytest.raises(ValueError, match="expected once"):
        mutate.Mutation("x.py", "b", "c", ("test_x.py::test",)).applied(text)


SAMPLE = """
import subject, pytest

@pytest.mark.parametrize("x", [1, 2])
def test_double(x):
    assert subject.double(x) == 2 * x, "not doubled"

def test_doubles():
    assert subject.double(0) == 0
"""


@pytest.mark.parametrize(
    ("new", "tests", "says", "lacking"),
    [
        ("x + 1", ("test_double",), "not doubled", None),
        ("x + 1", ("test_double[2]",), "", None),
        ("x + 1", ("test_double[1]",), "", "did not fail: test_it.py::test_double[1]\n"),
        ("x + 1", ("test_double",), "tripled", "did not fail: text 'tripled'\n"),
        (
            "x + x",
            ("test_double", "test_doubles"),
            "",
            "did not fail: test_it.py::test_double, test_it.py::test_doubles\n",
        ),
        ("x + 1", ("test_double", "test_doubles"), "", None),
        ("nothing +", ("test_doubles",), "", "did not fail: test_it.py::test_doubles\n"),
    ],
)
def test_survivors_are_reported(tmp_path, new, tests, says, lacking):
    subject = "def double(x):\n    return 2 * x\n"
    (tmp_path / "subject.py").write_text(subject)
    (tmp_path / "test_it.py").write_text(SAMPLE)
    mutation = mutate.Mutation("subject.py", "2 * x", new, tuple(f"test_it.py::{test}" for test in tests), says)
    found = mutate.check(mutation, tmp_path)
    assert found.startswith(lacking) if lacking else found is None, found
    assert (tmp_path / "subject.py").read_text() == subject


def test_sample_is_of_quick_mutations(monkeypatch, capsys):
    options = mutate.argparse.Namespace(only="", sample=3, seed=1)
    monkeypatch.setattr(
        mutate, "load", lambda: [dataclasses.replace(one, slow=i > 3) for i, one in enumerate(MUTATIONS)]
    )
    found = mutate.chosen(options)
    assert len(found) == 3
    assert not any(one.slow for one in found)
    assert mutate.chosen(options) == found
    assert "--sample 3 --seed 1" in capsys.readouterr().out
