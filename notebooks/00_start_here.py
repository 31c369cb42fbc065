# %% [markdown]
# # 0. Start here: what a GPU is, if you know NumPy
#
# **The question.** `c = a @ b` is one line of NumPy. Who computes which element, and from where does the data come?
# On a GPU you decide both, and what you decide can make the same product a hundred times as fast. This series begins
# with a kernel that you write in this notebook, and ends with one that is faster than NVIDIA's own library.
#
# You need no GPU. Kernels run on Numba's simulator, which executes them as Python, one line at a time if you like.
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
from functools import partial

import numpy as np
from numba import cuda, float32

from numba_gemm import launchable
from numba_gemm.inspect import draw, step, trace
from numba_gemm.kernels.ladder import STAGES
from numba_gemm.lab.memory.carve_out import SPLITS
from numba_gemm.models import accuracy
from numba_gemm.models.occupancy import REGISTERS

# %% [markdown]
# ## Why matrix multiplication
#
# General matrix multiplication, **GEMM**, computes `C = alpha * A @ B + beta * C` for an M x K matrix A, a K x N matrix
# B and an M x N matrix C. Solvers of linear systems and simulations are built on it, and so are neural networks: fully
# connected layers, convolutions and attention all consist of matrix products and a little elementwise work. The next
# three cells compute a small layer of each kind from its definition and as a product, and compare the results.
#
# **A fully connected layer.** Each output is a weighted sum of all inputs. Samples are the rows of A, weights the
# columns of B, and the bias is the C that is added:


# %%
generator = np.random.default_rng(0)


def integers(*shape):
    return generator.integers(-4, 5, shape).astype(np.float32)  # sums of integers are exact


samples, weights, bias = integers(8, 5), integers(3, 5), integers(3)
layer = np.zeros((8, 3), np.float32)
for sample in range(8):
    for unit in range(3):
        layer[sample, unit] = sum(samples[sample] * weights[unit]) + bias[unit]

assert np.array_equal(samples @ weights.T + bias, layer)
print("M, N, K =", (8, 3, 5))

# %% [markdown]
# **A convolution.** Each output pixel is the sum of a patch of the image times a filter. Write every patch as a row of
# A and every filter as a column of B; this rearrangement is called **im2col**. It repeats pixels: here A has four times
# as many elements as the images. Libraries therefore often build the patches while they load a tile, and never store A.

# %%
images, filters = integers(2, 3, 6, 6), integers(4, 3, 3, 3)  # 2 images and 4 filters of 3 channels
convolved = np.zeros((2, 4, 4, 4), np.float32)
for row in range(4):
    for col in range(4):
        patch = images[:, :, row : row + 3, col : col + 3]
        for number in range(4):
            convolved[:, number, row, col] = (patch * filters[number]).sum(axis=(1, 2, 3))

patches = np.lib.stride_tricks.sliding_window_view(images, (3, 3), axis=(2, 3))
columns = patches.transpose(0, 2, 3, 1, 4, 5).reshape(2 * 4 * 4, 3 * 3 * 3)  # im2col: one row per output pixel
found = columns @ filters.reshape(4, 27).T

assert np.array_equal(found.reshape(2, 4, 4, 4).transpose(0, 3, 1, 2), convolved)
print("M, N, K =", (32, 4, 27), "- elements of A per pixel:", columns.size / images.size)

# %% [markdown]
# **Attention.** Each query is compared with each key, and the values are averaged with weights that depend on the
# results. These are two products, with a softmax of the rows between them:


# %%
def softmax(scores):
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


queries, keys, values = integers(6, 4), integers(7, 4), integers(7, 5)
attention = np.zeros((6, 5), np.float32)
for number, query in enumerate(queries):
    shares = softmax(np.array([sum(query * key) for key in keys]) / 2)  # 2 is the square root of a key's length
    attention[number] = sum(share * value for share, value in zip(shares, values, strict=True))

np.testing.assert_allclose(softmax(queries @ keys.T / 2) @ values, attention, rtol=1e-5, atol=1e-6)
print("M, N, K =", (6, 7, 4), "and", (6, 5, 7))

