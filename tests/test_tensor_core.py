"""The tensor cores' products: splitting on the simulator, the kernels as compiled, and products on a GPU."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from compile_stages import compiler_environment
from hypothesis import given
from hypothesis import strategies as st

from numba_gemm.device.switch import SIMULATOR
from numba_gemm.tensor_core import MODES, TENSOR_STAGES, WarpgroupConfig, split
from numba_gemm.tensor_core.mode import Mode
from numba_gemm.tensor_core.stage import PADDED, ROW_WORDS, SHARED_BYTES, split_shape

FLOATS = st.floats(width=32, allow_nan=False)
# 2^-11 and 2^-8 of the element are left after one part; each further part leaves as much of the rest.
UNITS = {"tf32": 2.0**-11, "bf16": 2.0**-8}


@pytest.fixture
def hopper():
    """A GPU of the one compute capability that has these instructions."""
    from numba_gemm import launch

    if launch.device_properties(launch.current_device()).cc != (9, 0):
        pytest.skip("needs compute capability 9.0")


simulated = pytest.mark.skipif(not SIMULATOR, reason="runs on the simulator")


# ------------------------------------------------------------------------------------------------------- rounding


def narrow_of(kind):
    from numba_gemm.device import narrow

    return {"tf32": narrow.tf32, "bf16": narrow.bf16}[kind]


@simulated
@pytest.mark.parametrize("kind", ["tf32", "bf16"])
@given(value=FLOATS)
def test_rounding_is_to_the_nearest(kind, value):
    rounded = narrow_of(kind)(np.float32(value))
    bits = 13 if kind == "tf32" else 16
    assert int(rounded.view(np.uint32)) & (1 << bits) - 1 == 0
    if np.isinf(value):
        assert rounded == value
        return
    word = int(np.float32(value).view(np.uint32)) >> bits << bits
    neighbours = [np.uint32(word).view(np.float32), np.uint32(word + (1 << bits)).view(np.float32)]
    # The number above the largest is infinity, which stands for the next power of two here.
    sizes = [float(x) if np.isfinite(x) else math.copysign(2.0**128, x) for x in (*neighbours, rounded)]
    below, above, found = (abs(size - float(value)) for size in sizes)
    assert found == min(below, above)


@simulated
@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("tf32", 1 + 2.0**-11, 1 + 2.0**-10),  # halves away from zero
        ("tf32", 1 + 3 * 2.0**-11, 1 + 2 * 2.0**-10),
        ("tf32", -1 - 2.0**-11, -1 - 2.0**-10),
        ("bf16", 1 + 2.0**-8, 1.0),  # halves to even
        ("bf16", 1 + 3 * 2.0**-8, 1 + 4 * 2.0**-8),
        ("tf32", np.inf, np.inf),
        ("bf16", -np.inf, -np.inf),
        ("tf32", np.finfo(np.float32).max, np.inf),
        ("bf16", np.finfo(np.float32).max, np.inf),
        ("tf32", 2.0**-149, 0.0),
        ("bf16", -0.0, -0.0),
    ],
)
def test_rounding_of_what_is_special(kind, value, expected):
    found = narrow_of(kind)(np.float32(value))
    assert found == np.float32(expected)
    assert np.signbit(found) == np.signbit(np.float32(expected))


@simulated
@pytest.mark.parametrize("kind", ["tf32", "bf16"])
def test_rounding_of_nan(kind):
    assert np.isnan(narrow_of(kind)(np.float32(np.nan)))
    assert np.isnan(narrow_of(kind)(np.uint32(0x7F800001).view(np.float32)))  # whose fraction would round away


# ------------------------------------------------------------------------------------------------------ splitting


def unsplit(mode: Mode, parts: np.ndarray, mn: int, k: int) -> np.ndarray:
    """The parts as float64, (parts, mn, k), from where `stage` says that they lie."""
    slots = parts.shape[0] // mode.parts
    chunks = parts.view(np.uint32).reshape(mode.parts, slots, -1, 8, 4)
    rows = np.arange(chunks.shape[2])
    order = np.arange(8)[None, :] ^ (rows % 8)[:, None]
    straight = np.take_along_axis(chunks, order[None, None, :, :, None], axis=3).reshape(
        mode.parts, slots, -1, ROW_WORDS
    )
    if mode.per_word == 1:
        values = straight.view(np.float32)
    else:
        halves = np.stack([straight << 16, straight & np.uint32(0xFFFF0000)], axis=-1)
        values = np.ascontiguousarray(halves).view(np.float32).reshape(*straight.shape[:3], -1)
    whole = values.transpose(0, 2, 1, 3).reshape(mode.parts, chunks.shape[2], -1).astype(np.float64)
    beyond = whole.copy()
    beyond[:, :mn, :k] = 0
    assert not beyond.any(), "beyond the operand's edges the parts are zero"
    return whole[:, :mn, :k]


def simulated_split(mode: Mode, x: np.ndarray, along: bool) -> np.ndarray:
    from numba_gemm.device import scheduler

    rows, width = split_shape(mode, *x.shape)
    flat = np.full(rows * width + 4, np.nan, np.float32)
    parts = flat[-flat.ctypes.data % 16 // 4 :][: rows * width].reshape(rows, width)
    blocks = -(-x.shape[0] // split.ROWS)  # further ones write zeros alone
    parts[:, blocks * split.ROWS * ROW_WORDS :] = 0
    scheduler.run(split.build(mode, along), (blocks, rows // mode.parts), split.THREADS, (x, parts))
    return parts


@simulated
@pytest.mark.parametrize("along", [True, False], ids=["along", "across"])
@pytest.mark.parametrize("layout", ["rows", "columns", "reversed"])
@pytest.mark.parametrize("mode", MODES.values(), ids=lambda mode: mode.name)
def test_parts_sum_up_to_the_operand(mode, layout, along):
    generator = np.random.default_rng(5)
    mn, k = 37, mode.slot_k + 7
    x = generator.standard_normal((mn, k)).astype(np.float32) * np.float32(2.0) ** generator.integers(-30, 30, (mn, k))
    x = {"rows": x, "columns": np.asfortranarray(x), "reversed": x[::-1, ::-1]}[layout].astype(np.float32, copy=False)
    found = unsplit(mode, simulated_split(mode, x, along), mn, k)
    rest = np.abs(x.astype(np.float64) - found.sum(axis=0))
    assert (rest <= UNITS[mode.kind] ** mode.parts * np.abs(x)).all()
    for part, next_part in pairwise(found):
        assert (np.abs(next_part) <= UNITS[mode.kind] * np.abs(part)).all()


# -------------------------------------------------------------------------------------------- modes, configurations


@pytest.mark.parametrize("mode", MODES.values(), ids=lambda mode: mode.name)
def test_products_come_smallest_first(mode):
    sizes = [-(a + b) for a, b in mode.products]
    assert sizes == sorted(sizes)
    assert mode.products[-1] == (0, 0)
    expected = {"tf32": 1, "tf32x3": 3, "bf16": 1, "bf16x6": 6, "bf16x9": 9}
    assert len(mode.products) == expected[mode.name]


def test_products_of_unknown_parts_are_refused():
    with pytest.raises(ValueError, match="different ones of 1 parts"):
        Mode("odd", "tf32", 1, ((0, 0), (1, 0)))
    for products in ((), ((0, 0), (0, 0)), ((0, -1),)):
        with pytest.raises(ValueError, match="different ones"):
            Mode("odd", "tf32", 1, products)
    with pytest.raises(ValueError, match="expected one of tf32, bf16"):
        Mode("half", "f16", 1, ((0, 0),))


@pytest.mark.parametrize("mode", MODES.values(), ids=lambda mode: mode.name)
@pytest.mark.parametrize("stage", TENSOR_STAGES.values(), ids=lambda stage: stage.name)
def test_slots_fit_into_shared_memory(stage, mode):
    for config in stage.configs:
        assert 1 <= config.slots(mode) <= config.max_slots
        assert config.dynamic_shared(mode) <= SHARED_BYTES
        assert config.slots(mode) > 1 or config.producers == 0, "a producer needs a slot to fill while one is read"


@pytest.mark.parametrize(
    ("extents", "broken"),
    [
        ({"BM": 128, "BN": 128, "consumers": 1}, "64 \\* consumers"),
        ({"BM": 64, "BN": 12}, "BN % 8"),
        ({"BM": 192, "BN": 128, "consumers": 3}, "padding"),
        ({"BM": 64, "BN": 128, "max_slots": 0}, "slots"),
        ({"BM": 64, "BN": 0}, "positive"),
        ({"BM": 64, "BN": 128, "producers": -1}, "positive"),
    ],
)
def test_a_configuration_names_what_it_breaks(extents, broken):
    with pytest.raises(ValueError, match=broken):
        WarpgroupConfig(**extents)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("one_warpgroup", WarpgroupConfig(128, 128, consumers=2)),
        ("one_warpgroup", WarpgroupConfig(64, 128, producers=1)),
        ("producer_consumer", WarpgroupConfig(64, 128)),
        ("producer_consumer", WarpgroupConfig(64, 128, producers=2)),
    ],
)
def test_a_stage_refuses_warpgroups_that_it_has_no_part_for(name, config):
    with pytest.raises(ValueError, match=r"one warpgroup|one producer"):
        TENSOR_STAGES[name].build(config, MODES["tf32"])


def test_a_slot_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="no room"):
        WarpgroupConfig(256, 256, consumers=4).slots(Mode("four", "bf16", 4, ((0, 0),)))


@pytest.mark.parametrize("mode", MODES.values(), ids=lambda mode: mode.name)
def test_split_operands_are_padded(mode):
    assert split_shape(mode, 1, 0) == (mode.parts, ROW_WORDS * PADDED)
    assert split_shape(mode, PADDED + 1, mode.slot_k + 1) == (2 * mode.parts, 2 * ROW_WORDS * PADDED)


@simulated
def test_the_simulator_says_that_it_has_no_matrix_instructions():
    stage = TENSOR_STAGES["one_warpgroup"]
    with pytest.raises(NotImplementedError, match="no matrix instructions"):
        stage.build(stage.configs[0], MODES["tf32"])


# ------------------------------------------------------------------------------------------------------- compiled


def test_compiled_kernels_are_what_they_claim():
    program = Path(__file__).with_name("tensor_core_cases.py")
    done = subprocess.run(
        [sys.executable, str(program)], env=compiler_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == len(MODES) * (2 + sum(len(stage.configs) for stage in TENSOR_STAGES.values()))
    for row in rows:
        name, opcodes = row["name"], row["opcodes"]
        assert row["local"] == 0, name
        assert row["spills"] == 0, name
        assert "Compiling entry" in row["log"], f"{name}: ptxas says nothing"
        assert "C75" not in row["log"], f"{name}: ptxas puts products one after the other: {row['log']}"
        mode = MODES[row["mode"]]
        if row["split"]:
            assert "HGMMA" not in opcodes, name
            assert opcodes["STG"] == mode.parts, f"{name}: a part of a chunk is one 128-bit store"
        else:
            assert opcodes["HGMMA"] == 4 * len(mode.products), name
            assert opcodes["UBLKCP"] == 2 * mode.parts, name
            assert opcodes["SYNCS"] >= 3, name


# ------------------------------------------------------------------------------------------------------- on a GPU

# Of |A| @ |B|: a product of parts drops what is smaller, and each of K sums of a slot is cut off, not rounded.
BOUNDS = {"tf32": 2.0**-9, "bf16": 2.0**-6.5, "tf32x3": 2.0**-20, "bf16x6": 2.0**-20, "bf16x9": 2.0**-20}


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("shape", [(1, 1, 1), (64, 128, 32), (100, 70, 90), (129, 257, 65), (300, 200, 1030)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", TENSOR_STAGES)
def test_product(stage, mode, shape):
    from numba import cuda
    from tensor_core_cases import product

    m, n, k = shape
    generator = np.random.default_rng(m)
    for turned in (False, True):
        a, b = (generator.standard_normal(extents).astype(np.float32) for extents in ((m, k), (k, n)))
        if turned:
            a, b = np.asfortranarray(a), np.asfortranarray(b)
        guarded = np.full((m + 2, n + 2), np.nan, np.float32)
        whole = cuda.to_device(guarded)
        c = whole[1 : m + 1, 1 : n + 1]
        product(cuda.to_device(a), cuda.to_device(b), c, mode, stage)
        found = whole.copy_to_host()
        exact, size = a.astype(np.float64) @ b, np.abs(a.astype(np.float64)) @ np.abs(b)
        assert (np.abs(found[1 : m + 1, 1 : n + 1] - exact) <= BOUNDS[mode] * size).all()
        found[1 : m + 1, 1 : n + 1] = np.nan
        assert np.isnan(found).all(), "nothing beside C is written"


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00000, 0xFF801000])
def test_a_nan_stays_one(mode, bits):
    from numba import cuda
    from tensor_core_cases import product

    a, b = np.ones((3, 5), np.float32), np.ones((5, 4), np.float32)
    a[1, 2] = np.uint32(bits).view(np.float32)
    c = cuda.to_device(np.zeros((3, 4), np.float32))
    product(cuda.to_device(a), cuda.to_device(b), c, mode, "producer_consumer")
    assert (np.isnan(c.copy_to_host()) == [[False], [True], [False]]).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("stage", TENSOR_STAGES)
def test_alpha_and_beta(stage):
    from numba import cuda
    from tensor_core_cases import product

    generator = np.random.default_rng(3)
    a, b, c = (generator.standard_normal(extents).astype(np.float32) for extents in ((70, 40), (40, 50), (70, 50)))
    on_device = cuda.to_device(c)
    product(cuda.to_device(a), cuda.to_device(b), on_device, "tf32x3", stage, alpha=0.5, beta=-2.0)
    np.testing.assert_allclose(on_device.copy_to_host(), 0.5 * (a @ b) - 2 * c, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("mode", ["tf32x3", "bf16x6", "bf16x9"])
@pytest.mark.parametrize("k", [256, 4096])
def test_no_less_accurate_than_float32(mode, k):
    """Median and maximum of the error over ``|A| @ |B|``, against float32 multiply-adds, one term after the other."""
    from numba import cuda
    from tensor_core_cases import product

    generator = np.random.default_rng(k)
    a, b = (generator.uniform(-1, 1, extents).astype(np.float32) for extents in ((128, k), (k, 128)))
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    exact, size = wide_a @ wide_b, np.abs(wide_a) @ np.abs(wide_b)
    in_order = np.zeros((128, 128), np.float32)
    for p in range(k):
        in_order = (in_order + np.outer(wide_a[:, p], wide_b[p])).astype(np.float32)
    c = cuda.to_device(np.empty((128, 128), np.float32))
    product(cuda.to_device(a), cuda.to_device(b), c, mode, "producer_consumer")
    ours, theirs = (np.abs(found - exact) / size for found in (c.copy_to_host(), in_order))
    assert np.median(ours) <= np.median(theirs)
    assert ours.max() <= theirs.max()
