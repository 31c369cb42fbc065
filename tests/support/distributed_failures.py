"""A program of several ranks: calls of `distributed_sgemm` that fail, and what the other ranks see.

Arguments: the name of a part; the rank; the number of ranks; the file by which they meet.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from numba_gemm.distributed import copying, distributed_sgemm, model, release_memory, sgemm
from numba_gemm.distributed.executor import Executor
from numba_gemm.distributed.shared_memory import Buffer, buffer_of

TIMEOUT = 10  # seconds of the process group
TERMS = 12  # of a sum; the number of ranks divides it


def by_torch(out, a, b, alpha, beta, precision):
    """A local product without the simulator."""
    out.copy_(torch.addmm(out, a, b, alpha=alpha, beta=beta) if beta else alpha * (a @ b))


def shards(rank):
    """Arguments that are correct."""
    return {"a": torch.ones(2 + rank, TERMS), "b": torch.ones(TERMS // dist.get_world_size(), 3)}


# Arguments of the last rank, the error that it sees, and the error of the others; None where both are the same.
REFUSED = {
    "precision": (lambda own: {"precision": "fp32_auto"}, "ranks disagree: precision is 'ieee' at 0 of the mesh", None),
    "unknown precision": (lambda own: {"precision": "fp64"}, "precision is 'fp64'", "refused its arguments"),
    "tensor cores": (lambda own: {"precision": "bf16x6"}, "no matrix instructions", "refused its arguments"),
    "alpha": (lambda own: {"alpha": 2.0}, "ranks disagree: alpha is 1.0 at 0 of the mesh and 2.0", None),
    "panel": (lambda own: {"panel": 2}, "ranks disagree: panel is not given at 0", None),
    "huge panel": (lambda own: {"panel": 1 << 63}, "ranks disagree: panel", None),
    "no panel": (lambda own: {"panel": 0}, "panel is 0", "refused its arguments"),
    "placements": (lambda own: {"placements": ("Shard(0)", "Shard(1)")}, "placements of b is Shard(0) at 0", None),
    "result": (lambda own: {"out_placements": "Replicate"}, "placements of the result is not given at 0", None),
    "out": (lambda own: {"out": torch.ones(own["a"].shape[0], 3)}, "ranks disagree: an out is not given at 0", None),
    "beta": (lambda own: {"beta": 1.0}, "out is not given", "refused its arguments"),
    "columns": (lambda own: {"a": torch.ones(2, 9)}, "a has a shard of shape (2, 9)", None),
    "rows of b": (lambda own: {"b": torch.ones(1, 3)}, "expected (M, K) and (K, N)", None),
    "dtype": (lambda own: {"b": own["b"].double()}, "b has dtype torch.float64", "refused its arguments"),
    "dimensions": (lambda own: {"a": torch.ones(TERMS)}, "a has 1 dimensions", "refused its arguments"),
    "no tensor": (lambda own: {"a": None}, "a is of type NoneType", "refused its arguments"),
    "grad": (lambda own: {"a": own["a"].requires_grad_()}, "a requires grad", "refused its arguments"),
    "negation": (
        lambda own: {"a": torch.ones(2, TERMS, dtype=torch.complex64).conj().imag},
        "a is still to be negated",
        "refused its arguments",
    ),
    "overlap": (lambda own: {"out": own["b"]}, "out overlaps b", "refused its arguments"),
}


def refusal(**arguments):
    """The text of the error that a call ends with."""
    try:
        distributed_sgemm(**arguments)
    except (TypeError, ValueError, ArithmeticError, MemoryError, RuntimeError) as error:
        return str(error)
    raise AssertionError("no error")


def disagreement(rank, world):
    """Errors on all ranks, after which products are computed as before."""
    for name, (changed, of_last, of_others) in REFUSED.items():
        own = shards(rank)
        if rank == world - 1:
            own |= changed(own)
        expected = of_last if rank == world - 1 or of_others is None else of_others
        text = refusal(**own)
        assert expected in text, (name, text)
        assert (distributed_sgemm(**shards(rank)) == TERMS).all()
    for out, expected in (
        (torch.ones(5, 4), "out has shards"),
        (torch.ones(2 + rank, 1).expand(-1, 3), "out overlaps itself"),
    ):
        text = refusal(**shards(rank), out=out)
        assert expected in text, text
    if world > 1:
        backwards = DeviceMesh("cpu", list(reversed(range(world))))
        text = refusal(**shards(rank), mesh=backwards)
        assert "expected ranks that ascend" in text, text
    by_columns = ("Shard(1)", "Shard(1)")
    text = refusal(a=torch.ones(8, 3), b=torch.ones(3 * world, 2), placements=by_columns, out_placements="Shard(0)")
    assert "pass one of these results: Shard(1), Replicate" in text, text
    return len(REFUSED)


def death(rank, world):
    """The last rank ends in its first product; the others get PyTorch's error before the timeout is over."""

    def deadly(out, a, b, alpha, beta, precision):
        if rank == world - 1:
            os._exit(7)
        by_torch(out, a, b, alpha, beta, precision)

    sgemm.compute_into = deadly
    begin = time.monotonic()
    try:
        for _ in range(100):
            distributed_sgemm(**shards(rank))
    except RuntimeError:
        assert time.monotonic() - begin < 2 * TIMEOUT
        return "error"
    raise AssertionError("no error")


