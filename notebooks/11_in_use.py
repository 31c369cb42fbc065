# %% [markdown]
# # 11. In use: `tiled_sgemm` in a program
#
# *Before this: [notebook 0](00_start_here.ipynb). Time: about 50 minutes.*
#
# **The question.** The notebooks so far looked into kernels. In a program you call one function, with the arrays that
# you have, and want to know what it does and how fast it is. This notebook shows arrays of four libraries, streams and
# CUDA graphs, batches, epilogues, plans, precisions, matrices larger than the GPU, and how to read a benchmark.
#
# Its kernels run on the GPU, if there is one. Without a GPU they run on the simulator, small, with NumPy's and Numba's
# arrays. Cells that need a GPU or a library that is missing print the output of a run on an NVIDIA H200 instead.
#
# You predict first. Where a cell says `notebook.predict("...", ...)`, write a number in place of the second `...` and
# run the cell. A later cell shows your number beside the real one. A cell without a prediction runs, too.
#
# Run the cells from top to bottom. The stored outputs are those of a machine with an NVIDIA H200, with CuPy and
# PyTorch; the next cell prints where yours run.

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

notebook.begin(on_gpu=True)

# %%
import time

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from numba import cuda

from numba_gemm import autotune, explain, plan, streamed_sgemm, tiled_sgemm
from numba_gemm.gemm.precision import PRECISIONS
from numba_gemm.inspect import draw
from numba_gemm.models.accuracy import compare, reference
from numba_gemm.models.roofline import gemm_flops
from numba_gemm.runtime.device import device_properties
from numba_gemm.streaming import blocking_of, expected_time

ON_GPU = notebook.has_gpu()
# What batches in one launch, and epilogues, need.
MODERN = device_properties().cc >= (8, 0)
M, N, K = (4096, 4096, 4096) if ON_GPU else (48, 40, 32)


def can_run(cell, *libraries, able=True):
    """True if a cell can run here; otherwise print why not, and its recorded output."""
    absent = [name for name in libraries if importlib.util.find_spec(name) is None]
    missing = ""
    if not ON_GPU:
        missing = "this machine has no GPU"
    elif not able:
        missing = "this needs compute capability 8.0"
    elif absent:
        missing = f"{' and '.join(absent)} is not installed"
    elif "torch" in libraries:
        import torch

        missing = "" if torch.cuda.is_available() else "this PyTorch finds no GPU"
    if missing:
        print(f"Not run: {missing}. On an NVIDIA H200 this cell printed:\n")
        print(notebook.recorded_output("11_in_use", cell))
    return not missing


# %% [markdown]
# ## One call
#
# NumPy arrays in, a NumPy array out. The result is compared with NumPy's in float64: the error of the worst element, in
# units of the bound that float32 sums of K terms must keep. (Of some rows only; float64 takes its time.)

