"""The stage `tf32_tma`: operands that tensor maps describe, rows in registers in the simulator, products on a GPU."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support.tensor_core_cases import tensor_matrix

from numba_gemm.device.units import MAX_GRID_Y
from numba_gemm.kernels.product import ONE, Batch, Layout, Product, dense
from numba_gemm.kernels.stage import Gpu
from numba_gemm.kernels.step import AT_C, MapOf, MatrixAt, Moving, Slot, Words
from numba_gemm.kernels.tensor_core import (
    TENSOR_PRECISIONS,
    TENSOR_STAGES,
    TensorVariant,
    WarpgroupConfig,
    tf32_tma,
    tma_stage,
)
from numba_gemm.kernels.tensor_core.config import ROW_BYTES
from numba_gemm.kernels.tensor_core.tma_stage import LAYOUTS, TmaVariant, describable, tma_operands
from numba_gemm.models.accuracy import TENSOR_BOUNDS
from numba_gemm.runtime import kernel_key
from numba_gemm.runtime.launch import launch
from numba_gemm.simulator.switch import SIMULATOR

TMA = TENSOR_STAGES["tf32_tma"]
TF32 = TENSOR_PRECISIONS["tf32"]

simulated = pytest.mark.skipif(not SIMULATOR, reason="runs on the simulator")

GPU = Gpu((9, 0), 132)
VARIANT = TmaVariant(TensorVariant(TF32), along=False)


WHOLE = [letters for letters, layout in LAYOUTS.items() if not layout.decomposed]


def in_order(order, rows, cols):
    """Return the layout of a dense matrix stored by rows, "N", or columns, "T"; "*", which no map describes."""
    return layout_of(rows, cols, by_columns=order == "T", offset=4 * (order == "*"))


def layout_of(rows, cols, *, by_columns=False, offset=0, pad=0):
    """Return the layout of a matrix stored by rows or by columns, with `pad` floats between them."""
    strides = (4, 4 * (rows + pad)) if by_columns else (4 * (cols + pad), 4)
    return Layout(rows, cols, *strides, offset)


def product_of(a, b, batch=ONE):
    return Product(a, b, dense("N", a.rows, b.cols), batch)


# ------------------------------------------------------------------------------------- operands of tensor maps


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (layout_of(8, 16), True),
        (layout_of(8, 17), False),
        (layout_of(8, 17, pad=3), True),
        (layout_of(8, 17, pad=1), False),
        (layout_of(1, 17), True),
        (layout_of(8, 16, offset=4), False),
        (layout_of(8, 16, by_columns=True), False),
        (layout_of(8, 1, by_columns=True), False),
        (layout_of(0, 16), False),
        (Layout(8, 16, 0, 4), False),
        (Layout(8, 16, 32, 4), False),
        (Layout(8, 16, -64, 4), False),
        (Layout(8, 16, 64, -4), False),
        (Layout(8, 16, 1 << 40, 4), False),
    ],
)
def test_what_a_tensor_map_can_describe(found, expected):
    assert describable(found) is expected


@pytest.mark.parametrize(
    ("step", "expected"), [(0, True), (1600, True), (1604, False), (-1600, False), (1 << 40, False)]
)
def test_steps_of_a_batch_that_a_tensor_map_can_describe(step, expected):
    assert describable(layout_of(8, 16), step) is expected


@pytest.mark.parametrize("letters", LAYOUTS)
def test_operands_of_all_layouts(letters):
    a, b = (in_order(order, *extents) for extents, order in zip([(12, 20), (20, 28)], letters, strict=True))
    found = tma_operands(product_of(a, b))
    batch = Batch((1, 1, 5), (0, 0, 1600), (0, 0, 0), (0, 0, 1600))
    several, layout = tma_operands(product_of(a, b, batch)), LAYOUTS[letters]
    assert (several.u_step, several.v_step) == ((0, 1600) if layout.swapped else (1600, 0))
    for changes in ({"a": (0, 0, 1604)}, {"b": (0, 0, -1600)}):
        other = tma_operands(product_of(a, b, batch._replace(**changes)))
        letter = "ab".index(*changes)  # of the operand that no map describes
        assert (other is None) == (layout.decomposed and letters[letter] != "*")
        if other is not None:
            assert other.layout[letter] == "*"
    assert found.layout == letters
    assert found.placed is layout
    assert (found.u_slot, found.v_slot) == ((Slot.B, Slot.A) if layout.swapped else (Slot.A, Slot.B))
    assert (found.rows, found.cols) == ((28, 12) if layout.swapped else (12, 28))
    assert (found.u.rows, found.u.cols) == ((found.rows, 20) if layout.along else (20, found.rows))
    assert (found.v.rows, found.v.cols) == (found.cols, 20)
    assert describable(found.u)
    assert describable(found.v) == (not layout.decomposed)


@pytest.mark.parametrize(("m", "n", "letters"), [(28, 12, "T*"), (12, 28, "*N"), (16, 16, "T*")])
def test_of_two_operands_that_are_not_contiguous_along_k_the_smaller_is_decomposed(m, n, letters):
    product = product_of(in_order("T", m, 20), in_order("N", 20, n))
    assert tma_operands(product).layout == letters


def test_operands_that_maps_cannot_describe():
    a, b = layout_of(12, 20, pad=1), layout_of(20, 28, pad=1)
    assert tma_operands(product_of(a, b)) is None


def test_extents_beyond_coordinates():
    assert tma_operands(product_of(layout_of(1 << 30, 4), layout_of(4, 4))) is None
    assert tma_operands(product_of(layout_of((1 << 30) - 4, 4), layout_of(4, 4))) is not None


def test_largest_batch():
    for count, fits in ((MAX_GRID_Y, True), (MAX_GRID_Y + 1, False)):
        found = tma_operands(product_of(layout_of(16, 16), layout_of(16, 16), BATCH._replace(extents=(1, 1, count))))
        assert (found is not None) == fits


@pytest.mark.parametrize(
    ("extents", "count", "shared", "found"),
    [
        ((1024, 2048, 1024), 257, "", None),
        ((64, 2048, 1024), 257, "", "*N"),
        ((1024, 2048, 1024), 257, "a", "*N"),
        ((1024, 2048, 1024), 257, "b", "T*"),  # whose one matrix is smaller than all of A
        ((512, 640, 1024), 256, "b", "T*"),
        ((640, 512, 1024), 256, "a", "*N"),
        ((768, 36, 68), 65535, "", None),  # parts are filled to whole tiles and slots
    ],
)
def test_parts_of_a_batch(extents, count, shared, found):
    """Large ones are made for some matrices at a time, by a stage whose launches can be divided."""
    m, n, k = extents
    a, b = in_order("T", m, k), in_order("N", k, n)
    a_step, b_step = (0 if name in shared else 4 * k * extent for name, extent in (("a", m), ("b", n)))
    product = product_of(a, b, Batch((1, 1, count), (0, 0, a_step), (0, 0, b_step), (0, 0, 4 * m * n)))
    operands = tma_operands(product)
    assert (operands and operands.layout) == found
    if found is not None:
        for config in TMA.configs:
            assert TMA.launches(config, product, "tf32", None, GPU).scratch_bytes <= 1 << 30


@pytest.mark.parametrize("config", TMA.configs, ids=lambda config: config.name)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_boxes_are_what_a_copy_can_bring(config, layout):
    for blocks in (1, 2):
        for rows, cols in tma_stage.boxes(config, layout, blocks):
            assert rows <= 256
            assert rows % 8 == 0, "the order of chunks in shared memory repeats after eight rows"
            assert 4 * cols == ROW_BYTES


@pytest.mark.parametrize("layout", WHOLE)
@pytest.mark.parametrize(("k", "cluster"), [(64, 1), (68, 2)])
def test_maps_and_grid_of_a_product(layout, k, cluster):
    """Each operand's map has the kernel's box; blocks are one per tile of C or of its transpose."""
    m, n, config = 200, 1000, TMA.configs[0]
    a, b = dense(layout[0], m, k), dense(layout[1], k, n)
    batch = Batch((1, 1, 3), (0, 0, 4 * m * k), (0, 0, 0), (0, 0, 4 * m * n))
    launches = TMA.launches(config, product_of(a, b, batch), "tf32", None, GPU)
    (step,) = launches.steps
    u_box, v_box = tma_stage.boxes(config, layout, cluster)
    a_map = MapOf(Slot.A, a if layout[0] == "N" else a.transposed, v_box if layout == "NN" else u_box, 3, 4 * m * k)
    b_map = MapOf(Slot.B, b if layout[1] == "N" else b.transposed, u_box if layout == "NN" else v_box, 3, 0)
    assert launches.maps == ((b_map, a_map) if layout == "NN" else (a_map, b_map))
    rows, cols = (n, m) if layout == "NN" else (m, n)
    assert (step.grid, step.cluster) == ((-(-rows // config.BM) * -(-cols // config.BN), 3, 1), cluster)
    assert (launches.scratch_bytes, launches.counters) == (0, 0)
    (step,) = TMA.launches(config, product_of(a, b), "tf32", None, Gpu((9, 0), 5)).steps
    assert (step.grid, step.cluster) == ((5, 1, 1), 1)


@pytest.mark.parametrize(
    ("k", "letters"),  # U that is contiguous along k has rows of whole vectors
    [
        (k, letters)
        for letters, layout in LAYOUTS.items()
        for k in (1, 64, 65, 100)
        if layout.decomposed and (k % 4 == 0 or not layout.along)
    ],
)
@pytest.mark.parametrize("config", TMA.configs, ids=lambda config: config.name)
def test_what_is_not_described_is_decomposed_first(config, k, letters):
    """Into an even number of slots, which lie behind each other as a block copies them."""
    m, n, count = 200, 1000, 3
    a, b = in_order(letters[0], m, k), in_order(letters[1], k, n)
    batch = Batch((1, 1, count), (0, 0, 4 * 64 * m), (0, 0, 0), (0, 0, 4 * m * n))
    product = product_of(a, b, batch)
    found = tma_operands(product)
    assert found.layout == letters
    launches = TMA.launches(config, product, "tf32", None, GPU)
    (before, step), (one,) = launches.steps, launches.maps
    assert (one.slot, one.layout) == (found.u_slot, found.u)
    mapped, part, steps = step.arguments[2], step.arguments[3], step.arguments[7].words
    assert mapped == Words((0,))
    slots, rows = 2 * -(-k // 64), -(-found.cols // config.BN) * config.BN
    assert part.layout == Layout(slots, 32 * rows, 128 * rows, 4)
    assert before.arguments[0] == MatrixAt(Moving(found.v_slot), found.v)
    assert before.arguments[1] == part
    assert before.grid == (slots * rows // 32, count, 1)
    size = -(-128 * slots * rows // 256) * 256
    shared = found.v_slot == Slot.B  # by all matrices of the batch
    assert before.arguments[-1].words[2:] == (found.v_step, 0 if shared else size)
    assert launches.scratch_bytes == (size if shared else count * size)
    assert steps[:4] == (found.u_step > 0, found.v_step > 0, 0 if shared else size, 4 * m * n)
    assert step.overlaps
    assert not before.overlaps
    assert not step.kernel.variant.pairs


@simulated
def test_the_simulator_says_that_it_has_no_matrix_instructions():
    with pytest.raises(NotImplementedError, match="no matrix instructions"):
        tf32_tma.build(TMA.configs[0], VARIANT)


def test_more_than_one_part_is_refused():
    with pytest.raises(ValueError, match="one part"):
        tf32_tma.build(TMA.configs[0], VARIANT._replace(tensor_variant=TensorVariant(TENSOR_PRECISIONS["tf32x3"])))


# -------------------------------------------------------------------------------------------- launches, without a GPU


BATCH = Batch((1, 1, 2), (0, 0, 4096), (0, 0, 4096), (0, 0, 4096))


def test_cached_kernel_names_are_distinct():
    """Everything that affects the code is in the name; an epilogue without a fingerprint has no name."""

    def epilogue_of(bias):
        return lambda value, row, col: value + bias

    def name(config, variant, *layout):
        return kernel_key.key(TMA.kernel_of(config, TmaVariant(variant, *layout)), (9, 0))

    variants = [TensorVariant(TF32, *more) for more in ((), (epilogue_of(1.0),), (epilogue_of(2.0),))]
    variants += [TensorVariant(TF32, epilogue_of(1.0), count) for count in (1, 2)]
    names = [name(*made) for made in itertools.product(TMA.configs, variants, *[(False, True)] * 3)]
    assert None not in names
    assert len(set(names)) == len(names) == len(variants) * 8 * len(TMA.configs)
    factors = [1.0]
    untold = TensorVariant(TF32, lambda value, row, col: value * factors[0])
    assert name(TMA.configs[0], untold, True) is None


def test_layouts_share_kernels():
    """C by rows and its transpose are one kernel's, but for an epilogue, which is passed rows and columns of C."""
    found = {}
    for letters, epilogue in itertools.product(LAYOUTS, (None, abs)):
        a, b = (in_order(order, 16, 16) for order in letters)
        found[letters, epilogue] = TMA.kernel(TMA.configs[0], product_of(a, b)._replace(epilogue=epilogue))
    along, across = (found[letters, None] for letters in ("NT", "TT"))
    assert along is found["N*", None] is found["*T", None]
    assert across is found["NN", None] is found["T*", None] is found["*N", None]
    assert len({*found.values()}) == 6


