"""Compile, cache and launch kernels; no policy, no array library."""
