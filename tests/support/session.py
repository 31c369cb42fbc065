"""Options of a whole run of the tests: random order, the announcement of its length, Hypothesis without time limits."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

SEED = os.environ.get("NUMBA_GEMM_TEST_SEED")
# Minutes of one otherwise idle core on the simulator, by the -m option of a complete run.
CORE_MINUTES = {"not exhaustive": 20, "exhaustive": 17}

# A busy machine takes long for anything: no time limit per example.
settings.register_profile("numba_gemm", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("numba_gemm")


def length(count: int, minutes: float | None, workers: int) -> str:
    """Return a line that says how many tests there are, and how long they take if that is known."""
    if minutes is None:
        return f"{count} tests"
    return f"{count} tests: about {max(minutes / workers, 1):.0f} min on idle cores (processes: {workers})"


def announcement(config: pytest.Config, count: int) -> str:
    """Return the line that announces a run; its time is known for the simulator and if no tests were named."""
    from numba_gemm.simulator.probe import simulator_requested

    complete = config.args_source is not pytest.Config.ArgsSource.ARGS and not config.getoption("keyword")
    minutes = CORE_MINUTES.get(config.getoption("markexpr")) if complete and simulator_requested() else None
    return length(count, minutes, len(config.getoption("tx", None) or [None]))


def pytest_report_header() -> list[str]:
    return [f"random order: NUMBA_GEMM_TEST_SEED={SEED}"] if SEED else []


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> str:
    return announcement(config, len(items))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """Announce the run once, when the first worker has collected the tests."""
    reporter = node.config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None and not getattr(reporter, "announced", False):
        reporter.announced = True
        reporter.ensure_newline()
        reporter.write_line(announcement(node.config, len(ids)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if SEED:
        random.Random(SEED).shuffle(items)
