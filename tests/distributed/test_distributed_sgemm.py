"""`distributed_sgemm` on 1 to 4 ranks on the CPU: values, errors on every rank, and a rank that ends; with PyTorch."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.ranks import run_ranks

from numba_gemm.simulator.probe import gpu_count

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")


def exhaustive(world):
    return pytest.param(world, marks=pytest.mark.exhaustive)


def outputs(program, world, *arguments):
    """The last line that each rank prints."""
    found = run_ranks(program, world, *arguments)
    assert [one.returncode for one in found] == [0] * world, "\n".join(one.stdout for one in found)
    return [one.stdout.splitlines()[-1] for one in found]


@pytest.mark.parametrize("world", [exhaustive(1), 2, exhaustive(3), exhaustive(4)])
@pytest.mark.parametrize("part", ["dtensors", "shards", "copies", "simulated"])
def test_products(part, world):
    """Placements x shapes x panels x layouts, against float64; the same bits twice; nothing outside is written."""
    lines = outputs("distributed_products", world, part)
    assert len(set(lines)) == 1
    name, count = lines[0].split()
    assert name == part
    assert int(count) >= {"dtensors": 100, "shards": 300, "copies": 400, "simulated": 4}[part]


@pytest.mark.parametrize("world", [2, exhaustive(4)])
def test_every_rank_raises_what_one_refuses(world):
    assert len(set(outputs("distributed_failures", world, "disagreement"))) == 1


@pytest.mark.parametrize("world", [2, exhaustive(3)])
@pytest.mark.parametrize(("part", "said"), [("failure", "errors"), ("memory", "errors"), ("apart", "broadcasts")])
def test_ranks_that_fail_to_copy(part, said, world):
    assert outputs("distributed_failures", world, part) == [f"{part} {said}"] * world


@pytest.mark.parametrize("world", [2, exhaustive(4)])
def test_the_experiment_verifies_every_placement(world):
    """Four ranks divide blocks in two rows and two columns."""
    assert outputs("distributed_failures", world, "measured") == ["measured verified"] * world


@pytest.mark.parametrize("world", [2, exhaustive(3)])
def test_other_ranks_end_when_one_dies(world):
    found = run_ranks("distributed_failures", world, "death")
    assert [one.returncode for one in found] == [0] * (world - 1) + [7], "\n".join(one.stdout for one in found)
    assert {one.stdout.splitlines()[-1] for one in found[:-1]} == {"death error"}


@pytest.mark.gpu
@pytest.mark.skipif(gpu_count() < 2, reason="there are not two GPUs")
@pytest.mark.parametrize("part", ["products", "races"])
def test_all_gpus(part):
    """By copies and by NCCL: all placements against float64; operands and memory that are reused after a call."""
    found = run_ranks("distributed_gpus", gpu_count(), part, simulated=False)
    assert not any(one.returncode for one in found), "\n".join(one.stdout for one in found)
    name, count = found[0].stdout.splitlines()[-1].split()
    assert name == part
    assert int(count) >= {"products": 500, "races": 300}[part]


def test_the_example_runs():
    root = Path(__file__).parents[2]
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "docs/how_to/distributed.py"]
    found = subprocess.run(
        [sys.executable, *command, "--size", "20"],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert found.returncode == 0, found.stderr
    assert "B travels in 1 panel of up to 20" in found.stdout
    assert float(re.search(r"Largest error in the first row: (\S+)", found.stdout)[1]) < 1e-5
