"""Training steps of a transformer in PyTorch whose products are computed here.

In `transformer_step`, forward and backward pass of one block are timed in several ways, each alone until its time is
steady, and compared with the same block in float64. In `training`, a small model is trained from the same weights on
the same data in several precisions, and its losses are recorded. Attention is PyTorch's own in all of them.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pandas as pd

from numba_gemm.gemm.precision import IEEE
from numba_gemm.lab.harness.experiment import Experiment
from numba_gemm.runtime.timing import elapsed, settled_s
from numba_gemm.simulator.switch import SIMULATOR

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TORCH, TF32 = "torch", "torch, TF32"  # PyTorch's own products, in float32 and in TF32
COMPILED = "torch.compile"
SAME_OPTIONS = f"{COMPILED}, same options"  # as those with products from here, without these products
SEED = 1
HEAD = 64  # width of an attention head
VOCABULARY = 64  # different tokens
STEADY_SECONDS = 6.0  # that each way runs; the second half of its steps is timed
SHOWN_LOSSES = 50  # last steps of which the mean loss is compared


def layer(torch: Any, width: int) -> Any:
    """Return a transformer block; its hidden layer is four times as wide."""
    return torch.nn.TransformerEncoderLayer(
        width, max(1, width // HEAD), 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )


@contextlib.contextmanager
def way(torch: Any, name: str) -> Iterator[None]:
    """Compute PyTorch's products as a way says: ``override PRECISION``, or `TF32`, or in float32."""
    from numba_gemm.torch import override

    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = name == TF32
    precision: Any = name.split()[-1]
    replaced = override(precision=precision) if name.startswith("override") else contextlib.nullcontext()
    try:
        with replaced:
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def compiled(torch: Any, block: Any, name: str) -> Any:
    """Return a block as a way runs it: compiled, also with products from here as a choice of Inductor, or as it is."""
    if not name.startswith(COMPILED):
        return block
    from numba_gemm.torch import external_matmul, unfuse_addmm

    torch.compiler.reset()
    if name == COMPILED:
        return torch.compile(block)
    # Beside cuBLAS; Triton's float32 kernels are slower, and take minutes to measure (docs/experiments.md).
    options: dict[str, Any] = {
        "max_autotune": True,
        "max_autotune_gemm_backends": "ATEN",
        "post_grad_custom_post_pass": unfuse_addmm,
    }
    if name != SAME_OPTIONS:
        external: Any = name.partition(", external ")[2]
        options["external_matmul"] = [external_matmul(external)]
    return torch.compile(block, options=options)


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """Note the precision of each product that is computed here."""
    from numba_gemm.torch import operators

    seen: list[str] = []
    compute = operators._sgemm  # noqa: SLF001

    def counting(*operands: Any, **options: Any) -> Any:
        seen.append(options["precision"])
        return compute(*operands, **options)

    with patch.object(operators, "_sgemm", counting):
        yield seen


def transformer_step(
    width: int = 2048, sequence: int = 2048, precisions: Sequence[str] = (IEEE, "bf16x6")
) -> Iterator[dict[str, Any]]:
    """Time the forward and backward pass of a transformer block in float32, one row per way.

    Errors are relative Frobenius norms of the difference to float64: of the output, and the largest of all gradients.
    ``first_s`` is the time of the first step, which compiles; ``products`` counts those that are computed here.

    Parameters
    ----------
    width: Width of the model; the hidden layer is four times as wide.
    sequence: Tokens of the one sequence.
    """
    import torch

    from numba_gemm.torch.operators import DEVICE

    torch.manual_seed(SEED)
    block = layer(torch, width).to(DEVICE)
    x, grad = (torch.randn(1, sequence, width, device=DEVICE) for _ in range(2))
    x.requires_grad_()
    leaves = [x, *block.parameters()]

    def gradients_of(run: Callable[[Any], Any], x: Any, grad: Any, leaves: Sequence[Any]) -> list[Any]:
        """Make a step; return the output and the gradients."""
        for leaf in leaves:
            leaf.grad = None
        y = run(x)
        y.backward(grad)
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    exact = layer(torch, width).to(DEVICE, torch.float64)
    exact.load_state_dict(block.state_dict())
    x64 = x.detach().double().requires_grad_()
    truth = gradients_of(exact, x64, grad.double(), [x64, *exact.parameters()])
    names = [TORCH, TF32, *(f"override {one}" for one in precisions)]
    if not SIMULATOR:
        names += [COMPILED, SAME_OPTIONS, *(f"{COMPILED}, external {one}" for one in precisions)]
    torch_ms = math.nan
    for name in names:
        run = compiled(torch, block, name)
        with way(torch, name):
            step = functools.partial(gradients_of, run, x, grad, leaves)
            first_s = elapsed(step)
            with counted() as seen:
                found = step()
            errors = [float((one - other).norm() / other.norm()) for one, other in zip(found, truth, strict=True)]
            ms = 1e3 * settled_s(step, 0.0 if SIMULATOR else STEADY_SECONDS)
        torch_ms = ms if name == TORCH else torch_ms
        yield (
            {"way": name, "width": width, "sequence": sequence, "ms": ms}
            | {"speed_over_torch": torch_ms / ms, "output_error": errors[0]}
            | {"gradient_error": max(errors[1:]), "products": len(seen), "first_s": first_s}
        )


