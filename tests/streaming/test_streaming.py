"""Streamed products: division, order of copies and products, errors and interrupts."""

from __future__ import annotations

import _thread
import errno
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compile_stages import compiler_environment
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

import numba_gemm
from numba_gemm import streamed_sgemm, streaming
from numba_gemm.gemm.precision import runnable
from numba_gemm.runtime.device import device_count, device_properties
from numba_gemm.streaming import blocking as dividing
from numba_gemm.streaming import host, pipeline, preparation, products, queues, rates
from numba_gemm.streaming.blocking import Blocking
from numba_gemm.streaming.prediction import Rates, predict


def limit_for(a, b, least, fraction):
    """Return a memory limit between the smallest that works and one at which everything fits on the device."""
    m, k, n = *a.shape, b.shape[1]
    return int(least + fraction * (4 * (m * n + 2 * k * (m + n)) + 4096 - least))


# ------------------------------------------------------------------------------------------------------------ dividing

extents = st.integers(1, 5000)


@settings(max_examples=150)
@given(extents, extents, st.integers(1, 40000), st.integers(0, 30), st.integers(0, 1000))
def test_blocks_and_panels_cover_each_term_once(m, n, k, size, workspace):
    limit = 200_000 * 2**size // 4
    found = dividing.choose(m, n, k, limit, lambda shapes: workspace)
    if found is None:
        assert dividing.smallest(m, n, k, lambda shapes: workspace) > limit
        return
    assert found.device_bytes <= limit
    assert found.workspace == workspace
    assert sum(found.depths) == k
    assert min(found.depths) > 0
    area, summed, before = 0, {}, (-1, -1)
    for piece in found.all_pieces() if found.count * len(found.depths) < 3000 else ():
        rows, cols = found.block(piece.block)
        assert rows.begin <= piece.rows.begin < piece.rows.end <= rows.end
        assert piece.cols == cols
        assert (piece.block, piece.panel) >= before
        before = (piece.block, piece.panel)
        strips = found.strips(piece.block)
        assert piece.rows == (strips[piece.strips[0]].begin, strips[piece.strips[-1]].end)
        for strip in piece.strips:
            done = summed.setdefault((piece.block, strip), [])
            assert piece.first == (not done)
            assert piece.last == (piece.inner.end == k)
            done.append(piece.inner)
        area += piece.rows.extent * piece.cols.extent * piece.inner.extent
        assert found.shape(piece) in found.shapes()
    if area:
        assert area == m * n * k
        for inner in summed.values():
            assert [part.begin for part in inner] == [0, *(part.end for part in inner[:-1])]
            assert inner[-1].end == k


def test_many_panels_take_no_time():
    begin = time.thread_time()
    assert dividing.smallest(1000, 1000, 10**7, lambda shapes: 0) < 8 << 20
    assert time.thread_time() - begin < 20


def test_more_memory_copies_less():
    def copied(limit):
        down, across = dividing.choose(32768, 32768, 32768, limit, lambda shapes: 0).grid
        return 4 * 32768**2 * (down + across)

    found = [copied(limit) for limit in (100 << 20, 500 << 20, 2 << 30, 20 << 30)]
    assert found == sorted(found, reverse=True)
    assert found[-1] == 2 * 4 * 32768**2, "each element of A and B once"
    assert found[0] > 5 * found[-1]


def test_the_smallest_limit_is_the_smallest():
    def needs(shapes):
        return 1000

    for extents_ in ((1, 1, 1), (300, 420, 200), (5000, 10, 3000)):
        least = dividing.smallest(*extents_, needs)
        assert dividing.choose(*extents_, least, needs) is not None
        assert dividing.choose(*extents_, least - 1, needs) is None


@pytest.mark.parametrize("workspace", [0, 3 << 20, 40 << 20])
def test_division_with_workspace_fits_the_limit(workspace):
    """The workspace is computed after the division, and counts towards the limit."""

    def needs(shapes):
        return workspace

    for limit in range(10 << 20, 200 << 20, 7 << 20):
        found = dividing.choose(16384, 1024, 4096, limit, needs)
        if found is not None:
            assert found.device_bytes <= limit
            block, a, b, beside = found.parts
            assert block >= 4 * found.rows * found.cols
            assert a >= 4 * found.rows * max(found.depths)
            assert b >= 4 * found.cols * max(found.depths)
            assert beside >= workspace
            assert all(part % 256 == 0 for part in found.parts)
            assert found.device_bytes >= block + found.slots * (a + b) + beside


@pytest.mark.parametrize("extents_", [(5000, 10, 3000), (10, 5000, 3000), (700, 900, 5000), (300, 420, 200)])
def test_smallest_is_the_minimum_of_all_divisions(extents_):
    def needs(shapes):
        """Return more for shallow panels, so that the last division is not the smallest."""
        return (1 << 30) // max(shape.inner for shape in shapes)

    every = [*dividing._candidates(*extents_)]
    assert dividing.smallest(*extents_, lambda shapes: 0) == min(found.device_bytes for found in every)
    with_workspace = [dividing.replace(found, workspace=needs(found.shapes())).device_bytes for found in every]
    assert dividing.smallest(*extents_, needs) == min(with_workspace)


def test_parts_of_memory_are_aligned():
    assert Blocking(3, 5, 7, 3, 5, (7,), 3, workspace=1000).parts == (256, 256, 256, 1024)
    assert Blocking(30, 50, 7, 30, 50, (4, 3), 30, workspace=1000).parts == (6144, 512, 1024, 1024)


def test_panel_slots():
    assert Blocking(128, 128, 64, 128, 128, (64,), 128).slots == 1
    assert Blocking(128, 256, 64, 128, 128, (64,), 128).slots == 2
    assert Blocking(128, 128, 64, 128, 128, (32, 32), 128).slots == 2


