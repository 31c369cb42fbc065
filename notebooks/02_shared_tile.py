# %% [markdown]
# # 2. Shared memory tile: `shared_tile`
#
# *Before this: [notebook 1](01_naive_and_coalesced.ipynb), and blocked slices of NumPy. Time: about 50 minutes.*
#
# **The question.** In `coalesced` every thread reads its own row of A and its own column of B. Its neighbours read
# nearly the same elements, each for itself. Can threads that need the same data share it?
#
# They can, in a memory that belongs to their block. The price is that threads now depend on each other: one must not
# read an element before another has written it. This notebook shows both, and what happens without the second.
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
# ## Elements that a block reads more than once
#
# One block of `coalesced` computes 8 x 8 elements of C, with K = 16. How often does it read each element of A that it
# needs? Count the threads that need one element.

# %%
reads = notebook.predict("loads of each element of A", ..., unit="per block")

# %% [markdown]
# `trace` runs chosen blocks on the simulator and records every access. Its arguments are the stage, its grid and its
# block, and then the kernel's own: alpha = 1, A, B, beta = 0 and C. `None, None` stands for the grid and block that the
# stage chooses itself. `config` sets the extents of a block's part of C, here BM x BN = 8 x 8, and `blocks` names the
# blocks to run.

# %%
a, b = np.ones((16, 16), np.float32), np.ones((16, 16), np.float32)
c = np.zeros((16, 16), np.float32)
one = [(0, 0, 0)]

config = TileConfig(BM=8, BN=8, BK=1)
before = trace("coalesced", None, None, 1, a, b, 0, c, blocks=one, config=config)
draw.who_reads_what(before)


# %%
def floats_read(found, array, space="global"):
    """Floats that threads load from an array, counted per thread."""
    table = found.traffic
    chosen = (table["array"] == array) & (table["space"] == space)
    return int(table.loc[chosen, "read"].sum()) // 4  # from bytes


reads.reveal(
    floats_read(before, "a") / (8 * 16),
    because="Each element of a row of A is needed by the 8 threads of that row of C.",
)

# %% [markdown]
# The block needs 8 rows of A and 8 columns of B, and loads each of their elements 8 times. The L1 cache may answer, but
# each load is still an instruction, and each request occupies the cache.
#
# ## The idea: a tile that the block shares
#
# **Shared memory** lies in the multiprocessor itself. `cuda.shared.array` allocates a piece of it that all threads of
# one block see, and no other block. It is about as fast as the L1 cache (both are one memory), but the kernel decides
# what it holds.
#
# Whole rows of A do not fit: a block may have some tens of thousands of floats. So the block walks along K in steps. In
# each step it copies a **tile** of A and a tile of B, one element of each per thread. Then all threads use all of them.
#
# ### The same in NumPy
#
# A block is one iteration of the two outer loops. A tile is a slice:


# %%
def tiled_product(a, b, size=8):
    m, k, n = *a.shape, b.shape[1]
    c = np.zeros((m, n), np.float32)
    for row in range(0, m, size):  # the blocks of the grid, in any order
        for col in range(0, n, size):
            acc = np.zeros((size, size), np.float32)  # one sum per thread
            for k0 in range(0, k, size):
                a_tile = a[row : row + size, k0 : k0 + size].copy()
                b_tile = b[k0 : k0 + size, col : col + size].copy()
                acc += a_tile @ b_tile
            c[row : row + size, col : col + size] = acc
    return c


x, y = np.random.default_rng(0).standard_normal((2, 16, 16), np.float32)
assert np.allclose(tiled_product(x, y), x @ y, atol=1e-5)

# %% [markdown]
# ### The kernel
#
# The whole kernel, from the file that runs. `a_tile`, `b_tile`, `k0` and `acc` are those of the NumPy version; `acc` is
# one number here, because each thread has its own.

# %%
notebook.source("shared_tile", function="shared_tile")

