"""Which stage, in which configuration and shares, for a product on a device: the policy behind ``stage="auto"``.

The model, in clocks of a multiprocessor (SM). A k-tile costs a block that has the SM to itself its latency, and an SM
that is full its multiply-adds at the configuration's efficiency; between the two, blocks hide each other's waits in
part. The SM with the most k-tiles decides. Blocks that divide a tile of C pay for it: each writes its part, and the
last one reads them all. No product is faster than its bytes. The candidate that ends first wins.

One module because the constants of the model are fitted together and mean nothing without the formulas that use them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, sqrt
from typing import Any

from ..device.units import FLOAT32_BYTES, ceil_div
from ..kernels import STAGES
from ..kernels.ladder import STAGES as LADDER
from ..kernels.ladder.stage import LadderStage, TileConfig
from ..kernels.ladder.stream_k import SUMS_STAGED
from ..kernels.product import Product
from ..kernels.stage import IEEE, Share, Stage
from ..kernels.tensor_core import tf32_tma
from ..kernels.tensor_core.tma_stage import TmaStage, tma_operands
from ..models.roofline import FP32_LANES_PER_SM
from ..runtime.device import DeviceProperties
from . import tensor_heuristics
from .precision import tensor_stage

# The constants below and RATES are fitted to 7,086 products of 132 shapes on an H200 (132 SMs at 1.98 GHz, graph
# replays; docs/experiments.md). Clocks of a launch, of a tile of C's first trip to memory, and of a piece of a tile's.
LAUNCH, TILE, PIECE = 1626, 1934, 683
# Waits and multiply-adds overlap as in a norm of this order: 1 would be not at all, infinity completely.
OVERLAP = 2.49
# Bytes of C a clock that an SM writes: in vectors, float by float through shared memory, and from where the sums are,
# as small thread tiles do without an epilogue.
STORE, STORE_STAGED, STORE_FLOATS = 93, 26, 7.8
# Clocks until the other blocks' parts of a sum are known to be there, and a trip to the L2 cache.
MEET, TRIP = 3550, 825
# Bytes of partial sums a clock between an SM and the L2 cache: all SMs at once, and one at best.
SHARED_RATE, LONE_RATE = 21.1, 138
# What is left of device memory's theoretical bandwidth.
MEMORY_EFFICIENCY = 0.85
SPLITS = (2, 3, 4, 6, 8, 12, 16)

ANY_GPU = (99, 0)  # a compute capability that no stage finds too low


@dataclass(frozen=True)
class Rate:
    """How fast a configuration is.

    Attributes
    ----------
    efficiency : float
        Fraction of FP32 peak when every SM is full and nothing waits.
    alone : int
        Clocks a k-tile of a block that has an SM to itself, beside its multiply-adds.
    resident : int
        Blocks that an SM holds at once.
    floats : float
        How much longer the multiply-adds take beside copies of an A or B that allows no vectors.
    """

    efficiency: float
    alone: int
    resident: int
    floats: float = 1.0


# By stage and block tile; configurations that win nowhere are left out. `resident` follows from registers, threads and
# shared memory.
RATES: dict[tuple[str, int, int, int], Rate] = {
    ("register_prefetch", 128, 128, 8): Rate(0.64, alone=710, resident=2),
    ("shared_tile", 16, 16, 16): Rate(0.12, alone=670, resident=8),
    ("shared_tile", 32, 32, 32): Rate(0.136, alone=1500, resident=2),
    ("warp_tiled", 64, 64, 16): Rate(0.53, alone=1030, resident=4),
    ("warp_tiled", 128, 128, 16): Rate(0.69, alone=2210, resident=2),
    ("warp_tiled", 128, 256, 16): Rate(0.72, alone=680, resident=1),
    ("stream_k", 128, 256, 16): Rate(0.994, alone=3430, resident=1, floats=1.09),
    ("stream_k", 256, 128, 16): Rate(0.957, alone=3435, resident=1, floats=1.03),
    ("stream_k", 128, 128, 16): Rate(0.85, alone=2945, resident=2),
    ("stream_k", 64, 128, 16): Rate(0.789, alone=1035, resident=3, floats=1.11),
    ("stream_k", 64, 64, 16): Rate(0.626, alone=780, resident=4, floats=1.09),
    ("stream_k", 32, 64, 32): Rate(0.555, alone=1525, resident=4, floats=1.08),
    ("stream_k", 32, 64, 16): Rate(0.589, alone=1050, resident=8, floats=1.07),
    ("stream_k", 32, 32, 16): Rate(0.451, alone=676, resident=8, floats=1.02),
    ("stream_k", 256, 16, 16): Rate(0.55, alone=1300, resident=3),
    # What brings A in at 24 bytes a clock: these are as fast as memory, if k is A's contiguous axis.
    ("thin", 64, 1, 128): Rate(0.047, alone=1000, resident=2),
    ("thin", 64, 4, 128): Rate(0.19, alone=1000, resident=2),
    ("thin", 128, 16, 32): Rate(0.65, alone=700, resident=2),
}


@dataclass(frozen=True)
class Problem:
    """Properties of a product on which the choice of a kernel depends.

    Attributes
    ----------
    m, n, k : int
        Extents in elements.
    matrices : int
        Products of a batch.
    aligned : bool
        Whether all operands allow 128-bit accesses by rows.
    vectors : bool
        Whether A and B allow them along whichever axis is contiguous.
    a_along, b_along : bool
        Whether k is the contiguous axis of A, and of B.
    by_columns : bool
        Whether C lies column by column.
    epilogue : bool
        Whether C's elements have one.
    precision : str
        Precision, not "fp32_auto".
    tma : str
        Layouts of A and B, "NN", "NT" or "TT", if tensor maps can describe them; else empty. Precisions other than
        "tf32" leave it empty.
    cc, sm_count, clock_hz, memory_bandwidth
        Of the device, see `runtime.device.DeviceProperties`.
    """

    m: int
    n: int
    k: int
    matrices: int = 1
    aligned: bool = True
    vectors: bool = True
    a_along: bool = True
    b_along: bool = False
    by_columns: bool = False
    epilogue: bool = False
    precision: str = IEEE
    tma: str = ""
    cc: tuple[int, int] = (9, 0)
    sm_count: int = 132
    clock_hz: float = 1.98e9
    memory_bandwidth: float = 4.8e12

    @property
    def swapped(self) -> Problem:
        """The same product as its transpose."""
        return replace(
            self, m=self.n, n=self.m, a_along=self.b_along, b_along=self.a_along, by_columns=not self.by_columns
        )


@dataclass(frozen=True)
class Choice:
    """A kernel, and how a product is launched with it.

    Attributes
    ----------
    stage, config
        The kernel.
    share : Share or None
        Division of the work among blocks, for a scheduled stage; None for the default.
    swapped : bool
        Whether to compute the transpose, ``C.T = B.T @ A.T``.
    clocks : float
        Expected duration in clocks, 0 if nothing was compared.
    reason : str
        Reason for the choice, in words.
    precision : str
        Precision.
    """

    stage: Stage
    config: Any
    share: Share | None = None
    swapped: bool = False
    clocks: float = 0.0
    reason: str = ""
    precision: str = IEEE

    @property
    def selected(self) -> tuple[Stage, Any, str, Share | None, bool]:
        """Stage, configuration, precision, share and swapped, as `runtime.launch.launch_product` takes them."""
        return self.stage, self.config, self.precision, self.share, self.swapped

    def oriented(self, product: Product) -> Product:
        """Return the product, or its transpose if that is what is computed."""
        return product.transposed if self.swapped else product


def problem(product: Product, gpu: DeviceProperties, precision: str = IEEE) -> Problem:
    """Return the properties of a product on which the choice of a kernel depends."""
    a, b, c, batch = product.a, product.b, product.c, product.batch
    whole = all(step % 16 == 0 for steps in (batch.a, batch.b, batch.c) for step in steps)
    a_rows, b_rows = a.aligned, b.aligned
    tma = None
    if precision in tf32_tma.STAGE.precisions and tf32_tma.STAGE.runs_on(gpu.cc):
        tma = tma_operands(product)
    return Problem(
        c.rows,
        c.cols,
        a.cols,
        batch.matrices,
        aligned=a_rows and b_rows and c.aligned and whole,
        vectors=whole and (a_rows or a.transposed.aligned) and (b_rows or b.transposed.aligned),
        a_along=a.col_stride == FLOAT32_BYTES,
        b_along=b.row_stride == FLOAT32_BYTES and b.col_stride != FLOAT32_BYTES,
        by_columns=c.row_stride == FLOAT32_BYTES and c.col_stride != FLOAT32_BYTES,
        epilogue=product.epilogue is not None,
        precision=precision,
        tma="" if tma is None else tma.layout,
        cc=gpu.cc,
        sm_count=gpu.sm_count,
        clock_hz=gpu.clock_hz,
        memory_bandwidth=gpu.memory_bandwidth,
    )


def resolve(name: str, cc: tuple[int, int]) -> Stage:
    """Return the stage of a name.

    Raises
    ------
    ValueError
        if there is none of that name, or a GPU of compute capability `cc` cannot run it.
    """
    if name not in STAGES:
        raise ValueError(f"stage is {name!r}; expected 'auto' or one of {', '.join(STAGES)}; pass one of these names")
    stage = STAGES[name]
    if cc != ANY_GPU and not stage.runs_on(cc):
        able = ", ".join(other.name for other in STAGES.values() if other.runs_on(cc))
        wanted = stage.min_cc if stage.only_cc is None else stage.only_cc
        raise ValueError(
            f"stage is {name!r}, which needs compute capability {_dotted(wanted)}; this GPU has {_dotted(cc)}; "
            f"pass 'auto' or one of {able}"
        )
    return stage


def _dotted(cc: tuple[int, int]) -> str:
    return f"{cc[0]}.{cc[1]}"


def candidates(cc: tuple[int, int]) -> Iterator[tuple[LadderStage, TileConfig]]:
    """Yield the stages and configurations of the FP32 ladder that `choose` may return on a compute capability.

    A stage with a schedule serves every shape and layout better than the rungs before it; where it runs, they are left
    out.
    """
    able = [stage for stage in LADDER.values() if stage.runs_on(cc)]
    scheduled = [stage for stage in able if stage.schedule is not None]
    for stage in scheduled or able:
        for config in stage.configs:
            if rate_of(stage, config) is not None:
                yield stage, config


def rate_of(stage: Stage, config: TileConfig) -> Rate | None:
    """The measured rate of a configuration, if it has one."""
    return RATES.get((stage.name, config.BM, config.BN, config.BK))


def shares(config: TileConfig, rate: Rate, wanted: Problem) -> Iterator[Share]:
    """Ways to divide a product: a block a tile; whole rounds and the rest in equal shares; so many blocks a tile."""
    tiles, k_tiles = _tiles(config, wanted)
    yield Share(tiles, tiles)
    if tiles * k_tiles >= 1 << 31:
        return
    for resident in range(1, rate.resident + 1):
        blocks = wanted.sm_count * resident
        if tiles > blocks:
            if tiles % blocks:
                yield Share(blocks, (tiles // blocks - 1) * blocks)
        elif tiles < blocks < tiles * k_tiles:
            yield Share(blocks, 0)
    for split in SPLITS:
        if split <= k_tiles and tiles * split <= wanted.sm_count * rate.resident:
            yield Share(tiles * split, 0)


def _tiles(config: TileConfig, wanted: Problem) -> tuple[int, int]:
    tiles = ceil_div(wanted.m, config.BM) * ceil_div(wanted.n, config.BN) * wanted.matrices
    return tiles, max(1, ceil_div(wanted.k, config.BK))


class _Model:
    """The model's times of one configuration in one problem, for any share.

    Attributes
    ----------
    least : float
        Clocks that no share can go below. All multiprocessors are busy with multiply-adds, or the memory is; and some
        block computes all k-tiles of a tile, or an equal share of them and meets others.
    """

    __slots__ = ("_k_tile", "config", "full", "k_tiles", "least", "memory", "rate", "size", "sms", "store", "tiles")

    def __init__(self, rate: Rate, config: TileConfig, wanted: Problem) -> None:
        self.rate, self.config, self.sms = rate, config, wanted.sm_count
        self.tiles, self.k_tiles = _tiles(config, wanted)
        lanes = FP32_LANES_PER_SM.get(wanted.cc, 128)
        full = config.BM * config.BN * config.BK / (lanes * rate.efficiency)
        self.full = full if wanted.vectors else full * rate.floats
        self.size = FLOAT32_BYTES * config.BM * config.BN
        by_floats = STORE_STAGED if config.TM * config.TN >= SUMS_STAGED else STORE_FLOATS
        self.store = self.size / (STORE if wanted.aligned and not wanted.epilogue else by_floats)
        elements = wanted.matrices * (wanted.m * wanted.k + wanted.k * wanted.n + wanted.m * wanted.n)
        self.memory = 0.0
        if wanted.memory_bandwidth:
            bytes_per_second = MEMORY_EFFICIENCY * wanted.memory_bandwidth
            self.memory = FLOAT32_BYTES * elements / bytes_per_second * wanted.clock_hz
        self._k_tile: dict[int, float] = {}
        blocks, alone = rate.resident * self.sms, self.k_tile(1)
        busy = self.tiles * self.k_tiles * self.k_tile(rate.resident) / blocks
        divided = MEET + TRIP + ceil_div(self.tiles * self.k_tiles, blocks) * alone
        self.least = LAUNCH + max(busy, self.memory, PIECE + self.store + min(self.k_tiles * alone, divided))

    def k_tile(self, resident: int) -> float:
        """Return the clocks of a k-tile of each of the resident blocks."""
        found = self._k_tile.get(resident)
        if found is None:
            found = (self.rate.alone**OVERLAP + (resident * self.full) ** OVERLAP) ** (1 / OVERLAP)
            self._k_tile[resident] = found
        return found

    def a_round(self, resident: int) -> float:
        """Return the clocks of a round of whole tiles."""
        return TILE + resident * self.store + self.k_tiles * self.k_tile(resident) if resident else 0.0

    def clocks(self, share: Share) -> float:
        """Return the clocks that a product takes with a share."""
        rate, sms, tiles, k_tiles = self.rate, self.sms, self.tiles, self.k_tiles
        if share.blocks > sms * rate.resident:  # a block a tile, in rounds
            rounds, rest = divmod(ceil_div(share.blocks, sms), rate.resident)
            clocks = rounds * self.a_round(rate.resident) + self.a_round(rest)
        else:
            resident = ceil_div(share.blocks, sms)
            clocks = ceil_div(share.whole, share.blocks) * self.a_round(resident)
            if tiles > share.whole:
                shared = (tiles - share.whole) * k_tiles
                divided = ceil_div(shared, share.blocks)  # k-tiles of divided tiles, of the block that has most
                parts = k_tiles / divided  # of a tile
                even = shared % share.blocks == 0 and k_tiles % divided == 0  # else pieces straddle tiles
                pieces = 1 if even else ceil(divided / k_tiles) + 1  # of tiles, a block
                storing = resident * self.store * max(1.0, divided / k_tiles)
                clocks += divided * self.k_tile(resident) + pieces * PIECE + storing
                if not even or parts > 1:
                    parts = max(parts if even else parts + 1, 1)
                    reading = min(LONE_RATE, SHARED_RATE * sms / min(tiles - share.whole, sms))
                    at_once = max(1, 64 // (self.config.TM * self.config.TN))
                    clocks += MEET + pieces * self.size * sqrt(resident) / SHARED_RATE + parts * self.size / reading
                    clocks += TRIP * -(-parts // at_once)
        return LAUNCH + max(clocks, self.memory)


def predicted_clocks(rate: Rate, config: TileConfig, share: Share, wanted: Problem) -> float:
    """Return the clocks that a product is expected to take."""
    return _Model(rate, config, wanted).clocks(share)


def ranked(wanted: Problem, only: Stage | None = None) -> list[Choice]:
    """Return all candidates, or one stage's, the one that is expected to be fastest first."""
    return _ranked_ladder(wanted, only) if wanted.precision == IEEE else _ranked_tensor(wanted, only)


