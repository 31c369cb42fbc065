"""What is offered to PyTorch: values, gradients, tracing, compilation, what is replaced, and what is refused."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
import sys
import types
import unittest
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.operands import check, filled

torch = pytest.importorskip("torch")

import numba_gemm.torch as ours  # noqa: E402
from numba_gemm.arrays import torch_tensors  # noqa: E402
from numba_gemm.arrays.streams import DEFAULT as DEFAULT_STREAM  # noqa: E402
from numba_gemm.torch import operators  # noqa: E402

DEVICE, OPERATORS = operators.DEVICE, operators.OPERATORS
pytestmark = [
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(), reason="PyTorch finds no GPU, and the simulator is off"
    ),
    # Of PyTorch itself: from its compiler, and from the first product in the thread of a backward pass.
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # from `opcheck`
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),  # from `torch.func.vmap`
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),  # from its compiler
]
OPCHECK = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def tensor(*shape, seed=0, grad=False):
    return (
        torch.from_numpy(filled(int(np.prod(shape[:-1])), shape[-1], seed).reshape(shape))
        .to(DEVICE)
        .requires_grad_(grad)
    )


def close(found, expected):
    torch.testing.assert_close(found, expected.to(found.dtype), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("inference", [False, True])
def test_c_is_copied_into_a_tensor_of_inference_mode(monkeypatch, inference):
    """Outside that mode, too; another tensor gets another version."""
    monkeypatch.setattr(torch_tensors.TorchTensors, "_own_stream", lambda *_: None)  # without a GPU there is none
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    with torch.inference_mode(inference):
        out = torch.zeros(3, 4, device=DEVICE)
    before = None if inference else out._version
    kind, c = torch_tensors.TorchTensors(), tensor(4, 1).T
    kind.copy(types.SimpleNamespace(array=c), types.SimpleNamespace(array=out), 0, DEFAULT_STREAM)
    assert torch.equal(out, c.expand(3, 4))
    assert inference or out._version > before


@pytest.fixture
def products(monkeypatch):
    """The precisions of the products that are computed here."""
    seen, compute = [], operators._sgemm

    def counted(*operands, precision, **options):
        seen.append(precision)
        return compute(*operands, precision="ieee", **options)

    monkeypatch.setattr(operators, "_sgemm", counted)
    return seen


# ------------------------------------------------------------------------------------------------------- functions

SHAPES = {  # of a and b
    "matrices": ((5, 7), (7, 6)),
    "batch": ((2, 5, 7), (2, 7, 6)),
    "shared b": ((2, 3, 5, 7), (7, 6)),
    "broadcast": ((3, 1, 5, 7), (2, 7, 6)),
    "no terms": ((5, 0), (0, 6)),
}
INPUTS = {"bias": (6,), "column": (5, 1), "matrix": (5, 6), "scalar": ()}


def operands(shapes, layout="rows"):
    """Leaves that require grad, in rows or in columns."""
    found = []
    for seed, shape in enumerate(shapes):
        x = tensor(*shape, seed=seed) if shape else torch.tensor(0.5, device=DEVICE)
        found.append((x.mT.contiguous().mT if layout == "columns" and x.dim() > 1 else x).requires_grad_())
    return found


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_matmul_and_its_gradients(shapes, layout):
    a, b = operands(shapes, layout)
    result = ours.matmul(a, b)
    close(result, a.detach() @ b.detach())
    weights = tensor(*result.shape, seed=3)
    found = torch.autograd.grad(result, (a, b), weights)
    for one, expected, x in zip(found, torch.autograd.grad(a @ b, (a, b), weights), (a, b), strict=True):
        close(one, expected)
        if x.dim() == 2 and x.numel():
            assert one.stride() == x.stride(), "autograd would copy it"


@pytest.mark.parametrize("factors", [(1, 1), (0.5, 2), (0, 1)], ids=str)
@pytest.mark.parametrize("batch", [(), (2,)], ids=["matrix", "batch"])
@pytest.mark.parametrize("shape", INPUTS.values(), ids=INPUTS)
def test_addmm_and_its_gradients(shape, batch, factors):
    beta, alpha = factors
    leaves = operands([shape, (*batch, 5, 7), (7, 6)])

    def expected(c, a, b):
        return beta * c + alpha * (a @ b)

    result = ours.addmm(*leaves, beta=beta, alpha=alpha)
    close(result, expected(*leaves).detach())
    with torch.no_grad():  # without an operator
        close(ours.addmm(*leaves, beta=beta, alpha=alpha), result)
    weights = tensor(*result.shape, seed=3)
    found = torch.autograd.grad(result, leaves, weights)
    for one, other in zip(found, torch.autograd.grad(expected(*leaves), leaves, weights), strict=True):
        close(one, other)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_that_of_a_layer(bias):
    layer, x = torch.nn.Linear(7, 6, bias=bias, device=DEVICE), tensor(2, 5, 7)
    found, expected = ours.linear(x, layer.weight, layer.bias), layer(x)
    close(found, expected.detach())
    for one, other in zip(*(torch.autograd.grad(y.square().sum(), layer.parameters()) for y in (found, expected))):
        close(one, other)
        assert one.is_contiguous()


def test_results_are_written_to_out():
    a, b, out = tensor(5, 7), tensor(7, 6, seed=1), tensor(6, 5, seed=2).T
    version, before = out._version, out.clone()
    assert ours.matmul(a, b, out=out) is out
    assert out._version > version or DEVICE == "cpu"
    close(out, a @ b)
    ours.addmm(before, a, b, beta=2, out=out)
    close(out, 2 * before + a @ b)
    ours.addmm(out, a, b, alpha=-1, out=out)
    close(out, 2 * before)
    with pytest.raises(RuntimeError, match=r"requires grad; .* torch\.no_grad\(\)"):
        ours.matmul(a.requires_grad_(), b, out=out)
    with torch.no_grad():
        close(ours.matmul(a, b, out=out), a @ b)


def test_input_of_addmm_in_the_memory_of_out():
    """It is copied only if it may overlap `out`; a view of all of `out` is as good as `out`."""
    a, b, buffer = tensor(5, 7), tensor(7, 6, seed=1), tensor(11, 6, seed=2)
    first = buffer[:5]
    place, may_overlap = ours.functions._place, ours.functions._may_overlap
    assert place(buffer[:5]) == place(first) != place(buffer[:4])
    assert may_overlap(first.T, first)
    assert may_overlap(buffer[4], first)
    assert not any(may_overlap(one, first) for one in (buffer[5:10], buffer[10], buffer[:0], a))
    for shared, out in ((buffer[:5], first), (buffer[:5], buffer[5:10]), (buffer[10], first), (buffer[4], first)):
        expected = 2 * shared + a @ b
        assert ours.addmm(shared, a, b, beta=2, out=out) is out
        close(out, expected)


def test_input_of_addmm_may_overlap_out():
    a, b, buffer = tensor(5, 7), tensor(7, 6, seed=1), tensor(5, 8, seed=2)
    shared, out = buffer[:, :6], buffer[:, 2:]
    expected = 2 * shared + a @ b
    ours.addmm(shared, a, b, beta=2, out=out)
    close(out, expected)
    kept = out.clone()
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        ours.addmm(shared, a, tensor(8, 6), beta=2, out=out)
    assert torch.equal(out, kept), "operands that are refused leave it as it is"


def test_error_is_within_the_bound():
    a, b = tensor(40, 70), tensor(70, 30, seed=1, grad=True)
    found = ours.matmul(a, b).detach().cpu().numpy()
    check(found, a.cpu().numpy(), b.detach().cpu().numpy())


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_batched_gradients(shapes):
    """Those of `is_grads_batched`, by which PyTorch computes vectorized Jacobians."""
    a, b = operands(shapes)
    bias = tensor(b.shape[-1], seed=2, grad=True)
    for leaves, result in (((a, b), ours.matmul(a, b)), ((bias, a, b), ours.addmm(bias, a, b))):
        weights = tensor(3, *result.shape, seed=4)
        found = torch.autograd.grad(result, leaves, weights, is_grads_batched=True, retain_graph=True)
        for place, one in enumerate(weights):
            expected = torch.autograd.grad(result, leaves, one, retain_graph=True)
            for batched, other in zip(found, expected, strict=True):
                close(batched[place], other)


def test_only_what_a_gradient_needs_is_kept():
    a, b = tensor(5, 7), tensor(7, 6, grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(tuple(x.shape)) or x, lambda x: x):
        ours.matmul(a, b)
        ours.matmul(a.requires_grad_(), b.detach())
    assert kept == [(5, 7), (7, 6)]


def test_gradients_have_the_precision_of_the_product(products):
    layer = torch.nn.Linear(7, 6, device=DEVICE)
    x = tensor(5, 7, grad=True)
    y = ours.linear(x, layer.weight, layer.bias, precision="bf16x6")
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    first.square().sum().backward()
    assert set(products) == {"bf16x6"}
    assert len(products) > 4


def test_calls_without_gradients_use_no_operator(monkeypatch):
    a, b, out = tensor(5, 7), torch.nn.Parameter(tensor(7, 6)), tensor(5, 6)
    used = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            used.append(func)
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(ours.functions, "OPERATORS", None)
        close(ours.matmul(a, b), a @ b)
        ours.matmul(a, b, out=out)
        ours.linear(a, b.mT, out[0])
    with torch.no_grad(), Seen():
        ours.matmul(a, b)
    assert OPERATORS.matmul.default in used


# ------------------------------------------------------------------------------------------------------- operators


@pytest.mark.parametrize(("shapes", "layout"), [(SHAPES["matrices"], "columns"), (SHAPES["shared b"], "rows")], ids=str)
def test_operators_are_registered_correctly(shapes, layout):
    a, b = operands(shapes, layout)
    out = torch.empty_like((a @ b).detach())
    for operator, arguments in {
        OPERATORS.matmul.default: (a, b, 2.0, "ieee"),
        OPERATORS.addmm.default: (tensor(6, grad=True), a, b),
        OPERATORS.matmul_out.default: (out, a.detach(), b.detach(), 2.0, 0.5),
    }.items():
        found = torch.library.opcheck(operator, arguments, test_utils=OPCHECK)
        assert set(found.values()) == {"SUCCESS"}


@pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double precision:UserWarning")
@pytest.mark.parametrize("shapes", [((2, 3), (3, 2)), ((2, 1, 2), (2, 1))], ids=str)
def test_gradients_are_those_of_differences(shapes):
    # Products are linear in each operand, so large steps add no error.
    a, b = operands(shapes)
    bias = tensor(b.shape[-1], grad=True)
    options = {"eps": 0.5, "atol": 1e-3, "rtol": 1e-3}
    assert torch.autograd.gradcheck(ours.matmul, (a, b), **options)
    assert torch.autograd.gradcheck(partial(ours.addmm, alpha=2, beta=0.5), (bias, a, b), **options)
    assert torch.autograd.gradgradcheck(ours.matmul, (a, b), **options)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_is_one_graph(backend, products):
    torch._dynamo.reset()
    weight, bias = tensor(6, 7, grad=True), tensor(6, grad=True)

    def loss(x):
        y = torch.relu(ours.linear(x, weight, bias, precision="tf32"))
        return ours.matmul(y, weight, precision="tf32").square().sum()

    compiled = torch.compile(loss, backend=backend, fullgraph=True)
    for rows in (5, 4, 3):  # other shapes are traced anew, or with symbolic extents
        found, expected = (torch.autograd.grad(f(tensor(rows, 7)), (weight, bias)) for f in (compiled, loss))
        for one, other in zip(found, expected, strict=True):
            close(one, other)
    assert set(products) == {"tf32"}


def test_compiled_code_writes_to_out():
    torch._dynamo.reset()
    a, b, out = tensor(5, 7), tensor(7, 6), tensor(5, 6)
    before = out.clone()
    compiled = torch.compile(lambda c: ours.addmm(c, a, b, out=c) * 2, backend="aot_eager", fullgraph=True)
    close(compiled(out), 2 * (before + a @ b))
    close(out, before + a @ b)


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python boolean:torch.jit.TracerWarning")  # shapes
@pytest.mark.parametrize("form", ["matmul", "out", "addmm", "linear"])
def test_traced_code_computes_with_its_own_inputs(form):
    a, b, bias = tensor(5, 7), tensor(7, 6, seed=1), tensor(6, seed=2)
    call = {
        "matmul": lambda a: ours.matmul(a, b),
        "out": lambda a: ours.matmul(a, b, out=a.new_empty(5, 6)),
        "addmm": lambda a: ours.addmm(bias, a, b),
        "linear": lambda a: ours.linear(a, b.mT, bias),
    }[form]
    traced, other = torch.jit.trace(call, (a,)), tensor(5, 7, seed=3)
    close(traced(other), call(other))


@pytest.mark.filterwarnings("ignore")  # Inductor's own
@pytest.mark.parametrize("only", [True, False], ids=["only choice", "beside others"])
def test_inductor_measures_and_takes_ours(only, products, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    pytest.importorskip("torch._inductor.config")
    if not hasattr(torch._inductor.config, "external_matmul"):
        pytest.skip("needs PyTorch 2.5")
    torch._dynamo.reset()
    options = {"max_autotune": True, "external_matmul": [ours.external_matmul("bf16x6")]}
    options["max_autotune_gemm_backends"] = "" if only else "ATEN"
    a, b = tensor(12, 8), tensor(8, 16, seed=1)
    compiled = torch.compile(lambda a, b: torch.relu(a @ b), options=options, fullgraph=True)
    close(compiled(a, b), torch.relu(a @ b))
    measured = len(products)
    assert measured > 0
    compiled(a, b)
    if only:
        assert len(products) == measured + 1


@pytest.mark.filterwarnings("ignore")  # Inductor's own
def test_inductor_takes_all_products_of_a_block(products, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    if not hasattr(pytest.importorskip("torch._inductor.config"), "external_matmul"):
        pytest.skip("needs PyTorch 2.5")
    torch._dynamo.reset()
    torch.manual_seed(1)
    block = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, activation="gelu", batch_first=True).to(DEVICE)
    x = tensor(1, 4, 16, grad=True)
    leaves = [x, *block.parameters()]
    options = {"max_autotune": True, "max_autotune_gemm_backends": "", "external_matmul": [ours.external_matmul()]}
    compiled = torch.compile(block, options={**options, "post_grad_custom_post_pass": ours.unfuse_addmm})
    expected = torch.autograd.grad(block(x).square().sum(), leaves)
    torch.autograd.grad(compiled(x).square().sum(), leaves)  # compiles, and measures
    products.clear()
    for one, other in zip(torch.autograd.grad(compiled(x).square().sum(), leaves), expected, strict=True):
        close(one, other)
    assert len(products) == 12, "four layers, forward and for two gradients each"


@pytest.mark.parametrize("factors", [(1, 1), (2, 0.5), (0, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sums_are_split_in_a_graph(dtype, factors):
    beta, alpha = factors
    operands = [x.to(dtype) for x in (tensor(6), tensor(5, 7), tensor(7, 6, seed=1))]
    traced = torch.fx.experimental.proxy_tensor.make_fx(
        lambda c, a, b: torch.ops.aten.addmm.default(c, a, b, beta=beta, alpha=alpha) * 2, tracing_mode="fake"
    )(*operands)
    expected = traced(*operands)
    ours.unfuse_addmm(traced.graph)
    traced.graph.lint()
    traced.recompile()
    close(traced(*operands), expected)
    found = {node.target for node in traced.graph.nodes if node.op == "call_function"}
    split = dtype is torch.float32 and beta != 0
    assert (torch.ops.aten.mm.default in found) == split
    assert (torch.ops.aten.addmm.default in found) != split


# -------------------------------------------------------------------------------------------------------- override


def replaced_products():
    x, y, bias = tensor(2, 5, 7), tensor(2, 7, 5), tensor(5)
    layer = torch.nn.Linear(7, 6, device=DEVICE)
    return {
        "mm": (1, lambda: torch.mm(x[0], y[0])),
        "bmm": (1, lambda: torch.bmm(x, y)),
        "addmm": (1, lambda: torch.addmm(bias, x[0], y[0], beta=0.5, alpha=2)),
        "baddbmm": (1, lambda: torch.baddbmm(bias, x, y, beta=0)),
        "matmul": (1, lambda: x @ y),
        "linear": (1, lambda: layer(x)),
        "einsum": (1, lambda: torch.einsum("bij,bjk->bik", x, y)),
        "backward": (2, lambda: torch.autograd.grad(layer(x).square().sum(), layer.weight)[0]),
        "float64": (0, lambda: x.double() @ y.double()),
        "bfloat16": (0, lambda: x.bfloat16() @ y.bfloat16()),
        "vector": (0, lambda: x[0] @ y[0, :, 0]),
        "sparse": (0, lambda: x[0].to_sparse() @ y[0]),
        "meta": (0, lambda: (x.to("meta") @ y.to("meta")).new_zeros(1, device=DEVICE)),
        "out": (0, lambda: torch.mm(x[0], y[0], out=x.new_empty(5, 5))),
        "add": (0, lambda: x + x),
    }


@pytest.mark.parametrize("name", replaced_products())
def test_products_are_replaced_in_the_context(name, products):
    expected, call = replaced_products()[name]
    right = call().detach()
    assert products == []
    with ours.override(precision="tf32"):
        found = call()
    assert products == ["tf32"] * expected
    close(found.detach(), right)
    call()
    assert len(products) == expected, "outside of the context"


@pytest.fixture
def samples(monkeypatch):
    """PyTorch's own test cases of an operator, for float32."""
    if importlib.util.find_spec("expecttest") is None:  # which PyTorch imports for the base class of its own tests
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        monkeypatch.setitem(sys.modules, "expecttest", stub)
    cases = importlib.import_module("torch.testing._internal.common_methods_invocations")

    def of(name):
        (info, *_) = (one for one in cases.op_db if one.name == name)
        return [(partial(info, x.input, *x.args, **x.kwargs), x) for x in info.sample_inputs(DEVICE, torch.float32)]

    return of


