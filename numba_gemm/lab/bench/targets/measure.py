"""Measurement of a case: its results are checked, then timed, and become rows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from numba_gemm.lab.bench.results import OK, WRONG
from numba_gemm.lab.bench.run import MIN_SPAN_US, NOT_CAPTURED, affordable_rounds
from numba_gemm.lab.bench.targets.case import INFORMATION, OURS, Case, Contender, Outcome
from numba_gemm.lab.bench.targets.rig import Rig
from numba_gemm.lab.harness.nvml import ClockSamples, sampled_clocks
from numba_gemm.models.roofline import gemm_flops
from numba_gemm.runtime.timing import Samples, host_time_us, time_interleaved
from numba_gemm.simulator.switch import SIMULATOR

HOST_ROUNDS, HOST_BATCH = 15, 100

COLUMNS = (
    *("group", "case", "m", "n", "k", "layout", "batch", "us", "tflops", "baseline", "baseline_us", "ratio", "target"),
    *("status", "error_in_bounds", "rounds", "sm_clock_mhz", "throttle", "note"),
)


def verified(rig: Rig, contender: Contender) -> Outcome:
    """Make every call on a C filled with NaN and judge the result; then time one more call."""
    outcome = Outcome(error_in_bounds=0.0)
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
        if not SIMULATOR:
            start = time.perf_counter()
            contender.turns[0].call()
            rig.synchronize()
            outcome.call_s = time.perf_counter() - start
    except Exception as error:
        return Outcome.failed(error)
    return outcome


def measure(rig: Rig, case: Case) -> list[dict[str, Any]]:
    """Return the rows of a case, one per baseline, including failures."""
    clocks = ClockSamples()
    contenders: Mapping[str, Contender] = {}
    try:
        contenders = case.make(rig)
        first_times = timed_once(rig, contenders[OURS]) if case.each_once else None
        outcomes = {name: verified(rig, contender) for name, contender in contenders.items()}
        right = [name for name, outcome in outcomes.items() if outcome.status == OK]
        if OURS in right and len(right) > 1:
            # A thread that samples clocks would slow down the host.
            with sampled_clocks(None if case.on_host else rig.nvml) as clocks:
                timed = timed_together(rig, case, {name: contenders[name] for name in right}, outcomes)
            if first_times is not None:
                timed[OURS] = first_times
            for name, samples in timed.items():
                outcomes[name].us, outcomes[name].rounds = samples.median, len(samples.us)
                if not (samples.captured or case.on_host or SIMULATOR):
                    outcomes[name].note = NOT_CAPTURED
    except Exception as error:
        outcomes = dict.fromkeys((OURS, *case.baselines), Outcome.failed(error))
    return [row(case, contenders, outcomes, baseline, clocks) for baseline in case.baselines]


def timed_together(
    rig: Rig, case: Case, contenders: Mapping[str, Contender], outcomes: Mapping[str, Outcome]
) -> dict[str, Samples]:
    """Time the contenders with correct results together; return their samples."""
    if case.on_host:
        return timed_on_host(rig, {name: contender.turns[0].call for name, contender in contenders.items()})
    rounds = 1 if SIMULATOR else case.rounds or affordable_rounds([outcomes[name].call_s for name in contenders])
    return time_interleaved(
        {name: contender.rotating() for name, contender in contenders.items()},
        stream=rig.stream,
        rounds=rounds,
        min_span_us=MIN_SPAN_US,
        round_up_to=max(len(contender.turns) for contender in contenders.values()),
        seed=rig.seed,
    )


def timed_once(rig: Rig, contender: Contender) -> Samples:
    """Measure the host time of each call; the first half of them is the warm-up, which loads kernels."""
    spent = []
    for turn in contender.turns:
        rig.synchronize()
        begin = time.perf_counter()
        turn.call()
        spent.append((time.perf_counter() - begin) * 1e6)
    return Samples(np.array(spent[len(spent) // 2 :]))


def timed_on_host(rig: Rig, calls: Mapping[str, Callable[[], Any]]) -> dict[str, Samples]:
    """Measure the host time of calls, in alternating batches."""
    batch, rounds = (1, 1) if SIMULATOR else (HOST_BATCH, HOST_ROUNDS)
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            spent[name].append(host_time_us(call, synchronize=rig.synchronize, batch=batch, rounds=1))
    return {name: Samples(np.array(us[1:])) for name, us in spent.items()}  # without the first round, the warm-up


def row(
    case: Case,
    contenders: Mapping[str, Contender],
    outcomes: Mapping[str, Outcome],
    baseline: str,
    clocks: ClockSamples,
) -> dict[str, Any]:
    """Return the row of one baseline; its ratio requires that both results are correct."""
    own, other = outcomes[OURS], outcomes[baseline]
    ratio = math.nan
    if not math.isnan(own.us + other.us):
        ratio = contenders[OURS].work / own.us / (contenders[baseline].work / other.us)
    m, n, k = case.shape
    tflops = math.nan if case.on_host else case.batch * gemm_flops(m, n, k) / own.us * 1e-6
    target = case.target if baseline == case.baselines[0] else INFORMATION
    status = own.status if own.status != OK else other.status
    notes = [own.note, f"{baseline}: {other.note}" if other.note and other is not own else ""]
    values = (
        *(case.group, case.name, m, n, k, case.layout, case.batch, own.us, tflops, baseline, other.us, ratio, target),
        *(status, own.error_in_bounds, own.rounds, clocks.median_mhz, clocks.throttle, "; ".join(filter(None, notes))),
    )
    return dict(zip(COLUMNS, values, strict=True))
