"""Time that a process waits for its first products: `python -m numba_gemm.lab.bench.first_products`."""
