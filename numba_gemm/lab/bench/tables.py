"""Tables of text as markdown or on a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MISSING = "–"


@dataclass(frozen=True)
class Table:
    """Headers and rows of text; columns named in ``left`` are left-aligned, the others right-aligned."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[str] = ()

    def markdown(self) -> str:
        """Return the table in GitHub's markdown, without its title."""
        lines = [line(self.headers), line([":--" if header in self.left else "--:" for header in self.headers])]
        lines += [line(row) for row in self.rows]
        return "\n".join(lines)


def line(cells: Sequence[str]) -> str:
    """Format one row of a markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def number(value: float, digits: int = 1, unit: str = "") -> str:
    """Format a number with fixed decimals and thousands separators; a dash if there is none."""
    return MISSING if math.isnan(value) else f"{value:,.{digits}f}{unit}"


def significant(value: float, digits: int = 3) -> str:
    """Format a number with significant digits; a dash if there is none."""
    return MISSING if math.isnan(value) else f"{value:.{digits}g}"
