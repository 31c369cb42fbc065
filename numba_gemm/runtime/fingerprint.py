"""Content of a function that is compiled into a kernel: a fingerprint that is the same in every process, and a frozen
copy.

Numba compiles the values of globals and closures as constants, at the time when a kernel that needs them is compiled,
which may be later or never. Fingerprint and copy cover the same values, so that a fingerprint stands for what is
compiled.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from enum import Enum, EnumMeta
from functools import lru_cache
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from . import compiler

__all__ = ["Part", "fingerprint", "frozen"]

Part = None | bool | int | float | str | bytes | tuple["Part", ...]

# Modules whose contents depend only on the versions of packages, which are part of every kernel's key.
KNOWN = {"_operator", "builtins", "cmath", "llvmlite", "math", "numba", "numpy", "operator"}
MAX_ARRAY = 1 << 16  # bytes of an array that is compiled in


def is_numba_type(value: Any) -> bool:
    """Return True for a type of Numba; there is none in a process that has not imported Numba."""
    types = sys.modules.get("numba.core.types")
    return types is not None and isinstance(value, types.Type)


class _Untold(Exception):
    """Object that nothing distinguishes from another of its kind."""


def fingerprint(function: Any) -> Part:
    """Return all that shapes what a function compiles to; None if that is unknown.

    Bytecode, constants and names; values of its closure and of the globals that it names, as far as these are numbers,
    strings, None, small arrays, enumerations, and tuples of them, named or not; modules of Numba, NumPy or the standard
    library's mathematics and what is in them; other modules, of which what the function may name counts; or functions
    of the same kind.
    """
    try:
        return _value(function, frozenset(), ())
    except _Untold:
        return None


def is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and isinstance(getattr(value, "_fields", None), tuple) and hasattr(value, "_make")


def _value(value: Any, names: frozenset[str], within: tuple[tuple[Any, frozenset[str]], ...]) -> Part:
    """Return the fingerprint of a value that a function of these names uses.

    `within` are the objects around it, with the names that were looked up in each that is a module: another function
    may find other things in the same module.
    """
    kind = type(value)
    if value is None or value is ... or kind in (bool, int, float, complex, str, bytes):
        return kind.__name__, repr(value)
    if kind is tuple:
        return "tuple", tuple(_value(part, names, within) for part in value)
    if is_named_tuple(value):
        return "named tuple", kind.__qualname__, kind._fields, tuple(_value(part, names, within) for part in value)
    if kind is frozenset:
        return "frozenset", tuple(sorted(map(repr, (_value(part, names, within) for part in value))))
    if isinstance(value, CodeType):
        return _code(value, names, within)
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return "NumPy", repr(value.dtype), value.tobytes()  # dtype.str tells nothing of a structure but its size
    if kind is np.ndarray and value.dtype.kind in "biufc" and value.nbytes <= MAX_ARRAY:
        order = bool(value.flags.c_contiguous), bool(value.flags.f_contiguous)
        return "array", value.dtype.str, value.shape, order, value.tobytes()
    if is_numba_type(value):
        return "Numba", str(value)
    for depth, (outer, looked_up) in enumerate(within):
        if outer is value and (not isinstance(value, ModuleType) or names <= looked_up):
            return "itself", depth
    if isinstance(value, ModuleType):
        return _module(value, names, (*within, (value, names)))
    if (member := member_of_known(value)) is not None:
        return member
    if isinstance(value, EnumMeta):
        members: dict[str, Any] = dict(value.__members__)
        found = tuple((name, _value(one.value, names, within)) for name, one in members.items())
        return "enumeration", tuple(f"{one.__module__}.{one.__qualname__}" for one in value.__mro__), found
    if isinstance(value, Enum):
        return "member", _value(type(value), names, within), value.name, _value(value.value, names, within)
    if isinstance(value, FunctionType):
        return _function(value, (*within, (value, names)))
    if (options := options_of(value)) is not None:
        told = tuple((name, _value(option, names, within)) for name, option in sorted(options.items()) if option)
        return "device function", told, _value(value.py_func, names, (*within, (value, names)))
    raise _Untold


def is_known(module: str) -> bool:
    return module.partition(".")[0] in KNOWN


def member_of_known(value: Any) -> Part:
    """Return the name of a known module's member; None for anything else, whatever its `__name__`."""
    if not isinstance(value, type | BuiltinFunctionType | FunctionType | np.ufunc):
        return None
    module = getattr(value, "__module__", None) or ("numpy" if isinstance(value, np.ufunc) else "")
    name = getattr(value, "__qualname__", value.__name__)
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return ("member", module, name) if found is value and is_known(module) else None


def _module(module: ModuleType, names: frozenset[str], within: tuple[tuple[Any, frozenset[str]], ...]) -> Part:
    if is_known(module.__name__):
        return "module", module.__name__
    if "__getattr__" in vars(module):
        raise _Untold
    return "part of a module", tuple((name, _value(value, names, within)) for name, value in _found(module, names))


