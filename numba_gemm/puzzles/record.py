"""A puzzle: statement, skeleton, solution, hints, cases and limits, read from a file in ``tasks/``."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..simulator import patches
from . import PUZZLES

__all__ = ["LIMITS", "Case", "Puzzle", "parameters_of", "puzzle"]

# What a kernel's use of is limited, by the names in `Puzzle.limits`.
LIMITS = {
    "global_floats": "floats read from global memory",
    "register_floats": "floats read into registers from global memory",
    "written_floats": "floats written to global memory",
    "requests": "instructions of warps that access global memory",
    "sectors": "sectors moved from and to global memory",
    "shared_floats": "floats read from shared memory",
    "wavefronts": "wavefronts of shared memory",
    "barriers": "barriers per block",
}

Case = Mapping[str, float]
WIDTH = 88
BEGIN, END, GIVEN = "# begin", "# end", "#:"  # of a part to write, and of lines that a skeleton has in its place


@dataclasses.dataclass(frozen=True, kw_only=True)
class Puzzle:
    """A kernel to write.

    Formulas are Python expressions of the extents in a case and of the constants in the puzzle's file.

    Attributes
    ----------
    name : str
        Name of the puzzle, of its kernel and of its file.
    idea : str
        The subject, in a few words.
    shapes : dict from str to str
        Formulas of the extents of the kernel's arrays, by parameter. The last array is the output.
    grid, block : str
        Formulas of the extents of the launch, in the order x, y, z.
    cases : tuple of dict from str to number
        Extents and scalar arguments for which a kernel is checked.
    limits : dict from str to str
        Formulas of what the kernel may use, by the names in `LIMITS`.
    expected : callable
        Takes the kernel's arguments before the launch, and returns the output.
    owner : callable or None
        Takes the row and column of an element of the output, and returns the thread of a block that must write it, by
        its position in the block.
    hints : tuple of str
        Hints, from vague to specific.
    source : str
        Text of the puzzle's file.
    kernel : kernel
        The solution.
    """

    idea: str
    shapes: Mapping[str, str]
    grid: str
    block: str
    cases: tuple[Case, ...]
    limits: Mapping[str, str]
    expected: Callable[..., Any]
    hints: tuple[str, ...]
    owner: Callable[[int, int], int] | None = None
    name: str = ""
    source: str = ""
    kernel: Any = None

    # ---- texts

    @property
    def title(self) -> str:
        """The first sentence of the statement."""
        return self._docstring().partition("\n")[0]

    @property
    def statement(self) -> str:
        """The task, the kernel's arrays and launch, and the limits."""
        arrays = ", ".join(f"{name} ({extents})" for name, extents in self.shapes.items())
        order = ", x first" if "," in self.block else ""
        facts = [
            f"Arrays: {arrays}.",
            f"Launch: grid ({self.grid}), blocks of ({self.block}) threads{order}.",
            "Limits:",
        ]
        facts += [f"- {LIMITS[name]}: at most {formula}" for name, formula in self.limits.items()]
        return _wrapped(self._docstring()) + "\n\n" + "\n".join(facts)

    @property
    def skeleton(self) -> str:
        """File that the reader completes."""
        return self._file(solved=False)

    @property
    def solution(self) -> str:
        """Completed file."""
        return self._file(solved=True)

    def __repr__(self) -> str:
        return f"{self.name}, puzzle {PUZZLES.index(self.name) + 1} of {len(PUZZLES)}\n\n{self.skeleton}"

    def _docstring(self) -> str:
        return ast.get_docstring(ast.parse(self.source)) or ""

    def _file(self, solved: bool) -> str:
        """Return the text of the puzzle's file up to the kernel's end, for readers."""
        tree = ast.parse(self.source)
        lines = self.source.splitlines()
        first = tree.body[0].end_lineno or 0
        last = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == self.name)
        text: list[str] = []
        part: list[str] | None = None  # lines of the part to write
        task = ""
        for line in lines[first : last.end_lineno] + [END] * lines[last.end_lineno or 0].strip().startswith(END):
            bare = line.strip()
            if bare.startswith(BEGIN):
                part, task = [], bare.removeprefix(BEGIN)
            elif bare == END:
                text += _part(part or [], task, solved)
                part = None
            elif part is not None:
                part.append(line)
            elif not line.startswith("from ..record"):
                text.append(re.sub(r"^from \.\.\.", "from numba_gemm.", line))
        code = re.sub(r"\n{3,}(?!@|def )", "\n\n", "\n".join(text))
        return f'"""{self.statement}\n"""\n{code.rstrip()}\n'

    # ---- cases

    def value(self, formula: str, case: Case) -> Any:
        """Return the value of a formula for a case."""
        constants = {name: value for name, value in vars(self._module()).items() if isinstance(value, int)}
        return eval(formula, {"__builtins__": {}, "ceil": math.ceil, **constants, **case})

    def extents(self, formula: str, case: Case) -> tuple[int, ...]:
        """Return the value of a formula of extents, as integers."""
        found = self.value(formula, case)
        return tuple(int(extent) for extent in (found if isinstance(found, tuple) else (found,)))

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the kernel's parameters."""
        return parameters_of(self.kernel)

    @property
    def dimensions(self) -> dict[str, int]:
        """Number of dimensions of the kernel's arrays, by parameter."""
        return {name: extents.count(",") + 1 for name, extents in self.shapes.items()}

    @property
    def output(self) -> str:
        """Parameter that the kernel writes to."""
        return list(self.shapes)[-1]

    def arguments(self, case: Case) -> dict[str, Any]:
        """Return the kernel's arguments for a case: small multiples of 1/4, whose products and sums are exact.

        They are no integers, so that a kernel that converts them to integers is wrong. The output holds NaN, unless the
        case has a beta other than 0.
        """
        random = np.random.default_rng(0)
        made: dict[str, Any] = {}
        for name in self.parameters:
            if name not in self.shapes:
                made[name] = np.float32(case[name])
                continue
            values = random.integers(-9, 10, self.extents(self.shapes[name], case)).astype(np.float32) / 4
            made[name] = values if name != self.output or case.get("beta") else np.full_like(values, np.nan)
        return made

    def _module(self) -> Any:
        return importlib.import_module(f".tasks.{self.name}", __package__)


