"""`explain` describes what is launched."""

from __future__ import annotations

import dataclasses
import re
from math import prod
from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda
from support.operands import filled

import numba_gemm
from numba_gemm import arrays, explain, tiled_sgemm
from numba_gemm.arrays import Copies, host
from numba_gemm.gemm import heuristics
from numba_gemm.gemm import precision as precision_names
from numba_gemm.gemm.explain import explain_shape
from numba_gemm.gemm.heuristics import Choice
from numba_gemm.kernels.ladder import STAGES
from numba_gemm.kernels.stage import Partition
from numba_gemm.kernels.tensor_core import TENSOR_PRECISIONS, TENSOR_STAGES
from numba_gemm.kernels.tensor_core.decompose import SPAN
from numba_gemm.runtime import device as devices
from numba_gemm.runtime import kernel_cache, launch
from numba_gemm.runtime.bound_product import BoundProduct
from numba_gemm.runtime.workspace import total_bytes
from numba_gemm.simulator.switch import SIMULATOR


def untouched(*shape):
    """Elements that are never read or written, so that large arrays cost nothing."""
    return np.empty(shape, np.float32)


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    monkeypatch.setattr(BoundProduct, "enqueue", lambda *_: pytest.fail("launched"))
    monkeypatch.setattr(launch, "_simulated", lambda *_: pytest.fail("simulated"))


def record_launches(monkeypatch):
    """Return a list that takes the launches of products, in place of launching them."""
    done = []
    monkeypatch.setattr(BoundProduct, "enqueue", lambda bound, *_: done.append(bound.launches))
    monkeypatch.setattr(launch, "_simulated", lambda launches, *_: [SimpleNamespace(run=lambda: done.append(launches))])
    return done


CASES = {
    "square": ((4096, 4096), (4096, 4096), {}),
    "small": ((64, 64), (64, 64), {}),
    "long": ((128, 65536), (65536, 128), {}),
    "ragged": ((1001, 999), (999, 1003), {}),
    "batch": ((16, 1, 128, 64), (4, 64, 128), {}),
    "named": ((256, 4096), (4096, 256), {"stage": "stream_k"}),
    "two parts": ((1024, 1024), (1024, 1024), {"stage": "stream_k"}),
    "epilogue": ((512, 512), (512, 512), {"epilogue": lambda value, row, col: value}),
}
ADDED_APART = ("long", "named")  # more than three parts of a tile


@pytest.mark.parametrize("case", CASES)
def test_what_is_told_is_what_is_launched(case, monkeypatch):
    a_shape, b_shape, options = CASES[case]
    told = explain(untouched(*a_shape), untouched(*b_shape), **options)
    done = record_launches(monkeypatch)
    tiled_sgemm(untouched(*a_shape), untouched(*b_shape), **options)
    (launches,) = done
    step = launches.multiplication
    assert told.launches == len(launches.steps) == 1 + (case in ADDED_APART)
    blocks, config = prod(step.grid), step.kernel.config.name
    assert (told.config, told.blocks) == (config, blocks)
    assert step.kernel.name.startswith(f"{told.stage}_{config}_{told.a_access}_{told.b_access}")
    assert told.workspace_bytes == total_bytes(launches.scratch_bytes, launches.counters)
    assert (told.workspace_bytes > 0) == (told.split > 1) == bool(launches.counters or case in ADDED_APART)
    assert told.microseconds > 0
    assert told.reason
    for words in (told.stage, config, f"blocks: {blocks}", told.reason, f"access {told.a_access}"):
        assert words in str(told)
    assert "\n" not in str(told)


def test_vectors_are_explained_as_matrices():
    for a, b, shape in (((300,), (300, 400), (1, 400)), ((500, 300), (300,), (500, 1)), ((300,), (300,), (1, 1))):
        told = explain(untouched(*a), untouched(*b))
        same = explain(untouched(shape[0], 300), untouched(300, shape[1]))
        assert (told.stage, told.config, told.blocks, told.copies) == (
            same.stage,
            same.config,
            same.blocks,
            same.copies,
        )
        assert explain(untouched(*a), untouched(*b), precision="fp32_auto").precision == "ieee"


