"""Positions in a kernel's source: expressions, chains of calls, and their text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_positions: dict[CodeType, list[Any]] = {}
_kernel_caller: CodeType | None = None  # of the function that calls kernels, at which a chain of calls ends


def calls_kernels(function: Function) -> Function:
    """Decorate the function that calls kernels; frames below it belong to the scheduler."""
    global _kernel_caller
    _kernel_caller = function.__code__
    return function


def position_of(frame: FrameType) -> Any:
    """Return the source expression that a frame is executing.

    The offset of the instruction would not identify it: once the interpreter has specialised an instruction, `f_lasti`
    may lie in the caches behind it, and the compiler duplicates short code that follows a condition.
    """
    code = frame.f_code
    return (_positions.get(code) or _positions_of(code))[frame.f_lasti // 2]


def _positions_of(code: CodeType) -> list[Any]:
    found = enumerate(code.co_positions())
    positions = _positions[code] = [offset if None in place else place for offset, place in found]
    return positions


def call_chain(frame: FrameType | None) -> tuple[Any, ...]:
    """Identify a call by its own expression and those of all its callers, up to the kernel.

    On hardware, a device function called from two places is two pieces of code, because it is inlined.
    """
    chain: list[Any] = []
    while frame is not None and (code := frame.f_code) is not _kernel_caller:
        # as `position_of`; a call for each frame at each barrier and each traced access would take longer than the rest
        chain.append(code)
        chain.append((_positions.get(code) or _positions_of(code))[frame.f_lasti // 2])
        frame = frame.f_back
    return tuple(chain)


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those of its callers, up to the kernel."""
    while frame is not None and frame.f_code is not _kernel_caller:
        yield frame
        frame = frame.f_back


def place_of(frame: FrameType | None) -> str:
    """Return the lines of the calls that lead from the kernel to the barrier, then the line of the barrier."""
    lines = [
        f"{caller.f_code.co_filename}:{caller.f_lineno}"
        for caller in callers(frame)
        if not caller.f_globals.get("__name__", "").startswith("numba.")  # skip Numba's wrapper of device functions
    ]
    return " > ".join(reversed(lines))
