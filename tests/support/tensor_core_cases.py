"""Kernels of the tensor cores, compiled for 9.0; as a program, what the compiler makes of some, as lines of JSON.

As a program it runs without the simulator, which has no compiler (see `compile_stages`). On a GPU of compute capability
9.0 it can be a program for compute-sanitizer, too: with ``--run`` it runs every stage once.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Iterator
from typing import Any

from numba_gemm.gemm import direct_products, split_products
from numba_gemm.kernels.tensor_core import MODES, SHORT_SUMS, TENSOR_STAGES, TensorForm, direct, persistent, split
from numba_gemm.kernels.tensor_core.stage import BATCH_STEPS
from numba_gemm.runtime import epilogue

CC = (9, 0)
ALL_MODES = MODES | {short.name: short for short in SHORT_SUMS.values()}
NAMES = {short.name: name for name, short in SHORT_SUMS.items()}  # the precisions that modes are for, if not their own


def runs(stage: str, index: int, mode: str) -> bool:
    """Whether a configuration is one for a mode."""
    config = TENSOR_STAGES[stage].configs[index]
    fits = config.BN <= 128 or len(ALL_MODES[mode].products) == 1
    return fits and (TENSOR_STAGES[stage].complete or mode in ("tf32x3", "bf16x6"))


KEPT = ("one_warpgroup", "bulk_copies", "producer_consumer", "wide_tiles")  # stages whose sums stay in tensor cores


def bound(stage: str, mode: str, k: int) -> float:
    """Of a stage's errors over abs(A) @ abs(B): a mode's own, and what each addition cuts off sums that are kept."""
    from numba_gemm.models.accuracy import MODE_BOUNDS

    additions = len(ALL_MODES[mode].products) * 4 * -(-k // ALL_MODES[mode].slot_k) if stage in KEPT else 0
    return MODE_BOUNDS[NAMES.get(mode, mode)] + additions * 2.0**-23


@functools.cache
def compiled_stage(name: str, index: int, mode: str, cc: tuple[int, int] = CC) -> Any:
    """The cubin of a stage's configuration."""
    stage = TENSOR_STAGES[name]
    return split_products.compile_product(stage, stage.configs[index], TensorForm(ALL_MODES[mode]), cc)


@functools.cache
def compiled_split(mode: str) -> Any:
    """The cubin of a mode's splitting kernel."""
    return split_products.compile_split(ALL_MODES[mode], CC)


@functools.cache
def compiled_extremes() -> Any:
    """The cubin of the kernel that finds the largest elements."""
    return split_products.compile_extremes(CC)


def gelu(value: Any, row: Any, column: Any, bias: Any) -> Any:
    """An epilogue that keeps loops of many turns around it from being unrolled."""
    return 0.5 * value * (1 + math.erf(value * 0.7071067811865476)) + bias[column]


def compiled_epilogue() -> Any:
    """The cubin of the mode that has the most registers in use, with that epilogue."""
    form = TensorForm(MODES["bf16x6"], epilogue.prepared(gelu, 1), 1)
    return split_products.compile_product(persistent.STAGE, persistent.STAGE.configs[0], form, CC)


# Configurations and layouts of operands that are not split: all of the ones, each of the others.
DIRECT = [(index, "NN") for index in range(len(direct.CONFIGS))] + [(0, "NT"), (0, "TT")]


@functools.cache
def compiled_direct(index: int, letters: str) -> Any:
    """The cubin of such a kernel."""
    return direct_products.compile_kernel(direct.CONFIGS[index], TensorForm(direct.MODE), letters)


def compiled_batched() -> Iterator[Any]:
    """The cubins of a scaled mode for a batch."""
    form = TensorForm(MODES["fp16x3"], batched=True)
    yield split_products.compile_product(persistent.STAGE, persistent.STAGE.configs[0], form, CC)
    yield split_products.compile_split(form.mode, CC, batched=True)
    yield split_products.compile_extremes(CC, batched=True)


class Loaded:
    """A kernel of a cubin, on the device."""

    def __init__(self, cubin: Any, block: int, shared: int = 0) -> None:
        from cuda.bindings import driver

        from numba_gemm.runtime.driver import call

        self._library = call(driver.cuLibraryLoadData, cubin.code, [], [], 0, [], [], 0)
        kernel = call(driver.cuLibraryGetKernel, self._library, cubin.name.encode())
        if shared > 48 << 10:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call(driver.cuKernelSetAttribute, attribute, shared, kernel, 0)
        self._function, self._block, self._shared = driver.CUfunction(int(kernel)), block, shared

    def __call__(self, grid: tuple[int, int], *values: Any) -> None:
        from cuda.bindings import driver

        from numba_gemm.runtime.compiler import KernelArguments
        from numba_gemm.runtime.driver import call

        arguments = KernelArguments(values)
        shape = (*grid, 1, self._block, 1, 1)
        call(driver.cuLaunchKernel, self._function, *shape, self._shared, 0, arguments.address, 0)


