"""The public function: what it takes, what it returns, what it refuses, and what it must not read or write."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import tomllib
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cuda
from operands import LAYOUTS, NAN, REPEATING, Exported, check, filled, frozen, spaced

import numba_gemm
from numba_gemm import launch, stages, tiled_sgemm

ROOT = Path(__file__).parents[1]
# ----------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("b_layout", [*LAYOUTS, *REPEATING])
@pytest.mark.parametrize("a_layout", [*LAYOUTS, *REPEATING])
def test_operand_layouts(a_layout, b_layout):
    table = LAYOUTS | REPEATING
    a, b = table[a_layout](filled(5, 7)), table[b_layout](filled(7, 6, seed=1))
    check(tiled_sgemm(a, b, stage="coalesced"), a, b)


@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_result_layouts(layout, beta):
    a, b, c = filled(6, 3), filled(3, 5), filled(6, 5, seed=1)
    out = LAYOUTS[layout](c.copy())
    base = out if out.base is None else out.base
    before = base.copy()
    assert tiled_sgemm(a, b, out, beta=beta, stage="naive") is out
    check(out, a, b, beta=beta, c=c)
    out[...] = c
    assert base.tobytes() == before.tobytes(), "bytes around the result changed"


@pytest.mark.parametrize("stage", ["naive", "coalesced", "shared_tile", "auto"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 3, 4), (17, 16, 15), (33, 2, 18), (1, 40, 1)])
def test_stages_by_name(stage, shape):
    m, n, k = shape
    a, b = filled(m, k), filled(k, n)
    check(tiled_sgemm(a, b, stage=stage), a, b)


def strided(draw, rows, cols):
    return spaced(filled(rows, cols), draw(st.sampled_from([-2, -1, 1, 3])), draw(st.sampled_from([-3, -1, 1, 2])))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_shape_and_strides(data):
    m, n, k = (data.draw(st.integers(0, 6), label) for label in "mnk")
    a, b, c = (strided(data.draw, *shape) for shape in ((m, k), (k, n), (m, n)))
    alpha, beta = (data.draw(st.sampled_from([0.0, 1.0, -0.5]), label) for label in ("alpha", "beta"))
    before = c.copy()
    tiled_sgemm(a, b, c, alpha=alpha, beta=beta, stage=data.draw(st.sampled_from(["naive", "coalesced"])))
    check(c, a, b, alpha=alpha, beta=beta, c=before)


# ------------------------------------------------------------------------------------------------ alpha and beta


@pytest.mark.parametrize("beta", [0, 1, -2.5, np.float16(0.5), 1e-50])
@pytest.mark.parametrize("alpha", [1, 0, -0.75, True, np.float64(3), np.int8(2), Fraction(1, 4), np.array(1.5)])
def test_scalars(alpha, beta):
    a, b, c = filled(4, 5), filled(5, 3), filled(4, 3, seed=2)
    out = c.copy()
    tiled_sgemm(a, b, out, alpha=alpha, beta=beta, stage="coalesced")
    check(out, a, b, alpha=float(alpha), beta=float(beta), c=c)


def test_scalars_round_to_float32():
    a, b = np.ones((1, 1), np.float32), np.ones((1, 1), np.float32)
    assert tiled_sgemm(a, b, alpha=0.1, stage="naive")[0, 0] == np.float32(0.1)
    assert tiled_sgemm(a, b, alpha=1e300, stage="naive")[0, 0] == np.inf
    # Rounded to 0, it counts as 0: NaNs in a are not read.
    assert tiled_sgemm(a * NAN, b, alpha=1e-300, stage="naive")[0, 0] == 0


def test_beta_zero_does_not_read_c():
    a, b = filled(5, 4), filled(4, 6)
    out = np.full((5, 6), NAN)
    check(tiled_sgemm(a, b, out, beta=0.0, stage="shared_tile"), a, b)


@pytest.mark.parametrize("beta", [0.0, 2.0])
def test_alpha_zero_does_not_read_a_and_b(beta):
    a, b, c = np.full((4, 3), NAN), np.full((3, 5), np.float32(np.inf)), filled(4, 5)
    out = c.copy()
    tiled_sgemm(a, b, out, alpha=0.0, beta=beta, stage="coalesced")
    np.testing.assert_array_equal(out, np.float32(beta) * c)


@pytest.mark.parametrize("alpha", [1.0, np.inf, np.nan])
def test_no_terms_leave_beta_c(alpha):
    c = filled(4, 5)
    out = c.copy()
    tiled_sgemm(filled(4, 0), filled(0, 5), out, alpha=alpha, beta=-0.5, stage="naive")
    np.testing.assert_array_equal(out, np.float32(-0.5) * c)
    assert not tiled_sgemm(filled(4, 0), filled(0, 5), alpha=alpha, stage="auto").any()


@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 2), (3, 0, 2), (0, 0, 0), (0, 3, 0)])
def test_empty_results(m, n, k):
    result = tiled_sgemm(filled(m, k), filled(k, n))
    assert result.shape == (m, n)
    assert result.dtype == np.float32
    out = np.empty((m, n), np.float32)
    assert tiled_sgemm(filled(m, k), filled(k, n), out, alpha=2, beta=3) is out


def test_specials_spread_as_in_numpy():
    a, b = filled(6, 5), filled(5, 7)
    a[1, 2], a[3, 0], b[4, 4] = np.nan, np.inf, -np.inf
    b[0, 5] = 0  # inf * 0
    check(tiled_sgemm(a, b, stage="shared_tile"), a, b)
    check(tiled_sgemm(a, b, alpha=np.nan, stage="naive"), a, b, alpha=np.nan)
    check(tiled_sgemm(a, b, alpha=-np.inf, stage="naive"), a, b, alpha=-np.inf)


# --------------------------------------------------------------------------------------------------- array kinds


def test_numpy_gives_numpy():
    result = tiled_sgemm(filled(3, 4), filled(4, 5), stage="naive")
    assert type(result) is np.ndarray
    assert result.flags.c_contiguous
    assert result.flags.writeable


def test_numba_gives_numba():
    a, b, c = filled(3, 4), filled(4, 5), filled(3, 5)
    result = tiled_sgemm(cuda.to_device(a), cuda.to_device(b), stage="naive")
    assert type(result) is type(cuda.to_device(a))
    check(result.copy_to_host(), a, b)
    out = cuda.to_device(c)
    assert tiled_sgemm(cuda.to_device(a), cuda.to_device(b), out, beta=1, stage="coalesced") is out
    check(out.copy_to_host(), a, b, beta=1, c=c)


def test_numba_views():
    a, b, c = filled(6, 8), filled(4, 5), np.full((3, 10), NAN)
    out = cuda.to_device(c)
    tiled_sgemm(cuda.to_device(a)[::2, 1:5], cuda.to_device(b), out[:, ::2], stage="coalesced")
    after = out.copy_to_host()
    check(after[:, ::2], a[::2, 1:5], b)
    assert np.isnan(after[:, 1::2]).all()


@pytest.mark.parametrize("m", [0, 3])
def test_empty_numba_arrays(m):
    a, b = (cuda.device_array(shape, np.float32) for shape in ((m, 0), (0, 4)))
    result = tiled_sgemm(a, b, stage="naive")
    assert tuple(result.shape) == (m, 4)
    assert not result.copy_to_host().any()


def test_dlpack_on_the_host_counts_as_numpy():
    a, b = filled(3, 4), filled(4, 5)
    result = tiled_sgemm(Exported(a), b.T.copy().T, stage="naive")
    assert type(result) is np.ndarray
    check(result, a, b)
    kept = filled(3, 5)
    before = kept.copy()
    out = Exported(kept)
    assert tiled_sgemm(a, Exported(b), out, beta=2.0, stage="naive") is out
    check(kept, a, b, beta=2.0, c=before)


def test_numpy_subclasses_are_numpy():
    a, b = filled(3, 4), filled(4, 5)
    with pytest.warns(PendingDeprecationWarning):
        matrix = np.matrix(a)
    check(tiled_sgemm(matrix, b, stage="naive"), a, b)


@pytest.mark.parametrize("stream", [None, 0, np.int64(2)])
def test_streams_of_a_numpy_product(stream):
    a, b = filled(3, 4), filled(4, 5)
    check(tiled_sgemm(a, b, stage="naive", stream=stream), a, b)
    check(tiled_sgemm(a, b, stage="naive", stream=cuda.stream()), a, b)


def test_results_are_repeatable():
    a, b = filled(20, 33), filled(33, 19)
    first = tiled_sgemm(a, b, stage="shared_tile")
    assert tiled_sgemm(a, b, stage="shared_tile").tobytes() == first.tobytes()


# --------------------------------------------------------------------------------------------------------- errors


A, B, C = filled(3, 4), filled(4, 5), filled(3, 5)
SHARED = filled(3, 12)

# What is passed; the error; a word for what was passed, for what was expected, and for what to do.
ERRORS = {
    "a list": (([[1.0]], B), {}, TypeError, "a is a list", "expected a 2-D float32 array", "numpy.asarray(a"),
    "None": ((A, None), {}, TypeError, "b is a NoneType", "expected", "convert"),
    "a scalar": ((A, np.float32(1)), {}, TypeError, "b is a float32", "expected", "convert"),
    "vector": ((A[0], B), {}, ValueError, "a has 1 dimensions, shape (4,)", "expected 2", "a.reshape("),
    "stack": ((A, B[None]), {}, ValueError, "b has 3 dimensions", "expected 2", "b.reshape("),
    "0-d": ((A, B, np.array(1, np.float32)), {}, ValueError, "out has 0 dimensions", "expected 2", "reshape"),
    "float64": ((A.astype(float), B), {}, TypeError, "a has dtype float64", "expected float32", "a.astype("),
    "integers": ((A, B.astype(int)), {}, TypeError, "b has dtype int64", "expected float32", "b.astype("),
    "byte order": ((A.astype(">f4"), B), {}, TypeError, "dtype >f4", "expected float32", "a.astype("),
    "out float16": ((A, B, C.astype(np.float16)), {}, TypeError, "out has dtype float16", "float32", "out.astype("),
    "masked": ((np.ma.masked_array(A), B), {}, TypeError, "a is a NumPy masked array", "expected", ".filled("),
    "K": ((A, A), {}, ValueError, "a has shape (3, 4) and b has shape (3, 4)", "expected shapes (M, K)", "transpose"),
    "mixed": (
        (A, cuda.to_device(B)),
        {},
        TypeError,
        "a is of kind NumPy array and b of kind Numba",
        "one kind",
        "convert",
    ),
    "out kind": ((A, B, cuda.to_device(C)), {}, TypeError, "out is of kind Numba", "same kind", "pass such an array"),
    "out list": ((A, B, [[0.0]]), {}, TypeError, "out is a list", "expected", "convert"),
    "out shape": ((A, B, C.T), {}, ValueError, "out has shape (5, 3)", "expected (3, 5)", "array of that shape"),
    "out read-only": ((A, B, frozen(C.copy())), {}, ValueError, "out is read-only", "can be written", "pass a copy"),
    "out is a": (
        (SHARED[:, :4], filled(4, 4), SHARED[:, :4]),
        {},
        ValueError,
        "shares memory with a",
        "apart",
        "copy of a",
    ),
    "out in b": ((filled(2, 3), SHARED[:, :6], SHARED[1:, 5:11]), {}, ValueError, "with b", "apart", "copy of b"),
    "out row repeated": (
        (A, B, np.lib.stride_tricks.as_strided(C.copy(), (3, 5), (0, 4))),
        *({}, ValueError, "strides (0, 4)", "expected distinct", "pass a copy"),
    ),
    "out windows": (
        (A, B, np.lib.stride_tricks.as_strided(C.copy(), (3, 5), (8, 4))),
        *({}, ValueError, "strides (8, 4)", "expected distinct", "pass a copy"),
    ),
    "beta alone": ((A, B), {"beta": 0.5}, ValueError, "beta is 0.5 and out is None", "expected an array C", "beta=0"),
    "complex alpha": ((A, B), {"alpha": 1j}, TypeError, "alpha is 1j, a complex", "real number", "float(alpha)"),
    "beta text": ((A, B, C), {"beta": "1"}, TypeError, "beta is '1', a str", "real number", "float(beta)"),
    "alpha array": ((A, B), {"alpha": np.ones(1)}, TypeError, "a ndarray", "real number", "float(alpha)"),
    "alpha None": ((A, B), {"alpha": None}, TypeError, "alpha is None", "real number", "float(alpha)"),
    "alpha huge": ((A, B), {"alpha": 10**400}, ValueError, "alpha is an integer", "expected", "pass a float"),
    "stage": (
        (A, B),
        {"stage": "fastest"},
        ValueError,
        "stage is 'fastest'",
        "'auto' or one of naive, coalesced",
        "pass",
    ),
    "stage record": (
        (A, B),
        {"stage": stages()[0]},
        TypeError,
        "stage is a Stage",
        "expected a str",
        "name of a stage",
    ),
    "stream text": ((A, B), {"stream": "s"}, TypeError, "stream is 's', a str", "expected a stream", "pass None"),
    "stream negative": ((A, B), {"stream": -1}, TypeError, "stream is -1", "not negative", "pass None"),
    "stream bool": ((A, B), {"stream": True}, TypeError, "stream is True", "expected a stream", "pass None"),
    "DLPack elsewhere": ((Exported(A, (8, 0)), B), {}, TypeError, "", "expected", ""),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case, monkeypatch):
    arguments, options, error, passed, expected, remedy = ERRORS[case]
    monkeypatch.setattr(launch, "launch", lambda *_, **__: pytest.fail("launched in spite of the error"))
    with pytest.raises(error) as caught:
        tiled_sgemm(*arguments, **options)
    for words in (passed, expected, remedy):
        assert words in str(caught.value)


def test_every_stage_is_named_for_an_unknown_one():
    with pytest.raises(ValueError) as caught:
        tiled_sgemm(A, B, stage="nope")
    assert all(stage.name in str(caught.value) for stage in stages())


def test_stage_that_the_gpu_cannot_run(monkeypatch):
    old = launch.DeviceProperties("old", (7, 5), 40, 1.5e9, 4 << 20, 64 << 10, 3e11)
    monkeypatch.setattr(launch, "device_properties", lambda device=0: old)
    monkeypatch.setattr(launch, "launch", lambda *_, **__: pytest.fail("launched"))
    with pytest.raises(
        ValueError, match=r"'async_copy'.* needs compute capability 8\.0; this GPU has 7\.5; pass 'auto'"
    ):
        tiled_sgemm(A, B, stage="async_copy")


def test_errors_leave_out_alone():
    out = C.copy()
    with pytest.raises(TypeError):
        tiled_sgemm(A, B.astype(float), out)
    assert out.tobytes() == C.tobytes()


# ------------------------------------------------------------------------------------------------------- overlaps


def test_interleaved_out_is_allowed():
    shared = np.full((4, 12), NAN)
    a, b, out = shared[:, ::3], shared[:, 1::3], shared[:, 2::3]
    a[...], b[...] = filled(4, 4), filled(4, 4, seed=1)
    tiled_sgemm(a, b, out, stage="naive")
    check(out, a, b)


# ------------------------------------------------------------------------------------------------------ the package


def fresh_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    inherited["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-c", code], env=inherited | environment, capture_output=True, text=True, check=False
    )


def test_without_gpu_or_simulator():
    code = """
