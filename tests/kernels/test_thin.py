"""thin on the simulator: shapes around its tiles' edges, layouts, splits along k, batches, epilogues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from numba_gemm.models import accuracy
from numba_gemm.simulator.switch import SIMULATOR

if not SIMULATOR:
    pytest.skip("runs the kernel on the simulator", allow_module_level=True)

from numba_gemm.device.partition import PartitionArguments
from numba_gemm.kernels.ladder import STAGES, _lanes, thin
from numba_gemm.kernels.ladder.stage import Variant, covering
from numba_gemm.kernels.ladder.tile_config import TileConfig
from numba_gemm.kernels.product import Product, dense
from numba_gemm.kernels.stage import Gpu, Partition
from numba_gemm.simulator import scheduler

FOUR = STAGES["thin"].test_config
ONE = _lanes(4, 1, 4, 1, 32, slots=2)
SIXTEEN = _lanes(8, 16, 4, 16, 4, slots=5)
UNEVEN = _lanes(1, 4, 1, 4, 8, steps=2, slots=4)
SINGLE = _lanes(1, 1, 1, 1, 32, slots=2)
CONFIGS = {config.BN: config for config in (ONE, SIXTEEN, FOUR)}

# Layouts of a matrix seen as (mn, k): views of larger arrays that are full of NaN.
LAYOUTS: dict[str, Callable[[int, int], np.ndarray]] = {
    "along4": lambda mn, k: _nan(mn + 2, k + 8)[1 : mn + 1, 4 : k + 4],
    "across4": lambda mn, k: _nan(k + 2, mn + 8)[1 : k + 1, 4 : mn + 4].T,
    "along1": lambda mn, k: _nan(mn + 2, k + 3)[1 : mn + 1, 1 : k + 1],
    "across1": lambda mn, k: _nan(k + 2, mn + 3)[1 : k + 1, 1 : mn + 1].T,
    "any": lambda mn, k: _nan(2 * mn + 1, 3 * k + 1)[1::2, 1::3][::-1],
}


def _nan(rows: int, cols: int) -> np.ndarray:
    """A matrix of NaN whose rows and first element are 16-byte aligned."""
    pitch = -(-cols // 4) * 4
    flat = np.full(rows * pitch + 4, np.nan, np.float32)
    return flat[-flat.ctypes.data % 16 // 4 :][: rows * pitch].reshape(rows, pitch)[:, :cols]


def filled(generator: np.random.Generator, layout: str, mn: int, k: int) -> np.ndarray:
    view = LAYOUTS[layout](mn, k)
    view[...] = generator.standard_normal((mn, k), dtype=np.float32)
    return view


def work_of(
    config: TileConfig, m: int, n: int, k: int, blocks: int, whole: int, **batch: Any
) -> tuple[PartitionArguments, int]:
    """Return the partition arguments of a launch of so many blocks, with `whole` tiles that are not shared."""
    rows, cols, k_tiles = -(-m // config.BM), -(-n // config.BN), max(1, -(-k // config.BK))
    fields: dict[str, Any] = dict.fromkeys(PartitionArguments._fields, 0)
    fields |= {"rows": rows, "cols": cols, "group": 2, "k_tiles": k_tiles}
    fields |= {"matrices": 1, "inner": 1, "middle": 1} | batch
    shared = rows * cols * fields["matrices"] - whole
    assert shared >= 0
    base, extra = divmod(shared * k_tiles, blocks)
    counters = np.zeros(2 * blocks * max(config.BM * config.BN, config.threads), np.int32)
    fields |= {"counters": counters, "whole": whole, "base": base, "extra": extra}
    return PartitionArguments(**fields), blocks


def launch(
    config: TileConfig,
    variant: Variant,
    args: tuple[Any, ...],
    partition: PartitionArguments,
    blocks: int,
    seed: int | None,
) -> None:
    kernel = thin.build(config, variant)
    scheduler.run(kernel, blocks, config.threads, args, dynamic_shared=config.dynamic_shared, seed=seed)
    assert not partition.counters.any(), "counters are not zero again"


def check(
    config: TileConfig,
    m: int,
    n: int,
    k: int,
    *,
    a: str = "along4",
    b: str = "across1",
    blocks: int = 2,
    whole: int = 0,
    alpha: float = 1.0,
    beta: float = 0.0,
    seed: int | None = None,
) -> None:
    generator = np.random.default_rng((m, n, k, blocks))
    left, right = filled(generator, a, m, k), filled(generator, b, n, k).T
    around = np.full((m + 2, n + 2), 77, np.float32)
    c = around[1:-1, 1:-1]
    c[...] = np.nan if beta == 0 else generator.standard_normal((m, n))
    expected, scale = accuracy.reference(alpha, left, right, beta, c)
    partition, blocks = work_of(config, m, n, k, blocks, whole)
    variant = Variant(a, b if b in covering(config, config.BN) else "any", c_aligned=False)
    launch(
        config, variant, (np.float32(alpha), left, right, np.float32(beta), c, partition, ()), partition, blocks, seed
    )
    compared = accuracy.compare(c, expected, scale, k, alpha=alpha)
    assert compared.ok, compared
    c[...] = 77
    assert (around == 77).all(), "something was written around C"


@pytest.mark.parametrize("bn", CONFIGS)
@pytest.mark.parametrize(("m", "n", "k", "blocks", "whole"), [(1, 1, 4, 1, 0), (5, 1, 132, 2, 0), (17, 2, 0, 1, 0)])
def test_small(bn: int, m: int, n: int, k: int, blocks: int, whole: int) -> None:
    check(CONFIGS[bn], m, n, k, blocks=blocks, whole=whole)


@pytest.mark.parametrize("a", ["along4", "along1", "across1", "any"])
@pytest.mark.parametrize("b", ["along1", "across1", "any"])
def test_layouts(a: str, b: str) -> None:
    check(FOUR, 19, 3, 100 if a == "along4" else 101, a=a, b=b, alpha=-0.5, beta=2.0)


@pytest.mark.parametrize("past", [1, 2, 3])
@pytest.mark.parametrize("b", ["along4", "across4"])
@pytest.mark.parametrize("a", ["along4", "across4"])
def test_partial_vectors_at_the_end_of_a_row(a: str, b: str, past: int) -> None:
    check(FOUR, FOUR.BM + past, FOUR.BN + past, 3 * FOUR.BK + past, a=a, b=b, blocks=3)


@pytest.mark.parametrize("bn", [1, 16])
@pytest.mark.parametrize("a", ["along1", "any"])
def test_other_widths_in_floats(bn: int, a: str) -> None:
    check(CONFIGS[bn], 9, bn, 150, a=a, b="along1", beta=1.0)


@pytest.mark.parametrize("lanes", [4, 8, 16, 32])
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_threads_with_one_sum(lanes: int, blocks: int) -> None:
    check(_lanes(1, 1, 1, 1, lanes, slots=2), 3, 1, 1027, a="along1", b="along1", blocks=blocks, alpha=-2, beta=0.5)


def test_a_large_term_leaves_the_last_bits_of_single_sums() -> None:
    """Each lane has a term of 1, and 255 others that are small beside half a unit of it."""
    k = 64 * SINGLE.BK
    a, b, c = np.full((1, k), 2.0**-27, np.float32), np.ones((k, 1), np.float32), np.full((1, 1), np.nan, np.float32)
    a[0, : SINGLE.BK : 4] = 1
    exact = a.astype(np.float64).sum()
    for blocks in (1, 3):
        partition, _ = work_of(SINGLE, 1, 1, k, blocks, 0)
        args = (np.float32(1), a, b, np.float32(0), c, partition, ())
        launch(SINGLE, Variant("along4", "along1", c_aligned=False), args, partition, blocks, None)
        assert abs(c[0, 0] - exact) <= 6 * 2.0**-24 * exact


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("bn", [4, 16])
def test_splits(blocks: int, bn: int) -> None:
    config = CONFIGS[bn]
    check(config, 2 * config.BM + 1, bn + 1, 7 * config.BK - 4, blocks=blocks, alpha=1.5, beta=-1.0)


@pytest.mark.parametrize("blocks", [2, 5, 11, 17, 33, 35])
def test_parts_that_are_read_in_turns_and_in_groups(blocks: int) -> None:
    config = _lanes(32, 16, 8, 4, 4, slots=4)  # eight parts at a time
    check(config, 32, 16, 35 * config.BK, blocks=blocks)


def test_parts_of_plus_zero_are_published() -> None:
    """They are -0 then, but their sum is +0."""
    a, b, c = np.zeros((16, 96), np.float32), np.zeros((96, 4), np.float32), np.full((16, 4), np.nan, np.float32)
    partition, blocks = work_of(FOUR, 16, 4, 96, 3, 0)
    published = []
    counters = partition.counters

    class Watched:
        def __getitem__(self, index: int) -> int:
            return counters[index]

        def __setitem__(self, index: int, bits: int) -> None:
            published.extend([int(bits)] if counters[index] == 0 else [])
            counters[index] = bits

        def any(self) -> bool:
            return bool(counters.any())

    args = (np.float32(1), a, b, np.float32(0), c, partition._replace(counters=Watched()), ())
    launch(FOUR, Variant("along4", "along1", c_aligned=False), args, partition, blocks, None)
    assert published == [-(1 << 31)] * (2 * c.size)
    assert (c == 0).all()
    assert not np.signbit(c).any()


@pytest.mark.parametrize("whole", [1, 4, 5])
def test_whole_tiles(whole: int) -> None:
    check(FOUR, 65, 3, 36, blocks=2, whole=whole)


@pytest.mark.parametrize("bn", CONFIGS)
def test_any_order_of_threads(bn: int) -> None:
    for seed in range(3):
        check(CONFIGS[bn], 18, bn, 6 * CONFIGS[bn].BK + 4, blocks=2, seed=seed)


@pytest.mark.parametrize("k", [3, 31, 32, 33, 64, 65, 97])
def test_ends_of_k(k: int) -> None:
    check(FOUR, 16, 4, k, a="along1", blocks=1)


def test_columns_beyond_the_tile() -> None:
    check(FOUR, 40, 11, 40, blocks=3, whole=5)


def test_fewer_copies_than_threads() -> None:
    """A chunk of A ends where that of B begins, which other threads copy."""
    for seed in range(4):
        check(_lanes(4, 32, 4, 4, 4), 4, 32, 36, blocks=1, seed=seed)


def test_alpha_zero() -> None:
    check(FOUR, 16, 4, 0, blocks=1, alpha=0.0, beta=3.0)


def test_batch() -> None:
    generator = np.random.default_rng(1)
    a = generator.standard_normal((2, 3, 17, 40), dtype=np.float32)
    b = generator.standard_normal((3, 40, 5), dtype=np.float32)  # broadcast along the first
    c = np.full((2, 3, 17, 5), np.nan, np.float32)
    batch = {
        "matrices": 6,
        "inner": 3,
        "a_middle": a.strides[0],
        "a_inner": a.strides[1],
        "b_inner": b.strides[0],
        "c_middle": c.strides[0],
        "c_inner": c.strides[1],
        "middle": 2,
    }
    partition, blocks = work_of(FOUR, 17, 5, 40, 5, 7, **batch)
    variant = Variant("along4" if a.ctypes.data % 16 == 0 else "along1", "across1", c_aligned=False)
    launch(
        FOUR, variant, (np.float32(1), a[0, 0], b[0], np.float32(0), c[0, 0], partition, ()), partition, blocks, None
    )
    for i in range(2):
        for j in range(3):
            compared = accuracy.compare(c[i, j], *accuracy.reference(1, a[i, j], b[j]), 40)
            assert compared.ok, compared


@pytest.mark.parametrize("blocks", [1, 3])
def test_epilogue(blocks: int) -> None:
    def shift(value: Any, row: Any, col: Any, bias: Any) -> Any:
        return value + bias[row]

    generator = np.random.default_rng(2)
    a, b = filled(generator, "along4", 18, 100), filled(generator, "any", 3, 100).T
    bias = np.arange(18, dtype=np.float32)
    c = np.ones((18, 3), np.float32)
    expected, scale = accuracy.reference(1, a, b, 2, c)
    partition, blocks = work_of(FOUR, 18, 3, 100, blocks, 0)
    variant = Variant("along4", "any", c_aligned=False, epilogue=shift, vectors=1)
    launch(FOUR, variant, (np.float32(1), a, b, np.float32(2), c, partition, (bias,)), partition, blocks, None)
    compared = accuracy.compare(c, expected + bias[:, None], scale + bias[:, None], 100)
    assert compared.ok, compared


def test_configurations_are_checked() -> None:
    variant = Variant("across4", "across4", c_aligned=False)
    broken: dict[str, dict[str, Any]] = {
        "a chunk is four k per lane": {"BK": 16},
        "two slots or more": {"slots": 1},
        "pads hold the chunks' padding": {"pad": 0, "pad_b": 0},
        "dynamic shared memory": {"dynamic": False},
        "are powers of two": {"BM": 12, "TM": 12},
    }
    for words, changes in broken.items():
        with pytest.raises(ValueError, match=words):
            thin.build(FOUR.replace(**changes), variant)
    with pytest.raises(ValueError, match="slots hold the sums"):
        thin.build(SIXTEEN.replace(BM=32, TM=4, slots=2), variant)


@pytest.mark.parametrize(
    ("blocks", "per_sm", "shared"), [(4, 2, 1 << 16), (5, 3, 1 << 16), (4, 2, 0), (4, 2, 1 << 10), (40, 20, 1 << 16)]
)
def test_shared_memory_for_its_own_blocks(blocks: int, per_sm: int, shared: int) -> None:
    """On two multiprocessors; unless the driver cannot be told, or not all blocks fit at once."""
    m, k = 16 * FOUR.BM, 4 * FOUR.BK
    product = Product(dense("N", m, k), dense("N", k, FOUR.BN), dense("N", m, FOUR.BN))
    (step,) = STAGES["thin"].launches(FOUR, product, "ieee", Partition(blocks, 0), Gpu((9, 0), 2, shared)).steps
    room = per_sm * (FOUR.dynamic_shared + 1024)  # a kilobyte of each block is the system's
    if room > shared:
        assert step.carve_out == -1
    else:
        assert room <= step.carve_out * shared / 100 < room + shared / 100
