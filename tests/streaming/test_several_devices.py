"""Products streamed by several devices: who computes what, results, errors, interrupts, predictions.

The simulator is one device. Here it is several, each with its own memory and queues.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.streaming_cases import (
    LAYOUTS,
    Slow,
    integers,
    least_memory,
    multiplied,
    piece_by_piece,
    rng,
    threads_of_runs,
)

from numba_gemm import streamed_sgemm, streaming
from numba_gemm.gemm.precision import runnable
from numba_gemm.runtime import device as runtime_devices
from numba_gemm.runtime.driver import device_scope
from numba_gemm.runtime.pinned_memory import is_page_locked, pinned
from numba_gemm.streaming import blocking as dividing
from numba_gemm.streaming import preparation, queues, sharing, supervision
from numba_gemm.streaming.blocking import Blocking
from numba_gemm.streaming.prediction import Prediction, Rates, predict
from numba_gemm.streaming.products import Products

DEVICES = [2, 0, 3, 1]


@pytest.fixture
def four_devices(monkeypatch):
    monkeypatch.setattr(runtime_devices, "device_count", lambda: 4)


@pytest.fixture
def computed(monkeypatch):
    """Replace the products by NumPy's; return the devices that launched one, in the order of launches."""
    found = []

    def enqueue(self, alpha, a, b, beta, c, stream, workspace):
        assert {a.device, b.device, c.device} == {self.device}
        found.append(self.device)
        multiplied(a.owner, b.owner, beta, c.owner, alpha)

    monkeypatch.setattr(Products, "enqueue", enqueue)
    return found


def divided_into(monkeypatch, division):
    """Divide all products in a way."""
    monkeypatch.setattr(dividing, "choose", lambda *arguments: division)
    return division


def slow_device(monkeypatch, ordinal, delay_s):
    """Make the queues of a device slow."""
    original = queues.SimulatedDevice.queue

    def queue(self):
        made = original(self)
        made.delay_s = delay_s if self.ordinal == ordinal else 0.0
        return made

    monkeypatch.setattr(queues.SimulatedDevice, "queue", queue)


# ------------------------------------------------------------------------------------------------------------ dividing

extents = st.integers(1, 20000)


@settings(max_examples=150)
@given(extents, extents, st.integers(1, 9000), st.integers(1, 9))
def test_each_device_gets_an_equal_part(m, n, k, devices):
    """One block per device, of equal extents, if there are enough rows and columns; else fewer."""
    found = dividing.choose(m, n, k, 1 << 40, lambda shapes: 0, devices)
    assert found.count <= devices
    if min(m, n) >= 8 * devices * dividing.EDGE:
        assert found.count == devices
        assert found.rows * found.cols <= 1.15 * m * n / devices


@pytest.mark.parametrize(
    ("m", "n", "devices", "grid"),
    [
        (32768, 32768, 1, (1, 1)),
        (32768, 32768, 2, (2, 1)),
        (65536, 32768, 2, (2, 1)),
        (32768, 65536, 2, (1, 2)),
        (65536, 32768, 8, (4, 2)),
        (32768, 32768, 3, (3, 1)),
        (100, 100, 4, (1, 1)),
    ],
)
def test_parts_copy_least(m, n, devices, grid):
    assert dividing.choose(m, n, 4096, 1 << 40, lambda shapes: 0, devices).grid == grid


def test_parts_are_divided_further_within_a_limit():
    """With less memory, all devices still have equally many blocks."""
    for limit in (64 << 20, 200 << 20, 1 << 30, 3 << 30):
        found = dividing.choose(32768, 32768, 8192, limit, lambda shapes: 0, 4)
        assert found.device_bytes <= limit
        assert found.count % 4 == 0


@pytest.mark.simulator
def test_the_smallest_memory_decides(monkeypatch, four_devices):
    sizes = {0: (60 << 20, 64 << 20), 1: (30 << 20, 32 << 20), 2: (8 << 20, 256 << 20)}
    monkeypatch.setattr(preparation, "_memory", lambda device: sizes[device])
    a, b = (np.broadcast_to(np.float32(1), (8192, 8192)) for _ in "ab")
    for devices, limit in (((0, 1), 24 << 20), ((1, 2), int(0.9 * (8 << 20)))):
        found = streaming.blocking_of(a, b, devices=devices)
        assert found == streaming.blocking_of(a, b, devices=devices, memory_limit=limit)
        assert found.device_bytes <= limit
    sizes[2] = (100, 1 << 30)
    with pytest.raises(MemoryError, match=r"^device 2 has 100 bytes left"):
        streaming.blocking_of(a, b, devices=[0, 2])


