"""Kernels of the tensor cores, compiled for 9.0; as a program, what the compiler makes of all, as lines of JSON.

As a program it runs without the simulator, which has no compiler (see `compile_stages`).
"""

from __future__ import annotations

import functools
import json
from typing import Any

from numba_gemm.tensor_core import MODES, TENSOR_STAGES, split
from numba_gemm.tensor_core.stage import ROW_WORDS, split_shape

CC = (9, 0)


@functools.cache
def compiled_stage(name: str, index: int, mode: str) -> Any:
    """The cubin of a stage's configuration."""
    from numba.cuda import types

    from numba_gemm.device.internals import compile_cubin
    from numba_gemm.device.matrix import MatrixType

    operand, result, scalar = MatrixType(True), MatrixType(False), types.float32
    stage = TENSOR_STAGES[name]
    kernel = stage.build(stage.configs[index], MODES[mode])
    return compile_cubin(kernel, (scalar, operand, operand, scalar, result), CC, name=f"{name}_{mode}")


@functools.cache
def compiled_split(mode: str, along: bool) -> Any:
    """The cubin of a mode's splitting kernel."""
    from numba_gemm.device.internals import compile_cubin
    from numba_gemm.device.matrix import MatrixType

    kernel = split.build(MODES[mode], along)
    return compile_cubin(kernel, (MatrixType(False), MatrixType(True)), CC, name=f"split_{mode}_{int(along)}")


class Loaded:
    """A kernel of a cubin, on the device."""

    def __init__(self, cubin: Any, block: int, shared: int = 0) -> None:
        from cuda.bindings import driver

        from numba_gemm.driver import call

        self._library = call(driver.cuLibraryLoadData, cubin.code, [], [], 0, [], [], 0)
        kernel = call(driver.cuLibraryGetKernel, self._library, cubin.name.encode())
        if shared > 48 << 10:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call(driver.cuKernelSetAttribute, attribute, shared, kernel, 0)
        self._function, self._block, self._shared = driver.CUfunction(int(kernel)), block, shared

    def __call__(self, grid: tuple[int, int], *values: Any) -> None:
        from cuda.bindings import driver

        from numba_gemm.device.internals import KernelArguments
        from numba_gemm.driver import call

        arguments = KernelArguments(values)
        shape = (*grid, 1, self._block, 1, 1)
        call(driver.cuLaunchKernel, self._function, *shape, self._shared, 0, arguments.address, 0)


def words(array: Any) -> tuple[int, ...]:
    """A device array as a kernel's matrix."""
    return (array.__cuda_array_interface__["data"][0], *array.shape, *array.strides)


@functools.cache
def loaded_split(mode: str, along: bool) -> Loaded:
    return Loaded(compiled_split(mode, along), split.THREADS)


@functools.cache
def loaded_stage(name: str, index: int, mode: str) -> Loaded:
    config = TENSOR_STAGES[name].configs[index]
    return Loaded(compiled_stage(name, index, mode), config.threads, config.dynamic_shared(MODES[mode]))


def product(a: Any, b: Any, c: Any, mode: str, stage: str, *, index: int = 0, alpha: float = 1.0, beta: float = 0.0):
    """``c = alpha * a @ b + beta * c`` of Numba's device arrays, on the default stream."""
    import numpy as np
    from numba import cuda

    config = TENSOR_STAGES[stage].configs[index]
    (m, k), n = a.shape, b.shape[1]
    split_operands = []
    pointer, *_, b_down, b_across = words(b)
    # Both as (mn, k): B by its strides, since Numba's `.T` copies.
    for x in (words(a), (pointer, n, k, b_across, b_down)):
        shape = split_shape(MODES[mode], x[1], k)
        parts = cuda.to_device(np.full(shape, np.nan, np.float32))
        grid = (shape[1] // (ROW_WORDS * split.ROWS), shape[0] // MODES[mode].parts)
        loaded_split(mode, x[4] == 4)(grid, x, words(parts))
        split_operands.append(parts)
    grid = (-(-n // config.BN), -(-m // config.BM))
    loaded_stage(stage, index, mode)(grid, alpha, *(words(parts) for parts in split_operands), beta, words(c))
    cuda.synchronize()


def main() -> None:
    from numba_gemm.inspect import sass

    def row(cubin: Any) -> dict[str, Any]:
        (instructions,) = sass.functions(sass.disassemble(cubin.code)).values()
        return {
            "name": cubin.name,
            "registers": cubin.registers,
            "local": cubin.local,
            "spills": cubin.spill_stores + cubin.spill_loads,
            "log": cubin.log,
            "opcodes": sass.instruction_mix(instructions),
        }

    for mode in MODES:
        for along in (True, False):
            print(json.dumps({"mode": mode, "split": True} | row(compiled_split(mode, along))), flush=True)
        for name, stage in TENSOR_STAGES.items():
            for index in range(len(stage.configs)):
                print(json.dumps({"mode": mode, "split": False} | row(compiled_stage(name, index, mode))), flush=True)


if __name__ == "__main__":
    main()
