"""Copies, kernels and host code overlap if they use different streams and page-locked memory.

Staged. The data are divided into as many pieces as there are streams, and each stream copies its piece and runs a
kernel on it. Of the shorter of tT (all copies) and tE (all kernels), only one piece's time remains visible: the
prediction is `max(tE, tT) + min(tE, tT) / nStreams`, which for one stream is the sequence tE + tT. Both are measured
alone, on all the data. The kernels' time is set by the number of fused multiply-adds per element, so that copies take
longer in one case and kernels in two. On an H200 the formula is accurate to 5 %. Up to 8 streams, hardly anything is
slower than predicted, and sequences are faster by 1 or 2 %, as if each time measured alone included a start and an end
that a sequence has only once. If copies take longer, 16 and 32 streams take 4 to 5 % more than predicted, and hardly
less than 8 streams; if kernels do, they take the predicted time to 1 %. It is as if many small copies left the link
idle between them; that is not measured.

The guide's listing requires a number of elements that is divisible by threads and streams; otherwise it leaves elements
out. Here pieces are rounded up to whole blocks, the last one is shorter, and the kernel checks its bounds: 3 and 7
streams, which do not divide the data, take the time of the formula, to 3 %.

Timeline. Start and end of each stage of one run, recorded by events, compared with a pipeline of equal stages. An event
before a copy happens as soon as the stream reaches it, even if the copy has to wait for another stream's copy.
Therefore each copy here first waits for the copy before it, and each kernel for the kernel before it, as they would
otherwise wait for the copy engine and the multiprocessors. The copies follow the prediction. So does the first kernel;
but the second, whose data arrived long before, does not start when the first ends, at about 3.2 ms, but when the third
stream's copy ends, at about 3.7, and the others follow it without a gap. It is as if its event had been queued behind
that copy. The staged runs, which have no such events, do not show this: 4 streams take about 9.0 ms there, and 9.6
here.

Host. Calls return immediately, here after about half a millisecond, and host code costs no time of its own until it
waits for the stream: the prediction is the longer of both, and the sum if the host works after waiting. Both are
accurate to 4 %. From pageable memory, the call returns only after the host has copied the data, so only the kernel can
overlap with host code: the prediction is the copy plus the longer of kernel and host. The measured time is about 50 ms,
compared with 49 predicted and 57 in sequence. The call returns after 38 ms, about the time of the copy alone, and the
rest takes 11, where the host's work alone takes 10. The time of a pageable copy alone differs between runs: in an
earlier run it was 30 ms, but 38 here as well, so nothing was gained. This is not explained.

Independent. A copy in one stream and a kernel on other data in another stream take as long as the longer one, and in
one stream as long as both, to 2 %.

Default stream. A copy in the legacy default stream, followed by a wait, is equivalent to a blocking copy. It starts
after the work that was enqueued before in any blocking stream: the prediction is the sum. Streams created as
non-blocking, like all others here, do not wait for the default stream, and a kernel there overlaps with it; the guide
does not mention them. Both times are as predicted, to 2 %.

Directions. A copy in each direction, in two streams, and a kernel in a third all overlap on a device with two copy
engines; with one engine the copies alternate. The prediction is the longest of the three. An H200 has three engines.
Two copies take about a tenth longer there than the longer one alone, so the two directions are not quite independent;
copies concurrent with a kernel that takes longer change its time by no more than 3 %, in one direction or both.

Source: CUDA C++ Best Practices Guide, "Asynchronous and Overlapping Transfers with Computation"; CUDA Driver API,
"Stream synchronization behavior" and "API synchronization behavior".

One module because the kernels, the measurement, the claims and the plot of an experiment are read together.
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
from numba_gemm.lab.harness.experiment import Experiment
from numba_gemm.lab.memory import machine, movement
from numba_gemm.lab.memory.drawing import COLOURS, bars, curve
from numba_gemm.runtime import pinned_memory
from numba_gemm.runtime.driver import call
from numba_gemm.runtime.timing import Call

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLOCK = 256
ROUNDS = 9
PERIOD = 4096  # of the data; small numbers, so that sums of many ones stay exact
LEGACY = 1  # the driver's CU_STREAM_LEGACY, regardless of the meaning of handle 0
HOST_ELEMENTS = 1 << 16  # size of the host's work: small enough for its cache, so that copies do not slow it down

TO_DEVICE, TO_HOST, KERNEL = "host to device", "device to host", "kernel"


# ------------------------------------------------------------------------------------------------- models and pieces


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


# ----------------------------------------------------------------------------------------------------------- kernel


@cuda.jit
def work(data: Any, turns: Any, factor: Any, summand: Any) -> None:
    """Apply a chain of fused multiply-adds to each element; factor and summand are unknown to the compiler."""
    i = cuda.grid(1)
    if i < data.size:
        x = data[i]
        while turns > 0:  # the compiler unrolls this loop; counting a range would take longer than the work
            x = x * factor + summand
            turns -= 1
        data[i] = x


def worker(data: Any, turns: int) -> Call:
    """Return a call that enqueues the kernel on all of the data, and adds `turns` to each element."""
    one = np.float32(1)
    return machine.enqueue(work, ceil_div(data.size, BLOCK), BLOCK, data, turns, one, one)


# ---------------------------------------------------------------------------------------------------------- helpers


@contextmanager
def blocking_stream() -> Iterator[int]:
    """Yield a new stream that synchronises with the legacy default stream."""
    stream = int(call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_DEFAULT))
    try:
        yield stream
    finally:
        call(driver.cuStreamDestroy, stream)


def host_work(counter: np.ndarray, turns: int) -> None:
    """Count to `turns` in every element, one step at a time."""
    counter[:] = 0
    for _ in range(turns):
        np.add(counter, 1, out=counter)


def host_ms(streams: Sequence[int], run: Callable[[], float], rounds: int) -> tuple[float, float]:
    """Median milliseconds of host time until streams and host are done, and until `run` had enqueued its work.

    `run` returns the time of `time.perf_counter` after enqueuing; it may do more work afterwards.
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
    """Page-locked host data, a device array, and methods to time and check work on them."""

    source: np.ndarray
    result: np.ndarray
    data: Any
    other: Any
    streams: Sequence[int]
    rounds: int

    def ms(self, run: Callable[[], object], streams: Sequence[int] | None = None) -> float:
        """Median span of work on streams."""
        return movement.median_ms(streams or self.streams, run, self.rounds)

    def clear(self) -> None:
        """Overwrite the device's array so that nothing in it looks like a result."""
        movement.clear(self.data, self.source.nbytes, self.streams[0])
        movement.finish(self.streams[0])

    def check(self, turns: int, elements: int, what: str) -> None:
        """Raise AssertionError unless the first elements on the device are those of the host plus `turns`."""
        movement.copy(self.result, self.data, elements * FLOAT32_BYTES, self.streams[0])
        movement.finish(self.streams[0])
        added = self.result[:elements]
        np.subtract(added, self.source[:elements], out=added)  # in place, which saves touching more memory
        if not (added == turns).all():
            raise AssertionError(f"{what}: the result is wrong")

    def part(self, begin: int, end: int, turns: int) -> tuple[int, int, int, Call]:
        """Return a piece's addresses on device and host, its bytes, and the call for its kernel."""
        to, from_ = movement.address(self.data), movement.address(self.source)
        piece = worker(self.data[begin:end], turns)
        return to + begin * FLOAT32_BYTES, from_ + begin * FLOAT32_BYTES, (end - begin) * FLOAT32_BYTES, piece

    def staged(self, elements: int, stages: int, turns: int) -> Callable[[], None]:
        """Return work that copies and computes one piece per stream."""
        parts = [self.part(begin, end, turns) for begin, end in pieces(elements, stages)]

        def run() -> None:
            for stream, (to, from_, size, kernel) in zip(self.streams, parts):
                movement.copy(to, from_, size, stream)
                kernel(stream)

        return run


