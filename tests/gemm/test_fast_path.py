"""Fast path of repeated calls: which calls take it, which take the full check, and bounds of the caches."""

from __future__ import annotations

import gc
import itertools
import types
import weakref

import numpy as np
import pytest
from support.array_libraries import (
    CupyArray,
    MemoryPointer,
    NumbaArray,
    NumbaView,
    Tensor,
    aligned_empty,
    changed,
    on_boundary,
    operands,
    tensor,
)
from support.host_gpu import CONFIG, CONTEXT, NAIVE, schedule_of, scheduled
from support.operands import check, filled

from numba_gemm import arrays, plan, tiled_sgemm
from numba_gemm.arrays import libraries, torch_tensors
from numba_gemm.arrays.operand import ArrayKind, Operand
from numba_gemm.arrays.probe import Probe
from numba_gemm.gemm import fast_path, heuristics
from numba_gemm.gemm import product as products
from numba_gemm.gemm.heuristics import Choice
from numba_gemm.kernels import STAGES
from numba_gemm.kernels.product import dense
from numba_gemm.kernels.stage import Partition
from numba_gemm.runtime import device as devices


@pytest.mark.parametrize("given", [True, False])
def test_second_call_takes_the_fast_path(torch, gpu, checked, product, given):
    for turn in range(4):
        a, b, c = operands(turn)
        out = tensor(c) if given else None
        alpha, beta = (1.0, 0.0) if turn < 2 else (-turn, 0.5 if given else 0)
        torch.current.cuda_stream = 40 + 10 * (turn % 2)
        result = product(tensor(a), tensor(b), out, alpha=alpha, beta=beta)
        assert (result is out) == given
        check(result.x, a, b, alpha=alpha, beta=beta, c=c)
        assert gpu.launches[-1].stream == torch.current.cuda_stream
        assert result.version == given
        assert len(checked) == 1
    product(tensor(a), tensor(b), None if given else tensor(c))
    assert len(checked) == (1 if product is tiled_sgemm else 2), "a plan's calls with out and without are two kinds"


def test_repeated_call_releases_finished_holds(torch, product, monkeypatch):
    released = []
    monkeypatch.setattr(fast_path, "held", [None])
    monkeypatch.setattr(fast_path, "release_finished", lambda: released.append(True))
    a, b, _ = operands()
    for calls in range(3):
        product(tensor(a), tensor(b))
        assert len(released) == calls


def test_transposes_take_the_fast_path_too(torch, gpu, checked, monkeypatch):
    choice = Choice(STAGES["stream_k"], CONFIG, swapped=True)
    monkeypatch.setattr(heuristics, "best", lambda problem: choice)
    for turn in range(3):
        a, b, c = operands(turn)
        out = tensor(c)
        check(tiled_sgemm(tensor(a), tensor(b), out, beta=1.0).x, a, b, beta=1.0, c=c)
        assert gpu.launches[-1].c[1:] == [8, 4, 4, 32]
    assert len(checked) == 1
    one = tensor(a)
    with pytest.raises(ValueError, match="shares memory with a"):
        tiled_sgemm(one, tensor(b), Tensor(one.x.ravel()[16:].reshape(4, 8)))


@pytest.mark.parametrize("given", [True, False])
def test_batches_take_the_fast_path(torch, gpu, checked, given):
    for turn in range(3):
        a, b, c = (
            np.stack([filled(*shape, seed) for seed in (turn, turn + 1)]) for shape in ((4, 12), (12, 8), (4, 8))
        )
        result = tiled_sgemm(tensor(a), tensor(b), tensor(c) if given else None)
        assert result.shape == (2, 4, 8)
        for got, one, other in zip(result.x, a, b, strict=True):
            check(got, one, other)
    assert (len(gpu.launches), len(checked)) == (3, 1)
    assert gpu.launches[-1].partition.matrices == 2
    with pytest.raises(ValueError, match=r"a has shape \(2, 4, 12\) .* this plan is for shapes \(4, 12\)"):
        plan(4, 8, 12)(tensor(a), tensor(b))


def test_repeated_call_of_a_transposed_batch(torch, gpu, checked, monkeypatch):
    """Matrices of A are 256 bytes apart, those of B 2048 bytes."""
    choice = Choice(STAGES["stream_k"], CONFIG, swapped=True)
    monkeypatch.setattr(heuristics, "best", lambda problem: choice)
    for turn in range(2):
        a, b = (np.stack([filled(*shape, turn + i) for i in range(3)]) for shape in ((1, 64), (8, 64)))
        across = tensor(b)
        across.x = across.x.transpose(0, 2, 1)
        result = tiled_sgemm(tensor(a), across, tensor(np.zeros((3, 1, 8), np.float32)))
        for got, one, other in zip(result.x, a, b, strict=True):
            check(got, one, other.T)
        did = gpu.launches[-1]
        assert (did.a[1:3], did.partition.a_inner, did.partition.b_inner, did.partition.c_inner) == (
            [8, 64],
            2048,
            256,
            32,
        )
    assert len(checked) == 1


def test_product_of_several_launches_is_remembered(torch, gpu, checked, product):
    """A batch of a stage that takes one matrix at a time: the launches, their places and which of them take beta."""
    for turn in range(3):
        a, b, c = (np.stack([filled(*shape, turn + i) for i in range(3)]) for shape in ((4, 12), (12, 8), (4, 8)))
        out = tensor(c)
        tiled_sgemm(tensor(a), tensor(b), out, beta=0.5, stage="naive")
        for got, one, other, before in zip(out.x, a, b, c, strict=True):
            check(got, one, other, beta=0.5, c=before)
    assert (len(gpu.launches), len(checked)) == (9, 1)


