"""Fast path of repeated calls: the same library, layouts, alignment, device, stage, precision and epilogue.

The first such call is checked in full and leaves its launches behind. In the next, only what may differ is looked at:
that the arrays still are what they were, their addresses, whether C overlaps another operand, and which stream is
current. Matrices of other extents and strides than those of any call before are bound here, if all else is as in a call
that was checked. Anything out of the ordinary takes the full check, which decides, and gives the reason if it refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from ..arrays.operand import Operand
from ..arrays.probe import PROBES, alike, probe_of
from ..arrays.streams import Stream, held, release_finished
from ..device.units import FLOAT32_BYTES, VECTOR_BYTES
from ..kernels.product import Layout, Product, dense
from ..kernels.stage import MAX_K
from ..runtime import device as devices
from ..runtime import epilogue as epilogues
from ..runtime.bound_product import NoRoomForMaps
from ..runtime.launch import Launched, bind_product
from . import heuristics
from .fp32_auto import resolved
from .precision import FP32_AUTO, canonical
from .request import Request, chosen

__all__ = ["CallCache", "Repeated", "remember", "tag_of", "try_fast"]

Repeated = Callable[[Any, Any, Any, float, float], bool]  # of a, b, out, alpha and beta

MAX_CALLS = 1024
MAX_LAUNCHES = 64  # of one call that are kept
MAX_ELEMENTS = 1 << 40  # of a result that is allocated without the full check
# Magnitudes that float32 rounds neither to 0 nor to infinity.
TINY, HUGE = 1.2e-38, 3.4e38


class CachedCall(NamedTuple):
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
    """Cached calls by their keys.

    Parameters
    ----------
    any_extents : bool
        True if calls may be added that differ in extents and strides alone from one that was checked in full.

    Attributes
    ----------
    checked : set of tuple
        Tag, type of the arrays, and device of calls without an epilogue that were checked in full; empty unless
        `any_extents`.
    generation : object
        Another one after each `clear`. Kernels that were chosen in an earlier generation are not added.
    """

    def __init__(self, any_extents: bool = False) -> None:
        self.any_extents = any_extents
        self.checked: set[tuple[Hashable, type, int]] = set()
        self.generation = object()

    def clear(self) -> None:
        """Remove all calls, and those that other threads are about to add."""
        self.generation = object()
        self.checked.clear()
        super().clear()

    def store(self, key: Hashable, call: CachedCall, generation: object) -> None:
        """Add a call whose kernels were chosen in a generation; if there are too many, instead of all others."""
        if len(self) >= MAX_CALLS:
            super().clear()
        self[key] = call
        if self.generation is not generation:  # asked afterwards: a later `clear` removes the call
            self.pop(key, None)

    def repeating(self, tag: Hashable, a: Any, b: Any, out: Any) -> Repeated | None:
        """Return a function for calls like a cached one, on the current stream; None if such calls gain nothing."""
        reading = PROBES[type(a)].read(tag, a, b, out)
        call = None if reading is None else self.get(reading[0])
        if call is None or out is None or call.vectors or len(call.launches) != 1:
            return None
        bound, *steps, first = call.launches[0]
        return None if any(steps) or not first or bound.memory_given else _repeating(tag, a, b, out, call)


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
    if probe is None or not (alpha == 1.0 or TINY < alpha < HUGE or -HUGE < alpha < -TINY):
        return None
    if not (beta == 0.0 or -HUGE < beta < HUGE):
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
    call = cache.get(reading[0]) or _of_other_extents(cache, reading[0], probe.stride_bytes)
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
        if places:
            for place, (below, above) in zip(places, call.vectors):
                if below < place - c_place < above:
                    return None
    if held:
        release_finished()
    try:
        for bound, a_step, b_step, c_step, first in call.launches:
            own_beta = beta if first else 1.0
            bound.enqueue(alpha, a_place + a_step, b_place + b_step, own_beta, c_place + c_step, queue, places)
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
    generation: object,
) -> None:
    """Let calls like this one, which was checked in full and launched, take the fast path.

    Parameters
    ----------
    cache, tag
        As in `try_fast`.
    kind : ArrayKind
        Kind of `a`.
    given : tuple
        a, b, out and the vectors, as the caller passed them; parts of prepared operands count as vectors.
    placed : tuple
        The same, as kernels read them.
    request : Request
        The call.
    launched : sequence of Launched
        Its launches.
    generation : object
        The cache's, from before their kernels were chosen.
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
    cache.store(reading[0], call, generation)
    if cache.any_extents and not vectors and request.epilogue is None:
        cache.checked.add((tag, type(a), request.device))


