"""Streamed calls compared with calls on operands in device memory.

Operands of `streamed_sgemm` lie in page-locked memory, in pageable memory and in memory-mapped files; device memory is
limited, or not. Times stand beside the predictions of `numba_gemm.streaming.expected_time` from separately timed
copies. Results are compared element by element with those of `tiled_sgemm` on the device.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from cuda.bindings import driver

from numba_gemm.api import tiled_sgemm
from numba_gemm.lab.harness.environment import LAUNCHES
from numba_gemm.lab.harness.experiment import Experiment
from numba_gemm.models.accuracy import ieee_bound
from numba_gemm.runtime.device import current_device, synchronize
from numba_gemm.runtime.driver import device_scope
from numba_gemm.runtime.pinned_memory import pinned
from numba_gemm.streaming import blocking_of, expected_time, streamed_sgemm

ON_DEVICE = "on the device"
ROWS = 1024  # rows of a result that are compared at once
LARGEST = 0.5  # elements of A and B lie within [-LARGEST, LARGEST)
Kind = Literal["page-locked", "pageable", "memory map"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PRECISIONS = ("ieee", "bf16x6")


class MemoryWatch:
    """Peak of device memory in use while watching, minus the memory in use before."""

    def __init__(self, device: int, interval_s: float = 0.002) -> None:
        self._device, self._interval, self._stop = device, interval_s, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.before = self.most = 0

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


@contextmanager
def allocated(kind: str, size: int, source: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
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

    def seconds(self, precision: Any) -> float:
        """Time one call in seconds."""
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
            # `np.maximum` keeps a NaN of either.
            most = float(np.maximum(most, np.abs(mine - other[begin : begin + ROWS]).max(initial=0.0)))
        return most


def streamed(
    size: int = 32768,
    precisions: Sequence[str] = PRECISIONS,
    operands: Sequence[Kind] = KINDS,
    limits: Sequence[float] = (0, 4),
    repeats: int = 3,
) -> Iterator[pd.DataFrame]:
    """Time streamed products, each in turn with the device call, so that the device is equally warm for both.

    Parameters
    ----------
    size: M, N and K.
    operands: Kinds of memory of the operands: page-locked, pageable, memory map.
    limits: Limits of device memory in GB; 0 for none.
    repeats: Samples of each measurement, whose median is taken.
    """
    rng, device = np.random.default_rng(0), current_device()
    rows: list[dict[str, Any]] = []
    source = [rng.random((size, size), np.float32) - np.float32(LARGEST) for _ in range(2)]
    inside, spans_inside = InMemory(source), {precision: list[float]() for precision in precisions}
    for precision in precisions:
        inside.seconds(precision)  # loads kernels and allocates the workspace
    for kind in operands:
        with allocated(kind, size, source) as (a, b, c):
            for precision in precisions:
                options: dict[str, Any] = {"precision": precision}
                streamed_sgemm(a[:512], b[:, :512], **options)
                for limit in limits:
                    how: dict[str, Any] = {"memory_limit": int(limit * 1e9) or None, "precision": precision}
                    blocking, prediction = blocking_of(a, b, **how), expected_time(a, b, c, **how)
                    print(f"{kind}, {precision}, limit {limit:g} GB: {prediction}", flush=True)
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
                    row = {"precision": precision, "operands": kind, "memory_limit": how["memory_limit"]}
                    row["seconds"] = float(np.median([span for _, span in pairs]))
                    row["of_in_memory"] = float(np.median([own / span for own, span in pairs]))
                    row |= {"predicted_s": prediction.seconds, "bound_by": prediction.bound_by}
                    row |= {"blocks": blocking.count, "panels": len(blocking.depths)}
                    row |= {"device_bytes": blocking.device_bytes, "peak_bytes": watch.most}
                    rows.append(row | {"largest_difference": inside.largest_difference(c)})
                    yield table(size, spans_inside, rows)


def table(size: int, spans: Mapping[str, Sequence[float]], rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return the rows of the device calls and the others, by precision."""
    first: list[dict[str, Any]] = [
        {"precision": name, "operands": ON_DEVICE, "seconds": float(np.median(found)), "of_in_memory": 1.0}
        for name, found in spans.items()
        if found
    ]
    order = {name: place for place, name in enumerate(spans)}
    frame = pd.DataFrame([*first, *rows])
    frame = frame.sort_values("precision", kind="stable", key=lambda names: names.map(order))
    frame.insert(0, "size", size)
    frame.insert(4, "tflops", 2.0 * size**3 / frame["seconds"] / 1e12)
    return frame


def claims(frame: pd.DataFrame) -> dict[str, bool]:
    """Check the results and the memory of the streamed products."""
    rows = frame[frame["operands"] != ON_DEVICE]
    # Both results have errors, each within the bound.
    most = 2 * rows["size"].map(ieee_bound) * rows["size"] * LARGEST**2
    allowed = rows["memory_limit"].fillna(rows["device_bytes"])
    return {
        "streamed products are those on the device": bool((rows["largest_difference"] <= most).all()),
        "no product takes more memory than it may": bool((rows["peak_bytes"] <= allowed).all()),
    }


EXPERIMENT = Experiment(
    run=streamed,
    claims=claims,
    unavailable="the simulator has no times",
    cache="cold",
    timing=LAUNCHES,
)
