# %% [markdown]
# # 8. Stream-K, equal shares for all SMs: `basic_stream_k`, `stream_k`, and `thin`
#
# **The question.** `snake_order` has little in its loop but multiply-adds. Yet a product of 4096 cubed is 512 tiles, an
# H200 has 132 multiprocessors, and 512 / 132 is 3.88. What do the others do while some make the last tiles? And what
# if there are only eight tiles in all?
#
# This notebook looks at the work from above: who gets which part of it, and when. At its end stands the whole climb.
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
from matplotlib.figure import Figure

from numba_gemm import explain
from numba_gemm.device.partition import PartitionArguments, piece
from numba_gemm.inspect import draw, step, trace
from numba_gemm.kernels.ladder import STAGES
from numba_gemm.kernels.ladder.stage import default_partition, partition_layout
from numba_gemm.kernels.product import ONE, Product, dense
from numba_gemm.kernels.stage import Partition
from numba_gemm.models.prediction import Ceilings, predict
from numba_gemm.runtime.launch import simulated
from numba_gemm.runtime.matrix import Matrix

SMS = 132  # multiprocessors of an H200

# %% [markdown]
# ## Rounds of blocks
#
# A multiprocessor (SM) takes one block of `snake_order` at a time, because a block needs more than half of its
# registers. So the first 132 blocks start together and, all equally long, end together; then the next 132 start. Such
# a round is often called a **wave** of blocks. Work is counted in **k-tiles** here: one turn of the main loop, the
# smallest piece of a tile that one can hand out. This is what each SM does, and when, at 4096 cubed:

# %%
config = STAGES["snake_order"].configs[0]
rows, cols, k_tiles = 4096 // config.BM, 4096 // config.BN, 4096 // config.BK
tiles = rows * cols
in_rounds = [(tile % SMS, tile, k_tiles, True) for tile in range(tiles)]
draw.schedule(in_rounds, SMS, f"snake_order, {tiles} tiles")

# %% [markdown]
# The white corner is the waste: SMs that have nothing left while others make a whole tile more. It is small here. How
# large it is depends on nothing but the number of tiles:

# %%
counts = np.arange(1, 6 * SMS)
figure = Figure(figsize=(7.2, 2.8), layout="constrained")
axes = figure.add_subplot()
axes.plot(counts, 100 * counts / (np.ceil(counts / SMS) * SMS), color=draw.COLOURS["c"])
for size in (1024, 2048, 3072, 4096):
    of_size = (size // config.BM) * (size // config.BN)
    used = 100 * of_size / (np.ceil(of_size / SMS) * SMS)
    axes.plot(of_size, used, "o", color="black")
    axes.annotate(f"{size}", (of_size, used), (4, -11), textcoords="offset points", fontsize=8)
axes.set_xlabel(f"tiles of C; the dots are M = N = {1024} to {4096} in tiles of {config.BM} x {config.BN}")
axes.set_ylabel("% of the time used")
axes.set_ylim(0, 104)
figure

# %% [markdown]
# With a little more than a full round, nearly half is lost; with fewer tiles than SMs, most of the GPU never starts.
# Smaller tiles make smaller steps, but they read more from memory for each multiply-add, and notebook 6 has just made
# them larger for that.
#
# ## Your turn
#
# What share of the time is used, from 0 to 1, when so many tiles come in rounds on so many multiprocessors? Replace
# `None`. The right answers come from the project's model, `models/prediction`, which predicts with it.


# %%
def used(tiles, multiprocessors):
    return None  # your answer


# %%
def by_the_model(tiles, multiprocessors):
    """Least time of so many tiles' multiply-adds, spread evenly, over that in whole blocks."""
    shape = (config.BM, tiles * config.BN, config.BK)
    even, dealt = (
        predict(STAGES["snake_order"], config, *shape, Ceilings(1, 1, 1, 1), sm_count=count)
        for count in (1, multiprocessors)
    )
    return even.fp32 / dealt.fp32


right = [((tiles, sms), by_the_model(tiles, sms)) for tiles, sms in ((512, 132), (132, 132), (133, 132), (8, 132))]
answered = notebook.check(used, *right)

# %% [markdown]
# A solution, if you want to see one:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def used(tiles, multiprocessors):
    rounds = -(-tiles // multiprocessors)  # rounded up
    return tiles / (rounds * multiprocessors)


assert notebook.check(used, *right)

# %% [markdown]
# ## The one idea: cut the line, not the tiles
#
# Put the k-tiles of all tiles in one line, one tile behind the other, and cut the line into as many equal pieces as
# there are blocks. That is Stream-K (Osama et al., 2023, [arXiv:2301.03598](https://arxiv.org/abs/2301.03598)). A
# piece may begin and end in the middle of a tile. Two functions of `device/partition.py` say who has what:

# %%
notebook.source("partition", function="piece")

# %%
notebook.source("partition", function="owner")

# %% [markdown]
# Small enough to look at: two tiles of four k-tiles, on three blocks.


# %%
def work_of(config, m, n, k, partition):
    """What the kernel is told of a product and how it is shared; without addresses."""
    return PartitionArguments(None, None, *partition_layout(config, m, n, k, ONE, partition).words)


def pieces_of(partition, blocks):
    """Pieces in the order in which the kernel makes them: first its part of the line, then whole tiles."""
    for block in range(blocks):
        at, end = int(piece(partition, block)), int(piece(partition, block + 1))
        while at < end:
            index = at // partition.k_tiles
            length = min(end, (index + 1) * partition.k_tiles) - at
            yield block, partition.whole + index, length, length == partition.k_tiles
            at += length
        for tile in range(block, partition.whole, blocks):
            yield block, tile, partition.k_tiles, True


tiny = STAGES["stream_k"].test_config  # tiles of 32 x 32, 8 k at a time
M, N, K = 2 * tiny.BM, tiny.BN, 4 * tiny.BK
three = Partition(blocks=3, whole=0)
list(pieces_of(work_of(tiny, M, N, K, three), three.blocks))

# %%
draw.schedule(pieces_of(work_of(tiny, M, N, K, three), three.blocks), three.blocks, "two tiles on three blocks")

# %% [markdown]
# In rounds the two tiles would take four k-tiles, and the third SM would have nothing to do. Now it takes three. At
# 4096 cubed there are many tiles, and sharing has a price, as we shall see. So only the tiles of the last two rounds
# are in the line, and all before belong to one block each:

# %%
big = STAGES["stream_k"].configs[0]
square = dense("N", 4096, 4096)
partition = default_partition(big, Product(square, square, square), SMS)
print(partition)
draw.schedule(pieces_of(work_of(big, 4096, 4096, 4096, partition), SMS), SMS, f"Stream-K, {tiles} tiles")

# %% [markdown]
# No corner is left. Each bar is a block's time: whole tiles are green, in two shades by turns, and parts of tiles pink
# or blue by turns. A block's piece of the line comes first, so that parts are there long before the end. (A piece is
# nearly two tiles long here, so most have a whole tile between two parts.)
#
# ## The kernel
#
# Its main loop is `accumulate`, of `async_copy`, in snake order. New are the loop around it, over pieces, and what
# follows a piece that is not a whole tile.

# %%
notebook.source("basic_stream_k")

# %% [markdown]
# ## Who reads what
#
# The real kernel, with the two tiles and three blocks from above. Block 1 has the end of tile 0 and the first half of
# tile 1: of A, the last 8 k of the first 32 rows, and the first 16 k of the next 32.


# %%
def matrix(array):
    return Matrix(array.ctypes.data, *array.shape, *array.strides, 0, array)


def launch_of(stage, a, b, c, partition):
    """A launch of a stage in its smallest configuration, shared as we say."""
    config = STAGES[stage].test_config
    return simulated(STAGES[stage], config, 1.0, matrix(a), matrix(b), 0.0, matrix(c), partition)


def traced(launch):
    """What `trace` records of a launch."""
    options = {"dynamic_shared": launch.dynamic_shared}
    return trace(launch.kernel, launch.grid, launch.block, *launch.arguments, **options)


rng = np.random.default_rng(0)
a, b = rng.standard_normal((M, K), np.float32), rng.standard_normal((K, N), np.float32)
c = np.zeros((M, N), np.float32)

shared = traced(launch_of("basic_stream_k", a, b, c, three))
print("largest error:", abs(c - a @ b).max(), " races:", shared.races)
draw.who_reads_what(shared, block=(1, 0, 0))

# %% [markdown]
# Of C it writes tile 0 and not tile 1, though it has a part of both. Why, comes next.
#
# ## How partial sums meet
#
# A block that has a part of a tile has a **partial sum** for each of its elements. It writes them to a workspace in
# global memory. Each block has room for two parts there, since its piece of the line has two ends. Who writes and who
# reads which part:

# %%
accesses = shared.accesses
partial = accesses[accesses["array"] == "partition.partials"]
part = (partial["element"].str[0] // (tiny.BM * tiny.BN)).rename("part")
partial.groupby([partial["block"].str[0].rename("block"), part])["op"].unique().str.join(", ").unstack(fill_value="")

# %% [markdown]
# Parts are added by the last block that arrives at a tile. How does it know that it is the last? Each shared tile has a
# **counter**. A block that has written its part adds 1 to it, and learns how many came before. That must be an
# **atomic** operation: reading, adding and writing in one, so that no two blocks can read the same number. (Blocks run
# one after the other in the simulator, so there it is a load and a store.) Here is the kernel's line for it, and all
# that happened to the counters, in order:

# %%
notebook.source("partition", function="arrive")

# %%
counters = accesses[accesses["array"] == "partition.counters"]
pd.DataFrame(
    {
        "block": counters["block"].str[0],
        "tile": counters["element"].str[0],
        "op": counters["op"],
        "by": counters["site"].str.extract(r"> (\w+):\d+$")[0],
    }
).groupby(["tile", "block", "by"], sort=False)["op"].agg(", then ".join).to_frame()

# %% [markdown]
# Each tile is counted twice, by its two blocks; the second sets the counter back to zero, so that the next product
# finds it so. Nobody ever waits for anybody. A block that is not last goes on with its next piece.
#
# Step through thread 0 of block 1, with blocks 0 and 2 already done, until it knows that it is the last at tile 0.
# Shown are the values by which it decides, and the lines that made them:

# %%
WATCHED = ("at", "index", "first", "last", "lead", "parts", "mine", "final", "complete")
c[:] = 0
made = launch_of("basic_stream_k", a, b, c, three)
made.run(blocks=[(0, 0, 0), (2, 0, 0)])

launch = (made.kernel, made.grid, made.block, *made.arguments)
with step(*launch, dynamic_shared=made.dynamic_shared, block_index=(1, 0, 0), thread=0) as steps:
    before = ""
    for s in (s for s in steps if s.function == "basic_stream_k"):
        changed = [f"{name} = {int(s.locals[name])}" for name in WATCHED if name in s.changed]
        if changed:
            print(f"{', '.join(changed):<13} by  {before.strip()[:90]}")
        if "final = 1" in changed:
            break
        before = s.source

# %% [markdown]
# ## The same bits every time
#
# It would be simpler if each block added its part to C by atomic additions, as it comes. The result would be right,
# too. But floating-point sums depend on the order, and who comes first is chance:

# %%
parts = [a[:, at : at + tiny.BK] @ b[at : at + tiny.BK] for at in range(0, K, tiny.BK)]
one, other = np.zeros((M, N), np.float32), np.zeros((M, N), np.float32)
for forward, backward in zip(parts, reversed(parts), strict=True):
    one += forward
    other += backward
print(f"{(one != other).sum()} of {one.size} sums differ in their last bits")

# %% [markdown]
# The last block reads all parts of the tile, its own too, and adds them in the order of k, whoever it is. So whatever
# the order in which blocks arrive, the bits are the same. With eight blocks, so that four share each tile:

# %%
found = []
for order in (range(8), range(7, -1, -1), (3, 6, 1, 4, 0, 7, 2, 5)):
    c = np.zeros((M, N), np.float32)
    launch_of("basic_stream_k", a, b, c, Partition(blocks=8, whole=0)).run(blocks=[(block, 0, 0) for block in order])
    found.append(c)
print([bool((c == found[0]).all()) for c in found])

# %% [markdown]
# ## Predict, then measure

# %%
results = notebook.measure("snake_order", "basic_stream_k", "stream_k")
notebook.compare(results)

# %%
draw.ladder_chart(results)

# %% [markdown]
# The model knows of rounds, and says that a few percent are to be had on an H200: the white corner. (Another GPU has
# another number of multiprocessors, and another corner.) For 4096 cubed there is no more to gain by sharing. What of
# other sizes? The rule from above predicts what equal shares should gain over rounds, and here is what they did gain
# in recorded runs, in the same tiles:

# %%
recorded = notebook.recorded("latest/results.csv")
print(recorded.attrs["source"])
times = recorded.pivot_table(index=["m", "n", "k"], columns="stage", values="median_us")
gains = pd.DataFrame({"tiles": [-(-m // config.BM) * -(-n // config.BN) for m, n, _ in times.index]}, times.index)
gains["rounds"] = (gains["tiles"] / SMS).round(2)
gains["predicted gain"] = [round(1 / used(count, SMS), 2) for count in gains["tiles"]]
gains["measured gain"] = (times["snake_order"] / times["basic_stream_k"]).round(2)
gains[gains.index.get_level_values("m") >= 512]

# %% [markdown]
# Where there are rounds, the prediction is good. Where a round is nearly full, as with 128 tiles on 132 SMs, there is
# little to gain, and sharing costs more than it saves: partial sums are written, and read, and have to meet. And with
# a handful of tiles the gain is large, but far from the prediction: when 132 blocks share eight tiles, each tile has
# some seventeen parts, which one block has to fetch and add. (That case, several blocks for each tile, is older than
# Stream-K, and is called **split-K**.)
#
# ## What `tiled_sgemm` takes, and why
#
# So sharing is a choice, and so are the tiles. `stage="auto"` makes them by a small model of the GPU: for each
# configuration and each way to share, how many clocks will it take? `explain` tells what it would do, without doing
# it:

# %%
x = np.empty((4096, 4096), np.float32)
print(explain(x, x))


# %%
def told(**operands):
    """A row of what `explain` says of each product."""
    rows = {name: explain(*pair) for name, pair in operands.items()}
    fields = ["stage", "config", "blocks", "whole_tiles", "split", "microseconds"]
    table = pd.DataFrame({name: [getattr(row, field) for field in fields] for name, row in rows.items()}, fields).T
    return table.assign(microseconds=table["microseconds"].astype(float).round(1))


def pair(m, n, k):
    return np.empty((m, k), np.float32), np.empty((k, n), np.float32)


shapes = [(4096, 4096, 4096), (3072, 3072, 3072), (2048, 2048, 1024), (512, 512, 1024), (256, 256, 65536)]
told(**{" x ".join(map(str, shape)): pair(*shape) for shape in shapes})

# %% [markdown]
# `split` is the most blocks that share a tile, and `whole_tiles` those that nobody shares. At 2048 x 2048 x 1024, where
# sharing lost, nothing is shared. Small products get smaller tiles, and long sums many blocks a tile.
#
# ## Operands that lie otherwise
#
# The stages so far read rows of A and rows of B, with vectors where these are contiguous. A transpose in NumPy moves
# nothing; it swaps strides, and then the *columns* are contiguous. By custom such products are named by two letters, N
# as it is and T transposed. `stream_k`, which `tiled_sgemm` uses, is `basic_stream_k` with a loader for each way in
# which an operand can lie, `along4` where k is contiguous and `across4` where rows or columns are, and for those that
# allow no vectors; the kernel is compiled for the pair at hand. It also takes batches and epilogues:

# %%
notebook.source("stream_k", function="stream_k")

# %%
named = {"NN": (x, x), "NT": (x, x.T), "TN": (x.T, x), "TT": (x.T, x.T), "NN, off by one": (x[:, 1:], x[1:, :])}
found = {name: explain(*operands) for name, operands in named.items()}
pd.DataFrame(
    {name: [row.a_access, row.b_access, row.microseconds] for name, row in found.items()}, ["A", "B", "expected us"]
).T

# %%
targets = notebook.recorded("latest/targets.csv")
print(targets.attrs["source"])
targets.loc[targets["group"] == "layouts", ["case", "us", "tflops", "baseline", "ratio"]]

# %% [markdown]
# The ratio is the baseline's time over ours: against our own NN, and against cuBLAS with the same layout. Transposed
# operands are hardly slower.
#
# ## Beside the climb: `thin`
#
# And a matrix times a vector? C then has one column, and of a tile of 128 x 256 all but a 256th lies outside. Each
# element of A is used once, so nothing can be reused: the product takes as long as it takes to read A. The stage
# `thin` is made for that. The lanes of a warp lie **along k**, as A's memory does, each adds up other terms of the same
# sums, and the sums meet at the end. Shared memory is a queue: three or four chunks of A are under way in it, by the
# asynchronous copies of notebook 7.

# %%
notebook.source("thin", function="fetch")

# %%
notebook.source("thin", function="multiply")

# %%
a, b = np.ones((16, 64), np.float32), np.ones((64, 4), np.float32)
c = np.zeros((16, 4), np.float32)
narrow = traced(launch_of("thin", a, b, c, Partition(blocks=1, whole=1)))
draw.who_reads_what(narrow, warp=0)

# %% [markdown]
# A warp reads all k of its rows, and no other warp does. Blocks share tiles here just as in `stream_k`, with the same
# line and the same counters:

# %%
told(**{f"16384 x {n} x 16384": pair(16384, n, 16384) for n in (1, 4, 16)})

# %%
targets.loc[targets["group"] == "vector", ["case", "us", "baseline", "ratio"]]

# %% [markdown]
# The measure is a copy's bandwidth here, in bytes read, and a product can beat it: a copy also has to write what it
# reads. A C of few rows is computed as its transpose. (cuBLAS is ahead in one of these six: a single row times a
# matrix.)
#
# ## The end of the climb
#
# All stages at 4096 cubed, from the recorded runs, and then all stages at all sizes:

# %%
draw.ladder_chart(recorded)


# %%
def climb(frame, title):
    """TFLOP/s of every stage against the size."""
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.add_subplot()
    names = [name for name in frame["stage"].unique() if name not in ("cpu", "thin")]
    looks = draw.stage_styles(names)
    for name in names:
        own = frame[frame["stage"] == name].sort_values("m")
        axes.plot(own["m"], own["gflops"] / 1000, label=name, markersize=4, linewidth=1.4, **looks[name])
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("M")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(title, fontsize=10)
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


climb(recorded[(recorded["m"] == recorded["k"]) & (recorded["m"] == recorded["n"])], "M = N = K")

# %%
climb(recorded[(recorded["k"] == 1024) & (recorded["m"] == recorded["n"])], "M = N, K = 1024")

# %% [markdown]
# The upper stages need size to unfold: large tiles are fast, but few. At 3072 those whose tiles come in few rounds
# fall into the saw-tooth from above (cuBLAS has a dent there, too), and equal shares fill it. What `tiled_sgemm`
# chooses ("auto") is the upper edge nearly everywhere. Where is cuBLAS ahead of it?

# %%
auto = recorded[recorded["stage"] == "auto"].set_index(["m", "n", "k"])["ratio_to_cublas"].round(3)
print(f"against cuBLAS: {auto.min()} at the least, {auto.max()} at the most, of {len(auto)} sizes")
auto[auto < 1].to_frame()

# %% [markdown]
# ## The question it leaves open
#
# Look back to what a profiler counted, in percent of the clocks in which the FMA pipe could have taken an instruction:

# %%
counted = notebook.recorded("latest/counters.csv").set_index("stage")
counted.loc[["naive", "shared_tile", "thread_tile_2d", "warp_tiled", "stream_k"], ["fma_pipe_percent"]].T

# %% [markdown]
# From one to more than eighty. What remains is a little arithmetic of addresses, reads of fragments, and starts and
# ends. Whatever one does, this pipe cannot be more than full. To go further, and by more than twice, takes another
# pipe. The same chip has units that multiply small matrices in one instruction, but of narrower numbers than float32.
# Can these make a product as exact as this one? That is [notebook 9](09_tensor_cores.ipynb).
