"""Values of the names in a kernel: constants, integers and floats, as Numba's compiler infers them."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

__all__ = [
    "NUMBERS",
    "array_shape",
    "assigned",
    "integer_sum",
    "is_call_of",
    "is_constant",
    "local_constants",
    "outer_names",
]

NUMBERS = re.compile(r"(\w+\.)?(bool|float|int|uint)(8|16|32|64|_)")  # types of Numba and NumPy
INTEGERS = re.compile(r"(\w+\.)?u?int(8|16|32|64)?|len|round")  # functions whose results are integers


def outer_names(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the globals and variables of closures that a function uses."""
    try:
        found = inspect.getclosurevars(function)
    except ValueError:  # a name of the closure that has no value yet
        return dict(function.__globals__)
    return {**found.globals, **found.nonlocals}


def is_call_of(node: ast.AST, name: str) -> bool:
    """Return True for a call of the function of this name."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) == name


def assigned(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield each name that is assigned to, and the value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and isinstance(node.target, ast.Name) and not is_call_of(node.iter, "range"):
            yield node.target.id, ast.Tuple([], ast.Load())  # each element, which may be a tuple
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Name):
                yield target.id, node.value
            elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(target.elts, node.value.elts, strict=False)
                yield from ((one.id, value) for one, value in pairs if isinstance(one, ast.Name))


# ---- extents of arrays


def array_shape(node: ast.AST | None) -> ast.expr | None:
    """Return the shape in a call that makes a shared or local array; None for other nodes."""
    if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith(("shared.array", "local.array")):
        return None
    return next(iter([*node.args[:1], *(key.value for key in node.keywords if key.arg == "shape")]), None)


def local_constants(tree: ast.AST, outer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names that are integers or tuples of integers for the compiler, and their values.

    These are names outside of the function, and local names that are assigned once, from such a constant.
    """
    stored = Counter(
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    own = {*stored, *(node.arg for node in ast.walk(tree) if isinstance(node, ast.arg))}
    found = {name: value for name, value in outer.items() if name not in own and _is_extents(value)}
    for node in sorted((node for node in ast.walk(tree) if isinstance(node, ast.Assign)), key=lambda node: node.lineno):
        if not is_constant(node.value, found):
            continue
        value = _constant(node.value, found)
        for target in node.targets:
            pairs: Iterable[tuple[ast.expr, Any]] = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, tuple):
                pairs = zip(target.elts, value, strict=False)
            found |= {one.id: part for one, part in pairs if isinstance(one, ast.Name) and stored[one.id] == 1}
    return found


def is_constant(node: ast.expr, constants: Mapping[str, Any]) -> bool:
    """Return True for an integer or a tuple of integers that the compiler knows without computing it."""
    return _is_extents(_constant(node, constants))


def _is_extents(value: Any) -> bool:
    return all(type(extent) is int for extent in value) if isinstance(value, tuple) else type(value) is int


def _constant(node: ast.expr, constants: Mapping[str, Any]) -> Any:
    """Return the value of a number, a name, a tuple, or an element of a tuple; None for other expressions."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return constants.get(node.id)
    if isinstance(node, ast.Tuple):
        return tuple(_constant(extent, constants) for extent in node.elts)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        whole, place = _constant(node.value, constants), node.slice.value
        if isinstance(whole, tuple) and type(place) is int and -len(whole) <= place < len(whole):
            return whole[place]
    return None


# ---- sums


def integer_sum(tree: ast.AST, constants: Mapping[str, Any], scalars: Iterable[str]) -> tuple[str, int] | None:
    """Return the name and the first line of a sum of floats that begins as an integer; None if there is none.

    Parameters
    ----------
    tree : AST
        The function.
    constants : dict from str to int or tuple
        Result of `local_constants`.
    scalars : iterable of str
        Parameters that are floats.
    """
    begun: dict[str, list[ast.expr]] = defaultdict(list)
    added: dict[str, list[ast.expr]] = defaultdict(list)
    for name, value in assigned(tree):
        own = any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(value))
        (added if own else begun)[name].append(value)
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            added[node.target.id].append(node.value)
    indices = {*constants, *(name for name, value in assigned(tree) if _has_integers(value))}
    floats, before = set(scalars), -1
    while before < len(floats):
        before = len(floats)
        for values in (begun, added):
            floats |= {name for name in values if any(_is_float(one, floats, indices) for one in values[name])}
    for name, firsts in begun.items():
        if name in added and name in floats and all(_is_integer(value, constants) for value in firsts):
            return name, firsts[0].lineno
    return None


def _has_integers(node: ast.expr) -> bool:
    """Return True for a tuple, the shape of an array, and an array of integers."""
    if array_shape(node) is not None:
        return not re.search(r"\bfloat", ast.unparse(node))
    return isinstance(node, ast.Tuple) or ast.unparse(node).endswith((".shape", ".strides"))


def _is_integer(node: ast.expr, constants: Mapping[str, Any]) -> bool:
    if isinstance(node, ast.Call):
        return bool(INTEGERS.fullmatch(ast.unparse(node.func)))
    return type(_constant(node, constants)) is int


def _is_float(node: ast.expr, floats: set[str], indices: set[str]) -> bool:
    """Return True for an expression of elements of arrays or of names of floats, except integers made of them."""

    def any_of(*parts: ast.expr) -> bool:
        return any(_is_float(part, floats, indices) for part in parts)

    match node:
        case ast.Name():
            return node.id in floats
        case ast.Subscript(value=ast.Name(id=name)):
            return name not in indices
        case ast.BinOp():
            return any_of(node.left, node.right)
        case ast.UnaryOp():
            return any_of(node.operand)
        case ast.IfExp():
            return any_of(node.body, node.orelse)
        case ast.Call():
            name = ast.unparse(node.func)
            return name.endswith("float32") or (not INTEGERS.fullmatch(name) and any_of(*node.args))
    return False
