"""The compiled kernel that converts operands, for test_dtypes.py."""

from __future__ import annotations

import re
from typing import Any

# Loads and stores whose instruction does not name the memory.
GENERIC = re.compile(r"\b(?:ld|st)\.(?:v[24]\.)?[bfsu]\d+")


def result(first: str, second: str) -> dict[str, Any]:
    """Compile the kernel for operands of these dtypes, and describe its code."""
    from numba_gemm.kernels.conversion import conversion_kernel
    from numba_gemm.runtime.compiler import compile_cubin

    kernel = conversion_kernel(first, second)
    made = compile_cubin(
        kernel.build(kernel.config, kernel.variant), kernel.signature(kernel.variant), (9, 0), name=kernel.name
    )
    return {
        "local": made.local,
        "spills": made.spill_loads + made.spill_stores,
        "registers": made.registers,
        "generic": GENERIC.findall(made.ptx),
        "vectors": len(re.findall(r"ld\.global\.v4", made.ptx)),
    }