@pytest.mark.parametrize("letters", LAYOUTS)
def test_kernels_are_passed_the_matrix_that_they_compute(letters):
    a, b = (in_order(order, 16, 16) for order in letters)
    product = product_of(a, b)
    for one in (product, product._replace(epilogue=abs)):
        c = TMA.launches(TMA.configs[0], one, "tf32", None, GPU).multiplication.arguments[5]
        assert c == MatrixAt(AT_C, product.c.transposed if letters in ("NN", "*N", "*T") else product.c)


# ------------------------------------------------------------------------------------------------ rows in registers


def copied(rows, along):
    """A slot's rows of U as copies leave them: floats whose value says which row and k they are."""
    values = 100 * np.arange(rows, dtype=np.float32)[:, None] + np.arange(32, dtype=np.float32)
    boxes = [values] if along else [values[first : first + 32].T for first in range(0, rows, 32)]
    memory = []
    for box in boxes:
        chunks = box.reshape(-1, 8, 4)
        memory += [chunks[line, [chunk ^ line % 8 for chunk in range(8)]] for line in range(len(chunks))]
    return np.concatenate(memory).ravel()


@simulated
@pytest.mark.parametrize("along", [False, True])
def test_threads_load_the_rows_that_the_instruction_wants(along):
    start_of, load_rows = tf32_tma.row_loads(along)
    memory, down, seen = copied(128, along), 8 if along else 1, []
    for group, warp, lane in itertools.product(range(2), range(4), range(32)):
        row, first = start_of(np.uint32(group), np.uint32(warp), np.uint32(lane))
        held = np.full(tf32_tma.HELD, np.nan, np.float32)
        load_rows(held, memory, np.uint32(0), first)
        for step, half, lower in itertools.product(range(4), range(2), range(2)):
            k = 8 * step + lane % 4 + 4 * half
            assert held[4 * step + 2 * half + lower] == 100 * (int(row) + down * lower) + k
        seen += [int(row), int(row) + down] if lane % 4 == 0 else []
    assert sorted(seen) == list(range(128)), "each row is one thread's of four"


