"""Stages that have a schedule: what their table of cases reaches, and the table on a GPU.

In the simulator `test_broken_kernels.py` runs the table, for the kernels as they are as well as for broken ones."""

from __future__ import annotations

import pytest
from support.mutants import SLICED
from support.schedule_cases import Shared, run_shared, scheduled, shared_cases, variant_of_case

from numba_gemm.device.access import ACCESSES, vectors_per_row
from numba_gemm.kernels.ladder import STAGES, partitions
from numba_gemm.kernels.ladder import stage as ladder_stage
from numba_gemm.kernels.ladder.partitions import default_partition
from numba_gemm.kernels.product import Batch, Layout, Product, dense
from numba_gemm.kernels.stage import Partition
from numba_gemm.runtime.device import get_device

STREAM_K = STAGES["stream_k"]
ALL = [(stage, config) for stage in scheduled(STAGES) for config in (stage.test_config, *stage.configs)]
LAUNCHES = 3  # on one workspace, the counters of which each must leave at 0


def label(value):
    return getattr(value, "name", str(value))


@pytest.mark.gpu
@pytest.mark.parametrize(("stage", "config"), ALL, ids=label)
def test_table(stage, config, monkeypatch):
    for group in (2, 8):
        monkeypatch.setattr(partitions, "GROUP", group)
        monkeypatch.setattr(get_device(0), "_bound", {})  # without launches of another group
        for case in shared_cases(stage, config):
            outcomes = [run_shared(stage, config, case) for _ in range(LAUNCHES)]
            for outcome in outcomes:
                assert outcome.ok, f"{stage.name} {config.name}, {case}: {outcome}"
            assert len({outcome.result.tobytes() for outcome in outcomes}) == 1, f"{case}: other bits each time"


def test_cases_reach_every_access():
    config = STREAM_K.test_config
    reached = [(case.accesses.split(), variant_of_case(config, case)) for case in shared_cases(STREAM_K, config)]
    assert all(accesses == [variant.a, variant.b] for accesses, variant in reached)
    for side in (0, 1):
        assert {accesses[side] for accesses, _ in reached} == set(ACCESSES)


PARTIAL = {  # tile and thread tile, accesses of A and B, whether C has partial vectors
    "copies of vectors": ((32, 32, 4, 4), "across4 along4", True),
    "copies of floats": ((32, 32, 4, 4), "along1 along1", True),
    "most sums": ((64, 64, 8, 8), "across4 along4", True),
    "most sums, copies of floats": ((64, 64, 8, 8), "along1 along1", False),
    "more sums": ((128, 128, 8, 16), "across4 along4", False),
}


@pytest.mark.parametrize("name", PARTIAL)
def test_vectors_that_end_beyond_rows_of_c(name):
    """Rows of C are aligned and end within a vector."""
    extents, accesses, partial = PARTIAL[name]
    (config,) = (one for one in STREAM_K.configs if (*extents, 1) == (one.BM, one.BN, one.TM, one.TN, one.lanes_k))
    for case in (case for case in shared_cases(STREAM_K, config) if case.accesses == accesses and not case.epilogue):
        assert variant_of_case(config, case).c_partial == partial
        assert config.threads > 64 or run_shared(STREAM_K, config, case).ok


@pytest.mark.parametrize(("rows", "terms", "wide"), [(160, 40, 10), (32, 32, 8), (64, 32, 4), (96, 48, 4), (64, 16, 4)])
def test_vectors_that_a_warp_loads_of_a_row(rows, terms, wide):
    """Four of a row of eight or more, if the block's warps can share the rows so; else all."""
    config = STREAM_K.test_config.replace(BM=rows, BK=terms)
    assert vectors_per_row(terms, config.threads) == wide
    assert run_shared(STREAM_K, config, Shared("along4 across4", (rows - 1, 32, 2 * terms + 4), 1)).ok


# Tiles, k-tiles and blocks; the partition.
DEFAULT_PARTITIONS = [
    (12, 10, 4, Partition(4, 12)),
    (14, 10, 4, Partition(4, 8)),
    (5, 10, 4, Partition(4, 0)),
    (3, 10, 4, Partition(4, 0)),
    (1, 3, 4, Partition(3, 0)),
    (1, 1, 1, Partition(1, 1)),
    (64, 1 << 26, 132, Partition(64, 64)),  # more k-tiles than 32 bits count
]


@pytest.mark.parametrize(("tiles", "k_tiles", "blocks", "partition"), DEFAULT_PARTITIONS)
def test_default_partition(tiles, k_tiles, blocks, partition):
    config = STREAM_K.configs[0]
    for rows, cols, matrices in ((tiles, 1, 1), (1, tiles, 1), (1, 1, tiles)):
        m, n, k = rows * config.BM, cols * config.BN, k_tiles * config.BK
        product = Product(dense("N", m, k), dense("N", k, n), dense("N", m, n), Batch((1, 1, matrices)))
        assert default_partition(config, product, blocks) == partition