# %% [markdown]
# Real layers have thousands of rows and columns. Almost all of their arithmetic is in these products, so the speed of
# this one operation decides the speed of many programs.
#
# ## One picture first
#
# `naive` is the simplest kernel here. A **thread** of it computes one element of C. This is one of its threads, as it
# ran in the simulator just now: what it reads of A and B, and what it writes.

# %%
a, b = np.ones((16, 12), np.float32), np.ones((12, 16), np.float32)
c = np.zeros((16, 16), np.float32)

naive = trace("naive", None, None, 1, a, b, 0, c, config="test", blocks=[(0, 1, 0)])
draw.who_reads_what(naive, thread=19)

# %% [markdown]
# A row of A, a column of B, one element of C: the definition of a matrix product. All other threads do the same in
# other places. The pictures of this series are all made like this one, from accesses that were recorded, so you can
# change a kernel and draw it again.
#
# ## From a loop to threads
#
# In NumPy you write `out = x + y`, and a loop over `i` is hidden in it. On a GPU you write the body of that loop, as a
# function, and a thread runs it for each `i`. Such a function is a **kernel**. It returns nothing; it writes into an
# array. Each thread finds out by itself which `i` is its own.


# %%
@cuda.jit
def add(x, y, out):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < out.size:
        out[i] = x[i] + y[i]


# %%
x, y = np.arange(100, dtype=np.float32), np.ones(100, np.float32)
out = np.zeros(100, np.float32)

add[4, 32](x, y, out)  # 4 blocks of 32 threads
print(np.array_equal(out, x + y), out[-3:])

# %% [markdown]
# The brackets are the **launch**: how many threads, and in what groups.
#
# - A **block** is up to 1024 threads that run on the same multiprocessor at the same time. They can share memory and
#   wait for one another. `threadIdx` is a thread's place in its block, and `blockDim` the block's extent.
# - The **grid** is all blocks of a launch. `blockIdx` is a block's place in it. Blocks run in any order, some at once
#   and some later, and know nothing of each other.
# - A **multiprocessor** (SM) is what a GPU has many of, as a CPU has cores. An H200 has 132.
#
# 4 blocks of 32 are 128 threads, for 100 elements. The last 28 find that their `i` is too large, and do nothing: that
# is what the `if` is for.
#
# ## The simulator
#
# No GPU was needed for that. Numba's **simulator** ran `add` as Python, all 128 threads of it, and so it runs every
# kernel of the ladder as it stands. Two functions use that to look inside. `trace` records each access to memory: the
# picture above was made of that. `step` follows one thread, line by line, while the others run as ever.
#
# Here are two threads of the last block of `add`. A step shows what has changed, and then the line that comes next (in
# a notebook, a cell's file is named by a number):

# %%
for t in (2, 5):
    for s in step(add, 4, 32, x, y, out, block_index=3, thread=t):
        print(s)

# %% [markdown]
# ## Warps
#
# The hardware does not run threads one by one. It takes 32 neighbours of a block, a **warp**, and runs each
# instruction for all 32 at once. A thread's number in its warp is its **lane**. You never write "warp" in a kernel
# like this one, but nearly all that makes kernels fast or slow is about what the 32 lanes do together.
#
# Here `add` runs as one block of 128 threads. 16 elements make a row of the picture, so that two rows are a warp:

# %%
draw.thread_map(trace(add, 1, 128, x, y, out), "out", "store", width=16)

# %% [markdown]
# In the last warp only four lanes have something to do. The other 28 wait for them.
#
# ### Your turn
#
# How many blocks of 128 threads does a launch need for `n` elements? Replace `None`; the next cell compares your
# answer with the grids that the project's own launcher makes.


# %%
def blocks_for(n):
    return None  # your answer


# %%
coalesced = STAGES["coalesced"]  # its blocks are 128 columns wide
right = [((n,), coalesced.grid(coalesced.configs[0], 1, n)[0]) for n in (1, 127, 128, 129, 1000, 4096)]
answered = notebook.check(blocks_for, *right)

# %% [markdown]
# A solution, if you want to see one:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def blocks_for(n):
    return (n + 127) // 128  # rounded up; -(-n // 128) is the same


