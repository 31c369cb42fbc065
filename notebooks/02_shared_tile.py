# %% [markdown]
# # 2. Read once, use by many: `shared_tile`
#
# **The question.** In `coalesced` every thread reads its own row of A and its own column of B, and its neighbours read
# nearly the same, each for itself. Can threads that need the same data share it?
#
# They can, in a memory that a block has for itself. What it costs is that threads now depend on each other: one must
# not read before another has written. This notebook shows both, and what happens when the second is forgotten.
#
# Run the cells from top to bottom. The outputs that are stored here are of a run on a machine with an NVIDIA H200;
# the next cell says where yours happens.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("numba_gemm") is None:  # a fresh machine, such as Colab's
    subprocess.check_call([sys.executable, "-m", "pip", "install", "-q", "numba-gemm[cu12,notebooks]"])

from numba_gemm.lab import notebook

notebook.begin()

# %%
import dataclasses
import inspect
from functools import partial
from types import ModuleType

import numpy as np
from numba import cuda, float32

from numba_gemm.inspect import draw, step, trace
from numba_gemm.kernels.ladder import STAGES, TileConfig, shared_tile
from numba_gemm.models import accuracy

# %% [markdown]
# ## What a block reads twice
#
# A block of `coalesced` that computes 8 x 8 elements of C, with K = 16. How often does it read each element of A?

# %%
a, b = np.ones((16, 16), np.float32), np.ones((16, 16), np.float32)
c = np.zeros((16, 16), np.float32)

before = trace("coalesced", None, None, 1, a, b, 0, c, blocks=[(0, 0, 0)], config=TileConfig(BM=8, BN=8, BK=1))
draw.who_reads_what(before)

# %% [markdown]
# 8 rows of A and 8 columns of B, and each element of them 8 times: once for each thread that needs it. A cache may
# answer, but each of these loads is an instruction, and takes its turn at the cache.
#
# ## The one idea: a tile that the block shares
#
# **Shared memory** lies in the multiprocessor itself. `cuda.shared.array` takes a piece of it, which all threads of a
# block see, and no other block. It is about as fast as the L1 cache (they are one memory, in fact), but what lies in
# it is decided by the kernel.
#
# There is not room for whole rows of A: a block may ask for some tens of thousands of floats. So it walks along K in
# steps, and at each step takes a **tile** of A and a tile of B. Each thread brings one element of each. Then all
# threads use all of them.

# %%
notebook.source("shared_tile", function="build")

# %% [markdown]
# `build` makes the kernel for a configuration: BM and BN are the extents of the block's part of C, BK those of its step
# along K. Here all three are the same, 32 or 16. They are constants to the compiler. `fetch1` reads an element, or
# gives zero outside of the matrix: zeros add nothing to a sum, so the last tile along K needs no case of its own.
#
# What is new since `coalesced`. One idea, but most of the file.

# %%
notebook.difference("coalesced", "shared_tile")

# %% [markdown]
# ## Step one thread through a tile
#
# `cuda.syncthreads()` is a **barrier**: a thread waits there until all threads of its block have come. The test
# configuration has tiles of 8 x 8. K = 16 makes two of them. Thread (2, 1) up to the first barrier, and then only the
# barriers:

# %%
rng = np.random.default_rng(0)
a, b = (rng.integers(1, 9, (8, 16)).astype(np.float32) for _ in range(2))
b = b.T
c = np.zeros((8, 8), np.float32)

steps = list(step("shared_tile", None, None, 1, a, b, 0, c, thread=(2, 1), config="test"))
for s in steps:
    if s.interval == 0 or s.kind == "barrier":
        print(s)

# %% [markdown]
# At the first barrier the thread has written one element of each tile, and all others have done the same. (The lines
# that count elements tell what others have changed while it waited. The simulator runs threads in turn, so 53 of the
# 64 come after this one; at the third barrier fewer elements differ, as some of the new values are by chance the old
# ones.) This is what it sees then: columns 0 to 7 of A. And at the third, columns 8 to 15:

# %%
barriers = [s for s in steps if s.kind == "barrier"]
print(barriers[0].shared["a_tile"])
print(barriers[2].shared["a_tile"])

# %% [markdown]
# Between the barriers it adds up eight terms from one tile, and then eight from the next. Its sum after each:

# %%
sums = [float(s.locals["acc"]) for s in steps if "acc" in s.changed]
print(sums)
print(sums[-1] == a[1] @ b[:, 2] == c[1, 2])

