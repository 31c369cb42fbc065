# %% [markdown]
# # 3. Register tiles: `thread_tile_1d` and `thread_tile_2d`
#
# *Before this: [notebook 2](02_shared_tile.ipynb). Time: about 55 minutes.*
#
# **The question.** In [notebook 2](02_shared_tile.ipynb) a block fetched its tiles of A and B from global memory once,
# into shared memory. But every multiply-add still reads two floats from there, and shared memory cannot give them as
# fast as they could be multiplied: it sets the pace. Is there a place nearer to a thread? There is, the thread's own
# **registers**, and this notebook is about what to keep in them.
#
# Run the cells from top to bottom. The outputs that are stored here are of a run on a machine with an NVIDIA H200; the
# next cell says where yours happens.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("numba_gemm") is None:  # a fresh machine, such as Colab's
    subprocess.check_call([sys.executable, "-m", "pip", "install", "-q", "numba-gemm[cu12,notebooks]"])

from numba_gemm.lab import notebook

notebook.begin()

# %%
import numpy as np
import pandas as pd

from numba_gemm.inspect import draw, step, trace
from numba_gemm.kernels.ladder import STAGES
from numba_gemm.models import prediction, traffic
from numba_gemm.models.roofline import FLOAT32_BYTES, FP32_LANES_PER_SM

# %% [markdown]
# ## Why two floats a multiply-add are too many
#
# Here is `shared_tile` once more, one block and one tile of K, with every access recorded. (Its configuration is
# 16 x 16, which the simulator finishes sooner.) How many floats do its threads read from shared memory, for each
# multiply-add that they make?

# %%
TILES = {
    "shared_tile": STAGES["shared_tile"].configs[1],
    "thread_tile_1d": STAGES["thread_tile_1d"].configs[0],
    "thread_tile_2d": STAGES["thread_tile_2d"].configs[0],
}


def traced(stage):
    """One block of a stage, and one tile of K."""
    tile = TILES[stage]
    a, b = np.ones((tile.BM, tile.BK), np.float32), np.ones((tile.BK, tile.BN), np.float32)
    c = np.zeros((tile.BM, tile.BN), np.float32)
    return trace(stage, None, None, 1, a, b, 0, c, config=tile)


def shared_floats(trace, stage):
    """Floats that threads read from shared memory, for each multiply-add."""
    tile = TILES[stage]
    read = trace.traffic.loc[trace.traffic["space"] == "shared", "read"].sum() / FLOAT32_BYTES
    return read / (tile.BM * tile.BN * tile.BK)


shared_tile = traced("shared_tile")
print("floats from shared memory a multiply-add:", shared_floats(shared_tile, "shared_tile"))

# %% [markdown]
# One of A and one of B, as the source says. What could shared memory serve? A multiprocessor of an H200 issues this
# many multiply-adds per clock, and its shared memory delivers this many floats per clock:

