"""`autotune`: measure which stage and configuration is fastest for a product on the user's own GPU."""

from __future__ import annotations

import math
import numbers
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..kernels.stage import Partition
from ..runtime import device as devices
from ..runtime.driver import device_scope
from ..simulator.switch import SIMULATOR
from ..typing import ArrayT, DeviceLike, PrecisionName
from . import autotune_cache, heuristics
from .candidate_bench import SPAN_US, CandidateBench
from .heuristics import Choice, Problem
from .precision import IEEE
from .prepare import PreparedOperand
from .product import forget
from .request import checked

__all__ = ["Autotuned", "Candidate", "autotune", "clear_autotuned"]

MOST_SHARES = 3  # of one kernel that are tried before all other kernels have been
FEWEST_CANDIDATES = 2  # checked, and rounds timed, whatever the time that is left
FEWEST_ROUNDS, MOST_ROUNDS = 3, 15
EXTRA_CALLS = 4  # that timing makes of each candidate beside its rounds


@dataclass(frozen=True)
class Candidate:
    """One measured candidate.

    Attributes
    ----------
    stage, config : str
        Names of the kernel.
    precision : str
        Precision that it computes in: the one asked for, or a more accurate one.
    partition : Partition or None
        Division of the product among blocks; None in stages without a schedule.
    swapped : bool
        True if the transpose is computed.
    microseconds : float
        Median time of a product on the GPU, without the host time of its launches.
    expected : float
        Time that the model expects, in microseconds.
    """

    stage: str
    config: str
    precision: str
    partition: Partition | None
    swapped: bool
    microseconds: float
    expected: float

    def __str__(self) -> str:
        words = [f"{self.microseconds:12.2f} {self.expected:12.2f}  {self.stage} {self.config}"]
        if self.partition is not None:
            words.append(f"{self.partition.blocks} blocks, {self.partition.whole} whole tiles")
        return ", ".join([*words, "as the transpose"] if self.swapped else words)


@dataclass(frozen=True)
class Autotuned:
    """Measurements of `autotune`; its text is a table.

    Attributes
    ----------
    problem : Problem
        Extents, layouts and device that the choice is for.
    device : str
        Name of the GPU.
    candidates : tuple of Candidate
        Measured candidates, the fastest first.
    model : Candidate or None
        Candidate that the model would have chosen; None if it cannot run, or was wrong.
    stored : Path or None
        File that the choice is kept in; None if it lasts as long as this process.
    """

    problem: Problem
    device: str
    candidates: tuple[Candidate, ...]
    model: Candidate | None
    stored: Path | None

    @property
    def best(self) -> Candidate:
        """Fastest candidate, which is used from now on."""
        return self.candidates[0]

    @property
    def speedup(self) -> float:
        """Time of the model's choice, divided by the fastest time; NaN if that choice was not measured."""
        return math.nan if self.model is None else self.model.microseconds / self.best.microseconds

    def __str__(self) -> str:
        wanted = self.problem
        batch = "" if wanted.matrices == 1 else f"{wanted.matrices} products of "
        lines = [
            f"{batch}M={wanted.m}, N={wanted.n}, K={wanted.k} on {self.device}: the fastest of {len(self.candidates)} "
            f"candidates is {self.speedup:.3f} times as fast as the model's choice (*)",
            f"  {'measured us':>12} {'expected us':>12}  what",
            *(f"{'* ' if one is self.model else '  '}{one}{self._precision_of(one)}" for one in self.candidates),
            f"kept in {self.stored}" if self.stored else "kept for this process only",
        ]
        return "\n".join(lines)

    def _precision_of(self, one: Candidate) -> str:
        return "" if one.precision == self.problem.precision else f", in {one.precision}"