def test_product_of_several_slabs_is_remembered(torch, gpu, checked, monkeypatch):
    monkeypatch.setattr("numba_gemm.kernels.ladder.stage.MAX_GRID_Y", 1)
    for turn in range(3):
        a, b, c = filled(70, 12, turn), filled(12, 70, turn), filled(70, 70, turn)
        check(tiled_sgemm(tensor(a), tensor(b), tensor(c), beta=2.0, stage="naive").x, a, b, beta=2.0, c=c)
    assert len(checked) == 1
    assert len(gpu.launches) > 3


def test_sum_of_several_launches_is_remembered(torch, gpu, checked, monkeypatch):
    """Only the first launch of a sum takes beta."""
    monkeypatch.setattr("numba_gemm.kernels.stage.MAX_K", 5)
    for turn in range(3):
        a, b, c = operands(turn)
        check(tiled_sgemm(tensor(a), tensor(b), tensor(c), beta=2.0).x, a, b, beta=2.0, c=c)
        assert [did.beta for did in gpu.launches[-3:]] == [2.0, 1.0, 1.0]
    assert len(checked) == 1


def test_product_of_very_many_launches_is_not_remembered(torch, gpu, checked, monkeypatch):
    a, b = filled(4, 12), filled(12, 8)
    for count, full in ((64, 1), (64, 1), (65, 2), (65, 3)):
        stacked = [tensor(np.stack([x] * count)) for x in (a, b)]
        check(tiled_sgemm(*stacked, stage="naive").x[-1], a, b)
        assert len(checked) == full


@pytest.mark.parametrize("given", [True, False])
def test_products_without_terms_are_not_remembered(torch, checked, product, given):
    """The launch of such a product reads neither A nor B."""
    a, b, c = operands()
    for alpha in (0.0, 1.0, 1.0):
        result = product(tensor(a), tensor(b), tensor(c) if given else None, alpha=alpha)
        check(result.x, a, b, alpha=alpha)
    assert len(checked) == 2


def test_beta_without_out_is_refused_in_a_repeated_call(torch, gpu, checked, product):
    a, b, _ = operands()
    product(tensor(a), tensor(b))
    with pytest.raises(ValueError, match=r"beta is 0\.5 and out is None"):
        product(tensor(a), tensor(b), beta=0.5)
    assert (len(gpu.launches), len(checked)) == (1, 2)


def test_plans_and_tiled_sgemm_remember_calls_separately(torch, checked):
    a, b, c = operands()
    made = plan(8, 4, 12)
    for multiply in (tiled_sgemm, plan(4, 8, 12)):
        multiply(tensor(a), tensor(b), tensor(c))
        with pytest.raises(ValueError, match=r"this plan is for shapes \(8, 12\) and \(12, 4\)"):
            made(tensor(a), tensor(b), tensor(c))
    assert len(checked) == 4


