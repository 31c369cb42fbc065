"""Products in JAX: values, transformations, precisions, calls by XLA, and what is refused."""

from __future__ import annotations

import os
import re
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from support.operands import check, filled

from numba_gemm.simulator.switch import SIMULATOR

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other processes of the tests need the GPU's memory
jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

from numba_gemm import arrays, tiled_sgemm  # noqa: E402
from numba_gemm.arrays import protocols  # noqa: E402
from numba_gemm.gemm import fast_path  # noqa: E402
from numba_gemm.jax import foreign_call, matmul  # noqa: E402
from numba_gemm.jax import product as xla_product  # noqa: E402

pytestmark = pytest.mark.skipif(
    not SIMULATOR and jax.default_backend() != "gpu", reason="JAX finds no GPU, and the simulator is off"
)
PROBE = xla_product.PROBES[xla_product.XlaArray]
ERRORS = (ValueError, jax.errors.JaxRuntimeError)  # JAX raises either for an error of XLA
PLATFORM = "cpu" if SIMULATOR else "CUDA"


@pytest.fixture(autouse=True)
def device():
    device = jax.devices("cpu" if SIMULATOR else "gpu")[0]
    with jax.default_device(device):
        yield device


def array(*shape, seed=0):
    return jnp.asarray(filled(int(np.prod(shape[:-1])), shape[-1], seed).reshape(shape))


def exact(a, b):
    return jnp.matmul(a, b, precision="highest")


def close(found, expected):
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)


@pytest.fixture
def products(monkeypatch):
    """Precision and shapes of the products that are computed here; all of them in the precision "ieee"."""
    seen, compute = [], xla_product.tiled_sgemm

    def counted(a, b, out, *, precision):
        seen.append((precision, a.shape, b.shape))
        compute(a, b, out)

    monkeypatch.setattr(xla_product, "tiled_sgemm", counted)
    return seen


# --------------------------------------------------------------------------------------------- values and gradients

