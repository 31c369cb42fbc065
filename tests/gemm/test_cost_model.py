"""Model of the FP32 kernels' speed: more work takes longer, and every division can be launched."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.problems import PROPERTIES

from numba_gemm.gemm import ladder_heuristics
from numba_gemm.gemm.cost_model import LAST_ROUND, LAUNCH, SOONER, WIDENED, Costs, columns_clocks, memory_clocks
from numba_gemm.gemm.heuristics import Problem, choose
from numba_gemm.gemm.ladder_heuristics import best_of_ladder, considered_of, ranked_ladder
from numba_gemm.gemm.ladder_rates import RATES, Rate, rate_of
from numba_gemm.kernels.ladder import STAGES
from numba_gemm.kernels.ladder.partitions import partition_layout
from numba_gemm.kernels.product import ONE, Batch
from numba_gemm.kernels.stage import Partition

extents = st.one_of(st.integers(1, 300), st.integers(1, 20_000))
matrices = st.sampled_from([1, 1, 7, 300])


def costs_of_key(key, vectors=True, stores_vectors=True, sm_count=132, **along):
    stage = STAGES[key[0]]
    config = next(one for one in stage.configs if rate_of(stage, one) is RATES[key])
    return Costs(stage, config, RATES[key], (9, 0), sm_count, vectors, stores_vectors, **along)


def clocks(costs, m, n, k, matrices=1, division=None):
    """Return the predicted clocks of a product, by default of one block per tile."""
    memory = memory_clocks(matrices * (m * k + k * n + m * n), 4.8e12, 1.98e9)
    _, tiles, k_tiles, _, arrival = costs.least(m, n, k, matrices, memory)
    return max(costs.clocks(tiles, k_tiles, [division or (tiles, tiles)], 0.0, arrival)[0][0], LAUNCH + memory)


def test_every_rate_is_of_a_configuration():
    configs = [(stage, one) for stage in STAGES.values() for one in stage.configs]
    assert {id(rate) for rate in RATES.values()} == {id(rate) for one in configs if (rate := rate_of(*one))}


@pytest.mark.parametrize("key", RATES)
def test_rates_are_possible(key):
    rate = RATES[key]
    assert 0 < rate.efficiency <= 1
    assert rate.alone > 0
    assert rate.resident * costs_of_key(key).config.threads <= 2048, "more threads than an SM has"


@given(
    extents, extents, extents, matrices, st.booleans(), st.booleans(), st.integers(1, 200), st.sampled_from([*RATES])
)
@example(1, 1, 256, 1, False, False, 1, ("thin", 16, 1, 256))  # two k-tiles, whose first chunks are half of all
def test_more_work_is_never_predicted_faster(m, n, k, matrices, vectors, stores_vectors, sm_count, key):
    """For one block per tile: other divisions depend on the number of tiles."""
    costs = costs_of_key(key, vectors, stores_vectors, sm_count)
    one = clocks(costs, m, n, k, matrices)
    for larger in ((2 * m, n, k), (m, 2 * n, k), (m, n, 2 * k)):
        assert one <= clocks(costs, *larger, matrices)


problems = st.builds(
    lambda **given: Problem(**given),
    m=extents,
    n=st.one_of(st.integers(1, 40), extents),
    k=extents,
    precision=st.sampled_from(["ieee", "ieee", "bf16x6"]),
    cc=st.sampled_from([(9, 0), (8, 0), (8, 9), (12, 0)]),
    sm_count=st.integers(1, 300),
    memory_bandwidth=st.sampled_from([0.0, 4.8e12, 1e12, 5e10]),
    **{name: st.booleans() for name in ("a_vectors", "b_vectors", "c_vectors")},
    **PROPERTIES,
)
UNALIGNED = dict.fromkeys(("aligned", "vectors", "a_vectors", "b_vectors", "c_vectors", "c_sectors"), False)


@given(problems)
@example(Problem(129, 133, 129, cc=(8, 0), sm_count=133))  # a bound equal to the time, but for rounding
@example(Problem(12, 25, 9708, b_along=True, **UNALIGNED, cc=(8, 9), sm_count=128, clock_hz=2.52e9))  # a tie
@example(Problem(39, 19, 2593, 7, aligned=False, b_along=True, cc=(8, 6), sm_count=20, clock_hz=1.5e9))
@example(Problem(300, 300, 300, cc=(7, 5)))  # no stage that divides
def test_candidates_that_are_not_timed_are_not_the_fastest(wanted):
    ranking = ranked_ladder(wanted)
    assert best_of_ladder(wanted) == ranking[0]
    assert best_of_ladder(wanted, ranking[0].clocks) == ranking[0]
    assert best_of_ladder(wanted, 0.99 * ranking[0].clocks) is None
    for least, _, costs, _, *of_product in ladder_heuristics._ladder_candidates(wanted, None):
        fastest = min(ladder_heuristics._timed(costs, *of_product, wanted.aligned))
        assert least <= fastest[0]
        limited = ladder_heuristics._timed(costs, *of_product, wanted.aligned, fastest[0])
        assert min(limited) == fastest


@pytest.mark.parametrize(("epilogue", "considered"), [(False, False), (True, True)])
def test_tiles_that_a_thin_c_hardly_fills(epilogue, considered):
    """They are left out where `thin` takes the product as is and as the transpose, which an epilogue forbids."""
    wanted = Problem(1, 4096, 4096, epilogue=epilogue)
    assert any(one.stage is STAGES["stream_k"] for one in ranked_ladder(wanted)) == considered


# Slices, then the tiles that they replace: rows, columns, sums and threads of a thread tile.
SLICES, REPLACED = {(64, 64, 64, 2), (32, 64, 32, 2), (32, 64, 32, 4)}, {(64, 64, 64, 1), (32, 64, 32, 1)}


@pytest.mark.parametrize(
    ("wanted", "slices"),
    [
        (Problem(512, 512, 512), True),
        (Problem(512, 512, 8192), False),  # larger operands
        (Problem(512, 512, 512, 16), False),
        (Problem(512, 512, 512, **UNALIGNED), False),
        (Problem(512, 512, 512, precision="bf16x6"), False),  # compensated sums
    ],
)
def test_slices_replace_tiles_of_small_operands(wanted, slices):
    configs = [one.config for one in ranked_ladder(wanted) if one.stage is STAGES["stream_k"]]
    found = {(one.BM, one.BN, one.TM * one.TN, one.lanes_k) for one in configs}
    assert (found & SLICES) == (SLICES if slices else set())
    replaced = {one for one in REPLACED if wanted.precision == "ieee" or one[2] == 32}
    assert (found & replaced) == (set() if slices else replaced)


def test_unaligned_operands_of_stages_without_schedules_take_longer():
    aligned, unaligned = (ranked_ladder(Problem(1000, 1000, 1000, aligned=one, cc=(7, 5))) for one in (True, False))
    assert unaligned[0].clocks == pytest.approx(aligned[0].clocks / 0.93)


@given(extents, extents, extents, matrices, st.integers(1, 200), st.sampled_from([(9, 0), (8, 0)]))
def test_divisions_divide_every_k_tile_once(m, n, k, matrices, sm_count, cc):
    """The line of shared k-tiles, cut at g * base + min(g, extra), has no gap and no overlap."""
    for costs in (one.costs for one in considered_of(None, cc, sm_count, True, True, True)):
        if not costs.stage.takes_partition:
            continue
        least, tiles, k_tiles, in_bytes, arrival = costs.least(m, n, k, matrices, 0.0)
        whole_k_tiles = -(-k // costs.config.BK)
        assert tiles == -(-m // costs.config.BM) * -(-n // costs.config.BN) * matrices
        leaves_out = costs.stage.undivided or costs.stage.name == "stream_k"  # terms of a k-tile that are beyond k
        assert k_tiles == whole_k_tiles or (leaves_out and k / costs.config.BK <= k_tiles < whole_k_tiles)
        ways = costs.ways(tiles, k_tiles, in_bytes, arrival)
        assert ways[0][2] == (tiles, tiles), "one block per tile"
        for clocks, _, (blocks, whole) in ways:
            made = partition_layout(costs.config, m, n, k, Batch((matrices, 1, 1)), Partition(blocks, whole))
            of_tiles, base, extra, of_k = made.words[:4]
            assert (of_tiles, of_k) == (whole, whole_k_tiles)
            assert blocks * base + extra == (tiles - whole) * whole_k_tiles
            assert 0 <= extra < blocks
            assert made.counters == 0 or base > 0, "a block without work would leave its part unwritten"
            published = costs.stage.name == "thin"
            assert (made.workspace_bytes == 0) == (made.counters == 0 or published)
            assert least <= max(clocks, LAUNCH + in_bytes), "a division below the bound"


def test_terms_that_a_lone_k_tile_leaves_out_count_where_tiles_follow_each_other():
    """17361x2295x1 takes 45.6 us in these tiles on an H200; whole k-tiles would make it 74."""
    costs = costs_of_key(("stream_k", 64, 128, 16))
    full = 132 * costs.rate.resident
    k_tiles = [costs.least(64 * tiles, 128, 1, 1, 0.0)[2] for tiles in (1, full, full + 1)]
    assert k_tiles[:2] == [1.0, 1.0]
    assert 1 / 16 <= k_tiles[2] < 0.6


def test_short_rows_of_a_c_that_is_written_by_columns_share_sectors():
    assert columns_clocks(1000, 4, 132) == columns_clocks(1000, 16, 132) / 4
    assert columns_clocks(1000, 16, 132) == columns_clocks(1000, 5000, 132)
    # 16873x4x2 takes 1.7 us in `coalesced` on an H200, and 2.1 in `short_sums`.
    for wanted in (Problem(16873, 4, 2), Problem(4, 16873, 2, by_columns=True)):
        assert ranked_ladder(wanted)[0].stage is STAGES["coalesced"]


def test_pieces_that_straddle_tiles_are_dearer():
    """Three blocks for each of 40 tiles: 12 k-tiles are four for each block, 11 leave pieces of two tiles."""
    costs = costs_of_key(("stream_k", 32, 32, 16))
    even = clocks(costs, 5 * 32, 8 * 32, 16 * 12, division=(120, 0))
    assert clocks(costs, 5 * 32, 8 * 32, 16 * 11, division=(120, 0)) > even
    # 125 blocks have four k-tiles at most, too, but not all of them, so they begin within tiles.
    assert clocks(costs, 5 * 32, 8 * 32, 16 * 12, division=(125, 0)) > even


def test_each_piece_of_compensated_sums_is_added_in_float64():
    """Blocks have four k-tiles, of one tile of C or of two."""
    further = []
    for compensated in (False, True):
        costs = costs_of_key(("thin", 16, 32, 64), compensated=compensated)
        one, two = (clocks(costs, 5 * 16, 8 * 32, 64 * k_tiles, division=(120, 0)) for k_tiles in (12, 11))
        further.append(two - one)
    assert further[1] > further[0] + 16 * 32 / WIDENED


def test_the_last_round_of_thin_tiles_is_not_hidden_by_the_bytes_of_the_others():
    costs = costs_of_key(("thin", 64, 8, 64))
    full = 132 * costs.rate.resident
    memory = 3 * clocks(costs, 64 * full, 8, 64 * 38)  # of a full round; so of two, it decides
    times = {
        tiles: costs.clocks(tiles, 38, [(tiles, tiles)], memory * tiles / full)[0][0]
        for tiles in (full, full + 22, 2 * full)
    }
    alone = costs.clocks(132, 38, [(132, 132)])[0][0] - LAUNCH  # one block per SM takes as long as on 22 of them
    assert times[full] < memory
    assert times[full + 22] == pytest.approx(LAST_ROUND * (memory + alone) + LAUNCH)
    assert times[2 * full] < 2 * memory


@pytest.mark.parametrize("key", [("thin", 64, 8, 64), ("stream_k", 64, 64, 16), ("short_sums", 32, 64, 16)])
def test_the_slowest_of_fewer_blocks_ends_sooner(key):
    costs = costs_of_key(key)
    times = [costs.clocks(tiles, 1, [(tiles, tiles)])[0][0] for tiles in (1, 2, 8, 33, 131, 132)]
    assert times == sorted(set(times))
    assert times[1] - times[0] == pytest.approx(SOONER)


def test_blocks_of_thin_wait_for_first_chunks_at_the_same_time():
    """A chunk of few rows that lie by columns takes as long as one of a sector's width."""
    key, shape = ("thin", 4, 4, 512), (4, 4 * 100, 512)
    by_rows, by_columns = (costs_of_key(key, a_along=along, b_along=along) for along in (True, False))
    arrivals = [costs.least(*shape, 1, 0.0)[-1] for costs in (by_rows, by_columns)]
    assert arrivals[1] == 2 * arrivals[0]
    more = [clocks(costs, *shape) - costs.clocks(100, 1, [(100, 100)])[0][0] for costs in (by_rows, by_columns)]
    assert more == pytest.approx([100 * one for one in arrivals])
    assert by_rows.least(4, 400, 1024, 1, 0.0)[-1] == arrivals[0] / 2  # the second chunk overlaps
    assert by_rows.least(4, 400, 64, 1, 0.0)[-1] == arrivals[0] / 8


