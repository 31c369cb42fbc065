"""The table of products for stages that have a schedule: partitions, accesses, batches and an epilogue,
which the ladder's own table leaves to the launcher or does not have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from numba_gemm.kernels.ladder.stage import LadderStage, Variant, variant_of
from numba_gemm.kernels.ladder.tile_config import TileConfig
from numba_gemm.kernels.product import ONE, Batch
from numba_gemm.kernels.stage import IEEE, Partition
from numba_gemm.models.accuracy import compare, reference
from numba_gemm.runtime import epilogue as epilogues
from numba_gemm.runtime.device import synchronize
from numba_gemm.runtime.launch import launch, product_of
from numba_gemm.runtime.matrix import Vector
from numba_gemm.simulator.switch import SIMULATOR
from support.ladder_cases import GUARD, LAYOUTS, Operand, Outcome, Place, all_aligned
from support.operands import NAN, filled

COLUMNS = Place(by_columns=True)
# Layouts of A, B and C by the tile loaders' accesses for A and for B.
BY_ACCESS: dict[str, tuple[Place, Place, Place]] = {
    "along4 across4": LAYOUTS["rows"],
    "across4 along4": (COLUMNS, COLUMNS, Place(extra=1)),
    "along1 across1": LAYOUTS["one float off"],
    "across1 along1": (Place(by_columns=True, offset=1), Place(by_columns=True, extra=1), Place(offset=3, extra=2)),
    "any any": LAYOUTS["backwards and spaced"],
    "along4 along4": LAYOUTS["B by columns"],
    "across4 across4": LAYOUTS["A by columns"],
    "across1 across1": (Place(by_columns=True, offset=1), Place(offset=1), Place(offset=1)),
    "along1 along1": (Place(offset=1), Place(by_columns=True, offset=1), Place(extra=1)),
}


@dataclass(frozen=True)
class Shared:
    """A product, or a batch of them, the tiles of which blocks share.

    `shared` is how many blocks have parts of the tiles after the first `whole` ones. A batch is of 2 x 3 x 2 products;
    A is the same along its first dimension, B along its second one. The epilogue adds a vector to each column and
    takes one from each row. With tails, lines are aligned, whatever their length.
    """

    accesses: str
    shape: tuple[int, int, int]
    blocks: int
    whole: int = 0
    beta: float = 0.0
    batch: bool = False
    epilogue: bool = False
    tails: bool = False

    def __str__(self) -> str:
        extras = f"{' batch' * self.batch}{' epilogue' * self.epilogue}{' tails' * self.tails}"
        partition = f"{self.whole} whole tiles, {self.blocks} blocks"
        return f"{'x'.join(map(str, self.shape))} {self.accesses}, {partition}, beta={self.beta}{extras}"

    @property
    def places(self) -> list[Place]:
        """Layouts of A, B and C."""
        return [replace(place, aligned=self.tails) for place in BY_ACCESS[self.accesses]]


def shared_cases(stage: LadderStage, config: TileConfig) -> list[Shared]:
    """Pieces that begin and end anywhere in a tile, each access with extents that it takes.

    A stage without batches and epilogues has the cases without them.

    First those that find most of the broken kernels in the least time.
    """
    bm, bn, bk = config.BM, config.BN, config.BK
    cases = [
        Shared("across1 across1", (bm - 3, bn - 1, 2 * bk + 3), 2),
        Shared("along4 along4", (bm - 4, bn, 2 * bk + 4), 1),
        Shared("across4 along4", (bm + 4, bn + 3, 2 * bk + 4), 3, whole=2, beta=0.5),
        Shared("across1 along1", (2 * bm + 1, bn + 3, 2 * bk + 1), 4, whole=1, epilogue=True),
        Shared("across4 across4", (bm - 4, bn, 2 * bk + 3), 1),
        Shared("along4 across4", (8, 4, 2 * bk - 4), 9, whole=2, batch=True, epilogue=True),
        Shared("any any", (bm + 1, bn - 1, 3 * bk + 3), 7, beta=1.0),
        Shared("along4 across4", (bm + 4, bn + 4, 3 * bk + 4), 5, beta=-2.0),
        Shared("along1 across1", (bm + 3, bn - 1, 4 * bk - 1), 3, beta=0.5, epilogue=True),
        Shared("along1 along1", (bm - 1, 2 * bn - 1, bk + 1), 3, beta=-0.5),
        Shared("across4 along4", (bm + 3, bn - 1, 2 * bk + 3), 4, whole=1, tails=True),
        Shared("along4 across4", (bm - 2, bn + 1, 2 * bk + 4), 3, beta=0.5, epilogue=True, tails=True),
        # After an even number of terms, the first one that is beyond k is multiplied, too.
        Shared("across1 across1", (bm - 3, bn - 1, 2 * bk + 2), 2),
        Shared("across4 across4", (bm - 4, bn, 2 * bk + 2), 1),
    ]
    # a tile may have one row, or one column
    able = [case for case in cases if stage.takes_epilogue or not (case.batch or case.epilogue)]
    return [replace(case, shape=tuple(max(extent, 1) for extent in case.shape)) for case in able]


EXTENTS = (2, 3, 2)
VARIES = {"a": (False, True, True), "b": (True, False, True), "c": (True, True, True)}


def last_step(value: Any, row: Any, col: Any, across: Any, down: Any) -> Any:
    """The epilogue of the cases that have one."""
    return value + across[col] - down[row]


class Stack:
    """The matrices of an operand of a batch, one behind the other in one buffer, with a guard around each line."""

    def __init__(self, place: Place, rows: int, cols: int, varies: tuple[bool, ...], fill: np.float32) -> None:
        self.extents = [extent if own else 1 for extent, own in zip(EXTENTS, varies)]
        count = int(np.prod(self.extents))
        many = (rows, count * cols) if place.by_columns else (count * rows, cols)
        self.buffer, whole = place.view(*many, fill)
        parts = np.split(whole, count, axis=1 if place.by_columns else 0)
        self.views: list[np.ndarray] = list(parts)
        _, middle, inner = self.extents
        step = (parts[-1].ctypes.data - parts[0].ctypes.data) // max(count - 1, 1)
        strides = (step * middle * inner, step * inner, step)
        self.steps = tuple(stride if own else 0 for stride, own in zip(strides, varies))

    def number(self, index: tuple[int, ...]) -> int:
        """Return the number of the matrix that a product of the batch has."""
        outer, middle, inner = (i if extent > 1 else 0 for i, extent in zip(index, self.extents))
        return (outer * self.extents[1] + middle) * self.extents[2] + inner


def run_shared(stage: LadderStage, config: TileConfig, case: Shared, seed: int = 0) -> Outcome:
    """Run one case with fresh random operands, C holding NaN where beta is 0, and compare it with float64."""
    m, n, k = case.shape
    alpha = 0.5 if case.beta else 1.0
    places = case.places
    alone = (False, False, False)
    a, b, c = (
        Stack(place, *extents, VARIES[name] if case.batch else alone, fill)
        for name, place, extents, fill in zip("abc", places, ((m, k), (k, n), (m, n)), (NAN, NAN, GUARD))
    )
    for number, stack in enumerate((a, b)):
        for i, view in enumerate(stack.views):
            view[...] = filled(*view.shape, seed=1000 * seed + 100 * number + i)
    before = [filled(m, n, seed=1000 * seed + 200 + i) for i in range(len(c.views))]
    mine = np.zeros(c.buffer.shape, bool)
    for view, old in zip(c.views, before):
        view[...] = NAN if case.beta == 0 else old
        at = (view.ctypes.data - c.buffer.ctypes.data) // 4
        np.lib.stride_tricks.as_strided(mine[at:], view.shape, [step // 4 for step in view.strides])[...] = True

    operands = [Operand.place(stack.buffer, stack.views[0]) for stack in (a, b, c)]
    matrices = [operand.matrix for operand in operands]
    across, down = filled(1, n, seed=3)[0], filled(1, m, seed=4)[0]
    launch(
        stage,
        config,
        alpha,
        *matrices[:2],
        case.beta,
        matrices[2],
        partition=Partition(case.blocks, case.whole),
        batch=Batch(EXTENTS, a.steps, b.steps, c.steps) if case.batch else ONE,
        epilogue=epilogues.prepared(last_step, 2) if case.epilogue else None,
        vectors=(_vector(across), _vector(down)) if case.epilogue else (),
    )
    synchronize()
    operands[2].fetch()

    compared = []
    for index in product(*map(range, EXTENTS)) if case.batch else [(0, 0, 0)]:
        x, y, number = a.views[a.number(index)], b.views[b.number(index)], c.number(index)
        expected, scale = reference(alpha, x, y, case.beta, before[number])
        if case.epilogue:
            expected += across - down[:, None]
            scale += abs(across) + abs(down[:, None])
        compared.append(compare(c.views[number], expected, scale, k, alpha=alpha))
    worst = next((one for one in compared if not one.ok), max(compared, key=lambda one: one.in_bounds))
    guard_kept = bool(np.all(c.buffer[~mine] == GUARD))
    return Outcome(worst, guard_kept, all_aligned(matrices), np.stack(c.views))


def _vector(values: np.ndarray) -> Vector:
    if SIMULATOR:
        return Vector(values.ctypes.data, values.size, 4, values)
    from numba import cuda

    on_device = cuda.to_device(values)
    return Vector(on_device.device_ctypes_pointer.value, values.size, 4, on_device)


def variant_of_case(config: TileConfig, case: Shared) -> Variant:
    """Return how a case's operands are loaded, and C is stored: by its `accesses`, if the configuration has them."""
    m, n, k = case.shape
    matrices = [
        Operand.place(*place.view(*extents, NAN)).matrix
        for place, extents in zip(case.places, ((m, k), (k, n), (m, n)))
    ]
    return variant_of(config, product_of(*matrices), IEEE)


def scheduled(stages: dict[str, LadderStage]) -> Iterator[LadderStage]:
    """Return the stages that take a partition."""
    return (stage for stage in stages.values() if stage.schedule is not None)
