# %% [markdown]
# # 6. Warp tiles and register prefetch: `warp_tiled` and `register_prefetch`
#
# *Before this: notebooks [1](01_naive_and_coalesced.ipynb) to [5](05_two_buffers.ipynb). Time: about 60 minutes.*
#
# **The question.** After notebook 5 a block no longer waits for global memory. Now it waits for shared memory: for
# every 64 multiply-adds a thread reads four vectors of fragments, and it needs them at once. Can it use each value more
# often, and read it earlier?
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

from numba_gemm.inspect import draw, step, trace
from numba_gemm.kernels.ladder import STAGES
from numba_gemm.models import accesses
from numba_gemm.models.occupancy import occupancy

# %% [markdown]
# ## Larger tiles need less
#
# In each k-step a thread reads TM floats of A and TN floats of B for TM * TN multiply-adds. That is 1/TM + 1/TN floats
# per multiply-add, as in notebook 3: the larger the thread tile, the fewer. The cost is **registers**, of which a
# thread can have 255. It keeps TM * TN sums, two sets of fragments (this notebook will explain why two), and its part
# of the next tile, which waits to be stored. In block tiles of 128 x 256 x 16, that part is `TM * TN * 3 / 16` floats.
# How many registers does a thread tile of 16 x 16 need at least?

# %%
needed = notebook.predict("registers for a tile of 16 x 16", ...)

