"""The launcher: the one place that computes grids and blocks, compiles and keeps kernels, and launches them.

It knows addresses, streams and devices, but no array library, and does not choose stages. On the hardware a kernel is
compiled to a cubin by `runtime.compiler` (the same way as without a GPU), loaded once a device, and launched through
the driver with its arguments packed here. In the simulator the scheduler runs the same kernel over NumPy arrays.

What a launch needs beside addresses and scalars is worked out once for operands of one layout, and kept: a `Launch`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import prod
from typing import Any

import numpy as np
from cuda.bindings import driver

from ..device import partition
from ..device.tile_loader import covers
from ..kernels.ladder.stage import ONE, Batch, Form, Schedule, Share, Stage, TileConfig
from ..models.roofline import FLOAT32_BYTES
from ..simulator import scheduler
from ..simulator.probe import gpu_count
from ..simulator.switch import SIMULATOR
from . import compiler, kernel_cache
from . import epilogue as epilogues
from . import workspace as workspaces
from .driver import Frame, GpuUnavailable, call, device_scope, load_kernel, start
from .workspace import Workspace

if not SIMULATOR:
    from ..device.matrix import form_signature, kernel_signature

__all__ = [
    "PLAIN",
    "CompiledKernel",
    "DeviceProperties",
    "Extra",
    "GpuUnavailable",
    "Launch",
    "Matrix",
    "Simulated",
    "Vector",
    "aligned_operands",
    "bind",
    "current_device",
    "device_count",
    "device_properties",
    "exchanged",
    "form_of",
    "launch",
    "prepare",
    "share_of",
    "simulated",
    "synchronize",
    "takes_one_launch",
    "variant_of",
]

MAX_GRID_Y = 65535
MAX_K = 1 << 30
VECTOR_BYTES = 16
MAX_BOUND = 1024  # launches kept; with more layouts than that in use, some are worked out again
MAX_EPILOGUES = 256  # kernels with an epilogue that are kept; others are read from disk, or compiled, again


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
    def transposed(self) -> Matrix:
        """The same memory with rows and columns exchanged."""
        owner = self.owner.T if SIMULATOR and self.owner is not None else self.owner
        return Matrix(self.pointer, self.cols, self.rows, self.col_stride, self.row_stride, self.device, owner)

    @property
    def packed(self) -> tuple[int, int, int, int, int]:
        """What a kernel is given of it."""
        return (self.pointer, self.rows, self.cols, self.row_stride, self.col_stride)

    @property
    def span(self) -> tuple[int, int]:
        """First byte of any element and the one after the last, counted from element (0, 0); it has elements."""
        down, across = (self.rows - 1) * self.row_stride, (self.cols - 1) * self.col_stride
        return min(down, 0) + min(across, 0), max(down, 0) + max(across, 0) + FLOAT32_BYTES


def aligned_operands(a: Matrix, b: Matrix, c: Matrix) -> bool:
    """Whether the variant of a kernel that is built for aligned operands may run."""
    return a.aligned and b.aligned and c.aligned


@dataclass(frozen=True)
class Vector:
    """Where a float32 vector lies.

    Attributes
    ----------
    pointer : int
        Address of the first element.
    size, stride : int
        Elements, and bytes from one to the next, which may be negative or 0.
    owner : object
        Keeps the memory alive; in the simulator, the NumPy array itself.
    """

    pointer: int
    size: int
    stride: int
    owner: Any = field(compare=False)

    @property
    def words(self) -> tuple[int, ...]:
        """The seven words to which Numba flattens a 1-D float32 array."""
        return (0, 0, self.size, FLOAT32_BYTES, self.pointer, self.size, self.stride)


@dataclass(frozen=True)
class Extra:
    """What a product may have beside its operands; stages with a schedule take it, others do not.

    Attributes
    ----------
    batch : Batch
        How many products, and where the others' matrices lie; A, B and C are the first ones'.
    epilogue : callable or None
        Device function of an element of C on its way out, see `Form`.
    vectors : tuple of Vector
        What else that function takes.
    """

    batch: Batch = ONE
    epilogue: Callable[..., Any] | None = None
    vectors: tuple[Vector, ...] = ()


PLAIN = Extra()


def exchanged(a: Matrix, b: Matrix, c: Matrix, extra: Extra) -> tuple[Matrix, Matrix, Matrix, Extra]:
    """The same product as its transpose, C^T = B^T A^T; it has no epilogue, whose rows and columns would change."""
    batch = extra.batch
    turned = replace(extra, batch=Batch(batch.extents, batch.b, batch.a, batch.c))
    return b.transposed, a.transposed, c.transposed, turned


def form_of(config: TileConfig, a: Matrix, b: Matrix, c: Matrix, extra: Extra) -> Form:
    """The fastest kernel that may run on operands of this layout."""
    batch = extra.batch
    aligned = c.aligned and all(step % VECTOR_BYTES == 0 for step in batch.c)
    return Form(
        _mode(config, config.BM, a, batch.a),
        _mode(config, config.BN, b.transposed, batch.b),
        aligned,
        extra.epilogue,
        len(extra.vectors),
    )


def variant_of(stage: Stage, config: TileConfig, a: Matrix, b: Matrix, c: Matrix, extra: Extra = PLAIN) -> bool | Form:
    """What a stage is to be built for: a form if it has a schedule, else whether the operands are aligned."""
    return aligned_operands(a, b, c) if stage.schedule is None else form_of(config, a, b, c, extra)


def _mode(config: TileConfig, extent: int, x: Matrix, steps: tuple[int, int, int]) -> str:
    """The tile loader's mode for an operand as (mn, k), of those that cover a tile of so many rows."""
    vectors = all(value % VECTOR_BYTES == 0 for value in (x.pointer, *steps))
    along, across = x.col_stride == FLOAT32_BYTES, x.row_stride == FLOAT32_BYTES
    may = {
        "along4": along and vectors and x.row_stride % VECTOR_BYTES == 0 and x.cols % 4 == 0,
        "across4": across and vectors and x.col_stride % VECTOR_BYTES == 0 and x.rows % 4 == 0,
        "along1": along,
        "across1": across,
        "any": True,
    }
    return next(mode for mode in may if may[mode] and covers(mode, extent, config.BK, config.threads))


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
    simulator they are 0. ``resident`` is how many blocks an SM holds at once; it is only asked for stages that have a
    schedule, and 1 for others.
    """

    kernel: Any
    registers: int = 0
    shared: int = 0
    local: int = 0
    compile_s: float = 0.0
    resident: int = 1


class _Once:
    """Values made once per key, by whichever thread comes first; threads with other keys do not wait.

    Keys hold stages and configurations, which take microseconds to hash. So the very objects are looked up first, by
    their identities, which last as long as the objects that stand beside the value.

    A program may make epilogues without end, from closures over numbers that change. Of keys with an epilogue, the
    `MAX_EPILOGUES` made last are kept.
    """

    def __init__(self, make: Any) -> None:
        self._make = make
        self._known: dict[tuple[int, ...], tuple[Any, Any]] = {}
        self._values: dict[Any, Any] = {}
        self._locks: dict[Any, threading.Lock] = {}
        self._lock = threading.Lock()

    def __call__(self, *key: Any) -> Any:
        identities = tuple(map(id, key))
        if (known := self._known.get(identities)) is not None:
            return known[1]
        value = self._value(key)
        if len(self._known) >= MAX_BOUND:
            self._known.clear()
        self._known[identities] = (key, value)
        return value

    def _value(self, key: tuple[Any, ...]) -> Any:
        if (value := self._values.get(key)) is not None:  # in one step: another thread may forget it
            return value
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if (value := self._values.get(key)) is not None:
                return value
            value = self._make(*key)
            with self._lock:
                self._values[key] = value
                self._locks.pop(key, None)
                passing = [other for other in self._values if _has_epilogue(other)]
                for other in passing[:-MAX_EPILOGUES]:
                    del self._values[other]
                    self._known.clear()
            return value


def _has_epilogue(key: tuple[Any, ...]) -> bool:
    return any(isinstance(part, Form) and part.epilogue is not None for part in key)


def usual_form(stage: Stage, config: TileConfig, aligned: bool) -> bool | Form:
    """What a kernel is built for where only alignment is said: A, B and C by rows, or of any strides."""
    if stage.schedule is None:
        return aligned
    strides = (VECTOR_BYTES, FLOAT32_BYTES) if aligned else (3 * FLOAT32_BYTES, 2 * FLOAT32_BYTES)
    matrix = Matrix(0, 4, 4, *strides, 0, None)
    if SIMULATOR:
        matrix = replace(matrix, owner=np.empty((4, 4), np.float32))
    return form_of(config, matrix, matrix, matrix, PLAIN)


def compile_stage(stage: Stage, config: TileConfig, form: bool | Form, cc: tuple[int, int]) -> compiler.Cubin:
    """Compile a stage for a compute capability; needs no GPU.

    `form` says for which operands: whether they are aligned or, for a stage with a schedule, in full.

    Raises
    ------
    TypeError
        for an epilogue that does not compile, or returns no real number.
    """
    form = form if isinstance(form, Form) else usual_form(stage, config, form)
    if isinstance(form, Form):
        if form.epilogue is not None:
            epilogues.check_result(form.epilogue, form.vectors, cc)
        signature, suffix = form_signature(form), f"_{form.name}"
    else:
        signature, suffix = kernel_signature(form), "" if form else "_any"
    kernel = _build(stage, config, form)
    return compiler.compile_cubin(kernel, signature, cc, name=f"{stage.name}_{config.name}{suffix}")


def _build(stage: Stage, config: TileConfig, form: bool | Form) -> Any:
    build: Callable[..., Any] = stage.build
    return build(config, form if isinstance(form, Form) else form and stage.vectorized)


_cubin = _Once(lambda *kernel: kernel_cache.fetch(partial(compile_stage, *kernel), *kernel)[0])


def _prepare(stage: Stage, config: TileConfig, form: bool | Form, device: int) -> CompiledKernel:
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
        return CompiledKernel(_build(stage, config, form))
    begin = time.perf_counter()
    cubin = _cubin(stage, config, form, properties.cc)
    kernel, resident = driver.CUfunction(load_kernel(cubin, device, config.dynamic_shared)), 1
    if stage.schedule is not None:
        with device_scope(device):
            threads, occupancy = prod(stage.block(config)), driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
            resident = max(int(call(occupancy, kernel, threads, config.dynamic_shared)), 1)
    shared = cubin.shared + config.dynamic_shared
    return CompiledKernel(kernel, cubin.registers, shared, cubin.local, time.perf_counter() - begin, resident)


_prepared = _Once(_prepare)


def prepare(stage: Stage, config: TileConfig, form: bool | Form, device: int = 0) -> CompiledKernel:
    """Compile and load a stage now, if that has not been done; safe from several threads.

    Raises
    ------
    RuntimeError
        if the device's compute capability or shared memory is too small.
    """
    return _prepared(stage, config, form, device)


def natural_share(config: TileConfig, m: int, n: int, k: int, matrices: int, blocks: int) -> Share:
    """Equal shares for so many blocks; of many tiles, only those of the last two rounds are divided."""
    tiles = -(-m // config.BM) * -(-n // config.BN) * matrices
    k_tiles = max(1, -(-k // config.BK))
    if tiles % blocks == 0 or tiles * k_tiles >= 1 << 31:
        return Share(min(tiles, blocks), tiles)
    if tiles > blocks:
        return Share(blocks, (tiles // blocks - 1) * blocks)
    return Share(min(blocks, tiles * k_tiles), 0)


def share_of(stage: Stage, config: TileConfig, a: Matrix, b: Matrix, c: Matrix, extra: Extra = PLAIN) -> Share:
    """How a stage that has a schedule divides a product unless told: among the blocks that the device holds at once."""
    resident = prepare(stage, config, form_of(config, a, b, c, extra), c.device).resident
    blocks = resident * device_properties(c.device).sm_count
    return natural_share(config, c.rows, c.cols, a.cols, prod(extra.batch.extents), blocks)


def schedule(
    stage: Stage,
    config: TileConfig,
    a: Matrix,
    b: Matrix,
    c: Matrix,
    share: Share | None = None,
    extra: Extra = PLAIN,
) -> tuple[tuple[int, int, int], Schedule | None]:
    """Blocks along x, y and z of a launch, and the schedule that they follow, if the stage has one."""
    m, n, k = c.rows, c.cols, a.cols
    if stage.schedule is None:
        return (*stage.grid(config, m, n), 1), None
    if share is None:
        share = share_of(stage, config, a, b, c, extra)
    made = stage.schedule(config, m, n, k, extra.batch, share)
    return made.grid, made


def takes_one_launch(stage: Stage, config: TileConfig, m: int, n: int, k: int) -> bool:
    """Whether a grid covers an (m, n) C, and a kernel counts a k: a grid's y axis ends at 65,535 blocks."""
    if k > MAX_K:
        return False
    if stage.schedule is not None:
        return True
    rows, cols = m <= MAX_GRID_Y * config.BM, n <= MAX_GRID_Y * config.BN
    return cols if stage.rows_along_x else rows


