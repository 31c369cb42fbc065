# %% [markdown]
# # 6. Warp tiles and register prefetch: `warp_tiled` and `register_prefetch`
#
# **The question.** After notebook 5 a block no longer waits for global memory. What it waits for now is shared memory:
# for every 64 multiply-adds a thread reads four vectors of fragments, and it needs them at once. Can it make more of
# what it reads, and read it earlier?
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
import pandas as pd

from numba_gemm.inspect import draw, step, trace
from numba_gemm.kernels.ladder import STAGES
from numba_gemm.models import accesses
from numba_gemm.models.occupancy import occupancy

# %% [markdown]
# ## Larger tiles need less
#
# In each k-step a thread reads TM floats of A and TN floats of B, and makes TM * TN multiply-adds of them. So it
# reads 1/TM + 1/TN floats for each, as notebook 3 has found: the larger the thread tile, the fewer. What does it
# cost? Everything that a thread keeps lies in **registers**, and it can have 255 of them. The sums alone are TM * TN.
# Beside them are the fragments, of which this notebook will want two sets, and the part of the next tile that waits to
# be stored. This must be kept in block tiles of 128 x 256 x 16:

# %%
tiles = [(8, 8), (8, 16), (16, 16)]
budget = pd.DataFrame({"thread tile": [f"{TM} x {TN}" for TM, TN in tiles]}).set_index("thread tile")
budget["floats read a multiply-add"] = [1 / TM + 1 / TN for TM, TN in tiles]
budget["sums"] = [TM * TN for TM, TN in tiles]
budget["fragments"] = [2 * (TM + TN) for TM, TN in tiles]
budget["waiting"] = [16 * (128 + 256) * TM * TN // (128 * 256) for TM, TN in tiles]
budget["registers, at least"] = budget[["sums", "fragments", "waiting"]].sum(axis=1)
budget

# %% [markdown]
# 16 x 16 is out of reach: what does not fit into registers would be **spilled**, that is, kept in slow memory. With 8
# x 16 there are some fifty left for addresses and counters.
#
# ## The one idea: warps have tiles, too
#
# The block tile belongs to the block, the thread tile to the thread. Between them stands the warp, whose 32 threads
# read shared memory together. Until now its place was an accident: threads were numbered along the rows of the block
# tile. `warp_tiled` gives each warp a **warp tile**, and each **lane**, a thread's place in its warp, a part of it.

# %%
config = STAGES["warp_tiled"].configs[0]
levels = {"block": (config.BM, config.BN), "warp": (config.WM, config.WN), "thread": (config.TM, config.TN)}
pd.DataFrame(levels, index=["rows of C", "columns of C"]).T

# %%
notebook.difference("double_buffered", "warp_tiled")

# %% [markdown]
# Besides the warp tiles there are two smaller things. The tiles are now larger than the 48 KB of shared memory that a
# kernel can name itself, so they are **dynamic**: one array whose size is told at the launch, of which `shared_view`
# cuts the tiles. And A's rows in it are padded by a few floats instead of swizzled, so that an address is a plain
# sum.
#
# ## Which warp owns what
#
# Both kernels in their real configurations, one block, one k-tile, everything recorded. This takes a few seconds: the
# block of `warp_tiled` makes half a million multiply-adds, in Python.

# %%
rng = np.random.default_rng(6)
found = {}
for stage in ("double_buffered", "warp_tiled"):
    tile = STAGES[stage].configs[0]
    a, b = rng.standard_normal((tile.BM, tile.BK), np.float32), rng.standard_normal((tile.BK, tile.BN), np.float32)
    c = np.zeros((tile.BM, tile.BN), np.float32)
    found[stage] = trace(stage, None, None, 1, a, b, 0, c)
    print(f"{stage}: {tile.name}, largest error {abs(c - a @ b).max():.0e}, races: {found[stage].races}")

# %% [markdown]
# Who stores each element of C, first in `double_buffered`:

# %%
draw.thread_map(found["double_buffered"], "c", "store")

# %% [markdown]
# A warp has two rows of threads, sixteen in each. With their quadrants they own two bands, 64 rows apart: few rows,
# and all columns of the block tile.

# %%
draw.thread_map(found["warp_tiled"], "c", "store")

# %% [markdown]
# Eight warps, each with a square of 64 x 64. In a k-step a warp needs as many different floats of A as it has rows,
# and as many of B as it has columns. The nearer its tile is to a square, the fewer they are for its area, as a square
# has the shortest fence. Here is what one thread owns:

# %%
draw.who_reads_what(found["warp_tiled"], thread=37)

# %% [markdown]
# In C, the thread's tile of 8 x 16 lies in groups of four rows and four columns, so that neighbouring lanes read
# neighbouring vectors. (In A and B the picture shows what the thread *copies* from global memory for the whole block,
# which is not what it multiplies.)
#
# ## The fragments of a thread
#
# The same thread, stepped to its first multiplication. Every element of A is its own row number, and every element of
# B its column number. Then the fragments say where they come from:

# %%
rows = np.repeat(np.arange(config.BM, dtype=np.float32)[:, None], config.BK, axis=1)
columns = np.repeat(np.arange(config.BN, dtype=np.float32)[None], config.BK, axis=0)

with step("warp_tiled", None, None, 1, rows, columns, 0, np.zeros_like(c), thread=37) as steps:
    s = next(s for s in steps if s.source.startswith("multiply("))
print(f"{s.source}    warp {37 // 32}, lane {37 % 32}")
print("rows of A:   ", *s.locals["a_frag"].astype(int))
print("columns of B:", *s.locals["b_frag"].astype(int))

# %% [markdown]
# These 24 floats make 128 products: all rows with all columns, the cells of C in the picture.
#
# ## Your turn
#
# Which thread of the block owns the element of C in this row and column of the block tile? The kernel's own lines,
# which compute `row` and `col` from `warp` and `lane`, say it the other way round. The next cell compares your answer
# with who stored the element in the trace.


# %%
def owner(row, col):
    return None  # your answer, 0 to 255


# %%
stored, threads = found["warp_tiled"].touched("c", "store")
by_element = {(int(row), int(col)): int(thread) for (row, col), thread in zip(stored, threads, strict=True)}
right = [(element, by_element[element]) for element in ((0, 0), (0, 5), (4, 0), (37, 21), (64, 0), (127, 255))]
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
# ## Wavefronts for each FLOP, counted
#
# A **wavefront** is one pass through the banks of shared memory (notebook 4). This counts them in both traces, and
# divides by the FLOP that the blocks make, two a multiply-add:


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


counted = pd.DataFrame({f"{stage}, for 1000 FLOP": shared_memory(stage) for stage in found}).round(3)
counted

# %% [markdown]
# A quarter fewer instructions, and a sixth fewer wavefronts. The profiling counters of an H200 say the same of the
# loads, for a whole product, and how busy shared memory's path was:

# %%
counters = notebook.recorded("latest/counters.csv")
counters = counters[(counters["m"] == 4096) & counters["stage"].isin(found)].set_index("stage")
counters["wavefronts of loads for 1000 FLOP"] = (counters["shared_load_wavefronts"] / (2 * 4096**3 / 1000)).round(3)
counters[["wavefronts of loads for 1000 FLOP", "shared_pipe_percent"]]

# %% [markdown]
# Which part of it is the larger thread tile, and which the shape of the warp tile? The model of traffic lays out
# every access of a k-tile, so other shapes can be counted without running them. All of these have the block tile of
# `warp_tiled`:

# %%
shapes = []
for TM, TN, WM, WN in ((8, 8, 16, 128), (8, 8, 32, 64), (8, 16, 16, 256), (8, 16, 64, 64), (8, 16, 128, 32)):
    other = config.replace(TM=TM, TN=TN, WM=WM, WN=WN)
    loads = [access for access in accesses.k_tile("warp_tiled", other, 4096, 4096) if access.what == "load"]
    kiloflop = 2 * other.BM * other.BN * other.BK / 1000
    shapes.append(
        {
            "thread tile": f"{TM} x {TN}",
            "warp tile": f"{WM} x {WN}",
            "lanes": f"{WM // TM} x {WN // TN}",
            "different floats a multiply-add": (WM + WN) / (WM * WN),
            "wavefronts for 1000 FLOP": sum(access.passes * access.warps for access in loads) / kiloflop,
        }
    )
pd.DataFrame(shapes).set_index(["thread tile", "warp tile"]).round(3)

# %% [markdown]
# The squares need the fewest different floats, as expected. But wavefronts do not follow. It is lanes that are
# served: a vector for each of 32 lanes is four wavefronts, even if many of them ask for the same one. Only if
# neighbours ask for the same vector, each lane `i` for that of lane `i ^ 1`, or each for that of lane `i ^ 2`, are
# twice as many served at a time. (`^` flips a bit: lanes 4 and 5 are such a pair, or 4 and 6.)
#
# So it is the larger thread tile that has saved wavefronts here. By this count alone, a tall and narrow warp tile
# would save more. But a count is not a time: by the counters above, the path of shared memory is idle for half of the
# time in either kernel, so that it takes a measurement to say whether it matters.
#
# ## Registers, and who else fits in
#
# A multiprocessor has 65,536 registers, and shares them out among the threads of all blocks that live on it. The
# share of its places for warps that are taken is called **occupancy**. A closed form computes it. The numbers of
# registers are those that the compiler took, recorded with the counters:

# %%
for stage in found:
    tile = STAGES[stage].configs[0]
    shared = tile.dynamic_shared or 4 * tile.slots * tile.BK * (tile.BM + tile.BN)
    print(f"{stage}: {occupancy(tile.threads, int(counters.loc[stage, 'registers']), shared, cc=(9, 0))}\n")

# %% [markdown]
# One block of eight warps, where there were two. That is a loss: each of the four schedulers has two warps to choose
# from, and when both wait for their fragments, it has none. Registers can hide latency in two ways: as more threads, or
# as more work in each. Here only the second is left.
#
# (`numba_gemm.occupancy("warp_tiled", cc=(9, 0))` compiles a stage and tells the same. It needs a process without
# the simulator.)
#
# ## Your turn again
#
# How many registers may each thread have if so many blocks of so many threads shall fit on a multiprocessor? A warp
# is given registers in units of 256, that is eight a thread, and no thread can have more than 255. The next cell
# compares your answer with the closed form.


# %%
def most_registers(threads, blocks):
    return None  # your answer


# %%
def by_trying(threads, blocks):
    return max(r for r in range(1, 256) if occupancy(threads, r, 0, cc=(9, 0)).blocks >= blocks)


right = [(case, by_trying(*case)) for case in ((256, 2), (256, 1), (128, 4), (256, 3), (128, 5))]
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
# While one is multiplied, the fragments of the next k-step are read into the other.

# %%
notebook.difference("warp_tiled", "register_prefetch")

# %% [markdown]
# Every element of A is its own k here, so a value in a register tells which k-step it belongs to. These are the
# fragments of a thread at each multiplication, in the smallest configuration, whose tiles have 8 k:

# %%
own_k = np.tile(np.arange(16, dtype=np.float32), (32, 1))  # own_k[i, k] == k
ones, sums = np.ones((16, 32), np.float32), np.zeros((32, 32), np.float32)
for s in step("register_prefetch", None, None, 1, own_k, ones, 0, sums, thread=5, config="test"):
    if s.source.startswith("multiply("):
        even, odd = s.locals["a_even"], s.locals["a_odd"]
        print(f"{s.source:<30} a_even: {even[:3]}...   a_odd: {odd[:3]}...   acc[0, 0] = {s.locals['acc'][0, 0]:.0f}")

# %% [markdown]
# At each step one set is multiplied, and the other already holds the step after. Even the first read of the next tile
# is covered: it comes right after the barrier, and the last k-step of this tile is multiplied while it is in flight.
# That multiplication has moved behind the barrier, but its fragments are read in front of it, so the next iteration may
# overwrite the tile. The tracer confirms that there is no race:

# %%
config = STAGES["register_prefetch"].test_config
a, b = rng.standard_normal((config.BM, 24), np.float32), rng.standard_normal((24, config.BN), np.float32)
c = np.zeros((config.BM, config.BN), np.float32)
print(trace("register_prefetch", None, None, 1, a, b, 0, c, config="test").races)
print(f"largest error: {abs(c - a @ b).max():.1e}")

# %% [markdown]
# ## Predict, then measure
#
# Fewer wavefronts and fewer loads for each FLOP; the block tile has grown, too, so that less is read from the L2 cache;
# and then the same again, in another order. Will the model of notebook 1 predict a gain? It has no reason to: in all
# three kernels it finds the arithmetic itself busy longest. It counts neither instructions nor waits.

# %%
results = notebook.measure("double_buffered", "warp_tiled", "register_prefetch")
notebook.compare(results)

# %%
draw.ladder_chart(results)

# %% [markdown]
# The two ideas need each other. The larger tiles leave two warps per scheduler, and gain nothing until each warp reads
# ahead. Two sets of fragments in tiles of 128 x 128 gained nothing: there the compiler already reads ahead
# as far as 128 registers allow (`docs/experiments.md`). Together they gain 9 %, with half as many warps, and pass
# cuBLAS on the H200 whose times are in the repository.
#
# ## The question it leaves open
#
# How many instructions are multiply-adds now?

# %%
counters["multiply-adds of all instructions"] = (4096**3 / 32 / counters["instructions"]).round(2)
counters[["fma_pipe_percent", "issue_slots_percent", "multiply-adds of all instructions", "registers"]]

# %% [markdown]
# In `warp_tiled` one instruction in ten is something else, and so it is in `register_prefetch`, as notebook 7 counts.
# Consider the path of a tile: each vector is loaded from global memory into registers, waits there, and is stored to
# shared memory. A vector of A takes four stores, since it is transposed. Can a tile travel without passing through
# registers? That is [notebook 7](07_async_copies_and_addresses.ipynb).
