"""Instructions by which a warp of a stage reads and writes a k-tile, lane by lane.

In global memory, a request takes one pass through the data path of L1 cache and shared memory for each 128-byte line
that it touches; in shared memory, it takes the wavefronts of `numba_gemm.models.requests`. Operands are row-major and
aligned.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ..device.access import covers, vectors_per_row
from ..device.units import FLOAT32_BYTES, WARP, ceil_div
from . import requests

if TYPE_CHECKING:
    from ..kernels.ladder.tile_config import TileConfig

__all__ = ["Access", "k_tile"]

LINE = 32  # floats


@dataclass(frozen=True)
class Access:
    """An instruction of the first warp of a block, and the number of warps that execute one like it.

    Attributes
    ----------
    what : str
        "global" for a load from global memory, into registers or shared memory; "load" or "store" of shared memory.
    width : int
        Floats per lane.
    places : tuple of int
        Position of each lane's first float, in floats from the start of the operand or of the shared tile.
    warps : int
        Number of the block's warps that execute such an instruction.
    """

    what: str
    width: int
    places: tuple[int, ...]
    warps: int

    @cached_property
    def sectors(self) -> int:
        """Number of sectors of global memory that the warp touches."""
        return requests.sectors(self._lanes, FLOAT32_BYTES * self.width)

    @cached_property
    def passes(self) -> int:
        """Number of passes through the data path of L1 cache and shared memory."""
        if self.what == "global":
            return len({(place + i) // LINE for place in self.places for i in range(self.width)})
        return requests.wavefronts(self._lanes, FLOAT32_BYTES * self.width, write=self.what == "store")

    @property
    def _lanes(self) -> list[tuple[int, int]]:
        return [(lane, FLOAT32_BYTES * place) for lane, place in enumerate(self.places)]


class _Warp:
    """The lanes of a block's first warp; its methods create `Access` records."""

    def __init__(self, threads: int, lda: int, ldb: int) -> None:
        self.threads, self.lda, self.ldb = threads, lda, ldb
        self.tid = np.arange(min(threads, WARP))
        self.warps = ceil_div(threads, WARP)

    def a(self, row: np.ndarray, col: np.ndarray | int, width: int, warps: int = 0) -> Access:
        return self._access("global", width, row * self.lda + col, warps)

    def b(self, row: np.ndarray | int, col: np.ndarray, width: int, warps: int = 0) -> Access:
        return self._access("global", width, row * self.ldb + col, warps)

    def load(self, place: np.ndarray, width: int) -> Access:
        return self._access("load", width, place)

    def store(self, place: np.ndarray, width: int) -> Access:
        return self._access("store", width, place)

    def _access(self, what: str, width: int, place: np.ndarray, warps: int = 0) -> Access:
        spread = np.broadcast_to(place, self.tid.shape)
        return Access(what, width, tuple(spread.tolist()), warps or self.warps)


Accesses = Iterator[Access]
Way = Callable[["TileConfig", _Warp], Accesses]


def _widest(floats: int) -> int:
    """Return the floats per access, at most 4, for a run of `floats` contiguous floats."""
    return 4 if floats % 4 == 0 else 2 if floats % 2 == 0 else 1


def _elements(config: TileConfig, warp: _Warp, rows_along_x: bool) -> Accesses:
    """One k-step of stages in which a thread computes one element of C and reads only global memory."""
    along_x = config.BM if rows_along_x else config.BN
    x, y = warp.tid % along_x, warp.tid // along_x
    row, col = (x, y) if rows_along_x else (y, x)
    yield warp.a(row, 0, 1)
    yield warp.b(0, col, 1)


def _naive(config: TileConfig, warp: _Warp) -> Accesses:
    return _elements(config, warp, rows_along_x=True)


def _coalesced(config: TileConfig, warp: _Warp) -> Accesses:
    return _elements(config, warp, rows_along_x=False)


