"""Bound products: parameters of launches, keys, workspaces, threads, batches and vectors; kernels are loaded once."""

from __future__ import annotations

import ctypes
import gc
import struct
import threading
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from cuda.bindings import driver
from support.array_libraries import aligned_empty
from support.host_gpu import CONFIG, CONTEXT, NAIVE, parameters, schedule_of, scheduled
from support.operands import LAYOUTS, NAN, REPEATING, check, filled

from numba_gemm.kernels import STAGES
from numba_gemm.kernels import stage as stages
from numba_gemm.kernels.ladder.partitions import PartitionLayout, default_partition
from numba_gemm.kernels.ladder.stage import ANY
from numba_gemm.kernels.product import Batch, Layout, Product, dense
from numba_gemm.kernels.stage import Gpu, Partition
from numba_gemm.kernels.step import Moving, Scalar, Slot
from numba_gemm.runtime import device as devices
from numba_gemm.runtime import driver as driver_module
from numba_gemm.runtime import launch, once_per_key, tensor_maps
from numba_gemm.runtime.bound_product import NoRoomForMaps
from numba_gemm.runtime.compiler import Cubin
from numba_gemm.runtime.frame import Frame, FrameLayout
from numba_gemm.runtime.matrix import Matrix, Vector
from numba_gemm.runtime.workspace import Workspace

STREAM_K = STAGES["stream_k"]
PERSISTENT = STAGES["persistent"]
WORDS = list(range(2, 22))  # of a schedule


def matrix(x, device=0):
    return Matrix(x.ctypes.data, *x.shape, *x.strides, device, x)


def product_of(a, b, c, **options):
    return launch.product_of(*map(matrix, (a, b, c)), **options)


def bind(a, b, c, stage=NAIVE, config=CONFIG):
    return devices.get_device(0).bind(stage, config, product_of(a, b, c))


def run(a, b, c, *, stage=NAIVE, config=CONFIG, alpha=1.0, beta=0.0, **options):
    launch.launch(stage, config, alpha, matrix(a), matrix(b), beta, matrix(c), **options)


def addresses(a, b, c):
    return a.ctypes.data, b.ctypes.data, c.ctypes.data


@pytest.mark.simulator
def test_simulated_kernel_gets_its_partition():
    seen = []

    def kernel(alpha, a, b, beta, c, partition, vectors):
        assert vectors == ()
        memory, counters, *words = partition
        seen.append((memory.size, memory.dtype, bool(np.isnan(memory).all()), counters.tolist(), words))
        c[0, 0] = a[0, 0] * b[0, 0]

    def schedule(config, m, n, k, batch, partition):
        assert (m, n, k, batch, partition) == (1, 1, 1, Batch(), Partition(1, 0))
        return PartitionLayout((1, 1, 1), 256, 3, tuple(WORDS))

    stage = replace(NAIVE, schedule=schedule, build=lambda config, variant: kernel, block=lambda config: (1, 1))
    c = np.zeros((1, 1), np.float32)
    run(np.full((1, 1), 2, np.float32), np.ones((1, 1), np.float32), c, stage=stage, partition=Partition(1, 0))
    assert c[0, 0] == 2
    assert seen == [(64, np.float32, True, [0, 0, 0], WORDS)]


# ---------------------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize("layout", sorted(LAYOUTS.keys() - {"packed records"}))  # they are not on float32's boundaries
def test_launch_tells_the_driver_everything(gpu, layout):
    lay_out = LAYOUTS[layout]
    a, b, c = lay_out(filled(6, 3)), lay_out(filled(3, 5)), lay_out(filled(6, 5, seed=1))
    before, bound = c.copy(), bind(a, b, c)
    bound.enqueue(2.0, a.ctypes.data, b.ctypes.data, 0.5, c.ctypes.data, 40)
    check(c, a, b, alpha=2.0, beta=0.5, c=before)
    (did,) = gpu.launches
    assert did.grid == (*NAIVE.grid(CONFIG, 6, 5), 1)
    assert did.block == (*NAIVE.block(CONFIG), 1)
    assert (did.shared, did.stream, did.overlaps) == (CONFIG.dynamic_shared, 40, False)
    other_a, other_c = lay_out(filled(6, 3, seed=3)), lay_out(filled(6, 5, seed=4))
    bound.enqueue(1.0, other_a.ctypes.data, b.ctypes.data, 0.0, other_c.ctypes.data, 0)
    check(other_c, other_a, b)
    assert gpu.launches[-1].stream == 0


