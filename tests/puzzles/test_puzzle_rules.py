"""Cases that no kernel passes with a block's place forgotten, and the rule that an access names one element."""

from __future__ import annotations

from pathlib import Path

import pytest
from numba import cuda

from numba_gemm.puzzles import PUZZLES, check, puzzle
from numba_gemm.puzzles.checker import Verdict
from numba_gemm.puzzles.progress import Directory
from numba_gemm.puzzles.source import unsuitable

pytestmark = pytest.mark.simulator
every_puzzle = pytest.mark.parametrize("name", PUZZLES)


def edited(name: str, *edits: tuple[str, str]) -> str:
    """Return a puzzle's solution with edits of its code, each in the first place that it fits."""
    statement, text = puzzle(name).solution.split('\n"""\n', 1)
    for old, new in edits:
        assert old in text, f"{old!r} is not in the solution of {name}"
        text = text.replace(old, new, 1)
    return f'{statement}\n"""\n{text}'


def checked(name: str, folder: Path, *edits: tuple[str, str]) -> Verdict:
    """Return the verdict on a puzzle's solution with edits."""
    (folder / f"{name}.py").write_text(edited(name, *edits), encoding="utf-8")
    return check(Directory(folder).kernel(name), name)


# -------------------------------------------------------------------------------------------------------- the cases


@every_puzzle
def test_cases_have_several_blocks_along_each_axis(name):
    """A grid of several blocks along all its axes, and one whose axes differ."""
    task = puzzle(name)
    grids = [task.extents(task.grid, case) for case in task.cases]
    assert any(min(grid) > 1 for grid in grids), grids
    assert any(len(set(grid)) == len(grid) for grid in grids), grids


FORGOTTEN = (
    ("product", ("a[row, p]", "a[cuda.threadIdx.y, p]")),
    ("coalesced", ("b[p, col]", "b[p, cuda.threadIdx.x]")),
    ("transpose", ("a[row + ty, col + tx]", "a[ty, col + tx]")),
    ("shared_tile", ("b[k0 + ty, col]", "b[k0 + ty, tx]")),
    ("shared_tile", ("a[row, k0 + tx]", "a[ty, k0 + tx]")),
    ("edges", ("c[row, col] = acc", "c[ty, col] = acc")),
    ("edges", ("if row < m and k0", "if ty < m and k0"), ("a[row, k0 + tx]", "a[ty, k0 + tx]")),
    (
        "edges",
        (
            "col < n:\n            b_tile[ty, tx] = b[k0 + ty, col]",
            "tx < n:\n            b_tile[ty, tx] = b[k0 + ty, tx]",
        ),
    ),
    ("thread_column", ("c[block_row + row + i", "c[row + i")),
    ("thread_column", ("block_col + col]", "col]")),
    ("thread_tile", ("c[block_row + row + i", "c[row + i")),
    ("thread_tile", ("block_col + col + j]", "col + j]")),
    ("vector_copy", ("cuda.blockIdx.y * 8 + ", "")),
    ("bank_conflicts", ("c[col + i, row + tx]", "c[col + i, tx]")),
    ("bank_conflicts", ("c[col + i, row + tx]", "c[i, row + tx]")),
    ("two_buffers", ("a[row, k0 + T + tx]", "a[ty, k0 + T + tx]")),
    ("two_buffers", ("b[k0 + T + ty, col]", "b[k0 + T + ty, tx]")),
    ("warp_tile", ("    row = warp", "    row = block_row + warp"), ("c[block_row + row", "c[row")),
    ("warp_tile", ("    row = warp", "    row = block_row + warp")),
    ("warp_tile", ("c[block_row + row", "c[row")),
    ("async_copies", ("a, row, following + tx)", "a, ty, following + tx)")),
    ("async_copies", ("b, following + ty, col)", "b, following + ty, tx)")),
    ("epilogue", ("c[row, col] = value", "c[ty, col] = value")),
    ("epilogue", ("beta * c[row, col]", "beta * c[ty, col]")),
    ("epilogue", ("c[row, col] = value", "c[row, tx] = value")),
)


@pytest.mark.parametrize(("name", "edits"), [(name, edits) for name, *edits in FORGOTTEN])
def test_forgotten_blocks_are_found(name, edits, tmp_path):
    verdict = checked(name, tmp_path, *edits)
    assert not verdict.correct
    assert verdict.points() == 0


