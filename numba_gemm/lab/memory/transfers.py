"""A copy between host and device approaches the link's speed only if it is large and its memory page-locked.

Copies. The predicted time of a copy is that of the smallest copy of its kind, 4 KB here, plus its bytes divided by the
bandwidth of the path. Between page-locked memory and the device the path is the link: transfers per second and lane,
times lanes, times the fraction of the bits that its encoding leaves for data (16 lanes of PCIe 5.0: 63 GB/s). Packet
headers are not included. On an H200, copies of 4 MB and more take about 9 to 15 % longer than predicted, and the
largest move about 55 GB/s in either direction. A copy of 64 KB takes hardly longer than one of 4 KB; below 1 MB, copies
take from a fifth less than predicted to two fifths more. Registered memory is copied as fast as memory that was
allocated page-locked. So is write-combined memory to the device, from 1 MB on; the other direction is not measured.

The driver cannot pass pageable memory to the copy engine. It copies through page-locked memory of its own, and is
predicted to be as fast as one thread of this host copies the same number of bytes, or as the link, whichever is slower.
This prediction is accurate only to a factor of slightly more than two. NumPy copies 1 MB at about 35 GB/s, as if in the
host's cache; the driver moves it at about 11 GB/s and takes twice the predicted time. It moves 64 MB to the host at
about 16 GB/s and takes two fifths to half of the predicted time, because the host copied this size at no more than 7.
For 256 MB it takes about a fifth longer than predicted to the device, and a fifth to two fifths less to the host. The
difference between the two directions is not explained.

A copy on the device reads and writes, and both count: 3.9 TB/s of the theoretical 4.8 at 256 MB, 10 % longer than
predicted. Copies of 4 and 16 MB fit the L2 cache and take a seventh to a fifth less than predicted.

Page-locking. The predicted cost is proportional to the bytes, as measured for the largest size here: for 256 MB,
registering takes about 7 ms and unregistering 5, allocating page-locked memory about 110 and freeing it 35. At 64 MB
the prediction is accurate to a fifth, for freeing to two fifths. Registering smaller memory costs more per byte, as if
each call had a fixed cost: for 1 MB, registering and unregistering take 4 to 6 times as long as predicted, for 4 MB 1.5
to 2 times. Allocating and freeing do not follow that pattern: they take nearly twice the predicted time for 1 MB, but
only two thirds of it for 4 MB. The first touch of new memory takes about 60 ms for 256 MB, but up to 16 MB only a tenth
to a third of what that predicts. It is as if few of the rounds touched new pages; the C library may reuse memory that
was freed before.

Registering pays off after as many copies as it takes to save the time of registering and unregistering; the number is
predicted from the predicted times. From 4 MB on it pays off with the first or second copy, at 1 MB after about 4.
Allocating page-locked memory includes its first touch, which other memory needs too, so only the time beyond that
counts: it pays off after 2 to 11 copies of 4 MB and more, and after about 15 of 1 MB. The cost of pinning to the rest
of the system does not show here.

Packing. Many small copies are predicted to take one latency each. From page-locked memory they take a third to a half
of that, about 3 to 4 µs each, where one alone takes 9 to 11: latency is not throughput, and calls overlap. From
pageable memory they take a fifth to a quarter up to 16 KB; at 64 KB they take about four fifths of the prediction.
Packed into one page-locked buffer, they are predicted to take the host's copy, one latency and the link's time, plus
reading and writing device memory for unpacking. That leaves out the launch and NumPy's call: 1000 pieces of 1 KB take
about 0.4 ms, where 0.12 are predicted. At 64 KB they take nearly twice as long as predicted, and half of the excess is
the host's copy: with its rate measured for 64 MB, 7 GB/s, instead of that for 256 MB, the prediction would be 10.6 of
the measured 13.6 ms. Packing gains a factor of about 11 at 1 KB, of 5 at 4 KB, and of nearly 2 at 16 KB. At 64 KB it
loses: copied one by one from page-locked memory, the pieces take less than a third of the time, since the link is
faster than the host can pack. Only pieces in pageable memory still gain from packing, by a quarter.

Chains. Data that stay on the device are copied once in each direction, however many kernels work on them. With a round
trip after each step, both copies count for every step: 16 steps on 64 MB take about 40 ms instead of 3.3. Kernels are
predicted from the theoretical bandwidth of device memory, 28 µs per step. They take about 50: a kernel that moves one
float per thread reaches little more than half of that bandwidth (as in `strided_copy`, at stride 1). Round trips take
about 15 % longer than predicted, like large copies.

Source: CUDA C++ Best Practices Guide, "Data Transfer Between Host and Device" and "Pinned Memory"; CUDA Driver API,
"API synchronization behavior"; for the link's rates and encodings, the PCI Express Base Specifications 1.0 to 6.0; for
the reuse of freed memory, mallopt(3) on M_MMAP_THRESHOLD.

One module because the kernels, the measurement, the claims and the plot of an experiment are read together.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numba import cuda

from numba_gemm.device.units import ceil_div
from numba_gemm.lab.harness.experiment import Experiment
from numba_gemm.lab.memory import machine, movement
from numba_gemm.lab.memory.drawing import COLOURS, MARKERS, MEASURED, PREDICTED
from numba_gemm.runtime import pinned_memory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ITEM = 4
BLOCK = 256
GUARD = 64  # words behind the copied ones, which must not change
UNTOUCHED = np.uint32(0xFFFFFFFF)  # value that `movement.clear` writes
ROUNDS = 7
SIZES = tuple(4 << power for power in range(10, 28, 2))  # 4 KB to 256 MB

TO_DEVICE, TO_HOST, ON_DEVICE, ON_HOST = "host to device", "device to host", "on the device", "on the host"
PAGEABLE, PINNED, REGISTERED, WRITE_COMBINED = "pageable", "pinned", "registered", "write-combined"

# Per generation: 10^9 transfers of one bit per second and lane, and the fraction of the bits that is data. From
# generation 6 on, 236 of the 256 bytes of a flow control unit carry packets.
LINKS: dict[float, tuple[float, float]] = {
    1: (2.5, 8 / 10),
    2: (5, 8 / 10),
    3: (8, 128 / 130),
    4: (16, 128 / 130),
    5: (32, 128 / 130),
    6: (64, 236 / 256),
}


# ----------------------------------------------------------------------------------------------------------- models


def link_gb_s(generation: float, lanes: float) -> float:
    """Theoretical bandwidth of a PCI Express link in one direction; NaN for an unknown generation."""
    rate, data = LINKS.get(generation, (math.nan, math.nan))
    return rate * data * lanes / 8


def copy_us(latency_us: float, size: int, gb_s: float) -> float:
    """Predicted microseconds of a copy of `size` bytes."""
    return latency_us + size / gb_s / 1e3


def break_even(cost_us: float, slow_us: float, fast_us: float) -> float:
    """Number of faster copies that save as much time as the speed-up has cost."""
    return max(cost_us, 0.0) / (slow_us - fast_us) if slow_us > fast_us else math.inf


def packed_us(latency_us: float, size: int, host_gb_s: float, link: float, device_gb_s: float) -> float:
    """Predicted microseconds of packing `size` bytes, copying them, and reading and writing them on the device."""
    return size / host_gb_s / 1e3 + copy_us(latency_us, size, link) + 2 * size / device_gb_s / 1e3


def chain_us(trips: int, steps: int, size: int, latencies_us: float, link: float, device_gb_s: float) -> float:
    """Predicted microseconds of steps that read and write `size` bytes, with `trips` copies to the device and back."""
    return trips * (latencies_us + 2 * size / link / 1e3) + steps * 2 * size / device_gb_s / 1e3


def scattered(pieces: int) -> np.ndarray:
    """Random places of pieces among twice as many slots; the same in each call."""
    return np.random.default_rng(0).permutation(2 * pieces)[:pieces]


# ---------------------------------------------------------------------------------------------------------- kernels


@cuda.jit
def unpack(target: Any, packed: Any, places: Any, length: Any) -> None:
    """Copy each piece of `length` consecutive elements to its place, with one row of blocks per piece."""
    piece = cuda.blockIdx.y
    x = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if x < length:
        target[places[piece] * length + x] = packed[piece * length + x]


@cuda.jit
def step(data: Any) -> None:
    """Add one to each element; a step of a chain."""
    x = cuda.grid(1)
    if x < data.size:
        data[x] += np.float32(1)


# ---------------------------------------------------------------------------------------------------------- helpers


def link() -> tuple[float, float]:
    """Current generation and lanes of the device's link; NaN if NVML does not report them."""
    for ask in (_link_by_pynvml, _link_by_bindings):
        # Missing, outdated or forbidden in this container: the link is unknown.
        with contextlib.suppress(Exception):
            return ask(cuda.get_current_device().uuid)
    return math.nan, math.nan


