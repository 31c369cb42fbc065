"""The short way of a call that is like one before: the same extents, strides, boundaries, device and stage.

The first such call is checked in full and leaves its launch behind. For the next, only what may differ is looked at:
that the arrays still are what they were, where they lie, whether C reaches over A or B, and which stream is current.
Whatever is out of the ordinary takes the long way, which decides, and says why if it refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..runtime.launch import VECTOR_BYTES, Launch
from .streams import Stream, release_finished

Sight = tuple[tuple[Any, ...], int, int, int]  # what a launch is known by; the addresses of a, b and out, 0 for none

MAX_SEEN = 1024
# Magnitudes that float32 rounds neither to 0 nor to infinity.
TINY, HUGE = 1.2e-38, 3.4e38


@dataclass(frozen=True, slots=True)
class Glance:
    """How to look at the arrays of one type.

    Attributes
    ----------
    read : callable
        ``(tag, a, b, out)`` to a `Sight`; to None if `a`, `b` and `out` are not float32 arrays of this type on one
        device, or are anything else that the long way looks at.
    stream : callable
        ``(a, b, out, device)`` to the handle of the stream that all of them work on; None if there are several.
    empty : callable
        ``(a, shape, device)`` to a new array on that stream, and its address; None where that takes more.
    written : callable, optional
        Tells the library that `out` has been written.
    """

    read: Callable[[Any, Any, Any, Any], Sight | None]
    stream: Callable[[Any, Any, Any, int], int | None]
    empty: Callable[[Any, tuple[int, ...], int], tuple[Any, int] | None]
    written: Callable[[Any], None] | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """A launch, the shape of its result, and whether it computes the transpose, with A for B and B for A."""

    launch: Launch
    shape: tuple[int, ...]
    swapped: bool


Seen = dict[tuple[Any, ...], Known]


GLANCES: dict[type, Glance] = {}


def again(seen: Seen, tag: Any, a: Any, b: Any, out: Any, alpha: float, beta: float, stream: Any) -> Any:
    """Compute the product if the call is like one in `seen`; return its result, or None if nothing was done.

    Parameters
    ----------
    seen : dict
        What `remember` was given.
    tag : hashable
        What else the launch depends on.
    a, b, out, alpha, beta, stream
        Those of the public function; alpha and beta are floats.
    """
    glance = GLANCES.get(type(a))
    if glance is None or not (TINY < alpha < HUGE or -HUGE < alpha < -TINY) or not -HUGE < beta < HUGE:
        return None
    sight = glance.read(tag, a, b, out)
    if sight is None:
        return None
    known = seen.get(sight[0])
    if known is None:
        return None
    launch = known.launch
    _, a_place, b_place, c_place = sight
    if known.swapped:
        a_place, b_place = b_place, a_place
    queue = glance.stream(a, b, out, launch.device)
    if queue is None or (stream is not None and Stream.of(stream).handle != queue):
        return None
    release_finished()
    if out is None:
        made = glance.empty(a, known.shape, launch.device) if beta == 0 else None
        if made is None or made[1] % VECTOR_BYTES:
            return None
        launch(alpha, a_place, b_place, beta, made[1], queue)
        return made[0]
    if not launch.apart(a_place, b_place, c_place):
        return None
    launch(alpha, a_place, b_place, beta, c_place, queue)
    if glance.written is not None:
        glance.written(out)
    return out


def glance_of(kind: Any, array: Any) -> Glance | None:
    """How to look at arrays of this array's type, which is of that kind; None if the long way is the only one."""
    glance = GLANCES.get(type(array)) or kind.glance(array)
    if glance is not None:
        GLANCES[type(array)] = glance
    return glance


def remember(seen: Seen, tag: Any, glance: Glance, operands: tuple[Any, Any, Any], result: int, known: Known) -> None:
    """Let calls like this one, which was checked in full and launched, take the short way.

    Parameters
    ----------
    seen, tag
        As in `again`.
    glance : Glance
        That of `a`.
    operands : tuple
        `a`, `b` and `out` as the caller passed them.
    result : int
        Address of C.
    known : Known
        What was launched.
    """
    a, b, out = operands
    sight = glance.read(tag, a, b, out)
    if sight is None or (out is None and result % VECTOR_BYTES):
        return
    if len(seen) >= MAX_SEEN:
        seen.clear()
    seen[sight[0]] = known
