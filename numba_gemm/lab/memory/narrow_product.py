"""A tile in shared memory is read from global memory once per block, instead of once per multiply-add."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numba import cuda, float32, uint32

from numba_gemm.device.units import FLOAT32_BYTES
from numba_gemm.lab.harness.pictures import bars, panels
from numba_gemm.lab.memory import machine
from numba_gemm.models.accesses import Access
from numba_gemm.models.requests import SECTOR_BYTES

W = 32  # K, and the sides of a block and of its tile of C
LINE_BYTES = 128
MATRICES = "float32[:, ::1], float32[:, ::1], float32[:, ::1]"


@machine.kernel(MATRICES)
def simple(a: Any, b: Any, c: Any) -> None:
    """Read a row of A and a column of B per thread from global memory."""
    row = cuda.blockIdx.y * cuda.blockDim.y + cuda.threadIdx.y
    col = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    acc = float32(0)
    for i in range(uint32(W)):
        acc += a[row, i] * b[i, col]
    c[row, col] = acc


def through_a(of_block: bool) -> Any:
    """Return a kernel that loads the tile of A once, coalesced; behind it is a barrier of the block, or of the warp."""

    @machine.kernel(MATRICES, "shared_a_syncthreads" if of_block else "shared_a")
    def shared_a(a: Any, b: Any, c: Any) -> None:
        a_tile = cuda.shared.array((W, W), float32)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        row = cuda.blockIdx.y * cuda.blockDim.y + y
        col = cuda.blockIdx.x * cuda.blockDim.x + x
        a_tile[y, x] = a[row, x]
        if of_block:
            cuda.syncthreads()  # stronger than needed
        else:
            cuda.syncwarp()  # row y of the tile is written by all lanes of this warp, and read by this warp only
        acc = float32(0)
        for i in range(uint32(W)):
            acc += a_tile[y, i] * b[i, col]
        c[row, col] = acc

    return shared_a


@machine.kernel(MATRICES)
def shared_ab(a: Any, b: Any, c: Any) -> None:
    """Load both tiles once, and then read them from shared memory."""
    a_tile = cuda.shared.array((W, W), float32)
    b_tile = cuda.shared.array((W, W), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    row = cuda.blockIdx.y * cuda.blockDim.y + y
    col = cuda.blockIdx.x * cuda.blockDim.x + x
    a_tile[y, x] = a[row, x]
    b_tile[y, x] = b[y, col]
    cuda.syncthreads()  # each row of b_tile is written by one warp and read by all
    acc = float32(0)
    for i in range(uint32(W)):
        acc += a_tile[y, i] * b_tile[i, x]
    c[row, col] = acc


Accesses = Sequence[tuple[str, int, int]]
KERNELS: dict[str, Any] = {"simple": simple, "shared_a": through_a(of_block=False), "shared_ab": shared_ab}
ACCESSES: dict[str, Accesses] = {
    "simple": [("global", 0, W), ("global", 1, W + 1)],
    "shared_a": [("global", 1, W + 2), ("store", 1, 1), ("load", 0, W)],
    "shared_ab": [("global", 1, 3), ("store", 1, 2), ("load", 0, W), ("load", 1, W)],
}
"""Requests of a warp by kernel: to global memory, or loads and stores of shared memory; the distance of neighbouring
lanes in floats; and their number."""


def cost(accesses: Accesses) -> dict[str, int]:
    """Sectors of global memory, wavefronts of shared memory, and passes through their common data path, per warp."""
    requests = [
        (times, Access(what, 1, tuple(apart * lane for lane in range(W)), 1)) for what, apart, times in accesses
    ]
    return {
        "global_sectors": sum(times * each.sectors for times, each in requests if each.what == "global"),
        "shared_wavefronts": sum(times * each.passes for times, each in requests if each.what != "global"),
        "passes": sum(times * each.passes for times, each in requests),
    }


def bounds(m: int, n: int, found: Mapping[str, int], least: int) -> tuple[float, float]:
    """Lower bounds in microseconds for C of m x n, if all repeated requests hit L1 and if none does.

    `found` is a result of `cost`, `least` the bytes of A, B and C.
    """
    ceilings, _ = machine.ceilings()
    warps = m * n / W
    shared = warps * found["passes"] * LINE_BYTES / ceilings.shared
    always = max(least / ceilings.dram, 2 * m * n * W / ceilings.fp32, shared)
    once = 3 * W * W * FLOAT32_BYTES * (m * n / W**2)  # two tiles to each block, one from it
    each = warps * found["global_sectors"] * SECTOR_BYTES
    return 1e6 * max(always, once / ceilings.l2), 1e6 * max(always, each / ceilings.l2)


def compare(
    kernels: Mapping[str, Any],
    accesses: Mapping[str, Accesses],
    operands: Sequence[np.ndarray],
    expected: np.ndarray,
    rounds: int,
) -> pd.DataFrame:
    """Check and time kernels that compute the same C of integers."""
    (m, n), moved = expected.shape, expected.nbytes + sum(operand.nbytes for operand in operands)
    c, on_device = cuda.device_array((m, n), np.float32), [cuda.to_device(operand) for operand in operands]
    grid, block = (n // W, m // W), (W, W)
    calls = {name: machine.enqueue(kernel, grid, block, *on_device, c) for name, kernel in kernels.items()}
    rows = []
    for name, us in machine.checked_us(calls, c, expected, rounds).items():
        counts = cost(accesses[name])
        hits, misses = bounds(m, n, counts, moved)
        row = {"kernel": name, "m": m, "n": n} | {f"{what}_a_warp": count for what, count in counts.items()}
        row |= {"moved_mb": moved / 1e6, "us": us, "gb_s": moved / us / 1e3}
        row |= {"predicted_by_hits_gb_s": moved / hits / 1e3, "predicted_by_misses_gb_s": moved / misses / 1e3}
        rows.append(row)
    return pd.DataFrame(rows)


def integers(rows: int, cols: int, seed: int) -> np.ndarray:
    """Draw small integers, whose products have exact sums in any order."""
    return np.random.default_rng(seed).integers(-8, 9, (rows, cols)).astype(np.float32)


def narrow_product(m: int = 8192, n: int = 8192, rounds: int = machine.ROUNDS) -> pd.DataFrame:
    """Multiply an m x 32 matrix by a 32 x n one with each kernel.

    One row per kernel: per warp, ``global_sectors_a_warp`` requested, ``shared_wavefronts_a_warp`` and
    ``passes_a_warp`` through the data path that L1 and shared memory share; ``gb_s`` (effective bandwidth) of
    ``moved_mb`` (each element of A, B and C once), and its bounds.

    Parameters
    ----------
    m, n: Multiples of 32.
    """
    a, b = integers(m, W, 0), integers(W, n, 1)
    return compare(KERNELS, ACCESSES, (a, b), a @ b, rounds)


def claims(frame: pd.DataFrame) -> dict[str, Any]:
    at = frame.set_index("kernel")
    sectors, passes, gb_s = at["global_sectors_a_warp"], at["passes_a_warp"], at["gb_s"]
    hits, misses = at["predicted_by_hits_gb_s"], at["predicted_by_misses_gb_s"]
    return {
        "a warp asks for 164, 136 and 12 sectors": list(sectors[list(KERNELS)]) == [164, 136, 12],
        "the passes through L1 and shared memory differ by less than a tenth": passes.max() < 1.1 * passes.min(),
        "both tiles in shared memory are faster than none": gb_s["shared_ab"] > gb_s["simple"],
        "the tile of A alone gains less than a tenth": gb_s["shared_a"] < 1.1 * gb_s["simple"],
        "both tiles reach nine tenths of what they would if L1 always hit, the others do not": (
            (gb_s > 0.9 * hits) == (at.index == "shared_ab")
        ),
        "no kernel is faster than if L1 always hit, to a twentieth": gb_s < 1.05 * hits,
        "every kernel is faster than if L1 never hit, or at most a fifth slower": gb_s > 0.8 * misses,
    }


PLOT = panels(
    bars("gb_s", ["kernel"], xlabel="effective bandwidth in GB/s"),
    bars("global_sectors_a_warp", ["kernel"], said="counted", xlabel="global sectors per warp"),
    bars("passes_a_warp", ["kernel"], said="counted", xlabel="shared-memory passes per warp"),
)
SMALL = {"m": 64, "n": 32, "rounds": 1}
ALLOWED = {"m": W, "n": W}
EXPERIMENT = machine.experiment(narrow_product, "9.2.3.2", claims, PLOT, SMALL, KERNELS.values(), allowed=ALLOWED)
