"""Cases, the contenders that are measured together in each, their memory, and their measurement."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numba import cuda

import numba_gemm
from numba_gemm.gemm.precision import IEEE
from numba_gemm.lab.bench.buffers import HostLibrary, Reference, TorchLibrary, on_stream, optional
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.bench.contenders import Bound
from numba_gemm.lab.bench.results import CUBLAS, OK, WRONG
from numba_gemm.lab.bench.run import Outcome, Plan, time_on_device
from numba_gemm.lab.harness import environment
from numba_gemm.lab.harness.command import SEED_BITS
from numba_gemm.lab.harness.experiment import Unavailable
from numba_gemm.lab.harness.nvml import ClockSamples, sampled_clocks
from numba_gemm.models.roofline import gemm_flops
from numba_gemm.runtime import ahead
from numba_gemm.runtime.timing import Samples, elapsed, host_time_us, no_wait
from numba_gemm.simulator.switch import SIMULATOR

OURS = "ours"
BY_CUPY = f"{CUBLAS}, cupy"  # cuBLAS through CuPy; `CUBLAS` is through the library of the operands
INFORMATION = math.nan  # target of a comparison that has none


@dataclass(frozen=True)
class Turn:
    """One call on one set of operands: its output, and a function that judges it like `Truth.judge`."""

    call: Callable[[], Any]
    out: Any
    judge: Callable[[Any], tuple[float, str]]


@dataclass(frozen=True)
class Contender:
    """Calls on alternating operands, and the work of each, in FLOPs or bytes for all that are compared."""

    turns: Sequence[Turn]
    work: float


@dataclass(frozen=True)
class Case:
    """Contenders that are measured together."""

    group: str
    name: str
    shape: Shape  # of `OURS`
    make: Callable[[Rig], Mapping[str, Contender]]  # returns the contenders by name, including `OURS`
    baselines: tuple[str, ...]  # contenders to compare with: the first has a target, the others are informative
    layout: str = "NN"
    batch: int = 1  # products per call
    on_host: bool = False  # True if the host's time is measured
    rounds: int | None = None  # by default as many as a budget allows
    each_once: bool = False  # True if each of our calls is timed once, unprepared, as those of shapes that are new
    target: float = 0.0  # required speed relative to the first baseline, set by `groups.cases_of`


class Rig:
    """Memory shared by all cases, and the library to compare with: PyTorch, or NumPy in the simulator."""

    def __init__(self, seed: int, elements: int) -> None:
        self.seed = seed
        self.torch, self.cupy = (None if SIMULATOR else optional(name) for name in ("torch", "cupy"))
        self.library: HostLibrary = HostLibrary()
        self.multiply, self.multiply_batch, self.copy, self.nvml = np.matmul, np.matmul, np.copyto, None
        if not SIMULATOR:
            if self.torch is None:
                raise Unavailable("PyTorch is not here, or finds no GPU: there is no cuBLAS to compare with")
            self.library, self.nvml = TorchLibrary(self.torch), environment.current_nvml()
            self.torch.set_float32_matmul_precision("highest")
            self.torch.backends.cuda.matmul.allow_tf32 = False
            self.multiply, self.multiply_batch = self.torch.matmul, self.torch.bmm
            self.copy = self.torch.Tensor.copy_
        self.drawn = self.stream = 0
        self.flat_a, self.flat_b, self.flat_c = (self.random(elements) for _ in range(3))

    def random(self, elements: int) -> Any:
        """Draw a vector of standard normal values on the device; on the host, a gibibyte would take seconds."""
        self.drawn += 1
        if self.torch is None:
            return np.random.default_rng([self.seed, self.drawn]).standard_normal(elements, np.float32)
        generator = self.torch.Generator(device="cuda").manual_seed(self.seed + (self.drawn << SEED_BITS))
        values = self.torch.empty(elements, dtype=self.torch.float32, device="cuda")
        return values.normal_(generator=generator)

    def operands(self, shape: Shape, layout: str = "NN") -> tuple[Any, Any, Any]:
        """Return A, B and C of a shape, in the memory that all cases share."""
        m, n, k = shape
        return matrix(self.flat_a, m, k, layout[0]), matrix(self.flat_b, k, n, layout[1]), matrix(self.flat_c, m, n)

    def batch(self, count: int, shape: Shape) -> list[Any]:
        """Return batches of A, B and C."""
        m, n, k = shape
        extents = ((self.flat_a, m, k), (self.flat_b, k, n), (self.flat_c, m, n))
        return [flat[: count * rows * cols].reshape(count, rows, cols) for flat, rows, cols in extents]

    def synchronize(self) -> None:
        """Wait for all streams, since arrays of some libraries come with a stream of their own."""
        cuda.synchronize()


def matrix(flat: Any, rows: int, cols: int, stored: str = "N") -> Any:
    """View the beginning of a vector as a row-major matrix, or with "T" as the transpose of a row-major one."""
    values = flat[: rows * cols]
    return values.reshape(rows, cols) if stored == "N" else values.reshape(cols, rows).T


class Truth:
    """Float64 product of two operands, computed on first use.

    With a bias, it is the result of bias and ReLU, neither of which amplifies an error.
    """

    def __init__(self, rig: Rig, a: Any, b: Any, bias: Any = None, precision: str = IEEE) -> None:
        self.library, self.a, self.b = rig.library, a, b
        self.bias, self.precision = bias, precision

    @functools.cached_property
    def reference(self) -> Reference:
        """Reference of the operands."""
        made = Reference(self.library, self.a, self.b)
        if self.bias is not None:
            bias = self.library.float64(self.bias)
            weight = self.library.float32(abs(bias))
            made.panels = tuple(
                replace(panel, expected=(panel.expected + bias).clip(0), scale=panel.scale + weight)
                for panel in made.panels
            )
        return made

    def judge(self, c: Any) -> tuple[float, str]:
        """Return the worst error in units of the bound, and a description; empty if the result is correct."""
        found, _, _ = self.reference.judge(c, self.precision)
        return found.in_bounds, "" if found.ok else str(found)


def ours(a: Any, b: Any, c: Any, truth: Truth, work: float, **options: Any) -> Contender:
    """Return the contender that calls the public function."""
    return Contender([Turn(functools.partial(numba_gemm.tiled_sgemm, a, b, out=c, **options), c, truth.judge)], work)


def cublas(rig: Rig, products: Sequence[tuple[Any, Any, Any, Any]], work: float) -> dict[str, Contender]:
    """Return the contenders that call cuBLAS in turn on some A, B and C, each with a function that judges C."""
    batch = products[0][0].ndim > 2
    ways: dict[str, tuple[Any, Any]] = {CUBLAS: (rig.multiply_batch if batch else rig.multiply, lambda array: array)}
    if rig.cupy is not None:
        ways[BY_CUPY] = rig.cupy.matmul, rig.cupy.asarray
    return {
        name: Contender(
            [Turn(functools.partial(call, view(a), view(b), out=view(c)), c, judge) for a, b, c, judge in products],
            work,
        )
        for name, (call, view) in ways.items()
    }


def both(rig: Rig, shape: Shape, layout: str = "NN") -> dict[str, Contender]:
    """Return the contenders that call the public function and cuBLAS on the same operands."""
    a, b, c = rig.operands(shape, layout)
    truth, work = Truth(rig, a, b), gemm_flops(*shape)
    return {OURS: ours(a, b, c, truth, work)} | cublas(rig, [(a, b, c, truth.judge)], work)


@functools.cache
def bias_relu() -> Any:
    """Return the device function of the epilogue: a bias per column, then ReLU."""
    from numba import float32  # a closure, as an epilogue may be; the kind `MATHS` names globals

    @cuda.jit(device=True)
    def bias_relu(value, row, column, bias):  # type: ignore[no-untyped-def]
        return max(value + bias[column], float32(0))

    return bias_relu


HOST_ROUNDS, HOST_BATCH = 15, 100


def verified(rig: Rig, contender: Contender) -> Outcome:
    """Make every call on a C filled with NaN and judge the result; then time one more call."""
    bound = [Bound(on_stream(turn.call)) for turn in contender.turns]
    outcome = Outcome(bound, error_in_bounds=0.0, work=contender.work)
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
        outcome.first_s = elapsed(contender.turns[0].call, rig.synchronize)
    except Exception as error:
        outcome.fail(error)
    return outcome


def measure(rig: Rig, case: Case) -> list[dict[str, Any]]:
    """Return the rows of a case, one per baseline, including failures."""
    clocks, via = ClockSamples(), ""
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
        via = keep_faster(outcomes, rig.library.name)
    except Exception as error:
        failed = Outcome()
        failed.fail(error)
        outcomes = dict.fromkeys((OURS, *case.baselines), failed)
    return [row(case, outcomes, baseline, clocks, via) for baseline in case.baselines]


def keep_faster(outcomes: dict[str, Outcome], library: str) -> str:
    """Keep the faster one of cuBLAS through a library and through CuPy, and return the name of its library."""
    ways = {via: outcomes.pop(key) for via, key in ((library, CUBLAS), ("cupy", BY_CUPY)) if key in outcomes}
    if not ways:
        return ""
    via = min(ways, key=lambda via: samples.median if (samples := ways[via].samples) else math.inf)
    outcomes[CUBLAS] = ways[via]
    return via


def timed_once(rig: Rig, contender: Contender) -> Samples:
    """Measure the host time of each call; the first half of them is the warm-up, which loads kernels.

    Kernels that worker processes compile ahead after the warm-up are waited for.
    """
    spent: list[float] = []
    for turn in contender.turns:
        if len(spent) == len(contender.turns) // 2:
            ahead.wait_until_idle()
        rig.synchronize()
        spent.append(1e6 * elapsed(turn.call, no_wait))
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
    case: Case, outcomes: Mapping[str, Outcome], baseline: str, clocks: ClockSamples, via: str = ""
) -> dict[str, Any]:
    """Return the row of one baseline; its ratio requires that both results are correct."""
    own, other = outcomes[OURS], outcomes[baseline]
    us, other_us = (outcome.samples.median if outcome.samples else math.nan for outcome in (own, other))
    ratio = own.work / us / (other.work / other_us)
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
        "cublas_via": via if baseline == CUBLAS else "",
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
