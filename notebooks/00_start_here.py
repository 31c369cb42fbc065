# %% [markdown]
# # 0. Start here: what a GPU is, if you know NumPy
#
# *Before this: NumPy. Time: about 50 minutes. The thirteen notebooks take about 14 hours, 0 to 4 an afternoon.*
#
# **The question.** `c = a @ b` is one line of NumPy. Who computes which element, and where does the data come from?
# On a GPU you decide both, and the speed of the same product depends on it. This course begins with a kernel that you
# write in this notebook, and ends with one that is faster than NVIDIA's own library.
#
# You need no GPU. Kernels run on Numba's simulator, which executes them as Python, one line at a time if you like. You
# need Linux, WSL, or a container; [the notebooks' page](README.md) has the commands, and a
# [glossary](../docs/glossary.md) explains every term again.
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
    # Sums of integers are exact.
    return generator.integers(-4, 5, shape).astype(np.float32)


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
# 2 images and 4 filters of 3 channels.
images, filters = integers(2, 3, 6, 6), integers(4, 3, 3, 3)
convolved = np.zeros((2, 4, 4, 4), np.float32)
for row in range(4):
    for col in range(4):
        patch = images[:, :, row : row + 3, col : col + 3]
        for number in range(4):
            convolved[:, number, row, col] = (patch * filters[number]).sum(
                axis=(1, 2, 3)
            )

patches = np.lib.stride_tricks.sliding_window_view(images, (3, 3), axis=(2, 3))
# im2col: one row per output pixel.
columns = patches.transpose(0, 2, 3, 1, 4, 5).reshape(2 * 4 * 4, 3 * 3 * 3)
found = columns @ filters.reshape(4, 27).T

assert np.array_equal(found.reshape(2, 4, 4, 4).transpose(0, 3, 1, 2), convolved)
print(
    "M, N, K =", (32, 4, 27), "- elements of A per pixel:", columns.size / images.size
)

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
    # 2 is the square root of a key's length.
    shares = softmax(np.array([sum(query * key) for key in keys]) / 2)
    attention[number] = sum(
        share * value for share, value in zip(shares, values, strict=True)
    )

np.testing.assert_allclose(
    softmax(queries @ keys.T / 2) @ values, attention, rtol=1e-5, atol=1e-6
)
print("M, N, K =", (6, 7, 4), "and", (6, 5, 7))

# %% [markdown]
# Real layers have thousands of rows and columns. Almost all of their arithmetic is in these products, so the speed of
# this one operation decides the speed of many programs.
#
# ## One picture first
#
# A function that runs on the GPU is a **kernel**. `naive` is the simplest kernel of this project. A **thread** of it
# computes one element of C. The next cell runs `naive` on the simulator, and draws what one of its threads reads of A
# and B, and what it writes. (`trace` and its arguments are explained further down. `1, a, b, 0, c` stands for
# `c = 1 * a @ b + 0 * c`.)

# %%
a, b = np.ones((16, 12), np.float32), np.ones((12, 16), np.float32)
c = np.zeros((16, 16), np.float32)

naive = trace("naive", None, None, 1, a, b, 0, c, config="test", blocks=[(0, 1, 0)])
draw.who_reads_what(naive, thread=19)

# %% [markdown]
# A row of A, a column of B, one element of C: the definition of a matrix product. All other threads do the same in
# other places. All pictures of this course are drawn from recorded accesses, as this one is. You can change a kernel,
# and draw it again.
#
# ## From a loop to threads
#
# In NumPy you write `out = x + y`, and a loop over `i` is hidden in it. On a GPU you write the body of that loop as a
# kernel, and one thread runs it for each `i`. A kernel returns nothing; it writes into an array. Each thread computes
# its own `i` from its place in the launch.


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
# `i` is the block's number times the block's size, plus the thread's number in the block. In block 3, for example,
# threads 0 to 31 have `i` = 96 to 127. 4 blocks of 32 are 128 threads, for 100 elements. The last 28 find that their
# `i` is too large, and do nothing: that is what the `if` is for.
#
# ## The simulator
#
# No GPU was needed for that. Numba's **simulator** ran `add` as Python, all 128 threads of it. It also runs every
# kernel of the project unchanged. Two functions use it to look inside a kernel. `trace` records each access to memory:
# the picture above was drawn from its record. `step` follows one thread, line by line, while the others run as usual.
# Both take the kernel, its launch (here 4 blocks of 32 threads), and then the kernel's own arguments. For a kernel of
# the project, such as "naive", `None, None` in place of the launch means the launch that it was written for, and
# `config="test"` a small one. `blocks` names the blocks that run; without it, all do.
#
# Here are two threads of the last block of `add`. A step prints the values that have changed, indented, and then the
# line that runs next, with the file and the number of the line. (The file of a cell is named by a number.)

