"""Compilation without the garbage collector: it makes millions of objects, and few cycles.

The collector also passes over what the first compilations of a process leave.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

__all__ = ["UNCOLLECTED", "without_collections"]

UNCOLLECTED = 4  # first compilations of a process, each of which leaves some 10 MB of garbage
FROZEN_BY_PYTHON = 1000  # more objects than Python 3.12 itself starts with; a program that freezes its own has more


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Switch the garbage collector off, for a compilation and what it imports.

    If several threads compile, it is off until the last one has finished.
    """
    global _running, _collecting
    with _lock:
        if not _running:
            _collecting = gc.isenabled()
            gc.disable()
        _running += 1
    try:
        yield
    finally:
        with _lock:
            _running -= 1
            if _collecting and not _running:
                _spare_the_collector()
                gc.enable()


_lock = threading.Lock()
_running, _collecting = 0, True  # compilations, and the collector's state before the first of them
_compilations = 0


def _spare_the_collector() -> None:
    """Move what one of the first compilations made to the collector's oldest generation.

    A collection of the young objects would prolong a compilation that a product waits for, and finds few.
    """
    global _compilations
    _compilations += 1
    # What the program has frozen is not to be thawed.
    if _compilations <= UNCOLLECTED and gc.get_freeze_count() < FROZEN_BY_PYTHON:
        gc.freeze()
        gc.unfreeze()
