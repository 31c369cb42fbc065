"""Random calls for a few seconds, more of them in the exhaustive set, and a check that the fuzzer finds errors."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import fuzz
import numpy as np
import pytest

from numba_gemm.kernels.ladder import STAGES

WORKERS = 4
OPTIONS = fuzz.Options(seed=1, first=0, cases=0, seconds=2.0, jobs=WORKERS, space=fuzz.whole_space())
MORE = dataclasses.replace(OPTIONS, seed=2, seconds=10.0)


@pytest.mark.parametrize("worker", range(WORKERS))
@pytest.mark.parametrize("options", [OPTIONS, pytest.param(MORE, marks=pytest.mark.exhaustive)], ids=["few", "more"])
def test_random_calls(options, worker):
    report = fuzz.work(options, worker)
    assert sum(report.cases.values()) > 0
    assert not report.failures, "\n".join(
        f"python tests/fuzz.py --replay {options.seed}:{number}: {wrong}" for number, wrong in report.failures
    )


def test_a_case_follows_from_its_number():
    space = fuzz.Space(("numpy", "torch"), ("ieee", "tf32"), ("naive", "stream_k"))
    cases = [fuzz.drawn(3, number, space) for number in range(200)]
    assert cases == [fuzz.drawn(3, number, space) for number in range(200)]
    assert {case.kind for case in cases} == set(fuzz.KINDS)
    assert cases != [fuzz.drawn(4, number, space) for number in range(200)]


def cpu_product(a, b, out, alpha=1.0, beta=0.0, **ignored):
    result = np.float32(alpha) * (a @ b) if alpha else np.zeros((*a.shape[:-1], b.shape[-1]), np.float32)
    result = (result + (np.float32(beta) * out if beta else 0)).astype(np.float32)
    if out is None:
        return result
    out[...] = result
    return out


def one_element_off(a, b, out, **options):
    result = cpu_product(a, b, out, **options)
    result[-1, -1] += np.float32(1e-3)
    return result


def outside(a, b, out, **options):
    result = cpu_product(a, b, out, **options)
    np.lib.stride_tricks.as_strided(out, (2,), (-4,))[1] = 1
    return result


def changes_a(a, b, out, **options):
    result = cpu_product(a, b, out, **options)
    a[0, 0] += 1
    return result


def another_array(a, b, out, **options):
    return cpu_product(a, b, out, **options).copy()


class OtherBits:
    def __init__(self):
        self.calls = 0

    def __call__(self, a, b, out, **options):
        self.calls += 1
        result = cpu_product(a, b, out, **options)
        result *= np.float32(1 + 2**-23 * (self.calls - 1))
        return result


PLAIN = fuzz.Layout((0, 1), (1, 1))
CALL = fuzz.Call(5, "numpy", (7, 9, 11), PLAIN, PLAIN, PLAIN, beta=0.5, values="uniform")


@pytest.mark.parametrize(
    ("product", "found"),
    [
        (cpu_product, ""),
        (one_element_off, "WRONG"),
        (outside, "memory around out changed"),
        (changes_a, "a changed"),
        (another_array, "not out"),
        (OtherBits(), "other bits"),
        (lambda a, b, out, **options: out, "WRONG"),
    ],
)
def test_the_fuzzer_finds(monkeypatch, product, found):
    monkeypatch.setattr(fuzz, "tiled_sgemm", product)
    outcome = fuzz.run(fuzz.Case("sequence", (CALL, CALL)), {"numpy": fuzz.Library()})
    assert (found in "".join(outcome.wrong)) if found else not outcome.wrong


def test_exact_sums_are_compared_exactly(monkeypatch):
    call = dataclasses.replace(CALL, values="integers", shape=(40, 30, 20))
    case, libraries = fuzz.Case("product", (call,)), {"numpy": fuzz.Library()}
    monkeypatch.setattr(fuzz, "tiled_sgemm", cpu_product)
    assert not fuzz.run(case, libraries).wrong
    monkeypatch.setattr(fuzz, "tiled_sgemm", lambda *args, **options: np.nextafter(cpu_product(*args, **options), 99))
    assert "not out" in fuzz.run(case, libraries).wrong[0]
    monkeypatch.setattr(fuzz, "tiled_sgemm", lambda a, b, out, **options: _nudged(cpu_product(a, b, out, **options)))
    assert "expected exactly" in fuzz.run(case, libraries).wrong[0]


def _nudged(out):
    out[...] = np.nextafter(out, np.float32(99))
    return out


def test_a_call_that_should_be_refused(monkeypatch):
    monkeypatch.setattr(fuzz, "tiled_sgemm", lambda a, b, out=None, **options: out)
    for spoiled in fuzz.SPOILED:
        outcome = fuzz.run(fuzz.Case("refused", (CALL,), spoiled=spoiled), {"numpy": fuzz.Library()})
        assert outcome.wrong == [f"a call with a wrong {spoiled} was not refused"]


def test_the_committed_digests_are_of_cases_that_can_be_drawn():
    file = Path(__file__).parent / "data" / "digests_h200.json"
    _, space, digests = fuzz.read_digests(file)
    assert digests
    assert set(space.stages) <= set(STAGES)
    assert len(space.stages) == len(json.loads(file.read_text())["space"]["stages"])


def test_digests_are_of_the_result(monkeypatch):
    monkeypatch.setattr(fuzz, "tiled_sgemm", cpu_product)
    case = fuzz.Case("product", (CALL,))
    (digest,) = fuzz.run(case, {"numpy": fuzz.Library()}).digests
    made = fuzz.operands(CALL, fuzz.Library())
    result = cpu_product(made.a.array, made.b.array, made.c.array, beta=0.5)
    assert digest == hashlib.sha256(np.ascontiguousarray(result).tobytes()).hexdigest()
