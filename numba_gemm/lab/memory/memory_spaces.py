"""The level that holds the data decides how long a read takes, more than the memory space that a kernel names.

The guide orders the spaces by latency: global, local and texture memory are the slowest, then constant memory, shared
memory and registers (column `predicted_latency_order`, 1 is the lowest). The order reflects their location: the first
three are in device memory, off the chip. On an H200, in cycles per read:

- Confirmed: registers, 4; shared memory, 29; a constant in the first cache, 34. Data in device memory itself take
  longest: about 700 cycles for global memory, 730 through a texture.
- Not confirmed: local and global memory in L1, 35 and 39 cycles, are as close as that constant, and closer than one
  that is not in the first cache, 104. L1 and shared memory are the same storage. Data in L2 take about 280 cycles as
  local memory, 290 as global memory and 325 through a texture. So three spaces with the same rank in the guide range
  from 35 to more than 700 cycles, and a texture is slower than global memory at each level: by about 50 cycles in L1,
  by 40 beyond.

Latency is that of a chain of reads, each of which returns the index of the next, followed by one thread between two
readings of the multiprocessor's clock; nanoseconds are those of the GPU's clock. The chains visit lines of memory once
in a random order, after a pass that loads them into the intended cache; those in device memory are far longer than the
L2 cache and never return to a line. Index arithmetic is included: one more instruction turns an index into an address,
except for textures. The latency of device memory includes misses in address translation, which half a gigabyte in
random order causes. The local memory of one thread soon exceeds L1: its consecutive words are 128 bytes apart,
interleaved with those of the warp's other lanes. The latency of registers is that of a chain of multiply-adds.

Bandwidth is that of all multiprocessors, in bytes that lanes receive, with four blocks of 256 threads each. Registers
deliver three operands per multiply-add. The predictions are theoretical rates: for device memory from its clock and
width; for shared memory and L1 128 bytes per clock and multiprocessor, for L2 64; for registers as many operands as
multiply-adds take; for textures one texel of 16 bytes per clock for each of a multiprocessor's four texture units. All
of these are reached to 6 %, textures to less than 1 %, except for L2: about 9.4 of 16.7 TB/s, which is not explained
here. A constant is one word for all lanes of a warp, and the cost of a request grows with the number of different
addresses: 32 of them are predicted to take 32 times as long as one, and do.

Numba has no textures. A texture object is a number that the driver creates and a kernel takes as an argument, and one
PTX instruction reads it (`numba_gemm.device.texture`).

Source: CUDA C++ Best Practices Guide, "Device Memory Spaces", "Local Memory", "Texture Memory" and "Constant Memory";
CUDA C++ Programming Guide, "Device Memory Accesses"; NVIDIA H100 Tensor Core GPU Architecture (texture units).

One module because the kernels, the measurement, the claims and the plot of an experiment are read together.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from cuda.bindings import driver
from numba import cuda, float32, uint32, uint64

from numba_gemm.device.texture import cycles, nanoseconds, texel
from numba_gemm.device.units import WARP, ceil_div
from numba_gemm.lab.bench import ceilings
from numba_gemm.lab.harness.experiment import Experiment
from numba_gemm.lab.memory import machine
from numba_gemm.lab.memory.drawing import bars
from numba_gemm.runtime.driver import call
from numba_gemm.simulator.switch import device_function

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORD, LINE, KIB = 4, 32, 1024  # bytes; words; bytes
LINKS = 32  # links of a chain per turn of the loop that follows it
SHARED_WORDS, LOCAL_WORDS = 2048, 8192
CONSTANT_WORDS, NEAR_WORDS, CONSTANT_LINE = 8192, 256, 16  # words in all; in the first constant cache; in a line
LOCAL_LINES = 256  # words of a thread's local memory that fit L1
FIRST, READS = ceilings.FIRST_ROWS, ceilings.ROW_READS  # starting rows of turns; reads per turn
ROWS = FIRST + READS
TEXEL = 16  # bytes per texel of the textures for bandwidth
TEXTURE_UNITS = 4  # per multiprocessor
OPERANDS = 3  # per multiply-add

SPACES = {
    "register": ("on chip", "-", "R/W", "1 thread", "thread", 1),
    "local": ("off chip", "yes", "R/W", "1 thread", "thread", 4),
    "shared": ("on chip", "-", "R/W", "all threads in block", "block", 2),
    "global": ("off chip", "yes", "R/W", "all threads + host", "host allocation", 4),
    "constant": ("off chip", "yes", "R", "all threads + host", "host allocation", 3),
    "texture": ("off chip", "yes", "R", "all threads + host", "host allocation", 4),
}
"""The guide's properties: location, cached, access, scope, lifetime, and rank of the latency."""
COLUMNS = ("location", "cached", "access", "scope", "lifetime", "predicted_latency_order")

