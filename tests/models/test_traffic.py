"""Memory traffic: closed forms against counting, every stage's instructions against both, and an H200's counters."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from numba_gemm.device.access import covers
from numba_gemm.kernels.ladder import STAGES
from numba_gemm.models import accesses as model
from numba_gemm.models.prediction import Ceilings, predict, theoretical_ceilings
from numba_gemm.models.roofline import gemm_bytes
from numba_gemm.models.traffic import (
    naive_reads,
    naive_writes,
    shared_ratio,
    shared_reads,
    shared_reads_untiled,
    tile_passes,
    tiled_ratio,
    tiled_reads,
    tiled_reads_exact,
    traffic,
)

COUNTERS = Path(__file__).parents[2] / "results" / "h200" / "latest" / "counters.csv"
H200 = theoretical_ceilings(66.9e12, 4.8e12, 132, 1.98e9)
SHAPES = [(8, 12, 4), (7, 5, 3), (1, 9, 8), (16, 16, 1), (13, 4, 10)]
TILES = [(4, 4, 2), (2, 8, 3), (8, 2, 4), (1, 1, 1), (16, 16, 16)]
CONFIGS = [(stage, config) for stage in STAGES.values() for config in (*stage.configs, stage.test_config)]

every_config = pytest.mark.parametrize(
    ("stage", "config"), CONFIGS, ids=[f"{stage.name}-{config.name}" for stage, config in CONFIGS]
)


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_naive_counts(m, n, k):
    reads = sum(2 for _ in range(m) for _ in range(n) for _ in range(k))
    assert naive_reads(m, n, k) == reads
    assert naive_writes(m, n) == m * n


@pytest.mark.parametrize(("BM", "BN", "BK"), TILES)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_block_tiles_read_what_the_closed_form_says(m, n, k, BM, BN, BK):
    of_a = of_b = 0
    for i in range(0, m, BM):
        for j in range(0, n, BN):
            for p in range(0, k, BK):
                depth = min(BK, k - p)
                of_a += min(BM, m - i) * depth
                of_b += depth * min(BN, n - j)
    assert tiled_reads_exact(m, n, k, BM, BN) == of_a + of_b
    times_a, times_b = tile_passes(m, n, BM, BN)
    assert (of_a, of_b) == (times_a * m * k, times_b * k * n)
    if m % BM == n % BN == 0:
        assert tiled_reads(m, n, k, BM, BN) == pytest.approx(of_a + of_b, rel=1e-12)
        ratio = (of_a + of_b) / naive_reads(m, n, k)
        assert tiled_ratio(BM, BN) == pytest.approx(ratio, rel=1e-12)


@pytest.mark.parametrize(("TM", "TN"), [(1, 1), (2, 1), (1, 4), (2, 4), (8, 8)])
def test_thread_tiles_read_what_the_closed_form_says(TM, TN):
    BM, BN, BK = 8, 16, 3
    untiled = sum(2 for _ in range(BM) for _ in range(BN) for _ in range(BK))
    reads = sum(TM + TN for _ in range(BM // TM) for _ in range(BN // TN) for _ in range(BK))
    assert shared_reads_untiled(BM, BN, BK) == untiled == shared_reads(BM, BN, BK, 1, 1)
    assert shared_reads(BM, BN, BK, TM, TN) == reads
    assert shared_ratio(TM, TN) == pytest.approx(reads / untiled, rel=1e-12)


def test_known_ratios():
    assert tiled_ratio(128, 128) == 1 / 128
    assert shared_ratio(8, 8) == 1 / 8
    assert shared_ratio(8, 16) == 0.09375
    assert tile_passes(4096, 4096, 128, 256) == (16, 32)


def test_every_stage_is_modelled():
    assert set(model.WAYS) == set(STAGES)


@every_config
def test_instructions_read_and_write_whole_tiles(stage, config):
    """A stage's instructions, lane by lane, move as much as the closed forms of its tiles say."""
    moved = dict.fromkeys(("global", "load", "store"), 0)
    for access in model.k_tile(stage.name, config, 4096, 4096):
        moved[access.what] += access.width * len(access.places) * access.warps
    if stage.name in model.UNTILED:
        assert moved == {"global": 2 * config.threads, "load": 0, "store": 0}
        return
    if config.tiles > 1:  # each thread reads its tile's rows and columns, or lanes that share one read them together
        read = config.tiles * config.BK * (config.BM + config.BN)
        assert moved == {"global": read, "load": 0, "store": 0}
        return
    BM, BN, BK = config.BM, config.BN, config.BK
    assert moved["global"] == BK * (BM + BN)
    assert moved["load"] == shared_reads(BM, BN, BK, config.TM, config.TN)
    copying = ("async_copy", "snake_order", "basic_stream_k", "stream_k", "short_sums")
    vectors = covers("along4", BM, BK, config.threads)
    copied = dict.fromkeys(copying, BM * BK if vectors else 0) | {"thin": 0}
    assert moved["store"] == copied.get(stage.name, BK * (BM + BN))


