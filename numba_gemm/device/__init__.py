"""Device vocabulary: one idea per file, each with a twin for Numba's CUDA simulator or a line that says it has none.

Importing this package imports neither Numba nor CUDA, so that `numba_gemm.simulator.probe` can look for a GPU before
Numba decides between hardware and simulator.
"""
