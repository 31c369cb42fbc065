# %% [markdown]
# # 9. Float32 from narrow numbers: tensor cores
#
# *Before this: [notebook 8](08_equal_shares.ipynb); notebook 7 for asynchronous copies. Time: about 90 minutes.*
#
# **The question.** After notebook 8 every multiprocessor is busy to the end, and nearly all instructions of the loop
# are multiply-adds. The limit now is the number of FP32 multiply-adds per second. The GPU has other units, **tensor
# cores**, which perform many times as many; but they multiply numbers of 8 or 11 bits. Can a float32 product consist of
# these, and be as accurate?
#
# It can. This notebook decomposes float32 into narrow parts, finds the products of parts that are needed, and shows why
# adding them up is the harder half: tensor cores truncate instead of rounding. The result is a product that is faster
# than cuBLAS's float32, and more accurate.
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
import io
import os
import textwrap

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numba import cuda, float32, int64

from numba_gemm.device import narrow
from numba_gemm.inspect import draw, step, trace
from numba_gemm.kernels.tensor_core import (
    TENSOR_PRECISIONS,
    TENSOR_STAGES,
    accumulate,
    decompose,
)
from numba_gemm.kernels.tensor_core.config import ROW_WORDS, parts_shape
from numba_gemm.kernels.tensor_core.pipeline import group_store
from numba_gemm.models.accuracy import TENSOR_BOUNDS, bound
from numba_gemm.simulator import scheduler
from numba_gemm.simulator.tensor_core import add_products

# %% [markdown]
# ## What a tensor core multiplies
#
# A tensor core multiplies a small matrix of A by another of B, and adds the product to a small matrix of float32 sums:
# thousands of multiply-adds in one instruction. On Hopper, four warps issue it together, a **warpgroup** of 128
# threads, and it reads 64 rows of A from shared memory. The sums are in the registers of all 128 threads, 16 rows per
# warp. The picture shows the thread that holds each of 32 x 16 sums, for the first two warps, from a trace of the
# project's own store. Each thread has eight, in pairs of neighbours:

# %%
store = group_store(16)


@cuda.jit
def holds(c):
    own = cuda.local.array((2, 4), float32)  # eight sums per thread
    store(c, int64(0), int64(0), float32(1), own, float32(0))


found = trace(holds, 1, 128, np.zeros((32, 16), np.float32))
draw.thread_map(found, "c", "store")

# %% [markdown]
# The elements of A and B are narrow. A float consists of a sign, an exponent, and a fraction after a leading 1 that is
# not stored; the narrow formats have fewer bits. The functions of `numba_gemm.device.narrow` round to them. Here are a
# third in each format, and the remainder:


# %%
def bits(value):
    """Sign, exponent and fraction of a float32."""
    word = f"{np.float32(value).view(np.uint32):032b}"
    return f"{word[0]} {word[1:9]} {word[9:]}"


third = np.float32(1 / 3)
print(f"{'float32':8} {bits(third)}  {third:.9f}")
for name, nearest in {
    "tf32": narrow.tf32,
    "f16": narrow.f16,
    "bf16": narrow.bf16,
}.items():
    kept = nearest(third)
    print(f"{name:8} {bits(kept)}  {kept:.9f}, left over {third - kept:+.2e}")

# %% [markdown]
# TF32 and F16 keep 11 significant bits (the leading 1 counts), BF16 keeps 8. TF32 and BF16 have the exponents of
# float32; F16 has shorter ones, and ends at 65,504 and near $2^{-24}$, so its rows have to be scaled first.
#
# ## The idea: the remainder is a number, too
#
# The remainder of rounding is a float32 itself, and smaller. Round it, and the remainder is smaller still. Three parts
# of 8 bits have 24 bits, as many as a float32. Nothing is lost, since each subtraction is exact.
#
# The kernel that decomposes reads A and B once and writes their parts. Here one of its threads decomposes a third and
# -e, in the precision `bf16x6`. Its `first` rounds the first part, `narrow` all further ones; two BF16 share a 32-bit
# word.

# %%
six = TENSOR_PRECISIONS["bf16x6"]
x = np.zeros((32, six.slot_k), np.float32)
x[0, :2] = third, -np.e
x_parts, y_parts = (
    np.zeros(parts_shape(six, 32, six.slot_k, 32), np.float32) for _ in range(2)
)
launch = (
    decompose.build(six),
    (2, 1),
    decompose.THREADS,
    x,
    x_parts,
    x,
    y_parts,
    (0,) * 4,
)

