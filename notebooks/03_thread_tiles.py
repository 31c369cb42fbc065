# %% [markdown]
# # 3. Register tiles: `thread_tile_1d` and `thread_tile_2d`
#
# *Before this: [notebook 2](02_shared_tile.ipynb). Time: about 60 minutes.*
#
# **The question.** In [notebook 2](02_shared_tile.ipynb) a block fetched its tiles of A and B from global memory once,
# into shared memory. But every multiply-add still reads two floats from there, and shared memory cannot deliver them as
# fast as they could be multiplied. Is there a memory that is nearer to a thread? There is, the thread's own
# **registers**, and this notebook is about what to keep in them.
#
# You predict first. Where a cell says `notebook.predict("...", ...)`, write a number in place of the second `...` and
# run the cell. A later cell shows your number beside the real one. A cell without a prediction runs, too.
#
# Run the cells from top to bottom. The stored outputs are those of a machine with an NVIDIA H200; the next cell prints
# where yours run.

# %%
import importlib.util
import site
import subprocess
import sys
from pathlib import Path

# Where no package is installed, such as on Colab: this checkout, or "git+https://..."
SOURCE = Path("..").resolve().as_uri()
if importlib.util.find_spec("numba_gemm") is None:
    package = f"numba-gemm[cu12,notebooks] @ {SOURCE}"
    subprocess.check_call([sys.executable, "-m", "pip", "install", "-q", package])
    site.main()  # as when Python starts: numba-cuda replaces numba.cuda

from numba_gemm.course import notebook

notebook.begin()

# %%
from functools import partial

import numpy as np
import pandas as pd
from numba import cuda, float32

from numba_gemm.inspect import draw, step, trace
from numba_gemm.kernels.ladder import STAGES
from numba_gemm.models import prediction, traffic
from numba_gemm.models.roofline import FLOAT32_BYTES, FP32_LANES_PER_SM

# %% [markdown]
# ## Why two floats per multiply-add are too many
#
# Here is `shared_tile` once more, one block and one tile of K, with every access recorded. Its configuration is
# 16 x 16, which the simulator finishes sooner. The functions count the floats that its threads read from shared memory
# per multiply-add. (The arguments of `trace` are those of notebook 1.)

# %%
TILES = {
    "shared_tile": STAGES["shared_tile"].configs[1],
    "thread_tile_1d": STAGES["thread_tile_1d"].configs[0],
    "thread_tile_2d": STAGES["thread_tile_2d"].configs[0],
}


def traced(stage):
    """One block of a stage, and one tile of K."""
    tile = TILES[stage]
    a, b = (
        np.ones((tile.BM, tile.BK), np.float32),
        np.ones((tile.BK, tile.BN), np.float32),
    )
    c = np.zeros((tile.BM, tile.BN), np.float32)
    return trace(stage, None, None, 1, a, b, 0, c, config=tile)


def shared_floats(trace, stage):
    """Floats that threads read from shared memory per multiply-add."""
    tile, read = TILES[stage], trace.traffic.groupby("space")["read"].sum()
    return read["shared"] / FLOAT32_BYTES / (tile.BM * tile.BN * tile.BK)


shared_tile = traced("shared_tile")
print("floats per multiply-add:", shared_floats(shared_tile, "shared_tile"))

# %% [markdown]
# One of A and one of B, as the source says. A multiprocessor of an H200 performs 128 multiply-adds per clock, one in
# each of its FP32 lanes. Its shared memory delivers 128 bytes per clock. How many multiply-adds must each float from
# shared memory serve, so that the arithmetic never waits?

# %%
serves = notebook.predict("multiply-adds per float from shared memory", ...)

# %%
lanes, floats = (
    FP32_LANES_PER_SM[9, 0],
    prediction.SHARED_BYTES_A_CLOCK // FLOAT32_BYTES,
)
serves.reveal(
    lanes / floats, because=f"{lanes} multiply-adds and {floats} floats per clock."
)

# %% [markdown]
# In `shared_tile` a float serves half a multiply-add. The ratio has a name, **arithmetic intensity**: floating-point
# operations (FLOP; a multiply-add is two) per byte that is moved. It is counted for each level of memory separately.
# Four multiply-adds per float are 2 FLOP per byte of shared memory. `shared_tile` has, with the bytes that its threads
# write there included:


# %%
def intensity(trace, stage):
    """FLOP per byte that is read from or written to shared memory."""
    tile = TILES[stage]
    return round(trace.intensity(2 * tile.BM * tile.BN * tile.BK)["shared"], 2)


