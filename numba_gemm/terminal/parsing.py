"""Parsers of commands, the types of their options, and errors of one line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

from ..models import gpu_names

__all__ = [
    "USAGE",
    "Parser",
    "UsageError",
    "at_least_one",
    "compute_capabilities",
    "compute_capability",
    "one_line",
    "positive_seconds",
    "refusing",
]

USAGE = 2  # exit status if a command cannot do what the arguments ask for


class UsageError(ValueError):
    """The command cannot do what the arguments ask for; the message gives the reason in one line."""


class Parser(argparse.ArgumentParser):
    """Parser whose errors are one line on standard error, with exit status 2; options are not abbreviated."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """End the process with a line that says what is wrong."""
        self.exit(USAGE, f"error: {one_line(message)}; see {self.prog} --help\n")


def one_line(text: str) -> str:
    """Return a text without its line breaks."""
    return " ".join(text.split())


def at_least_one(text: str) -> int:
    """Parse a positive integer; the type of an option."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


MOST_SECONDS = 1_000_000  # which every function of the operating system takes


def positive_seconds(text: str) -> float:
    """Parse a positive number of seconds; the type of an option."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text!r} given; expected a number of seconds above 0 and up to {MOST_SECONDS}; pass 300, for instance"
        )
    return value


def refusing(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser as the type of an option, whose errors argparse prints."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


# Types of options, see `models.gpu_names`: "9.0" or "sm_90" becomes (9, 0), and "8.0,9.0" a list.
compute_capability = refusing(gpu_names.compute_capability)
compute_capabilities = refusing(gpu_names.compute_capabilities)
