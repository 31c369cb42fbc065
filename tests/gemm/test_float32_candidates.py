"""bf16x6 by float32 multiply-adds: the products for which they are chosen, and with which kernels."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.problems import PROPERTIES

from numba_gemm.gemm import precision as precisions
from numba_gemm.gemm.cost_model import Costs
from numba_gemm.gemm.explain import explain_shape
from numba_gemm.gemm.fp32_auto import resolved
from numba_gemm.gemm.heuristics import FUSED, LESS_ACCURATE, Problem, best, choose, named, problem, ranked
from numba_gemm.gemm.ladder_heuristics import considered_of
from numba_gemm.gemm.ladder_rates import RATES, rate_of
from numba_gemm.gemm.precompile import model_of
from numba_gemm.kernels.ladder import STAGES
from numba_gemm.kernels.ladder.stage import FEW_TERMS, LadderStage, compensates
from numba_gemm.kernels.product import Batch, Layout, Product, dense
from numba_gemm.kernels.stage import Partition
from numba_gemm.kernels.tensor_core import TENSOR_PRECISIONS
from numba_gemm.kernels.tensor_core.stage import TensorStage
from numba_gemm.models.accuracy import tensor_bound

H200 = model_of((9, 0))
H100 = dataclasses.replace(H200, memory_bandwidth=3.35e12)
extents = st.one_of(st.integers(1, 40), st.integers(1, 300), st.integers(1, 20_000))
problems = st.builds(
    lambda **given: Problem(**given, precision="bf16x6", memory_bandwidth=3.35e12),
    m=extents,
    n=extents,
    k=extents,
    cc=st.sampled_from([(9, 0), (8, 9)]),
    **PROPERTIES,
)


@pytest.fixture(autouse=True, scope="module")
def tensor_cores():
    """Choose as on a GPU: nothing is launched here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precisions, "SIMULATOR", False)
        yield


def product_of(m: int, n: int, k: int, layout: str = "NN", odd: bool = False) -> Product:
    """Operands as those that were measured: aligned, or `odd`, one element after that and with an odd pitch."""
    a, b, c = dense(layout[0], m, k), dense(layout[1], k, n), dense("N", m, n)
    return Product(*(_pitched(x, odd) for x in (a, b, c)))


def batch_of(matrices: int, m: int, n: int, k: int) -> Product:
    """Contiguous matrices, stored by rows."""
    one = product_of(m, n, k)
    return one._replace(batch=Batch((1, 1, matrices), *((0, 0, x.rows * x.row_stride) for x in one[:3])))


