"""Generation of README's tables and of the stages' measurements: ``python -m numba_gemm.lab.bench.readme``."""
