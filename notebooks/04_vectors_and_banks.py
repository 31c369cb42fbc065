# %% [markdown]
# # 4. Vector accesses and bank conflicts: `vectorized` and `conflict_free`
#
# *Before this: [notebook 3](03_thread_tiles.ipynb). Time: about 60 minutes.*
#
# **The question.** In [notebook 3](03_thread_tiles.ipynb) thread tiles left an eighth of the reads of shared memory,
# but each of these took longer than it had to. The same bytes can be asked for in many ways. Which ways does the memory
# like, and what is it that it dislikes?
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
from matplotlib.figure import Figure
from numba import cuda, float32

from numba_gemm.inspect import draw, step, trace
from numba_gemm.kernels.ladder import STAGES
from numba_gemm.models import requests

# %% [markdown]
# ## Four floats in one instruction
#
# A **vector access** reads or writes four neighbouring floats, 128 bits, in one instruction of a thread. It moves the
# same bytes as four accesses of 32 bits. What is saved are instructions, which take their turns with the multiply-adds,
# and requests, of which the memory takes only so many at a time. Two conditions: the four must be neighbours in memory,
# and the address of the first a multiple of 16 bytes.
#
# Numba has no notation for it, so the project has one of its own, `load4` and `store4` of `numba_gemm.device.vector`.
# This is what a kernel calls for four elements of a row that may lie outside of the matrix:

# %%
notebook.source("vector", function="fetch4")

# %% [markdown]
# And this is what changes in the kernel. Global memory is copied by vectors, fragments of B are read by vectors along a
# row. A lies by rows in its shared tile, so four neighbours of A are not four rows but four k: the thread fetches them
# for four k-steps at once.

# %%
notebook.difference("thread_tile_2d", "vectorized", context=1)

# %% [markdown]
# Rows of some matrices are not whole vectors, or do not begin at multiples of 16 bytes. The kernel
# is then built with `fetch4_any`, which loads four single floats. The shared tiles are the kernel's own, and always
# fit.
#
# ### Who reads what
#
# One block and one tile of K of `vectorized`, in its real configuration:


# %%
def traced(stage, config=None):
    """One block of a stage, and one tile of K."""
    tile = config or STAGES[stage].configs[0]
    a, b = np.ones((tile.BM, tile.BK), np.float32), np.ones((tile.BK, tile.BN), np.float32)
    return trace(stage, None, None, 1, a, b, 0, np.zeros((tile.BM, tile.BN), np.float32), config=tile)


vectorized = traced("vectorized")
draw.who_reads_what(vectorized, warp=0)

# %% [markdown]
# A warp copies 16 rows of A, of eight floats each, and a row of B; and it computes 16 rows of C. In `thread_tile_2d`
# each of these copies took four instructions, here it is one. This compares all requests of both, for a tile of 64 x 64
# x 8, which the simulator finishes sooner:


# %%
def requests_of(trace):
    """Requests by space, operation and width, and what they take: sectors, or wavefronts of shared memory."""
    found = trace.requests.groupby(["space", "op", "bits"])
    return found.agg(requests=("first", "size"), sectors=("sectors", "sum"), wavefronts=("wavefronts", "sum"))


small = STAGES["thread_tile_2d"].configs[0].replace(BM=64, BN=64)
pd.concat({stage: requests_of(traced(stage, small)) for stage in ("thread_tile_2d", "vectorized")})

# %% [markdown]
# A quarter of the requests, everywhere. (In the source, that is. The compiler had joined the fragments of B before.)
# The sectors of loads are as many as before, since the same bytes move. The sectors of stores are a quarter: a
# thread's eight neighbours in C now go out by two vectors, each half a sector, where each float took a request, and
# with it a sector, of its own.
#
# ### Step one thread
#
# Thread 5 of a small configuration, TM x TN = 4 x 4, at the start of a tile of K: first the fragment of A for four
# k-steps, a row of A after the other, then vectors of B.