def _found(module: ModuleType, names: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Return the attributes of a module that a function of these names may use."""
    return ((name, vars(module)[name]) for name in sorted(names) if name in vars(module))


def options_of(value: Any) -> dict[str, Any] | None:
    """Return the options of a function of `cuda.jit` that is compiled for any types; None for anything else."""
    if not isinstance(getattr(value, "py_func", None), FunctionType) or not hasattr(value, "targetoptions"):
        return None
    # One that is made for certain types has been compiled, of what it found then.
    if "device" not in value.targetoptions or not compiler.takes_more_types(value):
        return None
    return dict(value.targetoptions)


def _function(function: FunctionType, within: tuple[tuple[Any, frozenset[str]], ...]) -> Part:
    code = function.__code__
    names = names_in(code)
    cells = [cell.cell_contents for cell in function.__closure__ or () if is_filled(cell)]
    if len(cells) < len(code.co_freevars):
        raise _Untold
    return (
        "function",
        _code(code, names, within),
        _value(function.__defaults__, names, within),
        _value(tuple(sorted((function.__kwdefaults__ or {}).items())), names, within),
        tuple(_value(cell, names, within) for cell in cells),
        tuple((name, _value(value, names, within)) for name, value in _globals(function)),
    )


def _globals(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Return the globals that a function names."""
    space = function.__globals__
    return ((name, space[name]) for name in global_names(function.__code__) if name in space)


def functions_of(function: FunctionType, seen: set[Any]) -> Iterator[FunctionType]:
    """Yield a function and those that it may call, without those of known modules, and add what it meets to `seen`."""
    seen.add(function)
    yield function
    names, values = names_in(function.__code__), [value for _, value in _globals(function)]
    values += [cell.cell_contents for cell in function.__closure__ or () if is_filled(cell)]
    for value in values:
        other = getattr(value, "py_func", value)
        if not isinstance(other, FunctionType | ModuleType) or other in seen:
            continue
        if isinstance(other, FunctionType) and member_of_known(other) is None:
            yield from functions_of(other, seen)
        elif isinstance(other, ModuleType) and not is_known(other.__name__):
            seen.add(other)
            values += [member for _, member in _found(other, names)]


@lru_cache(maxsize=1024)
def global_names(code: CodeType) -> tuple[str, ...]:
    """Names that code looks up in its globals, and not as attributes; sorted."""
    nested = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    loaded = {one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return tuple(sorted(loaded.union(*map(global_names, nested))))


def is_filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _code(code: CodeType, names: frozenset[str], within: tuple[tuple[Any, frozenset[str]], ...]) -> Part:
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


def names_in(code: CodeType) -> frozenset[str]:
    nested = (names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*nested)


def frozen(function: Any) -> Any:
    """Return a copy of a function that no change reaches of what `fingerprint` looks at."""
    return _copy(function, frozenset(), {})


def _copy(value: Any, names: frozenset[str], made: dict[Any, Any]) -> Any:
    """Copy a value that a function of these names finds; `made` holds the copies by the originals' identities.

    The originals outlive it, since the function that is copied holds them.
    """
    if type(value) is tuple:
        return tuple(_copy(part, names, made) for part in value)
    if is_named_tuple(value):
        return type(value)._make(_copy(part, names, made) for part in value)
    if type(value) is np.ndarray:
        return value.copy(order="K")
    if isinstance(value, np.void):  # a structured scalar is a view of its array
        return value.copy()
    if isinstance(value, ModuleType) and not is_known(value.__name__) and "__getattr__" not in vars(value):
        twin, looked_up = made.setdefault(id(value), (ModuleType(value.__name__), set[frozenset[str]]()))
        if names not in looked_up:
            looked_up.add(names)
            for name, member in _found(value, names):
                vars(twin)[name] = _copy(member, names, made)
        return twin
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, FunctionType) and member_of_known(value) is None:
        copy = made[id(value)] = _hollow(value)
        _fill_defaults(copy, value, made)
        _fill(copy, value, made)
        return copy
    if (options := options_of(value)) is not None:
        copy = made[id(value.py_func)] = _hollow(value.py_func)
        _fill_defaults(copy, value.py_func, made)  # before `cuda.jit`, which reads them
        from numba import cuda

        made[id(value)] = cuda.jit(copy, **options)  # before it is filled with what may name it
        _fill(copy, value.py_func, made)
        return made[id(value)]
    return value


def _hollow(function: FunctionType) -> FunctionType:
    """Copy a function without its globals and closure."""
    space = {name: value for name, value in function.__globals__.items() if name.startswith("__")}
    cells = tuple(CellType() for _ in function.__closure__ or ())
    copy = FunctionType(function.__code__, space, function.__name__, None, cells)
    copy.__qualname__, copy.__module__, copy.__doc__ = function.__qualname__, function.__module__, function.__doc__
    return copy


def _fill_defaults(copy: FunctionType, function: FunctionType, made: dict[Any, Any]) -> None:
    names, named = names_in(function.__code__), function.__kwdefaults__
    copy.__defaults__ = _copy(function.__defaults__, names, made)
    copy.__kwdefaults__ = None if named is None else {key: _copy(value, names, made) for key, value in named.items()}


def _fill(copy: FunctionType, function: FunctionType, made: dict[Any, Any]) -> None:
    names = names_in(function.__code__)
    copy.__globals__.update((name, _copy(value, names, made)) for name, value in _globals(function))
    for cell, original in zip(copy.__closure__ or (), function.__closure__ or ()):
        if is_filled(original):
            cell.cell_contents = _copy(original.cell_contents, names, made)
