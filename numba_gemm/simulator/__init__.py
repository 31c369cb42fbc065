"""Run kernels as Python threads, without a GPU."""
