"""A tile in shared memory is read from global memory once per block, instead of once per multiply-add.

C = A B, where A has 32 columns and B 32 rows. A block of 32 x 32 threads computes a tile of C, one element per thread.
In the first of three kernels, each thread reads its row of A and its column of B from global memory; in the second, the
tile of A goes through shared memory; in the third, both tiles do. A warp requests from global memory

| kernel      | sectors of 32 bytes                                       | requests |
|-------------|-----------------------------------------------------------|----------|
| `simple`    | 32 x (1 of A, of which one float is used, and 4 of B)     | 64 loads |
| `shared_a`  | 4 of A, 32 x 4 of B                                       | 33 loads |
| `shared_ab` | 4 of A, 4 of B                                            | 2 loads  |

and stores 4 sectors of C in each.

Threads of a block are numbered by threadIdx.x first: threads 0 to 31 have threadIdx.y = 0, threads 32 to 63 have 1, and
so on. Since the block is 32 wide, a warp is exactly one row of the tile: it has one `y`, and `x` is its lane. So in
`shared_a` a warp reads only the row of the tile that it has written itself, and `syncwarp` suffices as a barrier. In
`shared_ab` a warp reads all of the tile of B, written by all warps, which requires `syncthreads`.

The guide calls the three "no optimization", "coalesced using shared memory to store a tile of A" and "using shared
memory to eliminate redundant reads of a tile of B", and reports 119.9, 144.4 and 195.5 GB/s on a V100.

Effective bandwidth is that of 4 (M K + K N + M N) bytes, with each element of A, B and C moved once. Two predictions
bound it. For `predicted_by_hits`, all repeated requests hit L1: tiles come from L2 once per block, and all requests go
through the data path that L1 and shared memory share, with one pass per 128-byte line of global memory and per
wavefront of shared memory, at the ceiling of 128 bytes per clock. This is nearly the same for the three, 65, 67 and 69
passes per warp: shared memory takes no fewer passes than an L1 cache that hits. For `predicted_by_misses`, L1 holds
nothing, and every sector comes from L2. Both include the transfer of C to device memory and the multiply-adds; the
slowest part decides.

So the gain of both tiles in shared memory is not fewer bytes, but that shared memory cannot miss. On an H200 all
kernels lie between their bounds, or about 4 % below the single bound:

| kernel      | effective GB/s | by misses, by hits | of hits |
|-------------|----------------|--------------------|---------|
| `simple`    | 410            | 230, 511           | 80 %    |
| `shared_a`  | 377            | 277, 496           | 76 %    |
| `shared_ab` | 463            | 482, 482           | 96 %    |

The order differs from the guide's. The tile of A alone is about 8 % slower than none, where the guide gains 20 %; both
tiles gain about 13 % instead of 63. The number of passes explains part of the first: the tile saves none, since each
load of A becomes one of shared memory, and costs two more, 3 %. The two kernels that read B through L1 throughout are
about 20 and 24 % below the bound of their hits, and `shared_ab` is not. Misses would explain that; their number is not
measured.

Source: CUDA C++ Best Practices Guide, "Shared Memory in Matrix Multiplication (C=AB)" and "Effective Bandwidth
Calculation"; CUDA C++ Programming Guide, "Thread Hierarchy".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numba import cuda, float32, uint32

from numba_gemm.device.units import FLOAT32_BYTES
from numba_gemm.lab.harness.command import UsageError
from numba_gemm.lab.harness.experiment import Experiment
from numba_gemm.lab.memory import machine
from numba_gemm.lab.memory.drawing import COLOURS, bars
from numba_gemm.models.accesses import Access
from numba_gemm.models.requests import SECTOR_BYTES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

W = 32  # K, and the sides of a block and of its tile of C
ITEM, LINE_BYTES = 4, 128
LANES = np.arange(W)


@cuda.jit
def simple(a: Any, b: Any, c: Any) -> None:
    """Read a row of A and a column of B per thread from global memory."""
    row = cuda.blockIdx.y * cuda.blockDim.y + cuda.threadIdx.y
    col = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    acc = float32(0)
    for i in range(uint32(W)):
        acc += a[row, i] * b[i, col]
    c[row, col] = acc


@cuda.jit
def shared_a(a: Any, b: Any, c: Any) -> None:
    """Load the tile of A once, coalesced, and then read it from shared memory."""
    a_tile = cuda.shared.array((W, W), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    row = cuda.blockIdx.y * cuda.blockDim.y + y
    col = cuda.blockIdx.x * cuda.blockDim.x + x
    a_tile[y, x] = a[row, x]
    cuda.syncwarp()  # row y of the tile is written by all lanes of this warp, and read by this warp only
    acc = float32(0)
    for i in range(uint32(W)):
        acc += a_tile[y, i] * b[i, col]
    c[row, col] = acc


@cuda.jit
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


KERNELS: dict[str, Any] = {"simple": simple, "shared_a": shared_a, "shared_ab": shared_ab}
COPIES = {"simple": 0, "shared_a": 1, "shared_ab": 2}  # tiles that a block copies to shared memory


def accesses(kernel: str, n: int) -> Iterator[Access]:
    """Yield the accesses of warp y = 1 of block (0, 0), with the kernel's indices; rows of B and C have n floats."""
    x, y = LANES, 1
    tiled_a, tiled_b = COPIES[kernel] >= 1, COPIES[kernel] >= 2
    if tiled_a:
        yield access("global", y * W + x)
        yield access("store", y * W + x)
    if tiled_b:
        yield access("global", y * n + x)
        yield access("store", y * W + x)
    for i in range(W):
        yield access("load" if tiled_a else "global", y * W + i + 0 * x)
        yield access("load" if tiled_b else "global", i * (W if tiled_b else n) + x)
    yield access("global", y * n + x)