import numpy as np
from numba_gemm import tiled_sgemm
from numba_gemm.launch import GpuUnavailable
try:
    tiled_sgemm(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32))
except GpuUnavailable as error:
    print(error)
"""
    done = fresh_python(code, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert "NUMBA_ENABLE_CUDASIM=1" in done.stdout
    assert "driver" in done.stdout


# Calls of `f` on `x`, of shape (2, 3), and what is said of them where nothing can be launched.
WRONG_ANYWHERE = {
    "f(x, x.T, stage='fastest')": "ValueError: stage is 'fastest'; expected 'auto' or one of naive, coalesced",
    "f(x, x.T, stage=1)": "TypeError: stage is a int",
    "f(x, x.T, alpha='1')": "TypeError: alpha is '1'",
    "f(x, x.T, beta=2)": "ValueError: beta is 2 and out is None",
    "f(x, x.T, stream='s')": "TypeError: stream is 's'",
    "f(x, [[1.0]])": "TypeError: b is a list",
    "f(x, x.T.astype(float))": "TypeError: b has dtype float64",
    "f(x[0], x.T)": "ValueError: a has 1 dimensions",
    "f(x, x)": "ValueError: a has shape (2, 3) and b has shape (2, 3)",
    "f(x, x.T, x)": "ValueError: out has shape (2, 3); expected (2, 2)",
    "f(x[:, :2], x[:, 1:], x[:, :2])": "ValueError: out shares memory with a",
}


def test_wrong_arguments_are_told_before_a_missing_gpu():
    code = f"""
