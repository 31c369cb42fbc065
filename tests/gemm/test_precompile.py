"""The kernels that `precompile` compiles in each precision, without a compiler."""

from __future__ import annotations

import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from numba_gemm import GpuUnavailable, precompile
from numba_gemm.gemm import autotune_cache, heuristics
from numba_gemm.gemm import precision as precisions
from numba_gemm.gemm import precompile as module
from numba_gemm.kernels import STAGES
from numba_gemm.kernels.product import Batch, Product, dense
from numba_gemm.kernels.tensor_core import SHORT_SUMS, TENSOR_PRECISIONS, TENSOR_STAGES
from numba_gemm.runtime import device as devices
from numba_gemm.runtime import kernel_cache, kernel_files

H200 = (9, 0)
# Tiles of 128x256 are for precisions with one product of parts only.
WIDE = ("128x256-c2p1",)
TILES = ("128x128-c2p1", "64x128-c1p1", "64x64-c1p1")
LONG = {  # for long sums
    "persistent_bf16x6_64x96-c1p1",
    *(
        f"rows_in_registers_bf16x6_{sums}{tile}_{way}4"
        for sums in ("", "stepwise_")  # which is for short ones
        for tile in ("128x64-c2p1", "64x64-c1p1")
        for way in ("along", "across")
    ),
    *(  # of operands that are not aligned
        f"rows_in_registers_bf16x6_{which}"
        for which in ("128x64-c2p1_across1", "64x64-c1p1_across1", "stepwise_64x64-c1p1_across1")
    ),
    *(f"rows_in_registers_bf16x6_stepwise_{tile}_any" for tile in ("64x64-c1p1", "128x64-c2p1")),
}
FUSED = {  # for short sums only
    f"fused_decomposition_bf16x6_stepwise_32x32x64-4x8-w32x32-k4-s3_{a}_{b}"
    for a, b in (
        ("along4", "along4"),
        ("along4", "across4"),
        ("across4", "across4"),
        ("any", "across1"),
        ("across1", "any"),
    )
}
MAPPED = ("128x256-c2p1", "128x192-c2p1", "128x128-c2p1", "64x128-c1p1", "64x64-c1p1")


@pytest.fixture
def fetched(monkeypatch, tmp_path):
    """Names of the kernels that were fetched, as on a machine with a compiler."""
    names = []

    def fetch_all(tasks, jobs, done):
        names.extend((kernel.name, cc) for kernel, cc in tasks)
        found = [kernel_cache.Fetched(SimpleNamespace(), "compiler" if i else "cache", 0.0) for i in range(len(tasks))]
        for i, one in enumerate(found):
            done(i, one)
        return found

    monkeypatch.setattr(precisions, "SIMULATOR", False)
    monkeypatch.setattr(module, "SIMULATOR", False)
    monkeypatch.setattr(kernel_files, "directory", lambda: tmp_path)
    monkeypatch.setattr(kernel_cache, "fetch_all", fetch_all)
    return names


def decomposed(stage, precision, tiles):
    """Names of all kernels of a precision, for short sums and long ones."""
    names = {TENSOR_PRECISIONS[precision].name, SHORT_SUMS.get(precision, TENSOR_PRECISIONS[precision]).name}
    products = {f"{stage}_{name}_{tile}" for name in names for tile in tiles}
    return (
        products
        | {"decompose_bf16x6" if precision == "bf16x9" else f"decompose_{precision}"}
        | ({"row_maxima"} if TENSOR_PRECISIONS[precision].scaled else set())
    )


def persistent(precision, tiles):
    """Names of all kernels of a precision where sums may be divided among blocks."""
    return decomposed("persistent", precision, tiles) | {"add_partials"}


def of_float32(names):
    """Return the names of kernels of float32 multiply-adds."""
    return {name for name in names if name.startswith(("thin_", "stream_k_", "short_sums_", "coalesced_"))}


EXPECTED = {
    "tf32": persistent("tf32", WIDE + TILES)
    | {f"tf32_tma_{tile}_{way}" for tile in MAPPED for way in ("along", "across")},
    "tf32x3": persistent("tf32x3", TILES),
    "bf16": persistent("bf16", WIDE + TILES),
    "bf16x3": persistent("bf16x3", TILES),
    "bf16x6": (persistent("bf16x6", TILES) | LONG | FUSED) - {"persistent_bf16x6_stepwise_64x64-c1p1"},
    "bf16x9": persistent("bf16x9", TILES) - {"persistent_bf16x9_stepwise_64x64-c1p1"},
    "fp16x3": persistent("fp16x3", TILES),
}


