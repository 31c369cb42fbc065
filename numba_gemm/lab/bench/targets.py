"""``python -m numba_gemm.lab.bench.targets`` compares the public function's performance with its targets.

It needs a GPU and PyTorch, through which it calls cuBLAS (TF32 off). It writes three files into ``--out``:

targets.csv
    one row per comparison. ``ratio`` is the speed of `tiled_sgemm` divided by that of the baseline, both as work per
    microsecond, so larger is better; rows without ``target`` are informative;
targets_summary.csv
    one row per target: the statistic of the rows, its value, and its limits;
targets.json
    the environment of the measurement.

Entries of `numba_gemm.autotune`'s cache on this machine are used, as in any call; NUMBA_GEMM_CACHE_DIR=off disables it.

Every result is checked before it is timed, for unwritten elements and against float64 at rows spread over all of C. A
wrong result or an exception fails the target. All contenders of a case are timed together, on the same memory.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import math
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import numba_gemm
from numba_gemm.gemm.precision import IEEE, PRECISIONS
from numba_gemm.lab.bench import environment
from numba_gemm.lab.bench.buffers import (
    FLOAT32_BYTES,
    DeviceBuffers,
    HostLibrary,
    TorchLibrary,
    operand_bytes,
    optional,
    uniform,
)
from numba_gemm.lab.bench.cases import SEED_EXTENTS, Shape
from numba_gemm.lab.bench.command import (
    at_least_one,
    command,
    commit_hash,
    csv_text,
    json_text,
    make_folder,
    write_files,
)
from numba_gemm.lab.bench.nvml import ClockSamples, sampled_clocks
from numba_gemm.lab.bench.results import CUBLAS, ERROR, GRAPHS, OK, WRONG
from numba_gemm.lab.bench.run import MIN_SPAN_US, NOT_CAPTURED, affordable_rounds
from numba_gemm.lab.bench.verify import Reference
from numba_gemm.models.roofline import gemm_flops
from numba_gemm.runtime.timing import Call, Samples, host_time_us, time_interleaved
from numba_gemm.simulator.probe import driver_error
from numba_gemm.simulator.switch import SIMULATOR

ROWS, SUMMARY, HOW = "targets.csv", "targets_summary.csv", "targets.json"
ALL_MET, NOT_MET, UNUSABLE = 0, 1, 2
DEFAULT_OUT = Path("results") / "local"

# Limit on the rows of C that are checked, in addition to the first and the last: one in 64 at the largest shape.
CHECKED_ROWS = 256
RANDOM_ROUNDS = 7
HOST_ROUNDS, HOST_BATCH = 15, 100
SEED_BITS = 32
OURS = "ours"
COPY = "device copy"
INFORMATION = math.nan  # target of a comparison that has none

COLUMNS = (
    *("group", "case", "m", "n", "k", "layout", "batch", "us", "tflops", "baseline", "baseline_us", "ratio", "target"),
    *("status", "error_in_bounds", "rounds", "sm_clock_mhz", "throttle", "note"),
)


@dataclass(frozen=True)
class Sizes:
    """Shapes of every group.

    Attributes
    ----------
    seed, cubes : tuple of Shape
        Shapes of two groups.
    large : int
        M from which a seed shape has the higher target.
    low, high : int
        Limits of the random extents.
    odd : tuple of (Shape, Shape, tuple of str)
        Shapes that do not fit tiles, their aligned neighbours, and the layouts in which both are multiplied.
    layouts, epilogue, host : Shape
        Shapes of three groups.
    vector, thin : int, tuple of int
        Extent of the square matrix, and the small extents of the thin operand.
    batch, batched : int, Shape
        Number of batch entries, and their shape.
    elements : int
        Elements of the largest operand.
    """

    seed: tuple[Shape, ...]
    cubes: tuple[Shape, ...]
    large: int
    low: int
    high: int
    odd: tuple[tuple[Shape, Shape, tuple[str, ...]], ...]
    layouts: Shape
    epilogue: Shape
    host: Shape
    vector: int
    thin: tuple[int, ...]
    batch: int
    batched: Shape
    elements: int


LAYOUTS = ("NN", "TN", "NT", "TT")  # one letter each for A and B; T is the transpose of a row-major matrix
FULL = Sizes(
    seed=tuple(Shape(extent, extent, 1024) for extent in SEED_EXTENTS),
    cubes=tuple(Shape(extent, extent, extent) for extent in (2048, 3072, 4096, 6144, 8192, 12288, 16384)),
    large=2048,
    low=64,
    high=8192,
    odd=(
        (Shape(4093, 4099, 1021), Shape(4096, 4096, 1024), ("NN",)),
        (Shape(2047, 2049, 1023), Shape(2048, 2048, 1024), LAYOUTS),
        (Shape(3001, 3007, 2011), Shape(3000, 3008, 2012), LAYOUTS),
        (Shape(8191, 8193, 1025), Shape(8192, 8192, 1024), LAYOUTS),
        (Shape(5003, 1999, 3001), Shape(5004, 2000, 3000), LAYOUTS),
    ),
    layouts=Shape(4096, 4096, 4096),
    epilogue=Shape(4096, 4096, 4096),
    host=Shape(64, 64, 64),
    vector=16384,
    thin=(1, 4, 16),
    batch=64,
    batched=Shape(512, 512, 512),
    elements=1 << 28,
)
# Sizes small enough to try the program in the simulator.
TINY = Sizes(
    seed=(Shape(8, 8, 16), Shape(16, 16, 16)),
    cubes=(Shape(16, 16, 16),),
    large=16,
    low=4,
    high=12,
    odd=((Shape(7, 9, 5), Shape(8, 8, 4), LAYOUTS),),
    layouts=Shape(16, 16, 16),
    epilogue=Shape(12, 12, 12),
    host=Shape(8, 8, 8),
    vector=16,
    thin=(1, 4),
    batch=2,
    batched=Shape(8, 8, 8),
    elements=1 << 10,
)


def random_shapes(count: int, seed: int, low: int, high: int) -> list[Shape]:
    """Return shapes with log-uniform integer extents from `low` to `high`; a longer list starts with a shorter one."""
    logarithms = np.random.default_rng(seed).uniform(math.log(low), math.log(high + 1), (count, 3))
    extents = np.clip(np.exp(logarithms).astype(int), low, high)
    return [Shape(*row) for row in extents.tolist()]


def checked_rows(m: int, seed: int) -> list[int]:
    """Return the rows of C to check: all, or the first, the last and a random one out of each of equal parts."""
    if m <= CHECKED_ROWS:
        return list(range(m))
    parts = np.arange(CHECKED_ROWS + 1) * m // CHECKED_ROWS
    return sorted({0, m - 1, *np.random.default_rng([seed, m]).integers(parts[:-1], parts[1:]).tolist()})


class Rig:
    """Memory shared by all cases, and the library to compare with: PyTorch, or NumPy in the simulator."""

    def __init__(self, seed: int, elements: int) -> None:
        self.seed = seed
        self.library: HostLibrary = HostLibrary()
        self.torch: Any = None
        self.multiply: Callable[..., Any] = np.matmul
        self.multiply_batch: Callable[..., Any] = np.matmul
        self.copy: Callable[..., Any] = np.copyto
        self.nvml = None
        if not SIMULATOR:
            self.torch = optional("torch")
            if self.torch is None:
                raise RuntimeError("PyTorch is not here, or finds no GPU: there is no cuBLAS to compare with")
            self.library = TorchLibrary(self.torch)
            self.torch.set_float32_matmul_precision("highest")
            self.torch.backends.cuda.matmul.allow_tf32 = False
            self.multiply, self.multiply_batch = self.torch.matmul, self.torch.bmm
            self.copy = self.torch.Tensor.copy_
            self.nvml = environment.current_nvml()
        self.drawn = 0
        self.flat_a, self.flat_b = self.random(elements), self.random(elements)
        self.flat_c = self.random(elements)
        self.stream = 0

    def random(self, elements: int) -> Any:
        """Draw a vector of uniform values in [-1, 1) on the device; on the host, a gibibyte would take seconds."""
        self.drawn += 1
        if self.torch is None:
            return uniform(np.random.default_rng([self.seed, self.drawn]), 1, elements)[0]
        generator = self.torch.Generator(device="cuda").manual_seed(self.seed + (self.drawn << SEED_BITS))
        values = self.torch.empty(elements, dtype=self.torch.float32, device="cuda")
        return values.uniform_(-1.0, 1.0, generator=generator)

    def synchronize(self) -> None:
        """Wait for all streams, since arrays of some libraries come with a stream of their own."""
        from numba import cuda

        cuda.synchronize()


def matrix(flat: Any, rows: int, cols: int, stored: str = "N") -> Any:
    """View the beginning of a vector as a row-major matrix, or with "T" as the transpose of a row-major one."""
    values = flat[: rows * cols]
    return values.reshape(rows, cols) if stored == "N" else values.reshape(cols, rows).T


class Truth:
    """Float64 product of two operands at `checked_rows`, computed on first use.

    With a bias, it is the result of bias and ReLU, neither of which amplifies an error.
    """

    def __init__(self, rig: Rig, a: Any, b: Any, bias: Any = None, precision: str = IEEE) -> None:
        self.library, self.a, self.b, self.bias, self.precision = rig.library, a, b, bias, precision
        self.rows = checked_rows(int(a.shape[0]), rig.seed)

    @functools.cached_property
    def reference(self) -> Reference:
        """Reference of the checked rows."""
        (_, k), n = self.a.shape, self.b.shape[1]
        some = DeviceBuffers(self.library, Shape(len(self.rows), int(n), int(k)), self.a[self.rows], self.b, None)
        made = Reference(some)
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
        if bool((c != c).any()):
            return math.inf, "elements of C are NaN, or were not written"
        found = self.reference.compare(c[self.rows], self.precision)
        return found.in_bounds, "" if found.ok else str(replace(found, row=self.rows[found.row]))


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
    """Contenders that are measured together.

    Attributes
    ----------
    group, name : str
        The group, and the name of the case in it.
    shape : Shape
        Shape of `OURS`.
    make : callable
        Function from the rig to the contenders by name, including `OURS`.
    against : mapping of str to float
        Baselines among the contenders, each with the target of our speed relative to it, or `INFORMATION`.
    layout, batch
        Layout of the operands, and the number of products per call.
    on_host : bool
        True if the host's time is measured.
    rounds : int, optional
        Number of rounds; by default as many as a budget allows.
    each_once : bool
        True if each of our calls is timed once, without one before it, as those of shapes that are new.
    """

    group: str
    name: str
    shape: Shape
    make: Callable[[Rig], Mapping[str, Contender]]
    against: Mapping[str, float]
    layout: str = "NN"
    batch: int = 1
    on_host: bool = False
    rounds: int | None = None
    each_once: bool = False


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


# Groups. Each is a list of cases, whose contenders are created only when they are measured.


def ours(a: Any, b: Any, c: Any, truth: Truth, work: float, **options: Any) -> Contender:
    """Contender that calls the public function."""
    return Contender([Turn(functools.partial(numba_gemm.tiled_sgemm, a, b, out=c, **options), c, truth.judge)], work)


def both(rig: Rig, shape: Shape, layout: str = "NN") -> tuple[Contender, Contender]:
    """Contenders that call the public function and cuBLAS on the same operands."""
    m, n, k = shape
    a, b = matrix(rig.flat_a, m, k, layout[0]), matrix(rig.flat_b, k, n, layout[1])
    c = matrix(rig.flat_c, m, n)
    truth, work = Truth(rig, a, b), gemm_flops(m, n, k)
    theirs = Contender([Turn(functools.partial(rig.multiply, a, b, out=c), c, truth.judge)], work)
    return ours(a, b, c, truth, work), theirs


def plain_case(group: str, shape: Shape, target: float, rounds: int | None = None) -> Case:
    """Case of the public function against cuBLAS."""

    def make(rig: Rig) -> dict[str, Contender]:
        return dict(zip((OURS, CUBLAS), both(rig, shape)))

    return Case(group, str(shape), shape, make, {CUBLAS: target}, rounds=rounds)


def seed_cases(sizes: Sizes) -> list[Case]:
    """Shapes of the table that preceded the ladder."""
    return [plain_case("seed", shape, 1.0 if shape.m >= sizes.large else 0.9) for shape in sizes.seed]


def cube_cases(sizes: Sizes) -> list[Case]:
    """Cubes."""
    return [plain_case("cubes", shape, 1.0) for shape in sizes.cubes]


def random_cases(sizes: Sizes, count: int, seed: int) -> list[Case]:
    """Random shapes."""
    shapes = random_shapes(count, seed, sizes.low, sizes.high)
    return [plain_case("random", shape, 0.75, RANDOM_ROUNDS) for shape in shapes]


def odd_cases(sizes: Sizes) -> list[Case]:
    """Shapes that do not fit tiles and wide accesses, against aligned neighbours."""

    def case(shape: Shape, aligned: Shape, layout: str) -> Case:
        neighbour = f"{OURS}, {aligned}"

        def make(rig: Rig) -> dict[str, Contender]:
            own, theirs = both(rig, shape, layout)
            return {OURS: own, neighbour: both(rig, aligned, layout)[0], CUBLAS: theirs}

        return Case("odd", f"{shape} {layout}", shape, make, {neighbour: 0.95, CUBLAS: INFORMATION}, layout)

    return [case(shape, aligned, layout) for shape, aligned, layouts in sizes.odd for layout in layouts]


def layout_cases(sizes: Sizes) -> list[Case]:
    """Transposed operands against row-major ones."""
    shape, by_rows = sizes.layouts, f"{OURS}, NN"

    def case(layout: str) -> Case:
        def make(rig: Rig) -> dict[str, Contender]:
            own, theirs = both(rig, shape, layout)
            return {OURS: own, by_rows: both(rig, shape)[0], CUBLAS: theirs}

        return Case("layouts", f"{shape} {layout}", shape, make, {by_rows: 0.9, CUBLAS: INFORMATION}, layout)

    return [case(layout) for layout in LAYOUTS[1:]]


def vector_cases(sizes: Sizes) -> list[Case]:
    """A large matrix times a thin one, from either side, as a share of a copy's bandwidth.

    The large operand alternates between two, each far larger than the L2 cache, so that every call runs with a cold
    cache.
    """
    extent = sizes.vector

    def case(thin: int, n_is_thin: bool) -> Case:
        shape = Shape(extent, thin, extent) if n_is_thin else Shape(thin, extent, extent)

        def make(rig: Rig) -> dict[str, Contender]:
            small = rig.random(extent * thin)
            c = matrix(rig.flat_c, shape.m, shape.n)
            own: list[Turn] = []
            theirs: list[Turn] = []
            copies: list[Turn] = []
            for flat in (rig.flat_a, rig.flat_b):
                large = matrix(flat, extent, extent)
                a, b = (large, matrix(small, extent, thin)) if n_is_thin else (matrix(small, thin, extent), large)
                truth = Truth(rig, a, b)
                own += ours(a, b, c, truth, 0.0).turns
                theirs.append(Turn(functools.partial(rig.multiply, a, b, out=c), c, truth.judge))
                to = matrix(rig.flat_c, extent, extent)
                copies.append(Turn(functools.partial(rig.copy, to, large), to, functools.partial(same, large)))
            moved = float(operand_bytes(shape))
            copied = 2.0 * FLOAT32_BYTES * extent * extent  # bytes read and written
            return {OURS: Contender(own, moved), COPY: Contender(copies, copied), CUBLAS: Contender(theirs, moved)}

        return Case("vector", str(shape), shape, make, {COPY: 0.85, CUBLAS: INFORMATION})

    return [case(thin, n_is_thin) for n_is_thin in (True, False) for thin in sizes.thin]


def same(source: Any, copy: Any) -> tuple[float, str]:
    """Compare a copy with its source."""
    return (0.0, "") if bool((source == copy).all()) else (math.inf, "the copy differs")


def batched_cases(sizes: Sizes) -> list[Case]:
    """A batch in one call."""
    count, shape = sizes.batch, sizes.batched
    m, n, k = shape

    def make(rig: Rig) -> dict[str, Contender]:
        a = rig.flat_a[: count * m * k].reshape(count, m, k)
        b = rig.flat_b[: count * k * n].reshape(count, k, n)
        c = rig.flat_c[: count * m * n].reshape(count, m, n)
        truths = [Truth(rig, a[index], b[index]) for index in range(count)]

        def judge(got: Any) -> tuple[float, str]:
            verdicts = [truth.judge(got[index]) for index, truth in enumerate(truths)]
            worst = max(range(count), key=lambda index: verdicts[index][0])
            error, note = verdicts[worst]
            return error, note and f"product {worst}: {note}"

        work = count * gemm_flops(m, n, k)
        calls = {OURS: numba_gemm.tiled_sgemm, CUBLAS: rig.multiply_batch}
        return {
            name: Contender([Turn(functools.partial(call, a, b, out=c), c, judge)], work)
            for name, call in calls.items()
        }

    return [Case("batched", f"{count} of {shape}", shape, make, {CUBLAS: 0.95}, batch=count)]


def epilogue_cases(sizes: Sizes) -> list[Case]:
    """Bias and ReLU as an epilogue, against the same call without an epilogue."""
    shape = sizes.epilogue
    m, n, k = shape
    plain = f"{OURS}, plain"

    def make(rig: Rig) -> dict[str, Contender]:
        bias = rig.random(n)
        a, b, c = matrix(rig.flat_a, m, k), matrix(rig.flat_b, k, n), matrix(rig.flat_c, m, n)
        options = {"epilogue": bias_relu(), "epilogue_args": (bias,)}
        own = ours(a, b, c, Truth(rig, a, b, bias), gemm_flops(m, n, k), **options)
        return {OURS: own, plain: both(rig, shape)[0]}

    return [Case("epilogue", f"{shape} bias and ReLU", shape, make, {plain: 0.98})]


@functools.cache
def bias_relu() -> Any:
    """Return the device function of the epilogue: a bias per column, then ReLU."""
    from numba import cuda, float32

    @cuda.jit(device=True)
    def bias_relu(value, row, column, bias):  # type: ignore[no-untyped-def]
        return max(value + bias[column], float32(0))

    return bias_relu


LIBRARIES = ("torch", "cupy", "numba")
THE_CALL = "the call"  # baseline of plans: the same product by the public function
BATCH, EPILOGUE, MATHS = "batch of 8", "epilogue", "epilogue that names numpy.float32 and math.erf"
# Host time per call, at most, in units of torch.matmul(out=).
HOST_LIMITS = {IEEE: 1.0, BATCH: 1.1, EPILOGUE: 1.4, MATHS: 1.4}
if not SIMULATOR:
    HOST_LIMITS |= {"tf32": 1.1, "bf16x6": 1.5, "tf32x3": 1.5, "fp16x3": 1.8}
PLAN_LIMIT = 0.9  # time of a plan's call, at most, in units of the corresponding call
NEW_SHAPES, NEW_SHAPE_LIMIT_US = 48, 150.0
HOST_WAYS = tuple((library, kind) for library in LIBRARIES for kind in HOST_LIMITS)
NEW_KINDS = (IEEE,) if SIMULATOR else (IEEE, "tf32", "bf16x6", "fp16x3")
PLAN_WAYS = tuple((library, kind) for library in LIBRARIES for kind in NEW_KINDS)


def math_relu(value: Any, row: Any, column: Any, bias: Any) -> Any:
    """Apply a bias per column and ReLU, by way of functions of NumPy and the standard library."""
    return max(np.float32(value + bias[column]), np.float32(0)) * math.erf(np.float32(9))


def host_cases(sizes: Sizes) -> list[Case]:
    """Host time per call, for the arrays of each library: plain calls, plans, and shapes that are new."""
    m, n, k = shape = sizes.host
    count = 8 if sizes.elements > 1 << 20 else 2

    def operands(rig: Rig, library: str, kind: str) -> tuple[Contender, Callable[..., Any], dict[str, Any]]:
        """Return the contender of the public function, the same call without operands, and its operands."""
        options: dict[str, Any] = {}
        precision = kind if kind in PRECISIONS else IEEE
        a, b, c = matrix(rig.flat_a, m, k), matrix(rig.flat_b, k, n), matrix(rig.flat_c, m, n)
        truth = Truth(rig, a, b, precision=precision)
        if kind == BATCH:
            a = rig.flat_a[: count * m * k].reshape(count, m, k)
            b = rig.flat_b[: count * k * n].reshape(count, k, n)
            c = rig.flat_c[: count * m * n].reshape(count, m, n)
            truth = Truth(rig, a[count - 1], b[count - 1])
        elif kind in (EPILOGUE, MATHS):
            bias = rig.random(n)
            truth = Truth(rig, a, b, bias)
            function = bias_relu() if kind == EPILOGUE else math_relu
            options = {"epilogue": function, "epilogue_args": (seen_by(library, bias),)}
        if precision != IEEE:
            options = {"precision": precision}
        x, y, z = (seen_by(library, array) for array in (a, b, c))

        def judge(got: Any) -> tuple[float, str]:
            return truth.judge(got[count - 1] if kind == BATCH else got)

        call = functools.partial(numba_gemm.tiled_sgemm, **options)
        own = Contender([Turn(functools.partial(call, x, y, out=z), c, judge)], 1.0)
        return own, call, {"a": x, "b": y, "out": z}

    def called(library: str, kind: str) -> Case:
        def make(rig: Rig) -> dict[str, Contender]:
            own, _, _ = operands(rig, library, kind)
            return {OURS: own, CUBLAS: replace(both(rig, shape)[1], work=1.0)}

        name = host_name(library, kind)
        return Case("host", name, shape, make, {CUBLAS: 1 / HOST_LIMITS[kind]}, on_host=True)

    def planned(library: str, kind: str) -> Case:
        def make(rig: Rig) -> dict[str, Contender]:
            own, _, given = operands(rig, library, kind)
            made = numba_gemm.plan(m, n, k, like=given["a"], precision=kind)
            turn = replace(own.turns[0], call=functools.partial(made, **given))
            return {OURS: Contender([turn], 1.0), THE_CALL: own}

        return Case("host", plan_name(library, kind), shape, make, {THE_CALL: 1 / PLAN_LIMIT}, on_host=True)

    def new(kind: str) -> Case:
        def make(rig: Rig) -> dict[str, Contender]:
            turns = []
            for i in range(2 * NEW_SHAPES if not SIMULATOR else 2):
                rows = m * 16 + 4 * i if not SIMULATOR else m + i  # one configuration serves them all
                a, b, c = matrix(rig.flat_a, rows, k), matrix(rig.flat_b, k, n), matrix(rig.flat_c, rows, n)
                call = functools.partial(numba_gemm.tiled_sgemm, a, b, out=c, precision=kind)
                turns.append(Turn(call, c, Truth(rig, a, b, precision=kind).judge))
            return {OURS: Contender(turns, 1.0), CUBLAS: replace(both(rig, shape)[1], work=1.0)}

        return Case("host", new_name(kind), shape, make, {CUBLAS: 0.0}, on_host=True, each_once=True)

    return [
        *(called(*way) for way in HOST_WAYS),
        *(planned(*way) for way in PLAN_WAYS),
        *(new(kind) for kind in NEW_KINDS),
    ]


def host_name(library: str, kind: str) -> str:
    """Return the name of a case of the group ``host``."""
    return f"{library} arrays, {kind}"


def plan_name(library: str, kind: str) -> str:
    """Return the name of a case of the group ``host`` that calls a plan."""
    return f"plan, {host_name(library, kind)}"


def new_name(kind: str) -> str:
    """Return the name of a case of the group ``host`` whose shapes are new."""
    return f"new shape, {kind}"


def seen_by(way: str, array: Any) -> Any:
    """View memory as an array of another library; in the simulator, always NumPy.

    Raises
    ------
    ImportError
        if that library is not available.
    """
    if way == "cupy":
        cupy = optional("cupy")
        if cupy is None:
            raise ImportError("CuPy is not here, or finds no GPU")
        return cupy.asarray(array)
    if way == "numba" and not SIMULATOR:
        from numba import cuda

        return cuda.as_cuda_array(array)
    return array


GROUPS = ("seed", "cubes", "random", "odd", "layouts", "vector", "batched", "epilogue", "host")


def cases_of(group: str, sizes: Sizes, shapes: int, seed: int) -> list[Case]:
    """Return the cases of a group."""
    if group == "random":
        return random_cases(sizes, shapes, seed)
    makers = {
        "seed": seed_cases,
        "cubes": cube_cases,
        "odd": odd_cases,
        "layouts": layout_cases,
        "vector": vector_cases,
        "batched": batched_cases,
        "epilogue": epilogue_cases,
        "host": host_cases,
    }
    return makers[group](sizes)


# Measurement.


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
        outcomes = dict.fromkeys((OURS, *case.against), Outcome.failed(error))
    return [row(case, contenders, outcomes, baseline, clocks) for baseline in case.against]


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
    said = [own.note]
    if other.note and other is not own:
        said.append(f"{baseline}: {other.note}")
    return {
        "group": case.group,
        "case": case.name,
        **case.shape._asdict(),
        "layout": case.layout,
        "batch": case.batch,
        "us": own.us,
        "tflops": math.nan if case.on_host else case.batch * gemm_flops(m, n, k) / own.us * 1e-6,
        "baseline": baseline,
        "baseline_us": other.us,
        "ratio": ratio,
        "target": case.against[baseline],
        "status": own.status if own.status != OK else other.status,
        "error_in_bounds": own.error_in_bounds,
        "rounds": own.rounds,
        "sm_clock_mhz": clocks.median_mhz,
        "throttle": clocks.throttle,
        "note": "; ".join(filter(None, said)),
    }


# Verdicts.


def geomean(values: Sequence[float]) -> float:
    """Geometric mean."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {"geomean": geomean, "min": min, "max": max}


