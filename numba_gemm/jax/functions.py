"""The function `matmul`, and the primitive by which JAX traces, batches and differentiates it.

The primitive multiplies batches of one number of dimensions. Its parameter `layout` is "NN", "NT", "TN" or "TT": "T"
stands for an operand whose transposes are multiplied. With it, gradients read the operands of the product in place.
"""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..gemm import batches
from ..gemm.precision import IEEE, canonical
from ..typing import PrecisionName
from .product import TARGET

__all__ = ["matmul"]

TRANSPOSED = {"N": "T", "T": "N"}


def matmul(
    a: jax.Array,
    b: jax.Array,
    *,
    precision: PrecisionName | jax.lax.DotAlgorithmPreset | jax.lax.Precision | None = None,
) -> jax.Array:
    """Multiply matrices, vectors, or batches of matrices, as `jax.numpy.matmul` does, in a given precision.

    It works under `jax.jit`, `jax.vmap` and `jax.grad`, and under `jax.jvp` and whatever else is composed of these. A
    dimension that is mapped by `jax.vmap` becomes one of the batch. Derivatives are computed in the same precision.

    Parameters
    ----------
    a, b : array of shape (..., M, K), array of shape (..., K, N); float32, on a CUDA device
        Operands. Batch dimensions are broadcast. A vector as `a` is one row, and as `b` one column; the result then has
        no such dimension. NumPy arrays are taken, too.
    precision : str, jax.lax.DotAlgorithmPreset or jax.lax.Precision.HIGHEST, optional
        Arithmetic of the product, "ieee" by default: a precision of `tiled_sgemm`, or JAX's name of one:
        "F32_F32_F32" ("ieee"), "TF32_TF32_F32" ("tf32"), "TF32_TF32_F32_X3" ("tf32x3"), "BF16_BF16_F32" ("bf16"),
        "BF16_BF16_F32_X3" ("bf16x3"), "BF16_BF16_F32_X6" ("bf16x6"), "BF16_BF16_F32_X9" ("bf16x9"), "highest" and
        "float32" ("ieee").

    Returns
    -------
    jax.Array of shape (..., M, N)
        A new array.

    Raises
    ------
    TypeError
        For an operand that is not an array of float32; nothing is cast.
    ValueError
        For shapes that do not fit, and for an unknown precision.
    ValueError, jax.errors.JaxRuntimeError
        When the product is computed: for arrays on another device, and for a precision that the GPU cannot run.
    NotImplementedError
        Inside `jax.shard_map` with ``check_vma=True``, and for arrays that are divided over explicit axes of a mesh.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from numba_gemm.jax import matmul
    >>> x, w = jnp.ones((64, 256)), jnp.ones((256, 32))
    >>> matmul(x, w, precision="bf16x6")  # doctest: +SKIP
    >>> gradient = jax.jit(jax.grad(lambda w: matmul(x, w, precision=jax.lax.Precision.HIGHEST).sum()))
    """
    name = _precision(precision)
    for operand, x in (("a", a), ("b", b)):
        if not isinstance(x, jax.Array | np.ndarray):
            raise TypeError(
                f"{operand} is a {type(x).__qualname__}; expected an array of JAX; pass "
                f"jax.numpy.asarray({operand}, dtype='float32')"
            )
        if x.dtype != np.float32:
            raise TypeError(
                f"{operand} has dtype {x.dtype}; expected float32, and nothing is cast silently; pass "
                f"{operand}.astype('float32')"
            )
        if x.ndim == 0:
            raise ValueError(f"{operand} has no dimensions; expected 1 or more; multiply by * instead")
    fits = a.shape[-1] == b.shape[-2 if b.ndim > 1 else 0]
    if not fits or batches.broadcast(a.shape[:-2], b.shape[:-2]) is None:
        raise ValueError(
            f"a has shape {a.shape} and b has shape {b.shape}; expected (..., M, K) and (..., K, N) with batch "
            "dimensions that can be broadcast; pass arrays whose shapes fit"
        )
    return _matmul(a, b, precision=name)


def _precision(precision: Any) -> str:
    """Return the precision of this package that JAX's object, or either's name, stands for."""
    if precision is None:
        return IEEE
    if isinstance(precision, jax.lax.DotAlgorithmPreset | jax.lax.Precision):
        precision = precision.name
    return canonical(precision)


def _multiply(a: jax.Array, b: jax.Array, *, precision: str) -> jax.Array:
    x = a[None] if a.ndim == 1 else a
    y = b[:, None] if b.ndim == 1 else b
    dims = max(x.ndim, y.ndim)
    x, y = (z.reshape((1,) * (dims - z.ndim) + z.shape) for z in (x, y))
    result = _bind(x, y, layout="NN", precision=precision)
    if a.ndim == 1:
        result = result.squeeze(-2)
    return result.squeeze(-1) if b.ndim == 1 else result


