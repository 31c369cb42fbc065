"""A copy that starts off a 32-byte boundary requests one more sector per warp, and pays for it only in the caches."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numba import cuda

from numba_gemm.device.units import FLOAT32_BYTES, WARP
from numba_gemm.lab.harness.pictures import bars, curves, panels
from numba_gemm.lab.memory import machine
from numba_gemm.models import requests

BLOCK = 256


@machine.kernel("float32[::1], float32[::1], int64")
def offset_copy(odata: Any, idata: Any, offset: Any) -> None:
    """Copy one element per thread; the arrays have `offset` more elements than there are threads."""
    x = cuda.grid(1) + offset
    odata[x] = idata[x]


def sectors_a_float(block: int, offset: int) -> float:
    """Sectors that warps request per copied float, for reading or for writing; at best an eighth."""
    count, blocks = 0, 8  # the alignment of blocks to sectors repeats after these
    for number, first in itertools.product(range(blocks), range(0, block, WARP)):
        start = number * block + first + offset
        lanes = range(min(WARP, block - first))
        count += requests.sectors(((lane, FLOAT32_BYTES * (start + lane)) for lane in lanes), FLOAT32_BYTES)
    return count / (blocks * block)


def misaligned_copy(
    offsets: Sequence[int] = range(33),
    blocks: Sequence[int] = (BLOCK, 250, 100, 33),
    elements: int = 1 << 26,
    rounds: int = machine.ROUNDS,
) -> pd.DataFrame:
    """Copy floats from each offset with blocks of 256, and from offset 0 with blocks of other sizes.

    One row per copy, with ``sectors`` per warp of 32 lanes and ``gb_s`` of bytes read and written.

    Parameters
    ----------
    offsets: Offsets in elements; 0 is added, from which the others are predicted.
    blocks: Threads per block for the copies from offset 0.
    elements: Floats to copy, rounded down to whole blocks.
    """
    cases = list(dict.fromkeys([*((each, BLOCK) for each in (0, *offsets)), *((0, each) for each in blocks)]))
    values = np.arange(elements + max(offset for offset, _ in cases), dtype=np.float32)
    idata, odata = cuda.to_device(values), cuda.device_array(values.size, np.float32)
    calls = {}
    for offset, block in cases:
        grid, expected = elements // block, np.full_like(values, np.nan)
        copied = slice(offset, offset + grid * block)
        expected[copied] = values[copied]
        call = machine.enqueue(offset_copy, grid, block, odata, idata, offset)
        calls[offset, block] = machine.checked(call, odata, expected, (offset, block))
    frame = pd.DataFrame(cases, columns=["offset", "block"])
    least = [sectors_a_float(block, offset) for offset, block in cases]
    us = list(machine.timed(calls, rounds=rounds).values())
    gb_s = 2 * FLOAT32_BYTES * (elements // frame["block"] * frame["block"]) / us / 1e3
    frame = frame.assign(sectors=WARP * np.array(least), us=us, gb_s=gb_s)
    by_sectors = gb_s[0] * frame["sectors"][0] / frame["sectors"]
    return frame.assign(predicted_by_sectors_gb_s=by_sectors, predicted_by_bytes_gb_s=gb_s[0])


def claims(frame: pd.DataFrame) -> dict[str, Any]:
    at = frame[frame["block"] == BLOCK].set_index("offset")
    off, least = at[at.index % 8 != 0], frame[frame["block"] == 33]
    aligned = at["gb_s"].loc[0]
    return {
        "a warp off a 32-byte boundary asks for five sectors, on one for four": (
            at["sectors"] == np.where(at.index % 8 == 0, 4, 5)
        ),
        "every misaligned copy reaches more than the guide's four fifths, and nine tenths of the aligned one": (
            off["gb_s"] > np.maximum(off["predicted_by_sectors_gb_s"], 0.9 * aligned)
        ),
        "no copy is faster than the aligned one": frame["gb_s"] < 1.03 * aligned,
        "blocks of 33 threads lose more than half, and more than by their sectors": (
            least["gb_s"] < np.minimum(0.5 * least["predicted_by_bytes_gb_s"], least["predicted_by_sectors_gb_s"])
        ),
    }


PLOT = panels(
    curves("offset", "gb_s", rows=f"block == {BLOCK}", xlabel="offset in floats", title=f"blocks of {BLOCK} threads"),
    bars("gb_s", ["block"], rows="offset == 0", ylabel="threads per block", title="offset 0"),
)
SMALL = {"offsets": (0, 1, 8), "blocks": (BLOCK, 33), "elements": 512, "rounds": 1}
EXPERIMENT = machine.experiment(misaligned_copy, "9.2.1.3", claims, PLOT, SMALL, [offset_copy])
