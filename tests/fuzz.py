#!/usr/bin/env python3
"""Compare random calls of the public functions with float64: ``python tests/fuzz.py --seconds 60``.

Cases cover every stage, precision and array library that the machine has: odd shapes, strides of any sign, unaligned
and repeated elements, batches, epilogues, special values, plans, products streamed in small blocks, sequences of
calls that differ in one argument, and calls that must be refused. Each result is compared with a float64 product,
within the bound of its precision, or exactly where the sums are exact. Memory around the operands holds NaN, and
memory around C must not change.

A case follows from the seed, its number, and the stages, precisions and libraries that it is drawn from:
``--replay SEED:NUMBER`` repeats one. ``--digests FILE`` writes a SHA-256 of each result, and what the cases were drawn
from; ``--compare FILE`` runs the same cases again and reports results with other bits. Exits with 1 if anything is
wrong. Without a GPU, the simulator runs the cases, with smaller shapes.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from random import Random
from typing import Any

if __name__ == "__main__":
    # As in conftest.py: choose hardware or simulator before Numba is imported, here and in every worker.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    from numba_gemm.simulator.probe import gpu_count

    if gpu_count() == 0:
        os.environ["NUMBA_ENABLE_CUDASIM"] = "1"

import numpy as np
from support.streaming_cases import least_memory, tiny_blocks

from numba_gemm import plan, stages, streamed_sgemm, tiled_sgemm
from numba_gemm.gemm.precision import FP32_AUTO, IEEE, PRECISIONS
from numba_gemm.models.accuracy import UNIT_ROUNDOFF, bound, compare, ieee_bound, reference
from numba_gemm.simulator.switch import SIMULATOR

GUARD = np.float32(-77.25)  # around C
NAN = np.float32(np.nan)  # around A and B
MARGIN = 8  # elements before and after an operand
MOST_FAILURES = 20  # per worker, which then stops: after a GPU error, all later calls may fail

KINDS = {"product": 40, "batch": 16, "epilogue": 10, "sequence": 14, "plan": 8, "streamed": 6, "refused": 6}
ALPHAS = (1.0, 1.0, 0.5, -1.0, 2.0, 0.0, -0.0, 3.0)
BETAS = (0.0, 0.0, 0.0, 1.0, -2.0, 0.5)
SPECIAL_SCALARS = (float("inf"), float("-inf"), float("nan"), 1e30, 1e-30, -1e38)
INEXACT = {"ieee": ("uniform", "wide", "special", "huge", "tiny")}
TENSOR_INEXACT = ("uniform", "wide", "special")  # docs/precision.md has the ranges of the others
SMALL_EDGES = (1, 1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 15, 16, 17)
EDGES = (*SMALL_EDGES, 20, 24, 31, 32, 33, 36, 40)
LARGER_EDGES = (48, 60, 63, 64, 65, 68, 96, 100, 127, 128, 129, 130, 132, 160, 192, 200, 255, 256, 257, 260, 300)


# ----------------------------------------------------------------------------------------------------------- epilogues


def negated(value: Any, row: Any, column: Any) -> Any:
    return -value


def biased(value: Any, row: Any, column: Any, bias: Any) -> Any:
    return abs(value + bias[column])


def scaled(value: Any, row: Any, column: Any, down: Any, across: Any) -> Any:
    return value * down[row] * across[column]


# Lengths of the epilogues' vectors, and float64 functions from a result and its scale to those after the epilogue.
EPILOGUES: dict[str, tuple[Any, str, Callable[..., tuple[np.ndarray, np.ndarray]]]] = {
    "negated": (negated, "", lambda x, scale: (-x, scale)),
    "biased": (biased, "n", lambda x, scale, bias: (abs(x + bias), 2 * scale + abs(bias))),
    "scaled": (
        scaled,
        "mn",
        lambda x, scale, down, across: (x * down[:, None] * across, 2 * scale * abs(down[:, None] * across)),
    ),
}


# --------------------------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Layout:
    """Order of an operand's dimensions in memory, outermost first, and distances between elements.

    `steps` has a factor per dimension: 1 is dense, 2 leaves every other place free, -1 runs backwards, 0 repeats. `pad`
    elements follow each line, or if that is -1, as many as the next multiple of four takes; `offset` elements lie
    between a 16-byte boundary and the first one.
    """

    order: tuple[int, ...]
    steps: tuple[int, ...]
    pad: int = 0
    offset: int = 0

    def __str__(self) -> str:
        return f"({_described(self)})"

    def place(self, shape: Sequence[int]) -> tuple[int, int, tuple[int, ...]]:
        """Elements of the buffer, index of the element (0, ..., 0), and strides in elements."""
        strides, unit, first, last = [0] * len(shape), 1, 0, 0
        for position, axis in enumerate(reversed(self.order)):
            extent, step = max(shape[axis], 1), self.steps[axis]
            strides[axis] = step * unit
            reach = (extent - 1) * strides[axis]
            first, last = first + min(reach, 0), last + max(reach, 0)
            unit *= extent * abs(step) if step else 1
            if position == 0:
                unit += -unit % 4 if self.pad < 0 else self.pad
        start = 2 * MARGIN + self.offset - first
        return start + last + 1 + MARGIN, start, tuple(strides)


@dataclass(frozen=True)
class Call:
    """One call, except for the values of its operands, which follow from the seed."""

    seed: int
    library: str
    shape: tuple[int, int, int]
    a: Layout
    b: Layout
    out: Layout | None
    batch_a: tuple[int, ...] = ()
    batch_b: tuple[int, ...] = ()
    stage: str = "auto"
    precision: str = "ieee"
    alpha: float = 1.0
    beta: float = 0.0
    values: str = "integers"
    epilogue: str | None = None

    @property
    def batch(self) -> tuple[int, ...]:
        return np.broadcast_shapes(self.batch_a, self.batch_b)

    @property
    def repeats_terms(self) -> bool:
        """True if all terms of a sum may be equal."""
        return self.a.steps[-1] == 0 and self.b.steps[-2] == 0

    def __str__(self) -> str:
        return _described(self)


@dataclass(frozen=True)
class Case:
    """Calls that one process makes in this order, according to `kind`."""

    kind: str
    calls: tuple[Call, ...]
    planned: str = "NN"  # layout of the plan
    limit: float = 0.0  # memory limit of a streamed call, between the minimum (0) and the total (1)
    spoiled: str = ""  # the error in a call that must be refused

    def __str__(self) -> str:
        calls = "".join(f"\n    {call}" for call in self.calls)
        return f"{self.kind}, planned={self.planned}, limit={self.limit}, spoiled={self.spoiled!r}{calls}"

    @property
    def family(self) -> str:
        """Name shared by cases that use the same kernels; one worker runs all of them."""
        call = self.calls[0]
        places = [(layout.order[-2:], layout.offset % 4 == 0, layout.steps[-2:]) for layout in (call.a, call.b)]
        return repr((call.stage, call.precision, call.epilogue, places))


def _described(record: Any) -> str:
    """Return the fields of a record that differ from their defaults."""
    values = ((one.name, getattr(record, one.name), one.default) for one in fields(record))
    return ", ".join(f"{name}={value}" for name, value, default in values if value != default)


@dataclass(frozen=True)
class Space:
    """Stages, precisions and libraries that cases are drawn from."""

    libraries: tuple[str, ...]
    precisions: tuple[str, ...]
    stages: tuple[str, ...]


class Draw:
    """Random choices of one case."""

    def __init__(self, seed: int, number: int, space: Space) -> None:
        self.random = Random(f"{seed}:{number}")
        self.seed = seed << 32 | number
        self.space = space

    def weighted(self, table: dict[Any, float]) -> Any:
        return self.random.choices(list(table), list(table.values()))[0]

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def extent(self) -> int:
        if self.chance(0.015):
            return 0
        if SIMULATOR:
            return self.random.choice(EDGES if self.chance(0.2) else SMALL_EDGES)
        size = self.random.random()
        if size < 0.3:
            return self.random.choice(EDGES)
        if size < 0.8:
            return self.random.choice(LARGER_EDGES)
        return self.random.randint(1, 300) if size < 0.99 else self.random.randint(300, 1200)

    def shape(self, kind: str) -> tuple[int, int, int]:
        if kind == "streamed":  # blocks of 8 and panels of 4 to 16, with at least one launch each
            m, n, k = (0 if self.chance(0.015) else self.random.choice(EDGES) for _ in range(3))
            return m, n, k
        m, n, k = self.extent(), self.extent(), self.extent()
        if not SIMULATOR and m * n < 20_000 and self.chance(0.1):
            k = self.random.randint(300, 20_000)
        return m, n, k

    def layout(self, batch: int, library: str, may_repeat: bool) -> Layout:
        """Draw a layout with this many batch dimensions; half of them are row-major or column-major without gaps."""
        axes = list(range(batch + 2))
        matrix = axes[-2:] if self.chance(0.6) else axes[:-3:-1]
        order, steps = (*axes[:-2], *matrix), [1] * len(axes)
        pad = self.random.choice((0, 0, 0, -1, -1, 1, 4, 8, 12))
        offset = self.random.choice((0, 0, 0, 0, 1, 2, 4))
        if self.chance(0.4):
            signs = (1, 1, 2, 3) if library == "torch" else (1, 1, 2, 3, -1, -2)
            steps = [self.random.choice(signs) for _ in axes]
            if may_repeat and self.chance(0.15):
                steps[self.random.choice(axes)] = 0
            if batch and self.chance(0.4):
                order = tuple(self.random.sample(axes, len(axes)))
        return Layout(order, tuple(steps), pad, offset)

    def scalars(self, precision: str) -> tuple[float, float, str]:
        """Draw alpha, beta and the kind of elements."""
        alpha, beta = self.random.choice(ALPHAS), self.random.choice(BETAS)
        if self.chance(0.45):
            if self.chance(0.1):
                alpha, beta = self.random.choice(((alpha, self.random.choice(SPECIAL_SCALARS)), (float("inf"), beta)))
            return alpha, beta, "integers"
        return alpha, beta, self.random.choice(INEXACT.get(precision, TENSOR_INEXACT))

    def call(self, kind: str, stage: str, precision: str) -> Call:
        library = "numpy" if kind == "streamed" else self.random.choice(self.space.libraries)
        shape, ranks = self.shape(kind), ((), ())
        if kind == "batch" or (kind in ("epilogue", "sequence", "refused") and self.chance(0.3)):
            ranks = self.batches()
            shape = tuple(min(extent, 16 if SIMULATOR else 160) for extent in shape)
        alpha, beta, values = self.scalars(precision)
        layouts = [self.layout(len(rank), library, True) for rank in ranks]
        out = self.layout(len(np.broadcast_shapes(*ranks)), library, False) if beta or self.chance(0.7) else None
        call = Call(self.seed, library, shape, *layouts, out, *ranks, stage, precision, alpha, beta, values)
        if kind == "epilogue" or (kind == "sequence" and self.chance(0.2)):
            call = self.with_epilogue(call)
        return call

    def with_epilogue(self, call: Call) -> Call:
        # Few layouts, since each needs another kernel; no infinities, which epilogues may turn into NaN.
        stage = call.stage if call.stage in SCHEDULED else "auto"
        values = call.values if call.values in ("uniform", "wide") else "integers"
        finite = {
            "alpha": call.alpha if np.isfinite(call.alpha) else 1.0,
            "beta": call.beta if abs(call.beta) < 4 else 0.5,
        }
        plain = [replace(layout, steps=(1,) * len(layout.steps)) for layout in (call.a, call.b)]
        a, b = plain if self.chance(0.8) else (call.a, call.b)
        name = self.random.choice(list(EPILOGUES))
        return replace(call, stage=stage, values=values, epilogue=name, a=a, b=b, **finite)

    def batches(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        whole = [self.random.choice((1, 1, 2, 3)) for _ in range(self.random.choice((1, 1, 2, 2, 3, 4)))]
        if self.chance(0.05):
            whole[self.random.randrange(len(whole))] = 0
        made = []
        for _ in range(2):
            own = [1 if self.chance(0.2) else extent for extent in whole]
            made.append(tuple(own[self.random.randint(0, len(own)) if self.chance(0.3) else 0 :]))
        return made[0], made[1]

    def changed(self, call: Call) -> Call:
        """Draw a call that differs from another in one argument."""
        what = self.random.choice(
            ("alpha", "beta", "out", "a", "b", "offset", "extent", "values", "precision", "library")
        )
        if what == "alpha":
            return replace(call, alpha=self.random.choice(ALPHAS))
        if what == "beta":
            beta = self.random.choice(BETAS)
            out = call.out or (self.layout(len(call.batch), call.library, False) if beta else None)
            return replace(call, beta=beta, out=out)
        if what == "out":
            out = None if call.out and not call.beta else self.layout(len(call.batch), call.library, False)
            return replace(call, out=out)
        if what in ("a", "b"):
            rank = len(call.batch_a if what == "a" else call.batch_b)
            return replace(call, **{what: self.layout(rank, call.library, call.epilogue is None)})
        if what == "offset":
            name = self.random.choice(("a", "b", "out") if call.out else ("a", "b"))
            layout = getattr(call, name)
            return replace(call, **{name: replace(layout, offset=layout.offset + 1)})
        if what == "extent":
            extents = list(call.shape)
            axis = self.random.randrange(3)
            extents[axis] = max(extents[axis] + self.random.choice((-1, 1, 4)), 0)
            return replace(call, shape=tuple(extents))
        if what == "values":
            return replace(call, seed=call.seed + (1 << 80))
        if what == "precision" and call.stage == "auto" and call.values in ("integers", "uniform", "wide"):
            return replace(call, precision=self.random.choice(self.space.precisions))
        if what == "library" and call.library != "torch":
            return replace(call, library=self.random.choice([name for name in self.space.libraries if name != "torch"]))
        return call


SCHEDULED = [stage.name for stage in stages() if stage.takes_epilogue and stage.takes_partition]
SPOILED: dict[str, Callable[[dict[str, Any]], None]] = {
    "precision": lambda call: call.update(precision="fp7"),
    "stage": lambda call: call.update(stage="nonesuch"),
    "alpha": lambda call: call.update(alpha="1"),
    "vector": lambda call: call.update(a=call["a"][(0,) * (call["a"].ndim - 1)][:-1]),
    "inner extent": lambda call: call.update(b=call["b"][..., :-1, :]),
    "result is an operand": lambda call: call.update(out=call["a"], b=call["a"].swapaxes(-1, -2)),
    "no C to scale": lambda call: call.update(beta=2.0, out=None),
    "result's shape": lambda call: call.update(out=call["a"][..., :-1]),
    "epilogue arguments": lambda call: call.update(epilogue_args=(call["a"],), epilogue=None),
}


def drawn(seed: int, number: int, space: Space) -> Case:
    """Draw the case with a number."""
    draw = Draw(seed, number, space)
    kind = draw.weighted(KINDS)
    precision = "ieee" if draw.chance(0.4) else draw.random.choice(space.precisions)
    by_name = precision == "ieee" and kind != "streamed" and draw.chance(0.55)
    call = draw.call(kind, draw.random.choice(space.stages) if by_name else "auto", precision)
    if kind == "sequence":
        calls = [call]
        for _ in range(draw.random.randint(1, 4)):
            calls.append(draw.changed(calls[-1]))
        return Case(kind, (*calls, call))
    if kind == "plan":
        calls = [call]
        for _ in range(draw.random.randint(1, 3)):
            layouts = [draw.layout(0, call.library, True) for _ in range(2)]
            out = draw.layout(0, call.library, False) if call.beta or draw.chance(0.7) else None
            calls.append(replace(call, a=layouts[0], b=layouts[1], out=out))
        return Case(kind, (*calls, call), planned=draw.random.choice(("NN", "NT", "TN", "TT")))
    if kind == "streamed":
        return Case(kind, (call,), limit=draw.random.choice((0.0, 0.1, 0.5, 1.0)))
    if kind == "refused":
        extents = tuple(max(extent, 2) for extent in call.shape)
        call = replace(call, shape=extents, epilogue=None)
        return Case(kind, (call,), spoiled=draw.random.choice(list(SPOILED)))
    return Case(kind, (call,))


# ----------------------------------------------------------------------------------------------------------- libraries


class Library:
    """Operands of one array library: a buffer on its device, and views of it. The base class uses NumPy."""

    def put(self, buffer: np.ndarray) -> Any:
        return buffer

    def view(self, buffer: Any, start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        return np.lib.stride_tricks.as_strided(buffer[start:], shape, [4 * stride for stride in strides])

    def get(self, array: Any) -> np.ndarray:
        return np.asarray(array)


class Cupy(Library):
    def __init__(self) -> None:
        import cupy

        self.cupy = cupy

    def put(self, buffer: np.ndarray) -> Any:
        return self.cupy.asarray(buffer)

    def view(self, buffer: Any, start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        steps = tuple(4 * stride for stride in strides)
        return self.cupy.ndarray(shape, np.float32, memptr=buffer.data + 4 * start, strides=steps)

    def get(self, array: Any) -> np.ndarray:
        return self.cupy.asnumpy(array)


class Torch(Library):
    def __init__(self) -> None:
        import torch

        self.torch = torch

    def put(self, buffer: np.ndarray) -> Any:
        return self.torch.from_numpy(buffer.copy()).cuda()

    def view(self, buffer: Any, start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        return self.torch.as_strided(buffer, shape, strides, start)

    def get(self, array: Any) -> np.ndarray:
        return array.cpu().numpy()


class NumbaArrays(Library):
    def put(self, buffer: np.ndarray) -> Any:
        from numba import cuda

        return cuda.to_device(buffer)

    def view(self, buffer: Any, start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        from numba import cuda

        described = dict(buffer.__cuda_array_interface__)
        address = described["data"][0] + 4 * start
        described |= {"data": (address, False), "shape": shape, "strides": tuple(4 * stride for stride in strides)}
        owner = type("View", (), {"__cuda_array_interface__": described, "buffer": buffer})()
        return cuda.as_cuda_array(owner, sync=False)

    def get(self, array: Any) -> np.ndarray:
        from numba import cuda

        cuda.synchronize()
        return array.copy_to_host()


def found_libraries() -> dict[str, Library]:
    """Return the array libraries of this machine."""
    found: dict[str, Library] = {"numpy": Library()}
    if SIMULATOR:
        return found
    found["numba"] = NumbaArrays()
    for name, made in (("cupy", Cupy), ("torch", Torch)):
        with contextlib.suppress(ImportError):
            found[name] = made()
    return found


# ------------------------------------------------------------------------------------------------------------- running


def elements(random: np.random.Generator, shape: tuple[int, ...], values: str) -> np.ndarray:
    """Draw the elements of an operand. Products of integers, and their sums, are exact in every precision."""
    if values == "integers":
        return random.integers(-4, 5, shape).astype(np.float32)
    x = random.uniform(-1, 1, shape).astype(np.float32)
    if values == "wide":
        x = np.ldexp(x, random.integers(-20, 21, shape)).astype(np.float32)
    elif values == "huge":
        x = np.ldexp(x, random.integers(50, 127, shape)).astype(np.float32)
    elif values == "tiny":
        x = np.ldexp(x, random.integers(-148, -60, shape)).astype(np.float32)
    elif values == "special" and x.size:
        for value in (np.nan, np.inf, -np.inf, 0.0, -0.0):
            chosen = random.integers(0, x.size, random.integers(0, 2))
            x.reshape(-1)[chosen] = value
    return x


@dataclass
class Operand:
    """An array of a library in a buffer with a margin, which is checked against a copy."""

    library: Library
    values: np.ndarray  # on the host
    host: np.ndarray  # initial contents of the buffer
    index: tuple[int, tuple[int, ...], tuple[int, ...]]
    on_device: Any
    array: Any

    @classmethod
    def make(cls, library: Library, layout: Layout, values: np.ndarray, fill: np.float32) -> Operand:
        size, start, strides = layout.place(values.shape)
        room = np.full(size + 16, fill, np.float32)
        buffer = room[-(room.ctypes.data // 4) % 16 :][:size]
        index = (start, values.shape, strides)
        view = Library().view(buffer, *index)
        view[...] = values
        host = buffer.copy()
        on_device = library.put(buffer)
        return cls(library, np.array(view), host, index, on_device, library.view(on_device, *index))

    def fetch(self) -> np.ndarray:
        """Copy the current elements to the host."""
        self.now = self.library.get(self.on_device)
        return np.array(Library().view(self.now, *self.index))

    def unchanged(self, but_elements: bool) -> bool:
        """True if the buffer is unchanged, either entirely or outside of the operand's elements; call `fetch` first."""
        same = self.now.view(np.uint32) == self.host.view(np.uint32)
        if but_elements:
            start, shape, strides = self.index
            np.lib.stride_tricks.as_strided(same[start:], shape, strides)[...] = True
        return bool(same.all())


