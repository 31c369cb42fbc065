# %% [markdown]
# # 10. The memory laboratory
#
# *Before this: notebooks [1](01_naive_and_coalesced.ipynb), [2](02_shared_tile.ipynb) and
# [4](04_vectors_and_banks.ipynb). Time: about 75 minutes.*
#
# **The question.** Nearly every stage of the ladder follows a rule about memory: neighbouring threads should read
# neighbouring floats, requests should not conflict in banks, copies should overlap with computation. Are these rules
# correct, and what exactly does it cost to break one?
#
# The memory laboratory (`numba_gemm.lab.memory`) measures it. Each of its experiments follows a section of the CUDA
# C++ Best Practices Guide, predicts, measures, draws both, and has **claims**: sentences that the measured numbers
# confirm or refute. This notebook runs eight experiments, along the path of the data from the host's memory to a warp,
# and shows the recorded results of others. Some of the rules turn out to be wrong.
#
# Unlike the earlier notebooks, this one runs its kernels on the GPU, if there is one, for about a minute in all.
# Without a GPU they run on the simulator, small: then counts are meaningful, and times are not.
#
# You predict first. Where a cell says `notebook.predict("...", ...)`, write a number in place of the second `...` and
# run the cell. A later cell shows your number beside the real one. A cell without a prediction runs, too.
#
# Run the cells from top to bottom. The stored outputs are those of a machine with an NVIDIA H200; the next cell prints
# where yours run.
#
# Predictions are compared with the run that was recorded on an H200.

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
import json

import numpy as np
import pandas as pd
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from numba import cuda

from numba_gemm.lab.harness.experiment import Unavailable
from numba_gemm.lab.memory import (
    barriers,
    l2_persistence,
    machine,
    overlap,
    strided_copy,
)
from numba_gemm.lab.registry import MEMORY, load
from numba_gemm.models import requests

pd.set_option("display.max_colwidth", None)

# %% [markdown]
# Three helpers: one runs an experiment, one draws it with the experiment's own `plot`, one evaluates its claims; the
# run that was recorded on an H200 always stands beside.


# %%
def recorded(name):
    """Return the recorded run of an experiment, and its origin."""
    frame = notebook.recorded(f"memory_lab/{name}.csv")
    said = json.loads(
        (notebook.RECORDED / "h200" / "memory_lab" / f"{name}.json").read_text(
            encoding="utf-8"
        )
    )
    return frame, f"recorded on {said['gpu']['name']}, {said['date'][:10]}"


def run(name, **parameters):
    """Run an experiment on a GPU, or small on the simulator; None if it cannot run."""
    experiment = load(name)
    if machine.SIMULATOR and experiment.unavailable:
        print(f"Not run here: {experiment.unavailable}.")
        return None
    try:
        frame = experiment.frame(
            **(experiment.small if machine.SIMULATOR else parameters)
        )
    except Unavailable as reason:
        print(f"Not run here: {reason}.")
        return None
    print("Run here, and all results were right.")
    return frame


def is_recorded(name):
    """True if there is a recorded run."""
    return (notebook.RECORDED / "h200" / "memory_lab" / f"{name}.csv").is_file()


def picture(name, here=None, height=4.4):
    """The recorded run, and below it the one of this machine's GPU."""
    shown = [recorded(name)] if is_recorded(name) else []
    if here is not None and not machine.SIMULATOR:
        shown.append((here, f"measured now on {notebook.gpu_name()}"))
    if not shown:
        print(f"No run is recorded; numba-gemm lab {name} measures one.")
        return None
    figure = Figure(figsize=(9.5, height * len(shown)), layout="constrained")
    for part, (frame, title) in zip(
        np.atleast_1d(figure.subfigures(len(shown), 1)), shown, strict=True
    ):
        load(name).plot(frame, part)
        part.suptitle(title, fontsize=10)
    return figure


def claims(name, here=None):
    """A table of the claims, and whether the numbers confirm them."""
    columns = (
        {"recorded": load(name).claims(recorded(name)[0])} if is_recorded(name) else {}
    )
    if here is not None and not machine.SIMULATOR:
        columns["here"] = load(name).claims(here)
    found = pd.DataFrame(columns).replace({True: "holds", False: "DOES NOT HOLD"})
    return found.rename_axis("claim")


pd.DataFrame(
    [
        {"experiment": name, "section": load(name).section, "lesson": load(name).lesson}
        for name in MEMORY
    ]
)