_matmul = jax.jit(_multiply, static_argnames="precision", inline=True)


# ------------------------------------------------------------------------------------------------------- primitive

product = Primitive("numba_gemm_matmul")


def _bind(a: Any, b: Any, *, layout: str, precision: str) -> Any:
    return product.bind(a, b, layout=layout, precision=precision)


def _result(a: Any, b: Any, *, layout: str, precision: str) -> Any:
    """Return the description of the result."""
    if any(_varies(x) for x in (a, b)):
        raise NotImplementedError(
            "called inside jax.shard_map with check_vma=True; expected check_vma=False, since the product does not "
            "follow which axes of the mesh its operands vary over; pass check_vma=False"
        )
    if any(_is_divided(x) for x in (a, b)):
        raise NotImplementedError(
            f"a has sharding {a.sharding.spec} and b has sharding {b.sharding.spec} on explicit axes of a mesh; "
            "expected no axis that divides them, since the product does not divide its result; call it inside "
            "jax.shard_map with check_vma=False, or pass jax.sharding.reshard(x, jax.sharding.PartitionSpec()) of each"
        )
    m, n = a.shape[-2 if layout[0] == "N" else -1], b.shape[-1 if layout[1] == "N" else -2]
    return jax.core.ShapedArray((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), m, n), a.dtype)


def _varies(x: Any) -> bool:
    """Return True if `jax.shard_map` follows over which axes of its mesh an operand varies."""
    # Up to JAX 0.9, and from 0.10 on. Derivatives would lack a sum over these axes.
    return bool(getattr(x, "vma", ())) or not getattr(getattr(x, "manual_axis_type", None), "empty", True)


def _is_divided(x: Any) -> bool:
    """Return True if explicit axes of a mesh divide an operand; the type of the result would have to name them, too."""
    return any(axis not in (None, jax.sharding.PartitionSpec.UNCONSTRAINED) for axis in x.sharding.spec)


def _batched(operands: Any, axes: Any, *, layout: str, precision: str) -> tuple[Any, int]:
    """Multiply with a mapped axis as the first dimension of the batch."""
    a, b = (x[None] if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes))
    return _bind(a, b, layout=layout, precision=precision), 0


def _of_a(grad: Any, a: Any, b: Any, *, layout: str, precision: str) -> Any:
    """Return the gradient of `a`, whose layout is that of `a`."""
    left, right = layout[0], layout[1]
    if left == "N":
        found = _bind(grad, b, layout="N" + TRANSPOSED[right], precision=precision)
    else:
        found = _bind(b, grad, layout=right + "T", precision=precision)
    return _summed(found, a.aval.shape)


def _of_b(grad: Any, a: Any, b: Any, *, layout: str, precision: str) -> Any:
    """Return the gradient of `b`, whose layout is that of `b`."""
    left, right, shape = layout[0], layout[1], b.aval.shape
    if left == "N" and all(extent == 1 for extent in shape[:-2]):
        # One long sum instead of a batch of products and their sum.
        a, grad = (x.reshape((*shape[:-2], prod(x.shape[:-1]), x.shape[-1])) for x in (a, grad))
    if right == "N":
        found = _bind(a, grad, layout=TRANSPOSED[left] + "N", precision=precision)
    else:
        found = _bind(grad, a, layout="T" + left, precision=precision)
    return _summed(found, shape)


def _summed(x: Any, shape: tuple[int, ...]) -> Any:
    """Return the sum over the dimensions that were broadcast."""
    axes = tuple(i for i, (own, extent) in enumerate(zip(x.shape, shape)) if own != extent)
    return x.sum(axes, keepdims=True) if axes else x


_compiled = jax.jit(_bind, static_argnames=("layout", "precision"))


def _computed(a: jax.Array, b: jax.Array, *, layout: str, precision: str) -> jax.Array:
    """Multiply arrays, as a compiled program also where JAX is told to run uncompiled code."""
    # Under these options, `jax.jit` may run the function itself, which would call the primitive and so this again.
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        return _compiled(a, b, layout=layout, precision=precision)


product.def_abstract_eval(_result)
product.def_impl(_computed)
ad.defbilinear(product, _of_a, _of_b)
batching.primitive_batchers.__setitem__(product, _batched)  # by name, for autodoc's stand-in of JAX
mlir.register_lowering(product, jax.ffi.ffi_lowering(TARGET))  # parameters are passed on as attributes
