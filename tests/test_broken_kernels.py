"""The table must fail where a kernel is wrong: each stage, broken on purpose in one place, against the cases of the
ladder's table."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from types import ModuleType

import pytest
from ladder_cases import Case, run

from numba_gemm import launch
from numba_gemm.device import scheduler
from numba_gemm.ladder import STAGES

pytestmark = pytest.mark.simulator

# In the order in which they import one another; a mutant stage gets fresh copies of all of them.
DEVICE_MODULES = [f"numba_gemm.device.{name}" for name in ("matrix", "vector", "shared", "async_copy", "blend", "dot")]

BARRIER = "cuda.syncthreads()"
TILED = [name for name in STAGES if name not in ("naive", "coalesced")]


def barriers(name: str) -> int:
    return inspect.getsource(sys.modules[f"numba_gemm.ladder.{name}"]).count(BARRIER)


def nth(text: str, old: str, new: str, which: int) -> str:
    parts = text.split(old)
    assert len(parts) > which + 1, f"{old!r} does not occur {which + 1} times"
    return old.join(parts[: which + 1]) + new + old.join(parts[which + 1 :])


def mutant(name: str, module: str, old: str, new: str, which: int = 0):
    """The stage of a name, built from sources in one of which the occurrence `which` of `old` is replaced by `new`."""
    stage_module = f"numba_gemm.ladder.{name}"
    target = stage_module if module == "stage" else f"numba_gemm.device.{module}"
    originals = {fullname: sys.modules[fullname] for fullname in DEVICE_MODULES}
    try:
        for fullname in [*DEVICE_MODULES, stage_module]:
            original = importlib.import_module(fullname)
            source = inspect.getsource(original)
            if fullname == target:
                source = nth(source, old, new, which)
            copy = ModuleType(fullname)
            copy.__package__, copy.__file__ = original.__package__, original.__file__
            exec(compile(source, str(original.__file__), "exec"), vars(copy))
            if fullname != stage_module:
                sys.modules[fullname] = copy
        return copy.STAGE
    finally:
        sys.modules.update(originals)


def survives(stage, monkeypatch) -> str | None:
    """Run cases that between them reach every part of a kernel; the first failure in words, or None."""
    config = stage.test_config
    bm, bn, bk = config.BM, config.BN, max(config.BK, 4)
    table = [
        Case((bm, bn, 6 * bk), "rows", 1.0, 0.0),
        Case((bm + 4, bn + 4, 6 * bk + 4), "rows", 0.5, -2.0),
        Case((bm + 1, bn + 3, 2 * bk + 1), "slices of wider rows", 0.5, -2.0),
        Case((bm + 1, bn + 3, 4 * bk - 1), "one float off", 1.0, 0.0),
    ]
    for seed in (1, 2, 3):
        for case in table:
            with monkeypatch.context() as patch:
                patch.setattr(launch.scheduler, "run", functools.partial(scheduler.run, seed=seed))
                try:
                    outcome = run(stage, config, case)
                except Exception as error:  # a twin that raises has caught the defect as well
                    return f"{type(error).__name__}: {error}"
            if not outcome.ok:
                return str(outcome)
    return None


@pytest.mark.parametrize("name", STAGES)
def test_the_cases_pass_unbroken(name, monkeypatch):
    assert survives(mutant(name, "stage", "STAGE = Stage(", "STAGE = Stage("), monkeypatch) is None


@pytest.mark.parametrize(("name", "which"), [(name, i) for name in TILED for i in range(barriers(name))])
def test_a_dropped_barrier_is_caught(name, which, monkeypatch):
    assert survives(mutant(name, "stage", BARRIER, "pass", which), monkeypatch)


MUTATIONS = [
    # an edge off by one
    ("naive", "stage", "row < m", "row <= m", 0),
    ("coalesced", "stage", "col < n", "col <= n", 0),
    ("shared_tile", "stage", "row < m", "row <= m", 0),
    ("coalesced", "dot", "p + TERMS <= k", "p + TERMS <= k + 1", 0),
    ("coalesced", "dot", "while p < k", "while p + 1 < k", 0),
    (
        "thread_tile_2d",
        "vector",
        "row < array.shape[0] and col < array.shape[1]:\n        return array",
        "row <= array.shape[0] and col < array.shape[1]:\n        return array",
        0,
    ),
    ("vectorized", "vector", "read4_if(row < array.shape[0]", "read4_if(row <= array.shape[0]", 0),
    (
        "vectorized",
        "vector",
        "row < array.shape[0] and col < array.shape[1]:\n        return load4",
        "row <= array.shape[0] and col < array.shape[1]:\n        return load4",
        0,
    ),
    ("vectorized", "matrix", "col + i < matrix.shape[1]", "col + i <= matrix.shape[1]", 0),
    ("vectorized", "matrix", "col + i < matrix.shape[1]", "col + i <= matrix.shape[1]", 1),
    ("thread_tile_1d", "blend", "row < c.shape[0]", "row <= c.shape[0]", 0),
    ("vectorized", "blend", "row < c.shape[0]", "row <= c.shape[0]", 1),
    ("async_copy", "stage", "row < a.shape[0]", "row <= a.shape[0]", 0),
    ("async_copy", "stage", "col < b.shape[1]", "col <= b.shape[1]", 0),
    # a k-tile or a k-step lost
    *[(name, "stage", "while k0 < k", "while k0 + BK < k", 0) for name in TILED],
    ("register_prefetch", "stage", "buffer, BK - 1,", "buffer, BK - 2,", 0),
    ("double_buffered", "stage", "k0 + BK < k", "k0 + 2 * BK < k", 0),
    # a stride, an index or a buffer taken for another
    ("naive", "dot", "b[p + q, col]", "b[col, p + q]", 0),
    ("shared_tile", "stage", "a_tile[ty, p] * b_tile[p, tx]", "a_tile[p, ty] * b_tile[p, tx]", 0),
    ("thread_tile_1d", "stage", "tid // BK, tid % BK", "tid % BK, tid // BK", 0),
    ("thread_tile_2d", "stage", "a_frag[i] * b_frag[j]", "a_frag[j % TM] * b_frag[i % TN]", 0),
    ("vectorized", "stage", "block_row + a_row + i, k0 + a_col", "block_row + a_row, k0 + a_col", 0),
    ("conflict_free", "stage", "place = row ^ (p // 4 * HALF_WARP)", "place = row", 0),
    ("double_buffered", "stage", "buffer ^= BK", "buffer ^= 0", 0),
    ("register_prefetch", "stage", "multiply(a_odd, b_odd, acc)", "multiply(a_even, b_even, acc)", 1),
    ("warp_tiled", "stage", "lane // LANES_N * 4", "lane % LANES_N * 4", 0),
    ("warp_tiled", "stage", "B_START = 2 * BK * BM_PAD", "B_START = BK * BM_PAD", 0),
    # alpha and beta
    ("vectorized", "blend", "if beta == float32(0):\n            store4", "if False:\n            store4", 0),
    ("naive", "blend", "if beta == float32(0):\n        return alpha * acc", "if False:\n        return acc", 0),
    ("vectorized", "blend", "inside and beta != float32(0)", "inside", 0),
    ("vectorized", "blend", "alpha * acc[2] + beta * old[2]", "acc[2] + beta * old[2]", 0),
    ("vectorized", "blend", "alpha * acc[3] + beta * old[3]", "alpha * acc[3] + beta * old[2]", 1),
    # asynchronous copies waited for too little, or not in their group
    ("async_copy", "stage", "wait_group(IN_FLIGHT)", "wait_group(IN_FLIGHT + 1)", 0),
    ("async_copy", "stage", "wait_group(IN_FLIGHT)", "wait_group(IN_FLIGHT + 1)", 1),
    ("async_copy", "stage", "        commit_group()\n", "", 0),
    ("async_copy", "stage", "write_slot = read_slot", "write_slot = write_slot", 0),
]


@pytest.mark.parametrize(("name", "module", "old", "new", "which"), MUTATIONS)
def test_a_broken_kernel_is_caught(name, module, old, new, which, monkeypatch):
    assert survives(mutant(name, module, old, new, which), monkeypatch)
