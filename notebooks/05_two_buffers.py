# %% [markdown]
# # 5. Double buffering: `double_buffered`
#
# *Before this: notebooks [1](01_naive_and_coalesced.ipynb) to [4](04_vectors_and_banks.ipynb). Time: about 50 minutes.*
#
# **The question.** After notebook 4 every access is as wide as it can be, and none has a bank conflict. Still the
# multiply-add units of the GPU are idle for a good part of the time. The threads wait: for memory to answer, and for
# each other. This notebook changes neither the arithmetic nor a single byte that moves. It changes *when* loads are
# issued.
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
import tempfile

import numpy as np

from numba_gemm.inspect import draw, step, trace

# %% [markdown]
# ## How long memory takes to answer
#
# **Latency** is the time from issuing a load to having its value. It has little to do with bandwidth, the number of
# bytes per second that arrive once data flows. How many clocks does a load from device memory take, with the L2 cache
# missed? The multiprocessor can issue four instructions per clock.

# %%
latency = notebook.predict("latency of device memory", ..., unit="clocks")

# %% [markdown]
# These latencies were measured with one load after the other, each waiting for the previous one:

# %%
spaces = notebook.recorded("memory_lab/memory_spaces.csv")
chosen = spaces["space"].isin(["register", "shared", "global"])
clocks = spaces.loc[chosen, ["space", "level", "latency_cycles"]].round(0)
found = clocks.set_index("level").loc["device memory", "latency_cycles"]
latency.reveal(
    found, measured=True, because=f"{spaces.attrs['source']}.", tolerance=0.2
)
clocks.set_index("space")

# %% [markdown]
# A load does not stop the thread that makes it. The thread goes on, and the load is **in flight**. What stops it is
# the first instruction that *needs* the loaded value. What counts is how much other work stands between the two.
#
# While one warp waits, another may run. A multiprocessor of an H200 holds two blocks of these kernels at once,
# sixteen warps, and that hides a part of the waiting. But all warps of a block meet at every barrier, and wait for
# the last.
#
# ## When `conflict_free` asks
#
# This is the picture at the end of notebook 4: one block of a small configuration, here with three k-tiles. A column
# is the time between two barriers; the numbers are requests of the block's one warp. As before, `None, None` is the
# stage's own grid and block, and alpha = 1, A, B, beta = 0 and C follow.

# %%
rng = np.random.default_rng(5)
a = rng.standard_normal((64, 24), np.float32)
b = rng.standard_normal((24, 32), np.float32)
c = np.zeros((64, 32), np.float32)

one = {"blocks": [(0, 0, 0)], "config": "test"}
conflict_free = trace("conflict_free", None, None, 1, a, b, 0, c, **one)
draw.timeline(conflict_free, warp=0)

# %% [markdown]
# The columns take turns. In one, the block loads a tile from global memory and stores it to shared memory; in the
# next, it reads the tile and multiplies. In the first kind of column there is nothing to multiply, in the second
# nothing comes from global memory.
#
# ## The idea: load the next tile while this one is multiplied
#
# `double_buffered` has two **buffers** for each shared tile. It issues the loads of the next tile before it multiplies
# this one, keeps the values in registers (`a_next`, `b_next`), and stores them after the multiplication, into the
# buffer that no thread reads. A **prologue** before the loop fills the first buffer. The last tile is multiplied after
# the loop.
#
# ### The same in NumPy
#
# One block of C, with two buffers and the same order of steps:


# %%
def buffered_product(a, b, BK=8):
    k = a.shape[1]
    a_tile, b_tile = np.zeros((2, len(a), BK)), np.zeros((2, BK, b.shape[1]))
    acc, buffer = np.zeros((len(a), b.shape[1])), 0
    a_tile[0], b_tile[0] = a[:, :BK], b[:BK]  # the prologue
    for k0 in range(BK, k, BK):
        a_next, b_next = a[:, k0 : k0 + BK], b[k0 : k0 + BK]  # loads in flight
        acc += a_tile[buffer] @ b_tile[buffer]
        buffer ^= 1
        a_tile[buffer], b_tile[buffer] = a_next, b_next  # then one barrier
    return acc + a_tile[buffer] @ b_tile[buffer]