def test_nothing_is_launched_compiled_or_copied_for_a_stage_of_one_kernel(monkeypatch):
    monkeypatch.setattr(kernel_cache, "fetch", lambda *_: pytest.fail("compiled"))
    told = explain(untouched(500, 300), untouched(300, 400), stage="vectorized")
    config = STAGES["vectorized"].configs[0]
    assert (told.stage, told.config, told.tile) == ("vectorized", config.name, (config.BM, config.BN, config.BK))
    assert told.blocks == told.whole_tiles == -(-500 // config.BM) * -(-400 // config.BN)
    assert (told.split, told.a_access, told.b_access, told.workspace_bytes) == (1, "aligned", "aligned", 0)
    assert told.microseconds is None
    assert "share" not in str(told).partition("Why")[0]
    spaced = explain(untouched(2, 3, 500, 300), untouched(300, 400)[:, ::2], stage="naive")
    assert spaced.a_access == ("any" if SIMULATOR else "aligned")  # on a GPU, of what is copied there, without gaps


@pytest.mark.parametrize(
    ("layouts", "accesses"),
    [
        ("NN", ("along4", "across4")),
        ("NT", ("along4", "along4")),
        ("TN", ("across4", "across4")),
        ("TT", ("across4", "along4")),
    ],
)
def test_accesses(layouts, accesses):
    a, b = (untouched(512, 512) if layout == "N" else untouched(512, 512).T for layout in layouts)
    told = explain(a, b, stage="stream_k")
    assert (told.a_access, told.b_access, told.c_vectors) == (*accesses, True)


@pytest.mark.parametrize(
    ("partition", "split", "whole"),
    [(Partition(12, 0), 3, 0), (Partition(4, 4), 1, 4), (Partition(5, 0), 2, 0), (Partition(3, 3), 3, 3)],
)
def test_split(partition, split, whole, monkeypatch):
    config = STAGES["stream_k"].configs[1]
    choice = Choice(STAGES["stream_k"], config, partition, clocks=1980.0)
    monkeypatch.setattr(heuristics, "best", lambda problem: choice)
    told = explain(untouched(2 * config.BM, 6 * config.BK), untouched(6 * config.BK, 2 * config.BN))
    assert (told.split, told.whole_tiles, told.blocks) == (split, whole, partition.blocks)
    assert told.microseconds == pytest.approx(1.0)


def test_transposes_are_told(monkeypatch):
    stage = STAGES["stream_k"]
    monkeypatch.setattr(
        heuristics, "best", lambda problem: Choice(stage, stage.configs[1], Partition(1, 1), swapped=True)
    )
    told = explain(untouched(64, 256), untouched(256, 128), np.zeros((128, 64), np.float32).T)
    assert told.swapped
    assert (told.a_access, told.b_access, told.c_vectors) == ("across4", "along4", True)
    assert "B as A" in str(told)


def test_copies_of_numpy_arrays(monkeypatch):
    a, b, c = np.zeros((3, 8, 16), np.float32), np.zeros((16, 24), np.float32)[:, ::2], np.zeros((3, 8, 12), np.float32)
    assert explain(cuda.to_device(a), cuda.to_device(b.copy())).copies == Copies()
    monkeypatch.setattr(arrays, "KINDS", (host.HostArrays(),))
    told = explain(a, b)
    assert told.copies == Copies(to_device=4 * (a.size + b.size), to_host=4 * c.size, on_host=4 * b.size)
    assert "copied to the device" in str(told)
    told = explain(a, b, c[:, ::-1], beta=1.0, epilogue=lambda x, row, col, v: x, epilogue_args=[filled(12, 1)[:, 0]])
    sizes = a.size + b.size + c.size + 12, c.size, b.size + 2 * c.size
    assert dataclasses.astuple(told.copies) == tuple(4 * size for size in sizes)
    assert explain(a, b, alpha=0).copies.to_device == 0
    kept = explain(a, b, c=c, beta=2.0)
    assert kept.copies_c
    assert "First c is copied to the result." in str(kept)
    assert kept.copies.on_host == explain(a, b).copies.on_host + 4 * c.size
    for options in ({"c": c}, {"out": c, "c": c, "beta": 1.0}):
        assert not explain(a, b, **options).copies_c
    with pytest.raises(ValueError, match="c has shape"):
        explain(a, b, c=c[:, :1][:2], beta=1.0)


def test_nothing_to_do():
    told = explain(untouched(0, 3), untouched(3, 4))
    assert (told.launches, told.stage, told.microseconds) == (0, "", 0.0)
    assert "no elements" in str(told)


def test_errors_are_those_of_the_product():
    with pytest.raises(ValueError, match="expected shapes"):
        explain(untouched(3, 4), untouched(3, 4))
    with pytest.raises(ValueError, match="takes no epilogue"):
        explain(untouched(3, 4), untouched(4, 4), stage="naive", epilogue=lambda value, row, col: value)
    with pytest.raises(ValueError, match="out is None"):
        explain(filled(3, 4), filled(4, 4), beta=1.0)


def test_it_is_exported():
    assert isinstance(explain(untouched(8, 8), untouched(8, 8)), numba_gemm.Explanation)


# ---------------------------------------------------------------------------------------------------- precisions


@pytest.fixture
def tensor_cores(monkeypatch):
    """On the simulator, whose properties are an H200's, the choices of a GPU with tensor cores."""
    monkeypatch.setattr(precision_names, "SIMULATOR", False)
    if not SIMULATOR:
        monkeypatch.setattr(devices, "device_properties", lambda device=0: devices.SIMULATED_DEVICE)


def parts_bytes(precision, size):
    """Bytes of the parts of A and B, whose extents are multiples of the tiles', and of what scales them."""
    bits = {"tf32": 32, "tf32x3": 64, "bf16": 16, "bf16x3": 32, "bf16x6": 48, "bf16x9": 48, "fp16x3": 32}[precision]
    parts = bits // 8 * size * size
    if precision not in ("tf32", "bf16"):
        parts += parts // 32  # marks
    # For each row of A and column of B: 33 words with its scale, and its largest magnitude in each span of K.
    scales = 4 * size * (33 + -(-size // SPAN)) if precision == "fp16x3" else 0
    return 2 * (parts + scales)


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("size", [512, 4096])
@pytest.mark.parametrize("precision", TENSOR_PRECISIONS)
def test_precisions(precision, size):
    a, b = untouched(size, size), untouched(size, size)
    told = explain(a, b, precision=precision)
    direct = precision == "tf32"
    if precision in ("bf16x6", "tf32x3") and size == 512:
        assert (told.stage, told.launches, told.workspace_bytes) == ("fused_decomposition", 1, 0)
        assert told.precision == "bf16x6"
        assert (told.a_access, told.b_access, told.blocks, told.tile) == ("along4", "across4", 256, (32, 32, 64))
        assert "operands as they are" in told.reason
        return
    split = 4 if precision == "bf16x9" and size == 512 else 1  # few tiles, whose sums take long
    assert told.stage == ("tf32_tma" if direct else "persistent")
    assert told.precision == precision
    assert told.launches == {"tf32": 1, "fp16x3": 3}.get(precision, 2) + (split > 1)
    assert told.a_access == told.b_access == ("tensor map" if direct else "decomposed")
    partials = 4 * split * size * size if split > 1 else 0
    counter = 4 if told.blocks == 132 else 0
    assert told.workspace_bytes == (0 if direct else parts_bytes(precision, size)) + partials + counter
    rows, cols, terms = told.tile
    assert terms == (32 if precision.startswith("tf32") else 64)
    tiles = -(-size // rows) * -(-size // cols)
    assert told.whole_tiles == (tiles if split == 1 else 0)
    assert told.blocks == min(tiles * split, 132)
    assert (told.split, told.swapped, told.copies.on_host) == (split, False, 0)
    assert told.microseconds > 0
    for words in (told.stage, f"and precision {precision}", f"access {told.a_access}", told.reason):
        assert words in str(told)
    assert ("There are" in str(told)) == (told.launches > 1)
    assert ("operands as they are" if direct else "operands decomposed first") in told.reason


@pytest.mark.simulator  # a GPU gets dense copies of NumPy arrays
@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize(
    ("a", "b", "decomposed"),
    [
        (untouched(512, 1024)[:, ::2], untouched(512, 512), "A"),  # no contiguous rows or columns
        (untouched(512, 512).T, untouched(512, 512), "B"),  # neither is contiguous along K
        (untouched(512, 512).T, untouched(512, 1024), "A"),  # which has fewer rows than B has columns
        (untouched(512, 513)[:, :512], untouched(512, 512), "A"),  # rows do not begin at multiples of 16 bytes
        (untouched(512, 512), untouched(512, 1023), "B"),
    ],
    ids=["strided", "neither along K", "neither, and B is larger", "unaligned A", "unaligned B"],
)
def test_tf32_of_an_operand_that_is_decomposed(a, b, decomposed):
    told = explain(a, b, precision="tf32", stage="tf32_tma")
    accesses = ("decomposed", "tensor map") if decomposed == "A" else ("tensor map", "decomposed")
    assert (told.stage, told.launches, told.a_access, told.b_access) == ("tf32_tma", 2, *accesses)
    assert f", {decomposed} decomposed first" in told.reason
    extent, tile = (a.shape[0], told.tile[0]) if decomposed == "A" else (b.shape[1], told.tile[1])
    assert told.workspace_bytes == 4 * 512 * -(-extent // tile) * tile


@pytest.mark.simulator
@pytest.mark.usefixtures("tensor_cores")
def test_tf32_of_operands_that_tensor_maps_cannot_describe():
    a, b = untouched(512, 513), untouched(513, 511)
    told = explain(a, b, precision="tf32")
    assert (told.stage, told.launches, told.a_access, told.b_access) == ("persistent", 2, *["decomposed"] * 2)
    assert told.workspace_bytes > 0
    with pytest.raises(ValueError, match="stage is 'tf32_tma', and tensor maps cannot describe these operands"):
        explain(a, b, precision="tf32", stage="tf32_tma")


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("layouts", ["NN", "NT", "TT"])
def test_tiles_of_a_product_by_tensor_maps(layouts):
    """With A and B by rows, the kernel computes the transpose of C; what is told refers to C."""
    m, n, k = 640, 8192, 512
    a = untouched(m, k) if layouts[0] == "N" else untouched(k, m).T
    b = untouched(k, n) if layouts[1] == "N" else untouched(n, k).T
    told = explain(a, b, precision="tf32")
    assert told.stage == "tf32_tma"
    config = next(one for one in TENSOR_STAGES["tf32_tma"].configs if one.name == told.config)
    extents = (config.BN, config.BM) if layouts == "NN" else (config.BM, config.BN)
    assert told.tile[:2] == extents
    assert told.whole_tiles == -(-m // extents[0]) * -(-n // extents[1])
    assert f"{told.whole_tiles} tiles of" in told.reason


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize(
    ("extents", "stands_for", "why"),
    [
        ((4096, 4096, 4096), "bf16x6", "its error and range are no worse than those of ieee, and it is expected"),
        ((4096, 4096, 96), "ieee", "no larger than that of float32 sums only from K = 128 on"),
        ((1024, 1024, 512), "bf16x6", "its error and range are no worse than those of ieee, and it is expected"),
        ((64, 65536, 4096), "bf16x6", "its error and range are no worse than those of ieee, and it is expected"),
        ((384, 384, 384), "ieee", "bf16x6 is expected to take "),
        ((512, 512, 512), "ieee", "bf16x6 is expected to take "),
    ],
)
def test_what_fp32_auto_stands_for(extents, stands_for, why):
    m, n, k = extents
    told = explain(untouched(m, k), untouched(k, n), precision="fp32_auto")
    assert told.precision == stands_for
    stated, _, _ = told.reason.partition("; ")
    assert stated.startswith(f"fp32_auto stands for {stands_for}, since ")
    assert why in stated
    same = explain(untouched(m, k), untouched(k, n), precision=stands_for)
    assert told.reason.endswith("; " + same.reason)
    assert dataclasses.replace(told, reason=same.reason) == same
    stages = {
        "ieee": ("thin" if k == 384 else "stream_k", 1),
        "bf16x6": ("persistent" if m == 4096 else "rows_in_registers", 2),
    }
    assert (told.stage, told.launches) == stages[stands_for]


@pytest.mark.usefixtures("tensor_cores")
def test_fp32_auto_without_terms():
    told = explain(untouched(4096, 4096), untouched(4096, 4096), alpha=0, precision="fp32_auto")
    assert told.precision == "ieee"
    assert "no larger than that of float32 sums only from K = 128 on" in told.reason


@pytest.mark.usefixtures("tensor_cores")
def test_blocks_that_share_a_tile_on_tensor_cores():
    told = explain(untouched(70, 65536), untouched(65536, 64), precision="bf16x6")
    assert (told.stage, told.launches, told.whole_tiles) == ("rows_in_registers", 3, 0)
    rows, cols, _ = told.tile
    tiles = -(-70 // rows) * -(-64 // cols)
    assert told.blocks == told.split * tiles <= 132
    assert told.split > 16
    assert f"Up to {told.split} blocks share a tile" in str(told)
    assert f"each divided among {told.split} blocks along K" in told.reason
    parts = explain(untouched(2048, 2048), untouched(2048, 2048), precision="bf16x6")
    assert (parts.launches, parts.split, parts.whole_tiles) == (2, 1, 256)
    same = explain_shape(70, 64, 65536, precision="bf16x6")
    assert (same.split, same.blocks, same.workspace_bytes) == (told.split, told.blocks, told.workspace_bytes)


@pytest.mark.usefixtures("tensor_cores")
def test_fp32_auto_of_other_gpus(monkeypatch):
    older = dataclasses.replace(devices.SIMULATED_DEVICE, cc=(8, 0))
    monkeypatch.setattr(devices, "device_properties", lambda device=0: older)
    told = explain(untouched(4096, 4096), untouched(4096, 4096), precision="fp32_auto")
    assert told.precision == "ieee"
    assert "since only compute capability 9.0 has a faster precision of this accuracy; " in told.reason
    told = explain(untouched(4096, 4096), untouched(4096, 4096), precision="bf16x6")
    assert (told.stage, told.launches, told.blocks) == ("warp_mma", 2, told.whole_tiles)


@pytest.mark.usefixtures("tensor_cores")
def test_stages_and_precisions():
    a, b = untouched(512, 512), untouched(512, 512)
    told = explain(a, b, stage="one_warpgroup", precision="tf32")
    assert (told.stage, told.launches, told.a_access) == ("one_warpgroup", 2, "decomposed")
    assert "stage one_warpgroup was asked for; " in told.reason
    with pytest.raises(ValueError, match="precision is 'tf32' and stage is 'naive', which computes in ieee"):
        explain(a, b, stage="naive", precision="tf32")
    batch = explain(untouched(3, 5, 256, 128), untouched(5, 128, 256), precision="bf16x9")
    assert batch.launches == 2 * 3, "each launch takes one dimension of the batch"


@pytest.mark.simulator
def test_the_simulator_has_no_tensor_cores():
    with pytest.raises(ValueError, match=r"precision is 'bf16x6', and this is the simulator.*; expected one of ieee"):
        explain(untouched(8, 8), untouched(8, 8), precision="bf16x6")
    told = explain(untouched(8, 8), untouched(8, 8), precision="fp32_auto")
    assert "fp32_auto stands for ieee, since only compute capability 9.0 has" in told.reason


@pytest.mark.usefixtures("tensor_cores")
def test_the_reason_has_the_times_that_are_expected():
    """Those of the product and of the conversion."""

    def told(explanation):
        return [float(found) for found in re.findall(r"(?:takes?|save) ([\d.]+) us", explanation.reason)]

    one = explain_shape(300, 2000, 3000, precision="bf16x6", cc=90)
    assert told(one) == [pytest.approx(one.microseconds, abs=0.06)]
    converted = explain_shape(300, 2000, 3000, precision="bf16x6", dtype="float16", cc=90)
    product, conversion = told(converted)
    assert product + conversion == pytest.approx(converted.microseconds, abs=0.12)
    assert converted.reason.endswith(f"; conversion takes {conversion} us")


@pytest.mark.usefixtures("tensor_cores")
def test_the_reason_is_that_of_the_first_part():
    parts = explain(untouched(2, 1, 64, 640), untouched(1, 3, 640, 64), precision="bf16x6")
    assert parts.launches > 3
    assert parts.reason.startswith("the first of ")
    count, first = int(parts.reason.split()[3]), float(re.search(r"take ([\d.]+) us", parts.reason)[1])
    assert count * first == pytest.approx(parts.microseconds, rel=0.02)
    assert "parts" not in explain(untouched(64, 640), untouched(640, 64), precision="bf16x6").reason
