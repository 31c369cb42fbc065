"""The level that holds the data decides how long a read takes, more than the memory space that a kernel names.

One module because the kernels, the measurement, the claims and the plot of an experiment are read together.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pandas as pd
from cuda.bindings import driver
from numba import cuda, float32, uint32, uint64

from numba_gemm.device.texture import cycles, nanoseconds, texel
from numba_gemm.device.units import KIB, WARP, ceil_div
from numba_gemm.lab.bench import ceilings
from numba_gemm.lab.harness.pictures import bars, panels
from numba_gemm.lab.memory import machine
from numba_gemm.runtime.driver import call
from numba_gemm.simulator.switch import device_function

WORD, LINE = 4, 32  # bytes; words
LINKS = 32  # links of a chain per turn of the loop that follows it
SHARED_WORDS, LOCAL_WORDS = 2048, 8192
CONSTANT_WORDS, NEAR_WORDS, CONSTANT_LINE = 8192, 256, 16  # words in all; in the first constant cache; in a line
LOCAL_LINES = 256  # words of a thread's local memory that fit L1
FIRST, READS = ceilings.FIRST_ROWS, ceilings.ROW_READS  # starting rows of turns; reads per turn
ROWS = FIRST + READS
TEXEL = 16  # bytes per texel of the textures for bandwidth
TEXTURE_UNITS = 4  # per multiprocessor
OPERANDS = 3  # per multiply-add
CHASE = "int64, int64, int64, uint64[::1]"  # types of start, warm, steps and out

LATENCY_ORDER = {"register": 1, "shared": 2, "constant": 3, "local": 4, "global": 4, "texture": 4}
"""The guide's rank of each space by its latency."""

