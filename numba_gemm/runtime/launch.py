"""Compute a product with a given stage: on the GPU through `BoundProduct`, or thread by thread in the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..device.units import FLOAT32_BYTES, ceil_div
from ..kernels.ladder.stage import Variant
from ..kernels.product import ONE, Batch, Layout, Product
from ..kernels.stage import IEEE, MAX_K, Partition, Stage
from ..kernels.step import Argument, Kernel, Launches, MatrixAt, Moving, Scalar, Slot, Step
from ..kernels.step import Vector as VectorAt
from ..kernels.tensor_core.fused_stage import FusedVariant
from ..simulator import scheduler
from ..simulator.switch import SIMULATOR
from .bound_product import BoundProduct
from .device import get_device
from .matrix import Matrix, Vector, at_address
from .once_per_key import OncePerKey
from .workspace import Workspace

__all__ = ["Launched", "Simulated", "bind_product", "launch", "launch_product", "product_of", "simulated"]


def product_of(
    a: Matrix,
    b: Matrix,
    c: Matrix,
    batch: Batch = ONE,
    epilogue: Any = None,
    vectors: Sequence[Vector] = (),
    prepared: tuple[bool, bool] = (False, False),
) -> Product:
    """Return the description of a product of matrices in memory."""
    shapes = tuple((vector.size, vector.stride) for vector in vectors)
    return Product(a.layout, b.layout, c.layout, batch, epilogue, shapes, prepared)


def launch(
    stage: Stage,
    config: Any,
    alpha: float,
    a: Matrix,
    b: Matrix,
    beta: float,
    c: Matrix,
    *,
    stream: int = 0,
    precision: str = IEEE,
    partition: Partition | None = None,
    swapped: bool = False,
    workspace: Workspace | None = None,
    batch: Batch = ONE,
    epilogue: Any = None,
    vectors: Sequence[Vector] = (),
) -> None:
    """Enqueue ``C = epilogue(alpha * A @ B + beta * C)`` on a stream of the device that holds C.

    Parameters
    ----------
    stage, config, precision
        Kernel.
    alpha, beta : float
        Scalars, rounded to float32. C is not read if beta is 0.
    a, b, c : Matrix
        Operands of shapes (m, k), (k, n), (m, n), any of them 0; A and B of k == 0 are not read.
    stream : int
        Handle of a stream of C's device; 0 is the default stream.
    partition, swapped, workspace
        As in `Device.bind`.
    batch : Batch
        Number of products, of which A, B and C are the first one's.
    epilogue : callable, optional
        Device function of an element of C.
    vectors : sequence of Vector
        The epilogue's vectors.

    Raises
    ------
    ValueError
        for a K beyond what a kernel counts, with an epilogue or in another precision than "ieee"; for a workspace that
        is too small.
    """
    product = product_of(a, b, c, batch, epilogue, vectors)
    choice = stage, config, precision, partition, swapped
    launch_product(product, choice, alpha, a, b, beta, c, stream, vectors, workspace)


Selected = tuple[Stage, Any, str, Partition | None, bool]  # stage, configuration, precision, partition, swapped
# A part of a product: its launches; bytes from the first elements of A, B and C to the part's; True if it takes beta,
# False if it adds to C.
Launched = tuple[BoundProduct, int, int, int, bool]


def launch_product(
    product: Product,
    selected: Selected,
    alpha: float,
    a: Matrix,
    b: Matrix,
    beta: float,
    c: Matrix,
    stream: int,
    vectors: Sequence[Vector] = (),
    workspace: Workspace | None = None,
) -> list[Launched]:
    """Enqueue a product; return its parts. In the simulator, run it and return nothing."""
    precision = selected[2]
    if product.m == 0 or product.n == 0:
        return []
    if product.epilogue is not None and product.k > MAX_K:
        raise ValueError(
            f"K is {product.k}, beyond the {MAX_K} that a product with an epilogue may have; expected less"
        )
    if precision != IEEE and product.k > MAX_K:
        raise ValueError(f"K is {product.k}, beyond the {MAX_K} that this precision takes; expected less")
    if SIMULATOR:
        _simulate(product, selected, alpha, a, b, beta, c, vectors)
        return []
    launched = bind_product(product, selected, c.device, workspace)
    places = [vector.pointer for vector in vectors]
    for bound, a_step, b_step, c_step, first in launched:
        own_beta = beta if first else 1.0
        bound.enqueue(alpha, a.pointer + a_step, b.pointer + b_step, own_beta, c.pointer + c_step, stream, places)
    return launched


def bind_product(
    product: Product, selected: Selected, device: int, workspace: Workspace | None = None
) -> list[Launched]:
    """Return the launches of a product on a device, with compiled and loaded kernels."""
    stage, config, precision, partition, swapped = selected
    owner, oriented = get_device(device), product.transposed if swapped else product
    launched = []
    for part in stage.pieces(config, oriented, precision, owner.properties.gpu):
        bound = owner.bind(stage, config, part.product, precision, partition, swapped, workspace)
        a_step, b_step = (part.b, part.a) if swapped else (part.a, part.b)
        launched.append((bound, a_step, b_step, part.c, part.first))
    return launched


# ----------------------------------------------------------------------------------------------------------- simulator


@dataclass(frozen=True)
class Simulated:
    """Launch for the scheduler of simulated threads (`numba_gemm.simulator.scheduler.run`).

    Attributes
    ----------
    kernel : object
        Kernel made by ``cuda.jit``, or a Python function.
    grid, block : tuple of int
        Blocks, and threads per block, along x, y and z.
    arguments : tuple
        The kernel's arguments; matrices are NumPy arrays.
    dynamic_shared : int
        Bytes of dynamic shared memory per block.
    """

    kernel: Any
    grid: tuple[int, ...]
    block: tuple[int, ...]
    arguments: tuple[Any, ...]
    dynamic_shared: int = 0

    def run(self, **options: Any) -> None:
        """Run it; options are the scheduler's."""
        scheduler.run(self.kernel, self.grid, self.block, self.arguments, dynamic_shared=self.dynamic_shared, **options)


