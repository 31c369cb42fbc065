"""A copy that starts off a 32-byte boundary requests one more sector per warp, and pays for it only in the caches.

A warp that copies 32 consecutive floats from a 32-byte boundary needs four sectors of 32 bytes; from any other address
it touches five. According to the guide, this costs a fifth of the bandwidth, which is true if every sector comes from
device memory. But the fifth sector also belongs to the neighbouring warp: the second request finds it in L1 or L2,
device memory moves as many bytes as before, and a copy that waits for device memory hardly slows down. Both predictions
are drawn, relative to the copy at offset 0. On an H200, that copy reaches little more than half of device memory's
bandwidth (each thread has one load in flight), and misaligned copies lose about 4 % instead of 20 %. Offsets of 8, 16
and 24 lose about 3 %, although they need four sectors: only multiples of 32 (128 bytes) keep each warp within one cache
line.

A block size that is not a multiple of 32 misaligns the warps of all following blocks, and leaves lanes of each block's
last warp idle. Sectors do not account for further losses of small blocks: a multiprocessor holds 32 blocks of 33
threads, half of the threads that it could; each block must be started; and its second warp copies a single float.

Source: CUDA C++ Best Practices Guide, "A Sequential but Misaligned Access Pattern" and "Effects of Misaligned
Accesses".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numba import cuda

from numba_gemm.device.units import FLOAT32_BYTES, WARP
from numba_gemm.lab.harness.experiment import Experiment
from numba_gemm.lab.memory import machine
from numba_gemm.lab.memory.drawing import curve
from numba_gemm.models import requests

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLOCK = 256


@cuda.jit
def offset_copy(odata: Any, idata: Any, offset: Any) -> None:
    """Copy one element per thread; the arrays have `offset` more elements than there are threads."""
    x = cuda.grid(1) + offset
    odata[x] = idata[x]


def sectors_a_block(block: int, offset: int, number: int) -> int:
    """Sectors that the warps of a block request, for reading or for writing."""
    count = 0
    for first in range(0, block, WARP):
        lanes = range(min(WARP, block - first))
        start = number * block + first + offset
        count += requests.sectors(((lane, FLOAT32_BYTES * (start + lane)) for lane in lanes), FLOAT32_BYTES)
    return count


def sectors_a_float(block: int, offset: int) -> float:
    """Sectors per copied float, for reading or for writing; at best an eighth."""
    blocks = 8  # the alignment of blocks to sectors repeats after these
    return sum(sectors_a_block(block, offset, number) for number in range(blocks)) / (blocks * block)


def misaligned_copy(
    offsets: Sequence[int] = range(33),
    blocks: Sequence[int] = (BLOCK, 250, 100, 33),
    elements: int = 1 << 26,
    rounds: int = machine.ROUNDS,
) -> pd.DataFrame:
    """Copy floats from each offset with blocks of `BLOCK`, then from offset 0 with blocks of other sizes.

    Parameters
    ----------
    offsets : sequence of int
        Offsets in elements, 0 or more. Must include 0, from which the others are predicted.
    blocks : sequence of int
        Threads per block for the copies from offset 0.
    elements : int
        Floats to copy, rounded down to whole blocks.
    rounds : int
        Samples of each measurement.

    Returns
    -------
    DataFrame
        One row per copy: ``offset``, ``block``, ``sectors`` per warp of 32 lanes, ``us`` (median), ``gb_s`` (bytes read
        and written), ``predicted_by_sectors_gb_s`` and ``predicted_by_bytes_gb_s``: the bandwidth of the copy from
        offset 0 with blocks of `BLOCK`, scaled by the sectors requested, and by the bytes that device memory moves.

    Raises
    ------
    AssertionError
        if a copy is wrong.
    """
    cases = list(
        dict.fromkeys([(0, BLOCK), *((offset, BLOCK) for offset in offsets), *((0, block) for block in blocks)])
    )
    room = elements + max(offset for offset, _ in cases)
    values = np.arange(room, dtype=np.float32)
    idata, odata = cuda.to_device(values), cuda.device_array(room, np.float32)
    calls, counts = {}, {}
    for offset, block in cases:
        grid = elements // block
        calls[offset, block], counts[offset, block] = (
            machine.enqueue(offset_copy, grid, block, odata, idata, offset),
            grid * block,
        )
        odata.copy_to_device(np.zeros_like(values))
        calls[offset, block](0)
        expected = np.zeros_like(values)
        expected[offset : offset + grid * block] = values[offset : offset + grid * block]
        np.testing.assert_array_equal(odata.copy_to_host(), expected)
    samples = machine.timed(calls, rounds=rounds)
    best = 2 * FLOAT32_BYTES * counts[0, BLOCK] / samples[0, BLOCK].median / 1e3
    least = sectors_a_float(BLOCK, 0)
    rows = [
        {
            "offset": offset,
            "block": block,
            "sectors": WARP * sectors_a_float(block, offset),
            "us": samples[offset, block].median,
            "gb_s": 2 * FLOAT32_BYTES * counts[offset, block] / samples[offset, block].median / 1e3,
            "predicted_by_sectors_gb_s": best * least / sectors_a_float(block, offset),
            "predicted_by_bytes_gb_s": best,
        }
        for offset, block in cases
    ]
    return pd.DataFrame(rows)


def plot(frame: pd.DataFrame, figure: Figure) -> None:
    """Plot bandwidth against offset, and by block size."""
    left, right = figure.subplots(1, 2, width_ratios=[3, 1], sharey=True)
    moved = frame[frame["block"] == BLOCK].sort_values("offset")
    curve(left, moved["offset"], moved["gb_s"], moved["predicted_by_bytes_gb_s"], "measured", 0)
    left.lines[-1].set_label("predicted by bytes moved")
    by_sectors = moved["predicted_by_sectors_gb_s"]
    left.plot(moved["offset"], by_sectors, color="0.4", linestyle=":", label="predicted by sectors asked for")
    left.set(xlabel="offset in floats", ylabel="GB/s, read and written", ylim=(0, None), title=f"blocks of {BLOCK}")
    left.legend()
    sizes = frame[frame["offset"] == 0].sort_values("block")
    names = [str(block) for block in sizes["block"]]
    curve(right, names, sizes["gb_s"], None, "measured", 0)
    right.plot(names, sizes["predicted_by_sectors_gb_s"], color="0.4", linestyle=":")
    right.set(xlabel="threads a block", title="offset 0")


def claims(frame: pd.DataFrame) -> dict[str, bool]:
    """Check the statements of the module's docstring against a result."""
    at = frame[frame["block"] == BLOCK].set_index("offset")
    off, least = at[at.index % 8 != 0], frame[frame["block"] == 33]
    return {
        "a warp off a 32-byte boundary asks for five sectors, on one for four": bool(
            (off["sectors"] == 5).all() and (at.drop(off.index)["sectors"] == 4).all()
        ),
        "every misaligned copy reaches more than the guide's four fifths, and nine tenths of the aligned one": bool(
            (off["gb_s"] > off["predicted_by_sectors_gb_s"]).all() and (off["gb_s"] > 0.9 * at["gb_s"].loc[0]).all()
        ),
        "no copy is faster than the aligned one": bool((frame["gb_s"] < 1.03 * at["gb_s"].loc[0]).all()),
        "blocks of 33 threads lose more than half, and more than by their sectors": bool(
            (least["gb_s"] < 0.5 * least["predicted_by_bytes_gb_s"]).all()
            and (least["gb_s"] < least["predicted_by_sectors_gb_s"]).all()
        ),
    }


EXPERIMENT = Experiment(
    name="misaligned_copy",
    section="9.2.1.3",
    run=misaligned_copy,
    plot=plot,
    claims=claims,
    facts=machine.facts,
    small={"offsets": (0, 1, 8), "blocks": (BLOCK, 33), "elements": 512, "rounds": 1},
    kernels={"offset_copy": (offset_copy, "float32[::1], float32[::1], int64")},
)
