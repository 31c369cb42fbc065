"""Copies, kernels and the host work at the same time if they are in different streams and memory is page-locked.

Staged. Data are cut into as many pieces as there are streams, and each stream copies its piece and runs a kernel on it.
Nothing of the shorter of both, tT of the copies and tE of the kernels, is left over but one piece's: predicted are
`max(tE, tT) + min(tE, tT) / nStreams`, which for one stream is the sequence tE + tT. Both are measured alone, on all
the data. The kernels' time is set by the number of fused multiply-adds an element, so that copies take longer in one
case and kernels in two. On an H200 the formula is right to 5 %. Up to 8 streams hardly anything is slower than
predicted, and sequences are faster by 1 or 2 %: as if each of the times alone had a beginning and an end that a
sequence has once. Where copies take longer, 16 and 32 streams take 4 to 5 % more than predicted, and hardly less than
8; where kernels do, they take what is predicted to 1 %. As if many small copies left the link idle between them; that
is not measured.

The numbers of the guide's listing must be divisible by threads and streams; otherwise it leaves elements out. Here
pieces are rounded up to whole blocks, the last one is shorter, and the kernel checks its bounds: 3 and 7 streams, which
do not divide the data, take what the formula says, to 3 %.

Timeline. When each stage of one run began and ended, by events, beside what a pipeline of equal stages predicts. An
event before a copy happens as soon as the stream gets there, even if the copy has to wait for another stream's; so here
each copy first waits for the copy before it, and each kernel for the kernel before it, as they otherwise do for the
copy engine and the multiprocessors. Copies keep to the prediction. So does the first kernel; but the second, whose data
have long been there, begins not when the first ends, at about 3.2 ms, but when the third stream's copy ends, at about
3.7, and the others follow it without a gap. It is as if its event had stood in a queue behind that copy. Nothing of
this is seen in the staged runs, which have no such events: 4 streams take about 9.0 ms there, and 9.6 here.

Host. Calls return at once, after about half a millisecond here, and what the host does until it waits for the stream
costs no time of its own: predicted is the longer of both, and the sum if the host works after it has waited. Both are
right to 4 %. From pageable memory the call returns only when the host has copied the data, and only the kernel is left
to overlap with: predicted are the copy and the longer of kernel and host. Measured are about 50 ms, for 49 predicted
and 57 in sequence. The call returns after 38 ms, about what the copy alone takes, and from there on it takes 11, where
the host's work alone takes 10. How long a pageable copy takes alone differs between runs: in an earlier one it was 30
ms, but 38 here as well, so that nothing was gained. Why is not explained.

Independent. A copy in one stream and a kernel on other data in another take as long as the longer one, and in one
stream as long as both, to 2 %.

Default stream. A copy in the legacy default stream, followed by a wait, is what a blocking copy is. It begins after
what was enqueued before in any blocking stream: predicted is the sum. Streams that were created as non-blocking, which
all others here are, do not wait for the default stream, and a kernel there overlaps with it; of these the guide does
not speak. Both are as predicted, to 2 %.

Directions. A copy each way, in two streams, and a kernel in a third all overlap on a device that has two copy engines;
with one engine the copies take turns. Predicted is the longest. An H200 has three engines. There two copies take about
a tenth longer than the longer one alone, so that the two directions are not quite independent; copies beside a kernel
that takes longer than they do change its time by no more than 3 %, one way or both.

Source: CUDA C++ Best Practices Guide, "Asynchronous and Overlapping Transfers with Computation"; CUDA Driver API,
"Stream synchronization behavior" and "API synchronization behavior".
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from cuda.bindings import driver
from numba import cuda

from numba_gemm.device.units import FLOAT32_BYTES, ceil_div
from numba_gemm.lab.memory import machine, movement
from numba_gemm.lab.memory.drawing import COLOURS, bars, curve
from numba_gemm.lab.memory.experiment import Experiment
from numba_gemm.runtime import pinned_memory
from numba_gemm.runtime.driver import call
from numba_gemm.runtime.timing import Call

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLOCK = 256
ROUNDS = 9
PERIOD = 4096  # of the data: small numbers, so that sums of many ones stay exact
LEGACY = 1  # the driver's CU_STREAM_LEGACY, whatever handle 0 means
HOST_ELEMENTS = 1 << 16  # that the host works on: few enough for its cache, so that copies do not slow it down

TO_DEVICE, TO_HOST, KERNEL = "host to device", "device to host", "kernel"


# ------------------------------------------------------------------------------------------------- models and pieces


def staged_ms(transfer: float, kernel: float, stages: int) -> float:
    """Predicted time for copying and computing in so many stages, by the times for all of it."""
    return max(transfer, kernel) + min(transfer, kernel) / stages


def pipeline(transfer: float, kernel: float, stages: int) -> list[tuple[float, float, float, float]]:
    """Predicted begin and end of each stage's copy and kernel: both in order, one copy and one kernel at a time."""
    found, done = [], 0.0
    for number in range(stages):
        copied = (number + 1) * transfer / stages
        begin = max(copied, done)
        done = begin + kernel / stages
        found.append((number * transfer / stages, copied, begin, done))
    return found


