"""A child process of test_launchable.py: compiles kernels for Numba arrays, and prints a line of JSON for each.

Arguments are the names of stages. It runs without the simulator, which has no compiler.
"""

from __future__ import annotations

import json
import re
import sys

# Loads and stores whose instruction does not name the memory.
GENERIC = re.compile(r"\b(?:ld|st)\.(?:v[24]\.)?[bfsu]\d+")


def main() -> None:
    from numba.cuda import types

    from numba_gemm import launchable
    from numba_gemm.runtime.compiler import compile_cubin

    for stage in sys.argv[1:]:
        for contiguous, layout in ((True, "C"), (False, "A"), (True, "A")):
            kernel, *_ = launchable(stage, 512, 512, 512, contiguous=contiguous)
            array = types.Array(types.float32, 2, layout)
            result = {"stage": stage, "contiguous": contiguous, "layout": layout}
            try:
                made = compile_cubin(kernel, (types.float64, array, array, types.float64, array), (9, 0), name=stage)
                generic = GENERIC.findall(made.ptx)
                result |= {"local": made.local, "generic": generic, "vectors": "v4.f32" in made.ptx}
            except Exception as error:
                result["error"] = f"{type(error).__name__}: {error}"
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