@pytest.mark.parametrize("precision", TENSOR_PRECISIONS)
def test_kernels_of_a_precision(precision, fetched):
    report = precompile(cc=H200, precision=precision)
    names = [name for name, _ in fetched]
    float32 = of_float32(names)
    others = {name for name in names if "bf16x6" in name} - EXPECTED[precision]
    assert others <= LONG | FUSED | {"decompose_bf16x6"}
    assert ("decompose_bf16x6" in others) == (precision not in ("bf16x6", "bf16x9")) == bool(others)
    assert set(names) - float32 - others == EXPECTED[precision]
    assert {name.partition("_")[0] for name in float32} == (set() if precision == "bf16x9" else {"stream", "thin"})
    compensated = {name for name in float32 if name.endswith("_compensated")}
    assert compensated == (set() if precision in ("tf32", "bf16") else float32)
    assert len(names) == len(set(names)) == len(report) <= 78, "each is fetched once"
    assert {cc for _, cc in fetched} == {H200}
    assert [one.origin for one in report] == ["cache"] + ["compiler"] * (len(report) - 1)
    for name, one in zip(names, report, strict=True):
        assert name.startswith(one.stage)
        assert one.config in name
        assert one.cc == H200
        both = {precision, "bf16x6"} if others else {precision}  # `add_partials` is the same for both
        of = {"bf16x6"} if name in others else both if name == "add_partials" else {precision}
        assert name.endswith(one.variant) if name in float32 else one.variant in of
        assert bool(one.config) == (one.stage in STAGES), "kernels that prepare operands have no configuration"


def test_tensor_cores_have_few_kernels(fetched):
    """Beside those of float32 multiply-adds, which `ieee` shares or which have compensated sums."""
    precompile(cc=H200, precision=TENSOR_PRECISIONS)
    assert len(set(fetched)) == len(fetched)
    names = {name for name, _ in fetched}
    assert len(names - of_float32(names)) <= 64
    assert len(of_float32(names)) <= 78


def test_compensated_kernels_of_a_stage(fetched):
    precompile("thin", H200, "bf16x6")
    names = {name for name, _ in fetched}
    assert names == {name for name in names if name.startswith("thin_") and name.endswith("_compensated")} != set()


@pytest.mark.parametrize("precision", ["bf16x6", "tf32", "fp16x3"])
def test_kernels_of_a_stage_that_divides_sums(precision, fetched):
    precompile("persistent", H200, precision)
    assert {name for name, _ in fetched if name.startswith(("persistent", "add_partials"))} == {
        name for name in EXPECTED[precision] if name.startswith(("persistent", "add_partials"))
    }


def test_fp32_auto_is_both_that_it_may_stand_for(fetched):
    report = precompile(cc=H200, precision="fp32_auto")
    names = {name for name, _ in fetched}
    precompile(cc=H200, precision=["ieee", "bf16x6"])
    assert [name for name, _ in fetched[len(report) :]] == [name for name, _ in fetched[: len(report)]]
    assert names > EXPECTED["bf16x6"]
    assert any(name.startswith("stream_k_") for name in names)


def test_other_capabilities_multiply_by_warps(fetched):
    precompile(cc=[(8, 0), (8, 9)], precision=["tf32", "bf16x6"])
    own = decomposed("warp_mma", "tf32", ["64x64-w32x32"]) | decomposed("warp_mma", "bf16x6", ["64x64-w32x32"])
    assert set(fetched) == {(name, cc) for name in own for cc in ((8, 0), (8, 9))}
    fetched.clear()
    with pytest.raises(ValueError, match=r"precisions bf16x6, and compute capabilities 7\.5; expected a stage that"):
        precompile(cc=(7, 5), precision="bf16x6")


def test_stage_by_name(fetched):
    report = precompile("one_warpgroup", H200, ["bf16x6", "tf32x3", "fp16x3"])
    tile = TENSOR_STAGES["one_warpgroup"].configs[0].name
    assert {name for name, _ in fetched} == {
        f"one_warpgroup_bf16x6_{tile}",
        f"one_warpgroup_tf32x3_{tile}",
        "decompose_bf16x6",
        "decompose_tf32x3",
    }, "it does not compute in fp16x3"
    assert {one.variant for one in report} == {"bf16x6", "tf32x3"}
    with pytest.raises(ValueError, match=r"stages are naive, precisions tf32, .* change one of them"):
        precompile("naive", H200, "tf32")
    with pytest.raises(ValueError, match=r"stage is 'persistent', which needs compute capability 9\.0"):
        precompile("persistent", (8, 0), "bf16x6")
    with pytest.raises(ValueError, match=r"precision is 'fp7'; expected one of ieee, tf32"):
        precompile(cc=H200, precision="fp7")


