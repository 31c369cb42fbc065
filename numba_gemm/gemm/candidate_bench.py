"""Memory like the operands of a product, in which candidates for it are checked and timed."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from cuda.bindings import driver

from .. import arrays
from ..arrays import ArrayKind, Operand
from ..device.units import FLOAT32_BYTES, ceil_div
from ..runtime import device as devices
from ..runtime import workspace as workspaces
from ..runtime.driver import call
from ..runtime.matrix import at_address
from ..runtime.timing import time_interleaved
from ..runtime.workspace import Workspace
from ..simulator.switch import SIMULATOR
from .heuristics import Choice
from .launch_choice import launch_choice
from .request import Part, Request

__all__ = ["SPAN_US", "CandidateBench"]

SPAN_US = 2000.0  # that calls are repeated for
BOUNDARY = 256  # bytes; scratch memory has the operands' alignment up to this one
COMPARED_BYTES, PIECES = 1 << 26, 64  # of a C that are compared, and in how many pieces if it is larger
PERIOD = 1_048_583  # elements after which scratch contents repeat: a prime, so that rows do not look alike


class Scratch(ArrayKind):
    """Memory of an operand's layout on the current device, in the simulator on the host; contents are undefined."""

    name = "scratch memory"

    def __init__(self, like: Operand, stream: int, memory: ExitStack) -> None:
        far = [(extent - 1) * step for extent, step in zip(like.shape, like.strides)]
        low, high = sum(min(step, 0) for step in far), sum(max(step, 0) for step in far) + FLOAT32_BYTES
        self.stream, self.size = stream, ceil_div(high - low + BOUNDARY, FLOAT32_BYTES) * FLOAT32_BYTES
        self.host = np.empty(self.size // FLOAT32_BYTES if SIMULATOR else 0, np.float32)
        self.base = self.host.ctypes.data if SIMULATOR else allocated(self.size, memory)
        first = self.base - low
        self.operand = replace(like, kind=self, array=self, pointer=first + (like.pointer - first) % BOUNDARY)

    def view(self, operand: Operand, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """Return the matrix that the launcher takes."""
        return at_address(self, pointer, shape, strides, dtype=operand.dtype) if SIMULATOR else self

    def fill(self, values: np.ndarray) -> None:
        """Overwrite all of it with float32 values, over and over; of 16-bit dtypes, with the values rounded to them."""
        if self.operand.dtype == "float16":
            values = np.tile(values.astype(np.float16), 2)  # twice, for whole words
        elif self.operand.dtype == "bfloat16":
            values = np.tile((values.view(np.uint32) >> 16).astype(np.uint16), 2)
        values = values.view(np.float32)
        if SIMULATOR:
            self.host[:] = np.resize(values, self.host.shape)
            return
        filled = min(values.nbytes, self.size)
        call(driver.cuMemcpyHtoDAsync, self.base, values.ctypes.data, filled, self.stream)
        while filled < self.size:
            more = min(filled, self.size - filled)
            call(driver.cuMemcpyDtoDAsync, self.base + filled, self.base, more, self.stream)
            filled += more
        call(driver.cuStreamSynchronize, self.stream)  # the values may go

    def read(self) -> np.ndarray:
        """Return the contents or, if these are large, pieces of them, from the first to the last."""
        if SIMULATOR:
            return self.host.copy()
        count = 1 if self.size <= COMPARED_BYTES else PIECES
        pieces = np.empty((count, min(self.size, COMPARED_BYTES) // count // FLOAT32_BYTES), np.float32)
        starts = np.linspace(0, self.size // FLOAT32_BYTES - pieces.shape[1], count, dtype=np.int64)
        for piece, start in zip(pieces, starts.tolist()):
            call(
                driver.cuMemcpyDtoHAsync,
                piece.ctypes.data,
                self.base + FLOAT32_BYTES * start,
                piece.nbytes,
                self.stream,
            )
        call(driver.cuStreamSynchronize, self.stream)
        return pieces


class CandidateBench:
    """Operands like those of a request, and a workspace, on the current device, for as long as `memory` is open."""

    def __init__(self, request: Request, memory: ExitStack) -> None:
        self.device, self.stream, self.memory = request.device, 0, memory
        if not SIMULATOR:
            self.stream = int(call(driver.cuStreamCreate, int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))
            memory.callback(call, driver.cuStreamDestroy, self.stream)
        kind, strides = request.a.kind, arrays.row_major(request.shape, FLOAT32_BYTES)
        result = request.out or Operand("out", kind, None, "float32", request.shape, strides, 0, self.device)
        given = [request.a, request.b, *request.vectors, result]
        *self.inputs, self.c = (
            Scratch(kind.placed(one) if one.array is not None else one, self.stream, memory) for one in given
        )
        a, b, *vectors = (one.operand for one in self.inputs)
        self.part: Part = next(request.parts(a, b, self.c.operand, vectors))
        self.workspace: Workspace | None = None
        self.expected: np.ndarray | None = None

    def fill(self, draw: Callable[[np.random.Generator, int], np.ndarray]) -> None:
        """Overwrite all operands but C with other contents."""
        for seed, one in enumerate(self.inputs):
            one.fill(draw(np.random.default_rng(seed), PERIOD).astype(np.float32))

    def run(self, choice: Choice, stream: int) -> None:
        """Enqueue the product."""
        part = self.part
        operands = 1.0, part.a, part.b, 0.0, part.c
        launch_choice(part.product, choice, *operands, stream, part.vectors, self.workspace)

    def checked(self, choice: Choice) -> float | None:
        """Return about how many seconds a product takes; None, with a warning, if it cannot run or is wrong."""
        stage, config = choice.stage, choice.config
        named = f"configuration {config.name} of stage {stage.name}, {choice.partition}, is not measured"
        try:
            self._prepare(choice)
        except RuntimeError as error:
            warnings.warn(f"{named}: {error}", RuntimeWarning, stacklevel=3)
            return None
        if self.expected is None:
            self.fill(lambda rng, count: rng.integers(-2, 3, count))
        self.c.fill(np.full(PERIOD, np.nan, np.float32))
        self.run(choice, self.stream)
        got = self.c.read()
        if self.expected is None:
            self.expected = got
        if not np.array_equal(got, self.expected, equal_nan=True):
            warnings.warn(f"{named}: its result differs from the first candidate's", RuntimeWarning, stacklevel=3)
            return None
        begin = time.perf_counter()
        if not SIMULATOR:
            self.run(choice, self.stream)
            call(driver.cuStreamSynchronize, self.stream)
        return time.perf_counter() - begin

    def _prepare(self, choice: Choice) -> None:
        """Compile and load the kernels of a choice."""
        device, config = devices.get_device(self.device), choice.config
        oriented = choice.oriented(self.part.product)
        device.check(choice.stage, config, choice.stage.kernel(config, oriented, choice.precision))
        if not SIMULATOR:
            for step in choice.launches(self.part.product, device.properties.gpu).steps:
                device.load(step.kernel)

    def make_room(self, choices: Sequence[Choice]) -> None:
        """Compile all kernels in parallel; allocate a workspace, so that none uses the stream's, never freed."""
        if SIMULATOR:
            return
        gpu = devices.device_properties(self.device).gpu
        launches = [choice.launches(self.part.product, gpu) for choice in choices]
        with suppress(RuntimeError):  # of a candidate that cannot be compiled, which is then left out
            devices.get_device(self.device).load_all([step.kernel for one in launches for step in one.steps])
        size, counters = max(one.scratch_bytes for one in launches), max(one.counters for one in launches)
        if not (size or counters):
            return
        place = allocated(max(workspaces.total_bytes(size, counters), 1), self.memory)
        self.workspace = Workspace(place, size, counters)
        workspaces.clear(self.workspace.words[1], counters, self.stream)

    def timed(self, choices: Sequence[Choice], rounds: int) -> list[float]:
        """Return the median microseconds of a product per choice."""
        self.fill(lambda rng, count: rng.uniform(-1, 1, count))
        runs = {str(i): partial(self.run, choice) for i, choice in enumerate(choices)}
        samples = time_interleaved(runs, stream=self.stream, rounds=rounds, min_span_us=SPAN_US)
        return [samples[name].median for name in runs]


def allocated(size: int, memory: ExitStack) -> int:
    """Allocate memory on the current device, freed with `memory`; return its address."""
    pointer = int(call(driver.cuMemAlloc, size))
    memory.callback(call, driver.cuMemFree, pointer)
    return pointer
