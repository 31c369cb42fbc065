"""The table must fail where a kernel is wrong: each stage, broken on purpose in one place, against the cases of the
ladder's table, and for stages that have a schedule of the table of schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from support.covering import others_exhaustive
from support.ladder_cases import Case, Outcome, run
from support.mutants import BARRIER, LANES, SLICED, STAGED, barriers, mutant
from support.schedule_cases import Shared, run_shared, shared_cases

from numba_gemm.device import partition as partitions
from numba_gemm.kernels.ladder import STAGES, LadderStage
from numba_gemm.runtime import launch
from numba_gemm.simulator import scheduler

pytestmark = pytest.mark.simulator

SHARED = ("basic_stream_k", "stream_k", "thin")  # stages that share tiles
TURNS = ("stream_k", "thin")  # stages that count tiles, not terms
TILED = [name for name in STAGES if name not in ("naive", "coalesced", "snake_order")]  # one stage for each module

OWN_LOOPS = ("async_copy", "short_sums", "small_matrices", *SHARED)  # stages whose loop along k is another one

UNWRITTEN = np.uint32(0x7FC0DEAD)  # a NaN that no sum is: what lies outside of C may be one


class Counters:
    """The counters of shared tiles; a block is counted when all of its part is written, which is checked here, since
    simulated blocks run one after another and never see half of another's part."""

    def __init__(self, partition: Any, blocks: int) -> None:
        self.counts, self.partials = partition.counters, partition.partials.view(np.uint32)
        self.partials[...] = UNWRITTEN
        self.part = self.partials.size // (2 * blocks)

    def __getitem__(self, tile: Any) -> Any:
        written = np.count_nonzero(self.partials != UNWRITTEN)
        assert written % self.part == 0, f"{written} floats are written, of parts of {self.part}"
        return self.counts[tile]

    def __setitem__(self, tile: Any, count: Any) -> None:
        self.counts[tile] = count


def permuted(seed: int, in_order: bool) -> Callable[..., None]:
    """Return a replacement of the scheduler's `run` that orders threads, and blocks unless `in_order`, by a seed."""
    original = scheduler.run

    def run_permuted(kernel: Any, grid: Any, block: Any, args: Any, **options: Any) -> None:
        extents = (*grid, 1)[:3]
        blocks = list(product(*map(range, extents)))
        partition = next((arg for arg in args if isinstance(arg, partitions.PartitionArguments)), None)
        if not in_order:
            blocks = np.random.default_rng(seed).permutation(blocks).tolist()
        if not in_order and partition is not None:
            watched = partition._replace(counters=Counters(partition, math.prod(extents)))
            args = [watched if arg is partition else arg for arg in args]
        original(kernel, grid, block, args, seed=seed, blocks=blocks, **options)
        assert partition is None or not partition.counters.any(), "counters are not 0 again"

    return run_permuted


def table(stage: LadderStage) -> Iterator[Callable[[], Outcome]]:
    """Cases that between them reach every part of a kernel."""
    config = stage.test_config
    bm, bn, bk = config.BM, config.BN, max(config.BK, 4)
    cases = [
        Case((bm, bn, 6 * bk), "rows", 1.0, 0.0),
        Case((bm + 4, bn + 4, 6 * bk + 4), "rows", 0.5, -2.0),
        Case((bm + 1, bn + 3, 2 * bk + 1), "slices of wider rows", 0.5, -2.0),
        Case((bm + 1, bn + 3, 4 * bk - 1), "one float off", 1.0, 0.0),
    ]
    if stage.schedule is not None:
        shared = [(config, case) for case in shared_cases(stage, config)]
        if stage.name == "stream_k":
            shared += [
                (STAGED, Shared("along1 across1", (67, 69, 23), 3, whole=1, epilogue=True)),
                (STAGED, Shared("any any", (61, 67, 9), 1, beta=1.0)),
                (SLICED, Shared("along4 across4", (36, 36, 84), 5, beta=-2.0)),
                (SLICED, Shared("across1 along1", (33, 31, 71), 3, whole=1, epilogue=True)),
                (SLICED, Shared("across4 across4", (28, 31, 13), 1)),
            ]
        if stage.name == "small_matrices":
            shared += [(LANES, case) for case in shared_cases(stage, LANES)[1:9]]
        if stage.name == "thin":
            shared.append((config, Shared("along4 across4", (2 * bm, bn, 18 * bk), 37)))
        for own, one in shared:
            yield lambda own=own, one=one: run_shared(stage, own, one)  # type: ignore[misc]
        cases = cases[1:2]
    for case in cases:
        yield lambda case=case: run(stage, config, case)  # type: ignore[misc]


