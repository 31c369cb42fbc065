"""A copy between host and device approaches the link's speed only if it is large and its memory page-locked."""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from numba import cuda

from numba_gemm.device.units import ceil_div
from numba_gemm.lab.harness.command import UsageError
from numba_gemm.lab.harness.pictures import curves, panels
from numba_gemm.lab.memory import machine, movement
from numba_gemm.runtime import pinned_memory
from numba_gemm.runtime.timing import call_ms, host_us, span_ms

ITEM = 4
BLOCK = 256
GUARD = 64  # words behind the copied ones, which must not change
UNTOUCHED = np.uint32(0xFFFFFFFF)  # value that `movement.clear` writes
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

Row = dict[str, Any]


def link_gb_s(generation: float, lanes: float) -> float:
    """Theoretical bandwidth of a PCI Express link in one direction; NaN for an unknown generation."""
    rate, data = LINKS.get(generation, (math.nan, math.nan))
    return rate * data * lanes / 8


def copy_us(latency_us: Any, size: Any, gb_s: Any) -> Any:
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


@machine.kernel("uint32[::1], uint32[::1], int64[::1], int64")
def unpack(target: Any, packed: Any, places: Any, length: Any) -> None:
    """Copy each piece of `length` consecutive elements to its place, with one row of blocks per piece."""
    piece = cuda.blockIdx.y
    x = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if x < length:
        target[places[piece] * length + x] = packed[piece * length + x]


@machine.kernel("float32[::1]")
def step(data: Any) -> None:
    """Add one to each element; a step of a chain."""
    x = cuda.grid(1)
    if x < data.size:
        data[x] += np.float32(1)


def link() -> tuple[float, float]:
    """Current generation and lanes of the device's link; NaN if NVML does not report them."""
    with contextlib.suppress(Exception):  # missing, outdated or forbidden in this container
        nvml, gpu = machine.nvml_gpu()
        return nvml.device_get_curr_pcie_link_generation(gpu), nvml.device_get_curr_pcie_link_width(gpu)
    return math.nan, math.nan


def both_ends_us(make: Callable[[], AbstractContextManager[object]], rounds: int) -> list[float]:
    """Median microseconds of entering a context, and of leaving it."""
    moments = []
    for _ in range(rounds):
        begin = time.perf_counter()
        with make():
            entered = time.perf_counter()
        moments.append((begin, entered, time.perf_counter()))
    return [float(us) for us in 1e6 * np.median(np.diff(moments), axis=0)]


def check(found: np.ndarray, expected: np.ndarray, what: str) -> None:
    """Raise AssertionError unless the copied data are as expected, and the memory behind them is unchanged."""
    assert np.array_equal(found[: len(expected)], expected), f"{what}: what was copied is wrong"
    assert (found[len(expected) :] == UNTOUCHED).all(), f"{what}: more was written than was to be copied"