BATCHED = Batch((1, 1, 3), (0, 0, 64 * 64 * 4), (0, 0, 64 * 64 * 4), (0, 0, 64 * 64 * 4))
SQUARE = dense("N", 64, 64)
ACROSS = dense("T", 64, 64)
# Stages with the precision, and changes of the product.
EVERY_STEP = {
    **{name: (name, "ieee", {}) for name in ("naive", "vectorized", "stream_k", "thin")},
    "stream_k, a batch": ("stream_k", "ieee", {"batch": BATCHED}),
    "stream_k, vectors": ("stream_k", "ieee", {"epilogue": abs, "vectors": ((8, 4), (9, -8))}),
    **{f"persistent, {name}": ("persistent", name, {}) for name in PERSISTENT.precisions},
    "persistent, a batch": ("persistent", "fp16x3", {"batch": BATCHED}),
    "persistent, vectors": ("persistent", "bf16x6", {"epilogue": abs, "vectors": ((8, 4), (9, -8))}),
    "fresh_sums": ("fresh_sums", "bf16x6", {}),
    "warp_mma": ("warp_mma", "bf16x6", {}),
    "tf32_tma": ("tf32_tma", "tf32", {}),
    "tf32_tma, NT": ("tf32_tma", "tf32", {"b": ACROSS}),
    "tf32_tma, TT": ("tf32_tma", "tf32", {"a": ACROSS, "b": ACROSS}),
    "tf32_tma, TN": ("tf32_tma", "tf32", {"a": ACROSS}),
    "tf32_tma, TN, a batch": ("tf32_tma", "tf32", {"a": ACROSS, "batch": BATCHED}),
    "tf32_tma, A at an odd address": (
        "tf32_tma",
        "tf32",
        {"a": SQUARE._replace(offset=4), "epilogue": abs, "vectors": ((8, 4), (9, -8))},
    ),
    "tf32_tma, a batch": ("tf32_tma", "tf32", {"batch": BATCHED}),
    "tf32_tma, vectors": ("tf32_tma", "tf32", {"epilogue": abs, "vectors": ((8, 4), (9, -8))}),
    **{
        f"{stage}, whole {side}, {ready or 'nothing'} prepared": (
            stage,
            precision,
            {
                **dict(zip("abc", (dense("N", m, 2048), dense("N", 2048, n), dense("N", m, n)))),
                "prepared": ("a" in ready, "b" in ready),
            },
        )
        for side, m, n in (("rows", 640, 512), ("columns", 384, 896))
        for stage, precision in (("persistent", "fp16x3"), ("rows_in_registers", "bf16x6"))
        for ready in ("", "a", "b", "ab")
    },
    "persistent, whole rows, vectors": (
        "persistent",
        "bf16x6",
        {
            **dict(zip("abc", (dense("N", 640, 2048), dense("N", 2048, 512), dense("N", 640, 512)))),
            "epilogue": abs,
            "vectors": ((8, 4), (9, -8)),
            "prepared": (False, True),
        },
    ),
}


def value_of(word):
    """Return the float32 of a constant's word."""
    return struct.unpack("<f", struct.pack("<I", word))[0]


