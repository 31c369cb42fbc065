"""A kernel can read host memory directly, coalesced and once nearly as fast as a copy, but again in every pass."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from cuda.bindings import driver
from numba import cuda, uint32

from numba_gemm.device.units import FLOAT32_BYTES, MIB, WARP
from numba_gemm.lab.harness.pictures import bars, curves, panels
from numba_gemm.lab.memory import machine, movement
from numba_gemm.lab.memory.strided_copy import sectors_a_warp
from numba_gemm.models import requests
from numba_gemm.runtime.driver import call
from numba_gemm.runtime.timing import call_ms

BLOCK = 256
LINE_BYTES = 128
WAYS = ("mapped", "copied", "kept")


@machine.kernel("float32[::1], float32[::1]")
def add(x: Any, out: Any) -> None:
    """Add an element to its sum; neighbouring threads read neighbouring elements."""
    i = cuda.grid(1)
    out[i] += x[i]


@machine.kernel("float32[::1], float32[::1], float32[::1]")
def add_and_keep(x: Any, kept: Any, out: Any) -> None:
    """Same as `add`; also store the element for later passes."""
    i = cuda.grid(1)
    value = x[i]
    out[i] += value
    kept[i] = value


@machine.kernel("float32[::1], float32[::1], int64, int64")
def add_strided(x: Any, out: Any, rows: Any, stride: Any) -> None:
    """Same as `add` with another element: x is a matrix with rows of `stride` elements, read column by column."""
    i = uint32(cuda.grid(1))
    row, col = uint32(i % uint32(rows)), uint32(i // uint32(rows))
    out[i] += x[row * uint32(stride) + col]


def crossing_bytes(way: str, passes: int, stride: int, size: int) -> int:
    """Bytes that cross the bus for an array of `size` bytes."""
    if way == "strided":
        return size // (WARP * FLOAT32_BYTES) * sectors_a_warp(stride) * requests.SECTOR_BYTES
    return size * (passes if way == "mapped" else 1)


def predicted_ms(way: str, passes: int, stride: int, size: int, bus: float, dram: float) -> float:
    """Predicted milliseconds of a way; `size` is in bytes, `bus` and `dram` in byte/s."""
    a_pass = 3 * size / dram  # reads the array and the sums, and writes the sums
    after = {"copied": passes, "kept": passes - 1}.get(way, 0)
    return 1e3 * (crossing_bytes(way, passes, stride, size) / bus + after * a_pass)


def zero_copy(
    elements: int = 1 << 25,
    passes: Sequence[int] = (1, 2, 4, 8),
    strides: Sequence[int] = (2, 4, 8, 32),
    rounds: int = 7,
) -> Iterator[dict[str, Any]]:
    """Add an array in host memory to sums in device memory, a number of times, in each way.

    It is read from mapped memory in every pass ("mapped"), after a copy ("copied"), from a copy that the first pass
    stores ("kept"), or from mapped memory once with lanes at a stride ("strided").

    One row per measurement: ``crossing_mib`` over the bus, ``gb_s`` of the array in all passes, ``integrated`` if
    device and host share memory. The first row, "copy", is the copy alone, from which the others are predicted.

    Parameters
    ----------
    elements: Floats of the array, a multiple of 256 and of every stride; several times the L2 cache.
    passes: Numbers of times that the array is added.
    strides: Floats between neighbouring lanes, in single passes.
    """
    with movement.Scope() as scope:
        (stream,), (host,), (x, out) = scope.streams(), scope.pinned(1, elements), scope.on_device(2, elements)
        host[:] = np.arange(elements) % 1000
        mapped, grid, copy = movement.mapped(host), elements // BLOCK, movement.copying(x, host)
        add_mapped, add_copied = (machine.enqueue(add, grid, BLOCK, source, out) for source in (mapped, x))
        add_kept = machine.enqueue(add_and_keep, grid, BLOCK, mapped, x, out)
        copy_ms = call_ms(copy, stream, rounds)
        yield row_of("copy", 1, 1, host.nbytes, copy_ms, copy_ms)
        cases = [(way, count, 1) for way in WAYS for count in passes] + [("strided", 1, stride) for stride in strides]
        for way, count, stride in cases:
            strided = machine.enqueue(add_strided, grid, BLOCK, mapped, out, elements // stride, stride)
            calls = {
                "mapped": [add_mapped] * count,
                "copied": [copy, *[add_copied] * count],
                "kept": [add_kept, *[add_copied] * (count - 1)],
                "strided": [strided],
            }
            enqueue = movement.in_sequence(calls[way])
            call(driver.cuMemsetD32Async, movement.address(out), 0, elements, stream)
            enqueue(stream)
            movement.finish(stream)
            machine.verify(out, count * host.reshape(-1, stride).T.ravel(), f"{way}, {count} passes, stride {stride}")
            yield row_of(way, count, stride, host.nbytes, call_ms(enqueue, stream, rounds), copy_ms)


def row_of(way: str, passes: int, stride: int, size: int, ms: float, copy_ms: float) -> dict[str, Any]:
    predicted = predicted_ms(way, passes, stride, size, 1e3 * size / copy_ms, machine.ceilings()[0].dram)
    return (
        {"way": way, "passes": passes, "stride": stride, "mib": size / MIB}
        | {"crossing_mib": crossing_bytes(way, passes, stride, size) / MIB, "ms": ms, "gb_s": passes * size / ms / 1e6}
        | {"integrated": bool(machine.attribute("INTEGRATED"))}
        | {"predicted_ms": predicted, "predicted_gb_s": passes * size / predicted / 1e6}
    )


def claims(frame: pd.DataFrame) -> dict[str, Any]:
    strided = frame[frame["way"] == "strided"]
    ms = frame.drop(index=strided.index).set_index(["passes", "way"])["ms"].unstack()
    most = max(frame["passes"])
    once, last, several, copy = ms.loc[1], ms.loc[most], ms[ms.index > 1], ms["copy"].loc[1]
    narrow = strided[strided["stride"] <= requests.SECTOR_BYTES // FLOAT32_BYTES]
    wide, lines = (strided[strided["stride"] >= span // FLOAT32_BYTES] for span in (requests.SECTOR_BYTES, LINE_BYTES))
    return {
        "read once, coalesced, mapped memory takes no more than a quarter longer than a copy and a kernel": (
            once["mapped"] < 1.25 * once["copied"]
        ),
        "no way takes less than the copy alone": frame["ms"] > 0.97 * copy,
        "every further pass over mapped memory takes nearly a transfer again": (
            last["mapped"] - once["mapped"] > 0.8 * (most - 1) * copy
        ),
        "from two passes on, a cache by hand is faster": several["kept"] < several["mapped"],
        "a cache by hand takes no more than a quarter longer than a copy beforehand": ms["kept"] < 1.25 * ms["copied"],
        "strides of a sector and more take at least four times as long as none": wide["ms"] > 4 * once["mapped"],
        "up to a stride of a sector, strides cost what their sectors do, to a fifth": (
            narrow["ms"] < 1.2 * narrow["predicted_ms"]
        ),
        "strides of a line and more cost half as much again, or more": lines["ms"] > 1.5 * lines["predicted_ms"],
        "strides cost at least what their sectors do": strided["ms"] > 0.95 * strided["predicted_ms"],
    }


PLOT = panels(
    curves("passes", "ms", "way", rows="way != 'strided'", xlabel="passes over the array", title="coalesced"),
    bars("ms", ["stride"], rows="way in ['mapped', 'strided'] and passes == 1", title="mapped, one pass, by stride"),
)
SMALL = {"elements": 1 << 16, "passes": (1, 2), "strides": (8,), "rounds": 1}
KERNELS = (add, add_and_keep, add_strided)
EXPERIMENT = machine.gpu_experiment(zero_copy, "9.1.3", claims, PLOT, SMALL, KERNELS, allowed={"elements": BLOCK})