# ------------------------------------------------------------------------------------------------ what to compile


def names_of(report):
    return [(one.stage, one.config, one.variant) for one in report]


def test_kernels_for_shapes(fetched):
    """Only what the products launch; by rows or by columns, for each capability."""
    report = precompile(cc=[(8, 0), H200], shapes=[(4096, 6144, 2048), (4096, 6144, 2048)], layouts=["NN", "NT"])
    assert len(report) == len(set(report)) == 4
    assert {one.cc for one in report} == {(8, 0), H200}
    assert {one.variant for one in report} == {"along4_across4_aligned", "along4_along4_aligned"}
    assert names_of(precompile("naive", H200, shapes=[(64, 64, 64), (63, 63, 63)])) == [
        ("naive", "32x32x1-1x1", "aligned"),
        ("naive", "32x32x1-1x1", "any"),
    ]


@pytest.mark.parametrize(
    ("dtype", "converting"),
    [
        ("float16", {"convert_float16_float16"}),
        (np.float16, {"convert_float16_float16"}),
        (("float32", "bfloat16"), {"convert_bfloat16_bfloat16"}),
        (("float16", "bfloat16"), {"convert_float16_bfloat16", "convert_bfloat16_float16"}),
        ("float32", set()),
    ],
)
@pytest.mark.parametrize(
    ("stages", "options"),
    [("auto", {"shapes": [(33, 35, 37)]}), ("auto", {}), ("naive", {}), ("one_warpgroup", {"precision": "bf16x3"})],
)
def test_kernels_for_operands_of_16_bits(fetched, stages, options, dtype, converting):
    """A product may be computed as its transpose, whose operands are the other way round."""
    found = precompile(stages, cc=H200, dtype=dtype, **options)
    made = {name for name, _ in fetched if name.startswith("convert")}
    assert made <= converting
    assert bool(made) == bool(converting)
    assert len(set(fetched)) == len(fetched) == len(found)


def test_other_capabilities_are_like_the_model_below():
    assert module.model_of((9, 9)).name == module.model_of(H200).name == "H200"
    assert module.model_of((7, 0)).name == "T4"
    assert module.model_of((8, 7)).cc == (8, 7)


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """Record choices for products on the simulated device: the last candidate of each."""
    monkeypatch.setenv("NUMBA_GEMM_CACHE_DIR", str(tmp_path))
    autotune_cache.forget()
    gpu = devices.device_properties(0)

    def record(*products):
        for product in products:
            wanted = heuristics.problem(product, gpu)
            choice = heuristics.ranked(wanted)[-1]
            autotune_cache.keep(0, wanted, choice, 10.0, 2)
            yield choice

    yield record
    autotune_cache.forget()


def test_recorded_choices(tuned, fetched):
    batch = Batch((1, 1, 3), (0, 0, 4 * 64 * 32), (0, 0, 4 * 32 * 96), (0, 0, 4 * 64 * 96))
    square = dense("N", 64, 64)
    products = [
        Product(square, square, square),
        Product(dense("T", 1000, 1001), dense("T", 1001, 500), dense("N", 1000, 500)),
        Product(dense("N", 64, 32), dense("N", 32, 96), dense("N", 64, 96), batch),
        Product(square, square, dense("T", 64, 64)),
    ]
    chosen = list(tuned(*products))
    report = precompile([], cc=[], recorded=True)
    kernels = [choice.stage.kernel(choice.config, choice.oriented(one)) for one, choice in zip(products, chosen)]
    assert [name for name, _ in fetched] == list(dict.fromkeys(kernel.name for kernel in kernels))
    assert len(report) >= 3


@pytest.mark.parametrize("matrices", [1, 3])
def test_recorded_choices_for_operands_of_16_bits(tuned, fetched, matrices):
    a, b, c = dense("T", 64, 32, "float16"), dense("N", 32, 96), dense("N", 64, 96)
    batch = Batch((1, 1, 3), (0, 0, 2 * 64 * 32), (0, 0, 4 * 32 * 96), (0, 0, 4 * 64 * 96)) if matrices > 1 else Batch()
    (choice,) = tuned(Product(a, b, c, batch))
    ((product, found),) = autotune_cache.recorded(0)
    assert (product, found.selected) == (Product(a, b, c, batch), choice.selected)
    precompile([], cc=[], recorded=True)
    assert any(name.startswith("convert_float16") for name, _ in fetched)


