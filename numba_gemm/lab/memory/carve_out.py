"""A multiprocessor's L1 cache and shared memory share one storage: more for one is less for the other."""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from cuda.bindings import driver
from numba import cuda, float32, uint32

from numba_gemm import tiled_sgemm
from numba_gemm.device.units import FLOAT32_BYTES, KIB, ceil_div
from numba_gemm.gemm.occupancy import Occupancy
from numba_gemm.gemm.occupancy import occupancy as occupancy_of
from numba_gemm.kernels.ladder import STAGES
from numba_gemm.lab.harness.experiment import Unavailable
from numba_gemm.lab.harness.pictures import curves, panels
from numba_gemm.lab.memory import machine, movement
from numba_gemm.models.occupancy import LIMITS, occupancy
from numba_gemm.models.roofline import gemm_flops
from numba_gemm.runtime.driver import call
from numba_gemm.runtime.timing import Call, call_ms

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

SCALES = {"gb_s": 1e6, "tflop_s": 1e9}  # bytes or FLOP per millisecond


@machine.kernel("float32[::1], float32[::1]")
def copy(x: Any, out: Any) -> None:
    """Copy one element per thread."""
    i = cuda.grid(1)
    out[i] = x[i]


@machine.kernel("int64, int64, float32[::1], float32[::1]")
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


class Case(NamedTuple):
    """A kernel to run with every preference.

    A launch does `work` bytes or FLOP, and its blocks read a tile of `tile` bytes repeatedly, if not 0. It overwrites
    all of `out`, whose rows are checked, or one in `every` so many.
    """

    name: str
    enqueue: Call
    work: float
    occupancy: Occupancy
    out: Any
    expected: np.ndarray
    tile: int = 0
    every: int = 1
    unit: str = "gb_s"


def checked_ms(case: Case, percent: int, stream: int, rounds: int) -> float:
    """Return the milliseconds of a launch with a preference, after checking its result."""
    call(driver.cuMemsetD32Async, movement.address(case.out), NAN, case.out.size, stream)
    attribute = value = None
    if percent != NO_PREFERENCE:
        attribute, value = CARVE_OUT, driver.CUkernelNodeAttrValue()
        value.sharedMemCarveout = percent
    with movement.kernel_graph(case.enqueue, 1, stream, attribute, value) as graph:
        ms = call_ms(functools.partial(call, driver.cuGraphLaunch, graph), stream, rounds)
    assert np.array_equal(case.out.copy_to_host()[:: case.every], case.expected), f"{case.name}: the result is wrong"
    return ms


def predictions(case: Case, percent: int, default_ms: float) -> dict[str, Any]:
    """Return the predicted columns of a row; `default_ms` is the time without a preference."""
    found = case.occupancy
    if percent == NO_PREFERENCE:
        predicted = {"blocks": found.blocks, "ms": math.nan if case.tile else default_ms}
    else:
        shared = shared_size(percent, block_bytes(found), found.cc)
        l1, blocks = SPLITS[found.cc][0] * KIB - shared, blocks_in(shared, found)
        predicted = {"shared_kib": shared / KIB, "l1_kib": l1 / KIB, "blocks": blocks}
        limits, _ = machine.ceilings()
        read_ms = 1e3 * case.work / (limits.shared if case.tile <= l1 else limits.l2)
        predicted["ms"] = read_ms if case.tile else default_ms * found.blocks / blocks
    predicted[case.unit] = case.work / predicted["ms"] / SCALES[case.unit]
    return {f"predicted_{name}": value for name, value in predicted.items()}