def test_repeated_call_keeps_partition_and_workspace(torch, gpu, checked, monkeypatch):
    choice = Choice(scheduled(NAIVE, schedule_of(512, 4)), CONFIG, Partition(3, 1))
    monkeypatch.setattr(heuristics, "best", lambda problem: choice)
    memory = np.full(400, 7, np.float32)
    memory = Tensor(memory[-(memory.ctypes.data // 4) % 64 :])
    torch.current.cuda_stream = 9  # the only one on which the stand-in sets memory
    given, alive = plan(4, 8, 12, workspace=memory), weakref.ref(memory)
    place = memory.data_ptr()
    del memory
    gc.collect()
    assert alive() is not None, "nothing keeps the workspace"
    a, b, _ = operands()
    for multiply in (given, plan(4, 8, 12), tiled_sgemm):
        for _ in range(2):
            check(multiply(tensor(a), tensor(b)).x, a, b)
            did = gpu.launches[-1]
            assert did.partition.whole == 3, "blocks of the partition"
            assert (did.partition.partials == place) == (multiply is given)
            assert did.partition.counters > did.partition.partials > 0
        assert len(checked) == 1
        checked.clear()


def shift(value, row, col, bias):
    return value + bias[col]


def test_epilogues_take_the_fast_path(torch, gpu, checked):
    for turn in range(3):
        a, b, _ = operands(turn)
        bias = filled(1, 8, turn)[0]
        result = tiled_sgemm(tensor(a), tensor(b), epilogue=shift, epilogue_args=[tensor(bias)])
        check(result.x - bias, a, b)
    assert len(checked) == 1
    assert len({did.kernel for did in gpu.launches}) == 1
    for _ in range(2):
        check(tiled_sgemm(tensor(a), tensor(b), epilogue=lambda value, row, col: -value).x, a, b, alpha=-1.0)
        check(tiled_sgemm(tensor(a), tensor(b)).x, a, b)
    assert len(checked) == 3, "a call without an epilogue is none of these"
    assert len(products.calls.checked) == 1, "epilogues are not kept beyond their calls"
    elsewhere = tensor(filled(1, 8)[0], device=1)
    with pytest.raises(ValueError, match=r"several devices: .*epilogue_args\[0\] on device 1; expected one"):
        tiled_sgemm(tensor(a), tensor(b), epilogue=shift, epilogue_args=[elsewhere])


def test_epilogue_of_a_plan_takes_the_fast_path(torch, gpu, checked):
    multiply = plan(4, 8, 12, epilogue=shift)
    for turn in range(3):
        a, b, c = operands(turn)
        bias = filled(1, 8, turn)[0]
        result = multiply(tensor(a), tensor(b), tensor(c), beta=1.0, epilogue_args=(tensor(bias),))
        check(result.x - bias, a, b, beta=1.0, c=c)
    assert len(checked) == 1


# Changes of the vector of a remembered call, and whether it is refused.
VECTOR_CHANGES = {
    "stride": (lambda x, out: Tensor(np.repeat(x, 2)[::2]), None),
    "size": (lambda x, out: tensor(np.append(x, x)), None),
    "dtype": (lambda x, out: changed(tensor(x), dtype="float16"), TypeError),
    "two dimensions": (lambda x, out: tensor(x[None]), ValueError),
    "NumPy": (lambda x, out: x, TypeError),
    "requires grad": (lambda x, out: changed(tensor(x), requires_grad=True), ValueError),
    "negative": (lambda x, out: changed(tensor(x), neg=True), ValueError),
    "without memory": (lambda x, out: changed(tensor(x), address=0), TypeError),
    "without storage": (lambda x, out: changed(tensor(x), address=RuntimeError()), TypeError),
    "overlaps out": (lambda x, out: Tensor(out.x[1]), ValueError),
    "ends in out": (lambda x, out: Tensor(out.whole[2:10]), ValueError),
    "begins in out": (lambda x, out: Tensor(out.whole[35:43]), ValueError),
}


@pytest.mark.parametrize("change", VECTOR_CHANGES)
def test_call_with_a_changed_vector_is_checked_in_full(torch, gpu, checked, change):
    a, b, _ = operands()
    bias = filled(1, 8)[0]

    def call(make):
        whole = on_boundary(np.zeros((1, 48), np.float32))[0]
        out = changed(Tensor(whole[4:36].reshape(4, 8)), whole=whole)
        vector = make(bias, out)
        tiled_sgemm(tensor(a), tensor(b), out, epilogue=shift, epilogue_args=(vector,))
        check(out.x - bias, a, b)

    make, error = VECTOR_CHANGES[change]
    for _ in range(2):
        call(lambda x, out: tensor(x))
    assert (len(checked), len(gpu.launches)) == (1, 2)
    if error is None:
        call(make)
        call(make)
    else:
        with pytest.raises(error):
            call(make)
    assert (len(checked), len(gpu.launches)) == (2, 4 if error is None else 2)
    call(lambda x, out: tensor(x))
    assert len(checked) == 2


def test_vector_beside_the_result_takes_the_fast_path(torch, gpu, checked):
    """It ends where C begins, or begins where C ends."""
    a, b, _ = operands()
    for first in (0, 40, 0, 40):
        whole = on_boundary(np.zeros((1, 48), np.float32))[0]
        whole[first : first + 8] = bias = filled(1, 8)[0]
        out = Tensor(whole[8:40].reshape(4, 8))
        tiled_sgemm(tensor(a), tensor(b), out, epilogue=shift, epilogue_args=(Tensor(whole[first : first + 8]),))
        check(out.x - bias, a, b)
    assert len(checked) == 1


@pytest.mark.parametrize("vectors", [1, 2])
def test_number_of_vectors_counts(torch, checked, vectors):
    a, b, _ = operands()

    def take(value, row, col, first, second=None):
        return value

    for count in (1, 2, vectors):
        tiled_sgemm(tensor(a), tensor(b), epilogue=take, epilogue_args=[tensor(filled(1, 8)[0])] * count)
    assert len(checked) == 2


@pytest.mark.parametrize("precision", ["ieee", "bf16x6", "tf32", "fp32_auto", "BFX9"])
def test_plan_of_every_precision_takes_the_fast_path(torch, gpu, checked, precision):
    multiply, (a, b, c) = plan(4, 8, 12, precision=precision), operands()
    for _ in range(3):
        multiply(tensor(a), tensor(b), tensor(c))
    assert len(checked) == 1


def test_precision_counts(torch, gpu, checked):
    a, b, c = map(tensor, operands())
    for precision in ("ieee", "bf16x6", "bf16", "ieee", "bf16x6", "bf16"):  # the last two have the same kernel here
        tiled_sgemm(a, b, c, precision=precision)
    assert len(checked) == 3
    half = len(gpu.launches) // 2
    assert [did.kernel for did in gpu.launches[:half]] == [did.kernel for did in gpu.launches[half:]]
    assert (half, len({did.kernel for did in gpu.launches})) == (3, 2)
    with pytest.raises(ValueError, match="precision is 'best'"):
        tiled_sgemm(a, b, c, precision="best")
    with pytest.raises(TypeError, match="precision is of type list"):
        tiled_sgemm(a, b, c, precision=["ieee"])


CHANGES = {
    "columns first": lambda a, b, out: ((a, b, Tensor(np.asfortranarray(out.x))), {}, None),
    "alpha zero": lambda a, b, out: ((a, b, out), {"alpha": 0.0}, None),
    "alpha rounds to zero": lambda a, b, out: ((a, b, out), {"alpha": 1e-60}, None),
    "alpha infinite": lambda a, b, out: ((a, b, out), {"alpha": float("inf")}, None),
    "alpha beyond float32": lambda a, b, out: ((a, b, out), {"alpha": 1e300}, None),
    "alpha below float32's normal range": lambda a, b, out: ((a, b, out), {"alpha": 1e-39}, None),
    "beta beyond float32": lambda a, b, out: ((a, b, out), {"beta": 1e300}, None),
    "beta is NaN": lambda a, b, out: ((a, b, out), {"beta": float("nan")}, None),
    "epilogue": lambda a, b, out: ((a, b, out), {"epilogue": "relu"}, TypeError),
    "vectors": lambda a, b, out: ((a, b, out), {"epilogue_args": a.x}, TypeError),
    "alpha text": lambda a, b, out: ((a, b, out), {"alpha": "1"}, TypeError),
    "beta text": lambda a, b, out: ((a, b, out), {"beta": "1"}, TypeError),
    "stream text": lambda a, b, out: ((a, b, out), {"stream": "s"}, TypeError),
    "requires grad": lambda a, b, out: ((changed(a, requires_grad=True), b, out), {}, ValueError),
    "out requires grad": lambda a, b, out: ((a, b, changed(out, requires_grad=True)), {}, ValueError),
    "a without storage": lambda a, b, out: ((changed(a, address=RuntimeError()), b, out), {}, TypeError),
    "b without memory": lambda a, b, out: ((a, changed(b, address=0), out), {}, TypeError),
    "out without memory": lambda a, b, out: ((a, b, changed(out, address=0)), {}, TypeError),
    "negative": lambda a, b, out: ((a, changed(b, neg=True), out), {}, ValueError),
    "dtype": lambda a, b, out: ((a, changed(b, dtype="torch.float64"), out), {}, TypeError),
    "out's dtype": lambda a, b, out: ((a, b, changed(out, dtype="torch.float16")), {}, TypeError),
    "layout": lambda a, b, out: ((changed(a, layout="sparse"), b, out), {}, TypeError),
    "CPU": lambda a, b, out: (
        (changed(a, is_cuda=False, device=types.SimpleNamespace(type="cpu")), b, out),
        {},
        TypeError,
    ),
    "other device": lambda a, b, out: ((a, tensor(b.x, device=1), out), {}, ValueError),
    "out on another device": lambda a, b, out: ((a, b, tensor(out.x, device=1)), {}, ValueError),
    "out is a list": lambda a, b, out: ((a, b, [out]), {}, TypeError),
    "b is NumPy's": lambda a, b, out: ((a, b.x, out), {}, TypeError),
    "out overlaps a": lambda a, b, out: ((a, b, Tensor(a.x.ravel()[16:].reshape(4, 8))), {}, ValueError),
    "out overlaps b": lambda a, b, out: ((a, b, Tensor(b.x.ravel()[:32].reshape(4, 8))), {}, ValueError),
    "out shape": lambda a, b, out: ((a, b, tensor(out.x.T)), {}, ValueError),
    "other stream": lambda a, b, out: ((a, b, out), {"stream": 50}, None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_out_of_the_ordinary_takes_the_full_check(torch, gpu, checked, product, monkeypatch, change):
    monkeypatch.setattr(arrays.streams, "wait_for", lambda *_: None)
    monkeypatch.setattr(torch_tensors.TorchTensors, "keep", lambda *_: None)
    a, b, c = operands()
    for _ in range(3):  # a plan's repeated calls have a way of their own
        product(tensor(a), tensor(b), tensor(c))
    arguments, options, error = CHANGES[change](tensor(a), tensor(b), tensor(c))
    if error is None:
        product(*arguments, **options)
        assert len(checked) == 2
    else:
        launched = len(gpu.launches)
        with pytest.raises(error):
            product(*arguments, **options)
        assert len(gpu.launches) == launched


# Changes of one array of a plan's repeated call; the error, or None.
PLAN_CHANGES = {
    "boundary": (lambda x: Tensor(on_boundary(x, 1)), None),
    "by columns": (lambda x: Tensor(on_boundary(x.T).T), None),
    "more rows": (lambda x: Tensor(on_boundary(np.concatenate([x, x]))), ValueError),
    "CPU": (lambda x: changed(tensor(x), is_cuda=False, device=types.SimpleNamespace(type="cpu")), TypeError),
}


@pytest.mark.parametrize("change", PLAN_CHANGES)
@pytest.mark.parametrize("which", range(3))
def test_repeated_calls_of_a_plan_look_at_every_array(torch, gpu, checked, change, which):
    multiply, values = plan(4, 8, 12), operands()
    for _ in range(3):
        multiply(*map(tensor, values))
    make, error = PLAN_CHANGES[change]
    arrays_of_call = [make(x) if i == which else tensor(x) for i, x in enumerate(values)]
    launched = len(gpu.launches)
    if error is None:
        check(multiply(*arrays_of_call).x, *values[:2])
        assert len(checked) == 2
    else:
        with pytest.raises(error):
            multiply(*arrays_of_call)
        assert len(gpu.launches) == launched


@pytest.mark.parametrize("name", ["a", "b", "out"])
def test_cached_calls_look_at_grad_mode(torch, gpu, checked, product, name):
    given = dict(zip(("a", "b", "out"), map(tensor, operands())))
    given[name].requires_grad = True
    for mode, full in ((False, 1), (False, 1), (False, 1), (True, 2), (False, 2), (True, 3)):
        torch.grad_mode, launched = mode, len(gpu.launches)
        if mode:
            with pytest.raises(ValueError, match=rf"{name} is .* requires grad, and grad mode is enabled"):
                product(**given)
        else:
            product(**given)
        assert len(gpu.launches) == launched + (not mode)
        assert len(checked) == full


@pytest.mark.parametrize("name", ["a", "b", "out"])
def test_cached_calls_look_at_tangents(torch, gpu, checked, product, name):
    given = dict(zip(("a", "b", "out"), map(tensor, operands())))
    given[name].tangent = "a tensor"  # of a level that has been left
    for _ in range(3):
        product(**given)
    assert len(checked) == 1
    torch.autograd.forward_ad._current_level = 0
    with pytest.raises(ValueError, match=rf"{name} is .* forward-mode tangent"):
        product(**given)


@pytest.mark.parametrize("stream", [40, types.SimpleNamespace(cuda_stream=40)])
def test_current_stream_by_name_is_the_current_stream(torch, gpu, checked, product, stream):
    a, b, c = operands()
    for _ in range(2):
        product(tensor(a), tensor(b), tensor(c), stream=stream)
    assert len(checked) == 1
    assert gpu.launches[-1].stream == 40


def test_stage_counts(torch, checked):
    a, b, _ = operands()
    for stage in ("naive", "coalesced", "naive", "coalesced"):
        check(tiled_sgemm(tensor(a), tensor(b), stage=stage).x, a, b)
    assert len(checked) == 2
    with pytest.raises(TypeError, match="stage is of type list"):
        tiled_sgemm(tensor(a), tensor(b), stage=["naive"])


@pytest.mark.parametrize(
    "new",
    [Tensor(aligned_empty((4, 9))[:, 1:]), changed(Tensor(aligned_empty((4, 8))), address=0)],
    ids=["off its boundary", "of a fake tensor"],
)
def test_new_memory_out_of_the_ordinary_takes_the_full_check(torch, checked, monkeypatch, new):
    a, b, _ = operands()
    tiled_sgemm(tensor(a), tensor(b))
    monkeypatch.setattr(Tensor, "new_empty", lambda self, shape: new)
    check(tiled_sgemm(tensor(a), tensor(b)).x, a, b)
    assert len(checked) == 2


def test_unaligned_new_result_is_not_remembered(torch, checked, monkeypatch):
    """Its kernel stores single floats; aligned results have a faster kernel."""
    a, b, _ = operands()
    monkeypatch.setattr(torch, "empty", lambda shape, **_: Tensor(aligned_empty((1, 36))[:, 1:33].reshape(4, 8)))
    tiled_sgemm(tensor(a), tensor(b))
    tiled_sgemm(tensor(a), tensor(b))
    assert len(checked) == 2


def test_number_of_remembered_calls_is_bounded(torch, monkeypatch):
    monkeypatch.setattr(fast_path, "MAX_CALLS", 3)
    monkeypatch.setattr(devices, "MAX_BOUND", 3)
    for m in range(1, 9):
        a, b = filled(m, 4), filled(4, 4)
        for _ in range(2):
            check(tiled_sgemm(tensor(a), tensor(b)).x, a, b)
    assert len(products.calls) <= 3
    assert len(devices.get_device(0)._bound) <= 3


@pytest.mark.usefixtures("others")
@pytest.mark.parametrize("make", [CupyArray, NumbaArray, NumbaView])
def test_fast_path_of_other_libraries(gpu, checked, make):
    multiply = plan(4, 8, 12, stage="naive")
    for turn in range(3):
        a, b, c = operands(turn)
        out = make(c.copy())
        assert multiply(make(a), make(b), out, beta=turn) is out
        check(out.x, a, b, beta=turn, c=c)
        assert gpu.launches[-1].stream == (40 if make is CupyArray else 0)
    assert len(checked) <= 2, "the addresses of NumPy's arrays differ in their boundaries"


@pytest.mark.usefixtures("others")
def test_plan_of_numba_arrays_of_own_and_others_memory(gpu, checked, monkeypatch):
    """Views in others' memory are arrays of the same class."""
    monkeypatch.setattr(gpu, "computes", False)
    multiply = plan(4, 8, 12, stage="naive")
    x, y, z = (on_boundary(x) for x in operands())
    for foreign in itertools.product((False, True), repeat=3):
        a, b, out = (NumbaArray(x) for x in (x, y, z))
        for one, replaced in zip((a, b, out), foreign, strict=True):
            if replaced:
                one.gpu_data = MemoryPointer(one.x.ctypes.data)
        multiply(a, b, out)
        assert (gpu.launches[-1].a[0], gpu.launches[-1].b[0]) == (x.ctypes.data, y.ctypes.data)
        assert gpu.launches[-1].c[0] == z.ctypes.data
    assert len(checked) == 1


@pytest.mark.usefixtures("others")
def test_fast_path_of_a_cupy_result(checked):
    multiply = plan(4, 8, 12, stage="naive")
    a, b, c = (CupyArray(aligned_empty(x.shape)) for x in operands())
    a.x[...], b.x[...], c.x[...] = operands()
    multiply(a, b, c)
    probe = fast_path.PROBES[CupyArray]
    made, place = probe.empty(a, (4, 8), 0)
    assert (made.shape, made.x.ctypes.data) == ((4, 8), place)
    assert probe.empty(a, (4, 8), 0) is not None


@pytest.mark.usefixtures("others")
def test_numba_arrays_on_two_streams_take_the_full_check(gpu, checked, monkeypatch):
    monkeypatch.setattr(arrays.streams, "hold", lambda *_: None)
    one, other = types.SimpleNamespace(cuda_stream=50), types.SimpleNamespace(cuda_stream=60)
    multiply = plan(4, 8, 12, stage="naive")
    a, b, c = (aligned_empty(x.shape) for x in operands())
    for bound, ways in [
        ((one,) * 3, 1),
        ((one,) * 3, 1),
        ((one, other, one), 2),
        ((0, one, one), 3),
        ((one, one, other), 4),
        ((other,) * 3, 4),
    ]:
        multiply(*(NumbaArray(x, stream) for x, stream in zip((a, b, c), bound, strict=True)))
        assert len(checked) == ways
    assert [did.stream for did in gpu.launches] == [50, 50, 50, 50, 50, 60]


# -------------------------------------------------------------------------- other extents and strides than those before


def launched_with(gpu, call):
    """Return the launches of a call, with the name of an operand in place of its address, and no other addresses."""
    begin = len(gpu.launches)
    operands_at = {x.data_ptr(): name for name, x in zip("abc", call(), strict=True)}

    def named(words):
        return [operands_at.get(word, "address" if word > 1 << 22 else word) for word in words]

    return [
        (
            *(did.kernel, did.grid, did.block, did.shared, did.stream, did.overlaps),
            {name: named(value) if isinstance(value, list) else value for name, value in did.arguments.items()},
        )
        for did in gpu.launches[begin:]
    ]


def skewed(x):
    """Copy x so that its rows are neither dense nor on 16-byte boundaries."""
    wide = on_boundary(np.zeros((x.shape[0], x.shape[1] + 3), np.float32))
    wide[:, 2:-1] = x
    return wide[:, 2:-1]


WAYS = {"by rows": on_boundary, "by columns": lambda x: on_boundary(x.T).T, "skewed": skewed}


@pytest.mark.parametrize("precision", ["ieee", "bf16x6", "tf32", "fp32_auto", "BFX9"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (4, 8, 12), (5, 3, 7), (1, 70, 33), (70, 1, 64), (300, 260, 40)])
def test_other_extents_are_launched_as_in_the_full_check(torch, gpu, checked, precision, shape, way):
    gpu.computes = precision == "ieee"
    (m, n, k), lay_out = shape, WAYS[way]
    for given in (True, False):

        def call(given=given):
            a, b, c = tensor(filled(m, k)), Tensor(lay_out(filled(k, n))), filled(m, n, seed=2)
            out = Tensor(skewed(c) if way == "skewed" else on_boundary(c)) if given else None
            beta = 0.5 if given else 0.0
            result = tiled_sgemm(a, b, out, alpha=2.0, beta=beta, precision=precision)
            if gpu.computes:
                check(result.x, a.x, b.x, alpha=2.0, beta=beta, c=c)
            return a, b, result

        products.calls.clear()
        expected = launched_with(gpu, call)
        products.calls.clear()
        tiled_sgemm(tensor(filled(9, 11)), tensor(filled(11, 5)), precision=precision)
        checked.clear()
        assert launched_with(gpu, call) == launched_with(gpu, call) == expected
        assert not checked


def test_fp32_auto_is_decided_as_for_a_new_c(torch, gpu, checked, monkeypatch):
    """As in the full check, whatever C is given: else a call's precision would depend on the calls before it."""
    decided = []
    monkeypatch.setattr(fast_path, "resolved", lambda precision, product, gpu: decided.append(product.c) or "ieee")
    for m in (9, 12):
        out = Tensor(skewed(filled(m, 5)))
        tiled_sgemm(tensor(filled(m, 300)), tensor(filled(300, 5)), out, precision="fp32_auto")
    assert len(checked) == 1
    assert decided == [dense("N", 12, 5)]


@pytest.mark.parametrize("shapes", [((12,), (12, 8)), ((4, 12), (12,)), ((2, 4, 12), (12,)), ((12,), (12,))], ids=str)
@pytest.mark.parametrize("given", [True, False])
def test_vectors_take_the_fast_path(torch, gpu, checked, shapes, given):
    tiled_sgemm(*extents((9, 11), (11, 5)))
    for turn in range(3):
        a, b = (np.float32(np.random.default_rng(turn).uniform(-1, 1, shape)) for shape in shapes)
        expected = a @ b
        result = tiled_sgemm(Tensor(a), Tensor(b), Tensor(np.ones_like(expected)) if given else None, beta=0.5 * given)
        assert result.shape == expected.shape
        np.testing.assert_allclose(result.x, expected + 0.5 * given, atol=1e-5)
    assert len(checked) == 2
    with pytest.raises(ValueError, match=r"a has shape .* this plan is for shapes \(1, 12\)"):
        plan(1, 8, 12)(Tensor(a), Tensor(b))


def extents(*shapes):
    return [tensor(np.ones(shape, np.float32)) for shape in shapes]


# Calls that nothing but the full check may accept or refuse, after one of other extents; the error, or None.
UNUSUAL = {
    "K": (lambda: extents((4, 6), (5, 8)), r"6 columns of a against 5 rows of b"),
    "a number": (lambda: [Tensor(np.ones((), np.float32)), *extents((4, 8))], "a has 0 dimensions"),
    "batch": (lambda: extents((2, 4, 6), (6, 8)), None),
    "no rows": (lambda: extents((0, 6), (6, 8)), None),
    "no terms": (lambda: extents((4, 0), (0, 8)), None),
    "shape of out": (lambda: extents((4, 6), (6, 8), (8, 4)), r"expected \(4, 8\)"),
    "one dimension of out": (
        lambda: [*extents((4, 6), (6, 8)), tensor(np.ones((1, 4), np.float32)[0])],
        r"out has shape \(4,\); expected \(4, 8\)",
    ),
    "no dimension of out": (
        lambda: [*extents((4, 6), (6, 8)), Tensor(np.ones((), np.float32))],
        r"out has shape \(\); expected \(4, 8\)",
    ),
    "out by columns": (lambda: [*extents((4, 6), (6, 8)), Tensor(aligned_empty((8, 4)).T)], None),
    "rows of out overlap": (
        lambda: [
            *extents((4, 6), (6, 8)),
            Tensor(np.lib.stride_tricks.as_strided(aligned_empty((1, 40)), (4, 8), (16, 4))),
        ],
        "elements that share memory",
    ),
    "off 4-byte boundaries": (
        lambda: [changed(tensor(np.ones((4, 6), np.float32)), address=4098), *extents((6, 8))],
        "4-byte boundaries",
    ),
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_unusual_extents_are_checked_in_full(torch, gpu, checked, case):
    make, error = UNUSUAL[case]
    tiled_sgemm(*extents((9, 11), (11, 5)))
    arrays_of_call = make()
    if error is None:
        tiled_sgemm(*arrays_of_call)
    else:
        with pytest.raises(ValueError, match=error):
            tiled_sgemm(*arrays_of_call)
    assert len(checked) == 2


def test_other_extents_whose_operands_overlap_are_refused(torch, gpu):
    tiled_sgemm(*extents((9, 11), (11, 5)))
    whole = on_boundary(np.zeros((1, 64), np.float32))[0]
    a, b, out = Tensor(whole[:16].reshape(4, 4)), tensor(np.ones((4, 4), np.float32)), whole[8:24].reshape(4, 4)
    with pytest.raises(ValueError, match="out shares memory with a"):
        tiled_sgemm(a, b, Tensor(out))
    assert len(gpu.launches) == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [({}, {"precision": "bf16"}), ({}, {"stage": "naive"}), ({"epilogue": lambda value, row, col: value}, {})],
    ids=["precision", "stage", "epilogue"],
)
def test_only_calls_of_a_kind_that_was_checked(torch, gpu, checked, first, second):
    gpu.computes = False
    tiled_sgemm(*extents((9, 11), (11, 5)), **first)
    tiled_sgemm(*extents((4, 6), (6, 8)), **second)
    assert len(checked) == 2


@pytest.mark.parametrize("other", [False, True], ids=["the first call", "other extents"])
def test_choices_made_before_the_cache_was_cleared_are_not_kept(torch, gpu, monkeypatch, other):
    """As by `autotune` in another thread, while this one compiles."""
    a, b, _ = operands()
    if other:
        tiled_sgemm(tensor(filled(9, 11)), tensor(filled(11, 5)))
    bind = devices.Device.bind

    def cleared_meanwhile(*arguments):
        products.forget()
        return bind(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(devices.Device, "bind", cleared_meanwhile)
        check(tiled_sgemm(tensor(a), tensor(b)).x, a, b)
    assert not products.calls
    tiled_sgemm(tensor(a), tensor(b))
    assert len(products.calls) == 1


def test_plans_take_no_other_extents(torch, gpu):
    multiply = plan(9, 5, 11)
    multiply(*extents((9, 11), (11, 5)))
    with pytest.raises(ValueError, match=r"this plan is for shapes \(9, 11\) and \(11, 5\)"):
        multiply(*extents((4, 6), (6, 8)))
    assert len(gpu.launches) == 1


LIBRARIES = {"Numba": NumbaArray, "Numba, others' memory": NumbaView, "CuPy": CupyArray, "PyTorch": Tensor}
# Changes of one array: functions of a constructor and the elements.
ARRAY_CHANGES = {
    "by columns": lambda make, x: make(on_boundary(x.T).T),
    "boundary": lambda make, x: make(on_boundary(x, 1)),
    "fewer rows": lambda make, x: make(on_boundary(x)[:-1]),
    "fewer columns": lambda make, x: make(on_boundary(x)[:, :-1]),
    "dtype": lambda make, x: changed(make(on_boundary(x)), dtype=np.dtype(np.int32)),
    "type": lambda make, x: on_boundary(x),
    "device": lambda make, x: on_device_one(make(on_boundary(x))),
}
REFUSED = {"fewer rows", "fewer columns", "dtype", "type", "device"}


def on_device_one(x):
    if isinstance(x, NumbaArray):
        ON_DEVICE_ONE.add(x.x.ctypes.data)
        return x
    if isinstance(x, Tensor):
        return changed(x, index=1, device=types.SimpleNamespace(type="cuda", index=1))
    x.data.device_id, x.device.id = 1, 1
    return x


ON_DEVICE_ONE = set()


@pytest.mark.parametrize("which", ["a", "b", "out", "all"])
@pytest.mark.parametrize("change", ARRAY_CHANGES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_call_with_a_changed_array(torch, others, gpu, checked, monkeypatch, library, change, which):
    make = LIBRARIES[library]
    kinds = libraries.NumbaArrays, libraries.CupyArrays, torch_tensors.TorchTensors
    monkeypatch.setattr(arrays, "KINDS", tuple(kind() for kind in kinds))
    monkeypatch.setattr(libraries, "device_count", lambda: 2)
    monkeypatch.setattr(devices, "device_count", lambda: 2)
    monkeypatch.setattr(libraries, "pointer_device", lambda name, pointer: int(pointer in ON_DEVICE_ONE))
    ON_DEVICE_ONE.clear()
    values = dict(zip(("a", "b", "out"), operands(), strict=True))
    kept = []  # so that no address comes back

    def call(changed_ones=()):
        given = {
            name: ARRAY_CHANGES[change](make, x) if name in changed_ones else make(on_boundary(x))
            for name, x in values.items()
        }
        kept.append(given)
        tiled_sgemm(*given.values(), stage="naive")
        check(given["out"].x, given["a"].x, given["b"].x)

    call()
    call()
    assert (len(checked), len(gpu.launches)) == (1, 2)
    ones = tuple(values) if which == "all" else (which,)
    possible = change not in REFUSED or (change == "device" and which == "all")
    if possible:
        call(ones)
        assert gpu.pushed[-1:] == [CONTEXT + 1] * (change == "device")
        assert [call.device for call in products.calls.values()][-1] == (change == "device")
    else:
        with pytest.raises((TypeError, ValueError)):
            call(ones)
    full = 1 if change == "boundary" or (change == "by columns" and which in ("a", "b")) else 2
    assert (len(checked), len(gpu.launches)) == (full, 2 + possible)
    call()
    assert len(checked) == full
    tiled_sgemm(*(make(on_boundary(x)) for x in values.values()), stage="coalesced")
    assert len(checked) == full + 1, "the stage counts as well"


@pytest.mark.usefixtures("others")
def test_device_of_an_empty_numba_array_is_not_asked_by_its_address(monkeypatch):
    """Numba gives it the address 0, of which the driver knows nothing."""

    def pointer_device(name, pointer):
        assert pointer
        return 0

    monkeypatch.setattr(libraries, "device_count", lambda: 2)
    monkeypatch.setattr(libraries, "pointer_device", pointer_device)
    a, b, empty = (NumbaArray(np.zeros(shape, np.float32)) for shape in ((4, 12), (12, 8), (4, 0)))
    empty.gpu_data.device_ctypes_pointer.value = 0
    probe = libraries.NumbaArrays().probe(a)
    assert probe.read("auto", a, b, None) is not None
    assert probe.read("auto", empty, b, None) is None
    assert probe.read("auto", a, empty, None) is not None
    assert probe.vector(NumbaArray(np.zeros(8, np.float32)), a) is not None
    nothing = NumbaArray(np.zeros(0, np.float32))
    nothing.gpu_data.device_ctypes_pointer.value = 0
    assert probe.vector(nothing, a) is None


@pytest.mark.usefixtures("others")
def test_cupy_result_is_not_allocated_on_another_device(monkeypatch):
    a = CupyArray(aligned_empty((4, 12)))
    probe = libraries.CupyArrays().probe(a)
    assert probe.empty(a, (4, 8), 0) is not None
    assert probe.empty(a, (4, 8), 1) is None


# ---------------------------------------------------------------------------------------------------------------- reach


def piece(offset, rows, cols, row_step, col_step=1):
    """Return a matrix of a memory that starts at address 4096; all in elements."""
    return Operand("x", None, None, "float32", (rows, cols), (4 * row_step, 4 * col_step), 4096 + 4 * offset, device=0)


@pytest.fixture
def remembered(no_calls):
    """Return the cached call of operands; nothing is read of their arrays."""

    class Kind(ArrayKind):
        def probe(self, array):
            return Probe(lambda *_: ("key", 0, 0, 0), lambda *_: (0, 8, 4, 0), None, None)

    def remember(a, b, c, vectors=()):
        cache, request = fast_path.CallCache(), types.SimpleNamespace(device=0, shape=c.shape)
        given, launched = (object(), object(), object(), vectors), [(None, 0, 0, 0, True)]
        fast_path.remember(cache, "tag", Kind(), given, (a, b, c, vectors), request, launched, cache.generation)
        return cache["key"]

    return remember


def apart(reach, x, c):
    """Return True if the fast path takes an operand and C at their addresses."""
    below, above = reach
    return not below < x.pointer - c.pointer < above


# An operand, C, and whether a memory access of one cannot meet the other.
PIECES = {
    "behind": (piece(0, 4, 4, 4), piece(16, 4, 4, 4), True),
    "last element": (piece(0, 4, 4, 4), piece(15, 4, 4, 4), False),
    "in front": (piece(16, 4, 4, 4), piece(0, 4, 4, 4), True),
    "first element": (piece(15, 4, 4, 4), piece(0, 4, 4, 4), False),
    "interleaved, for the full check": (piece(0, 4, 4, 8), piece(4, 4, 4, 8), False),
    "rows backwards, in front": (piece(12, 4, 4, -4), piece(16, 4, 4, 4), True),
    "rows backwards, over": (piece(12, 4, 4, -4), piece(0, 4, 4, 4), False),
    "backwards, behind": (piece(31, 4, 4, -4, -1), piece(0, 4, 4, 4), True),
    "backwards, last element": (piece(30, 4, 4, -4, -1), piece(0, 4, 4, 4), False),
    "C backwards, behind": (piece(0, 4, 4, 4), piece(31, 4, 4, -4, -1), True),
    "C backwards, first element": (piece(0, 4, 4, 4), piece(30, 4, 4, -4, -1), False),
}


@pytest.mark.parametrize("case", PIECES)
def test_reach_is_by_bytes(remembered, case):
    x, c, expected = PIECES[case]
    far = piece(300, 4, 4, 4)
    call = remembered(x, far, c)
    assert (apart(call.reach[:2], x, c), apart(call.reach[2:], far, c)) == (expected, True)
    call = remembered(far, x, c)
    assert (apart(call.reach[:2], far, c), apart(call.reach[2:], x, c)) == (True, expected)


@pytest.mark.parametrize("name", ["a", "b", "c", "vector"])
def test_reach_includes_all_matrices_of_a_batch(remembered, name):
    """Two matrices, 4096 bytes apart, of one of the operands."""

    def operand(own):
        shape, strides = ((4, 4), (16, 4)) if own != name else ((2, 4, 4), (4096, 16, 4))
        if own == "vector":
            shape, strides = (1025,), (4,)
        return Operand(own, None, None, "float32", shape, strides, 0, device=0)

    call = remembered(*map(operand, "abc"), (operand("vector"),))
    reach = {"a": call.reach[:2], "b": call.reach[2:], "c": call.reach[:2], "vector": call.vectors[0]}[name]
    size, far = {"a": (4160, 64), "b": (4160, 64), "c": (64, 4160), "vector": (4100, 64)}[name]
    for distance, expected in ((-size, True), (-size + 1, False), (0, False), (far - 1, False), (far, True)):
        assert (not reach[0] < distance < reach[1]) == expected
