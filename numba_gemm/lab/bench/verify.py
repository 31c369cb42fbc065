"""Whether a product is right: against float64, element by element, before anything is timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_gemm.lab.bench.buffers import DeviceBuffers, HostLibrary
from numba_gemm.models import accuracy

PANEL_ELEMENTS = 1 << 25  # 256 MiB of float64 at a time


@dataclass(frozen=True)
class Panel:
    """Some rows of the reference: the product in float64 and the scale of its errors."""

    rows: slice
    expected: Any
    scale: Any


class Reference:
    """The float64 product of a set of operands, kept for all the contenders of a shape.

    It is computed where the operands lie (FP64 cuBLAS, through the library that allocated them), in panels of rows,
    so that neither it nor a comparison needs much more memory than its result. The scale is kept in float32:
    it is a sum of positive terms, and its last bits say nothing.
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
        """Judge a product of a precision by its worst element.

        The device only finds which row holds the largest ratio of error to scale; `accuracy.compare` judges that row
        on the host, so that the bound is stated once.
        """
        return worst(self._worst_of(*found, precision) for found in self._errors(c))

    def judge(self, c: Any, precision: str) -> tuple[accuracy.Comparison, float, float]:
        """`compare`, and the median and maximum of the errors in units of the scale.

        The median is that of panels' medians if there are several; one has 2^25 elements of rows of C, or of A.
        """
        verdicts, medians, largest = [], [], []
        for panel, product, error in self._errors(c):
            verdicts.append(self._worst_of(panel, product, error, precision))
            medians.append(self.library.median(error))
            largest.append(float(error.max()))
        return worst(verdicts), float(np.median(medians)), max(largest)

    def _errors(self, c: Any) -> Iterator[tuple[Panel, Any, Any]]:
        """Each panel with the product's rows, and their errors in units of the scale."""
        product = self.library.computable(c)
        for panel in self.panels:
            rows = product[panel.rows]
            with np.errstate(invalid="ignore", divide="ignore"):
                yield panel, rows, abs(self.library.float64(rows) - panel.expected) / panel.scale

    def _worst_of(self, panel: Panel, product: Any, error: Any, precision: str) -> accuracy.Comparison:
        # The first NaN, or, where there is none, the largest error: argmax of all three libraries agrees on both.
        row = int(error.argmax()) // int(error.shape[1])
        one = slice(row, row + 1)
        host = self.library.to_host
        judged = accuracy.compare(
            host(product[one]),
            host(panel.expected[one]),
            host(panel.scale[one]).astype(np.float64),
            self.k,
            precision,
        )
        return dataclasses.replace(judged, row=panel.rows.start + row)


def worst(verdicts: Iterable[accuracy.Comparison]) -> accuracy.Comparison:
    """The verdict of the largest error; of a product that has rows."""
    return max(verdicts, key=lambda verdict: verdict.in_bounds)