@dataclass(frozen=True)
class Line:
    """A target.

    Attributes
    ----------
    what : str
        Its name.
    groups : tuple of str
        Groups of its rows; it is judged if all of them were measured.
    statistic : str
        One of `STATISTICS`.
    at_least, at_most : float
        Limits of the statistic; NaN for none.
    column : str
        Column that the statistic is computed from.
    rows : callable
        Filter for the rows of the groups.
    """

    what: str
    groups: tuple[str, ...]
    statistic: str
    at_least: float = math.nan
    at_most: float = math.nan
    column: str = "ratio"
    rows: Callable[[Mapping[Any, Any]], bool] = lambda row: True


def lines(large: int) -> list[Line]:
    """Return all targets; `large` as in `Sizes`."""
    made = [
        Line("seed shapes, cuBLAS's time over ours", ("seed",), "geomean", 1.0),
        Line(f"seed shapes from {large} on", ("seed",), "min", 1.0, rows=lambda row: row["m"] >= large),
        Line(f"seed shapes below {large}", ("seed",), "min", 0.9, rows=lambda row: row["m"] < large),
        Line("cubes, cuBLAS's time over ours", ("cubes",), "min", 1.0),
        Line(f"seed shapes from {large} on, and cubes", ("seed", "cubes"), "geomean", 1.03, rows=is_large(large)),
        Line("random shapes, cuBLAS's time over ours", ("random",), "geomean", 0.95),
        Line("random shapes, cuBLAS's time over ours", ("random",), "min", 0.75),
        Line("odd shapes, speed over their aligned neighbours'", ("odd",), "min", 0.95),
        Line("layouts TN, NT and TT, NN's time over theirs", ("layouts",), "min", 0.9),
        Line("matrix times vector, cold: share of a copy's bandwidth", ("vector",), "min", 0.85),
        Line("batched, cuBLAS's time over ours", ("batched",), "min", 0.95),
        Line("bias and ReLU, the plain product's time over theirs", ("epilogue",), "min", 0.98),
    ]
    for way in HOST_WAYS:
        least, name = 1 / HOST_LIMITS[way[1]], host_name(*way)
        what = f"host, {name}: torch.matmul's time over ours"
        made.append(Line(what, ("host",), "min", least, rows=is_case(name)))
    for way in PLAN_WAYS:
        name = plan_name(*way)
        made.append(
            Line(f"host, {name}: the call's time over the plan's", ("host",), "min", 1 / PLAN_LIMIT, rows=is_case(name))
        )
    for kind in NEW_KINDS:
        name, limit = new_name(kind), NEW_SHAPE_LIMIT_US
        what = f"host, {name} whose kernel is loaded: microseconds per call"
        made.append(Line(what, ("host",), "max", at_most=limit, column="us", rows=is_case(name)))
    return made


