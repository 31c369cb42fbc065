"""Benchmark harness behind ``bench.py``: cases, measurement, verification and reports.

Importing this package imports neither numba nor an array library, so that ``bench.py`` can choose the simulator
first and ``python -m numba_gemm.lab.bench.readme`` runs on a machine without either.
"""
