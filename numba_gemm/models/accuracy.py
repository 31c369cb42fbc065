"""How far a float32 matrix product may be from the exact one, and the one comparison that decides it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

UNIT_ROUNDOFF = 2.0**-24  # of float32, rounding to nearest

# Standard deviations that the probabilistic bound allows. At 8 a sum of a million roundings with random signs
# breaks the bound with probability below 1e-7, and one product that is missing from a sum of K similar terms
# (an error of about 1/K) still breaks it for every K up to 16,000 or so.
CONFIDENCE = 8.0


def ieee_bound(k: int) -> float:
    """Largest error that ``ieee`` arithmetic may leave in an element of C, in units of its scale.

    The scale of an element is ``abs(alpha) * (abs(A) @ abs(B)) + abs(beta) * abs(C)``. A sum of n = k + 2 roundings (k
    multiply-adds, the multiplication by alpha, the addition of beta*C) errs by at most gamma_n = n*u / (1 - n*u)
    (Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., section 3.1), and, if the roundings
    behave as independent and of mean zero, by at most gamma~_n = exp(lambda*sqrt(n)*u + n*u^2/(1-u)) - 1 with a
    probability that grows with lambda (Higham and Mary, "A new approach to probabilistic rounding error analysis",
    SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4). The smaller of the two is used: gamma_n alone would, at large
    k, pass a product in which a term is missing.

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


# Largest errors of the tensor cores' precisions, in the same units, as docs/precision.md states them: of sums whose
# rounding does not count (`mode_bound` adds what grows with k). fp16x3's is of the largest element of a row and of a
# column instead of each, and holds in these units for elements of similar size.
MODE_BOUNDS = {
    "tf32": 2.0**-9,
    "bf16": 2.0**-6.5,
    "tf32x3": 2.0**-20,
    "bf16x6": 2.0**-21,
    "bf16x9": 2.0**-21,
    "fp16x3": 2.0**-20,
}
GROWING = ("tf32x3", "fp16x3")
GROWING_FROM = 4096
# Of sums that stay in the tensor cores, what each term adds: they cut off after each product of 8 k, or 16.
CUT_OFF = {"tf32": 2.0**-26, "bf16": 2.0**-27}


def mode_bound(precision: str, k: int) -> float:
    """Largest error that the tensor cores may leave in an element of ``A @ B`` in a precision, in units of its scale.

    Raises
    ------
    KeyError
        for a precision that is none of theirs.
    """
    growth = max(1.0, math.sqrt(k / GROWING_FROM)) if precision in GROWING else 1.0
    return MODE_BOUNDS[precision] * growth + CUT_OFF.get(precision, 0.0) * k


def bound(precision: str, k: int) -> float:
    """Largest error that arithmetic of any precision may leave in an element of C, in units of its scale."""
    if precision == "ieee":
        return ieee_bound(k)
    return mode_bound(precision, k) + 2 * UNIT_ROUNDOFF  # alpha and beta round, too


SMALLEST_SUBNORMAL = 2.0**-149  # of float32; kernels keep subnormals, and do not flush them to zero


def underflow_bound(k: int, alpha: float = 1.0) -> float:
    """Largest absolute error that gradual underflow may add to an element of C.

    With rounding to nearest and gradual underflow, ``fl(x*y + z) == (x*y + z) * (1 + d) + e`` with
    ``abs(e) <= 2**-150``, half the smallest subnormal. An addition alone has ``e == 0``. The terms ``d`` are those of
    `ieee_bound`. The terms ``e`` are:

    - at most ``k * 2**-150`` in the sum of k products, which alpha multiplies;
    - ``2**-150`` for each multiplication by alpha: one, or one per part where the sum is computed in p <= k parts;
    - ``2**-150`` for the multiplication of beta and C.

    Their sum, ``(k * abs(alpha) + p + 1) * 2**-150``, is below ``(k * max(1, abs(alpha)) + 2) * 2**-149``. What is left
    over covers the growth of each ``e`` by the roundings that follow it, a factor ``1 + ieee_bound(k)``.

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
    """The product in float64, and the scale that the error of each element is measured in.

    Parameters
    ----------
    alpha, beta : float
        Scalars; ``beta == 0`` ignores c, and ``alpha == 0`` ignores a and b, NaNs and all, as the kernels do.
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
    """The worst element of a product: where it is, what it holds, and its error in units of the bound."""

    in_bounds: float
    row: int
    col: int
    got: float
    expected: float

    @property
    def ok(self) -> bool:
        """Whether every element is within the bound."""
        return self.in_bounds <= 1.0

    def __str__(self) -> str:
        verdict = "right" if self.ok else "WRONG"
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

    Where the expected value is finite, an element's error counts in units of
    ``bound(precision, k) * scale + underflow_bound(k, alpha)``. Where it is NaN or infinite, the element must be NaN or
    the same infinity, else its error is infinite. A NaN in place of a finite value is an infinite error. A finite
    expected value beyond float32's range must be an infinity of its sign. ``alpha`` is the one given to `reference`.

    Raises
    ------
    ValueError
        if the shapes differ.
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
