# %% [markdown]
# # 7. Moving addresses, asynchronous copies, snake order: `moving_addresses`, `async_copy`, `snake_order`
#
# *Before this: [notebook 6](06_warp_tiles.ipynb). Time: about 100 minutes.*
#
# **The question.** `register_prefetch` computes from registers, with a tile for each level, and still one of its
# instructions in ten is not a multiply-add. Many of these move the next tile, from global memory into registers and
# from there into shared memory, and compute its addresses. Must data pass through registers to get there? And how many
# of the other instructions can be removed?
#
# Three stages answer. For the first and the last you read what the compiler made of a loop. The second is about
# asynchronous copies, and a mistake that is easily made with them.
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
import json
import os
import tempfile
from itertools import pairwise

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numba import cuda, float32

from numba_gemm.device.async_copy import commit_group, cp_async16, wait_group
from numba_gemm.inspect import draw, step, trace
from numba_gemm.inspect.ffma import clocks_by_ports
from numba_gemm.inspect.register_tile import RegisterTile, waits_on_maxwell
from numba_gemm.inspect.target import prepare
from numba_gemm.kernels.ladder import STAGES

# %% [markdown]
# ## The instructions of the loop
#
# A profiler counted the instructions that an H200 executed. A product of 4096 x 4096 x 4096 takes a known number of
# multiply-adds, M * N * K, and each instruction performs 32 of them, one per lane of a warp. (**FFMA** is the name of
# the instruction.) All other instructions are overhead:

# %%
counters = notebook.recorded("latest/counters.csv").set_index("stage")
print(counters.attrs["source"])
names = [
    "double_buffered",
    "warp_tiled",
    "register_prefetch",
    "moving_addresses",
    "async_copy",
    "snake_order",
]
counted = counters.loc[[name for name in names if name in counters.index]]
ffma = counted["m"] * counted["n"] * counted["k"] / 32
pd.DataFrame(
    {
        "instructions per FFMA": (counted["instructions"] / ffma).round(3),
        "one other in": (
            counted["instructions"] / (counted["instructions"] - ffma)
        ).round(1),
        "issue slots used, %": counted["issue_slots_percent"],
        "FMA pipe used, %": counted["fma_pipe_percent"],
    }
)

# %% [markdown]
# `one other in` is the number of instructions among which one is not an FFMA. A multiprocessor has four schedulers, and
# each issues at most one instruction of a warp per clock: an **issue slot**. The **FMA pipe** could take one each
# clock, so every other instruction takes a slot from it. Once memory is fast enough and latencies are hidden, only
# fewer instructions make the kernel faster.
#
# Which instructions are they? The compiler needs no GPU. It turns a kernel into **SASS**, the GPU's own instructions.
# `numba_gemm.inspect` finds the innermost loop that has multiply-adds, and the loop around it, which goes from one
# k-tile to the next. Numba is on the simulator in this notebook, so the compiler runs in processes of its own.
#
# A thread of these stages performs 2048 multiply-adds per k-tile. How many other instructions does it execute per
# k-tile in `register_prefetch`, and how many in `moving_addresses`, the next stage? Fragments alone take 96.

# %%
others_before = notebook.predict("other instructions, register_prefetch", ...)
others_now = notebook.predict("other instructions, moving_addresses", ...)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
CHILD = """
import json, sys
from numba_gemm.inspect.report import compiled
from numba_gemm.inspect.sass import instruction_mix, loops, main_loop
from numba_gemm.kernels.ladder import STAGES

stage = STAGES[sys.argv[1]]
config = stage.configs[0]
found = compiled(stage, config, (9, 0))
inner = main_loop(found.instructions)  # two k-steps
all_loops = loops(found.instructions)
around = [loop for loop in all_loops if loop.encloses(inner) and loop != inner]
mix = instruction_mix(min(around, key=lambda loop: len(loop.instructions)).instructions)
for name, count in instruction_mix(inner.instructions).items():
    mix[name] += (config.BK // 2 - 2) * count  # the outer loop has the last two k-steps
print(json.dumps({"products": config.BK * config.TM * config.TN, "mix": mix}))
"""


