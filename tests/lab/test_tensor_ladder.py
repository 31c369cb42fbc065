"""The experiment `tensor_ladder` with products of NumPy: every stage is checked, on an output of NaN."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from numba_gemm.lab.bench import tensor_ladder
from numba_gemm.lab.bench.buffers import HostLibrary
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.bench.contenders import Bound, Contender
from numba_gemm.runtime.timing import Samples

SHAPE = Shape(64, 48, 32)


@contextlib.contextmanager
def on_device():
    yield HostLibrary(), 0


def product(buffers):
    def call(_stream):
        buffers.c[...] = buffers.a @ buffers.b

    return call


class Stage:
    """A prepared stage; the one named `lazy` computes nothing."""

    lazy = ""

    def __init__(self, stage, precision, buffers):
        self.registers, self.decompose = 90, lambda stream: None
        self.multiply = (lambda stream: None) if stage.name == self.lazy else product(buffers)


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.setattr(tensor_ladder, "on_device", on_device)
    monkeypatch.setattr(tensor_ladder, "PreparedStage", Stage)
    ways = tuple(Contender("cublas", lambda to: Bound(product(to)), via=via) for via in ("torch", "cupy"))
    monkeypatch.setattr(tensor_ladder, "cublas", lambda: ways)
    times = {"cublas/torch": 21.0, "cublas/cupy": 20.0, "decompose": 4.0}
    monkeypatch.setattr(
        tensor_ladder,
        "time_interleaved",
        lambda calls, **_: {name: Samples(np.array([times.get(name, 10.0)])) for name in calls},
    )
    return lambda: tensor_ladder.tensor_ladder(SHAPE)


def test_rows(measured):
    frame = measured()
    stages = [stage.name for stage in tensor_ladder.ladder_stages()]
    assert list(frame["stage"]) == ["cublas", "decompose", *stages]
    assert frame["via"].iloc[0] == "cupy"
    assert stages[:2] == ["one_warp", "one_warpgroup"]
    assert list(frame["precision"]) == ["ieee", "bf16x6", "bf16", *["bf16x6"] * (len(stages) - 1)]
    rows = frame.set_index("stage")
    assert rows.loc["persistent", "ratio_to_cublas"] == 2
    assert rows.loc["persistent", "tflops"] == pytest.approx(2 * 64 * 48 * 32 / 10e-6 * 1e-12)
    assert rows.loc["decompose", ["error_median", "tflops"]].isna().all()
    assert 0 < rows.loc["persistent", "error_median"] < rows.loc["persistent", "error_max"] < 1e-6
    assert all(tensor_ladder.claims(frame).values())


def test_a_stage_that_writes_nothing_is_not_correct(measured, monkeypatch):
    monkeypatch.setattr(Stage, "lazy", "bulk_copies")
    frame = measured()
    assert list(frame["stage"][frame["error_max"].isna()]) == ["decompose", "bulk_copies"]
    assert list(frame["stage"][frame["median_us"].isna()]) == ["bulk_copies"]
    assert not any(tensor_ladder.claims(frame).values())
