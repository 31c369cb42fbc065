"""Shared memory turns a strided read into a coalesced one, and padding a tile removes its bank conflicts.

C = A A^T, where A has 32 columns, by blocks of 32 x 32 threads, with one element of C per thread. For neighbouring
elements in a row of C, the transposed operand's elements come from different rows of A, 128 bytes apart. Three kernels:

- `strided` reads them directly: at each of 32 steps a warp touches 32 sectors, in 32 lines.
- `coalesced` reads rows of A, 4 sectors per warp, and writes each as a column of a tile of 32 x 32 floats in shared
  memory, whose rows it then reads. A column lies in one bank: its 32 floats take 32 wavefronts.
- `padded` is the same, except that the rows of the tile have an unused 33rd float. A column now lies in 32 banks, and
  takes one wavefront.

The guide's table reports 12.8, 140.2 and 199.4 GB/s on a V100 for them, as no optimization, coalesced through shared
memory and without bank conflicts.

The predictions are those of `narrow_product`, here with 4 (M K + M M) bytes: a request takes one pass through the data
path of L1 and shared memory per line of global memory that it touches, and per wavefront, at the ceiling of 128 bytes
per clock. A warp takes 1057, 100 and 69 passes, which exceeds everything else, whether L1 hits or misses. So the three
speeds should be as 1 to 10.6 to 15.3; on the guide's V100 they were as 1 to 11.0 to 15.6.

The measured bandwidth of `strided` and `padded` stays below the prediction by the time that passes do not hide: from a
block's loads through its barrier to its stores, with two blocks per multiprocessor. It is smallest for `strided`, which
has the most passes. `coalesced` is faster than predicted, by about 7 % on an H200, as if a store with conflicts took
about 25 wavefronts instead of 32; its machine code has the 64 loads and 2 stores that are counted. That is not
explained.

Source: CUDA C++ Best Practices Guide, "Shared Memory in Matrix Multiplication (C=AA^T)"; CUDA C++ Programming Guide,
"Shared Memory", compute capability 5.x.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numba import cuda, float32, uint32

from numba_gemm.device.units import FLOAT32_BYTES
from numba_gemm.lab.harness.command import UsageError
from numba_gemm.lab.harness.experiment import Experiment
from numba_gemm.lab.memory import machine
from numba_gemm.lab.memory.drawing import COLOURS, bars
from numba_gemm.lab.memory.narrow_product import LANES, W, access, compare, cost, integers
from numba_gemm.models.accesses import Access

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@cuda.jit
def strided(a: Any, c: Any) -> None:
    """Read two rows of A per thread; the second one differs between the lanes of a warp."""
    row = cuda.blockIdx.y * cuda.blockDim.y + cuda.threadIdx.y
    col = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    acc = float32(0)
    for i in range(uint32(W)):
        acc += a[row, i] * a[col, i]
    c[row, col] = acc


def through_shared(width: int) -> Any:
    """Return a kernel that reads rows of A coalesced, and transposes them into a tile with rows of this width."""

    @cuda.jit
    def through_shared(a: Any, c: Any) -> None:
        a_tile = cuda.shared.array((W, W), float32)
        transposed_tile = cuda.shared.array((W, width), float32)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        row = cuda.blockIdx.y * cuda.blockDim.y + y
        col = cuda.blockIdx.x * cuda.blockDim.x + x
        a_tile[y, x] = a[row, x]
        transposed_tile[x, y] = a[cuda.blockIdx.x * cuda.blockDim.x + y, x]
        cuda.syncthreads()  # each column of transposed_tile is written by one warp and read by all
        acc = float32(0)
        for i in range(uint32(W)):
            acc += a_tile[y, i] * transposed_tile[i, x]
        c[row, col] = acc

    return through_shared


WIDTHS = {"coalesced": W, "padded": W + 1}  # row width of the transposed tile
KERNELS: dict[str, Any] = {"strided": strided, **{name: through_shared(width) for name, width in WIDTHS.items()}}


def accesses(kernel: str, m: int) -> Iterator[Access]:
    """Yield the accesses of warp y = 1 of block (0, 0), with the kernel's indices."""
    x, y = LANES, 1
    if kernel == "strided":
        for i in range(W):
            yield access("global", y * W + i + 0 * x)
            yield access("global", x * W + i)
    else:
        width = WIDTHS[kernel]
        yield access("global", y * W + x)
        yield access("store", y * W + x)
        yield access("global", y * W + x)
        yield access("store", x * width + y)
        for i in range(W):
            yield access("load", y * W + i + 0 * x)
            yield access("load", i * width + x)
    yield access("global", y * m + x)


