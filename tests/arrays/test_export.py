"""Results for arrays of libraries that are known by DLPack only: made by the library's own function."""

from __future__ import annotations

import gc
import sys
import types
import weakref

import numpy as np
import pytest
from support.operands import check, filled

from numba_gemm import tiled_sgemm
from numba_gemm.arrays import export, protocols
from numba_gemm.arrays.export import Exported, maker_of
from numba_gemm.arrays.host import HostArrays
from numba_gemm.arrays.operand import Operand
from numba_gemm.arrays.streams import DEFAULT, Stream

CPU = 1


class Array:
    """An array of a small library, in host memory."""

    def __init__(self, x):
        self.x, self.shape = x, x.shape

    def __dlpack_device__(self):
        return (CPU, 0)

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)


class Namespaced(Array):
    def __array_namespace__(self):
        return types.SimpleNamespace(from_dlpack=lambda x: Namespaced(np.from_dlpack(x)))


@pytest.fixture
def library(monkeypatch):
    """The package `smallarrays`, with a type of its own and `from_dlpack`."""
    package = types.ModuleType("smallarrays")
    own = type("Own", (Array,), {"__module__": "smallarrays.core"})
    package.from_dlpack = lambda x: own(np.from_dlpack(x))
    monkeypatch.setitem(sys.modules, "smallarrays", package)
    return own


@pytest.mark.simulator
def test_result_is_of_the_library_of_a(library):
    a, b, c = filled(5, 7), filled(7, 4), filled(5, 4)
    for own in (library, Namespaced):
        result = tiled_sgemm(own(a), own(b))
        assert type(result) is own
        check(result.x, a, b)
        assert type(tiled_sgemm(own(a[0]), own(b[:, 0]))) is own
        assert type(tiled_sgemm(own(a), b, alpha=0.0)) is own
        assert type(tiled_sgemm(a, own(b))) is np.ndarray
        kept = tiled_sgemm(own(a), own(b), c=own(c), beta=2.0)
        check(kept.x, a, b, beta=2.0, c=c)
        given = c.copy()
        assert tiled_sgemm(own(a), own(b), given) is given


@pytest.mark.simulator
def test_result_without_such_a_function_is_numpys():
    assert type(tiled_sgemm(Array(filled(5, 7)), Array(filled(7, 4)))) is np.ndarray
    assert maker_of(Array(filled(2, 2))) is None


def exported(kind=CPU, stream=DEFAULT):
    """Return a result of a class whose objects can be watched, and what exports it."""
    owner = filled(6, 8)[:, ::2].view(type("Watchable", (np.ndarray,), {}))
    described = HostArrays().describe("out", owner, None)
    operand = Operand("out", HostArrays(), owner, "float32", described.shape, described.strides, described.pointer, 0)
    return weakref.ref(owner), Exported(operand, 0, stream, kind)


def test_consumer_owns_the_memory():
    owner, producer = exported()
    values = np.array(owner())
    consumed = np.from_dlpack(producer)
    np.testing.assert_array_equal(consumed, values)
    assert consumed.strides == owner().strides
    del producer
    gc.collect()
    assert owner() is not None
    del consumed
    gc.collect()
    assert owner() is None
    assert not export._exported


def test_capsule_that_is_not_consumed_keeps_nothing():
    owner, producer = exported(kind=2)
    capsule = producer.__dlpack__(stream=-1)
    tensor, readonly = protocols.Dlpack._tensor(capsule)
    assert (tensor.device.kind, tensor.bits, tensor.code, readonly) == (2, 32, 2, False)
    assert tuple(tensor.shape[:2]) == (6, 4)
    assert tuple(tensor.strides[:2]) == (8, 2)
    del producer
    gc.collect()
    assert owner() is not None
    del capsule, tensor
    gc.collect()
    assert owner() is None
    assert not export._exported


@pytest.mark.parametrize(("given", "waits"), [(None, 0), (1, 1), (2, 2), (77, 77), (-1, None)])
def test_consumers_stream_waits_for_the_products(given, waits, monkeypatch):
    waited = []
    monkeypatch.setattr(export.streams, "wait_for", lambda *ends: waited.append(ends))
    _, producer = exported(kind=2, stream=Stream(40))
    producer.__dlpack__(stream=given)
    assert waited == ([] if waits is None else [(Stream(waits), Stream(40), 0)])


def test_result_is_not_copied():
    _, producer = exported()
    for options in ({"copy": True}, {"dl_device": (2, 0)}):
        with pytest.raises(BufferError, match=r"lies on DLPack device \(1, 0\) and is not copied"):
            producer.__dlpack__(**options)
