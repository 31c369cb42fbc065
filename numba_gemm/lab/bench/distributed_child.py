"""One rank of the experiment `distributed`, as a process of its own; rank 0 writes a line of JSON per row."""

import functools
import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from numba_gemm.distributed import explain, model, sgemm
from numba_gemm.gemm.precision import IEEE
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.bench.distributed import BLOCKS, BY_ROWS, COLS, PLACEMENTS, ROWS
from numba_gemm.lab.bench.steady import elapsed
from numba_gemm.simulator.switch import SIMULATOR
from numba_gemm.torch.operators import compute_into

TIMEOUT = timedelta(seconds=60)
DEVICE = "cpu" if SIMULATOR else "cuda"
SAMPLED = 2  # rows of C per rank that are compared with float64
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


def seconds_per_call(call: Call, seconds: float) -> float:
    """Return the seconds per call of the slowest rank: of as many calls as fill the time, after as many others."""
    call()
    count = max(1, int(seconds / largest(elapsed(call, synchronize))))

    def batch() -> None:
        for _ in range(count):
            call()

    _, taken = (elapsed(batch, synchronize) for _ in range(2))  # the second time counts
    return largest(taken / count)


def by_addmm(out: Any, a: Any, b: Any, alpha: float, beta: float, precision: str) -> None:
    """Compute a local product by PyTorch."""
    torch.addmm(out, a, b, alpha=alpha, beta=beta, out=out)


def sampled_error(a: Any, b: Any, c: Any) -> float:
    """Return the largest error over ``|A| @ |B|`` of some rows of C, where A, B and C are divided by rows."""
    world, rank = dist.get_world_size(), dist.get_rank()
    worst = 0.0
    for root in range(world):
        rows = a[:SAMPLED].clone() if rank == root else a.new_empty(SAMPLED, a.shape[1])
        dist.broadcast(rows, root)
        sums = torch.zeros(2, SAMPLED, b.shape[1], dtype=torch.float64, device=b.device)
        step = 1024
        for begin in range(0, b.shape[0], step):
            block = b[begin : begin + step].double()
            part = rows[:, rank * b.shape[0] + begin :][:, : block.shape[0]].double()
            sums[0] += part @ block
            sums[1] += part.abs() @ block.abs()
        dist.all_reduce(sums)
        if rank == root:
            worst = float(((c[:SAMPLED].double() - sums[0]).abs() / sums[1]).max())
    return largest(worst)


def shard(n: int, placed: str) -> Any:
    """Return this rank's shard of a random N x N matrix, which the ranks divide evenly."""
    own = n // dist.get_world_size()
    return torch.randn((own, n) if placed == ROWS else (n, own), device=DEVICE)


def described(placements: str, shape: Shape, precision: str) -> dict[str, Any]:
    """Return the columns that identify a row."""
    return {"placements": placements, **shape._asdict(), "precision": precision, "gpus": dist.get_world_size()}


def measured(name: str, n: int, precision: str, *, seconds: float) -> dict[str, Any]:
    """Time a product of N x N matrices, and what it is compared with, each by itself."""
    world = dist.get_world_size()
    placed = PLACEMENTS.get(name, (ROWS, ROWS, ROWS))
    a, b, out = (shard(n, one) for one in placed)
    used: tuple[Any, Any, Any] = placed if name != BLOCKS else ((ROWS, COLS),) * 3
    mesh = init_device_mesh(DEVICE, (world, 1) if name == BLOCKS else (world,))
    arguments = {"placements": used[:2], "out_placements": used[2], "precision": precision, "mesh": mesh}
    flops = 2.0 * n**3 / world

    def together() -> None:
        sgemm.distributed_sgemm(a, b, out, **arguments)

    def tflops(call: Call) -> float:
        return flops / seconds_per_call(call, seconds) / 1e12

    # The same product on one GPU: the sums of a part of C over all of K.
    x, y, c = (torch.randn(shape, device=DEVICE) for shape in ((out.shape[0], n), (n, out.shape[1]), out.shape))
    row: dict[str, Any] = {
        **described(name, Shape(n, n, n), precision),
        "alone_tflops": tflops(lambda: compute_into(c, x, y, 1.0, 0.0, precision)),  # type: ignore[arg-type]
        "tflops": tflops(together),
    }
    if name == BY_ROWS:
        together()
        row["error"] = sampled_error(a, b, out)
    usual, model.COPIED_FROM = model.COPIED_FROM, float("inf")
    row["broadcast_tflops"] = tflops(together)
    model.COPIED_FROM = usual
    if precision == IEEE:
        row["addmm_alone_tflops"] = tflops(lambda: torch.mm(x, y, out=c))
        sgemm.compute_into = by_addmm  # type: ignore[assignment]
        row["addmm_tflops"] = tflops(together)
        sgemm.compute_into = compute_into
        if name != BLOCKS:
            del x, y, c
            left, right, result = (
                DTensor.from_local(one, mesh, [Shard(int(at == COLS))]) for one, at in zip((a, b, out), placed)
            )
            row["dtensor_tflops"] = tflops(lambda: (left @ right).redistribute(placements=result.placements))
    plan = explain(n, n, n, mesh=tuple(mesh.shape), a=used[0], b=used[1], out=used[2], precision=precision)  # type: ignore[arg-type]
    row["predicted_tflops"] = plan.tflops
    row["panels"] = len(plan.work.panels) or len(plan.work.chunks)
    row["ratio"] = row["tflops"] / row["alone_tflops"]
    return row


def large(m: int, n: int, k: int, precision: str) -> dict[str, Any]:
    """Time one product that need not fit on one GPU, and compare some of its rows."""
    world = dist.get_world_size()
    a, b = (torch.randn(rows // world, cols, device=DEVICE) for rows, cols in ((m, k), (k, n)))
    out = torch.empty(m // world, n, device=DEVICE)
    product = functools.partial(sgemm.distributed_sgemm, a, b, out, precision=precision)  # type: ignore[arg-type]
    _, seconds = (largest(elapsed(product, synchronize)) for _ in range(2))  # the second one counts
    return {
        **described(BY_ROWS, Shape(m, n, k), precision),
        "tflops": 2.0 * m * n * k / world / seconds / 1e12,
        "error": sampled_error(a, b, out),
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
