"""Kernels of experiments, compiled for test_memory_lab.py, test_lab_products.py and test_bench.py."""

from __future__ import annotations

import re
from typing import Any

COPIES = re.compile(r"cp\.async\.\w+\.shared\.global \[[^]]+\], \[[^]]+\], (\d+)")


def compiled(name: str, cc: tuple[int, int]) -> dict[str, Any]:
    """Return, by kernel of an experiment, local memory, widths of asynchronous copies, and the cubin in hex."""
    from numba.cuda import types

    from numba_gemm.lab.registry import load
    from numba_gemm.runtime.compiler import compile_cubin

    found = {}
    for kernel, (function, signature) in load(name).kernels.items():
        made = compile_cubin(function, eval(f"({signature},)", vars(types).copy()), tuple(cc), name=kernel)
        copies = sorted({int(size) for size in COPIES.findall(made.ptx)})
        found[kernel] = {"local": made.local, "copies": copies, "code": made.code.hex()}
    return found
