"""Compile a kernel with the changes to Numba's front end and without them, in a process of its own.

``python compile_twice.py NAME`` prints, as JSON: whether the machine code is the same; the number of its sections; and
Python's calls with the changes and without, 0 unless they are counted.
"""

from __future__ import annotations

import gc
import json
import sys
from contextlib import nullcontext
from typing import Any

from numba import cuda
from numba.core.types.functions import BaseFunction
from numba.cuda.compiler import CUDACompiler
from numba.cuda.dispatcher import CUDADispatcher

from numba_gemm.kernels import STAGES
from numba_gemm.kernels.ladder.stage import ANY, WHOLE, Variant
from numba_gemm.kernels.step import Kernel
from numba_gemm.kernels.tensor_core import TENSOR_PRECISIONS, TensorVariant
from numba_gemm.kernels.tensor_core.decomposition import preparing_kernels
from numba_gemm.runtime import compilation, compiler
from numba_gemm.runtime import epilogue as epilogues

COUNTED = "coalesced"  # counting takes as long as compiling
# NVVM orders tiles of four columns for 12.0 in another way if an address is a constant's sum only after inlining.
OTHER_CCS = {"four columns": (12, 0)}
# With the changes, these are compiled before. LLVM IR is kept for another compute capability, and device functions are
# for another kernel.
COMPILED_BEFORE = {
    "naive": [("naive", (8, 0))],
    "decompose": [("decompose", (12, 0))],
    "whole": [("wider", (9, 0)), ("any", (9, 0))],
}


def clipped(value: Any, row: Any, column: Any, bias: Any) -> Any:
    """An epilogue that only the complete pipeline compiles."""

    def clip(x: Any) -> Any:
        return min(max(x, 0.0), 6.0)

    return clip(value + bias[column])


def kernel_of(name: str) -> Kernel:
    """Return the kernel of a name."""
    if name == "decompose":
        return preparing_kernels(TENSOR_PRECISIONS["bf16x6"], False)[0]
    stage: Any = STAGES.get(name, STAGES["stream_k"])
    if name == "persistent":
        config = next(one for one in stage.configs if one.name.startswith("64x128"))
        return stage.kernel_of(config, TensorVariant(TENSOR_PRECISIONS["bf16x6"]))
    small = next(one for one in STAGES["stream_k"].configs if one.BM == one.BN == 32)
    if name in ("whole", "wider", "any"):
        wider, config = STAGES["async_copy"].configs[-2:]
        return STAGES["async_copy"].kernel_of(wider if name == "wider" else config, ANY if name == "any" else WHOLE)
    if name == "epilogue":
        return stage.kernel_of(small, Variant("along4", "any", False, epilogues.prepared(clipped, 1), 1))
    if name in ("unaligned", "four columns"):
        return stage.kernel_of(
            small if name == "four columns" else stage.configs[0], Variant("along1", "across1", False)
        )
    b = "along1" if name == "thin" else "across4"  # its first tiles have one column, which is no row of vectors
    return stage.kernel_of(stage.configs[0], Variant("along1", b, False) if stage.schedule else False)


def compiled(name: str) -> tuple[list[bytes], int]:
    """Return the machine code of a kernel, and Python's calls."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count if name == COUNTED else None)
    try:
        cubin = compilation.compile_kernel(kernel_of(name), OTHER_CCS.get(name, (9, 0)), keep_ptx=False)
    finally:
        sys.setprofile(None)
    return compiler.machine_code(cubin), calls


if __name__ == "__main__":
    cuda.compile_ptx(lambda: None, (), cc=(9, 0, "a"))  # Numba's start is not counted
    before = BaseFunction.get_call_type, CUDACompiler.define_pipelines
    for other, cc in COMPILED_BEFORE.get(sys.argv[1], ()):
        compilation.compile_kernel(kernel_of(other), cc, keep_ptx=False)
    code, calls = compiled(sys.argv[1])
    assert before == (BaseFunction.get_call_type, CUDACompiler.define_pipelines), "a change was not undone"
    compiler.faster = nullcontext
    compilation._built.cache_clear()
    for one in gc.get_objects():  # device functions are shared by kernels
        if isinstance(one, CUDADispatcher):
            one.overloads.clear()
    code_without, calls_without = compiled(sys.argv[1])
    print(json.dumps([code == code_without, len(code), calls, calls_without]))
