"""Streamed calls compared with device calls: ``python -m numba_gemm.lab.bench.streamed --out DIR``.

It times `tiled_sgemm` on operands in device memory, then `streamed_sgemm` on the same operands in page-locked memory,
in pageable memory and in memory-mapped files, with and without a limit of device memory. Each time is reported with the
prediction of `numba_gemm.streaming.expected_time` from separately timed copies. Results are compared element by
element with those of the device call. It writes `streamed.csv` and `streamed.json`.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from cuda.bindings import driver

from numba_gemm.lab.harness import environment
from numba_gemm.lab.harness.command import (
    USAGE,
    add_result_options,
    command,
    csv_text,
    json_text,
    make_folder,
    require_gpu,
    write_files,
)
from numba_gemm.lab.harness.environment import LAUNCHES
from numba_gemm.lab.harness.nvml import sampled_clocks
from numba_gemm.models.accuracy import ieee_bound
from numba_gemm.runtime.device import current_device, synchronize
from numba_gemm.runtime.driver import device_scope
from numba_gemm.runtime.pinned_memory import pinned
from numba_gemm.streaming import blocking_of, expected_time, streamed_sgemm

__all__ = ["FILE", "HOW", "ON_DEVICE", "MemoryWatch", "main"]

FILE, HOW = "streamed.csv", "streamed.json"
ON_DEVICE = "on the device"
ROWS = 1024  # rows of a result that are compared at once
LARGEST = 0.5  # elements of A and B lie within [-LARGEST, LARGEST)
KINDS = ("page-locked", "pageable", "memory map")
RIGHT, WRONG = 0, 1


class MemoryWatch:
    """Peak of device memory in use while watching, minus the memory in use before."""

    def __init__(self, device: int, interval_s: float = 0.002) -> None:
        self._device, self._interval, self._stop = device, interval_s, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.before = self.most = self.after = 0

    def taken(self) -> int:
        """Bytes of device memory in use by all processes."""
        with device_scope(self._device):
            _, free, total = driver.cuMemGetInfo()
        return int(total) - int(free)

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            self.most = max(self.most, self.taken() - self.before)

    def __enter__(self) -> MemoryWatch:
        self.before = self.taken()
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stop.set()
        self._thread.join()
        self.after = self.taken() - self.before


@contextmanager
def operands(kind: str, size: int, source: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Allocate A, B and an empty C in a kind of memory, and copy the values of A and B from a source."""
    with ExitStack() as scopes:
        if kind == "page-locked":
            made = [scopes.enter_context(pinned(size * size)).reshape(size, size) for _ in range(3)]
        elif kind == "memory map":
            folder = Path(scopes.enter_context(tempfile.TemporaryDirectory()))
            made = [np.memmap(folder / name, np.float32, "w+", shape=(size, size)) for name in "abc"]
        else:
            made = [np.empty((size, size), np.float32) for _ in range(3)]
        for target, values in zip(made, source):
            target[...] = values
        yield made


class InMemory:
    """Matrix multiplication with the same operands in device memory."""

    def __init__(self, source: Sequence[np.ndarray]) -> None:
        from numba import cuda

        self._a, self._b = (cuda.to_device(values) for values in source)
        self._c = cuda.device_array((source[0].shape[0], source[1].shape[1]), np.float32)

    def seconds(self, precision: str) -> float:
        """Time one call in seconds."""
        from numba_gemm import tiled_sgemm

        synchronize(0)
        begin = time.perf_counter()
        tiled_sgemm(self._a, self._b, out=self._c, precision=precision)
        synchronize(0)
        return time.perf_counter() - begin

    def largest_difference(self, other: np.ndarray) -> float:
        """Largest difference of a result from that of the last call; NaN if a result contains NaN."""
        most = 0.0
        for begin in range(0, len(other), ROWS):  # all of C at once would take as much memory again
            mine = self._c[begin : begin + ROWS].copy_to_host()
            most = max(most, float(np.abs(mine - other[begin : begin + ROWS]).max(initial=0.0)), key=nan_last)
        return most


def nan_last(value: float) -> tuple[bool, float]:
    """Sort key that orders NaN last."""
    return math.isnan(value), value


