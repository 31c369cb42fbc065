# %% [markdown]
# # 1. Who walks along a row: `naive` and `coalesced`
#
# **The question.** In notebook 0 each thread computed one element of C. The result was right. Is a thread's place in
# its block then a matter of taste? It is worth a factor of more than twelve, and this notebook shows why.
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
import numpy as np

from numba_gemm.inspect import draw, step, trace
from numba_gemm.models import requests

# %% [markdown]
# ## The kernel
#
# This is the file that runs, not a copy. Each thread of `naive` finds its row and column from its place in the grid,
# and adds up a row of A times a column of B: eight terms per iteration as long as there are eight, then the rest one by
# one. `axpby` is a **device function** of `numba_gemm.device`, that is, a function that kernels call. It returns
# `alpha * acc + beta * c`.

# %%
notebook.source("naive")

# %% [markdown]
# Consecutive threads differ in `threadIdx.x`, and `naive` takes the **row** from it. So the 32 threads of a warp,
# which run in step, stand one below the other in C.
#
# ## Step one thread
#
# Thread (1, 0) of a block, line by line. This is Numba's simulator running the kernel itself.

# %%
a = np.array([[1, 2], [3, 4]], np.float32)
b = np.array([[10, 20], [30, 40]], np.float32)
c = np.zeros((2, 2), np.float32)

for s in step("naive", None, None, 1, a, b, 0, c, thread=(1, 0), config="test"):
    print(s)
print(c)

# %% [markdown]
# ## Who reads what
#
# The same kernel once more, on larger matrices and in its real configuration, with every access recorded. One warp:
# which elements of A and B it reads, and which of C it writes.

# %%
a, b = np.ones((64, 32), np.float32), np.ones((32, 64), np.float32)
c = np.zeros((64, 64), np.float32)

naive = trace("naive", None, None, 1, a, b, 0, c, blocks=[(0, 0, 0)])
draw.who_reads_what(naive, warp=0)

# %% [markdown]
# A warp reads 32 rows of A, one element of each at a time: 32 addresses that are a row apart. Memory does not move
# floats, it moves **sectors** of 32 bytes, eight floats. `trace` groups the accesses of a warp by the instruction
# that makes them, as the hardware does: one instruction of one warp is a **request**. `per_request` are the sectors
# that a request takes, and `efficiency` the fewest that would do, over those:

# %%
columns = ["array", "op", "requests", "per_request", "efficiency"]
naive.lines[columns]

# %% [markdown]
# A load of `a` takes 32 sectors for 32 floats: an eighth of what moves is used. Here is one of them. A row of the
# picture is a **line** of 128 bytes, four sectors, which is how the caches divide memory:

# %%
loads = naive.requests
first = int(loads.index[(loads["array"] == "a") & (loads["op"] == "load")][0])
draw.sector_map(naive, first)

# %% [markdown]
# ## The one idea: swap the axes
#
# `coalesced` takes the column from `threadIdx.x`. That is all that changes in the kernel. Its blocks have a shape
# that suits it, 2 rows of 128 threads, where `naive` has 32 x 32. What is generated here is the difference between
# the two files:

# %%
notebook.difference("naive", "coalesced")

# %%
coalesced = trace("coalesced", None, None, 1, a, b, 0, c, blocks=[(0, 0, 0)])
draw.who_reads_what(coalesced, warp=0)

# %%
coalesced.lines[columns]

# %% [markdown]
# Now a warp stands along a row of C. Its 32 elements of B are neighbours, and fill four sectors; all of its threads
# read the same element of A, which comes in one sector and is handed to all.

# %%
loads = coalesced.requests
first = int(loads.index[(loads["array"] == "b") & (loads["op"] == "load")][0])
draw.sector_map(coalesced, first)

# %% [markdown]
# ## Your turn
#
# 32 threads read `x[thread * stride]` from a float32 array that begins at a multiple of 256 bytes. How many sectors
# does the request take? Replace `None`; the next cell compares your answer with what the hardware's rule gives.


# %%
def sectors(stride):
    return None  # your answer


# %%
strides = (1, 2, 3, 4, 8, 100)
right = [((stride,), requests.sectors([(t, 4 * t * stride) for t in range(32)], 4)) for stride in strides]
answered = notebook.check(sectors, *right)

# %% [markdown]
# A solution, if you want to see one:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def sectors(stride):
    # Up to a stride of 8 every sector from the first address to the last is touched; beyond, none is shared.
    return min(32, (31 * stride * 4) // 32 + 1)


assert notebook.check(sectors, *right)

# %% [markdown]
# ## Predict, then measure
#
# The model (`numba_gemm.models.traffic`) counts what a stage moves at each level of memory, and divides by what the
# GPU was measured to do at most: that is the time if nothing else is in the way, and the resource that bounds it. It
# knows nothing of latencies and of instructions, so most kernels take longer; as the most was itself measured, one
# may come out a hair sooner. `measure` times both stages beside cuBLAS.
#
# Most of the sectors here come from the L1 cache, not from far away. L1 serves a request in turns, one for each line
# that it touches: 32 turns for a load of `a` by `naive`, one for a load by `coalesced`. That is what `bound by`
# names. It says `shared`, since the same part of the multiprocessor is also the shared memory, with which notebook 2
# begins.

# %%
results = notebook.measure("naive", "coalesced")
notebook.compare(results)

# %%
draw.ladder_chart(results)

# %% [markdown]
# Two lines of index arithmetic, and blocks of a shape to suit them, made the kernel more than ten times as fast. This
# is why in every later stage neighbouring threads load neighbouring floats of a row.
#
# ## The question it leaves open
#
# Every float of A is still asked of memory by every thread of its row of C, and every float of B by every thread of
# its column. Count how often:

# %%
draw.reuse_map(coalesced, "b")

# %% [markdown]
# Two rows of the block read the same B, each for itself. With 64 columns, A is read 64 times in all; with 4096, 4096
# times. Can threads that need the same data share it? That is [notebook 2](02_shared_tile.ipynb).
