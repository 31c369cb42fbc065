"""Asynchronous copies to shared memory wait once for all elements, synchronous ones once for every few."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numba import cuda, float32, uint32, uint64

from numba_gemm.device.array_arguments import matrix_of
from numba_gemm.device.async_copy import commit_group, cp_async4, cp_async8, cp_async16, wait_group
from numba_gemm.device.texture import cycles
from numba_gemm.device.units import KIB, ceil_div
from numba_gemm.device.vector import load4, store4
from numba_gemm.lab.harness.experiment import number
from numba_gemm.lab.harness.pictures import curves, panels
from numba_gemm.lab.memory import machine
from numba_gemm.simulator.switch import device_function

THREADS = 128  # the smallest copy of the guide, of one element of 4 bytes per thread, has 512 bytes
LARGEST = 48 * KIB  # static shared memory of a block
# Loads that a thread waits for at once, by the bytes of an element, as compiled for compute capability 9.0: the loop is
# unrolled four times, but two of four 16-byte elements share registers.
TOGETHER = {4: 4, 8: 4, 16: 2}
SYNC, ASYNC = "synchronous", "asynchronous"

matrix = matrix_of(True, True)


@device_function
def copy_element(tile: Any, x: Any, row: Any, at: Any) -> None:
    """Copy one element through a register."""
    tile[0, at] = x[row, at]


@device_function
def copy_vector(tile: Any, x: Any, row: Any, at: Any) -> None:
    """Copy four floats through registers with one load and one store."""
    store4(tile, 0, at, load4(matrix(x), row, at))


def starting(start: Any) -> Any:
    """Return a device function that starts an asynchronous copy."""

    @device_function
    def start_copy(tile: Any, x: Any, row: Any, at: Any) -> None:
        start(tile, 0, at, True, matrix(x), row, at)

    return start_copy


@device_function
def no_wait() -> None:
    """Return at once, as after synchronous copies."""


@device_function
def wait() -> None:
    """Wait for all copies of this thread."""
    commit_group()
    wait_group(0)


def copier(way: str, copy: Any, finish: Any, dtype: Any, step: int) -> Any:
    """Return a kernel whose threads copy elements of `step` items of a type to shared memory."""
    size = dtype.bitwidth // 8
    items = LARGEST // size

    @machine.kernel(f"int64, {dtype}[:, ::1], {dtype}[:, ::1], uint64[:, ::1]", f"{way}_{step * size}")
    def copy_tile(copies: Any, x: Any, out: Any, took: Any) -> None:
        """Copy a block's row of x to shared memory, from there to `out`; record each thread's cycles of the former."""
        tile = cuda.shared.array((1, items), dtype, alignment=16)
        block, thread = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x)
        place = uint32(thread * step)
        end = uint32(place + uint32(copies) * uint32(THREADS * step))
        begin = cycles()
        at = place
        while at < end:
            copy(tile, x, block, at)
            at = uint32(at + uint32(THREADS * step))
        finish()
        took[block, thread] = cycles() - begin
        at = place
        while at < end:
            for i in range(step):
                out[block, at + uint32(i)] = tile[0, at + uint32(i)]
            at = uint32(at + uint32(THREADS * step))

    return copy_tile


KERNELS = {
    (SYNC, 4): copier(SYNC, copy_element, no_wait, float32, 1),
    (SYNC, 8): copier(SYNC, copy_element, no_wait, uint64, 1),
    (SYNC, 16): copier(SYNC, copy_vector, no_wait, float32, 4),
    (ASYNC, 4): copier(ASYNC, starting(cp_async4), wait, float32, 1),
    (ASYNC, 8): copier(ASYNC, starting(cp_async8), wait, float32, 2),
    (ASYNC, 16): copier(ASYNC, starting(cp_async16), wait, float32, 4),
}
"""Kernels by the way of copying, and the bytes of an element."""


def predicted_cycles(way: str, width: int, copies: int, one: float, bytes_per_cycle: float) -> float:
    """Predicted cycles of a thread's copies; `one` is the time of the first alone."""
    moving = one + THREADS * width * (copies - 1) / bytes_per_cycle
    return moving if way == ASYNC else max(one * ceil_div(copies, TOGETHER[width]), moving)