SHAPES = {  # of a and b
    "matrices": ((5, 7), (7, 6)),
    "batch": ((2, 5, 7), (2, 7, 6)),
    "shared a": ((5, 7), (3, 7, 6)),
    "shared b": ((2, 3, 5, 7), (7, 6)),
    "broadcast": ((3, 1, 5, 7), (2, 7, 6)),
    "a vector": ((7,), (7, 6)),
    "b vector": ((5, 7), (7,)),
    "vectors": ((7,), (7,)),
    "vector and batch": ((7,), (2, 7, 6)),
    "batch and vector": ((2, 5, 7), (7,)),
    "no terms": ((5, 0), (0, 6)),
    "no rows": ((0, 7), (7, 6)),
    "no matrices": ((0, 5, 7), (7, 6)),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_matmul_and_its_gradients(shapes):
    a, b = (array(*shape, seed=seed) for seed, shape in enumerate(shapes))
    result = matmul(a, b)
    assert isinstance(result, jax.Array)
    close(result, exact(a, b))
    weights = jnp.asarray(np.random.default_rng(3).uniform(-1, 1, result.shape), jnp.float32)
    found, expected = (jax.vjp(multiply, a, b)[1](weights) for multiply in (matmul, exact))
    for one, other in zip(found, expected, strict=True):
        close(one, other)


def test_error_is_within_the_bound():
    a, b = filled(40, 70), filled(70, 30, 1)
    found = matmul(a, b)
    assert isinstance(found, jax.Array), "of NumPy arrays, too"
    check(found, a, b)


@pytest.mark.parametrize("shapes", [((3, 2), (2, 3)), ((2, 1, 2), (2, 1)), ((2,), (2, 3))], ids=str)
def test_derivatives_are_those_of_differences(shapes):
    # Products are linear in each operand, so large steps add no error.
    check_grads(matmul, [array(*shape, seed=shape[-1]) for shape in shapes], 1, ("fwd", "rev"), eps=0.5)


def test_second_derivatives():
    a, b = array(2, 3), array(3, 2, seed=1)

    def loss(multiply, a):
        return (multiply(multiply(a, b), a) ** 2).sum()

    found, expected = (jax.hessian(partial(loss, f))(a) for f in (matmul, exact))
    close(found, expected)


def test_gradients_have_the_precision_of_the_product_and_copy_no_operand(products):
    a, b = array(2, 5, 7), array(2, 7, 6, seed=1)

    def loss(a, b):
        return matmul(a, b, precision="tf32").sum()

    gradient = jax.jit(jax.grad(loss, (0, 1)))
    jax.block_until_ready(gradient(a, b))
    assert sorted(products)[-2:] == [("tf32", (2, 5, 6), (2, 6, 7)), ("tf32", (2, 7, 5), (2, 5, 6))]
    assert "transpose" not in gradient.lower(a, b).as_text(), "the layout of an operand is an attribute of the call"


def test_gradient_of_a_shared_b_is_one_product(products):
    a, b = array(4, 5, 7), array(7, 6, seed=1)
    jax.block_until_ready(jax.grad(lambda b: matmul(a, b).sum())(b))
    assert [shape for _, *shape in products] == [[(4, 5, 7), (1, 7, 6)], [(1, 7, 20), (1, 20, 6)]]


# ------------------------------------------------------------------------------------------------- transformations


def test_jit_computes_several_products_in_one_program():
    a, b = array(5, 7), array(7, 5, seed=1)

    def twice(multiply, a, b):
        return multiply(multiply(a, b), a) + 1

    jitted = jax.jit(partial(twice, matmul))
    for _ in range(2):
        close(jitted(a, b), twice(exact, a, b))
    assert jitted.lower(a, b).as_text().count("stablehlo.custom_call") == 2


@pytest.mark.parametrize(
    "axes", [axes for axes in product((None, 0, 1, 2), repeat=2) if any(x is not None for x in axes)]
)
def test_vmap_is_a_batch(axes, products):
    shapes = (3, 5, 7), (3, 7, 6)
    operands = [
        array(*shape[1:], seed=seed) if axis is None else jnp.moveaxis(array(*shape, seed=seed), 0, axis)
        for seed, (shape, axis) in enumerate(zip(shapes, axes, strict=True))
    ]
    close(jax.vmap(matmul, axes)(*operands), jax.vmap(exact, axes)(*operands))
    assert len(products) == 1


@pytest.mark.parametrize(
    ("inner", "shapes", "axes"),
    [
        ((None, 0), ((3, 7), (2, 7, 6)), (0, None)),
        ((0, None), ((3, 2, 5, 7), (2, 7, 6)), (0, None)),
        ((0, 0), ((3, 4, 5, 7), (4, 2, 7, 6)), (0, None)),
    ],
    ids=str,
)
def test_nested_vmaps_of_operands_with_other_batches(inner, shapes, axes, products):
    a, b = (array(*shape, seed=seed) for seed, shape in enumerate(shapes))
    found, expected = (jax.vmap(jax.vmap(f, inner), axes) for f in (matmul, exact))
    close(found(a, b), expected(a, b))
    assert len(products) == 1


def test_gradients_of_mapped_products_and_mapped_gradients(products):
    a, b = array(4, 5, 7), array(7, 6, seed=1)

    def loss(multiply, b, a):
        return (multiply(a, b) ** 2).sum()

    def mapped(multiply):
        return jax.grad(lambda b: jax.vmap(partial(loss, multiply, b))(a).sum())(b)

    close(mapped(matmul), mapped(exact))
    assert len(products) == 2, "the product of the forward pass, and one long sum for the gradient"
    found, expected = (jax.vmap(jax.grad(partial(loss, f)), (None, 0))(b, a) for f in (matmul, exact))
    close(found, expected)
    assert len(products) == 4


@pytest.mark.parametrize("option", [jax.disable_jit, jax.debug_nans, jax.debug_infs], ids=lambda f: f.__name__)
def test_options_for_debugging(option):
    a, b = array(5, 7), array(7, 6, seed=1)
    expected, gradient = exact(a, b), jax.grad(lambda a: exact(a, b).sum())(a)
    with option(True):
        close(matmul(a, b), expected)
        close(jax.grad(lambda a: matmul(a, b).sum())(a), gradient)


@pytest.mark.parametrize(
    ("option", "value"), [(jax.debug_nans, np.nan), (jax.debug_infs, np.inf)], ids=["NaN", "infinity"]
)
def test_values_that_jax_is_told_to_find(option, value):
    a, b = jnp.full((5, 7), value, jnp.float32), jnp.ones((7, 6))
    with option(True), pytest.raises(FloatingPointError):
        matmul(a, b)


def test_scan_and_remat():
    a, b = array(5, 5), array(5, 5, seed=1)

    def chained(multiply, a):
        step = jax.checkpoint(lambda x, _: (multiply(x, b), None))
        return jax.lax.scan(step, a, None, length=3)[0].sum()

    found, expected = (jax.grad(partial(chained, f))(a) for f in (matmul, exact))
    close(found, expected)


def test_shard_map(device):
    mesh = jax.sharding.Mesh(np.array([device]), ("x",))
    rows, whole = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()
    a, b = array(4, 7), array(7, 6, seed=1)

    def loss(multiply, check, b):
        mapped = jax.shard_map(multiply, mesh=mesh, in_specs=(rows, whole), out_specs=rows, check_vma=check)
        return (mapped(a, b) ** 2).sum()

    close(jax.grad(partial(loss, matmul, False))(b), jax.grad(partial(loss, exact, False))(b))
    with pytest.raises(NotImplementedError, match="pass check_vma=False"):
        loss(matmul, True, b)


def test_explicit_meshes(device):
    """Arrays that an axis divides are refused; each of the two remedies of the message has the right gradients."""
    spec = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,), devices=[device])
    a, b = array(4, 7), array(7, 6, seed=1)

    def loss(multiply, a, b):
        return (multiply(a, b) ** 2).sum()

    gradient = jax.grad(partial(loss, exact), (0, 1))(a, b)
    with jax.set_mesh(mesh):
        for divided in (spec("x"), spec(None, "x")), (spec(), spec("x")):
            x, y = (jax.sharding.reshard(one, how) for one, how in zip((a, b), divided, strict=True))
            for call in (matmul, jax.jit(matmul), jax.grad(partial(loss, matmul))):
                with pytest.raises(NotImplementedError, match=r"sharding .*'x'.*; call it inside jax\.shard_map"):
                    call(x, y)
            whole = (jax.sharding.reshard(one, spec()) for one in (x, y))
            for one, expected in zip(jax.grad(partial(loss, matmul), (0, 1))(*whole), gradient, strict=True):
                close(one, expected)
        rows, x, y = spec("x"), *map(jax.sharding.reshard, (a, b), (spec("x"), spec()))
        mapped = jax.shard_map(matmul, in_specs=(rows, spec()), out_specs=rows, check_vma=False)
        for one, expected in zip(jax.grad(partial(loss, mapped), (0, 1))(x, y), gradient, strict=True):
            close(one, expected)


