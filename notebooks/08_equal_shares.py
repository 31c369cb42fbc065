# %% [markdown]
# # 8. Stream-K, equal shares for all SMs: `basic_stream_k`, `stream_k`, and three kernels for other shapes
#
# *Before this: [notebook 7](07_async_copies_and_addresses.ipynb). Time: about 90 minutes.*
#
# **The question.** `snake_order` has little in its loop but multiply-adds. Yet a product of 4096 x 4096 x 4096 has 512
# tiles, an H200 has 132 multiprocessors, and 512 / 132 is 3.88. What do the others do while some compute the last
# tiles? And what if there are only eight tiles?
#
# This notebook is about the distribution of the work: which block computes which part of it, and when. At its end is
# the whole ladder.
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

from numba_gemm import explain
from numba_gemm.device.partition import PartitionArguments, piece
from numba_gemm.inspect import draw, step, trace
from numba_gemm.kernels.ladder import ASIDE, STAGES
from numba_gemm.kernels.ladder.partitions import default_partition, partition_layout
from numba_gemm.kernels.product import ONE, Product, dense
from numba_gemm.kernels.stage import Partition
from numba_gemm.models.prediction import Ceilings, predict
from numba_gemm.runtime.launch import simulated
from numba_gemm.runtime.matrix import Matrix

SMS = 132  # multiprocessors of an H200

# %% [markdown]
# ## Rounds of blocks
#
# A multiprocessor (SM) runs one block of `snake_order` at a time, because a block needs more than half of its
# registers. So the first 132 blocks start together and end together, since all take equally long. Then the next 132
# start. Such a round is called a **wave** of blocks. This notebook counts work in **k-tiles**: one iteration of the
# main loop, the smallest part of a tile that can be given away. The next picture shows the work of each SM over time,
# at 4096 x 4096 x 4096. Which percentage of the SMs' time is used?

# %%
busy = notebook.predict("time used by 512 tiles on 132 SMs", ..., unit="%")

# %%
config = STAGES["snake_order"].configs[0]
rows, cols, k_tiles = 4096 // config.BM, 4096 // config.BN, 4096 // config.BK
tiles = rows * cols
in_rounds = [(tile % SMS, tile, k_tiles, True) for tile in range(tiles)]
draw.schedule(in_rounds, SMS, f"snake_order, {tiles} tiles")

# %%
busy.reveal(100 * tiles / (4 * SMS), because=f"{tiles} tiles in four rounds of {SMS}.")