def _ranked_tensor(wanted: Problem, only: Stage | None) -> list[Choice]:
    stage = only or (tf32_tma.STAGE if wanted.tma else tensor_stage(wanted.cc))
    if stage is None:
        return []
    extents = wanted.m, wanted.n, wanted.k
    before = 0.0
    if not isinstance(stage, TmaStage):
        before = tensor_heuristics.decomposition_seconds(
            wanted.precision, *extents, wanted.matrices, wanted.matrices, wanted.memory_bandwidth
        )
    timed = tensor_heuristics.seconds_of(
        stage, wanted.precision, *extents, wanted.matrices, wanted.sm_count, wanted.tma
    )
    return [
        Choice(stage, config, clocks=LAUNCH + (before + seconds) * wanted.clock_hz, precision=wanted.precision)
        for seconds, config in timed
    ]


@lru_cache(maxsize=16)
def _rated(cc: tuple[int, int]) -> list[tuple[LadderStage, TileConfig, Rate | None]]:
    """Return the candidates on a compute capability with their rates."""
    return [(stage, config, rate_of(stage, config)) for stage, config in candidates(cc)]


def _ladder_models(
    wanted: Problem, only: Stage | None
) -> Iterator[tuple[LadderStage, TileConfig, bool, Problem, _Model]]:
    """Yield the candidates: stage, configuration, whether swapped, the problem as computed, and the model."""
    turns = [False, True] if not wanted.epilogue and (min(wanted.m, wanted.n) <= 32 or wanted.by_columns) else [False]
    if isinstance(only, LadderStage):
        rates = [(only, config, rate_of(only, config)) for config in only.configs]
    else:
        rates = _rated(wanted.cc)
    for stage, config, rate in rates:
        if rate is None:
            continue
        for swapped in turns if stage.chooses_share else [False]:
            turned = wanted.swapped if swapped else wanted
            if only is not None or _fits(stage, config, turned):
                yield stage, config, swapped, turned, _Model(rate, config, turned)


