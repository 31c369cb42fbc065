"""Every puzzle's solution passes, wrong ones get a message with line and thread, and the command keeps the progress."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from support import compile_puzzles
from support.covering import others_exhaustive
from support.offline import offline
from support.wrong_kernels import WRONG

from numba_gemm import __main__ as command
from numba_gemm.puzzles import PUZZLES, check, puzzle
from numba_gemm.puzzles.checker import CORRECT_POINTS, MOST_POINTS, Verdict
from numba_gemm.puzzles.progress import Directory
from numba_gemm.puzzles.record import LIMITS, parameters_of
from numba_gemm.terminal import INTERRUPTED, USAGE

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.simulator
every_puzzle = pytest.mark.parametrize("name", PUZZLES)


def kernel_of(text: str, name: str, folder: Path) -> object:
    """Return the kernel in a file with this text, as the command loads it."""
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return Directory(folder).kernel(name)


def checked(text: str, name: str, folder: Path, **options: float) -> Verdict:
    """Return the verdict on a file with this text."""
    return check(kernel_of(text, name, folder), name, **options)


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    """Run ``numba-gemm puzzle``; return its status, output and errors."""
    status = command.main(("puzzle", *arguments))
    return status, *capsys.readouterr()


# ------------------------------------------------------------------------------------------------------ every puzzle


@every_puzzle
def test_solution_passes(name, tmp_path):
    verdict = checked(puzzle(name).solution, name, tmp_path)
    assert verdict.solved, verdict
    assert verdict.points() == MOST_POINTS
    for text, count, allowed in verdict.figures:  # a limit above what is needed would let wasteful kernels pass
        assert count == allowed, text


@every_puzzle
def test_skeleton_is_a_kernel_that_does_not_pass(name, tmp_path):
    task = puzzle(name)
    verdict = checked(task.skeleton, name, tmp_path, seconds=5)
    assert not verdict.solved
    assert verdict.finding.line, verdict
    assert parameters_of(Directory(tmp_path).kernel(name)) == task.parameters


@every_puzzle
def test_solution_compiles_for_a_gpu(name):
    """To float32 arithmetic, without arrays in local memory."""
    found = offline(compile_puzzles.instructions, name)
    assert [one for one in found if "f64" in one or "local" in one] == []
    assert ("bar.sync" in found) == ("barriers" in puzzle(name).limits)
    assert ("ld.global.v4.f32" in found) == (name == "vector_copy")
    assert any(one.startswith("cp.async") for one in found) == (name == "async_copies")


@every_puzzle
def test_files_stand_alone(name):
    """Skeleton and solution hold the statement, and import nothing relative to the package."""
    task = puzzle(name)
    for text in (task.skeleton, task.solution):
        tree = ast.parse(text)
        assert ast.get_docstring(tree) == task.statement
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
        assert not re.search(r"# (begin|end)\b|#:", text)
    assert task.skeleton != task.solution


@every_puzzle
def test_puzzle_is_complete(name):
    task = puzzle(name)
    assert len(task.hints) >= 2
    assert len(task.cases) >= 2
    assert set(task.limits) <= set(LIMITS)
    assert task.title.endswith(".")
    assert name in repr(task)


def test_there_are_wrong_solutions_for_every_puzzle():
    count = Counter(one.puzzle for one in WRONG)
    assert set(count) == set(PUZZLES)
    assert min(count.values()) >= 3
    assert len({one.id for one in WRONG}) == len(WRONG)


@pytest.mark.parametrize("one", others_exhaustive(WRONG, WRONG[::2]), ids=lambda one: one.id)
def test_wrong_solution_gets_its_line_and_thread(one, tmp_path):
    text = one.edited(puzzle(one.puzzle).solution)
    lines = [line.strip() for line in text.splitlines()]
    verdict = checked(text, one.puzzle, tmp_path)
    assert not verdict.solved
    found = verdict.finding
    said = re.sub(r"line (\d+)", lambda match: f"line `{lines[int(match[1]) - 1]}`", found.text)
    assert re.sub(r"address 0x\w+", "address #", said) == one.says
    assert "thread" in found.text or ("barriers per block" in found.text and "block (" in found.text)
    assert lines[found.line - 1] == one.at
    assert found.file == str((tmp_path / f"{one.puzzle}.py").resolve())
    assert f"{one.puzzle}.py:{found.line}: " in str(verdict)


# ------------------------------------------------------------------------------------------------------- the checker


def test_endless_loop_ends(tmp_path):
    text = puzzle("barriers").solution.replace("        half //= 2\n", "")
    verdict = checked(text, "barriers", tmp_path, seconds=5)  # enough for what comes before the kernel, on any machine
    assert "the kernel still runs after 5 s in thread" in verdict.finding.text
    loop = range(
        *(number for number, line in enumerate(text.splitlines(), 1) if "while half" in line or "t == 0" in line)
    )
    assert verdict.finding.line in loop
    assert checked(puzzle("barriers").solution, "barriers", tmp_path).solved  # nothing interrupts the next check


def test_check_outside_the_main_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(check(puzzle("element").kernel, "element")))
    thread.start()
    thread.join()
    assert found[0].solved


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("def element(a, c):", "def element(a, b, c):", "the kernel's parameters are (a, b, c), expected (a, c)"),
        ("2) * a[row, col]", "2) * a[row]", "a has 2 dimensions, and `a[row]` is not one of its elements"),
        ("a[row, col]", "a[row / 1, col]", "IndexError in thread (0, 0, 0) of block (0, 0, 0): only integers"),
        ("a[row, col]", "a[row, col, 0]", "IndexError in thread (0, 0, 0) of block (0, 0, 0): too many indices"),
        ("blockIdx.x", "blockidx.x", "AttributeError in thread (0, 0, 0) of block (0, 0, 0): cuda has no attribute"),
        ("m, n = c.shape", "raise SystemExit", "in thread (0, 0, 0) of block (0, 0, 0)"),
        ("    if row < m and", "    if row < ... and", "your code is missing here"),
        ("row < m and col < n", "row < m & col < n", "`&` and `|` bind more tightly than `<`"),
        ("float32(2)", "2.0", "a number with a decimal point is a float64"),
        ("float32(2)", "float32(2) * -0.5", "a number with a decimal point is a float64"),
        (
            "row < m and col < n",
            "row < 0",
            "c[0, 0] is never written, expected 3.5 (M=8, N=8); 64 of 64 elements are wrong.",
        ),
        ("row < m and col < n", "row < 0", "No thread of any block runs this line"),
    ],
)
def test_message_of_a_kernel_that_cannot_run(old, new, says, tmp_path):
    verdict = checked(puzzle("element").solution.replace(old, new), "element", tmp_path)
    assert says in verdict.finding.text
    assert verdict.finding.line
    assert verdict.points() == 0


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("    m, n = c.shape", "    m, n = = c.shape", "element.py:{}: SyntaxError"),
        ("from numba import cuda, float32", "from numba import cuda, float23", "ImportError: cannot import name"),
        ("def element(", "def other(", "there is no kernel named element in this file"),
        ("@cuda.jit", "@cuda.jot", "AttributeError"),
        ("@cuda.jit", "raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_message_of_a_file_that_cannot_run(old, new, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = puzzle("element").solution.replace(old, new)
    says = says.format(1 + text[: text.index(new)].count("\n"))
    assert says in str(kernel_of(text, "element", tmp_path))


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    """Some editors write one."""
    assert checked("\ufeff" + puzzle("element").solution, "element", tmp_path).solved


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ("2 * v", "got 8 in a tuple; compute with the floats one by one"),
        ("(v[0], v[1], v[2])", "got 3 in a tuple"),
        ("two", "got np.float32(2.0)"),
    ],
)
def test_stored_vectors_have_four_floats(values, says, tmp_path):
    text = puzzle("vector_copy").solution.replace("(two * v[0], two * v[1], two * v[2], two * v[3])", values)
    finding = checked(text, "vector_copy", tmp_path).finding
    assert "expected a tuple of four floats, " in finding.text
    assert says in finding.text
    assert "store4(" in text.splitlines()[finding.line - 1]


@pytest.mark.parametrize(
    "line",
    [
        "acc = (a[row, :] * b[:, col]).sum()",
        "acc = a[row] @ b.T[col]",
        "acc = np.dot(a[row], b[:, col])",
        "acc = sum([a[row, p] * b[p, col] for p in range(k)])",
        "acc = sum(a[row, :] * b[:, col])",
    ],
)
def test_operations_on_arrays_are_refused(line, tmp_path):
    """The simulator would run them, without an access that the tracer sees."""
    text = puzzle("product").solution.replace("        acc = float32(0)\n", f"        {line}\n")
    text = text.replace("        for p in range(k):\n            acc += a[row, p] * b[p, col]\n", "")
    finding = checked(text, "product", tmp_path).finding
    assert finding.text.startswith("a kernel computes with single elements")
    assert text.splitlines()[finding.line - 1].strip() == line


def test_sums_are_of_32_bits(tmp_path):
    text = puzzle("product").solution
    for begun in ("0", "0.0"):
        finding = checked(text.replace("float32(0)", begun), "product", tmp_path).finding
        assert "is a float64" in finding.text
        assert text.splitlines()[finding.line - 1].strip() == "acc = float32(0)"
    for begun in ("float32(0.0)", "np.float32(0.5) - float32(0.5)"):
        made = text.replace("float32(0)", begun).replace("from numba import", "import numpy as np\nfrom numba import")
        assert checked(made, "product", tmp_path).solved
    bits = puzzle("element").solution.replace("row < m and", "(row & 0) == 0 and row < m and")
    assert checked(bits, "element", tmp_path).solved


def test_extents_of_shared_arrays_are_constants(tmp_path):
    text = puzzle("bank_conflicts").solution.replace("(T, COLUMNS)", "(T, T + 1)")
    finding = checked(text, "bank_conflicts", tmp_path).finding
    assert finding.text.startswith("the extents of a shared or local array are numbers or constants")
    assert "(T, T + 1)" in text.splitlines()[finding.line - 1]


def test_numbers_of_numpy_are_accepted(tmp_path):
    text = puzzle("product").solution.replace("float32(0)", "np.float32(0)")
    text = text.replace("from numba import cuda", "import numpy as np\nfrom numba import cuda")
    assert checked(text, "product", tmp_path).solved


def test_refused():
    with pytest.raises(ValueError, match="unknown puzzle 'tile'; the puzzles are element, "):
        check(puzzle("element").kernel, "tile")
    with pytest.raises(TypeError, match="expected a kernel"):
        check(3, "element")


def test_correct_kernels_beyond_their_limits_get_some_points(tmp_path):
    one = next(one for one in WRONG if one.id == "bank_conflicts-no_pad")
    verdict = checked(one.edited(puzzle(one.puzzle).solution), one.puzzle, tmp_path)
    assert (verdict.correct, verdict.solved, verdict.points()) == (True, False, CORRECT_POINTS)
    assert "correct, but not within its limits" in str(verdict)


@pytest.mark.parametrize(
    ("hints", "solution", "points"), [(0, False, 10), (1, False, 9), (2, False, 8), (3, False, 8), (0, True, 8)]
)
def test_hints_take_points(hints, solution, points):
    verdict = Verdict("element", True, None)
    assert verdict.points(hints, solution) == points
    assert verdict.score(hints, solution) == (
        f"{points} of 10 points: 5 for a correct kernel, 3 for its limits, {points - 8} of 2 for unused hints"
    )


# ------------------------------------------------------------------------------------------------------- the command


def test_command_from_the_first_call_to_the_solution(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, _ = run(capsys)
    assert (status, out.count(" open ")) == (0, len(PUZZLES))
    assert "0 of 16 solved, 0 points" in out
    assert out.endswith("next: numba-gemm puzzle element\n")

    status, out, _ = run(capsys, "element")
    assert status == 0
    assert "Give every thread one element" in out
    file = tmp_path / "puzzles" / "element.py"
    assert file.read_text() == puzzle("element").skeleton

    status, out, _ = run(capsys, "element")
    assert status == 1
    line = 1 + file.read_text().split("row = ...")[0].count("\n")
    assert f"puzzles/element.py:{line}: your code is missing here" in out
    assert "0 of 10 points" in out
    assert file.read_text() == puzzle("element").skeleton

    status, out, _ = run(capsys, "element", "--hint")
    assert (status, out) == (0, f"hint 1 of 3: {puzzle('element').hints[0]}\n")

    file.write_text(puzzle("element").solution)
    status, out, _ = run(capsys, "element")
    assert status == 0
    assert "element: solved" in out
    assert "9 of 10 points: 5 for a correct kernel, 3 for its limits, 1 of 2 for unused hints" in out
    assert out.endswith("next: numba-gemm puzzle product\n")

    status, out, _ = run(capsys)
    assert re.search(r"element +solved +9 of 10", out)
    assert "1 of 16 solved, 9 points" in out


def test_solution_is_printed_and_costs_points(capsys, tmp_path):
    place = ("--directory", str(tmp_path))
    assert run(capsys, "product", "--solution", *place) == (0, puzzle("product").solution, "")
    (tmp_path / "product.py").write_text(puzzle("product").solution)
    assert "8 of 10 points" in run(capsys, "product", *place)[1]
    assert json.loads((tmp_path / "progress.json").read_text())["product"]["points"] == 8


def test_the_best_score_is_kept(capsys, tmp_path):
    place = ("--directory", str(tmp_path))
    (tmp_path / "product.py").write_text(puzzle("product").solution)
    run(capsys, "product", *place)
    (tmp_path / "product.py").write_text(puzzle("product").skeleton)
    assert run(capsys, "product", *place)[0] == 1
    assert re.search(r"product +solved +10 of 10", run(capsys, *place)[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["product.py", "progress.json"]


def test_commands_at_the_same_time_keep_each_others_progress(tmp_path):
    first, second = Directory(tmp_path), Directory(tmp_path)
    second.hint(puzzle("element"))
    first.hint(puzzle("product"))
    assert [Directory(tmp_path).state(name).hints for name in ("element", "product")] == [1, 1]


def test_a_file_is_never_overwritten(tmp_path):
    (tmp_path / "element.py").write_text("mine")
    with pytest.raises(FileExistsError):
        Directory(tmp_path).begin(puzzle("element"))
    assert (tmp_path / "element.py").read_text() == "mine"


def test_after_the_last_hint_all_are_shown(capsys, tmp_path):
    shown = [run(capsys, "coalesced", "--hint", "--directory", str(tmp_path))[1] for _ in range(3)]
    first, second = puzzle("coalesced").hints
    assert shown == [f"hint 1 of 2: {first}\n", f"hint 2 of 2: {second}\n", f"{first}\n{second}\n"]


def test_when_all_are_solved(capsys, tmp_path):
    solved = {"hints": 0, "solution": False, "points": 10, "solved": True}
    (tmp_path / "progress.json").write_text(json.dumps(dict.fromkeys(PUZZLES, solved)))
    (tmp_path / "epilogue.py").write_text(puzzle("epilogue").solution)
    assert run(capsys, "epilogue", "--directory", str(tmp_path))[1].endswith("All puzzles are solved.\n")
    assert run(capsys, "--directory", str(tmp_path))[1].endswith("16 of 16 solved, 160 points\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--hint",), "give its NAME"),
        (("shared_tiles",), "unknown puzzle 'shared_tiles'; did you mean shared_tile?"),
        (("x",), "the puzzles are element, product, "),
        (("element", "--directory", "file"), "file"),
        (("element", "--directory", "broken"), "progress.json holds no progress"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "progress.json").write_text("[1]")
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (USAGE, "")
    assert says in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_ctrl_c_ends_a_check(capsys, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("numba_gemm.puzzles.running.trace", interrupted)
    (tmp_path / "element.py").write_text(puzzle("element").solution)
    assert run(capsys, "element", "--directory", str(tmp_path))[0] == INTERRUPTED


def test_command_chooses_the_simulator_itself(tmp_path):
    """In a process of its own, whose environment does not ask for the simulator."""
    kept = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    (tmp_path / "element.py").write_text(puzzle("element").solution)
    done = subprocess.run(
        [sys.executable, "-m", "numba_gemm", "puzzle", "element", "--directory", str(tmp_path)],
        env=kept | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "element: solved" in done.stdout
