"""Error bounds of float32 matrix multiplication, and the one comparison that applies them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

UNIT_ROUNDOFF = 2.0**-24  # of float32, rounding to nearest

# Standard deviations that the probabilistic bound allows. At 8, a sum of a million roundings with random signs
# exceeds the bound with probability below 1e-7, and a product missing from a sum of K similar terms (an error of
# about 1/K) still exceeds it for every K up to 16,000 or so.
CONFIDENCE = 8.0


def ieee_bound(k: int) -> float:
    """Largest error that ``ieee`` arithmetic may leave in an element of C, in units of its scale.

    The scale of an element is ``abs(alpha) * (abs(A) @ abs(B)) + abs(beta) * abs(C)``. A sum of n = k + 2 roundings (k
    multiply-adds, the multiplication by alpha, the addition of beta*C) has an error of at most
    gamma_n = n*u / (1 - n*u) (Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., section 3.1). If the
    roundings behave as independent and of mean zero, the error is at most
    gamma~_n = exp(lambda*sqrt(n)*u + n*u^2/(1-u)) - 1 with a probability that grows with lambda (Higham and Mary,
    "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4). The
    smaller of the two is used: at large k, gamma_n alone would accept a product with a missing term.

    Parameters
    ----------
    k : int
        Terms in each sum.

    Returns
    -------
    float
        The bound, dimensionless.
    """
    n = k + 2
    share = n * UNIT_ROUNDOFF
    certain = share / (1.0 - share) if share < 1.0 else math.inf
    likely = math.expm1(CONFIDENCE * math.sqrt(n) * UNIT_ROUNDOFF + n * UNIT_ROUNDOFF**2 / (1.0 - UNIT_ROUNDOFF))
    return min(certain, likely)


# Largest errors of the tensor-core precisions, in the same units, as docs/precision.md states them. They leave out the
# rounding of sums; `tensor_bound` adds the part that grows with k. That of fp16x3 holds if all elements but zeros are
# at least 2^-28 of the largest in their row or column; otherwise it is relative to the largest of each. That of bf16x3
# is what the parts leave out: BF16 has 8 bits, so the second part of an element is at most 2^-8 of it, and the rest
# that neither part holds at most 2^-17. A product loses that of both second parts, 2^-16, and twice the rest.
TENSOR_BOUNDS = {
    "tf32": 2.0**-9,
    "bf16": 2.0**-6.5,
    "tf32x3": 2.0**-20,
    "bf16x3": 2.0**-15,
    "bf16x6": 2.0**-21,
    "bf16x9": 2.0**-21,
    "fp16x3": 2.0**-20,
}
GROWING = ("tf32x3", "fp16x3")
GROWING_FROM = 4096
SUM_ERRORS = {"bf16x3": 2.0**-21}  # of the sums alone, which are those of `GROWING`
# Error that each term adds to sums that stay in the tensor cores, which truncate after each product of 8 or 16 k.
CUT_OFF = {"tf32": 2.0**-26, "bf16": 2.0**-27}


def tensor_bound(precision: str, k: int) -> float:
    """Largest error of a tensor-core precision in an element of ``A @ B``, in units of its scale.

    It is not proven for all operands: tensor cores lose more if one term is large and many others are just below
    2**-25 of it.

    Raises
    ------
    KeyError
        If `precision` is not a tensor-core precision.
    """
    growth = max(1.0, math.sqrt(k / GROWING_FROM))
    parts = TENSOR_BOUNDS[precision] * (growth if precision in GROWING else 1.0)
    return parts + SUM_ERRORS.get(precision, 0.0) * growth + CUT_OFF.get(precision, 0.0) * k


def bound(precision: str, k: int) -> float:
    """Largest error that arithmetic of any precision may leave in an element of C, in units of its scale."""
    if precision == "ieee":
        return ieee_bound(k)
    return tensor_bound(precision, k) + 2 * UNIT_ROUNDOFF  # alpha and beta also round


SMALLEST_SUBNORMAL = 2.0**-149  # of float32; kernels keep subnormals, and do not flush them to zero


def underflow_bound(k: int, alpha: float = 1.0) -> float:
    """Largest absolute error that gradual underflow may add to an element of C.

    With rounding to nearest and gradual underflow, ``fl(x*y + z) == (x*y + z) * (1 + d) + e`` with
    ``abs(e) <= 2**-150``, half the smallest subnormal. An addition alone has ``e == 0``. The terms ``d`` are those of
    `ieee_bound`. The terms ``e`` are:

    - at most ``k * 2**-150`` in the sum of k products, which is then multiplied by alpha;
    - ``2**-150`` for each multiplication by alpha: one, or one per part where the sum is computed in p <= k parts;
    - ``2**-150`` for the multiplication of beta and C.

    Their sum, ``(k * abs(alpha) + p + 1) * 2**-150``, is below ``(k * max(1, abs(alpha)) + 2) * 2**-149``. The
    difference covers the growth of each ``e`` by the roundings that follow it, a factor ``1 + ieee_bound(k)``.

    Parameters
    ----------
    k : int
        Terms in each sum.
    alpha : float
        Factor of the sum.
    """
    # No sum of zero terms is scaled: without the condition, k == 0 and an infinite alpha would give NaN.
    return ((k * max(1.0, abs(float(np.float32(alpha)))) if k else 0.0) + 2) * SMALLEST_SUBNORMAL


def reference(
    alpha: float, a: np.ndarray, b: np.ndarray, beta: float = 0.0, c: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the product in float64 and the scale for the error of each element.

    Parameters
    ----------
    alpha, beta : float
        Scalars; ``beta == 0`` ignores c, and ``alpha == 0`` ignores a and b, including NaNs, as the kernels do.
    a, b, c : arrays of shape (m, k), (k, n), (m, n)
        Operands of any real dtype.

    Returns
    -------
    expected, scale : float64 arrays of shape (m, n)
        ``alpha*a@b + beta*c`` and ``abs(alpha)*(abs(a)@abs(b)) + abs(beta)*abs(c)``.
    """
    m, n = a.shape[0], b.shape[1]
    expected = np.zeros((m, n))
    scale = np.zeros((m, n))
    with np.errstate(invalid="ignore", over="ignore"):
        if alpha != 0 and a.shape[1]:
            wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
            expected += float(np.float32(alpha)) * (wide_a @ wide_b)
            scale += abs(float(np.float32(alpha))) * (np.abs(wide_a) @ np.abs(wide_b))
        if beta != 0:
            assert c is not None, "beta != 0 needs c"
            expected += float(np.float32(beta)) * c.astype(np.float64)
            scale += abs(float(np.float32(beta))) * np.abs(c.astype(np.float64))
    return expected, scale


@dataclass(frozen=True)
class Comparison:
    """The worst element of a product: its position, its values, and its error in units of the bound."""

    in_bounds: float
    row: int
    col: int
    got: float
    expected: float

    @property
    def ok(self) -> bool:
        """True if every element is within the bound."""
        return self.in_bounds <= 1.0

    def __str__(self) -> str:
        verdict = "correct" if self.ok else "WRONG"
        return (
            f"{verdict}: worst element [{self.row}, {self.col}] is {self.got:.9g}, expected {self.expected:.9g}, "
            f"{self.in_bounds:.3g} of the bound"
        )


def compare(
    actual: np.ndarray,
    expected: np.ndarray,
    scale: np.ndarray,
    k: int,
    precision: str = "ieee",
    alpha: float = 1.0,
) -> Comparison:
    """Compare a float32 product with `reference`'s float64 one, element by element.

    If the expected value is finite, the error of an element is measured in units of
    ``bound(precision, k) * scale + underflow_bound(k, alpha)``. If it is NaN or infinite, the element must be NaN or
    the same infinity; otherwise its error is infinite. A NaN in place of a finite value is an infinite error. If a
    finite expected value is beyond float32's range, the element must be the infinity of the same sign. ``alpha`` is the
    one given to `reference`.

    Raises
    ------
    ValueError
        If the shapes differ.
    """
    if actual.shape != expected.shape or scale.shape != expected.shape:
        raise ValueError(f"shapes differ: actual {actual.shape}, expected {expected.shape}, scale {scale.shape}")
    if actual.size == 0:
        return Comparison(0.0, -1, -1, math.nan, math.nan)
    got = actual.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        allowed = bound(precision, k) * scale + underflow_bound(k, alpha)
        error = np.abs(got - expected) / allowed
        narrowed = expected.astype(np.float32).astype(np.float64)
    special = ~np.isfinite(narrowed)
    same = (got == narrowed) | (np.isnan(got) & np.isnan(narrowed))
    error = np.where(special, np.where(same, 0.0, np.inf), error)
    error = np.where(np.isnan(error), np.inf, error)
    row, col = (int(i) for i in np.unravel_index(int(np.argmax(error)), error.shape))
    return Comparison(float(error[row, col]), row, col, float(got[row, col]), float(expected[row, col]))
