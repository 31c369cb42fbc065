"""Cases of every group. Their contenders are created only when they are measured."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import numba_gemm
from numba_gemm.lab.bench.buffers import FLOAT32_BYTES, operand_bytes
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.bench.results import CUBLAS
from numba_gemm.lab.bench.targets.case import (
    COPY,
    OURS,
    Case,
    Contender,
    Rig,
    Truth,
    Turn,
    bias_relu,
    both,
    matrix,
    ours,
)
from numba_gemm.lab.bench.targets.host_calls import host_cases
from numba_gemm.lab.bench.targets.sizes import LAYOUTS, Sizes, random_shapes
from numba_gemm.lab.bench.targets.verdicts import least_ratio
from numba_gemm.models.roofline import gemm_flops

RANDOM_ROUNDS = 7


def product_case(
    group: str, shape: Shape, layout: str = "NN", neighbour: tuple[Shape, str] | None = None, rounds: int | None = None
) -> Case:
    """Return a case of the public function against cuBLAS, or against itself at another shape and layout."""
    odd = neighbour is not None and neighbour[0] != shape
    name = "" if neighbour is None else f"{OURS}, {neighbour[0] if odd else neighbour[1]}"

    def make(rig: Rig) -> dict[str, Contender]:
        own, theirs = both(rig, shape, layout)
        other = {} if neighbour is None else {name: both(rig, *neighbour)[0]}
        return {OURS: own, **other, CUBLAS: theirs}

    if neighbour is None:
        return Case(group, str(shape), shape, make, (CUBLAS,), layout, rounds=rounds)
    return Case(group, f"{shape} {layout}", shape, make, (name, CUBLAS), layout, rounds=rounds)


def vector_cases(sizes: Sizes) -> list[Case]:
    """Return cases of a large matrix times a thin one, on either side, as a share of a copy's bandwidth.

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

        return Case("vector", str(shape), shape, make, (COPY, CUBLAS))

    return [case(thin, n_is_thin) for n_is_thin in (True, False) for thin in sizes.thin]


def same(source: Any, copy: Any) -> tuple[float, str]:
    """Compare a copy with its source."""
    return (0.0, "") if bool((source == copy).all()) else (math.inf, "the copy differs")


def batched_cases(sizes: Sizes) -> list[Case]:
    """Return the case of a batch in one call."""
    count, shape = sizes.batch, sizes.batched

    def make(rig: Rig) -> dict[str, Contender]:
        a, b, c = rig.batch(count, shape)
        truths = [Truth(rig, a[index], b[index]) for index in range(count)]

        def judge(got: Any) -> tuple[float, str]:
            verdicts = [truth.judge(got[index]) for index, truth in enumerate(truths)]
            worst = max(range(count), key=lambda index: verdicts[index][0])
            error, note = verdicts[worst]
            return error, note and f"product {worst}: {note}"

        work = count * gemm_flops(*shape)
        calls = {OURS: numba_gemm.tiled_sgemm, CUBLAS: rig.multiply_batch}
        return {
            name: Contender([Turn(functools.partial(call, a, b, out=c), c, judge)], work)
            for name, call in calls.items()
        }

    return [Case("batched", f"{count} of {shape}", shape, make, (CUBLAS,), batch=count)]


def epilogue_cases(sizes: Sizes) -> list[Case]:
    """Return the case of bias and ReLU as an epilogue, against the same call without an epilogue."""
    shape, plain = sizes.epilogue, f"{OURS}, plain"

    def make(rig: Rig) -> dict[str, Contender]:
        bias = rig.random(shape.n)
        a, b, c = rig.operands(shape)
        options = {"epilogue": bias_relu, "epilogue_args": (bias,)}
        own = ours(a, b, c, Truth(rig, a, b, bias), gemm_flops(*shape), **options)
        return {OURS: own, plain: both(rig, shape)[0]}

    return [Case("epilogue", f"{shape} bias and ReLU", shape, make, (plain,))]


GROUPS = ("seed", "cubes", "random", "odd", "layouts", "vector", "batched", "epilogue", "host")


def cases_of(group: str, sizes: Sizes, shapes: int, seed: int) -> list[Case]:
    """Return the cases of a group, with their targets; `shapes` is the number of random ones."""
    products = {
        "seed": [product_case("seed", shape) for shape in sizes.seed],
        "cubes": [product_case("cubes", shape) for shape in sizes.cubes],
        "random": [
            product_case("random", shape, rounds=RANDOM_ROUNDS)
            for shape in random_shapes(shapes, seed, sizes.low, sizes.high)
        ],
        # Shapes that do not fit tiles and wide accesses, against aligned neighbours.
        "odd": [
            product_case("odd", shape, layout, (aligned, layout))
            for shape, aligned, layouts in sizes.odd
            for layout in layouts
        ],
        "layouts": [product_case("layouts", sizes.layouts, layout, (sizes.layouts, "NN")) for layout in LAYOUTS[1:]],
    }
    others = {"vector": vector_cases, "batched": batched_cases, "epilogue": epilogue_cases, "host": host_cases}
    found = products[group] if group in products else others[group](sizes)
    return [replace(case, target=least_ratio(case, sizes.large)) for case in found]
