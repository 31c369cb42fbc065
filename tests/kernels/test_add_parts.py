"""Parts of sums that another kernel adds: the same bits as where one block of stream_k adds them."""

from __future__ import annotations

import numpy as np
import pytest
from support import compile_stages
from support.ladder_cases import Operand
from support.mutants import SLICED
from support.offline import offline

from numba_gemm import tiled_sgemm
from numba_gemm.gemm import heuristics
from numba_gemm.gemm.heuristics import Choice
from numba_gemm.kernels.ladder import STAGES, _moving, partitions, stage
from numba_gemm.kernels.product import Product, dense
from numba_gemm.kernels.stage import Gpu, Partition
from numba_gemm.runtime import launch
from numba_gemm.runtime.device import synchronize

STREAM_K = STAGES["stream_k"]


def add_five(value, row, col, bias):
    return value + bias[col]


def products(monkeypatch, apart, blocks, whole, a, b, c, config=STREAM_K.test_config, **options):
    """The product, divided among blocks; and the number of launches."""
    counts = []
    own_launches = type(STREAM_K).own_launches

    def counted(self, *arguments):
        found = own_launches(self, *arguments)
        counts.append(len(found.steps))
        return found

    choice = Choice(STREAM_K, config, Partition(blocks, whole))
    monkeypatch.setattr(partitions, "READS_APART", apart)
    monkeypatch.setattr(type(STREAM_K), "own_launches", counted)
    monkeypatch.setattr(heuristics, "best", lambda wanted: choice)
    out = c.copy()
    tiled_sgemm(a, b, out, **options)
    return out, counts


# Rows, columns and terms; matrices; blocks, and whole tiles. Tiles have 32 x 32 elements and 8 terms.
CASES = {
    "one tile": (30, 31, 61, 0, 7, 0),
    "pieces of two tiles": (40, 36, 100, 0, 26, 0),
    "whole tiles first": (70, 40, 64, 0, 12, 4),
    "a batch": (33, 20, 70, 3, 37, 0),
    "an undivided tile among others": (64, 32, 56, 0, 8, 1),
}


@pytest.mark.parametrize("four", [False, True])
@pytest.mark.parametrize("beta", [0.0, -0.5])
@pytest.mark.parametrize("epilogue", [None, add_five])
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_the_same(monkeypatch, case, epilogue, beta, four):
    """By threads of one element, and of four."""
    m, n, k, matrices, blocks, whole = CASES[case]
    monkeypatch.setattr(stage, "MANY_ELEMENTS", 0 if four else 1 << 30)
    rng = np.random.default_rng(len(case))
    batch = (matrices,) * bool(matrices)
    a, b, c = (rng.standard_normal((*batch, *shape)).astype(np.float32) for shape in ((m, k), (k, n), (m, n)))
    options = {"alpha": 1.5, "beta": beta}
    if epilogue is not None:
        options |= {"epilogue": epilogue, "epilogue_args": [np.full(n, 5, np.float32)]}
    found, several = products(monkeypatch, 2, blocks, whole, a, b, c, **options)
    expected, one = products(monkeypatch, 1 << 30, blocks, whole, a, b, c, **options)
    assert max(several) == 2
    assert max(one) == 1
    np.testing.assert_array_equal(found, expected)
    exact = 1.5 * (a.astype(np.float64) @ b) + beta * c + (0.0 if epilogue is None else 5.0)
    np.testing.assert_allclose(found, exact, atol=1e-4)


WARPS = {
    "side by side and below each other": (_moving(64, 128, 8, 8, 8, 32, 64), 61, 125, 24),
    "slices": (SLICED, 29, 31, 90),
}


@pytest.mark.parametrize("four", [False, True])
@pytest.mark.parametrize("case", WARPS)
def test_several_warps(monkeypatch, case, four):
    monkeypatch.setattr(stage, "MANY_ELEMENTS", 0 if four else 1 << 30)
    (config, m, n, k), rng = WARPS[case], np.random.default_rng(3)
    a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
    c = np.full((m, n), np.nan, np.float32)
    found, expected = (products(monkeypatch, apart, 3, 0, a, b, c, config)[0] for apart in (2, 1 << 30))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(found, a.astype(np.float64) @ b, atol=1e-4)


def test_basic_stream_k_adds_all_parts_itself():
    basic, rng = STAGES["basic_stream_k"], np.random.default_rng(1)
    a, b = rng.standard_normal((32, 128), np.float32), rng.standard_normal((128, 32), np.float32)
    c = np.full((32, 32), np.nan, np.float32)
    x, y, z = (Operand.place(one, one) for one in (a, b, c))
    launch.launch(basic, basic.test_config, 1.0, x.matrix, y.matrix, 0.0, z.matrix, partition=Partition(12, 0))
    synchronize()
    z.fetch()
    np.testing.assert_allclose(c, a.astype(np.float64) @ b, atol=1e-4)


@pytest.mark.simulator
def test_a_traced_launch_computes_all_of_c():
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((32, 128), np.float32), rng.standard_normal((128, 32), np.float32)
    c = np.full((32, 32), np.nan, np.float32)
    x, y, z = (Operand.place(one, one) for one in (a, b, c))
    launch.simulated(STREAM_K, STREAM_K.test_config, 1.0, x.matrix, y.matrix, 0.0, z.matrix).run()
    np.testing.assert_allclose(c, a.astype(np.float64) @ b, atol=1e-4)


@pytest.mark.parametrize(("cc", "early"), [((8, 0), False), ((9, 0), True), ((12, 0), True)])
def test_it_may_start_early_from_9_0_on(cc, early):
    config = next(one for one in STREAM_K.configs if (one.BM, one.BN) == (64, 64))
    product = Product(dense("N", 64, 64 * config.BK), dense("N", 64 * config.BK, 64), dense("N", 64, 64))
    made = STREAM_K.launches(config, product, "ieee", Partition(16, 0), Gpu(cc, 132))
    assert [step.overlaps for step in made.steps] == [False, early]


def test_stream_k_lets_it_start_where_it_may():
    """Blocks of the largest thread tiles fill a multiprocessor; below 9.0, there is no such instruction."""
    jobs = [
        {"stage": "stream_k", "config": one.name, "cc": [*cc], "aligned": True}
        for one in STREAM_K.configs
        if (one.BM, one.BN, one.BK) in ((128, 256, 16), (64, 64, 16))
        for cc in ((8, 0), (9, 0))
    ]
    found = {(job["config"], *job["cc"]): one for job, one in zip(jobs, offline(compile_stages.outcomes, jobs))}
    for (name, *cc), code in found.items():
        assert ("PREEXIT" in code["opcodes"]) == (cc == [9, 0] and not name.startswith("128x256")), (name, cc)
