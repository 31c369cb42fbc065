"""Training steps of a transformer, and calls of a product, small, on the CPU."""

from __future__ import annotations

import pandas as pd
import pytest

from numba_gemm.lab.bench import torch_calls, transformer

torch = pytest.importorskip("torch")

WAYS = ["torch", "torch, TF32", "override ieee"]
TINY = {"width": 16, "sequence": 4, "precisions": ("ieee",)}


@pytest.mark.simulator
def test_a_step_is_compared_with_float64():
    frame = transformer.STEP.frame(**TINY).set_index("way")
    assert list(frame.index) == WAYS
    assert list(frame["products"]) == [0, 0, 12]  # four layers, forward and for two gradients each
    assert (frame[["output_error", "gradient_error"]] < 1e-5).all().all()
    assert (frame[["output_error", "gradient_error", "ms", "first_s"]] > 0).all().all()


@pytest.mark.simulator
def test_training_starts_from_the_same_model():
    frame = transformer.TRAINING.frame(steps=2, layers=1, batch=2, **TINY)
    losses = frame.pivot_table(index="step", columns="way", values="loss")
    assert list(losses.columns.sort_values()) == sorted(WAYS)
    for way in WAYS:
        assert losses[way].to_list() == pytest.approx(losses["torch"].to_list(), rel=1e-5)
    assert losses["torch"][0] != losses["torch"][1]


def test_settings_of_pytorch_are_restored():
    before = torch.backends.cuda.matmul.allow_tf32
    with transformer.way(torch, transformer.TF32):
        assert torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_compiled_ways_differ_in_products_alone(monkeypatch):
    """The baseline of products from here is compiled with their options."""
    monkeypatch.setattr(torch, "compile", lambda block, options=None: options)
    ways = (transformer.COMPILED, transformer.SAME_OPTIONS, f"{transformer.COMPILED}, external ieee")
    plain, same, ours = (transformer.compiled(torch, None, way) for way in ways)
    assert plain is None
    assert len(ours.pop("external_matmul")) == 1
    assert same == ours


def test_most_tokens_are_sums():
    tokens = transformer.sequences(torch, torch.Generator().manual_seed(3), 8, 100)
    sums = (tokens[:, 1:-1] + tokens[:, :-2]) % transformer.VOCABULARY == tokens[:, 2:]
    assert 0.85 < sums.double().mean() < 0.95


@pytest.mark.parametrize(("error", "speed", "held"), [(1.1, 1.6, [True, True]), (1.3, 1.4, [False, False])])
def test_claims_about_a_step(error, speed, held):
    rows = [("torch", 1.0, 1.0), ("override ieee", 9.0, 0.1), ("override bf16x6", error, speed)]
    frame = pd.DataFrame(rows, columns=["way", "output_error", "speed_over_torch"])
    frame["gradient_error"] = frame["output_error"]
    assert list(transformer.step_claims(frame).values()) == held


@pytest.mark.parametrize(("last", "held"), [((0.5, 0.51), [True, True]), ((2.5, 2.7), [False, False])])
def test_claims_about_training(last, held):
    ways = dict(zip(("torch", "override bf16x6"), last, strict=True))
    rows = [(way, step, 4.0 if step == 0 else end) for way, end in ways.items() for step in range(100)]
    frame = pd.DataFrame(rows, columns=["way", "step", "loss"])
    assert list(transformer.training_claims(frame).values()) == held


@pytest.mark.simulator
def test_ways_to_call_a_product_are_timed():
    frame = torch_calls.EXPERIMENT.frame(extent=8)
    assert len(frame) == 9
    assert (frame["host_us"] > 0).all()


@pytest.mark.parametrize(("operator", "no_grad", "held"), [(17.9, 10.4, [True, True]), (18.1, 10.6, [False, False])])
def test_claims_about_calls(operator, no_grad, held):
    us = {torch_calls.DIRECT: 10.0, torch_calls.DIRECT + torch_calls.NO_GRAD: no_grad, torch_calls.OPERATOR: operator}
    frame = pd.DataFrame({"way": us.keys(), "host_us": us.values()})
    assert list(torch_calls.claims(frame).values()) == held