def _link_by_pynvml(uuid: str) -> tuple[float, float]:
    import pynvml as nvml

    nvml.nvmlInit()
    gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
    return nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu), nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu)


def _link_by_bindings(uuid: str) -> tuple[float, float]:
    from cuda.bindings import nvml

    nvml.init_v2()
    gpu = nvml.device_get_handle_by_uuid(uuid)
    return nvml.device_get_curr_pcie_link_generation(gpu), nvml.device_get_curr_pcie_link_width(gpu)


def both_ends_us(make: Callable[[], AbstractContextManager[object]], rounds: int) -> tuple[float, float]:
    """Median microseconds of entering a context, and of leaving it."""
    entering, leaving = [], []
    for _ in range(rounds):
        begin = time.perf_counter()
        with make():
            entered = time.perf_counter()
        left = time.perf_counter()
        entering.append(entered - begin)
        leaving.append(left - entered)
    return statistics.median(entering) * 1e6, statistics.median(leaving) * 1e6


def check(found: np.ndarray, expected: np.ndarray, what: str) -> None:
    """Raise AssertionError unless the copied data are as expected, and the memory behind them is unchanged."""
    if not np.array_equal(found[: len(expected)], expected):
        raise AssertionError(f"{what}: what was copied is wrong")
    if not (found[len(expected) :] == UNTOUCHED).all():
        raise AssertionError(f"{what}: more was written than was to be copied")


