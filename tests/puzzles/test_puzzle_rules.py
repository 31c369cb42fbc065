"""Cases that no kernel passes with a block's place forgotten, and rules about accesses, types, extents and results."""

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


# ------------------------------------------------------------------------------------------------- types of numbers

IMPORTS = ("from numba import cuda, float32", "import numpy as np\nfrom numba import cuda, float32, float64, int32")
SUM = """        acc = float32(0)
        for p in range(k):
            acc += a[row, p] * b[p, col]
        c[row, col] = acc"""
ZERO, TERM = ("acc = float32(0)", "acc = 0"), "acc += a[row, p] * b[p, col]"
VALUES = "x, y = a[row, p], b[p, col]"


def in_a_function(*lines: str) -> list[tuple[str, str]]:
    """Return edits of `product` that move its sum to a device function, whose lines are given."""
    body = "\n    ".join(lines)
    function = f"@cuda.jit(device=True)\ndef total(a, b, row, col, k):\n    {body}\n    return acc\n\n\n"
    return [("@cuda.jit\ndef", f"{function}@cuda.jit\ndef"), (SUM, "        c[row, col] = total(a, b, row, col, k)")]


@pytest.mark.parametrize(
    ("name", "edits", "says"),
    [
        ("product", [ZERO, (TERM, "acc = acc + a[row, p] * b[p, col]")], "acc begins as an integer"),
        (
            "product",
            [ZERO, (TERM, "x, y = a[row, p], b[p, col]\n            acc += x * y")],
            "acc begins as an integer",
        ),
        ("product", [("acc = float32(0)", "acc = int32(0)")], "acc begins as an integer"),
        ("product", [("acc = float32(0)", "first = acc = 0")], "begins as an integer"),
        ("product", [("@cuda.jit", "ZERO = 0\n\n\n@cuda.jit"), ("float32(0)", "ZERO")], "acc begins as an integer"),
        (
            "epilogue",
            [("value = alpha * acc", "value = 0\n        value += alpha * acc")],
            "value begins as an integer",
        ),
        ("product", [("float32(0)", "float64(0)")], "use float32"),
        ("product", [("float32(0)", "np.float64(0)")], "use float32"),
        ("product", [("float32(0)", "float(0)")], "use float32"),
        ("product", [(TERM, "acc = float32(0.5 * a[row, p] * b[p, col])")], "with a decimal point"),
        ("shared_tile", [("(T, T), float32", "(T, T), float64")], "use float32"),
        ("shared_tile", [("(T, T), float32", "(T, T), dtype=np.float64")], "use float32"),
        ("shared_tile", [("(T, T), float32", "(T, T), int32")], "a_tile holds int32, expected float32"),
        ("shared_tile", [("(T, T), float32", '(T, T), "f8"')], "a_tile holds float64, expected float32"),
        ("product", [("float32(0)", "int32(0)"), (TERM, "acc += int32(a[row, p] * b[p, col])")], "c[0, 0] is "),
        ("product", in_a_function("acc = 0.0", "for p in range(k):", f"    {TERM}"), "with a decimal point"),
        ("product", in_a_function("acc = 0", "for p in range(k):", f"    {TERM}"), "acc begins as an integer"),
        ("product", in_a_function("acc = float32(a[row, :] @ b[:, col])"), "computes with single elements"),
        ("product", [(SUM, "        c[row, col] = float32((a[row, :] * b[:, col]).sum())")], "single elements"),
        ("product", [(SUM, "        c[row, col] = float32(a[row, :] @ b[:, col])")], "single elements"),
        ("product", [("float32(0)", "float32(...)")], "your code is missing"),
    ],
)
def test_other_numbers_are_refused(name, edits, says, tmp_path):
    finding = checked(name, tmp_path, IMPORTS, *edits).finding
    assert says in finding.text
    assert finding.line


@pytest.mark.parametrize(
    ("name", "edits"),
    [
        ("product", [("float32(0)", "float32(-0.0)")]),
        ("product", [("float32(0)", "float32(1.0 / 4) - float32(0.25)")]),
        ("product", [("acc = float32(0)", "acc = 0\n        acc = float32(0)")]),
        ("product", [("range(k):", "range(k):\n            n = 0\n            n = n + p")]),
        ("product", [(TERM, f"{VALUES}; n = 0; n += int32(x); acc += x * y")]),
        ("product", [(TERM, f"{VALUES}; n = 0; n += 1 if x > y else 2; acc += x * y")]),
        ("product", [("k = a.shape[1]", "shape = a.shape\n    k = 0\n    k += shape[1]")]),
        ("product", in_a_function("acc = float32(0)", "for p in range(k):", f"    {TERM}")),
    ],
)
def test_numbers_of_32_bits_are_accepted(name, edits, tmp_path):
    assert checked(name, tmp_path, IMPORTS, *edits).solved


# ---------------------------------------------------------------------------------------------- extents and results

TILE = "    tile = cuda.shared.array((T, T), float32)"


@pytest.mark.parametrize(
    "line",
    [
        "tile = cuda.shared.array(shape=(T, T + 1), dtype=float32)",
        "tile = cuda.shared.array(shape=(cuda.blockDim.y, cuda.blockDim.x), dtype=float32)",
        "n = cuda.blockDim.x; tile = cuda.shared.array((n, n), float32)",
        "n = T + 1; tile = cuda.shared.array((T, n), float32)",
        "n = 8; n += 1; tile = cuda.shared.array((T, n), float32)",
        "tile = cuda.shared.array((np.int64(T), T), float32)",
        "tile = cuda.shared.array((int(T), T), float32)",
        "tile = cuda.shared.array([T, T], float32)",
    ],
)
def test_computed_extents_are_refused(line, tmp_path):
    """By the compiler, too, whose types of extents are literal integers."""
    verdict = checked("transpose", tmp_path, IMPORTS, (TILE, f"    {line}"))
    assert verdict.points() == 0
    assert (
        "shared or local array are numbers or constants" in verdict.finding.text or "no lists" in verdict.finding.text
    )


@pytest.mark.parametrize(
    "lines",
    [
        "tile = cuda.shared.array((8, T), float32)",
        "tile = cuda.shared.array(dtype=float32, shape=(8, T))",
        "n = T\n    m = n\n    tile = cuda.shared.array((m, n), float32)",
        "n, m = 8, T\n    tile = cuda.shared.array((m, n), float32)",
        "shape = (T, 8)\n    tile = cuda.shared.array(shape, float32)",
        "shape = (T, 8)\n    m, n = shape\n    tile = cuda.shared.array((m, n), float32)",
        "shape = (T, 8)\n    tile = cuda.shared.array((shape[0], shape[1]), float32)",
    ],
)
def test_constant_extents_are_accepted(lines, tmp_path):
    """By the compiler, too."""
    assert checked("transpose", tmp_path, (TILE, f"    {lines}")).solved


@pytest.mark.parametrize(("value", "solved"), [("", True), (" None", True), (" True", False), (" c", False)])
def test_kernels_return_nothing(value, solved, tmp_path):
    edits = ("    m, n = c.shape", f"    m, n = c.shape\n    if m < 0:\n        return{value}")
    verdict = checked("element", tmp_path, edits)
    assert verdict.solved == solved
    assert solved or "returns no value" in verdict.finding.text or "single elements" in verdict.finding.text