@pytest.mark.simulator
def test_the_largest_workspace_decides(monkeypatch, four_devices):
    """GPUs of different models may need workspaces of different sizes."""
    monkeypatch.setattr(Products, "workspace_bytes", lambda self, shapes: 1000 * (self.device + 1))
    assert streaming.blocking_of(integers(40, 30), integers(30, 20), devices=[1, 3, 0]).workspace == 4000


@pytest.mark.parametrize(("count", "devices"), [(1, 3), (3, 3), (7, 2), (0, 2)])
def test_blocks_are_dealt_once(count, devices):
    deal = sharing.Deal(count, devices)
    if count > devices - 1:
        last = [deal.next(devices - 1)]
        assert last == [devices - 1], "its own first, though others have not begun"
    else:
        last = []
    rest = [deal.next(device) for device in range(devices) for _ in range(count + 1)]
    assert sorted(block for block in last + rest if block is not None) == list(range(count))


# ------------------------------------------------------------------------------------------------------------- results


@pytest.mark.simulator
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_products_of_any_layout(tiny, four_devices, computed, layout, count):
    a, b = LAYOUTS[layout](integers(37, 45)), LAYOUTS[layout](integers(45, 52))
    devices = DEVICES[:count]
    for limit in (least_memory(a, b, devices=devices), 1 << 20):
        computed.clear()
        np.testing.assert_array_equal(streamed_sgemm(a, b, devices=devices, memory_limit=limit), a @ b)
        assert set(computed) == set(devices)


@pytest.mark.simulator
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("out_layout", ["by rows", "by columns"])
def test_nothing_depends_on_how_fast_a_queue_is(tiny, four_devices, computed, monkeypatch, seed, beta, out_layout):
    monkeypatch.setattr(queues.SimulatedQueue, "delay_s", Slow(seed, 0.002))
    a, b, c = integers(29, 23), integers(23, 37), LAYOUTS[out_layout](integers(29, 37))
    expected = a @ b + beta * c
    devices = DEVICES[: 2 + seed % 3]
    limit = least_memory(a, b, devices=devices) + 600 * seed
    assert streamed_sgemm(a, b, c, beta=beta, devices=devices, memory_limit=limit) is c
    np.testing.assert_array_equal(c, expected)
    assert not threads_of_runs()


@pytest.mark.simulator
@pytest.mark.parametrize("grid", [(1, 1), (2, 1), (1, 3), (3, 2), (5, 1)])
@pytest.mark.parametrize("devices", [2, 4])
def test_any_number_of_blocks(tiny, four_devices, computed, monkeypatch, grid, devices):
    """Fewer blocks than devices, and numbers of blocks that the number of devices does not divide."""
    m, n, k = 8 * grid[0] - 3, 16 * grid[1] - 5, 11
    division = divided_into(monkeypatch, Blocking(m, n, k, 8, 16, (4, 4, 3), 8))
    assert division.grid == grid
    opened = []
    original = queues.SimulatedDevice.__init__
    monkeypatch.setattr(
        queues.SimulatedDevice, "__init__", lambda self, ordinal: opened.append(ordinal) or original(self, ordinal)
    )
    a, b, parts = integers(m, k), integers(k, n), []
    result = streamed_sgemm(a, b, devices=DEVICES[:devices], progress=parts.append)
    np.testing.assert_array_equal(result, a @ b)
    assert opened == DEVICES[:devices][: division.count], "others are left alone"
    assert set(computed) == set(opened), "each has a block"
    assert [part.number for part in parts] == list(range(1, division.count + 1))
    assert parts[-1].elements == parts[-1].of == m * n