@pytest.mark.simulator
@pytest.mark.parametrize(("free", "share"), [(1.0, 0.75), (0.5, 0.45), (0.1, 0.09)])
def test_default_limit_depends_on_free_memory(monkeypatch, free, share):
    """Three quarters of the total, or nine tenths of the free memory if that is less."""
    total = 64 << 20
    monkeypatch.setattr(preparation, "_memory", lambda device: (int(free * total), total))
    a, b = (np.broadcast_to(np.float32(1), (8192, 8192)) for _ in "ab")
    found = streaming.blocking_of(a, b)
    assert found.device_bytes <= share * total
    assert found == streaming.blocking_of(a, b, memory_limit=int(share * total))
    monkeypatch.setattr(preparation, "_memory", lambda device: (100, total))
    with pytest.raises(MemoryError, match="the device has 100 bytes left"):
        streaming.blocking_of(a, b)


def test_first_panels_are_thin_and_last_ones_deep():
    depths = dividing.depths(32768, 8192)
    assert depths[0] == 512
    assert depths[-1] > 5000
    assert sum(depths) == 32768
    assert max(depths) <= 8192
    assert dividing.depths(100, 8192) == (100,)


# ---------------------------------------------------------------------------------------------------------- prediction


def test_a_product_that_outlasts_its_copies():
    """Only the copies of the first panel and of the last strip add to the time."""
    found = Blocking(1024, 1024, 1024, 1024, 1024, (256, 256, 512), 256)
    made = predict(found, [Rates(lambda shape: shape.rows * shape.inner * 1e-5, 1e9, 1e9, 1e9)])
    first, last = 2 * 4 * 1024 * 256 / 1e9, 4 * 1024 * 256 / 1e9
    assert made.products == pytest.approx(1024 * 1024 * 1e-5)
    assert made.seconds == pytest.approx(first + made.products + last)
    assert made.bound_by == "products"
    assert "bound by products" in str(made)


def test_copies_that_outlast_the_product():
    """The time is that of all copies to the device, the last panel's products, and the last strip's copy back."""
    found = Blocking(1024, 1024, 1024, 1024, 1024, (256, 256, 512), 256)
    made = predict(found, [Rates(lambda shape: shape.rows * 1e-6, 1e6, 2e6, 1e15)])
    copies = 4 * 1024 * 1024 / 1e6 + 4 * 1024 * 1024 / 2e6
    assert made.to_device == pytest.approx(copies)
    assert made.seconds == pytest.approx(copies + 1024e-6)
    assert made.bound_by == "copies to the device"


def test_a_slow_way_back_keeps_the_next_block_waiting():
    """C has one place on the device: strips of the second block wait for those of the first to leave."""
    found = Blocking(512, 1024, 64, 512, 512, (64,), 256)
    made = predict(found, [Rates(lambda shape: 1e-9, 1e15, 1e15, 1e6)])
    assert made.seconds == pytest.approx(4 * 512 * 1024 / 1e6, rel=1e-4)
    assert made.bound_by == "copies to the host"
    read = predict(found, [Rates(lambda shape: 1e-9, 1e15, 1e15, 1e6)], reads_out=True)
    assert read.seconds > 1.4 * made.seconds


def test_a_product_waits_for_the_strip_in_its_place():
    """Product, copy, and only then the next block's product and copy."""
    found = Blocking(512, 1024, 64, 512, 512, (64,), 512)
    strip = 4 * 512 * 512
    assert predict(found, [Rates(lambda shape: 1.0, 1e15, 1e15, strip)]).seconds == pytest.approx(4.0)


@pytest.mark.simulator
def test_expected_time(tiny, monkeypatch):
    a, b = integers(40, 50), integers(50, 30)
    out = np.full((40, 30), 7, np.float32)
    found = streaming.expected_time(a, b, out, beta=1.0)
    assert found.seconds > 0
    assert (out == 7).all()
    with pytest.raises(ValueError, match="extent of 0"):
        streaming.expected_time(a[:0], b, out[:0])
    reads = []
    monkeypatch.setattr(preparation, "predict", lambda blocking, rates, reads_out: reads.append(reads_out))
    for beta in (0.0, 1.0):
        streaming.expected_time(a, b, out, beta=beta)
    assert reads == [False, True]


def test_samples_stay_within_memory_and_matrix():
    for shape, most in (((10, 10), 10**9), ((10**5, 10**5), 10**9), ((7, 10**6), 1000), ((10**6, 3), 50)):
        parts = rates.samples(shape, most)
        assert parts
        for rows, cols in parts:
            assert rows.extent * cols.extent <= max(most, cols.extent)
            assert 0 <= rows.begin < rows.end <= shape[0]
            assert 0 <= cols.begin < cols.end <= shape[1]
        assert len(set(parts)) == len(parts)


# ------------------------------------------------------------------------------------------------------------- results


@pytest.mark.simulator
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_products_of_any_layout(tiny, by_numpy, layout, fraction):
    a, b = LAYOUTS[layout](integers(37, 45)), LAYOUTS[layout](integers(45, 52))
    limit = limit_for(a, b, least_memory(a, b), fraction)
    np.testing.assert_array_equal(streamed_sgemm(a, b, memory_limit=limit), a @ b)


@pytest.mark.simulator
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "broadcast"])
@pytest.mark.parametrize("beta", [0.0, 2.0])
def test_out_of_any_layout(tiny, by_numpy, layout, beta):
    a, b, before = integers(37, 45), integers(45, 52), integers(37, 52)
    out = LAYOUTS[layout](before.copy())
    if beta == 0:
        out[...] = np.nan
    assert streamed_sgemm(a, b, out, alpha=-3.0, beta=beta, memory_limit=least_memory(a, b) + 2000) is out
    np.testing.assert_array_equal(out, -3 * (a @ b) + (beta * before if beta else 0))


