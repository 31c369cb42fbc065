"""Machine code of the kernels of the experiment `energy`, for test_energy.py."""

from __future__ import annotations

from dataclasses import replace

from numba_gemm.kernels.tensor_core import TENSOR_PRECISIONS, TENSOR_STAGES, TensorVariant


def opcodes() -> dict[str, dict[str, int]]:
    """Return the instructions of `persistent`, and of three kernels that leave something out, by opcode."""
    from numba_gemm.inspect import report, sass
    from numba_gemm.lab.bench import energy
    from numba_gemm.runtime.compilation import compile_kernel

    stage, found = TENSOR_STAGES["persistent"], {}
    kernel = stage.kernel_of(stage.configs[0], TensorVariant(TENSOR_PRECISIONS[energy.PRECISION]))
    for name in ("", energy.NO_ADDITIONS, energy.ONLY_INSTRUCTIONS, energy.ONLY_COPIES):
        build = energy.BUILDS[name] if name else kernel.build
        made = sass.functions(sass.disassemble(compile_kernel(replace(kernel, build=build), (9, 0)).code))
        (own,) = report.kernels_own(made)
        found[name] = dict(sass.instruction_mix(made[own]))
    return found
