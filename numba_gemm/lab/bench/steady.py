"""Speed of one contender alone at its steady state: nothing else runs until clocks and power have settled."""

import contextlib
import math
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.harness.nvml import ClockSamples, Nvml, sampled_clocks
from numba_gemm.models.roofline import gemm_flops
from numba_gemm.runtime.timing import Call, plain_call_us, time_alone

WINDOW_S = 0.5  # of which the median is taken
MOST_WINDOWS = 8
SETTLED = 0.005  # relative difference of the medians of two windows that follow each other
CALLS_S = 0.3  # of plain calls
MOST_CALLS = 20_000
UNSETTLED = "not settled"  # in the column `steady_throttle`


def measure(
    enqueue: Call, stream: int, shape: Shape, nvml: Nvml | None, *, sets: int = 1, graphs: bool = True
) -> dict[str, Any]:
    """Run a contender until two windows agree, or `MOST_WINDOWS` have passed; then time plain calls.

    Return its columns, but for ratios. `enqueue` rotates among `sets` of operands; `graphs` is False if it cannot be
    captured, so that its times include launching where that takes longer than the work.
    """
    with contextlib.closing(time_alone(enqueue, stream=stream, round_up_to=sets, graphs=graphs)) as spans:
        us, clocks, settled = steady_state(spans, WINDOW_S, nvml)
    return {
        "steady_us": us,
        "steady_gflops": gemm_flops(*shape) / us * 1e-3,
        "steady_clock_mhz": clocks.median_mhz,
        "steady_watts": clocks.watts,
        "steady_throttle": "; ".join(filter(None, [clocks.throttle, "" if settled else UNSETTLED])),
        "call_us": plain_call_us(enqueue, stream, us, CALLS_S, MOST_CALLS),
    }


def steady_state(
    spans: Iterator[tuple[float, bool]], length_s: float, nvml: Nvml | None = None, within: float = SETTLED
) -> tuple[float, ClockSamples, bool]:
    """Return median time and clocks of a window that agrees with the one before, and True; else of the last, False."""
    before = math.inf
    for _ in range(MOST_WINDOWS):
        us, clocks = window(spans, length_s, nvml)
        if abs(us / before - 1) < within:
            return us, clocks, True
        before = us
    return us, clocks, False


def ratios(found: Mapping[str, Any], cublas: Mapping[str, Any]) -> dict[str, float]:
    """Return the columns that compare a contender alone with cuBLAS SGEMM alone; none if it was not measured."""
    names = {"steady_us": "steady_ratio_to_cublas", "call_us": "call_ratio_to_cublas"}
    return {ratio: cublas.get(us, math.nan) / found[us] for us, ratio in names.items()} if found else {}


def window(
    spans: Iterator[tuple[float, bool]], length_s: float, nvml: Nvml | None = None
) -> tuple[float, ClockSamples]:
    """Return the median time of spans in microseconds, and clocks and power, over some seconds."""
    times: list[float] = []
    with sampled_clocks(nvml, power=True) as clocks:
        begin = time.perf_counter()
        while time.perf_counter() - begin < length_s or not times:
            times.append(next(spans)[0])
    return statistics.median(times), clocks
