"""The one table of products that every stage must get right, and how a case of it is run on hardware or simulator."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_gemm.kernels.ladder import STAGES, TileConfig
from numba_gemm.kernels.stage import IEEE, Stage
from numba_gemm.models.accuracy import Comparison, compare, reference
from numba_gemm.runtime.device import synchronize
from numba_gemm.runtime.launch import launch
from numba_gemm.runtime.matrix import Matrix
from numba_gemm.simulator.switch import SIMULATOR
from support.operands import NAN, filled

STAGES_AND_DEFAULTS = [(stage, stage.configs[0]) for stage in STAGES.values()]
GUARD = np.float32(-77.25)  # value around C; a kernel that changes it has written outside


@dataclass(frozen=True)
class Place:
    """Placement of a matrix in its buffer: by rows or by columns, with spacing and direction."""

    by_columns: bool = False
    extra: int = 0  # floats between the end of a line and the next line, beyond the guard
    offset: int = 0  # floats before the first line
    step: int = 1  # floats from an element of a line to the next; negative runs both axes backwards
    aligned: bool = False  # lines are multiples of four floats apart

    def view(self, rows: int, cols: int, fill: np.float32) -> tuple[np.ndarray, np.ndarray]:
        """A buffer full of `fill`, and the (rows, cols) view of it, with a guard around each line."""
        lines, length = (cols, rows) if self.by_columns else (rows, cols)
        pitch = length * abs(self.step) + 8 + self.extra
        pitch += -pitch % 4 if self.aligned else 0
        buffer = np.full(pitch * (lines + 2) + 8 + self.offset, fill, np.float32)
        shift = -(buffer.ctypes.data // 4) % 4  # to the first multiple of 16 bytes
        view = np.lib.stride_tricks.as_strided(
            buffer[shift + pitch - pitch % 4 + self.offset :], (lines, length), (4 * pitch, 4 * abs(self.step))
        )
        if self.step < 0:
            view = view[::-1, ::-1]
        return buffer, view.T if self.by_columns else view


ROWS = Place()
# Layouts of A, B and C. The first is what 128-bit accesses need, whenever the extents allow it.
LAYOUTS: dict[str, tuple[Place, Place, Place]] = {
    "rows": (ROWS, ROWS, ROWS),
    "A by columns": (Place(by_columns=True), ROWS, ROWS),
    "B by columns": (ROWS, Place(by_columns=True), ROWS),
    "C by columns": (ROWS, ROWS, Place(by_columns=True)),
    "slices of wider rows": (Place(extra=12), Place(extra=4), Place(extra=8)),
    "one float off": (Place(offset=1), Place(extra=1), Place(offset=3, extra=2)),
    "backwards and spaced": (Place(step=-1), Place(step=2), Place(step=-2)),
}
ALPHA_BETA = ((1.0, 0.0), (0.5, -2.0), (-1.0, 1.0), (1.0, 1.0), (2.0, 0.0))


def shapes(config: TileConfig) -> list[tuple[int, int, int]]:
    """Extents (m, n, k) around the edges of a configuration's tiles."""
    bm, bn, bk = config.BM, config.BN, max(config.BK, 4)
    return [
        (1, 1, 1),
        (bm, bn, bk),
        (bm - 1, bn - 1, max(bk - 1, 1)),
        (bm + 1, bn + 1, bk + 1),
        (2 * bm, max(bn, 4), 2 * bk),  # aligned by rows, also for tiles of one column
        (bm, 2 * bn, 3 * bk),
        (13, 17, 15),
        (29, 7, 19),
        (1, 2 * bn + 3, bk),
        (2 * bm + 3, 1, bk + 2),
        (4, 4, 5 * bk + 3),
        (bm // 2 + 4, bn // 2 + 4, 2 * bk + 4),
        (5, 6, 0),
        (0, 5, 3),
        (5, 0, 3),
    ]


@dataclass(frozen=True)
class Case:
    """One product of the table."""

    shape: tuple[int, int, int]
    layout: str
    alpha: float
    beta: float

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.layout} alpha={self.alpha} beta={self.beta}"