def step_claims(frame: pd.DataFrame) -> dict[str, bool]:
    """Check errors and speeds."""
    rows = frame.set_index("way")
    ours = [name for name in rows.index if name.endswith("bf16x6")]
    plain = rows.loc[TORCH]
    return {
        "with products in bf16x6, no error is a fifth larger than with PyTorch's float32": all(
            rows.loc[name, error] <= 1.2 * plain[error] for name in ours for error in ("output_error", "gradient_error")
        ),
        "with products in bf16x6, a step is at least 1.5 times as fast as PyTorch's in float32": all(
            rows.loc[name, "speed_over_torch"] >= 1.5 for name in ours
        ),
    }


def training(
    steps: int = 400,
    width: int = 512,
    layers: int = 4,
    sequence: int = 256,
    batch: int = 16,
    precisions: Sequence[str] = (IEEE, "bf16x6", "tf32"),
) -> Iterator[pd.DataFrame]:
    """Train a small transformer to predict the next token; one row per way and step, with its loss.

    A token is the sum of the two before it modulo the vocabulary's size, or in a tenth of all cases a random one.

    Parameters
    ----------
    steps: Steps of AdamW.
    width: Width of the model.
    layers: Transformer blocks.
    sequence: Tokens of a sequence.
    batch: Sequences per step.
    """
    import torch

    from numba_gemm.torch.operators import DEVICE

    rows: list[dict[str, Any]] = []
    for name in (TORCH, TF32, *(f"override {one}" for one in precisions)):
        torch.manual_seed(SEED)
        model = torch.nn.ModuleDict(
            {
                "embedding": torch.nn.Embedding(VOCABULARY, width),
                "position": torch.nn.Embedding(sequence, width),
                "blocks": torch.nn.TransformerEncoder(layer(torch, width), layers, enable_nested_tensor=False),
                "head": torch.nn.Linear(width, VOCABULARY),
            }
        ).to(DEVICE)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(sequence, device=DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        draw = torch.Generator().manual_seed(SEED)
        for step in range(steps):
            tokens = sequences(torch, draw, batch, sequence + 1).to(DEVICE)
            with way(torch, name):
                x = model["embedding"](tokens[:, :-1]) + model["position"].weight
                logits = model["head"](model["blocks"](x, mask=mask, is_causal=True))
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            rows.append({"way": name, "step": step, "loss": loss.item()})
        yield pd.DataFrame(rows)


def sequences(torch: Any, draw: Any, batch: int, length: int) -> Any:
    """Return random sequences of tokens."""
    tokens = torch.randint(VOCABULARY, (batch, length), generator=draw)
    random = torch.rand(batch, length, generator=draw) < 0.1
    for i in range(2, length):
        tokens[:, i] = torch.where(random[:, i], tokens[:, i], (tokens[:, i - 1] + tokens[:, i - 2]) % VOCABULARY)
    return tokens


def last_losses(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the mean loss of the last steps of each way, beside that of PyTorch's float32."""
    last = frame[frame["step"] > frame["step"].max() - SHOWN_LOSSES]
    means = last.groupby("way", sort=False)["loss"].mean().reset_index()
    return means.assign(over_torch=means["loss"] / means.loc[means["way"] == TORCH, "loss"].item())


def training_claims(frame: pd.DataFrame) -> dict[str, bool]:
    """Check that training works, and in which precisions as in float32."""
    means = last_losses(frame).set_index("way")["over_torch"]
    first, last = (frame[frame["way"] == TORCH]["loss"].iloc[i] for i in (0, -1))
    same = [name for name in means.index if name.endswith((IEEE, "bf16x6"))]
    return {
        "the loss falls by half": last < first / 2,
        "in ieee and bf16x6, the last losses are PyTorch's in float32 to a twentieth": all(
            abs(means[name] - 1) <= 0.05 for name in same
        ),
    }


def plot_losses(frame: pd.DataFrame, figure: Figure) -> None:
    """Plot the loss of PyTorch's float32 against the step, and below it by how much that of each other way differs."""
    losses = frame.pivot_table(index="step", columns="way", values="loss", sort=False)
    above, below = figure.subplots(2, sharex=True)
    above.plot(losses.index, losses[TORCH], linewidth=1.2)
    above.set(ylabel="loss of torch (cross-entropy)")
    for (name, loss), mark in zip(losses.drop(columns=TORCH).items(), "xo+.", strict=False):
        differs = (loss / losses[TORCH] - 1).abs()
        below.plot(losses.index, differs.where(differs > 0), mark, markersize=4, label=str(name))
    below.set(xlabel="step", ylabel="difference, relative", yscale="log")
    below.legend()
    for axis in (above, below):
        axis.grid(True, alpha=0.2)


STEP = Experiment(
    lesson="Forward and backward pass of a transformer block in PyTorch, with products computed here.",
    run=transformer_step,
    claims=step_claims,
    needs=("gpu", "torch"),
    small={"width": 16, "sequence": 8, "precisions": (IEEE,)},
    seed=SEED,
)
TRAINING = Experiment(
    lesson="Losses of a small transformer that is trained with products in several precisions.",
    run=training,
    claims=training_claims,
    needs=("gpu", "torch"),
    small={"steps": 2, "width": 16, "layers": 1, "sequence": 4, "batch": 2, "precisions": (IEEE,)},
    summary=last_losses,
    plot=plot_losses,
    seed=SEED,
)
