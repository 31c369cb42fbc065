"""Benchmark harness behind ``bench.py``: cases, measurement, verification and reports."""
