"""Products of random shapes and layouts, and router gates of mixture-of-experts models, each contender alone.

Times are medians of CUDA-graph replays of one contender while nothing else runs, and of a few batches of plain calls,
in which the host's time counts. Ratios are those of the replays. Long products are timed once power and clocks have
settled. Results are verified against float64 before they are timed. cuBLAS is called through PyTorch and, where it
reads the operands in place and launching does not decide, by plain launches through CuPy; the faster one counts, which
``cublas_via`` names.
"""

import contextlib
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from statistics import geometric_mean
from typing import Any, Final

import pandas as pd

from numba_gemm import explain, tiled_sgemm
from numba_gemm.gemm import heuristics
from numba_gemm.gemm.precision import IEEE
from numba_gemm.lab.bench import steady
from numba_gemm.lab.bench.buffers import NORMAL, HostLibrary, Reference, TorchLibrary, call_on_nan, on_stream, optional
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.bench.random_cases import fetch_kernels, pitch, product_of, random_cases
from numba_gemm.lab.bench.results import CUBLAS
from numba_gemm.lab.harness.environment import GRAPHS
from numba_gemm.lab.harness.experiment import Experiment
from numba_gemm.runtime import ahead
from numba_gemm.runtime.device import current_device, device_properties
from numba_gemm.runtime.timing import plain_call_us, time_alone

WINDOW_S, CALLS_S, MOST_CALLS, BATCHES = 0.04, 0.01, 2000, 5
# Products that take `LIMITED_US` or more may be limited by power. They are timed in windows of `LIMITED_WINDOW_S` until
# the medians of two in a row differ by less than `SETTLED`.
LIMITED_US, LIMITED_WINDOW_S, SETTLED = 100.0, 0.15, 0.01
FP32_AUTO: Final = "fp32_auto"
BF16X6: Final = "bf16x6"
# Least ratio at every shape, by column: over cuBLAS, over the faster of cuBLAS and float32, over cuBLAS.
LEAST: Final = {"ieee_ratio": 0.9, "auto_ratio": 0.95, "bf16x6_ratio": 0.5}
BY_CUPY: Final = f"{CUBLAS}, cupy"
LEAST_US = 10.0  # time of cuBLAS below which plain launches through CuPy take longer
Calls = dict[str, tuple[str, Callable[[], Any]]]  # by name; the precision by whose bound the result is judged


def matrix(torch: Any, generator: Any, aligned: bool, rows: int, cols: int, stored: str) -> Any:
    """Draw a matrix, or with "T" the transpose of a row-major one; its rows are aligned, or have an odd pitch."""
    down, across = (rows, cols) if stored == "N" else (cols, rows)
    step = pitch(across, aligned)
    flat = torch.randn(down * step + 4, device="cuda", generator=generator)[0 if aligned else 1 :]
    values = flat[: down * step].view(down, step)[:, :across]
    return values if stored == "N" else values.T


