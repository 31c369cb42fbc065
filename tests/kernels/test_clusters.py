"""Clusters: which blocks share copies, and that they have the same columns of C."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from numba_gemm.kernels.product import Product, dense
from numba_gemm.kernels.stage import Gpu, Partition
from numba_gemm.kernels.step import Slot
from numba_gemm.kernels.tensor_core import TENSOR_STAGES
from numba_gemm.kernels.tensor_core.epilogue import place
from numba_gemm.kernels.tensor_core.split_k import share
from numba_gemm.kernels.tensor_core.stage import blocks_per_cluster
from numba_gemm.kernels.tensor_core.tma_stage import PAIRED_ROWS, rows_in_pairs, tma_operands
from numba_gemm.simulator.switch import SIMULATOR

PERSISTENT, TMA = TENSOR_STAGES["persistent"], TENSOR_STAGES["tf32_tma"]
GPU = Gpu((9, 0), 132)


@pytest.mark.skipif(not SIMULATOR, reason="device functions are functions of Python here")
@pytest.mark.parametrize(("rows", "shares"), [(2, 1), (6, 1), (8, 1), (10, 1), (34, 1), (2, 3), (6, 5), (10, 2)])
def test_neighbouring_blocks_have_the_same_columns_and_terms(rows, shares):
    """Also those of divided sums, and in the last group of rows, which may be lower than the others."""
    k_slots, cols = np.uint32(23), np.uint32(3)
    all_rows, own_rows = np.uint32(rows * shares), np.uint32(rows)
    assert blocks_per_cluster(rows, rows * shares * 3) == 2
    seen = set()
    for first in range(0, rows * shares * 3, 2):
        (upper, left), (lower, right) = (place(np.uint32(first + i), all_rows, cols) for i in range(2))
        assert (lower, right) == (upper + 1, left)
        (_, *terms), (_, *others) = (share(row, all_rows, own_rows, k_slots) for row in (upper, lower))
        assert terms == others
        seen |= {(int(upper), int(left)), (int(lower), int(right))}
    assert seen == set(itertools.product(range(rows * shares), range(3)))


@pytest.mark.parametrize(("rows", "blocks", "expected"), [(4, 8, 2), (3, 6, 1), (4, 131, 1), (1, 2, 1)])
def test_clusters_of_two_where_rows_and_blocks_are_even(rows, blocks, expected):
    assert blocks_per_cluster(rows, blocks) == expected


@pytest.mark.parametrize("m", [128, 256, 384, 512])
@pytest.mark.parametrize("precision", ["bf16", "bf16x6", "fp16x3"])
def test_blocks_of_persistent_share_copies(m, precision):
    steps = PERSISTENT.launches(PERSISTENT.configs[0], product_of(m, 1000, 600), precision, None, GPU).steps
    assert [step.cluster for step in steps] == [*[1] * (len(steps) - 1), 2 if m % 256 == 0 else 1]
    odd = PERSISTENT.launches(PERSISTENT.configs[0], product_of(4096, 4096, 64), precision, None, Gpu((9, 0), 131))
    assert odd.steps[-1].cluster == 1


def test_no_other_stage_launches_clusters():
    for name in ("producer_consumer", "fresh_sums", "rows_in_registers", "warp_mma"):
        stage = TENSOR_STAGES[name]
        precision = "bf16x6" if "bf16x6" in stage.precisions else stage.precisions[0]
        launches = stage.launches(stage.configs[0], product_of(512, 512, 512), precision, None, GPU)
        assert {step.cluster for step in launches.steps} == {1}, name


@pytest.mark.parametrize(
    ("m", "n", "blocks", "whole", "clusters"),
    [
        (256, 128, 8, 0, (2,)),
        (384, 128, 9, 0, (1,)),
        (17 * 128, 8 * 128, 132, 128, (2, 1)),  # 16 rows of tiles are whole, and the last one is divided
        (18 * 128, 8 * 128, 132, 128, (2, 2)),
        (17 * 128, 9 * 128, 153, 136, (1, 1)),  # 8 of 9 columns
    ],
)
def test_clusters_of_divided_sums(m, n, blocks, whole, clusters):
    partition = Partition(blocks, whole)
    launches = PERSISTENT.launches(PERSISTENT.configs[0], product_of(m, n, 4096), "bf16x6", partition, GPU)
    multiplying = [step for step in launches.steps if step.kernel.name.startswith("persistent")]
    assert tuple(step.cluster for step in multiplying) == clusters


@pytest.mark.parametrize("rows", [1, 2, 7, 8, PAIRED_ROWS - 1, PAIRED_ROWS, PAIRED_ROWS + 1, 65])
def test_many_rows_of_tiles_are_made_even_where_shared_copies_save_requests(rows):
    """A product by tensor maps whose operands' rows begin within sectors; and one whose rows begin at sectors."""
    config, m, n = TMA.configs[0], 128 * rows - 5, 700
    for k, expected, cluster in (
        (128, rows, 1),
        (132, rows + rows % 2, 2) if rows % 2 == 0 or rows >= PAIRED_ROWS else (132, rows, 1),
    ):
        product = Product(dense("N", m, k), dense("T", k, n), dense("N", m, n))
        launches = TMA.launches(config, product, "tf32", None, GPU)
        (step,), (_, of_v) = launches.steps, launches.maps
        blocks = min(3 * expected, 132)
        assert rows_in_pairs(config, tma_operands(product)) == (expected if cluster > 1 else 0)
        assert step.kernel is TMA.kernel(config, product)
        assert step.kernel.variant.pairs == (cluster > 1)
        assert (step.grid, step.cluster) == ((blocks, 1, 1), cluster)
        assert of_v.slot == Slot.B
        assert of_v.box == (config.BN // step.cluster, 32)
        tiles = step.arguments[-1].words[-1]
        assert (tiles % blocks, 3 * expected <= tiles < 3 * expected + blocks) == (0, True)


@pytest.mark.parametrize(("m", "k", "cluster"), [(2052, 128, 1), (2048, 132, 2), (2052, 132, 2), (2048, 128, 1)])
def test_only_copies_of_v_are_shared(m, k, cluster):
    """By columns, rows of U's tensor map have m floats, and those of V's k."""
    product = Product(dense("T", m, k), dense("T", k, 512), dense("N", m, 512))
    found = tma_operands(product)
    assert (found.layout, found.u_sectors, found.v_sectors) == ("TT", m % 8 == 0, k % 8 == 0)
    (step,) = TMA.launches(TMA.configs[0], product, "tf32", None, GPU).steps
    assert (step.cluster, step.kernel.variant.pairs) == (cluster, cluster > 1)


def test_an_odd_number_of_multiprocessors_forms_no_clusters():
    """The tiles beyond C, which would make rows even, are then not computed either."""
    config, m, n, k = TMA.configs[0], 128 * 17, 512, 132
    product = Product(dense("N", m, k), dense("T", k, n), dense("N", m, n))
    for multiprocessors, cluster, blocks in ((31, 1, 31), (32, 2, 32), (35, 1, 34), (36, 2, 36)):
        (step,) = TMA.launches(config, product, "tf32", None, Gpu((9, 0), multiprocessors)).steps
        assert (step.cluster, step.grid[0]) == (cluster, blocks)


def product_of(m, n, k):
    return Product(dense("N", m, k), dense("N", k, n), dense("N", m, n))
