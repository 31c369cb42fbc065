"""Device functions with the same content, compiled once: kernels of several stages and variants make them anew.

A stage's build function defines device functions for each configuration and variant, and most of them find the same
values in their closures as those of another variant.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

__all__ = ["KeptFunctions"]

NUMBERS = (bool, int, float, str, type(None))
MOST = 200  # functions that are kept, of about a megabyte each: those of some ten kernels


class _Unknown(Exception):
    """Object whose content may change, or is not there yet."""


class KeptFunctions:
    """Compiled device functions by their content; for the thread that holds Numba's compiler lock."""

    def __init__(self, is_own: Callable[[FunctionType], bool]) -> None:
        self._is_own = is_own
        self._count = itertools.count()
        self._numbers: dict[Any, int] = {}  # of contents, to which those of other functions refer
        self._objects: dict[int, Any] = {}  # that contents name by their identity, and which must stay alive
        self._compiled: dict[Any, Any] = {}

    def find(self, dispatcher: Any, args: tuple[Any, ...], compile_function: Callable[[], Any]) -> Any:
        """Return a device function compiled for arguments of some types, as another with the same content may be."""
        if args in dispatcher.overloads or not self._is_own(dispatcher.py_func):
            return compile_function()
        # Contents of functions that did not compile are numbered, too.
        if len(self._compiled) >= MOST or len(self._numbers) + len(self._objects) >= 10 * MOST:
            self._numbers.clear()
            self._objects.clear()
            self._compiled.clear()
        try:
            key = self._number(dispatcher), args
        except (_Unknown, TypeError, ValueError, RecursionError):  # not hashable; an empty cell; a function of itself
            return compile_function()
        if key not in self._compiled:
            found = compile_function()
            self._compiled[key] = found._replace(type_annotation=None)  # which only messages read
            return found
        # An object of its own: Numba forgets the function of a dispatcher that is not used any more, by its identity.
        found = dispatcher.overloads[args] = self._compiled[key]._replace()
        found.target_context.insert_user_function(found.entry_point, found.fndesc, [found.library])
        return found

    def _number(self, dispatcher: Any) -> int:
        """Return a number that stands for the content of a device function."""
        function = dispatcher.py_func
        if function.__kwdefaults__:
            raise _Unknown
        content = (
            function.__code__,
            tuple((name, self._content(function.__globals__[name])) for name in _globals_of(function)),
            tuple(self._content(cell.cell_contents) for cell in function.__closure__ or ()),
            self._content(function.__defaults__),
            tuple((name, self._content(value)) for name, value in sorted(dispatcher.targetoptions.items())),
        )
        return self._numbers.setdefault(content, next(self._count))

    def _content(self, value: Any) -> Any:
        """Return what tells a value from others: numbers by their representations, and objects by their identity."""
        kind = type(value)
        if kind in NUMBERS:
            return kind, repr(value)
        if kind in (tuple, list):
            return kind, tuple(map(self._content, value))
        function = getattr(value, "py_func", value)
        if isinstance(function, FunctionType):
            if not self._is_own(function):  # an epilogue: it would be kept, and is seldom met again
                raise _Unknown
            return self._identity(value) if function is value else ("function", self._number(value))
        hash(value)  # most that can change in place has none
        return self._identity(value)

    def _identity(self, value: Any) -> tuple[str, int]:
        self._objects[id(value)] = value
        return "object", id(value)


def _globals_of(function: FunctionType) -> list[str]:
    """Return the names of a function's code, and of code within it, that are names of its module."""

    def named(code: CodeType) -> Iterator[str]:
        yield from code.co_names
        for one in code.co_consts:
            if isinstance(one, CodeType):
                yield from named(one)

    return sorted(set(named(function.__code__)) & function.__globals__.keys())
