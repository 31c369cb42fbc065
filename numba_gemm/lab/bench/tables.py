"""Tables of text as markdown or on a terminal."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

MISSING = "–"

Row = Mapping[str, Any]


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
        return "\n".join([*lines, *map(line, self.rows)])

    def plain(self, width: int) -> str:
        """Return the table for a terminal; columns beyond its width follow below, after the first column again."""
        if not self.rows:
            return ""
        names, cells = [row[0] for row in self.rows], [row[1:] for row in self.rows]
        return pd.DataFrame(cells, names, pd.Index(self.headers[1:], name=self.headers[0])).to_string(line_width=width)


@dataclass(frozen=True)
class Column:
    """A column of a table: its header, and the text of a row's cell."""

    header: str
    cell: Callable[[Row], str]
    left: bool = False


def table(title: str, rows: Iterable[Row], *columns: Column) -> Table:
    """Return a table with one line per row."""
    lines = [[column.cell(row) for column in columns] for row in rows]
    return Table(title, [column.header for column in columns], lines, [one.header for one in columns if one.left])


def text(name: str, header: str = "") -> Column:
    """Return a left-aligned column of text."""
    return Column(header or name, lambda row: str(row[name]), left=True)


def figure(header: str, name: str, show: Callable[..., str], *options: Any) -> Column:
    """Return a column of numbers, formatted by a function with these options."""
    return Column(header, lambda row: show(row[name], *options))


SHAPE, STAGE = text("shape", "M x N x K"), text("stage")


def line(cells: Iterable[str]) -> str:
    """Format one row of a markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def number(value: float, digits: int = 1, unit: str = "") -> str:
    """Format a number with fixed decimals and thousands separators; a dash if there is none."""
    return MISSING if math.isnan(value) else f"{value:,.{digits}f}{unit}"


def significant(value: float, digits: int = 3) -> str:
    """Format a number with significant digits; a dash if there is none."""
    return MISSING if math.isnan(value) else f"{value:.{digits}g}"


def speed(gflops: float) -> str:
    """Format GFLOP/s as an integer, or with three digits for small values."""
    return number(gflops, 0) if gflops >= 100 else significant(gflops)
