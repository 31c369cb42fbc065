"""Kernel launches, laid out in memory as the driver reads them.

All words that change from call to call lie in one run of memory, into which the parameters of every launch point. So
one packing updates the parameters of all launches, and a launch is one call of the driver.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

from cuda.bindings import driver

from ..kernels.step import Moving, Slot, Step
from .driver import failure, raw

FLOATS = (Slot.ALPHA, Slot.BETA)
ALWAYS = tuple(Moving(slot) for slot in (Slot.ALPHA, Slot.BETA, Slot.A, Slot.B, Slot.C))


class LaunchConfig(ctypes.Structure):
    """The driver's ``CUlaunchConfig``."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


class _LaunchAttribute(ctypes.Structure):
    """The driver's ``CUlaunchAttribute``, of a value that is an int."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16)]


def moving_words(steps: Iterable[Step]) -> tuple[Moving, ...]:
    """Return the distinct words of launches that move: alpha, beta, A, B and C first, then the others by slot."""
    words = (word for step in steps for argument in step.arguments for word in argument.words)
    found = {word for word in words if isinstance(word, Moving)}
    return ALWAYS + tuple(sorted(found - set(ALWAYS), key=lambda word: (word.slot, word.offset)))


@cache
def _packing(count: int) -> struct.Struct:
    """Return the format of `count` moving words, of which the first two are float32."""
    return struct.Struct("=f4xf4x" + "q" * (count - 2))


class Frame:
    """Launches with values for their moving words; for one thread at a time.

    The driver has copied the parameters when a launch returns, so a frame may serve the next call.

    Parameters
    ----------
    steps : sequence of Step
        Launches, in order.
    handles : sequence of int
        Their kernels, as the driver knows them.
    context : int
        Handle of the device's context.

    Attributes
    ----------
    move : callable
        Takes new values for the moving words, in the order of `moving_words`.
    """

    __slots__ = ("_calls", "_configs", "_context", "_current", "_current_place", "_get_current", "_held", "_launch",
                 "_stream", "move")  # fmt: skip

    def __init__(self, steps: Sequence[Step], handles: Sequence[int], context: int) -> None:
        words = moving_words(steps)
        packing = _packing(len(words))
        values = ctypes.create_string_buffer(packing.size)
        places = {word: ctypes.addressof(values) + 8 * i for i, word in enumerate(words)}
        self.move: Callable[..., None] = partial(packing.pack_into, values, 0)
        self._held: list[Any] = [values]
        self._calls, self._configs = [], []
        for step, handle in zip(steps, handles, strict=True):
            parameters = [word for argument in step.arguments for word in argument.words]
            constants = (ctypes.c_longlong * len(parameters))(*(0 if isinstance(x, Moving) else x for x in parameters))
            first = ctypes.addressof(constants)
            pointers = [places[x] if isinstance(x, Moving) else first + 8 * i for i, x in enumerate(parameters)]
            table = (ctypes.c_void_p * len(pointers))(*pointers)
            config = LaunchConfig(step.grid, step.block, step.kernel.dynamic_shared)
            if step.overlaps:
                serialization = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
                attribute = _LaunchAttribute(int(serialization), b"", (1,))
                config.attributes, config.attribute_count = ctypes.addressof(attribute), 1
                self._held.append(attribute)
            self._held += [constants, table]
            self._configs.append(config)
            arguments = ctypes.addressof(config), handle, ctypes.addressof(table), None
            self._calls.append(tuple(map(ctypes.c_void_p, arguments)))
        self._context, self._stream, self._current = context, 0, ctypes.c_void_p(None)
        self._current_place = ctypes.c_void_p(ctypes.addressof(self._current))
        self._launch, self._get_current = raw("cuLaunchKernelEx"), raw("cuCtxGetCurrent")

    def in_context(self) -> bool:
        """Whether the device's context is current in this thread."""
        return not self._get_current(self._current_place) and self._current.value == self._context

    def launch(self, stream: int) -> None:
        """Enqueue the kernels on a stream of the device, whose context is current."""
        if stream != self._stream:
            self._stream = stream
            for config in self._configs:
                config.stream = stream
        launch = self._launch
        for call in self._calls:
            if status := launch(*call):
                raise failure("cuLaunchKernelEx", status)