# ------------------------------------------------------------------------------------------------------ precisions

PRESETS = jax.lax.DotAlgorithmPreset
NAMES = {
    None: "ieee",
    "fp32_auto": "fp32_auto",
    "fp16x3": "fp16x3",
    "highest": "ieee",
    jax.lax.Precision.HIGHEST: "ieee",
    "BF16_BF16_F32_X6": "bf16x6",
    PRESETS.F32_F32_F32: "ieee",
    PRESETS.TF32_TF32_F32: "tf32",
    PRESETS.TF32_TF32_F32_X3: "tf32x3",
    PRESETS.BF16_BF16_F32: "bf16",
    PRESETS.BF16_BF16_F32_X3: "bf16x3",
    PRESETS.BF16_BF16_F32_X6: "bf16x6",
    PRESETS.BF16_BF16_F32_X9: "bf16x9",
}


@pytest.mark.parametrize(("given", "computed"), NAMES.items(), ids=str)
def test_names_of_precisions(given, computed, products):
    jax.block_until_ready(matmul(array(5, 7), array(7, 6), precision=given))
    assert [precision for precision, *_ in products] == [computed]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("fp16", "precision is 'fp16'; expected one of ieee.*BF16_BF16_F32_X6"),
        (PRESETS.F16_F16_F32, "precision is 'F16_F16_F32'; expected one of ieee"),
        (jax.lax.Precision.HIGH, "precision is 'HIGH', which permits several; .* pass 'tf32' or 'bf16x3'"),
        ("default", "precision is 'default', which permits several"),
    ],
)
def test_precisions_that_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        matmul(array(5, 7), array(7, 6), precision=given)


@pytest.mark.parametrize("transform", ["jit", "vmap", "grad"])
def test_tracers_are_refused_by_the_function_for_arrays(transform):
    with pytest.raises(TypeError, match=r"a is a JAX tracer, .*; call numba_gemm\.jax\.matmul there"):
        getattr(jax, transform)(lambda a: tiled_sgemm(a, array(7, 6)))(array(2, 5, 7))


def test_a_precision_has_to_be_a_name():
    with pytest.raises(TypeError, match="precision is of type tuple; expected a str"):
        matmul(array(5, 7), array(7, 6), precision=("highest", "highest"))


