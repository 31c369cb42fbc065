"""Neighbouring stages of the ladders: how much of their code differs, and what was measured of them on an H200."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
from difflib import SequenceMatcher
from pathlib import Path

import pandas as pd
import pytest

from numba_gemm.kernels.ladder import ASIDE, STAGES
from numba_gemm.kernels.tensor_core import TENSOR_STAGES

RESULTS = Path(__file__).parents[2] / "results" / "h200" / "latest"
MOST_LINES = {"stream_k": 135}  # at most 120 for others; twelve of these are for compensated sums
MOST_EXCESS = 3  # percent of a stage's wavefronts of shared memory, from the stage on that removes bank conflicts
CLIMB = [name for name in STAGES if name not in ASIDE]
# These are for other GPUs, other operands and other products.
OTHERS = ("tf32_tma", "rows_in_registers", "warp_mma", "fused_decomposition")
TENSOR_CLIMB = [name for name in TENSOR_STAGES if name not in OTHERS]
RUNGS = [*itertools.pairwise(CLIMB), *itertools.pairwise(TENSOR_CLIMB)]
ON_GPU = ("cuda.jit", "device_function")


def module_of(name):
    """Module of a stage's kernel; some stages are the kernel of another one, in other configurations."""
    stage = STAGES.get(name) or TENSOR_STAGES[name]
    return importlib.import_module(importlib.import_module(stage.build.__module__).build.__module__)


def device_code(module, without=()):
    """Lines of functions that run on a GPU, but for those inside of `without`; no comments and docstrings."""
    found = []

    def collect(node):
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef):
                collect(child)
            elif any(word in ast.unparse(decorator) for decorator in child.decorator_list for word in ON_GPU):
                if ast.get_docstring(child):
                    del child.body[0]
                found.extend(ast.unparse(child).splitlines())
            elif child.name not in without:
                collect(child)

    collect(ast.parse(inspect.getsource(module)))
    return [line for line in found if line]


def imported(module, other):
    """Names that one module imports from another."""
    return [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == other.__name__ != module.__name__
    ]


def changed(before, after):
    """Number of lines that differ; a line in place of another one counts once."""
    found = SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(end - start, new_end - new) for tag, start, end, new, new_end in found if tag != "equal")


def test_lines_that_differ():
    assert changed("abcd", "abcd") == 0
    assert changed("abcd", "abxyd") == 2
    assert changed("abcd", "ad") == 2
    assert changed("abcd", "abcdef") == 2


@pytest.mark.parametrize(("before", "after"), RUNGS)
def test_neighbours_differ_by_few_lines(before, after):
    """What a stage imports from the one before has not changed."""
    one, other = module_of(before), module_of(after)
    old, new = device_code(one, imported(other, one)), device_code(other)
    assert len(old) >= 7
    assert changed(old, new) <= MOST_LINES.get(after, 120)


@pytest.mark.parametrize("name", CLIMB[: CLIMB.index("async_copy")])
def test_a_stage_shows_what_it_multiplies(name):
    """From `async_copy` on, the order of the products is a choice."""
    assert any("+=" in line and " * " in line for line in device_code(module_of(name)))


def speeds():
    """TFLOP/s at 4096 cubed by stage, for each ladder."""
    fp32 = pd.read_csv(RESULTS / "results.csv")
    cube = fp32[(fp32[["m", "n", "k"]] == 4096).all(axis=1)].set_index("stage")["gflops"]
    return cube / 1e3, pd.read_csv(RESULTS / "precisions" / "tensor_ladder.csv").set_index("stage")["tflops"]


def excesses():
    """Wavefronts of shared memory beyond the fewest, in percent, by stage."""
    counted = pd.read_csv(RESULTS / "shared_wavefronts.csv").query("op == 'total'").set_index("stage")
    return counted["excess_percent"].fillna(0)


def test_every_rung_was_measured():
    """The two tests below skip a stage that is being added."""
    fp32, tensor = speeds()
    assert set(CLIMB) <= set(fp32.index)
    assert set(TENSOR_CLIMB) <= set(tensor.index)
    assert set(CLIMB) <= set(excesses().index)


# `one_warp` computes in another precision than the stages that follow.
@pytest.mark.parametrize(("before", "after"), [pair for pair in RUNGS if "one_warp" not in pair])
def test_a_rung_is_faster_or_says_why_not(before, after):
    speed = next((found for found in speeds() if {before, after} <= set(found.index)), None)
    if speed is None:
        pytest.skip("not measured yet")
    text = " ".join(inspect.getdoc(module_of(after)).split())
    assert speed[after] > speed[before] or "Counters show why" in text or "Instructions show why" in text


@pytest.mark.parametrize("name", CLIMB)
def test_wavefronts_beyond_the_fewest(name):
    if name not in excesses().index:
        pytest.skip("not measured yet")
    excess = excesses()[name]
    if CLIMB.index(name) >= CLIMB.index("conflict_free"):
        assert excess < MOST_EXCESS
    elif excess:  # what the next stages remove
        assert "Limits: bank conflicts" in " ".join(inspect.getdoc(module_of(name)).split())
