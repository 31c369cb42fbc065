"""Shared parts of the harness's commands: options of commands that write results, and atomic files."""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numba_gemm.terminal import UsageError as UsageError
from numba_gemm.terminal import command as command

if TYPE_CHECKING:
    import pandas as pd

DEFAULT_OUT = Path("results") / "local"
SEED_BITS = 32
MOST_SEED = (1 << SEED_BITS) - 1


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
    """Make the folder of ``--out``; before any measurement, raise `UsageError` if files cannot be written there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UsageError(f"--out {path}: results cannot be written there: {error.strerror}") from None


def write_files(folder: Path, contents: Mapping[str, str | bytes]) -> None:
    """Write files that belong together into a folder, text as UTF-8, or raise `UsageError`.

    They are written to temporary files and then renamed, so that a full disk leaves the previous files intact.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=folder) as made:
            for name, content in contents.items():
                with open(Path(made, name), "wb") as file:
                    file.write(content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace"))
                    file.flush()
                    os.fsync(file.fileno())  # some file systems report a full disk only here
            for name in contents:
                os.replace(Path(made, name), folder / name)
    except OSError as error:
        raise UsageError(f"{folder}: {', '.join(contents)} cannot be written: {error.strerror}") from error


def csv_text(frame: pd.DataFrame) -> str:
    """Format a table as CSV, with floats rounded to six significant digits."""
    return frame.to_csv(index=False, float_format="%.6g", lineterminator="\n")


def json_text(value: Mapping[str, Any]) -> str:
    """Format a dictionary as indented JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