# %% [markdown]
# ## Who brings what, and who uses it
#
# The same 8 x 8 elements of C as above, now by a block of `shared_tile`:

# %%
a, b = np.ones((16, 16), np.float32), np.ones((16, 16), np.float32)
c = np.zeros((16, 16), np.float32)

after = trace("shared_tile", None, None, 1, a, b, 0, c, blocks=[(0, 0, 0)], config="test")
draw.who_reads_what(after)

# %% [markdown]
# Each element once. Every thread has brought one element of the tile of A; the numbers are the threads':

# %%
draw.thread_map(after, "a_tile", "store")

# %% [markdown]
# And this often each is read from the tile, in two steps along K. The reads have not vanished. They have moved to a
# memory that is nearer:

# %%
draw.reuse_map(after, "a_tile")

# %% [markdown]
# The same in bytes. `read` and `written` is what threads ask for, `moved` what goes in sectors, of which shared memory
# has none:

# %%
before.traffic

# %%
after.traffic

# %% [markdown]
# **Arithmetic intensity** is how much a kernel computes for each byte that it moves. A block makes `2 * 8 * 8 * K`
# FLOP (a multiply-add counts as two). `requested` are the bytes that threads ask of global memory, `sectors` those
# that move for that, `compulsory` those that must come at least, each once, and `shared` those that go to and from
# shared memory (`inf` where there are none). A block of `shared_tile` asks for no byte twice:

# %%
flops = 2 * 8 * 8 * 16
for found in (before, after):
    print(found.kernel, {level: round(value, 2) for level, value in found.intensity(flops).items()})

# %% [markdown]
# ### Your turn: count the reuse
#
# How many floats of A and B together does `shared_tile` load from global memory, in all its blocks, for a product of
# `m`, `n` and `k`, with tiles of `size` x `size`? The extents are multiples of it. Replace `None`; the next cell
# compares your answer with what was traced.


# %%
def floats_loaded(m, n, k, size):
    return None  # your answer


# %%
def traced(m, n, k, size):
    x, y, z = np.ones((m, k), np.float32), np.ones((k, n), np.float32), np.zeros((m, n), np.float32)
    found = trace("shared_tile", None, None, 1, x, y, 0, z, config=TileConfig(BM=size, BN=size, BK=size)).traffic
    return int(found[found["space"] == "global"]["read"].sum()) // 4


right = [(case, traced(*case)) for case in ((8, 8, 8, 8), (16, 8, 8, 4), (8, 16, 8, 8), (8, 8, 24, 4), (4, 4, 4, 2))]
answered = notebook.check(floats_loaded, *right)

# %% [markdown]
# A solution:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def floats_loaded(m, n, k, size):
    # Each multiply-add needs one float of A and one of B; a float that is loaded serves `size` threads.
    return 2 * m * n * k // size


assert notebook.check(floats_loaded, *right)

# %% [markdown]
# ## Why there are two barriers
#
# Threads of a block do not run in step. A warp may be far ahead of another. If two threads access the same element of
# shared memory, one of them writes, and no barrier stands between, then the result depends on who comes first: a
# **race**. On a GPU it may come out right a thousand times.
#
# Each barrier of `shared_tile` stops one such **hazard**; the comments beside them say which. Take one out, and see.
# This makes the stage from its own file, with one barrier replaced by `pass`:


# %%
def without_barrier(number):
    barrier = "cuda.syncthreads()"
    parts = inspect.getsource(shared_tile).split(barrier)
    text = barrier.join(parts[: number + 1]) + "pass" + barrier.join(parts[number + 1 :])
    broken = ModuleType("broken")
    broken.__package__ = shared_tile.__package__  # for its relative imports
    exec(compile(text, shared_tile.__file__, "exec"), vars(broken))
    return dataclasses.replace(STAGES["shared_tile"], build=broken.build)


def run(stage):
    """A product of two k-tiles, judged as in notebook 0; returns what was traced."""
    rng = np.random.default_rng(0)
    a, b = (rng.uniform(-1, 1, (8, 16)).astype(np.float32) for _ in range(2))
    c = np.full((8, 8), np.nan, np.float32)
    found = trace(stage, None, None, 1, a, b.T, 0, c, config="test")
    print(accuracy.compare(c, *accuracy.reference(1.0, a, b.T), k=16))
    return found


