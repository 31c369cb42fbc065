"""Arguments that are numbers: alpha and beta, and extents."""

from __future__ import annotations

import ctypes
import numbers
import operator
from typing import Any

import numpy as np

__all__ = ["index", "real"]


def real(name: str, value: Any) -> float:
    """Return a scalar, rounded to float32.

    Raises
    ------
    TypeError, ValueError
        if it is no real number.
    """
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    # NumPy registers timedelta64 as an Integral.
    if type(value) is not float and (
        isinstance(value, np.timedelta64) or not isinstance(value, numbers.Real | np.bool_)
    ):
        given, advice = f"{value!r}, of type {type(value).__qualname__}", "pass a number, such as 1.0"
        if hasattr(value, "shape") and not isinstance(value, np.generic):  # an array or a tensor
            given = f"of type {type(value).__qualname__} and shape {tuple(value.shape)}"
            advice = f"pass one of its elements, as {name}.item() if it has only one"
        elif hasattr(value, "__float__") and not isinstance(value, np.generic):
            advice = f"pass float({name})"
        raise TypeError(f"{name} is {given}; expected a real number; {advice}")
    try:
        return ctypes.c_float(float(value)).value  # rounds to nearest, and to infinity beyond float32's range
    except OverflowError:
        raise ValueError(f"{name} is beyond the range of a float; expected less; pass a float") from None


def index(name: str, value: Any, least: int = 0) -> int:
    """Return an integer that is at least `least`.

    Raises
    ------
    TypeError, ValueError
        for anything else.
    """
    try:
        found = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, of type {type(value).__qualname__}; expected an int; pass one") from None
    if found < least:
        raise ValueError(f"{name} is {found}; expected {least} or more; pass such a number")
    return found
