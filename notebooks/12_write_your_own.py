# %% [markdown]
# # 12. Write your own
#
# *Before this: notebooks [1](01_naive_and_coalesced.ipynb) to [3](03_thread_tiles.ipynb). Time: about 45 minutes.*
#
# **The question.** How do you add a kernel of your own: see its accesses, check that it is correct, time it beside
# cuBLAS, and put it on the ladder? (The [puzzles](../docs/puzzles.md) ask you for the kernels of the ladder; this
# notebook is for a new one.)
#
# Here is a template that works, with everything that the project does with its own stages. Change the template and run
# the notebook again.
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
import json
import linecache
import os
import tempfile

import numpy as np
import pandas as pd

import numba_gemm
from numba_gemm.device.units import FLOAT32_BYTES
from numba_gemm.inspect import draw, step, trace
from numba_gemm.kernels import STAGES
from numba_gemm.models import accuracy, traffic
from numba_gemm.models.occupancy import occupancy

folder = Path(tempfile.mkdtemp())  # where your stage is saved

# %% [markdown]
# ## The template
#
# A stage is a file, and so is the next cell: a later cell saves it as it is, so it has its own imports. It contains
#
# - `build(config, aligned)`, which returns a kernel with the parameters `(alpha, a, b, beta, c)`. The extents in
#   `config`, a `TileConfig`, are constants to the compiler. `require` raises an error for a configuration that breaks a
#   condition. `aligned` is for stages with 128-bit accesses, as in notebook 4.
# - a `LadderStage`, which registers the kernel: its name, configurations and block.
#
# `column_strip` does without shared memory: a thread computes TM elements of a column of C, one below the other, in
# registers. An element of B is loaded once for all of them.

# %%
from numba import cuda, float32, uint32

from numba_gemm.device.store import axpby
from numba_gemm.kernels.ladder.stage import LadderStage
from numba_gemm.kernels.ladder.tile_config import TileConfig, require


def build(config, aligned):
    BM, BN, TM = config.BM, config.BN, config.TM
    require(config, {"one column per thread: TN == 1": config.TN == 1})

    @cuda.jit
    def column_strip(alpha, a, b, beta, c):
        acc = cuda.local.array(TM, float32)
        m, n = c.shape
        k = a.shape[1]
        row = cuda.blockIdx.y * BM + uint32(cuda.threadIdx.y) * TM
        col = cuda.blockIdx.x * BN + uint32(cuda.threadIdx.x)
        # Beyond C's edges the last row or column is read again, and nothing is written.
        own_col = min(col, n - 1)
        for i in range(TM):
            acc[i] = float32(0)

        p = 0
        while p < k:
            b_own = b[p, own_col]
            for i in range(TM):
                acc[i] += a[min(row + i, m - 1), p] * b_own
            p += 1

        for i in range(TM):
            if row + i < m and col < n:
                c[row + i, col] = axpby(alpha, acc[i], beta, c, row + i, col)

    return column_strip


