"""Which turn of which loop a simulated thread is in: what tells the accesses of one instruction apart.

Lanes of a warp that skip a turn must not be counted as being in it, so turns are counted where they happen, by the
lines that Python reports to a trace function: a loop's first line, come to from within the loop, begins its next turn.
"""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

__all__ = ["Turns", "loops_of"]


@dataclass(frozen=True)
class Loop:
    """A loop of a function.

    Attributes
    ----------
    first : int
        The line on which a turn begins.
    end : int
        The loop's last line.
    endless : bool
        Whether nothing is tested there: of ``while True`` that is the body's first line, on which another loop may
        begin, so that a turn is one at the instruction that was come to first.
    """

    first: int
    end: int
    endless: bool = False

    def holds(self, line: int) -> bool:
        """Whether a line is one of the loop's."""
        return self.first <= line <= self.end


# Functions of these are the simulator's, not the kernel's: their loops are no loops on the hardware.
STDLIB = sysconfig.get_path("stdlib")
NOT_KERNELS = ("numba.", "numpy.", "numba_gemm.device.watch", "numba_gemm.simulator.scheduler", "numba_gemm.inspect.")


def _own_loops(function: ast.AST) -> Iterator[Loop]:
    """The loops of a function, not of those within it, outer ones first."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            continue
        end = getattr(node, "end_lineno", None) or 0
        if isinstance(node, ast.For):
            yield Loop(node.lineno, end)
        elif isinstance(node, ast.While):
            endless = isinstance(node.test, ast.Constant)
            yield Loop(node.body[0].lineno if endless else node.test.lineno, end, endless)
        yield from _own_loops(node)


Functions = dict[tuple[int, str], tuple[Loop, ...]]
_files: dict[str, tuple[str, Functions]] = {}


def _functions(filename: str, names: dict[str, Any]) -> Functions:
    """Loops of all functions of a file, by the functions' first lines, decorators included, and names."""
    linecache.checkcache(filename)  # it may have been edited
    source = "".join(linecache.getlines(filename, names))
    known = _files.get(filename)
    if known is None or known[0] != source:
        found: Functions = {}
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                found[first, node.name] = tuple(dict.fromkeys(_own_loops(node)))
        known = _files[filename] = (source, found)
    return known[1]


def loops_of(code: CodeType, names: dict[str, Any]) -> tuple[Loop, ...]:
    """The loops of a function's code, outer ones first; `names` are its globals.

    Raises
    ------
    ValueError
        if it has loops, and its source cannot be found.
    """
    if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR | inspect.CO_COROUTINE):
        return ()  # no kernel has one
    if not any("JUMP_BACKWARD" in step.opname for step in dis.get_instructions(code)):
        return ()
    found = _functions(code.co_filename, names).get((code.co_firstlineno, code.co_name))
    if found is None and not code.co_name.startswith("<"):  # a comprehension's turns are not told apart
        raise ValueError(
            f"the source of {code.co_name} is not at {code.co_filename}:{code.co_firstlineno}; loops are told apart by "
            "it: put the kernel into a file or a notebook, and load it anew once that has changed"
        )
    return found or ()


def _foreign(frame: FrameType) -> bool:
    """Whether a call is none of the kernel's: of the simulator, of Python itself."""
    module, file = f"{frame.f_globals.get('__name__', '')}.", frame.f_code.co_filename
    own = not file.startswith(("<frozen", STDLIB)) or "site-packages" in file
    return module.startswith(NOT_KERNELS) or not own


class _Frame:
    """The trace function of one call: counts turns."""

    __slots__ = ("_came", "_headers", "_last", "_loops", "_stack", "_turns")

    def __init__(self, loops: tuple[Loop, ...], stack: list[_Frame]) -> None:
        self._loops, self._stack = loops, stack
        self._turns = [0] * len(loops)
        self._headers = {loop.first for loop in loops}
        self._came: dict[int, int] = {}  # to which instruction of a line first
        self._last = -1

    def __call__(self, frame: FrameType, event: str, argument: Any) -> _Frame:
        if event == "line":
            line = frame.f_lineno
            if line in self._headers:
                self._turn(line, frame.f_lasti)
            self._last = line
        elif event == "return":
            del self._stack[self._stack.index(self) :]
        return self

    def _turn(self, line: int, instruction: int) -> None:
        again = self._came.setdefault(line, instruction) == instruction
        for i, loop in enumerate(self._loops):
            if loop.first == line and (again or not loop.endless):
                self._turns[i] += 1
                for j in range(i + 1, len(self._loops)):
                    if loop.holds(self._loops[j].first) and self._loops[j].end <= loop.end:
                        self._turns[j] = 0  # a loop within begins anew

    def now(self) -> list[int]:
        """The turn of each loop around the current line, from the outermost on."""
        return [turn for turn, loop in zip(self._turns, self._loops, strict=True) if loop.holds(self._last)]


class Turns:
    """Makes the trace functions of simulated threads, `tracer`, and reads what they count."""

    def __init__(self) -> None:
        self._known: dict[CodeType, tuple[Loop, ...]] = {}

    def _loops(self, frame: FrameType) -> tuple[Loop, ...]:
        code = frame.f_code
        if code not in self._known:
            self._known[code] = () if _foreign(frame) else loops_of(code, frame.f_globals)
        return self._known[code]

    def tracer(self, stack: list[_Frame]) -> Callable[..., Any]:
        """What `sys.settrace` takes, for a thread whose calls that loop stand in `stack`."""

        def called(frame: FrameType, event: str, argument: Any) -> _Frame | None:
            loops = self._loops(frame)
            if not loops:
                return None
            stack.append(_Frame(loops, stack))
            return stack[-1]

        return called

    @staticmethod
    def path(stack: list[_Frame]) -> tuple[int, ...]:
        """The turns of all loops that a thread is in."""
        return tuple(turn for frame in stack for turn in frame.now())
