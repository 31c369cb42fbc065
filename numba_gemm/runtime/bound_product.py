"""A product with everything decided but addresses, scalars and stream: the one way in which kernels are launched."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

from ..kernels.step import Launches, Moving, Slot
from .driver import device_scope, zero_is_per_thread
from .frame import ALWAYS, Frame, FrameLayout
from .tensor_maps import TensorMaps
from .workspace import Lease, Workspace, Workspaces, identity, total_bytes

COUNTERS = Moving(Slot.COUNTERS)


class NoRoomForMaps(Exception):
    """The device has no place for another tensor map; nothing has been launched."""


PrivateLaunches = Callable[[float, int, int, float, int, int], bool]  # alpha, a, b, beta, c, stream


class BoundProduct:
    """The launches of a product of operands of fixed layouts on one device; safe from several threads.

    Parameters
    ----------
    device : int
        Ordinal of the device.
    context : int
        Handle of its context.
    launches : Launches
        Steps, and the memory that they need.
    handles : sequence of int
        The steps' kernels, as the driver knows them.
    workspaces, tensor_maps
        Those of the device.
    workspace : Workspace, optional
        Memory for the launches, whose calls must follow each other. By default the stream's.
    """

    __slots__ = (
        "_context",
        "_counts",
        "_frames",
        "_handles",
        "_layout",
        "_maps",
        "_memory",
        "_offsets",
        "_operands_alone",
        "_parts_read",
        "_read",
        "_tensor_maps",
        "device",
        "launches",
        "workspaces",
    )

    def __init__(
        self,
        device: int,
        context: int,
        launches: Launches,
        handles: Sequence[int],
        workspaces: Workspaces,
        tensor_maps: TensorMaps,
        workspace: Workspace | None = None,
    ) -> None:
        if workspace is not None and not workspace.holds(*(needs := (launches.scratch_bytes, launches.counters))):
            raise ValueError(
                f"workspace holds {workspace.size} bytes and {workspace.counters} counters; expected {needs[0]} and "
                f"{needs[1]}; pass an array of {total_bytes(*needs)} bytes, or none"
            )
        self.device, self.launches = device, launches
        self._context, self._handles = context, tuple(handles)
        self.workspaces, self._tensor_maps, self._memory = workspaces, tensor_maps, workspace
        self._layout = FrameLayout(launches.steps)
        others = self._layout.moving[len(ALWAYS) + len(self._layout.parts) :]
        self._operands_alone = not others
        self._offsets = [offset for slot, offset in others if slot == Slot.SCRATCH]
        self._counts = COUNTERS in others
        self._read = [(slot - Slot.VECTORS, offset) for slot, offset in others if slot >= Slot.VECTORS]
        self._parts_read = any(offset for _, offset in self._read)
        self._maps: list[dict[int, int]] = [{} for _ in launches.maps]
        self._frames: list[Frame] = []

    def enqueue(
        self, alpha: float, a: int, b: int, beta: float, c: int, stream: int, vectors: Sequence[int] = ()
    ) -> None:
        """Enqueue the product of operands, and vectors, at these addresses.

        Raises
        ------
        NoRoomForMaps
            if it needs tensor maps and there is no room for them.
        """
        # A frame belongs to one call. It is taken and put back by one operation each, so this needs no lock, and may be
        # interrupted by a finaliser that comes here too.
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = self.frame()
        if not (self._operands_alone and frame.enqueue(alpha, a, b, beta, c, stream)):
            if frame.in_context():
                self._enqueue(frame, alpha, a, b, beta, c, stream, vectors)
            else:
                with device_scope(self.device):
                    self._enqueue(frame, alpha, a, b, beta, c, stream, vectors)
        self._frames.append(frame)

    @property
    def memory_given(self) -> bool:
        """True if it launches in memory that it was given."""
        return self._memory is not None

    def frame(self) -> Frame:
        """Return a new frame."""
        return Frame(self._layout, self._handles, self._context)

    def memory_words(self, scratch: int, counters: int) -> list[int]:
        """Return the moving words of scratch memory, and of counters, at these addresses."""
        words = [scratch + offset for offset in self._offsets]
        if self._counts:
            words.append(counters)
        return words

    def _enqueue(
        self, frame: Frame, alpha: float, a: int, b: int, beta: float, c: int, stream: int, vectors: Sequence[int]
    ) -> None:
        launches = self.launches
        if self._parts_read or len(vectors) > len(self._read):
            # Launches read the parts of a prepared operand from several places on, or not at all.
            vectors = [vectors[i] + offset for i, offset in self._read]
        scratch, counters, memory, lease = launches.scratch_bytes, launches.counters, (0, 0), None
        if not (launches.maps or scratch or counters):
            frame.move(alpha, beta, a, b, c, *vectors)
            frame.launch(stream)
            return
        if self._memory is not None:
            memory = self._memory.words
        elif scratch and len(launches.steps) > 1:
            # Every launch leaves the counters at 0, so calls from several threads may share the stream's.
            own = self._counters(stream)
            lease = self.workspaces.lease(stream, scratch)
            memory = lease.pointer, own
        elif scratch or counters:
            memory = self.workspaces.reserve(stream, scratch, counters)
        try:
            self._pack(frame, memory, alpha, a, b, beta, c, vectors)
            frame.launch(stream)
        finally:
            if lease is not None:
                self.workspaces.release(lease)

    def _counters(self, stream: int) -> int:
        """Return the address of the counters for a launch on a stream; 0 if it needs none."""
        return self.workspaces.reserve(stream, 0, self.launches.counters)[1] if self.launches.counters else 0

    def _pack(
        self,
        frame: Frame,
        memory: tuple[int, int],
        alpha: float,
        a: int,
        b: int,
        beta: float,
        c: int,
        vectors: Sequence[int],
    ) -> None:
        """Give a frame its moving words; those of memory and of maps may be there from an earlier call."""
        of = (a, b, *memory) if self.launches.maps else memory
        if frame.words_of == of and not vectors:
            frame.move_operands(alpha, beta, a, b, c)
        else:
            frame.move(alpha, beta, a, b, c, *self.memory_words(*memory), *self.places(a, b), *vectors)
            frame.words_of = of

    def places(self, a: int, b: int) -> list[int]:
        """Return the addresses of the tensor maps of operands at these addresses."""
        maps = self.launches.maps
        pointers = [a if wanted.slot == Slot.A else b for wanted in maps]
        known = [places.get(pointer, 0) for places, pointer in zip(self._maps, pointers)]
        if all(known):
            return known
        made = self._tensor_maps.places(list(zip(pointers, maps)))
        if made is None:
            raise NoRoomForMaps
        for places, pointer, place in zip(self._maps, pointers, made):
            places[pointer] = place
        return made

    def private(self) -> PrivateLaunches:
        """Return the same launches with scratch memory of their own, as a function that is safe from several threads.

        It enqueues the product of operands at some addresses; or returns False, and enqueues nothing, if another
        context is current, the stream is captured, or there is no room for a tensor map. For products without vectors,
        and without given memory.

        Scratch memory is leased once for each stream, and for each thread that calls on it at the same time, and
        released with the function; counters are those of the stream. The words of both then are constants, so that a
        call changes only the scalars, the addresses of A, B and C, and tensor maps.
        """
        maps, places = bool(self.launches.maps), self.places
        scratch = bool(self.launches.scratch_bytes or self.launches.counters)
        alone: list[Frame] = []  # frames of the default stream, or of any stream without scratch memory and counters
        if self._operands_alone:
            return self._launching(alone)
        every: dict[tuple[int, int], list[Frame]] = {}
        leases: list[Lease] = []
        legacy = not zero_is_per_thread()

        def launch(alpha: float, a: int, b: int, beta: float, c: int, stream: int) -> bool:
            frames = alone
            if scratch and (stream or not legacy):
                key = identity(stream)
                if key[1]:
                    return False
                frames = every.get(key) or every.setdefault(key, [])
            try:
                frame = frames.pop()  # one operation, see `enqueue`
            except IndexError:
                frame = self._frame_with_memory(stream, leases) if scratch else self.frame()
            done = False
            if not maps or frame.words_of[:2] == (a, b):
                done = frame.enqueue(alpha, a, b, beta, c, stream)
            elif frame.in_context():
                with suppress(NoRoomForMaps):
                    memory = frame.words_of[2:] or (0, 0)
                    frame.move(alpha, beta, a, b, c, *self.memory_words(*memory), *places(a, b))
                    frame.words_of = a, b, *memory
                    frame.launch(stream)
                    done = True
            frames.append(frame)
            return done

        weakref.finalize(launch, _release, self.workspaces, leases)
        return launch

    def _launching(self, frames: list[Frame]) -> PrivateLaunches:
        """Return what `private` does, for launches that need nothing but operands."""
        take, give_back, new = frames.pop, frames.append, self.frame

        def launch(alpha: float, a: int, b: int, beta: float, c: int, stream: int) -> bool:
            try:
                frame = take()  # one operation, see `enqueue`
            except IndexError:
                frame = new()
            done = frame.enqueue(alpha, a, b, beta, c, stream)
            give_back(frame)
            return done

        return launch

    def _frame_with_memory(self, stream: int, leases: list[Lease]) -> Frame:
        """Return a frame whose scratch memory is its own; counters are those of the stream."""
        launches, frame, own = self.launches, self.frame(), 0
        with device_scope(self.device):
            counters = self._counters(stream)
            if launches.scratch_bytes:
                leases.append(self.workspaces.lease(stream, launches.scratch_bytes))
                own = leases[-1].pointer
        if launches.maps:  # whose addresses are not known yet
            frame.words_of = 0, 0, own, counters
        else:
            frame.move(0.0, 0.0, 0, 0, 0, *self.memory_words(own, counters))
        return frame


def _release(workspaces: Workspaces, leases: list[Lease]) -> None:
    for lease in leases:
        workspaces.release(lease)