def k_tile_of(*names):
    """Instructions per k-tile in stages' main loops; {} without a compiler."""
    hardware = {
        key: value for key, value in os.environ.items() if key != "NUMBA_ENABLE_CUDASIM"
    }
    pipes = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "env": hardware,
    }
    children = {
        name: subprocess.Popen([sys.executable, "-c", CHILD, name], **pipes)
        for name in names
    }
    said = {name: child.communicate() for name, child in children.items()}
    for name, child in children.items():
        if child.returncode:
            print(f"no listing of {name}: {said[name][1].strip()[-500:]}")
            return {}
    return {name: json.loads(out) for name, (out, _) in said.items()}


listed = k_tile_of("register_prefetch", "moving_addresses", "async_copy")
for name, loop in listed.items():
    # Each product of the thread tile, once a k.
    assert loop["mix"]["FFMA"] == loop["products"]
    others = sorted(
        ((count, word) for word, count in loop["mix"].items() if word != "FFMA"),
        reverse=True,
    )
    print(
        f"{name}: {loop['mix']['FFMA']} FFMA,",
        ", ".join(f"{count} {word}" for count, word in others),
    )

# %% [markdown]
# `LDS` reads fragments from shared memory. `LDG` loads from global memory, `STS` stores to shared memory, and `LDGSTS`
# is the asynchronous copy `cp.async`; `LDGDEPBAR` and `DEPBAR` are its commit and its wait. Nearly all others compute
# addresses (`IMAD`, `IADD3`, `LEA`), or compare and select (`ISETP`, `SEL`).

# %%
counts = {
    name: sum(loop["mix"].values()) - loop["mix"]["FFMA"]
    for name, loop in listed.items()
}
if listed:
    others_before.reveal(counts["register_prefetch"], tolerance=0.1)
    others_now.reveal(counts["moving_addresses"], tolerance=0.1)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
KINDS = {
    "fragments": ({"LDS"}, draw.ramp("a")(0.75)),
    "copies": ({"LDG", "LDGSTS", "STS", "LDGDEPBAR", "DEPBAR"}, draw.ramp("b")(0.9)),
    "all else": (None, "0.6"),
}


def mix_chart(listed):
    """Other instructions per 100 multiply-adds, by their purpose."""
    figure = Figure(figsize=(7.2, 2.6), layout="constrained")
    axes = figure.add_subplot()
    known = set().union(*(words for words, _ in KINDS.values() if words))
    for place, loop in enumerate(listed.values()):
        left, mix = 0, loop["mix"]
        for label, (words, colour) in KINDS.items():
            own = sum(
                n
                for word, n in mix.items()
                if word != "FFMA" and (word in words if words else word not in known)
            )
            share = 100 * own / mix["FFMA"]
            axes.barh(
                place,
                share,
                left=left,
                color=colour,
                edgecolor="black",
                label=label if place == 0 else None,
            )
            left += share
        axes.text(
            left + 0.2,
            place,
            f"{100 * mix['FFMA'] / sum(mix.values()):.0f} % FFMA",
            va="center",
        )
    axes.set_yticks(range(len(listed)), labels=list(listed))
    axes.invert_yaxis()
    axes.set_xlim(right=axes.get_xlim()[1] * 1.15)
    axes.set_xlabel("other instructions per 100 multiply-adds")
    axes.legend(loc="lower right")
    return figure


mix_chart(listed) if listed else None

# %% [markdown]
# In the first bar nearly half of these instructions are grey. Most of them compute the addresses of loads and stores
# from indices, again for every tile. The second bar is the next stage.
#
# ## The first idea: addresses that move
#
# `moving_addresses` computes the same, and moves everything out of the loop that can be:
#
# - **Addresses, not indices.** Each thread computes the address of its first load once, and then adds a constant for
#   each tile. Loads, stores and fragments at a constant distance have this distance in their instruction.
# - **`pinned`** values are hidden from the compiler, which would otherwise compute them again in every tile to save a
#   register.
# - **No checks of edges.** Rows outside of A are replaced by its last row: their products belong to rows of C that do
#   not exist, and are never stored. In whole tiles, nothing is compared.
#
# ### The same in NumPy
#
# An array in memory is one long row of floats. `a.ravel()` is that row, and `a[i, k]` is the element at the place
# `i * K + k`. The first version computes all places for each tile, the second only adds to them:


# %%
def by_index(a, b, BK=8):
    K, N = b.shape
    acc = np.zeros((len(a), N), np.float32)
    i, j, k = np.arange(len(a))[:, None], np.arange(N), np.arange(BK)
    for k0 in range(0, K, BK):
        a_places, b_places = i * K + (k0 + k), (k0 + k)[:, None] * N + j
        acc += a.ravel()[a_places] @ b.ravel()[b_places]
    return acc


def by_address(a, b, BK=8):
    K, N = b.shape
    acc = np.zeros((len(a), N), np.float32)
    a_at = np.arange(len(a))[:, None] * K + np.arange(BK)
    b_at = np.arange(BK)[:, None] * N + np.arange(N)
    for _ in range(0, K, BK):
        acc += a.ravel()[a_at] @ b.ravel()[b_at]
        a_at += BK  # a constant
        b_at += BK * N  # another
    return acc


u, v = np.random.default_rng(7).standard_normal((2, 32, 32), np.float32)
assert np.allclose(by_address(u, v), u @ v, atol=1e-4)
assert np.array_equal(by_address(u, v), by_index(u, v))

# %% [markdown]
# ### The kernel
#
# The whole kernel, from the file that runs. `a_at` and `b_at` are the addresses of this thread's next loads in global
# memory, `a_to` and `b_to` those of its stores, and `a_from` and `b_from` those of its fragments in shared memory. The
# device functions that it calls are those of `register_prefetch`, with addresses in place of indices.

# %%
notebook.source("moving_addresses", function="moving_addresses")

# %% [markdown]
# ## Step through the loop
#
# K is 20 here, and a tile has 8 k-steps. The cell prints the lines that change the variables of the loop, and the
# address of B, as a row of B:

# %%
WATCHED = ("k0", "buffer", "b_at")
a, b, c = (
    np.ones((32, 20), np.float32),
    np.ones((20, 32), np.float32),
    np.zeros((32, 32), np.float32),
)

with step("moving_addresses", None, None, 1, a, b, 0, c, config="test") as steps:
    before = ""
    for s in (s for s in steps if s.function == "moving_addresses"):
        if s.kind == "barrier":
            print(f"-- barrier {s.barrier}")
            continue
        for name in WATCHED:
            if name in s.changed:
                value = int(s.locals[name])
                row = (value - b.ctypes.data) // b.strides[0]
                shown = f"b_at: row {row}" if name == "b_at" else f"{name} = {value}"
                print(f"{shown:<16} by  {before.strip()}")
        before = s.source
print("all elements are correct:", bool((c == 20).all()))

# %% [markdown]
# ## The second idea: a copy that continues in the background
#
# A load brings a value into a register, and the first instruction that uses it waits for it. From compute capability
# 8.0 on there is another way, **`cp.async`**. This instruction starts a copy of 4, 8 or 16 bytes from global to shared
# memory. The thread continues at once, and the data do not pass through its registers. The device functions of
# `numba_gemm.device.async_copy`:
#
# - `cp_async4` and `cp_async16` start a copy.
# - `commit_group()` closes a **group**: all copies that this thread has started since the last group.
# - `wait_group(n)` waits until at most the newest `n` groups of this thread are still in flight. `wait_group(0)` waits
#   for all.
#
# Between start and wait, the contents of the destination are undefined: the old bytes, the new ones, or some of both.
# A kernel that reads too early often reads correct data, so tests on a GPU find such mistakes by chance only. Therefore
# the simulator is as weak as the hardware may be. The destination contains NaN from the start on, and the copy lands at
# the wait that guarantees it, and no earlier. One thread, four floats:


# %%
@cuda.jit
def one_copy(x, before, after):
    tile = cuda.shared.array((1, 4), float32, alignment=16)
    cp_async16(tile, 0, 0, True, x, 0, 0)
    commit_group()
    for i in range(4):
        before[i] = tile[0, i]  # too early
    wait_group(0)
    for i in range(4):
        after[i] = tile[0, i]


