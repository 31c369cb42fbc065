"""Count the non-blank lines of Python per folder, and their change since the last git tag.

``python tests/count_lines.py`` prints one row per folder of the package, one each for documentation, notebooks, tests
and the files beside them, and the total. It shows no change where there is no tag to compare with: in a shallow clone,
or outside a git checkout.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
COUNTED = ("bench.py", "docs", "hatch_build.py", "notebooks", "numba_gemm", "tests")


def folder(path: PurePosixPath) -> str:
    """Return the row of a file: its folder in the package, else its first folder; itself if it is in none."""
    return "/".join(path.parts[:2]) if path.parts[0] == "numba_gemm" and len(path.parts) > 2 else path.parts[0]


def count(files: Iterable[tuple[PurePosixPath, bytes]]) -> Counter[str]:
    """Return the non-blank lines of Python files per row."""
    lines = Counter[str]()
    for path, content in files:
        if path.suffix == ".py":
            lines[folder(path)] += sum(1 for line in content.splitlines() if line.strip())
    return lines


def working_tree(root: Path) -> Counter[str]:
    """Return the counts of the files on disk."""
    paths = (path for name in COUNTED for path in [root / name, *(root / name).rglob("*.py")] if path.is_file())
    return count((PurePosixPath(path.relative_to(root)), path.read_bytes()) for path in paths)


def git(root: Path, *arguments: str) -> bytes | None:
    """Return the output of a git command, or None if it fails or there is no git."""
    try:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def last_tag(root: Path) -> str | None:
    """Return the last tag that the current commit contains, or None."""
    prefix = git(root, "rev-parse", "--show-prefix")
    if prefix is None or prefix.strip():  # no checkout, or a folder inside another project's
        return None
    tag = git(root, "describe", "--tags", "--abbrev=0")
    return tag.decode().strip() if tag else None


def committed(root: Path, tag: str) -> Counter[str]:
    """Return the counts of the files at a tag."""
    paths = [name for name in COUNTED if git(root, "cat-file", "-e", f"{tag}:{name}") is not None]
    archive = git(root, "archive", tag, *paths) if paths else None
    if archive is None:
        return Counter()
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        members = ((member, files.extractfile(member)) for member in files)
        return count((PurePosixPath(member.name), file.read()) for member, file in members if file is not None)


def report(root: Path) -> str:
    """Return the table as text."""
    now, tag = working_tree(root), last_tag(root)
    before = committed(root, tag) if tag else Counter[str]()
    rows = [(name, now[name], now[name] - before[name]) for name in sorted({*now, *before})]
    rows.append(("total", now.total(), now.total() - before.total()))
    title = f"change since {tag}" if tag else "no tag to compare with"
    lines = [f"{name:24}{size:8,}" + (f"{change:+9,}" if tag else "") for name, size, change in rows]
    return "\n".join([f"Non-blank lines of Python ({title}):", *lines])


if __name__ == "__main__":
    print(report(ROOT))