def _cuts(extent: int, most: int) -> list[tuple[int, int]]:
    """An extent in pieces of at most so many; one empty piece if it is 0."""
    return [(begin, min(begin + most, extent)) for begin in range(0, max(extent, 1), most)]


def _slabs(
    stage: Stage, config: TileConfig, a: Matrix, b: Matrix, beta: float, c: Matrix
) -> Iterator[tuple[Matrix, Matrix, float, Matrix]]:
    """The product in pieces that one launch can do.

    The first piece of a sum over k takes beta, the others add to it. A stage that has a schedule has no y axis to end:
    its pieces have all of C, whose tiles are shared out as for the whole product.
    """
    if takes_one_launch(stage, config, c.rows, c.cols, a.cols):
        yield a, b, beta, c
        return
    extent, tile = (c.cols, config.BN) if stage.rows_along_x else (c.rows, config.BM)
    most = MAX_GRID_Y * tile if stage.schedule is None else max(extent, 1)
    for inner in _cuts(a.cols, MAX_K):
        a_part, b_part = a.take_cols(*inner), b.take_rows(*inner)
        for outer in _cuts(extent, most):
            if stage.rows_along_x:
                yield a_part, b_part.take_cols(*outer), beta, c.take_cols(*outer)
            else:
                yield a_part.take_rows(*outer), b_part, beta, c.take_rows(*outer)
        beta = 1.0