assert notebook.check(blocks_for, *right)

# %% [markdown]
# ## The memories
#
# NumPy has one memory. A GPU has several, and a kernel says which it means:
#
# | memory | who sees it | in Numba |
# |:--|:--|:--|
# | **registers** | one thread | local variables |
# | **shared memory** | the threads of a block | `cuda.shared.array` |
# | **global memory** | all threads of all blocks, and the host | the arrays that a kernel is given |
#
# Global memory is large and far away: chips beside the GPU (device memory). Two caches lie between, which a kernel
# does not mention: **L1**, in each multiprocessor, and **L2**, one for all. How long a thread waits for one value, and
# how much all threads together can read in a second, was measured:

# %%
spaces = notebook.recorded("memory_lab/memory_spaces.csv")
shown = spaces[spaces["space"].isin(["register", "shared", "global"])]
print("recorded on an NVIDIA H200")
shown[["space", "level", "latency_cycles", "tb_s"]].round(1).set_index(["space", "level"])

# %% [markdown]
# As a diagram, with the capacities. Each multiprocessor has its own registers and its own storage for shared memory and
# L1; a bandwidth is that of all multiprocessors together. Bandwidths and latencies were recorded, that of the host for
# copies from page-locked memory. Registers and L1 have the sizes of compute capability 9.0 in the CUDA C++ Programming
# Guide, the size of L2 was reported by the driver, and that of the device memory is from NVIDIA's data sheet.

# %% mystnb={"image": {"alt": "Diagram of five memories, registers to host: each level is farther and slower"}}
gpu, at = spaces.attrs["environment"]["gpu"], spaces.set_index(["space", "level"])[["tb_s", "latency_cycles"]]
copies = notebook.recorded("memory_lab/transfers.csv").query("part == 'copy' and memory == 'pinned'")
on_chip, shared_sizes = SPLITS[9, 0]  # KB
shared_by = f"threads of a block; up to {shared_sizes[-1]} KB shared"
levels = [
    draw.Memory("registers", f"{4 * REGISTERS // 1024} KB", "one thread", *at.loc["register", "registers"], True),
    draw.Memory("shared memory and L1", f"{on_chip} KB", shared_by, *at.loc["shared", "shared memory"], True),
    draw.Memory("L2 cache", f"{gpu['l2_bytes'] >> 20} MB", "all threads", *at.loc["global", "L2"]),
    draw.Memory("device memory", "141 GB", "all threads, and copies of the host", *at.loc["global", "device memory"]),
    draw.Memory("host memory", "", "the host; the GPU over PCI Express", copies["gb_s"].max() / 1e3),
]
draw.memory_hierarchy(levels, gpu["multiprocessors"], spaces.attrs["source"])

# %% [markdown]
# Now compare with what it can compute. That is counted in FLOP, floating-point operations: a multiply-add,
# `acc += a * b`, is two. It takes two floats, eight bytes. If every multiply-add read both from memory, this many
# TB/s would keep the multiprocessors busy:

# %%
gpu = notebook.recorded("latest/results.csv").attrs["environment"]["gpu"]
peak = gpu["fp32_peak_gflops"] / 1e3  # TFLOP/s; a multiply-add counts as two
print(f"{gpu['name']}: {peak:.1f} TFLOP/s are {peak / 2:.1f} million million multiply-adds a second")
print(f"8 bytes for each: {8 * peak / 2:.0f} TB/s")

# %% [markdown]
# Only the registers give that. Device memory falls short by a factor of more than fifty, and even shared memory is
# too slow for two floats a multiply-add. So this is what the series is about: **read a float from afar once, and use
# it many times, nearer and nearer to where it is multiplied.** The rest is keeping everyone busy meanwhile.
#
# ## A product by hand
#
# Write it: one element of C per thread, as in the first picture. Threads and blocks can have two dimensions, `.x` and
# `.y`. `row` and `col` are there, and so is the sum, as a `float32`: a plain `0.0` would make it a float64, for which a
# GPU has at best half as many units. What is missing is the loop: add `a[row, p] * b[p, col]` for all `p`.


