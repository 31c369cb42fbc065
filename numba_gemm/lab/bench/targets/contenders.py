"""Contenders of most cases: the public function and the library, on operands of one shape."""

from __future__ import annotations

import functools
from typing import Any

import numba_gemm
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.bench.targets.case import Contender, Turn
from numba_gemm.lab.bench.targets.rig import Rig, Truth, matrix
from numba_gemm.models.roofline import gemm_flops


def ours(a: Any, b: Any, c: Any, truth: Truth, work: float, **options: Any) -> Contender:
    """Return the contender that calls the public function."""
    return Contender([Turn(functools.partial(numba_gemm.tiled_sgemm, a, b, out=c, **options), c, truth.judge)], work)


def both(rig: Rig, shape: Shape, layout: str = "NN") -> tuple[Contender, Contender]:
    """Return the contenders that call the public function and cuBLAS on the same operands."""
    m, n, k = shape
    a, b = matrix(rig.flat_a, m, k, layout[0]), matrix(rig.flat_b, k, n, layout[1])
    c = matrix(rig.flat_c, m, n)
    truth, work = Truth(rig, a, b), gemm_flops(m, n, k)
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