@pytest.mark.simulator
@pytest.mark.parametrize("a_layout", ["by rows", "by columns"])
@pytest.mark.parametrize("b_layout", ["by rows", "by columns"])
def test_strides_of_panels_and_blocks(tiny, monkeypatch, a_layout, b_layout):
    """Kernels on a GPU take addresses and strides, those in the simulator arrays; both describe the same memory."""
    seen = set()

    def enqueue(self, alpha, a, b, beta, c, stream, workspace):
        for name, x in {"a": a, "b": b, "c": c}.items():
            assert x.owner.shape == (x.rows, x.cols)
            given = zip(x.owner.shape, (x.row_stride, x.col_stride), x.owner.strides)
            assert all(step == expected for extent, step, expected in given if extent > 1)
            seen.add((name, x.rows))
        multiplied(a.owner, b.owner, beta, c.owner, alpha)

    monkeypatch.setattr(products.Products, "enqueue", enqueue)
    a, b = LAYOUTS[a_layout](integers(37, 45)), LAYOUTS[b_layout](integers(45, 52))
    for limit in (least_memory(a, b), 1 << 20):  # a strip per block; several
        np.testing.assert_array_equal(streamed_sgemm(a, b, memory_limit=limit), a @ b)
    assert len(seen) > 3, "pieces of several extents"


@pytest.mark.simulator
def test_real_kernels(tiny):
    a, b, c = integers(17, 20), integers(20, 12), integers(17, 12)
    expected = 2 * (a @ b) - c
    streamed_sgemm(a, b, c, alpha=2.0, beta=-1.0, memory_limit=least_memory(a, b))
    np.testing.assert_array_equal(c, expected)


@pytest.mark.simulator
def test_no_terms(tiny):
    c = integers(4, 5)
    assert streamed_sgemm(integers(0, 3), integers(3, 5)).shape == (0, 5)
    np.testing.assert_array_equal(streamed_sgemm(integers(4, 0), integers(0, 5)), np.zeros((4, 5)))
    for a, b, alpha in ((integers(4, 0), integers(0, 5), 1.0), (integers(4, 3), integers(3, 5), 0.0)):
        out = np.full((4, 5), np.nan, np.float32)
        assert streamed_sgemm(a, b, out, alpha=alpha) is out
        np.testing.assert_array_equal(out, np.zeros((4, 5)))
    np.testing.assert_array_equal(streamed_sgemm(integers(4, 3), integers(3, 5), c.copy(), alpha=0, beta=2), 2 * c)


@pytest.mark.simulator
def test_no_terms_overflow_silently():
    out = np.array([[3e38, 1e-38, np.inf]], np.float32)
    with np.errstate(all="raise"):
        streamed_sgemm(np.zeros((1, 0), np.float32), np.zeros((0, 3), np.float32), out, beta=-10)
    np.testing.assert_array_equal(out, np.array([[-np.inf, -1e-37, -np.inf]], np.float32))


@pytest.mark.simulator
def test_page_locked_operands_are_copied_from_where_they_are(tiny, by_numpy, monkeypatch):
    a, b, c = integers(37, 45), integers(45, 52), np.empty((37, 52), np.float32)
    monkeypatch.setattr(queues.SimulatedDevice, "is_direct", lambda self, first, last: True)
    monkeypatch.setattr(host.Ring, "_take", lambda self: pytest.fail("a buffer was used"))
    np.testing.assert_array_equal(streamed_sgemm(a, b, c, memory_limit=least_memory(a, b) + 2000), a @ b)


class Mapped(np.ndarray):
    """An array as `numba.cuda.mapped_array` makes it, whose methods work in device memory."""

    __cuda_ndarray__, gpu_data = True, None
    T = property(lambda self: pytest.fail("it was transposed on the device"))

    def view(self, dtype):
        pytest.fail("it was viewed on the device")


@pytest.mark.simulator
@pytest.mark.parametrize("mapped", ["a", "b out", "a b out"])
@pytest.mark.parametrize("layout", ["by rows", "by columns"])
def test_mapped_arrays_are_host_memory(tiny, by_numpy, mapped, layout):
    def array(name, x):
        return np.ndarray.view(x, Mapped) if name in mapped.split() else x

    a, b, c = integers(37, 45), integers(45, 52), np.empty((37, 52), np.float32, order="FC"[layout == "by rows"])
    x, y, out = array("a", a), array("b", b), array("out", c)
    limit = least_memory(a, b) + 2000
    assert streamed_sgemm(x, y, out, memory_limit=limit) is out
    np.testing.assert_array_equal(c, a @ b)
    assert streaming.blocking_of(x, y, memory_limit=limit) == streaming.blocking_of(a, b, memory_limit=limit)
    assert streaming.expected_time(x, y, out, memory_limit=limit).devices == 1
    assert streamed_sgemm(x, y, out, alpha=0.0) is out
    assert not c.any()


@pytest.mark.simulator
def test_only_dense_rows_are_copied_without_a_buffer(monkeypatch):
    device = queues.SimulatedDevice(0)
    monkeypatch.setattr(queues.SimulatedDevice, "is_direct", lambda self, first, last: True)
    x = integers(6, 8)
    direct = {"rows": x, "columns": x.T, "slice": x[1:4, 2:5], "column": x[:, :1], "vector": x[0][:, None]}
    assert all(host.HostMatrix(array, device).direct for array in direct.values())
    for array in (x[:, ::2], x[::-1], np.broadcast_to(x[:1], x.shape), x[:, ::-1]):
        assert not host.HostMatrix(array, device).direct


