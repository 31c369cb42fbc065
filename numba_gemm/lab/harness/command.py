"""Shared parts of commands: one-line errors, robust standard output, atomic files."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TextIO, cast

if TYPE_CHECKING:
    import pandas as pd

USAGE = 2  # exit status if a command cannot do what the arguments ask for
INTERRUPTED = 130  # exit status that shells report for a program ended by SIGINT

DEFAULT_OUT = Path("results") / "local"

Arguments = ParamSpec("Arguments")


class UsageError(ValueError):
    """The command cannot do what the arguments ask for; the message gives the reason in one line."""


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
        with _output() as output:
            try:
                status = main(*args, **kwargs)
            except (UsageError, ModuleNotFoundError) as error:
                print(f"error: {error}", file=sys.stderr)
                status = USAGE
            except KeyboardInterrupt:
                print("interrupted", file=sys.stderr)
                status = INTERRUPTED
        if output.error is not None and not isinstance(output.error, BrokenPipeError):
            print(f"error: standard output cannot be written: {output.error.strerror}", file=sys.stderr)
            status = status or USAGE
        return status

    return run


def at_least_one(text: str) -> int:
    """Parse a positive integer; the type of an option."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def commit_hash(text: str) -> str:
    """Parse the hash of a commit, as git writes it; the type of an option."""
    if not re.fullmatch(r"[0-9a-f]{7,64}(-dirty)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no commit: give seven or more hexadecimal digits")
    return text


def add_result_options(parser: argparse.ArgumentParser) -> None:
    """Add the options ``--out`` and ``--commit`` of commands that write results."""
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, metavar="DIR", help=f"default: {DEFAULT_OUT}")
    parser.add_argument(
        "--commit", type=commit_hash, metavar="HASH", help="the commit to record where git cannot tell it"
    )


def make_folder(path: Path) -> None:
    """Make the folder of ``--out``, and raise `UsageError` if files cannot be written there.

    Call this before any measurement.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UsageError(f"--out {path}: results cannot be written there: {error.strerror}") from None


def write_files(folder: Path, contents: Mapping[str, str | bytes]) -> None:
    """Write files that belong together into a folder, text as UTF-8.

    They are written to temporary files and then renamed, so that a full disk leaves the previous files intact. The
    folder is locked meanwhile: if two processes write the same files, one process's set remains, never a mixture.

    Raises
    ------
    UsageError
        if the files cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder), tempfile.TemporaryDirectory(prefix=".", dir=folder) as made:
            for name, content in contents.items():
                with open(Path(made, name), "wb") as file:
                    file.write(content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace"))
                    file.flush()
                    os.fsync(file.fileno())  # some file systems report a full disk only here
            for name in contents:
                os.replace(Path(made, name), folder / name)
    except OSError as error:
        raise UsageError(f"{folder}: {', '.join(contents)} cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot lock folders
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def csv_text(frame: pd.DataFrame, digits: int = 6) -> str:
    """Format a table as CSV, with floats rounded to this many significant digits."""
    return frame.to_csv(index=False, float_format=f"%.{digits}g", lineterminator="\n")


def json_text(value: Mapping[str, Any]) -> str:
    """Format a dictionary as indented JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
