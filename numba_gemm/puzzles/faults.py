"""Faults of a kernel: types, races, reads of memory without a value, wrong elements, elements of other threads."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..device.units import FLOAT32_BYTES
from ..inspect.recording import SHARED
from ..inspect.tracing import Race
from ..simulator import patches
from .finding import Finding, place
from .running import Run, case_text
from .source import first_store, syntax_tree

__all__ = ["faults"]


def faults(run: Run) -> Iterator[Finding]:
    """Yield the faults of a run, causes before effects."""
    yield from _types(run)
    for race in run.trace.races:
        yield _race(run, race)
    for read in run.trace.unwritten:
        element = _element(read.array, read.element)
        who = f"thread {run.thread(read.thread)} of block {read.block} reads {element}"
        if read.in_flight:
            text = f"{who}, to which an asynchronous copy is still in flight: nothing has waited for it"
        else:
            text = f"{who}, which nobody has written: shared memory holds no zeros at first"
        yield Finding("unwritten", text, read.file, read.line)
    yield from _old_output(run)
    if not np.array_equal(run.output, run.expected):
        yield _wrong(run)
    elif run.puzzle.owner is not None:
        yield from _owners(run, run.puzzle.owner)


def _element(array: str, index: tuple[int, ...]) -> str:
    return f"{array}[{', '.join(map(str, index))}]"


def _race(run: Run, race: Race) -> Finding:
    verb, other = (text.partition(" at ")[0] for text in (race.first, race.second))
    element = _element(race.array, race.element)
    one = f"race: thread {run.thread(race.threads[0])} of block {race.block}"
    two = f"thread {run.thread(race.threads[1])} {other}s it {_where(race)}"
    copies = {row["line"] for row in run.accesses if row["array"] == race.array and row["op"] == "copy"}
    if race.first_line[1] in copies:
        text = (
            f"{one} starts a copy to {element} here, and {two}, where it may still be in flight: the copying thread "
            "must close the copy's group and wait for it before a barrier"
        )
    else:
        text = f"{one} {verb}s {element} here, and {two}, with no barrier between the two"
    return Finding("race", text, *race.first_line)


def _where(race: Race) -> str:
    if race.first_line == race.second_line:
        return "in the same line"
    file, line = race.second_line
    return f"at line {line}" if file == race.first_line[0] else f"at {place(file, line)}"


def _types(run: Run) -> Iterator[Finding]:
    """Yield arrays in shared memory that do not hold float32."""
    for array in run.trace.arrays:
        if array.space == SHARED and array.dtype != np.float32:
            made = [
                node.lineno
                for node in ast.walk(syntax_tree(run.kernel) or ast.Module([], []))
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == array.name
            ]
            yield Finding(
                "error", f"{array.name} holds {array.dtype}, expected float32", *_place_of(run, min(made, default=0))
            )


def _old_output(run: Run) -> Iterator[Finding]:
    """Yield a read of the output before it is written, where it holds NaN."""
    if run.case.get("beta"):
        return
    written: set[Any] = set()
    for row in run.accesses:
        if row["array"] != run.puzzle.output:
            continue
        if row["write"]:
            written.add(row["element"])
        elif row["element"] not in written:
            text = (
                f"thread {run.thread(row['thread'])} of block {row['block']} reads "
                f"{_element(run.puzzle.output, row['element'])}, which holds NaN: nobody has written it "
                f"({case_text(run.case)})"
            )
            yield Finding("unwritten", text, *_place_of(run, row["line"]))
            return


def _place_of(run: Run, line: int) -> tuple[str, int]:
    return patches.python_function(run.kernel).__code__.co_filename, int(line)


def _writers(run: Run) -> dict[tuple[int, ...], dict[str, Any]]:
    """Return the last write of each element of the output."""
    found = {}
    for row in run.accesses:
        if row["array"] == run.puzzle.output and row["write"]:
            *outer, last = row["element"]
            for i in range(row["bytes"] // FLOAT32_BYTES):
                found[(*outer, last + i)] = row
    return found


def _wrong(run: Run) -> Finding:
    """Describe the first wrong element."""
    wrong = run.output != run.expected  # also for NaN
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    got, expected = run.output[index], run.expected[index]
    element, how_many = _element(run.puzzle.output, index), f"{int(wrong.sum())} of {wrong.size} elements are wrong"
    writers = _writers(run)
    if index not in writers:
        text = f"{element} is never written, expected {expected:g} ({case_text(run.case)}); {how_many}{_twice(run)}"
        if not writers:
            line = first_store(run.kernel, run.puzzle.output)
            return Finding(
                "wrong", f"{text}. No thread of any block runs this line" * bool(line) or text, *_place_of(run, line)
            )
        return Finding("wrong", text, *_place_of(run, min(row["line"] for row in writers.values())))
    row = writers[index]
    text = (
        f"{element} is {got:g}, expected {expected:g} ({case_text(run.case)}); thread {run.thread(row['thread'])} of "
        f"block {row['block']} wrote it here; {how_many}"
    )
    return Finding("wrong", text + (_local_arrays(run) if np.isnan(got) else ""), *_place_of(run, row["line"]))


def _twice(run: Run) -> str:
    """Return an element of the output that two threads write, instead of one each; empty if there is none."""
    first: dict[Any, dict[str, Any]] = {}
    for row in run.accesses:
        if row["array"] == run.puzzle.output and row["write"]:
            before = first.setdefault(row["element"], row)
            threads = [f"thread {run.thread(one['thread'])} of block {one['block']}" for one in (before, row)]
            if threads[0] != threads[1]:
                return f". {_element(run.puzzle.output, row['element'])} is written by {threads[0]} and by {threads[1]}"
    return ""


def _local_arrays(run: Run) -> str:
    """Return the origin of a NaN that is not in memory: local arrays, which hold NaN at first."""
    made = [
        f"{ast.unparse(node.targets[0])} (line {node.lineno})"
        for node in ast.walk(syntax_tree(run.kernel) or ast.Module([], []))
        if isinstance(node, ast.Assign) and "local.array" in ast.unparse(node.value)
    ]
    return f". A local array holds no zeros at first: is {' or '.join(made)} read before it is written?" * bool(made)


def _owners(run: Run, owner: Any) -> Iterator[Finding]:
    """Yield the first element that another thread than its owner has written."""
    for index, row in sorted(_writers(run).items()):
        if row["thread"] != (right := owner(*index)):
            text = (
                f"{_element(run.puzzle.output, index)} is written by thread {row['thread']} (warp "
                f"{row['thread'] // 32}, lane {row['thread'] % 32}) of block {row['block']}, and belongs to thread "
                f"{right} (warp {right // 32}, lane {right % 32})"
            )
            yield Finding("owner", text, *_place_of(run, row["line"]))
            return
