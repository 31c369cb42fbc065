"""Transfers and overlap: models, pieces and kernels; and both experiments on a simulated device with its own clock.

The simulated device has streams, events, copy engines and page-locked memory, and executes driver calls by its clock.
If only the operations that a model includes take time, an experiment must measure what it predicts.
"""

from __future__ import annotations

import ctypes
import io
import itertools
import math
from collections import defaultdict
from contextlib import contextmanager
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest

from numba_gemm.course.notebook import recorded
from numba_gemm.inspect import trace
from numba_gemm.lab.memory import machine, mapped_streams, movement, overlap, transfers, zero_copy
from numba_gemm.lab.memory.overlap import BLOCK, KERNEL, LEGACY, concurrent_ms, left_out, pieces, pipeline, staged_ms
from numba_gemm.lab.memory.transfers import (
    ON_DEVICE,
    ON_HOST,
    PAGEABLE,
    PINNED,
    REGISTERED,
    TO_DEVICE,
    TO_HOST,
    WRITE_COMBINED,
    break_even,
    chain_us,
    copy_us,
    link_gb_s,
    packed_us,
)
from numba_gemm.runtime import pinned_memory, timing

simulator = pytest.mark.simulator

# ----------------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize(
    ("generation", "lanes", "gb_s"),
    [(1, 16, 4.0), (2, 16, 8.0), (3, 16, 15.754), (4, 16, 31.508), (5, 16, 63.015), (5, 8, 31.508), (6, 16, 118.0)],
)
def test_link_bandwidth_by_generation(generation, lanes, gb_s):
    assert link_gb_s(generation, lanes) == pytest.approx(gb_s, abs=5e-4)


def test_an_unknown_link_has_no_bandwidth():
    assert math.isnan(link_gb_s(math.nan, math.nan))
    assert math.isnan(link_gb_s(9, 16))


@simulator
def test_a_link_that_nobody_tells_is_unknown():
    assert all(math.isnan(value) for value in transfers.link())


def test_time_of_a_copy():
    assert copy_us(3.0, 54_000, 54.0) == pytest.approx(4.0)
    assert packed_us(3.0, 1_000_000, 10.0, 50.0, 4000.0) == pytest.approx(100 + 3 + 20 + 0.5)
    # A copy there and back takes 10 and 2 * 40 microseconds, a step 1.
    assert chain_us(1, 8, 2_000_000, 10.0, 50.0, 4000.0) == pytest.approx(90 + 8)
    assert chain_us(8, 8, 2_000_000, 10.0, 50.0, 4000.0) == pytest.approx(8 * 90 + 8)


def test_break_even():
    assert break_even(100.0, 30.0, 5.0) == 4.0
    assert break_even(-1.0, 30.0, 5.0) == 0.0
    assert break_even(100.0, 5.0, 5.0) == math.inf
    assert break_even(100.0, 5.0, 6.0) == math.inf


def test_memory_of_sizes_that_are_not_copied_cannot_pay_off():
    with pytest.raises(ValueError, match=r"pinning_sizes has \[8192\]; expected some of sizes, \[4096\]"):
        transfers.EXPERIMENT.frame(sizes=(4096,), pinning_sizes=(4096, 8192))


def test_places_are_scattered():
    places = transfers.scattered(100)
    assert len(set(places.tolist())) == 100
    assert places.min() >= 0
    assert 100 <= places.max() < 200
    assert (np.diff(places) < 0).any()
    assert np.count_nonzero(np.diff(places) == 1) < 10
    np.testing.assert_array_equal(places, transfers.scattered(100))