# %%
whole = run(STAGES["shared_tile"])
print(whole.races)

# %% [markdown]
# **Without the first**, threads read elements of the tiles that nobody has written yet. In this project's simulator
# such memory holds NaN, so it shows at once. On a GPU it holds whatever was there. `races` needs no such luck: it looks
# at who accessed what between which barriers, not at the result.

# %%
first = run(without_barrier(0))
for race in first.races:
    print(race)

# %% [markdown]
# **Without the second**, a thread that is done with a tile writes the next one over it, while others still read. No
# NaN is there to tell. The numbers are plausible, and wrong:

# %%
second = run(without_barrier(1))
for race in second.races:
    print(race)

# %% [markdown]
# Both name the lines of the file: the copy into the tile, and the multiplication. What thread 0 does between barriers,
# first in the real kernel. A column is the time from one barrier to the next; writes and reads of a tile alternate:

# %%
draw.timeline(whole, thread=0)

# %% [markdown]
# And without the second barrier: reads of a tile and writes of the next share a column.

# %%
draw.timeline(second, thread=0)

# %% [markdown]
# ### Your turn: place the barriers
#
# `smooth` replaces each of 64 elements by the mean of itself and its left neighbour, `turns` times, in shared memory.
# It has no barrier. Add `cuda.syncthreads()` where it is needed, and nowhere else. All threads of the block must come
# to each barrier, as often as each other.


# %%
@cuda.jit
def smooth(x, turns):
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    for _ in range(turns):
        mean = (tile[max(t - 1, 0)] + tile[t]) * float32(0.5)
        tile[t] = mean
    x[t] = tile[t]


# %%
def races_and_right(kernel):
    """How many pairs of lines race, and whether the result is NumPy's, whatever the order of the threads."""
    start = np.random.default_rng(0).integers(0, 100, 64).astype(np.float32)
    expected = start.copy()
    for _ in range(3):
        expected = (np.r_[expected[:1], expected[:-1]] + expected) * np.float32(0.5)
    found, same = 0, True
    for seed in (None, 1):
        x = start.copy()
        found = max(found, len(trace(kernel, 1, 64, x, 3, seed=seed).races))
        same = same and np.array_equal(x, expected)
    return found, same


answered = notebook.check(partial(races_and_right, smooth), ((), (0, True)))

# %% [markdown]
# A solution:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cuda.jit
def smooth(x, turns):
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    for _ in range(turns):
        cuda.syncthreads()  # the neighbour's element is written before it is read
        mean = (tile[max(t - 1, 0)] + tile[t]) * float32(0.5)
        cuda.syncthreads()  # it is read before the neighbour overwrites it
        tile[t] = mean
    x[t] = tile[t]  # written by this very thread: no barrier


assert notebook.check(partial(races_and_right, smooth), ((), (0, True)))

# %% [markdown]
# ## Predict, then measure
#
# A block of the real configuration, 32 x 32, loads a thirty-second of the floats. Is it 32 times as fast? The
# prediction stands beside the measurement:

# %%
results = notebook.measure("coalesced", "shared_tile")
notebook.compare(results)

# %%
draw.ladder_chart(results)

# %% [markdown]
# Faster, but by less than half. The reads of global memory were not all that stood in the way, since a cache
# answered most of them. Look at what is left, for each multiply-add of a warp:

# %%
own = after.lines[after.lines["space"] == "shared"]
multiply_adds = 8 * 8 * 16 // 32  # a warp makes 32 at once
own.assign(each=own["requests"] / multiply_adds)[["line", "array", "op", "requests", "per_request", "each"]]

# %% [markdown]
# `per_request` are **wavefronts**: the passes that shared memory takes to answer one request of a warp. Notebook 4
# looks at them. `each` is the point here: for every multiply-add a warp loads a value of `a_tile` and one of
# `b_tile`. (That is the source. The compiler joins four loads of `a_tile`, which are neighbours, into one of 128
# bits, and on an H200 that takes two wavefronts instead of four. The prediction reckons with it.) `coalesced` had two
# loads for each as well. The tile made them nearer, not fewer; and shared memory and the L1 cache are one memory with
# one data path, which is what the model names as `shared`.
#
# ## The question it leaves open
#
# Two loads for one multiply-add. There is a memory that is nearer still: a thread's own registers. Can a thread use a
# value that it has loaded more than once? That is [notebook 3](03_thread_tiles.ipynb).
