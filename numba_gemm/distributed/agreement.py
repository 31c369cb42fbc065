"""Agreement of ranks before any data moves: each tells what it was asked for, and all compare.

An error of one rank is raised on all ranks, after this exchange, so that none waits for another in vain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .facts import Facts, compare, packed, unpacked
from .lanes import second_stream

__all__ = ["Mesh", "agreed", "all_agree", "gathered", "has_cpu_backend"]


@dataclass(frozen=True)
class Mesh:
    """Ranks of a product: extents, this rank's coordinate, its process group along each dimension, and all ranks."""

    shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    groups: tuple[Any, ...]
    ranks: tuple[int, ...]


def agreed(mesh: Mesh, own: Facts, error: Exception | None, like: Any = None) -> dict[tuple[int, ...], Facts]:
    """Exchange facts among all ranks, and compare them.

    Parameters
    ----------
    mesh : Mesh
        Ranks.
    own : Facts
        Product that this rank was asked for.
    error : Exception or None
        Error of this rank; raised here after the exchange.
    like : Tensor, optional
        A tensor on the GPU to exchange over, if the group has no backend for the CPU; by default the current one.

    Returns
    -------
    dict
        Facts by coordinate.

    Raises
    ------
    ValueError
        If facts that have to be equal differ, or another rank has an error.
    """
    told = packed(own._replace(refused=int(error is not None)))
    everyone = {at: unpacked(row) for at, row in gathered(mesh, told, like).items()}
    if error is not None:
        raise error
    compare(everyone)
    return everyone


def has_cpu_backend(mesh: Mesh) -> bool:
    """Return True if exchanges need no GPU."""
    return all("cpu:" in dist.get_backend_config(group) for group in mesh.groups)


def gathered(mesh: Mesh, own: Sequence[int], like: Any = None) -> dict[tuple[int, ...], list[int]]:
    """Return each rank's integers by coordinate; all pass equally many. `like` is as for `agreed`."""
    device = torch.device("cpu")
    if not has_cpu_backend(mesh):
        on_gpu = like is not None and like.device.type == "cuda"
        device = like.device if on_gpu else torch.device("cuda", torch.cuda.current_device())
    # Not on the current stream: what was sent there before is not waited for.
    with torch.cuda.stream(second_stream(device)):
        found = torch.tensor(own, dtype=torch.int64, device=device)
        for group in reversed(mesh.groups):
            parts = [torch.empty_like(found) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, found, group=group)
            found = torch.stack(parts)
        rows = found.reshape(-1, found.shape[-1]).tolist()
    return {((i,) if len(mesh.shape) == 1 else divmod(i, mesh.shape[1])): row for i, row in enumerate(rows)}


def all_agree(mesh: Mesh, own: bool) -> bool:
    """Return True if `own` is True on all ranks; return only after all have called it."""
    return all(said for (said,) in gathered(mesh, [int(own)]).values())
