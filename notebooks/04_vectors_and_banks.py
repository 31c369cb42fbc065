# %% [markdown]
# # 4. Vector accesses and bank conflicts: `vectorized` and `conflict_free`
#
# *Before this: [notebook 3](03_thread_tiles.ipynb). Time: about 60 minutes.*
#
# **The question.** In [notebook 3](03_thread_tiles.ipynb) thread tiles left an eighth of the reads from shared memory,
# but each of these took longer than necessary. The same bytes can be requested in many ways. Which of them are fast,
# and what makes the others slow?
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
# same bytes as four accesses of 32 bits. It saves instructions, each of which takes an issue slot that a multiply-add
# could have had, and requests, of which a multiprocessor serves one at a time. Two conditions: the four floats must be
# neighbours in memory, and the address of the first a multiple of 16 bytes.
#
# Numba has no notation for it, so the project has functions of its own, `load4` and `store4` of
# `numba_gemm.device.vector`. On a GPU, `load4` is the single instruction `ld.v4.f32`. A kernel calls `fetch4` for four
# elements of a row, some of which may be outside the matrix:

# %%
notebook.source("vector", function="fetch4")

# %% [markdown]
# The kernel copies vectors from global memory, and reads fragments of B by vectors along a row. The tile of A has rows
# of A, so four neighbours of A belong to one row and four k: the thread reads them for four k-steps at once. In the
# diff, `fetch` is one of three functions: `load4` for whole tiles, `fetch4`, or `fetch4_any`, which loads four single
# floats. That is for matrices whose rows are not whole vectors, or do not begin at multiples of 16 bytes. `store_row`
# writes a row of the thread's tile, in vectors where it can. (`hardware_only(max_registers=...)` is an option for the
# compiler, the largest number of registers per thread. Notebook 6 explains it; the simulator ignores it.)

# %%
notebook.difference("thread_tile_2d", "vectorized", context=1, device_only=True)

# %% [markdown]
# A block of `thread_tile_2d` with a tile of 64 x 64 x 8 has 64 threads, two warps. It issues 32 requests to load from
# global memory and 128 to store. (A request is one instruction of one warp.) How many requests does `vectorized` issue
# in place of these 160?

# %%
asked = notebook.predict("requests to global memory, 160 before", ...)


# %%
def traced(stage, config=None):
    """One block of a stage, and one tile of K."""
    tile = config or STAGES[stage].configs[0]
    a, b = (
        np.ones(shape, np.float32) for shape in ((tile.BM, tile.BK), (tile.BK, tile.BN))
    )
    c = np.zeros((tile.BM, tile.BN), np.float32)
    return trace(stage, None, None, 1, a, b, 0, c, config=tile)


small = STAGES["thread_tile_2d"].configs[0].replace(BM=64, BN=64)
both = {stage: traced(stage, small) for stage in ("thread_tile_2d", "vectorized")}


# %%
def requests_of(trace):
    """Requests by space, operation and width, with their sectors or wavefronts."""
    found = trace.requests.groupby(["space", "op", "bits"])
    return found.agg(
        requests=("first", "size"),
        sectors=("sectors", "sum"),
        wavefronts=("wavefronts", "sum"),
    )


asked.reveal(
    (both["vectorized"].requests["space"] == "global").sum(),
    because="A quarter: each instruction moves four floats per lane instead of one.",
)
pd.concat({stage: requests_of(found) for stage, found in both.items()})

# %% [markdown]
# A quarter of the requests everywhere. (These are counts of the source. The compiler had joined the reads of B's
# fragments before.) Loads take as many sectors as before, since the same bytes move. Stores take a quarter of the
# sectors: a thread stores eight neighbours in C as two vectors, each half a sector. Before, each float was a request,
# and took a sector of its own.
#
# ### Who reads what
#
# One block and one tile of K of `vectorized`, in its real configuration:

# %%
vectorized = traced("vectorized")
draw.who_reads_what(vectorized, warp=0)

