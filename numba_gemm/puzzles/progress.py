"""The reader's files and progress: kernels and ``progress.json`` in one directory."""

from __future__ import annotations

import json
import linecache
import os
import types
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .checker import MOST_POINTS, Verdict
from .finding import Finding
from .record import Puzzle

__all__ = ["Directory", "State"]

FILE = "progress.json"


@dataclass
class State:
    """The reader's progress with one puzzle.

    Attributes
    ----------
    hints : int
        Number of hints that were shown.
    solution : bool
        True if the solution was shown.
    points : int
        The best score.
    solved : bool
        True if a kernel was within all limits.
    """

    hints: int = 0
    solution: bool = False
    points: int = 0
    solved: bool = False

    def __str__(self) -> str:
        return f"{'solved' if self.solved else 'open':<8}{f'{self.points} of {MOST_POINTS}' if self.points else '':>8}"


class Directory:
    """A directory with one file per puzzle that was begun, and the states of all.

    Raises
    ------
    ValueError
        if the states cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._states = self._stored()

    def _stored(self) -> dict[str, State]:
        try:
            stored = json.loads((self.path / FILE).read_text(encoding="utf-8"))
            return {name: State(**state) for name, state in stored.items()}
        except FileNotFoundError:
            return {}
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{self.path / FILE} holds no progress ({error}); move it away to begin anew") from None

    def state(self, name: str) -> State:
        """Return the progress with a puzzle."""
        return self._states.get(name, State())

    def file(self, name: str) -> Path:
        """Return the path of the reader's kernel."""
        return self.path / f"{name}.py"

    def begin(self, puzzle: Puzzle) -> None:
        """Write the skeleton of a puzzle; raise FileExistsError if there is a file."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self.file(puzzle.name).open("x", encoding="utf-8") as file:
            file.write(puzzle.skeleton)

    def kernel(self, name: str) -> Any | Finding:
        """Return the kernel in the reader's file, or a finding if the file does not run or lacks it."""
        path = str(self.file(name).resolve())
        linecache.checkcache(path)
        module = types.ModuleType(f"puzzle_{name}")
        module.__file__ = path
        try:
            exec(compile(Path(path).read_text(encoding="utf-8-sig"), path, "exec"), vars(module))
        except SyntaxError as error:
            return Finding("error", f"{type(error).__name__}: {error.msg}", path, error.lineno or 1)
        except (Exception, SystemExit) as error:
            step, line = error.__traceback__, 1
            while step is not None:
                line = step.tb_lineno if step.tb_frame.f_code.co_filename == path else line
                step = step.tb_next
            return Finding("error", f"{type(error).__name__}: {' '.join(str(error).split())}", path, line)
        kernel = getattr(module, name, None)
        if callable(kernel):
            return kernel
        return Finding("unfinished", f"there is no kernel named {name} in this file", path, 1)

    def hint(self, puzzle: Puzzle) -> list[str]:
        """Return the next hint and keep that it was shown; all hints, if all were shown."""
        state = self.state(puzzle.name)
        if state.hints == len(puzzle.hints):
            return list(puzzle.hints)
        state.hints += 1
        self._keep(puzzle.name, state)
        return [puzzle.hints[state.hints - 1]]

    def solution(self, puzzle: Puzzle) -> str:
        """Return the solution, and keep that it was shown."""
        state = self.state(puzzle.name)
        state.solution = True
        self._keep(puzzle.name, state)
        return puzzle.solution

    def record(self, verdict: Verdict) -> State:
        """Keep the points of a check, if they are the best."""
        state = self.state(verdict.puzzle)
        state.points = max(state.points, verdict.points(state.hints, state.solution))
        state.solved = state.solved or verdict.solved
        self._keep(verdict.puzzle, state)
        return state

    def _keep(self, name: str, state: State) -> None:
        self._states = self._stored() | {name: state}  # other commands may have changed other puzzles' states
        self.path.mkdir(parents=True, exist_ok=True)
        text = json.dumps({name: asdict(state) for name, state in self._states.items()}, indent=2) + "\n"
        partial = self.path / f".{FILE}.{os.getpid()}"
        partial.write_text(text, encoding="utf-8")
        partial.replace(self.path / FILE)  # whole or not at all
