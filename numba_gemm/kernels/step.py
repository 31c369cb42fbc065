"""Kernel launches of a product as data: which kernel, on which grid, with which arguments.

An argument that changes from call to call is a `Slot`; all others are constants. A stage makes the steps
(`kernels.stage.Stage.launches`), and `runtime.bound_product` turns them into launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from ..device.units import FLOAT32_BYTES
from .product import Layout


class Slot(IntEnum):
    """A 64-bit word of a launch that is known only at the call.

    Each `VECTORS + i` is the address of a vector of the epilogue. Those of prepared operands' parts follow.
    """

    ALPHA = 0
    BETA = 1
    A = 2
    B = 3
    C = 4
    SCRATCH = 5
    COUNTERS = 6
    FIRST_MAP = 7
    SECOND_MAP = 8
    VECTORS = 9

    __hash__ = int.__hash__  # an enumeration's own is a function in Python, and each new product hashes some fifty


class Moving(NamedTuple):
    """A word that is the value of a slot plus an offset in bytes."""

    slot: int
    offset: int = 0


Word = int | Moving

AT_A, AT_B, AT_C = Moving(Slot.A), Moving(Slot.B), Moving(Slot.C)


class Scalar(NamedTuple):
    """A float32 argument: alpha, beta, or a constant, whose word holds its bits."""

    place: Word

    @property
    def words(self) -> tuple[Word, ...]:
        """Words that the kernel is passed."""
        return (self.place,)


class MatrixAt(NamedTuple):
    """A matrix argument: one of the operands, or a part of the scratch memory."""

    place: Moving
    layout: Layout

    @property
    def words(self) -> tuple[Word, ...]:
        """Words that the kernel is passed."""
        return (self.place, *self.layout[:4])  # as `Layout.words`


class Vector(NamedTuple):
    """An array argument of one dimension: a vector of the epilogue."""

    number: int
    size: int
    stride: int

    @property
    def words(self) -> tuple[Word, ...]:
        """The seven words of a 1-D Numba array."""
        return (0, 0, self.size, FLOAT32_BYTES, Moving(Slot.VECTORS + self.number), self.size, self.stride)


class Words(NamedTuple):
    """A tuple of 64-bit integers, or a single one."""

    words: tuple[Word, ...]


Argument = Scalar | MatrixAt | Vector | Words

ALPHA, BETA = Scalar(Moving(Slot.ALPHA)), Scalar(Moving(Slot.BETA))
ALPHA_ONE, BETA_ZERO = Scalar(0x3F800000), Scalar(0)


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel: the function that builds it, its configuration and its variant.

    Kernels are equal if they are the same object; stages return the same one for the same configuration and variant.

    Attributes
    ----------
    name : str
        Name of the stage, or of the task.
    build : callable
        ``build(config, variant)`` returns a ``cuda.jit`` kernel.
    signature : callable
        ``signature(variant)`` returns the Numba types of its parameters.
    config : object
        Tile configuration, None for kernels without one.
    variant : object
        Specialisation to operands; hashable.
    dynamic_shared : int
        Bytes of dynamic shared memory per block.
    threads : int
        Threads per block.
    whole_program : bool
        True if the compiler must see the whole program at once, to move registers between warpgroups.
    """

    name: str
    build: Callable[[Any, Any], Any]
    signature: Callable[[Any], tuple[Any, ...]]
    config: Any
    variant: Any
    dynamic_shared: int
    threads: int
    whole_program: bool = False

    @property
    def epilogue(self) -> Callable[..., Any] | None:
        """Epilogue that is compiled into it."""
        return getattr(self.variant, "epilogue", None)

    @property
    def vectors(self) -> int:
        """Vectors that the epilogue takes."""
        return getattr(self.variant, "vectors", 0)


class Step(NamedTuple):
    """One kernel launch.

    Attributes
    ----------
    kernel : Kernel
        The kernel.
    grid, block : tuple of int
        Blocks of the grid, and threads of a block, along x, y and z.
    arguments : tuple of Argument
        In the kernel's order.
    overlaps : bool
        True if it may start before the launch before it has ended (`device.grid_order`).
    carve_out : int
        Percentage of a multiprocessor's largest shared memory that it needs; the rest may serve as L1 cache. -1 leaves
        this to the driver, which makes room for as many blocks as fit.
    cluster : int
        Blocks along x that form a cluster (`device.cluster`); the grid must be divisible by it.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: tuple[Argument, ...]
    overlaps: bool = False
    carve_out: int = -1
    cluster: int = 1

    def with_operands_swapped(self) -> Step:
        """Return the launch with the slots of A and B swapped."""
        other = {Slot.A: Slot.B, Slot.B: Slot.A}

        def swapped(argument: Argument) -> Argument:
            if isinstance(argument, MatrixAt) and argument.place.slot in other:
                place = Moving(other[Slot(argument.place.slot)], argument.place.offset)
                return argument._replace(place=place)
            return argument

        return self._replace(arguments=tuple(map(swapped, self.arguments)))


class MapOf(NamedTuple):
    """A tensor map that a launch needs: its operand, and the box that one copy fetches.

    Attributes
    ----------
    slot : Slot
        `Slot.A` or `Slot.B`.
    layout : Layout
        Layout with contiguous rows; the operand's own, or its transpose's.
    box : tuple of int
        Rows and columns of a box.
    matrices, step : int
        Matrices of a batch, and bytes from one to the next.
    """

    slot: Slot
    layout: Layout
    box: tuple[int, int]
    matrices: int
    step: int


class Launches(NamedTuple):
    """The launches of a product, in order, and the memory that they share.

    Attributes
    ----------
    steps : tuple of Step
        One after the other on one stream.
    scratch_bytes : int
        Device memory beside the operands; its contents are undefined at first.
    counters : int
        32-bit words behind it, 0 before the launches and after them.
    maps : tuple of MapOf
        Tensor maps for `Slot.FIRST_MAP` and, if there are two, `Slot.SECOND_MAP`.
    behind : int
        Steps behind the one that multiplies.
    paced : bool
        True if the counter only keeps blocks in step, so that its address may be 0.
    """

    steps: tuple[Step, ...]
    scratch_bytes: int = 0
    counters: int = 0
    maps: tuple[MapOf, ...] = ()
    behind: int = 0
    paced: bool = False

    @property
    def multiplication(self) -> Step:
        """The launch that multiplies; of two, the second one, which leaves partial sums."""
        return self.steps[-1 - self.behind]

    def with_operands_swapped(self) -> Launches:
        """Return the launches with the slots of A and B swapped."""
        other = {Slot.A: Slot.B, Slot.B: Slot.A}
        steps = tuple(step.with_operands_swapped() for step in self.steps)
        return self._replace(steps=steps, maps=tuple(one._replace(slot=other[one.slot]) for one in self.maps))

    def unpaced(self) -> Launches:
        """Return paced launches without their counter."""

        def without(argument: Argument) -> Argument:
            if not isinstance(argument, Words):
                return argument
            return Words(tuple([0 if word == Moving(Slot.COUNTERS) else word for word in argument.words]))

        steps = tuple([step._replace(arguments=tuple(map(without, step.arguments))) for step in self.steps])
        return self._replace(steps=steps, counters=0, paced=False)