def _pitched(x: Layout, odd: bool) -> Layout:
    if x.by_columns:
        return _pitched(x.transposed, odd).transposed
    pitch, offset = (x.cols // 2 * 2 + 1, 4) if odd else (-(-x.cols // 4) * 4, 0)
    return x._replace(row_stride=4 * pitch, offset=offset)


@given(problems)
def test_the_choice_is_the_first_candidate(wanted):
    found = ranked(wanted)
    assert best(wanted) == found[0]
    assert choose(wanted)._replace(reason="") == found[0]
    by_float32 = [one for one in found if isinstance(one.stage, LadderStage)]
    few = min(wanted.m, wanted.n) <= 32 or wanted.k <= 128
    assert bool(by_float32) == (few and wanted.cc == (9, 0))
    for one in by_float32:
        assert one.precision == "bf16x6"
        assert not (one.swapped and wanted.epilogue)
        assert wanted.k <= FEW_TERMS or compensates(one.config)
        if one.stage is STAGES["small_matrices"]:
            assert wanted.matrices > 1
        elif wanted.k > FEW_TERMS and not one.config.in_lanes:
            assert one.partition.whole == one.partition.blocks, "blocks do not share sums"


# Products at which tensor cores were measured to wait, on an H100: 0.2 to 0.5 of cuBLAS SGEMM.
@pytest.mark.parametrize(
    ("shape", "layout", "odd", "stage"),
    [
        ((1, 6053, 2830), "NN", False, "thin"),
        ((1826, 1, 8611), "NT", True, "thin"),
        ((8203, 3, 7281), "TN", True, "thin"),  # aligned, `rows_in_registers` is as fast
        ((17759, 7, 1593), "TT", True, "thin"),
        ((1034, 6953, 2), "NN", True, "short_sums"),
        ((17315, 130, 5), "NN", False, "short_sums"),
        ((13637, 13658, 19), "TT", True, "stream_k"),
        ((512, 2833, 83), "NT", True, "stream_k"),
        ((9171, 86, 4), "NN", False, "short_sums"),
    ],
)
def test_thin_products_and_short_sums(shape, layout, odd, stage):
    product = product_of(*shape, layout, odd)
    choice = best(problem(product, H100, "bf16x6"))
    assert choice.stage is STAGES[stage]
    (kernel,) = choice.kernels(product, H100.gpu)
    assert kernel.variant.compensated == (shape[2] > FEW_TERMS)
    if shape[2] <= FEW_TERMS:
        float32 = best(problem(product, H100))
        assert choice._replace(precision="ieee") == float32
        assert [kernel] == float32.kernels(product, H100.gpu)
    wanted = problem(product, H100, "bf16x6")
    assert not isinstance(best(wanted._replace(cc=(8, 9))).stage, LadderStage)
    others = best(problem(product, H100, "tf32x3"))  # where this kernel is not faster by a tenth, tensor cores compute
    assert (others == choice) == (stage != "stream_k")
    assert best(problem(product, H100, "bf16x9")).precision == "bf16x9", "whose errors may be smaller"


@pytest.mark.parametrize(
    ("precision", "sums"),
    [
        *((one, "compensated") for one in ("bf16x6", "tf32x3", "bf16x3", "fp16x3")),
        *(("bf16x9", "in_float64"), ("tf32", ""), ("bf16", "")),
    ],
)
def test_batches_of_small_matrices_in_every_precision(precision, sums):
    """With blocks of their own, an H200 took 31 us in bf16x6 and was expected to take 480 in bf16x9."""
    one, product = product_of(8, 8, 16), batch_of(10_000, 8, 8, 16)
    wanted = problem(product, H200, precision)
    choice = best(wanted)
    assert choice.stage is STAGES["small_matrices"]
    assert choice == choose(wanted)._replace(reason="") == ranked(wanted)[0]
    float32 = best(problem(product, H200))
    assert (float32.clocks == choice.clocks) == (not sums)
    assert choice.clocks < 1.5 * float32.clocks
    (kernel,) = choice.kernels(product, H200.gpu)
    variant = kernel.variant
    assert [name for name in ("compensated", "in_float64") if getattr(variant, name)] == [sums] * bool(sums)
    told = {"compensated": "float32 multiply-adds with compensated sums", "in_float64": "float64 multiply-adds"}
    assert told.get(sums, "float32 multiply-adds") in choose(wanted).reason
    single = best(problem(one, H200, "bf16x9"))
    assert not isinstance(single.stage, LadderStage), "a batch of one matrix"


@pytest.mark.parametrize("precision", ["ieee", "bf16x6"])
def test_lanes_that_share_tiles_have_the_l1_cache(precision):
    """`thin` leaves room for its blocks' shared memory; these blocks have none."""
    product, gpu = batch_of(3000, 8, 8, 256), H200.gpu._replace(shared=227 << 10)
    for config in STAGES["small_matrices"].configs:
        (step,) = STAGES["small_matrices"].launches(config, product, precision, Partition(1, 1), gpu).steps
        assert step.carve_out == -1
    thin = STAGES["thin"]
    (step,) = thin.launches(thin.configs[0], product, precision, Partition(132, 6000), gpu).steps
    assert step.carve_out > 0


SMALL = [(1, 4096, 4096), (8, 4096, 4096), (4096, 1, 4096), (16, 16, 65536), (64, 64, 64), (1, 1024, 1024), (3, 5, 7)]


@pytest.mark.parametrize("precision", LESS_ACCURATE)
@pytest.mark.parametrize("shape", SMALL)
def test_no_precision_takes_longer_than_float32_multiply_adds_of_smaller_errors(precision, shape):
    """On an H200, tensor cores were expected to take 78 us in fp16x3 at 1x4096x4096, and these 17."""
    product = product_of(*shape, "NT")
    other = "ieee" if precision in ("tf32", "bf16") else "bf16x6"
    choice, exact = (best(problem(product, H100, one)) for one in (precision, other))
    if shape == (64, 64, 64) and precision in ("tf32", "bf16"):
        other = precision
    assert choice.precision == other
    assert other == precision or choice.selected == exact.selected
    told = choose(problem(product, H100, precision)).reason
    assert (f"in {other}, whose bound is no larger than that of" in told) == (other != precision)
    assert "compensated" not in told or other == "bf16x6"
    assert ranked(problem(product, H100, precision))[0] == choice


@pytest.mark.parametrize("precision", LESS_ACCURATE)
def test_prepared_operands_are_multiplied_in_their_precision(precision):
    """Its parts are there, so what takes long otherwise does not."""
    product = product_of(16, 4096, 4096, "NT")
    ready = problem(product._replace(prepared=(False, True)), H100, precision)
    assert best(ready).precision == precision
    assert all(one.precision == precision for one in ranked(ready))
    assert problem(product._replace(prepared=(True, True)), H100, "bf16x6") == problem(product, H100, "bf16x6")


def test_candidates_are_ranked_once():
    """Also those of divided sums, for operands that tensor maps can describe."""
    for shape in ((1, 4096, 4096), (8, 64, 65536), (300, 20, 5000)):
        found = ranked(problem(product_of(*shape, "NT"), H100, "tf32"))
        assert len({one.selected for one in found}) == len(found)
        assert {one.precision for one in found} == {"tf32", "bf16x6", "ieee"}


def test_what_is_computed_in_a_more_accurate_precision_says_so():
    told = explain_shape(1, 4096, 4096, precision="fp16x3", cc=(9, 0))
    assert (told.stage, told.precision, told.launches) == ("thin", "bf16x6", 1)
    assert (told.a_access, told.b_access) != ("decomposed", "decomposed")
    assert "precision bf16x6" in str(told)
    assert explain_shape(1, 4096, 4096, precision="fp16x3", stage="persistent", cc=(9, 0)).precision == "fp16x3"


def test_bounds_of_other_precisions_are_no_smaller():
    for precision in TENSOR_PRECISIONS:
        assert all(tensor_bound("bf16x6", k) <= tensor_bound(precision, k) for k in (1, 64, 1023, 1024, 4096, 1 << 20))


@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (256, 256, 1024), (64, 64, 512), (4096, 4096, 120)])
def test_other_products_stay_on_tensor_cores(shape):
    assert not isinstance(best(problem(product_of(*shape), H100, "bf16x6")).stage, LadderStage)