def _copies(config: TileConfig, warp: _Warp, width: int) -> Accesses:
    """Copies of both tiles through registers, layout unchanged, `width` floats per instruction."""
    for load, rows, cols in ((warp.a, config.BM, config.BK), (warp.b, config.BK, config.BN)):
        row, col = warp.tid // (cols // width), warp.tid % (cols // width) * width
        for _ in range(rows * cols // (width * warp.threads)):
            yield load(row, col, width)
            yield warp.store(row * cols + col, width)


def _shared_tile(config: TileConfig, warp: _Warp) -> Accesses:
    yield from _copies(config, warp, 1)
    x, y, width = warp.tid % config.BN, warp.tid // config.BN, _widest(config.BK)  # the compiler joins reads of A
    for p in range(config.BK):
        if p % width == 0:
            yield warp.load(y * config.BK + p, width)
        yield warp.load(p * config.BN + x, 1)


def _thread_tile_1d(config: TileConfig, warp: _Warp) -> Accesses:
    yield from _copies(config, warp, 1)
    row, col = warp.tid // config.BN * config.TM, warp.tid % config.BN
    width = _widest(config.BK)  # the compiler joins reads of A
    for p in range(config.BK):
        if p % width == 0:
            for i in range(config.TM):
                yield warp.load((row + i) * config.BK + p, width)
        yield warp.load(p * config.BN + col, 1)


def _tile_place(config: TileConfig, warp: _Warp, apart_m: int, apart_n: int) -> tuple[np.ndarray, np.ndarray]:
    """First row and column of each lane's elements, in stages that arrange threads by rows of the block tile."""
    across = config.BN // config.TN
    return warp.tid // across * apart_m, warp.tid % across * apart_n


def _thread_tile_2d(config: TileConfig, warp: _Warp) -> Accesses:
    yield from _copies(config, warp, 1)
    row, col = _tile_place(config, warp, config.TM, config.TN)
    width = _widest(config.TN)  # the compiler joins reads of B
    for p in range(config.BK):
        for i in range(config.TM):
            yield warp.load((row + i) * config.BK + p, 1)
        for j in range(0, config.TN, width):
            yield warp.load(p * config.BN + col + j, width)


def _vectorized(config: TileConfig, warp: _Warp) -> Accesses:
    yield from _copies(config, warp, 4)
    row, col = _tile_place(config, warp, config.TM, config.TN)
    for p in range(config.BK):
        if p % 4 == 0:
            for i in range(config.TM):
                yield warp.load((row + i) * config.BK + p, 4)
        for j in range(0, config.TN, 4):
            yield warp.load(p * config.BN + col + j, 4)


def _transposing(config: TileConfig, warp: _Warp, pitch: int, swizzle: int, wide: int = 0) -> Accesses:
    """Loads of A's tile in vectors of four along k, and its stores float by float, transposed."""
    vectors = config.BK // 4
    wide = wide or vectors  # vectors that a warp loads of a row
    row, col = warp.tid // wide, warp.tid % wide * 4
    for _ in range(config.BM * vectors // warp.threads):
        yield warp.a(row, col, 4)
        for q in range(4):
            yield warp.store((col + q) * pitch + (row ^ col // 4 * swizzle), 1)


def _rows(config: TileConfig, warp: _Warp, stored: bool) -> Accesses:
    """Copies of B's tile in vectors, adjacent lanes taking adjacent ones; through registers if `stored`."""
    vectors = config.BN // 4
    row, col = warp.tid // vectors, warp.tid % vectors * 4
    for _ in range(config.BK * vectors // warp.threads):
        yield warp.b(row, col, 4)
        if stored:
            yield warp.store(row * config.BN + col, 4)


def _conflict_free(config: TileConfig, warp: _Warp) -> Accesses:
    yield from _transposing(config, warp, config.BM, WARP // 2)
    yield from _rows(config, warp, stored=True)
    row, col = _tile_place(config, warp, 4, 4)
    for p in range(config.BK):
        for half in range(2):
            yield warp.load(p * config.BM + (row ^ p // 4 * (WARP // 2)) + half * (config.BM // 2), 4)
            yield warp.load(p * config.BN + col + half * (config.BN // 2), 4)


def _fragments(config: TileConfig, warp: _Warp, a_pitch: int, b_pitch: int) -> Accesses:
    """Reads of a warp tile's fragments: groups of four, 4*lanes_m rows and 4*lanes_n columns apart."""
    lanes_m, lanes_n = config.WM // config.TM, config.WN // config.TN
    row, col = warp.tid // lanes_n * 4, warp.tid % lanes_n * 4
    for p in range(config.BK // config.lanes_k):
        for i in range(0, config.TM, 4):
            yield warp.load(p * a_pitch + row + i * lanes_m, 4)
        for j in range(0, config.TN, 4):
            yield warp.load(p * b_pitch + col + j * lanes_n, 4)


def _warp_tiled(config: TileConfig, warp: _Warp) -> Accesses:
    yield from _transposing(config, warp, config.BM + config.pad, 0)
    yield from _rows(config, warp, stored=True)
    yield from _fragments(config, warp, config.BM + config.pad, config.BN)


def _async_copy(config: TileConfig, warp: _Warp) -> Accesses:
    yield from _transposing(config, warp, config.BM + config.pad, 0)
    yield from _rows(config, warp, stored=False)
    yield from _fragments(config, warp, config.BM + config.pad, config.BN)


def _any_layout(config: TileConfig, warp: _Warp) -> Generator[Access, None, int]:
    """Copies of both tiles, A's transposed; return the floats from one k of the shared tile of B to the next."""
    if covers("along4", config.BM, config.BK, config.threads):
        yield from _transposing(config, warp, config.BM + config.pad, 0, vectors_per_row(config.BK, config.threads))
    else:  # fewer vectors than threads: single floats, eight k of adjacent rows
        for _ in range(config.BM * config.BK // warp.threads):
            yield warp.a(warp.tid // 8, warp.tid % 8, 1)
    lanes = warp.threads // config.BK  # that copy a row of B
    if config.BN % (4 * lanes) == 0:
        row, col = warp.tid // lanes, warp.tid % lanes * 4
        for _ in range(config.BN // (4 * lanes)):
            yield warp.b(row, col, 4)
        return config.BN
    for _ in range(config.BN * config.BK // warp.threads):  # too narrow for vectors: eight k of adjacent columns
        yield warp.b(warp.tid % 8, warp.tid // 8, 1)
    return config.BN + config.pad_b


def _stream_k(config: TileConfig, warp: _Warp) -> Accesses:
    b_pitch = yield from _any_layout(config, warp)
    yield from _fragments(config, warp, config.BM + config.pad, b_pitch)


def _short_sums(config: TileConfig, warp: _Warp) -> Accesses:
    b_pitch = yield from _any_layout(config, warp)
    for p in range(config.BK):
        for i in range(0, config.TM, 4):
            yield warp.load(p * (config.BM + config.pad) + i + 0 * warp.tid, 4)
        yield warp.load(p * b_pitch + warp.tid, 1)


def _small_matrices(config: TileConfig, warp: _Warp) -> Accesses:
    across, width, lanes = ceil_div(warp.ldb, config.TN), _widest(config.TN), config.lanes_k
    tile, lane = warp.tid // lanes, warp.tid % lanes
    row, col = tile // across * config.TM, tile % across * config.TN
    if lanes > 1:  # lanes that share a tile read vectors of both operands, or of none
        for p in range(0, config.BK, lanes):
            for i in range(config.TM):
                yield warp.a(row + i, p + lane, 1)
            for j in range(config.TN):
                yield warp.b(p + lane, col + j, 1)
        return
    for i in range(config.TM):
        yield warp.a(row + i, 0, 4)
    for p in range(config.BK):
        for j in range(0, config.TN, width):
            yield warp.b(p, col + j, width)


def _thin(config: TileConfig, warp: _Warp) -> Accesses:
    BN, BK, TM, TN, lanes = config.BN, config.BK, config.TM, config.TN, config.lanes_k
    group, lane = warp.tid // lanes, warp.tid % lanes
    row, col = group // (BN // TN) * TM, group % (BN // TN) * TN

    def copies(count: int) -> Iterator[tuple[np.ndarray, int]]:
        for first in range(0, count, warp.threads):
            yield first + warp.tid, ceil_div(min(warp.threads, count - first), WARP)

    for e, copying in copies(config.BM * BK // 4):
        yield warp.a(e // (BK // 4), e % (BK // 4) * 4, 4, copying)
    if BN % 4:  # a column of B
        for e, copying in copies(BK):
            yield warp.b(e, e * 0, 1, copying)
    else:
        for e, copying in copies(BN * BK // 4):
            yield warp.b(e // (BN // 4), e % (BN // 4) * 4, 4, copying)
    for k in range(0, BK, 4 * lanes):
        for r in range(TM):
            yield warp.load((row + r) * BK + k + 4 * lane, 4)
        if BN % 4:
            yield warp.load(k + 4 * lane, 4)
            continue
        for q in range(4):
            for j in range(0, TN, 4):
                yield warp.load((k // 4 + lane) * (4 * BN + 4) + q * BN + col + j, 4)


# Function that models each stage's accesses in a k-tile, by the stage's name; in a k-step, of those of `UNTILED`.
WAYS: dict[str, Way] = {
    "naive": _naive,
    "coalesced": _coalesced,
    "shared_tile": _shared_tile,
    "thread_tile_1d": _thread_tile_1d,
    "thread_tile_2d": _thread_tile_2d,
    "vectorized": _vectorized,
    "conflict_free": _conflict_free,
    "double_buffered": _conflict_free,
    "warp_tiled": _warp_tiled,
    "register_prefetch": _warp_tiled,
    "moving_addresses": _warp_tiled,
    "async_copy": _async_copy,
    "snake_order": _async_copy,
    "basic_stream_k": _async_copy,
    "stream_k": _stream_k,
    "short_sums": _short_sums,
    "small_matrices": _small_matrices,
    "thin": _thin,
}

UNTILED = ("naive", "coalesced")


@lru_cache(maxsize=256)
def k_tile(name: str, config: TileConfig, lda: int, ldb: int) -> tuple[Access, ...]:
    """Return the instructions by which a block reads and writes a k-tile.

    Parameters
    ----------
    name : str
        Name of the stage.
    config : TileConfig
        One of its configurations.
    lda, ldb : int
        Leading dimensions of A and B: floats from one row to the next.

    Raises
    ------
    ValueError
        For a stage that is not in `WAYS`.
    """
    if name not in WAYS:
        raise ValueError(
            f"stage is {name!r}; expected one of {', '.join(WAYS)}; add how it reads and writes a k-tile to WAYS in "
            "numba_gemm/models/accesses.py"
        )
    return tuple(WAYS[name](config, _Warp(config.threads, lda, ldb)))