# %%
tiles = [(8, 8), (8, 16), (16, 16)]
budget = pd.DataFrame({"thread tile": [f"{TM} x {TN}" for TM, TN in tiles]}).set_index(
    "thread tile"
)
budget["floats per multiply-add"] = [1 / TM + 1 / TN for TM, TN in tiles]
budget["sums"] = [TM * TN for TM, TN in tiles]
budget["fragments"] = [2 * (TM + TN) for TM, TN in tiles]
budget["waiting"] = [16 * (128 + 256) * TM * TN // (128 * 256) for TM, TN in tiles]
budget["registers, at least"] = budget[["sums", "fragments", "waiting"]].sum(axis=1)
needed.reveal(
    budget.loc["16 x 16", "registers, at least"],
    because="256 sums, 2 * (16 + 16) fragments, 48 floats that wait.",
)
budget

# %% [markdown]
# 16 x 16 is out of reach: values that do not fit into registers would be **spilled**, that is, kept in slow memory.
# With 8 x 16 some fifty registers remain for addresses and counters.
#
# ## The idea: warps have tiles, too
#
# The block tile belongs to the block, the thread tile to the thread. Between the two is the warp, whose 32 threads read
# shared memory together. Until now the shape of a warp's part of C followed from the numbering of threads along the
# rows of the block tile. `warp_tiled` gives each warp a **warp tile**, and each **lane** a part of it.

# %%
config = STAGES["warp_tiled"].configs[0]
levels = {
    "block": (config.BM, config.BN),
    "warp": (config.WM, config.WN),
    "thread": (config.TM, config.TN),
}
pd.DataFrame(levels, index=["rows of C", "columns of C"]).T

# %% [markdown]
# ### The same in NumPy
#
# A loop for each level: the block tile consists of warp tiles, and a warp tile of the tiles of its lanes. The lanes'
# tiles are interleaved: a lane has groups of four rows and four columns, and neighbouring lanes have neighbouring
# groups. So its rows are `4 * lane_row + [0, 1, 2, 3]`, and the same again `4 * LANES_M` further down:


# %%
def warp_tiled_product(a, b, WM=16, WN=32, TM=8, TN=8):
    acc = np.zeros((len(a), b.shape[1]), np.float32)
    LANES_M, LANES_N = WM // TM, WN // TN  # here 2 x 4 lanes instead of 8 x 4
    group = np.arange(4)
    for warp_row in range(0, len(a), WM):
        for warp_col in range(0, b.shape[1], WN):
            for lane in range(LANES_M * LANES_N):
                first_row = warp_row + 4 * (lane // LANES_N)
                first_col = warp_col + 4 * (lane % LANES_N)
                starts = np.arange(0, TM, 4)[:, None] * LANES_M
                rows = (first_row + starts + group).ravel()
                starts = np.arange(0, TN, 4)[:, None] * LANES_N
                cols = (first_col + starts + group).ravel()
                for p in range(a.shape[1]):
                    acc[np.ix_(rows, cols)] += np.outer(a[rows, p], b[p, cols])
    return acc


x, y = np.random.default_rng(6).standard_normal((2, 64, 64), np.float32)
assert np.allclose(warp_tiled_product(x, y), x @ y, atol=1e-4)

# %% [markdown]
# ### The kernel
#
# The whole kernel, from the file that runs. Compared with `double_buffered`, `row` and `col` follow from the warp and
# the lane; the loads, the two buffers and the barriers are the same. Two smaller changes:
#
# - The tiles are larger than the 48 KB of shared memory that a kernel can declare itself, so they are **dynamic**: one
#   array whose size is given at the launch. `shared_view` returns a part of it.
# - The rows of A's tile are padded by a few floats instead of swizzled, so that an address is a plain sum.

# %%
notebook.source("warp_tiled", function="warp_tiled")

# %% [markdown]
# ## The elements of each warp
#
# Both kernels in their real configurations, one block, one k-tile, everything recorded. This takes a few seconds: a
# block of `warp_tiled` performs half a million multiply-adds, in Python.

# %%
rng = np.random.default_rng(6)
found = {}
for stage in ("double_buffered", "warp_tiled"):
    tile = STAGES[stage].configs[0]
    a, b = (
        rng.standard_normal((tile.BM, tile.BK), np.float32),
        rng.standard_normal((tile.BK, tile.BN), np.float32),
    )
    c = np.zeros((tile.BM, tile.BN), np.float32)
    found[stage] = trace(stage, None, None, 1, a, b, 0, c)
    print(f"{stage}: {tile.name}")
    print(f"largest error {abs(c - a @ b).max():.0e}, races: {found[stage].races}")

# %% [markdown]
# The thread and the warp that store each element of C, first in `double_buffered`:

# %%
draw.thread_map(found["double_buffered"], "c", "store")

# %% [markdown]
# A warp has two rows of threads, sixteen in each. With their quadrants they own two bands, 64 rows apart: few rows,
# and all columns of the block tile. Now `warp_tiled`:

# %%
draw.thread_map(found["warp_tiled"], "c", "store")

# %% [markdown]
# Eight warps, each with a square of 64 x 64. In a k-step a warp needs as many different floats of A as it has rows, and
# as many of B as it has columns. For a given area, a square needs the fewest. Here are the elements of one thread:

# %%
draw.who_reads_what(found["warp_tiled"], thread=37)

# %% [markdown]
# In C, the thread's tile of 8 x 16 consists of groups of four rows and four columns, so that neighbouring lanes read
# neighbouring vectors. (In A and B the picture shows the elements that the thread *copies* from global memory for the
# whole block. It multiplies others.)
#
# ## The fragments of a thread
#
# The same thread, stepped to its first multiplication. Every element of A is its own row number, and every element of
# B its column number. So the values of the fragments show where they come from:

# %%
rows = np.repeat(np.arange(config.BM, dtype=np.float32)[:, None], config.BK, axis=1)
columns = np.repeat(np.arange(config.BN, dtype=np.float32)[None], config.BK, axis=0)

with step(
    "warp_tiled", None, None, 1, rows, columns, 0, np.zeros_like(c), thread=37
) as steps:
    s = next(s for s in steps if s.source.startswith("multiply("))
print(f"{s.source}    warp {37 // 32}, lane {37 % 32}")
print("rows of A:   ", *s.locals["a_frag"].astype(int))
print("columns of B:", *s.locals["b_frag"].astype(int))

# %% [markdown]
# These 24 floats give 128 products: all rows with all columns, the cells of C in the picture.
#
# ## Your turn
#
# Which thread of the block owns the element of C in this row and column of the block tile? The kernel computes `row`
# and `col` from `warp` and `lane`; invert that. The next cell compares your answer with the threads that stored the
# elements in the trace.


# %%
def owner(row, col):
    return None  # your answer, 0 to 255


# %%
stored, threads = found["warp_tiled"].touched("c", "store")
by_element = {
    (int(row), int(col)): int(thread)
    for (row, col), thread in zip(stored, threads, strict=True)
}
right = [
    (element, by_element[element])
    for element in ((0, 0), (0, 5), (4, 0), (37, 21), (64, 0), (127, 255))
]
answered = notebook.check(owner, *right)

# %% [markdown]
# A solution, if you want to see one:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def owner(row, col):
    warp = row // 64 * 4 + col // 64
    # Lanes 8 x 4; each lane's groups of four repeat 32 rows and 16 columns apart.
    lane = row % 32 // 4 * 4 + col % 16 // 4
    return 32 * warp + lane


assert notebook.check(owner, *by_element.items())

# %% [markdown]
# ## Wavefronts per FLOP, counted
#
# A **wavefront** is one pass through the banks of shared memory (notebook 4). In `double_buffered` a thread reads
# 8 + 8 floats per 64 multiply-adds, in `warp_tiled` 8 + 16 per 128. Which fraction of the wavefronts per FLOP of the
# loads remains? (Not quite the fraction of floats: lanes of a warp that read the same vector are served together.)

# %%
remains = notebook.predict("wavefronts of loads per FLOP, of those before", ...)


# %%
def shared_memory(stage):
    tile, requests = STAGES[stage].configs[0], found[stage].requests
    shared = requests[requests["space"] == "shared"]
    loads, stores = shared[shared["op"] == "load"], shared[shared["op"] == "store"]
    kiloflop = 2 * tile.BM * tile.BN * tile.BK / 1000
    return {
        "instructions that load": len(loads) / kiloflop,
        "wavefronts of loads": loads["wavefronts"].sum() / kiloflop,
        "wavefronts of stores": stores["wavefronts"].sum() / kiloflop,
    }


counted = pd.DataFrame(
    {f"{stage}, per 1000 FLOP": shared_memory(stage) for stage in found}
)
before, after = counted.loc["wavefronts of loads"]
remains.reveal(
    after / before, because="A sixth fewer, with a quarter fewer instructions."
)
counted.round(3)

# %% [markdown]
# The profiling counters of an H200 count the same for the loads of a whole product. They also show for how much of the
# time the path of shared memory was busy:

# %%
counters = notebook.recorded("latest/counters.csv")
counters = counters[(counters["m"] == 4096) & counters["stage"].isin(found)].set_index(
    "stage"
)
counters["wavefronts of loads per 1000 FLOP"] = (
    counters["shared_load_wavefronts"] / (2 * 4096**3 / 1000)
).round(3)
counters[["wavefronts of loads per 1000 FLOP", "shared_pipe_percent"]]

# %% [markdown]
# How much of this is due to the larger thread tile, and how much to the shape of the warp tile? The model of traffic
# computes every access of a k-tile, so other shapes can be counted without running them. All of these have the block
# tile of `warp_tiled`:

# %%
shapes = []
for TM, TN, WM, WN in (
    (8, 8, 16, 128),
    (8, 8, 32, 64),
    (8, 16, 16, 256),
    (8, 16, 64, 64),
    (8, 16, 128, 32),
):
    other = config.replace(TM=TM, TN=TN, WM=WM, WN=WN)
    loads = [
        access
        for access in accesses.k_tile("warp_tiled", other, 4096, 4096)
        if access.what == "load"
    ]
    kiloflop = 2 * other.BM * other.BN * other.BK / 1000
    shapes.append(
        {
            "thread tile": f"{TM} x {TN}",
            "warp tile": f"{WM} x {WN}",
            "lanes": f"{WM // TM} x {WN // TN}",
            "different floats per multiply-add": (WM + WN) / (WM * WN),
            "wavefronts per 1000 FLOP": sum(
                access.passes * access.warps for access in loads
            )
            / kiloflop,
        }
    )
pd.DataFrame(shapes).set_index(["thread tile", "warp tile"]).round(3)

# %% [markdown]
# The squares need the fewest different floats, as expected. But the wavefronts do not follow. One vector for each of
# 32 lanes takes four wavefronts, even if many lanes read the same vector. Only if each lane `i` reads the same vector
# as lane `i ^ 1`, or each the same as lane `i ^ 2`, does a wavefront serve twice as many lanes. (`^` flips a bit: lanes
# 4 and 5 are such a pair, or 4 and 6.)
#
# So the larger thread tile saves the wavefronts here. By this count alone, a tall and narrow warp tile would save more.
# But by the counters above, the path of shared memory is often idle in either kernel. Only a measurement can tell
# whether it matters.
#
# ## Registers, and how many warps fit
#
# A multiprocessor has 65,536 registers, and divides them among the threads of all blocks that it runs. **Occupancy** is
# the number of warps that it runs, divided by the number that it has room for (64). A block of `warp_tiled` has eight
# warps, and the compiler took 208 registers per thread. `double_buffered` has 16 warps on a multiprocessor. How many
# warps of `warp_tiled` fit?

# %%
fitting = notebook.predict("warps of warp_tiled per multiprocessor", ...)

# %% [markdown]
# A closed form computes it. The numbers of registers were recorded with the counters:

# %%
for stage in found:
    tile = STAGES[stage].configs[0]
    shared = tile.dynamic_shared or 4 * tile.slots * tile.BK * (tile.BM + tile.BN)
    registers = int(counters.loc[stage, "registers"])
    found_room = occupancy(tile.threads, registers, shared, cc=(9, 0))
    print(f"{stage}: {found_room}\n")
fitting.reveal(found_room.warps, because="65,536 registers are 315 threads of 208.")

# %% [markdown]
# One block of eight warps, where there were two blocks. That is a loss: each of the four schedulers of a multiprocessor
# has two warps to choose from, and none when both wait for their fragments. Registers can hide latency in two ways:
# with more threads, or with more work per thread. Here only the second remains.
#
# (`numba_gemm.occupancy("warp_tiled", cc=(9, 0))` compiles a stage and returns the same. It needs a process without
# the simulator.)
#
# ## Your turn again
#
# How many registers may each thread have, so that this number of blocks with this number of threads fits on a
# multiprocessor? A warp gets registers in units of 256, that is, eight per thread, and no thread can have more than
# 255. The next cell compares your answer with the closed form.


# %%
def most_registers(threads, blocks):
    return None  # your answer


# %%
def by_trying(threads, blocks):
    return max(
        r for r in range(1, 256) if occupancy(threads, r, 0, cc=(9, 0)).blocks >= blocks
    )


right = [
    (case, by_trying(*case))
    for case in ((256, 2), (256, 1), (128, 4), (256, 3), (128, 5))
]
answered = notebook.check(most_registers, *right)

# %% [markdown]
# A solution, if you want to see one:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def most_registers(threads, blocks):
    return min(255, 65_536 // (threads * blocks) // 8 * 8)


assert notebook.check(most_registers, *right)

# %% [markdown]
# The first case is the limit of `double_buffered`, `max_registers=128`: two blocks of 256 threads leave 128 registers,
# and one more would halve the occupancy.
#
# ## The fragments of the next k-step
#
# `register_prefetch` has two buffers again, now of registers: one set of fragments for even k-steps, one for odd ones.
# While one is multiplied, the fragments of the next k-step are read into the other. In NumPy, for one tile of a thread:


# %%
def prefetched_product(a_tile, b_tile):
    acc = np.zeros((len(a_tile), b_tile.shape[1]), np.float32)
    a_even, b_even = a_tile[:, 0], b_tile[0]
    for p in range(0, a_tile.shape[1], 2):
        a_odd, b_odd = a_tile[:, p + 1], b_tile[p + 1]  # in flight
        acc += np.outer(a_even, b_even)
        if p + 2 < a_tile.shape[1]:
            a_even, b_even = a_tile[:, p + 2], b_tile[p + 2]  # in flight
        acc += np.outer(a_odd, b_odd)
    return acc


assert np.allclose(prefetched_product(x, y), x @ y, atol=1e-4)

# %%
notebook.difference("warp_tiled", "register_prefetch", context=1, device_only=True)

# %% [markdown]
# Every element of A is its own k here, so a value in a register tells which k-step it belongs to. These are the
# fragments of a thread at each multiplication, in the smallest configuration, whose tiles have 8 k-steps:

# %%
own_k = np.tile(np.arange(16, dtype=np.float32), (32, 1))  # own_k[i, k] == k
ones, sums = np.ones((16, 32), np.float32), np.zeros((32, 32), np.float32)
for s in step(
    "register_prefetch", None, None, 1, own_k, ones, 0, sums, thread=5, config="test"
):
    if s.source.startswith("multiply("):
        even, odd, acc = (s.locals[name] for name in ("a_even", "a_odd", "acc"))
        print(f"{s.source:<30} a_even: {even[:2]}...  a_odd: {odd[:2]}...", end="  ")
        print(f"acc[0, 0] = {acc[0, 0]:.0f}")

# %% [markdown]
# At each step one set is multiplied, and the other already holds the next step. This covers even the first read of the
# next tile: it comes right after the barrier, and the last k-step of this tile is multiplied while it is in flight.
# That multiplication comes after the barrier, but its fragments are read before it, so the next iteration may overwrite
# the tile. The tracer confirms that there is no race:

# %%
config = STAGES["register_prefetch"].test_config
a, b = (
    rng.standard_normal((config.BM, 24), np.float32),
    rng.standard_normal((24, config.BN), np.float32),
)
c = np.zeros((config.BM, config.BN), np.float32)
print(trace("register_prefetch", None, None, 1, a, b, 0, c, config="test").races)
print(f"largest error: {abs(c - a @ b).max():.1e}")

# %% [markdown]
# ## Prediction, model and measurement
#
# `warp_tiled` has fewer wavefronts and fewer loads per FLOP than `double_buffered`, a larger block tile, so fewer reads
# from the L2 cache, and half as many warps. `register_prefetch` does the same in another order. The model of notebook 1
# finds the arithmetic busiest in all three kernels, so it predicts no gain; it counts neither instructions nor waits.
# How many times as fast as `double_buffered` is each?

# %%
gain_of_tiles = notebook.predict("warp_tiled, times as fast as double_buffered", ...)
gain_of_both = notebook.predict("register_prefetch, times as fast", ...)

# %%
results = notebook.measure("double_buffered", "warp_tiled", "register_prefetch")
notebook.compare(results)

# %%
table = notebook.compare(results)
took, bound = table["measured ms"], table["predicted ms"]
gain_of_tiles.reveal(
    took["double_buffered"] / took["warp_tiled"],
    model=bound["double_buffered"] / bound["warp_tiled"],
    because="Fewer instructions, but only two warps per scheduler to hide the waits.",
)
gain_of_both.reveal(
    took["double_buffered"] / took["register_prefetch"],
    model=bound["double_buffered"] / bound["register_prefetch"],
    because="The waits are hidden within each warp now. It still takes "
    f"{took['register_prefetch'] / bound['register_prefetch']:.2f} times its "
    "predicted time.",
)

# %%
draw.ladder_chart(results)

# %% [markdown]
# The two ideas need each other. The larger tiles leave two warps per scheduler, and gain next to nothing until each
# warp reads ahead. Two sets of fragments in tiles of 128 x 128 gained nothing either: there the compiler already reads
# ahead as far as 128 registers allow ([experiments](../docs/experiments.md)).
#
# ## The open question
#
# How many instructions are multiply-adds now?

# %%
counters["multiply-adds of all instructions"] = (
    4096**3 / 32 / counters["instructions"]
).round(2)
counters[
    [
        "fma_pipe_percent",
        "issue_slots_percent",
        "multiply-adds of all instructions",
        "registers",
    ]
]

# %% [markdown]
# In `warp_tiled` one instruction in ten is something else, and so it is in `register_prefetch`, as notebook 7 counts.
# Consider the path of a tile: each vector is loaded from global memory into registers, waits there, and is stored to
# shared memory. A vector of A takes four stores, since it is transposed. Can a tile get there without passing through
# registers? That is [notebook 7](07_async_copies_and_addresses.ipynb). Puzzle 14, `warp_tile`, asks you for a kernel
# with warp tiles.