# ------------------------------------------------------------------------------------------------------------ parts

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
    """Time of the kernel alone on all the data."""
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
    """Rows of part "timeline": start and end of each copy and kernel of one staged run."""
    elements = bench.source.size
    parts = [bench.part(begin, end, turns) for begin, end in pieces(elements, count)]
    events = movement.Events()
    streams = bench.streams
    try:
        for _ in range(2):  # the first run only creates the events
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
    """Rows of part "host": host work after, and during, copies and kernels of the device."""
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
            # The warm-up round has computed on the same array, too.
            check_other(bench, (bench.rounds + 1) * turns, f"{part}, {what}, the kernel")
            rows.append(
                {"part": part, "what": what, "streams": 1 + overlaps, "turns": turns}
                | {"transfer_ms": transfer, "kernel_ms": kernel, "sum_ms": transfer + kernel, "ms": ms}
                | {"predicted_ms": max(transfer, kernel) if overlaps else transfer + kernel}
            )
    return rows


def check_other(bench: Bench, turns: int, what: str) -> None:
    """Same as `Bench.check`, for the other array."""
    Bench(bench.source, bench.result, bench.other, bench.data, bench.streams, bench.rounds).check(
        turns, bench.source.size, what
    )


def measure_directions(bench: Bench, turns: int, transfer: float, kernel: float, engines: int) -> Rows:
    """Rows of part "directions": copies both ways and a kernel, in every combination."""
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
    """Overlap copies and kernels in every way that the guide describes, and in some that prevent it.

    Parameters
    ----------
    elements : int
        Floats to copy and to compute on; more than `BLOCK` + 1.
    turns : sequence of int
        Fused multiply-adds per element, one kernel for each. The middle one is used in all parts except "staged".
    streams : sequence of int
        Numbers of streams for staged copies and kernels; 1 is sequential.
    remainder_streams : sequence of int
        Numbers of streams for a number of elements that they do not divide.
    timeline_streams : int
        Streams of the run whose stages are recorded.
    host_turns : int
        NumPy additions of the host's work.
    rounds : int
        Samples of each time; the result is the median.

    Returns
    -------
    DataFrame
        One row per time ``ms``, with ``predicted_ms``. ``part``; ``what``; ``streams``; ``turns``; the times that it is
        predicted from, each measured alone: ``transfer_ms``, ``back_ms`` of the other direction, ``kernel_ms``,
        ``host_ms``; their ``sum_ms``; ``returned_ms``, when the host had enqueued all; ``left_out``, the elements that
        the guide's listing would not compute; ``engines``, the device's copy engines. Part "timeline" has one row per
        stage: its ``stream``, ``begin_ms`` and ``end_ms`` since the start, and the predicted ones.

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


# -------------------------------------------------------------------------------------------------- plot and claims


def plot(frame: pd.DataFrame, figure: Figure) -> None:
    """Plot time against the number of streams, the timeline, and the other parts as bars."""
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
    """True if concurrent work takes a time closer to the longest part than to the sum."""
    times = [row[name] for name in ("transfer_ms", "kernel_ms", "back_ms")]
    longest = max(value for value in times if not np.isnan(value))
    return bool(row["ms"] < (longest + row["sum_ms"]) / 2)


def claims(frame: pd.DataFrame) -> dict[str, bool]:
    """Check the statements of the module's docstring against a result."""
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
    facts=machine.facts,
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
