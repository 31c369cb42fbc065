"""Kernel launches, laid out in memory as the driver reads them.

All words that change from call to call are contiguous in memory, and the parameters of every launch point to them. So
one packing updates the parameters of all launches, and a launch is one call of the driver.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from ctypes import byref
from functools import cache, partial
from typing import Any

from cuda.bindings import driver

from ..kernels.step import MatrixAt, Moving, Slot, Step
from .driver import failure, pointer_argument, raw

ALWAYS = tuple(Moving(slot) for slot in (Slot.ALPHA, Slot.BETA, Slot.A, Slot.B, Slot.C))


# The driver's ``CUlaunchConfig``: grid, block, bytes of dynamic shared memory, stream, attributes, and their number.
CONFIG, STREAM, STREAM_AT = struct.Struct("=7I4xQQI4x"), struct.Struct("=Q"), 32


class _LaunchAttribute(ctypes.Structure):
    """The driver's ``CUlaunchAttribute``, of a value that is an int."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16)]


IDS = driver.CUlaunchAttributeID
OVERLAPS = int(IDS.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
CARVE_OUT = int(IDS.CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT)
CLUSTER = int(IDS.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)


NO_ATTRIBUTES = 0, 0  # address and number
_attributes: dict[tuple[bool, int, int], Any] = {}  # never removed: launches point to them; the driver only reads them


def attributes_of(overlaps: bool, carve_out: int, cluster: int) -> tuple[int, int]:
    """Return the address and the number of a launch's attributes, see `Step`, as the driver reads them."""
    found = [_LaunchAttribute(OVERLAPS, b"", (1,))] * overlaps
    if carve_out >= 0:
        found.append(_LaunchAttribute(CARVE_OUT, b"", (carve_out,)))
    if cluster > 1:
        found.append(_LaunchAttribute(CLUSTER, b"", (cluster, 1, 1)))
    # One operation: if several threads make them, all get those that stay.
    made = _attributes.setdefault((overlaps, carve_out, cluster), (_LaunchAttribute * len(found))(*found))
    return ctypes.addressof(made), len(made)


class FrameLayout:
    """Places of all words of some launches, moving and constant; shared by their frames.

    Attributes
    ----------
    moving : tuple of Moving
        The distinct words that move: alpha, beta, A, B and C first, then the others by slot.
    parts : tuple of Moving
        Those of the others that are addresses within A, B and C, behind the first element; they come first.
    """

    __slots__ = ("_configs", "_moved", "_places", "_starts", "_words", "moving", "packing", "parts")

    def __init__(self, steps: Sequence[Step]) -> None:
        # Words that do not move are integers, also NumPy's: shapes of arrays may have these.
        words: list[Any] = []
        moved, found, starts, configs = [], [], [], []
        for kernel, grid, block, arguments, overlaps, carve_out, cluster in steps:
            plain = not overlaps and carve_out < 0 and cluster == 1
            attributes = NO_ATTRIBUTES if plain else attributes_of(overlaps, carve_out, cluster)
            configs.append(CONFIG.pack(*grid, *block, kernel.dynamic_shared, 0, *attributes))
            starts.append(8 * len(words))
            for argument in arguments:
                if type(argument) is MatrixAt:  # most are; their address alone moves
                    place, (rows, cols, row_stride, col_stride, _, _) = argument
                    moved.append(len(words))
                    found.append(place)
                    words += (0, rows, cols, row_stride, col_stride)
                    continue
                if Moving not in map(type, argument.words):
                    words += argument.words
                    continue
                for word in argument.words:
                    if type(word) is Moving:
                        moved.append(len(words))
                        found.append(word)
                        word = 0
                    words.append(word)
        self._starts, self._configs, self._words, self._moved = starts, b"".join(configs), words, moved
        others = set(found).difference(ALWAYS)
        self.moving: tuple[Any, ...] = ALWAYS + tuple(sorted(others)) if others else ALWAYS
        self.parts = tuple([word for word in self.moving[len(ALWAYS) :] if word[0] <= Slot.C])
        places = dict(zip(self.moving, range(0, 8 * len(self.moving), 8)))
        self._places = [places[word] for word in found]
        self.packing = _packing(len(places))

    def memory(self) -> tuple[Any, list[int], int]:
        """Return memory with the constant words in place, and where in it each launch's parameters and the configs are.

        It holds the moving words; all words, those that move unused; the address of each word; a ``CUlaunchConfig`` per
        launch.
        """
        first, count, configs = 8 * len(self.moving), len(self._words), self._configs
        tables = first + 8 * count
        end = tables + 8 * count
        memory = (ctypes.c_char * (end + len(configs)))()
        start = ctypes.addressof(memory)
        addresses = [*range(start + first, start + tables, 8)]
        for i, place in zip(self._moved, self._places):
            addresses[i] = start + place
        _contents(2 * count, len(configs)).pack_into(memory, first, *self._words, *addresses, configs)
        return memory, [tables + place for place in self._starts], end


@cache
def _packing(count: int) -> struct.Struct:
    """Return the format of `count` moving words; the first two are float32."""
    return struct.Struct("=f4xf4x" + "q" * (count - 2))


@cache
def _contents(count: int, size: int) -> struct.Struct:
    """Return the format of `count` integers and `size` bytes."""
    return struct.Struct(f"={count}q{size}s")


def _with_parts(pack: Callable[..., None], parts: Sequence[Moving]) -> Callable[..., None]:
    """Return ``(alpha, beta, a, b, c, *others)``, which packs these, and parts of A, B and C before the others."""
    if not parts:
        return pack
    placed = [(slot - Slot.A, offset) for slot, offset in parts]

    def pack_with_parts(alpha: float, beta: float, a: int, b: int, c: int, *others: int) -> None:
        operands = a, b, c
        pack(alpha, beta, a, b, c, *[operands[i] + offset for i, offset in placed], *others)

    return pack_with_parts


class Frame:
    """Launches with values for their moving words; for one thread at a time.

    The driver has copied the parameters when a launch returns, so a frame may serve the next call.

    Parameters
    ----------
    layout : FrameLayout
        Places of the words of all launches.
    handles : sequence of int
        The launches' kernels, as the driver knows them.
    context : int
        Handle of the device's context.

    Attributes
    ----------
    move : callable
        Takes new values for the moving words, in the order of `FrameLayout.moving`, but for parts of operands.
    move_operands : callable
        Takes new values for the first five of them alone: alpha, beta, A, B and C, whose parts move with them.
    words_of : tuple of int
        For the caller to note: the addresses of scratch memory and counters, behind those of the operands of tensor
        maps, if any, that the moving words behind the first five are of.
    in_context : callable
        ``()`` to True if the device's context is current in this thread.
    launch : callable
        ``(stream)``: enqueues the kernels on a stream of the device, whose context is current.
    enqueue : callable
        ``(alpha, a, b, beta, c, stream)``: takes these scalars and operands, and enqueues the kernels; returns False,
        with nothing done, if another context is current.
    """

    __slots__ = ("enqueue", "in_context", "launch", "move", "move_operands", "words_of")

    def __init__(self, layout: FrameLayout, handles: Sequence[int], context: int) -> None:
        memory, tables, configs = layout.memory()
        places = range(configs, configs + len(tables) * CONFIG.size, CONFIG.size)
        calls = [
            (byref(memory, place), pointer_argument(handle), byref(memory, table), None)
            for place, handle, table in zip(places, handles, tables, strict=True)
        ]
        launch_kernel, get_current = raw("cuLaunchKernelEx"), raw("cuCtxGetCurrent")
        current = ctypes.c_void_p(None)
        current_at = byref(current)
        of_stream = 0
        operands = _packing(len(ALWAYS) + len(layout.parts))
        move_operands = _with_parts(partial(operands.pack_into, memory, 0), layout.parts)

        # Functions of cells, which are read faster than attributes.

        def in_context() -> bool:
            return not get_current(current_at) and current.value == context

        def launch(stream: int) -> None:
            nonlocal of_stream
            if stream != of_stream:
                of_stream = stream
                for place in places:
                    STREAM.pack_into(memory, place + STREAM_AT, stream)
            for call in calls:
                if status := launch_kernel(*call):
                    raise failure("cuLaunchKernelEx", status)

        def enqueue(alpha: float, a: int, b: int, beta: float, c: int, stream: int) -> bool:
            if get_current(current_at) or current.value != context:  # as `in_context`
                return False
            move_operands(alpha, beta, a, b, c)
            if stream != of_stream:
                launch(stream)
                return True
            for call in calls:
                if status := launch_kernel(*call):
                    raise failure("cuLaunchKernelEx", status)
            return True

        self.words_of: tuple[int, ...] = (0, 0)
        self.move: Callable[..., None] = _with_parts(partial(layout.packing.pack_into, memory, 0), layout.parts)
        self.move_operands: Callable[..., None] = move_operands
        self.in_context: Callable[[], bool] = in_context
        self.enqueue: Callable[[float, int, int, float, int, int], bool] = enqueue
        self.launch: Callable[[int], None] = launch
