"""Memory traffic of each stage at each level of memory.

The closed forms, in elements, come first. They follow Ling, "GPU优化01：GEMM矩阵乘法" (2023), which divides a matrix
multiplication into block tiles of BM x BN, k-tiles of BK and thread tiles of TM x TN. `traffic` goes further: it counts
requests, sectors of 32 bytes, and passes through the 128-byte data path that L1 cache and shared memory of a
multiprocessor share, from the instructions of a warp (`numba_gemm.models.accesses`). The tests compare the counts with
those of Nsight Compute on an H200. Stores to shared memory take more passes there, and data that blocks of stream_k and
thin exchange are not counted.

Nothing here needs a GPU. Operands are row-major and aligned, and tiles that extend beyond C count as whole tiles. C is
not read (beta = 0), and its writes count from the L2 cache on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..device.units import FLOAT32_BYTES, WARP, ceil_div
from .accesses import UNTILED, Access, k_tile
from .roofline import gemm_bytes, gemm_flops

if TYPE_CHECKING:
    from ..kernels.ladder.stage import LadderStage
    from ..kernels.ladder.tile_config import TileConfig

__all__ = [
    "Traffic",
    "naive_reads",
    "naive_writes",
    "shared_ratio",
    "shared_reads",
    "shared_reads_untiled",
    "tile_passes",
    "tiled_ratio",
    "tiled_reads",
    "tiled_reads_exact",
    "traffic",
]

MOST_THREADS = 2048  # the most that any multiprocessor holds


def naive_reads(m: int, n: int, k: int) -> int:
    """Elements read from global memory by m*n threads, a row of A and a column of B each: 2*m*n*k (Ling, section 2)."""
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
    """Floats that a block reads with thread tiles: BM*BN*BK*(1/TM + 1/TN) (Ling, section 3); TM, TN divide BM, BN."""
    return BM * BN * BK // TN + BM * BN * BK // TM


def shared_ratio(TM: int, TN: int) -> float:
    """Ratio of `shared_reads` to `shared_reads_untiled`: (1/TM + 1/TN)/2 (Ling, section 3)."""
    return (1 / TM + 1 / TN) / 2


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
        requested bytes are assumed to come from there, although adjacent blocks may share lines of the L1 cache. In
        stages without, the L1 cache is assumed to fetch only once the data that 2048 threads of neighbouring blocks
        read, which is the minimum.
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
    """Count the traffic of a stage for an (m, k) by (k, n) product, without partial sums that are exchanged.

    Parameters
    ----------
    stage, config
        A stage and one of its configurations.
    m, n, k : int
        Extents, at least 1.
    in_l2 : bool
        True if operands and result are already in the L2 cache and stay there.

    Raises
    ------
    ValueError
        For extents below 1, or for a stage that is not in `WAYS`.
    """
    if min(m, n, k) < 1:
        raise ValueError(f"m, n, k are {m}, {n}, {k}; expected extents from 1 on; other products move nothing")
    accesses, tiled = k_tile(stage.name, config, k, n), stage.name not in UNTILED and config.tiles == 1
    if config.tiles > 1:  # one per thread, or per lanes that share it, along the rows of C
        down, across, lanes = ceil_div(m, config.BM), ceil_div(n, config.BN), config.lanes_k
        turns = ceil_div(down * across * lanes, WARP) * ceil_div(k, config.BK)
        ffma = turns * config.BM * config.BN * (config.BK // lanes)
        resident = MOST_THREADS // lanes
        BM, BN = max(resident // across, 1) * config.BM, min(across, resident) * config.BN
        requested, from_l2 = tiled_reads_exact(m, n, k, config.BM, config.BN), tiled_reads_exact(m, n, k, BM, BN)
        read = written = 0
    elif tiled:
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