# %% [markdown]
# ## All memories
#
# The recorded latency and bandwidth of each memory. Latency is the time that one thread waits for one read; bandwidth
# is the rate of all threads together.

# %%
spaces, source = recorded("memory_spaces")
print(source)
spaces[["space", "level", "latency_cycles", "tb_s", "predicted_tb_s"]].round(1)

# %% [markdown]
# The guide describes the same spaces by where they are, who can access them, and for how long they exist:
#
# | space | location | cached | access | scope | lifetime |
# |---|---|---|---|---|---|
# | register | on chip | – | read and write | one thread | thread |
# | shared | on chip | – | read and write | all threads of a block | block |
# | local | off chip | yes | read and write | one thread | thread |
# | global | off chip | yes | read and write | all threads and the host | until the host frees it |
# | constant | off chip | yes | read | all threads and the host | until the host frees it |
# | texture | off chip | yes | read | all threads and the host | until the host frees it |
#
# From registers to device memory, latency grows and bandwidth falls. A GPU hides latency with other work; the rest of
# this notebook is about bandwidth.
#
# ## From the host to the device
#
# The CPU's memory, the **host's**, is at the other end of a link, PCI Express on most machines. Host memory is
# **pageable** by default: the operating system may move it, so the driver copies it through a buffer of its own first.
# **Page-locked** (pinned) memory stays where it is, and the GPU's copy engine reads it directly.
#
# (Ordinary memory that is page-locked afterwards is called *registered*; *write-combined* memory is page-locked, and
# the CPU does not cache it. In the pictures H2D is from host to device, D2H back, and dashed lines are predictions.)
#
# How many times as fast is a large copy to the device from page-locked memory as from pageable memory? Which percentage
# of the link's bandwidth does a copy of 4 KB from page-locked memory reach?

# %%
pinned_gain = notebook.predict("pinned, times as fast as pageable", ...)
small_copy = notebook.predict("copy of 4 KB", ..., unit="% of the link")

# %%
here = run("transfers")
picture("transfers", here, height=6)

# %%
copies = recorded("transfers")[0].query(
    "part == 'copy' and direction == 'host to device'"
)
large = copies[copies["bytes"] == copies["bytes"].max()].set_index("memory")["gb_s"]
pinned_gain.reveal(large["pinned"] / large["pageable"], measured=True, tolerance=0.2)
least = copies.query("memory == 'pinned' and bytes == 4096").iloc[0]
small_copy.reveal(
    100 * least["gb_s"] / least["theoretical_gb_s"],
    measured=True,
    because=f"It takes {least['us']:.0f} us, nearly all of it latency.",
    tolerance=0.3,
)

# %%
claims("transfers", here)

# %% [markdown]
# Copy rarely, copy much at once, from page-locked memory, and leave on the device what is used again. A small copy
# takes hardly less than its latency. A thousand in a row overlap, and take less than a thousand latencies, but still
# longer than all of them packed into one if they are small. And not everything follows a simple rule: pageable copies
# are predicted only roughly, as [the laboratory's page](../docs/memory_lab.md) says.
#
# ## Overlap: copies beside kernels
#
# Work is given to the GPU in **streams**: what is in one stream happens in order; what is in two may happen at once.
# Copies and kernels use different parts of the GPU. So cut the data into pieces, give each a stream, and a piece can be
# computed while the next is on its way. This is the double buffering of notebook 5, one level up.
#
# The laboratory predicts for copies of time T, kernels of time E and n streams: $\max(T, E) + \min(T, E) / n$.
# Drawn from its own model of a pipeline, with the times that were recorded:

# %%
staged = recorded("overlap")[0].query("part == 'staged'")
row = staged[staged["turns"] == sorted(set(staged["turns"]))[1]].iloc[0]
copies, kernels = float(row["transfer_ms"]), float(row["kernel_ms"])

figure = Figure(figsize=(9, 3.4), layout="constrained")
for axes, count in zip(figure.subplots(1, 2, sharex=True), (1, 4), strict=True):
    for number, (begin, copied, started, done) in enumerate(
        overlap.pipeline(copies, kernels, count)
    ):
        axes.barh(
            number,
            copied - begin,
            left=begin,
            height=0.7,
            color="#0072B2",
            label="copy" if not number else None,
        )
        axes.barh(
            number,
            done - started,
            left=started,
            height=0.7,
            color="#D55E00",
            label="kernel" if not number else None,
        )
    axes.set(
        yticks=range(count),
        xlabel="ms, predicted",
        ylabel="stream",
        title=f"{count} stream{'s' * (count > 1)}",
    )
    axes.invert_yaxis()
