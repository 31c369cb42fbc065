"""Shapes and cases of every group. Contenders are created only when they are measured."""

import functools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

import numba_gemm
from numba_gemm.gemm.precision import IEEE, PRECISIONS
from numba_gemm.lab.bench.buffers import FLOAT32_BYTES, operand_bytes, optional
from numba_gemm.lab.bench.cases import ON_GPU, Shape
from numba_gemm.lab.bench.results import CUBLAS
from numba_gemm.lab.bench.targets import verdicts
from numba_gemm.lab.bench.targets.case import (
    OURS,
    Case,
    Contender,
    Rig,
    Truth,
    Turn,
    bias_relu,
    both,
    cublas,
    matrix,
    ours,
)
from numba_gemm.models.roofline import gemm_flops
from numba_gemm.simulator.switch import SIMULATOR

COPY = "device copy"  # baseline of bandwidth
LAYOUTS = ("NN", "TN", "NT", "TT")  # one letter each for A and B; T is the transpose of a row-major matrix
CUBES = tuple(Shape(extent, extent, extent) for extent in (2048, 3072, 4096, 6144, 8192, 12288, 16384))


class Sizes(NamedTuple):
    """Shapes of every group; by default those that have targets."""

    seed: tuple[Shape, ...] = ON_GPU["seed"]
    cubes: tuple[Shape, ...] = CUBES
    large: int = 2048  # M from which a seed shape has the higher target
    low: int = 64  # least and largest extent of random shapes
    high: int = 8192
    odd: tuple[tuple[Shape, Shape, tuple[str, ...]], ...] = (  # not of tiles; aligned neighbours; layouts of both
        (Shape(4093, 4099, 1021), Shape(4096, 4096, 1024), ("NN",)),
        (Shape(2047, 2049, 1023), Shape(2048, 2048, 1024), LAYOUTS),
        (Shape(3001, 3007, 2011), Shape(3000, 3008, 2012), LAYOUTS),
        (Shape(8191, 8193, 1025), Shape(8192, 8192, 1024), LAYOUTS),
        (Shape(5003, 1999, 3001), Shape(5004, 2000, 3000), LAYOUTS),
    )
    layouts: Shape = Shape(4096, 4096, 4096)
    epilogue: Shape = Shape(4096, 4096, 4096)
    host: Shape = Shape(64, 64, 64)
    host_tensor: Shape = Shape(1024, 1024, 1024)  # in precisions of tensor cores; small products take one kernel
    vector: int = 16384  # extent of the square matrix
    thin: tuple[int, ...] = (1, 4, 16)  # small extents of the other operand
    batch: int = 64  # number of entries
    batched: Shape = Shape(512, 512, 512)  # of each entry
    elements: int = 1 << 28  # of the largest operand


FULL = Sizes()
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
    host_tensor=Shape(8, 8, 8),
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


RANDOM_ROUNDS = 7
NEW_SHAPES = 48


def product_case(
    group: str, shape: Shape, layout: str = "NN", neighbour: tuple[Shape, str] | None = None, rounds: int | None = None
) -> Case:
    """Return a case of the public function against cuBLAS, or against itself at another shape and layout."""
    odd = neighbour is not None and neighbour[0] != shape
    name = "" if neighbour is None else f"{OURS}, {neighbour[0] if odd else neighbour[1]}"

    def make(rig: Rig) -> dict[str, Contender]:
        other = {} if neighbour is None else {name: both(rig, *neighbour)[OURS]}
        return both(rig, shape, layout) | other

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
            turns: dict[str, list[Turn]] = {OURS: [], COPY: []}
            products = list[tuple[Any, Any, Any, Any]]()
            for flat in (rig.flat_a, rig.flat_b):
                large = matrix(flat, extent, extent)
                a, b = (large, matrix(small, extent, thin)) if n_is_thin else (matrix(small, thin, extent), large)
                truth = Truth(rig, a, b)
                turns[OURS] += ours(a, b, c, truth, 0.0).turns
                products.append((a, b, c, truth.judge))
                to = matrix(rig.flat_c, extent, extent)
                turns[COPY].append(Turn(functools.partial(rig.copy, to, large), to, functools.partial(same, large)))
            work, copied = float(operand_bytes(shape)), 2.0 * FLOAT32_BYTES * extent * extent  # bytes read and written
            own = {OURS: Contender(turns[OURS], work), COPY: Contender(turns[COPY], copied)}
            return own | cublas(rig, products, work)

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
        own = Turn(functools.partial(numba_gemm.tiled_sgemm, a, b, out=c), c, judge)
        return {OURS: Contender([own], work)} | cublas(rig, [(a, b, c, judge)], work)

    return [Case("batched", f"{count} of {shape}", shape, make, (CUBLAS,), batch=count)]


def epilogue_cases(sizes: Sizes) -> list[Case]:
    """Return the case of bias and ReLU as an epilogue, against the same call without an epilogue."""
    shape, plain = sizes.epilogue, f"{OURS}, plain"

    def make(rig: Rig) -> dict[str, Contender]:
        bias = rig.random(shape.n)
        a, b, c = rig.operands(shape)
        options = {"epilogue": bias_relu(), "epilogue_args": (bias,)}
        own = ours(a, b, c, Truth(rig, a, b, bias), gemm_flops(*shape), **options)
        return {OURS: own, plain: both(rig, shape)[OURS]}

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
    return [replace(case, target=verdicts.least_ratio(case, sizes.large)) for case in found]


