"""Measurement, one shape at a time: verify every contender, then time the correct ones together."""

import functools
import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from numba_gemm.gemm.precision import IEEE, runnable
from numba_gemm.lab.bench import results
from numba_gemm.lab.bench import steady as steady_state
from numba_gemm.lab.bench.buffers import NORMAL, DeviceBuffers, HostLibrary, Reference, call_on_nan, operand_bytes
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.bench.contenders import Bound, Contender, in_turns, rotating
from numba_gemm.lab.harness import environment
from numba_gemm.lab.harness.nvml import ClockSamples, Nvml, sampled_clocks
from numba_gemm.models.roofline import gemm_flops
from numba_gemm.runtime.device import synchronize
from numba_gemm.runtime.timing import Samples, elapsed, host_time_us, no_wait, time_interleaved

MIN_SPAN_US = 2000.0
FEWEST_ROUNDS, MOST_ROUNDS = 5, 25
ROUNDS_BUDGET_S = 2.0  # limit for the rounds of one shape, before their number drops to the minimum
HOST_BATCH_S = 0.02  # limit for a batch of calls whose host time is measured, within the numbers of calls below
FEWEST_CALLS, MOST_CALLS = 10, 100  # with fewer, the time after a synchronisation dominates
LONGEST_BATCH_S = 0.5

# Contenders that are measured at their steady state: the public function and cuBLAS, all, or none.
PUBLIC, ALL, NONE = ("public", "all", "none")

NOT_CAPTURED = "timed by plain launches, as it cannot be captured into a graph"


@dataclass(frozen=True)
class Plan:
    """Measurements to make, and their settings."""

    shapes: Sequence[Shape]
    contenders: Sequence[Contender]
    library: HostLibrary
    seed: int
    simulated: bool
    cold: bool = False
    rounds: int | None = None  # interleaved rounds per shape; None for five to twenty-five, by their duration
    distribution: str = NORMAL  # a key of `buffers.DISTRIBUTIONS`
    steady: str = PUBLIC
    cc: tuple[int, int] = (0, 0)
    peak: float = math.nan  # FP32 FLOP/s of the GPU
    l2_bytes: int = 0  # size of its L2 cache, which the buffers of `cold` must exceed
    nvml: Nvml | None = None

    @property
    def graphs(self) -> bool:
        """True if calls are replayed as graphs; False, for all alike, if the only cuBLAS cannot be captured."""
        baselines = [contender.capturable for contender in self.contenders if contender.stage == results.CUBLAS]
        return any(baselines) or not baselines

    @property
    def timing(self) -> str | None:
        """Kind of device timing, one of `environment.TIMINGS`; None in the simulator."""
        return None if self.simulated else environment.GRAPHS if self.graphs else environment.LAUNCHES

    def sets(self, shape: Shape) -> int:
        """Number of sets of buffers: one, or as many as exceed twice the L2 cache."""
        return 1 + math.ceil(2 * self.l2_bytes / operand_bytes(shape)) if self.cold else 1


@dataclass
class Outcome:
    """Verdict on some calls, and their times."""

    bound: list[Bound] = field(default_factory=list)
    status: str = results.OK
    note: str = ""
    error_in_bounds: float = math.nan
    first_s: float = math.inf
    work: float = math.nan  # of a call, in units that all outcomes share
    samples: Samples | None = None

    @property
    def timeable(self) -> bool:
        return self.status == results.OK

    def fail(self, error: Exception) -> None:
        self.status = results.ERROR
        self.note = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


@dataclass(kw_only=True)
class Candidate(Outcome):
    """A contender at one shape, and its outcome."""

    contender: Contender
    error_median: float = math.nan
    error_max: float = math.nan
    host_us: float = math.nan
    steady: dict[str, Any] = field(default_factory=dict)  # columns of it alone


def run(plan: Plan) -> Iterator[pd.DataFrame]:
    """Measure every shape; yield the rows of each as soon as they are complete."""
    with plan.library.stream() as stream:
        for shape in plan.shapes:
            yield results.frame_of(measure(plan, shape, stream))
            plan.library.release()


def measure(plan: Plan, shape: Shape, stream: int) -> list[dict[str, Any]]:
    """Verify and time every contender of one shape; mark those that run out of memory."""
    candidates = [candidate_of(plan, contender) for contender in plan.contenders if contender.takes(shape)]
    clocks = ClockSamples()
    try:
        clocks = verify_and_time(candidates, plan, shape, stream)
    except Exception as error:
        if not out_of_memory(error):
            raise
        for candidate in candidates:
            if candidate.timeable and candidate.samples is None:
                candidate.fail(error)
    if any(candidate.status == results.ERROR for candidate in candidates):
        gc.collect()  # the exception may keep operands alive in a cycle, and the next shape needs their memory
    kept = best_of_cublas(candidates)
    note_others(kept, candidates)
    return rows(plan, shape, kept, clocks)