assert np.allclose(buffered_product(a, b), a @ b, atol=1e-4)

# %% [markdown]
# ### The kernel
#
# The whole kernel, from the file that runs. As in the other stages, a function `build` contains it and provides the
# constants. `fit` tells how the matrices can be read: `fetch` is `load4` for whole, aligned vectors, and a slower
# function for others. `multiply_tile` multiplies one tile, and is called in two places; the diff with the kernel of
# notebook 4 follows.

# %%
notebook.source("double_buffered", function="double_buffered")

# %%
notebook.difference("conflict_free", "double_buffered", context=1, device_only=True)

# %% [markdown]
# How many barriers does a block pass for three k-tiles? `conflict_free` passes two per tile.

# %%
passed = notebook.predict("barriers for three k-tiles", ..., unit="per block")

# %%
right_c = np.zeros((64, 32), np.float32)
arguments = (1, a, b, 0, right_c)
double_buffered = trace("double_buffered", None, None, *arguments, **one)
draw.timeline(double_buffered, warp=0)

# %%
passed.reveal(
    double_buffered.accesses["interval"].max(),
    because="One after the prologue, and one after each tile except the last.",
)

# %% [markdown]
# The same requests, in about half as many columns. In all columns except the first and the last, the loads from global
# memory, the multiplication of one tile and the stores of the next share a column: no barrier orders them.
#
# The two buffers are one below the other in `a_tile`: rows 0 to 7 have one k-tile, rows 8 to 15 the next. The picture
# shows the lane that stores each element. The dashed line separates the buffers, which are first stored between
# different barriers. The first request of the warp is outlined: the swizzle of notebook 4 puts its second half
# elsewhere.

# %%
draw.thread_map(double_buffered, "a_tile", "store")

# %% [markdown]
# ## A thread through a tile
#
# How much work stands between a load and its first use? Step one thread. Every element of A is set to its own k, so a
# value in a register tells its k-step. `tape` records what the thread does, in order:
#
# - `L` it loads its part of a tile from global memory into registers, `S` it stores it to shared memory
# - `|` all threads of the block meet at a barrier
# - `r3` it reads its fragments of k-step 3 from shared memory, `m3` it executes the 64 multiply-adds of k-step 3
#
# How many multiply-adds of the thread stand between `L` and the `S` that needs its values, in `double_buffered`? A tile
# has 8 k-steps.

# %%
between = notebook.predict("multiply-adds from a load to its use", ...)

# %%
own_k = np.tile(np.arange(24, dtype=np.float32), (64, 1))  # own_k[i, k] == k


def events(s, before):
    """What step `s` of a thread says; `before` is the line that has just run."""
    if s.kind == "barrier":
        yield "|"
    if "values" in s.changed and "fetch" in before:
        yield "L"
    if "a_frag" in s.changed and np.isfinite(s.locals["a_frag"]).all():
        yield f"r{s.locals['a_frag'][0]:.0f}"
    if "a_frag[i] *" in s.source:
        yield f"m{s.locals['a_frag'][0]:.0f}"
    if s.source.startswith("store4_down("):
        yield "S"


def tape(stage, last="m8"):
    """What thread 5 does, until it multiplies the first k-step of the second tile."""
    done, before = [], ""
    arguments = (1, own_k, b, 0, c)
    with step(stage, None, None, *arguments, thread=5, config="test") as steps:
        for s in steps:
            done += [event for event in events(s, before) if done[-1:] != [event]]
            before = s.source
            if last in done:
                return done


tapes = {stage: tape(stage) for stage in ("conflict_free", "double_buffered")}
for stage, done in tapes.items():
    print(f"{stage:<16}{' '.join(done)}")

# %% [markdown]
# In `conflict_free` each `L` is followed by the `S` that needs it: the thread waits for the whole latency of global
# memory, once per tile.

