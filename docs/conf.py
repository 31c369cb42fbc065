"""How the documentation's site is built: ``python -m sphinx -W --keep-going docs build/site``.

Nothing is computed for it but the player of docs/stepping.md. Reference pages come from docstrings, tables from
generated blocks, and notebooks have the outputs that are committed with them.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import json
import os
import pkgutil
import re
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # before Numba's first import: docstrings are read on any machine

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers.python import PythonLexer
from pygments.lexers.special import TextLexer
from sphinx import addnodes
from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

import numba_gemm  # noqa: E402
import numba_gemm.inspect as inspect_kernels  # noqa: E402
from numba_gemm.kernels import STAGES  # noqa: E402

project = "numba_gemm"
author = "The numba_gemm authors"
release = version = numba_gemm.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "numpydoc"]
exclude_patterns = ["_build", "**.ipynb_checkpoints"]

nb_execution_mode = "off"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

autodoc_mock_imports = ["jax", "torch"]  # not needed to read docstrings
autodoc_member_order = "bysource"
autosummary_generate = False  # its tables link to descriptions on the same page
autodoc_typehints = "none"  # the docstrings say more, shapes and units, than the annotations
numpydoc_show_class_members = False  # autodoc lists them
default_role = "py:obj"  # a name between backticks is a link where there is something to link to

html_theme = "furo"
html_title = f"numba_gemm {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
pygments_style, pygments_dark_style = "friendly", "monokai"

# --- Notebooks: copied to where Sphinx looks, as they are.

COPIED = DOCS / "notebooks"


def described(text: str) -> str:
    """Return a notebook in which pictures have the alternative text of their outputs where MyST-NB looks for it."""
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        found = [output.get("metadata", {}).get("image/png", {}).get("alt") for output in cell.get("outputs", ())]
        if any(found):
            image = cell["metadata"].setdefault("mystnb", {}).setdefault("image", {})
            image.setdefault("alt", ". ".join(filter(None, found)))
    return json.dumps(notebook)


def copy_notebooks(app: Sphinx) -> None:
    """Copy what `notebooks/` holds at this moment; what is gone there goes here, too."""
    shutil.rmtree(COPIED, ignore_errors=True)
    COPIED.mkdir()
    for path in sorted((ROOT / "notebooks").iterdir()):
        if path.suffix == ".ipynb" or path.name == "README.md":
            copied = COPIED / path.name
            text = path.read_text("utf-8")
            copied.write_text(described(text) if path.suffix == ".ipynb" else text, "utf-8")
            shutil.copystat(path, copied)  # its time, by which Sphinx tells whether to read it again


# --- The player of docs/stepping.md: saved by the page's own code.

PLAYER = re.compile(r"^```python\n((?:(?!^```).)*\.save\(\"player\.html\"\)\n)```$", re.MULTILINE | re.DOTALL)


def save_player(app: Sphinx, exception: Exception | None) -> None:
    """Run the block of docs/stepping.md that saves a player, among the site's static files."""
    if exception is None and app.builder.format == "html":
        (code,) = PLAYER.findall((DOCS / "stepping.md").read_text("utf-8"))
        with contextlib.chdir(app.outdir / "_static"):
            exec(code, {"np": importlib.import_module("numpy"), "step": inspect_kernels.step})


# --- Reference pages: a line `% modules: PACKAGE` stands for the docstrings of its modules.

MODULES = re.compile(r"^% modules: (\S+)(?: with (members))?(?: without (\S+))?$", re.MULTILINE)


def modules_of(package: str) -> list[str]:
    """Names of a package's modules: stages in climbing order, then what serves them; others by name."""
    path = importlib.import_module(package).__path__
    found = [info.name for info in pkgutil.iter_modules(path) if not info.name.startswith("_")]
    order = {name: place for place, name in enumerate(STAGES)}
    return sorted(found, key=lambda name: (order.get(name, len(order)), name))


def expand_modules(app: Sphinx, docname: str, source: list[str]) -> None:
    """Write out what a page of the reference abbreviates."""

    def section(match: re.Match[str]) -> str:
        package, members, without = match.groups()
        folder, option = f"../../{package.replace('.', '/')}", "members" if members else "no-members"
        names = [name for name in modules_of(package) if name != without]
        listed = "\n".join(f"   ~{package}.{name}" for name in names)
        return f"```{{eval-rst}}\n.. py:currentmodule:: None\n.. autosummary::\n\n{listed}\n```\n\n" + "\n".join(
            f"## {name}\n\n[{name}.py]({folder}/{name}.py)\n\n"
            f"```{{eval-rst}}\n.. automodule:: {package}.{name}\n   :{option}:\n```\n"
            for name in names
        )

    if docname.startswith("api/"):
        source[0] = MODULES.sub(section, source[0])


FORM = re.compile(r"^(Bottleneck before|Idea|Traffic|Registers and shared memory|Measured|Limits): ")
LITERAL_OR_BAR = re.compile(r"(``.+?``)|\|")


