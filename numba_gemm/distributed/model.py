"""A model of a distributed product's time, by which its panels are chosen.

Products and communication each run in order, beside each other; a product waits for its panels, and a panel for a free
slot. The model leaves out that both compete for memory, and broadcasts also for multiprocessors, so predicted times are
lower bounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from ..device.units import FLOAT32_BYTES, ceil_div
from ..gemm.precision import FP32_AUTO, IEEE
from ..gemm.tensor_heuristics import H200_MULTIPROCESSORS, LAUNCH, expected_seconds
from .division import Coordinate, Division
from .schedule import (
    SLOTS,
    Add,
    Chunk,
    Fetch,
    Give,
    Keep,
    Multiply,
    Panel,
    Piece,
    Reduce,
    Step,
    Take,
    along,
    chunk_steps,
    chunks_of,
    copied_chunk_steps,
    copied_steps,
    given_elements,
    held,
    panels_of,
    spread_steps,
    steps,
    travelling,
)

__all__ = ["COPIED_FROM", "IEEE_SPEED", "Prediction", "Rates", "Work", "plan_work", "product_flops"]

IEEE_SPEED = 56.0  # TFLOP/s of an H200 at 16384 cubed
# Elements along k below which a panel is joined with its neighbour: then reading and writing C again takes less than a
# twentieth of the product.
LEAST = {IEEE: 1024, FP32_AUTO: 2048, "bf16x9": 1536, "bf16x6": 2048, "tf32x3": 2048, "bf16x3": 4096, "fp16x3": 4096}
LEAST_OF_OTHERS = 8192
# Precisions whose sums keep what additions round off, within a product: the additions to C of few panels may round.
COMPENSATED = ("bf16x6", "bf16x9", FP32_AUTO)
MOST_SUMS = 8
MOST_BYTES = 4 << 30  # of a panel in a slot
CUTS = (1, 2, 4, 8)  # panels per range between two borders that are considered
COPIED_FROM = 1e-3  # predicted seconds of a product from which ranks copy, which takes more exchanges among them
CLEAR_GAIN = 0.99  # of the time with fewer panels, that more must be expected to take
CHUNK_BYTES = 256 << 20
ALIGNED = 4  # floats, 16 bytes: slots begin at multiples, so that kernels read aligned rows by vectors
TILE = 128  # edge of a block's tile of C
KEPT = 64  # plans of products, and turns and slots of as many ranks, which are the same when a call is repeated
ALL_RANKS = 64  # up to so many ranks, the time of each is predicted; else that of some


class Rates(NamedTuple):
    """Rates that a prediction starts from.

    Attributes
    ----------
    flops : float
        Floating-point operations per second of a large product on one GPU.
    memory : float
        Bytes per second of device memory.
    links : tuple of float
        Bytes per second that arrive at a GPU by a broadcast along columns of the grid, and along its rows.
    latency : float
        Seconds until a broadcast begins.
    """

    flops: float
    memory: float = 4.8e12
    links: tuple[float, float] = (300e9, 300e9)
    latency: float = 20e-6


class Prediction(NamedTuple):
    """Seconds of the slowest rank: of all its steps, of its multiplications alone, and of its communication alone."""

    seconds: float
    products: float
    communication: float


@dataclass(frozen=True, eq=False)
class Work:
    """All steps of a product: those with panels, or chunks whose sums are added. Each is equal to itself only.

    Attributes
    ----------
    division : Division
        Division of the product.
    panels : tuple of Panel
        Panels that travel; empty if sums are added.
    chunks : tuple of Chunk
        Chunks of C whose sums are added; else empty.
    copied : bool
        True if ranks copy panels to each other's memory, or sums from it; False if they take part in broadcasts and
        reductions.
    """

    division: Division
    panels: tuple[Panel, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    copied: bool = False

    def steps(self, coordinate: Coordinate) -> Iterator[Step]:
        """Yield the steps of a rank."""
        if self.division.algorithm.reduces and self.copied:
            yield from copied_chunk_steps(self.chunks, coordinate, self.division.grid[0])
        elif self.division.algorithm.reduces:
            yield from chunk_steps(self.chunks, self.division)
        else:
            yield from (
                copied_steps(self.panels, coordinate, self.division.grid)
                if self.copied
                else steps(self.panels, coordinate)
            )
            yield from spread_steps(self.division)

    def predicted(self, rates: Rates) -> Prediction:
        """Predict the time of the slowest rank."""
        return max(_followed(self, coordinate, rates) for coordinate in _some(self.division))

    def slot_elements(self, operand: str, coordinate: Coordinate) -> int:
        """Elements of an operand's largest panel on a rank."""
        return max((_elements(self.division, panel, operand, coordinate) for panel in self.panels), default=0)

    def chunk_slots(self) -> int:
        """Chunks of C, or of sums for one, that a rank holds at a time."""
        return min(SLOTS, self.division.grid[0] - 1 if self.copied else len(self.chunks)) if self.chunks else 0

    @lru_cache(maxsize=KEPT)  # noqa: B019 - it keeps few objects
    def turns(self, coordinate: Coordinate) -> list[list[Fetch]]:
        """Panels that others copy to a rank, at most one of A and one of B in each turn."""
        found = [one for one in self.steps(coordinate) if isinstance(one, Fetch)] if self.copied else []
        return [list(group) for _, group in groupby(found, key=lambda one: one.panel)]

    @lru_cache(maxsize=KEPT)  # noqa: B019 - it keeps few objects
    def slots(self, coordinate: Coordinate) -> tuple[dict[str, list[int]], int]:
        """Return where the slots of a rank begin in its memory for others, by operand, and the elements of all."""
        count, begins, end = min(SLOTS, len(self.turns(coordinate))), {}, 0
        for operand in "ab":
            each = ceil_div(self.slot_elements(operand, coordinate), ALIGNED) * ALIGNED
            begins[operand] = [end + slot * each for slot in range(count)]
            end += count * each
        return begins, end

    def room(self, coordinate: Coordinate) -> int:
        """Elements of the memory of a rank that others copy to or from."""
        if not self.copied:
            return 0
        if self.division.algorithm.reduces:
            return given_elements(self.chunks, coordinate[0])
        return self.slots(coordinate)[1]