# %% [markdown]
# A warp copies 16 rows of A, of eight floats each, and a row of B. It computes 16 rows of C.
#
# ### Step one thread
#
# Thread 5 of a small configuration, TM x TN = 4 x 4, at the start of a tile of K: first the fragment of A for four
# k-steps, one row of A after the other, then vectors of B.

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
# Shared memory consists of 32 **banks**. Words of 32 bits are assigned to them in turn: word 0 is in bank 0, word 31 in
# bank 31, word 32 in bank 0 again. In one pass, called a **wavefront**, each bank delivers one word, to any number of
# lanes. So all lanes may read the same word. But if two lanes of a request need different words of the same bank, the
# request takes another wavefront. That is a **bank conflict**.
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
    loads = found.requests[
        (found.requests["array"] == "tile") & (found.requests["op"] == "load")
    ]
    return found, int(loads.index[0])


draw.bank_map(*read_with(1))

# %% [markdown]
# A row of the picture is a wavefront, a column a bank, and a cell contains the lane that it serves. With a stride of 1,
# every bank serves one lane: one wavefront. How many wavefronts does a stride of 4 take? And a stride of 5?

# %%
with_four = notebook.predict("wavefronts with a stride of 4", ...)
with_five = notebook.predict("wavefronts with a stride of 5", ...)

# %%
draw.bank_map(*read_with(4))


# %%
def wavefronts(found, number):
    return int(found.requests.loc[number, "wavefronts"])


with_four.reveal(
    wavefronts(*read_with(4)),
    because="Eight banks serve four lanes each, one after the other.",
)
with_five.reveal(
    wavefronts(*read_with(5)),
    because="5 has no factor in common with 32, so every bank serves one lane.",
)

# %% [markdown]
# The distance does not matter; the banks that hold the words do:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
strides = range(1, 33)
taken = [
    requests.wavefronts([(lane, 4 * stride * lane) for lane in range(32)], 4)
    for stride in strides
]

figure = Figure(figsize=(7, 2.4), dpi=100, layout="constrained")
axes = figure.add_subplot()
axes.bar_label(axes.bar(strides, taken, color=draw.colour("tile")), fontsize=8)
axes.set(
    xlabel="stride in floats",
    ylabel="wavefronts",
    xticks=[1, *range(4, 33, 4)],
    ylim=(0, 37),
)
figure

# %% [markdown]
# ## Your turn
#
# The 32 lanes of a warp read a column of a shared tile with `width` floats per row: lane t reads `tile[t, 0]`. If that
# takes more than one wavefront, one often adds some unused floats at the end of each row, a **pad**; the width with its
# pad is the **pitch**. What is the smallest pad with which the read takes one wavefront? Replace `None`; the next cell
# compares your answer with the rule for wavefronts.


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
    # An odd pitch goes through all 32 banks; an even one misses half of them.
    return 1 - width % 2


assert notebook.check(smallest_pad, *right)

# %% [markdown]
# ## Vectors and banks
#
# 32 lanes that read 128 bits each need 128 words, and a wavefront has 32. So such a request takes at least four
# wavefronts: it is served in **passes** of eight lanes. (Of sixteen, if the lanes come in pairs that read the same
# vector. No documentation says so; the rule in `numba_gemm.models.requests` was derived from the counters of an H200.)
# A pass takes more than one wavefront if one of its banks has to deliver more than one word.
#
# A thread of `vectorized` has eight neighbouring columns of C. It reads their floats of B as two vectors: first columns
# 0 to 3, then 4 to 7. So the vectors of neighbouring lanes are eight floats apart. How many wavefronts does one of
# these requests take?

# %%
of_b = notebook.predict("wavefronts per request for b_tile", ...)


# %%
def first_load(trace, array):
    """The number of the first request that loads from an array."""
    found = trace.requests
    return int(found.index[(found["array"] == array) & (found["op"] == "load")][0])


of_b.reveal(
    wavefronts(vectorized, first_load(vectorized, "b_tile")),
    because="Twice four: the eight vectors of a pass are in half of the banks, "
    "two words in each.",
)
draw.bank_map(vectorized, first_load(vectorized, "b_tile"))

# %% [markdown]
# In one request every other group of four banks has nothing to deliver, and the others deliver twice as much. The
# request for the second vector uses the other half of the banks in the same way. In the table, `efficiency` is the
# smallest number of wavefronts that could serve the requests, divided by the number that they take:

# %%
shared = vectorized.lines[vectorized.lines["space"] == "shared"]
shared[["array", "op", "bits", "requests", "wavefronts", "per_request", "efficiency"]]

# %% [markdown]
# ## The idea: three changes of layout
#
# `conflict_free` computes the same products in the same order. Only the places of elements change:
#
# 1. **A thread's tile is divided.** Instead of 8 x 8 neighbouring elements it has four quadrants of 4 x 4, half a block
#    tile apart. Its two vectors of B are then 64 columns apart, and those of neighbouring threads are neighbours.
# 2. **A is transposed** on its way into shared memory. Then a fragment of A consists of neighbours, too: eight rows of
#    one k, read as two vectors, instead of eight vectors along k.
# 3. **A is swizzled.** A thread has fetched four k of a row, and stores them as a column, four floats one below the
#    other. Half of the lanes of a warp do so for k = 0 to 3, the other half for k = 4 to 7. Rows of the tile are 128
#    floats apart, a multiple of 32, so both halves would use the same 16 banks. Therefore rows 4 to 7 are stored with
#    columns 0 to 15 and 16 to 31 exchanged, and so on along the row: `column ^ 16`. (`^` is XOR: it flips the bit of
#    value 16.) The second half then uses the other 16 banks.
#
# ### The same in NumPy
#
# The same products from a tile of A that is transposed and swizzled, and from a thread tile in quadrants. `rows` and
# `cols` are the eight rows and the eight columns of one thread:


