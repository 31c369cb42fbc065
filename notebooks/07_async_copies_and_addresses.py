# %% [markdown]
# # 7. Moving addresses, asynchronous copies, snake order: `moving_addresses`, `async_copy`, `snake_order`
#
# **The question.** `register_prefetch` computes from registers, in tiles for each level, and still one of its
# instructions in ten multiplies nothing. Many of these carry the next tile: from global memory into registers, and from
# there into shared memory, and compute where it lies. Must data pass through registers to get there? And of what is
# left, how much can go?
#
# Three stages answer. The first and the last are about reading what the compiler made of a loop; the second is about
# copies that no thread carries, and about a mistake that is easily made with them.
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
import json
import os
import tempfile
from pathlib import Path

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
# ## What the loop is made of
#
# What are the instructions of `register_prefetch`? A profiler counted what an H200 executed, and a product of 4096
# cubed takes a known number of multiply-adds: M * N * K of them, 32 to an instruction, because an instruction is one of
# a whole warp. (**FFMA** is the instruction's name.) The rest is the price:

# %%
counters = notebook.recorded("latest/counters.csv").set_index("stage")
print(counters.attrs["source"])
names = ["double_buffered", "warp_tiled", "register_prefetch", "moving_addresses", "async_copy", "snake_order"]
counted = counters.loc[[name for name in names if name in counters.index]]
ffma = counted["m"] * counted["n"] * counted["k"] / 32
pd.DataFrame(
    {
        "instructions for an FFMA": (counted["instructions"] / ffma).round(3),
        "one in so many is no FFMA": (counted["instructions"] / (counted["instructions"] - ffma)).round(1),
        "issue slots used, %": counted["issue_slots_percent"],
        "FMA pipe used, %": counted["fma_pipe_percent"],
    }
)

# %% [markdown]
# A multiprocessor has four schedulers, and each starts at most one warp's instruction a clock: an **issue slot**. The
# **FMA pipe**, which multiplies and adds, could take one each clock. So whatever is no FFMA takes a slot from it.
# Once memory is fast enough and latencies are covered, this is what is left: the loop must be *lean*.
#
# Which instructions are they? The compiler needs no GPU. It turns a kernel into **SASS**, the GPU's own instructions;
# `numba_gemm.inspect` finds the innermost loop that has multiply-adds, and the loop around that, which goes
# from one k-tile to the next. Numba is on the simulator in this notebook, so the compiler runs in processes of its own.

# %%
CHILD = """
import json, sys
from numba_gemm.inspect.report import compiled
from numba_gemm.inspect.sass import instruction_mix, loops, main_loop
from numba_gemm.kernels.ladder import STAGES

stage = STAGES[sys.argv[1]]
config = stage.configs[0]
found = compiled(stage, config, (9, 0))
inner = main_loop(found.instructions)  # two k-steps
around = [loop for loop in loops(found.instructions) if loop.encloses(inner) and loop != inner]
mix = instruction_mix(min(around, key=lambda loop: len(loop.instructions)).instructions)
for name, count in instruction_mix(inner.instructions).items():
    mix[name] += (config.BK // 2 - 2) * count  # all turns of the inner loop; the one around it has the last two k-steps
print(json.dumps({"products": config.BK * config.TM * config.TN, "registers": found.registers, "mix": mix}))
"""