x, before, after = (
    np.array([[1, 2, 3, 4]], np.float32),
    np.zeros(4, np.float32),
    np.zeros(4, np.float32),
)
prepare(one_copy, 1, 1, (x, before, after)).run()
print("before the wait:", before)
print("after the wait: ", after)

# %% [markdown]
# ### The same in NumPy
#
# A copy in flight is an entry of a list. `start` overwrites the destination with NaN, `wait` lets the copies land:


# %%
def start(flying, tile, new):
    tile[:] = np.nan
    flying.append((tile, new))


def wait(flying):
    for tile, new in flying:
        tile[:] = new
    flying.clear()


def asynchronous_product(a, b, BK=8):
    b_tile, flying = np.empty((2, BK, b.shape[1]), np.float32), []
    acc, buffer = np.zeros((len(a), b.shape[1]), np.float32), 0
    start(flying, b_tile[0], b[:BK])
    wait(flying)  # then a barrier
    for k0 in range(0, len(b), BK):
        if k0 + BK < len(b):
            start(flying, b_tile[buffer ^ 1], b[k0 + BK : k0 + 2 * BK])
        acc += a[:, k0 : k0 + BK] @ b_tile[buffer]
        wait(flying)  # then a barrier
        buffer ^= 1
    return acc


assert np.allclose(asynchronous_product(u, v), u @ v, atol=1e-4)

# %% [markdown]
# ### The kernel
#
# `async_copy` copies B in this way. A's tile is stored transposed, since fragments are read from it along rows, and a
# copy of 16 bytes cannot transpose: neighbours in memory remain neighbours. A could be copied 4 bytes at a time, but
# four such copies replace one load and its stores, and shared memory spends more time on them than they save. So A
# still goes through registers.
#
# The main loop is a device function of its own here, `accumulate`, because notebook 8 calls it from another kernel.
# Compared with `moving_addresses`, the loads into `b_next` and the stores from there are gone:

# %%
notebook.source("async_copy", function="start_copies")

# %%
notebook.source("async_copy", function="accumulate")

# %% [markdown]
# ## Who copies what
#
# A copy has four floats of B, and neighbouring lanes copy neighbouring floats. One such request, and its sectors:

# %%
a, b = np.ones((64, 16), np.float32), np.ones((16, 64), np.float32)
c = np.zeros((64, 64), np.float32)

small = "64x64x16-8x4-w32x32-s2"  # a smaller tile of the stage's
copies = trace(
    "async_copy", None, None, 1, a, b, 0, c, blocks=[(0, 0, 0)], config=small
)
orders = copies.requests
first = int(orders.index[(orders["array"] == "b") & (orders["op"] == "copy")][0])
draw.sector_map(copies, first)

# %% [markdown]
# ## From the start of a copy to its wait
#
# Now the smallest configuration, with tiles of 8 k-steps, and four tiles. The requests of one warp between barriers:

# %%
config = STAGES["async_copy"].test_config
K = 4 * config.BK
a, c = np.ones((config.BM, K), np.float32), np.zeros((config.BM, config.BN), np.float32)
# b[p, j] is p: each element says which k it is.
b = np.tile(np.arange(K, dtype=np.float32)[:, None], (1, config.BN))

draw.timeline(trace("async_copy", None, None, 1, a, b, 0, c, config="test"), warp=0)

# %% [markdown]
# The same with the data. Every element of B is its own k, so the buffers tell which k they contain: after each
# multiplication of a tile, and at each barrier. NaN is a buffer that was never filled, or one whose copy is in flight.

