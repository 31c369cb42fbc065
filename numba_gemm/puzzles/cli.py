"""``numba-gemm puzzle [NAME]``: list the puzzles, begin one, or check the reader's kernel."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from ..simulator.probe import choose, simulator_requested
from ..terminal import Parser, UsageError, command
from . import PUZZLES


def parser() -> Parser:
    """Return the parser of the command line."""
    made = Parser(
        prog="numba-gemm puzzle",
        description="Puzzles in which you write the kernels of the ladder. Without NAME, list them with your progress. "
        "With NAME, write its skeleton to DIRECTORY/NAME.py, or check that file if it exists: the kernel runs on the "
        "simulator, without a GPU, and must be correct, free of races and within the puzzle's limits.",
        epilog="Exit status: 0; 1 if the kernel does not solve its puzzle; 2 for arguments that are wrong, or for "
        "files that cannot be read or written.",
    )
    made.add_argument("name", nargs="?", metavar="NAME", help="a puzzle, such as shared_tile")
    shown = made.add_mutually_exclusive_group()
    shown.add_argument("--hint", action="store_true", help="print the next hint; each of the first two takes a point")
    shown.add_argument("--solution", action="store_true", help="print a solution; takes the points for unused hints")
    made.add_argument(
        "--directory",
        type=Path,
        default=Path("puzzles"),
        metavar="DIRECTORY",
        help="where your kernels and progress.json are (default: puzzles)",
    )
    return made


def _simulate() -> None:
    """Choose the simulator, unless Numba has been imported with it already."""
    if "numba" not in sys.modules:
        choose(simulator=True)
    elif not simulator_requested():
        raise UsageError("puzzles run on Numba's simulator, and this process has imported Numba for a GPU")


def _list(directory: Path) -> None:
    from .progress import Directory
    from .record import puzzle

    progress = Directory(directory)
    width = max(map(len, PUZZLES))
    states = [progress.state(name) for name in PUZZLES]
    for number, (name, state) in enumerate(zip(PUZZLES, states, strict=True), 1):
        print(f"{number:>2}  {name:<{width}}  {state}  {puzzle(name).idea}")
    points = sum(state.points for state in states)
    print(f"\n{sum(state.solved for state in states)} of {len(PUZZLES)} solved, {points} points")
    following = next((name for name, state in zip(PUZZLES, states, strict=True) if not state.solved), None)
    if following is not None:
        print(f"next: {_command(following, directory)}")


def _command(name: str, directory: Path, *options: str) -> str:
    """Return the command line that continues with a puzzle in the same directory."""
    given = () if directory == Path("puzzles") else ("--directory", str(directory))
    return " ".join(("numba-gemm puzzle", name, *options, *given))


def _continue(name: str, arguments: argparse.Namespace) -> int:
    """Begin a puzzle, show a hint or the solution, or check the kernel; return the exit status."""
    from .checker import Verdict, check
    from .finding import Finding
    from .progress import Directory
    from .record import puzzle

    directory: Path = arguments.directory
    task, progress = puzzle(name), Directory(directory)
    if arguments.hint:
        hints = progress.hint(task)
        shown = progress.state(name).hints
        print(f"hint {shown} of {len(task.hints)}: {hints[0]}" if len(hints) == 1 else "\n".join(hints))
        return 0
    if arguments.solution:
        print(progress.solution(task), end="")
        return 0
    if not progress.file(name).exists():
        progress.begin(task)
        print(f"{task.statement}\n\nComplete {progress.file(name)}, then check it: {_command(name, directory)}")
        return 0
    kernel = progress.kernel(name)
    verdict = Verdict(name, False, kernel) if isinstance(kernel, Finding) else check(kernel, name)
    state = progress.record(verdict)
    print(verdict.report(state.hints, state.solution))
    if not verdict.solved:
        if state.hints < len(task.hints):
            print(f"hint: {_command(name, directory, '--hint')}")
        return 1
    following = next((other for other in PUZZLES if not progress.state(other).solved), None)
    print(f"next: {_command(following, directory)}" if following else "All puzzles are solved.")
    return 0


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = parser().parse_args(arguments)
    if options.name is None and (options.hint or options.solution):
        raise UsageError("--hint and --solution are about one puzzle: give its NAME")
    if options.name is not None and options.name not in PUZZLES:
        near = get_close_matches(options.name, PUZZLES, n=1)
        meant = f"; did you mean {near[0]}?" if near else f"; the puzzles are {', '.join(PUZZLES)}"
        raise UsageError(f"unknown puzzle {options.name!r}{meant}")
    _simulate()
    try:
        if options.name is None:
            _list(options.directory)
            return 0
        return _continue(options.name, options)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
