"""Choices for the tensor cores: the stage, its tiles, and the expected durations."""

from __future__ import annotations

import dataclasses

import pytest

from numba_gemm.gemm import heuristics, tensor_heuristics
from numba_gemm.gemm import precision as precision_names
from numba_gemm.gemm.heuristics import Problem
from numba_gemm.kernels.product import Product, dense
from numba_gemm.kernels.tensor_core import TENSOR_PRECISIONS, TENSOR_STAGES
from numba_gemm.kernels.tensor_core.stage import precision_for
from numba_gemm.runtime.device import SIMULATED_DEVICE


def tiles(stage, *extents, **properties):
    config = heuristics.named(stage, Problem(*extents, **properties)).config
    return config.BM, config.BN


def test_small_products_get_small_tiles():
    areas = []
    for extent in (256, 512, 1024, 4096):
        rows, cols = tiles("persistent", extent, extent, 1024, precision="bf16x6")
        areas.append(rows * cols)
    assert areas == sorted(areas)
    assert areas[0] < areas[-1]


@pytest.mark.parametrize(
    ("extents", "expected"),
    [
        ((512, 512, 1024), (64, 64)),
        ((1024, 1024, 1024), (64, 128)),
        ((3072, 3072, 3072), (128, 192)),
        ((4096, 4096, 4096), (128, 256)),
    ],
)
def test_tiles_of_operands_that_tensor_maps_describe(extents, expected):
    assert tiles("tf32_tma", *extents, precision="tf32", tma="NN") == expected
    choice = heuristics.choose(Problem(*extents, precision="tf32", tma="NN"))
    assert (choice.stage, choice.precision) == (TENSOR_STAGES["tf32_tma"], "tf32")
    assert expected == (choice.config.BM, choice.config.BN)
    assert "operands as they are" in choice.reason


@pytest.mark.parametrize(("extents", "tma"), [((9505, 1, 591), "NN"), ((8, 13217, 78), "NT")])
def test_thin_products_in_tf32_by_float32_sums(extents, tma):
    """On an H200, tensor maps took 2.2 and 1.5 times as long for these."""
    choice = heuristics.choose(
        Problem(*extents, aligned=False, vectors=False, b_along=tma == "NT", c_sectors=False, precision="tf32", tma=tma)
    )
    assert (choice.stage.name, choice.precision) == ("thin", "ieee")


# Microseconds on an H200 by tensor maps and by decomposed operands, as measured: 1455 and 1473, 1285 and 1354, 25 and
# 33, 28 and 23, 1315 and 1537.
@pytest.mark.parametrize(
    ("extents", "tma", "u_sectors", "v_sectors", "decomposed"),
    [
        ((8188, 8188, 4092), "NN", False, False, False),
        ((6674, 10865, 3175), "NN", False, True, False),
        ((1574, 1426, 1011), "NN", False, False, False),
        ((193, 698, 4652), "TT", False, False, True),
        ((8192, 8192, 4096), "NN", True, True, False),
    ],
)
def test_rows_that_begin_within_sectors_are_decomposed_if_that_is_sooner(
    monkeypatch, extents, tma, u_sectors, v_sectors, decomposed
):
    monkeypatch.setattr(precision_names, "SIMULATOR", False)
    wanted = Problem(*extents, precision="tf32", tma=tma, u_sectors=u_sectors, v_sectors=v_sectors)
    choice = heuristics.choose(wanted)
    assert choice.stage.name == ("persistent" if decomposed else "tf32_tma")
    assert heuristics.best(wanted).selected == choice.selected


@pytest.mark.parametrize("u_sectors", [True, False])
def test_shared_copies_of_rows_within_sectors_are_expected_to_take_less_time(u_sectors):
    """On an H200, 2308 cubed takes 101 us if blocks share the copies of V, and 118 otherwise."""

    def longer(rows):
        """Expected time, over that of a product whose rows all begin at sectors."""
        at_sectors = Problem(128 * rows, 132 * 256, 4096, precision="tf32", tma="NT")
        within = at_sectors._replace(u_sectors=u_sectors, v_sectors=False)
        ranked = [heuristics.ranked(one, TENSOR_STAGES["tf32_tma"]) for one in (within, at_sectors)]
        clocks = [next(one.clocks for one in found if one.config.name == "128x256-c2p1") for found in ranked]
        return clocks[0] / clocks[1]

    alone, even, many = longer(13), longer(14), longer(33)
    assert alone > 1.1 * max(even, many)