class Addresses:
    """Stand-in for shared memory that records the addresses of loads."""

    def __init__(self):
        self.asked = []

    def load1(self, memory, address):
        self.asked.append([int(address) // 4])
        return np.float32(0)

    def load2(self, memory, address):
        self.asked.append([int(address) // 4, int(address) // 4 + 1])
        return np.float32(0), np.float32(0)


@simulated
@pytest.mark.parametrize("along", [False, True])
def test_no_two_lanes_meet_in_a_bank(along, monkeypatch):
    asked = []
    for lane in range(32):
        addresses = Addresses()
        monkeypatch.setattr(tf32_tma, "shared_load1", addresses.load1)
        monkeypatch.setattr(tf32_tma, "shared_load2", addresses.load2)
        start_of, load_rows = tf32_tma.row_loads(along)
        _, first = start_of(np.uint32(1), np.uint32(2), np.uint32(lane))
        load_rows(np.zeros(tf32_tma.HELD, np.float32), None, np.uint32(0), first)
        asked.append(addresses.asked)
    at_once = 32 if along else 16  # lanes whose loads are one access: 128 bytes
    assert len(asked[0]) == (16 if along else 8)
    for access, begin in itertools.product(range(len(asked[0])), range(0, 32, at_once)):
        banks = [place % 32 for lane in range(begin, begin + at_once) for place in asked[lane][access]]
        assert sorted(banks) == list(range(32))


@simulated
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("m", "n"), [(64, 64), (65, 66), (50, 33)])
@pytest.mark.parametrize("with_epilogue", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("layout", [*WHOLE, "*T"])
def test_sums_are_stored(layout, beta, with_epilogue, m, n, turned):
    from numba import cuda, float32, int64

    from numba_gemm.simulator import scheduler

    def epilogue(value, row, col, across):
        return value + across[col] - row

    layout, config = LAYOUTS[layout], WarpgroupConfig(64, 64, producers=1)
    own = TensorVariant(TF32, epilogue, 1) if with_epilogue else TensorVariant(TF32)
    variant = TmaVariant(own, layout.along, layout.swapped and with_epilogue)
    start_of, _ = tf32_tma.row_loads(layout.along)
    store, groups, down = tf32_tma.sums_store(config, variant), config.BN // 8, 8 if layout.along else 1
    inside = m >= 64 and n >= 64

    @cuda.jit
    def kernel(sums, c, vectors):
        tid = np.uint32(cuda.threadIdx.x)
        lane, warp = np.uint32(tid % 32), np.uint32(tid // 32)
        row, _ = start_of(np.uint32(0), warp, lane)
        acc = cuda.local.array((groups, 4), float32)
        for j in range(groups):
            for q in range(4):
                acc[j, q] = sums[row + q // 2 * down, 8 * j + lane % 4 * 2 + q % 2]
        store(c, int64(row), int64(lane % 4 * 2), float32(1.5), acc, float32(beta), vectors, inside)

    generator = np.random.default_rng(m)
    sums, old = (generator.standard_normal(extents).astype(np.float32) for extents in ((64, 64), (m, n)))
    across = generator.standard_normal(n).astype(np.float32)
    around = np.full((n + 2, m + 4) if turned else (m + 2, n + 4), np.nan, np.float32)
    c = around[1:-1, 2:-2].T if turned else around[1:-1, 2:-2]
    c[...] = old if beta else np.nan
    computed = c.T if layout.swapped else c
    scheduler.run(kernel, (1, 1), 128, (sums, computed, (across,) if with_epilogue else ()))
    rows, cols = min(m, 64), min(n, 64)
    expected = (
        np.float32(1.5) * (sums.T if layout.swapped else sums)[:rows, :cols] + np.float32(beta) * old[:rows, :cols]
    )
    if with_epilogue:
        expected += across[:cols] - np.arange(rows, dtype=np.float32)[:, None]
    np.testing.assert_allclose(c[:rows, :cols], expected, rtol=1e-5, atol=1e-5)
    c[:rows, :cols] = np.nan
    np.testing.assert_array_equal(c, np.where(np.isnan(c), c, old) if beta else np.nan)
    c[...] = np.nan
    assert np.isnan(around).all(), "nothing beside C is written"


# --------------------------------------------------------------------------------------------------------- products


def random(order, rows, cols, pad=0):
    """Return a CUDA tensor stored by rows, "N", or columns, "T", with `pad` floats between them.

    With "*", no tensor map describes it: columns are not even contiguous.
    """
    import torch

    if order == "*":
        return torch.randn(rows, cols, 3, device="cuda")[:, :, 1]
    lines, length = (rows, cols) if order == "N" else (cols, rows)
    found = torch.randn(lines, length + pad, device="cuda")[:, :length]
    return found if order == "N" else found.T


def rounded(tensor, decomposed):
    """To TF32, to nearest, as float64: ties to even as copies round, and away from zero in decomposed operands."""
    import torch

    bits = tensor.contiguous().view(torch.int32)
    half = 0x1000 if decomposed else 0xFFF + ((bits >> 13) & 1)
    return ((bits + half) & ~0x1FFF).view(torch.float32).double()


def within(found, a, b, alpha=1.0, beta=0.0, before=None):
    """Return True if a product of TF32 is within its stated bound."""
    exact, size = alpha * (a.double() @ b.double()), abs(alpha) * (a.double().abs() @ b.double().abs())
    if beta:
        exact, size = exact + beta * before.double(), size + abs(beta) * before.double().abs()
    return bool(((found - exact).abs() <= (TENSOR_BOUNDS["tf32"] + 2.0**-22) * size).all())


SHAPES = [(4, 4, 4), (64, 128, 32), (100, 72, 92), (132, 260, 68), (300, 200, 1032), (1000, 2052, 36)]


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("config", TMA.configs, ids=lambda config: config.name)
def test_product(config, layout, shape):
    import torch

    m, n, k = shape
    a, b = random(layout[0], m, k, pad=8), random(layout[1], k, n)
    for beta, left, by_columns in itertools.product((0.0, -0.5), (1, 2), (False, True)):
        rows, cols = (n, m) if by_columns else (m, n)
        guarded = torch.full((rows + 2, cols + 4), float("nan"), device="cuda")
        inner = guarded[1 : rows + 1, left : cols + left]
        c = inner.T if by_columns else inner
        before = torch.randn(m, n, device="cuda")
        if beta:
            c.copy_(before)
        torch.cuda.synchronize()
        launch(TMA, config, 1.5, tensor_matrix(a), tensor_matrix(b), beta, tensor_matrix(c), precision="tf32")
        assert within(c, a, b, 1.5, beta, before)
        size = 1.5 * (a.double().abs() @ b.double().abs()) + abs(beta) * before.double().abs()
        exact = 1.5 * (rounded(a, layout[0] == "*") @ rounded(b, layout[1] == "*")) + beta * before.double()
        assert ((c - exact).abs() <= 2.0**-17 * size).all(), "elements are rounded to nearest"
        inner.fill_(float("nan"))
        assert torch.isnan(guarded).all(), "nothing beside C is written"


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("config", TMA.configs, ids=lambda config: config.name)
def test_many_rows_of_tiles_that_are_odd(config, layout):
    """Blocks share copies in pairs, the last of which compute a row of tiles beyond C, and write nothing there."""
    import torch

    m, n = 17 * config.BM - 8, 8 * config.BN - 8  # more tiles than an H200 has multiprocessors
    m, n = (n, m) if LAYOUTS[layout].swapped else (m, n)
    for k in (136, 1504):  # rows of both operands begin within sectors, at multiples of 16 bytes
        a, b = (random(order, rows, cols, pad=4) for order, rows, cols in zip(layout, (m, k), (k, n), strict=True))
        guarded = torch.full((m + 2, n + 4), float("nan"), device="cuda")
        c = guarded[1 : m + 1, 1 : n + 1]
        launch(TMA, config, 1.0, tensor_matrix(a), tensor_matrix(b), 0.0, tensor_matrix(c), precision="tf32")
        assert within(c, a, b)
        found = c.clone()
        launch(TMA, config, 1.0, tensor_matrix(a), tensor_matrix(b), 0.0, tensor_matrix(c), precision="tf32")
        assert torch.equal(c, found)
        c.fill_(float("nan"))
        assert torch.isnan(guarded).all(), "nothing beside C is written"


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("offset", [0, 1])
def test_all_layouts_and_addresses_have_a_product(layout, offset):
    """Operands that tensor maps cannot describe are decomposed; if these are both, the stage itself refuses them."""
    import torch

    from numba_gemm import explain, tiled_sgemm

    flat = torch.randn(400 * 304 + 1, device="cuda")[offset:]
    a, b = (
        flat[: rows * cols].view(rows, cols) if order == "N" else flat[: rows * cols].view(cols, rows).T
        for order, (rows, cols) in zip(layout, [(300, 400), (400, 200)], strict=True)
    )
    assert within(tiled_sgemm(a, b, precision="tf32"), a, b)
    if offset or layout != "TN":  # else, the model decides
        assert explain(a, b, precision="tf32").stage == ("persistent" if offset else "tf32_tma")
    if offset == 0:
        told = explain(a, b, stage="tf32_tma", precision="tf32")
        assert "decomposed" in (told.a_access, told.b_access) or layout != "TN"
        assert told.launches == (2 if layout == "TN" else 1)
        assert within(tiled_sgemm(a, b, stage="tf32_tma", precision="tf32"), a, b)
    else:
        with pytest.raises(ValueError, match="tensor maps cannot describe these operands"):
            tiled_sgemm(a, b, stage="tf32_tma", precision="tf32")


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("batch", [3, 5])
def test_matrices_may_lie_between_each_other(batch):
    """Their distance is less than that of their rows, which it need not divide."""
    import torch

    from numba_gemm import tiled_sgemm

    a = torch.randn(70, batch, 64, device="cuda").transpose(0, 1)
    b = torch.randn(64, batch, 36, device="cuda").transpose(0, 1)
    assert within(tiled_sgemm(a, b, precision="tf32"), a, b)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("letters", [letters for letters, layout in LAYOUTS.items() if layout.decomposed])
@pytest.mark.parametrize("shared", ["", "a", "b"])
@pytest.mark.parametrize(("m", "n", "k"), [(200, 136, 100), (64, 300, 1028)])
def test_a_batch_with_an_operand_that_is_decomposed(letters, shared, m, n, k):
    """Twice, the second time with beta; `shared` is the operand of which there is one matrix."""
    import torch

    from numba_gemm import explain, tiled_sgemm

    def matrices(order, rows, cols):
        if order == "*":
            return torch.randn(3, rows, cols, 3, device="cuda")[..., 1]
        return torch.randn(3, rows, cols, device="cuda") if order == "N" else torch.randn(3, cols, rows).cuda().mT

    a, b = matrices(letters[0], m, k), matrices(letters[1], k, n)
    a, b = a[0] if shared == "a" else a, b[0] if shared == "b" else b
    options = {"stage": "tf32_tma", "precision": "tf32"}
    assert explain(a, b, **options).launches == 2
    found = tiled_sgemm(a, b, **options)
    assert within(found, a, b)
    before = torch.randn_like(found)
    again = before.clone()
    tiled_sgemm(a, b, again, alpha=2.0, beta=-0.5, **options)
    assert within(again, a, b, 2.0, -0.5, before)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_integers_and_what_is_not_finite():
    import torch

    from numba_gemm import tiled_sgemm

    a, b = (
        torch.randint(-9, 9, (64, 128), device="cuda").float(),
        torch.randint(-9, 9, (128, 96), device="cuda").float(),
    )
    assert torch.equal(tiled_sgemm(a, b, precision="tf32"), (a.double() @ b.double()).float())
    a[3, 5], a[7, 9] = float("inf"), float("nan")
    a[9, 1] = torch.tensor(0x7F800001, dtype=torch.int32).view(torch.float32)
    b[127, 95], b[90, 33] = float("-inf"), float("nan")
    expected = a @ b
    down, across = a.T.contiguous().T, b.T.contiguous().T
    odd = torch.empty(64 * 128 + 1, device="cuda")[1:].view(64, 128).copy_(a)
    # In the last ones, either operand is decomposed.
    for x, y in ((a, b), (a, across), (down, across), (down, b), (odd, b), (down, b[:, :60])):
        found, wanted = tiled_sgemm(x, y, precision="tf32", stage="tf32_tma"), expected[:, : y.shape[1]]
        assert torch.equal(torch.isnan(found), torch.isnan(wanted))
        assert torch.equal(found[torch.isinf(wanted)], wanted[torch.isinf(wanted)])
        assert torch.isnan(found[9]).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_epilogue_is_told_rows_and_columns_of_c(layout):
    import torch

    from numba_gemm import tiled_sgemm

    def places(value, row, column, across, down):
        return value + across[column] - down[row]

    a, b = random(layout[0], 200, 64), random(layout[1], 64, 300)
    across, down = 1000 * torch.randn(300, device="cuda"), 1000 * torch.randn(200, device="cuda")
    found = tiled_sgemm(a, b, precision="tf32", epilogue=places, epilogue_args=(across, down))
    assert torch.allclose(found, a @ b + across - down[:, None], rtol=1e-6, atol=0.3)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_a_graph_has_maps_that_stay():
    """The maps of its operands are first made during the capture; others are made after it."""
    import torch

    from numba_gemm import tiled_sgemm

    a, b, c = torch.randn(256, 512, device="cuda"), torch.randn(512, 384, device="cuda"), torch.empty(256, 384).cuda()
    tiled_sgemm(a.clone(), b.clone(), c, precision="tf32")  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tiled_sgemm(a, b, c, precision="tf32")
    others = [torch.randn(256, 512, device="cuda") for _ in range(50)]  # each at an address of its own
    for x in others:
        assert within(tiled_sgemm(x, b, precision="tf32"), x, b)
        a.copy_(x)
        graph.replay()
        assert within(c, a, b)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_a_plan_says_that_nothing_is_decomposed():
    import torch

    import numba_gemm

    plan = numba_gemm.plan(512, 256, 128, precision="tf32")
    assert plan.stage == "tf32_tma"
    a, b = torch.randn(512, 128, device="cuda"), torch.randn(128, 256, device="cuda")
    assert torch.equal(plan(a, b), numba_gemm.tiled_sgemm(a, b, precision="tf32"))
    turned = random("T", 512, 128)
    assert within(plan(turned, b), turned, b)
    several = numba_gemm.plan(512, 256, 128, precision="tf32", layout="TN", stage="tf32_tma")
    down = random("T", 512, 128)
    assert torch.equal(several(down, b), numba_gemm.tiled_sgemm(down, b, precision="tf32", stage="tf32_tma"))
    assert within(several(a, b), a, b)
    assert numba_gemm.plan(2047, 1023, 511, precision="tf32").stage == "persistent"
