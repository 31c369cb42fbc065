"""A window keeps a region in the L2 cache during streaming, if no more of it is marked than was set aside.

Every thread doubles an element of a region that is used repeatedly, and one of a stream that is used once. Part of the
L2 cache is set aside for accesses marked as persisting. An access policy window is a range of addresses; accesses to
`hit_ratio` of its lines are marked as persisting, those to the others as streaming, which are evicted first. The window
is set on a stream or on the kernel nodes of a graph; the kernel does not change. The windows are

- "none": no window;
- "whole": a window over the region with a hit ratio of 1, which marks more than was set aside if the region is larger:
  its lines then evict one another;
- "guide": the guide's remedy, a window of two thirds of what was set aside, with a hit ratio of its size over the
  region's. According to the guide, that many bytes stay. But the ratio applies to the window, which is now smaller than
  the region: the two factors multiply, and far less of a large region is marked;
- "spread": the guide's description taken literally: a window over the whole region, with the hit ratio that marks two
  thirds of what was set aside.

The predicted time is that of a launch whose region is so small that it always stays (`BASELINE` bytes, measured), plus
the time to read and write the evicted bytes of the region at device memory's ceiling. Bytes marked as persisting stay
if they fit into what was set aside. The part of the region outside of the window stays if it fits into the rest of the
cache together with the stream that passes meanwhile, which has as many bytes as the region, since the cache evicts the
least recently used lines. But an L2 cache of two partitions holds data read from both twice, once in each. So only half
of the cache counts, and without a window a region of a quarter of the cache stays.

Measured launches with a window take up to a tenth longer than predicted, and those without one up to a fifth: the cache
does not evict strictly by age, and a region loses parts of itself before it has to. The gain of the window is as the
guide says: if the region is nearly as large as what was set aside, the launch without it takes 1.4 to 1.5 times as
long.

Thrashing. According to the guide, a region larger than what was set aside loses about 10 % of the performance with the
window "whole", because its lines evict one another. On an H200 a launch does take 23 to 25 % longer under that window
with a region of 35 MiB than with one of 30 MiB, as much as was set aside. But it is not slower than without a window:
from 35 to 60 MiB it takes 10 to 11 % less time, although the model predicts no gain. So thrashing costs more than half
of the window's gain, but not all of it.

The device limits the size of a window; `clamped` marks rows with a larger region, whose window was reduced.

Source: CUDA C++ Best Practices Guide, "L2 Cache Access Window" and "Tuning the Access Window Hit-Ratio"; CUDA C++
Programming Guide, "L2 Policy for Persisting Accesses"; for the partitions, NVIDIA A100 Tensor Core GPU Architecture,
"A100 L2 Cache".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from cuda.bindings import driver
from numba import cuda, uint32

from numba_gemm.lab.harness.experiment import Experiment, Unavailable
from numba_gemm.lab.memory import machine, movement
from numba_gemm.lab.memory.drawing import COLOURS, curve
from numba_gemm.runtime.driver import call
from numba_gemm.runtime.timing import Call

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Window", "double_both", "l2_persistence", "region_bytes", "staying"]

ITEM, BLOCK = 4, 512
MIB = 1 << 20
BASELINE = MIB  # bytes of a region that stays in the L2 cache in any case
PARTITIONS = 2  # in the L2 caches of compute capability 8.0 and 9.0
CHECK_LAUNCHES = 3
WAYS = ("stream", "graph")
WINDOWS = ("none", "whole", "guide", "spread")
POLICY = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW


@cuda.jit
def double_both(persistent: Any, streaming: Any, region: Any, size: Any) -> None:
    """Double one element of the region and one of the stream per thread; both sizes are in elements."""
    tid = uint32(cuda.grid(1))
    often, once = uint32(tid % uint32(region)), uint32(tid % uint32(size))
    persistent[often] = 2 * persistent[often]
    streaming[once] = 2 * streaming[once]


# ------------------------------------------------------------------------------------------------------- predictions


@dataclass(frozen=True)
class Window:
    """An access policy window at the start of a region: its bytes, and the fraction of them to mark as persisting."""

    size: int
    hit_ratio: float

    @property
    def marked(self) -> int:
        """Bytes marked as persisting."""
        return round(self.size * self.hit_ratio)


def window_of(kind: str, region: int, set_aside: int, largest: int) -> tuple[Window, bool]:
    """Return one of `WINDOWS` for a region in bytes, and True if the device's limit made it smaller."""
    tuned = 2 * set_aside // 3
    ratio = min(1.0, tuned / region)
    sizes = {"none": 0, "whole": region, "guide": min(tuned, region), "spread": region}
    ratios = {"none": 0.0, "whole": 1.0, "guide": ratio, "spread": ratio}
    return Window(min(sizes[kind], largest), ratios[kind]), sizes[kind] > largest


