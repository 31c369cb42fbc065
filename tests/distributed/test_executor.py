"""The executor on streams that are threads: every interleaving that its events permit computes the product."""

from __future__ import annotations

import queue
import random
import threading
import time
from contextlib import contextmanager
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from numba_gemm.distributed.division import divide, shards  # noqa: E402
from numba_gemm.distributed.executor import Executor  # noqa: E402
from numba_gemm.distributed.model import Rates, plan_work  # noqa: E402
from numba_gemm.distributed.placements import COLS, ROWS, WHOLE, algorithm  # noqa: E402

ALPHA, BETA, SECONDS = 2.0, -3.0, 30


class ThreadStream:
    """A stream: work is done in order, at some time after it was sent."""

    def __init__(self, delay):
        self.work, self.delay, self.failed = queue.Queue(), delay, []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        while (action := self.work.get()) is not None:
            time.sleep(self.delay())
            try:
                action()
            except Exception as error:
                self.failed.append(error)

    def record(self):
        event = threading.Event()
        self.work.put(event.set)
        return event

    def wait(self, event):
        self.work.put(lambda: event.wait(SECONDS))

    def finish(self):
        self.work.put(None)
        self.thread.join(SECONDS)
        assert not self.failed, self.failed[0]


class ThreadLanes:
    """The methods of `Lanes`, on two such streams."""

    def __init__(self, products, line):
        self.products, self.line = ThreadStream(products), ThreadStream(line)

    @contextmanager
    def run(self):
        self.line.wait(self.products.record())
        yield
        self.products.wait(self.line.record())

    def multiply(self, action):
        self.products.work.put(action)

    def communicate(self, action):
        self.line.work.put(action)

    def after_products(self):
        return self.products.record()

    def after_line(self):
        return self.line.record()

    def let_products_wait(self, event):
        if event is not None:
            self.products.wait(event)

    def let_line_wait(self, event):
        if event is not None:
            self.line.wait(event)


class Meeting:
    """The ranks of one row or column of the grid: a collective ends when all have come."""

    def __init__(self, count):
        self.barrier, self.memory = threading.Barrier(count, timeout=SECONDS), {}

    def broadcast(self, rank, tensor, root):
        if rank == root:
            self.memory[root] = tensor.clone()
        self.barrier.wait()
        if rank != root:
            tensor.copy_(self.memory[root])
        self.barrier.wait()

    def add(self, rank, tensor, root):
        self.memory[rank] = tensor.clone()
        self.barrier.wait()
        if rank == root:
            tensor.copy_(sum(self.memory.values()))
        self.barrier.wait()


class OnThreads(Executor):
    """An executor whose groups are meetings."""

    def broadcast(self, tensor, root, dim):
        if tensor.numel() and self.groups[dim] is not None:
            self.groups[dim].broadcast(self.coordinate[dim], tensor, root)

    def add(self, tensor, root):
        if self.groups[0] is not None:
            self.groups[0].add(self.coordinate[0], tensor, root)


def multiply(out, a, b, alpha, beta):
    out.copy_(alpha * a @ b + (beta * out if beta else 0))


SLOW = {
    "products": (lambda: 0.004, lambda: 0.0),
    "line": (lambda: 0.0, lambda: 0.004),
    "both": (lambda: random.random() * 0.004,) * 2,
}
BLOCKS = (ROWS, COLS)
CASES = {
    "B along k": ((3,), (ROWS,), (ROWS,), (ROWS,)),
    "B along n": ((3,), (ROWS,), (COLS,), (ROWS,)),
    "A along m": ((3,), (ROWS,), (COLS,), (COLS,)),
    "A along k": ((3,), (COLS,), (COLS,), (COLS,)),
    "both": ((2, 3), BLOCKS, BLOCKS, BLOCKS),
    "sums": ((3,), (COLS,), (ROWS,), (ROWS,)),
    "sums by columns": ((3,), (COLS,), (ROWS,), (COLS,)),
    "sums for all": ((3,), (COLS,), (ROWS,), (WHOLE,)),
    "result for all": ((3,), (ROWS,), (ROWS,), (WHOLE,)),
}


def parts(division, coordinate):
    return (
        (division.a_rows.at(coordinate), division.a_inner.at(coordinate)),
        (division.b_inner.at(coordinate), division.b_cols.at(coordinate)),
        division.holds(coordinate),
    )


@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("panel", [2, None])
def test_events_order_both_streams(case, slow, panel):
    """The operands are written by work sent to the current stream before, and overwritten by work sent after."""
    mesh, x, y, z = CASES[case]
    m, n, k = 12, 10, 13
    found = algorithm(x, y, z)
    division = divide(found, mesh, x, y, shards((m, k), x, mesh), shards((k, n), y, mesh))
    work = plan_work(division, "ieee", Rates(56e12), panel)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randint(-4, 5, shape, generator=generator).float() for shape in ((m, k), (k, n), (m, n))]
    expected = ALPHA * whole[0] @ whole[1] + BETA * whole[2]
    columns, rows = ([Meeting(division.grid[dim]) for _ in range(division.grid[1 - dim])] for dim in (0, 1))
    running = []
    for coordinate in division.coordinates:
        mine = [
            one[down.slice, across.slice].clone() for one, (down, across) in zip(whole, parts(division, coordinate))
        ]
        given = [torch.full_like(one, float("nan")) for one in mine]
        if panel is None:  # C by columns, whose rows are not contiguous
            given[2] = given[2].t().contiguous().t()
        lanes = ThreadLanes(*SLOW[slow])
        groups = [
            meeting if extent > 1 else None
            for meeting, extent in zip((columns[coordinate[1]], rows[coordinate[0]]), division.grid)
        ]
        for target, source in zip(given, mine):
            lanes.multiply(partial(target.copy_, source))
        executor = OnThreads(work, coordinate, groups, *given, ALPHA, BETA, multiply, lanes)
        for slots in executor.slots.values():
            for slot in slots:
                slot.fill_(float("nan"))
        executor.run()
        result = torch.empty_like(given[2])
        lanes.multiply(partial(result.copy_, given[2]))
        for target in (*given, *(slot for slots in executor.slots.values() for slot in slots)):
            lanes.multiply(partial(target.fill_, float("nan")))
        running.append((lanes, coordinate, result))
    for lanes, coordinate, result in running:
        lanes.products.finish()
        lanes.line.finish()
        down, across = division.holds(coordinate)
        assert torch.equal(result, expected[down.slice, across.slice])
