"""A multiprocessor's L1 cache and shared memory share one storage: more for one is less for the other.

On compute capability 9.0 they share 256 KB. A kernel may prefer a percentage of the largest shared memory, 228 KB, for
shared memory. The preference is rounded up to the next possible size (0, 8, 16, 32, 64, 100, 132, 164, 196, 228 KB) and
raised to the needs of one block; it is a hint that the driver may ignore. The rest is L1 cache. Here the preference is
an attribute of a graph's kernel nodes. The kernels are the same throughout, and -1 stands for no preference, which
leaves the choice to the driver.

- "copy" needs neither: its predicted speed is that without a preference.
- "reread" has one block per multiprocessor, which reads a tile of its own repeatedly. The prediction is the measured
  ceiling of L1 (which has the data path of shared memory) if the tile fits the remaining L1, and that of the L2 cache
  if it does not: an L1 cache that evicts the least recently used line has lost each line before its next use. The
  measured edge is soft: part of a tile that is slightly too large stays. A tile that fits is read at about 60 to 85 %
  of the ceiling on an H200, larger tiles faster: a warp waits once after each pass through the tile.
- Stages of the ladder multiply matrices. If fewer blocks fit into shared memory at the same time, the multiprocessor
  has fewer warps to choose from: the prediction is the speed without a preference, times the blocks that fit over those
  that could. It is a lower bound, since a multiprocessor that is busy with fewer warps loses nothing. `coalesced` has
  no shared memory, so all of its blocks always fit (the system takes 1 KB per block), and no loss is predicted; but its
  blocks reread rows of B from the L1 cache, and it loses about a quarter of its speed with the last of it. Registers
  allow only one block of `warp_tiled`, and one always fits.

Source: CUDA C++ Programming Guide, "Compute Capabilities", sections "Shared Memory"; NVIDIA Hopper Tuning Guide,
"Unified Shared Memory/L1/Texture Cache"; CUDA C++ Best Practices Guide, "Device Memory Spaces".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from cuda.bindings import driver
from numba import cuda, float32, uint32

from numba_gemm import tiled_sgemm
from numba_gemm.device.units import FLOAT32_BYTES, ceil_div
from numba_gemm.gemm.occupancy import Occupancy
from numba_gemm.gemm.occupancy import occupancy as occupancy_of
from numba_gemm.lab.harness.experiment import Experiment, Unavailable
from numba_gemm.lab.memory import machine, movement
from numba_gemm.lab.memory.drawing import curve
from numba_gemm.models.occupancy import LIMITS, occupancy
from numba_gemm.models.roofline import gemm_flops
from numba_gemm.runtime.driver import call
from numba_gemm.runtime.timing import Call

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["NO_PREFERENCE", "blocks_in", "carve_out", "copy", "percentages", "reread", "shared_size"]

KIB = 1024
COPY_BLOCK, REREAD_BLOCK = 256, 1024
NO_PREFERENCE = -1
NAN = 0xFFFFFFFF  # bits of a float32
REGISTERS = 32  # limit for the kernels here, which does not reduce the number of resident blocks
CARVE_OUT = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT

SPLITS: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {
    (8, 0): (192, (0, 8, 16, 32, 64, 100, 132, 164)),
    (8, 6): (128, (0, 8, 16, 32, 64, 100)),
    (8, 7): (192, (0, 8, 16, 32, 64, 100, 132, 164)),
    (8, 9): (128, (0, 8, 16, 32, 64, 100)),
    (9, 0): (256, (0, 8, 16, 32, 64, 100, 132, 164, 196, 228)),
}
"""KB of L1 cache and shared memory together, and the possible sizes of shared memory, by compute capability."""


@cuda.jit
def copy(x: Any, out: Any) -> None:
    """Copy one element per thread."""
    i = cuda.grid(1)
    out[i] = x[i]


@cuda.jit
def reread(turns: Any, tile: Any, x: Any, out: Any) -> None:
    """Sum each block's tile of x, `turns` times, with four loads at a time."""
    begin = uint32(cuda.blockIdx.x * uint32(tile) + cuda.threadIdx.x)
    end = uint32(begin + uint32(tile))
    first, second, third, fourth = float32(0), float32(0), float32(0), float32(0)
    turn = uint32(0)
    while turn < uint32(turns):
        place = begin
        while place < end:
            first += x[place]
            second += x[place + REREAD_BLOCK]
            third += x[place + 2 * REREAD_BLOCK]
            fourth += x[place + 3 * REREAD_BLOCK]
            place = uint32(place + 4 * REREAD_BLOCK)
        turn = uint32(turn + 1)
    out[cuda.grid(1)] = (first + second) + (third + fourth)