@pytest.mark.simulator
def test_the_same_bits_whoever_computes_a_block(four_devices, monkeypatch):
    """With the package's kernels, three devices give the bits of one for the same blocks."""
    division = divided_into(monkeypatch, Blocking(20, 16, 24, 8, 8, (8, 16), 8))
    a, b = (rng.standard_normal(shape, np.float32) for shape in ((20, 24), (24, 16)))
    alone = streamed_sgemm(a, b, alpha=0.3)
    np.testing.assert_allclose(alone, 0.3 * (a @ b), rtol=1e-4, atol=1e-4)
    assert division.count == 6
    for devices in ([3, 1, 2], [1]):
        np.testing.assert_array_equal(streamed_sgemm(a, b, alpha=0.3, devices=devices), alone)


@pytest.mark.simulator
def test_a_late_device_gets_its_block(tiny, four_devices, computed, monkeypatch):
    """A device that has room for two blocks leaves one of two blocks to a device whose threads begin later."""
    monkeypatch.setattr(queues.SimulatedDevice, "enter", lambda self: time.sleep(0.2 * (self.ordinal == 3)))
    divided_into(monkeypatch, Blocking(16, 16, 4, 8, 16, (4,), 8))
    a, b = integers(16, 4), integers(4, 16)
    np.testing.assert_array_equal(streamed_sgemm(a, b, devices=[0, 3]), a @ b)
    assert Counter(computed) == {0: 1, 3: 1}


@pytest.mark.simulator
@pytest.mark.parametrize("depths", [(8,), (4, 4), (4, 2, 2)])
def test_a_slow_device_computes_fewer_blocks(tiny, four_devices, computed, monkeypatch, depths):
    """A device takes a block when it has room for it, not before."""
    slow_device(monkeypatch, 3, 0.02)
    division = divided_into(monkeypatch, Blocking(96, 8, 8, 8, 8, depths, 8))
    devices, taken, original = [3, 0], Counter(), sharing.Deal.next
    early = []

    def next_(self, number):
        must_be_done = taken[number] * len(depths) - division.slots + 1
        early.append(computed.count(devices[number]) < must_be_done)
        taken[number] += 1
        return original(self, number)

    monkeypatch.setattr(sharing.Deal, "next", next_)
    a, b = integers(96, 8), integers(8, 8)
    np.testing.assert_array_equal(streamed_sgemm(a, b, devices=devices), a @ b)
    assert not any(early)
    assert Counter(computed)[3] < Counter(computed)[0]


# ----------------------------------------------------------------------------------------------- interrupts, errors


def failing_on(monkeypatch, ordinal, launches, parts):
    """Let a device fail after some launches, and after as many parts of C are complete."""
    count = itertools.count()

    def enqueue(self, alpha, a, b, beta, c, stream, workspace):
        if self.device == ordinal and next(count) == launches:
            until = time.monotonic() + 20
            while len(parts) < launches and time.monotonic() < until:
                time.sleep(0.001)
            raise RuntimeError("launch failed")
        time.sleep(0.003)
        multiplied(a.owner, b.owner, beta, c.owner, alpha)

    monkeypatch.setattr(Products, "enqueue", enqueue)


def check_what_is_done(error, a, b, out):
    """Compare the parts that an error names with the product; NaN stands where nothing was written."""
    for rows, cols in error.done:
        np.testing.assert_array_equal(out[rows, cols], (a @ b)[rows, cols])
    assert np.isnan(out).any(), "it ended early"
    (note,) = [text for text in error.__notes__ if "complete of out" in text]
    assert note.count("[") == min(len(error.done), 20)
    assert not threads_of_runs()


@pytest.mark.simulator
@pytest.mark.parametrize("launches", [0, 3])
@pytest.mark.parametrize("ordinal", DEVICES[:3])
def test_a_device_that_fails_ends_it_and_says_what_is_done(tiny, four_devices, monkeypatch, ordinal, launches):
    parts = []
    failing_on(monkeypatch, ordinal, launches, parts)
    a, b, out = integers(64, 16), integers(16, 24), np.full((64, 24), np.nan, np.float32)
    divided_into(monkeypatch, Blocking(64, 24, 16, 8, 8, (8, 8), 8))  # 24 blocks of one part
    with pytest.raises(RuntimeError, match="launch failed") as caught:
        streamed_sgemm(a, b, out, devices=DEVICES[:3], progress=parts.append)
    assert f"streamed_sgemm: raised by the share of device {ordinal}" in caught.value.__notes__
    assert len(caught.value.done) >= launches
    check_what_is_done(caught.value, a, b, out)


