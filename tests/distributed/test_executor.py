"""The executor on streams that are threads: every interleaving that its events permit computes the product."""

from __future__ import annotations

import math
import queue
import random
import threading
import time
from contextlib import contextmanager
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from numba_gemm.distributed.copying import CopyingExecutor  # noqa: E402
from numba_gemm.distributed.division import divide, shards  # noqa: E402
from numba_gemm.distributed.executor import Executor  # noqa: E402
from numba_gemm.distributed.failures import OthersFailed  # noqa: E402
from numba_gemm.distributed.model import Rates, plan_work  # noqa: E402
from numba_gemm.distributed.placements import COLS, ROWS, WHOLE, algorithm  # noqa: E402

ALPHA, BETA, SECONDS = 2.0, -3.0, 30


@pytest.fixture(autouse=True)
def short_products_are_copied(monkeypatch):
    monkeypatch.setattr("numba_gemm.distributed.model.COPIED_FROM", 0.0)


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
        self.until_failure = math.inf  # products that can be sent

    @contextmanager
    def run(self):
        self.line.wait(self.products.record())
        try:
            yield
        finally:
            self.products.wait(self.line.record())

    def multiply(self, action):
        if not self.until_failure:
            raise ArithmeticError("this product fails")
        self.until_failure -= 1
        self.products.work.put(action)

    def communicate(self, action):
        self.line.work.put(action)

    def after_products(self):
        return self.products.record()

    def after_line(self):
        return self.line.record()

    def record_products(self, event):
        event.latest = self.products.record()

    def record_line(self, event):
        event.latest = self.line.record()

    def let_products_wait(self, event):
        if event is not None:
            self.products.wait(getattr(event, "latest", event))

    def let_line_wait(self, event):
        if event is not None:
            self.line.wait(getattr(event, "latest", event))

    def finish(self):
        for stream in (self.products, self.line):
            assert stream.record().wait(SECONDS)


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


class Recorded:
    """An event that is recorded again and again: waiting is for what was recorded last."""

    def __init__(self):
        self.latest = threading.Event()
        self.latest.set()  # as an event that was never recorded


class Memory:
    """Memory of a rank that others copy to and from, as its `Buffer` and as their `Peer`."""

    def __init__(self, elements):
        self.memory = torch.full((elements,), float("nan"))
        self.ready, self.free, self.read = [Recorded(), Recorded()], [Recorded(), Recorded()], Recorded()

    def read_into(self, target, begin):
        target.copy_(self.memory[begin : begin + target.numel()].view(target.shape))

    def write(self, source, begin, pitch):
        self.memory.as_strided(source.shape, (pitch, 1), begin).copy_(source)


class Agreement:
    """An exchange that ends when all ranks have come: True if all have said so."""

    def __init__(self, count):
        self.said, self.found = [], True
        self.barrier = threading.Barrier(count, self._count, SECONDS)

    def _count(self):
        self.found, self.said = all(self.said), []

    def __call__(self, fine):
        self.said.append(fine)
        self.barrier.wait()
        return self.found


class CopiesOnThreads(CopyingExecutor):
    """A copying executor whose ranks meet at an exchange."""

    def __init__(self, *others, all_agree, **memory):
        super().__init__(*others, mesh=None, **memory)
        self.all_agree = all_agree


def multiply(out, a, b, alpha, beta):
    out.copy_(alpha * a @ b + (beta * out if beta else 0))