# ------------------------------------------------------------------------------------------------------- predictions


def percentages(cc: tuple[int, int]) -> list[int]:
    """Return percentages that round up to each possible size of shared memory, in ascending order."""
    _, sizes = SPLITS[cc]
    return [100 * size // max(sizes) for size in sizes]


def shared_size(percent: int, block_shared: int, cc: tuple[int, int]) -> int:
    """Bytes of shared memory that a preference yields; a block needs `block_shared`, with the system's kilobyte."""
    _, sizes = SPLITS[cc]
    wanted = max(percent * max(sizes) * KIB / 100, block_shared)
    return next(KIB * size for size in sizes if KIB * size >= wanted)


def block_bytes(found: Occupancy) -> int:
    """Bytes of shared memory that a block occupies in its multiprocessor."""
    has = LIMITS[found.cc]
    return ceil_div(found.shared + has.shared_reserved, has.shared_unit) * has.shared_unit


def blocks_in(shared: int, found: Occupancy) -> int:
    """Number of blocks that fit a multiprocessor with this shared memory."""
    others = [count for name, count in found.limits.items() if name != "shared memory"]
    return min(*others, shared // block_bytes(found))


@dataclass(frozen=True)
class Case:
    """A kernel to run with every preference.

    Attributes
    ----------
    name : str
        Name in the result.
    enqueue : callable
        Function that enqueues one launch.
    work : float
        Bytes or FLOP per launch.
    occupancy : Occupancy
        Occupancy without a preference.
    out : device array
        Output, which a launch overwrites entirely.
    check : callable
        Function that raises if the output is wrong.
    tile : int
        Bytes that a block reads repeatedly, or 0.
    flops : bool
        True if `work` is in FLOP.
    """

    name: str
    enqueue: Call
    work: float
    occupancy: Occupancy
    out: Any
    check: Callable[[], None]
    tile: int = 0
    flops: bool = False


def row_of(case: Case, percent: int, ms: float, default_ms: float) -> dict[str, Any]:
    """Return one row of the result; `default_ms` is the time without a preference."""
    cc, (limits, _) = case.occupancy.cc, machine.ceilings()
    total, _ = SPLITS[cc]
    shared = shared_size(percent, block_bytes(case.occupancy), cc) if percent != NO_PREFERENCE else None
    l1 = None if shared is None else total * KIB - shared
    blocks = case.occupancy.blocks if shared is None else blocks_in(shared, case.occupancy)
    if not case.tile:
        predicted_ms = default_ms * case.occupancy.blocks / blocks
    elif l1 is None:
        predicted_ms = float("nan")
    else:
        predicted_ms = 1e3 * case.work / (limits.shared if case.tile <= l1 else limits.l2)
    rate, predicted = case.work / ms / 1e6, case.work / predicted_ms / 1e6
    return {
        "kernel": case.name,
        "percent": percent,
        "tile_kib": case.tile / KIB if case.tile else None,
        "ms": ms,
        "gb_s": None if case.flops else rate,
        "tflop_s": rate / 1e3 if case.flops else None,
        "predicted_shared_kib": None if shared is None else shared / KIB,
        "predicted_l1_kib": None if l1 is None else l1 / KIB,
        "predicted_blocks": blocks,
        "predicted_ms": predicted_ms,
        "predicted_gb_s": None if case.flops else predicted,
        "predicted_tflop_s": predicted / 1e3 if case.flops else None,
    }


# ------------------------------------------------------------------------------------------------------- experiment


def copy_case(elements: int, cc: tuple[int, int]) -> Case:
    """Copy of floats."""
    values = np.arange(elements, dtype=np.float32) % 1000
    x, out = cuda.to_device(values), cuda.device_array(elements, np.float32)

    def check() -> None:
        assert np.array_equal(out.copy_to_host(), values), "a copy is wrong"

    enqueue = machine.enqueue(copy, elements // COPY_BLOCK, COPY_BLOCK, x, out)
    return Case("copy", enqueue, 2 * FLOAT32_BYTES * elements, occupancy(COPY_BLOCK, REGISTERS, 0, cc), out, check)


def reread_case(tile: int, block_reads: int, cc: tuple[int, int]) -> Case:
    """One block per multiprocessor that reads a tile of this size repeatedly, `block_reads` bytes in total."""
    blocks, elements, turns = machine.properties().sm_count, tile // FLOAT32_BYTES, block_reads // tile
    values = np.arange(blocks * elements, dtype=np.float32) % 8  # sums are exact
    x, out = cuda.to_device(values), cuda.device_array(blocks * REREAD_BLOCK, np.float32)
    expected = turns * values.reshape(blocks, -1, REREAD_BLOCK).sum(axis=1).ravel()

    def check() -> None:
        assert np.array_equal(out.copy_to_host(), expected), "a sum is wrong"

    enqueue = machine.enqueue(reread, blocks, REREAD_BLOCK, turns, elements, x, out)
    work = float(blocks * turns * tile)
    name = f"reread {tile // KIB} KiB"
    return Case(name, enqueue, work, occupancy(REREAD_BLOCK, REGISTERS, 0, cc), out, check, tile)


def product_case(stage: str, size: int) -> Case:
    """A stage of the ladder, for square matrices."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, (size, size)).astype(np.float32) for _ in range(2))  # sums are exact
    on_device = cuda.to_device(a), cuda.to_device(b)
    out = cuda.device_array((size, size), np.float32)
    rows = slice(None, None, max(1, size // 64) | 1)  # in every tile, at varying positions
    expected = a[rows] @ b

    def enqueue(stream: int) -> None:
        tiled_sgemm(*on_device, out, stage=stage, stream=stream)

    def check() -> None:
        assert np.array_equal(out.copy_to_host()[rows], expected), f"a product of stage {stage} is wrong"

    return Case(stage, enqueue, gemm_flops(size, size, size), occupancy_of(stage), out, check, flops=True)


def cases(
    elements: int, tiles: Sequence[int], block_reads: int, stages: Sequence[str], size: int, cc: tuple[int, int]
) -> Iterator[Case]:
    """Yield all cases one after the other; each frees its arrays before the next."""
    yield copy_case(elements, cc)
    for tile in tiles:
        yield reread_case(tile, block_reads, cc)
    for stage in stages:
        yield product_case(stage, size)


def carve_out(
    elements: int = 1 << 26,
    tiles: Sequence[int] = (48 * KIB, 112 * KIB, 144 * KIB, 208 * KIB),
    block_reads: int = 1 << 26,
    stages: Sequence[str] = ("coalesced", "shared_tile", "double_buffered", "warp_tiled"),
    size: int = 4096,
    rounds: int = 5,
) -> pd.DataFrame:
    """Run kernels with every split of the multiprocessors' memory, and without a preference.

    Parameters
    ----------
    elements : int
        Floats to copy, a multiple of `COPY_BLOCK`.
    tiles : sequence of int
        Bytes that a block reads repeatedly, multiples of 16 KB.
    block_reads : int
        Bytes that a block reads per launch, rounded down to whole tiles.
    stages : sequence of str
        Stages of the ladder.
    size : int
        M, N and K of the stages.
    rounds : int
        Samples of each measurement.

    Returns
    -------
    DataFrame
        One row per kernel and preference: ``kernel`` ("copy", "reread 48 KiB" and so on, or a stage), ``percent`` (-1
        for no preference), ``tile_kib``, ``ms`` (median), ``gb_s`` or ``tflop_s``; ``predicted_shared_kib``,
        ``predicted_l1_kib`` and ``predicted_blocks`` per multiprocessor; ``predicted_ms``, and the corresponding rate.

    Raises
    ------
    Unavailable
        if the splits of the compute capability are unknown.
    AssertionError
        if a kernel computes a wrong result.
    """
    cc = machine.properties().cc
    if cc not in SPLITS:
        raise Unavailable(f"how compute capability {cc[0]}.{cc[1]} splits its memory is not known here")
    rows = []
    with ExitStack() as scopes:
        scopes.enter_context(machine.in_context())
        (stream,) = scopes.enter_context(machine.streams())
        for case in cases(elements, tiles, block_reads, stages, size, cc):
            call(driver.cuCtxSynchronize)  # copies to the device may still be in progress
            case.enqueue(stream)  # compiles the kernel if needed, which is not possible during a capture
            call(driver.cuStreamSynchronize, stream)
            default_ms = 0.0
            for percent in (NO_PREFERENCE, *percentages(cc)):
                ms = measured(case, percent, stream, rounds)
                default_ms = default_ms or ms
                rows.append(row_of(case, percent, ms, default_ms))
    return pd.DataFrame(rows)


def measured(case: Case, percent: int, stream: int, rounds: int) -> float:
    """Check a launch with a preference, and return its milliseconds."""
    call(driver.cuMemsetD32Async, movement.address(case.out), NAN, case.out.size, stream)
    value = None
    if percent != NO_PREFERENCE:
        value = driver.CUkernelNodeAttrValue()
        value.sharedMemCarveout = percent
    with movement.kernel_graph(case.enqueue, 1, stream, None if value is None else CARVE_OUT, value) as graph:
        ms = movement.median_ms([stream], lambda: call(driver.cuGraphLaunch, graph, stream), rounds)
    case.check()
    return ms


def plot(frame: pd.DataFrame, figure: Figure) -> None:
    """Plot speed against the preferred shared memory, relative to no preference, for reads and for stages."""
    left, right = figure.subplots(1, 2)
    products = frame["tflop_s"].notna()
    for axes, found in ((left, frame[~products]), (right, frame[products])):
        for index, name in enumerate(dict.fromkeys(found["kernel"])):
            rows = found[found["kernel"] == name].set_index("percent").sort_index()
            default = rows["ms"].loc[NO_PREFERENCE]
            chosen = rows.drop(index=NO_PREFERENCE)
            if axes is left:
                curve(axes, chosen.index, chosen["gb_s"] / 1e3, chosen["predicted_gb_s"] / 1e3, name, index)
            else:
                curve(axes, chosen.index, default / chosen["ms"], default / chosen["predicted_ms"], name, index)
        axes.set(xlabel="preferred shared memory in %", ylim=(0, None))
        axes.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    left.set(ylabel="TB/s", title="copied, or read again and again")
    right.set(ylabel="speed over that without a preference", title="products")


def claims(frame: pd.DataFrame) -> dict[str, bool]:
    """Check the statements of the module's docstring against a result."""
    chosen = frame[frame["percent"] != NO_PREFERENCE]
    copied = frame[frame["kernel"] == "copy"]["ms"]
    tiles = chosen[chosen["tile_kib"].notna()]
    room = tiles["predicted_l1_kib"] - tiles["tile_kib"]
    inside, outside, far = (
        tiles[room >= 0],
        tiles[room < 0],
        tiles[tiles["tile_kib"] >= 2 * tiles["predicted_l1_kib"]],
    )
    slowest_inside, fastest_outside = inside.groupby("kernel")["ms"].max(), outside.groupby("kernel")["ms"].min()
    products = chosen[chosen["tflop_s"].notna()]
    best = products.groupby("kernel")[["predicted_blocks", "ms"]].agg({"predicted_blocks": "max", "ms": "min"})
    fewer = products[products["predicted_blocks"] < products["kernel"].map(best["predicted_blocks"])]
    return {
        "a copy takes the same time under every split": bool(copied.max() < 1.1 * copied.min()),
        "a tile that fits into what is left for L1 is read faster than where it does not": bool(
            (slowest_inside < fastest_outside)[fastest_outside.index].all()
        ),
        "tiles of twice what is left and more are read at the L2 cache's pace or below": bool(
            (far["ms"] > 0.9 * far["predicted_ms"]).all() and len(far)
        ),
        "a stage is slower where fewer of its blocks fit side by side": bool(
            (fewer["ms"] > 1.03 * fewer["kernel"].map(best["ms"])).all()
        ),
        "but it loses no more than the share of blocks that it lost": bool(
            (fewer["ms"] < 1.1 * fewer["predicted_ms"]).all()
        ),
    }


EXPERIMENT = Experiment(
    name="carve_out",
    section="9.2",
    run=carve_out,
    plot=plot,
    claims=claims,
    facts=machine.facts,
    small={
        "elements": 1 << 20,
        "tiles": (48 * KIB,),
        "block_reads": 1 << 20,
        "stages": ("shared_tile",),
        "size": 512,
        "rounds": 1,
    },
    unavailable="the simulator has no L1 cache, and no graphs of which it could be asked",
    kernels={
        "copy": (copy, "float32[::1], float32[::1]"),
        "reread": (reread, "int64, int64, float32[::1], float32[::1]"),
    },
)