DEVICE = "device memory"
ONE, MANY = "constant cache", "32 addresses"
LEVELS = (
    *(("register", "registers"), ("shared", "shared memory"), ("local", "L1"), ("local", "L2")),
    *(("global", level) for level in ("L1", "L2", DEVICE)),
    *(("constant", level) for level in (ONE, MANY, "beyond")),
    *(("texture", level) for level in ("L1", "L2", DEVICE)),
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


@device_function
def multiply_add(one: Any, value: Any) -> Any:
    """Multiply and add in registers, as a step of a chain."""
    return value * one + one


def walker(read: Any, number: Any) -> Any:
    """Return a device function that follows a chain of reads, first untimed ones to warm up, then timed ones."""

    @device_function
    def walk(memory: Any, start: Any, warm: Any, steps: Any, out: Any) -> None:
        place = number(start + cuda.threadIdx.x)  # as far as the compiler knows, it differs between lanes
        for counts in range(2):
            left = uint32(steps) if counts else uint32(warm)
            since, begin = nanoseconds(), cycles()
            while left > uint32(0):
                for _ in range(LINKS):
                    place = read(memory, place)
                left = uint32(left - uint32(LINKS))
            end, until = cycles(), nanoseconds()
            out[0], out[1] = end - begin, until - since
        out[2] = uint64(place)

    return walk


walk_array, walk_texture = walker(element, uint32), walker(first_channel, uint32)
walk_registers = walker(multiply_add, float32)


def chaser(name: str, memory: str, walk: Any) -> Any:
    """Return a kernel that follows a chain in memory that is passed to it, as a parameter of this type."""

    @machine.kernel(f"{memory}, {CHASE}", name)
    def chase(memory: Any, start: Any, warm: Any, steps: Any, out: Any) -> None:
        walk(memory, start, warm, steps, out)

    return chase


chase_global = chaser("chase_global", "uint32[::1]", walk_array)
chase_texture = chaser("chase_texture", "uint64", walk_texture)
chase_registers = chaser("chase_registers", "float32", walk_registers)


@machine.kernel(f"uint32[::1], {CHASE}")
def chase_shared(chain: Any, start: Any, warm: Any, steps: Any, out: Any) -> None:
    """Follow a copy of a chain in shared memory."""
    memory = cuda.shared.array(SHARED_WORDS, uint32)
    copy_array(memory, chain)
    walk_array(memory, start, warm, steps, out)


@machine.kernel(f"uint32[::1], {CHASE}")
def chase_local(chain: Any, start: Any, warm: Any, steps: Any, out: Any) -> None:
    """Follow a copy of a chain in local memory."""
    memory = cuda.local.array(LOCAL_WORDS, uint32)
    copy_array(memory, chain)
    walk_array(memory, start, warm, steps, out)


@machine.kernel(CHASE)
def chase_constant(start: Any, warm: Any, steps: Any, out: Any) -> None:
    """Follow one of the two chains in constant memory."""
    walk_array(cuda.const.array_like(CONSTANT), start, warm, steps, out)


# ---------------------------------------------------------------------------------------------------- bandwidth


@device_function
def four_floats(memory: Any, place: Any) -> Any:
    """Read four words of a matrix with one row, and return their sum."""
    x, y, z, w = ceilings.load4(memory, uint32(0), place)
    return (x + y) + (z + w)


@device_function
def four_channels(texture: Any, place: Any) -> Any:
    """Read a word of a texture with four channels, and return their sum."""
    x, y, z, w = texel(texture, uint32(place))
    return (x + y) + (z + w)


def summing(read: Any, number: Any, apart: int) -> Any:
    """Return a device function that sums reads of places `apart` from each other, from another start in each turn."""

    @device_function
    def total_of(memory: Any, turns: Any, start: Any) -> Any:
        total, turn, last = number(0), uint32(0), uint32(turns)
        while turn < last:
            first = uint32(start + turn % FIRST * apart)
            for i in range(READS):
                total = number(total + read(memory, first + uint32(i * apart)))
            turn = uint32(turn + 1)
        return total

    return total_of


sum_vectors, sum_texels = summing(four_floats, float32, 4 * WARP), summing(four_channels, uint32, WARP)
sum_floats, sum_words = summing(element, float32, 1), summing(element, uint32, 1)


@machine.kernel("int64, float32[:, ::1], float32[:, ::1]")
def read_cached(turns: Any, x: Any, out: Any) -> None:
    """Read rows of a small array, four floats per thread and the same ones in all blocks."""
    out[0, uint32(cuda.grid(1))] = sum_vectors(x, turns, uint32(cuda.threadIdx.x % WARP * 4))


@machine.kernel("int64, float32[:, ::1], float32[:, ::1]")
def read_local(turns: Any, x: Any, out: Any) -> None:
    """Read a thread's copy of a few floats."""
    memory = cuda.local.array(ROWS, float32)
    for i in range(ROWS):
        memory[i] = x[0, i]
    out[0, uint32(cuda.grid(1))] = sum_floats(memory, turns, uint32(0))


@machine.kernel("int64, int64, uint32[::1]")
def read_constant(turns: Any, apart: Any, out: Any) -> None:
    """Read constants that are `apart` words apart in neighbouring lanes; with 0, all lanes read the same word."""
    start = uint32(cuda.threadIdx.x % WARP) * uint32(apart)
    out[uint32(cuda.grid(1))] = sum_words(cuda.const.array_like(CONSTANT), turns, start)


@machine.kernel("int64, uint64, uint32[::1]")
def read_texture(turns: Any, texture: Any, out: Any) -> None:
    """Read texels of four channels, consecutive in the lanes."""
    out[uint32(cuda.grid(1))] = sum_texels(texture, turns, uint32(cuda.threadIdx.x % WARP))


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


def per_step(kernel: Any, arguments: tuple[Any, ...], steps: int, end: int) -> tuple[float, float]:
    """Return cycles and nanoseconds per step of one thread; raise AssertionError if its result is not `end`."""
    out = cuda.to_device(np.zeros(3, np.uint64))
    machine.enqueue(kernel, 1, 1, *arguments, steps, out)(0)
    found = out.copy_to_host()
    assert found[2] == end, f"{kernel.__name__} ends at {found[2]}, not at {end}"
    return float(found[0]) / steps, float(found[1]) / steps


def walks(
    kernel: Any, memory: tuple[Any, ...], order: np.ndarray, warm: int, steps: int, at: int = 0
) -> Iterator[tuple[float, float]]:
    """Yield cycles and nanoseconds per step of one walk along a chain after the other.

    A walk without warm-up continues where the last one ended, so that no cache holds its lines; others start at the
    same place again.
    """
    warm = ceil_div(warm, LINKS) * LINKS
    while True:
        end = (at + warm + steps) % len(order)
        yield per_step(kernel, (*memory, int(order[at]), warm), steps, order[end])
        if not warm:
            at = end


def chains(
    stack: ExitStack, steps: int, lines: Mapping[str, int], rounds: int
) -> dict[tuple[str, str], Iterator[tuple[float, float]]]:
    """Return walks by space and level; chains in L1, L2 and device memory have one link per line of 32 words."""
    found = {}
    for level, count in lines.items():
        chain, order = ring(range(0, LINE * count, LINE), LINE * count)
        array = cuda.to_device(chain)
        texture = stack.enter_context(linear_texture(array, 1))
        # Two passes over the lines, so that the second half of a chain has not evicted the first.
        warm, other = (0, rounds * steps % count) if level == DEVICE else (2 * count, 0)
        found["global", level] = walks(chase_global, (array,), order, warm, steps)
        found["texture", level] = walks(chase_texture, (texture,), order, warm, steps, other)
    for space, level, kernel, words, warm in (
        ("shared", "shared memory", chase_shared, SHARED_WORDS, LINKS),
        ("local", "L1", chase_local, LOCAL_LINES, LOCAL_LINES),
        ("local", "L2", chase_local, LOCAL_WORDS, LOCAL_WORDS),
    ):
        chain, order = ring(range(words), words)
        found[space, level] = walks(kernel, (cuda.to_device(chain),), order, warm, steps)
    for level, order in ((ONE, NEAR_ORDER), ("beyond", FAR_ORDER)):
        found["constant", level] = walks(chase_constant, (), order, len(order), steps)
    found["register", "registers"] = (
        per_step(chase_registers, (np.float32(1), 0, 0), steps, steps) for _ in itertools.count()
    )
    return found


def constant_sum(turns: int, apart: int) -> np.ndarray:
    """Return the sum of each lane of `read_constant`, modulo 2 to the 32."""
    first = np.arange(WARP)[:, None] * apart + np.arange(turns) % FIRST
    places = first[:, :, None] + np.arange(READS)
    return CONSTANT[places].sum(axis=(1, 2), dtype=np.uint32)


def bandwidths(
    stack: ExitStack, turns: int, blocks: int, threads: int, l2_kib: int, read_kib: int, rounds: int
) -> dict[tuple[str, str], tuple[float, float]]:
    """Return TB/s that lanes receive, measured by kernels that are checked once, and predicted, by memory."""
    lanes, properties = blocks * threads, machine.properties()
    theory = ceilings.ceilings_of(properties)
    unit = ceilings.ROWS_AT_ONCE * 4 * WORD * lanes
    rows = [ceilings.ROWS_AT_ONCE * max(1, kib * KIB // unit) for kib in (l2_kib, read_kib)]
    small, large = (cuda.to_device(np.ones((count, 4 * lanes), np.float32)) for count in rows)
    tile = cuda.to_device(np.ones((1, 4 * WARP * ROWS), np.float32))
    texture = stack.enter_context(linear_texture(cuda.to_device(np.ones(4 * WARP * ROWS, np.uint32)), 4))
    one, reads, chains = np.float32(1), READS * turns, ceilings.CHAINS
    added, operands = 2 * turns * chains * ceilings.LINKS, theory.fp32 / 2 * OPERANDS * WORD
    texels = TEXTURE_UNITS * TEXEL * properties.sm_count * properties.clock_hz
    # Kernel, arguments before the sums, words that a lane receives, which are ones but for constants and registers, and
    # predicted byte/s.
    work: dict[tuple[str, str], tuple[Any, tuple[Any, ...], int, float]] = {
        ("register", "registers"): (ceilings.multiply_add, (2 * turns, one, one), OPERANDS * added, operands),
        ("shared", "shared memory"): (ceilings.read_shared, (turns, one), 4 * reads, theory.shared),
        ("local", "L1"): (read_local, (turns, tile), reads, theory.shared),
        ("global", "L1"): (read_cached, (turns, tile), 4 * reads, theory.shared),
        ("global", "L2"): (ceilings.read_global, (turns, small), 4 * rows[0] * turns, theory.l2),
        ("global", DEVICE): (ceilings.read_global, (1, large), 4 * rows[1], theory.dram),
        ("constant", ONE): (read_constant, (turns, 0), reads, math.nan),
        ("constant", MANY): (read_constant, (turns, 1), reads, math.nan),
        ("texture", "L1"): (read_texture, (turns, texture), 4 * reads, texels),
    }
    sums: dict[tuple[str, str], Any] = {
        ("register", "registers"): added + chains * (chains - 1) // 2,
        ("constant", ONE): np.resize(constant_sum(turns, 0), lanes),
        ("constant", MANY): np.resize(constant_sum(turns, 1), lanes),
    }
    calls = {}
    for name, (kernel, arguments, words, _) in work.items():
        integers = name[0] in ("constant", "texture")
        out = cuda.to_device(np.zeros(lanes, np.uint32) if integers else np.zeros((1, lanes), np.float32))
        call = machine.enqueue(kernel, blocks, threads, *arguments, out)
        calls[name] = machine.checked(call, out, np.broadcast_to(sums.get(name, words), lanes), name)
    us = machine.timed(calls, rounds=rounds)
    found = {name: (lanes * WORD * work[name][2] / us[name] / 1e6, work[name][3] / 1e12) for name in work}
    found["constant", MANY] = found["constant", MANY][0], found["constant", ONE][0] / WARP
    return found


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

    One row per space and level: the guide's rank of the space, ``latency_cycles`` and ``latency_ns`` per read
    (medians), and ``tb_s`` that lanes receive (median); NaN if not measured or predicted.

    Parameters
    ----------
    steps: Timed reads of a chain, a multiple of 32; `device_kib` must have enough lines for all walks.
    l1_kib, l2_kib, device_kib: Global memory that chains cover: less than L1, between L1 and L2, and more than L2.
    read_kib: Device memory that is read for its bandwidth; for L2, `l2_kib`. Both are rounded to whole rows of
        vectors.
    turns: Turns of the kernels that read repeatedly.
    blocks, threads: Launch geometry of the kernels that measure bandwidth; four blocks per multiprocessor by
        default.
    walk_rounds, rounds: Samples of each latency, and of each bandwidth.
    """
    blocks = blocks or machine.properties().sm_count * ceilings.BLOCKS_PER_SM
    covered = {"L1": l1_kib, "L2": l2_kib, DEVICE: device_kib}
    lines = {level: kib * KIB // (LINE * WORD) for level, kib in covered.items()}
    with ExitStack() as stack:
        walked = chains(stack, steps, lines, walk_rounds)
        # The buffers for bandwidth evict from L2 what remains of the chains since they were written.
        rates = bandwidths(stack, turns, blocks, threads, l2_kib, read_kib, rounds)
        waits = {name: np.median([next(walk) for _ in range(walk_rounds)], axis=0) for name, walk in walked.items()}
    unknown = math.nan, math.nan
    return pd.DataFrame(
        {"space": space, "level": level, "predicted_latency_order": LATENCY_ORDER[space]}
        | dict(zip(("latency_cycles", "latency_ns"), waits.get((space, level), unknown)))
        | dict(zip(("tb_s", "predicted_tb_s"), rates.get((space, level), unknown)))
        for space, level in LEVELS
    )


def claims(frame: pd.DataFrame) -> dict[str, Any]:
    at = frame.set_index(["space", "level"])
    wait, rate, predicted = (at[name].dropna().to_dict() for name in ("latency_cycles", "tb_s", "predicted_tb_s"))
    outwards = [("register", "registers"), ("shared", "shared memory"), ("global", "L2"), ("global", DEVICE)]
    near = [wait[name] for name in (*outwards[:2], ("constant", ONE))]
    far = [wait.pop(name) for name in (("global", DEVICE), ("texture", DEVICE))]
    in_l1 = [wait[space, "L1"] for space in ("local", "global")]
    direct = predicted.keys() - {("global", "L2"), ("constant", MANY)}
    farther = [wait["texture", level] > wait["global", level] for level in ("L1", "L2")]
    return {
        "latency grows from registers to shared memory, L2 and device memory: each waits longer": (
            np.diff([*(wait[name] for name in outwards[:3]), far[0]]) > 0
        ),
        "and each gives fewer bytes a second": np.diff([rate[name] for name in outwards]) < 0,
        "registers, shared memory, a constant that its first cache holds: in the guide's order": near == sorted(near),
        "not in it: local and global memory that L1 holds are nearer than a constant beyond the first cache": (
            max(in_l1) < wait["constant", "beyond"]
        ),
        "nothing waits as long as global memory and textures that no cache holds": min(far) > max(wait.values()),
        "local memory that L1 holds is as near as global memory there": 0.5 < in_l1[0] / in_l1[1] < 2,
        "a hit in L1 waits a third of a hit in L2, or less": wait["global", "L1"] < wait["global", "L2"] / 3,
        "a texture is farther than global memory wherever both are": [*farther, far[1] > far[0]],
        "but for L2, each gives 85 % of its theoretical bandwidth and more": (
            rate[name] > 0.85 * predicted[name] for name in direct
        ),
        "L2 does not give three quarters": rate["global", "L2"] < 0.75 * predicted["global", "L2"],
        "32 addresses of constants give a 32nd of the bytes of one, within a tenth": (
            abs(rate["constant", MANY] / predicted["constant", MANY] - 1) < 0.1
        ),
    }


PLOT = panels(
    bars("latency_cycles", ["space", "level"], "latency_cycles == latency_cycles", xscale="log"),
    bars("tb_s", ["space", "level"], "tb_s == tb_s", xscale="log"),
)
SMALL = {"steps": 64, "l1_kib": 2, "l2_kib": 4, "device_kib": 32, "read_kib": 4, "turns": 2, "blocks": 1}
SMALL |= {"threads": 32, "walk_rounds": 2, "rounds": 1}
CHASES = (chase_global, chase_shared, chase_local, chase_constant, chase_texture, chase_registers)
KERNELS = (*CHASES, read_cached, read_local, read_constant, read_texture)
EXPERIMENT = machine.experiment(memory_spaces, "9.2", claims, PLOT, SMALL, KERNELS, allowed={"steps": LINKS})
