"""Commands as functions: exit statuses, missing packages, and a standard output that may fail."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TextIO, cast

from .parsing import USAGE, UsageError, one_line

__all__ = ["BENCH", "INTERRUPTED", "command", "output_ended"]

INTERRUPTED = 130  # exit status that shells report for a program ended by SIGINT

# Packages that may be missing, and the requirements that install them.
COMPILER = "'numba-gemm[cu13]', or 'numba-gemm[cu12]' for a driver of CUDA 12"
BENCH = "'numba-gemm[bench]', or 'numba-gemm[bench-cu12]' for a driver of CUDA 12"
INSTALLED_BY = {"numba": COMPILER, "numba_cuda": COMPILER, "cuda": COMPILER}
INSTALLED_BY |= {name: name for name in ("matplotlib", "pandas")}

Arguments = ParamSpec("Arguments")


class _Output:
    """Standard output that discards text after a write has failed, because of a full disk or a closed pipe."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        self._attempt(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, function: Callable[..., Any], *arguments: str) -> None:
        try:
            function(*arguments)
        except OSError as error:
            self.error = error
            # Python flushes the remaining buffer at exit, and would fail again.
            with contextlib.suppress(OSError), open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _output() -> Iterator[_Output]:
    """Redirect `print` to an `_Output`, which replaces characters that the encoding lacks by "?"."""
    if isinstance(sys.stdout, _Output):  # one command runs another
        yield sys.stdout
        return
    with contextlib.ExitStack() as scopes:
        # Python has no standard output if the descriptor is closed.
        stream = sys.stdout or scopes.enter_context(open(os.devnull, "w"))
        if isinstance(stream, io.TextIOWrapper):
            scopes.callback(stream.reconfigure, errors=stream.errors)
            stream.reconfigure(errors="replace")
        output = _Output(stream)
        scopes.enter_context(contextlib.redirect_stdout(cast("TextIO", output)))
        scopes.callback(output.flush)
        yield output


def command(main: Callable[Arguments, int]) -> Callable[Arguments, int]:
    """Wrap a command's function, which returns the exit status.

    A `UsageError` or a missing package ends it with one line and status 2, Ctrl-C with one line and status 130. If
    standard output fails, the command still runs to its end, since it also writes files; its status is then 2 instead
    of 0, unless the output is a closed pipe.
    """

    @functools.wraps(main)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> int:
        outermost = not isinstance(sys.stdout, _Output)
        with _output() as output:
            try:
                status = main(*args, **kwargs)
            except (UsageError, ModuleNotFoundError) as error:
                print(f"error: {one_line(str(error))}{_advice(error)}", file=sys.stderr)
                status = USAGE
            except KeyboardInterrupt:
                print("interrupted", file=sys.stderr)
                status = INTERRUPTED
        if outermost and output.error is not None and not isinstance(output.error, BrokenPipeError):
            print(f"error: standard output cannot be written: {output.error.strerror}", file=sys.stderr)
            status = status or USAGE
        return status

    return run


def output_ended() -> bool:
    """Return True if nothing that a command prints is read any more, so that a command that only prints may end."""
    return isinstance(sys.stdout, _Output) and sys.stdout.error is not None


def _advice(error: Exception) -> str:
    """Return how to install a package that is missing; empty for other errors."""
    name = ((isinstance(error, ModuleNotFoundError) and error.name) or "").partition(".")[0]
    return f"; install it with: pip install {INSTALLED_BY[name]}" if name in INSTALLED_BY else ""