# Microseconds of `persistent` in its faster tile, measured on an H200; floats of all or many tiles are written singly.
@pytest.mark.parametrize(
    ("shape", "layout", "odd", "precision", "measured"),
    [
        ((13637, 13658, 19), "TT", True, "bf16x6", 658),
        ((803, 17889, 66), "NT", True, "bf16x6", 101),
        ((1152, 9829, 69), "NN", True, "bf16x6", 77.8),
        ((3326, 4666, 120), "TN", True, "bf16x6", 99.5),
        ((512, 2833, 83), "NT", True, "bf16x6", 16.6),
        ((654, 1493, 44), "TN", True, "bf16x6", 9.36),
        ((41, 13209, 53), "NT", True, "bf16x6", 11.2),
        ((1077, 2771, 102), "NT", False, "bf16x6", 26.3),
        ((1639, 18893, 12), "NT", False, "bf16x6", 107),
        ((2274, 12299, 1), "NN", True, "bf16", 62.2),
        ((1093, 2965, 5), "NN", True, "bf16", 10.7),
        ((292, 3794, 3), "NN", True, "bf16", 6.49),
        ((803, 17889, 66), "NT", True, "bf16", 38.8),
    ],
)
def test_c_that_is_written_by_floats_takes_longer(shape, layout, odd, precision, measured):
    wanted = problem(product_of(*shape, layout, odd), H100, precision)
    found = next(one for one in ranked(wanted) if isinstance(one.stage, TensorStage))
    assert 0.8 <= found.clocks / H100.clock_hz * 1e6 / measured <= 1.2


# Microseconds of `persistent` in two tiles as measured on an H200, in precisions with one product of parts and several.
@pytest.mark.parametrize(
    ("shape", "layout", "odd", "precision", "faster", "slower"),
    [
        ((10137, 434, 150), "NT", False, "bf16", (128, 128, 16.4), (128, 256, 18.8)),
        ((1024, 1020, 128), "NT", False, "bf16", (64, 128, 5.73), (128, 128, 6.65)),
        ((18971, 1, 6), "NN", True, "tf32x3", (64, 64, 10.8), (128, 128, 13.1)),
        ((316, 3782, 137), "NN", False, "fp16x3", (128, 128, 16.1), (64, 128, 20.0)),
        ((316, 3782, 137), "NN", False, "bf16x6", (128, 128, 20.0), (64, 128, 23.9)),
    ],
)
def test_tiles_whose_floats_are_written_one_by_one_are_no_first_choice(shape, layout, odd, precision, faster, slower):
    found = [one for one in ranked(problem(product_of(*shape, layout, odd), H100, precision)) if one.partition is None]
    tiles = [(one.config.BM, one.config.BN) for one in found if isinstance(one.stage, TensorStage)]
    assert tiles.index(faster[:2]) < tiles.index(slower[:2])


