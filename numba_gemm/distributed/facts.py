"""Facts about a call on one rank, which ranks compare before any data moves."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..gemm.precision import KNOWN
from .placements import COLS, OTHER, ROWS, WHOLE, Placements, words

__all__ = ["Facts", "bits", "compare", "numbers", "packed", "unpacked"]

NAMES = (ROWS, COLS, WHOLE, OTHER)
ABSENT = -1


class Facts(NamedTuple):
    """Arguments of a call on one rank, as integers of a fixed number.

    Fields up to `panel` have to be equal on all ranks.
    """

    dtensors: int = 0
    a_placements: tuple[int, int] = (ABSENT, ABSENT)
    b_placements: tuple[int, int] = (ABSENT, ABSENT)
    out_placements: tuple[int, int] = (ABSENT, ABSENT)
    precision: int = ABSENT
    alpha: int = 0
    beta: int = 0
    has_out: int = 0
    a_whole: tuple[int, int] = (ABSENT, ABSENT)
    b_whole: tuple[int, int] = (ABSENT, ABSENT)
    out_whole: tuple[int, int] = (ABSENT, ABSENT)
    panel: int = ABSENT
    refused: int = 0
    a_shape: tuple[int, int] = (ABSENT, ABSENT)
    b_shape: tuple[int, int] = (ABSENT, ABSENT)
    out_shape: tuple[int, int] = (ABSENT, ABSENT)
    host: int = 0
    megaflops: int = 0
    copies: int = 0
    buffer: int = 0
    room: int = 0
    lacks: int = 0


EQUAL = Facts._fields[: Facts._fields.index("refused")]
WORDS = {
    "dtensors": "DTensors",
    "a_placements": "placements of a",
    "b_placements": "placements of b",
    "out_placements": "placements of the result",
    "has_out": "an out",
    "a_whole": "a of shape",
    "b_whole": "b of shape",
    "out_whole": "out of shape",
}


def numbers(placements: Placements | None) -> tuple[int, int]:
    """Return placements as two integers."""
    found = [] if placements is None else [NAMES.index(one) for one in placements]
    first, second = (*found, ABSENT, ABSENT)[:2]
    return first, second


def bits(value: float) -> int:
    """Return the bits of a number."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def packed(facts: Facts) -> list[int]:
    """Return facts as integers, in the order of the fields."""
    return [one for field in facts for one in (field if isinstance(field, tuple) else (field,))]


def unpacked(values: Sequence[int]) -> Facts:
    """Return facts, given what `packed` returned."""
    left = list(values)
    fields: list[Any] = [(left.pop(0), left.pop(0)) if isinstance(one, tuple) else left.pop(0) for one in Facts()]
    return Facts(*fields)


def compare(everyone: Mapping[tuple[int, ...], Facts]) -> None:
    """Raise ValueError, the same on every rank, if a rank has an error or differs from the first one."""
    if refusing := [at for at, facts in everyone.items() if facts.refused]:
        raise ValueError(
            f"the rank at {_place(refusing[0])} refused its arguments; expected valid ones on every rank; see its own "
            "error for what to pass there"
        )
    first, reference = next(iter(everyone.items()))
    for at, facts in everyone.items():
        for name in EQUAL:
            mine, theirs = getattr(reference, name), getattr(facts, name)
            if mine != theirs:
                raise ValueError(
                    f"ranks disagree: {WORDS.get(name, name)} is {_said(name, mine)} at {_place(first)} and "
                    f"{_said(name, theirs)} at {_place(at)}; expected the same on every rank; pass equal arguments"
                )


def _place(at: tuple[int, ...]) -> str:
    return f"{at[0] if len(at) == 1 else at} of the mesh"


def _said(name: str, value: Any) -> str:
    if name.endswith("placements"):
        return words([NAMES[one] for one in value if one != ABSENT]) if value != (ABSENT, ABSENT) else "not given"
    if name == "precision":
        return repr(KNOWN[value])
    if name in ("alpha", "beta"):
        return repr(struct.unpack("<d", struct.pack("<q", value))[0])
    if name in ("dtensors", "has_out"):
        return "given" if value else "not given"
    return "not given" if value in (ABSENT, (ABSENT, ABSENT)) else str(value)
