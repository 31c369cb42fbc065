"""Measured peak rates of a GPU: FP32 multiply-adds, and reads of device memory, L2 cache and shared memory.

Each rate has a kernel, whose result is checked; it stores the sum of its values, so that the compiler cannot eliminate
the work. ``bench.py --model`` predicts times from the rates of the fastest rounds, in `ceilings.json`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numba import cuda, float32, uint32

from numba_gemm.device.vector import load4, store4
from numba_gemm.lab.bench.buffers import on_device
from numba_gemm.lab.harness import environment
from numba_gemm.lab.harness.environment import GRAPHS
from numba_gemm.lab.harness.experiment import Experiment, Unavailable
from numba_gemm.models.prediction import Ceilings, theoretical_ceilings
from numba_gemm.runtime.device import DeviceProperties, current_device, device_properties, synchronize
from numba_gemm.runtime.timing import Call, Samples, time_interleaved
from numba_gemm.simulator.switch import device_function

FILE = "ceilings.json"
UNITS = {"fp32": "TFLOP/s", "dram": "TB/s", "l2": "TB/s", "shared": "TB/s"}

THREADS, BLOCKS_PER_SM = 256, 4
ROWS_AT_ONCE = 4  # vectors per thread that are loaded from global memory at the same time
NEXT_BLOCK = 37  # distance in blocks between the vectors that a block reads in consecutive turns
FIRST_ROWS, ROW_READS = 8, 16  # of the shared tile: number of starting rows, and rows that each turn reads from there
TILE = (FIRST_ROWS + ROW_READS, 128)  # floats; one row is a vector of four per lane
CHAINS, LINKS = 16, 8  # accumulators per thread, and multiply-adds of each per turn

# Turns per launch, for about half a millisecond. Sums stay below 2**24, so they are exact.
TURNS = {"fp32": 1024, "dram": 1, "l2": 512, "shared": 512}
DRAM_CACHES = 32  # size of the large buffer in L2 caches: hits on data of the previous turn are negligible
L2_SHARE = 4  # the small buffer is this fraction of the L2 cache: each half of a divided cache may keep its own copy


@device_function
def add4(acc: Any, values: Any) -> None:
    """Add a vector of four floats to four sums."""
    acc[0] += values[0]
    acc[1] += values[1]
    acc[2] += values[2]
    acc[3] += values[3]


@cuda.jit
def read_global(turns: Any, x: Any, out: Any) -> None:
    """Read x, whose rows hold four floats per thread, once per turn; each block reads another block's vectors next.

    So a block never finds the vectors of the small buffer in its multiprocessor's L1 cache.
    """
    threads = uint32(cuda.gridDim.x * cuda.blockDim.x)
    tid = uint32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
    rows, last = uint32(x.shape[0]), uint32(turns)
    step = uint32(cuda.blockDim.x * (NEXT_BLOCK if cuda.gridDim.x > NEXT_BLOCK else 1))
    place = tid
    acc = cuda.local.array(4, float32)
    for q in range(4):
        acc[q] = float32(0)
    turn = uint32(0)
    while turn < last:
        row = uint32(0)
        while row < rows:
            col = uint32(place * 4)
            first, second = load4(x, row, col), load4(x, row + uint32(1), col)
            third, fourth = load4(x, row + uint32(2), col), load4(x, row + uint32(3), col)
            add4(acc, first)
            add4(acc, second)
            add4(acc, third)
            add4(acc, fourth)
            row = uint32(row + ROWS_AT_ONCE)
        place = uint32(place + step)
        if place >= threads:
            place = uint32(place - threads)
        turn = uint32(turn + 1)
    out[0, tid] = (acc[0] + acc[1]) + (acc[2] + acc[3])


@cuda.jit
def read_shared(turns: Any, one: Any, out: Any) -> None:
    """Read rows of a shared tile, four floats per thread, starting at a different row in each turn."""
    tile = cuda.shared.array(TILE, float32, alignment=16)
    thread = uint32(cuda.threadIdx.x)
    tid = uint32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
    col, last = uint32(thread % 32 * 4), uint32(turns)
    if thread < uint32(32):
        for row in range(TILE[0]):
            store4(tile, row, col, (one, one, one, one))
    acc = cuda.local.array(4, float32)
    for q in range(4):
        acc[q] = float32(0)
    cuda.syncthreads()  # the tile is written before any thread reads it
    turn = uint32(0)
    while turn < last:
        first = uint32(turn % FIRST_ROWS)
        for i in range(0, ROW_READS, 4):
            row = uint32(first + uint32(i))
            one_row, next_row = load4(tile, row, col), load4(tile, row + uint32(1), col)
            third_row, last_row = load4(tile, row + uint32(2), col), load4(tile, row + uint32(3), col)
            add4(acc, one_row)
            add4(acc, next_row)
            add4(acc, third_row)
            add4(acc, last_row)
        turn = uint32(turn + 1)
    out[0, tid] = (acc[0] + acc[1]) + (acc[2] + acc[3])


@cuda.jit
def multiply_add(turns: Any, x: Any, y: Any, out: Any) -> None:
    """Multiply and add in registers, in chains that do not wait for each other; x and y are equal."""
    tid = uint32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
    last = uint32(turns)
    # As far as the compiler knows, these differ between threads: like a GEMM's, the operands come from registers.
    x_own, y_own = x + float32(tid) * (y - x), y + float32(tid) * (x - y)
    acc = cuda.local.array(CHAINS, float32)
    for i in range(CHAINS):
        acc[i] = float32(i)
    turn = uint32(0)
    while turn < last:
        for _ in range(LINKS):
            for i in range(CHAINS):
                acc[i] = acc[i] * x_own + y_own
        turn = uint32(turn + 1)
    total = float32(0)
    for i in range(CHAINS):
        total += acc[i]
    out[0, tid] = total


KERNELS = {"fp32": multiply_add, "dram": read_global, "l2": read_global, "shared": read_shared}
"""Kernels by the rate that they measure; `read_global` reads a large buffer for one and a small one for the other."""


@dataclass(frozen=True)
class Probe:
    """Work of one kernel launch."""

    name: str  # key of the kernel in `KERNELS`
    threads: int  # of all blocks
    turns: int
    rows: int = 0  # of the buffer in global memory, if there is one

    @property
    def work(self) -> int:
        """FLOP per launch, or bytes read."""
        if self.name == "fp32":
            return 2 * CHAINS * LINKS * self.turns * self.threads
        return 16 * (ROW_READS if self.name == "shared" else self.rows) * self.turns * self.threads

    @property
    def expected(self) -> float:
        """Value that every thread stores if all operands are 1."""
        if self.name == "fp32":
            return CHAINS * LINKS * self.turns + CHAINS * (CHAINS - 1) // 2
        return 4 * (ROW_READS if self.name == "shared" else self.rows) * self.turns


def probes(sm_count: int, l2_bytes: int) -> list[Probe]:
    """Return the launches for a GPU with this many multiprocessors and bytes of L2 cache."""
    threads = sm_count * BLOCKS_PER_SM * THREADS
    unit = 16 * threads * ROWS_AT_ONCE  # bytes of the rows that all threads load at the same time
    rows = {
        "dram": ROWS_AT_ONCE * math.ceil(DRAM_CACHES * l2_bytes / unit),
        "l2": ROWS_AT_ONCE * max(1, l2_bytes // L2_SHARE // unit),
    }
    return [Probe(name, threads, TURNS[name], rows.get(name, 0)) for name in KERNELS]


def launched(probe: Probe, x: Any, out: Any) -> Call:
    """Return the call that launches a kernel, which reads the first rows of x if it reads global memory."""
    one, kernel, grid = np.float32(1), KERNELS[probe.name], probe.threads // THREADS
    operands = {"fp32": (one, one), "shared": (one,)}.get(probe.name) or (x[: probe.rows],)
    return lambda stream: kernel[grid, THREADS, cuda.external_stream(stream)](probe.turns, *operands, out)


def ceilings(rounds: int = 15) -> pd.DataFrame:
    """Check and time every kernel on the current GPU; rates are in FLOP/s or byte/s."""
    properties = device_properties(current_device())
    try:
        theory = ceilings_of(properties)
    except ValueError as error:
        raise Unavailable(str(error)) from None
    found = {probe.name: probe for probe in probes(properties.sm_count, properties.l2_bytes)}
    calls = {}
    with on_device() as (_, stream):
        x = cuda.to_device(np.ones((found["dram"].rows, 4 * found["dram"].threads), np.float32))
        for name, probe in found.items():
            out = cuda.to_device(np.full((1, probe.threads), np.nan, np.float32))
            calls[name] = launched(probe, x, out)
            calls[name](stream)
            synchronize(stream)
            advice = "report this with the GPU's name and the versions of numba-cuda and the driver"
            np.testing.assert_array_equal(out.copy_to_host(), probe.expected, f"kernel {name} is wrong; {advice}")
        return rates(found, time_interleaved(calls, stream=stream, rounds=rounds), theory)


def ceilings_of(properties: DeviceProperties) -> Ceilings:
    """Return the theoretical ceilings of a device; raise ValueError if lanes or bandwidth are unknown."""
    peak = environment.peak_flops(properties)
    return theoretical_ceilings(peak, properties.memory_bandwidth, properties.sm_count, properties.clock_hz)


def rates(found: Mapping[str, Probe], samples: Mapping[str, Samples], theory: Ceilings) -> pd.DataFrame:
    """Return the rates of the samples, one row per probe."""
    columns = ["ceiling", "fastest", "median", "theoretical"]
    rows = [
        (name, probe.work / samples[name].min * 1e6, probe.work / samples[name].median * 1e6, getattr(theory, name))
        for name, probe in found.items()
    ]
    return pd.DataFrame(rows, columns=columns)


def facts(frame: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Return the rates for `ceilings.json`, in FLOP/s and byte/s."""
    names = {"ceilings": "fastest", "medians": "median", "theoretical": "theoretical"}
    return {key: dict(zip(frame["ceiling"], frame[column].astype(float))) for key, column in names.items()}


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rates in TFLOP/s and TB/s, and the percentage of the theoretical ones that is reached."""
    shown = frame.assign(
        unit=frame["ceiling"].map(UNITS), reached_percent=100 * frame["fastest"] / frame["theoretical"]
    )
    shown[["fastest", "median", "theoretical"]] /= 1e12
    return shown[["ceiling", "unit", "fastest", "median", "theoretical", "reached_percent"]]


def load(path: Path) -> tuple[Ceilings, str]:
    """Read a `ceilings.json`; return the ceilings and the name of the GPU.

    It raises FileNotFoundError, or ValueError if the file does not have this format.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no ceilings at {path}; write them with: numba-gemm lab ceilings --out DIR")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        values = {name: float(content["ceilings"][name]) for name in UNITS}
        return Ceilings(**values), str(content["gpu"]["name"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} holds no ceilings ({type(error).__name__}: {error}); expected what "
            "numba-gemm lab ceilings writes; write it anew"
        ) from error


EXPERIMENT = Experiment(
    run=ceilings,
    unavailable="the simulator has no ceilings: unset NUMBA_ENABLE_CUDASIM, on a GPU",
    summary=summary,
    facts=facts,
    cache="hot, but for dram",
    timing=GRAPHS,
    kernels={
        "fp32": (multiply_add, "int64, float32, float32, float32[:, ::1]"),
        "dram": (read_global, "int64, float32[:, ::1], float32[:, ::1]"),
        "shared": (read_shared, "int64, float32, float32[:, ::1]"),
    },
)
