"""The page docs/puzzles.md: its table, the message that it shows, and its code."""

from __future__ import annotations

import linecache
import re
from pathlib import Path

import pytest
from support.wrong_kernels import WRONG

from numba_gemm import __main__ as command
from numba_gemm.puzzles import PUZZLES, puzzle
from numba_gemm.puzzles.record import LIMITS

PAGE = (Path(__file__).parents[2] / "docs" / "puzzles.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.simulator


def table() -> str:
    """Return the table of all puzzles."""
    rows = ["|  | puzzle | subject | at most |", "|--:|---|---|---|"]
    for number, name in enumerate(PUZZLES, 1):
        task = puzzle(name)
        limits = "; ".join(f"`{formula}` {LIMITS[limit]}" for limit, formula in task.limits.items())
        rows.append(f"| {number} | [`{name}`](../numba_gemm/puzzles/tasks/{name}.py) | {task.idea} | {limits} |")
    return "\n".join(rows)


def test_table():
    shown = re.search(r"<!-- puzzles:begin -->\n(.*)\n<!-- puzzles:end -->", PAGE, re.DOTALL)
    assert shown is not None
    assert shown[1] == table(), f"write this between the markers:\n{table()}"


def test_skeleton():
    (shown,) = re.findall(r"```python\n(@cuda\.jit\ndef product.*?)```", PAGE, re.DOTALL)
    assert puzzle("product").skeleton.endswith(shown)


def without_lines(text: str) -> str:
    """Return a message without the numbers of lines, which move when a statement changes."""
    return re.sub(r"(\.py:|line )\d+", r"\1#", text)


def test_message(tmp_path, monkeypatch, capsys):
    one = next(one for one in WRONG if one.id == "shared_tile-no_second_barrier")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "puzzles").mkdir()
    (tmp_path / "puzzles" / "shared_tile.py").write_text(one.edited(puzzle("shared_tile").solution))
    assert command.main(["puzzle", "shared_tile"]) == 1
    (shown,) = re.findall(r"```text\n(shared_tile: .*?)```", PAGE, re.DOTALL)
    assert without_lines(capsys.readouterr().out) == without_lines(shown)


def test_code(monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(from numba import .*?)```", PAGE, re.DOTALL)
    monkeypatch.setitem(linecache.cache, "<page>", (len(code), None, code.splitlines(keepends=True), "<page>"))
    exec(compile(code, "<page>", "exec"), {})
    assert "element: solved" in capsys.readouterr().out


def test_number_of_puzzles():
    words = {16: "Sixteen"}
    assert f"{words[len(PUZZLES)]} kernels" in PAGE
