"""Solutions of the puzzles compiled for Numba arrays, for test_puzzles.py."""

from __future__ import annotations

import re


def instructions(name: str) -> list[str]:
    """Compile a puzzle's solution for compute capability 9.0 and return the accesses, barriers and sums in its PTX."""
    from numba import cuda, float32, types

    from numba_gemm.puzzles import puzzle

    task = puzzle(name)
    arrays = {array: types.Array(float32, formula.count(",") + 1, "C") for array, formula in task.shapes.items()}
    signature = types.void(*(arrays.get(parameter, float32) for parameter in task.parameters))
    ptx, _ = cuda.compile_ptx(task.kernel.py_func, signature, cc=(9, 0))
    found = re.findall(r"\b(?:ld|st|cp|fma|add|mul|bar)\.(?:global|local|shared|async|rn|f32|f64|sync)[.\w]*", ptx)
    return sorted(set(found))
