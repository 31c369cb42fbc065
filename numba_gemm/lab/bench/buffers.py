"""Operands of a measurement: allocated once and shared by all contenders without a copy.

CuPy allocates if it can be imported, else PyTorch, else Numba; in the simulator, NumPy. The other libraries get views
of the same memory.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from cuda.bindings import driver

from numba_gemm.arrays.streams import cupy_stream
from numba_gemm.device.units import FLOAT32_BYTES
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.runtime.compiler import Cubin
from numba_gemm.runtime.device import current_device
from numba_gemm.runtime.driver import device_scope, launch_kernel, load_kernel
from numba_gemm.runtime.matrix import Matrix
from numba_gemm.runtime.timing import Call

Extent = tuple[int, int, int]


class HostLibrary:
    """NumPy: arrays of the simulator, and the reference's arithmetic if no GPU library is installed."""

    name = "numpy"
    xp: Any = np  # a module with NumPy's functions

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

    def address(self, array: Any) -> int:
        return int(array.ctypes.data)

    # Arithmetic of the reference. `computable` returns an array with Python's operators.
    def computable(self, array: Any) -> Any:
        return array

    def float64(self, array: Any) -> Any:
        return array.astype(np.float64)

    def float32(self, array: Any) -> Any:
        return array.astype(np.float32)

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

    def address(self, array: Any) -> int:
        return int(array.__cuda_array_interface__["data"][0])

    @contextmanager
    def stream(self) -> Iterator[int]:
        from numba import cuda

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

    def __init__(self, cupy: Any) -> None:
        self.xp = cupy

    def from_host(self, host: np.ndarray) -> Any:
        return self.xp.asarray(host)

    def to_host(self, array: Any) -> np.ndarray:
        return self.xp.asnumpy(array)

    def release(self) -> None:
        self.xp.get_default_memory_pool().free_all_blocks()


class TorchLibrary(DeviceLibrary):
    """PyTorch CUDA tensors."""

    name = "torch"

    def __init__(self, torch: Any, device: str = "cuda") -> None:
        self.torch, self.device = torch, device

    def from_host(self, host: np.ndarray) -> Any:
        return self.torch.from_numpy(host).to(self.device, copy=True)

    def to_host(self, array: Any) -> np.ndarray:
        return array.cpu().numpy()

    def empty(self, rows: int, cols: int) -> Any:
        return self.torch.empty((rows, cols), dtype=self.torch.float32, device=self.device)

    def fill_nan(self, array: Any) -> None:
        array.fill_(math.nan)

    def float64(self, array: Any) -> Any:
        return array.double()

    def float32(self, array: Any) -> Any:
        return array.float()

    def median(self, array: Any) -> float:
        return float(array.median())

    def release(self) -> None:
        self.torch.cuda.empty_cache()


class NumbaLibrary(DeviceLibrary):
    """Numba device arrays; the reference is computed on the host."""

    name = "numba"

    def __init__(self, cuda: Any) -> None:
        self.cuda = cuda

    def from_host(self, host: np.ndarray) -> Any:
        return self.cuda.to_device(host)

    def to_host(self, array: Any) -> np.ndarray:
        return array if isinstance(array, np.ndarray) else array.copy_to_host()  # `computable` returns host arrays

    def empty(self, rows: int, cols: int) -> Any:
        return self.cuda.device_array((rows, cols), np.float32)

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
    from numba import cuda

    return NumbaLibrary(cuda)


@contextmanager
def on_device() -> Iterator[tuple[HostLibrary, int]]:
    """Yield the library that allocates on the current GPU, and the handle of a stream current in all libraries."""
    library = choose_library(simulated=False)
    with device_scope(current_device()), library.stream() as stream:
        yield library, stream


def launcher(cubin: Cubin, device: int, grid: Extent, block: Extent, words: Sequence[float], shared: int = 0) -> Call:
    """Return the call that launches a kernel which is no stage's; its outputs must outlive the call."""
    kernel = driver.CUfunction(load_kernel(cubin, device, shared))
    return lambda stream: launch_kernel(kernel, grid, block, shared, stream, words)


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

        def matrix(array: Any) -> Matrix:
            rows, cols = (int(extent) for extent in array.shape)
            strides = {"row_stride": FLOAT32_BYTES * cols, "col_stride": FLOAT32_BYTES}
            return Matrix(self.library.address(array), rows, cols, **strides, device=current_device(), owner=array)

        return matrix(self.a), matrix(self.b), matrix(self.c)

    def torch_views(self, torch: Any) -> tuple[Any, ...]:
        """A, B and C as PyTorch tensors that share their memory."""
        arrays = (self.a, self.b, self.c)
        return arrays if self.library.name == "torch" else tuple(torch.as_tensor(x, device="cuda") for x in arrays)

    def cupy_views(self, cupy: Any) -> tuple[Any, ...]:
        """A, B and C as CuPy arrays that share their memory."""
        arrays = (self.a, self.b, self.c)
        return arrays if self.library.name == "cupy" else tuple(cupy.asarray(x) for x in arrays)

    def host_copies(self) -> tuple[np.ndarray, np.ndarray]:
        """Copy A and B to the host."""
        return self.library.to_host(self.a), self.library.to_host(self.b)


def operand_bytes(shape: Shape) -> int:
    """Total size of A, B and C in bytes."""
    m, n, k = shape
    return FLOAT32_BYTES * (m * k + k * n + m * n)