# %%
for t in (2, 5):
    for s in step(add, 4, 32, x, y, out, block_index=3, thread=t):
        print(s)

# %% [markdown]
# ## Warps
#
# The hardware does not run threads one by one. It takes 32 consecutive threads of a block, a **warp**, and runs each
# instruction for all 32 at once. A thread's number in its warp is its **lane**. The word does not occur in a kernel
# like this one, but nearly everything that makes kernels fast or slow depends on what the 32 lanes do together.
#
# Now `add` runs as one block of 128 threads, again for 100 elements. How many lanes of its last warp have an element?

# %%
busy = notebook.predict("lanes of the last warp with an element", ...)

# %% [markdown]
# 16 elements make a row of the picture, so two rows are a warp. The numbers are the threads':

# %%
draw.thread_map(trace(add, 1, 128, x, y, out), "out", "store", width=16)

# %% [markdown]
# The other lanes of the last warp wait for these:

# %%
stores = trace(add, 1, 128, x, y, out).accesses.query("op == 'store'")
busy.reveal(
    (stores["thread"] // 32 == 3).sum(),
    because="100 elements are three warps and 4 elements.",
)

# %% [markdown]
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
right = [
    ((n,), coalesced.grid(coalesced.configs[0], 1, n)[0])
    for n in (1, 127, 128, 129, 1000, 4096)
]
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
# does not mention: **L1**, in each multiprocessor, and **L2**, one for all. The next table was measured.
# `latency_cycles` is how many clock cycles a thread waits for one value. `tb_s` is how many TB/s all threads together
# can read:

# %%
spaces = notebook.recorded("memory_lab/memory_spaces.csv")
shown = spaces[spaces["space"].isin(["register", "shared", "global"])]
print("recorded on an NVIDIA H200")
shown[["space", "level", "latency_cycles", "tb_s"]].round(1).set_index(
    ["space", "level"]
)

# %% [markdown]
# As a diagram, with the capacities. Each multiprocessor has its own registers and its own storage for shared memory and
# L1; a bandwidth is that of all multiprocessors together. Bandwidths and latencies were recorded, that of the host for
# copies from page-locked memory. Registers and L1 have the sizes of compute capability 9.0 in the CUDA C++ Programming
# Guide, the size of L2 was reported by the driver, and that of the device memory is from NVIDIA's data sheet.

# %% tags=["hide-input"] mystnb={"image": {"alt": "Diagram of five memories, from registers to host"}}
gpu, at = (
    spaces.attrs["environment"]["gpu"],
    spaces.set_index(["space", "level"])[["tb_s", "latency_cycles"]],
)
copies = notebook.recorded("memory_lab/transfers.csv").query(
    "part == 'copy' and memory == 'pinned'"
)
on_chip, shared_sizes = SPLITS[9, 0]  # KB
shared_by = f"threads of a block; up to {shared_sizes[-1]} KB shared"
levels = [
    draw.Memory(
        "registers",
        f"{4 * REGISTERS // 1024} KB",
        "one thread",
        *at.loc["register", "registers"],
        True,
    ),
    draw.Memory(
        "shared memory and L1",
        f"{on_chip} KB",
        shared_by,
        *at.loc["shared", "shared memory"],
        True,
    ),
    draw.Memory(
        "L2 cache",
        f"{gpu['l2_bytes'] >> 20} MB",
        "all threads",
        *at.loc["global", "L2"],
    ),
    draw.Memory(
        "device memory",
        "141 GB",
        "all threads, and copies of the host",
        *at.loc["global", "device memory"],
    ),
    draw.Memory(
        "host memory",
        "",
        "the host; the GPU over PCI Express",
        copies["gb_s"].max() / 1e3,
    ),
]
draw.memory_hierarchy(levels, gpu["multiprocessors"], spaces.attrs["source"])

# %% [markdown]
# Now compare with the speed of the arithmetic. That is counted in FLOP, floating-point operations: a multiply-add,
# `acc += a * b`, is two. An H200 can perform 66.9 TFLOP/s in float32, that is, 33.5 trillion multiply-adds per second.
# Each needs two floats. If every multiply-add read both from memory, how many TB/s would the memory have to deliver?

# %%
needed = notebook.predict("TB/s for two floats per multiply-add", ..., unit="TB/s")

# %%
gpu = notebook.recorded("latest/results.csv").attrs["environment"]["gpu"]
peak = gpu["fp32_peak_gflops"] / 1e3  # TFLOP/s; a multiply-add counts as two
given = at.loc[("global", "device memory"), "tb_s"]
needed.reveal(
    8 * peak / 2,
    because=f"8 bytes times {peak / 2:.1f} trillion per second. "
    f"Device memory delivers {given:.1f} TB/s.",
)

# %% [markdown]
# Only the registers deliver that. Device memory falls short by a factor of more than fifty, and even shared memory is
# too slow for two floats per multiply-add. This is what the course is about: **read a float from far away once, and use
# it many times, closer and closer to where it is multiplied.** The rest is keeping all units busy meanwhile.
#
# ## A product by hand
#
# Write it: one element of C per thread, as in the first picture. Threads and blocks can have two dimensions, `.x` and
# `.y`. `row` and `col` are there, and so is the sum, as a `float32`: a plain `0.0` would make it a float64, for which a
# GPU has at best half as many units. What is missing is the loop. In NumPy the element is `a[row] @ b[:, col]`; here,
# add `a[row, p] * b[p, col]` to `acc` for all `p`. (A kernel computes with single elements, not with rows.)


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
# The launch is Numba's own, on the simulator. C begins as NaN, so that an element that no thread computes shows. The
# check prints the first wrong element.


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
def judge(kernel):
    """Return True for a correct kernel, or a description of the first wrong element."""
    for a, b in ((whole(2, 3), whole(3, 2)), (whole(9, 5), whole(5, 7))):
        expected = a @ b
        try:
            c = multiply(kernel, a, b)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if not np.array_equal(c, expected):
            row, col = np.argwhere(c != expected)[0]
            shape = f"{a.shape[0]} x {a.shape[1]} times {b.shape[0]} x {b.shape[1]}"
            found, right = c[row, col], expected[row, col]
            return f"{shape}: c[{row}, {col}] is {found}, and should be {right}"
    return True


answered = notebook.check(partial(judge, product), ((), True))

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


assert notebook.check(partial(judge, product), ((), True))

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
# ### Is it correct?
#
# Small whole numbers come out exactly. Other sums are rounded at each step, so two correct products may differ in
# their last bits. How far may they differ? `accuracy.reference` computes the product in float64, which is as good as
# exact here, and for each element the scale of its errors, `|A| @ |B|`. `accuracy.compare` finds the worst element, and
# divides its error by the largest one that rounding can explain. Every kernel of the project is compared in this way:
# a quotient up to 1 is correct. A single missing term gives far more:

# %%
rng = np.random.default_rng(0)
a, b = (rng.uniform(-1, 1, shape).astype(np.float32) for shape in ((20, 30), (30, 12)))

print(accuracy.compare(multiply(product, a, b), *accuracy.reference(1.0, a, b), k=30))

without_last = (a[:, :-1] @ b[:-1]).astype(np.float32)
print(accuracy.compare(without_last, *accuracy.reference(1.0, a, b), k=30))

# %% [markdown]
# ### The same kernel, as the project has it
#
# The kernels of the project form a **ladder**: each **stage** adds one idea to the one before. The first stage differs
# little from your kernel. It also takes `alpha` and `beta`, for `C = alpha * A @ B + beta * C`, which is what libraries
# offer, and it adds up eight terms per iteration:

# %%
notebook.source("naive")

# %% [markdown]
# It is launched in the same way as yours, and so is every other stage. `launchable` returns the kernel for given
# extents, with its grid, its block, and the bytes of shared memory that the launch has to request:

# %%
kernel, grid, block, shared = launchable("naive", 20, 12, 30)
print(f"grid {grid}, block {block}, {shared} bytes of shared memory")

c = cuda.device_array((20, 12), np.float32)
kernel[grid, block, 0, shared](1.0, cuda.to_device(a), cuda.to_device(b), 0.0, c)
print(accuracy.compare(c.copy_to_host(), *accuracy.reference(1.0, a, b), k=30))

# %% [markdown]
# And this is what one of your warps reads and writes:

# %%
a, b, c = (
    np.ones((64, 16), np.float32),
    np.ones((16, 64), np.float32),
    np.zeros((64, 64), np.float32),
)
draw.who_reads_what(
    trace(product, (2, 16), (32, 4), a, b, c, blocks=[(0, 0, 0)]), warp=0
)

# %% [markdown]
# Both kernels took the row from `.x`. You could as well have taken it from `.y`. The result would be the same; the
# picture would not.
#
# ## How fast is it?
#
# The simulator cannot tell: its times mean nothing. `notebook.measure` times kernels on this machine's GPU, if it has
# one, and shows times recorded on an H200 otherwise. Beside them it times **cuBLAS**, NVIDIA's own library. What
# percentage of the GPU's peak does `naive` reach in a product of 4096 x 4096 x 4096?

# %%
reached = notebook.predict("speed of naive", ..., unit="% of the peak")

# %%
results = notebook.measure("naive")
table = notebook.compare(results)
table

# %% [markdown]
# - `measured ms` is the median time of a product, in milliseconds. A product performs 2 * M * N * K floating-point
#   operations; `TFLOP/s` is that number divided by the time.
# - `of peak` is this speed divided by the highest speed of the GPU's float32 (FP32) units.
# - `of cuBLAS` is cuBLAS's time divided by this time: above 1 is faster than cuBLAS.
# - `bound by` and `predicted ms` come from a model: the part of the GPU that the kernel keeps busy longest, and for how
#   long. Notebook 1 explains it. There is no model of cuBLAS, since its kernels are not public. `gain` compares stages.

# %%
ours, library = table.loc["naive", "measured ms"], table.loc["cublas", "measured ms"]
speed = results.set_index("stage").loc["naive", "percent_of_peak"]
reached.reveal(
    speed,
    model=speed * ours / table.loc["naive", "predicted ms"],
    because=f"cuBLAS computes the same product {ours / library:.0f} times as fast.",
)

# %% [markdown]
# That is the distance to climb. From here on, each notebook asks for your prediction, shows the model's and the
# measurement, and explains the difference.
#
# ## The course
#
# Each notebook takes a stage or two: the question, the same in NumPy, the real kernel, pictures of its accesses, a
# thread to step through, exercises, and the measured gain. In the [puzzles](../docs/puzzles.md) you write these kernels
# yourself: `numba-gemm puzzle element`, in a terminal, begins with the first. Puzzles 1 and 2 fit this notebook.
#
# | notebook | idea | puzzles |
# |:--|:--|:--|
# | [1](01_naive_and_coalesced.ipynb) | neighbouring threads read neighbouring floats | 3, 4 |
# | [2](02_shared_tile.ipynb) | a block reads a tile once, and shares it | 5 to 8 |
# | [3](03_thread_tiles.ipynb) | a thread keeps many sums in its registers | 9, 10 |
# | [4](04_vectors_and_banks.ipynb) | four floats at a time, and never two in the same bank | 11, 12 |
# | [5](05_two_buffers.ipynb) | load the next tile while this one is multiplied | 13 |
# | [6](06_warp_tiles.ipynb) | a tile for each warp, and what registers cost | 14 |
# | [7](07_async_copies_and_addresses.ipynb) | copies past the registers, and a loop of little but multiply-adds | 15 |
# | [8](08_equal_shares.ipynb) | equal work for all multiprocessors | |
# | [9](09_tensor_cores.ipynb) | units that multiply whole matrices, and what becomes of precision | |
# | [10](10_memory_laboratory.ipynb) | experiments on each memory | |
# | [11](11_in_use.ipynb) | the public function, in programs | 16 |
# | [12](12_write_your_own.ipynb) | a kernel of your own, checked, timed and added to the ladder | |
#
# ## The open question
#
# The lanes of a warp of `product` compute 32 rows of one column of C. Does it matter which thread computes which
# element? [Notebook 1](01_naive_and_coalesced.ipynb) measures it.