@pytest.mark.parametrize("name", ["mm", "addmm", "bmm", "baddbmm", "matmul", "nn.functional.linear"])
def test_samples_of_pytorch_pass_through_the_context(name, samples, products):
    found = samples(name)
    computed, wanted = 0, sum(x.args[0].dim() > 1 for _, x in found)  # PyTorch's `mv` and `dot` are left to it
    for call, _ in found:
        expected, before = call(), len(products)
        with ours.override():
            result = call()
        close(result, expected)
        computed += len(products) > before
    print(f"{name}: {computed} of {len(found)} computed here")  # pytest -rP shows it
    assert 0 < wanted == computed


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_products_are_replaced_without_grad_mode(mode, products):
    layer, x = torch.nn.Linear(7, 6, device=DEVICE), tensor(2, 5, 7)
    expected = layer(x).detach()
    with getattr(torch, mode)(), ours.override():
        close(layer(x), expected)
        assert products == ["ieee"]
        torch.einsum("bij,kj->bik", x, layer.weight)
    assert products == ["ieee"] * 2


def composed_products():
    x, y = tensor(4, 6), tensor(6, 4, seed=1)
    return {
        "inner": (1, lambda: torch.inner(x, x)),
        "multi_dot": (2, lambda: torch.linalg.multi_dot([x, y, x])),
        "tensordot": (1, lambda: torch.tensordot(x, x, dims=([1], [1]))),
        "matrix_power": (2, lambda: torch.linalg.matrix_power(x @ y, 2)),
        "reshape": (0, lambda: x.reshape(6, 4).mT),
    }


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("name", composed_products())
def test_composed_operators_are_replaced_in_either_mode(name, mode, products):
    expected, call = composed_products()[name]
    with getattr(torch, mode)():
        right = call()
        with ours.override():
            close(call(), right)
    assert len(products) == expected


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    ("layout", "call"),
    [
        (torch.strided, lambda x: x.chunk(2, -1)[0]),
        (torch.strided, lambda x: x.contiguous()),
        (torch.jagged, lambda x: x.contiguous()),
        (torch.jagged, lambda x: x.unflatten(-1, (2, 3))),
    ],
)
def test_nested_tensors_keep_their_kernels(call, layout, products):
    x = torch.nested.nested_tensor([tensor(2, 6), tensor(3, 6)], layout=layout)
    with torch.inference_mode():
        expected = call(x)
        with ours.override():
            result = call(x)
    for one, other in zip(result.unbind(), expected.unbind(), strict=True):
        close(one, other)