print("FLOP per byte of shared memory:", intensity(shared_tile, "shared_tile"))

# %% [markdown]
# ## The first idea: a column for each thread
#
# A **register** holds 32 bits and belongs to one thread. An instruction reads up to three registers and writes one
# without any extra time. Nothing is nearer. A multiprocessor has 65,536 registers; a thread can have up to 255.
#
# `acc` in `shared_tile` is one: a Python scalar in a kernel lives in a register. `thread_tile_1d` gives each thread TM
# = 8 elements of C, one below the other, and so TM **accumulators**. An element of B that is read once into a register
# then serves TM multiply-adds.
#
# ### The same in NumPy
#
# One block of C, as in notebook 2. In each step of `p` a thread takes TM elements of a column of A and one element of
# B. The tiles are slices again, and `acc[i : i + TM, j]` are the accumulators of one thread:


# %%
def thread_columns(a, b, TM=4, BK=4):
    acc = np.zeros((len(a), b.shape[1]), np.float32)
    for k0 in range(0, a.shape[1], BK):
        a_tile, b_tile = a[:, k0 : k0 + BK].copy(), b[k0 : k0 + BK].copy()
        for i in range(0, len(a), TM):  # the threads of the block
            for j in range(b.shape[1]):
                for p in range(BK):
                    b_value = b_tile[p, j]  # read once
                    acc[i : i + TM, j] += a_tile[i : i + TM, p] * b_value
    return acc


x, y = np.random.default_rng(3).standard_normal((2, 16, 16), np.float32)
assert np.allclose(thread_columns(x, y), x @ y, atol=1e-5)

# %% [markdown]
# ### The kernel
#
# The whole kernel, from the file that runs:

# %%
notebook.source("thread_tile_1d", function="thread_tile_1d")

# %% [markdown]
# - `cuda.local.array` allocates an array that belongs to the thread. The name is misleading: such an array becomes
#   registers if every index into it is known when the kernel is compiled, because registers have no addresses.
# - The loops `for i in range(TM)` are **unrolled**, that is, written out TM times with i = 0, 1, 2, ... in place of the
#   variable, since TM is a constant of the configuration. The project's tests compile every stage, and fail if an
#   accumulator is not in a register.
# - There are TM times fewer threads than elements of C, and the tiles are no longer square. So each thread computes its
#   place twice: `a_row`, `a_col`, `b_row`, `b_col` is what it copies, `row`, `col` the first element that it computes.
#   The threads are numbered by one index, `tid`.
# - `store_axpby1` writes `alpha * acc + beta * c`, if the element is inside C.
#
# The diff with the kernel of notebook 2:

# %%
notebook.difference("shared_tile", "thread_tile_1d", context=1, device_only=True)

# %% [markdown]
# ### Step one thread
#
# Thread 17 of a small configuration, 16 x 16 x 4 with TM = 4. The cell prints only the steps in which `b_value` or an
# accumulator changes, for the first two k-steps. B is read once, then four multiply-adds follow:

# %%
a = np.arange(1, 65, dtype=np.float32).reshape(16, 4)
b = np.arange(1, 65, dtype=np.float32).reshape(4, 16)
c = np.zeros((16, 16), np.float32)

with step(
    "thread_tile_1d", None, None, 1, a, b, 0, c, thread=17, config="test"
) as steps:
    for s in steps:
        if s.locals.get("p") == 2:
            break
        if "p" in s.locals and {"b_value", "acc"} & set(s.changed):
            print(s)

# %% [markdown]
# (The printed line is the one that comes next, here always the head of the loop.)
#
# ### Who reads what
#
# Global memory first, as in the notebooks before. All threads of the block share the copying, so a thread does not copy
# what it computes with. It copies one element of A and one of B here, and computes a column of eight elements of C.

# %%
thread_tile_1d = traced("thread_tile_1d")
draw.who_reads_what(thread_tile_1d, thread=70)

# %% [markdown]
# The change is in shared memory. Here is the same picture for the shared tiles of A and B: the elements that the same
# thread reads, and the elements of C that it writes.

# %%
draw.who_reads_what(thread_tile_1d, thread=70, shared=True)

# %% [markdown]
# The thread computes eight elements of C. For that it reads eight rows of A and one column of B: a float of B serves
# eight multiply-adds, one of A still only one. How many floats from shared memory is that per multiply-add?

# %%
with_column = notebook.predict("floats per multiply-add, with a column of 8", ...)