def access(what: str, places: np.ndarray[Any, Any]) -> Access:
    """One request of a warp with one float per lane, to global memory or as a load or store of shared memory."""
    return Access(what, 1, tuple(places.tolist()), 1)


def cost(found: Iterator[Access]) -> dict[str, int]:
    """Sectors of global memory, wavefronts of shared memory, and passes through their common data path, per warp."""
    requests = list(found)
    return {
        "global_sectors": sum(request.sectors for request in requests if request.what == "global"),
        "shared_wavefronts": sum(request.passes for request in requests if request.what != "global"),
        "passes": sum(request.passes for request in requests),
    }


def bounds(m: int, n: int, found: Mapping[str, int], least: int) -> tuple[float, float]:
    """Lower bounds in microseconds, if all repeated requests hit L1 and if none does.

    Parameters
    ----------
    m, n : int
        Extents of C.
    found : mapping
        Result of `cost`.
    least : int
        Bytes of A, B and C.
    """
    ceilings, _ = machine.ceilings()
    warps = m * n / W
    always = max(
        least / ceilings.dram,
        2 * m * n * W / ceilings.fp32,
        warps * found["passes"] * LINE_BYTES / ceilings.shared,
    )
    once = 3 * W * W * FLOAT32_BYTES * (m * n / W**2)  # two tiles to each block, one from it
    return (
        1e6 * max(always, once / ceilings.l2),
        1e6 * max(always, warps * found["global_sectors"] * SECTOR_BYTES / ceilings.l2),
    )


def compare(
    calls: Mapping[str, Callable[[int], None]],
    costs: Mapping[str, dict[str, int]],
    c: Any,
    expected: np.ndarray[Any, Any],
    moved: int,
    rounds: int,
) -> pd.DataFrame:
    """Check and time kernels that compute the same C of integers; the columns are those of `narrow_product`."""
    m, n = expected.shape
    for name, enqueued in calls.items():
        c.copy_to_device(np.full((m, n), np.nan, np.float32))
        enqueued(0)
        np.testing.assert_array_equal(c.copy_to_host(), expected, err_msg=name)
    samples = machine.timed(calls, rounds=rounds)
    rows = []
    for name in calls:
        hits, misses = bounds(m, n, costs[name], moved)
        rows.append(
            {
                "kernel": name,
                "m": m,
                "n": n,
                **{f"{what}_a_warp": count for what, count in costs[name].items()},
                "moved_mb": moved / 1e6,
                "us": samples[name].median,
                "gb_s": moved / samples[name].median / 1e3,
                "predicted_by_hits_gb_s": moved / hits / 1e3,
                "predicted_by_misses_gb_s": moved / misses / 1e3,
            }
        )
    return pd.DataFrame(rows)


def integers(rows: int, cols: int, seed: int) -> np.ndarray[Any, Any]:
    """Draw small integers, whose products have exact sums in any order."""
    return np.random.default_rng(seed).integers(-8, 9, (rows, cols)).astype(np.float32)