@pytest.mark.simulator
def test_the_first_error_of_several_is_raised(tiny, four_devices, monkeypatch):
    together = threading.Barrier(3)

    def enqueue(self, *arguments):
        together.wait(10)
        raise RuntimeError(f"launch failed on {self.device}")

    monkeypatch.setattr(Products, "enqueue", enqueue)
    divided_into(monkeypatch, Blocking(24, 8, 8, 8, 8, (8,), 8))
    with pytest.raises(RuntimeError, match=r"launch failed on \d") as caught:
        streamed_sgemm(integers(24, 8), integers(8, 8), devices=DEVICES[:3])
    assert caught.value.done == []
    assert not threads_of_runs()


@pytest.mark.simulator
@pytest.mark.parametrize("call", [streamed_sgemm, streaming.expected_time])
def test_a_device_without_memory_frees_the_others(tiny, four_devices, computed, monkeypatch, call):
    original = queues.SimulatedDevice.allocate

    def allocate(self, size):
        if self.ordinal == 3:
            raise MemoryError("device 3 has no bytes left")
        self.queue()
        return original(self, size)

    monkeypatch.setattr(queues.SimulatedDevice, "allocate", allocate)
    with pytest.raises(MemoryError, match="device 3"):
        call(integers(64, 16), integers(16, 24), devices=DEVICES[:3])
    assert not computed
    assert not threads_of_runs()


@pytest.mark.simulator
@pytest.mark.parametrize("times", [1, 3])
def test_an_interrupt(tiny, four_devices, computed, monkeypatch, interrupt, times):
    monkeypatch.setattr(queues.SimulatedQueue, "delay_s", 0.01)
    a, b, out = integers(64, 16), integers(16, 24), np.full((64, 24), np.nan, np.float32)
    divided_into(monkeypatch, Blocking(64, 24, 16, 8, 8, (8, 8), 8))

    def progress(part):
        if part.number == 2:
            for _ in range(times):
                interrupt()

    with pytest.raises(KeyboardInterrupt) as caught:
        streamed_sgemm(a, b, out, devices=DEVICES, progress=progress)
    assert 2 <= len(caught.value.done) < 24
    check_what_is_done(caught.value, a, b, out)


@pytest.mark.simulator
def test_progress_is_told_one_part_at_a_time_until_it_raises(tiny, four_devices, computed, monkeypatch):
    a, b, out = integers(64, 16), integers(16, 24), np.full((64, 24), np.nan, np.float32)
    divided_into(monkeypatch, Blocking(64, 24, 16, 8, 8, (8, 8), 8))
    numbers, within = [], []

    def progress(part):
        within.append(1)
        assert len(within) == 1, "another call is running"
        np.testing.assert_array_equal(out[part.rows, part.cols], (a @ b)[part.rows, part.cols])
        numbers.append(part.number)
        time.sleep(0.005)
        within.clear()
        if part.number == 5:
            raise ZeroDivisionError("enough")

    with pytest.raises(ZeroDivisionError, match="enough") as caught:
        streamed_sgemm(a, b, out, devices=DEVICES, progress=progress)
    assert numbers == [1, 2, 3, 4, 5]
    assert len(caught.value.done) >= 5
    check_what_is_done(caught.value, a, b, out)


@pytest.mark.simulator
def test_a_failed_product_is_not_kept(tiny, four_devices, computed, no_collection):
    """The error does not keep the operands alive once it is released."""
    a, b = integers(64, 40), integers(40, 37)
    gone = weakref.ref(b)
    with pytest.raises(ZeroDivisionError):
        streamed_sgemm(a, b, devices=DEVICES, progress=lambda part: 1 / 0)
    del b
    assert gone() is None


