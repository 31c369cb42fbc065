"""The extras of the package, and the files of its wheel."""

import importlib.util
import json
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
TEXTS = [
    path
    for pattern in ("*.md", ".ci/run", ".devcontainer/*", "docs/**/*.md", "notebooks/*", "numba_gemm/**/*.py")
    for path in ROOT.glob(pattern)
    if path.is_file() and path.name != "CHANGELOG.md" and path.suffix in (".md", ".json", ".py", ".ipynb", "")
]


def all_of(extra):
    """Return the packages of an extra, and of those that it names."""
    found = set()
    for requirement in EXTRAS[extra]:
        own = re.fullmatch(r"numba-gemm\[(.*)\]", requirement)
        found |= all_of(own[1]) if own else {re.match(r"[\w-]+", requirement)[0]}
    return found


def test_extras_are_named_by_task():
    libraries = {"bench", "bench-cu12", "jax", "jax-cu12", "torch"}
    assert set(EXTRAS) == {"cu12", "cu13", "inspect", "notebooks", "docs", "dev"} | libraries


@pytest.mark.parametrize("extra", ["docs", "dev", "inspect", "notebooks"])
def test_large_gpu_libraries_are_of_their_own_extras(extra):
    assert not [name for name in all_of(extra) if name.startswith(("cupy", "jax", "torch"))]


def test_every_extra_that_is_named_exists():
    """In commands of the documentation, of the notebooks, and of error messages."""
    named = {}
    for path in TEXTS:
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(r"(?:numba-gemm|'\.|whl\)\")\[([\w,-]+)\]", text):
            named |= dict.fromkeys(match[1].split(","), path.name)
    assert {"cu12", "cu13", "dev", "notebooks"} <= set(named)
    assert {extra: path for extra, path in named.items() if extra not in EXTRAS} == {}


def test_notebooks_count_instructions():
    """Notebooks 07 and 12 read SASS, for which they need no GPU."""
    assert "nvidia-cuda-nvdisasm" in all_of("notebooks")


def test_the_development_container_installs_what_notebooks_need():
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    readme = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
    assert container["postCreateCommand"] in readme
    assert f" {container['image']} " in readme


@pytest.fixture(scope="module")
def hook():
    """The build hook."""
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_wheel_has_the_tables_that_notebooks_show_and_no_others(hook):
    sources = [*ROOT.glob("notebooks/*.py"), ROOT / "numba_gemm" / "course" / "notebook.py"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    shown = set(re.findall(r'"((?:latest|memory_lab)/[\w/]+\.csv)"', text)) - {"latest/none.csv"}
    assert {"latest/counters.csv", "memory_lab/memory_spaces.csv"} <= shown
    results = ROOT / "results" / "h200"
    shown |= {f"memory_lab/{path.name}" for path in (results / "memory_lab").glob("*.csv")}  # all are in notebook 10
    described = set()
    for name in shown:
        beside = (results / name).with_suffix(".json")
        described.add((beside if beside.is_file() else beside.with_name("environment.json")).relative_to(results))
    expected = shown | {path.as_posix() for path in described} | {"latest/ceilings.json"}
    expected |= {f"notebooks/{name}.json" for name in re.findall(r'recorded_output\("(\w+)"', text)}
    inside = hook.recorded_files(ROOT)
    assert {Path(path).relative_to(results).as_posix() for path in inside} == expected
    assert set(inside.values()) == {f"numba_gemm/recorded/h200/{name}" for name in expected}


def test_a_table_that_is_gone_is_an_error(hook, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no results/h200/latest/ceilings\.json"):
        hook.recorded_files(tmp_path)
