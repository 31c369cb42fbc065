"""One rank of the experiment `distributed`, as a process of its own; rank 0 writes a line of JSON per row."""

import functools
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from numba_gemm.distributed import explain, model, sgemm
from numba_gemm.gemm.precision import IEEE
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.bench.distributed import BLOCKS, BY_ROWS, COLS, PLACEMENTS, ROWS, largest_correct
from numba_gemm.lab.harness.nvml import ClockSamples, Nvml, median_watts, open_nvml, sampled_clocks
from numba_gemm.runtime.timing import elapsed
from numba_gemm.simulator.switch import SIMULATOR
from numba_gemm.torch.operators import compute_into

TIMEOUT = timedelta(seconds=60)
DEVICE = "cpu" if SIMULATOR else "cuda"
ROUNDS = 3  # in which contenders take turns, so that a GPU that gets warmer slows all of them alike
SAMPLED = 128  # rows and columns of C; the elements where they cross are compared with float64
Call = Callable[[], Any]


def synchronize() -> None:
    """Wait for the GPU, then for all ranks."""
    if not SIMULATOR:
        torch.cuda.synchronize()
    dist.barrier()


def largest(value: float) -> float:
    """Return the largest value of all ranks."""
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def of_all_ranks(value: float) -> str:
    """Return a number of each rank, rounded."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return " ".join(f"{one:.0f}" for one in found)


@functools.cache
def nvml() -> Nvml | None:
    """Return NVML for this rank's GPU, or None."""
    return None if SIMULATOR else open_nvml(f"GPU-{torch.cuda.get_device_properties().uuid}")


@dataclass
class Contender:
    """A call, with what computes the error of its result, and the context in which it is called.

    It writes to `result`, unless it returns a DTensor.
    """

    call: Call
    result: Any
    error: Callable[[Any], float]
    context: Any = field(default_factory=nullcontext)
    spans: list[tuple[float, ClockSamples]] = field(default_factory=list)
    count: int = 0  # of calls per turn
    found: float = math.inf  # error

    def verify(self) -> None:
        """Find the error of the result of a call."""
        self.result.fill_(math.nan)
        with self.context:
            found = self.call()
        self.found = self.error(found.to_local() if isinstance(found, DTensor) else self.result)

    def run(self, seconds: float) -> None:
        """Add the seconds per call of the slowest rank, and clocks and power of this rank's GPU.

        They are of as many calls as fill the time, after as many others.
        """
        with self.context:
            self.count = self.count or max(1, int(seconds / largest(elapsed(self.call, synchronize))))
            elapsed(self.call, synchronize, self.count)
            with sampled_clocks(nvml(), power=True) as clocks:
                taken = elapsed(self.call, synchronize, self.count)
        self.spans.append((largest(taken), clocks))


def timed(contenders: dict[str, Contender], flops: float, most: float, seconds: float) -> dict[str, Any]:
    """Return the rates of contenders, which take turns; NaN of those whose error is beyond `most`.

    Two of our products also have clocks and power.
    """
    for one in contenders.values():
        one.verify()
    for _ in range(ROUNDS):
        for one in contenders.values():
            if one.found <= most:
                one.run(seconds / ROUNDS)
    row = dict[str, Any]()
    for prefix, one in contenders.items():
        taken, clocks = zip(*one.spans) if one.spans else ([math.nan], [ClockSamples()])
        row[f"{prefix}tflops"] = flops / median(taken) / 1e12
        if prefix in ("", "alone_"):
            row[f"{prefix}mhz"] = of_all_ranks(median(sample.median_mhz for sample in clocks))
            row[f"{prefix}watts"] = of_all_ranks(median_watts(clocks))
    return row


def by_addmm(out: Any, a: Any, b: Any, alpha: float, beta: float, precision: str) -> None:
    """Compute a local product by PyTorch."""
    torch.addmm(out, a, b, alpha=alpha, beta=beta, out=out)


def chosen(extent: int) -> Any:
    """Return some indices in random order, the same ones on all ranks."""
    return torch.randperm(extent, generator=torch.Generator().manual_seed(extent))[:SAMPLED].to(DEVICE)


def grid(placed: str) -> tuple[int, int]:
    """Return the numbers of rows and columns of shards into which the ranks divide a matrix."""
    world = dist.get_world_size()
    if placed == BLOCKS:  # as square as can be
        cols = max(one for one in range(1, math.isqrt(world) + 1) if world % one == 0)
        return world // cols, cols
    return (world, 1) if placed == ROWS else (1, world)


def gathered(own: Any, placed: str, rows: Any, cols: Any) -> Any:
    """Return the elements at some rows and columns of a matrix, of which this rank has a shard, on all ranks."""
    found = own.new_zeros(len(rows), len(cols))
    coordinates, places = divmod(dist.get_rank(), grid(placed)[1]), list[tuple[Any, Any]]()
    for wanted, at, extent in zip((rows, cols), coordinates, own.shape):
        local = wanted - at * extent
        (here,) = torch.where((local >= 0) & (local < extent))
        places.append((here, local[here]))
    (to_rows, from_rows), (to_cols, from_cols) = places
    found[to_rows[:, None], to_cols] = own[from_rows[:, None], from_cols]
    dist.all_reduce(found)
    return found


def sampled_error(a: Any, b: Any, c: Any) -> float:
    """Return the largest error of elements of C over ``|A| @ |B|`` on any rank, from their rows of A and columns of B.

    It is infinite if one of them is NaN.
    """
    a, b = a.double(), b.double()
    error = (c - a @ b).abs() / (a.abs() @ b.abs())
    return largest(float(error.nan_to_num(nan=math.inf).max()))


