"""Content of a function that is compiled into a kernel: a fingerprint that is the same in every process, and a frozen
copy.

Numba compiles the values of globals and closures as constants, at the time when a kernel that needs them is compiled,
which may be later or never. Fingerprint and copy cover the same values, so that a fingerprint stands for what is
compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from . import compiler

__all__ = ["Guard", "Part", "fingerprint", "frozen", "guard"]

Part = None | bool | int | float | str | bytes | tuple["Part", ...]

# Modules whose contents depend only on the versions of packages, which are part of every kernel's key.
KNOWN = {"_operator", "builtins", "cmath", "llvmlite", "math", "numba", "numpy", "operator"}
MAX_ARRAY = 1 << 16  # bytes of an array that is compiled in


def _is_numba_type(value: Any) -> bool:
    """Return True for a type of Numba; there is none in a process that has not imported Numba."""
    types = sys.modules.get("numba.core.types")
    return types is not None and isinstance(value, types.Type)


class _Untold(Exception):
    """Object that nothing distinguishes from another of its kind."""


def fingerprint(function: Any) -> Part:
    """Return all that shapes what a function compiles to; None if that is unknown.

    Bytecode, constants and names; values of its closure and of the globals that it names, as far as these are numbers,
    strings, None, small arrays and tuples of them; modules of Numba, NumPy or the standard library's mathematics and
    what is in them; other modules, of which what the function may name counts; or functions of the same kind.
    """
    try:
        return _value(function, frozenset(), ())
    except _Untold:
        return None


def _value(value: Any, names: frozenset[str], within: tuple[Any, ...]) -> Part:
    """Return the fingerprint of a value that a function of these names uses; `within` are the objects around it."""
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
    if _is_numba_type(value):
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
    """Return the name of a known module's member; None for anything else, whatever its `__name__`."""
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
    """Return the attributes of a module that a function of these names may use."""
    return ((name, vars(module)[name]) for name in sorted(names) if name in vars(module))


def _options(value: Any) -> dict[str, Any] | None:
    """Return the options of a function of `cuda.jit` that is compiled for any types; None for anything else."""
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
    """Return the globals that a function may name."""
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
    """Copy a value that a function of these names finds; `made` holds the copies by the originals' identities.

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
        _fill_defaults(copy, value, made)
        _fill(copy, value, made)
        return copy
    if (options := _options(value)) is not None:
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
    names, named = _names(function.__code__), function.__kwdefaults__
    copy.__defaults__ = _copy(function.__defaults__, names, made)
    copy.__kwdefaults__ = None if named is None else {key: _copy(value, names, made) for key, value in named.items()}


def _fill(copy: FunctionType, function: FunctionType, made: dict[Any, Any]) -> None:
    names = _names(function.__code__)
    copy.__globals__.update((name, _copy(value, names, made)) for name, value in _globals(function, names))
    for cell, original in zip(copy.__closure__ or (), function.__closure__ or ()):
        if _is_filled(original):
            cell.cell_contents = _copy(original.cell_contents, names, made)


# -------------------------------------------------------------------------------------------------------------- guards

_MISSING = object()
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Guard:
    """Quick test that what a function finds outside is still the same, for functions whose content is known.

    Attributes
    ----------
    epilogue : object
        The function, or what `cuda.jit` made of it.
    code : code
        Its code.
    space : dict
        Its globals.
    found : tuple of (dict, str, object)
        Names in globals of functions and in modules, and the objects found there.
    functions : tuple of (function, code, defaults, keyword defaults)
        Other functions that it calls.
    cells : tuple of (cell, object)
        Closures of these other functions.
    own_cells : tuple
        Contents of the function's own closure, with None for numbers, which may differ.
    varies : bool
        True if there are such numbers.
    """

    epilogue: Any
    code: CodeType
    space: dict[str, Any]
    found: tuple[tuple[dict[str, Any], str, Any], ...]
    functions: tuple[tuple[FunctionType, CodeType, Any, Any], ...]
    cells: tuple[tuple[CellType, Any], ...]
    own_cells: tuple[Any, ...]
    varies: bool

    def function_is(self, epilogue: Any, function: FunctionType) -> bool:
        """Return True if a function has this code and these globals; one of `cuda.jit` must be the same object."""
        if function.__code__ is not self.code or function.__globals__ is not self.space:
            return False
        if self.own_cells:
            try:
                for cell, known in zip(function.__closure__ or (), self.own_cells):
                    if known is not None and cell.cell_contents is not known:
                        return False
            except ValueError:  # an empty cell
                return False
        return epilogue is self.epilogue or (epilogue is function and type(self.epilogue) is FunctionType)

    def holds(self) -> bool:
        """Return True if everything that was found is still there."""
        for space, name, value in self.found:
            if space.get(name, _MISSING) is not value:
                return False
        for function, code, defaults, named in self.functions:
            if function.__code__ is not code or function.__defaults__ is not defaults:
                return False
            if function.__kwdefaults__ is not named:
                return False
        return not self.cells or all(_is_filled(cell) and cell.cell_contents is value for cell, value in self.cells)

    def identity(self, function: FunctionType) -> tuple[Any, ...] | None:
        """Return this guard with the function's own numbers; None if it has something else."""
        values: Any = function.__defaults__
        if self.varies:
            try:
                own = zip(function.__closure__ or (), self.own_cells)
                values = values, tuple([cell.cell_contents for cell, known in own if known is None])
            except ValueError:  # an empty cell
                return None
        if values is None:
            return (self,)
        return (self, repr(values)) if function.__kwdefaults__ is None and _are_numbers(values) else None


