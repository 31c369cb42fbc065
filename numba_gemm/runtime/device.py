"""Devices: properties, and all that is kept per device: kernels, bound products, workspaces and tensor maps."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, ClassVar

from cuda.bindings import driver

from ..kernels.ladder.partitions import default_partition
from ..kernels.product import Product
from ..kernels.stage import IEEE, Gpu, Partition, Stage
from ..kernels.step import Kernel, Launches
from ..models.gpu_names import compute_capability, device_index, dotted
from ..simulator.probe import gpu_count
from ..simulator.switch import SIMULATOR
from . import kernel_cache
from .bound_product import BoundProduct
from .compiler import Cubin
from .driver import call, device_scope, load_kernel, primary_context, start
from .once_per_key import OncePerKey
from .tensor_maps import TensorMaps
from .workspace import Workspace, Workspaces

__all__ = [
    "Device",
    "DeviceProperties",
    "LoadedKernel",
    "capability_of",
    "current_device",
    "device_count",
    "device_properties",
    "get_device",
    "ordinal_of",
    "synchronize",
]

MAX_BOUND = 1024  # bound products that are kept; with more layouts than that in use, some are bound again


@dataclass(frozen=True, eq=False)  # one object per device, by which choices are remembered
class DeviceProperties:
    """Properties of a device; in the simulator, of an H200.

    Attributes
    ----------
    name : str
        Name of the model.
    cc : tuple of int
        Compute capability.
    sm_count : int
        Multiprocessors.
    clock_hz : float
        Highest clock of the multiprocessors.
    l2_bytes : int
        Size of the L2 cache.
    max_shared_per_block : int
        Bytes of shared memory that a block may use.
    memory_bandwidth : float
        Theoretical bandwidth of device memory in byte/s; 0 if the driver does not tell.
    shared : int
        Bytes of shared memory of a multiprocessor; 0 if the driver is older than CUDA 12.8, and launches cannot say how
        much of it they need.
    """

    name: str
    cc: tuple[int, int]
    sm_count: int
    clock_hz: float
    l2_bytes: int
    max_shared_per_block: int
    memory_bandwidth: float
    shared: int = 0

    @cached_property
    def gpu(self) -> Gpu:
        """The properties on which launches depend."""
        return Gpu(self.cc, self.sm_count, self.shared)


SIMULATED_DEVICE = DeviceProperties("simulator", (9, 0), 132, 1.98e9, 60 << 20, 227 << 10, 4.8e12)


@cache
def device_properties(device: int = 0) -> DeviceProperties:
    """Return the properties of a device."""
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
        # Bus width times clock times two.
        memory_bandwidth=2.0 * attribute("MEMORY_CLOCK_RATE") * 1e3 * attribute("GLOBAL_MEMORY_BUS_WIDTH") / 8,
        shared=attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR") if call(driver.cuDriverGetVersion) >= 12080 else 0,
    )


def device_count() -> int:
    """Return the number of devices; the simulator is one."""
    return 1 if SIMULATOR else gpu_count()


def current_device() -> int:
    """Return the ordinal of the device that is current in this thread, 0 if none is yet.

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


def ordinal_of(device: Any = None, name: str = "device") -> int:
    """Return the ordinal of a device as people write it, see `models.gpu_names`; for None, that of the current one.

    `name` is the argument that errors name.
    """
    ordinal = None if device is None else device_index(device, name)
    current = current_device()  # raises GpuUnavailable with the reason
    if ordinal is None:
        return current
    count = device_count()
    if not 0 <= ordinal < count:
        raise ValueError(f"{name} is {device!r}; expected 0 to {count - 1}, ordinals of GPUs; pass one of these")
    return ordinal


def capability_of(cc: Any = None, device: Any = None) -> tuple[int, int]:
    """Return `cc`, which needs no GPU, or the compute capability of a device; refuse both if they differ."""
    wanted = None if cc is None else compute_capability(cc)
    if device is None and wanted is not None:
        return wanted
    ordinal = ordinal_of(device)
    found = device_properties(ordinal).cc
    if wanted not in (None, found):
        raise ValueError(
            f"cc is {cc!r} and device {ordinal} has compute capability {dotted(found)}; expected one of the two, or "
            "both for the same GPU; leave one out"
        )
    return found


