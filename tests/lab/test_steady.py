"""Contenders alone at their steady state: when a run has settled, and what is reported of it."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace

import pytest
from support.background import run_by_hand

from numba_gemm.lab.bench import run, steady
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.bench.contenders import Contender
from numba_gemm.lab.harness.nvml import ClockSamples, Nvml, median_watts, sampled_clocks
from numba_gemm.runtime import timing

SHAPE = Shape(100, 100, 100)


@pytest.fixture
def machine(monkeypatch):
    """A device whose calls take `us` microseconds, given by the seconds since the start; plain calls 5 us longer."""
    found = SimpleNamespace(seconds=0.0, us=lambda seconds: 100.0, calls=0, closed=False)
    found.background = run_by_hand(monkeypatch)

    def time_alone(enqueue, *, stream, round_up_to, graphs):
        try:
            while True:
                us = found.us(found.seconds)
                found.seconds += 0.01
                found.background()
                yield us, graphs
        finally:
            found.closed = True

    def enqueue(_stream):
        found.calls += 1
        found.seconds += (found.us(found.seconds) + 5) * 1e-6

    found.enqueue = enqueue
    found.nvml = Nvml("1", 1980, lambda: 1500, lambda: 4, lambda: int(found.seconds * 650_000))
    monkeypatch.setattr(steady, "time_alone", time_alone)
    monkeypatch.setattr(timing, "synchronize", lambda stream: None)
    monkeypatch.setattr(steady.time, "perf_counter", lambda: found.seconds)
    return found


def test_constant_speed_settles_after_two_windows(machine):
    found = steady.measure(machine.enqueue, 1, SHAPE, machine.nvml)
    assert (found["steady_us"], found["steady_throttle"]) == (100.0, "power cap")
    assert found["steady_gflops"] == pytest.approx(2e6 / 100e-6 * 1e-9)
    assert found["steady_watts"] == pytest.approx(650, rel=1e-2)
    assert found["call_us"] == pytest.approx(105)
    assert found["steady_clock_mhz"] == 1500
    assert machine.closed
    assert machine.seconds == pytest.approx(2 * steady.WINDOW_S + steady.CALLS_S, rel=0.1)


def test_the_last_window_counts(machine):
    """The clock drops after 0.7 s."""
    machine.us = lambda seconds: 100.0 if seconds < 0.7 else 120.0
    found = steady.measure(machine.enqueue, 1, SHAPE, None)
    assert (found["steady_us"], found["steady_throttle"]) == (120.0, "")
    assert math.isnan(found["steady_watts"])
    assert math.isnan(found["steady_clock_mhz"])


def test_speed_that_never_settles_is_reported_as_such(machine):
    machine.us = lambda seconds: 100.0 * 1.1**seconds
    found = steady.measure(machine.enqueue, 1, SHAPE, machine.nvml)
    assert found["steady_throttle"] == "power cap; not settled"
    assert machine.seconds >= steady.MOST_WINDOWS * steady.WINDOW_S


def test_a_long_call_is_timed_at_least_once(machine):
    machine.us = lambda seconds: 3e6
    steady.measure(machine.enqueue, 1, SHAPE, None)
    assert machine.calls == 3, "one to warm up, and two"


STEP_S = 0.1  # between advances of a GPU's energy counter


@pytest.mark.parametrize("length", [0.24, 0.5, 1.04])
@pytest.mark.parametrize("begin", [0.0, 0.03, 0.05, 0.08])
def test_power_does_not_depend_on_the_steps_of_the_counter(machine, begin, length):
    """The mean power is that of whole steps, for windows that begin and end within steps."""
    machine.seconds = begin

    def spans():
        while True:
            machine.seconds += 0.001
            machine.background()
            yield 100.0, True

    counter = Nvml("1", 1980, lambda: 1500, lambda: 4, lambda: int(machine.seconds / STEP_S) * 68_000)
    _, clocks = steady.window(spans(), length, counter)
    assert clocks.watts == pytest.approx(680, rel=0.02)


@pytest.mark.parametrize("energies", [[5, 5, 5, 5], [5, 5, 6, 6]], ids=["none", "one"])
def test_power_is_unknown_with_fewer_than_two_changes_of_the_counter(machine, energies):
    counter = Nvml("1", 1980, lambda: 1500, lambda: 4, iter(energies).__next__)
    with sampled_clocks(counter, power=True) as clocks:
        for _ in energies:
            machine.background()
    assert math.isnan(clocks.watts)


def test_windows_of_unknown_power_do_not_count():
    unknown, *known = (
        ClockSamples(energy=[(0.0, 0), (1.0, 0), (2.0, watts * 1000)][:length])
        for watts, length in ((0, 2), (690, 3), (680, 3), (670, 3))
    )
    assert median_watts([known[0], unknown, *known[1:]]) == 680
    assert math.isnan(median_watts([unknown]))


def test_the_counter_is_read_in_the_background_if_power_is_asked_for():
    """A counter that advances with each read is read until its tenth value."""
    reads, enough = iter(range(1, 1000)), threading.Event()

    def energy():
        found = next(reads)
        if found == 10:
            enough.set()
        return found * 1000

    counter = Nvml("1", 1980, lambda: 1500, lambda: 4, energy)
    with sampled_clocks(counter) as clocks:
        pass
    assert not clocks.energy
    with sampled_clocks(counter, power=True) as clocks:
        assert enough.wait(60)
    assert clocks.watts > 0


def test_what_is_measured_alone():
    stages = ("naive", "auto", "cublas", "cpu")
    for asked, wanted in ((run.PUBLIC, stages[1:]), (run.ALL, stages), (run.NONE, ())):
        plan = SimpleNamespace(steady=asked)
        candidates = [run.Candidate(contender=Contender(stage, bind=None)) for stage in stages]
        assert tuple(one.contender.stage for one in candidates if run.runs_steadily(plan, one)) == wanted


def test_ratios_are_to_cublas_alone():
    ours, cublas = ({"steady_us": us, "call_us": call} for us, call in ((50.0, 60.0), (100.0, 90.0)))
    assert steady.ratios(ours, cublas) == {"steady_ratio_to_cublas": 2.0, "call_ratio_to_cublas": 1.5}
    assert all(map(math.isnan, steady.ratios(ours, {}).values()))
    assert steady.ratios({}, cublas) == {}
