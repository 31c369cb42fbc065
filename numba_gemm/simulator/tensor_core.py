"""Model of the adder of tensor cores, which truncates instead of rounding.

One matrix instruction adds the exact products of a few terms to a float32 sum. The adder aligns the sum and all
products to the largest exponent, truncates what lies more than `EXTRA_BITS` below the 24 bits of a float, adds exactly,
and truncates the result to a float. NVIDIA does not document the adder. The model follows measurements of older tensor
cores (Fasi, Higham, Mikaitis and Pranesh, 2021, doi:10.7717/peerj-cs.330); notebook 9 compares it with an H200.
"""

from __future__ import annotations

from typing import Any

import numpy as np

FLOAT32_BITS = 24  # significant bits
SMALLEST_EXPONENT = -149  # of a subnormal float32
EXTRA_BITS = 2  # kept below those of a float32; agrees with sums recorded on an H200

Array = np.ndarray[Any, np.dtype[np.float64]]


def truncate(x: Any, largest: Any, bits: int) -> Array:
    """Truncate numbers toward zero, `bits` bits below and including the leading bit of `largest`."""
    unit = np.ldexp(1.0, np.maximum(np.frexp(largest)[1] - bits, np.finfo(np.float64).minexp))
    return np.trunc(np.asarray(x, np.float64) / unit) * unit


def add_products(acc: Any, products: Any, extra: int = EXTRA_BITS) -> Array:
    """Return the sums of one matrix instruction: products of shape (..., terms) added to `acc` of shape (...).

    The products are exact, in float64; so is the result, each a float32. With a NaN or an infinity among the terms, the
    result is that of IEEE 754.
    """
    terms = np.concatenate([np.asarray(acc, np.float64)[..., None], np.asarray(products, np.float64)], axis=-1)
    with np.errstate(invalid="ignore", over="ignore"):
        plain = terms.sum(axis=-1)
        finite = np.isfinite(terms).all(axis=-1)
        terms = np.where(finite[..., None], terms, 0.0)
        total = truncate(terms, np.abs(terms).max(axis=-1, keepdims=True), FLOAT32_BITS + extra).sum(axis=-1)
        exponent = np.maximum(np.frexp(total)[1], SMALLEST_EXPONENT + FLOAT32_BITS)  # fewer bits of subnormal sums
        total = truncate(total, np.ldexp(0.5, exponent), FLOAT32_BITS)
        return np.where(finite, total, plain).astype(np.float32).astype(np.float64)
