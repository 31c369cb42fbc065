"""Cost model of the FP32 kernels: clocks that a configuration takes for a product, by how the work is divided.

In clocks of a multiprocessor (SM). A k-tile costs a block that has the SM to itself its latency, and an SM that is
full its multiply-adds at the configuration's efficiency; between the two, blocks hide each other's waits in part. The
SM with the most k-tiles decides. Blocks that divide a tile of C pay for it: each writes its part, and the last one
reads them all. No product is faster than its bytes.

A new shape waits for these functions, so quotients are rounded up in place: a call of `ceil_div` takes as long as five.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, gcd, inf, sqrt

from ..device.units import FLOAT32_BYTES
from ..kernels.ladder import STAGES as LADDER
from ..kernels.ladder.stage import MAX_LINE, SUMS_STAGED, LadderStage, TileConfig, compensates
from ..kernels.stage import Stage
from ..models.roofline import FP32_LANES_PER_SM

__all__ = ["RATES", "Costs", "Rate", "costs_of", "rate_of", "rated"]

# The constants below and RATES are fitted to 7,086 products of 132 shapes on an H200 (132 SMs at 1.98 GHz, graph
# replays; docs/experiments.md); REGROUP, to 183 products of 38 thin or deep shapes; that of `coalesced`, to 9,000 small
# products of 513 shapes on an H100. Clocks of a launch, of a tile of C's first trip to memory, and of a piece of one.
LAUNCH, TILE, PIECE = 1626, 1934, 683
# Waits and multiply-adds overlap as in a norm of this order: 1 would be not at all, infinity completely.
OVERLAP = 2.49
# So do these and the operands' bytes, but for `thin`. This and most of `first` in RATES, and the rates of `thin`, are
# fitted to 4,700 products of 645 shapes on an H100.
MEMORY_OVERLAP = 4
# Bytes of C per clock that an SM writes: in vectors, float by float through shared memory, and from where the sums are,
# as small thread tiles do without an epilogue.
STORE, STORE_STAGED, STORE_FLOATS = 93, 26, 7.8
# The same, as a limit of all SMs, for a C whose rows in memory are columns of tiles: each float is written for itself.
# Fitted to two products with short sums.
STORE_COLUMNS = 0.7
# Clocks until the other blocks' parts of a sum are known to be there, and a trip to the L2 cache.
MEET, TRIP = 3550, 825
# `thin` adds more parts than the first of these in groups, and then the groups' sums, which takes so many clocks more.
IN_GROUP, REGROUP = 16, 3000
# Clocks until its block begins with another tile, after a part of one.
AGAIN = 4000
FIRST_FLOATS = 1000  # clocks until `thin` has its first tiles if copies are of single floats
# Bytes of partial sums per clock between an SM and the L2 cache: all SMs at once, and one at best.
SHARED_RATE, LONE_RATE = 21.1, 138
# Fraction of device memory's theoretical bandwidth that kernels reach, and factor by which bytes take longer in `thin`
# if the contiguous axis of A is not k: its tiles have few neighbouring rows.
MEMORY_EFFICIENCY, NARROW_ROWS = 0.85, 1.1
# Operations that compensated sums take beside each multiply-add, registers per SM, floats that it converts to float64
# per clock, and clocks until a lane's sum is added to those of others in float64.
COMPENSATING, REGISTERS, WIDENED, WIDE_SUM = 1.5, 65536, 16, 6
SPLITS = (2, 3, 4, 6, 8, 12, 16)
FEW_COLUMNS = 32  # up to which configurations for a C of few columns are considered
# Tiles along a row of C up to which those for a C of few columns are considered, and columns up to which `thin` is.
TILES_ALONG, THIN_COLUMNS = 8, 64
# `DIRECT` has no schedule. In float32, it is considered for a C of few elements, whose sums are short, without batch or
# epilogue.
DIRECT, DIRECT_ELEMENTS, DIRECT_TERMS = "coalesced", 1 << 17, 24
MOST_LANES = max(FP32_LANES_PER_SM.values())

Way = tuple[float, int, tuple[int, int] | None]  # clocks; blocks, negated; blocks and whole tiles of a division


@dataclass(frozen=True)
class Rate:
    """Measured speed of a configuration.

    Attributes
    ----------
    efficiency : float
        Fraction of FP32 peak when every SM is full and nothing waits.
    alone : int
        Clocks per k-tile of a block that has an SM to itself, beside its multiply-adds.
    resident : int
        Blocks that an SM holds at once, or fewer if those are as fast.
    floats : float
        Factor by which the multiply-adds take longer beside copies of an A or B that allows no vectors; 0 if the
        configuration is not considered for these.
    along : bool or None
        True if a narrow configuration is for an A whose contiguous axis is k, False if for any other; None if for both.
    first : int
        Clocks of a tile beside its k-tiles and the bytes of C: mostly its first trip to memory.
    """

    efficiency: float
    alone: int
    resident: int
    floats: float = 1.0
    along: bool | None = None
    first: int = TILE


# By stage and block tile; configurations that win nowhere are left out. `resident` follows from registers, threads and
# shared memory; `thin` has 1 where one block per SM keeps the memory busy. COMPENSATED: of such sums, if they differ.
RATES: dict[tuple[str, int, int, int], Rate] = {
    ("coalesced", 2, 128, 1): Rate(0.096, alone=60, resident=8, first=1270),
    ("register_prefetch", 64, 64, 16): Rate(0.53, alone=1030, resident=4),
    ("register_prefetch", 128, 128, 16): Rate(0.69, alone=2210, resident=2),
    ("register_prefetch", 128, 256, 16): Rate(0.72, alone=680, resident=1),
    ("shared_tile", 16, 16, 16): Rate(0.12, alone=670, resident=8, along=False),
    ("shared_tile", 32, 32, 32): Rate(0.136, alone=1500, resident=2),
    ("stream_k", 128, 256, 16): Rate(0.994, alone=3430, resident=1, floats=1.09, first=5770),
    ("stream_k", 256, 128, 16): Rate(0.957, alone=3435, resident=1, floats=1.03, first=6420),
    ("stream_k", 128, 128, 16): Rate(0.85, alone=2945, resident=2, first=5090),
    ("stream_k", 64, 128, 16): Rate(0.789, alone=1035, resident=3, floats=1.11, first=3340),
    ("stream_k", 64, 128, 8): Rate(0.68, alone=650, resident=3, first=2700),
    ("stream_k", 64, 64, 16): Rate(0.626, alone=780, resident=4, floats=1.09, first=2430),
    ("stream_k", 32, 64, 16): Rate(0.589, alone=1050, resident=8, floats=1.07, first=2710),
    ("stream_k", 64, 32, 16): Rate(0.566, alone=1070, resident=8, floats=1.07, first=2600),
    ("stream_k", 32, 32, 16): Rate(0.451, alone=676, resident=8, floats=1.02, first=1780),
    ("stream_k", 256, 16, 16): Rate(0.5, alone=1300, resident=3, along=False, first=2600),
    # For a C of few columns.
    ("thin", 1, 1, 512): Rate(0.0266, alone=95, resident=2, floats=1.03, along=True, first=2100),
    ("thin", 4, 1, 256): Rate(0.0476, alone=274, resident=3, floats=1.12, along=True, first=2240),
    ("thin", 16, 1, 256): Rate(0.0399, alone=223, resident=2, floats=0, first=2540),
    ("thin", 64, 1, 64): Rate(0.0495, alone=262, resident=1, floats=1.03, along=False, first=1970),
    ("thin", 4, 4, 512): Rate(0.103, alone=771, resident=1, first=2440),
    ("thin", 32, 4, 128): Rate(0.128, alone=401, resident=2, floats=1.05, along=True, first=2340),
    ("thin", 128, 4, 32): Rate(0.207, alone=728, resident=2, floats=1.2, along=False, first=2710),
    ("thin", 8, 8, 256): Rate(0.6, alone=1010, resident=1, first=2940),
    ("thin", 64, 8, 64): Rate(0.275, alone=415, resident=2, floats=1.02, along=True, first=3080),
    ("thin", 64, 16, 64): Rate(0.408, alone=973, resident=1, floats=1.19, along=True, first=3790),
    ("thin", 64, 16, 32): Rate(0.318, alone=320, resident=3, floats=1.2, along=False, first=3490),
    ("thin", 32, 32, 32): Rate(0.407, alone=446, resident=3, floats=1.03, first=3130),
}
COMPENSATED = {("thin", 128, 4, 32): Rate(0.207, alone=728, resident=1, floats=2.27, along=False, first=2710)}


def rate_of(stage: Stage, config: TileConfig) -> Rate | None:
    """Return the measured rate of a configuration, if it has one."""
    return RATES.get((stage.name, config.BM, config.BN, config.BK))


def is_narrow(stage: Stage, config: TileConfig) -> bool:
    """Return True if a configuration is worth considering for a C of few columns only."""
    return stage.name == "thin" or config.BN <= FEW_COLUMNS // 2 or config.BN == FEW_COLUMNS < config.BM


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
        True if C is stored in 128-bit accesses.
    compensated : bool
        True for sums whose error does not grow with K.

    Attributes
    ----------
    direct : bool
        True if it is that of `DIRECT`.
    divides : bool
        True if it divides products by a partition.
    in_groups : bool
        True if it adds parts of sums in groups.
    most_columns : float
        Columns of C up to which it is considered.
    along : bool or None
        Contiguous axis of A that it is considered for, as in `Rate`.
    """

    __slots__ = (
        "_at_once",
        "_blocks",
        "_k_tile",
        "_launch",
        "_size",
        "_store",
        "_tile",
        "_traffic",
        "_undivided",
        "along",
        "config",
        "direct",
        "divides",
        "in_groups",
        "most_columns",
        "rate",
        "sms",
        "stage",
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
    ) -> None:
        rate = COMPENSATED.get((stage.name, config.BM, config.BN, config.BK), rate) if compensated else rate
        lanes, finishing = FP32_LANES_PER_SM.get(cc, 128), 0.0
        full = config.BM * config.BN * config.BK / (lanes * rate.efficiency) * (1.0 if vectors else rate.floats)
        if compensated:
            full += COMPENSATING * config.BM * config.BN * config.BK / lanes
            if config.lanes_k > 1:
                finishing = config.lanes_k * (config.BM * config.BN / WIDENED + WIDE_SUM)
            registers = 96 + 2 * config.TM * config.TN  # about, per thread
            rate = replace(rate, resident=min(rate.resident, REGISTERS // (config.threads * registers)))
        self.stage, self.config, self.rate, self.sms = stage, config, rate, sm_count
        self._undivided = compensated and config.lanes_k == 1  # then the parts of a sum cannot be added
        # Clocks of a k-tile per block, by the number of resident blocks.
        self._k_tile = [
            (rate.alone**OVERLAP + (resident * full) ** OVERLAP) ** (1 / OVERLAP)
            for resident in range(rate.resident + 1)
        ]
        self.in_groups, self.direct, self.divides = stage.name == "thin", stage.name == DIRECT, stage.takes_partition
        # Tiles of several columns serve both axes well; of kernels with compensated sums, there are to be few.
        several = self.in_groups and config.BN > 1 and not compensated
        self.most_columns, self.along = inf, None if several else rate.along
        if is_narrow(stage, config):
            self.most_columns = TILES_ALONG * config.BN
            if self.in_groups or config.BN < FEW_COLUMNS:
                self.most_columns = min(self.most_columns, THIN_COLUMNS if self.in_groups else FEW_COLUMNS)
        self._launch = LAUNCH + (FIRST_FLOATS if self.in_groups and not vectors else 0)
        self._tile = config.BM, config.BN, config.BK
        self._blocks = rate.resident * sm_count
        # Clocks per tile and term in which a tile's operands come from the L2 cache, if that may take longest.
        self._traffic = FLOAT32_BYTES * (config.BM + config.BN) / (SHARED_RATE * sm_count) if self.in_groups else 0.0
        self._size = FLOAT32_BYTES * config.BM * config.BN
        by_floats = STORE_STAGED if config.TM * config.TN >= SUMS_STAGED else STORE_FLOATS
        self._store = self._size / (STORE if stores_vectors and not self.direct else by_floats) + finishing
        self._at_once = max(1, 64 * config.lanes_k // (config.TM * config.TN))

    def least(self, m: int, n: int, k: int, matrices: int, memory: float) -> tuple[float, int, int, float]:
        """Return clocks that no division can go below, numbers of tiles and k-tiles, and clocks of the bytes.

        All multiprocessors are busy with multiply-adds, or the memory is for so many clocks; and some block computes
        all k-tiles of a tile, or an equal part of them and meets others.
        """
        (BM, BN, BK), k_tile, blocks, store = self._tile, self._k_tile, self._blocks, self._store
        tiles, k_tiles = -(-m // BM) * -(-n // BN) * matrices, -(-k // BK) or 1
        if tiles * k * self._traffic > memory:
            memory = tiles * k * self._traffic
        work, alone = tiles * k_tiles, k_tile[1]
        busy = work * k_tile[-1] / blocks
        whole = self.rate.first + store + k_tiles * alone
        shared = PIECE + store + MEET + TRIP - (-work // blocks) * alone
        longest = whole if whole < shared else shared
        most = busy if busy > memory else memory
        return self._launch + (longest if longest > most else most), tiles, k_tiles, memory

    def divisions(self, tiles: int, k_tiles: int) -> list[tuple[int, int]]:
        """Return ways to divide a product: blocks, and tiles that one block each computes.

        One block per tile; whole rounds, and the rest in equal partitions; a number of blocks per tile.
        """
        found = [(tiles, tiles)]
        if tiles * k_tiles >= MAX_LINE:
            return found
        for blocks in range(self.sms, self._blocks + 1, self.sms):
            if tiles > blocks:
                if tiles % blocks:
                    found.append((blocks, (tiles // blocks - 1) * blocks))
            elif tiles < blocks < tiles * k_tiles:
                found.append((blocks, 0))
        most = min(k_tiles, self._blocks // tiles)
        return found + [(tiles * split, 0) for split in SPLITS if split <= most]

    def ways(self, tiles: int, k_tiles: int, memory: float = 0.0, limit: float = inf, least: float = inf) -> list[Way]:
        """Return each way to divide a product, and the clocks that it takes if memory does not limit it.

        In a stage that adds parts in groups, the parts of a sum are added after the operands' `memory` clocks. `DIRECT`
        waits for these, too.

        Ways that take more clocks than `limit` may be left out, and so may ways that take more than both `least` and an
        earlier one.
        """
        if not self.divides:
            clocks = self.clocks(tiles, k_tiles, [(tiles, tiles)])[0][0]
            return [(clocks + memory if self.direct else clocks, 0, None)]
        divisions = [(tiles, tiles)] if self._undivided else self.divisions(tiles, k_tiles)
        return self.clocks(tiles, k_tiles, divisions, memory, limit, least)

    def clocks(
        self,
        tiles: int,
        k_tiles: int,
        divisions: Iterable[tuple[int, int]],
        memory: float = 0.0,
        limit: float = inf,
        least: float = inf,
    ) -> list[Way]:
        """Return the clocks that a product takes with some divisions, as `ways` does."""
        launch, sms, store, k_tile, size, most, at_once, in_groups = (
            self._launch, self.sms, self._store, self._k_tile, self._size, self._blocks, self._at_once, self.in_groups
        )  # fmt: skip
        found, first = list[Way](), self.rate.first
        for division in divisions:
            blocks, whole = division
            resident, clocks = -(-blocks // sms), 0.0
            if blocks > most:  # one block per tile, in rounds
                each = self.rate.resident
                rounds, rest = divmod(resident, each)
                clocks = rounds * (first + each * store + k_tiles * k_tile[each])
                if rest:
                    clocks += first + rest * store + k_tiles * k_tile[rest]
                whole = tiles
            elif whole:
                clocks = -(-whole // blocks) * (first + resident * store + k_tiles * k_tile[resident])
            divided_tiles = tiles - whole
            if divided_tiles > 0:
                shared = divided_tiles * k_tiles
                divided = -(-shared // blocks)  # k-tiles of divided tiles, of the block that has most
                summing = divided * k_tile[resident]
                if launch + clocks + summing + (PIECE + MEET if divided < k_tiles else PIECE) > limit:
                    continue
                even = not (shared % blocks or k_tiles % divided)  # else pieces straddle tiles
                of_tiles = divided / k_tiles
                pieces = 1 if even or divided_tiles == 1 else ceil(of_tiles) + 1  # of tiles, per block
                clocks += summing + pieces * PIECE + resident * store * (of_tiles if of_tiles > 1.0 else 1.0)
                parts = k_tiles / divided  # of a tile
                if not even:
                    parts += 1
                if parts > 1:
                    if in_groups and clocks < memory:
                        clocks = memory
                    reading = SHARED_RATE * sms / (divided_tiles if divided_tiles < sms else sms)
                    if reading > LONE_RATE:
                        reading = LONE_RATE
                    clocks += MEET + pieces * size * sqrt(resident) / SHARED_RATE
                    if in_groups:
                        clocks += (pieces - 1) * AGAIN
                    if in_groups and parts > IN_GROUP:
                        clocks += REGROUP
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


def columns_clocks(elements: int, sm_count: int) -> float:
    """Return the clocks that writing a C that lies by columns takes at least, in stages other than `thin`."""
    return FLOAT32_BYTES * elements / (STORE_COLUMNS * sm_count)


@lru_cache(maxsize=16)
def rated(cc: tuple[int, int]) -> tuple[tuple[LadderStage, TileConfig], ...]:
    """Return the configurations that have a rate, of the stages that serve a compute capability best.

    A stage that takes any layout with a schedule serves nearly every shape better than the stages before it; where it
    runs, they are left out, but for `DIRECT`.
    """
    able = [stage for stage in LADDER.values() if stage.runs_on(cc)]
    scheduled = [stage for stage in able if stage.takes_variants]
    stages = [*scheduled, LADDER[DIRECT]] if scheduled else able
    return tuple((stage, config) for stage in stages for config in stage.configs if rate_of(stage, config) is not None)


@lru_cache(maxsize=16)
def common_divisors(cc: tuple[int, int]) -> tuple[int, int]:
    """Return the largest numbers that divide all extents of C's tiles, and of k-tiles, but for a C of few columns."""
    configs = [one for stage, one in rated(cc) if stage.name != DIRECT and not is_narrow(stage, one)]
    return gcd(*(config.BM for config in configs), *(config.BN for config in configs)), gcd(*(c.BK for c in configs))


@lru_cache(maxsize=256)
def costs_of(
    only: LadderStage | None,
    cc: tuple[int, int],
    sm_count: int,
    vectors: bool,
    partial_vectors: bool,
    stores_vectors: bool,
    compensated: bool = False,
) -> tuple[Costs, ...]:
    """Return the costs of all candidates on a device, or of one stage's."""
    found = rated(cc) if only is None else [(only, config) for config in only.configs]
    rates = (
        (stage, config, rate_of(stage, config), partial_vectors if config.lanes_k > 1 else vectors)
        for stage, config in found
    )
    return tuple(
        Costs(stage, config, rate, cc, sm_count, in_vectors, stores_vectors, compensated)
        for stage, config, rate, in_vectors in rates
        if rate is not None and (in_vectors or rate.floats) and (not compensated or compensates(config))
    )