@pytest.mark.simulator
def test_a_thread_that_cannot_be_started(tiny, four_devices, computed, monkeypatch):
    """The devices whose threads run stop, too."""
    original, started = threading.Thread.start, []

    def start(self):
        if self.name == "streamed_sgemm":
            started.append(self)
            if len(started) == 2:
                raise RuntimeError("can't start new thread")
        original(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(queues.SimulatedQueue, "delay_s", 0.01)
    a, b, out = integers(64, 16), integers(16, 24), np.full((64, 24), np.nan, np.float32)
    with pytest.raises(RuntimeError, match="can't start new thread") as caught:
        streamed_sgemm(a, b, out, devices=DEVICES, memory_limit=least_memory(a, b, devices=DEVICES))
    check_what_is_done(caught.value, a, b, out)


ERRORS = [
    ([], ValueError, "devices is empty; expected one GPU at least"),
    ([0, 4], ValueError, r"devices\[1\] is 4; expected 0 to 3"),
    ([-1], ValueError, r"devices\[0\] is -1; expected 0 to 3"),
    ([1, 0, "cuda:1"], ValueError, "devices is .*, with GPU 1 repeated; expected each once"),
    ([0, 1.5], TypeError, r"devices\[1\] is 1.5"),
    ([True], TypeError, r"devices\[0\] is True"),
    (["cpu"], ValueError, r"devices\[0\] is 'cpu'"),
    (2, TypeError, "devices is of type int; expected a list or tuple"),
    ("0,1", TypeError, "devices is of type str; expected a list or tuple"),
]


@pytest.mark.simulator
@pytest.mark.parametrize(("devices", "error", "words"), ERRORS)
@pytest.mark.parametrize("call", [streamed_sgemm, streaming.expected_time, streaming.blocking_of])
def test_devices_that_are_refused(four_devices, call, devices, error, words):
    with pytest.raises(error, match=words) as caught:
        call(integers(3, 4), integers(4, 5), devices=devices)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"device is 0 and devices is \[0, 1\]; expected one of both"):
        call(integers(3, 4), integers(4, 5), device=0, devices=[0, 1])


@pytest.mark.simulator
def test_every_device_must_run_the_precision(four_devices, monkeypatch):
    refused = []

    def check(precision, cc):
        refused.append(precision)
        raise ValueError("precision is not for this GPU")

    monkeypatch.setattr(streaming.streamed, "check_precision", check)
    streamed_sgemm(integers(3, 4), integers(4, 5), devices=[0])
    with pytest.raises(ValueError, match="not for this GPU"):
        streamed_sgemm(integers(3, 4), integers(4, 5), devices=[0, 1], precision="fp32_auto")
    assert refused == ["ieee"], "the precision that the first device selects"


# ---------------------------------------------------------------------------------------------------------- prediction


def rates_of(seconds, link=1e15):
    return Rates(lambda shape: seconds, link, link, link)


def test_predicted_shares():
    """Two devices take half of the products' time; a slow one takes fewer blocks, the second one beside its first."""
    found = Blocking(1024, 128, 64, 128, 128, (64,), 128)
    for speeds, seconds in (((1,), 8), ((1, 1), 4), ((1, 1, 1), 3), ((1, 3), 9), ((1, 100), 200)):
        made = predict(found, [rates_of(one) for one in speeds])
        assert made.seconds == pytest.approx(seconds), speeds
        assert made.devices == len(speeds)
    assert "8 s predicted: products" in str(predict(found, [rates_of(1)]))
    assert "4 s predicted on 2 devices; of the device that ends last: products 4 s" in str(
        predict(found, [rates_of(1)] * 2)
    )


def test_predicted_copies_of_devices_that_share_a_link():
    """Rates measured at once on a shared link are halves; then two devices copy as long as one does."""
    found = Blocking(1024, 128, 64, 128, 128, (64,), 128)
    alone, both = predict(found, [rates_of(1e-9, 1e6)]), predict(found, [rates_of(1e-9, 5e5)] * 2)
    assert both.seconds == pytest.approx(alone.seconds, rel=0.15), "but for the last block"
    assert (alone.to_device_rate, both.to_device_rate) == (pytest.approx(1e6), pytest.approx(5e5))


@pytest.mark.simulator
def test_rates_are_measured_at_once(tiny, four_devices, monkeypatch):
    """Each timed copy begins when all devices are ready for it."""
    under_way, most = [], []

    def measured(device, memory, room, a, b, c, products, threads, stop, meet):
        for _ in range(3):
            meet()
            under_way.append(device.ordinal)
            most.append(len(set(under_way)))
            meet()
            under_way.clear()
            meet()
        return rates_of(1.0 + device.ordinal)

    monkeypatch.setattr(preparation, "measured_rates", measured)
    found = streaming.expected_time(integers(64, 16), integers(16, 24), devices=DEVICES)
    assert max(most) == 4
    assert found.devices == 4
    assert found.products >= 4, "rates of each device"