def verify_and_time(candidates: Sequence[Candidate], plan: Plan, shape: Shape, stream: int) -> ClockSamples:
    """Create operands, verify and time the candidates on them, and return the clocks sampled meanwhile."""
    sets = [
        DeviceBuffers.random(plan.library, shape, plan.seed, index, plan.distribution)
        for index in range(plan.sets(shape))
    ]
    reference = Reference(plan.library, sets[0].a, sets[0].b)
    for candidate in candidates:
        if candidate.timeable:
            verify(candidate, sets, reference, plan, stream)
    del reference  # gigabytes at the largest shapes; only the operands are needed for timing
    plan.library.release()
    right = [candidate for candidate in candidates if candidate.timeable]
    with sampled_clocks(plan.nvml) as clocks:
        time_on_device({c.contender.label: c for c in right if not on_host(plan, c)}, plan, len(sets), stream)
    time_on_host([c for c in right if on_host(plan, c)], plan, stream)
    for candidate in best_of_cublas(candidates):
        if candidate.samples is not None and not on_host(plan, candidate):
            with candidate.bound[0].setting():
                candidate.host_us = host_time(candidate, stream)
                if runs_steadily(plan, candidate):
                    call = rotating(candidate.bound)
                    candidate.steady = steady_state.measure(
                        call, stream, shape, plan.nvml, sets=len(sets), graphs=plan.graphs
                    )
    return clocks


def runs_steadily(plan: Plan, candidate: Candidate) -> bool:
    """Return True if a candidate is also measured alone at its steady state."""
    public = (*results.NOT_STAGES, results.GIVEN_BF16)
    return plan.steady == ALL or (plan.steady == PUBLIC and candidate.contender.stage in public)


def candidate_of(plan: Plan, contender: Contender) -> Candidate:
    """Create a candidate, marked as unsupported if the GPU cannot run it."""
    note = ""
    # The simulator runs any stage of the ladder, and two of the tensor core stages.
    runs_all = plan.simulated and contender.precision in runnable(plan.cc, contender.stage)
    if contender.stage == results.AUTO and contender.precision not in runnable(plan.cc):
        note = f"{contender.precision} needs compute capability 8.0"
    elif not runs_all and (contender.min_cc > plan.cc or contender.only_cc not in (None, plan.cc)):
        note = f"needs compute capability {'.'.join(map(str, contender.min_cc))}"
    return Candidate(contender=contender, status=results.UNSUPPORTED if note else results.OK, note=note)


def out_of_memory(error: Exception) -> bool:
    """True if an error of any library reports that memory ran out."""
    said = str(error).lower().replace("_", " ")
    return isinstance(error, MemoryError) or "out of memory" in said or "cublas status alloc failed" in said


def on_host(plan: Plan, candidate: Candidate) -> bool:
    """True if a call returns only after its result is complete, so that the host's clock can time it."""
    return plan.simulated or candidate.contender.on_host


def verify(candidate: Candidate, sets: Sequence[DeviceBuffers], reference: Reference, plan: Plan, stream: int) -> None:
    """Run a contender once on NaN-filled output and record whether the result is correct."""
    c = sets[0].c
    try:
        candidate.bound = [candidate.contender.bind(buffers) for buffers in sets]
        first = candidate.bound[0]
        with first.setting():
            candidate.first_s = call_on_nan(plan.library, c, first.call, stream)
        first.deliver()
        verdict, candidate.error_median, candidate.error_max = reference.judge(c, candidate.contender.precision)
    except Exception as error:  # a contender may raise anything; the others continue
        candidate.fail(error)
        return
    candidate.error_in_bounds = verdict.in_bounds
    if not verdict.ok:
        candidate.status, candidate.note = results.WRONG, str(verdict)


def time_on_device(outcomes: Mapping[str, Outcome], plan: Plan, sets: int, stream: int) -> None:
    """Time calls together, so that clock drift affects all of them equally.

    If the joint run raises, each is tried alone to find the cause, and the others run again.
    """
    if not outcomes:
        return
    calls = {name: in_turns(outcome.bound) for name, outcome in outcomes.items()}
    rounds = plan.rounds or affordable_rounds([outcome.first_s for outcome in outcomes.values()])
    how: dict[str, Any] = {"min_span_us": MIN_SPAN_US, "round_up_to": sets, "graphs": plan.graphs, "seed": plan.seed}
    try:
        timed = time_interleaved(calls, stream=stream, rounds=rounds, **how)
    except Exception as joint:
        for name, outcome in outcomes.items():
            try:
                time_interleaved({name: calls[name]}, stream=stream, rounds=1, **how)
            except Exception as error:
                outcome.fail(error)
        survivors = {name: outcome for name, outcome in outcomes.items() if outcome.timeable}
        if len(survivors) == len(outcomes):
            if out_of_memory(joint):
                raise
            raise RuntimeError("contenders can be timed alone but not together") from joint
        time_on_device(survivors, plan, sets, stream)
        return
    for name, outcome in outcomes.items():
        outcome.samples = timed[name]
        if plan.timing == environment.GRAPHS and not timed[name].captured:
            outcome.note = NOT_CAPTURED


