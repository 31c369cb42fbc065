"""A program of several ranks: distributed products over a table of placements and shapes, against float64.

Arguments: the names of the parts to run, separated by commas; the rank; the number of ranks; the file by which they
meet. Each part ends by a line with its name and the number of products that it compared.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from itertools import product

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

from numba_gemm.distributed import copying, distributed_sgemm, model, release_memory, sgemm
from numba_gemm.distributed.placements import algorithm, placement
from numba_gemm.distributed.shared_memory import all_buffers
from numba_gemm.models.accuracy import ieee_bound

ONE = [Shard(0), Shard(1), Replicate()]
SHAPES = [(13, 11, 17), (2, 3, 1), (5, 7, 0), (0, 4, 6), (4, 0, 6)]
ALPHA, BETA = 1.5, -0.5


def by_torch(out, a, b, alpha, beta, precision):
    """A local product without the simulator, which would take most of the time."""
    out.copy_(torch.addmm(out, a, b, alpha=alpha, beta=beta) if beta else alpha * (a @ b))


def matrices(m, n, k):
    """The same on every rank, without zeros; k is 0 in some."""
    rng = np.random.default_rng(m + 10 * n + 100 * k)
    return [torch.from_numpy(rng.standard_normal(shape).astype(np.float32)) for shape in ((m, k), (k, n), (m, n))]


def close(found, a, b, c, what):
    """Compare with float64, by the bound of float32 sums, a rounding per panel included."""
    x, y, z = (one.numpy().astype(np.float64) for one in (a, b, c))
    bound = (ieee_bound(max(a.shape[1], 1)) + 2.0**-20) * (ALPHA * abs(x) @ abs(y) + abs(BETA * z)) + 1e-30
    error = abs(found.numpy() - (ALPHA * x @ y + BETA * z)) / bound
    assert found.shape == c.shape, what
    assert (error <= 1).all(), (what, error)  # also if it is NaN


def meshes(world):
    """Meshes of one and two dimensions."""
    found = [init_device_mesh("cpu", (world,))]
    if world > 1:
        shapes = sorted({(1, world), (world, 1), (2, world // 2)})
        found += [init_device_mesh("cpu", shape) for shape in shapes if np.prod(shape) == world]
    return found


def dtensors(world):
    """DTensors of all placements, also such that have to be moved, with results of all placements."""
    count = 0
    for mesh in meshes(world):
        two = [(Shard(0), Shard(1)), (Replicate(), Shard(1)), (Shard(1), Shard(0)), (Shard(0), Shard(0))]
        placements = [(one,) for one in ONE] if mesh.ndim == 1 else two
        for x, y, z in product(placements, placements, [None, *placements]):
            for shape in SHAPES if mesh.ndim == 1 and z is None else SHAPES[:1]:
                a, b, c = matrices(*shape)
                given = distribute_tensor(a, mesh, x), distribute_tensor(b, mesh, y)
                result = distributed_sgemm(*given, alpha=ALPHA, out_placements=z)
                assert isinstance(result, DTensor)
                assert z is None or result.placements == z
                close(result.full_tensor(), a, b, torch.zeros_like(c), (mesh, x, y, z, shape))
                count += 1
                if z is None:
                    out = distribute_tensor(c.clone(), mesh, result.placements)
                    assert distributed_sgemm(*given, out, alpha=ALPHA, beta=BETA, panel=2) is out
                    close(out.full_tensor(), a, b, c, (mesh, x, y, shape))
                    count += 1
    mesh = init_device_mesh("cpu", (world,))
    a, b, c = matrices(8, 8, 8)
    part = DTensor.from_local(a / world, mesh, [Partial()])
    result = distributed_sgemm(part, distribute_tensor(b, mesh, [Shard(0)]), alpha=ALPHA)
    assert torch.allclose(result.full_tensor(), ALPHA * a @ b, atol=1e-5)
    return count + 1


def shards(world):
    """Shards of any extents; operands and results by rows, by columns, and in strides."""
    count, rank = 0, dist.get_rank()
    rng = np.random.default_rng(world)
    for x, y, shape, apart in product(ONE, ONE, SHAPES, (False, True)):
        a, b, c = matrices(*shape)
        extents = {extent: rng.multinomial(extent, [1 / world] * world).tolist() for extent in set(shape)}

        def mine(matrix, placement, extents=extents):
            """This rank's part of a matrix."""
            if isinstance(placement, Replicate):
                return matrix.clone()
            return matrix.split(extents[matrix.shape[placement.dim]], placement.dim)[rank].clone()

        own = mine(a, x), mine(b, y)
        if apart:
            own = [one.t().contiguous().t() for one in own]
        for z, panel in product(ONE, (None, 2)):
            if algorithm(*((placement(one),) for one in (x, y, z))) is None:
                continue
            out = mine(c, z)
            memory = torch.full((out.shape[0] + 2, 2 * out.shape[1] + 3), 7.0)
            place = memory[1:-1, 1 : 1 + 2 * out.shape[1] : 2]
            for target in (place,) if apart else (out, out.t().contiguous().t()):
                bits = []
                for _ in range(2):
                    target.copy_(mine(c, z))
                    result = distributed_sgemm(
                        *own, target, alpha=ALPHA, beta=BETA, placements=(x, y), out_placements=z, panel=panel
                    )
                    assert result is target
                    bits.append(result.clone())
                assert torch.equal(*bits)
                wanted = mine(ALPHA * a.double() @ b.double() + BETA * c.double(), z)
                assert torch.allclose(result.double(), wanted, rtol=0, atol=1e-5 * (1 + shape[2])), (x, y, z, shape)
                count += 1
            place.fill_(7)
            assert (memory == 7).all()  # nothing is written outside of `out`
    return count


def simulated(world):
    """Products on the simulator, through the package's own path."""
    sgemm.compute_into = REAL
    count, (a, b, c) = 0, matrices(5, 7, 9)
    for mesh in meshes(world):
        pairs = list(product(ONE[:2], ONE[:2])) if mesh.ndim == 1 else [((Shard(0), Shard(1)),) * 2]
        for x, y in pairs:
            given = [distribute_tensor(one, mesh, p if mesh.ndim == 2 else [p]) for one, p in ((a, x), (b, y))]
            result = distributed_sgemm(*given, alpha=ALPHA)
            close(result.full_tensor(), a, b, torch.zeros_like(c), (mesh, x, y))
            count += 1
    return count


def copies(world):
    """DTensors and shards again, where ranks copy from each other's memory; larger operands need new memory."""
    model.COPIED_FROM, run, runs = 0.0, copying.CopyingExecutor.run, []

    def counted(self):
        runs.append(self)
        run(self)

    copying.CopyingExecutor.run = counted
    count = dtensors(world)
    release_memory()
    assert all(one.room == 0 for one in all_buffers())
    count += shards(world)
    assert world == 1 or len(runs) > count / 4
    assert world == 1 or all(one.room > 0 for one in all_buffers())
    model.COPIED_FROM = SMALL
    return count


REAL, SMALL = sgemm.compute_into, model.COPIED_FROM
PARTS = {one.__name__: one for one in (dtensors, shards, copies, simulated)}


def main(parts, rank, world, meeting):
    """Run parts of the program."""
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    for part in parts:
        sgemm.compute_into = by_torch
        print(part, PARTS[part](world), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1].split(","), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    sys.stdout.flush()
    os._exit(0)  # without waiting for threads of gloo
