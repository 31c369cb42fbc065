"""What a function that is compiled into a kernel is made of: values that name it, in this process and the next, and a
copy of it that stays as it is.

Numba compiles what a function finds in globals and closures in as constants, when a kernel is compiled that needs them:
perhaps later, and perhaps never. Both halves here look at the same things, so that a name stands for what is compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from numba import cuda, types

from . import compiler

__all__ = ["Part", "fingerprint", "frozen"]

Part = None | bool | int | float | str | bytes | tuple["Part", ...]

# Whose contents the versions of packages tell, which are part of every kernel's key.
KNOWN = {"_operator", "builtins", "cmath", "llvmlite", "math", "numba", "numpy", "operator"}
MAX_ARRAY = 1 << 16  # bytes of an array that is compiled in


class _Untold(Exception):
    """Something that nothing tells from another of its kind."""


def fingerprint(function: Any) -> Part:
    """Return all that shapes what a function compiles to; None if that cannot be told.

    Bytecode, constants and names; values of its closure and of the globals that it names, as far as these are numbers,
    strings, None, small arrays and tuples of them; modules of Numba, NumPy or the standard library's mathematics and
    what is in them; other modules, of which what the function may name counts; or functions of the same kind.
    """
    try:
        return _value(function, frozenset(), ())
    except _Untold:
        return None


def _value(value: Any, names: frozenset[str], within: tuple[Any, ...]) -> Part:
    """What tells a value that a function of these names finds; `within` is what it was found in."""
    kind = type(value)
    if value is None or value is ... or kind in (bool, int, float, complex, str, bytes):
        return kind.__name__, repr(value)
    if kind is tuple:
        return "tuple", tuple(_value(part, names, within) for part in value)
    if kind is frozenset:
        return "frozenset", tuple(sorted(map(repr, (_value(part, names, within) for part in value))))
    if isinstance(value, CodeType):
        return _code(value, names, within)
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return "NumPy", repr(value.dtype), value.tobytes()  # dtype.str tells nothing of a structure but its size
    if kind is np.ndarray and value.dtype.kind in "biufc" and value.nbytes <= MAX_ARRAY:
        order = bool(value.flags.c_contiguous), bool(value.flags.f_contiguous)
        return "array", value.dtype.str, value.shape, order, value.tobytes()
    if isinstance(value, types.Type):
        return "Numba", str(value)
    for depth, outer in enumerate(within):
        if outer is value:
            return "itself", depth
    if isinstance(value, ModuleType):
        return _module(value, names, (*within, value))
    if (member := _member(value)) is not None:
        return member
    if isinstance(value, FunctionType):
        return _function(value, (*within, value))
    if (options := _options(value)) is not None:
        told = tuple((name, _value(option, names, within)) for name, option in sorted(options.items()) if option)
        return "device function", told, _value(value.py_func, names, (*within, value))
    raise _Untold


def _is_known(module: str) -> bool:
    return module.partition(".")[0] in KNOWN


def _member(value: Any) -> Part:
    """The name of what a known module has under that name; None for anything else, whatever it calls itself."""
    if not isinstance(value, type | BuiltinFunctionType | FunctionType | np.ufunc):
        return None
    module = getattr(value, "__module__", None) or ("numpy" if isinstance(value, np.ufunc) else "")
    name = getattr(value, "__qualname__", value.__name__)
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return ("member", module, name) if found is value and _is_known(module) else None


def _module(module: ModuleType, names: frozenset[str], within: tuple[Any, ...]) -> Part:
    if _is_known(module.__name__):
        return "module", module.__name__
    if "__getattr__" in vars(module):
        raise _Untold
    return "part of a module", tuple((name, _value(value, names, within)) for name, value in _found(module, names))


def _found(module: ModuleType, names: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """What a function of these names may find in a module."""
    return ((name, vars(module)[name]) for name in sorted(names) if name in vars(module))


def _options(value: Any) -> dict[str, Any] | None:
    """What `cuda.jit` was told of a function, if it made this of one, for whatever types come."""
    if not isinstance(getattr(value, "py_func", None), FunctionType) or not hasattr(value, "targetoptions"):
        return None
    # One that is made for certain types has been compiled, of what it found then.
    if "device" not in value.targetoptions or not compiler.takes_more_types(value):
        return None
    return dict(value.targetoptions)


def _function(function: FunctionType, within: tuple[Any, ...]) -> Part:
    code = function.__code__
    names = _names(code)
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    if len(cells) < len(code.co_freevars):
        raise _Untold
    return (
        "function",
        _code(code, names, within),
        _value(function.__defaults__, names, within),
        _value(tuple(sorted((function.__kwdefaults__ or {}).items())), names, within),
        tuple(_value(cell, names, within) for cell in cells),
        tuple((name, _value(value, names, within)) for name, value in _globals(function, names)),
    )


def _globals(function: FunctionType, names: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """The globals that a function may name."""
    space = function.__globals__
    return ((name, space[name]) for name in sorted(names) if name in space)


def _is_filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _code(code: CodeType, names: frozenset[str], within: tuple[Any, ...]) -> Part:
    return (
        "code",
        code.co_code,
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_kwonlyargcount,
        code.co_flags,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        getattr(code, "co_exceptiontable", b""),
        tuple(_value(constant, names, within) for constant in code.co_consts),
    )


def _names(code: CodeType) -> frozenset[str]:
    nested = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*nested)


def frozen(function: Any) -> Any:
    """Return a copy of a function that no change reaches of what `fingerprint` looks at."""
    return _copy(function, frozenset(), {})


def _copy(value: Any, names: frozenset[str], made: dict[Any, Any]) -> Any:
    """The same of a value that a function of these names finds; `made` holds the copies by the originals' identities.

    The originals outlive it, since the function that is copied holds them.
    """
    if type(value) is tuple:
        return tuple(_copy(part, names, made) for part in value)
    if type(value) is np.ndarray:
        return value.copy(order="K")
    if isinstance(value, np.void):  # a structured scalar is a view of its array
        return value.copy()
    if isinstance(value, ModuleType) and not _is_known(value.__name__) and "__getattr__" not in vars(value):
        twin, copied = made.setdefault(id(value), (ModuleType(value.__name__), set[str]()))
        for name, member in _found(value, names - copied):
            copied.add(name)
            vars(twin)[name] = _copy(member, names, made)
        return twin
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, FunctionType) and _member(value) is None:
        copy = made[id(value)] = _hollow(value)
        _fill(copy, value, made)
        return copy
    if (options := _options(value)) is not None:
        copy = made[id(value.py_func)] = _hollow(value.py_func)
        made[id(value)] = cuda.jit(copy, **options)  # before it is filled with what may name it
        _fill(copy, value.py_func, made)
        return made[id(value)]
    return value


def _hollow(function: FunctionType) -> FunctionType:
    """A copy of a function without what it finds outside."""
    space = {name: value for name, value in function.__globals__.items() if name.startswith("__")}
    cells = tuple(CellType() for _ in function.__closure__ or ())
    copy = FunctionType(function.__code__, space, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__, copy.__qualname__ = function.__kwdefaults__, function.__qualname__
    copy.__module__, copy.__doc__ = function.__module__, function.__doc__
    return copy


def _fill(copy: FunctionType, function: FunctionType, made: dict[Any, Any]) -> None:
    names = _names(function.__code__)
    copy.__globals__.update((name, _copy(value, names, made)) for name, value in _globals(function, names))
    for cell, original in zip(copy.__closure__ or (), function.__closure__ or ()):
        if _is_filled(original):
            cell.cell_contents = _copy(original.cell_contents, names, made)
