# %% [markdown]
# # 1. Coalescing: `naive` and `coalesced`
#
# *Before this: [notebook 0](00_start_here.ipynb), for threads, blocks and warps. Time: about 35 minutes.*
#
# **The question.** In notebook 0 each thread computed one element of C, and the result was correct. Does it matter
# *which* thread of a block computes which element?
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
import numpy as np

from numba_gemm.inspect import draw, step, trace
from numba_gemm.models import requests

# %% [markdown]
# ## The kernel
#
# This is the file that runs, not a copy. Each thread of `naive` finds its row and column from its place in the grid,
# and adds up a row of A times a column of B: eight terms per iteration as long as there are eight, then the rest one by
# one. `axpby` is a **device function** of `numba_gemm.device`, that is, a function that kernels call. It returns
# `alpha * acc + beta * c`. `build` returns the kernel for a configuration (the extents of a block's part of C); later
# stages need it, `naive` has only one kernel.

# %%
notebook.source("naive")

# %% [markdown]
# ### The same in NumPy
#
# A warp is 32 threads that execute each instruction together. Consecutive threads of a block differ in `threadIdx.x`.
# `naive` takes the **row** from it, so a warp computes 32 rows of one column of C. In NumPy, one warp of `naive`, and
# one of `coalesced`, which takes the **column** from it, are one line each. `p` is the step of the sum:


# %%
def naive_warp(a, b, row, col):
    acc = np.zeros(32, np.float32)  # one sum per thread
    for p in range(a.shape[1]):
        acc += a[row : row + 32, p] * b[p, col]  # a column of A, one element of B
    return acc


def coalesced_warp(a, b, row, col):
    acc = np.zeros(32, np.float32)
    for p in range(a.shape[1]):
        acc += a[row, p] * b[p, col : col + 32]  # one element of A, a row of B
    return acc


a, b = np.random.default_rng(0).standard_normal((2, 64, 64), np.float32)
assert np.allclose(naive_warp(a, b, 32, 5), (a @ b)[32:64, 5], atol=1e-4)
assert np.allclose(coalesced_warp(a, b, 5, 32), (a @ b)[5, 32:64], atol=1e-4)

# %% [markdown]
# ## Step one thread
#
# Thread (1, 0) of a block, line by line. This is Numba's simulator running the kernel itself. The arguments of `step`
# are the stage, its grid and its block, and then the kernel's own: alpha = 1, A, B, beta = 0 and C. `None, None` stands
# for the grid and block that the stage chooses itself. `config="test"` chooses a small block.

# %%
a = np.array([[1, 2], [3, 4]], np.float32)
b = np.array([[10, 20], [30, 40]], np.float32)
c = np.zeros((2, 2), np.float32)

for s in step("naive", None, None, 1, a, b, 0, c, thread=(1, 0), config="test"):
    print(s)
print(c)

# %% [markdown]
# ## Sectors
#
# Memory does not move floats. It moves **sectors** of 32 bytes, eight floats. One instruction of one warp is a
# **request**: up to 32 addresses at once. The memory moves each sector that contains one of them.
#
# In a step of `naive`'s sum, the 32 threads of a warp load `a[row, p]` for 32 different rows, and all the same
# `b[p, col]`. How many sectors does each of the two requests move, if a row of A is longer than a sector?

# %%
of_a = notebook.predict("sectors per request for a", ...)
of_b = notebook.predict("sectors per request for b", ...)

# %% [markdown]
# `trace` takes the same arguments as `step`, runs the blocks that you name, and records every access. Here is one block
# in its real configuration, and what its first warp reads and writes in the whole sum:

# %%
a, b = np.ones((64, 32), np.float32), np.ones((32, 64), np.float32)
c = np.zeros((64, 64), np.float32)

naive = trace("naive", None, None, 1, a, b, 0, c, blocks=[(0, 0, 0)])
draw.who_reads_what(naive, warp=0)

# %% [markdown]
# In the table, `per_request` is the mean number of sectors per request. `efficiency` is the smallest number that could
# hold the requested bytes, divided by that:

# %%
columns = ["array", "op", "requests", "per_request", "efficiency"]
naive.lines[columns]


# %%
def sectors_per_load(found, array):
    lines = found.lines
    chosen = (lines["array"] == array) & (lines["op"] == "load")
    return float(lines.loc[chosen, "per_request"].iloc[0])


of_a.reveal(
    sectors_per_load(naive, "a"),
    because="Each lane reads another row, and uses 4 of the 32 bytes of its sector.",
)
of_b.reveal(
    sectors_per_load(naive, "b"),
    because="All lanes read the same float. It moves once, for all of them.",
)

# %% [markdown]
# Here is one load of `a`. A row of the picture is a **line** of 128 bytes, four sectors, which is the unit of the
# caches. Coloured bytes are used; hatched ones move, but no thread of the request uses them:

# %%
loads = naive.requests
chosen = (loads["array"] == "a") & (loads["op"] == "load")
draw.sector_map(naive, int(loads.index[chosen][0]))

