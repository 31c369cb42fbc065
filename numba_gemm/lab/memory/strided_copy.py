"""A strided copy pays for whole sectors: half is wasted at stride 2, seven eighths from stride 8 on.

Each thread copies one float, `stride` floats from its neighbour's; all copies are of the same number of floats. A warp
at stride 1 touches 4 sectors of 32 bytes, in reading and in writing; at stride 2 it touches 8, half of whose bytes it
needs, and from stride 8 on 32, one for every float, an eighth of whose bytes it needs. Predicted by sectors, the useful
bandwidth is that of stride 1 times the sectors that stride 1 takes over those that the stride takes: a hyperbola that
is flat from stride 8 on.

A second prediction supposes that device memory moves more than the sectors that are asked for. L2 may fetch more than a
sector at once (`fetch_bytes`, the driver's limit, a hint): with 64 bytes, neighbours share fetches until stride 16, and
not only until 8. And a stride above 1 writes parts of sectors, the rest of which might have to be read before they can
be written back. It counts the bytes of the fetches that the loads touch, of those that complete the sectors written in
part, and of these sectors.

On an H200 the measured curve has three parts:

- From stride 2 to 8 it is a hyperbola, about an eighth above the prediction by sectors. At each of these strides nearly
  3 TB/s of sectors pass, read and written; the prediction begins at stride 1, where only about 2.6 do. That is little
  more than half of what device memory gives in theory: a float a thread is less work than it could serve, and larger
  strides ask for more bytes with as many instructions.
- It goes on falling where the prediction by sectors is flat, crosses it near stride 10, and is below it by a fifth at
  stride 16 and by nearly half at 32. That is not explained. Fetches of 64 bytes would end it at stride 16; each page of
  device memory that is opened, and each translation of an address, serves fewer floats the farther apart they are, but
  neither is measured here.
- At no stride above 1 is it as low as the prediction by fetches, but about 1.3 to 2 times as high. From about stride 11
  to 20 the bytes that this counts would be more than the 4.8 TB/s that device memory gives in theory: not all of them
  move.

No cache can help, as it does with a misaligned copy: nobody asks for the rest of a sector, before it has to leave.

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
from numba_gemm.lab.memory import machine
from numba_gemm.lab.memory.drawing import curve
from numba_gemm.lab.memory.experiment import Experiment
from numba_gemm.models import requests
from numba_gemm.runtime.driver import call
from numba_gemm.runtime.timing import Call

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLOCK = 256
PERIOD = 1 << 20  # of the values, all of which a float32 holds exactly
CHECKED = 1 << 12  # floats that are looked at on either end of a copy


@cuda.jit
def stride_copy(odata: Any, idata: Any, stride: Any) -> None:
    """Each thread copies one element; the arrays have `stride` times as many elements as there are threads."""
    x = cuda.grid(1) * stride
    odata[x] = idata[x]


@cuda.jit
def number(array: Any) -> None:
    """Write what each element's number leaves by `PERIOD`."""
    x = cuda.grid(1)
    if x < array.size:
        array[x] = x % PERIOD


def sectors_a_warp(stride: int) -> int:
    """Sectors that a warp asks for, in reading or in writing."""
    return requests.sectors(((lane, FLOAT32_BYTES * lane * stride) for lane in range(WARP)), FLOAT32_BYTES)


def moved_a_warp(stride: int, fetch_bytes: int) -> int:
    """Bytes that device memory moves for a warp, if it is read by whole fetches and written by whole sectors."""
    fetched = fetch_bytes * len({FLOAT32_BYTES * lane * stride // fetch_bytes for lane in range(WARP)})
    written = requests.SECTOR_BYTES * sectors_a_warp(stride)
    completed = fetched if written > FLOAT32_BYTES * WARP else 0  # sectors that are written in part are read, too
    return fetched + completed + written


def fetch_granularity() -> int:
    """Bytes that L2 fetches at once, by the driver's limit; in the simulator 64."""
    if machine.SIMULATOR:
        return 64
    with machine.in_context():
        limit = int(call(driver.cuCtxGetLimit, driver.CUlimit.CU_LIMIT_MAX_L2_FETCH_GRANULARITY))
    return max(limit, requests.SECTOR_BYTES)


def check(copy: Call, odata: Any, stride: int, elements: int) -> None:
    """Raise AssertionError unless a copy writes what it should on either end of the array, and nothing in between."""
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
    """Copy as many floats with each stride.

    Parameters
    ----------
    strides : sequence of int
        In elements, 1 or more; with 1, what the others are predicted from.
    elements : int
        Floats to copy, a multiple of `BLOCK`. The arrays hold as many for each step of the largest stride.
    rounds : int
        Samples of each.

    Returns
    -------
    DataFrame
        A row a stride: ``stride``, ``sectors`` that a warp asks for in reading, or in writing, ``efficiency`` (needed
        bytes over those of these sectors), ``fetch_bytes`` that L2 fetches at once, ``us`` (median), ``gb_s`` (needed
        bytes, read and written), ``predicted_by_sectors_gb_s`` and ``predicted_by_fetches_gb_s``: what stride 1
        reaches, by the sectors asked for, and by what device memory moves if it fetches and completes sectors.

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
    """Bandwidth by stride."""
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
    """What the docstring says of the numbers."""
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
    small={"strides": (1, 2, 8, 32), "elements": 256, "rounds": 1},
    kernels={
        "stride_copy": (stride_copy, "float32[::1], float32[::1], int64"),
        "number": (number, "float32[::1]"),
    },
)
