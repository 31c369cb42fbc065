"""Zero copy, unified addressing, persistence in the L2 cache and the carve-out: counts, predictions, settings."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from numba.core.errors import NumbaPerformanceWarning

from numba_gemm.course.notebook import recorded
from numba_gemm.lab.memory import carve_out, l2_persistence, unified_addressing, zero_copy
from numba_gemm.models.occupancy import occupancy

MIB = 1 << 20
A, L2 = 30 * MIB, 60 * MIB

small_grids = pytest.mark.filterwarnings(f"ignore::{NumbaPerformanceWarning.__module__}.NumbaPerformanceWarning")


def traced(kernel, grid, block, *args):
    from numba_gemm.inspect import trace

    return trace(kernel, grid, block, *args).requests


# ------------------------------------------------------------------------------------------------- persistence in L2


@pytest.mark.simulator
def test_doubling_touches_four_sectors_and_goes_round_the_region():
    region, stream = np.ones(64, np.int32), np.ones(256, np.int32)
    requests = traced(l2_persistence.double_both, 2, 128, region, stream, 64, 256)
    assert set(requests["sectors"]) == {4}
    assert len(requests) == 4 * 256 // 32
    assert (region == 1 << 4).all()
    assert (stream == 2).all()


def test_windows():
    def window(kind, mib, largest=128):
        made, clamped = l2_persistence.window_of(kind, mib * MIB, A, largest * MIB)
        return made.size / MIB, round(made.hit_ratio, 6), clamped

    assert window("none", 40) == (0, 0, False)
    assert window("whole", 40) == (40, 1, False)
    assert window("guide", 40) == (20, 0.5, False)
    assert window("spread", 40) == (40, 0.5, False)
    assert window("guide", 10) == window("spread", 10) == window("whole", 10) == (10, 1, False)
    assert window("whole", 40, 32) == (32, 1, True)
    assert window("guide", 40, 32) == (20, 0.5, False)


@pytest.mark.parametrize(
    ("kind", "mib", "share"),
    [
        ("none", 15, 1),  # the region and an equal part of the stream fill half of the cache
        ("none", 16, 0),
        ("whole", 30, 1),
        ("whole", 31, 0),  # more is marked than was set aside
        ("spread", 40, 0.5),  # 20 of 40
        ("spread", 60, 1 / 3),
        ("guide", 60, 1 / 9),  # a third of 20, of 60
        ("guide", 25, 0.8 * 20 / 25),  # data outside of the window does not fit beside it
        ("guide", 21, 20 / 21 * 20 / 21),
    ],
)
def test_what_stays(kind, mib, share):
    window, _ = l2_persistence.window_of(kind, mib * MIB, A, 128 * MIB)
    assert l2_persistence.staying(window, mib * MIB, A, L2) == pytest.approx(share, rel=1e-6)


def test_what_lies_outside_of_a_window_may_stay_too():
    window = l2_persistence.Window(4 * MIB, 1.0)
    assert l2_persistence.staying(window, 16 * MIB, A, L2) == pytest.approx(1.0)  # 12 and 16 in half of 56
    assert l2_persistence.staying(window, 17 * MIB, A, L2) == pytest.approx(4 / 17)


def test_bytes_of_a_launch():
    assert l2_persistence.region_bytes(1000, 1.0) == 0
    assert l2_persistence.region_bytes(1000, 0.0) == 2000
    assert l2_persistence.region_bytes(1000, 0.25) == 1500


@pytest.mark.simulator
def test_the_simulator_has_the_control_alone():
    frame = l2_persistence.EXPERIMENT.frame(**l2_persistence.EXPERIMENT.small)
    assert set(frame["window"]) == {"none"}
    assert set(frame["way"]) == {"stream"}


@pytest.mark.simulator
def test_a_kernel_that_does_not_double_is_found(monkeypatch):
    from numba import cuda

    @cuda.jit
    def tripled(persistent, streaming, region, size):
        tid = cuda.grid(1)
        persistent[tid % region] *= 3
        streaming[tid % size] *= 2

    monkeypatch.setattr(l2_persistence, "double_both", tripled)
    with pytest.raises(AssertionError, match="region"):
        l2_persistence.EXPERIMENT.frame(**l2_persistence.EXPERIMENT.small)


@pytest.mark.simulator
def test_the_set_aside_is_a_share_of_the_cache():
    small = {**l2_persistence.EXPERIMENT.small, "shares": (1.0, 3.0)}
    frame = l2_persistence.EXPERIMENT.frame(**small)
    assert set(frame["set_aside_mib"] * MIB) == {round(1e-4 * L2)}
    assert list(frame["region_mib"] * MIB) == [6144, 6144, 18432]
    with pytest.raises(ValueError, match="expected no more than the stream's 65536"):
        l2_persistence.EXPERIMENT.frame(**{**small, "shares": (20.0,)})


def l2_frame(**slower):
    rows = []
    for mib in (20, 30, 40):
        for kind in l2_persistence.WINDOWS:
            for way in l2_persistence.WAYS:
                ms = {"none": 1.3, "whole": 0.9 if mib <= 30 else 1.1, "guide": 1.05, "spread": 1.0}[kind]
                predicted = ms
                ms *= slower.get(kind, 1) * slower.get(way, 1)
                rows.append({"window": kind, "way": way, "region_mib": mib, "set_aside_mib": 30, "ms": ms})
                rows[-1]["predicted_ms"] = predicted
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    "wrong", [{}, {"whole": 1.16}, {"spread": 1.12}, {"graph": 1.2}, {"none": 0.8}, {"guide": 0.95, "spread": 1.01}]
)
def test_claims_of_persistence_can_fail(wrong):
    assert all(l2_persistence.EXPERIMENT.claims(l2_frame(**wrong)).values()) == (not wrong)


def test_thrashing_is_recorded_as_described():
    """The numbers of the paragraph "Thrashing"."""
    times = recorded("memory_lab/l2_persistence.csv").pivot(index=["way", "region_mib"], columns="window", values="ms")
    for way in l2_persistence.WAYS:
        whole, none = times.loc[way, "whole"], times.loc[way, "none"]
        assert 1.205 < whole[35] / whole[30] < 1.265
        gains = 1 - (whole / none).loc[35:60]
        assert len(gains) == 6
        assert 0.075 < gains.min() < gains.max() < 0.135
        assert gains.max() < (1 - whole[30] / none[30]) / 2


def persisting_limit():
    from cuda.bindings import driver

    from numba_gemm.lab.memory import machine
    from numba_gemm.runtime.driver import call

    with machine.in_context():
        return int(call(driver.cuCtxGetLimit, driver.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE))


@pytest.mark.gpu
@small_grids
def test_the_set_aside_is_put_back(monkeypatch):
    from numba_gemm.lab.memory import machine

    before = persisting_limit()
    l2_persistence.EXPERIMENT.frame(**l2_persistence.EXPERIMENT.small)
    assert persisting_limit() == before

    def fails(*args):
        raise AssertionError("wrong")

    with monkeypatch.context() as patched:
        patched.setattr(l2_persistence.Arrays, "check", fails)
        with pytest.raises(AssertionError, match="wrong"):
            l2_persistence.EXPERIMENT.frame(**l2_persistence.EXPERIMENT.small)
    assert persisting_limit() == before
    frame = l2_persistence.EXPERIMENT.frame(set_aside=2.0, stream=MIB, shares=(1e-3,), launches=1, rounds=1)
    assert frame["set_aside_mib"].max() * MIB <= machine.attribute("MAX_PERSISTING_L2_CACHE_SIZE")
    assert persisting_limit() == before


@pytest.mark.gpu
@small_grids
def test_attributes_are_set_on_every_node_of_a_graph(monkeypatch):
    from cuda.bindings import driver
    from numba import cuda

    from numba_gemm.lab.memory import machine, movement
    from numba_gemm.runtime.driver import call

    x = cuda.to_device(np.ones(1024, np.float32))
    enqueue = machine.enqueue(unified_addressing.double, 4, 256, x)
    seen = []

    def instantiate(graph, flags):
        status, nodes, count = driver.cuGraphGetNodes(graph, 8)
        assert not int(status)
        for node in nodes[:count]:
            seen.append(call(driver.cuGraphKernelNodeGetAttribute, node, l2_persistence.POLICY))
        return original(graph, flags)

    original = driver.cuGraphInstantiate
    with machine.in_context(), machine.streams() as (stream,):
        enqueue(stream)
        value = driver.CUkernelNodeAttrValue()
        value.accessPolicyWindow = l2_persistence.policy(movement.address(x), l2_persistence.Window(4096, 0.5))
        monkeypatch.setattr(driver, "cuGraphInstantiate", instantiate)
        with movement.kernel_graph(enqueue, 3, stream, l2_persistence.POLICY, value) as graph:
            call(driver.cuGraphLaunch, graph, stream)
            call(driver.cuStreamSynchronize, stream)
    windows = [one.accessPolicyWindow for one in seen]  # views of the values' memory
    assert [(window.num_bytes, window.hitRatio) for window in windows] == [(4096, 0.5)] * 3
    assert (x.copy_to_host() == 16).all()


# --------------------------------------------------------------------------------------------------------- zero copy


@pytest.mark.simulator
@pytest.mark.parametrize("stride", [2, 4, 8, 32])
def test_a_strided_pass_reads_every_float_once_and_touches_the_sectors_counted(stride):
    x, out = np.arange(2048, dtype=np.float32), np.zeros(2048, np.float32)
    requests = traced(zero_copy.add_strided, 8, 256, x, out, 2048 // stride, stride)
    assert set(requests[requests["array"] == "x"]["sectors"]) == {zero_copy.sectors_a_warp(stride)}
    assert set(requests[requests["array"] == "out"]["sectors"]) == {4}
    np.testing.assert_array_equal(out, x.reshape(-1, stride).T.ravel())


@pytest.mark.simulator
def test_coalesced_passes_touch_four_sectors_and_keep_what_they_read():
    x, kept, out = np.arange(512, dtype=np.float32), np.zeros(512, np.float32), np.ones(512, np.float32)
    assert set(traced(zero_copy.add_and_keep, 2, 256, x, kept, out)["sectors"]) == {4}
    assert set(traced(zero_copy.add, 2, 256, kept, out)["sectors"]) == {4}
    np.testing.assert_array_equal(kept, x)
    np.testing.assert_array_equal(out, 1 + 2 * x)


def test_bytes_over_the_bus():
    assert [zero_copy.sectors_a_warp(stride) for stride in (1, 2, 4, 8, 32)] == [4, 8, 16, 32, 32]
    assert zero_copy.crossing_bytes("mapped", 3, 1, MIB) == 3 * MIB
    assert zero_copy.crossing_bytes("copied", 3, 1, MIB) == MIB
    assert zero_copy.crossing_bytes("kept", 3, 1, MIB) == MIB
    assert zero_copy.crossing_bytes("strided", 1, 1, MIB) == MIB
    assert zero_copy.crossing_bytes("strided", 1, 8, MIB) == zero_copy.crossing_bytes("strided", 1, 32, MIB) == 8 * MIB


def test_predicted_times():
    of = {"size": 1000, "bus": 1e6, "dram": 3e7, "stride": 1}  # a transfer is 1 ms, a pass 0.1
    assert zero_copy.predicted_ms("mapped", 4, **of) == pytest.approx(4)
    assert zero_copy.predicted_ms("copied", 4, **of) == pytest.approx(1.4)
    assert zero_copy.predicted_ms("kept", 4, **of) == pytest.approx(1.3)


def zero_copy_frame(**factors):
    """Return times for an array of 128 MiB that the bus moves in 2.4 ms; some rows longer, by factors."""
    cases = [("copy", 1, 1)] + [(way, passes, 1) for way in zero_copy.WAYS for passes in (1, 2, 8)]
    cases += [("strided", 1, stride) for stride in (2, 8, 32)]
    rows = []
    for way, passes, stride in cases:
        predicted = zero_copy.predicted_ms(way, passes, stride, 128 * MIB, 128 * MIB / 2.4e-3, 4.6e12)
        factor = 1.1 * factors.get(f"{way}_{stride if way == 'strided' else passes}", 1)
        ms = predicted * (2.7 * factor if stride == 32 else factor if way != "copy" else 1)
        rows.append({"way": way, "passes": passes, "stride": stride, "ms": ms, "predicted_ms": predicted})
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({}, None),
        ({"mapped_1": 1.4}, "read once, coalesced"),
        ({"copied_1": 0.8}, "no way takes less"),
        ({"mapped_8": 0.7}, "every further pass"),
        ({"kept_2": 2.0}, "a cache by hand is faster"),
        ({"strided_2": 1.3}, "up to a stride of a sector"),
        ({"strided_32": 0.5}, "strides of a line"),
        ({"strided_8": 0.8}, "at least what their sectors do"),
    ],
)
def test_claims_of_zero_copy_can_fail(wrong, words):
    failed = [
        sentence for sentence, holds in zero_copy.EXPERIMENT.claims(zero_copy_frame(**wrong)).items() if not holds
    ]
    assert any(words in sentence for sentence in failed) if words else not failed


# ------------------------------------------------------------------------------------------------ unified addressing


def test_bandwidth_in_series():
    assert unified_addressing.in_series(50, 50) == 25
    assert unified_addressing.in_series(60, 30) == pytest.approx(20)


def test_pointers_compared():
    assert unified_addressing.relation(None, 4096) == unified_addressing.relation(0, 4096) == "absent"
    assert unified_addressing.relation(4096, 4096) == "same"
    assert unified_addressing.relation(8192, 4096) == "another"
    by_guide = {memory: memory in unified_addressing.EQUAL_BY_GUIDE for memory in unified_addressing.HOST_MEMORY}
    assert by_guide == {"pageable": False, "pinned": True, "mapped": True, "registered": False}


def pointer_rows(registered_equal, predicted=True):
    rows = [{"name": "pageable", "memory_type": "unknown"}, {"name": "device", "memory_type": "device"}]
    for name in ("pinned", "mapped", "registered"):
        equal = registered_equal if name == "registered" else True
        expected = predicted if name == "registered" else True
        rows.append({"name": name, "memory_type": "host", "equal": equal, "predicted_equal": expected})
    return [{"part": unified_addressing.POINTERS, **row} for row in rows]


def copy_rows(peer, links=450.0, slow=40):
    speeds = {"to host": (50, None), "from host": (50, None), "staged": (25, 25), "peer": (peer, links)}
    speeds["not enabled"] = (slow, None)
    return [
        {"part": unified_addressing.COPIES, "name": name, "mib": 1, "gb_s": gb_s, "predicted_gb_s": predicted}
        for name, (gb_s, predicted) in speeds.items()
    ]


def unified_frame(rows):
    return pd.DataFrame(rows, columns=list(unified_addressing.COLUMNS))


def test_claims_of_unified_addressing_can_fail():
    def hold(rows):
        return all(unified_addressing.EXPERIMENT.claims(unified_frame(rows)).values())

    assert hold(pointer_rows(True) + copy_rows(390))
    assert hold(pointer_rows(False, predicted=False) + copy_rows(390, math.nan))
    assert not hold(pointer_rows(False) + copy_rows(390))
    assert not hold(pointer_rows(True) + copy_rows(20))
    assert not hold(pointer_rows(True) + copy_rows(390, slow=300))
    assert not hold(pointer_rows(True) + copy_rows(500))


def test_one_device_is_drawn_with_the_reason():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    reason = {"part": unified_addressing.COPIES, "name": "unavailable", "note": "one device"}
    unified_addressing.EXPERIMENT.plot(unified_frame([*pointer_rows(True), reason]), figure)
    assert [text.get_text() for text in figure.axes[1].get_yticklabels()] == ["unavailable, one device"]


# --------------------------------------------------------------------------------------------------------- carve-out


def test_each_percentage_gives_its_size():
    sizes = [carve_out.shared_size(percent, 0, (9, 0)) // 1024 for percent in carve_out.percentages((9, 0))]
    assert sizes == [0, 8, 16, 32, 64, 100, 132, 164, 196, 228]
    assert carve_out.shared_size(50, 0, (8, 0)) == 100 * 1024  # 82 KB, rounded up


def test_a_preference_is_raised_to_what_a_block_needs():
    assert carve_out.shared_size(0, 1024, (9, 0)) == 8 * 1024
    assert carve_out.shared_size(0, 50 * 1024, (9, 0)) == 64 * 1024


def test_blocks_that_fit():
    tile = occupancy(1024, 32, 8192, (9, 0))  # 9 KB with the system's
    assert carve_out.block_bytes(tile) == 9 * 1024
    assert [carve_out.blocks_in(kib * 1024, tile) for kib in (8, 16, 32, 228)] == [0, 1, 2, 2]
    none = occupancy(256, 32, 0, (9, 0))
    assert [carve_out.blocks_in(kib * 1024, none) for kib in (8, 228)] == [8, 8]


@pytest.mark.simulator
def test_rereading_sums_up_a_blocks_own_tile_and_coalesces():
    tile, blocks, turns = 4096, 2, 3
    x, out = np.arange(blocks * tile, dtype=np.float32) % 8, np.zeros(blocks * 1024, np.float32)
    requests = traced(carve_out.reread, blocks, carve_out.REREAD_BLOCK, turns, tile, x, out)
    loads = requests[requests["array"] == "x"]
    assert set(loads["sectors"]) == {4}
    assert 128 * len(loads) == blocks * turns * tile * 4  # bytes
    np.testing.assert_array_equal(out, turns * x.reshape(blocks, -1, 1024).sum(axis=1).ravel())


def carve_out_frame(copy=1.0, outside=3.0, fewer=1.5):
    rows = []
    for percent in (-1, 0, 50, 100):
        preferred = percent != carve_out.NO_PREFERENCE
        fits, l1 = percent < 100, {-1: math.nan, 0: 248, 50: 124, 100: 28}[percent]
        common = {"percent": percent, "predicted_l1_kib": l1, "predicted_blocks": 2}
        rows += [
            common | {"kernel": "copy", "ms": copy if percent == 50 else 1.0, "predicted_ms": 1.0},
            common
            | {"kernel": "reread", "tile_kib": 64, "ms": 1.0 if fits else outside, "predicted_ms": 1 if fits else 2},
            common
            | {"kernel": "stage", "tflop_s": 1.0, "ms": fewer if percent == 0 else 1.0}
            | {"predicted_blocks": 1 if percent == 0 and preferred else 2, "predicted_ms": 2 if percent == 0 else 1},
        ]
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    "wrong", [{}, {"copy": 1.3}, {"outside": 0.9}, {"outside": 1.5}, {"fewer": 1.0}, {"fewer": 3.0}]
)
def test_claims_of_the_carve_out_can_fail(wrong):
    assert all(carve_out.EXPERIMENT.claims(carve_out_frame(**wrong)).values()) == (not wrong)
