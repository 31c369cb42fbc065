"""Libraries that extras of this package install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["from_extra"]


@contextmanager
def from_extra(extra: str, library: str) -> Iterator[None]:
    """Add the command that installs a library to the `ModuleNotFoundError` of its import."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != library:
            raise
        raise ModuleNotFoundError(
            f"{library} is not installed; expected the packages of the extra {extra}; run pip install "
            f"'numba-gemm[{extra}]'",
            name=error.name,
            path=error.path,
        ) from error