# %%
@cuda.jit
def product(a, b, c):
    row = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    col = cuda.blockIdx.y * cuda.blockDim.y + cuda.threadIdx.y
    if row < c.shape[0] and col < c.shape[1]:
        acc = float32(0)
        # your loop; there are a.shape[1] terms
        c[row, col] = acc


# %% [markdown]
# The launch is Numba's own, on the simulator. C begins as NaN, so that an element that no thread computes is seen.


# %%
def multiply(kernel, a, b):
    c = np.full((a.shape[0], b.shape[1]), np.nan, np.float32)
    threads = (8, 4)
    blocks = (-(-c.shape[0] // threads[0]), -(-c.shape[1] // threads[1]))
    kernel[blocks, threads](a, b, c)
    return c


def whole(rows, cols):
    return np.random.default_rng(rows).integers(-4, 5, (rows, cols)).astype(np.float32)


# %%
operands = [(whole(2, 3), whole(3, 2)), (whole(9, 5), whole(5, 7))]
right = [(pair, accuracy.reference(1.0, *pair)[0]) for pair in operands]
answered = notebook.check(partial(multiply, product), *right)

# %% [markdown]
# A solution:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cuda.jit
def product(a, b, c):
    row = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    col = cuda.blockIdx.y * cuda.blockDim.y + cuda.threadIdx.y
    if row < c.shape[0] and col < c.shape[1]:
        acc = float32(0)
        for p in range(a.shape[1]):
            acc += a[row, p] * b[p, col]
        c[row, col] = acc


assert notebook.check(partial(multiply, product), *right)

# %% [markdown]
# ### Step it
#
# Thread (1, 0) of a block of 2 x 2: row 1 of A times column 0 of B.

# %%
a = np.array([[1, 2], [3, 4]], np.float32)
b = np.array([[10, 20], [30, 40]], np.float32)
c = np.zeros((2, 2), np.float32)

for s in step(product, 1, (2, 2), a, b, c, thread=(1, 0)):
    print(s)
print(c)

# %% [markdown]
# The same as a player: move through the steps with the slider, the buttons or the arrow keys, and choose another
# thread. Below the source are the addresses that the four threads access together.

# %%
step(product, 1, (2, 2), a, b, c).player(threads=[(1, 0), (0, 1)])

# %% [markdown]
# ### Is it right?
#
# Whole numbers come out exactly. Others are rounded, at each step of the sum, so two right products may differ in
# their last bits. How far may they? `accuracy.reference` makes the product in float64, which is as good as exact
# here, and for each element the scale of its errors, `|A| @ |B|`. `accuracy.compare` then finds the worst element, and
# tells its error as a share of what rounding can explain. This one comparison judges every kernel of the project:
# up to 1 is right, and a single term left out is far beyond.

# %%
rng = np.random.default_rng(0)
a, b = (rng.uniform(-1, 1, shape).astype(np.float32) for shape in ((20, 30), (30, 12)))

print(accuracy.compare(multiply(product, a, b), *accuracy.reference(1.0, a, b), k=30))

without_last = (a[:, :-1] @ b[:-1]).astype(np.float32)
print(accuracy.compare(without_last, *accuracy.reference(1.0, a, b), k=30))

# %% [markdown]
# ### The same kernel, as the project has it
#
# Yours and the first stage of the ladder differ in little. That one also takes `alpha` and `beta`, for
# `C = alpha * A @ B + beta * C`, which is what libraries offer:

# %%
notebook.source("naive")

# %% [markdown]
# It is launched in the same way as yours, and so is every other stage. `launchable` returns the kernel for given
# extents, with its grid, its block, and the bytes of shared memory that the launch has to ask for:

# %%
kernel, grid, block, shared = launchable("naive", 20, 12, 30)
print(f"grid {grid}, block {block}, {shared} bytes of shared memory")

c = cuda.device_array((20, 12), np.float32)
kernel[grid, block, 0, shared](1.0, cuda.to_device(a), cuda.to_device(b), 0.0, c)
print(accuracy.compare(c.copy_to_host(), *accuracy.reference(1.0, a, b), k=30))

# %% [markdown]
# And this is what one of your warps reads and writes:

# %%
a, b, c = np.ones((64, 16), np.float32), np.ones((16, 64), np.float32), np.zeros((64, 64), np.float32)
draw.who_reads_what(trace(product, (2, 16), (32, 4), a, b, c, blocks=[(0, 0, 0)]), warp=0)

# %% [markdown]
# Both kernels took the row from `.x`. You could as well have taken it from `.y`. The result would be the same; the
# picture would not.
#
# ## How fast is it?
#
# The simulator cannot tell: its times mean nothing. On a GPU, `python bench.py` first compares each kernel with
# float64, then times those that are right beside **cuBLAS**, NVIDIA's own library, and prints a table. At
# M = N = K = 4096 it recorded:

# %%
table = notebook.recorded("latest/results.csv")
print(table.attrs["source"])
cube = table[(table[["m", "n", "k"]] == 4096).all(axis=1)].set_index("stage")
columns = ["median_us", "gflops", "percent_of_peak", "ratio_to_cublas", "error_in_bounds"]
cube[columns].round({"median_us": 0, "gflops": 0, "percent_of_peak": 1, "ratio_to_cublas": 3, "error_in_bounds": 3})

# %% [markdown]
# A row is a **stage**: one kernel, one step of the ladder. Each differs from the one above by one idea. `auto` is what
# the public function `tiled_sgemm` chooses by itself.
#
# - `median_us`: microseconds that the product took, the median of several runs.
# - `gflops`: the same as speed, in thousand millions of additions and multiplications a second. A product makes
#   2 * M * N * K of them.
# - `percent_of_peak`: that speed over the most that the GPU's float32 (FP32) units can do.
# - `ratio_to_cublas`: cuBLAS's time over this one's. Above 1 is faster than cuBLAS.
# - `error_in_bounds`: the worst element's error, as above. Nothing beyond 1 would be timed at all.
#
# The same as a picture, in TFLOP/s, which are a thousand `gflops`. From a stage to the next, the gain stands behind
# the speed:

# %%
draw.ladder_chart(table, table.attrs["environment"])

# %% [markdown]
# What you have just written is, but for `alpha` and `beta`, the bar at the top. And on this machine, if it has a GPU:

# %%
results = notebook.measure("naive", "auto")
notebook.compare(results)

# %% [markdown]
# `bound by` and `predicted ms` are a model's: which part of the GPU a kernel keeps busy longest, and for about how
# long. `auto` has none, since it is a choice between kernels, and cuBLAS has none, since only its maker knows what it
# does. Notebook 1 explains them. From there on each notebook predicts, then measures, and asks what is between.
#
# ## What the series does
#
# Each notebook takes a stage or two: the question, the real file, a picture of who reads what, a thread to step
# through, an exercise, and the measured gain.
#
# | notebook | idea |
# |:--|:--|
# | [1](01_naive_and_coalesced.ipynb) | neighbouring threads read neighbouring floats |
# | [2](02_shared_tile.ipynb) | a block reads a tile once, and shares it |
# | [3](03_thread_tiles.ipynb) | a thread keeps many sums in its registers |
# | [4](04_vectors_and_banks.ipynb) | four floats at a time, and never two in the same bank |
# | [5](05_two_buffers.ipynb) | load the next tile while this one is multiplied |
# | [6](06_warp_tiles.ipynb) | a tile for each warp, and what registers cost |
# | [7](07_async_copies_and_addresses.ipynb) | copies that need no thread, and a loop of little but multiply-adds |
# | [8](08_equal_shares.ipynb) | equal work for all multiprocessors |
# | [9](09_tensor_cores.ipynb) | units that multiply whole matrices, and what becomes of precision |
# | [10](10_memory_laboratory.ipynb) | experiments: what each memory does |
# | [11](11_in_use.ipynb) | the public function, in programs |
# | [12](12_write_your_own.ipynb) | a kernel of your own, checked, timed and added to the ladder |
#
# ## The question it leaves open
#
# The lanes of a warp of `product` stand one below the other in C: 32 rows of one column. Does it matter who stands
# where? [Notebook 1](01_naive_and_coalesced.ipynb) measures it.