def _timed_shares(
    stage: LadderStage, config: TileConfig, turned: Problem, model: _Model
) -> Iterator[tuple[float, int, Share | None]]:
    """Yield expected clocks, blocks negated, and share, for each way to divide the product."""
    if not stage.chooses_share:
        whole = model.clocks(Share(model.tiles, model.tiles))
        yield whole / (1 if turned.aligned else 0.93), 0, None
        return
    for share in shares(config, model.rate, turned):
        yield model.clocks(share), -share.blocks, share


def _ranked_ladder(wanted: Problem, only: Stage | None) -> list[Choice]:
    found = [
        (clocks, blocks, Choice(stage, config, share, swapped, clocks))
        for stage, config, swapped, turned, model in _ladder_models(wanted, only)
        for clocks, blocks, share in _timed_shares(stage, config, turned, model)
    ]
    # If several wait for memory alone, more blocks have more bytes under way.
    return [choice for *_, choice in sorted(found, key=lambda one: one[:2])]


def _best_ladder(wanted: Problem, only: Stage | None) -> Choice | None:
    """Return the first of `_ranked_ladder`, without configurations that cannot be it."""
    models = list(_ladder_models(wanted, only))
    order = sorted(range(len(models)), key=lambda i: models[i][-1].least)
    best: tuple[float, int, int, int] | None = None  # clocks, blocks, then the order of the ranking
    chosen: Choice | None = None
    for i in order:
        stage, config, swapped, turned, model = models[i]
        if best is not None and model.least > best[0]:
            break
        for j, (clocks, blocks, share) in enumerate(_timed_shares(stage, config, turned, model)):
            if best is None or (clocks, blocks, i, j) < best:
                best = clocks, blocks, i, j
                chosen = Choice(stage, config, share, swapped, clocks)
    return chosen