def random_products(shapes: int = 300, high: int = 20_000, seed: int = 25) -> Iterator[dict[str, Any]]:
    """Time float32, `fp32_auto`, `bf16x6` and cuBLAS SGEMM at random shapes; one row per shape.

    In a third of the products, matrices have an odd pitch and begin one element after an aligned address.

    Parameters
    ----------
    shapes: Number of random shapes.
    high: Largest extent.
    seed: Seed of shapes and operands.
    """
    import torch

    generator, cases = torch.Generator(device="cuda").manual_seed(seed), random_cases(shapes, seed, high)
    gpu = device_properties(current_device())
    products = [
        product_of(*shape, layout, aligned, precision, gpu)
        for (shape, layout, aligned), precision in itertools.product(cases, (IEEE, FP32_AUTO, BF16X6))
    ]
    chosen = (
        (heuristics.best(heuristics.problem(product, gpu, request.precision)), product) for request, product in products
    )
    fetch_kernels(chosen, gpu)
    library = TorchLibrary(torch)
    with library.stream() as stream:
        for shape, layout, aligned in cases:
            m, n, k = shape
            draw = functools.partial(matrix, torch, generator, aligned)
            a, b, c = draw(m, k, layout[0]), draw(k, n, layout[1]), draw(m, n, "N")
            auto: str = explain(a, b, precision=FP32_AUTO).precision
            row: dict[str, Any] = {**shape._asdict(), "layout": layout, "aligned": aligned, "auto": auto}
            calls: Calls = {CUBLAS: (IEEE, functools.partial(torch.matmul, a, b, out=c)), **by_cupy(a, b, c)}
            bounds: dict[Any, str] = {IEEE: IEEE, FP32_AUTO: auto, BF16X6: BF16X6}
            for name, bound in bounds.items():
                calls[name] = bound, functools.partial(tiled_sgemm, a, b, out=c, precision=name)
            row |= measured(library, stream, calls, a, b, c)
            theirs, own = row[f"{CUBLAS}_us"], row[f"{IEEE}_us"]
            row |= {f"{IEEE}_ratio": theirs / own, "auto_ratio": min(theirs, own) / row[f"{FP32_AUTO}_us"]}
            yield row | {f"{BF16X6}_ratio": theirs / row[f"{BF16X6}_us"]}


def router_gates(
    m: Sequence[int] = (1, 8, 64, 256, 512, 1024, 2048, 4096, 8192),
    n: Sequence[int] = (64, 256, 768),
    k: Sequence[int] = (3072, 7168),
    seed: int = 25,
) -> Iterator[dict[str, Any]]:
    """Time products of activations in float32 or bfloat16 and float32 weights, stored as PyTorch's linear layers do.

    PyTorch computes in float32, for which it converts activations in bfloat16; CuPy, which has no bfloat16, is left out
    for those.

    Parameters
    ----------
    m: Numbers of tokens.
    n: Numbers of experts.
    k: Widths of the model.
    """
    import torch

    generator, library = torch.Generator(device="cuda").manual_seed(seed), TorchLibrary(torch)
    shapes = [Shape(rows, cols, depth) for depth in k for cols in n for rows in m]
    with library.stream() as stream:
        for shape, dtype in itertools.product(shapes, (torch.float32, torch.bfloat16)):
            weight = torch.randn(shape.n, shape.k, device="cuda", generator=generator)
            x = torch.randn(shape.m, shape.k, device="cuda", generator=generator).to(dtype)
            out = torch.empty(shape.m, shape.n, device="cuda")
            w = weight.T
            auto: str = explain(x, w, precision=FP32_AUTO).precision
            calls: Calls = {
                CUBLAS: (IEEE, functools.partial(float32_product, torch, x, w, out)),
                **(by_cupy(x, w, out) if dtype == torch.float32 else {}),
                FP32_AUTO: (auto, functools.partial(tiled_sgemm, x, w, out=out, precision=FP32_AUTO)),
            }
            row = {**shape._asdict(), "activations": str(dtype).removeprefix("torch."), "auto": auto}
            row |= measured(library, stream, calls, x.float(), w, out)
            yield row | {"auto_ratio": row[f"{CUBLAS}_us"] / row[f"{FP32_AUTO}_us"]}


def float32_product(torch: Any, x: Any, weight: Any, out: Any) -> None:
    """Multiply activations of any type with float32 weights, as PyTorch code does."""
    torch.matmul(x.float(), weight, out=out)


def by_cupy(a: Any, b: Any, c: Any) -> Calls:
    """Return the call of cuBLAS through CuPy, if it is there; none if it would copy a matrix whose rows have gaps."""
    cupy = optional("cupy")
    if cupy is None or not (c.is_contiguous() and all(x.is_contiguous() or x.T.is_contiguous() for x in (a, b))):
        return {}
    x, y, out = map(cupy.asarray, (a, b, c))
    return {BY_CUPY: (IEEE, functools.partial(cupy.matmul, x, y, out=out))}


