"""A barrier costs the wait: nothing for syncwarp in a converged warp, the slowest warp for syncthreads."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numba import cuda, float32, int32

from numba_gemm.device.units import FLOAT32_BYTES, WARP, ceil_div
from numba_gemm.lab.harness.pictures import bars, curves, panels, text
from numba_gemm.lab.memory import machine, narrow_product
from numba_gemm.lab.memory.narrow_product import W
from numba_gemm.simulator import probe, scheduler

UNROLLED = 8  # unrolled turns of a loop, so that the loop counter costs little
CHUNK = 16  # multiply-adds per step of a round
SCHEDULERS = 4  # per multiprocessor; each issues one instruction per clock
LATENCY = 4  # clocks from a multiply-add to one that depends on it
BARRIER_THREADS = 16  # threads per clock that syncthreads handles
UNEVEN_BLOCK = SCHEDULERS * WARP
BARRIERS = ("none", "syncwarp", "syncthreads")
FULL, DIVERGES = "completes", "DivergentBarrier"

# ---------------------------------------------------------------------------------------------------- timed kernels


def counter(barrier: str) -> Any:
    """Return a kernel that counts turns with multiply-adds, with one of `BARRIERS` after each."""
    of_warp, of_block = barrier == "syncwarp", barrier == "syncthreads"

    @machine.kernel("float32[::1], float32, int64", f"loop_{barrier}")
    def count(out: Any, one: Any, turns: Any) -> None:
        x = float32(0)
        for _ in range(0, turns, UNROLLED):
            for _ in range(UNROLLED):
                x = x * one + one  # the compiler does not know the factors
                if of_warp:
                    cuda.syncwarp()
                if of_block:
                    cuda.syncthreads()
        out[cuda.grid(1)] = x

    return count


def rounds_of(barrier: str) -> Any:
    """Return a kernel with a barrier of the block, or of the warp, after each round, for which `steps` has a row."""
    of_block = barrier == "syncthreads"

    @machine.kernel("float32[::1], float32, int32[:, ::1]", f"rounds_{barrier}")
    def rounds(out: Any, one: Any, steps: Any) -> None:
        warp = cuda.threadIdx.x // WARP
        x = float32(0)
        for turn in range(steps.shape[0]):
            for _ in range(steps[turn, warp]):
                for _ in range(CHUNK):
                    x = x * one + one
            if of_block:
                cuda.syncthreads()
            else:
                cuda.syncwarp()
        out[cuda.grid(1)] = x

    return rounds


# ---------------------------------------------------------------- kernels for the simulator only, with 64 threads

DIVERGENT_BLOCK = 64


def block_barrier_after_return(out: Any) -> None:
    """The second warp returns before the first one reaches the barrier."""
    t = cuda.threadIdx.x
    if t >= WARP:
        return
    cuda.syncthreads()
    out[t] = 1


def block_barrier_in_branch(out: Any) -> None:
    """The first warp has an additional barrier, while the second one waits at the next barrier."""
    t = cuda.threadIdx.x
    if t < WARP:
        cuda.syncthreads()
    out[t] = 1
    cuda.syncthreads()


def block_barrier_in_both_branches(out: Any) -> None:
    """Each warp waits at its own barrier."""
    t = cuda.threadIdx.x
    if t < WARP:
        cuda.syncthreads()
    else:
        cuda.syncthreads()
    out[t] = 1


def warp_barrier_after_return(out: Any) -> None:
    """Half of each warp returns before the other half reaches the barrier of all lanes."""
    t = cuda.threadIdx.x
    if t % WARP >= WARP // 2:
        return
    cuda.syncwarp()
    out[t] = 1


def warp_barrier_in_both_branches(out: Any) -> None:
    """The halves of each warp wait at different barriers of all lanes."""
    t = cuda.threadIdx.x
    if t % WARP < WARP // 2:
        cuda.syncwarp()
    else:
        cuda.syncwarp()
    out[t] = 1


def warp_barrier_of_absent_lanes(out: Any) -> None:
    """Half of each warp waits for all lanes, while the other half waits at a block barrier."""
    t = cuda.threadIdx.x
    if t % WARP < WARP // 2:
        cuda.syncwarp()
    cuda.syncthreads()
    out[t] = 1


def masked_barrier_in_branch(out: Any) -> None:
    """Half of each warp exchanges numbers through a barrier of only these lanes."""
    numbers = cuda.shared.array(DIVERGENT_BLOCK, int32)
    t = cuda.threadIdx.x
    if t % WARP < WARP // 2:
        numbers[t] = 1
        cuda.syncwarp(0xFFFF)  # each of these lanes has written before its neighbour reads
        out[t] = numbers[t ^ 1]
    cuda.syncthreads()


DIVERGENT = {
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

LOOPS = {barrier: counter(barrier) for barrier in BARRIERS}
ROUNDS = {barrier: rounds_of(barrier) for barrier in BARRIERS[1:]}
TILES = {"syncwarp": narrow_product.KERNELS["shared_a"], "syncthreads": narrow_product.through_a(of_block=True)}


def least_clocks(barrier: str, block: int) -> float:
    """Lower bound of the clocks per turn of a loop."""
    instructions = 1 if barrier == "none" else 2
    clocks = max(LATENCY, instructions * ceil_div(block, WARP * SCHEDULERS))
    return max(clocks, block / BARRIER_THREADS) if barrier == "syncthreads" else clocks


def uneven(rounds: int, short: int, long: int) -> np.ndarray:
    """Steps per round and warp of `UNEVEN_BLOCK`; the warps have long rounds in turn."""
    return np.where(np.arange(rounds)[:, None] % SCHEDULERS == np.arange(SCHEDULERS), long, short).astype(np.int32)


def critical(barrier: str, steps: np.ndarray) -> int:
    """Number of steps on the critical path of the block."""
    return int(steps.max(axis=1).sum() if barrier == "syncthreads" else steps.sum(axis=0).max())


def barriers(
    blocks: Sequence[int] = (32, 64, 128, 256, 512, 1024),
    turns: int = 1 << 16,
    rounds_a_launch: int = 16,
    steps: tuple[int, int] = (16, 256),
    m: int = 8192,
    grid: int = 0,
    rounds: int = machine.ROUNDS,
) -> Iterator[dict[str, Any]]:
    """Time barriers in loops, rounds and a matrix multiplication, and run divergent ones under the scheduler.

    One row per kernel: ``us`` and ``ns_a_turn``, with a barrier in each of ``turns``. Divergent kernels are not
    timed; ``barrier`` is their name, and they have ``outcome`` and its expected first word, ``predicted_outcome``.

    Parameters
    ----------
    blocks: Threads per block in the loops, multiples of 32.
    turns: Turns of a loop, a multiple of 8.
    rounds_a_launch: Rounds with a barrier after each, a multiple of the 4 warps.
    steps: Steps of a short and of a long round, each with 16 multiply-adds.
    m: Rows and columns of the product for "tile of A", a multiple of 32.
    grid: Blocks of the loops and rounds; 0 means one per multiprocessor.
    """
    clock_hz, grid, one = machine.properties().clock_hz, grid or machine.properties().sm_count, np.float32(1)

    def measured(
        what: str, kernels: Mapping[str, Any], shape: Any, arguments: Any, out: Any, sums: Any, turns: int, least: Any
    ) -> Iterator[dict[str, Any]]:
        """Yield a row for each of the kernels, which differ in their barriers; `least` are their predicted seconds."""
        calls = {barrier: machine.enqueue(kernel, *shape, *arguments) for barrier, kernel in kernels.items()}
        for barrier, us in machine.checked_us(calls, out, sums, rounds).items():
            row = {"measurement": what, "barrier": barrier, "block": int(np.prod(shape[1])), "turns": turns, "us": us}
            yield row | {"ns_a_turn": 1e3 * us / turns, "predicted_ns_a_turn": 1e9 * least[barrier] / turns}

    for block in blocks:
        out = cuda.device_array(grid * block, np.float32)
        least = {barrier: turns * least_clocks(barrier, block) / clock_hz for barrier in LOOPS}
        yield from measured(
            "loop", LOOPS, (grid, block), (out, one, turns), out, np.full(out.size, turns), turns, least
        )
    for what, short in (("even rounds", steps[1]), ("uneven rounds", steps[0])):
        planned = uneven(rounds_a_launch, short, steps[1])
        out, on_device = cuda.device_array(grid * UNEVEN_BLOCK, np.float32), cuda.to_device(planned)
        sums = np.tile(np.repeat(CHUNK * planned.sum(axis=0), WARP), grid)
        least = {barrier: LATENCY * CHUNK * critical(barrier, planned) / clock_hz for barrier in ROUNDS}
        yield from measured(
            what, ROUNDS, (grid, UNEVEN_BLOCK), (out, one, on_device), out, sums, rounds_a_launch, least
        )
    host_a, host_b = narrow_product.integers(m, W, 0), narrow_product.integers(W, m, 1)
    a, b, c = cuda.to_device(host_a), cuda.to_device(host_b), cuda.device_array((m, m), np.float32)
    passed = narrow_product.cost(narrow_product.ACCESSES["shared_a"])
    hits, _ = narrow_product.bounds(m, m, passed, FLOAT32_BYTES * (2 * m * W + m * m))
    least = dict.fromkeys(TILES, hits / 1e6)
    yield from measured("tile of A", TILES, ((m // W, m // W), (W, W)), (a, b, c), c, host_a @ host_b, 1, least)
    for barrier, said in ask_scheduler().items():
        row = {"measurement": "divergent", "barrier": barrier, "block": DIVERGENT_BLOCK}
        yield row | {"outcome": said, "predicted_outcome": DIVERGENT[barrier][1]}


def claims(frame: pd.DataFrame) -> dict[str, Any]:
    timed = frame.set_index(["measurement", "barrier", "block"]).sort_index()
    ns, predicted, said = timed["ns_a_turn"], timed["predicted_ns_a_turn"], timed.loc["divergent"]
    none, warp, block = (ns["loop", barrier] for barrier in LOOPS)
    beyond = block - predicted["loop", "syncthreads"]
    uneven_warp, uneven_block = (ns["uneven rounds", barrier, UNEVEN_BLOCK] for barrier in ROUNDS)
    even_warp, even_block = (ns["even rounds", barrier, UNEVEN_BLOCK] for barrier in ROUNDS)
    tile_warp, tile_block = (ns["tile of A", barrier, W * W] for barrier in TILES)
    rounds = (ns / predicted).loc[["even rounds", "uneven rounds"]]
    return {
        "no loop is faster than its floor, to a twentieth": ns["loop"] > 0.95 * predicted["loop"],
        "in blocks of up to 128 threads, syncwarp costs a converged warp nothing": (warp < 1.2 * none).loc[:128],
        "syncthreads costs more than syncwarp in blocks of all sizes": block > 1.2 * warp,
        "and in the largest block half as much again as in the smallest": block.iloc[-1] > 1.5 * block.iloc[0],
        "beyond its floor, syncthreads takes as long in blocks of all sizes, to a half": (
            0 < beyond.max() < 1.5 * beyond.min()
        ),
        "in even rounds neither barrier costs a tenth": even_block < 1.1 * even_warp,
        "in uneven rounds syncthreads makes all wait for the slowest: more than twice the time": (
            uneven_block > 2 * uneven_warp
        ),
        "that is the time of even rounds, within a tenth": abs(uneven_block / even_block - 1) < 0.1,
        "all rounds take what their sums predict, to a fifth": abs(rounds - 1) < 0.2,
        "for the tile of A, syncthreads is slower, by less than a quarter": (
            1.03 * tile_warp < tile_block < 1.25 * tile_warp
        ),
        "the scheduler finds every barrier of a block that not all reach": (
            said["outcome"].str.partition(":")[0] == said["predicted_outcome"]
        ),
    }


LOOP_AXES: dict[str, Any] = {"xlabel": "threads per block", "ylabel": "ns per multiply-add and barrier"}
ROUND_AXES: dict[str, Any] = {"xlabel": "ns per round, or per launch of a tile", "xscale": "log", "xmargin": 0.4}
PLOT = panels(
    curves("block", "ns_a_turn", "barrier", "measurement == 'loop'", log="xy", title="loop", **LOOP_AXES),
    bars("ns_a_turn", ["measurement", "barrier"], "measurement not in ['loop', 'divergent']", **ROUND_AXES),
    text(["barrier", "outcome"], "measurement == 'divergent'", title="under the scheduler"),
    columns=2,
)
SMALL = {"blocks": (32, 64), "turns": 8, "rounds_a_launch": 4, "steps": (1, 2), "m": 32, "grid": 1, "rounds": 1}
KERNELS = (*LOOPS.values(), *ROUNDS.values(), TILES["syncthreads"])
ALLOWED: dict[str, Any] = {"blocks": WARP, "turns": UNROLLED, "rounds_a_launch": SCHEDULERS, "m": W}
EXPERIMENT = machine.experiment(barriers, "9.2.3.2", claims, PLOT, SMALL, KERNELS, allowed=ALLOWED)
