"""Annotations of the public functions: mypy accepts correct code and refuses wrong code; names are complete."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import numba_gemm
from numba_gemm import typing as names
from numba_gemm.gemm.precision import ALIASES, KNOWN
from numba_gemm.kernels import STAGES
from numba_gemm.kernels.ladder import STAGES as LADDER
from numba_gemm.kernels.product import LAYOUTS
from numba_gemm.kernels.tensor_core import TENSOR_STAGES

ROOT = Path(__file__).parents[1]
USER = ROOT / "tests" / "data" / "typed_user.py"
# As for a package that is installed: it is followed, and its own errors are not reported.
CONFIG = """
[mypy]
strict = True
warn_unused_ignores = False
[mypy-numba_gemm.*]
follow_imports = silent
[mypy-cuda.*,llvmlite.*,numba.*]
ignore_missing_imports = True
follow_imports = skip
[mypy-jax.*,torch.*]
ignore_missing_imports = True
follow_imports = skip
"""


def test_the_names_are_those_of_the_registries():
    assert get_args(names.LadderStageName) == tuple(LADDER)
    assert get_args(names.TensorStageName) == tuple(TENSOR_STAGES)
    assert get_args(names.StageName) == tuple(STAGES)
    assert get_args(names.StageChoice) == (*STAGES, "auto")
    assert get_args(names.PrecisionName) == (*KNOWN, *ALIASES)
    assert get_args(names.Layout) == LAYOUTS


def test_mypy_on_code_of_users(tmp_path):
    """One run over `tests/data/typed_user.py`: an error of the expected kind in each marked line, none in others."""
    pytest.importorskip("mypy")
    config = tmp_path / "mypy.ini"
    config.write_text(CONFIG)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(tmp_path / "cache"), str(USER)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    errors = re.findall(r"^.*typed_user\.py:(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE)
    marked = re.compile(r"# error: ([\w-]+)$")
    expected = [
        (str(number), match[1])
        for number, line in enumerate(USER.read_text(encoding="utf-8").splitlines(), 1)
        if (match := marked.search(line))
    ]
    assert len(expected) > 35
    assert list(dict.fromkeys(errors)) == expected, done.stdout


def test_only_public_names_are_listed():
    assert dir(numba_gemm) == sorted(numba_gemm.__all__)
    assert all(hasattr(numba_gemm, name) for name in dir(numba_gemm))