def cases(config: TileConfig, halves: tuple[int, ...] = (0, 1)) -> list[Case]:
    """Every shape in every layout, with an alpha and beta such that every pair of the three occurs.

    Halves divide this as the colours of a chessboard: each has every shape in at least three layouts.
    """
    table = itertools.product(enumerate(shapes(config)), enumerate(LAYOUTS))
    return [
        Case(shape, layout, *ALPHA_BETA[(i + j) % len(ALPHA_BETA)])
        for (i, shape), (j, layout) in table
        if (i + j) % 2 in halves
    ]


@dataclass
class Operand:
    """A matrix in its buffer, and where the launcher finds it."""

    buffer: np.ndarray
    view: np.ndarray
    matrix: Matrix
    on_device: Any = None

    @classmethod
    def place(cls, buffer: np.ndarray, view: np.ndarray) -> Operand:
        address, device_array = view.ctypes.data, None
        if not SIMULATOR:
            from numba import cuda

            device_array = cuda.to_device(buffer)
            address += device_array.device_ctypes_pointer.value - buffer.ctypes.data
        strides = view.strides
        return cls(
            buffer, view, Matrix(address, *view.shape, *strides, 0, view if SIMULATOR else device_array), device_array
        )

    def fetch(self) -> None:
        """Bring the buffer back from the device."""
        if self.on_device is not None:
            self.on_device.copy_to_host(self.buffer)


@dataclass(frozen=True)
class Outcome:
    """Result of a case."""

    comparison: Comparison
    guard_kept: bool
    aligned: bool
    result: np.ndarray

    @property
    def ok(self) -> bool:
        return self.comparison.ok and self.guard_kept

    def __str__(self) -> str:
        return f"{self.comparison}{'' if self.guard_kept else '; WROTE OUTSIDE OF C'}"


def run(
    stage: Stage, config: TileConfig, case: Case, seed: int = 0, swapped: bool = False, precision: str = IEEE
) -> Outcome:
    """Run one case with fresh random operands, C holding NaN where beta is 0, and compare it with float64.

    If `swapped`, the kernel computes the transpose.
    """
    m, n, k = case.shape
    a_place, b_place, c_place = LAYOUTS[case.layout]
    a_buffer, a = a_place.view(m, k, NAN)  # the values around A and B must not reach the result
    b_buffer, b = b_place.view(k, n, NAN)
    c_buffer, c = c_place.view(m, n, GUARD)
    a[...], b[...] = filled(m, k, seed), filled(k, n, seed + 1)
    before = filled(m, n, seed + 2)
    c[...] = NAN if case.beta == 0 else before
    mine = np.zeros(c_buffer.shape, bool)
    written = np.lib.stride_tricks.as_strided(
        mine[(c.ctypes.data - c_buffer.ctypes.data) // 4 :], c.shape, [s // 4 for s in c.strides]
    )
    written[...] = True
    operands = [Operand.place(*pair) for pair in ((a_buffer, a), (b_buffer, b), (c_buffer, c))]
    matrices = [operand.matrix for operand in operands]
    options = {"swapped": swapped, "precision": precision}
    launch(stage, config, case.alpha, matrices[0], matrices[1], case.beta, matrices[2], **options)
    synchronize()
    operands[2].fetch()
    expected, scale = reference(case.alpha, a, b, case.beta, before)
    guard_kept = bool(np.all(c_buffer[~mine] == GUARD))
    comparison = compare(c, expected, scale, k, alpha=case.alpha, precision=precision)
    return Outcome(comparison, guard_kept, all_aligned(matrices), c.copy())


def all_aligned(matrices: Iterable[Matrix]) -> bool:
    """Return True if 128-bit accesses reach every element of the operands."""
    return all(matrix.layout.aligned for matrix in matrices)
