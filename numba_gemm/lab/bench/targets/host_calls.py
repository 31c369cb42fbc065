"""Cases of the group ``host``: host time of calls, of plans and of new shapes, and their limits."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np
from numba import cuda

import numba_gemm
from numba_gemm.gemm.precision import IEEE, PRECISIONS
from numba_gemm.lab.bench.buffers import optional
from numba_gemm.lab.bench.results import CUBLAS
from numba_gemm.lab.bench.targets.case import OURS, Case, Contender, Rig, Truth, Turn, bias_relu, both
from numba_gemm.lab.bench.targets.sizes import Sizes
from numba_gemm.simulator.switch import SIMULATOR

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
    """Return cases of host time per call, for the arrays of each library: calls, plans, and new shapes."""
    shape, large = sizes.host, sizes.elements > 1 << 20
    count = 8 if large else 2

    def operands(rig: Rig, library: str, kind: str) -> tuple[Contender, tuple[Any, ...]]:
        """Return the contender of the public function, and its operands."""
        options: dict[str, Any] = {}
        precision = kind if kind in PRECISIONS else IEEE
        a, b, c = rig.operands(shape)
        truth = Truth(rig, a, b, precision=precision)
        if kind == BATCH:
            a, b, c = rig.batch(count, shape)
            truth = Truth(rig, a[count - 1], b[count - 1])
        elif kind in (EPILOGUE, MATHS):
            bias = rig.random(shape.n)
            truth = Truth(rig, a, b, bias)
            function = bias_relu if kind == EPILOGUE else math_relu
            options = {"epilogue": function, "epilogue_args": (seen_by(library, bias),)}
        if precision != IEEE:
            options = {"precision": precision}
        x, y, z = (seen_by(library, array) for array in (a, b, c))

        def judge(got: Any) -> tuple[float, str]:
            return truth.judge(got[count - 1] if kind == BATCH else got)

        call = functools.partial(numba_gemm.tiled_sgemm, x, y, out=z, **options)
        return Contender([Turn(call, c, judge)], 1.0), (x, y, z)

    def called(library: str, kind: str) -> Case:
        def make(rig: Rig) -> dict[str, Contender]:
            return {OURS: operands(rig, library, kind)[0], CUBLAS: replace(both(rig, shape)[1], work=1.0)}

        return Case("host", host_name(library, kind), shape, make, (CUBLAS,), on_host=True)

    def planned(library: str, kind: str) -> Case:
        def make(rig: Rig) -> dict[str, Contender]:
            own, (a, b, c) = operands(rig, library, kind)
            made = numba_gemm.plan(*shape, like=a, precision=kind)
            turn = replace(own.turns[0], call=functools.partial(made, a, b, out=c))
            return {OURS: Contender([turn], 1.0), THE_CALL: own}

        return Case("host", plan_name(library, kind), shape, make, (THE_CALL,), on_host=True)

    def new(kind: str) -> Case:
        def make(rig: Rig) -> dict[str, Contender]:
            turns = []
            # The first half loads the kernels of the second. No shape has as many tiles as another: their extents lie
            # between different multiples of 32, so that none shares the choice of an earlier one.
            steps = [64 * i + 4 * late for late in (False, True) for i in range(NEW_SHAPES)] if large else [0, 1]
            for step in steps:
                a, b, c = rig.operands(shape._replace(m=(16 if large else 1) * shape.m + step))
                call = functools.partial(numba_gemm.tiled_sgemm, a, b, out=c, precision=kind)
                turns.append(Turn(call, c, Truth(rig, a, b, precision=kind).judge))
            return {OURS: Contender(turns, 1.0), CUBLAS: replace(both(rig, shape)[1], work=1.0)}

        return Case("host", new_name(kind), shape, make, (CUBLAS,), on_host=True, each_once=True)

    return [
        *(called(*way) for way in HOST_WAYS),
        *(planned(*way) for way in PLAN_WAYS),
        *(new(kind) for kind in NEW_KINDS),
    ]


def host_name(library: str, kind: str) -> str:
    """Return the name of a case of calls."""
    return f"{library} arrays, {kind}"


def plan_name(library: str, kind: str) -> str:
    """Return the name of a case of a plan's calls."""
    return f"plan, {host_name(library, kind)}"


def new_name(kind: str) -> str:
    """Return the name of a case whose shapes are new."""
    return f"new shape, {kind}"


def seen_by(way: str, array: Any) -> Any:
    """View memory as an array of another library, which must be available; in the simulator, always NumPy."""
    if way == "cupy":
        if (cupy := optional("cupy")) is None:
            raise ImportError("CuPy is not here, or finds no GPU")
        return cupy.asarray(array)
    if way == "numba" and not SIMULATOR:
        return cuda.as_cuda_array(array)
    return array