def partition_of(stage, product):
    """Return one that needs a workspace; of an oblong C, whole rows or columns, and two blocks for each other tile."""
    if product.m == product.n:
        return Partition(5, 0) if stage.takes_partition else None
    rows, cols = -(-product.m // stage.configs[0].BM), -(-product.n // stage.configs[0].BN)
    whole = 2 * cols if product.m > product.n else 3 * rows
    return Partition(2 * (rows * cols - whole), whole)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("case", EVERY_STEP)
def test_every_word_of_every_step_reaches_the_driver(gpu, case, swapped):
    """In one frame: other values for all words that move; then A, B and the workspace of the call before."""
    gpu.computes = False
    name, precision, changes = EVERY_STEP[case]
    stage, product = STAGES[name], Product(SQUARE, SQUARE, SQUARE)._replace(**changes)
    device = devices.get_device(0)
    partition = partition_of(stage, product)
    launches = stage.launches(stage.configs[0], product, precision, partition, Gpu((9, 0), 132))
    assert len(launches.steps) >= 3 or "whole" not in case
    launches = launches.with_operands_swapped() if swapped else launches
    bound = device.loaded(launches)
    for turn in range(3):
        alpha, beta, stream = 0.5 + turn, -2.0 * turn, 40 + (turn > 0)
        a, b, c = (1 << 44) + 4096 * (turn > 0), (1 << 45) + 4096 * (turn > 0), (1 << 46) - 16 * turn
        vectors = [(1 << 43) + 4 * i + turn for i in range(len(product.vectors) + sum(product.prepared))]
        with gpu.recording() as made:
            bound.enqueue(alpha, a, b, beta, c, stream, vectors)
        values = {Slot.ALPHA: alpha, Slot.BETA: beta, Slot.A: a, Slot.B: b, Slot.C: c}
        values |= {Slot.VECTORS + i: vector for i, vector in enumerate(vectors)}
        if launches.maps:
            places = device.tensor_maps.places([({Slot.A: a, Slot.B: b}[one.slot], one) for one in launches.maps])
            values |= dict(zip((Slot.FIRST_MAP, Slot.SECOND_MAP), places))
        if len(launches.steps) > 1:
            lease = device.workspaces.lease(stream, launches.scratch_bytes)
            values[Slot.SCRATCH] = lease.pointer
            device.workspaces.release(lease)
        elif launches.scratch_bytes or launches.counters:
            needs = launches.scratch_bytes, launches.counters
            values[Slot.SCRATCH], values[Slot.COUNTERS] = device.workspaces.reserve(stream, *needs)
        assert len(made) == len(launches.steps)
        for did, step in zip(made, launches.steps, strict=True):
            words = [
                value_of(word) if isinstance(argument, Scalar) and isinstance(word, int) else word
                for argument in step.arguments
                for word in argument.words
            ]
            words = [values[word.slot] + word.offset if isinstance(word, Moving) else word for word in words]
            told = [x for one in did.arguments.values() for x in (one if isinstance(one, list) else [one])]
            assert told == words
            assert (did.grid, did.block, did.shared) == (step.grid, step.block, step.kernel.dynamic_shared)
            assert gpu.kernels[did.handle] == step.kernel
            launched = step.overlaps, step.carve_out, step.cluster, stream
            assert (did.overlaps, did.carve_out, did.cluster, did.stream) == launched


def test_steps_and_kernels_agree_on_the_number_of_parameters():
    for name, precision, changes in EVERY_STEP.values():
        stage, product = STAGES[name], Product(SQUARE, SQUARE, SQUARE)._replace(**changes)
        partition = partition_of(stage, product)
        for step in stage.launches(stage.configs[0], product, precision, partition, Gpu((9, 0), 132)).steps:
            assert [max(size, 1) for size in parameters(step.kernel).values()] == [
                len(argument.words) for argument in step.arguments
            ], step.kernel.name


@pytest.mark.parametrize("precision", ["bf16x6", "fp16x3"])
def test_only_kernels_that_wait_overlap(gpu, precision):
    """One may start before the kernel that decomposes its operands has ended; the first one of all may not."""
    product = Product(SQUARE, SQUARE, SQUARE)
    bound = devices.get_device(0).bind(PERSISTENT, PERSISTENT.configs[0], product, precision)
    bound.enqueue(1.0, 0, 0, 0.0, 0, 40)
    assert [did.overlaps for did in gpu.launches] == [False] + [True] * (len(gpu.launches) - 1)
    assert len(gpu.launches) == 2 + (precision == "fp16x3")


def test_words_that_move_come_by_slot_and_offset():
    product = Product(SQUARE, SQUARE, SQUARE, epilogue=abs, vectors=((4, 4), (4, 4)))
    steps = PERSISTENT.launches(PERSISTENT.configs[0], product, "fp16x3", None, Gpu((9, 0), 132)).steps
    words = FrameLayout(steps).moving
    assert [word.slot for word in words[:5]] == [Slot.ALPHA, Slot.BETA, Slot.A, Slot.B, Slot.C]
    offsets = [word.offset for word in words if word.slot == Slot.SCRATCH]
    assert len(set(offsets)) == 4
    assert offsets == sorted(offsets)
    assert [word.slot for word in words[9:]] == [Slot.VECTORS, Slot.VECTORS + 1]


@pytest.mark.parametrize("layout", [*LAYOUTS, *REPEATING])
def test_parts_of_a_matrix_have_numpys_addresses(layout):
    x = (LAYOUTS | REPEATING)[layout](filled(6, 8))
    for name, (first_row, first_col, rows, cols) in {
        "rows": (2, 0, 3, 8),
        "columns": (0, 3, 6, 4),
        "both": (3, 1, 2, 7),
    }.items():
        expected = x[first_row : first_row + rows, first_col : first_col + cols]
        step, part = matrix(x).layout.part(first_row, first_col, rows, cols)
        assert part == matrix(expected).layout, name
        assert step == expected.ctypes.data - x.ctypes.data, name
        step, part = matrix(x).layout.transposed.part(first_col, first_row, cols, rows)
        assert part == matrix(expected.T).layout == matrix(expected).transposed.layout, name
        assert step == expected.ctypes.data - x.ctypes.data, name


# ---------------------------------------------------------------------------------------------------------------- keys


def test_products_are_bound_by_layout(gpu):
    a, b, c = filled(8, 4), filled(4, 8), filled(8, 8)
    assert bind(a, b, c) is bind(a.copy(), b.copy(), c.copy()) is not bind(a, b, c.T)
    assert bind(a[:4], b, c[:4]) is not bind(a, b, c)
    wide = filled(8, 12)
    offs = [wide[:, i : i + 4] for i in range(5)]
    assert bind(offs[0], b, c) is bind(offs[4], b, c) is not bind(offs[1], b, c), "an address off by four bytes"
    run(a, b, c)
    assert len(gpu.launches) == 1
    check(c, a, b)


def test_each_operand_s_boundary_counts(gpu):
    wide = aligned_empty((9, 12))
    wide[...] = filled(9, 12)
    variants = set()
    for i, j, k in np.ndindex(2, 2, 2):
        variants.add(id(bind(wide[:8, i : i + 8], wide[:8, j : j + 8], wide[:8, k : k + 8], STREAM_K)))
    assert len(variants) == 8


BATCH = Batch((1, 1, 2), (0, 0, 384), (0, 0, 384), (0, 0, 256))
LYING = {"a": Layout(8, 12, 48, 4), "b": Layout(12, 8, 32, 4), "c": Layout(8, 8, 32, 4)}
BASE = Product(*LYING.values(), BATCH, abs, ((8, 4),))
A, B, C = LYING.values()
# One row per property of the product or option that needs launches of its own.
LAUNCH_KEYS = {
    "stage": {"stage": scheduled(STREAM_K, lambda *arguments: STREAM_K.schedule(*arguments))},
    "configuration": {"config": STREAM_K.configs[2]},
    "device": {"device": 1},
    "precision": {"precision": "other"},
    "swapped": {"swapped": True},
    "rows": {"a": A._replace(rows=4), "c": C._replace(rows=4)},
    "columns": {"b": B._replace(cols=4), "c": C._replace(cols=4)},
    "k": {"a": A._replace(cols=8), "b": B._replace(rows=8)},
    "A's row stride": {"a": A._replace(row_stride=64)},
    "A's column stride": {"a": A._replace(col_stride=8)},
    "B's row stride": {"b": B._replace(row_stride=64)},
    "B's column stride": {"b": B._replace(col_stride=8)},
    "C's row stride": {"c": C._replace(row_stride=64)},
    "C's column stride": {"c": C._replace(col_stride=8)},
    "A's boundary": {"a": A._replace(offset=4)},
    "B's boundary": {"b": B._replace(offset=4)},
    "C's boundary": {"c": C._replace(offset=4)},
    "A's dtype": {"a": A._replace(dtype="float16")},
    "B's dtype": {"b": B._replace(dtype="bfloat16")},
    "workspace": {"workspace": Workspace(1 << 20, 1 << 20, 100)},
    "partition": {"partition": Partition(2, 0)},
    "extents of the batch": {"batch": BATCH._replace(extents=(1, 2, 1))},
    "A's step": {"batch": BATCH._replace(a=(0, 0, 768))},
    "B's step": {"batch": BATCH._replace(b=(0, 0, 0))},
    "C's step": {"batch": BATCH._replace(c=(0, 0, 512))},
    "epilogue": {"epilogue": max},
    "no epilogue": {"epilogue": None, "vectors": ()},
    "vectors": {"vectors": ((8, 4), (8, 4))},
    "a vector's size": {"vectors": ((12, 4),)},
    "a vector's stride": {"vectors": ((8, 8),)},
    "A is prepared": {"prepared": (True, False)},
    "B is prepared": {"prepared": (False, True)},
}


@pytest.mark.parametrize("case", LAUNCH_KEYS)
def test_key_of_a_bound_product_has_every_property(gpu, case):
    def bound(stage=STREAM_K, config=CONFIG, device=0, **changes):
        options = {name: changes.pop(name) for name in OPTIONS & changes.keys()}
        return devices.get_device(device).bind(stage, config, BASE._replace(**changes), **options)

    first = bound()
    assert bound() is first
    assert bound(**LAUNCH_KEYS[case]) is not first
    assert bound() is first


OPTIONS = {"precision", "partition", "swapped", "workspace"}


def test_fields_of_the_key_are_all_tested():
    """A new field of a product, of a layout or of a batch needs rows of the table above."""
    changed = {name for changes in LAUNCH_KEYS.values() for name in changes}
    assert set(Product._fields) <= changed
    assert Layout._fields == ("rows", "cols", "row_stride", "col_stride", "offset", "dtype")
    assert Batch._fields == ("extents", "a", "b", "c")


def test_products_without_a_workspace_of_their_own_are_not_bound_to_one(gpu):
    """Equal workspaces are one key; the same product without one has another."""
    device, product = devices.get_device(0), product_of(filled(4, 4), filled(4, 4), filled(4, 4))
    given = [Workspace(1 << 20, 512, 4) for _ in range(2)]
    stage = scheduled(NAIVE, schedule_of(512, 4))
    bound = [device.bind(stage, CONFIG, product, partition=Partition(1, 0), workspace=one) for one in (*given, None)]
    assert bound[0] is bound[1] is not bound[2]


def test_number_of_bound_products_is_bounded(gpu, monkeypatch):
    monkeypatch.setattr(devices, "MAX_BOUND", 3)
    for m in range(1, 9):
        a, b, c = filled(m, 4), filled(4, 4), filled(m, 4)
        run(a, b, c)
        check(c, a, b)
        assert len(devices.get_device(0)._bound) <= 3


def test_configurations_that_come_and_go_are_told_apart(gpu):
    """A cache keyed by identity may find the entry of a freed object, whose identity a new one has."""
    a, b, c = filled(4, 4), filled(4, 4), filled(4, 4)
    for pad in range(0, 160, 4):
        run(a, b, c, config=CONFIG.replace(pad=pad))
        assert gpu.launches[-1].shared == CONFIG.replace(pad=pad).dynamic_shared
    once = once_per_key.OncePerKey(lambda config: config.pad)
    for _ in range(3):
        for pad in range(1, 160, 4):
            assert once(CONFIG.replace(pad=pad)) == pad


def test_kernel_is_built_once_by_concurrent_threads():
    made, begun = [], threading.Event()

    def make(key):
        made.append(key)
        begun.wait(0.2)  # others ask meanwhile
        return object()

    once = once_per_key.OncePerKey(make)
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(lambda _: once("kernel"), range(4)))) == 1
    assert made == ["kernel"]