# %%
c[:] = 0
PITCH = config.BM + config.pad  # floats from one k of A's tile to the next
FLOATS = config.BK * (PITCH + config.BN)  # of a buffer: A's tile, then B's
with step("async_copy", None, None, 1, a, b, 0, c, config="test") as steps:
    for s in (s for s in steps if s.function == "accumulate"):
        multiplied = s.source.startswith("buffer = uint32(BUFFER")
        if s.kind != "barrier" and not multiplied:
            continue
        of_b = s.locals["tiles"][: 2 * FLOATS].reshape(2, FLOATS)[
            :, config.BK * PITCH :
        ]
        shown = []
        for own in of_b[:, :: config.BN]:  # column 0 of B, in each buffer
            shown.append(
                "   NaN  "
                if np.isnan(own).any()
                else f"k {own[0]:2.0f}..{own[-1]:2.0f}"
            )
        print(
            "multiplied:  " if multiplied else f"barrier {s.barrier}:   ",
            "   ".join(shown),
        )

# %% [markdown]
# While a tile is multiplied, the next one is in flight. At each barrier the next tile has landed: the wait before the
# barrier guarantees it.
#
# ## Two mistakes
#
# `variant` builds a stage from the real file with one change. `tried` runs it, and counts the elements of C, 32 x 32,
# that are correct, and those that are NaN.


# %%
def variant(name, before, after):
    """Build a stage from its own file, with `before` replaced by `after`."""
    text = str(notebook.source(name))
    assert text.count(before) == 1, f"{before!r} is there {text.count(before)} times"
    text = text.replace(before, after)
    text = text.replace("from ...", "from numba_gemm.").replace(
        "from .", "from numba_gemm.kernels.ladder."
    )
    path = Path(tempfile.mkdtemp()) / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"variant_of_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dataclasses.replace(STAGES[name], build=module.build)


def tried(stage, config="test"):
    """Print how many elements of a stage's product are correct, and its first race."""
    c = np.zeros((a.shape[0], b.shape[1]), np.float32)
    found = trace(stage, None, None, 1, a, b, 0, c, config=config)
    right = np.isclose(c, a @ b)
    lost = int(np.isnan(c).sum())
    print(f"{right.sum()} of {c.size} elements are correct, {lost} are NaN")
    print(f"{len(found.races)} pairs of lines race", *found.races[:1], sep="\n")
    return lost


_ = tried("async_copy")

# %% [markdown]
# **A wait that allows one group too many.** With `wait_group(1)` in the loop, the tile that is read next may still be
# in flight. On hardware it has mostly landed, and the result is mostly correct, until the memory is busier than on the
# day of the test. Then the kernel multiplies the previous contents of the buffer, an older tile. How many of the 1024
# elements of C become NaN in the simulator?

# %%
nan_elements = notebook.predict("NaN with wait_group(1)", ..., unit="of 1024")

# %%
WAIT = "            wait_group(0)\n            # all"  # the one in the loop
lost = tried(variant("async_copy", WAIT, WAIT.replace("0", "1")))

# %%
nan_elements.reveal(
    lost, because="Each sum contains elements of a tile that has not landed."
)

# %% [markdown]
# `races` reports the mistake, too: an asynchronous copy counts as a write from its start to the wait that guarantees
# it, so a read in between is a race. (The report names the chain of calls that leads to an access: here the copy that
# `start_copies` starts, and the load in `read_fragments`.)
#
# **A wait without a barrier.** `wait_group` waits for the copies of the thread that calls it. The copies of other
# threads may still be in flight; only after a barrier that follows the wait have these landed, too. Here the barrier in
# the loop is removed:

# %%
_ = tried(
    variant(
        "async_copy",
        "            cuda.syncthreads()\n            read_fragments",
        "            read_fragments",
    )
)

# %% [markdown]
# ## The third idea: an order of products that saves register reads
#
# `snake_order` is the kernel of `async_copy` in configurations with another order of the products of a k-step, and
# nothing else changes. As far as is published, registers are in two **register banks**, even numbers and odd ones. An
# FFMA reads three registers, and may have to wait if they are in one bank. An operand that the previous FFMA has read
# can be kept instead of read again. In *snake* order the products go along the rows of the thread tile, every other row
# backwards, so that one operand stays the same from each product to the next. In NumPy's terms, the products of
# `np.outer` in another order; each element of `acc` gets the same sum:


# %%
def snake(TM, TN):
    for i in range(TM):
        for j in range(TN) if i % 2 == 0 else reversed(range(TN)):
            yield i, j