class Launch:
    """A launch of a kernel, for operands of fixed extents and strides that lie on fixed boundaries.

    Safe from several threads. Parameters are those of `bind`.

    Attributes
    ----------
    device : int
        Ordinal of the device that it runs on.
    """

    # The parameters (alpha, a, b, beta, c, work, vectors), of which scalars and addresses move from launch to launch.
    MOVING = (0, 1, 6, 11, 12)
    MOVING_WORKSPACE = (17, 18)
    FIRST_VECTOR = 17 + len(partition.FIELDS)

    __slots__ = (
        "_block",
        "_fixed",
        "_frames",
        "_grid",
        "_held",
        "_needs",
        "_reach",
        "_schedule",
        "_vectors",
        "_workspace",
        "device",
    )

    def __init__(
        self,
        stage: Stage,
        config: TileConfig,
        a: Matrix,
        b: Matrix,
        c: Matrix,
        workspace: Workspace | None = None,
        share: Share | None = None,
        extra: Extra = PLAIN,
    ) -> None:
        self.device = c.device
        self._grid, self._schedule = schedule(stage, config, a, b, c, share, extra)
        self._block = (*stage.block(config), 1)
        kernel = prepare(stage, config, variant_of(stage, config, a, b, c, extra), c.device).kernel
        self._vectors = tuple(vector.words for vector in extra.vectors)
        self._fixed = (int(kernel), config.dynamic_shared, (0, *a.packed[1:]), (0, *b.packed[1:]), (0, *c.packed[1:]))
        batch = extra.batch
        low, high = _reach(c, batch.extents, batch.c)
        (a_low, a_high), (b_low, b_high) = _reach(a, batch.extents, batch.a), _reach(b, batch.extents, batch.b)
        self._reach = (low - a_high, high - a_low, low - b_high, high - b_low)
        needs = (0, 0) if self._schedule is None else (self._schedule.workspace_bytes, self._schedule.counters)
        if workspace is not None and not workspace.holds(*needs):
            raise ValueError(
                f"workspace holds {workspace.size} bytes and {workspace.counters} counters; expected {needs[0]} and "
                f"{needs[1]}; pass an array of {workspaces.total_bytes(*needs)} bytes, or none"
            )
        self._workspace = (0, 0) if workspace is None else workspace.words
        self._needs = needs if workspace is None and any(needs) else None  # of the stream's workspace, at every call
        self._held = (stage, config)  # `bind` knows them by their identities
        self._frames: list[Frame] = []

    def _frame(self) -> Frame:
        kernel, shared, a, b, c = self._fixed
        values: list[float | tuple[int, ...]] = [0.0, a, b, 0.0, c]
        moving: tuple[int, ...] = self.MOVING
        if self._schedule is not None:
            values.append((*self._workspace, *self._schedule.words))
            moving += self.MOVING_WORKSPACE if self._needs else ()
            for i, words in enumerate(self._vectors):
                values.append(words)
                moving += (self.FIRST_VECTOR + len(words) * i + 4,)
        arguments = compiler.KernelArguments(values, moving)
        return Frame(self.device, kernel, self._grid, self._block, shared, arguments)

    def apart(self, a: int, b: int, c: int) -> bool:
        """Whether C at its address reaches over no byte between the first and the last of A, or of B, at theirs."""
        below_a, above_a, below_b, above_b = self._reach
        return not below_a < a - c < above_a and not below_b < b - c < above_b

    def __call__(self, alpha: float, a: int, b: int, beta: float, c: int, stream: int, *vectors: int) -> None:
        """Enqueue the product of operands, and vectors, at these addresses."""
        # A frame is one call's alone; taken and put back in one step each, so that this needs no lock, and may be
        # interrupted by a finaliser that comes here too.
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = self._frame()
        if frame.in_context():
            self._enqueue(frame, stream, alpha, a, b, beta, c, *vectors)
        else:
            with device_scope(self.device):
                self._enqueue(frame, stream, alpha, a, b, beta, c, *vectors)
        self._frames.append(frame)

    def _enqueue(
        self, frame: Frame, stream: int, alpha: float, a: int, b: int, beta: float, c: int, *vectors: int
    ) -> None:
        if self._needs is None:
            frame.launch(stream, alpha, a, b, beta, c, *vectors)
        else:
            words = workspaces.reserve(self.device, stream, *self._needs)
            frame.launch(stream, alpha, a, b, beta, c, *words, *vectors)


