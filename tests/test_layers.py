"""Rules about imports and module sizes that import-linter's contracts cannot express."""

from __future__ import annotations

import ast
import builtins
import importlib
import pickle
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
from support.compile_stages import compiler_environment

import numba_gemm
from numba_gemm.doctor import facts, requirements
from numba_gemm.kernels import STAGES

PACKAGE = Path(numba_gemm.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
MOST_LINES = 400  # of a module without a reason for more
PRIVATE = {
    PACKAGE / "runtime" / "compiler.py",
    PACKAGE / "runtime" / "front_end.py",
    PACKAGE / "simulator" / "patches.py",
}

# Numba's documented modules.
PUBLIC_NUMBA = {
    "numba",
    "numba.core",
    "numba.core.config",
    "numba.core.errors",
    "numba.cuda",
    "numba.cuda.extending",
    "numba.cuda.types",
    "numba.types",
}

every_source = pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix())


@pytest.fixture(scope="module")
def contracts() -> dict[str, dict]:
    config = tomllib.loads(PACKAGE.with_name("pyproject.toml").read_text(encoding="utf-8"))
    return {contract["type"]: contract for contract in config["tool"]["importlinter"]["contracts"]}


def test_every_folder_has_a_layer(contracts):
    """A new folder must be added to the contract."""
    modules = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert modules - {"__init__"} == set(contracts["layers"]["layers"])
    files = {path.name for path in PACKAGE.glob("*.py")}
    assert files == {"__init__.py", "__main__.py", "api.py"}


def test_tests_mirror_the_package():
    """`jax` and `torch` are tested beside the folders: folders of these names would be imported in their place."""
    folders = {path.parent.name for path in Path(__file__).parent.glob("*/test_*.py")}
    assert folders - {"docs"} <= {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"jax", "torch"}


