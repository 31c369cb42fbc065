"""Device memory for launches: a workspace per stream and capture, and memory leased to one call at a time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from cuda.bindings import driver

from numba_gemm.runtime import device as devices
from numba_gemm.runtime import workspace
from numba_gemm.runtime.workspace import Workspace, Workspaces

# ----------------------------------------------------------------------------------------------------------- workspaces


def test_workspaces_grow_and_captures_have_their_own(gpu):
    reserve = Workspaces().reserve
    first = reserve(40, 1000, 4)
    assert reserve(40, 900, 3) == first
    gpu.capturing = {40: 7}
    captured = reserve(40, 1000, 4)
    assert captured != first
    gpu.capturing = {40: 8, 50: 8}
    others = {reserve(40, 1000, 4), reserve(50, 1000, 4)}
    assert len(others | {first, captured}) == 4, "branches of a graph run beside each other"
    gpu.capturing = {}
    assert reserve(40, 1000, 4) == first
    grown = reserve(40, 1001, 4)
    assert grown != first
    assert reserve(40, 2000, 4) == grown, "grew by less than double"
    assert reserve(40, 10, 5) != grown
    assert reserve(40, 2000, 8) == reserve(40, 10, 5)
    assert reserve(40, 9000, 1) == reserve(40, 10, 8), "counters were lost"


def test_memory_of_a_graph_is_freed_once_it_is_gone(gpu):
    workspaces = Workspaces()
    gpu.capturing = {40: 7, 50: 8}
    small = workspaces.reserve(40, 1000, 4)[0]
    large = workspaces.reserve(40, 5000, 4)[0]
    lease = workspaces.lease(40, 100)
    workspaces.release(lease)
    other = workspaces.lease(50, 100)
    gpu.destroy_graph(7)
    assert not gpu.freed
    gpu.capturing = {40: 9}
    workspaces.reserve(40, 1000, 4)
    assert gpu.freed == [small, large, lease.pointer]
    gpu.destroy_graph(8)  # during a call
    workspaces.lease(40, 100)
    assert gpu.freed[3:] == [other.pointer]
    workspaces.release(other)
    gpu.destroy_graph(9)
    gpu.capturing = {40: 10}
    workspaces.lease(40, 1 << 20)
    assert len(gpu.freed) == 6


def test_devices_have_their_own_workspaces(gpu):
    first, second = (devices.get_device(ordinal).workspaces for ordinal in (0, 1))
    assert first.reserve(0, 10, 5) == first.reserve(0, 10, 5) != second.reserve(0, 10, 5)


def test_thread_default_streams_of_one_capture_have_their_own_workspaces(gpu):
    """Handle 2 is another stream in every thread; an event may bring both into one capture."""
    gpu.capturing, reserve = {2: 7}, Workspaces().reserve
    first = reserve(2, 1000, 4)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(reserve, 2, 1000, 4).result() != first
    assert reserve(2, 1000, 4) == first


def test_concurrent_threads_get_one_workspace_of_a_stream(gpu):
    workspaces = Workspaces()
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: workspaces.reserve(40, 1000, 4), range(20)))
    assert len(found) == len(gpu.allocations) == 1


@pytest.mark.parametrize(("size", "counters", "holds"), [(10, 2, True), (11, 2, False), (10, 3, False), (0, 0, True)])
def test_workspace_holds_size_and_counters(size, counters, holds):
    assert Workspace(4096, 10, 2).holds(size, counters) == holds
    assert Workspace(4096, 10, 2).words == (4096, 4096 + 256)


# ---------------------------------------------------------------------------------------------------------------- lease


class Memory:
    """A device's memory, by the calls of the driver."""

    def __init__(self):
        self.allocated, self.freed, self.waited, self.left = [], [], [], 1 << 20

    def allocate(self, size):
        if size > self.left:
            return driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
        self.allocated.append(size)
        return driver.CUresult.CUDA_SUCCESS, 4096 * len(self.allocated)


