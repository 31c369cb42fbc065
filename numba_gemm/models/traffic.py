"""Memory traffic of each stage at each level of memory, and the shortest time it allows.

The closed forms, in elements, come first. They follow Ling, "GPU优化01：GEMM矩阵乘法" (2023), which divides a matrix
multiplication into block tiles of BM x BN, k-tiles of BK and thread tiles of TM x TN. `traffic` goes further: it models
every instruction by which a warp of a stage reads and writes a k-tile. From these it counts requests, sectors of 32
bytes, and passes through the 128-byte data path that L1 cache and shared memory of a multiprocessor share. For
4096 x 4096 x 4096 the counts agree with those of Nsight Compute on an H200 to a few per mille. The exceptions are
stores to shared memory, which took up to 16 % more passes there, and data that blocks of stream_k and thin exchange.

In global memory, a request takes one pass for each 128-byte line that it touches; in shared memory, it takes the
wavefronts of `numba_gemm.models.requests`.

Nothing here needs a GPU. Operands are row-major and aligned, and tiles that extend beyond C count as whole tiles. C is
not read (beta = 0), and its writes count from the L2 cache on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ..device.units import FLOAT32_BYTES, WARP, ceil_div
from . import requests
from .roofline import gemm_bytes, gemm_flops

if TYPE_CHECKING:
    from ..kernels.ladder.stage import LadderStage, TileConfig

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

LINE = 32  # floats
LINE_BYTES = LINE * FLOAT32_BYTES
MOST_THREADS = 2048  # the most that any multiprocessor holds
SHARED_BYTES_A_CLOCK = 128  # per SM: 32 banks of 4 bytes
L2_BYTES_A_CLOCK = 64  # per SM, from the L2 cache

# ------------------------------------------------------------------------------------------------- the closed forms


def naive_reads(m: int, n: int, k: int) -> int:
    """Elements read from global memory by m*n threads, each a row of A and a column of B: 2*m*n*k (Ling, section 2)."""
    return 2 * m * n * k


def naive_writes(m: int, n: int) -> int:
    """Elements of C, each written once: m*n (Ling, section 2)."""
    return m * n


def tile_passes(m: int, n: int, BM: int, BN: int) -> tuple[int, int]:
    """Number of times that block tiles read A and B: N/BN and M/BM respectively, rounded up."""
    return ceil_div(n, BN), ceil_div(m, BM)


def tiled_reads(m: int, n: int, k: int, BM: int, BN: int) -> float:
    """Elements that block tiles read from global memory if they divide C: m*n*k*(1/BM + 1/BN) (Ling, section 2)."""
    return m * n * k * (1 / BM + 1 / BN)


def tiled_reads_exact(m: int, n: int, k: int, BM: int, BN: int) -> int:
    """`tiled_reads` for any extents: a tile reads only elements inside A and B, so BK does not matter."""
    of_a, of_b = tile_passes(m, n, BM, BN)
    return m * k * of_a + k * n * of_b


def tiled_ratio(BM: int, BN: int) -> float:
    """Ratio of `tiled_reads` to `naive_reads`: (1/BM + 1/BN)/2 (Ling, section 2)."""
    return (1 / BM + 1 / BN) / 2


def shared_reads_untiled(BM: int, BN: int, BK: int) -> int:
    """Elements read from shared memory per block and k-tile, one thread per element: 2*BM*BN*BK (Ling, section 3)."""
    return 2 * BM * BN * BK


def shared_reads(BM: int, BN: int, BK: int, TM: int, TN: int) -> int:
    """The same with thread tiles: BM*BN*BK*(1/TM + 1/TN) (Ling, section 3); TM and TN divide BM and BN."""
    return BM * BN * BK // TN + BM * BN * BK // TM


def shared_ratio(TM: int, TN: int) -> float:
    """Ratio of `shared_reads` to `shared_reads_untiled`: (1/TM + 1/TN)/2 (Ling, section 3)."""
    return (1 / TM + 1 / TN) / 2


# ------------------------------------------------------------------------------------- instructions of one k-tile


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


def _transposing(config: TileConfig, warp: _Warp, pitch: int, swizzle: int) -> Accesses:
    """Loads of A's tile in vectors of four along k, and its stores float by float, transposed."""
    vectors = config.BK // 4
    row, col = warp.tid // vectors, warp.tid % vectors * 4
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
    lanes, b_pitch = warp.threads // config.BK, config.BN  # lanes that copy a row of B
    if config.BN % (4 * lanes) == 0:
        row, col = warp.tid // lanes, warp.tid % lanes * 4
        for _ in range(config.BN // (4 * lanes)):
            yield warp.b(row, col, 4)
    else:  # too narrow for vectors: single floats, eight k of adjacent columns
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
        copying = ceil_div(min(warp.threads, BN * BK - first), WARP)
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
"""Function that models each stage's accesses in a k-tile, by the stage's name; in a k-step, without shared tiles."""

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
            "numba_gemm/models/traffic.py"
        )
    return tuple(WAYS[name](config, _Warp(config.threads, lda, ldb)))


