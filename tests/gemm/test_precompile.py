"""The kernels that `precompile` compiles in each precision, without a compiler."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from numba_gemm import precompile
from numba_gemm.gemm import precision as precisions
from numba_gemm.gemm import precompile as module
from numba_gemm.kernels.tensor_core import SHORT_SUMS, TENSOR_PRECISIONS, TENSOR_STAGES
from numba_gemm.runtime import kernel_cache, kernel_files

H200 = (9, 0)
# Tiles of 128x256 are for precisions with one product of parts only.
WIDE = ("128x256-c2p1",)
TILES = ("128x128-c2p1", "64x128-c1p1", "64x96-c1p1", "64x64-c1p1")
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
        | {f"decompose_{name}" for name in names}
        | ({"row_maxima"} if TENSOR_PRECISIONS[precision].scaled else set())
    )


EXPECTED = {
    "tf32": decomposed("persistent", "tf32", WIDE + TILES)
    | {f"tf32_tma_{tile}_{layout}" for tile in MAPPED for layout in ("NN", "NT", "TT")},
    "tf32x3": decomposed("persistent", "tf32x3", TILES),
    "bf16": decomposed("persistent", "bf16", WIDE + TILES),
    "bf16x6": decomposed("persistent", "bf16x6", TILES),
    "bf16x9": decomposed("persistent", "bf16x9", TILES),
    "fp16x3": decomposed("persistent", "fp16x3", TILES),
}


@pytest.mark.parametrize("precision", TENSOR_PRECISIONS)
def test_kernels_of_a_precision(precision, fetched):
    report = precompile(cc=H200, precision=precision)
    names = [name for name, _ in fetched]
    assert set(names) == EXPECTED[precision]
    assert len(names) == len(set(names)) == len(report), "each is fetched once"
    assert {cc for _, cc in fetched} == {H200}
    assert [one.origin for one in report] == ["cache"] + ["compiler"] * (len(report) - 1)
    for name, one in zip(names, report, strict=True):
        assert name.startswith(one.stage)
        assert one.config in name
        assert (one.variant, one.cc) == (precision, H200)
        assert bool(one.config) == (one.stage in TENSOR_STAGES), "kernels that prepare operands have no configuration"


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
    assert precompile(cc=(7, 5), precision="bf16x6") == []


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
    assert precompile("naive", H200, "tf32") == []
    with pytest.raises(ValueError, match=r"stage is 'persistent', which needs compute capability 9\.0"):
        precompile("persistent", (8, 0), "bf16x6")
    with pytest.raises(ValueError, match=r"precision is 'fp7'; expected one of ieee, tf32"):
        precompile(cc=H200, precision="fp7")
