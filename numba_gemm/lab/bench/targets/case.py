"""Cases, the contenders that are measured together in each, and the memory and reference that they share."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numba import cuda, float32

import numba_gemm
from numba_gemm.gemm.precision import IEEE
from numba_gemm.lab.bench.buffers import DeviceBuffers, HostLibrary, TorchLibrary, optional, uniform
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.bench.verify import Reference
from numba_gemm.lab.harness import environment
from numba_gemm.lab.harness.command import SEED_BITS
from numba_gemm.lab.harness.experiment import Unavailable
from numba_gemm.models.roofline import gemm_flops
from numba_gemm.simulator.switch import SIMULATOR

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


# Limit on the rows of C that are checked, in addition to the first and the last: one in 64 at the largest shape.
CHECKED_ROWS = 256


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
                raise Unavailable("PyTorch is not here, or finds no GPU: there is no cuBLAS to compare with")
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


def ours(a: Any, b: Any, c: Any, truth: Truth, work: float, **options: Any) -> Contender:
    """Return the contender that calls the public function."""
    return Contender([Turn(functools.partial(numba_gemm.tiled_sgemm, a, b, out=c, **options), c, truth.judge)], work)


def both(rig: Rig, shape: Shape, layout: str = "NN") -> tuple[Contender, Contender]:
    """Return the contenders that call the public function and cuBLAS on the same operands."""
    a, b, c = rig.operands(shape, layout)
    truth, work = Truth(rig, a, b), gemm_flops(*shape)
    theirs = Contender([Turn(functools.partial(rig.multiply, a, b, out=c), c, truth.judge)], work)
    return ours(a, b, c, truth, work), theirs


@cuda.jit(device=True)
def bias_relu(value: Any, row: Any, column: Any, bias: Any) -> Any:
    """Epilogue: a bias per column, then ReLU."""
    return max(value + bias[column], float32(0))
