"""Execution of a streamed product on a device: threads bring panels in, launch products, and take strips of C out.

A queue waits for the work of another one at a mark, which exists only once that work is enqueued. So threads pass marks
through gates: one thread puts a mark in; others wait until it is available, then make their queue wait for it.

Dependencies:

- the copy of a panel waits for the products of the panel that had its place (`used`);
- a product waits for its panel (`loaded`), and for what was copied before it;
- the first product of a strip, or the strip's copy to the device if C is read, waits until the strip of the device's
  previous block has left (`gone`);
- the copy of a strip to the host waits for the product that completes it; this mark comes with the strip's number
  through `SimpleQueue`, not a gate.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import numpy as np

from .blocking import Blocking, Part, Piece
from .host import Flag, HostMatrix, Ring, Stopped, copying_threads
from .products import Products
from .queues import Device, Mark, Queue
from .sharing import Deal, Stop

__all__ = ["AHEAD", "Run", "bring_in", "ring_of", "take_out"]

AHEAD = 2  # panels whose products are enqueued and not done; an interrupt has to wait for them
BUFFER_ELEMENTS = 1 << 20  # per page-locked buffer: 4 MiB, whose allocation takes two milliseconds
BUFFERS_COPIED = 4


@contextmanager
def ring_of(device: Device, threads: int, name: str, stop: Flag) -> Iterator[Ring]:
    """Provide threads with a buffer each, and further buffers for copies to or from the device meanwhile."""
    with copying_threads(device, threads, name) as pool:
        yield Ring(device, pool, threads + BUFFERS_COPIED, BUFFER_ELEMENTS, stop)


def bring_in(queue: Queue, ring: Ring, target: Any, source: np.ndarray, direct: bool) -> list[Future[Any]]:
    """Enqueue the copy of a matrix to the device, which is complete when the queue is done."""
    if direct:
        queue.to_device(target, source)
    else:
        ring.to_device(queue, target, source)
    return []


def take_out(queue: Queue, ring: Ring, target: np.ndarray, source: Any, direct: bool) -> list[Future[Any]]:
    """Enqueue the copy of a matrix to the host, which is complete when the queue and the returned futures are done."""
    if direct:
        queue.to_host(target, source)
        return []
    return ring.to_host(queue, target, source)


class Gates:
    """Marks by name; a thread that asks for one too early waits for it."""

    def __init__(self) -> None:
        self._gates: dict[Any, Future[Any]] = defaultdict(Future)
        self._lock = threading.Lock()
        self._shut = False

    def put(self, name: Any, mark: Any) -> None:
        """Make a mark available to other threads."""
        with self._lock:
            if self._shut:
                raise Stopped
            self._gates[name].set_result(mark)

    def get(self, name: Any) -> Any:
        """Wait for a mark and return it."""
        with self._lock:
            if self._shut:
                raise Stopped
            gate = self._gates[name]
        if (mark := gate.result()) is None:
            raise Stopped
        return mark

    def shut(self) -> None:
        """Make all present and future calls raise `Stopped`."""
        with self._lock:
            self._shut = True
            for gate in self._gates.values():
                if not gate.done():
                    gate.set_result(None)  # an exception would keep the frames that it was raised in


class Run:
    """Run of one streamed product, or of a device's share of it.

    Parameters
    ----------
    device : Device
        Device that it runs on.
    memory : object
        Device memory of `Blocking.device_bytes` bytes.
    blocking : Blocking
        Division of the product.
    products : Products
        Launches the multiplications.
    operands : tuple of HostMatrix
        A, B and C; C is not stored by columns.
    alpha, beta : float
        Scalars.
    deal : Deal
        Blocks of C to compute.
    number : int
        Number of the device among those that share the blocks.
    report : callable
        Called with the rows and columns of each part of C that is complete, on a thread of the run.
    threads : tuple of int
        Numbers of host threads that copy to and from the device, where operands are not page-locked.
    stop : Stop
        Ends the run, from any thread.
    """

    def __init__(
        self,
        device: Device,
        memory: Any,
        blocking: Blocking,
        products: Products,
        operands: tuple[HostMatrix, HostMatrix, HostMatrix],
        alpha: float,
        beta: float,
        deal: Deal,
        number: int,
        report: Callable[[Part, Part], object],
        threads: tuple[int, int],
        stop: Stop,
    ) -> None:
        self._device, self._blocking, self._products = device, blocking, products
        (self._a, self._b, self._c), self._alpha, self._beta = operands, alpha, beta
        self._deal, self._number, self._report = deal, number, report
        self._before: dict[int, int | None] = {}  # the block that this device computes before each of its blocks
        self._gates, self._coming = Gates(), SimpleQueue[int | None]()
        self._leaving = SimpleQueue[tuple[int, int, Any] | None]()
        self._stop = stop
        self._up, self._compute, self._down = (device.queue() for _ in range(3))
        block, a_panel, b_panel, _ = blocking.parts
        self._memory = memory
        self._offsets = [block + slot * (a_panel + b_panel) for slot in range(blocking.slots)]
        self._b_offset, end = a_panel, block + blocking.slots * (a_panel + b_panel)
        self._workspace = products.workspace(device.address(self._memory) + end, blocking.shapes())
        device.clear(self._workspace)
        self._threads = threads

    # ------------------------------------------------------------------------------------------------------- places

    def _rows_on_device(self, block: int, rows: Part) -> Any:
        """Return some rows of a block of C."""
        (top, _), cols = self._blocking.block(block)
        widest = self._device.matrix(self._memory, 0, self._blocking.rows, self._blocking.cols)
        return self._device.part(widest, Part(rows.begin - top, rows.end - top), Part(0, cols.extent))

    def _panels_on_device(self, turn: int, rows: int, cols: int, inner: int) -> tuple[Any, Any]:
        offset = self._offsets[turn % self._blocking.slots]
        a = self._a.place(self._device, self._memory, offset, rows, inner)
        return a, self._b.place(self._device, self._memory, offset + self._b_offset, inner, cols)

    # ------------------------------------------------------------------------------------------------------ threads

    def _taken(self) -> Iterator[int]:
        """Take the blocks of this device one after the other; tell `_multiply` of each."""
        before = None
        while True:
            turn = len(self._before) * len(self._blocking.panels)
            if self._deal.devices > 1 and turn >= self._blocking.slots:
                # Otherwise a device takes a block that another one could begin sooner.
                self._gates.get(("used", turn - self._blocking.slots)).wait()
            block = self._deal.next(self._number)
            if block is not None:
                self._before[block] = before
            self._coming.put(block)
            if block is None:
                return
            yield block
            before = block

    def _turns(self, blocks: Iterable[int]) -> Iterator[tuple[int, int, int]]:
        """Yield the number of each panel among those of the device, its block, and its number in the block."""
        count = len(self._blocking.panels)
        for place, block in enumerate(blocks):
            for panel in range(count):
                yield place * count + panel, block, panel

    def _bring(self) -> None:
        """Bring in panels, and C if it is read."""
        panels = self._blocking.panels
        with ring_of(self._device, self._threads[0], "to-device", self._stop.event) as ring:
            for turn, block, panel in self._turns(self._taken()):
                (rows, cols), inner = self._blocking.block(block), panels[panel]
                if turn >= self._blocking.slots:
                    self._up.follow(self._gates.get(("used", turn - self._blocking.slots)))
                if self._beta != 0 and panel == 0:
                    for number, strip in enumerate(self._blocking.strips(block)):
                        if self._in_the_way(block, number):
                            self._up.follow(self._gates.get(("gone", self._before[block], number)))
                        self._load(ring, self._rows_on_device(block, strip), self._c, strip, cols)
                a, b = self._panels_on_device(turn, rows.extent, cols.extent, inner.extent)
                self._load(ring, a, self._a, rows, inner)
                self._load(ring, b, self._b, inner, cols)
                self._gates.put(("loaded", turn), self._up.record())

    def _load(self, ring: Ring, target: Any, matrix: HostMatrix, rows: Part, cols: Part) -> None:
        bring_in(self._up, ring, target, matrix.part(rows, cols), matrix.direct)

    def _take(self) -> None:
        """Take out strips of C that are complete, and report those that have arrived."""
        under_way: deque[tuple[Part, Part, Mark, list[Future[Any]]]] = deque()
        with ring_of(self._device, self._threads[1], "to-host", self._stop.event) as ring:
            while (item := self._leaving.get()) is not None:
                block, number, mark = item
                cols, strip = self._blocking.block(block)[1], self._blocking.strips(block)[number]
                self._down.follow(mark)
                target, source = self._c.part(strip, cols), self._rows_on_device(block, strip)
                copies = take_out(self._down, ring, target, source, self._c.direct)
                left = self._down.record()
                self._gates.put(("gone", block, number), left)
                under_way.append((strip, cols, left, copies))
                while under_way and (len(under_way) > 1 or self._leaving.empty()):
                    self._arrive(*under_way.popleft())
            while under_way:
                self._arrive(*under_way.popleft())

    def _arrive(self, rows: Part, cols: Part, left: Mark, copies: list[Future[Any]]) -> None:
        left.wait()
        for copy in copies:
            copy.result()
        self._report(rows, cols)

    def _multiply(self) -> None:
        """Launch the products."""
        for turn, block, panel in self._turns(iter(self._coming.get, None)):
            if turn >= AHEAD:
                self._gates.get(("used", turn - AHEAD)).wait()
            self._compute.follow(self._gates.get(("loaded", turn)))
            for piece in self._blocking.pieces(block, panel):
                if piece.first:
                    self._make_room(piece)
                self._launch(turn, piece)
                if piece.last:
                    mark = self._compute.record()
                    for number in piece.strips:
                        self._leaving.put((piece.block, number, mark))
            self._gates.put(("used", turn), self._compute.record())

    def _in_the_way(self, block: int, strip: int) -> bool:
        """True if the device's previous block has such a strip, which occupies the same place."""
        before = self._before[block]
        return before is not None and strip < len(self._blocking.strips(before))

    def _make_room(self, piece: Piece) -> None:
        """Wait for the strips of the previous block; if C is read, its copy to the device has waited for them."""
        for number in piece.strips:
            if self._beta == 0 and self._in_the_way(piece.block, number):
                self._compute.follow(self._gates.get(("gone", self._before[piece.block], number)))

    def _launch(self, turn: int, piece: Piece) -> None:
        rows, cols = self._blocking.block(piece.block)
        a, b = self._panels_on_device(turn, rows.extent, cols.extent, piece.inner.extent)
        own, everything = Part(piece.rows.begin - rows.begin, piece.rows.end - rows.begin), Part(0, piece.inner.extent)
        a = self._device.part(a, *((everything, own) if self._a.by_columns else (own, everything)))
        c = self._rows_on_device(piece.block, piece.rows)
        lying = ((a, self._a.by_columns), (b, self._b.by_columns), (c, False))
        places = [self._device.place(matrix, turned) for matrix, turned in lying]
        x, y, z = self._products.operands(self._blocking.shape(piece), places)
        beta = self._beta if piece.first else 1.0
        self._compute.run(lambda stream: self._products.enqueue(self._alpha, x, y, beta, z, stream, self._workspace))

    # --------------------------------------------------------------------------------------------------------- whole

    def _on_thread(self, work: Callable[[], None]) -> None:
        try:
            self._device.enter()
            work()
        except Stopped:
            pass
        except BaseException as error:
            self._stop_by(error)

    def _stop_by(self, error: BaseException) -> None:
        if self._deal.devices > 1:
            error.add_note(f"streamed_sgemm: raised by the share of device {self._device.ordinal}")
        self._stop(error)

    def __call__(self) -> None:
        """Run until all threads of the run have ended; the first error of any run of the product is kept by `Stop`."""
        works = {"bring": self._bring, "take": self._take}
        threads = [threading.Thread(target=self._on_thread, args=(works[name],), name=name) for name in works]
        self._stop.follow(self._end)
        try:
            with self._device.scope():
                try:
                    for thread in threads:
                        thread.start()
                    self._multiply()
                except Stopped:
                    pass
                except BaseException as error:
                    self._stop_by(error)
                finally:
                    self._leaving.put(None)
                    for thread in threads:
                        if thread.ident is not None:
                            thread.join()
        finally:
            self._stop.leave(self._end)  # otherwise it would keep the operands

    def _end(self) -> None:
        """Let all threads notice that the run is over."""
        self._gates.shut()
        self._coming.put(None)
        self._leaving.put(None)
