"""Execution of a rank's steps: products on the current stream, broadcasts and sums beside them on a second one.

The second stream first waits for the current one, since operands and memory may still be in use there, and the current
stream waits for the second one in the end. So operands may be overwritten, and buffers freed, by work that is sent to
the current stream afterwards. Events order the rest: a product waits for its panels, and a slot is filled only after
the product that reads it. On a CPU, all steps run one after the other.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from .division import Coordinate
from .lanes import Lanes
from .model import Work
from .schedule import SLOTS, Chunk, Fetch, Multiply, Operand, Panel, Part, Piece, Reduce, Spread, along

__all__ = ["Executor", "Multiplication"]


class Multiplication(Protocol):
    """A function that computes ``out = alpha * a @ b + beta * out`` on the current stream."""

    def __call__(self, out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        """Compute the product."""


class Executor:
    """Operands, slots and events of one product on one rank.

    Parameters
    ----------
    work : Work
        Steps of all ranks.
    coordinate : tuple of int
        This rank's on the grid.
    groups : tuple
        Process groups along the columns and along the rows of the grid; None where the grid has one.
    a, b, out : Tensor
        This rank's parts; None for an `out` that is to be allocated.
    alpha, beta : float
        Factors.
    multiply : callable
        Computes products.
    lanes : Lanes
        Streams of the device.
    """

    def __init__(
        self,
        work: Work,
        coordinate: Coordinate,
        groups: tuple[Any, Any],
        a: Tensor,
        b: Tensor,
        out: Tensor | None,
        alpha: float,
        beta: float,
        multiply: Multiplication,
        lanes: Lanes,
    ) -> None:
        self.work, self.division, self.coordinate, self.groups = work, work.division, coordinate, groups
        self.a, self.b, self.given, self.alpha, self.beta, self.multiply = a, b, out, alpha, beta, multiply
        self.lanes = lanes
        self.slots: dict[str, list[Tensor]] = {}
        self.arrived: dict[tuple[str, int], Any] = {}  # events, by operand and panel
        self.read: dict[tuple[str, int], Any] = {}  # events, by operand and slot

    def allocate(self) -> None:
        """Allocate `out` unless it is given, and slots, before the second stream begins to wait for the current one."""
        held, computed = self.division.holds(self.coordinate), self.division.computes(self.coordinate)
        if self.given is None:
            self.given = self.a.new_empty(*(part.extent for part in held))
        self.block = self.out
        if self.division.algorithm.spreads and not self.division.algorithm.reduces:
            self.block = self.out[computed[0].slice, computed[1].slice]
        work, largest = self.work, max((one.rows.extent * one.cols.extent for one in self.work.chunks), default=0)
        for operand in ("a", "b"):
            self.slots[operand] = self.panel_slots(operand, work.slot_elements(operand, self.coordinate))
        self.slots["c"] = [self.out.new_empty(largest) for _ in range(work.chunk_slots())]

    def panel_slots(self, operand: str, elements: int) -> list[Tensor]:
        """Return memory for panels of an operand."""
        return [self.out.new_empty(elements) for _ in range(SLOTS)]

    @property
    def out(self) -> Tensor:
        """C and the result."""
        assert self.given is not None
        return self.given

    def run(self) -> None:
        """Execute all steps."""
        self.allocate()
        self.execute()

    def execute(self) -> None:
        """Execute all steps with the memory that is allocated."""
        actions: dict[type, Any] = {Fetch: self.fetch, Multiply: self.product, Reduce: self.reduce, Spread: self.spread}
        with self.lanes.run():
            for step in self.work.steps(self.coordinate):
                actions[type(step)](step)

    def broadcast(self, tensor: Tensor, root: int, dim: int) -> None:
        """Broadcast contiguous memory along a dimension of the grid, on the stream that is current."""
        if tensor.numel():
            group = self.groups[dim]
            dist.broadcast(tensor, dist.get_global_rank(group, root), group=group)

    def add(self, tensor: Tensor, root: int) -> None:
        """Add contiguous memory of all ranks, on the stream that is current; the root has the sums."""
        if self.groups[0] is not None:
            dist.reduce(tensor, dist.get_global_rank(self.groups[0], root), group=self.groups[0])

    def fetch(self, step: Fetch) -> None:
        """Take part in the broadcasts of a panel's pieces."""
        panel, operand = self.work.panels[step.panel], step.operand
        pieces = panel.a if operand == "a" else panel.b
        self.lanes.let_line_wait(self.read.pop((operand, step.slot), None))
        for piece in pieces:
            self.send(panel, operand, step.slot, piece)
        self.arrived[operand, step.panel] = self.lanes.after_line()

    def send(self, panel: Panel, operand: Operand, slot: int, piece: Piece) -> None:
        """Broadcast a piece from its root, which packs it first unless it is contiguous."""
        target, shown = self.view(panel, operand, slot, piece.part)
        own = self.local(panel, operand, piece.part) if piece.root == along(operand, self.coordinate) else None
        if own is not None and panel.part == piece.part and own.is_contiguous():
            target, own = own, None

        def action() -> None:
            if own is not None:
                shown.copy_(own)
            self.broadcast(target, piece.root, 1 if operand == "a" else 0)

        self.lanes.communicate(action)

    def view(self, panel: Panel, operand: str, slot: int, part: Part) -> tuple[Tensor, Tensor]:
        """Return a range of a panel in a slot: as contiguous memory, and as the matrix that it holds.

        A panel of several pieces is stored with the axis outermost along which they are cut, so that each is
        contiguous.
        """
        pieces = panel.a if operand == "a" else panel.b
        own = self.local_shape(panel, operand)
        cut = 1 if (operand, panel.axis) in (("a", "k"), ("b", "n")) else 0
        depth, other = panel.part.extent, own[1 - cut]
        memory = self.slots[operand][slot][: depth * other]
        by_cut = len(pieces) > 1 or cut == 0
        if by_cut:
            stored = memory.view(depth, other)[part.begin - panel.part.begin : part.end - panel.part.begin]
            return stored, stored.t() if cut else stored
        stored = memory.view(other, depth)
        return stored, stored

    def local_shape(self, panel: Panel, operand: str) -> tuple[int, int]:
        """Return the shape of the matrix of a panel on this rank."""
        extents = dict(
            zip("mnk", (*(part.extent for part in self.division.computes(self.coordinate)), self.division.shape[2]))
        ) | {panel.axis: panel.part.extent}
        return (extents["m"], extents["k"]) if operand == "a" else (extents["k"], extents["n"])

    def ranges(self, panel: Panel, operand: Operand, part: Part) -> tuple[Part, Part]:
        """Return the rows and columns of an operand that this rank multiplies in a range of a panel."""
        rows, cols = self.division.computes(self.coordinate)
        wanted = {"m": rows, "n": cols, "k": Part(0, self.division.shape[2])} | {panel.axis: part}
        return (wanted["m"], wanted["k"]) if operand == "a" else (wanted["k"], wanted["n"])

    def local(self, panel: Panel, operand: Operand, part: Part) -> Tensor:
        """Return the range of a panel's operand that this rank holds itself."""
        rows, cols = self.ranges(panel, operand, part)
        if operand == "a":
            return self.within(self.a, self.division.a_rows, self.division.a_inner, rows, cols)
        return self.within(self.b, self.division.b_inner, self.division.b_cols, rows, cols)

    def within(self, local: Tensor, down: Any, across: Any, rows: Part, cols: Part) -> Tensor:
        """Return the rows and columns of a whole matrix that are in this rank's part of it."""
        top, left = down.at(self.coordinate).begin, across.at(self.coordinate).begin
        return local[rows.begin - top : rows.end - top, cols.begin - left : cols.end - left]

    def product(self, step: Multiply) -> None:
        """Multiply a panel."""
        panel, found = self.work.panels[step.panel], []
        operands: tuple[tuple[Operand, int | None], ...] = ("a", step.a_slot), ("b", step.b_slot)
        for operand, slot in operands:
            if slot is None:
                found.append(self.local(panel, operand, panel.part))
                continue
            self.lanes.let_products_wait(self.arrived[operand, step.panel])
            found.append(self.view(panel, operand, slot, panel.part)[1])
        out, (rows, cols) = self.block, self.division.computes(self.coordinate)
        if panel.axis == "m":
            out = out[panel.part.begin - rows.begin : panel.part.end - rows.begin]
        elif panel.axis == "n":
            out = out[:, panel.part.begin - cols.begin : panel.part.end - cols.begin]
        beta = self.beta if step.first else 1.0
        self.lanes.multiply(lambda: self.multiply(out, found[0], found[1], self.alpha, beta))
        event = self.lanes.after_products()
        for operand, slot in (("a", step.a_slot), ("b", step.b_slot)):
            if slot is not None:
                self.read[operand, slot] = event

    def reduce(self, step: Reduce) -> None:
        """Multiply for a chunk of C, in place on its root, and add the sums of all ranks there."""
        chunk, roots = step.chunk, step.chunk.root == self.coordinate[0]
        self.lanes.let_products_wait(self.read.pop(("c", step.slot), None))
        a, b = self.chunk_operands(chunk)
        stored = self.slots["c"][step.slot][: chunk.rows.extent * chunk.cols.extent]
        target = stored.view(chunk.rows.extent, chunk.cols.extent)
        place = self.place(chunk) if roots else None
        if place is not None and place.is_contiguous():
            target, place = place, None  # the sums are added where they are to be

        def action() -> None:
            if place is not None and self.beta != 0:
                target.copy_(place)
            self.multiply(target, a, b, self.alpha, self.beta if roots else 0.0)

        def add() -> None:
            self.add(target, chunk.root)
            if place is not None:
                place.copy_(target)

        self.lanes.multiply(action)
        self.lanes.let_line_wait(self.lanes.after_products())
        self.lanes.communicate(add)
        self.read["c", step.slot] = self.lanes.after_line()

    def chunk_operands(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return the parts of A and B that this rank multiplies for a chunk of C."""
        inner = self.division.inner(self.coordinate)
        a = self.within(self.a, self.division.a_rows, self.division.a_inner, chunk.rows, inner)
        return a, self.within(self.b, self.division.b_inner, self.division.b_cols, inner, chunk.cols)

    def place(self, chunk: Chunk | Spread) -> Tensor | None:
        """Return the part of `out` for a chunk of C; None if this rank has none."""
        rows, cols = self.division.holds(self.coordinate)
        if chunk.root != self.coordinate[0] and not self.division.algorithm.spreads:
            return None
        return self.out[
            chunk.rows.begin - rows.begin : chunk.rows.end - rows.begin,
            chunk.cols.begin - cols.begin : chunk.cols.end - cols.begin,
        ]

    def spread(self, step: Spread) -> None:
        """Broadcast a block of C, through other memory if it is not contiguous."""
        place, dim = self.place(step), 0 if self.groups[0] is not None else 1
        if place is None or self.groups[dim] is None:
            return

        def action() -> None:
            sent = place if place.is_contiguous() else place.contiguous()
            self.broadcast(sent, step.root, dim)
            if sent is not place:
                place.copy_(sent)

        self.lanes.let_line_wait(self.lanes.after_products())
        self.lanes.communicate(action)