# %%
rng = np.random.default_rng(0)
a = rng.standard_normal((M, K), dtype=np.float32)
b = rng.standard_normal((K, N), dtype=np.float32)
ROWS = slice(None, None, max(1, M // 32))


def check(c, a, b, precision="ieee"):
    """Compare some rows of a product with those of a float64 one."""
    expected, scale = reference(1.0, a[ROWS], b)
    found = compare(c[ROWS], expected, scale, a.shape[1], precision)
    assert found.ok, str(found)
    return found


c = tiled_sgemm(a, b)
print(check(c, a, b))

# %% [markdown]
# `explain` tells which stage of the ladder such a call runs, in which tiles, how they are loaded, what is copied, and
# why, without running anything:

# %%
print(explain(a, b))

# %% [markdown]
# NumPy arrays are copied to the GPU and back. That takes longer than the product itself, unless the matrices are very
# large, so arrays that are used again should stay on the GPU. But first, what `tiled_sgemm` accepts and refuses:

# %%
# In place: c = 2 * a @ b - c, which is a @ b again.
tiled_sgemm(a, b, out=c, alpha=2.0, beta=-1.0)
check(c, a, b)

# Any strides: rows in reverse, every other column.
backwards = tiled_sgemm(a[::-1], b[:, ::2])
check(backwards, a[::-1], b[:, ::2])

try:
    tiled_sgemm(a.astype(np.float64), b)  # nothing is converted silently
except TypeError as error:
    print(error)

# %% [markdown]
# ## Arrays that stay on the GPU
#
# Numba's. Nothing is copied, and the result is a device array, too:

# %%
a_dev, b_dev = cuda.to_device(a), cuda.to_device(b)
c_dev = tiled_sgemm(a_dev, b_dev)
print(type(c_dev).__name__, "-", check(c_dev.copy_to_host(), a, b))

# %% [markdown]
# How long does that take? A call returns before the GPU has done its work, so the clock must be the GPU's own:
# **events** are marks in the queue of work that note the time at which the GPU passes them. The first call compiles or
# loads the kernel, and does not count. (This is a quick look. What makes a comparison fair is more than that, and
# `bench.py`, further down, takes care of it.)


# %%
def milliseconds(call, repeats=20):
    """Of a call's work on the GPU, on the default stream."""
    call()
    cuda.synchronize()
    begin, end = cuda.event(), cuda.event()
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return cuda.event_elapsed_time(begin, end) / repeats


def speed(ms, m=M, n=N, k=K):
    """Milliseconds, and TFLOP/s of an m x n x k product, in words."""
    return f"{ms:.3f} ms, {2 * m * n * k / ms / 1e9:.1f} TFLOP/s"


if can_run("numba"):
    print(
        "tiled_sgemm, Numba arrays:",
        speed(milliseconds(lambda: tiled_sgemm(a_dev, b_dev, c_dev))),
    )
    begin = time.perf_counter()
    tiled_sgemm(a, b)
    print(
        "tiled_sgemm, NumPy arrays:",
        speed(1e3 * (time.perf_counter() - begin)),
        "with copies, by the host's clock",
    )

# %% [markdown]
# ### CuPy
#
# The result is a `cupy.ndarray`. Work goes to CuPy's current **stream**. A stream is a queue: what one queue has been
# given is done in order, and work of several queues may run side by side.

# %%
if can_run("cupy", "cupy"):
    import cupy

    x, y = cupy.asarray(a), cupy.asarray(b)
    z = tiled_sgemm(x, y)
    print(type(z), check(cupy.asnumpy(z), a, b))

    cupy.cuda.Device().synchronize()  # x and y are complete before another stream reads them
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        z = tiled_sgemm(x, y)  # on `stream`
    stream.synchronize()
    print("on a stream of its own:", check(cupy.asnumpy(z), a, b))

    # The same, after what the current stream has been sent so far.
    z = tiled_sgemm(x, y, stream=stream)
    stream.synchronize()
    print("on a stream that is named:", check(cupy.asnumpy(z), a, b))
    del x, y, z

# %% [markdown]
# ### PyTorch
#
# Tensors on a CUDA device. A transpose is a view: `weight.T` is no copy, here as there.

# %%
if can_run("torch", "torch"):
    import torch

    x, weight = (
        torch.from_numpy(a).cuda(),
        torch.from_numpy(np.ascontiguousarray(b.T)).cuda(),
    )
    y = tiled_sgemm(x, weight.T)
    print(type(y), y.device, check(y.cpu().numpy(), a, b))
    print("tiled_sgemm: ", speed(milliseconds(lambda: tiled_sgemm(x, weight.T, y))))
    print(
        "torch.matmul:",
        speed(milliseconds(lambda: torch.matmul(x, weight.T, out=y))),
        "(cuBLAS, TF32 off)",
    )

# %% [markdown]
# A tensor that requires a gradient is refused, since PyTorch would not know how to go back through the product. Two
# more products tell it, one for each operand's gradient:

# %%
if can_run("autograd", "torch"):

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return tiled_sgemm(x.detach(), weight.detach().T)

        @staticmethod
        def backward(ctx, gradient):
            x, weight = (saved.detach() for saved in ctx.saved_tensors)
            return tiled_sgemm(gradient, weight), tiled_sgemm(gradient.T, x)

    layer = weight[:256, :512].clone().requires_grad_()
    inputs = x[:128, :512].clone()
    (with_ours,) = torch.autograd.grad(
        Product.apply(inputs, layer).square().sum(), layer
    )
    (with_torch,) = torch.autograd.grad((inputs @ layer.T).square().sum(), layer)
    print("largest gradient:", with_torch.abs().max().item())
    print("largest difference:", (with_ours - with_torch).abs().max().item())

# %% [markdown]
# ### Streams and CUDA graphs
#
# As with CuPy, a product runs on the current stream. Streams order nothing between each other by themselves: code that
# needs the result must wait for the stream that computes it.

# %%
if can_run("streams", "torch"):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # x and weight come from there
    with torch.cuda.stream(stream):
        y = tiled_sgemm(x, weight.T)
    torch.cuda.current_stream().wait_stream(stream)
    print(check(y.cpu().numpy(), a, b))

# %% [markdown]
# Small products finish before the host has launched the next. A **CUDA graph** records a sequence of launches once, and
# replays it with a single call. It records addresses, so a replay uses the contents that the arrays have at that time.
# The kernels must be compiled before: call once, then record.

# %%
if can_run("graph", "torch"):
    left, small, out = (
        x[:256, :256].clone(),
        weight[:256, :256].clone(),
        torch.empty(256, 256, device="cuda"),
    )
    tiled_sgemm(left, small, out)
    torch.cuda.synchronize()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            tiled_sgemm(left, small, out)

    left.copy_(x[256:512, :256])
    graph.replay()
    difference = (out - left @ small).abs().max().item()
    print("largest difference from torch.matmul, on new data:", difference)
    launched = milliseconds(lambda: tiled_sgemm(left, small, out), repeats=400)
    print(f"a product, launched by itself: {1e3 * launched:.1f} us")
    print(
        f"a product, in a graph of 20:   {1e3 * milliseconds(graph.replay) / 20:.1f} us"
    )

# %% [markdown]
# ## Batches
#
# Dimensions before the last two are a batch's, and are broadcast as NumPy does it. From compute capability 8.0 on, a
# batch of up to three such dimensions takes one launch in `ieee`, or two, not many:

# %%
count, rows, columns, terms = (64, 512, 512, 512) if ON_GPU else (3, 12, 8, 16)
many = rng.standard_normal((count, rows, terms), dtype=np.float32)
one = rng.standard_normal((terms, columns), dtype=np.float32)

products = tiled_sgemm(many, one)  # many matrices times one
print(products.shape, "launches:", explain(many, one).launches)
assert np.allclose(products, many @ one, atol=1e-3)

# Three matrices, each with each.
pairs = tiled_sgemm(many[:3, None], many[None, :3].swapaxes(-1, -2))
print(
    pairs.shape,
    "launches:",
    explain(many[:3, None], many[None, :3].swapaxes(-1, -2)).launches,
)

# %% [markdown]
# ## Epilogues
#
# In a network a product is seldom alone: a bias is added, a nonlinearity follows. Each of these reads and writes all of
# C again. An **epilogue** is a Python function that is compiled into the kernel, and applied to each element before it
# is stored, while it is in a register. Its arguments are the value, its row and column, and vectors that you pass:


# %%
def biased_relu(value, row, col, bias):
    return max(value + bias[col], np.float32(0))


bias = rng.standard_normal(N, dtype=np.float32)
bias_dev = cuda.to_device(bias)
if MODERN:
    activated = tiled_sgemm(
        a_dev, b_dev, epilogue=biased_relu, epilogue_args=[bias_dev]
    ).copy_to_host()
    assert np.allclose(activated[ROWS], np.maximum(a[ROWS] @ b + bias, 0), atol=1e-3)
    print(f"{(activated == 0).mean():.0%} of the elements are 0")

if can_run("epilogue", "torch", able=MODERN):
    right, vector, y = (
        torch.from_numpy(b).cuda(),
        torch.from_numpy(bias).cuda(),
        torch.empty(M, N, device="cuda"),
    )
    kept = {"epilogue": biased_relu, "epilogue_args": [vector]}
    print(
        "the product alone:      ",
        speed(milliseconds(lambda: tiled_sgemm(x, right, y))),
    )
    print(
        "with bias and ReLU:     ",
        speed(milliseconds(lambda: tiled_sgemm(x, right, y, **kept))),
    )
    print(
        "PyTorch, addmm and relu:",
        speed(milliseconds(lambda: torch.addmm(vector, x, right, out=y).relu_())),
    )

# %% [markdown]
# Write constants as `np.float32(...)`: a Python float is a float64, and makes all of the expression one.
#
# ## Your turn
#
# Attention needs products with everything above the diagonal hidden. Write an epilogue that keeps elements whose column
# is not beyond their row, and replaces all others by minus infinity. Replace `None`; the next cell calls your function
# as plain Python.


# %%
def causal(value, row, col):
    return None  # your answer


# %%
scores = np.arange(12, dtype=np.float32).reshape(3, 4)
hidden = np.where(np.tri(3, 4, dtype=bool), scores, -np.inf)
right_answers = [
    ((scores[place], *place), float(hidden[place])) for place in np.ndindex(3, 4)
]
answered = notebook.check(causal, *right_answers)

# %% [markdown]
# A solution, and the same function in a kernel:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def causal(value, row, col):
    return value if col <= row else np.float32(-np.inf)


assert notebook.check(causal, *right_answers)

# %%
size, depth = (1024, 64) if ON_GPU else (24, 16)
queries, keys = (rng.standard_normal((size, depth), dtype=np.float32) for _ in range(2))
if MODERN:
    masked = tiled_sgemm(queries, keys.T, epilogue=causal)
    assert np.allclose(
        masked, np.where(np.tri(size, dtype=bool), queries @ keys.T, -np.inf), atol=1e-3
    )
    print(masked[:3, :4])

# %% [markdown]
# ## Plans
#
# For products of the same extents, a plan chooses stage, tiles, partition and memory once, and compiles. A call then
# only passes the addresses.

# %%
product = plan(M, N, K)
print(product)
product(a_dev, b_dev, out=c_dev)
print(check(c_dev.copy_to_host(), a, b))

# %% [markdown]
# For small products, the time that a call takes on the host matters. `tiled_sgemm` remembers earlier calls, so the
# difference is small: the advantage of a plan is that nothing is decided or compiled during a call.


# %%
def host_microseconds(call, repeats=300):
    """Time of a call on the host, which does not wait for the GPU."""
    call()
    cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    taken = time.perf_counter() - begin
    cuda.synchronize()
    return 1e6 * taken / repeats


if can_run("calls", "torch"):
    planned = plan(256, 256, 256)
    for name, call in {
        "torch.matmul": lambda: torch.matmul(left, small, out=out),
        "tiled_sgemm": lambda: tiled_sgemm(left, small, out),
        "a plan": lambda: planned(left, small, out),
    }.items():
        print(f"{name:>12}: {min(host_microseconds(call) for _ in range(5)):.1f} us")

# %% [markdown]
# ## Autotuning
#
# The choice of `tiled_sgemm` follows from a model of the GPU. `autotune` measures the candidates of the model on yours,
# for operands like those given, on memory of its own. Its choice is kept on disk and holds from then on;
# `clear_autotuned()` undoes all such choices. (In the first run, compilation takes much of the time limit, and
# no further candidate is started after half of the limit: so fewer may be measured than were asked for.) Here is an
# awkward shape:

# %%
if can_run("autotune"):
    # Only shapes and strides matter.
    awkward = np.empty((1000, 3001), np.float32), np.empty((3001, 700), np.float32)
    # All but the file that keeps it.
    print(str(autotune(*awkward, candidates=4, seconds=10)).rpartition("\n")[0])

# %% [markdown]
# ## Precisions
#
# All of this was float32 arithmetic. Tensor cores multiply narrower numbers, much faster; `precision=` says how they
# are to make do with them ([notebook 9](09_tensor_cores.ipynb)). Nothing less accurate than `ieee` is used unless you
# ask for it. Errors are in units of `abs(A) @ abs(B)`, against float64:

# %%
lines = []
expected, scale = reference(1.0, a[ROWS], b)
for precision in PRECISIONS:
    try:
        c_dev = tiled_sgemm(a_dev, b_dev, precision=precision)
    except ValueError as refused:
        print(f"Not run: {refused}. On an NVIDIA H200 this cell printed:\n")
        print(notebook.recorded_output("11_in_use", "precisions"), end="\n\n")
        break
    found = np.abs(c_dev.copy_to_host()[ROWS] - expected) / scale
    line = {
        "precision": precision,
        "median error": np.median(found),
        "largest error": found.max(),
    }
    if ON_GPU:
        ms = milliseconds(
            lambda c=c_dev, chosen=precision: tiled_sgemm(
                a_dev, b_dev, c, precision=chosen
            )
        )
        line |= {"ms": round(ms, 3), "TFLOP/s": round(2 * M * N * K / ms / 1e9, 1)}
    lines.append(line)
pd.DataFrame(lines).set_index("precision")

# %% [markdown]
# With tensor cores, compare speed and error: `bf16x6` is both faster and more accurate than `ieee`, because it
# decomposes each element into three; `tf32` and `bf16` are faster still, and less accurate.
# [Precisions](../docs/precision.md) states the guarantees of each.
#
# ## Larger than the GPU
#
# `streamed_sgemm` takes NumPy arrays and memory maps in host memory, of any size. Blocks of C stay on the GPU while
# panels of A and B pass by, and copies go on beside the products. On a GPU, this cell limits it to less memory than
# the three matrices take.
#
# What it predicts is the copies and the products. A call also allocates memory on the device, and page-locked buffers,
# through which arrays in pageable memory pass (notebook 10). These matrices are small for it, so allocation presumably
# takes longer than the whole predicted time. [Benchmarks](../docs/benchmarks.md#matrices-larger-than-the-gpu) compares
# prediction and time of larger ones.

# %%
size, limit = (8192, 512 << 20) if ON_GPU else (40, 4 << 20)
big_a, big_b = (rng.standard_normal((size, size), dtype=np.float32) for _ in range(2))
blocking = blocking_of(big_a, big_b, memory_limit=limit)
print(
    f"A, B and C: {3 * big_a.nbytes / 1e6:,.2f} MB; "
    f"on the device at most: {blocking.device_bytes / 1e6:,.2f} MB"
)
print(f"blocks of C: {blocking.count}; panels along k: {len(blocking.depths)}")

if ON_GPU:
    print(expected_time(big_a, big_b, memory_limit=limit))
big_c = streamed_sgemm(big_a, big_b, memory_limit=limit)
print(check(big_c, big_a, big_b))
begin = time.perf_counter()
# Again, now that all is compiled.
streamed_sgemm(big_a, big_b, big_c, memory_limit=limit)
if ON_GPU:
    print(f"{time.perf_counter() - begin:.3g} s taken")
del big_a, big_b, big_c

# %% [markdown]
# ## Reading a benchmark
#
# `python bench.py` verifies and times all stages beside cuBLAS, and leaves a table, `results.csv`, and beside it
# `environment.json`, which records the machine, versions and clocks. The one of an H200 comes with the
# project:

# %%
frame = notebook.recorded("latest/results.csv")
print(frame.attrs["source"])
print(", ".join(frame.columns))
frame.head(3)[
    [
        "stage",
        "m",
        "n",
        "k",
        "median_us",
        "p10_us",
        "p90_us",
        "gflops",
        "ratio_to_cublas",
        "error_in_bounds",
    ]
]

# %% [markdown]
# A row is a measurement of a stage, a precision, a shape and a layout. Two names in `stage` are not stages: `cublas`,
# and `auto`, the choice of `tiled_sgemm`. `error_in_bounds` is the worst element's error in units of the bound: above 1
# a product is wrong, and is not timed. `status` tells what was not measured, and why.
#
# **A speed is a count over a time.** Compute a column yourself before you trust it:


# %%
def gflops(m, n, k, microseconds):
    return None  # your answer: a multiply-add is two operations


# %%
rows = frame[frame["stage"] == "auto"]
right_answers = [
    ((m, n, k, us), gemm_flops(m, n, k) / us / 1e3)
    for m, n, k, us in rows[["m", "n", "k", "median_us"]].itertuples(index=False)
]
answered = notebook.check(gflops, *right_answers)

# %% [markdown]
# A solution:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def gflops(m, n, k, microseconds):
    # Operations a microsecond are millions a second.
    return 2 * m * n * k / microseconds / 1e3


assert notebook.check(gflops, *right_answers)
# As the table has it.
assert np.allclose([right for _, right in right_answers], rows["gflops"], rtol=1e-4)

# %% [markdown]
# **The climb at one size**, and all stages under the GPU's two roofs: what its arithmetic can do at most, and what its
# memory can bring for a product that reads its operands once.

# %%
environment = frame.attrs["environment"]
draw.ladder_chart(frame, environment)

# %%
draw.roofline_chart(frame, environment)

# %% [markdown]
# **At every size.** `pivot_table` puts shapes into rows and stages into columns:

# %%
timed = frame[(frame["status"] == "ok") & (frame["precision"] == "ieee")]
table = timed.pivot_table(
    index=["m", "n", "k"], columns="stage", values="ratio_to_cublas", sort=False
)
table[["double_buffered", "stream_k", "auto"]].round(3)

# %% [markdown]
# **Is a difference significant?** Each time is the median of many rounds, and the middle eight tenths of them are
# between `p10_us` and `p90_us`. Two contenders differ if these spans do not overlap. At what percentage of the shapes
# is `tiled_sgemm` faster than cuBLAS by this criterion?

# %%
ahead = notebook.predict("shapes at which tiled_sgemm is faster", ..., unit="%")

# %% [markdown]
# The spans of cuBLAS, in black, and those of the public function, over cuBLAS's median:

# %%
spans = {}
for stage in ("auto", "cublas"):
    own = timed[timed["stage"] == stage].set_index(["m", "n", "k"])
    spans[stage] = own[["p10_us", "median_us", "p90_us"]]
unit = spans["cublas"]["median_us"]


def named_shape(shape):
    return " x ".join(map(str, shape))


figure = Figure(figsize=(7.2, 4.2), dpi=100, layout="constrained")
axes = figure.add_subplot()
names = list(map(named_shape, unit.index))
contenders = (
    ("cublas", "cuBLAS", draw.CUBLAS, -0.15),
    ("auto", "tiled_sgemm", draw.CHOICE, 0.15),
)
for stage, named, colour, shift in contenders:
    relative = spans[stage].loc[unit.index].div(unit, axis=0)
    places = np.arange(len(names)) + shift
    axes.hlines(
        places, relative["p10_us"], relative["p90_us"], color=colour, linewidth=3
    )
    axes.plot(
        relative["median_us"], places, "|", color=colour, markersize=7, label=named
    )
axes.set_yticks(range(len(names)), labels=names, fontsize=8)
axes.invert_yaxis()
axes.set_xlabel("time over cuBLAS's median; less is faster")
axes.legend()
figure

# %%
ours, theirs = spans["auto"], spans["cublas"]
faster, slower = ours["p90_us"] < theirs["p10_us"], ours["p10_us"] > theirs["p90_us"]
print(f"faster than cuBLAS beyond the spread: {faster.sum()} of {len(unit)} shapes")
print("slower beyond the spread:", ", ".join(map(named_shape, unit.index[slower])))
ahead.reveal(100 * faster.sum() / len(unit), measured=True)

# %% [markdown]
# **Speed against error.** The table of precisions contains errors and times. (FP32 is slower in it than in the table
# above: it was timed in turns with tensor cores, which bring the card to its power limit, and clocks fall. Errors
# depend on the operands. Compare within a table, not across two.) How large is the median error of `bf16x6`, divided by
# that of `ieee`? And that of `tf32`?

# %%
error_of_six = notebook.predict("error of bf16x6 over that of ieee", ...)
error_of_tf32 = notebook.predict("error of tf32 over that of ieee", ...)

# %%
precise = notebook.recorded("latest/precisions/results.csv")
chosen = precise[
    (precise["stage"] == "auto") & (precise[["m", "n", "k"]] == 4096).all(axis=1)
]
library = precise[(precise["stage"] == "cublas") & (precise["precision"] == "ieee")]
library = library[(library[["m", "n", "k"]] == 4096).all(axis=1)]

figure = Figure(figsize=(7.2, 3.6), dpi=100, layout="constrained")
axes = figure.add_subplot()
for rows, colour, marker in ((chosen, draw.CHOICE, "*"), (library, draw.CUBLAS, "x")):
    axes.plot(
        rows["error_median"], rows["gflops"] / 1e3, marker, color=colour, markersize=9
    )
    for row in rows.to_dict("records"):
        name = "cuBLAS SGEMM" if row["stage"] == "cublas" else row["precision"]
        place, shift = (
            (row["error_median"], row["gflops"] / 1e3),
            (7, -10 if marker == "x" else 3),
        )
        axes.annotate(name, place, shift, textcoords="offset points", fontsize=9)
axes.set(
    xscale="log",
    yscale="log",
    xlabel="median error over abs(A) @ abs(B)",
    ylabel="TFLOP/s",
)
axes.set_title(f"4096 x 4096 x 4096, {precise.attrs['source']}", fontsize=9)
axes.set_yticks([50, 100, 200, 400], labels=["50", "100", "200", "400"])
axes.yaxis.set_minor_formatter(NullFormatter())
axes.margins(x=0.15, y=0.12)
axes.grid(True, which="both", alpha=0.2)
figure

# %% [markdown]
# The upper left is best: fast and accurate.

# %%
by_precision = chosen.set_index("precision")["error_median"]
error_of_six.reveal(
    by_precision["bf16x6"] / by_precision["ieee"], measured=True, tolerance=0.3
)
error_of_tf32.reveal(
    by_precision["tf32"] / by_precision["ieee"], measured=True, tolerance=0.3
)

# %% [markdown]
# **On this machine.** `notebook.measure` runs the same benchmark here, if there is a GPU. Which percentage of the peak
# of the FP32 units does `tiled_sgemm` ("auto") reach at 4096 x 4096 x 4096?

# %%
of_peak = notebook.predict("speed of tiled_sgemm", ..., unit="% of the peak")

# %%
results = notebook.measure("stream_k", "auto")
notebook.compare(results)

# %%
table, percent = (
    notebook.compare(results),
    results.set_index("stage")["percent_of_peak"],
)
ratio = table.loc["stream_k", "measured ms"] / table.loc["stream_k", "predicted ms"]
of_peak.reveal(
    percent["auto"],
    model=percent["stream_k"] * ratio,
    because="The model is that of stream_k, which auto chooses here: equal shares of\n"
    "multiply-adds, at the highest rate that a kernel of FFMA alone reached.",
)

# %% [markdown]
# ## The open question
#
# You have seen the project's kernels: what each stage does, how to look into it, and how to verify and time it. What
# would yours look like? That is [notebook 12](12_write_your_own.ipynb).