def test_decompositions_in_python_are_not_used(monkeypatch, products):
    x = tensor(1, 1, 4, 4)
    interpolate = torch.ops.aten.upsample_bilinear2d.vec
    for key in interpolate.py_kernels:
        monkeypatch.setitem(interpolate.py_kernels, key, lambda *_, **__: pytest.fail("the decomposition ran"))
    with torch.inference_mode(), ours.override():
        torch.nn.functional.interpolate(x, scale_factor=2.0, mode="bilinear")


def test_fused_layers_cause_a_warning(products):
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, device=DEVICE).eval()
    x = tensor(1, 4, 16)
    enabled = torch.backends.mha.get_fastpath_enabled()
    try:
        with torch.no_grad(), ours.override(precision="tf32"):
            torch.backends.mha.set_fastpath_enabled(True)
            with pytest.warns(UserWarning, match=r"not in precision 'tf32'; call .*set_fastpath_enabled\(False\)"):
                fused = layer(x)
            assert products == []
            torch.backends.mha.set_fastpath_enabled(False)
            close(layer(x), fused)
            assert products == ["tf32"] * 4
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def test_autocast_is_left_to_pytorch(products):
    layer, x = torch.nn.Linear(7, 6, device=DEVICE), tensor(5, 7)
    with ours.override(), torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16
    assert products == []


