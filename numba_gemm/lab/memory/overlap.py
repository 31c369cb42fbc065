"""Copies, kernels and host code overlap if they use different streams and page-locked memory."""

import functools
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numba import cuda

from numba_gemm.device.units import ceil_div
from numba_gemm.lab.harness.pictures import COLOURS, bars, curves, panels
from numba_gemm.lab.memory import machine, movement
from numba_gemm.runtime.timing import Call, Events, call_ms, elapsed, host_us, no_wait, span_ms

BLOCK = 256
TIMELINE_STREAMS = 4
PERIOD = 4096  # of the data; small numbers, so that sums of many ones stay exact
LEGACY = 1  # the driver's CU_STREAM_LEGACY, regardless of the meaning of handle 0
HOST_ELEMENTS = 1 << 16  # size of the host's work: small enough for its cache, so that copies do not slow it down
TO_DEVICE, TO_HOST, KERNEL = "host to device", "device to host", "kernel"

Rows = Iterator[dict[str, Any]]


def staged_ms(transfer: float, kernel: float, stages: int) -> float:
    """Predicted time of copying and computing in stages, from the total time of each."""
    return max(transfer, kernel) + min(transfer, kernel) / stages


def pipeline(transfer: float, kernel: float, stages: int) -> list[tuple[float, float, float, float]]:
    """Predicted start and end of each stage's copy and kernel, both in order, one copy and one kernel at a time."""
    found, done = [], 0.0
    for number in range(stages):
        copied = (number + 1) * transfer / stages
        begin = max(copied, done)
        done = begin + kernel / stages
        found.append((number * transfer / stages, copied, begin, done))
    return found


def concurrent_ms(to_device: float, to_host: float, kernel: float, engines: int) -> float:
    """Predicted time of copies both ways and a kernel at once, from the time of each alone (0 if absent)."""
    if engines >= 2:
        return max(to_device, to_host, kernel)
    return max(to_device + to_host, kernel) if engines else to_device + to_host + kernel


def pieces(elements: int, streams: int, block: int = BLOCK) -> list[tuple[int, int]]:
    """Start and end of each stream's piece: whole blocks except for the last piece, and all elements together.

    With fewer blocks than streams, some streams are idle and there are fewer pieces.
    """
    size = ceil_div(elements, streams * block) * block
    return [(begin, min(begin + size, elements)) for begin in range(0, elements, size)]


def left_out(elements: int, streams: int, block: int = BLOCK) -> int:
    """Number of elements without a thread if N / (nThreads * nStreams) blocks per stream are rounded down."""
    return elements - elements // (block * streams) * block * streams


@machine.kernel("float32[::1], float32[::1], int64, float32, float32")
def work(x: Any, out: Any, turns: Any, factor: Any, summand: Any) -> None:
    """Apply a chain of fused multiply-adds to each element; factor and summand are unknown to the compiler."""
    i = cuda.grid(1)
    if i < x.size:
        value = x[i]
        while turns > 0:  # the compiler unrolls this loop; counting a range would take longer than the work
            value = value * factor + summand
            turns -= 1
        out[i] = value


def worker(x: Any, out: Any, turns: int) -> Call:
    """Return a call that enqueues the kernel on all of x, which stores each element plus `turns`."""
    one = np.float32(1)
    return machine.enqueue(work, ceil_div(x.size, BLOCK), BLOCK, x, out, turns, one, one)


def host_work(counter: np.ndarray, turns: int) -> None:
    """Count to `turns` in every element, one step at a time."""
    counter[:] = 0
    for _ in range(turns):
        np.add(counter, 1, out=counter)


