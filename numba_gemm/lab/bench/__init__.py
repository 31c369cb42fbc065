"""The harness behind ``bench.py``: what is measured, how, and what is said about it.

Importing this package imports neither numba nor an array library, so that ``bench.py`` can choose the simulator
first and ``python -m numba_gemm.lab.bench.readme`` runs on a machine without either.
"""