def _fits(stage: Stage, config: TileConfig, wanted: Problem) -> bool:
    """Whether a configuration for a C of few columns is worth considering; others always are."""
    if stage.name == "thin":
        return wanted.a_along and wanted.n <= config.BN
    return config.BN > 16 or (wanted.n <= 2 * config.BN and not wanted.a_along)


@lru_cache(maxsize=4096)
def best(wanted: Problem) -> Choice:
    """Return the choice that is expected to be fastest, without a reason: the same as `choose`, sooner."""
    found = _best_ladder(wanted, None) if wanted.precision == IEEE else next(iter(_ranked_tensor(wanted, None)), None)
    return choose(wanted) if found is None else found


@lru_cache(maxsize=4096)
def choose(wanted: Problem) -> Choice:
    """Return the choice that is expected to be fastest, and the reason."""
    found = ranked(wanted)
    if not found:
        raise RuntimeError(f"no stage in heuristics.RATES runs on compute capability {_dotted(wanted.cc)}")
    return replace(found[0], reason=_reason(found[0], wanted, len(found)))


@lru_cache(maxsize=4096)
def named(name: str, wanted: Problem) -> Choice:
    """Return how a stage of the caller's choice is run: in its first configuration, unless the model knows several.

    Raises
    ------
    ValueError
        As `resolve`; for a stage that does not compute in the precision, or not with such operands.
    """
    stage = resolve(name, wanted.cc)
    check_stage_precision(stage, wanted.precision)
    if isinstance(stage, TmaStage) and not wanted.tma:
        raise ValueError(
            f"stage is {name!r}, and tensor maps cannot describe these operands; expected addresses and strides that "
            "are multiples of 16 bytes, contiguous rows or columns, and A or B contiguous along K; pass 'auto'"
        )
    if wanted.tma and not isinstance(stage, TmaStage):
        wanted = replace(wanted, tma="")  # it decomposes the operands
    found = ranked(wanted, stage) if stage.chooses_share or wanted.precision != IEEE else []
    if not found:
        return Choice(stage, stage.configs[0], reason=f"stage {name} was asked for", precision=wanted.precision)
    return replace(found[0], reason=f"stage {name} was asked for; {_reason(found[0], wanted, len(found))}")