# %% [markdown]
# ## The idea: swap the axes
#
# `coalesced` takes the column from `threadIdx.x`. Nothing else changes in the kernel. Its blocks have a shape that
# suits it, 2 rows of 128 threads, where `naive` has 32 x 32. Accesses of a warp that share sectors are called
# **coalesced**. This is the diff of the two kernels:

# %%
notebook.difference("naive", "coalesced", device_only=True)

# %% [markdown]
# A warp now computes 32 neighbours in a row of C. How many sectors per request are there for `a`, and how many for `b`?

# %%
of_a_now = notebook.predict("sectors per request for a, coalesced", ...)
of_b_now = notebook.predict("sectors per request for b, coalesced", ...)

# %%
coalesced = trace("coalesced", None, None, 1, a, b, 0, c, blocks=[(0, 0, 0)])
draw.who_reads_what(coalesced, warp=0)

# %% [markdown]
# (This block computes 2 x 64 elements of C, that of `naive` 32 x 32, so it has fewer requests in all.)

# %%
of_a_now.reveal(
    sectors_per_load(coalesced, "a"),
    because="All lanes read the same element of A.",
)
of_b_now.reveal(
    sectors_per_load(coalesced, "b"),
    because="32 neighbouring floats are 128 bytes, and fill their sectors.",
)
coalesced.lines[columns]

# %%
loads = coalesced.requests
chosen = (loads["array"] == "b") & (loads["op"] == "load")
draw.sector_map(coalesced, int(loads.index[chosen][0]))

# %% [markdown]
# ## Your turn
#
# 32 threads read `x[thread * stride]` from a float32 array that begins at a multiple of 256 bytes. How many sectors
# does the request move? Replace `None`; the next cell compares your answer with the hardware's rule.


# %%
def sectors(stride):
    return None  # your answer


# %%
def by_rule(stride):
    return requests.sectors([(t, 4 * t * stride) for t in range(32)], 4)


right = [((stride,), by_rule(stride)) for stride in (1, 2, 3, 4, 8, 100)]
answered = notebook.check(sectors, *right)

# %% [markdown]
# A solution, if you want to see one:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def sectors(stride):
    # Up to a stride of 8, every sector from the first address to the last is touched.
    # Beyond, no two threads share one.
    return min(32, (31 * stride * 4) // 32 + 1)


assert notebook.check(sectors, *right)

# %% [markdown]
# ## Prediction, model and measurement
#
# How many times as fast is `coalesced` at M = N = K = 4096? The sectors above suggest (32 + 1) / (1 + 4) = 6.6. But
# most of these sectors come from the L1 cache, which counts differently: it serves a request in turns, one for each
# 128-byte line that the request touches. Count the turns per step of the sum, for A and B together, in both kernels.
# Their ratio is a prediction.

# %%
gain = notebook.predict("times as fast as naive", ...)

# %% [markdown]
# `measure` times both stages and cuBLAS. `compare` puts a model beside the times (`numba_gemm.models.prediction`). The
# model counts the bytes, turns and multiply-adds of a stage, and divides each by the highest rate that was measured on
# the GPU. The longest of these times is `predicted ms`, and `bound by` names its resource. The model leaves
# out latency and all other instructions, so most kernels take longer. (Since the rates are measured, too, a kernel can
# be slightly faster than its prediction.)
#
# `bound by` is `shared` here, though neither kernel has shared memory. The L1 cache and shared memory are one memory
# with one data path, and the model gives it one name. Notebook 2 begins with shared memory.

# %%
results = notebook.measure("naive", "coalesced")
notebook.compare(results)

# %%
table = notebook.compare(results)
took, bound = table["measured ms"], table["predicted ms"]
gain.reveal(
    table.loc["coalesced", "gain"],
    model=bound["naive"] / bound["coalesced"],
    because=f"Turns: (32 + 1) / (1 + 1) = {33 / 2}. naive takes "
    f"{took['naive'] / bound['naive']:.2f} times its predicted time, coalesced "
    f"{took['coalesced'] / bound['coalesced']:.2f} times:\n"
    "it has so few turns that issuing its other instructions takes time, too.",
)

# %%
draw.ladder_chart(results)

# %% [markdown]
# Two lines of index arithmetic, and blocks of a shape that suits them, made this difference. This is why in every later
# stage neighbouring threads load neighbouring floats of a row.
#
# ## The open question
#
# In `coalesced` every thread of a row of C still requests the same floats of A, and every thread of a column the same
# floats of B. How often is each float of A requested by the block that was traced? It has 64 columns of C.

# %%
again = notebook.predict("loads of each float of A", ..., unit="per block")

# %%
loaded = coalesced.traffic.query("array == 'a'")["read"].sum() / 4  # floats
again.reveal(
    loaded / (coalesced.block[1] * a.shape[1]),
    because="Once for each column of C. With 4096 columns it is 4096 times in all.",
)

# %% [markdown]
# Can threads that need the same data share it? That is [notebook 2](02_shared_tile.ipynb). In puzzles 3 and 4,
# `coalesced` and `strided_sum`, you make accesses coalesced yourself.
