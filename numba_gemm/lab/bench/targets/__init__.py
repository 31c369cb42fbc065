"""Comparison of the public function's performance with its targets: ``python -m numba_gemm.lab targets``."""