def check_stage_precision(stage: Stage, precision: str) -> None:
    """Raise ValueError unless a stage computes in a precision."""
    if precision not in stage.precisions:
        raise ValueError(
            f"precision is {precision!r} and stage is {stage.name!r}, which computes in "
            f"{', '.join(stage.precisions)}; expected a stage and a precision that agree; change one of them"
        )


def _reason(choice: Choice, wanted: Problem, count: int) -> str:
    turned, by_maps = wanted.swapped if choice.swapped else wanted, isinstance(choice.stage, TmaStage)
    rows, cols = (turned.n, turned.m) if by_maps and wanted.tma == "NN" else (turned.m, turned.n)
    tiles = ceil_div(rows, choice.config.BM) * ceil_div(cols, choice.config.BN) * wanted.matrices
    text = f"{tiles} tiles of {choice.config.BM}x{choice.config.BN} on {wanted.sm_count} SMs"
    if choice.share is not None:
        k_tiles = _tiles(choice.config, turned)[1]
        if choice.share.whole == tiles:
            text += f", one block each ({choice.share.blocks})"
        else:
            each = (tiles - choice.share.whole) * k_tiles / choice.share.blocks
            text += (
                f", the last {tiles - choice.share.whole} divided among {choice.share.blocks} blocks, {each:.1f} of "
                f"{k_tiles} k-tiles each"
            )
    if choice.swapped:
        text += ", computed as the transpose"
    if wanted.precision != IEEE:
        text += ", operands as they are" if by_maps else ", operands decomposed first"
    micros = choice.clocks / wanted.clock_hz * 1e6
    candidates = "the only candidate" if count == 1 else f"the least of {count} candidates"
    return f"{text}; expected to take {micros:.1f} us, {candidates}"
