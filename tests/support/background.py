"""Background work of the harness, run by a test instead of by threads."""

from __future__ import annotations

import contextlib

from numba_gemm.lab.harness import nvml


def run_by_hand(monkeypatch):
    """Replace the background threads of `sampled_clocks`; return a function that runs their work once."""
    active = []

    @contextlib.contextmanager
    def repeating(work, _interval_s):
        work()
        active.append(work)
        try:
            yield
        finally:
            active.remove(work)

    def run():
        for work in active:
            work()

    monkeypatch.setattr(nvml, "repeating", repeating)
    return run
