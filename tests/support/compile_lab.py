"""A child process of test_memory_lab.py: compiles the laboratory's kernels, and prints each as a line of JSON."""

from __future__ import annotations

import json
import re
import traceback

from numba.cuda import types

from numba_gemm.lab.registry import MEMORY, load
from numba_gemm.runtime.compiler import compile_cubin

CCS = ((8, 0), (9, 0))
COPIES = re.compile(r"cp\.async\.\w+\.shared\.global \[[^]]+\], \[[^]]+\], (\d+)")


def main() -> None:
    for name in (*MEMORY, "ceilings"):
        for kernel, (function, signature) in load(name).kernels.items():
            for cc in CCS:
                line = {"experiment": name, "kernel": kernel, "cc": cc}
                try:
                    parameters = eval(f"({signature},)", vars(types).copy())
                    made = compile_cubin(function, parameters, cc, name=kernel)
                    line |= {"registers": made.registers, "local": made.local, "spills": made.spill_stores}
                    line["copies"] = sorted({int(size) for size in COPIES.findall(made.ptx)})
                except Exception:
                    line |= {"error": traceback.format_exc()}
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