COVERED = STREAM_K.configs[1]  # the loaders of all accesses cover its tiles
# Address modulo 16, rows, columns, strides in bytes of an operand of shape (mn, k); its batch steps in bytes; the
# access.
ACCESS_OF = {
    "rows": ((0, 8, 8, 32, 4), (0, 0, 0), "along4"),
    "rows backwards": ((0, 8, 8, -32, 4), (0, 0, 0), "along4"),
    "one row repeated": ((0, 8, 8, 0, 4), (0, 0, 0), "along4"),
    "rows of 6": ((0, 8, 6, 32, 4), (0, 0, 0), "along4 tails"),
    "rows of 6, address": ((8, 8, 6, 32, 4), (0, 0, 0), "along1"),
    "rows of 6 backwards": ((0, 8, 6, -32, 4), (0, 0, 0), "along4 tails"),
    "9 floats from row to row": ((0, 8, 8, 36, 4), (0, 0, 0), "along1"),
    "address of rows": ((8, 8, 8, 32, 4), (0, 0, 0), "along1"),
    "steps of rows": ((0, 8, 8, 32, 4), (1024, 512, -256), "along4"),
    "outer step of rows": ((0, 8, 8, 32, 4), (1028, 512, 256), "along1"),
    "middle step of rows": ((0, 8, 8, 32, 4), (1024, 516, 256), "along1"),
    "inner step of rows": ((0, 8, 8, 32, 4), (1024, 512, 260), "along1"),
    "columns": ((0, 8, 8, 4, 32), (0, 0, 0), "across4"),
    "6 columns": ((0, 8, 6, 4, 32), (0, 0, 0), "across4"),
    "columns of 6": ((0, 6, 8, 4, 32), (0, 0, 0), "across4 tails"),
    "columns of 6, the next one within a vector": ((0, 6, 8, 4, 16), (0, 0, 0), "across1"),
    "column of 6 repeated": ((0, 6, 8, 4, 0), (0, 0, 0), "across1"),
    "columns of 6 in reverse order": ((0, 6, 8, 4, -32), (0, 0, 0), "across1"),
    "columns of 8 in reverse order": ((0, 8, 8, 4, -32), (0, 0, 0), "across4"),
    "9 floats from column to column": ((0, 8, 8, 4, 36), (0, 0, 0), "across1"),
    "address of columns": ((4, 8, 8, 4, 32), (0, 0, 0), "across1"),
    "step of columns": ((0, 8, 8, 4, 32), (0, 0, 8), "across1"),
    "spaced": ((0, 8, 8, 64, 8), (0, 0, 0), "any"),
    "columns backwards": ((0, 8, 8, 32, -4), (0, 0, 0), "any"),
}
# The same for C; True if its elements are stored four at a time.
ALIGNED = {
    "rows": ((0, 8, 8, 32, 4), (0, 0, 0), True),
    "rows backwards": ((0, 8, 8, -32, 4), (0, 0, 0), True),
    "rows of 6": ((0, 8, 6, 32, 4), (0, 0, 0), False),
    "9 floats from row to row": ((0, 8, 8, 36, 4), (0, 0, 0), False),
    "address": ((8, 8, 8, 32, 4), (0, 0, 0), False),
    "columns": ((0, 8, 8, 4, 32), (0, 0, 0), False),
    "spaced": ((0, 8, 8, 64, 8), (0, 0, 0), False),
    "steps": ((0, 8, 8, 32, 4), (1024, 512, -256), True),
    "outer step": ((0, 8, 8, 32, 4), (1028, 512, 256), False),
    "middle step": ((0, 8, 8, 32, 4), (1024, 516, 256), False),
    "inner step": ((0, 8, 8, 32, 4), (1024, 512, 260), False),
}
ROWS, STILL = (0, 8, 8, 32, 4), (0, 0, 0)


def placed(offset, rows, cols, row_stride, col_stride):
    return Layout(rows, cols, row_stride, col_stride, offset)


def variant_of(a, b, c, *steps):
    """Return the variant for A of shape (m, k), B of shape (n, k), C, and their batch steps."""
    product = Product(placed(*a), placed(*b).transposed, placed(*c), Batch((2, 2, 2), *steps))
    variant = ladder_stage.variant_of(COVERED, product, "ieee")
    assert STREAM_K.variant(COVERED, product) == variant
    assert STREAM_K.kernel(COVERED, product) is STREAM_K.kernel_of(COVERED, variant)
    return variant