DEVICE = "device memory"
ONE, MANY = "constant cache", "32 addresses"
LEVELS = (
    ("register", "registers"),
    ("shared", "shared memory"),
    ("local", "L1"),
    ("local", "L2"),
    ("global", "L1"),
    ("global", "L2"),
    ("global", DEVICE),
    ("constant", ONE),
    ("constant", MANY),
    ("constant", "beyond"),
    ("texture", "L1"),
    ("texture", "L2"),
    ("texture", DEVICE),
)


def ring(places: Any, words: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return words in which each place holds the next one, in a random closed order; and that order."""
    order = np.random.default_rng(seed).permutation(np.asarray(places, np.uint32))
    chain = np.zeros(words, np.uint32)
    chain[order] = np.roll(order, -1)
    return chain, order


NEAR_CHAIN, NEAR_ORDER = ring(range(NEAR_WORDS), CONSTANT_WORDS)
FAR_CHAIN, FAR_ORDER = ring(range(NEAR_WORDS, CONSTANT_WORDS, CONSTANT_LINE), CONSTANT_WORDS)
CONSTANT = NEAR_CHAIN + FAR_CHAIN

# ------------------------------------------------------------------------------------------------------ latency


@device_function
def element(memory: Any, place: Any) -> Any:
    """Read a word of an array in any memory space."""
    return memory[place]


@device_function
def first_channel(texture: Any, place: Any) -> Any:
    """Read a word of a texture with one channel."""
    return texel(texture, place)[0]


@device_function
def copy_array(memory: Any, chain: Any) -> None:
    """Copy a chain to other memory."""
    i, words = uint32(0), uint32(chain.shape[0])
    while i < words:
        memory[i] = chain[i]
        i = uint32(i + 1)


def walker(read: Any) -> Any:
    """Return a device function that follows a chain of reads, first untimed ones to warm up, then timed ones."""

    @device_function
    def walk(memory: Any, start: Any, warm: Any, steps: Any, out: Any) -> None:
        place = uint32(start + cuda.threadIdx.x)  # as far as the compiler knows, it differs between lanes
        for counts in range(2):
            left = uint32(steps) if counts else uint32(warm)
            since, begin = nanoseconds(), cycles()
            while left > uint32(0):
                for _ in range(LINKS):
                    place = read(memory, place)
                left = uint32(left - uint32(LINKS))
            end, until = cycles(), nanoseconds()
            out[0], out[1] = end - begin, until - since
        out[2] = place

    return walk


walk_array, walk_texture = walker(element), walker(first_channel)


@cuda.jit
def chase_global(chain: Any, start: Any, warm: Any, steps: Any, out: Any) -> None:
    """Follow a chain in global memory."""
    walk_array(chain, start, warm, steps, out)


@cuda.jit
def chase_shared(chain: Any, start: Any, warm: Any, steps: Any, out: Any) -> None:
    """Follow a copy of a chain in shared memory."""
    memory = cuda.shared.array(SHARED_WORDS, uint32)
    copy_array(memory, chain)
    walk_array(memory, start, warm, steps, out)


@cuda.jit
def chase_local(chain: Any, start: Any, warm: Any, steps: Any, out: Any) -> None:
    """Follow a copy of a chain in local memory."""
    memory = cuda.local.array(LOCAL_WORDS, uint32)
    copy_array(memory, chain)
    walk_array(memory, start, warm, steps, out)


@cuda.jit
def chase_constant(start: Any, warm: Any, steps: Any, out: Any) -> None:
    """Follow one of the two chains in constant memory."""
    walk_array(cuda.const.array_like(CONSTANT), start, warm, steps, out)


@cuda.jit
def chase_texture(texture: Any, start: Any, warm: Any, steps: Any, out: Any) -> None:
    """Follow a chain through a texture with one channel."""
    walk_texture(texture, start, warm, steps, out)


@cuda.jit
def chase_registers(one: Any, steps: Any, out: Any) -> None:
    """Chain of multiply-adds in which each needs the result of the previous one."""
    value, left = float32(0), uint32(steps)
    since, begin = nanoseconds(), cycles()
    while left > uint32(0):
        for _ in range(LINKS):
            value = value * one + one
        left = uint32(left - uint32(LINKS))
    end, until = cycles(), nanoseconds()
    out[0], out[1], out[2] = end - begin, until - since, uint64(value)


# ---------------------------------------------------------------------------------------------------- bandwidth


@cuda.jit
def read_cached(turns: Any, x: Any, out: Any) -> None:
    """Read rows of a small array, four floats per thread and the same ones in all blocks, like `read_shared`."""
    thread = uint32(cuda.threadIdx.x)
    tid = uint32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
    col, last = uint32(thread % 32 * 4), uint32(turns)
    acc = cuda.local.array(4, float32)
    for q in range(4):
        acc[q] = float32(0)
    turn = uint32(0)
    while turn < last:
        first = uint32(turn % FIRST)
        for i in range(0, READS, 4):
            row = uint32(first + uint32(i))
            one_row, next_row = ceilings.load4(x, row, col), ceilings.load4(x, row + uint32(1), col)
            third_row, last_row = ceilings.load4(x, row + uint32(2), col), ceilings.load4(x, row + uint32(3), col)
            ceilings.add4(acc, one_row)
            ceilings.add4(acc, next_row)
            ceilings.add4(acc, third_row)
            ceilings.add4(acc, last_row)
        turn = uint32(turn + 1)
    out[0, tid] = (acc[0] + acc[1]) + (acc[2] + acc[3])


@cuda.jit
def read_local(turns: Any, x: Any, out: Any) -> None:
    """Read a thread's copy of a few floats, starting at a different one in each turn."""
    memory = cuda.local.array(ROWS, float32)
    for i in range(ROWS):
        memory[i] = x[0, i]
    total, turn, last = float32(0), uint32(0), uint32(turns)
    while turn < last:
        first = uint32(turn % FIRST)
        for i in range(READS):
            total += memory[first + uint32(i)]
        turn = uint32(turn + 1)
    out[0, uint32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)] = total


