"""Kernels that run on the GPU: one stage per file, in two ladders."""
