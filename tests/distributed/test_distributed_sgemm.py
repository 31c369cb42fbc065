"""`distributed_sgemm` on 1 to 4 ranks on the CPU: values, errors on every rank, and a rank that ends; with PyTorch."""

from __future__ import annotations

import importlib.util

import pytest
from support.ranks import run_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")


def exhaustive(world):
    return pytest.param(world, marks=pytest.mark.exhaustive)


def outputs(program, world, *arguments):
    """The last line that each rank prints."""
    found = run_ranks(program, world, *arguments)
    assert [one.returncode for one in found] == [0] * world, "\n".join(one.stdout for one in found)
    return [one.stdout.splitlines()[-1] for one in found]


@pytest.mark.parametrize("world", [exhaustive(1), 2, exhaustive(3), exhaustive(4)])
@pytest.mark.parametrize("part", ["dtensors", "shards", "simulated"])
def test_products(part, world):
    """Placements x shapes x panels x layouts, against float64; the same bits twice; nothing outside is written."""
    lines = outputs("distributed_products", world, part)
    assert len(set(lines)) == 1
    name, count = lines[0].split()
    assert name == part
    assert int(count) >= {"dtensors": 100, "shards": 300, "simulated": 4}[part]


@pytest.mark.parametrize("world", [2, exhaustive(4)])
def test_every_rank_raises_what_one_refuses(world):
    assert len(set(outputs("distributed_failures", world, "disagreement"))) == 1


@pytest.mark.parametrize("world", [2, exhaustive(3)])
def test_other_ranks_end_when_one_dies(world):
    found = run_ranks("distributed_failures", world, "death")
    assert [one.returncode for one in found] == [0] * (world - 1) + [7], "\n".join(one.stdout for one in found)
    assert {one.stdout.splitlines()[-1] for one in found[:-1]} == {"death error"}