# %%
tile = STAGES["vectorized"].test_config
a = np.arange(tile.BM * tile.BK, dtype=np.float32).reshape(tile.BM, tile.BK)
b = np.arange(tile.BK * tile.BN, dtype=np.float32).reshape(tile.BK, tile.BN)
c = np.zeros((tile.BM, tile.BN), np.float32)

with step("vectorized", None, None, 1, a, b, 0, c, thread=5, config="test") as steps:
    for s in steps:
        if s.locals.get("q") == 2:
            break
        if "p" in s.locals and {"a_frag", "b_frag"} & set(s.changed):
            print(s)

# %% [markdown]
# ## Banks
#
# Now to what shared memory dislikes. It is made of 32 **banks**. Words of 32 bits are dealt out to them in turn: word 0
# lies in bank 0, word 31 in bank 31, word 32 in bank 0 again. In one turn, which is called a **wavefront**, each bank
# gives one word. It may give that to any number of lanes, so that all lanes may read the same word. But if two lanes of
# a request need different words of the same bank, there must be another wavefront. That is a **bank conflict**.
#
# A small kernel shows it. Each thread reads a float that lies `stride` floats after the one of the thread before:


# %%
@cuda.jit
def strided(x, y, stride):
    tile = cuda.shared.array(1024, float32)
    t = cuda.threadIdx.x
    for i in range(t, 1024, 32):
        tile[i] = x[i]
    cuda.syncthreads()
    y[t] = tile[t * stride]


def read_with(stride):
    """A trace of the kernel, and the number of its request with the stride."""
    x = np.arange(1024, dtype=np.float32)
    found = trace(strided, 1, 32, x, np.zeros(32, np.float32), stride)
    loads = found.requests[(found.requests["array"] == "tile") & (found.requests["op"] == "load")]
    return found, int(loads.index[0])


draw.bank_map(*read_with(1))

# %% [markdown]
# A row of the picture is a wavefront, a column a bank, and in it stands the lane that it serves. With a stride of 1,
# every bank has one lane: one wavefront. With a stride of 4:

# %%
draw.bank_map(*read_with(4))

# %% [markdown]
# Only every fourth bank has anything that is asked for. The eight that do serve four lanes each, one after the other.
# It is not the distance that counts, but where the words fall: with a stride of 5 there is no conflict at all.

# %%
strides = range(1, 33)
taken = [requests.wavefronts([(lane, 4 * stride * lane) for lane in range(32)], 4) for stride in strides]

figure = Figure(figsize=(7, 2.4), dpi=100, layout="constrained")
axes = figure.add_subplot()
axes.bar_label(axes.bar(strides, taken, color=draw.colour("tile")), fontsize=8)
axes.set(xlabel="stride in floats", ylabel="wavefronts", xticks=[1, *range(4, 33, 4)], ylim=(0, 37))
figure

# %% [markdown]
# ## Your turn
#
# A column of a shared tile of `width` floats a row is read by the 32 lanes of a warp: lane t reads `tile[t, 0]`. If
# that takes more than one wavefront, people often give the rows some unused floats at their ends, a **pad**; the
# width with its pad is the **pitch**. What is the smallest pad with which the read takes one wavefront? Replace
# `None`; the next cell compares your answer with the rule for wavefronts.


# %%
def smallest_pad(width):
    return None  # your answer


# %%
def least_pad(width):
    def wavefronts(pitch):
        return requests.wavefronts([(lane, 4 * pitch * lane) for lane in range(32)], 4)

    return next(pad for pad in range(32) if wavefronts(width + pad) == 1)


right = [((width,), least_pad(width)) for width in (32, 33, 8, 17, 64, 100, 128)]
answered = notebook.check(smallest_pad, *right)

# %% [markdown]
# A solution, if you want to see one:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def smallest_pad(width):
    # An odd pitch goes through all 32 banks before it comes back to the first; an even one misses half of them.
    return 1 - width % 2


assert notebook.check(smallest_pad, *right)

