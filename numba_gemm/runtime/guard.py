"""Guards: quick tests that functions which are compiled into kernels are still what `fingerprint` described."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, EnumMeta
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from .fingerprint import (
    fingerprint,
    global_names,
    is_filled,
    is_known,
    is_named_tuple,
    is_numba_type,
    member_of_known,
    names_in,
    options_of,
)

__all__ = ["Guard", "guard"]

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
        return not self.cells or all(is_filled(cell) and cell.cell_contents is value for cell, value in self.cells)

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
    names = names_in(function.__code__)
    if not walk.globals_of(function):
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
        self.modules: set[tuple[int, frozenset[str]]] = set()  # with the names that were looked up

    def globals_of(self, function: FunctionType) -> bool:
        code = function.__code__
        return self._all_in(function.__globals__, global_names(code), names_in(code))

    def _all_in(self, space: dict[str, Any], wanted: Iterable[str], names: frozenset[str]) -> bool:
        for name in wanted:
            value = space.get(name, _MISSING)
            self.found[id(space), name] = space, name, value
            if value is not _MISSING and not self.value(value, names):
                return False
        return True

    def value(self, value: Any, names: frozenset[str]) -> bool:
        """Visit a value that a function of these names finds; return True if no part of it can change unnoticed."""
        if _are_numbers(value) or is_numba_type(value) or member_of_known(value) is not None:
            return True
        if isinstance(value, Enum | EnumMeta) or (isinstance(value, np.generic) and not isinstance(value, np.void)):
            return True
        if type(value) is tuple or is_named_tuple(value):
            return all(self.value(part, names) for part in value)
        if isinstance(value, ModuleType):
            if is_known(value.__name__) or (id(value), names) in self.modules:
                return True
            self.modules.add((id(value), names))
            return self._all_in(vars(value), names, names)
        function = value if isinstance(value, FunctionType) else getattr(value, "py_func", None)
        if not isinstance(function, FunctionType) or (function is not value and options_of(value) is None):
            return False
        if id(function) in self.functions:
            return True
        self.functions[id(function)] = function, function.__code__, function.__defaults__, function.__kwdefaults__
        own = names_in(function.__code__)
        for cell in function.__closure__ or ():
            if not is_filled(cell) or not self.value(cell.cell_contents, own):
                return False
            self.cells.append((cell, cell.cell_contents))
        defaults = function.__defaults__ is None or self.value(function.__defaults__, own)
        return defaults and not function.__kwdefaults__ and self.globals_of(function)
