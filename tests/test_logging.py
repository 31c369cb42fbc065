"""Log messages: the choice of a product, kernels that are compiled or found, and nothing for repeated calls."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from support.array_libraries import operands, tensor
from support.compiled import CUBIN
from support.operands import filled

from numba_gemm import plan, tiled_sgemm
from numba_gemm.gemm import request
from numba_gemm.kernels import STAGES
from numba_gemm.runtime import bundle, compilation, kernel_cache

KERNEL = STAGES["naive"].kernel_of(STAGES["naive"].configs[0], True)


@pytest.fixture
def told(caplog):
    """Return the messages of a level since the last call, as (name of the logger, level, text)."""

    def messages():
        found = [(one.name, one.levelname, one.getMessage()) for one in caplog.records]
        caplog.clear()
        return found

    caplog.set_level(logging.DEBUG, logger="numba_gemm")
    return messages


def test_the_choice_is_told_once_per_layout(torch, gpu, told):
    a, b, _ = operands()
    tiled_sgemm(tensor(a), tensor(b))
    ((name, level, text),) = told()
    assert (name, level) == ("numba_gemm.choices", "DEBUG")
    assert text.startswith("M=4 N=8 K=12, ieee, device 0: stage ")
    assert "configuration" in text
    assert "; expected to take" in text, "the reason"
    tiled_sgemm(tensor(a), tensor(b))
    assert told() == [], "a repeated call"
    tiled_sgemm(tensor(filled(5, 12, 0)), tensor(b))
    ((*_, text),) = told()
    assert text.startswith("M=5 N=8 K=12, ieee, ")
    assert len(gpu.launches) == 3


def test_named_stages_batches_and_plans(torch, gpu, told):
    a, b = (np.stack([filled(*shape, i) for i in range(3)]) for shape in ((4, 12), (12, 8)))
    tiled_sgemm(tensor(a), tensor(b))
    assert [text[:23] for *_, text in told()] == ["M=4 N=8 K=12 x 3, ieee,"]
    tiled_sgemm(tensor(a[0]), tensor(b[0]), stage="naive")
    assert [text for *_, text in told()] == [
        "M=4 N=8 K=12, ieee, device 0: stage naive, configuration 32x32x1-1x1: stage naive was asked for"
    ]
    multiply = plan(4, 8, 12)
    assert len(told()) == 1
    multiply(tensor(a[0]), tensor(b[0]))
    assert told() == []


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_no_reason_is_computed_unless_it_is_told(torch, gpu, caplog, monkeypatch, level):
    caplog.set_level(level, logger="numba_gemm")
    monkeypatch.setattr(request, "_log", None)
    a, b, _ = operands()
    tiled_sgemm(tensor(a), tensor(b))
    tiled_sgemm(tensor(filled(5, 12, 0)), tensor(b))
    assert len(gpu.launches) == 2
    assert not caplog.records


def test_compiled_and_found_kernels(told, tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_GEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_cache, "compile_all", lambda tasks, done, jobs: done(0, CUBIN, 1.25))
    said = f"kernel {KERNEL.name} for compute capability 9.0: "
    kernel_cache.fetch(KERNEL, (9, 0))
    assert told() == [("numba_gemm.kernels", "INFO", said + "compiled in 1.25 s")]
    kernel_cache.fetch(KERNEL, (9, 0))
    assert told() == [("numba_gemm.kernels", "DEBUG", said + "found in the cache")]
    monkeypatch.setenv("NUMBA_GEMM_CACHE_DIR", "off")
    monkeypatch.setattr(bundle, "look_up", lambda name: CUBIN)
    kernel_cache.fetch(KERNEL, (9, 0))
    assert told() == [("numba_gemm.kernels", "DEBUG", said + "found in the bundle")]


def test_nothing_is_printed_by_default():
    logger = logging.getLogger("numba_gemm")
    assert any(isinstance(handler, logging.NullHandler) for handler in logger.handlers)
    assert logger.level == logging.NOTSET
    assert {request.LOG.parent, compilation.LOG.parent} == {logger}
