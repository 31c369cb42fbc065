"""The policy behind stage="auto": it must fit the device, and be sensible where sense can be stated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.problems import PROPERTIES

from numba_gemm.gemm.heuristics import Problem, best, choose, named, problem, ranked
from numba_gemm.gemm.ladder_heuristics import rated
from numba_gemm.gemm.ladder_rates import rate_of
from numba_gemm.gemm.precision import PRECISIONS
from numba_gemm.gemm.stage_names import resolve
from numba_gemm.kernels.ladder import STAGES
from numba_gemm.kernels.ladder.partitions import partition_layout
from numba_gemm.kernels.product import ONE, Batch, Layout, Product
from numba_gemm.kernels.tensor_core import TENSOR_STAGES
from numba_gemm.models.roofline import FP32_LANES_PER_SM
from numba_gemm.runtime.device import SIMULATED_DEVICE

extents = st.one_of(st.integers(1, 300), st.integers(1, 20_000))
ccs = st.sampled_from(sorted(cc for cc in FP32_LANES_PER_SM if cc >= (7, 5)))
problems = st.builds(
    lambda **given: Problem(**given),
    m=extents,
    n=extents,
    k=extents,
    cc=ccs,
    sm_count=st.integers(1, 200),
    **PROPERTIES,
)


def tiles_of(config, wanted):
    return -(-wanted.m // config.BM) * -(-wanted.n // config.BN) * wanted.matrices


@given(problems)
def test_choice_runs_on_the_device(wanted):
    choice = choose(wanted)
    assert STAGES[choice.stage.name] is choice.stage
    assert choice.config in choice.stage.configs
    assert wanted.cc >= choice.stage.min_cc
    assert choose(wanted) == choice
    assert not (choice.swapped and wanted.epilogue), "an epilogue's rows and columns would change places"
    assert (choice.partition is not None) == choice.stage.takes_partition
    if choice.partition is not None:
        turned = wanted.swapped if choice.swapped else wanted
        batch = Batch((wanted.matrices, 1, 1))
        made = partition_layout(choice.config, turned.m, turned.n, turned.k, batch, choice.partition)
        assert made.grid[0] >= 1
        floats = 2 * max(choice.config.BM * choice.config.BN, choice.config.threads)  # that a block publishes
        most = max(tiles_of(choice.config, turned), made.grid[0])
        assert made.counters <= (made.grid[0] * floats if choice.stage.name == "thin" else most)


@given(problems)
def test_choice_is_the_fastest_predicted(wanted):
    found = ranked(wanted)
    assert choose(wanted).clocks == min(one.clocks for one in found)
    assert best(wanted).clocks == pytest.approx(found[0].clocks, rel=5e-3), "one that is left out cannot be the fastest"
    small = STAGES["small_matrices"]
    able = {(stage.name, config) for stage, config in rated(wanted.cc)}
    if wanted.matrices > 1 and small.runs_on(wanted.cc):
        able |= {(small.name, config) for config in small.configs}
    assert {(one.stage.name, one.config) for one in found} <= able


@pytest.mark.parametrize("shape", [(8191, 8190, 1), (8191, 8190, 5), (5000, 70, 1000), (33, 20_000, 33)])
@pytest.mark.parametrize("bandwidth", [4.8e12, 3e11])
@pytest.mark.parametrize("by_columns", [False, True])
def test_rounding_extents_changes_no_choice(shape, bandwidth, by_columns):
    """Neither where bytes decide nor where multiply-adds do."""
    wanted = Problem(*shape, memory_bandwidth=bandwidth, by_columns=by_columns)
    assert best(wanted) == ranked(wanted)[0]


@pytest.mark.parametrize("k", [256, 1024, 8192])
def test_large_products_run_near_the_best_rate(k):
    choice = choose(Problem(16384, 16384, k))
    highest = max(rate_of(stage, config).efficiency for stage, config in rated((9, 0)))
    assert rate_of(choice.stage, choice.config).efficiency >= 0.95 * highest


@pytest.mark.parametrize("size", [1536, 2048, 4096, 8192, 16384])
def test_large_squares_take_the_widest_tiles(size):
    """Tiles of 256x128 take 1.7 % longer there, if A and B are stored by rows (H200)."""
    for k in (1024, size):
        config = choose(Problem(size, size, k)).config
        assert (config.BM, config.BN) == (128, 256)


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 7, 3), (16, 16, 64), (40, 30, 100)])
def test_tiny_products_take_small_tiles(shape):
    """They end sooner, and in the simulator a small block is a quick one."""
    config = choose(Problem(*shape)).config
    assert config.BM * config.BN <= 32 * 64


@pytest.mark.parametrize("extents", [(32, 32), (512, 512), (4096, 1)])
def test_shares_of_the_longest_sums_can_be_counted(extents):
    wanted = Problem(*extents, 1 << 30)
    for choice in ranked(wanted):
        turned = wanted.swapped if choice.swapped else wanted
        assert partition_layout(choice.config, turned.m, turned.n, turned.k, ONE, choice.partition).grid[0] >= 1


@pytest.mark.parametrize("size", [128, 256, 512])
def test_small_products_occupy_most_multiprocessors(size):
    choice = choose(Problem(size, size, 4096))
    assert choice.partition.blocks >= 0.8 * 132
    assert choice.partition.whole == 0, "few tiles have to be divided"


@pytest.mark.parametrize("size", [2048, 4096, 8192, 16384])
def test_large_products_are_not_divided_where_it_does_not_pay(size):
    choice = choose(Problem(size, size, 1024))
    tiles = tiles_of(choice.config, Problem(size, size, 1024))
    assert choice.partition.whole >= tiles - 3 * 132
    assert tiles % 132 == 0 or choice.partition.whole < tiles or size == 2048


@pytest.mark.parametrize("columns", [1, 4, 16])
def test_thin_products_take_thin_tiles(columns):
    along = choose(Problem(16384, columns, 16384))
    assert along.config.BN <= 16
    assert not along.swapped
    turned = choose(Problem(columns, 16384, 16384))
    assert turned.swapped
    assert turned.config.BN <= 16
    assert along.config != turned.config or columns > 1, "A has another contiguous axis"


@pytest.mark.parametrize("shape", [(4, 1, 8), (92, 1, 10), (1, 1856, 5), (165, 4, 5), (64, 64, 4)])
def test_few_elements_of_short_sums_are_computed_one_per_thread(shape):
    assert choose(Problem(*shape)).stage is STAGES["coalesced"]


# Products of which `stream_k` was measured to take 1.1 to 1.6 times as long, on an H100 or an H200.
@pytest.mark.parametrize("shape", [(3363, 1103, 3), (17315, 130, 5), (9171, 86, 4), (884, 1964, 7), (300, 300, 32)])
def test_short_sums_have_a_stage_of_their_own(shape):
    assert choose(Problem(*shape)).stage is STAGES["short_sums"]
    longer = ranked(Problem(*shape[:2], 33))
    assert not any(one.stage is STAGES["short_sums"] for one in longer)


# Batches of three with an epilogue. `stream_k` took 1.16 times as long at the first on an H200, 0.91 times at the last.
@pytest.mark.parametrize(
    ("shape", "stage"),
    [
        *(((9171, 86, 4), "short_sums"), ((884, 1964, 7), "short_sums"), ((300, 300, 32), "short_sums")),
        ((17315, 130, 5), "stream_k"),
    ],
)
def test_short_sums_of_batches_with_epilogues(shape, stage):
    assert choose(Problem(*shape)._replace(matrices=3, epilogue=True)).stage is STAGES[stage]


@pytest.mark.parametrize(
    "other",
    [{"k": 25}, {"m": 4096}, {"matrices": 2}, {"epilogue": True}, {"precision": "bf16x6"}],
    ids=["longer sums", "many elements", "batch", "epilogue", "precision"],
)
def test_other_products_are_not_computed_one_element_per_thread(other):
    wanted = Problem(64, 64, 4)
    assert choose(wanted).stage is STAGES["coalesced"]
    assert not any(one.stage is STAGES["coalesced"] for one in ranked(wanted._replace(**other)))


# Batches of which other stages were measured to take 1.1 to 40 times as long on an H200, and of which they take less.
@pytest.mark.parametrize(
    ("batch", "tile"),
    [
        *(((65536, 4, 4, 4), "2x4"), ((65536, 8, 8, 8), "2x4"), ((23266, 16, 16, 16), "2x4")),
        *(((100000, 3, 3, 3), "4x1"), ((3312, 7, 6, 1), "4x1"), ((1001, 2, 3, 2), "1x1")),
        *(((178, 28, 28, 28), ""), ((435, 56, 56, 56), ""), ((1790, 51, 51, 51), ""), ((1, 8, 8, 8), "")),
    ],
)
def test_batches_of_small_matrices_share_blocks(batch, tile):
    matrices, *extents = batch
    aligned = all(extent % 4 == 0 for extent in extents[1:])
    wanted = Problem(*extents, matrices, vectors=aligned, a_vectors=aligned, b_vectors=aligned, c_vectors=aligned)
    choice = choose(wanted)
    assert (choice.stage is STAGES["small_matrices"]) == bool(tile)
    if tile:
        assert choice.config.name.startswith(f"{tile}x4-")
        m, n, _ = extents
        tiles = matrices * -(-m // choice.config.BM) * -(-n // choice.config.BN)
        assert choice.partition == (-(-tiles // 256), tiles)
        assert f"{tiles} tiles of {tile} on 132 SMs, 256 per block ({choice.partition.blocks})" in choice.reason
        assert best(wanted) == choice._replace(reason="")


@pytest.mark.parametrize("other", [{"n": 6}, {"c_vectors": False}, {"b_vectors": False}, {"by_columns": True, "m": 6}])
def test_four_columns_per_thread_are_for_vectors(other):
    wanted = Problem(8, 8, 8, 10_000)
    four = [one for one in ranked(wanted) if one.config.tiles > 1 and one.config.TN == 4]
    assert [one.swapped for one in four] == [False]
    assert not [one for one in ranked(wanted._replace(**other)) if one.config.tiles > 1 and one.config.TN == 4]


def test_four_columns_per_thread_of_a_column_major_c_are_those_of_its_transpose():
    wanted = Problem(8, 8, 8, 10_000, by_columns=True, c_vectors=False)
    for sectors in (True, False):
        found = ranked(wanted._replace(c_sectors=sectors))
        assert [one.swapped for one in found if one.config.tiles > 1 and one.config.TN == 4] == [True] * sectors


# Batches whose sums are shared by lanes, of which other stages were measured to take 1.4 to 1.6 times as long.
@pytest.mark.parametrize(
    ("batch", "tile"),
    [
        *(((14317, 2, 5, 469), "4x1x32-4x1-k8"), ((8670, 1, 9, 227), "4x1x32-4x1-k8")),
        *(((883, 1, 1, 239), "1x1x128-1x1-k32"), ((2150, 2, 1, 96), "1x1x128-1x1-k32")),
    ],
)
def test_lanes_share_tiles_of_longer_sums(batch, tile):
    matrices, *extents = batch
    wanted = Problem(*extents, matrices, a_along=True, b_along=True, aligned=False, vectors=False)
    wanted = wanted._replace(a_vectors=False, b_vectors=False, c_vectors=False)
    choice = best(wanted)
    assert choice.stage is STAGES["small_matrices"]
    assert choice.config.name.startswith(f"{tile}-")
    tiles = matrices * min(-(-m // choice.config.BM) * n for m, n in (extents[:2], extents[1::-1]))
    assert choice.partition == (-(-tiles // choice.config.tiles), tiles)
    assert choice == choose(wanted)._replace(reason="")


@pytest.mark.parametrize(
    ("batch", "b_along", "lanes"),
    [
        ((8, 8, 128), False, {1, 8, 32}),
        ((8, 8, 129), False, {8, 32}),
        ((8, 8, 2048), False, {8, 32}),
        ((32, 32, 64), False, {1, 8, 32}),
        ((33, 32, 64), False, {1}),
        ((8, 9, 113), True, {1, 8, 32}),  # the transpose of 8x9 has a B of 8 columns
        ((9, 9, 114), True, {8, 32}),
    ],
)
def test_threads_have_tiles_of_short_sums_and_lanes_those_of_small_matrices(batch, b_along, lanes):
    wanted = Problem(*batch, 1000, a_along=b_along, b_along=b_along)
    if b_along:  # then k is contiguous in the B of the transpose, too
        assert wanted.swapped.b_along
    assert {one.config.lanes_k for one in ranked(wanted) if one.stage is STAGES["small_matrices"]} == lanes


@pytest.mark.parametrize("other", [{"k": 2049}, {"m": 1025, "n": 8}, {"matrices": 1}, {"cc": (7, 5)}])
def test_other_batches_have_blocks_of_their_own(other):
    assert any(one.stage is STAGES["small_matrices"] for one in ranked(Problem(8, 8, 8, 10_000)))
    assert not any(one.stage is STAGES["small_matrices"] for one in ranked(Problem(8, 8, 8, 10_000)._replace(**other)))


@pytest.mark.parametrize("along", [False, True])
def test_a_named_stage_takes_any_product(along):
    """The limits are for "auto"; a column-major C is computed as its transpose, whose rows are then contiguous."""
    stage = STAGES["small_matrices"]
    for wanted in (Problem(2000, 300, 500), Problem(70, 90, 300, 50), Problem(3, 5, 7, 2, by_columns=True)):
        found = ranked(wanted._replace(b_along=along), stage)
        assert {one.stage for one in found} == {stage}
        assert {one.swapped for one in found} == {False, True}
    with_epilogue = ranked(Problem(8, 8, 8, 9, epilogue=True), stage)
    assert {one.swapped for one in with_epilogue} == {False}, "an epilogue counts rows and columns of C"


def test_fewer_multiprocessors_allow_larger_tiles():
    sizes = [choose(Problem(512, 512, 1024, sm_count=count)).config for count in (132, 4)]
    assert sizes[0].BM * sizes[0].BN < sizes[1].BM * sizes[1].BN


def test_a_column_major_c_is_computed_as_its_transpose():
    found = ranked(Problem(4096, 4096, 4096, aligned=False, by_columns=True))
    assert {one.swapped for one in found} == {False, True}


def test_short_sums_are_written_along_the_rows_of_c():
    """Each float of a transposed C is written for itself, which takes longer than the other bytes of short sums."""
    wanted = Problem(16851, 29, 20, a_along=True, sm_count=132, clock_hz=1980e6, memory_bandwidth=4.8e12)
    assert [best(one).swapped for one in (wanted, wanted._replace(by_columns=True))] == [False, True]


def test_a_problem_is_read_from_its_operands():
    gpu = SIMULATED_DEVICE
    a, b, c = Layout(8, 12, 48, 4), Layout(12, 16, 4, 48), Layout(8, 16, 4, 32)
    wanted = problem(Product(a, b, c, Batch((5, 1, 1), (384, 0, 0), (0, 0, 0), (512, 0, 0))), gpu)
    assert (wanted.m, wanted.n, wanted.k, wanted.matrices) == (8, 16, 12, 5)
    assert (wanted.a_along, wanted.b_along, wanted.by_columns) == (True, True, True)
    assert not wanted.aligned
    assert wanted.vectors
    assert not problem(Product(a, b, c, Batch((5, 1, 1), (388, 0, 0))), gpu).vectors
    assert (wanted.swapped.m, wanted.swapped.n, wanted.swapped.a_along, wanted.swapped.b_along) == (16, 8, True, True)
    by_rows = problem(Product(a, Layout(12, 16, 64, 4), c), gpu)
    assert (by_rows.swapped.a_along, by_rows.swapped.b_along) == (False, True)
    assert wanted.by_columns != wanted.swapped.by_columns
    assert problem(Product(a, b, c, epilogue=abs), gpu).epilogue
    assert not wanted.epilogue
    assert wanted.swapped.swapped == wanted
    assert problem(Product(a, Layout(12, 16, 64, 4), Layout(8, 16, 64, 4)), gpu).aligned
    assert not problem(Product(a._replace(offset=4), Layout(12, 16, 64, 4), Layout(8, 16, 64, 4)), gpu).aligned


@pytest.mark.parametrize("layouts", ["NN", "NT", "TN", "TT", "1N"])
def test_vectors_of_aligned_rows_of_any_extent_are_copied(layouts):
    """A is 301x77 and B 77x3, in rows, or columns, that are whole vectors apart; or A at an odd address."""
    a = {"N": Layout(301, 77, 320, 4), "T": Layout(301, 77, 4, 1216), "1": Layout(301, 77, 320, 4, 4)}[layouts[0]]
    b = {"N": Layout(77, 3, 16, 4), "T": Layout(77, 3, 4, 320)}[layouts[1]]
    product = Product(a, b, Layout(301, 3, 12, 4))
    wanted = problem(product, SIMULATED_DEVICE)
    assert (wanted.vectors, wanted.partial_vectors) == (False, layouts != "1N")
    for name in ("thin", "stream_k"):
        wide = [config for config in STAGES[name].configs if config.BN > 16 and config.TM * config.TN != 32]
        variants = [STAGES[name].variant(config, product) for config in wide]
        assert {one.a[-1] for one in variants} == {"4" if wanted.partial_vectors else "1"}, name


@pytest.mark.parametrize("name", STAGES)
def test_a_named_stage_is_run(name):
    choice = named(name, Problem(300, 200, 100))
    assert choice.stage is STAGES[name]
    assert choice.config in choice.stage.configs
    assert name in choice.reason
    if choice.stage.takes_variants:
        assert choice.clocks == min(one.clocks for one in ranked(Problem(300, 200, 100), choice.stage))
    else:
        assert choice.config is choice.stage.configs[0]


def test_reasons_are_readable():
    assert "divided among" in choose(Problem(128, 128, 4096)).reason
    assert "one block each" in choose(Problem(2048, 2048, 1024)).reason
    assert "transpose" in choose(Problem(1, 16384, 16384)).reason


@pytest.mark.parametrize("name", STAGES)
def test_resolve_finds_every_stage(name):
    assert resolve(name, (12, 0)) is STAGES[name]


@pytest.mark.parametrize("name", ["", "auto", "Naive", "warp-tiled"])
def test_resolve_lists_the_known(name):
    with pytest.raises(ValueError) as caught:
        resolve(name, (9, 0))
    message = str(caught.value)
    assert message.startswith(f"stage is {name!r}; expected")
    assert all(known in message for known in STAGES)


@pytest.mark.parametrize("name", [name for name, stage in STAGES.items() if stage.min_cc > (7, 5)])
def test_resolve_refuses_what_the_gpu_cannot_run(name):
    with pytest.raises(ValueError) as caught:
        resolve(name, (7, 5))
    message = str(caught.value)
    assert f"{name!r}, which needs compute capability" in message
    assert "has 7.5" in message
    assert "warp_tiled" in message.split("pass")[1]
    assert name not in message.split("pass")[1]


# ------------------------------------------------------------------------------------------------ the other precisions


@pytest.mark.parametrize("tma", ["", "NN", "NT", "TT"])
@pytest.mark.parametrize("name", [name for name, stage in TENSOR_STAGES.items() if "tf32" in stage.precisions])
def test_tensor_core_stage_by_name(name, tma):
    """A stage that decomposes its operands says so even if tensor maps could describe them."""
    wanted = Problem(300, 1000, 400, precision="tf32", tma=tma)
    if name == "tf32_tma" and not tma:
        with pytest.raises(ValueError, match="tensor maps cannot describe these operands"):
            named(name, wanted)
        return
    choice = named(name, wanted)
    assert choice.stage is TENSOR_STAGES[name]
    assert (choice.precision, choice.partition, choice.swapped) == ("tf32", None, False)
    if name == "fused_decomposition":  # of which the model knows nothing
        assert choice.reason == f"stage {name} was asked for"
        return
    rows, cols = (1000, 300) if name == "tf32_tma" and tma == "NN" else (300, 1000)
    tiles = -(-rows // choice.config.BM) * -(-cols // choice.config.BN)
    assert f"; {tiles} tiles of {choice.config.BM}x{choice.config.BN} on 132 SMs" in choice.reason
    assert ("as they are" if name == "tf32_tma" else "decomposed first") in choice.reason


@pytest.mark.parametrize("stage", [*STAGES.values(), *TENSOR_STAGES.values()], ids=lambda stage: stage.name)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_stage_and_precision_have_to_agree(stage, precision):
    wanted = Problem(300, 200, 1000, precision=precision, tma="NN" if precision == "tf32" else "")
    if precision in stage.precisions:
        assert named(stage.name, wanted).precision == precision
        return
    with pytest.raises(ValueError) as caught:
        named(stage.name, wanted)
    says = f"precision is {precision!r} and stage is {stage.name!r}, which computes in {', '.join(stage.precisions)}; "
    assert str(caught.value).startswith(says)