def concurrent_ms(to_device: float, to_host: float, kernel: float, engines: int) -> float:
    """Predicted time for copies both ways and a kernel at once, by the times of each alone (0 if there is none)."""
    if engines >= 2:
        return max(to_device, to_host, kernel)
    return max(to_device + to_host, kernel) if engines else to_device + to_host + kernel


def pieces(elements: int, streams: int, block: int = BLOCK) -> list[tuple[int, int]]:
    """Begin and end of each stream's piece: whole blocks but for the last one, and together all elements, once.

    Where there are fewer blocks than streams, some have nothing to do, and there are fewer pieces.
    """
    size = ceil_div(elements, streams * block) * block
    return [(begin, min(begin + size, elements)) for begin in range(0, elements, size)]


def left_out(elements: int, streams: int, block: int = BLOCK) -> int:
    """Elements without a thread where N / (nThreads * nStreams) blocks a stream are rounded down."""
    return elements - elements // (block * streams) * block * streams


# ------------------------------------------------------------------------------------------------------- the kernel


@cuda.jit
def work(data: Any, turns: Any, factor: Any, summand: Any) -> None:
    """So many fused multiply-adds, one after the other, on each element; factor and summand are known only here."""
    i = cuda.grid(1)
    if i < data.size:
        x = data[i]
        while turns > 0:  # the compiler unrolls it; counting a range takes more instructions than what it counts
            x = x * factor + summand
            turns -= 1
        data[i] = x


def worker(data: Any, turns: int) -> Call:
    """A call that enqueues the kernel on all of the data, to each of which it adds `turns`."""
    one = np.float32(1)
    return machine.enqueue(work, ceil_div(data.size, BLOCK), BLOCK, data, turns, one, one)


# ----------------------------------------------------------------------------------------------------------- helpers


@contextmanager
def blocking_stream() -> Iterator[int]:
    """The handle of a new stream that waits for the legacy default stream, and that one for it."""
    stream = int(call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_DEFAULT))
    try:
        yield stream
    finally:
        call(driver.cuStreamDestroy, stream)


def host_work(counter: np.ndarray, turns: int) -> None:
    """Count to so many in every element, by one after the other."""
    counter[:] = 0
    for _ in range(turns):
        np.add(counter, 1, out=counter)


def host_ms(streams: Sequence[int], run: Callable[[], float], rounds: int) -> tuple[float, float]:
    """Median milliseconds by the host's clock until streams and host are done, and until `run` says it had enqueued.

    `run` enqueues and returns the time, of `time.perf_counter`, when it had; and may do more.
    """
    spans, returns = [], []
    for _ in range(rounds + 1):
        movement.finish(*streams)
        begin = time.perf_counter()
        enqueued = run()
        movement.finish(*streams)
        spans.append(time.perf_counter() - begin)
        returns.append(enqueued - begin)
    return 1e3 * statistics.median(spans[1:]), 1e3 * statistics.median(returns[1:])


