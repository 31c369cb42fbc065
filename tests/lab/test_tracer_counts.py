"""The tracer against an H200's counters: the committed comparison, and some of its stages traced again."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from support.covering import others_exhaustive

from numba_gemm.kernels.ladder import STAGES
from numba_gemm.lab.bench import tracer

pytestmark = pytest.mark.simulator
COUNTED = Path(__file__).parents[2] / tracer.COUNTED


@pytest.fixture(scope="module")
def counts():
    return pd.read_csv(COUNTED)


def test_all_stages_were_counted_in_their_configurations(counts):
    counted = set(zip(counts["stage"], counts["config"], strict=True))
    not_counted = "short_sums", "small_matrices"  # not yet
    there = {(name, stage.configs[0].name) for name, stage in STAGES.items() if name not in not_counted}
    assert there == counted


def test_the_committed_comparison_is_of_these_counts(counts):
    compared = pd.read_csv(COUNTED.with_name("tracer.csv"))
    traces = compared[[*tracer.KEY, "traced"]].rename(columns={"traced": "value"})
    again = tracer.compare(traces, counts)
    assert again[[*tracer.KEY, "counted", "traced", "within"]].equals(
        compared[[*tracer.KEY, "counted", "traced", "within"]]
    )
    assert len(compared) > 100
    assert compared["within"].all()


@pytest.mark.parametrize(
    "name",
    others_exhaustive(("naive", "coalesced", "shared_tile", "warp_tiled", "thin"), ("coalesced",)),
)
def test_a_stage_is_traced_as_it_was_counted(name, counts):
    found = tracer.compare(pd.DataFrame(tracer.traced(name)), counts[counts["stage"] == name])
    # `thin` was counted when it filled all four slots; now it copies one chunk, since the sums have no other.
    expected = ((found["stage"] == "thin") & (found["accesses"] == "shared copies")).map({True: 0.25, False: 1.0})
    assert (found["ratio"] == expected).all()


def test_what_one_side_lacks_is_off():
    row = {"stage": "naive", "config": "c", "m": 1, "n": 1, "k": 1, "accesses": "global loads", "quantity": "requests"}
    one, other = pd.DataFrame([row | {"value": 5}]), pd.DataFrame([row | {"quantity": "sectors", "value": 7}])
    found = tracer.compare(one, other)
    assert found[["counted", "traced"]].to_numpy().tolist() == [[0, 5], [7, 0]]
    assert not found["within"].any()
    near = tracer.compare(one, one.assign(value=[5.09]))
    assert list(near["within"]) == [True]