# Microseconds of `persistent` in fp16x3, in whole tiles, as measured on an H200.
@pytest.mark.parametrize(
    ("shape", "layout", "tile", "measured"),
    [
        ((7354, 872, 162), "NN", (128, 128), 37.4),
        ((2525, 3219, 20), "TN", (128, 128), 30.8),
        ((7354, 872, 162), "NN", (64, 128), 43.8),
    ],
)
def test_time_in_which_scales_are_removed(shape, layout, tile, measured):
    wanted = problem(product_of(*shape, layout), H200, "fp16x3")
    found = [one for one in ranked(wanted) if one.stage.name == "persistent" and one.partition is None]
    first = next(one for one in found if tile == (one.config.BM, one.config.BN))
    assert first.clocks / H200.clock_hz * 1e6 == pytest.approx(measured, rel=0.06)


def test_adding_takes_longer_with_scales():
    """On an H200, 512x512x1024 took 16.0 us in fp16x3 with whole tiles, and 18.1 with divided sums."""
    for precision, divides in (("fp16x3", False), ("tf32x3", True)):
        found = ranked(problem(product_of(512, 512, 1024, "NN"), H100, precision))
        first = next(one for one in found if one.stage.name == "persistent")
        assert (first.config.BM, first.config.BN) == (64, 64)
        assert (first.partition is not None) == divides


# Microseconds of two stages as measured on an H200.
@pytest.mark.parametrize(
    ("shape", "layout", "precision", "faster", "slower"),
    [
        ((675, 930, 178), "NN", "bf16x6", ("rows_in_registers", 12.5), ("persistent", 13.1)),
        ((8192, 512, 300), "NN", "bf16x6", ("persistent", 46.0), ("rows_in_registers", 50.1)),
        ((3000, 300, 200), "TN", "bf16x6", ("rows_in_registers", 15.2), ("persistent", 20.3)),
        ((316, 3782, 137), "NN", "bf16x6", ("persistent", 16.8), ("fused_decomposition", 26.8)),
        ((147, 845, 1567), "NT", "tf32", ("tf32_tma", 10.6), ("persistent", 12.6)),
        ((2156, 52, 6759), "NN", "tf32", ("rows_in_registers", 33.6), ("tf32_tma", 45.5)),
        ((15498, 33, 2072), "NN", "tf32x3", ("rows_in_registers", 52.3), ("persistent", 184.0)),
        ((1946, 120, 4388), "TN", "fp16x3", ("rows_in_registers", 36.8), ("persistent", 62.5)),
        ((44, 5133, 11284), "TT", "bf16x3", ("rows_in_registers", 96.6), ("persistent", 191.0)),
        ((97, 908, 292), "NN", "fp16x3", ("fused_decomposition", 6.67), ("persistent", 11.2)),
        ((616, 1430, 3), "NN", "tf32", ("short_sums", 2.83), ("tf32_tma", 6.22)),
        ((1445, 96, 1), "NN", "bf16", ("short_sums", 1.86), ("persistent", 4.2)),
        ((875, 5378, 32), "TT", "fp16x3", ("stream_k", 20.0), ("persistent", 26.9)),
        ((2525, 3219, 20), "TN", "fp16x3", ("stream_k", 26.9), ("persistent", 34.0)),
        ((8, 4096, 4096), "NT", "bf16", ("thin", 22.7), ("persistent", 39.0)),
    ],
)
def test_the_stage_that_was_measured_to_be_faster_is_the_choice(shape, layout, precision, faster, slower):
    found = [one.stage.name for one in ranked(problem(product_of(*shape, layout), H100, precision))]
    assert found[0] == faster[0]
    assert slower[0] in found


@pytest.mark.parametrize(
    ("shape", "precision"),
    [((300, 512, 900), "fp16x3"), ((64, 64, 300), "tf32x3"), ((64, 64, 300), "bf16x3"), ((64, 128, 1000), "tf32")],
)
def test_more_accurate_kernels_must_be_faster_however_little(shape, precision):
    first, *others = ranked(problem(product_of(*shape, "NN"), H100, precision))
    least = min(one.clocks for one in others if one.precision == precision)
    assert first.precision != precision
    assert first.clocks < least < 1.1 * first.clocks


