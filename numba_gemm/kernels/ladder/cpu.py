"""cpu_sgemm: the triple loop on one core of the CPU, the baseline of the climb."""

from __future__ import annotations

import numpy as np
from numba import njit

from ...typing import Scalar
from ..scalars import real


@njit(nogil=True)
def _triple_loop(alpha, a, b, beta, c):
    m, n = c.shape
    k = a.shape[1]
    for row in range(m):
        for col in range(n):
            acc = np.float32(0)
            for p in range(k):
                acc += a[row, p] * b[p, col]
            acc *= alpha
            if beta != 0:  # beta == 0 must not read C
                acc += beta * c[row, col]
            c[row, col] = acc


def cpu_sgemm(
    a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None, *, alpha: Scalar = 1.0, beta: Scalar = 0.0
) -> np.ndarray:
    """Compute ``alpha * a @ b + beta * out`` by three nested loops on one core, with float32 sums.

    Parameters
    ----------
    a, b : float32 NumPy arrays of shapes (m, k) and (k, n)
        Any strides.
    out : float32 NumPy array of shape (m, n), optional
        Array for the result; by default, a new one. Not read if beta is 0. It must not overlap a or b.
    alpha, beta : float
        Scalars, rounded to float32. As on the GPU, ``alpha == 0`` reads neither a nor b.

    Returns
    -------
    float32 NumPy array of shape (m, n)
        ``out`` if it was given.

    Raises
    ------
    TypeError
        For anything but 2-D float32 NumPy arrays, and real numbers as `alpha` and `beta`.
    ValueError
        If the shapes do not match, if out overlaps a or b or is read-only, or if beta is not 0 and out is not given.
    """
    for name, array in {"a": a, "b": b, **({} if out is None else {"out": out})}.items():
        if not isinstance(array, np.ndarray) or array.ndim != 2 or array.dtype != np.float32:
            kind = f"type {type(array).__qualname__}"
            if isinstance(array, np.ndarray):
                kind = f"shape {array.shape} and dtype {array.dtype}"
            raise TypeError(f"{name} is of {kind}; expected a NumPy array, 2-D and float32; pass such an array")
    alpha, beta = real("alpha", alpha), real("beta", beta)
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"a is {a.shape} and b is {b.shape}; a's columns must be as many as b's rows")
    shape = (a.shape[0], b.shape[1])
    if out is None:
        if beta != 0:
            raise ValueError(f"beta is {beta} but there is no out to add; pass out, or beta=0")
        out = np.empty(shape, np.float32)
    elif out.shape != shape:
        raise ValueError(f"out is {out.shape}; the product of {a.shape} and {b.shape} is {shape}")
    elif not out.flags.writeable:
        raise ValueError("out is read-only; pass an array that can be written")
    elif np.shares_memory(out, a) or np.shares_memory(out, b):
        raise ValueError("out overlaps a or b; pass an array of its own")
    if alpha == 0 or a.shape[1] == 0:
        alpha, a, b = 0.0, a[:, :0], b[:0]
    _triple_loop(np.float32(alpha), a, b, np.float32(beta), out)
    return out