def test_number_of_kept_epilogues_is_bounded(monkeypatch):
    """Kernels without an epilogue stay, and so do the epilogues made last."""
    made = []
    once = once_per_key.OncePerKey(lambda key: made.append(key) or key)
    monkeypatch.setattr(once_per_key, "MAX_EPILOGUES", 3)
    plain = [NAIVE.kernel(CONFIG, BASE._replace(epilogue=None)), STREAM_K.kernel(CONFIG, BASE._replace(epilogue=None))]
    others = [STREAM_K.kernel(CONFIG, BASE._replace(epilogue=one)) for one in (abs, min, max, sum)]
    others.append(PERSISTENT.kernel(PERSISTENT.configs[0], BASE._replace(epilogue=pow), "bf16x6"))
    for key in (*plain, *others):
        assert once(key) is once(key) is key
    assert made == [*plain, *others]
    assert list(once._values) == [*plain, *others[2:]]
    assert not once._locks
    for key in (*plain, *others[2:]):
        once(key)
    assert len(made) == 7
    assert once(others[0]) is others[0]
    assert len(made) == 8


def test_no_kernel_is_loaded_twice(monkeypatch):
    """Nothing unloads it, so one that was forgotten must not be loaded again."""
    loaded = []

    def call(function, *arguments):
        if function is driver.cuLibraryLoadData:
            loaded.append(arguments[0])
        return len(loaded)

    monkeypatch.setattr(driver_module, "call", call)
    monkeypatch.setattr(driver_module, "device_scope", lambda device: nullcontext())
    monkeypatch.setattr(devices, "device_properties", lambda device: devices.SIMULATED_DEVICE)
    monkeypatch.setattr(devices.kernel_cache, "fetch", lambda kernel, cc: types.SimpleNamespace(cubin=cubins[kernel]))
    device, other_device = devices.Device(0), devices.Device(1)
    one = Cubin("k", b"code", "", "", 0, 0, 0, 0, 0, (9, 0))
    kernels = [replace(NAIVE.kernel_of(CONFIG, ANY), name=str(i)) for i in range(4)]
    kernels.append(replace(kernels[0], dynamic_shared=100 << 10))
    cubins = dict(zip(kernels, (one, one, replace(one, code=b"other"), replace(one, name="other"), one), strict=True))
    handles = [device._load(kernel).handle for kernel in (*kernels, *kernels)]
    assert handles == [1, 1, 2, 3, 4] * 2
    assert [other_device._load(kernel).handle for kernel in kernels[:2]] == [5, 5]
    assert len(loaded) == 5


