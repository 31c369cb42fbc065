"""A warp requests the sectors that its lanes touch, in whatever order; idle lanes save little."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numba import cuda, uint32

from numba_gemm.device.units import FLOAT32_BYTES, WARP
from numba_gemm.lab.harness.pictures import bars, panels
from numba_gemm.lab.memory import machine
from numba_gemm.models import requests

BLOCK = 256
PERIOD = 1 << 20  # of the values, all of which are exact in float32
IDLE = WARP  # place of a lane that copies nothing
SHUFFLED = np.random.default_rng(0).permutation(WARP).tolist()

PATTERNS: dict[str, Callable[[int], int]] = {
    "in order": lambda lane: lane,
    "reversed": lambda lane: WARP - 1 - lane,
    "neighbours swapped": lambda lane: lane ^ 1,
    "across all sectors": lambda lane: lane * 8 % WARP + lane // 4,
    "shuffled": lambda lane: SHUFFLED[lane],
    "odd lanes idle": lambda lane: IDLE if lane % 2 else lane,
    "7 of 8 lanes idle": lambda lane: IDLE if lane % 8 else lane,
    "upper half idle": lambda lane: lane if lane < WARP // 2 else IDLE,
    "24 lanes idle": lambda lane: lane if lane < 8 else IDLE,
}
"""Float of its warp that each lane copies, or `IDLE`."""


@machine.kernel("float32[::1], float32[::1], uint32[::1]")
def place_copy(odata: Any, idata: Any, places: Any) -> None:
    """Copy at most one element per thread: the one at the lane's place among those of its warp."""
    x = uint32(cuda.grid(1))
    place = places[x % uint32(WARP)]
    if place < uint32(WARP):
        at = uint32(x // uint32(WARP) * uint32(WARP) + place)
        odata[at] = idata[at]


def places_of(pattern: str) -> list[int]:
    """Return the place of each lane."""
    return [PATTERNS[pattern](lane) for lane in range(WARP)]


def sectors_a_warp(places: Sequence[int]) -> int:
    """Sectors that a warp requests, for reading or for writing."""
    active = ((lane, FLOAT32_BYTES * place) for lane, place in enumerate(places) if place != IDLE)
    return requests.sectors(active, FLOAT32_BYTES)


def coalescing(
    patterns: Sequence[str] = tuple(PATTERNS), elements: int = 1 << 25, rounds: int = machine.ROUNDS
) -> pd.DataFrame:
    """Copy an array with each pattern of lanes.

    One row per pattern: ``lanes`` that copy a float, ``sectors`` that a warp requests for reading, or for writing,
    ``us``, and ``gb_s`` of the floats copied, read and written.

    Parameters
    ----------
    patterns: Patterns by name; "in order" is added, from which the others are predicted.
    elements: Floats of the array, a multiple of 256; several times the L2 cache.
    """
    values = np.arange(elements, dtype=np.float32) % PERIOD
    idata, odata = cuda.to_device(values), cuda.device_array(elements, np.float32)
    calls = {}
    for pattern in dict.fromkeys(("in order", *patterns)):
        places = np.array(places_of(pattern), np.uint32)
        call = machine.enqueue(place_copy, elements // BLOCK, BLOCK, odata, idata, cuda.to_device(places))
        copied = np.resize(np.isin(np.arange(WARP), places), elements)
        calls[pattern] = machine.checked(call, odata, np.where(copied, values, np.float32(np.nan)), pattern)
    us = machine.timed(calls, rounds=rounds)
    return pd.DataFrame(row_of(pattern, elements, us[pattern], us["in order"]) for pattern in calls)


def row_of(pattern: str, elements: int, us: float, in_order_us: float) -> dict[str, Any]:
    places = places_of(pattern)
    lanes = sum(place != IDLE for place in places)
    sectors = sectors_a_warp(places)
    size = 2 * FLOAT32_BYTES * elements * lanes // WARP
    predicted = in_order_us * sectors / sectors_a_warp(places_of("in order"))
    row = {"pattern": pattern, "lanes": lanes, "sectors": sectors, "us": us, "gb_s": size / us / 1e3}
    return row | {"predicted_us": predicted, "predicted_gb_s": size / predicted / 1e3}


def claims(frame: pd.DataFrame) -> dict[str, Any]:
    at = frame.set_index("pattern")
    slower = at["us"] / at["us"]["in order"]
    full, idle, some = at["lanes"] == WARP, at["lanes"] < WARP, at["sectors"] < at["sectors"]["in order"]
    return {
        "a permuted warp asks for the same four sectors as one in order": at["sectors"][full] == 4,
        "and takes the same time, to 5 %": (slower[full] - 1).abs() < 0.05,
        "lanes that are idle in every sector save no time, within a tenth": slower[idle & ~some] > 0.9,
        "sectors without an active lane save time, but less than a quarter of it": (slower[some] > 0.75)
        & (slower[some] < 0.95),
    }


PLOT = panels(bars("us", ["pattern", "lanes", "sectors"], label="{}: {} lanes, {} sectors", xlabel="µs per copy"))
SMALL = {"elements": 1 << 10, "rounds": 1}
ALLOWED: dict[str, Any] = {"patterns": PATTERNS, "elements": BLOCK}
EXPERIMENT = machine.experiment(coalescing, "9.2.1.1", claims, PLOT, SMALL, [place_copy], allowed=ALLOWED)