@dataclass
class Made:
    """Operands of a call."""

    a: Operand
    b: Operand
    c: Operand | None
    before: np.ndarray
    vectors: list[Operand]


def operands(call: Call, library: Library) -> Made:
    random = np.random.default_rng(call.seed)
    m, n, k = call.shape
    shape = (*call.batch, m, n)
    a = Operand.make(library, call.a, elements(random, (*call.batch_a, m, k), call.values), NAN)
    b = Operand.make(library, call.b, elements(random, (*call.batch_b, k, n), call.values), NAN)
    before = elements(random, shape, call.values)
    if call.beta == 0:
        before[...] = NAN
    c = None if call.out is None else Operand.make(library, call.out, before, GUARD)
    lengths = EPILOGUES[call.epilogue][1] if call.epilogue else ""
    vectors = [
        Operand.make(library, Layout((0,), (1 + i,)), elements(random, (m if which == "m" else n,), "integers"), NAN)
        for i, which in enumerate(lengths)
    ]
    return Made(a, b, c, before, vectors)


def verdict(call: Call, made: Made, got: np.ndarray, streamed: bool) -> str:
    """Describe the error of a result; empty if the result is correct."""
    m, n, k = call.shape
    precision = IEEE if call.precision == FP32_AUTO else call.precision  # the larger bound of those it stands for
    # A streamed call multiplies the sum of each panel by alpha and rounds after each panel.
    simple = call.alpha in ALPHAS and (call.beta in BETAS or not np.isfinite(call.beta))
    infinite = not np.isfinite(call.alpha) and call.beta in BETAS
    exact = call.values == "integers" and (simple or infinite)
    if streamed and not np.isfinite(call.alpha):
        return ""
    batch = call.batch
    a, b = np.broadcast_to(made.a.values, (*batch, m, k)), np.broadcast_to(made.b.values, (*batch, k, n))
    for at in np.ndindex(batch):
        with np.errstate(all="ignore"):
            expected, scale = reference(call.alpha, a[at], b[at], call.beta, made.before[at])
            if precision == "fp16x3" and k and call.alpha != 0:  # its bound depends on the largest elements
                rows, cols = np.max(abs(a[at]), axis=1, initial=0), np.max(abs(b[at]), axis=0, initial=0)
                scale = abs(call.alpha) * k * np.multiply.outer(rows.astype(float), cols) + scale
            if call.epilogue:
                expected, scale = EPILOGUES[call.epilogue][2](expected, scale, *(v.values for v in made.vectors))
        if exact:
            same = np.array_equal(got[at], expected.astype(np.float32), equal_nan=True)
            if not same:
                differs = np.argwhere(~((got[at] == expected) | (np.isnan(got[at]) & np.isnan(expected))))
                where = tuple(differs[0]) if len(differs) else ()
                return f"{at}{where}: got {got[at][where]}, expected exactly {expected[where]}; {len(differs)} differ"
            continue
        if call.values == "huge" or abs(call.alpha) > 1e20 or abs(call.beta) > 1e20:
            # A sum may overflow although its final value is finite.
            expected = np.where(scale >= 2.0**126, got[at], expected)
        if streamed:
            scale = scale * (1 + ieee_bound(2 * k) / bound(precision, k))
        if call.repeats_terms:  # the rounding errors are equal, not independent as `ieee_bound` assumes
            scale = scale * max(1.0, (k + 2) * UNIT_ROUNDOFF / ieee_bound(k))
        compared = compare(got[at], expected, scale, k, precision, call.alpha)
        if not compared.ok:
            return f"{at}: {compared}"
    return ""


