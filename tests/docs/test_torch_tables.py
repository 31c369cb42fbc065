"""Blocks of the page on PyTorch, of results that are made up."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from blocks import torch_tables
from blocks.published import Published

ENVIRONMENT = {
    "gpu": {"name": "Some GPU", "multiprocessors": 2, "max_clock_mhz": 1000},
    "commit": "abc",
    "date": "2026-01-02",
    "command": "numba-gemm lab some",
}


@pytest.fixture
def found(tmp_path):
    """Return an object like `Published`, and a function that adds a table to it."""
    made = Published.__new__(Published)
    made.folder = tmp_path

    def add(name, **columns):
        pd.DataFrame(columns).to_csv(tmp_path / f"{name}.csv", index=False)
        (tmp_path / f"{name}.json").write_text(json.dumps(ENVIRONMENT), encoding="utf-8")

    return made, add


def lines(text):
    return [line for line in text.splitlines() if line.startswith("|")][2:]


def test_a_step(found):
    published, add = found
    ways = ["torch", "override bf16x6"]
    add(
        "transformer_step",
        way=ways,
        width=2048,
        sequence=1024,
        ms=[10.0, 4.04],
        speed_over_torch=[1.0, 2.475],
        output_error=[1e-6, 2.2e-7],
        gradient_error=[3e-6, 4e-7],
        products=[0, 12],
        first_s=[0.1, 3.25],
    )
    text = torch_tables.torch_step(published)
    assert "width 2048, 1024 tokens" in text
    assert "Some GPU" in text
    assert lines(text) == [
        "| torch | 10.0 | 1.00 | 0 | 1e-06 | 3e-06 | 0.1 |",
        "| override bf16x6 | 4.0 | 2.48 | 12 | 2.2e-07 | 4e-07 | 3.2 |",
    ]


def test_losses(found):
    published, add = found
    steps = list(range(60))
    rows = [(way, step, 4.0 if step < 10 else last) for way, last in (("torch", 0.5), ("tf32", 0.51)) for step in steps]
    add("training", **pd.DataFrame(rows, columns=["way", "step", "loss"]).to_dict("list"))
    text = torch_tables.training(published)
    assert text.startswith("Cross-entropy of 60 steps:")
    assert lines(text) == ["| torch | 4 | 0.5 | 1.000 | 0 |", "| tf32 | 4 | 0.51 | 1.020 | 0.01 |"]


def test_calls(found):
    published, add = found
    add(
        "torch_calls",
        way=["tiled_sgemm", "tiled_sgemm, no_grad", "override"],
        extent=64,
        host_us=[10.0, 9.9, 30.0],
    )
    assert lines(torch_tables.torch_calls(published)) == [
        "| `tiled_sgemm` | 10.0 | 9.9 | 0.0 |",
        "| `override` | 30.0 | – | 20.0 |",
    ]