# %%
with_column.reveal(
    shared_floats(thread_tile_1d, "thread_tile_1d"),
    because="One of A, and an eighth of one of B.",
)
print("FLOP per byte of shared memory:", intensity(thread_tile_1d, "thread_tile_1d"))

# %% [markdown]
# ## The second idea: rows and columns, the outer product
#
# A column of results reuses the elements of B. A row of results would reuse those of A. `thread_tile_2d` gives a thread
# a tile of TM x TN = 8 x 8 elements of C. For each k it reads eight floats of A and eight of B into registers, the
# **fragments**, and multiplies each by each.
#
# ### The same in NumPy
#
# That is the **outer product** of two vectors, `np.outer`. A matrix product is the sum of the outer products of A's
# columns with B's rows:


# %%
def thread_tiles(a, b, TM=4, TN=4, BK=4):
    acc = np.zeros((len(a), b.shape[1]), np.float32)
    for k0 in range(0, a.shape[1], BK):
        a_tile, b_tile = a[:, k0 : k0 + BK].copy(), b[k0 : k0 + BK].copy()
        for i in range(0, len(a), TM):  # the threads of the block
            for j in range(0, b.shape[1], TN):
                for p in range(BK):
                    a_frag, b_frag = a_tile[i : i + TM, p], b_tile[p, j : j + TN]
                    acc[i : i + TM, j : j + TN] += np.outer(a_frag, b_frag)
    return acc


assert np.allclose(thread_tiles(x, y), x @ y, atol=1e-5)

# %% [markdown]
# ### The kernel
#
# The diff of the two kernels. The two loops `for i in range(0, BM, A_ROWS)` are there because a block tile is now
# larger than the number of threads, so each thread copies several elements:

# %%
notebook.difference("thread_tile_1d", "thread_tile_2d", context=1, device_only=True)

# %% [markdown]
# ### Step one thread
#
# The small configuration again, with TM x TN = 4 x 2. At the end of each k-step, here are the fragments of thread 9,
# and the check that `acc` has become the sum of the outer products so far:

# %%
c[:] = 0
expected = np.zeros((4, 2), np.float32)
for s in step("thread_tile_2d", None, None, 1, a, b, 0, c, thread=9, config="test"):
    if s.kind == "line" and "p" in s.changed and s.locals["p"] > 0:
        left, right = s.locals["a_frag"], s.locals["b_frag"]
        expected += np.outer(left, right)
        assert np.array_equal(s.locals["acc"], expected)
        print(f"k = {s.locals['p'] - 1}: {left} times {right} gives")
        print(np.outer(left, right))
print(f"acc, rows 4 to 7 and columns 2 and 3 of C:\n{expected}")
assert np.array_equal(c[4:8, 2:4], expected)

# %% [markdown]
# ### Who reads what
#
# How many floats from shared memory per multiply-add does a thread with a tile of 8 x 8 read? And how often is each
# float of the shared tile of B read by all threads of the block together? The block tile has 128 rows. (With one row of
# C per thread it would be 128 times.)

# %%
with_tile = notebook.predict("floats per multiply-add, with a tile of 8 x 8", ...)
reads_of_b = notebook.predict("reads of each float of b_tile", ...)

# %%
thread_tile_2d = traced("thread_tile_2d")
draw.who_reads_what(thread_tile_2d, thread=70, shared=True)

# %%
with_tile.reveal(
    shared_floats(thread_tile_2d, "thread_tile_2d"),
    because="64 reads of A and 64 of B, for eight k-steps of 64 multiply-adds each.",
)
tile, counted = (
    TILES["thread_tile_2d"],
    thread_tile_2d.traffic.query("array == 'b_tile'"),
)
reads_of_b.reveal(
    counted["read"].sum() / FLOAT32_BYTES / (tile.BK * tile.BN),
    because="Once by each of the 16 threads that lie one below the other in C.",
)
print("FLOP per byte of shared memory:", intensity(thread_tile_2d, "thread_tile_2d"))

# %% [markdown]
# ## The arithmetic of tiles
#
# Both kinds of tile save by the same rule. A rectangle of `rows x columns` results needs `rows + columns` floats for
# each k, for `rows * columns` multiply-adds. Without tiles, each multiply-add would read two floats. The fraction of
# reads that remains is `(rows + columns) / (2 * rows * columns)`, which is `(1/rows + 1/columns) / 2`.
#
# - The **block tile**, BM x BN, is read from global memory: `(1/BM + 1/BN) / 2` of the reads remain.
# - The **thread tile**, TM x TN, is read from shared memory: `(1/TM + 1/TN) / 2` of the reads remain.
#
# `numba_gemm.models.traffic` has these formulas, with their source. The table compares them with the traces:


# %%
def ratios(**traces):
    """Reads that remain of two per multiply-add, by the formulas and as counted."""
    rows = []
    for stage, found in traces.items():
        tile = TILES[stage]
        untiled = FLOAT32_BYTES * traffic.shared_reads_untiled(
            tile.BM, tile.BN, tile.BK
        )
        read = found.traffic.groupby("space")["read"].sum()
        rows.append(
            {
                "stage": stage,
                "BM x BN": f"{tile.BM} x {tile.BN}",
                "global, formula": traffic.tiled_ratio(tile.BM, tile.BN),
                "global, counted": read["global"] / untiled,
                "TM x TN": f"{tile.TM} x {tile.TN}",
                "shared, formula": traffic.shared_ratio(tile.TM, tile.TN),
                "shared, counted": read["shared"] / untiled,
            }
        )
    return pd.DataFrame(rows).set_index("stage")


table = ratios(
    shared_tile=shared_tile,
    thread_tile_1d=thread_tile_1d,
    thread_tile_2d=thread_tile_2d,
)
assert np.array_equal(table["global, formula"], table["global, counted"])
assert np.array_equal(table["shared, formula"], table["shared, counted"])
table

# %% [markdown]
# Equal, to the float. An eighth of the reads from shared memory remains, and each float that is read serves the four
# multiply-adds that it has to. Because a thread now has 64 results, half as many threads as in `thread_tile_1d` cover a
# block tile that is four times as large. That reduces the reads from global memory, too.
#
# ## What it costs
#
# Registers. Nsight Compute, NVIDIA's profiler, reported these numbers of the compiled kernels on an H200: registers per
# thread, and the warps that were there, as a percentage of those that a multiprocessor has room for.

# %%
counted = notebook.recorded("latest/counters.csv").set_index("stage")
counted.loc[list(table.index), ["registers", "warps_active_percent"]]

# %% [markdown]
# A thread of `thread_tile_2d` has 64 accumulators, 16 floats of fragments, and addresses. It takes almost four times
# the registers, so only a quarter of the threads fit. This is a good trade: each of these threads has 64 independent
# multiply-adds to go on with, where the many had one each and waited. But it is why a thread tile cannot grow without
# end.
#
# ## Your turn: multiply two fragments
#
# The innermost lines of `thread_tile_2d`, for you to write. Each of the 16 threads of this block computes a tile of
# T x T = 4 x 4 elements of C from tiles in shared memory, which have been copied already. Add the products of all
# k-steps `p` to `acc`, and read no float of the tiles more often than you must: read the fragments first, into arrays
# of your own. The next cell compares the product with NumPy's, and counts the reads.

# %%
T = 4


