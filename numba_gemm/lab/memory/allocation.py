"""Memory of a pool that keeps what is freed costs microseconds at any size; other memory is mapped every time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from cuda.bindings import driver

from numba_gemm.device.texture import nanoseconds
from numba_gemm.device.units import KIB, MIB
from numba_gemm.lab.harness.experiment import Unavailable
from numba_gemm.lab.harness.pictures import curves, panels
from numba_gemm.lab.memory import machine, movement
from numba_gemm.runtime.device import current_device
from numba_gemm.runtime.driver import call
from numba_gemm.runtime.timing import elapsed, no_wait

WORD = 4  # bytes
DIRECT, TRIMMED, KEPT = "cuMemAlloc", "pool, trimmed", "pool, kept"
THRESHOLDS = {TRIMMED: 0, KEPT: (1 << 64) - 1}  # bytes that a pool keeps at a synchronisation
SIZES = (100, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB)
PATTERN = 0x12345678
HELD = 3  # allocations at a time, whose addresses tell the alignment


@machine.kernel("int64, uint64[::1]")
def spin(duration: Any, out: Any) -> None:
    """Run for so many nanoseconds."""
    begin = nanoseconds()
    while nanoseconds() - begin < duration:
        pass
    out[0] = nanoseconds() - begin


@contextmanager
def allocator(way: str, stream: int) -> Iterator[tuple[Callable[[int], Any], Callable[[Any], Any]]]:
    """Yield the functions that allocate bytes and that free an address."""
    if way == DIRECT:
        yield partial(call, driver.cuMemAlloc), partial(call, driver.cuMemFree)
        return
    described = driver.CUmemPoolProps()
    described.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    described.handleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
    described.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    described.location.id = current_device()
    pool = call(driver.cuMemPoolCreate, described)
    try:
        threshold = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        call(driver.cuMemPoolSetAttribute, pool, threshold, driver.cuuint64_t(THRESHOLDS[way]))
        yield (
            lambda size: call(driver.cuMemAllocFromPoolAsync, size, pool, stream),
            lambda address: call(driver.cuMemFreeAsync, address, stream),
        )
    finally:
        movement.finish(stream)
        call(driver.cuMemPoolDestroy, pool)


def alignment(size: int, allocate: Any, free: Any, stream: int) -> int:
    """Largest power of two that divides the addresses of several allocations; raises AssertionError if they overlap."""
    places = [allocate(size) for _ in range(HELD)]
    words = size // WORD
    for number, place in enumerate(places):
        call(driver.cuMemsetD32Async, place, PATTERN + number, words, stream)
    found = np.zeros((HELD, 2), np.uint32)  # first and last word
    for row, place in zip(found, places, strict=True):
        movement.copy(row[:1], int(place), WORD, stream)
        movement.copy(row[1:], int(place) + WORD * (words - 1), WORD, stream)
    movement.finish(stream)
    for place in places:
        free(place)
    movement.finish(stream)
    np.testing.assert_array_equal(found, PATTERN + np.arange(HELD)[:, None] + np.zeros(2, int), f"{size} bytes")
    return min(int(place) & -int(place) for place in places)


def steps_us(size: int, allocate: Any, free: Any, stream: int, busy: Callable[[], object] | None) -> list[float]:
    """Microseconds of the host for allocating, using, freeing, and synchronising; `busy` is enqueued before freeing."""
    places = list[Any]()

    def use() -> None:
        call(driver.cuMemsetD32Async, places[0], PATTERN, size // WORD, stream)
        movement.finish(stream)
        if busy:
            busy()

    steps = (lambda: places.append(allocate(size)), use, lambda: free(places[0]), lambda: movement.finish(stream))
    return [1e6 * elapsed(step, no_wait) for step in steps]


def allocation(sizes: Sequence[int] = SIZES, busy_us: int = 2000, rounds: int = 11) -> Iterator[pd.DataFrame]:
    """Allocate and free memory of each size: directly, and in stream order from a trimmed pool and from a kept one.

    One row per way and size, with medians of the host's time: ``allocate_us``, ``free_us``, ``synchronize_us`` after
    freeing, their sum ``us``, and ``free_busy_us``, freeing while a kernel of ``busy_us`` runs; ``aligned_to``, the
    largest power of two that divides the addresses.

    Parameters
    ----------
    sizes: Bytes, at least 4.
    busy_us: Microseconds of the kernel that runs while memory is freed.
    """
    rows: list[dict[str, Any]] = []
    with movement.Scope() as scope:
        (stream,), (out,) = scope.streams(), scope.on_device(1, 1, np.uint64)
        if not machine.attribute("MEMORY_POOLS_SUPPORTED"):
            raise Unavailable("this device has no memory pools")
        spinning = machine.enqueue(spin, 1, 1, 1000 * busy_us, out)
        spinning(stream)  # compiles the kernel
        for way in (DIRECT, TRIMMED, KEPT):
            with allocator(way, stream) as (allocate, free):
                for size in sizes:
                    aligned = alignment(size, allocate, free, stream)
                    step = partial(steps_us, size, allocate, free, stream)
                    idle = np.median([step(None) for _ in range(rounds)], axis=0)
                    busy = np.median([step(lambda: spinning(stream)) for _ in range(rounds)], axis=0)
                    rows.append(
                        {"way": way, "bytes": size, "allocate_us": idle[0], "free_us": idle[2]}
                        | {"synchronize_us": idle[3], "us": idle[0] + idle[2] + idle[3]}
                        | {"free_busy_us": busy[2], "busy_us": busy_us, "aligned_to": aligned}
                    )
                    yield predicted(pd.DataFrame(rows))


def predicted(frame: pd.DataFrame) -> pd.DataFrame:
    """Add the predicted times."""
    found = frame.groupby("way")
    smallest, largest = (frame["way"].map(found["us"].agg(edge)) for edge in ("first", "last"))
    per_byte = ((largest - smallest) / frame["way"].map(found["bytes"].max())).where(frame["way"] != KEPT, 0)
    return frame.assign(predicted_us=smallest + per_byte * frame["bytes"])


def claims(frame: pd.DataFrame) -> dict[str, Any]:
    large = frame[frame["bytes"] >= 16 * MIB].pivot(index="bytes", columns="way", values="us")
    large = large.reindex(columns=[DIRECT, TRIMMED, KEPT])
    kept, busy_us = frame[frame["way"] == KEPT], frame["busy_us"].max()
    busy = frame.groupby("way")["free_busy_us"]
    return {
        "all memory begins at a multiple of 256 bytes": frame["aligned_to"] >= 256,
        "from 16 MiB on, a pool that keeps memory is at least five times as fast as cuMemAlloc and cuMemFree": (
            large[DIRECT] > 5 * large[KEPT]
        ),
        "its time does not depend on the size: none is twice the median": kept["us"] < 2 * kept["us"].median(),
        "from 16 MiB on, a pool that is trimmed takes at least five times as long": large[TRIMMED] > 5 * large[KEPT],
        "cuMemFree waits for a kernel that runs": busy.min()[DIRECT] > 0.8 * busy_us,
        "freeing in stream order takes less than a tenth of that": busy.max()[[TRIMMED, KEPT]] < busy_us / 10,
    }


PLOT = panels(
    curves("bytes", "us", "way", log="xy", title="allocate, free and synchronise"),
    curves("bytes", "free_busy_us", "way", log="xy", title="free while a kernel runs", lines={"y": "busy_us"}),
)
SMALL = {"sizes": (100, MIB), "busy_us": 200, "rounds": 1}
EXPERIMENT = machine.gpu_experiment(allocation, "9.3", claims, PLOT, SMALL, [spin])
