"""Stages launched by Numba itself: on a GPU, on Numba's own simulator, and compiled for arrays without a GPU."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter

import numpy as np
import pytest
from numba import cuda
from support import compile_launchables
from support.covering import others_exhaustive
from support.mutants import SLICED
from support.offline import offline
from support.operands import NAN, check, filled

from numba_gemm import launchable
from numba_gemm.device import store
from numba_gemm.kernels.ladder import STAGES, TileConfig, _each_thread
from numba_gemm.simulator import scheduler

SHARING = [name for name, stage in STAGES.items() if stage.schedule is not None and not stage.undivided]
# Extents beyond the tiles, contiguous operands, and the number of blocks that share the tiles.
LAUNCHES = {
    "aligned": ((4, 0), True, None),
    "odd": ((0, 1), True, None),
    "any strides": ((3, 0), False, None),
    "shared": ((0, 4), True, 3),
    "shared, any strides": ((1, 0), False, 5),
}
CASES = [
    (stage, case) for stage in STAGES for case, (*_, blocks) in LAUNCHES.items() if blocks is None or stage in SHARING
]


def launched(stage, config, case, k, alpha=0.5, beta=0.0):
    """Launch a stage for one tile and a part of another one, and compare the result with float64."""
    (rows, cols), contiguous, blocks = LAUNCHES[case]
    m, n = config.BM + rows, config.BN + cols
    a, b, before = filled(m, k), filled(k, n, 1), filled(m, n, 2)
    c = np.full((m, n), NAN) if beta == 0 else before
    if contiguous:
        operands = [cuda.to_device(x) for x in (a, b, c)]
    else:  # A by columns, B a part of a larger matrix, C by columns
        larger = cuda.to_device(np.hstack([b, b]))
        operands = [cuda.to_device(np.asfortranarray(a)), larger[:, :n], cuda.to_device(np.asfortranarray(c))]
    kernel, grid, block, shared = launchable(stage, m, n, k, config=config, contiguous=contiguous, blocks=blocks)
    for _ in range(2 if blocks else 1):  # the second one finds the counters of shared tiles as the first one left them
        operands[2].copy_to_device(c if contiguous else np.asfortranarray(c))
        kernel[grid, block, 0, shared](alpha, operands[0], operands[1], beta, operands[2])
        check(operands[2].copy_to_host(), a, b, alpha=alpha, beta=beta, c=before)


@pytest.mark.simulator
@pytest.mark.parametrize(
    ("stage", "case"),
    [
        pytest.param(stage, case, marks=[pytest.mark.exhaustive] * ((i + j) % 2))
        for i, (stage, found) in enumerate(groupby(CASES, key=itemgetter(0)))
        for j, (_, case) in enumerate(found)
    ],
)
def test_numbas_own_simulator_runs_every_stage(stage, case, monkeypatch):
    def refuse(*args):
        raise AssertionError("the package's own scheduler ran")

    monkeypatch.setattr(scheduler, "Launch", refuse)
    config = STAGES[stage].test_config
    launched(stage, config, case, k=max(20, 5 * config.BK // 2))


@pytest.mark.simulator
@pytest.mark.parametrize("stage", ["coalesced", "vectorized", "stream_k"])
def test_numbas_own_simulator_adds_to_c(stage):
    launched(stage, STAGES[stage].test_config, "odd", k=9, beta=-2.0)


@pytest.mark.simulator
def test_numbas_own_simulator_has_warps():
    """The first slice alone stages C, whose rows are not aligned, with barriers of warps; a block has three tiles."""
    config, (m, n, k) = SLICED, (65, 31, 70)
    a, b, c = filled(m, k), filled(k, n), np.full((m, n), NAN)
    kernel, grid, block, shared = launchable("stream_k", m, n, k, config=config, blocks=1)
    kernel[grid, block, 0, shared](1.0, a, b, 0.0, c)
    check(c, a, b)


@pytest.mark.simulator
@pytest.mark.parametrize("lanes", [4, 32])
def test_numbas_own_simulator_exchanges_sums(lanes):
    config = _each_thread(2, 1, 64, lanes=lanes)
    launched("small_matrices", config, "odd", k=131, beta=-2.0)


@pytest.mark.simulator
def test_a_kernel_that_raises_leaves_numba_as_it_was():
    config = STAGES["stream_k"].test_config
    kernel, grid, block, shared = launchable("stream_k", 32, 32, 8, config=config)
    a, b = filled(32, 8), filled(8, 32)
    with pytest.raises(AttributeError, match="NoneType"):
        kernel[grid, block, 0, shared](1, a, b, 0, None)
    assert store.cuda is cuda
    launched("stream_k", config, "aligned", k=8)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Grid size")
@pytest.mark.parametrize(("stage", "case"), CASES)
def test_numba_launches_every_stage(stage, case):
    launched(stage, STAGES[stage].configs[0], case, k=516 if case in ("aligned", "shared") else 517, beta=-2.0)


@pytest.mark.parametrize("stage", others_exhaustive(STAGES, ("naive", "vectorized", "stream_k")))
def test_every_stage_compiles_for_arrays(stage):
    results = offline(compile_launchables.results, stage)
    assert len(results) == 3
    for result in results:
        if result["contiguous"] and result["layout"] == "A":  # refused: 128-bit accesses would be to other elements
            assert "expected a C-contiguous float32 matrix; launchable(..., contiguous=False)" in result["error"]
        else:
            assert (result.get("error"), result["local"], result["generic"]) == (None, 0, []), result
            vectors = STAGES[stage].vectorized and result["contiguous"] and stage != "thin"
            assert result["vectors"] or not vectors, result


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        (("nope", 8, 8, 8), {}, "stage is 'nope'; expected one of naive, coalesced, "),
        (
            ("naive", 8, 0, 8),
            {},
            "n is 0; expected 1 or more; pass such a number",
        ),
        (
            ("naive", 8, 8, 8),
            {"blocks": 2},
            "blocks is 2 and stage is 'naive', whose tiles decide the number of blocks; expected None; leave it out",
        ),
        (
            ("short_sums", 80, 80, 8),
            {"blocks": 2},
            "blocks is 2 and stage is 'short_sums', whose tiles decide the number of blocks; expected None; "
            "leave it out",
        ),
        (("stream_k", 8, 8, 8), {"blocks": 0}, "blocks is 0; expected 1 or more"),
        (("thin", 8, 8, 2**33 + 4), {}, "k is 8589934596, and one launch takes up to 1073741824; expected less"),
        (("naive", 2**40, 2**40, 8), {}, "a grid of 34359738368 by 34359738368 blocks; expected at most"),
        (
            ("coalesced", 64, 64, 64),
            {"config": TileConfig(32, 32, 8, 4, 4)},
            "'coalesced' has one thread per element of a tile, and configuration 32x32x8-4x4 has 64 for 32x32",
        ),
    ],
)
def test_wrong_arguments(arguments, options, says):
    with pytest.raises(ValueError, match=says):
        launchable(*arguments, **options)


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        ((["naive"], 8, 8, 8), {}, "stage is of type list; expected a str"),
        (("naive", 8.0, 8, 8), {}, r"m is 8\.0, of type float; expected an int"),
        (("naive", 8, 8, "8"), {}, "k is '8', of type str; expected an int"),
        (("naive", 8, 8, 8), {"config": "32x32"}, "config is '32x32'; expected a TileConfig"),
        (("stream_k", 8, 8, 8), {"blocks": 2.5}, r"blocks is 2\.5, of type float; expected an int"),
    ],
)
def test_arguments_of_wrong_types(arguments, options, says):
    with pytest.raises(TypeError, match=says):
        launchable(*arguments, **options)
