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

from numba_gemm.distributed import distributed_sgemm, sgemm
from numba_gemm.models.accuracy import compare, ieee_bound

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
    assert found.shape == c.shape and not np.isnan(error).any() and error.max(initial=0) <= 1, (what, error)


def meshes(world):
    """Meshes of one and two dimensions."""
    found = [init_device_mesh("cpu", (world,))]
    if world > 1:
        found += [init_device_mesh("cpu", shape) for shape in {(1, world), (world, 1), (2, world // 2)} if np.prod(shape) == world]
    return found


def dtensors(world):
    """DTensors of all placements, also such that have to be moved, with results of all placements."""
    count = 0
    for mesh in meshes(world):
        two = [(Shard(0), Shard(1)), (Replicate(), Shard(1)), (Shard(1), Shard(0)), (Shard(0), Shard(0))]
        placements = [(one,) for one in ONE] if mesh.ndim == 1 else two
        for x, y, z in product(placements, placements, [None, *placements]):
            for shape in SHAPES if mesh.ndim == 1 else SHAPES[:2]:
                a, b, c = matrices(*shape)
                given = distribute_tensor(a, mesh, x), distribute_tensor(b, mesh, y)
                result = distributed_sgemm(*given, alpha=ALPHA, out_placements=z)
                assert isinstance(result, DTensor) and (z is None or result.placements == z)
                close(result.full_tensor(), a, b, torch.zeros_like(c), (mesh, x, y, z, shape))
                count += 1
                if z is None:
                    out = distribute_tensor(c, mesh, result.placements)
                    for panel in (None, 2):
                        again = out.clone()
                        assert distributed_sgemm(*given, again, alpha=ALPHA, beta=BETA, panel=panel) is again
                        close(again.full_tensor(), a, b, c, (mesh, x, y, shape, panel))
                        count += 1
    mesh = init_device_mesh("cpu", (world,))
    a, b, c = matrices(8, 8, 8)
    part = DTensor.from_local(a / world, mesh, [Partial()])
    result = distributed_sgemm(part, distribute_tensor(b, mesh, [Shard(0)]), alpha=ALPHA)
    assert torch.allclose(result.full_tensor(), ALPHA * a @ b, atol=1e-5)
    return count + 1


def local(matrix, extents, placement, rank):
    """A rank's shard."""
    if isinstance(placement, Replicate):
        return matrix.clone()
    return matrix.split(extents, placement.dim)[rank].clone()


def shards(world):
    """Shards of any extents; operands and results by rows, by columns, and in strides."""
    count, rank = 0, dist.get_rank()
    rng = np.random.default_rng(world)
    for x, y in product(ONE, ONE):
        for shape, order in product(SHAPES, (False, True)):
            a, b, c = matrices(*shape)
            m, n, k = shape
            extents = {e: rng.multinomial(e, [1 / world] * world).tolist() for e in {m, n, k}}
            mine = [local(one, extents.get(one.shape[getattr(p, "dim", 0)]), p, rank) for one, p in ((a, x), (b, y))]
            if order:
                mine = [one.t().contiguous().t() for one in mine]
            first = distributed_sgemm(*mine, alpha=ALPHA, placements=(x, y))
            for panel, strided in product((None, 2), (False, True)):
                placed = [one for one in ONE if sgemm.algorithm(*((sgemm_name(p),) for p in (x, y, one)))]
                for z in placed:
                    out = local(c, extents.get(c.shape[getattr(z, "dim", 0)]), z, rank)
                    # If its operand is divided alike, the result is as well; else as `out` is.
                    wide = torch.full((out.shape[0] + 2, 2 * out.shape[1] + 3), 7.0)
                    place = wide[1:-1, 1 : 1 + 2 * out.shape[1] : 2] if strided else out
                    place.copy_(out)
                    result = distributed_sgemm(
                        *mine, place, alpha=ALPHA, beta=BETA, placements=(x, y), out_placements=z, panel=panel
                    )
                    assert result is place
                    expected = ALPHA * a.double() @ b.double() + BETA * c.double()
                    part = local(expected, extents.get(c.shape[getattr(z, "dim", 0)]), z, rank)
                    assert torch.allclose(place.double(), part, atol=1e-4), (x, y, z, shape, panel, strided)
                    if strided:
                        rest = wide.clone()
                        rest[1:-1, 1 : 1 + 2 * out.shape[1] : 2] = 7
                        assert (rest == 7).all()
                    count += 1
            assert torch.equal(first, distributed_sgemm(*mine, alpha=ALPHA, placements=(x, y)))  # the same bits
    return count


def sgemm_name(placement):
    from numba_gemm.distributed.placements import placement as named

    return named(placement)


def simulated(world):
    """Products on the simulator, through the package's own path."""
    sgemm.compute_into = REAL
    count = 0
    for mesh in meshes(world):
        placements = [(one,) for one in ONE] if mesh.ndim == 1 else [(Shard(0), Shard(1))]
        for x, y in product(placements, placements):
            a, b, c = matrices(5, 7, 9)
            out = distribute_tensor(c, mesh, (Shard(0),) if mesh.ndim == 1 else (Shard(0), Shard(1)))
            result = distributed_sgemm(distribute_tensor(a, mesh, x), distribute_tensor(b, mesh, y), alpha=ALPHA)
            error = compare(result.full_tensor().numpy(), a.numpy(), b.numpy(), alpha=ALPHA) if False else None
            close(result.full_tensor(), a, b, torch.zeros_like(c), (mesh, x, y, error))
            count += 1
    return count


REAL = sgemm.compute_into
PARTS = {one.__name__: one for one in (dtensors, shards, simulated)}


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