@every_config
def test_multiply_adds_of_whole_tiles(stage, config):
    m, n, k = 2 * config.BM, 3 * config.BN, 4 * config.BK
    if config.tiles > 1:  # a warp has 32 of them
        n = 32 * config.BN
    found = traffic(stage, config, m, n, k)
    assert 32 * found.ffma == m * n * k
    assert found.flops == 2 * m * n * k
    more = traffic(stage, config, m + 1, n, k)
    assert 32 * more.ffma > m * n * k


LANES = range(32)


@pytest.mark.parametrize(
    ("what", "places", "width", "sectors", "passes"),
    [
        ("global", LANES, 1, 4, 1),
        ("global", [0] * 32, 1, 1, 1),
        ("global", [4096 * lane for lane in LANES], 1, 32, 32),
        ("global", [4 * lane for lane in LANES], 4, 16, 4),
        ("global", [4096 * (lane // 2) + lane % 2 * 4 for lane in LANES], 4, 16, 16),  # a k-tile of eight
        ("load", [0] * 32, 1, None, 1),
        ("load", [2 * lane for lane in LANES], 1, None, 2),
        ("load", [lane // 16 * 64 for lane in LANES], 1, None, 2),
        ("load", [4 * lane for lane in LANES], 4, None, 4),
        ("load", [lane // 4 * 4 for lane in LANES], 4, None, 2),
        ("load", [lane % 4 * 4 for lane in LANES], 4, None, 4),
        ("store", [4 * lane for lane in LANES], 4, None, 4),
    ],
)
def test_passes(what, places, width, sectors, passes):
    access = model.Access(what, width, tuple(places), 1)
    assert access.passes == passes
    if sectors is not None:
        assert access.sectors == sectors


def counted():
    with COUNTERS.open(newline="", encoding="utf-8") as file:
        return {row["stage"]: row for row in csv.DictReader(file)}


# Blocks of these exchange partial sums, which are not part of the model; thin also adds the sums of its lanes.
EXCHANGING = {"basic_stream_k": 0.05, "stream_k": 0.05, "thin": 0.13}


def past_the_end(stage, config, k):
    """Requests of `thin` over those of its k-tiles: it copies slots that lie behind the last one, as zeros."""
    return 1 + (config.slots - 1) / -(-k // config.BK) if stage.name == "thin" else 1


NOT_COUNTED = ("short_sums", "small_matrices")


def test_the_other_stages_were_counted():
    """The next test skips a stage that is being added."""
    assert set(counted()) == set(STAGES) - set(NOT_COUNTED)


@pytest.mark.parametrize("name", [name for name in STAGES if name not in NOT_COUNTED])
def test_an_h200_counted_the_same(name):
    row, stage = counted().get(name), STAGES[name]
    if row is None:
        pytest.skip("not measured yet")
    config = next(config for config in stage.configs if config.name == row["config"])
    m, n, k = (int(row[extent]) for extent in "mnk")
    made = traffic(stage, config, m, n, k)
    within = EXCHANGING.get(name, 0.002)
    requests = made.global_loads * past_the_end(stage, config, k)
    assert float(row["global_load_requests"]) == pytest.approx(requests, rel=0.002 if name == "thin" else within)
    assert float(row["global_load_sectors"]) == pytest.approx(made.global_sectors, rel=within)
    tiles = -(-m // config.BM) * -(-n // config.BN) * -(-k // config.BK)
    accesses = model.k_tile(name, config, k, n)
    loads, stores = (tiles * sum(a.warps * a.passes for a in accesses if a.what == what) for what in ("load", "store"))
    assert float(row["shared_load_wavefronts"]) == pytest.approx(loads, rel=max(within, 0.002))
    if name != "thin":
        assert float(row["shared_store_wavefronts"]) == pytest.approx(stores, rel=0.16)
    # Nothing was faster than predicted, and nothing took twice as long.
    predicted = predict(stage, config, m, n, k, H200, sm_count=132).seconds * 1e6
    assert 1.0 < float(row["time_us"]) / predicted < 2.0


def test_naive_and_coalesced_at_4096():
    naive, coalesced = (traffic(STAGES[name], STAGES[name].configs[0], *[4096] * 3) for name in model.UNTILED)
    assert naive.requested_bytes == coalesced.requested_bytes == 4 * 2 * 4096**3
    assert (naive.global_loads, coalesced.global_loads) == (2 * 4096**3 // 32,) * 2
    assert (naive.global_sectors, coalesced.global_sectors) == (33 * 4096**3 // 32, 5 * 4096**3 // 32)
    assert (naive.passes, coalesced.passes) == (33 * 4096**3 // 32, 2 * 4096**3 // 32)
    assert naive.l2_bytes == 4 * 4096**3 // 64 + 4 * 4096**3 // 32 + 4 * 4096**2  # 64 x 32 resident threads
    assert naive.shared_read_bytes == naive.shared_written_bytes == 0


def test_traffic_of_a_ragged_product():
    stage = STAGES["thread_tile_2d"]
    found = traffic(stage, stage.configs[0], 130, 100, 9)
    assert found.requested_bytes == 4 * (130 * 9 * 1 + 9 * 100 * 2)
    assert found.l2_bytes == found.requested_bytes + 4 * 130 * 100
    assert found.dram_bytes == gemm_bytes(130, 100, 9)
    assert 32 * found.ffma == 2 * 128 * 128 * 16  # two tiles of C, two k-tiles
    assert found.shared_written_bytes == 4 * 4 * 8 * 256
    assert traffic(stage, stage.configs[0], 130, 100, 9, in_l2=True).dram_bytes == 0


@pytest.mark.parametrize(
    ("name", "shape", "binding", "microseconds"),
    [
        ("naive", (4096, 4096, 4096), "shared", 33 * 4096**3 / 32 / 132 / 1.98e3),
        ("snake_order", (4096, 4096, 4096), "FP32", 2 * 4096**3 / 66.9e6),
        ("thin", (16384, 1, 16384), "DRAM", 4 * (16384**2 + 2 * 16384) / 4.8e6),
    ],
)
def test_predicted_time_and_what_binds_it(name, shape, binding, microseconds):
    stage = STAGES[name]
    made = predict(stage, stage.configs[0], *shape, H200)
    assert made.binding == binding
    assert made.seconds == max(made.fp32, made.dram, made.l2, made.shared)
    assert made.seconds * 1e6 == pytest.approx(microseconds, rel=1e-9)


def test_blocks_are_dealt_whole():
    stage, config = STAGES["snake_order"], STAGES["snake_order"].configs[0]
    even, dealt = (predict(stage, config, 4096, 4096, 4096, H200, sm_count=count) for count in (1, 132))
    assert dealt.fp32 / even.fp32 == pytest.approx(4 * 132 / 512)  # 512 tiles, four rounds
    assert dealt.shared / even.shared == pytest.approx(4 * 132 / 512)
    assert (dealt.l2, dealt.dram) == (even.l2, even.dram)
    stage = STAGES["stream_k"]  # deals 512 * 256 k-tiles instead
    even, dealt = (predict(stage, stage.configs[0], 4096, 4096, 4096, H200, sm_count=count) for count in (1, 132))
    assert dealt.fp32 / even.fp32 == pytest.approx(993 * 132 / (512 * 256))


def test_theoretical_ceilings_of_an_h200():
    assert (H200.fp32, H200.dram) == (66.9e12, 4.8e12)
    assert H200.l2 == pytest.approx(16.73e12, rel=1e-3)
    assert H200.shared == pytest.approx(33.45e12, rel=1e-3)


def test_errors():
    stage = STAGES["naive"]
    with pytest.raises(ValueError, match="m, n, k are 0, 4, 4; expected extents from 1 on"):
        traffic(stage, stage.configs[0], 0, 4, 4)
    with pytest.raises(ValueError, match=r"stage is 'new'; expected one of naive.*add how it reads .* to WAYS"):
        model.k_tile("new", stage.configs[0], 4, 4)
    with pytest.raises(ValueError, match=r"dram is nan.*expected positive numbers, in FLOP/s and byte/s"):
        Ceilings(1.0, float("nan"), 1.0, 1.0)