def synchronize(stream: int = 0) -> None:
    """Wait for all work on a stream of the current device."""
    if not SIMULATOR:
        call(driver.cuStreamSynchronize, stream)


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel that is loaded on a device, and its resources.

    Attributes
    ----------
    handle : int
        The driver's handle.
    registers : int
        32-bit registers per thread.
    shared : int
        Bytes of shared memory per block, static and dynamic.
    local : int
        Bytes of local memory per thread.
    compile_s : float
        Seconds that compiling, or reading it from disk, and loading took.
    """

    handle: int
    registers: int = 0
    shared: int = 0
    local: int = 0
    compile_s: float = 0.0


class Device:
    """Owner of everything that is kept for one device; made by `get_device`, safe from several threads.

    Attributes
    ----------
    ordinal : int
        Ordinal of the device.
    properties : DeviceProperties
        Its properties.
    workspaces : Workspaces
        Memory for launches.
    tensor_maps : TensorMaps
        Descriptions of matrices.
    before_compiling : callable, optional
        Of all devices: called with a device, a stage, a product, a precision and the product's kernels before any of
        them is compiled.
    """

    before_compiling: ClassVar[Callable[[Device, Stage, Product, str, Sequence[Kernel]], object] | None] = None

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.workspaces, self.tensor_maps = Workspaces(), TensorMaps()
        self.load = OncePerKey(self._load)
        self._resident = OncePerKey(self._count_resident)
        self._fetched: dict[Kernel, Cubin] = {}  # by `load_all`, and not loaded yet
        # Handles by entry point, code and dynamic shared memory. Kernels are never unloaded: a captured graph may
        # launch one at any time, and nothing tells when the last graph is gone. So one that `load` forgot is not loaded
        # again; an entry is far smaller than what the driver keeps of the kernel.
        self._handles: dict[tuple[str, bytes, int], int] = {}
        self._bound: dict[Hashable, BoundProduct] = {}

    @property
    def properties(self) -> DeviceProperties:
        """Properties of the device."""
        return device_properties(self.ordinal)

    @cached_property
    def context(self) -> int:
        """Handle of its primary context."""
        return int(primary_context(self.ordinal))

    def _load(self, kernel: Kernel) -> LoadedKernel:
        begin = time.perf_counter()
        cubin = self._fetched.pop(kernel, None) or kernel_cache.fetch(kernel, self.properties.cc).cubin
        key = cubin.name, hashlib.sha256(cubin.code).digest(), kernel.dynamic_shared
        if (handle := self._handles.get(key)) is None:
            handle = self._handles.setdefault(key, load_kernel(cubin, self.ordinal, kernel.dynamic_shared))
        seconds = time.perf_counter() - begin
        return LoadedKernel(handle, cubin.registers, cubin.shared + kernel.dynamic_shared, cubin.local, seconds)

    def _count_resident(self, kernel: Kernel) -> int:
        handle = driver.CUfunction(self.load(kernel).handle)
        with device_scope(self.ordinal):
            count = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
            return max(int(call(count, handle, kernel.threads, kernel.dynamic_shared)), 1)

    def partition(self, stage: Stage, config: Any, product: Product) -> Partition | None:
        """Return the default division of a product: equally among the blocks that the device holds at once."""
        if not stage.takes_partition:
            return None
        resident = 1 if SIMULATOR else self._resident(stage.kernel(config, product))
        return default_partition(config, product, resident * self.properties.sm_count)

    def check(self, stage: Stage, config: Any, kernel: Kernel) -> None:
        """Raise RuntimeError if the device cannot run a stage, or has too little shared memory for a configuration."""
        gpu = self.properties
        if not stage.runs_on(gpu.cc):
            wanted = stage.min_cc if stage.only_cc is None else stage.only_cc
            raise RuntimeError(
                f"stage {stage.name!r} needs compute capability {wanted[0]}.{wanted[1]}, but device {self.ordinal} "
                f"({gpu.name}) has {gpu.cc[0]}.{gpu.cc[1]}; choose another stage"
            )
        if kernel.dynamic_shared > gpu.max_shared_per_block:
            raise RuntimeError(
                f"configuration {config.name} of stage {stage.name!r} needs {kernel.dynamic_shared} bytes of shared "
                f"memory per block, but device {self.ordinal} ({gpu.name}) has {gpu.max_shared_per_block}; choose a "
                "smaller configuration"
            )

    def bind(
        self,
        stage: Stage,
        config: Any,
        product: Product,
        precision: str = IEEE,
        partition: Partition | None = None,
        swapped: bool = False,
        workspace: Workspace | None = None,
    ) -> BoundProduct:
        """Return the launches of a product, with compiled and loaded kernels.

        Parameters
        ----------
        stage, config, precision
            Kernel.
        product : Product
            A part of a product that the stage computes at once (`Stage.pieces`); C has elements. As the kernel
            computes it: the transpose if `swapped`.
        partition : Partition, optional
            Division of the work, for a stage that takes one. By default that of the method `partition`.
        swapped : bool
            True if A and B are swapped: the kernel computes the transpose.
        workspace : Workspace, optional
            Memory for the launches. By default the stream's.

        Raises
        ------
        RuntimeError
            if the device cannot run it.
        ValueError
            if the workspace is too small.
        """
        key = stage, config, product, precision, partition, swapped, workspace
        bound = self._bound.get(key)
        if bound is None:
            bound = self._bind(*key)
            if len(self._bound) >= MAX_BOUND:
                self._bound.clear()
            self._bound[key] = bound
        return bound

    def _bind(
        self,
        stage: Stage,
        config: Any,
        product: Product,
        precision: str,
        partition: Partition | None,
        swapped: bool,
        workspace: Workspace | None,
    ) -> BoundProduct:
        if partition is None and stage.takes_partition:
            self.check(stage, config, stage.kernel(config, product, precision))
            partition = self.partition(stage, config, product)
        launches = stage.launches(config, product, precision, partition, self.properties.gpu)
        if swapped:
            launches = launches.with_operands_swapped()
        if launches.paced and workspace is not None and not workspace.counters:  # which a larger piece did not need
            launches = launches.unpaced()
        kernels, announce = [step.kernel for step in launches.steps], None
        if self.load.known(kernels) is None:  # those that are loaded were checked
            self.check(stage, config, launches.multiplication.kernel)
            if Device.before_compiling is not None:
                whole = product.transposed if swapped else product
                announce = partial(Device.before_compiling, self, stage, whole, precision, kernels)
        return self.loaded(launches, workspace, announce)

    def load_all(
        self, kernels: Sequence[Kernel], before_compiling: Callable[[], object] | None = None
    ) -> list[LoadedKernel]:
        """Return several loaded kernels; those that must be compiled are compiled in parallel."""
        if (found := self.load.known(kernels)) is not None:
            return found
        missing = [kernel for kernel in kernels if kernel not in self.load]
        if len(missing) > 1 or (missing and before_compiling is not None):
            # The one that multiplies takes longest. It is the last one, or the last but one if sums are divided.
            self._fetch(list(dict.fromkeys(reversed(missing))), before_compiling)
        try:
            return [self.load(kernel) for kernel in kernels]
        finally:
            for kernel in missing:
                self._fetched.pop(kernel, None)

    def _fetch(self, kernels: list[Kernel], before_compiling: Callable[[], object] | None) -> None:
        """Get kernels ready to be loaded."""
        tasks = [(kernel, self.properties.cc) for kernel in kernels]
        found = kernel_cache.fetch_all(tasks, before_compiling=before_compiling)
        self._fetched |= {kernel: one.cubin for kernel, one in zip(kernels, found)}

    def loaded(
        self,
        launches: Launches,
        workspace: Workspace | None = None,
        before_compiling: Callable[[], object] | None = None,
    ) -> BoundProduct:
        """Return launches with compiled and loaded kernels."""
        kernels = [step.kernel for step in launches.steps]
        handles = [kernel.handle for kernel in self.load_all(kernels, before_compiling)]
        return BoundProduct(self.ordinal, self.context, launches, handles, self.workspaces, self.tensor_maps, workspace)


@cache
def get_device(ordinal: int) -> Device:
    """Return the owner of everything that is kept for a device."""
    return Device(ordinal)