@dataclass
class Bench:
    """Page-locked host data and two device arrays; methods that time and check work on them.

    `transfer` and `kernel` are the milliseconds of a copy to the device and of the kernel of `turns` turns, alone.
    """

    source: np.ndarray
    result: np.ndarray
    data: Any
    other: Any
    streams: Sequence[int]
    turns: int
    rounds: int
    transfer: float = 0.0
    kernel: float = 0.0

    def alone_ms(self, enqueue: Call) -> float:
        """Median span of one copy or kernel."""
        return call_ms(enqueue, self.streams[0], self.rounds)

    def kernel_ms(self, turns: int) -> float:
        """Time of the kernel alone on all the data."""
        movement.copying(self.data, self.source)(self.streams[0])
        return self.alone_ms(worker(self.data, self.data, turns))

    def clear(self) -> None:
        """Overwrite the results so that nothing in them looks like one; copy the data to the other device array."""
        self.result[:] = -1
        movement.clear(self.data, self.source.nbytes, self.streams[0])
        movement.copying(self.other, self.source)(self.streams[0])
        movement.finish(self.streams[0])

    def check(self, turns: int, what: str, data: Any = None, elements: int | None = None) -> None:
        """Raise AssertionError unless the first elements on the device are the host's plus `turns`, the others NaN."""
        movement.copying(self.result, self.data if data is None else data)(self.streams[0])
        movement.finish(self.streams[0])
        np.subtract(self.result, self.source, out=self.result)  # in place, which saves touching more memory
        added, others = np.split(self.result, [elements or self.source.size])
        assert np.append(added == turns, np.isnan(others)).all(), f"{what}: the result is wrong"

    def parts(self, elements: int, count: int, turns: int) -> list[tuple[Call, Call]]:
        """Return the calls that copy and compute each piece."""
        places = [slice(*piece) for piece in pieces(elements, count)]
        data = [(self.data[place], self.source[place]) for place in places]
        return [(movement.copying(near, far), worker(near, near, turns)) for near, far in data]

    def staged(self, elements: int, count: int, turns: int) -> float:
        """Time and check work that copies and computes one piece per stream."""
        parts = self.parts(elements, count, turns)

        def run() -> None:
            for stream, (copy, compute) in zip(self.streams, parts):
                copy(stream)
                compute(stream)

        self.clear()
        ms = span_ms(self.streams[:count], run, self.rounds)
        self.check(turns, f"{elements} elements in {count} stages of {turns} turns", elements=elements)
        return ms

    def row(self, part: str, what: str, streams: int, ms: float, predicted: float, **others: Any) -> dict[str, Any]:
        """Return a row of the result."""
        alone = {"transfer_ms": self.transfer, "kernel_ms": self.kernel}
        row = {"part": part, "what": what, "streams": streams, "turns": self.turns}
        return {"elements": self.source.size} | row | alone | others | {"ms": ms, "predicted_ms": predicted}


def measure_staged(bench: Bench, part: str, elements: int, turns: Sequence[int], counts: Sequence[int]) -> Rows:
    """Yield a kernel of each length on the first elements, on each number of streams."""
    share = elements / bench.source.size
    for each in turns:
        transfer, kernel = bench.transfer * share, bench.kernel_ms(each) * share
        for count in counts:
            what = "in sequence" if count == 1 else part if part == "staged" else f"{elements} elements"
            ms, predicted = bench.staged(elements, count, each), staged_ms(transfer, kernel, count)
            others = {"turns": each, "transfer_ms": transfer, "kernel_ms": kernel}
            yield bench.row(part, what, count, ms, predicted, **others, left_out=left_out(elements, count))


