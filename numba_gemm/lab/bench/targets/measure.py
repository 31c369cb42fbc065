"""Measurement of a case: its results are checked, then timed, and become rows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from numba_gemm.lab.bench.contenders import Bound
from numba_gemm.lab.bench.results import OK, WRONG
from numba_gemm.lab.bench.run import Outcome, Plan, time_on_device
from numba_gemm.lab.bench.targets.case import INFORMATION, OURS, Case, Contender, Rig
from numba_gemm.lab.harness.nvml import ClockSamples, sampled_clocks
from numba_gemm.models.roofline import gemm_flops
from numba_gemm.runtime.timing import Call, Samples, host_time_us
from numba_gemm.simulator.switch import SIMULATOR

HOST_ROUNDS, HOST_BATCH = 15, 100


def on_stream(call: Callable[[], Any]) -> Call:
    """Return a call that ignores the stream, which is current already."""
    return lambda _stream: call()


def verified(rig: Rig, contender: Contender) -> Outcome:
    """Make every call on a C filled with NaN and judge the result; then time one more call."""
    outcome = Outcome([Bound(on_stream(turn.call)) for turn in contender.turns], error_in_bounds=0.0)
    try:
        for turn in contender.turns:
            rig.library.fill_nan(turn.out)
            rig.synchronize()
            turn.call()
            rig.synchronize()
            error, note = turn.judge(turn.out)
            outcome.error_in_bounds = max(outcome.error_in_bounds, error)
            if note:
                outcome.status, outcome.note = WRONG, note
                return outcome
        begin = time.perf_counter()
        contender.turns[0].call()
        rig.synchronize()
        outcome.first_s = time.perf_counter() - begin
    except Exception as error:
        outcome.fail(error)
    return outcome


def measure(rig: Rig, case: Case) -> list[dict[str, Any]]:
    """Return the rows of a case, one per baseline, including failures."""
    clocks = ClockSamples()
    contenders: Mapping[str, Contender] = {}
    try:
        contenders = case.make(rig)
        new_shapes = timed_once(rig, contenders[OURS]) if case.each_once else None
        outcomes = {name: verified(rig, contender) for name, contender in contenders.items()}
        right = {name: outcome for name, outcome in outcomes.items() if outcome.timeable}
        if OURS in right and len(right) > 1:
            # A thread that samples clocks would slow down the host.
            with sampled_clocks(None if case.on_host else rig.nvml) as clocks:
                if case.on_host:
                    time_on_host(rig, contenders, right)
                else:
                    rounds = 1 if SIMULATOR else case.rounds
                    plan = Plan((), (), rig.library, rig.seed, SIMULATOR, rounds=rounds)
                    sets = max(len(outcome.bound) for outcome in right.values())
                    time_on_device(right, plan, sets, rig.stream)
            if new_shapes is not None:
                outcomes[OURS].samples = new_shapes
    except Exception as error:
        failed = Outcome()
        failed.fail(error)
        outcomes = dict.fromkeys((OURS, *case.baselines), failed)
    return [row(case, contenders, outcomes, baseline, clocks) for baseline in case.baselines]


def timed_once(rig: Rig, contender: Contender) -> Samples:
    """Measure the host time of each call; the first half of them is the warm-up, which loads kernels."""
    spent = []
    for turn in contender.turns:
        rig.synchronize()
        begin = time.perf_counter()
        turn.call()
        spent.append((time.perf_counter() - begin) * 1e6)
    return Samples(np.array(spent[len(spent) // 2 :]))


def time_on_host(rig: Rig, contenders: Mapping[str, Contender], outcomes: Mapping[str, Outcome]) -> None:
    """Measure the host time of calls, in alternating batches; the first round is the warm-up."""
    batch, rounds = (1, 1) if SIMULATOR else (HOST_BATCH, HOST_ROUNDS)
    spent: dict[str, list[float]] = {name: [] for name in outcomes}
    for _ in range(rounds + 1):
        for name, us in spent.items():
            call = contenders[name].turns[0].call
            us.append(host_time_us(call, synchronize=rig.synchronize, batch=batch, rounds=1))
    for name, outcome in outcomes.items():
        outcome.samples = Samples(np.array(spent[name][1:]))


def row(
    case: Case,
    contenders: Mapping[str, Contender],
    outcomes: Mapping[str, Outcome],
    baseline: str,
    clocks: ClockSamples,
) -> dict[str, Any]:
    """Return the row of one baseline; its ratio requires that both results are correct."""
    own, other = outcomes[OURS], outcomes[baseline]
    us, other_us = (outcome.samples.median if outcome.samples else math.nan for outcome in (own, other))
    ratio = math.nan
    if own.samples and other.samples:
        ratio = contenders[OURS].work / us / (contenders[baseline].work / other_us)
    tflops = math.nan if case.on_host else case.batch * gemm_flops(*case.shape) / us * 1e-6
    notes = [own.note, f"{baseline}: {other.note}" if other.note and other is not own else ""]
    return {
        "group": case.group,
        "case": case.name,
        **case.shape._asdict(),
        "layout": case.layout,
        "batch": case.batch,
        "us": us,
        "tflops": tflops,
        "baseline": baseline,
        "baseline_us": other_us,
        "ratio": ratio,
        "target": case.target if baseline == case.baselines[0] else INFORMATION,
        "status": own.status if own.status != OK else other.status,
        "error_in_bounds": own.error_in_bounds,
        "rounds": len(own.samples.us) if own.samples else 0,
        "sm_clock_mhz": clocks.median_mhz,
        "throttle": clocks.throttle,
        "note": "; ".join(filter(None, notes)),
    }