def measure_copies(sizes: Sequence[int], rounds: int) -> pd.DataFrame:
    """Return the rows of part "copy"."""
    room = max(sizes) // ITEM + GUARD
    rows: list[Row] = []
    with movement.Scope() as scope:
        (stream,), (values, back, pinned) = scope.streams(), scope.pinned(3, room, np.uint32)
        data, near, far = scope.on_device(3, room, np.uint32)
        combined = scope.enter_context(pinned_memory.pinned(room, np.uint32, write_combined=True))
        hosts = {PAGEABLE: np.empty(room, np.uint32), PINNED: pinned}
        hosts |= {REGISTERED: np.empty(room, np.uint32), WRITE_COMBINED: combined}
        for array in (values, *hosts.values()):
            array[:] = np.arange(1, room + 1, dtype=np.uint32)
        scope.enter_context(pinned_memory.registered(hosts[REGISTERED]))
        movement.copying(data, values)(stream)
        cases = [(TO_DEVICE, memory, near, host) for memory, host in hosts.items()]
        # The host reads write-combined memory too slowly for this direction to be useful.
        cases += [(TO_HOST, memory, host, data) for memory, host in hosts.items() if memory != WRITE_COMBINED]
        for direction, memory, target, source in [*cases, (ON_DEVICE, "device", far, data)]:
            for size in sizes:
                end = size // ITEM + GUARD
                found = target if direction == TO_HOST else back
                if direction == TO_HOST:
                    target[:end] = UNTOUCHED
                else:
                    movement.clear(target, room * ITEM, stream)
                run = partial(movement.copy, target, source, size, stream)
                rows.append(copy_row(direction, memory, size, 1e3 * span_ms([stream], run, rounds)))
                if direction != TO_HOST:
                    movement.copying(back, target)(stream)
                    movement.finish(stream)
                check(found[:end], values[: size // ITEM], f"{memory}, {direction}")
        source, target = hosts[PAGEABLE], np.empty_like(hosts[PAGEABLE])
        for size in sizes:
            run = partial(np.copyto, target[: size // ITEM], source[: size // ITEM])
            rows.append(copy_row(ON_HOST, PAGEABLE, size, host_us(run, rounds)))
        # An idle link may use a lower generation, so query it during copies.
        for _ in range(4):
            movement.copying(data, values)(stream)
        generation, lanes = link()
        movement.finish(stream)
    device_bandwidth = machine.properties().memory_bandwidth / 1e9
    copies = predict_copies(pd.DataFrame(rows), link_gb_s(generation, lanes), device_bandwidth)
    copies.loc[copies["direction"].isin([TO_DEVICE, TO_HOST]), ["link_generation", "link_lanes"]] = generation, lanes
    return copies


def copy_row(direction: str, memory: str, size: int, us: float) -> Row:
    """Return a row of part "copy", without its prediction; a copy on the device reads and writes."""
    row = {"part": "copy", "what": "copy", "direction": direction, "memory": memory, "bytes": size, "count": 1}
    return row | {"us": us, "gb_s": (2 if direction == ON_DEVICE else 1) * size / us / 1e3}


def predict_copies(copies: pd.DataFrame, link_bandwidth: float, device_bandwidth: float) -> pd.DataFrame:
    """Return copies with theoretical bandwidth, predicted time and predicted bandwidth."""
    latency = copies.sort_values("bytes").groupby(["direction", "memory"])["us"].transform("first")
    bandwidths = {TO_DEVICE: link_bandwidth, TO_HOST: link_bandwidth, ON_DEVICE: device_bandwidth}
    theoretical = copies["direction"].map(bandwidths)
    on_host = copies[copies["direction"] == ON_HOST].set_index("bytes")["gb_s"]
    slower = np.minimum(theoretical, copies["bytes"].map(on_host))
    moved = copies["bytes"] * np.where(copies["direction"] == ON_DEVICE, 2, 1)
    predicted = copy_us(latency, moved, theoretical.where(copies["memory"] != PAGEABLE, slower))
    return copies.assign(theoretical_gb_s=theoretical, predicted_us=predicted, predicted_gb_s=moved / predicted / 1e3)


def pinning_costs(size: int, rounds: int) -> dict[str, float]:
    """Microseconds of each operation that page-locks memory or undoes it, and of first touching as much memory."""
    touched = np.ones(size, np.uint8)
    register, unregister = both_ends_us(lambda: pinned_memory.registered(touched), rounds)
    allocate, free = both_ends_us(lambda: pinned_memory.pinned(size, np.uint8), rounds)
    touch = host_us(lambda: np.empty(size, np.uint8).fill(1), rounds)
    costs = {"register": register, "unregister": unregister, "allocate pinned": allocate, "free pinned": free}
    return costs | {"first touch": touch}


def measure_pinning(sizes: Sequence[int], copies: pd.DataFrame, rounds: int) -> Iterator[Row]:
    """Yield rows of the parts "pinning" and "break-even"."""
    costs = {size: pinning_costs(size, rounds) for size in sizes}
    largest = max(sizes)
    predicted = {size: {what: us * size / largest for what, us in costs[largest].items()} for size in sizes}
    for size, cost in costs.items():
        for what, us in cost.items():
            row = {"part": "pinning", "what": what, "bytes": size, "count": 1, "us": us}
            yield row | {"predicted_us": predicted[size][what]}
    of = copies.set_index(["direction", "memory", "bytes"])
    ways = {REGISTERED: ("register", "unregister"), PINNED: ("allocate pinned", "free pinned")}
    for direction, size, memory in itertools.product((TO_DEVICE, TO_HOST), sizes, ways):
        row = {"part": "break-even", "what": ways[memory][0], "direction": direction, "memory": memory, "bytes": size}
        for prefix, cost in (("", costs[size]), ("predicted_", predicted[size])):
            slow, fast = (of[f"{prefix}us"][direction, each, size] for each in (PAGEABLE, memory))
            anyway = cost["first touch"] if memory == PINNED else 0.0
            row[f"{prefix}copies"] = break_even(sum(cost[way] for way in ways[memory]) - anyway, slow, fast)
        yield row


def measure_packing(pieces: int, size: int, known: Mapping[str, float], rounds: int) -> Iterator[Row]:
    """Yield rows of part "packing" for one size of pieces."""
    places = scattered(pieces)
    length, total = size // ITEM, pieces * size
    with movement.Scope() as scope:
        pageable = np.arange(2 * pieces * length, dtype=np.uint32)
        (stream,), (pinned, back) = scope.streams(), scope.pinned(2, pageable.size, np.uint32)
        (buffer,), (packed,) = (get(1, pieces * length, np.uint32) for get in (scope.pinned, scope.on_device))
        (target,), (index,) = scope.on_device(1, pageable.size, np.uint32), scope.on_device(1, pieces, np.int64)
        pinned[:] = pageable
        movement.copying(index, places)(stream)  # once: the places of the pieces do not change
        put = machine.enqueue(unpack, (ceil_div(length, BLOCK), pieces), BLOCK, target, packed, index, length)
        move, table, offsets = movement.copying(packed, buffer), pageable.reshape(-1, length), (places * size).tolist()

        def one_by_one(source: np.ndarray) -> None:
            to, from_ = movement.address(target), movement.address(source)
            for offset in offsets:
                movement.copy(to + offset, from_ + offset, size, stream)

        def by_packing() -> None:
            # "clip" saves NumPy a temporary buffer; all places are valid.
            np.take(table, places, axis=0, out=buffer.reshape(pieces, length), mode="clip")
            move(stream)
            put(stream)

        expected = np.full((2 * pieces, length), UNTOUCHED)
        expected[places] = table[places]
        slow = pieces * known[PAGEABLE] + total / known["pageable link"] / 1e3
        fast = pieces * known[PINNED] + total / known["link"] / 1e3
        once = packed_us(known[PINNED], total, known["host"], known["link"], known["device"])
        for what, memory, work, predicted in (
            ("one by one", PAGEABLE, partial(one_by_one, pageable), slow),
            ("one by one", PINNED, partial(one_by_one, pinned), fast),
            ("packed", PINNED, by_packing, once),
        ):
            buffer[:] = 0
            movement.clear(packed, total, stream)
            movement.clear(target, pageable.nbytes, stream)
            us = 1e3 * span_ms([stream], work, rounds)
            movement.copying(back, target)(stream)
            movement.finish(stream)
            check(back, expected.reshape(-1), f"pieces of {size} bytes {what} from {memory} memory")
            row = {"part": "packing", "what": what, "direction": TO_DEVICE, "memory": memory, "bytes": size}
            yield row | {"count": pieces, "us": us, "gb_s": total / us / 1e3, "predicted_us": predicted}


def measure_chain(steps: Sequence[int], size: int, known: Mapping[str, float], rounds: int) -> Iterator[Row]:
    """Yield rows of part "chain"."""
    words = size // ITEM
    with movement.Scope() as scope:
        (stream,), (start, result), (data,) = scope.streams(), scope.pinned(2, words), scope.on_device(1, words)
        start[:] = np.arange(words, dtype=np.uint32) % 4096
        begin, back, again = itertools.starmap(movement.copying, ((data, start), (result, data), (data, result)))
        advance = machine.enqueue(step, ceil_div(words, BLOCK), BLOCK, data)

        for count, what in itertools.product(steps, ("kept on the device", "round trips")):
            trips = count if what == "round trips" else 1
            trip = [*[advance] * (count // trips), back]
            result[:] = -1
            chain = movement.in_sequence([begin, *trip, *[again, *trip] * (trips - 1)])
            us = 1e3 * call_ms(chain, stream, rounds)
            assert np.array_equal(result, start + np.float32(count)), f"a chain of {count} steps, {what}: it is wrong"
            latencies = known[PINNED] + known["back"]
            predicted = chain_us(trips, count, size, latencies, known["link"], known["device"])
            row = {"part": "chain", "what": what, "memory": PINNED, "bytes": size, "count": count}
            yield row | {"us": us, "predicted_us": predicted}


def rates(copies: pd.DataFrame) -> dict[str, float]:
    """Latencies of copies to the device and `back` in microseconds; bandwidths of link, host and device in GB/s."""
    of = copies.set_index(["direction", "memory", "bytes"])
    small, large = copies["bytes"].min(), copies["bytes"].max()
    host, link_bandwidth = of["gb_s"][ON_HOST, PAGEABLE, large], of["theoretical_gb_s"][TO_DEVICE, PINNED, large]
    return {
        **{memory: of["us"][TO_DEVICE, memory, small] for memory in (PAGEABLE, PINNED)},
        "back": of["us"][TO_HOST, PINNED, small],
        "host": host,
        "link": link_bandwidth,
        "pageable link": np.minimum(host, link_bandwidth),
        "device": of["theoretical_gb_s"][ON_DEVICE, "device", large],
    }


def transfers(
    sizes: Sequence[int] = SIZES,
    pinning_sizes: Sequence[int] = (1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20),
    pieces: int = 1000,
    piece_bytes: Sequence[int] = (1 << 10, 4 << 10, 16 << 10, 64 << 10),
    steps: Sequence[int] = (1, 2, 4, 8, 16),
    chain_bytes: int = 64 << 20,
    rounds: int = 7,
) -> Iterator[pd.DataFrame]:
    """Copy between host and device, page-lock memory, pack small pieces, and keep a chain of kernels on the device.

    One row per median time ``us``; rows of part "break-even" have ``copies`` instead, after which page-locking has
    paid off, infinity if never. ``bytes`` are those of a copy, ``count`` is that of copies, pieces or steps;
    ``gb_s`` of copies on the device counts reading and writing. Predictions are NaN if the link is unknown.

    Parameters
    ----------
    sizes: Bytes of the copies, multiples of 4. The smallest tells the latency.
    pinning_sizes: Bytes to page-lock; each one of `sizes`.
    pieces: Pieces to be packed, which lie scattered; at most 65535.
    piece_bytes: Bytes of such a piece, multiples of 4.
    steps: Kernels of the chains.
    chain_bytes: Bytes that they read and write, a multiple of 4.
    """
    if missing := set(pinning_sizes) - set(sizes):
        raise UsageError(f"pinning_sizes has {sorted(missing)}; expected some of sizes, {list(sizes)}")
    with machine.in_context():
        copies = measure_copies(sizes, rounds)
        yield copies
        known = rates(copies)
        for measured in (
            measure_pinning(pinning_sizes, copies, max(rounds // 2, 1)),
            *(measure_packing(pieces, size, known, rounds) for size in piece_bytes),
            measure_chain(steps, chain_bytes, known, rounds),
        ):
            copies = pd.concat([copies, pd.DataFrame(measured)], ignore_index=True)
            yield copies


def claims(frame: pd.DataFrame) -> dict[str, Any]:
    part: Any = dict(iter(frame.groupby("part")))
    copied, packings = part["copy"], part["packing"]
    speed = copied.pivot(index="bytes", columns=["memory", "direction"], values="gb_s")
    large, small, ways = speed.iloc[-1], speed.iloc[0], [TO_DEVICE, TO_HOST]
    pinned = copied[copied["memory"] == PINNED]
    long = pinned[pinned["bytes"] >= min(4 << 20, pinned["bytes"].max())]
    us = pinned.pivot(index="bytes", columns="direction", values="us")
    link = pinned.groupby("direction")["theoretical_gb_s"].max()
    locked = part["pinning"].pivot(index="bytes", columns="what", values="us").iloc[-1]
    pays = part["break-even"].pivot(index="bytes", columns=["what", "direction"], values="copies").iloc[-1]
    packing = packings.pivot(index="bytes", columns=["what", "memory"], values="us")
    packed, one_by_one = packing["packed", PINNED], packing["one by one"]
    separate = packings[(packings["what"] == "one by one") & (packings["memory"] == PINNED)]
    gain = one_by_one.min(axis=1) / packed
    chain = part["chain"].pivot(index="count", columns="what", values="us")
    return {
        "a large copy of page-locked memory reaches three quarters of the link's theoretical bandwidth, and no more "
        "than all of it": (large[PINNED] / link).between(0.75, 1),
        "of 4 MB and more, it takes what latency and link predict, within a third": (
            (long["us"] / long["predicted_us"]).between(3 / 4, 4 / 3, inclusive="neither")
        ),
        "one of 64 KB takes no more than half as long again as the smallest": (us < 1.5 * us.iloc[0]).loc[:65536],
        "a large copy of pageable memory is not half as fast as one of page-locked memory": (
            large[PAGEABLE][ways] < large[PINNED][ways] / 2
        ),
        "registered memory is copied like memory allocated page-locked, to a fifth": (
            (large[REGISTERED] / large[PINNED]).between(0.8, 1.25, inclusive="neither")
        ),
        "so is write-combined memory, to the device": (
            0.8 < large[WRITE_COMBINED, TO_DEVICE] / large[PINNED, TO_DEVICE] < 1.25
        ),
        "the smallest copy does not reach a tenth of the largest one's bandwidth": small[PINNED] < large[PINNED] / 10,
        "a large copy on the device is more than ten times as fast as one from the host": (
            large["device", ON_DEVICE] > 10 * large[PINNED, TO_DEVICE]
        ),
        "registering a large array pays for itself within two copies, either way": pays["register"] <= 2,
        "allocating page-locked memory takes longer than registering what is there": (
            locked["allocate pinned"] > locked["register"]
        ),
        "pieces of up to 4 KB are copied at least twice as fast packed": gain[gain.index <= 4 << 10] >= 2,
        "one by one from page-locked memory, small copies overlap: none takes three quarters of a latency": (
            separate["us"] < 0.75 * separate["predicted_us"]
        ),
        "copies of 64 KB are faster one by one than packed": (one_by_one[PINNED] < packed)[packed.index >= 64 << 10],
        "the smaller the pieces, the more packing gains": gain.iloc[0] > gain.iloc[-1],
        "round trips take a chain at least half as many times as long as it has steps": (
            chain["round trips"].iloc[-1] >= chain.index[-1] / 2 * chain["kept on the device"].iloc[-1]
        ),
    }


COPIES = f"part == 'copy' and direction != {ON_HOST!r} and memory != {WRITE_COMBINED!r}"
PLOT = panels(
    curves("bytes", "gb_s", ["direction", "memory"], COPIES, log="xy", lines={"y": "theoretical_gb_s"}, title="copies"),
    curves("bytes", "us", "what", "part == 'pinning'", log="xy", title="page-locking"),
    curves("bytes", "us", ["what", "memory"], "part == 'packing'", log="xy", title="small pieces"),
    curves("count", "us", "what", "part == 'chain'", log="xy", xlabel="steps", title="chains"),
    columns=2,
)
SMALL: dict[str, Any] = {"sizes": (4 << 10, 64 << 10, 1 << 20), "pinning_sizes": (64 << 10, 1 << 20), "pieces": 20}
SMALL |= {"piece_bytes": (1 << 10, 4 << 10), "steps": (1, 3), "chain_bytes": 1 << 16, "rounds": 2}
EXPERIMENT = machine.gpu_experiment(transfers, "9.1", claims, PLOT, SMALL, [unpack, step])
