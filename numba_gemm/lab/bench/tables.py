"""A table of texts, drawn as markdown or on a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MISSING = "–"


@dataclass(frozen=True)
class Table:
    """Headers and rows of texts; columns named in ``left`` are aligned left, the others right."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[str] = ()

    def markdown(self) -> str:
        """The table in GitHub's markdown, without its title."""
        lines = [line(self.headers), line([":--" if header in self.left else "--:" for header in self.headers])]
        lines += [line(row) for row in self.rows]
        return "\n".join(lines)


def line(cells: Sequence[str]) -> str:
    """One row of a markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def number(value: float, digits: int = 1, unit: str = "") -> str:
    """A number with a fixed count of decimals and thousands separated, or a dash where there is none."""
    return MISSING if math.isnan(value) else f"{value:,.{digits}f}{unit}"


def significant(value: float, digits: int = 3) -> str:
    """A number with some significant digits, or a dash where there is none."""
    return MISSING if math.isnan(value) else f"{value:.{digits}g}"
