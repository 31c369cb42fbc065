"""Every stage over one table: shapes around the tile edges, layouts, alpha and beta, against float64.

In the simulator a stage's smallest configuration runs half of the table in every run, and the other half in the
exhaustive set; production configurations run two ragged cases: the first one of stages that "auto" may mean in every
run, others in the exhaustive set. On a GPU every configuration runs the whole table."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.covering import covering
from support.ladder_cases import ALPHA_BETA, LAYOUTS, Case, Operand, cases, run
from support.operands import filled

from numba_gemm.gemm.ladder_rates import RATES
from numba_gemm.inspect import trace
from numba_gemm.kernels import stage as stages
from numba_gemm.kernels.ladder import STAGES, TileConfig
from numba_gemm.kernels.ladder import stage as ladder_stage
from numba_gemm.kernels.product import Layout, Product, dense
from numba_gemm.kernels.stage import IEEE, Gpu, Partition
from numba_gemm.models.accuracy import compare, reference
from numba_gemm.runtime import launch
from numba_gemm.runtime.device import synchronize
from numba_gemm.simulator import scheduler
from numba_gemm.simulator.switch import SIMULATOR

ALIGNED_LAYOUTS = ("rows", "slices of wider rows")
CONFIGS = [(stage, config) for stage in STAGES.values() for config in stage.configs]
CHOSEN = [(name, STAGES[name].configs[0]) for name, *_ in RATES]  # what "auto" may mean
TABLED = [(stage, stage.test_config) for stage in STAGES.values()] + ([] if SIMULATOR else CONFIGS)


def label(value):
    return getattr(value, "name", str(value))


@pytest.mark.parametrize("half", [pytest.param(0, marks=[pytest.mark.exhaustive] * SIMULATOR), 1])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("stage", "config"), TABLED, ids=label)
def test_table(stage, config, layout, half):
    aligned = set()
    for case in cases(config, (half,)):
        if case.layout == layout:
            outcome = run(stage, config, case)
            assert outcome.ok, f"{stage.name} {config.name}, {case}: {outcome}"
            aligned.add(outcome.aligned)
    # The table must reach the kernel for aligned operands as well as the one for any.
    assert True in aligned or layout not in ALIGNED_LAYOUTS
    assert False in aligned


@pytest.mark.parametrize(
    ("stage", "config"),
    [
        pytest.param(stage, config, marks=[pytest.mark.exhaustive] * (SIMULATOR and (stage.name, config) not in CHOSEN))
        for stage, config in CONFIGS
    ],
    ids=label,
)
def test_production_configuration_ragged(stage, config):
    m, n, k = config.BM + 1, config.BN // 2 + 3, config.BK + 3
    if config.BM > 64:
        m = config.BM - 3
    outcome = run(stage, config, Case((m, n, k), "rows", 0.5, -2.0))
    assert outcome.ok, str(outcome)
    assert not outcome.aligned
    m, n, k = config.BM // 2 + 1, max(config.BN - 4, 4), config.BK // 4 * 4 + 4
    aligned = run(stage, config, Case((m, n, k), "rows", 1.0, 0.0))
    assert aligned.ok, str(aligned)
    assert aligned.aligned


@pytest.mark.simulator
@pytest.mark.parametrize(("stage", "layout"), covering(STAGES.values(), ["rows", "one float off"]), ids=label)
def test_any_thread_order_gives_the_same_bits(stage, layout, monkeypatch):
    """A missing barrier shows as soon as threads take another turn: they then read what is not there yet, which is
    NaN."""
    config = stage.test_config
    case = Case((config.BM + 4, config.BN, 3 * max(config.BK, 4)), layout, 1.0, 1.0)
    results = []
    for seed in (None, 1, 2, 3):
        with monkeypatch.context() as patch:
            patch.setattr(launch.scheduler, "run", functools.partial(scheduler.run, seed=seed))
            outcome = run(stage, config, case)
        assert outcome.ok, f"seed {seed}: {outcome}"
        results.append(outcome.result.tobytes())
    assert len(set(results)) == 1


@pytest.mark.parametrize("stage", STAGES.values(), ids=label)
@settings(max_examples=12)
@given(st.data())
def test_any_shape(stage, data):
    config = stage.test_config
    shape = tuple(
        data.draw(st.integers(0, 2 * extent + 1), name) for name, extent in zip("mnk", (config.BM, config.BN, 8))
    )
    layout = data.draw(st.sampled_from(sorted(LAYOUTS)), "layout")
    alpha, beta = data.draw(st.sampled_from(ALPHA_BETA), "alpha, beta")
    outcome = run(stage, config, Case(shape, layout, alpha, beta), seed=data.draw(st.integers(0, 9), "seed"))
    assert outcome.ok, str(outcome)


SPECIALS = [np.nan, np.inf, -np.inf, 3.4e38, 1e-45, -0.0]


@pytest.mark.simulator
@pytest.mark.parametrize(("k", "steps"), [(4, 6), (6, 8), (8, 8)])
def test_k_steps_beyond_k_are_left_out(k, steps):
    """A k-tile of eight terms in one warp: three vectors for each k-step, and for one that is read ahead."""
    a, b, c = (np.ones(shape, np.float32) for shape in ((k, 32), (k, 32), (32, 32)))
    requests = trace("stream_k", None, None, 1, a.T, b, 0, c, config="test").requests
    reads = requests[(requests["array"] == "tiles") & (requests["op"] == "load")]
    assert len(reads) == 3 * (steps + 1)
    assert (c == k).all()


@pytest.mark.parametrize("where", ["a", "b", "both"])
@pytest.mark.parametrize("stage", STAGES.values(), ids=label)
def test_special_values_propagate_as_in_numpy(stage, where):
    m, n, k = 9, 11, 6
    a, b = filled(m, k), filled(k, n, seed=1)
    for i, value in enumerate(SPECIALS):
        if where != "b":
            a[i, i % k] = value
        if where != "a":
            b[(i + 2) % k, i + 1] = value
    c = np.full((m, n), np.nan, np.float32)
    multiply(stage, stage.test_config, a, b, c)
    expected, scale = reference(1.0, a, b)
    comparison = compare(c, expected, scale, k)
    assert comparison.ok, str(comparison)


def multiply(stage, config, a, b, c, alpha=1.0, beta=0.0):
    """C = A @ B into a NumPy array, wherever the kernels run."""
    operands = [Operand.place(x, x) for x in (a, b, c)]
    launch.launch(stage, config, alpha, operands[0].matrix, operands[1].matrix, beta, operands[2].matrix)
    synchronize()
    operands[2].fetch()


@pytest.mark.parametrize("stage", STAGES.values(), ids=label)
def test_the_same_call_gives_the_same_bits(stage):
    config = stage.test_config if SIMULATOR else stage.configs[0]
    m, n, k = (config.BM + 3, config.BN + 1, 37) if SIMULATOR else (515, 517, 1033)
    a, b = filled(m, k), filled(k, n, seed=1)
    results = set()
    for _ in range(2 if SIMULATOR else 5):
        c = np.full((m, n), np.nan, np.float32)
        multiply(stage, config, a, b, c)
        results.add(c.tobytes())
    assert len(results) == 1


def limit(monkeypatch):
    """Make launches of two blocks along y and 8 terms of a sum the largest."""
    monkeypatch.setattr(ladder_stage, "MAX_GRID_Y", 2)
    monkeypatch.setattr(stages, "MAX_K", 8)


@pytest.mark.parametrize(
    ("stage", "call"),
    covering(STAGES.values(), [(21, 0.0, False), (21, 0.5, False), (21, 0.5, True), (0, 0.5, False)]),
    ids=label,
)
def test_extents_beyond_one_launch(stage, call, monkeypatch):
    """Grids have up to 65,535 blocks along y and kernels count k in 32 bits; with smaller limits the same code divides
    small products."""
    k, beta, swapped = call
    limit(monkeypatch)
    config = stage.test_config
    # Too long along the grid's y axis; `test_stage.py` divides both axes, without kernels.
    m, n = (config.BM - 3, 2 * config.BN + 7) if stage.rows_along_x else (2 * config.BM + 5, config.BN - 3)
    case = Case((n, m, k) if swapped else (m, n, k), "slices of wider rows", 0.5, beta)
    outcome = run(stage, config, case, swapped=swapped)
    assert outcome.ok, str(outcome)


@pytest.mark.parametrize("stage", [one for one in STAGES.values() if one.schedule is None], ids=label)
def test_one_launch_has_at_most_65535_blocks_along_y(stage):
    config = stage.configs[0]
    for rows, cols in ((1, 1), (65535, 1), (1, 65535), (65536, 1), (1, 65536)):
        m, n = rows * config.BM, cols * config.BN
        product = Product(dense("N", m, 8), dense("N", 8, n), dense("N", m, n))
        pieces = [*stage.pieces(config, product, IEEE, Gpu((9, 0), 132))]
        assert (len(pieces) == 1) == (stage.grid(config, m, n)[1] <= 65535)
        for piece in pieces:
            assert stage.grid(config, piece.product.m, piece.product.n)[1] <= 65535


@pytest.mark.parametrize("stage", [one for one in STAGES.values() if one.schedule is not None], ids=label)
def test_extents_beyond_one_launch_share_their_tiles_as_they_were_told(stage, monkeypatch):
    """A partition is of all of C; only K is divided."""
    limit(monkeypatch)
    config = stage.test_config if SIMULATOR else stage.configs[0]
    m, n, k = 2 * config.BM + 5, config.BN, 21
    a, b, c = filled(m, k), filled(k, n, seed=1), np.full((m, n), np.nan, np.float32)
    placed = [Operand.place(x, x) for x in (a, b, c)]
    x, y, z = (operand.matrix for operand in placed)
    launch.launch(stage, config, 1.0, x, y, 0.0, z, partition=Partition(2, 2))
    synchronize()
    placed[2].fetch()
    comparison = compare(c, *reference(1.0, a, b), k)
    assert comparison.ok, str(comparison)


IMPOSSIBLE = [
    ("shared_tile", {"BM": 32, "BN": 16, "BK": 16}, "square tiles"),
    ("shared_tile", {"BM": 64, "BN": 64, "BK": 64, "TM": 2, "TN": 2}, "TM == TN == 1"),
    ("thread_tile_1d", {"BM": 64, "BN": 64, "BK": 16, "TM": 8}, "one element of A a thread"),
    ("thread_tile_2d", {"BM": 48, "BN": 48, "BK": 7, "TM": 4, "TN": 4}, "threads % BK == 0"),
    ("vectorized", {"BM": 40, "BN": 16, "BK": 24, "TM": 5, "TN": 4}, "copies cover A's tile"),
    ("vectorized", {"BM": 64, "BN": 96, "BK": 8, "TM": 8, "TN": 12}, "TN is 4, 8 or 16"),
    ("vectorized", {"BM": 16, "BN": 16, "BK": 2, "TM": 4, "TN": 4}, "BK % 4 == 0"),
    ("conflict_free", {"BM": 96, "BN": 64, "BK": 8, "TM": 8, "TN": 8}, "BM % 64 == 0"),
    ("double_buffered", {"BM": 64, "BN": 64, "BK": 8, "TM": 8, "TN": 8}, "slots == 2"),
    ("warp_tiled", {"BM": 32, "BN": 32, "BK": 8, "TM": 8, "TN": 4, "slots": 2, "dynamic": True}, "WM > 0"),
    ("warp_tiled", {"BM": 48, "BN": 96, "BK": 8, "TM": 12, "TN": 4, "WM": 16, "WN": 96}, "WM % TM == 0"),
    ("warp_tiled", {"BM": 256, "BN": 16, "BK": 16, "TM": 4, "TN": 16, "WM": 256, "WN": 8}, "WN % TN == 0"),
    (
        "warp_tiled",
        {"BM": 48, "BN": 256, "BK": 8, "TM": 8, "TN": 16, "WM": 16, "WN": 256, "slots": 2, "dynamic": True},
        "copies cover B's tile",
    ),
    ("warp_tiled", {"BM": 32, "BN": 32, "BK": 8, "TM": 8, "TN": 4, "WM": 32, "WN": 32, "pad": -4}, "pads not negative"),
    (
        "async_copy",
        {"BM": 24, "BN": 256, "BK": 16, "TM": 4, "TN": 16, "WM": 8, "WN": 256, "slots": 2, "dynamic": True},
        "copies cover B's tile",
    ),
    (
        "async_copy",
        {"BM": 32, "BN": 32, "BK": 8, "TM": 8, "TN": 4, "WM": 32, "WN": 32, "slots": 3, "dynamic": True},
        "two buffers",
    ),
    ("coalesced", {"BM": 64, "BN": 64, "BK": 1}, "threads <= 1024"),
    ("coalesced", {"BM": 4, "BN": 0, "BK": 1}, "every extent positive"),
]


@pytest.mark.parametrize(("name", "extents", "constraint"), IMPOSSIBLE, ids=lambda value: str(value)[:40])
def test_configurations_that_cannot_work_are_refused_by_name(name, extents, constraint):
    for fit in STAGES[name].fits:
        with pytest.raises(ValueError, match=re.escape(constraint)):
            STAGES[name].build(TileConfig(**extents), fit)


@pytest.mark.parametrize("rows", [0, 1, 2])
@pytest.mark.parametrize(("stride", "aligned"), [(32, True), (36, False), (0, True), (-48, True)])
def test_alignment_does_not_depend_on_how_many_rows_there_are(rows, stride, aligned):
    """Copies of rows outside read nothing, but their addresses must be aligned as well."""
    assert Layout(rows, 8, stride, 4).aligned is aligned


@pytest.mark.parametrize("stage", STAGES.values(), ids=label)
def test_no_terms_at_all_in_unaligned_views(stage):
    wide = np.full((0, 9), np.nan, np.float32)
    c = filled(8, 8)
    before = c.copy()
    multiply(stage, stage.test_config, np.empty((8, 0), np.float32), wide[:, :8], c, alpha=0.0, beta=0.5)
    assert np.array_equal(c, np.float32(0.5) * before)