@cuda.jit
def fragments(a, b, c):
    a_tile = cuda.shared.array((16, 8), float32)
    b_tile = cuda.shared.array((8, 16), float32)
    t = cuda.threadIdx.x
    for i in range(t, 128, 16):
        a_tile[i // 8, i % 8] = a[i // 8, i % 8]
        b_tile[i // 16, i % 16] = b[i // 16, i % 16]
    cuda.syncthreads()
    row, col = t // 4 * T, t % 4 * T  # this thread's first element
    acc = cuda.local.array((T, T), float32)
    for i in range(T):
        for j in range(T):
            acc[i, j] = float32(0)
    # your loops over p, i and j
    for i in range(T):
        for j in range(T):
            c[row + i, col + j] = acc[i, j]


# %%
def judge(kernel):
    """Return True for a correct kernel, or a description of the fault."""
    a, b = np.random.default_rng(1).integers(-4, 5, (2, 128)).astype(np.float32)
    a, b, c = a.reshape(16, 8), b.reshape(8, 16), np.full((16, 16), np.nan, np.float32)
    try:
        found = trace(kernel, 1, 16, a, b, c)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if found.races:
        return f"a race: {found.races[0]}"
    if not np.array_equal(c, a @ b):
        i, j = np.argwhere(c != a @ b)[0]
        return f"c[{i}, {j}] is {c[i, j]}, and should be {(a @ b)[i, j]}"
    read = found.traffic.query("space == 'shared'")["read"].sum() // FLOAT32_BYTES
    most = 16 * 8 * 2 * T  # threads, k-steps, two fragments
    return (
        f"correct, but with {read} reads of shared memory, where {most} do"
        if read > most
        else True
    )


answered = notebook.check(partial(judge, fragments), ((), True))

# %% [markdown]
# A solution, if you want to see one:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cuda.jit
def fragments(a, b, c):
    a_tile = cuda.shared.array((16, 8), float32)
    b_tile = cuda.shared.array((8, 16), float32)
    t = cuda.threadIdx.x
    for i in range(t, 128, 16):
        a_tile[i // 8, i % 8] = a[i // 8, i % 8]
        b_tile[i // 16, i % 16] = b[i // 16, i % 16]
    cuda.syncthreads()
    row, col = t // 4 * T, t % 4 * T  # this thread's first element
    a_frag, b_frag = cuda.local.array(T, float32), cuda.local.array(T, float32)
    acc = cuda.local.array((T, T), float32)
    for i in range(T):
        for j in range(T):
            acc[i, j] = float32(0)
    for p in range(8):
        for i in range(T):
            a_frag[i] = a_tile[row + i, p]
            b_frag[i] = b_tile[p, col + i]
        for i in range(T):
            for j in range(T):
                acc[i, j] += a_frag[i] * b_frag[j]
    for i in range(T):
        for j in range(T):
            c[row + i, col + j] = acc[i, j]


assert notebook.check(partial(judge, fragments), ((), True))

# %% [markdown]
# ## Your turn again: the best tile
#
# A thread has `budget` registers for its accumulators and both fragments. Which tile, with extents that are powers of
# two and TM no larger than TN, reads the least from shared memory? Return `(tm, tn)`.


# %%
def best_tile(budget):
    return None  # your answer


# %%
powers = [1, 2, 4, 8, 16, 32]


def least(budget):
    fitting = [
        (tm, tn)
        for tm in powers
        for tn in powers
        if tm <= tn and tm * tn + tm + tn <= budget
    ]
    return min(fitting, key=lambda tile: traffic.shared_ratio(*tile))


budgets = [((budget,), least(budget)) for budget in (8, 24, 50, 100, 160, 230)]
answered = notebook.check(best_tile, *budgets)

# %% [markdown]
# A solution:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def best_tile(budget):
    # Double the shorter side as long as the tile fits: squares reuse most.
    tm, tn = 1, 1
    while True:
        grown = tuple(sorted((2 * tm, tn)))
        if grown[0] * grown[1] + sum(grown) > budget:
            return tm, tn
        tm, tn = grown


assert notebook.check(best_tile, *budgets)

# %% [markdown]
# A tile of 16 x 16 would take 288 registers, and a thread can have 255. So 8 x 16 is the limit, and later stages use
# it. Here it is 8 x 8.
#
# ## Prediction, model and measurement
#
# `thread_tile_2d` reads an eighth of the floats that `shared_tile` reads from shared memory, and shared memory was the
# bottleneck. How many times as fast is it, at M = N = K = 4096?

# %%
gain = notebook.predict("times as fast as shared_tile", ...)

# %%
results = notebook.measure("shared_tile", "thread_tile_1d", "thread_tile_2d")
notebook.compare(results)

# %%
table = notebook.compare(results)
took, bound = table["measured ms"], table["predicted ms"]
gain.reveal(
    took["shared_tile"] / took["thread_tile_2d"],
    model=bound["shared_tile"] / bound["thread_tile_2d"],
    because="The model counts wavefronts of shared memory, not floats: the remaining\n"
    "reads take more than one each. The model leaves out waiting. The stages take "
    + ", ".join(f"{took[name] / bound[name]:.2f}" for name in TILES)
    + "\ntimes their predicted times.",
)

# %%
draw.ladder_chart(results)

# %% [markdown]
# The multiply-adds are the same as before. The gain comes from fewer reads, and less waiting for them.
#
# ## The open question
#
# The kernel makes an eighth of the reads, and takes far more than an eighth of the time. By the model, shared memory
# is still busy longest. So the remaining reads must be slow ones. The trace shows it as `efficiency`: the smallest
# number of wavefronts that could serve the requests, divided by the number that they take.

# %%
lines = thread_tile_2d.lines
lines.loc[
    lines["space"] == "shared",
    ["array", "op", "bits", "requests", "per_request", "efficiency"],
]

# %% [markdown]
# Neighbouring threads now read elements of B that are eight floats apart, and the two halves of a warp read elements of
# A that are eight rows apart. Shared memory takes two to four wavefronts for what could take one. (The compiler reduces
# the number for B: it reads four neighbours at once.) [Notebook 4](04_vectors_and_banks.ipynb) explains why, and what a
# better order looks like. Puzzles 9 and 10, `thread_column` and `thread_tile`, ask you for both kernels of this
# notebook.
