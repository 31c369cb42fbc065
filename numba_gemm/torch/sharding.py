"""Products of DTensors: how the operators' operands may be divided among ranks.

PyTorch chooses the division that moves least data, moves it, and computes each rank's part by the same operator.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .operators import OPERATORS, is_dtensor

__all__ = ["are_dtensors", "register_sharding"]

Placements = tuple[Any, Any, Any]  # of C, A and B, on one dimension of the mesh


def are_dtensors(*tensors: Tensor) -> bool:
    """Return True if these are DTensors, and PyTorch knows how the operators may divide them."""
    return all(map(is_dtensor, tensors)) and _registered()


@torch.compiler.assume_constant_result  # called while code is compiled, too
def register_sharding() -> bool:
    """Tell PyTorch how the operators may divide DTensors, if their package is imported; return True if it knows."""
    return "torch.distributed.tensor" in sys.modules and _registered()


@cache
def _registered() -> bool:
    """Register divisions; return False with a PyTorch that does not take any, or confuses numbers of several calls."""
    if torch.__version__ < (2, 9):  # PyTorch's pull request 159289
        return False
    from torch.distributed.tensor.experimental import register_sharding as register

    def of_product(a: Any, b: Any, *_: Any) -> list[tuple[list[Any], list[Any]]]:
        return [([c], [x, y, None, None]) for c, x, y in _divisions(a, b)]

    def of_sum(added: Any, a: Any, b: Any, *_: Any) -> list[tuple[list[Any], list[Any]]]:
        dimensions = max(a.ndim, b.ndim)
        return [([c], [_like(c, added, dimensions), x, y, None, None, None]) for c, x, y in _divisions(a, b)]

    register(OPERATORS.matmul.default)(of_product)
    register(OPERATORS.addmm.default)(of_sum)
    return True


def _divisions(a: Any, b: Any) -> Iterator[Placements]:
    """Yield divisions of a product: of nothing, of batches, of rows of A, of columns of B, and of sums."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    dimensions = max(a.ndim, b.ndim)
    yield Replicate(), Replicate(), Replicate()
    for dim in range(dimensions - 2):
        x, y = _like(Shard(dim), a, dimensions), _like(Shard(dim), b, dimensions)
        if x.is_shard() or y.is_shard():
            yield Shard(dim), x, y
    yield Shard(dimensions - 2), Shard(a.ndim - 2), Replicate()
    yield Shard(dimensions - 1), Replicate(), Shard(b.ndim - 1)
    yield Partial(), Shard(a.ndim - 1), Shard(b.ndim - 2)


def _like(c: Any, x: Any, dimensions: int) -> Any:
    """Return the placement of an array that is broadcast to C, which has this placement and number of dimensions."""
    from torch.distributed.tensor import Replicate, Shard

    if not c.is_shard():
        return c
    own = c.dim - (dimensions - x.ndim)
    return Shard(own) if own >= 0 and x.shape[own] > 1 else Replicate()