@cuda.jit
def read_constant(turns: Any, apart: Any, out: Any) -> None:
    """Read constants that are `apart` words apart in neighbouring lanes; with 0, all lanes read the same word."""
    memory = cuda.const.array_like(CONSTANT)
    at = uint32(cuda.threadIdx.x % WARP) * uint32(apart)
    total, turn, last = uint32(0), uint32(0), uint32(turns)
    while turn < last:
        first = uint32(at + turn % FIRST)
        for i in range(READS):
            total = uint32(total + memory[first + uint32(i)])
        turn = uint32(turn + 1)
    out[uint32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)] = total


@cuda.jit
def read_texture(turns: Any, texture: Any, out: Any) -> None:
    """Read texels of four channels, consecutive in the lanes, starting at a different row of 32 in each turn."""
    lane = uint32(cuda.threadIdx.x % WARP)
    total, turn, last = uint32(0), uint32(0), uint32(turns)
    while turn < last:
        first = uint32(turn % FIRST * WARP + lane)
        for i in range(READS):
            x, y, z, w = texel(texture, uint32(first + uint32(i * WARP)))
            total = uint32(total + (x + y) + (z + w))
        turn = uint32(turn + 1)
    out[uint32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)] = total


# -------------------------------------------------------------------------------------------------------- host code