@dataclass
class Outcome:
    """Verdict of a case: its errors, and a digest of each result."""

    wrong: list[str] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)


Function = Callable[..., Any]


def perform(call: Call, library: Library, function: Function, streamed: bool = False) -> tuple[str, str]:
    """Make a call; return a description of its error, empty if correct, and the digest of its result."""
    made = operands(call, library)
    extra: dict[str, Any] = {"alpha": call.alpha, "beta": call.beta}
    if call.epilogue:
        extra |= {"epilogue": EPILOGUES[call.epilogue][0], "epilogue_args": tuple(v.array for v in made.vectors)}
    out = None if made.c is None else made.c.array
    result = function(made.a.array, made.b.array, out, **extra)
    if made.c is None:
        got = np.array(library.get(result))
    elif result is not out:
        return "the result is not out", ""
    else:
        got = made.c.fetch()
        if not made.c.unchanged(but_elements=True):
            return "memory around out changed", ""
    for name, one in (("a", made.a), ("b", made.b), *((f"vector {i}", v) for i, v in enumerate(made.vectors))):
        one.fetch()
        if not one.unchanged(but_elements=False):
            return f"{name} changed", ""
    shape = (*call.batch, *call.shape[:2])
    if got.shape != shape or got.dtype != np.float32:
        return f"the result has shape {got.shape} and dtype {got.dtype}; expected {shape}, float32", ""
    return verdict(call, made, got, streamed), hashlib.sha256(np.ascontiguousarray(got).tobytes()).hexdigest()


