"""Host time of the ways in which PyTorch code calls a small product."""

import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd

from numba_gemm import tiled_sgemm
from numba_gemm.lab.harness.experiment import Experiment
from numba_gemm.runtime import ahead
from numba_gemm.runtime.device import synchronize
from numba_gemm.runtime.timing import host_time_us
from numba_gemm.simulator.switch import SIMULATOR

TORCH, DIRECT, FUNCTION = "torch.matmul", "tiled_sgemm", "numba_gemm.torch.matmul"
OPERATOR, OVERRIDE = "torch.ops.numba_gemm.matmul", "torch.matmul, override"
NO_GRAD = ", no_grad"
ROUNDS, BATCH = (1, 1) if SIMULATOR else (25, 100)
MOST_US = 8.0  # that the registered operator may take beyond a direct call
MOST_CHANGE = 0.05  # of a direct call inside no_grad


def torch_calls(extent: int = 64) -> Iterator[dict[str, Any]]:
    """Time calls that allocate their result, in turns, without waiting for the GPU; one row per way."""
    import torch

    from numba_gemm.torch import matmul, override
    from numba_gemm.torch.operators import DEVICE

    a, b = (torch.randn(extent, extent, device=DEVICE) for _ in range(2))
    operator = functools.partial(torch.ops.numba_gemm.matmul.default, a, b)
    calls: dict[str, Callable[[], Any]] = {
        TORCH: functools.partial(torch.matmul, a, b),
        DIRECT: functools.partial(tiled_sgemm, a, b) if not SIMULATOR else operator,
        FUNCTION: functools.partial(matmul, a, b),
        OPERATOR: operator,
    }
    ways = [(name, call, grad) for name, call in calls.items() for grad in (True, False)]
    spent: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], Any]) -> None:
        us = host_time_us(call, synchronize=synchronize, batch=BATCH, rounds=1)
        spent.setdefault(name, []).append(us)

    exact = a.double() @ b.double()
    for round_ in range(ROUNDS + 1):
        for name, call, grad in ways:
            with torch.set_grad_enabled(grad):
                if not round_:
                    torch.testing.assert_close(call().double(), exact, rtol=1e-4, atol=1e-3)
                timed(name + (NO_GRAD if not grad else ""), call)
        with override():
            timed(OVERRIDE, calls[TORCH])
        if not round_:  # the warm-up, which compiles
            ahead.wait_until_idle()
            spent.clear()
    medians = {name: statistics.median(us) for name, us in spent.items()}
    for name, us in medians.items():
        yield {"way": name, "extent": extent, "host_us": us}


def claims(frame: pd.DataFrame) -> dict[str, bool]:
    """Check what an operator costs, and that the grad mode costs nothing."""
    us = frame.set_index("way")["host_us"]
    return {
        f"the registered operator takes at most {MOST_US:g} us longer than a direct call": (
            us[OPERATOR] - us[DIRECT] <= MOST_US
        ),
        f"a direct call takes the same time inside no_grad, to {MOST_CHANGE:g}": (
            abs(us[DIRECT + NO_GRAD] / us[DIRECT] - 1) <= MOST_CHANGE
        ),
    }


EXPERIMENT = Experiment(
    lesson="Host time of a small product, called directly, as an operator of PyTorch, and by override.",
    run=torch_calls,
    claims=claims,
    needs=("gpu", "torch"),
    small={"extent": 8},
)
