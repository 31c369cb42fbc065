"""Verification against float64, element by element, before anything is timed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_gemm.lab.bench.buffers import DeviceBuffers, HostLibrary
from numba_gemm.models import accuracy
from numba_gemm.runtime.device import synchronize

PANEL_ELEMENTS = 1 << 25  # 256 MiB of float64 at a time


@dataclass(frozen=True)
class Panel:
    """Some rows of the reference: the float64 result and the scale of its errors."""

    rows: slice
    expected: Any
    scale: Any


class Reference:
    """Float64 reference of a set of operands, shared by all contenders of a shape.

    It is computed where the operands are (FP64 cuBLAS, through the library that allocated them), in panels of rows, to
    save memory. The scale is kept in float32: it is a sum of positive terms, so rounding hardly changes it.
    """

    def __init__(self, buffers: DeviceBuffers) -> None:
        self.library: HostLibrary = buffers.library
        self.k = buffers.shape.k
        self.panels = tuple(self._panels(buffers))

    def _panels(self, buffers: DeviceBuffers) -> Iterator[Panel]:
        library = self.library
        m, n, k = buffers.shape
        a = library.computable(buffers.a)
        b = library.float64(library.computable(buffers.b))
        abs_b = abs(b)
        step = max(1, PANEL_ELEMENTS // max(n, k))
        for start in range(0, m, step):
            rows = slice(start, min(m, start + step))
            wide = library.float64(a[rows])
            yield Panel(rows, wide @ b, library.float32(abs(wide) @ abs_b))

    def compare(self, c: Any, precision: str = "ieee") -> accuracy.Comparison:
        """Judge the result of a precision by its worst element."""
        return worst(self._worst_of(*found, precision) for found in self._errors(c))

    def judge(self, c: Any, precision: str) -> tuple[accuracy.Comparison, float, float]:
        """Call `compare`; return its verdict, and the median and maximum of the errors relative to the scale.

        With several panels, the median is that of the panels' medians; a panel has up to 2^25 elements of C or of A.
        """
        verdicts, medians, largest = [], [], []
        for panel, product, error in self._errors(c):
            verdicts.append(self._worst_of(panel, product, error, precision))
            medians.append(self.library.median(error))
            largest.append(float(error.max()))
        return worst(verdicts), float(np.median(medians)), max(largest)

    def _errors(self, c: Any) -> Iterator[tuple[Panel, Any, Any]]:
        """Yield each panel with the corresponding rows of the result and their errors relative to the scale."""
        product = self.library.computable(c)
        for panel in self.panels:
            rows = product[panel.rows]
            with np.errstate(invalid="ignore", divide="ignore"):
                yield panel, rows, abs(self.library.float64(rows) - panel.expected) / panel.scale

    def _worst_of(self, panel: Panel, product: Any, error: Any, precision: str) -> accuracy.Comparison:
        """Judge the row of the largest error on the host, by the definition of the bound that `models` has."""
        # The first NaN or, without any, the largest error: argmax of all three libraries agrees on both.
        row = int(error.argmax()) // int(error.shape[1])
        one = slice(row, row + 1)
        mine, expected, scale = (self.library.to_host(x[one]) for x in (product, panel.expected, panel.scale))
        judged = accuracy.compare(mine, expected, scale.astype(np.float64), self.k, precision)
        return dataclasses.replace(judged, row=panel.rows.start + row)


def call_on_nan(library: HostLibrary, out: Any, call: Callable[[int], object], stream: int) -> float:
    """Call once on an output filled with NaN; return the seconds until its result is there."""
    library.fill_nan(out)
    synchronize(stream)
    begin = time.perf_counter()
    call(stream)
    synchronize(stream)
    return time.perf_counter() - begin


def worst(verdicts: Iterable[accuracy.Comparison]) -> accuracy.Comparison:
    """Return the verdict of the largest error; the result must have rows."""
    return max(verdicts, key=lambda verdict: verdict.in_bounds)
