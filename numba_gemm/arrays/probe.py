"""Probes: fast readers of one library's arrays, for calls like an earlier one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

# The key of a call, and the addresses of a, b and out; 0 without an out. The key is a tuple: the call's tag; type of
# the arrays; device; the three addresses modulo 16, four bits each; shape and strides of a, of b, and of out or None.
Reading = tuple[Hashable, int, int, int]
Alike = Callable[[Any, Any, Any], tuple[int, int, int, int] | None]


@dataclass(frozen=True, slots=True)
class Probe:
    """Functions that read arrays of one type.

    Attributes
    ----------
    read : callable
        ``(tag, a, b, out)`` to a `Reading`, whose key includes the tag, or a `Typed` one if `a` and `b` are not both
        float32; None if `a`, `b` and `out` are not arrays of this type on one device, or have any other property that
        only the full check handles.
    vector : callable
        ``(vector, a)`` to its address, size in elements, stride in bytes and device; None in the same cases, and if
        its stream is not that of `a`.
    stream : callable
        ``(a, b, out, device)`` to the handle of the stream that all of them use; None if there are several.
    empty : callable
        ``(a, shape, device)`` to a new array on that stream and its address; None if the full path has to allocate it.
    written : callable, optional
        Notifies the library that `out` has been written.
    alike : callable, optional
        The key of a reading with an out, and its arrays, to a function of ``(a, b, out)`` that returns their addresses
        and stream if a reading of them has the same key, else None; or to None. By default they are read.
    stride_bytes : int
        Bytes of the unit in which a reading's key gives strides.
    """

    read: Callable[[Any, Any, Any, Any], Reading | None]
    vector: Callable[[Any, Any], tuple[int, int, int, int] | None]
    stream: Callable[[Any, Any, Any, int], int | None]
    empty: Callable[[Any, tuple[int, ...], int], tuple[Any, int] | None]
    written: Callable[[Any], None] | None = None
    alike: Callable[[Any, Any, Any, Any], Alike | None] | None = None
    stride_bytes: int = 1


PROBES: dict[type, Probe] = {}


class Typed(NamedTuple):
    """Tag of a call whose A and B are not both float32.

    Attributes
    ----------
    tag : hashable
        The call's own tag.
    a, b : str
        Dtypes.
    """

    tag: Hashable
    a: str
    b: str


def typed(names: Mapping[Any, str], tag: Hashable, a: Any, b: Any) -> Typed | None:
    """Return the tag of a call whose operands have these dtypes; None unless both have a name."""
    first, second = names.get(a), names.get(b)
    return None if first is None or second is None else Typed(tag, first, second)


def alike(probe: Probe, key: Any, a: Any, b: Any, out: Any) -> Alike:
    """Return a function for arrays like those of a reading with an out; see `Probe.alike`."""
    found = None if probe.alike is None or type(key[0]) is Typed else probe.alike(key, a, b, out)
    if found is not None:
        return found
    tag, own, device, read, stream = key[0], key[1], key[2], probe.read, probe.stream
    if type(tag) is Typed:
        tag = tag.tag

    def places(a: Any, b: Any, out: Any) -> tuple[int, int, int, int] | None:
        if type(a) is not own:
            return None
        reading = read(tag, a, b, out)
        if reading is None or reading[0] != key:
            return None
        queue = stream(a, b, out, device)
        return None if queue is None else (*reading[1:], queue)

    return places


def probe_of(kind: Any, array: Any) -> Probe | None:
    """Return the probe for arrays of this array's type and kind; None if they need the full check."""
    probe = PROBES.get(type(array)) or kind.probe(array)
    if probe is not None:
        PROBES[type(array)] = probe
    return probe
