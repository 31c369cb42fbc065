"""What each stage moves through each level of memory, and how soon it could at best be done.

The closed forms at the head, in elements, are those of Ling, "GPU优化01：GEMM矩阵乘法" (2023), which cuts a product
into block tiles of BM x BN, k-tiles of BK and thread tiles of TM x TN. `traffic` goes on from there: it lays out every
instruction by which a warp of a stage reads and writes a k-tile, and so counts requests, sectors of 32 bytes, and
passes through the data path of 128 bytes that a multiprocessor's L1 cache and shared memory have in common. For
4096 x 4096 x 4096 that is what Nsight Compute counted on an H200, to a few per mille, but for stores to shared memory,
which took up to 16 % more passes there, and for what blocks of stream_k and thin exchange.

A request takes a pass for each line of 128 bytes of global memory that it touches, and the wavefronts of
`numba_gemm.models.requests` in shared memory.

Nothing here needs a GPU. Operands lie by rows, aligned; tiles count as whole where they reach beyond C; C is not read,
and its writes count from the L2 cache on (beta = 0).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from . import requests
from .roofline import FLOAT32_BYTES, gemm_bytes, gemm_flops

if TYPE_CHECKING:
    from ..kernels.ladder.stage import Stage, TileConfig

__all__ = [
    "Ceilings",
    "Prediction",
    "Traffic",
    "naive_reads",
    "naive_writes",
    "predict",
    "shared_ratio",
    "shared_reads",
    "shared_reads_untiled",
    "theoretical_ceilings",
    "tile_passes",
    "tiled_ratio",
    "tiled_reads",
    "tiled_reads_exact",
    "traffic",
]

WARP = 32
LINE = 32  # floats
LINE_BYTES = LINE * FLOAT32_BYTES
MOST_THREADS = 2048  # that any multiprocessor holds
SHARED_BYTES_A_CLOCK = 128  # of one SM: 32 banks of 4 bytes
L2_BYTES_A_CLOCK = 64  # that one SM takes from the L2 cache

# ------------------------------------------------------------------------------------------------- the closed forms


def naive_reads(m: int, n: int, k: int) -> int:
    """Elements that m*n threads read of global memory, a row of A and a column of B each: 2*m*n*k (Ling, section 2)."""
    return 2 * m * n * k


def naive_writes(m: int, n: int) -> int:
    """Elements of C, each written once: m*n (Ling, section 2)."""
    return m * n


def tile_passes(m: int, n: int, BM: int, BN: int) -> tuple[int, int]:
    """How often block tiles read A, and how often B: N/BN and M/BM times, rounded up."""
    return -(-n // BN), -(-m // BM)


def tiled_reads(m: int, n: int, k: int, BM: int, BN: int) -> float:
    """Elements that block tiles read of global memory, m*n*k*(1/BM + 1/BN), where they divide C (Ling, section 2)."""
    return m * n * k * (1 / BM + 1 / BN)


def tiled_reads_exact(m: int, n: int, k: int, BM: int, BN: int) -> int:
    """The same for any extents: a tile reads what lies inside of A and B, and BK does not matter."""
    of_a, of_b = tile_passes(m, n, BM, BN)
    return m * k * of_a + k * n * of_b


def tiled_ratio(BM: int, BN: int) -> float:
    """`tiled_reads` over `naive_reads`: (1/BM + 1/BN)/2 (Ling, section 2)."""
    return (1 / BM + 1 / BN) / 2


def shared_reads_untiled(BM: int, BN: int, BK: int) -> int:
    """Elements that a block reads of shared memory for a k-tile, a thread an element: 2*BM*BN*BK (Ling, section 3)."""
    return 2 * BM * BN * BK


def shared_reads(BM: int, BN: int, BK: int, TM: int, TN: int) -> int:
    """The same with thread tiles: BM*BN*BK*(1/TM + 1/TN) (Ling, section 3); TM and TN divide BM and BN."""
    return BM * BN * BK // TN + BM * BN * BK // TM


def shared_ratio(TM: int, TN: int) -> float:
    """`shared_reads` over `shared_reads_untiled`: (1/TM + 1/TN)/2 (Ling, section 3)."""
    return (1 / TM + 1 / TN) / 2


# ------------------------------------------------------------------------------------- instructions of one k-tile


@dataclass(frozen=True)
class Access:
    """An instruction of the first warp of a block, and how many of the block's warps have one like it.

    Attributes
    ----------
    what : str
        "global" for a load from global memory, into registers or shared memory; "load" or "store" of shared memory.
    width : int
        Floats a lane.
    places : tuple of int
        Where each lane's first float lies, in floats from the start of the operand, or of a shared tile.
    warps : int
        Warps of the block.
    """

    what: str
    width: int
    places: tuple[int, ...]
    warps: int

    @cached_property
    def sectors(self) -> int:
        """Sectors of global memory that the warp touches."""
        return requests.sectors(self._lanes, FLOAT32_BYTES * self.width)

    @cached_property
    def passes(self) -> int:
        """Passes through the data path of L1 cache and shared memory."""
        if self.what == "global":
            return len({(place + i) // LINE for place in self.places for i in range(self.width)})
        return requests.wavefronts(self._lanes, FLOAT32_BYTES * self.width, write=self.what == "store")

    @property
    def _lanes(self) -> list[tuple[int, int]]:
        return [(lane, FLOAT32_BYTES * place) for lane, place in enumerate(self.places)]


class _Warp:
    """The lanes of a block's first warp, and what they do; makes `Access` records."""

    def __init__(self, threads: int, lda: int, ldb: int) -> None:
        self.threads, self.lda, self.ldb = threads, lda, ldb
        self.tid = np.arange(min(threads, WARP))
        self.warps = -(-threads // WARP)

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
    """Floats in one access of neighbours that are so many."""
    return 4 if floats % 4 == 0 else 2 if floats % 2 == 0 else 1


def _elements(config: TileConfig, warp: _Warp, rows_along_x: bool) -> Accesses:
    """A k-step of stages in which a thread has one element of C and reads global memory alone."""
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
    """Both tiles as they lie, so many floats an instruction, through registers."""
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
    """First row and column of each lane's elements, in stages that lay threads out by rows of the block tile."""
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


def _transposing(config: TileConfig, warp: _Warp, pitch: int, swizzle: int) -> Accesses:
    """A's tile in vectors of four k, stored float by float where it lies k by k."""
    vectors = config.BK // 4
    row, col = warp.tid // vectors, warp.tid % vectors * 4
    for _ in range(config.BM * vectors // warp.threads):
        yield warp.a(row, col, 4)
        for q in range(4):
            yield warp.store((col + q) * pitch + (row ^ col // 4 * swizzle), 1)


def _rows(config: TileConfig, warp: _Warp, stored: bool) -> Accesses:
    """B's tile in vectors, of which neighbouring lanes take neighbours; through registers, or not."""
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
    """Fragments of a warp tile, groups of four rows and columns a warp's lanes apart."""
    lanes_m, lanes_n = config.WM // config.TM, config.WN // config.TN
    row, col = warp.tid // lanes_n * 4, warp.tid % lanes_n * 4
    for p in range(config.BK):
        for i in range(0, config.TM, 4):
            yield warp.load(p * a_pitch + row + i * lanes_m, 4)
        for j in range(0, config.TN, 4):
            yield warp.load(p * b_pitch + col + j * lanes_n, 4)


def _warp_tiled(config: TileConfig, warp: _Warp) -> Accesses:
    yield from _transposing(config, warp, config.BM + config.pad, 0)
    yield from _rows(config, warp, stored=True)
    yield from _fragments(config, warp, config.BM + config.pad, config.BN)


def _async_copy(config: TileConfig, warp: _Warp) -> Accesses:
    for _ in range(config.BM * config.BK // warp.threads):
        yield warp.a(warp.tid // 8, warp.tid % 8, 1)
    yield from _rows(config, warp, stored=False)
    yield from _fragments(config, warp, config.BM + config.pad, config.BN)


def _lean_loop(config: TileConfig, warp: _Warp) -> Accesses:
    yield from _transposing(config, warp, config.BM + config.pad, 0)
    lanes, b_pitch = warp.threads // config.BK, config.BN  # that copy a row of B
    if config.BN % (4 * lanes) == 0:
        row, col = warp.tid // lanes, warp.tid % lanes * 4
        for _ in range(config.BN // (4 * lanes)):
            yield warp.b(row, col, 4)
    else:  # too narrow for vectors: floats, eight k of neighbouring columns
        b_pitch += config.pad_b
        for _ in range(config.BN * config.BK // warp.threads):
            yield warp.b(warp.tid % 8, warp.tid // 8, 1)
    yield from _fragments(config, warp, config.BM + config.pad, b_pitch)


def _thin(config: TileConfig, warp: _Warp) -> Accesses:
    BN, BK, lanes = config.BN, config.BK, config.lanes_k
    group, lane = warp.tid // lanes, warp.tid % lanes
    for r in range(config.TM):
        yield warp.a(group * config.TM + r, lane * 4, 4)
    for first in range(0, BN * BK, warp.threads):
        cols = min(BN, 8)
        rest = warp.tid // (4 * cols)
        col, p = rest // (BK // 4) * cols + warp.tid % cols, rest % (BK // 4) * 4 + warp.tid // cols % 4
        copying = -(-min(warp.threads, BN * BK - first) // WARP)
        yield warp.b(p, col, 1, copying) if BN > 1 else warp.b(warp.tid % BK, warp.tid // BK, 1, copying)
    for r in range(config.TM):
        yield warp.load(4 * warp.tid + 4 * r * warp.threads, 4)
    for j in range(BN):
        yield warp.load(4 * lane + j * (BK + (4 if BN > 1 else 0)), 4)


WAYS: dict[str, Way] = {
    "naive": _naive,
    "coalesced": _coalesced,
    "shared_tile": _shared_tile,
    "thread_tile_1d": _thread_tile_1d,
    "thread_tile_2d": _thread_tile_2d,
    "vectorized": _vectorized,
    "conflict_free": _conflict_free,
    "double_buffered": _conflict_free,
    "register_prefetch": _conflict_free,
    "warp_tiled": _warp_tiled,
    "async_copy": _async_copy,
    "lean_loop": _lean_loop,
    "stream_k": _lean_loop,
    "thin": _thin,
}
"""How each stage, by name, reads and writes a k-tile; a k-step where it has no shared tiles."""

UNTILED = ("naive", "coalesced")


@lru_cache(maxsize=256)
def k_tile(name: str, config: TileConfig, lda: int, ldb: int) -> tuple[Access, ...]:
    """The instructions by which a block reads and writes a k-tile.

    Parameters
    ----------
    name : str
        Of the stage.
    config : TileConfig
        One of its configurations.
    lda, ldb : int
        Floats from a row of A, and of B, to the next.

    Raises
    ------
    ValueError
        for a stage whose way is not in `WAYS`.
    """
    if name not in WAYS:
        raise ValueError(
            f"stage is {name!r}; expected one of {', '.join(WAYS)}; add how it reads and writes a k-tile to WAYS in "
            "numba_gemm/models/traffic.py"
        )
    return tuple(WAYS[name](config, _Warp(config.threads, lda, ldb)))


# -------------------------------------------------------------------------------------------------- whole products


@dataclass(frozen=True)
class Traffic:
    """What a stage does for a product. Instructions, sectors and passes are a warp's.

    Attributes
    ----------
    flops : int
        2*m*n*k.
    ffma : int
        Multiply-add instructions, those of tiles' parts outside of C among them.
    global_loads, global_sectors : int
        Load instructions (asynchronous copies too), and sectors that they ask the L1 cache for.
    requested_bytes : int
        Of A and B that the threads ask for.
    l2_bytes : int
        Of A and B that come from the L2 cache, and of C that go there. In stages with shared tiles all that is
        requested is taken to come from there (on an H200 up to a tenth did not: blocks side by side share lines of the
        L1 cache). In those without, it is assumed that the L1 cache brings what 2048 threads read,
        neighbouring blocks', once: the least that can be.
    dram_bytes : int
        The least: A and B once and C once, nothing beyond what the L2 cache keeps; 0 if it keeps all three.
    shared_loads, shared_stores : int
        Instructions. Asynchronous copies store without one.
    shared_read_bytes, shared_written_bytes : int
        Of threads: a word that many lanes read counts for each. Asynchronous copies count among what is written.
    passes : int
        Through the data path of L1 cache and shared memory, 128 bytes at most each.
    """

    flops: int
    ffma: int
    global_loads: int
    global_sectors: int
    requested_bytes: int
    l2_bytes: int
    dram_bytes: int
    shared_loads: int
    shared_stores: int
    shared_read_bytes: int
    shared_written_bytes: int
    passes: int


def traffic(stage: Stage, config: TileConfig, m: int, n: int, k: int, *, in_l2: bool = False) -> Traffic:
    """Count what a stage moves for an (m, k) by (k, n) product; partial sums that blocks exchange are left out.

    Parameters
    ----------
    stage, config
        A rung and one of its configurations.
    m, n, k : int
        Extents, at least 1.
    in_l2 : bool
        Whether operands and result are in the L2 cache already and stay there.

    Raises
    ------
    ValueError
        for extents below 1, and for a stage that is not in `WAYS`.
    """
    if min(m, n, k) < 1:
        raise ValueError(f"m, n, k are {m}, {n}, {k}; expected extents from 1 on; other products move nothing")
    accesses, tiled = k_tile(stage.name, config, k, n), stage.name not in UNTILED
    if tiled:
        BM, BN = config.BM, config.BN
        turns = -(-m // BM) * -(-n // BN) * -(-k // config.BK)
        ffma = turns * -(-config.threads // WARP) * config.TM * config.TN * (config.BK // config.lanes_k)
        requested = tiled_reads_exact(m, n, k, BM, BN)
        from_l2 = requested
        read, written = shared_reads(BM, BN, config.BK, config.TM, config.TN), config.BK * (BM + BN)
    else:  # whole warps that lie outside of C do nothing, so a warp is counted, not a block
        lanes = min(config.threads, WARP)
        if stage.rows_along_x:
            rows = min(config.BM, lanes)
            cols = lanes // rows
        else:
            cols = min(config.BN, lanes)
            rows = lanes // cols
        ffma = turns = -(-m // rows) * -(-n // cols) * k
        resident = max(1, MOST_THREADS // config.threads)
        tall = config.BM <= config.BN
        BM, BN = (resident * config.BM, config.BN) if tall else (config.BM, resident * config.BN)
        requested, from_l2 = naive_reads(m, n, k), tiled_reads_exact(m, n, k, BM, BN)
        read = written = 0

    def total(what: str, count: Callable[[Access], int]) -> int:
        return turns * sum((a.warps if tiled else 1) * count(a) for a in accesses if a.what == what)

    loads = total("global", lambda access: access.passes)
    return Traffic(
        flops=gemm_flops(m, n, k),
        ffma=ffma,
        global_loads=total("global", lambda access: 1),
        global_sectors=total("global", lambda access: access.sectors),
        requested_bytes=FLOAT32_BYTES * requested,
        l2_bytes=FLOAT32_BYTES * (from_l2 + naive_writes(m, n)),
        dram_bytes=0 if in_l2 else gemm_bytes(m, n, k),
        shared_loads=total("load", lambda access: 1),
        shared_stores=total("store", lambda access: 1),
        shared_read_bytes=FLOAT32_BYTES * turns * read,
        shared_written_bytes=FLOAT32_BYTES * turns * written,
        passes=loads + total("load", lambda access: access.passes) + total("store", lambda access: access.passes),
    )


@dataclass(frozen=True)
class Ceilings:
    """What a device can do at most, each alone.

    Attributes
    ----------
    fp32 : float
        FLOP/s of multiply-adds, two each.
    dram, l2, shared : float
        Byte/s read from device memory, from the L2 cache by all multiprocessors, and from their shared memories or L1
        caches.
    """

    fp32: float
    dram: float
    l2: float
    shared: float

    def __post_init__(self) -> None:
        wrong = [f"{field.name} is {getattr(self, field.name)!r}" for field in fields(self)]
        if not all(getattr(self, field.name) > 0 for field in fields(self)):
            raise ValueError(f"{', '.join(wrong)}; expected positive numbers, in FLOP/s and byte/s")


def theoretical_ceilings(fp32: float, dram: float, sm_count: int, clock_hz: float) -> Ceilings:
    """Ceilings that no measurement went into.

    Shared memory and L1 cache give 128 bytes a clock on each multiprocessor, a word from each of 32 banks (CUDA C++
    Programming Guide, "Shared Memory"). The L2 cache is taken to give each 64 bytes a clock, as wide as its way there
    is: more than all together get where there are many.

    Parameters
    ----------
    fp32, dram : float
        FLOP/s and byte/s, see `numba_gemm.models.roofline.fp32_peak`.
    sm_count, clock_hz
        Multiprocessors, and their clock.
    """
    return Ceilings(fp32, dram, L2_BYTES_A_CLOCK * sm_count * clock_hz, SHARED_BYTES_A_CLOCK * sm_count * clock_hz)


@dataclass(frozen=True)
class Prediction:
    """How long a product takes at least: as long as the resource that is busy longest.

    Waiting, filling and draining, and all instructions but multiply-adds are not part of it.

    Attributes
    ----------
    traffic : Traffic
        What is moved.
    fp32, dram, l2, shared : float
        Seconds that each resource is busy; `shared` is shared memory and L1 cache, which have one data path.
    """

    traffic: Traffic
    fp32: float
    dram: float
    l2: float
    shared: float

    @property
    def seconds(self) -> float:
        """The longest of them."""
        return max(self.fp32, self.dram, self.l2, self.shared)

    @property
    def binding(self) -> str:
        """The name of the resource that is busy longest: "FP32", "DRAM", "L2" or "shared"."""
        busy = {"FP32": self.fp32, "DRAM": self.dram, "L2": self.l2, "shared": self.shared}
        return max(busy, key=lambda name: busy[name])


def predict(
    stage: Stage,
    config: TileConfig,
    m: int,
    n: int,
    k: int,
    ceilings: Ceilings,
    *,
    in_l2: bool = False,
    sm_count: int = 1,
) -> Prediction:
    """Predict a product's time from what it moves and what a device can do.

    Parameters
    ----------
    stage, config, m, n, k, in_l2
        As in `traffic`.
    ceilings : Ceilings
        Of the device.
    sm_count : int
        Its multiprocessors, among which whole blocks are dealt, or whole k-tiles by a stage with a schedule: their FP32
        lanes and shared memories are busy as long as those of the one that gets most. By default they share evenly.

    Raises
    ------
    ValueError
        as `traffic` does.
    """
    moved = traffic(stage, config, m, n, k, in_l2=in_l2)
    pieces = -(-m // config.BM) * -(-n // config.BN) * (1 if stage.schedule is None else -(-k // config.BK))
    uneven = -(-pieces // sm_count) * sm_count / pieces
    return Prediction(
        traffic=moved,
        fp32=uneven * 2 * WARP * moved.ffma / ceilings.fp32,
        dram=moved.dram_bytes / ceilings.dram,
        l2=moved.l2_bytes / ceilings.l2,
        shared=uneven * LINE_BYTES * moved.passes / ceilings.shared,
    )
