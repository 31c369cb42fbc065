"""Epilogues: functions of the caller's that are compiled into a kernel, applied to each element of C on its way out."""

from __future__ import annotations

import dis
import inspect
import numbers
import re
import threading
from collections.abc import Callable
from functools import wraps
from types import CodeType, FunctionType
from typing import Any

import numpy as np

from ..simulator.switch import SIMULATOR
from . import compiler
from .fingerprint import fingerprint, frozen, functions_of
from .guard import Guard, guard

__all__ = ["check_result", "identity", "prepared"]

EXPECTED = (
    "expected a Python function, or one made by @cuda.jit(device=True), that takes (value, row, column, "
    "*epilogue_args) and returns the real number to store"
)
REMEDY = "pass such a function, for instance lambda value, row, column: max(value, 0)"
LINES = 12  # of the compiler's message, which begins with the cause
NOISE = re.compile("<source elided>|Failed in cuda mode pipeline|During: Pass")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # Numba writes them if colorama is installed

_lock = threading.Lock()
_made: dict[Any, Callable[..., Any]] = {}
MAX_MADE = 1024


def prepared(epilogue: Any, vectors: int) -> Callable[..., Any]:
    """Return the function that kernels are built with, for a caller's epilogue that takes this number of vectors.

    Equal content gives the same object, so that its kernels are found again: also for a lambda expression that is
    evaluated repeatedly. A changed global gives another object. If the content cannot be determined, the same function
    gives the same object, as it was at first.

    Raises
    ------
    TypeError
        if it is no function, takes another number of arguments, takes some by name alone, or has a raise or assert
        statement.
    """
    function = getattr(epilogue, "py_func", epilogue)
    if not isinstance(function, FunctionType):
        raise TypeError(f"epilogue is {epilogue!r}, of type {type(epilogue).__qualname__}; {EXPECTED}; {REMEDY}")
    signature = inspect.signature(function, follow_wrapped=False)  # functools.wraps would show the wrapped one's
    named = [one for one in signature.parameters.values() if one.kind in (one.KEYWORD_ONLY, one.VAR_KEYWORD)]
    if named:  # even with defaults: Numba-CUDA does not bind them, the simulator would
        raise TypeError(
            f"epilogue {function.__name__}{signature} takes {', '.join(one.name for one in named)} by name, and Numba "
            f"compiles no such parameter; {EXPECTED}; pass a function that takes all by position, with defaults or a "
            "closure for constants"
        )
    try:
        signature.bind(*range(3 + vectors))
    except TypeError as error:
        raise TypeError(
            f"epilogue {function.__name__}{signature} cannot be called with (value, row, column) and "
            f"{vectors} epilogue_args ({error}); {EXPECTED}; pass as many epilogue_args as it takes"
        ) from None
    jitted = "device" in getattr(epilogue, "targetoptions", ())  # then with the options that cuda.jit was given
    given: Any = epilogue if jitted else function
    contents = fingerprint(given)
    known: Any = given if contents is None else contents
    with _lock:
        if known not in _made:
            if len(_made) >= MAX_MADE:
                _made.clear()
            for one in functions_of(function, set()):
                if _raises(one.__code__):
                    raise TypeError(
                        f"epilogue {function.__name__} has a raise or assert statement in {one.__name__}; expected "
                        "none, since a GPU's thread would end there, without storing its other elements; return a NaN "
                        "instead"
                    )
            copy = frozen(given)
            _made[known] = _checking(copy) if SIMULATOR else copy
        return _made[known]


def _raises(code: CodeType) -> bool:
    """Return True if there is a raise or assert statement in code, or in a function that it defines."""
    nested = (one for one in code.co_consts if isinstance(one, CodeType))
    return any(one.opname == "RAISE_VARARGS" for one in dis.get_instructions(code)) or any(map(_raises, nested))


# Guards of functions that were looked at, by the identity of their code, or of the object that `cuda.jit` made. One of
# several that differ in a global has a guard for each of its last values.
_guards: dict[int, list[Guard]] = {}
MAX_GUARDS = 4


def identity(epilogue: Any) -> tuple[Any, ...] | None:
    """Return an epilogue's identity without describing its content; None if only its content identifies it.

    Two epilogues of equal identity have equal content: the same code, equal numbers in defaults and closure, and the
    very objects in globals that were found when the identity was first given.
    """
    function = getattr(epilogue, "py_func", epilogue)
    if type(function) is not FunctionType:
        return None
    code = function.__code__
    known = _guards.get(id(code))
    if known is not None:
        for one in known:
            if one.function_is(epilogue, function) and one.holds():
                return one.identity(function)
    made = guard(epilogue)
    if made is None:
        return None
    if len(_guards) >= MAX_MADE:
        _guards.clear()
    _guards[id(code)] = [*(known or [])[-MAX_GUARDS + 1 :], made]
    return made.identity(function)


def _checking(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a check of its result, for the simulator."""

    @wraps(function)
    def epilogue(*arguments: Any) -> Any:
        result = function(*arguments)
        if not isinstance(result, numbers.Real | np.bool_):
            raise TypeError(
                f"epilogue {function.__name__} returned {result!r}, of type {type(result).__qualname__}; {EXPECTED}; "
                "return a float"
            )
        return result

    return epilogue


def check_result(epilogue: Any, vectors: int, cc: tuple[int, int]) -> None:
    """Compile an epilogue by itself.

    Raises
    ------
    TypeError
        if it does not compile, or returns no real number.
    """
    from numba import types

    from ..device.store import callable_from_kernels

    of_vectors = types.UniTuple(types.Array(types.float32, 1, "A"), vectors)
    name, others = getattr(epilogue, "__name__", "epilogue"), (of_vectors,) if vectors else ()
    try:
        # Called as a kernel calls it: one that was made for certain types returns what it was made to.
        result = compiler.result_type(
            _caller(callable_from_kernels(epilogue), bool(vectors)),
            (types.float32, types.int64, types.int64, *others),
            cc,
        )
    except RuntimeError:  # of the compiler's libraries
        raise
    except Exception as error:  # Numba's errors have no common base class
        text = COLOURS.sub("", str(error)).partition("During: resolving callee")[0]  # the rest is about the caller
        lines = [line for line in text.splitlines() if line.strip() and not NOISE.search(line)][:LINES]
        lines = lines or [type(error).__name__]
        if isinstance(error, KeyError):  # its text is the key alone, such as a function that this Numba does not know
            lines = [f"KeyError: {' '.join(lines)}"]
        raise TypeError(
            f"epilogue {name} does not compile for a float32 value, int64 row and column, and {vectors} float32 "
            f"vectors; {EXPECTED}; the compiler said:\n" + "\n".join(lines)
        ) from error
    if not isinstance(result, types.Integer | types.Float | types.Boolean):
        raise TypeError(f"epilogue {name} returns a value of type {result}; {EXPECTED}; return a float")


def _caller(epilogue: Any, has_vectors: bool) -> Callable[..., Any]:
    def with_vectors(value: Any, row: Any, column: Any, vectors: Any) -> Any:
        return epilogue(value, row, column, *vectors)

    def alone(value: Any, row: Any, column: Any) -> Any:
        return epilogue(value, row, column)

    return with_vectors if has_vectors else alone
