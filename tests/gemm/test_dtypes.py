"""Operands of FP16 and BF16: converted to float32 by a launch before the product."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
from support import compile_conversion
from support.array_libraries import NumbaArray, Tensor, half_tensor, on_boundary
from support.halves import Bfloat16, to_bf16, widened
from support.offline import offline
from support.operands import check, filled

from numba_gemm import autotune, clear_autotuned, explain, plan, streamed_sgemm, tiled_sgemm
from numba_gemm.arrays.libraries import NumbaArrays
from numba_gemm.arrays.probe import Typed
from numba_gemm.device import half
from numba_gemm.gemm.explain import explain_shape
from numba_gemm.kernels import STAGES
from numba_gemm.kernels.conversion import conversion_bytes, with_conversion
from numba_gemm.kernels.product import Batch, Layout, Product, dense
from numba_gemm.kernels.stage import Gpu, Partition
from numba_gemm.kernels.step import MatrixAt, Slot
from numba_gemm.runtime import device as devices

DTYPES = ("float32", "float16", "bfloat16")


def of(dtype, x):
    """Return an operand of a dtype, in the order of x."""
    if dtype == "bfloat16":
        return Bfloat16(to_bf16(x))
    return x.astype(dtype)


LAYOUTS = {
    "rows": lambda dtype, x: of(dtype, x),
    "columns": lambda dtype, x: of(dtype, np.ascontiguousarray(x.T)).T,
    "reversed": lambda dtype, x: of(dtype, np.ascontiguousarray(x[::-1, ::-1]))[::-1, ::-1],
    "every other": lambda dtype, x: of(dtype, np.repeat(np.repeat(x, 2, axis=0), 2, axis=1))[::2, ::2],
    "off by one": lambda dtype, x: of(dtype, np.pad(x, ((0, 0), (1, 0)), constant_values=np.nan))[:, 1:],
}


@pytest.mark.simulator
@pytest.mark.parametrize("stage", ["auto", "naive"])
@pytest.mark.parametrize("dtypes", [pair for pair in itertools.product(DTYPES, DTYPES) if set(pair) != {"float32"}])
def test_product_of_dtypes(dtypes, stage):
    a, b = of(dtypes[0], filled(21, 13)), of(dtypes[1], filled(13, 18))
    result = tiled_sgemm(a, b, stage=stage)
    assert result.dtype == np.float32
    check(result, widened(a), widened(b))


@pytest.mark.simulator
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("shape", [(16, 16, 16), (9, 33, 10), (1, 7, 40), (20, 1, 1), (3, 5, 17)])
def test_layouts(dtype, layout, shape):
    m, n, k = shape
    a, b = LAYOUTS[layout](dtype, filled(m, k)), LAYOUTS[layout](dtype, filled(k, n))
    check(tiled_sgemm(a, b), widened(a), widened(b))


@pytest.mark.simulator
def test_scalars_out_and_c():
    a, b, c = filled(9, 12).astype(np.float16), filled(12, 10).astype(np.float16), filled(9, 10)
    out = c.copy()
    assert tiled_sgemm(a, b, out, alpha=2.0, beta=-0.5) is out
    check(out, widened(a), widened(b), alpha=2.0, beta=-0.5, c=c)
    check(tiled_sgemm(a, b, c=c, beta=3.0), widened(a), widened(b), beta=3.0, c=c)
    np.testing.assert_array_equal(tiled_sgemm(a[:, :0], b[:0], c=c, beta=2.0), 2 * c)


@pytest.mark.simulator
@pytest.mark.parametrize("stage", ["auto", "naive"])
@pytest.mark.parametrize("shapes", [((2, 3, 1), (3, 4)), ((3,), (1,)), ((2, 1, 2), (2, 1)), ((), (2,)), ((2,), ())])
def test_batches(shapes, stage):
    a_batch, b_batch = shapes
    generator = np.random.default_rng(3)
    a = generator.uniform(-1, 1, (*a_batch, 5, 9)).astype(np.float16)
    b = generator.uniform(-1, 1, (9, *b_batch, 6)).astype(np.float16)
    b = np.moveaxis(b, 0, -2)
    result = tiled_sgemm(a, b, stage=stage)
    wide_a, wide_b = np.broadcast_to(a, (*result.shape[:-2], 5, 9)), np.broadcast_to(b, (*result.shape[:-2], 9, 6))
    for index in np.ndindex(result.shape[:-2]):
        check(result[index], widened(wide_a[index]), widened(wide_b[index]))


@pytest.mark.simulator
def test_vectors_and_epilogue():
    a, b, bias = filled(1, 12).astype(np.float16)[0], filled(12, 10).astype(np.float16), filled(1, 10)[0]
    result = tiled_sgemm(a, b, epilogue=lambda value, row, col, bias: value + bias[col], epilogue_args=(bias,))
    check((result - bias)[None], widened(a)[None], widened(b))


@pytest.mark.simulator
@pytest.mark.parametrize("limit", ["MAX_K", "MAX_GRID_Y"])
def test_products_in_pieces(limit, monkeypatch):
    """Each piece converts its own part of the operands."""
    if limit == "MAX_K":
        monkeypatch.setattr("numba_gemm.kernels.stage.MAX_K", 5)
    else:
        monkeypatch.setattr("numba_gemm.kernels.ladder.stage.MAX_GRID_Y", 1)
    a, b = filled(70, 12).astype(np.float16), np.asfortranarray(filled(12, 40).astype(np.float16))
    check(tiled_sgemm(a, b, stage="naive"), widened(a), widened(b))


@pytest.mark.simulator
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_values_are_converted_exactly(dtype):
    """All 65,536 values: infinities, subnormals, both zeros and NaN."""
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    expected = widened(Bfloat16(bits) if dtype == "bfloat16" else bits.view(np.float16))
    read1, _ = half.reader(dtype)
    found = np.array([[read1(bits, row, col) for col in range(256)] for row in range(256)])
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))
    assert np.isnan(expected).any()
    assert np.isinf(expected).any()
    for special in (np.inf, -np.inf, np.nan):
        x = np.full((1, 1), special, np.float32)
        given = Bfloat16(to_bf16(x)) if dtype == "bfloat16" else x.astype(np.float16)
        np.testing.assert_array_equal(tiled_sgemm(given, np.ones((1, 1), np.float32)), x)


@pytest.mark.simulator
def test_one_warp_takes_halves():
    a, b = filled(16, 16).astype(np.float16), filled(16, 8).astype(np.float16)
    wide = tiled_sgemm(widened(a), widened(b), stage="one_warp", precision="bf16")
    np.testing.assert_array_equal(tiled_sgemm(a, b, stage="one_warp", precision="bf16"), wide)


@pytest.mark.simulator
def test_plan_and_explain():
    a, b = filled(40, 24).astype(np.float16), filled(24, 36).astype(np.float16)
    multiply = plan(40, 36, 24, dtype="float16")
    assert multiply.dtypes == ("float16", "float16")
    assert multiply.workspace_bytes >= 4 * (a.size + b.size) > plan(40, 36, 24).workspace_bytes
    check(multiply(a, b), widened(a), widened(b))
    check(plan(40, 36, 24, layout="NT")(a, b), widened(a), widened(b))
    told, mixed = explain(a, b), explain_shape(40, 36, 24, dtype=("float32", "bfloat16"), cc=(9, 0))
    assert (told.launches, told.dtypes, told.workspace_bytes) == (2, ("float16", "float16"), multiply.workspace_bytes)
    assert "The first launch converts A from float16 and B from float16 to float32. There are 2 launches." in str(told)
    assert "The first launch converts B from bfloat16 to float32." in str(mixed)
    plain = explain(widened(a), widened(b))
    assert (plain.launches, plain.stage, plain.config) == (1, told.stage, told.config)
    assert plain.microseconds < told.microseconds
    assert "converts" not in str(plain)
    for wrong in ("float64", ("float16", "int8")):
        with pytest.raises(ValueError, match=r"dtype is .*; expected one of float32, float16, bfloat16"):
            plan(4, 4, 4, dtype=wrong)


@pytest.mark.simulator
def test_autotune_measures_halves(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_GEMM_CACHE_DIR", str(tmp_path))
    a, b = filled(8, 12).astype(np.float16), Bfloat16(to_bf16(filled(12, 8)))
    try:
        found = autotune(a, b, candidates=2)
        assert found.candidates
        check(tiled_sgemm(a, b), widened(a), widened(b))
    finally:
        clear_autotuned()


HALF, WIDE = filled(4, 4).astype(np.float16), filled(4, 4)
REFUSED = {
    "out": (lambda: tiled_sgemm(HALF, HALF, HALF.copy()), "out has dtype float16; expected float32, and nothing is"),
    "c": (lambda: tiled_sgemm(HALF, HALF, c=HALF, beta=1.0), "c has dtype float16; expected float32, and nothing is"),
    "float64": (
        lambda: tiled_sgemm(HALF, WIDE.astype(float)),
        "b has dtype float64; expected float32 or float16 or",
    ),
    "streamed": (lambda: streamed_sgemm(HALF, WIDE), "a has dtype float16; expected float32; pass a.astype"),
    "uint16": (lambda: tiled_sgemm(WIDE.astype(np.uint16), HALF), "a has dtype uint16; expected float32 or float16 or"),
    "byte order": (lambda: tiled_sgemm(HALF.astype(">f2"), HALF), "a has dtype >f2; expected float32 or float16 or bf"),
}


@pytest.mark.simulator
@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, words = REFUSED[case]
    with pytest.raises(TypeError, match=words):
        call()


# ---------------------------------------------------------------------------------------------------------- launches


def region(argument):
    """Return the bytes of the scratch memory that a matrix argument covers."""
    low, high = argument.layout.span
    return argument.place.offset + low, argument.place.offset + high


SQUARE = {order: {dtype: dense(order, 96, 96, dtype) for dtype in DTYPES} for order in "NT"}
GPU = Gpu((9, 0), 132)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("dtypes", [("float16", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("precision", ["ieee", "bf16x6", "fp16x3", "tf32"])
def test_launches_read_the_copies(precision, dtypes, swapped):
    """No launch but the first reads an operand that is converted, and no two parts of the scratch memory overlap."""
    stage = STAGES["stream_k" if precision == "ieee" else "persistent"]
    batch = Batch((1, 1, 3), (0, 0, 2 * 96 * 96), (0, 0, 0), (0, 0, 4 * 96 * 96))
    product = Product(SQUARE["N"][dtypes[0]], SQUARE["T"][dtypes[1]], SQUARE["N"]["float32"], batch)
    product = product.transposed if swapped else product
    partition = Partition(1, 0) if stage.takes_partition else None
    plain = stage.launches(stage.configs[0], product.converted, precision, partition, GPU)
    made = stage.launches(stage.configs[0], product, precision, partition, GPU)
    assert len(made.steps) == len(plain.steps) + 1
    converting, *others = made.steps
    assert [step.kernel for step in others] == [step.kernel for step in plain.steps]
    dtypes = dtypes[::-1] if swapped else dtypes
    converted = {slot for slot, dtype in zip((Slot.A, Slot.B), dtypes, strict=True) if dtype != "float32"}
    read = {one.place.slot for step in others for one in step.arguments if isinstance(one, MatrixAt)}
    assert not read & converted
    copies = {one for one in converting.arguments if isinstance(one, MatrixAt) and one.place.slot == Slot.SCRATCH}
    assert len(copies) == len(converted)
    for one in copies:
        low, high = region(one)
        assert plain.scratch_bytes <= low < high <= made.scratch_bytes
        assert low % 16 == 0 == one.layout.row_stride % 16
    for one, other in itertools.combinations(sorted(region(one) for one in copies), 2):
        assert one[1] <= other[0]


def test_float32_operands_have_no_conversion():
    product = Product(SQUARE["N"]["float32"], SQUARE["T"]["float32"], SQUARE["N"]["float32"])
    assert product.converted is product
    assert conversion_bytes(product, product) == 0
    launches = STAGES["naive"].launches(STAGES["naive"].configs[0], product, "ieee", None, GPU)
    assert with_conversion(launches, product, product) is launches


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(3, 5, 10, 2, 2, "float16"), Layout(3, 5, 32, 4)),
        (Layout(3, 5, 2, 6, 0, "float16"), Layout(3, 5, 4, 16)),
        (Layout(5, 1, 20, 2, 0, "float16"), Layout(5, 1, 4, 32)),
        (Layout(3, 5, 0, 2, 0, "bfloat16"), Layout(3, 5, 32, 4)),
        (Layout(3, 5, -2, 60, 0, "bfloat16"), Layout(3, 5, 4, 16)),
        (Layout(3, 0, 10, 2, 2, "bfloat16"), Layout(3, 0, 10, 2, 2)),
    ],
)
def test_copies_are_dense_and_in_the_same_order(layout, expected):
    assert layout.converted == expected
    assert expected.converted is expected


# ------------------------------------------------------------------------------------------- repeated calls, on a GPU


def test_repeated_calls_take_the_fast_path(torch, gpu, checked):
    for turn in range(3):
        a, b = half_tensor(filled(4, 12, turn)), half_tensor(filled(12, 8, turn))
        for given in (None, Tensor(on_boundary(np.zeros((4, 8), np.float32)))):
            result = tiled_sgemm(a, b, given)
            assert result.dtype == "float32"
            check(result.x, widened(a.x), widened(b.x))
    assert len(checked) == 2
    first, second = (one.kernel.split("_")[0] for one in gpu.launches[:2])
    assert first == "convert" != second
    wide = Tensor(on_boundary(widened(a.x)))
    check(tiled_sgemm(wide, b).x, wide.x, widened(b.x))
    assert len(checked) == 3, "another dtype is another call"


def test_repeated_calls_of_a_plan(torch, gpu, checked):
    multiply = plan(4, 8, 12, dtype="float16")
    for turn in range(4):
        a, b = half_tensor(filled(4, 12, turn)), half_tensor(filled(12, 8, turn))
        out = Tensor(on_boundary(np.zeros((4, 8), np.float32)))
        multiply(a, b, out)
        check(out.x, widened(a.x), widened(b.x))
    assert len(checked) == 1
    wide_a, wide_b = Tensor(on_boundary(widened(a.x))), Tensor(on_boundary(widened(b.x)))
    check(multiply(wide_a, wide_b, out).x, wide_a.x, wide_b.x)


def test_overlap_of_a_repeated_call_counts_bytes(torch, gpu, checked):
    """Behind the last element of A there is room for C: half as far as for float32."""
    memory = np.zeros(64 + 64, np.float32)
    memory = memory[-(memory.ctypes.data // 4) % 4 :]
    a = Tensor(memory[:24].view(np.float16).reshape(4, 12))
    a.x[...] = filled(4, 12)
    b, behind = half_tensor(filled(12, 8)), Tensor(memory[24:56].reshape(4, 8))
    for _ in range(3):
        check(tiled_sgemm(a, b, behind).x, widened(a.x), widened(b.x))
    assert len(checked) == 1
    with pytest.raises(ValueError, match="out shares memory with a"):
        tiled_sgemm(a, b, Tensor(memory[20:52].reshape(4, 8)))


def test_numba_arrays_have_keys_of_their_dtypes(no_calls, monkeypatch):
    monkeypatch.setattr("numba_gemm.arrays.libraries.device_count", lambda: 1)
    halves, wide = (NumbaArray(np.zeros((4, 4), dtype)) for dtype in (np.float16, np.float32))
    read = NumbaArrays().probe(wide).read
    tags = [read("tag", a, b, None)[0][0] for a, b in itertools.product((halves, wide), repeat=2)]
    wanted = [
        Typed("tag", "float16", "float16"),
        Typed("tag", "float16", "float32"),
        Typed("tag", "float32", "float16"),
    ]
    assert tags == [*wanted, "tag"]
    assert read("tag", NumbaArray(np.zeros((4, 4))), wide, None) is None
    assert read("tag", halves, halves, halves) is None


def test_launches_with_copies_and_counters_share_the_streams_counters(torch, gpu, checked):
    """A product whose tiles are shared by blocks: the counters are zeroed memory, apart from the leased scratch."""
    stage, config = STAGES["stream_k"], STAGES["stream_k"].configs[1]
    product = Product(dense("N", 64, 512, "float16"), dense("N", 512, 64, "float16"), dense("N", 64, 64))
    gpu.computes = False
    bound = devices.get_device(0).bind(stage, config, product, partition=Partition(3, 0))
    assert bound.launches.counters
    for _ in range(2):
        with gpu.recording() as made:
            bound.enqueue(1.0, 4096, 8192, 0.0, 1 << 20, 40)
        converting, multiplying = made
        partition = multiplying.partition
        assert converting.a[0] == 4096
        assert multiplying.a[0] == converting.a_copy[0]
        counters = (ctypes.c_int32 * bound.launches.counters).from_address(partition.counters)
        assert not any(counters)
        assert not partition.partials <= partition.counters < partition.partials + bound.launches.scratch_bytes


# ------------------------------------------------------------------------------------------------------ compiled code


@pytest.mark.parametrize("dtypes", [("float16", "float16"), ("bfloat16", "bfloat16"), ("float16", "bfloat16")])
def test_compiled_conversion(dtypes):
    """The kernel keeps its values in registers, names global memory, and moves 128 bits at a time where it can."""
    found = offline(compile_conversion.result, *dtypes)
    assert found["local"] == found["spills"] == 0
    assert found["generic"] == []
    assert found["vectors"] >= 2
    assert found["registers"] <= 64


@pytest.mark.simulator
def test_vector_reads_are_aligned():
    read1, read8 = half.reader("float16")
    memory = np.arange(64, dtype=np.float16).view(np.uint16)
    start = -(memory.ctypes.data // 2) % 8
    row = memory[start : start + 24].reshape(1, 24)
    assert read8(row, 0, 8) == tuple(read1(row, 0, i) for i in range(8, 16))
    with pytest.raises(ValueError, match="128-bit access"):
        read8(row, 0, 9)
