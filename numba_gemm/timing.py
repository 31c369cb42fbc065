"""How long a product takes: replays of CUDA graphs between events, contenders in turn.

A graph of one call's repeats leaves out what launching costs the host, the same for every contender. Contenders take
turns, one round each after the other, so that a clock that drifts slows all alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from cuda.bindings import driver

from .device.switch import SIMULATOR
from .driver import call

Call = Callable[[int], None]


@dataclass(frozen=True)
class Samples:
    """Microseconds a call, one sample a round."""

    us: np.ndarray

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

    def __init__(self, enqueue: Call, stream: int, repeats: int):
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        call(driver.cuStreamBeginCapture, stream, mode)
        try:
            for _ in range(repeats):
                enqueue(stream)
        finally:
            # Also after an error: a stream left capturing refuses everything else.
            graph = call(driver.cuStreamEndCapture, stream)
        try:
            self.executable: Any = call(driver.cuGraphInstantiate, graph, 0)
        finally:
            call(driver.cuGraphDestroy, graph)
        self.repeats = repeats

    def close(self) -> None:
        call(driver.cuGraphExecDestroy, self.executable)


class _Stopwatch:
    """Two events around some work on a stream."""

    def __init__(self, stream: int):
        self.stream = stream
        self.events = [call(driver.cuEventCreate, 0) for _ in range(2)]

    def time_us(self, enqueue: Callable[[], None]) -> float:
        begin, end = self.events
        call(driver.cuEventRecord, begin, self.stream)
        enqueue()
        call(driver.cuEventRecord, end, self.stream)
        call(driver.cuEventSynchronize, end)
        return float(call(driver.cuEventElapsedTime, begin, end)) * 1e3

    def close(self) -> None:
        for event in self.events:
            call(driver.cuEventDestroy, event)


def time_interleaved(
    calls: Mapping[str, Call],
    *,
    stream: int,
    rounds: int = 5,
    min_span_us: float = 2000.0,
    max_repeats: int = 200,
    round_up_to: int = 1,
    on_round: Callable[[int], None] | None = None,
) -> dict[str, Samples]:
    """Time calls that each enqueue one product on a stream.

    Parameters
    ----------
    calls : mapping of str to callable Contenders by name; each takes the stream's handle and only enqueues. It is
        called twice outside of any graph first, so that compilation, handles and workspaces are there before anything
        is captured or timed.
    stream : int
        Handle of a stream other than the default one, which cannot be captured; its device is current.
    rounds : int
        Samples a contender. All contenders are timed once a round, in an order that rotates.
    min_span_us : float
        A graph holds as many calls as fill this many microseconds, at least one.
    max_repeats : int
        Most calls a graph.
    round_up_to : int
        Calls a graph come in multiples of this, for calls that rotate over so many sets of buffers.
    on_round : callable, optional
        Called with the number of each round after it, outside of any span.

    Returns
    -------
    dict of str to Samples
        In the simulator, which has no clock worth reading, host time of one call a round.
    """
    if SIMULATOR:
        return {
            name: Samples(np.array([_host_us(enqueue, stream) for _ in range(rounds)]))
            for name, enqueue in calls.items()
        }
    stopwatch = _Stopwatch(stream)
    graphs: dict[str, _Graph] = {}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    try:
        for name, enqueue in calls.items():
            enqueue(stream)
            call(driver.cuStreamSynchronize, stream)
            once = stopwatch.time_us(lambda enqueue=enqueue: enqueue(stream))  # type: ignore[misc]
            # One call's span includes its launch; a graph of a few tells the time without it.
            if once < min_span_us / 2:
                probe = _Graph(enqueue, stream, 8)
                once = min(stopwatch.time_us(lambda probe=probe: _replay(probe, stream)) for _ in range(3)) / 8  # type: ignore[misc]
                probe.close()
            repeats = max(1, min(max_repeats, round(min_span_us / max(once, 1e-3))))
            repeats = -(-repeats // round_up_to) * round_up_to
            graphs[name] = _Graph(enqueue, stream, repeats)
        names = list(graphs)
        for name in names:  # a replay each to warm up: the first one uploads the graph
            _replay(graphs[name], stream)
        call(driver.cuStreamSynchronize, stream)
        for number in range(rounds):
            shift = number % len(names) if names else 0
            for name in names[shift:] + names[:shift]:
                graph = graphs[name]
                span = stopwatch.time_us(lambda graph=graph: _replay(graph, stream))  # type: ignore[misc]
                samples[name].append(span / graph.repeats)
            if on_round is not None:
                on_round(number)
    finally:
        for graph in graphs.values():
            graph.close()
        stopwatch.close()
    return {name: Samples(np.array(us)) for name, us in samples.items()}


def _replay(graph: _Graph, stream: int) -> None:
    call(driver.cuGraphLaunch, graph.executable, stream)


def _host_us(enqueue: Call, stream: int) -> float:
    begin = time.perf_counter()
    enqueue(stream)
    return (time.perf_counter() - begin) * 1e6


def host_time_us(
    enqueue: Callable[[], object], *, synchronize: Callable[[], object], batch: int = 100, rounds: int = 5
) -> float:
    """Median microseconds that a call keeps the host busy.

    Calls are made in batches, with a synchronisation between batches and outside of the span, so that a full launch
    queue does not count; a call whose device work takes long is better timed in smaller batches.
    """
    spans = []
    for _ in range(rounds):
        synchronize()
        begin = time.perf_counter()
        for _ in range(batch):
            enqueue()
        spans.append((time.perf_counter() - begin) / batch)
        synchronize()
    return float(np.median(spans)) * 1e6
