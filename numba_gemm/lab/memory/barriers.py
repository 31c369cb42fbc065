"""A barrier costs the wait: nothing for syncwarp in a converged warp, the slowest warp for syncthreads.

There are four measurements, distinguished by the column `measurement`:

- "loop": A loop of one multiply-add and one barrier, run by one block on each multiprocessor. A multiply-add waits four
  clocks for the previous one; a multiprocessor issues four instructions per clock, each for a different quarter of its
  warps; and syncthreads takes 16 threads per clock. These are lower bounds. On an H200 the loop comes within about 7 %
  of them without a barrier and with `syncwarp` up to 128 threads: if the compiler sees that a warp is converged, it
  reduces the barrier to an instruction that does nothing, and only preserves the order of accesses around it. There is
  no wait, but the instruction still has to be issued. In blocks of 512 threads and more, whose warps fill all issue
  slots, this nearly doubles the time, as predicted. From 256 threads on, these loops are about 9 to 22 % above their
  bounds, which is not explained. `syncthreads` takes about 6.4 ns more than its bound, 13 clocks, in blocks of 64 to
  1024 threads, and about 5.5 ns in a block of one warp. So its cost is 16 threads per clock, plus, like a latency that
  nothing hides, the time to notify all threads that all have arrived: a small block takes about four times its bound,
  the largest a fifth more than its own.
- "even rounds" and "uneven rounds": Rounds of multiply-adds, with a barrier after each, by four warps, one per
  scheduler, so that no warp slows another. In even rounds all warps do the same work, and neither barrier shows. In
  uneven rounds, each warp in turn does 16 times as much as the others. With `syncwarp` warps never meet: the kernel
  lasts as long as the warp whose rounds have the largest sum, which is the prediction. With `syncthreads` each round
  lasts as long as its slowest warp: the sum of the maxima, about 3.2 times as long. Four clocks per multiply-add are
  predicted. The measured times are about 6 % longer, as in the chain of multiply-adds of `memory_spaces`, and 12 % in
  uneven rounds with `syncwarp`, most of which are short.
- "tile of A": `shared_a` of `narrow_product`, in which a warp reads only what it has written, compared with the same
  kernel with `syncthreads`. Both have the same predicted bound if L1 always hits, 545 µs, and take about 717 µs, as in
  `narrow_product`, and 785. There is one barrier and 65 loads, yet the barrier makes the first warp's multiply-adds
  wait for the last warp's load, and the kernel about a tenth slower.
- "divergent": Barriers that not all threads reach. On hardware, `syncthreads` in a branch that threads take differently
  is undefined: it may hang, or pair with another barrier and allow half-written tiles to be read. So these kernels run
  only in the simulator, under the package's scheduler, which reports the waiting and the exited threads: `outcome`. A
  thread that has returned is not waited for by `syncwarp` there, and is missing at `syncthreads`. Two calls of
  `syncwarp` in the two branches of an `if` match, since lanes are counted and not places; two of `syncthreads` do not,
  although a GPU might accept them. A mask of exactly the lanes of a branch is the correct way to synchronise them.

Source: CUDA C++ Best Practices Guide, "Shared Memory in Matrix Multiplication (C=AB)"; CUDA C++ Programming Guide,
"Synchronization Functions", "Synchronization Instruction" (throughput; for compute capability 7.x and 8.x, but not 9.0)
and "Multiprocessor Level" (latency); PTX ISA, "bar.warp.sync" and "barrier".

One module because the kernels, the measurement, the claims and the plot of an experiment are read together.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numba import cuda, float32, int32, uint32

from numba_gemm.device.units import FLOAT32_BYTES, WARP, ceil_div
from numba_gemm.lab.harness.experiment import Experiment
from numba_gemm.lab.memory import machine, narrow_product
from numba_gemm.lab.memory.drawing import COLOURS, bars, curve
from numba_gemm.lab.memory.narrow_product import W
from numba_gemm.runtime.timing import Call
from numba_gemm.simulator import probe, scheduler

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNROLLED = 8  # unrolled turns of a loop, so that the loop counter costs little
CHUNK = 16  # multiply-adds per step of a round
SCHEDULERS = 4  # per multiprocessor; each issues one instruction per clock
LATENCY = 4  # clocks from a multiply-add to one that depends on it
BARRIER_THREADS = 16  # threads per clock that syncthreads handles
UNEVEN_BLOCK = SCHEDULERS * WARP
FULL, DIVERGES = "completes", "DivergentBarrier"

# ---------------------------------------------------------------------------------------------------- timed kernels


@cuda.jit
def no_barriers(out: Any, one: Any, turns: Any) -> None:
    """Count turns with multiply-adds whose factors the compiler does not know."""
    x = float32(0)
    for _ in range(0, turns, UNROLLED):
        for _ in range(UNROLLED):
            x = x * one + one
    out[cuda.grid(1)] = x


@cuda.jit
def warp_barriers(out: Any, one: Any, turns: Any) -> None:
    """Same as `no_barriers`, with a warp barrier after each multiply-add."""
    x = float32(0)
    for _ in range(0, turns, UNROLLED):
        for _ in range(UNROLLED):
            x = x * one + one
            cuda.syncwarp()
    out[cuda.grid(1)] = x


@cuda.jit
def block_barriers(out: Any, one: Any, turns: Any) -> None:
    """Same as `no_barriers`, with a block barrier after each multiply-add."""
    x = float32(0)
    for _ in range(0, turns, UNROLLED):
        for _ in range(UNROLLED):
            x = x * one + one
            cuda.syncthreads()
    out[cuda.grid(1)] = x


@cuda.jit
def warp_rounds(out: Any, one: Any, steps: Any) -> None:
    """Run each warp's steps of each round, with a warp barrier after the round; `steps` has one row per round."""
    warp = cuda.threadIdx.x // WARP
    x = float32(0)
    for turn in range(steps.shape[0]):
        for _ in range(steps[turn, warp]):
            for _ in range(CHUNK):
                x = x * one + one
        cuda.syncwarp()
    out[cuda.grid(1)] = x


