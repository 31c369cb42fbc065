"""Execution of a rank's steps where the ranks of a host copy panels to, and sums from, each other's memory.

An event is recorded by one rank and waited for by another, on whose host it must have been recorded before. So each
step that records is followed by an exchange of all ranks (`go_on`), and each step that waits comes after it.

Panels travel in turns. In each, the second stream copies panels from this rank's operands to slots of the others:

- It waits for `free` of a slot's owner: the product that read the slot has ended. At first it waits for all of them,
  since slots of the product before may overlap.
- It records `ready` after the copies. After an exchange, products of the receivers wait for it.

Sums for others are computed by the current stream, which writes them to this rank's buffer:

- It waits for this rank's own `free`: the products that read panels there have ended. After the sums, it records
  `ready`.
- After an exchange, the second stream of each rank waits for the others' `ready`, copies, and records `read`.
- After another, the current stream waits for the others' `read`, and records `free`.

If a rank fails, all finish both streams and meet, since what was not recorded cannot be waited for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from .failures import OthersFailed
from .schedule import SLOTS, Add, Chunk, Fetch, Give, Keep, Multiply, Panel, Take, along
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
    # Ranks first try with one float, since memory that they cannot open would be kept in vain.
    for elements in (rooms[mesh.coordinate],) if known else (1, rooms[mesh.coordinate]):
        if not _exchanged(key, mesh, buffer_of(device), max(1, elements)):
            return None
    return _known[key][1]


def _exchanged(key: tuple[Any, ...], mesh: Mesh, buffer: Buffer, elements: int) -> bool:
    """Reserve memory, and open that of the other ranks; return True on all ranks if it is known then."""
    words = NOTHING
    with suppress(Exception):  # whatever the reason is, all ranks are told, and broadcast
        buffer.reserve(elements)
        words = CLOSED
        words = buffer.told()
    found, peers = gathered(mesh, words), {}
    if NOTHING in found.values():
        return False
    others = {at: one for at, one in found.items() if at != mesh.coordinate}
    processes = {one[0] for one in others.values()}
    if CLOSED not in found.values():
        buffer.note_openers(processes)  # also if one of them fails
        with suppress(Exception):
            peers = {at: buffer.open(one) for at, one in others.items()}
    if not all_agree(mesh, len(peers) == len(others)):
        _separate.add(key)
        return False
    _known[key] = {at: one[1] for at, one in found.items()}, peers
    buffer.free_closed(processes)
    return True


def release_memory() -> None:
    """Free the memory that other ranks copy to or from; all ranks of the default process group have to call it.

    Each GPU keeps such memory after a product, for the next one: as much as one or two panels of A and B, or as the
    sums for other ranks. PyTorch does not count it as its own.

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
    """Operands, slots and events of one product on one rank, which copies to or from others.

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
        ranks = (*peers, self.coordinate)
        self.turns = {at: self.work.turns(at) for at in ranks}
        self.begins = {at: self.work.slots(at)[0] for at in ranks}
        self.turn = 0  # of panels, the next one that this rank sends
        self.exchanging = False  # True if the last exchange with the other ranks has not ended

    def run(self) -> None:
        """Allocate memory and execute all steps; an error of one rank, also for lack of memory, is raised on all."""
        if self.division.algorithm.reduces:
            self.run_sums()
        else:
            self.run_panels()

    def run_panels(self) -> None:
        """Multiply panels of this rank's own, and those that others copy to its slots."""
        with self.together("while ranks copied"), self.lanes.run():
            self.allocate()
            # Slots of this product may overlap those of the product before, which other ranks may still read.
            for event in (event for peer in self.peers.values() for event in peer.free):
                self.lanes.let_line_wait(event)
            for event in self.buffer.free:
                self.lanes.let_products_wait(event)
            self.send_turn()
            for step in self.work.steps(self.coordinate):
                if isinstance(step, Fetch):
                    self.fetch(step)
                elif isinstance(step, Multiply):
                    self.product(step)
            while self.turn < max(map(len, self.turns.values())):
                self.send_turn()

    def run_sums(self) -> None:
        """Compute sums for others, and add those of others to own ones."""
        steps, slots = list(self.work.steps(self.coordinate)), range(SLOTS)
        actions: dict[type, Any] = {Keep: self.keep, Take: self.take, Add: self.add_to_own}
        with self.together("before ranks copied"):
            self.allocate()
            for slot in slots:
                self.lanes.let_products_wait(self.buffer.free[slot])
            for step in steps:
                if isinstance(step, Give):
                    self.give(step)
            self.lanes.record_products(self.buffer.ready[0])
        with self.together("while ranks copied"), self.lanes.run():
            for peer in self.peers.values():
                self.lanes.let_line_wait(peer.ready[0])
            for step in steps:
                if not isinstance(step, Give):
                    actions[type(step)](step)
            self.lanes.record_line(self.buffer.read)
        for peer in self.peers.values():
            self.lanes.let_products_wait(peer.read)
        for slot in slots:
            self.lanes.record_products(self.buffer.free[slot])

    @contextmanager
    def together(self, when: str) -> Iterator[None]:
        """Run the block; raise an error on all ranks if it fails on one."""
        try:
            yield
            self.go_on(when)
        except BaseException as error:
            if self.exchanging:  # with a rank that has ended, whose copies are not waited for
                raise
            if not isinstance(error, OthersFailed):
                self.all_agree(False)
            try:
                self.lanes.finish()
            finally:
                self.all_agree(True)  # from here on, nothing is written to any rank's buffer
            raise

    def go_on(self, when: str) -> None:
        """Wait for all ranks; raise an error if one has failed."""
        if not self.all_agree(True):
            raise OthersFailed(f"another rank has failed {when}; see its own error")

    def all_agree(self, fine: bool) -> bool:
        """Return True if all ranks say so."""
        self.exchanging = True
        found = all_agree(self.mesh, fine)
        self.exchanging = False
        return found

    def panel_slots(self, operand: str, elements: int) -> list[Tensor]:
        """Return this rank's memory that others copy panels of an operand to."""
        memory = self.buffer.memory
        assert memory is not None
        return [memory[begin : begin + elements] for begin in self.begins[self.coordinate][operand]]

    def send_turn(self) -> None:
        """Copy to all ranks what they need from this one in the next turn."""
        slot, own = self.turn % SLOTS, self.coordinate
        for at, peer in self.peers.items():
            fetches = self.turns[at][self.turn] if self.turn < len(self.turns[at]) else []
            shared = [one for one in fetches if at["ab".index(one.operand)] == own["ab".index(one.operand)]]
            pieces = [
                (one, piece)
                for one in shared
                for piece in getattr(self.work.panels[one.panel], one.operand)
                if piece.root == along(one.operand, own)
            ]
            if pieces:
                self.lanes.let_line_wait(peer.free[slot])
            for fetch, piece in pieces:
                panel = self.work.panels[fetch.panel]
                begin, pitch = self.inside(panel, fetch.operand, piece.part)
                begin += self.begins[at][fetch.operand][slot]
                local = self.local(panel, fetch.operand, piece.part)
                self.lanes.communicate(partial(peer.write, local, begin, pitch))
        self.lanes.record_line(self.buffer.ready[slot])
        self.turn += 1
        self.go_on("while ranks copied")

    def fetch(self, step: Fetch) -> None:
        """Let products wait for a panel's pieces; copy this rank's own ones."""
        panel, operand = self.work.panels[step.panel], step.operand
        turn = [one[0].panel for one in self.turns[self.coordinate]].index(step.panel)
        while self.turn <= turn:
            self.send_turn()
        for piece in panel.a if operand == "a" else panel.b:
            if piece.root == along(operand, self.coordinate):
                target = self.view(panel, operand, step.slot, piece.part)[1]
                self.lanes.multiply(partial(target.copy_, self.local(panel, operand, piece.part)))
            else:
                root = (self.coordinate[0], piece.root) if operand == "a" else (piece.root, self.coordinate[1])
                self.lanes.let_products_wait(self.peers[root].ready[step.slot])
        self.arrived[operand, step.panel] = None  # products wait already

    def product(self, step: Multiply) -> None:
        """Multiply a panel, and record that its slot may be filled again."""
        super().product(step)
        for slot in {step.a_slot, step.b_slot} - {None}:
            self.lanes.record_products(self.buffer.free[slot])  # type: ignore[index]

    def inside(self, panel: Panel, operand: str, part: Part) -> tuple[int, int]:
        """Return where a range of a panel begins in its slot, and the elements from one row to the next."""
        _, cols = self.local_shape(panel, operand)
        begin = part.begin - panel.part.begin
        return begin if (operand, panel.axis) in (("a", "k"), ("b", "n")) else begin * cols, cols

    def view(self, panel: Panel, operand: str, slot: int, part: Part) -> tuple[Tensor, Tensor]:
        """Return a range of a panel in a slot, which holds the panel by rows."""
        begin, pitch = self.inside(panel, operand, part)
        rows, cols = (one.extent for one in self.ranges(panel, operand, part))  # type: ignore[arg-type]
        found = self.slots[operand][slot][begin:].as_strided((rows, cols), (pitch, 1))
        return found, found

    def give(self, step: Give) -> None:
        """Multiply for a chunk of C of another rank."""
        rows, cols = step.chunk.rows.extent, step.chunk.cols.extent
        assert self.buffer.memory is not None
        place = self.buffer.memory[step.begin : step.begin + rows * cols].view(rows, cols)
        self.multiply_chunk(step.chunk, place, 0.0)

    def keep(self, step: Keep) -> None:
        """Multiply for this rank's own chunk of C."""
        place = self.place(step.chunk)
        assert place is not None
        self.multiply_chunk(step.chunk, place, self.beta)

    def multiply_chunk(self, chunk: Chunk, place: Tensor, beta: float) -> None:
        """Multiply own parts of A and B for a chunk of C."""
        self.lanes.multiply(partial(self.multiply, place, *self.chunk_operands(chunk), self.alpha, beta))

    def chunk_slot(self, chunk: Chunk, slot: int) -> Tensor:
        """Return a chunk's matrix in a slot."""
        rows, cols = chunk.rows.extent, chunk.cols.extent
        return self.slots["c"][slot][: rows * cols].view(rows, cols)

    def take(self, step: Take) -> None:
        """Copy another rank's sums."""
        self.lanes.let_line_wait(self.read.pop(("c", step.slot), None))
        target = self.chunk_slot(step.chunk, step.slot)
        self.lanes.communicate(partial(self.peers[step.rank, self.coordinate[1]].read_into, target, step.begin))
        self.arrived["c", step.slot] = self.lanes.after_line()

    def add_to_own(self, step: Add) -> None:
        """Add another rank's sums to this rank's own chunk of C."""
        place = self.place(step.chunk)
        assert place is not None
        self.lanes.let_products_wait(self.arrived.pop(("c", step.slot)))
        self.lanes.multiply(partial(place.add_, self.chunk_slot(step.chunk, step.slot)))
        self.read["c", step.slot] = self.lanes.after_products()
