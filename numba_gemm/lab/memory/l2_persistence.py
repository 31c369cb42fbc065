"""A window keeps a region in the L2 cache during streaming, if no more of it is marked than was set aside."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from cuda.bindings import driver
from numba import cuda, uint32

from numba_gemm.device.units import MIB
from numba_gemm.lab.harness.command import UsageError
from numba_gemm.lab.harness.experiment import Unavailable
from numba_gemm.lab.harness.pictures import curves, panels
from numba_gemm.lab.memory import machine, movement
from numba_gemm.runtime.device import synchronize
from numba_gemm.runtime.driver import call
from numba_gemm.runtime.timing import Call, span_ms

ITEM, BLOCK = 4, 512
BASELINE = MIB  # bytes of a region that stays in the L2 cache in any case
PARTITIONS = 2  # in the L2 caches of compute capability 8.0 and 9.0
CHECK_LAUNCHES = 3
WAYS = ("stream", "graph")
WINDOWS = ("none", "whole", "guide", "spread")
POLICY = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW


@machine.kernel("int32[::1], int32[::1], int64, int64")
def double_both(persistent: Any, streaming: Any, region: Any, size: Any) -> None:
    """Double one element of the region and one of the stream per thread; both sizes are in elements."""
    tid = uint32(cuda.grid(1))
    often, once = uint32(tid % uint32(region)), uint32(tid % uint32(size))
    persistent[often] = 2 * persistent[often]
    streaming[once] = 2 * streaming[once]


@dataclass(frozen=True)
class Window:
    """An access policy window at the start of a region: its bytes, and the fraction of them to mark as persisting."""

    size: int
    hit_ratio: float


def window_of(kind: str, region: int, set_aside: int, largest: int) -> tuple[Window, bool]:
    """Return one of `WINDOWS` for a region in bytes, and True if the device's limit made it smaller."""
    tuned = 2 * set_aside // 3
    ratio = min(1.0, tuned / region)
    sizes = {"none": 0, "whole": region, "guide": min(tuned, region), "spread": region}
    ratios = {"none": 0.0, "whole": 1.0, "guide": ratio, "spread": ratio}
    return Window(min(sizes[kind], largest), ratios[kind]), sizes[kind] > largest


def staying(window: Window, region: int, set_aside: int, l2: int) -> float:
    """Fraction of a region that stays in an L2 cache of two partitions until its next use; sizes are in bytes."""
    marked, outside = round(window.size * window.hit_ratio), region - window.size
    kept = marked if marked <= set_aside else 0
    left = (l2 - min(marked, set_aside)) // PARTITIONS
    if outside + region <= left:  # the part outside of the window, and the stream that passes meanwhile
        kept += outside
    return kept / region


def region_bytes(stream: int, stays: float) -> float:
    """Bytes of the region that a launch moves from and to device memory, for the bytes of a stream.

    There is one thread per element of the stream; each reads and writes one element of either array.
    """
    return 2 * stream * (1 - stays)


def policy(address: int, window: Window) -> Any:
    """Return the access policy for a window at an address; a window of size 0 means no policy."""
    made = driver.CUaccessPolicyWindow()
    made.base_ptr, made.num_bytes, made.hitRatio = address, window.size, window.hit_ratio
    access = driver.CUaccessProperty
    made.hitProp = access.CU_ACCESS_PROPERTY_PERSISTING if window.size else access.CU_ACCESS_PROPERTY_NORMAL
    made.missProp = access.CU_ACCESS_PROPERTY_STREAMING if window.size else access.CU_ACCESS_PROPERTY_NORMAL
    return made


@contextlib.contextmanager
def persisting_share(size: int) -> Iterator[int]:
    """Set aside part of the L2 cache and yield the size granted by the driver; reset everything at the end."""
    limit = driver.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE
    before = call(driver.cuCtxGetLimit, limit)
    call(driver.cuCtxSetLimit, limit, size)
    try:
        yield int(call(driver.cuCtxGetLimit, limit))
    finally:
        call(driver.cuCtxSynchronize)
        call(driver.cuCtxResetPersistingL2Cache)
        call(driver.cuCtxSetLimit, limit, before)