@contextmanager
def linear_texture(array: Any, channels: int) -> Iterator[Any]:
    """Create a texture object over words in device memory; in the simulator, yield the words themselves."""
    if machine.SIMULATOR:
        yield np.asarray(array).reshape(-1, channels)
        return
    resource, description = driver.CUDA_RESOURCE_DESC(), driver.CUDA_TEXTURE_DESC()
    resource.resType = driver.CUresourcetype.CU_RESOURCE_TYPE_LINEAR
    resource.res.linear.devPtr = driver.CUdeviceptr(array.__cuda_array_interface__["data"][0])
    resource.res.linear.format = driver.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT32
    resource.res.linear.numChannels = channels
    resource.res.linear.sizeInBytes = WORD * array.size
    description.flags = driver.CU_TRSF_READ_AS_INTEGER
    with machine.in_context():
        texture = call(driver.cuTexObjectCreate, resource, description, None)
        try:
            yield np.uint64(int(texture))
        finally:
            call(driver.cuTexObjectDestroy, texture)


class _Walk:
    """A chain in some memory, and the kernel that follows it.

    A walk without warm-up continues where the last one ended, so that no cache holds its lines; others start at the
    same place again.
    """

    def __init__(self, kernel: Any, memory: tuple[Any, ...], order: np.ndarray, warm: int, steps: int, at: int = 0):
        self.kernel, self.memory, self.order = kernel, memory, order
        self.warm, self.steps, self.at = ceil_div(warm, LINKS) * LINKS, steps, at
        self.out = cuda.to_device(np.zeros(3, np.uint64))

    def measure(self) -> tuple[float, float]:
        """Return cycles and nanoseconds per step; raise AssertionError if the walk ends at a wrong place."""
        start, walked = int(self.order[self.at]), self.warm + self.steps
        machine.enqueue(self.kernel, 1, 1, *self.memory, start, self.warm, self.steps, self.out)(0)
        found = self.out.copy_to_host()
        end = (self.at + walked) % len(self.order)
        assert found[2] == self.order[end], f"{self.kernel.__name__} ends at {found[2]}, not at {self.order[end]}"
        if not self.warm:
            self.at = end
        return float(found[0]) / self.steps, float(found[1]) / self.steps


def walks(stack: ExitStack, steps: int, l1: int, l2: int, device: int, rounds: int) -> dict[tuple[str, str], _Walk]:
    """Return the chains by space and level; those of L1, L2 and device memory have one link per line of 32 words."""
    found = {}
    for level, lines in (("L1", l1), ("L2", l2), (DEVICE, device)):
        chain, order = ring(range(0, LINE * lines, LINE), LINE * lines)
        array = cuda.to_device(chain)
        texture = stack.enter_context(linear_texture(array, 1))
        # Two passes over the lines, so that the second half of a chain has not evicted the first.
        warm, other = (0, rounds * steps % lines) if level == DEVICE else (2 * lines, 0)
        found["global", level] = _Walk(chase_global, (array,), order, warm, steps)
        found["texture", level] = _Walk(chase_texture, (texture,), order, warm, steps, other)
    chain, order = ring(range(SHARED_WORDS), SHARED_WORDS)
    found["shared", "shared memory"] = _Walk(chase_shared, (cuda.to_device(chain),), order, LINKS, steps)
    for level, words in (("L1", LOCAL_LINES), ("L2", LOCAL_WORDS)):
        chain, order = ring(range(words), words)
        found["local", level] = _Walk(chase_local, (cuda.to_device(chain),), order, words, steps)
    found["constant", ONE] = _Walk(chase_constant, (), NEAR_ORDER, len(NEAR_ORDER), steps)
    found["constant", "beyond"] = _Walk(chase_constant, (), FAR_ORDER, len(FAR_ORDER), steps)
    return found


def measure_registers(steps: int) -> tuple[float, float]:
    """Return cycles and nanoseconds per multiply-add of a chain."""
    out = cuda.to_device(np.zeros(3, np.uint64))
    machine.enqueue(chase_registers, 1, 1, np.float32(1), steps, out)(0)
    found = out.copy_to_host()
    assert found[2] == steps, f"{steps} multiply-adds gave {found[2]}"
    return float(found[0]) / steps, float(found[1]) / steps


