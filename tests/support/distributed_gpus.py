"""A program of several ranks, each with a GPU: distributed products by copies and by NCCL, against float64.

Arguments: a part; the rank; the number of ranks; the file by which they meet. Each part ends by a line with its name
and the number of products that it compared.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from numba_gemm.distributed import copying, distributed_sgemm, model, release_memory
from numba_gemm.distributed.placements import algorithm, placement
from numba_gemm.models.accuracy import ieee_bound

BOUNDS = {"bf16x6": 2**-21, "bf16x9": 2**-21, "tf32x3": 2**-19, "fp16x3": 2**-17, "bf16x3": 2**-14.9, "tf32": 2**-8.9}
ONE = [Shard(0), Shard(1), Replicate()]
SHAPES = [(512, 384, 1024), (301, 259, 1031), (1, 5, 3)]
ALPHA, BETA = 1.5, -0.5
LAG = 20_000_000  # clock cycles


def products(world):
    """All placements in `ieee` and `bf16x6`, A and B by rows in all precisions."""
    one = init_device_mesh("cuda", (world,))
    meshes = sorted({(rows, world // rows) for rows in range(1, world + 1) if world % rows == 0})
    cases = [(one, (x,), (y,), (z,)) for x, y, z in product(ONE, ONE, ONE)]
    cases += [(init_device_mesh("cuda", shape), *((Shard(0), Shard(1)),) * 3) for shape in meshes]
    todo = [(*case, precision) for precision in ("ieee", "bf16x6") for case in cases]
    todo += [(one, *((Shard(0),),) * 3, precision) for precision in BOUNDS]
    count = 0
    for (mesh, x, y, z, precision), (m, n, k), panel in product(todo, SHAPES, (None, 300)):
        if algorithm(*(tuple(map(placement, one)) for one in (x, y, z))) is None:
            continue
        generator = torch.Generator("cuda").manual_seed(m)
        a, b, c = (torch.randn(shape, generator=generator, device="cuda") for shape in ((m, k), (k, n), (m, n)))
        left, right, out = (distribute_tensor(*one) for one in ((a, mesh, x), (b, mesh, y), (c.clone(), mesh, z)))
        distributed_sgemm(left, right, out, alpha=ALPHA, beta=BETA, precision=precision, panel=panel)
        expected = ALPHA * a.double() @ b.double() + BETA * c.double()
        scale = ALPHA * a.double().abs() @ b.double().abs() + abs(BETA * c.double())
        bound = BOUNDS.get(precision, ieee_bound(k)) + (k / (panel or k) + 2) * 2**-24
        error = (out.full_tensor().double() - expected).abs() / scale / bound
        assert bool((error <= 1).all()), (mesh, x, y, z, precision, (m, n, k), panel, error.max())
        count += 1
    return count


def races(world):
    """Operands that are overwritten and memory that is reused right after a call, and a rank that lags; exact sums."""
    rank, count, n = dist.get_rank(), 0, 3000
    generator = torch.Generator("cuda").manual_seed(1)
    whole = [torch.randint(-8, 9, (n, n), generator=generator, device="cuda").float() for _ in range(2)]
    expected = (whole[0].double() @ whole[1].double()).float()
    placed = ((0, 0, 0), (0, 1, 0), (1, 1, 1), (0, 1, 1), (1, 0, 0), (1, 0, 1))
    for (x, y, z), panel, lag in product(placed, (None, 128, 700), range(3)):
        a, b, wanted = (
            matrix.chunk(world, dim)[rank].clone() for matrix, dim in ((whole[0], x), (whole[1], y), (expected, z))
        )
        if lag == rank:
            torch.cuda._sleep(LAG)
        found = []
        for _ in range(3):
            found.append(distributed_sgemm(a, b, placements=(Shard(x), Shard(y)), out_placements=Shard(z), panel=panel))
            b.mul_(2)  # on the current stream, after what still reads b
            torch.empty(panel or n, n, device="cuda").fill_(float("nan"))  # perhaps memory that the call has freed
        for power, out in enumerate(found):
            assert torch.equal(out, wanted * 2**power), (x, y, z, panel, lag, power)
            count += 1
    return count


PARTS = {one.__name__: one for one in (products, races)}


def main(part, rank, world, meeting):
    """Run a part of the program, by copies and by NCCL."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    count = 0
    for model.COPIED_FROM in (0.0, float("inf")):
        count += PARTS[part](world)
        assert copying._known
    release_memory()
    assert not copying._separate  # meshes whose ranks cannot open each other's memory
    print(part, count, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    sys.stdout.flush()
    os._exit(0)  # without waiting for threads of gloo