@pytest.mark.parametrize("case", ACCESS_OF)
def test_access(case):
    """Vector accesses need 16-byte boundaries in every matrix of the batch, and room behind columns with tails."""
    place, steps, access = ACCESS_OF[case]
    access, tails = access.split()[0], access.endswith("tails")
    of_a, of_b = variant_of(place, ROWS, ROWS, steps, STILL, STILL), variant_of(ROWS, place, ROWS, STILL, steps, STILL)
    assert (of_a.a, of_a.b, of_a.c_aligned, of_a.tails) == (access, "along4", True, tails)
    assert (of_b.a, of_b.b, of_b.c_aligned, of_b.tails) == ("along4", access, True, tails)


@pytest.mark.parametrize("layouts", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("config", [config for config in STREAM_K.configs if config.BN > 16], ids=label)
def test_which_tiles_are_copied_float_by_float(config, layouts):
    """Vectors of two operands along k take too many registers of small thread tiles."""
    extents = {"N": (32, 4), "T": (4, 32)}
    a, b = (Layout(8, 8, *extents[stored]) for stored in layouts)
    variant = ladder_stage.variant_of(config, Product(a, b, Layout(8, 8, 32, 4)), "ieee")
    by_floats = (config.BM, config.BN, config.lanes_k) in ((32, 64, 1), (64, 32, 1)) and layouts == "NT"
    assert (variant.a[-1], variant.b[-1]) == (("1", "1") if by_floats else ("4", "4"))


@pytest.mark.parametrize(
    ("changes", "constraint"),
    [
        ({"lanes_k": 3}, "slices are a power of two"),
        ({"lanes_k": 16}, "a slice has two pairs of k-steps, or more"),
        ({"BK": 20}, "a slice has two pairs of k-steps, or more"),
        ({"BM": 64, "BN": 64, "BK": 16, "TN": 8, "WN": 64}, "sums of slices fit into the tiles"),
        ({}, "compensated sums: BN >= 32, at most 32 per thread, one slice"),
    ],
)
def test_slices_that_cannot_work_are_refused_by_name(changes, constraint):
    variant = ladder_stage.Variant("along1", "along1", False, compensated=not changes)
    with pytest.raises(ValueError, match=constraint):
        STREAM_K.build(SLICED.replace(**changes), variant)


@pytest.mark.parametrize("case", ALIGNED)
def test_vector_stores(case):
    place, steps, aligned = ALIGNED[case]
    variant = variant_of(ROWS, ROWS, place, STILL, STILL, steps)
    assert (variant.a, variant.b, variant.c_aligned, variant.c_partial) == ("along4", "along4", aligned, False)


@pytest.mark.parametrize(("offset", "loads"), [(0, "along4"), (4, "along1")])
@pytest.mark.parametrize("case", ALIGNED)
def test_vector_stores_of_small_tiles(case, offset, loads):
    """One kernel stores whole and partial vectors beside loads of floats; with an epilogue, floats are stored."""
    (config,) = filter(ladder_stage.stores_directly, STREAM_K.configs)
    place, steps, aligned = ALIGNED[case]
    product = Product(
        placed(offset, 8, 8, 32, 4), placed(*ROWS).transposed, placed(*place), Batch((2, 2, 2), STILL, STILL, steps)
    )
    variant, floats, rows = ladder_stage.variant_of(config, product, "ieee"), offset > 0, case == "rows of 6"
    stores = aligned or rows
    assert (variant.a, variant.c_aligned, variant.c_partial) == (loads, stores, stores and (rows or floats))
    with_epilogue = ladder_stage.variant_of(config, product._replace(epilogue=abs), "ieee")
    assert (with_epilogue.c_aligned, with_epilogue.c_partial) == (aligned and not floats, False)


@pytest.mark.parametrize("case", [case for case in ALIGNED if "step" not in case])
def test_aligned_variant_of_unscheduled_stages(case):
    place, _, aligned = ALIGNED[case]
    for which in range(3):
        product = Product(*(placed(*(place if i == which else ROWS)) for i in range(3)))
        assert STAGES["vectorized"].variant(COVERED, product) == (ladder_stage.ALIGNED if aligned else ladder_stage.ANY)


@pytest.mark.parametrize("extra", [(0, 0, 0), (4, 0, 0), (0, 4, 0), (0, 0, 4)])
def test_whole_tiles_of_unscheduled_stages(extra):
    stage = STAGES["vectorized"]
    config = stage.configs[0]
    m, n, k = (extent + more for extent, more in zip((2 * config.BM, config.BN, 3 * config.BK), extra))
    product = Product(dense("N", m, k), dense("N", k, n), dense("N", m, n))
    assert stage.variant(config, product) == (ladder_stage.ALIGNED if any(extra) else ladder_stage.WHOLE)
    assert STAGES["async_copy"].variant(STAGES["async_copy"].configs[0], product) == ladder_stage.ALIGNED
    empty = Product(dense("N", m, 0), dense("N", 0, n), dense("N", m, n))
    assert stage.variant(config, empty) != ladder_stage.WHOLE