def constant_sum(turns: int, apart: int) -> np.ndarray:
    """Return the sum of each lane of `read_constant`, modulo 2 to the 32."""
    first = np.arange(WARP)[:, None] * apart + np.arange(turns) % FIRST
    places = first[:, :, None] + np.arange(READS)
    return CONSTANT[places].sum(axis=(1, 2), dtype=np.uint32)


def bandwidths(
    stack: ExitStack, turns: int, blocks: int, threads: int, l2_kib: int, read_kib: int, rounds: int
) -> dict[tuple[str, str], float]:
    """Return bytes per second that lanes receive, by memory, from kernels that are checked once."""
    lanes = blocks * threads
    unit = ceilings.ROWS_AT_ONCE * 4 * WORD * lanes
    rows = {
        level: ceilings.ROWS_AT_ONCE * max(1, kib * KIB // unit) for level, kib in (("L2", l2_kib), (DEVICE, read_kib))
    }
    large = cuda.to_device(np.ones((rows[DEVICE], 4 * lanes), np.float32))
    small = cuda.to_device(np.ones((rows["L2"], 4 * lanes), np.float32))
    tile = cuda.to_device(np.ones((ROWS, 4 * WARP), np.float32))
    texture = stack.enter_context(linear_texture(cuda.to_device(np.ones(4 * WARP * ROWS, np.uint32)), 4))
    one, vector = np.float32(1), 4 * WORD
    chains = ceilings.CHAINS
    # Kernel, arguments before the sums, type of the sums, expected value per lane, and bytes that a lane receives.
    work: dict[tuple[str, str], tuple[Any, tuple[Any, ...], Any, Any, int]] = {
        ("register", "registers"): (
            ceilings.multiply_add,
            (2 * turns, one, one),
            np.float32,
            2 * turns * chains * ceilings.LINKS + chains * (chains - 1) // 2,
            2 * turns * chains * ceilings.LINKS * OPERANDS * WORD,
        ),
        ("shared", "shared memory"): (
            ceilings.read_shared,
            (turns, one),
            np.float32,
            4 * READS * turns,
            vector * READS * turns,
        ),
        ("local", "L1"): (read_local, (turns, tile), np.float32, READS * turns, WORD * READS * turns),
        ("global", "L1"): (read_cached, (turns, tile), np.float32, 4 * READS * turns, vector * READS * turns),
        ("global", "L2"): (
            ceilings.read_global,
            (turns, small),
            np.float32,
            4 * rows["L2"] * turns,
            vector * rows["L2"] * turns,
        ),
        ("global", DEVICE): (
            ceilings.read_global,
            (1, large),
            np.float32,
            4 * rows[DEVICE],
            vector * rows[DEVICE],
        ),
        ("constant", ONE): (
            read_constant,
            (turns, 0),
            np.uint32,
            np.resize(constant_sum(turns, 0), lanes),
            WORD * READS * turns,
        ),
        ("constant", MANY): (
            read_constant,
            (turns, 1),
            np.uint32,
            np.resize(constant_sum(turns, 1), lanes),
            WORD * READS * turns,
        ),
        ("texture", "L1"): (read_texture, (turns, texture), np.uint32, 4 * READS * turns, TEXEL * READS * turns),
    }
    calls = {}
    for name, (kernel, arguments, dtype, expected, _) in work.items():
        shape = (1, lanes) if dtype is np.float32 else (lanes,)
        out = cuda.to_device(np.zeros(shape, dtype))
        calls[name] = machine.enqueue(kernel, blocks, threads, *arguments, out)
        calls[name](0)
        np.testing.assert_array_equal(out.copy_to_host().reshape(-1), np.broadcast_to(expected, lanes), str(name))
    samples = machine.timed(calls, rounds=rounds)
    return {name: lanes * work[name][4] / samples[name].median * 1e6 for name in work}


def memory_spaces(
    steps: int = 1 << 14,
    l1_kib: int = 32,
    l2_kib: int = 8 << 10,
    device_kib: int = 512 << 10,
    read_kib: int = 2 << 20,
    turns: int = 512,
    blocks: int | None = None,
    threads: int = ceilings.THREADS,
    walk_rounds: int = 5,
    rounds: int = machine.ROUNDS,
) -> pd.DataFrame:
    """Measure latency and bandwidth of every memory space at every level that can hold its data.

    Parameters
    ----------
    steps : int
        Timed reads of a chain, a multiple of 32; `device_kib` must have enough lines for all walks.
    l1_kib, l2_kib, device_kib : int
        Global memory that chains cover: less than L1, between L1 and L2, and more than L2.
    read_kib : int
        Device memory that is read for its bandwidth; for L2, `l2_kib`. Both are rounded to whole rows of vectors.
    turns : int
        Turns of the kernels that read repeatedly.
    blocks, threads : int
        Launch geometry of the kernels that measure bandwidth; four blocks per multiprocessor by default.
    walk_rounds, rounds : int
        Samples of each latency, and of each bandwidth.

    Returns
    -------
    DataFrame
        One row per space and level: the guide's properties of the space (``location``; ``cached``, "-" if not
        applicable; ``access``, ``scope``, ``lifetime``; ``predicted_latency_order``, 1 is the lowest),
        ``latency_cycles`` and ``latency_ns`` per read (medians), ``tb_s`` that lanes receive (median) and
        ``predicted_tb_s``; NaN if not measured or predicted.

    Raises
    ------
    AssertionError
        if a walk ends at a wrong place, or a sum is wrong.
    """
    properties = machine.properties()
    theory = ceilings.ceilings_of(properties)
    blocks = blocks or properties.sm_count * ceilings.BLOCKS_PER_SM
    l1, l2, device = (kib * KIB // (LINE * WORD) for kib in (l1_kib, l2_kib, device_kib))
    with ExitStack() as stack:
        chains = walks(stack, steps, l1, l2, device, walk_rounds)
        # The buffers for bandwidth evict from L2 what remains of the chains since they were written.
        rates = bandwidths(stack, turns, blocks, threads, l2_kib, read_kib, rounds)
        found = {name: [walk.measure() for _ in range(walk_rounds)] for name, walk in chains.items()}
        found["register", "registers"] = [measure_registers(steps) for _ in range(walk_rounds)]
    predicted = {
        ("register", "registers"): theory.fp32 / 2 * OPERANDS * WORD,
        ("shared", "shared memory"): theory.shared,
        ("local", "L1"): theory.shared,
        ("global", "L1"): theory.shared,
        ("global", "L2"): theory.l2,
        ("global", DEVICE): theory.dram,
        ("constant", MANY): rates["constant", ONE] / WARP,
        ("texture", "L1"): TEXTURE_UNITS * TEXEL * properties.sm_count * properties.clock_hz,
    }
    rows = []
    for name in LEVELS:
        taken = [statistics.median(values) for values in zip(*found.get(name, [(math.nan, math.nan)]), strict=True)]
        row: dict[str, Any] = {"space": name[0], "level": name[1], **dict(zip(COLUMNS, SPACES[name[0]], strict=True))}
        row |= {"latency_cycles": taken[0], "latency_ns": taken[1]}
        row |= {"tb_s": rates.get(name, math.nan) / 1e12, "predicted_tb_s": predicted.get(name, math.nan) / 1e12}
        rows.append(row)
    return pd.DataFrame(rows)


def plot(frame: pd.DataFrame, figure: Figure) -> None:
    """Plot latency, and bandwidth with its prediction, by space and level."""
    left, right = figure.subplots(1, 2)
    for axes, column, label in ((left, "latency_cycles", "cycles a read in a chain"), (right, "tb_s", "TB/s")):
        shown = frame[frame[column].notna()].sort_values(column, ascending=column == "latency_cycles")
        names = [
            space if level.startswith((space, "registers")) else f"{space}, {level}"
            for space, level in zip(shown["space"], shown["level"], strict=True)
        ]
        bars(axes, names, shown[column], shown["predicted_tb_s"] if column == "tb_s" else None)
        axes.set(xscale="log", xlabel=label)
        if column == "latency_cycles":
            axes.get_legend().remove()
            axes.bar_label(axes.containers[0], [f" {value:.0f}" for value in shown[column]])
            axes.set_xlim(1, shown[column].max() * 3)


def claims(frame: pd.DataFrame) -> dict[str, bool]:
    """Check the statements of the module's docstring against a result."""
    at = frame.set_index(["space", "level"])
    wait, rate, predicted = (at[column].to_dict() for column in ("latency_cycles", "tb_s", "predicted_tb_s"))
    outwards = [("register", "registers"), ("shared", "shared memory"), ("global", "L2"), ("global", DEVICE)]
    pairs = list(itertools.pairwise(outwards))
    far = [("global", DEVICE), ("texture", DEVICE)]
    others = [value for name, value in wait.items() if name not in far and not math.isnan(value)]
    return {
        "from registers by shared memory and L2 to device memory, each waits longer": all(
            wait[one] < wait[other] for one, other in pairs
        ),
        "and each gives fewer bytes a second": all(rate[one] > rate[other] for one, other in pairs),
        "registers, shared memory, a constant that its first cache holds: in the guide's order": wait[
            "register", "registers"
        ]
        < wait["shared", "shared memory"]
        < wait["constant", ONE],
        "not in it: local and global memory that L1 holds are nearer than a constant beyond the first cache": max(
            wait["local", "L1"], wait["global", "L1"]
        )
        < wait["constant", "beyond"],
        "nothing waits as long as global memory and textures that no cache holds": min(wait[name] for name in far)
        > max(others),
        "local memory that L1 holds is as near as global memory there": 0.5
        < wait["local", "L1"] / wait["global", "L1"]
        < 2,
        "a hit in L1 waits a third of a hit in L2, or less": wait["global", "L1"] < wait["global", "L2"] / 3,
        "a texture is farther than global memory wherever both are": all(
            wait["texture", level] > wait["global", level] for level in ("L1", "L2", DEVICE)
        ),
        "but for L2, each gives 85 % of its theoretical bandwidth and more": all(
            rate[name] > 0.85 * predicted[name]
            for name in rate
            if name not in (("global", "L2"), ("constant", MANY)) and not math.isnan(predicted[name])
        ),
        "L2 does not give three quarters": rate["global", "L2"] < 0.75 * predicted["global", "L2"],
        "32 addresses of constants give a 32nd of the bytes of one, to a tenth": bool(
            abs(rate["constant", MANY] / predicted["constant", MANY] - 1) < 0.1
        ),
    }


EXPERIMENT = Experiment(
    name="memory_spaces",
    section="9.2",
    run=memory_spaces,
    plot=plot,
    claims=claims,
    facts=machine.facts,
    small={
        "steps": 64,
        "l1_kib": 2,
        "l2_kib": 4,
        "device_kib": 32,
        "read_kib": 4,
        "turns": 2,
        "blocks": 1,
        "threads": 32,
        "walk_rounds": 2,
        "rounds": 1,
    },
    kernels={
        "chase_global": (chase_global, "uint32[::1], int64, int64, int64, uint64[::1]"),
        "chase_shared": (chase_shared, "uint32[::1], int64, int64, int64, uint64[::1]"),
        "chase_local": (chase_local, "uint32[::1], int64, int64, int64, uint64[::1]"),
        "chase_constant": (chase_constant, "int64, int64, int64, uint64[::1]"),
        "chase_texture": (chase_texture, "uint64, int64, int64, int64, uint64[::1]"),
        "chase_registers": (chase_registers, "float32, int64, uint64[::1]"),
        "read_cached": (read_cached, "int64, float32[:, ::1], float32[:, ::1]"),
        "read_local": (read_local, "int64, float32[:, ::1], float32[:, ::1]"),
        "read_constant": (read_constant, "int64, int64, uint32[::1]"),
        "read_texture": (read_texture, "int64, uint64, uint32[::1]"),
        "read_global": (ceilings.read_global, "int64, float32[:, ::1], float32[:, ::1]"),
        "read_shared": (ceilings.read_shared, "int64, float32, float32[:, ::1]"),
        "multiply_add": (ceilings.multiply_add, "int64, float32, float32, float32[:, ::1]"),
    },
)
