"""The check of a kernel: correct, without races, within the limits; and the points for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..simulator.switch import SIMULATOR
from .faults import faults
from .finding import Finding
from .limits import MEASURES
from .record import LIMITS, parameters_of, puzzle
from .running import Run, case_text, run
from .source import unsuitable

__all__ = ["CORRECT_POINTS", "HINT_POINTS", "LIMIT_POINTS", "MOST_POINTS", "Verdict", "check"]

CORRECT_POINTS, LIMIT_POINTS, HINT_POINTS = 5, 3, 2
MOST_POINTS = CORRECT_POINTS + LIMIT_POINTS + HINT_POINTS
SECONDS = 15.0  # of processor time per case; the solutions take at most two or three


@dataclass(frozen=True)
class Verdict:
    """The result of a check; its text is a report.

    Attributes
    ----------
    puzzle : str
        Name of the puzzle.
    correct : bool
        True if the kernel computes what it should in every case, without a race.
    finding : Finding or None
        The first fault or exceeded limit.
    figures : tuple of (str, int, int)
        Text, count and figure allowed of each limit, for the last case that ran.
    case : str
        That case.
    """

    puzzle: str
    correct: bool
    finding: Finding | None
    figures: tuple[tuple[str, int, int], ...] = ()
    case: str = ""

    @property
    def solved(self) -> bool:
        """True if the kernel is correct and within all limits."""
        return self.correct and self.finding is None

    def points(self, hints: int = 0, solution: bool = False) -> int:
        """Return the points, given the number of hints that were shown, and if the solution was."""
        unused = 0 if solution else max(HINT_POINTS - hints, 0)
        return CORRECT_POINTS * self.correct + (LIMIT_POINTS + unused) * self.solved

    def score(self, hints: int = 0, solution: bool = False) -> str:
        """Return the points in one line."""
        got = self.points(hints, solution)
        if not self.solved:
            return f"{got} of {MOST_POINTS} points"
        unused = got - CORRECT_POINTS - LIMIT_POINTS
        return (
            f"{got} of {MOST_POINTS} points: {CORRECT_POINTS} for a correct kernel, {LIMIT_POINTS} for its limits, "
            f"{unused} of {HINT_POINTS} for unused hints"
        )

    def report(self, hints: int = 0, solution: bool = False) -> str:
        """Return the state, the finding or the figures, and the score."""
        state = "solved" if self.solved else "correct, but not within its limits" if self.correct else "not solved"
        lines = [f"{self.puzzle}: {state}"]
        if self.finding is not None:
            lines += [f"  {line}" for line in str(self.finding).splitlines()]
        elif self.figures:
            lines += [f"  for {self.case}:"]
            lines += [f"    {text}: {count} (at most {allowed})" for text, count, allowed in self.figures]
        return "\n".join([*lines, self.score(hints, solution)])

    def __repr__(self) -> str:
        return self.report()


def check(kernel: Any, name: str, *, seconds: float = SECONDS) -> Verdict:
    """Check a kernel on the simulator, for all cases of a puzzle.

    Parameters
    ----------
    kernel : kernel
        Made by ``cuda.jit`` in the simulator, or a Python function.
    name : str
        The puzzle: one of `numba_gemm.puzzles.PUZZLES`.
    seconds : float
        Limit of processor time per case, after which a loop counts as endless.

    Returns
    -------
    Verdict
        A record that prints as a report, with the first fault found.

    Raises
    ------
    ValueError
        for an unknown puzzle.
    TypeError
        if `kernel` is no kernel.
    RuntimeError
        outside the simulator.

    Examples
    --------
    >>> from numba_gemm.puzzles import check, puzzle
    >>> check(puzzle("element").kernel, "element").solved
    True
    """
    if not SIMULATOR:
        raise RuntimeError(
            "puzzles are checked on Numba's simulator: set NUMBA_ENABLE_CUDASIM=1 before anything imports numba"
        )
    task = puzzle(name)
    if (finding := unsuitable(kernel, task.parameters, parameters_of(kernel), task.dimensions)) is not None:
        return Verdict(name, False, finding)
    runs: list[Run] = []
    for case in task.cases:
        done = run(task, case, kernel, seconds)
        finding = done if isinstance(done, Finding) else next(faults(done), None)
        if finding is not None:
            return Verdict(name, finding.kind == "owner", finding)
        assert isinstance(done, Run)
        runs.append(done)
    figures: list[tuple[str, int, int]] = []
    for done in runs:
        allowed = {"written_floats": done.output.size}
        allowed |= {limit: int(task.value(formula, done.case)) for limit, formula in task.limits.items()}
        counts = {limit: MEASURES[limit].count(done) for limit in allowed}
        for limit, most in allowed.items():
            if counts[limit] > most:
                return Verdict(name, True, MEASURES[limit].finding(limit, done, most))
        figures = [(LIMITS[limit], counts[limit], allowed[limit]) for limit in task.limits]
    return Verdict(name, True, None, tuple(figures), case_text(runs[-1].case))