def autotune(
    a: ArrayT,
    b: ArrayT,
    out: ArrayT | None = None,
    *,
    precision: PrecisionName = IEEE,
    epilogue: Callable[..., Any] | None = None,
    epilogue_args: Sequence[Any] = (),
    candidates: int = 12,
    seconds: float = 30.0,
) -> Autotuned:
    """Measure the fastest kernel of `tiled_sgemm` for such operands on this GPU, and use it from now on.

    The choice is kept on disk, beside the compiled kernels, for this kind of GPU and version of numba_gemm. From then
    on, in this process and later ones, `tiled_sgemm` and `plan` with ``stage="auto"`` follow it, and `explain` reports
    it, for products of the same extents, number of matrices, layouts, alignment, dtypes and precision, with an epilogue
    or without. Products with prepared operands follow it too, except in "tf32", "bf16", "tf32x3", "bf16x3" and
    "fp16x3", in which the model chooses for them. `clear_autotuned` undoes it. Plans that exist already keep their
    choices.

    Only shapes, strides and addresses of the arrays matter; their elements are neither read nor written. The products
    are computed in memory that is allocated for this purpose, with the same layouts, and filled with random numbers.
    Uninitialised NumPy arrays therefore suffice: ``autotune(numpy.empty((m, k), numpy.float32),
    numpy.empty((k, n), numpy.float32))`` measures operands stored by rows on the current device, as `plan` does.

    Parameters
    ----------
    a, b, out, precision, epilogue, epilogue_args
        Those of `tiled_sgemm`, but no prepared operands: pass their arrays. If that takes several launches, the first
        one's operands are measured.
    candidates : int
        Largest number of candidates to measure: those that the model ranks highest, but of several kernels rather than
        all of one.
    seconds : float
        Approximate duration. The first time, most of it is compilation. No further candidate is begun after half of it,
        but two are always measured if there are as many.

    Returns
    -------
    Autotuned
        All that was measured.

    Raises
    ------
    TypeError, ValueError, GpuUnavailable
        As `tiled_sgemm`; a ValueError also for a product without elements or terms, and for `candidates` or `seconds`
        that are not positive.
    RuntimeError
        Without memory on the device for another A, B and C; if no candidate can be run.

    Warns
    -----
    RuntimeWarning
        For a candidate that cannot run on this GPU, or whose result differs from the first one's: it is left out. As
        `CacheWarning`, if the choice cannot be kept on disk.

    Notes
    -----
    All candidates are timed in turn, with replays of CUDA graphs between events, on operands that stay in the L2 cache
    where they fit. Nothing else should run on the GPU meanwhile. Before that, each one's C is compared with the first
    one's on integers from -2 to 2, whose sums are exact in any order: up to K = 2**22 the results must be equal. Under
    Numba's simulator all this works, for small products; the times mean nothing.
    """
    check_positive("candidates", candidates, numbers.Integral)
    check_positive("seconds", seconds, numbers.Real)
    for name, operand in (("a", a), ("b", b)):
        if isinstance(operand, PreparedOperand):
            raise TypeError(f"{name} is a prepared operand; expected an array; pass its attribute `array`")
    begin = time.perf_counter()
    request = checked(a, b, out, 1.0, 0.0, None, "auto", epilogue, epilogue_args, precision=precision)
    if 0 in request.shape or request.k == 0:
        raise ValueError(
            f"a has shape {request.given[0]} and b has shape {request.given[1]}: there is nothing to multiply; "
            "expected extents from 1 on; pass such arrays"
        )
    device, gpu = request.device, devices.device_properties(request.device)
    right: list[Choice] = []
    calls: list[float] = []
    with nullcontext() if SIMULATOR else device_scope(device), ExitStack() as memory:
        bench = CandidateBench(request, memory)
        wanted = heuristics.problem(bench.part.product, gpu, request.precision)
        ranked = heuristics.ranked(wanted)
        chosen = diverse(ranked, candidates)
        bench.make_room(chosen)
        for choice in chosen:
            if len(right) >= FEWEST_CANDIDATES and time.perf_counter() > begin + seconds / 2:
                break
            took = bench.checked(choice)
            if took is not None:
                right.append(choice)
                calls.append(took)
        if not right:
            raise RuntimeError(f"no candidate for {wanted} can be run on {gpu.name}; the warnings say why")
        medians = bench.timed(right, affordable_rounds(calls, begin + float(seconds) - time.perf_counter()))
    measured = [
        Candidate(
            one.stage.name,
            one.config.name,
            one.precision,
            one.partition,
            one.swapped,
            us,
            (one.clocks / gpu.clock_hz + heuristics.conversion_seconds(bench.part.product, one, gpu)) * 1e6,
        )
        for one, us in zip(right, medians)
    ]
    order = sorted(range(len(right)), key=medians.__getitem__)
    stored = autotune_cache.keep(device, wanted, right[order[0]], medians[order[0]], len(right))
    forget()
    model = measured[0] if right[0] is ranked[0] else None
    return Autotuned(wanted, gpu.name, tuple(measured[i] for i in order), model, stored)


def clear_autotuned(device: DeviceLike | None = None) -> int:
    """Forget the choices of `autotune`, also on disk; the model chooses again.

    Parameters
    ----------
    device : int, str or device object, optional
        GPU for whose model to forget the choices: 0, "cuda:0", or an object of PyTorch, CuPy, Numba or cuda.core. By
        default, all choices are forgotten.

    Returns
    -------
    int
        Number of choices that were on disk.

    Raises
    ------
    OSError
        if the directory cannot be written, or others can change it.
    """
    try:
        return autotune_cache.clear(None if device is None else devices.ordinal_of(device))
    finally:
        forget()


def check_positive(name: str, value: Any, kind: Any) -> None:
    """Raise TypeError or ValueError unless an option is a positive number of a kind."""
    advice = f"expected {'an int' if kind is numbers.Integral else 'a number'} above 0; pass one"
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r}, of type {type(value).__qualname__}; {advice}")
    if not value > 0:
        raise ValueError(f"{name} is {value!r}; {advice}")


def diverse(ranked: Sequence[Choice], count: int) -> list[Choice]:
    """Return the first choices of a ranking, but at most `MOST_SHARES` with the same kernel while there are others."""
    seen: Counter[tuple[str, str, bool]] = Counter()
    rounds: list[tuple[int, Choice]] = []
    for choice in dict.fromkeys(ranked):
        kernel = choice.stage.name, choice.config.name, choice.swapped
        rounds.append((seen[kernel] // MOST_SHARES, choice))
        seen[kernel] += 1
    return [choice for _, choice in sorted(rounds, key=lambda one: one[0])[:count]]  # stable: else as they were ranked


def affordable_rounds(calls: Sequence[float], seconds: float) -> int:
    """Return the number of rounds that fit into a time, given the duration of each candidate's calls."""
    if SIMULATOR:
        return 1
    spans = [max(call, SPAN_US * 1e-6) for call in calls]
    left = seconds - EXTRA_CALLS * sum(calls) - sum(spans)
    return max(FEWEST_ROUNDS, int(min(MOST_ROUNDS, left / (2 * sum(spans)))))  # short spans are run twice