# ---------------------------------------------------------------------------------------------- extents, parts, batches


def test_empty_results_are_not_launched(gpu):
    for rows, cols in ((0, 8), (8, 0)):
        run(filled(rows, 4), filled(4, cols), filled(rows, cols))
    assert not gpu.launches


def test_default_partition_is_that_of_the_whole_batch(gpu):
    device, plain = devices.get_device(0), Product(*LYING.values())
    product = plain._replace(batch=Batch((5, 7, 9)))
    partition = default_partition(CONFIG, product, device.properties.sm_count)
    assert device.partition(STREAM_K, CONFIG, product) == partition != device.partition(STREAM_K, CONFIG, plain)
    assert device.partition(NAIVE, CONFIG, plain) is None


def test_largest_k_with_an_epilogue(gpu, monkeypatch):
    def multiply():
        a, b, c = (Matrix(4096, *layout.words, 0, None) for layout in LYING.values())
        launch.launch(STREAM_K, CONFIG, 1.0, a, b, 0.0, c, epilogue=abs)

    gpu.computes = False
    for module in (launch, stages):
        monkeypatch.setattr(module, "MAX_K", 12)
    multiply()
    assert len(gpu.launches) == 1
    for module in (launch, stages):
        monkeypatch.setattr(module, "MAX_K", 11)
    with pytest.raises(ValueError, match="K is 12, beyond the 11 that a product with an epilogue may have"):
        multiply()
    assert len(gpu.launches) == 1


