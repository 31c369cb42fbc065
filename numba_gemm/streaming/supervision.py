"""Execution on a separate thread, which an interrupt ends in an orderly way."""

from __future__ import annotations

import _thread
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from .host import Stopped
from .sharing import Stop

WAIT_S = 0.1


def supervised(work: Callable[[Stop], None]) -> None:
    """Do work on a separate thread, which an interrupt of this thread does not reach but ends in an orderly way.

    An interrupt may come between any two steps of Python, such as an allocation and its record, or a lock and its
    release, and is raised in the main thread only. So this thread takes no Python lock: the functions by which it waits
    and starts threads are written in C.
    """
    stop, over = Stop(), SimpleQueue[None]()
    begun, ended, failures = list[bool](), list[bool](), list[BaseException]()

    def guarded() -> None:
        begun.append(True)
        try:
            if not stop.event.is_set():
                work(stop)
        except Stopped:
            pass  # by an interrupt, which is raised below
        except BaseException as error:
            failures.append(error)
        finally:
            ended.append(True)
            over.put(None)

    def is_over() -> bool:
        return bool(ended) or (stop.event.is_set() and not begun)

    came: BaseException | None = None
    started = told = False
    while not is_over():
        try:
            if not started:
                started = True
                _thread.start_new_thread(guarded, ())
            while not is_over():
                if came is not None and not told:
                    try:
                        _thread.start_new_thread(stop, (came,))
                    except RuntimeError:  # too many threads
                        stop(came)
                    told = True
                with suppress(Empty):
                    over.get(timeout=WAIT_S)  # not forever: that could not be interrupted on all systems
        except BaseException as raised:
            came = raised if came is None else came
    failure = failures.pop() if failures else came
    if failure is not None:
        try:
            raise failure
        finally:
            del failure, came  # they refer to this frame