@pytest.mark.parametrize(("key", "longer"), [(("short_sums", 32, 64, 16), True), (("thin", 32, 4, 128), False)])
def test_few_blocks_that_store_columns_are_predicted_to_take_longer(key, longer):
    costs, shape = costs_of_key(key), (22, 466, 1, 1, 0.0)
    assert (costs.least(*shape, True)[0] > 1.5 * costs.least(*shape)[0]) is longer
    many = 200, 4660, 1, 1, 1e6  # clocks of bytes, which take longer than stores by all multiprocessors
    assert costs.least(*many, True) == costs.least(*many)


def test_what_takes_longer_is_predicted_to():
    """Copies of floats beside the multiply-adds, and small thread tiles that are stored float by float."""
    key = ("stream_k", 64, 64, 16)
    in_vectors = clocks(costs_of_key(key), 4096, 4096, 1024)
    assert clocks(costs_of_key(key, vectors=False), 4096, 4096, 1024) > in_vectors
    small = ("stream_k", 32, 32, 16)
    assert clocks(costs_of_key(small, stores_vectors=False), 128, 96, 16) > clocks(costs_of_key(small), 128, 96, 16)


def test_partition_of_other_tiles_is_refused():
    config = STAGES["stream_k"].configs[0]
    with pytest.raises(ValueError, match="does not divide 4 tiles"):
        partition_layout(config, 256, 512, 64, ONE, Partition(2, 5))


def test_stage_that_the_gpu_cannot_run_is_no_candidate(monkeypatch):
    """However fast it is."""
    config = STAGES["stream_k"].configs[0]
    monkeypatch.setitem(RATES, ("stream_k", config.BM, config.BN, config.BK), Rate(1.0, alone=1, resident=1))
    considered_of.cache_clear()
    fresh = choose.__wrapped__  # past what is remembered of earlier calls
    try:
        assert fresh(Problem(8192, 8192, 8192)).config is config
        assert fresh(Problem(8192, 8192, 8192, cc=(7, 5))).stage.name == "register_prefetch"
    finally:
        considered_of.cache_clear()