@dataclass(frozen=True)
class _Place:
    """Memory of a matrix in the simulator, from a byte on."""

    matrix: Matrix
    step: int

    def view(self, layout: Layout) -> np.ndarray:
        """Return the array of a layout; the matrix's own array, or its transpose, if that is it."""
        matrix = self.matrix
        if not self.step and layout.words == matrix.words[1:]:
            return matrix.owner
        if not self.step and layout.words == matrix.transposed.words[1:]:
            return matrix.owner.T
        shape, strides = (layout.rows, layout.cols), (layout.row_stride, layout.col_stride)
        readonly = not matrix.owner.flags.writeable
        return at_address(matrix.owner, matrix.pointer + self.step, shape, strides, readonly, layout.dtype)


def _simulate(
    product: Product,
    selected: Selected,
    alpha: float,
    a: Matrix,
    b: Matrix,
    beta: float,
    c: Matrix,
    vectors: Sequence[Vector],
) -> None:
    """Run a product in the simulator."""
    stage, config, precision, partition, swapped = selected
    device, oriented = get_device(c.device), product.transposed if swapped else product
    for piece in stage.pieces(config, oriented, precision, device.properties.gpu):
        own_partition = device.partition(stage, config, piece.product) if partition is None else partition
        launches = stage.launches(config, piece.product, precision, own_partition, device.properties.gpu)
        a_step, b_step = piece.a, piece.b
        if swapped:
            launches, a_step, b_step = launches.with_operands_swapped(), b_step, a_step
        places = _Place(a, a_step), _Place(b, b_step), _Place(c, piece.c)
        own_beta = beta if piece.first else 1.0
        for one in _simulated(launches, alpha, places[0], places[1], own_beta, places[2], vectors):
            one.run()


_built = OncePerKey(lambda kernel: kernel.build(kernel.config, kernel.variant))


def simulated(
    stage: Stage,
    config: Any,
    alpha: float,
    a: Matrix,
    b: Matrix,
    beta: float,
    c: Matrix,
    partition: Partition | None = None,
    precision: str = IEEE,
) -> Simulated:
    """Return a stage's launch in the simulator, for float32 operands that one launch can compute."""
    product, device = product_of(a, b, c), get_device(c.device)
    given, gpu = partition, device.properties.gpu
    partition = device.partition(stage, config, product) if given is None else given
    launches = stage.launches(config, product, precision, partition, gpu)
    if launches.behind and given is None and stage.takes_partition:  # so that this launch alone computes C
        tiles = ceil_div(product.m, config.BM) * ceil_div(product.n, config.BN)
        launches = stage.launches(config, product, precision, Partition(tiles, tiles), gpu)
    return _simulated(launches, alpha, _Place(a, 0), _Place(b, 0), beta, _Place(c, 0), ())[-1 - launches.behind]


def _simulated(
    launches: Launches, alpha: float, a: _Place, b: _Place, beta: float, c: _Place, vectors: Sequence[Vector]
) -> list[Simulated]:
    """Return launches with arrays for their arguments."""
    values: dict[int, Any] = {
        Slot.ALPHA: np.float32(alpha),
        Slot.BETA: np.float32(beta),
        Slot.A: a,
        Slot.B: b,
        Slot.C: c,
    }
    scratch = np.full(launches.scratch_bytes // FLOAT32_BYTES, np.nan, np.float32)
    counters = np.zeros(launches.counters, np.int32)

    def value(step: Step, argument: Argument) -> Any:
        if isinstance(argument, Scalar):
            assert isinstance(argument.place, Moving), "stages of the simulator have no constants"
            return values[argument.place.slot]
        if isinstance(argument, MatrixAt):
            slot, layout = argument.place.slot, argument.layout
            if slot == Slot.SCRATCH or slot >= Slot.VECTORS:
                shape, strides = (layout.rows, layout.cols), (layout.row_stride, layout.col_stride)
                memory = scratch if slot == Slot.SCRATCH else vectors[slot - Slot.VECTORS].owner
                return at_address(memory, memory.ctypes.data + argument.place.offset, shape, strides)
            assert not argument.place.offset, "stages of the simulator take no parts of operands"
            return values[slot].view(layout)
        if not isinstance(step.kernel.variant, int | Variant):  # no stage that shares tiles
            return argument.words
        from ..device.partition import PartitionArguments

        describe: Any = PartitionArguments
        return describe(scratch, counters, *argument.words[2:])

    found = []
    for step in launches.steps:
        arguments = [value(step, argument) for argument in step.arguments if not isinstance(argument, VectorAt)]
        kernel: Kernel = step.kernel
        if isinstance(kernel.variant, Variant | FusedVariant):
            arguments.append(tuple(vector.owner for vector in vectors))
        block = step.block[:2] if step.block[2] == 1 else step.block
        found.append(Simulated(_built(kernel), step.grid, block, tuple(arguments), kernel.dynamic_shared))
    return found
