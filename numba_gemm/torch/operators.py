"""Operators that are registered with PyTorch, their gradients and their computation.

``numba_gemm::matmul`` and ``numba_gemm::addmm`` have gradients, computed by ``numba_gemm::matmul`` in the same
precision; ``numba_gemm::matmul_out`` writes to a given tensor and has none. They are defined through
`torch.library.Library`, which takes less time per call than `torch.library.custom_op`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..api import tiled_sgemm
from ..gemm.precision import IEEE, canonical
from ..gemm.request import check_takes_epilogue
from ..runtime.device import device_properties
from ..simulator.switch import SIMULATOR
from ..typing import PrecisionName

__all__ = [
    "DEVICE",
    "OPERATORS",
    "PLAIN",
    "check_float32",
    "check_tensors",
    "compute",
    "compute_into",
    "compute_sum",
    "expanded",
    "is_dtensor",
    "refuse_tangents",
    "tangents_are_possible",
]

DEVICE = "cpu" if SIMULATOR else "cuda"  # type of the devices whose tensors are taken
_forward_ad = torch.autograd.forward_ad
PLAIN = (Tensor, torch.nn.Parameter)  # types whose memory is read


def _on_host(a: Tensor, b: Tensor, out: Tensor | None = None, **options: Any) -> Tensor:
    """Compute a product of CPU tensors on the simulator; parameters are those of `tiled_sgemm`."""

    def array(x: Tensor | None, name: str = "out") -> Any:
        if x is None or x.device.type != "cpu" or x.is_quantized:
            return x  # refused
        if x.layout != torch.strided:
            raise TypeError(
                f"{name} is a PyTorch tensor of layout {x.layout}; expected torch.strided; pass {name}.to_dense()"
            )
        return x if x.requires_grad and torch.is_grad_enabled() else x.detach().numpy()  # refused, as on a GPU

    vectors = options.get("epilogue_args", ())
    options["epilogue_args"] = [array(x, f"epilogue_args[{i}]") for i, x in enumerate(vectors)]
    result = tiled_sgemm(array(a, "a"), array(b, "b"), array(out), **options)
    return torch.from_numpy(result) if out is None else out


_sgemm = _on_host if SIMULATOR else tiled_sgemm


def _plain(x: Tensor) -> Tensor:
    """Return a parameter as a plain tensor, which takes the fast path."""
    return x.detach() if type(x) is torch.nn.Parameter else x


def _matrix(name: str, x: Tensor) -> Tensor:
    """Return an operand as a plain tensor; raise ValueError for a vector, TypeError for another dtype than float32."""
    if x.dtype is not torch.float32:  # PyTorch's products of FP16 and BF16 are of that dtype
        check_float32(name, x)
    if x.dim() < 2:
        raise ValueError(f"{name} has {x.dim()} dimensions; expected 2 or more; pass {name}.reshape(rows, columns)")
    return _plain(x)


def compute(a: Tensor, b: Tensor, alpha: float = 1.0, precision: PrecisionName = IEEE) -> Tensor:
    """Compute ``alpha * a @ b``."""
    return _sgemm(_matrix("a", a), _matrix("b", b), alpha=alpha, precision=precision)


def compute_into(
    out: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0, beta: float = 0.0, precision: PrecisionName = IEEE
) -> None:
    """Compute ``alpha * a @ b + beta * out`` in `out`."""
    _sgemm(_matrix("a", a), _matrix("b", b), _plain(out), alpha=alpha, beta=beta, precision=precision)


def _plus_column(value: Any, row: Any, col: Any, bias: Any) -> Any:
    return value + bias[col]


@cache
def _adds_in_kernel(device: int, precision: PrecisionName) -> bool:
    try:
        check_takes_epilogue("auto", canonical(precision), device_properties(device).cc, _plus_column)
    except ValueError:
        return False
    return True


def compute_sum(
    input: Tensor, a: Tensor, b: Tensor, beta: float = 1.0, alpha: float = 1.0, precision: PrecisionName = IEEE
) -> Tensor:
    """Compute ``alpha * a @ b + beta * input``."""
    if beta == 0:
        check_float32("input", input)
        result = compute(a, b, alpha, precision)
        expanded(input, result.shape)
        return result
    if beta == 1 and input.shape == b.shape[-1:] and _adds_in_kernel(max(a.get_device(), 0), precision):
        # With an epilogue, a batch is not computed as one taller matrix unless it is one.
        check_float32("a", a)
        taller = a.dim() > 2 and b.dim() == 2 and a.is_contiguous()
        result = _sgemm(
            _plain(a).flatten(0, -2) if taller else _matrix("a", a),
            _matrix("b", b),
            alpha=alpha,
            precision=precision,
            epilogue=_plus_column,
            epilogue_args=(_plain(input),),
        )
        return result.view(*a.shape[:-1], b.shape[-1]) if taller else result
    check_float32("input", input)
    out = _empty(a, b)
    out.copy_(expanded(input, out.shape))
    return _sgemm(_matrix("a", a), _matrix("b", b), out, alpha=alpha, beta=beta, precision=precision)


def refuse_tangents(*tensors: Tensor) -> None:
    """Raise NotImplementedError if a tensor has a forward-mode tangent, which the operators would drop."""
    if any(_forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "a tensor has a forward-mode tangent; expected none, since forward-mode derivatives are not computed here; "
            "pass tensor.detach(), or use torch.matmul"
        )


def tangents_are_possible() -> bool:
    """Return True inside a level of forward-mode differentiation."""
    return _forward_ad._current_level >= 0  # noqa: SLF001 -- PyTorch's own Python code asks the same


def check_float32(name: str, x: Tensor) -> None:
    """Raise TypeError unless a tensor has the dtype float32."""
    if x.dtype != torch.float32:
        remedy = "dequantize()" if x.is_quantized else "to(torch.float32)"
        raise TypeError(f"{name} has dtype {x.dtype}; expected torch.float32; pass {name}.{remedy}")


def check_tensors(**tensors: Any) -> None:
    """Raise TypeError unless these are tensors of PyTorch."""
    for name, x in tensors.items():
        if isinstance(x, Tensor):
            continue
        if name == "out":
            advice = "pass a tensor, or no out"
        elif hasattr(x, "__dlpack__") and not hasattr(x, "__array_interface__"):
            advice = f"pass torch.from_dlpack({name})"
        elif hasattr(x, "__array_interface__") or isinstance(x, (int, float, list, tuple)):
            advice = f"pass torch.as_tensor({name}, dtype=torch.float32, device={DEVICE!r})"
        else:
            advice = "pass a tensor"
        raise TypeError(f"{name} is of type {type(x).__qualname__}; expected a torch.Tensor; {advice}")


def expanded(input: Tensor, shape: Sequence[int]) -> Tensor:
    """Return what is added to a product, broadcast to its shape; raise ValueError if it cannot be."""
    try:
        return input.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"input has shape {tuple(input.shape)}; expected one that can be broadcast to {tuple(shape)}, the shape of "
            "a @ b; pass a tensor of that shape, or a vector of its last extent"
        ) from None


def _check_device(name: str, x: Tensor, a: Tensor) -> None:
    """Raise ValueError unless a tensor is where A is: PyTorch computes with tensors without data if any is one."""
    if x.device != a.device:
        raise ValueError(
            f"{name} is on device {x.device} and a on {a.device}; expected one device; pass {name}.to(a.device)"
        )


def _empty(a: Tensor, b: Tensor) -> Tensor:
    """Return an uninitialised result; raise TypeError or ValueError for operands that do not fit."""
    for name, x in (("a", a), ("b", b)):
        check_float32(name, x)
        _matrix(name, x)
        _check_device(name, x, a)
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"a has shape {tuple(a.shape)} and b {tuple(b.shape)}; expected (..., M, K) and (..., K, N)")
    return a.new_empty((*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]))


def _fake(a: Tensor, b: Tensor, *_: Any) -> Tensor:
    return _empty(a, b)


def _fake_sum(input: Tensor, a: Tensor, b: Tensor, *_: Any) -> Tensor:
    check_float32("input", input)
    out = _empty(a, b)
    _check_device("input", input, a)
    expanded(input, out.shape)
    return out


def _fake_out(out: Tensor, a: Tensor, b: Tensor, *_: Any) -> None:
    _check_device("out", out, a)
    if out.shape != (expected := _empty(a, b).shape):
        raise ValueError(f"out has shape {tuple(out.shape)}; expected {tuple(expected)}; pass an out of that shape")


def is_dtensor(x: Any) -> bool:
    """Return True for a DTensor, without an import of their package, which takes long."""
    return type(x) is getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def _by_columns(x: Tensor) -> bool:
    return x.stride(-2) < x.stride(-1)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep what the gradients of ``(input,) a, b, (beta,) alpha, precision`` need."""
    *added, a, b = (x for x in inputs if isinstance(x, Tensor))
    *betas, ctx.alpha, ctx.precision = (x for x in inputs if not isinstance(x, Tensor))
    ctx.added = (added[0].shape, betas[0]) if added else None
    ctx.shapes, ctx.by_columns = (a.shape, b.shape), (_by_columns(a), _by_columns(b))
    *_, needs_a, needs_b = ctx.needs_input_grad[: len(added) + 2]
    ctx.save_for_backward(a if needs_b else None, b if needs_a else None)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Return the gradients of the arguments of either operator, computed by ``numba_gemm::matmul``."""
    a, b = ctx.saved_tensors
    if tangents_are_possible():
        refuse_tangents(*(x for x in (grad, a, b) if x is not None))
    (a_shape, b_shape), (a_by_columns, b_by_columns) = ctx.shapes, ctx.by_columns

    def product(x: Tensor, y: Tensor, by_columns: bool) -> Tensor:
        """Return x @ y in the layout of the operand, so that autograd need not copy it."""
        if by_columns:
            return OPERATORS.matmul.default(y.mT, x.mT, ctx.alpha, ctx.precision).mT
        return OPERATORS.matmul.default(x, y, ctx.alpha, ctx.precision)

    of_a = of_b = None
    if b is not None:
        of_a = product(grad, b.mT, a_by_columns).sum_to_size(a_shape)
    if a is not None:
        above = grad
        # One long sum instead of a batch of products and their sum. PyTorch flattens no DTensor that is cut within.
        if len(b_shape) == 2 and not is_dtensor(grad):
            # Not by `flatten`, which batched gradients (`is_grads_batched`) do not support.
            a, above = (x.reshape(prod(x.shape[:-1]), x.shape[-1]) for x in (a, grad))
        of_b = product(a.mT, above, b_by_columns).sum_to_size(b_shape)
    if ctx.added is None:
        return of_a, of_b, None, None
    shape, beta = ctx.added
    of_input = (grad if beta == 1 else grad * beta).sum_to_size(shape) if ctx.needs_input_grad[0] else None
    return of_input, of_a, of_b, None, None, None


_library = torch.library.Library("numba_gemm", "DEF")


def _define(schema: str, computed: Callable[..., Any], fake: Callable[..., Any], differentiable: bool = True) -> None:
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    # On all devices: `tiled_sgemm` refuses operands that it cannot read, and says why.
    _library.impl(name, computed, "CompositeExplicitAutograd")
    torch.library.register_fake(f"numba_gemm::{name}", fake, lib=_library)
    if differentiable:
        torch.library.register_autograd(f"numba_gemm::{name}", _gradients, setup_context=_save, lib=_library)
        _shorten(name, computed)


def _shorten(name: str, computed: Callable[..., Any]) -> None:
    """Compute calls that need no gradient as soon as they reach autograd, if no other layer has to see them.

    PyTorch would dispatch them again, which takes as long as the first time. The names that this needs are PyTorch's
    own; where one is missing, nothing changes.
    """
    try:
        from torch._library.autograd import Info, make_autograd_impl

        below, needs_grad = torch._C._after_ADInplaceOrView_keyset, torch._C._any_requires_grad  # noqa: SLF001
        plain = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, DEVICE.upper())).raw_repr()  # noqa: SLF001
        operator = getattr(torch.ops.numba_gemm, name).default
        differentiated = make_autograd_impl(operator, Info(_gradients, _save))
    except (ImportError, AttributeError, TypeError):
        return
    grad_enabled = torch.is_grad_enabled

    def call(keys: Any, *arguments: Any) -> Any:
        if tangents_are_possible():
            refuse_tangents(*(x for x in arguments if isinstance(x, Tensor)))
        if (keys & below).raw_repr() == plain and not (grad_enabled() and needs_grad(*arguments)):
            return computed(*arguments)
        return differentiated(keys, *arguments)

    _library.impl(name, call, f"Autograd{DEVICE.upper()}", with_keyset=True)


_define('matmul(Tensor a, Tensor b, float alpha=1.0, str precision="ieee") -> Tensor', compute, _fake)
_define(
    'addmm(Tensor input, Tensor a, Tensor b, float beta=1.0, float alpha=1.0, str precision="ieee") -> Tensor',
    compute_sum,
    _fake_sum,
)
_define(
    'matmul_out(Tensor(c!) out, Tensor a, Tensor b, float alpha=1.0, float beta=0.0, str precision="ieee") -> ()',
    compute_into,
    _fake_out,
    differentiable=False,
)
OPERATORS = torch.ops.numba_gemm