def mark_up(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Make a field list of a stage's docstring, whose form is fixed, and let bars be absolute values."""
    if what == "module":
        lines[:] = [FORM.sub(r":\1: ", line) for line in lines]
    lines[:] = [LITERAL_OR_BAR.sub(lambda found: found[1] or r"\|", line) for line in lines]


# --- Links that lead out of docs/: to pages that show the file.


def source_page(path: Path) -> str:
    """The name of the page that shows a file or a folder of the repository."""
    return f"source/{path.relative_to(ROOT).as_posix()}"


@cache
def definitions(path: Path) -> dict[str, int]:
    """The lines on which a Python file defines functions and classes."""
    if path.suffix != ".py":
        return {}
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name: node.lineno for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, kinds)}


def uri_of(app: Sphinx, path: Path, line: int | None = None) -> str:
    """Where the page under way finds the page that shows a file or folder, which is made from now on."""
    shown: set[str] = getattr(app.env, "numba_gemm_shown", set())
    app.env.numba_gemm_shown = shown | {path.relative_to(ROOT).as_posix()}  # type: ignore[attr-defined]
    return app.builder.get_relative_uri(app.env.docname, source_page(path)) + (f"#L-{line}" if line else "")


def lead_out(app: Sphinx, doctree: nodes.document) -> None:
    """Turn links to files of the repository into links to pages that show them."""
    env = app.env
    docname = env.docname
    # A notebook's links start from where it lies in the repository.
    home = ROOT / "notebooks" if docname.startswith("notebooks/") else (DOCS / docname).parent
    for kind in (addnodes.download_reference, addnodes.pending_xref):
        for node in list(doctree.findall(kind)):
            if node.get("reftype") != "myst":
                continue
            target, _, fragment = node["reftarget"].partition("#")
            if node.get("refdomain") == "doc":  # Markdown, known by its name without the suffix
                if target in env.found_docs:
                    continue
                target += ".md"
            path = (home / target).resolve()
            if not target or not path.exists() or not path.is_relative_to(ROOT):
                continue  # MyST resolves it, or says that there is no such thing
            if path.is_relative_to(DOCS) and env.path2doc(path) is not None:
                node["refdomain"], node["reftarget"], node["reftargetid"] = "doc", env.path2doc(path), fragment or None
                continue
            line = definitions(path).get(node.astext().removesuffix("()")) if path.is_file() else None
            node.replace_self(nodes.reference("", "", *node.children, refuri=uri_of(app, path, line), internal=True))


def show_sources(app: Sphinx, doctree: nodes.document) -> None:
    """Give what the reference describes a link to its source."""
    for signature in doctree.findall(addnodes.desc_signature):
        found: Any = importlib.import_module(signature["module"]) if signature.get("module") else None
        try:
            for part in signature.get("fullname", "").split("."):
                found = getattr(found, part)
            found = inspect.unwrap(getattr(found, "fget", found))
            path, line = Path(inspect.getsourcefile(found) or "").resolve(), inspect.getsourcelines(found)[1]
        except (AttributeError, OSError, TypeError):
            continue  # an attribute, which has no source of its own
        if path.is_relative_to(ROOT):
            label = nodes.inline("", "[source]", classes=["viewcode-link"])  # as themes know it
            signature += nodes.reference("", "", label, refuri=uri_of(app, path, line), internal=True)


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Pages of the files and folders that are linked; of what lies in a folder, what has a page is a link."""
    shown = {ROOT / name for name in getattr(app.env, "numba_gemm_shown", ()) if (ROOT / name).exists()}
    formatter = HtmlFormatter(linenos="inline", lineanchors="L", anchorlinenos=True)
    for path in sorted(shown):
        name, page = path.relative_to(ROOT).as_posix(), source_page(path)
        if path.is_dir():
            inside = [(p, app.builder.get_relative_uri(page, source_page(p))) for p in sorted(path.iterdir())]
            rows = (f'<a href="{uri}">{p.name}</a>' if p in shown else p.name for p, uri in inside if p.suffix)
            body = "<ul>" + "".join(f"<li>{row}</li>" for row in rows) + "</ul>"
        else:
            lexer = PythonLexer() if path.suffix == ".py" else TextLexer()
            body = highlight(path.read_text("utf-8"), lexer, formatter)
        yield page, {"title": name, "body": f"<h1>{name}</h1>{body}"}, "page.html"


def share_navigation(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Let the theme find the navigation of a source page ready: it is that of the other pages of its folder.

    Sphinx would compute it for each of these pages, which takes much of the time of the whole site.
    """
    if page.startswith("source/"):
        known: dict[Any, str] = app.builder.__dict__.setdefault("numba_gemm_navigation", {})
        make = context["toctree"]

        def navigation(**options: Any) -> str:
            key = (page.rpartition("/")[0], *sorted(options.items()))
            if key not in known:
                known[key] = make(**options)
            return known[key]

        context["toctree"] = navigation


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect all of the above."""
    app.connect("builder-inited", copy_notebooks)
    app.connect("source-read", expand_modules)
    app.connect("autodoc-process-docstring", mark_up, priority=400)  # before numpydoc
    app.connect("doctree-read", lead_out, priority=400)  # before downloads are collected
    app.connect("doctree-read", show_sources)
    app.connect("html-collect-pages", source_pages)
    app.connect("html-page-context", share_navigation, priority=400)  # before the theme
    app.connect("build-finished", save_player)
    return {"parallel_read_safe": False}