# %%
def quadrant_product(a, b, BK=8):
    BM, BN = len(a), b.shape[1]
    acc = np.zeros((BM, BN), np.float32)
    k, row = np.mgrid[0:BK, 0:BM]
    swizzled = row ^ (k // 4 * 16)  # the column of a_tile for A's row
    for k0 in range(0, a.shape[1], BK):
        a_tile, b_tile = np.empty((BK, BM), np.float32), b[k0 : k0 + BK].copy()
        a_tile[k, swizzled] = a[:, k0 : k0 + BK].T
        for i in range(0, BM // 2, 4):  # the threads of the block
            for j in range(0, BN // 2, 4):
                rows = np.r_[i : i + 4, BM // 2 + i : BM // 2 + i + 4]
                cols = np.r_[j : j + 4, BN // 2 + j : BN // 2 + j + 4]
                for p in range(BK):
                    a_frag, b_frag = a_tile[p, rows ^ (p // 4 * 16)], b_tile[p, cols]
                    acc[np.ix_(rows, cols)] += np.outer(a_frag, b_frag)
    return acc


x, y = np.random.default_rng(4).standard_normal((2, 64, 64), np.float32)
assert np.allclose(quadrant_product(x[:, :16], y[:16]), x[:, :16] @ y[:16], atol=1e-4)

# %% [markdown]
# ### The kernel
#
# The whole kernel, from the file that runs. `a_place` are the eight columns of the tile of A in which a thread's
# fragments begin, one per k-step; `store4_down` stores four floats one below the other:

# %%
notebook.source("conflict_free", function="conflict_free")

# %%
conflict_free = traced("conflict_free")
draw.bank_map(conflict_free, first_load(conflict_free, "b_tile"))

# %% [markdown]
# Each wavefront uses all 32 banks. This is one store of A, one float per lane:

# %%
found = conflict_free.requests
store = int(found.index[(found["array"] == "a_tile") & (found["op"] == "store")][0])
draw.bank_map(conflict_free, store)

# %% [markdown]
# The same store in the tile, in a small configuration. The colour is the lane that stores an element, and the first
# request is outlined. Its lanes store rows k = 0 and k = 4, in different columns, and so in different banks:

# %%
draw.thread_map(
    traced("conflict_free", STAGES["conflict_free"].test_config), "a_tile", "store"
)

# %% [markdown]
# ### The effect of the swizzle
#
# The wavefronts and banks of the same store without the swizzle, by the same rule. Two lanes fetch the eight k of a
# row, so half of the lanes store k = 0 and the other half k = 4:

# %%
lane = np.arange(32)
row, k = lane // 2, lane % 2 * 4
BM = STAGES["conflict_free"].configs[0].BM
for name, column in (("plain", row), ("swizzled", row ^ (k // 4 * 16))):
    address = 4 * (k * BM + column)
    lanes = zip(lane.tolist(), address.tolist(), strict=True)
    banks = sorted({int(bank) for bank in address // 4 % 32})
    taken = requests.wavefronts(lanes, 4, write=True)
    print(f"{name:>8}: wavefronts {taken}, banks {banks}")

# %% [markdown]
# ### The elements of C of a warp
#
# A warp now computes eight rows of the upper half of the block tile and eight of the lower. The vectors that its lanes
# store in one request are in two rows, 16 in each, without gaps. Before, each request to store to C touched 32 sectors
# and filled half of each. Now it fills whole sectors:

# %%
draw.who_reads_what(conflict_free, warp=0)

# %%
columns = [
    "array",
    "op",
    "bits",
    "requests",
    "sectors",
    "wavefronts",
    "per_request",
    "efficiency",
]
conflict_free.lines[columns]

# %% [markdown]
# Every line has an efficiency of 1: every byte of a sector that moves is used, and no wavefront is wasted.
#
# ### Step one thread
#
# The four vectors of a k-step, of thread 5 in a small configuration of 64 x 32. The two vectors of an operand are half
# a tile apart:

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
# `k = t % 2 * 4`. How many wavefronts would that take? (A store of 32 bits per lane is one pass.)


# %%
def wavefronts_with(pad):
    return None  # your answer


# %%
def lanes_with(pad):
    return [(t, 4 * (t % 2 * 4 * (128 + pad) + t // 2)) for t in range(32)]


pads = (0, 1, 2, 4, 8, 12)
right = [((pad,), requests.wavefronts(lanes_with(pad), 4, write=True)) for pad in pads]
answered = notebook.check(wavefronts_with, *right)

# %% [markdown]
# A solution:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def wavefronts_with(pad):
    # k = 0 takes banks 0 to 15, and k = 4 takes 16 that begin 4 * pad further on.
    # If any of them is one of the former, this bank has to deliver two words.
    first = 4 * pad % 32
    return 1 if first == 16 else 2


assert notebook.check(wavefronts_with, *right)

# %% [markdown]
# A pad of 4 would do as well. It costs 128 bytes, the swizzle one instruction. Later stages have pads.
#
# ## Prediction, model and measurement
#
# Neither stage changes which bytes are read or what is computed, only how the bytes are requested. How many times as
# fast as `thread_tile_2d` is `conflict_free`, at M = N = K = 4096?

# %%
gain = notebook.predict("times as fast as thread_tile_2d", ...)

# %%
results = notebook.measure("thread_tile_2d", "vectorized", "conflict_free")
notebook.compare(results)

# %%
table = notebook.compare(results)
took, bound = table["measured ms"], table["predicted ms"]
gain.reveal(
    took["thread_tile_2d"] / took["conflict_free"],
    model=bound["thread_tile_2d"] / bound["conflict_free"],
    because=f"Busiest by the model: {table['bound by']['thread_tile_2d']} before, "
    f"and {table['bound by']['conflict_free']} now.\n"
    f"conflict_free takes {took['conflict_free'] / bound['conflict_free']:.2f} times "
    "its predicted time.",
)

# %%
draw.ladder_chart(results)

# %% [markdown]
# Profiling counters of an H200 agree with the model. They show the percentage of the time in which the multiply-add
# pipe and the path of shared memory were busy:

# %%
counted = notebook.recorded("latest/counters.csv").set_index("stage")
columns = ["shared_load_wavefronts", "shared_pipe_percent", "fma_pipe_percent"]
counted.loc[["thread_tile_2d", "vectorized", "conflict_free"], columns]

# %% [markdown]
# ## The open question
#
# In `conflict_free` neither the multiply-add pipe nor the path of shared memory is busy all of the time. When neither
# is, the threads wait. Here is what a warp does in five tiles of K, barrier by barrier:

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
# First all threads of the block load a tile, and wait for global memory, while none of them computes. Then all compute,
# and no load is in flight. Could the next tile be loaded while this one is multiplied? That is
# [notebook 5](05_two_buffers.ipynb). Puzzles 11 and 12, `vector_copy` and `bank_conflicts`, practise this notebook.
