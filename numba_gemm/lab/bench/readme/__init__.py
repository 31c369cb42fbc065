"""Generated tables of README and docs/, and the stages' measurements: ``python -m numba_gemm.lab.bench.readme``."""