# -------------------------------------------------------------------------------------------------- whole products


@dataclass(frozen=True)
class Traffic:
    """Operations and memory traffic of a stage. Instructions, sectors and passes are those of warps.

    Attributes
    ----------
    flops : int
        2*m*n*k.
    ffma : int
        Multiply-add instructions, including those for parts of tiles outside C.
    global_loads, global_sectors : int
        Load instructions (including asynchronous copies), and the sectors that they request from the L1 cache.
    requested_bytes : int
        Bytes of A and B that the threads request.
    l2_bytes : int
        Bytes of A and B that come from the L2 cache, and of C that go there. In stages with shared tiles, all
        requested bytes are assumed to come from there (on an H200 up to a tenth did not: adjacent blocks share lines of
        the L1 cache). In stages without, the L1 cache is assumed to fetch only once the data that 2048 threads of
        neighbouring blocks read, which is the minimum.
    dram_bytes : int
        Minimum: A, B and C once each, with repeated reads served by the L2 cache; 0 if it keeps all three.
    shared_loads, shared_stores : int
        Instructions. Asynchronous copies store without an instruction.
    shared_read_bytes, shared_written_bytes : int
        Bytes counted per thread: a word that many lanes read counts once for each lane. Written bytes include those of
        asynchronous copies.
    passes : int
        Passes through the data path of L1 cache and shared memory, each of at most 128 bytes.
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


def traffic(stage: LadderStage, config: TileConfig, m: int, n: int, k: int, *, in_l2: bool = False) -> Traffic:
    """Count the traffic of a stage for an (m, k) by (k, n) product, without partial sums that blocks exchange.

    Parameters
    ----------
    stage, config
        A stage and one of its configurations.
    m, n, k : int
        Extents, at least 1.
    in_l2 : bool
        Whether operands and result are already in the L2 cache and stay there.

    Raises
    ------
    ValueError
        For extents below 1, or for a stage that is not in `WAYS`.
    """
    if min(m, n, k) < 1:
        raise ValueError(f"m, n, k are {m}, {n}, {k}; expected extents from 1 on; other products move nothing")
    accesses, tiled = k_tile(stage.name, config, k, n), stage.name not in UNTILED
    if tiled:
        BM, BN = config.BM, config.BN
        turns = ceil_div(m, BM) * ceil_div(n, BN) * ceil_div(k, config.BK)
        ffma = turns * ceil_div(config.threads, WARP) * config.TM * config.TN * (config.BK // config.lanes_k)
        requested = tiled_reads_exact(m, n, k, BM, BN)
        from_l2 = requested
        read, written = shared_reads(BM, BN, config.BK, config.TM, config.TN), config.BK * (BM + BN)
    else:  # warps entirely outside C do nothing, so warps are counted instead of blocks
        lanes = min(config.threads, WARP)
        if stage.rows_along_x:
            rows = min(config.BM, lanes)
            cols = lanes // rows
        else:
            cols = min(config.BN, lanes)
            rows = lanes // cols
        ffma = turns = ceil_div(m, rows) * ceil_div(n, cols) * k
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
    """Peak rates of a device, each resource alone.

    Attributes
    ----------
    fp32 : float
        FLOP/s of multiply-adds, two FLOP each.
    dram, l2, shared : float
        Byte/s read from device memory, from the L2 cache by all multiprocessors, and from the shared memories or L1
        caches of all multiprocessors.
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
    """Return ceilings computed without any measurement.

    Shared memory and L1 cache deliver 128 bytes per clock on each multiprocessor, one word from each of 32 banks (CUDA
    C++ Programming Guide, "Shared Memory"). The L2 cache is assumed to deliver 64 bytes per clock to each
    multiprocessor, the width of its connection. On devices with many multiprocessors, all together receive less.

    Parameters
    ----------
    fp32, dram : float
        FLOP/s and byte/s; see `numba_gemm.models.roofline.fp32_peak`.
    sm_count, clock_hz
        Number of multiprocessors, and their clock in Hz.
    """
    return Ceilings(fp32, dram, L2_BYTES_A_CLOCK * sm_count * clock_hz, SHARED_BYTES_A_CLOCK * sm_count * clock_hz)