figure.axes[0].legend()
figure

# %% [markdown]
# ### Your turn: how long?
#
# Return the predicted milliseconds for copies and kernels that alone take `transfer` and `kernel` ms, in this number of
# streams.


# %%
def staged_time(transfer, kernel, streams):
    return None  # your answer


# %%
cases = [
    (copies, kernels, 1),
    (copies, kernels, 4),
    (8.0, 2.0, 4),
    (3.0, 3.0, 100),
    (5.0, 0.0, 7),
]
right = [(case, float(overlap.staged_ms(*case))) for case in cases]
answered = notebook.check(staged_time, *right)

# %% [markdown]
# A solution, if you want to see one:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def staged_time(transfer, kernel, streams):
    # The longer one never stops. Only one piece of the shorter one does not overlap.
    return max(transfer, kernel) + min(transfer, kernel) / streams


assert notebook.check(staged_time, *right)

# %% [markdown]
# Before you look: what changes if the copy is from pageable memory? If it is in the default stream?

# %%
here = run("overlap")
picture("overlap", here)

# %%
claims("overlap", here)

# %% [markdown]
# The formula holds. What breaks the overlap is what makes the host wait: pageable memory, and the default stream beside
# ordinary ("blocking") streams.
#
# Whether host code is hidden behind the device also depends on the host: its own work may take longer beside the
# device's than alone.
#
# ## Zero copy: kernels that read host memory
#
# Page-locked memory can be **mapped**: it has a device pointer, and a kernel's loads fetch it over the link while other
# warps compute. No copy is started. This experiment and the next one are shown as recorded; `numba-gemm lab zero_copy
# unified_addressing` runs them on your GPU.
#
# A kernel reads a large array once. How many times as long does it take from mapped memory as with a copy first? And
# with eight passes over the array?

# %%
one_pass = notebook.predict("mapped over copied, one pass", ...)
eight_passes = notebook.predict("mapped over copied, eight passes", ...)

# %%
picture("zero_copy")

# %%
ways = recorded("zero_copy")[0].query("stride == 1").set_index(["way", "passes"])["ms"]
one_pass.reveal(ways["mapped", 1] / ways["copied", 1], measured=True, tolerance=0.1)
eight_passes.reveal(
    ways["mapped", 8] / ways["copied", 8],
    measured=True,
    because="Every pass over mapped memory crosses the link again.",
    tolerance=0.2,
)

# %%
claims("zero_copy")

# %% [markdown]
# On this GPU mapping does not pay off even for one pass: it takes slightly longer than a copy followed by the kernel.
# Every further pass crosses the link again, and so does every sector of a strided read. Map memory that a kernel reads
# once, coalesced, when a separate copy is inconvenient; copy everything else. On a GPU that shares its memory with the
# host, nothing crosses a link, and mapping avoids the copy altogether; that was not measured.
#
# A kernel can write mapped memory, too. Then one kernel uses both directions of the link and computes, all at once,
# without a single stream. Its rival is the staged work of the section before, with results copied back in each stream.
#
# Before you look: with copies there and back of time T each, and a kernel of time E, how long does mapped memory take
# if everything overlaps, and how long do n streams take?

# %%
picture("mapped_streams")

# %%
claims("mapped_streams")

# %% [markdown]
# With a short kernel, mapped memory takes longer than one copy, and about as long as staged work on several streams;
# with a long one, it takes the kernel's time. The two directions are not quite independent.
#
# ## One address range
#
# Host and devices share one range of addresses (unified virtual addressing), so the driver can tell from a pointer
# where its memory is. It is also the basis of copies from one GPU to another.
#
# Before you look: for which kinds of host memory is the device pointer equal to the host pointer? How much faster than
# through the host is a direct copy between two GPUs?

# %%
picture("unified_addressing")

# %%
claims("unified_addressing")

# %% [markdown]
# Here the two pointers of registered memory are equal, although the guide says that they differ: query the device
# attribute instead of assuming either. Between GPUs with NVLink, enable peer access before copying.
#
# ## Coalescing, in any order
#
# On the device now. Notebook 1 counted sectors of 32 bytes: a warp that copies 32 neighbouring floats asks for four.
# Here its lanes copy the same floats in another order, or some lanes copy nothing:

# %%
notebook.source("lab/memory/coalescing", function="place_copy")

# %% [markdown]
# How many sectors does a warp request if its 32 lanes copy the same floats in reverse order?

# %%
in_reverse = notebook.predict("sectors in reverse order", ...)

# %%
here = run("coalescing")
in_reverse.reveal(here.set_index("pattern").loc["reversed", "sectors"])
here[["pattern", "lanes", "sectors"]]

# %%
picture("coalescing", here)

# %%
claims("coalescing", here)

# %% [markdown]
# The order never matters. An idle lane saves something only if its whole sector is idle, too, and then little. Idle
# lanes in every sector even cost time.
#
# ### Your turn: lanes that cost most
#
# Only `active` lanes copy, each the float of its own number. Return their numbers, such that the warp asks for as many
# sectors as possible.


# %%
def spread(active):
    return None  # your answer: a list of lanes


# %%
def sectors_of(lanes, active):
    """Sectors that the warp asks for, or what is wrong with the answer."""
    if lanes is None:
        return None
    if len(set(lanes)) != active or not set(range(32)).issuperset(lanes):
        return f"expected {active} different lanes"
    return requests.sectors([(lane, 4 * lane) for lane in lanes], 4)


counts = (1, 2, 3, 4, 9)
answered = notebook.check(
    sectors_of, *[((spread(active), active), min(active, 4)) for active in counts]
)

