"""Products as a choice of Inductor, the compiler of ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from ..gemm.precision import IEEE, canonical
from ..typing import PrecisionName
from .operators import compute_into

__all__ = ["external_matmul"]


def external_matmul(precision: PrecisionName = IEEE) -> Callable[..., Tensor]:
    """Return a function for Inductor's option `external_matmul`, a candidate beside its own kernels.

    With ``max_autotune``, Inductor measures it for each product of two matrices and takes it where it is the fastest.
    The option exists from PyTorch 2.5 on. Inductor keeps no compiled code on disk that may refer to such functions, and
    logs that it cannot pickle its cache's key.

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
