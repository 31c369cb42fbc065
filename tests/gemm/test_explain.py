"""What is told about a product is what is done."""

from __future__ import annotations

import dataclasses
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
from numba_gemm.gemm.heuristics import Choice
from numba_gemm.kernels.ladder import STAGES
from numba_gemm.kernels.stage import Share
from numba_gemm.runtime import kernel_cache, launch
from numba_gemm.runtime.bound_product import BoundProduct
from numba_gemm.runtime.workspace import total_bytes
from numba_gemm.simulator.switch import SIMULATOR


def untouched(*shape):
    """Elements that are never read or written, so that large arrays cost nothing."""
    return np.empty(shape, np.float32)


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    monkeypatch.setattr(BoundProduct, "__call__", lambda *_: pytest.fail("launched"))
    monkeypatch.setattr(launch, "_simulated", lambda *_: pytest.fail("simulated"))


def record_launches(monkeypatch):
    """Return a list that takes the launches of products, in place of launching them."""
    done = []
    monkeypatch.setattr(BoundProduct, "__call__", lambda bound, *_: done.append(bound.launches))
    monkeypatch.setattr(
        launch, "_simulated", lambda launches, *_: SimpleNamespace(run=lambda: done.append(launches))
    )
    return done


CASES = {
    "square": ((4096, 4096), (4096, 4096), {}),
    "small": ((64, 64), (64, 64), {}),
    "long": ((64, 65536), (65536, 64), {}),
    "ragged": ((1001, 999), (999, 1003), {}),
    "batch": ((16, 1, 128, 64), (4, 64, 128), {}),
    "named": ((512, 512), (512, 512), {"stage": "stream_k"}),
    "epilogue": ((512, 512), (512, 512), {"epilogue": lambda value, row, col: value}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_told_is_what_is_launched(case, monkeypatch):
    a_shape, b_shape, options = CASES[case]
    told = explain(untouched(*a_shape), untouched(*b_shape), **options)
    done = record_launches(monkeypatch)
    tiled_sgemm(untouched(*a_shape), untouched(*b_shape), **options)
    assert told.launches == len(done) == 1
    (launches,) = done
    (step,) = launches.steps
    blocks, config = prod(step.grid), step.kernel.config.name
    assert (told.config, told.blocks) == (config, blocks)
    assert step.kernel.name.startswith(f"{told.stage}_{config}_{told.a_mode}_{told.b_mode}")
    assert told.workspace_bytes == total_bytes(launches.scratch_bytes, launches.counters)
    assert (told.workspace_bytes > 0) == (told.split > 1) == bool(launches.counters)
    assert told.microseconds > 0
    assert told.reason
    for words in (told.stage, config, f"blocks: {blocks}", told.reason, f"mode {told.a_mode}"):
        assert words in str(told)
    assert "\n" not in str(told)


def test_nothing_is_launched_compiled_or_copied_for_a_stage_of_one_kernel(monkeypatch):
    monkeypatch.setattr(kernel_cache, "fetch", lambda *_: pytest.fail("compiled"))
    told = explain(untouched(500, 300), untouched(300, 400), stage="vectorized")
    config = STAGES["vectorized"].configs[0]
    assert (told.stage, told.config, told.tile) == ("vectorized", config.name, (config.BM, config.BN, config.BK))
    assert told.blocks == told.whole_tiles == -(-500 // config.BM) * -(-400 // config.BN)
    assert (told.split, told.a_mode, told.b_mode, told.workspace_bytes) == (1, "aligned", "aligned", 0)
    assert told.microseconds is None
    assert "share" not in str(told).partition("Why")[0]
    spaced = explain(untouched(2, 3, 500, 300), untouched(300, 400)[:, ::2], stage="naive")
    assert spaced.a_mode == ("any" if SIMULATOR else "aligned")  # on a GPU, of what is copied there, without gaps


@pytest.mark.parametrize(
    ("layouts", "modes"),
    [
        ("NN", ("along4", "across4")),
        ("NT", ("along4", "along4")),
        ("TN", ("across4", "across4")),
        ("TT", ("across4", "along4")),
    ],
)
def test_modes(layouts, modes):
    a, b = (untouched(512, 512) if layout == "N" else untouched(512, 512).T for layout in layouts)
    told = explain(a, b, stage="stream_k")
    assert (told.a_mode, told.b_mode, told.c_vectors) == (*modes, True)


@pytest.mark.parametrize(
    ("share", "split", "whole"), [(Share(12, 0), 3, 0), (Share(4, 4), 1, 4), (Share(5, 0), 2, 0), (Share(3, 3), 3, 3)]
)
def test_split(share, split, whole, monkeypatch):
    config = STAGES["stream_k"].configs[1]
    monkeypatch.setattr(heuristics, "choose", lambda problem: Choice(STAGES["stream_k"], config, share, clocks=1980.0))
    told = explain(untouched(2 * config.BM, 6 * config.BK), untouched(6 * config.BK, 2 * config.BN))
    assert (told.split, told.whole_tiles, told.blocks) == (split, whole, share.blocks)
    assert told.microseconds == pytest.approx(1.0)


def test_transposes_are_told(monkeypatch):
    stage = STAGES["stream_k"]
    monkeypatch.setattr(
        heuristics, "choose", lambda problem: Choice(stage, stage.configs[1], Share(1, 1), swapped=True)
    )
    told = explain(untouched(64, 256), untouched(256, 128), np.zeros((128, 64), np.float32).T)
    assert told.swapped
    assert (told.a_mode, told.b_mode, told.c_vectors) == ("across4", "along4", True)
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
