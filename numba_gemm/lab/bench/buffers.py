"""Operands of a measurement: allocated once and shared by all contenders without a copy.

CuPy allocates if it can be imported, else PyTorch, else Numba; in the simulator, NumPy. The other libraries get views
of the same memory. Results are verified against float64, element by element, before anything is timed.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda

from numba_gemm.arrays import describe
from numba_gemm.arrays.streams import cupy_stream
from numba_gemm.device.units import FLOAT32_BYTES
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.models import accuracy
from numba_gemm.runtime.device import current_device, synchronize
from numba_gemm.runtime.driver import device_scope
from numba_gemm.runtime.matrix import Matrix
from numba_gemm.runtime.timing import Call, elapsed


class HostLibrary:
    """NumPy: arrays of the simulator, and the reference's arithmetic if no GPU library is installed."""

    name = "numpy"

    def __init__(self, xp: Any = np) -> None:
        self.xp = xp  # a module with NumPy's functions

    def from_host(self, host: np.ndarray) -> Any:
        return host.copy()

    def to_host(self, array: Any) -> np.ndarray:
        return np.asarray(array)

    def copy_from_host(self, host: np.ndarray, array: Any) -> None:
        array[...] = self.from_host(host)

    def empty(self, rows: int, cols: int) -> Any:
        return self.xp.empty((rows, cols), np.float32)

    def fill_nan(self, array: Any) -> None:
        array.fill(np.nan)

    # Arithmetic of the reference. `computable` returns an array with Python's operators.
    def computable(self, array: Any) -> Any:
        return array

    def float64(self, array: Any) -> Any:
        return self.xp.asarray(array, dtype=self.xp.float64)

    def float32(self, array: Any) -> Any:
        return self.xp.asarray(array, dtype=self.xp.float32)

    def median(self, array: Any) -> float:
        return float(self.xp.median(array))

    @contextmanager
    def stream(self) -> Iterator[int]:
        """Make a stream current in every available library, and yield its handle."""
        yield 0

    def release(self) -> None:
        """Return freed memory to the device."""


class DeviceLibrary(HostLibrary):
    """Common part of the GPU libraries."""

    @contextmanager
    def stream(self) -> Iterator[int]:
        stream = cuda.stream()
        handle = int(stream)
        with ExitStack() as current:
            if (cupy := optional("cupy")) is not None:
                current.enter_context(cupy_stream(cupy, handle))
            if (torch := optional("torch")) is not None:
                current.enter_context(torch.cuda.stream(torch.cuda.ExternalStream(handle)))
            yield handle
            stream.synchronize()


class CupyLibrary(DeviceLibrary):
    """CuPy arrays."""

    name = "cupy"

    def from_host(self, host: np.ndarray) -> Any:
        return self.xp.asarray(host)

    def to_host(self, array: Any) -> np.ndarray:
        return self.xp.asnumpy(array)

    def release(self) -> None:
        self.xp.get_default_memory_pool().free_all_blocks()


class TorchLibrary(DeviceLibrary):
    """PyTorch CUDA tensors."""

    name = "torch"

    def from_host(self, host: np.ndarray) -> Any:
        return self.xp.from_numpy(host).to("cuda", copy=True)

    def to_host(self, array: Any) -> np.ndarray:
        return array.cpu().numpy()

    def empty(self, rows: int, cols: int) -> Any:
        return self.xp.empty((rows, cols), dtype=self.xp.float32, device="cuda")

    def fill_nan(self, array: Any) -> None:
        array.fill_(math.nan)

    def release(self) -> None:
        self.xp.cuda.empty_cache()


class NumbaLibrary(DeviceLibrary):
    """Numba device arrays; the reference is computed on the host."""

    name = "numba"

    def from_host(self, host: np.ndarray) -> Any:
        return cuda.to_device(host)

    def to_host(self, array: Any) -> np.ndarray:
        return array if isinstance(array, np.ndarray) else array.copy_to_host()  # `computable` returns host arrays

    def empty(self, rows: int, cols: int) -> Any:
        return cuda.device_array((rows, cols), np.float32)

    def copy_from_host(self, host: np.ndarray, array: Any) -> None:
        array.copy_to_device(host)

    def fill_nan(self, array: Any) -> None:
        array.copy_to_device(np.full(array.shape, np.nan, np.float32))

    def computable(self, array: Any) -> Any:
        return array.copy_to_host()


@functools.cache
def optional(module: str) -> Any:
    """Import a module; None if that fails or if it finds no GPU."""
    if module == "cupy":
        os.environ["CUPY_TF32"] = "0"  # read when CuPy multiplies: the baseline is FP32
    try:
        found = importlib.import_module(module)
        usable = found.cuda.is_available()
    except Exception:  # a broken installation of an optional library must not stop the rest
        return None
    return found if usable else None


def choose_library(simulated: bool) -> HostLibrary:
    """Return the library that allocates: NumPy in the simulator, else the first of CuPy, PyTorch and Numba."""
    if simulated:
        return HostLibrary()
    if (cupy := optional("cupy")) is not None:
        return CupyLibrary(cupy)
    if (torch := optional("torch")) is not None:
        return TorchLibrary(torch)
    return NumbaLibrary()


@contextmanager
def on_device() -> Iterator[tuple[HostLibrary, int]]:
    """Yield the library that allocates on the current GPU, and the handle of a stream current in all libraries."""
    library = choose_library(simulated=False)
    with device_scope(current_device()), library.stream() as stream:
        yield library, stream