def refused(call: Call, library: Library, spoiled: str) -> str:
    """Make an invalid call, which must raise and leave C unchanged; describe the error, empty if it does both."""
    made = operands(call, library)
    passed = {
        "a": made.a.array,
        "b": made.b.array,
        "out": None if made.c is None else made.c.array,
        "alpha": call.alpha,
        "beta": call.beta,
        "stage": call.stage,
        "precision": call.precision,
    }
    try:
        SPOILED[spoiled](passed)
    except (AttributeError, IndexError, TypeError):
        return ""  # this library cannot slice its arrays this way
    try:
        tiled_sgemm(**passed)
    except (TypeError, ValueError):
        pass
    else:
        return f"a call with a wrong {spoiled} was not refused"
    if made.c is not None:
        made.c.fetch()
        if not made.c.unchanged(but_elements=False):
            return f"a call with a wrong {spoiled} changed out"
    return ""


def run(case: Case, libraries: dict[str, Library]) -> Outcome:
    """Make the calls of a case. Equal calls must give equal bits."""
    outcome, seen = Outcome(), dict[Call, str]()
    if case.kind == "refused":
        call = case.calls[0]
        if wrong := refused(call, libraries[call.library], case.spoiled):
            outcome.wrong.append(wrong)
        return outcome
    planned: Function | None = None
    if case.kind == "plan":
        call = case.calls[0]
        planned = plan(*call.shape, stage=call.stage, layout=case.planned, precision=call.precision)
    for number, call in enumerate(case.calls):
        streamed = case.kind == "streamed"
        with tiny_blocks() if streamed else contextlib.nullcontext():
            if streamed:
                function: Function = _streamed(call, case.limit)
            elif planned is not None:
                function = planned
            else:
                function = _product(call)
            wrong, digest = perform(call, libraries[call.library], function, streamed)
        outcome.digests.append(digest)
        if not wrong and seen.setdefault(call, digest) != digest:
            wrong = "the same call gave other bits"
        if wrong:
            outcome.wrong.append(f"call {number}: {wrong}")
    return outcome


