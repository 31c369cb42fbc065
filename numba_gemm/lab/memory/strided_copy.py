"""A strided copy pays for whole sectors: half is wasted at stride 2, seven eighths from stride 8 on.

Each thread copies one float, `stride` floats from its neighbour's; all copies move the same number of floats. At stride
1, a warp touches 4 sectors of 32 bytes for reading and for writing. At stride 2 it touches 8 and needs half of their
bytes, and from stride 8 on 32, one per float, and needs an eighth of their bytes. Predicted from sectors, the useful
bandwidth is that of stride 1 times the ratio of the sectors of stride 1 to those of the stride: a hyperbola that is
flat from stride 8 on.

A second prediction assumes that device memory moves more than the requested sectors. L2 may fetch more than one sector
at once (`fetch_bytes`, the driver's limit, a hint): with 64 bytes, neighbours share fetches up to stride 16 instead of
8. And a stride above 1 writes parts of sectors, whose other parts may have to be read before they can be written back.
The prediction counts the bytes of the fetches that the loads touch, of those that complete partially written sectors,
and of these sectors.

On an H200 the measured curve has three parts:

- From stride 2 to 8 it is a hyperbola, about an eighth above the prediction from sectors. At each of these strides,
  nearly 3 TB/s of sectors are read and written; the prediction starts from stride 1, with only about 2.6. That is
  little more than half of device memory's theoretical bandwidth: one float per thread is too little work to saturate
  it, and larger strides request more bytes with as many instructions.
- It continues to fall where the prediction from sectors is flat, crosses it near stride 10, and is below it by a fifth
  at stride 16 and by nearly half at 32. That is not explained. With fetches of 64 bytes the fall would end at stride
  16. Each page of device memory that is opened, and each address translation, serves fewer floats at larger strides,
  but neither is measured here.
- At no stride above 1 is it as low as the prediction from fetches, but about 1.3 to 2 times as high. From about stride
  11 to 20, the bytes of that prediction would exceed the theoretical 4.8 TB/s of device memory: not all of them move.

No cache can help, as it does for a misaligned copy: nothing requests the rest of a sector before it is evicted.

Source: CUDA C++ Best Practices Guide, "Strided Accesses"; CUDA Driver API, `CU_LIMIT_MAX_L2_FETCH_GRANULARITY`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from cuda.bindings import driver
from numba import cuda

from numba_gemm.device.units import FLOAT32_BYTES, WARP, ceil_div
from numba_gemm.lab.harness.experiment import Experiment
from numba_gemm.lab.memory import machine
from numba_gemm.lab.memory.drawing import curve
from numba_gemm.models import requests
from numba_gemm.runtime.driver import call
from numba_gemm.runtime.timing import Call

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLOCK = 256
PERIOD = 1 << 20  # of the values, all of which are exact in float32
CHECKED = 1 << 12  # floats that are checked at either end of a copy


@cuda.jit
def stride_copy(odata: Any, idata: Any, stride: Any) -> None:
    """Copy one element per thread; the arrays have `stride` times as many elements as there are threads."""
    x = cuda.grid(1) * stride
    odata[x] = idata[x]


@cuda.jit
def number(array: Any) -> None:
    """Write each element's index modulo `PERIOD`."""
    x = cuda.grid(1)
    if x < array.size:
        array[x] = x % PERIOD


def sectors_a_warp(stride: int) -> int:
    """Sectors that a warp requests, for reading or for writing."""
    return requests.sectors(((lane, FLOAT32_BYTES * lane * stride) for lane in range(WARP)), FLOAT32_BYTES)