# %% [markdown]
# ## Vectors and banks
#
# 32 lanes that read 128 bits each want 128 words, and a wavefront has 32. So such a request takes four wavefronts at
# least: it is served in **passes**, a quarter of the warp each. (Two, if the lanes come in pairs that want the same. No
# documentation says so; the rule that `numba_gemm.models.requests` has was found by the counters of an H200.) A pass
# takes more if its fullest bank has more than one word to give.
#
# How does `vectorized` read its tiles?

# %%
shared = vectorized.lines[vectorized.lines["space"] == "shared"]
shared[["array", "op", "bits", "requests", "wavefronts", "per_request", "efficiency"]]


# %% [markdown]
# B takes twice the wavefronts that it should. One of the requests:


# %%
def first_load(trace, array):
    """The number of the first request that loads from an array."""
    found = trace.requests
    return int(found.index[(found["array"] == array) & (found["op"] == "load")][0])


draw.bank_map(vectorized, first_load(vectorized, "b_tile"))

# %% [markdown]
# A thread has eight neighbouring columns of C, and reads them by two vectors: of 0 to 3, then of 4 to 7. So the next
# thread's first vector lies eight floats further on, and its banks, too. In one request every other group of four banks
# is asked for nothing, and the others have to serve twice. The second vector meets the other half in the same way.
#
# ## Three changes of place
#
# `conflict_free` computes the same products in the same order. It puts things elsewhere:
#
# 1. **A thread's tile is divided.** Instead of 8 x 8 neighbouring elements it has four quadrants of 4 x 4, half a block
#    tile apart. Its two vectors of B are then 64 columns apart, and those of neighbouring threads are neighbours.
# 2. **A is transposed** on its way into shared memory, so that a fragment of A is neighbours too, eight rows of one k,
#    by two vectors, instead of eight vectors along k.
# 3. **And swizzled.** To transpose, a thread that has fetched four k of a row must store four floats below each other,
#    and half of a warp stores k from 4 to 7. Rows of the tile are 128 floats apart, a multiple of 32, so both halves of
#    a warp would meet in the same 16 banks. For every other group of four k, 16 is XORed into the column: which
#    swaps the halves of each 32 columns, and the other 16 banks are met.

# %%
notebook.difference("vectorized", "conflict_free", context=1)

# %%
conflict_free = traced("conflict_free")
draw.bank_map(conflict_free, first_load(conflict_free, "b_tile"))

# %% [markdown]
# All 32 banks, in each wavefront. This is the storing of A, a float a lane:

# %%
found = conflict_free.requests
store = int(found.index[(found["array"] == "a_tile") & (found["op"] == "store")][0])
draw.bank_map(conflict_free, store)

# %% [markdown]
# ### What the swizzle is good for
#
# Without it, by the same rule: the columns in which a warp's 32 lanes store k = 0 and k = 4 of their rows, and the
# banks that these are.