def _are_numbers(value: Any) -> bool:
    """Return True if a value is a number, string or None, or a tuple of these, which its representation describes."""
    return all(map(_are_numbers, value)) if type(value) is tuple else type(value) in _NUMBERS


def guard(epilogue: Any) -> Guard | None:
    """Return a guard for a function, or for what `cuda.jit` made of one; None if its content is not guarded.

    Not guarded are functions whose content `fingerprint` cannot tell, and those that find something that can change in
    place, such as an array.
    """
    if fingerprint(epilogue) is None:
        return None
    function = getattr(epilogue, "py_func", epilogue)
    walk = _Walk()
    names = _names(function.__code__)
    if not walk.globals_of(function, names):
        return None
    contents = [cell.cell_contents for cell in function.__closure__ or ()]  # filled: they were described
    own_cells = tuple(None if _are_numbers(value) else value for value in contents)
    if not all(value is None or walk.value(value, names) for value in own_cells):
        return None
    return Guard(
        epilogue,
        function.__code__,
        function.__globals__,
        tuple(walk.found.values()),
        tuple(walk.functions.values()),
        tuple(walk.cells),
        own_cells,
        any(value is None for value in own_cells),
    )


class _Walk:
    """Visit everything that `fingerprint` describes, and note where each object was found."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        self.functions: dict[int, tuple[FunctionType, CodeType, Any, Any]] = {}
        self.cells: list[tuple[CellType, Any]] = []

    def globals_of(self, function: FunctionType, names: frozenset[str]) -> bool:
        return self._names_in(function.__globals__, names)

    def _names_in(self, space: dict[str, Any], names: frozenset[str]) -> bool:
        for name in names:
            if (id(space), name) not in self.found:
                value = space.get(name, _MISSING)
                self.found[id(space), name] = space, name, value
                if value is not _MISSING and not self.value(value, names):
                    return False
        return True

    def value(self, value: Any, names: frozenset[str]) -> bool:
        """Visit a value; return True if neither it nor anything it refers to can change unnoticed."""
        if _are_numbers(value) or _is_numba_type(value) or _member(value) is not None:
            return True
        if isinstance(value, np.generic) and not isinstance(value, np.void):
            return True
        if type(value) is tuple:
            return all(self.value(part, names) for part in value)
        if isinstance(value, ModuleType):
            return _is_known(value.__name__) or self._names_in(vars(value), names)
        function = value if isinstance(value, FunctionType) else getattr(value, "py_func", None)
        if not isinstance(function, FunctionType) or (function is not value and _options(value) is None):
            return False
        if id(function) in self.functions:
            return True
        self.functions[id(function)] = function, function.__code__, function.__defaults__, function.__kwdefaults__
        for cell in function.__closure__ or ():
            if not _is_filled(cell) or not self.value(cell.cell_contents, _names(function.__code__)):
                return False
            self.cells.append((cell, cell.cell_contents))
        defaults = function.__defaults__ is None or self.value(function.__defaults__, names)
        return defaults and not function.__kwdefaults__ and self.globals_of(function, _names(function.__code__))