@pytest.mark.filterwarnings("ignore")  # PyTorch's own
@pytest.mark.parametrize("transform", ["func", "forward_ad"])
def test_forward_derivatives_are_computed_in_the_context(transform, monkeypatch):
    a, b, compute, forward_ad = tensor(5, 7), tensor(7, 6, seed=1), operators._sgemm, torch.autograd.forward_ad

    def as_on_a_gpu(*operands, **options):
        assert not any(torch_tensors.has_tangent(torch, x) for x in operands)
        return compute(*operands, **options)

    monkeypatch.setattr(operators, "_sgemm", as_on_a_gpu)
    with ours.override():
        if transform == "func":
            found = torch.func.jvp(lambda x: x @ b, (a,), (2 * a,))
        else:
            with forward_ad.dual_level():
                found = forward_ad.unpack_dual(forward_ad.make_dual(a, 2 * a) @ b)
    for one, expected in zip(found, (a @ b, 2 * a @ b), strict=True):
        close(one, expected)


def test_errors_in_the_context_are_those_of_pytorch():
    with ours.override(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.mm(tensor(5, 7), tensor(5, 7))
    for make in (ours.override, ours.external_matmul):
        with pytest.raises(ValueError, match="precision is 'fp16'; expected one of ieee"):
            make(precision="fp16")


# --------------------------------------------------------------------------------- tensors that are not plain ones


class Named(torch.Tensor):
    """A subclass without an implementation of its own."""


def test_tensors_without_data_give_such_results():
    from torch._subclasses import FakeTensorMode

    meta = ours.addmm(
        torch.empty(6, device="meta"), torch.empty(2, 5, 7, device="meta"), torch.empty(7, 6, device="meta")
    )
    assert (meta.device.type, meta.shape) == ("meta", (2, 5, 6))
    with FakeTensorMode() as mode:
        a, b = mode.from_tensor(tensor(5, 7)), mode.from_tensor(tensor(7, 6))
        assert ours.matmul(a, b).shape == (5, 6)


def test_subclasses_and_negations_are_computed():
    a, b = tensor(5, 7), tensor(7, 6, seed=1)
    close(ours.matmul(torch._neg_view(a), b), -(a @ b))
    found = ours.matmul(a.as_subclass(Named), b)
    assert type(found) is Named
    close(found.as_subclass(torch.Tensor), a @ b)
    batch = tensor(2, 5, 7)
    close(torch.func.vmap(lambda x: ours.matmul(x, b))(batch), batch @ b)


REFUSED = [
    (lambda x: x.double(), TypeError, r"a has dtype .*float64; expected"),
    (lambda x: x[0, 0], ValueError, r"a has 0 dimensions.*; pass a\.reshape\(rows, columns\)"),
    (lambda x: x[:, :4], ValueError, r"a has shape \(5, 4\)"),
    (lambda x: x.to_sparse(), TypeError, r"a is a PyTorch tensor of layout torch\.sparse_coo.*; pass a\.to_dense\(\)"),
    (
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        TypeError,
        r"a\.dequantize\(\)|a is a PyTorch tensor",
    ),
]


@pytest.mark.filterwarnings("ignore")  # PyTorch's, about quantized tensors
@pytest.mark.parametrize(("change", "error", "words"), REFUSED)
@pytest.mark.parametrize("grad", [False, True], ids=["direct", "operator"])
def test_tensors_that_are_refused(change, error, words, grad):
    with pytest.raises(error, match=words):
        ours.matmul(change(tensor(5, 7)), tensor(7, 6, grad=grad))


def given(name, **options):
    """Call a function with operands that fit, and these instead of some of them."""
    usual = {"a": tensor(5, 7), "b": tensor(7, 6), "input": tensor(6), "x": tensor(5, 7), "weight": tensor(6, 7)}
    wanted = {"matmul": "ab", "addmm": ("input", "a", "b"), "linear": ("x", "weight")}[name]
    return getattr(ours, name)(**{one: usual[one] for one in wanted} | options)


ARRAY = np.ones((7, 6), np.float32)
BAD = [  # functions, arguments, and what the message says
    ("matmul", {"b": ARRAY}, TypeError, f"b is of type ndarray; .*as_tensor.b, dtype=torch.float32, device='{DEVICE}'"),
    ("matmul", {"a": [[1.0]]}, TypeError, "a is of type list; .*pass torch.as_tensor.a"),
    ("matmul", {"a": None}, TypeError, "a is of type NoneType; .*pass a tensor"),
    ("matmul", {"out": 5}, TypeError, "out is of type int; .*pass a tensor, or no out"),
    ("matmul", {"out": ARRAY}, TypeError, "out is of type ndarray"),
    ("matmul", {"precision": 3}, TypeError, "precision is of type int; .*pass one of"),
    ("matmul", {"a": torch.empty(5, 7, device="meta")}, ValueError, r"on device .*; pass b\.to\(a\.device\)"),
    ("matmul", {"out": torch.empty(5, 6, device="meta")}, ValueError, r"out is on device meta"),
    ("addmm", {"input": 1.0}, TypeError, "input is of type float; .*as_tensor"),
    ("addmm", {"input": torch.ones(3, 3, device=DEVICE)}, ValueError, r"input has shape \(3, 3\); .*\(5, 6\)"),
    ("addmm", {"beta": "2"}, TypeError, "beta is '2'"),
    ("addmm", {"alpha": torch.ones(2)}, TypeError, "pass one of its elements"),
    ("linear", {"weight": ARRAY}, TypeError, "weight is of type ndarray"),
    ("linear", {"weight": torch.ones(7, device=DEVICE)}, ValueError, r"weight has shape \(7,\); .*weight\[None\]"),
    ("linear", {"x": torch.ones(5, 7, device=DEVICE).half()}, TypeError, r"x has dtype.*pass x\.to\(torch\.float32\)"),
    ("linear", {"bias": torch.ones(5, device=DEVICE)}, ValueError, r"bias has shape \(5,\); expected \(6,\)"),
    ("linear", {"bias": ARRAY[0]}, TypeError, "bias is of type ndarray"),
]


@pytest.mark.parametrize("grad", [False, True], ids=["direct", "operator"])
@pytest.mark.parametrize(("name", "bad", "error", "words"), BAD)
def test_arguments_that_are_refused(name, bad, error, words, grad):
    if grad and not bad.keys() & {"out", "b", "weight"}:
        bad = bad | {
            "weight" if name == "linear" else "b": tensor(6, 7, grad=True)
            if name == "linear"
            else tensor(7, 6, grad=True)
        }
    with pytest.raises(error, match=words):
        given(name, **bad)


def test_added_values_are_checked_before_out_is_written():
    out = tensor(5, 6)
    before = out.clone()
    with pytest.raises(ValueError, match="input has shape"):
        given("addmm", input=tensor(4, 4), out=out)
    assert torch.equal(out, before)


@pytest.mark.parametrize("grad", [False, True], ids=["direct", "operator"])
@pytest.mark.parametrize("shapes", [((7,), (7, 6)), ((5, 7), (7,)), ((7,), (7,)), ((2, 5, 7), (7,)), ((7,), (2, 7, 6))])
def test_vectors_are_rows_and_columns(shapes, grad):
    a, b = (
        tensor(7, 1, seed=i)[:, 0].contiguous() if len(s) == 1 else tensor(*s, seed=i) for i, s in enumerate(shapes)
    )
    a.requires_grad_(grad)
    expected, out = a @ b, torch.empty_like((a @ b).detach())
    found = ours.matmul(a, b)
    assert found.shape == expected.shape
    close(found, expected)
    if grad:
        (one,), (other,) = (torch.autograd.grad(y.square().sum(), a) for y in (found, expected))
        close(one, other)
    else:
        assert ours.matmul(a, b, out=out) is out
        close(out, expected)


def test_linear_takes_a_vector():
    layer, x = torch.nn.Linear(7, 6, device=DEVICE), tensor(7, 1)[:, 0]
    for bias in (layer.bias, None):
        close(ours.linear(x, layer.weight, bias), torch.nn.functional.linear(x, layer.weight, bias))


def test_dtypes_are_not_cast():
    a, b, c = tensor(5, 7), tensor(7, 6), tensor(5, 6).double()
    for out in (None, tensor(5, 6)):
        with pytest.raises(TypeError, match=r"input has dtype torch\.float64"):
            ours.addmm(c, a, b, out=out)


@pytest.mark.filterwarnings("ignore")  # PyTorch's own
def test_tangents_are_refused():
    a, b = tensor(5, 7), tensor(7, 6)
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match=r"pass tensor\.detach\(\)"):
            ours.linear(forward_ad.make_dual(a, a), b.mT)
        close(ours.matmul(a, b), a @ b)
        x, grad = tensor(5, 7, grad=True), forward_ad.make_dual(a @ b, a @ b)
        with pytest.raises(NotImplementedError, match="forward-mode tangent"):
            torch.autograd.grad(ours.matmul(x, b), x, grad)