# %% [markdown]
# The white corner is the loss: SMs that have nothing left to do while others compute one more tile. It is small here.
# Its size depends only on the number of tiles:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
counts = np.arange(1, 6 * SMS)
figure = Figure(figsize=(7.2, 2.8), layout="constrained")
axes = figure.add_subplot()
axes.plot(counts, 100 * counts / (np.ceil(counts / SMS) * SMS), color=draw.COLOURS["c"])
for size in (1024, 2048, 3072, 4096):
    of_size = (size // config.BM) * (size // config.BN)
    used = 100 * of_size / (np.ceil(of_size / SMS) * SMS)
    axes.plot(of_size, used, "o", color="black")
    axes.annotate(
        f"{size}", (of_size, used), (4, -11), textcoords="offset points", fontsize=8
    )
axes.set_xlabel(f"tiles of C; dots: M = N, in tiles of {config.BM} x {config.BN}")
axes.set_ylabel("% of the time used")
axes.set_ylim(0, 104)
figure

# %% [markdown]
# With a little more than a full round, nearly half of the time is lost. With fewer tiles than SMs, some SMs get none.
# Smaller tiles would lose less, but they read more from memory per multiply-add; notebook 6 made them larger.
#
# ## Your turn
#
# Which fraction of the time is used, from 0 to 1, when this number of tiles is computed in rounds on this number of
# multiprocessors? Replace `None`. The correct answers come from the project's model, `models/prediction`.


# %%
def used(tiles, multiprocessors):
    return None  # your answer


# %%
def by_the_model(tiles, multiprocessors):
    """Time of the multiply-adds spread evenly, over the time in whole blocks."""
    shape = (config.BM, tiles * config.BN, config.BK)
    even, dealt = (
        predict(
            STAGES["snake_order"], config, *shape, Ceilings(1, 1, 1, 1), sm_count=count
        )
        for count in (1, multiprocessors)
    )
    return even.fp32 / dealt.fp32


right = [
    ((tiles, sms), by_the_model(tiles, sms))
    for tiles, sms in ((512, 132), (132, 132), (133, 132), (8, 132))
]
answered = notebook.check(used, *right)

# %% [markdown]
# A solution, if you want to see one:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def used(tiles, multiprocessors):
    rounds = -(-tiles // multiprocessors)  # rounded up
    return tiles / (rounds * multiprocessors)


assert notebook.check(used, *right)

# %% [markdown]
# ## The idea: equal pieces of one line
#
# Put the k-tiles of all tiles in one line, one tile after the other, and cut the line into as many equal pieces as
# there are blocks. This is Stream-K (Osama et al., 2023, [arXiv:2301.03598](https://arxiv.org/abs/2301.03598)). A
# piece may begin and end in the middle of a tile.
#
# ### The same in NumPy
#
# C as a column of tiles of BM rows, on `blocks` blocks. A block that has only a part of a tile keeps a partial sum;
# when all have finished, the parts of each tile are added, in the order of k:


# %%
def stream_k_product(a, b, blocks, BM=32, BK=8):
    k_tiles = a.shape[1] // BK  # per tile of C
    line = [(tile, k) for tile in range(len(a) // BM) for k in range(k_tiles)]
    ends = [len(line) * block // blocks for block in range(blocks + 1)]
    parts = {}  # of each tile, by block
    for block in range(blocks):
        for tile, k in line[ends[block] : ends[block + 1]]:
            rows, ks = slice(BM * tile, BM * tile + BM), slice(BK * k, BK * k + BK)
            part = parts.setdefault(tile, {}).setdefault(block, 0)
            parts[tile][block] = part + a[rows, ks] @ b[ks]
    return np.vstack([sum(parts[tile].values()) for tile in sorted(parts)])


u, v = np.random.default_rng(8).standard_normal((2, 64, 64), np.float32)
assert np.allclose(stream_k_product(u, v[:, :32], blocks=3), u @ v[:, :32], atol=1e-4)

# %% [markdown]
# In the kernel, two functions of `device/partition.py` compute the pieces: where a block's piece begins, and which
# block owns a k-tile.

# %%
notebook.source("partition", function="piece")

# %%
notebook.source("partition", function="owner")

# %% [markdown]
# A small example: two tiles of four k-tiles, on three blocks. In rounds the two tiles take as long as four k-tiles, and
# the third block has nothing to do. How long do they take now?

# %%
longest = notebook.predict("time of two tiles on three blocks", ..., unit="k-tiles")


# %%
def work_of(config, m, n, k, partition):
    """The kernel's description of a product and its partition, without addresses."""
    return PartitionArguments(
        None, None, *partition_layout(config, m, n, k, ONE, partition).words
    )


def pieces_of(partition, blocks):
    """Pieces in the order of the kernel: a block's part of the line, then its tiles."""
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
pieces = list(pieces_of(work_of(tiny, M, N, K, three), three.blocks))
times = [sum(piece[2] for piece in pieces if piece[0] == block) for block in range(3)]
longest.reveal(max(times), because=f"Eight k-tiles: the blocks have {times}.")
pd.DataFrame(pieces, columns=["block", "tile", "k-tiles", "whole"])

# %%
draw.schedule(
    pieces_of(work_of(tiny, M, N, K, three), three.blocks),
    three.blocks,
    "two tiles on three blocks",
)

# %% [markdown]
# At 4096 x 4096 x 4096 there are many tiles, and sharing has a cost, as we will see. So only the tiles of the last two
# rounds are in the line. Each of the others is computed by one block:

# %%
big = STAGES["stream_k"].configs[0]
square = dense("N", 4096, 4096)
partition = default_partition(big, Product(square, square, square), SMS)
print(partition)
draw.schedule(
    pieces_of(work_of(big, 4096, 4096, 4096, partition), SMS),
    SMS,
    f"Stream-K, {tiles} tiles",
)

# %% [markdown]
# No corner remains. Each bar is the time of a block: whole tiles are green, in two alternating shades, and parts of
# tiles pink or blue. A block begins with its piece of the line, so that the parts are ready long before the end. (A
# piece is nearly two tiles long here, so most have a whole tile between two parts.)
#
# ### The kernel
#
# The whole kernel, from the file that runs. Its main loop is `accumulate` of `async_copy`, in snake order. The loop
# around it, over pieces, is new, and so are the lines for a piece that is not a whole tile.

# %%
notebook.source("basic_stream_k", function="basic_stream_k")

# %% [markdown]
# ## Who reads what
#
# The real kernel, with the two tiles and three blocks from above. Block 1 has the end of tile 0 and the first half of
# tile 1: of A, the last 8 k of the first 32 rows, and the first 16 k of the next 32.


# %%
def matrix(array):
    return Matrix(array.ctypes.data, *array.shape, *array.strides, 0, array)


def launch_of(stage, a, b, c, partition):
    """A launch of a stage in its smallest configuration, with a partition."""
    config = STAGES[stage].test_config
    return simulated(
        STAGES[stage], config, 1.0, matrix(a), matrix(b), 0.0, matrix(c), partition
    )


def traced(launch):
    """Trace a launch."""
    options = {"dynamic_shared": launch.dynamic_shared}
    return trace(launch.kernel, launch.grid, launch.block, *launch.arguments, **options)


rng = np.random.default_rng(0)
a, b = rng.standard_normal((M, K), np.float32), rng.standard_normal((K, N), np.float32)
c = np.zeros((M, N), np.float32)

shared = traced(launch_of("basic_stream_k", a, b, c, three))
print("largest error:", abs(c - a @ b).max(), " races:", shared.races)
draw.who_reads_what(shared, block=(1, 0, 0))

# %% [markdown]
# Of C it writes tile 0 and not tile 1, though it has a part of both. The next section tells why.
#
# ## How partial sums are added
#
# A block that has a part of a tile has a **partial sum** for each of its elements. It writes them to a workspace in
# global memory. Each block has room for two parts there, since its piece of the line has two ends. These blocks write
# and read each part:

# %%
accesses = shared.accesses
partial = accesses[accesses["array"] == "partition.partials"]
part = (partial["element"].str[0] // (tiny.BM * tiny.BN)).rename("part")
partial.groupby([partial["block"].str[0].rename("block"), part])[
    "op"
].unique().str.join(", ").unstack(fill_value="")

# %% [markdown]
# The last block that arrives at a tile adds the parts. How does it know that it is the last? Each shared tile has a
# **counter**. A block that has written its part adds 1 to it, and gets the number of blocks that came before. That must
# be an **atomic** operation: reading, adding and writing in one, so that no two blocks can read the same number.
# (Blocks run one after the other in the simulator, so it is a load and a store there.) Here is the device function, and
# all accesses to the counters, in order:

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
# Each tile is counted twice, by its two blocks. The second block resets the counter to zero for the next product. No
# block waits for another: a block that is not the last goes on with its next piece.
#
# Step through thread 0 of block 1, with blocks 0 and 2 already done, until it knows that it is the last at tile 0.
# The cell prints the values on which it decides, and the lines that computed them:

# %%
WATCHED = ("at", "index", "first", "last", "lead", "parts", "mine", "final", "complete")
c[:] = 0
made = launch_of("basic_stream_k", a, b, c, three)
made.run(blocks=[(0, 0, 0), (2, 0, 0)])

launch = (made.kernel, made.grid, made.block, *made.arguments)
with step(
    *launch, dynamic_shared=made.dynamic_shared, block_index=(1, 0, 0), thread=0
) as steps:
    before = ""
    for s in (s for s in steps if s.function == "basic_stream_k"):
        changed = [
            f"{name} = {int(s.locals[name])}" for name in WATCHED if name in s.changed
        ]
        if changed:
            print(f"{', '.join(changed):<13} by  {before.strip()[:90]}")
        if "final = 1" in changed:
            break
        before = s.source

# %% [markdown]
# ## The same bits every time
#
# It would be simpler if each block added its part to C by atomic additions when it is ready. The result would be
# correct, too. But floating-point sums depend on the order, and which block comes first is chance. Of the 2048 elements
# of C, how many differ in their last bits if the four k-tiles are added in the opposite order?

# %%
differ = notebook.predict("sums that differ", ..., unit="of 2048")

# %%
parts = [a[:, at : at + tiny.BK] @ b[at : at + tiny.BK] for at in range(0, K, tiny.BK)]
one, other = np.zeros((M, N), np.float32), np.zeros((M, N), np.float32)
for forward, backward in zip(parts, reversed(parts), strict=True):
    one += forward
    other += backward
differ.reveal((one != other).sum(), tolerance=0.2)

# %% [markdown]
# The last block reads all parts of the tile, its own included, and adds them in the order of k. So the bits are the
# same for every order in which the blocks arrive. With eight blocks, so that four share each tile:

# %%
found = []
for order in (range(8), range(7, -1, -1), (3, 6, 1, 4, 0, 7, 2, 5)):
    c = np.zeros((M, N), np.float32)
    launch_of("basic_stream_k", a, b, c, Partition(blocks=8, whole=0)).run(
        blocks=[(block, 0, 0) for block in order]
    )
    found.append(c)
print([bool((c == found[0]).all()) for c in found])

# %% [markdown]
# ## Prediction, model and measurement
#
# How many times as fast as `snake_order` is `basic_stream_k` at 4096 x 4096 x 4096? And at 1024 x 1024 x 1024, with 32
# tiles on 132 SMs? (The work could be spread perfectly; the parts have to be written, read and added.)

# %%
gain = notebook.predict("times as fast as snake_order, 4096 cubed", ...)
gain_of_small = notebook.predict("times as fast as snake_order, 1024 cubed", ...)

# %%
results = notebook.measure("snake_order", "basic_stream_k", "stream_k")
notebook.compare(results)

# %%
table = notebook.compare(results)
took, bound = table["measured ms"], table["predicted ms"]
gain.reveal(
    took["snake_order"] / took["basic_stream_k"],
    model=bound["snake_order"] / bound["basic_stream_k"],
    because="The white corner of the first picture. (Another GPU has another number\n"
    "of multiprocessors, and another corner.)",
)

# %%
draw.ladder_chart(results)

# %% [markdown]
# The rule from above predicts the gain of equal shares over rounds for other sizes, too. The table compares it with the
# gain in recorded runs, in the same tiles:

# %%
recorded = notebook.recorded("latest/results.csv")
print(recorded.attrs["source"])
times = recorded.pivot_table(index=["m", "n", "k"], columns="stage", values="median_us")
gains = pd.DataFrame(
    {"tiles": [-(-m // config.BM) * -(-n // config.BN) for m, n, _ in times.index]},
    times.index,
)
gains["rounds"] = (gains["tiles"] / SMS).round(2)
gains["predicted gain"] = [round(1 / used(count, SMS), 2) for count in gains["tiles"]]
gains["measured gain"] = (times["snake_order"] / times["basic_stream_k"]).round(2)
small = gains.loc[1024, 1024, 1024]
gain_of_small.reveal(small["measured gain"], model=small["predicted gain"])
gains[gains.index.get_level_values("m") >= 512]

# %% [markdown]
# With several rounds the prediction is good. When a round is nearly full, as with 128 tiles on 132 SMs, there is little
# to gain, and sharing costs more than it saves: partial sums are written, read and added. With only a few tiles the
# gain is large, but far from the prediction: when 132 blocks share eight tiles, each tile has some seventeen parts,
# which one block has to read and add. (That case, several blocks per tile, is older than Stream-K, and is called
# **split-K**.)
#
# ## The choice of `tiled_sgemm`
#
# So sharing is a choice, and so are the tiles. `stage="auto"` makes it with a small model of the GPU, which predicts
# the clocks of each configuration and each partition. `explain` returns the choice without running it. The name of a
# configuration lists the extents of its tiles: `128x256x16` is BM x BN x BK, `8x16` the thread tile TM x TN, `w64x64`
# the warp tile WM x WN, `s2` two buffers, and `snake` the order of the products.

# %%
x = np.empty((4096, 4096), np.float32)
print(explain(x, x))


# %%
def told(**operands):
    """A row of `explain`'s answer per product."""
    rows = {name: explain(*pair) for name, pair in operands.items()}
    fields = ["stage", "config", "blocks", "whole_tiles", "split", "microseconds"]
    table = pd.DataFrame(
        {name: [getattr(row, field) for field in fields] for name, row in rows.items()},
        fields,
    ).T
    return table.assign(microseconds=table["microseconds"].astype(float).round(1))


def pair(m, n, k):
    return np.empty((m, k), np.float32), np.empty((k, n), np.float32)


shapes = [
    (4096, 4096, 4096),
    (3072, 3072, 3072),
    (2048, 2048, 1024),
    (512, 512, 1024),
    (256, 256, 65536),
]
told(**{" x ".join(map(str, shape)): pair(*shape) for shape in shapes})

# %% [markdown]
# `split` is the largest number of blocks that share a tile, and `whole_tiles` the number of tiles that are not shared.
# At 2048 x 2048 x 1024, where sharing lost, nothing is shared. Small products get smaller tiles, and long sums many
# blocks per tile.
#
# ## Transposed operands
#
# The stages so far read rows of A and rows of B, with vectors if the rows are contiguous. A transpose in NumPy moves no
# data; it swaps strides, and then the *columns* are contiguous. Such products are named by two letters, N for an
# operand as it is and T for a transposed one. `stream_k`, which `tiled_sgemm` uses, is `basic_stream_k` with a loader
# for each layout of an operand: `along4` if k is contiguous, `across4` if rows or columns are, and others for operands
# that allow no vectors. The kernel is compiled for the pair of loaders. It also takes batches and epilogues, and in
# small tiles, several groups of warps (`SLICES`) may multiply different k-steps, so it is longer; compare its main loop
# with that of `basic_stream_k`:

# %%
notebook.source("stream_k", function="stream_k")

# %%
named = {
    "NN": (x, x),
    "NT": (x, x.T),
    "TN": (x.T, x),
    "TT": (x.T, x.T),
    "NN, off by one": (x[:, 1:], x[1:, :]),
}
found = {name: explain(*operands) for name, operands in named.items()}
pd.DataFrame(
    {
        name: [row.a_access, row.b_access, row.microseconds]
        for name, row in found.items()
    },
    ["A", "B", "expected us"],
).T

# %%
targets = notebook.recorded("latest/targets.csv")
print(targets.attrs["source"])
targets.loc[
    targets["group"] == "layouts", ["case", "us", "tflops", "baseline", "ratio"]
]

# %% [markdown]
# The ratio is the baseline's time over ours: against our own NN, and against cuBLAS with the same layout. Transposed
# operands are hardly slower.
#
# ## Beside the ladder: `thin`
#
# And a matrix times a vector? Then C has one column, and only a 256th of a tile of 128 x 256 is inside C. Each element
# of A is used once, so nothing can be reused: the product takes as long as reading A. The stage `thin` is made for
# that. The lanes of a warp are **along k**. Each lane adds up other terms of the same sums, and the lanes' sums are
# added at the end. In NumPy, for one row of A and 32 lanes:

# %%
row, column = u[0], v[:, 0]
lanes = np.zeros(32, np.float32)
for k0 in range(0, len(row), 32):
    lanes += row[k0 : k0 + 32] * column[k0 : k0 + 32]  # one term per lane
assert np.allclose(lanes.sum(), row @ column, atol=1e-4)

# %% [markdown]
# Shared memory is a queue in this kernel: several chunks of A and B are in flight, by the asynchronous copies of
# notebook 7. A chunk keeps the order of memory, so that any layout is copied in vectors.

# %%
notebook.source("chunk_loader", function="fetch")

# %%
notebook.source("thin", function="multiply")

# %%
a, b = np.ones((16, 64), np.float32), np.ones((64, 4), np.float32)
c = np.zeros((16, 4), np.float32)
narrow = traced(launch_of("thin", a, b, c, Partition(blocks=1, whole=1)))
draw.who_reads_what(narrow, warp=0)

# %% [markdown]
# Blocks share tiles here as in `stream_k`, with the same line. But these products take a few microseconds, and a
# counter alone costs one or two microseconds: the parts are written, the counter is increased, its value comes back,
# and then the parts are read. So `thin` has no counters. Memory for parts is zero before the launch, and the block with
# a tile's last part reads it until all others are there. A part that is +0 is written as -0:

# %%
notebook.source("thin", function="add_published")

# %% [markdown]
# If many blocks share a tile, the last block of each group of 16 adds the group's parts, and then the last block of all
# adds the groups' sums. Blocks wait only for blocks of lower indices, which a GPU has started before them.

# %%
told(**{f"16384 x {n} x 16384": pair(16384, n, 16384) for n in (1, 4, 16)})

# %%
targets.loc[targets["group"] == "vector", ["case", "us", "baseline", "ratio"]]

# %% [markdown]
# The baseline of the first rows is the bandwidth of a copy, in bytes read. A product can exceed it, since a copy also
# has to write what it reads. A C with few rows is computed as its transpose.
#
# ## Beside the ladder: `short_sums`
#
# And if there are only a few terms per sum? With K = 3, `stream_k` multiplies up to 16 terms, of which all but three
# are zeros, and all that it prepares for the next k-tile is in vain. Most of the work is to write C. The stage
# `short_sums` loads its tiles at once, waits, multiplies the terms that there are, and stores. Its warps have 32
# neighbouring columns, one per lane, so each row is written in whole sectors, wherever in memory it begins.

# %%
notebook.source("short_sums", function="store")

# %%
random = notebook.recorded("latest/random_products.csv")
print(random.attrs["source"])
short = random[(random["k"] <= 32) & (random["m"] * random["n"] > 1_000_000)]
columns = ["m", "n", "k", "layout", "cublas_us", "ieee_us"]
short[columns].sort_values("k").head(12)

# %% [markdown]
# ## Many small matrices: `small_matrices`
#
# A batch of 65,536 products of 4x4 matrices has as many tiles, if no two matrices share one, and a multiprocessor
# starts a block every 270 ns. The matrices are 12.6 MB in all, which memory delivers in 3 us. In `small_matrices`, each
# thread computes a tile of 2x4, 4x1 or 1x1 elements of one matrix, and a block has 256 of them, of as many matrices as
# that takes. (Of sums with many terms, 8 or 32 lanes share a tile, and add their sums at the end.) How long do the
# blocks take to start, if each has one matrix, and how long if they have 256 tiles of 2x4? (There are 132
# multiprocessors.)

# %%
starting = notebook.predict("us, one block per matrix", ...)
sharing = notebook.predict("us, 256 tiles of 2x4 per block", ...)

# %%
starting.reveal(65536 / 132 * 0.27)
sharing.reveal(65536 * 2 / 256 / 132 * 0.27)

# %%
notebook.source("small_matrices")

# %%
batches = notebook.recorded("latest/batches.csv")
print(batches.attrs["source"])
batches.loc[
    ~batches["drawn"], ["matrices", "m", "n", "k", "stage", "cublas_us", "ieee_us"]
]

# %% [markdown]
# ## The whole ladder
#
# All stages at 4096 x 4096 x 4096, from the recorded runs, and then at all sizes. The first bar is the kernel that you
# wrote in notebook 0. How many times as fast as `naive` is `auto`, which is what `tiled_sgemm` chooses?

# %%
whole_gain = notebook.predict("auto, times as fast as naive", ...)

# %%
cube = times.loc[4096, 4096, 4096]
whole_gain.reveal(cube["naive"] / cube["auto"], measured=True, tolerance=0.1)

# %%
draw.ladder_chart(recorded)


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def climb(frame, title):
    """TFLOP/s of every stage against the size."""
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.add_subplot()
    names = [name for name in frame["stage"].unique() if name not in ("cpu", *ASIDE)]
    looks = draw.stage_styles(names)
    for name in names:
        own = frame[frame["stage"] == name].sort_values("m")
        axes.plot(
            own["m"],
            own["gflops"] / 1000,
            label=name,
            markersize=4,
            linewidth=1.4,
            **looks[name],
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("M")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(title, fontsize=10)
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


climb(
    recorded[(recorded["m"] == recorded["k"]) & (recorded["m"] == recorded["n"])],
    "M = N = K",
)

# %%
climb(
    recorded[(recorded["k"] == 1024) & (recorded["m"] == recorded["n"])],
    "M = N, K = 1024",
)

# %% [markdown]
# The later stages need large products: large tiles are fast, but few. At 3072 the stages whose tiles come in few rounds
# fall into the saw-tooth from above (cuBLAS has a dent there, too), and equal shares avoid it. The choice of
# `tiled_sgemm` ("auto") is the upper edge nearly everywhere. Where is cuBLAS faster?

# %%
auto = (
    recorded[recorded["stage"] == "auto"]
    .set_index(["m", "n", "k"])["ratio_to_cublas"]
    .round(3)
)
print(f"speed over cuBLAS's: {auto.min()} to {auto.max()}, at {len(auto)} sizes")
auto[auto < 1].to_frame()

# %% [markdown]
# ## The open question
#
# A profiler counted, in percent of all clocks, how often the FMA pipe took an instruction:

# %%
counted = notebook.recorded("latest/counters.csv").set_index("stage")
counted.loc[
    ["naive", "shared_tile", "thread_tile_2d", "warp_tiled", "stream_k"],
    ["fma_pipe_percent"],
].T

# %% [markdown]
# From one to more than eighty. The rest is a little arithmetic of addresses, reads of fragments, and starts and ends of
# blocks. This pipe cannot be more than full. A gain of more than twice needs another pipe. The same chip has units that
# multiply small matrices in one instruction, but of numbers that are narrower than float32. Can these give a product as
# exact as this one? That is [notebook 9](09_tensor_cores.ipynb).