# -------------------------------------------------------------------------------------------------------- four parts


def measure_copies(sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Rows of part "copy"."""
    words = max(sizes) // ITEM
    room = words + GUARD
    rows: list[dict[str, Any]] = []

    def add(direction: str, memory: str, size: int, us: float, times: int = 1) -> None:
        rows.append(
            {"part": "copy", "what": "copy", "direction": direction, "memory": memory, "bytes": size, "count": 1}
            | {"us": us, "gb_s": times * size / us / 1e3}
        )

    with ExitStack() as scopes:
        (stream,) = scopes.enter_context(machine.streams())
        values, back = (scopes.enter_context(pinned_memory.pinned(room, np.uint32)) for _ in range(2))
        near, far = (scopes.enter_context(movement.device_array(room, np.uint32)) for _ in range(2))
        values[:] = np.arange(1, room + 1, dtype=np.uint32)
        hosts = {
            PAGEABLE: np.empty(room, np.uint32),
            PINNED: scopes.enter_context(pinned_memory.pinned(room, np.uint32)),
            REGISTERED: np.empty(room, np.uint32),
            WRITE_COMBINED: scopes.enter_context(pinned_memory.pinned(room, np.uint32, write_combined=True)),
        }
        for salt, host in enumerate(hosts.values()):
            np.add(values, salt, out=host)
        scopes.enter_context(pinned_memory.registered(hosts[REGISTERED]))

        def on_device(place: Any, size: int) -> np.ndarray:
            """Copy device memory to the host, including the guard behind it."""
            movement.copy(back, place, size + GUARD * ITEM, stream)
            movement.finish(stream)
            return back[: size // ITEM + GUARD]

        def time_us(target: Any, source: Any, size: int) -> float:
            return 1e3 * movement.median_ms([stream], lambda: movement.copy(target, source, size, stream), rounds)

        for salt, (memory, host) in enumerate(hosts.items()):
            for size in sizes:
                movement.clear(near, room * ITEM, stream)
                us = time_us(near, host, size)
                check(on_device(near, size), values[: size // ITEM] + np.uint32(salt), f"{memory} to device")
                add(TO_DEVICE, memory, size, us)
        movement.copy(near, values, room * ITEM, stream)
        for memory, host in hosts.items():
            if memory == WRITE_COMBINED:
                continue  # the host reads write-combined memory too slowly for this direction to be useful
            for size in sizes:
                host[: size // ITEM + GUARD] = UNTOUCHED
                us = time_us(host, near, size)
                check(host[: size // ITEM + GUARD], values[: size // ITEM], f"device to {memory}")
                add(TO_HOST, memory, size, us)
        for size in sizes:
            movement.clear(far, room * ITEM, stream)
            us = time_us(far, near, size)
            check(on_device(far, size), values[: size // ITEM], ON_DEVICE)
            add(ON_DEVICE, "device", size, us, times=2)
        source, target = hosts[PAGEABLE], np.empty_like(hosts[PAGEABLE])
        for size in sizes:
            add(
                ON_HOST,
                PAGEABLE,
                size,
                movement.host_us(partial(np.copyto, target[: size // ITEM], source[: size // ITEM]), rounds),
            )
        # An idle link may use a lower generation, so query it during copies.
        for _ in range(4):
            movement.copy(near, values, words * ITEM, stream)
        generation, lanes = link()
        movement.finish(stream)
    predict_copies(rows, link_gb_s(generation, lanes), machine.properties().memory_bandwidth / 1e9)
    for row in rows:
        if row["direction"] in (TO_DEVICE, TO_HOST):
            row |= {"link_generation": generation, "link_lanes": lanes}
    return rows


def predict_copies(rows: Sequence[dict[str, Any]], link_bandwidth: float, device_bandwidth: float) -> None:
    """Add the theoretical bandwidth and the predicted time and bandwidth to rows of copies."""
    smallest = min(row["bytes"] for row in rows)
    latency = {(row["direction"], row["memory"]): row["us"] for row in rows if row["bytes"] == smallest}
    by_host = {row["bytes"]: row["gb_s"] for row in rows if row["direction"] == ON_HOST}
    for row in rows:
        direction, memory, size = row["direction"], row["memory"], row["bytes"]
        if direction == ON_HOST:
            continue
        times = 2 if direction == ON_DEVICE else 1
        theoretical = device_bandwidth if direction == ON_DEVICE else link_bandwidth
        bandwidth = float(np.minimum(theoretical, by_host[size])) if memory == PAGEABLE else theoretical
        predicted = copy_us(latency[direction, memory], times * size, bandwidth)
        row |= {"theoretical_gb_s": theoretical, "predicted_us": predicted}
        row |= {"predicted_gb_s": times * size / predicted / 1e3}


def pinning_costs(size: int, rounds: int) -> dict[str, float]:
    """Microseconds of each operation that page-locks memory or undoes it, and of first touching as much memory."""
    touched = np.ones(size, np.uint8)
    register, unregister = both_ends_us(lambda: pinned_memory.registered(touched), rounds)
    allocate, free = both_ends_us(lambda: pinned_memory.pinned(size, np.uint8), rounds)
    touch = movement.host_us(lambda: np.empty(size, np.uint8).fill(1), rounds)
    return {
        "register": register,
        "unregister": unregister,
        "allocate pinned": allocate,
        "free pinned": free,
        "first touch": touch,
    }


def measure_pinning(sizes: Sequence[int], copies: Sequence[Mapping[str, Any]], rounds: int) -> list[dict[str, Any]]:
    """Rows of the parts "pinning" and "break-even"."""
    costs = {(what, size): us for size in sizes for what, us in pinning_costs(size, rounds).items()}
    largest = max(sizes)
    predicted = {(what, size): costs[what, largest] * size / largest for what, size in costs}
    rows: list[dict[str, Any]] = [
        {"part": "pinning", "what": what, "bytes": size, "count": 1, "us": us, "predicted_us": predicted[what, size]}
        for (what, size), us in costs.items()
    ]
    of = {(row["direction"], row["memory"], row["bytes"]): row for row in copies}
    for direction in (TO_DEVICE, TO_HOST):
        for size in sizes:
            for memory, ways in (
                (REGISTERED, ("register", "unregister")),
                (PINNED, ("allocate pinned", "free pinned")),
            ):
                row = {"part": "break-even", "what": ways[0], "direction": direction, "memory": memory, "bytes": size}
                for prefix, cost in (("", costs), ("predicted_", predicted)):
                    anyway = cost["first touch", size] if memory == PINNED else 0.0
                    row[f"{prefix}copies"] = break_even(
                        sum(cost[way, size] for way in ways) - anyway,
                        of[direction, PAGEABLE, size][f"{prefix}us"],
                        of[direction, memory, size][f"{prefix}us"],
                    )
                rows.append(row)
    return rows


def measure_packing(pieces: int, size: int, copies: Sequence[Mapping[str, Any]], rounds: int) -> list[dict[str, Any]]:
    """Rows of part "packing" for one size of pieces."""
    known = rates(copies)
    places = scattered(pieces)
    length, total = size // ITEM, pieces * size
    rows: list[dict[str, Any]] = []
    with ExitStack() as scopes:
        (stream,) = scopes.enter_context(machine.streams())
        pageable = np.arange(2 * pieces * length, dtype=np.uint32)
        pinned, back = (scopes.enter_context(pinned_memory.pinned(len(pageable), np.uint32)) for _ in range(2))
        buffer = scopes.enter_context(pinned_memory.pinned(pieces * length, np.uint32))
        target = scopes.enter_context(movement.device_array(len(pageable), np.uint32))
        packed = scopes.enter_context(movement.device_array(pieces * length, np.uint32))
        index = scopes.enter_context(movement.device_array(pieces, np.int64))
        pinned[:] = pageable
        movement.copy(index, places, places.nbytes, stream)  # once: the places of the pieces do not change
        movement.finish(stream)
        put = machine.enqueue(unpack, (ceil_div(length, BLOCK), pieces), BLOCK, target, packed, index, length)
        table, offsets = pageable.reshape(-1, length), (places * size).tolist()

        def one_by_one(source: np.ndarray) -> None:
            to, from_ = movement.address(target), movement.address(source)
            for offset in offsets:
                movement.copy(to + offset, from_ + offset, size, stream)

        def by_packing() -> None:
            # "clip" saves NumPy a temporary buffer; all places are valid.
            np.take(table, places, axis=0, out=buffer.reshape(pieces, length), mode="clip")
            movement.copy(packed, buffer, total, stream)
            put(stream)

        expected = np.full((2 * pieces, length), UNTOUCHED)
        expected[places] = table[places]
        separate = {
            memory: pieces * known[memory] + total / bandwidth / 1e3
            for memory, bandwidth in ((PAGEABLE, known["pageable link"]), (PINNED, known["link"]))
        }
        once = packed_us(known[PINNED], total, known["host"], known["link"], known["device"])
        ways: list[tuple[str, str, Callable[[], None], float]] = [
            ("one by one", PAGEABLE, lambda: one_by_one(pageable), separate[PAGEABLE]),
            ("one by one", PINNED, lambda: one_by_one(pinned), separate[PINNED]),
            ("packed", PINNED, by_packing, once),
        ]
        for what, memory, work, predicted in ways:
            buffer[:] = 0
            movement.clear(packed, total, stream)
            movement.clear(target, pageable.nbytes, stream)
            us = 1e3 * movement.median_ms([stream], work, rounds)
            movement.copy(back, target, pageable.nbytes, stream)
            movement.finish(stream)
            check(back, expected.reshape(-1), f"pieces of {size} bytes {what} from {memory} memory")
            rows.append(
                {"part": "packing", "what": what, "direction": TO_DEVICE, "memory": memory, "bytes": size}
                | {"count": pieces, "us": us, "gb_s": total / us / 1e3, "predicted_us": predicted}
            )
    return rows


def measure_chain(
    steps: Sequence[int], size: int, copies: Sequence[Mapping[str, Any]], rounds: int
) -> list[dict[str, Any]]:
    """Rows of part "chain"."""
    known = rates(copies)
    words = size // ITEM
    rows: list[dict[str, Any]] = []
    with ExitStack() as scopes:
        (stream,) = scopes.enter_context(machine.streams())
        start, result = (scopes.enter_context(pinned_memory.pinned(words)) for _ in range(2))
        data = scopes.enter_context(movement.device_array(words))
        start[:] = np.arange(words, dtype=np.uint32) % 4096
        advance = machine.enqueue(step, ceil_div(words, BLOCK), BLOCK, data)

        def kept(count: int) -> None:
            movement.copy(data, start, size, stream)
            for _ in range(count):
                advance(stream)
            movement.copy(result, data, size, stream)

        def round_trips(count: int) -> None:
            for number in range(count):
                movement.copy(data, result if number else start, size, stream)
                advance(stream)
                movement.copy(result, data, size, stream)

        def measure(what: str, work: Callable[[int], None], count: int, trips: int) -> dict[str, Any]:
            result[:] = -1
            us = 1e3 * movement.median_ms([stream], lambda: work(count), rounds)
            if not np.array_equal(result, start + np.float32(count)):
                raise AssertionError(f"a chain of {count} steps, {what}: the result is wrong")
            latencies = known[PINNED] + known["back"]
            predicted = chain_us(trips, count, size, latencies, known["link"], known["device"])
            row = {"part": "chain", "what": what, "memory": PINNED, "bytes": size, "count": count}
            return row | {"us": us, "predicted_us": predicted}

        for count in steps:
            rows.append(measure("kept on the device", kept, count, 1))
            rows.append(measure("round trips", round_trips, count, count))
    return rows


def rates(copies: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Latencies of copies to the device and `back` in microseconds; bandwidths of link, host and device in GB/s."""
    of = {(row["direction"], row["memory"], row["bytes"]): row for row in copies}
    small, large = min(row["bytes"] for row in copies), max(row["bytes"] for row in copies)
    host, link_bandwidth = of[ON_HOST, PAGEABLE, large]["gb_s"], of[TO_DEVICE, PINNED, large]["theoretical_gb_s"]
    return {
        PAGEABLE: of[TO_DEVICE, PAGEABLE, small]["us"],
        PINNED: of[TO_DEVICE, PINNED, small]["us"],
        "back": of[TO_HOST, PINNED, small]["us"],
        "host": host,
        "link": link_bandwidth,
        "pageable link": float(np.minimum(host, link_bandwidth)),
        "device": of[ON_DEVICE, "device", large]["theoretical_gb_s"],
    }


def transfers(
    sizes: Sequence[int] = SIZES,
    pinning_sizes: Sequence[int] = (1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20),
    pieces: int = 1000,
    piece_bytes: Sequence[int] = (1 << 10, 4 << 10, 16 << 10, 64 << 10),
    steps: Sequence[int] = (1, 2, 4, 8, 16),
    chain_bytes: int = 64 << 20,
    rounds: int = ROUNDS,
) -> pd.DataFrame:
    """Copy between host and device, page-lock memory, pack small pieces, and keep a chain of kernels on the device.

    Parameters
    ----------
    sizes : sequence of int
        Bytes of the copies, multiples of 4. The smallest tells the latency.
    pinning_sizes : sequence of int
        Bytes to page-lock; each one of `sizes`.
    pieces : int
        Pieces to be packed, which lie scattered; at most 65535.
    piece_bytes : sequence of int
        Bytes of such a piece, multiples of 4.
    steps : sequence of int
        Kernels of the chains.
    chain_bytes : int
        Bytes that they read and write, a multiple of 4.
    rounds : int
        Samples of each time, of which the median counts.

    Returns
    -------
    DataFrame
        A row a time, ``us``, with ``predicted_us``; in a row of part "break-even" there are ``copies`` and
        ``predicted_copies`` instead: after how many copies page-locking has paid for itself, infinity if never.
        ``part``; ``what`` is done; ``direction``; ``memory`` of the host; ``bytes`` of a copy, and ``count`` of copies,
        pieces or steps; ``gb_s``, ``theoretical_gb_s`` and ``predicted_gb_s``, of copies on the device read and
        written; ``link_generation`` and ``link_lanes``, NaN where they are not known, like what is predicted by them.

    Raises
    ------
    AssertionError
        if anything that was copied is wrong.
    """
    with machine.in_context():
        copies = measure_copies(sizes, rounds)
        rows = [
            *copies,
            *measure_pinning(pinning_sizes, copies, max(rounds // 2, 1)),
            *(row for size in piece_bytes for row in measure_packing(pieces, size, copies, rounds)),
            *measure_chain(steps, chain_bytes, copies, rounds),
        ]
    return pd.DataFrame(rows)


# --------------------------------------------------------------------------------------------- picture and claims


def pair(axes: Axes, x: Any, measured: Any, predicted: Any, label: str, index: int) -> None:
    """Plot a measured curve, and the predicted one without a legend entry."""
    colour = COLOURS[index % len(COLOURS)]
    axes.plot(x, measured, label=label, color=colour, marker=MARKERS[index % len(MARKERS)], **MEASURED)
    axes.plot(x, predicted, color=colour, **PREDICTED)


def plot(frame: pd.DataFrame, figure: Figure) -> None:
    """Plot bandwidth against size, costs of page-locking, small pieces, and chains."""
    axes = figure.subplots(2, 2)
    part = dict(iter(frame.groupby("part")))
    lines = [
        (TO_DEVICE, PINNED),
        (TO_DEVICE, REGISTERED),
        (TO_DEVICE, PAGEABLE),
        (TO_HOST, PINNED),
        (TO_HOST, PAGEABLE),
        (ON_DEVICE, "device"),
    ]
    for index, (direction, memory) in enumerate(lines):
        at = part["copy"][(part["copy"]["direction"] == direction) & (part["copy"]["memory"] == memory)]
        at = at.sort_values("bytes")
        label = {TO_DEVICE: f"H2D, {memory}", TO_HOST: f"D2H, {memory}"}.get(direction, direction)
        pair(axes[0, 0], at["bytes"], at["gb_s"], at["predicted_gb_s"], label, index)
    for theoretical in part["copy"]["theoretical_gb_s"].dropna().unique():  # of the link, and of device memory
        axes[0, 0].axhline(theoretical, color="0.5", linestyle=":")
    axes[0, 0].set(xlabel="bytes a copy", ylabel="GB/s", title="copies (dotted: theoretical)")
    for index, (what, at) in enumerate(part["pinning"].groupby("what", sort=False)):
        pair(axes[0, 1], at["bytes"], at["us"], at["predicted_us"], str(what), index)
    axes[0, 1].set(xlabel="bytes", ylabel="µs", title="page-locking")
    for index, (way, at) in enumerate(part["packing"].groupby(["what", "memory"], sort=False)):
        label = ", ".join(map(str, way))
        pair(axes[1, 0], at["bytes"], at["us"], at["predicted_us"], label, index)
    axes[1, 0].set(xlabel="bytes a piece", ylabel="µs", title=f"{part['packing']['count'].iloc[0]:.0f} small pieces")
    for index, (what, at) in enumerate(part["chain"].groupby("what", sort=False)):
        pair(axes[1, 1], at["count"], at["us"], at["predicted_us"], str(what), index)
    axes[1, 1].set(xlabel="steps", ylabel="µs", title=f"chains on {part['chain']['bytes'].iloc[0] / 1e6:.0f} MB")
    for each in axes.flat:
        each.set_xscale("log", base=2)
        each.set_yscale("log")
        each.legend(fontsize="xx-small")


def claims(frame: pd.DataFrame) -> dict[str, bool]:
    """Check the statements of the module's docstring against a result."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in frame.to_dict("records"):
        rows.setdefault(row["part"], []).append({str(name): value for name, value in row.items()})
    copied = {(row["direction"], row["memory"], row["bytes"]): row for row in rows["copy"]}
    speed = {key: row["gb_s"] for key, row in copied.items()}
    small, large = min(row["bytes"] for row in rows["copy"]), max(row["bytes"] for row in rows["copy"])
    both = (TO_DEVICE, TO_HOST)
    long = [row for (_, memory, size), row in copied.items() if memory == PINNED and size >= min(4 << 20, large)]
    copies = {(row["what"], row["direction"], row["bytes"]): row["copies"] for row in rows["break-even"]}
    pinning = {(row["what"], row["bytes"]): row["us"] for row in rows["pinning"]}
    locked = max(row["bytes"] for row in rows["pinning"])
    packed = {(row["what"], row["memory"], row["bytes"]): row for row in rows["packing"]}
    packing = {key: row["us"] for key, row in packed.items()}
    sizes = sorted({row["bytes"] for row in rows["packing"]})
    gain = {
        size: min(packing["one by one", memory, size] for memory in (PAGEABLE, PINNED))
        / packing["packed", PINNED, size]
        for size in sizes
    }
    chain = {(row["what"], row["count"]): row["us"] for row in rows["chain"]}
    most = max(row["count"] for row in rows["chain"])
    return {
        "a large copy of page-locked memory reaches three quarters of the link's theoretical bandwidth, and no more "
        "than all of it": all(
            0.75 <= speed[way, PINNED, large] / copied[way, PINNED, large]["theoretical_gb_s"] <= 1 for way in both
        ),
        "of 4 MB and more, it takes what latency and link predict, to a third": all(
            3 / 4 < row["us"] / row["predicted_us"] < 4 / 3 for row in long
        ),
        "one of 64 KB takes no more than half as long again as the smallest": all(
            speed[way, PINNED, size] * small * 1.5 > speed[way, PINNED, small] * size
            for way, memory, size in copied
            if memory == PINNED and size <= 64 << 10
        ),
        "a large copy of pageable memory is not half as fast as one of page-locked memory": all(
            speed[way, PAGEABLE, large] < speed[way, PINNED, large] / 2 for way in both
        ),
        "registered memory is copied like memory allocated page-locked, to a fifth": all(
            0.8 < speed[way, REGISTERED, large] / speed[way, PINNED, large] < 1.25 for way in both
        ),
        "so is write-combined memory, to the device": bool(
            0.8 < speed[TO_DEVICE, WRITE_COMBINED, large] / speed[TO_DEVICE, PINNED, large] < 1.25
        ),
        "the smallest copy does not reach a tenth of the largest one's bandwidth": all(
            speed[way, PINNED, small] < speed[way, PINNED, large] / 10 for way in both
        ),
        "a large copy on the device is more than ten times as fast as one from the host": bool(
            speed[ON_DEVICE, "device", large] > 10 * speed[TO_DEVICE, PINNED, large]
        ),
        "registering a large array pays for itself within two copies, either way": all(
            copies["register", way, locked] <= 2 for way in both
        ),
        "allocating page-locked memory takes longer than registering what is there": bool(
            pinning["allocate pinned", locked] > pinning["register", locked]
        ),
        "pieces of up to 4 KB are copied at least twice as fast packed": bool(
            all(gain[size] >= 2 for size in sizes if size <= 4 << 10)
        ),
        "one by one from page-locked memory, small copies overlap: none takes three quarters of a latency": all(
            row["us"] < 0.75 * row["predicted_us"]
            for (what, memory, _), row in packed.items()
            if (what, memory) == ("one by one", PINNED)
        ),
        "of 64 KB, they are copied sooner so than packed": all(
            packing["one by one", PINNED, size] < packing["packed", PINNED, size] for size in sizes if size >= 64 << 10
        ),
        "the smaller the pieces, the more packing gains": bool(gain[sizes[0]] > gain[sizes[-1]]),
        "round trips take a chain at least half as many times as long as it has steps": bool(
            chain["round trips", most] >= most / 2 * chain["kept on the device", most]
        ),
    }


EXPERIMENT = Experiment(
    name="transfers",
    section="9.1",
    run=transfers,
    plot=plot,
    claims=claims,
    facts=machine.facts,
    small={
        "sizes": (4 << 10, 64 << 10, 1 << 20),
        "pinning_sizes": (64 << 10, 1 << 20),
        "pieces": 20,
        "piece_bytes": (1 << 10, 4 << 10),
        "steps": (1, 3),
        "chain_bytes": 1 << 16,
        "rounds": 2,
    },
    unavailable="the simulator has no copies between host and device",
    kernels={
        "unpack": (unpack, "uint32[::1], uint32[::1], int64[::1], int64"),
        "step": (step, "float32[::1]"),
    },
)
