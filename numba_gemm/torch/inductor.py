"""Products as a choice of Inductor, the compiler of ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..gemm.precision import IEEE, canonical
from ..typing import PrecisionName
from .operators import compute_into

__all__ = ["external_matmul", "unfuse_addmm"]

_aten = torch.ops.aten


def external_matmul(precision: PrecisionName = IEEE) -> Callable[..., Tensor]:
    """Return a function for Inductor's option `external_matmul`, a candidate beside its own kernels.

    With ``max_autotune``, Inductor measures it for each product of two matrices and takes it where it is the fastest.
    The option exists from PyTorch 2.5 on; `unfuse_addmm` extends it to products with a bias. Inductor keeps no compiled
    code on disk that may refer to such functions.

    Parameters
    ----------
    precision : str
        Arithmetic of the products; see `tiled_sgemm`. Inductor compares times only: choose one that is accurate enough.

    Returns
    -------
    callable
        Function ``(a, b, out)``; the same one for the same precision.

    Raises
    ------
    TypeError, ValueError
        For an unknown precision.

    Examples
    --------
    >>> import torch
    >>> from numba_gemm.torch import external_matmul
    >>> options = {"max_autotune": True, "external_matmul": [external_matmul("bf16x6")]}
    >>> compiled = torch.compile(torch.mm, options=options)
    """
    return _product(canonical(precision))


@cache
def _product(precision: PrecisionName) -> Callable[..., Tensor]:
    def product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        try:
            with torch.no_grad():
                compute_into(out, a, b, 1.0, 0.0, precision)
        except (TypeError, ValueError) as error:  # of another dtype, for example: Inductor takes another candidate
            raise NotImplementedError(str(error)) from error
        return out

    product.__name__ = f"numba_gemm_{precision}"  # Inductor's compiled code refers to it by this name
    return product


def unfuse_addmm(graph: torch.fx.Graph) -> None:
    """Replace each float32 `addmm` of a graph by `mm` and an addition, as Inductor's `post_grad_custom_post_pass`.

    Inductor offers a choice of `external_matmul` for `mm` only. It splits products with a bias itself where all that
    reads the sum is elementwise, but not where the sum is also kept for a backward pass. It fuses the addition with the
    operations that follow.

    Parameters
    ----------
    graph : torch.fx.Graph
        Graph to change, as Inductor passes it.

    Examples
    --------
    >>> import torch
    >>> from numba_gemm.torch import external_matmul, unfuse_addmm
    >>> options = {"max_autotune": True, "external_matmul": [external_matmul("bf16x6")]}
    >>> options["post_grad_custom_post_pass"] = unfuse_addmm
    >>> compiled = torch.compile(torch.nn.Linear(256, 32), options=options)
    """
    for node in graph.find_nodes(op="call_function", target=_aten.addmm.default):
        value = node.meta["val"]
        added, a, b = node.args
        alpha, beta = (node.kwargs.get(name, 1) for name in ("alpha", "beta"))
        if value.dtype != torch.float32 or beta == 0:
            continue

        def insert(target: Any, *arguments: Any, like: torch.fx.Node = node) -> torch.fx.Node:
            new = graph.call_function(target, arguments)
            new.meta.update(like.meta)
            return new

        with graph.inserting_before(node):
            total = insert(_aten.mm.default, a, b)
            if alpha != 1:
                total = insert(_aten.mul.Tensor, total, alpha)
            if beta != 1:
                added = insert(_aten.mul.Tensor, added, beta, like=added)
            total = insert(_aten.add.Tensor, total, added)
        node.replace_all_uses_with(total)
        graph.erase_node(node)