def cases(
    elements: int, tiles: Sequence[int], block_reads: int, stages: Sequence[Any], size: int, cc: tuple[int, int]
) -> Iterator[Case]:
    """Yield a copy, repeated reads of each tile by one block per multiprocessor, and products by each stage."""
    values = np.arange(elements, dtype=np.float32) % 1000
    x, out = cuda.to_device(values), cuda.device_array(elements, np.float32)
    launch = machine.enqueue(copy, elements // COPY_BLOCK, COPY_BLOCK, x, out)
    yield Case("copy", launch, 2 * FLOAT32_BYTES * elements, occupancy(COPY_BLOCK, REGISTERS, 0, cc), out, values)
    blocks, found = machine.properties().sm_count, occupancy(REREAD_BLOCK, REGISTERS, 0, cc)
    for tile in tiles:
        words, turns = tile // FLOAT32_BYTES, block_reads // tile
        values = np.arange(blocks * words, dtype=np.float32) % 8  # sums are exact
        x, out = cuda.to_device(values), cuda.device_array(blocks * REREAD_BLOCK, np.float32)
        sums = turns * values.reshape(blocks, -1, REREAD_BLOCK).sum(axis=1).ravel()
        launch = machine.enqueue(reread, blocks, REREAD_BLOCK, turns, words, x, out)
        yield Case(f"reread {tile // KIB} KiB", launch, float(blocks * turns * tile), found, out, sums, tile)
    rng, work = np.random.default_rng(0), gemm_flops(size, size, size)
    a, b = (rng.integers(-4, 5, (size, size)).astype(np.float32) for _ in range(2))  # sums are exact
    operands, out = (cuda.to_device(a), cuda.to_device(b)), cuda.device_array((size, size), np.float32)
    every = max(1, size // 64) | 1  # rows in every tile, at varying positions
    expected = a[::every] @ b
    for stage in stages:

        def product(stream: int, stage: Any = stage, out: Any = out) -> None:
            tiled_sgemm(*operands, out, stage=stage, stream=stream)

        yield Case(stage, product, work, occupancy_of(stage), out, expected, every=every, unit="tflop_s")


def carve_out(
    elements: int = 1 << 26,
    tiles: Sequence[int] = (48 * KIB, 112 * KIB, 144 * KIB, 208 * KIB),
    block_reads: int = 1 << 26,
    stages: Sequence[str] = ("coalesced", "shared_tile", "double_buffered", "warp_tiled"),
    size: int = 4096,
    rounds: int = 5,
) -> Iterator[dict[str, Any]]:
    """Run kernels with every split of the multiprocessors' memory, and without a preference.

    One row per ``kernel`` ("copy", "reread 48 KiB" and so on, or a stage) and preference, ``percent`` (-1 for
    none): ``ms`` (median), ``gb_s`` or ``tflop_s``, and predicted sizes and blocks per multiprocessor.

    Parameters
    ----------
    elements: Floats to copy, a multiple of 256.
    tiles: Bytes that a block reads repeatedly, multiples of 16 KB.
    block_reads: Bytes that a block reads per launch, rounded down to whole tiles.
    stages: Stages of the ladder.
    size: M, N and K of the stages.
    """
    cc = machine.properties().cc
    if cc not in SPLITS:
        raise Unavailable(f"how compute capability {cc[0]}.{cc[1]} splits its memory is not known here")
    with movement.Scope() as scope:
        (stream,) = scope.streams()
        for case in cases(elements, tiles, block_reads, stages, size, cc):
            call(driver.cuCtxSynchronize)  # copies to the device may still be in progress
            case.enqueue(stream)  # compiles the kernel if needed, which is not possible during a capture
            movement.finish(stream)
            default_ms = 0.0
            for percent in (NO_PREFERENCE, *percentages(cc)):
                ms = checked_ms(case, percent, stream, rounds)
                default_ms = default_ms or ms
                row = {"kernel": case.name, "percent": percent, "tile_kib": case.tile / KIB or None, "ms": ms}
                row |= {unit: case.work / ms / scale if unit == case.unit else None for unit, scale in SCALES.items()}
                yield row | predictions(case, percent, default_ms)


def claims(frame: pd.DataFrame) -> dict[str, Any]:
    chosen = frame[frame["percent"] != NO_PREFERENCE]
    copied = frame[frame["kernel"] == "copy"]["ms"]
    tiles = chosen[chosen["tile_kib"].notna()]
    fits = tiles["tile_kib"] <= tiles["predicted_l1_kib"]
    far = tiles[tiles["tile_kib"] >= 2 * tiles["predicted_l1_kib"]]
    inside, outside = (tiles[where].groupby("kernel")["ms"] for where in (fits, ~fits))
    products = chosen[chosen["tflop_s"].notna()].groupby("kernel")
    fewer = products.obj[products.obj["predicted_blocks"] < products["predicted_blocks"].transform("max")]
    return {
        "a copy takes the same time under every split": copied.max() < 1.1 * copied.min(),
        "a tile that fits into what is left for L1 is read faster than where it does not": (
            (inside.max() < outside.min())[outside.min().index]
        ),
        "tiles of twice what is left and more are read at the L2 cache's pace or below": (
            far["ms"] > 0.9 * far["predicted_ms"]
        ),
        "a stage is slower where fewer of its blocks fit side by side": (
            fewer["ms"] > 1.03 * fewer["kernel"].map(products["ms"].min())
        ),
        "but it loses no more than the share of blocks that it lost": fewer["ms"] < 1.1 * fewer["predicted_ms"],
    }


PLOT = panels(
    curves("percent", "gb_s", "kernel", "percent >= 0 and gb_s == gb_s", title="a copy, and repeated reads"),
    curves("percent", "tflop_s", "kernel", "percent >= 0 and tflop_s == tflop_s", title="products"),
)
SMALL: dict[str, Any] = {"elements": 1 << 20, "tiles": (48 * KIB,), "block_reads": 1 << 20}
SMALL |= {"stages": ("shared_tile",), "size": 512, "rounds": 1}
ALLOWED: dict[str, Any] = {"elements": COPY_BLOCK, "tiles": 4 * FLOAT32_BYTES * REREAD_BLOCK, "stages": STAGES}
EXPERIMENT = machine.gpu_experiment(carve_out, "9.2", claims, PLOT, SMALL, [copy, reread], allowed=ALLOWED)
