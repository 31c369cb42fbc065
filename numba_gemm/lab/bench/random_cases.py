"""Random shapes, layouts and alignments of products, and their descriptions before there are matrices."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from numba_gemm.arrays import ArrayKind, Operand
from numba_gemm.device.units import FLOAT32_BYTES, ceil_div
from numba_gemm.gemm.compile_progress import fetch_with_progress
from numba_gemm.gemm.fp32_auto import product_for, resolved
from numba_gemm.gemm.heuristics import Choice
from numba_gemm.gemm.request import Request
from numba_gemm.kernels.product import FLOAT32, LAYOUTS, Layout, Product
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.models.roofline import gemm_flops
from numba_gemm.runtime.device import DeviceProperties, current_device
from numba_gemm.simulator.switch import SIMULATOR

__all__ = ["fetch_kernels", "operand", "pitch", "product_of", "random_cases"]

MOST_FLOPS = 4e12


def random_cases(count: int, seed: int, high: int) -> list[tuple[Shape, str, bool]]:
    """Return shapes with log-uniform extents from 1 to `high`, their layouts, and whether rows are aligned."""
    rng, cases = np.random.default_rng(seed), list[tuple[Shape, str, bool]]()
    while len(cases) < count:
        shape = Shape(*np.exp(rng.uniform(0.0, math.log(high + 1), 3)).astype(int).tolist())
        if gemm_flops(*shape) <= MOST_FLOPS:
            cases.append((shape, LAYOUTS[rng.integers(4)], bool(rng.random() >= 1 / 3)))
    return cases


def pitch(across: int, aligned: bool) -> int:
    """Return the elements from one row of a stored matrix to the next: whole vectors, or an odd number."""
    return 4 * ceil_div(across, 4) if aligned else across // 2 * 2 + 1


def operand(name: str, rows: int, cols: int, stored: str, aligned: bool) -> Operand:
    """Return an operand without memory, as `random_products.matrix` lays one out."""
    step = FLOAT32_BYTES * pitch(cols if stored == "N" else rows, aligned)
    strides = (step, FLOAT32_BYTES) if stored == "N" else (FLOAT32_BYTES, step)
    return Operand(name, ArrayKind(), None, FLOAT32, (rows, cols), strides, 0 if aligned else FLOAT32_BYTES)


def product_of(
    m: int, n: int, k: int, layout: str, aligned: bool, precision: str, gpu: DeviceProperties
) -> tuple[Request, Product]:
    """Return the request of a product on the current device, and its description on a GPU."""
    a, b = operand("a", m, k, layout[0], aligned), operand("b", k, n, layout[1], aligned)
    c, new = operand("out", m, n, "N", aligned), product_for(a, b)
    precision = resolved(precision, new, gpu)
    request = Request(
        *(a, b, c, None, [], None, (a.shape, b.shape), c.shape, k, 1.0, 0.0, "auto", precision),
        device=current_device(),
        stream=None,
    )
    row_stride, col_stride = c.strides
    return request, new._replace(c=Layout(m, n, row_stride, col_stride, c.pointer))


def fetch_kernels(wanted: Iterable[tuple[Choice, Product]], gpu: DeviceProperties) -> None:
    """Compile the kernels of choices on all cores, or find them in the cache; on the simulator, do nothing."""
    if not SIMULATOR:
        kernels = dict.fromkeys(kernel for choice, product in wanted for kernel in choice.kernels(product, gpu.gpu))
        fetch_with_progress([(kernel, gpu.cc) for kernel in kernels], None, False)