def _reach(x: Matrix, extents: tuple[int, ...], steps: tuple[int, ...]) -> tuple[int, int]:
    """First byte of a batch's matrices and the one after the last, counted from the first one's element (0, 0)."""
    low, high = x.span
    far = [(extent - 1) * step for extent, step in zip(extents, steps)]
    return low + sum(min(step, 0) for step in far), high + sum(max(step, 0) for step in far)


_bound: dict[tuple[Any, ...], Launch] = {}


def bind(
    stage: Stage,
    config: TileConfig,
    a: Matrix,
    b: Matrix,
    c: Matrix,
    workspace: Workspace | None = None,
    share: Share | None = None,
    extra: Extra = PLAIN,
) -> Launch:
    """Work out a launch, or find it: nothing of the arrays counts but extents, strides, boundaries and device.

    Parameters
    ----------
    stage, config
        What to run.
    a, b, c : Matrix
        Operands that one launch can do (`takes_one_launch`); C has elements.
    workspace : Workspace, optional
        Memory for a stage that has a schedule. By default the stream's.
    share : Share, optional
        How such a stage divides the work. By default `natural_share`.
    extra : Extra
        What such a stage does beside.

    Raises
    ------
    ValueError
        if the workspace is too small.
    """
    boundaries = (a.pointer % VECTOR_BYTES, b.pointer % VECTOR_BYTES, c.pointer % VECTOR_BYTES)
    # Not the vectors themselves, which would keep their memory alive.
    beside = (extra.batch, extra.epilogue, *((vector.size, vector.stride) for vector in extra.vectors))
    identities = (id(stage), id(config), c.device, boundaries, workspace, share, beside)
    key = (*identities, *a.packed[1:], *b.packed[1:], *c.packed[1:])
    bound = _bound.get(key)
    if bound is None:
        bound = Launch(stage, config, a, b, c, workspace, share, extra)
        if len(_bound) >= MAX_BOUND:
            _bound.clear()
        _bound[key] = bound
    return bound


