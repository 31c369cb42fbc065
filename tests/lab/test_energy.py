"""The experiment `energy`: rows with products of NumPy, the account, and kernels that leave something out."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from support.background import run_by_hand
from support.compile_energy import opcodes
from support.offline import offline

from numba_gemm.lab.bench import energy, steady
from numba_gemm.lab.bench.buffers import HostLibrary
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.bench.contenders import Bound, Contender
from numba_gemm.lab.harness.nvml import Nvml

SHAPE = Shape(64, 48, 32)


def product(buffers, wrong=0.0):
    def call(_stream):
        buffers.c[...] = buffers.a @ buffers.b + np.float32(wrong)

    return call


class Stage:
    """A prepared stage; kernels that leave something out are wrong."""

    wrong = 0.0

    def __init__(self, stage, precision, buffers):
        self.decompose, self.multiply = lambda stream: None, product(buffers, self.wrong)
        self.multiply_with = lambda build: product(buffers, wrong=1.0)


@pytest.fixture
def rows(monkeypatch):
    """Return the rows of a GPU on which a second passes per span of 10 us, at 500 W; idle, at 100 W."""
    now = SimpleNamespace(seconds=0.0, millijoules=0.0)
    background = run_by_hand(monkeypatch)

    def spans(us, watts):
        while True:
            now.seconds += 1.0
            now.millijoules += 1e3 * watts
            background()
            yield us, True

    @contextlib.contextmanager
    def on_device():
        yield HostLibrary(), 0

    durations = itertools.count(10.0, 1.0)
    monkeypatch.setattr(energy, "on_device", on_device)
    monkeypatch.setattr(energy, "PreparedStage", Stage)
    monkeypatch.setattr(energy, "time_alone", lambda call, stream: spans(next(durations), 500.0))
    monkeypatch.setattr(energy, "sleeping", lambda: spans(float("nan"), 100.0))
    monkeypatch.setattr(steady.time, "perf_counter", lambda: now.seconds)
    contender = Contender("any", lambda buffers: Bound(product(buffers), "128x128"))
    monkeypatch.setattr(energy, "cublas", lambda: (contender,))
    monkeypatch.setattr(energy, "narrow_cublas", lambda: (contender,) * 3)
    monkeypatch.setattr(energy, "public_function", lambda precision="ieee": contender)
    nvml = Nvml("1", 1980, lambda: 1410, lambda: 4, lambda: int(now.millijoules))
    monkeypatch.setattr(energy.environment, "current_nvml", lambda: nvml)
    return lambda: energy.EXPERIMENT.frame(shapes=(SHAPE,))


def test_rows(rows):
    frame = rows()
    names = [energy.CUBLAS, "ieee", "bf16x6", energy.PREPARED, energy.GIVEN_BF16, energy.ZEROS, *energy.BUILDS]
    assert list(frame["contender"]) == [*names, energy.IDLE]
    at = frame.set_index("contender")
    assert at.loc["bf16x6", ["us", "watts", "sm_clock_mhz"]].tolist() == [12.0, 500.0, 1410.0]
    assert at.at["bf16x6", "joules"] == pytest.approx(500 * 12e-6)
    assert at.at["bf16x6", "pj_per_flop"] == pytest.approx(500 * 12e-6 / (2 * 64 * 48 * 32) * 1e12)
    assert at.at["bf16x6", "ratio_to_cublas"] == pytest.approx(10 / 12)
    assert at.at[energy.IDLE, "watts"] == 100
    assert np.isnan(at.at[energy.IDLE, "joules"])
    assert list(energy.EXPERIMENT.claims(frame).values()) == [False]


def test_a_wrong_product_is_not_measured(rows, monkeypatch):
    monkeypatch.setattr(Stage, "wrong", 1.0)
    with pytest.raises(RuntimeError, match=energy.PREPARED):
        rows()


def test_the_account_divides_all_energy():
    names = ["bf16x6", energy.PREPARED, energy.NO_COPIES, energy.ONLY_INSTRUCTIONS, energy.IDLE]
    frame = pd.DataFrame({"contender": names, "us": [1e4, 9e3, 8e3, 7e3, np.nan]})
    frame = frame.assign(watts=[700, 700, 650, 600, 100], joules=[7.0, 6.3, 5.2, 4.2, np.nan])
    found = energy.account(frame)
    assert list(found.values()) == pytest.approx([1.0, 3.5, 1.0, 0.9, 0.6])
    assert sum(found.values()) == pytest.approx(7.0)


def test_kernels_leave_out_what_their_names_say():
    found = offline(opcodes)
    whole, without_additions = found[""], found[energy.NO_ADDITIONS]
    instructions, copies = found[energy.ONLY_INSTRUCTIONS], found[energy.ONLY_COPIES]
    assert instructions["HGMMA"] == without_additions["HGMMA"] == 24
    assert whole["HGMMA"] == 3 * 24  # of two slots per turn, and of an odd one
    assert copies["UBLKCP"] == whole["UBLKCP"]
    assert whole["FADD"] > 0
    assert not {"FADD"} & (instructions.keys() | without_additions.keys())
    assert not {"FADD", "HGMMA"} & copies.keys()
    assert instructions["UBLKCP"] == whole["UBLKCP"]  # for the first slots
    assert instructions["SYNCS"] > without_additions["SYNCS"]  # an arrival instead of copies