def snake_product(a, b):
    acc = np.zeros((len(a), b.shape[1]), np.float32)
    for p in range(a.shape[1]):
        for i, j in snake(*acc.shape):
            acc[i, j] += a[i, p] * b[p, j]
    return acc


assert np.allclose(snake_product(u[:8], v[:, :8]), u[:8] @ v[:, :8], atol=1e-4)
for (i, j), (k, m) in pairwise(snake(8, 8)):
    assert i == k or j == m  # an element of A or of B stays

# %%
notebook.source("snake_order")

# %% [markdown]
# The compiler chooses the registers. Of the 256 FFMA in its inner loop, these operands are kept (`reuse_flags`), and
# these FFMA read a bank twice or more (`collisions`):

# %%
orders = notebook.recorded("latest/orders.csv")
print(orders.attrs["source"])
orders = orders[orders["stage"] == "snake_order"].set_index("order")
orders[["loop_ffma", "reuse_flags", "collisions", "tflops"]].astype(
    {"reuse_flags": int, "collisions": int}
)

# %% [markdown]
# ### Sixteen FFMA by hand
#
# The allocation of registers is easiest to follow for a thread tile of 4 x 4 and the rule of Maxwell and Pascal: four
# banks, the register's number modulo four, and an FFMA waits if two of its sources are in one bank
# ([S. Gray](https://github.com/NervanaSystems/maxas/wiki/SGEMM)). The tile needs 16 registers for the sums and 4 each
# for a column of A and a row of B. Numbered in order, these are its first FFMA (destination, A, B, addend):

# %%
in_order = RegisterTile(
    range(16, 20), range(20, 24), [range(row, row + 4) for row in (0, 4, 8, 12)]
)
for instruction in in_order.ffma()[:5]:
    print(instruction.name, instruction.operands)

# %% [markdown]
# How many of the 16 wait? A load of 128 bits fills four consecutive registers, so the registers of A and of B cannot
# change; those of the sums can. How many still wait after the best rearrangement of the sums?

# %%
waiting = notebook.predict("FFMA that wait, in order", ..., unit="of 16")
still_waiting = notebook.predict("FFMA that wait, rearranged", ..., unit="of 16")

# %% mystnb={"image": {"alt": "Registers of a 4 x 4 tile by bank; 16 FFMA wait if numbered in order, 4 rearranged"}}
rearranged = RegisterTile(
    in_order.a,
    in_order.b,
    [(1, 2, 5, 6), (3, 0, 7, 4), (11, 8, 15, 12), (9, 10, 13, 14)],
)
tiles = {"in order": in_order, "rearranged": rearranged}
draw.register_banks(
    {name: (tile, waits_on_maxwell(tile)) for name, tile in tiles.items()}, 4
)

# %% [markdown]
# %%
counts = [sum(map(sum, waits_on_maxwell(tile))) for tile in tiles.values()]
waiting.reveal(counts[0], because="Each sum is in the bank of its B.")
still_waiting.reveal(
    counts[1],
    because="Each sum is in a bank of its own; on the diagonal A and B share one.",
)

# %% [markdown]
# ### Your turn: no waits
#
# Loads of 64 bits fill two consecutive registers, the first of them even, so A and B can be in two pairs each. Return
# the registers of A, of B and of the rows of C, so that R0 to R23 suffice and no FFMA waits.


# %%
def allocate():
    return None  # your answer: [a0, a1, a2, a3], [b0, b1, b2, b3], [[c00, ...], ...]


# %%
def waits(registers):
    """Return the number of FFMA that wait, or the fault of an allocation."""
    if registers is None:
        return None
    tile = RegisterTile(*registers)
    if not set(range(24)).issuperset([*tile.a, *tile.b, *np.ravel(tile.c)]):
        return "not in R0 to R23"
    if any(
        pair[0] % 2 or pair[1] != pair[0] + 1
        for side in (tile.a, tile.b)
        for pair in (side[:2], side[2:])
    ):
        return "not loaded in pairs"
    return sum(map(sum, waits_on_maxwell(tile)))


