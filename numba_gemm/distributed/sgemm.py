"""The public function `distributed_sgemm`."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..gemm.precision import IEEE
from ..gemm.request import check_terms
from ..torch.operators import compute_into
from ..typing import PrecisionName, Scalar
from .agreement import Mesh, agreed, has_cpu_backend
from .copying import CopyingExecutor, opened
from .division import Coordinate, Division, Shapes, divide, shards
from .executor import Executor
from .explanation import unsupported
from .facts import Facts
from .lanes import Lanes
from .model import Rates, Work, plan_work
from .operands import Call, checked, mesh_of, read_mesh, shard_of
from .placements import COLS, ROWS, WHOLE, Placements, algorithm, moved, words
from .shared_memory import buffer_of

__all__ = ["distributed_sgemm"]

WITHIN, BETWEEN = 300e9, 45e9  # bytes per second by which panels are chosen: NVLink in a host, 400 Gb/s between hosts
OBJECTS = {ROWS: Shard(0), COLS: Shard(1), WHOLE: Replicate()}


def distributed_sgemm(
    a: Tensor,
    b: Tensor,
    out: Tensor | None = None,
    *,
    alpha: Scalar = 1.0,
    beta: Scalar = 0.0,
    precision: PrecisionName = IEEE,
    placements: Any = None,
    out_placements: Any = None,
    group: Any = None,
    mesh: Any = None,
    panel: int | None = None,
) -> Tensor:
    """Compute ``alpha * A @ B + beta * C`` for matrices that are divided among the ranks of a process group or a mesh.

    To be called by all ranks with the same arguments, apart from the shards. C stays in place: panels of A and B
    travel on a second stream while others are multiplied. If A is divided by columns and B by rows, each rank
    multiplies its parts, and the sums are added.

    Parameters
    ----------
    a, b : DTensor or Tensor, float32
        A (M, K) and B (K, N) as DTensors on one mesh; or this rank's shards of them, of any extents that fit, also 0.
    out : DTensor or Tensor, float32, optional
        C and the result, of the kind of `a` and `b`; its memory is not shared with them.
    alpha, beta : real number
        Scalars, rounded to float32. C is not read if `beta` is 0.
    precision : str
        Arithmetic of the products; see `tiled_sgemm`.
    placements : pair of placements, optional
        For shards: how `a` and `b` are divided, by PyTorch's placements or their names "Shard(0)", "Shard(1)" and
        "Replicate"; one, or a sequence with one per dimension of the mesh. By default A and B are divided by rows, on a
        mesh of two dimensions by rows along the first and by columns along the second.
    out_placements : placement or sequence of placements, optional
        How the result is divided. By default as `out`, if that is a DTensor; else as it is computed, which follows from
        the placements of A and B alone (`explain`).
    group : ProcessGroup, optional
        For shards: the ranks, in one dimension. By default all.
    mesh : DeviceMesh, optional
        For shards, instead of a group: a mesh of one or two dimensions.
    panel : int, optional
        Most elements of a panel along the axis in which it is cut, or rows of C whose sums NCCL adds at once; it does
        not matter where ranks copy sums. By default a model chooses (`explain`).

    Returns
    -------
    DTensor or Tensor
        `out` if given, else a new DTensor, or this rank's shard of the result.

    Raises
    ------
    TypeError
        For operands that are not float32 tensors on the GPU, or of different kinds.
    ValueError
        On every rank: for shapes, scalars, placements or precisions that do not fit or differ between ranks, and if
        another rank has refused its arguments; for placements of shards that cannot be multiplied without moving an
        operand as a whole (DTensors are redistributed); as for `tiled_sgemm` otherwise.
    RuntimeError
        If another rank has failed while ranks copied to or from each other's memory.

    Notes
    -----
    The ranks of one host copy to and from each other's memory, and each keeps some (`release_memory` frees it). NCCL
    sends data instead if ranks are on several hosts, for results that every rank is to have as a whole, for products of
    less than a millisecond, in CUDA graphs that are being captured, if the process group has no backend for the CPU,
    and where ranks cannot open each other's memory or have none left.

    The ranks compare their arguments in a small all-gather. With a process group that has a backend for the CPU
    (``init_process_group("cpu:gloo,cuda:nccl")``) the host does not wait for the GPU there, except in a call that needs
    a larger buffer. If a rank dies, the others end with PyTorch's error within the timeout of the process group.

    The same call on the same mesh gives the same bits, except where NCCL adds sums in another order, and if ranks copy
    in one call and NCCL sends data in the other, which add panels in different orders. Each panel along k after
    the first one adds at most 2^-24 of an element's sum to the errors of the precision; for "bf16x6" and "bf16x9" there
    are at most eight.

    Examples
    --------
    >>> import torch
    >>> from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
    >>> from numba_gemm.distributed import distributed_sgemm
    >>> mesh = init_device_mesh("cuda", (2,))  # doctest: +SKIP
    >>> a = distribute_tensor(torch.rand(512, 256, device="cuda"), mesh, [Shard(0)])  # doctest: +SKIP
    >>> b = distribute_tensor(torch.rand(256, 128, device="cuda"), mesh, [Shard(0)])  # doctest: +SKIP
    >>> distributed_sgemm(a, b).placements  # doctest: +SKIP
    (Shard(dim=0),)
    """
    device_mesh = mesh_of(a, b, out, group=group, mesh=mesh)
    ranks = read_mesh(device_mesh, group)
    call, facts, error = None, Facts(), None
    try:
        call, facts = checked(a, b, out, alpha, beta, precision, placements, out_placements, panel, ranks)
        facts = _with_buffer(facts, shard_of(a).device)
    except Exception as refused:  # raised by `agreed`, when all ranks know
        error = refused
    everyone = agreed(ranks, facts, error, shard_of(a) if error is None else None)
    assert call is not None
    with torch.no_grad():
        if isinstance(a, DTensor):
            return _of_dtensors(a, b, out, call, ranks, everyone)
        found = algorithm(call.a_placements, call.b_placements, call.out)
        if found is None:
            raise unsupported(call.a_placements, call.b_placements, call.out)
        shapes = [{at: getattr(one, f"{name}_shape") for at, one in everyone.items()} for name in ("a", "b", "out")]
        division = divide(
            found,
            ranks.shape,
            call.a_placements,
            call.b_placements,
            shapes[0],
            shapes[1],
            None if out is None else shapes[2],
        )
        place = None if out is None else shard_of(out)
        local = _computed(division, shard_of(a), shard_of(b), place, call, ranks, everyone)
        return local if out is None else out


def _with_buffer(facts: Facts, device: torch.device) -> Facts:
    """Return facts with those of this rank's buffer, and whether it can be used now."""
    buffer, captured = buffer_of(device), False
    if device.type == "cuda":
        with torch.cuda.device(device):
            captured = torch.cuda.is_current_stream_capturing()
    return facts._replace(copies=int(not captured), buffer=buffer.number, room=buffer.room, lacks=buffer.lacks)