# %%
lane = np.arange(32)
row, k = lane // 2, lane % 2 * 4  # two lanes fetch the eight k of a row
BM = STAGES["conflict_free"].configs[0].BM
for name, column in (("plain", row), ("swizzled", row ^ (k // 4 * 16))):
    address = 4 * (k * BM + column)
    taken = requests.wavefronts(zip(lane.tolist(), address.tolist(), strict=True), 4, write=True)
    print(f"{name:>8}: wavefronts {taken}, banks {sorted({int(bank) for bank in address // 4 % 32})}")

# %% [markdown]
# ### And what a warp has of C
#
# The quadrants are visible from outside as well. A warp now computes eight rows of the upper half and eight of the
# lower. The vectors that its lanes store in one request lie in two rows, 16 in each, without gaps. So the stores to C,
# of which every request touched 32 sectors and filled half of each, have become whole sectors, too:

# %%
draw.who_reads_what(conflict_free, warp=0)

# %%
columns = ["array", "op", "bits", "requests", "sectors", "wavefronts", "per_request", "efficiency"]
conflict_free.lines[columns]

# %% [markdown]
# Every line has an efficiency of 1: no sector moves that is not used, and no wavefront is one too many.
#
# ### Step one thread
#
# The four vectors of a k-step, of thread 5 in a small configuration of 64 x 32. Two of each are half a tile apart:

# %%
tile = STAGES["conflict_free"].test_config
a = np.arange(tile.BM * tile.BK, dtype=np.float32).reshape(tile.BM, tile.BK)
b = np.arange(tile.BK * tile.BN, dtype=np.float32).reshape(tile.BK, tile.BN)
c = np.zeros((tile.BM, tile.BN), np.float32)

with step("conflict_free", None, None, 1, a, b, 0, c, thread=5, config="test") as steps:
    for s in steps:
        if s.locals.get("p") == 1:
            break
        if "p" in s.locals and {"a_frag", "b_frag"} & set(s.changed):
            print(s)

# %% [markdown]
# ## Your turn again
#
# The transposing store once more. Suppose that `conflict_free` had a pad instead of a swizzle: `pad` unused floats at
# the end of each row of the tile of A. Then lane t would store at `k * (128 + pad) + row` with `row = t // 2` and
# `k = t % 2 * 4`. How many wavefronts would that take? (A store of 32 bits a lane is one pass.)


# %%
def wavefronts_with(pad):
    return None  # your answer


# %%
def lanes_with(pad):
    return [(t, 4 * (t % 2 * 4 * (128 + pad) + t // 2)) for t in range(32)]


right = [((pad,), requests.wavefronts(lanes_with(pad), 4, write=True)) for pad in (0, 1, 2, 4, 8, 12)]
answered = notebook.check(wavefronts_with, *right)

# %% [markdown]
# A solution:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def wavefronts_with(pad):
    # k = 0 takes banks 0 to 15. k = 4 takes 16 that begin 4 * pad further on: if any of them is one of the former, some
    # bank has two words.
    first = 4 * pad % 32
    return 1 if first == 16 else 2


assert notebook.check(wavefronts_with, *right)

# %% [markdown]
# A pad of 4 would do as well: it costs 128 bytes, the swizzle an instruction. Later stages take pads, this one shows
# the other way.
#
# ## Predict, then measure

# %%
results = notebook.measure("thread_tile_2d", "vectorized", "conflict_free")
notebook.compare(results)

# %%
draw.ladder_chart(results)

# %% [markdown]
# Both are worth having, and both gain less than the stages of the last notebook. Neither has changed which bytes are
# read, nor what is computed: only the way of asking. After `conflict_free`, by the model, shared memory is no longer
# what is busy longest; the arithmetic is.
#
# What Nsight Compute, NVIDIA's profiler, counted on an H200 says so, too. In percent of the time, how busy is the
# multiply-add pipe, and how busy the path of shared memory:

# %%
counted = notebook.recorded("latest/counters.csv").set_index("stage")
wanted = ["shared_load_wavefronts", "shared_pipe_percent", "fma_pipe_percent", "warps_active_percent"]
counted.loc[["thread_tile_2d", "vectorized", "conflict_free"], wanted]

# %% [markdown]
# ## The question it leaves open
#
# In `conflict_free` the multiply-adds' pipe is busy for two thirds of the time and shared memory's path for half of
# it, and yet the kernel is not done sooner. When neither is busy, somebody waits. Here is what a warp does in five
# tiles of K, barrier by barrier:

# %%
m, n, k = tile.BM, tile.BN, 5 * tile.BK
several = trace(
    "conflict_free",
    None,
    None,
    1,
    np.ones((m, k), np.float32),
    np.ones((k, n), np.float32),
    0,
    np.zeros((m, n), np.float32),
    config="test",
)
draw.timeline(several, warp=0)

# %% [markdown]
# First all threads of the block fetch, and wait for global memory, while none of them computes. Then all compute, and
# nothing is under way. Could the next tile travel while this one is computed? That is
# [notebook 5](05_two_buffers.ipynb).