def measured(library: HostLibrary, stream: int, calls: Calls, a: Any, b: Any, c: Any) -> dict[str, Any]:
    """Verify calls that write A @ B to `c`, then time replays and plain calls of each; keep the faster cuBLAS."""
    row = dict[str, Any]()
    reference = Reference(library, a, b)
    for name, (precision, call) in calls.items():
        call_on_nan(library, c, on_stream(call), stream)
        verdict, median, _ = reference.judge(c, precision)
        if not verdict.ok:
            raise RuntimeError(f"{name} at {tuple(a.shape)} @ {tuple(b.shape)}: {verdict}")
        row[f"{name}_error"] = median
    del reference
    ahead.wait_until_idle()
    other = {f"{CUBLAS}_error": row.pop(f"{BY_CUPY}_error", math.nan), "cublas_via": "cupy"}
    for name, (_, call) in calls.items():
        if name != BY_CUPY:
            row[f"{name}_us"], row[f"{name}_call_us"] = alone(stream, call)
    row["cublas_via"] = "torch"
    if BY_CUPY in calls and row[f"{CUBLAS}_us"] >= LEAST_US:
        us, call_us = alone(stream, calls[BY_CUPY][1], graphs=False)
        if us < row[f"{CUBLAS}_us"]:
            row |= other | {f"{CUBLAS}_us": us, f"{CUBLAS}_call_us": call_us}
    return row


def alone(stream: int, call: Callable[[], Any], graphs: bool = True) -> tuple[float, float]:
    """Return microseconds per replay and per plain call of a contender while nothing else runs.

    Replays of long products count once power and clocks have settled.
    """
    spans = time_alone(on_stream(call), stream=stream, max_repeats=400, graphs=graphs)
    with contextlib.closing(spans):
        us, *_ = steady.window(spans, WINDOW_S)
        if us >= LIMITED_US:
            us, *_ = steady.steady_state(spans, LIMITED_WINDOW_S, within=SETTLED)
    calls = (plain_call_us(on_stream(call), stream, us, CALLS_S, MOST_CALLS) for _ in range(BATCHES))
    return us, statistics.median(calls)


def claims_of_random(frame: pd.DataFrame) -> dict[str, Any]:
    """Compare all precisions with the best alternative."""
    ieee, auto, bf16x6 = LEAST.values()
    return {
        f"float32 has at least {ieee} of cuBLAS's speed at every shape": frame["ieee_ratio"] >= ieee,
        "float32 has 1.05 of cuBLAS's speed in the geometric mean": geometric_mean(frame["ieee_ratio"]) >= 1.05,
        f"fp32_auto has at least {auto} of the faster one's speed at every shape": frame["auto_ratio"] >= auto,
        f"bf16x6 has at least {bf16x6} of cuBLAS SGEMM's speed at every shape": frame["bf16x6_ratio"] >= bf16x6,
    }


def claims_of_gates(frame: pd.DataFrame) -> dict[str, Any]:
    """Compare `fp32_auto` with PyTorch in float32."""
    many = frame[frame["m"] >= 512]
    return {
        "fp32_auto is at least as fast as PyTorch at every router gate, in replays": frame["auto_ratio"] >= 1.0,
        "fp32_auto is at least twice as fast as PyTorch from 512 tokens on, in replays": many["auto_ratio"] >= 2.0,
        "the error of fp32_auto is no larger than PyTorch's": frame[f"{FP32_AUTO}_error"] <= frame[f"{CUBLAS}_error"],
    }


experiment = functools.partial(
    Experiment,
    needs=("gpu", "torch"),
    unavailable="the simulator has no clock worth reading, and no cuBLAS",
    operands=NORMAL,
    timing=GRAPHS,
    cache="hot",
)
RANDOM_PRODUCTS = experiment(
    lesson="Speed at random shapes, layouts and alignments beside cuBLAS SGEMM, each contender alone.",
    run=random_products,
    claims=claims_of_random,
)
ROUTER_GATES = experiment(
    lesson="Router gates of mixture-of-experts models: few columns, float32 weights, activations in two types.",
    run=router_gates,
    claims=claims_of_gates,
)
