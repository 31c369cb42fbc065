"""Fit the cost model of float32 multiply-adds to results of ``numba-gemm lab choices``.

``python -m numba_gemm.lab.bench.fit choices.csv ...`` prints constants of `gemm.cost_model` and rates of
`gemm.ladder_rates`; nothing is written. Each parameter in turn is raised and lowered, and keeps a value that makes the
loss smaller; steps become shorter. The loss of a product is the logarithm of its choice's time over that of the fastest
candidate, and the mean square of that of expected over measured time, in which faster candidates count more. JSON files
beside the CSV files name the GPUs; with ``NUMBA_ENABLE_CUDASIM=1``, none is needed.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from numba_gemm.gemm import cost_model, heuristics, ladder_heuristics
from numba_gemm.gemm.ladder_rates import RATES
from numba_gemm.gemm.precision import IEEE
from numba_gemm.gemm.problem import Problem
from numba_gemm.lab.bench.choices import PRODUCT
from numba_gemm.lab.bench.random_cases import product_of
from numba_gemm.models.gpu_names import compute_capabilities
from numba_gemm.runtime.device import DeviceProperties

CONSTANTS = (
    *("LAUNCH", "SOONER", "PIECE", "BLOCK", "OVERLAP", "MEMORY_OVERLAP", "STORE", "STORE_FLOATS", "PARTIAL_SECTORS"),
    *("STORE_COLUMNS", "LONE_COLUMNS", "MEET", "WAIT", "PUBLISH", "TRIP", "ADDING", "ADDING_EARLY", "APART"),
    *("APART_BY_FOUR", "SHARED_RATE", "LONE_RATE", "CHUNK_RATE", "MEMORY_EFFICIENCY", "NARROW_ROWS"),
    *("NARROW_FLOATS", "PLACE", "PLACE_FLOATS", "RUN"),
)
FIELDS = ("efficiency", "alone", "floats", "first")  # of a rate
STEPS = (0.1, 0.03, 0.01)  # relative, of parameters
HELD_OUT = 4  # one of so many products is not fitted to

RateKey = tuple[str | int, ...]
Candidate = tuple[str, str, tuple[int, int] | None, bool]  # stage, configuration, blocks and whole tiles, swapped


class Measured(NamedTuple):
    """A product, and the microseconds of its candidates."""

    wanted: Problem
    us: dict[Candidate, float]

    def has(self, key: RateKey) -> bool:
        """Return True if a configuration is among the candidates."""
        return any(stage == key[0] and config.startswith(_tile(key)) for stage, config, *_ in self.us)


def _tile(key: RateKey) -> str:
    """Return how names of configurations with a rate's tile begin."""
    return "x".join(map(str, key[1:4]))


def read(path: Path) -> list[Measured]:
    """Return the products of a result in float32."""
    gpu = json.loads(path.with_suffix(".json").read_text())["gpu"]
    (cc,) = compute_capabilities(gpu["compute_capability"])
    clock_hz, bandwidth = gpu["max_clock_mhz"] * 1e6, gpu["bandwidth_gb_s"] * 1e9
    device = DeviceProperties(gpu["name"], cc, gpu["multiprocessors"], clock_hz, 0, gpu["l2_bytes"], bandwidth)
    frame = pd.read_csv(path)
    frame = frame.reindex(columns=list(dict.fromkeys([*frame, "blocks", "whole"]))).dropna(subset=["us"])
    found = []
    for _, rows in frame[frame["precision"] == IEEE].groupby(PRODUCT, sort=False):
        us, records = dict[Candidate, float](), rows.to_dict("records")
        for row in records:
            partition = None if math.isnan(row["blocks"]) else (int(row["blocks"]), int(row["whole"]))
            us[row["stage"], row["config"], partition, row["swapped"]] = row["us"]
        m, n, k, layout, aligned, _ = (records[0][name] for name in PRODUCT)
        _, product = product_of(m, n, k, layout, aligned, IEEE, device)
        found.append(Measured(heuristics.problem(product, device), us))
    return found


def expected(wanted: Problem) -> dict[Candidate, float]:
    """Return the microseconds that the model expects of each candidate."""
    found = dict[Candidate, float]()
    for one in ladder_heuristics.ranked_ladder(wanted):
        partition = None if one.partition is None else (one.partition.blocks, one.partition.whole)
        found[one.stage.name, one.config.name, partition, one.swapped] = one.clocks / wanted.clock_hz * 1e6
    return found


def slower(products: Sequence[Measured]) -> list[float]:
    """Return the time of each product's choice over that of the fastest candidate, of those that were measured."""
    found = []
    for wanted, us in products:
        told = expected(wanted)
        known = [one for one in us if one in told]
        if known:
            found.append(us[min(known, key=told.__getitem__)] / min(us.values()))
    return found


