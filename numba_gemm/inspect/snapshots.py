"""Snapshots of a thread's variables: copying, comparison and formatting."""

from __future__ import annotations

import numbers
import reprlib
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

MOST_ELEMENTS = 4  # changed elements of an array that are listed one by one
SMALL = 8  # largest array that is shown in full, in elements
WIDTH = 100


def is_same(new: Any, old: Any) -> bool:
    """Return True if two snapshots are equal; NaN equals NaN."""
    if new is old:
        return True
    if type(new) is not type(old):
        return False
    if isinstance(new, (tuple, list)):
        return len(new) == len(old) and all(map(is_same, new, old))
    if isinstance(new, (numbers.Number, np.generic)):
        return bool(new == old or (new != new and old != old))
    return isinstance(new, str) and new == old


def snapshot(value: Any, old: Any, elsewhere: Sequence[Array]) -> Any:
    """Return a snapshot of a value: a copy of an array, or a view if the array shares memory with one in `elsewhere`.

    If nothing has changed, the `old` snapshot is returned, so that the snapshots of many steps take little memory.
    """
    if isinstance(value, np.ndarray):
        plain = value.view(np.ndarray)
        shaped = isinstance(old, np.ndarray) and (old.shape, old.dtype) == (plain.shape, plain.dtype)
        if any(np.may_share_memory(plain, array) for array in elsewhere):
            plain.flags.writeable = False
            same = shaped and plain.__array_interface__ == old.__array_interface__
        else:
            same = shaped and old.base is None and plain.tobytes() == old.tobytes()
            if not same:
                plain = np.array(plain, order="C")
                plain.flags.writeable = False
        return old if same else plain
    if isinstance(value, (tuple, list)):
        olds = old if type(old) is type(value) and len(old) == len(value) else [None] * len(value)
        items = [snapshot(item, before, elsewhere) for item, before in zip(value, olds, strict=True)]
        if isinstance(value, list):
            return items
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    return value


def show(value: Any) -> str:
    """Format a value briefly."""
    if isinstance(value, np.ndarray):
        if value.base is None and value.ndim == 1 and value.size <= SMALL:
            return f"[{', '.join(map(str, value))}]"
        shape = " x ".join(map(str, value.shape)) or "0-d"
        return f"{shape} {value.dtype}" + ("" if value.base is None else " in global memory")
    if isinstance(value, (numbers.Number, np.generic)):
        return str(value)
    if isinstance(value, tuple):
        text = f"({', '.join(map(show, value))})"
        return text if len(text) <= WIDTH else f"{type(value).__name__} of {len(value)}"
    return reprlib.repr(value)


def show_change(name: str, new: Any, old: Any) -> str:
    """Format a local variable that has changed; for an array, its changed elements, unless there are many."""
    comparable = isinstance(new, np.ndarray) and isinstance(old, np.ndarray)
    if not comparable or new.shape != old.shape or new.dtype != old.dtype or new.base is not None:
        return f"{name} = {show(new)}"
    bits = f"V{new.itemsize}"
    places = np.argwhere(np.ascontiguousarray(new).view(bits) != np.ascontiguousarray(old).view(bits))
    if len(places) <= MOST_ELEMENTS:
        return ", ".join(f"{name}[{', '.join(map(str, place))}] = {new[tuple(place)]}" for place in places)
    return f"{name}: {len(places)} of {new.size} elements"


def local_values(frame: FrameType) -> dict[str, Any]:
    """Return parameters and local variables that have a value, without those of enclosing functions."""
    values, code = frame.f_locals, frame.f_code
    return {name: values[name] for name in dict.fromkeys(code.co_varnames + code.co_cellvars) if name in values}


def arrays_in(name: str, value: Any) -> Iterator[tuple[str, Array]]:
    """Yield the arrays in a value, by the expressions that name them."""
    if isinstance(value, np.ndarray):
        yield name, value
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from arrays_in(f"{name}[{i}]", item)