SLOW = {
    "products": (lambda: 0.004, lambda: 0.0),
    "line": (lambda: 0.0, lambda: 0.004),
    "both": (lambda: random.random() * 0.004,) * 2,
}
BLOCKS = (ROWS, COLS)
BY_ROWS, SUMS = ((ROWS,), (ROWS,), (ROWS,)), ((COLS,), (ROWS,), (ROWS,))
CASES = {
    "B along k": ((3,), (ROWS,), (ROWS,), (ROWS,)),
    "B along n": ((3,), (ROWS,), (COLS,), (ROWS,)),
    "A along m": ((3,), (ROWS,), (COLS,), (COLS,)),
    "A along k": ((3,), (COLS,), (COLS,), (COLS,)),
    "both": ((2, 3), BLOCKS, BLOCKS, BLOCKS),
    "sums": ((3,), (COLS,), (ROWS,), (ROWS,)),
    "sums of five": ((5,), (COLS,), (ROWS,), (ROWS,)),
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


class Rank:
    """One rank's operands, written by work sent to its current stream, and its two streams."""

    def __init__(self, division, coordinate, whole, slow, by_columns):
        mine = [
            one[down.slice, across.slice].clone() for one, (down, across) in zip(whole, parts(division, coordinate))
        ]
        self.given = [torch.full_like(one, float("nan")) for one in mine]
        if by_columns:  # C, whose rows are not contiguous
            self.given[2] = self.given[2].t().contiguous().t()
        self.division, self.coordinate, self.lanes = division, coordinate, ThreadLanes(*SLOW[slow])
        for target, source in zip(self.given, mine):
            self.lanes.multiply(partial(target.copy_, source))

    def run(self, executor, *others):
        """Run the executor; then overwrite all that it may have read, by work sent to the current stream."""
        allocate, slots = executor.allocate, []

        def with_nan():
            allocate()
            own = [] if executor.work.copied else ["a", "b"]  # others may have copied to these already
            slots.extend(slot for name in (*own, "c") for slot in executor.slots[name])
            for slot in slots:
                slot.fill_(float("nan"))

        executor.allocate = with_nan
        executor.run()
        self.result = torch.empty_like(self.given[2])
        self.lanes.multiply(partial(self.result.copy_, self.given[2]))
        for target in (*self.given, *slots, *others):
            self.lanes.multiply(partial(target.fill_, float("nan")))

    def check(self, expected):
        """Wait for the streams, and compare the result."""
        self.lanes.products.finish()
        self.lanes.line.finish()
        down, across = self.division.holds(self.coordinate)
        assert torch.equal(self.result, expected[down.slice, across.slice])


def problem(case):
    """A case's division, whole matrices, and the product."""
    mesh, x, y, z = CASES[case]
    m, n, k = 12, 10, 13
    division = divide(algorithm(x, y, z), mesh, x, y, shards((m, k), x, mesh), shards((k, n), y, mesh))
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randint(-4, 5, shape, generator=generator).float() for shape in ((m, k), (k, n), (m, n))]
    return division, whole, ALPHA * whole[0] @ whole[1] + BETA * whole[2]


@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("panel", [2, None])
def test_events_order_both_streams(case, slow, panel):
    """The operands are written by work sent to the current stream before, and overwritten by work sent after."""
    division, whole, expected = problem(case)
    work = plan_work(division, "ieee", Rates(56e12), panel)
    columns, rows = ([Meeting(division.grid[dim]) for _ in range(division.grid[1 - dim])] for dim in (0, 1))
    ranks = []
    for coordinate in division.coordinates:
        rank = Rank(division, coordinate, whole, slow, panel is None)
        groups = [
            meeting if extent > 1 else None
            for meeting, extent in zip((columns[coordinate[1]], rows[coordinate[0]]), division.grid)
        ]
        rank.run(OnThreads(work, coordinate, groups, *rank.given, ALPHA, BETA, multiply, rank.lanes))
        ranks.append(rank)
    for rank in ranks:
        rank.check(expected)


@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.parametrize("case", [case for case in CASES if not case.endswith("for all")])
@pytest.mark.parametrize("panel", [2, None])
def test_events_order_copies(case, slow, panel):
    """The same, and what others copy to or from is overwritten by work sent after the call."""
    division, whole, expected = problem(case)
    work = plan_work(division, "ieee", Rates(56e12), panel, copied=True)
    assert work.copied
    memory = {at: Memory(work.room(at)) for at in division.coordinates}
    all_agree, ranks, hosts = Agreement(len(memory)), [], []
    for coordinate in division.coordinates:
        rank = Rank(division, coordinate, whole, slow, panel is None)
        peers = {at: one for at, one in memory.items() if at != coordinate}
        executor = CopiesOnThreads(
            *(work, coordinate, (None, None), *rank.given, ALPHA, BETA, multiply, rank.lanes),
            buffer=memory[coordinate],
            peers=peers,
            all_agree=all_agree,
        )
        ranks.append(rank)
        hosts.append(threading.Thread(target=rank.run, args=(executor, memory[coordinate].memory)))
        hosts[-1].start()
    for host in hosts:
        host.join(SECONDS)
    for rank in ranks:
        rank.check(expected)


