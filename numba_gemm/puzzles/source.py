"""Rules about a kernel's source: it is finished, accesses single elements, and computes with 32-bit numbers."""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

from ..simulator import patches
from .finding import Finding
from .values import (
    NUMBERS,
    array_shape,
    assigned,
    integer_sum,
    is_call_of,
    is_constant,
    local_constants,
    outer_names,
)

__all__ = ["first_store", "syntax_tree", "unsuitable"]

# Names that only NumPy knows, not kernels; its types of numbers are known to both.
ARRAY_METHODS = {"T", "dot", "max", "mean", "min", "sum", "transpose"}
EXTENTS = {"dtype", "itemsize", "ndim", "shape", "size", "strides"}  # attributes of an array that access no element
FLOAT64 = {"double", "float64", "float_"}  # types of Numba and NumPy
NUMBER_NODES = (ast.Constant, ast.UnaryOp, ast.BinOp, ast.unaryop, ast.operator)
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


def _is_no_element(node: ast.AST) -> bool:
    """Return True for operations on rows and arrays, whose accesses the tracer does not count, and for collections."""
    if isinstance(node, ast.Attribute):
        owner = ast.unparse(node.value)
        if owner in ("np", "numpy"):
            return not NUMBERS.fullmatch(node.attr)
        return node.attr in ARRAY_METHODS and not owner.startswith("cuda.")  # such as cuda.atomic.max
    return isinstance(node, (ast.MatMult, ast.Slice, *COLLECTIONS))


def _combines_inside_a_comparison(node: ast.AST) -> bool:
    """Return True for ``row < m & col < n``, which means ``row < (m & col) < n``."""
    if not isinstance(node, ast.Compare):
        return False
    return any(
        isinstance(part, ast.BinOp) and isinstance(part.op, ast.BitAnd | ast.BitOr) for part in node.comparators[:-1]
    )


def _is_float64(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, float)