def measure(
    size: int, precisions: Sequence[str], kinds: Sequence[str], limits: Sequence[int | None], repeats: int
) -> pd.DataFrame:
    """Return one row per streamed case, with median times, and one per precision for the device call.

    Each round times both calls in turn, so that the device is equally warm for both.
    """
    rng, device = np.random.default_rng(0), current_device()
    rows: list[dict[str, Any]] = []
    source = [rng.random((size, size), np.float32) - np.float32(LARGEST) for _ in range(2)]
    inside, spans_inside = InMemory(source), {precision: list[float]() for precision in precisions}
    for precision in precisions:
        inside.seconds(precision)  # loads kernels and allocates the workspace
    for kind in kinds:
        with operands(kind, size, source) as (a, b, c):
            for precision in precisions:
                streamed_sgemm(a[:512], b[:, :512], precision=precision)
                for limit in limits:
                    how: dict[str, Any] = {"memory_limit": limit, "precision": precision}
                    blocking, prediction = blocking_of(a, b, **how), expected_time(a, b, c, **how)
                    print(f"{kind}, {precision}, limit {limit}: {prediction}", flush=True)
                    c.fill(np.nan)
                    with MemoryWatch(device) as watch:
                        streamed_sgemm(a, b, c, **how)
                    pairs = []
                    for _ in range(repeats):
                        own = inside.seconds(precision)
                        begin = time.perf_counter()
                        streamed_sgemm(a, b, c, **how)
                        pairs.append((own, time.perf_counter() - begin))
                    spans_inside[precision] += [own for own, _ in pairs]
                    rows.append(
                        {
                            "precision": precision,
                            "operands": kind,
                            "memory_limit": limit,
                            "seconds": float(np.median([span for _, span in pairs])),
                            "of_in_memory": float(np.median([own / span for own, span in pairs])),
                            "predicted_s": prediction.seconds,
                            "bound_by": prediction.bound_by,
                            "blocks": blocking.count,
                            "panels": len(blocking.depths),
                            "device_bytes": blocking.device_bytes,
                            "peak_bytes": watch.most,
                            "left_bytes": watch.after,
                            "largest_difference": inside.largest_difference(c),
                        }
                    )
                    print(rows[-1], flush=True)
    first: list[dict[str, Any]] = [
        {"precision": name, "operands": ON_DEVICE, "seconds": float(np.median(spans)), "of_in_memory": 1.0}
        for name, spans in spans_inside.items()
    ]
    frame = pd.DataFrame(first + rows).sort_values(
        "precision", kind="stable", key=lambda names: names.map(order_of(precisions))
    )
    frame.insert(0, "size", size)
    frame.insert(4, "tflops", 2.0 * size**3 / frame["seconds"] / 1e12)
    return frame


def order_of(names: Sequence[str]) -> dict[str, int]:
    """Map each name to its position."""
    return {name: place for place, name in enumerate(names)}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="python -m numba_gemm.lab.bench.streamed", description=__doc__)
    add_result_options(made)
    made.add_argument("--size", type=int, default=32768, metavar="N", help="M = N = K (default: 32768)")
    made.add_argument("--precisions", default="ieee,bf16x6", help="default: ieee,bf16x6")
    made.add_argument("--operands", default=",".join(KINDS), help="kinds of memory (default: all)")
    made.add_argument(
        "--limits", default="0,4", metavar="GB", help="limits of device memory, 0 for none (default: 0,4)"
    )
    made.add_argument("--repeats", type=int, default=3, metavar="N", help="default: 3")
    return made


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the files and print a table; return the exit status."""
    options = parser().parse_args(arguments)
    require_gpu()
    limits = [int(float(text) * 1e9) or None for text in options.limits.split(",")]
    described = environment.describe(
        simulated=False,
        seed=0,
        cache="cold",
        command=f"python -m numba_gemm.lab.bench.streamed --size {options.size} --limits {options.limits}",
        timing=LAUNCHES,
        stated_commit=options.commit,
    )
    kinds, precisions = options.operands.split(","), options.precisions.split(",")
    if unknown := set(kinds) - set(KINDS):
        print(f"error: unknown kinds of memory {sorted(unknown)}; expected some of {', '.join(KINDS)}", file=sys.stderr)
        return USAGE
    make_folder(options.out)
    with sampled_clocks(environment.current_nvml()) as clocks:
        frame = measure(options.size, precisions, kinds, limits, options.repeats)
    environment.conclude(described, [clocks.median_mhz], [clocks.throttle])
    write_files(options.out, {FILE: csv_text(frame, 5), HOW: json_text(described)})
    print(frame.to_string(index=False))
    streamed = frame[frame["operands"] != ON_DEVICE]
    # Both results have errors, each within the bound.
    most = 2 * ieee_bound(options.size) * options.size * LARGEST**2
    wrong = ~(streamed["largest_difference"] <= most)
    over = streamed["peak_bytes"] > streamed["memory_limit"].fillna(streamed["device_bytes"])
    for found, what in ((wrong, "differ from the product on the device"), (over, "take more memory than they may")):
        if found.any():
            print(f"error: {found.sum()} products {what}", file=sys.stderr)
    return WRONG if (wrong | over).any() else RIGHT


if __name__ == "__main__":
    sys.exit(main())