@pytest.mark.simulator
@pytest.mark.parametrize("devices", [[0], DEVICES])
def test_expected_time(tiny, four_devices, devices):
    a, b, out = integers(40, 50), integers(50, 30), np.full((40, 30), 7, np.float32)
    found = streaming.expected_time(a, b, out, beta=1.0, devices=devices)
    assert found.seconds > 0
    assert found.to_device_rate > 0
    assert found.devices == len(devices)
    assert (out == 7).all()
    assert not threads_of_runs()


@pytest.mark.simulator
def test_a_device_that_fails_while_rates_are_measured_keeps_nobody_waiting(tiny, four_devices, monkeypatch):
    original = preparation.measured_rates

    def measured(device, *arguments):
        if device.ordinal == 3:
            raise RuntimeError("copy failed")
        return original(device, *arguments)

    monkeypatch.setattr(preparation, "measured_rates", measured)
    with pytest.raises(RuntimeError, match="copy failed"):
        streaming.expected_time(integers(64, 16), integers(16, 24), devices=DEVICES)
    assert not threads_of_runs()


@pytest.mark.simulator
def test_an_interrupt_while_rates_are_measured(tiny, four_devices, monkeypatch, interrupt):
    original = preparation.measured_rates

    def measured(device, *arguments):
        if device.ordinal == 3:
            interrupt()
            time.sleep(0.1)  # the others wait for this device meanwhile
        return original(device, *arguments)

    monkeypatch.setattr(preparation, "measured_rates", measured)
    with pytest.raises(KeyboardInterrupt):
        streaming.expected_time(integers(64, 16), integers(16, 24), devices=DEVICES)
    assert not threads_of_runs()


def test_works_at_once_raise_the_first_error():
    begun, stop = threading.Barrier(3), sharing.Stop()

    def fails():
        begun.wait(10)
        raise ZeroDivisionError

    def ends():
        begun.wait(10)
        while not stop.event.is_set():
            time.sleep(0.001)
        raise supervision.Stopped

    with pytest.raises(ZeroDivisionError):
        sharing.at_once([ends, fails, ends], stop)


def test_followers_of_a_stop():
    stop, told = sharing.Stop(), []
    first, second, third = (lambda number=number: told.append(number) for number in range(3))
    stop.follow(first)
    stop.follow(second)
    stop.leave(first)
    stop(ValueError("first"))
    stop.follow(third)
    stop(ValueError("second"))
    assert told == [1, 2, 1, 2]
    with pytest.raises(ValueError, match="first"):
        stop.check()
    stop.check()


@pytest.mark.simulator
def test_host_threads_are_shared(monkeypatch):
    monkeypatch.setattr(preparation.os, "sched_getaffinity", lambda process: range(16), raising=False)
    assert [preparation.host_threads(devices) for devices in (1, 2, 3, 40)] == [(8, 8), (4, 4), (2, 2), (1, 1)]


# ------------------------------------------------------------------------------------------------------- the benchmark


@pytest.mark.simulator
@pytest.mark.parametrize(("devices", "counts"), [((0, 3, 1), [1, 2, 3]), ((0, 3, 1, 2), [1, 2, 4])])
def test_the_benchmark_times_each_number_of_devices(tiny, four_devices, computed, monkeypatch, devices, counts):
    """One row for one, two, four devices and all of them, with shares and speeds relative to one device."""
    from numba_gemm.lab.bench import streamed

    monkeypatch.setattr(streamed, "taken", lambda device: 0)
    rates = dict(zip(counts, (1e9, 0.75e9, 0.5e9), strict=True))
    monkeypatch.setattr(
        streamed, "expected_time", lambda *matrices, devices, **how: Prediction(1, 1, 1, 1, rates[len(devices)])
    )
    frame = streamed.EXPERIMENT.frame(
        size=16, rows=64, precisions=["ieee"], operands=["pageable"], limits=[0], devices=devices, repeats=1
    )
    assert list(frame["operands"]) == [streamed.ON_DEVICE, *["pageable"] * 3]
    rows = frame[1:]
    assert list(rows["devices"]) == counts
    assert list(rows["link_share"]) == [1.0, 0.75, 0.5]
    np.testing.assert_allclose(rows["speedup"], rows["seconds"].iloc[0] / rows["seconds"])
    np.testing.assert_allclose(frame["tflops"] * frame["seconds"], 2 * 64 * 16 * 16 / 1e12)
    assert set(frame["rows"]) == {64}
    assert set(computed) == set(devices)
    assert all(streamed.EXPERIMENT.claims(frame).values())