def _of_other_extents(cache: CallCache, key: Any, stride_bytes: int) -> CachedCall | None:
    """Return the call of a key, and keep it, if a call was checked that differs in extents and strides alone.

    Only for matrices, without an epilogue, whose result has rows that do not overlap; None for others, and for shapes
    that do not fit.
    """
    tag, own, device, offsets, a_shape, a_strides, b_shape, b_strides, result = key
    if (tag, own, device) not in cache.checked or len(a_shape) != 2 or len(b_shape) != 2:
        return None
    (m, k), (rows, n) = a_shape, b_shape
    if rows != k or not m or not n or not 0 < k <= MAX_K or m * n > MAX_ELEMENTS:
        return None
    shape, strides = ((m, n), (n, 1)) if result is None else result
    if shape != (m, n):
        return None
    unit = FLOAT32_BYTES if result is None else stride_bytes
    a = Layout(m, k, a_strides[0] * stride_bytes, a_strides[1] * stride_bytes, offsets >> 8)
    b = Layout(k, n, b_strides[0] * stride_bytes, b_strides[1] * stride_bytes, offsets >> 4 & 15)
    c = Layout(m, n, strides[0] * unit, strides[1] * unit, offsets & 15)
    if c.col_stride != FLOAT32_BYTES or c.row_stride < n * FLOAT32_BYTES:
        return None
    if (a.row_stride | a.col_stride | b.row_stride | b.col_stride | c.row_stride) % FLOAT32_BYTES or offsets & 0x333:
        return None
    generation, (stage, precision) = cache.generation, tag
    product, gpu = Product(a, b, c), devices.device_properties(device)
    if (precision := canonical(precision)) == FP32_AUTO:
        precision = resolved(precision, product._replace(c=dense("N", m, n)), gpu)  # as for a new C
    wanted = heuristics.problem(product, gpu, precision)
    launched = bind_product(product, chosen(stage, device, wanted).selected, device)
    if len(launched) > MAX_LAUNCHES or (len(launched) > 1 and any(bound.launches.maps for bound, *_ in launched)):
        return None
    high, (a_low, a_high), (b_low, b_high) = c.span[1], a.span, b.span  # C begins with its first element
    call = CachedCall(device, (m, n), tuple(launched), (-a_high, high - a_low, -b_high, high - b_low), ())
    cache.store(key, call, generation)
    return call


def _repeating(tag: Hashable, a: Any, b: Any, out: Any, call: CachedCall) -> Repeated:
    """Return a function that computes a product like one that was remembered, and returns False for any other.

    The call has an `out` and no vectors, and is one sequence of launches for the whole product.
    """
    probe = PROBES[type(a)]
    reading = probe.read(tag, a, b, out)
    assert reading is not None, "the call was remembered"
    places_of, launch = alike(probe, reading[0], a, b, out), call.launches[0][0].private()
    written = probe.written
    below_a, above_a, below_b, above_b = call.reach

    def repeat(a: Any, b: Any, out: Any, alpha: float, beta: float) -> bool:
        found = places_of(a, b, out)
        if found is None:
            return False
        if not (alpha == 1.0 or TINY < alpha < HUGE or -HUGE < alpha < -TINY):
            return False
        if not (beta == 0.0 or -HUGE < beta < HUGE):
            return False
        a_place, b_place, c_place, queue = found
        if below_a < a_place - c_place < above_a or below_b < b_place - c_place < above_b:
            return False
        if held:
            release_finished()
        if not launch(alpha, a_place, b_place, beta, c_place, queue):
            return False
        if written is not None:
            written(out)
        return True

    return repeat
