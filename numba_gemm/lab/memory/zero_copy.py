"""A kernel can read host memory directly, coalesced and once nearly as fast as a copy, but again in every pass.

Page-locked host memory is mapped: it has a device pointer, and a kernel's loads from it cross the bus in sectors of 32
bytes, while other warps compute. Nothing of it stays on the device for the next kernel. Each way adds an array to sums
in device memory a number of times:

- "mapped": every pass reads the mapped array;
- "copied": a copy engine first copies the array to the device, and the passes read the copy;
- "kept": the first pass reads the mapped array and also stores it in device memory, where the other passes read it: a
  manual cache;
- "strided": a single pass over the mapped array, in which the lanes of a warp read floats at a stride; every float is
  still read once.

The time is predicted from bytes. Bytes that cross the bus take as long as in a plain copy of the page-locked array, the
row "copy", which is the baseline: one transfer for "copied" and "kept", and one per pass for "mapped". For "strided" it
is one sector for each that a warp touches, since the other floats of a sector are read so much later that no cache
still holds it: up to eight times the array. The traffic of the passes in device memory is added at its measured
ceiling, except where it overlaps with the slower bus.

On an H200 a copy engine moves about 55 GB/s, and passes over mapped memory about 50: a pass takes more than a tenth
longer than the copy alone, and 5 to 8 % longer than copying first and computing then. So mapping gains nothing here
even if all data are read only once, and eight passes take about six times as long as on a copy. A manual cache takes
about 4 to 5 % longer than a copy beforehand; its first pass, which also writes, takes no longer than that of "mapped".
Passes in device memory take about 0.12 ms on average instead of the predicted 0.087: one float per thread does not
reach the ceiling.

Strides of 2, 4 and 8 take that many transfers, as predicted, and about 9 % more time, like all mapped reads. With them
a warp requests all four sectors of each line of 128 bytes that it touches. A stride of 32 requests as many sectors as
one of 8, but only one per line, and takes about 51 ms where 19.5 are predicted: 21 GB/s of sectors cross the bus. It is
as if each line took one request, and the number of requests were the limit; that is not measured.

On a device that shares memory with the host (`integrated`), nothing crosses a bus; an H200 is not one.

Source: CUDA C++ Best Practices Guide, "Zero Copy" and "Coalesced Access to Global Memory".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from cuda.bindings import driver
from numba import cuda, uint32

from numba_gemm.device.units import FLOAT32_BYTES, WARP
from numba_gemm.lab.harness.experiment import Experiment, Unavailable
from numba_gemm.lab.memory import machine, movement
from numba_gemm.lab.memory.drawing import bars, curve
from numba_gemm.models import requests
from numba_gemm.runtime import pinned_memory
from numba_gemm.runtime.driver import call

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["add", "add_and_keep", "add_strided", "device_view", "predicted_ms", "sectors_a_warp", "zero_copy"]

BLOCK = 256
LINE_BYTES = 128
MIB = 1 << 20
WAYS = ("mapped", "copied", "kept")


@cuda.jit
def add(x: Any, out: Any) -> None:
    """Add an element to its sum; neighbouring threads read neighbouring elements."""
    i = cuda.grid(1)
    out[i] += x[i]


@cuda.jit
def add_and_keep(x: Any, kept: Any, out: Any) -> None:
    """Same as `add`; also store the element for later passes."""
    i = cuda.grid(1)
    value = x[i]
    out[i] += value
    kept[i] = value


@cuda.jit
def add_strided(x: Any, out: Any, rows: Any, stride: Any) -> None:
    """Same as `add` with another element: x is a matrix with rows of `stride` elements, read column by column."""
    i = uint32(cuda.grid(1))
    row, col = uint32(i % uint32(rows)), uint32(i // uint32(rows))
    out[i] += x[row * uint32(stride) + col]


def sectors_a_warp(stride: int) -> int:
    """Sectors that a warp touches if its lanes read floats this stride apart."""
    return requests.sectors(((lane, FLOAT32_BYTES * stride * lane) for lane in range(WARP)), FLOAT32_BYTES)


def crossing_bytes(way: str, passes: int, stride: int, size: int) -> int:
    """Bytes that cross the bus for an array of `size` bytes."""
    if way == "strided":
        return size // (WARP * FLOAT32_BYTES) * sectors_a_warp(stride) * requests.SECTOR_BYTES
    return size * (passes if way == "mapped" else 1)


def predicted_ms(way: str, passes: int, stride: int, size: int, bus: float, dram: float) -> float:
    """Predicted milliseconds of a way; `size` is in bytes, `bus` and `dram` in byte/s."""
    crossing = crossing_bytes(way, passes, stride, size) / bus
    a_pass = 3 * size / dram  # reads the array and the sums, and writes the sums
    after = {"copied": passes, "kept": passes - 1}.get(way, 0)
    return 1e3 * (crossing + after * a_pass)


def device_view(array: np.ndarray) -> Any:
    """View a mapped array of one dimension at its device pointer, as a kernel argument."""
    pointer = int(call(driver.cuMemHostGetDevicePointer, array.ctypes.data, 0))
    described = {"shape": array.shape, "typestr": array.dtype.str, "data": (pointer, False), "version": 3}
    return cuda.as_cuda_array(type("Mapped", (), {"__cuda_array_interface__": described})(), sync=False)


def zero_copy(
    elements: int = 1 << 25,
    passes: Sequence[int] = (1, 2, 4, 8),
    strides: Sequence[int] = (2, 4, 8, 32),
    rounds: int = 7,
) -> pd.DataFrame:
    """Add an array in host memory to sums in device memory, in each way.

    Parameters
    ----------
    elements : int
        Floats of the array, a multiple of `BLOCK` and of every stride. Several times the L2 cache, so that it keeps
        nothing from one pass to the next.
    passes : sequence of int
        Numbers of times that the array is added.
    strides : sequence of int
        Floats between neighbouring lanes, in single passes.
    rounds : int
        Samples of each measurement.

    Returns
    -------
    DataFrame
        One row per measurement: ``way`` (see the module), ``passes``, ``stride``, ``mib`` of the array,
        ``crossing_mib`` over the bus, ``ms`` (median), ``gb_s`` (bytes of the array in all passes), ``integrated``,
        ``predicted_ms`` and ``predicted_gb_s``. The first row, with ``way`` "copy", is the copy alone, from which the
        others are predicted.

    Raises
    ------
    Unavailable
        if the device cannot map host memory.
    AssertionError
        if a sum is wrong.
    """
    with ExitStack() as scopes:
        scopes.enter_context(machine.in_context())
        if not machine.attribute("CAN_MAP_HOST_MEMORY"):
            raise Unavailable("this device cannot map host memory")
        (stream,) = scopes.enter_context(machine.streams())
        host = scopes.enter_context(pinned_memory.pinned(elements))
        host[:] = np.arange(elements) % 1000
        mapped = device_view(host)
        x, out = (scopes.enter_context(movement.device_array(elements)) for _ in range(2))
        grid = elements // BLOCK
        add_mapped, add_copied = (machine.enqueue(add, grid, BLOCK, source, out) for source in (mapped, x))
        add_kept = machine.enqueue(add_and_keep, grid, BLOCK, mapped, x, out)

        def copied() -> None:
            movement.copy(x, host, host.nbytes, stream)

        def work(way: str, count: int, stride: int) -> Callable[[], None]:
            """Return the function that enqueues a way."""
            if way == "strided":
                strided = machine.enqueue(add_strided, grid, BLOCK, mapped, out, elements // stride, stride)
                return lambda: strided(stream)
            first = {"mapped": lambda: add_mapped(stream), "copied": copied, "kept": lambda: add_kept(stream)}[way]
            further = add_mapped if way == "mapped" else add_copied
            return lambda: enqueue_all(first, further, count - (way != "copied"))

        def enqueue_all(first: Callable[[], None], further: Callable[[int], None], count: int) -> None:
            first()
            for _ in range(count):
                further(stream)

        cases = [(way, count, 1) for way in WAYS for count in passes] + [("strided", 1, stride) for stride in strides]
        copy_ms = movement.median_ms([stream], copied, rounds)
        rows = [row_of("copy", 1, 1, host.nbytes, copy_ms, copy_ms)]
        for way, count, stride in cases:
            enqueued = work(way, count, stride)
            call(driver.cuMemsetD32Async, movement.address(out), 0, elements, stream)
            enqueued()
            call(driver.cuStreamSynchronize, stream)
            expected = count * host.reshape(-1, stride).T.ravel()
            right = np.array_equal(out.copy_to_host(), expected)
            assert right, f"a sum is wrong: {way}, {count} passes, stride {stride}"
            rows.append(
                row_of(way, count, stride, host.nbytes, movement.median_ms([stream], enqueued, rounds), copy_ms)
            )
    return pd.DataFrame(rows)


def row_of(way: str, passes: int, stride: int, size: int, ms: float, copy_ms: float) -> dict[str, Any]:
    """Return one row of the result."""
    predicted = copy_ms
    if way != "copy":
        predicted = predicted_ms(way, passes, stride, size, 1e3 * size / copy_ms, machine.ceilings()[0].dram)
    return {
        "way": way,
        "passes": passes,
        "stride": stride,
        "mib": size / MIB,
        "crossing_mib": crossing_bytes(way, passes, stride, size) / MIB,
        "ms": ms,
        "gb_s": passes * size / ms / 1e6,
        "integrated": bool(machine.attribute("INTEGRATED")),
        "predicted_ms": predicted,
        "predicted_gb_s": passes * size / predicted / 1e6,
    }


def plot(frame: pd.DataFrame, figure: Figure) -> None:
    """Plot milliseconds against the number of passes, and of a single pass against the stride."""
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    for index, way in enumerate(WAYS):
        found = frame[frame["way"] == way].sort_values("passes")
        curve(left, found["passes"], found["ms"], found["predicted_ms"], way, index)
    left.axhline(frame[frame["way"] == "copy"]["ms"].iloc[0], color="0.5", linestyle=":", label="the copy alone")
    left.set(
        xlabel="passes over the array", ylabel="ms", ylim=(0, None), title=f"{frame['mib'].iloc[0]:.4g} MiB, coalesced"
    )
    left.legend()
    single = frame[frame["way"].isin(["mapped", "strided"]) & (frame["passes"] == 1)].sort_values("stride")
    bars(right, [f"{stride}" for stride in single["stride"]], single["ms"], single["predicted_ms"])
    right.set(xlabel="ms", ylabel="stride in floats", title="mapped, one pass")


def claims(frame: pd.DataFrame) -> dict[str, bool]:
    """Check the statements of the module's docstring against a result."""
    ms = dict(zip(zip(frame["way"], frame["passes"]), frame["ms"]))
    most = max(frame["passes"])
    strided = frame[frame["way"] == "strided"]
    narrow = strided[strided["stride"] <= requests.SECTOR_BYTES // FLOAT32_BYTES]
    wide, lines = (strided[strided["stride"] >= span // FLOAT32_BYTES] for span in (requests.SECTOR_BYTES, LINE_BYTES))
    return {
        "read once, coalesced, mapped memory takes no more than a quarter longer than a copy and a kernel": bool(
            ms["mapped", 1] < 1.25 * ms["copied", 1]
        ),
        "no way takes less than the copy alone": bool((frame["ms"] > 0.97 * ms["copy", 1]).all()),
        "every further pass over mapped memory takes nearly a transfer again": bool(
            ms["mapped", most] - ms["mapped", 1] > 0.8 * (most - 1) * ms["copy", 1]
        ),
        "from two passes on, a cache by hand is faster": bool(
            all(ms["kept", passes] < ms[way, passes] for way, passes in ms if way == "mapped" and passes > 1)
        ),
        "a cache by hand takes no more than a quarter longer than a copy beforehand": bool(
            all(ms["kept", passes] < 1.25 * ms[way, passes] for way, passes in ms if way == "copied")
        ),
        "strides of a sector and more take at least four times as long as none": bool(
            (wide["ms"] > 4 * ms["mapped", 1]).all()
        ),
        "up to a stride of a sector, strides cost what their sectors do, to a fifth": bool(
            (narrow["ms"] < 1.2 * narrow["predicted_ms"]).all()
        ),
        "strides of a line and more cost half as much again, or more": bool(
            (lines["ms"] > 1.5 * lines["predicted_ms"]).all()
        ),
        "strides cost at least what their sectors do": bool((strided["ms"] > 0.95 * strided["predicted_ms"]).all()),
    }


EXPERIMENT = Experiment(
    name="zero_copy",
    section="9.1.3",
    run=zero_copy,
    plot=plot,
    claims=claims,
    facts=machine.facts,
    small={"elements": 1 << 16, "passes": (1, 2), "strides": (8,), "rounds": 1},
    unavailable="the simulator has no host memory apart from the device's",
    kernels={
        "add": (add, "float32[::1], float32[::1]"),
        "add_and_keep": (add_and_keep, "float32[::1], float32[::1], float32[::1]"),
        "add_strided": (add_strided, "float32[::1], float32[::1], int64, int64"),
    },
)
