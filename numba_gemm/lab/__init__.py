"""Measure: benchmarks, the memory laboratory, and helpers of the notebooks."""