@pytest.mark.filterwarnings("ignore")  # PyTorch's own
def test_transforms_that_differentiate_are_refused():
    a, b = tensor(5, 7), tensor(7, 6)
    one = torch.ones((), device=DEVICE)

    def outer(x):
        return torch.func.jvp(lambda s: (ours.matmul(x, b) * s).sum(), (one,), (one,))[1]

    for differentiated in (
        lambda: torch.func.jvp(lambda x: ours.matmul(x, b), (a,), (a,)),
        lambda: torch.func.jvp(outer, (a,), (a,)),
        lambda: torch.func.grad(lambda x: ours.matmul(x, b).sum())(a),
        lambda: torch.func.grad(lambda x: torch.func.vmap(lambda y: ours.matmul(y, b))(x[None]).sum())(a),
    ):
        with pytest.raises(NotImplementedError, match="differentiates"):
            differentiated()
    with pytest.raises(NotImplementedError, match="forward-mode tangent"):
        torch.func.jvp(lambda x: OPERATORS.matmul(x, b), (a,), (a,))


def test_what_is_refused_leaves_out_as_it_was():
    a, square = tensor(6, 6), tensor(6, 6, seed=1)
    before, added = a.clone(), torch.zeros(6, device=DEVICE)
    with pytest.raises(ValueError, match="shares memory"):
        ours.addmm(added, a, square, out=a)
    with pytest.raises(ValueError, match="precision"):
        ours.addmm(added, square, square, out=a, precision="nope")
    assert torch.equal(a, before)


def test_what_is_added_is_checked_though_beta_is_0():
    a, b = tensor(5, 7), tensor(7, 6)
    with pytest.raises(ValueError, match="input has shape"):
        ours.addmm(tensor(9, 9), a, b, beta=0)
    with pytest.raises(TypeError, match="input has dtype"):
        ours.addmm(tensor(5, 6).double(), a, b, beta=0)


def test_a_choice_for_inductor_is_one_function_and_declines_other_dtypes():
    assert ours.external_matmul() is ours.external_matmul("ieee") is ours.external_matmul(precision="ieee")
    wide = tensor(4, 4).double()
    with pytest.raises(NotImplementedError, match="float64"):
        ours.external_matmul()(wide, wide, wide.clone())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # Inductor's own
def test_code_of_the_guide_runs():
    torch._dynamo.reset()
    text = (Path(__file__).parents[1] / "docs" / "how_to" / "pytorch.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    namespace: dict = {}
    for block in blocks:
        exec(block, namespace)
