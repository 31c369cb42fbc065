"""Multiply-adds with compensated or float64 sums on the simulator: bounds, special values, sums that blocks share."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from support.ladder_cases import LAYOUTS

from numba_gemm.models import accuracy
from numba_gemm.simulator.switch import SIMULATOR

if not SIMULATOR:
    pytest.skip("runs the kernels on the simulator", allow_module_level=True)

import numba_gemm
from numba_gemm.kernels.ladder import STAGES, _each_thread, _lanes, _moving
from numba_gemm.kernels.ladder.stage import FEW_TERMS, compensates
from numba_gemm.kernels.ladder.tile_config import TileConfig
from numba_gemm.kernels.product import Product, dense
from numba_gemm.kernels.stage import Gpu, Partition
from numba_gemm.runtime import launch
from numba_gemm.runtime.matrix import Matrix

THIN = {
    "4 lanes": _lanes(8, 16, 4, 16, 4, slots=5),
    "8 lanes": STAGES["thin"].test_config,
    "row": _lanes(1, 1, 1, 1, 8),
}
TILES = {
    "8x4": _moving(32, 32, 8, 8, 4, 32, 32),
    "4x4": _moving(32, 32, 16, 4, 4, 16, 32),
    "wide": _moving(32, 64, 16, 8, 4, 32, 32),
}
SMALL = {
    "a 2x4 tile per thread": _each_thread(2, 4, 16),
    "an element per thread": _each_thread(1, 1, 16),
    "four rows per 8 lanes": _each_thread(4, 1, 32, lanes=8),
    "an element per warp": _each_thread(1, 1, 64, lanes=32),
}
CONFIGS = THIN | TILES | SMALL
U = accuracy.UNIT_ROUNDOFF


def multiply(
    config: TileConfig,
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    precision: str = "bf16x6",
    partition: Partition | None = None,
) -> np.ndarray:
    """Return the product in a configuration, by default of one block per tile."""
    stage = STAGES["small_matrices" if config.tiles > 1 else "thin" if config.lanes_k > 1 else "stream_k"]
    out = np.full((a.shape[0], b.shape[1]), np.nan, np.float32) if c is None else c
    tiles = -(-out.shape[0] // config.BM) * -(-out.shape[1] // config.BN)
    operands = [Matrix(x.ctypes.data, *x.shape, *x.strides, 0, x) for x in (a, b, out)]
    options: dict[str, Any] = {"precision": precision, "partition": partition or Partition(tiles, tiles)}
    launch.launch(stage, config, alpha, operands[0], operands[1], beta, operands[2], **options)
    return out


def drawn(kind: str, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng((m, n, k))
    a, b = generator.uniform(0.5, 1, (m, k)), generator.uniform(0.5, 1, (k, n))
    if kind == "log-uniform":
        a, b = (np.exp2(generator.uniform(-20, 20, x.shape)) * generator.choice([-1, 1], x.shape) for x in (a, b))
    if kind == "cancelling":  # pairs of terms that nearly cancel each other
        a[:, 1::2] = -a[:, : k // 2 * 2 : 2] * (1 + 2.0**-20)
        b[1::2] = b[: k // 2 * 2 : 2]
    return a.astype(np.float32), b.astype(np.float32)


@pytest.mark.parametrize("k", [1, FEW_TERMS, FEW_TERMS + 1, 19, 100, 1003])
@pytest.mark.parametrize("kind", ["positive", "log-uniform", "cancelling"])
@pytest.mark.parametrize("name", CONFIGS)
def test_errors_are_below_the_bound_for_every_k(name: str, kind: str, k: int) -> None:
    a, b = drawn(kind, 3, 2, k)
    got = multiply(CONFIGS[name], a, b)
    exact = [[math.fsum(a[i].astype(float) * b[:, j].astype(float)) for j in range(2)] for i in range(3)]
    scale = np.abs(a).astype(float) @ np.abs(b).astype(float)
    assert np.abs(got - np.array(exact)).max() / scale.max() <= accuracy.tensor_bound("bf16x6", k)
    assert (np.abs(got - np.array(exact)) <= 8 * U * scale).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_terms_that_plain_sums_lose(name: str) -> None:
    """Each term but the first ones, of all lanes, is half a unit in the last place of the lane's sum, or less."""
    a, b = np.full((1, 2048), 2.0**-24, np.float32), np.ones((2048, 1), np.float32)
    a[0, :64] = 1.0
    exact = math.fsum(a[0].tolist())
    got, plain = (float(multiply(CONFIGS[name], a, b, precision=one)[0, 0]) for one in ("bf16x6", "ieee"))
    assert abs(got - exact) <= U * exact
    assert (abs(plain - exact) > U * exact) == (name != "row"), "a thread with a single sum adds in float64 anyway"