@pytest.mark.parametrize(("shape", "precision"), [((512, 512, 900), "bf16x3"), ((300, 400, 900), "tf32")])
def test_more_accurate_kernels_that_are_slower_are_behind(shape, precision):
    first, *others = ranked(problem(product_of(*shape, "NN"), H100, precision))
    assert first.precision == precision
    assert first.clocks < min(one.clocks for one in others if one.precision != precision)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("shape", [(200, 300, 64), (64, 128, 96), (64, 64, 64)])
def test_sums_that_tensor_cores_keep(precision, shape):
    """So that products of usual extents have few kernels."""
    found = ranked(problem(product_of(*shape, "NN"), H100, precision))
    assert found[0].precision == precision
    assert {one.precision for one in found} <= {precision, "bf16x6"}


# Microseconds of one stage in its faster tile, measured on an H200: memory takes C, or V's rows, no sooner.
@pytest.mark.parametrize(
    ("shape", "layout", "odd", "precision", "stage", "measured"),
    [
        ((8779, 2261, 13), "NT", True, "bf16", "persistent", 49.2),
        ((13103, 2095, 4), "TT", False, "bf16", "persistent", 37.9),
        ((18657, 2070, 1), "TT", False, "tf32", "persistent", 52.9),
        ((13103, 2095, 4), "TT", False, "tf32", "tf32_tma", 52.3),
        ((15889, 4, 9071), "NN", False, "tf32", "tf32_tma", 155.0),
    ],
)
def test_tensor_cores_wait_for_memory(shape, layout, odd, precision, stage, measured):
    wanted = problem(product_of(*shape, layout, odd), dataclasses.replace(H100, memory_bandwidth=4.814e12), precision)
    found = named(stage, wanted)
    assert 0.7 <= found.clocks / H100.clock_hz * 1e6 / measured <= 1.2


def test_rows_that_are_read_once_are_not_read_by_tensor_maps():
    """2x10861x3103 takes 51.9 us on an H200 by tensor maps, and 35.5 in float32."""
    gpu = dataclasses.replace(H100, memory_bandwidth=4.814e12)
    assert best(problem(product_of(2, 10861, 3103, "NT"), gpu, "tf32")).stage.name == "thin"


# Sums of one k-tile, of which `fused_decomposition` was measured to take 1.4 and 1.9 times as long, on an H200. The
# second takes 13.3 us in `persistent`, and 14.9 us in `stream_k`.
@pytest.mark.parametrize(("shape", "stage"), [((603, 526, 57), "stream_k"), ((116, 16194, 59), "persistent")])
def test_sums_of_one_k_tile_are_not_decomposed_in_the_kernel(shape, stage):
    for k, considered in ((shape[2], False), (64, False), (65, True)):
        found = ranked(problem(product_of(*shape[:2], k, "NT", True), H100, "bf16x6"))
        assert any(one.stage is FUSED for one in found) == considered
    assert best(problem(product_of(*shape, "NT", True), H100, "bf16x6")).stage.name == stage


def test_large_tiles_whose_rows_are_copied_by_floats_lose_to_float32():
    """18x4216x5457 takes 59.7 us on an H200 in tiles of 128x64, and 45.7 us in float32."""
    product = product_of(18, 4216, 5457, "NN", odd=True)
    assert resolved("fp32_auto", product, H200) == "ieee"


def test_few_tiles_behind_a_full_round_of_blocks_are_divided():
    """On an H200, 14x19336x597 takes 32.3 us in 605 blocks of `thin`, and 20.8 us in 396, which run at once."""
    gpu = dataclasses.replace(H100, memory_bandwidth=4.8e12)
    choice = best(problem(product_of(14, 19336, 597, "NN", odd=False), gpu))
    assert (choice.stage.name, choice.partition) == ("thin", Partition(396, 0))


def test_rows_of_last_tiles_share_their_sums_if_that_is_sooner_than_float32():
    """17759x7x15937 takes 497 us on an H200 with 132 tiles whole and 126 blocks for the others, 539 us in float32."""
    choice = best(problem(product_of(17759, 7, 15937, "TT", odd=True), H100, "bf16x6"))
    assert (choice.stage.name, choice.partition) == ("rows_in_registers", Partition(126, 132))