def _wrapped(text: str) -> str:
    """Return paragraphs and items in lines of a terminal's width; indented blocks, which are code, as they are."""
    blocks = []
    for block in text.strip().split("\n\n"):
        if block.startswith("    "):
            blocks.append(block)
            continue
        items = re.split(r"\n(?=- )", block)
        items = [" ".join(item.split()) for item in re.split(r"\n(?=- )", block)]
        blocks.append(
            "\n".join(textwrap.fill(item, WIDTH, subsequent_indent="  " * (item[0] == "-")) for item in items)
        )
    return "\n\n".join(blocks)


def _part(lines: list[str], task: str, solved: bool) -> list[str]:
    """Return the lines of a part to write, or what a skeleton has in their place; the task is ``: text`` or empty."""
    given = [line for line in lines if line.strip().startswith(GIVEN)]
    code = [line for line in lines if line not in given]
    if solved:
        return code
    margin = code[0][: len(code[0]) - len(code[0].lstrip())]
    if given:
        texts = [line.strip().removeprefix(GIVEN).removeprefix(" ") for line in given]
        return [f"{margin}{text}" for text in texts if text]
    return [f"{margin}...  # your code, about {len(code)} lines{task}"]


def parameters_of(kernel: Any) -> tuple[str, ...]:
    """Return the names of a kernel's parameters."""
    return tuple(inspect.signature(patches.python_function(kernel)).parameters)


def puzzle(name: str) -> Puzzle:
    """Return a puzzle, whose `repr` is its statement and skeleton.

    Parameters
    ----------
    name : str
        One of `PUZZLES`.

    Raises
    ------
    ValueError
        for another name.

    Examples
    --------
    >>> from numba_gemm.puzzles import puzzle
    >>> puzzle("shared_tile").title
    'Multiply matrices by tiles that a block shares.'
    """
    if name not in PUZZLES:
        raise ValueError(f"unknown puzzle {name!r}; the puzzles are {', '.join(PUZZLES)}")
    module = importlib.import_module(f".tasks.{name}", __package__)
    found: Puzzle = module.PUZZLE
    return dataclasses.replace(found, name=name, source=inspect.getsource(module), kernel=getattr(module, name))
