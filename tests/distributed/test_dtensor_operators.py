"""Operators of `numba_gemm.torch` with DTensors, on two ranks on the CPU."""

from __future__ import annotations

import importlib.util

import pytest
from support.ranks import run_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")


def test_products_of_dtensors():
    """Placements x shapes x forms, sums, batches and gradients, against float64, with the expected local products."""
    found = run_ranks("dtensor_operators", 2)
    assert [one.returncode for one in found] == [0, 0], "\n".join(one.stdout for one in found)
    lines = {one.stdout.splitlines()[-1] for one in found}
    assert len(lines) == 1
    name, count = lines.pop().split()
    assert name == "compared"
    assert int(count) > 400