@dataclass(frozen=True)
class Bench:
    """Page-locked data of the host, an array of the device, and the means to time and check what is done with them."""

    source: np.ndarray
    result: np.ndarray
    data: Any
    other: Any
    streams: Sequence[int]
    rounds: int

    def ms(self, run: Callable[[], object], streams: Sequence[int] | None = None) -> float:
        """Median span of what is enqueued on streams."""
        return movement.median_ms(streams or self.streams, run, self.rounds)

    def clear(self) -> None:
        """Let nothing in the device's array look like a result."""
        movement.clear(self.data, self.source.nbytes, self.streams[0])
        movement.finish(self.streams[0])

    def check(self, turns: int, elements: int, what: str) -> None:
        """Raise AssertionError unless so many of the device's elements are those of the host, plus `turns`."""
        movement.copy(self.result, self.data, elements * FLOAT32_BYTES, self.streams[0])
        movement.finish(self.streams[0])
        added = self.result[:elements]
        np.subtract(added, self.source[:elements], out=added)  # in place, which spares the time of touching more
        if not (added == turns).all():
            raise AssertionError(f"{what}: the result is wrong")

    def part(self, begin: int, end: int, turns: int) -> tuple[int, int, int, Call]:
        """A piece's addresses on device and host, its bytes, and the call for its kernel."""
        to, from_ = movement.address(self.data), movement.address(self.source)
        piece = worker(self.data[begin:end], turns)
        return to + begin * FLOAT32_BYTES, from_ + begin * FLOAT32_BYTES, (end - begin) * FLOAT32_BYTES, piece

    def staged(self, elements: int, stages: int, turns: int) -> Callable[[], None]:
        """Work that copies and computes a piece in each of so many streams."""
        parts = [self.part(begin, end, turns) for begin, end in pieces(elements, stages)]

        def run() -> None:
            for stream, (to, from_, size, kernel) in zip(self.streams, parts):
                movement.copy(to, from_, size, stream)
                kernel(stream)

        return run


# --------------------------------------------------------------------------------------------------------- the parts

Rows = list[dict[str, Any]]


def measure_staged(bench: Bench, turns: Sequence[int], counts: Sequence[int], transfer: float) -> Rows:
    """Rows of part "staged": a kernel of each length, on each number of streams."""
    rows: Rows = []
    elements = bench.source.size
    for each in turns:
        kernel = kernel_ms(bench, each)
        for count in counts:
            run = bench.staged(elements, count, each)
            bench.clear()
            ms = bench.ms(run, bench.streams[:count])
            bench.check(each, elements, f"{count} stages of {each} turns")
            rows.append(
                {"part": "staged", "what": "in sequence" if count == 1 else "staged", "streams": count, "turns": each}
                | {"transfer_ms": transfer, "kernel_ms": kernel, "ms": ms}
                | {"predicted_ms": staged_ms(transfer, kernel, count)}
            )
    return rows


def kernel_ms(bench: Bench, turns: int) -> float:
    """Time of the kernel alone, on all the data."""
    kernel, stream = worker(bench.data, turns), bench.streams[0]
    movement.copy(bench.data, bench.source, bench.source.nbytes, stream)
    return bench.ms(lambda: kernel(stream), [stream])


def measure_remainder(bench: Bench, turns: int, counts: Sequence[int], transfer: float, kernel: float) -> Rows:
    """Rows of part "remainder": one block and one element fewer, so that no number of streams divides the data."""
    rows: Rows = []
    elements = bench.source.size - BLOCK - 1
    share = elements / bench.source.size
    for count in counts:
        run = bench.staged(elements, count, turns)
        bench.clear()
        ms = bench.ms(run, bench.streams[:count])
        bench.check(turns, elements, f"{elements} elements in {count} stages")
        untouched = np.full(1, -1, np.float32)
        movement.copy(
            untouched, movement.address(bench.data) + elements * FLOAT32_BYTES, FLOAT32_BYTES, bench.streams[0]
        )
        movement.finish(bench.streams[0])
        if not np.isnan(untouched[0]):
            raise AssertionError(f"{elements} elements in {count} stages: the one behind them was written")
        rows.append(
            {"part": "remainder", "what": f"{elements} elements", "streams": count, "turns": turns}
            | {"left_out": left_out(elements, count), "transfer_ms": transfer * share, "kernel_ms": kernel * share}
            | {"ms": ms, "predicted_ms": staged_ms(transfer, kernel, count) * share}
        )
    return rows


