"""The launcher: the one place that computes grids and blocks, compiles and keeps kernels, and launches them.

It knows addresses, streams and devices, but no array library, and does not choose stages. On the hardware a kernel is
compiled to a cubin by `device.internals` (the same way as without a GPU), loaded once a device, and launched through
the driver with its arguments packed here. In the simulator the scheduler runs the same kernel over NumPy arrays.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from cuda.bindings import driver

from .device import internals, scheduler
from .device.probe import gpu_count
from .device.switch import SIMULATOR
from .driver import GpuUnavailable, call, device_scope, primary_context, start
from .ladder.stage import Stage, TileConfig
from .models.roofline import FLOAT32_BYTES

if not SIMULATOR:
    from .device.matrix import kernel_signature

__all__ = [
    "CompiledKernel",
    "DeviceProperties",
    "GpuUnavailable",
    "Matrix",
    "aligned_operands",
    "current_device",
    "device_count",
    "device_properties",
    "launch",
    "prepare",
    "synchronize",
]

MAX_GRID_Y = 65535
MAX_K = 1 << 30
STATIC_SHARED_LIMIT = 48 * 1024
VECTOR_BYTES = 16


@dataclass(frozen=True, slots=True)
class Matrix:
    """Where a float32 matrix lies.

    Attributes
    ----------
    pointer : int
        Address of element (0, 0).
    rows, cols : int
        Extents in elements.
    row_stride, col_stride : int
        Bytes from an element to the next row's and to the next column's; may be negative or 0.
    device : int
        Ordinal of the device whose memory it is.
    owner : object
        Keeps the memory alive; in the simulator, the 2-D NumPy array itself.
    """

    pointer: int
    rows: int
    cols: int
    row_stride: int
    col_stride: int
    device: int
    owner: Any

    @property
    def aligned(self) -> bool:
        """Whether 128-bit accesses reach every element: neighbours in a row, aligned rows, whole vectors."""
        return (
            (self.col_stride == FLOAT32_BYTES or self.cols == 0)
            and self.pointer % VECTOR_BYTES == 0
            and self.row_stride % VECTOR_BYTES == 0  # also of one row or none: copies outside have addresses too
            and self.cols % 4 == 0
        )

    def take_rows(self, begin: int, end: int) -> Matrix:
        """The matrix of some of the rows."""
        owner = self.owner[begin:end] if SIMULATOR else self.owner
        return replace(self, pointer=self.pointer + begin * self.row_stride, rows=end - begin, owner=owner)

    def take_cols(self, begin: int, end: int) -> Matrix:
        """The matrix of some of the columns."""
        owner = self.owner[:, begin:end] if SIMULATOR else self.owner
        return replace(self, pointer=self.pointer + begin * self.col_stride, cols=end - begin, owner=owner)

    @property
    def packed(self) -> tuple[int, int, int, int, int]:
        """What a kernel is given of it."""
        return (self.pointer, self.rows, self.cols, self.row_stride, self.col_stride)


def aligned_operands(a: Matrix, b: Matrix, c: Matrix) -> bool:
    """Whether the variant of a kernel that is built for aligned operands may run."""
    return a.aligned and b.aligned and c.aligned


@dataclass(frozen=True)
class DeviceProperties:
    """What the launcher, the selection and the benchmark need to know of a device; in the simulator, of the H200."""

    name: str
    cc: tuple[int, int]
    sm_count: int
    clock_hz: float
    l2_bytes: int
    max_shared_per_block: int
    memory_bandwidth: float


SIMULATED_DEVICE = DeviceProperties("simulator", (9, 0), 132, 1.98e9, 60 << 20, 227 << 10, 4.8e12)


@cache
def device_properties(device: int = 0) -> DeviceProperties:
    """Properties of a device.

    Clock in Hz (the highest that the SMs run at), L2 cache and shared memory in bytes, memory bandwidth in byte/s
    (bus width times clock times two, the theoretical one; 0 where the driver does not tell).
    """
    if SIMULATOR:
        return SIMULATED_DEVICE
    start()
    handle = call(driver.cuDeviceGet, device)

    def attribute(name: str) -> int:
        return int(
            call(driver.cuDeviceGetAttribute, getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), handle)
        )

    return DeviceProperties(
        name=call(driver.cuDeviceGetName, 128, handle).split(b"\0")[0].decode(),
        cc=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        sm_count=attribute("MULTIPROCESSOR_COUNT"),
        clock_hz=attribute("CLOCK_RATE") * 1e3,
        l2_bytes=attribute("L2_CACHE_SIZE"),
        max_shared_per_block=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        memory_bandwidth=2.0 * attribute("MEMORY_CLOCK_RATE") * 1e3 * attribute("GLOBAL_MEMORY_BUS_WIDTH") / 8,
    )


def device_count() -> int:
    """How many devices can be launched on; the simulator is one."""
    return 1 if SIMULATOR else gpu_count()


def current_device() -> int:
    """Ordinal of the device that is current in this thread, 0 if none is yet.

    Raises
    ------
    GpuUnavailable
        if there is no GPU and this is not the simulator.
    """
    if SIMULATOR:
        return 0
    start()
    if not int(call(driver.cuCtxGetCurrent)):
        return 0
    return int(call(driver.cuCtxGetDevice))


def synchronize(stream: int = 0) -> None:
    """Wait for all work on a stream of the current device."""
    if not SIMULATOR:
        call(driver.cuStreamSynchronize, stream)


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel ready to launch on one device, and what it uses.

    ``registers`` are 32-bit registers a thread, ``shared`` bytes of shared memory a block (static and dynamic),
    ``local`` bytes of local memory a thread, and ``compile_s`` the seconds that compiling and loading took. In the
    simulator they are 0.
    """

    kernel: Any
    registers: int = 0
    shared: int = 0
    local: int = 0
    compile_s: float = 0.0


