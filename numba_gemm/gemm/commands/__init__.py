"""Subcommands of ``numba-gemm`` about products: explain, autotune, precompile, cache."""