def survives(stage: LadderStage, monkeypatch, first: int = 0, order: int = 1) -> str | None:
    """Run the table from its case `first` on, then those before; the first failure in words, or None.

    One order of threads and blocks suffices, but for an edit of `stream_k` that shows under the second one alone.
    Of two, `order` comes first.
    """
    monkeypatch.setattr("numba_gemm.kernels.ladder.partitions.GROUP", 2)
    # stream_k adds all parts itself; `test_add_parts.py` has the other kernel
    monkeypatch.setattr("numba_gemm.kernels.ladder.partitions.READS_APART", 1 << 30)
    cases = list(table(stage))
    for seed in (order, 3 - order) if stage.name == "stream_k" else (1,):
        for case in cases[first:] + cases[:first]:
            with monkeypatch.context() as patch:
                patch.setattr(launch.scheduler, "run", permuted(seed, in_order=stage.name == "thin"))
                try:
                    outcome = case()
                except Exception as error:  # a twin that raises has caught the defect as well
                    return f"{type(error).__name__}: {error}"
            if not outcome.ok:
                return str(outcome)
    return None


@pytest.mark.parametrize("name", others_exhaustive(STAGES, set(STAGES) - {"basic_stream_k", "stream_k", "thin"}))
def test_the_cases_pass_unbroken(name, monkeypatch):
    assert survives(mutant(name, "stage", "def build(", "def build("), monkeypatch) is None


# Barriers of stream_k that only `inspect.trace` (`test_tracing.py`) and compute-sanitizer's racecheck (`sanitize.py`)
# see missing: the first one keeps a warp that is ahead from copying over a C that another stages, but simulated warps
# go in step; the last one keeps it from staging over fragments that are read ahead, and never used. The first one of
# basic_stream_k keeps it from copying over such fragments.
ONLY_RACES = [("stream_k", 0), ("stream_k", 4), ("basic_stream_k", 0)]
BARRIERS = [(name, i) for name in TILED for i in range(barriers(name)) if (name, i) not in ONLY_RACES]


@pytest.mark.parametrize(("name", "which"), BARRIERS)
def test_a_dropped_barrier_is_caught(name, which, monkeypatch):
    assert survives(mutant(name, "stage", BARRIER, "pass", which), monkeypatch)