# %% [markdown]
# A solution:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def spread(active):
    # One lane in each sector first, as `spread(4)` has them: 0, 8, 16, 24.
    return [8 * (number % 4) + number // 4 for number in range(active)]


assert notebook.check(
    sectors_of, *[((spread(active), active), min(active, 4)) for active in counts]
)

# %% [markdown]
# ## Coalescing, with a stride
#
# Now each thread copies one float, `stride` floats from its neighbour's:

# %%
notebook.source("lab/memory/strided_copy", function="stride_copy")

# %% [markdown]
# What a warp asks for: floats that it needs are dark, those that come along in the same sectors are light.

# %%
FLOATS = requests.SECTOR_BYTES // 4  # of a sector
strides = (1, 2, 4, 8)
cells = np.zeros((len(strides), 32 * strides[-1]))
for line, stride in enumerate(strides):
    for lane in range(32):
        sector = lane * stride // FLOATS
        cells[line, sector * FLOATS : (sector + 1) * FLOATS] = 1
    cells[line, np.arange(32) * stride] = 2
figure = Figure(figsize=(9.5, 2.2), layout="constrained")
axes = figure.add_subplot()
axes.imshow(
    cells,
    aspect="auto",
    interpolation="nearest",
    cmap=ListedColormap(["0.95", "#A6D0EA", "#0072B2"]),
)
sectors = [
    requests.sectors([(lane, 4 * lane * stride) for lane in range(32)], 4)
    for stride in strides
]
axes.set_yticks(
    range(len(strides)),
    [f"stride {s}: {n} sectors" for s, n in zip(strides, sectors, strict=True)],
)
axes.set_xticks(range(0, 257, 32))
axes.set_xlabel("float in memory")
figure

# %% [markdown]
# At stride 2 half of the bytes that move are used. Which percentage of the bandwidth at stride 1 remains at stride 2?
# And at stride 32?

# %%
at_two = notebook.predict("bandwidth at stride 2", ..., unit="% of that at stride 1")
at_32 = notebook.predict("bandwidth at stride 32", ..., unit="% of that at stride 1")

# %%
# The largest stride takes 8.6 GB at full size; where that is not free, copy less.
roomy = machine.SIMULATOR or cuda.current_context().get_memory_info().free > 10e9
here = run("strided_copy", elements=1 << 25 if roomy else 1 << 22)
here[["stride", "sectors", "efficiency"]]

# %%
picture("strided_copy", here)

# %%
found = recorded("strided_copy")[0].set_index("stride")
share = 100 * found["gb_s"] / found.loc[1, "gb_s"]
by_sectors = 100 * found["efficiency"]
at_two.reveal(share[2], model=by_sectors[2], tolerance=0.1)
at_32.reveal(share[32], model=by_sectors[32], tolerance=0.1)

# %%
claims("strided_copy", here)

# %% [markdown]
# Up to stride 8 the number of sectors explains the speed. Beyond, the rule says that nothing more is lost, and it is
# wrong: the curve goes on falling. The experiment does not know why. A rule holds where it was measured.
#
# ## Coalescing, off a boundary
#
# A warp that copies 32 neighbours needs four sectors, if it begins at a multiple of 32 bytes. From anywhere else it
# touches five.
#
# A copy that begins one float later requests five sectors per warp instead of four. What percentage of the bandwidth
# does it lose? (The guide's answer is 20.)

# %%
lost = notebook.predict("bandwidth lost by an offset of one float", ..., unit="%")

# %%
here = run("misaligned_copy", offsets=(0, 1, 2, 4, 7, 8, 12, 16, 20, 24, 28, 31, 32))
here[["offset", "block", "sectors"]]

# %%
picture("misaligned_copy", here)

# %%
offsets = recorded("misaligned_copy")[0].query("block == 256").set_index("offset")
fast = offsets.loc[0, "gb_s"]
lost.reveal(
    100 * (1 - offsets.loc[1, "gb_s"] / fast),
    model=100 * (1 - offsets.loc[1, "predicted_by_sectors_gb_s"] / fast),
    tolerance=0.2,
)

# %%
claims("misaligned_copy", here)

# %% [markdown]
# It loses little, and hardly less from offsets of 8, 16 or 24 floats, where four sectors do. The
# fifth sector is also the neighbouring warp's; whichever warp asks second finds it in a cache. So count sectors to
# learn what warps ask for, and think about who else asks before you call it a cost. What does hurt is blocks of 33
# threads, whose second warp copies a single float.
#
# ## Keeping a region in L2
#
# All of this passes through the L2 cache, which lets go of what was used longest ago. A **window** can mark a range of
# addresses as worth keeping, in a part of L2 that was set aside, while a long stream of other data passes. A share of
# the window, its *hit ratio*, is marked.
#
# Before you look: the region is a little larger than the part that was set aside. Is it better to mark all of it, or
# only as many of its lines as fit?
#
# The experiment's own model of the recorded run: which share of a region stays, without a window ("none"), with a
# window that marks all of it ("whole"), or with one that marks as much as surely fits ("spread": two thirds of the part
# that was set aside, 30 MiB). The picture has a fourth, "guide": a smaller window, as in the guide's listing.

# %%
windows, source = recorded("l2_persistence")
set_aside = round(windows["set_aside_mib"].iloc[0] * l2_persistence.MIB)
l2 = int(
    notebook.recorded("latest/results.csv").attrs["environment"]["gpu"]["l2_bytes"]
)
rows = []
for region in sorted(set(windows["region_mib"])):
    size = round(region * l2_persistence.MIB)
    row = {"region MiB": region}
    for kind in ("none", "whole", "spread"):
        window, _ = l2_persistence.window_of(kind, size, set_aside, size)
        row[kind] = f"{l2_persistence.staying(window, size, set_aside, l2):.0%}"
    rows.append(row)
pd.DataFrame(rows).set_index("region MiB")

# %%
here = run("l2_persistence")
picture("l2_persistence", here)

# %%
claims("l2_persistence", here)

# %% [markdown]
# If more is marked than fits, its lines drive one another out; if less is, that stays. Up to what was set aside it is
# best to mark all; just beyond it, to mark what fits. For much larger regions the model is too hopeful: there both
# are alike. The simulator has no caches and no windows; there only the kernel's results were checked.
#
# (The ladder's way to find data in L2 is simpler: blocks that share rows of A and columns of B run at the same time.)
#
# ## Banks
#
# Notebook 4's rule: shared memory has 32 banks, each delivers one 32-bit word per cycle, and words of one bank wait for
# each other, unless they are the same word.
#
# ### Your turn: how many cycles?
#
# A warp reads float `lane * stride` of shared memory. How many wavefronts (cycles) does it take? The right answers come
# from the rule that `trace` uses.


# %%
def cycles(stride):
    return None  # your answer


# %%
right = [
    (
        (stride,),
        requests.wavefronts([(lane, 4 * lane * stride) for lane in range(32)], 4),
    )
    for stride in (1, 2, 3, 4, 12, 31, 32, 33)
]
answered = notebook.check(cycles, *right)

# %% [markdown]
# A solution, if you want to see one:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def cycles(stride):
    # 32 lanes are spread over 32 / gcd(stride, 32) banks.
    return int(np.gcd(stride, 32))


assert notebook.check(cycles, *right)

# %% [markdown]
# Before you look: how many with vectors of 128 bits? With padding, a stride of 33? If all lanes read one word?

# %%
here = run("bank_conflicts")
here[["pattern", "width_bits", "stride", "ways", "predicted_wavefronts"]].head(6)

# %%
picture("bank_conflicts", here)

# %%
claims("bank_conflicts", here)

# %% [markdown]
# Of all rules this is the most exact: dashed and solid lines lie on each other. That is why `trace` can count
# wavefronts without a GPU. Where the rule surprises, it is in your favour: neighbours that share a wide word join their
# passes.
#
# ## Two products in shared memory
#
# The guide explains shared memory with `C = A @ B`, where A has 32 columns and B 32 rows. A block of 32 x 32 threads
# computes a tile of C, with neither tile of A and B in shared memory (`simple`), with that of A (`shared_a`), or with
# both (`shared_ab`). This experiment and the next two are shown as recorded; `numba-gemm lab narrow_product
# product_with_transpose carve_out` runs them on your GPU, and the first two also on the simulator.

# %%
notebook.source("lab/memory/narrow_product", function="shared_ab")

# %% [markdown]
# On a V100 the guide measured 119.9, 144.4 and 195.5 GB/s for the three. How many times as fast as `simple` is
# `shared_a` on an H200?

# %%
one_tile = notebook.predict("shared_a, times as fast as simple", ...)

# %%
picture("narrow_product")

# %%
kernels = recorded("narrow_product")[0].set_index("kernel")
speeds, by_passes = kernels["gb_s"], kernels["predicted_by_hits_gb_s"]
one_tile.reveal(
    speeds["shared_a"] / speeds["simple"],
    model=by_passes["shared_a"] / by_passes["simple"],
    because="The guide's V100: 1.20.",
)

# %%
claims("narrow_product")

# %% [markdown]
# The tile of A alone does not help here: L1 already serves many of the repeated reads, and shared memory takes as many
# passes as hits in L1. Both tiles together are the fastest, because shared memory cannot miss.
#
# In `C = A @ A.T` neighbouring threads need rows of A that are 128 bytes apart. `strided` reads them directly;
# `coalesced` reads along rows and transposes in shared memory; `padded` does the same in a tile with rows of 33 floats.
#
# Before you look: which step gains more, coalescing or padding?

# %%
picture("product_with_transpose")

# %%
claims("product_with_transpose")

# %% [markdown]
# Make global reads coalesced first, then remove bank conflicts. The number of passes through L1 and shared memory
# predicts the order of the three kernels, and their speeds approximately.
#
# Both have whole tiles only. `shared_tile` of the ladder fills what lies outside of a matrix with zeros.
#
# Matrices of 4095 rows and columns have as many tiles as those of 4096. By what percentage does a product of the
# smaller matrices take longer, in tiles of 32 x 32?

# %%
longer = notebook.predict("4095 over 4096", ..., unit="% longer")

# %%
picture("partial_tiles")

# %%
edges = recorded("partial_tiles")[0].query("tile == 32").set_index("extent")["us"]
longer.reveal(100 * (edges[4095] / edges[4096] - 1), measured=True, tolerance=0.5)

# %%
claims("partial_tiles")

# %% [markdown]
# A little longer: the tiles are as many, and rows of an odd length begin off the boundaries of sectors.
#
# ## On the way to shared memory
#
# Notebook 7's asynchronous copies pass the registers by. The guide compares them with loads and stores, for elements of
# 4, 8 and 16 bytes: a thread reads the clock before its first copy, and when all are done.
#
# Before you look: a synchronous copy waits for its load before it stores. If the compiler unrolls the loop four times,
# how many times does a thread wait for 24 elements? And with asynchronous copies?

# %%
picture("async_copies")

# %%
claims("async_copies")

# %% [markdown]
# The more elements, the more an asynchronous copy gains. Up to four elements of 4 or 8 bytes, when the synchronous copy
# waits once as well, the two differ little.
#
# ## Shared memory or L1
#
# A multiprocessor's shared memory and its L1 cache are parts of one storage. The **carve-out** is the share that a
# kernel prefers for shared memory.
#
# Before you look: a block reads a tile again and again from global memory. At which carve-out does it slow down? Which
# stages of the ladder slow down with little shared memory, and which with little L1?

# %%
picture("carve_out", height=6)

# %%
claims("carve_out")

# %% [markdown]
# A tile that is read again has to fit the L1 that is left, and a kernel with shared tiles needs room for several
# blocks. A plain copy uses neither and does not change. No kernel here is noticeably slower without a preference than
# with the best one, so leave the choice to the driver unless a measurement says otherwise.
#
# ## Barriers
#
# At a barrier, threads wait until all have reached it. `syncthreads` is a barrier of the block, `syncwarp` one of the
# warp.
#
# Before you look: what does a barrier after every single multiply-add cost? And in rounds in which one warp in four has
# sixteen times as much to do, each in turn: how much longer do they take with a barrier of the block after each round?

# %%
notebook.source("lab/memory/barriers", function="rounds_of")

# %%
here = run("barriers")
picture("barriers", here)

# %%
claims("barriers", here)

# %% [markdown]
# Where all warps do the same, a barrier after enough work is free. It costs the wait for the slowest. Every k-tile of
# the ladder ends at one, which is why its stages give each warp the same to do.
#
# And a barrier that not all threads reach? On hardware that is undefined: it may hang, or let half-written tiles be
# read. The package's own scheduler, under which the simulator's kernels run, always finds it. Here are kernels that are
# wrong on purpose, and some that only look so, and what the scheduler says of each:

# %%
notebook.source("lab/memory/barriers", function="block_barrier_in_branch")

# %%
pd.DataFrame(
    [
        {"kernel": name, "the scheduler says": said}
        for name, said in barriers.ask_scheduler().items()
    ]
)

# %% [markdown]
# **Question:** two calls of `syncthreads`, one in either branch of an `if`: every thread reaches one. Why is it wrong
# all the same? (Look for it in the table. A barrier is a place in the program where all meet; these are two places.)
#
# ## Getting memory at all
#
# Before anything moves, memory must be allocated. `cuMemAlloc` asks the driver each time, and `cuMemFree` waits until
# the device is idle. A **pool** keeps what is freed, and hands it out in the order of a stream.
#
# How many times as long as a pool does `cuMemAlloc` take to allocate and free a gigabyte?

# %%
gigabyte = notebook.predict("cuMemAlloc over a pool, 1 GB", ...)

# %%
picture("allocation")

# %%
times = recorded("allocation")[0].set_index(["way", "bytes"])["us"]
gigabyte.reveal(
    times["cuMemAlloc", 1 << 30] / times["pool, kept", 1 << 30],
    measured=True,
    tolerance=0.3,
)

# %%
claims("allocation")

# %% [markdown]
# A pool that keeps its memory takes as long for a gigabyte as for a few bytes. A pool that gives its memory back is
# slower than either at any size.
#
# One experiment more needs a host with several NUMA nodes, `numba-gemm lab numa`: whether it matters in which
# processor's memory a host buffer is, and where the thread runs that copies it.
#
# ## How good are the rules?
#
# All experiments, as recorded: sentences, and how many the numbers bear out.

# %%
rows = []
for name in filter(is_recorded, MEMORY):
    held = load(name).claims(recorded(name)[0])
    rows.append({"experiment": name, "claims": len(held), "hold": sum(held.values())})
summary = pd.DataFrame(rows).set_index("experiment")
print(summary.sum().to_string())
summary

# %% [markdown]
# Nearly all hold because they were written after measuring: several say that the guide's rule does *not* hold here. The
# rest of the laboratory, and what it cannot explain, is in [docs/memory_lab.md](../docs/memory_lab.md);
# `numba-gemm lab --list` runs it on your own GPU.
#
# ### Your turn: an experiment
#
# Does a copy of every second float64 waste as much as one of every fourth float32? Count by the rule first, and
# predict; on a GPU write the copy and time it with `machine.timed`, as `strided_copy` does. A start:

# %%
doubles = [(lane, 8 * 2 * lane) for lane in range(32)]
print(
    requests.sectors(doubles, 8),
    "sectors;",
    strided_copy.sectors_a_warp(4),
    "of float32 at stride 4",
)

# %% [markdown]
# ## The open question
#
# Kernels, precisions, streams, caches: all of them serve one line in a program. What does that line look like, which
# arrays does it take, and how does it choose among all these kernels? [Notebook 11](11_in_use.ipynb) uses it.
