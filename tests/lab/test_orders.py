"""The experiment `orders` with products of NumPy instead of compiled variants."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

from numba_gemm.kernels.ladder import STAGES
from numba_gemm.lab.bench import buffers, orders, run
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.bench.contenders import Bound, Contender
from numba_gemm.lab.harness.command import UsageError
from numba_gemm.runtime.timing import Samples

SHAPE = Shape(16, 12, 8)
STAGE = STAGES["async_copy"]


@pytest.fixture
def measured(monkeypatch):
    """Return a function that measures variants, of which those named `lazy` compute nothing."""
    made = []

    def random(*arguments):
        made.append(buffers.DeviceBuffers.random(*arguments))
        return made[-1]

    def launcher(cubin, *_):
        return (lambda _stream: None) if cubin.name == "lazy" else product(made[-1])

    def product(operands):
        return lambda _stream: np.matmul(operands.a, operands.b, out=operands.c)

    def variant(name):
        cubin = SimpleNamespace(name=name, registers=200)
        return orders.Variant(STAGE, STAGE.configs[0], STAGE.configs[0], name, cubin)

    def timed(calls, **_):
        return {name: Samples(np.array([20.0 if "cublas" in name else 10.0]), True) for name in calls}

    monkeypatch.setattr(run, "DeviceBuffers", SimpleNamespace(random=random))
    monkeypatch.setattr(run, "time_interleaved", timed)
    monkeypatch.setattr(run, "host_time_us", lambda *_, **__: 1.0)
    monkeypatch.setattr(buffers, "current_device", lambda: 0)
    for name, value in {
        "launcher": launcher,
        "choose_library": lambda simulated: buffers.HostLibrary(),
        "current_device": lambda: 0,
        "device_scope": lambda _: contextlib.nullcontext(),
        "cublas": lambda: (Contender("cublas", lambda to: Bound(product(to)), via="torch"),),
        "static_row": lambda of: {"stage": of.stage.name, "config": of.own.name, "loads_by": of.loads_by},
    }.items():
        monkeypatch.setattr(orders, name, value)
    return lambda *names, shape=SHAPE: orders.compared(orders.measured([*map(variant, names)], shape, 5))


def test_rows(measured):
    frame = measured("ordinary", "read-only")
    assert list(frame["stage"]) == ["async_copy", "async_copy", "cublas"]
    assert list(frame["loads_by"])[:2] == ["ordinary", "read-only"]
    assert list(frame["config"])[2] == "torch"
    assert list(frame["registers"])[:2] == [200, 200]
    assert list(frame["us"]) == [10, 10, 20]
    assert list(frame["tflops"]) == pytest.approx([2e-6 * 16 * 12 * 8 / us for us in (10, 10, 20)])
    assert list(frame["of_default"])[:2] == [1, 1]
    assert list(frame["of_cublas"]) == [2, 2, 1]
    assert orders.claims(frame) == {"every product is correct": True}


def test_a_wrong_variant_is_not_timed(measured):
    frame = measured("ordinary", "lazy")
    assert list(frame["status"]) == ["ok", "wrong", "ok"]
    assert list(frame["us"].isna()) == [False, True, False]
    assert orders.claims(frame) == {"every product is correct": False}


def test_operands_are_aligned(measured):
    with pytest.raises(UsageError, match="multiples of 4, not 16x12x9"):
        measured("ordinary", shape=Shape(16, 12, 9))