# %% [markdown]
# - BM, BN and BK are the extents of the block's tile of C and of its step along K. In the file, a function
#   `build(config, aligned)` contains the kernel. It takes the three from a configuration, so that the compiler sees
#   constants: here all three are 32 or 16, and 8 in tests. A call of `require` in `build` lists the conditions, such as
#   BM == BN == BK, and raises an error for a configuration that breaks one. (`aligned` matters from notebook 4 on.)
# - `fetch1` reads an element, or gives zero outside the matrix. Zeros add nothing to a sum, so the last tile along K
#   needs no case of its own.
# - `uint32` makes indices unsigned 32-bit integers. The compiler divides and combines them in fewer instructions.
# - `while p < BK` is `for p in range(BK)`. Numba's `range` hides from the compiler that `p` grows by one, and in
#   `coalesced` that cost much of the speed.
# - `alignment=16` lets an instruction read four neighbouring floats of a tile at once.
#
# ## Step one thread through a tile
#
# `cuda.syncthreads()` is a **barrier**: a thread waits there until all threads of its block have reached it. The test
# configuration has tiles of 8 x 8, so K = 16 makes two of them. Here is thread (2, 1) up to the first barrier, and then
# only the barriers:

# %%
rng = np.random.default_rng(0)
a, b = (rng.integers(1, 9, (8, 16)).astype(np.float32) for _ in range(2))
b = b.T
c = np.zeros((8, 8), np.float32)

arguments = (1, a, b, 0, c)
steps = list(step("shared_tile", None, None, *arguments, thread=(2, 1), config="test"))
for s in steps:
    if s.interval == 0 or s.kind == "barrier":
        print(s)

# %% [markdown]
# At the first barrier the thread has written one element of each tile, and so has every other thread. (Lines that count
# elements report what other threads have changed meanwhile. The simulator runs threads one after the other, so 53 of
# the 64 come after this one. At the third barrier fewer elements differ, since some new values equal the old ones.)
# Columns 0 to 7 of A are in the tile at the first barrier, and columns 8 to 15 at the third:

# %%
barriers = [s for s in steps if s.kind == "barrier"]
print(barriers[0].shared["a_tile"])
print(barriers[2].shared["a_tile"])

# %% [markdown]
# Between the barriers the thread adds eight terms from one tile, and then eight from the next. Its sum after each:

# %%
sums = [float(s.locals["acc"]) for s in steps if "acc" in s.changed]
print(sums)
print(sums[-1] == a[1] @ b[:, 2] == c[1, 2])

# %% [markdown]
# ## Who copies an element, and who uses it
#
# The same 8 x 8 elements of C as above, now by a block of `shared_tile`, with K = 16. How many floats of A and B
# together do its threads load from **global** memory? `coalesced` loaded 2 x 8 x 8 x 16 = 2048. And how often is each
# element of the **shared** tile of A read, in both steps along K together?

# %%
loaded = notebook.predict("floats from global memory", ..., unit="per block")
reused = notebook.predict("reads of each element of a_tile", ...)

# %%
a, b = np.ones((16, 16), np.float32), np.ones((16, 16), np.float32)
c = np.zeros((16, 16), np.float32)

after = trace("shared_tile", None, None, 1, a, b, 0, c, blocks=one, config="test")
draw.who_reads_what(after)

# %%
loaded.reveal(
    floats_read(after, "a") + floats_read(after, "b"),
    because="8 rows of A and 8 columns of B, 16 floats each, and each float once.",
)

# %% [markdown]
# Every thread has copied one element of the tile of A. The numbers are the threads':

# %%
draw.thread_map(after, "a_tile", "store")

# %% [markdown]
# The repeated reads have not vanished. They have moved to a memory that is nearer:

# %%
reused.reveal(
    floats_read(after, "a_tile", "shared") / (8 * 8),
    because="8 threads read it in each of the two steps along K.",
)

# %% [markdown]
# The same in bytes. `read` and `written` are the bytes that threads request, `moved` the bytes of whole sectors, and
# `different` counts every byte once, however often it is accessed. Shared memory has no sectors:

# %%
before.traffic

# %%
after.traffic

# %% [markdown]
# **Arithmetic intensity** is the number of floating-point operations (FLOP) per byte moved. A block performs
# `2 * 8 * 8 * K` FLOP, as a multiply-add counts as two. `requested` are the bytes that threads request from global
# memory, `sectors` the bytes of the sectors that hold them, `compulsory` the fewest possible, each byte once, and
# `shared` the bytes to and from shared memory (`inf` without any). A block of `shared_tile` requests no byte twice:

# %%
flops = 2 * 8 * 8 * 16
for found in (before, after):
    levels = found.intensity(flops).items()
    print(found.kernel, {level: round(value, 2) for level, value in levels})

# %% [markdown]
# ### Your turn: count the reuse
#
# How many floats of A and B together does `shared_tile` load from global memory, in all its blocks, for a product of
# `m`, `n` and `k`, with tiles of `size` x `size`? The extents are multiples of `size`. Replace `None`; the next cell
# compares your answer with the count of a trace.


# %%
def floats_loaded(m, n, k, size):
    return None  # your answer


# %%
def traced(m, n, k, size):
    x, y = np.ones((m, k), np.float32), np.ones((k, n), np.float32)
    z, config = np.zeros((m, n), np.float32), TileConfig(BM=size, BN=size, BK=size)
    found = trace("shared_tile", None, None, 1, x, y, 0, z, config=config)
    return floats_read(found, "a") + floats_read(found, "b")


cases = ((8, 8, 8, 8), (16, 8, 8, 4), (8, 16, 8, 8), (8, 8, 24, 4), (4, 4, 4, 2))
right = [(case, traced(*case)) for case in cases]
answered = notebook.check(floats_loaded, *right)

# %% [markdown]
# A solution:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def floats_loaded(m, n, k, size):
    # A multiply-add needs two floats; a loaded float serves `size` threads.
    return 2 * m * n * k // size


assert notebook.check(floats_loaded, *right)

# %% [markdown]
# ## Why there are two barriers
#
# The warps of a block do not run in step. One may be far ahead of another. Suppose that two threads access the same
# element of shared memory, one of them writes, and no barrier stands between. Then the result depends on which thread
# comes first: a **race**. On a GPU such a kernel may give the correct result a thousand times.
#
# Each barrier of `shared_tile` prevents one such **hazard**; the comments beside them say which. The next cell builds
# the stage from its own file, with one barrier replaced by `pass`:


# %%
def without_barrier(number):
    barrier = "cuda.syncthreads()"
    parts = inspect.getsource(shared_tile).split(barrier)
    first, second = barrier.join(parts[: number + 1]), barrier.join(parts[number + 1 :])
    broken = ModuleType("broken")
    broken.__package__ = shared_tile.__package__  # for its relative imports
    exec(compile(f"{first}pass{second}", shared_tile.__file__, "exec"), vars(broken))
    return dataclasses.replace(STAGES["shared_tile"], build=broken.build)


def run(stage):
    """Compute a product of two k-tiles, check it, and return the trace and C."""
    rng = np.random.default_rng(0)
    a, b = (rng.uniform(-1, 1, (8, 16)).astype(np.float32) for _ in range(2))
    c = np.full((8, 8), np.nan, np.float32)
    found = trace(stage, None, None, 1, a, b.T, 0, c, config="test")
    print(accuracy.compare(c, *accuracy.reference(1.0, a, b.T), k=16))
    return found, c


# %%
whole, _ = run(STAGES["shared_tile"])
print(whole.races)

# %% [markdown]
# Take out the **first** barrier, and threads read elements of the tiles before they are written. On this project's
# simulator, shared memory holds NaN until it is written. On a GPU it holds arbitrary old values.
#
# The simulator runs the threads in the order of their numbers. How many of the 64 elements of C become NaN? (A thread
# needs a row of `a_tile` and a column of `b_tile`. Which thread finds both complete?) And how many become NaN without
# the **second** barrier, but with the first?

# %%
first_nan = notebook.predict("NaN without the first barrier", ..., unit="of 64")
second_nan = notebook.predict("NaN without the second barrier", ..., unit="of 64")

# %%
first, c = run(without_barrier(0))
first_nan.reveal(
    np.isnan(c).sum(),
    because="Only the last thread, in row 7 and column 7, runs when all have written.",
)
for race in first.races:
    print(race)

# %% [markdown]
# `races` does not depend on the order of the threads: it compares who accessed an element between which barriers.
#
# Without the second barrier, a thread that has finished with a tile overwrites it with the next one, while others still
# read it:

# %%
second, c = run(without_barrier(1))
second_nan.reveal(
    np.isnan(c).sum(),
    because="Everything read was written before: plausible numbers, and wrong ones.",
)
for race in second.races:
    print(race)

