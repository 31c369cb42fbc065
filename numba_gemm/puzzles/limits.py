"""Limits of a kernel's accesses and barriers: their counts, and where a kernel exceeds them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..device.units import FLOAT32_BYTES
from ..inspect.recording import GLOBAL, SHARED
from ..models.requests import BANKS
from ..simulator import patches
from .finding import Finding
from .record import LIMITS
from .running import Run

__all__ = ["MEASURES", "Measure"]


Row = dict[str, Any]


@dataclass(frozen=True)
class Measure:
    """A count of a run, and an explanation of it.

    Attributes
    ----------
    count : callable
        Returns the count of a run.
    explain : callable
        Returns the line of the most wasteful place, and a text about it.
    """

    count: Callable[[Run], int]
    explain: Callable[[Run], tuple[int, str]]

    def finding(self, name: str, run: Run, allowed: int) -> Finding:
        """Return the finding of a run that exceeds a limit."""
        line, text = self.explain(run)
        file = patches.python_function(run.kernel).__code__.co_filename
        return Finding("limit", f"{self.count(run)} {LIMITS[name]}, at most {allowed}; {text}", file, line)


def _name(array: str, element: tuple[int, ...]) -> str:
    return f"{array}[{', '.join(map(str, element))}]"


def _verb(row: Row) -> str:
    return "writes" if row["op"] in ("store", "atomic") else "reads"


# ---- floats


def _floats(space: str, *ops: str) -> Measure:
    """Return a measure of accessed floats, explained by an element that is accessed again."""

    def own(run: Run) -> list[Row]:
        return [row for row in run.accesses if row["space"] == space and row["op"] in ops]

    def count(run: Run) -> int:
        return sum(row["bytes"] for row in own(run)) // FLOAT32_BYTES

    def scope(row: Row) -> tuple[Any, ...]:
        if space == SHARED:  # between two barriers, a thread can keep the value
            return (row["block"], row["array"], row["element"], row["interval"], row["thread"])
        return (row["array"], row["element"]) if row["write"] else (row["block"], row["array"], row["element"])

    def explain(run: Run) -> tuple[int, str]:
        first: dict[tuple[Any, ...], Row] = {}
        again = [(first[scope(row)], row) for row in own(run) if first.setdefault(scope(row), row) is not row]
        rows = [row for _, row in again] or own(run)
        line = Counter(row["line"] for row in rows).most_common(1)[0][0]
        floats = sum(row["bytes"] for row in own(run) if row["line"] == line) // FLOAT32_BYTES
        text = f"this line {_verb(rows[0])} {floats} of them"
        repeated = next(((before, row) for before, row in again if row["line"] == line), None)
        if repeated is None:
            return line, text
        before, row = repeated
        who, other = run.thread(row["thread"]), run.thread(before["thread"])
        done = "written" if row["write"] else "read"
        by = f"{'it' if who == other else f'thread {other}'} has {done} already"
        at = "" if before["line"] == line else f" at line {before['line']}"
        one = _name(row["array"], row["element"])
        return line, f"{text}: thread {who} of block {row['block']} {_verb(row)} {one}, which {by}{at}"

    return Measure(count, explain)


def _in_registers(run: Run) -> tuple[int, str]:
    row = next(row for row in run.accesses if row["space"] == GLOBAL and row["op"] == "load")
    who, one = run.thread(row["thread"]), _name(row["array"], row["element"])
    return row["line"], f"here thread {who} loads {one} into a register instead of starting a copy"


# ---- requests


def _wasteful(run: Run, space: str, cost: str) -> tuple[Row, list[tuple[tuple[int, int, int], int, str]]]:
    """Return the worst request of the worst line, and the thread, byte address and element of each of its lanes."""
    excess = {number: row[cost] - row["ideal"] for number, row in enumerate(run.requests) if row["space"] == space}
    lines: Counter[int] = Counter()
    for number, more in excess.items():
        lines[run.requests[number]["line"]] += more
    (line, _), *_ = lines.most_common(1)
    worst = max((number for number in excess if run.requests[number]["line"] == line), key=excess.__getitem__)
    row = run.requests[worst]
    array, lanes = run.trace.array(row["array"]), run.trace.lanes(worst)
    elements = array.indices(np.array([address - array.begin for _, address in lanes])).tolist()
    return row, [
        (run.thread(32 * row["warp"] + lane), address, _name(row["array"], tuple(element)))
        for (lane, address), element in zip(lanes, elements, strict=True)
    ]


def _scattered(run: Run) -> tuple[int, str]:
    row, lanes = _wasteful(run, GLOBAL, "sectors")
    text = f"here {row['sectors']} sectors move for a warp, whose data fit into {row['ideal']}: thread "
    one, *others = (f"{who} {_verb(row)} {element}" for who, _, element in lanes)
    return row["line"], text + one + "".join(f", thread {other}" for other in others[:1])


def _conflict(run: Run) -> tuple[int, str]:
    row, lanes = _wasteful(run, SHARED, "wavefronts")
    text = f"here a warp {_verb(row)} {row['array']} in {row['wavefronts']} wavefronts, and {row['ideal']} would do"
    first_of_bank: dict[int, tuple[Any, int, str]] = {}
    for who, address, element in lanes:
        bank = address // FLOAT32_BYTES % BANKS
        other, place, name = first_of_bank.setdefault(bank, (who, address, element))
        if place != address:
            text += f": thread {other} {_verb(row)} {name} and thread {who} {element}, both in bank {bank}"
            break
    return row["line"], text


def _narrow(run: Run) -> tuple[int, str]:
    row = min((row for row in run.requests if row["space"] == GLOBAL), key=lambda row: row["bits"])
    return row["line"], f"here a thread {_verb(row)} {row['bits']} bits of {row['array']} at a time, of 128 possible"


# ---- barriers


def _lines_of_barriers(run: Run) -> list[int]:
    """Return the line of each barrier of the first block."""
    return [line for block, line in run.trace.barriers if block == run.trace.blocks[0]]


def _superfluous(run: Run) -> tuple[int, str]:
    """Explain barriers by one that orders nothing."""
    lines = _lines_of_barriers(run)
    told = ", ".join(f"{count} at line {line}" for line, count in sorted(Counter(lines).items()))
    text = f"block {run.trace.blocks[0]} has {told}"
    if not (unneeded := run.trace.unneeded_barriers):
        return lines[-1], text
    (line, _), *_ = Counter(lines[number] for number in unneeded).most_common(1)
    number = max(number for number in unneeded if lines[number] == line)
    return lines[number], f"{text}; without barrier number {number + 1}, this one, there would be no race either"


MEASURES = {
    "global_floats": _floats(GLOBAL, "load", "copy"),
    "register_floats": Measure(_floats(GLOBAL, "load").count, _in_registers),
    "written_floats": _floats(GLOBAL, "store", "atomic"),
    "requests": Measure(lambda run: sum(row["space"] == GLOBAL for row in run.requests), _narrow),
    "sectors": Measure(lambda run: sum(row["sectors"] for row in run.requests), _scattered),
    "shared_floats": _floats(SHARED, "load"),
    "wavefronts": Measure(lambda run: sum(row["wavefronts"] for row in run.requests), _conflict),
    "barriers": Measure(lambda run: len(_lines_of_barriers(run)), _superfluous),
}