def uniform(rng: np.random.Generator, rows: int, cols: int) -> np.ndarray:
    """Draw a float32 matrix of uniform values in [-1, 1)."""
    values = rng.random((rows, cols), dtype=np.float32)
    values *= np.float32(2)
    values -= np.float32(1)
    return values


# Values decide how many bits change, and with them power and speed.
NORMAL, UNIFORM, POSITIVE = "standard normal", "uniform in [-1, 1)", "uniform in [0, 1)"
DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    NORMAL: lambda rng, rows, cols: rng.standard_normal((rows, cols), dtype=np.float32),
    UNIFORM: uniform,
    POSITIVE: lambda rng, rows, cols: rng.random((rows, cols), dtype=np.float32),
}


@dataclass(frozen=True)
class DeviceBuffers:
    """One set of row-major operands, and views of them for each contender."""

    library: HostLibrary
    shape: Shape
    a: Any
    b: Any
    c: Any

    @classmethod
    def random(
        cls, library: HostLibrary, shape: Shape, seed: int, index: int = 0, distribution: str = NORMAL
    ) -> DeviceBuffers:
        """Create operands of a distribution from a seed, a shape and an index; C is filled with NaN."""
        rng, draw = np.random.default_rng([seed, *shape, index]), DISTRIBUTIONS[distribution]
        m, n, k = shape
        c = library.empty(m, n)
        library.fill_nan(c)
        a = library.from_host(draw(rng, m, k))
        b = library.from_host(draw(rng, k, n))
        return cls(library, shape, a, b, c)

    @functools.cached_property
    def matrices(self) -> tuple[Matrix, Matrix, Matrix]:
        """A, B and C as arguments of the launcher."""
        found = (describe(name, array, None) for name, array in zip("abc", (self.a, self.b, self.c)))
        a, b, c = (one.matrix(current_device(), one.pointer, one.shape, one.strides) for one in found)
        return a, b, c

    def views(self, library: Any) -> tuple[Any, ...]:
        """A, B and C as arrays of CuPy or PyTorch that share their memory."""
        arrays = (self.a, self.b, self.c)
        if self.library.xp is library:
            return arrays
        convert = library.asarray if library.__name__ == "cupy" else functools.partial(library.as_tensor, device="cuda")
        return tuple(map(convert, arrays))


def operand_bytes(shape: Shape) -> int:
    """Total size of A, B and C in bytes."""
    m, n, k = shape
    return FLOAT32_BYTES * (m * k + k * n + m * n)


PANEL_ELEMENTS = 1 << 25  # 256 MiB of float64 at a time


@dataclass(frozen=True)
class Panel:
    """Some rows of the reference: the float64 result and the scale of its errors."""

    rows: slice
    expected: Any
    scale: Any


class Reference:
    """Float64 reference of a set of operands, shared by all contenders of a shape.

    It is computed where the operands are (FP64 cuBLAS, through the library that allocated them), in panels of rows, to
    save memory. The scale is kept in float32: it is a sum of positive terms, so rounding hardly changes it.
    """

    def __init__(self, library: HostLibrary, a: Any, b: Any) -> None:
        self.library = library
        self.k = int(a.shape[1])
        self.panels = tuple(self._panels(library.computable(a), library.float64(library.computable(b))))

    def _panels(self, a: Any, b: Any) -> Iterator[Panel]:
        library, m = self.library, int(a.shape[0])
        abs_b = abs(b)
        step = max(1, PANEL_ELEMENTS // max(map(int, b.shape)))
        for start in range(0, m, step):
            rows = slice(start, min(m, start + step))
            wide = library.float64(a[rows])
            yield Panel(rows, wide @ b, library.float32(abs(wide) @ abs_b))

    def judge(self, c: Any, precision: str) -> tuple[accuracy.Comparison, float, float]:
        """Judge the result of a precision: its worst element, and median and maximum of the errors over the scale.

        With several panels, the median is that of the panels' medians; a panel has up to 2^25 elements of C or of A.
        """
        product, verdicts, medians, largest = self.library.computable(c), [], [], []
        for panel in self.panels:
            found = product[panel.rows]
            with np.errstate(invalid="ignore", divide="ignore"):
                error = abs(self.library.float64(found) - panel.expected) / panel.scale
            medians.append(self.library.median(error))
            largest.append(float(error.max()))
            # The first NaN or, without any, the largest error: argmax of all three libraries agrees on both. Its row is
            # judged on the host, by the definition of the bound that `models` has.
            row = int(error.argmax()) // int(error.shape[1])
            mine, expected, scale = (
                self.library.to_host(x[row : row + 1]) for x in (found, panel.expected, panel.scale)
            )
            judged = accuracy.compare(mine, expected, scale.astype(np.float64), self.k, precision)
            verdicts.append(dataclasses.replace(judged, row=panel.rows.start + row))
        worst = max(verdicts, key=lambda verdict: verdict.in_bounds)
        return worst, float(np.median(medians)), max(largest)


def on_stream(call: Callable[[], object]) -> Call:
    """Return a call that ignores the stream, which is current already."""
    return lambda _stream: call()


def call_on_nan(library: HostLibrary, out: Any, call: Call, stream: int) -> float:
    """Call once on an output filled with NaN; return the seconds until its result is there."""
    library.fill_nan(out)
    return elapsed(functools.partial(call, stream), functools.partial(synchronize, stream))
