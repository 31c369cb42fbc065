"""The stage `rows_in_registers` with an A of BF16, which it reads as it is."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
from support.covering import covering
from support.halves import to_bf16
from support.offline import offline
from support.simulated_parts import float32_sums, marks_of
from support.tensor_core_cases import compiled_rows, tensor_matrix

import numba_gemm
from numba_gemm.gemm import heuristics
from numba_gemm.gemm.explain import explain_shape
from numba_gemm.gemm.heuristics import Problem
from numba_gemm.kernels.product import ONE, Batch, Layout, Product, dense
from numba_gemm.kernels.stage import Gpu, Partition
from numba_gemm.kernels.step import MatrixAt, Moving, Slot
from numba_gemm.kernels.tensor_core import TENSOR_PRECISIONS, TENSOR_STAGES, TensorVariant, row_parts, rows_in_registers
from numba_gemm.kernels.tensor_core.config import NARROW, ROW_BYTES
from numba_gemm.models.accuracy import tensor_bound
from numba_gemm.runtime.device import SIMULATED_DEVICE
from numba_gemm.simulator.switch import SIMULATOR

ROWS, PERSISTENT = TENSOR_STAGES["rows_in_registers"], TENSOR_STAGES["persistent"]
CONFIGS = ROWS.narrow_configs
GPU = Gpu((9, 0), 132)
NAN, INF = np.nan, np.inf
BYTES = 1 << 20  # from a matrix of a batch to the next

simulated = pytest.mark.skipif(not SIMULATOR, reason="runs on the simulator")


def bf16_product(m, n, k, batch=ONE, a=None, b=None):
    a = a or dense("N", m, k, "bfloat16")
    return Product(a, b or dense("N", k, n), dense("N", m, n), batch)


# -------------------------------------------------------------------------------------------- from memory to registers


def copied(monkeypatch, x, extent, block_row, k):
    """Return a tile of BF16 rows as the threads that fetch leave it in shared memory."""
    memory, span = np.full(extent * ROW_BYTES, 0xEE, np.uint8), x.ctypes.data + x.strides[0] * x.shape[0]

    def copy(memory, to, matrix, address, size):
        to, address, size = int(to), int(address), int(size)
        assert to % 16 == 0 <= size <= 16
        assert size == 0 or (address % 16 == 0 and matrix.ctypes.data <= address <= span - size)
        memory[to : to + 16] = 0
        memory[to : to + size] = np.frombuffer(ctypes.string_at(address, size), np.uint8)

    monkeypatch.setattr(row_parts, "copy16_of", copy)
    fetch = row_parts.row_copies.__wrapped__(NARROW, extent)
    for tid in range(128):
        fetch(memory, np.uint32(tid), np.uint32(0), x, np.int64(block_row), np.int64(k))
    return memory


@simulated
@pytest.mark.parametrize("extent", sorted({config.BM for config in CONFIGS}))
@pytest.mark.parametrize(
    ("shape", "begin"),
    [
        ((300, 200), (64, 64)),
        ((150, 88), (0, 64)),
        *[((70, cols), (0, 64)) for cols in range(81, 88)],
        ((3, 1), (0, 0)),
    ],
)
def test_copies_and_loads_bring_words_and_zeros_around_them(monkeypatch, extent, shape, begin):
    """In the order of the matrix instruction, whatever the bits are; what follows a row in memory is not read."""
    generator = np.random.default_rng(1)
    wide = np.full((shape[0], -(-shape[1] // 8) * 8 + 8), 0xFFFF, np.uint16)
    memory = np.frombuffer(bytearray(wide.nbytes + 16), np.uint16)
    memory = memory[-memory.ctypes.data % 16 // 2 :][: wide.size].reshape(wide.shape)
    memory[:] = wide
    x = memory[:, : shape[1]]
    x[:] = generator.integers(0, 1 << 16, shape)
    tile = copied(monkeypatch, x, extent, *begin)
    expected, found = np.zeros((extent, 64), np.uint16), np.full((extent, 64), 0xEEEE, np.uint16)
    part = x[begin[0] :, begin[1] :][:extent, :64]
    expected[: part.shape[0], : part.shape[1]] = part
    first_float = row_parts.first_floats(NARROW, extent)
    decompose = row_parts.decompositions(3, True, NARROW, extent)
    for group, warp, lane in itertools.product(range(extent // 64), range(4), range(32)):
        row, first = first_float(np.uint32(group), np.uint32(warp), np.uint32(lane))
        held = np.zeros(row_parts.WORDS, np.uint32)
        decompose(held, None, tile.view(np.float32), first)
        halves = held.view(np.uint16).reshape(4, 2, 2, 2)  # step, half of its k, row, k
        for step, half, lower in itertools.product(range(4), range(2), range(2)):
            k = 16 * step + 8 * half + lane % 4 * 2
            found[int(row) + 8 * lower, k : k + 2] = halves[step, half, lower]
    np.testing.assert_array_equal(found, expected)


@simulated
def test_no_two_lanes_meet_in_a_bank(monkeypatch):
    asked = []

    def shared_load1(memory, address):
        asked[-1].append(int(address) // 4)
        return np.float32(0)

    monkeypatch.setattr(row_parts, "shared_load1", shared_load1)
    first_float, position = row_parts.first_floats(NARROW, 128), row_parts.positions(NARROW, 128)
    for lane in range(32):
        asked.append([])
        _, first = first_float(np.uint32(1), np.uint32(2), np.uint32(lane))
        row_parts.load_words(np.zeros(row_parts.WORDS, np.uint32), None, None, first)
    for i in range(row_parts.WORDS):
        assert sorted(lane[i] % 32 for lane in asked) == list(range(32))
    for row in range(8):  # eight copies of a row
        chunks = [position(np.uint32(row), np.uint32(8 * i)) // 16 for i in range(8)]
        assert sorted(chunk % 8 for chunk in chunks) == list(range(8))


# ------------------------------------------------------------------------------------------------------ special values


@simulated
def test_special_values_are_found_among_rows_of_bf16():
    from numba_gemm.kernels.tensor_core.special_values import infinite_terms, special_sums

    generator = np.random.default_rng(3)
    x, y = (generator.integers(-2, 3, extents).astype(np.float32) for extents in ((20, 150), (150, 20)))
    x[0, 70], x[1, 149], x[2, 0], x[2, 149], x[9, 64], x[3] = NAN, INF, INF, -INF, -INF, 2.0**127
    y[3, 1], y[149, 2], y[64, 3], y[:, 4] = INF, 0, 0, 1e38
    bits, expected = to_bf16(x), float32_sums(x, y)
    terms, special_sum = infinite_terms(2, 4, 16, narrow=True), special_sums(narrow=True)
    with np.errstate(all="ignore"):
        for row, col in itertools.product(range(8), range(0, 8, 2)):
            found = terms(np.uint64(255), None, marks_of(y.T, 6), bits, y, row, col, 6, False)
            for i, j in itertools.product(range(2), range(4)):
                at, bit = (row + 8 * i, col + j // 2 * 8 + j % 2), np.uint64(1 << i * 4 + j)
                np.testing.assert_equal(special_sum(bit, found, bits, y, *at), expected[at])


# ------------------------------------------------------------------------------------------------------------ launches


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
@pytest.mark.parametrize("partition", [None, Partition(33, 0)])
def test_nothing_is_converted(config, partition):
    product = bf16_product(60, 60, 3072)
    made = ROWS.launches(config, product, "bf16x6", partition, GPU)
    like = ROWS.launches(ROWS.configs[1], product._replace(a=dense("N", 60, 3072)), "bf16x6", partition, GPU)
    assert [step.kernel.name.partition("_bf16")[0] for step in made.steps] == [
        step.kernel.name.partition("_bf16")[0] for step in like.steps
    ]
    assert made.multiplication.kernel.variant.rows == NARROW
    assert MatrixAt(Moving(Slot.A), product.a) in made.multiplication.arguments
    assert partition is None or made.steps[-1].kernel.variant.narrow_a
    assert config.slot_bytes(TENSOR_PRECISIONS["bf16x6"]) == ROW_BYTES * (config.BM + 3 * config.BN)
    assert config.slots(TENSOR_PRECISIONS["bf16x6"]) >= 3


def test_another_operand_of_16_bits_is_converted():
    product = bf16_product(60, 60, 3072, b=dense("T", 3072, 60, "bfloat16"))
    taken = ROWS.taken(CONFIGS[0], product)
    assert (taken.a, taken.b) == (product.a, product.b.converted)
    assert ROWS.launches(CONFIGS[0], product, "bf16x6", None, GPU).steps[0].kernel.name.startswith("convert")
    assert ROWS.taken(ROWS.configs[0], product) == product.converted


OTHERS = {
    "by columns": bf16_product(64, 64, 2000, a=dense("T", 64, 2000, "bfloat16")),
    "odd address": bf16_product(64, 64, 2000, a=Layout(64, 2000, 4000, 2, 2, "bfloat16")),
    "odd rows": bf16_product(64, 64, 2001),
    "odd steps": bf16_product(64, 64, 2000, Batch((1, 1, 2), (0, 0, 8), (0, 0, 0), (0, 0, BYTES))),
    "FP16": bf16_product(64, 64, 2000, a=dense("N", 64, 2000, "float16")),
    "FP32": bf16_product(64, 64, 2000, a=dense("N", 64, 2000)),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_operands_are_refused_and_not_chosen(case):
    assert not OTHERS[case].narrow_a
    assert not heuristics.problem(OTHERS[case], SIMULATED_DEVICE, "bf16x6").a_narrow
    with pytest.raises(ValueError, match="contiguous and begin at multiples of 16 bytes"):
        ROWS.launches(CONFIGS[0], OTHERS[case], "bf16x6", None, GPU)


@pytest.mark.parametrize(("config", "rows"), [(CONFIGS[0], "along4"), (ROWS.configs[0], NARROW)])
def test_configurations_are_for_their_rows(config, rows):
    with pytest.raises(ValueError, match="a configuration for BF16"):
        rows_in_registers.build(config, TensorVariant(TENSOR_PRECISIONS["bf16x6"], rows=rows))


# -------------------------------------------------------------------------------------------------------------- choice


def test_problems_know_operands_of_bf16():
    product = bf16_product(64, 64, 2000, Batch((1, 1, 2), (0, 0, BYTES), (0, 0, 4), (0, 0, BYTES)))
    wanted, turned = (heuristics.problem(one, SIMULATED_DEVICE, "bf16x6") for one in (product, product.transposed))
    assert (wanted.a_narrow, wanted.b_narrow) == (True, False) == (turned.b_narrow, turned.a_narrow)
    assert (wanted.swapped.a_narrow, wanted.swapped.b_narrow) == (False, True)
    assert not heuristics.problem(product, SIMULATED_DEVICE, "tf32").a_narrow


@pytest.mark.parametrize("extents", [(8192, 64, 3072), (8192, 768, 7168), (4096, 4096, 4096), (64, 64, 7168)])
@pytest.mark.parametrize("swapped", [False, True])
def test_choice(monkeypatch, extents, swapped):
    monkeypatch.setattr(numba_gemm.gemm.precision, "SIMULATOR", False)
    wanted = Problem(*extents, a_narrow=True, precision="bf16x6")
    wanted = wanted.swapped if swapped else wanted
    found = heuristics.choose(wanted)
    assert (found.stage, found.swapped) == (ROWS, swapped)
    assert found.config in CONFIGS
    assert found._replace(reason="") == heuristics.best(wanted)
    others = heuristics.ranked(wanted._replace(a_narrow=False, b_narrow=False))
    assert {one.config for one in others}.isdisjoint(CONFIGS)
    named = heuristics.named("rows_in_registers", wanted)
    assert (named.config, named.swapped) == (found.config, found.swapped)


def test_wide_tiles_are_for_long_sums():
    for k in (1000, 2000):
        wanted = Problem(8192, 768, k, a_narrow=True, precision="bf16x6")
        found = {one.config.BN for one in heuristics.ranked(wanted, ROWS)}
        assert found == ({64, 128} if k >= 1024 else {64})


def test_conversion_counts_in_the_choice(monkeypatch):
    """Twice as slow a product is chosen if it needs no conversion of an operand that takes longer."""
    wanted = Problem(8192, 64, 3072, a_narrow=True, precision="bf16x6", memory_bandwidth=1e12)
    rows, other = (heuristics.Choice(stage, None, clocks=1e5) for stage in (ROWS, PERSISTENT))
    saved = 6 * 8192 * 3072 / 0.8e12 * wanted.clock_hz
    assert rows.clocks - heuristics._compared(rows, wanted) == pytest.approx(saved, rel=0.05)
    assert heuristics._compared(other, wanted) == other.clocks
    assert heuristics._compared(rows._replace(swapped=True), wanted) == rows.clocks


def test_explanations_and_plans(monkeypatch):
    monkeypatch.setattr(numba_gemm.gemm.precision, "SIMULATOR", False)
    told = explain_shape(8192, 64, 3072, dtype=("bfloat16", "float32"), cc=(9, 0), precision="bf16x6")
    assert (told.a_access, told.converted, told.launches) == (NARROW, "", 2)
    assert "converts" not in str(told)
    both = explain_shape(8192, 64, 3072, dtype="bfloat16", cc=(9, 0), precision="bf16x6")
    assert (both.a_access, both.converted, both.launches) == (NARROW, "B", 3)
    assert "converts B from bfloat16" in str(both)
    assert both.microseconds > told.microseconds


# ------------------------------------------------------------------------------------------------------------ compiled


@pytest.mark.parametrize(
    ("index", "precision"),
    [
        pytest.param(index, precision, marks=[pytest.mark.exhaustive] * (index > 0 or precision != "bf16x6"))
        for index in range(len(CONFIGS))
        for precision in ("bf16x6", "bf16x6_stepwise", "bf16x3", "bf16x9")
        if precision != "bf16x6_stepwise" or CONFIGS[index].BN <= 64  # others are not chosen
    ],
)
def test_compiled_kernels_hold_the_rows_in_registers(index, precision):
    (row,) = offline(compiled_rows, f"rows_in_registers:{index}:{precision}:{NARROW}")
    opcodes, parts = row["opcodes"], 2 if precision == "bf16x3" else 3
    turns = 2 if CONFIGS[index].consumers == 1 or parts == 3 else 1  # written out, or unrolled by the assembler
    assert (row["local"], row["spills"]) == (0, 0)
    assert "C75" not in row["log"], f"ptxas puts products one after the other: {row['log']}"
    assert row["taken"] == row["passed"], "a launch passes other parameters"
    assert opcodes["HGMMA"] == turns * 4 * parts, "with the one part of A"
    assert opcodes["UBLKCP"] == parts
    assert opcodes["LDGSTS"] == row_parts.AT_ONCE


# ------------------------------------------------------------------------------------------------------------ on a GPU

SHAPES = [(1, 1, 1), (64, 64, 64), (65, 63, 1100), (130, 70, 1025), (300, 200, 130), (513, 65, 3072), (5, 9, 0)]


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("index", "precision", "shares", "shape"), covering(range(len(CONFIGS)), ROWS.precisions, (1, 3), SHAPES)
)
def test_products(index, precision, shares, shape):
    """Rows of A are whole vectors apart, with NaN between them, and C is within an array."""
    import torch

    from numba_gemm.runtime.launch import launch

    torch.manual_seed(shape[2])
    (m, n, k), config = shape, CONFIGS[index]
    a = torch.full((m, k // 8 * 8 + 8), NAN, device="cuda", dtype=torch.bfloat16)[:, :k].copy_(torch.randn(m, k))
    b, before = torch.randn(k, n, device="cuda"), torch.randn(m, n, device="cuda")
    guarded = torch.full((m + 2, n + 3), NAN, device="cuda")
    c = guarded[1:-1, 1:-2]
    c.copy_(before)
    tiles = -(-m // config.BM) * -(-n // config.BN)
    partition = Partition(shares * tiles, 0) if shares > 1 else None
    torch.cuda.synchronize()
    x, y, z = map(tensor_matrix, (a, b, c))
    launch(ROWS, config, 1.5, x, y, -0.5, z, precision=precision, partition=partition)
    torch.cuda.synchronize()
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    error = (c.double() - (1.5 * exact - 0.5 * before.double())).abs()
    allowed = (tensor_bound(precision, max(k, 1)) + 2.0**-22) * (1.5 * size + 0.5 * before.double().abs())
    assert bool((error <= allowed).all())
    c.fill_(NAN)
    assert torch.isnan(guarded).all(), "nothing beside C is written"


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("shares", [1, 5])
def test_special_values_on_a_gpu(shares, swapped):
    import torch

    from numba_gemm.runtime.launch import launch

    torch.manual_seed(2)
    a, b = torch.randn(150, 2000, device="cuda").bfloat16(), torch.randn(2000, 70, device="cuda")
    a[3, 7], a[50, 1], a[20, 1990], a[99] = INF, NAN, -INF, 3e38
    b[9, 20] = -INF
    b[7, :30] = 0  # an infinity times zero
    expected, c = a.double() @ b.double(), torch.zeros(150, 70, device="cuda")
    special = ~torch.isfinite(expected)
    given = tuple(map(tensor_matrix, (b.T, a.T, c.T) if swapped else (a, b, c)))
    partition = Partition(shares * 4, 0) if shares > 1 else None
    options = {"precision": "bf16x6", "partition": partition, "swapped": swapped}
    torch.cuda.synchronize()
    launch(ROWS, CONFIGS[2], 1.0, *given[:2], 0.0, given[2], **options)
    torch.cuda.synchronize()
    assert torch.equal(c[special].nan_to_num(9.0), expected[special].float().nan_to_num(9.0))
    ordinary = ~special
    ordinary[99] = False
    size = a.double().abs() @ b.double().abs()
    assert bool(((c - expected).abs()[ordinary] <= tensor_bound("bf16x6", 2000) * size[ordinary]).all())


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_the_public_function_on_a_gpu():
    """Batches, epilogues, prepared operands and plans; B of BF16, alone and beside A; and rows at odd addresses."""
    import torch

    def bias_relu(value, row, column, bias):
        return max(value + bias[column], 0.0)

    options = {"stage": "rows_in_registers", "precision": "bf16x6"}
    a, b = torch.randn(3, 200, 1504, device="cuda").bfloat16(), torch.randn(1504, 64, device="cuda")
    bias = torch.randn(64, device="cuda")

    def check(found, x, y, finish=lambda exact: exact):
        size = x.double().abs() @ y.double().abs() + bias.abs().max()
        error = (found.double() - finish(x.double() @ y.double())).abs()
        assert bool((error <= (tensor_bound("bf16x6", 1504) + 2.0**-22) * size).all())

    found = numba_gemm.tiled_sgemm(a, b, epilogue=bias_relu, epilogue_args=(bias,), **options)
    check(found, a, b, lambda exact: torch.relu(exact + bias))
    single, ready = numba_gemm.tiled_sgemm(a[0], b, **options), numba_gemm.prepare(b, "bf16x6")
    assert torch.equal(numba_gemm.tiled_sgemm(a[0], ready, **options), single)
    check(numba_gemm.tiled_sgemm(a, b.bfloat16(), **options), a, b.bfloat16())
    odd = torch.randn(200 * 1504 + 1, device="cuda").bfloat16()[1:].view(200, 1504)
    check(numba_gemm.tiled_sgemm(odd, b, **options), odd, b)
    planned = numba_gemm.plan(200, 64, 1504, dtype=("bfloat16", "float32"), **options)
    assert torch.equal(planned(a[0], b), single)
    check(planned(odd, b), odd, b)
    weights, x = torch.randn(300, 1504, device="cuda").bfloat16().T, torch.randn(41, 1504, device="cuda")
    assert numba_gemm.explain(x, weights, **options).swapped
    for y in (x, x.bfloat16()):
        found = numba_gemm.tiled_sgemm(y, weights, **options)
        size = y.double().abs() @ weights.double().abs()
        assert bool(((found - y.double() @ weights.double()).abs() <= tensor_bound("bf16x6", 1504) * size).all())
