"""Blocks of the page on PyTorch, of random shapes and of the tracer, of results that are made up."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from blocks import energy_page, memory_page, random_shapes, tables, torch_tables, tracer_page
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


def test_random_shapes(found, monkeypatch):
    published, add = found
    monkeypatch.setattr(random_shapes, "FOLDERS", ("",))
    ratios = {"ieee_ratio": [0.8, 1.25, 2.0, 1.0], "auto_ratio": [1.0] * 4, "bf16x6_ratio": [0.4, 0.6, 0.5, 2.0]}
    calls = {
        "cublas_call_us": 8.0,
        "ieee_call_us": [4.0, 16.0, 8.0, 8.0],
        "fp32_auto_call_us": 8.0,
        "bf16x6_call_us": 4.0,
    }
    where = {"m": [1, 2, 3, 4], "n": 5, "k": 6, "layout": "NT", "aligned": [False, True, True, True]}
    add("random_products", **where, **ratios, **calls)
    text = random_shapes.random_products(published)
    first, second, third = lines(text)
    assert first.startswith(
        "| `ieee`, over cuBLAS SGEMM | 1.19 | ≥ 0.9 | 1 of 4 | `1x5x6 NT unaligned`: 0.8; `4x5x6 NT`: 1;"
    )
    assert first.endswith("| 1 |")
    assert second.endswith("| 0.841 |"), "the faster of cuBLAS and float32 is the baseline"
    assert third.endswith("| 2 |")
    assert "| ≥ 0.95 | 0 of 4 |" in second
    assert "| ≥ 0.5 | 1 of 4 |" in third
    assert [line for line in text.splitlines() if line.startswith("- ")] == [
        "- float32 has at least 0.9 of cuBLAS's speed at every shape",
        "- bf16x6 has at least 0.5 of cuBLAS SGEMM's speed at every shape",
    ]


def test_choices(found, monkeypatch):
    published, add = found
    monkeypatch.setattr(random_shapes, "FOLDERS", ("",))
    product = {"m": [1, 1, 2, 2], "n": 5, "k": 6, "layout": "NT", "aligned": [True, True, False, False]}
    us = {"expected_us": 2.0, "us": [3.0, 2.0, 4.0, 4.0], "chosen": [True, False, True, False]}
    add("choices", **product, precision="ieee", **us)
    text = random_shapes.choices(published)
    assert lines(text) == ["| `ieee` | 2 | 4 | 1.250 | 1.500, `1x5x6 NT` |"]
    assert text.count("- choices in ieee take at most") == 2


def test_batches(found):
    published, add = found
    add(
        "batches",
        matrices=[65536, 1000, 10],
        m=[4, 5, 6],
        n=[4, 7, 8],
        k=[4, 1, 2],
        layout=["NN", "TN", "NT"],
        drawn=[False, True, True],
        stage=["small_matrices", "thin", "thin"],
        cublas_us=[90.0, 4.0, 8.0],
        ieee_us=[4.0, 5.0, 4.0],
        cublas_call_us=[95.0, 10.0, 10.0],
        ieee_call_us=[5.0, 10.0, 2.5],
        ieee_ratio=[22.5, 0.8, 2.0],
    )
    text = random_shapes.batches(published)
    assert lines(text) == ["| 65,536 | 4x4x4 | 90 | 4 | 22.5 | 3.15 | `small_matrices` |"]
    said = "2 random batches: 1.26 of cuBLAS's speed in the geometric mean, 2 as plain calls; below 0.9: 1,000 of"
    assert f"{said} `5x7x1 TN` 0.8." in text
    assert "- float32 has at least 0.9 of cuBLAS's speed at every random batch" in text


def test_router_gates_of_two_runs(found, monkeypatch):
    published, add = found
    monkeypatch.setattr(random_shapes, "FOLDERS", ("", "."))
    timed = [(m, n, k, m * n * k / 1e3) for m in (1, 1024) for n in (2, 4) for k in (500, 1000)]
    columns = pd.DataFrame(timed, columns=["m", "n", "k", "auto_ratio"]).to_dict("list")
    calls = {"cublas_call_us": 8.0, "fp32_auto_call_us": [4.0, 16.0] * 4}
    add("router_gates", **columns, **calls, fp32_auto_error=0.0, cublas_error=0.0)
    text = random_shapes.router_gates(published)
    rows = [line for line in lines(text) if line.startswith("| 1")]
    assert rows == ["| 1 | 1 to 2 | 2 to 4 |", "| 1,024 | 1.02e+03 to 2.05e+03 | 2.05e+03 to 4.1e+03 |"] * 2
    assert text.count("the ratios are 0.5 to 2, in the geometric mean 1; 4 of 8 are below 1.") == 2
    assert text.count("K of 500 and 1,000") == text.count("No target is missed.") == 2


def test_energy(found):
    published, add = found
    names = list(energy_page.NAMES)
    us = dict.fromkeys(names, 10_000.0) | {"cublas": 24_000.0, "cublas_given_bf16": 1500.0, "idle": None}
    frame = pd.DataFrame(
        {"contender": names, "us": us.values(), "watts": [100.0 if x == "idle" else 700.0 for x in names]}
    )
    frame = frame.assign(m=8, n=8, k=8, tflops=1.0, sm_clock_mhz=1410, joules=frame["watts"] * frame["us"] * 1e-6)
    frame = frame.assign(pj_per_flop=6.0, ratio_to_cublas=24_000 / frame["us"])
    add("energy", **frame.to_dict("list"))
    text = energy_page.energy(published)
    found = lines(text)
    assert "| `bf16x6` | 1.0 | 2.40 | 700 | 1,410 | 7 | 6 |" in found
    assert "| GPU idle | 1.0 | – | 100 | 1,410 | – | 6 |" in found
    assert "| static | 1 | 14 % |" in text
    assert "At 700 W, 2.4 times the speed of cuBLAS SGEMM allows 7 J per product. `bf16x6` takes 7 J" in text
    assert "and 6 products of cuBLAS BF16 6.3 J" in text
    assert "No target is missed." in text


def test_counts_of_the_tracer(found):
    published, add = found
    add("tracer_counted")
    counts = {"counted": [100, 200, 1000], "traced": [100, 200, 1010], "ratio": [1.0, 1.0, 1.01]}
    pd.DataFrame({"stage": ["naive", "naive", "thin"], "m": 1, "n": 2, "k": 3, **counts}).to_csv(
        published.folder / "tracer.csv", index=False
    )
    text = tracer_page.tracer(published)
    assert text.startswith("At 1x2x3, 2 stages have 3 numbers:")
    assert "2 are equal. The other 1, of `thin`, differ by at most 1 %." in text


def test_a_run_that_was_ended():
    frame = pd.DataFrame({"m": [1], "n": [2], "k": [3]})
    command = "numba-gemm bench --shape 1,2,3"
    assert tables.unfinished(frame, {"command": command}) == ""
    assert "after 1 of 2 shapes" in tables.unfinished(frame, {"command": f"{command} --shape=4,5,6"})


def test_rows_of_an_experiment_on_memory():
    shown = memory_page.Shown("bytes > 1", {"way": "way", "us": "us", "bytes": "bytes", "absent": "absent"})
    frame = pd.DataFrame({"way": ["a", "b", "c"], "us": [1.0, 2.345, None], "bytes": [1, 2, 4096]})
    assert memory_page.rows(frame, shown).splitlines() == [
        "| way | us | bytes |",
        "| :-- | --: | --: |",
        "| b | 2.35 | 2 |",
        "| c | – | 4,096 |",
    ]
