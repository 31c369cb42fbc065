"""Cases, the contenders that are measured together in each, and the outcome of each contender."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numba_gemm
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.bench.results import ERROR, OK
from numba_gemm.lab.bench.targets.rig import Rig, Truth
from numba_gemm.models.roofline import gemm_flops
from numba_gemm.runtime.timing import Call

OURS = "ours"
COPY = "device copy"
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

    def rotating(self) -> Call:
        """Return a call that moves on to the next set of operands each time."""
        calls = itertools.cycle([turn.call for turn in self.turns])

        def call(_stream: int) -> None:
            next(calls)()

        return call


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


@dataclass
class Outcome:
    """Result of measuring a contender."""

    us: float = math.nan
    error_in_bounds: float = math.nan
    status: str = OK
    note: str = ""
    rounds: int = 0
    call_s: float = math.nan

    @classmethod
    def failed(cls, error: Exception) -> Outcome:
        """Return the outcome of an exception."""
        return cls(status=ERROR, note=f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])


def ours(a: Any, b: Any, c: Any, truth: Truth, work: float, **options: Any) -> Contender:
    """Return the contender that calls the public function."""
    return Contender([Turn(functools.partial(numba_gemm.tiled_sgemm, a, b, out=c, **options), c, truth.judge)], work)


def both(rig: Rig, shape: Shape, layout: str = "NN") -> tuple[Contender, Contender]:
    """Return the contenders that call the public function and cuBLAS on the same operands."""
    a, b, c = rig.operands(shape, layout)
    truth, work = Truth(rig, a, b), gemm_flops(*shape)
    theirs = Contender([Turn(functools.partial(rig.multiply, a, b, out=c), c, truth.judge)], work)
    return ours(a, b, c, truth, work), theirs


@functools.cache
def bias_relu() -> Any:
    """Return the device function of the epilogue: a bias per column, then ReLU."""
    from numba import cuda, float32

    @cuda.jit(device=True)
    def bias_relu(value, row, column, bias):  # type: ignore[no-untyped-def]
        return max(value + bias[column], float32(0))

    return bias_relu
