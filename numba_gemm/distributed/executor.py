"""Execution of a rank's steps: products on the current stream, broadcasts and sums beside them on a second one.

The second stream first waits for the current one, since operands and memory may still be in use there, and the current
stream waits for the second one in the end. So operands may be overwritten, and buffers freed, by work that is sent to
the current stream afterwards. Events order the rest: a product waits for its panels, and a slot is filled only after
the product that reads it. On a CPU, all steps run one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .division import Coordinate
from .model import Work
from .schedule import SLOTS, Chunk, Fetch, Multiply, Panel, Part, Reduce, Spread, along

__all__ = ["Multiplication", "execute"]


class Multiplication(Protocol):
    """A function that computes ``out = alpha * a @ b + beta * out`` on the current stream."""

    def __call__(self, out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        """Compute the product."""


class Lanes:
    """Two streams of a device and events between them; without streams on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._products = self._line = None
        if device.type == "cuda":
            self._products, self._line = torch.cuda.current_stream(device), torch.cuda.Stream(device)

    @contextmanager
    def run(self) -> Iterator[None]:
        """Order the second stream after what the current one has so far, and the current one after the second."""
        if self._line is None or self._products is None:
            yield
            return
        self._line.wait_stream(self._products)
        try:
            yield
        finally:
            self._products.wait_stream(self._line)

    def communicating(self) -> Any:
        """Return a context in which the second stream is the current one."""
        return nullcontext() if self._line is None else torch.cuda.stream(self._line)

    def after_products(self) -> Any:
        """Return an event after all products so far."""
        return None if self._products is None else self._products.record_event()

    def after_line(self) -> Any:
        """Return an event after all communication so far."""
        return None if self._line is None else self._line.record_event()

    def let_products_wait(self, event: Any) -> None:
        """Let products that are sent from now on wait for an event."""
        if event is not None and self._products is not None:
            self._products.wait_event(event)

    def let_line_wait(self, event: Any) -> None:
        """Let communication that is sent from now on wait for an event."""
        if event is not None and self._line is not None:
            self._line.wait_event(event)


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
        This rank's parts.
    alpha, beta : float
        Factors.
    multiply : callable
        Computes products.
    """

    def __init__(
        self,
        work: Work,
        coordinate: Coordinate,
        groups: tuple[Any, Any],
        a: Tensor,
        b: Tensor,
        out: Tensor,
        alpha: float,
        beta: float,
        multiply: Multiplication,
    ) -> None:
        self.work, self.division, self.coordinate, self.groups = work, work.division, coordinate, groups
        self.a, self.b, self.out, self.alpha, self.beta, self.multiply = a, b, out, alpha, beta, multiply
        self.lanes = Lanes(out.device)
        # All memory is allocated before the second stream begins to wait for the current one.
        self.slots = {
            operand: [out.new_empty(work.slot_elements(operand, coordinate)) for _ in range(SLOTS)] for operand in "ab"
        }
        rows, cols = self.division.computes(coordinate)
        largest = max((one.rows.extent * one.cols.extent for one in work.chunks), default=0)
        self.slots["c"] = [out.new_empty(largest) for _ in range(min(SLOTS, len(work.chunks)))]
        self.block = out
        if self.division.algorithm.spreads and not self.division.algorithm.reduces:
            self.block = out[rows.slice, cols.slice]
        self.arrived: dict[tuple[str, int], Any] = {}  # events, by operand and panel
        self.read: dict[tuple[str, int], Any] = {}  # events, by operand and slot

    def run(self) -> None:
        """Execute all steps."""
        actions: dict[type, Any] = {Fetch: self.fetch, Multiply: self.product, Reduce: self.reduce, Spread: self.spread}
        with self.lanes.run():
            for step in self.work.steps(self.coordinate):
                actions[type(step)](step)

    def broadcast(self, tensor: Tensor, root: int, dim: int) -> None:
        """Broadcast contiguous memory along a dimension of the grid, on the stream that is current."""
        if tensor.numel():
            group = self.groups[dim]
            dist.broadcast(tensor, dist.get_global_rank(group, root), group=group)

    def fetch(self, step: Fetch) -> None:
        """Broadcast the pieces of a panel; those of this rank are packed in the slot unless they are contiguous."""
        panel, operand = self.work.panels[step.panel], step.operand
        pieces = panel.a if operand == "a" else panel.b
        dim = 1 if operand == "a" else 0
        self.lanes.let_line_wait(self.read.pop((operand, step.slot), None))
        with self.lanes.communicating():
            for piece in pieces:
                target, shown = self.view(panel, operand, step.slot, piece.part)
                if piece.root == along(operand, self.coordinate):
                    own = self.local(panel, operand, piece.part)
                    if len(pieces) == 1 and own.is_contiguous():
                        target = own
                    else:
                        shown.copy_(own)
                self.broadcast(target, piece.root, dim)
        self.arrived[operand, step.panel] = self.lanes.after_line()

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

    def local(self, panel: Panel, operand: str, part: Part) -> Tensor:
        """Return the range of a panel's operand that this rank holds itself."""
        rows, cols = self.division.computes(self.coordinate)
        inner = Part(0, self.division.shape[2])
        wanted = {"m": rows, "n": cols, "k": inner} | {panel.axis: part}
        if operand == "a":
            return self.within(self.a, self.division.a_rows, self.division.a_inner, wanted["m"], wanted["k"])
        return self.within(self.b, self.division.b_inner, self.division.b_cols, wanted["k"], wanted["n"])

    def within(self, local: Tensor, down: Any, across: Any, rows: Part, cols: Part) -> Tensor:
        """Return the rows and columns of a whole matrix that are in this rank's part of it."""
        top, left = down.at(self.coordinate).begin, across.at(self.coordinate).begin
        return local[rows.begin - top : rows.end - top, cols.begin - left : cols.end - left]

    def product(self, step: Multiply) -> None:
        """Multiply a panel."""
        panel, found = self.work.panels[step.panel], []
        for operand, slot in (("a", step.a_slot), ("b", step.b_slot)):
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
        self.multiply(out, found[0], found[1], self.alpha, self.beta if step.first else 1.0)
        event = self.lanes.after_products()
        for operand, slot in (("a", step.a_slot), ("b", step.b_slot)):
            if slot is not None:
                self.read[operand, slot] = event

    def reduce(self, step: Reduce) -> None:
        """Multiply for a chunk of C, in place on its root, and add the sums of all ranks there."""
        chunk, roots = step.chunk, step.chunk.root == self.coordinate[0]
        self.lanes.let_products_wait(self.read.pop(("c", step.slot), None))
        inner = self.division.inner(self.coordinate)
        a = self.within(self.a, self.division.a_rows, self.division.a_inner, chunk.rows, inner)
        b = self.within(self.b, self.division.b_inner, self.division.b_cols, inner, chunk.cols)
        stored = self.slots["c"][step.slot][: chunk.rows.extent * chunk.cols.extent]
        target = stored.view(chunk.rows.extent, chunk.cols.extent)
        place = self.place(chunk)
        if roots and place is not None and place.is_contiguous():
            target = place
        elif roots and place is not None and self.beta != 0:
            target.copy_(place)
        self.multiply(target, a, b, self.alpha, self.beta if roots else 0.0)
        self.lanes.let_line_wait(self.lanes.after_products())
        with self.lanes.communicating():
            group = self.groups[0]
            if group is not None:
                dist.reduce(target, dist.get_global_rank(group, chunk.root), group=group)
            if roots and place is not None and target is not place:
                place.copy_(target)
        self.read["c", step.slot] = self.lanes.after_line()

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
        self.lanes.let_line_wait(self.lanes.after_products())
        with self.lanes.communicating():
            sent = place if place.is_contiguous() else place.contiguous()
            self.broadcast(sent, step.root, dim)
            if sent is not place:
                place.copy_(sent)


def execute(
    work: Work,
    coordinate: Coordinate,
    groups: tuple[Any, Any],
    a: Tensor,
    b: Tensor,
    out: Tensor,
    alpha: float,
    beta: float,
    multiply: Multiplication,
) -> None:
    """Execute a rank's steps; parameters are those of `Executor`."""
    Executor(work, coordinate, groups, a, b, out, alpha, beta, multiply).run()