begun = None
with step(*launch, thread=0, into="numba_gemm.kernels.tensor_core.decompose") as steps:
    for s in steps:
        if (
            s.function != "decompose_block"
            or s.locals.get("w") != 0
            or "p" not in s.locals
        ):
            continue
        p, values = int(s.locals["p"]), s.locals["values"]
        # And not again, when a function that it calls returns.
        if s.source.startswith("low =") and p != begun:
            print(
                f"part {p}:  values[0] = {values[0]:+.6e}, values[1] = {values[1]:+.6e}"
            )
            begun = p
        elif s.source.startswith("words[w] ="):
            print(
                f"{'low':>12} = {s.locals['low']:+.6e},      "
                f"high = {s.locals['high']:+.6e}: left are",
                values[:2],
            )
            if p == six.parts - 1:
                break

# %% [markdown]
# The remainder in each line is the value in the next, and after the third part it is zero. The lines of the kernel
# (F16, with less range than BF16, has rows and second parts that are scaled by powers of two):

# %%
text = str(notebook.source("decompose", function="decompose_block"))
start = text.rindex("\n", 0, text.index("for p in range(PARTS)")) + 1
end = text.rindex("\n", 0, text.index("cuda.syncthreads()", start))
notebook.Listing(textwrap.dedent(text[start:end]), "python")

# %% [markdown]
# A thread reads eight neighbours of a row, 32 bytes, in two loads of 16. So each request of a warp touches twice as
# many sectors as its bytes fill, but the second load can find its sectors in L1. All stores of parts go through shared
# memory, so that they fill whole lines. (The accesses of 32 bits are for a mark per row, which tells whether an element
# is NaN, infinite or very large.)

# %%
traced = trace(*launch, blocks=[(0, 0, 0)])
traced.lines[["array", "op", "bits", "requests", "per_request", "efficiency"]]

# %%
draw.thread_map(traced, "x", "load")

# %% [markdown]
# ## Your turn: decompose a number
#
# Return the three parts of `x` as a tuple: the first rounded by `narrow.short_bf16`, which keeps seven bits instead of
# eight (a later section explains why), the two others by `narrow.bf16`. The next cell compares your answer with the
# output of the kernel.


# %%
def decompose_in_three(x):
    return None  # your answer: a tuple of three


# %%
def kernels_parts(values):
    """Return the kernel's parts of numbers in row 0, one row per part."""
    x = np.zeros((32, six.slot_k), np.float32)
    x[0, : len(values)] = values
    parts = [
        np.zeros(parts_shape(six, 32, six.slot_k, 32), np.float32) for _ in range(2)
    ]
    scheduler.run(
        decompose.build(six),
        (2, 1),
        decompose.THREADS,
        (x, parts[0], x, parts[1], (0,) * 4),
    )
    # Row 0, in its order.
    halves = np.ascontiguousarray(parts[0][:, :ROW_WORDS]).view(np.uint16)
    return (halves.astype(np.uint32) << 16).view(np.float32)[:, : len(values)]


numbers = np.array([third, -np.e, np.pi, 1 + 2**-7, 1e30, 123456.789], np.float32)
right = [
    ((x,), tuple(parts))
    for x, parts in zip(numbers, kernels_parts(numbers).T, strict=True)
]
answered = notebook.check(decompose_in_three, *right)

# %% [markdown]
# A solution, if you want to see one:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def decompose_in_three(x):
    first = narrow.short_bf16(x)
    second = narrow.bf16(x - first)
    return first, second, narrow.bf16(x - first - second)


assert notebook.check(decompose_in_three, *right)

# %% [markdown]
# ## Which products
#
# With $a = a_0 + a_1 + a_2$ and $b$ alike, $ab$ is the sum of nine products of parts. Each is exact in float32: 8 bits
# times 8 bits are 16. But they differ in size: each part is about $2^{-8}$ times as large as the part before. A float32
# sum is rounded at $2^{-24}$ of its size. How many of the nine products are not smaller than that?

# %%
counting = notebook.predict("products of parts that count, of nine", ...)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
KINDS = {"tf32": narrow.tf32, "bf16": narrow.bf16, "f16": narrow.f16}


def parts_of(x, precision):
    """The kernel's parts of a matrix, in float64 (F16 without scales)."""
    first = narrow.short_bf16 if precision.short else KINDS[precision.kind]
    first, further = (
        np.vectorize(rounding, otypes=[np.float32])
        for rounding in (first, KINDS[precision.kind])
    )
    rest, parts = x, []
    for p in range(precision.parts):
        parts.append((first if p == 0 else further)(rest))
        rest = rest - parts[-1]
    return [part.astype(np.float64) for part in parts]


