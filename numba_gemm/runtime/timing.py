"""Timing of products: replays of CUDA graphs between events, contenders in turn or one alone.

All times are measured by the functions of this module: of the device by events, of the host by its clock.

A graph of one call's repeats leaves out what launching costs the host, the same for every contender. A library that
cannot be captured into one is launched repeatedly instead, which shows where its calls are short. Contenders take
turns, one round each after the other, so that a clock that drifts slows all alike.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from cuda.bindings import driver

from ..device.units import ceil_div
from ..simulator.switch import SIMULATOR
from . import ahead
from .device import synchronize
from .driver import call

Call = Callable[[int], object]

PROBE_CALLS = 8
SHORT_SPAN_US = 10_000.0  # below it, a graph's launch is more than a thousandth of what is timed


@dataclass(frozen=True)
class Samples:
    """Microseconds per call, one sample per round.

    captured
        true if a graph was replayed; if not, the time includes launching, where that takes longer than the work
        itself.
    """

    us: np.ndarray
    captured: bool = False

    @property
    def min(self) -> float:
        """Fastest round."""
        return float(self.us.min())

    @property
    def median(self) -> float:
        """Middle round."""
        return float(np.median(self.us))

    @property
    def mean(self) -> float:
        """Mean of the rounds."""
        return float(self.us.mean())

    @property
    def max(self) -> float:
        """Slowest round."""
        return float(self.us.max())

    @property
    def p10(self) -> float:
        """Tenth percentile of the rounds."""
        return float(np.percentile(self.us, 10))

    @property
    def p90(self) -> float:
        """Ninetieth percentile of the rounds."""
        return float(np.percentile(self.us, 90))


class _Graph:
    """A number of calls, captured from a stream, to be replayed as one."""

    captured = True

    def __init__(self, enqueue: Call, stream: int, repeats: int):
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        call(driver.cuStreamBeginCapture, stream, mode)
        try:
            for _ in range(repeats):
                enqueue(stream)
        except BaseException:
            # A stream left capturing refuses everything else. That the capture failed too says nothing new.
            with contextlib.suppress(RuntimeError):
                call(driver.cuGraphDestroy, call(driver.cuStreamEndCapture, stream))
            raise
        graph = call(driver.cuStreamEndCapture, stream)
        try:
            self.executable: Any = call(driver.cuGraphInstantiate, graph, 0)
        finally:
            call(driver.cuGraphDestroy, graph)
        self.repeats = repeats

    def replay(self, stream: int) -> None:
        call(driver.cuGraphLaunch, self.executable, stream)

    def close(self) -> None:
        call(driver.cuGraphExecDestroy, self.executable)


class _Launches:
    """A number of calls, each launched again at every replay."""

    captured = False

    def __init__(self, enqueue: Call, repeats: int):
        self.enqueue = enqueue
        self.repeats = repeats

    def replay(self, stream: int) -> None:
        for _ in range(self.repeats):
            self.enqueue(stream)

    def close(self) -> None:
        """Do nothing."""


def _repeated(enqueue: Call, stream: int, repeats: int, graphs: bool) -> _Graph | _Launches:
    """Return a graph of the calls, if one is wanted and possible; else their launches."""
    if not graphs:
        return _Launches(enqueue, repeats)
    try:
        return _Graph(enqueue, stream, repeats)
    except Exception as refused:
        try:
            enqueue(stream)
            call(driver.cuStreamSynchronize, stream)
        except Exception as failed:
            raise refused from failed
        return _Launches(enqueue, repeats)


class Events(contextlib.ExitStack):
    """Timing events by name, the first ones created now, others on first use; freed at the end of a ``with`` block."""

    def __init__(self, *names: Any) -> None:
        super().__init__()
        self._events: dict[Any, Any] = {}
        for name in names:
            self._create(name)

    def _create(self, name: Any) -> None:
        self._events[name] = call(driver.cuEventCreate, 0)
        self.callback(call, driver.cuEventDestroy, self._events[name])

    def record(self, name: Any, stream: int) -> None:
        """Record an event under a name on a stream."""
        if name not in self._events:
            self._create(name)
        call(driver.cuEventRecord, self._events[name], stream)

    def wait(self, name: Any, stream: int) -> None:
        """Make a stream wait for the event of that name."""
        call(driver.cuStreamWaitEvent, stream, self._events[name], 0)

    def ms(self, begin: Any, end: Any) -> float:
        """Milliseconds from one event to another; waits for the second."""
        call(driver.cuEventSynchronize, self._events[end])
        return float(call(driver.cuEventElapsedTime, self._events[begin], self._events[end]))


class _Stopwatch(Events):
    """Events around some work on a stream, and at the end of each other stream that the work uses."""

    def __init__(self, stream: int, others: Sequence[int] = ()):
        super().__init__("begin", *others, "end")
        self.stream, self.others = stream, others

    def time_us(self, work: Call, lead: bool = False) -> float:
        """Return the duration of some work, for whose begin and end all streams wait.

        A lead is the same work before it, untimed, which hides its launch.
        """
        if lead:
            work(self.stream)
        self.record("begin", self.stream)
        for other in self.others:
            self.wait("begin", other)
        work(self.stream)
        for other in self.others:
            self.record(other, other)
            self.wait(other, self.stream)
        self.record("end", self.stream)
        return 1e3 * self.ms("begin", "end")


def _filling(
    enqueue: Call, stopwatch: _Stopwatch, span_us: float, max_repeats: int, round_up_to: int, graphs: bool
) -> _Graph | _Launches:
    """Return as many calls as fill a span, at least one, after two calls outside of any graph."""
    stream = stopwatch.stream
    enqueue(stream)
    call(driver.cuStreamSynchronize, stream)
    once, capture = stopwatch.time_us(enqueue), graphs
    # One call's span includes its launch; several, replayed, tell the time without it.
    if once < span_us / 2:
        with contextlib.closing(_repeated(enqueue, stream, PROBE_CALLS, graphs)) as probe:
            once = min(stopwatch.time_us(probe.replay) for _ in range(3)) / PROBE_CALLS
            capture = probe.captured
    repeats = max(1, min(max_repeats, round(span_us / max(once, 1e-3))))
    return _repeated(enqueue, stream, ceil_div(repeats, round_up_to) * round_up_to, capture)


def time_alone(
    enqueue: Call,
    *,
    stream: int,
    min_span_us: float = 10_000.0,
    max_repeats: int = 1000,
    round_up_to: int = 1,
    graphs: bool = True,
) -> Generator[tuple[float, bool], None, None]:
    """Time one call again and again while nothing else runs, for as long as the caller asks for more.

    Parameters
    ----------
    enqueue, stream, min_span_us, max_repeats, round_up_to, graphs
        As in `time_interleaved`, for one contender.

    Yields
    ------
    tuple of (float, bool)
        Microseconds per call during one span, and whether a graph was replayed. In the simulator, host time.
    """
    if SIMULATOR:
        while True:
            yield 1e6 * elapsed(partial(enqueue, stream), no_wait), False
    stopwatch = _Stopwatch(stream)
    work: _Graph | _Launches | None = None
    try:
        work = _filling(enqueue, stopwatch, min_span_us, max_repeats, round_up_to, graphs)
        while True:
            yield stopwatch.time_us(work.replay) / work.repeats, work.captured
    finally:
        if work is not None:
            work.close()
        stopwatch.close()


def time_interleaved(
    calls: Mapping[str, Call],
    *,
    stream: int,
    rounds: int = 5,
    min_span_us: float = 2000.0,
    max_repeats: int = 200,
    round_up_to: int = 1,
    graphs: bool = True,
    seed: int = 0,
    on_round: Callable[[int], None] | None = None,
) -> dict[str, Samples]:
    """Time calls that each enqueue one product on a stream.

    Parameters
    ----------
    calls : mapping of str to callable
        Contenders by name; each takes the stream's handle and only enqueues. It is called twice outside of any graph
        first, so that compilation, handles and workspaces are there before anything is captured or timed.
    stream : int
        Handle of a stream other than the default one, which cannot be captured; its device is current.
    rounds : int
        Samples per contender. All contenders are timed once per round, in an order that is shuffled for each.
    min_span_us : float
        A graph holds as many calls as fill this many microseconds, at least one.
    max_repeats : int
        Most calls per graph.
    round_up_to : int
        Calls per graph are a multiple of this, the number of sets of buffers that calls rotate over.
    graphs : bool
        Replay graphs, but for calls that cannot be captured. False launches every call of every contender, so that
        launching counts for all alike.
    seed : int
        Seed of the shuffles.
    on_round : callable, optional
        Called with the number of each round after it, outside of any span.

    Returns
    -------
    dict of str to Samples
        In the simulator, which has no clock worth reading, host time of one call per round.

    Raises
    ------
    Exception
        what a call raises; where it was captured and is then launched, and both fail, what it raised at first.
    """
    if SIMULATOR:
        return {
            name: Samples(np.array([1e6 * elapsed(partial(enqueue, stream), no_wait) for _ in range(rounds)]))
            for name, enqueue in calls.items()
        }
    stopwatch = _Stopwatch(stream)
    works: dict[str, _Graph | _Launches] = {}
    spans: dict[str, list[float]] = {name: [] for name in calls}
    rng = np.random.default_rng(seed)
    try:
        for name, enqueue in calls.items():
            works[name] = _filling(enqueue, stopwatch, min_span_us, max_repeats, round_up_to, graphs)
        # A replay each to warm up: the first one uploads the graph. It also tells which spans are short.
        leads = {name: stopwatch.time_us(work.replay) < SHORT_SPAN_US for name, work in works.items()}
        names = list(works)
        for number in range(rounds):
            for index in rng.permutation(len(names)):
                name = names[index]
                spans[name].append(stopwatch.time_us(works[name].replay, leads[name]))
            if on_round is not None:
                on_round(number)
    finally:
        for work in works.values():
            work.close()
        stopwatch.close()
    return {name: Samples(np.array(spans[name]) / work.repeats, work.captured) for name, work in works.items()}


def span_ms(streams: Sequence[int], work: Callable[[], object], rounds: int) -> float:
    """Median milliseconds from a common start of streams to the end of work enqueued on them, after an untimed span."""
    with _Stopwatch(streams[0], streams[1:]) as stopwatch:
        _, *spans = (stopwatch.time_us(lambda _: work()) for _ in range(rounds + 1))
    return statistics.median(spans) / 1e3


def call_ms(enqueue: Call, stream: int, rounds: int) -> float:
    """Median milliseconds of a call on one stream, after an untimed one."""
    return span_ms([stream], partial(enqueue, stream), rounds)


def no_wait() -> None:
    """Wait for nothing, for work that the host itself completes."""


def elapsed(work: Callable[[], object], wait: Callable[[], object] = synchronize, calls: int = 1) -> float:
    """Return the seconds per call of some work, from when all before it is done until it is done itself."""
    wait()
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    wait()
    return (time.perf_counter() - begin) / calls


def settled_s(work: Callable[[], object], seconds: float) -> float:
    """Return the median seconds of the second half of the calls that are made, one by one, in some time."""
    ahead.wait_until_idle()  # kernels of other products are compiled ahead, which slows down the host
    took, end = list[float](), time.perf_counter() + seconds
    while not took or time.perf_counter() < end:
        took.append(elapsed(work))
    return statistics.median(took[len(took) // 2 :])


def plain_call_us(enqueue: Call, stream: int, us: float, seconds: float, most: int) -> float:
    """Return microseconds per call of a batch of plain calls, until the last one's result is there.

    The batch takes so many seconds if a call takes `us` microseconds, and has at most `most` calls.
    """
    count = max(2, min(most, round(seconds * 1e6 / max(us, 1e-3))))
    enqueue(stream)
    return 1e6 * elapsed(partial(enqueue, stream), partial(synchronize, stream), count)


def host_us(work: Callable[[], object], rounds: int) -> float:
    """Median microseconds of host work by the host's clock, after an untimed round."""
    work()
    return host_time_us(work, synchronize=no_wait, batch=1, rounds=rounds)


def host_time_us(
    enqueue: Callable[[], object], *, synchronize: Callable[[], object], batch: int = 100, rounds: int = 5
) -> float:
    """Median microseconds that a call keeps the host busy.

    Calls are made in batches, with a synchronisation between batches and outside of the span, so that a full launch
    queue does not count; a call whose device work takes long is better timed in smaller batches. Kernels that worker
    processes compile ahead are waited for before.
    """
    ahead.wait_until_idle()
    spans = []
    for _ in range(rounds):
        synchronize()
        spans.append(elapsed(enqueue, no_wait, batch))
        synchronize()
    return float(np.median(spans)) * 1e6