@pytest.mark.parametrize("name", [name for name in PUZZLES if "blockIdx.y" in puzzle(name).solution])
def test_swapped_axes_of_the_grid_are_found(name, tmp_path):
    """They fit a square grid."""
    assert not checked(
        name,
        tmp_path,
        *[("blockIdx.y", "blockIdx.other"), ("blockIdx.x", "blockIdx.y"), ("blockIdx.other", "blockIdx.x")],
    ).correct


# --------------------------------------------------------------------------------------------------- single elements


@pytest.mark.parametrize(
    ("name", "edits", "shown"),
    [
        (
            "element",
            [
                ("if row < m and col < n", "if row < m and col == 0"),
                ("c[row, col]", "c[row]"),
                ("a[row, col]", "a[row]"),
            ],
            "c has 2 dimensions, and `c[row]`",
        ),
        ("element", [("a[row, col]", "a[row][col]")], "a has 2 dimensions, and `a[row]`"),
        ("element", [("a[row, col]", "a[()]")], "a has 2 dimensions, and `a[()]`"),
        ("element", [("a[row, col]", "a[(row,)]")], "a has 2 dimensions, and `a[row,]`"),
        ("element", [("    m, n = c.shape", "    m, n = c.shape\n    x = a"), ("a[row, col]", "x[row]")], "`x[row]`"),
        ("element", [("a[row, col]", "a")], "`float32(2) * a`"),
        ("element", [("a[row, col]", "a.flat[row * n + col]")], "`a.flat`"),
        ("barriers", [("acc = float32(0)", "acc = sum(x)")], "x has 1 dimension, and `x`"),
        ("transpose", [("= tile[tx, ty]", "= tile[tx]")], "tile has 2 dimensions, and `tile[tx]`"),
        ("two_buffers", [("a_tile[buffer, ty, p]", "a_tile[buffer, ty]")], "`a_tile[buffer, ty]`"),
        ("thread_tile", [("= acc[i, j]", "= acc[i]")], "acc has 2 dimensions, and `acc[i]`"),
    ],
)
def test_rows_are_refused(name, edits, shown, tmp_path):
    """The simulator would run them, without an access that the tracer sees."""
    verdict = checked(name, tmp_path, *edits)
    assert verdict.points() == 0
    assert verdict.finding.text.startswith("a kernel computes with single elements, so that each access is counted: ")
    assert f"{shown} is not one of its elements" in verdict.finding.text
    assert verdict.finding.line


@pytest.mark.parametrize(
    ("name", "edits"),
    [
        ("element", [("        c[", "        at = (row, col)\n        c["), ("a[row, col]", "a[at]")]),
        ("element", [("m, n = c.shape", "m, n = len(c), a.shape[1]")]),
        ("element", [("m, n = c.shape", "m, n = len(c), len(c[0])")]),
        (
            "element",
            [("        c[", "        at = (row, col) if row < m else (0, 0)\n        c["), ("a[row, col]", "a[at]")],
        ),
        (
            "element",
            [
                ("@cuda.jit", "@cuda.jit(device=True)\ndef place(i, j):\n    return i, j\n\n\n@cuda.jit"),
                ("a[row, col]", "a[place(row, col)]"),
            ],
        ),
        (
            "element",
            [("    m, n = c.shape", "    m, n = c.shape\n    x = a if n > 0 else c"), ("a[row, col]", "x[row, col]")],
        ),
        ("element", [("    m, n = c.shape", "    m, n = c.shape\n    x = a"), ("a[row, col]", "x[row, col]")]),
        ("transpose", [("(T, T)", "SHAPE"), ("T = 8", "SHAPE = (8, 8)\nT = 8")]),
        ("transpose", [("array((T, T), float32)", "array(shape=(T, T), dtype=float32)")]),
    ],
)
def test_single_elements_are_accepted(name, edits, tmp_path):
    assert checked(name, tmp_path, *edits).solved


def test_name_of_a_closure_without_a_value_is_no_error():
    @cuda.jit
    def element(a, c):
        c[0, 0] = a[0] * later

    finding = unsuitable(element, ("a", "c"), ("a", "c"), {"a": 2, "c": 2})
    later = 1
    assert finding is not None
    assert "`a[0]` is not one of its elements" in finding.text
    assert later


@every_puzzle
def test_solutions_access_single_elements(name):
    task = puzzle(name)
    assert unsuitable(task.kernel, task.parameters, task.parameters, task.dimensions) is None