@pytest.mark.parametrize("k", [1, 4, FEW_TERMS + 1, 19, 1003])
@pytest.mark.parametrize("kind", ["positive", "log-uniform", "cancelling"])
@pytest.mark.parametrize("name", SMALL)
def test_float64_sums_are_rounded_once(name: str, kind: str, k: int) -> None:
    a, b = drawn(kind, 3, 8, k)
    got = multiply(SMALL[name], a, b, precision="bf16x9")
    exact = np.array([[math.fsum(a[i].astype(float) * b[:, j].astype(float)) for j in range(8)] for i in range(3)])
    scale = np.abs(a).astype(float) @ np.abs(b).astype(float)
    assert (np.abs(got - exact) <= U * np.abs(exact) + k * 2.0**-53 * scale).all()


@pytest.mark.parametrize("by_floats", [False, True])
@pytest.mark.parametrize("beyond", [0, 1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("name", TILES)
def test_chunks_have_few_terms(name: str, beyond: int, by_floats: bool) -> None:
    """A one and all terms after it, each half a unit in its last place: only five of its chunk are lost."""
    k = 2 * TILES[name].BK - beyond  # some k-steps of the first k-tile are left out
    a, b = np.zeros((k // 4, k + by_floats), np.float32)[:, :k], np.ones((k, 4), np.float32)
    if by_floats:  # copies are spread over the first k-steps
        b = np.ones((4, k + 1), np.float32)[:, :k].T
    for i in range(k // 4):
        a[i, 4 * i], a[i, 4 * i + 1 :] = 1.0, U
    errors = np.abs(multiply(TILES[name], a, b) - a.astype(float) @ b.astype(float))
    assert errors.max() <= 6 * U


def test_plain_sums_grow_where_compensated_ones_do_not() -> None:
    k = 12_000
    a, b = np.full((1, k), 1 / 3, np.float32), np.full((k, 1), 0.7, np.float32)
    exact = math.fsum([float(a[0, 0]) * float(b[0, 0])] * k)
    plain, compensated = (
        abs(float(multiply(THIN["4 lanes"], a, b, precision=one)[0, 0]) - exact) / (U * exact)
        for one in ("ieee", "bf16x6")
    )
    assert compensated <= 1 < 8 < plain


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_layouts(name: str, layout: str) -> None:
    config, k = CONFIGS[name], 45 if layout == "one float off" else 44
    m, n = config.BM + 4, config.BN + 4
    generator = np.random.default_rng(3)
    places = zip(LAYOUTS[layout], ((m, k), (k, n), (m, n)))
    a, b, c = (place.view(*shape, np.float32(np.nan))[1] for place, shape in places)
    for x in (a, b, c):
        x[...] = generator.standard_normal(x.shape)
    expected, scale = accuracy.reference(-0.5, a, b, 2.0, c)
    compared = accuracy.compare(multiply(config, a, b, c, -0.5, 2.0), expected, scale, k, "bf16x6", -0.5)
    assert compared.ok, compared


SPECIAL: dict[str, dict[int, float]] = {
    "infinity": {5: np.inf},
    "infinity at the end": {99: np.inf},
    "twice": {5: np.inf, 50: np.inf},
    "minus infinity": {0: -np.inf, 40: 3e38},
    "both": {5: np.inf, 70: -np.inf},
    "NaN": {60: np.nan},
    "overflow": {3: 3e38, 4: 3e38, 5: 3e38},
    "overflow of a sum of chunks": {3: 3e38, 40: 3e38, 80: 3e38},
}


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize(
    ("name", "precision"), [*((name, "bf16x6") for name in CONFIGS), *((name, "bf16x9") for name in SMALL)]
)
def test_special_values(name: str, precision: str, special: str) -> None:
    a, b = np.ones((2, 100), np.float32), np.ones((100, 3), np.float32)
    for k, value in SPECIAL[special].items():
        a[1, k] = value
    with np.errstate(over="ignore", invalid="ignore"):
        expected = np.float32(a[1].astype(np.float64).sum())
    got = multiply(CONFIGS[name], a, b, precision=precision)
    assert (got[0] == 100).all()
    assert np.array_equal(got[1], np.full(3, expected), equal_nan=True)


def test_special_values_in_tiles_that_reach_beyond_c() -> None:
    """`stream_k` computes sums that are infinite or NaN again, in every thread tile, and no others."""
    generator = np.random.default_rng(8)
    a, b = (generator.standard_normal(extents).astype(np.float32) for extents in ((70, 37), (37, 45)))
    plain = multiply(TILES["wide"], a, b)
    a[5, 30], a[69], b[2, 44] = np.nan, np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        expected = a.astype(np.float64) @ b
    got, numbers = multiply(TILES["wide"], a, b), np.isfinite(expected)
    np.testing.assert_array_equal(got[~numbers], expected[~numbers].astype(np.float32))
    np.testing.assert_array_equal(got[numbers], plain[numbers])


@pytest.mark.parametrize("special", [*SPECIAL, "none"])
@pytest.mark.parametrize("blocks", [2, 5, 40])
def test_blocks_share_a_sum(blocks: int, special: str) -> None:
    config, k = THIN["8 lanes"], 40 * 32
    generator = np.random.default_rng(blocks)
    a, b = generator.uniform(0.5, 1, (5, k)).astype(np.float32), generator.uniform(0.5, 1, (k, 3)).astype(np.float32)
    for i, value in SPECIAL.get(special, {}).items():
        a[1, 12 * i] = value
    if "overflow" in special:
        b[:] = 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        expected, scale = accuracy.reference(1.0, a, b)
    compared = accuracy.compare(multiply(config, a, b, partition=Partition(blocks, 0)), expected, scale, k, "bf16x6")
    assert compared.ok, compared
    assert special != "none" or compared.in_bounds <= 0.2, "2u, of the bound's 10u"


@pytest.mark.parametrize(("blocks", "k_tiles"), [(1, 2), (2, 2), (20, 20)])
def test_parts_of_a_sum_keep_what_one_float_does_not_hold(blocks: int, k_tiles: int) -> None:
    """2^24 + 1 is the sum of one chunk's lanes, and -2^24 that of another's."""
    config = THIN["8 lanes"]
    a, b = np.zeros((1, k_tiles * config.BK), np.float32), np.ones((k_tiles * config.BK, 1), np.float32)
    a[0, 0], a[0, 4], a[0, config.BK] = 2.0**24, 1.0, -(2.0**24)
    assert multiply(config, a, b, partition=Partition(blocks, 0))[0, 0] == 1.0


def test_tiles_do_not_share_sums() -> None:
    """`stream_k` cannot add parts of compensated sums, so one block has all of a tile, whatever the partition says."""
    a, b = drawn("log-uniform", 40, 70, 64)
    whole = multiply(TILES["4x4"], a, b)
    np.testing.assert_array_equal(multiply(TILES["4x4"], a, b, partition=Partition(5, 0)), whole)
    product = Product(dense("N", 40, 64), dense("N", 64, 70), dense("N", 40, 70))
    launches = STAGES["stream_k"].launches(TILES["4x4"], product, "bf16x6", Partition(5, 0), Gpu((9, 0), 132))
    assert (launches.counters, launches.scratch_bytes, launches.steps[0].grid) == (0, 0, (6, 1, 1))


def test_a_block_has_several_tiles_of_small_matrices() -> None:
    with pytest.raises(ValueError, match="breaks: several tiles per block"):
        numba_gemm.launchable("small_matrices", 2, 3, 128, config=_each_thread(1, 1, 32, lanes=32))


def test_large_tiles_have_no_compensated_sums() -> None:
    config = _moving(64, 128, 16, 8, 8, 32, 64)
    assert not compensates(config)
    with pytest.raises(ValueError, match="compensated sums: BN >= 32, at most 32 per thread"):
        multiply(config, np.ones((8, 64), np.float32), np.ones((64, 8), np.float32))


@pytest.mark.parametrize(("batch", "b_shape"), [((3,), (64, 8)), ((2, 3), (64, 8)), ((2, 3), (3, 64, 8))])
@pytest.mark.parametrize("stage", ["thin", "stream_k", "small_matrices"])
def test_plan_whose_parts_have_other_shapes(stage: Any, batch: tuple[int, ...], b_shape: tuple[int, ...]) -> None:
    generator = np.random.default_rng(7)
    a = generator.standard_normal((*batch, 8, 64), dtype=np.float32)
    b = generator.standard_normal(b_shape, dtype=np.float32)
    multiply_planned = numba_gemm.plan(8, 8, 64, batch=batch, stage=stage, precision="bf16x6")
    got, every_b = multiply_planned(a, b), np.broadcast_to(b, (*batch, 64, 8))
    for index in np.ndindex(batch):
        expected, scale = accuracy.reference(1.0, a[index], every_b[index])
        compared = accuracy.compare(got[index], expected, scale, 64, "bf16x6")
        assert compared.ok, compared


@pytest.mark.parametrize(
    ("stage", "precision"),
    [("thin", "bf16x6"), ("stream_k", "bf16x6"), ("small_matrices", "bf16x6"), ("small_matrices", "bf16x9")],
)
def test_batch_with_an_epilogue(stage: Any, precision: Any) -> None:
    def shift(value: Any, row: Any, col: Any, bias: Any) -> Any:
        return value + bias[row]

    generator = np.random.default_rng(4)
    a = generator.standard_normal((2, 3, 5, 40), dtype=np.float32)
    b = generator.standard_normal((3, 40, 2), dtype=np.float32)
    bias = np.arange(5, dtype=np.float32)
    got = numba_gemm.tiled_sgemm(a, b, stage=stage, precision=precision, epilogue=shift, epilogue_args=(bias,))
    for i in range(2):
        for j in range(3):
            expected, scale = accuracy.reference(1.0, a[i, j], b[j])
            compared = accuracy.compare(got[i, j], expected + bias[:, None], scale + bias[:, None], 40, precision)
            assert compared.ok, compared
    told = str(numba_gemm.explain(a, b, stage=stage, precision=precision))
    assert ("float64 multiply-adds" if precision == "bf16x9" else "float32 multiply-adds with compensated sums") in told
    assert "decomposed" not in told
    assert numba_gemm.plan(5, 2, 40, stage=stage, precision=precision).precision == precision
