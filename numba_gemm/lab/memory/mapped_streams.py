"""Kernels on mapped memory overlap both directions of the bus without streams, and compete with staged copies.

A kernel computes an array in host memory from another: staged in a number of streams, each of which copies a piece to
the device, computes, and copies it back; or on mapped memory, which it reads ("read"), writes ("written") or both
("mapped"), while the rest is copied. Predicted from each copy and the kernel alone, as if all that can overlap did.

Source: CUDA C++ Best Practices Guide, "Zero Copy"; details in docs/memory_lab.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from cuda.bindings import driver
from numba import cuda

from numba_gemm.device.units import FLOAT32_BYTES
from numba_gemm.lab.harness.experiment import Unavailable, decided
from numba_gemm.lab.memory import machine, movement
from numba_gemm.lab.memory.drawing import Figure, bars
from numba_gemm.runtime import pinned_memory
from numba_gemm.runtime.driver import call
from numba_gemm.runtime.timing import Call

BLOCK = 256
PERIOD = 4096  # of the data; small numbers, so that sums of many ones stay exact
STAGED, READ, WRITTEN, MAPPED = "staged", "read", "written", "mapped"


@cuda.jit
def compute(x: Any, out: Any, turns: Any, factor: Any, summand: Any) -> None:
    """Apply a chain of fused multiply-adds to each element; factor and summand are unknown to the compiler."""
    i = cuda.grid(1)
    value = x[i]
    while turns > 0:
        value = value * factor + summand
        turns -= 1
    out[i] = value


def predicted_ms(way: str, streams: int, there: float, back: float, kernel: float) -> float:
    """Predicted milliseconds of a way, from those of the copy there, the copy back and the kernel, each alone."""
    if way == STAGED:
        longest = max(there, back, kernel)
        return longest + (there + back + kernel - longest) / streams
    return {
        READ: max(there, kernel) + back,
        WRITTEN: there + max(kernel, back),
        MAPPED: max(there, back, kernel),
    }[way]


def computed(x: Any, out: Any, turns: int) -> Call:
    """Return a call that enqueues the kernel."""
    one = np.float32(1)
    return machine.enqueue(compute, x.size // BLOCK, BLOCK, x, out, turns, one, one)


def copied(target: Any, source: Any) -> Call:
    """Return a call that enqueues a copy."""
    return lambda stream: movement.copy(target, source, FLOAT32_BYTES * target.size, stream)


@dataclass
class Arrays:
    """Page-locked arrays of the host, device pointers to the same memory, and arrays on the device."""

    source: np.ndarray
    result: np.ndarray
    mapped_source: Any
    mapped_result: Any
    x: Any
    out: Any

    def steps(self, way: str, streams: Sequence[int], turns: int) -> list[tuple[Call, int]]:
        """Return the calls of a way in order, each with its stream."""
        first = streams[0]
        if way == READ:
            return [(computed(self.mapped_source, self.out, turns), first), (copied(self.result, self.out), first)]
        if way == WRITTEN:
            return [(copied(self.x, self.source), first), (computed(self.x, self.mapped_result, turns), first)]
        if way == MAPPED:
            return [(computed(self.mapped_source, self.mapped_result, turns), first)]
        size = self.source.size // len(streams)
        found = []
        for number, stream in enumerate(streams):
            piece = slice(number * size, (number + 1) * size)
            x, out = self.x[piece], self.out[piece]
            for step in (copied(x, self.source[piece]), computed(x, out, turns), copied(self.result[piece], out)):
                found.append((step, stream))
        return found

    def ms(self, steps: Sequence[tuple[Call, int]], rounds: int) -> float:
        """Median milliseconds of steps, after overwriting all that they write."""
        streams = list(dict.fromkeys(stream for _, stream in steps))
        self.result[:] = np.nan
        for array in (self.x, self.out):
            movement.clear(array, FLOAT32_BYTES * self.source.size, streams[0])
        movement.finish(streams[0])

        def run() -> None:
            for step, stream in steps:
                step(stream)

        return movement.median_ms(streams, run, rounds)


def mapped_streams(
    elements: int = 1 << 25,
    turns: Sequence[int] = (1, 1000, 4000),
    streams: Sequence[int] = (1, 2, 4, 8, 16),
    rounds: int = 9,
) -> Iterator[pd.DataFrame]:
    """Compute an array in host memory from another, in each way.

    One row per way, number of ``streams`` and ``turns``: ``there_ms``, ``back_ms`` and ``kernel_ms`` alone, ``ms``
    (median), and ``gb_s`` of both arrays.

    Parameters
    ----------
    elements: Floats of an array, a multiple of 256 for each number of streams.
    turns: Fused multiply-adds per element, one kernel for each.
    streams: Numbers of streams for staged copies and kernels; 1 is sequential.
    rounds: Samples of each measurement.
    """
    rows: list[dict[str, Any]] = []
    with ExitStack() as scopes:
        scopes.enter_context(machine.in_context())
        if not machine.attribute("CAN_MAP_HOST_MEMORY"):
            raise Unavailable("this device cannot map host memory")
        handles = scopes.enter_context(machine.streams(max(streams)))
        hosts = [scopes.enter_context(pinned_memory.pinned(elements)) for _ in range(2)]
        pointers = [int(call(driver.cuMemHostGetDevicePointer, host.ctypes.data, 0)) for host in hosts]
        devices = [scopes.enter_context(movement.device_array(elements)) for _ in range(2)]
        arrays = Arrays(*hosts, *(movement.view(pointer, elements) for pointer in pointers), *devices)
        arrays.source[:] = np.resize(np.arange(PERIOD, dtype=np.float32), elements)
        first = handles[0]
        there_ms = arrays.ms([(copied(arrays.x, arrays.source), first)], rounds)
        back_ms = arrays.ms([(copied(arrays.result, arrays.out), first)], rounds)
        for each in turns:
            kernel_ms = arrays.ms([(computed(arrays.x, arrays.out, each), first)], rounds)
            for way, count in [(STAGED, count) for count in streams] + [(way, 1) for way in (READ, WRITTEN, MAPPED)]:
                ms = arrays.ms(arrays.steps(way, handles[:count], each), rounds)
                if not np.array_equal(arrays.result, arrays.source + each):
                    raise AssertionError(f"{way}, {count} streams, {each} turns: the result is wrong")
                predicted = predicted_ms(way, count, there_ms, back_ms, kernel_ms)
                size = 2 * arrays.source.nbytes
                rows.append(
                    {"way": way, "streams": count, "turns": each, "there_ms": there_ms, "back_ms": back_ms}
                    | {"kernel_ms": kernel_ms, "ms": ms, "gb_s": size / ms / 1e6}
                    | {"predicted_ms": predicted, "predicted_gb_s": size / predicted / 1e6}
                )
                yield pd.DataFrame(rows)


def plot(frame: pd.DataFrame, figure: Figure) -> None:
    """Plot milliseconds of each way, with one panel per number of turns."""
    groups = list(frame.groupby("turns"))
    labels = {READ: "mapped, read", WRITTEN: "mapped, written", MAPPED: "mapped, both"}
    for axes, (_, found) in zip(np.atleast_1d(figure.subplots(1, len(groups))), groups, strict=True):
        counts = found["streams"].map("staged, {} streams".format)
        bars(axes, list(found["way"].map(labels).fillna(counts)), found["ms"], found["predicted_ms"])
        axes.set(xlabel="ms", title=f"kernel alone: {found['kernel_ms'].iloc[0]:.2g} ms")
        axes.legend(ncols=2, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12))
        if axes is not figure.axes[0]:
            axes.set_yticklabels([])


@decided
def claims(frame: pd.DataFrame) -> dict[str, Any]:
    """Claims of the lesson."""
    one, off = frame[frame["streams"] == 1], frame["ms"] / frame["predicted_ms"]
    ms = one.pivot(index="turns", columns="way", values="ms")
    best = frame[frame["way"] == STAGED].groupby("turns")["ms"].min()
    staged, short = frame["way"] == STAGED, frame["kernel_ms"] < frame["there_ms"]
    long = one.groupby("turns")["kernel_ms"].min() > one["there_ms"].min()
    return {
        "one kernel on mapped memory, read and written, is faster than copying, computing and copying back": (
            ms[MAPPED] < ms[STAGED]
        ),
        "so are kernels that only read or only write it, if they take longer than a copy": (
            ms[[READ, WRITTEN]].max(axis=1) < ms[STAGED]
        )[long],
        "without streams, it takes no more than a quarter longer than the best number of streams": (
            ms[MAPPED] < 1.25 * best
        ),
        "staged, all takes what is predicted, to a quarter": (off[staged] - 1).abs() < 0.25,
        "kernels shorter than a copy take at least what the bus does": off[~staged & short] > 0.95,
    }


SMALL = {"elements": 1 << 16, "turns": (1, 2), "streams": (1, 2), "rounds": 1}
SIGNATURES = {"compute": (compute, "float32[::1], float32[::1], int64, float32, float32")}
UNAVAILABLE = "the simulator has no host memory apart from the device's"
EXPERIMENT = machine.experiment(mapped_streams, "9.1.3", claims, plot, SMALL, SIGNATURES, UNAVAILABLE)