# -------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda x: x.astype(jnp.bfloat16), TypeError, r"a has dtype bfloat16; expected float32.*pass a\.astype"),
        (lambda x: np.asarray(x, np.float64), TypeError, "a has dtype float64; expected float32"),
        (lambda x: x.tolist(), TypeError, "a is a list; expected an array of JAX"),
        (lambda x: x[0, 0], ValueError, "a has no dimensions"),
        (lambda x: x[:, :4], ValueError, r"a has shape \(5, 4\) and b has shape \(2, 7, 6\); expected"),
        (lambda x: x[:, 1:].T, ValueError, r"a has shape \(6, 5\)"),
        (lambda x: jnp.stack([x] * 3), ValueError, r"a has shape \(3, 5, 7\)"),
    ],
)
def test_operands_that_are_refused(change, error, words):
    with pytest.raises(error, match=words):
        matmul(change(array(5, 7)), array(2, 7, 6))


def test_errors_of_the_product_are_raised_by_jax(monkeypatch):
    def refuse(*operands, precision):
        raise ValueError(f"precision is {precision}; expected a good one")

    monkeypatch.setattr(xla_product, "tiled_sgemm", refuse)
    with pytest.raises(ERRORS, match="INVALID_ARGUMENT: precision is ieee; expected a good one"):
        jax.block_until_ready(jax.jit(matmul)(array(5, 7), array(7, 6)))


@pytest.mark.simulator
def test_a_precision_that_cannot_be_computed_is_refused():
    with pytest.raises(ERRORS, match="precision is 'bf16x6', and this is the simulator"):
        jax.block_until_ready(matmul(array(5, 7), array(7, 6), precision="bf16x6"))


def test_arrays_on_another_platform_are_refused():
    call = foreign_call.Call([], [], [], lambda: 0)
    with pytest.raises(ValueError, match=r"the arrays are on .*; expected arrays on .*NUMBA_ENABLE_CUDASIM"):
        xla_product.refuse(call)


# ---------------------------------------------------------------------------------------------------- calls by XLA


def call_of(execute, x):
    name = f"test_{len(foreign_call._kept)}"
    foreign_call.register(name, PLATFORM, execute)
    return jax.block_until_ready(jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, b="two", a="one"))


def test_a_call_has_operands_results_and_attributes():
    seen = []
    call_of(seen.append, array(2, 3))
    (call,) = seen
    (operand,), (result,) = call.operands, call.results
    assert operand.shape == result.shape == (2, 3)
    assert operand.address != result.address
    assert call.attributes == ["one", "two"], "sorted by their names"


@pytest.mark.simulator
def test_calls_on_other_devices_have_no_stream():
    with pytest.raises(ERRORS, match="INTERNAL: XLA has no CUDA stream"):
        call_of(lambda call: call.stream(), array(2, 3))


@pytest.mark.gpu
def test_calls_on_a_gpu_have_a_stream():
    seen = []
    call_of(lambda call: seen.append(call.stream()), array(2, 3))
    assert seen[0] > 2


def test_exceptions_of_every_kind_are_errors_of_xla():
    def interrupt(call):
        raise KeyboardInterrupt

    with pytest.raises(ERRORS, match="INTERNAL: KeyboardInterrupt"):
        call_of(interrupt, array(2, 3))
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT: an array has XLA's data type 4; expected 11"
    ):
        call_of(lambda call: None, jnp.zeros(3, jnp.int32))


@pytest.mark.simulator
def test_repeated_calls_on_a_stream_take_the_fast_path(no_calls, checked, gpu, monkeypatch):
    monkeypatch.setattr(arrays, "KINDS", (protocols.CudaArrayInterface(),))
    for module in (protocols, xla_product):
        monkeypatch.setattr(module, "pointer_device", lambda name, pointer: 0)
    monkeypatch.setattr(protocols.streams, "hold", lambda *_: None)
    fast_path.PROBES[xla_product.XlaArray] = PROBE
    a, b = filled(12, 4), filled(12, 8, 1)
    for stream in (40, 41, 42):
        out = np.full((4, 8), np.nan, np.float32)
        buffers = [foreign_call.Buffer(x.ctypes.data, x.shape) for x in (a, b, out)]
        call = foreign_call.Call(buffers[:2], buffers[2:], ["TN", "ieee"], partial(int, stream))
        xla_product.compute_on_stream(call)
        check(out, a.T, b)
        assert gpu.launches[-1].stream == stream, "that of the call"
    assert len(checked) == 1


@pytest.mark.gpu
def test_code_of_the_guide_runs():
    text = (Path(__file__).parents[1] / "docs" / "how_to" / "jax.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    namespace: dict = {}
    for block in blocks:
        exec(block, namespace)
