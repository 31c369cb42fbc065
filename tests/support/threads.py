"""Operating-system threads of this process, also those that `threading` does not list."""

from __future__ import annotations

import _thread
import time


def count() -> int:
    """Return the number of threads beside the main thread."""
    return _thread._count()


def more_than(before: int, seconds: float = 10.0) -> bool:
    """Return True if there are still more threads than `before` after some time: a worker ends a little late."""
    end = time.monotonic() + seconds
    while count() > before:
        if time.monotonic() > end:
            return True
        time.sleep(0.001)
    return False