def test_prediction_of_copies_by_what_they_move_through():
    def row(direction, memory, size, us):
        return {"direction": direction, "memory": memory, "bytes": size, "us": us, "gb_s": size / us / 1e3}

    rows = [
        row(direction, memory, size, us)
        for direction, memory in ((TO_DEVICE, PINNED), (TO_HOST, PAGEABLE), (ON_DEVICE, "device"), (ON_HOST, PAGEABLE))
        for size, us in ((1000, 2.0), (1_000_000, 100.0))
    ]
    copies = transfers.predict_copies(pd.DataFrame(rows), 50.0, 4000.0)
    large = copies[copies["bytes"] == 1_000_000].set_index(["direction", "memory"]).T
    assert large[TO_DEVICE, PINNED]["predicted_us"] == pytest.approx(2 + 20)
    assert large[TO_HOST, PAGEABLE]["predicted_us"] == pytest.approx(2 + 100)  # the host copies 10 GB/s
    assert large[TO_HOST, PAGEABLE]["theoretical_gb_s"] == 50
    assert large[ON_DEVICE, "device"]["predicted_us"] == pytest.approx(2 + 0.5)
    assert large[ON_DEVICE, "device"]["predicted_gb_s"] == pytest.approx(2000 / 2.5)
    assert math.isnan(large[ON_HOST, PAGEABLE]["predicted_us"])


def test_break_even_counts_the_first_touch_against_what_needs_none(monkeypatch):
    costs = {"register": 60.0, "unregister": 40.0, "allocate pinned": 900.0, "free pinned": 100.0, "first touch": 400.0}
    monkeypatch.setattr(
        transfers, "pinning_costs", lambda size, rounds: {what: us * size / 1000 for what, us in costs.items()}
    )
    copies = [
        {"direction": direction, "memory": memory, "bytes": size, "us": us * size / 1000, "predicted_us": us / 2 * size}
        for direction in (TO_DEVICE, TO_HOST)
        for memory, us in ((PAGEABLE, 30.0), (PINNED, 5.0), (REGISTERED, 10.0))
        for size in (1000, 4000)
    ]
    rows = list(transfers.measure_pinning([1000, 4000], pd.DataFrame(copies), 1))
    made = {(row["what"], row["direction"], row["bytes"]): row for row in rows if row["part"] == "break-even"}
    assert len(made) == 8
    for size in (1000, 4000):
        assert made["register", TO_HOST, size]["copies"] == pytest.approx(100 / 20)
        assert made["allocate pinned", TO_DEVICE, size]["copies"] == pytest.approx((1000 - 400) / 25)
        assert made["allocate pinned", TO_DEVICE, size]["predicted_copies"] == pytest.approx(600 / 12500)
    pinning = {(row["what"], row["bytes"]): row["predicted_us"] for row in rows if row["part"] == "pinning"}
    assert pinning["register", 1000] == pytest.approx(60)


def test_staged_time():
    assert staged_ms(5.0, 3.0, 1) == 8.0
    assert staged_ms(5.0, 3.0, 4) == 5.75
    assert staged_ms(3.0, 5.0, 4) == 5.75


@pytest.mark.parametrize("times", [(5.0, 3.0), (3.0, 5.0), (4.0, 4.0)])
@pytest.mark.parametrize("stages", [1, 2, 7])
def test_the_formula_is_the_pipelines_end(times, stages):
    made = pipeline(*times, stages)
    assert made[-1][3] == pytest.approx(staged_ms(*times, stages))
    assert made[0] == pytest.approx((0, times[0] / stages, times[0] / stages, sum(times) / stages))
    for (_, copied, _, done), (begin, _, computing, _) in itertools.pairwise(made):
        assert begin == pytest.approx(copied)
        assert computing >= done
    assert all(computing >= copied for _, copied, computing, _ in made)


def test_concurrent_time_by_copy_engines():
    assert concurrent_ms(5.0, 4.0, 7.0, 0) == 16.0
    assert concurrent_ms(5.0, 4.0, 7.0, 1) == 9.0
    assert concurrent_ms(5.0, 4.0, 12.0, 1) == 12.0
    assert concurrent_ms(5.0, 4.0, 7.0, 2) == concurrent_ms(5.0, 4.0, 7.0, 3) == 7.0


