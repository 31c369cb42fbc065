"""Kernels on mapped memory overlap both directions of the bus without streams, and compete with staged copies."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from numba_gemm.lab.harness.pictures import bars, panels
from numba_gemm.lab.memory import machine, movement
from numba_gemm.lab.memory.overlap import BLOCK, PERIOD, pieces, work, worker
from numba_gemm.runtime.timing import Call, span_ms

STAGED, READ, WRITTEN, MAPPED = "staged", "read", "written", "mapped"


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


def steps(way: str, hosts: Sequence[Any], devices: Sequence[Any], count: int, turns: int) -> list[list[Call]]:
    """Return the calls of a way in their order, one list per stream; `hosts` and `devices` hold source and result."""
    (source, result), (x, out), copying = hosts, devices, movement.copying
    if way == READ:
        return [[worker(movement.mapped(source), out, turns), copying(result, out)]]
    if way == WRITTEN:
        return [[copying(x, source), worker(x, movement.mapped(result), turns)]]
    if way == MAPPED:
        return [[worker(movement.mapped(source), movement.mapped(result), turns)]]
    places = [slice(*piece) for piece in pieces(source.size, count)]
    return [[copying(x[at], source[at]), worker(x[at], out[at], turns), copying(result[at], out[at])] for at in places]


def mapped_streams(
    elements: int = 1 << 25,
    turns: Sequence[int] = (1, 1000, 4000),
    streams: Sequence[int] = (1, 2, 4, 8, 16),
    rounds: int = 9,
) -> Iterator[dict[str, Any]]:
    """Compute an array in host memory from another, in each way.

    "staged" copies pieces to the device, computes, and copies them back, one stream per piece; else the kernel reads
    mapped memory ("read"), writes it ("written") or both ("mapped"), and the rest is copied.

    One row per way, number of ``streams`` and ``turns``: ``there_ms``, ``back_ms`` and ``kernel_ms`` alone, ``ms``
    (median), and ``gb_s`` of both arrays.

    Parameters
    ----------
    elements: Floats of an array, a multiple of 256 for each number of streams.
    turns: Fused multiply-adds per element, one kernel for each.
    streams: Numbers of streams for staged copies and kernels; 1 is sequential.
    """
    with movement.Scope() as scope:
        streams_of = scope.streams(max(streams))
        hosts, devices = scope.pinned(2, elements), scope.on_device(2, elements)
        (source, result), (x, out), stream = hosts, devices, streams_of[0]
        source[:] = np.resize(np.arange(PERIOD, dtype=np.float32), elements)

        def measured_ms(calls: Sequence[Sequence[Call]]) -> float:
            """Median milliseconds of calls per stream, after overwriting all that they write."""
            result[:] = np.nan
            for array in devices:
                movement.clear(array, source.nbytes, stream)
            movement.finish(stream)

            def work() -> None:
                for handle, own in zip(streams_of, calls):
                    movement.in_sequence(own)(handle)

            return span_ms(streams_of[: len(calls)], work, rounds)

        there_ms, back_ms = (measured_ms([[movement.copying(*pair)]]) for pair in ((x, source), (result, out)))
        for each in turns:
            kernel_ms = measured_ms([[worker(x, out, each)]])
            for way, count in [(STAGED, count) for count in streams] + [(way, 1) for way in (READ, WRITTEN, MAPPED)]:
                ms = measured_ms(steps(way, hosts, devices, count, each))
                assert np.array_equal(result, source + each), f"{way}, {count} streams, {each} turns: it is wrong"
                predicted, size = predicted_ms(way, count, there_ms, back_ms, kernel_ms), 2 * source.nbytes
                yield (
                    {"way": way, "streams": count, "turns": each, "there_ms": there_ms, "back_ms": back_ms}
                    | {"kernel_ms": kernel_ms, "ms": ms, "gb_s": size / ms / 1e6}
                    | {"predicted_ms": predicted, "predicted_gb_s": size / predicted / 1e6}
                )


def claims(frame: pd.DataFrame) -> dict[str, Any]:
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


PLOT = panels(bars("ms", ["turns", "way", "streams"], label="turns {}: {}, streams {}"))
SMALL = {"elements": 1 << 16, "turns": (1, 2), "streams": (1, 2), "rounds": 1}
EXPERIMENT = machine.gpu_experiment(mapped_streams, "9.1.3", claims, PLOT, SMALL, [work], allowed={"elements": BLOCK})
