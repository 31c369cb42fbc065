"""Quality of the models' choices: candidates for random products, timed in turn on the same operands.

For each product and precision, the candidates that the model expects to take not much longer than its choice are
checked against each other on integers, whose sums are exact, and then timed by replays of CUDA graphs, as `autotune`
does. The shapes differ from those that the model was fitted to, unless the seed is the same.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import numpy as np
import pandas as pd

from numba_gemm.gemm import heuristics
from numba_gemm.gemm.autotune import diverse
from numba_gemm.gemm.candidate_bench import CandidateBench
from numba_gemm.gemm.fp32_auto import AUTO_K, AUTO_PRECISION
from numba_gemm.gemm.heuristics import Choice
from numba_gemm.gemm.precision import FP32_AUTO, IEEE, KNOWN, STAGES, tensor_stage
from numba_gemm.gemm.request import Request
from numba_gemm.kernels.product import Product
from numba_gemm.lab.bench.random_cases import fetch_kernels, product_of, random_cases
from numba_gemm.lab.harness.environment import GRAPHS
from numba_gemm.lab.harness.experiment import Experiment
from numba_gemm.runtime.device import DeviceProperties, current_device, device_properties
from numba_gemm.runtime.driver import device_scope
from numba_gemm.simulator.switch import SIMULATOR

# Columns of the summary, the words of their claims, and limits: the choice's time over that of the fastest candidate.
LIMITS = (("slower_mean", "on average", 1.03), ("slower_worst", "at worst", 1.15))
PRODUCT = ["m", "n", "k", "layout", "aligned", "precision"]


def candidates_of(
    product: Product, precision: str, asked: str, gpu: DeviceProperties, most: int, within: float
) -> list[Choice]:
    """Return the candidates to time, first the model's choice; if `fp32_auto` was asked for, of both precisions."""
    ranked = heuristics.ranked(heuristics.problem(product, gpu, precision))
    others = ranked[1:]
    if asked == FP32_AUTO and product.k >= AUTO_K and tensor_stage(gpu.cc) is STAGES[0]:
        (other,) = {IEEE, AUTO_PRECISION} - {precision}
        others += heuristics.ranked(heuristics.problem(product, gpu, other))
    near = (one for one in others if one.clocks <= within * ranked[0].clocks)
    return diverse([ranked[0], *sorted(near, key=lambda one: one.clocks)], most)


def choices(
    shapes: int = 100,
    high: int = 20_000,
    seed: int = 20261211,
    precisions: Sequence[str] = KNOWN,
    most: int = 16,
    within: float = 1.5,
    rounds: int = 5,
) -> Iterator[pd.DataFrame]:
    """Time candidates for random products; one row per candidate, the model's choice first.

    Parameters
    ----------
    shapes: Number of random shapes.
    high: Largest extent.
    seed: Seed of shapes.
    precisions: Precisions to choose in.
    most: Largest number of candidates of a product.
    within: Factor of the choice's expected time up to which others are timed.
    rounds: Times that each candidate is timed, of which the median counts.
    """
    device = current_device()
    gpu = device_properties(device)
    drawn = dict.fromkeys(random_cases(shapes, seed, high))
    cases = [(*shape, layout, aligned, one) for shape, layout, aligned in drawn for one in dict.fromkeys(precisions)]
    described = [(case, *product_of(*case, gpu)) for case in cases]
    ranked = [
        candidates_of(product, request.precision, case[-1], gpu, most, within) for case, request, product in described
    ]
    fetch_kernels(((choice, one[-1]) for one, found in zip(described, ranked) for choice in found), gpu)
    rows = list[dict[str, Any]]()
    for (case, request, product), found in zip(described, ranked):
        for choice, us in timed(request, product, found, rounds):
            row: dict[str, Any] = dict(zip(PRODUCT, case)) | {"by": choice.precision}
            row |= {"stage": choice.stage.name, "config": choice.config.name}
            if choice.partition is not None:
                row |= {"blocks": choice.partition.blocks, "whole": choice.partition.whole}
            row |= {"swapped": choice.swapped, "chosen": choice is found[0]}
            rows.append(row | {"expected_us": choice.clocks / gpu.clock_hz * 1e6, "us": us})
        yield pd.DataFrame(rows)


def timed(request: Request, product: Product, found: Sequence[Choice], rounds: int) -> list[tuple[Choice, float]]:
    """Check candidates against each other; return those that are right, with microseconds of a product."""
    with nullcontext() if SIMULATOR else device_scope(request.device), ExitStack() as memory:
        bench = CandidateBench(request, memory)
        assert bench.part.product == product
        bench.make_room(found)
        right = [one for one in found if bench.checked(one) is not None]
        said = f"{request.shape}, K = {request.k}, in {request.precision}: the model's choice, {found[0].config.name},"
        if not right or right[0] is not found[0]:
            raise RuntimeError(f"{said} cannot run")
        if len(right) == 1 < len(found):
            raise RuntimeError(f"{said} and all other candidates have different results")
        return list(zip(right, bench.timed(right, 1 if SIMULATOR else rounds)))


def slower(frame: pd.DataFrame) -> pd.Series:
    """Return the time of each choice over that of the fastest candidate, for the products with several candidates."""
    frame = frame[frame.groupby(PRODUCT)["us"].transform("size") > 1]
    return frame[frame["chosen"]].set_index(PRODUCT)["us"] / frame.groupby(PRODUCT, sort=False)["us"].min()


def named(*case: Any) -> str:
    """Return a product, given the columns of its extents, layout and alignment, in words."""
    m, n, k, layout, aligned = case
    return f"{m}x{n}x{k} {layout}{'' if aligned else ' unaligned'}"


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row per precision.

    Of the products with several candidates, ``slower_mean`` and ``slower_worst`` are the choice's time over that of the
    fastest; ``expected_error`` is the root mean square of the logarithm of expected over measured time.
    """
    frame = frame[frame.groupby(PRODUCT)["us"].transform("size") > 1]
    error = np.log(frame["expected_us"] / frame["us"])
    found = []
    for precision, part in slower(frame).groupby(level="precision", sort=False):
        own = frame["precision"] == precision
        worst: Any = part.idxmax()
        row = {"precision": precision, "products": len(part), "candidates": int(own.sum())}
        row |= {"slower_mean": part.mean(), "slower_worst": part.max()}
        row |= {"worst_case": named(*worst[:-1])}
        found.append(row | {"expected_error": float(np.sqrt(np.mean(error[own] ** 2)))})
    return pd.DataFrame(found)


def claims(frame: pd.DataFrame) -> dict[str, Any]:
    """Compare the choices with the fastest candidates."""
    told = {row["precision"]: row for row in summary(frame).to_dict("records")}
    found = dict[str, Any]()
    for precision, row in told.items():
        for column, words, limit in LIMITS:
            said = f"choices in {precision} take at most {limit:.4g} of the fastest candidate's time {words}"
            found[said] = row[column] <= limit
    return found


EXPERIMENT = Experiment(
    run=choices,
    claims=claims,
    small={"shapes": 3, "high": 30, "precisions": ("ieee",), "most": 3},
    allowed={"precisions": KNOWN},
    summary=summary,
    summary_file="choices_summary.csv",
    operands="uniform from -1 to 1",
    timing=GRAPHS,
    cache="hot",
)
