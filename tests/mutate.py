"""Apply the edits of `mutations.toml` to a copy of the project, one at a time, and report those that no test notices.

``python tests/mutate.py`` runs all of them, which takes a few minutes; ``--sample N --seed S`` runs N that are not
marked `slow`, and ``--only TEXT`` those whose file or test names contain a text. An edit is caught if each of its tests
fails; before that, the same tests have to pass on the unedited copy.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(__file__).with_name("mutations.toml")
COPIED = ("CONTRIBUTING.md", "README.md", "docs", "notebooks", "numba_gemm", "pyproject.toml", "results", "tests")
LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*", "local", "_build")


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One edit of a file, and the tests that have to fail after it."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]  # pytest node ids; without parameters, one failing case is enough
    says: str = ""  # text of the failure
    slow: bool = False

    def applied(self, text: str) -> str:
        """Return the edited text of the file."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} contains {self.old!r} {count} times; expected once: update {DATA.name}")
        return text.replace(self.old, self.new)


def load() -> list[Mutation]:
    """Return all mutations."""
    entries = tomllib.loads(DATA.read_text(encoding="utf-8"))["mutation"]
    return [Mutation(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run tests in a copy of the project; return the exit status and the output."""
    # Without bytecode: that of an edited file could be taken for that of the original, saved within the same second.
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    options = ["-o", "addopts=", "-p", "no:cacheprovider", "-n", "0", "-q", "-rf", "--tb=short"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests], cwd=tree, env=environment, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def missed(mutation: Mutation, output: str) -> list[str]:
    """Return what is missing from the output of the tests of a mutation: tests that did not fail, text not said."""
    failed = [line.removeprefix("FAILED ") for line in output.splitlines() if line.startswith("FAILED ")]
    survived = [
        test
        for test in mutation.tests
        if not any(line == test or line.startswith((f"{test}[", f"{test} ")) for line in failed)
    ]
    return survived + ([f"text {mutation.says!r}"] if mutation.says not in output else [])


def check(mutation: Mutation, tree: Path) -> str | None:
    """Apply a mutation to a copy, run its tests, and take it back; return a description if it survived."""
    path = tree / mutation.file
    original = path.read_text(encoding="utf-8")
    path.write_text(mutation.applied(original), encoding="utf-8")
    try:
        _, output = run_tests(tree, mutation.tests)
    finally:
        path.write_text(original, encoding="utf-8")
    lacking = missed(mutation, output)
    return f"did not fail: {', '.join(lacking)}\n{output}" if lacking else None


def copy_project(tree: Path) -> None:
    """Copy what the tests read."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=LEFT_OUT)
        else:
            shutil.copy(ROOT / name, tree / name)


def chosen(options: argparse.Namespace) -> list[Mutation]:
    """Return the mutations that the command line selects."""
    found = [one for one in load() if options.only in f"{one.file} {' '.join(one.tests)}"]
    if options.sample is None:
        return found
    quick = [one for one in found if not one.slow]
    print(f"--sample {options.sample} --seed {options.seed}", flush=True)
    return random.Random(options.seed).sample(quick, min(options.sample, len(quick)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line names; return 1 if a mutation survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, metavar="N", help="run N mutations that are not slow (default: all)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), metavar="S", help="choice of the sample")
    parser.add_argument("--only", default="", metavar="TEXT", help="run mutations whose file or tests contain a text")
    mutations = chosen(parser.parse_args(arguments))
    with tempfile.TemporaryDirectory(prefix="numba_gemm-mutate-") as folder:
        tree = Path(folder)
        copy_project(tree)
        status, output = run_tests(tree, sorted({test for one in mutations for test in one.tests}))
        if status != 0:
            print(f"the tests do not pass without a mutation:\n{output}")
            return 1
        survivors = 0
        for mutation in mutations:
            wrong = check(mutation, tree)
            survivors += wrong is not None
            print(f"{'SURVIVED' if wrong else 'caught'}: {mutation.file}: {mutation.old.strip()!r}", flush=True)
            if wrong:
                print(wrong, flush=True)
    print(f"{len(mutations)} mutations, {survivors} survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
