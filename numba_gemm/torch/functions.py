"""Functions of tensors. They call the operators only where PyTorch has to see the call.

That is the case for gradients, while code is traced or compiled, under dispatch modes, inside `torch.func.vmap`, and
for subclasses of tensors. All other calls take less time on the host without the operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..gemm.precision import IEEE
from ..typing import PrecisionName
from .operators import (
    OPERATORS,
    PLAIN,
    check_float32,
    compute,
    compute_into,
    compute_sum,
    refuse_tangents,
    tangents_are_possible,
)

__all__ = ["addmm", "linear", "matmul"]

# Not public; PyTorch's own Python code asks the same.
_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001
_transforms = torch._C._are_functorch_transforms_active  # noqa: SLF001


def matmul(a: Tensor, b: Tensor, *, out: Tensor | None = None, precision: PrecisionName = IEEE) -> Tensor:
    """Multiply matrices, or batches of them, as `torch.matmul` does, in a given precision.

    Parameters
    ----------
    a, b : Tensor of shape (..., M, K), Tensor of shape (..., K, N); float32, on a CUDA device
        Operands with any strides. Batch dimensions are broadcast. Vectors are refused.
    out : Tensor of shape (..., M, N), float32, optional
        Tensor for the result, with any strides, in other memory than `a` and `b`.
    precision : str
        Arithmetic of the product and of its gradients; see `tiled_sgemm`.

    Returns
    -------
    Tensor of shape (..., M, N)
        `out` if given, else a new tensor in row order.

    Raises
    ------
    RuntimeError
        If `out` is given, a tensor requires grad, and grad mode is enabled.
    NotImplementedError
        For a tensor with a forward-mode tangent.
    TypeError, ValueError
        For the operands and precisions that `tiled_sgemm` refuses.

    Examples
    --------
    >>> import torch
    >>> from numba_gemm.torch import matmul
    >>> x = torch.rand(64, 256, device="cuda")  # doctest: +SKIP
    >>> w = torch.rand(256, 32, device="cuda", requires_grad=True)  # doctest: +SKIP
    >>> matmul(x, w, precision="bf16x6").sum().backward()  # doctest: +SKIP
    """
    if out is None:
        call: Any = compute if _direct(a, b) else OPERATORS.matmul.default
        return call(a, b, 1.0, precision)
    call = compute_into if _direct(a, b, out) else OPERATORS.matmul_out.default
    _refuse_gradients("matmul", a, b, out)
    call(out, a, b, 1.0, 0.0, precision)
    return out


def addmm(
    input: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
    out: Tensor | None = None,
    precision: PrecisionName = IEEE,
) -> Tensor:
    """Compute ``beta * input + alpha * a @ b``, as `torch.addmm` and `torch.baddbmm` do, in a given precision.

    If `input` is a vector and `beta` is 1, it is added in the kernel.

    Parameters
    ----------
    input : Tensor that can be broadcast to (..., M, N), float32
        Tensor to add; not read if `beta` is 0.
    a, b, precision
        As in `matmul`.
    beta, alpha : float
        Factors. Gradients are not computed for them.
    out : Tensor of shape (..., M, N), float32, optional
        Tensor for the result; may be `input`, which is then updated in place.

    Returns
    -------
    Tensor of shape (..., M, N)
        `out` if given, else a new tensor in row order.

    Raises
    ------
    RuntimeError, NotImplementedError, TypeError, ValueError
        As in `matmul`.

    Examples
    --------
    >>> import torch
    >>> from numba_gemm.torch import addmm
    >>> c = torch.zeros(64, 32, device="cuda")  # doctest: +SKIP
    >>> a, b = torch.rand(64, 256, device="cuda"), torch.rand(256, 32, device="cuda")  # doctest: +SKIP
    >>> addmm(c, a, b, out=c)  # in place: c += a @ b  # doctest: +SKIP
    """
    beta, alpha = float(beta), float(alpha)
    if out is None:
        call: Any = compute_sum if _direct(input, a, b) else OPERATORS.addmm.default
        return call(input, a, b, beta, alpha, precision)
    call = compute_into if _direct(input, a, b, out) else OPERATORS.matmul_out.default
    _refuse_gradients("addmm", input, a, b, out)
    if out is input or beta == 0:
        call(out, a, b, alpha, beta, precision)
        return out
    check_float32("input", input)
    if torch.compiler.is_compiling() or input.untyped_storage().data_ptr() == out.untyped_storage().data_ptr():
        out.copy_(input)
        call(out, a, b, alpha, beta, precision)
        return out
    call(out, a, b, alpha, 0.0, precision)  # first, so that operands that are refused leave `out` as it is
    return out.add_(input, alpha=beta)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, precision: PrecisionName = IEEE) -> Tensor:
    """Compute ``x @ weight.T + bias``, as `torch.nn.functional.linear` does, in a given precision.

    Parameters
    ----------
    x : Tensor of shape (..., M, K), float32, on a CUDA device
        Input.
    weight : Tensor of shape (N, K), float32
        Weight; its transpose is not copied.
    bias : Tensor of shape (N,), float32, optional
        Bias, added in the kernel.
    precision : str
        As in `matmul`.

    Returns
    -------
    Tensor of shape (..., M, N)
        A new tensor in row order.

    Raises
    ------
    NotImplementedError, TypeError, ValueError
        As in `matmul`.

    Examples
    --------
    >>> import torch
    >>> from numba_gemm.torch import linear
    >>> layer = torch.nn.Linear(256, 32, device="cuda")  # doctest: +SKIP
    >>> x = torch.rand(64, 256, device="cuda")  # doctest: +SKIP
    >>> y = linear(x, layer.weight, layer.bias, precision="bf16x6")  # doctest: +SKIP
    """
    if bias is None:
        return matmul(x, weight.mT, precision=precision)
    return addmm(bias, x, weight.mT, precision=precision)


def _direct(*tensors: Tensor) -> bool:
    """Return True if PyTorch need not see a call with these tensors."""
    if torch.compiler.is_compiling():
        return False
    if _transforms():
        _refuse_differentiation()
        return False
    if tangents_are_possible():
        refuse_tangents(*tensors)
    if _modes():
        return False
    grad = torch.is_grad_enabled()
    return not any(type(x) not in PLAIN or (grad and x.requires_grad) or x.is_meta or x.is_neg() for x in tensors)


def _refuse_differentiation() -> None:
    """Raise NotImplementedError inside transforms of `torch.func` that differentiate."""
    kinds = torch._C._functorch.TransformType  # noqa: SLF001
    active = torch._C._functorch.get_interpreter_stack() or ()  # noqa: SLF001
    if any(one.key() in (kinds.Grad, kinds.Jvp) for one in active):
        raise NotImplementedError(
            "called inside a transform of torch.func that differentiates (grad, vjp, jvp, jacrev, hessian); expected "
            "none, since registered operators have no such derivatives; use torch.matmul, or torch.autograd"
        )


def _refuse_gradients(name: str, *tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise RuntimeError(
            f"{name}() with out does not support automatic differentiation, and a tensor requires grad; expected none "
            "that does, or grad mode disabled; call it without out, or under torch.no_grad()"
        )