def is_large(large: int) -> Callable[[Mapping[Any, Any]], bool]:
    """Filter for rows with at least this M."""
    return lambda row: bool(row["m"] >= large)


def is_case(name: str) -> Callable[[Mapping[Any, Any]], bool]:
    """Filter for the rows of one case."""
    return lambda row: bool(row["case"] == name)


def frame_of(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return a DataFrame with all columns, in order."""
    return pd.DataFrame(list(rows), columns=list(COLUMNS))


def summary(frame: pd.DataFrame, groups: Iterable[str], large: int) -> pd.DataFrame:
    """Return one row per target of the measured groups; a target is missed if a row failed or there is no row."""
    measured, aimed = set(groups), frame[frame["target"].notna()].to_dict("records")
    judged = []
    for line in lines(large):
        if not measured.issuperset(line.groups):
            continue
        rows = [row for row in aimed if row["group"] in line.groups and line.rows(row)]
        there = [row for row in rows if row["status"] == OK and not math.isnan(row[line.column])]
        values = [float(row[line.column]) for row in there]
        value = STATISTICS[line.statistic](values) if values else math.nan
        low, high = (-math.inf if math.isnan(line.at_least) else line.at_least), line.at_most
        complete = bool(rows) and len(there) == len(rows)
        worst = (max if line.column == "us" else min)(there, key=lambda row: row[line.column], default=None)
        judged.append(
            {
                "what": line.what,
                "statistic": line.statistic,
                "value": value,
                "at_least": line.at_least,
                "at_most": line.at_most,
                "met": complete and low <= value <= (math.inf if math.isnan(high) else high),
                "cases": len(rows),
                "failed": len(rows) - len(there),
                "worst": worst["case"] if worst else "",
            }
        )
    columns = ["what", "statistic", "value", "at_least", "at_most", "met", "cases", "failed", "worst"]
    return pd.DataFrame(judged, columns=columns)


# Command line.


def seed_option(text: str) -> int:
    """Parse the value of ``--seed``."""
    value = int(text)
    if not 0 <= value < 1 << SEED_BITS:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to {(1 << SEED_BITS) - 1}")
    return value


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m numba_gemm.lab.bench.targets",
        allow_abbrev=False,
        description="Measure the public function against its targets; needs a GPU and PyTorch.",
        epilog="Exit status: 0 when every target is met, 1 when not, 2 when nothing can be measured.",
    )
    made.add_argument("--out", type=Path, default=DEFAULT_OUT, metavar="DIR", help=f"default: {DEFAULT_OUT}")
    made.add_argument("--only", nargs="+", choices=GROUPS, metavar="GROUP", help=f"of {', '.join(GROUPS)}")
    made.add_argument("--seed", type=seed_option, help="of shapes and operands (default: a new one, which is printed)")
    made.add_argument("--shapes", type=at_least_one, default=200, metavar="N", help="random shapes (default: 200)")
    made.add_argument(
        "--commit", type=commit_hash, metavar="HASH", help="the commit to record where git cannot tell it"
    )
    made.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    return made


def command_line(groups: Sequence[str], shapes: int, seed: int) -> str:
    """Return the command that repeats a run."""
    only = "" if tuple(groups) == GROUPS else f" --only {' '.join(groups)}"
    return f"python -m numba_gemm.lab.bench.targets{only} --seed {seed} --shapes {shapes}"


def measured(rig: Rig, groups: Sequence[str], sizes: Sizes, shapes: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of every group as soon as they are measured, and print each case."""
    with rig.library.stream() as stream:
        rig.stream = stream
        for group in groups:
            start, rows = time.perf_counter(), []
            for case in cases_of(group, sizes, shapes, rig.seed):
                found = measure(rig, case)
                rows += found
                with contextlib.suppress(Exception):  # if the GPU has failed, the rows say so
                    rig.library.release()  # else memory from the checks is missing for the next case
                print(progress_line(found), flush=True)
            print(f"{group}: {time.perf_counter() - start:.1f} s", flush=True)
            yield rows


def progress_line(rows: Sequence[Mapping[str, Any]]) -> str:
    """Describe the result of a case in one line."""
    first = rows[0]
    said = [f"{row['ratio']:.3f} of {row['baseline']}" for row in rows if not math.isnan(row["ratio"])]
    notes = dict.fromkeys(f"{row['status']}: {row['note']}" for row in rows if row["status"] != OK)
    parts = [f"{first['us']:.5g} us", *said, *notes]
    return f"{first['group']} {first['case']}: {', '.join(parts)}"


def save(frame: pd.DataFrame, judged: pd.DataFrame, how: Mapping[str, Any], folder: Path) -> None:
    """Write the three files."""
    write_files(folder, {ROWS: csv_text(frame), SUMMARY: csv_text(judged), HOW: json_text(how)})


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = parser().parse_args(arguments)
    if SIMULATOR and not options.tiny:
        print("error: the simulator tells no speed: unset NUMBA_ENABLE_CUDASIM where there is a GPU", file=sys.stderr)
        return UNUSABLE
    if not SIMULATOR and (lacking := driver_error()) is not None:
        print(f"error: {lacking} The targets are measured on a GPU.", file=sys.stderr)
        return UNUSABLE
    seed = secrets.randbits(SEED_BITS) if options.seed is None else options.seed
    sizes = TINY if options.tiny else FULL
    groups = [group for group in GROUPS if not options.only or group in options.only]
    make_folder(options.out)
    try:
        rig = Rig(seed, sizes.elements)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return UNUSABLE
    how = environment.describe(
        simulated=SIMULATOR,
        seed=seed,
        cache="hot, but for the group vector",
        command=command_line(groups, options.shapes, seed),
        timing=None if SIMULATOR else GRAPHS,
        stated_commit=options.commit,
    )
    print(f"{environment.device_name(how)}, seed {seed}, commit {how['commit']}", flush=True)
    rows: list[dict[str, Any]] = []
    done: list[str] = []
    judged = summary(frame_of(rows), done, sizes.large)
    for group, found in zip(groups, measured(rig, groups, sizes, options.shapes)):
        rows += found
        done.append(group)
        frame = frame_of(rows)
        judged = summary(frame, done, sizes.large)
        environment.conclude(how, frame["sm_clock_mhz"], frame["throttle"])
        save(frame, judged, how, options.out)  # after every group, so that an interrupted run keeps its results
    print(judged.to_string(index=False, float_format=lambda value: f"{value:.5g}", na_rep="-"))
    print(f"results in {options.out}")
    return ALL_MET if bool(judged["met"].all()) else NOT_MET


if __name__ == "__main__":
    sys.exit(main())