def table(rows, index, **formats):
    """A table with the numbers of each column in a format; missing ones stay empty."""
    shown = (
        rows if isinstance(rows, pd.DataFrame) else pd.DataFrame(rows).set_index(index)
    )
    shown = shown.astype(object)
    for column, how in formats.items():
        column = column.replace("_", " ") if column not in shown else column
        shown[column] = [
            format(value, how) if pd.notna(value) else "" for value in shown[column]
        ]
    return shown.fillna("")


rng = np.random.default_rng(9)
a, b = (
    rng.uniform(-1, 1, (64, 64)).astype(np.float32),
    rng.uniform(-1, 1, (64, 64)).astype(np.float32),
)
size = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64))
a_parts, b_parts = (
    parts_of(a, TENSOR_PRECISIONS["bf16x9"]),
    parts_of(b, TENSOR_PRECISIONS["bf16x9"]),
)
share = np.array(
    [[np.median(np.abs(i) @ np.abs(j) / size) for j in b_parts] for i in a_parts]
)

figure = Figure(figsize=(4.6, 3.6), layout="constrained")
axes = figure.add_subplot()
shown = axes.imshow(np.log2(share), cmap="Greens", vmin=-34, vmax=6)
for (i, j), value in np.ndenumerate(share):
    taken = " *" if (i, j) in TENSOR_PRECISIONS["bf16x6"].products else ""
    axes.text(
        j, i, f"2^{int(np.rint(np.log2(value)))}{taken}", ha="center", va="center"
    )
axes.set(xlabel="part of B", ylabel="part of A", xticks=range(3), yticks=range(3))
axes.set_title("products of parts over |A| @ |B|; * are in bf16x6", fontsize=10)
counting.reveal(len(TENSOR_PRECISIONS["bf16x6"].products))
figure

# %% [markdown]
# The three products without a star are smaller: `bf16x6` leaves them out, `bf16x9` does not. Two parts of 11 bits have
# 22 bits, and three of their four products count: `tf32x3` and `fp16x3`. `bf16x3` does the same with two parts of 8
# bits.
#
# So a **precision** is a format, a number of parts, and a list of products. How large would the error of each be, if
# sums were exact?

# %%
normal = (
    rng.standard_normal((32, 128)).astype(np.float32),
    rng.standard_normal((128, 32)).astype(np.float32),
)
exact = normal[0].astype(np.float64) @ normal[1].astype(np.float64)
size = np.abs(normal[0]).astype(np.float64) @ np.abs(normal[1])
rows = []
for name, precision in TENSOR_PRECISIONS.items():
    x, y = (parts_of(operand, precision) for operand in normal)
    made = sum(x[i] @ y[j] for i, j in precision.products)
    error = np.abs(made - exact) / size
    row = {
        "precision": name,
        "parts": precision.parts,
        "products": len(precision.products),
    }
    rows.append(row | {"median error": np.median(error), "largest": error.max()})
in_float32 = np.abs((normal[0] @ normal[1]) - exact) / size
rows.append(
    {
        "precision": "NumPy float32",
        "median error": np.median(in_float32),
        "largest": in_float32.max(),
    }
)
table(rows, "precision", parts=".0f", products=".0f", median_error=".1e", largest=".1e")

# %% [markdown]
# The decomposition is not the limit: `bf16x6` with exact sums is more accurate than float32's own arithmetic.
#
# ## Why the sum must be outside the tensor cores
#
# Sums are not exact. Float32 multiply-adds round each sum to the nearest float, up as often as down, and most errors
# cancel. Tensor cores **truncate**: they round towards zero. In a sum of numbers of one sign, each step then makes the
# sum a little too small, and no later step makes up for it: the sum drifts.
#
# NVIDIA does not document the adder, so the package has a *model* of it. One instruction adds the products of 8 terms
# of TF32 (16 of BF16) to the running sum. All are aligned to the largest exponent, truncated a few bits after the 24 of
# a float, and added exactly; the sum is truncated to 24 bits. The number of additional bits, `extra`, is the only free
# parameter of the model. Adders of this kind were found in older tensor cores by Fasi, Higham, Mikaitis and Pranesh
# (2021, doi:10.7717/peerj-cs.330).

# %%
notebook.source("simulator/tensor_core", function="add_products")

# %%
notebook.source("simulator/tensor_core", function="truncate")

# %% [markdown]
# Now a long sum of positive numbers in TF32, all inside the tensor cores: the model with 0 to 3 additional bits, and
# the errors of the H200 (`tf32` of positive operands in the recorded table).

# %% jupyter={"source_hidden": true} tags=["hide-input"]
accuracy = notebook.recorded("latest/precisions/accuracy.csv")
ks = sorted(k for k in set(accuracy["k"]) if 256 <= k <= 16384)
positive = accuracy[accuracy["distribution"] == "positive"].pivot(
    index="k", columns="precision", values="median"
)

