"""A stand-in for the CUDA driver that records every launch and multiplies matrices in host memory.

It needs no GPU and no compiler. Kernels get a handle each and are never built: those of the FP32 ladder are replaced by
NumPy, with their epilogue, and those of the tensor-core ladder are only recorded.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
import types
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
from cuda.bindings import driver

from numba_gemm.arrays import libraries
from numba_gemm.device.partition import FIELDS
from numba_gemm.gemm import launch_choice, precision
from numba_gemm.gemm import plan as plans
from numba_gemm.kernels import conversion
from numba_gemm.kernels.ladder import STAGES
from numba_gemm.kernels.ladder import stage as ladder
from numba_gemm.kernels.tensor_core import decomposition, direct_stage, fused_stage, tma_stage
from numba_gemm.kernels.tensor_core import stage as tensor_core
from numba_gemm.runtime import device as devices
from numba_gemm.runtime import driver as driver_module
from numba_gemm.runtime import frame, launch, workspace

CONTEXT = 4321  # of device 0; others follow
FIRST_HANDLE = 70
SUCCESS, OUT_OF_MEMORY = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
CARVE_OUT = int(driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT)
CLUSTER = int(driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
SERIALIZATION = int(driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
MATRIX, VECTOR, SCALAR = 5, 7, 0  # words of an argument; a scalar is a float32, whose word has four bytes unread


def parameters(kernel):
    """Return the names of a kernel's arguments and the number of words of each, in order."""
    vectors = {f"vector{i}": VECTOR for i in range(kernel.vectors)}
    product = {"alpha": SCALAR, "a": MATRIX, "b": MATRIX, "beta": SCALAR, "c": MATRIX}
    if kernel.signature is ladder.SIGNATURE:
        return product | ({"partition": len(FIELDS)} | vectors if isinstance(kernel.variant, ladder.Variant) else {})
    if kernel.signature is ladder.PLAIN_SIGNATURE:
        return product | {"partition": len(FIELDS)}
    if kernel.signature in (tensor_core.TEACHING_SIGNATURE, direct_stage.SIGNATURE):
        return product
    if kernel.signature is fused_stage.SIGNATURE:
        return product | {"steps": 3} | vectors
    if kernel.signature is tensor_core.COMPLETE_SIGNATURE:
        return product | {"x": MATRIX, "y": MATRIX, "steps": 7} | vectors
    if kernel.signature is tensor_core.ADD_PARTIALS_SIGNATURE:
        operands = {"alpha": SCALAR, "a_parts": MATRIX, "b_parts": MATRIX, "beta": SCALAR}
        return operands | dict.fromkeys(("c", "a", "b", "partials"), MATRIX) | {"words": 12} | vectors
    if kernel.signature is decomposition.ROW_MAXIMA_SIGNATURE:
        return {"a": MATRIX, "a_maxima": MATRIX, "b": MATRIX, "b_maxima": MATRIX, "steps": 4}
    if kernel.signature is decomposition.DECOMPOSE_SIGNATURE and kernel.variant.precision.scaled:
        operands = ("a", "a_parts", "a_maxima", "b", "b_parts", "b_maxima")
        return dict.fromkeys(operands, MATRIX) | {"steps": 6}
    if kernel.signature is decomposition.DECOMPOSE_SIGNATURE:
        return dict.fromkeys(("a", "a_parts", "b", "b_parts"), MATRIX) | {"steps": 4}
    if kernel.signature is conversion.SIGNATURE:
        return dict.fromkeys(("a", "a_copy", "b", "b_copy"), MATRIX) | {"words": 15}
    assert kernel.signature is tma_stage.SIGNATURE, f"{kernel.name} has parameters that are not known here"
    operands = {"u_map": 1, "v_map": 1, "v_part": MATRIX}
    return {"alpha": SCALAR} | operands | {"beta": SCALAR, "c": MATRIX, "k": 1, "steps": 6} | vectors


