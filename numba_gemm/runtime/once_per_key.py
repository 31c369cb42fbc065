"""Thread-safe memoisation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Any

__all__ = ["OncePerKey"]

MAX_EPILOGUES = 256  # kernels with an epilogue that are kept; others are read from disk, or compiled, again


class OncePerKey:
    """Thread-safe memoisation: computes each key's value once; threads with other keys do not wait.

    A program may make epilogues without end, from closures over numbers that change. Of the kernels with an epilogue,
    the `MAX_EPILOGUES` last ones are kept.
    """

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        self._compute = compute
        self._values: dict[Hashable, Any] = {}
        self._locks: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()

    def __contains__(self, key: Any) -> bool:
        """Return True if the value of a key is known."""
        return key in self._values

    def known(self, keys: Iterable[Any]) -> list[Any] | None:
        """Return the values of several keys, which are objects that are true; None unless all are known."""
        values = list(map(self._values.get, keys))
        return values if all(values) else None

    def __call__(self, key: Any) -> Any:
        """Return the value of a key."""
        if (value := self._values.get(key)) is not None:  # one operation: another thread may delete it
            return value
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if (value := self._values.get(key)) is not None:
                return value
            value = self._compute(key)
            with self._lock:
                self._values[key] = value
                self._locks.pop(key, None)
                passing = [other for other in self._values if getattr(other, "epilogue", None) is not None]
                for other in passing[:-MAX_EPILOGUES]:
                    del self._values[other]
            return value