import numpy as np
from numba_gemm import tiled_sgemm as f
x = np.ones((2, 3), np.float32)
for call in {list(WRONG_ANYWHERE)}:
    try:
        eval(call)
    except Exception as error:
        print(type(error).__name__, error, sep=": ")
"""
    done = fresh_python(code, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    for said, expected in zip(done.stdout.splitlines(), WRONG_ANYWHERE.values(), strict=True):
        assert said.startswith(expected)


def test_import_is_lazy_and_complete():
    code = """
import sys, numba_gemm
assert set(numba_gemm.__all__) <= set(dir(numba_gemm))
heavy = {"numba", "cuda", "cupy", "torch", "pandas"}
print(sorted(heavy & set(sys.modules)))
numba_gemm.tiled_sgemm, numba_gemm.stages, numba_gemm.cpu_sgemm
print(sorted((heavy - {"numba", "cuda"}) & set(sys.modules)))
"""
    done = fresh_python(code, NUMBA_ENABLE_CUDASIM="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n[]\n"


def test_unknown_attribute():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = numba_gemm.nothing


def test_version_is_the_projects():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert numba_gemm.__version__ == project["version"]


def test_stages_lists_the_ladder():
    names = [stage.name for stage in stages()]
    assert isinstance(stages(), tuple)
    assert names[:3] == ["naive", "coalesced", "shared_tile"]
    assert len(set(names)) == len(names)


def test_signature():
    parameters = inspect.signature(tiled_sgemm).parameters
    assert list(parameters) == ["a", "b", "out", "alpha", "beta", "stage", "stream"]
    keyword_only = [name for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY]
    assert keyword_only == ["alpha", "beta", "stage", "stream"]