# ------------------------------------------------------------------------------------------------------------- hazards


@pytest.mark.simulator
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_nothing_depends_on_how_fast_a_queue_is(tiny, by_numpy, monkeypatch, seed, beta):
    monkeypatch.setattr(queues.SimulatedQueue, "delay_s", Slow(seed))
    a, b, c = integers(29, 23), integers(23, 37), integers(29, 37)
    expected = a @ b + beta * c
    streamed_sgemm(a, b, c, beta=beta, memory_limit=least_memory(a, b) + 600 * seed)
    np.testing.assert_array_equal(c, expected)


class AlreadyThere:
    def wait(self):
        pass


@pytest.mark.simulator
@pytest.mark.parametrize(
    ("gate", "slow", "beta"),
    [("loaded", 0, 0.0), ("loaded", 0, 1.0), ("used", 1, 0.0), ("gone", 2, 0.0), ("gone", 2, 1.0)],
)
def test_every_wait_is_needed(tiny, by_numpy, monkeypatch, gate, slow, beta):
    """Results are wrong if any one of the waits is removed and the queue that it waits for is slow."""
    monkeypatch.setattr(pipeline, "AHEAD", 10**6)
    original = pipeline.Gates.get

    def get(self, name):
        found = original(self, name)
        return AlreadyThere() if name[0] == gate else found

    made, delays = [], {}

    class Queue(queues.SimulatedQueue):
        def __init__(self):
            super().__init__()
            self.delay_s = delays.get(len(made), 0.0)
            made.append(self)

    monkeypatch.setattr(queues, "SimulatedQueue", Queue)
    a, b, c = integers(29, 40), integers(40, 37), integers(29, 37)
    expected = a @ b + beta * c
    limit = least_memory(a, b)
    streamed_sgemm(a, b, right := c.copy(), beta=beta, memory_limit=limit)
    np.testing.assert_array_equal(right, expected)
    made.clear()
    delays[slow] = 0.004
    monkeypatch.setattr(pipeline.Gates, "get", get)
    streamed_sgemm(a, b, c, beta=beta, memory_limit=limit)
    assert not np.array_equal(c, expected)


@pytest.mark.simulator
def test_strips_have_one_place_in_all_blocks(tiny, by_numpy, monkeypatch):
    """The strips of a narrow block do not overlap the first rows of other strips of a wide block after it."""
    monkeypatch.setattr(queues.SimulatedQueue, "delay_s", 0.0)

    class Queue(queues.SimulatedQueue):
        def __init__(self):
            super().__init__()
            self.delay_s = 0.02 if len(made) == 2 else 0.0
            made.append(self)

    made = []
    monkeypatch.setattr(queues, "SimulatedQueue", Queue)
    a, b = integers(64, 4), integers(4, 72)
    monkeypatch.setattr(dividing, "choose", lambda *arguments: Blocking(64, 72, 4, 32, 64, (4,), 8))
    np.testing.assert_array_equal(streamed_sgemm(a, b), a @ b)


# ----------------------------------------------------------------------------------------------- interrupts, errors


@pytest.mark.simulator
@pytest.mark.parametrize("out_layout", ["by rows", "by columns"])
def test_what_progress_raises_ends_it_and_says_what_is_done(tiny, by_numpy, out_layout):
    a, b = integers(29, 40), integers(40, 37)
    out = LAYOUTS[out_layout](np.full((29, 37), np.nan, np.float32))

    def progress(part):
        if part.number == 3:
            raise ZeroDivisionError("enough")

    with pytest.raises(ZeroDivisionError, match="enough") as caught:
        streamed_sgemm(a, b, out, memory_limit=least_memory(a, b), progress=progress)
    done = caught.value.done
    assert len(done) == 3
    for rows, cols in done:
        np.testing.assert_array_equal(out[rows, cols], (a @ b)[rows, cols])
    assert np.isnan(out).any(), "it ended early"
    (note,) = caught.value.__notes__
    rows, cols = done[0]
    assert f"[{rows.start}:{rows.stop}, {cols.start}:{cols.stop}]" in note
    assert not threads_of_runs()


@pytest.mark.simulator
@pytest.mark.parametrize("times", [1, 3])
def test_an_interrupt(tiny, by_numpy, monkeypatch, interrupt, times):
    """After one interrupt or several, nothing runs once the call has ended."""
    monkeypatch.setattr(queues.SimulatedQueue, "delay_s", 0.01)
    a, b, out = integers(29, 40), integers(40, 37), np.full((29, 37), np.nan, np.float32)

    def progress(part):
        if part.number == 2:
            for _ in range(times):
                interrupt()

    with pytest.raises(KeyboardInterrupt) as caught:
        streamed_sgemm(a, b, out, memory_limit=least_memory(a, b), progress=progress)
    for rows, cols in caught.value.done:
        np.testing.assert_array_equal(out[rows, cols], (a @ b)[rows, cols])
    assert 2 <= len(caught.value.done) < 12
    assert "complete of out" in caught.value.__notes__[0]
    assert not threads_of_runs()


@pytest.mark.simulator
def test_an_interrupt_does_not_wait_for_a_panel(by_numpy, monkeypatch, interrupt):
    """Copies through buffers stop after the current one."""
    monkeypatch.setattr(pipeline, "BUFFER_ELEMENTS", 64)
    original, filled = host.Ring._fill, []

    def fill(self, *arguments):
        filled.append(1)
        if len(filled) == 10:
            interrupt()
        time.sleep(0.02)
        return original(self, *arguments)

    monkeypatch.setattr(host.Ring, "_fill", fill)
    with pytest.raises(KeyboardInterrupt):
        streamed_sgemm(integers(512, 256), integers(256, 512))  # 4096 buffers, 20 ms each
    assert len(filled) < 200
    assert not threads_of_runs()