answered = notebook.check(waits, ((allocate(),), 0))

# %% [markdown]
# A solution:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def allocate():
    # A in banks 0 and 1, B in banks 2 and 3; each sum in one of the two others.
    sums = [[1, 2, 5, 6], [3, 0, 7, 4], [9, 10, 13, 14], [11, 8, 15, 12]]
    return [16, 17, 20, 21], [18, 19, 22, 23], sums


assert notebook.check(waits, ((allocate(),), 0))

# %% [markdown]
# With two banks, three sources always share one. Does the allocation still matter on Ampere and later, if operands are
# kept and reads may be scheduled up to three clocks ahead? Does the order? The model is that of
# `numba_gemm/inspect/ffma.py`, measured by others on an RTX A6000 and assumed for an H200:

# %%
rows = []
for name, tile in (tiles | {"solution": RegisterTile(*allocate())}).items():
    for order in ("rows", "snake"):
        reads = tile.reads(snake=order == "snake")
        row = {
            "registers": name,
            "order": order,
            "collisions": sum(one.collides for one in reads),
        }
        row |= {
            "reads": sum(sum(one.banks) for one in reads),
            "clocks per FFMA": clocks_by_ports(100 * reads),
        }
        rows.append(row)
pd.DataFrame(rows).set_index(["registers", "order"]).round(2)

# %% [markdown]
# By this model the allocation hardly matters here, although the number of collisions differs: neighbouring FFMA leave
# time for the reads. The number of reads matters, and snake order saves some.
#
# ## Prediction, model and measurement
#
# The model counts bytes and multiply-adds, and these are the same for all four stages. It does not know the other
# instructions, so it predicts no gain. How many times as fast as `register_prefetch` is `moving_addresses`, and how
# many times `snake_order`, which has all three ideas?

# %%
gain_of_addresses = notebook.predict("moving_addresses, times as fast", ...)
gain_of_all = notebook.predict("snake_order, times as fast", ...)

# %%
results = notebook.measure(
    "register_prefetch", "moving_addresses", "async_copy", "snake_order"
)
notebook.compare(results)

# %%
table = notebook.compare(results)
took, bound = table["measured ms"], table["predicted ms"]
fewer = counters["instructions"]["register_prefetch"] / counters["instructions"]
gain_of_addresses.reveal(
    took["register_prefetch"] / took["moving_addresses"],
    model=bound["register_prefetch"] / bound["moving_addresses"],
    because="register_prefetch executes "
    f"{fewer['moving_addresses']:.3f} times as many instructions.",
)
gain_of_all.reveal(
    took["register_prefetch"] / took["snake_order"],
    model=bound["register_prefetch"] / bound["snake_order"],
    because="Once addresses cost nothing, little is left to remove. "
    f"It takes {took['snake_order'] / bound['snake_order']:.2f} times its "
    "predicted time.",
)

# %%
draw.ladder_chart(results)

# %% [markdown]
# Each stage removes something: computed addresses, a way through registers, reads of registers.
#
# ## The gain of each change
#
# Before these stages there was one that had all of their ideas, and was built step by step;
# [the diary](../docs/experiments.md#the-record-kernel) has the speed after each step. `pinned` gained: without it, the
# compiler saved registers and computed four addresses again in every tile. Snake order gained more there than in the
# table above; in another loop it lost. An order of products does not have a gain of its own, since the compiler chooses
# registers for the whole loop.
#
# ## The open question
#
# Tiles of 128 x 256 divide a C of 4096 x 4096 into:

# %%
config = STAGES["snake_order"].configs[0]
across, down = STAGES["snake_order"].grid(config, 4096, 4096)
multiprocessors = results.attrs["environment"]["gpu"]["multiprocessors"]
each = across * down / multiprocessors
print(f"{across * down} tiles on {multiprocessors} multiprocessors: {each:.2f} each")

# %% [markdown]
# One block computes one tile. While some multiprocessors compute their last tile, what do the others do? That is
# [notebook 8](08_equal_shares.ipynb). Puzzle 15, `async_copies`, practises this notebook.
