"""The policy behind stage="auto": it must fit the device, and be sensible where sense can be stated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_gemm.ladder import STAGES
from numba_gemm.models.roofline import FP32_LANES_PER_SM
from numba_gemm.select import RATES, Rate, choose, predicted_clocks, resolve

H200 = {"cc": (9, 0), "sm_count": 132}
extents = st.one_of(st.integers(1, 300), st.integers(1, 20_000))


def candidates(cc):
    for stage in STAGES.values():
        for config in stage.configs if cc >= stage.min_cc else ():
            rate = RATES.get((stage.name, config.BM, config.BN, config.BK))
            if rate is not None:
                yield stage, config, rate


def blocks(config, m, n):
    return -(-m // config.BM) * -(-n // config.BN)


def test_every_rate_is_of_a_configuration():
    known = {(stage.name, one.BM, one.BN, one.BK) for stage in STAGES.values() for one in stage.configs}
    assert set(RATES) <= known


@pytest.mark.parametrize("key", RATES)
def test_rates_are_possible(key):
    rate = RATES[key]
    stage = STAGES[key[0]]
    threads = next(one.threads for one in stage.configs if key[1:] == (one.BM, one.BN, one.BK))
    assert 0 < rate.efficiency <= 1
    lanes = 128
    assert rate.alone >= key[1] * key[2] * key[3] / lanes, "faster than the lanes allow"
    assert rate.resident * threads <= 2048, "more threads than an SM has"


@given(extents, extents, extents, st.booleans(), st.sampled_from(sorted(FP32_LANES_PER_SM)), st.integers(1, 200))
def test_choice_runs_on_the_device(m, n, k, aligned, cc, sm_count):
    if cc < (7, 5):
        return
    stage, config = choose(m, n, k, aligned, cc, sm_count)
    assert STAGES[stage.name] is stage
    assert config in stage.configs
    assert cc >= stage.min_cc
    assert choose(m, n, k, aligned, cc, sm_count) == (stage, config)


@given(extents, extents, extents)
def test_choice_is_the_fastest_predicted(m, n, k):
    def clocks(config, rate):
        return predicted_clocks(rate, config, m, n, k, lanes=128, sm_count=132)

    stage, config = choose(m, n, k, True, **H200)
    chosen = clocks(config, RATES[stage.name, config.BM, config.BN, config.BK])
    assert chosen == min(clocks(config, rate) for _, config, rate in candidates((9, 0)))


@given(extents, extents, extents, st.sampled_from(sorted(RATES)))
def test_more_work_is_never_predicted_faster(m, n, k, key):
    stage = STAGES[key[0]]
    config = next(one for one in stage.configs if key[1:] == (one.BM, one.BN, one.BK))

    def clocks(*shape):
        return predicted_clocks(RATES[key], config, *shape)

    assert clocks(m, n, k) <= min(clocks(2 * m, n, k), clocks(m, 2 * n, k), clocks(m, n, 2 * k))
    assert predicted_clocks(RATES[key], config, m, n, k, sm_count=100) >= clocks(m, n, k)


@pytest.mark.parametrize("k", [64, 1024, 8192])
def test_large_products_run_near_the_best_rate(k):
    stage, config = choose(16384, 16384, k, True, **H200)
    best = max(rate.efficiency for _, _, rate in candidates((9, 0)))
    assert RATES[stage.name, config.BM, config.BN, config.BK].efficiency >= 0.95 * best


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 7, 3), (16, 16, 64), (40, 3, 100)])
def test_tiny_products_take_small_tiles(shape):
    """They end sooner, and in the simulator a small block is a quick one."""
    _, config = choose(*shape, True, **H200)
    assert config.BM * config.BN <= 16 * 16


@pytest.mark.parametrize("size", [512, 768, 1024])
def test_middle_sizes_fill_the_device_better_than_the_largest_tile(size):
    _, config = choose(size, size, 1024, True, **H200)
    largest = max((one for _, one, _ in candidates((9, 0))), key=lambda one: one.BM * one.BN)
    assert blocks(config, size, size) > blocks(largest, size, size)


def test_fewer_multiprocessors_allow_larger_tiles():
    tiles = [choose(1024, 1024, 1024, True, (9, 0), sm_count)[1] for sm_count in (132, 8)]
    assert tiles[0].BM * tiles[0].BN < tiles[1].BM * tiles[1].BN


@pytest.mark.parametrize("name", STAGES)
def test_resolve_finds_every_stage(name):
    assert resolve(name, (12, 0)) is STAGES[name]


@pytest.mark.parametrize("name", ["", "auto", "Naive", "warp-tiled"])
def test_resolve_lists_the_known(name):
    with pytest.raises(ValueError) as caught:
        resolve(name, (9, 0))
    message = str(caught.value)
    assert message.startswith(f"stage is {name!r}; expected")
    assert all(known in message for known in STAGES)


@pytest.mark.parametrize("name", [name for name, stage in STAGES.items() if stage.min_cc > (7, 5)])
def test_resolve_refuses_what_the_gpu_cannot_run(name):
    with pytest.raises(ValueError) as caught:
        resolve(name, (7, 5))
    message = str(caught.value)
    assert f"{name!r}, which needs compute capability" in message
    assert "has 7.5" in message
    assert "warp_tiled" in message.split("pass")[1]
    assert name not in message.split("pass")[1]


def test_stage_that_the_gpu_cannot_run_is_no_candidate(monkeypatch):
    config = STAGES["async_copy"].configs[0]
    monkeypatch.setitem(RATES, ("async_copy", config.BM, config.BN, config.BK), Rate(1.0, alone=4100, resident=1))
    fresh = choose.__wrapped__  # past what is remembered of earlier calls
    assert fresh(8192, 8192, 8192, True, (9, 0))[0].name == "async_copy"
    assert fresh(8192, 8192, 8192, True, (7, 5))[0].name != "async_copy"
