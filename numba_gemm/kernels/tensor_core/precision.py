"""Precisions of tensor cores: how a float32 product becomes products of narrower numbers.

An operand is decomposed into parts: the first is the element rounded to the narrow kind, and each further one is the
rounded remainder. A precision says which parts of A are multiplied by which parts of B; the smallest products come
first. All products are exact. The tensor cores sum them in float32 and truncate instead of rounding. If there are
several parts, kernels therefore let tensor cores sum the leading products of only one slot of k, or all of them, and
add that to the sum of all slots with rounding (Ootomo and Yokota, 2022, doi:10.1177/10943420221090256); see
`accumulate`.

Elements may exceed the range of F16, so a precision of that kind scales each row of A, and each column of B, by a power
of two. Its second parts, which are smaller by a factor of 2^11 or more, are multiplied by another power of two, to keep
as much of small elements as the range of F16 allows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

KINDS = ("tf32", "bf16", "f16")


@dataclass(frozen=True)
class TensorPrecision:
    """Decomposition of operands, and products of their parts, that make up a precision.

    Attributes
    ----------
    name : str
        Name of the precision, as in ``tiled_sgemm(..., precision=name)``.
    kind : str
        Format of the narrow numbers: `tf32`, `bf16` or `f16`.
    parts : int
        Parts per element.
    products : tuple of (int, int)
        Part of A and part of B of each product, in order. The leading product, of the first parts, comes last.
    short : bool
        True if first parts have one bit less than they could: fewer bits of a slot's sum of their products are then
        truncated, and the bit goes to the second parts. Only for precisions whose parts have bits to spare.
    compensated : bool
        True if what additions to the sum of all slots round off is added, too.
    stepwise : bool
        True if leading products are summed afresh per instruction instead of per slot, and apart from the others: a
        quarter of the terms, of which the largest truncates the others. Only for compensated precisions.
    """

    name: str
    kind: str
    parts: int
    products: tuple[tuple[int, int], ...]
    short: bool = False
    compensated: bool = False
    stepwise: bool = False

    def __hash__(self) -> int:  # of few fields, see `TileConfig`
        return hash((self.name, self.parts))

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self.name}: kind is {self.kind!r}; expected one of {', '.join(KINDS)}")
        known = {part for pair in self.products for part in pair} <= set(range(self.parts))
        if not self.products or not known or len(set(self.products)) != len(self.products):
            raise ValueError(f"{self.name}: products {self.products} are not different ones of {self.parts} parts")
        if self.stepwise and not self.compensated:
            raise ValueError(f"{self.name}: stepwise sums are compensated ones")
        if self.products[-1] != (0, 0):
            raise ValueError(f"{self.name}: products {self.products} do not end with that of the first parts")
        if self.scaled and (self.compensated or any(sum(pair) != 1 for pair in self.products[:-1])):
            raise ValueError(f"{self.name}: minor products of F16 have one second part each, and are not compensated")

    @cached_property
    def decomposition(self) -> tuple[str, int, bool]:
        """Kind and number of parts, and `short`: precisions for which these are equal have the same parts."""
        return self.kind, self.parts, self.short

    @cached_property
    def per_word(self) -> int:
        """Narrow numbers in 32 bits."""
        return 1 if self.kind == "tf32" else 2

    @cached_property
    def scaled(self) -> bool:
        """True if each row of A and each column of B has a scale."""
        return self.kind == "f16"

    @cached_property
    def second_factor(self) -> float:
        """Factor of second parts, by which the sum of the minor products must be divided: 2^12 for F16, else 1."""
        return 2.0**12 if self.scaled else 1.0

    @cached_property
    def slot_k(self) -> int:
        """Terms of a sum per slot: as many as 128 bytes of a row hold."""
        return 32 * self.per_word

    @cached_property
    def slot_bits(self) -> int:
        """Binary logarithm of `slot_k`."""
        return self.slot_k.bit_length() - 1


def _smallest_first(parts: int, most: int) -> tuple[tuple[int, int], ...]:
    """All pairs of parts whose indices sum to at most `most`, the largest sums first."""
    pairs = [(i, j) for i in range(parts) for j in range(parts) if i + j <= most]
    return tuple(sorted(pairs, key=lambda pair: (-sum(pair), pair)))


TENSOR_PRECISIONS: dict[Any, TensorPrecision] = {  # by name, a `typing.PrecisionName`
    precision.name: precision
    for precision in (
        TensorPrecision("tf32", "tf32", 1, _smallest_first(1, 0)),
        TensorPrecision("tf32x3", "tf32", 2, _smallest_first(2, 1)),
        TensorPrecision("bf16", "bf16", 1, _smallest_first(1, 0)),
        TensorPrecision("bf16x3", "bf16", 2, _smallest_first(2, 1)),
        TensorPrecision("bf16x6", "bf16", 3, _smallest_first(3, 2), short=True, compensated=True),
        TensorPrecision("bf16x9", "bf16", 3, _smallest_first(3, 4), short=True, compensated=True),
        TensorPrecision("fp16x3", "f16", 2, _smallest_first(2, 1)),
    )
}

SHORT_SUMS = {
    name: replace(precision, name=f"{name}_stepwise", stepwise=True)
    for name, precision in TENSOR_PRECISIONS.items()
    if precision.compensated
}
"""Records that replace those of the same precision where K is small: one term may make such a sum, so errors do not
average out."""