@pytest.mark.parametrize("swapped", [False, True])
def test_sums_beyond_what_a_kernel_counts_are_added_up(gpu, monkeypatch, swapped):
    """The first part of a sum takes beta, the others add to it."""
    monkeypatch.setattr(stages, "MAX_K", 5)
    a, b, c = filled(6, 12), filled(12, 8), filled(6, 8, seed=1)
    before = c.copy()
    run(a, b, c, stage=STREAM_K, beta=0.5, swapped=swapped)
    check(c, a, b, beta=0.5, c=before)
    assert [did.beta for did in gpu.launches] == [0.5, 1.0, 1.0]


@pytest.mark.parametrize("swapped", [False, True])
def test_parts_of_a_grid_that_is_too_high(gpu, monkeypatch, swapped):
    monkeypatch.setattr("numba_gemm.kernels.ladder.stage.MAX_GRID_Y", 1)
    a, b, c = filled(70, 12), filled(12, 70), filled(70, 70, seed=1)
    before, config = c.copy(), NAIVE.configs[0]
    run(a, b, c, config=config, alpha=2.0, beta=0.5, swapped=swapped)
    check(c, a, b, alpha=2.0, beta=0.5, c=before)
    assert len(gpu.launches) == -(-70 // config.BM if not NAIVE.rows_along_x else -70 // config.BN)


def test_batches_and_vectors_are_told_to_the_driver(gpu):
    a, b, c = filled(4, 8), filled(8, 4), filled(4, 8)
    vectors = filled(2, 12)
    places = [Vector(row.ctypes.data, row.size, row.strides[0], row) for row in (vectors[0, ::2], vectors[1, ::-2])]
    batch = Batch((1, 1, 2), (0, 0, 64), (0, 0, 0), (0, 0, 64))
    x, y, z = a.reshape(2, 4, 4)[0], b[:4], c.reshape(2, 4, 4)[0]

    def shift(value, row, col, first, second):
        return value + first[row] - second[col]

    for order in (1, -1):
        first, second = places[::order]
        run(x, y, z, stage=STREAM_K, batch=batch, epilogue=shift, vectors=(first, second))
        did = gpu.launches[-1]
        for told, one in ((did.vector0, first), (did.vector1, second)):
            assert told == [0, 0, one.size, 4, one.pointer, one.size, one.stride]
        expected = a.reshape(2, 4, 4) @ b[:4] + first.owner[:4, None] - second.owner[:4]
        np.testing.assert_allclose(c.reshape(2, 4, 4), expected, rtol=1e-5, atol=1e-6)
    assert len(devices.get_device(0)._bound) == 2
    moved = Vector(places[0].pointer + 4, places[0].size, places[0].stride, None)
    run(x, y, z, stage=STREAM_K, batch=batch, epilogue=shift, vectors=(moved, places[1]))
    assert len(devices.get_device(0)._bound) == 2, "a vector's address does not count"
    assert gpu.launches[-1].vector0[4] == moved.pointer


def test_bound_products_do_not_hold_vectors(gpu):
    a, b, c = filled(4, 4), filled(4, 4), filled(4, 4)
    vector = np.ones(4, np.float32)
    alive, vectors = weakref.ref(vector), (Vector(vector.ctypes.data, 4, 4, vector),)
    run(a, b, c, stage=STREAM_K, vectors=vectors, epilogue=lambda value, row, col, bias: value + bias[col])
    del vector, vectors
    gc.collect()
    assert alive() is None


# ------------------------------------------------------------------------------------------------ threads and failures


def test_launch_in_a_thread_without_context(gpu):
    a, b, c = filled(3, 3), filled(3, 3), filled(3, 3)
    gpu.current = None
    bind(a, b, c).enqueue(1.0, *addresses(a, b, c)[:2], 0.0, c.ctypes.data, 0)
    assert (gpu.pushed, gpu.current, len(gpu.launches)) == ([CONTEXT], None, 1)
    check(c, a, b)


def test_launch_with_memory_in_a_thread_without_context(gpu):
    """Memory is allocated, and tensor maps are written, in the context of the device."""
    gpu.current, device, product = None, devices.get_device(1), Product(SQUARE, SQUARE, SQUARE)
    direct = STAGES["tf32_tma"]
    device.bind(PERSISTENT, PERSISTENT.configs[0], product, "bf16x6").enqueue(1.0, 0, 0, 0.0, 0, 40)
    device.bind(direct, direct.configs[0], product, "tf32").enqueue(1.0, 64, 128, 0.0, 0, 40)
    assert (gpu.pushed, gpu.current, len(gpu.launches)) == ([CONTEXT + 1] * 2, None, 3)


def test_launch_that_fails_tells_why(gpu, monkeypatch):
    a, b, c = filled(3, 3), filled(3, 3), filled(3, 3)
    gpu.status = int(driver.CUresult.CUDA_ERROR_INVALID_VALUE)
    monkeypatch.setattr(driver, "cuGetErrorString", lambda status: (0, b"bad words"))
    with pytest.raises(RuntimeError, match=r"cuLaunchKernelEx failed: bad words \(CUDA_ERROR_INVALID_VALUE\)"):
        bind(a, b, c).enqueue(1.0, *addresses(a, b, c)[:2], 0.0, c.ctypes.data, 0)


def test_memory_of_a_launch_that_fails_is_released(gpu, monkeypatch):
    monkeypatch.setattr(driver, "cuGetErrorString", lambda status: (0, b"bad words"))
    product = Product(SQUARE, SQUARE, SQUARE)
    bound = devices.get_device(0).bind(PERSISTENT, PERSISTENT.configs[0], product, "bf16x6")
    gpu.status = int(driver.CUresult.CUDA_ERROR_INVALID_VALUE)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="cuLaunchKernelEx failed"):
            bound.enqueue(1.0, 0, 0, 0.0, 0, 40)
    assert len(gpu.allocations) == 1


