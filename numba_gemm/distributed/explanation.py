"""Description of a distributed product, and a prediction of its time, without ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from numbers import Real
from typing import Any

from ..device.units import FLOAT32_BYTES
from ..gemm.precision import IEEE, canonical
from ..kernels.scalars import index
from ..typing import PrecisionName
from .division import divide, shards
from .model import ALIGNED, Prediction, Rates, Work, plan_work, product_flops
from .placements import COLS, OTHER, ROWS, WHOLE, Placements, algorithm, placement, words
from .schedule import SLOTS, travelling

__all__ = ["Explanation", "explain", "read_placements"]

OWN = {1: (ROWS,), 2: (ROWS, COLS)}  # placements by default, by dimensions of the mesh


@dataclass(frozen=True)
class Explanation:
    """Plan of a distributed product; its text is a paragraph to read.

    Attributes
    ----------
    shape : tuple of int
        M, N and K.
    mesh : tuple of int
        Extents of the mesh of ranks.
    precision : str
        Precision.
    a, b, out : tuple of str
        Placements.
    work : Work
        Panels, or chunks of C, and each rank's steps.
    predicted : Prediction
        Predicted seconds: a lower bound for GPUs of the given speed.
    """

    shape: tuple[int, int, int]
    mesh: tuple[int, ...]
    precision: str
    a: Placements
    b: Placements
    out: Placements
    work: Work
    predicted: Prediction

    @property
    def tflops(self) -> float:
        """Predicted TFLOP/s per GPU: an upper bound for GPUs of the given speed."""
        return 2.0 * prod(self.shape) / prod(self.mesh) / self.predicted.seconds / 1e12

    def __str__(self) -> str:
        found, (m, n, k) = self.work.division.algorithm, self.shape
        room = FLOAT32_BYTES * self.work.room((0, 0))
        ranks = " x ".join(map(str, self.mesh))
        sentences = [
            f"C ({m} x {n}, {k} terms per sum) on {ranks} ranks in precision {self.precision}; A is placed "
            f"{words(self.a)}, B {words(self.b)}, C {words(self.out)}"
        ]
        if found.reduces and self.work.copied:
            sentences.append(
                "Each rank multiplies its parts of A and B, copies the others' sums for its part of C, and adds them; "
                f"sums for others take {room:,} bytes per rank"
            )
        elif found.reduces:
            chunks = _counted(len(self.work.chunks), "chunk")
            sentences.append(f"Each rank multiplies its parts of A and B; the sums are added in {chunks} of C")
        elif travels := [name for name, cut in zip("AB", travelling(self.work.division)) if cut is not None]:
            panels = self.work.panels
            held = sum(SLOTS * self.work.slot_elements(one, (0, 0)) for one in "ab") * FLOAT32_BYTES
            sentences.append(
                f"C stays in place; {' and '.join(travels)} {'travel' if len(travels) > 1 else 'travels'} in "
                f"{_counted(len(panels), 'panel')} of up to {max(one.part.extent for one in panels)} elements along "
                f"{panels[0].axis}, in {room if self.work.copied else held:,} bytes of slots per rank"
                + (", to which others copy" if self.work.copied else "")
            )
            singly = {"k": "A are read" if "A" not in travels else "", "n": "C are written"}.get(panels[0].axis)
            if singly and any(one.part.begin % ALIGNED for one in panels):
                sentences.append(
                    f"Some panels begin at columns that are no multiples of {ALIGNED}, where contiguous rows of "
                    f"{singly} in single floats, which the prediction leaves out"
                )
        else:
            sentences.append("Nothing travels")
        if found.spreads:
            sentences.append("Each block of C is then broadcast to all ranks")
        seconds, products, communication = self.predicted
        sentences.append(
            f"Expected: at least {seconds:.3g} s (products {products:.3g} s, communication {communication:.3g} s), at "
            f"most {self.tflops:.1f} TFLOP/s per GPU, {products / seconds if seconds else 1:.3f} of the products alone"
        )
        return ". ".join(sentences) + "."


def _counted(count: int, name: str) -> str:
    return f"{count} {name}{'s' * (count != 1)}"


def read_placements(name: str, given: Any, dims: int) -> Placements:
    """Return placements as names, given a placement or one per dimension of the mesh.

    Raises
    ------
    ValueError
        For another number of them.
    """
    several = given if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    if len(several) != dims:
        raise ValueError(
            f"{name} has {len(several)} placements and the mesh {dims} dimensions; expected one per dimension; pass "
            f"{words(OWN[dims])}, for example"
        )
    return tuple(placement(one) for one in several)


def _known(name: str, given: Any, dims: int) -> Placements:
    """Return placements as names; raise ValueError for those that no algorithm knows, too."""
    found = read_placements(name, given, dims)
    if OTHER in found:
        raise ValueError(f"{name} is {given!r}; expected {ROWS}, {COLS} or {WHOLE}, one per dimension; pass these")
    return found


def explain(
    m: int,
    n: int,
    k: int,
    *,
    mesh: int | Sequence[int],
    a: Any = None,
    b: Any = None,
    out: Any = None,
    precision: PrecisionName = IEEE,
    bandwidth: float | Sequence[float] = 300e9,
    flops: float | None = None,
    panel: int | None = None,
    hosts: int = 1,
) -> Explanation:
    """Describe what `distributed_sgemm` does for given extents, and predict its time. Needs no ranks, GPU or PyTorch.

    Parameters
    ----------
    m, n, k : int
        Extents of A (m, k), B (k, n) and C (m, n).
    mesh : int or sequence of int
        Number of ranks, or extents of a mesh of two dimensions.
    a, b, out : placement or sequence of placements, optional
        Placements of the operands and of the result, as for `distributed_sgemm`: "Shard(0)", "Shard(1)", "Replicate",
        or PyTorch's objects. A and B are divided by rows by default, and in blocks on a mesh of two dimensions.
    precision, panel
        As for `distributed_sgemm`.
    bandwidth : float or sequence of float
        Bytes per second that arrive at a GPU, or one number per dimension of the mesh.
    flops : float, optional
        Floating-point operations per second of one GPU; by default those of an H200 with products of 16384 cubed.
    hosts : int, optional
        Number of hosts. The ranks of one host copy panels and sums from each other's memory; those of several take part
        in broadcasts and reductions.

    Returns
    -------
    Explanation
        Its text is a paragraph to read.

    Raises
    ------
    TypeError, ValueError
        For other arguments, or placements that no algorithm multiplies without moving an operand first.

    Examples
    --------
    >>> from numba_gemm.distributed import explain
    >>> plan = explain(16384, 16384, 16384, mesh=2)
    >>> len(plan.work.panels)
    2
    """
    m, n, k = index("m", m), index("n", n), index("k", k)
    extents = tuple(index("mesh", one) for one in (mesh if isinstance(mesh, Sequence) else (mesh,)))
    if len(extents) not in OWN or 0 in extents:
        raise ValueError(f"mesh is {mesh!r}; expected one or two extents from 1 on; pass 8 or (2, 4), for example")
    dims, precision = len(extents), canonical(precision)
    x, y = (_known(name, OWN[dims] if given is None else given, dims) for name, given in (("a", a), ("b", b)))
    wanted = None if out is None else _known("out", out, dims)
    found = algorithm(x, y, wanted)
    if found is None:
        raise unsupported(x, y, wanted)
    rate: Any = bandwidth  # it may be anything
    links = tuple(rate) if isinstance(rate, Sequence) and not isinstance(rate, str) else (rate,) * dims
    if len(links) != dims:
        raise ValueError(f"bandwidth has {len(links)} numbers and the mesh {dims} dimensions; pass one per dimension")
    speeds = (*links, 1 if flops is None else flops)
    if not all(isinstance(one, Real) for one in speeds) or not all(one > 0 for one in speeds):
        raise ValueError(
            f"bandwidth is {bandwidth!r} and flops {flops!r}; expected positive numbers; pass byte/s and FLOP/s"
        )
    if panel is not None:
        index("panel", panel, 1)
    division = divide(found, extents, x, y, shards((m, k), x, extents), shards((k, n), y, extents))
    rates = Rates(product_flops(precision) if flops is None else flops, links=(links[0], links[-1]))
    ranks = prod(extents)
    if not 1 <= index("hosts", hosts) <= ranks:
        raise ValueError(f"hosts is {hosts}; expected a positive number, at most {ranks} for as many ranks; pass 1")
    work = plan_work(division, precision, rates, panel, copied=hosts == 1)
    return Explanation((m, n, k), extents, precision, x, y, found.out, work, work.predicted(rates))


def unsupported(a: Placements, b: Placements, out: Placements | None) -> ValueError:
    """Return the error for placements without an algorithm."""
    able = [
        words(one) for one in ((ROWS,), (COLS,), (WHOLE,), (ROWS, COLS)) if len(one) == len(a) and algorithm(a, b, one)
    ]
    advice = (
        f"pass one of these results: {', '.join(able)}"
        if able
        else "on a mesh of two dimensions, divide rows along the first and columns along the second"
    )
    return ValueError(
        f"a is placed {words(a)}, b {words(b)}"
        + (f" and the result {words(out)}" if out else "")
        + f"; expected placements that need no operand moved as a whole; {advice}, or pass DTensors"
    )
