"""`autotune`: measure which stage and configuration is fastest for a product on the user's own GPU.

One module because the search and the bench that measures its candidates are one procedure, and nothing else uses a part
of it.
"""

from __future__ import annotations

import math
import numbers
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver

from .. import arrays
from ..arrays import ArrayKind, Operand
from ..device.units import FLOAT32_BYTES, ceil_div
from ..kernels.stage import Partition
from ..kernels.step import Launches
from ..runtime import device as devices
from ..runtime import workspace as workspaces
from ..runtime.driver import call, device_scope
from ..runtime.matrix import at_address
from ..runtime.timing import time_interleaved
from ..runtime.workspace import Workspace
from ..simulator.switch import SIMULATOR
from ..typing import ArrayT, DeviceLike, PrecisionName
from . import autotune_cache, heuristics
from .heuristics import Choice, Problem
from .launch_choice import launch_choice
from .precision import IEEE
from .product import forget
from .request import Part, Request, checked

__all__ = ["Autotuned", "Candidate", "autotune", "clear_autotuned"]

MOST_SHARES = 3  # of one kernel that are tried before all other kernels have been
FEWEST_CANDIDATES = 2  # checked, and rounds timed, whatever the time that is left
FEWEST_ROUNDS, MOST_ROUNDS = 3, 15
SPAN_US = 2000.0  # that calls are repeated for
EXTRA_CALLS = 4  # that timing makes of each candidate beside its rounds
BOUNDARY = 256  # bytes; scratch memory has the operands' alignment up to this one
COMPARED_BYTES, PIECES = 1 << 26, 64  # of a C that are compared, and in how many pieces if it is larger
PERIOD = 1_048_583  # elements after which scratch contents repeat: a prime, so that rows do not look alike