def test_recorded_choices_for_operands_that_are_not_dense_are_left_out(tuned, fetched):
    odd = dense("N", 64, 64)._replace(offset=4)
    list(tuned(Product(odd, odd, odd)))
    assert precompile([], cc=[], recorded=True) == []
    entries = autotune_cache._entries(0)
    entries |= {"m=2": {}, "words": {}, "m=x n=1 k=1 matrices=1": {}}
    assert autotune_cache.recorded(0) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"shapes": [(64, 64)]}, "shapes has .64, 64.; expected M, N and K"),
        ({"shapes": [(64, 64, 0)]}, "expected M, N and K, from 1 on"),
        ({"shapes": [(64, 64, 64.0)]}, "expected M, N and K"),
        (
            {"shapes": [(64, 64, 64)], "layouts": "NX"},
            "layouts has 'NX'; expected some of NN, NT, TN, TT; pass some of these",
        ),
    ],
)
def test_shapes_that_are_none(fetched, options, says):
    with pytest.raises(ValueError, match=says):
        precompile(cc=H200, **options)


@pytest.mark.parametrize(
    ("stages", "options", "error", "says"),
    [
        ("nope", {}, ValueError, "stage is 'nope'; expected 'auto' or one of naive"),
        (5, {}, TypeError, "stages has an object of type int; expected a str"),
        (STAGES["naive"], {}, TypeError, "stages has an object of type LadderStage; expected a str"),
        ("naive", {"shapes": (1, 2, 3)}, TypeError, r"shapes has 1; .* pass \[\(4096, 4096, 4096\)\]"),
        ("naive", {"shapes": [(2**40, 2**40, 1)]}, ValueError, "out has shape .* use smaller extents"),
        ("naive", {"layouts": 5}, TypeError, "layouts has an object of type int"),
        ("naive", {"jobs": 0}, ValueError, "jobs is 0; expected 1 or more"),
        ("naive", {"jobs": "2"}, TypeError, "jobs is '2', of type str; expected an int"),
    ],
)
def test_wrong_arguments_are_told_before_a_missing_gpu(fetched, stages, options, error, says):
    with pytest.raises(error, match=says):
        precompile(stages, **options)


@pytest.mark.parametrize("cc", [(3, 5), (20, 0)])
def test_capabilities_that_no_kernel_is_for(fetched, cc):
    with pytest.raises(ValueError, match=r"cc is .*; expected one that stages run on .*\(9, 0\).*; pass one of these"):
        precompile("naive", cc)


def test_advice_without_a_gpu_works(fetched, monkeypatch):
    def current_device():
        raise GpuUnavailable("none.")

    monkeypatch.setattr(devices, "current_device", current_device)
    with pytest.raises(GpuUnavailable, match=r"none\. .* Pass a compute capability, cc=\(9, 0\)") as caught:
        precompile("naive")
    assert "CUDASIM" not in str(pickle.loads(pickle.dumps(caught.value)))
    assert precompile("naive", cc=(9, 0), shapes=[(np.int64(64), 64, 64)])
    for options in ({"recorded": True}, {"device": 0}):
        with pytest.raises(GpuUnavailable, match=rf"Leave out {next(iter(options))}; then no GPU is needed"):
            precompile("naive", cc=(9, 0), **options)
    with pytest.raises(GpuUnavailable, match=r"Pass a compute capability, .* and leave out recorded; then"):
        precompile("naive", recorded=True)


def test_a_place_that_cannot_keep_kernels(fetched, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(kernel_files, "directory", lambda: tmp_path / "file")
    with pytest.raises(RuntimeError, match=r"kernels cannot be kept in .*file .*; set NUMBA_GEMM_CACHE_DIR to one"):
        precompile("naive", H200)


@pytest.mark.parametrize("progress", [True, None])
def test_progress_without_a_standard_error_stream(fetched, monkeypatch, progress):
    monkeypatch.setattr(sys, "stderr", None)
    assert len(precompile("naive", H200, progress=progress)) == 2


@pytest.mark.parametrize("progress", [True, False, None])
@pytest.mark.parametrize("terminal", [True, False])
def test_progress(fetched, capsys, monkeypatch, progress, terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    precompile("naive", H200, progress=progress)
    lines = capsys.readouterr().err.replace("\r", "\n").splitlines()
    if progress is False or (progress is None and not terminal):
        assert not lines
    elif terminal:
        assert [line.split(",")[0] for line in lines[1:]] == ["1 of 2 kernels", "2 of 2 kernels"]
    else:
        assert lines == [
            "1 of 2 kernels: naive_32x32x1-1x1, 0.0 s, cache",
            "2 of 2 kernels: naive_32x32x1-1x1_any, 0.0 s, compiler",
        ]