def test_threads_share_a_bound_product(gpu):
    a, b, c = filled(4, 4), filled(4, 4), filled(4, 4)
    bound, together = bind(a, b, c), threading.Barrier(4)
    gpu.pause = lambda seconds: together.wait(10)  # a launch goes on when all four threads are in one

    def work(seed):
        for turn in range(10):
            x, y, z = filled(4, 4, seed), filled(4, 4, turn), np.full((4, 4), NAN)
            together.wait(10)  # all frames of the last turn have been put back
            bound.enqueue(float(seed + 1), *addresses(x, y, z)[:2], 0.0, z.ctypes.data, 40 + seed)
            check(z, x, y, alpha=float(seed + 1))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(gpu.launches) == 40


def test_threads_on_one_stream_do_not_share_decomposed_operands(gpu):
    """All launches of a call use one memory, which no other call has until all of them are enqueued."""
    product = Product(SQUARE, SQUARE, SQUARE)
    bound = devices.get_device(0).bind(PERSISTENT, PERSISTENT.configs[0], product, "fp16x3")
    together = threading.Barrier(4)

    def work(seed):
        together.wait()
        for turn in range(5):
            bound.enqueue(1.0, 4096 * seed, turn, 0.0, 0, 40)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    owner: dict[int, tuple[int, int]] = {}  # of a memory: the call that is between its first launch and its last
    for did in gpu.launches:
        if "alpha" not in did.arguments:
            call = (did.a[0], did.b[0])
            memory = did.a_maxima[0]
            assert owner.setdefault(memory, call) == call
        else:
            call = (did.x[0], did.y[0])
            (memory,) = [one for one, current in owner.items() if current == call]
            del owner[memory]
    assert not owner
    assert len(gpu.launches) == 60


def test_frame_packs_words_by_name(gpu):
    """A frame for launches of which one has a word that the other has not."""
    product = Product(SQUARE, SQUARE, SQUARE)
    steps = PERSISTENT.launches(PERSISTENT.configs[0], product, "bf16x6", None, Gpu((9, 0), 132)).steps
    handles = [gpu.load(None, step.kernel).handle for step in steps]
    layout = FrameLayout(steps)
    frame = Frame(layout, handles, CONTEXT)
    assert len(layout.moving) == 7
    frame.move(1.5, -2.5, 10, 20, 30, 40, 50)
    frame.launch(60)
    first, second = gpu.launches
    assert (first.a[0], first.b[0], first.a_parts[0], first.b_parts[0]) == (10, 20, 40, 50)
    assert (second.alpha, second.beta, second.c[0], second.x[0], second.y[0]) == (1.5, -2.5, 30, 10, 20)
    assert (second.a[0], second.b[0]) == (40, 50)
    assert {first.stream, second.stream} == {60}


# --------------------------------------------------------------------------------------------------------- workspaces


def test_scheduled_launch_gets_a_workspace(gpu):
    stage = scheduled(NAIVE, schedule_of(1000, 5))
    a, b, c = filled(4, 4), filled(4, 4), filled(4, 4)
    run(a, b, c, stage=stage, stream=40)
    (did,) = gpu.launches
    memory, counters = did.partition.partials, did.partition.counters
    assert did.grid == (2, 3, 4)
    assert (memory % 256, counters - memory, did.partition.whole) == (0, 1024, 1)
    assert list((ctypes.c_int32 * 5).from_address(counters)) == [0] * 5
    run(a, b, c, stage=stage, stream=50)
    run(a, b, c, stage=stage, stream=40)
    assert gpu.launches[1].partition.partials != gpu.launches[2].partition.partials == memory
    given = Workspace(a.ctypes.data, 1000, 5)
    run(a, b, c, stage=stage, stream=40, workspace=given)
    assert (gpu.launches[-1].partition.partials, gpu.launches[-1].partition.counters) == given.words
    for small in (Workspace(a.ctypes.data, 999, 5), Workspace(a.ctypes.data, 1000, 4)):
        words = rf"holds {small.size} bytes and {small.counters} counters; expected 1000 and 5; pass an array of 1044"
        with pytest.raises(ValueError, match=words):
            run(a, b, c, stage=stage, workspace=small)
    assert len(gpu.launches) == 4