def affordable_rounds(seconds: Sequence[float]) -> int:
    """Number of rounds within the budget and the limits, from the time of one call of each contender."""
    # Short spans run twice, first untimed.
    a_round = sum(max(2 * MIN_SPAN_US * 1e-6, call) for call in seconds)
    return max(FEWEST_ROUNDS, min(MOST_ROUNDS, int(ROUNDS_BUDGET_S / a_round)))


def time_on_host(candidates: Sequence[Candidate], plan: Plan, stream: int) -> None:
    """Time calls that wait for their own result: the triple loop, and everything in the simulator.

    Times of the simulator mean nothing, so unless rounds are requested, that of the verified call is reported.
    """
    spent: dict[str, list[float]] = {c.contender.label: [] for c in candidates}
    for _ in range(plan.rounds or (0 if plan.simulated else FEWEST_ROUNDS)):
        for candidate in candidates:
            call = functools.partial(candidate.bound[0].call, stream)
            spent[candidate.contender.label].append(1e6 * elapsed(call, no_wait))
    for candidate in candidates:
        candidate.samples = Samples(np.array(spent[candidate.contender.label] or [candidate.first_s * 1e6]))
        candidate.host_us = candidate.samples.median


def host_time(candidate: Candidate, stream: int) -> float:
    """Host time per call in microseconds, in batches short enough that the launch queue never fills.

    NaN if the device would take too long for the minimum number of calls.
    """
    assert candidate.samples is not None
    call_s = candidate.samples.median * 1e-6
    if FEWEST_CALLS * call_s > LONGEST_BATCH_S:
        return math.nan
    batch = max(FEWEST_CALLS, min(MOST_CALLS, int(HOST_BATCH_S / call_s)))
    rounds = FEWEST_ROUNDS if call_s < HOST_BATCH_S else 1
    call = candidate.bound[0].call
    return host_time_us(lambda: call(stream), batch=batch, rounds=rounds, synchronize=lambda: synchronize(stream))


def best_of_cublas(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates with one of the FP32 cuBLAS: the fastest, or the first if none was timed."""
    baselines = [c for c in candidates if c.contender.stage == results.CUBLAS and c.contender.precision == IEEE]
    best = min(baselines, key=lambda c: c.samples.median if c.samples else math.inf, default=None)
    return [c for c in candidates if c not in baselines or c is best]


def note_others(kept: Sequence[Candidate], candidates: Sequence[Candidate]) -> None:
    """Name the other cuBLAS candidates in the note of the one that was kept."""
    for c in candidates:
        if c not in kept:
            best = next(one for one in kept if one.contender.stage == results.CUBLAS)
            result = f"{c.samples.median:.6g} us" if c.samples else c.status
            said = f"through {c.contender.via}: {', '.join(filter(None, [result, c.note]))}"
            best.note = "; ".join(filter(None, [best.note, said]))


def rows(plan: Plan, shape: Shape, candidates: Sequence[Candidate], clocks: ClockSamples) -> list[dict[str, Any]]:
    """Return the rows of one shape."""
    cublas = [c for c in reversed(candidates) if c.contender.stage == results.CUBLAS]
    baselines = {c.contender.precision: c.samples.median for c in cublas if c.samples}
    alone = next((c.steady for c in cublas if c.steady and c.contender.precision == IEEE), {})
    return [
        row(plan, shape, candidate, clocks, baselines) | candidate.steady | steady_state.ratios(candidate.steady, alone)
        for candidate in candidates
    ]


def row(
    plan: Plan, shape: Shape, candidate: Candidate, clocks: ClockSamples, baselines: Mapping[str, float]
) -> dict[str, Any]:
    """Return one row, with timings only if correct. `baselines` are times of cuBLAS in microseconds, by precision."""
    contender, first = candidate.contender, candidate.bound[0] if candidate.bound else None
    values: dict[str, Any] = {
        "stage": contender.stage,
        "precision": contender.precision,
        **shape._asdict(),
        "layout": "nn",  # neither operand is transposed; all are row-major
        "cache": "cold" if plan.cold else "hot",
        "compile_s": first.compile_s if first else math.nan,
        "via": contender.via,
        "config": first.config if first else contender.config,
    }
    own = ("error_in_bounds", "error_median", "error_max", "host_us", "status", "note")
    values |= {name: getattr(candidate, name) for name in own}
    samples = candidate.samples
    if samples is None:
        return values
    gflops = gemm_flops(*shape) / samples.median * 1e-3
    values |= {f"{name}_us": getattr(samples, name) for name in ("min", "median", "mean", "max", "p10", "p90")}
    values |= {
        "rounds": len(samples.us),
        "gflops": gflops,
        "ratio_to_cublas": baselines.get(IEEE, math.nan) / samples.median,
        "ratio_to_same_precision": baselines.get(contender.precision, math.nan) / samples.median,
    }
    if not on_host(plan, candidate):
        values |= {"percent_of_peak": 100 * gflops * 1e9 / plan.peak}
        values |= {"sm_clock_mhz": clocks.median_mhz, "throttle": clocks.throttle}
    return values
