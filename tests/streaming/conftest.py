"""Fixtures of streamed products."""

from __future__ import annotations

import gc
import os
import queue
import signal

import pytest
from support.streaming_cases import multiplied, tiny_blocks

from numba_gemm.streaming import products


@pytest.fixture
def tiny():
    with tiny_blocks():
        yield


@pytest.fixture
def by_numpy(monkeypatch):
    def enqueue(self, alpha, a, b, beta, c, stream, workspace):
        multiplied(a.owner, b.owner, beta, c.owner, alpha)

    monkeypatch.setattr(products.Products, "enqueue", enqueue)


@pytest.fixture
def no_collection():
    """Collect no garbage during the test."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def interrupt(no_collection):
    """Return a function for other threads: interrupt the main thread, and wait until it has noticed.

    No garbage is collected meanwhile: Python discards an interrupt that comes during a finalizer.
    """
    noticed = queue.SimpleQueue()

    def handle(*_):
        noticed.put(None)
        raise KeyboardInterrupt

    def send():
        os.kill(os.getpid(), signal.SIGINT)
        noticed.get(timeout=60)

    before = signal.signal(signal.SIGINT, handle)
    yield send
    signal.signal(signal.SIGINT, before)