@contextlib.contextmanager
def windowed(way: str, enqueue: Call, launches: int, stream: int, address: int, window: Window) -> Iterator[Any]:
    """Yield a function that enqueues launches of a kernel under a window, set in one of `WAYS`."""
    if way == "graph":
        value = driver.CUkernelNodeAttrValue()
        value.accessPolicyWindow = policy(address, window)
        with movement.kernel_graph(enqueue, launches, stream, POLICY if window.size else None, value) as graph:
            yield lambda: call(driver.cuGraphLaunch, graph, stream)
        return
    value = driver.CUstreamAttrValue()
    value.accessPolicyWindow = policy(address, window)
    if window.size:
        call(driver.cuStreamSetAttribute, stream, POLICY, value)
    try:
        yield functools.partial(movement.in_sequence([enqueue] * launches), stream)
    finally:
        if window.size:
            value.accessPolicyWindow = policy(0, Window(0, 0.0))
            call(driver.cuStreamSetAttribute, stream, POLICY, value)


class Arrays:
    """A region and a stream on the device, and the time of launches that double them."""

    def __init__(self, region: int, stream: int, handle: int, launches: int, rounds: int):
        self.stream, self.handle, self.launches, self.rounds = stream, handle, launches, rounds
        self.region = cuda.to_device(np.zeros(region // ITEM, np.int32))
        self.streamed = cuda.to_device(np.ones(stream // ITEM, np.int32))
        self.values = np.arange(region // ITEM, dtype=np.int32) % 1000
        self.launch(region, stream)(0)
        machine.verify(self.streamed, np.broadcast_to(2, stream // ITEM), "the stream was not doubled")

    def launch(self, region: int, threads: int) -> Call:
        """Return a launch with one thread per element of so many bytes."""
        counts = region // ITEM, self.stream // ITEM
        grid = threads // ITEM // BLOCK
        return machine.enqueue(double_both, grid, BLOCK, self.region, self.streamed, *counts)

    def check(self, size: int, work: Callable[[], object]) -> None:
        """Check that `work`, `CHECK_LAUNCHES` launches with one thread per element of the region, doubles both."""
        values = self.values[: size // ITEM]
        places = {"region": self.region[: values.size], "stream": self.streamed[: values.size]}
        for place in places.values():
            place.copy_to_device(values)
        synchronize()  # copies to the device may still be in progress
        work()
        synchronize(self.handle)
        for name, place in places.items():
            machine.verify(place, values << CHECK_LAUNCHES, f"a kernel did not double the {name}")

    def measured(self, way: str, size: int, window: Window) -> float:
        """Check smaller launches, and return the milliseconds of one for the whole stream."""
        small, full = self.launch(size, size), self.launch(size, self.stream)
        if machine.SIMULATOR:
            self.check(size, functools.partial(movement.in_sequence([small] * CHECK_LAUNCHES), 0))
            return machine.timed({way: full}, rounds=self.rounds)[way] / 1e3
        address = movement.address(self.region)
        call(driver.cuCtxResetPersistingL2Cache)  # lines marked by the previous window
        with windowed(way, small, CHECK_LAUNCHES, self.handle, address, window) as work:
            self.check(size, work)
        with windowed(way, full, self.launches, self.handle, address, window) as work:
            return span_ms([self.handle], work, self.rounds) / self.launches


def l2_persistence(
    set_aside: float = 0.5,
    stream: int = 1024 * MIB,
    shares: Sequence[float] = (1 / 3, 1 / 2, 2 / 3, 5 / 6, 1, 7 / 6, 4 / 3, 3 / 2, 5 / 3, 11 / 6, 2),
    launches: int = 4,
    rounds: int = 5,
) -> Iterator[dict[str, Any]]:
    """Double a region and a stream under each window, set in each way; the simulator has no windows.

    "whole" marks all of the region, "guide" two thirds of what was set aside with the guide's hit ratio, and "spread"
    the whole region with that ratio.

    One row per region, window and ``way`` ("stream" or "graph": where the window is set): ``set_aside_mib`` as
    rounded by the driver, ``clamped`` if the device made the window smaller, ``ms`` per launch (median), ``gb_s``
    read and written by the threads, and ``predicted_staying``, a fraction of the region. The others are predicted
    from the first region, which has `BASELINE` bytes.

    Parameters
    ----------
    set_aside: Share of the L2 cache for persisting accesses; less where the device does not allow as much.
    stream: Bytes of the stream, at least those of the largest region; there is one thread per element.
    shares: Sizes of the region relative to what is set aside; rounded to whole blocks of threads.
    launches: Consecutive launches per sample.
    """
    kinds: Sequence[str] = WINDOWS[:1]
    ways: Sequence[str] = WAYS[:1]
    largest, aside = stream, round(set_aside * machine.properties().l2_bytes)
    with movement.Scope() as scope:
        granted = aside
        if not machine.SIMULATOR:
            kinds, ways, largest = WINDOWS, WAYS, machine.attribute("MAX_ACCESS_POLICY_WINDOW_SIZE")
            aside = min(aside, machine.attribute("MAX_PERSISTING_L2_CACHE_SIZE"))
            if not aside:
                raise Unavailable("no part of the L2 cache can be set aside on this device")
            granted = scope.enter_context(persisting_share(aside))
        (handle,) = scope.streams()
        sizes = [ITEM * BLOCK * max(1, round(share * aside / (ITEM * BLOCK))) for share in shares]
        if max(sizes) > stream:
            raise UsageError(f"the largest region has {max(sizes)} bytes; expected no more than the stream's {stream}")
        arrays = Arrays(max(sizes), stream, handle, launches, rounds)
        l2_bytes, dram = machine.properties().l2_bytes, machine.ceilings()[0].dram
        floors: dict[str, float] = {}
        for size, kind in [(min(BASELINE, *sizes), "none"), *itertools.product(sizes, kinds)]:
            window, clamped = window_of(kind, size, aside, largest)
            for way in ways:
                ms = arrays.measured(way, size, window)
                stays = staying(window, size, granted, l2_bytes)
                predicted = floors.setdefault(way, ms) + 1e3 * region_bytes(stream, stays) / dram
                yield (
                    {"window": kind, "way": way, "region_mib": size / MIB, "set_aside_mib": granted / MIB}
                    | {"window_mib": window.size / MIB, "hit_ratio": window.hit_ratio, "clamped": clamped}
                    | {"ms": ms, "gb_s": 4 * stream / ms / 1e6, "predicted_staying": stays}
                    | {"predicted_ms": predicted, "predicted_gb_s": 4 * stream / predicted / 1e6}
                )


def claims(frame: pd.DataFrame) -> dict[str, Any]:
    table = frame.groupby(["region_mib", "window"])["ms"].median().unstack().dropna()
    aside = frame["set_aside_mib"].iloc[0]
    fits, full = table[table.index <= aside], table[table.index == aside]
    beyond = table[(table.index > aside) & (table.index < 1.6 * aside)]
    ways = frame.pivot(index=["region_mib", "window"], columns="way", values="ms")
    windowed = frame[frame["window"] != "none"]
    return {
        "a launch under a window takes as long as is predicted, to 15 %": (
            (windowed["ms"] / windowed["predicted_ms"] - 1).abs() < 0.15
        ),
        "a window over a region as large as what was set aside makes it faster by a fifth and more": (
            1.2 * full["whole"] < full["none"]
        ),
        "a region that what was set aside holds is as fast with a window over it as without, or faster": (
            fits["whole"] < 1.05 * fits["none"]
        ),
        "of a region up to half as large again, marking what fits is faster than marking all": (
            beyond["spread"] < beyond["whole"]
        ),
        "where the guide's smaller window keeps less, it is slower than one over the whole region": (
            beyond["spread"] < beyond["guide"]
        ),
        "it makes no difference whether a window is set on a stream or on a graph's nodes": (
            (ways["graph"] - ways["stream"]).abs() < 0.1 * ways["stream"]
        ),
    }


PLOT = panels(
    *(curves("region_mib", "ms", "window", f"way == {way!r}", lines={"x": "set_aside_mib"}, title=way) for way in WAYS),
    sharey=True,
)
SMALL = {"set_aside": 1e-4, "stream": 64 << 10, "shares": (1 / 3, 2), "launches": 1, "rounds": 1}
EXPERIMENT = machine.experiment(l2_persistence, "9.2.2", claims, PLOT, SMALL, [double_both])
