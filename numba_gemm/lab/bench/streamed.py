"""Streamed calls compared with calls on operands in device memory.

Operands of `streamed_sgemm` lie in page-locked memory, in pageable memory and in memory-mapped files; device memory is
limited, or not. Times stand beside the predictions of `numba_gemm.streaming.expected_time` from separately timed
copies. Results are compared element by element with those of `tiled_sgemm` on the device; wrong ones are not timed.

On several GPUs, each product is computed by one, two, four and so on, and by all. `link_share` is the rate of copies to
one of them while all copy, relative to the first one's while it copies alone.
"""

import functools
import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from cuda.bindings import driver

from numba_gemm.api import tiled_sgemm
from numba_gemm.lab.harness.environment import LAUNCHES
from numba_gemm.lab.harness.experiment import Experiment
from numba_gemm.lab.harness.nvml import repeating
from numba_gemm.models.accuracy import CONFIDENCE, bound
from numba_gemm.runtime.driver import device_scope
from numba_gemm.runtime.pinned_memory import pinned
from numba_gemm.runtime.timing import elapsed, no_wait
from numba_gemm.streaming import blocking_of, expected_time, streamed_sgemm

ON_DEVICE = "on the device"
ROWS = 128  # rows that are compared, or drawn, at once
LARGEST = 0.5  # elements of A and B lie within [-LARGEST, LARGEST)
Kind = Literal["page-locked", "pageable", "memory map"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PRECISIONS = ("ieee", "bf16x6")


def taken(device: int) -> int:
    """Bytes of device memory in use by all processes."""
    with device_scope(device):
        _, free, total = driver.cuMemGetInfo()
    return int(total) - int(free)


@contextmanager
def watched(device: int, interval_s: float = 0.002) -> Iterator[list[int]]:
    """Yield a list of one number: the peak of device memory in use meanwhile, minus the memory in use before."""
    before, most = taken(device), [0]

    def look() -> None:
        most[0] = max(most[0], taken(device) - before)

    with repeating(look, interval_s):
        yield most


@contextmanager
def allocated(kind: str, source: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Allocate A, B and an empty C in a kind of memory, and copy the values of A and B from a source."""
    (m, k), n = source[0].shape, source[1].shape[1]
    shapes = (m, k), (k, n), (m, n)
    with ExitStack() as scopes:
        if kind == "page-locked":
            made = [scopes.enter_context(pinned(rows * cols)).reshape(rows, cols) for rows, cols in shapes]
        elif kind == "memory map":
            folder = Path(scopes.enter_context(tempfile.TemporaryDirectory()))
            made = [np.memmap(folder / name, np.float32, "w+", shape=shape) for name, shape in zip("abc", shapes)]
        else:
            made = [np.empty(shape, np.float32) for shape in shapes]
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
        return elapsed(functools.partial(tiled_sgemm, self._a, self._b, out=self._c, precision=precision))

    def largest_difference(self, other: np.ndarray) -> float:
        """Largest difference of a result from that of the last call; NaN if a result contains NaN."""
        most = 0.0
        for begin in range(0, len(other), ROWS):  # all of C at once would take as much memory again
            mine = self._c[begin : begin + ROWS].copy_to_host()
            mine -= other[begin : begin + ROWS]
            # `np.maximum` keeps a NaN of either.
            most = float(np.maximum(most, np.abs(mine, out=mine).max(initial=0.0)))
        return most


def uniform(rows: int, cols: int, seed: int) -> np.ndarray:
    """Draw a matrix, in parallel threads."""
    made = np.empty((rows, cols), np.float32)

    def draw(begin: int) -> None:
        part = made[begin : begin + ROWS]
        np.random.default_rng((seed, begin)).random(out=part, dtype=np.float32)
        part -= np.float32(LARGEST)

    with ThreadPoolExecutor() as pool:
        list(pool.map(draw, range(0, rows, ROWS)))
    return made


def streamed(
    size: int = 32768,
    rows: int = 0,
    precisions: Sequence[str] = PRECISIONS,
    operands: Sequence[Kind] = KINDS,
    limits: Sequence[float] = (0, 4),
    devices: Sequence[int] = (0,),
    repeats: int = 3,
) -> Iterator[pd.DataFrame]:
    """Time streamed products, each in turn with the device call, so that the device is equally warm for both.

    Parameters
    ----------
    size: N and K, and M unless it is given.
    rows: M; 0 for the same as N and K.
    operands: Kinds of memory of the operands: page-locked, pageable, memory map.
    limits: Limits of the memory of each device in GB; 0 for none.
    devices: Ordinals of GPUs, of which the first one, two, four and so on compute, and all.
    repeats: Samples of each measurement, whose median is taken.
    """
    from numba import cuda

    shapes = ((rows or size, size), (size, size))
    found: list[dict[str, Any]] = []
    source = [uniform(*shape, seed) for seed, shape in enumerate(shapes)]
    with cuda.gpus[devices[0]]:
        inside, spans_inside = InMemory(source), {precision: list[float]() for precision in precisions}
        for precision in precisions:
            inside.seconds(precision)  # loads kernels and allocates the workspace
        for kind in operands:
            with allocated(kind, source) as matrices:
                for precision in precisions:
                    warm_up = matrices[0][:512], matrices[1][:, :512]
                    streamed_sgemm(*warm_up, precision=precision, devices=devices)  # type: ignore[arg-type]
                    for limit in limits:
                        one_rate = one_time = math.nan
                        for count in sorted({len(devices), *(1 << i for i in range(len(devices).bit_length()))}):
                            how: dict[str, Any] = {"memory_limit": int(limit * 1e9) or None, "precision": precision}
                            how["devices"] = devices[:count]
                            own, row = timed(matrices, inside, how, repeats, f"{kind}, limit {limit:g} GB")
                            spans_inside[precision] += own
                            if count == 1:
                                one_rate, one_time = row["link_gb_s"], row["seconds"]
                            row |= {"link_share": row["link_gb_s"] / one_rate, "speedup": one_time / row["seconds"]}
                            found.append({"operands": kind} | row)
                            yield table(shapes[0], spans_inside, found)


def timed(
    matrices: Sequence[np.ndarray], inside: InMemory, how: Mapping[str, Any], repeats: int, name: str
) -> tuple[list[float], dict[str, Any]]:
    """Return the times of the device calls, and the row of the streamed product."""
    a, b, c = matrices
    blocking, prediction = blocking_of(a, b, **how), expected_time(a, b, c, **how)
    print(f"{name}, {how['precision']}: {prediction}", flush=True)
    if len(how["devices"]) > 1:
        streamed_sgemm(a, b, c, **how)  # loads kernels on the other devices
    c.fill(np.nan)
    with ExitStack() as watching:
        peaks = [watching.enter_context(watched(device)) for device in how["devices"]]
        streamed_sgemm(a, b, c, **how)
    inside.seconds(how["precision"])  # the last call may have been of another precision
    difference, own, spans = inside.largest_difference(c), list[float](), list[float]()
    for _ in range(repeats if difference <= most_difference(how["precision"], a.shape[1]) else 0):
        own.append(inside.seconds(how["precision"]))
        spans.append(elapsed(functools.partial(streamed_sgemm, a, b, c, **how), no_wait))
    return own, {
        "precision": how["precision"],
        "memory_limit": how["memory_limit"],
        "devices": len(how["devices"]),
        "seconds": statistics.median(spans or [math.nan]),
        "of_in_memory": statistics.median([one / other for one, other in zip(own, spans)] or [math.nan]),
        "predicted_s": prediction.seconds,
        "bound_by": prediction.bound_by,
        "blocks": blocking.count,
        "panels": len(blocking.depths),
        "device_bytes": blocking.device_bytes,
        "peak_bytes": max(most for (most,) in peaks),
        "link_gb_s": prediction.to_device_rate / 1e9,
        "largest_difference": difference,
    }


def most_difference(precision: str, k: int) -> float:
    """Return the largest difference of two correct results of a precision; each has errors within its bound.

    Bounds are relative to ``|A| @ |B|``. Operands here have random signs, so sums and their errors grow with the square
    root of K only. A product of two elements has a standard deviation of ``LARGEST**2 / 3``; the bounds are applied to
    `CONFIDENCE` times the standard deviation of a sum.
    """
    return 2 * bound(precision, k) * CONFIDENCE * math.sqrt(k) * LARGEST**2 / 3


def table(shape: tuple[int, int], spans: Mapping[str, Sequence[float]], rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return the rows of the device calls and the others, by precision, for an A of a shape and a square B."""
    first: list[dict[str, Any]] = [
        {"precision": name, "operands": ON_DEVICE, "seconds": float(np.median(found)), "of_in_memory": 1.0}
        for name, found in spans.items()
        if found
    ]
    order = {name: place for place, name in enumerate(spans)}
    frame = pd.DataFrame([*first, *rows])
    frame = frame.sort_values("precision", kind="stable", key=lambda names: names.map(order))
    frame.insert(0, "size", shape[1])
    frame.insert(4, "tflops", 2.0 * shape[0] * shape[1] ** 2 / frame["seconds"] / 1e12)
    if shape[0] != shape[1]:
        frame.insert(0, "rows", shape[0])
    return frame


def claims(frame: pd.DataFrame) -> dict[str, bool]:
    """Check the results and the memory of the streamed products."""
    rows = frame[frame["operands"] != ON_DEVICE]
    most = [most_difference(precision, k) for precision, k in zip(rows["precision"], rows["size"])]
    allowed = rows["memory_limit"].fillna(rows["device_bytes"])
    return {
        "streamed products are those on the device": bool((rows["largest_difference"] <= most).all()),
        "no product takes more memory than it may": bool((rows["peak_bytes"] <= allowed).all()),
    }


EXPERIMENT = Experiment(
    streamed,
    claims=claims,
    unavailable="the simulator has no times",
    cache="cold",
    operands=f"uniform in [-{LARGEST}, {LARGEST})",
    timing=LAUNCHES,
)