def loss(measured: Measured) -> float:
    """Return what the fit makes small, of one product."""
    told = expected(measured.wanted)
    known = [one for one in measured.us if one in told]
    if not known:
        return 0.0
    logs, times = np.log([told[one] for one in known]), np.log([measured.us[one] for one in known])
    weights = np.exp(times.min() - times)
    return float(times[logs.argmin()] - times.min() + weights @ (logs - times) ** 2 / weights.sum())


class Parameter(NamedTuple):
    """A constant of the cost model or, with a key, a field of a rate."""

    name: str
    key: RateKey | None = None

    def read(self) -> float:
        """Return its value."""
        return float(getattr(cost_model if self.key is None else RATES[self.key], self.name))

    def write(self, value: float) -> None:
        """Change it, a constant also where it was imported, and forget what was computed with it."""
        if self.key is not None:
            changed: dict[str, Any] = {self.name: value}
            RATES[self.key] = replace(RATES[self.key], **changed)
        for module in (cost_model, ladder_heuristics) if self.key is None else ():
            if hasattr(module, self.name):
                setattr(module, self.name, value)
        ladder_heuristics.considered_of.cache_clear()

    def allows(self, value: float) -> bool:
        """Return True for values that are possible; a factor of 0 stays."""
        return value > 0 and (self.name not in ("efficiency", "MEMORY_EFFICIENCY") or value <= 1)

    def affects(self, measured: Measured) -> bool:
        """Return True if times of a product's candidates may depend on it."""
        return self.key is None or measured.has(self.key)


PARAMETERS = [*map(Parameter, CONSTANTS), *(Parameter(name, key) for key in RATES for name in FIELDS)]


def fit(products: Sequence[Measured], seconds: float) -> None:
    """Change the model's parameters until nothing helps or the time is over."""
    losses, end = [loss(one) for one in products], time.monotonic() + seconds
    for step in STEPS:
        before = math.inf
        while sum(losses) < 0.999 * before and time.monotonic() < end:
            before = sum(losses)
            for parameter in PARAMETERS:
                if time.monotonic() < end:
                    improve(parameter, step, products, losses)
            print(f"steps of {step:g}: {sum(losses) / len(losses):.5f}", flush=True)


def improve(parameter: Parameter, step: float, products: Sequence[Measured], losses: list[float]) -> None:
    """Raise or lower a parameter by a step if that makes the sum of the products' losses smaller, and update these."""
    start, affected = parameter.read(), [i for i, one in enumerate(products) if parameter.affects(one)]
    before = sum(losses[i] for i in affected)
    for value in (start * (1 + step), start / (1 + step)):
        if parameter.allows(value):
            parameter.write(value)
            found = [loss(products[i]) for i in affected]
            if sum(found) < before:
                for i, one in zip(affected, found):
                    losses[i] = one
                return
    parameter.write(start)


def is_held_out(wanted: Problem) -> bool:
    """Return True for a product that is not fitted to, in any file."""
    return (wanted.m + wanted.n + wanted.k) % HELD_OUT == 0


def described(products: Sequence[Measured]) -> str:
    """Describe how well the model chooses."""
    found = slower(products)
    mean, worst = np.mean(found), max(found)
    return f"{len(found)} products, {mean:.4f} of the fastest candidate's time on average, {worst:.3f} at worst"


def main() -> None:
    """Run the command."""
    summary = "Fit the cost model of float32 multiply-adds to results of lab choices."
    parser = argparse.ArgumentParser(prog="python -m numba_gemm.lab.bench.fit", description=summary)
    parser.add_argument("files", nargs="+", type=Path, help="CSV files of lab choices, with the JSON files beside them")
    parser.add_argument("--seconds", type=float, default=1800.0, help="most time to take (default: 1800)")
    given = parser.parse_args()
    products = [one for path in given.files for one in read(path)]
    fitted, held_out = ([one for one in products if is_held_out(one.wanted) == out] for out in (False, True))
    if not (fitted and held_out):
        parser.error(f"the files have too few products in {IEEE}; expected some to fit to, and some to hold out")
    print(f"before: {described(fitted)}; held out: {described(held_out)}")
    fit(fitted, given.seconds)
    for parameter in PARAMETERS:
        parameter.write(float(f"{parameter.read():.3g}"))
    print(f"after: {described(fitted)}; held out: {described(held_out)}")
    for name in CONSTANTS:
        print(f"{name} = {getattr(cost_model, name):g}")
    for key, rate in RATES.items():
        fields = (f"{name}={value:g}" for name in FIELDS if (value := getattr(rate, name)))
        print(f"{key}: {', '.join(fields)}")


if __name__ == "__main__":
    main()