def product_with_transpose(m: int = 8192, rounds: int = machine.ROUNDS) -> pd.DataFrame:
    """Multiply an m x 32 matrix by its transpose with each kernel.

    Parameters
    ----------
    m : int
        Multiple of 32.
    rounds : int
        Samples of each measurement.

    Returns
    -------
    DataFrame
        One row per kernel, with the columns of `narrow_product`; A counts once in ``moved_mb``.

    Raises
    ------
    ValueError
        for another extent.
    AssertionError
        if a result is wrong.
    """
    if m < W or m % W:
        raise UsageError(f"m is {m}; expected a multiple of {W}")
    host = integers(m, W, 0)
    a, c = cuda.to_device(host), cuda.device_array((m, m), np.float32)
    calls = {name: machine.enqueue(kernel, (m // W, m // W), (W, W), a, c) for name, kernel in KERNELS.items()}
    costs = {name: cost(accesses(name, m)) for name in KERNELS}
    return compare(calls, costs, c, host @ host.T, FLOAT32_BYTES * (m * W + m * m), rounds)


def plot(frame: pd.DataFrame, figure: Figure) -> None:
    """Plot bandwidth by kernel, and the passes of a warp."""
    left, right = figure.subplots(1, 2, width_ratios=[3, 2], sharey=True)
    names, places = list(frame["kernel"]), range(len(frame))
    bars(left, names, frame["gb_s"], frame["predicted_by_hits_gb_s"])
    left.set(xlabel="effective bandwidth in GB/s", xlim=(0, 1.1 * frame["predicted_by_hits_gb_s"].max()))
    label(left, frame["gb_s"], "{:.0f}")
    right.barh(places, frame["passes_a_warp"], height=0.6, color=COLOURS[3])
    label(right, frame["passes_a_warp"], "{:.0f}")
    right.set(xlabel="passes a warp, L1 and shared", xscale="log", xlim=(10, 3000))


def label(axes: Any, values: pd.Series[float], form: str) -> None:
    """Write each value at the base of its bar."""
    for place, value in enumerate(values):
        axes.annotate(
            form.format(value), (0, place), (6, 0), xycoords=("axes fraction", "data"), textcoords="offset points"
        )


def claims(frame: pd.DataFrame) -> dict[str, bool]:
    """Check the statements of the module's docstring against a result."""
    at = frame.set_index("kernel")
    passes, gb_s = at["passes_a_warp"], at["gb_s"]
    return {
        "a warp takes 1057, 100 and 69 passes": list(passes[list(KERNELS)]) == [1057, 100, 69],
        "coalesced reads are more than five times as fast as strided ones": bool(
            gb_s["coalesced"] > 5 * gb_s["strided"]
        ),
        "without bank conflicts the same is faster by more than a tenth": bool(
            gb_s["padded"] > 1.1 * gb_s["coalesced"]
        ),
        "no kernel is faster than its passes allow, to a tenth": bool(
            (gb_s < 1.1 * at["predicted_by_hits_gb_s"]).all()
        ),
        "every kernel reaches more than half of what its passes allow": bool(
            (gb_s > at["predicted_by_hits_gb_s"] / 2).all()
        ),
    }


EXPERIMENT = Experiment(
    name="product_with_transpose",
    section="9.2.3.3",
    run=product_with_transpose,
    plot=plot,
    claims=claims,
    facts=machine.facts,
    small={"m": 64, "rounds": 1},
    kernels={name: (kernel, "float32[:, ::1], float32[:, ::1]") for name, kernel in KERNELS.items()},
)