@cuda.jit
def block_rounds(out: Any, one: Any, steps: Any) -> None:
    """Same as `warp_rounds`, with a block barrier after each round."""
    warp = cuda.threadIdx.x // WARP
    x = float32(0)
    for turn in range(steps.shape[0]):
        for _ in range(steps[turn, warp]):
            for _ in range(CHUNK):
                x = x * one + one
        cuda.syncthreads()
    out[cuda.grid(1)] = x


@cuda.jit
def shared_a_syncthreads(a: Any, b: Any, c: Any) -> None:
    """`shared_a` of `narrow_product` with a block barrier instead of the warp barrier."""
    a_tile = cuda.shared.array((W, W), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    row = cuda.blockIdx.y * cuda.blockDim.y + y
    col = cuda.blockIdx.x * cuda.blockDim.x + x
    a_tile[y, x] = a[row, x]
    cuda.syncthreads()  # stronger than needed: row y of the tile is written and read by this warp only
    acc = float32(0)
    for i in range(uint32(W)):
        acc += a_tile[y, i] * b[i, col]
    c[row, col] = acc


# ---------------------------------------------------------------- kernels for the simulator only, with 64 threads

DIVERGENT_BLOCK = 64


@cuda.jit
def block_barrier_after_return(out: Any) -> None:
    """The second warp returns before the first one reaches the barrier."""
    t = cuda.threadIdx.x
    if t >= WARP:
        return
    cuda.syncthreads()
    out[t] = 1


@cuda.jit
def block_barrier_in_branch(out: Any) -> None:
    """The first warp has an additional barrier, while the second one waits at the next barrier."""
    t = cuda.threadIdx.x
    if t < WARP:
        cuda.syncthreads()
    out[t] = 1
    cuda.syncthreads()


@cuda.jit
def block_barrier_in_both_branches(out: Any) -> None:
    """Each warp waits at its own barrier."""
    t = cuda.threadIdx.x
    if t < WARP:
        cuda.syncthreads()
    else:
        cuda.syncthreads()
    out[t] = 1


@cuda.jit
def warp_barrier_after_return(out: Any) -> None:
    """Half of each warp returns before the other half reaches the barrier of all lanes."""
    t = cuda.threadIdx.x
    if t % WARP >= WARP // 2:
        return
    cuda.syncwarp()
    out[t] = 1


@cuda.jit
def warp_barrier_in_both_branches(out: Any) -> None:
    """The halves of each warp wait at different barriers of all lanes."""
    t = cuda.threadIdx.x
    if t % WARP < WARP // 2:
        cuda.syncwarp()
    else:
        cuda.syncwarp()
    out[t] = 1


@cuda.jit
def warp_barrier_of_absent_lanes(out: Any) -> None:
    """Half of each warp waits for all lanes, while the other half waits at a block barrier."""
    t = cuda.threadIdx.x
    if t % WARP < WARP // 2:
        cuda.syncwarp()
    cuda.syncthreads()
    out[t] = 1


@cuda.jit
def masked_barrier_in_branch(out: Any) -> None:
    """Half of each warp exchanges numbers through a barrier of only these lanes."""
    numbers = cuda.shared.array(DIVERGENT_BLOCK, int32)
    t = cuda.threadIdx.x
    if t % WARP < WARP // 2:
        numbers[t] = 1
        cuda.syncwarp(0xFFFF)  # each of these lanes has written before its neighbour reads
        out[t] = numbers[t ^ 1]
    cuda.syncthreads()


DIVERGENT: dict[str, tuple[Any, str]] = {
    "block_barrier_after_return": (block_barrier_after_return, DIVERGES),
    "block_barrier_in_branch": (block_barrier_in_branch, DIVERGES),
    "block_barrier_in_both_branches": (block_barrier_in_both_branches, DIVERGES),
    "warp_barrier_of_absent_lanes": (warp_barrier_of_absent_lanes, DIVERGES),
    "warp_barrier_after_return": (warp_barrier_after_return, FULL),
    "warp_barrier_in_both_branches": (warp_barrier_in_both_branches, FULL),
    "masked_barrier_in_branch": (masked_barrier_in_branch, FULL),
}
"""Kernels with the outcome that the scheduler should report."""


def outcomes() -> dict[str, str]:
    """Return the scheduler's outcome for each kernel of `DIVERGENT`; for the simulator."""
    said = {}
    for name, (kernel, _) in DIVERGENT.items():
        out = np.zeros(DIVERGENT_BLOCK, np.int32)
        try:
            scheduler.run(kernel, 1, DIVERGENT_BLOCK, [out])
            said[name] = f"{FULL}: {np.count_nonzero(out)} threads have written"
        except scheduler.DivergentBarrier as error:
            waiting = [f"{len(threads)} wait" for threads in error.waiting.values()]
            exited = [f"{len(error.exited)} have returned"] if error.exited else []
            said[name] = f"{DIVERGES}: {', '.join(waiting + exited)}"
    return said


def ask_scheduler() -> dict[str, str]:
    """Return `outcomes`, from a child process on the simulator if this process uses a GPU."""
    if machine.SIMULATOR:
        return outcomes()
    code = f"import json; from {__name__} import outcomes; print(json.dumps(outcomes()))"
    child = subprocess.run(
        [sys.executable, "-c", code], env=probe.simulator_environment(), capture_output=True, text=True, check=False
    )
    if child.returncode:
        raise RuntimeError(f"the scheduler's process ended with {child.returncode}: {child.stderr}")
    found: dict[str, str] = json.loads(child.stdout)
    return found


# ------------------------------------------------------------------------------------------------------- experiment

LOOPS: dict[str, Any] = {"none": no_barriers, "syncwarp": warp_barriers, "syncthreads": block_barriers}
ROUNDS: dict[str, Any] = {"syncwarp": warp_rounds, "syncthreads": block_rounds}
TILES: dict[str, Any] = {"syncwarp": narrow_product.shared_a, "syncthreads": shared_a_syncthreads}


def least_clocks(barrier: str, block: int) -> float:
    """Lower bound of the clocks per turn of a loop."""
    instructions = 1 if barrier == "none" else 2
    clocks = max(LATENCY, instructions * ceil_div(block, WARP * SCHEDULERS))
    return max(clocks, block / BARRIER_THREADS) if barrier == "syncthreads" else clocks


def uneven(rounds: int, short: int, long: int) -> np.ndarray[Any, Any]:
    """Steps per round and warp of `UNEVEN_BLOCK`; the warps have long rounds in turn."""
    return np.where(np.arange(rounds)[:, None] % SCHEDULERS == np.arange(SCHEDULERS), long, short).astype(np.int32)


def critical(barrier: str, steps: np.ndarray[Any, Any]) -> int:
    """Number of steps on the critical path of the block."""
    return int(steps.max(axis=1).sum() if barrier == "syncthreads" else steps.sum(axis=0).max())


def counted(enqueued: Call, out: Any, expected: np.ndarray[Any, Any]) -> None:
    """Raise AssertionError unless each block writes the expected values."""
    out.copy_to_device(np.zeros(out.shape, np.float32))
    enqueued(0)
    np.testing.assert_array_equal(
        out.copy_to_host().reshape(-1, len(expected)), np.tile(expected, (out.size // len(expected), 1))
    )


def barriers(
    blocks: Sequence[int] = (32, 64, 128, 256, 512, 1024),
    turns: int = 1 << 16,
    rounds_a_launch: int = 16,
    steps: tuple[int, int] = (16, 256),
    m: int = 8192,
    grid: int = 0,
    rounds: int = machine.ROUNDS,
) -> pd.DataFrame:
    """Time barriers in loops, rounds and a matrix multiplication, and run divergent ones under the scheduler.

    Parameters
    ----------
    blocks : sequence of int
        Threads per block in the loops, multiples of 32.
    turns : int
        Turns of a loop, a multiple of `UNROLLED`.
    rounds_a_launch : int
        Rounds with a barrier after each, a multiple of the 4 warps.
    steps : tuple of int
        Steps of a short and of a long round, each with `CHUNK` multiply-adds.
    m : int
        Rows and columns of the product for "tile of A", a multiple of 32.
    grid : int
        Blocks of the loops and rounds; 0 means one per multiprocessor.
    rounds : int
        Samples of each measurement.

    Returns
    -------
    DataFrame
        One row per kernel: ``measurement``, ``barrier`` and ``block``; ``turns``, each with a barrier, ``us`` (median),
        ``ns_a_turn`` and ``predicted_ns_a_turn``. For divergent kernels, ``barrier`` is the name of the kernel, nothing
        is timed, and there are ``outcome`` and its expected first word, ``predicted_outcome``.

    Raises
    ------
    AssertionError
        if a kernel computes a wrong result.
    RuntimeError
        if the scheduler's process fails.
    """
    properties = machine.properties()
    one = np.float32(1)
    calls: dict[tuple[str, str, int], Call] = {}
    predicted: dict[tuple[str, str, int], tuple[int, float]] = {}  # turns, and total seconds

    grid = grid or properties.sm_count
    for block in blocks:
        out = cuda.device_array(grid * block, np.float32)
        for barrier, kernel in LOOPS.items():
            case = "loop", barrier, block
            calls[case] = machine.enqueue(kernel, grid, block, out, one, turns)
            counted(calls[case], out, np.full(block, turns, np.float32))
            predicted[case] = turns, turns * least_clocks(barrier, block) / properties.clock_hz

    out = cuda.device_array(grid * UNEVEN_BLOCK, np.float32)
    short, long = steps
    for measurement, planned in (
        ("even rounds", uneven(rounds_a_launch, long, long)),
        ("uneven rounds", uneven(rounds_a_launch, short, long)),
    ):
        on_device = cuda.to_device(planned)
        for barrier, kernel in ROUNDS.items():
            case = measurement, barrier, UNEVEN_BLOCK
            calls[case] = machine.enqueue(kernel, grid, UNEVEN_BLOCK, out, one, on_device)
            counted(calls[case], out, np.repeat(CHUNK * planned.sum(axis=0), WARP).astype(np.float32))
            clocks = LATENCY * CHUNK * critical(barrier, planned)
            predicted[case] = rounds_a_launch, clocks / properties.clock_hz

    host_a, host_b = narrow_product.integers(m, W, 0), narrow_product.integers(W, m, 1)
    a, b, c = cuda.to_device(host_a), cuda.to_device(host_b), cuda.device_array((m, m), np.float32)
    passed = narrow_product.cost(narrow_product.accesses("shared_a", m))
    hits, _ = narrow_product.bounds(m, m, passed, FLOAT32_BYTES * (2 * m * W + m * m))
    for barrier, kernel in TILES.items():
        case = "tile of A", barrier, W * W
        calls[case] = machine.enqueue(kernel, (m // W, m // W), (W, W), a, b, c)
        c.copy_to_device(np.full((m, m), np.nan, np.float32))
        calls[case](0)
        np.testing.assert_array_equal(c.copy_to_host(), host_a @ host_b)
        predicted[case] = 1, hits / 1e6

    samples = machine.timed(calls, rounds=rounds)
    rows: list[dict[str, Any]] = [
        {
            "measurement": measurement,
            "barrier": barrier,
            "block": block,
            "turns": predicted[measurement, barrier, block][0],
            "us": found.median,
            "ns_a_turn": 1e3 * found.median / predicted[measurement, barrier, block][0],
            "predicted_ns_a_turn": 1e9
            * predicted[measurement, barrier, block][1]
            / predicted[measurement, barrier, block][0],
        }
        for (measurement, barrier, block), found in samples.items()
    ]
    said = ask_scheduler()
    rows += [
        {
            "measurement": "divergent",
            "barrier": name,
            "block": DIVERGENT_BLOCK,
            "outcome": said[name],
            "predicted_outcome": expected,
        }
        for name, (_, expected) in DIVERGENT.items()
    ]
    return pd.DataFrame(rows)


def plot(frame: pd.DataFrame, figure: Figure) -> None:
    """Plot the loops against the block size, the rounds, and the scheduler's outcomes."""
    axes = figure.subplot_mosaic([["loop", "rounds"], ["loop", "said"]], height_ratios=[3, 2])
    loops = frame[frame["measurement"] == "loop"].sort_values("block")
    for index, barrier in enumerate(LOOPS):
        own = loops[loops["barrier"] == barrier]
        curve(axes["loop"], own["block"], own["ns_a_turn"], own["predicted_ns_a_turn"], barrier, index)
    axes["loop"].set_xscale("log", base=2)
    axes["loop"].set_xticks(sorted(set(loops["block"])), [str(block) for block in sorted(set(loops["block"]))])
    axes["loop"].set_yscale("log", base=2)
    axes["loop"].yaxis.set_major_formatter("{x:g}")
    axes["loop"].set(xlabel="threads a block", ylabel="ns a multiply-add and a barrier")
    axes["loop"].legend()
    rounds = frame[frame["measurement"].isin(["even rounds", "uneven rounds", "tile of A"])]
    names = [f"{row.measurement}, {row.barrier}" for row in rounds.itertuples()]
    bars(axes["rounds"], names, rounds["us"], rounds["predicted_ns_a_turn"] * rounds["turns"] / 1e3)
    axes["rounds"].set(xlabel="µs")
    axes["rounds"].legend(loc="upper right")
    said = frame[frame["measurement"] == "divergent"]
    axes["said"].axis("off")
    axes["said"].text(
        0,
        1,
        "\n".join(["under the scheduler:", *(f"{row.barrier}:\n    {row.outcome}" for row in said.itertuples())]),
        va="top",
        fontsize=7,
        color=COLOURS[-1],
        transform=axes["said"].transAxes,
    )


def claims(frame: pd.DataFrame) -> dict[str, bool]:
    """Check the statements of the module's docstring against a result."""
    timed = frame[frame["measurement"] != "divergent"].set_index(["measurement", "barrier", "block"])["ns_a_turn"]
    timed = timed.sort_index()
    least = frame[frame["measurement"] == "loop"]
    said = frame[frame["measurement"] == "divergent"]
    summed = frame[frame["measurement"].isin(["even rounds", "uneven rounds"])]
    rounds = summed["ns_a_turn"] / summed["predicted_ns_a_turn"]
    none, warp, block = (timed["loop", barrier] for barrier in LOOPS)
    floor = least[least["barrier"] == "syncthreads"].set_index("block")["predicted_ns_a_turn"].sort_index()
    beyond = block - floor
    uneven_warp, uneven_block = (timed["uneven rounds", barrier, UNEVEN_BLOCK] for barrier in ROUNDS)
    even_warp, even_block = (timed["even rounds", barrier, UNEVEN_BLOCK] for barrier in ROUNDS)
    tile_warp, tile_block = (timed["tile of A", barrier, W * W] for barrier in TILES)
    return {
        "no loop is faster than its floor, to a twentieth": bool(
            (least["ns_a_turn"] > 0.95 * least["predicted_ns_a_turn"]).all()
        ),
        "in blocks of up to 128 threads, syncwarp costs a converged warp nothing": bool(
            (warp.loc[:128] < 1.2 * none.loc[:128]).all()
        ),
        "syncthreads costs more than syncwarp in blocks of all sizes": bool((block > 1.2 * warp).all()),
        "and in the largest block half as much again as in the smallest": bool(block.iloc[-1] > 1.5 * block.iloc[0]),
        "beyond its floor, syncthreads takes as long in blocks of all sizes, to a half": bool(
            0 < beyond.max() < 1.5 * beyond.min()
        ),
        "in even rounds neither barrier costs a tenth": bool(even_block < 1.1 * even_warp),
        "in uneven rounds syncthreads makes all wait for the slowest: more than twice the time": bool(
            uneven_block > 2 * uneven_warp
        ),
        "that is the time of even rounds, to a tenth": bool(abs(uneven_block / even_block - 1) < 0.1),
        "all rounds take what their sums predict, to a fifth": bool((abs(rounds - 1) < 0.2).all()),
        "for the tile of A, syncthreads is slower, by less than a quarter": bool(
            1.03 * tile_warp < tile_block < 1.25 * tile_warp
        ),
        "the scheduler finds every barrier of a block that not all reach": bool(
            [outcome.partition(":")[0] for outcome in said["outcome"]] == list(said["predicted_outcome"])
        ),
    }


ROUND_TYPES = "float32[::1], float32, int32[:, ::1]"
EXPERIMENT = Experiment(
    name="barriers",
    section="9.2.3.2",
    run=barriers,
    plot=plot,
    claims=claims,
    facts=machine.facts,
    small={"blocks": (32, 64), "turns": 8, "rounds_a_launch": 4, "steps": (1, 2), "m": 32, "grid": 1, "rounds": 1},
    kernels={
        **{kernel.__name__: (kernel, "float32[::1], float32, int64") for kernel in LOOPS.values()},
        **{kernel.__name__: (kernel, ROUND_TYPES) for kernel in ROUNDS.values()},
        "shared_a_syncthreads": (
            shared_a_syncthreads,
            "float32[:, ::1], float32[:, ::1], float32[:, ::1]",
        ),
    },
)
