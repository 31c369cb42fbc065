"""The line counter: its rows, and the change since a tag where there is one."""

from __future__ import annotations

import shutil
import subprocess

import count_lines
import pytest

IDENTITY = (
    "-c",
    "user.name=x",
    "-c",
    "user.email=x@example.com",
    "-c",
    "commit.gpgsign=false",
    "-c",
    "tag.gpgsign=false",
)


def rows(root):
    title, *lines = count_lines.report(root).splitlines()
    return title, [tuple(line.split()) for line in lines]


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    for path, text in {
        "numba_gemm/api.py": "a = 1\n\n   \nb = 2\n",
        "numba_gemm/gemm/one/deep.py": "a = 1\r\n\r\nb = 2",
        "numba_gemm/gemm/notes.txt": "no Python\n",
        "docs/blocks/one.py": "a = 1\n",
        "tests/test_one.py": '"""x"""\n',
        "notebooks/00_start.py": "# %%\na = 1\n",
        "bench.py": "a = 1\n",
        "other.py": "not counted\n",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(text.encode())
    return root


def test_without_git(tree, monkeypatch):
    expected = [("bench.py", "1"), ("docs", "1"), ("notebooks", "2"), ("numba_gemm", "2"), ("numba_gemm/gemm", "2")]
    expected += [("tests", "1"), ("total", "9")]
    assert rows(tree) == ("Non-blank lines of Python (no tag to compare with):", expected)
    monkeypatch.setenv("PATH", "")
    assert rows(tree)[1] == expected


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_change_since_the_last_tag(tree, tmp_path, monkeypatch):
    monkeypatch.delenv("GIT_DIR", raising=False)  # which git would take instead of the tree

    def git(*arguments):
        subprocess.run(["git", *IDENTITY, *arguments], cwd=tree, check=True, capture_output=True)

    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    assert "no tag" in rows(tree)[0]
    git("tag", "v1")
    (tree / "numba_gemm" / "api.py").unlink()
    (tree / "tests" / "test_two.py").write_text("a = 1\nb = 2\n")
    git("commit", "-a", "-m", "second")
    expected = [("bench.py", "1", "+0"), ("docs", "1", "+0"), ("notebooks", "2", "+0")]
    expected += [("numba_gemm", "0", "-2"), ("numba_gemm/gemm", "2", "+0"), ("tests", "3", "+2"), ("total", "9", "+0")]
    assert rows(tree) == ("Non-blank lines of Python (change since v1):", expected)
    git("clone", "--depth=1", tree.as_uri(), str(tmp_path / "shallow"))
    assert "no tag" in rows(tmp_path / "shallow")[0]
    shutil.rmtree(tree / ".git")
    git("init", str(tmp_path))
    assert "no tag" in rows(tree)[0], "a folder inside another checkout"
