"""Random shapes and router gates: what is drawn, and what the claims say of it."""

from functools import partial

import numpy as np
import pandas as pd
import pytest

from numba_gemm.kernels.product import LAYOUTS
from numba_gemm.lab.bench import random_cases, random_products, steady
from numba_gemm.lab.bench.buffers import HostLibrary
from numba_gemm.models.roofline import gemm_flops


def test_shapes_are_spread_over_extents_layouts_and_alignments():
    cases = random_cases.random_cases(3000, 1, 20_000)
    assert cases == random_cases.random_cases(3000, 1, 20_000) != random_cases.random_cases(3000, 2, 20_000)
    assert random_cases.random_cases(10, 1, 20_000) == cases[:10]
    assert all(1 <= extent <= 20_000 for shape, *_ in cases for extent in shape)
    assert all(gemm_flops(*shape) <= 4e12 for shape, *_ in cases)
    extents = [extent for shape, *_ in cases for extent in shape]
    assert 0.4 < sum(extent <= 141 for extent in extents) / len(extents) < 0.6  # the square root of 20,000
    assert {layout for _, layout, _ in cases} == set(LAYOUTS)
    assert 0.63 < sum(aligned for *_, aligned in cases) / len(cases) < 0.70


@pytest.mark.parametrize(
    ("torch", "cupy", "via", "us"),
    [(20.0, 15.0, "cupy", 15.0), (20.0, 25.0, "torch", 20.0), (9.0, 1.0, "torch", 9.0), (20.0, None, "torch", 20.0)],
)
def test_the_faster_cublas_counts(torch, cupy, via, us, monkeypatch):
    """CuPy, if it is there, is timed by plain launches, and only where these do not decide."""
    names = [random_products.CUBLAS, random_products.BY_CUPY, "ieee"]
    times, timed = dict(zip(names, (torch, cupy, 5.0))), []
    a, b, c = np.ones((3, 4), np.float32), np.ones((4, 2), np.float32), np.empty((3, 2), np.float32)
    calls = {name: ("ieee", partial(np.matmul, a, b, out=c)) for name, time in times.items() if time}

    def alone(_stream, call, graphs=True):
        (name,) = (name for name, (_, other) in calls.items() if call is other)
        timed.append((name, graphs))
        return times[name], times[name] + 1

    monkeypatch.setattr(random_products, "alone", alone)
    row = random_products.measured(HostLibrary(), 0, calls, a, b, c)
    assert (row["cublas_us"], row["cublas_call_us"], row["cublas_via"]) == (us, us + 1, via)
    assert {name.split("_")[0] for name in row} == {"cublas", "ieee"}
    assert ((names[1], False) in timed) == (cupy is not None and torch >= random_products.LEAST_US)


@pytest.mark.parametrize(
    ("times", "us", "lengths"),
    [([50.0], 50.0, [0.04]), ([620.0, 640.0, 655.0, 657.0, 1.0], 657.0, [0.04, 0.15, 0.15, 0.15])],
    ids=["short", "long"],
)
def test_long_products_count_once_their_times_have_settled(times, us, lengths, monkeypatch):
    given, seen = iter(times), []

    def window(_spans, length, _nvml=None):
        seen.append(length)
        return next(given), None

    monkeypatch.setattr(random_products, "time_alone", lambda *_, **__: (one for one in ()))
    monkeypatch.setattr(random_products, "plain_call_us", lambda _call, _stream, us, *_: us + 3)
    monkeypatch.setattr(steady, "window", window)
    assert random_products.alone(0, print) == (us, us + 3)
    assert seen == lengths


@pytest.mark.parametrize(
    ("ieee", "auto", "bf16x6", "held"),
    [
        ([1.0, 1.2], [0.95, 1.3], [0.5, 2.4], [True, True, True, True]),
        ([0.89, 1.3], [0.95, 1.3], [0.5, 2.4], [False, True, True, True]),
        ([1.0, 1.1], [0.94, 1.3], [0.49, 2.4], [True, False, False, False]),
    ],
)
def test_claims_about_random_shapes(ieee, auto, bf16x6, held):
    frame = pd.DataFrame({"ieee_ratio": ieee, "auto_ratio": auto, "bf16x6_ratio": bf16x6})
    assert [bool(pd.Series(value).all()) for value in random_products.claims_of_random(frame).values()] == held


def test_router_gates_take_any_number_of_extents():
    for given in ("64", "64,256", "64,256,768"):
        assert random_products.ROUTER_GATES.parameters["n"].parse(given) == tuple(map(int, given.split(",")))


@pytest.mark.parametrize(("ratios", "error", "held"), [((1.0, 2.0), 1.0, [True] * 3), ((0.9, 1.9), 1.1, [False] * 3)])
def test_claims_about_router_gates(ratios, error, held):
    frame = pd.DataFrame({"m": [1, 512], "auto_ratio": ratios, "fp32_auto_error": error, "cuBLAS_error": 1.0})
    frame = frame.rename(columns={"cuBLAS_error": f"{random_products.CUBLAS}_error"})
    assert [bool(pd.Series(value).all()) for value in random_products.claims_of_gates(frame).values()] == held