def _product(call: Call) -> Function:
    def product(a: Any, b: Any, out: Any, **extra: Any) -> Any:
        return tiled_sgemm(a, b, out, stage=call.stage, precision=call.precision, **extra)

    return product


def _streamed(call: Call, limit: float) -> Function:
    def streamed(a: Any, b: Any, out: Any, **extra: Any) -> Any:
        m, n, k = call.shape
        memory = None
        if 0 not in call.shape:
            least = least_memory(a, b, precision=call.precision)
            memory = int(least + limit * (4 * (m * n + 2 * k * (m + n)) + 4096))
        return streamed_sgemm(a, b, out, memory_limit=memory, precision=call.precision, **extra)

    return streamed


# -------------------------------------------------------------------------------------------------------------- report


@dataclass(frozen=True)
class Options:
    """Options of a worker."""

    seed: int
    first: int
    cases: int
    seconds: float
    jobs: int
    space: Space
    progress: str = ""  # directory where each worker notes the case that it runs


Counts = Counter[tuple[str, str, str]]  # by kind, precision and library


@dataclass
class Report:
    """Counts, failures and digests of one worker."""

    cases: Counts = field(default_factory=Counter)
    calls: Counts = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)
    digests: list[tuple[int, int, str]] = field(default_factory=list)


