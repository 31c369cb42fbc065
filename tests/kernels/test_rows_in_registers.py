"""The stage `rows_in_registers`: copies, rows and their parts on the simulator, launches, compiled kernels, a GPU."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda, float32
from support.covering import covering
from support.offline import offline
from support.simulated_parts import float32_sums, recomposed, simulated_decomposition
from support.tensor_core_cases import compiled_rows, tensor_matrix

import numba_gemm
from numba_gemm.device.async_copy import commit_group, wait_group
from numba_gemm.gemm import heuristics
from numba_gemm.gemm.explain import explain
from numba_gemm.gemm.heuristics import Problem
from numba_gemm.kernels.product import ONE, Batch, Layout, Product, dense
from numba_gemm.kernels.stage import Gpu, Partition
from numba_gemm.kernels.step import MatrixAt, Moving, Slot
from numba_gemm.kernels.tensor_core import TENSOR_PRECISIONS, TENSOR_STAGES, TensorVariant, row_parts, rows_in_registers
from numba_gemm.kernels.tensor_core.config import ROW_BYTES, RowsConfig
from numba_gemm.kernels.tensor_core.decomposition import decomposition_of
from numba_gemm.models.accuracy import tensor_bound
from numba_gemm.runtime.device import SIMULATED_DEVICE
from numba_gemm.simulator import scheduler
from numba_gemm.simulator.switch import SIMULATOR

ROWS, PERSISTENT = TENSOR_STAGES["rows_in_registers"], TENSOR_STAGES["persistent"]
SMALL = PERSISTENT.configs[3]
PRECISIONS = [TENSOR_PRECISIONS[name] for name in ROWS.precisions]
GPU = Gpu((9, 0), 132)
NAN, INF = np.nan, np.inf

simulated = pytest.mark.skipif(not SIMULATOR, reason="runs on the simulator")


def dense_product(m, n, k, batch=ONE, layouts="NN", **more):
    return Product(dense(layouts[0], m, k), dense(layouts[1], k, n), dense("N", m, n), batch, **more)


# -------------------------------------------------------------------------------------------- from memory to registers


def copied(x, extent, access, block_row=0, k=0):
    """Return a tile of x as the threads that fetch leave it in shared memory."""
    fetch, found = row_parts.row_copies(access, extent), np.full(extent * 64, NAN, np.float32)

    def kernel(x, found):
        memory = cuda.shared.array(0, float32)
        tid = np.uint32(cuda.threadIdx.x)
        fetch(memory, tid, np.uint32(0), x, np.int64(block_row), np.int64(k))
        commit_group()
        wait_group(0)
        cuda.syncthreads()
        if tid == 0:
            found[:] = memory[:]

    scheduler.run(kernel, (1,), (128,), (x, found), dynamic_shared=found.nbytes)
    return found


def aligned_rows(x):
    """Return a copy whose rows are whole vectors apart, with NaN between them."""
    rows, cols = x.shape
    memory = np.full((rows, cols // 4 * 4 + 4), NAN, np.float32)
    memory[:, :cols] = x
    return memory[:, :cols]


def aligned_columns(x):
    """Return a copy whose columns are whole vectors apart, with NaN between them."""
    return aligned_rows(x.T).T


@simulated
@pytest.mark.parametrize("extent", [config.BM for config in ROWS.configs])
@pytest.mark.parametrize(
    ("access", "shape", "begin", "how"),
    [
        ("along4", (300, 200), (128, 64), np.ascontiguousarray),
        ("along4", (150, 84), (128, 64), np.ascontiguousarray),
        *[("along4", (150, cols), (128, 64), aligned_rows) for cols in (81, 82, 83, 85)],
        ("along4", (3, 63), (0, 0), aligned_rows),
        ("across4", (300, 200), (128, 64), np.asfortranarray),
        *[("across4", (rows, 83), (128, 64), aligned_columns) for rows in (150, 161, 171, 191)],
        ("across4", (3, 1), (0, 0), aligned_columns),
        ("across4", (0, 9), (0, 0), np.asfortranarray),
        ("any", (150, 83), (128, 64), np.ascontiguousarray),
        *[("across1", (rows, 83), (128, 64), np.asfortranarray) for rows in (150, 161, 171, 300)],
        ("across1", (150, 150), (128, 64), lambda x: np.asfortranarray(np.vstack([x, x]))[1:151]),
        ("across1", (1, 1), (0, 0), np.asfortranarray),
        ("across1", (0, 9), (0, 0), np.asfortranarray),
        ("any", (1, 1), (0, 0), np.ascontiguousarray),
        ("any", (70, 70), (0, 0), np.asfortranarray),
        ("along4", (9, 0), (0, 0), np.ascontiguousarray),
    ],
)
def test_copies_bring_a_tile_and_zeros_around_it(extent, access, shape, begin, how):
    x = how(np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape))
    found = copied(x, extent, access, *begin)
    expected = np.zeros((extent, 64), np.float32)
    part = x[begin[0] :, begin[1] :][:extent, :64]
    expected[: part.shape[0], : part.shape[1]] = part
    position = row_parts.positions(access, extent)
    places = [[int(position(np.uint32(row), np.uint32(k))) // 4 for k in range(64)] for row in range(extent)]
    np.testing.assert_array_equal(found[np.array(places)], expected)
    assert sorted(itertools.chain(*places)) == list(range(64 * extent))


SPECIAL = [INF, -INF, float(np.finfo(np.float32).max), 2.0**-149, -(2.0**-130), -0.0, 1 + 2.0**-7, 2.0**-120]


@simulated
@pytest.mark.parametrize("access", ["along4", "across4", "any", "across1"])
@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda precision: precision.name)
def test_threads_hold_the_parts_that_a_decomposition_in_memory_makes(precision, access):
    """In the order of the matrix instruction, with the same bits; of a NaN, some part is NaN."""
    generator = np.random.default_rng(1)
    x = generator.standard_normal((128, 64)).astype(np.float32)
    x *= np.float32(2) ** generator.integers(-60, 60, x.shape).astype(np.float32)
    x[::5, ::7] = np.resize(np.float32(SPECIAL), x[::5, ::7].shape)
    x[77, 13], x[5, 63] = NAN, np.uint32(0x7FFFFFFF).view(np.float32)
    memory = copied(np.asfortranarray(x) if access.startswith("across") else x, 128, access)
    words, first_float = precision.parts * row_parts.WORDS, row_parts.first_floats(access, 128)
    decompose = row_parts.decompositions(precision.parts, precision.short, access, 128)
    found = np.full((precision.parts, *x.shape), NAN, np.float32)
    with np.errstate(all="ignore"):
        expected = recomposed(precision, simulated_decomposition(precision, x, x[:1])[0], *x.shape)
        for group, warp, lane in itertools.product(range(2), range(4), range(32)):
            row, first = first_float(np.uint32(group), np.uint32(warp), np.uint32(lane))
            assert row == 64 * group + 16 * warp + lane // 4
            held, floats = np.zeros(words, np.uint32), np.full(row_parts.FLOATS, NAN, np.float32)
            decompose(held, floats, memory, first)
            halves = held.view(np.uint16).astype(np.uint32) << 16
            values = halves.view(np.float32).reshape(precision.parts, 4, 2, 2, 2)  # step, half of its k, row, k
            for step, half, lower in itertools.product(range(4), range(2), range(2)):
                k = 16 * step + 8 * half + lane % 4 * 2
                found[:, int(row) + 8 * lower, k : k + 2] = values[:, step, half, lower]
    numbers = ~np.isnan(x)
    np.testing.assert_array_equal(
        found[:, numbers].view(np.uint32), expected[:, numbers].astype(np.float32).view(np.uint32)
    )
    assert np.isnan(found[:, ~numbers]).any(axis=0).all()


@simulated
@pytest.mark.parametrize("extent", [64, 128])
@pytest.mark.parametrize(("access", "width", "ahead"), [("along4", 2, 16), ("across4", 1, 32)])
def test_no_two_lanes_meet_in_a_bank(monkeypatch, access, width, ahead, extent):
    """Half a warp loads 8 bytes a lane at a time, or a warp 4, and a quarter copies 16."""
    asked = []

    def load(memory, address):
        asked[-1].append(int(address) // 4)
        return (np.float32(0),) * 2 if width == 2 else np.float32(0)

    monkeypatch.setattr(row_parts, f"shared_load{width}", load)
    loads, first_float = row_parts.row_loads.__wrapped__(access, extent), row_parts.first_floats(access, extent)
    for lane in range(32):
        asked.append([])
        _, first = first_float(np.uint32(extent // 64 - 1), np.uint32(2), np.uint32(lane))
        loads(np.zeros(row_parts.FLOATS, np.float32), None, first)
    assert {len(one) for one in asked} == {ahead}
    lanes = 32 // width
    for i, begin in itertools.product(range(ahead), range(0, 32, lanes)):
        banks = [(asked[lane][i] + j) % 32 for lane in range(begin, begin + lanes) for j in range(width)]
        assert sorted(banks) == list(range(32))
    position, copies = row_parts.positions(access, extent), (64 if access == "along4" else extent) // 4
    for tid in range(0, 128, 8):
        places = [(np.uint32(t // copies), np.uint32(t % copies * 4)) for t in range(tid, tid + 8)]
        chunks = [position(*(place if access == "along4" else place[::-1])) // 16 for place in places]
        assert sorted(chunk % 8 for chunk in chunks) == list(range(8))


# ------------------------------------------------------------------------------------------------------ special values


@simulated
@pytest.mark.parametrize("split", [False, True])
def test_special_values_are_found_without_marks_of_a(split):
    """The argument in place of decomposed A is not read."""
    from support.simulated_parts import marks_of

    from numba_gemm.kernels.tensor_core.special_values import infinite_terms, special_sums

    generator = np.random.default_rng(3)
    x, y = (generator.integers(-2, 3, extents).astype(np.float32) for extents in ((20, 150), (150, 20)))
    x[0, 70], x[1, 149], x[2, 0], x[2, 149], x[9, 64] = NAN, INF, INF, -INF, -INF
    y[3, 1], y[149, 2], y[64, 3], y[:, 4] = INF, 0, 0, 1e38
    rows, cols, ahead = (1, 1, 4) if split else (2, 4, 16)
    terms, expected = infinite_terms(rows, cols, ahead), float32_sums(x, y)
    with np.errstate(all="ignore"):
        for row, col in itertools.product(range(8), range(0, 8, 2)):
            every = np.uint64((1 << rows * cols) - 1)
            found = terms(every, None, marks_of(y.T, 6), x, y, row, col, 6, False)
            for i, j in itertools.product(range(rows), range(cols)):
                at, bit = (row + 8 * i, col + j // 2 * 8 + j % 2), np.uint64(1 << i * cols + j)
                np.testing.assert_equal(special_sums()(bit, found, x, y, *at), expected[at])


# ------------------------------------------------------------------------------------------------------------ launches


@pytest.mark.parametrize("config", ROWS.configs, ids=lambda config: config.name)
@pytest.mark.parametrize("precision", ROWS.precisions)
def test_b_alone_is_decomposed(config, precision):
    """Decomposed A has no place in the scratch memory, in which that of B comes first."""
    batch = Batch((1, 1, 3), (0, 0, 4 << 20), (0, 0, 4 << 20), (0, 0, 1 << 20))
    product, own = dense_product(1000, 100, 2000, batch), TENSOR_PRECISIONS[precision]
    made = ROWS.launches(config, product, precision, None, GPU)
    decomposes, multiplies = made.steps
    both = decomposition_of(own, product, config)
    assert made.scratch_bytes == 3 * both.steps[1]
    a, b = (argument for argument in multiplies.arguments[1:3])
    assert a == b == both.arguments[1]._replace(place=a.place)
    assert (a.place.slot, a.place.offset) == (Slot.SCRATCH, 0)
    assert multiplies.arguments[5].place.slot == Slot.A
    assert multiplies.arguments[7].words == (0, both.steps[1], 1 << 20, 4 << 20, 4 << 20, 0, 0)
    assert decomposes.grid == (
        both.arguments[1].layout.rows // own.parts * -(-100 // config.BN) * config.BN // 32,
        3,
        1,
    )
    assert multiplies.overlaps


def test_kernels_differ_by_the_access_to_a():
    config, found = ROWS.configs[0], {}
    odd = dense_product(100, 64, 2001)
    for case, product in {
        "rows": dense_product(100, 64, 2000),
        "odd, aligned": odd._replace(a=odd.a._replace(row_stride=4 * 2004)),
        "odd columns": dense_product(100, 63, 2000),
        "odd": odd,
        "columns": dense_product(100, 64, 2000, layouts="TN"),
        "odd columns of A": dense_product(101, 64, 2000, layouts="TN"),
        "another B": dense_product(100, 64, 2000, layouts="NT"),
        "step": dense_product(100, 64, 2000, Batch((1, 1, 2), (0, 0, 4), (0, 0, 0), (0, 0, 1 << 20))),
    }.items():
        for partition in (None, Partition(3, 0)):
            kernel = ROWS.launches(config, product, "bf16x6", partition, GPU).multiplication.kernel
            found[case, partition] = kernel.variant.rows
            assert kernel.name.endswith(kernel.variant.rows)
    assert {case: access for (case, _), access in found.items()} == {
        "rows": "along4",
        "odd, aligned": "along4",
        "odd columns": "along4",
        "odd": "any",
        "columns": "across4",
        "odd columns of A": "across1",
        "another B": "along4",
        "step": "any",
    }
    assert all(found[case, None] == access for (case, _), access in found.items())


def test_sums_are_divided_and_added_without_marks_of_a():
    made = ROWS.launches(ROWS.configs[0], dense_product(512, 64, 3072), "bf16x6", Partition(4 * 33, 0), GPU)
    decomposes, multiplies, adds = made.steps
    assert multiplies.grid == (132, 1, 1)
    assert adds.arguments[-1].words[-3:] == (2, 0, 0)
    assert adds.arguments[1] == adds.arguments[2] == multiplies.arguments[1]
    others = PERSISTENT.launches(SMALL, dense_product(512, 64, 3072), "bf16x6", Partition(16, 0), GPU).steps[-1]
    assert (others.kernel, others.arguments[-1].words[-3:]) == (adds.kernel, (0, 0, 0))
    assert (
        decomposes.kernel is PERSISTENT.launches(SMALL, dense_product(8, 8, 3072), "bf16x6", None, GPU).steps[0].kernel
    )


@pytest.mark.parametrize(("prepared", "slot"), [((False, True), 1), ((True, True), 2), ((True, False), None)])
def test_prepared_operands(prepared, slot):
    """Prepared parts follow the epilogue's vectors; those of A are passed over."""
    product = dense_product(512, 64, 3072)._replace(prepared=prepared, vectors=((64, 4),))
    made = ROWS.launches(ROWS.configs[0], product, "bf16x6", None, GPU)
    place = made.multiplication.arguments[2].place
    assert len(made.steps) == (1 if slot else 2)
    assert place.slot == (Slot.SCRATCH if slot is None else Slot.VECTORS + slot)
    assert (made.scratch_bytes == 0) == (slot is not None)