@pytest.mark.simulator
@pytest.mark.parametrize("call", ["expected_time", "progress"])
def test_an_interrupt_while_rates_are_measured(tiny, by_numpy, monkeypatch, interrupt, call):
    original = rates.bring_in

    def bring_in(*arguments):
        interrupt()
        return original(*arguments)

    monkeypatch.setattr(rates, "bring_in", bring_in)
    a, b = integers(29, 40), integers(40, 37)
    calls = {
        "progress": lambda: streamed_sgemm(a, b, progress=True),
        "expected_time": lambda: streaming.expected_time(a, b),
    }
    with pytest.raises(KeyboardInterrupt):
        calls[call]()
    assert not threads_of_runs()


@pytest.mark.simulator
def test_an_interrupt_as_soon_as_work_begins(no_collection):
    """Nothing runs after the call has ended, even if the thread had not begun.

    No garbage is collected meanwhile: Python discards an interrupt that comes during a finalizer.
    """
    from numba_gemm.streaming.supervision import supervised

    under_way = []

    def work(stop):
        under_way.append(1)
        os.kill(os.getpid(), signal.SIGINT)
        while not stop.event.is_set():
            time.sleep(0.001)
        under_way.clear()
        raise host.Stopped

    for _ in range(50):
        with pytest.raises(KeyboardInterrupt):
            supervised(work)
        assert not under_way


@pytest.mark.simulator
@pytest.mark.parametrize("begins", [True, False])
def test_interrupt_before_the_thread_begins(monkeypatch, begins):
    """No work is done if the interrupt comes during the start of the thread, even if the thread begins later."""
    from numba_gemm.streaming.supervision import supervised

    pending, worked = [], []

    def start(function, arguments):
        if not pending:
            pending.append(function)
            raise KeyboardInterrupt
        function(*arguments)  # the stop
        if begins:
            pending[0]()

    monkeypatch.setattr(_thread, "start_new_thread", start)
    with pytest.raises(KeyboardInterrupt):
        supervised(worked.append)
    assert not worked


@pytest.mark.simulator
def test_repeated_interrupts_stop_once_and_raise_the_first(monkeypatch):
    from numba_gemm.streaming import supervision

    interrupts, stops, start = [], [], _thread.start_new_thread

    class Interrupted(supervision.SimpleQueue):
        def get(self, timeout):
            if len(interrupts) < 3:
                interrupts.append(KeyboardInterrupt(len(interrupts)))
                raise interrupts[-1]
            return super().get(timeout=timeout)

    def counted(function, arguments):
        stops.extend(arguments)
        return start(function, arguments)

    def work(stop):
        while not stop.event.is_set() or len(interrupts) < 3:
            time.sleep(0.001)
        raise host.Stopped

    monkeypatch.setattr(supervision, "SimpleQueue", Interrupted)
    monkeypatch.setattr(_thread, "start_new_thread", counted)
    with pytest.raises(KeyboardInterrupt) as caught:
        supervision.supervised(work)
    assert caught.value is interrupts[0]
    assert stops == [interrupts[0]]


@pytest.mark.simulator
def test_a_thread_that_cannot_be_started(monkeypatch):
    def fails(*arguments):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", fails)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        streamed_sgemm(integers(3, 4), integers(4, 5))


@pytest.mark.simulator
def test_another_file_of_the_same_name_is_left_alone(tmp_path):
    out = np.memmap(tmp_path / "c", np.float32, "w+", shape=(512, 1024))
    (tmp_path / "other").write_bytes(b"other")
    os.replace(tmp_path / "other", tmp_path / "c")
    host.reserve_file(out)
    assert (tmp_path / "c").read_bytes() == b"other"


@pytest.mark.simulator
def test_a_failed_product_is_not_kept(tiny, by_numpy, no_collection):
    """The error does not keep the operands alive once it is released."""
    a, b = integers(29, 40), integers(40, 37)
    gone = weakref.ref(b)
    with pytest.raises(ZeroDivisionError):
        streamed_sgemm(a, b, progress=lambda part: 1 / 0)
    del b
    assert gone() is None


@pytest.mark.simulator
def test_gates_that_are_shut_let_nobody_wait():
    gates, stopped = pipeline.Gates(), []

    def wait():
        try:
            gates.get("a")
        except host.Stopped:
            stopped.append(1)

    waiting = [threading.Thread(target=wait) for _ in range(3)]
    for thread in waiting:
        thread.start()
    gates.put("b", 1)
    gates.shut()
    for thread in waiting:
        thread.join(5)
    assert len(stopped) == 3
    with pytest.raises(host.Stopped):
        gates.get("b")
    with pytest.raises(host.Stopped):
        gates.put("c", 1)


@pytest.mark.simulator
def test_rows_too_far_apart_for_one_copy_are_copied_one_by_one(monkeypatch):
    """The driver accepts pitches below 2 GB only."""
    calls = []
    monkeypatch.setattr(queues, "call", lambda function, *arguments: calls.append((function.__name__, *arguments)) or 7)
    queue = queues.CudaQueue(None)
    calls.clear()
    place = queues.Placed(1 << 40, 3, 2, 8)
    array = integers(3, 5)[:, :2]
    queue.to_device(place, array)
    assert [name for name, *_ in calls] == ["cuMemcpy2DAsync"]
    calls.clear()
    monkeypatch.setattr(queues, "MAX_PITCH", 19)
    queue.to_device(place, array)
    begin = array.ctypes.data
    expected = [("cuMemcpyHtoDAsync", (1 << 40) + 8 * row, begin + 20 * row, 8, 7) for row in range(3)]
    assert calls == expected
    calls.clear()
    queue.to_host(array, place)
    assert calls == [
        ("cuMemcpyDtoHAsync", host_place, device_place, 8, 7) for _, device_place, host_place, *_ in expected
    ]