def k_tile_of(*names):
    """What a warp issues for a k-tile in stages' main loops, by the compiler's listing; {} if there is no compiler."""
    hardware = {key: value for key, value in os.environ.items() if key != "NUMBA_ENABLE_CUDASIM"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": hardware}
    children = {name: subprocess.Popen([sys.executable, "-c", CHILD, name], **pipes) for name in names}
    said = {name: child.communicate() for name, child in children.items()}
    for name, child in children.items():
        if child.returncode:
            print(f"no listing of {name}: {said[name][1].strip()[-500:]}")
            return {}
    return {name: json.loads(out) for name, (out, _) in said.items()}


listed = k_tile_of("register_prefetch", "moving_addresses", "async_copy")
for name, loop in listed.items():
    assert loop["mix"]["FFMA"] == loop["products"]  # each product of the thread tile, once a k
    others = sorted(((count, word) for word, count in loop["mix"].items() if word != "FFMA"), reverse=True)
    print(f"{name}: {loop['mix']['FFMA']} FFMA,", ", ".join(f"{count} {word}" for count, word in others))

# %% [markdown]
# What these words do: `LDS` reads fragments from shared memory. `LDG` loads from global memory, `STS` stores into
# shared memory, and `LDGSTS` is `cp.async`, past the registers; `LDGDEPBAR` and `DEPBAR` are its commit and its wait.
# Nearly all others compute addresses (`IMAD`, `IADD3`, `LEA`), or compare and choose (`ISETP`, `SEL`).

# %%
KINDS = {
    "fragments": ({"LDS"}, draw.ramp("a")(0.75)),
    "copies": ({"LDG", "LDGSTS", "STS", "LDGDEPBAR", "DEPBAR"}, draw.ramp("b")(0.9)),
    "all else": (None, "0.6"),
}


def mix_chart(listed):
    """Instructions beside the multiply-adds, for 100 multiply-adds, by what they are for."""
    figure = Figure(figsize=(7.2, 2.6), layout="constrained")
    axes = figure.add_subplot()
    known = set().union(*(words for words, _ in KINDS.values() if words))
    for place, loop in enumerate(listed.values()):
        left, mix = 0, loop["mix"]
        for label, (words, colour) in KINDS.items():
            own = sum(
                n for word, n in mix.items() if word != "FFMA" and (word in words if words else word not in known)
            )
            share = 100 * own / mix["FFMA"]
            axes.barh(place, share, left=left, color=colour, edgecolor="black", label=label if place == 0 else None)
            left += share
        axes.text(left + 0.2, place, f"{100 * mix['FFMA'] / sum(mix.values()):.0f} % FFMA", va="center")
    axes.set_yticks(range(len(listed)), labels=list(listed))
    axes.invert_yaxis()
    axes.set_xlim(right=axes.get_xlim()[1] * 1.15)
    axes.set_xlabel("instructions in the loop beside 100 multiply-adds")
    axes.legend(loc="lower right")
    return figure


mix_chart(listed) if listed else None

# %% [markdown]
# In the first bar nearly half of these instructions are grey. Most of them compute the addresses of loads and stores
# from indices, again for every tile. The second bar is the next stage.
#
# ## The first idea: addresses that move
#
# `moving_addresses` computes the same, and keeps only what must be in the loop:
#
# - **addresses, not indices.** Each thread computes the address of its first load once, and then adds a constant, tile
#   after tile. Loads, stores and fragments that lie a constant apart have it in their instruction;
# - **`pinned`** values are hidden from the compiler, which would otherwise compute them again in every tile to save a
#   register;
# - **edges are outside.** Rows that lie outside of A are replaced by its last row: what they contribute belongs to rows
#   of C that do not exist, and is never stored. In whole tiles, nothing is compared.

# %%
notebook.source("moving_addresses")

# %% [markdown]
# ## Step through the loop
#
# K is 20 here, and a tile has 8. Only those lines are shown that change what the loop steers by, and how far B's
# address has come, in rows of B:

# %%
WATCHED = ("k0", "buffer", "b_at")
a, b, c = np.ones((32, 20), np.float32), np.ones((20, 32), np.float32), np.zeros((32, 32), np.float32)

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
print("all are right:", bool((c == 20).all()))

# %% [markdown]
# ## The second idea: a copy that continues in the background
#
# An ordinary load brings a value into a register, and the first instruction that uses it waits for it. From compute
# capability 8.0 on there is another way, **`cp.async`**: an instruction that says "copy these 4, 8 or 16 bytes from
# global to shared memory", and is done. The copy itself happens later, past the registers. Three device functions of
# `numba_gemm.device.async_copy` are all there is to it:
#
# - `cp_async4` and `cp_async16` start a copy;
# - `commit_group()` closes a **group**: all copies that this thread has started since the last one;
# - `wait_group(n)` waits until at most the newest `n` groups of this thread are still under way. `wait_group(0)`
#   waits for all.
#
# Between start and wait, the contents of the destination are undefined: the old bytes, the new ones, or some of both.
# That is a hard thing to test, because a kernel that reads too early is often lucky. So the simulator's twins of these
# functions are as weak as the hardware may be. The destination holds NaN from the start on, and the copy lands at the
# wait that guarantees it, and no sooner. One thread, four floats:


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


x, before, after = np.array([[1, 2, 3, 4]], np.float32), np.zeros(4, np.float32), np.zeros(4, np.float32)
prepare(one_copy, 1, 1, (x, before, after)).run()
print("before the wait:", before)
print("after the wait: ", after)

# %% [markdown]
# ## The kernel
#
# With such copies a tile needs no registers on its way. `async_copy` copies B so. A's tile is stored transposed, k by
# k, because that is how fragments are read, and 16-byte copies cannot transpose: what lies side by side in memory comes
# to lie side by side. A could travel in copies of 4 bytes, but four of them take the place of one load and its stores,
# and shared memory spends more time on them than they save. So A still goes through registers.

# %%
notebook.source("async_copy")

# %% [markdown]
# And what that changed in `moving_addresses`: gone are the fetches into `b_next` and the stores from there.
# (The main loop is a function of its own here, `accumulate`, because notebook 8 calls it from another kernel.)

# %%
notebook.difference("moving_addresses", "async_copy")

# %% [markdown]
# ## Who copies what
#
# B's vectors travel whole, four floats in a copy, neighbouring lanes taking neighbouring ones. One such request, and
# the sectors that it takes:

# %%
a, b = np.ones((64, 16), np.float32), np.ones((16, 64), np.float32)
c = np.zeros((64, 64), np.float32)

small = "64x64x16-8x4-w32x32-s2"  # a smaller tile of the stage's
copies = trace("async_copy", None, None, 1, a, b, 0, c, blocks=[(0, 0, 0)], config=small)
orders = copies.requests
first = int(orders.index[(orders["array"] == "b") & (orders["op"] == "copy")][0])
draw.sector_map(copies, first)

# %% [markdown]
# ## From the start of a copy to its wait
#
# Now the smallest configuration, with tiles of 8 k, and four tiles to go through. What one warp does between barriers:

# %%
config = STAGES["async_copy"].test_config
K = 4 * config.BK
a, c = np.ones((config.BM, K), np.float32), np.zeros((config.BM, config.BN), np.float32)
b = np.tile(np.arange(K, dtype=np.float32)[:, None], (1, config.BN))  # b[p, j] is p: each element says which k it is

draw.timeline(trace("async_copy", None, None, 1, a, b, 0, c, config="test"), warp=0)

# %% [markdown]
# The same with the data itself. B's elements say which k they are, so we can read which k are in each of the two
# buffers: after each multiplication of a tile, and at each barrier. NaN is a buffer that was never filled, or one whose
# copy is in flight.

# %%
c[:] = 0
PITCH = config.BM + config.pad  # floats from one k of A's tile to the next
FLOATS = config.BK * (PITCH + config.BN)  # of a buffer: A's tile, then B's
with step("async_copy", None, None, 1, a, b, 0, c, config="test") as steps:
    for s in (s for s in steps if s.function == "accumulate"):
        multiplied = s.source.startswith("buffer = uint32(BUFFER")
        if s.kind != "barrier" and not multiplied:
            continue
        of_b = s.locals["tiles"][: 2 * FLOATS].reshape(2, FLOATS)[:, config.BK * PITCH :]
        shown = []
        for own in of_b[:, :: config.BN]:  # column 0 of B, in each buffer
            shown.append("   NaN  " if np.isnan(own).any() else f"k {own[0]:2.0f}..{own[-1]:2.0f}")
        print("multiplied:  " if multiplied else f"barrier {s.barrier}:   ", "   ".join(shown))

# %% [markdown]
# While a tile is multiplied, the next one is in flight; at each barrier the tile is there that is read next. That is
# what the wait in front of the barrier guarantees.
#
# ## Two mistakes
#
# Let us break it. `variant` makes a stage from the real file with one thing changed.


# %%
def variant(name, before, after):
    """A stage from its own file, in which `after` stands in place of `before`."""
    text = str(notebook.source(name))
    assert text.count(before) == 1, f"{before!r} is there {text.count(before)} times"
    text = text.replace(before, after)
    text = text.replace("from ...", "from numba_gemm.").replace("from .stage", "from numba_gemm.kernels.ladder.stage")
    path = Path(tempfile.mkdtemp()) / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"variant_of_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dataclasses.replace(STAGES[name], build=module.build)


def tried(stage, config="test"):
    """How a stage's product comes out, and what it races for."""
    c = np.zeros((a.shape[0], b.shape[1]), np.float32)
    found = trace(stage, None, None, 1, a, b, 0, c, config=config)
    right = np.isclose(c, a @ b)
    print(f"{right.sum()} of {c.size} elements are right, {np.isnan(c).sum()} are NaN")
    print(f"{len(found.races)} pairs of lines race", *found.races[:1], sep="\n")


tried("async_copy")

# %% [markdown]
# **A wait that allows one group too many.** The tile that is read next may still be in flight. On hardware it has
# mostly landed, and the result is mostly right, until the memory is busier than on the day of the test. Then the kernel
# multiplies what lay in the buffer before, an older tile.

# %%
WAIT = "            wait_group(0)\n            # all"  # the one in the loop
tried(variant("async_copy", WAIT, WAIT.replace("0", "1")))

# %% [markdown]
# The NaN show it, whatever the operands. `races` shows it, too: an asynchronous copy counts as a write from its start
# to the wait that guarantees it, so what was read meanwhile, was read too early. (A place is given by the calls that
# lead to it: here the copy that `start_copies` starts, and the load in `read_fragments`.)
#
# **A wait without a barrier.** `wait_group` waits for the copies of the thread that calls it. The others' may be in
# flight for as long as they please, and it takes a barrier after the wait to know that theirs have landed, too. Here
# the barrier in the loop is gone:

# %%
tried(
    variant(
        "async_copy",
        "            cuda.syncthreads()\n            read_fragments",
        "            read_fragments",
    )
)

# %% [markdown]
# ## Where operands meet
#
# The third idea leaves no trace in the counts: the order of the products. `snake_order` is the kernel of
# `async_copy` in configurations with another order, and nothing else. Registers lie in two **register
# banks**, even numbers and odd, as far as is published. An FFMA reads three registers, and where those fall into one
# bank, it may have to wait. An operand that the FFMA just before has read can be kept instead of read again. In *snake*
# order, row after row of the thread tile, to and fro, one operand always stays. The compiler decides which registers it
# takes, and this is what came of it, of 256 FFMA in the inner loop: operands that are kept (`reuse_flags`), and FFMA
# that read a bank twice or more (`collisions`):

# %%
notebook.source("snake_order")

# %%
orders = notebook.recorded("latest/orders.csv")
print(orders.attrs["source"])
orders = orders[orders["stage"] == "snake_order"].set_index("order")
orders[["loop_ffma", "reuse_flags", "collisions", "tflops"]].astype({"reuse_flags": int, "collisions": int})

# %% [markdown]
# ### Sixteen FFMA by hand
#
# The allocation of registers is easiest to follow for a thread tile of 4 x 4 and the rule of Maxwell and Pascal: four
# banks, the register's number modulo four, and an FFMA waits if two of its sources are in one bank
# ([S. Gray](https://github.com/NervanaSystems/maxas/wiki/SGEMM)). The tile needs 16 registers for the sums and 4 each
# for a column of A and a row of B. Numbered in order, these are its first FFMA (destination, A, B, addend):

# %%
in_order = RegisterTile(range(16, 20), range(20, 24), [range(row, row + 4) for row in (0, 4, 8, 12)])
for instruction in in_order.ffma()[:5]:
    print(instruction.name, instruction.operands)

# %% [markdown]
# **Predict:** how many of the 16 wait? A load of 128 bits fills four consecutive registers, so those of A and of B stay
# where they are; the sums can move. How many still wait after the best rearrangement of the sums?

# %% mystnb={"image": {"alt": "Registers of a 4 x 4 tile by bank; 16 FFMA wait if numbered in order, 4 rearranged"}}
rearranged = RegisterTile(in_order.a, in_order.b, [(1, 2, 5, 6), (3, 0, 7, 4), (11, 8, 15, 12), (9, 10, 13, 14)])
tiles = {"in order": in_order, "rearranged": rearranged}
draw.register_banks({name: (tile, waits_on_maxwell(tile)) for name, tile in tiles.items()}, 4)

# %% [markdown]
# In order, a sum is always in the bank of its B. Rearranged, each sum is in a bank of its own; on the diagonal the
# registers of A and B still share one.
#
# ### Your turn: no waits
#
# Loads of 64 bits fill two consecutive registers, the first of them even, so A and B can be in two pairs each. Return
# the registers of A, of B and of the rows of C, so that R0 to R23 suffice and no FFMA waits.


# %%
def allocate():
    return None  # your answer: [a0, a1, a2, a3], [b0, b1, b2, b3], [[c00, c01, c02, c03], ...]


# %%
def waits(registers):
    """Return the number of FFMA that wait, or what is wrong with an allocation."""
    if registers is None:
        return None
    tile = RegisterTile(*registers)
    if not set(range(24)).issuperset([*tile.a, *tile.b, *np.ravel(tile.c)]):
        return "not in R0 to R23"
    if any(pair[0] % 2 or pair[1] != pair[0] + 1 for side in (tile.a, tile.b) for pair in (side[:2], side[2:])):
        return "not loaded in pairs"
    return sum(map(sum, waits_on_maxwell(tile)))


answered = notebook.check(waits, ((allocate(),), 0))

# %% [markdown]
# A solution:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def allocate():
    # A in banks 0 and 1, B in banks 2 and 3; each sum in one of the two banks that its A and B leave.
    sums = [[1, 2, 5, 6], [3, 0, 7, 4], [9, 10, 13, 14], [11, 8, 15, 12]]
    return [16, 17, 20, 21], [18, 19, 22, 23], sums


assert notebook.check(waits, ((allocate(),), 0))

# %% [markdown]
# **Predict:** with two banks, three sources always share one. Does the allocation still matter on Ampere and later, if
# operands are kept and reads may be booked up to three clocks ahead? Does the order? The model is that of
# `numba_gemm/inspect/ffma.py`, measured by others on an RTX A6000 and assumed for an H200:

# %%
rows = []
for name, tile in (tiles | {"solution": RegisterTile(*allocate())}).items():
    for order in ("rows", "snake"):
        reads = tile.reads(snake=order == "snake")
        row = {"registers": name, "order": order, "collisions": sum(one.collides for one in reads)}
        row |= {"reads": sum(sum(one.banks) for one in reads), "clocks per FFMA": clocks_by_ports(100 * reads)}
        rows.append(row)
pd.DataFrame(rows).set_index(["registers", "order"]).round(2)

# %% [markdown]
# By this model the allocation hardly matters here, although the number of collisions differs: neighbouring FFMA leave
# time for the reads. The number of reads matters, and snake order saves some.
#
# ## Predict, then measure
#
# The model counts bytes and multiply-adds, and these are the same for all four. By the model nothing can be gained
# here: what was lost, was lost to instructions that it does not know. Hence "predicted" differs by rounding at most,
# and "measured" does not.

# %%
results = notebook.measure("register_prefetch", "moving_addresses", "async_copy", "snake_order")
notebook.compare(results)

# %%
draw.ladder_chart(results)

# %% [markdown]
# Each takes something away: computed addresses, a trip through registers, reads of registers. On the H200 whose times
# are in the repository, the first gains 2 %, and the others 0.3 % and 0.4 %: once addresses cost nothing, little is
# left to take.
#
# ## What each change was worth
#
# Before these stages there was one that had all of their ideas, and was built step by step. From
# [the diary](../docs/experiments.md#the-record-kernel), at 4096 cubed on an H200:
#
# | loop | TFLOP/s |
# |:--|--:|
# | moving addresses, and one loop for all tiles | 52.6 |
# | the same with `pinned` | 53.8 |
# | the same in snake order | 54.5 |
# | the whole stage, for any shape and strides | 55.2 |
#
# `pinned` gained 2 %: without it, the compiler saved registers and computed four addresses again in every tile. Snake
# order gained 1.3 % there, and 0.4 % in the table above; in another loop of that day it lost. An order of products does
# not have a gain of its own, since the compiler chooses registers for the whole loop.
#
# ## The question it leaves open
#
# The prediction says where the rest may be. Its tiles of 128 x 256 are, at 4096 cubed:

# %%
config = STAGES["snake_order"].configs[0]
across, down = STAGES["snake_order"].grid(config, 4096, 4096)
multiprocessors = results.attrs["environment"]["gpu"]["multiprocessors"]
print(f"{across * down} tiles on {multiprocessors} multiprocessors: {across * down / multiprocessors:.2f} each")

# %% [markdown]
# A tile is made by one block, whole. While some multiprocessors make their last one, what do the others do? That is
# [notebook 8](08_equal_shares.ipynb).
