"""Context in which products of PyTorch are computed here."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..gemm.precision import IEEE, canonical
from ..typing import PrecisionName
from .operators import DEVICE, OPERATORS, PLAIN
from .sharding import are_dtensors

__all__ = ["Override", "override"]

COMPOSED = DispatchKey.CompositeImplicitAutograd

_aten = torch.ops.aten
_REPLACED = {  # PyTorch's operators: dimensions of their matrices, and what computes them here
    _aten.mm.default: (2, OPERATORS.matmul.default),
    _aten.bmm.default: (3, OPERATORS.matmul.default),
    _aten.addmm.default: (2, OPERATORS.addmm.default),
    _aten.baddbmm.default: (3, OPERATORS.addmm.default),
}
_FUSED = {  # operators whose products no mode sees
    _aten._transformer_encoder_layer_fwd.default,  # noqa: SLF001 -- a name of PyTorch's operators
    _aten._native_multi_head_attention.default,  # noqa: SLF001
}


def override(*, precision: PrecisionName = IEEE) -> Override:
    """Return a context manager in which PyTorch's own float32 products on CUDA are computed here.

    `mm`, `addmm`, `bmm` and `baddbmm` are replaced, and with them `matmul`, ``@``, `linear`, `einsum` and others that
    PyTorch composes of these, also of DTensors. Everything else is left to PyTorch: other dtypes and devices, sparse
    tensors and other subclasses, products of vectors, variants with `out` or in place, and fused attention. Transformer
    layers of PyTorch that run as one fused operator, as in evaluation mode without gradients, cause a warning. A
    backward pass computes its products in `precision` too if it runs inside the context. Under autocast, products that
    PyTorch casts are left to it.

    Intended for trying a precision on a model without edits: PyTorch calls Python for each operator in the context,
    which takes time on the host. For code compiled by `torch.compile`, use `matmul` and the like, or `external_matmul`.

    Parameters
    ----------
    precision : str
        Arithmetic of the products; see `tiled_sgemm`.

    Returns
    -------
    context manager
        To be entered by ``with``; it may be entered several times.

    Raises
    ------
    TypeError, ValueError
        For an unknown precision. One that the GPU cannot run is refused at the first product.

    Examples
    --------
    >>> import torch, numba_gemm.torch
    >>> model = torch.nn.Linear(256, 32, device="cuda")  # doctest: +SKIP
    >>> with numba_gemm.torch.override(precision="bf16x6"):  # doctest: +SKIP
    ...     model(torch.rand(64, 256, device="cuda")).sum().backward()
    """
    return Override(canonical(precision))


class Override(TorchDispatchMode):
    """Context manager of `override`."""

    def __init__(self, precision: PrecisionName) -> None:
        super().__init__()
        self._precision = precision

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _REPLACED:
            dimensions, ours = _REPLACED[func]
            if _takes(dimensions, *args):
                factors = [float(kwargs.get(name, 1)) for name in ("beta", "alpha")] if len(args) == 3 else [1.0]
                with torch.no_grad():  # autograd records what PyTorch's own operator computes
                    return ours(*args, *factors, self._precision)
        elif torch.is_inference_mode_enabled() and _is_composed(func) and not _any_nested(args, kwargs):
            with self:  # operators that are composed of others arrive whole
                return func._op_dk(COMPOSED, *args, **kwargs)  # noqa: SLF001
        if func in _FUSED and args[0].dtype == torch.float32:
            warnings.warn(
                f"{func} computes its products inside PyTorch, not in precision {self._precision!r}; call "
                "torch.backends.mha.set_fastpath_enabled(False) to have them computed here",
                stacklevel=2,
            )
        return func(*args, **kwargs)


@cache
def _is_composed(func: Any) -> bool:
    """Return True if PyTorch composes an operator of others in C++; its decompositions in Python may be far slower."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), COMPOSED))  # noqa: SLF001


def _any_nested(*arguments: Any) -> bool:
    """Return True if any argument is a nested tensor, for which PyTorch has kernels of its own."""
    return any(isinstance(x, Tensor) and x.is_nested for x in tree_leaves(arguments))


def _takes(dimensions: int, *operands: Tensor) -> bool:
    """Return True if these are float32 matrices that fit, in memory that kernels read, or DTensors of such."""
    a, b = operands[-2:]
    return (
        (all(type(x) in PLAIN for x in operands) or are_dtensors(*operands))
        and all(x.dtype == torch.float32 and x.layout == torch.strided for x in operands)
        and all(x.device == a.device and x.device.type == DEVICE for x in operands)
        and a.dim() == b.dim() == dimensions
        and a.shape[:-2] == b.shape[:-2]
        and a.shape[-1] == b.shape[-2]
    )
