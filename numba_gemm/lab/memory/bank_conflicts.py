"""In each pass, a request to shared memory takes as many cycles as its fullest bank has words to deliver."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numba import cuda, float32, uint32

from numba_gemm.device.address import shared_address, shared_load1, shared_load2, shared_load4
from numba_gemm.device.texture import cycles
from numba_gemm.device.units import WARP
from numba_gemm.lab.harness.pictures import bars, curves, panels
from numba_gemm.lab.memory import machine
from numba_gemm.models import requests
from numba_gemm.simulator.switch import device_function

WORD = 4
ROW = requests.BANKS * WORD  # bytes; the banks repeat after each row
STRIDES = (*range(1, 33), 33)
FIRST, READS = 8, 16  # starting rows of turns; reads per turn, one row apart
ROWS = 4 * 33 + FIRST + READS  # extent of 32 lanes that read 128 bits each at a stride of 33
WORDS = ROWS * requests.BANKS
VALUES = 64  # number of distinct values, small enough that sums are exact

PATTERNS = {
    "broadcast": lambda lane: 0,
    "multicast, pairs": lambda lane: lane // 2,
    "multicast, fours": lambda lane: lane // 4,
    "multicast, 8 words": lambda lane: lane % 8,
    "reversed": lambda lane: 31 - lane,
    "two rows, halves": lambda lane: lane % 16 + 32 * (lane // 16),
}
"""Element that each lane reads, for patterns other than strides."""


@device_function
def read_64(tile: Any, address: Any) -> Any:
    """Read two words of a tile with one instruction, and return their sum."""
    x, y = shared_load2(tile, address)
    return x + y


@device_function
def read_128(tile: Any, address: Any) -> Any:
    """Read four words of a tile with one instruction, and return their sum."""
    x, y, z, w = shared_load4(tile, address)
    return (x + y) + (z + w)


def reader(bits: int, read: Any) -> Any:
    """Return a kernel in which every lane repeatedly reads the same banks, one row after the other."""

    @machine.kernel("int64, uint32[::1], float32[::1], uint64[::1]", f"read_{bits}")
    def read_rows(turns: Any, places: Any, sums: Any, took: Any) -> None:
        """Sum what each lane reads at its place, in bytes from the start of a row; record the cycles of each block."""
        tile = cuda.shared.array(WORDS, float32, alignment=16)
        thread = uint32(cuda.threadIdx.x)
        place = uint32(thread)
        while place < uint32(WORDS):
            tile[place] = float32(place % VALUES)
            place = uint32(place + cuda.blockDim.x)
        start = uint32(shared_address(tile) + places[thread % WARP])
        total, turn, last = float32(0), uint32(0), uint32(turns)
        cuda.syncthreads()  # the tile is written before any thread reads it, and all threads start the clock together
        begin = cycles()
        while turn < last:
            # A different row in every turn; otherwise the compiler would read only once.
            first = uint32(start + turn % FIRST * ROW)
            for i in range(READS):
                total += read(tile, uint32(first + uint32(i * ROW)))
            turn = uint32(turn + 1)
        cuda.syncthreads()  # all threads have finished reading
        if thread == uint32(0):
            took[cuda.blockIdx.x] = cycles() - begin
        sums[uint32(cuda.blockIdx.x * cuda.blockDim.x + thread)] = total

    return read_rows


KERNELS = {32: reader(32, shared_load1), 64: reader(64, read_64), 128: reader(128, read_128)}
"""Kernels by the bits that a lane reads at once."""


def elements(pattern: str, stride: int) -> list[int]:
    """Return the element that each lane reads."""
    return [PATTERNS[pattern](lane) if pattern in PATTERNS else stride * lane for lane in range(WARP)]


def request(bits: int, chosen: Sequence[int]) -> list[tuple[int, int]]:
    """Pair each lane with the offset in bytes that it reads from."""
    return [(lane, bits // 8 * element) for lane, element in enumerate(chosen)]


def ways(bits: int, chosen: Sequence[int]) -> int:
    """Largest number of words that a bank delivers in one pass; n for an n-way conflict."""
    maps = requests.bank_map(request(bits, chosen), bits // 8)
    return max(len(words) for found in maps for words in found.values())


def expected(bits: int, chosen: Sequence[int], turns: int) -> np.ndarray:
    """Return the sum of each lane."""
    rows = (np.arange(turns) % FIRST)[:, None] + np.arange(READS)
    at = np.array([place for _, place in request(bits, chosen)]) // WORD
    words = at[:, None, None, None] + requests.BANKS * rows[:, :, None] + np.arange(bits // 32)
    return (words % VALUES).sum(axis=(1, 2, 3)).astype(np.float32)


def bank_conflicts(
    strides: Sequence[int] = STRIDES,
    widths: Sequence[int] = tuple(KERNELS),
    patterns: Sequence[str] = tuple(PATTERNS),
    turns: int = 512,
    threads: int = 1024,
    blocks: int | None = None,
    rounds: int = 7,
) -> pd.DataFrame:
    """Read shared memory by each pattern and width.

    One row per pattern and width: ``pattern`` ("stride", or the name), ``stride`` in elements (0 for other
    patterns), ``ways`` of the conflict, ``predicted_wavefronts`` per request, ``cycles`` per request and
    multiprocessor (median of the blocks), and ``us`` per launch.

    Parameters
    ----------
    strides: Elements between neighbouring lanes, at most 33; 1 is added, from which the others are predicted.
    widths: Bits per element: 32, 64, 128.
    patterns: Patterns other than strides, by name.
    turns: Turns of the loop, each with 16 reads per lane.
    threads, blocks: Launch geometry; one block per multiprocessor by default.
    """
    blocks = blocks or machine.properties().sm_count
    cases = [("stride", stride) for stride in dict.fromkeys((1, *strides))] + [(name, 0) for name in patterns]
    warps = threads // WARP
    sums, took = cuda.device_array(blocks * threads, np.float32), cuda.device_array(blocks, np.uint64)
    rows, calls = [], {}
    for bits, (pattern, stride) in itertools.product(widths, cases):
        chosen, name = elements(pattern, stride), (pattern, bits, stride)
        asked = request(bits, chosen)
        places = cuda.to_device(np.array([place for _, place in asked], np.uint32))
        call = machine.enqueue(KERNELS[bits], blocks, threads, turns, places, sums, took)
        calls[name] = machine.checked(call, sums, np.resize(expected(bits, chosen, turns), blocks * threads), name)
        row = dict(zip(("pattern", "width_bits", "stride"), name)) | {"ways": ways(bits, chosen)}
        row["predicted_wavefronts"] = requests.wavefronts(asked, bits // 8)
        rows.append(row | {"cycles": np.median(took.copy_to_host()) / (turns * READS * warps)})
    frame = pd.DataFrame(rows).assign(us=list(machine.timed(calls, rounds=rounds).values()))
    free = frame[frame["stride"] == 1].set_index("width_bits")
    per_wavefront = frame["width_bits"].map(free["us"] / free["predicted_wavefronts"])
    return frame.assign(predicted_us=per_wavefront * frame["predicted_wavefronts"])


def claims(frame: pd.DataFrame) -> dict[str, Any]:
    strides, narrow, names = frame["stride"], frame["width_bits"] == 32, frame["pattern"]
    free = frame[strides == 1].set_index("width_bits")
    slower = frame["cycles"] / frame["width_bits"].map(free["cycles"])
    more = frame["predicted_wavefronts"] / frame["width_bits"].map(free["predicted_wavefronts"])
    off = (slower / more - 1).abs()
    alike = names.str.startswith(("broadcast", "multicast"))
    joined = ~narrow & names.isin(["broadcast", "multicast, pairs", "multicast, fours"])
    padded, unpadded = slower[narrow & (strides == 33)], slower[narrow & (strides == 32)]
    return {
        "at every stride and width, a request's time grows as wavefronts do, to 15 %": off[strides > 0] < 0.15,
        "and so it does by every other pattern": off[strides == 0] < 0.15,
        "without a conflict, a request takes a cycle a wavefront, to 15 %": (
            (free["cycles"] / free["predicted_wavefronts"] - 1).abs() < 0.15
        ),
        "an element of padding turns a 32-way conflict into none": (padded < 1.15).all() and (unpadded > 20).all(),
        "lanes that read the same words take no longer than lanes that read different ones": slower[alike] < 1.15,
        "neighbours that share a wide word take less than two thirds of that": slower[joined] < 2 / 3,
    }


CYCLES = "cycles per request of a warp"
LOOK: dict[str, Any] = {"log": "y", "dashed": {"predicted_wavefronts": "predicted wavefronts"}, "ylabel": CYCLES}
PLOT = panels(
    curves("stride", "cycles", "width_bits", "stride > 0", "{} bits", xlabel="stride in elements", **LOOK),
    bars("cycles", ["pattern", "width_bits"], "stride == 0", "{}, {} bits", xlabel=CYCLES),
)
SMALL: dict[str, Any] = {"strides": (1, 2, 32, 33), "patterns": ("broadcast", "multicast, pairs"), "turns": 2}
SMALL |= {"threads": 32, "blocks": 1, "rounds": 1}
ALLOWED: dict[str, Any] = {"strides": STRIDES, "widths": KERNELS, "patterns": PATTERNS, "threads": WARP}
EXPERIMENT = machine.experiment(bank_conflicts, "9.2.3.1", claims, PLOT, SMALL, KERNELS.values(), allowed=ALLOWED)