# Microseconds on an H200 in tf32x3, with 132 blocks and with fewer, as measured: 22.9 and 16.4, 23.0 and 19.1.
@pytest.mark.parametrize("shape", [(64, 1, 15933), (229, 1, 8369)])
def test_products_with_few_tiles_leave_multiprocessors_to_the_launch_that_adds(shape):
    choice = named("persistent", problem(product_of(*shape, "TT"), H100, "tf32x3"))
    assert 60 <= choice.partition.blocks < H100.sm_count


@pytest.mark.parametrize(
    ("pitch", "offset", "expected"),
    [(64, 0, True), (72, 0, True), (68, 0, False), (61, 0, False), (64, 4, False), (64, 8, False), (64, 12, False)],
)
def test_rows_or_columns_of_c_that_begin_at_sectors(pitch, offset, expected):
    """The pitch decides, not the number of columns."""
    product = Product(dense("N", 300, 40), dense("N", 40, 61), Layout(300, 61, 4 * pitch, 4, offset))
    for found in (product, product.transposed):
        assert problem(found, H100, "bf16x6").c_sectors is expected


@pytest.mark.parametrize(
    ("layout", "pitches", "expected"),
    [
        ("NN", (40, 64), (True, True)),
        ("NN", (44, 64), (True, False)),
        ("NN", (40, 68), (False, True)),
        ("NT", (44, 40), (False, True)),
        ("NT", (40, 44), (True, False)),
        ("TT", (308, 44), (False, False)),
    ],
)
def test_rows_of_tensor_maps_that_begin_at_sectors(layout, pitches, expected):
    """A is V in layout NN, else U; pitches are those of A and B as stored."""
    a_step, b_step = (4 * pitch for pitch in pitches)
    a = Layout(300, 40, a_step, 4, 0) if layout[0] == "N" else Layout(300, 40, 4, a_step, 0)
    b = Layout(40, 61, b_step, 4, 0) if layout[1] == "N" else Layout(40, 61, 4, b_step, 0)
    found = problem(Product(a, b, dense("N", 300, 61)), H100, "tf32")
    assert found.tma == layout
    assert (found.u_sectors, found.v_sectors) == expected
    found = problem(Product(a, b, dense("N", 300, 61)), H100, "bf16x6")
    assert (found.u_sectors, found.v_sectors) == (True, True)  # no tensor maps


# Microseconds of `fused_decomposition` as measured on an H100, with operands that are copied by floats.
@pytest.mark.parametrize(
    ("shape", "layout", "odd", "measured"),
    [
        ((249, 150, 494), "NN", True, 9.0),
        ((114, 106, 664), "TT", True, 10.9),
        ((29, 1926, 318), "TN", True, 7.1),
        ((46, 6155, 369), "TN", True, 16.4),
        ((10, 11350, 624), "NN", True, 22.4),
    ],
)
def test_expected_time_of_fused_decomposition(shape, layout, odd, measured):
    wanted = problem(product_of(*shape, layout, odd), H100, "bf16x6")
    found = next(one for one in ranked(wanted) if one.stage is FUSED)
    assert 0.6 <= found.clocks / H100.clock_hz * 1e6 / measured <= 1.4


@pytest.mark.parametrize("key", [key for key in RATES if key[0] in ("thin", "stream_k")])
def test_compensated_sums_are_expected_to_take_longer(key):
    stage = STAGES[key[0]]
    config = next(one for one in stage.configs if rate_of(stage, one) is RATES[key])
    if not compensates(config):
        candidates = considered_of(stage, (9, 0), 132, True, True, True, compensated=True)
        assert config not in {one.costs.config for one in candidates}
        return
    plain, compensated = (Costs(stage, config, RATES[key], (9, 0), 132, True, True, one) for one in (False, True))
    assert compensated.rate.resident <= plain.rate.resident
    times = [one.clocks(100, 50, [(100, 100)])[0][0] for one in (plain, compensated)]
    assert times[0] < times[1] < 4 * times[0]


def test_reasons_tell_the_arithmetic():
    told = explain_shape(8192, 1, 4096, precision="bf16x6", cc=(9, 0))
    assert told.stage == "thin"
    assert "float32 multiply-adds with compensated sums; expected to take" in told.reason
    assert "decomposed" not in str(told)
    assert told.launches == 1
    assert "float32 multiply-adds; expected" in explain_shape(8192, 1000, 3, precision="bf16x6", cc=(9, 0)).reason
    wanted = Problem(4096, 1, 8192, precision="bf16x6")
    assert named("thin", wanted).selected == best(wanted).selected
    assert named("thin", wanted).reason.startswith("stage thin was asked for; ")