# %%
done = tapes["double_buffered"]
second = [i for i, event in enumerate(done) if event == "L"][1]
needed = done.index("S", second)
steps = [event for event in done[second:needed] if event[0] == "m"]
between.reveal(64 * len(steps), because=f"{len(steps)} k-steps: {' '.join(steps)}.")

# %% [markdown]
# Is that long enough? A multiprocessor issues four instructions per clock, each for a whole warp. In the real
# configuration the multiply-adds of a block's k-tile take at least this many clocks:

# %%
from numba_gemm.kernels.ladder import STAGES

config = STAGES["double_buffered"].configs[0]
warps = config.threads // 32
clocks = config.BK * config.TM * config.TN * warps // 4
print(f"{config.name}: {clocks} clocks, by {warps} warps")

# %% [markdown]
# That is more than the latency of device memory in the table above, even if the block has the multiprocessor to
# itself. When the multiplication is finished, the next tile has arrived.
#
# ## Why one barrier per tile is enough
#
# `conflict_free` needs two. One after the stores: no thread may read before all have written. And one after the reads:
# no thread may overwrite before all have read. `double_buffered` has dropped the second. Is that a race? Look at which
# buffer is touched between which barriers:

# %%
own = double_buffered.accesses[double_buffered.accesses["array"] == "a_tile"]
what = own["op"] + "s in buffer " + (own["element"].str[0] // config.BK).astype(str)
counts = own.groupby([what, own["interval"]]).size()
counts.unstack(fill_value=0).rename_axis("a_tile")

# %% [markdown]
# In no column is the same buffer both stored and loaded. The buffer that is read in column 1 is overwritten in column
# 2. Even the fastest thread gets there only after *all* threads have reached the barrier between the two, and so have
# finished reading. The same barrier guarantees that all have finished storing what column 2 reads. One barrier is
# enough for both, because the two buffers are different memory.
#
# The tracer looks at every pair of accesses that no barrier orders:

# %%
print(double_buffered.races)

# %% [markdown]
# ### Without the second buffer
#
# The next cell removes the second buffer and leaves everything else unchanged: it edits one line of the real file's
# text, and builds a stage from it.


# %%
def altered(name, old, new):
    """A stage like the named one, with one line of its file changed."""
    text = notebook.source(name).text
    assert text.count(old) == 1
    path = Path(tempfile.mkdtemp()) / "one_buffer.py"
    path.write_text(text.replace(old, new))
    beside = "numba_gemm.kernels.ladder.one_buffer"  # for its relative imports
    spec = importlib.util.spec_from_file_location(beside, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dataclasses.replace(STAGES[name], build=module.build)


one_buffer = altered("double_buffered", "uint32(buffer ^ BK)", "buffer")
broken = trace(one_buffer, None, None, 1, a, b, 0, c, **one)
print(f"{len(broken.races)} pairs of lines race; one of A and one of B:")
print(next(race for race in broken.races if race.array == "a_tile"))
print(next(race for race in broken.races if race.array == "b_tile"))

# %% [markdown]
# Two accesses to one element, by two threads, with no barrier between: one stores the next tile where another may
# still be reading this one. (The numbers are lines: of the altered kernel, and of the function that it calls there.)
# Does it matter? Here is the largest error of both products, beside NumPy's:

# %%
print(f"two buffers: {abs(right_c - a @ b).max():.1e}")
print(f"one buffer:  {abs(c - a @ b).max():.1e}")

# %% [markdown]
# The result is wrong on the simulator, which runs threads one after the other from barrier to barrier. On a GPU the
# warps of a block often stay close to each other, so a broken kernel can be correct a thousand times, and then fail.
# That is why one searches for races instead of testing results.
#
# ## Your turn
#
# How many barriers does a block pass for a product with K terms per sum, in `conflict_free` and in `double_buffered`?
# Their k-tiles have 8 k-steps. Return a tuple of two numbers. Do not forget the last, partial tile. The next cell
# compares your answer with traces of the real kernels.


# %%
def barriers(k):
    return None  # your answer


# %%
def counted(stage, k):
    found = trace(stage, None, None, 1, a[:, :k], b[:k], 0, c, **one)
    return int(found.accesses["interval"].max())  # C is stored after the last barrier


stages = ("conflict_free", "double_buffered")
right = [((k,), tuple(counted(stage, k) for stage in stages)) for k in (1, 8, 12)]
answered = notebook.check(barriers, *right)

# %% [markdown]
# A solution, if you want to see one:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def barriers(k):
    tiles = (k + 7) // 8
    # Two per tile; or one after the prologue, and one after every tile but the last.
    return 2 * tiles, 1 + (tiles - 1)


assert notebook.check(barriers, *right)

# %% [markdown]
# Both tapes as a picture, with one box per event. A box is as long as its number of instructions. The arrows go from a
# load or a read to its first use, and the numbers are k-steps. The longer an arrow, the more latency it hides.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
WORK = {"L": 6, "S": 18, "r": 4, "m": 64, "|": 2}  # instructions of a thread
KINDS = {
    "L": "load a tile",
    "S": "store it",
    "r": "read fragments",
    "m": "multiply-add",
    "|": "barrier",
}


def boxed(done):
    """A tape's events; what each needs is the last load, or the read of its k-step."""
    found, made = [], {}
    for place, event in enumerate(done):
        kind, k = event[0], event[1:]
        needed = {"S": "L", "m": f"r{k}"}.get(kind)
        label = k if kind == "m" else ""
        found.append(draw.Event(KINDS[kind], WORK[kind], label, made.get(needed)))
        made[event] = place
    return found


draw.sequence(
    {f"{name}: thread 5, barriers black": boxed(done) for name, done in tapes.items()},
    {
        "load a tile": draw.ACCENT,
        "store it": draw.colour("a"),
        "read fragments": draw.colour("a"),
        "multiply-add": draw.colour("c"),
    },
)

# %% [markdown]
# ## Prediction, model and measurement
#
# How many times as fast is `double_buffered`? The model of notebook 1 counts bytes, wavefronts and multiply-adds, and
# leaves out latency. Both stages have the same of each, so the model predicts the same time for both. A gain comes from
# what the model leaves out.

# %%
gain = notebook.predict("times as fast as conflict_free", ...)

# %%
results = notebook.measure("conflict_free", "double_buffered")
notebook.compare(results)

# %%
table = notebook.compare(results)
took, bound = table["measured ms"], table["predicted ms"]
excess = took / bound
gain.reveal(
    table.loc["double_buffered", "gain"],
    model=bound["conflict_free"] / bound["double_buffered"],
    because="The model leaves out waiting. conflict_free takes "
    f"{excess['conflict_free']:.2f} times its predicted time, double_buffered "
    f"{excess['double_buffered']:.2f} times.",
)

# %%
draw.ladder_chart(results)

# %% [markdown]
# The gain is modest, because other warps hid a part of the latency before. It has a price: the part of the next tile
# that is kept in registers leaves fewer registers for everything else.
#
# ## The open question
#
# The wait for global memory is hidden now. Profiling counters tell in how many of its issue slots, four per clock, a
# multiprocessor issues an instruction (`issue_slots_percent`), and for how much of the time its multiply-add units are
# busy (`fma_pipe_percent`):

# %%
counters = notebook.recorded("latest/counters.csv")
shown = (counters["m"] == 4096) & counters["stage"].isin(results["stage"])
counters = counters[shown].set_index("stage")
share = (4096**3 / 32 / counters["instructions"]).round(2)
columns = ["fma_pipe_percent", "issue_slots_percent", "registers"]
counters[columns].assign(**{"multiply-adds of all instructions": share})

# %% [markdown]
# Of the other instructions, many read shared memory. In the tape, each k-step reads its fragments just before it
# needs them, `r1 m1 r2 m2`, and per 64 multiply-adds a thread reads four vectors. Can it use each value more often, and
# read it earlier? That is [notebook 6](06_warp_tiles.ipynb). Puzzle 13, `two_buffers`, asks you for this kernel.