def measure_timeline(bench: Bench, turns: int, count: int, transfer: float, kernel: float) -> Rows:
    """Rows of part "timeline": begin and end of each copy and kernel of one staged run."""
    elements = bench.source.size
    parts = [bench.part(begin, end, turns) for begin, end in pieces(elements, count)]
    events = movement.Events()
    streams = bench.streams
    try:
        for _ in range(2):  # the first run counts only as the one that creates the events
            bench.clear()
            events.record("start", streams[0])
            for number, (stream, (to, from_, size, compute)) in enumerate(zip(streams, parts)):
                events.wait(("copy", number - 1, "end") if number else "start", stream)
                events.record(("copy", number, "begin"), stream)
                movement.copy(to, from_, size, stream)
                events.record(("copy", number, "end"), stream)
                if number:
                    events.wait((KERNEL, number - 1, "end"), stream)
                events.record((KERNEL, number, "begin"), stream)
                compute(stream)
                events.record((KERNEL, number, "end"), stream)
            movement.finish(*streams)
        bench.check(turns, elements, "the timeline's run")
        rows: Rows = []
        for number, (*copied, begin, end) in enumerate(pipeline(transfer, kernel, len(parts))):
            for what, (predicted_begin, predicted_end) in (("copy", copied), (KERNEL, (begin, end))):
                times = [events.ms("start", (what, number, edge)) for edge in ("begin", "end")]
                rows.append(
                    {"part": "timeline", "what": what, "stream": number, "streams": len(parts), "turns": turns}
                    | {"transfer_ms": transfer, "kernel_ms": kernel}
                    | {"begin_ms": times[0], "end_ms": times[1], "ms": times[1] - times[0]}
                    | {"predicted_begin_ms": predicted_begin, "predicted_end_ms": predicted_end}
                    | {"predicted_ms": predicted_end - predicted_begin}
                )
        return rows
    finally:
        events.close()


def measure_host(bench: Bench, turns: int, host_turns: int, transfer: float, kernel: float) -> Rows:
    """Rows of part "host": work of the host after, and while, the device copies and computes."""
    stream = bench.streams[0]
    compute = worker(bench.data, turns)
    pageable = np.array(bench.source)
    counter = np.zeros(HOST_ELEMENTS, np.float32)

    def enqueue(source: np.ndarray) -> float:
        movement.copy(bench.data, source, source.nbytes, stream)
        compute(stream)
        return time.perf_counter()

    def after() -> float:
        enqueued = enqueue(bench.source)
        movement.finish(stream)
        host_work(counter, host_turns)
        return enqueued

    def meanwhile(source: np.ndarray) -> float:
        enqueued = enqueue(source)
        host_work(counter, host_turns)
        return enqueued

    def host_alone() -> float:
        host_work(counter, host_turns)
        return time.perf_counter()

    host, _ = host_ms([stream], host_alone, bench.rounds)
    slow = bench.ms(lambda: movement.copy(bench.data, pageable, pageable.nbytes, stream), [stream])
    rows: Rows = []
    ways: list[tuple[str, Callable[[], float], float, float]] = [
        ("host after device", after, transfer, transfer + kernel + host),
        ("host meanwhile", lambda: meanwhile(bench.source), transfer, max(transfer + kernel, host)),
        ("host meanwhile, pageable", lambda: meanwhile(pageable), slow, slow + max(kernel, host)),
    ]
    for what, run, copying, predicted in ways:
        bench.clear()
        counter[:] = -1
        ms, returned = host_ms([stream], run, bench.rounds)
        bench.check(turns, bench.source.size, what)
        if not (counter == host_turns).all():
            raise AssertionError(f"{what}: the host's result is wrong")
        rows.append(
            {"part": "host", "what": what, "streams": 1, "turns": turns, "transfer_ms": copying, "kernel_ms": kernel}
            | {"host_ms": host, "returned_ms": returned, "sum_ms": copying + kernel + host}
            | {"ms": ms, "predicted_ms": predicted}
        )
    return rows


