"""Execution of a rank's steps where it copies panels and sums from the memory of other ranks on its host.

What others need is written to this rank's buffer on the current stream, and an event is recorded after that. When all
ranks have told that they have recorded theirs, each waits for those of others and copies, on the second stream, and
records that it has read. When all have told that, the current stream waits until all have read this rank's buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ..streaming.blocking import Part
from .agreement import Mesh, all_agree, gathered
from .division import Coordinate
from .executor import Executor
from .schedule import Add, Chunk, Fetch, Give, Keep, Multiply, Panel, Take, along
from .shared_memory import CLOSED, NOTHING, Buffer, Peer, all_buffers, buffer_of

__all__ = ["CopyingExecutor", "opened", "release_memory"]

Numbers: TypeAlias = dict[tuple[int, ...], int]  # of buffers, by coordinate
Peers: TypeAlias = dict[tuple[int, ...], Peer]

# By the groups and ranks of a mesh: buffers that all of its ranks have opened; meshes whose ranks cannot open them.
_known: dict[tuple[Any, ...], tuple[Numbers, Peers]] = {}
_separate: set[tuple[Any, ...]] = set()


def opened(
    mesh: Mesh, device: torch.device, rooms: Mapping[tuple[int, ...], int], told: Mapping[tuple[int, ...], Any]
) -> Peers | None:
    """Return the memory of the other ranks with a buffer of enough room; None, on all ranks, if one cannot open it.

    Parameters
    ----------
    mesh : Mesh
        Ranks.
    device : torch.device
        This rank's device.
    rooms : mapping
        Elements that each rank needs in its buffer, by coordinate on the mesh.
    told : mapping
        Facts of all ranks: numbers of their buffers, and how much room these have.
    """
    key = (*mesh.groups, *mesh.ranks)
    lacking = any(facts.lacks and rooms[at] >= facts.lacks for at, facts in told.items())
    if lacking or key in _separate:
        return None
    numbers = {at: facts.buffer for at, facts in told.items()}
    known, peers = _known.get(key, ({}, {}))
    if known == numbers and all(rooms[at] <= facts.room for at, facts in told.items()):
        return peers
    buffer, own = buffer_of(device), mesh.coordinate
    words = NOTHING
    with suppress(Exception):  # whatever the reason is, all ranks are told, and broadcast
        buffer.reserve(max(1, rooms[own]))
        words = CLOSED
        words = buffer.told()
    found, peers = gathered(mesh, words), {}
    others = {one[0] for at, one in found.items() if at != own}
    buffer.note_openers(others)  # also if one of them fails
    with suppress(Exception):
        peers = {at: buffer.open(one) for at, one in found.items() if at != own}
    if not all_agree(mesh, len(peers) == len(found) - 1 and words not in (NOTHING, CLOSED)):
        if NOTHING not in found.values():
            _separate.add(key)
        return None
    _known[key] = {at: one[1] for at, one in found.items()}, peers
    buffer.free_closed(others)
    return peers


def release_memory() -> None:
    """Free the memory that other ranks copy from; all ranks of the default process group have to call it.

    Each GPU keeps such memory after a product, for the next one: as much as the shards of A and B that travelled, or as
    the sums for other ranks. PyTorch does not count it as its own.

    Raises
    ------
    ValueError
        If there is no process group.

    Examples
    --------
    >>> from numba_gemm.distributed import release_memory
    >>> release_memory()  # doctest: +SKIP
    """
    if not dist.is_initialized():
        raise ValueError("there is no process group; expected one of all ranks; call this before it is destroyed")
    _known.clear()
    for step in (Buffer.close_peers, Buffer.free_all):
        for buffer in all_buffers():
            step(buffer)
        dist.barrier()  # closed by all before it is freed


class CopyingExecutor(Executor):
    """Operands, slots and events of one product on one rank that copies from others.

    Parameters
    ----------
    mesh : Mesh
        Ranks.
    buffer : Buffer
        This rank's memory for others.
    peers : mapping
        Memory of the other ranks, by coordinate on the grid.
    others
        As for `Executor`.
    """

    def __init__(self, *others: Any, mesh: Mesh, buffer: Buffer, peers: Mapping[Coordinate, Peer]) -> None:
        super().__init__(*others)
        self.mesh, self.buffer, self.peers = mesh, buffer, peers
        self.awaited: set[Coordinate] = set()

    def run(self) -> None:
        """Allocate memory and execute all steps; an error of one rank, also for lack of memory, is raised on all."""
        steps = list(self.work.steps(self.coordinate))
        actions: dict[type, Any] = {
            Fetch: self.fetch, Multiply: self.product, Keep: self.keep, Take: self.take, Add: self.add_to_own,
        }  # fmt: skip
        with self.together("before ranks copied"):
            self.allocate()
            self.lanes.let_products_wait(self.buffer.free)
            self.fill([step for step in steps if isinstance(step, Give)])
            self.lanes.record_products(self.buffer.filled)
        with self.together("while ranks copied"), self.lanes.run():
            for step in steps:
                if not isinstance(step, Give):
                    actions[type(step)](step)
            self.lanes.record_line(self.buffer.read)
        for peer in self.peers.values():
            self.lanes.let_products_wait(peer.read)
        self.lanes.record_products(self.buffer.free)

    @contextmanager
    def together(self, when: str) -> Iterator[None]:
        """Run the block; raise an error on all ranks if it fails on one."""
        try:
            yield
        except BaseException:
            all_agree(self.mesh, False)
            raise
        if not all_agree(self.mesh, True):
            raise RuntimeError(f"another rank has failed {when}; see its own error")

    def fill(self, sums: Sequence[Give]) -> None:
        """Write to the buffer what others copy: own operands, or sums for their parts of C."""
        memory, begin = self.buffer.memory, 0
        assert memory is not None
        for operand in ("a", "b"):
            if (count := self.work.shared_elements(operand, self.coordinate)) == 0:
                continue
            own = self.a if operand == "a" else self.b
            place = memory[begin : begin + count].view(own.shape)
            self.lanes.multiply(partial(place.copy_, own))
            begin += count
        for step in sums:
            rows, cols = step.chunk.rows, step.chunk.cols
            place = memory[step.begin : step.begin + rows.extent * cols.extent].view(rows.extent, cols.extent)
            self.multiply_chunk(step.chunk, place, 0.0)

    def multiply_chunk(self, chunk: Chunk, place: Tensor, beta: float) -> None:
        """Multiply own parts of A and B for a chunk of C."""
        self.lanes.multiply(partial(self.multiply, place, *self.chunk_operands(chunk), self.alpha, beta))

    def copy(self, at: Coordinate, target: Tensor, begin: int, pitch: int) -> None:
        """Copy from another rank, on the second stream."""
        peer = self.peers[at]
        if at not in self.awaited:
            self.awaited.add(at)
            self.lanes.let_line_wait(peer.filled)
        self.lanes.communicate(partial(peer.copy, target, begin, pitch))

    def fetch(self, step: Fetch) -> None:
        """Copy a panel's pieces, also this rank's own ones."""
        panel, operand = self.work.panels[step.panel], step.operand
        self.lanes.let_line_wait(self.read.pop((operand, step.slot), None))
        for piece in panel.a if operand == "a" else panel.b:
            target = self.view(panel, operand, step.slot, piece.part)[1]
            if piece.root == along(operand, self.coordinate):
                self.lanes.communicate(partial(target.copy_, self.local(panel, operand, piece.part)))
                continue
            root = (piece.root, self.coordinate[1]) if operand == "b" else (self.coordinate[0], piece.root)
            held_there = self.work.shared(operand, root)
            assert held_there is not None
            rows, cols = held_there
            before = self.work.shared_elements("a", root) if operand == "b" else 0
            own_rows, own_cols = self.ranges(panel, operand, piece.part)
            begin = before + (own_rows.begin - rows.begin) * cols.extent + own_cols.begin - cols.begin
            self.copy(root, target, begin, cols.extent)
        self.arrived[operand, step.panel] = self.lanes.after_line()

    def view(self, panel: Panel, operand: str, slot: int, part: Part) -> tuple[Tensor, Tensor]:
        """Return a range of a panel in a slot, which holds the panel by rows."""
        rows, cols = self.local_shape(panel, operand)
        whole = self.slots[operand][slot][: rows * cols].view(rows, cols)
        begin, end = part.begin - panel.part.begin, part.end - panel.part.begin
        by_cols = (operand, panel.axis) in (("a", "k"), ("b", "n"))
        found = whole[:, begin:end] if by_cols else whole[begin:end]
        return found, found

    def keep(self, step: Keep) -> None:
        """Multiply for this rank's own chunk of C."""
        place = self.place(step.chunk)
        assert place is not None
        self.multiply_chunk(step.chunk, place, self.beta)

    def chunk_slot(self, chunk: Chunk, slot: int) -> Tensor:
        """Return a chunk's matrix in a slot."""
        rows, cols = chunk.rows.extent, chunk.cols.extent
        return self.slots["c"][slot][: rows * cols].view(rows, cols)

    def take(self, step: Take) -> None:
        """Copy another rank's sums."""
        self.lanes.let_line_wait(self.read.pop(("c", step.slot), None))
        target = self.chunk_slot(step.chunk, step.slot)
        self.copy((step.rank, self.coordinate[1]), target, step.begin, target.shape[1])
        self.arrived["c", step.slot] = self.lanes.after_line()

    def add_to_own(self, step: Add) -> None:
        """Add another rank's sums to this rank's own chunk of C."""
        place = self.place(step.chunk)
        assert place is not None
        self.lanes.let_products_wait(self.arrived.pop(("c", step.slot)))
        self.lanes.multiply(partial(place.add_, self.chunk_slot(step.chunk, step.slot)))
        self.read["c", step.slot] = self.lanes.after_products()
