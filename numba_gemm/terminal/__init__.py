"""Shared parts of all commands: parsers, one-line errors, exit statuses, robust standard output."""

from .commands import BENCH, INTERRUPTED, command, output_ended
from .parsing import (
    USAGE,
    Parser,
    UsageError,
    at_least_one,
    compute_capabilities,
    compute_capability,
    one_line,
    positive_seconds,
    refusing,
)

__all__ = [
    "BENCH",
    "INTERRUPTED",
    "USAGE",
    "Parser",
    "UsageError",
    "at_least_one",
    "command",
    "compute_capabilities",
    "compute_capability",
    "one_line",
    "output_ended",
    "positive_seconds",
    "refusing",
]