@pytest.mark.simulator
def test_a_kernel_that_fails_ends_it(tiny, monkeypatch):
    def enqueue(self, *arguments):
        raise RuntimeError("launch failed")

    monkeypatch.setattr(products.Products, "enqueue", enqueue)
    a, b = integers(29, 40), integers(40, 37)
    with pytest.raises(RuntimeError, match="launch failed") as caught:
        streamed_sgemm(a, b, memory_limit=least_memory(a, b))
    assert caught.value.done == []
    assert "nothing" in caught.value.__notes__[0]
    assert not threads_of_runs()


@pytest.mark.simulator
@pytest.mark.parametrize("layout", ["by rows", "by columns"])
def test_progress_is_told_of_every_part(tiny, by_numpy, capsys, layout):
    a, b, parts = integers(29, 40), integers(40, 37), []
    limit, out = least_memory(a, b), LAYOUTS[layout](np.full((29, 37), np.nan, np.float32))
    right = []

    def progress(part):
        parts.append(part)
        right.append(np.array_equal(out[part.rows, part.cols], (a @ b)[part.rows, part.cols]))

    streamed_sgemm(a, b, out, memory_limit=limit, progress=progress)
    assert all(right)
    covered = np.zeros((29, 37), int)
    for part in parts:
        covered[part.rows, part.cols] += 1
    assert (covered == 1).all()
    assert [part.number for part in parts] == list(range(1, len(parts) + 1))
    assert parts[-1].count == len(parts)
    assert parts[-1].elements == parts[-1].of == 29 * 37
    streamed_sgemm(a, b, memory_limit=limit, progress=np.True_)
    said = capsys.readouterr().err
    assert "predicted: products" in said
    assert "100% of out" in said


@pytest.mark.simulator
@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        (([[1.0]], integers(1, 1)), {}, TypeError, "a is of type list; expected a NumPy array"),
        ((integers(2, 3, 4), integers(4, 2)), {}, ValueError, "a has 3 dimensions"),
        ((integers(2, 3), integers(4, 2)), {}, ValueError, "3 columns of a against 4 rows"),
        ((integers(2, 3), integers(4, 2)), {}, ValueError, r"expected shapes \(M, K\) and \(K, N\); pass"),
        ((integers(2, 3).astype(float), integers(3, 2)), {}, TypeError, "a has dtype float64"),
        ((integers(2, 3), np.ma.array(integers(3, 2))), {}, TypeError, "b is a NumPy masked array"),
        ((integers(2, 3), integers(3, 2)), {"memory_limit": 1.5}, TypeError, "memory_limit is of type float"),
        ((integers(2, 3), integers(3, 2)), {"memory_limit": True}, TypeError, "memory_limit is of type bool"),
        ((integers(2, 3), integers(3, 2)), {"memory_limit": 0}, ValueError, "above 0"),
        ((integers(2, 3), integers(3, 2)), {"memory_limit": np.int8(3)}, ValueError, "memory_limit is 3 bytes"),
        ((integers(2, 3), integers(3, 2)), {"memory_limit": 100}, ValueError, "memory_limit is 100 bytes; expected"),
        ((integers(2, 3), integers(3, 2)), {"progress": 3}, TypeError, "progress is of type int"),
        ((integers(2, 3), integers(3, 2)), {"beta": 1.0}, ValueError, "out is None"),
        ((integers(2, 3), integers(3, 2)), {"precision": "fp64"}, ValueError, "precision is 'fp64'"),
        ((integers(2, 3), integers(3, 2)), {"device": 7}, ValueError, "device is 7"),
    ],
)
def test_errors(arguments, options, error, words):
    with pytest.raises(error, match=words):
        streamed_sgemm(*arguments, **options)