@dataclass(frozen=True)
class Candidate:
    """One measured candidate.

    Attributes
    ----------
    stage, config : str
        Names of the kernel.
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
            *(f"{'* ' if one is self.model else '  '}{one}" for one in self.candidates),
            f"kept in {self.stored}" if self.stored else "kept for this process only",
        ]
        return "\n".join(lines)


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
    it, for products of the same extents, number of matrices, layouts, alignment and precision, with an epilogue or
    without. `clear_autotuned` undoes it. Plans that exist already keep their choices.

    Only shapes, strides and addresses of the arrays matter; their elements are neither read nor written. The products
    are computed in memory that is allocated for this purpose, with the same layouts, and filled with random numbers.
    Uninitialised NumPy arrays therefore suffice: ``autotune(numpy.empty((m, k), numpy.float32),
    numpy.empty((k, n), numpy.float32))`` measures operands stored by rows on the current device, as `plan` does.

    Parameters
    ----------
    a, b, out, precision, epilogue, epilogue_args
        Those of `tiled_sgemm`. If that takes several launches, the first one's operands are measured.
    candidates : int
        Largest number of candidates to measure: those that the model ranks highest, but of several kernels rather than
        all of one.
    seconds : float
        Approximate duration. The first time, most of it is compilation. No further candidate is begun after half of it,
        but two are always measured.

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
        bench = _Bench(request, memory)
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
        Candidate(one.stage.name, one.config.name, one.partition, one.swapped, us, one.clocks / gpu.clock_hz * 1e6)
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
    count = autotune_cache.clear(None if device is None else devices.ordinal_of(device))
    forget()
    return count


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


# ---------------------------------------------------------------------------------------------------------- measuring


class _Scratch(ArrayKind):
    """Memory of an operand's layout on the current device, in the simulator on the host; contents are undefined."""

    name = "scratch memory"

    def __init__(self, like: Operand, stream: int, memory: ExitStack) -> None:
        far = [(extent - 1) * step for extent, step in zip(like.shape, like.strides)]
        low, high = sum(min(step, 0) for step in far), sum(max(step, 0) for step in far) + FLOAT32_BYTES
        self.stream, self.size = stream, ceil_div(high - low + BOUNDARY, FLOAT32_BYTES) * FLOAT32_BYTES
        self.host = np.empty(self.size // FLOAT32_BYTES if SIMULATOR else 0, np.float32)
        self.base = self.host.ctypes.data if SIMULATOR else allocated(self.size, memory)
        first = self.base - low
        self.operand = replace(like, kind=self, array=self, pointer=first + (like.pointer - first) % BOUNDARY)

    def view(self, operand: Operand, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """Return the matrix that the launcher takes."""
        return at_address(self, pointer, shape, strides, dtype=operand.dtype) if SIMULATOR else self

    def fill(self, values: np.ndarray) -> None:
        """Overwrite all of it with float32 values, over and over; of 16-bit dtypes, with the values rounded to them."""
        if self.operand.dtype == "float16":
            values = np.tile(values.astype(np.float16), 2)  # twice, for whole words
        elif self.operand.dtype == "bfloat16":
            values = np.tile((values.view(np.uint32) >> 16).astype(np.uint16), 2)
        values = values.view(np.float32)
        if SIMULATOR:
            self.host[:] = np.resize(values, self.host.shape)
            return
        filled = min(values.nbytes, self.size)
        call(driver.cuMemcpyHtoDAsync, self.base, values.ctypes.data, filled, self.stream)
        while filled < self.size:
            more = min(filled, self.size - filled)
            call(driver.cuMemcpyDtoDAsync, self.base + filled, self.base, more, self.stream)
            filled += more
        call(driver.cuStreamSynchronize, self.stream)  # the values may go

    def read(self) -> np.ndarray:
        """Return the contents or, if these are large, pieces of them, from the first to the last."""
        if SIMULATOR:
            return self.host.copy()
        count = 1 if self.size <= COMPARED_BYTES else PIECES
        pieces = np.empty((count, min(self.size, COMPARED_BYTES) // count // FLOAT32_BYTES), np.float32)
        starts = np.linspace(0, self.size // FLOAT32_BYTES - pieces.shape[1], count, dtype=np.int64)
        for piece, start in zip(pieces, starts.tolist()):
            call(
                driver.cuMemcpyDtoHAsync,
                piece.ctypes.data,
                self.base + FLOAT32_BYTES * start,
                piece.nbytes,
                self.stream,
            )
        call(driver.cuStreamSynchronize, self.stream)
        return pieces


class _Bench:
    """Operands like those of a request, and a workspace, on the current device, for as long as `memory` is open."""

    def __init__(self, request: Request, memory: ExitStack) -> None:
        self.device, self.stream, self.memory = request.device, 0, memory
        if not SIMULATOR:
            self.stream = int(call(driver.cuStreamCreate, int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))
            memory.callback(call, driver.cuStreamDestroy, self.stream)
        kind, strides = request.a.kind, arrays.row_major(request.shape, FLOAT32_BYTES)
        result = request.out or Operand("out", kind, None, "float32", request.shape, strides, 0, self.device)
        given = [request.a, request.b, *request.vectors, result]
        *self.inputs, self.c = (
            _Scratch(kind.placed(one) if one.array is not None else one, self.stream, memory) for one in given
        )
        a, b, *vectors = (one.operand for one in self.inputs)
        self.part: Part = next(request.parts(a, b, self.c.operand, vectors))
        self.workspace: Workspace | None = None
        self.expected: np.ndarray | None = None

    def fill(self, draw: Callable[[np.random.Generator, int], np.ndarray]) -> None:
        """Overwrite all operands but C with other contents."""
        for seed, one in enumerate(self.inputs):
            one.fill(draw(np.random.default_rng(seed), PERIOD).astype(np.float32))

    def run(self, choice: Choice, stream: int) -> None:
        """Enqueue the product."""
        part = self.part
        operands = 1.0, part.a, part.b, 0.0, part.c
        launch_choice(part.product, choice, *operands, stream, part.vectors, self.workspace)

    def checked(self, choice: Choice) -> float | None:
        """Return about how many seconds a product takes; None, with a warning, if it cannot run or is wrong."""
        stage, config = choice.stage, choice.config
        named = f"configuration {config.name} of stage {stage.name}, {choice.partition}, is not measured"
        try:
            self._prepare(choice)
        except RuntimeError as error:
            warnings.warn(f"{named}: {error}", RuntimeWarning, stacklevel=3)
            return None
        if self.expected is None:
            self.fill(lambda rng, count: rng.integers(-2, 3, count))
        self.c.fill(np.full(PERIOD, np.nan, np.float32))
        self.run(choice, self.stream)
        got = self.c.read()
        if self.expected is None:
            self.expected = got
        if not np.array_equal(got, self.expected, equal_nan=True):
            warnings.warn(f"{named}: its result differs from the first candidate's", RuntimeWarning, stacklevel=3)
            return None
        begin = time.perf_counter()
        if not SIMULATOR:
            self.run(choice, self.stream)
            call(driver.cuStreamSynchronize, self.stream)
        return time.perf_counter() - begin

    def _prepare(self, choice: Choice) -> None:
        """Compile and load the kernels of a choice."""
        device, config = devices.get_device(self.device), choice.config
        oriented = choice.oriented(self.part.product)
        device.check(choice.stage, config, choice.stage.kernel(config, oriented, choice.precision))
        if not SIMULATOR:
            for step in self._launches(choice).steps:
                device.load(step.kernel)

    def _launches(self, choice: Choice) -> Launches:
        """Return the launches of the first piece of the product."""
        gpu, config = devices.device_properties(self.device).gpu, choice.config
        oriented = choice.oriented(self.part.product)
        piece = next(choice.stage.pieces(config, oriented, choice.precision, gpu))
        return choice.stage.launches(config, piece.product, choice.precision, choice.partition, gpu)

    def make_room(self, choices: Sequence[Choice]) -> None:
        """Compile all kernels in parallel; allocate a workspace, so that none uses the stream's, never freed."""
        if SIMULATOR:
            return
        launches = [self._launches(choice) for choice in choices]
        with suppress(RuntimeError):  # of a candidate that cannot be compiled, which is then left out
            devices.get_device(self.device).load_all([step.kernel for one in launches for step in one.steps])
        size, counters = max(one.scratch_bytes for one in launches), max(one.counters for one in launches)
        if not (size or counters):
            return
        place = allocated(max(workspaces.total_bytes(size, counters), 1), self.memory)
        self.workspace = Workspace(place, size, counters)
        workspaces.clear(self.workspace.words[1], counters, self.stream)

    def timed(self, choices: Sequence[Choice], rounds: int) -> list[float]:
        """Return the median microseconds of a product per choice."""
        self.fill(lambda rng, count: rng.uniform(-1, 1, count))
        runs = {str(i): partial(self.run, choice) for i, choice in enumerate(choices)}
        samples = time_interleaved(runs, stream=self.stream, rounds=rounds, min_span_us=SPAN_US)
        return [samples[name].median for name in runs]


def allocated(size: int, memory: ExitStack) -> int:
    """Allocate memory on the current device, freed with `memory`; return its address."""
    pointer = int(call(driver.cuMemAlloc, size))
    memory.callback(call, driver.cuMemFree, pointer)
    return pointer
