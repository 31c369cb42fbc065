"""Tables of cases of which every run has a part, and the exhaustive set has the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest

from numba_gemm.simulator.switch import SIMULATOR


def covering(*axes: Iterable[Any]) -> list[Any]:
    """Return parameters for all combinations; on the simulator, every run has few that have each value of each axis.

    Others are in the exhaustive set.
    """
    lists = [list(axis) for axis in axes]
    usual = {tuple(i % len(values) for values in lists) for i in range(max(map(len, lists)))}
    return [
        pytest.param(
            *(values[i] for values, i in zip(lists, place)),
            marks=[pytest.mark.exhaustive] * (SIMULATOR and place not in usual),
        )
        for place in product(*(range(len(values)) for values in lists))
    ]


def others_exhaustive(values: Iterable[Any], usual: Collection[Any]) -> list[Any]:
    """Return parameters for all values; those that are not `usual` are in the exhaustive set."""
    return [pytest.param(value, marks=[pytest.mark.exhaustive] * (value not in usual)) for value in values]