def math_relu(value: Any, row: Any, column: Any, bias: Any) -> Any:
    """Apply a bias per column and ReLU, by way of functions of NumPy and the standard library."""
    return max(np.float32(value + bias[column]), np.float32(0)) * math.erf(np.float32(9))


def host_shape(sizes: Sizes, kind: str) -> Shape:
    """Return the shape at which host times of a kind of calls are measured."""
    return sizes.host_tensor if kind in PRECISIONS and kind != IEEE else sizes.host


def new_shapes(sizes: Sizes, kind: str) -> list[Shape]:
    """Return shapes that are new one after another; the first half loads the kernels of the second.

    No shape has as many tiles as another: their extents lie between different multiples of 32, so that none shares the
    choice of an earlier one.
    """
    large = sizes.elements > 1 << 20
    steps = [64 * i + 4 * late for late in (False, True) for i in range(NEW_SHAPES)] if large else [0, 1]
    return [host_shape(sizes, kind)._replace(m=(16 if large else 1) * sizes.host.m + step) for step in steps]


def host_cases(sizes: Sizes) -> list[Case]:
    """Return cases of host time per call, for the arrays of each library: calls, plans, and new shapes.

    Host time is compared with one call of one library, ``torch.matmul(out=)``, not with the faster cuBLAS.
    """
    count = 8 if sizes.elements > 1 << 20 else 2

    def operands(rig: Rig, library: str, kind: str) -> tuple[Contender, tuple[Any, ...]]:
        """Return the contender of the public function, and its operands."""
        precision = kind if kind in PRECISIONS else IEEE
        options: dict[str, Any] = {} if precision == IEEE else {"precision": precision}
        shape = host_shape(sizes, kind)
        a, b, c = rig.operands(shape)
        truth = Truth(rig, a, b, precision=precision)
        if kind == verdicts.BATCH:
            a, b, c = rig.batch(count, shape)
            truth = Truth(rig, a[count - 1], b[count - 1])
        elif kind in (verdicts.EPILOGUE, verdicts.MATHS):
            bias = rig.random(shape.n)
            truth = Truth(rig, a, b, bias)
            function = bias_relu() if kind == verdicts.EPILOGUE else math_relu
            options = {"epilogue": function, "epilogue_args": (seen_by(library, bias),)}
        x, y, z = (seen_by(library, array) for array in (a, b, c))

        def judge(got: Any) -> tuple[float, str]:
            return truth.judge(got[count - 1] if kind == verdicts.BATCH else got)

        call = functools.partial(numba_gemm.tiled_sgemm, x, y, out=z, **options)
        return Contender([Turn(call, c, judge)], 1.0), (x, y, z)

    def called(name: str, library: str, kind: str) -> Case:
        shape = host_shape(sizes, kind)

        def make(rig: Rig) -> dict[str, Contender]:
            return {OURS: operands(rig, library, kind)[0], CUBLAS: replace(both(rig, shape)[CUBLAS], work=1.0)}

        return Case("host", name, shape, make, (CUBLAS,), on_host=True)

    def planned(name: str, library: str, kind: Any) -> Case:
        shape = host_shape(sizes, kind)

        def make(rig: Rig) -> dict[str, Contender]:
            own, (a, b, c) = operands(rig, library, kind)
            made = numba_gemm.plan(*shape, like=a, precision=kind)
            turn = replace(own.turns[0], call=functools.partial(made, a, b, out=c))
            return {OURS: Contender([turn], 1.0), verdicts.THE_CALL: own}

        return Case("host", name, shape, make, (verdicts.THE_CALL,), on_host=True)

    def new(name: str, kind: Any) -> Case:
        shape = host_shape(sizes, kind)

        def make(rig: Rig) -> dict[str, Contender]:
            turns = []
            for extents in new_shapes(sizes, kind):
                a, b, c = rig.operands(extents)
                call = functools.partial(numba_gemm.tiled_sgemm, a, b, out=c, precision=kind)
                turns.append(Turn(call, c, Truth(rig, a, b, precision=kind).judge))
            return {OURS: Contender(turns, 1.0), CUBLAS: replace(both(rig, shape)[CUBLAS], work=1.0)}

        return Case("host", name, shape, make, (CUBLAS,), on_host=True, each_once=True)

    return [
        *(called(name, *way) for name, way in verdicts.HOST_WAYS.items()),
        *(planned(name, *way) for name, way in verdicts.PLAN_WAYS.items()),
        *(new(name, kind) for name, kind in verdicts.NEW_SHAPES.items()),
    ]


def seen_by(way: str, array: Any) -> Any:
    """View memory as an array of another library, which must be available; in the simulator, always NumPy."""
    if way == "cupy":
        if (cupy := optional("cupy")) is None:
            raise ImportError("CuPy is not here, or finds no GPU")
        return cupy.asarray(array)
    if way == "numba" and not SIMULATOR:
        return cuda.as_cuda_array(array)
    return array
