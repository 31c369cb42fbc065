"""Functions of tensors. They call the operators only where PyTorch has to see the call.

That is the case for gradients, while code is traced or compiled, under dispatch modes, inside `torch.func.vmap`, and
for subclasses of tensors. All other calls take less time on the host without the operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..gemm.precision import IEEE, canonical
from ..kernels.scalars import real
from ..typing import PrecisionName
from .operators import (
    OPERATORS,
    PLAIN,
    check_float32,
    check_tensors,
    compute,
    compute_into,
    compute_sum,
    expanded,
    is_dtensor,
    refuse_tangents,
    tangents_are_possible,
)
from .sharding import register_sharding

__all__ = ["addmm", "linear", "matmul"]

# Not public; PyTorch's own Python code asks the same.
_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001
_transforms = torch._C._are_functorch_transforms_active  # noqa: SLF001
_is_traced = torch._C._is_tracing  # noqa: SLF001


def matmul(a: Tensor, b: Tensor, *, out: Tensor | None = None, precision: PrecisionName = IEEE) -> Tensor:
    """Multiply matrices, or batches of them, as `torch.matmul` does, in a given precision.

    Parameters
    ----------
    a, b : Tensor of shape (..., M, K), Tensor of shape (..., K, N); float32, on a CUDA device
        Operands with any strides. Batch dimensions are broadcast. A vector is a row on the left and a column on the
        right; the result does not have that dimension. DTensors are multiplied without `out`, each rank's part by
        itself.
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
        For a tensor with a forward-mode tangent, and inside transforms of `torch.func` such as `grad`.
    TypeError, ValueError
        For the operands and precisions that `tiled_sgemm` refuses, and for DTensors with `out`.

    Examples
    --------
    >>> import torch
    >>> from numba_gemm.torch import matmul
    >>> x = torch.rand(64, 256, device="cuda")  # doctest: +SKIP
    >>> w = torch.rand(256, 32, device="cuda", requires_grad=True)  # doctest: +SKIP
    >>> matmul(x, w, precision="bf16x6").sum().backward()  # doctest: +SKIP
    """
    if out is None:
        direct = _direct(a, b)
        if not direct:
            _check(precision, a=a, b=b)
        if a.dim() == 1 or b.dim() == 1:
            return _of_vectors(a, b, None, precision)
        call: Any = compute if direct else OPERATORS.matmul.default
        return call(a, b, 1.0, precision)
    direct = _direct(a, b, out)
    if not direct:
        _check(precision, a=a, b=b, out=out)
    if a.dim() == 1 or b.dim() == 1:
        return _of_vectors(a, b, out, precision)
    _refuse_gradients("matmul", a, b, out)
    call = compute_into if direct else OPERATORS.matmul_out.default
    call(out, a, b, 1.0, 0.0, precision)
    return out


def _of_vectors(a: Tensor, b: Tensor, out: Tensor | None, precision: PrecisionName) -> Tensor:
    """Multiply a row or a column, as a matrix, without that dimension in the result."""
    added = [-1] * (b.dim() == 1) + [-2] * (a.dim() == 1)
    a, b = a.unsqueeze(0) if a.dim() == 1 else a, b.unsqueeze(1) if b.dim() == 1 else b
    if out is None:
        result = matmul(a, b, precision=precision)
        for dim in reversed(added):
            result = result.squeeze(dim)
        return result
    view = out
    for dim in added:
        view = view.unsqueeze(dim)
    matmul(a, b, out=view, precision=precision)
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

    If `input` is a vector, `beta` is 1 and `out` is not given, it is added in the kernel where the stage has epilogues.

    Parameters
    ----------
    input : Tensor that can be broadcast to (..., M, N), float32
        Tensor to add; not read if `beta` is 0.
    a, b : Tensor of shape (..., M, K), Tensor of shape (..., K, N); float32, on a CUDA device
        Operands with any strides. Batch dimensions are broadcast.
    precision : str
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
    beta, alpha = _factor("beta", beta), _factor("alpha", alpha)
    if out is None:
        direct = _direct(input, a, b)
        if not direct:
            _check(precision, input=input, a=a, b=b)
        call: Any = compute_sum if direct else OPERATORS.addmm.default
        return call(input, a, b, beta, alpha, precision)
    direct = _direct(input, a, b, out)
    if not direct:
        _check(precision, input=input, a=a, b=b, out=out)
    call = compute_into if direct else OPERATORS.matmul_out.default
    _refuse_gradients("addmm", input, a, b, out)
    if out is input or beta == 0:
        call(out, a, b, alpha, beta, precision)
        return out
    check_float32("input", input)
    expanded(input, out.shape)
    if torch.compiler.is_compiling():
        out.copy_(input)
        call(out, a, b, alpha, beta, precision)
        return out
    if _place(input) == _place(out):
        call(out, a, b, alpha, beta, precision)
        return out
    if _may_overlap(input, out):
        input = input.clone()
    call(out, a, b, alpha, 0.0, precision)  # first, so that operands that are refused leave `out` as it is
    return out.add_(input, alpha=beta)


def _place(x: Tensor) -> tuple[Any, ...]:
    """Return where the elements of a tensor lie; equal for two views of the same elements."""
    return x.device, x.data_ptr(), x.shape, x.stride()


def _may_overlap(x: Tensor, y: Tensor) -> bool:
    """Return False if no element of one tensor can lie between elements of the other."""

    def ends(one: Tensor) -> tuple[int, int]:
        start = one.data_ptr()  # strides of tensors are not negative
        steps = sum((extent - 1) * step for extent, step in zip(one.shape, one.stride()))
        return start, start + one.element_size() * (steps + 1)

    (x_start, x_end), (y_start, y_end) = ends(x), ends(y)
    return x.device == y.device and x.numel() > 0 and y.numel() > 0 and x_start < y_end and y_start < x_end


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, precision: PrecisionName = IEEE) -> Tensor:
    """Compute ``x @ weight.T + bias``, as `torch.nn.functional.linear` does, in a given precision.

    Parameters
    ----------
    x : Tensor of shape (..., K), float32, on a CUDA device
        Input.
    weight : Tensor of shape (N, K), float32
        Weight; its transpose is not copied.
    bias : Tensor of shape (N,), float32, optional
        Bias, added in the kernel.
    precision : str
        As in `matmul`.

    Returns
    -------
    Tensor of shape (..., N)
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
    given = {"x": x, "weight": weight} if bias is None else {"x": x, "weight": weight, "bias": bias}
    check_tensors(**given)
    for name, one in given.items():
        check_float32(name, one)
    if weight.dim() != 2:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; expected (N, K); pass a matrix, as weight[None] of one row"
        )
    if bias is None:
        return matmul(x, weight.mT, precision=precision)
    if bias.dim() and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}; expected ({weight.shape[0]},) for a weight of shape "
            f"{tuple(weight.shape)}; pass such a vector, or None"
        )
    if x.dim() == 1:
        return addmm(bias, x.unsqueeze(0), weight.mT, precision=precision).squeeze(0)
    return addmm(bias, x, weight.mT, precision=precision)


def _factor(name: str, value: Any) -> float:
    """Return beta or alpha as a float; raise TypeError if it is no number."""
    if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
        return float(value)
    return real(name, value)


def _check(precision: Any, **tensors: Any) -> None:
    """Raise TypeError for arguments that an operator of PyTorch would refuse in its own words; prepare for DTensors."""
    check_tensors(**tensors)
    if not isinstance(precision, str):
        canonical(precision)
    if is_dtensor(tensors.get("out")):
        raise TypeError("out is a DTensor; expected no out with DTensors: the result is a new one")
    register_sharding()


def _direct(*tensors: Tensor) -> bool:
    """Return True if PyTorch need not see a call with these tensors."""
    if torch.compiler.is_compiling() or _is_traced():
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