def work(options: Options, worker: int, libraries: dict[str, Library] | None = None) -> Report:
    """Run one worker's share of the cases."""
    libraries = found_libraries() if libraries is None else libraries
    report, end = Report(), time.monotonic() + options.seconds
    numbers: Iterator[int] = itertools.count(options.first)
    if options.cases:
        numbers = iter(range(options.first, options.first + options.cases))
    for number in numbers:
        case = drawn(options.seed, number, options.space)
        if zlib.crc32(case.family.encode()) % options.jobs != worker:
            continue
        if time.monotonic() > end or len(report.failures) >= MOST_FAILURES:
            break
        if options.progress:
            Path(options.progress, f"{worker}").write_text(f"{options.seed}:{number}\n{case}")
        try:
            outcome = run(case, libraries)
        except Exception as error:
            outcome = Outcome([f"{type(error).__name__}: {error}"])
        key = (case.kind, case.calls[0].precision, case.calls[0].library)
        report.cases[key] += 1
        report.calls[key] += len(case.calls)
        report.failures += [(number, f"{wrong}\n    {case}") for wrong in outcome.wrong]
        report.digests += [(number, i, digest) for i, digest in enumerate(outcome.digests)]
    return report


def merged(reports: Sequence[Report]) -> Report:
    whole = Report()
    for report in reports:
        whole.cases += report.cases
        whole.calls += report.calls
        whole.failures += report.failures
        whole.digests += report.digests
    whole.failures.sort()
    whole.digests.sort()
    return whole