@pytest.mark.simulator
def test_out_is_checked():
    a, b = integers(3, 3), integers(3, 3)
    out = np.zeros((3, 3), np.float32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        streamed_sgemm(a, b, out)
    with pytest.raises(ValueError, match="shares memory with a"):
        streamed_sgemm(a, b, a)
    with pytest.raises(ValueError, match=r"expected \(3, 3\)"):
        streamed_sgemm(a, b, np.zeros((3, 4), np.float32))


def test_it_is_public():
    assert numba_gemm.streamed_sgemm is streamed_sgemm
    assert "streamed_sgemm" in numba_gemm.__all__


# --------------------------------------------------------------------------------------------------------------- files


@pytest.mark.simulator
def test_memory_maps(tiny, by_numpy, tmp_path):
    a, b = integers(29, 40), integers(40, 37)
    for name, values in (("a", a), ("b", b)):
        values.tofile(tmp_path / name)
    x = np.memmap(tmp_path / "a", np.float32, "r", shape=a.shape)
    y = np.memmap(tmp_path / "b", np.float32, "r", shape=b.shape)
    z = np.memmap(tmp_path / "c", np.float32, "w+", shape=(29, 37))
    streamed_sgemm(x, y, z, memory_limit=least_memory(a, b))
    z.flush()
    np.testing.assert_array_equal(np.fromfile(tmp_path / "c", np.float32).reshape(29, 37), a @ b)
    with pytest.raises(ValueError, match="read-only"):
        streamed_sgemm(x, y, np.memmap(tmp_path / "c", np.float32, "r", shape=(29, 37)))


def space_of(path):
    return os.stat(path).st_blocks * 512


@pytest.mark.simulator
@pytest.mark.skipif(not os.access("/proc/locks", os.R_OK), reason="the system lists no locks")
def test_locks_of_a_file_are_kept(tmp_path):
    """The file is not opened, since closing it would end the locks; another process sees them afterwards."""
    fcntl = pytest.importorskip("fcntl")
    out = np.memmap(tmp_path / "c", np.float32, "w+", shape=(512, 1024))
    locks = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+b'), fcntl.LOCK_EX | fcntl.LOCK_NB)"

    def can_be_locked():
        return subprocess.run([sys.executable, "-c", locks, tmp_path / "c"], stderr=subprocess.DEVNULL).returncode == 0

    with (tmp_path / "c").open("r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        host.reserve_file(out)
        assert not can_be_locked()
        assert space_of(tmp_path / "c") < 100_000
    assert can_be_locked()
    host.reserve_file(out)
    assert space_of(tmp_path / "c") >= out.nbytes


@pytest.mark.simulator
def test_a_file_gets_its_space_first(tmp_path):
    """A mapped file is sparse until its pages are written; then it contains the result."""
    out = np.memmap(tmp_path / "c", np.float32, "w+", shape=(512, 1024))
    assert space_of(tmp_path / "c") < 100_000
    host.reserve_file(np.asarray(out)[100:200])  # not a map by its type any more
    assert 400_000 <= space_of(tmp_path / "c") < 500_000
    host.reserve_file(out[::-1].T)
    assert space_of(tmp_path / "c") >= out.nbytes


@pytest.mark.simulator
@pytest.mark.parametrize(
    "make",
    [
        lambda mapped: np.frombuffer(mapped, np.float32),
        lambda mapped: np.frombuffer(memoryview(mapped)[4096:], np.float32),
        lambda mapped: np.ndarray((512, 1024), np.float32, mapped),
        lambda mapped: np.asarray(memoryview(mapped).cast("f", (512, 1024))),
    ],
)
def test_a_file_mapped_without_numpy_gets_its_space_too(tmp_path, make):
    path = tmp_path / "a name\nin two lines"
    with path.open("w+b") as file:
        file.truncate(512 * 1024 * 4)
        out = make(mmap.mmap(file.fileno(), 0))
    host.reserve_file(out)
    assert space_of(path) >= out.nbytes
    assert [place[0] for place in host.mapped_files(out)] == [path]


@pytest.mark.simulator
@pytest.mark.parametrize(("k", "alpha"), [(0, 1.0), (3, 0.0), (3, 1.0)])
def test_file_gets_its_space_also_for_sums_without_terms(monkeypatch, k, alpha):
    found, out = [], np.empty((4, 5), np.float32)
    monkeypatch.setattr(streaming.streamed, "reserve_file", found.append)
    streamed_sgemm(np.ones((4, k), np.float32), np.ones((k, 5), np.float32), out, alpha=alpha, memory_limit=1 << 22)
    assert (out == alpha * k).all()
    assert len(found) == 1
    assert found[0] is out


@pytest.mark.simulator
def test_other_mappings_are_left_alone(tmp_path):
    """Nothing is reserved for anonymous memory, private mappings, and mappings that are not written."""
    path = tmp_path / "c"
    path.write_bytes(bytes(8192))
    with path.open("r+b") as file:
        private = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        read = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    for mapped in (private, read):
        assert host.mapped_files(np.frombuffer(mapped, np.float32)) == []
    host.reserve_file(np.frombuffer(mmap.mmap(-1, 8192), np.float32))


@pytest.mark.simulator
def test_which_bytes_of_a_file_an_array_is(tmp_path):
    whole = np.memmap(tmp_path / "c", np.float32, "w+", shape=(100, 50))
    part = np.memmap(tmp_path / "c", np.float32, "r+", offset=4000, shape=(90, 50))
    assert host.mapped_files(whole) == [(tmp_path / "c", 0, 20000)]
    assert host.mapped_files(part[1:3, 5:10]) == [(tmp_path / "c", 4000 + 200 + 20, 200 + 20)]
    assert host.mapped_files(part[::-1]) == [(tmp_path / "c", 4000, 18000)]
    later = np.memmap(tmp_path / "d", np.float32, "w+", offset=3 * mmap.ALLOCATIONGRANULARITY + 40, shape=(10, 10))
    assert host.mapped_files(later[2:]) == [(tmp_path / "d", 3 * mmap.ALLOCATIONGRANULARITY + 120, 320)]
    for other in (np.zeros((3, 3)), np.memmap(tmp_path / "c", np.float32, "c", shape=(9,)), whole[:0]):
        assert host.mapped_files(other) == []
    (tmp_path / "c").unlink()
    host.reserve_file(whole)  # there is no file of that name to ask


@pytest.mark.simulator
def test_a_limit_that_is_refused_leaves_the_file_alone(tmp_path):
    out = np.memmap(tmp_path / "c", np.float32, "w+", shape=(512, 1024))
    with pytest.raises(ValueError, match="memory_limit is 10 bytes"):
        streamed_sgemm(np.ones((512, 3), np.float32), np.ones((3, 1024), np.float32), out, memory_limit=10)
    assert space_of(tmp_path / "c") < 100_000


@pytest.mark.simulator
def test_a_disk_that_is_full(monkeypatch, tmp_path):
    def fails(descriptor, begin, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    a, b = integers(3, 4), integers(4, 5)
    kept = a.copy(), b.copy()
    out = np.memmap(tmp_path / "c", np.float32, "w+", shape=(3, 5))
    monkeypatch.setattr(os, "posix_fallocate", fails)
    with pytest.raises(OSError, match="the disk has no room for 60 bytes of out") as caught:
        streamed_sgemm(a, b, out)
    assert caught.value.errno == errno.ENOSPC
    assert not out.any()
    assert all(np.array_equal(x, y) for x, y in zip((a, b), kept))


FULL_DISK = """
import mmap
import numpy as np
from numba_gemm import streamed_sgemm
out = {out}
try:
    streamed_sgemm(np.ones((1024, 8), np.float32), np.ones((8, 1024), np.float32), out)
except OSError as error:
    print("refused", error.errno)
"""
OUT_ON_DISK = {
    "memmap": 'np.memmap("{path}", np.float32, "w+", shape=(1024, 1024))',
    "mmap": """(
    (file := open("{path}", "w+b")).truncate(4 << 20),
    np.frombuffer(mmap.mmap(file.fileno(), 0), np.float32).reshape(1024, 1024),
)[1]""",
}


@pytest.mark.parametrize("out", OUT_ON_DISK)
def test_a_disk_that_really_is_full(tmp_path, out):
    """The file system has 1 MB; writing one page more would end the process."""
    script = FULL_DISK.format(out=OUT_ON_DISK[out].format(path=f"{tmp_path}/c"))
    mounted = f"mount -t tmpfs -o size=1m none {tmp_path} && exec {sys.executable} -c '{script}'"
    environment = compiler_environment()
    if not queues.SIMULATOR:
        environment = dict(os.environ)
    else:
        environment["NUMBA_ENABLE_CUDASIM"] = "1"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mounted], env=environment, capture_output=True, text=True, check=False
    )
    if "refused" not in done.stdout and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip("no file system can be mounted here")
    assert done.stdout.strip() == f"refused {errno.ENOSPC}", done.stderr


# ----------------------------------------------------------------------------------------------------------- on a GPU


def free_bytes():
    from cuda.bindings import driver

    from numba_gemm.runtime.driver import device_scope

    with device_scope(0):
        return int(driver.cuMemGetInfo()[1])


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["ieee", "bf16x6", "fp16x3", "tf32"])
@pytest.mark.parametrize("layout", ["by rows", "by columns"])
@pytest.mark.parametrize("kind", ["ordinary", "page-locked"])
def test_the_bits_of_the_same_products_on_the_device(precision, layout, kind):
    from numba import cuda

    if precision not in runnable(device_properties(0).cc):
        pytest.skip(f"this GPU cannot run {precision}")
    a, b = (rng.standard_normal(shape, np.float32) for shape in ((1000, 900), (900, 1300)))
    a, b = LAYOUTS[layout](a), LAYOUTS[layout](b)
    out = np.full((1000, 1300), np.nan, np.float32)
    if kind == "page-locked":
        locked = []
        for array in (a, b, out):
            by_columns = array.flags.f_contiguous and not array.flags.c_contiguous
            memory = cuda.pinned_array(array.shape[::-1] if by_columns else array.shape, np.float32)
            memory = memory.T if by_columns else memory
            memory[...] = array
            locked.append(memory)
        a, b, out = locked
    limit = 6_000_000
    division = streaming.blocking_of(a, b, memory_limit=limit, precision=precision)
    assert division.count > 1
    assert len(division.depths) > 1
    expected = piece_by_piece(a, b, division, precision)
    for _ in range(5):
        out[...] = np.nan
        streamed_sgemm(a, b, out, memory_limit=limit, precision=precision)
        np.testing.assert_array_equal(out, expected)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("precision", ["ieee", "bf16x6"])
