"""A program of several ranks: the operators of `numba_gemm.torch` with DTensors, against float64.

Arguments: the rank; the number of ranks; the file by which they meet. The last line has the number of products that
were compared.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

import numba_gemm.torch
from numba_gemm.torch import operators

KINDS = (Shard(0), Shard(1), Replicate())
# Divisions that need no data to be moved, with that of the product.
IN_PLACE = {
    (Shard(0), Replicate()): Shard(0),
    (Replicate(), Shard(1)): Shard(1),
    (Shard(1), Shard(0)): Partial(),
    (Replicate(), Replicate()): Replicate(),
}
SHAPES = ((6, 4, 8), (5, 7, 3), (1, 2, 9))
local = []  # extents of the products of this rank


def by_torch(a, b, out=None, alpha=1.0, beta=0.0, epilogue=None, epilogue_args=(), precision="ieee"):
    """A product of this rank without the simulator, which would take most of the time."""
    assert type(a) is type(b) is torch.Tensor, "a part of a DTensor"
    local.append((*a.shape[-2:], b.shape[-1], precision))
    result = alpha * (a @ b) + (epilogue_args[0] if epilogue else 0)
    return result if out is None else out.copy_(result + beta * out)


def values(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def close(found, expected):
    assert isinstance(found, DTensor)
    full = found.full_tensor()
    assert full.shape == expected.shape
    torch.testing.assert_close(full.double(), expected, rtol=1e-5, atol=1e-5)


def forms(a, b):
    """The ways to multiply matrices, with the precision that each asks for."""
    yield "ieee", lambda: numba_gemm.torch.matmul(a, b)
    yield "tf32", lambda: torch.ops.numba_gemm.matmul(a, b, 1.0, "tf32")
    yield "bf16x6", lambda: overridden(lambda: a @ b, "bf16x6")
    yield "fp16x3", lambda: overridden(lambda: torch.nn.functional.linear(a, b.mT), "fp16x3")


def overridden(call, precision):
    with numba_gemm.torch.override(precision=precision):
        return call()


def matrices(mesh, rank, world):
    """Matrices of all placements; those in `IN_PLACE` are multiplied where they are."""
    count = 0
    for (m, n, k), x, y in product(SHAPES, KINDS, KINDS):
        a, b = values(m, k), values(k, n)
        for precision, call in forms(distribute_tensor(a, mesh, [x]), distribute_tensor(b, mesh, [y])):
            local.clear()
            result = call()
            assert [one[-1] for one in local] == [precision], (precision, local)
            close(result, a.double() @ b.double())
            if (x, y) in IN_PLACE and min(m, n, k) >= world:
                assert result.placements == (IN_PLACE[x, y],), (x, y, result.placements)
                mine = [len(torch.arange(extent).chunk(world)[rank]) for extent in (m, k, n)]
                rows, terms, cols = (x == Shard(0)), (x == Shard(1)), (y == Shard(1))
                expected = [own if cut else all_ for own, cut, all_ in zip(mine, (rows, terms, cols), (m, k, n))]
                assert list(local[0][:-1]) == expected, (x, y, local)
            count += 1
    return count


def sums(mesh):
    """`addmm` and `linear`, with inputs that are broadcast, and alpha and beta."""
    count = 0
    for x, y, shape, z in product(KINDS, KINDS, ((6, 4), (4,), (1, 4), (6, 1)), KINDS):
        if z.is_shard() and z.dim >= len(shape):
            continue
        a, b, c = values(6, 8), values(8, 4), values(*shape)
        given = [distribute_tensor(one, mesh, [how]) for one, how in ((c, z), (a, x), (b, y))]
        expected = 2 * c.double() - 0.5 * (a.double() @ b.double())
        close(numba_gemm.torch.addmm(*given, beta=2.0, alpha=-0.5), expected)
        close(overridden(lambda given=given: torch.addmm(*given, beta=2.0, alpha=-0.5), "ieee"), expected)
        if len(shape) == 1:
            weight = distribute_tensor(b.mT.contiguous(), mesh, [y])
            result = numba_gemm.torch.linear(given[1], weight, given[0])
            close(result, a.double() @ b.double() + c.double())
        count += 3
    return count


def batches(mesh):
    """Batches, also broadcast ones, cut along any dimension."""
    count, one = 0, ((4, 6, 8), (1, 8, 2))
    others = ((4, 6, 8), (4, 8, 2)), ((4, 6, 8), (8, 2)), ((3, 1, 6, 8), (1, 4, 8, 2)), ((6, 8), (4, 8, 2))
    for left, right in (one, *others):
        for i, j in product(range(len(left) + 1), range(len(right) + 1)):
            a, b = values(*left), values(*right)
            x, y = (Shard(dim) if dim < len(shape) else Replicate() for dim, shape in ((i, left), (j, right)))
            given = distribute_tensor(a, mesh, [x]), distribute_tensor(b, mesh, [y])
            result = numba_gemm.torch.matmul(*given)
            close(result, a.double() @ b.double())
            if (left, right) == one and (x, y) == (Shard(0), Replicate()):
                assert result.placements == (Shard(0),), "one matrix for all of a batch stays where it is"
            count += 1
    return count


def gradients(mesh):
    """Gradients of operands of all placements, computed by the same operator."""
    count = 0
    for x, y in product(KINDS, KINDS):
        a, b, weights = values(6, 8), values(8, 4), values(6, 4)
        for use in (numba_gemm.torch.matmul, torch.matmul):
            given = [distribute_tensor(one, mesh, [how]).requires_grad_() for one, how in ((a, x), (b, y))]
            local.clear()
            with numba_gemm.torch.override():
                result = use(*given) * distribute_tensor(weights, mesh, [Replicate()])
                result.sum().backward()
            assert len(local) == 3, local
            close(given[0].grad, weights.double() @ b.double().mT)
            close(given[1].grad, a.double().mT @ weights.double())
            count += 1
    return count


def gradients_of_batches(mesh):
    """Gradients where one matrix is for all of a batch, which is cut along any dimension."""
    count = 0
    for x, y in product((Shard(0), Shard(1), Shard(2), Replicate()), KINDS):
        a, b, weights = values(4, 6, 8), values(8, 4), values(4, 6, 4)
        given = [distribute_tensor(one, mesh, [how]).requires_grad_() for one, how in ((a, x), (b, y))]
        result = numba_gemm.torch.matmul(*given) * distribute_tensor(weights, mesh, [Replicate()])
        result.sum().backward()
        close(given[0].grad, weights.double() @ b.double().mT)
        close(given[1].grad, (a.double().mT @ weights.double()).sum(0))
        count += 1
    return count


def refused(mesh):
    """DTensors do not have `out`."""
    one = distribute_tensor(values(6, 6), mesh, [Replicate()])
    for call in (numba_gemm.torch.matmul, lambda a, b, out: numba_gemm.torch.addmm(out, a, b, out=out)):
        with pytest.raises(TypeError, match=r"^out is a DTensor"):
            call(one, one, out=one)
    return 2


def compiled(mesh):
    """A compiled product, before any other one: while it is traced, PyTorch has to learn how to divide it."""
    a, b = values(6, 8), values(8, 4)
    given = distribute_tensor(a, mesh, [Shard(0)]), distribute_tensor(b, mesh, [Replicate()])
    close(torch.compile(numba_gemm.torch.matmul, backend="aot_eager", fullgraph=True)(*given), a.double() @ b.double())
    return 1


def simulated(mesh):
    """One product by the package's kernels, a mesh of two dimensions, and parts that are sums."""
    a, b = values(6, 8), values(8, 4)
    given = distribute_tensor(a, mesh, [Shard(1)]), distribute_tensor(b, mesh, [Shard(0)])
    close(numba_gemm.torch.matmul(*given), a.double() @ b.double())
    part = DTensor.from_local(a / mesh.size(), mesh, [Partial()])
    close(numba_gemm.torch.matmul(part, given[1]), a.double() @ b.double())
    square = init_device_mesh("cpu", (1, mesh.size()))
    given = (distribute_tensor(one, square, [Shard(0), Shard(1)]) for one in (a, b))
    close(numba_gemm.torch.matmul(*given), a.double() @ b.double())
    return 3


def main(rank, world, meeting):
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=100)
    )
    mesh = init_device_mesh("cpu", (world,))
    count = compiled(mesh) + simulated(mesh)
    operators._sgemm = by_torch
    count += matrices(mesh, rank, world) + sums(mesh) + batches(mesh) + gradients(mesh)
    count += gradients_of_batches(mesh) + refused(mesh)
    print(f"compared {count}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