def failure(rank, world):
    """A local product fails on the last rank, where ranks copy: all raise an error, and later products are correct."""

    def failing(out, a, b, alpha, beta, precision):
        if rank == world - 1:
            raise ArithmeticError("this product fails")
        by_torch(out, a, b, alpha, beta, precision)

    model.COPIED_FROM = 0.0
    sums = {"a": torch.ones(3, TERMS // world), "b": torch.ones(TERMS // world, 4)}
    sums["placements"] = ("Shard(1)", "Shard(0)")
    for arguments, when in ((shards(rank), "while ranks copied"), (sums, "before ranks copied")):
        sgemm.compute_into = failing
        text = refusal(**arguments)
        assert ("this product fails" if rank == world - 1 else f"another rank has failed {when}") in text, text
        sgemm.compute_into = by_torch
        assert (distributed_sgemm(**arguments) == TERMS).all()
    return "errors"


def memory(rank, world):
    """The last rank has no memory for what it receives, where ranks copy: all raise an error; later products work.

    The first product runs in inference mode, whose tensors cannot be written to outside of it.
    """
    allocate = Executor.allocate

    def none_left(self, *elements):
        if rank == world - 1:
            raise MemoryError("no memory is left")
        allocate(self, *elements)

    model.COPIED_FROM = 0.0
    with torch.inference_mode():
        assert (distributed_sgemm(**shards(rank)) == TERMS).all()
    for _ in range(2):
        Executor.allocate = none_left
        text = refusal(**shards(rank))
        expected = "no memory is left" if rank == world - 1 else "another rank has failed while ranks copied"
        assert expected in text, text
        Executor.allocate = allocate
        assert (distributed_sgemm(**shards(rank)) == TERMS).all()
    buffer = buffer_of(torch.device("cpu"))
    assert buffer.room > 0
    assert len(buffer._openers) == world - 1
    release_memory()
    buffer.lacks = int(rank == world - 1)  # on one rank: none copies
    assert (distributed_sgemm(**shards(rank)) == TERMS).all()
    assert buffer.room == 0
    buffer.lacks = 0
    reserve = Buffer.reserve
    Buffer.reserve = none_left if rank == world - 1 else reserve
    for openers in (0, world - 1):
        assert (distributed_sgemm(**shards(rank)) == TERMS).all()
        assert len(buffer._openers) == openers  # memory is kept until all of these have closed it
        Buffer.reserve = reserve
    return "errors"


def apart(rank, world):
    """One rank cannot open the memory of others: all broadcast, from then on without trying again."""
    tried = []

    def unable(self, told):
        tried.append(told)
        raise OSError("not on this host")

    model.COPIED_FROM = 0.0
    if rank == world - 1:
        Buffer.open = unable
    for _ in range(2):
        assert (distributed_sgemm(**shards(rank)) == TERMS).all()
    assert len(copying._separate) == 1
    assert not copying._known
    assert len(tried) == (rank == world - 1)
    assert buffer_of(torch.device("cpu")).room == 1  # memory that none can open is not kept
    return "broadcasts"


def measured(rank, world):
    """In the experiment, products that are wrong on one rank have no rate, whatever the placements."""
    from numba_gemm.lab.bench import distributed, distributed_child

    def wrong(out, *others):
        by_torch(out, *others)
        out[-1, -1] += rank == world - 1

    distributed_child.compute_into = by_torch
    for name, correct in itertools.product(distributed.PLACEMENTS, (True, False)):
        sgemm.compute_into = by_torch if correct else wrong
        row = distributed_child.measured(name, 4 * world, "ieee", seconds=0.0)
        assert (row["error"] < distributed.ERRORS["ieee"]) == correct
        assert (row["tflops"] > 0) == (row["ratio"] > 0) == (row["broadcast_tflops"] > 0) == correct
        assert row["alone_tflops"] > 0
        assert row["addmm_tflops"] > 0
        assert len(row["watts"].split()) == len(row["alone_mhz"].split()) == world
        assert row["predicted_tflops"] <= row["alone_tflops"]
    return "verified"


PARTS = {one.__name__: one for one in (disagreement, death, failure, memory, apart, measured)}


def main(part, rank, world, meeting):
    """Run a part of the program."""
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT)
    )
    sgemm.compute_into = by_torch
    print(part, PARTS[part](rank, world), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    sys.stdout.flush()
    os._exit(0)  # without waiting for threads of gloo