def table(report: Report) -> list[dict[str, Any]]:
    """Table of counts, one row per kind, precision and library."""
    return [
        {"kind": kind, "precision": precision, "library": library, "cases": count, "calls": report.calls[key]}
        for key, count in sorted(report.cases.items())
        for kind, precision, library in [key]
    ]


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def whole_space() -> Space:
    """Return all names that this machine supports."""
    precisions = ("ieee",) if SIMULATOR else (*PRECISIONS, FP32_AUTO)
    # Stages of the FP32 ladder only: stages are drawn together with "ieee", and stored digests depend on their order.
    names = tuple(stage.name for stage in stages() if IEEE in stage.precisions)
    return Space(tuple(sorted(found_libraries())), precisions, names)


# Stages that have another name since digests were made with them; their results have the same bits.
RENAMED = {"lean_loop": "snake_order"}


def read_digests(path: Path) -> tuple[dict[str, Any], Space, dict[str, str]]:
    """Read a file of digests: the seed and numbers of its cases, the space they were drawn from, and the digests.

    Newer stages are not in that space, so that the same cases are drawn.
    """
    read = json.loads(path.read_text())
    space = Space(*(tuple(read["space"][one.name]) for one in fields(Space)))
    space = replace(space, stages=tuple(RENAMED.get(name, name) for name in space.stages))
    return {name: read[name] for name in ("seed", "first", "cases")}, space, read["digests"]