def product_flops(precision: str, sm_count: int = H200_MULTIPROCESSORS, clock_hz: float = 1.98e9) -> float:
    """Return floating-point operations per second of a large product, from speeds measured on an H200."""
    if precision in (IEEE, FP32_AUTO):
        return IEEE_SPEED * 1e12 * sm_count / H200_MULTIPROCESSORS * clock_hz / 1.98e9
    n = 16384
    return 2.0 * n**3 / expected_seconds(precision, n, n, n, sm_count)


def plan_work(division: Division, precision: str, rates: Rates, panel: int | None = None, copied: bool = False) -> Work:
    """Choose panels, or chunks of C, by the model.

    Parameters
    ----------
    division, precision, rates
        Product, arithmetic and machine.
    panel : int, optional
        Most elements per panel along its axis, or rows per chunk that is not copied; by default the model chooses.
    copied : bool, optional
        True if ranks can open each other's memory. They broadcast all the same if every rank is to have C as a whole,
        and for products of less than `COPIED_FROM`.
    """
    found = division.algorithm
    sends = found.reduces or any(one is not None for one in travelling(division))
    if copied and sends and not found.spreads and max(division.grid) > 1:
        work, seconds = _planned(division, precision, rates, panel, copied=True)
        if seconds >= COPIED_FROM:
            return work
    return _planned(division, precision, rates, panel, copied=False)[0]


@lru_cache(maxsize=KEPT)
def _planned(division: Division, precision: str, rates: Rates, panel: int | None, copied: bool) -> tuple[Work, float]:
    """Choose panels, or chunks of C, which are copied or sent by all ranks together; return the predicted time, too."""
    work = _chosen(division, precision, rates, panel, copied)
    return work, work.predicted(rates).seconds