FOLDERS = sorted(path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("__init__.py"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_says_what_it_is_in_one_sentence(folder):
    text = ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    assert re.fullmatch(r"[^\n]+\.", text)
    assert not re.search(r"\. [A-Z]", text)


def test_every_stage_is_independent(contracts):
    files = [path for path in (PACKAGE / "kernels").glob("*/*.py") if path.stem in STAGES]
    patterns = contracts["independence"]["modules"]
    assert all(any(fnmatch(module_of(path), pattern) for pattern in patterns) for path in files)
    assert {path.stem for path in files} == set(STAGES)
    assert all(stage.build.__module__.endswith(f".{name}") for name, stage in STAGES.items())


def module_of(path: Path) -> str:
    """Return the name of the module of a file of the package."""
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the absolute names of the modules that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


# Packages that provide modules, by module; and modules that are used if they are installed.
DISTRIBUTIONS = {"numba.cuda": "numba-cuda", "cuda.bindings": "cuda-bindings", "cuda.core": "cuda-core"}
DISTRIBUTIONS |= {"cuda.pathfinder": "cuda-pathfinder"}
OPTIONAL = {"cupy", "jax", "pynvml", "torch"}


@pytest.fixture(scope="module")
def bounds() -> dict[str, str]:
    """Lower bounds of the declared dependencies, and of those of the benchmark's extra."""
    project = tomllib.loads(PACKAGE.with_name("pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = [*project["dependencies"], *project["optional-dependencies"]["bench"]]
    found = [re.match(r"([\w-]+)(?:.*>=([\d.]+))?", requirement) for requirement in required]
    return {match[1]: match[2] for match in found}


@every_source
def test_what_is_imported_is_required_from_a_release_on(path, bounds):
    modules = {".".join(name.split(".")[:2]) for name in imported(ast.parse(path.read_text(encoding="utf-8")))}
    packages = {DISTRIBUTIONS.get(name, name.partition(".")[0]) for name in modules} - OPTIONAL
    packages -= {"cuda", "numba_gemm", *sys.stdlib_module_names}  # "cuda" alone: `import cuda` names no package
    assert {name for name in packages if not bounds.get(name)} == set()


def test_the_doctor_knows_the_bounds(bounds):
    known = {name: facts.dotted(bound) for name, bound in requirements.LOWEST.items()}
    assert known | {name: bounds[name] for name in ("cupy-cuda13x", "matplotlib")} == bounds


@every_source
def test_private_numba_is_touched_in_three_modules(path):
    if path in PRIVATE:
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    private = {name for name in imported(tree) if name.partition(".")[0] == "numba"} - PUBLIC_NUMBA
    assert not private, f"{private} belong in runtime/compiler.py, runtime/front_end.py or simulator/patches.py"


@every_source
def test_only_the_simulator_folder_reads_the_switch(path):
    if path.parent == PACKAGE / "simulator":
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    asked = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "ENABLE_CUDASIM"]
    read = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value == "NUMBA_ENABLE_CUDASIM"]
    assert not asked + read, f"line {(asked + read)[0].lineno}: ask simulator.switch or simulator.probe"


@every_source
def test_a_long_module_has_a_reason(path):
    text = path.read_text(encoding="utf-8")
    if (lines := text.count("\n")) <= MOST_LINES:
        return
    reason = " ".join((ast.get_docstring(ast.parse(text)) or "").split())
    assert "One module because" in reason, (
        f"{lines} lines, more than {MOST_LINES}: divide it by subject, or give the reason in its docstring, in a "
        'sentence that begins with "One module because"'
    )


@pytest.mark.parametrize("module", ["numba_gemm", "numba_gemm.simulator.probe", "numba_gemm.models.roofline"])
def test_import_leaves_the_simulator_undecided(module):
    """Code that chooses between GPU and simulator imports this first, since importing Numba makes the choice."""
    code = f"import os, sys, {module}; print('numba' in sys.modules, os.environ.get('NUMBA_ENABLE_CUDASIM'))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=compiler_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "False None\n"


def exceptions() -> Iterator[str]:
    """Yield the names of all exception classes of the package."""
    for path in SOURCES:
        for name, bases in re.findall(r"^ *class (\w+)\((.*)\)", path.read_text(encoding="utf-8"), re.MULTILINE):
            found = [getattr(builtins, base.strip(), None) for base in bases.split(",")]
            if any(isinstance(base, type) and issubclass(base, BaseException) for base in found):
                yield f"{module_of(path)}.{name}"


ARGUMENTS = {  # of exceptions that do not take exactly one
    "numba_gemm.runtime.private_files.Refused": (Path("cache"), "others can write it"),
    "numba_gemm.simulator.threads.DivergentBarrier": ((0, 1, 0), {"a.py:3": [(1, 0, 0)]}, [(0, 0, 0), (2, 0, 0)]),
}


@pytest.mark.parametrize("name", list(exceptions()))
def test_exceptions_survive_pickling(name):
    """A pool of processes hangs on an exception that does not."""
    module, _, kind = name.rpartition(".")
    error = getattr(importlib.import_module(module), kind)(*ARGUMENTS.get(name, ("words",)))
    found = pickle.loads(pickle.dumps(error))
    assert (type(found), found.args, str(found), vars(found)) == (type(error), error.args, str(error), vars(error))


WITHOUT_POSIX = """
import os, re, sys
from pathlib import Path

sys.modules |= dict.fromkeys(("fcntl", "grp", "pwd", "resource", "termios"))
for name in ("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "getuid", "geteuid", "sched_getaffinity"):
    delattr(os, name)
from numba_gemm.course import notebook
notebook.begin()
IMPORT = re.compile(r"^(?:from|import) numba_gemm.*?(?:\\((?:.|\\n)*?\\))?$", re.MULTILINE)
for path in sorted(Path("notebooks").glob("0[0-8]_*.py")):
    for line in IMPORT.findall(path.read_text("utf-8")):
        exec(line)
from numba_gemm.puzzles import check, cli, puzzle
assert check(puzzle("element").kernel, "element").solved
print("imported")
"""


def test_lessons_and_puzzles_need_no_posix():
    """They run on the simulator in Windows, too, whose Python lacks these modules and functions."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_POSIX],
        env=compiler_environment(),
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.endswith("imported\n"), done.stderr