@pytest.fixture
def memory(monkeypatch):
    made = Memory()
    calls = {"cuMemFree": made.freed, "cuStreamSynchronize": made.waited}
    monkeypatch.setattr(workspace, "identity", lambda stream: (stream, 7 if stream == 9 else 0))
    monkeypatch.setattr(workspace, "relaxed_capture", nullcontext)
    monkeypatch.setattr(workspace, "GraphEnd", lambda stream: SimpleNamespace(has_come=lambda: False))
    monkeypatch.setattr(workspace.driver, "cuMemAlloc", made.allocate)
    monkeypatch.setattr(workspace, "call", lambda function, value: calls[function.__name__].append(value))
    return made


def test_two_calls_at_a_time_have_memory_of_their_own(memory):
    workspaces = Workspaces()
    first, second = workspaces.lease(1, 100), workspaces.lease(1, 100)
    assert first.pointer != second.pointer
    workspaces.release(first)
    assert workspaces.lease(1, 60) is first
    assert memory.allocated == [100, 100]


def test_small_lease_is_kept_when_a_larger_one_is_taken(memory):
    workspaces = Workspaces()
    small, large = workspaces.lease(1, 100), workspaces.lease(1, 200)
    workspaces.release(large)
    workspaces.release(small)
    assert workspaces.lease(1, 200) is large
    assert workspaces.lease(1, 100) is small
    assert (memory.allocated, memory.freed) == ([100, 200], [])


def test_streams_and_devices_keep_their_own(memory):
    workspaces, others = Workspaces(), Workspaces()
    workspaces.release(workspaces.lease(1, 100))
    assert workspaces.lease(2, 100).pointer != others.lease(1, 100).pointer
    assert len(memory.allocated) == 3


def test_lease_that_is_too_small_is_freed_when_the_stream_is_done_with_it(memory):
    workspaces = Workspaces()
    small = workspaces.lease(1, 100)
    workspaces.release(small)
    large = workspaces.lease(1, 200)
    assert memory.waited == [1]
    assert memory.freed == [small.pointer]
    assert memory.allocated == [100, 200]
    workspaces.release(large)
    assert workspaces.lease(1, 100) is large


def test_a_finaliser_may_need_memory_while_that_of_a_capture_is_noted(memory, monkeypatch):
    workspaces, found = Workspaces(), []

    def end(stream):  # while the lock is held; a finaliser that launches a product may run anywhere
        monkeypatch.setattr(workspace, "GraphEnd", lambda stream: SimpleNamespace(has_come=lambda: True))
        found.append(workspaces.lease(9, 100))
        return SimpleNamespace(has_come=lambda: False)

    monkeypatch.setattr(workspace, "GraphEnd", end)
    thread = threading.Thread(target=lambda: found.append(workspaces.lease(9, 100)), daemon=True)
    thread.start()
    thread.join(10)
    inner, outer = found
    assert inner.pointer != outer.pointer
    workspaces.lease(9, 100)
    assert memory.freed == [inner.pointer, outer.pointer]


def test_memory_that_a_graph_uses_is_not_freed(memory):
    workspaces = Workspaces()
    captured = workspaces.lease(9, 100)
    workspaces.release(captured)
    assert workspaces.lease(9, 100) is captured, "its calls follow each other in the graph"
    workspaces.release(captured)
    workspaces.lease(9, 200)
    assert memory.freed == memory.waited == []


def test_memory_error_names_the_size(memory):
    with pytest.raises(MemoryError, match="2,000,000 bytes"):
        Workspaces().lease(1, 2_000_000)


@pytest.mark.parametrize("left", [1 << 20, 1000])
def test_sizes_that_grow_from_call_to_call_rarely_wait(memory, left):
    """With little memory left, only what a call needs is allocated."""
    workspaces, memory.left = Workspaces(), left
    for size in range(100, 1000):
        lease = workspaces.lease(1, size)
        assert lease.size >= size
        workspaces.release(lease)
    assert memory.allocated[-1] <= 1500
    assert len(memory.waited) <= (7 if left > 1000 else 7 + 1000 // 3)