def moved_a_warp(stride: int, fetch_bytes: int) -> int:
    """Bytes that device memory moves for a warp, if it is read in whole fetches and written in whole sectors."""
    fetched = fetch_bytes * len({FLOAT32_BYTES * lane * stride // fetch_bytes for lane in range(WARP)})
    written = requests.SECTOR_BYTES * sectors_a_warp(stride)
    completed = fetched if written > FLOAT32_BYTES * WARP else 0  # partially written sectors must also be read
    return fetched + completed + written


def fetch_granularity() -> int:
    """Bytes that L2 fetches at once, according to the driver's limit; 64 in the simulator."""
    if machine.SIMULATOR:
        return 64
    with machine.in_context():
        limit = int(call(driver.cuCtxGetLimit, driver.CUlimit.CU_LIMIT_MAX_L2_FETCH_GRANULARITY))
    return max(limit, requests.SECTOR_BYTES)


def check(copy: Call, odata: Any, stride: int, elements: int) -> None:
    """Raise AssertionError unless a copy is correct at both ends of the array and writes nothing in between."""
    floats = min(CHECKED, elements) * stride
    ends = [odata[begin : begin + floats] for begin in (0, elements * stride - floats)]
    for end in ends:
        end.copy_to_device(np.full(floats, -1, np.float32))
    copy(0)
    for end, begin in zip(ends, (0, elements * stride - floats), strict=True):
        places = np.arange(begin, begin + floats)
        expected = np.where(places % stride == 0, places % PERIOD, -1).astype(np.float32)
        np.testing.assert_array_equal(end.copy_to_host(), expected)


def strided_copy(
    strides: Sequence[int] = range(1, 33),
    elements: int = 1 << 25,
    rounds: int = machine.ROUNDS,
) -> pd.DataFrame:
    """Copy the same number of floats with each stride.

    Parameters
    ----------
    strides : sequence of int
        Strides in elements, 1 or more. Must include 1, from which the others are predicted.
    elements : int
        Floats to copy, a multiple of `BLOCK`. The arrays have this size times the largest stride.
    rounds : int
        Samples of each measurement.

    Returns
    -------
    DataFrame
        One row per stride: ``stride``, ``sectors`` that a warp requests for reading, or for writing, ``efficiency``
        (needed bytes over those of these sectors), ``fetch_bytes`` that L2 fetches at once, ``us`` (median), ``gb_s``
        (needed bytes, read and written), ``predicted_by_sectors_gb_s`` and ``predicted_by_fetches_gb_s``: the bandwidth
        of stride 1, scaled by the sectors requested, and by the bytes that device memory moves if it fetches and
        completes sectors.

    Raises
    ------
    AssertionError
        if a copy is wrong.
    """
    chosen = list(dict.fromkeys([1, *strides]))
    room = elements * max(chosen)
    idata, odata = cuda.device_array(room, np.float32), cuda.device_array(room, np.float32)
    machine.enqueue(number, ceil_div(room, BLOCK), BLOCK, idata)(0)
    calls = {}
    for stride in chosen:
        calls[stride] = machine.enqueue(stride_copy, elements // BLOCK, BLOCK, odata, idata, stride)
        check(calls[stride], odata, stride, elements)
    samples = machine.timed(calls, rounds=rounds)
    fetch_bytes = fetch_granularity()
    best = 2 * FLOAT32_BYTES * elements / samples[1].median / 1e3
    rows = [
        {
            "stride": stride,
            "sectors": sectors_a_warp(stride),
            "efficiency": FLOAT32_BYTES * WARP / (requests.SECTOR_BYTES * sectors_a_warp(stride)),
            "fetch_bytes": fetch_bytes,
            "us": samples[stride].median,
            "gb_s": 2 * FLOAT32_BYTES * elements / samples[stride].median / 1e3,
            "predicted_by_sectors_gb_s": best * sectors_a_warp(1) / sectors_a_warp(stride),
            "predicted_by_fetches_gb_s": best * moved_a_warp(1, fetch_bytes) / moved_a_warp(stride, fetch_bytes),
        }
        for stride in chosen
    ]
    return pd.DataFrame(rows)


def plot(frame: pd.DataFrame, figure: Figure) -> None:
    """Plot bandwidth against stride."""
    axes = figure.subplots()
    by = frame.sort_values("stride")
    curve(axes, by["stride"], by["gb_s"], by["predicted_by_sectors_gb_s"], "measured", 0)
    axes.lines[-1].set_label("predicted by sectors")
    axes.plot(
        by["stride"],
        by["predicted_by_fetches_gb_s"],
        color="0.4",
        linestyle=":",
        label=f"predicted by fetches of {by['fetch_bytes'].iloc[0]} bytes, and sectors completed",
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    axes.set(xlabel="stride in floats", ylabel="GB/s of floats copied, read and written", yscale="log")
    axes.legend()


def claims(frame: pd.DataFrame) -> dict[str, bool]:
    """Check the statements of the module's docstring against a result."""
    at = frame.set_index("stride").sort_index()
    gb_s, by_sectors = at["gb_s"], at["predicted_by_sectors_gb_s"]
    return {
        "a warp asks for 4 sectors more with each step of the stride, until 32 at stride 8": bool(
            (at["sectors"] == np.minimum(4 * at.index, 32)).all()
        ),
        "the bandwidth falls at each of the strides 1, 2, 4 and 8": bool(gb_s[1] > gb_s[2] > gb_s[4] > gb_s[8]),
        "from stride 8 on, less than a quarter of the bandwidth is left": bool((gb_s.loc[8:] < gb_s[1] / 4).all()),
        "up to stride 8, it is what sectors predict, to a fifth": bool(
            ((gb_s.loc[:8] / by_sectors.loc[:8] - 1).abs() < 0.2).all()
        ),
        "at stride 32, it is less than three quarters of that": bool(gb_s[32] < 0.75 * by_sectors[32]),
        "at no stride above 1 is it as low as by fetches and sectors completed": bool(
            (gb_s.loc[2:] > 1.05 * at["predicted_by_fetches_gb_s"].loc[2:]).all()
        ),
    }


EXPERIMENT = Experiment(
    name="strided_copy",
    section="9.2.1.4",
    run=strided_copy,
    plot=plot,
    claims=claims,
    facts=machine.facts,
    small={"strides": (1, 2, 8, 32), "elements": 256, "rounds": 1},
    kernels={
        "stride_copy": (stride_copy, "float32[::1], float32[::1], int64"),
        "number": (number, "float32[::1]"),
    },
)
