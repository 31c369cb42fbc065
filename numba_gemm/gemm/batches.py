"""Products of many matrices, with as few batch dimensions, and so as few launches, as possible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product, zip_longest
from math import prod

from ..arrays.operand import Operand
from ..device.units import ceil_div
from ..kernels.product import ONE, Batch
from ..runtime.matrix import Matrix

__all__ = ["AT_ONCE", "broadcast", "products"]

AT_ONCE = 3  # batch dimensions that a launch takes
MAX_TILES = 1 << 31  # that a launch counts in 32 bits, and the end of a grid's x axis
ROWS = 32  # that a tile has at the least, of a matrix that has as many, or columns if it computes the transpose

Steps = tuple[int, int, int]  # bytes from a matrix of A, of B and of C to the next


def broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the batch dimensions of a product, by NumPy's rules; None if those of A and B do not fit.

    `np.broadcast_shapes` raises for more than 32 dimensions, and for results too large to address.
    """
    if not a or not b:
        return a or b
    pairs = list(zip_longest(reversed(a), reversed(b), fillvalue=1))
    if any(x != y and 1 not in (x, y) for x, y in pairs):
        return None
    return tuple(y if x == 1 else x for x, y in reversed(pairs))


def products(
    a: Operand, b: Operand, c: Operand, device: int, *, at_once: int, fold: bool
) -> Iterator[tuple[Matrix, Matrix, Matrix, Batch]]:
    """Yield the pieces of a batched product that one launch can compute: the first matrices, and steps to the others.

    Parameters
    ----------
    a, b, c : Operand
        Operands of two dimensions or more; C has the batch dimensions of the product, and elements.
    device : int
        Ordinal of their device.
    at_once : int
        Batch dimensions that a launch takes, `AT_ONCE` at the most; those that are left are taken one by one, and so
        are parts of one that a launch cannot count.
    fold : bool
        True if matrices may count as one larger matrix, which then has other rows and columns than each one.
    """
    if len(c.shape) == 2:
        first, second, third = (x.matrix(device, x.pointer, x.shape, x.strides) for x in (a, b, c))
        yield first, second, third, ONE
        return
    view = _Matrices.of(a, b, c)
    dims = list(_merged(c.shape[:-2], zip(_steps(a, c), _steps(b, c), _steps(c, c))))
    while fold and dims and (folded := view.with_dimension(*dims[-1])) is not None:
        view = folded
        dims.pop()
    looped = max(len(dims) - at_once, 0)
    tiles = max(ceil_div(view.m, ROWS) * view.n, ceil_div(view.n, ROWS) * view.m)  # of a matrix, at the most
    while looped < len(dims) and tiles * prod(extent for extent, _ in dims[looped + 1 :]) >= MAX_TILES:
        looped += 1
    outer, inner = dims[:looped], dims[looped:]
    whole, most = 1, 1
    if inner:
        whole, most = inner[0][0], max((MAX_TILES - 1) // (tiles * prod(extent for extent, _ in inner[1:])), 1)
    for index in product(*(range(extent) for extent, _ in outer)):
        for begin in range(0, whole, most):
            starts = [sum(i * steps[x] for i, (_, steps) in zip((*index, begin), dims)) for x in range(3)]
            yield (*view.matrices(a, b, c, starts, device), _batch(inner, min(most, whole - begin)))


def _batch(dims: list[tuple[int, Steps]], first: int) -> Batch:
    """Return a batch of some matrices of the first dimension, and all of the others."""
    if not dims:
        return Batch()
    padded = [(1, (0, 0, 0))] * (AT_ONCE - len(dims)) + [(first, dims[0][1]), *dims[1:]]
    extents, steps = zip(*padded)
    return Batch(extents, *zip(*steps))


def _steps(x: Operand, c: Operand) -> list[int]:
    """Return the bytes from one matrix to the next along each batch dimension of C."""
    own = [step if extent > 1 else 0 for step, extent in zip(x.strides, x.shape[:-2])]
    return [0] * (len(c.shape) - len(x.shape)) + own


def _merged(extents: tuple[int, ...], steps: Iterator[Steps]) -> list[tuple[int, Steps]]:
    """Return the dimensions without those of extent 1; contiguous neighbours are merged."""
    dims: list[tuple[int, Steps]] = []
    for extent, step in zip(extents, steps):
        if extent == 1:
            continue
        if dims and all(outer == extent * inner for outer, inner in zip(dims[-1][1], step)):
            dims[-1] = (dims[-1][0] * extent, step)
        else:
            dims.append((extent, step))
    return dims


@dataclass(frozen=True)
class _Matrices:
    """Extents of a product of matrices, and their strides in bytes along m, n and k."""

    m: int
    n: int
    k: int
    a: tuple[int, int]
    b: tuple[int, int]
    c: tuple[int, int]

    @classmethod
    def of(cls, a: Operand, b: Operand, c: Operand) -> _Matrices:
        (m, n), k = c.shape[-2:], a.shape[-1]
        (a_m, a_k), (b_k, b_n), (c_m, c_n) = (x.strides[-2:] for x in (a, b, c))
        return cls(m, n, k, (a_m, a_k), (b_k, b_n), (c_m, c_n))

    def with_dimension(self, extent: int, steps: Steps) -> _Matrices | None:
        """Fold a batch dimension into rows or columns of one matrix; return None if neither is possible."""
        a, b, c = steps
        if b == 0 and (self.m == 1 or (a == self.m * self.a[0] and c == self.m * self.c[0])):
            if self.m == 1:
                return replace(self, m=extent, a=(a, self.a[1]), c=(c, self.c[1]))
            return replace(self, m=extent * self.m)
        if a == 0 and (self.n == 1 or (b == self.n * self.b[1] and c == self.n * self.c[1])):
            if self.n == 1:
                return replace(self, n=extent, b=(self.b[0], b), c=(self.c[0], c))
            return replace(self, n=extent * self.n)
        return None

    def matrices(
        self, a: Operand, b: Operand, c: Operand, starts: list[int], device: int
    ) -> tuple[Matrix, Matrix, Matrix]:
        """Return the matrices at these distances in bytes from the first ones."""
        return (
            a.matrix(device, a.pointer + starts[0], (self.m, self.k), self.a),
            b.matrix(device, b.pointer + starts[1], (self.k, self.n), self.b),
            c.matrix(device, c.pointer + starts[2], (self.m, self.n), self.c),
        )
