"""Execution of a streamed product: one thread brings panels in, one launches products, one takes strips of C out.

A queue waits for the work of another one at a mark, which exists only once that work is enqueued. So threads pass marks
through gates: one thread puts a mark in; others wait until it is available, then make their queue wait for it.

Dependencies:

- the copy of a panel waits for the products of the panel that had its place (`used`);
- a product waits for its panel (`loaded`), and for what was copied before it;
- the first product of a strip, or the strip's copy to the device if C is read, waits until the strip of the previous
  block has left (`gone`);
- the copy of a strip to the host waits for the product that completes it; this mark comes with the strip's number
  through `SimpleQueue`, not a gate.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np

from .blocking import Blocking, Part, Piece
from .host import Flag, HostMatrix, Ring, Stopped, copying_threads
from .products import Products
from .queues import Device, Mark, Queue

__all__ = ["AHEAD", "Done", "Run", "Stop", "bring_in", "ring_of", "take_out"]

AHEAD = 2  # panels whose products are enqueued and not done; an interrupt has to wait for them
BUFFER_ELEMENTS = 1 << 20  # per page-locked buffer: 4 MiB, whose allocation takes two milliseconds
BUFFERS_COPIED = 4


@dataclass(frozen=True)
class Done:
    """Completed part of `out`.

    Attributes
    ----------
    rows, cols : slice
        Rows and columns of the part.
    number, count : int
        Number of complete parts, including this one, and number of all parts.
    elements, of : int
        The same, counted in elements.
    """

    rows: slice
    cols: slice
    number: int
    count: int
    elements: int
    of: int


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


class Stop:
    """Early end of a run, by the first error or interrupt of any thread."""

    def __init__(self) -> None:
        self.event = Flag()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._then: Callable[[], object] | None = None

    def __call__(self, error: BaseException) -> None:
        """End the run."""
        with self._lock:
            if self._error is None:
                self._error = error
            self.event.set()
            then = self._then
        if then is not None:
            then()

    def follow(self, then: Callable[[], object] | None) -> None:
        """Call `then` when the run is stopped, at once if it has been; None when there is nothing left to end."""
        with self._lock:
            self._then = then
        if then is not None and self.event.is_set():
            then()

    def check(self) -> None:
        """Raise the error, if there is one, and forget it, so that what it refers to may be freed."""
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error


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
        return gate.result()

    def shut(self) -> None:
        """Make all present and future calls raise `Stopped`."""
        with self._lock:
            self._shut = True
            for gate in self._gates.values():
                if not gate.done():
                    gate.set_exception(Stopped())


class Run:
    """Run of one streamed product.

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
    report : callable
        Called with each part of C that is complete, on a thread of the run.
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
        report: Callable[[Done], object],
        threads: tuple[int, int],
        stop: Stop,
    ) -> None:
        self._device, self._blocking, self._products = device, blocking, products
        (self._a, self._b, self._c), self._alpha, self._beta = operands, alpha, beta
        self._report = report
        self._strips = sum(len(blocking.strips(block)) for block in range(blocking.count))
        self._arrived = Done(slice(0, 0), slice(0, 0), 0, self._strips, 0, blocking.m * blocking.n)
        self._gates, self._leaving = Gates(), SimpleQueue[tuple[int, int, Any] | None]()
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

    def _bring(self) -> None:
        """Bring in panels, and C if it is read."""
        panels = self._blocking.panels
        with ring_of(self._device, self._threads[0], "to-device", self._stop.event) as ring:
            for turn in range(self._blocking.count * len(panels)):
                block, panel = divmod(turn, len(panels))
                (rows, cols), inner = self._blocking.block(block), panels[panel]
                if turn >= self._blocking.slots:
                    self._up.follow(self._gates.get(("used", turn - self._blocking.slots)))
                if self._beta != 0 and panel == 0:
                    for number, strip in enumerate(self._blocking.strips(block)):
                        if self._in_the_way(block, number):
                            self._up.follow(self._gates.get(("gone", block - 1, number)))
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
        before, of = self._arrived, self._blocking.m * self._blocking.n
        elements = before.elements + rows.extent * cols.extent
        self._arrived = Done(rows.slice, cols.slice, before.number + 1, self._strips, elements, of)
        self._report(self._arrived)

    def _multiply(self) -> None:
        """Launch the products."""
        count = len(self._blocking.panels)
        for turn in range(self._blocking.count * count):
            if turn >= AHEAD:
                self._gates.get(("used", turn - AHEAD)).wait()
            self._compute.follow(self._gates.get(("loaded", turn)))
            for piece in self._blocking.pieces(*divmod(turn, count)):
                if piece.first:
                    self._make_room(piece)
                self._launch(turn, piece)
                if piece.last:
                    mark = self._compute.record()
                    for number in piece.strips:
                        self._leaving.put((piece.block, number, mark))
            self._gates.put(("used", turn), self._compute.record())

    def _in_the_way(self, block: int, strip: int) -> bool:
        """True if the previous block has such a strip, which occupies the same place."""
        return block > 0 and strip < len(self._blocking.strips(block - 1))

    def _make_room(self, piece: Piece) -> None:
        """Wait for the strips of the previous block; if C is read, its copy to the device has waited for them."""
        for number in piece.strips:
            if self._beta == 0 and self._in_the_way(piece.block, number):
                self._compute.follow(self._gates.get(("gone", piece.block - 1, number)))

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
            self._stop(error)

    def __call__(self) -> None:
        """Run the product; once all threads of the run have ended, raise what any of them raised or what stopped it."""
        works = {"bring": self._bring, "take": self._take}
        threads = [threading.Thread(target=self._on_thread, args=(works[name],), name=name) for name in works]
        self._stop.follow(self._end)
        with self._device.scope():
            try:
                for thread in threads:
                    thread.start()
                self._multiply()
            except Stopped:
                pass
            except BaseException as error:
                self._stop(error)
            finally:
                self._leaving.put(None)
                for thread in threads:
                    if thread.ident is not None:
                        thread.join()
                self._stop.follow(None)  # otherwise it would keep the operands
        self._stop.check()

    def _end(self) -> None:
        """Let all threads notice that the run is over."""
        self._gates.shut()
        self._leaving.put(None)