def run_all(options: Options) -> Report | None:
    """Run every worker in its own process; None if one died, after reporting the cases that were running."""
    with tempfile.TemporaryDirectory() as progress:
        told = replace(options, progress=progress)
        with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
            futures = [pool.submit(work, told, worker) for worker in range(options.jobs)]
            try:
                return merged([future.result(timeout=options.seconds + 120) for future in futures])
            except (BrokenProcessPool, TimeoutError) as error:
                print(f"a worker ended or hangs: {error!r}; the workers' last cases were")
                for file in sorted(Path(progress).iterdir()):
                    print(f"worker {file.name}:", file.read_text())
                for process in multiprocessing.active_children():
                    process.kill()
                return None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--cases", type=int, default=0, help="how many; by default, as many as the time allows")
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--precisions", type=lambda text: tuple(text.split(",")), help="by default, all")
    parser.add_argument("--replay", metavar="SEED:NUMBER", help="run one case in this process, and show it")
    parser.add_argument("--out", type=Path, help="directory for fuzz.csv and fuzz.json: counts, and their command")
    parser.add_argument("--digests", type=Path, help="file for the digests of all results; goes with --cases")
    parser.add_argument("--compare", type=Path, help="file of digests: run its cases, which must give the same bits")
    options = parser.parse_args(argv)
    if options.digests and not options.cases:
        parser.error("--digests needs --cases: which cases a time limit allows depends on the machine")
    space = whole_space()
    if options.precisions:
        space = replace(space, precisions=options.precisions)
    if options.replay:
        seed, number = map(int, options.replay.split(":"))
        case = drawn(seed, number, space)
        print(case)
        outcome = run(case, found_libraries())
        print(*(outcome.wrong or ["correct"]), sep="\n")
        return bool(outcome.wrong)
    told, known = {"seed": options.seed, "first": options.first, "cases": options.cases}, dict[str, str]()
    if options.compare:
        told, space, known = read_digests(options.compare)

    begin = time.monotonic()
    report = run_all(Options(**told, seconds=options.seconds, jobs=options.jobs, space=space))
    if report is None:
        return 1
    seconds = time.monotonic() - begin
    for number, wrong in report.failures:
        print(f"{told['seed']}:{number}: {wrong}")
    digests = {f"{number}:{i}": digest for number, i, digest in report.digests}
    other = [place for place in known if digests.get(place) != known[place]]
    if options.compare:
        print(f"{len(known)} digests compared, {len(other)} differ or were not computed: {other[:20]}")
    cases, calls = sum(report.cases.values()), sum(report.calls.values())
    if options.digests:
        made = {**told, "space": asdict(space), "digests": digests}
        options.digests.write_text(json.dumps(made, indent=0) + "\n")
    if options.out and cases:
        options.out.mkdir(parents=True, exist_ok=True)
        write_rows(options.out / "fuzz.csv", table(report))
        summary = {"command": " ".join(["python", *sys.argv]), **told, "cases": cases, "calls": calls}
        summary |= {"wrong": len(report.failures), "seconds": round(seconds, 1)}
        (options.out / "fuzz.json").write_text(json.dumps(summary, indent=2) + "\n")
    for position, name in enumerate(("kind", "precision", "library")):
        totals: Counter[str] = Counter()
        for key, count in report.cases.items():
            totals[key[position]] += count
        print(f"{name}:", ", ".join(f"{value} {count}" for value, count in totals.most_common()))
    print(f"{cases} cases, {calls} calls, {len(report.failures)} wrong, in {seconds:.0f} s")
    return bool(report.failures or other or not cases)


if __name__ == "__main__":
    sys.exit(main())