MUTATIONS = [
    # an edge off by one
    ("naive", "stage", "row < m", "row <= m", 0),
    ("coalesced", "stage", "col < n", "col <= n", 0),
    ("shared_tile", "stage", "row < m", "row <= m", 0),
    ("coalesced", "stage", "p + TERMS <= k", "p + TERMS <= k + 1", 0),
    ("coalesced", "stage", "while p < k", "while p + 1 < k", 0),
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
    ("thread_tile_1d", "store", "row < c.shape[0]", "row <= c.shape[0]", 0),
    ("vectorized", "store", "row < c.shape[0]", "row <= c.shape[0]", 1),
    # a k-tile or a k-step lost
    *[(name, "stage", "while k0 < k", "while k0 + BK < k", 0) for name in TILED if name not in OWN_LOOPS],
    *[(name, "stage", "while left > uint32(0)", "while left > uint32(1)", 0) for name in TURNS],
    ("async_copy", "stage", "while k0 < end", "while k0 + BK < end", 0),
    ("register_prefetch", "stage", "buffer, BK - 1,", "buffer, BK - 2,", 0),
    ("double_buffered", "stage", "while k0 < k:", "while k0 + BK < k:", 0),
    # a stride, an index or a buffer taken for another
    ("naive", "stage", "b[p + q, col]", "b[col, p + q]", 0),
    ("shared_tile", "stage", "a_tile[ty, p] * b_tile[p, tx]", "a_tile[p, ty] * b_tile[p, tx]", 0),
    ("thread_tile_1d", "stage", "tid // BK, tid % BK", "tid % BK, tid // BK", 0),
    ("thread_tile_2d", "stage", "a_frag[i] * b_frag[j]", "a_frag[j % TM] * b_frag[i % TN]", 0),
    ("register_prefetch", "stage", "a_frag[i] * b_frag[j]", "a_frag[j % TM] * b_frag[i % TN]", 0),
    ("vectorized", "stage", "block_row + a_row + i, k0 + a_col", "block_row + a_row, k0 + a_col", 0),
    ("conflict_free", "stage", "a_place[p] = row ^ (p // 4 * HALF_WARP)", "a_place[p] = row", 0),
    ("double_buffered", "stage", "uint32(buffer ^ BK)", "uint32(buffer)", 0),
    ("register_prefetch", "stage", "multiply(a_odd, b_odd, acc)", "multiply(a_even, b_even, acc)", 1),
    ("warp_tiled", "stage", "lane // LANES_N * 4", "lane % LANES_N * 4", 0),
    ("warp_tiled", "stage", "B_START = 2 * BK * BM_PAD", "B_START = BK * BM_PAD", 0),
    # alpha and beta
    ("vectorized", "store", "if beta == float32(0):\n            store4", "if False:\n            store4", 0),
    ("naive", "store", "if beta == float32(0):\n        return alpha * acc", "if False:\n        return acc", 0),
    ("vectorized", "store", "inside and beta != float32(0)", "inside", 0),
    ("vectorized", "store", "alpha * acc[2] + beta * old[2]", "acc[2] + beta * old[2]", 0),
    ("vectorized", "store", "alpha * acc[3] + beta * old[3]", "alpha * acc[3] + beta * old[2]", 0),
    # asynchronous copies waited for too little, or not in their group
    *[("async_copy", "stage", "wait_group(0)", "wait_group(1)", which) for which in (0, 1)],
    ("async_copy", "stage", "        commit_group()\n", "", 0),
    *[
        (name, "stage", "buffer = uint32(BUFFER - buffer)", "buffer = uint32(buffer)", 0)
        for name in ("moving_addresses", "async_copy")
    ],
    *[(name, "stage", "wait_group(0)", "pass", which) for name in ("stream_k",) for which in (0, 1)],
    *[(name, "stage", "commit_group()\n", "pass\n", which) for name in ("stream_k",) for which in (0, 1)],
    ("thin", "stage", "commit_group()\n", "pass\n", 0),
    ("thin", "stage", "commit_group()\n", "pass\n", 1),
    ("thin", "stage", "wait_group(NEWEST)", "wait_group(NEWEST + 1)", 0),
    # of moving addresses: edges, first tiles and slots
    ("moving_addresses", "stage", "k0 + a_col < k", "k0 + a_col <= k", 0),
    ("moving_addresses", "stage", "p < k", "p <= k", 1),
    ("async_copy", "stage", "or k < end", "or k <= end", 0),
    ("async_copy", "stage", "or k + p < end", "or k + p <= end", 0),
    ("async_copy", "stage", "b.shape[1] - B_WIDTH", "b.shape[1]", 0),
    ("moving_addresses", "stage", "a.shape[0] - 1", "a.shape[0]", 0),
    ("moving_addresses", "stage", "b.shape[1] - 4", "b.shape[1]", 0),
    ("moving_addresses", "stage", "a_at[i] += BK * col_step(a)", "a_at[i] += 0", 0),
    ("moving_addresses", "stage", "b_at += BK * row_step(b)", "b_at += 0", 0),
    ("stream_k", "stage", "slot, left_out = other", "slot, left_out = slot", 0),
    # of slices
    *[("stream_k", "warp_tile", BARRIER, "pass", which) for which in (0, 1)],
    ("stream_k", "warp_tile", "if tid >= half and tid < uint32(2 * half)", "if tid >= half", 0),
    ("stream_k", "stage", "8 * A_PITCH * of_slice", "4 * A_PITCH * of_slice", 0),
    ("stream_k", "stage", "8 * B_PITCH * of_slice", "0 * of_slice", 0),
    ("stream_k", "stage", "SLICES == 1 or agree(of_slice == uint32(0))", "True", 0),
    ("stream_k", "warp_tile", "half = uint32(half // 2)", "half = uint32(half // 4)", 0),
    ("stream_k", "tile_loader", "(2 * slices - 1)) // (2 * slices)", "(2 * slices - 1)) // 2", 0),
    ("stream_k", "tile_loader", "(2 * slices - 1)) // (2 * slices)", "1) // (2 * slices)", 0),
    ("stream_k", "tile_loader", "tid // WARP % GROUPS * WIDE", "tid // WARP // GROUPS * WIDE", 0),
    ("thin", "stage", "slot = other", "slot = slot", 0),
    ("stream_k", "partition", "width = narrow if first == uint32(0) else int64(BK)", "width = narrow", 0),
    ("stream_k", "partition", "narrow + (int64(first) - 1) * BK", "int64(first) * BK", 0),
    (
        "stream_k",
        "tile_loader",
        "min(int64(first + row_of(tid) + i * ROWS), x.shape[0] - 1)",
        "int64(first + row_of(tid) + i * ROWS)",
        0,
    ),
    (
        "stream_k",
        "tile_loader",
        "copies = min(max(rest + (ROWS - 1), int64(0)) // ROWS, int64(COPIES))",
        "copies = int64(COPIES)",
        0,
    ),
    (
        "stream_k",
        "tile_loader",
        "source, inside = addresses[i], rest > int64(0)",
        "source, inside = addresses[i], True",
        0,
    ),
    ("stream_k", "tile_loader", "inside = rest >= int64(4)", "inside = rest > int64(4)", 0),
    ("stream_k", "tile_loader", "if rest <= int64(4) else int64(0)", "if rest < int64(0) else int64(0)", 0),
    ("stream_k", "tile_loader", "not inside and int64(q) < rest", "not inside and int64(q) <= rest", 0),
    ("stream_k", "tile_loader", "(width - 1) // 4 * 4", "width // 4 * 4", 0),
    ("stream_k", "tile_loader", "(width - 1) // 4 * 4", "width", 0),
    ("stream_k", "tile_loader", "rest - (copies - 1) * (STEP - 4)", "4 * copies", 0),
    ("stream_k", "tile_loader", "uint32(q) < valid % uint32(4)", "uint32(q + 1) < valid % uint32(4)", 0),
    ("stream_k", "tile_loader", "uint32(q) < valid % uint32(4)", "True", 0),
    ("stream_k", "tile_loader", "if not tails or inside or not here or valid <= uint32(4 * j)", "if True", 0),
    ("stream_k", "tile_loader", "or not here or valid <=", "or valid <=", 0),
    ("stream_k", "tile_loader", "copy16_within if tails else copy16_if", "copy16_if", 0),
    ("stream_k", "partition", "(width - 1) // 4 * 4, k - width", "(width - 1) // 4 * 4, int64(0)", 0),
    ("stream_k", "partition", "(width - 1) // 4 * 4, k - width", "width, k - width", 0),
    ("stream_k", "partition", "return (k0 - 1) // 4 * 4, width", "return k0, width", 0),
    ("short_sums", "stage", "terms, gap = (width - 1) // 4 * 4", "terms, gap = width // 4 * 4", 0),
    ("short_sums", "stage", "int64(BK), int64(BK), int64(0)", "int64(BK), int64(BK), gap", 0),
    ("stream_k", "tile_loader", "int64(tid // PER_K) < width", "int64(tid // PER_K) <= width", 0),
    ("stream_k", "tile_loader", "AT_ONCE) < width", "AT_ONCE) <= width", 0),
    ("stream_k", "tile_loader", "SECTOR) < width", "SECTOR) <= width", 0),
    ("stream_k", "tile_loader", "(STEP - 1), int64(0)", "STEP, int64(0)", 0),
    ("stream_k", "tile_loader", "(LINE - 1), int64(0)", "LINE, int64(0)", 0),
    ("stream_k", "tile_loader", "inside = more and uint32(4 * j) < valid", "inside = more", 0),
    ("stream_k", "tile_loader", "inside = more and uint32(j) < valid", "inside = more", 0),
    ("stream_k", "tile_loader", "inside = here and uint32(4 * j + 3) < valid", "inside = here", 0),
    ("stream_k", "tile_loader", "inside = here and uint32(j) < valid", "inside = here", 0),
    ("stream_k", "tile_loader", "global_load4_if(x, addresses[i], more)", "global_load4_if(x, addresses[i], True)", 0),
    ("stream_k", "tile_loader", "int64(4 * SECTOR) if unit else SECTOR * col_step(x)", "int64(4 * SECTOR)", 0),
    ("stream_k", "tile_loader", "q * pitch + i * ROWS", "i * pitch + q * ROWS", 0),
    ("stream_k", "tile_loader", "i = part * AT_A_TIME + q", "i = q", 0),
    ("stream_k", "tile_loader", "uint32(part * AT_A_TIME)", "uint32(0)", 0),
    *[("stream_k", "stage", f"fetch(to_a, to_b, {part})", "pass", 0) for part in range(4)],
    ("stream_k", "stage", "fetch(to_a, to_b, 2)", "fetch(to_a, to_b, 1)", 0),
    ("stream_k", "stage", "uint32(left_out + uint32(SPREAD))", "left_out", 0),
    ("stream_k", "tile_loader", "- (2 * slices - 1)) // (2 * slices)", "+ 1) // (2 * slices)", 0),
    ("stream_k", "stage", "slot, left_out = other, uint32(0)", "slot = other", 0),
    ("thin", "chunk_loader", "left if int32(outer + i * NEXT) < outer_end else int32(0)", "left", 0),
    ("thin", "chunk_loader", "= left if", "= int32(WIDTH) if", 0),
    ("thin", "chunk_loader", "min(max(floats, int32(0)), int32(4))", "int32(4)", 0),
    ("thin", "chunk_loader", "uint32(k) // 4 * FOUR_K + uint32(k) % 4 * extent", "uint32(k) // 4 * FOUR_K", 0),
    ("thin", "chunk_loader", "uint32(k // uint32(4))", "uint32(0)", 0),
    ("thin", "chunk_loader", "at += step", "at += 0", 0),
    ("thin", "stage", "min(int64(last) * BK, int64(k))", "int64(last) * BK", 0),
    ("thin", "stage", "other == uint32((SLOTS - 1) * SLOT)", "other == uint32(SLOTS * SLOT)", 0),
    ("thin", "stage", "e % SUMS * SUMS_PITCH + e // SUMS * LANES", "e // SUMS * SUMS_PITCH + e % SUMS * LANES", 0),
    ("thin", "stage", "values[r, 3] * four[3]", "values[r, 2] * four[3]", 0),
    ("thin", "stage", "values[r, q] * columns[j]", "values[r, 0] * columns[j]", 0),
    ("thin", "stage", "values, columns, acc, 3, s)", "values, columns, acc, 2, s)", 0),
    ("snake_order", "outer_product", "a_frag[i + 1] * b_frag[TN - 1 - j]", "a_frag[i + 1] * b_frag[j]", 0),
    ("snake_order", "outer_product", "acc[i + 1, TN - 1 - j]", "acc[i + 1, j]", 0),
    # pieces of tiles, and where their sums meet
    *[
        (name, "stage", old, new, 0)
        for name in SHARED
        for old, new in (
            ("while at < end or own < whole", "while at < end"),
            ("own + uint32(cuda.gridDim.x)", "own + uint32(1)"),
            ("uint32(block - lead)", "uint32(0)"),
            ("= float32(0)", "+= float32(0)"),
        )
    ],
    *[
        (name, "stage", old, new, 0)
        for name in ("basic_stream_k", "stream_k")
        for old, new in (
            ("cuda.syncthreads_or(final) != 0", "final != 0"),
            ("reset(partition, int64(index))", "pass"),
            ("reset(partition, int64(index))", "reset(partition, int64(0))"),
            ("arrive(partition, int64(index))", "arrive(partition, int64(0))"),
            ("int64(parts) - 1", "int64(parts) - 2"),
        )
    ],
    *[
        (name, "stage", old, new, 0)
        for name in ("stream_k", "thin")
        for old, new in (
            ("i1 * partition.a_middle", "i1 * partition.a_inner"),
            ("i2 * partition.b_inner", "i2 * partition.b_middle"),
            ("i0 * partition.c_outer", "i0 * partition.c_middle"),
        )
    ],
    ("stream_k", "stage", "if uint32(q + r) < parts", "if True", 0),
    ("basic_stream_k", "stage", "min(int64(last) * BK, k)", "int64(last) * BK", 0),
    ("basic_stream_k", "stage", "int64(first) * BK", "int64(0)", 0),
    # parts that are published, and added in groups
    *[
        ("thin", "stage", old, new, 0)
        for old, new in (
            ("if mine and p < left:", "if False:"),
            ("max(at, line)", "line"),
            ("final or uint32(before + 1) == most", "final"),
            ("uint32(mine // most)", "uint32(0)"),
            ("int32(2) if final and mine >= most else int32(1)", "int32(1)"),
            ("uint32(sums + earlier)", "block"),
            ("uint32(block - before)", "lead"),
            ("begin, count, turns = sums, earlier,", "turns ="),
        )
    ],
    ("stream_k", "partition", "min(block, uint32(partition.extra))", "uint32(0)", 0),
    ("stream_k", "partition", "uint32(extra + uint32(uint32(at - long) // base))", "uint32(at // base)", 0),
    ("stream_k", "partition", "(1 if second else 0)", "0", 0),
    ("stream_k", "partition", "int64(2 * (lead + q)", "int64((lead + q)", 0),
    ("stream_k", "partition", "int64(uint32(rest - uint32(outer * middle)))", "int64(0)", 0),
    ("stream_k", "partition", "int64(uint32(member - uint32(rest * inner)))", "int64(0)", 0),
    (
        "stream_k",
        "partition",
        "uint32(uint32(partition.group) * uint32(partition.cols))",
        "uint32(height * uint32(partition.cols))",
        0,
    ),
    ("stream_k", "partition", "min(uint32(partition.group), uint32(height - top))", "uint32(partition.group)", 0),
    ("stream_k", "partition", "partition.counters[tile] = before + 1", "partition.counters[tile] = before", 0),
    (
        "stream_k",
        "partition",
        "(i * columns + j + 1) * threads, acc[i, j + 1]",
        "(i * columns + j + 1) * threads, acc[i, j]",
        0,
    ),
    (
        "stream_k",
        "partition",
        "values[i, j + 2] = load_partial(partition, at + (i * columns + j + 2)",
        "values[i, j + 2] = load_partial(partition, at + (i * columns + j + 1)",
        0,
    ),
    # C on its way out
    ("stream_k", "store", "c_row, first_col + j, vectors)", "c_row, first_col + 1, vectors)", 0),
    ("stream_k", "store", "c_row < rows and j < cols", "c_row < rows", 0),
    ("stream_k", "store", "c_row < rows and j < cols", "j < cols", 0),
    (
        "stream_k",
        "store",
        "if row < c.shape[0] and col < c.shape[1]:\n            c[row, col] = float32(",
        "if row < c.shape[0]:\n            c[row, col] = float32(",
        0,
    ),
    ("stream_k", "store", "if whole:", "if True:", 0),
    ("stream_k", "store", "TO_NEXT[r] * row_step(c)", "0 * row_step(c)", 0),
    ("stream_k", "store", "TO_NEXT[r] * row_step(c)", "0 * row_step(c)", 1),
    ("stream_k", "store", "product(alpha, acc[i, j + 1])", "acc[i, j + 1]", 0),
    ("stream_k", "store", "cuda.syncwarp()", "pass", 0),
    ("stream_k", "store", "cuda.syncwarp()", "pass", 1),
    ("stream_k", "store", "staged // DEPTH * 4 + staged % DEPTH", "staged // DEPTH * 4", 0),
    ("stream_k", "store", "i // 4 * (4 * LANES_M) + i % 4", "i // 4 * (4 * LANES_M)", 0),
    ("stream_k", "stage", "block_row + warp // (BN // WN) * WM", "block_row", 0),
    ("stream_k", "stage", "block_row + warp // (BN // WN) * WM", "block_row + warp % (BN // WN) * WM", 0),
    # terms, rows and columns of short_sums
    ("short_sums", "stage", "uint32(width) + uint32(STEPS - 1)", "uint32(width)", 0),
    ("short_sums", "stage", "terms * col_step(x)", "BK * col_step(x)", 0),
    ("short_sums", "stage", "terms * col_step(y)", "BK * col_step(y)", 0),
    ("short_sums", "stage", "width, terms, gap = int64(BK), int64(BK), int64(0)", "pass", 0),
    ("short_sums", "stage", "int32(i) < rows", "int32(i) <= rows", 0),
    ("short_sums", "stage", "if col < z.shape[1] else", "if col <= z.shape[1] else", 0),
    ("short_sums", "stage", "to += row_step(z)", "to += 0 * row_step(z)", 0),
    ("short_sums", "stage", "if i == uint32(x)", "if i == uint32(1)", 0),
    ("short_sums", "stage", "PLAIN and beta == float32(0)", "PLAIN", 0),
    ("short_sums", "stage", "uint32(down * uint32(partition.cols))", "uint32(down)", 0),
    ("short_sums", "stage", "i1 * partition.a_middle", "i0 * partition.a_middle", 0),
    ("short_sums", "stage", "uint32(b_at + 4 * p * B_PITCH)", "uint32(b_at)", 0),
    # matrices, rows, columns and terms of small_matrices
    ("small_matrices", "stage", "index < uint32(of_matrix * uint32(partition.matrices))", "True", 0),
    ("small_matrices", "stage", "uint32(index - uint32(member * of_matrix))", "index", 0),
    ("small_matrices", "stage", "i1 * partition.a_middle", "i0 * partition.a_middle", 0),
    ("small_matrices", "stage", "last * partition.b_inner", "last * partition.a_inner", 0),
    ("small_matrices", "stage", "if uint32(partition.inner) < uint32(partition.matrices)", "if False", 0),
    ("small_matrices", "stage", "int64(uint32(index - uint32(down * cols)))", "int64(index)", 0),
    ("small_matrices", "stage", "min(int64(i), x.shape[0] - 1 - row)", "int64(i)", 0),
    ("small_matrices", "stage", "min(int64(j), y.shape[0] - 1 - col)", "int64(j)", 0),
    ("small_matrices", "stage", "at + p * col_step(y)", "at", 0),
    ("small_matrices", "stage", "at + 3 * step", "at + 2 * step", 0),
    ("small_matrices", "stage", "a_at + CHUNK * col_step(x)", "a_at", 0),
    ("small_matrices", "stage", "b_at + CHUNK * col_step(y)", "b_at + col_step(y)", 0),
    ("small_matrices", "stage", "while left > uint32(0)", "while left > uint32(1)", 0),
    ("small_matrices", "stage", "b_at + b_columns[j]", "b_at", 0),
    ("small_matrices", "stage", "z, row + i, col, alpha", "z, row, col, alpha", 0),
    ("small_matrices", "stage", "row + i, col + j", "row + i, col", 1),
    ("small_matrices", "stage", "z, row + i, col + j", "z, row + i, col", 0),
    ("small_matrices", "stage", "index = uint32(0)", "index = index", 0),
    ("small_matrices", "stage", "if inside and lane ==", "if lane ==", 0),
    ("small_matrices", "stage", "min(left, first)", "uint32(0)", 0),
    ("small_matrices", "stage", "step = min(left, step)", "step = step", 0),
    ("small_matrices", "stage", "step = min(left, step)", "step = left", 0),
    ("small_matrices", "stage", "step = min(left, step)", "step = left", 1),
    ("small_matrices", "stage", "(TERMS - 1) * APART + 1", "TERMS", 0),
    ("small_matrices", "stage", "FIRST = TERMS if APART == 1 else 1", "FIRST = 1", 0),
    ("small_matrices", "stage", "1 << step", "1", 0),
    (
        "thin",
        "store",
        "if row < c.shape[0] and col < c.shape[1]:\n            c[row, col] = float32(",
        "if row < c.shape[0]:\n            c[row, col] = float32(",
        0,
    ),
]


