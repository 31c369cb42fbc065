"""TF32 products of operands as they lie in memory: where rows lie on the simulator, products on a GPU."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from test_tensor_core import simulated

from numba_gemm.gemm import direct_products
from numba_gemm.kernels.ladder.stage import Batch
from numba_gemm.kernels.tensor_core import TensorForm, WarpgroupConfig, direct, persistent
from numba_gemm.kernels.tensor_core.stage import ROW_BYTES
from numba_gemm.models.accuracy import MODE_BOUNDS
from numba_gemm.runtime import tensor_maps
from numba_gemm.runtime.launch import PLAIN, Extra, Matrix, Vector

HOPPER = (9, 0)
LETTERS = [*direct.LAYOUTS]


def matrix(rows, cols, *, by_columns=False, pointer=1 << 20, pad=0):
    """A matrix that lies by rows or by columns, lines so many floats longer than they need be."""
    strides = (4, 4 * (rows + pad)) if by_columns else (4 * (cols + pad), 4)
    return Matrix(pointer, rows, cols, *strides, 0, None)


# ----------------------------------------------------------------------------------------------------- arrangement


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (matrix(8, 16), True),
        (matrix(8, 17), False),
        (matrix(8, 17, pad=3), True),
        (matrix(8, 17, pad=1), False),
        (matrix(1, 17), True),
        (matrix(8, 16, pointer=(1 << 20) + 4), False),
        (matrix(8, 16, by_columns=True), False),
        (matrix(8, 1, by_columns=True), False),
        (matrix(0, 16), False),
        (Matrix(1 << 20, 8, 16, 0, 4, 0, None), False),
        (Matrix(1 << 20, 8, 16, 32, 4, 0, None), False),
        (Matrix(1 << 20, 8, 16, -64, 4, 0, None), False),
        (Matrix(1 << 20, 8, 16, 64, -4, 0, None), False),
        (Matrix(1 << 20, 8, 16, 1 << 40, 4, 0, None), False),
    ],
)
def test_what_a_tensor_map_can_describe(found, expected):
    assert tensor_maps.describable(found) is expected


@pytest.mark.parametrize("letters", ["NN", "NT", "TN", "TT"])
def test_operands_are_arranged(letters):
    a, b = (
        matrix(*extents, by_columns=letter == "T")
        for extents, letter in zip([(12, 20), (20, 28)], letters, strict=True)
    )
    found = direct_products.arrange(a, b, HOPPER)
    assert direct_products.arrange(a, b, (8, 9)) is None
    assert direct_products.arrange(a, b, (10, 0)) is None
    batch = Batch((1, 1, 5), (0, 0, 1600), (0, 0, 0), (0, 0, 1600))
    several = direct_products.arrange(a, b, HOPPER, batch)
    if letters == "TN":
        assert found is None
        return
    layout = direct.LAYOUTS[letters]
    assert (several.u_step, several.v_step) == ((0, 1600) if layout.swapped else (1600, 0))
    assert (several.matrices, found.matrices) == (5, 1)
    assert direct_products.arrange(a, b, HOPPER, replace(batch, a=(0, 0, 1604))) is None
    assert direct_products.arrange(a, b, HOPPER, replace(batch, b=(0, 0, -1600))) is None
    assert found.letters == letters
    assert (found.rows, found.cols, found.k) == ((28, 12, 20) if layout.swapped else (12, 28, 20))
    assert (found.u.rows, found.u.cols) == ((found.rows, 20) if layout.along else (20, found.rows))
    assert (found.v.rows, found.v.cols) == (found.cols, 20)
    assert tensor_maps.describable(found.u)
    assert tensor_maps.describable(found.v)


@pytest.mark.parametrize("odd", ["a", "b"])
def test_operands_that_maps_cannot_describe_are_not_arranged(odd):
    a, b = matrix(12, 20, pad=odd == "a"), matrix(20, 28, pad=odd == "b")
    assert direct_products.arrange(a, b, HOPPER) is None


def test_extents_beyond_coordinates_are_not_arranged():
    assert direct_products.arrange(matrix(1 << 30, 4), matrix(4, 4), HOPPER) is None
    assert direct_products.arrange(matrix((1 << 30) - 4, 4), matrix(4, 4), HOPPER) is not None


@pytest.mark.parametrize("config", direct.CONFIGS, ids=lambda config: config.name)
@pytest.mark.parametrize("letters", LETTERS)
def test_boxes_are_what_a_copy_can_bring(config, letters):
    for rows, cols in direct.boxes(config, direct.LAYOUTS[letters]):
        assert rows <= 256
        assert 4 * cols == ROW_BYTES
    assert (config.BM, config.BN) in direct_products.RATES


def test_small_products_get_small_tiles():
    def tiles(m, n, k):
        config = direct_products.choose(direct_products.arrange(matrix(m, k), matrix(k, n), HOPPER), 132)
        return config.BM, config.BN

    assert tiles(512, 512, 1024) == (64, 64)
    assert tiles(1024, 1024, 1024) == (64, 128)
    assert tiles(3072, 3072, 3072) == (128, 192)
    assert tiles(4096, 4096, 4096) == (128, 256)


@simulated
def test_the_simulator_says_that_it_has_no_matrix_instructions():
    with pytest.raises(NotImplementedError, match="no matrix instructions"):
        direct.build(direct.CONFIGS[0], TensorForm(direct.MODE), direct.LAYOUTS["NN"])


def test_more_than_one_part_is_refused():
    from numba_gemm.kernels.tensor_core import MODES

    with pytest.raises(ValueError, match="one part"):
        direct.build(direct.CONFIGS[0], TensorForm(MODES["tf32x3"]), direct.LAYOUTS["NN"])


class Driver:
    """What stands for the driver: memory from 1 MiB on, maps that are numbered, and what was copied where."""

    CUresult = tensor_maps.driver.CUresult

    def __init__(self, monkeypatch):
        self.allocated, self.encoded, self.written = 0, 0, {}
        self.status = self.refusal = self.CUresult.CUDA_SUCCESS
        for name in ("_made", "_free", "_places", "_streams"):
            monkeypatch.setattr(tensor_maps, name, {})
        for name in (
            "cuMemAlloc",
            "cuTensorMapEncodeTiled",
            "cuStreamCreate",
            "cuMemcpyHtoDAsync",
            "cuStreamSynchronize",
        ):
            monkeypatch.setattr(tensor_maps.driver, name, getattr(self, name))
        monkeypatch.setattr(tensor_maps, "relaxed_capture", contextlib.nullcontext)
        monkeypatch.setattr(tensor_maps, "call", lambda function, *arguments: function(*arguments))

    def cuMemAlloc(self, size):
        self.allocated += 1
        return self.status, self.allocated << 20

    def cuTensorMapEncodeTiled(self, kind, rank, pointer, extents, *rest):
        self.encoded += 1
        return self.refusal, SimpleNamespace(opaque=[self.encoded] * 16)

    def cuStreamCreate(self, flags):
        return 7

    def cuMemcpyHtoDAsync(self, place, data, size, stream):
        assert (len(data), size, stream) == (128, 128, 7)
        assert place not in self.written, "none is written anew"
        self.written[place] = data

    def cuStreamSynchronize(self, stream):
        assert stream == 7


def test_a_map_is_made_once_and_stays(monkeypatch):
    driver = Driver(monkeypatch)
    first = tensor_maps.place(matrix(8, 16), 8, 16)
    assert tensor_maps.place(matrix(8, 16), 8, 16, 5) == first, "all five are one"
    others = {tensor_maps.place(matrix(8, 16, pointer=(1 << 20) + 64 * i), 8, 16) for i in range(1, 600)}
    others |= {tensor_maps.place(matrix(8, 16), 16, 16), tensor_maps.place(matrix(8, 16), 8, 16, 5, 64)}
    assert (len(others), driver.encoded, driver.allocated) == (601, 602, 2)
    assert set(driver.written) == others | {first}


def test_maps_end_where_their_places_do(monkeypatch):
    driver = Driver(monkeypatch)
    driver.status = driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    assert tensor_maps.place(matrix(8, 16), 8, 16) is None
    driver.status = driver.CUresult.CUDA_SUCCESS
    monkeypatch.setattr(tensor_maps, "_made", {0: tensor_maps.MOST})
    assert tensor_maps.place(matrix(8, 16), 8, 16) is None
    assert not driver.written


def test_a_map_that_the_driver_refuses_takes_no_place(monkeypatch):
    driver = Driver(monkeypatch)
    driver.refusal = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    assert tensor_maps.place(matrix(8, 16), 8, 16) is None
    driver.refusal = driver.CUresult.CUDA_SUCCESS
    assert tensor_maps.place(matrix(8, 16), 8, 16) is not None
    assert (driver.allocated, len(driver.written), len(tensor_maps._free[0])) == (1, 1, tensor_maps.PAGE - 1)


# -------------------------------------------------------------------------------------------- launches, without a GPU


@pytest.fixture
def launched(monkeypatch):
    """Record launch objects and their calls instead of compiling."""
    made = []

    class Recorded:
        def __init__(self, found, config, c, extra):
            self.found, self.config, self.calls = found, config, []
            made.append(self)

        def __call__(self, alpha, found, *arguments):
            self.calls.append((found, arguments))
            return True

    monkeypatch.setattr(direct_products, "_Launch", Recorded)
    monkeypatch.setattr(direct_products, "_kept_launches", {})
    properties = replace(direct_products.device_properties(0), cc=HOPPER)
    monkeypatch.setattr(direct_products, "device_properties", lambda device: properties)
    return made


BATCH = Batch((1, 1, 2), (0, 0, 4096), (0, 0, 4096), (0, 0, 4096))
VECTOR = Vector(4096, 8, 4, None)
EXTRA = Extra(BATCH, abs, (VECTOR,))
DIRECT_KEYS = {
    "configuration": {"config": direct.CONFIGS[1]},
    "device": {"device": 1},
    "layout of B": {"b": matrix(16, 16, by_columns=True)},
    "layout of both": {"a": matrix(16, 16, by_columns=True), "b": matrix(16, 16, by_columns=True)},
    "A's strides": {"a": matrix(16, 16, pad=4)},
    "B's strides": {"b": matrix(16, 16, pad=4)},
    "C's strides": {"c": matrix(16, 16, pad=1)},
    "C by columns": {"c": matrix(16, 16, by_columns=True)},
    "rows": {"a": matrix(8, 16), "c": matrix(8, 16)},
    "k": {"a": matrix(16, 8, pad=8), "b": matrix(8, 16)},
    "matrices": {"extra": replace(EXTRA, batch=replace(BATCH, extents=(1, 1, 3)))},
    "A's step": {"extra": replace(EXTRA, batch=replace(BATCH, a=(0, 0, 0)))},
    "B's step": {"extra": replace(EXTRA, batch=replace(BATCH, b=(0, 0, 0)))},
    "C's step": {"extra": replace(EXTRA, batch=replace(BATCH, c=(0, 0, 8192)))},
    "epilogue": {"extra": replace(EXTRA, epilogue=max)},
    "vectors": {"extra": replace(EXTRA, vectors=(VECTOR, VECTOR))},
    "a vector's stride": {"extra": replace(EXTRA, vectors=(replace(VECTOR, stride=8),))},
    "a vector's size": {"extra": replace(EXTRA, vectors=(replace(VECTOR, size=9),))},
}


SQUARE = matrix(16, 16)


def multiply(a=SQUARE, b=SQUARE, c=SQUARE, device=0, extra=EXTRA, config=None):
    on_device = (replace(one, device=device) for one in (a, b))
    return direct_products.launch(1.0, *on_device, 0.0, replace(c, device=device), 0, extra, config)


@pytest.mark.parametrize("case", DIRECT_KEYS)
def test_launch_key_has_every_property(launched, case):
    assert multiply()
    assert multiply(a=matrix(16, 16, pointer=1 << 21))  # another address
    assert [len(one.calls) for one in launched] == [2]
    assert multiply(**DIRECT_KEYS[case])
    assert multiply()
    assert [len(one.calls) for one in launched] == [3, 1]


def test_repeated_launch_uses_the_operands_of_the_call(launched):
    places = [1 << 20, 1 << 21, 3 << 20]
    for pointer in places:
        assert multiply(a=matrix(16, 16, pointer=pointer))
    (one,) = launched
    assert [found.v.pointer for found, _ in one.calls] == places


def test_operands_that_maps_cannot_describe_are_not_launched(launched):
    assert not multiply(a=matrix(16, 16, pad=1))
    assert not launched


def test_largest_batch():
    limit = direct_products.MAX_MATRICES
    for count, arranged in ((limit, True), (limit + 1, False)):
        found = direct_products.arrange(matrix(16, 16), matrix(16, 16), HOPPER, replace(BATCH, extents=(1, 1, count)))
        assert (found is not None) == arranged


def test_cached_kernel_names_are_distinct(monkeypatch):
    """Everything that affects the code is in the name; an epilogue without a fingerprint has no name."""
    names = []
    monkeypatch.setattr(direct_products.kernel_cache, "kept", lambda name, make: names.append(name))

    def epilogue_of(bias):
        return lambda value, row, col: value + bias

    forms = [TensorForm(direct.MODE, *more) for more in ((), (epilogue_of(1.0),), (epilogue_of(2.0),))]
    forms += [TensorForm(direct.MODE, epilogue_of(1.0), count) for count in (1, 2)]
    for form, letters, config in itertools.product(forms, LETTERS, direct.CONFIGS):
        direct_products.kernel_cubin(config, form, letters)
    assert len(set(names)) == len(names) == len(forms) * len(LETTERS) * len(direct.CONFIGS)
    factors = [1.0]
    untold = TensorForm(direct.MODE, lambda value, row, col: value * factors[0])
    direct_products.kernel_cubin(direct.CONFIGS[0], untold, "NN")
    assert names[-1] is None


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
@pytest.mark.parametrize("letters", LETTERS)
def test_threads_load_the_rows_that_the_instruction_wants(letters):
    along = direct.LAYOUTS[letters].along
    start_of, load_rows = direct.row_loads(along)
    memory, down, seen = copied(128, along), 8 if along else 1, []
    for group, warp, lane in itertools.product(range(2), range(4), range(32)):
        row, first = start_of(np.uint32(group), np.uint32(warp), np.uint32(lane))
        held = np.full(direct.HELD, np.nan, np.float32)
        load_rows(held, memory, np.uint32(0), first)
        for step, half, lower in itertools.product(range(4), range(2), range(2)):
            k = 8 * step + lane % 4 + 4 * half
            assert held[4 * step + 2 * half + lower] == 100 * (int(row) + down * lower) + k
        seen += [int(row), int(row) + down] if lane % 4 == 0 else []
    assert sorted(seen) == list(range(128)), "each row is one thread's of four"


class Addresses:
    """What stands for shared memory, to learn where loads go."""

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
        monkeypatch.setattr(direct, "shared_load1", addresses.load1)
        monkeypatch.setattr(direct, "shared_load2", addresses.load2)
        start_of, load_rows = direct.row_loads(along)
        _, first = start_of(np.uint32(1), np.uint32(2), np.uint32(lane))
        load_rows(np.zeros(direct.HELD, np.float32), None, np.uint32(0), first)
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
@pytest.mark.parametrize("letters", LETTERS)
def test_sums_are_stored(letters, beta, with_epilogue, m, n, turned):
    from numba import cuda, float32, int64

    from numba_gemm.simulator import scheduler

    def epilogue(value, row, col, across):
        return value + across[col] - row

    layout, config = direct.LAYOUTS[letters], WarpgroupConfig(64, 64, producers=1)
    form = TensorForm(direct.MODE, epilogue, 1) if with_epilogue else TensorForm(direct.MODE)
    start_of, _ = direct.row_loads(layout.along)
    store, groups, down = direct.sums_store(config, form, layout), config.BN // 8, 8 if layout.along else 1
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
    scheduler.run(kernel, (1, 1), 128, (sums, c, (across,) if with_epilogue else ()))
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


def random(letter, rows, cols, pad=0):
    """A CUDA tensor of these extents, by rows or columns, that are so many floats apart."""
    import torch

    lines, length = (rows, cols) if letter == "N" else (cols, rows)
    found = torch.randn(lines, length + pad, device="cuda")[:, :length]
    return found if letter == "N" else found.T


def as_matrix(tensor):
    return Matrix(tensor.data_ptr(), *tensor.shape, 4 * tensor.stride(0), 4 * tensor.stride(1), 0, tensor)


def rounded(tensor):
    """To TF32, to nearest, ties to even; as float64."""
    import torch

    bits = tensor.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32).double()


def within(found, a, b, alpha=1.0, beta=0.0, before=None):
    """Whether a product of TF32 is as near as it is stated to be."""
    exact, size = alpha * (a.double() @ b.double()), abs(alpha) * (a.double().abs() @ b.double().abs())
    if beta:
        exact, size = exact + beta * before.double(), size + abs(beta) * before.double().abs()
    return bool(((found - exact).abs() <= (MODE_BOUNDS["tf32"] + 2.0**-22) * size).all())


SHAPES = [(4, 4, 4), (64, 128, 32), (100, 72, 92), (132, 260, 68), (300, 200, 1032), (1000, 2052, 36)]


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("letters", LETTERS)
@pytest.mark.parametrize("config", direct.CONFIGS, ids=lambda config: config.name)
def test_product(config, letters, shape):
    import torch

    m, n, k = shape
    a, b = random(letters[0], m, k, pad=8), random(letters[1], k, n)
    for beta, left, by_columns in itertools.product((0.0, -0.5), (1, 2), (False, True)):
        rows, cols = (n, m) if by_columns else (m, n)
        guarded = torch.full((rows + 2, cols + 4), float("nan"), device="cuda")
        inner = guarded[1 : rows + 1, left : cols + left]
        c = inner.T if by_columns else inner
        before = torch.randn(m, n, device="cuda")
        if beta:
            c.copy_(before)
        assert direct_products.launch(1.5, as_matrix(a), as_matrix(b), beta, as_matrix(c), 0, PLAIN, config)
        assert within(c, a, b, 1.5, beta, before)
        size = 1.5 * (a.double().abs() @ b.double().abs()) + abs(beta) * before.double().abs()
        exact = 1.5 * (rounded(a) @ rounded(b)) + beta * before.double()
        assert ((c - exact).abs() <= 2.0**-17 * size).all(), "elements are rounded to nearest"
        inner.fill_(float("nan"))
        assert torch.isnan(guarded).all(), "nothing beside C is written"


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("letters", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("offset", [0, 1])
def test_all_layouts_and_addresses_have_a_product(letters, offset):
    """Those that are not arranged are split."""
    import torch

    from numba_gemm import tiled_sgemm

    flat = torch.randn(400 * 304 + 1, device="cuda")[offset:]
    a, b = (
        flat[: rows * cols].view(rows, cols) if letter == "N" else flat[: rows * cols].view(cols, rows).T
        for letter, (rows, cols) in zip(letters, [(300, 400), (400, 200)], strict=True)
    )
    arranged = direct_products.arrange(as_matrix(a), as_matrix(b), HOPPER)
    assert (arranged is None) == (offset == 1 or letters == "TN")
    assert within(tiled_sgemm(a, b, precision="tf32"), a, b)


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
    expected = a @ b
    found = tiled_sgemm(a, b, precision="tf32")
    assert torch.equal(torch.isnan(found), torch.isnan(expected))
    assert torch.equal(found[torch.isinf(expected)], expected[torch.isinf(expected)])
    assert torch.isnan(found[9]).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("letters", LETTERS)
def test_an_epilogue_is_told_rows_and_columns_of_c(letters):
    import torch

    from numba_gemm import tiled_sgemm

    def places(value, row, column, across, down):
        return value + across[column] - down[row]

    a, b = random(letters[0], 200, 64), random(letters[1], 64, 300)
    across, down = 1000 * torch.randn(300, device="cuda"), 1000 * torch.randn(200, device="cuda")
    found = tiled_sgemm(a, b, precision="tf32", epilogue=places, epilogue_args=(across, down))
    assert torch.allclose(found, a @ b + across - down[:, None], rtol=1e-6, atol=0.3)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_a_graph_has_maps_that_stay():
    """Of operands that no map was made of before the capture; others are made after it."""
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
def test_a_plan_says_that_nothing_is_split():
    import torch

    import numba_gemm

    plan = numba_gemm.plan(512, 256, 128, precision="tf32")
    assert plan.stage == "direct"
    a, b = torch.randn(512, 128, device="cuda"), torch.randn(128, 256, device="cuda")
    assert torch.equal(plan(a, b), numba_gemm.tiled_sgemm(a, b, precision="tf32"))
    turned = random("T", 512, 128)
    assert within(plan(turned, b), turned, b)
    assert numba_gemm.plan(512, 256, 128, precision="tf32", layout="TN").stage == persistent.STAGE.name
    assert numba_gemm.plan(511, 255, 127, precision="tf32").stage == persistent.STAGE.name
