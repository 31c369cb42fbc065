"""Arguments of a distributed product on one rank: checked, and reduced to facts that ranks can compare."""

from __future__ import annotations

import socket
import zlib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..device.units import FLOAT32_BYTES
from ..gemm.precision import KNOWN, canonical, check_precision
from ..kernels.scalars import index, real
from ..runtime.device import device_properties
from ..torch.operators import DEVICE, check_float32, check_tensors, refuse_tangents, tangents_are_possible
from .agreement import Mesh
from .division import Shape, shards
from .explanation import OWN, read_placements
from .facts import Facts, bits, numbers
from .model import product_flops
from .placements import OTHER, Placements, placement

__all__ = ["Call", "checked", "mesh_of", "read_mesh", "shard_of"]

MOST_ELEMENTS = 1 << 62  # of a panel: facts are integers of 64 bits


class Call(NamedTuple):
    """Checked arguments; `out` is the placement that is asked for, None for any."""

    a_placements: Placements
    b_placements: Placements
    out: Placements | None
    precision: str
    alpha: float
    beta: float
    panel: int | None


def mesh_of(*tensors: Any, group: Any = None, mesh: Any = None) -> DeviceMesh | None:
    """Return the mesh of DTensors, or the given one; None for a process group."""
    found = [x.device_mesh for x in tensors if isinstance(x, DTensor)]
    if found and (mesh is not None or group is not None):
        raise ValueError("a is a DTensor, and mesh or group is given; expected one of them; pass DTensors alone")
    if mesh is not None and group is not None:
        raise ValueError("mesh and group are both given; expected one of them; pass one")
    return found[0] if found else mesh


def read_mesh(mesh: DeviceMesh | None, group: Any) -> Mesh:
    """Return extents, coordinate and groups of a mesh, or of a process group.

    Raises
    ------
    ValueError
        For a mesh of more than two dimensions, one whose ranks do not ascend, or one that this rank is not part of.
    """
    if mesh is None:
        group = dist.group.WORLD if group is None else group
        if group is None:
            raise ValueError(
                "there is no process group; expected an initialised one; call torch.distributed.init_process_group()"
            )
        return Mesh(
            (dist.get_world_size(group),),
            (dist.get_rank(group),),
            (group,),
            tuple(dist.get_process_group_ranks(group)),
        )
    if mesh.ndim not in OWN:
        raise ValueError(f"mesh has {mesh.ndim} dimensions; expected one or two; pass a part of it, mesh['name']")
    if not all(bool((mesh.mesh.diff(dim=dim) > 0).all()) for dim in range(mesh.ndim)):
        # PyTorch sorts the ranks of a group, so that a rank's number there would not be its place on the mesh.
        raise ValueError(
            f"mesh is {mesh.mesh.tolist()}; expected ranks that ascend along each dimension; create the mesh "
            "with ranks in ascending order"
        )
    at = mesh.get_coordinate()
    if at is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not part of the mesh {mesh}; expected calls by its ranks only; call there"
        )
    groups = tuple(mesh.get_group(dim) for dim in range(mesh.ndim))
    return Mesh(tuple(mesh.shape), tuple(at), groups, tuple(mesh.mesh.flatten().tolist()))


def checked(
    a: Any,
    b: Any,
    out: Any,
    alpha: Any,
    beta: Any,
    precision: Any,
    placements: Any,
    out_placements: Any,
    panel: Any,
    mesh: Mesh,
) -> tuple[Call, Facts]:
    """Check the arguments of this rank, and return them with what other ranks have to know.

    Raises
    ------
    TypeError, ValueError
        For arguments that `distributed_sgemm` refuses on this rank alone.
    """
    dims = len(mesh.shape)
    given = {"a": a, "b": b} if out is None else {"a": a, "b": b, "out": out}
    check_tensors(**given)
    divided = [isinstance(x, DTensor) for x in given.values()]
    if any(divided) and not all(divided):
        raise TypeError("some operands are DTensors and others are not; expected either; pass tensors of one kind")
    alpha, beta, precision = real("alpha", alpha), real("beta", beta), canonical(precision)
    panel = None if panel is None else min(index("panel", panel, 1), MOST_ELEMENTS)
    if beta != 0 and out is None:
        raise ValueError(f"beta is {beta} and out is not given; expected C in out; pass out, or beta=0")
    if any(divided):
        if placements is not None:
            raise ValueError("placements is given with DTensors, which have their own; expected one; leave it out")
        placed = [tuple(map(placement, x.placements)) for x in given.values()]
        if any(x.device_mesh != a.device_mesh for x in given.values()):
            raise ValueError("operands are on different meshes; expected one mesh; pass DTensors of one mesh")
    else:
        pair = (OWN[dims], OWN[dims]) if placements is None else placements
        if isinstance(pair, str) or len(pair) != 2:
            raise ValueError(f"placements is {placements!r}; expected those of a and of b; pass a pair")
        placed = [read_placements(f"placements[{i}]", one, dims) for i, one in enumerate(pair)]
        if any(OTHER in one for one in placed):
            raise ValueError(f"placements is {placements!r}; expected Shard(0), Shard(1) or Replicate; pass these")
    wanted = None if out_placements is None else read_placements("out_placements", out_placements, dims)
    if any(divided) and out is not None:
        if wanted not in (None, placed[2]):
            raise ValueError(f"out is placed {placed[2]} and out_placements is {wanted}; expected one; leave one out")
        wanted = placed[2]
    if wanted is not None and OTHER in wanted:
        raise ValueError(f"out_placements is {out_placements!r}; expected Shard(0), Shard(1) or Replicate; pass these")
    local = {name: _local(name, x) for name, x in given.items()}
    if any(divided):
        for (name, x), one in zip(given.items(), placed):
            _check_shard(name, x, local[name], one, mesh)
    _check_memory(local)
    gpu = device_properties(max(local["a"].get_device(), 0))
    check_precision(precision, gpu.cc)
    whole = {name: _shape(x) if any(divided) else (-1, -1) for name, x in given.items()}
    facts = Facts(
        dtensors=int(any(divided)),
        a_placements=numbers(placed[0]),
        b_placements=numbers(placed[1]),
        out_placements=numbers(wanted),
        precision=KNOWN.index(precision),
        alpha=bits(alpha),
        beta=bits(beta),
        has_out=int(out is not None),
        a_whole=whole["a"],
        b_whole=whole["b"],
        out_whole=whole.get("out", (-1, -1)),
        panel=-1 if panel is None else panel,
        a_shape=_shape(local["a"]),
        b_shape=_shape(local["b"]),
        out_shape=_shape(local["out"]) if "out" in local else (-1, -1),
        host=_host(),
        megaflops=int(product_flops(precision, gpu.sm_count, gpu.clock_hz) / 1e6),
    )
    return Call(placed[0], placed[1], wanted, precision, alpha, beta, panel), facts