@dataclass(frozen=True)
class Prediction:
    """Lower bound of a product's time: the time of the resource that is busy longest.

    The bound excludes waiting, filling and draining, and all instructions except multiply-adds.

    Attributes
    ----------
    traffic : Traffic
        Operations and data moved.
    fp32, dram, l2, shared : float
        Seconds that each resource is busy; `shared` is shared memory and L1 cache, which share one data path.
    """

    traffic: Traffic
    fp32: float
    dram: float
    l2: float
    shared: float

    @property
    def seconds(self) -> float:
        """The longest of the four times."""
        return max(self.fp32, self.dram, self.l2, self.shared)

    @property
    def binding(self) -> str:
        """The name of the resource that is busy longest: "FP32", "DRAM", "L2" or "shared"."""
        busy = {"FP32": self.fp32, "DRAM": self.dram, "L2": self.l2, "shared": self.shared}
        return max(busy, key=lambda name: busy[name])


def predict(
    stage: LadderStage,
    config: TileConfig,
    m: int,
    n: int,
    k: int,
    ceilings: Ceilings,
    *,
    in_l2: bool = False,
    sm_count: int = 1,
) -> Prediction:
    """Predict the time of a product from its traffic and a device's ceilings.

    Parameters
    ----------
    stage, config, m, n, k, in_l2
        As in `traffic`.
    ceilings : Ceilings
        Ceilings of the device.
    sm_count : int
        Number of multiprocessors of the device. They receive whole blocks, or whole k-tiles from a stage with a
        schedule; FP32 lanes and shared memories are busy as long as those of the multiprocessor that receives most.
        By default the work is shared evenly.

    Raises
    ------
    ValueError
        As for `traffic`.
    """
    moved = traffic(stage, config, m, n, k, in_l2=in_l2)
    pieces = ceil_div(m, config.BM) * ceil_div(n, config.BN) * (1 if stage.schedule is None else ceil_div(k, config.BK))
    uneven = ceil_div(pieces, sm_count) * sm_count / pieces
    return Prediction(
        traffic=moved,
        fp32=uneven * 2 * WARP * moved.ffma / ceilings.fp32,
        dram=moved.dram_bytes / ceilings.dram,
        l2=moved.l2_bytes / ceilings.l2,
        shared=uneven * LINE_BYTES * moved.passes / ceilings.shared,
    )
