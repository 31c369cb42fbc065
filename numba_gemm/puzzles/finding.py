"""One fault of a kernel: its place in the source, and a sentence."""

from __future__ import annotations

import linecache
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Finding", "place"]


@dataclass(frozen=True)
class Finding:
    """A fault of a kernel, or a limit that it exceeds.

    Attributes
    ----------
    kind : str
        "unfinished", "error", "race", "unwritten", "wrong", "owner" or "limit".
    text : str
        The fault, in a sentence or two.
    file, line : str, int
        Place in the source; line 0 if the fault has no place.
    """

    kind: str
    text: str
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        if not self.line:
            return self.text
        source = linecache.getline(self.file, self.line).strip()
        return f"{place(self.file, self.line)}: {self.text}" + f"\n    {source}" * bool(source)


def place(file: str, line: int) -> str:
    """Return ``file:line``, with the file relative to the working directory; ``line 5`` for a notebook's cell."""
    path = Path(file)
    if not path.is_file() or any(part.startswith("ipykernel_") for part in path.parts):
        return f"line {line}"
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{line}"
