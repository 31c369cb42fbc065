"""A strided copy pays for whole sectors: half is wasted at stride 2, seven eighths from stride 8 on."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from cuda.bindings import driver
from numba import cuda

from numba_gemm.device.units import FLOAT32_BYTES, WARP, ceil_div
from numba_gemm.lab.harness.pictures import curves, panels
from numba_gemm.lab.memory import machine
from numba_gemm.models import requests
from numba_gemm.runtime.driver import call
from numba_gemm.runtime.timing import Call

BLOCK = 256
PERIOD = 1 << 20  # of the values, all of which are exact in float32
CHECKED = 1 << 12  # floats that are checked at either end of a copy


@machine.kernel("float32[::1], float32[::1], int64")
def stride_copy(odata: Any, idata: Any, stride: Any) -> None:
    """Copy one element per thread; the arrays have `stride` times as many elements as there are threads."""
    x = cuda.grid(1) * stride
    odata[x] = idata[x]


@machine.kernel("float32[::1]")
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
    for begin in (0, elements * stride - floats):
        places = np.arange(begin, begin + floats)
        expected = np.where(places % stride == 0, places % PERIOD, np.nan)
        machine.checked(copy, odata[begin : begin + floats], expected, stride)


def strided_copy(
    strides: Sequence[int] = range(1, 33), elements: int = 1 << 25, rounds: int = machine.ROUNDS
) -> pd.DataFrame:
    """Copy the same number of floats with each stride.

    One row per stride: ``sectors`` that a warp requests for reading, or for writing, ``efficiency`` (needed bytes
    over those of these sectors), ``fetch_bytes``, and ``gb_s`` of needed bytes, read and written.

    Parameters
    ----------
    strides: Strides in elements; 1 is added, from which the others are predicted.
    elements: Floats to copy, a multiple of 256. The arrays have this size times the largest stride.
    """
    chosen = list(dict.fromkeys([1, *strides]))
    room = elements * max(chosen)
    idata, odata = cuda.device_array(room, np.float32), cuda.device_array(room, np.float32)
    machine.enqueue(number, ceil_div(room, BLOCK), BLOCK, idata)(0)
    calls = {}
    for stride in chosen:
        calls[stride] = machine.enqueue(stride_copy, elements // BLOCK, BLOCK, odata, idata, stride)
        check(calls[stride], odata, stride, elements)
    us = np.array(list(machine.timed(calls, rounds=rounds).values()))
    sectors, fetch_bytes = np.array([sectors_a_warp(stride) for stride in chosen]), fetch_granularity()
    moved = np.array([moved_a_warp(stride, fetch_bytes) for stride in chosen])
    gb_s = 2 * FLOAT32_BYTES * elements / us / 1e3
    return pd.DataFrame(
        {
            "stride": chosen,
            "sectors": sectors,
            "efficiency": FLOAT32_BYTES * WARP / (requests.SECTOR_BYTES * sectors),
            "fetch_bytes": fetch_bytes,
            "us": us,
            "gb_s": gb_s,
            "predicted_by_sectors_gb_s": gb_s[0] * sectors[0] / sectors,
            "predicted_by_fetches_gb_s": gb_s[0] * moved[0] / moved,
        }
    )


def claims(frame: pd.DataFrame) -> dict[str, Any]:
    at = frame.set_index("stride").sort_index()
    gb_s, by_sectors, by_fetches = at["gb_s"], at["predicted_by_sectors_gb_s"], at["predicted_by_fetches_gb_s"]
    return {
        "a warp asks for 4 sectors more with each step of the stride, until 32 at stride 8": (
            at["sectors"] == np.minimum(4 * at.index, 32)
        ),
        "the bandwidth falls at each of the strides 1, 2, 4 and 8": gb_s[1] > gb_s[2] > gb_s[4] > gb_s[8],
        "from stride 8 on, less than a quarter of the bandwidth is left": gb_s.loc[8:] < gb_s[1] / 4,
        "up to stride 8, it is what sectors predict, to a fifth": (gb_s / by_sectors - 1).abs().loc[:8] < 0.2,
        "at stride 32, it is less than three quarters of that": gb_s[32] < 0.75 * by_sectors[32],
        "at no stride above 1 is it as low as by fetches and sectors completed": (gb_s > 1.05 * by_fetches).loc[2:],
    }


PLOT = panels(curves("stride", "gb_s", log="xy", xlabel="stride in floats", ylabel="GB/s, read and written"))
SMALL = {"strides": (1, 2, 8, 32), "elements": 256, "rounds": 1}
KERNELS = (stride_copy, number)
EXPERIMENT = machine.experiment(strided_copy, "9.2.1.4", claims, PLOT, SMALL, KERNELS, allowed={"elements": BLOCK})