def _of_dtensors(
    a: DTensor, b: DTensor, out: DTensor | None, call: Call, ranks: Mesh, everyone: dict[tuple[int, ...], Facts]
) -> Tensor:
    """Multiply DTensors; move them first if their placements have no algorithm."""
    x, y = call.a_placements, call.b_placements
    found = algorithm(x, y, call.out)
    if moves := found is None:
        x, y, wanted = moved(x, y, call.out)
        found = algorithm(x, y, wanted)
        assert found is not None
    if out is not None and found.out != call.out:
        raise ValueError(
            f"out is placed {words(call.out or ())}; expected {words(found.out)} for these operands; pass such an out, "
            "or none and out_placements"
        )
    if moves:
        a, b = a.redistribute(placements=_objects(x)), b.redistribute(placements=_objects(y))
    shape = a.shape[0], b.shape[1]
    given = None if out is None else shards((out.shape[0], out.shape[1]), found.out, ranks.shape)
    division = divide(found, ranks.shape, x, y, _shards(a, x, ranks), _shards(b, y, ranks), given)
    local = _computed(division, shard_of(a), shard_of(b), None if out is None else shard_of(out), call, ranks, everyone)
    if out is not None:
        return out
    result = DTensor.from_local(
        local,
        a.device_mesh,
        _objects(found.out),
        run_check=False,
        shape=torch.Size(shape),
        stride=(max(shape[1], 1), 1),
    )
    return result if call.out in (None, found.out) else result.redistribute(placements=_objects(call.out))


def _shards(x: DTensor, placed: Placements, ranks: Mesh) -> Shapes:
    return shards((x.shape[0], x.shape[1]), placed, ranks.shape)


def _objects(placements: Placements) -> list[Any]:
    return [OBJECTS[one] for one in placements]


def _computed(
    division: Division,
    a: Tensor,
    b: Tensor,
    out: Tensor | None,
    call: Call,
    ranks: Mesh,
    everyone: dict[tuple[int, ...], Facts],
) -> Tensor:
    """Compute this rank's part of C, in `out` or in a new tensor."""
    coordinate, groups = _on_grid(division, ranks.coordinate), list(ranks.groups)
    if len(groups) == 1:
        groups.insert(0 if division.grid[0] == 1 else 1, None)
    columns, lines = (one if extent > 1 else None for one, extent in zip(groups, division.grid))
    check_terms(call.precision, division.shape[2])  # here, all ranks refuse it

    def multiply(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> None:
        if prod(out.shape):
            compute_into(out, a, b, alpha, beta, call.precision)  # type: ignore[arg-type]  # checked

    work = _work(division, call, everyone, copied=has_cpu_backend(ranks))
    peers = None
    if work.copied:
        rooms = {at: work.room(_on_grid(division, at)) for at in everyone}
        peers = opened(ranks, a.device, rooms, everyone)
    if peers is None and work.copied:
        work = _work(division, call, everyone, copied=False)
    given = (work, coordinate, (columns, lines), a, b, out, call.alpha, call.beta, multiply, Lanes(a.device))
    if peers is None:
        executor = Executor(*given)
    else:
        on_grid = {_on_grid(division, at): peer for at, peer in peers.items()}
        executor = CopyingExecutor(*given, mesh=ranks, buffer=buffer_of(a.device), peers=on_grid)
    executor.run()
    return executor.out


def _on_grid(division: Division, at: tuple[int, ...]) -> Coordinate:
    """Return the place on the grid of a rank, given that on the mesh."""
    if len(at) == 2:
        return at[0], at[1]
    return (0, at[0]) if division.grid[0] == 1 else (at[0], 0)


def _work(division: Division, call: Call, everyone: dict[tuple[int, ...], Facts], copied: bool) -> Work:
    """Choose the panels, from what all ranks know."""
    one_host = len({one.host for one in everyone.values()}) == 1
    copied = copied and one_host and all(one.copies for one in everyone.values())
    flops = 1e6 * min(one.megaflops for one in everyone.values())
    rates = Rates(max(flops, 1.0), links=(WITHIN if one_host else BETWEEN,) * 2)
    return plan_work(division, call.precision, rates, call.panel, copied)