@pytest.mark.parametrize("elements", [1, 255, 256, 257, 1024, 1025, 5000, 100_003])
@pytest.mark.parametrize("streams", [1, 2, 3, 7, 16])
def test_pieces_cover_all_elements_once(elements, streams):
    made = pieces(elements, streams)
    assert len(made) <= streams
    assert made[0][0] == 0
    assert made[-1][1] == elements
    for (_, end), (begin, _) in itertools.pairwise(made):
        assert end == begin
    assert all(begin < end and begin % BLOCK == 0 for begin, end in made)
    assert all((end - begin) % BLOCK == 0 for begin, end in made[:-1])
    assert max(end - begin for begin, end in made) - BLOCK < -(-elements // streams)


def test_what_the_listing_leaves_out():
    assert left_out(4096, 4, 256) == 0
    assert left_out(4097, 4, 256) == 1
    assert left_out(5119, 4, 256) == 1023
    assert left_out(1000, 4, 256) == 1000


# ---------------------------------------------------------------------------------------------------------- kernels


@simulator
def test_unpack_puts_pieces_to_their_places_and_nothing_elsewhere():
    length, places = 300, np.array([3, 0], np.int64)  # more than a block, and no multiple of one
    packed = np.arange(1, 2 * length + 1, dtype=np.uint32)
    target = np.zeros(4 * length, np.uint32)
    machine.enqueue(transfers.unpack, (2, 2), 256, target, packed, places, length)(0)
    expected = np.zeros((4, length), np.uint32)
    expected[places] = packed.reshape(2, length)
    np.testing.assert_array_equal(target.reshape(4, length), expected)


@simulator
def test_unpack_is_coalesced():
    length, places = 256, np.array([2, 1], np.int64)
    packed = np.zeros(2 * length, np.uint32)
    found = trace(transfers.unpack, (1, 2), 256, np.zeros(4 * length, np.uint32), packed, places, length).requests
    sectors = found.groupby(["array", "op"])["sectors"].agg(["sum", "max"])
    assert sectors.loc[("packed", "load")].tolist() == [2 * length * 4 // 32, 4]
    assert sectors.loc[("target", "store")].tolist() == [2 * length * 4 // 32, 4]


@simulator
def test_a_step_adds_one_to_each_element():
    data = np.arange(300, dtype=np.float32)
    machine.enqueue(transfers.step, 2, 256, data)(0)
    np.testing.assert_array_equal(data, np.arange(300, dtype=np.float32) + 1)


@simulator
def test_work_multiplies_and_adds_so_often():
    data = np.arange(300, dtype=np.float32)
    overlap.worker(data, data, 5)(0)
    np.testing.assert_array_equal(data, np.arange(300, dtype=np.float32) + 5)
    one = np.ones(1, np.float32)
    machine.enqueue(overlap.work, 1, 32, one, one, 3, np.float32(2), np.float32(1))(0)
    assert one[0] == 15  # 1, 3, 7, 15
    machine.enqueue(overlap.work, 1, 32, one, one, 0, np.float32(2), np.float32(1))(0)
    assert one[0] == 15


def test_the_host_counts():
    counter = np.full(10, -1, np.float32)
    overlap.host_work(counter, 7)
    assert (counter == 7).all()


# ----------------------------------------------------------------------------------------------- a pretended device


class Pretended:
    """A device and its driver, with a clock that copies, kernels and calls advance; in milliseconds.

    Every stream and every engine works in the order of the calls. The host sees the effects of work after it has waited
    for it.
    """

    LINK, DEVICE = 54.6e6, 3.876e9  # bytes per millisecond
    HOST = 10e6  # of copies on the host
    STAGING: ClassVar = {True: 8.6e6, False: 16e6}  # of pageable memory, to the device and back
    TURN = 1.1e-8  # per element of `work`

    def __init__(self, engines: int = 3, call_ms: float = 1e-6, serial: bool = False):
        self.engines, self.call_ms, self.serial = engines, call_ms, serial
        self.host, self.numbers = 0.0, itertools.count(2)  # 1 is the legacy default stream
        self.ready: dict[int, float] = defaultdict(float)
        self.free: dict[str, float] = defaultdict(float)
        self.blocking: set[int] = set()
        self.events: dict[int, float] = {}
        self.pending: list = []
        self.locked: dict[int, int] = {}
        self.on_device: dict[int, int] = {}
        self.kept: dict[int, np.ndarray] = {}

    def call(self, function, *arguments):
        self.host += self.call_ms
        return getattr(self, function.__name__)(*arguments)

    def clock(self) -> float:
        self.host += self.call_ms
        return self.host / 1e3

    # -------------------------------------------------------------------------------------------------- time

    def at(self, stream: int) -> float:
        waits_for = self.blocking if stream == LEGACY else ()
        return max(self.host, self.ready[stream], *(self.ready[other] for other in waits_for))

    def do(self, stream: int, engine: str, ms: float, effect) -> float:
        engine = "all" if self.serial else engine
        end = max(self.at(stream), self.free[engine]) + ms
        self.free[engine] = self.ready[stream] = end
        if stream == LEGACY:
            for other in self.blocking:
                self.ready[other] = max(self.ready[other], end)
        self.pending.append((end, next(self.numbers), effect))
        return end

    def wait_until(self, moment: float) -> None:
        self.host = max(self.host, moment)
        for done in sorted(self.pending, key=lambda each: each[:2]):
            if done[0] <= self.host:
                done[2]()
                self.pending.remove(done)

    # ------------------------------------------------------------------------------------------------ memory

    @staticmethod
    def within(ranges: dict[int, int], address: int, size: int) -> bool:
        return any(begin <= address and address + size <= begin + length for begin, length in ranges.items())

    @contextmanager
    def device_array(self, elements: int, dtype=np.float32):
        made = np.zeros(elements, dtype)
        self.on_device[made.ctypes.data] = made.nbytes
        yield made
        assert not self.pending
        del self.on_device[made.ctypes.data]

    def cuMemHostAlloc(self, size, flags):
        self.host += 0.05 + size / 1.8e6
        made = np.zeros(size, np.uint8)
        self.kept[made.ctypes.data] = made
        self.locked[made.ctypes.data] = size
        return made.ctypes.data

    def cuMemFreeHost(self, address):
        del self.kept[address], self.locked[address]

    def cuMemHostRegister(self, address, size, flags):
        self.host += 0.01 + size / 31e6
        self.locked[address] = size

    def cuMemHostUnregister(self, address):
        del self.locked[address]

    # ------------------------------------------------------------------------------------- streams and events

    @contextmanager
    def streams(self, count: int = 1, blocking: bool = False):
        made = [next(self.numbers) for _ in range(count)]
        self.blocking.update(made if blocking else ())
        yield made
        self.blocking.difference_update(made)

    def cuStreamSynchronize(self, stream):
        self.wait_until(self.at(stream))

    def cuStreamWaitEvent(self, stream, event, flags):
        self.ready[stream] = max(self.ready[stream], self.events[event])

    def cuEventCreate(self, flags):
        return next(self.numbers)

    def cuEventDestroy(self, event):
        del self.events[event]

    def cuEventRecord(self, event, stream):
        self.events[event] = self.ready[stream] = self.at(stream)

    def cuEventSynchronize(self, event):
        self.wait_until(self.events[event])

    def cuEventElapsedTime(self, begin, end):
        return self.events[end] - self.events[begin]

    # --------------------------------------------------------------------------------------------------- work

    def cuMemsetD8Async(self, target, value, size, stream):
        assert self.within(self.on_device, target, size)
        self.do(stream, "compute", size / self.DEVICE, lambda: ctypes.memset(target, value, size))

    def cuMemsetD32Async(self, target, value, count, stream):
        assert value == 0
        self.do(stream, "compute", 4 * count / self.DEVICE, lambda: ctypes.memset(target, 0, 4 * count))

    def cuMemcpyAsync(self, target, source, size, stream):
        to_device, from_device = (self.within(self.on_device, place, size) for place in (target, source))
        assert to_device or from_device
        host = source if to_device else target
        both = to_device and from_device
        engine = "device" if both else "up" if to_device or self.engines < 2 else "down"
        staged = not both and not self.within(self.locked, host, size)
        ms = 2 * size / self.DEVICE if both else size / (self.STAGING[to_device] if staged else self.LINK)
        end = self.do(stream, engine, ms, lambda: ctypes.memmove(target, source, size))
        if staged:
            self.wait_until(end)

    def enqueue(self, kernel, grid, block, *arguments):
        def effect():
            if kernel is overlap.work:
                data, out, turns, factor, summand = arguments
                assert factor == summand == 1
                count = min(grid * block, data.size)
                out[:count] = data[:count] + np.float32(turns)
            elif kernel is transfers.step:
                arguments[0][: grid * block] += 1
            elif kernel in (zero_copy.add, zero_copy.add_and_keep):
                data, *kept, out = arguments
                out += data
                for array in kept:
                    array[:] = data
            elif kernel is zero_copy.add_strided:
                data, out, _, stride = arguments
                out += data.reshape(-1, stride).T.ravel()
            else:
                target, packed, places, length = arguments
                assert grid[0] * block >= length
                target.reshape(-1, length)[places[: grid[1]]] = packed.reshape(-1, length)[: grid[1]]

        ms = 2 * arguments[0].nbytes / self.DEVICE
        if kernel is overlap.work:
            ms = arguments[0].size * arguments[2] * self.TURN
        return lambda stream: self.do(stream, "compute", ms, effect)


class HostCopies:
    """NumPy for a host whose copies advance the simulated device's clock."""

    def __init__(self, device: Pretended):
        self.device = device

    def __getattr__(self, name: str):
        return getattr(np, name)

    def copyto(self, target, source):
        self.device.host += source.nbytes / self.device.HOST
        np.copyto(target, source)

    def take(self, source, places, *, out, **how):
        self.device.host += out.nbytes / self.device.HOST
        return np.take(source, places, out=out, **how)


@pytest.fixture
def pretend(monkeypatch):
    def make(**properties) -> Pretended:
        device = Pretended(**properties)
        for module in (movement, pinned_memory, timing, zero_copy):
            monkeypatch.setattr(module, "call", device.call)
        monkeypatch.setattr(movement, "device_array", device.device_array)
        monkeypatch.setattr(machine, "streams", device.streams)
        monkeypatch.setattr(machine, "enqueue", device.enqueue)
        attributes = {"ASYNC_ENGINE_COUNT": device.engines, "CAN_MAP_HOST_MEMORY": 1, "INTEGRATED": 0}
        monkeypatch.setattr(machine, "attribute", attributes.__getitem__)
        monkeypatch.setattr(machine, "verify", np.testing.assert_array_equal)
        monkeypatch.setattr(movement, "mapped", lambda host: host)
        monkeypatch.setattr(transfers, "link", lambda: (5, 16))
        for module in (timing, transfers):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=device.clock))
        monkeypatch.setattr(transfers, "np", HostCopies(device))

        def host_work(counter, turns):
            device.host += 1e-5 * turns
            counter[:] = turns

        monkeypatch.setattr(overlap, "host_work", host_work)
        return device

    return make


# The copy of these elements takes 4.8 microseconds; kernels take half as long, as long, and twice as long.
OVERLAP = {"elements": 1 << 16, "turns": (3, 7, 14), "host_turns": 700, "rounds": 3}
TRANSFERS = {
    "sizes": (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20),
    "pinning_sizes": (1 << 20, 16 << 20),
    "pieces": 100,
    "piece_bytes": (1 << 10, 4 << 10, 64 << 10),
    "steps": (1, 2, 8),
    "chain_bytes": 4 << 20,
    "rounds": 3,
}


def back_from_csv(frame: pd.DataFrame) -> pd.DataFrame:
    text = io.StringIO(frame.to_csv(index=False, float_format="%.6g"))
    return pd.read_csv(text)


def failing(claims: dict[str, bool]) -> list[str]:
    assert all(type(holds) is bool for holds in claims.values())
    return [sentence for sentence, holds in claims.items() if not holds]


@simulator
def test_overlap_measures_what_it_predicts_where_nothing_else_takes_time(pretend):
    device = pretend()
    frame = back_from_csv(overlap.EXPERIMENT.frame(**OVERLAP))
    ratio = frame["ms"] / frame["predicted_ms"]
    assert ratio.between(0.99, 1.02).all(), frame[~ratio.between(0.99, 1.02)]
    assert not failing(overlap.EXPERIMENT.claims(frame))
    assert not device.pending
    assert not device.events
    assert not device.blocking
    assert not device.locked
    assert set(frame["part"]) == {
        "staged",
        "remainder",
        "timeline",
        "host",
        "independent",
        "default stream",
        "directions",
    }
    line = frame[frame["part"] == "timeline"]
    assert len(line) == 8
    scale = line["end_ms"].max()
    assert line["begin_ms"].to_numpy() == pytest.approx(line["predicted_begin_ms"].to_numpy(), abs=0.02 * scale)
    assert line["end_ms"].to_numpy() == pytest.approx(line["predicted_end_ms"].to_numpy(), abs=0.02 * scale)
    together = frame[frame["part"] == "directions"]["what"].tolist()
    assert together == [
        f"{TO_DEVICE} + {TO_HOST}",
        f"{TO_DEVICE} + {KERNEL}",
        f"{TO_HOST} + {KERNEL}",
        f"{TO_DEVICE} + {TO_HOST} + {KERNEL}",
    ]


@simulator
def test_overlap_of_a_device_with_one_copy_engine(pretend):
    pretend(engines=1)
    frame = overlap.EXPERIMENT.frame(**OVERLAP)
    ratio = frame["ms"] / frame["predicted_ms"]
    assert ratio.between(0.99, 1.02).all(), frame[~ratio.between(0.99, 1.02)]
    assert len(failing(overlap.EXPERIMENT.claims(frame))) == 1
    assert "with two copy engines" in failing(overlap.EXPERIMENT.claims(frame))[0]


@simulator
def test_nothing_overlaps_on_a_device_that_does_one_thing_at_a_time(pretend):
    pretend(serial=True)
    failed = failing(overlap.EXPERIMENT.claims(overlap.EXPERIMENT.frame(**OVERLAP)))
    for words in ("faster than the sequence", "any number of streams", "a tenth sooner", "elements that streams"):
        assert any(words in sentence for sentence in failed), words
    for words in ("in two streams overlap", "with a non-blocking one", "all of both copies"):
        assert any(words in sentence for sentence in failed), words


@simulator
def test_calls_that_do_not_return_are_noticed(pretend):
    device = pretend()
    copy = device.cuMemcpyAsync

    def blocking(target, source, size, stream):
        copy(target, source, size, stream)
        device.wait_until(device.at(stream))

    device.cuMemcpyAsync = blocking
    failed = failing(overlap.EXPERIMENT.claims(overlap.EXPERIMENT.frame(**OVERLAP)))
    assert any("asynchronous calls return" in sentence for sentence in failed)


@simulator
def test_work_of_the_host_that_is_not_hidden_is_noticed(pretend, monkeypatch):
    device = pretend()

    def host_work(counter, turns):  # it waits for the device
        device.wait_until(max(device.ready.values()))
        device.host += 1e-5 * turns
        counter[:] = turns

    monkeypatch.setattr(overlap, "host_work", host_work)
    assert [sentence[:14] for sentence in failing(overlap.EXPERIMENT.claims(overlap.EXPERIMENT.frame(**OVERLAP)))] == [
        "three quarters"
    ]


@simulator
def test_a_pageable_copy_that_returns_at_once_is_noticed(pretend):
    device = pretend()
    device.locked[0] = 1 << 63  # all of the host's memory
    failed = failing(overlap.EXPERIMENT.claims(overlap.EXPERIMENT.frame(**OVERLAP)))
    assert [sentence[:23] for sentence in failed] == ["a copy of pageable memo", "with it, all takes more"]


@simulator
@pytest.mark.parametrize(("what", "later"), [("copy", 0.03), (KERNEL, 0.2)])
def test_a_timeline_that_lags_behind_is_noticed(pretend, what, later):
    pretend()
    frame = overlap.EXPERIMENT.frame(**OVERLAP)
    late = (frame["part"] == "timeline") & (frame["what"] == what) & (frame["stream"] == 1)
    frame.loc[late, "begin_ms"] += later * frame["predicted_end_ms"].max()
    assert [sentence[:16] for sentence in failing(overlap.EXPERIMENT.claims(frame))] == ["its copies begin"]


@simulator
@pytest.mark.parametrize("change", ["kernel", "copy"])
def test_overlap_raises_for_wrong_results(pretend, monkeypatch, change):
    device = pretend()
    if change == "kernel":  # one that leaves its last element out
        enqueue = device.enqueue
        monkeypatch.setattr(
            machine, "enqueue", lambda kernel, grid, block, data, *rest: enqueue(kernel, grid, block, data[:-1], *rest)
        )
    else:  # one that moves one element too few
        copy = device.cuMemcpyAsync
        device.cuMemcpyAsync = lambda to, from_, size, stream: copy(to, from_, size - 4 * (size > 4), stream)
    with pytest.raises(AssertionError, match="is wrong"):
        overlap.EXPERIMENT.frame(**OVERLAP)


@simulator
def test_staged_work_beside_mapped_memory_takes_what_is_predicted(pretend):
    device = pretend()
    frame = mapped_streams.EXPERIMENT.frame(elements=1 << 16, turns=(1, 7), streams=(1, 4), rounds=2)
    assert list(frame.columns) == list(recorded("memory_lab/mapped_streams.csv").columns)
    assert list(frame["way"]) == 2 * ["staged", "staged", "read", "written", "mapped"]
    staged = frame[frame["way"] == "staged"]
    assert (staged["ms"] / staged["predicted_ms"]).between(0.99, 1.02).all()
    assert not device.pending
    assert not device.locked


@simulator
def test_mapped_memory_is_added_as_often_as_it_is_passed_over(pretend, monkeypatch):
    pretend()
    frame = zero_copy.EXPERIMENT.frame(elements=1 << 14, passes=(1, 3), strides=(8,), rounds=2)
    assert list(frame.columns) == list(recorded("memory_lab/zero_copy.csv").columns)
    ways = ["copy", *(way for way in zero_copy.WAYS for _ in range(2)), "strided"]
    assert list(frame["way"]) == ways
    monkeypatch.setattr(machine, "enqueue", lambda *arguments: lambda stream: None)
    with pytest.raises(AssertionError, match="not equal"):
        zero_copy.EXPERIMENT.frame(elements=1 << 14, passes=(1, 3), strides=(8,), rounds=2)


@simulator
def test_transfers_on_the_pretended_device(pretend):
    device = pretend(call_ms=0.002)
    frame = back_from_csv(transfers.EXPERIMENT.frame(**TRANSFERS))
    assert not device.pending
    assert not device.locked
    assert not failing(transfers.EXPERIMENT.claims(frame))
    copied = frame[frame["part"] == "copy"].set_index(["direction", "memory", "bytes"]).sort_index()
    assert set(copied.index.droplevel("bytes")) == {
        (TO_DEVICE, PAGEABLE),
        (TO_DEVICE, PINNED),
        (TO_DEVICE, REGISTERED),
        (TO_DEVICE, WRITE_COMBINED),
        (TO_HOST, PAGEABLE),
        (TO_HOST, PINNED),
        (TO_HOST, REGISTERED),
        (ON_DEVICE, "device"),
        (ON_HOST, PAGEABLE),
    }
    large = 16 << 20
    assert copied.loc[(TO_DEVICE, PINNED, large), "gb_s"] == pytest.approx(54.6, rel=0.03)
    assert copied.loc[(TO_HOST, PAGEABLE, large), "gb_s"] == pytest.approx(16, rel=0.03)
    assert copied.loc[(ON_DEVICE, "device", large), "gb_s"] == pytest.approx(3876, rel=0.3)
    assert copied.loc[(TO_HOST, REGISTERED, large), "theoretical_gb_s"] == pytest.approx(63.015, rel=1e-3)
    assert (copied.loc[TO_DEVICE, "link_lanes"] == 16).all()
    even = frame[frame["part"] == "break-even"].set_index(["what", "direction", "bytes"])
    gained = copied.loc[(TO_DEVICE, PAGEABLE, large), "us"] - copied.loc[(TO_DEVICE, REGISTERED, large), "us"]
    cost = 10 + large / 31e3  # microseconds, on the simulated device
    assert even.loc[("register", TO_DEVICE, large), "copies"] == pytest.approx(cost / gained, rel=0.05)
    assert even.loc[("allocate pinned", TO_HOST, large), "copies"] > even.loc[("register", TO_HOST, large), "copies"]
    chain = frame[frame["part"] == "chain"].set_index(["what", "count"])
    assert chain.loc[("round trips", 8), "us"] > 6 * chain.loc[("kept on the device", 8), "us"]
    assert frame[frame["part"] != "break-even"]["us"].notna().all()
    predicted = frame[(frame["part"] != "break-even") & (frame["direction"] != ON_HOST)]
    assert predicted["predicted_us"].notna().all()


@simulator
def test_transfers_without_a_known_link_still_measures(pretend, monkeypatch):
    pretend(call_ms=0.002)
    monkeypatch.setattr(transfers, "link", lambda: (math.nan, math.nan))
    frame = transfers.EXPERIMENT.frame(**TRANSFERS)
    assert frame[(frame["part"] == "copy") & (frame["direction"] == TO_DEVICE)]["predicted_us"].isna().all()
    assert "three quarters of the link" in failing(transfers.EXPERIMENT.claims(back_from_csv(frame)))[0]


@simulator
def test_transfers_claims_can_fail(pretend):
    device = pretend(call_ms=0.002)
    # Pageable memory is as fast as page-locked memory, and everything runs at a tenth of the link's rate.
    device.LINK, device.STAGING, device.DEVICE = 6e6, {True: 6e6, False: 6e6}, 5e7
    failed = failing(transfers.EXPERIMENT.claims(transfers.EXPERIMENT.frame(**TRANSFERS)))
    for words in ("three quarters", "within a third", "not half as fast", "ten times", "pays for itself"):
        assert any(words in sentence for sentence in failed), words


@simulator
@pytest.mark.parametrize(
    ("rows", "slower", "words"),
    [
        ({"part": "copy", "memory": PINNED, "bytes": 64 << 10}, 2, "one of 64 KB"),
        ({"part": "copy", "memory": WRITE_COMBINED, "bytes": 16 << 20}, 2, "so is write-combined"),
        ({"part": "packing", "what": "one by one", "memory": PINNED, "bytes": 4 << 10}, 3, "small copies overlap"),
        ({"part": "packing", "what": "packed", "bytes": 64 << 10}, 0.1, "copies of 64 KB are"),
    ],
)
def test_each_claim_on_copies_can_fail(pretend, rows, slower, words):
    pretend(call_ms=0.002)
    frame = transfers.EXPERIMENT.frame(**TRANSFERS)
    at = np.logical_and.reduce([frame[column] == value for column, value in rows.items()])
    frame.loc[at, "us"] *= slower
    frame.loc[at, "gb_s"] /= slower
    assert any(words in sentence for sentence in failing(transfers.EXPERIMENT.claims(frame)))


@simulator
@pytest.mark.parametrize(("less", "words"), [(4, "what was copied is wrong"), (-4, "more was written")])
def test_transfers_raises_for_wrong_copies(pretend, less, words):
    device = pretend()
    copy = device.cuMemcpyAsync

    def wrong(to, from_, size, stream):
        small = size == TRANSFERS["sizes"][0]
        copy(to, from_, size - less * small, stream)

    device.cuMemcpyAsync = wrong
    with pytest.raises(AssertionError, match=words):
        transfers.EXPERIMENT.frame(**TRANSFERS)


@simulator
def test_transfers_raises_for_a_wrong_chain(pretend, monkeypatch):
    device = pretend()
    enqueue = device.enqueue
    calls = itertools.count()

    def forgetful(kernel, grid, block, *arguments):
        made = enqueue(kernel, grid, block, *arguments)
        return lambda stream: made(stream) if kernel is not transfers.step or next(calls) % 7 else None

    monkeypatch.setattr(machine, "enqueue", forgetful)
    with pytest.raises(AssertionError, match="a chain of"):
        transfers.EXPERIMENT.frame(**TRANSFERS)


@simulator
@pytest.mark.parametrize("experiment", [overlap, transfers], ids=["overlap", "transfers"])
def test_pictures_of_frames_read_back(pretend, experiment):
    figures = pytest.importorskip("matplotlib.figure")
    pretend(call_ms=1e-6 if experiment is overlap else 0.002)
    frame = experiment.EXPERIMENT.frame(**(OVERLAP if experiment is overlap else TRANSFERS))
    figure = figures.Figure(figsize=(9, 5), layout="constrained")
    experiment.EXPERIMENT.plot(back_from_csv(frame), figure)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=50)
    assert len(file.getvalue()) > 5000
    assert all(axes.has_data() for axes in figure.axes)