def staying(window: Window, region: int, set_aside: int, l2: int) -> float:
    """Fraction of a region that stays in an L2 cache of two partitions until its next use; sizes are in bytes."""
    marked, outside = window.marked, region - window.size
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


# --------------------------------------------------------------------------------------------- windows on the device


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


def repeated(enqueue: Call, launches: int, stream: int) -> Callable[[], None]:
    """Return a function that enqueues a launch `launches` times."""

    def work() -> None:
        for _ in range(launches):
            enqueue(stream)

    return work


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
        yield repeated(enqueue, launches, stream)
    finally:
        if window.size:
            value.accessPolicyWindow = policy(0, Window(0, 0.0))
            call(driver.cuStreamSetAttribute, stream, POLICY, value)


# ------------------------------------------------------------------------------------------------------- experiment


def check(work: Any, places: dict[str, Any], values: np.ndarray) -> None:
    """Check that `work`, `CHECK_LAUNCHES` launches with one thread per element of the region, doubles both arrays."""
    for place in places.values():
        place[: values.size].copy_to_device(values)
    work()
    for name, place in places.items():
        found = place[: values.size].copy_to_host()
        assert np.array_equal(found, values << CHECK_LAUNCHES), f"a kernel did not double the {name}"


def l2_persistence(
    set_aside: int = 30 * MIB,
    stream: int = 1024 * MIB,
    shares: Sequence[float] = (1 / 3, 1 / 2, 2 / 3, 5 / 6, 1, 7 / 6, 4 / 3, 3 / 2, 5 / 3, 11 / 6, 2),
    launches: int = 4,
    rounds: int = 5,
) -> pd.DataFrame:
    """Double a region and a stream under each window, set in each way; the simulator has no windows.

    Parameters
    ----------
    set_aside : int
        Bytes of the L2 cache for persisting accesses, within the device's limit.
    stream : int
        Bytes of the stream, at least those of the largest region; there is one thread per element.
    shares : sequence of float
        Sizes of the region relative to `set_aside`; rounded to whole blocks of threads.
    launches : int
        Consecutive launches per sample.
    rounds : int
        Samples of each measurement.

    Returns
    -------
    DataFrame
        One row per region, window and way: ``window`` (see the module), ``way`` ("stream" or "graph": where it is set),
        ``region_mib``, ``set_aside_mib`` (as rounded by the driver), ``window_mib``, ``hit_ratio``, ``clamped``, ``ms``
        (per launch, median), ``gb_s`` (bytes read and written by the threads), ``predicted_staying`` (fraction of the
        region), ``predicted_ms`` and ``predicted_gb_s``. The others are predicted from the first region, which has
        `BASELINE` bytes.

    Raises
    ------
    Unavailable
        if the device cannot set aside that much of its L2 cache.
    AssertionError
        if a launch computes a wrong result.
    """
    sizes = [ITEM * BLOCK * max(1, round(share * set_aside / (ITEM * BLOCK))) for share in shares]
    baseline = min(BASELINE, *sizes)
    persistent = cuda.to_device(np.zeros(max(sizes) // ITEM, np.int32))
    streaming = cuda.to_device(np.ones(stream // ITEM, np.int32))
    places, address = {"region": persistent, "stream": streaming}, 0
    values = np.arange(max(sizes) // ITEM, dtype=np.int32) % 1000

    def launch(region: int, threads: int) -> Call:
        counts = region // ITEM, stream // ITEM
        return machine.enqueue(double_both, threads // BLOCK, BLOCK, persistent, streaming, *counts)

    def measured(way: str, size: int, window: Window) -> float:
        """Check smaller launches, and return the milliseconds of one for the whole stream."""
        small, full = launch(size, size // ITEM), launch(size, stream // ITEM)
        if machine.SIMULATOR:
            check(repeated(small, CHECK_LAUNCHES, 0), places, values[: size // ITEM])
            return machine.timed({way: full}, rounds=rounds)[way].median / 1e3

        def finished() -> None:
            call(driver.cuCtxSynchronize)  # copies to the device may still be in progress
            work()
            call(driver.cuStreamSynchronize, handle)

        call(driver.cuCtxResetPersistingL2Cache)  # lines marked by the previous window
        with windowed(way, small, CHECK_LAUNCHES, handle, address, window) as work:
            check(finished, places, values[: size // ITEM])
        with windowed(way, full, launches, handle, address, window) as work:
            return movement.median_ms([handle], work, rounds) / launches

    launch(sizes[0], stream // ITEM)(0)
    assert (streaming.copy_to_host() == 2).all(), "a launch did not double the stream"
    rows = []
    with contextlib.ExitStack() as scopes:
        kinds, ways, largest, granted = list(WINDOWS[:1]), list(WAYS[:1]), stream, set_aside
        if not machine.SIMULATOR:
            scopes.enter_context(machine.in_context())
            kinds, ways, largest = list(WINDOWS), list(WAYS), machine.attribute("MAX_ACCESS_POLICY_WINDOW_SIZE")
            if set_aside > (most := machine.attribute("MAX_PERSISTING_L2_CACHE_SIZE")):
                raise Unavailable(f"{set_aside} bytes of the L2 cache cannot be set aside here; at most {most} can")
            granted = scopes.enter_context(persisting_share(set_aside))
            address = movement.address(persistent)
        (handle,) = scopes.enter_context(machine.streams())
        nothing, floors = Window(0, 0.0), {}
        for way in ways:
            floors[way] = measured(way, baseline, nothing)
            rows.append(row_of("none", way, baseline, nothing, False, granted, stream, floors[way], floors[way]))
        for size in sizes:
            for kind in kinds:
                window, clamped = window_of(kind, size, set_aside, largest)
                for way in ways:
                    ms = measured(way, size, window)
                    rows.append(row_of(kind, way, size, window, clamped, granted, stream, ms, floors[way]))
    return pd.DataFrame(rows)


def row_of(
    kind: str,
    way: str,
    size: int,
    window: Window,
    clamped: bool,
    set_aside: int,
    stream: int,
    ms: float,
    floor_ms: float,
) -> dict[str, Any]:
    """Return one row of the result."""
    ceilings, _ = machine.ceilings()
    stays = staying(window, size, set_aside, machine.properties().l2_bytes)
    predicted = floor_ms + 1e3 * region_bytes(stream, stays) / ceilings.dram
    return {
        "window": kind,
        "way": way,
        "region_mib": size / MIB,
        "set_aside_mib": set_aside / MIB,
        "window_mib": window.size / MIB,
        "hit_ratio": window.hit_ratio,
        "clamped": clamped,
        "ms": ms,
        "gb_s": 4 * stream / ms / 1e6,
        "predicted_staying": stays,
        "predicted_ms": predicted,
        "predicted_gb_s": 4 * stream / predicted / 1e6,
    }


def plot(frame: pd.DataFrame, figure: Figure) -> None:
    """Plot milliseconds per launch against the region's size, one curve per window; the ways side by side."""
    ways = [way for way in WAYS if (frame["way"] == way).any()]
    for axes, way in zip(np.atleast_1d(figure.subplots(1, len(ways), sharey=True)), ways):
        for index, kind in enumerate(WINDOWS):
            found = frame[(frame["way"] == way) & (frame["window"] == kind)].sort_values("region_mib")
            if len(found):
                curve(axes, found["region_mib"], found["ms"], found["predicted_ms"], kind, index)
        axes.axvline(frame["set_aside_mib"].iloc[0], color=COLOURS[-1], linestyle=":", linewidth=1, label="set aside")
        cut = ", some cut to the largest" if frame["clamped"].any() else ""
        axes.set(xlabel="region in MiB", ylim=(0, None), title=f"window on the {way}{cut}")
    figure.axes[0].set_ylabel("ms a launch")
    figure.axes[0].legend(loc="lower right", fontsize=8)


def claims(frame: pd.DataFrame) -> dict[str, bool]:
    """Check the statements of the module's docstring against a result."""
    table = frame.groupby(["region_mib", "window"])["ms"].median().unstack().dropna()
    set_aside = frame["set_aside_mib"].iloc[0]
    fits, full = table[table.index <= set_aside], table[table.index == set_aside]
    beyond = table[(table.index > set_aside) & (table.index < 1.6 * set_aside)]
    ways = frame.pivot(index=["region_mib", "window"], columns="way", values="ms")
    windowed = frame[frame["window"] != "none"]
    return {
        "a launch under a window takes as long as is predicted, to 15 %": bool(
            ((windowed["ms"] / windowed["predicted_ms"] - 1).abs() < 0.15).all()
        ),
        "a window over a region as large as what was set aside makes it faster by a fifth and more": bool(
            (1.2 * full["whole"] < full["none"]).all() and len(full)
        ),
        "a region that what was set aside holds is as fast with a window over it as without, or faster": bool(
            (fits["whole"] < 1.05 * fits["none"]).all()
        ),
        "of a region up to half as large again, marking what fits is faster than marking all": bool(
            (beyond["spread"] < beyond["whole"]).all() and len(beyond)
        ),
        "where the guide's smaller window keeps less, it is slower than one over the whole region": bool(
            (beyond["spread"] < beyond["guide"]).all()
        ),
        "it makes no difference whether a window is set on a stream or on a graph's nodes": bool(
            ((ways["graph"] - ways["stream"]).abs() < 0.1 * ways["stream"]).all()
        ),
    }


EXPERIMENT = Experiment(
    name="l2_persistence",
    section="9.2.2",
    run=l2_persistence,
    plot=plot,
    claims=claims,
    facts=machine.facts,
    small={"set_aside": 6 << 10, "stream": 16 << 10, "shares": (1 / 3, 2), "launches": 1, "rounds": 1},
    kernels={"double_both": (double_both, "int32[::1], int32[::1], int64, int64")},
)