def test_memory_stays_below_the_limit(precision):
    from numba_gemm.lab.bench.streamed import taken, watched

    limit, a, b = 64 << 20, rng.random((4096, 4096), np.float32), rng.random((4096, 4096), np.float32)
    streamed_sgemm(a, b, memory_limit=limit, precision=precision)  # kernels are loaded
    before = taken(0)
    with watched(0, 0.0005) as peak:
        streamed_sgemm(a, b, memory_limit=limit, precision=precision)
    assert 0 < peak[0] <= limit
    assert taken(0) <= before


@pytest.mark.gpu
@pytest.mark.alone
def test_an_interrupted_product_leaves_no_memory_behind():
    a, b = rng.random((4096, 4096), np.float32), rng.random((4096, 4096), np.float32)
    streamed_sgemm(a, b, memory_limit=64 << 20)
    before = free_bytes()
    with pytest.raises(KeyboardInterrupt) as caught:
        streamed_sgemm(a, b, memory_limit=64 << 20, progress=lambda part: part.number == 2 and _thread.interrupt_main())
    assert len(caught.value.done) >= 2
    assert free_bytes() >= before


@pytest.mark.gpu
def test_a_limit_beyond_what_is_free():
    with pytest.raises(MemoryError, match="bytes left"), queues.open_device(0) as device:
        device.allocate(1 << 50)


# ------------------------------------------------------------------------------------------------------- the benchmark


@pytest.mark.gpu
@pytest.mark.alone
def test_the_benchmark(tmp_path):
    import pandas as pd

    from numba_gemm.lab.__main__ import main
    from numba_gemm.lab.bench import streamed

    devices = ",".join(map(str, range(min(device_count(), 2))))
    options = ["--size", "1024", "--precisions", "ieee", "--limits", "0,0.02", "--devices", devices, "--repeats", "1"]
    options += ["--out", str(tmp_path)]
    assert main(["streamed", *options]) == 0
    frame = pd.read_csv(tmp_path / "streamed.csv")
    each = 2 * min(device_count(), 2)  # limits and numbers of devices
    assert list(frame["operands"]) == [streamed.ON_DEVICE, *(kind for kind in streamed.KINDS for _ in range(each))]
    assert (frame["largest_difference"].dropna() < 1e-3).all()
