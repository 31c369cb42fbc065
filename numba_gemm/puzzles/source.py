"""Rules about a kernel's source: it is finished, compiles for a GPU, and computes with 32-bit numbers."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

from ..simulator import patches
from .finding import Finding

__all__ = ["first_store", "syntax_tree", "unsuitable"]

# Names that only NumPy knows, not kernels; its types of numbers are known to both.
ARRAY_METHODS = {"T", "dot", "max", "mean", "min", "sum", "transpose"}
NUMBERS = re.compile(r"(u?int|float)\d+")
COLLECTIONS = (ast.Dict, ast.DictComp, ast.GeneratorExp, ast.List, ast.ListComp, ast.Set, ast.SetComp)


def syntax_tree(kernel: Any) -> ast.Module | None:
    """Return the syntax tree of a kernel with the lines of its file; None without a source."""
    try:
        lines, first = inspect.getsourcelines(patches.python_function(kernel))
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError):
        return None
    ast.increment_lineno(tree, first - 1)
    return tree


def first_store(kernel: Any, array: str) -> int:
    """Return the first line that stores to an array; 0 if there is none."""
    tree = syntax_tree(kernel)
    found = [
        node.lineno
        for node in ast.walk(tree or ast.Module([], []))
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == array
    ]
    return min(found, default=0)


def _is_gap(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is Ellipsis


def _is_not_compiled(node: ast.AST) -> bool:
    """Return True for what the simulator runs and the compiler refuses: operations on rows and arrays, collections."""
    if isinstance(node, ast.Attribute):
        owner = ast.unparse(node.value)
        if owner in ("np", "numpy"):
            return not NUMBERS.fullmatch(node.attr)
        return node.attr in ARRAY_METHODS and not owner.startswith("cuda.")  # such as cuda.atomic.max
    return isinstance(node, (ast.MatMult, ast.Slice, *COLLECTIONS))


def _has_computed_extents(node: ast.AST) -> bool:
    """Return True for a shared or local array with a sum or product as an extent, which the compiler refuses."""
    if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith(("shared.array", "local.array")):
        return False
    return any(isinstance(part, ast.BinOp) for extents in node.args[:1] for part in ast.walk(extents))


def _combines_inside_a_comparison(node: ast.AST) -> bool:
    """Return True for ``row < m & col < n``, which means ``row < (m & col) < n``."""
    if not isinstance(node, ast.Compare):
        return False
    return any(
        isinstance(part, ast.BinOp) and isinstance(part.op, ast.BitAnd | ast.BitOr) for part in node.comparators[:-1]
    )


def _is_float64(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, float)


RULES: tuple[tuple[Callable[[ast.AST], bool], str, str], ...] = (
    (_is_gap, "unfinished", "your code is missing here, in place of `...`"),
    (
        _is_not_compiled,
        "error",
        "a kernel computes with single elements: no slices, no lists, no operations on rows or arrays",
    ),
    (
        _has_computed_extents,
        "error",
        "the extents of a shared or local array are numbers or constants of the file, and not computed here",
    ),
    (
        _combines_inside_a_comparison,
        "error",
        "`&` and `|` bind more tightly than `<`: combine conditions by `and` and `or`",
    ),
    (
        _is_float64,
        "error",
        "a number with a decimal point is a float64, and makes the computation one, which is slow on a GPU: write "
        "float32(...) around it",
    ),
)


def unsuitable(kernel: Any, parameters: tuple[str, ...], own: tuple[str, ...]) -> Finding | None:
    """Return a finding if a kernel is unfinished, has other parameters, or would not compile to float32 arithmetic.

    Parameters
    ----------
    kernel : kernel
        Made by ``cuda.jit`` in the simulator, or a Python function.
    parameters, own : tuple of str
        The parameters that it should have, and those that it has.
    """
    code = patches.python_function(kernel).__code__
    if own != parameters:
        asked, got = (", ".join(names) for names in (parameters, own))
        text = f"the kernel's parameters are ({got}), expected ({asked})"
        return Finding("unfinished", text, code.co_filename, code.co_firstlineno)
    tree = syntax_tree(kernel)
    if tree is None:
        return None
    for statement in (node for node in ast.walk(tree) if isinstance(node, ast.stmt)):
        for node in ast.iter_child_nodes(statement):
            if isinstance(node, ast.stmt):
                continue
            parts = _without_float32(node)
            for breaks, kind, text in RULES:
                if any(map(breaks, parts)):
                    return Finding(kind, text, code.co_filename, statement.lineno)
    return _integer_sum(tree, code.co_filename)


def _without_float32(node: ast.AST) -> list[ast.AST]:
    """Return a node and all nodes below it, except arguments of ``float32(...)``."""
    found = [node]
    if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("float32")):
        for child in ast.iter_child_nodes(node):
            found += _without_float32(child)
    return found


def _integer_sum(tree: ast.Module, file: str) -> Finding | None:
    """Return a finding if a sum of elements begins as an integer, which makes it a float64."""
    begun = {
        node.targets[0].id: node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        if isinstance(node.value, ast.Constant) and type(node.value.value) is int
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.AugAssign) or not isinstance(node.target, ast.Name) or node.target.id not in begun:
            continue
        elements = (part for part in ast.walk(node.value) if isinstance(part, ast.Subscript))
        if any(isinstance(part.value, ast.Name) for part in elements):
            text = (
                f"{node.target.id} begins as an integer, and its sum with a float32 is a float64, which is slow on a "
                "GPU: write float32(0)"
            )
            return Finding("error", text, file, begun[node.target.id])
    return None
