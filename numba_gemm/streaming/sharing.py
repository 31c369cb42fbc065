"""State that the parts of a streamed product share: blocks of C to compute, the account of complete parts, and the end.

One device or several compute a product. Each takes blocks of C until none is left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .blocking import Blocking, Part
from .host import Flag, Stopped

__all__ = ["Account", "Deal", "Done", "Stop", "at_once"]


@dataclass(frozen=True)
class Done:
    """Completed part of `out`.

    Attributes
    ----------
    rows, cols : slice
        Rows and columns of the part.
    number, count : int
        Number of complete parts, including this one, and number of all parts.
    elements, of : int
        The same, counted in elements.
    """

    rows: slice
    cols: slice
    number: int
    count: int
    elements: int
    of: int


class Deal:
    """Blocks of C, dealt to devices: each begins with the block of its own number, then takes the next one left.

    So each device has a block even if another one is ready much earlier.

    Parameters
    ----------
    count : int
        Number of blocks.
    devices : int
        Number of devices.
    """

    def __init__(self, count: int, devices: int) -> None:
        self.devices = devices
        self._first = set(range(min(count, devices)))
        self._rest = iter(range(devices, count))
        self._lock = threading.Lock()

    def next(self, device: int) -> int | None:
        """Take a block for a device; None if none is left."""
        with self._lock:
            if device in self._first:
                self._first.remove(device)
                return device
            return next(self._rest, None)


class Account:
    """Account of the complete parts of C, which come from threads of all devices and are told one at a time."""

    def __init__(self, blocking: Blocking, tell: Callable[[Done], object]) -> None:
        self._tell, self._lock = tell, threading.Lock()
        self._count = sum(len(blocking.strips(block)) for block in range(blocking.count))
        self._number, self._elements, self._of = 0, 0, blocking.m * blocking.n

    def __call__(self, rows: Part, cols: Part) -> None:
        """Add a part."""
        with self._lock:
            self._number += 1
            self._elements += rows.extent * cols.extent
            self._tell(Done(rows.slice, cols.slice, self._number, self._count, self._elements, self._of))


class Stop:
    """Early end of a product, by the first error or interrupt of any thread."""

    def __init__(self) -> None:
        self.event = Flag()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._then: list[Callable[[], object]] = []

    def __call__(self, error: BaseException) -> None:
        """End the product."""
        with self._lock:
            if self._error is None:
                self._error = error
            self.event.set()
            followers = [*self._then]
        for then in followers:
            then()

    def follow(self, then: Callable[[], object]) -> None:
        """Call `then` when the product is stopped, at once if it has been."""
        with self._lock:
            self._then.append(then)
        if self.event.is_set():
            then()

    def leave(self, then: Callable[[], object]) -> None:
        """Do not call `then` any more: there is nothing left to end."""
        with self._lock:
            self._then.remove(then)

    def check(self) -> None:
        """Raise the error, if there is one, and forget it, so that what it refers to may be freed."""
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error


def at_once(works: Sequence[Callable[[], object]], stop: Stop) -> None:
    """Do works at the same time, the first one on this thread; once all have ended, raise what stopped them."""

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except Stopped:
            pass
        except BaseException as error:
            stop(error)

    threads = [threading.Thread(target=guarded, args=(work,), name="streamed_sgemm") for work in works[1:]]
    try:
        for thread in threads:
            thread.start()
        guarded(works[0])
    except BaseException as error:  # a thread that cannot be started
        stop(error)
    finally:
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    stop.check()