# The case that finds an edit which no case before it does: it runs first, which saves the time of those.
FOUND_BY = {
    "uint32(uint32(partition.group) * uint32(partition.cols))": 3,
    "c_row, first_col + j, vectors)": 3,
    "i = part * AT_A_TIME + q": 3,
    "int64(tid // PER_K) < width": 4,
    "i1 * partition.a_middle": 5,
    "i2 * partition.b_inner": 5,
    "i0 * partition.c_outer": 5,
    "int64(uint32(rest - uint32(outer * middle)))": 5,
    "int64(uint32(member - uint32(rest * inner)))": 5,
    "SECTOR) < width": 6,
    "fetch(to_a, to_b, 2)": 6,
    "if uint32(q + r) < parts": 6,
    "product(alpha, acc[i, j + 1])": 6,
    "other == uint32((SLOTS - 1) * SLOT)": 7,
    "(1 if second else 0)": 7,
    "i // 4 * (4 * LANES_M) + i % 4": 9,
    "uint32(begin + 1) * apart": 9,
    "uint32(mine // most)": 9,
    "uint32(apart * most)": 9,
    "begin + min(uint32(q + p), uint32(count - 1))": 9,
    "block_row + warp // (BN // WN) * WM": 9,
    "int64(4 * SECTOR) if unit else SECTOR * col_step(x)": 10,
}


SECOND_ORDER = {"(1 if second else 0)"}  # the first order does not find these


@pytest.mark.parametrize(("name", "module", "old", "new", "which"), MUTATIONS)
def test_a_broken_kernel_is_caught(name, module, old, new, which, monkeypatch):
    stage, order = mutant(name, module, old, new, which), 2 if old in SECOND_ORDER else 1
    assert survives(stage, monkeypatch, FOUND_BY.get(old, 0), order)