def followed(works, lanes, failing=None):
    """Compute products one after the other in the same memory; the first one fails on the failing rank."""
    memory = {at: Memory(max(work.room(at) for work in works if at in work.division.coordinates)) for at in lanes}
    agreements = {work.division.grid: Agreement(math.prod(work.division.grid)) for work in works}
    generator = torch.Generator().manual_seed(1)
    m, n, k = works[0].division.shape
    wholes = [
        [torch.randint(-4, 5, shape, generator=generator).float() for shape in ((m, k), (k, n), (m, n))] for _ in works
    ]
    results = {}

    def rank(at):
        for turn, (work, whole) in enumerate(zip(works, wholes)):
            if at not in work.division.coordinates:
                continue
            all_agree = agreements[work.division.grid]
            all_agree(True)  # as ranks compare arguments
            own = [
                one[down.slice, across.slice].clone() for one, (down, across) in zip(whole, parts(work.division, at))
            ]
            executor = CopiesOnThreads(
                *(work, at, (None, None), *own, ALPHA, BETA, multiply, lanes[at]),
                buffer=memory[at],
                peers={other: memory[other] for other in work.division.coordinates if other != at},
                all_agree=all_agree,
            )
            if failing is None or turn:
                executor.run()
                results[at, turn] = own[2]
            else:
                with pytest.raises(ArithmeticError if at == failing else OthersFailed):
                    executor.run()
                lanes[at].until_failure = math.inf

    hosts = [threading.Thread(target=rank, args=(at,)) for at in memory]
    for host in hosts:
        host.start()
    for host in hosts:
        host.join(SECONDS)
    for one in lanes.values():
        one.products.finish()
        one.line.finish()
    for (at, turn), result in results.items():
        a, b, c = wholes[turn]
        down, across = works[turn].division.holds(at)
        assert torch.equal(result, (ALPHA * a @ b + BETA * c)[down.slice, across.slice]), (at, turn)
    computed = works if failing is None else works[1:]
    assert len(results) == sum(len(work.division.coordinates) for work in computed)


def work_of(placed, mesh, shape, panel):
    m, n, k = shape
    x, y, z = placed
    division = divide(algorithm(x, y, z), mesh, x, y, shards((m, k), x, mesh), shards((k, n), y, mesh))
    return plan_work(division, "ieee", Rates(56e12), panel, copied=True)


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("panels", [(2, 8), (8, 2, 8, 2), (4, 2, 8, 1)])
def test_products_follow_each_other_with_other_slots(panels, late):
    """Slots of a product lie across those of the one before, which a slow rank still multiplies."""
    works = [work_of(BY_ROWS, (2,), (12, 10, 16), panel) for panel in panels]
    followed(works, {(at, 0): ThreadLanes(*SLOW["products" if at == late else "both"]) for at in range(2)})


@pytest.mark.parametrize(
    ("first", "panel", "second", "failing", "done", "slow"),
    [
        pytest.param(SUMS, None, BY_ROWS, 0, 0, {1: "products"}, id="sums for others"),
        pytest.param(BY_ROWS, 8, SUMS, 0, 0, {1: "line"}, id="the last copies"),
        pytest.param(BY_ROWS, None, BY_ROWS, 0, 1, {0: "products"}, id="an own piece"),
        pytest.param(BY_ROWS, 8, BY_ROWS, 1, 0, {1: "products", 2: "line"}, id="copies of a third rank"),
    ],
)
def test_a_product_follows_one_that_failed(first, panel, second, failing, done, slow):
    """The second product, on two ranks, waits for what is left of the first one, which fails after some products."""
    ranks = max(2, max(slow) + 1)
    works = [work_of(first, (ranks,), (12, 10, 16), panel), work_of(second, (2,), (12, 10, 16), 8)]
    delays = {"products": (0.03, 0.0), "line": (0.0, 0.03), None: (0.0, 0.0)}
    lanes = {(at, 0): ThreadLanes(*(partial(float, one) for one in delays[slow.get(at)])) for at in range(ranks)}
    lanes[failing, 0].until_failure = done
    followed(works, lanes, (failing, 0))