def async_copies(
    kib: Sequence[float] = (0.5, 1, 2, 4, 6, 8, 12, 16, 24, 32, 48), blocks: int = 0, rounds: int = machine.ROUNDS
) -> Iterator[dict[str, Any]]:
    """Copy parts of an array to shared memory, one block per multiprocessor, in each way.

    One row per ``way``, ``width_bytes`` of an element, and ``kib`` of a block: ``copies`` per thread, ``cycles`` of a
    thread on average (median of the rounds), and ``bytes_per_cycle`` of a block.

    Parameters
    ----------
    kib: Kilobytes that a block copies, up to 48; a width of which these are no whole copies is left out. One copy per
        thread is added, from which the others are predicted.
    blocks: Blocks; one per multiprocessor by default.
    """
    has = machine.properties()
    blocks = blocks or has.sm_count
    l2 = machine.ceilings()[0].l2 / (has.sm_count * has.clock_hz)
    values = np.arange(blocks * LARGEST // 4, dtype=np.float32).reshape(blocks, -1)  # exact
    took = cuda.device_array((blocks, THREADS), np.uint64)
    for (way, width), kernel in KERNELS.items():
        kind = np.uint64 if (way, width) == (SYNC, 8) else np.float32
        x, out = cuda.to_device(values.view(kind)), cuda.to_device(np.zeros_like(values).view(kind))
        counts = (KIB * size / (THREADS * width) for size in kib)
        one = 0.0
        for copies in sorted({1, *(int(count) for count in counts if count >= 1 and count % 1 == 0)}):
            call = machine.enqueue(kernel, blocks, THREADS, copies, x, out, took)
            means = []
            for _ in range(rounds + 1):  # the first brings the elements to the L2 cache
                call(0)
                means.append(took.copy_to_host().mean())
            size = copies * THREADS * width
            found = out.copy_to_host().view(np.float32)[:, : size // 4]
            np.testing.assert_array_equal(found, values[:, : size // 4], f"{way}, {width} bytes, {copies} copies")
            measured = float(np.median(means[1:]))
            one = one or measured
            predicted = predicted_cycles(way, width, copies, one, l2)
            yield (
                {"way": way, "width_bytes": width, "kib": size / KIB, "copies": copies, "cycles": measured}
                | {"bytes_per_cycle": size / measured, "predicted_cycles": predicted}
                | {"predicted_bytes_per_cycle": size / predicted}
            )


def claims(frame: pd.DataFrame) -> dict[str, Any]:
    cycles = frame.pivot(index=["width_bytes", "kib"], columns="way", values="cycles").reset_index()
    several = cycles[cycles["kib"] * KIB >= 8 * THREADS * cycles["width_bytes"]]
    most = frame[frame["kib"] == 48].pivot(index="width_bytes", columns="way", values="cycles")
    most = most.reindex(columns=[SYNC, ASYNC])
    return {
        "of eight elements per thread and more, asynchronous copies take less time": several[ASYNC] < several[SYNC],
        "of 48 KiB, they take less than two thirds of it": most[ASYNC] < 2 / 3 * most[SYNC],
        "of 48 KiB, elements of 4 bytes take longest, in either way": most.idxmax() == 4 if len(most) else [],
    }


PLOT = panels(
    *(
        curves(
            "kib", "bytes_per_cycle", "width_bytes", f"way == {way!r}", "{} bytes", title=way, xlabel="KiB per block"
        )
        for way in (SYNC, ASYNC)
    ),
    sharey=True,
)
SMALL = {"kib": (2, 4), "blocks": 2, "rounds": 1}
ALLOWED: dict[str, Any] = {"kib": number(float, most=LARGEST / KIB)}
EXPERIMENT = machine.experiment(async_copies, "9.2.3.4", claims, PLOT, SMALL, KERNELS.values(), allowed=ALLOWED)