@dataclass(frozen=True)
class Launched:
    """Everything that the driver was told of one launch; `arguments` are the kernel's by name."""

    kernel: str
    handle: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    stream: int
    overlaps: bool
    carve_out: int
    cluster: int
    arguments: dict[str, float | list[int]]

    def __getattr__(self, name):
        try:
            return self.__dict__["arguments"][name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def partition(self):
        return types.SimpleNamespace(**dict(zip(FIELDS, self.arguments["partition"], strict=True)))


def result(*values):
    """Return what a function of cuda.bindings returns if it succeeds."""
    return (SUCCESS, *values)


class LaunchConfig(ctypes.Structure):
    """The driver's ``CUlaunchConfig``."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


def attributes_of(config):
    """Return `Step.overlaps`, `Step.carve_out` and `Step.cluster` of a launch."""
    given = struct.iter_unpack("=iiiii52x", ctypes.string_at(config.attributes or 0, 72 * config.attribute_count))
    values = {identity: value for identity, _, *value in given}
    assert len(values) == config.attribute_count
    assert set(values) <= {SERIALIZATION, CARVE_OUT, CLUSTER}
    across, *others = values.get(CLUSTER, (1, 1, 1))
    assert others == [1, 1]
    assert config.grid[0] % across == 0
    return values.get(SERIALIZATION, (0,))[0] == 1, values.get(CARVE_OUT, (-1,))[0], across


class HostGpu:
    """Driver whose kernels multiply matrices in host memory.

    Attributes
    ----------
    launches : list of Launched
        Launches, in order.
    kernels : dict
        Kernels that were loaded, by handle.
    status : int
        Status that a launch returns instead of running, if not 0.
    current : int or None
        Context that is current, in all threads.
    pushed : list of int
        Contexts that were made current.
    capturing : dict
        Captures by the handles of the streams that they record.
    computes : bool
        True if launches of the FP32 ladder are computed.
    """

    def __init__(self):
        self.current = CONTEXT
        self.capturing: dict[int, int] = {}
        self.launches: list[Launched] = []
        self.kernels: dict[int, object] = {}
        self.allocations: list[np.ndarray] = []
        self.pushed: list[int] = []
        self.freed: list[int] = []
        self.owned: dict[int, list[object]] = {}  # by graphs, which have the numbers of their captures
        self.status, self.computes = 0, True
        self.pause = threading.Event().wait
        self._stack: list[int | None] = []
        self._lock = threading.Lock()

    # ------------------------------------------------------------------------------------ functions for ctypes (`raw`)

    def raw(self, name):
        return getattr(self, f"raw_{name}")

    def raw_cuCtxGetCurrent(self, place):
        place._obj.value = self.current
        return 0

    def raw_cuStreamGetId(self, stream, identity):
        identity._obj.value = 1000 + (stream.value or 0)
        return 0

    def raw_cuStreamIsCapturing(self, stream, status):
        assert stream.value, "asked about the default stream"
        status._obj.value = stream.value in self.capturing
        return 0

    def raw_cuLaunchKernelEx(self, config, handle, table, extra):
        if self.status:
            return self.status
        assert self.current is not None, "no context is current"
        assert extra is None
        config, handle, table = (ctypes.cast(pointer, ctypes.c_void_p).value for pointer in (config, handle, table))
        kernel, layout = self.kernels[handle], LaunchConfig.from_address(config)
        grid, block, stream = tuple(layout.grid), tuple(layout.block), layout.stream or 0
        arguments = self._arguments(kernel, table)
        attributes = attributes_of(layout)
        did = Launched(kernel.name, handle, grid, block, layout.shared, stream, *attributes, arguments)
        self.pause(0.0005)  # others run
        self.launches.append(did)
        if self.computes and kernel.signature is ladder.SIGNATURE:
            self._compute(kernel, did)
        if self.computes and kernel.signature is conversion.SIGNATURE:
            self._convert(kernel, did)
        after = self._arguments(kernel, table)
        assert repr(after) == repr(arguments), "another thread used this frame"  # also if a scalar is NaN
        return 0

    @staticmethod
    def _arguments(kernel, table):
        """Read all parameters; of a scalar, the four bytes that the kernel reads."""
        sizes = parameters(kernel)
        count = sum(max(size, 1) for size in sizes.values())
        pointers, found = iter((ctypes.c_void_p * count).from_address(table)), {}
        for name, size in sizes.items():
            if size == SCALAR:
                found[name] = ctypes.c_float.from_address(next(pointers)).value
            else:
                found[name] = [ctypes.c_int64.from_address(next(pointers)).value for _ in range(size)]
        return found

    @staticmethod
    def _compute(kernel, did):
        extents, steps = (1, 1, 1), [(0, 0, 0)] * 3
        epilogue = getattr(kernel.epilogue, "py_func", kernel.epilogue)
        if "partition" in did.arguments and did.partition.inner:
            partition = did.partition
            extents = (partition.matrices // (partition.inner * partition.middle), partition.middle, partition.inner)
            steps = [[getattr(partition, f"{x}_{axis}") for axis in ("outer", "middle", "inner")] for x in "abc"]
        vectors = [did.arguments[f"vector{i}"] for i in range(kernel.vectors)]
        vectors = [view(words[4], words[5], 1, words[6], 0)[:, 0] for words in vectors]
        for index in np.ndindex(extents):
            x, y, z = (
                view(one[0] + int(np.dot(index, step)), *one[1:])
                for one, step in zip((did.a, did.b, did.c), steps, strict=True)
            )
            z[...] = did.alpha * (x @ y) + (did.beta * z if did.beta else 0)
            if epilogue is not None:
                for row, col in np.ndindex(z.shape):
                    z[row, col] = epilogue(z[row, col], row, col, *vectors)

    @staticmethod
    def _convert(kernel, did):
        """Copy one operand or two; see `kernels.convert`."""
        blocks = did.words[14]
        operands = [(did.a, did.a_copy, did.words[:7], kernel.variant.first)]
        if blocks < did.grid[0]:
            operands.append((did.b, did.b_copy, did.words[7:14], kernel.variant.second))
        for x, copy, (second, third, *steps, each, chunks), dtype in operands:
            count = chunks // (x[1] * -(-x[2] // 8)) if x[1] else 0
            for i in range(count):
                place = np.dot((i // third // second, i // third % second, i % third), steps)
                bits = view(x[0] + int(place), *x[1:], typestr="<u2")
                widened = (
                    bits.view(np.float16) if dtype == "float16" else (bits.astype(np.uint32) << 16).view(np.float32)
                )
                view(copy[0] + i * each, x[1], x[2], *copy[3:])[...] = widened

    # ------------------------------------------------------------------------------ functions of cuda.bindings.driver

    def cuCtxPushCurrent(self, context):
        self._stack.append(self.current)
        self.current = int(context)
        self.pushed.append(self.current)
        return result()

    def cuCtxPopCurrent(self):
        popped, self.current = self.current, self._stack.pop()
        return result(popped)

    def cuMemAlloc(self, size):
        assert self.current is not None, "no context is current"
        self.allocations.append(np.full(-(-size // 4) + 64, 77, np.int32))
        return result(-(-self.allocations[-1].ctypes.data // 256) * 256)

    def cuMemFree(self, pointer):
        self.freed.append(int(pointer))
        return result()

    def cuMemsetD32Async(self, pointer, value, count, stream):
        assert stream == 9
        np.frombuffer((ctypes.c_int32 * count).from_address(pointer), np.int32)[:] = value
        return result()

    def cuMemcpyHtoDAsync(self, pointer, data, size, stream):
        assert stream == 9
        ctypes.memmove(pointer, data, size)
        return result()

    def cuStreamCreate(self, flags):
        return result(9)

    def cuStreamSynchronize(self, stream):
        return result()

    def cuStreamDestroy(self, stream):
        assert stream == 9
        return result()

    def cuStreamGetCaptureInfo(self, stream):
        return result(None, self.capturing[stream], self.capturing[stream], None, None, 0)

    def cuUserObjectCreate(self, pointer, destroy, count, flags):
        assert count == 1
        return result(functools.partial(ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(destroy), pointer))

    def cuGraphRetainUserObject(self, graph, owned, count, flags):
        self.owned.setdefault(graph, []).append(owned)
        return result()

    def destroy_graph(self, graph):
        """Call the destructors of what a graph owns, as when it and all that was made from it are gone."""
        for destructor in self.owned.pop(graph):
            destructor()

    def cuThreadExchangeStreamCaptureMode(self, mode):
        return result(mode)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, handle, threads, shared):
        return result(1)

    def cuTensorMapEncodeTiled(self, kind, dimensions, pointer, extents, strides, box, *_):
        """Describe a matrix by the numbers themselves: its address, three extents, two strides and the box's three."""
        numbers = [pointer, *map(int, extents), *map(int, strides), *map(int, box)]
        memory = (ctypes.c_uint64 * 16)(*numbers)
        return result(types.SimpleNamespace(getPtr=lambda: ctypes.addressof(memory)))

    # ------------------------------------------------------------------------------------------------------- kernels

    def load(self, device, kernel):
        """Give a kernel a handle; equal kernels have the same one."""
        with self._lock:
            handle = next((handle for handle, other in self.kernels.items() if other == kernel), None)
            handle = FIRST_HANDLE + len(self.kernels) if handle is None else handle
            self.kernels[handle] = kernel
        return devices.LoadedKernel(handle)

    @contextmanager
    def recording(self):
        """Collect the launches made inside."""
        before, made = len(self.launches), []
        yield made
        made += self.launches[before:]


def view(pointer, rows, cols, row_stride, col_stride, typestr="<f4"):
    interface = {
        "data": (pointer, False),
        "shape": (rows, cols),
        "strides": (row_stride, col_stride),
        "typestr": typestr,
        "version": 3,
    }
    return np.asarray(types.SimpleNamespace(__array_interface__=interface))


@pytest.fixture
def gpu(monkeypatch):
    """One device of compute capability 9.0, with nothing bound, loaded or allocated."""
    gpu = HostGpu()
    for name in vars(HostGpu):
        if name.startswith("cu"):
            monkeypatch.setattr(driver, name, getattr(gpu, name))
    monkeypatch.setattr(driver_module, "_retained_context", lambda device: CONTEXT + device)
    for module in (driver_module, frame, workspace):
        monkeypatch.setattr(module, "raw", gpu.raw)
    for module in (devices, launch, plans, precision):
        monkeypatch.setattr(module, "SIMULATOR", False)
    for module in (devices, launch_choice):
        monkeypatch.setattr(module, "device_properties", lambda device=0: devices.SIMULATED_DEVICE)
    for module in (devices, libraries):
        monkeypatch.setattr(module, "device_count", lambda: 1)
    monkeypatch.setattr(devices, "current_device", lambda: 0)
    own = functools.cache(devices.Device)
    for module in (devices, launch):
        monkeypatch.setattr(module, "get_device", own)
    monkeypatch.setattr(devices.Device, "_load", lambda device, kernel: gpu.load(device, kernel))
    monkeypatch.setattr(devices.Device, "_fetch", lambda device, kernels, before_compiling: None)
    return gpu


# ------------------------------------------------------------------------------------------------- stages for its tests

NAIVE = STAGES["naive"]
CONFIG = STAGES["stream_k"].configs[1]  # the loaders of all layouts cover its tiles


def scheduled(stage, make):
    """Return a copy of a stage that has a schedule."""
    return replace(stage, schedule=make)


def schedule_of(size, counters):
    """Return a schedule with a workspace of that size, whose first word is the number of blocks of the partition."""

    def schedule(config, m, n, k, batch, partition):
        return ladder.PartitionLayout((2, 3, 4), size, counters, (partition.blocks, *[0] * 6, 1, 1, 1, *[0] * 10))

    return schedule
