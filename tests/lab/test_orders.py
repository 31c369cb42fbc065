"""The experiment `orders` with products of NumPy instead of compiled variants."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

from numba_gemm.lab.bench import buffers, orders, run
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.bench.contenders import Bound, Contender
from numba_gemm.lab.harness.command import UsageError
from numba_gemm.runtime.timing import Samples

SHAPE = Shape(16, 12, 8)


@pytest.fixture
def measured(monkeypatch):
    """Return a function that measures stages of these names, of which those named `lazy` compute nothing."""

    def product(operands):
        return lambda _stream: np.matmul(operands.a, operands.b, out=operands.c)

    def contender(stage, config):
        name = stage.name
        lazy = lambda _stream: None  # noqa: E731
        return Contender(name, lambda to: Bound(lazy if name == "lazy" else product(to)), config=config, min_cc=(8, 0))

    def timed(calls, **_):
        return {name: Samples(np.array([20.0 if "cublas" in name else 10.0]), True) for name in calls}

    monkeypatch.setattr(run, "time_interleaved", timed)
    monkeypatch.setattr(run, "host_time_us", lambda *_, **__: 1.0)
    for function, value in {
        "stage_contender": contender,
        "choose_library": lambda simulated: buffers.HostLibrary(),
        "current_device": lambda: 0,
        "device_scope": lambda _: contextlib.nullcontext(),
        "cublas": lambda: (Contender("cublas", lambda to: Bound(product(to)), via="torch"),),
        "device_properties": lambda _: SimpleNamespace(cc=(9, 0)),
        "STAGES": {
            name: SimpleNamespace(name=name, min_cc=(8, 0), configs=["tiles"])
            for name in ("async_copy", "warp_tiled", "lazy")
        },
    }.items():
        monkeypatch.setattr(orders, function, value)
    monkeypatch.setattr(orders.ffma, "orders", lambda stage, config: [config])
    row = lambda stage, config, ordered, cc: {"stage": stage.name, "config": config, "registers": 200}  # noqa: E731
    monkeypatch.setattr(orders.ffma, "row", row)
    return lambda *names, shape=SHAPE: orders.orders(shape, names)


def test_rows(measured):
    frame = measured("async_copy", "warp_tiled")
    assert list(frame["stage"]) == ["async_copy", "warp_tiled", "cublas"]
    assert list(frame["registers"])[:2] == [200, 200]
    assert list(frame["us"]) == [10, 10, 20]
    assert list(frame["tflops"]) == pytest.approx([2e-6 * 16 * 12 * 8 / us for us in (10, 10, 20)])
    assert list(frame["of_default"])[:2] == [1, 1]
    assert list(frame["of_cublas"]) == [2, 2, 1]
    assert orders.claims(frame) == {"every product is correct": True}


def test_a_wrong_variant_is_not_timed(measured):
    frame = measured("async_copy", "lazy")
    assert list(frame["status"]) == ["ok", "wrong", "ok"]
    assert list(frame["us"].isna()) == [False, True, False]
    assert orders.claims(frame) == {"every product is correct": False}


def test_operands_are_aligned(measured):
    with pytest.raises(UsageError, match="multiples of 4, not 16x12x9"):
        measured("async_copy", shape=Shape(16, 12, 9))