def comparison(shape: Shape, a: Any, b: Any, placed: Sequence[str]) -> Callable[[Any], float]:
    """Return the function that returns the largest error of a divided result, from shards of A and B."""
    rows, cols, all_of_k = chosen(shape.m), chosen(shape.n), torch.arange(shape.k, device=DEVICE)
    x, y = gathered(a, placed[0], rows, all_of_k), gathered(b, placed[1], all_of_k, cols)
    return lambda c: sampled_error(x, y, gathered(c, placed[2], rows, cols))


def shard(n: int, placed: str) -> Any:
    """Return this rank's shard of a random N x N matrix, which the ranks divide evenly."""
    rows, cols = grid(placed)
    return torch.randn(n // rows, n // cols, device=DEVICE)


def described(placements: str, shape: Shape, precision: str) -> dict[str, Any]:
    """Return the columns that identify a row."""
    return {"placements": placements, **shape._asdict(), "precision": precision, "gpus": dist.get_world_size()}


def measured(name: str, n: int, precision: str, *, seconds: float) -> dict[str, Any]:
    """Verify and time a product of N x N matrices, and what it is compared with."""
    world, placed = dist.get_world_size(), PLACEMENTS[name]
    a, b, out = (shard(n, one) for one in placed)
    used: tuple[Any, Any, Any] = placed if name != BLOCKS else ((ROWS, COLS),) * 3
    mesh = init_device_mesh(DEVICE, grid(BLOCKS) if name == BLOCKS else (world,))
    arguments = {"placements": used[:2], "out_placements": used[2], "precision": precision, "mesh": mesh}
    flops = 2.0 * n**3 / world
    divided_error = comparison(Shape(n, n, n), a, b, placed)
    row = described(name, Shape(n, n, n), precision)

    def together() -> None:
        sgemm.distributed_sgemm(a, b, out, **arguments)

    # The same product on one GPU: the sums of a part of C over all of K.
    x, y, c = (torch.randn(shape, device=DEVICE) for shape in ((out.shape[0], n), (n, out.shape[1]), out.shape))

    def local_error(found: Any) -> float:
        rows, cols = map(chosen, found.shape)
        return sampled_error(x[rows], y[:, cols], found[rows][:, cols])

    by_nccl, by_torch = patch.object(model, "COPIED_FROM", math.inf), patch.object(sgemm, "compute_into", by_addmm)
    contenders = {
        "alone_": Contender(lambda: compute_into(c, x, y, 1.0, 0.0, precision), c, local_error),  # type: ignore[arg-type]
        "": Contender(together, out, divided_error),
        "broadcast_": Contender(together, out, divided_error, by_nccl),
    }
    if precision == IEEE:
        contenders["addmm_alone_"] = Contender(lambda: torch.mm(x, y, out=c), c, local_error)
        contenders["addmm_"] = Contender(together, out, divided_error, by_torch)
    row |= timed(contenders, flops, largest_correct(precision, n), seconds)
    row["error"] = max(contenders[prefix].found for prefix in ("", "alone_", "broadcast_"))
    if precision == IEEE and name != BLOCKS:
        del x, y, c, contenders
        left, right, result = (
            DTensor.from_local(one, mesh, [Shard(int(at == COLS))]) for one, at in zip((a, b, out), placed)
        )
        dtensor = Contender(lambda: (left @ right).redistribute(placements=result.placements), out, divided_error)
        row |= timed({"dtensor_": dtensor}, flops, largest_correct(precision, n), seconds)
    alone: Any = {} if math.isnan(row["alone_tflops"]) else {"flops": row["alone_tflops"] * 1e12}
    how: Any = {"a": used[0], "b": used[1], "out": used[2], "precision": precision} | alone
    plan = explain(n, n, n, mesh=tuple(mesh.shape), **how)
    row["predicted_tflops"] = plan.tflops
    row["panels"] = len(plan.work.panels) or len(plan.work.chunks)
    row["ratio"] = row["tflops"] / row["alone_tflops"]
    return row


def large(m: int, n: int, k: int, precision: str) -> dict[str, Any]:
    """Verify and time one product that need not fit on one GPU."""
    world = dist.get_world_size()
    a, b = (torch.randn(rows // world, cols, device=DEVICE) for rows, cols in ((m, k), (k, n)))
    out = torch.full((m // world, n), math.nan, device=DEVICE)
    product = functools.partial(sgemm.distributed_sgemm, a, b, out, precision=precision)  # type: ignore[arg-type]
    product()
    error = comparison(Shape(m, n, k), a, b, PLACEMENTS[BY_ROWS])(out)
    correct = error <= largest_correct(precision, k)
    return {
        **described(BY_ROWS, Shape(m, n, k), precision),
        "tflops": 2e-12 * m * n * k / world / largest(elapsed(product, synchronize)) if correct else math.nan,
        "error": error,
        "predicted_tflops": explain(m, n, k, mesh=world, precision=precision).tflops,  # type: ignore[arg-type]
    }


def main() -> None:
    """Run one rank.

    The argument is JSON: the cases, which are arguments of `measured` or, if they begin with a number, of `large`; the
    seconds; the rank and the number of ranks; and the file by which they meet.
    """
    cases, seconds, rank, world, meeting = json.loads(sys.argv[1])
    if not SIMULATOR:
        torch.cuda.set_device(rank)
    torch.manual_seed(rank)  # else all ranks draw the same shards
    dist.init_process_group(
        "gloo" if SIMULATOR else "cpu:gloo,cuda:nccl",
        timeout=TIMEOUT,
        rank=rank,
        world_size=world,
        init_method=f"file://{meeting}",
    )
    for case in cases:
        row = large(*case) if isinstance(case[0], int) else measured(*case, seconds=seconds)
        if rank == 0:
            print(json.dumps(row), flush=True)
        if not SIMULATOR:
            torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # without waiting for threads of gloo
