"""Experiments on memory spaces and on banks: the parts of their predictions."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from support.covering import covering

from numba_gemm.lab.memory import bank_conflicts as banks
from numba_gemm.lab.memory import machine
from numba_gemm.lab.memory import memory_spaces as spaces
from numba_gemm.models import requests

every_width = pytest.mark.parametrize("bits", banks.KERNELS)

# ------------------------------------------------------------------------------------------------ memory_spaces


@pytest.mark.parametrize("words", [1, 2, 31, 1000])
def test_a_ring_comes_to_every_place_once(words):
    places = [7 * word for word in range(words)]
    chain, order = spaces.ring(places, 7 * words, seed=words)
    place, seen = order[0], []
    for _ in range(words):
        seen.append(int(place))
        place = chain[place]
    assert place == order[0]
    assert seen == order.tolist()
    assert sorted(seen) == places


def test_the_constant_rings_share_no_word():
    assert not np.intersect1d(spaces.NEAR_ORDER, spaces.FAR_ORDER).size
    for order in (spaces.NEAR_ORDER, spaces.FAR_ORDER):
        np.testing.assert_array_equal(spaces.CONSTANT[order], np.roll(order, -1))


def test_chains_last_for_all_walks_through_device_memory():
    """Chains in device memory and textures visit no line twice, and are far longer than the L2 cache."""
    defaults = dict(zip(spaces.memory_spaces.__code__.co_varnames, spaces.memory_spaces.__defaults__))
    lines = defaults["device_kib"] * 8
    assert 2 * defaults["walk_rounds"] * defaults["steps"] < lines
    assert defaults["steps"] % spaces.LINKS == 0
    assert 4 * machine.properties().l2_bytes < 128 * lines
    assert defaults["device_kib"] * spaces.KIB // spaces.WORD <= 1 << 27  # texels that a texture may have
    assert defaults["l2_kib"] * spaces.KIB < machine.properties().l2_bytes / 2


def fake(**changed):
    """Return a frame of memory spaces that confirms every claim, except for the changes."""
    waits = dict(zip(spaces.LEVELS, (4, 29, 35, 260, 35, 270, 700, 30, math.nan, 90, 90, 350, 800), strict=True))
    rates = dict(
        zip(spaces.LEVELS, (380, 33, 30, math.nan, 30, 9, 4.6, 20, 0.6, math.nan, 8, math.nan, math.nan), strict=True)
    )
    theory = {**rates, ("global", "L2"): 17, ("constant", spaces.ONE): math.nan}
    rows = [
        {"space": name[0], "level": name[1], "latency_cycles": waits[name], "tb_s": rates[name]}
        | {"predicted_tb_s": theory[name]}
        | changed.get(f"{name[0]}_{name[1].partition(' ')[0]}", {})
        for name in spaces.LEVELS
    ]
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("changed", "failing"),
    [
        ({}, []),
        ({"shared_shared": {"latency_cycles": 3.0}}, ["each waits longer", "in the guide's order"]),
        ({"constant_constant": {"latency_cycles": 20.0}}, ["in the guide's order"]),
        ({"constant_beyond": {"latency_cycles": 33.0}}, ["not in it"]),
        ({"global_L2": {"tb_s": 34.0}}, ["fewer bytes a second", "three quarters"]),
        ({"texture_L2": {"latency_cycles": 250.0}}, ["a texture is farther"]),
        ({"local_L1": {"tb_s": 24.0}}, ["85 %"]),
        ({"global_L2": {"tb_s": 16.0}}, ["three quarters"]),
        ({"constant_beyond": {"latency_cycles": 750.0}}, ["no cache holds"]),
        ({"local_L1": {"latency_cycles": 200.0}}, ["not in it", "as near as"]),
        ({"texture_L1": {"latency_cycles": 30.0}}, ["a texture is farther"]),
        ({"constant_32": {"tb_s": 19.0}}, ["32 addresses"]),
    ],
)
def test_claims_can_fail(changed, failing):
    failed = [sentence for sentence, holds in spaces.EXPERIMENT.claims(fake(**changed)).items() if not holds]
    assert len(failed) == len(failing)
    assert all(words in sentence for words, sentence in zip(failing, failed, strict=True))


@pytest.mark.simulator
def test_a_walk_that_ends_elsewhere_is_an_error():
    chain, order = spaces.ring(range(64), 64)
    next(spaces.walks(spaces.chase_shared, (chain,), order, 32, 32))
    with pytest.raises(AssertionError, match="chase_shared ends at"):
        next(spaces.walks(spaces.chase_shared, (np.roll(chain, 1),), order, 32, 32))


@pytest.mark.simulator
def test_walks_through_device_memory_go_on_where_the_last_ended(monkeypatch):
    chain, order = spaces.ring(range(0, 32 * 128, 32), 32 * 128)
    seen, per_step = [], spaces.per_step

    def recording(kernel, arguments, steps, end):
        seen.append((arguments[-2], end))
        return per_step(kernel, arguments, steps, end)

    monkeypatch.setattr(spaces, "per_step", recording)
    for warm, places in ((0, [(0, 32), (32, 64)]), (32, [(0, 64), (0, 64)])):
        walked = spaces.walks(spaces.chase_global, (chain,), order, warm, 32)
        next(walked)
        next(walked)
        assert seen == [(order[begin], order[end]) for begin, end in places]
        seen.clear()


@pytest.mark.simulator
def test_constants_of_one_address_and_of_many():
    from numba_gemm.inspect import trace

    for apart, words in ((0, 1), (1, 32)):
        out = np.zeros(32, np.uint32)
        trace(spaces.read_constant, 1, 32, 3, apart, out)
        np.testing.assert_array_equal(out, spaces.constant_sum(3, apart))
        assert len({int(lane * apart) for lane in range(32)}) == words


# ----------------------------------------------------------------------------------------------- device.texture


@pytest.mark.simulator
@pytest.mark.parametrize("channels", [1, 2, 4])
def test_a_texel_has_four_channels(channels):
    from numba_gemm.device.texture import texel

    words = np.arange(8 * channels, dtype=np.uint32).reshape(8, channels)
    assert texel(words, np.uint32(3)) == (*words[3], *(0, 0, 0, 1)[channels:])
    with pytest.raises(IndexError, match="texel 8 of a texture of 8"):
        texel(words, np.uint32(8))


@pytest.mark.simulator
def test_clocks_go_forward():
    from numba_gemm.device.texture import cycles, nanoseconds

    for clock in (cycles, nanoseconds):
        begin = clock()
        assert clock() - begin >= 0


@pytest.mark.gpu
def test_textures_and_clocks_are_one_instruction_each():
    from numba.cuda import types

    from numba_gemm.runtime.compiler import compile_cubin

    kernel, signature = spaces.EXPERIMENT.kernels["chase_texture"]
    made = compile_cubin(kernel, eval(f"({signature},)", vars(types).copy()), (9, 0), name="chase_texture")
    assert made.ptx.count("tex.1d.v4.u32.s32") == 2 * spaces.LINKS
    assert made.ptx.count("%clock64") == 4 == made.ptx.count("%globaltimer")


@pytest.mark.gpu
def test_a_texture_reads_what_lies_in_memory():
    from numba import cuda

    turns, lanes = 3, 32
    words = np.random.default_rng(0).integers(0, 1 << 20, (spaces.ROWS * 32, 4), np.uint32)
    out = cuda.to_device(np.zeros(lanes, np.uint32))
    with spaces.linear_texture(cuda.to_device(words.reshape(-1)), 4) as texture:
        machine.enqueue(spaces.read_texture, 1, lanes, turns, texture, out)(0)
        found = out.copy_to_host()
    rows = (np.arange(turns)[:, None] + np.arange(spaces.READS)).reshape(-1)
    expected = words.reshape(spaces.ROWS, 32, 4)[rows].sum(axis=(0, 2), dtype=np.uint32)
    np.testing.assert_array_equal(found, expected)


# ----------------------------------------------------------------------------------------------- bank_conflicts


@every_width
@pytest.mark.parametrize("stride", banks.STRIDES)
def test_a_stride_conflicts_by_what_it_shares_with_the_banks(bits, stride):
    """Lanes of a pass that are `stride` words apart return to the first bank after 32 / gcd of them."""
    words, chosen = bits // 32, banks.elements("stride", stride)
    lanes = 32 // words
    apart = words * stride
    expected = max(1, lanes * math.gcd(apart, 32) // 32)
    assert banks.ways(bits, chosen) == expected
    assert requests.wavefronts(banks.request(bits, chosen), bits // 8) == words * expected


def test_ways_of_known_patterns():
    for pattern, expected in {"broadcast": 1, "multicast, pairs": 1, "reversed": 1, "two rows, halves": 2}.items():
        assert banks.ways(32, banks.elements(pattern, 0)) == expected
    # Half a warp at a time: the halves do not conflict.
    assert banks.ways(64, banks.elements("two rows, halves", 0)) == 1


@pytest.mark.simulator
@pytest.mark.parametrize(
    ("bits", "access"),
    covering(
        banks.KERNELS,
        [("stride", 1), ("stride", 2), ("stride", 32), ("stride", 33), *((p, 0) for p in banks.PATTERNS)],
    ),
    ids=str,
)
def test_the_kernel_makes_the_requests_that_are_predicted(bits, access):
    from numba_gemm.inspect import trace

    chosen = banks.elements(*access)
    request = banks.request(bits, chosen)
    places = np.array([place for _, place in request], np.uint32)
    sums, took = np.zeros(32, np.float32), np.zeros(1, np.uint64)
    traced = trace(banks.KERNELS[bits], 1, 32, 2, places, sums, took)
    np.testing.assert_array_equal(sums, banks.expected(bits, chosen, 2))
    found = traced.requests
    reads = found[(found["space"] == "shared") & (found["op"] == "load")]
    assert len(reads) == 2 * banks.READS
    assert set(reads["bits"]) == {bits}
    assert set(reads["wavefronts"]) == {requests.wavefronts(request, bits // 8)}


def test_the_tile_holds_every_place():
    most = max(place for bits in banks.KERNELS for _, place in banks.request(bits, banks.elements("stride", 33)))
    assert most + 16 + (banks.FIRST + banks.READS - 2) * banks.ROW <= banks.WORD * banks.WORDS
    assert banks.WORD * banks.WORDS <= 48 << 10
    assert banks.expected(128, [0] * 32, 512).max() < 1 << 24  # float32 sums are exact


def test_each_claim_on_banks_can_fail():
    rows = []
    for bits in banks.KERNELS:
        for pattern, stride in [*(("stride", stride) for stride in banks.STRIDES), *((p, 0) for p in banks.PATTERNS)]:
            chosen = banks.elements(pattern, stride)
            taken = requests.wavefronts(banks.request(bits, chosen), bits // 8)
            rows.append((pattern, bits, stride, taken, 1.02 * taken))
    frame = pd.DataFrame(rows, columns=["pattern", "width_bits", "stride", "predicted_wavefronts", "cycles"])
    assert all(banks.EXPERIMENT.claims(frame).values())
    flat = frame.assign(cycles=frame["width_bits"] / 32)  # lanes that share a word are no faster
    assert sum(not holds for holds in banks.EXPERIMENT.claims(flat).values()) == 4
    slow = frame.assign(cycles=frame["cycles"] * np.where(frame["stride"] == 0, 1.5, 1.3))
    assert sum(not holds for holds in banks.EXPERIMENT.claims(slow).values()) == 3