def measure_timeline(bench: Bench) -> Rows:
    """Yield start and end of each copy and kernel of one staged run."""
    parts = bench.parts(bench.source.size, TIMELINE_STREAMS, bench.turns)
    with Events() as events:
        for _ in range(2):  # the first run only creates the events
            bench.clear()
            events.record("start", bench.streams[0])
            for number, (stream, calls) in enumerate(zip(bench.streams, parts)):
                for what, enqueue in zip(("copy", KERNEL), calls):
                    events.wait((what, number - 1, "end") if number else "start", stream)
                    events.record((what, number, "begin"), stream)
                    enqueue(stream)
                    events.record((what, number, "end"), stream)
            movement.finish(*bench.streams)
        bench.check(bench.turns, "the timeline's run")
        for number, (*copied, begin, end) in enumerate(pipeline(bench.transfer, bench.kernel, len(parts))):
            for what, (first, last) in (("copy", copied), (KERNEL, (begin, end))):
                times = [events.ms("start", (what, number, edge)) for edge in ("begin", "end")]
                others = {"stream": number, "begin_ms": times[0], "end_ms": times[1]}
                others |= {"predicted_begin_ms": first, "predicted_end_ms": last}
                yield bench.row("timeline", what, len(parts), times[1] - times[0], last - first, **others)


def measure_host(bench: Bench, host_turns: int) -> Rows:
    """Yield host work after, and during, copies and kernels of the device, by the host's clock."""
    stream, compute = bench.streams[0], worker(bench.data, bench.data, bench.turns)
    counter, returned = np.zeros(HOST_ELEMENTS, np.float32), []
    pinned, pageable = (movement.copying(bench.data, source) for source in (bench.source, np.array(bench.source)))

    def run(copy: Call, wait: bool) -> None:
        work = functools.partial(movement.in_sequence([copy, compute]), stream)
        returned.append(1e3 * elapsed(work, no_wait))
        if wait:
            movement.finish(stream)
        host_work(counter, host_turns)
        movement.finish(stream)

    host = host_us(lambda: host_work(counter, host_turns), bench.rounds) / 1e3
    fast, kernel, slow = bench.transfer, bench.kernel, bench.alone_ms(pageable)
    for what, copy, wait, copying, predicted in (
        ("host after device", pinned, True, fast, fast + kernel + host),
        ("host meanwhile", pinned, False, fast, max(fast + kernel, host)),
        ("host meanwhile, pageable", pageable, False, slow, slow + max(kernel, host)),
    ):
        bench.clear()
        counter[:] = -1
        ms = host_us(functools.partial(run, copy, wait), bench.rounds) / 1e3
        bench.check(bench.turns, what)
        assert (counter == host_turns).all(), f"{what}: the host's result is wrong"
        others = {"transfer_ms": copying, "host_ms": host, "returned_ms": statistics.median(returned[-bench.rounds :])}
        yield bench.row("host", what, 1, ms, predicted, **others, sum_ms=copying + kernel + host)


def measure_together(bench: Bench, blocking: int, sent: Any, engines: int) -> Rows:
    """Yield copies and kernels that do not depend on each other, by the streams in which they are."""
    first, second, third = bench.streams[:3]
    does = {TO_DEVICE: movement.copying(bench.data, bench.source), TO_HOST: movement.copying(bench.result, sent)}
    does[KERNEL] = worker(bench.other, bench.other, bench.turns)
    movement.copying(sent, bench.source)(first)
    alone = {TO_DEVICE: bench.transfer, TO_HOST: bench.alone_ms(does[TO_HOST]), KERNEL: bench.kernel}
    cases = [
        ("independent", "one stream", {KERNEL: first, TO_DEVICE: first}, False),
        ("independent", "two streams", {KERNEL: first, TO_DEVICE: second}, True),
        ("default stream", "blocking stream", {KERNEL: blocking, TO_DEVICE: LEGACY}, False),
        ("default stream", "non-blocking stream", {KERNEL: first, TO_DEVICE: LEGACY}, True),
    ]
    own = dict(zip(does, (first, second, third)))
    for names in itertools.chain.from_iterable(itertools.combinations(does, count) for count in (2, 3)):
        cases.append(("directions", " + ".join(names), {name: own[name] for name in names}, True))

    def enqueue(streams: Mapping[str, int]) -> None:
        for name, stream in streams.items():
            does[name](stream)
            if stream == LEGACY:
                movement.finish(LEGACY)  # a blocking copy keeps the host waiting

    for part, what, streams, overlaps in cases:
        bench.clear()
        used = list(dict.fromkeys(streams.values()))
        ms = span_ms(used, functools.partial(enqueue, streams), bench.rounds)
        if TO_HOST in streams and not np.array_equal(bench.result, bench.source):
            raise AssertionError(f"{part}, {what}: what came back is wrong")
        if TO_DEVICE in streams:
            bench.check(0, f"{part}, {what}, the copy")
        if KERNEL in streams:  # the warm-up round has computed on the same array, too
            bench.check((bench.rounds + 1) * bench.turns, f"{part}, {what}, the kernel", bench.other)
        up, back, kernel = (alone[name] if name in streams else 0.0 for name in does)
        others = {"transfer_ms": up, "back_ms": back, "kernel_ms": kernel, "sum_ms": up + back + kernel}
        predicted = concurrent_ms(up, back, kernel, engines if overlaps else 0)
        yield bench.row(part, what, len(streams) if overlaps else 1, ms, predicted, engines=engines, **others)


