"""Kernels whose parameters are Numba arrays, built around the kernels of the FP32 ladder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda, float32

from ..device.array_arguments import matrix_of, partition_of
from ..device.units import FLOAT32_BYTES, STATIC_SHARED_BYTES
from ..simulator.numba_kernel import NumbaKernel
from ..simulator.patches import python_function
from ..simulator.switch import SIMULATOR, device_function, hardware_only
from .ladder.partitions import PartitionLayout
from .ladder.stage import Variant
from .ladder.tile_config import TileConfig

NO_CODE = b".version 7.0\n.target sm_75\n.address_size 64\n"


def build(
    stage: Callable[..., Any],
    config: TileConfig,
    variant: int | Variant,
    aligned: tuple[bool, bool, bool],
    contiguous: bool,
    division: PartitionLayout | None,
) -> Any:
    """Return a kernel ``(alpha, a, b, beta, c)`` that takes Numba arrays; it contains the `division` as constants."""
    body = device_function(python_function(stage(config, variant)))
    matrix_a, matrix_b, matrix_c = (matrix_of(promise, contiguous) for promise in aligned)
    if division is None:

        def kernel(alpha, a, b, beta, c):  # type: ignore[no-untyped-def]
            body(float32(alpha), matrix_a(a), matrix_b(b), float32(beta), matrix_c(c))

    else:
        words = division.words
        vectors: tuple[Any, ...] = ((),) if isinstance(variant, Variant) else ()
        partials = counters = None
        if division.counters:
            partials = cuda.device_array(max(1, division.workspace_bytes // FLOAT32_BYTES), np.float32)
            counters = cuda.to_device(np.zeros(division.counters, np.int32))

        def kernel(alpha, a, b, beta, c):  # type: ignore[no-untyped-def]
            partition = partition_of(partials, counters, words)
            body(float32(alpha), matrix_a(a), matrix_b(b), float32(beta), matrix_c(c), partition, *vectors)

    if SIMULATOR:
        return NumbaKernel(kernel)
    link = []  # Numba calls back with the loaded module only for code that is linked to the kernel
    if config.dynamic_shared > STATIC_SHARED_BYTES:
        link = [cuda.PTXSource(NO_CODE, setup_callback=_allow(config.dynamic_shared))]
    return cuda.jit(link=link, **hardware_only(launch_bounds=config.launch_bounds))(kernel)


def _allow(dynamic_shared: int) -> Callable[[Any], None]:
    """Return a function that allows the kernels of a loaded module this much dynamic shared memory."""

    def setup(code: Any) -> None:
        from cuda.bindings import driver

        def call(function: Any, *arguments: Any) -> Any:
            status, *results = function(*arguments)
            if status != driver.CUresult.CUDA_SUCCESS:
                raise RuntimeError(f"{function.__name__} failed: {status!r}; expected {dynamic_shared} bytes to fit")
            return results[0] if results else None

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        device = call(driver.cuCtxGetDevice)
        count = call(driver.cuLibraryGetKernelCount, code.handle)
        for kernel in call(driver.cuLibraryEnumerateKernels, count, code.handle):
            call(driver.cuKernelSetAttribute, attribute, dynamic_shared, kernel, device)

    return setup
