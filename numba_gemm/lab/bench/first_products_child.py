"""One process of `numba_gemm.lab.bench.first_products`: imports nothing before it looks at the clock."""

import time

BEGIN = time.perf_counter()

import importlib  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from typing import Any  # noqa: E402

ROWS = 4096  # tokens of a batch
LAYERS = ((6144, 2048), (2048, 2048), (8192, 2048), (50257, 2048), (2048, 8192))  # outputs and inputs
ODD = (
    *((4093, 4099, 1021), (2047, 2049, 1023), (3001, 3007, 2011)),
    *((8191, 8193, 1025), (5003, 1999, 3001), (1023, 1025, 511)),
)
KINDS = ("one product", "training step", "odd shapes")


def products(kind: str) -> Iterator[tuple[tuple[int, int, int], str]]:
    """Yield M, N and K of products, and the layouts of A and B."""
    if kind == "one product":
        yield (1024, 1024, 1024), "NN"
    elif kind == "odd shapes":
        for shape in ODD:
            yield shape, "NN"
    else:
        for outputs, inputs in LAYERS:
            yield (ROWS, outputs, inputs), "NT"  # forward
            yield (ROWS, inputs, outputs), "NN"  # gradient of the inputs
            yield (outputs, inputs, ROWS), "TN"  # gradient of the weights


def measured(kind: str, precision: Any) -> dict[str, float]:
    """Return the seconds of imports, of making a context, and of the first products, with those of torch.matmul."""
    import numpy as np

    imported = time.perf_counter()
    torch: Any = None if kind == "one product" else importlib.import_module("torch")
    begin = time.perf_counter()
    from numba_gemm import tiled_sgemm
    from numba_gemm.runtime.device import synchronize
    from numba_gemm.runtime.driver import call, primary_context

    loaded = time.perf_counter()
    if torch is None:
        from cuda.bindings import driver

        call(driver.cuCtxSetCurrent, primary_context(0))
    else:
        torch.zeros(1, device="cuda")
    made = time.perf_counter()
    took = theirs = 0.0

    def operand(rows: int, cols: int, layout: str) -> Any:
        if torch is None:
            return np.ones((rows, cols), np.float32)
        return torch.ones(rows, cols, device="cuda") if layout == "N" else torch.ones(cols, rows, device="cuda").T

    for (m, n, k), layout in products(kind):
        a, b = operand(m, k, layout[0]), operand(k, n, layout[1])
        synchronize()
        start = time.perf_counter()
        c = tiled_sgemm(a, b, precision=precision)
        synchronize()
        took += time.perf_counter() - start
        if float(c[0, 0]) != k or float(c[m - 1, n - 1]) != k:
            raise RuntimeError(f"a product of ones is {float(c[0, 0])} and {float(c[m - 1, n - 1])}; expected {k}")
        if torch is not None:
            start = time.perf_counter()
            torch.matmul(a, b)
            synchronize()
            theirs += time.perf_counter() - start
    imports = imported - BEGIN + loaded - begin
    return {"imports_s": imports, "context_s": made - loaded, "products_s": took, "torch_matmul_s": theirs}


if __name__ == "__main__":
    print(json.dumps(measured(*sys.argv[1:])))