@pytest.mark.simulator
def test_the_benchmark_does_not_time_a_wrong_product(tiny, computed, monkeypatch):
    from numba_gemm.lab.bench import streamed

    def wrong(a, b, out=None, **how):
        found = streamed_sgemm(a, b, out, **how)
        found[-1, -1] += how["precision"] == "ieee"
        return found

    monkeypatch.setattr(streamed, "taken", lambda device: 0)
    monkeypatch.setattr(streamed, "expected_time", lambda *matrices, **how: Prediction(1, 1, 1, 1, 1e9))
    monkeypatch.setattr(streamed, "streamed_sgemm", wrong)
    frame = streamed.EXPERIMENT.frame(size=16, precisions=["ieee"], operands=["pageable"], limits=[0], repeats=1)
    assert list(frame["operands"]) == ["pageable"]
    assert frame["seconds"].isna().all()
    assert frame["largest_difference"].item() > 0.9
    assert list(streamed.EXPERIMENT.claims(frame).values()) == [False, True]


# ----------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["ieee", "bf16x6"])
@pytest.mark.parametrize("layout", ["by rows", "by columns"])
def test_the_bits_of_the_same_products_on_one_device(monkeypatch, precision, layout):
    """On a machine with one GPU, that GPU takes two shares, each with its own memory and streams."""
    if precision not in runnable(runtime_devices.device_properties(0).cc):
        pytest.skip(f"this GPU cannot run {precision}")
    devices = [0, 1]
    if runtime_devices.device_count() == 1:
        devices = [0, 0]
        monkeypatch.setattr(streaming.streamed, "_ordinals", lambda device, devices: devices or [0])
    a, b = (rng.standard_normal(shape, np.float32) for shape in ((1000, 900), (900, 1300)))
    a, b = LAYOUTS[layout](a), LAYOUTS[layout](b)
    for limit in (6_000_000, 1 << 30):
        division = streaming.blocking_of(a, b, memory_limit=limit, precision=precision, devices=devices)
        assert division.count > 1
        expected = piece_by_piece(a, b, division, precision)
        for _ in range(5):
            found = streamed_sgemm(a, b, memory_limit=limit, precision=precision, devices=devices)
            np.testing.assert_array_equal(found, expected)
    assert streaming.expected_time(a, b, precision=precision, devices=devices).devices == 2


@pytest.mark.gpu
def test_page_locked_memory_is_that_for_every_device():
    if runtime_devices.device_count() == 1:
        pytest.skip("this machine has one GPU")
    with device_scope(0), pinned(1000) as array, device_scope(1):
        first = int(array.ctypes.data)
        assert is_page_locked(first, first + array.nbytes - 1)
        assert not is_page_locked(first, first + array.nbytes + (1 << 40))


@pytest.mark.gpu
def test_an_error_on_one_of_two_devices(monkeypatch):
    if runtime_devices.device_count() == 1:
        monkeypatch.setattr(streaming.streamed, "_ordinals", lambda device, devices: devices or [0])
    devices = [0, 1 % runtime_devices.device_count()]
    a, b = (rng.random(shape, np.float32) for shape in ((2048, 1024), (1024, 2048)))
    out = np.full((2048, 2048), np.nan, np.float32)

    def progress(part):
        if part.number == 3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        streamed_sgemm(a, b, out, devices=devices, memory_limit=6_000_000, progress=progress)
    assert len(caught.value.done) >= 3
    for rows, cols in caught.value.done:
        np.testing.assert_allclose(out[rows, cols], a[rows] @ b[:, cols], rtol=1e-4)
