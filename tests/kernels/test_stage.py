"""Division of products that are too large for one launch: parts cover C once and sum over all of K."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ladder_cases import GUARD, LAYOUTS
from support.operands import layout_of

from numba_gemm.device.units import VECTOR_BYTES
from numba_gemm.gemm import small_heuristics
from numba_gemm.gemm.problem import Problem
from numba_gemm.kernels import STAGES
from numba_gemm.kernels import stage as stages
from numba_gemm.kernels.ladder import STAGES as LADDER
from numba_gemm.kernels.ladder import partitions
from numba_gemm.kernels.ladder import stage as ladder_stage
from numba_gemm.kernels.product import Batch, Product, dense
from numba_gemm.kernels.stage import Gpu, Partition, cut
from numba_gemm.kernels.tensor_core import direct_stage
from numba_gemm.kernels.tensor_core import stage as tensor_stage
from numba_gemm.kernels.tensor_core.direct_stage import DirectStage
from numba_gemm.kernels.tensor_core.stage import TensorStage
from numba_gemm.runtime.matrix import at_address

GPU = Gpu((9, 0), 132)
DIVIDED = [
    stage
    for stage in STAGES.values()
    if stage.name in LADDER or isinstance(stage, DirectStage) or not getattr(stage, "complete", True)
]
COMPLETE = [stage for stage in STAGES.values() if isinstance(stage, TensorStage) and stage.complete]


def name_of(stage):
    return stage.name


@pytest.mark.parametrize("first", [True, 1])
def test_a_variant_given_as_bool_is_the_number(first):
    """Equal variants have equal kernels, also on disk, where their `repr` counts."""
    stage = replace(STAGES["naive"])
    stage.kernel_of(stage.configs[0], first)
    found = [stage.kernel_of(stage.configs[0], variant) for variant in (True, 1)]
    assert [repr(kernel.variant) for kernel in found] == ["1", "1"]
    assert found[0] is found[1]


def numbered(place, rows, cols):
    """Return a matrix in which every element is its own number."""
    _, view = place.view(rows, cols, GUARD)
    view[...] = np.arange(rows * cols).reshape(rows, cols)
    return view


def slices_of(x, step, layout):
    """Return the slices of a numbered matrix that lie `step` bytes further on; their view is that layout."""
    part = at_address(x, x.ctypes.data + step, (layout.rows, layout.cols), (layout.row_stride, layout.col_stride))
    row, col = divmod(int(part[0, 0]), x.shape[1])
    found = slice(row, row + layout.rows), slice(col, col + layout.cols)
    assert np.array_equal(part, x[found])
    assert step == x[found].ctypes.data - x.ctypes.data
    assert layout == layout_of(x[found])
    return found


def check_pieces(pieces, a, b, c):
    """Check that parts of a product of numbered matrices are the product."""
    (m, k), n = a.shape, b.shape[1]
    terms, begun = np.zeros((m, n, k), int), np.zeros((m, n), bool)
    for piece in pieces:
        rows, cols = slices_of(c, piece.c, piece.product.c)
        assert begun[rows, cols].all() if not piece.first else not begun[rows, cols].any()
        begun[rows, cols] = True
        assert (piece.product.a.cols, piece.product.b.rows) == (piece.product.k, piece.product.k)
        if not k:
            assert piece.product.k == 0
            continue
        a_rows, a_cols = slices_of(a, piece.a, piece.product.a)
        b_rows, b_cols = slices_of(b, piece.b, piece.product.b)
        assert (a_rows, a_cols, b_cols) == (rows, b_rows, cols)
        terms[rows, cols, a_cols] += 1
    assert begun.all()
    assert (terms == 1).all()


extents = st.integers(1, 40)
layouts = st.sampled_from(sorted(LAYOUTS))


def operands_of(m, n, k, layout):
    shapes = (m, k), (k, n), (m, n)
    return [numbered(place, *shape) for place, shape in zip(LAYOUTS[layout], shapes, strict=True)]


@settings(max_examples=60)
@given(extents, extents, st.integers(0, 40), layouts, extents, extents, st.integers(1, 50))
def test_cut(m, n, k, layout, rows, cols, max_k):
    a, b, c = operands_of(m, n, k, layout)
    product = Product(*map(layout_of, (a, b, c)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "MAX_K", max_k)
        pieces = [*cut(product, rows, cols)]
    check_pieces(pieces, a, b, c)
    assert all(one.product.m <= rows and one.product.n <= cols and one.product.k <= max_k for one in pieces)
    assert len(pieces) == -(-m // rows) * -(-n // cols) * max(1, -(-k // max_k))


@pytest.mark.parametrize("stage", DIVIDED, ids=name_of)
@settings(max_examples=20)
@given(st.data())
def test_pieces(stage, data):
    config = stage.test_config or stage.configs[0]
    m = data.draw(st.integers(1, 4 * config.BM), "m")
    n, k = data.draw(st.integers(1, min(4 * config.BN, 300)), "n"), data.draw(st.integers(0, 10), "k")
    a, b, c = operands_of(m, n, k, data.draw(layouts, "layout"))
    most, max_k = data.draw(st.integers(1, 5), "MAX_GRID_Y"), data.draw(st.integers(1, 12), "MAX_K")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "MAX_K", max_k)
        patch.setattr(ladder_stage, "MAX_GRID_Y", most)
        patch.setattr(tensor_stage, "MAX_GRID_Y", most)
        patch.setattr(direct_stage, "MAX_GRID_Y", most)
        pieces = [*stage.pieces(config, Product(*map(layout_of, (a, b, c))), stage.precisions[0], GPU)]
    check_pieces(pieces, a, b, c)
    for piece in pieces:
        assert piece.product.k <= max_k
        if stage.takes_partition:
            assert (piece.product.m, piece.product.n) == (m, n)
            continue
        launches = stage.launches(config, piece.product, stage.precisions[0], None, GPU)
        assert launches.steps[-1].grid[1] <= most


@settings(max_examples=60)
@given(extents, extents, st.integers(0, 10), layouts, st.integers(1, 400))
def test_pieces_have_tiles_that_a_launch_can_count(m, n, k, layout, most):
    """Thread tiles of `small_matrices` are counted in 31 bits."""
    stage = LADDER["small_matrices"]
    a, b, c = operands_of(m, n, k, layout)
    for config, matrices in itertools.product(stage.configs, (1, 3)):
        batch = Batch((1, 1, matrices))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ladder_stage, "MAX_LINE", most)
            pieces = [*stage.pieces(config, Product(*map(layout_of, (a, b, c)), batch), "ieee", GPU)]
        check_pieces(pieces, a, b, c)
        counts = []
        for piece in pieces:
            assert piece.product.batch == batch
            tiles = -(-piece.product.m // config.BM) * -(-piece.product.n // config.BN) * matrices
            assert tiles <= max(most, matrices)
            counts.append(tiles)
        assert (len(pieces) == 1) == (sum(counts) <= max(most, matrices))


def test_an_epilogue_is_not_given_parts_of_c(monkeypatch):
    """It counts rows and columns of C, so products of too many tiles are refused, and "auto" does not choose them."""
    stage = LADDER["small_matrices"]
    monkeypatch.setattr(ladder_stage, "MAX_LINE", 5)
    monkeypatch.setattr(partitions, "MAX_LINE", 5)
    monkeypatch.setattr(small_heuristics, "MAX_LINE", 5)
    product = Product(dense("N", 8, 4), dense("N", 4, 12), dense("N", 8, 12))
    assert len([*stage.pieces(stage.configs[0], product, "ieee", GPU)]) == 4
    (piece,) = stage.pieces(stage.configs[0], product._replace(epilogue=abs), "ieee", GPU)
    with pytest.raises(ValueError, match="12 tiles of 2x4; expected 5 at most; compute parts of it, or pass another"):
        stage.launches(stage.configs[0], piece.product, "ieee", Partition(1, 1), GPU)
    wanted = Problem(8, 12, 4, 7)
    assert not small_heuristics.candidates(wanted, 0.0, everything=False)
    monkeypatch.setattr(small_heuristics, "MAX_LINE", 84)
    assert {one[2].config.name[:3] for one in small_heuristics.candidates(wanted, 0.0, everything=False)} == {"2x4"}


@pytest.mark.parametrize("name", ["short_sums", "small_matrices"])
@pytest.mark.parametrize("partition", [Partition(4, 8), Partition(2, 0), Partition(8, 8)])
def test_undivided_tiles_have_a_block_each(name, partition):
    stage = LADDER[name]
    config = stage.test_config
    rows = 8 * config.tiles * config.BM
    product = Product(dense("N", rows, 5), dense("N", 5, config.BN), dense("N", rows, config.BN))
    (step,) = stage.launches(config, product, "ieee", partition, GPU).steps
    assert step.grid == (8, 1, 1)


@pytest.mark.parametrize("stage", COMPLETE, ids=name_of)
@settings(max_examples=20)
@given(st.data())
def test_pieces_of_a_batch(stage, data):
    """Parts of a batch's matrices take a limited memory at a time, unless those of one matrix need more."""
    config, precision = stage.configs[0], data.draw(st.sampled_from(stage.precisions), "precision")
    matrices = data.draw(st.integers(1, 40), "matrices")
    steps = [data.draw(st.sampled_from([0, 4096, -4096, 4100]), "step") for _ in range(2)] + [4104]
    batch = Batch((1, 1, matrices), *((0, 0, step) for step in steps))
    product = Product(dense("N", 32, 16), dense("N", 16, 24), dense("N", 32, 24), batch)
    most, most_bytes = data.draw(st.integers(1, 12), "MAX_GRID_Y"), data.draw(st.integers(1, 1 << 19), "bytes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_stage, "MAX_GRID_Y", most)
        patch.setattr(tensor_stage, "MAX_PARTS_BYTES", most_bytes)
        pieces = [*stage.pieces(config, product, precision, GPU)]
    begin = 0
    for piece in pieces:
        size = piece.product.batch.extents[-1]
        assert (piece.a, piece.b, piece.c) == tuple(begin * step for step in steps)
        assert piece.first
        for own, whole, step in zip(piece.product[:3], product[:3], steps, strict=True):
            assert own == whole._replace(offset=begin * step % VECTOR_BYTES)
        assert piece.product.batch == batch._replace(extents=(1, 1, size))
        launches = stage.launches(config, piece.product, precision, None, GPU)
        assert size == 1 or (size <= most and (launches.scratch_bytes <= most_bytes or 0 in steps))
        assert all(step.grid[1] == size for step in launches.steps)
        begin += size
    assert begin == matrices
