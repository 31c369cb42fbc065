"""Counting of the loop iterations of a simulated thread, to tell repeated accesses by one instruction apart.

A lane of a warp that skips an iteration must not be counted as taking part in it. Iterations are therefore counted as
they happen, from the lines that Python reports to a trace function: reaching a loop's first line from within the loop
begins its next iteration. Names in the code call an iteration a turn.
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
        The line on which an iteration begins.
    end : int
        The loop's last line.
    endless : bool
        True if the first line holds no test. For ``while True``, the first line is that of the body, on which another
        loop may begin; an iteration then begins only at the instruction on that line that was reached first.
    """

    first: int
    end: int
    endless: bool = False

    def holds(self, line: int) -> bool:
        """Return True if a line belongs to the loop."""
        return self.first <= line <= self.end


# Functions of these modules belong to the simulator, not to the kernel: their loops do not exist on the hardware.
STDLIB = sysconfig.get_path("stdlib")
NOT_KERNELS = (
    "numba.",
    "numpy.",
    "numba_gemm.device.watch",
    "numba_gemm.inspect.",
    "numba_gemm.simulator.kernel_view",
    "numba_gemm.simulator.launch",
    "numba_gemm.simulator.scheduler",
)


def _own_loops(function: ast.AST) -> Iterator[Loop]:
    """Yield the loops of a function, excluding those of nested functions, outer loops first."""
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
    """Return the loops of all functions of a file, keyed by first line (decorators included) and name."""
    linecache.checkcache(filename)  # the file may have been edited
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
    """Return the loops of a function's code, outer loops first; `names` are its globals.

    Raises
    ------
    ValueError
        if it has loops and its source cannot be found.
    """
    if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR | inspect.CO_COROUTINE):
        return ()  # kernels cannot be generators or coroutines
    if not any("JUMP_BACKWARD" in step.opname for step in dis.get_instructions(code)):
        return ()
    found = _functions(code.co_filename, names).get((code.co_firstlineno, code.co_name))
    if found is None and not code.co_name.startswith("<"):  # iterations of comprehensions are not distinguished
        raise ValueError(
            f"the source of {code.co_name} is not at {code.co_filename}:{code.co_firstlineno}; loops are told apart by "
            "it: put the kernel into a file or a notebook, and load it anew once that has changed"
        )
    return found or ()


def _foreign(frame: FrameType) -> bool:
    """Return True if a call is outside the kernel's code: in the simulator or in Python itself."""
    module, file = f"{frame.f_globals.get('__name__', '')}.", frame.f_code.co_filename
    own = not file.startswith(("<frozen", STDLIB)) or "site-packages" in file
    return module.startswith(NOT_KERNELS) or not own


class _Frame:
    """Trace function of one call, which counts iterations."""

    __slots__ = ("_came", "_headers", "_last", "_loops", "_stack", "_turns", "known")

    def __init__(self, loops: tuple[Loop, ...], stack: list[_Frame]) -> None:
        self._loops, self._stack = loops, stack
        self._turns = [0] * len(loops)
        self._headers = {loop.first for loop in loops}
        self._came: dict[int, int] = {}  # by line, the instruction that was reached first
        self._last = -1
        self.known: tuple[int, ...] | None = ()  # what `now` has returned for the current line

    def __call__(self, frame: FrameType, event: str, argument: Any) -> _Frame:
        if event == "line":
            line = frame.f_lineno
            if line in self._headers:
                self._turn(line, frame.f_lasti)
            self._last = line
            self.known = None
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
                        self._turns[j] = 0  # a nested loop starts again

    def now(self) -> tuple[int, ...]:
        """Return the current iteration of each loop around the current line, outermost first."""
        line, found = self._last, []
        for turn, loop in zip(self._turns, self._loops, strict=True):
            if loop.first <= line <= loop.end:
                found.append(turn)
        self.known = tuple(found)
        return self.known


class Turns:
    """Factory of trace functions for simulated threads (`tracer`), and reader of their counts (`path`)."""

    def __init__(self) -> None:
        self._known: dict[CodeType, tuple[Loop, ...]] = {}

    def _loops(self, frame: FrameType) -> tuple[Loop, ...]:
        code = frame.f_code
        found = self._known.get(code)
        if found is None:
            found = self._known[code] = () if _foreign(frame) else loops_of(code, frame.f_globals)
        return found

    def tracer(self, stack: list[_Frame]) -> Callable[..., Any]:
        """Return a function for `sys.settrace`, for a thread whose calls with loops are kept in `stack`."""

        def called(frame: FrameType, event: str, argument: Any) -> _Frame | None:
            loops = self._loops(frame)
            if not loops:
                return None
            stack.append(_Frame(loops, stack))
            return stack[-1]

        return called

    @staticmethod
    def path(stack: list[_Frame]) -> tuple[int, ...]:
        """Return the current iterations of all loops that a thread is in."""
        if len(stack) == 1:
            return stack[0].known if stack[0].known is not None else stack[0].now()
        return tuple(turn for frame in stack for turn in frame.now())