def _names_float64(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in FLOAT64
    return isinstance(node, ast.Name) and node.id in ("float", "float64")


RULES: tuple[tuple[Callable[[ast.AST], bool], str, str], ...] = (
    (_is_gap, "unfinished", "your code is missing here, in place of `...`"),
    (
        _is_no_element,
        "error",
        "a kernel computes with single elements, so that each access is counted: no slices, no lists, no operations on "
        "rows or arrays",
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
    (_names_float64, "error", "a float64 makes the computation one of 64 bits, which is slow on a GPU: use float32"),
)


def unsuitable(
    kernel: Any, parameters: tuple[str, ...], own: tuple[str, ...], dimensions: Mapping[str, int]
) -> Finding | None:
    """Return a finding if a kernel is unfinished, has other parameters, or breaks a rule about its source.

    Parameters
    ----------
    kernel : kernel
        Made by ``cuda.jit`` in the simulator, or a Python function.
    parameters, own : tuple of str
        The parameters that it should have, and those that it has.
    dimensions : dict from str to int
        Number of dimensions of its arrays, by parameter.
    """
    code = patches.python_function(kernel).__code__
    if own != parameters:
        asked, got = (", ".join(names) for names in (parameters, own))
        text = f"the kernel's parameters are ({got}), expected ({asked})"
        return Finding("unfinished", text, code.co_filename, code.co_firstlineno)
    for function, tree in _functions(patches.python_function(kernel)):
        finding = _broken_rule(function, tree, parameters, dimensions)
        if finding is None and function.__code__ is code:
            finding = _no_element(function, tree, dimensions) or _returned_value(function, tree)
        if finding is not None:
            return finding
    return None


def _functions(kernel: Callable[..., Any]) -> Iterator[tuple[Callable[..., Any], ast.Module]]:
    """Yield a kernel and the functions of its module that it calls, each with its syntax tree."""
    pending, seen = [kernel], {kernel}
    while pending:
        function = pending.pop(0)
        tree = syntax_tree(function)
        if tree is None:
            continue
        yield function, tree
        outer = outer_names(function)
        for node in ast.walk(tree):
            called = outer.get(node.id) if isinstance(node, ast.Name) else None
            called = getattr(called, "py_func", called)
            if isinstance(called, FunctionType) and called.__globals__ is kernel.__globals__ and called not in seen:
                pending.append(called)
                seen.add(called)


def _broken_rule(
    function: Callable[..., Any], tree: ast.Module, parameters: tuple[str, ...], dimensions: Mapping[str, int]
) -> Finding | None:
    """Return a finding if a function breaks a rule that holds for kernels and for the functions that they call."""
    file = function.__code__.co_filename
    constants = local_constants(tree, outer_names(function))
    converted = _converted(tree)
    for statement in (node for node in ast.walk(tree) if isinstance(node, ast.stmt)):
        for node in ast.iter_child_nodes(statement):
            if isinstance(node, ast.stmt):
                continue
            parts = [part for part in ast.walk(node) if part not in converted]
            for breaks, kind, text in RULES:
                if any(map(breaks, parts)):
                    return Finding(kind, text, file, statement.lineno)
            shapes = (shape for shape in map(array_shape, parts) if shape is not None)
            if not all(is_constant(shape, constants) for shape in shapes):
                text = (
                    "the extents of a shared or local array are numbers or constants of the file, and not computed here"
                )
                return Finding("error", text, file, statement.lineno)
    begun = integer_sum(tree, constants, set(parameters) - set(dimensions))
    if begun is None:
        return None
    name, line = begun
    text = (
        f"{name} begins as an integer, and its sum with a float32 is a float64, which is slow on a GPU: "
        "write float32(0)"
    )
    return Finding("error", text, file, line)


def _converted(tree: ast.Module) -> set[ast.AST]:
    """Return the numbers in ``float32(...)``, with their signs and operations on them."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("float32"):
            for argument in node.args:
                parts = list(ast.walk(argument))
                if all(isinstance(part, NUMBER_NODES) and not _is_gap(part) for part in parts):
                    found.update(parts)
    return found


def _returned_value(function: Callable[..., Any], tree: ast.Module) -> Finding | None:
    """Return a finding if a kernel returns a value, which the compiler refuses."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    others = {part for inner in functions[1:] for part in ast.walk(inner)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Return) and node not in others and ast.unparse(node) not in ("return", "return None"):
            text = "a kernel returns no value: its results are in its arrays"
            return Finding("error", text, function.__code__.co_filename, node.lineno)
    return None


def _no_element(function: Callable[..., Any], tree: ast.Module, dimensions: Mapping[str, int]) -> Finding | None:
    """Return a finding if an array is used as a whole, or with fewer indices than it has dimensions."""
    arrays = _arrays(tree, dimensions, outer_names(function))
    tuples = {name for name, value in assigned(tree) if _may_be_indices(value)}
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Name) or node.id not in arrays or not isinstance(node.ctx, ast.Load):
            continue
        used, ndim = parents[node], arrays[node.id]
        if isinstance(used, ast.Subscript) and used.value is node:
            indices = used.slice.elts if isinstance(used.slice, ast.Tuple) else [used.slice]
            index = indices[0] if len(indices) == 1 else None
            unknown = index and (_may_be_indices(index) or (isinstance(index, ast.Name) and index.id in tuples))
            if len(indices) >= ndim or unknown or is_call_of(parents[used], "len"):
                continue
        elif isinstance(used, ast.Attribute):
            if used.attr in EXTENTS:
                continue
        elif isinstance(used, ast.Assign) or (
            isinstance(used, (ast.IfExp, ast.Tuple)) and isinstance(parents[used], ast.Assign)
        ):
            continue  # another name, whose uses count too
        elif isinstance(used, ast.Compare) and all(isinstance(one, (ast.Is, ast.IsNot)) for one in used.ops):
            continue
        elif isinstance(used, (ast.Call, ast.keyword)):
            called = parents[used] if isinstance(used, ast.keyword) else used
            name = ast.unparse(called.func) if isinstance(called, ast.Call) else ""
            if name == "len" or not hasattr(builtins, name):  # such as load4(a, row, col)
                continue
        shown = node if isinstance(used, (ast.Call, ast.keyword)) or not isinstance(used, ast.expr) else used
        text = (
            f"a kernel computes with single elements, so that each access is counted: {node.id} has {ndim} "
            f"dimension{'s' * (ndim > 1)}, and `{ast.unparse(shown)}` is not one of its elements"
        )
        return Finding("error", text, function.__code__.co_filename, node.lineno)
    return None


def _may_be_indices(node: ast.expr) -> bool:
    """Return True for an expression that may be a tuple of indices: a tuple, or what an unknown function returns."""
    if isinstance(node, ast.IfExp):
        return _may_be_indices(node.body) or _may_be_indices(node.orelse)
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        if name == "cuda.grid":
            return bool(node.args) and ast.unparse(node.args[0]) != "1"
        return not hasattr(builtins, name) and not NUMBERS.fullmatch(name)
    return isinstance(node, (ast.Tuple, ast.Starred))


def _arrays(tree: ast.Module, dimensions: Mapping[str, int], constants: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of dimensions of parameters, shared and local arrays, by name, without ambiguous names."""
    found = {name: {ndim} for name, ndim in dimensions.items()}
    for name, value in assigned(tree):
        ndims = {0}  # unknown
        if isinstance(value, ast.IfExp):
            ndims = set().union(*(found.get(ast.unparse(one), {0}) for one in (value.body, value.orelse)))
        elif isinstance(value, ast.Name):
            ndims = found.get(value.id, ndims)
        elif (shape := array_shape(value)) is not None:
            if isinstance(shape, ast.Name):
                extents = constants.get(shape.id, ())
                ndims = {len(extents) if isinstance(extents, tuple) else 1}
            else:
                ndims = {len(shape.elts) if isinstance(shape, ast.Tuple) else 1}
        found[name] = found.get(name, set()) | ndims
    return {name: min(ndims) for name, ndims in found.items() if len(ndims) == 1 and min(ndims)}