a, b = (
    rng.random((12, ks[-1])).astype(np.float32),
    rng.random((12, ks[-1])).astype(np.float32),
)
(x,), (y,) = (
    parts_of(a, TENSOR_PRECISIONS["tf32"]),
    parts_of(b, TENSOR_PRECISIONS["tf32"]),
)
wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
drift = pd.DataFrame(index=pd.Index(ks, name="k"))
for extra in range(4):
    acc, errors = np.zeros((12, 12)), {}
    for k in range(0, ks[-1], 8):
        acc = add_products(acc, x[:, None, k : k + 8] * y[None, :, k : k + 8], extra)
        if k + 8 in ks:
            exact = wide_a[:, : k + 8] @ wide_b[:, : k + 8].T
            errors[k + 8] = np.median(np.abs(acc - exact) / exact)
    drift[f"model, {extra} more bits"] = pd.Series(errors)
drift["recorded"] = positive["tf32"]

figure = Figure(figsize=(7, 3.6), layout="constrained")
axes = figure.add_subplot()
for column, colour in zip(
    drift.columns, ("#E69F00", "#CC79A7", "#0072B2", "#56B4E9", "black"), strict=True
):
    look = (
        {"linestyle": "none", "marker": "o", "zorder": 3}
        if column == "recorded"
        else {"linewidth": 1.6}
    )
    axes.plot(drift.index, drift[column], color=colour, label=column, **look)
axes.set_xscale("log", base=2)
axes.set_yscale("log")
axes.set(xlabel="K", ylabel="median error over |A| @ |B|")
axes.set_title(f"tf32, positive operands; {accuracy.attrs['source']}", fontsize=10)
axes.legend(fontsize=8)
figure

# %% [markdown]
# First the error falls: roundings of A and B cancel in longer sums. Then the drift dominates, and grows in proportion
# to K. From K = 4096 on the recorded points are near the model's line with two additional bits, and near no other. That
# is a good reason to trust the model in the following sections, and no proof that the adder is built so.
#
# ## One warp, without a GPU
#
# The simulator's matrix instruction uses this model, with two additional bits. So the smallest stage on tensor cores,
# `one_warp`, runs without a GPU. One warp computes 16 x 8 elements of C. Each of its 32 lanes loads its **fragments**,
# eight elements of A and four of B, from global memory and rounds them to BF16. Then one instruction multiplies the
# fragments of all lanes and adds the products to four sums per lane:

# %%
notebook.source("one_warp", function="one_warp")

# %% [markdown]
# Lane 5 holds rows 1 and 9 of its sums, in columns 2 and 3. For each turn of the loop, here are two of its words, each
# with two BF16, and its sums after the instruction:

# %%
warp_a, warp_b = np.random.default_rng(5).random((2, 16, 64)).astype(np.float32)
warp_b, warp_c = np.ascontiguousarray(warp_b[:8].T), np.zeros((16, 8), np.float32)


def halves(word):
    """The two BF16 of a word."""
    return (np.array([word], np.uint32).view(np.uint16).astype(np.uint32) << 16).view(
        np.float32
    )


with step("one_warp", None, None, 1.0, warp_a, warp_b, 0.0, warp_c, thread=5) as steps:
    for s in steps:
        if s.source == "k += K":
            k, left, right, acc = (
                s.locals[name] for name in ("k", "left", "right", "acc")
            )
            print(
                f"k = {k:2}:  A {halves(left[0])},  B {halves(right[0])},"
                f"  sums {np.array(acc)}"
            )

# %% [markdown]
# The result is that of the model to the bit. It is smaller than the exact product of the rounded operands, because
# every instruction truncates:

# %%
rounded_a, rounded_b = (
    np.vectorize(narrow.bf16)(operand).astype(np.float64)
    for operand in (warp_a, warp_b)
)
acc = np.zeros((16, 8))
for k in range(0, 64, 16):
    acc = add_products(
        acc, rounded_a[:, None, k : k + 16] * rounded_b.T[None, :, k : k + 16]
    )
assert np.array_equal(acc, warp_c)
too_small = (rounded_a @ rounded_b - warp_c) / (rounded_a @ rounded_b)
print(f"too small by {too_small.min():.1e} to {too_small.max():.1e} of an element;")
print(f"2^-24 is {2.0**-24:.1e}")

# %% [markdown]
# `trace` shows the cost of loading fragments directly: a request of A touches eight rows, and uses half of each
# sector.

# %%
traced = trace("one_warp", None, None, 1.0, warp_a, warp_b, 0.0, warp_c)
traced.lines[["array", "op", "bits", "requests", "per_request", "efficiency"]]