STAGE = LadderStage(
    name="column_strip",
    summary="TM elements of a column of C per thread, without shared memory",
    build=build,
    configs=(TileConfig(BM=8, BN=128, BK=1, TM=4),),
    test_config=TileConfig(BM=8, BN=8, BK=1, TM=4),
    block=lambda config: (config.BN, config.BM // config.TM),
)

# %% [markdown]
# ## Step it
#
# Thread (1, 0) of the small `test_config`. A has two columns, so the loop has two iterations. The cell prints only the
# steps that change a sum: the changes, and below them the line that comes next, in a "file" that is the template's
# cell. (An array from `cuda.local.array` is not initialised; the simulator fills it with NaN.)

# %%
a = np.arange(1, 17, dtype=np.float32).reshape(8, 2)
b = np.array([[1, 10, 100], [1, 10, 100]], np.float32)
c = np.zeros((8, 3), np.float32)

for s in step(STAGE, None, None, 1, a, b, 0, c, thread=(1, 0), config="test"):
    if "acc" in s.changed:
        print(s)
print(c)

# %% [markdown]
# ## Trace it
#
# One thread, in the small configuration: four rows of A, one column of B, four elements of C. Each element of B is
# loaded once.

# %%
a, b, c = (
    np.ones((16, 12), np.float32),
    np.ones((12, 16), np.float32),
    np.zeros((16, 16), np.float32),
)
draw.who_reads_what(
    trace(STAGE, None, None, 1, a, b, 0, c, config="test", blocks=[(0, 0, 0)]), thread=3
)

# %% [markdown]
# Now a block of the real configuration: 8 x 128 elements of C, with K = 8, which take 8,192 multiply-adds. How many
# floats do its threads load from A and B together? A model needs no trace. In a thread's tile of TM x TN elements, TN
# multiply-adds take the same float of A, and TM take the same float of B. So the threads load m n k (1/TM + 1/TN)
# floats, as blocks of BM x BN do in notebook 3.

# %%
loads = notebook.predict("floats loaded by the block", ...)

# %% [markdown]
# The trace counts them, and the model is `tiled_reads` of `numba_gemm.models.traffic`. If they differ for a kernel of
# yours, it loads something twice, or its threads share what they load. The table has the cost of each line's requests:

# %%
a, b, c = (
    np.ones((8, 8), np.float32),
    np.ones((8, 128), np.float32),
    np.zeros((8, 128), np.float32),
)
found = trace(STAGE, None, None, 1, a, b, 0, c)
tile = STAGE.configs[0]
loads.reveal(
    found.traffic.query("space == 'global'")["read"].sum() / FLOAT32_BYTES,
    model=traffic.tiled_reads(8, 128, 8, tile.TM, tile.TN),
    measured=False,
    because=f"8 * 128 * 8 * (1 / TM + 1 / TN), TM = {tile.TM} and TN = {tile.TN}.",
)
found.lines[["line", "array", "op", "requests", "per_request", "efficiency"]]

# %% [markdown]
# ### Your turn: the effect of TM
#
# A multiply-add of a warp needs an element of A, the same for all lanes, and 32 of B, which are neighbours. How many
# sectors does a warp load for each of its multiply-adds, if a thread computes `tm` elements? Replace `None`; the next
# cell compares your answer with traces of the kernel.


# %%
def sectors_each(tm):
    return None  # your answer


# %%
def traced(tm):
    """Sectors that one warp loads in four turns of the loop, over its multiply-adds."""
    a, b, c = (
        np.ones((tm, 4), np.float32),
        np.ones((4, 32), np.float32),
        np.zeros((tm, 32), np.float32),
    )
    lines = trace(
        STAGE, None, None, 1, a, b, 0, c, config=TileConfig(BM=tm, BN=32, BK=1, TM=tm)
    ).lines
    return float(lines.loc[lines["op"] == "load", "sectors"].sum() / (4 * tm))


right = [((tm,), traced(tm)) for tm in (1, 2, 4, 8)]
answered = notebook.check(sectors_each, *right)

# %% [markdown]
# A solution:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def sectors_each(tm):
    return 1 + 4 / tm  # one of A for each, and four of B for every tm


assert notebook.check(sectors_each, *right)

# %% [markdown]
# With `tm` = 1 that is `coalesced`. A larger `tm` brings it close to 1. So make it as large as you can? The compiler
# answers that further down.
#
# ## Is it correct?
#
# The product is compared with float64, element by element, by the bound of notebook 0. Most mistakes are at the edges
# of tiles, so the extents are around them. C contains NaN if `beta` is 0, since such a product must not read it.


# %%
def judge(stage, m, n, k, alpha=1.0, beta=0.0):
    rng = np.random.default_rng([m, n, k])
    a, b, before = (
        rng.uniform(-1, 1, shape).astype(np.float32)
        for shape in ((m, k), (k, n), (m, n))
    )
    c = before.copy() if beta else np.full((m, n), np.nan, np.float32)
    found = trace(stage, None, None, alpha, a, b, beta, c, config="test")
    verdict = accuracy.compare(c, *accuracy.reference(alpha, a, b, beta, before), k)
    return f"{f'{m} x {n} x {k}':<12} races: {len(found.races)}, {verdict}"


print(judge(STAGE, 8, 8, 8))
print(judge(STAGE, 1, 1, 1))
print(judge(STAGE, 9, 7, 5, alpha=0.5, beta=-2.0))
print(judge(STAGE, 17, 9, 12))

# %% [markdown]
# A check that cannot fail proves nothing. So the next cell saves the stage as a file, breaks a copy of the file, and
# checks it. The mistake: a loop that leaves out the last term.

# %%
# The template's cell, as it stands.
text = "".join(linecache.getlines(build.__code__.co_filename))
(folder / "my_stage.py").write_text(text)


def stage_of(path):
    """The stage in a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.STAGE


(folder / "broken_stage.py").write_text(
    text.replace("while p < k:", "while p < k - 1:")
)
print(judge(stage_of(folder / "broken_stage.py"), 9, 7, 5))

# %% [markdown]
# ## Add it to the ladder
#
# The public function, the tests, the benchmark and the inspector find stages in `STAGES`. Here the stage is registered
# for this process only:

# %%
STAGES[STAGE.name] = STAGE

rng = np.random.default_rng(0)
a, b = (rng.uniform(-1, 1, shape).astype(np.float32) for shape in ((20, 6), (6, 30)))
# Every other row: any strides.
c = numba_gemm.tiled_sgemm(a[::2], b, stage="column_strip")
print(accuracy.compare(c, *accuracy.reference(1.0, a[::2], b), k=6))

# %% [markdown]
# The table that every stage must pass is `tests/support/ladder_cases.py`: shapes around the edges, seven layouts of the
# operands, several `alpha` and `beta`, and a guard around C that shows writes outside of it. It is in the repository,
# not in the installed package.

# %%
tests = Path(numba_gemm.__file__).parents[1] / "tests"
if (tests / "support" / "ladder_cases.py").is_file():
    sys.path.append(str(tests))
    from support.ladder_cases import cases, run

    outcomes = {
        case: run(STAGE, STAGE.test_config, case) for case in cases(STAGE.test_config)
    }
    wrong = {case: outcome for case, outcome in outcomes.items() if not outcome.ok}
    print(f"{len(outcomes) - len(wrong)} of {len(outcomes)} cases are right")
    for case, outcome in list(wrong.items())[:5]:
        print(f"{case}: {outcome}")
else:
    print("This is not a checkout of the repository; in one, the table would run here.")

# %% [markdown]
# ## The compiled kernel
#
# The simulator compiles nothing, and a process has either the simulator or the compiler. So this is a process of its
# own, without the simulator. It needs the compiler, but no GPU.

# %%
REGISTER = """
from my_stage import STAGE
from numba_gemm.kernels import STAGES
from numba_gemm.kernels.ladder import TileConfig
STAGES[STAGE.name] = STAGE
"""


def in_a_process(code, *arguments, simulated=False):
    """Run Python that knows the stage, and return what it prints."""
    places = [
        str(folder),
        str(Path(numba_gemm.__file__).parents[1]),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    environment = os.environ | {
        "NUMBA_ENABLE_CUDASIM": "1" if simulated else "0",
        "PYTHONPATH": os.pathsep.join(places),
    }
    environment["NUMBA_GEMM_CACHE_DIR"] = (
        "off"  # which keeps kernels by the package's files, and this is none of them
    )
    command = [sys.executable, "-c", REGISTER + code, *arguments]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{done.stdout}\n{done.stderr}")
    return done.stdout


INSPECT = (
    "import sys; from numba_gemm.inspect.cli import main; sys.exit(main(sys.argv[1:]))"
)
print(in_a_process(INSPECT, "column_strip", "--cc", "9.0"))

# %% [markdown]
# That is `numba-gemm inspect`, as for any stage, for an H200's compute capability, 9.0. **Spills** are values that did
# not fit into registers and that the compiler moved to memory; `local` counts these, and arrays that are not in
# registers. Both should be 0.
#
# Now the question from above: how large should TM be? The next table has, for several TM, the registers of a thread and
# the instructions of the main loop: FFMA are multiply-adds, LDG loads from global memory. How many registers does a
# thread take with TM = 16? And at TM = 16, how many instructions does the loop have per FFMA?

# %%
registers = notebook.predict("registers with TM = 16", ...)
per_ffma = notebook.predict("instructions per FFMA with TM = 16", ...)

# %%
COMPILE = """
import json, sys
from numba_gemm.inspect import report
from numba_gemm.inspect.sass import ToolMissing
for tm in map(int, sys.argv[1:]):
    made = report.compiled(STAGE, TileConfig(BM=2 * tm, BN=128, BK=1, TM=tm), (9, 0))
    row = {"TM": tm, "registers": made.registers}
    row |= {"local": made.local, "spills": made.spills}
    try:
        row |= {name: made.mix[name] for name in ("FFMA", "LDG")}
        row["in the loop"] = sum(made.mix.values())
    except ToolMissing:  # pip install nvidia-cuda-nvdisasm
        pass
    print(json.dumps(row))
"""
compiled = pd.DataFrame(
    map(json.loads, in_a_process(COMPILE, "1", "4", "16", "128").splitlines())
)
compiled["warps per SM"] = [
    occupancy(256, registers, 0, (9, 0)).warps for registers in compiled["registers"]
]
if "FFMA" in compiled:
    compiled["per FFMA"] = (compiled["in the loop"] / compiled["FFMA"]).round(1)
compiled = compiled.set_index("TM")
registers.reveal(compiled.loc[16, "registers"], tolerance=0.2)
if "FFMA" in compiled:
    per_ffma.reveal(compiled.loc[16, "per FFMA"], tolerance=0.2)
compiled

# %% [markdown]
# A larger TM needs fewer loads per multiply-add, as predicted. But every sum takes a register, and so does the address
# of every row of A, with instructions to move it. These soon are most of the loop, and with more registers per thread
# fewer warps fit on a multiprocessor. At 128 the sums do not fit into registers at all: they are in local memory, which
# is a part of global memory. The template's 4 is a compromise.
#
# ## Time it
#
# `bench.py` checks each stage against float64, and then times all in turn, cuBLAS among them, so that a drifting clock
# slows all alike. It takes your stage like any other. Without a GPU it runs a small product on the simulator, which
# checks it; its time would mean nothing.

# %%
BENCH = "import sys; from numba_gemm.lab.bench.cli import main; sys.exit(main(sys.argv[1:]))"
names = ["coalesced", "shared_tile", STAGE.name]


def bench():
    options = ["--stages", ",".join([*names, "cublas"]), "--shape", "4096,4096,4096"]
    if not notebook.has_gpu():
        options = ["--stages", ",".join(names), "--shape", "33,17,9"]
    out = folder / "results"
    in_a_process(BENCH, *options, "--out", str(out), simulated=not notebook.has_gpu())
    return pd.read_csv(out / "results.csv")


results = bench()
columns = ["stage", "m", "n", "k", "status", "error_in_bounds"]
if notebook.has_gpu():
    columns += ["median_us", "gflops", "percent_of_peak", "ratio_to_cublas"]
results[columns].round(3)

# %% [markdown]
# With a GPU, the picture shows these times. Without one, it shows the recorded times of the two other stages. (In the
# stored outputs `column_strip` comes close to `shared_tile`, without any shared memory: reuse in registers can be worth
# as much.)

# %%
if notebook.has_gpu():
    chart = draw.ladder_chart(results, gpu=notebook.gpu_name())
else:
    chart = draw.ladder_chart(notebook.measure("coalesced", "shared_tile"))
chart

# %% [markdown]
# ## Make it yours
#
# Change the template and run all cells again. Some ideas, from small to large; each is a prediction to make first, with
# the trace and the compiler's table, before the time tells:
#
# - Another TM in `configs`, or blocks of another shape.
# - Load a row of A in steps of four along K, so that its addresses move once for four terms.
# - Give a thread two columns, 64 apart, so that an element of A serves two of its sums. Why apart?
# - Put the tile of A into shared memory, as `shared_tile` does. Which barriers does it need? `races` tells.
#
# A stage that teaches something belongs in the repository. "Add a stage" in its `CONTRIBUTING.md` says what that takes:
# a file in `numba_gemm/kernels/ladder`, whose docstring says which bottleneck it removes and what limits it then, a
# record in `RECORDS`, and a name in `LadderStageName`. Tests, benchmark and inspector follow from the
# record, as they did here.