@pytest.mark.parametrize(("m", "n", "tma"), [(4096, 20, "T*"), (20, 4096, "*N")])
def test_zeros_of_a_decomposed_operand_take_time(m, n, tma):
    """Wider tiles, in which the other operand is read as soon, are filled with more of them."""
    found = heuristics.ranked(Problem(m, n, 4096, 200, precision="tf32", tma=tma), TENSOR_STAGES["tf32_tma"])
    clocks = {one.config.name: one.clocks for one in found}
    assert clocks["128x128-c2p1"] < clocks["128x192-c2p1"] < clocks["128x256-c2p1"]
    assert found[0].config.BN <= 128


@pytest.mark.parametrize("config", TENSOR_STAGES["tf32_tma"].configs, ids=lambda config: config.name)
def test_every_tile_for_tensor_maps_has_a_rate(config):
    assert (config.BM, config.BN) in tensor_heuristics.TMA_RATES


@pytest.mark.parametrize("precision", TENSOR_PRECISIONS)
def test_tiles_that_a_precision_may_have(precision):
    found = tensor_heuristics.configs_for(TENSOR_STAGES["persistent"], precision, 4096)
    assert found
    assert all(config.BN <= 128 or len(TENSOR_PRECISIONS[precision].products) == 1 for config in found)


@pytest.mark.parametrize("name", [name for name, stage in TENSOR_STAGES.items() if len(stage.configs) == 1])
def test_a_stage_of_one_configuration(name):
    stage = TENSOR_STAGES[name]
    for precision in stage.precisions:
        choice = heuristics.named(name, Problem(4096, 64, 512, precision=precision))
        assert choice.selected == (stage, stage.configs[0], precision, None, False)


def test_reason_for_a_stage_that_decomposes():
    """Also where tensor maps could describe the operands."""
    both = [
        heuristics.named("persistent", Problem(1000, 300, 512, precision="tf32", tma=layout)) for layout in ("", "NN")
    ]
    assert both[0] == both[1]
    assert "operands decomposed first" in both[0].reason


def test_operands_that_tensor_maps_cannot_describe_are_refused():
    with pytest.raises(ValueError, match="stage is 'tf32_tma', and tensor maps cannot describe these operands"):
        heuristics.named("tf32_tma", Problem(100, 100, 100, precision="tf32"))


def test_layouts_of_a_problem():
    product = Product(dense("N", 12, 20), dense("T", 20, 28), dense("N", 12, 28))
    gpu = dataclasses.replace(SIMULATED_DEVICE, cc=(9, 0))
    assert heuristics.problem(product, gpu, "tf32").tma == "NT"
    assert heuristics.problem(product, gpu, "bf16").tma == ""
    for cc in ((8, 9), (10, 0)):
        assert heuristics.problem(product, dataclasses.replace(gpu, cc=cc), "tf32").tma == ""
    odd = product._replace(a=product.a._replace(offset=4))
    assert heuristics.problem(odd, gpu, "tf32").tma == "*T"
    assert heuristics.problem(odd._replace(b=odd.b._replace(offset=4)), gpu, "tf32").tma == ""


def test_short_sums_are_summed_afresh_step_by_step():
    for precision, slower in (("bf16x6", 1.4), ("bf16x9", 1.15)):
        short, long = precision_for(precision, 1023), precision_for(precision, 1024)
        assert (short.stepwise, long.stepwise) == (True, False)
        assert short.products == long.products
        assert long == TENSOR_PRECISIONS[precision]
        times = [tensor_heuristics.expected_seconds(precision, 4096, 4096, k, 132) for k in (1023, 1024)]
        assert times[0] > slower * times[1]
    assert precision_for("fp16x3", 256) == TENSOR_PRECISIONS["fp16x3"]
    with pytest.raises(ValueError, match="stepwise sums are compensated"):
        dataclasses.replace(TENSOR_PRECISIONS["fp16x3"], stepwise=True)


def test_layouts_by_which_fused_decomposition_is_slower(monkeypatch):
    monkeypatch.setattr(precision_names, "SIMULATOR", False)
    wanted = Problem(60, 600, 300, precision="bf16x6")
    contiguous = [{"a_contiguous": a, "b_contiguous": b} for a in (True, False) for b in (True, False)]
    ways = [{}, *({"vectors": False, **one} for one in contiguous)]
    ways = [{"aligned": False, "a_vectors": False, "b_vectors": False, **way} if way else way for way in ways]
    found = [heuristics.ranked(wanted._replace(**way)) for way in ways]
    clocks = [next(one.clocks for one in ranked if one.stage.name == "fused_decomposition") for ranked in found]
    vectors, both, first, second, none = clocks
    assert vectors < both < first == second < none