def test_launches_of_one_call_get_one_memory(gpu):
    """That of the last call on the stream, or the one that was given."""
    product = Product(SQUARE, SQUARE, SQUARE)
    config, device = PERSISTENT.configs[0], devices.get_device(0)
    bound = device.bind(PERSISTENT, config, product, "bf16x6")
    for stream in (40, 40, 50):
        bound.enqueue(1.0, 0, 0, 0.0, 0, stream)
    parts = [did.a_parts[0] if "a_parts" in did.arguments else did.a[0] for did in gpu.launches]
    assert parts[0] == parts[1] == parts[2] == parts[3] != parts[4] == parts[5]
    given = Workspace(1 << 20, bound.launches.scratch_bytes, 0)
    device.bind(PERSISTENT, config, product, "bf16x6", workspace=given).enqueue(1.0, 0, 0, 0.0, 0, 40)
    assert gpu.launches[-1].a[0] == gpu.launches[-2].a_parts[0] == 1 << 20
    small = replace(given, size=given.size - 1)
    with pytest.raises(ValueError, match=f"expected {given.size} and 0"):
        device.bind(PERSISTENT, config, product, "bf16x6", workspace=small)


# -------------------------------------------------------------------------------------------------------- tensor maps


def map_words(place):
    return list((ctypes.c_int64 * 9).from_address(place))


@pytest.mark.parametrize("letters", ["NN", "NT", "TT"])
@pytest.mark.parametrize("swapped", [False, True])
def test_tensor_maps_describe_the_operands(gpu, letters, swapped):
    """Exchanged launches find A, as the kernel knows it, at the address of B."""
    stage = STAGES["tf32_tma"]
    product = Product(dense(letters[0], 64, 96), dense(letters[1], 96, 128), dense("N", 64, 128))
    launches = stage.launches(stage.configs[0], product, "tf32", None, Gpu((9, 0), 132))
    if swapped:
        launches = launches.with_operands_swapped()
    bound, a, b = devices.get_device(0).loaded(launches), 1 << 20, 1 << 21
    given = (b, a) if swapped else (a, b)
    bound.enqueue(1.0, *given, 0.0, 0, 40)
    first, second = (map_words(gpu.launches[-1].arguments[name][0]) for name in ("u_map", "v_map"))
    whole = {"N": lambda rows, cols: (cols, rows), "T": lambda rows, cols: (rows, cols)}
    of_a, of_b = [a, *whole[letters[0]](64, 96), 1], [b, *whole[letters[1]](96, 128), 1]
    assert [first[:4], second[:4]] == ([of_b, of_a] if letters == "NN" else [of_a, of_b])
    before = dict(devices.get_device(0).tensor_maps._places)
    bound.enqueue(2.0, *given, 0.0, 16, 50)
    assert devices.get_device(0).tensor_maps._places == before, "a map serves all products of its matrix"
    bound.enqueue(1.0, given[0] + 1024, given[1], 0.0, 0, 40)
    assert len(devices.get_device(0).tensor_maps._places) == 3


@pytest.mark.parametrize("at", [0, 1])
def test_nothing_is_launched_without_room_for_a_map(gpu, monkeypatch, at):
    stage, product = STAGES["tf32_tma"], Product(SQUARE, SQUARE, SQUARE)
    bound = devices.get_device(0).bind(stage, stage.configs[0], product, "tf32")
    next_place, asked = tensor_maps.TensorMaps._next_place, []

    def limited(self):
        asked.append(self)
        return None if len(asked) > at else next_place(self)

    monkeypatch.setattr(tensor_maps.TensorMaps, "_next_place", limited)
    with pytest.raises(NoRoomForMaps):
        bound.enqueue(1.0, 64, 128, 0.0, 0, 40)
    assert not gpu.launches
    monkeypatch.setattr(tensor_maps.TensorMaps, "_next_place", next_place)
    bound.enqueue(1.0, 64, 128, 0.0, 0, 40)
    assert len(gpu.launches) == 1


def test_number_of_tensor_maps_is_bounded(gpu, monkeypatch):
    monkeypatch.setattr(tensor_maps, "MAX_MAPS", tensor_maps.PAGE)
    stage, product = STAGES["tf32_tma"], Product(SQUARE, SQUARE, SQUARE)
    (wanted, _) = stage.launches(stage.configs[0], product, "tf32", None, Gpu((9, 0), 132)).maps
    maps = devices.get_device(0).tensor_maps
    found = [maps.places([(64 * i, wanted)]) for i in range(tensor_maps.PAGE + 3)]
    assert len({place for one in found[:-3] for place in one}) == tensor_maps.PAGE
    assert found[-3:] == [None] * 3
    assert maps.places([(0, wanted)]) == found[0]
    assert len(gpu.allocations) == 1