def overlap(
    elements: int = 1 << 26,
    turns: Sequence[int] = (900, 1800, 3600),
    streams: Sequence[int] = (1, 2, 4, 8, 16, 32),
    remainder_streams: Sequence[int] = (3, 7),
    host_turns: int = 1500,
    rounds: int = 9,
) -> Rows:
    """Overlap copies and kernels in every way that the guide describes, and in some that prevent it.

    One row per median time ``ms``, with the times that it is predicted from, each measured alone: ``transfer_ms``,
    ``back_ms`` of the other direction, ``kernel_ms``, ``host_ms``, and their ``sum_ms``; ``returned_ms``, when the
    host had enqueued all; ``left_out``, the elements that the guide's listing would not compute; ``engines``, the
    device's copy engines. Part "timeline" has one row per stage.

    Parameters
    ----------
    elements: Floats to copy and to compute on; more than 257.
    turns: Fused multiply-adds per element, one kernel for each. The middle one is used in all parts except
        "staged".
    streams: Numbers of streams for staged copies and kernels; 1 is sequential.
    remainder_streams: Numbers of streams for a number of elements that they do not divide.
    host_turns: NumPy additions of the host's work.
    """
    with movement.Scope() as scope:
        handles = scope.streams(max(TIMELINE_STREAMS, *streams, *remainder_streams))
        (blocking,) = scope.streams(blocking=True)
        (source, result), (data, other, sent) = scope.pinned(2, elements), scope.on_device(3, elements)
        source[:] = np.resize(np.arange(PERIOD, dtype=np.float32), elements)
        bench = Bench(source, result, data, other, handles, turns[len(turns) // 2], rounds)
        bench.transfer = bench.alone_ms(movement.copying(data, source))
        yield from measure_staged(bench, "staged", elements, turns, streams)
        # One block and one element fewer, so that no number of streams divides the data.
        yield from measure_staged(bench, "remainder", elements - BLOCK - 1, [bench.turns], remainder_streams)
        bench.kernel = bench.kernel_ms(bench.turns)
        yield from measure_timeline(bench)
        yield from measure_host(bench, host_turns)
        yield from measure_together(bench, blocking, sent, machine.attribute("ASYNC_ENGINE_COUNT"))


def timeline(frame: pd.DataFrame, axes: Any) -> None:
    """Plot start and end of the copies and kernels of the staged run, and dashed when they are predicted."""
    stages = frame[frame["part"] == "timeline"]
    for index, (what, at) in enumerate(stages.groupby("what", sort=False)):
        place, begin, first = at["stream"] + 0.4 * index, at["begin_ms"], at["predicted_begin_ms"]
        axes.barh(place, at["end_ms"] - begin, 0.36, left=begin, color=COLOURS[index], label=what)
        axes.barh(place, at["predicted_end_ms"] - first, 0.36, left=first, fill=False, linestyle="--")
    axes.invert_yaxis()
    axes.set(xlabel="ms", ylabel="stream", title="timeline (dashed: predicted)")


def claims(frame: pd.DataFrame) -> dict[str, Any]:
    longest = frame[["transfer_ms", "kernel_ms", "back_ms"]].max(axis=1)
    overlaps = frame["ms"] < (longest + frame["sum_ms"]) / 2
    frame = frame.assign(overlaps=overlaps, off=frame["ms"] / frame["predicted_ms"] - 1)
    part = dict(iter(frame.groupby("part")))
    staged, remainder, line, directions = (part[name] for name in ("staged", "remainder", "timeline", "directions"))
    after, meanwhile, pageable = part["host"].to_dict("records")
    overlapping: Any = frame.set_index("what")["overlaps"]
    by_streams = staged.pivot(index="turns", columns="streams", values="ms")
    busy, whole = meanwhile["transfer_ms"] + meanwhile["kernel_ms"], line["predicted_end_ms"].max()
    late = (line["begin_ms"] - line["predicted_begin_ms"]).abs() / whole
    return {
        "some kernels take longer than the copies, some shorter": (
            (staged["kernel_ms"] > staged["transfer_ms"]).nunique() == 2
        ),
        "staging is faster than the sequence by a tenth and more, whichever takes longer": (
            by_streams.min(axis=1) < 0.9 * by_streams[1]
        ),
        "on any number of streams it takes what is predicted, within a tenth": staged["off"].abs() < 0.1,
        "so do counts of elements that streams do not divide, of which the guide's listing would leave some out": (
            (remainder["off"].abs() < 0.1) & (remainder["left_out"] > 0)
        ),
        "in the timeline, all is done a tenth sooner than copies and kernels would be after one another": (
            line["end_ms"] < 0.9 * (line["transfer_ms"] + line["kernel_ms"])
        ),
        "its copies begin when predicted, within a fiftieth of the whole, and its kernels within a tenth": (
            late < np.where(line["what"] == "copy", 0.02, 0.1)
        ),
        "asynchronous calls return before a tenth of what they enqueue is done": meanwhile["returned_ms"] < busy / 10,
        "a copy of pageable memory returns only when half of it is done, and later": (
            pageable["returned_ms"] > pageable["transfer_ms"] / 2
        ),
        "with it, all takes more than twice as long as with page-locked memory": pageable["ms"] > 2 * meanwhile["ms"],
        "three quarters of the shorter of host's and device's work are hidden behind the other": (
            after["ms"] - meanwhile["ms"] > 0.75 * min(meanwhile["host_ms"], busy)
        ),
        "a copy and a kernel in two streams overlap, in one they do not": (
            overlapping["two streams"] and not overlapping["one stream"]
        ),
        "a copy in the default stream does not overlap with a blocking stream, and does with a non-blocking one": (
            overlapping["non-blocking stream"] and not overlapping["blocking stream"]
        ),
        "with two copy engines or more, all of both copies and a kernel overlap": (
            (directions["engines"] >= 2) & directions["overlaps"]
        ),
    }


PLOT = panels(
    curves("streams", "ms", "turns", "part == 'staged'", "{} turns", log="x", title="staged"),
    timeline,
    bars("ms", ["streams"], "part == 'remainder'", "{:.0f} streams", title="remainder"),
    bars("ms", ["part", "what"], "part not in ['staged', 'timeline', 'remainder']"),
    columns=2,
)
SMALL: dict[str, Any] = {"elements": 1 << 14, "turns": (3, 8, 21), "streams": (1, 2, 4)}
SMALL |= {"remainder_streams": (3,), "host_turns": 5, "rounds": 2}
EXPERIMENT = machine.gpu_experiment(overlap, "9.1.2", claims, PLOT, SMALL, [work])
