# %% [markdown]
# # 5. Load the next tile while multiplying: `double_buffered`
#
# **The question.** After notebook 4 every access is as wide as it can be, and none meets a bank twice. Still the
# multiply-add units of the GPU stand idle nearly half of the time. What do the threads do meanwhile? They wait: for
# memory to answer, and for each other. This notebook changes neither the arithmetic nor a single byte that moves. It
# changes *when* things are asked for.
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
import tempfile
from pathlib import Path

import numpy as np

from numba_gemm.inspect import draw, step, trace

# %% [markdown]
# ## How long memory takes to answer
#
# **Latency** is the time from asking for a number to having it. It has little to do with bandwidth, which says how
# much arrives a second once it flows. These latencies were measured, one load after the other, each waiting for the
# last:

# %%
spaces = notebook.recorded("memory_lab/memory_spaces.csv")
chosen = spaces["space"].isin(["register", "shared", "global"])
spaces.loc[chosen, ["space", "level", "latency_cycles"]].round(0).set_index("space")

# %% [markdown]
# A load does not stop the thread that makes it. The thread goes on, and the load is **in flight**. What stops it is
# the first instruction that *needs* the loaded value. So all depends on how much other work stands between the two.
#
# While one warp waits, another may run. A multiprocessor of an H200 holds two blocks of these kernels at once,
# sixteen warps, and that hides a part of the waiting. But all warps of a block meet at every barrier, and wait for
# the last.
#
# ## When `conflict_free` asks
#
# This is the picture that notebook 4 has ended with: one block, a small configuration, here with three k-tiles. A
# column lies between two barriers; the numbers are requests of the block's one warp.

# %%
rng = np.random.default_rng(5)
a, b = rng.standard_normal((64, 24), np.float32), rng.standard_normal((24, 32), np.float32)
c = np.zeros((64, 32), np.float32)

conflict_free = trace("conflict_free", None, None, 1, a, b, 0, c, blocks=[(0, 0, 0)], config="test")
draw.timeline(conflict_free, warp=0)

# %% [markdown]
# The columns take turns. In one, the block loads a tile from global memory and stores it to shared memory; in the
# next, it reads the tile and multiplies. In the first kind of column there is nothing to multiply, in the second
# nothing comes from global memory.
#
# ## The one idea: the next tile while this one is multiplied
#
# `double_buffered` has two **buffers** of each shared tile. It asks for the next tile before it multiplies this one,
# keeps what arrives in registers (`a_next`, `b_next`), and stores it after the multiplication into the buffer that
# nobody reads. A **prologue** before the loop fills the first buffer. The last tile is multiplied behind the loop; so
# `multiply_tile` is a function, which is called in two places. What is generated here is the difference between the
# two files:

# %%
notebook.difference("conflict_free", "double_buffered")

# %%
right_c = np.zeros((64, 32), np.float32)
double_buffered = trace("double_buffered", None, None, 1, a, b, 0, right_c, blocks=[(0, 0, 0)], config="test")
draw.timeline(double_buffered, warp=0)

# %% [markdown]
# The same requests, in about half as many columns. In all but the first and the last, the loads from global memory,
# the multiplication of one tile and the storing of the next share a column: nothing orders the warps within it.
#
# Who reads what has not changed. The two buffers lie one below the other in `a_tile`: rows 0 to 7 of the picture hold
# one k-tile, rows 8 to 15 the next; a column is a row of A, as A is transposed on its way (and swizzled, for the
# upper four k of each tile). Shown is the thread that stores each element first:

# %%
draw.thread_map(double_buffered, "a_tile", "store")

# %% [markdown]
# ## A thread through a tile
#
# To see what stands between asking and needing, step one thread. A is filled so that every element is its own k; then
# a value in a register tells which k-step it belongs to. `tape` writes down what the thread does, in its order:
#
# - `L` it loads its part of a tile from global memory into registers, `S` it stores it to shared memory
# - `|` all threads of the block meet at a barrier
# - `r3` it reads its fragments of k-step 3 from shared memory, `m3` it makes the 64 multiply-adds of k-step 3

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
    with step(stage, None, None, 1, own_k, b, 0, c, thread=5, config="test") as steps:
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
# memory, once a tile. In `double_buffered` eight k-steps stand between them.
#
# Is that long enough? A multiprocessor starts four instructions a clock, each for a whole warp. In the real
# configuration the multiply-adds of a block's k-tile take at least this many clocks:

# %%
from numba_gemm.kernels.ladder import STAGES

config = STAGES["double_buffered"].configs[0]
warps = config.threads // 32
print(f"{config.name}: {config.BK * config.TM * config.TN * warps // 4} clocks, by {warps} warps")

# %% [markdown]
# That is more than the latency of device memory in the table above, even if the block has the multiprocessor to
# itself. When the multiplication is done, the next tile has arrived.
#
# ## Why one barrier per tile is enough
#
# `conflict_free` needs two. One after the stores: nobody may read before all have written. And one after the reads:
# nobody may overwrite before all have read. `double_buffered` has dropped the second. Is that a race? Look at which
# buffer is touched between which barriers:

# %%
own = double_buffered.accesses[double_buffered.accesses["array"] == "a_tile"]
what = own["op"] + "s in buffer " + (own["element"].str[0] // config.BK).astype(str)
own.groupby([what, own["interval"]]).size().unstack(fill_value=0).rename_axis("a_tile")

# %% [markdown]
# In no column is the same buffer both stored and loaded. The buffer that is read in column 1 is overwritten in column
# 2. Even the quickest thread gets there only when *all* threads have come to the barrier between the two, and so have
# finished reading. The same barrier says that all have finished storing what column 2 reads. One barrier says both
# things, since what it separates are two different buffers.
#
# The tracer looks at every pair of accesses that no barrier orders:

# %%
print(double_buffered.races)

# %% [markdown]
# ### The proof by breaking it
#
# Take the second buffer away, and leave all else as it is: the real file's text with one change, built as a stage of
# its own.


# %%
def altered(name, old, new):
    """A stage like the named one, with one line of its file changed."""
    text = notebook.source(name).text
    assert text.count(old) == 1
    path = Path(tempfile.mkdtemp()) / "one_buffer.py"
    path.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location("numba_gemm.kernels.ladder.one_buffer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dataclasses.replace(STAGES[name], build=module.build)


one_buffer = altered("double_buffered", "uint32(buffer ^ BK)", "buffer")
broken = trace(one_buffer, None, None, 1, a, b, 0, c, blocks=[(0, 0, 0)], config="test")
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
# Wrong, on the simulator, which runs threads one after the other from barrier to barrier. On a GPU the warps of a
# block often stay close to each other, so a broken kernel can be right a thousand times, and then not. That is why
# one looks for races, and does not wait for them.
#
# ## Your turn
#
# Write how many barriers a block passes for a product with K terms a sum, in `conflict_free` and in
# `double_buffered`, whose k-tiles have 8: a tuple of two. Mind the last, partial tile. The next cell compares your
# answer with what is counted in traces of the real kernels.


# %%
def barriers(k):
    return None  # your answer


# %%
def counted(stage, k):
    found = trace(stage, None, None, 1, a[:, :k], b[:k], 0, c, blocks=[(0, 0, 0)], config="test")
    return int(found.accesses["interval"].max())  # C is stored after the last barrier


right = [((k,), (counted("conflict_free", k), counted("double_buffered", k))) for k in (1, 8, 12)]
answered = notebook.check(barriers, *right)

# %% [markdown]
# A solution, if you want to see one:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def barriers(k):
    tiles = (k + 7) // 8
    # Two a tile; or one after the prologue, and one after every tile but the last.
    return 2 * tiles, 1 + (tiles - 1)


assert notebook.check(barriers, *right)

# %% [markdown]
# Both tapes as a picture, a box for each event, as long as it has instructions; the arrows go from a load or a read to
# what needs it, and the numbers are k-steps. The longer an arrow, the more latency it hides.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
WORK = {"L": 6, "S": 18, "r": 4, "m": 64, "|": 2}  # instructions of a thread in this configuration
KINDS = {"L": "load a tile", "S": "store it", "r": "read fragments", "m": "multiply-add", "|": "barrier"}


def boxed(done):
    """A tape's events; what each needs is the last load, or the read of its k-step."""
    found, made = [], {}
    for place, event in enumerate(done):
        kind, k = event[0], event[1:]
        needed = {"S": "L", "m": f"r{k}"}.get(kind)
        found.append(draw.Event(KINDS[kind], WORK[kind], k if kind == "m" else "", made.get(needed)))
        made[event] = place
    return found


draw.sequence(
    {f"{stage}: thread 5, barriers black": boxed(done) for stage, done in tapes.items()},
    {
        "load a tile": draw.ACCENT,
        "store it": draw.colour("a"),
        "read fragments": draw.colour("a"),
        "multiply-add": draw.colour("c"),
    },
)

# %% [markdown]
# ## Predict, then measure
#
# What does the model of notebook 1 say? Both stages move the same bytes by the same instructions, and the model knows
# nothing of latency. So it must predict the same time for both. If there is a gain, it comes from what the model leaves
# out: waiting, above all.

# %%
results = notebook.measure("conflict_free", "double_buffered")
notebook.compare(results)

# %%
draw.ladder_chart(results)

# %% [markdown]
# The gain is less than hiding all latencies might promise, because other warps hid a part of them before. And it is not
# free: the part of the next tile that waits in registers takes registers from everything else.
#
# ## The question it leaves open
#
# Global memory is waited for no longer. Profiling counters say in how many of its slots, four a clock, a multiprocessor
# starts an instruction (`issue_slots_percent`), and how much of the time its multiply-add units are busy
# (`fma_pipe_percent`):

# %%
counters = notebook.recorded("latest/counters.csv")
counters = counters[(counters["m"] == 4096) & counters["stage"].isin(results["stage"])].set_index("stage")
counters["multiply-adds of all instructions"] = (4096**3 / 32 / counters["instructions"]).round(2)
counters[["fma_pipe_percent", "issue_slots_percent", "multiply-adds of all instructions", "registers"]]

# %% [markdown]
# What is left beside the multiply-adds is shared memory. In the tape, each k-step reads its fragments just before it
# needs them, `r1 m1 r2 m2`, and for every 64 multiply-adds a thread reads four vectors. Can it make more of what it
# reads, and read it earlier? That is [notebook 6](06_warp_tiles.ipynb).
