"""Memory for the parts of operands: no two calls have the same at a time, and a stream's goes to its next call."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from cuda.bindings import driver

from numba_gemm.runtime import workspace


class Device:
    """A device's memory, by what is asked of it."""

    def __init__(self):
        self.allocated, self.freed, self.waited, self.left = [], [], [], 1 << 20

    def allocate(self, size):
        if size > self.left:
            return driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
        self.allocated.append(size)
        return driver.CUresult.CUDA_SUCCESS, 4096 * len(self.allocated)


@pytest.fixture
def device(monkeypatch):
    made = Device()
    calls = {"cuMemFree": made.freed, "cuStreamSynchronize": made.waited}
    monkeypatch.setattr(workspace, "_free", {})
    monkeypatch.setattr(workspace, "_identity", lambda stream: (stream, 7 if stream == 9 else 0))
    monkeypatch.setattr(workspace, "relaxed_capture", nullcontext)
    monkeypatch.setattr(workspace.driver, "cuMemAlloc", made.allocate)
    monkeypatch.setattr(workspace, "call", lambda function, value: calls[function.__name__].append(value))
    return made


def test_two_calls_at_a_time_have_memory_of_their_own(device):
    first, second = workspace.borrow(0, 1, 100), workspace.borrow(0, 1, 100)
    assert first.pointer != second.pointer
    workspace.give_back(first)
    assert workspace.borrow(0, 1, 60) is first
    assert device.allocated == [100, 100]


def test_small_loan_is_kept_when_a_larger_one_is_taken(device):
    small, large = workspace.borrow(0, 1, 100), workspace.borrow(0, 1, 200)
    workspace.give_back(large)
    workspace.give_back(small)
    assert workspace.borrow(0, 1, 200) is large
    assert workspace.borrow(0, 1, 100) is small
    assert (device.allocated, device.freed) == ([100, 200], [])


def test_streams_and_devices_keep_their_own(device):
    workspace.give_back(workspace.borrow(0, 1, 100))
    assert workspace.borrow(0, 2, 100).pointer != workspace.borrow(1, 1, 100).pointer
    assert len(device.allocated) == 3


def test_what_is_too_small_is_freed_when_the_stream_is_done_with_it(device):
    small = workspace.borrow(0, 1, 100)
    workspace.give_back(small)
    large = workspace.borrow(0, 1, 200)
    assert device.waited == [1]
    assert device.freed == [small.pointer]
    assert device.allocated == [100, 200]
    workspace.give_back(large)
    assert workspace.borrow(0, 1, 100) is large


def test_what_a_graph_uses_is_never_freed(device):
    captured = workspace.borrow(0, 9, 100)
    workspace.give_back(captured)
    assert workspace.borrow(0, 9, 100) is captured, "its calls follow each other in the graph"
    workspace.give_back(captured)
    workspace.borrow(0, 9, 200)
    assert device.freed == device.waited == []


def test_memory_that_is_not_there_is_named(device):
    with pytest.raises(MemoryError, match="2,000,000 bytes"):
        workspace.borrow(0, 1, 2_000_000)