@cache
def _host() -> int:
    """Return a number of this host: of its name and of the time at which it was started."""
    started = Path("/proc/sys/kernel/random/boot_id")
    return zlib.crc32(f"{socket.gethostname()} {started.read_text() if started.exists() else ''}".encode())


def _shape(x: Tensor) -> Shape:
    rows, cols = x.shape
    return int(rows), int(cols)


def _local(name: str, x: Tensor) -> Tensor:
    """Return a tensor's part on this rank.

    Raises
    ------
    TypeError, ValueError
        For one that is not a float32 matrix on the right device, or for which a gradient would have to be recorded.
    """
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires grad, and grad mode is enabled; no gradient is recorded here; call under "
            f"torch.no_grad(), or pass {name}.detach()"
        )
    check_float32(name, x)
    if x.dim() != 2:
        raise ValueError(f"{name} has {x.dim()} dimensions; expected 2; pass a matrix")
    if tangents_are_possible():
        refuse_tangents(x)
    local = shard_of(x)
    if local.device.type != DEVICE or local.layout != torch.strided:
        raise TypeError(
            f"{name} has layout {local.layout} and is on device {local.device}; expected torch.strided on {DEVICE}; "
            f"pass {name}.to({DEVICE!r})"
        )
    if local.is_neg():
        raise ValueError(
            f"{name} is still to be negated (is_neg() is True); expected values; pass {name}.resolve_neg()"
        )
    return local


def shard_of(x: Tensor) -> Tensor:
    """Return a tensor's part on this rank, when collectives that compute it have been sent to the current stream."""
    with torch.no_grad():
        local = x.to_local() if isinstance(x, DTensor) else x.detach()
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _check_shard(name: str, x: Any, local: Tensor, placed: Placements, mesh: Mesh) -> None:
    """Raise ValueError for a DTensor whose shard has another shape than DTensor's own functions give it."""
    if OTHER in placed or len(set(placed)) < len(placed):
        return
    expected = shards(_shape(x), placed, mesh.shape)[mesh.coordinate]
    if _shape(local) != expected:
        raise ValueError(
            f"{name} has a shard of shape {_shape(local)}; expected {expected}, as torch.chunk divides {_shape(x)}; "
            "pass local shards and placements instead of DTensors"
        )


def _check_memory(local: dict[str, Tensor]) -> None:
    """Raise ValueError if operands are on several devices, or `out` overlaps itself or another."""
    out, device = local.get("out"), local["a"].device
    for name, x in local.items():
        if x.device != device:
            raise ValueError(
                f"{name} is on device {x.device} and a on {device}; expected one device; pass {name}.to(a)"
            )
    if out is None or not out.numel():
        return
    (near, inner), (far, _) = sorted(zip(out.stride(), out.shape))
    if (
        (near == 0 and inner > 1)
        or (far <= near * (inner - 1) and min(out.shape) > 1)
        or 0 in (step for step, extent in zip(out.stride(), out.shape) if extent > 1)
    ):
        raise ValueError("out overlaps itself; expected distinct elements; pass a tensor with memory of its own")
    begin, end = _span(out)
    for name in ("a", "b"):
        first, last = _span(local[name])
        if first < end and begin < last:
            raise ValueError(f"out overlaps {name}; expected other memory; pass an out that shares none")


def _span(x: Tensor) -> tuple[int, int]:
    if not x.numel():
        return 0, 0
    last = sum(step * (extent - 1) for step, extent in zip(x.stride(), x.shape))
    return x.data_ptr(), x.data_ptr() + FLOAT32_BYTES * (last + 1)
