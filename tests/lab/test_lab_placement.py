"""Mapped memory beside streams, allocation, and NUMA nodes: predictions, claims, and what the host is asked."""

from __future__ import annotations

import os
import sys

import pandas as pd
import pytest

from numba_gemm.lab.memory import allocation, mapped_streams, numa, transfers

MIB = 1 << 20

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells its nodes there")


def failures(claims):
    return [sentence for sentence, holds in claims.items() if not holds]


# ----------------------------------------------------------------------------------------------------- mapped streams


def test_predicted_times_of_mapped_memory_and_streams():
    alone = {"there": 3.0, "back": 2.0, "kernel": 4.0}
    assert mapped_streams.predicted_ms("staged", 1, **alone) == 9
    assert mapped_streams.predicted_ms("staged", 5, **alone) == 5
    assert mapped_streams.predicted_ms("read", 1, **alone) == 4 + 2
    assert mapped_streams.predicted_ms("written", 1, **alone) == 3 + 4
    assert mapped_streams.predicted_ms("mapped", 1, **alone) == 4


def streams_frame(**factors):
    rows = []
    for turns, kernel in ((1, 0.1), (100, 2.4)):
        for way, count in [("staged", 1), ("staged", 4), ("read", 1), ("written", 1), ("mapped", 1)]:
            predicted = mapped_streams.predicted_ms(way, count, 1.2, 1.2, kernel)
            ms = 1.1 * predicted * factors.get(f"{way}_{count}", 1)
            rows.append({"way": way, "streams": count, "turns": turns, "there_ms": 1.2, "kernel_ms": kernel, "ms": ms})
            rows[-1]["predicted_ms"] = predicted
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({}, None),
        ({"mapped_1": 3}, "one kernel on mapped memory"),
        ({"read_1": 2}, "only read or only write"),
        ({"mapped_1": 2}, "a quarter longer than the best"),
        ({"staged_4": 1.3}, "what is predicted"),
        ({"mapped_1": 0.8}, "what the bus does"),
    ],
)
def test_claims_of_mapped_streams_can_fail(wrong, words):
    failed = failures(mapped_streams.EXPERIMENT.claims(streams_frame(**wrong)))
    assert any(words in sentence for sentence in failed) if words else not failed


# --------------------------------------------------------------------------------------------------------- allocation


def allocation_frame(aligned=512, kept=3.0, large=1.0, trimmed=1.0, waits=1.0, stream_ordered=2.0):
    rows = []
    for way, us_per_mib in ((allocation.DIRECT, large), (allocation.TRIMMED, trimmed), (allocation.KEPT, 0)):
        for size in (MIB // 16, 16 * MIB, 64 * MIB, 1024 * MIB):
            us = 2 + us_per_mib * 4 * size / MIB
            busy = 2000 * waits if way == allocation.DIRECT else stream_ordered
            rows.append({"way": way, "bytes": size, "us": us, "free_busy_us": busy, "busy_us": 2000})
            rows[-1]["aligned_to"] = aligned
    rows[-1]["us"] = kept
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({}, None),
        ({"aligned": 128}, "multiple of 256"),
        ({"kept": 9.0}, "does not depend on the size"),
        ({"large": 0.1}, "five times as fast"),
        ({"trimmed": 0.05}, "trimmed"),
        ({"waits": 0.5}, "cuMemFree waits"),
        ({"stream_ordered": 300}, "in stream order"),
    ],
)
def test_claims_of_allocation_can_fail(wrong, words):
    failed = failures(allocation.EXPERIMENT.claims(allocation_frame(**wrong)))
    assert any(words in sentence for sentence in failed) if words else not failed


def test_predicted_times_of_allocation():
    frame = allocation.predicted(allocation_frame())
    found = frame.set_index(["way", "bytes"])["predicted_us"]
    assert set(found[allocation.KEPT]) == {2}
    assert found[allocation.DIRECT, 1024 * MIB] == pytest.approx(2 + 4 * 1024, rel=0.01)
    assert found[allocation.DIRECT, 64 * MIB] == pytest.approx(2 + 4 * 64, rel=0.01)


# --------------------------------------------------------------------------------------------------------- NUMA nodes


def test_lists_of_numbers():
    assert numa.numbers("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert numa.numbers("\n") == set()


@linux
def test_this_thread_runs_on_the_processors_of_the_nodes():
    nodes = numa.processors()
    if not nodes:
        pytest.skip("this system tells no nodes")
    assert set().union(*nodes.values()) == os.sched_getaffinity(0)
    node = next(node for node, found in nodes.items() if found)
    before = os.sched_getaffinity(0)
    with numa.running_on(node):
        assert os.sched_getaffinity(0) == nodes[node]
    assert os.sched_getaffinity(0) == before
    assert numa.distance(node, node) == numa.NEAREST


@linux
def test_memory_is_filled_wherever_it_is_placed():
    nodes = numa.processors() or {0: set()}
    array = numa.placed(next(iter(nodes)), 5000)
    assert list(array[[0, 999, 1000, 4999]]) == [0, 999, 0, 999]


def numa_frame(pinned=1.0, thread=1.0, host=0.6):
    rows = []
    for node in (0, 1):
        for on in (0, 1):
            distance, common = 10 if node == on else 21, {"memory_node": node, "thread_node": on, "link_gb_s": 63.0}
            common |= {"distance": distance}
            speed = 55 * (pinned if node else 1) * (thread if on else 1)
            speeds = {
                transfers.ON_HOST: 10 * (1 if node == on else host),
                transfers.PAGEABLE: 9,
                transfers.PINNED: speed,
            }
            rows += [common | {"memory": memory, "direction": "one", "gb_s": gb_s} for memory, gb_s in speeds.items()]
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({}, None),
        ({"pinned": 0.7}, "whichever node"),
        ({"thread": 0.9}, "wherever its thread runs"),
        ({"host": 1.0}, "its own node"),
    ],
)
def test_claims_of_nodes_can_fail(wrong, words):
    failed = failures(numa.EXPERIMENT.claims(numa_frame(**wrong)))
    assert any(words in sentence for sentence in failed) if words else not failed


def test_predicted_speeds_of_nodes():
    frame = numa.predicted(numa_frame()).set_index(["memory", "memory_node", "thread_node"])["predicted_gb_s"]
    assert frame[transfers.PINNED, 1, 0] == frame[transfers.PINNED, 0, 0] == 63
    assert frame[transfers.ON_HOST, 1, 1] == frame[transfers.PAGEABLE, 0, 0] == 10
    assert frame[transfers.ON_HOST, 1, 0] == frame[transfers.PAGEABLE, 0, 1] == pytest.approx(100 / 21)


@linux
def test_one_node_is_a_reason(monkeypatch):
    from numba_gemm.lab.harness.experiment import Unavailable

    monkeypatch.setattr(numa, "processors", lambda: {0: {0}})
    with pytest.raises(Unavailable, match="has 1 NUMA node"):
        numa.EXPERIMENT.frame()
