"""Device vocabulary: one idea per file, each with a twin for Numba's CUDA simulator or a line that says it has none."""
