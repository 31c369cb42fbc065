"""The documentation's site: it builds without a warning, is complete, and has no broken links.

The code of README, the home page, the FAQ and the how-to guides runs as shown, and what the FAQ refers to exists.
"""

from __future__ import annotations

import ast
import json
import linecache
import pkgutil
import re
import shutil
import subprocess
import sys
import zlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

import pytest

import numba_gemm

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGES = ("device", "inspect", "kernels/ladder", "kernels/tensor_core", "models", "streaming")
PACKAGES += ("lab/bench", "lab/bench/targets", "lab/harness", "lab/memory")
NEIGHBOURS = ("CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md", "pyproject.toml")
NEIGHBOURS += ("docs", "notebooks", "numba_gemm", "results", "tests")
MADE = ("_build", "notebooks")  # in docs/, by building the site there


# ------------------------------------------------------------------------------------------------------- the site


def modules() -> list[str]:
    """The public modules that the reference has to have."""
    return [
        f"numba_gemm.{package.replace('/', '.')}.{module.name}"
        for package in PACKAGES
        for module in pkgutil.iter_modules([str(ROOT / "numba_gemm" / package)])
        if not module.name.startswith("_")
    ]


def sample() -> str:
    """A notebook with an output, a formula, and links as from where notebooks lie."""
    text = "# A sample\n\nSee [naive](../numba_gemm/kernels/ladder/naive.py), [tracing](../docs/tracing.md), $K^2$."
    output = {"name": "stdout", "output_type": "stream", "text": ["printed by the sample\n"]}
    cells = [
        {"cell_type": "markdown", "id": "a", "metadata": {}, "source": [text]},
        {"cell_type": "code", "execution_count": 1, "id": "b", "metadata": {}, "outputs": [output], "source": ["1/0"]},
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return json.dumps({"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5})


def build(root: Path) -> Path:
    """Build the site of a checkout."""
    out = root / "site"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", str(root / "docs"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return out


def inventory(site: Path) -> dict[str, str]:
    """Return the objects that the reference describes: kinds by name."""
    *_, packed = (site / "objects.inv").read_bytes().split(b"\n", 4)
    lines = zlib.decompress(packed).decode().splitlines()
    return {name: kind for name, kind in (line.split(maxsplit=2)[:2] for line in lines) if kind.startswith("py:")}


def missing(page: str, *parts: str) -> list[str]:
    """Return the parts that a page does not contain; a failure then prints those only."""
    return [part for part in parts if part not in page]


def broken_links(site: Path) -> list[str]:
    """Links within the site that lead nowhere."""
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    ids = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
    found = []
    for path, text in pages.items():
        for link in set(re.findall(r'<a [^>]*?href="([^":?]*)"', text)):
            place, _, fragment = unquote(link).partition("#")
            target = (path.parent / place).resolve() if place else path
            if not target.exists() or (fragment and target in ids and fragment not in ids[target]):
                found.append(f"{path.relative_to(site)}: {link}")
    return found


@pytest.mark.exhaustive
@pytest.mark.timeout(900)  # the build takes long where the other workers are busy, too
@pytest.mark.skipif(
    any(find_spec(name) is None for name in ("sphinx", "furo", "myst_nb", "numpydoc")), reason="needs the extra docs"
)
def test_site(tmp_path):
    """One test, so that it is built by one worker, with one more notebook."""
    for name in NEIGHBOURS:
        source, target = ROOT / name, tmp_path / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "local", *MADE))
        else:
            shutil.copy(source, target)
    notebooks = tmp_path / "notebooks"
    (notebooks / "99_sample.ipynb").write_text(sample())
    site = build(tmp_path)
    pages = {path.relative_to(DOCS).with_suffix("") for path in DOCS.rglob("*.md") if "notebooks" not in path.parts}
    assert {page for page in pages if not (site / page.with_suffix(".html")).is_file()} == set()
    described = inventory(site)
    assert {name for name in numba_gemm.__all__ if f"numba_gemm.{name}" not in described} == set()
    assert {name for name in modules() if described.get(name) != "py:module"} == set()
    assert described["numba_gemm.tiled_sgemm"] == "py:function"
    assert broken_links(site) == []
    faq, index = ((site / name).read_text(encoding="utf-8") for name in ("faq.html", "index.html"))
    assert missing(faq, 'href="source/tests/kernels/test_ladder.py.html#L-') == []
    benchmarks = (site / "benchmarks.html").read_text(encoding="utf-8")
    for block, source, page in (("headline", "README.md", index), ("ladder", "docs/benchmarks.md", benchmarks)):
        table = re.search(rf"<!-- results:begin {block} -->(.*?)<!--", (ROOT / source).read_text("utf-8"), re.DOTALL)
        rows = [row.split("|") for row in table[1].splitlines() if row.startswith("|")][2:]
        assert len(rows) > 3
        assert missing(page, *(f"<p>{row[2].strip()}</p>" for row in rows)) == []
    assert missing((site / "changelog.html").read_text(encoding="utf-8"), numba_gemm.__version__) == []

    page = (site / "notebooks" / "99_sample.html").read_text(encoding="utf-8")
    assert (
        missing(
            page,
            "printed by the sample",
            'href="../source/numba_gemm/kernels/ladder/naive.py.html#',
            'href="../tracing.html',
        )
        == []
    )
    assert missing(page, "ZeroDivisionError") == ["ZeroDivisionError"]
    start = (site / "notebooks" / "00_start_here.html").read_text(encoding="utf-8")
    assert missing(start, 'alt="Diagram of five memories') == []
    stepping, player = (site / name for name in ("stepping.html", "_static/player.html"))
    assert missing(stepping.read_text(encoding="utf-8"), '<iframe src="_static/player.html" title="') == []
    assert missing(player.read_text(encoding="utf-8"), '"kernel":"shared_tile"') == []
    tutorial = (site / "tutorial.html").read_text(encoding="utf-8")
    assert missing(tutorial, *(f'href="notebooks/{path.stem}.html' for path in notebooks.glob("*.ipynb"))) == []


REFERENCE = sorted({path.stem for path in (DOCS / "api").glob("*.md")} - {"index"})


@pytest.mark.parametrize("name", REFERENCE)
def test_a_page_of_the_reference_is_listed_and_has_a_table(name):
    index, page = ((DOCS / "api" / f"{one}.md").read_text(encoding="utf-8") for one in ("index", name))
    assert f"]({name}.md) |" in index
    described = re.findall(r"^\.\. auto(?:function|class|exception):: \S+?(\w+)$", page, re.MULTILINE)
    summary = "".join(re.findall(r"^\.\. autosummary::\n(.*?)\n\n\.\.", page, re.MULTILINE | re.DOTALL))
    assert "% modules: " in page or (summary and missing(summary, *described) == [])


def test_broken_links_are_found(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#here">x</a> <a id="top" class="y" href="#top">x</a>')
    (tmp_path / "b.html").write_text('<p id="here"> <a href="a.html#gone">x</a> <a href="c.html">x</a> </p>')
    assert sorted(broken_links(tmp_path)) == ["b.html: a.html#gone", "b.html: c.html"]


# ---------------------------------------------------------------------------------------- references of the FAQ

LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


@cache
def defined(path: Path) -> frozenset[str]:
    """Functions, methods, classes and module variables of a Python file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assigned = (node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign))
    targets = (name for node in assigned for name in ast.walk(node) if isinstance(name, ast.Name))
    return frozenset(names | {name.id for name in targets if isinstance(name.ctx, ast.Store)})


def dangling(page: Path, text: str) -> list[str]:
    """Links of a page to files that do not exist, or that do not have what the link is called."""
    found = []
    for label, target in LINK.findall(text):
        if target.startswith(("https://", "#")):
            continue
        path = (page.parent / target.partition("#")[0]).resolve()
        name = label.strip("`").split("(")[0]
        is_name = label.startswith("`") and name.isidentifier()
        if not path.exists():
            found.append(f"{target}: no such file")
        elif is_name and path.suffix == ".py" and name != path.stem and name not in defined(path):
            found.append(f"{target}: has no {name}")
    return found


@pytest.mark.parametrize("name", ["faq.md", "design.md"])
def test_what_is_linked_exists(name):
    text = (DOCS / name).read_text(encoding="utf-8")
    assert dangling(DOCS / name, text) == []
    # Each answer links to something in the repository, and those about kernels to tests; issues are cited by number.
    if name == "faq.md":
        use, kernels = (section.split("\n### ")[1:] for section in text.split("\n## ")[1:])
        assert len(use) > 5
        assert len(kernels) > 5
        for answer in (*use, *kernels):
            assert answer.splitlines()[0].endswith("?")
            local = [target for _, target in LINK.findall(answer) if not target.startswith("https://")]
            assert any("/tests/" in target for target in local) or (answer in use and local)
        for label, target in LINK.findall(text):
            if target.startswith("https://"):
                assert re.fullmatch(r"https://github\.com/[\w-]+/[\w-]+/issues/\d+", target)
                assert label.split()[-1] == target.rpartition("/")[2]


def test_dangling_links_are_found():
    place = "../tests/kernels/test_ladder.py"
    text = f"[`gone`]({place}) [x](../tests/no.py) [`test_table`]({place}) [y](faq.md)"
    assert dangling(DOCS / "faq.md", text) == [f"{place}: has no gone", "../tests/no.py: no such file"]


# ------------------------------------------------------------------------------------------------ code of pages

PAGES = [ROOT / "README.md", DOCS / "index.md", DOCS / "faq.md", *sorted((DOCS / "how_to").glob("*.md"))]
BLOCK = re.compile(
    r"^(?:<!-- needs (a GPU|the compiler) -->\n)?```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)


def test_every_block_is_found():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert len(BLOCK.findall(text)) == text.count("```python") > 10


# Modules for users, beside the package itself.
PUBLIC_MODULES = {f"numba_gemm.{name}" for name in ("distributed", "inspect", "jax", "streaming", "torch", "typing")}


def internal_names(code: str) -> list[str]:
    """Return what a piece of code uses of this package that is not public."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found += [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "numba_gemm":
            found += [f"numba_gemm.{one.name}" for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module or "")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "numba_gemm":
            found.append(f"numba_gemm.{node.attr}")
    public = {"numba_gemm", *PUBLIC_MODULES, *(f"numba_gemm.{name}" for name in numba_gemm.__all__)}
    return [name for name in found if name.partition(".")[0] == "numba_gemm" and name not in public]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_of_a_page_uses_public_names_only(page):
    code = [code for _, code, _ in BLOCK.findall(page.read_text(encoding="utf-8"))]
    assert [name for one in code for name in internal_names(one)] == []


def test_internal_names_are_found():
    code = """
import numba_gemm, numba_gemm.runtime.device as devices
from numba_gemm import plan, gemm
from numba_gemm.kernels import STAGES
from numba_gemm.torch import matmul
numba_gemm.lab.registry, numba_gemm.plan
"""
    names = ["runtime.device", "gemm", "kernels", "lab"]
    assert sorted(internal_names(code)) == sorted(f"numba_gemm.{name}" for name in names)


@pytest.mark.simulator
@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```python" in page.read_text()], ids=lambda page: page.stem
)
def test_code_of_a_page_runs(page, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").symlink_to(ROOT / "results")
    namespace: dict = {}
    for number, (needs, code, output) in enumerate(BLOCK.findall(page.read_text(encoding="utf-8"))):
        name = f"<{page.relative_to(ROOT)} {number}>"
        monkeypatch.setitem(linecache.cache, name, (len(code), None, code.splitlines(keepends=True), name))
        compiled = compile(code, name, "exec")
        if needs:
            assert not output
            continue
        exec(compiled, namespace)
        printed = capsys.readouterr().out
        if output:
            assert printed == output, code
