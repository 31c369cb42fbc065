"""Comparison of the public function's performance with its targets: ``numba-gemm lab targets``."""
