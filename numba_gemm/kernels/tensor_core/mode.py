"""How a float32 product becomes products of narrower numbers that tensor cores multiply.

An operand is split into parts: the first is the element rounded to the narrow kind, each further one the rest, rounded.
A mode says which parts of A meet which of B; products of the smallest come first. All products are exact, and summed
in float32 by the tensor cores, which cut off where they should round. What runs therefore keeps the sum of the leading
products there for one slot of k only, if there are several parts, and adds it to the sum of all slots with rounding
(Ootomo and Yokota, 2022, doi:10.1177/10943420221090256); see `sums`.

Elements of F16 would leave its range: a mode of that kind scales each row of A, and each column of B, by a power of
two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

KINDS = ("tf32", "bf16", "f16")


@dataclass(frozen=True)
class Mode:
    """A precision.

    Attributes
    ----------
    name : str
        What the field calls it.
    kind : str
        Of the narrow numbers: `tf32`, `bf16` or `f16`.
    parts : int
        Of an element.
    products : tuple of (int, int)
        Part of A, part of B; in this order. The last are the leading ones, of first parts.
    short : bool
        Whether first parts have a bit less than they might: a slot's sum of their products then has fewer bits to be
        cut off, and the bit goes to the second parts. It takes a mode whose parts have bits to spare.
    compensated : bool
        Whether what is rounded off the sum of all slots is added to the sum of the rests.
    stepwise : bool
        Whether each instruction's leading products are summed afresh, not each slot's: a quarter of the terms, of which
        the largest cuts off bits of the others. It takes a compensated mode.
    """

    name: str
    kind: str
    parts: int
    products: tuple[tuple[int, int], ...]
    short: bool = False
    compensated: bool = False
    stepwise: bool = False

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

    @property
    def per_word(self) -> int:
        """Narrow numbers in 32 bits."""
        return 1 if self.kind == "tf32" else 2

    @property
    def scaled(self) -> bool:
        """Whether rows of A and columns of B have a scale each."""
        return self.kind == "f16"

    @property
    def slot_k(self) -> int:
        """Terms of a sum that 128 bytes of a row hold."""
        return 32 * self.per_word


def _smallest_first(parts: int, most: int) -> tuple[tuple[int, int], ...]:
    """All pairs of parts whose indices sum to at most `most`, the largest sums first."""
    pairs = [(i, j) for i in range(parts) for j in range(parts) if i + j <= most]
    return tuple(sorted(pairs, key=lambda pair: (-sum(pair), pair)))


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("tf32", "tf32", 1, _smallest_first(1, 0)),
        Mode("tf32x3", "tf32", 2, _smallest_first(2, 1)),
        Mode("bf16", "bf16", 1, _smallest_first(1, 0)),
        Mode("bf16x6", "bf16", 3, _smallest_first(3, 2), short=True, compensated=True),
        Mode("bf16x9", "bf16", 3, _smallest_first(3, 4), short=True, compensated=True),
        Mode("fp16x3", "f16", 2, _smallest_first(2, 1)),
    )
}

SHORT_SUMS = {"bf16x6": replace(MODES["bf16x6"], name="bf16x6_stepwise", stepwise=True)}
"""What makes a mode's products where K is small: one term may make such a sum, so errors do not average out."""