# %% [markdown]
# ## Three ways to sum
#
# `bf16x6` has six products of parts, so a sum inside the tensor cores is truncated six times as often. At K = 4096,
# with all bits of A and B in the parts, by what factor is its error larger (above 1) or smaller (below 1) than that of
# cuBLAS's FP32? And if each slot of 64 terms is summed inside, and the slots' sums are added outside?

# %%
all_inside = notebook.predict("error over that of FP32, all inside", ...)
slots_inside = notebook.predict("error over that of FP32, slots inside", ...)

# %% [markdown]
# Three ways to sum, of three stages. *All inside*. *Afresh*: the tensor cores sum one slot of 64 terms from zero, and
# the slot's sum is added outside, in FP32, which rounds. *Compensated*: afresh, and two more operations compute the
# rounding error of each addition outside, with which the next slot's sum begins. The steps outside are the project's
# own device functions, which the simulator runs (`numba_gemm/kernels/tensor_core/accumulate.py`):

# %%
notebook.source("accumulate", function="add_exactly")

# %%
terms, m, n = 4096, 8, 8
a, b = (
    rng.random((m, terms)).astype(np.float32),
    rng.random((n, terms)).astype(np.float32),
)
a_parts, b_parts = parts_of(a, six), parts_of(b, six)
exact = a.astype(np.float64) @ b.astype(np.float64).T
# The steps take sums in groups of four, as a thread holds them.
columns = m * n // 4 * 8
clear, add, add_exactly, _, finish = accumulate.steps(columns)


def slot(acc, s, products):
    """The model on slot s: the chosen products of parts, the smallest first."""
    acc = np.asarray(acc, np.float64).reshape(m, n)
    for i, j in products:
        for k in range(six.slot_k * s, six.slot_k * (s + 1), 16):
            acc = add_products(
                acc, a_parts[i][:, None, k : k + 16] * b_parts[j][None, :, k : k + 16]
            )
    return acc.astype(np.float32).reshape(-1, 4)