def measure_independent(bench: Bench, turns: int, transfer: float, kernel: float) -> Rows:
    """Rows of the parts "independent" and "default stream": a kernel on one array, and a copy to another."""
    first, second = bench.streams[:2]
    compute = worker(bench.other, turns)
    size = bench.source.nbytes

    def enqueue(computing: int, copying: int) -> Callable[[], None]:
        def run() -> None:
            compute(computing)
            movement.copy(bench.data, bench.source, size, copying)
            if copying == LEGACY:
                movement.finish(LEGACY)  # a blocking copy keeps the host waiting

        return run

    rows: Rows = []
    with blocking_stream() as blocking:
        for part, what, computing, copying, overlaps in (
            ("independent", "one stream", first, first, False),
            ("independent", "two streams", first, second, True),
            ("default stream", "blocking stream", blocking, LEGACY, False),
            ("default stream", "non-blocking stream", first, LEGACY, True),
        ):
            bench.clear()
            movement.copy(bench.other, bench.source, size, first)
            movement.finish(first)
            ms = bench.ms(enqueue(computing, copying), list(dict.fromkeys([computing, copying])))
            bench.check(0, bench.source.size, f"{part}, {what}, the copy")
            # One round more than counts has computed on the same array.
            check_other(bench, (bench.rounds + 1) * turns, f"{part}, {what}, the kernel")
            rows.append(
                {"part": part, "what": what, "streams": 1 + overlaps, "turns": turns}
                | {"transfer_ms": transfer, "kernel_ms": kernel, "sum_ms": transfer + kernel, "ms": ms}
                | {"predicted_ms": max(transfer, kernel) if overlaps else transfer + kernel}
            )
    return rows


def check_other(bench: Bench, turns: int, what: str) -> None:
    """As the bench's own check, of its other array."""
    Bench(bench.source, bench.result, bench.other, bench.data, bench.streams, bench.rounds).check(
        turns, bench.source.size, what
    )


def measure_directions(bench: Bench, turns: int, transfer: float, kernel: float, engines: int) -> Rows:
    """Rows of part "directions": copies both ways and a kernel, any of them at once."""
    up, down, third = bench.streams[:3]
    size = bench.source.nbytes
    rows: Rows = []
    with movement.device_array(bench.source.size) as sent:
        movement.copy(sent, bench.source, size, up)
        movement.finish(up)
        compute = worker(bench.other, turns)
        does: dict[str, Callable[[], object]] = {
            TO_DEVICE: lambda: movement.copy(bench.data, bench.source, size, up),
            TO_HOST: lambda: movement.copy(bench.result, sent, size, down),
            KERNEL: lambda: compute(third),
        }
        alone = {TO_DEVICE: transfer, TO_HOST: bench.ms(does[TO_HOST], [down]), KERNEL: kernel}
        for together in itertools.chain.from_iterable(itertools.combinations(does, count) for count in (2, 3)):
            bench.clear()
            movement.copy(bench.other, bench.source, size, up)
            bench.result[:] = -1
            movement.finish(up)

            def run(together: Sequence[str] = together) -> None:
                for each in together:
                    does[each]()

            ms = bench.ms(run, [up, down, third])
            what = " + ".join(together)
            if TO_HOST in together and not np.array_equal(bench.result, bench.source):
                raise AssertionError(f"{what}: what came back is wrong")
            if TO_DEVICE in together:
                bench.check(0, bench.source.size, what)
            if KERNEL in together:
                check_other(bench, (bench.rounds + 1) * turns, what)
            times = {each: alone[each] if each in together else 0.0 for each in does}
            rows.append(
                {"part": "directions", "what": what, "streams": len(together), "turns": turns, "engines": engines}
                | {"transfer_ms": times[TO_DEVICE], "back_ms": times[TO_HOST], "kernel_ms": times[KERNEL]}
                | {"sum_ms": sum(times.values()), "ms": ms}
                | {"predicted_ms": concurrent_ms(times[TO_DEVICE], times[TO_HOST], times[KERNEL], engines)}
            )
    return rows


