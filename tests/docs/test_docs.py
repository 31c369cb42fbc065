"""Pages of docs/ and docstrings whose code runs, and prints what they say; tables of all pages."""

from __future__ import annotations

import doctest
import importlib
import itertools
import linecache
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.debugger import scripted

from numba_gemm.simulator.probe import simulator_environment

pytestmark = pytest.mark.simulator
ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def blocks(page):
    """The code blocks of a page, each with what follows as its output."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", ["stepping.md", "tracing.md"])
def test_a_page_says_what_happens(page, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    found = blocks(page)
    assert len(found) > 3
    for number, (code, output) in enumerate(found):
        commands = re.findall(r"^\(Pdb\) (.*)$", output, re.MULTILINE)
        hook, said = scripted(*commands)
        monkeypatch.setattr(sys, "breakpointhook", hook)
        name = f"<docs/{page} {number}>"
        monkeypatch.setitem(linecache.cache, name, (len(code), None, code.splitlines(keepends=True), name))
        exec(compile(code, name, "exec"), namespace)
        printed = capsys.readouterr().out
        if commands:
            answers = [line for line in output.splitlines() if not line.startswith("(Pdb)")]
            assert answers
            assert set(answers) <= set(said.getvalue().replace("(Pdb) ", "").splitlines())
        else:  # lines of the stages move
            assert re.sub(r"\.py:\d+", ".py:", printed) == re.sub(r"\.py:\d+", ".py:", output), code


def test_first_picture(tmp_path):
    """Run the tutorial's command, except for the installation."""
    text = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"<!-- picture:begin -->\n```bash\n(.*?)```\n<!-- picture:end -->", text, re.DOTALL)
    code = re.search(r' -c "\n(.*?)"\n', command, re.DOTALL).group(1)
    assert "NUMBA_ENABLE_CUDASIM=1" in command
    subprocess.run([sys.executable, "-c", code], env=simulator_environment(), cwd=tmp_path, check=True)
    (path,) = tmp_path.iterdir()
    pixels = pytest.importorskip("matplotlib.image").imread(path)
    assert min(pixels.shape[:2]) > 300
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 32, "not blank"


def test_readme_is_short():
    """Two printed pages: one generated table, one chart; everything else is in the documentation."""
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert len(re.findall(r"^\|[ :|-]+\|$", text, re.MULTILINE)) == 1
    assert len(re.findall(r"<img |!\[", text)) == 1
    assert len(text.split()) < 1100


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of PyTorch, by the import of Inductor
@pytest.mark.parametrize(
    "path",
    [path for path in sorted((ROOT / "numba_gemm").rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")],
    ids=lambda path: path.stem,
)
def test_examples_of_docstrings(path):
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        pytest.skip(f"needs {error.name}")
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    "page",
    [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "notebooks").glob("*.md")), *sorted(DOCS.rglob("*.md"))],
    ids=lambda page: page.stem,
)
def test_tables_have_a_head(page):
    """Rows without one, such as those behind a merge's markers, are shown as text."""
    lines = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE).splitlines()
    for is_table, group in itertools.groupby(map(str.strip, lines), lambda line: line.startswith("|")):
        rows = list(group)
        if is_table:
            assert re.fullmatch(r"[|:\- ]+", rows[1] if len(rows) > 1 else ""), rows[0]
        else:
            assert not [line for line in rows if re.match(r"(<{7}|={7}|>{7})( |$)", line)]
