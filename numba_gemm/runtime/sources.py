"""Sources of this package that can change what a kernel compiles to, as they were when they were imported.

Files of kernels are imported when one must be compiled, and by worker processes, so they may have been edited since.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

__all__ = ["PATTERNS", "SOURCES", "hash_of", "unchanged"]

PACKAGE = Path(__file__).parents[1]
PATTERNS = (
    "device/*.py",
    "simulator/switch.py",
    "kernels/**/*.py",
    "runtime/*.py",
)


def hash_of(package: Path) -> str | None:
    """Return a hash of names and contents of a package's files that matter; None if it was installed without them."""
    digest, count = hashlib.sha256(), 0
    try:
        for pattern in PATTERNS:
            for path in sorted(package.glob(pattern)):
                contents = path.read_bytes()
                digest.update(f"{path.relative_to(package).as_posix()} {len(contents)}\n".encode() + contents)
                count += 1
    except OSError:
        return None
    return digest.hexdigest() if count else None


SOURCES = hash_of(PACKAGE)


def unchanged() -> bool:
    """Return True if the sources are still those that `SOURCES` is of."""
    return hash_of(PACKAGE) == SOURCES
