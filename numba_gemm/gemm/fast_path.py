"""Fast path of repeated calls: the same library, layouts, alignment, device, stage, precision and epilogue.

The first such call is checked in full and leaves its launches behind. In the next, only what may differ is looked at:
that the arrays still are what they were, their addresses, whether C overlaps another operand, and which stream is
current. Anything out of the ordinary takes the full check, which decides, and gives the reason if it refuses.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from ..arrays.operand import Operand
from ..arrays.probe import PROBES, probe_of
from ..arrays.streams import Stream, release_finished
from ..kernels.product import VECTOR_BYTES
from ..runtime import epilogue as epilogues
from ..runtime.bound_product import BoundProduct, NoRoomForMaps
from .request import Request

__all__ = ["CallCache", "FirstCall", "remember", "tag_of", "try_fast"]

MAX_CALLS = 1024
MAX_LAUNCHES = 64  # of one call that are kept
# Magnitudes that float32 rounds neither to 0 nor to infinity.
TINY, HUGE = 1.2e-38, 3.4e38

Launched = tuple[BoundProduct, int, int, int, bool]  # byte offsets of A, B, C; whether it takes beta, or adds to C


@dataclass(frozen=True, slots=True)
class CachedCall:
    """A call's launches.

    Attributes
    ----------
    device : int
        Ordinal of the device.
    shape : tuple of int
        Shape of the result.
    launches : tuple of Launched
        Launches, in order.
    reach : tuple of int
        Differences of addresses between which A overlaps C, then those of B, exclusive.
    vectors : tuple of (int, int)
        The same of each of the epilogue's vectors.
    """

    device: int
    shape: tuple[int, ...]
    launches: tuple[Launched, ...]
    reach: tuple[int, int, int, int]
    vectors: tuple[tuple[int, int], ...]


class CallCache(dict[Hashable, CachedCall]):
    """Cached calls by their keys."""

    def first_call(self, tag: Hashable, a: Any, b: Any, out: Any) -> FirstCall | None:
        """Return a cached call for others like it; None if such calls gain nothing."""
        reading = PROBES[type(a)].read(tag, a, b, out)
        call = None if reading is None else self.get(reading[0])
        return FirstCall(tag, a, b, out, call) if call is not None and FirstCall.is_such(call, out) else None


def tag_of(stage: Any, precision: Any, epilogue: Any, vectors: Any) -> Hashable | None:
    """Return what identifies a call beside its arrays; None if it must be checked in full."""
    if type(stage) is not str or type(precision) is not str:
        return None
    if epilogue is None:
        return (stage, precision) if type(vectors) is tuple and not vectors else None
    if type(vectors) is not tuple and type(vectors) is not list:
        return None
    contents = epilogues.identity(epilogue)
    return None if contents is None else (stage, precision, contents)


def try_fast(
    cache: CallCache,
    tag: Hashable,
    a: Any,
    b: Any,
    out: Any,
    alpha: float,
    beta: float,
    stream: Any,
    vectors: Sequence[Any] = (),
) -> Any:
    """Compute the product if the call is in the cache; return its result, or None if nothing was done.

    Parameters
    ----------
    cache : CallCache
        Calls that were remembered.
    tag : hashable
        The call's `tag_of`.
    a, b, out, alpha, beta, stream, vectors
        Those of the public function; alpha and beta are floats.
    """
    probe = PROBES.get(type(a))
    if probe is None or not (TINY < alpha < HUGE or -HUGE < alpha < -TINY) or not -HUGE < beta < HUGE:
        return None
    places: list[int] = []
    if vectors:
        layouts = []
        for vector in vectors:
            found = probe.vector(vector, a)
            if found is None:
                return None
            places.append(found[0])
            layouts.append(found[1:])
        tag = (tag, *layouts)
    reading = probe.read(tag, a, b, out)
    if reading is None:
        return None
    call = cache.get(reading[0])
    if call is None:
        return None
    _, a_place, b_place, c_place = reading
    device = call.device
    queue = probe.stream(a, b, out, device)
    if queue is None or (stream is not None and Stream.of(stream).handle != queue):
        return None
    result = out
    if out is None:
        made = probe.empty(a, call.shape, device) if beta == 0 else None
        if made is None or made[1] % VECTOR_BYTES:
            return None
        result, c_place = made
    else:
        below_a, above_a, below_b, above_b = call.reach
        if below_a < a_place - c_place < above_a or below_b < b_place - c_place < above_b:
            return None
        for place, (below, above) in zip(places, call.vectors):
            if below < place - c_place < above:
                return None
    release_finished()
    try:
        for bound, a_step, b_step, c_step, first in call.launches:
            own_beta = beta if first else 1.0
            bound(alpha, a_place + a_step, b_place + b_step, own_beta, c_place + c_step, queue, *places)
    except NoRoomForMaps:  # such a call has one launch
        return None
    if out is not None and probe.written is not None:
        probe.written(out)
    return result


def remember(
    cache: CallCache,
    tag: Hashable,
    kind: Any,
    given: tuple[Any, Any, Any, Sequence[Any]],
    placed: tuple[Operand, Operand, Operand, Sequence[Operand]],
    request: Request,
    launched: Sequence[Launched],
) -> None:
    """Let calls like this one, which was checked in full and launched, take the fast path.

    Parameters
    ----------
    cache, tag
        As in `try_fast`.
    kind : ArrayKind
        Kind of `a`.
    given : tuple
        a, b, out and the vectors, as the caller passed them.
    placed : tuple
        The same, as kernels read them.
    request : Request
        The call.
    launched : sequence of Launched
        Its launches.
    """
    a, b, out, vectors = given
    probe = probe_of(kind, a)
    if probe is None or not 0 < len(launched) <= MAX_LAUNCHES:
        return
    if len(launched) > 1 and any(bound.launches.maps for bound, *_ in launched):
        return  # one that finds no room for a map could not be undone
    layouts = []
    for vector in vectors:
        found = probe.vector(vector, a)
        if found is None:
            return
        layouts.append(found[1:])
    reading = probe.read((tag, *layouts) if vectors else tag, a, b, out)
    left, right, target, others = placed
    if reading is None or (out is None and target.pointer % VECTOR_BYTES):
        return
    low, high = (address - target.pointer for address in target.extent())

    def reach(operand: Operand) -> tuple[int, int]:
        first, last = (address - operand.pointer for address in operand.extent())
        return low - last, high - first

    spans = (*reach(left), *reach(right))
    call = CachedCall(request.device, request.shape, tuple(launched), spans, tuple(map(reach, others)))
    if len(cache) >= MAX_CALLS:
        cache.clear()
    cache[reading[0]] = call


class FirstCall:
    """The first repeated call of a plan, for calls like it on the current stream.

    Such a call has an `out` and no vectors, and is one sequence of launches for the whole product.

    Parameters
    ----------
    tag : hashable
        The call's `tag_of`.
    a, b, out
        Arrays of the call.
    call : CachedCall
        Its launches.
    """

    __slots__ = ("_call", "_key", "_launch", "_probe", "_tag", "_type")

    def __init__(self, tag: Hashable, a: Any, b: Any, out: Any, call: CachedCall) -> None:
        self._tag, self._call, self._type, self._probe = tag, call, type(a), PROBES[type(a)]
        reading = self._probe.read(tag, a, b, out)
        assert reading is not None, "the call was remembered"
        self._key, self._launch = reading[0], call.launches[0][0].private()

    @staticmethod
    def is_such(call: CachedCall, out: Any) -> bool:
        """Return True if a call has an `out`, no vectors, and one sequence of launches."""
        if out is None or call.vectors or len(call.launches) != 1:
            return False
        bound, *steps, first = call.launches[0]
        return not any(steps) and first and not bound.memory_given

    def repeat(self, a: Any, b: Any, out: Any, alpha: float, beta: float, vectors: Any) -> bool:
        """Compute the product if the call is like the first one; return whether it was."""
        if type(a) is not self._type or type(vectors) is not tuple or vectors:
            return False
        probe = self._probe
        reading = probe.read(self._tag, a, b, out)
        if reading is None or reading[0] != self._key:
            return False
        if not (TINY < alpha < HUGE or -HUGE < alpha < -TINY) or not -HUGE < beta < HUGE:
            return False
        _, a_place, b_place, c_place = reading
        call = self._call
        below_a, above_a, below_b, above_b = call.reach
        if below_a < a_place - c_place < above_a or below_b < b_place - c_place < above_b:
            return False
        queue = probe.stream(a, b, out, call.device)
        if queue is None:
            return False
        release_finished()
        if not self._launch(alpha, a_place, b_place, beta, c_place, queue):
            return False
        if probe.written is not None:
            probe.written(out)
        return True