inside, afresh, total, left = (np.zeros((m * n // 4, 4), np.float32) for _ in range(4))
zero = np.zeros_like(total)
for s in range(terms // six.slot_k):
    inside = slot(inside, s, six.products)
    add(afresh, slot(zero, s, six.products))
    left = slot(left, s, six.products)  # begins with what was rounded off
    add_exactly(total, left)  # what is rounded off becomes `left`
finish(total, left)

ladder = notebook.recorded("latest/precisions/tensor_ladder.csv").set_index("stage")
ladder = ladder.drop(index="one_warp")  # in bf16, as above
ways = {
    "wide_tiles": ("all inside", inside),
    "fresh_sums": ("afresh", afresh),
    "persistent": ("compensated", total),
}
rows = [
    {
        "sum": how,
        "model": np.median(np.abs(c.reshape(m, n) - exact) / exact),
        "stage": stage,
    }
    | {"recorded": ladder.loc[stage, "error_median"]}
    for stage, (how, c) in ways.items()
]
rows.append(
    {
        "sum": "FP32, cuBLAS",
        "stage": "cublas",
        "recorded": ladder.loc["cublas", "error_median"],
    }
)
print(ladder.attrs["source"])
table(rows, "sum", model=".2e", recorded=".2e")

# %% [markdown]
# %%
fp32 = ladder.loc["cublas", "error_median"]
all_inside.reveal(
    ladder.loc["wide_tiles", "error_median"] / fp32,
    model=rows[0]["model"] / fp32,
    because="Every truncation makes the sum smaller.",
    tolerance=0.2,
)
slots_inside.reveal(
    ladder.loc["fresh_sums", "error_median"] / fp32,
    model=rows[1]["model"] / fp32,
    tolerance=0.2,
)

# %% [markdown]
# All inside is worse than FP32, although the parts contain every bit. Afresh is far better, and compensated the error
# is about that of rounding the result once: it no longer grows with K. This is also why first parts have seven bits
# and not eight: their products are shorter, so fewer bits of a slot's sum are truncated. (Sums below K = 1024 have few
# terms, errors average out less, and `bf16x6` begins afresh every 16 terms, not every 64, with the small products
# apart, at some cost in time: see [docs/precision.md](../docs/precision.md).)
#
# The loop for long sums. A warp that starts products (`everything`) waits until the tensor cores have nearly completed
# them, so they would idle while it adds. In tiles of two warpgroups these alternate (`take` and `hand_over`): one adds
# while the other multiplies.

# %%
notebook.source("accumulate", function="add_slot")

# %%
notebook.source("accumulate", function="compensated")

# %% [markdown]
# ## Error against K
#
# For each K, the errors of a product of 512 x 512 of operands that are difficult to sum
# (`numba_gemm.lab.bench.accuracy`): the median over C, and dashed the largest. If this machine has a suitable GPU, a
# few K are computed on it now; otherwise the picture shows the recorded run.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
ABLE = """
from numba_gemm.gemm.precision import runnable
from numba_gemm.runtime.device import current_device, device_properties
print(*runnable(device_properties(current_device()).cc))
"""
ERRORS = """
import sys
import pandas as pd
from numba_gemm.lab.bench.accuracy import EXTENT, measured
ks, precisions = [16, 64, 256, 1024, 4096, 16384], ["ieee", "tf32", "tf32x3", "bf16x6"]
found = measured(ks, EXTENT, 1, precisions)
pd.DataFrame(found).to_csv(sys.stdout, index=False)
"""


def on_gpu(code):
    """What Python prints in a process of its own, which uses the GPU."""
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


able = on_gpu(ABLE).split() if notebook.has_gpu() else ["ieee", *TENSOR_PRECISIONS]
errors, where = accuracy, accuracy.attrs["source"]
if notebook.has_gpu() and "bf16x6" in able and importlib.util.find_spec("torch"):
    errors, where = pd.read_csv(io.StringIO(on_gpu(ERRORS))), "measured now"

looks = {
    "cublas": "black",
    "ieee": "#56B4E9",
    "tf32": "#E69F00",
    "tf32x3": "#0072B2",
    "bf16x6": "#D55E00",
}
figure = Figure(figsize=(10, 4), layout="constrained")
for axes, kind in zip(
    figure.subplots(1, 3, sharey=True),
    ("positive", "uniform", "just_above_one"),
    strict=True,
):
    for precision, colour in looks.items():
        own = errors[
            (errors["distribution"] == kind) & (errors["precision"] == precision)
        ].sort_values("k")
        axes.plot(own["k"], own["median"], color=colour, label=precision)
        axes.plot(own["k"], own["max"], color=colour, linestyle="--", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(kind.replace("_", " "), fontsize=10)
    axes.set_xlabel("K")
figure.axes[0].set_ylabel("error over |A| @ |B|")
figure.axes[0].legend(fontsize=8)
figure.suptitle(where, fontsize=10)
figure

# %% [markdown]
# `tf32` alone is three or four digits less accurate. `tf32x3`, whose sums are folded but not compensated, is near FP32,
# and less accurate if all truncated parts have one sign. The error of `bf16x6` does not grow with K at all, and falls
# if signs are mixed. (cuBLAS's error at K = 4096 is far smaller here than in the table above, where C is 4096 x 4096.
# Presumably it divides the long sums of a small C among blocks, as notebook 8 does, and shorter sums round less.)
#
# ## Guaranteed bounds
#
# [docs/precision.md](../docs/precision.md) states the bounds of `numba_gemm.models.accuracy`. The table compares them
# with the largest errors of the recorded run, over all operands and K. (The bound of `fp16x3` is in other units for
# elements below 2^-28 of the largest in their row or column, as log-uniform operands have: relative to the largest.)

# %%
rows = []
for name in (
    "ieee",
    *(name for name in TENSOR_BOUNDS if name in set(accuracy["precision"])),
):
    own = accuracy[accuracy["precision"] == name]
    if name == "fp16x3":
        own = own[own["distribution"] != "log_uniform"]
    used = own["max"] / [bound(name, k) for k in own["k"]]
    rows.append(
        {
            "precision": name,
            "largest error": own["max"].max(),
            "of its bound": used.max(),
            "at K": own["k"][used.idxmax()],
        }
    )
assert all(row["of its bound"] <= 1 for row in rows)
table(rows, "precision", largest_error=".1e", of_its_bound=".0%")

# %% [markdown]
# Infinities, NaN and overflow in the precisions of several parts are as in NumPy, with
# [one exception](../docs/precision.md#range): an element of C that is NaN, infinite or nearly so is computed again, by
# FP32 multiply-adds. No less accurate precision is chosen silently: the default is `precision="ieee"`, and you must
# name a less accurate one.
#
# ## Prediction, model and measurement
#
# A product of n products of parts should take n times as long as one of them, plus the time in which the bytes of the
# decomposition move: each float is read, once more for F16's scales, and its parts are written. `bf16` is one product,
# and so is `tf32`, which on Hopper reads A and B without a decomposition. So two measured times predict the others.
# How many times as fast as cuBLAS's FP32 is `bf16x6`, with six products, if `bf16` is ten times as fast?

# %%
speed_of_six = notebook.predict("bf16x6, times as fast as cuBLAS FP32", ...)

# %%
# Those with recorded errors.
timed = [name for name in TENSOR_PRECISIONS if name in set(accuracy["precision"])]
precisions = [name for name in able if name in timed]
if precisions:
    results = notebook.measure("auto", precisions=precisions)
else:
    print(
        "This GPU has no tensor cores for these precisions; these times were recorded:"
    )
    precisions, results = timed, notebook.recorded("latest/precisions/results.csv")
    chosen = (results[["m", "n", "k"]] == 4096).all(axis=1) & results["stage"].isin(
        ["auto", "cublas"]
    )
    results = results[chosen & (results["layout"] == "nn")]

gpu = results.attrs["environment"]["gpu"]
shape = tuple(map(int, results[["m", "n", "k"]].iloc[0]))
# Each contender alone, once its clock has settled. In turns, tensor cores slow down the
# others: they take so much power that the clock falls.
results = results.assign(
    median_us=results["steady_us"], gflops=results["steady_gflops"]
)


def decomposition_us(precision):
    """Microseconds for the bytes of the decomposition, at the memory's bandwidth."""
    each = 4 * (1 + precision.scaled) + precision.parts * 4 // precision.per_word
    elements = shape[0] * shape[2] + shape[2] * shape[1]
    return elements * each / gpu["bandwidth_gb_s"] / 1e3


ours = results[results["stage"] == "auto"].set_index("precision")
theirs = results[results["stage"] == "cublas"].set_index("precision")
one = {
    "bf16": ours.loc["bf16", "median_us"] - decomposition_us(TENSOR_PRECISIONS["bf16"]),
    "tf32": ours.loc["tf32", "median_us"],
}
one["f16"] = one["bf16"]  # as many a clock
rows = []
for name in ("ieee", *precisions):
    precision, us = TENSOR_PRECISIONS.get(name), ours.loc[name, "median_us"]
    several = precision is not None and len(precision.products) > 1
    rows.append(
        {
            "precision": name,
            "predicted ms": (
                len(precision.products) * one[precision.kind]
                + decomposition_us(precision)
            )
            / 1e3
            if several
            else np.nan,
            "measured ms": us / 1e3,
            "TFLOP/s": ours.loc[name, "gflops"] / 1e3,
            "of cuBLAS FP32": theirs.loc["ieee", "median_us"] / us,
            "of cuBLAS so": theirs.loc[name, "median_us"] / us
            if name in theirs.index
            else np.nan,
        }
    )
speeds = pd.DataFrame(rows).set_index("precision")
columns = {
    "predicted ms": ".2f",
    "measured ms": ".2f",
    "of cuBLAS FP32": ".2f",
    "of cuBLAS so": ".2f",
}
table(speeds, "", **columns, **{"TFLOP/s": ".0f"})

# %%
if "bf16x6" in speeds.index:
    took = theirs.loc["ieee", "median_us"] / 1e3
    predicted, measured = speeds.loc["bf16x6", ["predicted ms", "measured ms"]]
    speed_of_six.reveal(took / measured, model=took / predicted)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
at = accuracy[
    (accuracy["distribution"] == "uniform") & (accuracy["k"] == 4096)
].set_index("precision")["median"]
figure = Figure(figsize=(7, 4), layout="constrained")
axes = figure.add_subplot()
for name in speeds.index:
    axes.plot(at[name], speeds.loc[name, "TFLOP/s"], "o", color="#D55E00")
    left = name in ("bf16x6", "bf16x9")  # beside others
    axes.annotate(
        name,
        (at[name], speeds.loc[name, "TFLOP/s"]),
        (-6 if left else 6, 4),
        textcoords="offset points",
        ha="right" if left else "left",
        fontsize=9,
    )
axes.plot(at["cublas"], theirs.loc["ieee", "gflops"] / 1e3, "x", color="black")
axes.annotate(
    "cuBLAS FP32",
    (at["cublas"], theirs.loc["ieee", "gflops"] / 1e3),
    (6, -12),
    textcoords="offset points",
)
axes.axhline(
    gpu["fp32_peak_gflops"] / 1e3,
    color="0.5",
    linestyle=":",
    label="peak of FP32 multiply-adds",
)
axes.set(
    xscale="log",
    yscale="log",
    xlabel="median error, K = 4096 (smaller is better)",
    ylabel="TFLOP/s",
)
axes.set_title(
    f"{shape[0]} x {shape[1]} x {shape[2]}: {results.attrs['source']}", fontsize=10
)
axes.margins(x=0.15, y=0.12)
axes.legend(loc="lower right", fontsize=9)
figure

# %% [markdown]
# On an H200 `bf16x6` is both faster and more accurate than `ieee`. It is faster than FP32 multiply-adds could be at
# their peak. The precisions to the right of FP32 are faster still, and less accurate; whether that is acceptable
# depends on your program.
#
# (`ieee` and cuBLAS are slower here than in notebook 8 if all precisions are timed in turns: tensor cores bring the
# card to its power limit, and clocks fall for all. Compare within a table, not across two. The last column, `of cuBLAS
# so`, compares with cuBLAS in the same precision, if it has it.)
#
# ## The ladder of tensor cores
#
# The kernels are a ladder of their own, one idea per file. On a GPU that has the instructions,
# `tiled_sgemm(a, b, stage="bulk_copies", precision="bf16x6")` runs one of them. Recorded at 4096 x 4096 x 4096, in
# `bf16x6`, with the decomposition apart:

# %%
print(ladder.attrs["source"])
climb = ladder.assign(ms=ladder["median_us"] / 1e3)[
    ["ms", "tflops", "ratio_to_cublas", "error_median", "registers"]
]
climb.loc["decompose", "ratio_to_cublas"] = np.nan  # it is no product
table(
    climb,
    "",
    ms=".2f",
    tflops=".0f",
    ratio_to_cublas=".2f",
    error_median=".1e",
    registers=".0f",
)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
stages = ladder.drop(index=["cublas", "decompose"])
figure = Figure(figsize=(7, 3.2), layout="constrained")
speed, error = figure.subplots(1, 2, sharey=True)
speed.barh(stages.index, stages["tflops"], color="#0072B2")
speed.axvline(
    ladder.loc["cublas", "tflops"], color="black", linestyle="--", label="cuBLAS FP32"
)
speed.set(xlabel="TFLOP/s")
figure.legend(loc="outside upper left", fontsize=8)
error.barh(stages.index, stages["error_median"], color="#D55E00")
error.axvline(ladder.loc["cublas", "error_median"], color="black", linestyle="--")
error.set(xscale="log", xlabel="median error, positive operands", xlim=(1e-9, None))
speed.invert_yaxis()
figure

# %% [markdown]
# The first stage after `one_warp`: all 128 threads copy a **slot**, 64 terms of k of every part, into shared memory; a
# barrier; then the tensor cores multiply it. `descriptor` tells them where the slot lies, `wait` until they are done.

# %%
notebook.source("one_warpgroup", function="one_warpgroup")

# %% [markdown]
# **Bulk copies.** `decompose` writes the parts in the order in which a slot holds them. So one thread requests a run of
# bytes, and the hardware copies it. An **mbarrier**, a barrier in shared memory, counts the bytes that have arrived.

# %%
notebook.difference("one_warpgroup", "bulk_copies", context=1, device_only=True)

# %% [markdown]
# **Producer and consumer.** Copying and multiplying took turns. Now a warpgroup of its own copies slot after slot into
# a ring of buffers, without the consumers' help; `full` and `empty` barriers hand slots over. Alone this gains next to
# nothing, as the table shows: the tensor cores are still idle whenever their one warpgroup waits.

# %%
notebook.difference("bulk_copies", "producer_consumer", context=1, device_only=True)

# %% [markdown]
# **Wide tiles.** The kernel is the same; its configuration has two warpgroups that multiply. While one waits, the other
# multiplies.

# %%
notebook.source("wide_tiles")

# %% [markdown]
# **Fresh sums.** `fresh=True` starts each slot at zero, and its sums are added outside. In the table: hardly slower,
# and far more accurate. From here on the ladder is better than FP32 in both.

# %%
notebook.difference("producer_consumer", "fresh_sums", context=1, device_only=True)

# %% [markdown]
# **Persistent.** As many blocks as multiprocessors, which compute one tile after the other; `sum_tile` is `compensated`
# from above; and the kernel has the operands, for elements that have to be computed again. Two blocks with tiles of the
# same columns of C may form a cluster: each copies half of B's tile to the shared memory of both, so a slot is free
# once the warps of both have given it back.

# %%
notebook.difference("fresh_sums", "persistent", context=1, device_only=True)

# %% [markdown]
# ## The open question
#
# The docstring of each stage states its limits. That of the last one:

# %%
head = str(notebook.source("persistent", doc=True)).partition('"""\n')[0]
print(head[head.index("Limits:") :])
print("all stages:", ", ".join(TENSOR_STAGES))

# %% [markdown]
# Power, and the movement of bytes. Since notebook 1 nearly every stage has been about moving data: coalesced, shared,
# vectorised, without bank conflicts, ahead of time, in bulk. Each followed a rule about memory. How good are these
# rules? [Notebook 10](10_memory_laboratory.ipynb) measures them, one at a time.
