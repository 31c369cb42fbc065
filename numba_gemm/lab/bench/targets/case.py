"""A case: contenders that are measured together, and the outcome of each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.bench.results import ERROR, OK
from numba_gemm.lab.bench.targets.rig import Rig
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