# %%
print("multiply-adds a clock:", FP32_LANES_PER_SM[9, 0])
print("floats a clock:       ", prediction.SHARED_BYTES_A_CLOCK // FLOAT32_BYTES)

# %% [markdown]
# To keep the arithmetic busy, a float from shared memory has to serve four multiply-adds, not half of one. The general
# word for this is **arithmetic intensity**: floating-point operations (FLOP; a multiply-add is two) for each byte that
# is moved. It is counted at each level of memory by itself. Four multiply-adds a float are 2 FLOP a byte of shared
# memory. And `shared_tile` has, counting what its threads write there, too:


# %%
def intensity(trace, stage):
    """FLOP a byte that is read from or written to shared memory."""
    tile = TILES[stage]
    return round(trace.intensity(2 * tile.BM * tile.BN * tile.BK)["shared"], 2)


print("FLOP a byte of shared memory:", intensity(shared_tile, "shared_tile"))

# %% [markdown]
# ## The first idea: a column for each thread
#
# A **register** holds 32 bits, belongs to one thread, and an instruction reads three of them and writes one in the time
# of the instruction itself. Nothing is nearer. A multiprocessor has 65,536; a thread can have up to 255.
#
# `acc` in `shared_tile` is one: a Python scalar in a kernel lives in a register. `thread_tile_1d` gives each thread TM
# = 8 elements of C, one below the other, and so TM accumulators. Then an element of B, once read into a register,
# serves TM multiply-adds:

# %%
notebook.source("thread_tile_1d", function="thread_tile_1d")

# %% [markdown]
# `cuda.local.array` is memory of the thread's own. The name is misleading: such an array becomes registers where every
# index into it is known when the kernel is compiled, because registers have no addresses. The loops `for i in
# range(TM)` are **unrolled**, that is, written out TM times with i = 0, 1, 2, ... in place of the variable, as TM is a
# constant of the configuration. The project's tests compile every stage, and fail if an accumulator is not in a
# register.
#
# The extents of the tiles no longer have to be equal, so each thread also works out twice where it belongs: once for
# copying (`a_row`, `a_col`, `b_row`, `b_col`), once for computing (`row`, `col`). What changes from `shared_tile`:

# %%
notebook.difference("shared_tile", "thread_tile_1d", context=1)

# %% [markdown]
# ### Step one thread
#
# Thread 17 of a small configuration, 16 x 16 x 4 with TM = 4. Of the steps, only those are shown in which `b_value` or
# an accumulator changes, for the first two k-steps. B is read once, then four multiply-adds follow:

# %%
a = np.arange(1, 65, dtype=np.float32).reshape(16, 4)
b = np.arange(1, 65, dtype=np.float32).reshape(4, 16)
c = np.zeros((16, 16), np.float32)

with step("thread_tile_1d", None, None, 1, a, b, 0, c, thread=17, config="test") as steps:
    for s in steps:
        if s.locals.get("p") == 2:
            break
        if "p" in s.locals and {"b_value", "acc"} & set(s.changed):
            print(s)

# %% [markdown]
# (The line that is named is the one that comes next, here always the head of the loop.)
#
# ### Who reads what
#
# Global memory first, as in the notebooks before. Copying is shared out among the threads of a block, so what a thread
# copies is not what it computes with: one element of A and one of B here, and a column of eight of C.

# %%
thread_tile_1d = traced("thread_tile_1d")
draw.who_reads_what(thread_tile_1d, thread=70)

# %% [markdown]
# What is new happens in shared memory. So here is the same picture of the shared tiles of A and B: what the same thread
# reads of them, and which elements of C it writes.

# %%
draw.who_reads_what(thread_tile_1d, thread=70, shared=True)

# %% [markdown]
# The thread computes eight elements of C, and for that reads eight rows of A and one column of B: a float of B serves
# eight multiply-adds, one of A still only one.

# %%
print("floats from shared memory a multiply-add:", shared_floats(thread_tile_1d, "thread_tile_1d"))
print("FLOP a byte of shared memory:", intensity(thread_tile_1d, "thread_tile_1d"))

# %% [markdown]
# ## The second idea: rows and columns, the outer product
#
# If a column of results lets B be used again, a row lets A be. `thread_tile_2d` gives a thread a tile of TM x TN = 8 x
# 8 elements of C. For each k it reads eight floats of A and eight of B into registers, the **fragments**, and
# multiplies each with each: 64 multiply-adds for 16 floats. That is the **outer product** of two vectors, `np.outer`,
# and a matrix product is the sum of the outer products of A's columns with B's rows:

# %%
notebook.difference("thread_tile_1d", "thread_tile_2d", context=1)

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
        print(f"k = {s.locals['p'] - 1}: {left} times {right} gives\n{np.outer(left, right)}")
print(f"acc, rows 4 to 7 and columns 2 and 3 of C:\n{expected}")
assert np.array_equal(c[4:8, 2:4], expected)

# %% [markdown]
# ### Who reads what

# %%
thread_tile_2d = traced("thread_tile_2d")
draw.who_reads_what(thread_tile_2d, thread=70, shared=True)

# %% [markdown]
# 64 reads of A, 64 of B, for eight k-steps of 64 multiply-adds each:

# %%
print("floats from shared memory a multiply-add:", shared_floats(thread_tile_2d, "thread_tile_2d"))
print("FLOP a byte of shared memory:", intensity(thread_tile_2d, "thread_tile_2d"))

# %% [markdown]
# How often is a float of the shared tile of B read, by all threads together? 16 times, by those that stand one below
# the other in C. Without thread tiles it would have been once for each of the 128 rows.

# %%
draw.reuse_map(thread_tile_2d, "b_tile")

# %% [markdown]
# ## The arithmetic of tiles
#
# Both kinds of tile save by the same rule. A rectangle of `rows x columns` results needs `rows + columns` floats for
# each k, and makes `rows * columns` multiply-adds of them; without tiles, each of those would read two floats. So what
# is left is `(rows + columns) / (2 * rows * columns)`, which is `(1/rows + 1/columns) / 2`.
#
# - The **block tile**, BM x BN, is read from global memory: `(1/BM + 1/BN) / 2` is left.
# - The **thread tile**, TM x TN, is read from shared memory: `(1/TM + 1/TN) / 2` is left.
#
# `numba_gemm.models.traffic` has these formulas, with their source. Beside them stands what the trace counted:


# %%
def ratios(**traces):
    """By the formulas, and by counting: what is left of two reads for each multiply-add."""
    rows = []
    for stage, found in traces.items():
        tile = TILES[stage]
        untiled = FLOAT32_BYTES * traffic.shared_reads_untiled(tile.BM, tile.BN, tile.BK)
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


table = ratios(shared_tile=shared_tile, thread_tile_1d=thread_tile_1d, thread_tile_2d=thread_tile_2d)
assert np.array_equal(table["global, formula"], table["global, counted"])
assert np.array_equal(table["shared, formula"], table["shared, counted"])
table

# %% [markdown]
# Equal, to the float. Of what threads would read from shared memory, an eighth is left, and each float that is read
# serves the four multiply-adds that were asked for above. And because a thread now has 64 results, half as many
# threads as in `thread_tile_1d` cover a block tile four times as large, which cuts what comes from global memory,
# too.
#
# ## What it costs
#
# Registers. These numbers are of the compiled kernels, as Nsight Compute (NVIDIA's profiler) reported them on an H200:
# registers for each thread, and how many of the warps that a multiprocessor has room for were there, in percent.

# %%
counted = notebook.recorded("latest/counters.csv").set_index("stage")
counted.loc[list(table.index), ["registers", "warps_active_percent"]]

# %% [markdown]
# 64 accumulators, 16 floats of fragments, and addresses: a thread of `thread_tile_2d` takes almost four times the
# registers, so that only a quarter of the threads fit. That looks alarming, and is a good trade: each of the few
# threads has 64 independent multiply-adds to go on with, where the many had one each and waited. But it is why a thread
# tile cannot grow without end.
#
# ## Your turn
#
# First: how many floats does a thread with a TM x TN tile read from shared memory for each multiply-add? Replace
# `None`; the next cell compares your answer with the model's count.


# %%
def floats_read(tm, tn):
    return None  # your answer


# %%
tiles = [(1, 1), (8, 1), (4, 4), (8, 8), (8, 16)]
right = [((tm, tn), traffic.shared_reads(128, 128, 8, tm, tn) / (128 * 128 * 8)) for tm, tn in tiles]
answered = notebook.check(floats_read, *right)

# %% [markdown]
# A solution, if you want to see one:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def floats_read(tm, tn):
    # tm floats of A and tn of B, for tm * tn multiply-adds.
    return 1 / tm + 1 / tn


assert notebook.check(floats_read, *right)

# %% [markdown]
# Second: a thread has `budget` registers for its accumulators and both fragments. Which tile, with extents that are
# powers of two and TM no larger than TN, reads the least from shared memory? Return `(tm, tn)`.


# %%
def best_tile(budget):
    return None  # your answer


# %%
powers = [1, 2, 4, 8, 16, 32]


def least(budget):
    fitting = [(tm, tn) for tm in powers for tn in powers if tm <= tn and tm * tn + tm + tn <= budget]
    return min(fitting, key=lambda tile: traffic.shared_ratio(*tile))


budgets = [((budget,), least(budget)) for budget in (8, 24, 50, 100, 160, 230)]
answered = notebook.check(best_tile, *budgets)

# %% [markdown]
# A solution:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def best_tile(budget):
    # Start from one element, and double the shorter side as long as the tile fits: squares reuse most.
    tm, tn = 1, 1
    while True:
        grown = tuple(sorted((2 * tm, tn)))
        if grown[0] * grown[1] + sum(grown) > budget:
            return tm, tn
        tm, tn = grown


assert notebook.check(best_tile, *budgets)

# %% [markdown]
# A tile of 16 x 16 would take 288 registers, and a thread can have 255. So 8 x 16 is the end, and later stages go
# there. Here it is 8 x 8.
#
# ## Predict, then measure
#
# The model counts the same traffic for a whole product, and says which resource is busy longest. `measure` times the
# stages beside cuBLAS.

# %%
results = notebook.measure("shared_tile", "thread_tile_1d", "thread_tile_2d")
notebook.compare(results)

# %%
draw.ladder_chart(results)

# %% [markdown]
# Each of the two ideas makes the kernel more than 1.5 times as fast, and both together almost three times as fast. The
# multiply-adds are the same as before. What was saved is reading, and waiting for what is read.
#
# ## The question it leaves open
#
# And yet: an eighth of the reads, but nowhere near an eighth of the time; by the model, shared memory still is what is
# busy longest. So the reads that are left must be slow ones. The trace has a word for it, `efficiency`:

# %%
lines = thread_tile_2d.lines
lines.loc[lines["space"] == "shared", ["array", "op", "bits", "requests", "per_request", "efficiency"]]

# %% [markdown]
# Threads that stand side by side now read B eight floats apart, and A eight rows apart, and shared memory takes two to
# four turns for what can be had in one. (The compiler mends a part of it, by reading four neighbours of B at once.)
# Why, and what a better order looks like, is [notebook 4](04_vectors_and_banks.ipynb).
