"""Coalescing of permuted and idle lanes, copies to shared memory by width, and partial tiles."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from numba_gemm.lab.memory import async_copies, coalescing, partial_tiles

ALL_LANES = ("in order", "reversed", "neighbours swapped", "across all sectors", "shuffled")


def traced(kernel, grid, block, *args):
    from numba_gemm.inspect import trace

    return trace(kernel, grid, block, *args).requests


# -------------------------------------------------------------------------------------------------------- coalescing


@pytest.mark.parametrize("pattern", coalescing.PATTERNS)
def test_active_lanes_have_different_places(pattern):
    places = [place for place in coalescing.places_of(pattern) if place != coalescing.IDLE]
    assert len(set(places)) == len(places)
    assert set(range(32)).issuperset(places)
    assert (len(places) == 32) == (pattern in ALL_LANES)


def test_some_permutation_crosses_sectors_in_every_quarter_of_a_warp():
    places = coalescing.places_of("across all sectors")
    assert all(len({place // 8 for place in places[first : first + 4]}) == 4 for first in range(0, 32, 4))


@pytest.mark.simulator
@pytest.mark.parametrize("pattern", coalescing.PATTERNS)
def test_a_warp_touches_the_sectors_counted(pattern):
    x, out = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    places = np.array(coalescing.places_of(pattern), np.uint32)
    requests = traced(coalescing.place_copy, 1, 64, out, x, places)
    for array in ("idata", "odata"):
        assert set(requests[requests["array"] == array]["sectors"]) == {coalescing.sectors_a_warp(places.tolist())}


@pytest.mark.simulator
def test_a_copy_to_wrong_places_is_found(monkeypatch):
    from numba import cuda

    @cuda.jit
    def copies_all(odata, idata, places):
        x = cuda.grid(1)
        odata[x] = idata[x]

    monkeypatch.setattr(coalescing, "place_copy", copies_all)
    with pytest.raises(AssertionError, match="odd lanes idle"):
        coalescing.EXPERIMENT.frame(**coalescing.EXPERIMENT.small)


def coalescing_frame(**factors):
    us = {"upper half idle": 90, "24 lanes idle": 87}
    return pd.DataFrame(
        coalescing.row_of(pattern, 1 << 20, us.get(pattern, 100) * factors.get(pattern.replace(" ", "_"), 1), 100)
        for pattern in coalescing.PATTERNS
    )


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({}, None),
        ({"reversed": 1.1}, "takes the same time"),
        ({"odd_lanes_idle": 0.8}, "save no time"),
        ({"upper_half_idle": 1.1}, "less than a quarter"),
        ({"24_lanes_idle": 0.8}, "less than a quarter"),
    ],
)
def test_claims_of_coalescing_can_fail(wrong, words):
    failed = [
        sentence for sentence, holds in coalescing.EXPERIMENT.claims(coalescing_frame(**wrong)).items() if not holds
    ]
    assert any(words in sentence for sentence in failed) if words else not failed


# ------------------------------------------------------------------------------------------ copies to shared memory


def test_predicted_cycles_of_copies():
    of = {"one": 700, "bytes_per_cycle": 32}
    assert async_copies.predicted_cycles(async_copies.ASYNC, 4, 1, **of) == 700
    assert async_copies.predicted_cycles(async_copies.ASYNC, 4, 5, **of) == 700 + 4 * 128 * 4 / 32
    assert async_copies.predicted_cycles(async_copies.SYNC, 8, 5, **of) == 2 * 700
    assert async_copies.predicted_cycles(async_copies.SYNC, 16, 5, **of) == 3 * 700
    assert async_copies.predicted_cycles(async_copies.SYNC, 16, 2, one=700, bytes_per_cycle=1) == 700 + 128 * 16


@pytest.mark.simulator
def test_sizes_that_are_no_whole_copies_are_left_out():
    frame = async_copies.EXPERIMENT.frame(kib=(0.5, 2, 3), blocks=1, rounds=1)
    found = {width: sorted(set(rows["kib"])) for width, rows in frame.groupby("width_bytes")}
    assert found == {4: [0.5, 2, 3], 8: [1, 2, 3], 16: [2]}


@pytest.mark.simulator
@pytest.mark.parametrize(("way", "width"), async_copies.KERNELS)
def test_a_warp_asks_for_its_width_and_copies_it(way, width):
    kind = np.uint64 if (way, width) == (async_copies.SYNC, 8) else np.float32
    x = np.arange(async_copies.LARGEST // 4, dtype=np.float32).view(kind)[None]
    out, took = np.zeros_like(x), np.zeros((1, async_copies.THREADS), np.uint64)
    requests = traced(async_copies.KERNELS[way, width], 1, async_copies.THREADS, 2, x, out, took)
    read = requests[requests["array"] == "x"]
    assert len(read) == 2 * async_copies.THREADS // 32
    assert set(read["sectors"]) == {width}
    copied = 2 * async_copies.THREADS * width // x.itemsize
    np.testing.assert_array_equal(out[0, :copied], x[0, :copied])


def copies_frame(**factors):
    rows = []
    for way, width in async_copies.KERNELS:
        for kib in (2, 8, 48):
            copies = kib * 1024 // (128 * width)
            cycles = async_copies.predicted_cycles(way, width, copies, 700, 40) + 100 / width
            cycles *= factors.get(f"{way}_{width}_{kib}", 1)
            rows.append({"way": way, "width_bytes": width, "kib": kib, "cycles": cycles})
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({}, None),
        ({"asynchronous_4_8": 9}, "eight elements"),
        ({"synchronous_16_48": 0.3}, "two thirds"),
        ({"asynchronous_8_48": 1.2}, "elements of 4 bytes"),
    ],
)
def test_claims_of_copies_to_shared_memory_can_fail(wrong, words):
    failed = [
        sentence for sentence, holds in async_copies.EXPERIMENT.claims(copies_frame(**wrong)).items() if not holds
    ]
    assert any(words in sentence for sentence in failed) if words else not failed
    assert async_copies.EXPERIMENT.claims(copies_frame()[lambda frame: frame["kib"] == 2]) == {}


# ----------------------------------------------------------------------------------------------------- partial tiles


@pytest.mark.simulator
def test_a_wrong_product_is_found(monkeypatch):
    monkeypatch.setattr(partial_tiles, "launch", lambda *arguments, stream: None)
    with pytest.raises(AssertionError, match="tiles of 16, extent 32"):
        partial_tiles.EXPERIMENT.frame(**partial_tiles.EXPERIMENT.small)


def test_zeros_are_counted():
    row = partial_tiles.row_of(16, 24, 2.0, 1.0)
    assert row["zeros_percent"] == pytest.approx(100 * (1 - 24**3 / 32**3))
    assert not row["whole"]
    assert row["predicted_us"] == 1.0


@pytest.mark.parametrize(
    ("odd", "small_tiles", "words"),
    [
        (1.05, 1.3, None),
        (1.3, 1.3, "a quarter"),
        (1.15, 1.3, "a tenth"),
        (0.8, 1.3, "nine tenths"),
        (1.05, 0.9, "16 x 16"),
    ],
)
def test_claims_of_partial_tiles_can_fail(odd, small_tiles, words):
    rows = []
    for tile, factor in ((16, small_tiles), (32, 1.0)):
        rows += [partial_tiles.row_of(tile, 4096, 100 * factor, 100 * factor)]
        rows += [partial_tiles.row_of(tile, 4095, 100 * factor * odd, 100 * factor)]
    failed = [sentence for sentence, holds in partial_tiles.EXPERIMENT.claims(pd.DataFrame(rows)).items() if not holds]
    assert any(words in sentence for sentence in failed) if words else not failed
