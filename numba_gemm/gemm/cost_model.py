"""Cost model of the FP32 kernels: clocks that a configuration takes for a product, by how the work is divided.

In clocks of a multiprocessor (SM). A block that is alone on an SM spends a k-tile's latency on each k-tile; a full SM
spends its multiply-adds, at the configuration's efficiency; in between, blocks hide part of each other's waits. The SM
with the most k-tiles decides. Blocks that divide a tile of C pay for it: each writes its part, and the last one, or
another kernel, reads them all. No product takes less time than its memory traffic.

A new shape waits for these functions, so quotients are rounded up inline: one `ceil_div` takes as long as five of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import ceil, inf, log2, sqrt

from ..device.access import SECTOR
from ..device.units import FLOAT32_BYTES, OVERLAPPING, WARP
from ..kernels.ladder.partitions import (
    ADDED_AT_ONCE,
    MANY_ELEMENTS,
    MAX_LINE,
    READS_APART,
    adds_early,
    most_left_out,
    parts_at_once,
)
from ..kernels.ladder.stage import LadderStage, stores_directly
from ..kernels.ladder.tile_config import TileConfig
from ..models.roofline import FP32_LANES_PER_SM
from .ladder_rates import Rate

__all__ = ["Costs"]

# The constants down to RUN, and in `ladder_rates` the rates of `stream_k`, `short_sums` and `thin`, are fitted to
# 27,408 choices for 1,095 products on an H100 and an H200 (132 SMs at 1.98 GHz, graph replays; docs/experiments.md).
# The fit starts from earlier ones, which other rates and those of the largest two tiles are from. SOONER, WAIT,
# PUBLISH, CHUNK_RATE, NARROW_FLOATS, RUN, and the rates of `thin` and `coalesced` are fitted again, to 6,876 choices
# for 645 products, and rates of nine tiles of these and `short_sums` to 6,613 for 511; LONE_COLUMNS is read from ten
# that up to 35 blocks store. For other GPUs, `lab choices` measures, and `python -m numba_gemm.lab.bench.fit` fits.
# Clocks of a launch on all SMs, of a piece of a tile of C, and of each block of an SM; in `thin`, if blocks have one
# k-tile of divided tiles each, which hides no copies, of each block in addition.
LAUNCH, PIECE, BLOCK, ONE_K_TILE = 1850, 1400, 122, 300
# Clocks by which fewer blocks end sooner, each time that their number is halved: the slowest block decides.
SOONER = 69
# Waits and multiply-adds overlap as in a norm of this order: 1 would be not at all, infinity completely.
OVERLAP = 2.31
# So do these and the operands' bytes, but for `thin`; factor by which that takes longer if its last round is not full.
MEMORY_OVERLAP, LAST_ROUND = 2.58, 1.1
# Bytes of C per clock that an SM writes: in vectors, or float by float through shared memory; and float by float from
# where the sums are, as small thread tiles do without an epilogue.
STORE, STORE_FLOATS = 32.2, 9.75
# Factor by which stores of `short_sums` take longer if rows of C begin or end within a sector.
PARTIAL_SECTORS = 1.27
# Bytes of C per clock that all SMs and one write at most if its rows in memory are columns of tiles: each float is
# written for itself. All SMs write rows of less than two sectors in less time, as these are shared.
STORE_COLUMNS, LONE_COLUMNS = 0.65, 1.2
# Clocks until the other blocks' parts of a sum are known to be there, and a trip to the L2 cache.
MEET, TRIP = 4310, 713
# The same in `thin`, which publishes parts: clocks in any case, and per byte of a part. It adds more parts than
# `IN_GROUP` in groups, and then the groups' sums.
WAIT, PUBLISH, IN_GROUP = 1540, 0.563, 16
# Clocks of the launch that adds parts of sums, and of one that may start early; and of an SM per byte of C, by threads
# of one element and of four.
ADDING, ADDING_EARLY, APART, APART_BY_FOUR = 6550, 4570, 0.282, 0.0599
# Bytes of partial sums per clock between an SM and the L2 cache: all SMs at once, and one at best.
SHARED_RATE, LONE_RATE = 18.8, 68.3
# The same of first chunks in `thin`, for which all blocks wait at the same time; later ones overlap with multiply-adds.
CHUNK_RATE = 37.3
# Fraction of device memory's theoretical bandwidth that kernels reach.
MEMORY_EFFICIENCY = 0.915
# Factors by which bytes take longer in `thin`: if the contiguous axis of A is not k, and if it is copied by floats.
NARROW_ROWS, NARROW_FLOATS = 0.87, 1.09
# A tile is copied in runs, as long as the tile along the contiguous axis. Each run of A takes as much longer as this
# number of bytes, if it is copied in vectors, and by floats; and each run of A or B in `thin` keeps an SM busy for so
# many clocks.
PLACE, PLACE_FLOATS, RUN = 23.4, 35.5, 0.294
# Operations that compensated sums take beside each multiply-add, in `stream_k` and in `thin`; registers per SM; floats
# that `thin` converts to float64 per clock, and clocks until a lane's sum is added to those of others in float64.
COMPENSATING, COMPENSATING_LANES, REGISTERS, WIDENED, WIDE_SUM = 0.75, 1.5, 65536, 16, 7
# Clocks per sum of a thread that a lone block's k-tile takes longer, by stage as above; most blocks of `stream_k`.
COMPENSATING_ALONE, COMPENSATING_ALONE_LANES, MOST_COMPENSATED = 20, 8, 4
SPLITS = (2, 3, 4, 6, 8, 12, 16)
ROUNDING = 1.0 - 1e-12  # factor of a lower bound, whose sum is rounded in another order than what it bounds
SHORT_STEPS = 4  # terms that `short_sums` multiplies at a time
BEFORE_LOOP = 2  # pairs of k-steps that `stream_k` multiplies before its loop, where copies by floats are spread
DIRECT = "coalesced"  # which has no shared memory to wait for
MOST_LANES = max(FP32_LANES_PER_SM.values())

Way = tuple[float, int, tuple[int, int] | None]  # clocks; blocks, negated; blocks and whole tiles of a division


class Costs:
    """Times of one configuration on one device, for products of any extents.

    Parameters
    ----------
    stage, config, rate
        The configuration.
    cc, sm_count
        Compute capability and multiprocessors of the device.
    vectors : bool
        True if A and B allow 128-bit accesses along whichever axis is contiguous, in `thin` partial ones at the end of
        a row.
    stores_vectors : bool
        True if C is stored in 128-bit accesses, or through shared memory.
    compensated : bool
        True for sums whose error does not grow with K.
    a_along, b_along : bool
        True if k is the contiguous axis of A, and of B.

    Attributes
    ----------
    direct : bool
        True if it is that of `DIRECT`.
    divides : bool
        True if it divides products by a partition.
    in_groups : bool
        True if it adds parts of sums in groups.
    apart : float
        Parts of a sum beyond which another kernel adds them.
    bytes_factor : float
        Factor by which bytes take longer.
    """

    __slots__ = (
        *("_adding", "_arrival", "_at_once", "_begin", "_blocks", "_busy", "_k_tile", "_left_out", "_meet"),
        *("_meeting", "_piece", "_saved", "_size", "_store", "_stored", "_tile", "_traffic", "_undivided", "apart"),
        *("bytes_factor", "config", "direct", "divides", "in_groups", "rate", "sms", "stage"),
    )

    def __init__(
        self,
        stage: LadderStage,
        config: TileConfig,
        rate: Rate,
        cc: tuple[int, int],
        sm_count: int,
        vectors: bool,
        stores_vectors: bool,
        compensated: bool = False,
        a_along: bool = True,
        b_along: bool = False,
    ) -> None:
        lanes, finishing = FP32_LANES_PER_SM.get(cc, 128), 0.0
        full = config.BM * config.BN * config.BK / (lanes * rate.efficiency) * (1.0 if vectors else rate.floats)
        if config.in_lanes:
            full += RUN * ((config.BM if a_along else config.BK) + (config.BN if b_along else config.BK))
        if compensated:
            sums, in_lanes = config.TM * config.TN, config.in_lanes
            full += (COMPENSATING_LANES if in_lanes else COMPENSATING) * config.BM * config.BN * config.BK / lanes
            finishing = config.lanes_k * (config.BM * config.BN / WIDENED + WIDE_SUM) if in_lanes else 0.0
            resident = min(rate.resident, REGISTERS // (config.threads * (96 + 2 * sums)))  # about, of registers
            if not in_lanes and sums >= 32:
                resident = min(resident, MOST_COMPENSATED)
            alone = rate.alone + (COMPENSATING_ALONE_LANES if in_lanes else COMPENSATING_ALONE) * sums
            rate = replace(rate, alone=alone, resident=resident)
        self.stage, self.config, self.rate, self.sms = stage, config, rate, sm_count
        self._undivided = stage.undivided or (compensated and not config.in_lanes)  # whose parts cannot be added
        # Clocks of a k-tile per block, by the number of resident blocks.
        # One of an SM's four schedulers may have more warps than others; rates of `thin` are fitted without that.
        warps = 4 if stage.name == "thin" else config.threads // WARP
        self._k_tile = [
            (rate.alone**OVERLAP + (4 * ceil(resident * warps / 4) / warps * full) ** OVERLAP) ** (1 / OVERLAP)
            for resident in range(rate.resident + 1)
        ]
        # Terms beyond k that a k-tile leaves out: a pair of k-steps of every slice at a time, and at most. Then the
        # clocks of a k-tile that hide no wait, which become fewer with its terms.
        step, before = 2 * config.lanes_k, 0 if vectors else BEFORE_LOOP
        self._left_out = step, step * most_left_out(config, before) if stage.name == "stream_k" else 0
        self._saved = self._k_tile
        if not stage.undivided:
            self._saved = [clocks - rate.alone**OVERLAP / clocks ** (OVERLAP - 1) for clocks in self._k_tile]
        self.in_groups, self.direct, self.divides = stage.name == "thin", stage.name == DIRECT, stage.takes_partition
        self.apart = READS_APART * parts_at_once(config) if stage.adds_apart else inf
        self._adding = ADDING_EARLY if adds_early(config) and cc >= OVERLAPPING else ADDING
        place, factor = (PLACE, 1.0) if vectors else (PLACE_FLOATS, NARROW_FLOATS)
        run = config.BK if a_along else config.BM
        self.bytes_factor = factor * (1.0 if a_along else NARROW_ROWS) * (1.0 + place / (FLOAT32_BYTES * run))
        self._tile = config.BM, config.BN, config.BK
        self._blocks = rate.resident * sm_count
        # Clocks per tile and term in which a tile's operands come from the L2 cache, if that may take longest.
        self._traffic = FLOAT32_BYTES * (config.BM + config.BN) / (SHARED_RATE * sm_count) if self.in_groups else 0.0
        # Clocks per block and term in which first chunks arrive, in runs of a sector or more; a second k-tile, which
        # halves them, adds no less.
        runs = max(config.BM, 1 if a_along else SECTOR) + max(config.BN, 1 if b_along else SECTOR)
        arrival = min(FLOAT32_BYTES * runs / CHUNK_RATE, 2 * self._k_tile[1] / config.BK)
        self._arrival = arrival / sm_count if self.in_groups else 0.0
        self._size = FLOAT32_BYTES * config.BM * config.BN
        by_floats = self.direct or (stores_directly(config) and not stores_vectors)
        self._store = BLOCK + self._size / (STORE_FLOATS if by_floats else STORE) + finishing
        if stage.undivided and not stores_vectors:
            self._store *= PARTIAL_SECTORS
        self._at_once = max(1, 64 * (config.lanes_k if config.in_lanes else 1) // (config.TM * config.TN))
        # Least clocks of a k-tile and of C's tile, if all SMs are full; of a start; and of two parts that are added.
        self._busy, self._stored = self._k_tile[-1] / self._blocks, self._store / sm_count
        self._piece, self._begin = PIECE + finishing, min(PIECE, rate.first)
        self._meet = WAIT + PUBLISH * self._size if self.in_groups else MEET
        meeting = self._meet + 2 * self._size / LONE_RATE
        meeting = TRIP + self._size / SHARED_RATE + (min(self._adding, meeting) if stage.adds_apart else meeting)
        self._meeting = inf if self._undivided else meeting

    def least(
        self, m: int, n: int, k: int, matrices: int, memory: float, by_columns: bool = False
    ) -> tuple[float, int, float, float, float]:
        """Return clocks that no division can go below, numbers of tiles and k-tiles, and clocks of the bytes.

        Terms that a k-tile leaves out make the number of k-tiles smaller by a fraction.

        The last number is the clocks that each block adds to the time in which first chunks arrive. `by_columns` is
        True if rows of C in memory are columns of tiles.

        All multiprocessors are busy with multiply-adds and stores, and some block computes all k-tiles of a tile, or an
        equal part of them, which it adds to another's. The bytes of `memory` clocks overlap with these.
        """
        (BM, BN, BK), k_tile, (step, most) = self._tile, self._k_tile, self._left_out
        tiles: int = -(-m // BM) * -(-n // BN) * matrices
        k_tiles: float = -(-k // BK) or 1
        if self.stage.undivided:
            k_tiles = -(-k // SHORT_STEPS) * SHORT_STEPS / BK
        elif most and (k > BK or tiles > self._blocks):  # else a block's only k-tile waits, whatever k is
            beyond = (k_tiles * BK - k - (step - 1)) // step * step
            if beyond > 0:
                k_tiles -= (beyond if beyond < most else most) / BK
        line = -(-k_tiles // 1)
        if tiles * k * self._traffic > memory:
            memory = tiles * k * self._traffic
        if by_columns and not (self.direct or self.in_groups):
            memory = max(memory, FLOAT32_BYTES * matrices * m * n / (LONE_COLUMNS * tiles))
        work = tiles * k_tiles
        least = work * self._busy + tiles * self._stored + self._begin
        resident = -(-tiles // self.sms) if tiles < self._blocks else self.rate.resident
        whole = self.rate.first + resident * self._store
        whole += line * k_tile[resident] - (line - k_tiles) * self._saved[resident]
        shared = PIECE + self._store - (-work // self._blocks) * k_tile[1]
        if self.in_groups and memory > shared:
            shared = memory
        shared += self._meeting
        longest = whole if whole < shared else shared
        if longest > least:
            least = longest
        if self.direct:
            least += memory
        elif not self.in_groups:
            least = (least**MEMORY_OVERLAP + memory**MEMORY_OVERLAP) ** (1 / MEMORY_OVERLAP)
        arrival = self._arrival * (k if k < BK else BK) / k_tiles if self.in_groups else 0.0
        if tiles < self.sms:
            least += arrival * tiles - SOONER * log2(self.sms / tiles)
        else:
            least += arrival * self.sms
        if self.in_groups and memory > least:
            least = memory
        return (LAUNCH + least) * ROUNDING, tiles, k_tiles, memory, arrival

    def divisions(self, tiles: int, k_tiles: float) -> list[tuple[int, int]]:
        """Return ways to divide a product: blocks, and tiles that one block each computes.

        One block per tile; whole rounds, and the rest in equal partitions; a number of blocks per tile.
        """
        found, line = [(tiles, tiles)], -(-k_tiles // 1)
        if tiles * line >= MAX_LINE:
            return found
        for blocks in range(self.sms, self._blocks + 1, self.sms):
            if tiles > blocks:
                if tiles % blocks:
                    found.append((blocks, (tiles // blocks - 1) * blocks))
            elif tiles < blocks < tiles * line:
                found.append((blocks, 0))
        most = min(line, self._blocks // tiles)
        return found + [(tiles * split, 0) for split in SPLITS if split <= most]

    def ways(
        self,
        tiles: int,
        k_tiles: float,
        memory: float = 0.0,
        arrival: float = 0.0,
        limit: float = inf,
        least: float = inf,
    ) -> list[Way]:
        """Return each way to divide a product, and the clocks that it takes if memory does not limit it.

        In a stage that adds parts in groups, these are added after the operands' `memory` clocks, and each block adds
        `arrival` to the time in which first chunks arrive, see `least`. `DIRECT` waits for the memory's clocks, too.

        Ways that take more clocks than `limit` may be left out, and so may ways that take more than both `least` and an
        earlier one.
        """
        if not self.divides:
            clocks = self.clocks(tiles, k_tiles, [(tiles, tiles)])[0][0]
            return [(clocks + memory if self.direct else clocks, 0, None)]
        divisions = [(tiles, tiles)] if self._undivided else self.divisions(tiles, k_tiles)
        return self.clocks(tiles, k_tiles, divisions, memory, arrival, limit, least)

    def clocks(
        self,
        tiles: int,
        k_tiles: float,
        divisions: Iterable[tuple[int, int]],
        memory: float = 0.0,
        arrival: float = 0.0,
        limit: float = inf,
        least: float = inf,
    ) -> list[Way]:
        """Return the clocks that a product takes with some divisions, as `ways` does."""
        sms, store, k_tile, size, most, at_once, in_groups = (
            self.sms, self._store, self._k_tile, self._size, self._blocks, self._at_once, self.in_groups
        )  # fmt: skip
        apart, meet, adding, piece = self.apart, self._meet, self._adding, self._piece
        least_meeting = meet if apart == inf else min(meet, adding)
        found, first, line, saved = list[Way](), self.rate.first, -(-k_tiles // 1), self._saved
        left_out = line - k_tiles  # of a k-tile, beyond k; only a block with whole tiles takes less time
        for division in divisions:
            blocks, whole = division
            resident, clocks = -(-blocks // sms), 0.0
            launch = LAUNCH + arrival * (blocks if blocks < most else most)
            if blocks < sms:
                launch -= SOONER * log2(sms / blocks)
            if blocks > most:  # one block per tile, in rounds
                each = self.rate.resident
                rounds, rest = divmod(resident, each)
                clocks = rounds * (first + each * store + line * k_tile[each] - left_out * saved[each])
                if in_groups and rest:  # the last round begins when the others have read their share of the bytes
                    clocks = max(clocks, memory * rounds * most / blocks)
                if rest and each == 2 and not in_groups:  # an SM's two blocks end together, and two others begin
                    rest = 2
                if rest:
                    clocks += first + rest * store + line * k_tile[rest] - left_out * saved[rest]
                    clocks *= LAST_ROUND if in_groups else 1.0
                whole = tiles
            elif whole:
                each_tile = line * k_tile[resident] - left_out * saved[resident]
                clocks = -(-whole // blocks) * (first + resident * store + each_tile)
            divided_tiles = tiles - whole
            if divided_tiles > 0:
                shared = divided_tiles * line
                divided = -(-shared // blocks)  # k-tiles of divided tiles, of the block that has most
                summing = divided * k_tile[resident] + (ONE_K_TILE * resident if in_groups and divided == 1 else 0)
                if launch + clocks + summing + (PIECE + least_meeting if divided < line else PIECE) > limit:
                    continue
                even = not (shared % blocks or line % divided)  # else pieces straddle tiles
                of_tiles = divided / line
                pieces = 1 if even or divided_tiles == 1 else ceil(of_tiles) + 1  # of tiles, per block
                clocks += summing + pieces * piece + resident * store * (of_tiles if of_tiles > 1.0 else 1.0)
                parts = line / divided  # of a tile
                if not even:
                    parts += 1
                if parts > 1 and blocks > apart * divided_tiles:
                    clocks += pieces * size * sqrt(resident) / SHARED_RATE + adding
                    per_byte = APART if divided_tiles * size < FLOAT32_BYTES * MANY_ELEMENTS else APART_BY_FOUR
                    clocks += (parts / SHARED_RATE + per_byte) * size * divided_tiles / sms
                    clocks += TRIP * -(-parts // ADDED_AT_ONCE)
                elif parts > 1:
                    if in_groups and clocks < memory:
                        clocks = memory
                    reading = SHARED_RATE * sms / (divided_tiles if divided_tiles < sms else sms)
                    if reading > LONE_RATE:
                        reading = LONE_RATE
                    clocks += meet + pieces * size * sqrt(resident) / SHARED_RATE
                    if in_groups and parts > IN_GROUP:
                        parts = IN_GROUP + parts / IN_GROUP
                    clocks += parts * size / reading + TRIP * -(-parts // at_once)
            clocks += launch
            if clocks < limit:
                limit = clocks if clocks > least else least
            found.append((clocks, -blocks, division))
        return found


def memory_clocks(elements: int, bandwidth: float, clock_hz: float) -> float:
    """Return the clocks that reading and writing elements takes; 0 if the bandwidth is not known."""
    return FLOAT32_BYTES * elements / (MEMORY_EFFICIENCY * bandwidth) * clock_hz if bandwidth else 0.0


def columns_clocks(elements: int, row: int, sm_count: int) -> float:
    """Return the least clocks to write C by columns, but in `thin`, if its rows in memory have `row` floats."""
    return FLOAT32_BYTES * elements * min(1.0, row / (2 * SECTOR)) / (STORE_COLUMNS * sm_count)