def narrow_product(m: int = 8192, n: int = 8192, rounds: int = machine.ROUNDS) -> pd.DataFrame:
    """Multiply an m x 32 matrix by a 32 x n one with each kernel.

    Parameters
    ----------
    m, n : int
        Multiples of 32.
    rounds : int
        Samples of each measurement.

    Returns
    -------
    DataFrame
        One row per kernel: ``kernel``, ``m``, ``n``; per warp, ``global_sectors_a_warp`` requested,
        ``shared_wavefronts_a_warp`` and ``passes_a_warp`` through the data path that L1 and shared memory share;
        ``moved_mb`` (each element of A, B and C once), ``us`` (median), ``gb_s`` (effective bandwidth), and its bounds:
        ``predicted_by_hits_gb_s`` and ``predicted_by_misses_gb_s``, if all repeated requests hit L1, and if none does.

    Raises
    ------
    ValueError
        for other extents.
    AssertionError
        if a result is wrong.
    """
    if m < W or n < W or m % W or n % W:
        raise UsageError(f"m and n are {m} and {n}; expected multiples of {W}")
    host_a, host_b = integers(m, W, 0), integers(W, n, 1)
    a, b, c = cuda.to_device(host_a), cuda.to_device(host_b), cuda.device_array((m, n), np.float32)
    calls = {name: machine.enqueue(kernel, (n // W, m // W), (W, W), a, b, c) for name, kernel in KERNELS.items()}
    costs = {name: cost(accesses(name, n)) for name in KERNELS}
    return compare(calls, costs, c, host_a @ host_b, FLOAT32_BYTES * (m * W + W * n + m * n), rounds)


def plot(frame: pd.DataFrame, figure: Figure) -> None:
    """Plot bandwidth by kernel with its bounds, and the requests per warp."""
    left, right = figure.subplots(1, 2, width_ratios=[3, 2], sharey=True)
    names, places = list(frame["kernel"]), range(len(frame))
    bars(left, names, frame["gb_s"], None)
    left.hlines(
        places,
        frame["predicted_by_misses_gb_s"],
        frame["predicted_by_hits_gb_s"],
        color=COLOURS[1],
        linestyle="--",
        label="predicted: L1 misses to L1 hits",
    )
    for column in ("predicted_by_misses_gb_s", "predicted_by_hits_gb_s"):
        left.plot(frame[column], places, linestyle="none", marker="|", markersize=16, color=COLOURS[1])
    left.set(xlabel="effective bandwidth in GB/s")
    left.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    right.barh([place - 0.2 for place in places], frame["global_sectors_a_warp"], height=0.4, color=COLOURS[2])
    right.barh([place + 0.2 for place in places], frame["passes_a_warp"], height=0.4, color=COLOURS[3])
    right.legend(["global sectors", "passes, L1 and shared"], loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    right.set(xlabel="a warp")


def claims(frame: pd.DataFrame) -> dict[str, bool]:
    """Check the statements of the module's docstring against a result."""
    at = frame.set_index("kernel")
    sectors, passes, gb_s = at["global_sectors_a_warp"], at["passes_a_warp"], at["gb_s"]
    return {
        "a warp asks for 164, 136 and 12 sectors": list(sectors[list(KERNELS)]) == [164, 136, 12],
        "the passes through L1 and shared memory differ by less than a tenth": bool(passes.max() < 1.1 * passes.min()),
        "both tiles in shared memory are faster than none": bool(gb_s["shared_ab"] > gb_s["simple"]),
        "the tile of A alone gains less than a tenth": bool(gb_s["shared_a"] < 1.1 * gb_s["simple"]),
        "both tiles reach nine tenths of what they would if L1 always hit, the others do not": bool(
            ((gb_s > 0.9 * at["predicted_by_hits_gb_s"]) == (at.index == "shared_ab")).all()
        ),
        "no kernel is faster than if L1 always hit, to a twentieth": bool(
            (gb_s < 1.05 * at["predicted_by_hits_gb_s"]).all()
        ),
        "every kernel is faster than if L1 never hit, or at most a fifth slower": bool(
            (gb_s > 0.8 * at["predicted_by_misses_gb_s"]).all()
        ),
    }


EXPERIMENT = Experiment(
    name="narrow_product",
    section="9.2.3.2",
    run=narrow_product,
    plot=plot,
    claims=claims,
    facts=machine.facts,
    small={"m": 64, "n": 32, "rounds": 1},
    kernels={name: (kernel, "float32[:, ::1], float32[:, ::1], float32[:, ::1]") for name, kernel in KERNELS.items()},
)