# %% [markdown]
# Both reports name lines of the file: the copy into the tile, and the multiplication. The next picture shows the
# accesses of thread 0, first in the real kernel. One column is the time from one barrier to the next. Writes and reads
# of a tile alternate:

# %%
draw.timeline(whole, thread=0)

# %% [markdown]
# Without the second barrier, reads of a tile and writes of the next share a column:

# %%
draw.timeline(second, thread=0)

# %% [markdown]
# ### Your turn: place the barriers
#
# `smooth` replaces each of 64 elements by the mean of itself and its left neighbour, `turns` times, in shared memory.
# It has no barrier. Add `cuda.syncthreads()` where it is needed, and nowhere else. All threads of the block must reach
# each barrier equally often. The next cell prints the first fault: the line and the threads of a race, a wrong element,
# or barriers that are not needed.


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
def judge(kernel):
    """Return True for a correct kernel, or a description of the fault."""
    start = np.random.default_rng(0).integers(0, 100, 64).astype(np.float32)
    expected = start.copy()
    for _ in range(3):
        left = np.r_[expected[:1], expected[:-1]]
        expected = (left + expected) * np.float32(0.5)
    for seed in (None, 1):  # two orders of the threads
        x = start.copy()
        try:
            found = trace(kernel, 1, 64, x, 3, seed=seed)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if found.races:
            return f"a race: {found.races[0]}"
        if not np.array_equal(x, expected):
            i = np.flatnonzero(x != expected)[0]
            return f"no race, but x[{i}] is {x[i]}, and should be {expected[i]}"
        if (passed := len(found.barriers)) > 6:
            return f"correct, but with {passed} barriers in 3 turns, where 6 do"
    return True


answered = notebook.check(partial(judge, smooth), ((), True))

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


assert notebook.check(partial(judge, smooth), ((), True))

# %% [markdown]
# ## Prediction, model and measurement
#
# A block of the real configuration, 32 x 32, loads a thirty-second of the floats that `coalesced` loads from global
# memory. How many times as fast is it, at M = N = K = 4096?

# %%
gain = notebook.predict("times as fast as coalesced", ...)

# %%
results = notebook.measure("coalesced", "shared_tile")
notebook.compare(results)

# %%
table = notebook.compare(results)
predicted = table["predicted ms"]
counted = notebook.recorded("latest/counters.csv").set_index("stage")["instructions"]
instructions = counted["coalesced"] / counted["shared_tile"]
gain.reveal(
    table.loc["shared_tile", "gain"],
    model=predicted["coalesced"] / predicted["shared_tile"],
    because="The model counts only what passes through L1 and shared memory. "
    f"coalesced also issues {instructions:.1f} times as many instructions.",
)

# %%
draw.ladder_chart(results)

# %% [markdown]
# Far less than 32 times. The caches answered most of the loads of `coalesced`, so loads from global memory were not
# its bottleneck. Its bottleneck was the number of requests. Here are those of `shared_tile` to shared memory, per
# multiply-add of a warp:

# %%
own = after.lines[after.lines["space"] == "shared"]
multiply_adds = 8 * 8 * 16 // 32  # a warp makes 32 at once
columns = ["line", "array", "op", "requests", "per_request", "each"]
own.assign(each=own["requests"] / multiply_adds)[columns]

# %% [markdown]
# `per_request` are **wavefronts**: the passes in which shared memory serves one request of a warp. Notebook 4 is about
# them. `each` is the point here: per multiply-add, a warp loads one value of `a_tile` and one of `b_tile`. `coalesced`
# had two loads per multiply-add as well. The tile made them nearer, not fewer.
#
# (The table counts the source. The compiler joins four loads of `a_tile`, which are neighbours, into one of 128 bits.
# On an H200 that takes two wavefronts instead of four, and the model includes it.)
#
# ## The open question
#
# Two loads per multiply-add are the bottleneck. A thread's own registers are nearer still. Can a thread use a value
# more than once after loading it? That is [notebook 3](03_thread_tiles.ipynb). Puzzles 5 to 8, `transpose`,
# `barriers`, `shared_tile` and `edges`, ask you for tiles and barriers of your own.
