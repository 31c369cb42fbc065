"""Prepared operands: what is launched for them and for products with them, what is refused, and their parts."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from support.array_libraries import NumbaArray, Tensor, changed, half_tensor, on_boundary
from support.operands import filled, layout_of

from numba_gemm import explain, plan, prepare, tiled_sgemm
from numba_gemm.gemm import product as products
from numba_gemm.kernels.ladder.stage import FEW_TERMS
from numba_gemm.kernels.product import Batch, Product, dense
from numba_gemm.kernels.stage import Gpu
from numba_gemm.kernels.step import MatrixAt, Slot
from numba_gemm.kernels.tensor_core import SHORT_SUMS, TENSOR_PRECISIONS, TENSOR_STAGES, decomposition
from numba_gemm.kernels.tensor_core.config import MARKED_WORDS, PREPARED_TILES, ROW_WORDS
from numba_gemm.kernels.tensor_core.decomposition import (
    decomposition_of,
    preparation,
    prepared_parts,
    preparing_kernels,
)
from numba_gemm.kernels.tensor_core.stage import precision_for
from numba_gemm.runtime.launch import _Place, _simulated, product_of
from numba_gemm.runtime.matrix import Matrix, Vector
from numba_gemm.simulator.switch import SIMULATOR

PRECISIONS = ("bf16x3", "bf16x6", "bf16x9", "fp16x3", "tf32x3", "bf16")
PERSISTENT = TENSOR_STAGES["persistent"]
GPU = Gpu((9, 0), 132)


@pytest.fixture(autouse=True)
def only_recorded(gpu):
    gpu.computes = False


@pytest.fixture
def full_checks(monkeypatch):
    """The products that were checked in full."""
    calls, check = [], products.checked

    def count(*arguments, **options):
        calls.append(arguments)
        return check(*arguments, **options)

    monkeypatch.setattr(products, "checked", count)
    return calls


def tensor(*shape, seed=0):
    x = np.random.default_rng([seed, *shape]).uniform(-1, 1, shape).astype(np.float32)
    return Tensor(on_boundary(x))


def turned(x):
    """Return the transpose of a tensor, which shares its memory."""
    view = Tensor(x.x.T)
    view.address = x.address
    return view


def names(launches):
    return [did.kernel for did in launches]


def shift(value, row, col, bias):
    return value + bias[col]


# ------------------------------------------------------------------------------------------------------------- launches


@pytest.mark.parametrize("sides", ["b", "a", "ab"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("extents", [(800, 800, 1024), (300, 600, 9002)], ids=["whole", "divided"])
def test_a_prepared_operand_is_not_decomposed_again(torch, gpu, full_checks, extents, precision, sides):
    m, n, k = extents
    a, b = tensor(m, k), turned(tensor(n, k))
    with gpu.recording() as usual:
        tiled_sgemm(a, b, precision=precision)
    with gpu.recording() as first:
        kept = {side: prepare(x, precision, side=side) for side, x in (("a", a), ("b", b)) if side in sides}
    decompose, maxima = preparing_kernels(precision_for(precision, k), False)
    scaled = precision == "fp16x3"
    assert names(first) == [*[maxima.name] * scaled, decompose.name] * len(kept)
    assert {did.a[0] for did in first} == {one.array.data_ptr() for one in kept.values()}
    # In the product's own decomposition, the blocks of the other operand alone are left; all else is as usual.
    full_checks.clear()
    with gpu.recording() as made:
        tiled_sgemm(kept.get("a", a), kept.get("b", b))
    count = 1 + scaled
    if sides == "ab":
        assert names(made) == names(usual)[count:]
    else:
        assert names(made) == names(usual)
        other = b if sides == "a" else a
        for did, whole in zip(made[:count], usual[:count], strict=True):
            assert did.a[0] == did.b[0] == other.data_ptr()
            rows = n if sides == "a" else m
            assert did.a[1:3] == did.b[1:3] == [rows, k]
            parts = did.a_maxima if did.kernel == "row_maxima" else did.a_parts
            words = parts[1] // TENSOR_PRECISIONS[precision].parts * (parts[2] // (32 * 32))
            assert did.grid[0] == (parts[1] * parts[2] // 32 if did.kernel == "row_maxima" else words) < whole.grid[0]
    multiplies, expected = made[-1 - (k > 1024)], usual[-1 - (k > 1024)]
    assert (multiplies.kernel, multiplies.grid) == (expected.kernel, expected.grid)
    assert (multiplies.x, multiplies.y) == (expected.x, expected.y)
    assert [did.overlaps for did in made] == [False, *[True] * (len(made) - 1)]
    for did in made[count if sides != "ab" else 0 :]:
        for side, one in kept.items():
            words = did.arguments[f"{side}_parts" if "add_partials" in did.kernel else side]
            assert words[0] == one.parts.data_ptr()
            assert words[1] * words[2] * 4 == one.nbytes
    # A second one, elsewhere, launches the same at its own addresses, on the fast path.
    assert len(full_checks) == 1
    others = {
        side: prepare(tensor(*one.shape, seed=1) if side == "a" else turned(tensor(n, k, seed=1)), precision, side=side)
        for side, one in kept.items()
    }
    with gpu.recording() as repeated:
        tiled_sgemm(others.get("a", a), others.get("b", b), precision=precision)
    assert len(full_checks) == 1, "the second call was checked in full"
    assert [(did.handle, did.grid) for did in repeated] == [(did.handle, did.grid) for did in made]
    again = repeated[-1 - (k > 1024)]
    for side, one in others.items():
        assert again.arguments[side][0] == one.parts.data_ptr()
        assert again.arguments["x" if side == "a" else "y"][0] == one.array.data_ptr()


def test_operands_of_other_products(torch, gpu):
    """A batch of A, 16 bits of A, an epilogue with a vector: parts come last, behind other vectors."""
    weights = prepare(tensor(96, 128), "bf16")
    place, bias = weights.parts.data_ptr(), Tensor(on_boundary(filled(1, 128)[0]))
    halves = half_tensor(filled(48, 96))
    cases = (
        (tensor(5, 48, 96), {}),
        (tensor(5, 48, 96), {"epilogue": shift, "epilogue_args": (bias,)}),
        (halves, {}),
    )
    for a, options in cases:
        for _ in range(2):  # checked in full, and repeated
            with gpu.recording() as made:
                tiled_sgemm(a, weights, **options)
            *_, decomposes, multiplies = made
            assert decomposes.a == decomposes.b
            assert multiplies.b[0] == place
            assert multiplies.y[0] == weights.array.data_ptr()
            if options:
                assert multiplies.vector0[4] == bias.data_ptr()
                assert multiplies.grid[1] == 5
                assert decomposes.grid[1] == 5
    assert names(made[:-2]) == ["convert_float16_float16"]


def test_scratch_memory_is_that_of_the_other_operand(torch):
    product = plan(300, 200, 500, precision="bf16")
    a, b = tensor(300, 500), tensor(500, 200)
    usual, told = explain(a, b, precision="bf16"), explain(a, prepare(b, "bf16"))
    assert (usual.a_access, usual.b_access) == ("decomposed", "decomposed")
    assert (told.a_access, told.b_access) == ("decomposed", "prepared")
    assert told.workspace_bytes < usual.workspace_bytes == product.workspace_bytes
    assert told.microseconds < usual.microseconds
    assert (told.stage, told.config, told.split, told.precision) == (usual.stage, usual.config, usual.split, "bf16")
    both = explain(prepare(a, "bf16", side="a"), prepare(b, "bf16"))
    assert (both.workspace_bytes, both.launches, both.a_access) == (0, 1, "prepared")
    assert both.microseconds < told.microseconds
    assert "chosen among the kernels of bf16 as if A and B were not prepared" in both.reason
    saved = float(re.fullmatch(r".*; prepared operands save ([\d.]+) us", both.reason)[1])
    assert saved == pytest.approx(usual.microseconds - both.microseconds, abs=0.051)


def test_plan(torch, gpu):
    product, weights = plan(64, 128, 96, precision="bf16"), prepare(tensor(96, 128), "bf16")
    for _ in range(3):
        with gpu.recording() as made:
            product(tensor(64, 96), weights, tensor(64, 128))
        assert made[-1].b[0] == weights.parts.data_ptr()
        assert (made[-1].grid, made[-1].block) == (product.grid, product.block)
    with pytest.raises(ValueError, match=r"precision is 'bf16x6' and b was prepared for 'bf16'.*prepare\(array"):
        plan(64, 128, 96, precision="bf16x6")(tensor(64, 96), weights)


@pytest.mark.parametrize("precision", ["bf16", "bf16x3", "fp16x3", "tf32x3"])
@pytest.mark.parametrize("vectors", [0, 1])
def test_plans_in_another_precision_do_not_read_parts(torch, gpu, precision, vectors):
    """A plan is made before it is known whether its operands are prepared; bf16x6 has parts of its own."""
    b, bias = turned(tensor(33, 2072)), Tensor(on_boundary(filled(1, 33)[0]))
    a, c, weights = tensor(15498, 2072), tensor(15498, 33), prepare(b, precision)
    options = {"epilogue_args": (bias,)} if vectors else {}
    product = plan(15498, 33, 2072, precision=precision, layout="NT", epilogue=shift if vectors else None)
    assert (product.stage, product.precision) == ("rows_in_registers", precision)
    with gpu.recording() as usual:
        product(a, b, c, **options)
    with gpu.recording() as made:
        product(a, weights, c, **options)
    with gpu.recording() as again:
        product(a, weights, c, **options)
    assert again == made
    assert names(made) == names(usual)
    assert names(made)[0] == "decompose_bf16x6"
    assert made[0].b[0] == b.data_ptr()
    assert made[-1].arguments.keys() == usual[-1].arguments.keys()
    assert not vectors or made[-1].vector0 == usual[-1].vector0
    parts = {did.b_parts[0] for did in made if "b_parts" in did.arguments}
    assert weights.parts.data_ptr() not in {*parts, *(did.b[0] for did in made)}


@pytest.mark.parametrize("vectors", [0, 1])
def test_parts_that_are_not_read(torch, gpu, vectors):
    """Small products are decomposed where they are multiplied, prepared or not: the bits are the same."""
    a, b = tensor(64, 200), tensor(200, 128)
    weights, bias = prepare(b, "bf16x6"), Tensor(on_boundary(filled(1, 128)[0]))
    options = {"epilogue": shift, "epilogue_args": (bias,)} if vectors else {}
    with gpu.recording() as made:
        tiled_sgemm(a, b, precision="bf16x6", **options)
        tiled_sgemm(a, weights, **options)
    usual, did = made
    assert (usual.kernel, usual.a, usual.b) == (did.kernel, did.a, did.b)
    assert not vectors or usual.vector0 == did.vector0
    assert usual.kernel.startswith("fused_decomposition_bf16x6")
    told = explain(a, weights)
    assert (told.stage, told.launches, told.workspace_bytes) == ("fused_decomposition", 1, 0)
    assert told.microseconds == explain(a, b, precision="bf16x6").microseconds


@pytest.mark.parametrize(
    ("extents", "vectors"),
    [
        ((1, 6000, 2000), 0),  # as the transpose, which an epilogue rules out
        *itertools.product([(6000, 1, 2000), (500, 600, 20), (500, 600, 3)], [0, 1]),
    ],
)
def test_parts_that_float32_multiply_adds_do_not_read(torch, gpu, extents, vectors):
    m, n, k = extents
    a, b, bias = tensor(m, k), tensor(k, n), Tensor(on_boundary(filled(1, m)[0]))
    options = {"epilogue": shift, "epilogue_args": (bias,)} if vectors else {}
    kept_a, kept_b = prepare(a, "bf16x6", side="a"), prepare(b, "bf16x6")
    with gpu.recording() as made:
        for operands in ((a, b), (kept_a, kept_b), (kept_a, b), (a, kept_b), (kept_a, kept_b)):
            tiled_sgemm(*operands, precision="bf16x6", **options)
    assert len(made) == 5
    for did in made:
        assert did.kernel.startswith("thin" if k > 100 else "stream_k" if k > 8 else "short_sums")
        # An equal epilogue of another name may have been compiled before.
        assert (("_compensated_shift" if vectors else "_compensated") in did.kernel) == (k > FEW_TERMS)
        assert (did.kernel, did.a, did.b, did.grid) == (made[0].kernel, made[0].a, made[0].b, made[0].grid)
        assert not vectors or did.vector0[4] == bias.data_ptr()


@pytest.mark.parametrize("sides", ["b", "a", "ab"])
@pytest.mark.parametrize("vectors", [0, 1])
def test_parts_of_a_are_not_read_by_rows_in_registers(torch, gpu, sides, vectors):
    a, b = tensor(64, 9000), turned(tensor(64, 9000))
    kept = {side: prepare(x, "bf16x6", side=side) for side, x in (("a", a), ("b", b)) if side in sides}
    bias = Tensor(on_boundary(filled(1, 64)[0]))
    options = {"epilogue": shift, "epilogue_args": (bias,)} if vectors else {}
    with gpu.recording() as usual:
        tiled_sgemm(a, b, precision="bf16x6", **options)
    with gpu.recording() as made:
        for _ in range(2):  # checked in full, and repeated
            tiled_sgemm(kept.get("a", a), kept.get("b", b), **options)
    assert usual[-2].kernel.startswith("rows_in_registers_bf16x6")
    if "b" not in sides:
        assert names(made) == 2 * names(usual)
    else:
        assert names(made) == 2 * names(usual[1:])
        assert {did.b[0] for did in made if did.kernel == usual[-2].kernel} == {kept["b"].parts.data_ptr()}
    for did in made[len(made) // 2 - 1 :: len(made) // 2]:
        assert not vectors or did.vector0[4] == bias.data_ptr()


@pytest.mark.parametrize("sides", ["a", "b", "ab"])
@pytest.mark.parametrize("transposed", [False, True])
def test_time_that_parts_save_rows_in_registers(torch, gpu, sides, transposed):
    """Only one operand is decomposed, so only its parts save time."""
    a, b = (tensor(64, 9000), turned(tensor(3000, 9000))) if transposed else (tensor(3000, 9000), tensor(9000, 64))
    kept = {side: prepare(x, "bf16x6", side=side) for side, x in (("a", a), ("b", b)) if side in sides}
    usual = explain(a, b, precision="bf16x6")
    told = explain(kept.get("a", a), kept.get("b", b))
    assert (usual.stage, usual.swapped) == (told.stage, told.swapped) == ("rows_in_registers", transposed)
    decomposed = "a" if transposed else "b"
    assert told.microseconds > 0
    assert (told.microseconds < usual.microseconds) == (decomposed in sides)
    assert (told.microseconds == usual.microseconds) == (decomposed not in sides)


def test_fp32_auto_uses_parts_where_it_stands_for_their_precision(torch, gpu, full_checks):
    weights = prepare(tensor(512, 4096), "fp32_auto")
    assert weights.nbytes > 0
    large, small = tensor(4096, 512), tensor(1, 512)
    for _ in range(2):
        with gpu.recording() as made:
            tiled_sgemm(large, weights)
            tiled_sgemm(small, weights)
        assert names(made)[0] == "decompose_bf16x6"
        assert made[1].b[0] == weights.parts.data_ptr()
        assert "x" not in made[2].arguments
        assert weights.array.data_ptr() in (made[2].a[0], made[2].b[0]), "itself, or as A of the transposed product"
    assert len(full_checks) == 2
    assert prepare(tensor(127, 4096), "fp32_auto").nbytes == 0, "always ieee: its sums are short"


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_precisions_without_parts_take_the_operand_itself(torch, gpu, precision):
    a, b = tensor(64, 96), tensor(96, 128)
    with gpu.recording() as made:
        weights = prepare(b, precision)
    assert (weights.nbytes, weights.parts, made) == (0, None, [])
    b.version += 1
    for _ in range(2):
        with gpu.recording() as made:
            tiled_sgemm(a, weights)
        with gpu.recording() as usual:
            tiled_sgemm(a, b, precision=precision)
        assert names(made) == names(usual)


def test_stages_without_parts_and_sums_without_terms(torch, gpu):
    a, weights = tensor(64, 96), prepare(tensor(96, 128), "bf16x6")
    for stage in ("fresh_sums", "warp_mma"):
        with gpu.recording() as made:
            tiled_sgemm(a, weights, stage=stage)
        assert (made[-1].b[0] == weights.parts.data_ptr()) == (stage == "warp_mma")
    with gpu.recording() as made:
        tiled_sgemm(a, weights, tensor(64, 128), alpha=0.0, beta=1.0)
    assert [one for one in names(made) if "decompose" in one or "persistent" in one] == []
    empty = prepare(tensor(0, 8), "bf16x6")
    assert empty.nbytes == 0
    assert tiled_sgemm(tensor(64, 0), empty).shape == (64, 8)


# ------------------------------------------------------------------------------------------------------ changes, errors


def test_a_changed_operand_is_refused_until_it_is_updated(torch, gpu):
    a, b = tensor(64, 96), tensor(96, 128)
    weights = prepare(b, "fp16x3")
    out, place = tensor(64, 128), weights.parts.data_ptr()
    tiled_sgemm(a, weights, out)
    b.version += 1  # as an optimizer's step does, in place
    with pytest.raises(ValueError, match=r"b has changed since it was prepared.*call update\(\)"):
        tiled_sgemm(a, weights, out)
    torch.current.cuda_stream = 77
    with gpu.recording() as made:
        weights.update()
    assert names(made) == ["row_maxima", "decompose_fp16x3"]
    assert {did.stream for did in made} == {77}
    assert made[-1].a_parts[0] == weights.parts.data_ptr() == place
    tiled_sgemm(a, weights, out)
    b.x = on_boundary(filled(96, 128, 3))
    b.address = b.x.ctypes.data  # other memory, as by an assignment to `data`
    with pytest.raises(ValueError, match="b has changed"):
        tiled_sgemm(a, weights, out)
    with gpu.recording() as made:
        weights.update()
    assert made[0].a[0] == b.address
    b.x = on_boundary(filled(96, 64))
    b.address = b.x.ctypes.data
    with pytest.raises(ValueError, match=r"shape \(96, 64\).*was prepared with shape \(96, 128\).*prepare it again"):
        weights.update()


REFUSED = {
    "of 16 bits": (lambda: prepare(half_tensor(filled(8, 8)), "bf16x6"), TypeError, "dtype float16; expected float32"),
    "a batch": (lambda: prepare(tensor(2, 8, 8), "bf16x6"), ValueError, "3 dimensions.*each matrix of a batch"),
    "a side": (lambda: prepare(tensor(8, 8), "bf16x6", side="c"), ValueError, "side is 'c'; expected 'a' or 'b'"),
    "a precision": (lambda: prepare(tensor(8, 8), "bf16x7"), ValueError, "precision is 'bf16x7'"),
    "no array": (lambda: prepare(3, "bf16x6"), TypeError, "array is of type int"),
    "the other side": (
        lambda: tiled_sgemm(prepare(tensor(8, 8), "bf16x6"), tensor(8, 8)),
        ValueError,
        "a was prepared as b.*side='a'",
    ),
    "the other precision": (
        lambda: tiled_sgemm(tensor(8, 8), prepare(tensor(8, 8), "bf16x6"), precision="ieee"),
        ValueError,
        "precision is 'ieee' and b was prepared for 'bf16x6'.*ask for 'bf16x6'",
    ),
    "two precisions": (
        lambda: tiled_sgemm(prepare(tensor(8, 8), "bf16x9", side="a"), prepare(tensor(8, 8), "bf16x6")),
        ValueError,
        "a was prepared for 'bf16x9' and b for 'bf16x6'.*prepare one of them again",
    ),
    "two precisions, one of them named": (
        lambda: tiled_sgemm(
            prepare(tensor(8, 8), "bf16x9", side="a"), prepare(tensor(8, 8), "bf16x6"), precision="bf16x6"
        ),
        ValueError,
        "a was prepared for 'bf16x9' and b for 'bf16x6'.*prepare one of them again",
    ),
    "a number, fp32_auto": (
        lambda: tiled_sgemm(1.0, prepare(tensor(512, 4096), "fp32_auto")),
        TypeError,
        "a is of type",
    ),
    "no stage": (
        lambda: tiled_sgemm(tensor(8, 8), prepare(tensor(8, 8), "bf16x6"), stage=["x"]),
        TypeError,
        "stage is of type list; expected a str",
    ),
    "no name": (lambda: tiled_sgemm(tensor(8, 8), tensor(8, 8), precision=""), ValueError, "precision is ''"),
    "off the boundaries": (
        lambda: prepare(changed(tensor(8, 8), address=1 << 20 | 2), "bf16x6"),
        ValueError,
        "array has elements off the 4-byte boundaries",
    ),
    "a shape": (
        lambda: tiled_sgemm(tensor(8, 9), prepare(tensor(8, 8), "bf16x6")),
        ValueError,
        r"a has shape \(8, 9\) and b has shape \(8, 8\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(torch, case):
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("precision", ["ieee", "tf32", "fp32_auto"])
def test_products_of_other_extents(torch, gpu, full_checks, precision):
    """Products that use no parts are calls like others: a new shape needs no full check."""
    weights = prepare(tensor(512, 512), precision)
    for m in (64, 80, 96):
        tiled_sgemm(tensor(m, 512), weights)
    assert len(full_checks) == 1


def test_fp32_auto_goes_with_the_precision_that_it_stands_for(torch, gpu):
    of = {name: prepare(tensor(512, 512), name, side=side) for name, side in (("fp32_auto", "a"), ("bf16x6", "b"))}
    with gpu.recording() as made:
        tiled_sgemm(of["fp32_auto"], of["bf16x6"])
    assert not any(name.startswith("decompose") for name in names(made))


def test_arrays_in_host_memory_have_no_parts(gpu):
    with pytest.raises(TypeError, match=r"array is a NumPy array, which each product copies.*cuda.to_device\(array\)"):
        prepare(filled(96, 128), "bf16x6")


def test_parts_belong_to_the_stream_of_numba_arrays(others, gpu, monkeypatch):
    """Products on another stream wait for the stream of the operand; its parts have the same."""
    made = []

    def empty(kind, shape, device, stream):
        made.append(stream.handle)
        return kind.describe("out", NumbaArray(on_boundary(np.zeros(shape, np.float32)), 30), stream)

    from numba_gemm.arrays.libraries import NumbaArrays

    monkeypatch.setattr(NumbaArrays, "empty", empty)
    with gpu.recording() as launched:
        weights = prepare(NumbaArray(on_boundary(filled(96, 128)), 30), "bf16x6")
    assert made == [30]
    assert launched[0].stream == 30
    assert weights.parts.stream == 30


# ---------------------------------------------------------------------------------------------------------------- parts


def test_parts_suit_all_tiles():
    """Prepared parts have at least as many rows as any configuration's tiles need, and as many slots."""
    complete = [stage for stage in TENSOR_STAGES.values() if getattr(stage, "complete", False)]
    assert {extent for stage in complete for config in stage.configs for extent in (config.BM, config.BN)} <= set(
        PREPARED_TILES
    )
    for mn in (1, 64, 65, 97, 193, 200, 1000):
        words = prepared_parts(TENSOR_PRECISIONS["bf16x6"], mn, 100).cols
        assert all(words >= MARKED_WORDS * tile * -(-mn // tile) for tile in PREPARED_TILES)


def test_short_sums_have_the_same_parts():
    for name, short in SHORT_SUMS.items():
        own = TENSOR_PRECISIONS[name]
        assert (short.kind, short.parts, short.short) == (own.kind, own.parts, own.short)


def decomposed(launches, operands, vectors):
    """Run launches on the simulator, which decompose A or B; return all that they wrote to the vectors."""
    places = [_Place(Matrix(x.ctypes.data, *x.shape, *x.strides, 0, x), 0) for x in operands]
    vectors = [Vector(one.ctypes.data, one.size, 4, one) for one in vectors]
    for one in _simulated(launches, 1.0, places[0], places[1], 0.0, places[0], vectors):
        one.run()


def parts_of(precision, x):
    layout = prepared_parts(precision, *x.shape)
    found = on_boundary(np.full(layout.rows * layout.cols, np.nan, np.float32))
    decomposed(preparation(precision, layout_of(x), GPU), (x, x), [found])
    return found.reshape(layout.rows, layout.cols)


@pytest.mark.skipif(not SIMULATOR, reason="runs on the simulator")
@pytest.mark.parametrize(("precision", "turn"), [("bf16x6", False), ("fp16x3", True)])
def test_prepared_parts_are_those_of_a_product(monkeypatch, precision, turn):
    """Whichever operand is prepared, all parts have the same bits as if both were decomposed together."""
    monkeypatch.setattr(decomposition, "PREPARED_TILES", (64, 96))  # the simulator runs few blocks per second
    narrow, m, n, k = TENSOR_PRECISIONS[precision], 5, 37, 70
    a, b = filled(m, k), filled(n, k, 1)
    a[3, 5], b[20, 69] = np.inf, np.nan
    if turn:
        a, b = np.asfortranarray(a), np.asfortranarray(b)
    config = PERSISTENT.configs[3]
    usual = _product_parts(narrow, config, a, b.T, (False, False))
    for prepared in ((False, True), (True, False)):
        kept = parts_of(narrow, a if prepared[0] else b)
        found = _product_parts(narrow, config, a, b.T, prepared)
        for i, (one, expected) in enumerate(zip(found, usual, strict=True)):
            one = kept if prepared[i] else one
            rows, extent = one.shape[0] - narrow.scaled, (m, n)[i]
            padded, usual_padded = (found.shape[1] // MARKED_WORDS for found in (one, expected))
            words, usual_words = ROW_WORDS * padded, ROW_WORDS * usual_padded
            np.testing.assert_array_equal(
                one[:rows, :usual_words].view(np.uint32), expected[:rows, :usual_words].view(np.uint32)
            )
            assert not one[:rows, usual_words:words].any(), "beyond the operand's edges the parts are zero"
            slots = rows // narrow.parts
            marks = one[:slots, words:]
            np.testing.assert_array_equal(marks[:, :extent], expected[:slots, usual_words:][:, :extent])
            assert (marks.sum(), marks[:, (3, 20)[i]].max()) == (1, 1)
            if narrow.scaled:
                np.testing.assert_array_equal(one[-1, :extent], expected[-1, :extent])


def _product_parts(precision, config, a, b, prepared):
    """Run a product's decomposition; return the parts of A and of B, None for a prepared operand."""
    x, y = (Matrix(one.ctypes.data, *one.shape, *one.strides, 0, one) for one in (a, b))
    c = Matrix(0, a.shape[0], b.shape[1], 4 * b.shape[1], 4, 0, None)
    product = product_of(x, y, c)._replace(prepared=prepared)
    launches = PERSISTENT.launches(config, product, precision.name, None, GPU)
    made = decomposition_of(precision, product, config)
    # The scratch memory is read after the launches: it is passed as a vector.
    scratch = on_boundary(np.full(made.bytes // 4, np.nan, np.float32))
    steps = tuple(_in_vector(step) for step in launches.steps[:-1])
    decomposed(launches._replace(steps=steps), (a, b), [scratch])
    return [
        None if ready else scratch[place.offset // 4 :][: one.rows * one.cols].reshape(one.rows, one.cols)
        for (place, one), ready in zip(made.arguments[:2], prepared)
    ]


def _in_vector(step):
    def moved(argument):
        if isinstance(argument, MatrixAt) and argument.place.slot == Slot.SCRATCH:
            return argument._replace(place=argument.place._replace(slot=Slot.VECTORS))
        return argument

    return step._replace(arguments=tuple(map(moved, step.arguments)))


def test_the_transpose_swaps_what_is_prepared():
    product = Product(dense("N", 8, 12), dense("N", 12, 4), dense("N", 8, 4), Batch(), prepared=(False, True))
    assert product.transposed.prepared == (True, False)


def test_where_prepared_operands_do_not_go_their_array_does():
    a = np.ones((8, 8), np.float32)
    prepared = prepare(a, "ieee")
    with pytest.raises(
        TypeError, match=r"array is of type PreparedOperand; .*; pass the array that it holds, array\.array$"
    ):
        prepare(prepared, "ieee")
    with pytest.raises(TypeError, match=r"c is of type PreparedOperand; .*; pass the array that it holds, c\.array$"):
        tiled_sgemm(a, a, c=prepared)
    with pytest.raises(TypeError, match="pass such an array, or no out"):
        tiled_sgemm(a, a, out=prepared)