def words(array: Any) -> tuple[int, ...]:
    """A device array as a kernel's matrix."""
    return (array.__cuda_array_interface__["data"][0], *array.shape, *array.strides)


@functools.cache
def loaded_split(mode: str) -> Loaded:
    return Loaded(compiled_split(mode), split.THREADS)


@functools.cache
def loaded_extremes() -> Loaded:
    return Loaded(compiled_extremes(), split.THREADS)


@functools.cache
def loaded_stage(name: str, index: int, mode: str) -> Loaded:
    config = TENSOR_STAGES[name].configs[index]
    return Loaded(compiled_stage(name, index, mode), config.threads, config.dynamic_shared(ALL_MODES[mode]))


def product(a: Any, b: Any, c: Any, mode: str, stage: str, *, index: int = 0, alpha: float = 1.0, beta: float = 0.0):
    """``c = alpha * a @ b + beta * c`` of Numba's device arrays, on the default stream."""
    import numpy as np
    from numba import cuda

    config = TENSOR_STAGES[stage].configs[index]
    (m, k), n = a.shape, b.shape[1]
    pointer, *_, b_down, b_across = words(b)
    # Both as (mn, k): B by its strides, since Numba's `.T` copies.
    x, y = words(a), (pointer, n, k, b_across, b_down)
    division = split_products.divide(ALL_MODES[mode], m, n, k, 132, config)
    memories = [cuda.to_device(np.full(shape, np.nan, np.float32)) for shape in division.parts]
    parts = [words(memory) for memory in memories]
    if ALL_MODES[mode].scaled:
        loaded_extremes()((division.extreme_blocks, 1), x, parts[2], y, parts[3], (0,) * 4)
        loaded_split(mode)((division.split_blocks, 1), x, parts[0], parts[2], y, parts[1], parts[3], (0,) * 6)
    else:
        loaded_split(mode)((division.split_blocks, 1), x, parts[0], y, parts[1], (0,) * 4)
    run = loaded_stage(stage, index, mode)
    if TENSOR_STAGES[stage].complete:
        run((division.blocks, 1), alpha, *parts[:2], beta, words(c), words(a), words(b), (0,) * BATCH_STEPS)
    else:
        run((-(-n // config.BN), -(-m // config.BM)), alpha, *parts[:2], beta, words(c))
    cuda.synchronize()


def run_all() -> None:
    """Run every stage in every configuration, two block tiles a side, three slots along k, the last cut short."""
    import numpy as np
    from numba import cuda

    for name, stage in TENSOR_STAGES.items():
        for index, config in enumerate(stage.configs):
            for mode in ALL_MODES:
                if not runs(name, index, mode):
                    continue
                m, n, k = config.BM + 13, config.BN + 19, 2 * ALL_MODES[mode].slot_k + 3
                a, b = (np.random.default_rng(m).standard_normal(size).astype(np.float32) for size in ((m, k), (k, n)))
                c = cuda.to_device(np.full((m, n), np.nan, np.float32))
                product(cuda.to_device(a), cuda.to_device(b), c, mode, name, index=index)
                error = np.abs(c.copy_to_host() - a.astype(np.float64) @ b) / (np.abs(a.astype(np.float64)) @ np.abs(b))
                print(name, config.name, mode, "right" if error.max() <= bound(name, mode, k) else "WRONG", flush=True)


def main(part: str) -> None:
    """Compile a stage in all its configurations and modes; or, as part "others", all else."""
    from numba_gemm.inspect import sass

    def show(cubin: Any, **described: Any) -> None:
        (instructions,) = sass.functions(sass.disassemble(cubin.code)).values()
        row = {
            "name": cubin.name,
            "registers": cubin.registers,
            "local": cubin.local,
            "spills": cubin.spill_stores + cubin.spill_loads,
            "log": cubin.log,
            "opcodes": sass.instruction_mix(instructions),
        }
        print(json.dumps(described | row), flush=True)

    if part == "others":
        show(compiled_extremes(), stage="extremes")
        for index, letters in DIRECT:
            config = direct.CONFIGS[index]
            show(compiled_direct(index, letters), stage="direct", mode=letters, BM=config.BM, claim=config.claim)
        for cubin in compiled_batched():
            show(cubin, stage="batched", mode="fp16x3")
        show(compiled_epilogue(), stage="epilogue")
        for mode in ALL_MODES:
            show(compiled_split(mode), mode=mode, stage="split")
        return
    stage = TENSOR_STAGES[part]
    for mode in ALL_MODES:
        for index, config in enumerate(stage.configs):
            if runs(part, index, mode):  # for the oldest that has its instructions
                show(compiled_stage(part, index, mode, stage.min_cc), mode=mode, stage=part, claim=config.claim)


if __name__ == "__main__":
    run_all() if sys.argv[1:] == ["--run"] else main(sys.argv[1])