def launch(
    stage: Stage,
    config: TileConfig,
    alpha: float,
    a: Matrix,
    b: Matrix,
    beta: float,
    c: Matrix,
    *,
    stream: int = 0,
    workspace: Workspace | None = None,
    share: Share | None = None,
    extra: Extra = PLAIN,
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
    workspace, share, extra
        As in `bind`.

    Raises
    ------
    ValueError
        for a K beyond what a kernel counts, with an epilogue; for a workspace that is too small.
    """
    if c.rows == 0 or c.cols == 0:
        return
    if extra.epilogue is not None and not takes_one_launch(stage, config, c.rows, c.cols, a.cols):
        raise ValueError(f"K is {a.cols}, beyond the {MAX_K} that a product with an epilogue may have; expected less")
    for a_slab, b_slab, beta_slab, c_slab in _slabs(stage, config, a, b, beta, c):
        if SIMULATOR:
            simulated(stage, config, alpha, a_slab, b_slab, beta_slab, c_slab, share, extra).run()
        else:
            bound = bind(stage, config, a_slab, b_slab, c_slab, workspace, share, extra)
            vectors = (vector.pointer for vector in extra.vectors)
            bound(alpha, a_slab.pointer, b_slab.pointer, beta_slab, c_slab.pointer, stream, *vectors)


@dataclass(frozen=True)
class Simulated:
    """A launch as the scheduler of simulated threads takes it (`numba_gemm.simulator.scheduler.run`).

    Attributes
    ----------
    kernel : object
        Made by ``cuda.jit``, or a plain function.
    grid, block : tuple of int
        Blocks along x, y and z, and threads.
    arguments : tuple
        Of the kernel; matrices are NumPy arrays.
    dynamic_shared : int
        Bytes a block.
    """

    kernel: Any
    grid: tuple[int, ...]
    block: tuple[int, ...]
    arguments: tuple[Any, ...]
    dynamic_shared: int = 0

    def run(self, **options: Any) -> None:
        """Run it; options are the scheduler's."""
        scheduler.run(self.kernel, self.grid, self.block, self.arguments, dynamic_shared=self.dynamic_shared, **options)


def simulated(
    stage: Stage,
    config: TileConfig,
    alpha: float,
    a: Matrix,
    b: Matrix,
    beta: float,
    c: Matrix,
    share: Share | None = None,
    extra: Extra = PLAIN,
) -> Simulated:
    """A stage's launch in the simulator, of operands that one launch can do; parameters are those of `launch`."""
    grid, scheduled = schedule(stage, config, a, b, c, share, extra)
    operands: tuple[Any, ...] = (np.float32(alpha), a.owner, b.owner, np.float32(beta), c.owner)
    if scheduled is not None:
        memory = np.full(scheduled.workspace_bytes // FLOAT32_BYTES, np.nan, np.float32)
        describe: Any = partition.Partition
        operands += (describe(memory, np.zeros(scheduled.counters, np.int32), *scheduled.words),)
        if extra.vectors:
            operands += (tuple(vector.owner for vector in extra.vectors),)
    kernel = prepare(stage, config, variant_of(stage, config, a, b, c, extra), c.device).kernel
    return Simulated(kernel, grid, stage.block(config), operands, config.dynamic_shared)