@pytest.mark.parametrize("prepared", list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("partition", [None, Partition(4 * 33, 0)])
def test_launches_of_the_transpose(prepared, partition):
    """B is read as it is, and the parts of A, whose prepared ones come first; C is stored by columns."""
    product = dense_product(64, 512, 3072, layouts="NT")._replace(prepared=prepared)
    turned = ROWS.launches(ROWS.configs[0], product.transposed, "bf16x6", partition, GPU)
    made, multiplies = turned.with_operands_swapped(), turned.with_operands_swapped().multiplication
    assert multiplies.kernel.variant.rows == "along4"
    assert len(made.steps) == 1 + (not prepared[0]) + (partition is not None)
    place = multiplies.arguments[2].place
    assert (place.slot, place.offset) == (Slot.VECTORS if prepared[0] else Slot.SCRATCH, 0)
    if not prepared[0]:
        assert made.steps[0].arguments[0] == MatrixAt(Moving(Slot.A), product.a)
    assert multiplies.arguments[5:7] == (
        MatrixAt(Moving(Slot.B), product.b.transposed),
        MatrixAt(Moving(Slot.A), product.a.transposed),
    )
    assert made.steps[-1].arguments[4] == MatrixAt(Moving(Slot.C), product.c.transposed)


@pytest.mark.parametrize("config", ROWS.configs, ids=lambda config: config.name)
def test_slots_fit_into_shared_memory(config):
    for precision in PRECISIONS:
        assert config.slots(precision) >= 3
        assert config.slot_bytes(precision) == ROW_BYTES * (2 * config.BM + precision.parts * config.BN)
        assert config.dynamic_shared(precision) <= 227 << 10


@pytest.mark.parametrize("precision", ["tf32x3", "bf16", "fp16x3"])
def test_other_precisions_are_refused(precision):
    with pytest.raises(ValueError, match="several parts of BF16"):
        rows_in_registers.build(ROWS.configs[0], TensorVariant(TENSOR_PRECISIONS[precision], rows="any"))


def test_wide_tiles_are_refused():
    with pytest.raises(ValueError, match="BN <= 128"):
        rows_in_registers.build(RowsConfig(64, 160, producers=1), TensorVariant(PRECISIONS[0], rows="any"))


# -------------------------------------------------------------------------------------------------------------- choice


@pytest.mark.parametrize(
    ("layouts", "k", "pitch", "steps", "expected"),
    [
        ("NN", 1024, 1024, (0, 0), (True, False)),
        ("NT", 1025, 1028, (0, 0), (True, True)),
        ("NT", 1025, 1025, (0, 0), (False, False)),
        ("TT", 1025, 1028, (0, 0), (False, True)),
        ("NT", 1024, 1024, (1 << 20, 4), (True, False)),
        ("NT", 1024, 1024, (4, 1 << 20), (False, True)),
    ],
)
def test_rows_that_copies_can_read(layouts, k, pitch, steps, expected):
    a, b = (Layout(67, k, 4 * pitch, 4) if one == wanted else dense("T", 67, k) for one, wanted in zip(layouts, "NT"))
    batch = Batch((1, 1, 2), (0, 0, steps[0]), (0, 0, steps[1]), (0, 0, 1 << 20)) if any(steps) else ONE
    product = Product(a, b.transposed, dense("N", 67, 67), batch)
    wanted, turned = (heuristics.problem(one, SIMULATED_DEVICE, "bf16x6") for one in (product, product.transposed))
    assert (wanted.a_vectors, wanted.b_vectors) == expected
    assert (turned.a_vectors, turned.b_vectors) == expected[::-1]
    assert (wanted.swapped.a_vectors, wanted.swapped.b_vectors) == expected[::-1]


@pytest.mark.parametrize("m", [64, 512, 8192])
def test_choice(monkeypatch, m):
    monkeypatch.setattr(numba_gemm.gemm.precision, "SIMULATOR", False)
    gate = Problem(m, 64, 3072, b_contiguous=False, precision="bf16x6")
    named = heuristics.named("rows_in_registers", gate)
    assert named.stage is ROWS
    assert "B decomposed first" in named.reason
    assert (named.partition is not None) == ("divided among" in named.reason)
    for other in ({"a_contiguous": False}, {"n": 800}, {"precision": "bf16x9"}, {"k": 128}):
        assert ROWS not in {choice.stage for choice in heuristics.ranked(gate._replace(**other))}, other
    assert heuristics.ranked(gate._replace(aligned=False, vectors=False)) == heuristics.ranked(gate)
    found = heuristics.ranked(gate)
    assert {choice.stage for choice in found} == {ROWS, PERSISTENT}
    firsts = [next(one for one in found if one.stage is stage) for stage in (ROWS, PERSISTENT)]
    assert found[0] == min(firsts, key=lambda one: one.clocks)
    assert found[0] == heuristics.best(gate)
    assert m < 8192 or found[0].stage is ROWS


@pytest.mark.parametrize("n", [64, 512, 8192])
def test_choice_of_the_transpose(monkeypatch, n):
    """If A has few rows and B is stored along K, A is decomposed; never with an epilogue."""
    monkeypatch.setattr(numba_gemm.gemm.precision, "SIMULATOR", False)
    wanted = Problem(64, n, 3072, a_contiguous=False, precision="bf16x6")
    found, turned = heuristics.ranked(wanted), heuristics.ranked(wanted.swapped)
    assert [one for one in found if one.swapped] == [one._replace(swapped=True) for one in turned if one.stage is ROWS]
    assert all(one.swapped == (one.stage is ROWS) for one in found)
    assert found[0] == heuristics.best(wanted) == heuristics.choose(wanted)._replace(reason="")
    named = heuristics.named("rows_in_registers", wanted)
    assert named.swapped
    assert "computed as the transpose, A decomposed first" in named.reason
    for other in ({"epilogue": True}, {"m": 129}, {"b_contiguous": False}, {"precision": "bf16x9"}, {"k": 128}):
        assert ROWS not in {choice.stage for choice in heuristics.ranked(wanted._replace(**other))}, other
    as_is = heuristics.named("rows_in_registers", wanted._replace(epilogue=True))
    assert (as_is.stage, as_is.swapped) == (ROWS, False)
    assert n < 8192 or found[0].stage is ROWS


@given(
    st.tuples(*[st.integers(1, 1000) | st.integers(1, 20_000)] * 2, st.integers(1000, 20_000), st.integers(1, 9)),
    st.fixed_dictionaries({name: st.booleans() for name in ("a_vectors", "a_contiguous", "b_contiguous", "epilogue")}),
)
def test_the_best_choice_is_the_first(extents, properties):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(numba_gemm.gemm.precision, "SIMULATOR", False)
        wanted = Problem(*extents, **properties, precision="bf16x6")
        assert heuristics.best(wanted) == heuristics.ranked(wanted)[0]


def test_no_product_is_expected_sooner_than_a_can_be_read():
    for m, n, k in ((8192, 64, 3072), (100_000, 1, 1024), (1 << 20, 32, 2048)):
        wanted = Problem(m, n, k, precision="bf16x6", memory_bandwidth=5e11)
        bytes_seconds = 4 * m * k / wanted.memory_bandwidth
        assert min(choice.clocks for choice in heuristics.ranked(wanted, ROWS)) > bytes_seconds * wanted.clock_hz


# ------------------------------------------------------------------------------------------------------------ compiled


@pytest.mark.parametrize(
    ("index", "precision", "access"),
    [
        pytest.param(index, precision, access, marks=[pytest.mark.exhaustive] * (index > 0 or access != "along4"))
        for index in range(len(ROWS.configs))
        for precision in ("bf16x6", "bf16x6_stepwise", "bf16x3", "bf16x9")
        for access in ("along4", "across4", "across1", "any")
        if access.endswith("4") or precision.startswith("bf16x6")
    ],
)
def test_compiled_kernels_hold_the_rows_in_registers(index, precision, access):
    (row,) = offline(compiled_rows, f"rows_in_registers:{index}:{precision}:{access}")
    opcodes, parts = row["opcodes"], 3 if precision != "bf16x3" else 2
    products = {"bf16x3": 3, "bf16x9": 9}.get(precision, 6)
    assert (row["local"], row["spills"]) == (0, 0)
    assert "C75" not in row["log"], f"ptxas puts products one after the other: {row['log']}"
    assert row["taken"] == row["passed"], "a launch passes other parameters"
    assert opcodes["HGMMA"] == 2 * 4 * products, "two slots a turn"
    assert opcodes["LDS"] == 3 * (32 if access.startswith("across") else 16), "of the first slot, and of two in a turn"
    assert opcodes["UBLKCP"] == parts
    copies = row_parts.copies_at_once(access, ROWS.configs[index].BM)
    assert opcodes["LDGSTS"] == copies if access.endswith("4") else opcodes["LDGSTS"] >= 2 * copies
    assert opcodes.get("STS", 0) == 0
    assert opcodes.get("USETMAXREG", 0) == (2 if row["claim"] else 0)


# ------------------------------------------------------------------------------------------------------------ on a GPU

SHAPES = [(1, 1, 1), (64, 64, 64), (65, 63, 1100), (130, 70, 1025), (300, 200, 130), (513, 65, 3072), (8192, 320, 1100)]


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("index", "precision", "shares", "shape", "layout"),
    covering(range(len(ROWS.configs)), ROWS.precisions, (1, 3), SHAPES, ("NN", "NT", "TN", "TT", "PN")),
)
def test_products_have_the_bits_of_persistent(index, precision, shares, shape, layout):
    """Dense operands, rows of A that are whole vectors apart (P), and odd addresses, into a C within an array."""
    import torch

    from numba_gemm.runtime.device import synchronize
    from numba_gemm.runtime.launch import launch

    torch.manual_seed(shape[2])
    m, n, k = shape
    odd = int(layout == "NT")
    a = torch.randn(k, m, device="cuda").T if layout[0] == "T" else torch.randn(m, k + odd, device="cuda")[:, odd:]
    if layout[0] == "P":
        a = torch.full((m, k // 4 * 4 + 4), float("nan"), device="cuda")[:, :k].copy_(a)
    b = torch.randn(k, n, device="cuda") if layout[1] == "N" else torch.randn(n, k, device="cuda").T
    before = torch.randn(m, n, device="cuda")
    guarded = torch.full((m + 2, n + 3), float("nan"), device="cuda")
    c, expected = guarded[1:-1, 1:-2], before.clone()
    c.copy_(before)
    for stage, config, out in ((ROWS, ROWS.configs[index], c), (PERSISTENT, SMALL, expected)):
        torch.cuda.synchronize()
        x, y, z = map(tensor_matrix, (a, b, out))
        tiles = -(-m // config.BM) * -(-n // config.BN)
        partition = Partition(shares * tiles, 0) if shares > 1 else None
        launch(stage, config, 1.5, x, y, -0.5, z, precision=precision, partition=partition)
        synchronize()
    assert torch.equal(c, expected)
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    error = (c.double() - (1.5 * exact - 0.5 * before.double())).abs()
    allowed = (tensor_bound(precision, k) + 2.0**-22) * (1.5 * size + 0.5 * before.double().abs())
    assert bool((error <= allowed).all())
    c.fill_(float("nan"))
    assert torch.isnan(guarded).all(), "nothing beside C is written"


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("shares", [1, 5])
def test_special_values_on_a_gpu(shares):
    import torch

    from numba_gemm.runtime.launch import launch

    generator = np.random.default_rng(2)
    a, b = (generator.standard_normal(extents).astype(np.float32) for extents in ((150, 2000), (2000, 70)))
    a[3, 7], a[50, 1], b[9, 20], a[20, 1990], a[99] = INF, NAN, -INF, -INF, 3e38
    b[7, :30] = 0  # an infinity times zero
    with np.errstate(all="ignore"):
        expected = a.astype(np.float64) @ b
    special = ~np.isfinite(expected)
    config, x, y = ROWS.configs[0], torch.from_numpy(a).cuda(), torch.from_numpy(b).cuda()
    c = torch.zeros(150, 70, device="cuda")
    torch.cuda.synchronize()
    x, y, z = map(tensor_matrix, (x, y, c))
    partition = Partition(shares * 4, 0) if shares > 1 else None
    launch(ROWS, config, 1.0, x, y, 0.0, z, precision="bf16x6", partition=partition)
    torch.cuda.synchronize()
    found = c.cpu().numpy()
    np.testing.assert_array_equal(found[special], expected[special].astype(np.float32))
    ordinary = ~special & (np.arange(150) != 99)[:, None]
    with np.errstate(all="ignore"):
        size = np.abs(a.astype(np.float64)) @ np.abs(b)
    assert (np.abs(found[ordinary] - expected[ordinary]) <= tensor_bound("bf16x6", 2000) * size[ordinary]).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_batches_epilogues_and_prepared_operands():
    import torch

    def bias_relu(value, row, column, bias):
        return max(value + bias[column], 0.0)

    a, b = torch.randn(3, 200, 1500, device="cuda"), torch.randn(1500, 64, device="cuda")
    bias, options = torch.randn(64, device="cuda"), {"stage": "rows_in_registers", "precision": "bf16x6"}
    exact = a.double() @ b.double()
    allowed = (tensor_bound("bf16x6", 1500) + 2.0**-22) * (a.double().abs() @ b.double().abs() + bias.abs())
    found = numba_gemm.tiled_sgemm(a, b, epilogue=bias_relu, epilogue_args=(bias,), **options)
    assert bool(((found.double() - torch.relu(exact + bias)).abs() <= allowed).all())
    ready = numba_gemm.prepare(b, "bf16x6")
    assert explain(a[0], b, **options).launches == 2 + (explain(a[0], b, **options).split > 1)
    assert torch.equal(numba_gemm.tiled_sgemm(a[0], ready, **options), numba_gemm.tiled_sgemm(a[0], b, **options))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("shape", [(1, 65, 1030), (41, 515, 2049), (70, 3000, 1100)])
def test_the_transpose_on_a_gpu(shape):
    """Any A, B by columns that are whole vectors apart: with beta, special values, prepared operands, and plans."""
    import torch

    (m, n, k), options = shape, {"stage": "rows_in_registers", "precision": "bf16x6"}
    torch.manual_seed(k)
    b = torch.full((n, -(-k // 4) * 4), float("nan"), device="cuda")[:, :k].copy_(torch.randn(n, k)).T
    for a in (torch.randn(m, k, device="cuda"), torch.randn(k, m, device="cuda").T):
        assert explain(a, b, **options).swapped
        before = torch.randn(m, n, device="cuda")
        guarded = torch.full((m + 2, n + 3), float("nan"), device="cuda")
        c = guarded[1:-1, 1:-2]
        c.copy_(before)
        numba_gemm.tiled_sgemm(a, b, c, alpha=1.5, beta=-0.5, **options)
        exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
        error = (c.double() - (1.5 * exact - 0.5 * before.double())).abs()
        allowed = (tensor_bound("bf16x6", k) + 2.0**-22) * (1.5 * size + 0.5 * before.double().abs())
        assert bool((error <= allowed).all())
        c.fill_(float("nan"))
        assert torch.isnan(guarded).all(), "nothing beside C is written"
        found = numba_gemm.tiled_sgemm(a, b, **options)
        ready = [numba_gemm.prepare(one, "bf16x6", side=side) for one, side in ((a, "a"), (b, "b"))]
        for x, y in ((ready[0], b), (a, ready[1]), ready):
            assert torch.equal(numba_gemm.tiled_sgemm(x, y, **options), found)
    special = a.clone()
    special[0, 0], special[m // 2, k - 1] = INF, NAN
    result, expected = numba_gemm.tiled_sgemm(special, b, **options), special.double() @ b.double()
    numbers = torch.isfinite(expected)
    assert torch.equal(result[~numbers].nan_to_num(9.0), expected[~numbers].float().nan_to_num(9.0))
    assert torch.equal(result[numbers], found[numbers])
    planned = numba_gemm.plan(m, n, k // 4 * 4, layout="TT", **options)
    x, y = torch.randn(k // 4 * 4, m, device="cuda").T, torch.randn(n, k // 4 * 4, device="cuda").T
    assert torch.equal(planned(x, y), numba_gemm.tiled_sgemm(x, y, **options))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("a_batch", "b_batch"), [((3,), (3,)), ((3,), ()), ((), (3,)), ((2, 1), (1, 3))])
def test_batches_of_the_transpose(a_batch, b_batch):
    import torch

    a = torch.randn(*a_batch, 1100, 41, device="cuda").transpose(-1, -2)
    b = torch.randn(*b_batch, 200, 1100, device="cuda").transpose(-1, -2)
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    found = numba_gemm.tiled_sgemm(a, b, stage="rows_in_registers", precision="bf16x6")
    assert bool(((found.double() - exact).abs() <= tensor_bound("bf16x6", 1100) * size).all())