def _chosen(division: Division, precision: str, rates: Rates, panel: int | None, copied: bool) -> Work:
    if division.algorithm.reduces and copied:
        return Work(division, chunks=tuple(chunks_of(division, max(1, division.shape[0]))), copied=True)
    if division.algorithm.reduces:
        widest = max(1, *(division.computes(one)[1].extent for one in division.coordinates))
        rows = panel or max(TILE, CHUNK_BYTES // (FLOAT32_BYTES * widest) // TILE * TILE)
        return Work(division, chunks=tuple(chunks_of(division, rows)))
    if panel is not None:
        return Work(division, tuple(panels_of(division, 1, panel)), copied=copied)
    least = LEAST.get(precision, LEAST_OF_OTHERS)
    most = MOST_SUMS if precision in COMPENSATED else None
    whole = panels_of(division, least, None, most)
    extent = max(one.part.extent for one in whole)
    best, seconds, fits = Work(division, tuple(whole), copied=copied), 0.0, True
    for cuts in CUTS:
        deepest = ceil_div(extent, cuts)
        if cuts > 1 and (deepest < least or (most is not None and len(whole) * cuts > most)):
            break
        work = best if cuts == 1 else replace(best, panels=tuple(panels_of(division, least, deepest, most)))
        took = work.predicted(rates).seconds
        if cuts == 1 or not fits or took < CLEAR_GAIN * seconds:
            best, seconds = work, took
            elements = max(work.slot_elements(one, at) for one in "ab" for at in _some(division))
            fits = FLOAT32_BYTES * elements <= MOST_BYTES
    return best


def _some(division: Division) -> list[Coordinate]:
    """Return the coordinates of ranks that differ in what they hold first: all, or corners and the middle."""
    rows, cols = division.grid
    if rows * cols <= ALL_RANKS:
        return division.coordinates
    return [(i, j) for i in {0, rows // 2, rows - 1} for j in {0, cols // 2, cols - 1}]


def _elements(division: Division, panel: Panel, operand: str, coordinate: Coordinate) -> int:
    """Elements of a panel's operand that travel."""
    return sum(extent(division, piece, panel, operand, coordinate) for piece in getattr(panel, operand))


def extent(division: Division, piece: Piece, panel: Panel, operand: str, coordinate: Coordinate) -> int:
    """Elements of a piece on a rank: its range times the extent of the other axis there."""
    rows, cols = division.computes(coordinate)
    if panel.axis == "k":
        return piece.part.extent * (rows.extent if operand == "a" else cols.extent)
    return piece.part.extent * division.shape[2]


def _followed(work: Work, coordinate: Coordinate, rates: Rates) -> Prediction:
    """Follow a rank's steps, and return when all are done, and how long its products and its communication take."""
    division, products, communication = work.division, 0.0, 0.0
    now = line = 0.0
    arrived: dict[int, float] = {}
    read: dict[tuple[str, int], float] = {}  # when a slot is free
    rows, cols = division.computes(coordinate)

    def product(m: int, n: int, k: int, adds: bool) -> float:
        if not m * n:
            return 0.0
        tiles = ceil_div(m, TILE) * ceil_div(n, TILE) / H200_MULTIPROCESSORS
        rounds = max(1.0, ceil_div(int(tiles * H200_MULTIPROCESSORS), H200_MULTIPROCESSORS) / tiles)
        return LAUNCH + rounds * 2.0 * m * n * k / rates.flops + adds * FLOAT32_BYTES * m * n / rates.memory

    def broadcast(elements: int, dim: int) -> float:
        if division.grid[dim] == 1 or not elements:
            return 0.0
        return rates.latency + FLOAT32_BYTES * elements / rates.links[dim]

    for step in work.steps(coordinate):
        if isinstance(step, Fetch):
            panel, dim = work.panels[step.panel], 1 if step.operand == "a" else 0
            pieces = getattr(panel, step.operand)
            if work.copied:
                pieces = [one for one in pieces if one.root != along(step.operand, coordinate)]
            took = sum(broadcast(extent(division, one, panel, step.operand, coordinate), dim) for one in pieces)
            line = max(line, read.get((step.operand, step.slot), 0.0)) + took
            communication += took
            if not held(panel, step.operand, coordinate):
                arrived[step.panel] = line
        elif isinstance(step, Multiply):
            panel = work.panels[step.panel]
            extents = {"m": rows.extent, "n": cols.extent, "k": division.shape[2]} | {panel.axis: panel.part.extent}
            took = product(extents["m"], extents["n"], extents["k"], not step.first)
            now, products = max(now, arrived.get(step.panel, 0.0)) + took, products + took
            for operand, slot in (("a", step.a_slot), ("b", step.b_slot)):
                if slot is not None:
                    read[operand, slot] = now
        elif isinstance(step, Reduce):
            m, n = step.chunk.rows.extent, step.chunk.cols.extent
            took = product(m, n, division.inner(coordinate).extent, False)
            now, products = max(now, read.get(("c", step.slot), 0.0)) + took, products + took
            took = broadcast(m * n, 0)
            line, communication = max(line, now) + took, communication + took
            read["c", step.slot] = line
        elif isinstance(step, Give | Keep):
            m, n = step.chunk.rows.extent, step.chunk.cols.extent
            took = product(m, n, division.inner(coordinate).extent, False)
            now, products = now + took, products + took
            if isinstance(step, Give):
                line = now
        elif isinstance(step, Take):
            took = broadcast(step.chunk.rows.extent * step.chunk.cols.extent, 0)
            line = max(line, read.get(("c", step.slot), 0.0)) + took
            communication += took
            arrived[step.slot] = line
        elif isinstance(step, Add):
            took = 3 * FLOAT32_BYTES * step.chunk.rows.extent * step.chunk.cols.extent / rates.memory
            now = max(now, arrived[step.slot]) + took
            read["c", step.slot] = now
        else:
            took = broadcast(step.rows.extent * step.cols.extent, 0 if division.grid[0] > 1 else 1)
            line, communication = max(line, now) + took, communication + took
    return Prediction(max(now, line), products, communication)
