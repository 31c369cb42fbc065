"""Registers of a small thread tile, and the multiply-adds of its outer product that wait for a register bank.

A thread multiplies a column of A by a row of B and adds the products to its sums in C, with one FFMA per sum:
``FFMA c, a, b, c`` reads three registers, whose banks decide if it waits (`numba_gemm.inspect.ffma`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .ffma import Reads, ffma_reads
from .sass import Instruction

MAXWELL_BANKS = 4


@dataclass(frozen=True)
class RegisterTile:
    """Register numbers of a thread tile.

    Attributes
    ----------
    a, b : sequence of int
        Registers of the column of A and of the row of B.
    c : sequence of sequence of int
        Registers of the sums, one row per register of `a`.

    Raises
    ------
    ValueError
        if there are not as many sums as products, or if a register is used twice.
    """

    a: Sequence[int]
    b: Sequence[int]
    c: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        if [len(row) for row in self.c] != [len(self.b)] * len(self.a):
            raise ValueError(f"c has rows of {[len(row) for row in self.c]}: expected {len(self.a)} of {len(self.b)}")
        used = [*self.a, *self.b, *(number for row in self.c for number in row)]
        if twice := sorted({number for number in used if used.count(number) > 1}):
            raise ValueError(f"expected each register once; used more than once: {', '.join(f'R{n}' for n in twice)}")

    def ffma(self, snake: bool = False, reuse: bool = False) -> list[Instruction]:
        """Return the FFMAs of one outer product.

        Parameters
        ----------
        snake : bool
            Go through every other row from right to left.
        reuse : bool
            Mark the registers of A and B for reuse that the next FFMA reads again.
        """
        columns = range(len(self.b))
        places = [
            (row, col) for row in range(len(self.a)) for col in (reversed(columns) if snake and row % 2 else columns)
        ]
        made = []
        for number, (row, col) in enumerate(places):
            next_row, next_col = places[number + 1] if number + 1 < len(places) else (-1, -1)
            a = f"R{self.a[row]}{'.reuse' * (reuse and row == next_row)}"
            b = f"R{self.b[col]}{'.reuse' * (reuse and col == next_col)}"
            c = f"R{self.c[row][col]}"
            made.append(Instruction(16 * number, "FFMA", f"{c}, {a}, {b}, {c}"))
        return made

    def reads(self, snake: bool = False) -> list[Reads]:
        """Return the reads of the FFMAs by bank on Ampere and later, with all possible reuse."""
        return list(ffma_reads(self.ffma(snake, reuse=True)))


def waits_on_maxwell(tile: RegisterTile) -> list[list[bool]]:
    """Find the FFMAs with two sources in one of four banks, by row and column of C; they wait on Maxwell and Pascal."""
    return [
        [len({number % MAXWELL_BANKS for number in (a, b, c)}) < 3 for b, c in zip(tile.b, row, strict=True)]
        for a, row in zip(tile.a, tile.c, strict=True)
    ]
