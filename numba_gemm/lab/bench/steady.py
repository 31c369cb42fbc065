"""Speed of one contender alone at its steady state: nothing else runs until clocks and power have settled."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.harness.nvml import ClockSamples, Nvml, sampled_clocks
from numba_gemm.models.roofline import gemm_flops
from numba_gemm.runtime.device import synchronize
from numba_gemm.runtime.timing import time_alone

Call = Callable[[int], None]

WINDOW_S = 0.5  # of which the median is taken
MOST_WINDOWS = 8
SETTLED = 0.005  # relative difference of the medians of two windows that follow each other
CALLS_S = 0.3  # of plain calls
MOST_CALLS = 20_000


@dataclass(frozen=True)
class Steady:
    """Times of one contender alone."""

    us: float  # per call on the device: the median of the last window
    call_us: float  # per plain call, one after the other, from the host's clock
    clock_mhz: float  # median clock of the multiprocessors during the last window; NaN if unknown
    watts: float  # mean power during the last window; NaN if unknown
    throttle: str  # reasons during the last window
    settled: bool  # True if the last two windows agree
    captured: bool  # True if graphs were replayed; else `us` includes launching where that takes longer than the work


def measure(enqueue: Call, stream: int, nvml: Nvml | None, *, sets: int = 1, graphs: bool = True) -> Steady:
    """Run a contender until two windows agree, or `MOST_WINDOWS` have passed; then time plain calls.

    `enqueue` rotates among `sets` of operands; `graphs` is False if it cannot be captured.
    """
    spans = time_alone(enqueue, stream=stream, round_up_to=sets, graphs=graphs)
    before, settled = math.inf, False
    try:
        for _ in range(MOST_WINDOWS):
            times, captured, watts, clocks = _window(spans.__next__, nvml)
            median = statistics.median(times)
            settled = abs(median / before - 1) < SETTLED
            if settled:
                break
            before = median
    finally:
        spans.close()
    call_us = _plain_call_us(enqueue, stream, median)
    return Steady(median, call_us, clocks.median_mhz, watts, clocks.throttle, settled, captured)


def _window(span: Callable[[], tuple[float, bool]], nvml: Nvml | None) -> tuple[list[float], bool, float, ClockSamples]:
    """Return times of spans, whether they are replays, mean power in watts and clocks, over `WINDOW_S` seconds."""
    times: list[float] = []
    counted = None if nvml is None else nvml.energy_mj
    with sampled_clocks(nvml) as clocks:
        energy, begin = 0 if counted is None else counted(), time.perf_counter()
        while (seconds := time.perf_counter() - begin) < WINDOW_S or not times:
            us, captured = span()
            times.append(us)
        watts = math.nan if counted is None else (counted() - energy) * 1e-3 / seconds
    return times, captured, watts, clocks


def _plain_call_us(enqueue: Call, stream: int, us: float) -> float:
    """Return microseconds per call of a batch of plain calls, until the last one's result is there."""
    count = max(2, min(MOST_CALLS, round(CALLS_S * 1e6 / max(us, 1e-3))))
    enqueue(stream)
    synchronize(stream)
    begin = time.perf_counter()
    for _ in range(count):
        enqueue(stream)
    synchronize(stream)
    return (time.perf_counter() - begin) / count * 1e6


def columns(shape: Shape, found: Steady | None, cublas: Steady | None) -> dict[str, Any]:
    """Return the columns of a contender alone, with ratios to cuBLAS SGEMM alone; none if it was not measured."""
    if found is None:
        return {}
    throttle = found.throttle if found.settled else "; ".join(filter(None, [found.throttle, "not settled"]))
    return {
        "steady_us": found.us,
        "steady_gflops": gemm_flops(*shape) / found.us * 1e-3,
        "steady_ratio_to_cublas": math.nan if cublas is None else cublas.us / found.us,
        "steady_clock_mhz": found.clock_mhz,
        "steady_watts": found.watts,
        "steady_throttle": throttle,
        "call_us": found.call_us,
        "call_ratio_to_cublas": math.nan if cublas is None else cublas.call_us / found.call_us,
    }