def overlap(
    elements: int = 1 << 26,
    turns: Sequence[int] = (900, 1800, 3600),
    streams: Sequence[int] = (1, 2, 4, 8, 16, 32),
    remainder_streams: Sequence[int] = (3, 7),
    timeline_streams: int = 4,
    host_turns: int = 1500,
    rounds: int = ROUNDS,
) -> pd.DataFrame:
    """Copy and compute at once, in every way that the guide names, and in those that do not overlap.

    Parameters
    ----------
    elements : int
        Floats to copy and to compute on; more than `BLOCK` + 1.
    turns : sequence of int
        Fused multiply-adds an element, a kernel each. The middle one serves all parts but "staged".
    streams : sequence of int
        Numbers of streams to stage copies and kernels on; 1 is the sequence.
    remainder_streams : sequence of int
        Numbers of streams for as many elements as they do not divide.
    timeline_streams : int
        Streams of the run of which each stage's begin and end are noted.
    host_turns : int
        Additions of NumPy's that the host does meanwhile.
    rounds : int
        Samples of each time, of which the median counts.

    Returns
    -------
    DataFrame
        A row a time, ``ms``, with ``predicted_ms``. ``part``; ``what``; ``streams``; ``turns``; what it is predicted
        from, each measured alone: ``transfer_ms``, ``back_ms`` of the other direction, ``kernel_ms``, ``host_ms``;
        their ``sum_ms``; ``returned_ms``, when the host had enqueued all; ``left_out``, the elements that the guide's
        listing would not compute; ``engines`` that the device has for copies. In part "timeline", a row a stage: its
        ``stream``, ``begin_ms`` and ``end_ms`` since the start, and those predicted.

    Raises
    ------
    AssertionError
        if a result is wrong.
    """
    middle = turns[len(turns) // 2]
    with ExitStack() as scopes:
        scopes.enter_context(machine.in_context())
        engines = machine.attribute("ASYNC_ENGINE_COUNT")
        most = max(3, timeline_streams, *streams, *remainder_streams)
        handles = scopes.enter_context(machine.streams(most))
        source, result = (scopes.enter_context(pinned_memory.pinned(elements)) for _ in range(2))
        data, other = (scopes.enter_context(movement.device_array(elements)) for _ in range(2))
        source[:] = np.resize(np.arange(PERIOD, dtype=np.float32), elements)
        bench = Bench(source, result, data, other, handles, rounds)
        stream = handles[0]
        transfer = bench.ms(lambda: movement.copy(data, source, source.nbytes, stream), [stream])
        rows = measure_staged(bench, turns, streams, transfer)
        kernel = kernel_ms(bench, middle)
        rows += measure_remainder(bench, middle, remainder_streams, transfer, kernel)
        rows += measure_timeline(bench, middle, timeline_streams, transfer, kernel)
        rows += measure_host(bench, middle, host_turns, transfer, kernel)
        rows += measure_independent(bench, middle, transfer, kernel)
        rows += measure_directions(bench, middle, transfer, kernel, engines)
    return pd.DataFrame([{"elements": elements} | row for row in rows])


# --------------------------------------------------------------------------------------------- picture and claims


def plot(frame: pd.DataFrame, figure: Figure) -> None:
    """Time by number of streams, the timeline, and everything else as bars."""
    axes = figure.subplot_mosaic([["staged", "others"], ["timeline", "others"]], width_ratios=[5, 4])
    staged = axes["staged"]
    for index, (turns, at) in enumerate(frame[frame["part"] == "staged"].groupby("turns")):
        curve(staged, at["streams"], at["ms"], at["predicted_ms"], f"{turns} turns", index)
    staged.set_xscale("log", base=2)
    staged.set(xlabel="streams", ylabel="ms", ylim=(0, None), title="staged (dashed: predicted)")
    staged.legend(handles=staged.lines[::2], fontsize="x-small")
    stages = frame[frame["part"] == "timeline"]
    line = axes["timeline"]
    for index, (what, at) in enumerate(stages.groupby("what", sort=False)):
        place = at["stream"] + 0.4 * index
        line.barh(place, at["end_ms"] - at["begin_ms"], 0.36, left=at["begin_ms"], color=COLOURS[index], label=what)
        predicted: dict[str, Any] = {"fill": False, "edgecolor": "black", "linestyle": "--"}
        line.barh(
            place, at["predicted_end_ms"] - at["predicted_begin_ms"], 0.36, left=at["predicted_begin_ms"], **predicted
        )
    numbers = sorted(stages["stream"].astype(int).unique())
    line.set_yticks([number + 0.2 for number in numbers], [str(number) for number in numbers])
    line.invert_yaxis()
    line.set(xlabel="ms (dashed: predicted)", ylabel="stream", title="timeline")
    line.legend(fontsize="x-small")
    rest = frame[~frame["part"].isin(["staged", "timeline"])]
    short = {TO_DEVICE: "H2D", TO_HOST: "D2H"}
    names = []
    for part, what, streams in zip(rest["part"], rest["what"], rest["streams"]):
        for long, abbreviated in short.items():
            what = what.replace(long, abbreviated)
        if part == "remainder":
            what = f"remainder, {streams:.0f} streams"
        names.append(f"{part}: {what}" if part in ("independent", "default stream") else what)
    bars(axes["others"], names, rest["ms"], rest["predicted_ms"])
    axes["others"].tick_params(axis="y", labelsize="x-small")
    axes["others"].set(xlabel="ms")


def overlaps(row: Mapping[str, Any]) -> bool:
    """Whether what is done at once takes a time nearer to the longest than to the sum."""
    times = [row[name] for name in ("transfer_ms", "kernel_ms", "back_ms")]
    longest = max(value for value in times if not np.isnan(value))
    return bool(row["ms"] < (longest + row["sum_ms"]) / 2)


def claims(frame: pd.DataFrame) -> dict[str, bool]:
    """What the docstring says of the numbers."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in frame.to_dict("records"):
        rows.setdefault(row["part"], []).append({str(name): value for name, value in row.items()})
    staged, remainder = rows["staged"], rows["remainder"]
    host, independent, default = (
        {row["what"]: row for row in rows[part]} for part in ("host", "independent", "default stream")
    )
    after, meanwhile, pageable = (
        host[what] for what in ("host after device", "host meanwhile", "host meanwhile, pageable")
    )
    alone = {row["turns"]: row["ms"] for row in staged if row["streams"] == 1}
    best = {turns: min(row["ms"] for row in staged if row["turns"] == turns) for turns in alone}
    busy = meanwhile["transfer_ms"] + meanwhile["kernel_ms"]
    whole = max(row["predicted_end_ms"] for row in rows["timeline"])
    return {
        "some kernels take longer than the copies, some shorter": (
            {bool(row["kernel_ms"] > row["transfer_ms"]) for row in staged} == {False, True}
        ),
        "staging is faster than the sequence by a tenth and more, whichever takes longer": all(
            best[turns] < 0.9 * alone[turns] for turns in alone
        ),
        "on any number of streams it takes what is predicted, to a tenth": all(
            0.9 < row["ms"] / row["predicted_ms"] < 1.1 for row in staged
        ),
        "so do numbers that streams do not divide, of which the guide's listing would leave some out": all(
            0.9 < row["ms"] / row["predicted_ms"] < 1.1 and row["left_out"] > 0 for row in remainder
        ),
        "in the timeline, all is done a tenth sooner than copies and kernels would be after one another": all(
            last["end_ms"] < 0.9 * (last["transfer_ms"] + last["kernel_ms"]) for last in rows["timeline"]
        ),
        "its copies begin when predicted, to a fiftieth of the whole, and its kernels to a tenth": all(
            abs(row["begin_ms"] - row["predicted_begin_ms"]) < (0.02 if row["what"] == "copy" else 0.1) * whole
            for row in rows["timeline"]
        ),
        "asynchronous calls return before a tenth of what they enqueue is done": bool(
            meanwhile["returned_ms"] < busy / 10
        ),
        "a copy of pageable memory returns only when half of it is done, and later": bool(
            pageable["returned_ms"] > pageable["transfer_ms"] / 2
        ),
        "with it, all takes more than twice as long as with page-locked memory": bool(
            pageable["ms"] > 2 * meanwhile["ms"]
        ),
        "three quarters of the shorter of host's and device's work are hidden behind the other": bool(
            after["ms"] - meanwhile["ms"] > 0.75 * min(meanwhile["host_ms"], busy)
        ),
        "a copy and a kernel in two streams overlap, in one they do not": (
            overlaps(independent["two streams"]) and not overlaps(independent["one stream"])
        ),
        "a copy in the default stream does not overlap with a blocking stream, and does with a non-blocking one": (
            overlaps(default["non-blocking stream"]) and not overlaps(default["blocking stream"])
        ),
        "with two copy engines or more, all of both copies and a kernel overlap": all(
            row["engines"] >= 2 and overlaps(row) for row in rows["directions"]
        ),
    }


EXPERIMENT = Experiment(
    name="overlap",
    section="9.1.2",
    run=overlap,
    plot=plot,
    claims=claims,
    small={
        "elements": 1 << 14,
        "turns": (3, 8, 21),
        "streams": (1, 2, 4),
        "remainder_streams": (3,),
        "host_turns": 5,
        "rounds": 2,
    },
    unavailable="the simulator has no streams",
    kernels={"work": (work, "float32[::1], int64, float32, float32")},
)