class _Once:
    """Values made once a key, by whichever thread comes first; threads with other keys do not wait."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._values: dict[Any, Any] = {}
        self._locks: dict[Any, threading.Lock] = {}
        self._lock = threading.Lock()

    def __call__(self, *key: Any) -> Any:
        if key in self._values:
            return self._values[key]
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._values:
                self._values[key] = self._make(*key)
            return self._values[key]


def compile_stage(stage: Stage, config: TileConfig, aligned: bool, cc: tuple[int, int]) -> internals.Cubin:
    """Compile a stage for a compute capability; needs no GPU."""
    return internals.compile_cubin(
        stage.build(config, aligned and stage.vectorized),
        kernel_signature(aligned),
        cc,
        name=f"{stage.name}_{config.name}{'' if aligned else '_any'}",
    )


_cubin = _Once(compile_stage)


def _prepare(stage: Stage, config: TileConfig, aligned: bool, device: int) -> CompiledKernel:
    properties = device_properties(device)
    if properties.cc < stage.min_cc:
        raise RuntimeError(
            f"stage {stage.name!r} needs compute capability {stage.min_cc[0]}.{stage.min_cc[1]}, but device {device} "
            f"({properties.name}) has {properties.cc[0]}.{properties.cc[1]}; choose another stage"
        )
    if config.dynamic_shared > properties.max_shared_per_block:
        raise RuntimeError(
            f"configuration {config.name} of stage {stage.name!r} needs {config.dynamic_shared} bytes of shared memory "
            f"a block, but device {device} ({properties.name}) has {properties.max_shared_per_block}; choose a smaller "
            "configuration"
        )
    if SIMULATOR:
        return CompiledKernel(stage.build(config, aligned and stage.vectorized))
    begin = time.perf_counter()
    cubin = _cubin(stage, config, aligned, properties.cc)
    with device_scope(device):
        library = call(driver.cuLibraryLoadData, cubin.code, [], [], 0, [], [], 0)
        handle = call(driver.cuLibraryGetKernel, library, cubin.name.encode())
        if config.dynamic_shared > STATIC_SHARED_LIMIT:
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call(driver.cuKernelSetAttribute, limit, config.dynamic_shared, handle, call(driver.cuDeviceGet, device))
    shared = cubin.shared + config.dynamic_shared
    return CompiledKernel(
        driver.CUfunction(int(handle)), cubin.registers, shared, cubin.local, time.perf_counter() - begin
    )


_prepared = _Once(_prepare)


def prepare(stage: Stage, config: TileConfig, aligned: bool, device: int = 0) -> CompiledKernel:
    """Compile and load a stage now, if that has not been done; safe from several threads.

    Raises
    ------
    RuntimeError
        if the device's compute capability or shared memory is too small.
    """
    return _prepared(stage, config, aligned, device)


def _cuts(extent: int, most: int) -> list[tuple[int, int]]:
    """An extent in pieces of at most so many; one empty piece if it is 0."""
    return [(begin, min(begin + most, extent)) for begin in range(0, max(extent, 1), most)]


def _slabs(
    stage: Stage, config: TileConfig, a: Matrix, b: Matrix, beta: float, c: Matrix
) -> Iterator[tuple[Matrix, Matrix, float, Matrix]]:
    """The product in pieces that one launch can do.

    A grid's y axis ends at 65,535 blocks, and kernels count k in 32 bits. The first piece of a sum over k takes beta,
    the others add to it.
    """
    tile = config.BN if stage.rows_along_x else config.BM
    if a.cols <= MAX_K and (c.cols if stage.rows_along_x else c.rows) <= MAX_GRID_Y * tile:
        yield a, b, beta, c
        return
    for inner in _cuts(a.cols, MAX_K):
        a_part, b_part = a.take_cols(*inner), b.take_rows(*inner)
        for outer in _cuts(c.cols if stage.rows_along_x else c.rows, MAX_GRID_Y * tile):
            if stage.rows_along_x:
                yield a_part, b_part.take_cols(*outer), beta, c.take_cols(*outer)
            else:
                yield a_part.take_rows(*outer), b_part, beta, c.take_rows(*outer)
        beta = 1.0


def launch(
    stage: Stage, config: TileConfig, alpha: float, a: Matrix, b: Matrix, beta: float, c: Matrix, *, stream: int = 0
) -> None:
    """Enqueue ``C = alpha * A @ B + beta * C`` on a stream of the device that holds C.

    Parameters
    ----------
    stage, config
        What to run.
    alpha, beta : float
        Scalars, rounded to float32. C is not read if beta is 0.
    a, b, c : Matrix
        Operands of shapes (m, k), (k, n), (m, n), any of them 0; A and B of k == 0 are not read.
    stream : int
        Handle of a stream of C's device; 0 is the default stream.
    """
    if c.rows == 0 or c.cols == 0:
        return
    aligned = aligned_operands(a, b, c)
    prepared = prepare(stage, config, aligned, c.device)
    block = stage.block(config)
    scope: AbstractContextManager[None] = nullcontext() if SIMULATOR else _current(c.device)
    with scope:
        for a_slab, b_slab, beta_slab, c_slab in _slabs(stage, config, a, b, beta, c):
            grid = stage.grid(config, c_slab.rows, c_slab.cols)
            if SIMULATOR:
                operands = (np.float32(alpha), a_slab.owner, b_slab.owner, np.float32(beta_slab), c_slab.owner)
                scheduler.run(prepared.kernel, grid, block, operands, dynamic_shared=config.dynamic_shared)
            else:
                packed = internals.KernelArguments((alpha, a_slab.packed, b_slab.packed, beta_slab, c_slab.packed))
                shape = (*grid, 1, *block, 1)
                call(driver.cuLaunchKernel, prepared.kernel, *shape, config.dynamic_shared, stream, packed.address, 0)


@contextmanager
def _current(device: int) -> Iterator[None]:
    """Make a device's context current unless it is."""
    context = primary_context(device)
    if int(call(driver.cuCtxGetCurrent)) == int(context):
        yield
    else:
        with device_scope(device):
            yield
