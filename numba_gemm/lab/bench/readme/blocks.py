"""Generated blocks of README and documentation: their names and their replacement."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from numba_gemm.lab.bench.readme.precision_tables import (
    precision_summary,
    precision_targets,
    precisions,
    special_values,
    tensor_ladder,
)
from numba_gemm.lab.bench.readme.published import ReadmeError
from numba_gemm.lab.bench.readme.tables import headline, ladder, streamed, targets

BLOCK = re.compile(
    r"(?P<begin><!-- results:begin (?P<name>\w+) -->\n)(?P<body>.*?)(?P<end><!-- results:end (?P=name) -->)", re.DOTALL
)

Generator = Callable[[pd.DataFrame, Mapping[str, Any], Path], str]
GENERATORS: dict[str, Generator] = {
    "headline": headline,
    "precision_summary": precision_summary,
    "ladder": ladder,
    "targets": targets,
    "precisions": precisions,
    "precision_targets": precision_targets,
    "tensor_ladder": tensor_ladder,
    "special_values": special_values,
    "streamed": streamed,
}


def generate(page: Path, frame: pd.DataFrame, environment: Mapping[str, Any], results: Path) -> str:
    """Return the text of a page with every block generated again.

    Raises
    ------
    ReadmeError
        if the results are incomplete, or if the page is missing, has no block, or has one with an unknown name.
    """
    if not page.is_file():
        raise ReadmeError(f"there is no {page}")
    text = page.read_text(encoding="utf-8")
    names = [match["name"] for match in BLOCK.finditer(text)]
    if not names:
        raise ReadmeError(f"{page} has no block between <!-- results:begin NAME --> and <!-- results:end NAME -->")
    if unknown := sorted(set(names) - set(GENERATORS)):
        raise ReadmeError(f"{page}: unknown block {', '.join(unknown)}: known are {', '.join(GENERATORS)}")

    def replaced(match: re.Match[str]) -> str:
        return f"{match['begin']}{GENERATORS[match['name']](frame, environment, results)}\n{match['end']}"

    return BLOCK.sub(replaced, text)
