"""Kernels compiled for Numba arrays, for test_launchable.py."""

from __future__ import annotations

import re
from typing import Any

# Loads and stores whose instruction does not name the memory.
GENERIC = re.compile(r"\b(?:ld|st)\.(?:v[24]\.)?[bfsu]\d+")


def results(stage: str) -> list[dict[str, Any]]:
    """Compile a stage for arrays of each layout, and describe its code or the error."""
    from numba.cuda import types

    from numba_gemm import launchable
    from numba_gemm.runtime.compiler import compile_cubin

    found = []
    for contiguous, layout in ((True, "C"), (False, "A"), (True, "A")):
        kernel, *_ = launchable(stage, 512, 512, 512, contiguous=contiguous)
        array = types.Array(types.float32, 2, layout)
        result: dict[str, Any] = {"contiguous": contiguous, "layout": layout}
        try:
            made = compile_cubin(kernel, (types.float64, array, array, types.float64, array), (9, 0), name=stage)
            generic = GENERIC.findall(made.ptx)
            result |= {"local": made.local, "generic": generic, "vectors": "v4.f32" in made.ptx}
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}"
        found.append(result)
    return found
