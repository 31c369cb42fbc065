"""GPUs as people write them: a compute capability, as (9, 0) or "sm_90", and a device, as 0 or "cuda:0".

All public functions read their parameters `cc` and `device` here, and all commands their option ``--cc``.
"""

from __future__ import annotations

import numbers
import operator
import re
from typing import Any

__all__ = ["compute_capabilities", "compute_capability", "device_index", "dotted"]

FORMS = '(9, 0), 9.0, "9.0", 90 or "sm_90"'
DEVICES = 'an ordinal, "cuda:0" or a device object of PyTorch, CuPy, Numba or cuda.core'
CAPABILITY = re.compile(r"(\d{1,2})\.(\d)|(?:sm_|compute_)?(\d{1,2})(\d)[af]?", re.ASCII)
DEVICE = re.compile(r"(?:cuda:)?(\d{1,4})", re.ASCII)
ORDINALS = ("index", "device_id", "id", "ordinal")  # of device objects: PyTorch, cuda.core, CuPy and Numba


def dotted(cc: tuple[int, int]) -> str:
    """Format a compute capability: (9, 0) becomes "9.0"."""
    return f"{cc[0]}.{cc[1]}"


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_pair(value: Any) -> bool:
    """Return True for (major, minor); (90, 80) are two compute capabilities."""
    return isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_int, value)) and 0 <= value[1] < 10


def compute_capability(cc: Any) -> tuple[int, int]:
    """Return a compute capability as (major, minor).

    Parameters
    ----------
    cc : tuple of int, float, int or str
        (9, 0), 9.0, 90, "9.0", "90", "sm_90" or "compute_90", also with the suffix of an architecture, "sm_90a".

    Raises
    ------
    TypeError, ValueError
        For anything else.
    """
    if _is_pair(cc):
        return int(cc[0]), int(cc[1])
    if isinstance(cc, bool) or not isinstance(cc, numbers.Real | str):
        raise TypeError(f"cc is {cc!r}; expected a compute capability, as {FORMS}; pass (9, 0) for an H200")
    found = CAPABILITY.fullmatch(str(cc).strip())
    if found is None:
        raise ValueError(f"cc is {cc!r}; expected a compute capability, as {FORMS}; pass (9, 0) for an H200")
    major, minor = (group for group in found.groups() if group is not None)
    if major == "1" and found[3]:  # "10", probably meant as 10.0
        raise ValueError(
            f'cc is {cc!r}, which reads as 1.{minor}; expected a compute capability, as {FORMS}; pass "1{minor}.0", or '
            f"(1{minor}, 0)"
        )
    return int(major), int(minor)


def compute_capabilities(cc: Any) -> list[tuple[int, int]]:
    """Return one compute capability, or each of several: of an iterable, or of a str separated by commas."""
    if isinstance(cc, str):
        return [compute_capability(word) for word in cc.split(",")]
    if _is_pair(cc) or not hasattr(cc, "__iter__"):
        return [compute_capability(cc)]
    return [compute_capability(one) for one in cc]


def device_index(device: Any, name: str = "device") -> int | None:
    """Return the ordinal of a device; None for "cuda", the current one.

    Parameters
    ----------
    device : int, str or device object
        0, "0", "cuda:0" or "cuda"; an object with an integer `index` (``torch.device``), `device_id`, `id` or
        `ordinal`. An object whose `type` is not "cuda" is refused; one whose `index` is None is the current device.
    name : str
        Argument that errors name.

    Raises
    ------
    TypeError, ValueError
        For anything else.
    """
    expected = f"expected {DEVICES}; pass 0 for the first GPU"
    if isinstance(device, str):
        if device == "cuda":
            return None
        if (found := DEVICE.fullmatch(device)) is None:
            raise ValueError(f"{name} is {device!r}; {expected}")
        return int(found[1])
    if isinstance(device, bool):
        raise TypeError(f"{name} is {device!r}; {expected}")
    if isinstance(kind := getattr(device, "type", None), str):
        if kind != "cuda":
            raise ValueError(f"{name} is {device!r}, of type {kind!r}; {expected}")
        if device.index is None:
            return None
    found_in = [device, *(getattr(device, attribute, None) for attribute in ORDINALS)]
    for value in found_in:
        if not isinstance(value, bool) and hasattr(value, "__index__"):
            return operator.index(value)
    advice = "; pass a compute capability as cc" if isinstance(device, tuple | list | float) else ""
    raise TypeError(f"{name} is {device!r}; {expected}{advice}")
